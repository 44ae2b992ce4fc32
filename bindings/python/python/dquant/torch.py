"""Streams as datasets of PyTorch.

    from dquant.torch import TokenDataset
    from torch.utils.data import DataLoader

    dataset = TokenDataset("corpora/*.bin", seq_len=2048, batch_size=32, narrow="u16", widen="i64", pairs=True)
    for x, y in DataLoader(dataset, batch_size=None):
        ...

Batches are made by the stream, so the loader must not batch again: `batch_size=None`. One process reads the stream:
with worker processes the first worker delivers every batch, in order, and the others nothing, because the work is not
theirs but the DPU's.
"""

import contextlib
import os
import sys

import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from . import _native
from ._errors import InvalidError

__all__ = ["TokenDataset"]

# Of a pass that has not begun.
NOWHERE = -1


class TokenDataset(IterableDataset):
    """A stream as an `IterableDataset` of whole batches; arguments are those of `dquant.Stream`.

    Items are tensors `[samples, tokens]`, or tuples of them: inputs and labels with `pairs`, positions and documents with
    `positions`. `copy=True` (the default) copies each batch into memory of its own, which may be written and kept.
    `copy=False` returns views of the ring: they must not be written, and a loop that keeps as many as the ring holds
    gets `dquant.SlotsHeldError`.

    Every iteration is the next pass: after `batches=1000` or `epochs=1` the second one delivers the batches that follow
    those of the first, in another order of the same data. Without either, an iteration goes on where the last one
    stopped. `set_epoch` chooses the pass, and with `repeat=True`, as for evaluation, every iteration is the same one.

    `state_dict` and `load_state_dict` are what `torchdata.stateful_dataloader.StatefulDataLoader` looks for: the position
    is that behind the batch yielded last, and the beginning of the next pass after an iteration that ended.
    """

    def __init__(self, source, plan=None, offload=True, *, copy=True, repeat=False, **options):
        super().__init__()
        self._arguments = (source, plan, offload)
        self._options = options
        self._copy = copy
        self._repeat = repeat
        self._state = None
        self._resume = None
        self._rename = None
        self._length = options.get("batches")
        # The next pass, and where the last one stopped. A worker's iteration counts, too, so all processes share them.
        self._next = torch.tensor([options.get("epoch") or 0, NOWHERE], dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        """The next iteration is the pass of this number, from 0."""
        if self._length is None and not self._options.get("epochs"):
            raise InvalidError("a stream without end has no passes", "give batches or epochs")
        self._next[0], self._next[1] = epoch, NOWHERE
        self._resume = self._state = None

    def __iter__(self):
        refuse_stacking(sys._getframe(1))
        return self._batches()

    def _batches(self):
        worker = get_worker_info()
        if worker is not None and worker.id != 0:
            return
        resume, self._resume = self._resume, None
        number = int(self._next[0])
        stream = self._open(number, resume)
        try:
            first, start = self._state["next_batch"], self._state["next_sample"]
            samples = stream.batch_samples
            while (batch := next(stream, None)) is not None:
                self._state["next_batch"] = batch.next_batch
                self._state["next_sample"] = start + (batch.next_batch - first) * samples
                self._next[1] = self._state["next_sample"]
                item = self._tensors(batch)
                del batch
                yield item
                # The last reference to a view of the ring, where nobody has kept another.
                del item
            # Batches at the end may be left out.
            self._state = stream.state_dict()
        finally:
            # A loop may keep its last item; views stay readable.
            with contextlib.suppress(BufferError):
                stream.close()
        if self._repeat:
            self._state = None

    def _open(self, number, resume):
        """The stream of a pass, or of the rest of the one that a position is in."""
        stream = self._stream(number)
        self._length = self._length_of(stream)
        beginning = stream.state_dict()
        at = int(self._next[1])
        if resume is not None and self._length is not None and "next_sample" in resume:
            # The pass of the position; at the end of one, the next.
            step = self._length * stream.data_parallel[1] * stream.batch_samples
            passed = number + (resume["next_sample"] - beginning["next_sample"]) // step
            if passed != number and passed >= 0:
                stream.close()
                number = passed
                stream = self._stream(number)
        elif resume is None and self._length is None and at != NOWHERE and not self._repeat:
            resume = {**beginning, "next_sample": at, "next_batch": at // stream.batch_samples}
        if self._length is not None and not self._repeat:
            self._next[0] = number + 1
        if resume is not None:
            stream.load_state_dict(resume, rename=self._rename)
        self._state = stream.state_dict()
        return stream

    def _stream(self, number):
        options = {**self._options, "epoch": number} if number else {**self._options, "epoch": None}
        return _native.Stream(*self._arguments, **options)

    @staticmethod
    def _length_of(stream):
        try:
            return len(stream)
        except TypeError:
            return None

    def __len__(self):
        """Batches of a pass on this rank, where the option `batches` or `epochs` bounds it."""
        if self._length is None and self._options.get("epochs"):
            # How long an epoch is, only the files say.
            with self._stream(0) as stream:
                self._length = len(stream)
        if self._length is None:
            raise TypeError("a stream without end has no length: give batches or epochs")
        return self._length

    def __getstate__(self):
        # A worker that is spawned, not forked, knows no torch.distributed.
        state = self.__dict__.copy()
        known = {"rank", "world_size"} & self._options.keys() or "RANK" in os.environ
        if not known and distributed.is_available() and distributed.is_initialized():
            place = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            state["_options"] = {**self._options, **place}
        return state

    def _tensors(self, batch):
        tensors = batch.torch(copy=False)
        if isinstance(tensors, tuple):
            return tuple(self._tensor(tensor) for tensor in tensors)
        return self._tensor(tensors)

    def _tensor(self, tensor):
        # Two pieces of a sample become one row.
        return tensor.clone().contiguous().view(tensor.shape[0], -1) if self._copy else tensor

    def state_dict(self):
        """The position, as a dictionary of numbers, strings and lists; empty before the first iteration."""
        state = self._resume if self._state is None else self._state
        return {} if state is None else dict(state)

    def load_state_dict(self, state, *, rename=None):
        """The next iteration starts at this position. What does not fit is refused when it starts.

        `rename` is that of `dquant.Stream.load_state_dict`.
        """
        self._resume = dict(state) or None
        self._rename = rename
        self._state = None


def refuse_stacking(caller):
    """Refuses a loader that makes batches of batches: it iterates over the dataset with this frame."""
    if caller.f_code.co_name == "__init__" and caller.f_locals.get("auto_collation") is True:
        message = "the DataLoader would stack batches of the stream into larger ones"
        raise InvalidError(message, "give the loader batch_size=None, and the stream the batch_size")
