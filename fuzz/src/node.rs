//! One machine and its program, on the network of `sim`.
//!
//! Verbs go through here, so that the ledger and the table of regions always match the endpoint's
//! state; refused verbs change nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::{Deref, DerefMut};

use roce::Time;
use roce::device;
use roce::endpoint::{
    AsyncEvent, AttrMask, Connect, EndpointConfig, QpAttr, QpConfig, QpState, SrqConfig,
};
use roce::verbs::{
    Access, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendOp, SendWr, SgList, SrqId, Transport,
    WcStatus, WindowBinding, WindowId,
};
use roce::wire::Opcode;
use sim::graph::Graph;
use sim::memory::Arena;
use sim::network::{Network, NetworkConfig, Packet};

use crate::access::{AccessCheck, Grant, Pane, STRETCH_BYTES, STRETCHES, memory, stretch};
use crate::ledger::{Flow, Heard, Queue};

/// The memory of a node.
pub(crate) type Memory = Arena<AccessCheck>;
pub(crate) type Node = sim::network::Node<Memory>;

/// The type of a slot's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) transport: Transport,
    /// It uses the node's shared receive queue.
    pub(crate) shared: bool,
}

/// Queue pairs of a node. Two are enough to interact, and fast to create.
pub(crate) const SLOTS: usize = 2;

/// The types of the queue pairs. A new service is one more line.
pub(crate) const MIXES: [[Service; SLOTS]; 6] = {
    const fn own(transport: Transport) -> Service {
        Service { transport, shared: false }
    }
    const fn shared(transport: Transport) -> Service {
        Service { transport, shared: true }
    }
    [
        [own(Transport::Rc), own(Transport::Rc)],
        [own(Transport::Rc), own(Transport::Uc)],
        [own(Transport::Rc), own(Transport::Ud)],
        [shared(Transport::Rc), shared(Transport::Rc)],
        [shared(Transport::Uc), shared(Transport::Ud)],
        [own(Transport::Ud), own(Transport::Uc)],
    ]
};

/// Configuration of the nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) mix: [Service; SLOTS],
    pub(crate) ipv6: bool,
    pub(crate) cq_depth: u32,
    pub(crate) max_wr: u32,
    /// Seed of the first node's endpoint; the others count up from it.
    pub(crate) seed: u64,
}

/// A slot for a queue pair; its peer is in the same slot of the other node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) service: Service,
    pub(crate) qpn: Option<Qpn>,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
}

/// A memory window and its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) id: WindowId,
    /// Its latest key.
    pub(crate) rkey: u32,
    /// The address of its first byte for the peer.
    pub(crate) addr: u64,
    type_2: bool,
}

/// Queue key of all datagram queue pairs.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// Objects created by a program on its node, and its state.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) slots: Vec<Slot>,
    pub(crate) srq: Option<SrqId>,
    pub(crate) windows: Vec<Window>,
    /// Immediate data received, in the order of completions.
    pub(crate) heard: Vec<Heard>,
    /// Atomics that were posted here.
    pub(crate) atomics: u64,
    /// Keys and queue pair numbers that were valid once.
    pub(crate) stale_keys: Vec<u32>,
    pub(crate) stale_qpns: Vec<Qpn>,
    pub(crate) shape: Shape,
    foreign: PdId,
}

/// A node and its program.
pub(crate) struct Host<'w> {
    pub(crate) now: Time,
    pub(crate) node: &'w mut Node,
    pub(crate) program: &'w mut Program,
}

impl Deref for Host<'_> {
    type Target = Program;

    fn deref(&self) -> &Program {
        self.program
    }
}

impl DerefMut for Host<'_> {
    fn deref_mut(&mut self) -> &mut Program {
        self.program
    }
}

/// Initial registration of each range: the first one is accessible to peers through windows only,
/// the last belongs to another protection domain.
const RIGHTS: [Access; STRETCHES] = [
    Access { bind_window: true, ..Access::LOCAL },
    Access::REMOTE_WRITE,
    Access { remote_read: true, ..Access::LOCAL_READ },
    Access::ALL,
    Access::LOCAL_READ,
    Access::ALL,
];

/// Most times an endpoint may continue at one instant: it sends a bounded number of packets for
/// each event.
const MAX_TURNS: u32 = 64;

/// Largest completion queue.
const MAX_CQE: u32 = 64;

/// Most queued events: eight kinds for each object.
const MAX_EVENTS: usize = 8 * 16;

/// Nodes between which packets are handed over one by one. Without ICRC, which is not checked here.
pub(crate) fn network(nodes: u32, shape: &Shape) -> Network<Memory> {
    let config = NetworkConfig {
        is_sealed: false,
        holds: true,
        ipv6: shape.ipv6,
        max_turns: MAX_TURNS,
        endpoint: EndpointConfig {
            max_qps: 16,
            max_cqs: 16,
            max_regions: 16,
            max_cqe: MAX_CQE,
            max_qp_wr: 16,
            ..EndpointConfig::default()
        },
        ..NetworkConfig::new(Graph::new(nodes, 0), 0)
    };
    let mut network = Network::build(&config, |node, _| (memory(), shape.seed + u64::from(node)));
    network.advance_to(Time::from_nanos(1));
    network
}

/// Lets the changed nodes do all their work at this instant.
pub(crate) fn settle(network: &mut Network<Memory>) {
    network.settle_changed();
    let now = network.now();
    assert_eq!(network.spinning(), None, "still sending at {now}");
}

/// Delivers a packet, and sends the packets that result.
pub(crate) fn hear(network: &mut Network<Memory>, to: usize, packet: Packet) {
    let opcode = packet.bytes.first().and_then(|&byte| Opcode::from_u8(byte));
    let arriving = opcode.map(|opcode| (opcode, Qpn::new(packet.dest_qpn())));
    network.nodes[to].memory.guard.arriving = arriving;
    network.deliver(to as u32, packet);
    settle(network);
    let node = &mut network.nodes[to];
    node.memory.guard.arriving = None;
    assert_eq!(node.refused_intact(), 0, "a packet of ours does not decode");
}

impl Program {
    /// The program of a new node.
    pub(crate) fn new(node: &mut Node, shape: Shape) -> Program {
        let mut program = Program {
            slots: Vec::with_capacity(SLOTS),
            srq: None,
            windows: Vec::new(),
            heard: Vec::new(),
            atomics: 0,
            stale_keys: Vec::new(),
            stale_qpns: Vec::new(),
            shape,
            foreign: node.endpoint.alloc_pd(),
        };
        let mut host = Host { now: Time::ZERO, node, program: &mut program };
        (0..STRETCHES).for_each(|index| host.register(index, RIGHTS[index]));
        host.create_srq();
        shape.mix.into_iter().for_each(|service| host.add_slot(service));
        program
    }
}

impl Host<'_> {
    /// Creates a shared receive queue, if it is used and there is none.
    pub(crate) fn create_srq(&mut self) {
        let wanted = self.shape.mix.iter().any(|service| service.shared);
        if wanted && self.srq.is_none() {
            let config = SrqConfig { pd: self.node.pd, max_wr: self.shape.max_wr, limit: 1 };
            self.srq = self.node.endpoint.create_srq(config).ok();
        }
    }

    pub(crate) fn destroy_srq(&mut self) {
        let users = self.slots.iter().any(|slot| slot.service.shared && slot.qpn.is_some());
        if let Some(srq) = self.srq
            && self.node.endpoint.destroy_srq(srq).is_ok()
        {
            assert!(!users, "a shared receive queue in use was destroyed");
            self.node.memory.guard.ledger.orphan(|queue| queue == Queue::Shared(srq));
            self.srq = None;
        }
    }

    fn add_slot(&mut self, service: Service) {
        let depth = self.shape.cq_depth;
        let [send_cq, recv_cq] =
            [(); 2].map(|()| self.node.endpoint.create_cq(depth).expect("the table has room"));
        self.slots.push(Slot { service, qpn: None, send_cq, recv_cq });
        self.create_qp(self.slots.len() - 1);
    }

    // ---- memory --------------------------------------------------------------------------------

    /// Registers a range, if the endpoint accepts it.
    pub(crate) fn register(&mut self, index: usize, access: Access) {
        let reachable = index + 1 < STRETCHES;
        let pd = if reachable { self.node.pd } else { self.foreign };
        let (addr, backing) = (named(index), stretch(index));
        let registered = self.node.register_at(pd, addr, STRETCH_BYTES, backing, access);
        if let (Ok(keys), Some(grant)) = (registered, self.node.memory.guard.grants.last_mut()) {
            *grant = Grant { keys, reachable, ..*grant };
        }
    }

    pub(crate) fn deregister(&mut self, lkey: u32) {
        let grants = &self.node.memory.guard.grants;
        let keys = grants.iter().map(|grant| grant.keys).find(|keys| keys.lkey == lkey);
        if self.node.deregister(lkey).is_ok() {
            self.stale_keys.extend(keys.map(|keys| [keys.lkey, keys.rkey]).into_iter().flatten());
        }
    }

    /// The regions, accessible or not.
    pub(crate) fn region(&self, choice: u8) -> Option<MemoryRegion> {
        let grants = &self.node.memory.guard.grants;
        grants.get(usize::from(choice) % grants.len().max(1)).map(|grant| grant.keys)
    }

    // ---- queue pairs ---------------------------------------------------------------------------

    /// Creates a queue pair for an empty slot, if the endpoint accepts it.
    pub(crate) fn create_qp(&mut self, slot: usize) {
        let (pd, max_wr) = (self.node.pd, self.shape.max_wr);
        let Slot { service, send_cq, recv_cq, qpn } = self.slots[slot];
        let srq = self.srq.filter(|_| service.shared);
        if qpn.is_some() || service.shared != srq.is_some() {
            return;
        }
        let rc = QpConfig::rc(pd, send_cq, max_wr, max_wr);
        let config = QpConfig { transport: service.transport, recv_cq, srq, ..rc };
        self.slots[slot].qpn = self.node.endpoint.create_qp(config).ok();
    }

    pub(crate) fn destroy_qp(&mut self, slot: usize) {
        if let Some(qpn) = self.slots[slot].qpn.take() {
            self.node.endpoint.destroy_qp(self.now, qpn).expect("it exists");
            let gone = |queue| queue == Queue::Send(qpn) || queue == Queue::Recv(qpn);
            self.node.memory.guard.ledger.orphan(gone);
            self.stale_qpns.push(qpn);
        }
    }

    /// Takes a queue pair from RESET to RTS. Refused in any other state.
    pub(crate) fn connect(&mut self, slot: usize, peer: &Connect) {
        let Slot { service, qpn: Some(qpn), .. } = self.slots[slot] else {
            return;
        };
        if service.transport != Transport::Ud {
            let _ = device::connect(&mut self.node.endpoint, self.now, qpn, peer);
            return;
        }
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let _ = self.node.endpoint.modify_qp(
                self.now,
                qpn,
                &attributes(service.transport, state, peer),
            );
        }
    }

    /// Tries to change the state of a queue pair.
    pub(crate) fn modify(&mut self, slot: usize, attr: &QpAttr) {
        let Some(qpn) = self.slots[slot].qpn else {
            return;
        };
        let (before, state) = (self.node.endpoint.query_qp(qpn), self.state(slot));
        let done = self.node.endpoint.modify_qp(self.now, qpn, attr);
        match done {
            Ok(()) if attr.mask.contains(AttrMask::STATE) => {
                assert!(self.state(slot) == Some(attr.state), "{attr:?} led elsewhere");
            }
            Ok(()) => assert_eq!(self.state(slot), state, "{attr:?} changed the state"),
            Err(_) => assert_eq!(self.node.endpoint.query_qp(qpn), before, "refused, yet changed"),
        }
        // Requests posted in RESET stay when a change is refused.
        if done.is_ok() && self.state(slot) == Some(QpState::Reset) {
            let gone = |queue| queue == Queue::Send(qpn) || queue == Queue::Recv(qpn);
            self.node.memory.guard.ledger.orphan(gone);
        }
    }

    pub(crate) fn state(&self, slot: usize) -> Option<QpState> {
        self.node.endpoint.qp_state(self.slots[slot].qpn?)
    }

    // ---- work requests -------------------------------------------------------------------------

    /// A send. Immediate data is replaced by the work request's number, which the peer then
    /// reports.
    pub(crate) fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> bool {
        let wr_id = self.node.memory.guard.ledger.next_id();
        let op = numbered(wr.op, wr_id as u32);
        let is_atomic = matches!(op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        let brings_data = is_atomic || matches!(op, SendOp::Read { .. });
        let announces = matches!(op, SendOp::SendImm(_) | SendOp::WriteImm { .. });
        let buffers = self.node.memory.guard.backing_of(&wr.sges);
        let flow = if brings_data { Flow::In } else { Flow::Out };
        let bytes: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
        let signaled = wr.signaled;
        let posted =
            self.node.endpoint.post_send(self.now, qpn, SendWr { wr_id, op, ..wr }).is_ok();
        if posted {
            self.node.memory.guard.ledger.posted(Queue::Send(qpn), signaled, flow, buffers);
            self.atomics += u64::from(is_atomic);
        }
        if posted && announces {
            self.node.memory.guard.ledger.announced(bytes as u32);
        }
        posted
    }

    /// A receive for the queue used by the slot's queue pair.
    pub(crate) fn post_recv(&mut self, slot: usize, sges: SgList) -> bool {
        let Slot { service, qpn, .. } = self.slots[slot];
        match (service.shared, self.srq, qpn) {
            (true, Some(srq), _) => self.post_shared(srq, sges),
            (false, _, Some(qpn)) => self.post_own(qpn, sges),
            _ => false,
        }
    }

    fn post_shared(&mut self, srq: SrqId, sges: SgList) -> bool {
        let buffers = self.node.memory.guard.backing_of(&sges);
        let wr_id = self.node.memory.guard.ledger.next_id();
        let posted = self.node.endpoint.post_srq_recv(srq, RecvWr { wr_id, sges }).is_ok();
        if posted {
            self.node.memory.guard.ledger.posted(Queue::Shared(srq), true, Flow::In, buffers);
        }
        posted
    }

    fn post_own(&mut self, qpn: Qpn, sges: SgList) -> bool {
        let buffers = self.node.memory.guard.backing_of(&sges);
        let wr_id = self.node.memory.guard.ledger.next_id();
        let posted = self.node.endpoint.post_recv(self.now, qpn, RecvWr { wr_id, sges }).is_ok();
        if posted {
            self.node.memory.guard.ledger.posted(Queue::Recv(qpn), true, Flow::In, buffers);
        }
        posted
    }

    // ---- memory windows ------------------------------------------------------------------------

    pub(crate) fn alloc_window(&mut self, type_2: bool) {
        if let Ok((id, rkey)) = self.node.endpoint.alloc_window(self.node.pd, type_2) {
            self.windows.push(Window { id, rkey, addr: 0, type_2 });
        }
    }

    pub(crate) fn dealloc_window(&mut self, index: usize) {
        if let Some(&Window { id, rkey, .. }) = self.windows.get(index)
            && self.node.endpoint.dealloc_window(id).is_ok()
        {
            self.windows.swap_remove(index);
            self.stale_keys.push(rkey);
            self.node.memory.guard.panes.retain(|pane| pane.window != id);
        }
    }

    /// Binds a window in the order of the queue pair's sends; `by_request` as for type 2.
    pub(crate) fn bind(
        &mut self,
        qpn: Qpn,
        index: usize,
        binding: WindowBinding,
        by_request: bool,
    ) {
        let WindowBinding { window, lkey, addr, len, access, .. } = binding;
        let wr_id = self.node.memory.guard.ledger.next_id();
        let rkey = if by_request {
            let wr =
                SendWr { op: SendOp::BindWindow(binding), signaled: true, ..SendWr::default() };
            self.post_send(qpn, wr).then_some(binding.rkey)
        } else {
            let rkey = self.node.endpoint.bind_window(self.now, qpn, wr_id, binding, true).ok();
            if rkey.is_some() {
                self.node.memory.guard.ledger.posted(
                    Queue::Send(qpn),
                    true,
                    Flow::Out,
                    SgList::new(),
                );
            }
            rkey
        };
        let Some(rkey) = rkey else {
            return;
        };
        self.windows[index].rkey = rkey;
        self.windows[index].addr = if binding.zero_based { 0 } else { addr };
        let only = self.windows[index].type_2.then_some(qpn);
        let grant = self.node.memory.guard.grants.iter().find(|grant| grant.keys.lkey == lkey);
        if let Some(grant) = grant {
            let backing = addr.wrapping_sub(grant.keys.addr).wrapping_add(grant.backing);
            self.node.memory.guard.panes.push(Pane { window, only, backing, len, access });
        }
    }

    // ---- what the endpoint has to say ----------------------------------------------------------

    /// Takes up to `most` completions from a queue.
    pub(crate) fn poll(&mut self, cq: CqId, most: usize) {
        for _ in 0..most {
            let Some(completion) = self.node.endpoint.poll_cq(cq) else {
                return;
            };
            self.node.memory.guard.ledger.completed(&completion);
            if let (WcStatus::Success, Some(wr_id)) = (completion.status, completion.imm) {
                self.heard.push(Heard { wr_id, byte_len: completion.byte_len });
            }
        }
    }

    /// Takes every event and notification: each refers to an existing object, and their number is
    /// finite.
    pub(crate) fn poll_events(&mut self) {
        for _ in 0..MAX_EVENTS {
            let Some(event) = self.node.endpoint.poll_event() else {
                return self.poll_notifications();
            };
            let exists = match event {
                AsyncEvent::SrqLimitReached(srq) => self.srq == Some(srq),
                AsyncEvent::CqError(cq) => self.node.endpoint.cq_overrun(cq) == Some(true),
                _ => event.qpn().is_some_and(|qpn| self.node.endpoint.qp_state(qpn).is_some()),
            };
            assert!(exists, "{event:?} is about something that is gone");
        }
        panic!("more than {MAX_EVENTS} events wait");
    }

    fn poll_notifications(&mut self) {
        let queues = 2 * self.slots.len();
        for _ in 0..=queues {
            let Some(cq) = self.node.endpoint.poll_notified() else {
                return;
            };
            let known = |slot: &Slot| slot.send_cq == cq || slot.recv_cq == cq;
            assert!(self.slots.iter().any(known), "{cq:?} is gone, yet notified");
        }
        panic!("a completion queue was notified twice");
    }

    pub(crate) fn poll_all(&mut self) {
        for slot in 0..self.slots.len() {
            let Slot { send_cq, recv_cq, .. } = self.slots[slot];
            let most = MAX_CQE as usize + 1;
            self.poll(send_cq, most);
            self.poll(recv_cq, most);
        }
    }

    /// Whether completions of a slot may have been lost.
    pub(crate) fn overrun(&self, slot: usize) -> bool {
        let Slot { send_cq, recv_cq, .. } = self.slots[slot];
        [send_cq, recv_cq].iter().any(|&cq| self.node.endpoint.cq_overrun(cq) == Some(true))
    }

    /// States and counters, for reports.
    pub(crate) fn summary(&self) -> String {
        let mut text = format!("node {}:", self.node.ip());
        for slot in &self.slots {
            let state = slot.qpn.and_then(|qpn| self.node.endpoint.qp_state(qpn));
            text += &format!(" {:?} {:?} {state:?};", slot.service, slot.qpn);
        }
        for (name, count) in self.node.endpoint.counters().named().filter(|(_, count)| *count > 0) {
            text += &format!(" {name}={count}");
        }
        text + "\n"
    }
}

fn numbered(op: SendOp, imm: u32) -> SendOp {
    match op {
        SendOp::SendImm(_) => SendOp::SendImm(imm),
        SendOp::WriteImm { remote_addr, rkey, .. } => SendOp::WriteImm { remote_addr, rkey, imm },
        other => other,
    }
}

/// The address of a range for programs and peers: its backing address, from 0, or far off.
const fn named(index: usize) -> u64 {
    match index {
        2 => 0,
        3 => u64::MAX - STRETCH_BYTES - 7,
        _ => stretch(index),
    }
}

/// Attributes that a transition to `state` needs, for this service and peer.
pub(crate) fn attributes(transport: Transport, state: QpState, peer: &Connect) -> QpAttr {
    let common = [AttrMask::STATE];
    let more: &[AttrMask] = match (transport, state) {
        (Transport::Ud, QpState::Init) => &[AttrMask::PKEY_INDEX, AttrMask::PORT, AttrMask::QKEY],
        (_, QpState::Init) => &[AttrMask::PKEY_INDEX, AttrMask::PORT, AttrMask::ACCESS_FLAGS],
        (Transport::Ud, QpState::Rtr) => &[],
        (Transport::Uc, QpState::Rtr) => {
            &[AttrMask::AV, AttrMask::PATH_MTU, AttrMask::DEST_QPN, AttrMask::RQ_PSN]
        }
        (Transport::Rc, QpState::Rtr) => &[
            AttrMask::AV,
            AttrMask::PATH_MTU,
            AttrMask::DEST_QPN,
            AttrMask::RQ_PSN,
            AttrMask::MAX_DEST_RD_ATOMIC,
            AttrMask::MIN_RNR_TIMER,
        ],
        (Transport::Rc, QpState::Rts) => &[
            AttrMask::TIMEOUT,
            AttrMask::RETRY_CNT,
            AttrMask::RNR_RETRY,
            AttrMask::SQ_PSN,
            AttrMask::MAX_QP_RD_ATOMIC,
        ],
        (_, QpState::Rts) => &[AttrMask::SQ_PSN],
        _ => &[],
    };
    QpAttr {
        mask: common.iter().chain(more).copied().collect(),
        qkey: QKEY,
        path: peer.path,
        mtu: peer.mtu,
        timeout: peer.timeout,
        retry_count: peer.retry_count,
        rnr_retry: peer.rnr_retry,
        rq_psn: peer.remote_psn,
        sq_psn: peer.remote_psn,
        max_rd_atomic: peer.max_rd_atomic,
        max_dest_rd_atomic: peer.max_dest_rd_atomic,
        min_rnr_timer: peer.min_rnr_timer,
        dest_qp: peer.dest_qp,
        window_packets: peer.window_packets,
        reliability: peer.reliability,
        ..QpAttr::to(state)
    }
}

/// The address of the host with this number, counted from 1.
pub(crate) fn address(host: u8, ipv6: bool) -> IpAddr {
    match ipv6 {
        false => IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)),
        true => IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host.into())),
    }
}

/// The group that both nodes may attach to.
pub(crate) fn group(ipv6: bool) -> IpAddr {
    match ipv6 {
        false => IpAddr::V4(Ipv4Addr::new(239, 0, 0, 1)),
        true => IpAddr::V6(Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 0, 1)),
    }
}
