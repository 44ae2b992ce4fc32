//! Network interfaces of this machine (of this network namespace) and their addresses, as the kernel
//! lists them now.
//!
//! Nothing is cached, because addresses change: callers query the list each time. IPv6 addresses that
//! are still being checked for duplicates, which takes a second or two, are in the list; without them
//! the others would move within tables of addresses. Confirmed duplicates are not.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ptr;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{recv, send, socket_with};

use crate::sockaddr::Name;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its number, which is the scope of its link-local addresses.
    pub index: u32,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// Whether it is up.
    pub up: bool,
    /// Whether it is up and has a carrier.
    pub running: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// Its addresses, in the kernel's order.
    pub addresses: Vec<IpAddr>,
}

/// All interfaces, by number.
///
/// # Errors
/// When the kernel refuses the list.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found = BTreeMap::new();
    walk(|entry| {
        // SAFETY: the list's names are C strings as long as the list lives, which is until `walk` ends.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        let name = name.to_string_lossy().into_owned();
        let interface = found.entry(name.clone()).or_insert_with(|| Interface {
            index: index_of(entry),
            mtu: 0,
            up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
            running: entry.ifa_flags & UP_AND_RUNNING == UP_AND_RUNNING,
            loopback: entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
            addresses: Vec::new(),
            name,
        });
        interface.addresses.extend(address_of(entry).map(|address| address.ip()));
    })?;
    let mut found: Vec<Interface> = found.into_values().collect();
    let duplicates = duplicates_v6();
    for interface in &mut found {
        interface.addresses.retain(|address| !duplicates.contains(&(*address, interface.index)));
        interface.mtu = mtu_of(&interface.name).unwrap_or(0);
    }
    found.sort_by_key(|interface| interface.index);
    Ok(found)
}

/// Every address of this machine; those of IPv6 links with their scope, ports 0. Cheaper than
/// [`interfaces`], because it queries addresses only.
pub(crate) fn addresses() -> io::Result<Vec<SocketAddr>> {
    let mut found = Vec::new();
    walk(|entry| found.extend(address_of(entry)))?;
    Ok(found)
}

const UP_AND_RUNNING: u32 = (libc::IFF_UP | libc::IFF_RUNNING) as u32;

/// Whether packets to this address stay on the machine, in this network namespace.
pub(crate) fn is_here(ip: IpAddr) -> bool {
    ip.is_loopback() || addresses().is_ok_and(|all| all.iter().any(|own| own.ip() == ip))
}

/// Calls `visit` with each entry of the kernel's list: one per interface and address.
fn walk(mut visit: impl FnMut(&libc::ifaddrs)) -> io::Result<()> {
    let mut first: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: `first` is a place for the pointer to the list.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut next = first;
    // SAFETY: the list's links are null or lead to the next entry, until it is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        visit(entry);
        next = entry.ifa_next;
    }
    // SAFETY: `first` came from getifaddrs and nothing of the list is used after this.
    unsafe { libc::freeifaddrs(first) };
    Ok(())
}

fn address_of(entry: &libc::ifaddrs) -> Option<SocketAddr> {
    // SAFETY: null, or a socket address that lives as long as the list.
    let family = i32::from(unsafe { entry.ifa_addr.as_ref() }?.sa_family);
    let len = match family {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: an address of this family has `len` bytes, which `copied` requires.
    let name = unsafe { Name::copied(entry.ifa_addr.cast(), len) };
    name.decode(len as libc::socklen_t)
}

fn index_of(entry: &libc::ifaddrs) -> u32 {
    // SAFETY: the list's names are C strings.
    unsafe { libc::if_nametoindex(entry.ifa_name) }
}

/// IPv6 addresses that another machine uses too, with their interface.
fn duplicates_v6() -> Vec<(IpAddr, u32)> {
    // Without IPv6 there is no such file. Threads may be in network namespaces of their own.
    let text = fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap_or_default();
    text.lines().filter_map(duplicate_line).collect()
}

/// `IFA_F_DADFAILED` of linux/if_addr.h.
const DUPLICATE: u32 = 0x08;

/// Address, interface, prefix length, scope, flags: all hexadecimal.
fn duplicate_line(line: &str) -> Option<(IpAddr, u32)> {
    let mut fields = line.split_ascii_whitespace();
    let address = u128::from_str_radix(fields.next()?, 16).ok()?;
    let index = u32::from_str_radix(fields.next()?, 16).ok()?;
    let flags = u32::from_str_radix(fields.nth(2)?, 16).ok()?;
    (flags & DUPLICATE != 0).then(|| (IpAddr::V6(address.into()), index))
}

/// Numbers of `linux/rtnetlink.h` and `linux/if_link.h`.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const NLM_F_REQUEST: u16 = 1;
const NLA_F_NESTED: u16 = 1 << 15;
const IFLA_QDISC: u16 = 6;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
/// The header of netlink, and `ifinfomsg`, after which attributes follow.
const LINK_BYTES: usize = 16 + 16;

/// The queueing discipline of an interface: `noqueue` if its packets are not queued.
///
/// # Errors
/// When the kernel does not report it.
pub(crate) fn qdisc_of(index: u32) -> io::Result<String> {
    let link = link_of(index)?;
    let qdisc = attribute(link_attributes(&link), IFLA_QDISC).and_then(text);
    qdisc.ok_or(io::ErrorKind::InvalidData.into())
}

/// The kind of an interface that is made by software, as `veth`; none for hardware and loopback.
///
/// # Errors
/// When the kernel does not report the interface.
pub(crate) fn kind_of(index: u32) -> io::Result<Option<String>> {
    let link = link_of(index)?;
    let info = attribute(link_attributes(&link), IFLA_LINKINFO);
    Ok(info.and_then(|info| attribute(info, IFLA_INFO_KIND)).and_then(text))
}

/// The kernel's message about an interface.
fn link_of(index: u32) -> io::Result<Vec<u8>> {
    // Protocol 0 of netlink sockets is NETLINK_ROUTE.
    let kernel = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let mut request = [0; LINK_BYTES];
    request[..4].copy_from_slice(&(LINK_BYTES as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&RTM_GETLINK.to_ne_bytes());
    request[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    request[20..24].copy_from_slice(&index.to_ne_bytes());
    send(&kernel, &request, SendFlags::empty())?;
    let mut answer = vec![0_u8; 32 << 10];
    // The kernel has replied by the time that `send` returns.
    let (len, _) = recv(&kernel, &mut answer[..], RecvFlags::DONTWAIT)?;
    answer.truncate(len);
    match answer.get(4..6) {
        Some(kind) if *kind == RTM_NEWLINK.to_ne_bytes() => Ok(answer),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn link_attributes(link: &[u8]) -> &[u8] {
    link.get(LINK_BYTES..).unwrap_or_default()
}

/// The value of an attribute of this number, the first one.
fn attribute(mut attributes: &[u8], number: u16) -> Option<&[u8]> {
    loop {
        let &[l0, l1, n0, n1] = attributes.first_chunk()?;
        let len = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = attributes.get(4..len)?;
        if u16::from_ne_bytes([n0, n1]) & !NLA_F_NESTED == number {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

fn text(value: &[u8]) -> Option<String> {
    Some(CStr::from_bytes_until_nul(value).ok()?.to_string_lossy().into_owned())
}

/// The MTU of an interface of this network namespace (`/sys` may show another's).
pub(crate) fn mtu_of(name: &str) -> io::Result<u32> {
    let fd = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: all zeroes is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: it ends the string.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(room)) {
        *to = from as libc::c_char;
    }
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    // SAFETY: SIOCGIFMTU reads the name from the request and writes the MTU into it.
    let rc = unsafe { libc::ioctl(raw, libc::SIOCGIFMTU as _, &raw mut request) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just filled this variant of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The name of an interface, if there is one with this number.
pub(crate) fn name_of(index: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the size that the call may fill.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    Some(CStr::from_bytes_until_nul(&name).ok()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_there() {
        let all = interfaces().expect("a list");
        let lo = all.iter().find(|interface| interface.loopback).expect("loopback");
        assert!(lo.addresses.contains(&IpAddr::from([127, 0, 0, 1])), "{lo:?}");
        assert!(lo.running && lo.mtu >= 16384, "{lo:?}");
        assert_eq!(name_of(lo.index).as_deref(), Some(lo.name.as_str()));
        assert_eq!(name_of(u32::MAX), None);
        assert!(mtu_of("no such interface with a long name").is_err());
        let every: usize = all.iter().map(|interface| interface.addresses.len()).sum();
        assert!(addresses().expect("a list").len() >= every);
    }

    #[test]
    fn attributes_are_found_and_cut_ones_are_not() {
        let entry = |number: u16, value: &[u8]| {
            let len = 4 + value.len();
            let mut bytes = [(len as u16).to_ne_bytes(), number.to_ne_bytes()].concat();
            bytes.extend_from_slice(value);
            bytes.resize(len.next_multiple_of(4), 0);
            bytes
        };
        let info = entry(IFLA_INFO_KIND, b"veth\0");
        let all =
            [entry(IFLA_QDISC, b"htb\0"), entry(IFLA_LINKINFO | NLA_F_NESTED, &info)].concat();
        assert_eq!(attribute(&all, IFLA_QDISC).and_then(text).as_deref(), Some("htb"));
        let kind = attribute(&all, IFLA_LINKINFO).and_then(|info| attribute(info, IFLA_INFO_KIND));
        assert_eq!(kind.and_then(text).as_deref(), Some("veth"));
        assert_eq!(attribute(&all, 99), None);
        for len in 0..all.len() {
            assert_eq!(attribute(&all[..len], IFLA_LINKINFO), None, "of {len} bytes");
        }
        // A length below that of its own header would never end.
        assert_eq!(attribute(&[0; 64], IFLA_QDISC), None);
        let lo = interfaces().expect("a list").into_iter().find(|one| one.loopback);
        assert_eq!(kind_of(lo.expect("loopback").index).expect("a link"), None);
    }

    #[test]
    fn duplicate_addresses_are_known() {
        let good = "00000000000000000000000000000001 01 80 10 80       lo";
        let tentative = "fe80000000000000000000fffe000002 0a 40 20 c0     eth0";
        let duplicate = "fe80000000000000000000fffe000001 0a 40 20 c8     eth0";
        assert_eq!(duplicate_line(good), None);
        assert_eq!(duplicate_line(tentative), None);
        let (address, index) = duplicate_line(duplicate).expect("a duplicate");
        assert_eq!((address.to_string().as_str(), index), ("fe80::ff:fe00:1", 10));
        assert_eq!(duplicate_line("zz 01 80 10 c8 lo"), None);
        assert_eq!(duplicate_line(""), None);
    }
}
