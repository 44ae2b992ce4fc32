//! From the kernel's packets to those on the wire.
//!
//! A segmented send keeps one IP and one UDP header for all its segments; the n-th packet on the
//! wire has the identification of the header plus n. Packets joined by receive offload have either
//! consecutive identifications or the same one (senders that set "don't fragment" may use it): the
//! ICRC shows which. Lengths and checksums are those that a device fills in.

use std::net::{Ipv4Addr, Ipv6Addr};

use roce::Time;
use roce::wire::frame::{self, Ip, Ipv4, Ipv6};
use roce::wire::icrc::{self, Pseudo};

use super::OFFLOAD_BYTES;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the UDP checksum is not filled in yet.
const NEEDS_CHECKSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_UDP_L4`: UDP segments.
const UDP_SEGMENTS: u8 = 5;
/// `VIRTIO_NET_HDR_GSO_NONE`.
const NO_SEGMENTS: u8 = 0;

/// Headers of a packet of the kernel.
struct Datagram<'a> {
    ip: Ip,
    ports: (u16, u16),
    body: &'a [u8],
    /// The packet without what the link added behind it.
    whole: &'a [u8],
}

/// Calls `sink` with each packet on the wire that `bytes` (from the IP header on) stand for, using
/// `scratch`. False when they cannot be determined.
pub(super) fn split(
    how: &[u8; OFFLOAD_BYTES],
    bytes: &[u8],
    scratch: &mut Vec<u8>,
    sink: &mut dyn FnMut(&[u8]),
) -> bool {
    let &[flags, kind, _, _, size0, size1, ..] = how;
    let Some(datagram) = Datagram::parse(bytes) else {
        return false;
    };
    let segment = match kind {
        NO_SEGMENTS if flags & NEEDS_CHECKSUM == 0 => {
            sink(datagram.whole);
            return true;
        }
        NO_SEGMENTS => datagram.body.len().max(1),
        UDP_SEGMENTS => usize::from(u16::from_ne_bytes([size0, size1])).max(1),
        _ => return false,
    };
    let (from, to) = datagram.ports;
    for (place, body) in (0..).zip(datagram.body.chunks(segment)) {
        let ip = datagram.ip_of_segment(place, body);
        scratch.clear();
        if frame::datagram(&ip, from, to, [body], scratch).is_err() {
            return false;
        }
        sink(scratch);
    }
    true
}

impl<'a> Datagram<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Datagram<'a>> {
        match bytes.first()? >> 4 {
            4 => Datagram::parse_v4(bytes),
            6 => Datagram::parse_v6(bytes),
            _ => None,
        }
    }

    fn parse_v4(bytes: &'a [u8]) -> Option<Datagram<'a>> {
        let header = bytes.first_chunk::<20>()?;
        let &[first, tos, l0, l1, i0, i1, flags, _, ttl, _, _, _, ref addresses @ ..] = header;
        let (src, dst) = addresses.split_first_chunk::<4>()?;
        let ip = Ip::V4(Ipv4 {
            tos,
            id: u16::from_be_bytes([i0, i1]),
            dont_fragment: flags & 0x40 != 0,
            ttl,
            src: Ipv4Addr::from(*src),
            dst: Ipv4Addr::from(*dst.first_chunk()?),
        });
        let whole = bytes.get(..usize::from(u16::from_be_bytes([l0, l1])))?;
        (first == 0x45).then_some(())?;
        Datagram::assemble(ip, whole, 20)
    }

    fn parse_v6(bytes: &'a [u8]) -> Option<Datagram<'a>> {
        let header = bytes.first_chunk::<40>()?;
        let &[f0, f1, f2, f3, l0, l1, _, hop_limit, ref addresses @ ..] = header;
        let (src, dst) = addresses.split_first_chunk::<16>()?;
        let first = u32::from_be_bytes([f0, f1, f2, f3]);
        let ip = Ip::V6(Ipv6 {
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0x000f_ffff,
            hop_limit,
            src: Ipv6Addr::from(*src),
            dst: Ipv6Addr::from(*dst.first_chunk()?),
        });
        let whole = bytes.get(..40 + usize::from(u16::from_be_bytes([l0, l1])))?;
        Datagram::assemble(ip, whole, 40)
    }

    fn assemble(ip: Ip, whole: &'a [u8], header: usize) -> Option<Datagram<'a>> {
        let (udp, body) = whole.get(header..)?.split_first_chunk::<8>()?;
        let &[f0, f1, t0, t1, ..] = udp;
        let ports = (u16::from_be_bytes([f0, f1]), u16::from_be_bytes([t0, t1]));
        Some(Datagram { ip, ports, body, whole })
    }

    /// The IP header of the segment at this place.
    fn ip_of_segment(&self, place: u16, body: &[u8]) -> Ip {
        let Ip::V4(first) = self.ip else {
            return self.ip;
        };
        let counted = Ipv4 { id: first.id.wrapping_add(place), ..first };
        let (src_port, dst_port) = self.ports;
        let holds = |Ipv4 { id, dont_fragment, src, dst, .. }: Ipv4| {
            let pseudo = Pseudo::V4 { src, dst, id, dont_fragment, src_port, dst_port };
            icrc::verify(&pseudo, body)
        };
        Ip::V4(if !holds(counted) && holds(first) { first } else { counted })
    }
}

/// When the packet was seen, since 1970; zero when the kernel does not report it.
///
/// # Safety
/// `msg_control` must point to `msg_controllen` bytes as a receive call left them.
pub(super) unsafe fn timestamp(header: &libc::msghdr) -> Time {
    // SAFETY: by the contract the control bytes are readable, and their lengths are the kernel's
    // own.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(header);
        while let Some(message) = next.as_ref() {
            let kind = (message.cmsg_level, message.cmsg_type);
            let len = libc::CMSG_LEN(size_of::<libc::timespec>() as u32);
            if kind == (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS) && message.cmsg_len >= len as _ {
                let at = libc::CMSG_DATA(message).cast::<libc::timespec>().read_unaligned();
                return Time::from_nanos(at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64);
            }
            next = libc::CMSG_NXTHDR(header, message);
        }
    }
    Time::ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seal(id: u16, len: usize) -> Vec<u8> {
        let mut packet: Vec<u8> = (0..len).map(|i| (i * 13) as u8).collect();
        let pseudo = Pseudo::V4 {
            src: Ipv4Addr::new(10, 0, 0, 1),
            dst: Ipv4Addr::new(10, 0, 0, 2),
            id,
            dont_fragment: true,
            src_port: 4791,
            dst_port: 4791,
        };
        let icrc = icrc::compute(&pseudo, &packet).expect("long enough");
        packet[len - 4..].copy_from_slice(&icrc);
        packet
    }

    fn ip(id: u16) -> Ip {
        Ip::V4(Ipv4 {
            tos: 2,
            id,
            dont_fragment: true,
            ttl: 64,
            src: Ipv4Addr::new(10, 0, 0, 1),
            dst: Ipv4Addr::new(10, 0, 0, 2),
        })
    }

    fn datagram(id: u16, body: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        frame::datagram(&ip(id), 4791, 4791, [body], &mut out).expect("fits");
        out
    }

    fn pieces(how: [u8; OFFLOAD_BYTES], bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut out = Vec::new();
        let good = split(&how, bytes, &mut Vec::new(), &mut |packet| out.push(packet.to_vec()));
        good.then_some(out)
    }

    fn segmented(bytes: u16) -> [u8; OFFLOAD_BYTES] {
        let [low, high] = bytes.to_ne_bytes();
        [1, UDP_SEGMENTS, 0, 0, low, high, 0, 0, 0, 0]
    }

    #[test]
    fn segments_become_packets_with_rising_or_with_equal_identifications() {
        for rising in [true, false] {
            let id = |place: u16| if rising { 0xffff_u16.wrapping_add(place) } else { 9 };
            let bodies = [seal(id(0), 64), seal(id(1), 64), seal(id(2), 20)];
            let joined = datagram(id(0), &bodies.concat());
            let wanted: Vec<_> =
                (0..).zip(&bodies).map(|(i, body)| datagram(id(i), body)).collect();
            assert_eq!(pieces(segmented(64), &joined), Some(wanted), "rising: {rising}");
        }
    }

    #[test]
    fn single_packets_pass_and_lose_the_padding_of_the_link() {
        let mut packet = datagram(7, &seal(7, 16));
        let whole = packet.clone();
        packet.extend([0; 6]);
        assert_eq!(pieces([0; OFFLOAD_BYTES], &packet), Some(vec![whole.clone()]));
        packet[26..28].fill(0xee);
        let unfilled = [NEEDS_CHECKSUM, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(pieces(unfilled, &packet), Some(vec![whole]), "the checksum is filled in");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let packet = datagram(7, &seal(7, 16));
        for len in 0..packet.len() {
            assert_eq!(pieces([0; OFFLOAD_BYTES], &packet[..len]), None, "{len} bytes");
        }
        let mut options = packet.clone();
        options[0] = 0x46;
        assert_eq!(pieces([0; OFFLOAD_BYTES], &options), None);
        assert_eq!(pieces([0, 1, 0, 0, 0, 0, 0, 0, 0, 0], &packet), None, "TCP segments");
    }
}
