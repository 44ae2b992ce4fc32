//! Shuffling one dataset block by block.
//!
//! Storage delivers its bandwidth to large reads, so the unit of reading is a *block* of
//! consecutive samples. In each epoch the blocks are permuted, consecutive ones of that order form
//! a *group*, and the samples of a group are permuted among each other. A group must be in memory
//! at once.
//!
//! ```text
//! epoch   |----------------- N samples ------------------|
//! slots   | 7 | 2 | 9 | 4 | 0 | T | 5 | 1 | 8 | 3 | 6 |     blocks in keyed order; T the short last block
//! groups  |     0     |     1     |     2     |   3   |     `blocks` slots each; samples mixed inside
//! ```
//!
//! The short block has a keyed slot; all other slots are full, so offsets are products. Everything
//! is evaluated at a point: the state is the key. Groups never cross epochs: each epoch holds every
//! sample exactly once.

use alloc::vec::Vec;
use core::ops::Range;

use super::mix::{key, mix, scale};
use super::{OrderError, Permutation};

/// Most blocks in a group: 1 GiB of blocks in memory for one dataset.
pub const MAX_GROUP_BLOCKS: u32 = 1_024;

/// Bytes of the file in a block, unless the plan says otherwise.
pub const DEFAULT_BLOCK_BYTES: u32 = 256 << 10;

/// Bytes of the file in the groups of all datasets together, unless the plan says otherwise.
const DEFAULT_GROUP_BYTES: u64 = 16 << 20;

/// Least blocks of a group, unless the plan says otherwise.
const MIN_GROUP_BLOCKS: u32 = 2;

/// More datasets than this share [`MANY_BLOCK_BYTES`], unless the plan says otherwise.
pub const FEW_DATASETS: u32 = 128;

/// Bytes of the file in one block of each of many datasets together, unless the plan says
/// otherwise.
const MANY_BLOCK_BYTES: u64 = 48 << 20;

/// Least bytes of a block of one of many datasets.
const MIN_MANY_BLOCK_BYTES: u64 = 4 << 10;

/// The share of a dataset in a blend, in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proportion {
    /// Its weight.
    pub weight: u32,
    /// The weights of all datasets.
    pub total: u32,
    /// Whether the blend draws from more than [`FEW_DATASETS`].
    pub of_many: bool,
}

impl Proportion {
    /// Bytes of the file in a block, unless the plan says otherwise.
    ///
    /// Every dataset has a block in memory all the time, so many datasets get blocks in proportion
    /// to their weights, of `MANY_BLOCK_BYTES` together.
    pub fn block_bytes(&self) -> u32 {
        if !self.of_many {
            return DEFAULT_BLOCK_BYTES;
        }
        let bytes = MANY_BLOCK_BYTES * u64::from(self.weight) / u64::from(self.total.max(1));
        // In range by its upper bound.
        bytes.clamp(MIN_MANY_BLOCK_BYTES, DEFAULT_BLOCK_BYTES.into()) as u32
    }

    /// Blocks of a group, of `block_bytes` each or of one longer sample, unless the plan says
    /// otherwise.
    ///
    /// Two samples of a batch come from one dataset with probability `(weight / total)^2`, and then
    /// from one block with about one in the blocks of its group. Groups in proportion to the
    /// weights therefore keep the share of such pairs at
    /// `DEFAULT_BLOCK_BYTES / DEFAULT_GROUP_BYTES`, whatever the blend, in the memory of one
    /// dataset. A sample longer than a block is one of its own; then fewer make a group.
    pub fn group_blocks(&self, block_bytes: u32, sample_bytes: u32) -> u32 {
        let parts = u64::from(sample_bytes.max(block_bytes)) * u64::from(self.total.max(1));
        let blocks = (DEFAULT_GROUP_BYTES * u64::from(self.weight)).div_ceil(parts);
        // A weight is at most the total, and blocks are smaller only where it is a small part: at
        // most 64.
        (blocks as u32).max(if self.of_many { 1 } else { MIN_GROUP_BLOCKS })
    }
}

/// The purpose of a key, so that keys for different purposes are unrelated.
const FOR_BLOCKS: u64 = 1;
const FOR_TAIL: u64 = 2;
const FOR_SAMPLES: u64 = 3;

/// The key of a dataset, from which its other keys are derived.
pub(crate) fn dataset_key(seed: u64, dataset: u64) -> u64 {
    key(&[seed, dataset])
}

/// The order of the full blocks in an epoch.
pub(crate) fn block_permutation(own: u64, epoch: u64, full_blocks: u64) -> Permutation {
    Permutation::new(key(&[own, FOR_BLOCKS, epoch]), full_blocks)
}

/// The slot of the short block among those of the full ones.
pub(crate) fn tail_slot(own: u64, epoch: u64, full_blocks: u64) -> u64 {
    scale(mix(key(&[own, FOR_TAIL, epoch])), full_blocks + 1)
}

/// The order of the samples in a group.
pub(crate) fn sample_permutation(own: u64, epoch: u64, group: u64, samples: u64) -> Permutation {
    Permutation::new(key(&[own, FOR_SAMPLES, epoch, group]), samples)
}

/// The order of the samples of one dataset, over all epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShuffle {
    samples: u64,
    per_block: u64,
    group_blocks: u64,
    /// None: file order.
    key: Option<u64>,
}

/// A block of a group, in the order in which the group fetches them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The block's number in the file.
    pub block: u64,
    /// Samples in it.
    pub samples: u32,
}

/// The location of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// How many times the dataset was delivered in full before.
    pub epoch: u64,
    /// Group of that epoch.
    pub group: u64,
    /// Which of the group's blocks, in fetch order.
    pub slot: u32,
    /// That block's number in the file.
    pub block: u64,
    /// Sample inside the block.
    pub sample: u32,
}

impl BlockShuffle {
    /// Shuffles `samples` samples in blocks of `per_block` and groups of `group_blocks`; `seed` and
    /// `dataset` select the order. A group has no more blocks than an epoch: more would be the same
    /// order.
    pub fn new(
        samples: u64,
        per_block: u32,
        group_blocks: u32,
        seed: u64,
        dataset: u64,
    ) -> Result<BlockShuffle, OrderError> {
        if !(1..=MAX_GROUP_BLOCKS).contains(&group_blocks) {
            return Err(OrderError::GroupBlocks { blocks: group_blocks });
        }
        let sequential = BlockShuffle::sequential(samples, per_block)?;
        Ok(BlockShuffle {
            group_blocks: sequential.blocks().min(group_blocks.into()),
            key: Some(dataset_key(seed, dataset)),
            ..sequential
        })
    }

    /// File order, with groups of one block.
    pub fn sequential(samples: u64, per_block: u32) -> Result<BlockShuffle, OrderError> {
        match samples == 0 || per_block == 0 {
            true => Err(OrderError::Empty { samples, per_block }),
            false => Ok(BlockShuffle {
                samples,
                per_block: per_block.into(),
                group_blocks: 1,
                key: None,
            }),
        }
    }

    /// Samples of an epoch.
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Blocks of a group, except perhaps the last of an epoch.
    pub const fn group_blocks(&self) -> u64 {
        self.group_blocks
    }

    /// Blocks of an epoch, the short one included.
    pub const fn blocks(&self) -> u64 {
        self.samples.div_ceil(self.per_block)
    }

    /// Groups of an epoch; the last may have fewer blocks.
    pub const fn groups(&self) -> u64 {
        self.blocks().div_ceil(self.group_blocks)
    }

    /// The epoch of the `k`-th sample ever drawn, and its index in it.
    pub const fn split(&self, k: u64) -> (u64, u64) {
        (k / self.samples, k % self.samples)
    }

    /// The location of the `k`-th sample ever drawn.
    pub fn at(&self, k: u64) -> Place {
        let (number, index) = self.split(k);
        let epoch = self.epoch(number);
        epoch.group(epoch.group_of(index)).at(index)
    }

    /// The order of one epoch.
    pub fn epoch(&self, number: u64) -> Epoch {
        let full = self.samples / self.per_block;
        let tail_samples = self.samples % self.per_block;
        let (blocks, tail_slot) = match self.key {
            None => (Permutation::identity(full), full),
            Some(own) => (block_permutation(own, number, full), tail_slot(own, number, full)),
        };
        let tail = (tail_samples > 0).then_some(Tail { slot: tail_slot, samples: tail_samples });
        Epoch { shuffle: *self, number, blocks, tail }
    }

    /// How far an epoch's order is from file order, estimated from `probes` runs of
    /// [`QUALITY_BATCH`] samples spread over it. `per_mib` samples fill 1 MiB of the file.
    pub fn quality(&self, epoch: u64, probes: u64, per_mib: u64) -> Quality {
        let run = QUALITY_BATCH.min(self.samples);
        let starts = self.samples - run;
        let probes = probes.clamp(1, starts + 1);
        let order = self.epoch(epoch);
        // Positions around their mean, in units of their standard deviation.
        let (samples, centre) = (self.samples as f64, (self.samples - 1) as f64 / 2.0);
        let variance = (samples * samples - 1.0) / 12.0;
        let (mut moved, mut product) = (0.0, 0.0);
        let (mut adjacent, mut shared) = (0u64, 0u64);
        for probe in 0..probes {
            let start = scale_index(probe, starts, probes);
            let places: Vec<u64> = (start..start + run).map(|i| order.file_sample(i)).collect();
            for (index, (i, here)) in (start..).zip(&places).enumerate() {
                moved += here.abs_diff(i) as f64;
                let same = |other: &&u64| **other / per_mib.max(1) == here / per_mib.max(1);
                shared += places[index + 1..].iter().filter(same).count() as u64;
            }
            for next in places.windows(2) {
                adjacent += u64::from(next[0].abs_diff(next[1]) == 1);
                product += (next[0] as f64 - centre) * (next[1] as f64 - centre);
            }
        }
        let (runs, pairs) = (probes as f64, (run * (run - 1) / 2).max(1) as f64);
        let steps = runs * (run - 1).max(1) as f64;
        Quality {
            mean_displacement: moved / (runs * run as f64 * samples),
            adjacency: adjacent as f64 / steps,
            same_mib: shared as f64 / (runs * pairs),
            autocorrelation: if variance > 0.0 { product / (steps * variance) } else { 0.0 },
        }
    }
}

/// `probe * starts / probes` without overflow.
fn scale_index(probe: u64, starts: u64, probes: u64) -> u64 {
    (u128::from(probe) * u128::from(starts) / u128::from(probes)) as u64
}

/// Samples of a batch for [`Quality::same_mib`].
pub const QUALITY_BATCH: u64 = 32;

/// The shuffle quality of an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// Mean distance between a sample's position in the file and in the order of delivery, as a
    /// fraction of the epoch: 0 in file order, 1/3 for a perfect shuffle.
    pub mean_displacement: f64,
    /// How often two samples delivered in a row are neighbours in the file: 1 in file order,
    /// `2 / N` for a perfect shuffle, about `2 / samples of a group` here.
    pub adjacency: f64,
    /// How many of the pairs of samples in a batch of [`QUALITY_BATCH`] come from the same MiB of
    /// the file.
    pub same_mib: f64,
    /// Correlation of the file positions of two samples delivered in a row: 1 in file order, 0 for
    /// a perfect shuffle, about `1 / blocks of a group` here.
    pub autocorrelation: f64,
}

impl Quality {
    /// That of a perfect shuffle of `samples` samples, of which `per_mib` fill 1 MiB of the file.
    pub fn perfect(samples: u64, per_mib: u64) -> Quality {
        let others = samples.saturating_sub(1).max(1) as f64;
        let count = samples as f64;
        Quality {
            mean_displacement: (count * count - 1.0) / (3.0 * count * count),
            adjacency: 2.0 / count,
            same_mib: (per_mib.min(samples).saturating_sub(1)) as f64 / others,
            autocorrelation: -1.0 / others,
        }
    }
}

/// The short last block of the file.
#[derive(Clone, Copy, Debug)]
struct Tail {
    slot: u64,
    samples: u64,
}

/// The order of one epoch of one dataset.
#[derive(Clone, Copy, Debug)]
pub struct Epoch {
    shuffle: BlockShuffle,
    number: u64,
    /// Over the full blocks.
    blocks: Permutation,
    tail: Option<Tail>,
}

impl Epoch {
    /// The number of this epoch.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The group in which the sample at `index` of this epoch is delivered.
    pub fn group_of(&self, index: u64) -> u64 {
        let per_group = self.shuffle.group_blocks * self.shuffle.per_block;
        match self.tail {
            // After the short block every index is lower by the samples which that block lacks.
            Some(tail) if index >= self.first_index(tail.slot / self.shuffle.group_blocks + 1) => {
                (index + self.shuffle.per_block - tail.samples) / per_group
            }
            _ => index / per_group,
        }
    }

    /// Index of the first sample of a group, or of the end of the epoch for the group past the
    /// last.
    fn first_index(&self, group: u64) -> u64 {
        let slot = (group * self.shuffle.group_blocks).min(self.shuffle.blocks());
        let missing = match self.tail {
            Some(tail) if tail.slot < slot => self.shuffle.per_block - tail.samples,
            _ => 0,
        };
        slot * self.shuffle.per_block - missing
    }

    /// One group. A group past the last has no samples.
    pub fn group(&self, number: u64) -> Group {
        let shuffle = &self.shuffle;
        let number = number.min(shuffle.groups());
        let (first_index, end) = (self.first_index(number), self.first_index(number + 1));
        let samples = match shuffle.key {
            None => Permutation::identity(end - first_index),
            Some(own) => sample_permutation(own, self.number, number, end - first_index),
        };
        Group { epoch: *self, number, first_index, samples }
    }

    /// The block in a slot, counted over the epoch.
    pub fn block_in(&self, slot: u64) -> Block {
        let full =
            |slot| Block { block: self.blocks.apply(slot), samples: self.shuffle.per_block as u32 };
        match self.tail {
            Some(tail) if slot == tail.slot => {
                Block { block: self.blocks.n(), samples: tail.samples as u32 }
            }
            Some(tail) if slot > tail.slot => full(slot - 1),
            _ => full(slot),
        }
    }

    /// The file's sample delivered at `index` of this epoch.
    fn file_sample(&self, index: u64) -> u64 {
        let place = self.group(self.group_of(index)).at(index);
        place.block * self.shuffle.per_block + u64::from(place.sample)
    }
}

/// One group of one epoch.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    epoch: Epoch,
    number: u64,
    first_index: u64,
    /// Over the samples of the group.
    samples: Permutation,
}

impl Group {
    /// Its epoch.
    pub(crate) const fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    /// The number of this group in its epoch.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The indices of this epoch delivered from this group.
    pub const fn indices(&self) -> Range<u64> {
        self.first_index..self.first_index + self.samples.n()
    }

    /// The slots of the epoch in this group.
    fn slots(&self) -> Range<u64> {
        let shuffle = &self.epoch.shuffle;
        let first = (self.number * shuffle.group_blocks).min(shuffle.blocks());
        first..(first + shuffle.group_blocks).min(shuffle.blocks())
    }

    /// The blocks of this group, in fetch order.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = Block> + use<> {
        let (epoch, slots) = (self.epoch, self.slots());
        let count = (slots.end - slots.start) as u32;
        (0..count).map(move |slot| epoch.block_in(slots.start + u64::from(slot)))
    }

    /// The location of the sample at `index` of this epoch; `index` must be one of
    /// [`indices`](Group::indices).
    pub fn at(&self, index: u64) -> Place {
        let (slot, sample) = self.slot_at(index);
        Place {
            epoch: self.epoch.number,
            group: self.number,
            slot: (slot - self.slots().start) as u32,
            block: self.epoch.block_in(slot).block,
            sample,
        }
    }

    /// The group's block, in fetch order, that holds the sample at `index` of this epoch.
    pub(crate) fn slot_of(&self, index: u64) -> u64 {
        self.slot_at(index).0 - self.slots().start
    }

    /// The same as slot of the epoch and sample of the block in it: sufficient for a caller that
    /// has the blocks.
    pub(crate) fn slot_at(&self, index: u64) -> (u64, u32) {
        let per_block = self.epoch.shuffle.per_block;
        let inside = self.samples.apply(index - self.first_index);
        let first_slot = self.slots().start;
        let slot_of = |inside: u64| (first_slot + inside / per_block, inside % per_block);
        let (slot, sample) = match self.epoch.tail {
            Some(tail) if tail.slot >= first_slot => {
                let before = (tail.slot - first_slot) * per_block;
                match inside.checked_sub(before) {
                    None => slot_of(inside),
                    Some(rest) if rest < tail.samples => (tail.slot, rest),
                    Some(_) => slot_of(inside + per_block - tail.samples),
                }
            }
            _ => slot_of(inside),
        };
        (slot, sample as u32)
    }
}
