//! Watermarks of switch buffers: registers in switches, a collector that reads them, and hosts that
//! are told.
//!
//! Each port of a switch keeps, by class, the longest queue since its register was last read. Every
//! [`Collector::every`] the collector reads all registers, and [`Collector::late`] after that it
//! tells every sending connection about the port on its way whose queue takes longest to leave
//! ([`Endpoint::handle_watermark`](roce::endpoint::Endpoint::handle_watermark)). With packets on
//! several paths, that is of all of them.
//!
//! The collector rests while nothing waits anywhere. It knows the routes that switches have when it
//! tells, and the host's clocks.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::num::NonZeroU64;

use roce::congestion::Watermark;
use roce::{Duration, Time};

use super::air::hash;
use super::{Event, Network};
use crate::link::{MAX_CLASSES, UNLIMITED, Vertex};
use crate::memory::NodeMemory;
use crate::paths::Spread;

/// The shortest time between two readings.
const LEAST_EVERY: Duration = Duration::from_micros(1);

/// Readings in a row without a queue until the collector rests: as many as let a cap end.
const MOST_IDLE: u32 = 16;

/// Most readings that are under way to the hosts: a collector that is later loses them.
const MOST_LATE: usize = 64;

/// A control plane that reads the watermarks of all switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collector {
    /// Time between two readings of a register, at least 1 us.
    pub every: Duration,
    /// From the reading until hosts are told.
    pub late: Duration,
}

/// What was read at a time.
#[derive(Clone, Debug)]
struct Reading {
    from: Time,
    until: Time,
    /// By link.
    bytes: Vec<[u64; MAX_CLASSES]>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Watermarks {
    config: Option<Collector>,
    is_reading: bool,
    idle: u32,
    since: Time,
    readings: VecDeque<Reading>,
}

impl Watermarks {
    pub(super) fn new(config: Option<Collector>) -> Watermarks {
        let config = config
            .map(|Collector { every, late }| Collector { every: every.max(LEAST_EVERY), late });
        let readings = VecDeque::new();
        Watermarks { config, is_reading: false, idle: 0, since: Time::ZERO, readings }
    }
}

impl<M: NodeMemory> Network<M> {
    /// A packet waits: the collector reads from now on.
    #[inline]
    pub(super) fn collect_watermarks(&mut self) {
        if let Some(config) = self.watermarks.config {
            self.watermarks.idle = 0;
            if !self.watermarks.is_reading {
                self.watermarks.is_reading = true;
                self.watermarks.since = self.now;
                self.events.add(self.now + config.every, Event::ReadWatermarks);
            }
        }
    }

    pub(super) fn read_watermarks(&mut self) {
        let Some(Collector { every, late }) = self.watermarks.config else {
            return;
        };
        let bytes: Vec<_> = self.links.iter_mut().map(|link| link.take_watermarks()).collect();
        // What is held back waits for long, without a packet that joins it.
        let is_idle = bytes.iter().flatten().all(|&bytes| bytes == 0);
        let from = core::mem::replace(&mut self.watermarks.since, self.now);
        if self.watermarks.readings.len() < MOST_LATE {
            self.watermarks.readings.push_back(Reading { from, until: self.now, bytes });
            self.events.add(self.now + late, Event::TellWatermarks);
        }
        self.watermarks.idle = if is_idle { self.watermarks.idle + 1 } else { 0 };
        self.watermarks.is_reading = self.watermarks.idle < MOST_IDLE;
        if self.watermarks.is_reading {
            self.events.add(self.now + every, Event::ReadWatermarks);
        }
    }

    pub(super) fn tell_watermarks(&mut self) {
        let Some(reading) = self.watermarks.readings.pop_front() else {
            return;
        };
        for node in 0..self.len() {
            let connections = self.nodes[node as usize].endpoint.connections();
            let told: Vec<_> = connections
                .filter_map(|(qpn, path, dest)| {
                    let to = self.addressing.node(path.remote.ip());
                    let seen = if self.is_roce_v1() { 0 } else { dest.get() };
                    let links = self.links_between(node, to, seen);
                    Some((qpn, self.longest(&reading, &links, path.dscp)?))
                })
                .collect();
            if told.is_empty() {
                continue;
            }
            self.mark_dirty(node);
            for (qpn, watermark) in told {
                // Refused ones are counted by the endpoint.
                let _ =
                    self.nodes[node as usize].endpoint.handle_watermark(qpn, self.now, &watermark);
            }
        }
    }

    /// The watermark of these links whose queue takes longest to leave.
    fn longest(&self, reading: &Reading, links: &[u32], dscp: u8) -> Option<Watermark> {
        let Reading { from, until, ref bytes } = *reading;
        let of_link = |&number: &u32| {
            let link = &self.links[number as usize];
            let rate_bps = NonZeroU64::new(link.config.rate_bps)?;
            let queue_bytes = bytes[number as usize][link.class(dscp)];
            let is_limited = rate_bps.get() != UNLIMITED;
            is_limited.then_some(Watermark { from, until, queue_bytes, rate_bps })
        };
        links.iter().filter_map(of_link).max_by_key(Watermark::queueing)
    }

    /// The links out of switches by which packets may go from one node to a queue pair of another,
    /// as switches see it.
    fn links_between(&self, from: u32, to: u32, dest_qpn: u32) -> Vec<u32> {
        let (mut found, mut next) = (Vec::new(), vec![Vertex::Node(from)]);
        // Shortest paths have no circles, but tables that change may: each link is followed once.
        while let Some(at) = next.pop() {
            let table = match at {
                Vertex::Switch(switch) => self.failures.table(switch),
                Vertex::Node(_) => None,
            };
            let links = table.unwrap_or(&self.paths).links(at, to);
            let chosen = match (links.len() as u64, self.spread) {
                (0 | 1, _) | (_, Spread::Packet | Spread::Shortest) => links,
                (_, Spread::First) => &links[..1],
                (several, Spread::Flow) => {
                    let place = (hash(at, from, to, dest_qpn) % several) as usize;
                    &links[place..=place]
                }
            };
            for &link in chosen {
                if !found.contains(&link) {
                    found.push(link);
                    next.push(self.links[link as usize].end);
                }
            }
        }
        found.retain(|&link| matches!(self.links[link as usize].start, Vertex::Switch(_)));
        found
    }
}
