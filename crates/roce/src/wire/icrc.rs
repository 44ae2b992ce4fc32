//! The invariant CRC (IBA 7.8.1, annexes A16 and A17): CRC-32 over everything that no router may
//! change.
//!
//! zlib's polynomial over eight bytes of ones, the IP header, the UDP header, then BTH to the end
//! of the pad; sent least significant byte first. Masked to ones: IPv4 TOS, TTL and checksum, or
//! IPv6 traffic class, flow label and hop limit; the UDP checksum; the byte of the BTH that holds
//! FECN and BECN. The IPv4 identification and flags are covered. RoCEv1 has a GRH in place of IP
//! and UDP; its traffic class, flow label and hop limit are masked.
//!
//! A UDP socket hides the identification of received packets. [`solve_id`] recovers it: a CRC is
//! linear, so the difference between the received and the computed ICRC equals the difference of
//! the identifications, times a power of x that depends only on the packet's length. Dividing by
//! that power gives the only 32-bit pattern that explains the difference, and it must fit the 16
//! bits of the field. An unknown identification thus leaves 16 of the 32 check bits, a correctly
//! guessed one all of them: pass the expected value in [`Pseudo::V4`] and compare.

use core::net::{Ipv4Addr, Ipv6Addr};

use super::grh::{self, GRH_BYTES};
use super::{BTH_BYTES, ICRC_BYTES};

/// The parts of the headers in front of the BTH that the ICRC covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pseudo {
    /// Over IPv4.
    V4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// Identification field.
        id: u16,
        /// Don't-fragment flag (fragment offset is always 0).
        dont_fragment: bool,
        /// UDP source port.
        src_port: u16,
        /// UDP destination port.
        dst_port: u16,
    },
    /// Over IPv6.
    V6 {
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
        /// UDP source port.
        src_port: u16,
        /// UDP destination port.
        dst_port: u16,
    },
    /// RoCEv1.
    Grh {
        /// Source GID.
        sgid: Ipv6Addr,
        /// Destination GID.
        dgid: Ipv6Addr,
    },
}

/// Eight bytes of ones, IPv4 and UDP header.
const V4_BYTES: usize = 8 + 20 + 8;

/// Eight bytes of ones, IPv6 and UDP header.
const V6_BYTES: usize = 8 + 40 + 8;

/// Eight bytes of ones, which stand for the local route header (LRH) that Ethernet has not, and the
/// GRH.
const GRH_PREFIX_BYTES: usize = 8 + GRH_BYTES;

/// The byte of the BTH that holds FECN and BECN.
const MARKS_BYTE: usize = 4;

/// A masked pseudo header with room for the BTH after it, so that the hasher, which is slow to
/// start, takes both at once. Fixed-length arrays rather than one buffer for both versions let the
/// compiler build them without calls to `memcpy`.
enum Prefix {
    V4([u8; V4_BYTES + BTH_BYTES]),
    V6([u8; V6_BYTES + BTH_BYTES]),
    Grh([u8; GRH_PREFIX_BYTES + BTH_BYTES]),
}

impl Prefix {
    #[inline]
    fn new(pseudo: &Pseudo, udp_payload_len: usize) -> Prefix {
        let udp_len = field_len(udp_payload_len + 8).to_be_bytes();
        match *pseudo {
            Pseudo::V4 { src, dst, id, dont_fragment, src_port, dst_port } => {
                let mut out = [0xff; V4_BYTES + BTH_BYTES];
                out[8] = 0x45;
                out[10..12].copy_from_slice(&field_len(udp_payload_len + 28).to_be_bytes());
                out[12..14].copy_from_slice(&id.to_be_bytes());
                out[14..16].copy_from_slice(&[u8::from(dont_fragment) << 6, 0]);
                out[17] = 17;
                out[20..24].copy_from_slice(&src.octets());
                out[24..28].copy_from_slice(&dst.octets());
                out[28..30].copy_from_slice(&src_port.to_be_bytes());
                out[30..32].copy_from_slice(&dst_port.to_be_bytes());
                out[32..34].copy_from_slice(&udp_len);
                Prefix::V4(out)
            }
            Pseudo::V6 { src, dst, src_port, dst_port } => {
                let mut out = [0xff; V6_BYTES + BTH_BYTES];
                out[8] = 0x6f;
                out[12..14].copy_from_slice(&udp_len);
                out[14] = 17;
                out[16..32].copy_from_slice(&src.octets());
                out[32..48].copy_from_slice(&dst.octets());
                out[48..50].copy_from_slice(&src_port.to_be_bytes());
                out[50..52].copy_from_slice(&dst_port.to_be_bytes());
                out[52..54].copy_from_slice(&udp_len);
                Prefix::V6(out)
            }
            Pseudo::Grh { sgid, dgid } => {
                let mut out = [0xff; GRH_PREFIX_BYTES + BTH_BYTES];
                out[8] = grh::VERSION << 4 | 0x0f;
                out[12..14].copy_from_slice(&field_len(udp_payload_len).to_be_bytes());
                out[14] = grh::NEXT_HEADER;
                out[16..32].copy_from_slice(&sgid.octets());
                out[32..48].copy_from_slice(&dgid.octets());
                Prefix::Grh(out)
            }
        }
    }

    /// Without the room for the BTH.
    fn pseudo_header(&self) -> &[u8] {
        match self {
            Prefix::V4(bytes) => &bytes[..V4_BYTES],
            Prefix::V6(bytes) => &bytes[..V6_BYTES],
            Prefix::Grh(bytes) => &bytes[..GRH_PREFIX_BYTES],
        }
    }

    #[inline]
    fn hash_with_bth(mut self, bth: &[u8; BTH_BYTES], hasher: &mut crc32fast::Hasher) {
        match &mut self {
            Prefix::V4(bytes) => {
                bytes[V4_BYTES..].copy_from_slice(&masked(bth));
                hasher.update(bytes);
            }
            Prefix::V6(bytes) => {
                bytes[V6_BYTES..].copy_from_slice(&masked(bth));
                hasher.update(bytes);
            }
            Prefix::Grh(bytes) => {
                bytes[GRH_PREFIX_BYTES..].copy_from_slice(&masked(bth));
                hasher.update(bytes);
            }
        }
    }
}

/// A length as a header field. No packet is longer than the field can hold, so any value will do
/// for longer ones: the ICRC belongs to no packet.
fn field_len(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}

/// The BTH with the byte of FECN and BECN set to ones.
fn masked(bth: &[u8; BTH_BYTES]) -> [u8; BTH_BYTES] {
    let mut masked = *bth;
    masked[MARKS_BYTE] = 0xff;
    masked
}

/// Computes the ICRC of a packet piece by piece.
#[derive(Clone, Debug)]
pub struct Icrc(crc32fast::Hasher);

impl Icrc {
    /// Starts with the pseudo header. `udp_payload_len` counts BTH to ICRC, both included.
    pub fn new(pseudo: &Pseudo, udp_payload_len: usize) -> Icrc {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(Prefix::new(pseudo, udp_payload_len).pseudo_header());
        Icrc(hasher)
    }

    /// Adds transport headers, of which the first 12 bytes are the BTH (masks byte 4).
    pub fn headers(&mut self, headers: &[u8]) {
        match headers.split_first_chunk() {
            Some((bth, ext)) => {
                self.0.update(&masked(bth));
                self.0.update(ext);
            }
            None => self.0.update(headers),
        }
    }

    /// Adds payload or pad.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The four bytes that end the packet.
    pub fn finish(self) -> [u8; 4] {
        self.0.finalize().to_le_bytes()
    }
}

/// The ICRC that `packet` carries and the one it should carry, or `None` if it is too short for a
/// BTH and an ICRC.
fn carried_and_computed(pseudo: &Pseudo, packet: &[u8]) -> Option<(u32, u32)> {
    let (covered, carried) = packet.split_last_chunk::<ICRC_BYTES>()?;
    let (bth, rest) = covered.split_first_chunk::<BTH_BYTES>()?;
    let mut hasher = crc32fast::Hasher::new();
    Prefix::new(pseudo, packet.len()).hash_with_bth(bth, &mut hasher);
    hasher.update(rest);
    Some((u32::from_le_bytes(*carried), hasher.finalize()))
}

/// The ICRC for the end of `packet` (BTH to ICRC; the last four bytes are not read), or `None` if
/// it is too short for a BTH and an ICRC.
pub fn compute(pseudo: &Pseudo, packet: &[u8]) -> Option<[u8; 4]> {
    carried_and_computed(pseudo, packet).map(|(_, computed)| computed.to_le_bytes())
}

/// Bytes before a packet that [`seal`] needs.
pub const SEAL_BYTES: usize = V6_BYTES;

/// Writes the ICRC into the last four bytes of the packet (BTH to ICRC) that follows the first
/// [`SEAL_BYTES`] of `room`. Those bytes are used and restored, so they may be the end of another
/// packet. Returns false, and writes nothing, if the packet is too short for a BTH and an ICRC.
///
/// The hasher is slow to start, so it takes the pseudo header and the packet in one piece.
#[must_use]
pub fn seal(pseudo: &Pseudo, room: &mut [u8]) -> bool {
    let Some(len) = room.len().checked_sub(SEAL_BYTES) else {
        return false;
    };
    if len < BTH_BYTES + ICRC_BYTES {
        return false;
    }
    let prefix = Prefix::new(pseudo, len);
    let before = prefix.pseudo_header();
    let start = SEAL_BYTES - before.len();
    let mut saved = [0; SEAL_BYTES];
    saved.copy_from_slice(&room[..SEAL_BYTES]);
    let marks = room[SEAL_BYTES + MARKS_BYTE];
    room[start..SEAL_BYTES].copy_from_slice(before);
    room[SEAL_BYTES + MARKS_BYTE] = 0xff;
    let end = room.len() - ICRC_BYTES;
    let icrc = crc32fast::hash(&room[start..end]).to_le_bytes();
    room[..SEAL_BYTES].copy_from_slice(&saved);
    room[SEAL_BYTES + MARKS_BYTE] = marks;
    room[end..].copy_from_slice(&icrc);
    true
}

/// Whether `packet` (BTH to ICRC) carries the right ICRC.
pub fn verify(pseudo: &Pseudo, packet: &[u8]) -> bool {
    carried_and_computed(pseudo, packet).is_some_and(|(carried, computed)| carried == computed)
}

/// For IPv4 receivers that cannot see the identification field: the value of that field that makes
/// the ICRC of `packet` right; there is at most one. With the expected value in `pseudo` this costs
/// no more than [`verify`]. A corrupted packet passes as one with another identification once in
/// 2^16 times.
///
/// Over IPv6 and in RoCEv1 there is nothing to solve for: `Some(0)` if the ICRC is right.
pub fn solve_id(pseudo: &Pseudo, packet: &[u8]) -> Option<u16> {
    let (carried, computed) = carried_and_computed(pseudo, packet)?;
    let difference = carried ^ computed;
    match *pseudo {
        Pseudo::V4 { id, .. } if difference == 0 => Some(id),
        Pseudo::V4 { id, .. } => id_difference(difference, packet.len()).map(|bits| id ^ bits),
        Pseudo::V6 { .. } | Pseudo::Grh { .. } => (difference == 0).then_some(0),
    }
}

/// Which bits of the identification have to flip to change the ICRC by `difference`.
fn id_difference(difference: u32, udp_payload_len: usize) -> Option<u16> {
    // The CRC register takes in a bit by multiplying by x, so the two bytes of the field are at
    // x^(32 + 8 * the bytes that follow them): 14 of IP, 8 of UDP, then the packet without ICRC.
    let following = 14 + 8 + udp_payload_len - ICRC_BYTES;
    let bits = multiply(difference, inverse_power(following + 4)?);
    // The first bit sent has the highest power and the lowest bit of the first byte, so a pattern
    // of two bytes fills the upper half of the register with its second byte uppermost.
    (bits & 0xffff == 0).then_some(((bits >> 16) as u16).swap_bytes())
}

/// The CRC-32 polynomial; bit 31 - i of a word is the coefficient of x^i.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The constant polynomial 1.
const ONE: u32 = 1 << 31;

/// The product of two polynomials, modulo the CRC polynomial.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut i = 0;
    while i < 32 {
        product ^= b & 0u32.wrapping_sub(a << i >> 31);
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
        i += 1;
    }
    product
}

/// `a` divided by x^8, modulo the CRC polynomial.
const fn divide_by_byte(mut a: u32) -> u32 {
    let mut i = 0;
    while i < 8 {
        let carry = a >> 31;
        a = (a ^ (POLYNOMIAL & 0u32.wrapping_sub(carry))) << 1 | carry;
        i += 1;
    }
    a
}

/// `base^0 ..= base^256`, modulo the CRC polynomial.
const fn powers(base: u32) -> [u32; 257] {
    let mut powers = [ONE; 257];
    let mut i = 1;
    while i < powers.len() {
        powers[i] = multiply(powers[i - 1], base);
        i += 1;
    }
    powers
}

/// x^-8n for n up to 256.
static INVERSE_POWERS: [u32; 257] = powers(divide_by_byte(ONE));

/// x^-(8 * 256)n for n up to 256.
static INVERSE_POWERS_256: [u32; 257] = powers(powers(divide_by_byte(ONE))[256]);

/// x^-8n, or `None` if n exceeds the size of an IP packet.
fn inverse_power(n: usize) -> Option<u32> {
    let high = INVERSE_POWERS_256.get(n >> 8)?;
    Some(multiply(INVERSE_POWERS[n & 0xff], *high))
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;

    fn over_v4(id: u16) -> Pseudo {
        Pseudo::V4 {
            src: Ipv4Addr::new(10, 77, 0, 1),
            dst: Ipv4Addr::new(10, 77, 0, 2),
            id,
            dont_fragment: true,
            src_port: 0xc000,
            dst_port: 4791,
        }
    }

    fn sealed(pseudo: &Pseudo, len: usize) -> Vec<u8> {
        let mut packet: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
        let icrc = compute(pseudo, &packet).expect("long enough");
        packet[len - 4..].copy_from_slice(&icrc);
        packet
    }

    #[test]
    fn solves_every_length_and_bit() {
        for len in [16, 17, 20, 255, 1040, 1043, 4112, 9000, 65_507] {
            for bit in 0..16 {
                let packet = sealed(&over_v4(1 << bit), len);
                assert_eq!(solve_id(&over_v4(0), &packet), Some(1 << bit), "len {len}");
                assert_eq!(solve_id(&over_v4(1 << bit), &packet), Some(1 << bit));
            }
        }
    }

    #[test]
    fn piecewise_equals_whole() {
        let pseudo = over_v4(7);
        let packet = sealed(&pseudo, 1040);
        let mut icrc = Icrc::new(&pseudo, packet.len());
        icrc.headers(&packet[..28]);
        icrc.update(&packet[28..500]);
        icrc.update(&packet[500..1036]);
        assert_eq!(icrc.finish(), packet[1036..]);
    }

    #[test]
    fn sealing_equals_computing_and_leaves_everything_else() {
        let over_v6 = Pseudo::V6 {
            src: Ipv6Addr::LOCALHOST,
            dst: Ipv6Addr::UNSPECIFIED,
            src_port: 0xc000,
            dst_port: 4791,
        };
        let grh = Pseudo::Grh { sgid: Ipv6Addr::LOCALHOST, dgid: Ipv6Addr::UNSPECIFIED };
        for pseudo in [over_v4(7), over_v6, grh] {
            for len in [16, 17, 60, 255, 1040, 4112] {
                let packet = sealed(&pseudo, len);
                let mut room: Vec<u8> = (0..SEAL_BYTES).map(|i| i as u8).collect();
                let before = room.clone();
                room.extend(&packet[..len - ICRC_BYTES]);
                room.extend([0x55; ICRC_BYTES]);
                assert!(seal(&pseudo, &mut room), "len {len}");
                assert_eq!(room.split_at(SEAL_BYTES), (&before[..], &packet[..]), "len {len}");
            }
            for len in 0..SEAL_BYTES + 16 {
                let mut room = vec![0x55; len];
                assert!(!seal(&pseudo, &mut room));
                assert_eq!(room, vec![0x55; len]);
            }
        }
    }

    #[test]
    fn congestion_marks_are_not_covered() {
        let pseudo = over_v4(7);
        let mut packet = sealed(&pseudo, 64);
        packet[4] ^= 0xc0;
        assert!(verify(&pseudo, &packet));
        packet[5] ^= 1;
        assert!(!verify(&pseudo, &packet));
    }

    #[test]
    fn short_and_oversized_packets_are_refused() {
        for len in 0..16 {
            assert!(!verify(&over_v4(0), &vec![0; len]));
            assert_eq!(solve_id(&over_v4(0), &vec![0; len]), None);
        }
        assert_eq!(solve_id(&over_v4(0), &vec![1; 100_000]), None);
    }
}
