//! GIDs are IP addresses: IPv6 as they are, IPv4 mapped into IPv6 (RoCEv2, annex A17).

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use roce::wire::ROCE_PORT;

use crate::abi::ibv_gid;

/// The GID of an address.
pub(crate) fn of_ip(address: IpAddr) -> ibv_gid {
    let v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    ibv_gid { raw: v6.octets() }
}

/// The address of a GID.
pub(crate) fn to_ip(gid: &ibv_gid) -> IpAddr {
    // SAFETY: every bit pattern is 16 bytes.
    let v6 = Ipv6Addr::from(unsafe { gid.raw });
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// The destination of packets to an address, through the interface with number `scope`.
pub(crate) fn socket_address(address: IpAddr, scope: u32) -> SocketAddr {
    match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_multicast() => {
            SocketAddr::V6(SocketAddrV6::new(v6, ROCE_PORT, 0, scope))
        }
        _ => SocketAddr::new(address, ROCE_PORT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back() {
        for text in ["10.1.2.3", "fd00::7", "fe80::1", "239.1.1.1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(to_ip(&of_ip(address)), address);
        }
    }

    #[test]
    fn link_local_addresses_get_the_scope() {
        let address = socket_address("fe80::1".parse().unwrap(), 3);
        assert_eq!(address.to_string(), "[fe80::1%3]:4791");
    }
}
