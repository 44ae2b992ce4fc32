"""Types of the compiled module. The docstrings are in the module: `help(dquant.Stream)`."""

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self, SupportsFloat, TypedDict, Unpack, final, type_check_only

import numpy.typing as npt
from typing_extensions import Buffer

from ._records import Drawn, Opened

__all__ = ["Batch", "File", "Stream", "open"]

Source = str | PathLike[str] | Sequence[str | PathLike[str]] | Mapping[str, SupportsFloat]

@type_check_only
class Options(TypedDict, total=False):
    seq_len: int | None
    batch_size: int | None
    shuffle: bool | None
    pack: str | None
    filter: str | PathLike[str] | None
    keep: str | PathLike[str] | None
    dedup: bool | str | None
    remap: str | PathLike[str] | None
    wasm: tuple[str, str] | None
    narrow: str | None
    overflow: str | int | None
    bitpack: int | None
    compress: str | None
    compress_level: int | None
    compress_when: str | None
    quantize: str | None
    deliver: str | None
    widen: str | None
    pairs: bool | None
    ignore: int | None
    labels: str | None
    positions: bool | None
    loss_weights: bool | None
    missing_weight: SupportsFloat | None
    pad: int | None
    split: str | Sequence[SupportsFloat] | None
    part: str | None
    split_seed: int | None
    tokenizers: str | None
    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    tp: int | None
    cp: int | None
    pp: int | None
    cp_split: str | None
    group: str | None
    token: str | None
    dpu: str | None
    dpu_user: str | int | None
    dtype: str | None
    vocab: int | None
    seed: int | None
    first_batch: int | None
    batches: int | None
    epochs: int | None
    epoch: int | None
    evaluate: bool | None
    leave_out: Sequence[tuple[int, int]] | None
    slots: int | None
    slot_size: int | None
    roce: str | None
    memory: int | None
    reconnect: float | None

@final
class Batch(Buffer):
    @property
    def number(self) -> int: ...
    @property
    def next_batch(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def pairs(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def numpy(self, *, copy: bool = False) -> npt.NDArray[Any]: ...
    def torch(self, *, copy: bool | None = None) -> Any: ...
    @property
    def x(self) -> npt.NDArray[Any]: ...
    @property
    def y(self) -> npt.NDArray[Any]: ...
    @property
    def positions(self) -> npt.NDArray[Any]: ...
    @property
    def documents(self) -> npt.NDArray[Any]: ...
    @property
    def loss_weights(self) -> npt.NDArray[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Stream(Iterator[Batch]):
    def __new__(
        cls, source: Source, plan: str | None = None, offload: bool = True, **options: Unpack[Options]
    ) -> Self: ...
    @property
    def opened(self) -> Opened: ...
    @property
    def batch_samples(self) -> int: ...
    @property
    def data_parallel(self) -> tuple[int, int]: ...
    @property
    def next_batch(self) -> int: ...
    @property
    def epoch(self) -> int | None: ...
    @property
    def batches_per_epoch(self) -> int | None: ...
    @property
    def drawn(self) -> tuple[Drawn, ...] | None: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    def status(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(
        self, state: dict[str, Any], *, rename: Mapping[str | PathLike[str], str | PathLike[str]] | None = None
    ) -> None: ...
    def close(self) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Batch: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class File:
    def read(self, size: int = -1) -> bytes: ...
    def readinto(self, buffer: Buffer) -> int: ...
    def readable(self) -> bool: ...
    @property
    def batch_bytes(self) -> int: ...
    @property
    def opened(self) -> Opened: ...
    @property
    def next_batch(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def status(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

def open(name: Source, action: str, offload: bool = True, **options: Unpack[Options]) -> File: ...
