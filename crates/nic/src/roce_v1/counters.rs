//! The counters of a RoCEv1 wire. They only grow and are never reset.

use crate::udp::{TxCounters, Unparsable};

/// Everything a [`RoceV1Wire`](super::RoceV1Wire) counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoceV1Counters {
    /// Sending side. Bytes are those of whole frames; `dropped.family` counts packets to other IP
    /// versions.
    pub tx: TxCounters,
    /// Packets not sent because the kernel knows no Ethernet address of the peer, or the peer is
    /// not on this link.
    pub tx_unresolved: u64,
    /// Datagrams sent to make the kernel resolve an address or confirm one.
    pub probes: u64,
    /// Receiving side.
    pub rx: RxCounters,
}

/// Receiving side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxCounters {
    /// Frames that arrived, good or bad.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Calls of `recvmmsg`.
    pub syscalls: u64,
    /// Packets delivered.
    pub accepted: u64,
    /// Of those, packets with FECN set.
    pub fecn: u64,
    /// Frames for another GID or Ethernet address, of a VLAN or a bridge above the interface, or
    /// from a GID that no sender has.
    pub foreign: u64,
    /// Frames that the kernel cut, or in which the GRH or its length is wrong.
    pub malformed: u64,
    /// Packets whose ICRC is wrong.
    pub bad_icrc: u64,
    /// Packets whose transport headers do not parse.
    pub unparsable: Unparsable,
    /// Errors of the kernel when receiving frames.
    pub errors: u64,
}

impl RoceV1Counters {
    /// Every counter with its name, in a fixed order.
    pub fn named(&self) -> [(&'static str, u64); 21] {
        let RoceV1Counters { tx, tx_unresolved, probes, rx } = *self;
        [
            ("roce_v1.tx.packets", tx.packets),
            ("roce_v1.tx.bytes", tx.bytes),
            ("roce_v1.tx.syscalls", tx.syscalls),
            ("roce_v1.tx.waits", tx.waits),
            ("roce_v1.tx.probes", probes),
            ("roce_v1.tx.unresolved", tx_unresolved),
            ("roce_v1.tx.dropped.full", tx.dropped.full),
            ("roce_v1.tx.dropped.too_long", tx.dropped.too_long),
            ("roce_v1.tx.dropped.family", tx.dropped.family),
            ("roce_v1.tx.dropped.refused", tx.dropped.refused),
            ("roce_v1.tx.dropped.last_errno", u64::from(tx.dropped.last_errno.unsigned_abs())),
            ("roce_v1.rx.packets", rx.packets),
            ("roce_v1.rx.bytes", rx.bytes),
            ("roce_v1.rx.syscalls", rx.syscalls),
            ("roce_v1.rx.accepted", rx.accepted),
            ("roce_v1.rx.fecn", rx.fecn),
            ("roce_v1.rx.foreign", rx.foreign),
            ("roce_v1.rx.malformed", rx.malformed),
            ("roce_v1.rx.bad_icrc", rx.bad_icrc),
            ("roce_v1.rx.unparsable", rx.unparsable.total()),
            ("roce_v1.rx.errors", rx.errors),
        ]
    }
}
