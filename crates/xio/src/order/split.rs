//! Parts of a dataset for training, validation and test.
//!
//! A dataset is divided into *units*: documents where samples are packed, else runs of consecutive
//! samples. A keyed permutation of the units is cut in the ratio of the shares, and each part has
//! one piece. So every unit is in exactly one part, as many as its share says to within one, and
//! which part that is depends on the seed and on the number of units, and on nothing else: not on
//! the order of the stream, the blend, or what else is drawn from.

use core::fmt;
use core::ops::Range;

use super::mix::key;
use super::shuffle::DEFAULT_BLOCK_BYTES;
use super::{OrderError, Permutation, SampleLayout};

/// The purpose of the key: far from the numbers of datasets, which also follow a seed.
const FOR_SPLIT: u64 = 0x5350_4c49_5400_0000;

/// Samples of a dataset are divided into about so many runs, or twice as many, if they are not
/// larger than a block.
const UNITS: u64 = 1_024;

/// One part of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitPart {
    /// The first.
    Train,
    /// The second.
    Valid,
    /// The third.
    Test,
}

impl SplitPart {
    /// All of them, in the order of their shares.
    pub const ALL: [SplitPart; 3] = [SplitPart::Train, SplitPart::Valid, SplitPart::Test];

    /// As written in a plan.
    pub const fn name(self) -> &'static str {
        match self {
            SplitPart::Train => "train",
            SplitPart::Valid => "valid",
            SplitPart::Test => "test",
        }
    }

    /// The part of this name.
    pub fn from_name(name: &str) -> Option<SplitPart> {
        SplitPart::ALL.into_iter().find(|part| part.name() == name)
    }
}

impl fmt::Display for SplitPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A division of datasets into parts, and the part that is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Shares of training, validation and test; at least one is not 0, and their sum is at most
    /// 2^32.
    pub shares: [u32; 3],
    /// What is delivered.
    pub part: SplitPart,
    /// Selects the division.
    pub seed: u64,
}

impl Split {
    /// The places of the part in the permuted order of so many units.
    fn places(&self, units: u64) -> Range<u64> {
        let sum: u64 = self.shares.iter().map(|share| u64::from(*share)).sum();
        let cut = |parts: usize| {
            let before: u64 = self.shares[..parts].iter().map(|share| u64::from(*share)).sum();
            // At most `units`.
            (u128::from(units) * u128::from(before) / u128::from(sum.max(1))) as u64
        };
        let part = self.part as usize;
        cut(part)..cut(part + 1)
    }

    fn permutation(&self, units: u64) -> Permutation {
        Permutation::new(key(&[self.seed, FOR_SPLIT]), units)
    }

    /// The units of the part, of so many, in the order of the permutation.
    pub fn units(&self, units: u64) -> impl Iterator<Item = u64> + use<> {
        let permutation = self.permutation(units);
        self.places(units).map(move |place| permutation.apply(place))
    }
}

/// The blocks of a part of a dataset, and where they are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartBlocks {
    split: Split,
    /// Whole units of the dataset.
    units: u64,
    /// Blocks of a unit.
    per_unit: u64,
}

impl PartBlocks {
    /// The number in the file of a block of the part.
    pub(super) fn in_file(&self, block: u64) -> u64 {
        let places = self.split.places(self.units);
        let (unit, inside) = (block / self.per_unit, block % self.per_unit);
        match places.start.checked_add(unit).filter(|place| *place < places.end) {
            Some(place) => self.split.permutation(self.units).apply(place) * self.per_unit + inside,
            // What the whole units leave.
            None => {
                self.units * self.per_unit + block - (places.end - places.start) * self.per_unit
            }
        }
    }
}

impl SampleLayout {
    /// A part of the samples, in blocks of whole units or of an equal share of one. Samples that
    /// are no whole unit are for training.
    ///
    /// # Errors
    /// When the dataset has too few samples for the part.
    pub fn in_part(self, split: Split) -> Result<SampleLayout, OrderError> {
        let most = self.in_blocks(DEFAULT_BLOCK_BYTES).samples_per_block;
        let unit = floor_to_power((self.samples / UNITS).clamp(1, most.into()));
        let per_block = floor_to_power(unit.min(self.samples_per_block.into()));
        let (units, rest) = (self.samples / unit, self.samples % unit);
        let places = split.places(units);
        let rest = if split.part == SplitPart::Train { rest } else { 0 };
        let samples = (places.end - places.start) * unit + rest;
        if samples == 0 {
            return Err(OrderError::EmptyPart { part: split.part, samples: self.samples });
        }
        let part = PartBlocks { split, units, per_unit: unit / per_block };
        // A block has 32 bits of samples.
        Ok(SampleLayout { samples, samples_per_block: per_block as u32, part: Some(part), ..self })
    }
}

/// The largest power of two that is not larger; 1 for 0.
const fn floor_to_power(number: u64) -> u64 {
    match number.checked_ilog2() {
        Some(power) => 1 << power,
        None => 1,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::dataset::{Dtype, Format, TokenFile};

    fn layout(tokens: u64, window: u32, overlap: u32, dtype: Dtype) -> SampleLayout {
        let file = TokenFile { dtype, data_offset: 0, tokens, format: Format::Flat };
        SampleLayout::new(file, window, overlap).unwrap()
    }

    /// The first samples in the file of all blocks of a part, and how many samples each has.
    fn samples(layout: &SampleLayout) -> Vec<u64> {
        let per_block = u64::from(layout.samples_per_block);
        let blocks = layout.samples.div_ceil(per_block);
        let of = |block: u64| {
            let first = layout.block_in_file(block) * per_block;
            first..first + per_block.min(layout.samples - block * per_block)
        };
        (0..blocks).flat_map(of).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_500))]

        /// Parts are disjoint and complete, of the size that their shares say, whatever the blocks
        /// of the plan.
        #[test]
        fn every_sample_is_in_one_part(
            seed in any::<u64>(), shares in prop::array::uniform3(0_u32..100), count in 3_u64..9_000,
            window in 1_u32..900, block in 12_u32..21,
        ) {
            prop_assume!(shares.iter().sum::<u32>() > 0);
            let whole = layout(count * u64::from(window), window, 0, Dtype::U16).in_blocks(1 << block);
            let mut seen = BTreeSet::new();
            for part in SplitPart::ALL {
                let Ok(own) = whole.in_part(Split { shares, part, seed }) else { continue };
                let samples = samples(&own);
                prop_assert_eq!(samples.len() as u64, own.samples);
                prop_assert!(samples.iter().all(|sample| seen.insert(*sample)));
                let share = f64::from(shares[part as usize]) / f64::from(shares.iter().sum::<u32>());
                // To a unit, and what is left over.
                let unit = count as f64 / UNITS as f64 * 2.0 + 2.0;
                prop_assert!((own.samples as f64 - share * count as f64).abs() <= 2.0 * unit);
            }
            prop_assert_eq!(seen.len() as u64, count);
            prop_assert!(seen.iter().copied().eq(0..count));
        }

        /// Smaller blocks, as of a dataset that others joined, change nothing of what is in a part.
        #[test]
        fn a_part_does_not_depend_on_blocks(seed in any::<u64>(), count in 50_u64..9_000, block in 12_u32..21) {
            let whole = layout(count * 64, 64, 0, Dtype::U32);
            let split = Split { shares: [90, 9, 1], part: SplitPart::Valid, seed };
            let set = |layout: SampleLayout| {
                layout.in_part(split).ok().map(|part| samples(&part).into_iter().collect::<BTreeSet<_>>())
            };
            prop_assert_eq!(set(whole), set(whole.in_blocks(1 << block)));
        }

        #[test]
        fn every_document_is_in_one_part(seed in any::<u64>(), documents in 0_u64..500) {
            let mut all: Vec<u64> = SplitPart::ALL
                .into_iter()
                .flat_map(|part| Split { shares: [8, 1, 1], part, seed }.units(documents))
                .collect();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..documents));
        }
    }

    #[test]
    fn a_part_without_a_sample_is_refused() {
        let split = Split { shares: [98, 1, 1], part: SplitPart::Valid, seed: 0 };
        let few = layout(50, 1, 0, Dtype::U16);
        let error = OrderError::EmptyPart { part: SplitPart::Valid, samples: 50 };
        assert_eq!(few.in_part(split), Err(error));
        assert_eq!(few.in_part(Split { shares: [1, 1, 0], ..split }).unwrap().samples, 25);
    }

    /// The division is frozen: a change would put validation data of a run that resumes into its
    /// training.
    #[test]
    fn the_division_keeps_its_values() {
        let split = Split { shares: [3, 1, 0], part: SplitPart::Valid, seed: 7 };
        assert_eq!(split.units(12).collect::<Vec<_>>(), [0, 10, 4]);
    }
}
