//! Hosts or links are gone, or back: who is hit, and the cheapest repair.
//!
//! [`strike`] takes the network as it is now ([`Network::with_outage`]) and the jobs as they were
//! placed. A job is *hit* if a host of it is lost, or if it crosses a link that is now to carry
//! more than it can, since paths lead elsewhere. All others keep their place and get their
//! reservation on the paths of now. Nothing is chosen there, so a log that says what is down says
//! the same ledger at every replay.
//!
//! [`repair`] then settles the jobs that are hit, one after the other: at their place if the links
//! hold them there without the others, and else with as few workers moved as possible
//! ([`relocate`]). Others are never moved. Several orders of the jobs are tried, and the repair
//! with the fewest degraded workers, then the fewest moves, then the least cost is kept. What
//! cannot be repaired is *degraded*: it keeps its slots, has no bandwidth reserved, and the reason
//! says what is missing.
//!
//! What comes back is a repair, too: a degraded job is whole again where the links hold it, without
//! a move.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

use crate::ledger::{JobId, Ledger, Refusal};
use crate::loads::{Load, Loader};
use crate::network::Network;
use crate::placement::migration::{Limits, Move, Standing, Stuck, apart, relocate};
use crate::placement::search::Memory;
use crate::placement::{Request, cost};

/// Orders of the jobs that are tried.
const ORDERS: u32 = 12;

/// Why a job is hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// So many of its workers were on hosts that are lost.
    Hosts {
        /// How many.
        workers: u32,
    },
    /// It crosses a link that would carry too much.
    Links {
        /// The trunk of the link that lacks most.
        trunk: u32,
        /// By how much all jobs there exceed it, in bits per second.
        excess_bps: u64,
    },
    /// The ledger refuses it at its place for another reason, such as fewer slots.
    Place,
}

/// The ledger after something went down or came back, before any repair.
#[derive(Clone, Debug)]
pub struct Struck {
    /// All jobs: those that are hit have their slots alone.
    pub ledger: Ledger,
    /// Who is hit, and why.
    pub hits: BTreeMap<JobId, Cause>,
}

/// A job whose bandwidth cannot be reserved anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Degraded {
    /// The job.
    pub job: JobId,
    /// Its workers on hosts that are lost: these do not run.
    pub lost_workers: u32,
    /// What is missing at its place; `None` if it has lost hosts.
    pub missing: Option<Refusal>,
    /// Why it gets no other place.
    pub why: Stuck,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Repair {
    /// The ledger afterwards.
    pub ledger: Ledger,
    /// The jobs that are hit and get a place, in an order in which each fits. A job that keeps its
    /// place has no moves.
    pub steps: Vec<Move>,
    /// Those that do not.
    pub degraded: Vec<Degraded>,
}

impl Repair {
    /// How many workers change their host.
    pub fn workers_moved(&self) -> u32 {
        self.steps.iter().map(Move::workers).sum()
    }
}

/// Who is hit, and the ledger of all others; see the module's text. The numbers of jobs are each
/// there once.
///
/// # Errors
/// When a job cannot even have its slots: the placements are not of this network.
pub fn strike(network: Network, standings: &[Standing<'_>]) -> Result<Struck, Refusal> {
    let mut ledger = Ledger::new(network);
    let mut hits = hosts_lost(ledger.network(), standings);
    let intact = standings.iter().filter(|standing| !hits.contains_key(&standing.id));
    let loads: Vec<(JobId, Vec<Load>)> =
        intact.map(|standing| (standing.id, loads_of(ledger.network(), standing))).collect();
    let mut sums = alloc::vec![0_u64; ledger.network().trunks()];
    for load in loads.iter().flat_map(|(_, loads)| loads) {
        let sum = &mut sums[load.trunk as usize];
        *sum = sum.saturating_add(load.bps);
    }
    let excess = |load: &Load| {
        let capacity = ledger.network().capacity_bps(load.trunk);
        sums[load.trunk as usize].saturating_sub(capacity)
    };
    for (job, loads) in &loads {
        let worst = loads.iter().rev().max_by_key(|load| excess(load));
        if let Some(worst) = worst.filter(|worst| excess(worst) > 0) {
            let (trunk, excess_bps) = (worst.trunk, excess(worst));
            hits.insert(*job, Cause::Links { trunk, excess_bps });
        }
    }
    for standing in standings {
        let slots = standing.job.slots_per_worker;
        if !hits.contains_key(&standing.id) && admit(&mut ledger, standing).is_none() {
            hits.insert(standing.id, Cause::Place);
        }
        if hits.contains_key(&standing.id) {
            ledger.hold(standing.id, slots, standing.pieces)?;
        }
    }
    Ok(Struck { ledger, hits })
}

/// Jobs with workers on lost hosts.
fn hosts_lost(network: &Network, standings: &[Standing<'_>]) -> BTreeMap<JobId, Cause> {
    let lost = |standing: &Standing<'_>| {
        let host_is_lost = |host: u32| host < network.hosts() && network.is_lost(host);
        let on_lost = standing.pieces.iter().filter(|piece| host_is_lost(piece.host));
        on_lost.map(|piece| piece.run.len()).sum::<u32>()
    };
    let counted = standings.iter().map(|standing| (standing.id, lost(standing)));
    let hit = counted.filter(|(_, workers)| *workers > 0);
    hit.map(|(id, workers)| (id, Cause::Hosts { workers })).collect()
}

/// What a job puts on the links at its place; nothing where the place is none of this network.
fn loads_of(network: &Network, standing: &Standing<'_>) -> Vec<Load> {
    let mut loads = Vec::new();
    let is_there = standing.pieces.iter().all(|piece| piece.host < network.hosts());
    if is_there && let Ok(request) = Request::new(standing.job, standing.abstraction) {
        let demand = request.demand(standing.order);
        Loader::new().loads(network, demand, standing.abstraction, standing.pieces, &mut loads);
    }
    loads
}

fn admit(ledger: &mut Ledger, standing: &Standing<'_>) -> Option<()> {
    let request = Request::new(standing.job, standing.abstraction).ok()?;
    let demand = request.demand(standing.order);
    let slots = standing.job.slots_per_worker;
    ledger.admit(standing.id, demand, slots, standing.abstraction, standing.pieces).ok()
}

/// Settles those that are hit; see the module's text. `standings` are those of [`strike`].
pub fn repair(struck: &Struck, standings: &[Standing<'_>], limits: Limits) -> Repair {
    let is_hit = |standing: &&Standing<'_>| struck.hits.contains_key(&standing.id);
    let mut hit: Vec<Standing<'_>> = standings.iter().filter(is_hit).copied().collect();
    let lost = |standing: &Standing<'_>| match struck.hits.get(&standing.id) {
        Some(Cause::Hosts { workers }) => *workers,
        _ => 0,
    };
    let workers = |standing: &Standing<'_>| -> u32 {
        standing.pieces.iter().map(|piece| piece.run.len()).sum()
    };
    // Who has lost no host keeps its place if there is room, the largest first.
    hit.sort_by_key(|standing| (lost(standing), u32::MAX - workers(standing), standing.id));
    let least: u32 = hit.iter().map(lost).sum();
    let mut random = Pcg32::new(limits.seed, 0x0052_4550);
    let mut best: Option<(Repair, Worth)> = None;
    for number in 0..ORDERS {
        let seed = limits.seed.wrapping_add(u64::from(number) << 32);
        let repair = settle(struck, standings, &hit, Limits { seed, ..limits });
        let worth = Worth::of(&repair, &hit, workers);
        if best.as_ref().is_none_or(|(_, best)| worth < *best) {
            best = Some((repair, worth));
        }
        let is_least = |worth: &Worth| worth.degraded == 0 && worth.moved == least;
        if hit.len() < 2 && number > 0 || best.as_ref().is_some_and(|(_, worth)| is_least(worth)) {
            break;
        }
        for at in (1..hit.len()).rev() {
            hit.swap(at, random.next_u32() as usize % (at + 1));
        }
    }
    let nothing =
        || Repair { ledger: struck.ledger.clone(), steps: Vec::new(), degraded: Vec::new() };
    best.map_or_else(nothing, |(repair, _)| repair)
}

/// What a repair is worth: the least is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Worth {
    degraded: u32,
    moved: u32,
    cost: u64,
}

impl Worth {
    fn of(repair: &Repair, hit: &[Standing<'_>], workers: impl Fn(&Standing<'_>) -> u32) -> Worth {
        let is_degraded = |standing: &&Standing<'_>| {
            repair.degraded.iter().any(|degraded| degraded.job == standing.id)
        };
        let degraded = hit.iter().filter(is_degraded).map(workers).sum();
        let mut cost_of_all = 0_u64;
        let mut ledger = repair.ledger.clone();
        for step in &repair.steps {
            if let Some(own) = own_cost(&mut ledger, step.job) {
                cost_of_all = cost_of_all.saturating_add(own);
            }
        }
        Worth { degraded, moved: repair.workers_moved(), cost: cost_of_all }
    }
}

/// What a job costs, as if it had come last; it is released.
fn own_cost(ledger: &mut Ledger, job: JobId) -> Option<u64> {
    let admission = ledger.release(job).ok()?;
    cost(ledger, admission.slots_per_worker(), &admission.pieces, &admission.loads)
}

/// Settles jobs in this order.
fn settle(
    struck: &Struck,
    standings: &[Standing<'_>],
    hit: &[Standing<'_>],
    limits: Limits,
) -> Repair {
    let mut ledger = struck.ledger.clone();
    let (mut steps, mut degraded) = (Vec::new(), Vec::new());
    let mut memory = Memory::new();
    let mut left = limits.most_moved;
    for standing in hit {
        let lost_workers = match struck.hits.get(&standing.id) {
            Some(Cause::Hosts { workers }) => *workers,
            _ => 0,
        };
        let own = Limits { most_moved: left, ..limits };
        match settle_one(&mut ledger, standings, standing, own, &mut memory) {
            Ok(step) => {
                left -= step.workers();
                steps.push(step);
            }
            Err(why) => {
                let missing = missing(&mut ledger, standing);
                degraded.push(Degraded { job: standing.id, lost_workers, missing, why });
            }
        }
    }
    Repair { ledger, steps, degraded }
}

/// Gives a job that is held in the ledger its place and bandwidth; one that finds none stays held.
fn settle_one(
    ledger: &mut Ledger,
    standings: &[Standing<'_>],
    standing: &Standing<'_>,
    limits: Limits,
    memory: &mut Memory,
) -> Result<Move, Stuck> {
    let avoided = apart(ledger, (standing.id, standing.name, standing.job), standings);
    let request = Request::new(standing.job, standing.abstraction)?.avoiding(avoided);
    let slots = standing.job.slots_per_worker;
    ledger.release(standing.id)?;
    let found = relocate(ledger, &request, standing, limits, memory);
    let settled = found.and_then(|step| {
        let demand = request.demand(step.order);
        ledger.admit(standing.id, demand, slots, standing.abstraction, &step.pieces)?;
        Ok(step)
    });
    if settled.is_err() {
        // Its slots were its own until now, so this is not refused.
        ledger.hold(standing.id, slots, standing.pieces)?;
    }
    settled
}

/// What the links lack where a job is that is held in the ledger, if it has lost no host.
fn missing(ledger: &mut Ledger, standing: &Standing<'_>) -> Option<Refusal> {
    if standing.pieces.iter().any(|piece| ledger.network().is_lost(piece.host)) {
        return None;
    }
    let request = Request::new(standing.job, standing.abstraction).ok()?;
    let (demand, slots) = (request.demand(standing.order), standing.job.slots_per_worker);
    let missing =
        ledger.relocate(standing.id, demand, slots, standing.abstraction, standing.pieces);
    missing.err()
}
