//! Network interfaces: what becomes a device, with its addresses, MTU and speed.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::settings;

/// An interface that is up and has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    /// Its name: `eth0`.
    pub(crate) name: String,
    /// Its number in the kernel.
    pub(crate) index: u32,
    /// Largest IP packet in bytes.
    pub(crate) mtu: u32,
    /// Hardware address; zero for loopback and tunnels.
    pub(crate) mac: [u8; 6],
    /// Speed in Mbit/s, where the driver tells one.
    pub(crate) speed_mbps: Option<u32>,
    /// Its addresses in the order of the GID table: link-local IPv6, IPv4, other IPv6.
    pub(crate) addresses: Vec<IpAddr>,
    loopback: bool,
}

/// Interfaces that become devices, in the order of the device list: those that were asked for, or
/// all, loopback last.
pub(crate) fn interfaces() -> Vec<Interface> {
    let mut found = scan();
    match settings::devices() {
        Some(names) => {
            let place =
                |interface: &Interface| names.iter().position(|name| *name == interface.name);
            found.retain(|interface| place(interface).is_some());
            found.sort_by_key(place);
        }
        None => found.sort_by_key(|interface| (interface.loopback, interface.index)),
    }
    found
}

/// The interface with this name, as it is now.
pub(crate) fn interface(name: &str) -> Option<Interface> {
    scan().into_iter().find(|interface| interface.name == name)
}

fn scan() -> Vec<Interface> {
    let mut by_name: BTreeMap<String, Interface> = BTreeMap::new();
    for_each_address(|name, flags, address| {
        let entry = by_name.entry(name.to_owned()).or_insert_with(|| describe(name, flags));
        if !entry.addresses.contains(&address) {
            entry.addresses.push(address);
        }
    });
    let mut found: Vec<Interface> = by_name.into_values().collect();
    for interface in &mut found {
        interface.addresses.sort_by_key(gid_rank);
        // A GID index has 8 bits in address handles.
        interface.addresses.truncate(128);
    }
    found
}

/// Place in the GID table; addresses of one rank keep the kernel's order.
fn gid_rank(address: &IpAddr) -> u8 {
    match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => 0,
        IpAddr::V4(_) => 1,
        IpAddr::V6(_) => 2,
    }
}

fn describe(name: &str, flags: u32) -> Interface {
    let c_name = std::ffi::CString::new(name).unwrap_or_default();
    // SAFETY: the name is a C string.
    let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
    Interface {
        name: name.to_owned(),
        index,
        mtu: attribute(name, "mtu").and_then(|text| text.parse().ok()).unwrap_or(1500),
        mac: attribute(name, "address").and_then(|text| parse_mac(&text)).unwrap_or_default(),
        speed_mbps: attribute(name, "speed").and_then(|text| text.parse().ok()),
        addresses: Vec::new(),
        loopback: flags & libc::IFF_LOOPBACK as u32 != 0,
    }
}

fn attribute(interface: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/{name}")).ok()?;
    Some(text.trim().to_owned())
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// Calls `visit` with every address of every interface that is up.
fn for_each_address(mut visit: impl FnMut(&str, u32, IpAddr)) {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a place for the result.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return;
    }
    let mut at = list;
    while !at.is_null() {
        // SAFETY: nodes of the list are valid until it is freed below.
        let node = unsafe { &*at };
        at = node.ifa_next;
        // SAFETY: names in the list are C strings, addresses null or valid for their family.
        let (name, address) = unsafe { (CStr::from_ptr(node.ifa_name), ip_of(node.ifa_addr)) };
        let up = node.ifa_flags & libc::IFF_UP as u32 != 0;
        if let (true, Ok(name), Some(address)) = (up, name.to_str(), address) {
            visit(name, node.ifa_flags, address);
        }
    }
    // SAFETY: the list came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
}

/// # Safety
/// `address` is null or points to a socket address that is whole for its family.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: as the caller promises; the family says which type it is.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let raw = (*address.cast::<libc::sockaddr_in>()).sin_addr.s_addr;
                Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(raw))))
            }
            libc::AF_INET6 => {
                let raw = (*address.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr;
                Some(IpAddr::V6(Ipv6Addr::from(raw)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_with_its_address() {
        let lo = interface("lo").expect("every machine has a loopback interface");
        assert!(lo.addresses.contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert!(lo.mtu >= 1500);
    }

    #[test]
    fn the_gid_table_has_link_local_then_ipv4_then_other_ipv6() {
        let parse = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut addresses = ["fd00::1", "10.0.0.1", "fe80::1"].map(parse);
        addresses.sort_by_key(gid_rank);
        assert_eq!(addresses, ["fe80::1", "10.0.0.1", "fd00::1"].map(parse));
    }

    #[test]
    fn hardware_addresses() {
        assert_eq!(parse_mac("02:00:5e:10:00:ff"), Some([2, 0, 0x5e, 0x10, 0, 0xff]));
        assert_eq!(parse_mac("02:00"), None);
        assert_eq!(parse_mac("00:00:00:00:00:00:00"), None);
    }
}
