//! Queue pairs of every transport on the network, brought up by verbs.
//!
//! `harness` has connections; this module adds attributes, states and address handles.

use roce::Time;
use roce::endpoint::{AttrMask, Endpoint, Mtu, QpAttr, QpConfig, QpState, Transmit};
use roce::verbs::{
    Access, Completion, Datagram, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, SrqId,
    Transport, WcStatus,
};
use roce::wire::Psn;
use roce::world::Path;

use crate::harness::{BASE, End, Network, Node};

pub(crate) const TRANSPORTS: [Transport; 3] = [Transport::Rc, Transport::Uc, Transport::Ud];

pub(crate) const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Error,
];

/// Bytes at the start of every node's arena that `registered` registers.
pub(crate) const REGION_BYTES: u64 = 1 << 19;

pub(crate) const QKEY: u32 = 0x1111_2222;

/// The PSN that every queue pair of this kit starts with.
pub(crate) fn first_psn(qpn: Qpn) -> Psn {
    Psn::new(qpn.get().wrapping_mul(0x9e37_79b9))
}

fn mask(bits: &[AttrMask]) -> AttrMask {
    bits.iter().fold(AttrMask::STATE, |all, &bit| all | bit)
}

/// The attributes that programs usually set to bring a queue pair up to `state`.
pub(crate) fn step_attr(transport: Transport, state: QpState, base: &QpAttr) -> QpAttr {
    use AttrMask as A;
    let bits: &[A] = match (transport, state) {
        (Transport::Ud, QpState::Init) => &[A::PKEY_INDEX, A::PORT, A::QKEY],
        (_, QpState::Init) => &[A::PKEY_INDEX, A::PORT, A::ACCESS_FLAGS],
        (Transport::Rc, QpState::Rtr) => {
            &[A::AV, A::PATH_MTU, A::DEST_QPN, A::RQ_PSN, A::MAX_DEST_RD_ATOMIC, A::MIN_RNR_TIMER]
        }
        (Transport::Uc, QpState::Rtr) => &[A::AV, A::PATH_MTU, A::DEST_QPN, A::RQ_PSN],
        (Transport::Rc, QpState::Rts) => {
            &[A::TIMEOUT, A::RETRY_CNT, A::RNR_RETRY, A::SQ_PSN, A::MAX_QP_RD_ATOMIC]
        }
        (_, QpState::Rts) => &[A::SQ_PSN],
        _ => &[],
    };
    QpAttr { mask: mask(bits), state, ..base.clone() }
}

/// Attributes towards a peer; no bit is set.
pub(crate) fn attributes(path: Path, own: Qpn, peer: Qpn, mtu: Mtu) -> QpAttr {
    QpAttr {
        path,
        mtu,
        dest_qp: peer,
        rq_psn: first_psn(peer),
        sq_psn: first_psn(own),
        qkey: QKEY,
        access: Access::ALL,
        ..QpAttr::to(QpState::Reset)
    }
}

/// Takes a queue pair from RESET to `state`, one of INIT, RTR and RTS.
pub(crate) fn bring_to(
    endpoint: &mut Endpoint,
    qpn: Qpn,
    transport: Transport,
    base: &QpAttr,
    state: QpState,
) {
    for step in [QpState::Init, QpState::Rtr, QpState::Rts] {
        endpoint.modify_qp(Time::ZERO, qpn, &step_attr(transport, step, base)).unwrap();
        if step == state {
            return;
        }
    }
}

/// The whole of `REGION_BYTES`, registered for everything.
pub(crate) fn registered(node: &mut Node) -> MemoryRegion {
    node.register(BASE, REGION_BYTES, Access::ALL).unwrap()
}

/// Registers bytes at `backing` for everything, which work requests and peers address from `addr`
/// on.
pub(crate) fn register_at(node: &mut Node, addr: u64, len: u64, backing: u64) -> MemoryRegion {
    node.register_at(node.pd, addr, len, backing, Access::ALL).unwrap()
}

pub(crate) fn list(region: MemoryRegion, offset: u64, len: u32) -> SgList {
    [Sge { addr: region.addr + offset, len, lkey: region.lkey }].into_iter().collect()
}

pub(crate) fn send(wr_id: u64, op: SendOp, sges: SgList) -> SendWr {
    SendWr { wr_id, op, sges, signaled: true, ..SendWr::default() }
}

pub(crate) fn recv(wr_id: u64, sges: SgList) -> RecvWr {
    RecvWr { wr_id, sges }
}

pub(crate) fn brief(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|done| (done.wr_id, done.status)).collect()
}

impl Network {
    /// A queue pair of any transport in RESET, with its own completion queues.
    pub(crate) fn create(&mut self, node: usize, transport: Transport, srq: Option<SrqId>) -> End {
        let Node { endpoint, pd, .. } = &mut self.nodes[node];
        let send_cq = endpoint.create_cq(1024).unwrap();
        let recv_cq = endpoint.create_cq(1024).unwrap();
        let rc = QpConfig::rc(*pd, send_cq, 64, 64);
        let qpn = endpoint.create_qp(QpConfig { transport, recv_cq, srq, ..rc }).unwrap();
        End { node, qpn, send_cq, recv_cq }
    }

    /// Brings `own` to RTS, towards `peer`.
    pub(crate) fn bring_up(&mut self, own: End, peer: End, transport: Transport, mtu: Mtu) {
        let base = attributes(self.nodes[peer.node].path(), own.qpn, peer.qpn, mtu);
        let endpoint = &mut self.nodes[own.node].endpoint;
        bring_to(endpoint, own.qpn, transport, &base, QpState::Rts);
    }

    /// A pair between nodes 0 and 1, both in RTS.
    pub(crate) fn pair_of(&mut self, transport: Transport, mtu: Mtu) -> (End, End) {
        let (a, b) = (self.create(0, transport, None), self.create(1, transport, None));
        self.bring_up(a, b, transport, mtu);
        self.bring_up(b, a, transport, mtu);
        (a, b)
    }

    /// The address of a datagram queue pair.
    pub(crate) fn address(&self, to: End) -> Datagram {
        Datagram { ah: self.nodes[to.node].path().into(), dest_qp: to.qpn, qkey: QKEY }
    }

    pub(crate) fn endpoint(&mut self, end: End) -> &mut Endpoint {
        &mut self.nodes[end.node].endpoint
    }

    pub(crate) fn post_send(&mut self, end: End, wr: SendWr) {
        self.endpoint(end).post_send(Time::ZERO, end.qpn, wr).unwrap();
    }

    pub(crate) fn post_recv(&mut self, end: End, wr: RecvWr) {
        self.endpoint(end).post_recv(Time::ZERO, end.qpn, wr).unwrap();
    }

    /// Puts a packet that was polled by hand on its way.
    pub(crate) fn inject(&mut self, from: End, transmit: &Transmit) {
        self.transmit(from.node as u32, transmit);
    }

    pub(crate) fn state(&self, end: End) -> QpState {
        self.nodes[end.node].endpoint.qp_state(end.qpn).unwrap()
    }
}
