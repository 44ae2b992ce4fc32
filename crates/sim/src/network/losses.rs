//! Packets that failures have cost, by cause, and how long their queue pairs took to make up for
//! it.
//!
//! A queue pair is *hit* when a request packet for it is lost to a failure, and has *recovered*
//! when each of these packets has come again. Packets that a full buffer dropped do not count: they
//! are counted by their link.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use roce::verbs::Qpn;
use roce::wire::Opcode;
use roce::{Duration, Time};

use super::Network;
use crate::memory::NodeMemory;
use crate::packet::Packet;

/// Why a packet was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It was on a link that went down, or was sent on one that was down.
    LinkDown,
    /// It was in a switch that went down, or on one of its links.
    SwitchDown,
    /// A bit of it flipped on a link, and the frame check sequence showed that.
    BitError,
    /// A switch had no route to its node.
    NoRoute,
    /// It went round until its hop limit.
    HopLimit,
    /// It waited where a watchdog had given up.
    Watchdog,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Cause; 6] = [
        Cause::LinkDown,
        Cause::SwitchDown,
        Cause::BitError,
        Cause::NoRoute,
        Cause::HopLimit,
        Cause::Watchdog,
    ];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Cause::LinkDown => "link down",
            Cause::SwitchDown => "switch down",
            Cause::BitError => "bit error",
            Cause::NoRoute => "no route",
            Cause::HopLimit => "hop limit",
            Cause::Watchdog => "watchdog",
        }
    }
}

/// What failures have cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LossReport {
    /// Packets lost, in the order of [`Cause::ALL`].
    pub packets: [u64; Cause::ALL.len()],
    /// Times that a queue pair was hit.
    pub hits: u64,
    /// From a queue pair's first lost packet until all had come again; in the order in which that
    /// happened.
    pub recoveries: Vec<Duration>,
}

/// A queue pair that was hit: since when, and the PSNs that are missing; at most as many as its
/// window has.
#[derive(Clone, Debug)]
struct Wound {
    since: Time,
    missing: BTreeSet<u32>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Losses {
    report: LossReport,
    /// Nodes and queue pairs whose recoveries are watched, and those of them that were hit.
    watched: BTreeSet<(u32, u32)>,
    wounds: BTreeMap<(u32, u32), Wound>,
}

impl Losses {
    /// Whether an arriving packet may be one that is waited for.
    #[inline]
    pub(super) fn has_wounds(&self) -> bool {
        !self.wounds.is_empty()
    }

    fn note(&mut self, now: Time, packet: &Packet) {
        let key = (packet.to, packet.dest_qpn());
        if !self.watched.contains(&key) || !is_request(packet) {
            return;
        }
        let hits = &mut self.report.hits;
        let wound = self.wounds.entry(key).or_insert_with(|| {
            *hits += 1;
            Wound { since: now, missing: BTreeSet::new() }
        });
        wound.missing.insert(packet.psn());
    }

    pub(super) fn arrives(&mut self, now: Time, packet: &Packet) {
        let key = (packet.to, packet.dest_qpn());
        let Some(wound) = self.wounds.get_mut(&key).filter(|_| is_request(packet)) else {
            return;
        };
        wound.missing.remove(&packet.psn());
        if wound.missing.is_empty() {
            self.heal(now, key);
        }
    }

    fn heal(&mut self, now: Time, key: (u32, u32)) {
        if let Some(wound) = self.wounds.remove(&key) {
            self.report.recoveries.push(now.since(wound.since));
        }
    }
}

fn is_request(packet: &Packet) -> bool {
    let opcode = packet.bytes.first().copied().and_then(Opcode::from_u8);
    opcode.is_some_and(Opcode::is_request)
}

impl<M: NodeMemory> Network<M> {
    /// Notes from now on when a queue pair of a node is hit, and when it has recovered.
    pub fn watch(&mut self, node: u32, qpn: Qpn) {
        self.losses.watched.insert((node, qpn.get()));
    }

    /// What failures have cost so far.
    pub fn loss_report(&self) -> &LossReport {
        &self.losses.report
    }

    /// Nothing more comes for a queue pair of a node: it has everything (true), or it never will.
    pub fn end_watch(&mut self, node: u32, qpn: Qpn, has_all: bool) {
        let key = (node, qpn.get());
        self.losses.watched.remove(&key);
        match has_all {
            // What is missing still had come before it was lost: a retransmission without need.
            true => self.losses.heal(self.now, key),
            false => drop(self.losses.wounds.remove(&key)),
        }
    }

    /// A packet is lost to a failure.
    pub(super) fn lose(&mut self, cause: Cause, id: u32) {
        self.losses.report.packets[cause as usize] += 1;
        if let Some(packet) = self.pool.get_mut(id) {
            self.losses.note(self.now, packet);
        }
        self.discard(id);
    }
}
