//! Placed jobs that move so that others have room.
//!
//! [`defragment`] lowers what all jobs together cost ([`cost`]): it looks at where the search would
//! place each job if it came now, and takes the move that saves most per worker moved, one after
//! the other. [`make_room`] finds moves after which a job fits that does not fit now: it takes a
//! few jobs of one group of hosts away, places the new one, and moves those with as few workers as
//! possible to where they fit beside it.
//!
//! No more workers are moved than may be, and each step fits when it is taken, beside all others
//! where they are then: no job is without bandwidth on the way, but for the one that moves. Both
//! may be stopped after any number of tries; the same seed and number give the same moves.

use alloc::vec::Vec;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

use super::migration::{Limits, Move, Plan, Standing, Stuck, apart, difference, relocate};
use super::search::{self, Memory};
use super::{Placement, Request, cost};
use crate::ledger::{JobId, Ledger, Refusal};
use crate::loads::Piece;

/// Iterations of each search.
const ITERATIONS: u32 = 120;

/// Most jobs that are taken away together to make room.
const MOST_TOGETHER: usize = 4;

/// A number that no job has: that of the job that is to fit.
const NEW: JobId = JobId::MAX;

/// What all jobs cost: each as if it had come last. Jobs that the ledger does not hold cost
/// nothing.
pub fn total_cost(ledger: &Ledger, standings: &[Standing<'_>]) -> u64 {
    let mut scratch = ledger.clone();
    let own = standings.iter().map(|standing| own_cost(&mut scratch, standing));
    own.fold(0, u64::saturating_add)
}

fn own_cost(ledger: &mut Ledger, standing: &Standing<'_>) -> u64 {
    let Ok(held) = ledger.release(standing.id) else { return 0 };
    let own = cost(ledger, held.slots_per_worker(), &held.pieces, &held.loads);
    ledger.restore(standing.id, held);
    own.unwrap_or(u64::MAX)
}

/// A move that saves something.
struct Saving<'a> {
    standing: Standing<'a>,
    step: Move,
    saved: u64,
}

/// Moves that lower what all jobs cost; see the module's text. A round tries each job once, and
/// there are as many rounds as tries at most.
pub fn defragment(ledger: &Ledger, standings: &[Standing<'_>], limits: Limits) -> Plan {
    let mut plan = Plan { ledger: ledger.clone(), steps: Vec::new(), stuck: Vec::new() };
    let (mut memory, mut left) = (Memory::new(), limits.most_moved);
    let mut before = total_cost(ledger, standings);
    for round in 0..limits.tries {
        let seed = limits.seed.wrapping_add(round.into());
        let mut savings: Vec<Saving<'_>> = standings
            .iter()
            // A job that has moved stays: its place was the cheapest a moment ago.
            .filter(|standing| plan.steps.iter().all(|step| step.job != standing.id))
            .filter_map(|standing| saving(&plan.ledger, standings, standing, seed, &mut memory))
            .filter(|saving| saving.step.workers() <= left)
            .collect();
        // By what is saved for each worker that moves.
        let per_worker =
            |saving: &Saving<'_>| saving.saved / u64::from(saving.step.workers().max(1));
        savings.sort_by_key(|saving| (u64::MAX - per_worker(saving), saving.standing.id));
        let taken = savings.into_iter().find_map(|saving| {
            let mut after = plan.ledger.clone();
            carry_out(&mut after, &saving.standing, &saving.step).ok()?;
            let total = total_cost(&after, standings);
            (total < before).then_some((after, saving.step, total))
        });
        let Some((after, step, total)) = taken else { break };
        left -= step.workers();
        (plan.ledger, before) = (after, total);
        plan.steps.push(step);
    }
    plan
}

/// What a job would save where the search places it now.
fn saving<'a>(
    ledger: &Ledger,
    standings: &[Standing<'_>],
    standing: &Standing<'a>,
    seed: u64,
    memory: &mut Memory,
) -> Option<Saving<'a>> {
    let mut without = ledger.clone();
    let held = without.release(standing.id).ok().filter(|held| !held.is_degraded())?;
    let slots = held.slots_per_worker();
    let own = cost(&without, slots, &held.pieces, &held.loads)?;
    let request = request_of(&without, standings, standing).ok()?;
    let found = search::place(&without, &request, memory, seed, ITERATIONS).ok()?;
    let saved = own.checked_sub(found.cost).filter(|saved| *saved > 0)?;
    let step = moved_to(standing, &held.pieces, found);
    Some(Saving { standing: *standing, step, saved })
}

fn moved_to(standing: &Standing<'_>, before: &[Piece], found: Placement) -> Move {
    let after = (found.order, found.pieces.as_slice());
    let moved = difference(&standing.job.pattern, (standing.order, before), after);
    Move { job: standing.id, order: found.order, pieces: found.pieces, moved }
}

/// A job's request, away from hosts of those that it is kept apart from.
fn request_of(
    ledger: &Ledger,
    standings: &[Standing<'_>],
    standing: &Standing<'_>,
) -> Result<Request, Stuck> {
    let avoided = apart(ledger, (standing.id, standing.name, standing.job), standings);
    Ok(Request::new(standing.job, standing.abstraction)?.avoiding(avoided))
}

fn carry_out(ledger: &mut Ledger, standing: &Standing<'_>, step: &Move) -> Result<(), Stuck> {
    let request = Request::new(standing.job, standing.abstraction)?;
    let (demand, slots) = (request.demand(step.order), request.slots_per_worker());
    Ok(ledger.relocate(step.job, demand, slots, standing.abstraction, &step.pieces)?)
}

/// Moves after which a job fits, and its place then; none if it fits now. The job itself is not in
/// the plan's ledger.
///
/// # Errors
/// Why it does not fit now, where no moves were found either.
pub fn make_room(
    ledger: &Ledger,
    standings: &[Standing<'_>],
    wanted: &Request,
    limits: Limits,
) -> Result<(Plan, Placement), Refusal> {
    let mut memory = Memory::new();
    let nothing = Plan { ledger: ledger.clone(), steps: Vec::new(), stuck: Vec::new() };
    let refusal = match search::place(ledger, wanted, &mut memory, limits.seed, ITERATIONS) {
        Ok(placement) => return Ok((nothing, placement)),
        Err(refusal) => refusal,
    };
    let mut random = Pcg32::new(limits.seed, 0x0044_4546);
    let mut best: Option<(Plan, Placement)> = None;
    for number in 0..limits.tries {
        let fewest = best.as_ref().map_or(limits.most_moved, |(plan, _)| {
            // Only fewer moves are better.
            plan.workers_moved().saturating_sub(1)
        });
        let taken = chosen(ledger, standings, wanted, number as usize, &mut random);
        let seed = limits.seed.wrapping_add(number.into());
        let own = Limits { most_moved: fewest, seed, tries: limits.tries.min(60) };
        if let Some(found) = exchanged(ledger, standings, wanted, &taken, own, &mut memory) {
            best = Some(found);
        }
    }
    best.ok_or(refusal)
}

/// The jobs that one try takes away, in order: each alone at first, then some of a group of hosts
/// that could hold the job.
fn chosen<'a>(
    ledger: &Ledger,
    standings: &[Standing<'a>],
    wanted: &Request,
    number: usize,
    random: &mut Pcg32,
) -> Vec<Standing<'a>> {
    if let Some(alone) = standings.get(number) {
        return alloc::vec![*alone];
    }
    let mut below = |below: usize| random.next_u32() as usize % below.max(1);
    let network = ledger.network();
    let groups = network.groups();
    let needed = u64::from(wanted.workers()) * u64::from(wanted.slots_per_worker());
    let large = (0..groups.len() as u32).filter(|group| network.slots_of(*group) >= needed);
    let large: Vec<u32> = large.collect();
    let Some(group) = large.get(below(large.len())) else { return Vec::new() };
    let hosts = groups.hosts_of(*group);
    let is_there =
        |standing: &&Standing<'_>| standing.pieces.iter().any(|piece| hosts.contains(&piece.host));
    let mut there: Vec<Standing<'a>> = standings.iter().filter(is_there).copied().collect();
    for at in (1..there.len()).rev() {
        there.swap(at, below(at + 1));
    }
    there.truncate(MOST_TOGETHER);
    there
}

/// Takes jobs away one after the other until the wanted one fits, and places them anew beside it.
fn exchanged(
    ledger: &Ledger,
    standings: &[Standing<'_>],
    wanted: &Request,
    taken: &[Standing<'_>],
    limits: Limits,
    memory: &mut Memory,
) -> Option<(Plan, Placement)> {
    let mut scratch = ledger.clone();
    let mut away = Vec::new();
    let mut placement = None;
    for standing in taken {
        let held = scratch.release(standing.id).ok().filter(|held| !held.is_degraded())?;
        away.push((*standing, held.pieces));
        let found = search::place(&scratch, wanted, memory, limits.seed, ITERATIONS);
        if let Ok(found) = found {
            placement = Some(found);
            break;
        }
    }
    let placement = placement?;
    let (demand, slots) = (wanted.demand(placement.order), wanted.slots_per_worker());
    scratch.admit(NEW, demand, slots, wanted.abstraction(), &placement.pieces).ok()?;
    let mut left = limits.most_moved;
    let mut steps = Vec::new();
    for (standing, pieces) in &away {
        let own = Limits { most_moved: left, ..limits };
        let request = request_of(&scratch, standings, standing).ok()?;
        let there = Standing { pieces, ..*standing };
        let step = relocate(&scratch, &request, &there, own, memory).ok()?;
        let (demand, slots) = (request.demand(step.order), request.slots_per_worker());
        scratch.admit(step.job, demand, slots, standing.abstraction, &step.pieces).ok()?;
        left -= step.workers();
        steps.push((*standing, step));
    }
    let plan = in_order(ledger, steps)?;
    Some((plan, placement))
}

/// The steps in an order in which each fits; `None` if there is none without a detour.
fn in_order(ledger: &Ledger, mut waiting: Vec<(Standing<'_>, Move)>) -> Option<Plan> {
    let mut plan = Plan { ledger: ledger.clone(), steps: Vec::new(), stuck: Vec::new() };
    waiting.retain(|(_, step)| !step.moved.is_empty());
    while !waiting.is_empty() {
        let ledger = &mut plan.ledger;
        let at = waiting.iter().position(|(job, step)| carry_out(ledger, job, step).is_ok())?;
        plan.steps.push(waiting.remove(at).1);
    }
    Some(plan)
}
