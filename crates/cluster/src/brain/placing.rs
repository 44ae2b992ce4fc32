//! Trials: where a job would go. They change nothing and may take long, so they run beside the
//! actor, one after another.
//!
//! Each caller has a share: addresses take turns, and so do the callers of each. An address has at
//! most [`MAX_OF_ADDRESS`] that wait, whatever names its callers give themselves, and a caller
//! [`MAX_OF_CALLER`]. Who is gone when its turn comes is left out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::ops::Bound;

use parfait::job::Job;
use parfait::log::{Book, Label, Refused};
use parfait::placement::search::Memory;
use thiserror::Error;
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::convert::held_message;
use crate::proto;

/// Iterations of the search for a placement: what the tables of docs/parfait-placement.md were
/// measured with.
pub const ITERATIONS: u32 = 600;

/// Trials of one caller that wait; more are refused.
pub(super) const MAX_OF_CALLER: usize = 8;

/// Trials of one address that wait: all of them together take less than a caller waits for an
/// answer.
pub(super) const MAX_OF_ADDRESS: usize = 32;

/// Trials of all callers that wait.
pub(super) const MAX_WAITING: usize = 256;

/// Who asks: an address, and the owner that it says. Many users may share an address.
pub(super) type Caller = (Option<IpAddr>, String);

/// What becomes of a trial: where a job would go or why nowhere, and the entry of the log since
/// which that holds.
pub(super) type Placed = Result<(Result<proto::Held, Refused>, u64), NoTrial>;

/// Why a trial is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum NoTrial {
    /// Another brain leads, or none.
    #[error("this brain does not lead: ask another one")]
    NotLeading,
    /// Too many wait.
    #[error(
        "{MAX_OF_CALLER} trials of one caller wait, {MAX_OF_ADDRESS} of one address or {MAX_WAITING} of all: try again later"
    )]
    Busy,
}

/// A trial that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) label: Label,
    pub(super) job: Job,
    pub(super) answer: oneshot::Sender<Placed>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Placing {
    /// By caller; none is empty.
    waiting: BTreeMap<Caller, VecDeque<Waiting>>,
    /// The address whose turn was last.
    last: Option<Option<IpAddr>>,
    /// The owner whose turn was last, of each address for which trials wait.
    last_owners: BTreeMap<Option<IpAddr>, String>,
    /// Gives the search's memory back when the trial that runs is over.
    running: Option<oneshot::Receiver<Memory>>,
    memory: Memory,
    /// Trials that were dropped because nobody waited for them any more.
    pub(super) abandoned: u64,
    /// Trials that were refused because too many wait.
    pub(super) refused: u64,
}

impl Placing {
    pub(super) fn new() -> Placing {
        let (waiting, last, last_owners, running, abandoned, refused) = Default::default();
        Placing { waiting, last, last_owners, running, memory: Memory::new(), abandoned, refused }
    }

    /// Has a trial wait for its turn. Returns whether it does: where as many wait as may, it is
    /// refused.
    pub(super) fn push(&mut self, caller: Caller, trial: Waiting) -> bool {
        self.forget_abandoned();
        let own = self.waiting.get(&caller).map_or(0, VecDeque::len);
        let of_address = self.waiting.iter().filter(|((address, _), _)| *address == caller.0);
        let of_address: usize = of_address.map(|(_, trials)| trials.len()).sum();
        let all: usize = self.waiting.values().map(VecDeque::len).sum();
        let has_room = own < MAX_OF_CALLER && of_address < MAX_OF_ADDRESS && all < MAX_WAITING;
        if has_room {
            self.waiting.entry(caller).or_default().push_back(trial);
        } else {
            self.refused += 1;
            // Who asked may be gone.
            let _ = trial.answer.send(Err(NoTrial::Busy));
        }
        has_room
    }

    /// Drops trials that nobody waits for.
    fn forget_abandoned(&mut self) {
        for trials in self.waiting.values_mut() {
            let before = trials.len();
            trials.retain(|trial| !trial.answer.is_closed());
            self.abandoned += (before - trials.len()) as u64;
        }
        self.waiting.retain(|_, trials| !trials.is_empty());
        let Placing { waiting, last_owners, .. } = self;
        last_owners.retain(|address, _| waiting.keys().any(|caller| caller.0 == *address));
    }

    /// Whose turn it is.
    fn next_caller(&self) -> Option<Caller> {
        let addresses: BTreeSet<_> = self.waiting.keys().map(|(address, _)| *address).collect();
        let address = after(&addresses, self.last.as_ref())?;
        let owners: BTreeSet<_> = self
            .waiting
            .keys()
            .filter(|(of, _)| *of == address)
            .map(|(_, owner)| owner.clone())
            .collect();
        Some((address, after(&owners, self.last_owners.get(&address))?))
    }

    /// The next trial and what it needs, unless one runs.
    pub(super) fn next(&mut self) -> Option<(Waiting, Lent)> {
        if let Some(running) = &mut self.running {
            match running.try_recv() {
                Err(TryRecvError::Empty) => return None,
                Ok(memory) => self.memory = memory,
                // It was never begun, and its memory is gone.
                Err(TryRecvError::Closed) => {}
            }
            self.running = None;
        }
        self.forget_abandoned();
        let caller = self.next_caller()?;
        let trials = self.waiting.get_mut(&caller)?;
        let trial = trials.pop_front()?;
        if trials.is_empty() {
            self.waiting.remove(&caller);
        }
        self.last = Some(caller.0);
        self.last_owners.insert(caller.0, caller.1);
        let (back, running) = oneshot::channel();
        self.running = Some(running);
        let memory = std::mem::replace(&mut self.memory, Memory::new());
        Some((trial, Lent { memory, back: Some(back) }))
    }

    /// Nobody gets an answer any more.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}

/// The first of a set after the last one; the first of all behind the end.
fn after<T: Clone + Ord>(all: &BTreeSet<T>, last: Option<&T>) -> Option<T> {
    let after = last.map_or(Bound::Unbounded, Bound::Excluded);
    all.range((after, Bound::Unbounded)).next().or_else(|| all.first()).cloned()
}

/// The search's memory, for one trial. It goes back however the trial ends.
#[derive(Debug)]
pub(super) struct Lent {
    memory: Memory,
    back: Option<oneshot::Sender<Memory>>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, Memory::new());
        // Without an actor nobody needs it.
        if let Some(back) = self.back.take() {
            let _ = back.send(memory);
        }
    }
}

/// Carries out a trial.
pub(super) fn place(trial: Waiting, mut book: Book, mut lent: Lent) {
    let Waiting { label, job, answer } = trial;
    let since = book.changed_index();
    let abstraction = parfait::demand::Abstraction::Parfait;
    let placed =
        parfait::brain::place_job(&mut book, abstraction, ITERATIONS, &mut lent.memory, label, job);
    let placed = placed.map(|held| held_message(0, &held, book.ledger().network()));
    // Who asked may be gone.
    let _ = answer.send(Ok((placed, since)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(name: &str) -> Caller {
        (None, name.to_owned())
    }

    fn trial(name: &str) -> (Waiting, oneshot::Receiver<Placed>) {
        let (answer, answered) = oneshot::channel();
        let label = Label { name: name.to_owned(), owner: String::new() };
        (Waiting { label, job: "ring:2@1G".parse().expect("a job"), answer }, answered)
    }

    #[test]
    fn callers_take_turns_and_have_shares_and_who_is_gone_is_left_out() {
        let mut placing = Placing::new();
        let mut kept = Vec::new();
        let mut push = |placing: &mut Placing, name: &str| {
            let (waiting, answered) = trial(name);
            kept.push(answered);
            placing.push(caller(name), waiting)
        };
        assert_eq!((0..100).filter(|_| push(&mut placing, "mallory")).count(), MAX_OF_CALLER);
        assert!(push(&mut placing, "ana") && push(&mut placing, "zoe"));
        let mut order = Vec::new();
        for _ in 0..4 {
            let (trial, lent) = placing.next().expect("some wait");
            assert!(placing.next().is_none(), "one runs at a time");
            order.push(trial.label.name);
            drop(lent);
        }
        assert_eq!(order, ["ana", "mallory", "zoe", "mallory"]);
        // All of them go.
        kept.clear();
        assert!(placing.next().is_none());
        assert_eq!(placing.abandoned, MAX_OF_CALLER as u64 - 2);
        let answers: Vec<_> = (0..2 * MAX_WAITING)
            .map(|at| {
                let (waiting, answered) = trial("x");
                let address = IpAddr::from([10, 0, 0, (at % 16) as u8]);
                placing.push((Some(address), format!("c{at}")), waiting).then_some(answered)
            })
            .collect();
        assert_eq!(answers.iter().flatten().count(), MAX_WAITING);
        placing.clear();
        assert!(placing.next().is_none());
    }

    #[test]
    fn other_names_give_an_address_no_other_share() {
        let mut placing = Placing::new();
        let mallory = IpAddr::from([10, 0, 0, 1]);
        let mut kept = Vec::new();
        let mut push = |placing: &mut Placing, address: IpAddr, owner: &str| {
            let (waiting, answered) = trial(owner);
            kept.push(answered);
            placing.push((Some(address), owner.to_owned()), waiting)
        };
        let taken = (0..300).filter(|at| push(&mut placing, mallory, &format!("m{at}"))).count();
        assert_eq!(taken, MAX_OF_ADDRESS);
        let ana = IpAddr::from([10, 0, 0, 2]);
        assert!(push(&mut placing, ana, "ana") && push(&mut placing, ana, "zoe"));
        let mut order = Vec::new();
        for _ in 0..5 {
            let (trial, lent) = placing.next().expect("some wait");
            order.push(trial.label.name);
            drop(lent);
        }
        assert_eq!(order, ["m0", "ana", "m1", "zoe", "m10"]);
        kept.clear();
        assert!(placing.next().is_none());
        assert!(placing.last_owners.is_empty());
    }
}
