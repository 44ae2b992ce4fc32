//! Links and switches that fail, and switches that find other ways.
//!
//! A link that goes down loses what is on it, and both of its ends forget pauses and credits. What
//! waits for it leaves into nothing. A switch that goes down loses everything that it holds, and
//! takes its links with it.
//!
//! With [`Rerouting`], the switches learn of a link that went down or came up after the time of
//! detection; then shortest paths are computed without the links that are down, and each switch
//! changes to them at a time of its own. Until all have, a packet may meet old tables and new ones,
//! and may go round in a loop: its hop limit ends that. Nodes, which have one way out, change
//! nothing. Tables of a routing engine ([`Graph::routed`]) stay as they are.
//!
//! [`Conduct`] counts what no fault explains, and which is always a bug of the switches. [`Defect`]
//! plants such bugs.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use roce::Duration;

use super::air::is_live;
use super::{Cause, Event, Network, NetworkConfig};
use crate::buffer::Buffer;
use crate::chance::Chance;
use crate::faults::Fault;
use crate::graph::Graph;
use crate::link::{Ingress, Link, MAX_CLASSES, Outage, Vertex, Waiting};
use crate::memory::NodeMemory;
use crate::paths::Paths;

/// How switches learn of failures, and get other routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rerouting {
    /// From the moment at which a link goes down or comes up until routes are computed anew.
    pub detection: Duration,
    /// Longest time that a switch takes to use them.
    pub spread: Duration,
}

impl Rerouting {
    /// When the last switch has new routes, after a failure.
    pub fn longest(&self) -> Duration {
        self.detection + self.spread
    }
}

/// What links do to packets and pauses, besides the faults of a
/// [`FaultMix`](crate::faults::FaultMix).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkFaults {
    /// Bit errors in 10^9 bits, on links that start at a switch. Most of the damage is found by the
    /// frame check sequence at the end of the link; an eighth happens inside the switch, which
    /// sends it on with a right one.
    pub bit_errors: u32,
    /// Pauses, their ends, and flow control packets that are lost, in parts per million.
    pub pause_loss: u32,
}

/// A bug of switches, or of a sender on a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Defect {
    /// None.
    #[default]
    None,
    /// Switches do not pause.
    PauseForgotten,
    /// Senders do not obey pauses.
    PauseIgnored,
    /// A pause never ends.
    ResumeLost,
    /// The credit of a packet that was lost does not come back.
    CreditLeaked,
    /// When the last switch has its new table, one packet is sent back to where it came from.
    LoopOnReroute,
}

/// What was counted that happens because of faults, and what no fault explains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conduct {
    /// Packets whose hop limit ended a loop.
    pub expired: u64,
    /// Times that a packet came to a switch again while routes changed.
    pub loops: u64,
    /// Packets for which a switch had no route.
    pub unrouted: u64,
    /// Times that routes were computed anew.
    pub reroutes: u64,
    /// Times that a watchdog dropped what waited.
    pub watchdog_trips: u64,
    /// Packets that were dropped by one.
    pub watchdog_drops: u64,
    /// Packets dropped by a lossless switch whose link had no fault: always a bug.
    pub unexplained_drops: u64,
    /// Times that a packet came to a switch again though no routes had changed since it was sent:
    /// always a bug.
    pub unexplained_loops: u64,
    /// Packets that came without a credit: always a bug.
    pub overruns: u64,
}

impl Conduct {
    /// Adds what was counted in another run.
    pub fn add(&mut self, other: &Conduct) {
        self.expired += other.expired;
        self.loops += other.loops;
        self.unrouted += other.unrouted;
        self.reroutes += other.reroutes;
        self.watchdog_trips += other.watchdog_trips;
        self.watchdog_drops += other.watchdog_drops;
        self.unexplained_drops += other.unexplained_drops;
        self.unexplained_loops += other.unexplained_loops;
        self.overruns += other.overruns;
    }
}

/// The state of all this.
#[derive(Debug)]
pub(super) struct Failures {
    rerouting: Option<Rerouting>,
    /// Kept only where routes may change.
    graph: Option<Graph>,
    pub(super) faults: LinkFaults,
    pub(super) defect: Defect,
    pub(super) conduct: Conduct,
    /// By link: whether the switches take it for usable.
    known_up: Vec<bool>,
    /// By switch: the routes it uses; empty where routes do not change.
    tables: Vec<Arc<Paths>>,
    latest: Option<Arc<Paths>>,
    /// Switches that are still to change to the latest routes, times the changes under way.
    pending: u32,
    /// Times that a switch changed its routes.
    changes: u32,
    /// A link has been reset: packets that were on it are still to be lost.
    pub(super) has_reset: bool,
    /// By switch: whether it is down, and has lost a packet by that.
    dead: Vec<bool>,
    dead_felt: Vec<bool>,
    /// By node: whether it pauses its switch, and packets have waited for that.
    storms: Vec<Storm>,
    /// One packet is to be sent back: see [`Defect::LoopOnReroute`].
    pub(super) bounces: bool,
    chance: Chance,
}

#[derive(Clone, Copy, Debug, Default)]
struct Storm {
    is_on: bool,
    is_felt: bool,
}

/// Sets the randomness of failures apart from that of the packets.
const FAILURES: u64 = 0x6661_696c_7572_6573;

impl Failures {
    pub(super) fn new(config: &NetworkConfig, links: usize) -> Failures {
        let (nodes, switches) = (config.graph.nodes() as usize, config.graph.switches() as usize);
        Failures {
            rerouting: config.rerouting,
            graph: config.rerouting.map(|_| config.graph.clone()),
            faults: LinkFaults::default(),
            defect: Defect::None,
            conduct: Conduct::default(),
            known_up: vec![true; if config.rerouting.is_some() { links } else { 0 }],
            tables: Vec::new(),
            latest: None,
            pending: 0,
            changes: 0,
            has_reset: false,
            dead: vec![false; switches],
            dead_felt: vec![false; switches],
            storms: vec![Storm::default(); nodes],
            bounces: false,
            chance: Chance::new(config.seed ^ FAILURES),
        }
    }

    /// Whether the ends of a link forget pauses and credits when it goes down.
    pub(super) fn resets_ports(&self) -> bool {
        self.rerouting.is_some()
    }

    /// The routes of a switch, if they have ever changed.
    #[inline]
    pub(super) fn table(&self, switch: u32) -> Option<&Paths> {
        self.tables.get(switch as usize).map(|paths| &**paths)
    }

    /// The number of the tables that all switches have; 0 while they change.
    #[inline]
    pub(super) fn tables_now(&self) -> u32 {
        if self.pending == 0 { self.changes + 1 } else { 0 }
    }
}

/// Switches that are joined by links that are up make an island; a node is on those to which a
/// cable of it leads, and two nodes with a cable to each other are on one of their own.
#[derive(Clone, Debug)]
pub struct Islands {
    by_node: Vec<Vec<u32>>,
}

impl Islands {
    fn of(nodes: usize, switches: usize, links: &[Link]) -> Islands {
        let up = || links.iter().filter(|link| link.is_up);
        let mut beside = vec![Vec::new(); switches];
        for link in up() {
            if let (Vertex::Switch(a), Vertex::Switch(b)) = (link.start, link.end) {
                beside[a as usize].push(b);
            }
        }
        let (mut island_of, mut islands) = (vec![None; switches], 0);
        for first in 0..switches as u32 {
            let mut open = vec![first];
            while let Some(switch) = open.pop() {
                if island_of[switch as usize].is_none() {
                    island_of[switch as usize] = Some(islands);
                    open.extend(&beside[switch as usize]);
                }
            }
            islands += 1;
        }
        let mut by_node = vec![Vec::new(); nodes];
        for link in up() {
            match (link.start, link.end) {
                (Vertex::Node(node), Vertex::Switch(switch)) => {
                    by_node[node as usize].extend(island_of[switch as usize]);
                }
                (Vertex::Node(a), Vertex::Node(b)) => {
                    by_node[a as usize].push(islands);
                    by_node[b as usize].push(islands);
                    islands += 1;
                }
                _ => {}
            }
        }
        Islands { by_node }
    }

    /// Whether a way leads from one node to another.
    pub fn has_way(&self, from: u32, to: u32) -> bool {
        let [from, to] = [from, to].map(|node| &self.by_node[node as usize]);
        from.iter().any(|island| to.contains(island))
    }
}

impl<M: NodeMemory> Network<M> {
    /// A packet comes to a switch: false if its hop limit ends here.
    #[inline]
    pub(super) fn visit(&mut self, switch: u32, id: u32) -> bool {
        let packet = self.pool.transit(id);
        packet.hop_limit = packet.hop_limit.saturating_sub(1);
        let is_expired = packet.hop_limit == 0;
        let bit = if switch < u64::BITS { 1 << switch } else { 0 };
        let is_again = packet.visited & bit != 0;
        packet.visited |= bit;
        if is_again {
            self.count_loop(id);
        }
        self.failures.conduct.expired += u64::from(is_expired);
        !is_expired
    }

    #[cold]
    fn count_loop(&mut self, id: u32) {
        let tables = self.pool.get_mut(id).map_or(0, |packet| packet.marks.tables);
        let has_changed = tables == 0 || tables != self.failures.tables_now();
        let conduct = &mut self.failures.conduct;
        conduct.loops += u64::from(has_changed);
        conduct.unexplained_loops += u64::from(!has_changed);
    }

    /// What was counted so far.
    pub fn conduct(&self) -> Conduct {
        self.failures.conduct
    }

    /// What links do to packets and pauses from now on.
    pub fn set_link_faults(&mut self, faults: LinkFaults) {
        self.failures.faults = faults;
    }

    /// Plants a bug.
    pub fn plant_defect(&mut self, defect: Defect) {
        self.failures.defect = defect;
    }

    // ---- links ---------------------------------------------------------------------------------

    /// Takes a link down, in both directions, or up again; by the number of one direction.
    pub fn set_link(&mut self, link: u32, is_up: bool) {
        if is_up && self.links[link as usize].is_plugged {
            return;
        }
        if !is_up {
            self.counts.inject(Fault::LinkDown);
        }
        for link in [link, link ^ 1] {
            let entry = &mut self.links[link as usize];
            entry.is_plugged = is_up;
            entry.outage = Outage::Link;
        }
        self.bring(link);
        self.notice_changes();
    }

    /// Sets both directions of a link to what its cable and its ends allow.
    pub(super) fn bring(&mut self, link: u32) {
        let is_dead = |end: Vertex| match end {
            Vertex::Switch(switch) => self.failures.dead[switch as usize],
            Vertex::Node(_) => false,
        };
        let Link { start, end, is_plugged, is_up: was_up, .. } = self.links[link as usize];
        let is_up = is_plugged && !is_dead(start) && !is_dead(end);
        if is_up == was_up {
            return;
        }
        for link in [link, link ^ 1] {
            let entry = &mut self.links[link as usize];
            entry.is_up = is_up;
            entry.outage_felt &= is_up;
            self.reset_ends(link);
        }
        for link in [link, link ^ 1] {
            self.start_next(link);
        }
    }

    /// Both ends of one direction of a link forget what they told each other.
    fn reset_ends(&mut self, link: u32) {
        self.failures.has_reset = true;
        let entry = &mut self.links[link as usize];
        entry.reset(self.now);
        entry.is_disturbed = true;
        let (end, port) = (entry.end, entry.port);
        if let Vertex::Switch(switch) = end
            && let Some(buffer) = self.buffers.get_mut(switch as usize)
        {
            buffer.forget_pauses(port.into());
        }
    }

    /// Sets the rate of both directions of a link to a fraction of what it was built for: 1 for all
    /// of it.
    pub fn slow_down(&mut self, link: u32, by: u64) {
        if by > 1 {
            self.counts.inject(Fault::SlowLink);
        }
        for link in [link, link ^ 1] {
            let entry = &mut self.links[link as usize];
            entry.config.rate_bps = (entry.nominal_bps / by.max(1)).max(1);
            entry.slowness_unfelt = by > 1;
            // A pause leaves behind a slow frame, while the other direction may be fast again.
            entry.is_disturbed = true;
        }
    }

    /// A packet leaves on a link.
    pub(super) fn feel_slowness(&mut self, link: u32) {
        if self.links[link as usize].slowness_unfelt {
            self.links[link as usize].slowness_unfelt = false;
            self.links[link as usize ^ 1].slowness_unfelt = false;
            self.counts.effect(Fault::SlowLink);
        }
    }

    /// A packet is lost because its link is down, or was.
    pub(super) fn feel_outage(&mut self, link: u32) {
        let fault = match self.links[link as usize].outage {
            Outage::Cable => Fault::Flap,
            Outage::Link => Fault::LinkDown,
            Outage::Switch(switch) => return self.feel_death(switch),
        };
        // Both directions of a cable share one outage.
        let [own, other] = [link, link ^ 1].map(|link| link as usize);
        let is_felt = self.links[own].outage_felt || self.links[other].outage_felt;
        self.links[own].outage_felt = true;
        if !is_felt {
            self.counts.effect(fault);
        }
    }

    /// Makes both directions of a link flip so many of 10^15 bits, or fewer than before: each
    /// damaged frame is lost.
    pub fn set_bit_errors(&mut self, link: u32, per_10_15_bits: u64) {
        for link in [link, link ^ 1] {
            let entry = &mut self.links[link as usize];
            entry.bit_errors = per_10_15_bits;
            // Packets that are lost leave gaps in what its ends know of each other.
            entry.is_disturbed = true;
        }
    }

    /// Whether a frame is damaged by the bit errors of its link.
    pub(super) fn is_hit_by_bit_error(&mut self, link: u32, id: u32) -> bool {
        let Some(packet) = self.pool.get_mut(id) else {
            return false;
        };
        // For rates as low as these, the sum over the bits is the probability.
        let per_10_15 =
            self.links[link as usize].bit_errors.saturating_mul(8 * u64::from(packet.frame_bytes));
        let is_hit = self.failures.chance.below(1_000_000_000_000_000) < per_10_15;
        if is_hit {
            self.counts.inject(Fault::BitError);
            if is_live(&self.nodes, packet) {
                self.counts.effect(Fault::BitError);
            }
        }
        is_hit
    }

    /// A frame on a link from a switch suffers bit errors; false if its receiver drops it for that.
    pub(super) fn survives_bit_errors(&mut self, link: u32, id: u32) -> bool {
        let Failures { faults, chance, .. } = &mut self.failures;
        let (Some(packet), Vertex::Switch(_)) =
            (self.pool.get_mut(id), self.links[link as usize].start)
        else {
            return true;
        };
        // Errors in 10^9 bits, times 8 bits for each byte, in parts per million.
        let ppm = u64::from(faults.bit_errors) * u64::from(packet.frame_bytes) / 125;
        if !chance.per_million(ppm.min(1_000_000) as u32) {
            return true;
        }
        self.counts.inject(Fault::BitError);
        if chance.per_mille(125) {
            let bit = chance.below(packet.bytes.len() as u64 * 8) as usize;
            if let Some(byte) = packet.bytes.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
                packet.marks.corrupted = true;
            }
            self.pool.note_damage(id);
            return true;
        }
        if is_live(&self.nodes, packet) {
            self.counts.effect(Fault::BitError);
        }
        false
    }

    /// Whether a pause, its end, or a flow control packet for the start of a link is lost now.
    pub(super) fn loses_control(&mut self, link: u32, would_change: bool) -> bool {
        let Failures { faults, chance, .. } = &mut self.failures;
        if !chance.per_million(faults.pause_loss) {
            return false;
        }
        self.counts.inject(Fault::PauseLoss);
        self.links[link as usize].is_disturbed = true;
        if would_change {
            self.counts.effect(Fault::PauseLoss);
        }
        true
    }

    // ---- switches ------------------------------------------------------------------------------

    /// Takes a switch down, with everything it holds and all its links, or up again.
    pub fn set_switch(&mut self, switch: u32, is_up: bool) {
        if is_up == self.has_switch(switch) {
            return;
        }
        if !is_up {
            self.counts.inject(Fault::SwitchDown);
            self.failures.dead_felt[switch as usize] = false;
        }
        self.failures.dead[switch as usize] = !is_up;
        let at = Vertex::Switch(switch);
        for link in (0..self.links.len() as u32).step_by(2) {
            let Link { start, end, .. } = self.links[link as usize];
            if start != at && end != at {
                continue;
            }
            if !is_up {
                self.links[link as usize].outage = Outage::Switch(switch);
                self.links[link as usize ^ 1].outage = Outage::Switch(switch);
            }
            self.bring(link);
        }
        if !is_up {
            self.empty_switch(switch);
        }
        self.notice_changes();
    }

    /// Whether a switch is up.
    pub fn has_switch(&self, switch: u32) -> bool {
        !self.failures.dead[switch as usize]
    }

    /// A switch loses what waits in it.
    fn empty_switch(&mut self, switch: u32) {
        let mut lost = VecDeque::new();
        for link in self.links.iter_mut().filter(|link| link.start == Vertex::Switch(switch)) {
            link.restart_counts();
            (0..MAX_CLASSES).for_each(|class| lost.append(&mut link.drain(self.now, class)));
        }
        if let Some(buffer) = self.buffers.get_mut(switch as usize) {
            buffer.clear();
        }
        for Waiting { packet, bytes, ingress, .. } in lost {
            self.feel_death(switch);
            self.vacate(ingress, bytes);
            self.lose(Cause::SwitchDown, packet);
        }
    }

    fn feel_death(&mut self, switch: u32) {
        if !core::mem::replace(&mut self.failures.dead_felt[switch as usize], true) {
            self.counts.effect(Fault::SwitchDown);
        }
    }

    // ---- routes --------------------------------------------------------------------------------

    /// The links that changed are known after the time of detection.
    fn notice_changes(&mut self) {
        let Some(rerouting) = self.failures.rerouting else {
            return;
        };
        let at = self.now + rerouting.detection;
        for link in 0..self.links.len() as u32 {
            let is_up = self.links[link as usize].is_up;
            self.events.add(at, Event::Detected { link, is_up });
        }
        self.events.add(at, Event::Reroute);
    }

    pub(super) fn detected(&mut self, link: u32, is_up: bool) {
        // What a node's own cable does has no other way round.
        let Link { start, end, .. } = self.links[link as usize];
        let is_inside = matches!((start, end), (Vertex::Switch(_), Vertex::Switch(_)));
        if let Some(known) = self.failures.known_up.get_mut(link as usize) {
            *known = is_up || !is_inside;
        }
    }

    /// New routes are computed, and each switch is to get them.
    pub(super) fn reroute(&mut self) {
        let Failures { graph, known_up, chance, rerouting, conduct, .. } = &mut self.failures;
        let (Some(graph), Some(rerouting)) = (graph, rerouting) else {
            return;
        };
        conduct.reroutes += 1;
        let switches = graph.switches();
        let paths = Arc::new(graph.paths(|link| known_up[link as usize]));
        for switch in 0..switches {
            let wait = Duration::from_nanos(chance.below(rerouting.spread.as_nanos() + 1));
            self.events.add(self.now + wait, Event::NewTable(switch));
        }
        if self.failures.tables.is_empty() {
            let first = Arc::new(self.paths.clone());
            self.failures.tables = vec![first; switches as usize];
        }
        self.failures.latest = Some(paths);
        self.failures.pending += switches;
    }

    /// A switch changes to the latest routes.
    pub(super) fn take_table(&mut self, switch: u32) {
        let failures = &mut self.failures;
        if let Some(latest) = &failures.latest {
            failures.tables[switch as usize] = Arc::clone(latest);
        }
        failures.changes += 1;
        failures.pending -= 1;
        failures.bounces |= failures.pending == 0 && failures.defect == Defect::LoopOnReroute;
    }

    pub(super) fn count_unrouted(&mut self) {
        self.failures.conduct.unrouted += 1;
    }

    /// A switch had no room for a packet of this link, or its sender had no credit.
    pub(super) fn judge_drop(&mut self, ingress: Option<Ingress>) {
        let Some(Ingress { link, .. }) = ingress else {
            return;
        };
        let Link { end, is_disturbed, .. } = self.links[link as usize];
        if let Vertex::Switch(switch) = end {
            let buffer = self.buffers.get(switch as usize);
            let is_lossless = buffer.is_some_and(Buffer::is_lossless);
            self.failures.conduct.unexplained_drops += u64::from(is_lossless && !is_disturbed);
        }
    }

    /// With [`Defect::LoopOnReroute`], the link by which this packet goes back.
    pub(super) fn bounce(&mut self, ingress: u32, id: u32) -> Option<u32> {
        let back = ingress ^ 1;
        let Vertex::Switch(_) = self.links[back as usize].end else {
            return None;
        };
        let tables = self.pool.get_mut(id)?.marks.tables;
        let is_since = tables != 0 && tables == self.failures.tables_now();
        self.failures.bounces = !is_since;
        is_since.then_some(back)
    }

    /// Which nodes have ways to each other, whatever switches know of it.
    pub fn islands(&self) -> Islands {
        Islands::of(self.nodes.len(), self.failures.dead.len(), &self.links)
    }

    /// Whether any way leads from one node to another, whatever switches know of it.
    pub fn is_connected(&self, from: u32, to: u32) -> bool {
        let (mut seen, mut next) = (vec![Vertex::Node(from)], 0);
        while let Some(&at) = seen.get(next) {
            next += 1;
            for link in self.links.iter().filter(|link| link.is_up && link.start == at) {
                match link.end {
                    Vertex::Node(node) if node == to => return true,
                    switch @ Vertex::Switch(_) if !seen.contains(&switch) => seen.push(switch),
                    _ => {}
                }
            }
        }
        false
    }

    /// The links of one of the ways from one node to another; `pick` chooses which.
    pub fn way(&self, from: u32, to: u32, mut pick: u64) -> Vec<u32> {
        let (mut at, mut way) = (Vertex::Node(from), Vec::new());
        while way.len() < self.links.len() {
            let links = self.paths.links(at, to);
            let Some(count) = (links.len() as u64).checked_sub(1) else {
                break;
            };
            let link = links[(pick % (count + 1)) as usize];
            pick /= count + 1;
            way.push(link);
            at = self.links[link as usize].end;
        }
        way
    }

    /// Where a link starts and ends.
    pub fn ends(&self, link: u32) -> [Vertex; 2] {
        let Link { start, end, .. } = self.links[link as usize];
        [start, end]
    }

    // ---- pause storms --------------------------------------------------------------------------

    /// A node pauses all classes of its switch and refreshes that, or stops doing so.
    pub fn set_storm(&mut self, node: u32, is_on: bool) {
        if is_on == self.failures.storms[node as usize].is_on {
            return;
        }
        if is_on {
            self.counts.inject(Fault::PauseStorm);
        }
        self.failures.storms[node as usize] = Storm { is_on, is_felt: false };
        self.send_storm(node, is_on);
    }

    fn send_storm(&mut self, node: u32, is_paused: bool) {
        for link in 0..self.links.len() as u32 {
            let Link { start, end, .. } = self.links[link as usize];
            if let (Vertex::Switch(_), Vertex::Node(to)) = (start, end)
                && to == node
            {
                (0..MAX_CLASSES).for_each(|class| self.send_pause(link, class, is_paused));
                let refresh =
                    self.pause_time(link).map(|span| Duration::from_nanos(span.as_nanos() / 8));
                if let Some(refresh) = refresh.filter(|_| is_paused) {
                    self.events.add(self.now + refresh, Event::Storm(node));
                }
            }
        }
    }

    /// The next pause of a storm.
    pub(super) fn go_on_storming(&mut self, node: u32) {
        let Storm { is_on, is_felt } = self.failures.storms[node as usize];
        if !is_on {
            return;
        }
        let to = Vertex::Node(node);
        let mut into = self.links.iter().filter(|link| link.end == to);
        let is_held = |link: &Link| (0..MAX_CLASSES).any(|class| link.is_held(class));
        if !is_felt && into.any(is_held) {
            self.failures.storms[node as usize].is_felt = true;
            self.counts.effect(Fault::PauseStorm);
        }
        self.send_storm(node, true);
    }

    /// Ends all failures: links and switches are up, links as fast as they were built, nothing is
    /// lost.
    pub fn repair(&mut self) {
        self.failures.faults = LinkFaults::default();
        for node in 0..self.len() {
            self.set_storm(node, false);
        }
        for switch in 0..self.failures.dead.len() as u32 {
            self.set_switch(switch, true);
        }
        for link in (0..self.links.len() as u32).step_by(2) {
            if self.links[link as usize].config.rate_bps != self.links[link as usize].nominal_bps {
                self.slow_down(link, 1);
            }
            self.set_link(link, true);
        }
    }

    // ---- at rest -------------------------------------------------------------------------------

    /// What is wrong in a network in which nothing moves any more: pauses that never end, buffers
    /// that are charged for nothing, credits that did not come back.
    pub fn unrest(&self) -> Option<String> {
        let link = self.links.iter().find(|link| !link.is_at_rest());
        if let Some(Link { start, end, .. }) = link {
            return Some(format!("the link from {start} to {end} is paused, or lacks credits"));
        }
        let busy = self.buffers.iter().position(|buffer| !buffer.is_at_rest());
        busy.map(|switch| format!("the buffer of switch {switch} is not empty, or pauses a port"))
    }
}
