//! Harness of two programs and the network between them.
//!
//! The input is a script. Its first record says how the queue pairs are created and connected, each
//! other one is an action: a verb on either side, a packet delivered, lost, duplicated, delayed,
//! changed, forged, or the passing of time. After that the network heals: forged packets are
//! dropped, everything else arrives in order, receives are posted. Then each queue pair must finish
//! its work or be in error, within a bounded number of steps.
//!
//! Checks on the way: every memory access ([`AccessCheck`](crate::access::AccessCheck)), every
//! completion ([`Ledger`](crate::ledger::Ledger)), and that sending terminates.

use std::collections::VecDeque;
use std::net::SocketAddr;

use roce::Duration;
use roce::endpoint::{AttrMask, Connect, Mtu, QpAttr, QpState, Reliability};
use roce::verbs::{
    Access, Datagram, MULTICAST_QPN, MemoryRegion, SendOp, SendWr, SgList, Sge, Transport,
    WindowBinding,
};
use roce::wire::{Bth, Headers, Psn, ROCE_PORT};
use roce::world::{Ecn, Path};
use sim::network::{Network, Packet};

use crate::access::{Grant, STRETCHES};
use crate::forge::{self, Target};
use crate::ledger::Queue;
use crate::node::{
    self, Host, MIXES, Memory, Program, QKEY, SLOTS, Shape, Slot, Window, attributes, group,
};
use crate::script::{Record, pick, records};

/// Most actions in one script.
const MAX_RECORDS: usize = 128;

/// Most packets in flight in one direction; more are lost, as in a real queue.
const MAX_FLYING: usize = 256;

/// Most events until everything has finished. A script has room for a hundred requests of two dozen
/// packets, and a few retries each; this is several times that.
const MAX_HEALING_EVENTS: usize = 10_000;

/// Events after which queue pairs that may wait for ever are no longer checked.
const ENOUGH_EVENTS: usize = 300;

/// Runs the script.
pub fn check(input: &[u8]) {
    play(input);
}

/// Runs the script, and returns states and counters of both sides at its end.
pub fn summary(input: &[u8]) -> String {
    play(input).map_or(String::new(), |mut world| world.summary())
}

fn play(input: &[u8]) -> Option<World> {
    let mut records = records(input);
    let mut world = World::new(records.next()?);
    for record in records.take(MAX_RECORDS) {
        world.step(record);
    }
    world.heal();
    Some(world)
}

#[derive(Debug)]
struct World {
    network: Network<Memory>,
    programs: [Program; 2],
    /// Last sequence numbers seen by `[node][slot]`: of requests, of responses.
    seen: [[(Psn, Psn); SLOTS]; 2],
    /// Connections without guarantees, as packets were forged or one side alone went back to an
    /// earlier state.
    tainted: [bool; SLOTS],
    /// Nothing has disturbed the network or the queue pairs so far: every wait must end.
    calm: bool,
    connect: Record,
}

impl World {
    fn new(first: Record) -> World {
        let shape = Shape {
            mix: pick(first.e >> 2, &MIXES),
            ipv6: first.e & 2 != 0,
            cq_depth: pick(first.a, &[64, 32, 16, 4]),
            max_wr: pick(first.a >> 2, &[16, 8, 2, 1]),
            seed: u64::from(first.a >> 6) + 1,
        };
        let mut network = node::network(2, &shape);
        let programs = [0, 1].map(|own| Program::new(network.node_mut(own), shape));
        let mut world = World {
            network,
            programs,
            seen: [[(Psn::default(), Psn::default()); SLOTS]; 2],
            tainted: [false; SLOTS],
            // Without any retry, selective repeat may not survive a receiver that was not ready.
            calm: first.e & 1 == 0 || first.c & 7 > 0,
            connect: first,
        };
        (0..SLOTS).for_each(|slot| world.connect_both(slot));
        world
    }

    fn host(&mut self, own: usize) -> Host<'_> {
        let now = self.network.now();
        Host { now, node: self.network.node_mut(own as u32), program: &mut self.programs[own] }
    }

    /// States and counters, for reports.
    fn summary(&mut self) -> String {
        [0, 1].map(|own| self.host(own).summary()).concat()
    }

    // ---- connections ---------------------------------------------------------------------------

    fn connect_both(&mut self, slot: usize) {
        let first_psn = pick(self.connect.b, &[0, 0xff_fffe, 0x7f_ffff, 0x80_0000]);
        (0..2).for_each(|own| self.connect_one(own, slot, Some(Psn::new(first_psn))));
    }

    /// PSN of the first request: `chosen` before the queue pair is connected.
    fn first_psn(&self, node: usize, slot: usize, chosen: Option<Psn>) -> Option<Psn> {
        let qpn = self.programs[node].slots[slot].qpn?;
        let attr = self.network.node(node as u32).endpoint.query_qp(qpn).expect("it exists");
        Some(chosen.filter(|_| attr.state == QpState::Reset).unwrap_or(attr.sq_psn))
    }

    fn connect_one(&mut self, own: usize, slot: usize, first_psn: Option<Psn>) {
        let Some(connect) = self.connection(own, slot, first_psn) else {
            return;
        };
        self.seen[own][slot].0 = connect.remote_psn.minus(1);
        self.host(own).connect(slot, &connect);
    }

    /// How to reach the peer of a slot, if it has one.
    fn connection(&self, own: usize, slot: usize, first_psn: Option<Psn>) -> Option<Connect> {
        let peer = self.network.node(1 - own as u32);
        let qpn = self.programs[1 - own].slots[slot].qpn?;
        let remote_psn = self.first_psn(1 - own, slot, first_psn)?;
        let local_psn = self.first_psn(own, slot, first_psn)?;
        let Record { verb, b, c, d, e, .. } = self.connect;
        Some(Connect {
            mtu: pick(b >> 2, &[Mtu::M256, Mtu::M256, Mtu::M512, Mtu::M1024]),
            timeout: pick(verb, &[14, 1, 20, 0]),
            retry_count: c & 7,
            rnr_retry: c >> 3 & 7,
            min_rnr_timer: pick(c >> 6, &[1, 12, 0, 31]),
            max_rd_atomic: pick(d, &[16, 1, 2, 0]),
            max_dest_rd_atomic: pick(d >> 2, &[16, 1, 2, 0]),
            window_packets: pick(d >> 4, &[128, 1, 2, 8]),
            reliability: match e & 1 {
                0 => Reliability::GoBackN,
                _ => Reliability::Selective,
            },
            local_psn,
            ..Connect::new(peer.path(), qpn, remote_psn)
        })
    }

    // ---- steps ---------------------------------------------------------------------------------

    fn step(&mut self, record: Record) {
        let (own, slot) = (usize::from(record.a & 1), usize::from(record.a >> 1) % SLOTS);
        let verb = record.verb % 28;
        self.calm &= !matches!(verb, 10..=17 | 20 | 23);
        match verb {
            0..=4 => self.post_send(own, slot, record),
            5 | 6 => self.post_recv(own, slot, record),
            7..=9 => self.deliver_some(own, usize::from(record.b) % 32 + 1),
            10 => self.deliver_one(own, record.b),
            11 => self.lose(own, record.b),
            12 => self.double(own, record.b),
            13 | 14 => self.bend(own, slot, record),
            15 | 16 => self.forge(own, slot, record),
            17 => self.advance(record),
            18 => self.poll(own, slot, record),
            19 => self.change_memory(own, record),
            20 => self.change_qp(own, slot, record),
            21 => self.change_cq(own, slot, record),
            22 => self.run(usize::from(record.b)),
            23 => self.modify(own, slot, record),
            24 => self.change_srq(own, record),
            25 => self.change_window(own, slot, record),
            26 => self.change_group(own, slot, record),
            _ => self.query(own, slot, record),
        }
        self.settle();
    }

    /// Lets both do their work now, and puts their packets on their way.
    fn settle(&mut self) {
        node::settle(&mut self.network);
        (0..2).for_each(|own| self.carry(own));
    }

    fn carry(&mut self, from: usize) {
        let to = 1 - from;
        let (slots, seen) = (&self.programs[to].slots, &mut self.seen[to]);
        self.network.release(from as u32, |memory, packet| {
            let headers = memory.guard.judge_sent(packet);
            note(slots, seen, headers.bth());
        });
        self.network.nodes[from].memory.guard.forget_reads();
        let flying = self.network.held(to as u32);
        let too_many = flying.len() > MAX_FLYING;
        flying.truncate(MAX_FLYING);
        self.calm &= !too_many && self.network.misdirected() == 0;
    }

    // ---- the network ---------------------------------------------------------------------------

    fn flying(&mut self, to: usize) -> &mut VecDeque<Packet> {
        self.network.held(to as u32)
    }

    fn deliver_some(&mut self, to: usize, count: usize) {
        for _ in 0..count {
            let Some(packet) = self.flying(to).pop_front() else {
                return;
            };
            self.arrive(to, packet);
        }
    }

    fn arrive(&mut self, to: usize, packet: Packet) {
        if packet.is_forged() {
            self.tainted = [true; SLOTS];
        }
        node::hear(&mut self.network, to, packet);
        self.carry(to);
    }

    fn index(&mut self, to: usize, choice: u8) -> usize {
        usize::from(choice) % self.flying(to).len().max(1)
    }

    /// Out of turn.
    fn deliver_one(&mut self, to: usize, choice: u8) {
        let index = self.index(to, choice);
        if let Some(packet) = self.flying(to).remove(index) {
            self.arrive(to, packet);
        }
    }

    fn lose(&mut self, to: usize, choice: u8) {
        let index = self.index(to, choice);
        self.flying(to).remove(index);
    }

    fn double(&mut self, to: usize, choice: u8) {
        let index = self.index(to, choice);
        if let Some(packet) = self.flying(to).get(index).cloned() {
            self.arrive(to, packet);
        }
    }

    fn target(&mut self, to: usize, slot: usize, record: Record) -> Target {
        let (request_psn, response_psn) = self.seen[to][slot];
        let host = self.host(to);
        let live = host.slots[slot].qpn;
        let stale = host.stale_qpns.last().copied();
        Target {
            qpn: live.or(stale).unwrap_or(MULTICAST_QPN),
            request_psn,
            response_psn,
            region: host.region(record.a >> 2),
            other_key: host.stale_keys.last().copied().unwrap_or(u32::from(record.e)),
        }
    }

    /// Delivers a packet in flight with a change; the real one stays.
    fn bend(&mut self, to: usize, slot: usize, record: Record) {
        let index = self.index(to, record.c);
        if let Some(packet) = self.flying(to).get(index).cloned() {
            let mut packet = packet.forged();
            match record.b {
                0xf0..=0xf7 => {
                    let ip = node::address(record.d, record.e & 1 != 0);
                    packet.source = SocketAddr::new(ip, ROCE_PORT);
                }
                0xf8..=0xff => packet.ecn = Ecn::Ce,
                _ => forge::bend(&mut packet.bytes, &self.target(to, slot, record), record),
            }
            self.arrive(to, packet);
        }
    }

    fn forge(&mut self, to: usize, slot: usize, record: Record) {
        let bytes = forge::make(&self.target(to, slot, record), record);
        if let Ok((headers, _)) = Headers::parse(&bytes)
            && headers.bth().opcode.is_request()
        {
            // So that the next forged one may continue this one.
            self.seen[to][slot].0 = headers.bth().psn;
        }
        let packet = self.network.forge(1 - to as u32, to as u32, bytes);
        self.arrive(to, packet);
    }

    /// Advances to the next deadline, or a little further.
    fn advance(&mut self, record: Record) {
        let little = Duration::from_nanos(u64::from(record.de()) << (record.c & 15));
        let now = self.network.now();
        let at = match record.b & 1 {
            0 => self.network.next_at().unwrap_or(now),
            _ => now + little,
        };
        self.network.advance_to(at);
    }

    /// The network works for a while.
    fn run(&mut self, events: usize) {
        for _ in 0..events {
            if !self.event() {
                return;
            }
        }
    }

    /// Delivers everything in flight, or else advances time; false when no event is left.
    fn event(&mut self) -> bool {
        self.settle();
        if (0..2).all(|to| self.flying(to).is_empty()) {
            let Some(next) = self.network.next_at() else {
                return false;
            };
            self.network.advance_to(next);
            self.settle();
        }
        for to in 0..2 {
            let count = self.flying(to).len();
            self.deliver_some(to, count);
        }
        true
    }

    // ---- verbs ---------------------------------------------------------------------------------

    fn post_send(&mut self, own: usize, slot: usize, record: Record) {
        let Some(qpn) = self.programs[own].slots[slot].qpn else {
            return;
        };
        let op = self.operation(own, record);
        let to = Some(self.datagram(own, slot, record));
        let mut host = self.host(own);
        let wr = SendWr {
            op,
            sges: buffers(&host, record),
            signaled: record.e & 1 == 0,
            solicited: record.e & 2 != 0,
            fence: record.e & 4 != 0,
            to,
            ..SendWr::default()
        };
        host.post_send(qpn, wr);
    }

    fn operation(&mut self, own: usize, record: Record) -> SendOp {
        let own_key = self.programs[own].windows.first().map(|window| window.rkey);
        let peer = self.host(1 - own);
        let nothing = MemoryRegion { addr: 0, len: 0, lkey: 0, rkey: 0 };
        let region = peer.region(record.a >> 5).unwrap_or(nothing);
        let stale = peer.stale_keys.first().copied().unwrap_or(region.lkey);
        let rkey = if record.e & 0x60 == 0x60 { stale } else { region.rkey };
        let remote_addr = edge(&region, length(record), record.e >> 3);
        let (window, window_addr) =
            peer.windows.first().map_or((rkey, remote_addr), |window| (window.rkey, window.addr));
        match record.b % 16 {
            0 | 1 => SendOp::Send,
            2 => SendOp::SendImm(7),
            3 | 4 => SendOp::Write { remote_addr, rkey },
            5 => SendOp::WriteImm { remote_addr, rkey, imm: 9 },
            6 | 7 => SendOp::Read { remote_addr, rkey },
            8 | 9 => SendOp::FetchAdd { remote_addr, rkey, add: u64::from(record.d) },
            10 => SendOp::CompareSwap { remote_addr, rkey, compare: record.word(), swap: 1 },
            11 => SendOp::SendInvalidate(rkey),
            12 => SendOp::SendInvalidate(window),
            13 => SendOp::Write { remote_addr: window_addr, rkey: window },
            14 => SendOp::Read { remote_addr: window_addr, rkey: window },
            _ => SendOp::LocalInvalidate(own_key.unwrap_or(rkey)),
        }
    }

    /// The destination of a datagram: the peer, the group, or none.
    fn datagram(&self, own: usize, slot: usize, record: Record) -> Datagram {
        let peer = &self.programs[1 - own];
        let to_group = record.e & 0x18 == 0x18;
        let dest_qp = match peer.slots[slot].qpn {
            Some(qpn) if !to_group => qpn,
            _ => MULTICAST_QPN,
        };
        let peer_ip = self.network.node(1 - own as u32).ip();
        let ip = if to_group { group(peer.shape.ipv6) } else { peer_ip };
        let qkey = pick(record.e >> 5, &[QKEY, QKEY, 1 << 31, 5]);
        let ah = Path::new(SocketAddr::new(ip, ROCE_PORT)).into();
        Datagram { ah, dest_qp, qkey }
    }

    fn post_recv(&mut self, own: usize, slot: usize, record: Record) {
        let mut host = self.host(own);
        let sges = buffers(&host, record);
        host.post_recv(slot, sges);
    }

    fn poll(&mut self, own: usize, slot: usize, record: Record) {
        let mut host = self.host(own);
        let Slot { send_cq, recv_cq, .. } = host.slots[slot];
        let cq = if record.b & 1 == 0 { send_cq } else { recv_cq };
        host.poll(cq, usize::from(record.c) % 32 + 1);
    }

    fn change_memory(&mut self, own: usize, record: Record) {
        let mut host = self.host(own);
        if record.b & 1 == 0 {
            let lkey = host.region(record.c).map_or(u32::from(record.d), |region| region.lkey);
            host.deregister(lkey);
            return;
        }
        host.register(usize::from(record.c) % STRETCHES, access_of(record.d));
    }

    fn change_qp(&mut self, own: usize, slot: usize, record: Record) {
        match record.b % 6 {
            0 => {
                let host = self.host(own);
                if let Some(qpn) = host.slots[slot].qpn {
                    host.node
                        .endpoint
                        .modify_qp(host.now, qpn, &QpAttr::to(QpState::Error))
                        .expect("it exists");
                }
            }
            1 => self.host(own).destroy_qp(slot),
            2 => self.host(own).create_qp(slot),
            3 => {
                self.tainted[slot] = true;
                self.connect_one(own, slot, None);
            }
            _ => {
                (0..2).for_each(|node| self.host(node).destroy_qp(slot));
                (0..2).for_each(|node| self.host(node).create_qp(slot));
                self.connect_both(slot);
            }
        }
    }

    fn change_cq(&mut self, own: usize, slot: usize, record: Record) {
        let mut host = self.host(own);
        let depth = host.shape.cq_depth;
        let Slot { qpn, send_cq, .. } = host.slots[slot];
        let destroyed = host.node.endpoint.destroy_cq(send_cq).is_ok();
        assert!(!destroyed || qpn.is_none(), "a completion queue in use was destroyed");
        if destroyed && record.b & 1 == 0 {
            host.slots[slot].send_cq =
                host.node.endpoint.create_cq(depth).expect("one was given back");
        }
    }

    /// A state, with the attributes that it needs, or one more or less.
    fn modify(&mut self, own: usize, slot: usize, record: Record) {
        const STATES: [QpState; 8] = [
            QpState::Reset,
            QpState::Init,
            QpState::Rtr,
            QpState::Rts,
            QpState::Sqd,
            QpState::Rts,
            QpState::Sqe,
            QpState::Error,
        ];
        let Some(connect) = self.connection(own, slot, None) else {
            return;
        };
        let transport = self.programs[own].slots[slot].service.transport;
        let mut attr = attributes(transport, pick(record.b, &STATES), &connect);
        if record.c & 0x80 != 0 {
            attr.mask ^= AttrMask::from_bits_retain(1 << (record.c & 31));
        }
        attr.cur_state = pick(record.b >> 3, &STATES);
        attr.sqd_notify = record.d & 1 != 0;
        attr.access = access_of(record.d >> 1);
        if record.e & 1 != 0 {
            attr.min_rnr_timer = record.e;
            // 0 means for ever: whether that may happen is decided when the connection is made.
            attr.timeout = (record.e >> 2).max(1);
            attr.rate_limit_bps = u64::from(record.e) << 20;
        }
        self.tainted[slot] = true;
        self.host(own).modify(slot, &attr);
    }

    fn change_srq(&mut self, own: usize, record: Record) {
        let mut host = self.host(own);
        match record.b % 3 {
            0 => host.destroy_srq(),
            1 => host.create_srq(),
            _ => {
                if let Some(srq) = host.srq {
                    let before = host.node.endpoint.query_srq(srq).expect("it exists");
                    let done = host.node.endpoint.set_srq_limit(srq, u32::from(record.c));
                    let after = host.node.endpoint.query_srq(srq).expect("it exists");
                    assert!(done.is_ok() || before == after, "refused, yet changed");
                }
            }
        }
    }

    fn change_window(&mut self, own: usize, slot: usize, record: Record) {
        let mut host = self.host(own);
        let index = usize::from(record.c) % host.windows.len().max(1);
        match record.b % 4 {
            0 => host.alloc_window(record.c & 1 != 0),
            1 => host.dealloc_window(index),
            _ => {
                let (Some(qpn), Some(&Window { id: window, rkey, .. }), Some(region)) =
                    (host.slots[slot].qpn, host.windows.get(index), host.region(record.a >> 2))
                else {
                    return;
                };
                let binding = WindowBinding {
                    window,
                    rkey: rkey ^ u32::from(record.e & 15),
                    lkey: region.lkey,
                    addr: region.addr.wrapping_add(u64::from(record.e >> 4) * 64),
                    len: u64::from(record.d) * 17,
                    access: access_of(record.d >> 2),
                    zero_based: record.e & 8 != 0,
                };
                host.bind(qpn, index, binding, record.b & 1 != 0);
            }
        }
    }

    fn change_group(&mut self, own: usize, slot: usize, record: Record) {
        let host = self.host(own);
        let ip = if record.c & 7 == 7 { host.node.ip() } else { group(host.shape.ipv6) };
        if let Some(qpn) = host.slots[slot].qpn {
            // Refused for connections, and for addresses that are no groups.
            let _ = match record.b & 1 {
                0 => host.node.endpoint.attach_multicast(qpn, ip),
                _ => host.node.endpoint.detach_multicast(qpn, ip),
            };
        }
    }

    /// Queries return a result, also for destroyed objects.
    fn query(&mut self, own: usize, slot: usize, record: Record) {
        let mut host = self.host(own);
        let Slot { qpn, send_cq, recv_cq, .. } = host.slots[slot];
        if let Some(qpn) = qpn {
            assert!(host.node.endpoint.qp_counters(qpn).is_some());
            let attr = host.node.endpoint.query_qp(qpn).expect("it exists");
            assert_eq!(Some(attr.state), host.node.endpoint.qp_state(qpn));
        }
        for stale in &host.program.stale_qpns {
            assert_eq!(host.node.endpoint.qp_state(*stale), None, "{stale:?} came back");
        }
        host.poll_events();
        let cq = if record.b & 1 == 0 { send_cq } else { recv_cq };
        // Refused once it was destroyed, or for a depth below what waits.
        let _ = match record.c & 1 {
            0 => host.node.endpoint.req_notify(cq, record.d & 1 != 0),
            _ => host.node.endpoint.resize_cq(cq, u32::from(record.d & 63) + 1),
        };
    }

    // ---- healing -------------------------------------------------------------------------------

    fn heal(&mut self) {
        for to in 0..2 {
            self.flying(to).retain(|packet| !packet.is_forged());
        }
        for events in 0..MAX_HEALING_EVENTS {
            (0..2).for_each(|own| supply(&mut self.host(own)));
            if !self.event() {
                self.judge_end();
                return;
            }
            if events > ENOUGH_EVENTS && self.may_wait_for_ever() {
                return;
            }
        }
        let now = self.network.now();
        panic!("still busy at {now} after {MAX_HEALING_EVENTS} events\n{}", self.summary());
    }

    /// Whether the queue pairs were connected with a timeout that never comes.
    fn may_wait_for_ever(&self) -> bool {
        self.connect.verb % 4 == 3
    }

    /// No event is left: each queue pair has finished or is in error, and the remaining guarantees
    /// were kept.
    fn judge_end(&mut self) {
        self.judge_work();
        (0..SLOTS).for_each(|slot| self.judge_messages(slot));
        for own in 0..2 {
            let carried_out = self.network.nodes[own].memory.guard.atomics.get();
            let asked_for = self.programs[1 - own].atomics;
            let clean = self.tainted == [false; SLOTS];
            assert!(!clean || carried_out <= asked_for, "an atomic was carried out twice");
        }
    }

    /// Reliable connections deliver each message once and in order.
    fn judge_messages(&mut self, slot: usize) {
        for [from, to] in [[0, 1], [1, 0]] {
            let Slot { qpn, service, .. } = self.programs[from].slots[slot];
            let Some(source) = qpn else {
                continue;
            };
            let receiver = self.host(to);
            let (answers, overrun) =
                (receiver.state(slot) == Some(QpState::Rts), receiver.overrun(slot));
            let ledger = &self.network.nodes[from].memory.guard.ledger;
            let in_vain = ledger.is_exhausted(source);
            assert!(!(self.calm && in_vain && answers), "{source:?} was not answered");
            if service.transport != Transport::Rc || self.tainted[slot] || overrun {
                continue;
            }
            let heard = &self.programs[to].heard;
            ledger.judge_heard(source, heard);
            // A destroyed queue pair takes along the completions that were not polled.
            let attr = self.network.node(from as u32).endpoint.query_qp(source).ok();
            if self.programs[to].slots[slot].qpn == attr.map(|attr| attr.dest_qp) {
                ledger.judge_missing(source, heard);
            }
        }
    }

    fn judge_work(&mut self) {
        let may_wait = self.may_wait_for_ever();
        for own in 0..2 {
            let mut host = self.host(own);
            host.poll_all();
            host.poll_events();
            for slot in 0..SLOTS {
                let Some(qpn) = host.slots[slot].qpn else {
                    continue;
                };
                let ledger = &host.node.memory.guard.ledger;
                let [sends, receives] =
                    [Queue::Send(qpn), Queue::Recv(qpn)].map(|queue| ledger.open(queue));
                let state = host.state(slot);
                match state {
                    Some(QpState::Error) if !host.overrun(slot) => {
                        assert_eq!(
                            (sends, receives),
                            (0, 0),
                            "{qpn:?} is in error, with work left"
                        );
                    }
                    Some(QpState::Rts) if !may_wait => {
                        assert_eq!(sends, 0, "{qpn:?} hangs\n{}", host.summary());
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Remembers sequence numbers, for the forger.
fn note(slots: &[Slot], seen: &mut [(Psn, Psn); SLOTS], bth: &Bth) {
    if let Some(slot) = slots.iter().position(|slot| slot.qpn == Some(bth.dest_qp)) {
        let (request, response) = &mut seen[slot];
        *(if bth.opcode.is_response() { response } else { request }) = bth.psn;
    }
}

fn access_of(bits: u8) -> Access {
    let bit = |n: u8| bits >> n & 1 != 0;
    Access {
        local_write: bit(0),
        remote_write: bit(1),
        remote_read: bit(2),
        remote_atomic: bit(3),
        bind_window: bit(4),
    }
}

/// Takes every completion, and posts receives until the queues are full.
fn supply(host: &mut Host<'_>) {
    host.poll_all();
    let usable = |grant: &&Grant| grant.reachable && grant.access.local_write;
    let region = host.node.memory.guard.grants.iter().rfind(usable).map(|grant| grant.keys);
    let whole = |keys: MemoryRegion| Sge { addr: keys.addr, len: keys.len as u32, lkey: keys.lkey };
    // Without memory there is still room for messages without bytes.
    let sges: SgList = region.map(whole).into_iter().collect();
    for slot in 0..host.slots.len() {
        let receives = !matches!(host.state(slot), None | Some(QpState::Error));
        while receives && host.post_recv(slot, sges.clone()) {}
    }
}

/// A scatter/gather list: one region or two, lengths around packet sizes.
fn buffers(host: &Host<'_>, record: Record) -> SgList {
    let len = length(record);
    let stale = host.stale_keys.first().copied();
    let element = |choice: u8, len: u32| {
        let region = host.region(choice)?;
        let lkey = if choice & 0x38 == 0x38 { stale? } else { region.lkey };
        let addr = edge(&region, len, choice >> 6);
        Some(Sge { addr, len, lkey })
    };
    let second = (record.e & 0x80 != 0).then(|| element(record.c >> 1, len / 2)).flatten();
    element(record.c, len).into_iter().chain(second).collect()
}

fn length(record: Record) -> u32 {
    match record.d {
        0..0x80 => u32::from(record.d) * 33,
        0xff => u32::MAX,
        0xfe => 1 << 30,
        _ => pick(record.d, &[0, 1, 8, 256, 257, 1024, 1025, 4096]),
    }
}

/// An address in a region: its first, or so that `len` bytes end with it, or one byte later.
fn edge(region: &MemoryRegion, len: u32, choice: u8) -> u64 {
    let last = region.addr.wrapping_add(region.len).wrapping_sub(u64::from(len));
    pick(choice & 3, &[region.addr, region.addr.wrapping_add(8), last, last.wrapping_add(1)])
}
