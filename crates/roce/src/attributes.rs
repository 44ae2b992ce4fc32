//! Attributes of queue pairs as the verbs have them: what `modify_qp` sets and `query_qp` tells.
//!
//! Plain values only. Which of them a transition needs and allows is decided in `qp/transition.rs`.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::dcqcn::CongestionControl;
use crate::qp::QpState;
use crate::qp::context::{Connect, Mtu};
use crate::verbs::{Access, Qpn};
use crate::wire::{Psn, ROCE_PORT};
use crate::world::Path;

/// Which fields of a [`QpAttr`] are set. The bits are those of the verbs API (`IBV_QP_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttrMask(pub u32);

#[expect(missing_docs, reason = "each names the field of `QpAttr`")]
impl AttrMask {
    pub const STATE: AttrMask = AttrMask(1 << 0);
    pub const CUR_STATE: AttrMask = AttrMask(1 << 1);
    pub const EN_SQD_ASYNC_NOTIFY: AttrMask = AttrMask(1 << 2);
    pub const ACCESS_FLAGS: AttrMask = AttrMask(1 << 3);
    pub const PKEY_INDEX: AttrMask = AttrMask(1 << 4);
    pub const PORT: AttrMask = AttrMask(1 << 5);
    pub const QKEY: AttrMask = AttrMask(1 << 6);
    pub const AV: AttrMask = AttrMask(1 << 7);
    pub const PATH_MTU: AttrMask = AttrMask(1 << 8);
    pub const TIMEOUT: AttrMask = AttrMask(1 << 9);
    pub const RETRY_CNT: AttrMask = AttrMask(1 << 10);
    pub const RNR_RETRY: AttrMask = AttrMask(1 << 11);
    pub const RQ_PSN: AttrMask = AttrMask(1 << 12);
    pub const MAX_QP_RD_ATOMIC: AttrMask = AttrMask(1 << 13);
    pub const ALT_PATH: AttrMask = AttrMask(1 << 14);
    pub const MIN_RNR_TIMER: AttrMask = AttrMask(1 << 15);
    pub const SQ_PSN: AttrMask = AttrMask(1 << 16);
    pub const MAX_DEST_RD_ATOMIC: AttrMask = AttrMask(1 << 17);
    pub const PATH_MIG_STATE: AttrMask = AttrMask(1 << 18);
    pub const CAP: AttrMask = AttrMask(1 << 19);
    pub const DEST_QPN: AttrMask = AttrMask(1 << 20);
    pub const RATE_LIMIT: AttrMask = AttrMask(1 << 25);

    /// No attribute at all.
    pub const NONE: AttrMask = AttrMask(0);

    /// Everything that a [`QpAttr`] has a field for.
    pub const ALL: AttrMask = AttrMask(0x0213_bfff);

    /// Both sets together.
    pub const fn with(self, other: AttrMask) -> AttrMask {
        AttrMask(self.0 | other.0)
    }

    /// Whether every bit of `other` is set.
    pub const fn has(self, other: AttrMask) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits that `other` does not have.
    pub const fn without(self, other: AttrMask) -> AttrMask {
        AttrMask(self.0 & !other.0)
    }

    /// Whether no bit is set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// How packets that were lost are repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reliability {
    /// Everything from the lost packet on, as the specification says: for every peer.
    #[default]
    GoBackN,
    /// Only what was lost. Both ends must be this implementation and must have agreed.
    Selective,
}

/// Attributes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAttr {
    /// Which fields count.
    pub mask: AttrMask,
    /// State to go to.
    pub state: QpState,
    /// State the caller believes it is in.
    pub cur_state: QpState,
    /// Whether reaching a drained SQD makes an event.
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
    /// Retries after timeouts and sequence errors, 0-7.
    pub retry_count: u8,
    /// Retries after RNR NAK, 0-6; 7 for ever.
    pub rnr_retry: u8,
    /// PSN of the peer's first request.
    pub rq_psn: Psn,
    /// PSN of our first request.
    pub sq_psn: Psn,
    /// Most READs and atomics of ours in flight.
    pub max_rd_atomic: u8,
    /// Most READs and atomics of the peer served at once.
    pub max_dest_rd_atomic: u8,
    /// Timer code of our RNR NAKs, 0-31.
    pub min_rnr_timer: u8,
    /// The peer's queue pair.
    pub dest_qp: Qpn,
    /// Rate limit in bits per second, 0 for none.
    pub rate_limit_bps: u64,
    /// Most unacknowledged request packets. No verbs attribute: counts when going to RTR.
    pub window_packets: u32,
    /// How losses are repaired. No verbs attribute: counts when going to RTR.
    pub reliability: Reliability,
    /// What is done about congestion. No verbs attribute: counts when going to RTR.
    pub congestion: CongestionControl,
}

impl QpAttr {
    /// Asks for a state and nothing else; the other fields hold the defaults of [`Connect::new`] and
    /// count once their bits are set.
    pub const fn to(state: QpState) -> QpAttr {
        let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), ROCE_PORT);
        let peer = Connect::new(Path::new(nowhere), Qpn::new(0), Psn::new(0));
        QpAttr { mask: AttrMask::STATE, state, ..QpAttr::of(&peer) }
    }

    /// What a [`Connect`] says, in the verbs' terms. No bit is set.
    pub(crate) const fn of(peer: &Connect) -> QpAttr {
        QpAttr {
            mask: AttrMask::NONE,
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
            congestion: peer.congestion,
        }
    }
}

/// Something that happened to an object rather than to a work request (IBA 11.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// A queue pair broke without a work request to say so, or its completion queue overran.
    QpFatal(Qpn),
    /// A request arrived that was not legal.
    QpRequestError(Qpn),
    /// A request arrived that may not touch what it names.
    QpAccessError(Qpn),
    /// A packet arrived on a queue pair in RTR.
    CommunicationEstablished(Qpn),
    /// A queue pair in SQD has nothing outstanding any more.
    SendQueueDrained(Qpn),
    /// A queue pair with a shared receive queue broke, and takes no more receives from it.
    LastWqeReached(Qpn),
    /// A shared receive queue fell below its limit.
    SrqLimitReached(crate::verbs::SrqId),
    /// A completion queue overran.
    CqError(crate::verbs::CqId),
}

impl AsyncEvent {
    /// The queue pair that it happened to, if it was one.
    pub const fn qpn(self) -> Option<Qpn> {
        match self {
            AsyncEvent::QpFatal(qpn)
            | AsyncEvent::QpRequestError(qpn)
            | AsyncEvent::QpAccessError(qpn)
            | AsyncEvent::CommunicationEstablished(qpn)
            | AsyncEvent::SendQueueDrained(qpn)
            | AsyncEvent::LastWqeReached(qpn) => Some(qpn),
            AsyncEvent::SrqLimitReached(_) | AsyncEvent::CqError(_) => None,
        }
    }
}
