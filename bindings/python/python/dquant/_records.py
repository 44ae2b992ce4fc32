"""What a stream reports about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dataset:
    """One dataset of a stream, as its target describes it."""

    name: str
    """Path below the target's root."""
    format: str
    """Format of the file: flat, npy or megatron."""
    dtype: str
    """Type of its tokens, in the notation of the option `dtype`: u16, u32."""
    tokens: int
    """Number of its tokens."""
    data_offset: int
    """Offset of the first token in the file, in bytes."""
    fingerprint: int
    """Changes when the file is replaced or written."""
    content: int = 0
    """Fingerprint of its manifest, which stands for every byte of the file; 0 without a manifest."""
    documents: int = 0
    """Fingerprint of its documents as the plan takes them; 0 where the plan does not need them."""
    targets: int = 0
    """Fingerprint of which of their tokens are targets; 0 where it does not say so, or the plan does not need it."""
    loss_weights: int = 0
    """Changes when the file of its loss weights is replaced or written; 0 where it has none, or the plan does not need them."""
    loss_weights_content: int = 0
    """Fingerprint of their manifest; 0 without one."""
    filtered_documents: int = 0
    """Documents that the plan's filter dropped."""
    duplicate_documents: int = 0
    """Documents that the plan's deduplication dropped."""
    packed_samples: int = 0
    """Where documents are packed, the samples of an epoch."""
    packed_tokens: int = 0
    """Tokens of documents in them; the others are padding."""
    samples: int = 0
    """Samples of an epoch of it; 0 with an order of Megatron-core."""
    tokenizer: str = ""
    """What its manifest says made its ids; empty where nothing does."""
    max_id: int | None = None
    """The largest id, as its manifest says."""


@dataclass(frozen=True)
class Drawn:
    """What was drawn from one dataset, by all ranks."""

    name: str
    """The dataset."""
    samples: int
    """Samples."""
    tokens: int
    """Their tokens; of packed documents those that are no padding, within an epoch by the share of the epoch."""
    padding: int
    """Tokens of padding."""
    epoch_samples: int
    """Samples that the dataset has: `samples / epoch_samples` is its epoch."""


@dataclass(frozen=True)
class Opened:
    """What was opened."""

    plan: str
    """The plan in its canonical form, with the seed filled in."""
    dtype: str
    """Type of the tokens of a batch, by its name in numpy, such as uint16."""
    shape: tuple[int, ...]
    """Samples of a batch, and tokens of a sample; of pairs 2, samples, and tokens."""
    datasets: tuple[Dataset, ...]
    """The datasets, in the order of the plan."""
