//! Queue pair attributes of the verbs: what `modify_qp` sets and `query_qp` returns.
//!
//! Plain values only. [`transition`](super::transition) decides which of them a transition needs
//! and allows.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::{Access, CqId, Path, PdId, SrqId, Transport};
use crate::congestion::Control;
use crate::wire::{Psn, Qpn, ROCE_PORT};

pub use mask::AttrMask;

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Created.
    Reset,
    /// Partition, port and access are set.
    Init,
    /// Ready to receive: connected to the peer.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue draining, or drained: started requests are finished, no new ones are started.
    Sqd,
    /// Send queue error (UC and UD): sends are flushed, receiving continues.
    Sqe,
    /// Failed, or stopped by the program: every work request is flushed.
    Error,
}

impl QpState {
    /// Its name in the specification.
    pub const fn name(self) -> &'static str {
        match self {
            QpState::Reset => "RESET",
            QpState::Init => "INIT",
            QpState::Rtr => "RTR",
            QpState::Rts => "RTS",
            QpState::Sqd => "SQD",
            QpState::Sqe => "SQE",
            QpState::Error => "ERROR",
        }
    }
}

/// The queues and sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Transport service.
    pub transport: Transport,
    /// Protection domain: only its regions are reachable.
    pub pd: PdId,
    /// Where sends complete.
    pub send_cq: CqId,
    /// Where receives complete.
    pub recv_cq: CqId,
    /// Most sends posted and not completed.
    pub max_send_wr: u32,
    /// Most receives posted and not completed.
    pub max_recv_wr: u32,
    /// The shared receive queue to use instead of its own.
    pub srq: Option<SrqId>,
}

impl QpConfig {
    /// A reliable connection that completes everything into `cq`, with its own receive queue.
    pub const fn rc(pd: PdId, cq: CqId, max_send_wr: u32, max_recv_wr: u32) -> QpConfig {
        QpConfig {
            transport: Transport::Rc,
            pd,
            send_cq: cq,
            recv_cq: cq,
            max_send_wr,
            max_recv_wr,
            srq: None,
        }
    }
}

/// Sizes of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqConfig {
    /// Protection domain.
    pub pd: PdId,
    /// Most receives posted and not taken.
    pub max_wr: u32,
    /// An event is made when fewer receives than this are left; 0 for never.
    pub limit: u32,
}

/// Path MTU: payload bytes of a full packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    M256,
    /// 512 bytes.
    M512,
    /// 1024 bytes: the most that fits Ethernet frames of 1500 bytes.
    M1024,
    /// 2048 bytes.
    M2048,
    /// 4096 bytes.
    M4096,
}

impl Mtu {
    /// Every MTU, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096];

    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> u32 {
        256 << self as u32
    }

    /// The MTU of exactly this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

/// Everything a queue pair needs to know about its peer and its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Where packets go. Packets from any other IP address are dropped.
    pub path: Path,
    /// The peer's queue pair.
    pub dest_qp: Qpn,
    /// Path MTU, the same on both sides.
    pub mtu: Mtu,
    /// PSN of the first request that the peer will send.
    pub remote_psn: Psn,
    /// PSN of the first request that we send.
    pub local_psn: Psn,
    /// Local ACK timeout: 4.096 us * 2^n, n up to 31; 0 waits for ever.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors before giving up; the low three bits count.
    pub retry_count: u8,
    /// Retries after "receiver not ready" before giving up, of which the low three bits count; 7
    /// retries for ever.
    pub rnr_retry: u8,
    /// Timer code that our RNR NAKs carry, five bits (IBA table 45; 12 is 0.64 ms).
    pub min_rnr_timer: u8,
    /// Most READs of ours in flight; at most the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
    /// Most READs of the peer served concurrently; more are refused.
    pub max_dest_rd_atomic: u8,
    /// Most unacknowledged request packets, at least 1.
    pub window_packets: u32,
    /// The loss recovery mode, the same on both sides.
    pub reliability: Reliability,
    /// The congestion control. The peer is notified of marked packets in any case.
    pub congestion: Control,
}

impl Connect {
    /// Usual attributes for a peer: MTU 1024, 67 ms timeout, 7 retries, unlimited RNR retries, 16
    /// READs each way, a window of 128 packets.
    pub const fn new(path: Path, dest_qp: Qpn, remote_psn: Psn) -> Connect {
        Connect {
            path,
            dest_qp,
            mtu: Mtu::M1024,
            remote_psn,
            local_psn: Psn::new(0),
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            window_packets: 128,
            reliability: Reliability::GoBackN,
            congestion: Control::OFF,
        }
    }

    /// The same for a peer of this implementation that has agreed: selective repeat, with a window
    /// of 512 packets.
    #[must_use]
    pub fn selective(&self) -> Connect {
        Connect { reliability: Reliability::Selective, window_packets: 512, ..self.clone() }
    }
}

mod mask {
    #![expect(missing_docs, reason = "each flag names the field of `QpAttr`")]

    bitflags::bitflags! {
        /// Which fields of a [`QpAttr`](super::QpAttr) are set. The bits are those of the verbs API
        /// (`IBV_QP_*`).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct AttrMask: u32 {
            const STATE = 1 << 0;
            const CUR_STATE = 1 << 1;
            const EN_SQD_ASYNC_NOTIFY = 1 << 2;
            const ACCESS_FLAGS = 1 << 3;
            const PKEY_INDEX = 1 << 4;
            const PORT = 1 << 5;
            const QKEY = 1 << 6;
            const AV = 1 << 7;
            const PATH_MTU = 1 << 8;
            const TIMEOUT = 1 << 9;
            const RETRY_CNT = 1 << 10;
            const RNR_RETRY = 1 << 11;
            const RQ_PSN = 1 << 12;
            const MAX_QP_RD_ATOMIC = 1 << 13;
            const ALT_PATH = 1 << 14;
            const MIN_RNR_TIMER = 1 << 15;
            const SQ_PSN = 1 << 16;
            const MAX_DEST_RD_ATOMIC = 1 << 17;
            const PATH_MIG_STATE = 1 << 18;
            const CAP = 1 << 19;
            const DEST_QPN = 1 << 20;
            const RATE_LIMIT = 1 << 25;
        }
    }
}

impl AttrMask {
    /// All attributes that have a field in [`QpAttr`].
    pub const FIELDS: AttrMask = AttrMask::all()
        .difference(AttrMask::ALT_PATH.union(AttrMask::PATH_MIG_STATE).union(AttrMask::CAP));
}

/// How lost packets are retransmitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reliability {
    /// Everything from the lost packet on, as the specification says: works with every peer.
    #[default]
    GoBackN,
    /// Only lost packets. Both ends must be this implementation and must have agreed.
    Selective,
}

/// Attributes of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpAttr {
    /// Which fields are set.
    pub mask: AttrMask,
    /// State to go to.
    pub state: QpState,
    /// State the caller assumes it is in.
    pub cur_state: QpState,
    /// Whether reaching a drained SQD raises an event.
    pub sqd_notify: bool,
    /// What the peer may do through this queue pair.
    pub access: Access,
    /// Index of the partition key; 0 is the only one.
    pub pkey_index: u16,
    /// Port; 1 is the only one.
    pub port: u8,
    /// Queue key, UD only.
    pub qkey: u32,
    /// Way to the peer.
    pub path: Path,
    /// Path MTU.
    pub mtu: Mtu,
    /// Local ACK timeout: 4.096 us * 2^n, 0 for ever.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors; the low three bits count.
    pub retry_count: u8,
    /// Retries after RNR NAK, of which the low three bits count; 7 for ever.
    pub rnr_retry: u8,
    /// PSN of the peer's first request.
    pub rq_psn: Psn,
    /// PSN of our first request.
    pub sq_psn: Psn,
    /// Most READs and atomics of ours in flight.
    pub max_rd_atomic: u8,
    /// Most READs and atomics of the peer served concurrently.
    pub max_dest_rd_atomic: u8,
    /// Timer code of our RNR NAKs, of which the low five bits count.
    pub min_rnr_timer: u8,
    /// The peer's queue pair.
    pub dest_qp: Qpn,
    /// Rate limit in bits per second, 0 for none.
    pub rate_limit_bps: u64,
    /// Most unacknowledged request packets. Not a verbs attribute: applies when going to RTR.
    pub window_packets: u32,
    /// The loss recovery mode. Not a verbs attribute: applies when going to RTR.
    pub reliability: Reliability,
    /// The congestion control. Not a verbs attribute: applies when going to RTR.
    pub congestion: Control,
}

impl QpAttr {
    /// Requests a state and nothing else; the other fields hold the defaults of [`Connect::new`]
    /// and apply once their bits are set.
    pub fn to(state: QpState) -> QpAttr {
        let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), ROCE_PORT);
        let peer = Connect::new(Path::new(nowhere), Qpn::new(0), Psn::new(0));
        QpAttr { mask: AttrMask::STATE, state, ..QpAttr::of(&peer) }
    }

    /// A [`Connect`] as verbs attributes. No bit is set.
    pub(crate) fn of(peer: &Connect) -> QpAttr {
        QpAttr {
            mask: AttrMask::empty(),
            state: QpState::Reset,
            cur_state: QpState::Reset,
            sqd_notify: false,
            access: Access::ALL,
            pkey_index: 0,
            port: 1,
            qkey: 0,
            path: peer.path,
            mtu: peer.mtu,
            timeout: peer.timeout,
            retry_count: peer.retry_count,
            rnr_retry: peer.rnr_retry,
            rq_psn: peer.remote_psn,
            sq_psn: peer.local_psn,
            max_rd_atomic: peer.max_rd_atomic,
            max_dest_rd_atomic: peer.max_dest_rd_atomic,
            min_rnr_timer: peer.min_rnr_timer,
            dest_qp: peer.dest_qp,
            rate_limit_bps: 0,
            window_packets: peer.window_packets,
            reliability: peer.reliability,
            congestion: peer.congestion.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_bytes_round_trip() {
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(Mtu::from_bytes(1500), None);
    }
}
