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
import copy
import operator
import os
import sys
import threading
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
    `positions`, then the weights of labels with `loss_weights`. `copy=True` (the default) copies each batch into memory of its own, which may be written and kept.
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
        self._repeat = repeat or bool(options.get("evaluate"))
        self._state = None
        # A position that was loaded: its number, the state, and what is renamed.
        self._resume = None
        self._length = options.get("batches")
        # The pass under way, and the sample behind it.
        self._number, self._end = 0, None
        self._begin_alone(torch.tensor([options.get("epoch") or 0, NOWHERE, 0], dtype=torch.int64))

    def _begin_alone(self, shared):
        """What a copy of a dataset has of its own."""
        # Of all processes that iterate, as a worker's iteration counts, too: the next pass; the sample where the last one
        # stopped; the number of the position that was loaded last, which is odd until an iteration has begun there.
        self._shared = shared.share_memory_()
        self._key = uuid.uuid4().hex
        # By iteration of a worker the stream for its tickets, and the number of the next ticket.
        self._served = {}
        # The one of them that delivered last.
        self._last = None
        self._lock = threading.Lock()
        _DATASETS[self._key] = self

    def _is_bounded(self):
        return any(self._options.get(name) for name in ("batches", "epochs", "evaluate"))

    def set_epoch(self, epoch):
        """The next iteration is the pass of this number, from 0."""
        if not self._is_bounded():
            raise InvalidError("a stream without end has no passes", "give batches or epochs")
        epoch = operator.index(epoch)
        if epoch < 0:
            raise InvalidError(f"there is no pass {epoch}", "passes count from 0")
        self._shared[0], self._shared[1] = epoch, NOWHERE
        # Nobody waits for a position any more.
        self._shared[2] += self._shared[2] % 2
        self._state = self._last = None

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
        # Alone: a stream that ranks share would end with one that leaves it.
        with self._open(alone=True) as stream:
            size, step = stream.batch_samples, stream.data_parallel[1] * stream.batch_samples
        state, iteration, count = self._state, uuid.uuid4().hex, 0
        left_out = state["leave_out"]

        def delivered(at):
            """The first step from here on that is not left out."""
            while self._end is None or at < self._end:
                if not any(first <= at < end for first, end in left_out):
                    return at
                at += step
            return None

        at = delivered(state["next_sample"])
        while at is not None:
            here, at = at, delivered(at + step)
            state["next_sample"], state["next_batch"] = here + step, (here + step) // size
            yield Ticket(self._key, iteration, self._number, count, here, left_out, at is None)
            count += 1
        if self._end is not None:
            state["next_sample"], state["next_batch"] = self._end, self._end // size
        if self._repeat:
            self._state = None

    def _redeem(self, iteration, number, count, at, left_out, is_last):
        """The batch of a ticket: of those of an iteration this number, which begins with this sample of the plan."""
        with self._lock:
            stream, expected = self._served.pop(iteration, (None, None))
            if stream is not None and expected != count:
                self._close(stream)
                stream = None
            if stream is None:
                # The first one, or one whose stream made room for others.
                while len(self._served) >= LOADERS:
                    self._close(self._served.pop(next(iter(self._served)))[0])
                stream = self._stream(number)
                position = {"next_sample": at, "next_batch": at // stream.batch_samples, "leave_out": left_out}
                stream.load_state_dict({**stream.state_dict(), **position})
            batch = next(stream, None)
            if batch is None:
                message = f"the stream ended before the batch of sample {at}"
                raise StreamError(message, "are the datasets as they were?")
            self._shared[1] = at + stream.data_parallel[1] * stream.batch_samples
            self._state, self._last = None, None if self._repeat and is_last else stream
            item = self._tensors(batch)
            del batch
            if is_last:
                self._close(stream)
            else:
                self._served[iteration] = (stream, count + 1)
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
        stream = self._open()
        try:
            first, start = self._state["next_batch"], self._state["next_sample"]
            samples = stream.batch_samples
            while (batch := next(stream, None)) is not None:
                self._state["next_batch"] = batch.next_batch
                self._state["next_sample"] = start + (batch.next_batch - first) * samples
                self._shared[1] = self._state["next_sample"]
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

    def _position(self):
        """The position that was loaded and at which no iteration has begun, and what is renamed in it."""
        loaded, (resume, self._resume) = int(self._shared[2]), (self._resume, None)
        if loaded % 2 == 0:
            return None, None
        if resume is None or resume[0] != loaded:
            message = "a position was loaded that this worker does not know"
            raise InvalidError(message, "load it before the workers begin, or leave persistent_workers out")
        self._shared[2] = loaded + 1
        return resume[1:]

    def _open(self, alone=False):
        """The stream of the next pass, or of the rest of the one that a loaded position is in."""
        resume, rename = self._position()
        number, counts = int(self._shared[0]), self._is_bounded() and not self._repeat
        if counts:
            # Before the stream is open: another loader takes the pass after this one.
            self._shared[0] = number + 1
        stream = self._stream(number, alone)
        self._length = self._length_of(stream)
        beginning = stream.state_dict()
        length = (self._length or 0) * stream.data_parallel[1] * stream.batch_samples
        at = int(self._shared[1])
        if resume is not None and self._length is not None and "next_sample" in resume:
            # The pass of the position; at the end of one, the next.
            passed = number + (resume["next_sample"] - beginning["next_sample"]) // length
            if passed != number and passed >= 0:
                stream.close()
                number = passed
                stream = self._stream(number, alone)
                beginning = stream.state_dict()
                if counts:
                    self._shared[0] = number + 1
        elif resume is None and self._length is None and at != NOWHERE and not self._repeat:
            resume = {**beginning, "next_sample": at, "next_batch": at // stream.batch_samples}
        self._number = number
        self._end = None if self._length is None else beginning["next_sample"] + length
        if resume is not None:
            stream.load_state_dict(resume, rename=rename)
        self._state, self._last = stream.state_dict(), None
        return stream

    def _stream(self, number, alone=False):
        options = {**self._options, "epoch": number or None}
        if alone:
            options |= {**self._place(), "group": None, "local_rank": None, "local_world_size": None, "slots": 2}
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
        if self._length is None and self._is_bounded():
            # How long an epoch is, only the files say.
            with self._stream(0) as stream:
                self._length = len(stream)
        if self._length is None:
            raise TypeError("a stream without end has no length: give batches or epochs")
        return self._length

    def __getstate__(self):
        # A worker that is spawned, not forked, knows no torch.distributed. Streams and locks are not for others.
        state = {**self.__dict__, "_served": {}, "_last": None, "_lock": None}
        known = {"rank", "world_size"} & self._options.keys() or "RANK" in os.environ
        if not known and distributed.is_available() and distributed.is_initialized():
            place = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            state["_options"] = {**self._options, **place}
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._shared = self._shared.share_memory_()
        # In a worker this is another process's dataset, and nobody sends it tickets.
        _DATASETS.setdefault(self._key, self)

    def __deepcopy__(self, memo):
        own = ("_shared", "_served", "_last", "_lock")
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name not in own})
        copied._begin_alone(self._shared.clone())
        return copied

    def __copy__(self):
        return self.__deepcopy__({})

    def _tensors(self, batch):
        tensors = batch.torch(copy=self._copy)
        if not self._copy:
            return tensors
        if isinstance(tensors, tuple):
            return tuple(map(flat, tensors))
        return flat(tensors)

    def state_dict(self):
        """The position, as a dictionary of numbers, strings and lists; empty before the first iteration."""
        if self._state is not None:
            return dict(self._state)
        if self._last is not None and get_worker_info() is None:
            return self._last.state_dict()
        if self._resume is not None and self._resume[0] == int(self._shared[2]):
            return dict(self._resume[1])
        return {}

    def load_state_dict(self, state, *, rename=None):
        """The next iteration starts at this position. What does not fit is refused when it starts.

        `rename` is that of `dquant.Stream.load_state_dict`.
        """
        self._resume = self._state = self._last = None
        if state:
            loaded = int(self._shared[2])
            self._shared[2] = loaded + 1 + loaded % 2
            self._resume = (int(self._shared[2]), dict(state), rename)


def flat(tensor):
    """The samples of a tensor, each in one row, where it sees two pieces of each."""
    return tensor if tensor.dim() == 2 else tensor.view(tensor.shape[0], -1)


def loader_of(caller):
    """How a loader treats items, if it is one that begins to iterate over a dataset in this frame."""
    fetches = caller.f_code.co_name == "__init__" and "auto_collation" in caller.f_locals
    return caller.f_locals if fetches else {}
