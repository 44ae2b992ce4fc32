//! What a brain writes when something goes down or comes back, or when it is asked to tidy up: the change itself, the moves
//! behind it, and DSCPs of jobs that meet now. All of that is one batch, so it is durable as a whole.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use fabric::topology::{LinkId, NodeId};

use crate::log::{Book, Change, Entry, Held, Moved};
use crate::placement::defragmentation;
use crate::placement::migration::{Limits, Move, Standing};
use crate::repair::repair;

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

/// Rounds of tidying up.
const ROUNDS: u32 = 4;

/// Applies a change that goes behind the client's own.
fn apply(book: &mut Book, changes: &mut Vec<Change>, change: Change) -> Result<(), String> {
    let entry = Entry { client: 0, sequence: 0, change };
    book.apply(book.term(), &entry).map_err(|error| error.to_string())?;
    changes.push(entry.change);
    Ok(())
}

/// Carries out moves, and gives another DSCP to whoever meets its own.
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
    let site = book.site().ok_or("what is down is not known without a topology")?;
    let struck = book.struck(&outage)?;
    let standings: Vec<Standing<'_>> = book.standings().collect();
    let limits = Limits { most_moved, tries: TRIES, seed: book.next_index() };
    let repair = repair(&struck, &standings, limits);
    let change = Change::Outage {
        down: outage.names(&site.topology),
        moved: repair.workers_moved(),
        degraded: repair.degraded.len() as u32,
    };
    let (mut after, mut changes) = (book.clone(), Vec::new());
    apply(&mut after, &mut changes, change)?;
    carry_out(&mut after, &mut changes, &repair.steps)?;
    Ok(changes)
}

/// What is written to tidy up: moves that lower what all jobs cost those to come.
///
/// # Errors
/// When no move would.
pub fn defragment(book: &Book, most_moved: u32) -> Result<Vec<Change>, String> {
    let standings: Vec<Standing<'_>> = book.standings().collect();
    let limits = Limits { most_moved, tries: ROUNDS, seed: book.next_index() };
    let plan = defragmentation::defragment(book.ledger(), &standings, limits);
    if plan.steps.is_empty() {
        return Err("no move would make room".to_string());
    }
    let (mut after, mut changes) = (book.clone(), Vec::new());
    apply(&mut after, &mut changes, Change::Moves { moved: plan.workers_moved() })?;
    carry_out(&mut after, &mut changes, &plan.steps)?;
    Ok(changes)
}
