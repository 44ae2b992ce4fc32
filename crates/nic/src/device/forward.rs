//! Packets that arrive at a port of a device, and how they reach the process that they are for.
//!
//! A forwarded packet is sent whole, ICRC included, behind a 28-byte header that records what the
//! first receiver saw:
//!
//! | bytes | field |
//! |---|---|
//! | 0 | [`FORWARDED_OPCODE`]: no RoCE packet starts so |
//! | 1 | version, 1 |
//! | 2 | zero |
//! | 3 | traffic class of the packet: DSCP and ECN |
//! | 4 | zero (not covered by the ICRC) |
//! | 5 | its time to live or hop limit |
//! | 6–7 | its IPv4 identification, 0 over IPv6 |
//! | 8–9 | its UDP source port |
//! | 10–11 | zero |
//! | 12–27 | its source address; IPv4 as IPv4-mapped IPv6 |
//!
//! Header and packet carry an ICRC of their own, so they use segmented sends like other packets.
//! The destination is the address that they are sent to. The receiver accepts them only from its
//! own address and the port of a process, which no other machine can use: the kernel drops outside
//! packets with a source address of this machine (over IPv6 that is up to the firewall, and the
//! ICRC of RoCE is no authentication anyway). A packet that was forwarded once is never forwarded
//! again.
//!
//! A datagram of the first byte alone is a probe ([`PROBE`]).

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use arrayvec::ArrayVec;
use roce::wire::{FORWARDED_OPCODE, Headers, ICRC_BYTES, is_process_port};
use roce::world::{BURST_PACKETS, Ecn, NoMemory, Path, Payload, RxFrame, Telemetry, TxFrame};

use super::ports::{Kind, Port};
use super::{MAX_SLOT, PROBE, process_port, scoped};
use crate::capture::{Capture, Seen};
use crate::udp::receive::{Run, open, origin};
use crate::udp::send::Sender;
use crate::udp::socket::Socket;
use crate::udp::{IcrcCheck, RxCounters, SharingCounters};

/// The byte of a BTH that holds the upper 8 bits of the destination queue pair number.
pub(super) const SLOT_BYTE: usize = 5;

const HEADER_BYTES: usize = 28;
const VERSION: u8 = 1;

/// One port being emptied.
pub(super) struct Arrivals<'a> {
    pub(super) check: IcrcCheck,
    /// Packets from other machines for this process arrive by the packet socket (IPv4, strict
    /// check).
    pub(super) left_to_strict: bool,
    /// Our own slot.
    pub(super) slot: u8,
    pub(super) port: &'a Port,
    pub(super) shared_port: u16,
    pub(super) ifindex: u32,
    /// Our own socket at the address of the port.
    pub(super) private: Option<&'a Socket>,
    pub(super) sender: &'a mut Sender,
    pub(super) sharing: &'a mut SharingCounters,
    pub(super) capture: &'a mut Option<Capture>,
    pub(super) sink: &'a mut dyn FnMut(&RxFrame<'_>),
}

/// A packet for another process.
struct Stray<'a> {
    slot: u8,
    id: u16,
    packet: &'a [u8],
}

impl Arrivals<'_> {
    /// Takes datagrams of one sender.
    pub(super) fn take(&mut self, run: &Run<'_>, counters: &mut RxCounters) {
        match self.port.kind {
            Kind::Own => self.take_own(run, counters),
            Kind::Shared => self.take_shared(run, counters),
            Kind::Group { .. } => {
                for (place, packet) in run.datagrams() {
                    self.take_packet(run, place, packet, counters);
                }
            }
        }
    }

    fn take_own(&mut self, run: &Run<'_>, counters: &mut RxCounters) {
        for (place, packet) in run.datagrams() {
            if packet.first() == Some(&FORWARDED_OPCODE) {
                self.take_forwarded(run, place, packet, counters);
            } else {
                self.take_packet(run, place, packet, counters);
            }
        }
    }

    /// Delivers packets for this process, and forwards those for others straight from the receive
    /// buffer.
    fn take_shared(&mut self, run: &Run<'_>, counters: &mut RxCounters) {
        let mut strays = ArrayVec::<Stray<'_>, BURST_PACKETS>::new();
        for (place, packet) in run.datagrams() {
            let slot = packet.get(SLOT_BYTE).copied().unwrap_or(0);
            if slot == self.slot && self.left_to_strict {
                counters.packets += 1;
                self.sharing.left_to_strict += 1;
                continue;
            }
            if slot == self.slot || !(1..=MAX_SLOT).contains(&slot) {
                self.take_packet(run, place, packet, counters);
                continue;
            }
            let local = self.port.socket.local;
            if let Some(id) = run.verify(self.check, local, place, packet, counters) {
                strays.push(Stray { slot, id, packet });
            }
            if strays.is_full() {
                self.forward(run, &strays);
                strays.clear();
            }
        }
        if !strays.is_empty() {
            self.forward(run, &strays);
        }
    }

    fn take_packet(&mut self, run: &Run<'_>, place: u16, packet: &[u8], counters: &mut RxCounters) {
        let local = self.port.socket.local;
        let Some(opened) = run.open(self.check, local, place, packet, counters) else {
            return;
        };
        if let Some(capture) = self.capture {
            capture.record(&run.seen(local, opened.id), [packet]);
        }
        counters.accepted += 1;
        let origin = run.origin(local.ip(), self.port.via);
        (self.sink)(&RxFrame {
            origin,
            headers: opened.headers,
            payload: opened.payload,
            telemetry: None,
        });
    }

    /// Accepts a packet that another process has forwarded.
    fn take_forwarded(
        &mut self,
        run: &Run<'_>,
        place: u16,
        packet: &[u8],
        counters: &mut RxCounters,
    ) {
        if packet == PROBE {
            counters.packets += 1;
            self.sharing.probes += 1;
            return;
        }
        let local = self.port.socket.local;
        if run.source.ip() != local.ip() || !is_process_port(run.source.port()) {
            counters.packets += 1;
            self.sharing.foreign += 1;
            return;
        }
        if run.verify(self.check, local, place, packet, counters).is_none() {
            return;
        }
        if self.left_to_strict {
            self.sharing.left_to_strict += 1;
            return;
        }
        let to = SocketAddr::new(local.ip(), self.shared_port);
        let Some((seen, inner)) = unwrap(packet, scoped(to, self.ifindex), self.ifindex) else {
            self.sharing.misrouted += 1;
            return;
        };
        let Some(opened) = open(inner, seen.id, counters) else {
            return;
        };
        if slot_of(&opened.headers) != self.slot {
            self.sharing.misrouted += 1;
            return;
        }
        if let Some(capture) = self.capture {
            capture.record(&seen, [inner]);
        }
        counters.accepted += 1;
        self.sharing.accepted += 1;
        let origin = origin(seen.from, local.ip(), self.port.via, seen.tos, seen.hop_limit);
        (self.sink)(&RxFrame {
            origin,
            headers: opened.headers,
            payload: opened.payload,
            telemetry: None,
        });
    }

    fn forward(&mut self, run: &Run<'_>, strays: &[Stray<'_>]) {
        let Some(private) = self.private else {
            return;
        };
        let ip = private.local.ip();
        let mut frames = ArrayVec::<TxFrame<'_>, BURST_PACKETS>::new();
        for stray in strays.iter().take(BURST_PACKETS) {
            let to = scoped(SocketAddr::new(ip, process_port(stray.slot)), self.ifindex);
            frames.push(TxFrame {
                path: Path { ecn: Ecn::NotEct, ..Path::new(to) },
                header: wrap(&run.seen(private.local, stray.id)).into_iter().collect(),
                payload: Payload::Bytes(stray.packet),
                pad: 0,
                telemetry: Telemetry::None,
            });
        }
        self.sender.send(private, &frames, &NoMemory, &mut self.sharing.forwarded, None);
    }
}

/// The header of a forwarded packet.
fn wrap(seen: &Seen) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    (out[0], out[1], out[3], out[5]) = (FORWARDED_OPCODE, VERSION, seen.tos, seen.hop_limit);
    out[6..8].copy_from_slice(&seen.id.to_be_bytes());
    out[8..10].copy_from_slice(&seen.from.port().to_be_bytes());
    let source = match seen.from.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    out[12..].copy_from_slice(&source.octets());
    out
}

/// What a forwarded packet looked like when it arrived at `to`, and the packet; `None` if it is
/// malformed or its source belongs to the other IP version.
fn unwrap(forwarded: &[u8], to: SocketAddr, ifindex: u32) -> Option<(Seen, &[u8])> {
    let (header, rest) = forwarded.split_first_chunk::<HEADER_BYTES>()?;
    let (packet, _) = rest.split_last_chunk::<ICRC_BYTES>()?;
    let &[opcode, version, zero, tos, _, hop_limit, i0, i1, p0, p1, z0, z1, ref address @ ..] =
        header;
    let source = IpAddr::V6(Ipv6Addr::from(*address)).to_canonical();
    let from = SocketAddr::new(source, u16::from_be_bytes([p0, p1]));
    let valid = opcode == FORWARDED_OPCODE && version == VERSION && [zero, z0, z1] == [0; 3];
    let id = u16::from_be_bytes([i0, i1]);
    let seen = Seen { from: scoped(from, ifindex), to, tos, hop_limit, id };
    (valid && source.is_ipv4() == to.is_ipv4()).then_some((seen, packet))
}

pub(super) fn slot_of(headers: &Headers) -> u8 {
    (headers.bth().dest_qp.get() >> 16) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_headers_survive_the_round_trip() {
        for (from, to) in [
            ("10.0.0.9:49152", "10.0.0.1:4791"),
            ("[2001:db8::9]:50000", "[2001:db8::1]:4791"),
            ("[fe80::9%7]:1", "[fe80::1%7]:4791"),
        ] {
            let (from, to): (SocketAddr, SocketAddr) =
                (from.parse().expect("literal"), to.parse().expect("literal"));
            let seen = Seen { from, to, tos: 0x6a, hop_limit: 63, id: 0xbeef };
            let mut packet = wrap(&seen).to_vec();
            packet.extend(*b"a packet and its outer ICRC....");
            let (back, inner) = unwrap(&packet, to, 7).expect("whole");
            assert_eq!((back.from, back.to, back.id), (from, to, 0xbeef));
            assert_eq!((back.tos, back.hop_limit), (0x6a, 63));
            assert_eq!(inner, b"a packet and its outer ICRC");
            for bad in [1, 2, 10, 11] {
                let mut packet = packet.clone();
                packet[bad] ^= 0x10;
                assert!(unwrap(&packet, to, 7).is_none(), "byte {bad}");
            }
            let other: SocketAddr =
                if to.is_ipv4() { "[::1]:1" } else { "1.1.1.1:1" }.parse().expect("literal");
            assert!(unwrap(&packet, other, 7).is_none());
            assert!(unwrap(&packet[..31], to, 7).is_none());
        }
    }
}
