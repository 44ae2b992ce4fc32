//! The order of samples: pure functions of (seed, epoch, global sample index).
//!
//! A *sample* is one window of tokens. Global sample `n` is `n` samples from the start of training,
//! over all datasets, epochs and ranks. Two maps locate it:
//!
//! ```text
//! n --Curriculum--> (dataset, k)            k-th sample drawn from that dataset, ever; a Blend in each phase
//! k --BlockShuffle--> (epoch, group, block, sample in block)
//! ```
//!
//! Nothing is tabulated: the state is a few numbers for each dataset. Resuming, changing the number
//! of ranks and skipping ahead are therefore arithmetic, and every machine that evaluates the maps
//! gets the same batches (C4). The maps are frozen: tests pin their values, because a change would
//! silently reorder every training run that resumes across it.
//!
//! The exception is [`megatron`]: the order of another loader, which needs tables.
//!
//! Cost: [`OrderCursor`] O(log D) and a few dozen multiplications per sample; a seek costs as much
//! as [`Curriculum::cursor_at`].

mod blend;
mod curriculum;
pub mod megatron;
mod mix;
mod packing;
mod permutation;
mod shuffle;
mod split;
mod stream;

use alloc::sync::Arc;
use alloc::vec::Vec;

use thiserror::Error;

use crate::dataset::{Dtype, TokenFile};
use crate::documents::Documents;

pub use blend::{Blend, BlendCursor, MAX_DATASETS, MAX_TOTAL_WEIGHT};
pub use curriculum::{Curriculum, CurriculumCursor, MAX_PHASES};
pub use packing::{Fit, MAX_CHUNKS, Packed, Packing, PackingError};
pub use permutation::Permutation;
pub use shuffle::{
    Block, BlockShuffle, DEFAULT_BLOCK_BYTES, Epoch, FEW_DATASETS, Group, MAX_GROUP_BLOCKS, Place,
    Proportion, QUALITY_BATCH, Quality,
};
pub(crate) use shuffle::{block_permutation, dataset_key, sample_permutation, tail_slot};
pub use split::{PartBlocks, Split, SplitPart};
pub use stream::StreamOrder;
pub(crate) use stream::StreamState;

/// Most bytes of a block, the unit of file reads and staging; the size of blocks in file order.
pub const BLOCK_BYTES: u32 = 1 << 20;

/// Why an order cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OrderError {
    /// There are no datasets.
    #[error("no dataset is given")]
    NoDataset,
    /// More datasets than [`MAX_DATASETS`].
    #[error("{datasets} datasets are blended, at most {MAX_DATASETS} can be")]
    TooManyDatasets {
        /// How many were given.
        datasets: usize,
    },
    /// No dataset has a weight above zero.
    #[error("all {datasets} weights are zero")]
    AllZero {
        /// How many were given.
        datasets: usize,
    },
    /// The weights, without their common divisor, add up to more than [`MAX_TOTAL_WEIGHT`].
    #[error("weights add up to {total} parts, at most {MAX_TOTAL_WEIGHT} are allowed")]
    TotalTooLarge {
        /// Sum of the weights after division by their greatest common divisor.
        total: u64,
    },
    /// Phases that do not begin at sample 0, do not rise, or are more than [`MAX_PHASES`].
    #[error(
        "phase {phase} cannot begin at sample {start}: the first begins at 0, each later than the one before it, and there are at most {MAX_PHASES}"
    )]
    Phase {
        /// Which phase, from 0.
        phase: usize,
        /// Where it would begin.
        start: u64,
    },
    /// The number of weights must equal the number of datasets.
    #[error("{weights} weights for {datasets} datasets")]
    Count {
        /// Weights given.
        weights: usize,
        /// Datasets given.
        datasets: usize,
    },
    /// A file shorter than one window.
    #[error("{tokens} tokens do not fill one window of {window}")]
    NoSample {
        /// Tokens in the file.
        tokens: u64,
        /// Tokens of a window.
        window: u32,
    },
    /// A window without tokens, or one that does not fit a block.
    #[error("a window of {window} {dtype} tokens does not fit a block of {BLOCK_BYTES} bytes")]
    Window {
        /// Tokens of a window.
        window: u32,
        /// Element type of the file.
        dtype: Dtype,
    },
    /// A dataset without samples, or a block without room for one.
    #[error("{samples} samples in blocks of {per_block}: neither may be zero")]
    Empty {
        /// Samples of the dataset.
        samples: u64,
        /// Samples of a block.
        per_block: u32,
    },
    /// A part of a dataset that holds nothing.
    #[error("its {samples} samples are too few for the part {part} of the split")]
    EmptyPart {
        /// The part.
        part: SplitPart,
        /// Samples of the dataset.
        samples: u64,
    },
    /// The order is made from the documents of the datasets, which are not at hand.
    #[error("order(megatron) is made from documents, which are not read for this stream")]
    NeedsDocuments,
    /// A shuffle over no block, or over more than [`MAX_GROUP_BLOCKS`].
    #[error("a shuffle over {blocks} blocks is outside 1 to {MAX_GROUP_BLOCKS}")]
    GroupBlocks {
        /// Blocks of a group.
        blocks: u32,
    },
}

/// How a token file is divided into samples, and samples into blocks.
///
/// Sample `i` is the `window` tokens from `i * stride` on, where `stride` is `window - overlap`.
/// Tokens after the last whole window are not delivered; [`tail_tokens`](SampleLayout::tail_tokens)
/// returns how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLayout {
    /// The file.
    pub file: TokenFile,
    /// Tokens of a sample.
    pub window: u32,
    /// Tokens that it shares with the sample before it, fewer than `window`.
    pub overlap: u32,
    /// Whole samples in the file: at least one, or none in a dataset that is never drawn from.
    pub samples: u64,
    /// Samples of a full block: as many as fit into its bytes, at least one.
    pub samples_per_block: u32,
    /// Bytes of the widest value that is read of a token: of the token, or of its loss weight.
    pub widest: u32,
    /// Where the blocks of a part of the file are; `None` for the whole.
    pub part: Option<PartBlocks>,
}

impl SampleLayout {
    /// Divides `file` into windows of `window` tokens, which share `overlap` with the one before,
    /// and into blocks of [`BLOCK_BYTES`].
    ///
    /// # Errors
    /// When a window has no token of its own, does not fit a block, or is longer than the file.
    pub fn new(file: TokenFile, window: u32, overlap: u32) -> Result<SampleLayout, OrderError> {
        let fits = window
            .checked_mul(file.dtype.bytes())
            .is_some_and(|bytes| (1..=BLOCK_BYTES).contains(&bytes));
        let stride = window.checked_sub(overlap).filter(|stride| *stride > 0 && fits);
        let stride = stride.ok_or(OrderError::Window { window, dtype: file.dtype })?;
        let samples = file.tokens.saturating_sub(overlap.into()) / u64::from(stride);
        if samples == 0 {
            return Err(OrderError::NoSample { tokens: file.tokens, window });
        }
        let layout = SampleLayout::without_samples(file, window, overlap);
        Ok(SampleLayout { samples, ..layout }.in_blocks(BLOCK_BYTES))
    }

    /// A file that no sample is drawn from, or of which it is not known yet how many there are.
    pub const fn without_samples(file: TokenFile, window: u32, overlap: u32) -> SampleLayout {
        let (samples, samples_per_block, widest) = (0, 1, file.dtype.bytes());
        SampleLayout { file, window, overlap, samples, samples_per_block, widest, part: None }
    }

    /// The same samples where a value of this type is read of each token, too: its blocks are no
    /// longer than those of tokens may be.
    ///
    /// # Errors
    /// When a window of it does not fit a block.
    pub fn read_with(self, beside: Dtype) -> Result<SampleLayout, OrderError> {
        let widest = self.widest.max(beside.bytes());
        match u64::from(self.window) * u64::from(widest) > u64::from(BLOCK_BYTES) {
            true => Err(OrderError::Window { window: self.window, dtype: beside }),
            false => Ok(SampleLayout { widest, ..self }.in_blocks(BLOCK_BYTES)),
        }
    }

    /// The same samples in blocks of at most `block_bytes` of the file; a longer sample is a block
    /// of its own.
    #[must_use]
    pub fn in_blocks(self, block_bytes: u32) -> SampleLayout {
        // What does not belong to the first sample of a run belongs to one stride each.
        let block_tokens = block_bytes / self.file.dtype.bytes();
        let block_tokens = block_tokens.min(BLOCK_BYTES / self.widest);
        let samples_per_block = block_tokens.saturating_sub(self.overlap) / self.stride();
        SampleLayout { samples_per_block: samples_per_block.max(1), ..self }
    }

    /// Tokens from the start of a sample to the start of the next.
    pub const fn stride(&self) -> u32 {
        self.window - self.overlap
    }

    /// Tokens of a run of `samples` consecutive samples.
    pub const fn run_tokens(&self, samples: u64) -> u64 {
        samples * self.stride() as u64 + self.overlap as u64
    }

    /// Bytes of a sample in the file.
    pub const fn sample_bytes(&self) -> u32 {
        self.window * self.file.dtype.bytes()
    }

    /// Number of blocks, the last of which may hold fewer samples.
    pub const fn blocks(&self) -> u64 {
        self.samples.div_ceil(self.samples_per_block as u64)
    }

    /// The number in the file of a block, which is another one in a part of the file.
    pub fn block_in_file(&self, block: u64) -> u64 {
        self.part.map_or(block, |part| part.in_file(block))
    }

    /// Offset and length in bytes of a block in the data file; none past the last block.
    pub fn block_range(&self, block: u64) -> Option<(u64, u32)> {
        let first =
            block.checked_mul(self.samples_per_block.into()).filter(|s| *s < self.samples)?;
        let count = (self.samples - first).min(self.samples_per_block.into());
        let first = self.block_in_file(block) * u64::from(self.samples_per_block);
        let width = u64::from(self.file.dtype.bytes());
        let offset = self.file.data_offset + first * u64::from(self.stride()) * width;
        Some((offset, (self.run_tokens(count) * width) as u32))
    }

    /// Tokens after the last whole window, which are never delivered.
    pub const fn tail_tokens(&self) -> u64 {
        self.file.tokens.saturating_sub(self.run_tokens(self.samples))
    }
}

/// How samples are cut from the blocks of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// Windows of consecutive tokens.
    #[default]
    Windows,
    /// The same, through documents that are known.
    Through(Documents),
    /// Documents laid into samples.
    Packed(Arc<Packing>),
    /// Pieces anywhere in the file, as the order lists them.
    Listed,
}

impl Cut {
    /// Packs documents into the samples of `layout`, whose number becomes that of the packing.
    /// Where documents lie too far apart to fill the samples of a block, blocks have half as many,
    /// and half of that, down to one.
    ///
    /// # Errors
    /// As [`Packing::new`], and when the documents extend beyond the file.
    pub fn packed(
        layout: SampleLayout,
        documents: Documents,
        fit: Fit,
    ) -> Result<(SampleLayout, Cut), PackingError> {
        let (end, tokens) = (documents.end(), layout.file.tokens);
        if end > tokens {
            return Err(PackingError::Beyond { end, tokens });
        }
        let SampleLayout { window, mut samples_per_block, widest, .. } = layout;
        let packing = loop {
            match Packing::new(documents.clone(), fit, window, samples_per_block, widest) {
                Err(PackingError::Sparse { .. }) if samples_per_block > 1 => samples_per_block /= 2,
                packing => break packing?,
            }
        };
        let samples = packing.samples();
        let layout = SampleLayout { samples, samples_per_block, ..layout };
        Ok((layout, Cut::Packed(Arc::new(packing))))
    }
}

/// The location of global sample `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Which dataset, in the order of the blend.
    pub dataset: usize,
    /// The location in it.
    pub place: Place,
}

/// The whole order: a blend of datasets, each shuffled separately.
#[derive(Clone, Debug)]
pub struct Order {
    curriculum: Curriculum,
    shuffles: Vec<BlockShuffle>,
    /// Datasets that are drawn from.
    drawn: u32,
}

impl Order {
    /// Joins a blend, or several in phases, with one shuffle for each of its datasets.
    ///
    /// # Errors
    /// When there are more or fewer shuffles than datasets.
    pub fn new(
        curriculum: impl Into<Curriculum>,
        shuffles: Vec<BlockShuffle>,
    ) -> Result<Order, OrderError> {
        let curriculum = curriculum.into();
        match (curriculum.datasets(), shuffles.len()) {
            (weights, datasets) if weights == datasets => {
                let drawn = (0..datasets).filter(|dataset| curriculum.draws(*dataset)).count();
                Ok(Order { curriculum, shuffles, drawn: drawn as u32 })
            }
            (weights, datasets) => Err(OrderError::Count { weights, datasets }),
        }
    }

    /// Datasets of the blend.
    pub fn datasets(&self) -> usize {
        self.shuffles.len()
    }

    /// How many of them are ever drawn from.
    pub(crate) fn drawn_datasets(&self) -> u32 {
        self.drawn
    }

    /// The state of the blend before global sample `n`.
    pub(crate) fn blend_at(&self, n: u64) -> CurriculumCursor {
        self.curriculum.cursor_at(n)
    }

    /// Whether a dataset is ever drawn from: it has a weight in some phase.
    pub fn draws(&self, dataset: usize) -> bool {
        self.curriculum.draws(dataset)
    }

    /// The shuffle of a dataset, in the order of the blend.
    pub fn shuffle(&self, dataset: usize) -> Option<&BlockShuffle> {
        self.shuffles.get(dataset)
    }

    /// The shuffle of a dataset known to be in the order.
    pub(crate) fn shuffle_of(&self, dataset: usize) -> &BlockShuffle {
        &self.shuffles[dataset]
    }

    /// Global sample `n`. Costs a seek: use a cursor for a run of samples.
    pub fn at(&self, n: u64) -> Sample {
        let (dataset, k) = self.curriculum.pick(n);
        Sample { dataset, place: self.shuffles[dataset].at(k) }
    }

    /// Iterates from global sample `n` on, without end.
    pub fn cursor_at(&self, n: u64) -> OrderCursor {
        self.cursor(self.curriculum.cursor_at(n))
    }

    /// Iterates from where `blend` is, one of this order's.
    pub(crate) fn cursor(&self, blend: CurriculumCursor) -> OrderCursor {
        let caches = self.shuffles.iter().map(|shuffle| ShuffleCache::new(*shuffle)).collect();
        OrderCursor { blend, caches }
    }
}

/// Yields samples in order. Keeps the current epoch and group of each dataset, so a step derives no
/// keys except where a dataset enters a new group.
#[derive(Clone, Debug)]
pub struct OrderCursor {
    blend: CurriculumCursor,
    caches: Vec<ShuffleCache>,
}

impl OrderCursor {
    /// The global index of the sample that comes next.
    pub fn position(&self) -> u64 {
        self.blend.position()
    }

    /// The next sample as dataset, position of its block in fetch order, and sample in that block.
    pub(crate) fn step_position(&mut self) -> (usize, u64, u32) {
        let (dataset, k) = self.blend.step();
        let (position, sample) = self.caches[dataset].position_of(k);
        (dataset, position, sample)
    }

    /// Samples drawn from a dataset before the next one.
    pub fn drawn(&self, dataset: usize) -> u64 {
        self.blend.drawn(dataset)
    }

    /// The next sample. There always is one: datasets start over when they end.
    pub fn step(&mut self) -> Sample {
        let (dataset, k) = self.blend.step();
        Sample { dataset, place: self.caches[dataset].at(k) }
    }
}

impl Iterator for OrderCursor {
    type Item = Sample;

    fn next(&mut self) -> Option<Sample> {
        Some(self.step())
    }
}

/// A shuffle, and the group used last.
#[derive(Clone, Debug)]
struct ShuffleCache {
    shuffle: BlockShuffle,
    /// None before the first sample: most of many datasets give none for a while.
    group: Option<Group>,
}

impl ShuffleCache {
    fn new(shuffle: BlockShuffle) -> ShuffleCache {
        ShuffleCache { shuffle, group: None }
    }

    fn at(&mut self, k: u64) -> Place {
        let (group, index) = self.enter(k);
        group.at(index)
    }

    /// Position of the block of the `k`-th sample in fetch order over all epochs, and the sample in
    /// it.
    fn position_of(&mut self, k: u64) -> (u64, u32) {
        let blocks = self.shuffle.blocks();
        let (group, index) = self.enter(k);
        let (slot, sample) = group.slot_at(index);
        (group.epoch().number() * blocks + slot, sample)
    }

    /// Makes the group of the `k`-th sample current; returns it, and the sample's index in the
    /// epoch.
    fn enter(&mut self, k: u64) -> (&Group, u64) {
        let (number, index) = self.shuffle.split(k);
        let known = self.group.as_ref().filter(|group| group.epoch().number() == number);
        if known.is_none_or(|group| !group.indices().contains(&index)) {
            let epoch = known.map_or_else(|| self.shuffle.epoch(number), |group| *group.epoch());
            self.group = Some(epoch.group(epoch.group_of(index)));
        }
        // There is one now.
        let first = || self.shuffle.epoch(0).group(0);
        (self.group.get_or_insert_with(first), index)
    }
}

/// Counts the cost of an order: steps of a blend and points of a permutation.
#[cfg(test)]
pub(crate) mod cost {
    use core::cell::Cell;

    // Tests run beside each other, and each counts its own steps. Not part of the crate itself.
    std::thread_local! {
        static STEPS: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn add() {
        STEPS.with(|steps| steps.set(steps.get() + 1));
    }

    /// The number of steps of `work`.
    pub(crate) fn of<T>(work: impl FnOnce() -> T) -> (u64, T) {
        let before = STEPS.with(Cell::get);
        let done = work();
        (STEPS.with(Cell::get) - before, done)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
