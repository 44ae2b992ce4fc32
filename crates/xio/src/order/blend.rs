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
//! Tijdeman's (1980): draw `j` of dataset `d` must not be so early or so late that the bound
//! breaks, which gives it a first and a last step,
//!
//! ```text
//! first = ceil((j - 1 + e) * Q / p_d)     last = floor((j - e) * Q / p_d) + 1     e = 1/(2D - 2)
//! ```
//!
//! (steps and draws counted from one), and each step takes the dataset whose next draw has begun
//! its interval and ends it soonest. He proved that a sequence within all intervals exists; taking
//! the earliest end first finds one whenever there is one, since all draws are one step long. All
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
pub const MAX_DATASETS: usize = 4_096;

/// Largest sum of weights without a common divisor: six decimal digits. The longest seek is then
/// about a tenth of a second (50 to 100 ns a step measured); weights of two or three digits seek in
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
    /// Datasets in the ratio of `weights`, some of which may be zero. A common divisor does not
    /// matter.
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
            waiting: Wheel::default(),
            ready: BinaryHeap::new(),
        };
        cursor.start_period();
        for _ in 0..n % total {
            cursor.step();
        }
        cursor
    }

    /// First step, counted from zero inside a period, allowed for draw `j` (from zero).
    fn first_step(&self, dataset: usize, j: u32) -> u32 {
        let (total, slack) = (u64::from(self.total), self.slack.max(1));
        // At most 10^6 draws * 8190 * 10^6 parts: far inside 64 bits.
        let unit = u64::from(self.weights[dataset]) * slack;
        (((u64::from(j) * slack + 1) * total).div_ceil(unit) - 1) as u32
    }

    /// Last step, counted likewise.
    fn last_step(&self, dataset: usize, j: u32) -> u32 {
        let (total, slack) = (u64::from(self.total), self.slack.max(1));
        let unit = u64::from(self.weights[dataset]) * slack;
        (((u64::from(j) + 1) * slack - 1) * total / unit) as u32
    }
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A step and a dataset in one word, ordered by step, then dataset; smallest out first.
type Event = Reverse<u32>;

/// Bits of an event that are the dataset.
const DATASET_BITS: u32 = MAX_DATASETS.ilog2();

const _: () = assert!(MAX_DATASETS.is_power_of_two());
const _: () = assert!(MAX_TOTAL_WEIGHT <= 1 << (u32::BITS - DATASET_BITS));

/// No dataset, in a [`Wheel`].
const NONE: u16 = u16::MAX;

/// Datasets that wait for a step, by the step modulo the number of lists, which is a power of two.
/// A list also holds datasets of later rounds, which are put back; with twice as many lists as
/// datasets there are few.
#[derive(Clone, Debug, Default)]
struct Wheel {
    /// The first dataset of each list.
    heads: Vec<u16>,
    /// By dataset, the step and the next dataset of its list.
    waiting: Vec<(u32, u16)>,
}

impl Wheel {
    /// An empty one for so many datasets.
    fn reset(&mut self, datasets: usize) {
        self.heads.clear();
        self.heads.resize((2 * datasets).next_power_of_two(), NONE);
        self.waiting.clear();
        self.waiting.resize(datasets, (0, NONE));
    }

    fn list(&mut self, step: u32) -> &mut u16 {
        // There is at least one list.
        let index = step as usize & (self.heads.len() - 1);
        &mut self.heads[index]
    }

    fn add(&mut self, dataset: u16, step: u32) {
        let next = core::mem::replace(self.list(step), dataset);
        self.waiting[usize::from(dataset)] = (step, next);
    }

    /// Takes the datasets that wait for `step`.
    fn take(&mut self, step: u32, mut each: impl FnMut(u16)) {
        let mut next = core::mem::replace(self.list(step), NONE);
        while next != NONE {
            let dataset = next;
            let (until, after) = self.waiting[usize::from(dataset)];
            next = after;
            match until == step {
                true => each(dataset),
                false => self.add(dataset, until),
            }
        }
    }
}

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
    waiting: Wheel,
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
        // Some draw is always ready, since a sequence without gaps exists; the alternative keeps a
        // mistake in that reasoning from becoming a crash.
        let Reverse(event) = self.ready.pop().unwrap_or(Reverse(0));
        let id = (event & ((1 << DATASET_BITS) - 1)) as u16;
        let dataset = usize::from(id);
        let count = self.counts[dataset];
        let before = self.period.wrapping_mul(self.blend.weights[dataset].into());
        self.counts[dataset] += 1;
        self.step += 1;
        if self.step == self.blend.total {
            self.period = self.period.wrapping_add(1);
            self.start_period();
        } else {
            self.enqueue(id);
        }
        (dataset, before.wrapping_add(count.into()))
    }

    fn start_period(&mut self) {
        self.step = 0;
        self.ready.clear();
        self.counts.clear();
        self.counts.resize(self.blend.weights.len(), 0);
        self.waiting.reset(self.counts.len());
        // A dataset has a number of 16 bits: there are at most MAX_DATASETS.
        (0..self.counts.len() as u16).for_each(|dataset| self.enqueue(dataset));
    }

    /// Queues the next draw of a dataset, if it has one left in this period: for its first step, or
    /// among the ready ones if that has come.
    fn enqueue(&mut self, id: u16) {
        let (dataset, next) = (usize::from(id), self.counts[usize::from(id)]);
        if next < self.blend.weights[dataset] {
            match self.blend.first_step(dataset, next) {
                first if first > self.step => self.waiting.add(id, first),
                _ => self.ready.push(event(&self.blend, id, next)),
            }
        }
    }

    /// Moves draws that have reached their first step to the ready ones.
    fn admit(&mut self) {
        let BlendCursor { blend, step, counts, waiting, ready, .. } = self;
        waiting.take(*step, |id| ready.push(event(blend, id, counts[usize::from(id)])));
    }
}

/// Draw `j` of a dataset, by its last step.
fn event(blend: &Blend, id: u16, j: u32) -> Event {
    Reverse((blend.last_step(usize::from(id), j) << DATASET_BITS) | u32::from(id))
}

impl Iterator for BlendCursor {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        Some(self.step())
    }
}
