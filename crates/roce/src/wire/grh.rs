//! The global route header (IBA 8.3), which RoCEv1 packets have in place of IP and UDP (annex A16).
//!
//! Its form is that of an IPv6 header, and its GIDs are addresses: an IPv6 address is its own GID,
//! an IPv4 address is mapped into one (`::ffff:a.b.c.d`). Version and next header are not
//! represented: they have one value.

use core::net::{IpAddr, Ipv6Addr};

/// Length of the header.
pub const GRH_BYTES: usize = 40;

/// Version of the header.
pub(super) const VERSION: u8 = 6;

/// Next header: transport headers of InfiniBand follow.
pub(super) const NEXT_HEADER: u8 = 0x1b;

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
}
