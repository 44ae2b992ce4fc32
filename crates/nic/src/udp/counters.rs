//! The counters of a UDP wire. They only grow and are never reset.

use roce::wire::WireError;

/// Everything a [`UdpWire`](super::UdpWire) counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpCounters {
    /// Sending side.
    pub tx: TxCounters,
    /// Receiving side.
    pub rx: RxCounters,
    /// Packets that local processes forward to each other; zero where the port is not shared.
    pub sharing: SharingCounters,
}

/// Counters of processes that share the RoCE port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharingCounters {
    /// Packets that arrived here for another process and were forwarded to it.
    pub forwarded: TxCounters,
    /// Valid packets that another process forwarded to this one.
    pub accepted: u64,
    /// Forwarded packets that did not come from a process at this address.
    pub foreign: u64,
    /// Forwarded packets for a third process: they are dropped.
    pub misrouted: u64,
    /// Packets ignored under the strict check because the packet socket delivers them too.
    pub left_to_strict: u64,
    /// Probes of processes that waited for this one to read.
    pub probes: u64,
    /// Times that sending waited because the receive buffer of a process here was full.
    pub backpressure_waits: u64,
}

/// Sending side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxCounters {
    /// Packets that the kernel accepted.
    pub packets: u64,
    /// Their UDP payload bytes, BTH to ICRC.
    pub bytes: u64,
    /// Sends that carried more than one packet (UDP_SEGMENT).
    pub gso_batches: u64,
    /// Calls of `sendmmsg`.
    pub syscalls: u64,
    /// Times the socket buffer was full and the wire waited.
    pub waits: u64,
    /// Packets that were not sent.
    pub dropped: TxDropped,
}

/// Packets that were not sent, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxDropped {
    /// The socket buffer stayed full.
    pub full: u64,
    /// Longer than the link carries, or than any datagram.
    pub too_long: u64,
    /// The destination belongs to the other IP version, or the source is no address of the wire.
    pub family: u64,
    /// The destination is a local process that has stopped reading.
    pub stopped: u64,
    /// Any other error of the kernel (no route, firewall, no memory).
    pub refused: u64,
    /// The latest such error, an errno; 0 when there was none.
    pub last_errno: i32,
}

impl TxDropped {
    /// All of them.
    pub const fn total(&self) -> u64 {
        self.full + self.too_long + self.family + self.stopped + self.refused
    }
}

/// Receiving side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxCounters {
    /// Datagrams that arrived, good or bad.
    pub packets: u64,
    /// Their UDP payload bytes.
    pub bytes: u64,
    /// Buffers in which the kernel had joined several datagrams (UDP_GRO).
    pub gro_batches: u64,
    /// Calls of `recvmmsg`.
    pub syscalls: u64,
    /// Datagrams that ask to wake up, and are no packets.
    pub wake_ups: u64,
    /// Packets delivered.
    pub accepted: u64,
    /// Of those, packets with an IPv4 identification other than the expected one.
    pub unexpected_ip_ids: u64,
    /// Packets whose ICRC is wrong.
    pub bad_icrc: u64,
    /// Buffers that the kernel truncated, or that came without a sender's address.
    pub truncated: u64,
    /// Malformed packets.
    pub unparsable: Unparsable,
    /// Errors of the kernel when receiving datagrams.
    pub errors: u64,
}

/// Packets that do not parse, by [`WireError`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unparsable {
    /// Shorter than their headers.
    pub too_short: u64,
    /// Undefined opcode.
    pub opcode: u64,
    /// Transport version other than 0.
    pub version: u64,
    /// Reserved AETH syndrome.
    pub syndrome: u64,
    /// Impossible pad count.
    pub pad: u64,
    /// Reserved bits set.
    pub reserved: u64,
    /// Extension headers of another opcode.
    pub extension: u64,
    /// A field holds a forbidden value.
    pub range: u64,
}

impl Unparsable {
    pub(crate) fn count(&mut self, error: WireError) {
        *match error {
            WireError::Truncated { .. } => &mut self.too_short,
            WireError::UnknownOpcode(_) => &mut self.opcode,
            WireError::Version(_) => &mut self.version,
            WireError::Syndrome(_) => &mut self.syndrome,
            WireError::Pad { .. } => &mut self.pad,
            WireError::Reserved(_) => &mut self.reserved,
            WireError::ExtMismatch(_) => &mut self.extension,
            WireError::Range { .. } => &mut self.range,
        } += 1;
    }

    /// All of them.
    pub const fn total(&self) -> u64 {
        self.too_short
            + self.opcode
            + self.version
            + self.syndrome
            + self.pad
            + self.reserved
            + self.extension
            + self.range
    }
}

impl UdpCounters {
    /// Every counter with its name, but for those of shared ports, which their owner reports
    /// itself.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let UdpCounters { tx, rx, sharing: _ } = self;
        let TxCounters { packets, bytes, gso_batches, syscalls, waits, dropped } = *tx;
        let TxDropped { full, too_long, family, stopped, refused, last_errno } = dropped;
        let sent = [
            ("udp.tx.packets", packets),
            ("udp.tx.bytes", bytes),
            ("udp.tx.gso_batches", gso_batches),
            ("udp.tx.syscalls", syscalls),
            ("udp.tx.waits", waits),
            ("udp.tx.dropped.full", full),
            ("udp.tx.dropped.too_long", too_long),
            ("udp.tx.dropped.family", family),
            ("udp.tx.dropped.stopped", stopped),
            ("udp.tx.dropped.refused", refused),
            ("udp.tx.dropped.last_errno", u64::from(last_errno.unsigned_abs())),
        ];
        sent.into_iter().chain(received(rx))
    }
}

fn received(counters: &RxCounters) -> [(&'static str, u64); 18] {
    let RxCounters {
        packets,
        bytes,
        gro_batches,
        syscalls,
        wake_ups,
        accepted,
        unexpected_ip_ids,
        bad_icrc,
        truncated,
        unparsable,
        errors,
    } = *counters;
    let Unparsable { too_short, opcode, version, syndrome, pad, reserved, extension, range } =
        unparsable;
    [
        ("udp.rx.packets", packets),
        ("udp.rx.bytes", bytes),
        ("udp.rx.gro_batches", gro_batches),
        ("udp.rx.syscalls", syscalls),
        ("udp.rx.wake_ups", wake_ups),
        ("udp.rx.accepted", accepted),
        ("udp.rx.unexpected_ip_ids", unexpected_ip_ids),
        ("udp.rx.bad_icrc", bad_icrc),
        ("udp.rx.truncated", truncated),
        ("udp.rx.errors", errors),
        ("udp.rx.bad.too_short", too_short),
        ("udp.rx.bad.opcode", opcode),
        ("udp.rx.bad.version", version),
        ("udp.rx.bad.syndrome", syndrome),
        ("udp.rx.bad.pad", pad),
        ("udp.rx.bad.reserved", reserved),
        ("udp.rx.bad.extension", extension),
        ("udp.rx.bad.range", range),
    ]
}
