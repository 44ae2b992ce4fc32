//! The 40 bytes in front of every received datagram (IBA 8.3, annex A17.4.5).
//!
//! In RoCEv1 they are the GRH itself. Over IPv6 they are the IPv6 header. Over IPv4 the last 20
//! bytes are the IPv4 header, and the first 20, which have no meaning, are zero. The headers are
//! rebuilt from what the wire reports: the IPv4 identification, which it does not report, is zero,
//! and the checksum is that of the rebuilt header, because programs use it to distinguish the two
//! versions.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::io::Origin;
use crate::verbs::{Ecn, GRH_BYTES};
use crate::wire::grh::{Grh, gid_of};
use crate::wire::{Headers, ICRC_BYTES};

const UDP_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;
const PROTOCOL_UDP: u8 = 17;

/// Version 4, five words of header.
const IPV4_FIRST_BYTE: u8 = 0x45;
/// The flag "don't fragment", which RoCE senders set.
const DONT_FRAGMENT: u16 = 0x4000;

/// The route header of a datagram with `payload_len` bytes of payload.
pub(super) fn route_header(
    origin: &Origin,
    headers: &Headers,
    payload_len: usize,
) -> [u8; GRH_BYTES as usize] {
    let pad = usize::from(headers.bth().pad);
    let len = headers.encoded_len() + payload_len + pad + ICRC_BYTES;
    if let Some(first) = origin.version_tclass_flow {
        let grh = Grh {
            traffic_class: (first.get() >> 20) as u8,
            flow_label: first.get(),
            hop_limit: origin.hop_limit,
            sgid: gid_of(origin.source.ip()),
            dgid: gid_of(origin.dest),
        };
        return grh.encode(len as u16);
    }
    let udp_len = UDP_BYTES + len;
    match (origin.source.ip().to_canonical(), origin.dest.to_canonical()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ipv4(origin, src, dst, udp_len),
        (src, dst) => ipv6(origin, gid_of(src), gid_of(dst), udp_len),
    }
}

fn ipv4(origin: &Origin, src: Ipv4Addr, dst: Ipv4Addr, udp_len: usize) -> [u8; 40] {
    let mut header = [0; IPV4_BYTES];
    header[0] = IPV4_FIRST_BYTE;
    header[1] = traffic_class(origin);
    header[2..4].copy_from_slice(&((IPV4_BYTES + udp_len) as u16).to_be_bytes());
    header[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
    header[8] = origin.hop_limit;
    header[9] = PROTOCOL_UDP;
    header[12..16].copy_from_slice(&src.octets());
    header[16..20].copy_from_slice(&dst.octets());
    let checksum = checksum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut grh = [0; GRH_BYTES as usize];
    grh[GRH_BYTES as usize - IPV4_BYTES..].copy_from_slice(&header);
    grh
}

fn ipv6(origin: &Origin, src: Ipv6Addr, dst: Ipv6Addr, udp_len: usize) -> [u8; 40] {
    let mut grh = [0; GRH_BYTES as usize];
    let first_word = 6 << 28 | u32::from(traffic_class(origin)) << 20;
    grh[..4].copy_from_slice(&first_word.to_be_bytes());
    grh[4..6].copy_from_slice(&(udp_len as u16).to_be_bytes());
    grh[6] = PROTOCOL_UDP;
    grh[7] = origin.hop_limit;
    grh[8..24].copy_from_slice(&src.octets());
    grh[24..40].copy_from_slice(&dst.octets());
    grh
}

fn traffic_class(origin: &Origin) -> u8 {
    let ecn = match origin.ecn {
        Ecn::NotEct => 0,
        Ecn::Ect1 => 1,
        Ecn::Ect0 => 2,
        Ecn::Ce => 3,
    };
    origin.dscp << 2 | ecn
}

/// The complement of the one's complement sum of all words (RFC 1071).
fn checksum(header: &[u8; IPV4_BYTES]) -> u16 {
    let words =
        header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Qpn;
    use crate::wire::frame::{Frame, Ip, Network, Packet};
    use crate::wire::{Bth, DEFAULT_PKEY, Deth, Ext, Opcode, Psn};
    use alloc::vec::Vec;
    use core::net::SocketAddr;
    use core::num::NonZeroU32;

    fn datagram() -> Headers {
        let bth = Bth {
            opcode: Opcode::UdSendOnlyImm,
            solicited: false,
            mig_req: true,
            pad: 3,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp: Qpn::new(17),
            ack_req: false,
            psn: Psn::new(1),
        };
        Headers::new(bth, Ext::DethImm(Deth { qkey: 1, src_qp: Qpn::new(2) }, 9)).unwrap()
    }

    /// The header followed by a packet of the length it states, as decoded by the frame decoder.
    fn decoded(grh: &[u8], payload_len: usize) -> Ip {
        let headers = datagram();
        let pad = usize::from(headers.bth().pad);
        let udp_len = (8 + headers.encoded_len() + payload_len + pad + 4) as u16;
        let mut bytes = grh.to_vec();
        for word in [0xc000, 4791, udp_len, 0] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(headers.emit());
        bytes.extend([7].repeat(payload_len).into_iter().chain([0; 3]).chain([0; 4]));
        let (packet, rest): (_, &[u8]) = Packet::parse(&bytes).unwrap();
        assert!(rest.is_empty());
        let Network::Udp(ip, _) = packet.network else { panic!("not RoCEv2") };
        ip
    }

    fn origin(source: &str, dest: &str) -> Origin {
        let source: SocketAddr = source.parse().unwrap();
        let plain = Origin::new(source, dest.parse().unwrap());
        Origin { dscp: 26, ecn: Ecn::Ce, hop_limit: 63, ..plain }
    }

    #[test]
    fn an_ipv4_header_stands_in_the_last_twenty_bytes() {
        let grh = route_header(&origin("10.0.0.1:49152", "10.0.0.2"), &datagram(), 1001);
        assert_eq!(grh[..20], [0; 20]);
        let Ip::V4(ip) = decoded(&grh[20..], 1001) else { panic!("not IPv4") };
        assert_eq!((ip.src, ip.dst), (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)));
        assert_eq!((ip.tos, ip.ttl, ip.dont_fragment), (26 << 2 | 3, 63, true));
    }

    #[test]
    fn an_ipv6_header_fills_all_forty_bytes() {
        let grh = route_header(&origin("[fd00::1]:49152", "fd00::2"), &datagram(), 5);
        let Ip::V6(ip) = decoded(&grh, 5) else { panic!("not IPv6") };
        let addresses: Vec<Ipv6Addr> =
            ["fd00::1", "fd00::2"].iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!([ip.src, ip.dst][..], addresses[..]);
        assert_eq!((ip.traffic_class, ip.hop_limit), (26 << 2 | 3, 63));
    }

    #[test]
    fn roce_v1_has_its_own_header() {
        let v1 = Origin {
            version_tclass_flow: NonZeroU32::new(6 << 28 | 0xb9 << 20 | 0xabcde),
            ..origin("10.0.0.1:4791", "10.0.0.2")
        };
        let grh = route_header(&v1, &datagram(), 1001);
        let mut frame = [7; 12].to_vec();
        frame.extend([0x89, 0x15]);
        frame.extend(grh);
        frame.extend(datagram().emit());
        frame.extend([7].repeat(1001).into_iter().chain([0; 3]).chain([0; 4]));
        let frame = Frame::parse(&frame).unwrap();
        let Network::Grh(grh) = frame.packet.network else { panic!("not RoCEv1") };
        assert!(frame.trailer.is_empty());
        assert_eq!((grh.traffic_class, grh.flow_label, grh.hop_limit), (0xb9, 0xabcde, 63));
        let gids: [Ipv6Addr; 2] =
            ["::ffff:10.0.0.1", "::ffff:10.0.0.2"].map(|gid| gid.parse().unwrap());
        assert_eq!([grh.sgid, grh.dgid], gids);
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        let grh = route_header(&origin("[::ffff:10.0.0.1]:1", "10.0.0.2"), &datagram(), 1);
        assert_eq!(grh[20], 0x45);
    }
}
