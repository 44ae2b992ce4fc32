//! What a brain writes when something goes down or comes back, when a job is released, or when it
//! is asked to tidy up: the change itself, the moves behind it, and DSCPs of jobs that meet now.
//! All of that is one batch, so it is durable as a whole.
//!
//! Whatever makes room gives degraded jobs their guarantee back: the end of an outage, a release,
//! and tidying up.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use topology::graph::{LinkId, NodeId};

use crate::ledger::JobId;
use crate::log::{Book, Change, Entry, Held, MAX_RESTORED, Moved, NO_SITE};
use crate::placement::defragmentation;
use crate::placement::migration::{Limits, Move, Standing};
use crate::repair::{Cause, Struck, repair};

/// Something that can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A host or a switch.
    Node(NodeId),
    /// A link, in both directions.
    Link(LinkId),
    /// The same, because an agent lost or found its carrier.
    Carrier(LinkId),
}

/// Tries for each job that has to move.
const TRIES: u32 = 16;

/// The same after a release, which must not take as long: anyone may release jobs, one after the
/// other.
const RESTORE_TRIES: u32 = 4;

/// Rounds of tidying up.
const ROUNDS: u32 = 4;

/// Most workers that are moved so that degraded jobs have their guarantee again after a release.
const MOST_MOVED: u32 = 4096;

/// Most workers, and [`JOB_EFFORT`] and more for each job, of the degraded jobs that are tried
/// after one release.
const RESTORE_EFFORT: u64 = 1 << 12;

/// Most DSCPs that are tried to be taken from others in one outage: each try costs a copy of the
/// book.
const MOST_SWAPS: u32 = 64;

/// What it costs to try a job, in workers, beside its own.
const JOB_EFFORT: u64 = 64;

/// So many hosts that a job is looked for on cost as much as a worker.
const HOSTS_PER_WORKER: u64 = 128;

/// Applies a change that goes behind the client's own.
fn apply(book: &mut Book, changes: &mut Vec<Change>, change: Change) -> Result<(), String> {
    let entry = Entry { client: 0, sequence: 0, change };
    book.apply(book.term(), &entry).map_err(|error| error.to_string())?;
    changes.push(entry.change);
    Ok(())
}

/// Gives another DSCP to those of these jobs that meet theirs. Returns those for whom none is free.
fn tell_apart(
    book: &mut Book,
    changes: &mut Vec<Change>,
    clashing: impl Iterator<Item = JobId>,
) -> Result<Vec<JobId>, String> {
    let mut stuck = Vec::new();
    for job in clashing {
        let Some(held) = book.jobs().get(&job) else { continue };
        match book.dscp_in_place(job, held.dscp) {
            Ok(dscp) if dscp == held.dscp => {}
            Ok(dscp) => apply(book, changes, Change::Mark(job, dscp))?,
            Err(_) => stuck.push(job),
        }
    }
    Ok(stuck)
}

/// Jobs whose paths have changed get another DSCP where they meet theirs. A job that gets none is
/// degraded: unlike a move, an outage cannot be refused.
fn tell_apart_on_new_paths(
    before: &Book,
    book: &mut Book,
    changes: &mut Vec<Change>,
) -> Result<(), String> {
    let jobs = book.jobs().keys().copied();
    let has_changed: BTreeSet<JobId> =
        jobs.filter(|job| trunks(before, *job) != trunks(book, *job)).collect();
    let clashing = book.clashes(|job| has_changed.contains(&job));
    let mut tries = MOST_SWAPS;
    // What the last one leaves is free for the others.
    for job in tell_apart(book, changes, clashing.into_iter())?.into_iter().rev() {
        for stuck in tell_apart(book, changes, core::iter::once(job))? {
            if !swap(book, changes, stuck, &has_changed, &mut tries)? {
                apply(book, changes, Change::Degrade(stuck))?;
            }
        }
    }
    Ok(())
}

fn trunks(book: &Book, job: JobId) -> Option<Vec<u32>> {
    let own = book.ledger().admissions().get(&job)?;
    Some(own.loads.iter().map(|load| load.trunk).collect())
}

/// Gives a job the DSCP of others that can have another one: of jobs whose paths have changed, and
/// nobody else. Returns whether it found one.
fn swap(
    book: &mut Book,
    changes: &mut Vec<Change>,
    job: JobId,
    may_change: &BTreeSet<JobId>,
    tries: &mut u32,
) -> Result<bool, String> {
    let mut holders: BTreeMap<_, BTreeSet<JobId>> = BTreeMap::new();
    for trunk in trunks(book, job).unwrap_or_default() {
        for other in book.on_trunk(trunk).iter().filter(|other| other.job != job) {
            holders.entry(other.dscp).or_default().insert(other.job);
        }
    }
    for (dscp, holders) in holders {
        if *tries == 0 {
            return Ok(false);
        }
        if !holders.is_subset(may_change) {
            continue;
        }
        *tries -= 1;
        let (mut after, mut marks) = (book.clone(), Vec::new());
        let is_free = holders.into_iter().all(|holder| {
            let other = after.dscp_besides(holder, dscp);
            other.is_ok_and(|other| {
                apply(&mut after, &mut marks, Change::Mark(holder, other)).is_ok()
            })
        });
        if is_free {
            apply(&mut after, &mut marks, Change::Mark(job, dscp))?;
            *book = after;
            changes.append(&mut marks);
            return Ok(true);
        }
    }
    Ok(false)
}

/// What is written when these parts go down, or come back: nothing if that is known already.
///
/// # Errors
/// When there is no topology, or nothing of the network is left.
pub fn outage(
    book: &Book,
    parts: &[Part],
    is_down: bool,
    most_moved: u32,
) -> Result<Vec<Change>, String> {
    let mut outage = book.outage().clone();
    let mut is_new = false;
    for part in parts {
        is_new |= match part {
            Part::Node(node) => outage.set_node(*node, is_down),
            Part::Link(link) => outage.set_link(*link, is_down),
            Part::Carrier(link) => outage.set_carrier(*link, is_down),
        };
    }
    if !is_new {
        let known = if is_down { "down" } else { "up" };
        return Err(alloc::format!("that is {known} already"));
    }
    let site = book.site().ok_or(NO_SITE)?;
    let struck = book.struck(&outage)?;
    let standings: Vec<Standing<'_>> = book.standings().collect();
    let limits = Limits { most_moved, tries: TRIES, seed: book.next_index() };
    let repair = repair(&struck, &standings, limits);
    let change = |moved, degraded| {
        let down = outage.names(&site.topology);
        Change::Outage { down, moved, degraded }
    };
    let (mut after, mut changes) = (book.clone(), Vec::new());
    apply(&mut after, &mut changes, change(0, 0))?;
    // Paths of others may have changed: who was not hit comes first.
    tell_apart_on_new_paths(book, &mut after, &mut changes)?;
    let Restored { workers_moved, changes: moves, .. } = settle(&mut after, &repair.steps);
    changes.extend(moves);
    changes[0] = change(workers_moved, after.degraded().count() as u32);
    Ok(changes)
}

/// What is written to give degraded jobs their guarantee back.
#[derive(Debug, Default)]
struct Restored {
    jobs: Vec<JobId>,
    workers_moved: u32,
    changes: Vec<Change>,
}

/// The degraded jobs that are tried: all, or as many as the bounds allow. Which comes first differs
/// from entry to entry, so that each gets its turn.
fn tried(book: &Book) -> BTreeMap<JobId, Cause> {
    let degraded: Vec<JobId> = book.degraded().collect();
    let first = book.next_index() as usize % degraded.len().max(1);
    let turned = degraded[first..].iter().chain(&degraded[..first]).take(MAX_RESTORED);
    let mut sum = 0;
    let fits = |job: &&JobId| {
        let is_first = sum == 0;
        sum += effort(book, **job);
        is_first || sum <= RESTORE_EFFORT
    };
    turned.take_while(fits).map(|job| (*job, Cause::Place)).collect()
}

/// What it costs to try a job, in workers.
fn effort(book: &Book, job: JobId) -> u64 {
    let workers = book.jobs().get(&job).and_then(|held| held.job.pattern.workers().ok());
    let hosts = u64::from(book.ledger().network().hosts());
    JOB_EFFORT + hosts / HOSTS_PER_WORKER + u64::from(workers.unwrap_or(0))
}

/// Tries to give degraded jobs their guarantee back, where they are or with few moves.
fn restore(book: &Book, most_moved: u32) -> Restored {
    let hits = tried(book);
    if hits.is_empty() {
        return Restored::default();
    }
    let struck = Struck { ledger: book.ledger().clone(), hits };
    let standings: Vec<Standing<'_>> = book.standings().collect();
    // One that is larger than the bound is tried alone, and once.
    let effort: u64 = struck.hits.keys().map(|job| effort(book, *job)).sum();
    let tries = if effort > RESTORE_EFFORT { 1 } else { RESTORE_TRIES };
    let limits = Limits { most_moved, tries, seed: book.next_index() };
    let repair = repair(&struck, &standings, limits);
    settle(&mut book.clone(), &repair.steps)
}

/// Gives jobs their new places, each with a DSCP that is free there. Whoever gets none, or whose
/// slots another one has that was to leave them, stays without its guarantee, and keeps no other
/// from it.
fn settle(book: &mut Book, steps: &[Move]) -> Restored {
    let mut restored = Restored::default();
    for step in steps {
        let Move { job, order, ref pieces, .. } = *step;
        let Ok(dscp) = book.dscp_elsewhere(job, order, pieces) else { continue };
        let moved = Moved { job, dscp, order, pieces: pieces.clone() };
        if apply(book, &mut restored.changes, Change::Move(moved)).is_ok() {
            restored.jobs.push(job);
            restored.workers_moved += step.workers();
        }
    }
    restored
}

/// What is written when a job gives its place back.
pub fn release(book: &Book, job: JobId) -> Vec<Change> {
    let released = |restored| Change::Release { job, restored };
    if book.degraded().all(|degraded| degraded == job) {
        return alloc::vec![released(Vec::new())];
    }
    let mut after = book.clone();
    // Without room, or without DSCPs, they stay degraded.
    let Restored { jobs, changes, .. } =
        match apply(&mut after, &mut Vec::new(), released(Vec::new())) {
            Ok(()) => restore(&after, MOST_MOVED),
            Err(_) => Restored::default(),
        };
    core::iter::once(released(jobs)).chain(changes).collect()
}

/// What is written to tidy up: moves that lower what all jobs cost those to come, and those that
/// give degraded jobs their guarantee back.
///
/// # Errors
/// When no move would.
pub fn defragment(book: &Book, most_moved: u32) -> Result<Vec<Change>, String> {
    let standings: Vec<Standing<'_>> = book.standings().collect();
    let limits = Limits { most_moved, tries: ROUNDS, seed: book.next_index() };
    let plan = defragmentation::defragment(book.ledger(), &standings, limits);
    let (mut after, mut changes) = (book.clone(), Vec::new());
    let asked = Change::Moves { moved: plan.workers_moved(), degraded: 0 };
    apply(&mut after, &mut changes, asked)?;
    for Move { job, order, pieces, .. } in &plan.steps {
        let Some(Held { dscp, .. }) = after.jobs().get(job) else { continue };
        // That of its old place, for now.
        let moved = Moved { job: *job, dscp: *dscp, order: *order, pieces: pieces.clone() };
        apply(&mut after, &mut changes, Change::Move(moved))?;
    }
    let clashing = after.clashes(|_| false);
    if let Some(job) = tell_apart(&mut after, &mut changes, clashing.into_iter())?.first() {
        return Err(alloc::format!("no DSCP is free for job {job} after the moves"));
    }
    let left = most_moved.saturating_sub(plan.workers_moved());
    let restored = restore(&after, left);
    if plan.steps.is_empty() && restored.jobs.is_empty() {
        return Err("no move would make room".to_string());
    }
    changes.extend(restored.changes);
    changes[0] = Change::Moves {
        moved: plan.workers_moved() + restored.workers_moved,
        degraded: (book.degraded().count() - restored.jobs.len()) as u32,
    };
    Ok(changes)
}
