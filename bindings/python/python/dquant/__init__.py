"""Training batches from Dquant: blended, shuffled and narrowed beside the data, read in place.

    import dquant

    with dquant.Stream("corpora/*.bin", seq_len=2048, narrow="u16", batches=100) as stream:
        for batch in stream:
            tokens = batch.numpy()  # uint16 [32, 2048], a read-only view, no copy
            ...
            del tokens

Local files need no daemon. `dq://HOST/NAME` is a dataset at a storage target: with `offload=True` the DPU daemon of this
machine does the work; without it the same engine runs in threads of this process. The batches are the same to the
byte. `Stream` iterates over batches, `open` returns a file that copies them, `dquant.torch` has datasets of PyTorch. Every exception is a `dquant.Error` with a message and a hint.
"""

from ._errors import (
    Error,
    ForkError,
    InvalidError,
    SlotsHeldError,
    StateError,
    StreamError,
    UnreachableError,
)
from ._native import Batch, File, Stream, open
from ._records import Dataset, Drawn, Opened

__all__ = [
    "Batch",
    "Dataset",
    "Drawn",
    "Error",
    "File",
    "ForkError",
    "InvalidError",
    "Opened",
    "SlotsHeldError",
    "StateError",
    "Stream",
    "StreamError",
    "UnreachableError",
    "open",
]
