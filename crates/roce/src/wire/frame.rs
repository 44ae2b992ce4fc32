//! Whole packets on a link: Ethernet, IP and UDP or a GRH, and the RoCE packet inside.
//!
//! For captures, traces and raw sockets; queue pairs never see a [`Frame`]. Decoding keeps every
//! bit that the sender may choose, so [`Packet::emit`] and [`Frame::emit`] reproduce exactly the
//! bytes that were parsed; derived fields (lengths, the IPv4 header checksum) are computed again,
//! and a packet in which they differ is refused. So are forms that no RoCE sender uses: IPv4
//! options, fragments, IPv6 extension headers. Unrelated traffic is reported separately:
//! [`FrameError::NotRoce`].
//!
//! The UDP checksum is kept as it is: RoCE senders may leave it zero, and captures on the sending
//! host show it before the NIC has filled it in. [`Packet::udp_checksum`] tells them apart.

mod ip;

use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::grh::{self, GRH_BYTES, Grh};
use super::icrc::{Icrc, Pseudo};
use super::{Headers, ICRC_BYTES, WireError};
use ip::{PROTOCOL_UDP, Split, fold, sum};

pub use ip::{Ip, IpVersion, Ipv4, Ipv6};

/// EtherType of IPv4.
const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of an 802.1Q tag.
const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of RoCEv1 (IBA annex A16).
pub const ETHERTYPE_ROCE_V1: u16 = 0x8915;
/// Length of a UDP header.
const UDP_BYTES: usize = 8;
/// The kind of traffic that is not RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
pub enum NotRoce {
    /// Too short to hold the UDP ports.
    #[error("too short to tell")]
    TooShort,
    /// Another EtherType.
    #[error("not IP")]
    NotIp,
    /// IP of another version than announced.
    #[error("IP version wrong")]
    IpVersion,
    /// Another protocol over IP (IPv6 extension headers included).
    #[error("not UDP")]
    NotUdp,
    /// A fragment without the UDP header.
    #[error("later fragment")]
    LaterFragment,
    /// Another UDP destination port.
    #[error("other UDP port")]
    OtherPort,
    /// A packet forwarded by one process to another on its machine; the capture has the original,
    /// too.
    #[error("forwarded between processes")]
    Forwarded,
}

/// Why bytes cannot be represented as a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Not RoCE at all.
    #[error("{0}")]
    NotRoce(#[from] NotRoce),
    /// The IPv4 header has options, or its length field is wrong.
    #[error("IPv4 header of {0} bytes instead of 20")]
    IpOptions(usize),
    /// First fragment of a fragmented packet.
    #[error("IPv4 packet is fragmented")]
    Fragment,
    /// The reserved IPv4 flag is set.
    #[error("reserved IPv4 flag is set")]
    ReservedFlag,
    /// A length field does not match the bytes present.
    #[error("{layer} length {claimed} does not fit the {have} bytes there")]
    Length {
        /// "IPv4", "IPv6", "UDP" or "GRH".
        layer: &'static str,
        /// The value of the field.
        claimed: usize,
        /// The bytes present.
        have: usize,
    },
    /// The IPv4 header checksum is wrong.
    #[error("IPv4 header checksum {have:#06x} is wrong, {want:#06x} expected")]
    Ipv4Checksum {
        /// Checksum in the packet.
        have: u16,
        /// The right one.
        want: u16,
    },
    /// A GRH of another version than 6.
    #[error("GRH version {0} is not 6")]
    GrhVersion(u8),
    /// Something else than transport headers follows the GRH.
    #[error("next header {0:#04x} of the GRH is not 0x1b")]
    NextHeader(u8),
    /// The transport headers are refused.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Too long for the length fields (only when encoding).
    #[error("{0} bytes from BTH to ICRC do not fit a packet")]
    TooLong(usize),
}

/// Ethernet II header, with an 802.1Q tag or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Destination address.
    pub dst: [u8; 6],
    /// Source address.
    pub src: [u8; 6],
    /// Tag control information: priority (3 bits), drop eligible (1), VLAN (12).
    pub vlan_tci: Option<u16>,
}

/// The UDP header fields chosen by the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// Source port: entropy for load balancing.
    pub src_port: u16,
    /// Destination port: when decoded 4791, or that of a process of the sender's own machine
    /// ([`PROCESS_PORT_BASE`](super::PROCESS_PORT_BASE)).
    pub dst_port: u16,
    /// Checksum in the packet; 0 means none.
    pub checksum: u16,
}

/// The headers in front of the transport headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// RoCEv2.
    Udp(Ip, Udp),
    /// RoCEv1.
    Grh(Grh),
}

/// Which headers those are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NetworkType {
    /// A GRH.
    RoceV1,
    /// IP of this version, and UDP.
    RoceV2(IpVersion),
}

impl fmt::Display for NetworkType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NetworkType::RoceV1 => f.pad("RoCEv1"),
            NetworkType::RoceV2(version) => version.fmt(f),
        }
    }
}

impl Network {
    /// Which headers they are.
    pub const fn kind(&self) -> NetworkType {
        match self {
            Network::Udp(ip, _) => NetworkType::RoceV2(ip.version()),
            Network::Grh(_) => NetworkType::RoceV1,
        }
    }

    const fn ethertype(&self) -> u16 {
        match self.kind() {
            NetworkType::RoceV1 => ETHERTYPE_ROCE_V1,
            NetworkType::RoceV2(IpVersion::V4) => ETHERTYPE_IPV4,
            NetworkType::RoceV2(IpVersion::V6) => ETHERTYPE_IPV6,
        }
    }
}

/// The state of a packet's UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpChecksum {
    /// RoCEv1 has no UDP header.
    NoUdp,
    /// Zero: not used.
    Unused,
    /// Right.
    Right,
    /// Wrong, or not filled in yet when it was captured.
    Wrong,
}

/// A RoCE packet from the network header to the ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// IP and UDP header, or GRH.
    pub network: Network,
    /// Transport headers.
    pub headers: Headers,
    /// Payload without pad.
    pub payload: &'a [u8],
    /// Pad bytes, of which the BTH's pad count are valid. Normally zero.
    pub pad: [u8; 3],
    /// The ICRC it carries, right or wrong.
    pub icrc: [u8; ICRC_BYTES],
}

/// A RoCE packet in an Ethernet frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Ethernet header.
    pub ethernet: Ethernet,
    /// The packet in it.
    pub packet: Packet<'a>,
    /// Bytes after the packet: padding up to 60 bytes, a captured frame check sequence.
    pub trailer: &'a [u8],
}

impl Ethernet {
    /// Decodes the header at the start of `bytes`; returns it with the EtherType and what follows.
    pub fn parse(bytes: &[u8]) -> Result<(Ethernet, u16, &[u8]), NotRoce> {
        let (dst, rest) = bytes.split_first_chunk().ok_or(NotRoce::TooShort)?;
        let (src, rest) = rest.split_first_chunk().ok_or(NotRoce::TooShort)?;
        let (ethertype, rest) = be16(rest)?;
        let untagged = Ethernet { dst: *dst, src: *src, vlan_tci: None };
        if ethertype != ETHERTYPE_VLAN {
            return Ok((untagged, ethertype, rest));
        }
        let (tci, rest) = be16(rest)?;
        let (ethertype, rest) = be16(rest)?;
        Ok((Ethernet { vlan_tci: Some(tci), ..untagged }, ethertype, rest))
    }

    /// Appends the header of a frame of this EtherType to `out`.
    pub fn emit(&self, ethertype: u16, out: &mut Vec<u8>) {
        out.extend(self.dst);
        out.extend(self.src);
        if let Some(tci) = self.vlan_tci {
            out.extend(ETHERTYPE_VLAN.to_be_bytes());
            out.extend(tci.to_be_bytes());
        }
        out.extend(ethertype.to_be_bytes());
    }
}

/// Splits a 16-bit field off the front.
fn be16(bytes: &[u8]) -> Result<(u16, &[u8]), NotRoce> {
    let (field, rest) = bytes.split_first_chunk().ok_or(NotRoce::TooShort)?;
    Ok((u16::from_be_bytes(*field), rest))
}

/// The 16-bit field at `at` of a header that is long enough.
fn field<const N: usize>(header: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([header[at], header[at + 1]])
}

/// Decodes the GRH at the start of `bytes`; returns it with the bytes that it counts and those
/// after.
fn split_grh(bytes: &[u8]) -> Result<(Grh, &[u8], &[u8]), FrameError> {
    let length = |claimed, have| FrameError::Length { layer: "GRH", claimed, have };
    let (header, rest) =
        bytes.split_first_chunk::<GRH_BYTES>().ok_or_else(|| length(GRH_BYTES, bytes.len()))?;
    let [a, b, c, d, _, _, next, hop_limit, ref gids @ ..] = *header;
    let first = u32::from_be_bytes([a, b, c, d]);
    if a >> 4 != grh::VERSION {
        return Err(FrameError::GrhVersion(a >> 4));
    }
    if next != grh::NEXT_HEADER {
        return Err(FrameError::NextHeader(next));
    }
    let (mut sgid, mut dgid) = ([0; 16], [0; 16]);
    sgid.copy_from_slice(&gids[..16]);
    dgid.copy_from_slice(&gids[16..]);
    let grh = Grh {
        traffic_class: (first >> 20) as u8,
        flow_label: first & 0x000f_ffff,
        hop_limit,
        sgid: sgid.into(),
        dgid: dgid.into(),
    };
    let claimed = usize::from(field(header, 4));
    let (body, trailer) =
        rest.split_at_checked(claimed).ok_or_else(|| length(claimed, rest.len()))?;
    Ok((grh, body, trailer))
}

impl<'a> Packet<'a> {
    /// Decodes the IP packet at the start of `bytes`; returns it with the bytes that follow it.
    pub fn parse(bytes: &'a [u8]) -> Result<(Packet<'a>, &'a [u8]), FrameError> {
        match bytes.first().map(|first| first >> 4) {
            Some(4) => Packet::over_udp(Ipv4::split(bytes)?),
            Some(6) => Packet::over_udp(Ipv6::split(bytes)?),
            Some(_) => Err(NotRoce::NotIp.into()),
            None => Err(NotRoce::TooShort.into()),
        }
    }

    /// Decodes the packet at the start of `bytes`, whose protocol the link layer has announced.
    pub fn parse_as(ethertype: u16, bytes: &'a [u8]) -> Result<(Packet<'a>, &'a [u8]), FrameError> {
        match ethertype {
            ETHERTYPE_IPV4 => Packet::over_udp(Ipv4::split(bytes)?),
            ETHERTYPE_IPV6 => Packet::over_udp(Ipv6::split(bytes)?),
            ETHERTYPE_ROCE_V1 => {
                let (grh, body, trailer) = split_grh(bytes)?;
                Ok((Packet::assemble(Network::Grh(grh), body)?, trailer))
            }
            _ => Err(NotRoce::NotIp.into()),
        }
    }

    fn over_udp(split: Split<'a>) -> Result<(Packet<'a>, &'a [u8]), FrameError> {
        let short = FrameError::NotRoce(NotRoce::TooShort);
        let (header, body) = split.udp.split_first_chunk::<UDP_BYTES>().ok_or(short)?;
        let claimed = usize::from(field(header, 4));
        if claimed != split.udp.len() {
            return Err(FrameError::Length { layer: "UDP", claimed, have: split.udp.len() });
        }
        let udp = Udp {
            src_port: field(header, 0),
            dst_port: field(header, 2),
            checksum: field(header, 6),
        };
        Ok((Packet::assemble(Network::Udp(split.ip, udp), body)?, split.rest))
    }

    /// `body` is BTH to ICRC.
    fn assemble(network: Network, body: &'a [u8]) -> Result<Packet<'a>, FrameError> {
        let (headers, payload) = Headers::parse(body)?;
        let mut pad = [0; 3];
        let behind = &body[headers.encoded_len() + payload.len()..];
        let (pad_bytes, icrc) =
            behind.split_last_chunk().ok_or(FrameError::NotRoce(NotRoce::TooShort))?;
        pad[..pad_bytes.len()].copy_from_slice(pad_bytes);
        Ok(Packet { network, headers, payload, pad, icrc: *icrc })
    }

    /// The valid pad bytes.
    pub fn pad(&self) -> &[u8] {
        &self.pad[..usize::from(self.headers.bth().pad)]
    }

    /// Bytes after the UDP header or the GRH: headers, payload, pad and ICRC.
    pub fn udp_payload_len(&self) -> usize {
        self.headers.encoded_len() + self.payload.len() + self.pad().len() + ICRC_BYTES
    }

    /// The fields of the network headers that the ICRC covers.
    pub fn pseudo(&self) -> Pseudo {
        match self.network {
            Network::Udp(ip, Udp { src_port, dst_port, .. }) => match ip {
                Ip::V4(Ipv4 { src, dst, id, dont_fragment, .. }) => {
                    Pseudo::V4 { src, dst, id, dont_fragment, src_port, dst_port }
                }
                Ip::V6(Ipv6 { src, dst, .. }) => Pseudo::V6 { src, dst, src_port, dst_port },
            },
            Network::Grh(Grh { sgid, dgid, .. }) => Pseudo::Grh { sgid, dgid },
        }
    }

    /// The ICRC that the packet should carry.
    pub fn computed_icrc(&self) -> [u8; ICRC_BYTES] {
        let mut icrc = Icrc::new(&self.pseudo(), self.udp_payload_len());
        icrc.headers(&self.headers.emit());
        icrc.update(self.payload);
        icrc.update(self.pad());
        icrc.finish()
    }

    /// Whether it carries the right ICRC.
    pub fn icrc_is_right(&self) -> bool {
        self.icrc == self.computed_icrc()
    }

    /// Whether the UDP checksum is used and right.
    pub fn udp_checksum(&self) -> Result<UdpChecksum, FrameError> {
        let (ip, udp) = match self.network {
            Network::Grh(_) => return Ok(UdpChecksum::NoUdp),
            Network::Udp(_, Udp { checksum: 0, .. }) => return Ok(UdpChecksum::Unused),
            Network::Udp(ip, udp) => (ip, udp),
        };
        let udp_len = self.udp_len(&ip)?;
        let mut datagram = Vec::new();
        udp.emit(udp_len, &mut datagram);
        self.emit_body(&mut datagram);
        let pseudo = ip.sum_of_addresses() + u64::from(PROTOCOL_UDP) + u64::from(udp_len);
        let right = fold(pseudo + sum(&datagram)) == 0xffff;
        Ok(if right { UdpChecksum::Right } else { UdpChecksum::Wrong })
    }

    /// Appends the packet to `out`. On an error nothing is appended.
    pub fn emit(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        match self.network {
            Network::Udp(ip, udp) => {
                let udp_len = self.udp_len(&ip)?;
                ip.emit(udp_len, out);
                udp.emit(udp_len, out);
            }
            Network::Grh(grh) => {
                let len = self.udp_payload_len();
                out.extend(grh.encode(u16::try_from(len).map_err(|_| FrameError::TooLong(len))?));
            }
        }
        self.emit_body(out);
        Ok(())
    }

    /// Length of UDP header and payload, if it fits the length field of the IP header.
    fn udp_len(&self, ip: &Ip) -> Result<u16, FrameError> {
        let udp_len = self.udp_payload_len() + UDP_BYTES;
        let fits = udp_len + ip.counted_bytes() <= usize::from(u16::MAX);
        if fits { Ok(udp_len as u16) } else { Err(FrameError::TooLong(self.udp_payload_len())) }
    }

    /// BTH to ICRC.
    fn emit_body(&self, out: &mut Vec<u8>) {
        out.extend(self.headers.emit());
        out.extend(self.payload);
        out.extend(self.pad());
        out.extend(self.icrc);
    }
}

impl Udp {
    fn emit(&self, udp_len: u16, out: &mut Vec<u8>) {
        for word in [self.src_port, self.dst_port, udp_len, self.checksum] {
            out.extend(word.to_be_bytes());
        }
    }
}

/// Appends an IP packet with a UDP datagram made of `pieces`, with correct lengths and checksums,
/// and returns its length. For packets in separate parts, whose contents are not examined. On an
/// error nothing is appended.
pub fn datagram<'p>(
    ip: &Ip,
    src_port: u16,
    dst_port: u16,
    pieces: impl IntoIterator<Item = &'p [u8], IntoIter: Clone>,
    out: &mut Vec<u8>,
) -> Result<usize, FrameError> {
    let (start, pieces) = (out.len(), pieces.into_iter());
    let body: usize = pieces.clone().map(<[u8]>::len).sum();
    let udp_len = body + UDP_BYTES;
    if udp_len + ip.counted_bytes() > usize::from(u16::MAX) {
        return Err(FrameError::TooLong(body));
    }
    ip.emit(udp_len as u16, out);
    let udp = out.len();
    for word in [src_port, dst_port, udp_len as u16, 0] {
        out.extend(word.to_be_bytes());
    }
    pieces.for_each(|piece| out.extend(piece));
    let protocol_and_len = u64::from(PROTOCOL_UDP) + udp_len as u64;
    let checksum = !fold(ip.sum_of_addresses() + protocol_and_len + sum(&out[udp..]));
    // Zero would mean none; all ones is the same number (RFC 768).
    let checksum = if checksum == 0 { u16::MAX } else { checksum };
    out[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
    Ok(out.len() - start)
}

impl<'a> Frame<'a> {
    /// Decodes an Ethernet frame.
    pub fn parse(bytes: &'a [u8]) -> Result<Frame<'a>, FrameError> {
        let (ethernet, ethertype, rest) = Ethernet::parse(bytes)?;
        let (packet, trailer) = Packet::parse_as(ethertype, rest)?;
        Ok(Frame { ethernet, packet, trailer })
    }

    /// Appends the frame to `out`. On an error nothing of the packet is appended.
    pub fn emit(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        self.ethernet.emit(self.packet.network.ethertype(), out);
        self.packet.emit(out)?;
        out.extend(self.trailer);
        Ok(())
    }
}
