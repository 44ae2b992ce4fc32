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

from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from . import _native

__all__ = ["TokenDataset"]


class TokenDataset(IterableDataset):
    """A stream as an `IterableDataset` of whole batches; arguments are those of `dquant.Stream`.

    Items are tensors `[samples, tokens]`, or tuples of them: inputs and labels with `pairs`, positions and documents with
    `positions`. `copy=True` (the default) copies each batch into memory of its own, which may be written and kept.
    `copy=False` returns views of the ring: they must not be written, and a loop that keeps as many as the ring holds
    gets `dquant.SlotsHeldError`.

    `state_dict` and `load_state_dict` are what `torchdata.stateful_dataloader.StatefulDataLoader` looks for: the position
    is that behind the batch yielded last, and the beginning after an iteration that ended. A new iteration starts where
    a loaded state says, else at the beginning.
    """

    def __init__(self, source, plan=None, offload=True, *, copy=True, **options):
        super().__init__()
        self._arguments = (source, plan, offload)
        self._options = options
        self._copy = copy
        self._state = None
        self._resume = None

    def __iter__(self):
        worker = get_worker_info()
        if worker is not None and worker.id != 0:
            return
        resume, self._resume = self._resume, None
        stream = _native.Stream(*self._arguments, **self._options)
        beginning = stream.state_dict()
        try:
            if resume is not None:
                stream.load_state_dict(resume)
            self._state = stream.state_dict()
            first, start = self._state["next_batch"], self._state["next_sample"]
            samples = stream.batch_samples
            while (batch := next(stream, None)) is not None:
                self._state["next_batch"] = batch.next_batch
                self._state["next_sample"] = start + (batch.next_batch - first) * samples
                item = self._tensors(batch)
                del batch
                yield item
                # The last reference to a view of the ring, where nobody has kept another.
                del item
            # A whole epoch lies behind: who loads this state goes on with the next.
            self._state = beginning
        finally:
            # A loop may keep its last item; views stay readable.
            with contextlib.suppress(BufferError):
                stream.close()

    def __len__(self):
        """Batches of an epoch on this rank, where the option `batches` bounds it."""
        batches = self._options.get("batches")
        if batches is None:
            raise TypeError("a stream without end has no length: give batches")
        return batches

    def __getstate__(self):
        # A worker that is spawned, not forked, knows no torch.distributed.
        state = self.__dict__.copy()
        known = {"rank", "world_size"} & self._options.keys() or "RANK" in os.environ
        if not known and distributed.is_available() and distributed.is_initialized():
            place = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            state["_options"] = {**self._options, **place}
        return state

    def _tensors(self, batch):
        tensors = batch.torch()
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

    def load_state_dict(self, state):
        """The next iteration starts at this position. What does not fit is refused when it starts."""
        self._resume = dict(state) or None
        self._state = None
