//! Requests that wait until the packets before them are acknowledged, to be carried out directly
//! ([`crate::direct`]).
//!
//! A program that keeps its send queue full would never get back from packets to the direct path,
//! because a request is direct only behind an empty queue. After a run of requests that only the
//! packets before them kept from being direct, the next ones wait here. They take places of the
//! send queue, and everything posted behind them waits too, so that requests stay in order. If the
//! peer then refuses one, all of them become packets, and the next run has to be twice as long:
//! waiting costs a round trip. Long requests wait, too, and are carried out in parts.
//!
//! A program that lets its driver carry requests out has all of them wait from their post on
//! ([`Held::set_holding`]).

use alloc::collections::VecDeque;

use crate::direct::Holding;
use crate::verbs::SendWr;

/// Requests in a row that could have been direct, before the next ones wait.
const FIRST_RUN: u32 = 8;
const LONGEST_RUN: u32 = 1 << 20;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Held {
    /// With their lengths, oldest first.
    queue: VecDeque<(SendWr, u32)>,
    /// Bytes of the oldest that are carried out.
    done: u32,
    run: u32,
    /// The length that a run must have.
    wanted: u32,
    holding: Holding,
}

impl Default for Held {
    fn default() -> Held {
        let holding = Holding::Runs;
        Held { queue: VecDeque::new(), done: 0, run: 0, wanted: FIRST_RUN, holding }
    }
}

impl Held {
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn push(&mut self, wr: SendWr, len: u32) {
        self.queue.push_back((wr, len));
    }

    pub(super) fn front(&self) -> Option<&(SendWr, u32)> {
        self.queue.front()
    }

    pub(super) fn pop(&mut self) -> Option<(SendWr, u32)> {
        self.done = 0;
        self.queue.pop_front()
    }

    /// How many bytes of the oldest are carried out already.
    pub(super) fn done(&self) -> u32 {
        self.done
    }

    /// A part of the oldest is carried out.
    pub(super) fn advance(&mut self, bytes: u32) {
        self.done += bytes;
    }

    pub(super) fn clear(&mut self) {
        *self = Held::default();
    }

    pub(super) fn set_holding(&mut self, holding: Holding) {
        self.holding = holding;
    }

    /// Whether every request waits, from its post on.
    pub(super) fn holds_all(&self) -> bool {
        self.holding != Holding::Runs
    }

    /// Whether WRITEs may overtake acknowledgements.
    pub(super) fn is_relaxed(&self) -> bool {
        self.holding == Holding::Relaxed
    }

    /// A request became packets: `only_outstanding` if nothing but the packets before it was in the
    /// way. Returns whether such a request should wait instead.
    pub(super) fn should_wait(&mut self, only_outstanding: bool) -> bool {
        self.run = if only_outstanding { self.run + 1 } else { 0 };
        let waits = self.run > self.wanted;
        if waits {
            self.run = 0;
        }
        waits
    }

    /// A request was direct.
    pub(super) fn note_direct(&mut self) {
        (self.run, self.wanted) = (0, FIRST_RUN);
    }

    /// Waiting was in vain.
    pub(super) fn note_refused(&mut self) {
        self.wanted = (self.wanted * 2).min(LONGEST_RUN);
    }
}
