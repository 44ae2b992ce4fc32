//! What a run looked like on the links: counters, queues at an instant, and the way of a packet.

use alloc::vec::Vec;

use roce::Time;

use super::Network;
use crate::link::{Link, LinkConfig, LinkStats, Vertex};
use crate::memory::NodeMemory;

/// One direction of a cable after a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// Where it starts.
    pub from: Vertex,
    /// Where it ends.
    pub to: Vertex,
    /// Bits per second.
    pub rate_bps: u64,
    /// Its counters.
    pub stats: LinkStats,
}

/// Queues at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSample {
    /// When.
    pub at: Time,
    /// Bytes in the longest queue of a switch.
    pub longest_bytes: u64,
    /// Bytes in all of them.
    pub total_bytes: u64,
    /// Classes of links that are paused.
    pub paused: u32,
    /// Bytes that have left towards hosts since statistics were last reset, framing included.
    pub into_hosts_bytes: u64,
}

impl<M: NodeMemory> Network<M> {
    /// Every link, with its statistics.
    pub fn link_reports(&mut self) -> Vec<LinkReport> {
        let now = self.now;
        let report = |link: &mut Link| LinkReport {
            from: link.start,
            to: link.end,
            rate_bps: link.config.rate_bps,
            stats: link.stats(now),
        };
        self.links.iter_mut().map(report).collect()
    }

    /// The queues of switches, now.
    pub fn queues(&self) -> QueueSample {
        let out = self.links.iter().filter(|link| matches!(link.start, Vertex::Switch(_)));
        let bytes = out.map(Link::total_bytes);
        let (longest_bytes, total_bytes) =
            bytes.fold((0, 0), |(longest, sum), bytes| (longest.max(bytes), sum + bytes));
        let paused = self.links.iter().map(Link::paused_classes).sum();
        let last = self.links.iter().filter(|link| matches!(link.end, Vertex::Node(_)));
        let into_hosts_bytes = last.map(Link::departed_bytes).sum();
        QueueSample { at: self.now, longest_bytes, total_bytes, paused, into_hosts_bytes }
    }

    /// The links from one node to another, by the first of several ways; cut short where there is
    /// none.
    pub fn path(&self, from: u32, to: u32) -> Vec<LinkConfig> {
        let way = self.paths.way(from, to, |link| self.links[link as usize].end);
        way.into_iter().map(|link| self.links[link as usize].config).collect()
    }
}
