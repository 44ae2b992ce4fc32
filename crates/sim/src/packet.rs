//! A packet under way: its bytes, the addresses that stand for its IP header, and what befell it.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use roce::wire::ROCE_PORT;
use roce::wire::icrc::Pseudo;
use roce::world::Ecn;

use crate::faults::Fault;

/// Ethernet header, frame check sequence, preamble and gap between frames.
const ETHERNET_BYTES: u32 = 14 + 4 + 8 + 12;
const UDP_BYTES: u32 = 8;

/// How node numbers and addresses belong together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addressing {
    pub(crate) ipv6: bool,
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

    /// The node that has this address. Whether there is one with that number is the caller's affair.
    pub(crate) fn node(self, ip: IpAddr) -> Option<u32> {
        let (high, low) = match ip {
            IpAddr::V4(v4) => (v4.octets()[2], v4.octets()[3]),
            IpAddr::V6(v6) => (v6.octets()[14], v6.octets()[15]),
        };
        let node = u32::from(u16::from_be_bytes([high, low])).checked_sub(1)?;
        (self.ip(node) == ip).then_some(node)
    }

    /// Where packets of a node come from.
    pub(crate) fn source(self, node: u32) -> SocketAddr {
        SocketAddr::new(self.ip(node), 0xc000 | (node & 0x3fff) as u16)
    }

    /// What the ICRC covers of the IP and UDP headers.
    pub(crate) fn pseudo(self, from: u32, to: u32, id: u16) -> Pseudo {
        let (src_port, dst_port) = (self.source(from).port(), ROCE_PORT);
        match (self.ip(from), self.ip(to)) {
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

    /// Bytes that a UDP payload of `len` takes on an Ethernet link, gap between frames included.
    pub(crate) fn frame_bytes(self, len: u32) -> u32 {
        let ip = if self.ipv6 { 40 } else { 20 };
        len + UDP_BYTES + ip + ETHERNET_BYTES
    }
}

/// What faults have done to a packet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks {
    /// Bytes were changed by [`Fault::Flip`].
    pub(crate) flipped: bool,
    /// Bytes were cut off by [`Fault::Truncate`].
    pub(crate) truncated: bool,
    /// Held up by this fault.
    pub(crate) slowed: Option<Fault>,
    /// One of two copies; both have the same number.
    pub(crate) twin: Option<u32>,
    /// A copy with a sequence number from elsewhere.
    pub(crate) stray: bool,
    /// Place in the order in which packets went into the air.
    pub(crate) order: u64,
    /// What its sender had sent again by then.
    pub(crate) resent_before: u64,
}

impl Marks {
    pub(crate) fn is_damaged(&self) -> bool {
        self.flipped || self.truncated
    }
}

/// A packet between two nodes.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// IPv4 identification.
    pub(crate) id: u16,
    pub(crate) dscp: u8,
    pub(crate) ecn: Ecn,
    pub(crate) hop_limit: u8,
    /// BTH to ICRC. Of a phantom packet the headers, then as many zeros as a parser wants to see.
    pub(crate) bytes: Vec<u8>,
    /// Payload bytes of a phantom packet, without pad.
    pub(crate) phantom_payload: u32,
    /// Bytes that it takes on a link.
    pub(crate) frame_bytes: u32,
    pub(crate) marks: Marks,
}

impl Packet {
    /// Destination queue pair, as far as the packet still has one.
    pub(crate) fn dest_qpn(&self) -> u32 {
        self.word(4) & 0x00ff_ffff
    }

    fn word(&self, at: usize) -> u32 {
        let field = self.bytes.get(at..).and_then(<[u8]>::first_chunk);
        field.map_or(0, |&bytes| u32::from_be_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_to_their_nodes() {
        for addressing in [Addressing { ipv6: false }, Addressing { ipv6: true }] {
            for node in [0, 1, 254, 255, 256, 60_000] {
                assert_eq!(addressing.node(addressing.ip(node)), Some(node));
            }
            assert_eq!(addressing.node(IpAddr::V4(Ipv4Addr::LOCALHOST)), None);
        }
    }
}
