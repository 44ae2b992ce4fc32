//! What a brain writes when something goes down or comes back, when a job is released, or when it is asked to tidy up: the
//! change itself, the moves behind it, and DSCPs of jobs that meet now. All of that is one batch, so it is durable as a whole.
//!
//! Whatever makes room gives degraded jobs their guarantee back: the end of an outage, a release, and tidying up.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use fabric::topology::{LinkId, NodeId};

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
}

/// Tries for each job that has to move.
const TRIES: u32 = 16;

/// The same after a release, which must not take as long: anyone may release jobs, one after the other.
const RESTORE_TRIES: u32 = 4;

/// Rounds of tidying up.
const ROUNDS: u32 = 4;

/// Most workers that are moved so that degraded jobs have their guarantee again after a release.
const MOST_MOVED: u32 = 4096;

/// Most workers, and [`JOB_EFFORT`] and more for each job, of the degraded jobs that are tried after one release.
const RESTORE_EFFORT: u64 = 1 << 12;

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

/// Carries out moves that were asked for, and gives another DSCP to whoever meets its own.
fn carry_out(book: &mut Book, changes: &mut Vec<Change>, steps: &[Move]) -> Result<(), String> {
    for Move { job, order, pieces, .. } in steps {
        let Some(Held { dscp, .. }) = book.jobs().get(job) else { continue };
        // That of its old place, for now: clashes are mended below.
        let moved = Moved { job: *job, dscp: *dscp, order: *order, pieces: pieces.clone() };
        apply(book, changes, Change::Move(moved))?;
    }
    for job in book.clashes() {
        let Some(held) = book.jobs().get(&job) else { continue };
        let dscp = book.dscp_in_place(job, held.dscp)?;
        apply(book, changes, Change::Mark(job, dscp))?;
    }
    Ok(())
}

/// Gives another DSCP to whoever meets its own on new paths; who gets none loses its guarantee, since what is down is down.
fn tell_apart(book: &mut Book, changes: &mut Vec<Change>) -> Result<(), String> {
    for job in book.clashes() {
        let Some(held) = book.jobs().get(&job) else { continue };
        let change = match book.dscp_in_place(job, held.dscp) {
            Ok(dscp) if dscp == held.dscp => continue,
            Ok(dscp) => Change::Mark(job, dscp),
            Err(_) => Change::Degrade(job),
        };
        apply(book, changes, change)?;
    }
    Ok(())
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
    let Restored { workers_moved, changes: moves, .. } = settle(&mut after, &repair.steps);
    changes.extend(moves);
    // Paths of others may have changed.
    tell_apart(&mut after, &mut changes)?;
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

/// The degraded jobs that are tried: all, or as many as the bounds allow. Which comes first differs from entry to entry, so
/// that each gets its turn.
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

/// Gives jobs their new places, each with a DSCP that is free there. Whoever gets none, or whose slots another one has that
/// was to leave them, stays without its guarantee, and keeps no other from it.
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

/// What is written to tidy up: moves that lower what all jobs cost those to come, and those that give degraded jobs their
/// guarantee back.
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
    carry_out(&mut after, &mut changes, &plan.steps)?;
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
