//! Guarantees of many jobs in the few queues of a port: DSCP, to traffic class, to queue, to
//! weight.
//!
//! A port serves its queues by deficit weighted round robin (DWRR), so a queue that is backlogged
//! gets at least its weight's part of the port, and what a queue leaves unused goes to the others.
//! Within a queue packets leave in order of arrival: jobs share it as their senders' congestion
//! control does, by flows. What a plan guarantees follows from that.
//!
//! - Q1: the weight of a queue is never below the sum of its jobs' guarantees, and the weights of a
//!   port add up to at most its units. A weight is the least integer that holds what the queue
//!   needs, so rounding grants a queue less than one unit, `rate_bps / weight_units`, too much.
//! - Q2: a job with `s` of the `S` flows of a queue that has the part `W` of the port gets at least
//!   `W * s / S`, whatever other queues do, as long as it is backlogged and flows that share a
//!   queue share it evenly. [`Binding::assured_bps`] is that number, and the guarantee holds where
//!   it is not below it: where jobs with an equal ratio of guarantee to flows share a queue, a
//!   weight of their sum is enough, and otherwise it takes `S` times the largest ratio.
//! - Q3: not guaranteed is a job's part of a queue in which another job sends more flows than it
//!   declared, or without congestion control. Such a job harms its own queue only: Q1 holds for the
//!   others whatever is sent.
//!
//! - Q4: where that takes more than the port has, the senders of a queue can be paced
//!   ([`Scheme::Paced`]): all its jobs but the one with the largest ratio, each at its part of the
//!   queue by guarantees. Then every job of the queue has its guarantee with a weight of their sum.
//!   While the job that is not paced is backlogged the queue has no gaps; what paced jobs could use
//!   beyond that they get when the next plan knows that it has stopped.
//!
//! Proof of Q2: while the job is backlogged so is its queue, which DWRR serves at `W` or faster;
//! each flow is even with or behind those of the job, so `s` of at most `S` flows get at least that
//! part. [`Plan::lag_bytes`] bounds how far DWRR lags behind in any interval.
//!
//! Proof of Q4: rate limits of all jobs but one, `t`, and `t`'s guarantee add up to at most the
//! queue's part of the port. So `t` gets what rate limits leave, at least its guarantee, and each
//! of its flows at least its ratio. No flow of a paced job gets less than one of `t`, unless its
//! rate limit is lower; its ratio is not above that of `t`, and its rate limit not below its
//! guarantee, so it has its guarantee either way.
//!
//! | [`Scheme`] | how queues are chosen |
//! |---|---|
//! | `Hash` | by a hash of the job's number |
//! | `Contended` | after QShare: the largest contended jobs have queues of their own, the others share one |
//! | `Levels` | after Crux: priorities are compressed into levels, in order, so that least is lost |
//! | `Matched` | ours: as many guarantees as possible are assured, at the least sum of weights |
//! | `Paced` | the same queues, and rate limits where weights are not enough |
//!
//! [`rebinding`] leads from one plan to the next.

pub mod rebinding;
mod segments;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::fmt;

use thiserror::Error;

use crate::job::Latency;
use crate::ledger::{JobId, Ledger};

/// Most queues of a port: the traffic classes of IEEE 802.1Qaz.
pub const MAX_QUEUES: u8 = 8;

/// Most units of weight of a port.
pub const MAX_WEIGHT_UNITS: u32 = 1 << 16;

/// Most flows of a job at a port.
pub const MAX_FLOWS: u32 = 1 << 20;

/// A differentiated services code point that a job may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dscp(u8);

impl Dscp {
    /// What packets without any have.
    const DEFAULT: u8 = 0;
    /// Expedited forwarding, for what is urgent (RFC 3246).
    const URGENT: u8 = 46;
    /// Class selector 6, that of congestion notification packets.
    const CNP: u8 = 48;

    /// The code point with that value.
    ///
    /// # Errors
    /// When it has more than 6 bits, or belongs to other traffic.
    pub fn new(value: u8) -> Result<Dscp, Refusal> {
        match value {
            Dscp::DEFAULT | Dscp::URGENT | Dscp::CNP | 64.. => Err(Refusal::Dscp(value)),
            _ => Ok(Dscp(value)),
        }
    }

    /// All that jobs may use, in order.
    pub fn all() -> impl Iterator<Item = Dscp> {
        (0..64).filter_map(|value| Dscp::new(value).ok())
    }

    /// Its value, of 6 bits.
    pub fn value(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Dscp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a port has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Bits per second on the wire.
    pub rate_bps: u64,
    /// Queues for jobs, 1 to [`MAX_QUEUES`]; those of congestion notifications and other traffic
    /// are not among them.
    pub queues: u8,
    /// Weights add up to at most this: 100 where they are percentages, as in IEEE 802.1Qaz.
    pub weight_units: u32,
    /// Bytes that a queue may send in a turn for each unit of its weight.
    pub quantum_bytes: u32,
    /// Bytes of the largest frame on the wire.
    pub frame_bytes: u32,
    /// Bytes that a queue holds at most.
    pub buffer_bytes: u64,
}

/// What a job is to have at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantee {
    /// The job.
    pub job: JobId,
    /// That of its packets.
    pub dscp: Dscp,
    /// Bits per second on the wire, not 0.
    pub bps: u64,
    /// Flows with which it competes within a queue, 1 to [`MAX_FLOWS`].
    pub flows: u32,
    /// How much it minds waiting.
    pub latency: Latency,
    /// What may leave at once before its rate holds, where whatever keeps the plan has buckets; 0
    /// for the least.
    pub burst_bytes: u64,
    /// Whether it is backlogged, or must be taken to be.
    pub is_contended: bool,
}

impl Guarantee {
    /// Compares what the jobs need of each flow.
    fn by_ratio(&self, other: &Guarantee) -> Ordering {
        let (own, others) = (u128::from(self.bps), u128::from(other.bps));
        (own * u128::from(other.flows)).cmp(&(others * u128::from(self.flows)))
    }
}

/// How jobs are given queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scheme {
    /// By a hash of the job's number.
    Hash,
    /// The largest contended jobs alone, the others together.
    Contended,
    /// Priorities compressed in order: by latency class, then by guarantee. A pair in one level
    /// costs the rate of the one that should have gone first; the sum over pairs is the least there
    /// is.
    Levels,
    /// Fewest contended jobs whose guarantee is not assured (Q2), then the least sum of weights,
    /// over all partitions into runs by the ratio of guarantee to flows. If all jobs cannot be
    /// assured, those that are not contended are left out of what is shared: they have their part
    /// of the sum, and more once a plan knows that they send.
    Matched,
    /// Queues as `Matched` would choose them for contended jobs, whoever is; and rate limits (Q4)
    /// for jobs in queues in which a contended job is not assured.
    Paced,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The value is no code point for a job.
    #[error("DSCP {0} is not one of 1 to 63 without 46 (urgent) and 48 (congestion notifications)")]
    Dscp(u8),
    /// Two jobs of a port have the same code point.
    #[error("jobs {0} and {1} both have DSCP {2}")]
    DuplicateDscp(JobId, JobId, Dscp),
    /// A job is there twice.
    #[error("job {0} is there twice")]
    DuplicateJob(JobId),
    /// All code points are taken by jobs that job meets at some port.
    #[error("job {0} meets too many jobs: no DSCP is left for it")]
    NoDscp(JobId),
    /// The port has no queues, or more than there can be.
    #[error("{0} queues for jobs; there can be 1 to {MAX_QUEUES}")]
    Queues(u8),
    /// A port whose rate, quantum or units make no sense.
    #[error(
        "a port needs a rate, a quantum, a largest frame, and {least} to {MAX_WEIGHT_UNITS} units of weight"
    )]
    Port {
        /// The fewest units: one for each queue.
        least: u8,
    },
    /// A job whose guarantee or flows make no sense.
    #[error("job {0} needs a guarantee above 0 and 1 to {MAX_FLOWS} flows")]
    Guarantee(JobId),
    /// More is guaranteed than there is.
    #[error(
        "{guaranteed_bps} bit/s are guaranteed, and the port has {rate_bps}: {} are missing",
        guaranteed_bps - u128::from(*rate_bps)
    )]
    Bandwidth {
        /// The sum of all guarantees.
        guaranteed_bps: u128,
        /// What the port has.
        rate_bps: u64,
    },
    /// Integer weights that are not below the guarantees add up to too much.
    #[error("weights that hold all guarantees add up to {needed}, and the port has {units} units")]
    Rounding {
        /// What they add up to.
        needed: u64,
        /// What the port has.
        units: u32,
    },
    /// A plan cannot follow another without leaving a job below its guarantee.
    #[error(
        "to move job {job}, weights have to add up to {needed}, and the port has {units} units"
    )]
    NoRoom {
        /// The one whose move needs least.
        job: JobId,
        /// What weights would add up to.
        needed: u64,
        /// What the port has.
        units: u32,
    },
    /// The plans are of different ports.
    #[error("the plans are of different ports")]
    OtherPort,
}

/// A job in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// What it is to have.
    pub guarantee: Guarantee,
    /// Its queue, from 0.
    pub queue: u8,
    /// What its senders must not exceed together; none if they need not be paced.
    pub rate_limit_bps: Option<u64>,
    /// What it gets at least (Q2, Q4) beside the contended jobs of its queue.
    pub assured_bps: u64,
}

impl Binding {
    /// Whether the guarantee holds by Q2 or Q4.
    pub fn is_assured(&self) -> bool {
        self.assured_bps >= self.guarantee.bps
    }
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    port: Port,
    scheme: Scheme,
    /// By queue; 0 if it has no jobs.
    weights: Vec<u32>,
    /// By job.
    bindings: Vec<Binding>,
}

impl Plan {
    /// One for the jobs of a port.
    ///
    /// # Errors
    /// When the port or a job makes no sense, jobs are not distinct, or more is guaranteed than the
    /// port has.
    pub fn new(port: Port, scheme: Scheme, guarantees: &[Guarantee]) -> Result<Plan, Refusal> {
        check_port(&port)?;
        check_guarantees(&port, guarantees)?;
        let mut jobs = guarantees.to_vec();
        jobs.sort_unstable_by_key(|guarantee| guarantee.job);
        match scheme {
            Scheme::Hash => Plan::of_queues(port, scheme, hashed(&port, &jobs), None),
            Scheme::Contended => Plan::of_queues(port, scheme, contended(&port, &jobs), None),
            Scheme::Levels => Plan::of_queues(port, scheme, levels(&port, &mut jobs), None),
            Scheme::Matched => Plan::matched(port, scheme, jobs),
            Scheme::Paced => {
                let all = jobs.iter().map(|job| Guarantee { is_contended: true, ..*job }).collect();
                let mut plan = Plan::matched(port, scheme, all)?;
                plan.bindings.iter_mut().zip(&jobs).for_each(|(own, job)| own.guarantee = *job);
                plan.reweighed(|job| plan.is_contended(job))
            }
        }
    }

    fn is_contended(&self, job: JobId) -> bool {
        self.binding(job).is_some_and(|own| own.guarantee.is_contended)
    }

    /// The same queues for the same jobs, with the weights and rate limits that suit those that are
    /// contended now.
    ///
    /// # Errors
    /// When integer weights that hold all guarantees do not fit, which is so for no plan that was
    /// made by this scheme.
    pub fn reweighed(&self, is_contended: impl Fn(JobId) -> bool) -> Result<Plan, Refusal> {
        let job = |own: &Binding| Guarantee {
            is_contended: is_contended(own.guarantee.job),
            ..own.guarantee
        };
        let jobs: Vec<Guarantee> = self.bindings.iter().map(job).collect();
        let queue = |guarantee: &Guarantee| self.binding(guarantee.job).map_or(0, |own| own.queue);
        let mut queues: Vec<Vec<Guarantee>> = alloc::vec![Vec::new(); self.port.queues.into()];
        for guarantee in &jobs {
            queues[usize::from(queue(guarantee))].push(*guarantee);
        }
        if !matches!(self.scheme, Scheme::Matched | Scheme::Paced) {
            return Plan::of_queues(self.port, self.scheme, queues, None);
        }
        Plan::weighed(self.port, self.scheme, queues)
    }

    /// By queue: weights of sums of guarantees, or those named.
    fn of_queues(
        port: Port,
        scheme: Scheme,
        queues: Vec<Vec<Guarantee>>,
        weights: Option<Vec<u32>>,
    ) -> Result<Plan, Refusal> {
        let own = || queues.iter().map(|jobs| units(&port, sum_bps(jobs)));
        let needed: u64 = own().sum();
        if needed > u64::from(port.weight_units) {
            return Err(Refusal::Rounding { needed, units: port.weight_units });
        }
        let mut weights = weights.unwrap_or_else(|| own().map(|weight| weight as u32).collect());
        weights.resize(port.queues.into(), 0);
        let mut bindings = Vec::new();
        for (queue, jobs) in (0..).zip(&queues) {
            let weight = weights[usize::from(queue)];
            let unpaced = |job: &Guarantee| Binding {
                guarantee: *job,
                queue,
                rate_limit_bps: None,
                assured_bps: assured_bps(&port, weight, job, jobs),
            };
            let mut own: Vec<Binding> = jobs.iter().map(unpaced).collect();
            if scheme == Scheme::Paced {
                pace(part_bps(&port, weight), &mut own);
            }
            bindings.extend(own);
        }
        bindings.sort_unstable_by_key(|binding| binding.guarantee.job);
        Ok(Plan { port, scheme, weights, bindings })
    }

    /// Queues with every job assured, if that can be; with as many contended ones as possible
    /// otherwise.
    fn matched(port: Port, scheme: Scheme, mut jobs: Vec<Guarantee>) -> Result<Plan, Refusal> {
        jobs.sort_by(Guarantee::by_ratio);
        let limit = u128::from(port.weight_units);
        let queues = usize::from(port.queues);
        let best = |costs: fn(&Port, &[Guarantee]) -> Vec<u128>| {
            segments::best(jobs.len(), queues, limit, |from, to| costs(&port, &jobs[from..to]))
        };
        let found = best(need_of_all).or_else(|| best(needs));
        let Some(found) = found else {
            let needed = units(&port, sum_bps(&jobs));
            return Err(Refusal::Rounding { needed, units: port.weight_units });
        };
        let parts = segments::split(&jobs, &found.ends);
        let weights = found.costs.iter().map(|cost| *cost as u32).collect();
        Plan::of_queues(port, scheme, parts, Some(weights))
    }

    /// Weights that assure every job, or as many contended ones as possible, in queues that are
    /// given.
    fn weighed(
        port: Port,
        scheme: Scheme,
        mut queues: Vec<Vec<Guarantee>>,
    ) -> Result<Plan, Refusal> {
        queues.iter_mut().for_each(|jobs| jobs.sort_by(Guarantee::by_ratio));
        let mut ends = BTreeMap::new();
        let mut from = 0;
        for (queue, jobs) in queues.iter().enumerate().filter(|(_, jobs)| !jobs.is_empty()) {
            ends.insert((from, from + jobs.len()), queue);
            from += jobs.len();
        }
        let limit = u128::from(port.weight_units);
        // Only runs that are the jobs of one queue can be parts.
        let of_queue = |from, to, costs: fn(&Port, &[Guarantee]) -> Vec<u128>| {
            let queue = ends.get(&(from, to)).map(|queue| &queues[*queue]);
            queue.map_or_else(Vec::new, |jobs| costs(&port, jobs))
        };
        let best =
            |costs| segments::best(from, queues.len(), limit, |from, to| of_queue(from, to, costs));
        let found = best(need_of_all).or_else(|| best(needs));
        let mut weights = alloc::vec![0; queues.len()];
        for (cost, queue) in found.iter().flat_map(|found| &found.costs).zip(ends.values()) {
            weights[*queue] = *cost as u32;
        }
        Plan::of_queues(port, scheme, queues, found.map(|_| weights))
    }

    /// The port.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Weights by queue, which add up to at most the port's units; 0 for a queue without jobs.
    pub fn weights(&self) -> &[u32] {
        &self.weights
    }

    /// Jobs in their queues, by number.
    pub fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// That of a job.
    pub fn binding(&self, job: JobId) -> Option<&Binding> {
        let at = self.bindings.binary_search_by_key(&job, |binding| binding.guarantee.job);
        Some(&self.bindings[at.ok()?])
    }

    /// Bits per second that a queue gets while it is backlogged, whatever others send.
    pub fn queue_bps(&self, queue: u8) -> u64 {
        part_bps(&self.port, self.weights.get(usize::from(queue)).copied().unwrap_or(0))
    }

    /// Bytes by which a backlogged queue may lag behind [`queue_bps`](Self::queue_bps) in any
    /// interval. A turn grants it its quantum, and it carries over less than a frame; the rounds of
    /// an interval are known up to one at either end, and to one frame for each queue.
    pub fn lag_bytes(&self, queue: u8) -> u64 {
        let weight = self.weights.get(usize::from(queue)).copied().unwrap_or(0);
        lag_bytes(&self.port, weight)
    }
}

fn check_port(port: &Port) -> Result<(), Refusal> {
    if port.queues == 0 || port.queues > MAX_QUEUES {
        return Err(Refusal::Queues(port.queues));
    }
    let least = port.queues;
    let has_units = (u32::from(least)..=MAX_WEIGHT_UNITS).contains(&port.weight_units);
    let is_good = has_units && port.rate_bps > 0 && port.quantum_bytes > 0 && port.frame_bytes > 0;
    is_good.then_some(()).ok_or(Refusal::Port { least })
}

fn check_guarantees(port: &Port, guarantees: &[Guarantee]) -> Result<(), Refusal> {
    let mut by_dscp = BTreeMap::new();
    let mut jobs = BTreeSet::new();
    for Guarantee { job, dscp, bps, flows, .. } in guarantees {
        if *bps == 0 || *flows == 0 || *flows > MAX_FLOWS {
            return Err(Refusal::Guarantee(*job));
        }
        if !jobs.insert(*job) {
            return Err(Refusal::DuplicateJob(*job));
        }
        if let Some(other) = by_dscp.insert(*dscp, *job) {
            return Err(Refusal::DuplicateDscp(other, *job, *dscp));
        }
    }
    let guaranteed_bps = sum_bps(guarantees);
    let rate_bps = port.rate_bps;
    let fits = guaranteed_bps <= u128::from(rate_bps);
    fits.then_some(()).ok_or(Refusal::Bandwidth { guaranteed_bps, rate_bps })
}

fn lag_bytes(port: &Port, weight: u32) -> u64 {
    let turn = u64::from(weight) * u64::from(port.quantum_bytes);
    2 * turn + (1 + u64::from(port.queues)) * u64::from(port.frame_bytes)
}

fn sum_bps(jobs: &[Guarantee]) -> u128 {
    jobs.iter().map(|job| u128::from(job.bps)).sum()
}

/// The least weight that gets a queue so many bits per second.
fn units(port: &Port, bps: u128) -> u64 {
    let weight = bps.saturating_mul(port.weight_units.into()).div_ceil(port.rate_bps.into());
    u64::try_from(weight).unwrap_or(u64::MAX)
}

/// Bits per second that a weight gets a queue.
fn part_bps(port: &Port, weight: u32) -> u64 {
    (u128::from(port.rate_bps) * u128::from(weight) / u128::from(port.weight_units)) as u64
}

/// The least weight of a queue that assures its jobs, in order of their ratios, without the
/// `exposed` last ones of those that are contended.
fn need(port: &Port, jobs: &[Guarantee], exposed: usize) -> u64 {
    let mut contended = jobs.iter().rev().filter(|job| job.is_contended);
    let flows: u128 = contended.clone().map(|job| u128::from(job.flows)).sum();
    let shared = contended
        .nth(exposed)
        .map_or(0, |highest| (flows * u128::from(highest.bps)).div_ceil(u128::from(highest.flows)));
    units(port, shared.max(sum_bps(jobs)))
}

/// The least weight of a queue that assures its jobs, whichever are contended.
fn need_of_all(port: &Port, jobs: &[Guarantee]) -> Vec<u128> {
    let all: Vec<Guarantee> =
        jobs.iter().map(|job| Guarantee { is_contended: true, ..*job }).collect();
    alloc::vec![u128::from(need(port, &all, 0))]
}

/// By how many of a queue's contended jobs are exposed: the least weight. One is always assured:
/// that of least ratio, by the sum.
fn needs(port: &Port, jobs: &[Guarantee]) -> Vec<u128> {
    let contended = jobs.iter().filter(|job| job.is_contended).count();
    (0..contended.max(1)).map(|exposed| u128::from(need(port, jobs, exposed))).collect()
}

/// Rate limits the jobs of a queue (Q4), if one that is contended is not assured.
fn pace(queue_bps: u64, queue: &mut [Binding]) {
    let is_exposed = |own: &Binding| own.guarantee.is_contended && !own.is_assured();
    if !queue.iter().any(is_exposed) {
        return;
    }
    let sum: u128 = queue.iter().map(|own| u128::from(own.guarantee.bps)).sum();
    let part = |job: &Guarantee| (u128::from(queue_bps) * u128::from(job.bps) / sum) as u64;
    let contended = queue.iter().map(|own| own.guarantee).filter(|job| job.is_contended);
    let Some(top) = contended.max_by(Guarantee::by_ratio) else { return };
    for own in queue {
        let job = &own.guarantee;
        let beside = u128::from(part(&top)) * u128::from(job.flows) / u128::from(top.flows);
        own.assured_bps = part(job).min(u64::try_from(beside).unwrap_or(u64::MAX));
        own.rate_limit_bps = (job.job != top.job).then(|| part(job));
    }
}

fn assured_bps(port: &Port, weight: u32, job: &Guarantee, queue: &[Guarantee]) -> u64 {
    let counts = |other: &&Guarantee| other.is_contended || other.job == job.job;
    let flows: u128 = queue.iter().filter(counts).map(|job| u128::from(job.flows)).sum();
    let shared = u128::from(port.rate_bps) * u128::from(weight) * u128::from(job.flows);
    (shared / (flows * u128::from(port.weight_units))) as u64
}

fn hashed(port: &Port, jobs: &[Guarantee]) -> Vec<Vec<Guarantee>> {
    let mut queues = alloc::vec![Vec::new(); port.queues.into()];
    for guarantee in jobs {
        // Fibonacci hashing: the high bits of the product by 2^64 over the golden ratio.
        let hash = guarantee.job.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        queues[(hash % u64::from(port.queues)) as usize].push(*guarantee);
    }
    queues
}

fn contended(port: &Port, jobs: &[Guarantee]) -> Vec<Vec<Guarantee>> {
    let mut jobs = jobs.to_vec();
    jobs.sort_by_key(|job| (!job.is_contended, core::cmp::Reverse(job.bps)));
    let alone = jobs.iter().take_while(|job| job.is_contended).count();
    let alone = alone.min(usize::from(port.queues) - 1);
    let mut queues: Vec<_> = jobs[..alone].iter().map(|job| alloc::vec![*job]).collect();
    queues.push(jobs[alone..].to_vec());
    queues
}

fn levels(port: &Port, jobs: &mut [Guarantee]) -> Vec<Vec<Guarantee>> {
    jobs.sort_by_key(|job| (job.latency, core::cmp::Reverse(job.bps)));
    let loss = |from: usize, to: usize| {
        let jobs = jobs[from..to].iter().rev();
        let pairs = (0..).zip(jobs).map(|(behind, job): (u128, _)| behind * u128::from(job.bps));
        alloc::vec![pairs.sum()]
    };
    let found = segments::best(jobs.len(), port.queues.into(), u128::MAX, loss);
    found.map_or_else(Vec::new, |found| segments::split(jobs, &found.ends))
}

/// A code point for each job, such that jobs on one trunk differ: by number, the lowest that is
/// free.
///
/// # Errors
/// When a job meets so many others that none is left.
pub fn code_points(ledger: &Ledger) -> Result<BTreeMap<JobId, Dscp>, Refusal> {
    let mut on_trunk: BTreeMap<u32, BTreeSet<Dscp>> = BTreeMap::new();
    let mut given = BTreeMap::new();
    for (job, admission) in ledger.admissions() {
        let trunks = || admission.loads.iter().map(|load| load.trunk);
        let taken: BTreeSet<Dscp> =
            trunks().filter_map(|trunk| on_trunk.get(&trunk)).flatten().copied().collect();
        let dscp = Dscp::all().find(|dscp| !taken.contains(dscp)).ok_or(Refusal::NoDscp(*job))?;
        for trunk in trunks() {
            on_trunk.entry(trunk).or_default().insert(dscp);
        }
        given.insert(*job, dscp);
    }
    Ok(given)
}

/// What the jobs of a ledger are to have on each link of a trunk: with one flow each, and taken to
/// be contended. Plans count bytes on the wire, so rates of jobs must be meant so.
///
/// # Errors
/// When a job on the trunk has no code point.
pub fn guarantees(
    ledger: &Ledger,
    trunk: u32,
    code_points: &BTreeMap<JobId, Dscp>,
) -> Result<Vec<Guarantee>, Refusal> {
    let loads = ledger.admissions().iter().flat_map(|(job, admission)| {
        let own = admission.loads.iter().filter(|load| load.trunk == trunk);
        own.map(|load| (*job, load.bps))
    });
    let guarantee = |(job, bps)| {
        let dscp = *code_points.get(&job).ok_or(Refusal::NoDscp(job))?;
        let latency = Latency::Normal;
        Ok(Guarantee { job, dscp, bps, flows: 1, latency, burst_bytes: 0, is_contended: true })
    };
    loads.map(guarantee).collect()
}
