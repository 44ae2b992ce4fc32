//! Network interfaces of this machine (of this network namespace) and their addresses, as the
//! kernel lists them now.
//!
//! Nothing is cached, because addresses change: callers query the list each time. IPv6 addresses
//! that are still being checked for duplicates, which takes a second or two, are in the list;
//! without them the others would move within tables of addresses. Confirmed duplicates are not.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ptr;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::netlink::{Request, Socket, attribute, text_of};
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
        // SAFETY: the list's names are C strings as long as the list lives, which is until `walk`
        // ends.
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
pub fn is_here(ip: IpAddr) -> bool {
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
const IFLA_QDISC: u16 = 6;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
/// `ifinfomsg`, after which attributes follow.
const LINK_BYTES: usize = 16;

/// The queueing discipline of an interface: `noqueue` if its packets are not queued.
///
/// # Errors
/// When the kernel does not report it.
pub(crate) fn qdisc_of(index: u32) -> io::Result<String> {
    let qdisc = attribute(&attributes_of(index)?, IFLA_QDISC).map(text_of);
    qdisc.ok_or(io::ErrorKind::InvalidData.into())
}

/// The kind of an interface that is made by software, as `veth`; none for hardware and loopback.
///
/// # Errors
/// When the kernel does not report the interface.
pub(crate) fn kind_of(index: u32) -> io::Result<Option<String>> {
    Ok(kind(&attributes_of(index)?))
}

fn kind(attributes: &[u8]) -> Option<String> {
    let info = attribute(attributes, IFLA_LINKINFO)?;
    attribute(info, IFLA_INFO_KIND).map(text_of)
}

/// The attributes of an interface, as the kernel reports it.
fn attributes_of(index: u32) -> io::Result<Vec<u8>> {
    let mut header = [0; LINK_BYTES];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut buffer = vec![0; 32 << 10];
    let mut question = Request::new(RTM_GETLINK, 0, &header);
    let link = Socket::open()?.ask(&mut question, &mut buffer)?;
    let attributes = link.body.get(LINK_BYTES..).filter(|_| link.kind == RTM_NEWLINK);
    Ok(attributes.ok_or(io::ErrorKind::InvalidData)?.to_vec())
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
    fn kinds_are_found_and_cut_ones_are_not() {
        let link = Request::new(RTM_NEWLINK, 0, &[])
            .text(IFLA_QDISC, "htb")
            .nest(IFLA_LINKINFO, |info| info.text(IFLA_INFO_KIND, "veth"));
        let all = link.body();
        assert_eq!(kind(all).as_deref(), Some("veth"));
        for len in 0..all.len() {
            assert_eq!(kind(&all[..len]), None, "of {len} bytes");
        }
        let lo = interfaces().expect("a list").into_iter().find(|one| one.loopback);
        let index = lo.expect("loopback").index;
        assert_eq!(kind_of(index).expect("a link"), None);
        assert!(!qdisc_of(index).expect("a link").is_empty());
        assert!(kind_of(u32::MAX).is_err());
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
