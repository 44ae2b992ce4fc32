//! Megatron-core's `build_blending_indices` and `build_exhaustive_blending_indices`: every sample
//! comes from the dataset that is furthest behind its share, by products and differences of 64-bit
//! floats.

use alloc::vec::Vec;

use super::{MegatronError, Memory};

/// Least samples between two marks. More datasets have marks further apart, so that marks stay
/// small beside the table itself.
const MARK_SAMPLES: usize = 4_096;

/// Which dataset each sample of the blend comes from: two bytes for each, and a count of every
/// dataset at each mark.
#[derive(Debug)]
pub(super) struct Picks {
    datasets: usize,
    picks: Vec<u16>,
    mark_samples: usize,
    /// Samples drawn from each dataset before each mark.
    marks: Vec<u32>,
}

impl Picks {
    /// The first `samples` of a blend by `weights` that add up to one. With `all`, the samples of
    /// each dataset, a dataset leaves the blend when it has none left.
    pub(super) fn new(
        weights: &[f64],
        all: Option<&[u64]>,
        samples: u64,
        memory: &mut Memory,
    ) -> Result<Picks, MegatronError> {
        let (datasets, samples) = (weights.len(), samples as usize);
        let mark_samples = MARK_SAMPLES.max(16 * datasets);
        let mut picks: Vec<u16> = memory.table(samples)?;
        let mut marks: Vec<u32> = memory.table(datasets * samples.div_ceil(mark_samples))?;
        let mut shares: Vec<Share> = (weights.iter().enumerate())
            .map(|(dataset, weight)| {
                let left = all.map_or(u64::MAX, |all| all[dataset]);
                Share { dataset: dataset as u16, weight: *weight, drawn: 0, left }
            })
            .collect();
        let mut drawn = alloc::vec![0; datasets];
        for sample in 0..samples {
            if sample % mark_samples == 0 {
                marks.extend_from_slice(&drawn);
            }
            let furthest = furthest_behind(&shares, (sample as f64).max(1.0));
            let share = &mut shares[furthest];
            share.drawn += 1;
            share.left -= 1;
            picks.push(share.dataset);
            drawn[usize::from(share.dataset)] = share.drawn;
            if share.left == 0 {
                shares.remove(furthest);
            }
        }
        Ok(Picks { datasets, picks, mark_samples, marks })
    }

    /// Dataset of a sample of the blend.
    pub(super) fn dataset(&self, sample: u64) -> Option<usize> {
        self.picks.get(usize::try_from(sample).ok()?).map(|dataset| usize::from(*dataset))
    }

    /// How many of the first `samples` come from each dataset.
    pub(super) fn drawn(&self, samples: u64) -> Vec<u32> {
        let samples = usize::try_from(samples).unwrap_or(usize::MAX).min(self.picks.len());
        let mark = samples.saturating_sub(1) / self.mark_samples;
        let marks = self.marks.chunks_exact(self.datasets);
        let mut drawn = marks.clone().nth(mark).map_or(alloc::vec![0; self.datasets], Vec::from);
        for dataset in &self.picks[mark * self.mark_samples..samples] {
            drawn[usize::from(*dataset)] += 1;
        }
        drawn
    }
}

/// The part of a dataset in the blend so far.
struct Share {
    dataset: u16,
    weight: f64,
    drawn: u32,
    /// Samples that may still be drawn.
    left: u64,
}

/// The first of those with the largest `weight * at - drawn`.
fn furthest_behind(shares: &[Share], at: f64) -> usize {
    let (mut furthest, mut largest) = (0, f64::NEG_INFINITY);
    for (index, share) in shares.iter().enumerate() {
        let behind = share.weight * at - f64::from(share.drawn);
        if behind > largest {
            (furthest, largest) = (index, behind);
        }
    }
    furthest
}
