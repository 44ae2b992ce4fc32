//! Packets in flight: through links and switches, into faults, and to their node.
//!
//! Faults are injected where a packet enters the air. Whether one was effective is decided where it
//! arrives; see [`faults`](crate::faults) for the rules.

use alloc::vec::Vec;

use roce::Duration;
use roce::endpoint::Endpoint;
use roce::verbs::Qpn;
use roce::wire::telemetry::Form;
use roce::wire::{Headers, Psn, Service};
use roce::world::Ecn;

use super::{Cause, Event, Network, Node};
use crate::faults::Fault;
use crate::link::{Enqueued, Ingress, Link, Outage, Started, Vertex, Waiting};
use crate::memory::NodeMemory;
use crate::packet::Packet;
use crate::paths::Spread;
use crate::port::Body;

/// Longest delay by a fault.
pub const MAX_DELAY_NS: u64 = 20_000_000;

/// What links and switches need of a packet on its way. Thousands of packets are in flight in a
/// large network, each passes many links, and all of this is half a cache line: the rest of a
/// packet stays where it is from one end to the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transit {
    /// The switches that it has been to, of the first 64, as bits.
    pub(super) visited: u64,
    from: u32,
    to: u32,
    /// Its destination queue pair, as far as switches see it: 0 in RoCEv1, since behind a GRH
    /// nothing tells queue pairs apart.
    qpn: u32,
    /// Its size on a link in bytes.
    pub(super) bytes: u32,
    pub(super) dscp: u8,
    pub(super) hop_limit: u8,
    /// The epoch of the link that it is on.
    epoch: u8,
    ecn: Ecn,
    /// Switches write into it.
    has_telemetry: bool,
}

impl Transit {
    fn of(packet: &Packet) -> Transit {
        Transit {
            visited: 0,
            from: packet.from,
            to: packet.to,
            qpn: seen_qpn(packet),
            bytes: packet.frame_bytes,
            dscp: packet.dscp,
            hop_limit: packet.hop_limit,
            epoch: 0,
            ecn: packet.ecn,
            has_telemetry: packet.telemetry.is_some(),
        }
    }
}

/// The destination queue pair of a packet as switches see it.
fn seen_qpn(packet: &Packet) -> u32 {
    if packet.is_v1 { 0 } else { packet.dest_qpn() }
}

/// The table of packets in flight.
#[derive(Debug, Default)]
pub(super) struct Pool {
    packets: Vec<Option<Packet>>,
    /// By number, as `packets`; void where there is none.
    transits: Vec<Transit>,
    free: Vec<u32>,
}

impl Pool {
    pub(super) fn put(&mut self, packet: Packet) -> u32 {
        let transit = Transit::of(&packet);
        match self.free.pop() {
            Some(id) => {
                self.transits[id as usize] = transit;
                self.packets[id as usize] = Some(packet);
                id
            }
            None => {
                self.transits.push(transit);
                self.packets.push(Some(packet));
                self.packets.len() as u32 - 1
            }
        }
    }

    /// Takes a packet out, with what switches have changed.
    pub(super) fn take(&mut self, id: u32) -> Option<Packet> {
        let mut packet = self.packets.get_mut(id as usize)?.take()?;
        let Transit { ecn, hop_limit, .. } = self.transits[id as usize];
        (packet.ecn, packet.hop_limit) = (ecn, hop_limit);
        self.free.push(id);
        Some(packet)
    }

    /// A copy of a packet as it is now.
    fn copy(&self, id: u32) -> Option<Packet> {
        let packet = self.packets.get(id as usize)?.clone()?;
        let Transit { ecn, hop_limit, .. } = self.transits[id as usize];
        Some(Packet { ecn, hop_limit, ..packet })
    }

    /// A packet, without what switches have changed.
    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut Packet> {
        self.packets.get_mut(id as usize)?.as_mut()
    }

    /// What links need of a packet that is in flight.
    pub(super) fn transit(&mut self, id: u32) -> &mut Transit {
        &mut self.transits[id as usize]
    }

    /// The bytes of a packet were damaged.
    pub(super) fn note_damage(&mut self, id: u32) {
        if let Some(packet) = &self.packets[id as usize] {
            self.transits[id as usize].qpn = seen_qpn(packet);
        }
    }
}

/// The progress of a flow's packets, to detect reordering.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    from: u32,
    to: u32,
    qpn: u32,
    latest: u64,
}

impl<M: NodeMemory> Network<M> {
    /// A packet leaves `at`, a node or a switch, on its next link. At a switch it came by the link
    /// `ingress`.
    pub(super) fn route(&mut self, at: Vertex, ingress: Option<u32>, id: u32) {
        let &mut Transit { bytes, dscp, ecn, has_telemetry, .. } = self.pool.transit(id);
        let is_expired = match at {
            Vertex::Switch(switch) => !self.visit(switch, id),
            Vertex::Node(_) => false,
        };
        let ingress = ingress.map(|link| {
            let from = &self.links[link as usize];
            Ingress { link, port: from.port, class: from.class(dscp) as u8 }
        });
        if is_expired {
            self.vacate(ingress, bytes);
            return self.lose(Cause::HopLimit, id);
        }
        let ingress_link = ingress.filter(|_| self.failures.bounces).map(|ingress| ingress.link);
        let back = ingress_link.and_then(|link| self.bounce(link, id));
        let Some(link) = back.or_else(|| self.next_link(at, id)) else {
            self.count_unrouted();
            self.vacate(ingress, bytes);
            return self.lose(Cause::NoRoute, id);
        };
        let class = self.links[link as usize].class(dscp);
        let is_busy = self.links[link as usize].is_busy(class, bytes);
        if is_busy && !self.charge(link, ingress, bytes) {
            self.links[link as usize].count_drop();
            self.judge_drop(ingress);
            self.vacate(ingress, bytes);
            return self.discard(id);
        }
        let waiting = Waiting { packet: id, bytes, ecn, has_telemetry, ingress };
        match self.links[link as usize].enqueue(self.now, class, waiting) {
            Enqueued::Waits => {
                self.watch_queues();
                self.collect_watermarks();
            }
            Enqueued::Leaves(at) => {
                if has_telemetry {
                    self.stamp(link, id);
                }
                self.vacate(ingress, bytes);
                self.events.add(at, Event::Departed(link));
            }
            Enqueued::Left => {
                self.vacate(ingress, bytes);
                self.launch(link, id);
            }
            Enqueued::Dropped => {
                self.discharge(link, ingress, bytes);
                self.vacate(ingress, bytes);
                self.discard(id);
            }
        }
    }

    /// The link by which a packet leaves `at`.
    fn next_link(&mut self, at: Vertex, id: u32) -> Option<u32> {
        let packet = self.pool.transit(id);
        let table = match at {
            Vertex::Switch(switch) => self.failures.table(switch),
            Vertex::Node(_) => None,
        };
        let links = table.unwrap_or(&self.paths).links(at, packet.to);
        let place = match (links.len() as u64, self.spread) {
            (0 | 1, _) | (_, Spread::First) => 0,
            (several, Spread::Flow) => hash(at, packet.from, packet.to, packet.qpn) % several,
            (several, Spread::Packet) => self.chance.below(several),
            (_, Spread::Shortest) => {
                let waits = |link: &u32| self.links[*link as usize].waits_for(packet.dscp);
                let least = links.iter().map(waits).min();
                let shortest = || (0..).zip(links).filter(|(_, link)| Some(waits(link)) == least);
                let chosen = self.chance.below(shortest().count() as u64) as usize;
                shortest().nth(chosen).map_or(0, |(place, _)| place)
            }
        };
        links.get(place as usize).copied()
    }

    /// A switch writes the state of the link into a packet with telemetry that starts to depart.
    #[cold]
    fn stamp(&mut self, link: u32, id: u32) {
        let link = &mut self.links[link as usize];
        if let Some(packet) = self.pool.get_mut(id)
            && let Some(report) = &mut packet.telemetry
            && matches!(link.start, Vertex::Switch(_))
        {
            match report.form() {
                Form::Links => report.stamp(link.hop(self.now)),
                Form::Digest => {
                    let utilization = link.utilization(self.now, self.telemetry_rtt);
                    report.raise(utilization, self.chance.word() as u16);
                }
            }
        }
    }

    pub(super) fn discard(&mut self, packet: u32) {
        if let Some(packet) = self.pool.take(packet) {
            self.nodes[packet.from as usize].port.recycle(packet.bytes);
        }
    }

    pub(super) fn departed(&mut self, link: u32) {
        let index = link as usize;
        if let Some(packet) = self.links[index].take_departed() {
            self.feel_slowness(link);
            match core::mem::take(&mut self.links[index].is_cut) {
                true => self.lose_to_outage(link, packet),
                false => self.launch(link, packet),
            }
        }
        self.start_next(link);
        if let Vertex::Node(node) = self.links[index].start
            && self.readmit(node)
        {
            self.mark_dirty(node);
        }
    }

    /// The next packet of a link starts to depart, if one may.
    pub(super) fn start_next(&mut self, link: u32) {
        let index = link as usize;
        let Some(Started { waiting, class, left_at }) = self.links[index].start_next(self.now)
        else {
            return;
        };
        let ecn = self.links[index].mark(waiting.ecn, class, &mut self.chance);
        if ecn != waiting.ecn {
            self.pool.transit(waiting.packet).ecn = ecn;
        }
        if waiting.has_telemetry {
            self.stamp(link, waiting.packet);
        }
        self.discharge(link, waiting.ingress, waiting.bytes);
        self.vacate(waiting.ingress, waiting.bytes);
        self.events.add(left_at, Event::Departed(link));
    }

    /// A packet enters the air, where faults are injected.
    fn launch(&mut self, link: u32, id: u32) {
        let Link { is_up, is_faulty, bit_errors, .. } = self.links[link as usize];
        if !is_up {
            return self.lose_to_outage(link, id);
        }
        if bit_errors > 0 && self.is_hit_by_bit_error(link, id) {
            self.resend_total(link, id);
            return self.lose(Cause::BitError, id);
        }
        if self.failures.faults.bit_errors > 0 && !self.survives_bit_errors(link, id) {
            self.resend_total(link, id);
            return self.lose(Cause::BitError, id);
        }
        if !is_faulty || self.mix.is_none() {
            return self.fly(link, id, Duration::ZERO);
        }
        if self.strikes(Fault::Loss) {
            self.resend_total(link, id);
            let live = self.pool.get_mut(id).is_some_and(|packet| is_live(&self.nodes, packet));
            if live {
                self.counts.effect(Fault::Loss);
            }
            return self.discard(id);
        }
        let is_orderly = self.links[link as usize].config.credits.is_some();
        if !is_orderly {
            self.double(link, id);
            self.stray(link, id);
        }
        self.damage(id);
        let delay = if is_orderly { Duration::ZERO } else { self.hold_up(id) };
        if delay > Duration::ZERO {
            self.links[link as usize].is_disturbed = true;
        }
        self.fly(link, id, delay);
    }

    fn strikes(&mut self, fault: Fault) -> bool {
        let strikes = self.mix.strikes(fault, &mut self.chance);
        if strikes {
            self.counts.inject(fault);
        }
        strikes
    }

    fn lose_to_outage(&mut self, link: u32, id: u32) {
        self.feel_outage(link);
        self.resend_total(link, id);
        let cause = match self.links[link as usize].outage {
            Outage::Switch(_) => Cause::SwitchDown,
            Outage::Cable | Outage::Link => Cause::LinkDown,
        };
        self.lose(cause, id);
    }

    fn double(&mut self, link: u32, id: u32) {
        if !self.strikes(Fault::Duplicate) {
            return;
        }
        let Some(packet) = self.pool.get_mut(id) else {
            return;
        };
        // More arrives than the link could deliver.
        self.links[link as usize].is_disturbed = true;
        packet.marks.twin = Some(self.twins.len() as u32);
        self.twins.push(0);
        let Some(copy) = self.pool.copy(id) else {
            return;
        };
        let copy = self.pool.put(copy);
        let delay = Duration::from_nanos(self.chance.below(200_000));
        self.fly(link, copy, delay);
    }

    /// A stray packet: a copy with a sequence number far outside the range in use.
    fn stray(&mut self, link: u32, id: u32) {
        if !self.strikes(Fault::Stray) {
            return;
        }
        let Some(mut copy) = self.pool.copy(id) else {
            return;
        };
        copy.marks.twin = None;
        let distance = self.chance.between(1 << 16, 1 << 22) as u32;
        let ahead = self.chance.per_mille(500);
        let body = self.nodes[copy.from as usize].port.body;
        if !shift_psn(&mut copy, distance, ahead, body) {
            return;
        }
        copy.marks.stray = true;
        self.links[link as usize].is_disturbed = true;
        let copy = self.pool.put(copy);
        let delay = Duration::from_nanos(self.chance.below(50_000));
        self.fly(link, copy, delay);
    }

    fn damage(&mut self, id: u32) {
        let (flips, cuts) = (self.strikes(Fault::Flip), self.strikes(Fault::Truncate));
        let Some(packet) = self.pool.get_mut(id).filter(|_| flips || cuts) else {
            return;
        };
        if flips {
            let bit = self.chance.below(packet.bytes.len() as u64 * 8) as usize;
            packet.bytes[bit / 8] ^= 1 << (bit % 8);
            packet.marks.flipped = true;
        }
        if cuts {
            packet.bytes.truncate(self.chance.below(packet.bytes.len() as u64) as usize);
            packet.marks.truncated = true;
        }
        self.pool.note_damage(id);
    }

    fn hold_up(&mut self, id: u32) -> Duration {
        let mut delay = Duration::ZERO;
        for (fault, most_ns) in [(Fault::Reorder, 20_000), (Fault::Delay, MAX_DELAY_NS)] {
            if self.strikes(fault) {
                delay = delay + Duration::from_nanos(self.chance.below(most_ns));
                if let Some(packet) = self.pool.get_mut(id) {
                    packet.marks.slowed = Some(fault);
                }
            }
        }
        delay
    }

    fn fly(&mut self, link: u32, id: u32, extra: Duration) {
        let at = self.now + self.links[link as usize].config.delay + extra;
        self.launched += 1;
        let Link { epoch, is_faulty, .. } = self.links[link as usize];
        self.pool.transit(id).epoch = epoch;
        // Its place among the packets of its flow is the one with which it left its node.
        if is_faulty && let Some(packet) = self.pool.get_mut(id) {
            packet.marks.order = self.launched;
            if packet.marks.slowed.is_some() {
                packet.marks.resent_before = resent(&self.nodes[packet.from as usize].endpoint);
            }
        }
        self.events.add(at, Event::Arrived { packet: id, link });
    }

    pub(super) fn arrived(&mut self, id: u32, link: u32) {
        let epoch = self.links[link as usize].epoch;
        if self.failures.has_reset && self.pool.transit(id).epoch != epoch {
            return self.lose_to_outage(link, id);
        }
        if !self.occupy(link, id) {
            return self.discard(id);
        }
        match self.links[link as usize].end {
            switch @ Vertex::Switch(_) => self.route(switch, Some(link), id),
            Vertex::Node(node) => {
                self.consume(link, id);
                self.arrive(node, id);
            }
        }
    }

    fn arrive(&mut self, node: u32, id: u32) {
        let Some(packet) = self.pool.take(id).filter(|packet| packet.to == node) else {
            return;
        };
        if !self.mix.is_none() || !self.flows.is_empty() {
            self.judge(&packet);
        }
        if self.losses.has_wounds() {
            self.losses.arrives(self.now, &packet);
        }
        self.nodes[node as usize].port.inbox.push_back(packet);
        self.mark_dirty(node);
    }

    /// Decides which faults of a packet were effective.
    fn judge(&mut self, packet: &Packet) {
        let overtaken = self.is_overtaken(packet);
        if packet.marks.is_damaged() || !is_live(&self.nodes, packet) {
            return;
        }
        if packet.marks.stray {
            self.counts.effect(Fault::Stray);
        }
        if let Some(twin) = packet.marks.twin {
            self.twins[twin as usize] += 1;
            if self.twins[twin as usize] == 2 {
                self.counts.effect(Fault::Duplicate);
            }
        }
        if let Some(fault) = packet.marks.slowed {
            let resent = resent(&self.nodes[packet.from as usize].endpoint);
            let replaced = fault == Fault::Delay && resent != packet.marks.resent_before;
            if overtaken || replaced {
                self.counts.effect(fault);
            }
        }
    }

    fn is_overtaken(&mut self, packet: &Packet) -> bool {
        let Packet { from, to, marks, .. } = *packet;
        let (qpn, order) = (packet.dest_qpn(), marks.order);
        let same = |flow: &&mut Flow| (flow.from, flow.to, flow.qpn) == (from, to, qpn);
        match self.flows.iter_mut().find(same) {
            Some(flow) => {
                let overtaken = order < flow.latest;
                flow.latest = flow.latest.max(order);
                overtaken
            }
            None => {
                self.flows.push(Flow { from, to, qpn, latest: order });
                false
            }
        }
    }
}

fn resent(endpoint: &Endpoint) -> u64 {
    let counters = endpoint.counters();
    counters.retransmitted_packets + counters.timeouts
}

/// Of a packet's flow, at every node and switch another one: mixing as in SplitMix64.
pub(super) fn hash(at: Vertex, from: u32, to: u32, dest_qpn: u32) -> u64 {
    let (kind, number) = match at {
        Vertex::Node(node) => (1, node),
        Vertex::Switch(switch) => (2, switch),
    };
    let parts = [kind, number, from, to, dest_qpn];
    parts.into_iter().fold(0, |state: u64, part| {
        let sum = (state ^ u64::from(part)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let once = (sum ^ sum >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let twice = (once ^ once >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        twice ^ twice >> 31
    })
}

/// Whether the destination queue pair accepts packets.
pub(super) fn is_live<M>(nodes: &[Node<M>], packet: &Packet) -> bool {
    use roce::endpoint::QpState::{Rtr, Rts, Sqd, Sqe};
    let Some(node) = nodes.get(packet.to as usize) else {
        return false;
    };
    let state = node.endpoint.qp_state(Qpn::new(packet.dest_qpn()));
    state.is_some_and(|state| matches!(state, Rtr | Rts | Sqd | Sqe))
}

/// Changes the sequence number of a packet of a reliable connection, and its ICRC accordingly.
fn shift_psn(packet: &mut Packet, distance: u32, ahead: bool, body: Body) -> bool {
    let Ok((headers, _)) = Headers::parse(&packet.bytes) else {
        return false;
    };
    if !matches!(headers.bth().opcode.service(), Service::Rc | Service::Selective) {
        return false;
    }
    let psn = headers.bth().psn;
    let moved: Psn = if ahead { psn.plus(distance) } else { psn.minus(distance) };
    packet.bytes[9..12].copy_from_slice(&moved.get().to_be_bytes()[1..]);
    body != Body::Sealed || packet.seal()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Addressing;

    fn packet(is_v1: bool) -> Packet {
        let addressing = Addressing { ipv6: false, is_v1 };
        Packet {
            source: addressing.source(0),
            dest: addressing.ip(1),
            ecn: Ecn::Ect0,
            is_v1,
            bytes: alloc::vec![7; 16],
            from: 0,
            to: 1,
            id: 0,
            dscp: 0,
            hop_limit: 64,
            phantom_payload: 0,
            frame_bytes: 100,
            marks: Default::default(),
            telemetry: None,
        }
    }

    /// Damage moves a packet to another way only where switches see queue pairs.
    #[test]
    fn behind_a_grh_switches_see_no_queue_pair_damaged_or_not() {
        for is_v1 in [false, true] {
            let mut pool = Pool::default();
            let id = pool.put(packet(is_v1));
            let before = pool.transit(id).qpn;
            pool.get_mut(id).unwrap().bytes[7] ^= 1;
            pool.note_damage(id);
            assert_eq!(pool.transit(id).qpn != before, !is_v1, "v1: {is_v1}");
        }
    }
}
