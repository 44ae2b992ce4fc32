//! IPv4 and IPv6 headers of RoCE packets.
//!
//! A packet is first identified as RoCE by its UDP port, whatever its options, and only then
//! validated. So unrelated traffic is never reported as wrong, however odd it is. Header lengths,
//! the protocol number and the IPv4 checksum are not represented: they follow from the rest.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};

use alloc::vec::Vec;

use super::{FrameError, NotRoce, UDP_BYTES, be16, field};
use crate::wire::{FORWARDED_OPCODE, ROCE_PORT, is_process_port};

/// IP protocol number of UDP.
pub(super) const PROTOCOL_UDP: u8 = 17;
/// Length of an IPv4 header without options.
pub(super) const IPV4_BYTES: usize = 20;
/// Length of an IPv6 header.
const IPV6_BYTES: usize = 40;
/// IPv4 "don't fragment" in the field of flags and fragment offset.
const DONT_FRAGMENT: u16 = 0x4000;
/// The reserved flag of that field.
const RESERVED_FLAG: u16 = 0x8000;
/// "More fragments" in that field.
const MORE_FRAGMENTS: u16 = 0x2000;
/// Fragment offset in that field.
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// Which version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum IpVersion {
    V4,
    V6,
}

impl fmt::Display for IpVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            IpVersion::V4 => "IPv4",
            IpVersion::V6 => "IPv6",
        })
    }
}

/// The IPv4 header fields chosen by the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4 {
    /// DiffServ codepoint (6 bits) and ECN (2).
    pub tos: u8,
    /// Identification; covered by the ICRC.
    pub id: u16,
    /// Don't-fragment flag; covered by the ICRC.
    pub dont_fragment: bool,
    /// Time to live.
    pub ttl: u8,
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
}

/// The IPv6 header fields chosen by the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6 {
    /// DiffServ codepoint (6 bits) and ECN (2).
    pub traffic_class: u8,
    /// Flow label; its low 20 bits are encoded.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub src: Ipv6Addr,
    /// Destination address.
    pub dst: Ipv6Addr,
}

/// IP header of either version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Ip {
    V4(Ipv4),
    V6(Ipv6),
}

impl Ip {
    /// Which version it is.
    pub const fn version(&self) -> IpVersion {
        match self {
            Ip::V4(_) => IpVersion::V4,
            Ip::V6(_) => IpVersion::V6,
        }
    }

    /// DiffServ codepoint (6 bits) and ECN (2).
    pub const fn traffic_class(&self) -> u8 {
        match self {
            Ip::V4(ip) => ip.tos,
            Ip::V6(ip) => ip.traffic_class,
        }
    }

    /// Length of the header as counted by the length field.
    pub(super) const fn counted_bytes(&self) -> usize {
        match self {
            Ip::V4(_) => IPV4_BYTES,
            Ip::V6(_) => 0,
        }
    }

    /// Sum of the addresses, for the UDP checksum.
    pub(super) fn sum_of_addresses(&self) -> u64 {
        match self {
            Ip::V4(ip) => sum(&ip.src.octets()) + sum(&ip.dst.octets()),
            Ip::V6(ip) => sum(&ip.src.octets()) + sum(&ip.dst.octets()),
        }
    }

    /// Appends the header for `payload_len` bytes (UDP header included).
    pub(super) fn emit(&self, payload_len: u16, out: &mut Vec<u8>) {
        match self {
            Ip::V4(ip) => out.extend(ip.encode(payload_len + IPV4_BYTES as u16)),
            Ip::V6(ip) => out.extend(ip.encode(payload_len)),
        }
    }
}

/// The header bytes of an IP packet, the decoded header, and the bytes after the packet.
pub(super) struct Split<'a> {
    pub(super) ip: Ip,
    pub(super) udp: &'a [u8],
    pub(super) rest: &'a [u8],
}

impl Ipv4 {
    fn encode(&self, total_len: u16) -> [u8; IPV4_BYTES] {
        let flags = if self.dont_fragment { DONT_FRAGMENT } else { 0 };
        let mut out = [0; IPV4_BYTES];
        out[0] = 0x45;
        out[1] = self.tos;
        out[2..4].copy_from_slice(&total_len.to_be_bytes());
        out[4..6].copy_from_slice(&self.id.to_be_bytes());
        out[6..8].copy_from_slice(&flags.to_be_bytes());
        out[8] = self.ttl;
        out[9] = PROTOCOL_UDP;
        out[12..16].copy_from_slice(&self.src.octets());
        out[16..].copy_from_slice(&self.dst.octets());
        let checksum = !fold(sum(&out));
        out[10..12].copy_from_slice(&checksum.to_be_bytes());
        out
    }

    /// Whether the packet is RoCEv2 at all, before it is validated.
    fn identify(bytes: &[u8]) -> Result<&[u8; IPV4_BYTES], NotRoce> {
        let header = bytes.first_chunk::<IPV4_BYTES>().ok_or(NotRoce::TooShort)?;
        if header[0] >> 4 != 4 {
            return Err(NotRoce::IpVersion);
        }
        if header[9] != PROTOCOL_UDP {
            return Err(NotRoce::NotUdp);
        }
        if field(header, 6) & FRAGMENT_OFFSET != 0 {
            return Err(NotRoce::LaterFragment);
        }
        check_port(bytes, usize::from(header[0] & 0xf) * 4)?;
        Ok(header)
    }

    pub(super) fn split(bytes: &[u8]) -> Result<Split<'_>, FrameError> {
        let header = Ipv4::identify(bytes)?;
        let (total_len, flags) = (usize::from(field(header, 2)), field(header, 6));
        if header[0] != 0x45 {
            return Err(FrameError::IpOptions(usize::from(header[0] & 0xf) * 4));
        }
        if flags & MORE_FRAGMENTS != 0 {
            return Err(FrameError::Fragment);
        }
        if flags & RESERVED_FLAG != 0 {
            return Err(FrameError::ReservedFlag);
        }
        let [.., a, b, c, d, e, f, g, h] = *header;
        let ip = Ipv4 {
            tos: header[1],
            id: field(header, 4),
            dont_fragment: flags & DONT_FRAGMENT != 0,
            ttl: header[8],
            src: Ipv4Addr::new(a, b, c, d),
            dst: Ipv4Addr::new(e, f, g, h),
        };
        ip.check_sum(header)?;
        let (udp, rest) = cut(bytes, IPV4_BYTES, total_len).ok_or(FrameError::Length {
            layer: "IPv4",
            claimed: total_len,
            have: bytes.len(),
        })?;
        Ok(Split { ip: Ip::V4(ip), udp, rest })
    }

    /// Refuses a header checksum other than the one we would send.
    fn check_sum(&self, header: &[u8; IPV4_BYTES]) -> Result<(), FrameError> {
        let (have, want) = (field(header, 10), field(&self.encode(field(header, 2)), 10));
        if have == want { Ok(()) } else { Err(FrameError::Ipv4Checksum { have, want }) }
    }
}

impl Ipv6 {
    fn encode(&self, payload_len: u16) -> [u8; IPV6_BYTES] {
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0x000f_ffff;
        let mut out = [0; IPV6_BYTES];
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&payload_len.to_be_bytes());
        out[6] = PROTOCOL_UDP;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.src.octets());
        out[24..].copy_from_slice(&self.dst.octets());
        out
    }

    /// Whether the packet is RoCEv2 at all, before it is validated.
    fn identify(bytes: &[u8]) -> Result<&[u8; IPV6_BYTES], NotRoce> {
        let header = bytes.first_chunk::<IPV6_BYTES>().ok_or(NotRoce::TooShort)?;
        if header[0] >> 4 != 6 {
            return Err(NotRoce::IpVersion);
        }
        if header[6] != PROTOCOL_UDP {
            return Err(NotRoce::NotUdp);
        }
        check_port(bytes, IPV6_BYTES)?;
        Ok(header)
    }

    pub(super) fn split(bytes: &[u8]) -> Result<Split<'_>, FrameError> {
        let header = Ipv6::identify(bytes)?;
        let [a, b, c, d, ..] = *header;
        let first = u32::from_be_bytes([a, b, c, d]);
        let ip = Ipv6 {
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0x000f_ffff,
            hop_limit: header[7],
            src: address(header, 8),
            dst: address(header, 24),
        };
        let payload_len = usize::from(field(header, 4));
        let (udp, rest) =
            cut(bytes, IPV6_BYTES, IPV6_BYTES + payload_len).ok_or(FrameError::Length {
                layer: "IPv6",
                claimed: payload_len,
                have: bytes.len() - IPV6_BYTES,
            })?;
        Ok(Split { ip: Ip::V6(ip), udp, rest })
    }
}

/// The IPv6 address at `at`.
fn address(header: &[u8; IPV6_BYTES], at: usize) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&header[at..at + 16]);
    Ipv6Addr::from(octets)
}

/// Whether the UDP header at `at` goes to RoCE's port, or to a process of the sender's own machine.
fn check_port(bytes: &[u8], at: usize) -> Result<(), NotRoce> {
    let (from, rest) = be16(bytes.get(at..).unwrap_or_default())?;
    let (to, rest) = be16(rest)?;
    let between_processes = is_process_port(to) && (from == ROCE_PORT || is_process_port(from));
    match to {
        ROCE_PORT => Ok(()),
        // Behind the rest of the UDP header.
        _ if between_processes && rest.get(4) == Some(&FORWARDED_OPCODE) => Err(NotRoce::Forwarded),
        _ if between_processes => Ok(()),
        _ => Err(NotRoce::OtherPort),
    }
}

/// Bytes `from .. to` and those after, if both are there and hold a UDP header.
fn cut(bytes: &[u8], from: usize, to: usize) -> Option<(&[u8], &[u8])> {
    let inner = bytes.get(from..to)?;
    (inner.len() >= UDP_BYTES).then_some((inner, &bytes[to..]))
}

/// Ones' complement sum of big-endian 16-bit words, an odd byte padded with zero; not folded.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    let (pairs, odd) = bytes.as_chunks::<2>();
    let pairs: u64 = pairs.iter().map(|&pair| u64::from(u16::from_be_bytes(pair))).sum();
    pairs + odd.first().map_or(0, |&byte| u64::from(byte) << 8)
}

/// Folds a ones' complement sum to 16 bits.
pub(super) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
