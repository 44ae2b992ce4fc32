//! What a node shares with its local peers: the regions that it has registered, and its mailbox.
//!
//! Who carries requests out and passes messages on is in [`local_peers`](super::local_peers).

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::IpAddr;

use roce::Time;
use roce::direct::{Handed, MessageAck, MessageHeader, RegionDescriptor};

/// How long a message is under way, and its acknowledgement: these many nanoseconds, and up to
/// twice as many.
const MESSAGE_NS: u64 = 300;

/// A message in a mailbox.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) at: Time,
    pub(super) from: (u32, IpAddr),
    pub(super) header: MessageHeader,
    pub(super) bytes: Vec<u8>,
}

/// Messages and acknowledgements for one node, in the order of their times.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    pub(super) letters: VecDeque<Letter>,
    pub(super) acks: VecDeque<(Time, Handed, MessageAck)>,
}

impl Mailbox {
    /// The time of something that is sent now, in any order of delays.
    pub(super) fn arrival(now: Time, before: Option<Time>, salt: u64) -> Time {
        let mixed = (now.as_nanos() ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let at = Time::from_nanos(now.as_nanos() + MESSAGE_NS + mixed % MESSAGE_NS);
        before.map_or(at, |before| at.max(before))
    }

    pub(super) fn tell(&mut self, now: Time, handed: Handed, ack: MessageAck) -> Time {
        let before = self.acks.back().map(|(at, ..)| *at);
        let at = Mailbox::arrival(now, before, handed.source.get().into());
        self.acks.push_back((at, handed, ack));
        at
    }
}

/// The regions that a node has registered, by local key.
#[derive(Debug, Default)]
pub(super) struct ControlSegment {
    pub(super) regions: Vec<(u32, RegionDescriptor)>,
    pub(super) keeps_stale: bool,
}

impl ControlSegment {
    pub(super) fn publish(&mut self, lkey: u32, descriptor: RegionDescriptor) {
        if descriptor.access.is_remote() {
            self.regions.push((lkey, descriptor));
        }
    }

    pub(super) fn withdraw(&mut self, lkey: u32) {
        if !self.keeps_stale {
            self.regions.retain(|(known, _)| *known != lkey);
        }
    }
}
