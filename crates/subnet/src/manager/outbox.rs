//! What leaves a manager: replies, events and counters. All of it is bounded; what does not fit is
//! counted. Requests of its own have their place in [`task`](super::task).

use alloc::collections::VecDeque;
use core::time::Duration;

use super::event::{Event, Refusal};
use crate::administration::rmpp::Client;
use crate::mad::MAD_BYTES;

/// Most datagrams that wait to be sent beside the requests of a task.
const MAX_REPLIES: usize = 256;

/// Most events that wait to be reported.
const MAX_EVENTS: usize = 256;

/// Rest after a report of a control message that was refused.
const REFUSAL_REST: Duration = Duration::from_secs(1);

/// Where a datagram goes to, or came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// By the route in itself.
    Directed,
    /// A queue pair at a LID.
    Lid {
        /// The LID.
        lid: u16,
        /// The number of the queue pair.
        queue_pair: u32,
        /// The service level.
        service_level: u8,
    },
}

impl From<Client> for Peer {
    fn from(client: Client) -> Peer {
        let Client { lid, queue_pair, service_level } = client;
        Peer::Lid { lid, queue_pair, service_level }
    }
}

/// A datagram and its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// To whom, or from whom.
    pub peer: Peer,
    /// Its bytes.
    pub mad: [u8; MAD_BYTES],
    /// How many of them are sent: a table of subnet administration ends with its last record.
    pub len: usize,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests sent, repeated ones too.
    pub sent: u64,
    /// Heavy sweeps that were begun.
    pub heavy_sweeps: u64,
    /// Light sweeps, of all switches.
    pub light_sweeps: u64,
    /// Looks at switches that traps came from.
    pub trap_looks: u64,
    /// Sweeps after which the fabric kept its last tables.
    pub failed_sweeps: u64,
    /// Traps of switches and ports that are known.
    pub traps: u64,
    /// Traps that were not heeded: of nobody that is known, or of another kind.
    pub ignored_traps: u64,
    /// Control messages of other managers that were refused.
    pub refused_controls: u64,
    /// Traps of ports that refused an SMP with a wrong M_Key.
    pub wrong_keys: u64,
    /// Datagrams that are none, or of no kind that is handled.
    pub malformed: u64,
    /// Responses that nobody waited for.
    pub unasked: u64,
    /// Responses for another attribute, port or route than their requests.
    pub mismatched: u64,
    /// Replies that were not sent, since too many waited.
    pub dropped_replies: u64,
    /// Events that were not reported, for the same reason.
    pub dropped_events: u64,
    /// Requests of subnet administration that were answered, refusals too.
    pub answered: u64,
    /// Those that were not, since this manager is not master, or has not set up a fabric.
    pub unanswered: u64,
    /// Those that were refused since there was no room for them, or for their response.
    pub without_room: u64,
    /// Blocks of multicast tables that were not written.
    pub failed_groups: u64,
    /// Times that it became master.
    pub terms: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) replies: VecDeque<Datagram>,
    pub(super) events: VecDeque<Event>,
    pub(super) counters: Counters,
    /// No refusal is reported before this time, and so many were not.
    refusal_at: Duration,
    unreported: u64,
}

impl Outbox {
    pub(super) fn reply(&mut self, peer: Peer, mad: [u8; MAD_BYTES], len: usize) {
        if self.replies.len() < MAX_REPLIES {
            self.replies.push_back(Datagram { peer, mad, len });
        } else {
            self.counters.dropped_replies += 1;
        }
    }

    pub(super) fn report(&mut self, event: Event) {
        if self.events.len() < MAX_EVENTS {
            self.events.push_back(event);
        } else {
            self.counters.dropped_events += 1;
        }
    }

    /// Anybody can cause refusals, so they are reported once a second.
    pub(super) fn report_refusal(&mut self, now: Duration, refusal: Refusal) {
        if now < self.refusal_at {
            self.unreported += 1;
            return;
        }
        self.refusal_at = now + REFUSAL_REST;
        let before = core::mem::take(&mut self.unreported);
        self.report(Event::Refused(refusal, before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_reported_once_a_second_with_the_number_of_those_between() {
        let mut outbox = Outbox::default();
        for ms in [0, 1, 999, 1_000, 1_001] {
            outbox.report_refusal(Duration::from_millis(ms), Refusal::Malformed);
        }
        let reported: alloc::vec::Vec<Event> = outbox.events.into_iter().collect();
        assert_eq!(reported, [0, 2].map(|before| Event::Refused(Refusal::Malformed, before)));
    }

    #[test]
    fn what_waits_is_bounded_and_the_rest_is_counted() {
        let mut outbox = Outbox::default();
        for _ in 0..300 {
            outbox.reply(Peer::Directed, [0; MAD_BYTES], MAD_BYTES);
            outbox.report(Event::Foreign(1));
        }
        assert_eq!((outbox.replies.len(), outbox.events.len()), (MAX_REPLIES, MAX_EVENTS));
        let Counters { dropped_replies, dropped_events, .. } = outbox.counters;
        assert_eq!((dropped_replies, dropped_events), (44, 44));
    }
}
