"""Streams as datasets of PyTorch.

    from dquant.torch import TokenDataset
    from torch.utils.data import DataLoader

    dataset = TokenDataset("corpora/*.bin", seq_len=2048, batch_size=32, narrow="u16", widen="i64", pairs=True)
    for x, y in DataLoader(dataset, batch_size=None):
        ...

Batches are made by the stream, so the loader must not batch again: `batch_size=None`. One process reads the stream, because
the work is not that of workers but the DPU's. With worker processes the first one sends tickets, and the process that gets a
ticket reads the batch from its own ring: no batch is copied between processes. A loader with a `collate_fn`, or a dataset that
wraps this one, needs the batches in the worker: there the first worker reads the stream and sends copies.
"""

import contextlib
import os
import sys
import uuid
import weakref

import torch
from torch import distributed
from torch.utils.data import IterableDataset, default_convert, get_worker_info

from . import _native
from ._errors import InvalidError, StreamError

__all__ = ["TokenDataset"]

# Of a pass that has not begun.
NOWHERE = -1

# Iterations of workers that one dataset has streams for: more loaders at once are slow.
LOADERS = 2

# The datasets of this process, for tickets of its workers.
_DATASETS = weakref.WeakValueDictionary()


class Ticket:
    """A batch that the process takes from its own stream which receives this."""

    def __init__(self, dataset, *of):
        self._of = (dataset, *of)

    def __reduce__(self):
        return redeem, self._of


def redeem(key, *of):
    """The batch of a ticket."""
    dataset = _DATASETS.get(key)
    if dataset is None:
        message = "a ticket for a batch came to a process without the dataset"
        raise InvalidError(message, "iterate over the DataLoader where it was made, and keep its dataset")
    return dataset._redeem(*of)


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
        self._key = uuid.uuid4().hex
        # By iteration of a worker the stream for its tickets, and the number of the next ticket.
        self._served = {}
        # The pass under way, and the sample behind it.
        self._number, self._end = 0, None
        _DATASETS[self._key] = self

    def set_epoch(self, epoch):
        """The next iteration is the pass of this number, from 0."""
        if self._length is None and not self._options.get("epochs"):
            raise InvalidError("a stream without end has no passes", "give batches or epochs")
        self._next[0], self._next[1] = epoch, NOWHERE
        self._resume = self._state = None

    def __iter__(self):
        loader = loader_of(sys._getframe(1))
        if loader.get("auto_collation") is True:
            message = "the DataLoader would stack batches of the stream into larger ones"
            raise InvalidError(message, "give the loader batch_size=None, and the stream the batch_size")
        if get_worker_info() is not None and loader.get("collate_fn") is default_convert:
            return self._tickets()
        return self._batches()

    def _tickets(self):
        """What a worker sends in place of batches: the steps of a pass, of which it reads none."""
        if get_worker_info().id != 0:
            return
        resume, self._resume = self._resume, None
        # Alone: a stream that ranks share would end with one that leaves it.
        with self._open(int(self._next[0]), resume, alone=True) as stream:
            size, step = stream.batch_samples, stream.data_parallel[1] * stream.batch_samples
        state, iteration, count = self._state, uuid.uuid4().hex, 0
        at, left_out = state["next_sample"], state["leave_out"]
        while self._end is None or at < self._end:
            here, at = at, at + step
            state["next_sample"], state["next_batch"] = at, at // size
            if not any(first <= here < end for first, end in left_out):
                self._next[1] = at
                yield Ticket(self._key, iteration, self._number, count, here, left_out)
                count += 1
        if self._repeat:
            self._state = None

    def _redeem(self, iteration, number, count, at, left_out):
        """The batch of a ticket: of those of an iteration this number, which begins with this sample of the plan."""
        stream, expected = self._served.pop(iteration, (None, None))
        if expected != count:
            # The first one, or one whose stream made room for others.
            if stream is not None:
                self._close(stream)
            stream = self._stream(number)
            position = {"next_sample": at, "next_batch": at // stream.batch_samples, "leave_out": left_out}
            stream.load_state_dict({**stream.state_dict(), **position})
        batch = next(stream, None)
        if batch is None:
            raise StreamError(f"the stream ended before the batch of sample {at}", "are the datasets as they were?")
        self._served[iteration] = (stream, count + 1)
        if len(self._served) > LOADERS:
            self._close(self._served.pop(next(iter(self._served)))[0])
        item = self._tensors(batch)
        # As `default_convert` has it.
        return list(item) if isinstance(item, tuple) else item

    @staticmethod
    def _close(stream):
        # A loop may keep its last item; views stay readable.
        with contextlib.suppress(BufferError):
            stream.close()

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
            self._close(stream)
        if self._repeat:
            self._state = None

    def _open(self, number, resume, alone=False):
        """The stream of a pass, or of the rest of the one that a position is in."""
        stream = self._stream(number, alone)
        self._length = self._length_of(stream)
        beginning = stream.state_dict()
        length = (self._length or 0) * stream.data_parallel[1] * stream.batch_samples
        at = int(self._next[1])
        if resume is not None and self._length is not None and "next_sample" in resume:
            # The pass of the position; at the end of one, the next.
            passed = number + (resume["next_sample"] - beginning["next_sample"]) // length
            if passed != number and passed >= 0:
                stream.close()
                number = passed
                stream = self._stream(number, alone)
                beginning = stream.state_dict()
        elif resume is None and self._length is None and at != NOWHERE and not self._repeat:
            resume = {**beginning, "next_sample": at, "next_batch": at // stream.batch_samples}
        self._number = number
        self._end = None if self._length is None else beginning["next_sample"] + length
        if self._length is not None and not self._repeat:
            self._next[0] = number + 1
        if resume is not None:
            stream.load_state_dict(resume, rename=self._rename)
        self._state = stream.state_dict()
        return stream

    def _stream(self, number, alone=False):
        options = {**self._options, "epoch": number or None}
        if alone:
            options |= {**self._place(), "group": None, "local_rank": None, "local_world_size": None}
        return _native.Stream(*self._arguments, **options)

    def _place(self):
        """The rank of this trainer, where it is not an option."""
        if {"rank", "world_size"} & self._options.keys():
            return {}
        if distributed.is_available() and distributed.is_initialized():
            return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        return {}

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
        # A stream is not for others.
        state["_served"] = {}
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


def loader_of(caller):
    """How a loader treats items, if it is one that begins to iterate over a dataset in this frame."""
    fetches = caller.f_code.co_name == "__init__" and "auto_collation" in caller.f_locals
    return caller.f_locals if fetches else {}
