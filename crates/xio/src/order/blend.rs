//! The dataset of sample `n`, such that every prefix keeps the ratio.
//!
//! Dataset `d` has weight `p_d` of a total `Q`. After any number `n` of samples it has been drawn
//! `count_d(n)` times, with
//!
//! ```text
//! |count_d(n) - n * p_d / Q| <= 1 - 1/(2D - 2) < 1        D: datasets of non-zero weight
//! ```
//!
//! the best bound possible in general. This is the chairman assignment problem, and the method is
//! Tijdeman's (1980): draw `j` of dataset `d` must not be so early or so late that the bound breaks,
//! which gives it a first and a last step,
//!
//! ```text
//! first = ceil((j - 1 + e) * Q / p_d)     last = floor((j - e) * Q / p_d) + 1     e = 1/(2D - 2)
//! ```
//!
//! (steps and draws counted from one), and each step takes the dataset whose next draw has begun its
//! interval and ends it soonest. He proved that a sequence within all intervals exists; taking the
//! earliest end first finds one whenever there is one, since all draws are one step long. All
//! arithmetic is in integers.
//!
//! At `n = Q` the bound leaves only `count_d = p_d`, so the sequence repeats with period `Q`: a
//! seek is a multiplication for the whole periods and a walk of less than `Q` steps for the rest.
//! [`MAX_TOTAL_WEIGHT`] keeps that walk short.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use super::OrderError;

/// Most datasets in a blend.
pub const MAX_DATASETS: usize = 1_024;

/// Largest sum of weights without a common divisor: six decimal digits. The longest seek is then
/// under a tenth of a second (50 to 100 ns a step measured); weights of two or three digits seek in
/// microseconds.
pub const MAX_TOTAL_WEIGHT: u64 = 1_000_000;

/// A blend of datasets by integer weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blend {
    weights: Vec<u32>,
    total: u32,
    /// `2D - 2`, or 0 if only one dataset has a weight.
    slack: u64,
}

impl Blend {
    /// Datasets in the ratio of `weights`, some of which may be zero. A common divisor does not matter.
    pub fn new(weights: &[u32]) -> Result<Blend, OrderError> {
        let datasets = weights.len();
        match datasets {
            0 => return Err(OrderError::NoDataset),
            1..=MAX_DATASETS => {}
            _ => return Err(OrderError::TooManyDatasets { datasets }),
        }
        let divisor = weights.iter().fold(0, |a, b| gcd(a, *b));
        if divisor == 0 {
            return Err(OrderError::AllZero { datasets });
        }
        let weights: Vec<u32> = weights.iter().map(|weight| weight / divisor).collect();
        let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
        if total > MAX_TOTAL_WEIGHT {
            return Err(OrderError::TotalTooLarge { total });
        }
        let drawn = weights.iter().filter(|weight| **weight > 0).count() as u64;
        Ok(Blend { weights, total: total as u32, slack: 2 * drawn - 2 })
    }

    /// The weights without their common divisor.
    pub fn weights(&self) -> &[u32] {
        &self.weights
    }

    /// Sum of [`weights`](Blend::weights), and the period of the sequence.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// The dataset of sample `n`, and how many samples were drawn from it before. Costs a seek.
    pub fn pick(&self, n: u64) -> (usize, u64) {
        self.cursor_at(n).step()
    }

    /// A cursor whose next step is sample `n`: a walk of less than [`total`](Blend::total) steps.
    pub fn cursor_at(&self, n: u64) -> BlendCursor {
        let total = u64::from(self.total);
        let mut cursor = BlendCursor {
            blend: self.clone(),
            period: n / total,
            step: 0,
            counts: Vec::new(),
            waiting: BinaryHeap::new(),
            ready: BinaryHeap::new(),
        };
        cursor.start_period();
        for _ in 0..n % total {
            cursor.step();
        }
        cursor
    }

    /// First and last step, counted from zero inside a period, allowed for draw `j` (from zero).
    fn interval(&self, dataset: usize, j: u32) -> (u32, u32) {
        let (total, weight) = (u64::from(self.total), u64::from(self.weights[dataset]));
        let (draw, slack) = (u64::from(j), self.slack.max(1));
        // At most 10^6 draws * 2046 * 10^6 parts: far inside 64 bits.
        let unit = weight * slack;
        let first = ((draw * slack + 1) * total).div_ceil(unit) - 1;
        let last = ((draw + 1) * slack - 1) * total / unit;
        (first as u32, last as u32)
    }
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A step and a dataset in one word, ordered by step, then dataset; smallest out first.
type Event = Reverse<(u32, u16)>;

/// Walks a blend sample by sample. O(log D) a step.
#[derive(Clone, Debug)]
pub struct BlendCursor {
    blend: Blend,
    period: u64,
    /// Inside the period.
    step: u32,
    /// Draws of each dataset inside the period.
    counts: Vec<u32>,
    /// Datasets whose next draw is not allowed yet, by its first step.
    waiting: BinaryHeap<Event>,
    /// Datasets whose next draw is allowed, by its last step.
    ready: BinaryHeap<Event>,
}

impl BlendCursor {
    /// The global index of the next sample.
    pub fn position(&self) -> u64 {
        self.period.wrapping_mul(self.blend.total.into()).wrapping_add(self.step.into())
    }

    /// Samples drawn from a dataset before the next one.
    pub fn drawn(&self, dataset: usize) -> u64 {
        let before = self.period.wrapping_mul(self.blend.weights[dataset].into());
        before.wrapping_add(self.counts[dataset].into())
    }

    /// A cursor whose next step is sample `n`: walks on from here if that is shorter than
    /// [`Blend::cursor_at`].
    pub(crate) fn forward_to(&self, n: u64) -> BlendCursor {
        match n.checked_sub(self.position()) {
            Some(ahead) if ahead < n % u64::from(self.blend.total) => {
                let mut cursor = self.clone();
                for _ in 0..ahead {
                    cursor.step();
                }
                cursor
            }
            _ => self.blend.cursor_at(n),
        }
    }

    /// The dataset of the next sample, and how many samples were drawn from it before.
    pub fn step(&mut self) -> (usize, u64) {
        #[cfg(test)]
        super::cost::add();
        self.admit();
        // Some draw is always ready, since a sequence without gaps exists; the alternatives keep a
        // mistake in that reasoning from becoming a crash.
        let Reverse((_, id)) =
            self.ready.pop().or_else(|| self.waiting.pop()).unwrap_or(Reverse((0, 0)));
        let dataset = usize::from(id);
        let count = self.counts[dataset];
        let before = self.period.wrapping_mul(self.blend.weights[dataset].into());
        self.counts[dataset] += 1;
        self.enqueue(dataset);
        self.advance();
        (dataset, before.wrapping_add(count.into()))
    }

    fn advance(&mut self) {
        self.step += 1;
        if self.step == self.blend.total {
            self.period = self.period.wrapping_add(1);
            self.start_period();
        }
    }

    fn start_period(&mut self) {
        self.step = 0;
        self.ready.clear();
        self.waiting.clear();
        self.counts.clear();
        self.counts.resize(self.blend.weights.len(), 0);
        (0..self.counts.len()).for_each(|dataset| self.enqueue(dataset));
    }

    /// Queues the next draw of a dataset for its first step, if it has one left in this period.
    fn enqueue(&mut self, dataset: usize) {
        let next = self.counts[dataset];
        if next < self.blend.weights[dataset] {
            let (first, _) = self.blend.interval(dataset, next);
            self.waiting.push(Reverse((first, dataset as u16)));
        }
    }

    /// Moves draws that have reached their first step to the ready ones.
    fn admit(&mut self) {
        while let Some(Reverse((first, id))) = self.waiting.peek().copied() {
            if first > self.step {
                break;
            }
            self.waiting.pop();
            let dataset = usize::from(id);
            let (_, last) = self.blend.interval(dataset, self.counts[dataset]);
            self.ready.push(Reverse((last, id)));
        }
    }
}

impl Iterator for BlendCursor {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        Some(self.step())
    }
}
