//! From one plan of a port to the next, without a job below its guarantee or out of order.
//!
//! Packets of a job that moves are still in its old queue when its first ones come to the new
//! queue, which may be faster. So each move lets both exist for a while:
//!
//! 1. The new queue gets the weight that it needs with the job, the old one what it needs as
//!    before: the job counts twice.
//! 2. A code point that nobody uses is bound to the new queue.
//! 3. Each flow of the job goes over to that code point once its last packet with the old one has
//!    left the port: at a sender's own port when it sees that, elsewhere when its last packet is
//!    acknowledged.
//! 4. Nothing is left in the old queue after [`Step::Drain::at_most_ns`].
//! 5. The old code point is unbound, and the old queue's weight falls to what is needed without the
//!    job.
//!
//! - R1: between any two steps, every job whose guarantee both plans assure is assured in the queue
//!   or queues that may have packets of it, every queue's weight holds the sum of its jobs'
//!   guarantees, and weights add up to at most the port's units.
//! - R2: packets of a flow are in one queue at a time, and a queue is in order.
//!
//! At a port of the sender's own host a flow is served all the time: by the old queue up to its
//! last packet, then by the new one. At any other port each flow stands still once for as long as
//! an acknowledgement and a packet take, that is for one round trip without queues. A job falls
//! behind by no more than its guarantee over that time.
//!
//! Where either plan has rate limits, all jobs are paced at their guarantees first, and queues need
//! the sums of these only, so that other queues and nobody else get what a job leaves until the new
//! rate limits hold.
//!
//! Moves are in an order in which weights suffice, found greedily; where there is none the old plan
//! stays in force. All queues of the new plan are first renamed such that as much as possible stays
//! where it is ([`renamed`]). That alone is for ports whose senders keep their code points, as
//! unmodified programs do: only jobs whose neighbours in a queue change move.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::{Binding, Dscp, Guarantee, Plan, Port, Refusal, lag_bytes, need, sum_bps, units};
use crate::ledger::JobId;

/// What is done next, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The weights of all queues become these, at once.
    Weights(Vec<u32>),
    /// The senders of the job keep to so many bits per second together, or to none.
    RateLimit(JobId, Option<u64>),
    /// Packets with the code point go to the queue.
    Bind(Dscp, u8),
    /// The job's flows go over to the code point, each once its last packet with the other one has
    /// left.
    Switch(JobId, Dscp),
    /// Wait until all flows of the job have gone over.
    Drain {
        /// The job.
        job: JobId,
        /// After this time its packets have left the old queue, even if that was full.
        at_most_ns: u64,
    },
    /// Nothing has the code point any more.
    Unbind(Dscp),
}

/// Steps to a plan, and the plan with the code points that jobs then have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebinding {
    /// In order.
    pub steps: Vec<Step>,
    /// What is in force after the last.
    pub plan: Plan,
}

/// Leads from one plan to another. A job that moves gets one of the `free` code points, which
/// neither plan and no other job on the ports of its path may use; its old one is free afterwards.
/// Jobs that are only in the old plan must have ended, those that are only in the new one begin
/// when all is done.
///
/// # Errors
/// When the plans are of different ports, too few code points are free, a job begins with the code
/// point of one that stays, or a move needs more weight than there is.
pub fn rebind(old: &Plan, new: &Plan, free: &[Dscp]) -> Result<Rebinding, Refusal> {
    if old.port != new.port {
        return Err(Refusal::OtherPort);
    }
    let mut new = renamed(old, new);
    for binding in &mut new.bindings {
        if let Some(own) = old.binding(binding.guarantee.job) {
            binding.guarantee.dscp = own.guarantee.dscp;
        }
    }
    let mut change = Change::new(old, &new);
    let mut spare: BTreeSet<Dscp> = free.iter().copied().collect();
    for own in old.bindings.iter().chain(&new.bindings) {
        spare.remove(&own.guarantee.dscp);
    }
    let departed = old.bindings.iter().filter(|own| new.binding(own.guarantee.job).is_none());
    change.steps.extend(departed.map(|own| Step::Unbind(own.guarantee.dscp)));
    if change.is_paced {
        change.steps.extend(
            new.bindings
                .iter()
                .map(|own| Step::RateLimit(own.guarantee.job, Some(own.guarantee.bps))),
        );
    }
    let mut moves: Vec<JobId> = change.moves(old, &new);
    while !moves.is_empty() {
        let sums = moves.iter().map(|job| change.needed_for(*job, &new));
        let (needed, at) = sums.zip(0..).min().unwrap_or((u64::MAX, 0));
        let job = moves.remove(at);
        let units = new.port.weight_units;
        if needed > u64::from(units) {
            return Err(Refusal::NoRoom { job, needed, units });
        }
        let dscp = spare.pop_first().ok_or(Refusal::NoDscp(job))?;
        change.perform(job, &new, dscp);
        rename(&mut new, job, dscp);
    }
    check_distinct(&new)?;
    let arrived = new.bindings.iter().filter(|own| old.binding(own.guarantee.job).is_none());
    change.steps.push(Step::Weights(new.weights.clone()));
    change.steps.extend(arrived.map(|own| Step::Bind(own.guarantee.dscp, own.queue)));
    if change.is_paced {
        let pace = |own: &Binding| Step::RateLimit(own.guarantee.job, own.rate_limit_bps);
        change.steps.extend(new.bindings.iter().map(pace));
    }
    Ok(Rebinding { steps: change.steps, plan: new })
}

/// Refuses a job that begins with the code point of one that stays.
fn check_distinct(plan: &Plan) -> Result<(), Refusal> {
    let mut jobs = BTreeMap::new();
    for Guarantee { job, dscp, .. } in plan.bindings.iter().map(|own| own.guarantee) {
        if let Some(other) = jobs.insert(dscp, job) {
            return Err(Refusal::DuplicateDscp(other, job, dscp));
        }
    }
    Ok(())
}

/// Gives a job of a plan another code point.
fn rename(plan: &mut Plan, job: JobId, dscp: Dscp) {
    if let Ok(at) = plan.bindings.binary_search_by_key(&job, |binding| binding.guarantee.job) {
        plan.bindings[at].guarantee.dscp = dscp;
    }
}

/// The new plan with its queues renamed such that as much as possible stays where it is: the pair
/// of queues that has most guarantees in common is made one, then the next. Nothing is renamed if
/// the plans are of different ports.
pub fn renamed(old: &Plan, new: &Plan) -> Plan {
    if old.port != new.port {
        return new.clone();
    }
    let mut common: BTreeMap<(u8, u8), u128> = BTreeMap::new();
    for (was, is) in
        (0..new.port.queues).flat_map(|was| (0..new.port.queues).map(move |is| (was, is)))
    {
        let stay = new.bindings.iter().filter(|own| {
            own.queue == is && old.binding(own.guarantee.job).is_some_and(|b| b.queue == was)
        });
        common.insert((was, is), stay.map(|own| u128::from(own.guarantee.bps)).sum());
    }
    let mut name = BTreeMap::new();
    while let Some((&(was, is), _)) =
        common.iter().max_by_key(|(pair, bps)| (**bps, core::cmp::Reverse(**pair)))
    {
        name.insert(is, was);
        common.retain(|(other_was, other_is), _| *other_was != was && *other_is != is);
    }
    let mut plan = new.clone();
    for (is, was) in &name {
        plan.weights[usize::from(*was)] = new.weights[usize::from(*is)];
    }
    for binding in &mut plan.bindings {
        binding.queue = name[&binding.queue];
    }
    plan
}

/// A change under way.
struct Change {
    port: Port,
    /// Whether all jobs are paced at their guarantees.
    is_paced: bool,
    /// Jobs whose guarantee both plans assure.
    assured: BTreeSet<JobId>,
    /// By queue: the jobs that may have packets there.
    members: Vec<Vec<Guarantee>>,
    weights: Vec<u32>,
    steps: Vec<Step>,
}

impl Change {
    /// One in which the old plan is in force, and nothing of jobs that have ended.
    fn new(old: &Plan, new: &Plan) -> Change {
        let mut members = alloc::vec![Vec::new(); old.port.queues.into()];
        let mut assured = BTreeSet::new();
        for own in &old.bindings {
            let Some(next) = new.binding(own.guarantee.job) else { continue };
            members[usize::from(own.queue)].push(next.guarantee);
            if own.is_assured() && next.is_assured() {
                assured.insert(own.guarantee.job);
            }
        }
        let weights = old.weights.clone();
        let is_paced =
            old.bindings.iter().chain(&new.bindings).any(|own| own.rate_limit_bps.is_some());
        Change { port: old.port, is_paced, assured, members, weights, steps: Vec::new() }
    }

    /// Jobs whose queues differ.
    fn moves(&self, old: &Plan, new: &Plan) -> Vec<JobId> {
        let differs = |own: &&Binding| {
            old.binding(own.guarantee.job).is_some_and(|was| was.queue != own.queue)
        };
        new.bindings.iter().filter(differs).map(|own| own.guarantee.job).collect()
    }

    /// The least weight that keeps a queue's jobs assured.
    fn held(&self, jobs: &[Guarantee]) -> u64 {
        if self.is_paced {
            return units(&self.port, sum_bps(jobs));
        }
        let mut jobs = jobs.to_vec();
        jobs.sort_by(Guarantee::by_ratio);
        let is_exposed = |job: &&Guarantee| !self.assured.contains(&job.job);
        let highest = jobs.iter().rposition(|job| !is_exposed(&job));
        let Some(highest) = highest else { return units(&self.port, sum_bps(&jobs)) };
        // An assured job that is not contended is counted as if it was, to be on the safe side.
        for job in &mut jobs {
            job.is_contended |= self.assured.contains(&job.job);
        }
        let above = jobs[highest + 1..].iter().filter(|job| job.is_contended).count();
        need(&self.port, &jobs, above)
    }

    /// Weights while a job moves: what each queue needs for the jobs that may have packets there.
    fn during(&self, job: JobId, new: &Plan) -> Vec<u64> {
        let mut weights: Vec<u64> = self.members.iter().map(|jobs| self.held(jobs)).collect();
        if let Some(own) = new.binding(job) {
            let mut jobs = self.members[usize::from(own.queue)].clone();
            jobs.push(own.guarantee);
            weights[usize::from(own.queue)] = self.held(&jobs);
        }
        weights
    }

    fn needed_for(&self, job: JobId, new: &Plan) -> u64 {
        self.during(job, new).iter().sum()
    }

    /// Moves a job to another code point and its new queue. Weights suffice.
    fn perform(&mut self, job: JobId, new: &Plan, dscp: Dscp) {
        let Some(own) = new.binding(job) else { return };
        let during = self.during(job, new);
        self.weights = during.into_iter().map(|weight| weight as u32).collect();
        let from = self.members.iter().position(|jobs| jobs.iter().any(|own| own.job == job));
        let weight = from.map_or(0, |from| self.weights[from]);
        self.steps.extend([
            Step::Weights(self.weights.clone()),
            Step::Bind(dscp, own.queue),
            Step::Switch(job, dscp),
            Step::Drain { job, at_most_ns: drain_ns(&self.port, weight) },
            Step::Unbind(own.guarantee.dscp),
        ]);
        for jobs in &mut self.members {
            jobs.retain(|own| own.job != job);
        }
        self.members[usize::from(own.queue)].push(Guarantee { dscp, ..own.guarantee });
    }
}

/// How long a full queue of that weight needs for what is in it, and for what DWRR may lag behind.
fn drain_ns(port: &Port, weight: u32) -> u64 {
    let bytes = u128::from(port.buffer_bytes) + u128::from(lag_bytes(port, weight));
    let bit_ns = bytes * 8 * 1_000_000_000 * u128::from(port.weight_units);
    let ns = bit_ns.div_ceil(u128::from(port.rate_bps) * u128::from(weight.max(1)));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
