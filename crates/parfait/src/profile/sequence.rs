//! Samples from packets: each byte once, although packets are repeated, reordered, or missing in
//! the capture.
//!
//! Packets of a connection are numbered (PSN, 24 bits). A number that was seen is a retransmission,
//! and does not count. A gap is filled with packets of the largest size so far, and if one of them
//! comes late, it counts as filled. Numbers that answers to RDMA reads take are none of requests,
//! so where a connection reads, only gaps within messages are filled.

use alloc::collections::{BTreeMap, BTreeSet};

use super::Sample;

/// Most connections.
pub const MAX_FLOWS: usize = 1 << 16;

/// Longest gap that is filled; a longer one is another connection with the same number.
const MAX_GAP: u32 = 1 << 12;

/// Most packets of a gap that may still come.
const MAX_AWAITED: usize = 1 << 12;

const PSN_MASK: u32 = 0x00ff_ffff;

/// A packet of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// When it was seen.
    pub at_ns: u64,
    /// The worker that sent it.
    pub from: u32,
    /// The worker that gets it.
    pub to: u32,
    /// The receiving queue pair.
    pub queue_pair: u32,
    /// Its number.
    pub psn: u32,
    /// Bytes of its payload.
    pub bytes: u32,
    /// Whether it begins a message.
    pub begins: bool,
    /// Whether it asks for an RDMA read, or answers one.
    pub is_read: bool,
}

#[derive(Debug, Default)]
struct Flow {
    next: u32,
    largest: u32,
    reads: bool,
    awaited: BTreeSet<u32>,
}

/// Counts of what was not as it should be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that count.
    pub counted: u64,
    /// Packets that were seen before.
    pub repeated: u64,
    /// Packets that are missing in the capture and were filled in.
    pub filled: u64,
    /// Packets of connections beyond [`MAX_FLOWS`].
    pub left_out: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Sequencer {
    flows: BTreeMap<(u32, u32, u32, bool), Flow>,
    counts: Counts,
}

impl Sequencer {
    /// One that has seen nothing.
    pub fn new() -> Sequencer {
        Sequencer::default()
    }

    /// What was repeated and filled so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What a packet adds; `None` if that is nothing. Packets come in the order in which they were
    /// seen.
    pub fn add(&mut self, packet: &Packet) -> Option<Sample> {
        // Answers to reads have numbers of their own between the same two queue pairs.
        let is_answer = packet.is_read && packet.bytes > 0;
        let key = (packet.from, packet.to, packet.queue_pair, is_answer);
        if self.flows.len() >= MAX_FLOWS && !self.flows.contains_key(&key) {
            self.counts.left_out += 1;
            return None;
        }
        let first = || Flow { next: packet.psn, ..Flow::default() };
        let flow = self.flows.entry(key).or_insert_with(first);
        flow.reads |= packet.is_read;
        let ahead = packet.psn.wrapping_sub(flow.next) & PSN_MASK;
        let is_behind = ahead > PSN_MASK / 2;
        if is_behind && (flow.next.wrapping_sub(packet.psn) & PSN_MASK) <= MAX_GAP {
            let was_filled = flow.awaited.remove(&packet.psn);
            self.counts.repeated += u64::from(!was_filled);
            return None;
        }
        let is_other = is_behind || ahead > MAX_GAP || packet.begins && flow.reads;
        let gap = if is_other { 0 } else { ahead };
        if gap > 0 {
            let missing = (0..gap).map(|number| flow.next.wrapping_add(number) & PSN_MASK);
            flow.awaited.extend(missing);
            while flow.awaited.len() > MAX_AWAITED {
                flow.awaited.pop_first();
            }
        }
        flow.largest = flow.largest.max(packet.bytes);
        flow.next = packet.psn.wrapping_add(1) & PSN_MASK;
        self.counts.filled += u64::from(gap);
        let bytes = u64::from(packet.bytes) + u64::from(gap) * u64::from(flow.largest);
        if packet.bytes == 0 && gap == 0 {
            return None;
        }
        self.counts.counted += 1;
        Some(Sample { at_ns: packet.at_ns, from: packet.from, to: packet.to, bytes })
    }
}
