//! SENDs that were handed to a local peer, until it has decided on them ([`crate::direct`]).
//!
//! They are behind all packets and before all requests that wait. The local peer takes them in
//! order, so an acknowledgement is on the oldest one without an acknowledgement. After the first
//! refusal the rest of the *round* is refused, too; when all acknowledgements are there, those that
//! were not taken become packets, in order, and the next round begins after some SENDs as packets:
//! a refusal costs the bytes and a round trip.

use alloc::collections::VecDeque;

use crate::direct::MessageAck;
use crate::verbs::SendWr;

/// SENDs that are packets after a refusal, before the next is handed over.
const FIRST_REST: u32 = 8;
const LONGEST_REST: u32 = 1 << 16;

/// Messages taken in a row after which the local peer is trusted as at first.
const TRUSTED: u32 = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct HandedOver {
    /// With their lengths, oldest first.
    queue: VecDeque<(SendWr, u32)>,
    round: u32,
    /// Messages of this round that were refused, the oldest in the queue.
    refused: usize,
    /// SENDs that are still to be packets.
    rest: u32,
    next_rest: u32,
    taken_in_a_row: u32,
}

/// What an acknowledgement leads to.
#[derive(Debug)]
pub(super) enum Settled {
    /// This one is done.
    Done { wr_id: u64, signaled: bool },
    /// More acknowledgements have to come.
    Waiting,
    /// All messages in the queue are refused: they become packets.
    RoundOver,
}

impl HandedOver {
    pub(super) fn new() -> HandedOver {
        HandedOver {
            queue: VecDeque::new(),
            round: 0,
            refused: 0,
            rest: 0,
            next_rest: FIRST_REST,
            taken_in_a_row: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn round(&self) -> u32 {
        self.round
    }

    /// Whether a message may be handed over: none of the round is refused, and it is not the turn
    /// of packets.
    pub(super) fn may_hand_over(&mut self) -> bool {
        if self.rest > 0 && self.queue.is_empty() {
            self.rest -= 1;
            return false;
        }
        self.refused == 0
    }

    pub(super) fn push(&mut self, wr: SendWr, len: u32) {
        self.queue.push_back((wr, len));
    }

    /// The acknowledgement on the oldest message without one.
    pub(super) fn settle(&mut self, ack: MessageAck) -> Settled {
        if ack == MessageAck::Taken && self.refused == 0 {
            self.taken_in_a_row += 1;
            if self.taken_in_a_row >= TRUSTED {
                self.next_rest = FIRST_REST;
            }
            let done = self.queue.pop_front();
            return done.map_or(Settled::Waiting, |(SendWr { wr_id, signaled, .. }, _)| {
                Settled::Done { wr_id, signaled }
            });
        }
        self.refused += 1;
        if self.refused < self.queue.len() { Settled::Waiting } else { Settled::RoundOver }
    }

    /// Ends the round after refusals.
    pub(super) fn end_round(&mut self) {
        self.rest = self.next_rest;
        self.next_rest = (self.next_rest * 2).min(LONGEST_REST);
        self.taken_in_a_row = 0;
        self.begin_round();
    }

    /// Acknowledgements on what was handed over before are none of the next round's.
    fn begin_round(&mut self) {
        self.round = self.round.wrapping_add(1);
        self.refused = 0;
    }

    /// The oldest, which is not done.
    pub(super) fn pop(&mut self) -> Option<(SendWr, u32)> {
        self.queue.pop_front()
    }

    /// Forgets everything; returns how many messages that were.
    pub(super) fn clear(&mut self) -> usize {
        let forgotten = self.queue.len();
        self.queue.clear();
        (self.rest, self.next_rest, self.taken_in_a_row) = (0, FIRST_REST, 0);
        self.begin_round();
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wr(wr_id: u64) -> SendWr {
        SendWr { wr_id, ..SendWr::default() }
    }

    fn with(messages: u64) -> HandedOver {
        let mut handed = HandedOver::new();
        (0..messages).for_each(|wr_id| handed.push(wr(wr_id), 1));
        handed
    }

    #[test]
    fn taken_messages_are_done_in_order() {
        let mut handed = with(3);
        for wr_id in 0..3 {
            assert!(
                matches!(handed.settle(MessageAck::Taken), Settled::Done { wr_id: done, .. } if done == wr_id)
            );
        }
        assert!(handed.is_empty() && matches!(handed.settle(MessageAck::Taken), Settled::Waiting));
    }

    #[test]
    fn a_refusal_ends_the_round_when_all_acks_are_there() {
        let mut handed = with(3);
        assert!(matches!(handed.settle(MessageAck::Taken), Settled::Done { .. }));
        assert!(matches!(handed.settle(MessageAck::Refused), Settled::Waiting));
        assert!(!handed.may_hand_over());
        // A local peer that says so nevertheless gets the message twice, and nobody else suffers.
        assert!(matches!(handed.settle(MessageAck::Taken), Settled::RoundOver));
        let again: Vec<u64> =
            core::iter::from_fn(|| handed.pop()).map(|(wr, _)| wr.wr_id).collect();
        assert_eq!(again, [1, 2]);
        let before = handed.round();
        handed.end_round();
        assert_ne!(handed.round(), before);
    }

    #[test]
    fn after_each_refusal_more_sends_are_packets() {
        let mut handed = HandedOver::new();
        let mut refuse = || {
            handed.push(wr(0), 1);
            assert!(matches!(handed.settle(MessageAck::Refused), Settled::RoundOver));
            handed.pop();
            handed.end_round();
            (0..).take_while(|_| !handed.may_hand_over()).count()
        };
        assert_eq!([refuse(), refuse(), refuse()], [8, 16, 32]);
        for _ in 0..TRUSTED {
            handed.push(wr(0), 1);
            assert!(matches!(handed.settle(MessageAck::Taken), Settled::Done { .. }));
        }
        handed.push(wr(0), 1);
        handed.settle(MessageAck::Refused);
        handed.pop();
        handed.end_round();
        assert_eq!((0..).take_while(|_| !handed.may_hand_over()).count(), 8);
    }

    use alloc::vec::Vec;
}
