//! Whose packets come next.
//!
//! Queue pairs with something to send are in a queue and take turns, each a burst of packets. Those
//! whose destinations admit nothing are parked until the wire is asked again. Queue pairs are known
//! by their slots alone: what they have to send, and to whom, is the endpoint's business.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::time::Time;

/// The order of queue pairs, and what the wire has admitted for the one at the front.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Slots of queue pairs that may have something to send.
    ready: VecDeque<u32>,
    /// Packets left in the turn of the queue pair at the front of `ready`; 0 before its turn
    /// begins.
    turn_left: u32,
    /// Packets that the wire has admitted for it and that were not made yet, and how many to ask
    /// for next.
    granted: u32,
    ask_for: u32,
    /// Slots of queue pairs whose destinations admit nothing, and when to query the wire again.
    parked: Vec<u32>,
    parked_until: Option<Time>,
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule {
            ready: VecDeque::new(),
            turn_left: 0,
            granted: 0,
            ask_for: 1,
            parked: Vec::new(),
            parked_until: None,
        }
    }
}

impl Schedule {
    /// Adds a queue pair that is neither ready nor parked.
    #[inline]
    pub(super) fn add(&mut self, slot: u32) {
        self.ready.push_back(slot);
    }

    /// Removes a queue pair, ready or parked.
    pub(super) fn forget(&mut self, slot: u32) {
        self.ready.retain(|&ready| ready != slot);
        self.parked.retain(|&parked| parked != slot);
        self.turn_left = 0;
    }

    // ---- turns ---------------------------------------------------------------------------------

    /// Whose turn it is.
    #[inline]
    pub(super) fn front(&self) -> Option<u32> {
        self.ready.front().copied()
    }

    /// Begins a turn of so many packets, unless one has begun.
    #[inline]
    pub(super) fn begin_turn(&mut self, packets: u32) {
        if self.turn_left == 0 {
            (self.turn_left, self.granted, self.ask_for) = (packets, 0, 1);
        }
    }

    /// A packet has left: whether the turn goes on.
    #[inline]
    pub(super) fn count_packet(&mut self) -> bool {
        self.turn_left = self.turn_left.saturating_sub(1);
        self.granted = self.granted.saturating_sub(1);
        self.turn_left > 0
    }

    /// The turn is over: the next queue pair is at the front.
    #[inline]
    pub(super) fn pass_on(&mut self) {
        self.ready.rotate_left(1);
    }

    /// Removes the queue pair at the front, which has nothing more to send.
    #[inline]
    pub(super) fn leave(&mut self) -> Option<u32> {
        self.turn_left = 0;
        self.ready.pop_front()
    }

    // ---- what the wire admits ------------------------------------------------------------------

    /// Whether packets are admitted that were not made yet.
    #[inline]
    pub(super) fn has_grant(&self) -> bool {
        self.granted > 0
    }

    /// How many packets to ask for.
    #[inline]
    pub(super) fn wanted(&self) -> u32 {
        self.ask_for.min(self.turn_left)
    }

    /// The wire admits so many packets, and is to be asked for `ask_for` next; returns whether it
    /// admits any. If not, the turn is over.
    #[inline]
    pub(super) fn grant(&mut self, packets: u32, ask_for: u32) -> bool {
        (self.granted, self.ask_for) = (packets, ask_for);
        if packets == 0 {
            self.turn_left = 0;
        }
        packets > 0
    }

    /// Packets admitted and not made yet are admitted no longer.
    pub(super) fn end_grant(&mut self) {
        (self.granted, self.ask_for) = (0, 1);
    }

    // ---- parking -------------------------------------------------------------------------------

    /// Parks the queue pair at the front.
    pub(super) fn park(&mut self) {
        self.parked.extend(self.ready.pop_front());
    }

    /// Returns parked queue pairs to the queue, if it is time to query the wire. Those beyond
    /// `most` are forgotten, which only a seeded bug wants.
    #[inline]
    pub(super) fn unpark(&mut self, now: Time, most: usize) {
        if self.parked.is_empty() {
            self.parked_until = None;
        } else if self.parked_until.is_none_or(|at| at <= now) {
            self.ready.extend(self.parked.drain(..).take(most));
            self.parked_until = None;
        }
    }

    /// Sets when to query the wire again.
    #[inline]
    pub(super) fn park_until(&mut self, at: Option<Time>) {
        self.parked_until = at;
    }

    /// The wire has room again, sooner than it said.
    pub(super) fn readmit(&mut self, now: Time) {
        self.parked_until = self.parked_until.map(|at| at.min(now));
    }

    /// When to query the wire again.
    #[inline]
    pub(super) fn parked_until(&self) -> Option<Time> {
        self.parked_until
    }

    /// Whether queue pairs are parked.
    #[inline]
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    // ---- who waits -----------------------------------------------------------------------------

    /// Whether no queue pair waits for anything.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.parked.is_empty()
    }

    /// Those that wait for their turn.
    #[inline]
    pub(super) fn ready(&self) -> impl ExactSizeIterator<Item = u32> {
        self.ready.iter().copied()
    }

    /// Those that wait for their turn, then those that wait for the wire.
    pub(super) fn waiting(&self) -> impl Iterator<Item = u32> {
        self.ready.iter().chain(&self.parked).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn turns_pass_and_grants_end_with_them() {
        let mut schedule = Schedule::default();
        schedule.add(3);
        schedule.add(5);
        schedule.begin_turn(2);
        assert_eq!((schedule.front(), schedule.wanted()), (Some(3), 1));
        assert!(schedule.grant(1, 2) && schedule.has_grant());
        assert!(schedule.count_packet() && !schedule.has_grant());
        assert_eq!(schedule.wanted(), 1, "no more than the turn has left");
        assert!(schedule.grant(1, 2) && !schedule.count_packet());
        schedule.pass_on();
        schedule.begin_turn(8);
        assert_eq!((schedule.front(), schedule.wanted()), (Some(5), 1));
    }

    #[test]
    fn those_that_are_parked_wait_until_the_wire_is_asked_again() {
        let mut schedule = Schedule::default();
        schedule.add(3);
        schedule.add(5);
        schedule.begin_turn(4);
        assert!(!schedule.grant(0, 2));
        schedule.park();
        assert_eq!((schedule.front(), schedule.has_parked()), (Some(5), true));
        assert_eq!(schedule.waiting().collect::<Vec<_>>(), vec![5, 3]);
        let at = Time::from_nanos(9);
        schedule.park_until(Some(at));
        schedule.unpark(Time::from_nanos(8), usize::MAX);
        assert_eq!((schedule.ready().len(), schedule.parked_until()), (1, Some(at)));
        schedule.readmit(Time::from_nanos(7));
        schedule.unpark(Time::from_nanos(8), usize::MAX);
        assert_eq!(schedule.ready().collect::<Vec<_>>(), vec![5, 3]);
        schedule.forget(3);
        schedule.forget(5);
        assert!(schedule.is_empty());
    }
}
