//! A packet in flight: its bytes, the addresses of its IP header, and the faults applied to it.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::num::NonZeroU32;

use roce::Time;
use roce::wire::grh::gid_of;
use roce::wire::icrc::{self, Pseudo};
use roce::wire::telemetry::Report;
use roce::wire::{Headers, ROCE_PORT};
use roce::world::Ecn;

use crate::faults::Fault;

/// The GRH of a RoCEv1 packet.
const GRH_BYTES: u32 = 40;

/// Ethernet header, frame check sequence, preamble and gap between frames.
pub(crate) const ETHERNET_BYTES: u32 = 14 + 4 + 8 + 12;
const UDP_BYTES: u32 = 8;

/// Destination of packets to a multicast group: every node but the sender.
pub(crate) const GROUP: u32 = u32::MAX;

/// Destination of packets to an address that is not of this network.
pub(crate) const NOBODY: u32 = u32::MAX - 1;

/// The mapping between node numbers and addresses, and the headers that carry these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addressing {
    pub(crate) ipv6: bool,
    /// Packets have a GRH with GIDs of these addresses, in place of IP and UDP.
    pub(crate) is_v1: bool,
}

impl Addressing {
    pub(crate) fn ip(self, node: u32) -> IpAddr {
        let [_, _, high, low] = (node + 1).to_be_bytes();
        match self.ipv6 {
            true => {
                let host = u16::from_be_bytes([high, low]);
                IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host))
            }
            false => IpAddr::V4(Ipv4Addr::new(10, 0, high, low)),
        }
    }

    /// The number of the node with this address, or [`GROUP`], or [`NOBODY`]. There need not be a
    /// node with that number.
    pub(crate) fn node(self, ip: IpAddr) -> u32 {
        if ip.is_multicast() {
            return GROUP;
        }
        let (high, low) = match ip {
            IpAddr::V4(v4) => (v4.octets()[2], v4.octets()[3]),
            IpAddr::V6(v6) => (v6.octets()[14], v6.octets()[15]),
        };
        let node = u32::from(u16::from_be_bytes([high, low])).checked_sub(1);
        node.filter(|&node| self.ip(node) == ip).unwrap_or(NOBODY)
    }

    /// The source address of a node's packets. A GRH has no port.
    pub(crate) fn source(self, node: u32) -> SocketAddr {
        let port = if self.is_v1 { ROCE_PORT } else { 0xc000 | (node & 0x3fff) as u16 };
        SocketAddr::new(self.ip(node), port)
    }

    /// Bytes between Ethernet's header and BTH.
    pub(crate) fn network_bytes(self) -> u32 {
        match (self.is_v1, self.ipv6) {
            (true, _) => GRH_BYTES,
            (false, true) => UDP_BYTES + 40,
            (false, false) => UDP_BYTES + 20,
        }
    }

    /// Bytes of a packet on an Ethernet link that has `len` from BTH to ICRC, inter-frame gap
    /// included.
    pub(crate) fn frame_bytes(self, len: u32) -> u32 {
        len + self.network_bytes() + ETHERNET_BYTES
    }

    /// The ECN codepoint that a packet has on the wire: a GRH has none that switches look at.
    pub(crate) fn ecn(self, wanted: Ecn) -> Ecn {
        if self.is_v1 { Ecn::NotEct } else { wanted }
    }
}

/// Faults applied to a packet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks {
    /// Bytes were changed by [`Fault::Flip`].
    pub(crate) flipped: bool,
    /// Bytes were cut off by [`Fault::Truncate`].
    pub(crate) truncated: bool,
    /// Delayed by this fault.
    pub(crate) slowed: Option<Fault>,
    /// One of two copies; both have the same number.
    pub(crate) twin: Option<u32>,
    /// A copy with a stray sequence number.
    pub(crate) stray: bool,
    /// Not sent by an endpoint.
    pub(crate) forged: bool,
    /// Bytes were changed by [`Fault::BitError`], inside a switch.
    pub(crate) corrupted: bool,
    /// The number of the tables that all switches had when it was sent; 0 if they were changing.
    pub(crate) tables: u32,
    /// Position in the order in which packets entered the air.
    pub(crate) order: u64,
    /// The number of its sender's retransmissions by then.
    pub(crate) resent_before: u64,
}

impl Marks {
    pub(crate) fn is_damaged(&self) -> bool {
        self.flipped || self.truncated || self.corrupted
    }
}

/// A packet between two nodes.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Source address and UDP port.
    pub source: SocketAddr,
    /// Destination address: of a node, or a multicast group.
    pub dest: IpAddr,
    /// ECN codepoint.
    pub ecn: Ecn,
    /// It has a GRH in place of IP and UDP.
    pub is_v1: bool,
    /// BTH to ICRC. For a phantom packet the headers, then as many zeros as a parser requires.
    pub bytes: Vec<u8>,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// IPv4 identification.
    pub(crate) id: u16,
    pub(crate) dscp: u8,
    pub(crate) hop_limit: u8,
    /// Payload bytes of a phantom packet, without pad.
    pub(crate) phantom_payload: u32,
    /// Its size on a link in bytes.
    pub(crate) frame_bytes: u32,
    pub(crate) marks: Marks,
    /// In front of the others: what switches write into it. It is not part of `bytes`.
    pub(crate) telemetry: Option<Box<Report>>,
}

impl Packet {
    /// Whether it was forged, or changed by hand.
    pub fn is_forged(&self) -> bool {
        self.marks.forged
    }

    /// Marks it as forged: its receiver may refuse it.
    #[must_use]
    pub fn forged(mut self) -> Packet {
        self.marks.forged = true;
        self
    }

    /// Destination queue pair, as far as the packet still has one.
    pub fn dest_qpn(&self) -> u32 {
        self.word(4) & 0x00ff_ffff
    }

    /// Packet sequence number, as far as the packet still has one.
    pub(crate) fn psn(&self) -> u32 {
        self.word(8) & 0x00ff_ffff
    }

    /// The IP and UDP header fields covered by the ICRC.
    pub(crate) fn pseudo(&self) -> Pseudo {
        let (src_port, dst_port, id) = (self.source.port(), ROCE_PORT, self.id);
        if self.is_v1 {
            let [sgid, dgid] = [self.source.ip(), self.dest].map(gid_of);
            return Pseudo::Grh { sgid, dgid };
        }
        match (self.source.ip(), self.dest) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                Pseudo::V4 { src, dst, id, dont_fragment: true, src_port, dst_port }
            }
            (src, dst) => {
                let wide = |ip| match ip {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                    IpAddr::V6(v6) => v6,
                };
                Pseudo::V6 { src: wide(src), dst: wide(dst), src_port, dst_port }
            }
        }
    }

    /// Version, traffic class with the DSCP, and no flow label, of a packet with a GRH.
    pub(crate) fn first_word_of_grh(&self) -> Option<NonZeroU32> {
        let word = 6 << 28 | u32::from(self.dscp) << 22;
        NonZeroU32::new(word).filter(|_| self.is_v1)
    }

    /// Sets the right ICRC; false for bytes too short to have one.
    pub fn seal(&mut self) -> bool {
        let right = icrc::compute(&self.pseudo(), &self.bytes);
        if let (Some(right), Some(carried)) = (right, self.bytes.last_chunk_mut()) {
            *carried = right;
        }
        right.is_some()
    }

    fn word(&self, at: usize) -> u32 {
        let field = self.bytes.get(at..).and_then(<[u8]>::first_chunk);
        field.map_or(0, |&bytes| u32::from_be_bytes(bytes))
    }
}

/// The direction of a recorded packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Handed to the wire.
    Sent,
    /// Handed to the endpoint.
    Accepted,
}

/// A packet as a node sent or accepted it.
#[derive(Clone, Copy, Debug)]
pub struct Sighting {
    /// When.
    pub at: Time,
    /// The node whose wire it was.
    pub node: u32,
    /// The other node.
    pub peer: u32,
    /// Sent or accepted.
    pub direction: Direction,
    /// Transport headers.
    pub headers: Headers,
    /// Payload bytes.
    pub payload_len: u32,
    /// What switches wrote into it, or what it returns of that, if anything.
    pub telemetry: Option<Stamps>,
}

/// The telemetry of a packet, as a number that another packet hardly has, with other times, queues
/// and counts. Of digests there are 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamps {
    /// The number.
    pub digest: u64,
    /// It is returned by the receiver.
    pub is_echo: bool,
}

impl Stamps {
    /// Of a report in which a switch has written something.
    pub(crate) fn of(report: &Report) -> Option<Stamps> {
        if !report.is_stamped() {
            return None;
        }
        // All but the opcode and the flags, as FNV-1a has it.
        let digest =
            report.as_bytes()[2..].iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
        Some(Stamps { digest, is_echo: report.is_echo() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_to_their_nodes() {
        for ipv6 in [false, true] {
            let addressing = Addressing { ipv6, is_v1: false };
            for node in [0, 1, 254, 255, 256, 60_000] {
                assert_eq!(addressing.node(addressing.ip(node)), node);
            }
            assert_eq!(addressing.node(IpAddr::V4(Ipv4Addr::LOCALHOST)), NOBODY);
        }
    }

    #[test]
    fn a_grh_is_longer_than_ipv4_with_udp_and_shorter_than_ipv6_with_udp() {
        let bytes = |ipv6, is_v1| Addressing { ipv6, is_v1 }.frame_bytes(16);
        // BTH and ICRC, 26 bytes of Ethernet header, preamble and FCS, and a gap of 12.
        assert_eq!([bytes(false, false), bytes(true, false)], [16 + 28 + 38, 16 + 48 + 38]);
        assert_eq!([bytes(false, true), bytes(true, true)], [16 + 40 + 38; 2]);
    }
}
