//! The global route header (IBA 8.3), which RoCEv1 packets have in place of IP and UDP (annex A16).
//!
//! Its form is that of an IPv6 header, and its GIDs are addresses: an IPv6 address is its own GID, an IPv4 address is
//! mapped into one (`::ffff:a.b.c.d`). Version and next header are not represented: they have one value.

use core::net::{IpAddr, Ipv6Addr};

use super::{FrameError, field};

/// Length of the header.
pub const GRH_BYTES: usize = 40;

/// Version of the header.
pub(in crate::wire) const VERSION: u8 = 6;

/// Next header: transport headers of InfiniBand follow.
pub(in crate::wire) const NEXT_HEADER: u8 = 0x1b;

/// The fields chosen by the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// Traffic class. No RoCEv1 switch uses its low bits as ECN.
    pub traffic_class: u8,
    /// Flow label; its low 20 bits are encoded.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source GID.
    pub sgid: Ipv6Addr,
    /// Destination GID.
    pub dgid: Ipv6Addr,
}

/// The GID of an address.
pub const fn gid_of(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

impl Grh {
    /// The header in front of `payload_len` bytes: BTH to ICRC.
    pub fn encode(&self, payload_len: u16) -> [u8; GRH_BYTES] {
        let Grh { traffic_class, flow_label, hop_limit, sgid, dgid } = *self;
        let version = u32::from(VERSION) << 28;
        let first = version | u32::from(traffic_class) << 20 | flow_label & 0x000f_ffff;
        let mut out = [0; GRH_BYTES];
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&payload_len.to_be_bytes());
        out[6] = NEXT_HEADER;
        out[7] = hop_limit;
        out[8..24].copy_from_slice(&sgid.octets());
        out[24..].copy_from_slice(&dgid.octets());
        out
    }

    /// Decodes the header at the start of `bytes`; returns it with the bytes that it counts and those after.
    pub(super) fn split(bytes: &[u8]) -> Result<(Grh, &[u8], &[u8]), FrameError> {
        let length = |claimed, have| FrameError::Length { layer: "GRH", claimed, have };
        let (header, rest) =
            bytes.split_first_chunk::<GRH_BYTES>().ok_or_else(|| length(GRH_BYTES, bytes.len()))?;
        let [a, b, c, d, _, _, next, hop_limit, ref gids @ ..] = *header;
        let first = u32::from_be_bytes([a, b, c, d]);
        if a >> 4 != VERSION {
            return Err(FrameError::GrhVersion(a >> 4));
        }
        if next != NEXT_HEADER {
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
}
