//! What a running job does on the network, from what was seen of it: so that those who submit it
//! need not know.
//!
//! What goes in are [`Sample`]s: bytes from one worker to another at a time, from counters or from
//! the packets of a capture ([`sequence`]). [`profile`] finds, in this order:
//!
//! | step | how |
//! |---|---|
//! | the iteration ([`period`]) | the shortest time after which traffic repeats: autocorrelation, edge by edge, so that phases that look alike in sum are not taken for iterations; boundaries are then the longest quiet times |
//! | bytes of each edge in an iteration | the median of all whole iterations |
//! | when edges are used | 64 parts of an iteration's communication time; edges that share less than half of theirs do not overlap |
//! | the pattern ([`matching`]) | of each pattern the order of ranks that its structure suggests; the one that explains most bytes |
//!
//! What a pattern does not explain is its *residual*: the bytes by which edges differ from the mean
//! of their kind, and all bytes of edges that it does not have, of all bytes. Above
//! [`MOST_RESIDUAL_PPM`] no pattern fits, and the job is written as a mesh at the rate of its
//! largest edge, which covers everything and reserves too much.
//!
//! Rates follow from the time that is to be spent on communication: phases share it by the bytes of
//! their largest edges, which keeps the highest rate as low as it can be.

pub mod matching;
pub mod period;
pub mod sequence;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use thiserror::Error;

use crate::job::{Cycle, Job};
use crate::pattern::Pattern;
use matching::{Candidate, Graph};
use period::Iterations;

/// Residual above which no pattern fits, in millionths.
pub const MOST_RESIDUAL_PPM: u64 = 200_000;

/// Most workers: a mesh of them has a million edges.
pub const MAX_WORKERS: usize = 1024;

/// Parts of an iteration's communication time that are told apart.
pub(crate) const PARTS: u64 = 64;

/// Bytes from one worker to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sample {
    /// When, in nanoseconds from any beginning.
    pub at_ns: u64,
    /// The sender, by any number below the number of workers.
    pub from: u32,
    /// The receiver.
    pub to: u32,
    /// How many.
    pub bytes: u64,
}

/// What is known or wanted besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The time of an iteration, if it is known: it is not looked for then.
    pub period_ns: Option<u64>,
    /// The time that an iteration is to take: what was not communication stays, the rest is for
    /// communication.
    pub iteration_ns: Option<u64>,
    /// The time that communication is to take in each iteration; by default what it took.
    pub communication_ns: Option<u64>,
    /// Bytes on the wire for a million bytes that were counted, above that million: headers.
    pub overhead_ppm: u64,
}

/// Why nothing can be said.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProfileError {
    /// There are no samples between workers.
    #[error("there is no traffic between workers")]
    Nothing,
    /// There are too many workers.
    #[error("{0} workers; there can be {MAX_WORKERS}")]
    TooMany(usize),
    /// A sample names a worker that is not there.
    #[error("worker {worker} of {workers} is not there")]
    NoWorker {
        /// Its number.
        worker: u32,
        /// How many there are.
        workers: usize,
    },
    /// Nothing repeats.
    #[error("no iterations are seen in {0} ms: record at least three, or say how long one takes")]
    NoPeriod(u64),
    /// There is none from beginning to end.
    #[error("no two whole iterations of {period_ms} ms are in {recorded_ms} ms: record for longer")]
    TooShort {
        /// The time of one.
        period_ms: u64,
        /// What was recorded.
        recorded_ms: u64,
    },
    /// Compute takes longer than the iteration may.
    #[error(
        "an iteration is to take {wanted_ms} ms, and {compute_ms} ms of it were not communication"
    )]
    NoTime {
        /// Wanted.
        wanted_ms: u64,
        /// Taken.
        compute_ms: u64,
    },
    /// Its rates are more than a job may have.
    #[error("the rates that this takes are more than a job can have")]
    Overflow,
}

/// Bytes of an edge in each iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The sender.
    pub from: u32,
    /// The receiver.
    pub to: u32,
    /// In the median iteration.
    pub bytes: u64,
    /// When it is used: a bit for each 64th of the communication time.
    pub used: u64,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Iterations that were seen from beginning to end.
    pub iterations: usize,
    /// The time of one.
    pub period_ns: u64,
    /// The part of it from the first to the last byte.
    pub communication_ns: u64,
    /// All edges, by sender and receiver.
    pub edges: Vec<Edge>,
    /// The pattern that explains most, with rates.
    pub pattern: Pattern,
    /// By rank, the worker.
    pub ranks: Vec<u32>,
    /// What the pattern does not explain, in millionths of all bytes.
    pub residual_ppm: u64,
    /// By kind of edge, in the order of the pattern's rates: bytes of an edge in an iteration.
    pub bytes_of_kinds: Vec<u64>,
    /// The job to submit: of that pattern, or a mesh if it does not explain enough; with its cycle,
    /// if it does not exchange all the time.
    pub job: Job,
}

impl Profile {
    /// Whether no pattern explains enough.
    pub fn is_custom(&self) -> bool {
        self.residual_ppm > MOST_RESIDUAL_PPM
    }
}

/// Derives a job from what was seen; see the module's text. Samples need no order.
///
/// # Errors
/// When there is too little or too much to say anything.
pub fn profile(
    workers: usize,
    samples: &[Sample],
    options: Options,
) -> Result<Profile, ProfileError> {
    if workers > MAX_WORKERS {
        return Err(ProfileError::TooMany(workers));
    }
    let is_wrong = |sample: &&Sample| sample.from.max(sample.to) as usize >= workers;
    if let Some(sample) = samples.iter().find(is_wrong) {
        return Err(ProfileError::NoWorker { worker: sample.from.max(sample.to), workers });
    }
    let is_between = |sample: &&Sample| sample.from != sample.to && sample.bytes > 0;
    let mut samples: Vec<Sample> = samples.iter().filter(is_between).copied().collect();
    samples.sort_unstable();
    let iterations = period::find(&samples, options.period_ns)?;
    let edges = edges(&samples, &iterations);
    let graph = Graph::new(workers, &edges);
    let found = matching::best(&graph).ok_or(ProfileError::Nothing)?;
    let communication = wanted(&iterations, options)?;
    let rates = rates(&found, communication, options.overhead_ppm);
    let pattern = rates.and_then(|rates| found.with_rates(&rates));
    let pattern = pattern.ok_or(ProfileError::Overflow)?;
    let largest = edges.iter().map(|edge| edge.bytes).max().unwrap_or(0);
    let mut profile = Profile {
        iterations: iterations.bounds.len(),
        period_ns: iterations.period_ns,
        communication_ns: iterations.communication_ns,
        edges,
        job: Job::new(pattern),
        pattern,
        residual_ppm: found.residual_ppm,
        bytes_of_kinds: found.bytes_of_kinds,
        ranks: found.ranks,
    };
    if profile.is_custom() {
        let rate = rate_of(largest, communication, options.overhead_ppm);
        let workers = profile.ranks.len() as u32;
        let rate_bps = rate.ok_or(ProfileError::Overflow)?;
        profile.job = Job::new(Pattern::Mesh { workers, rate_bps });
    }
    profile.job.check().map_err(|_| ProfileError::Overflow)?;
    profile.job.cycle = cycle(&iterations);
    Ok(profile)
}

/// The cycle of a job, in whole microseconds: both are rounded up, since a job can be made to wait
/// and not to hurry.
fn cycle(iterations: &Iterations) -> Option<Cycle> {
    let whole = |ns: u64| ns.div_ceil(1_000).saturating_mul(1_000);
    let Iterations { period_ns, communication_ns, .. } = *iterations;
    let cycle = Cycle { period_ns: whole(period_ns), exchange_ns: whole(communication_ns) };
    Some(cycle).filter(Cycle::is_valid)
}

/// The time for communication.
fn wanted(iterations: &Iterations, options: Options) -> Result<u64, ProfileError> {
    if let Some(communication) = options.communication_ns {
        return Ok(communication.max(1));
    }
    let Some(iteration) = options.iteration_ns else {
        return Ok(iterations.communication_ns.max(1));
    };
    let compute = iterations.period_ns.saturating_sub(iterations.communication_ns);
    let left = iteration.checked_sub(compute).filter(|left| *left > 0);
    let (wanted_ms, compute_ms) = (iteration / 1_000_000, compute / 1_000_000);
    left.ok_or(ProfileError::NoTime { wanted_ms, compute_ms })
}

/// Bits per second that carry so many bytes in that time, with headers, rounded up to three digits.
fn rate_of(bytes: u64, time_ns: u64, overhead_ppm: u64) -> Option<u64> {
    let bits = u128::from(bytes) * 8 * (1_000_000 + u128::from(overhead_ppm));
    let exact = (bits * 1_000).div_ceil(u128::from(time_ns.max(1))).max(1);
    let exact = u64::try_from(exact).ok()?;
    let unit = 10_u64.pow(exact.ilog10().saturating_sub(2));
    exact.div_ceil(unit).checked_mul(unit)
}

/// The rate of each kind of edge: phases share the time by the bytes of their largest edges.
fn rates(found: &Candidate, communication_ns: u64, overhead_ppm: u64) -> Option<Vec<u64>> {
    let largest = |kinds: &Vec<usize>| {
        kinds.iter().map(|kind| found.bytes_of_kinds[*kind]).max().unwrap_or(0)
    };
    let all: u128 = found.phases.iter().map(|kinds| u128::from(largest(kinds))).sum();
    let mut rates = alloc::vec![0_u64; found.bytes_of_kinds.len()];
    for kinds in &found.phases {
        let part = u128::from(communication_ns) * u128::from(largest(kinds)) / all.max(1);
        let time = u64::try_from(part).unwrap_or(u64::MAX);
        for kind in kinds {
            let rate = rate_of(found.bytes_of_kinds[*kind], time, overhead_ppm)?;
            rates[*kind] = rates[*kind].max(rate);
        }
    }
    // A kind of which there is no edge needs a rate all the same.
    let some = rates.iter().copied().max().unwrap_or(1).max(1);
    Some(rates.into_iter().map(|rate| if rate == 0 { some } else { rate }).collect())
}

/// Bytes of each edge in an iteration, and when it is used.
fn edges(samples: &[Sample], iterations: &Iterations) -> Vec<Edge> {
    let count = iterations.bounds.len();
    // By edge: bytes of each iteration, and of each part of the communication time.
    let mut sums: BTreeMap<(u32, u32), (Vec<u64>, [u64; PARTS as usize])> = BTreeMap::new();
    let mut at = 0;
    for sample in samples {
        while iterations.bounds.get(at).is_some_and(|bounds| bounds.end_ns <= sample.at_ns) {
            at += 1;
        }
        let Some(bounds) = iterations.bounds.get(at).filter(|own| own.first_ns <= sample.at_ns)
        else {
            continue;
        };
        let empty = || (alloc::vec![0; count], [0; PARTS as usize]);
        let (bytes, parts) = sums.entry((sample.from, sample.to)).or_insert_with(empty);
        bytes[at] = bytes[at].saturating_add(sample.bytes);
        let since = u128::from(sample.at_ns.saturating_sub(bounds.begin_ns));
        let part = since * u128::from(PARTS) / u128::from(iterations.communication_ns.max(1));
        if let Some(sum) = usize::try_from(part).ok().and_then(|part| parts.get_mut(part)) {
            *sum = sum.saturating_add(sample.bytes);
        }
    }
    let edge = |((from, to), (mut bytes, parts)): ((u32, u32), (Vec<u64>, [u64; 64]))| {
        bytes.sort_unstable();
        // A part counts as used where it has a quarter of what it would if all were alike.
        let all = parts.iter().fold(0_u64, |sum, part| sum.saturating_add(*part));
        let least = all / PARTS / 4;
        let used = (0..).zip(parts).filter(|(_, part)| *part > least);
        let used = used.fold(0, |used, (part, _)| used | 1 << part);
        Edge { from, to, bytes: bytes[bytes.len() / 2], used }
    };
    sums.into_iter().map(edge).filter(|edge| edge.bytes > 0).collect()
}
