//! What a wire that writes whole Ethernet frames needs from the kernel: the interface with an
//! address, its own Ethernet address, and those of its neighbours.

mod neighbour;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::interfaces::{Interface, interfaces};

pub(crate) use neighbour::{Hop, Neighbours, NextHop};

/// Length of an Ethernet header without a tag.
pub(crate) const ETHERNET_BYTES: usize = 14;

/// The interface, other than loopback, that has the address.
pub(crate) fn interface_of(ip: IpAddr) -> io::Result<Option<Interface>> {
    let listed = interfaces()?;
    Ok(listed.into_iter().find(|one| !one.loopback && one.addresses.contains(&ip)))
}

/// The Ethernet address of an interface of the namespace that the descriptor, of any socket,
/// belongs to; none for other kinds of links.
pub(crate) fn hardware_address(
    any: BorrowedFd<'_>,
    interface: &Interface,
) -> io::Result<Option<[u8; 6]>> {
    // SAFETY: all zeroes is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = interface.name.bytes().take(request.ifr_name.len() - 1);
    request.ifr_name.iter_mut().zip(name).for_each(|(to, from)| *to = from as libc::c_char);
    // SAFETY: the request outlives the call and has a name that ends with a zero byte.
    let rc = unsafe { libc::ioctl(any.as_raw_fd(), libc::SIOCGIFHWADDR as _, &raw mut request) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it has filled in this member.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Ok(None);
    }
    let mut mac = [0; 6];
    mac.iter_mut().zip(address.sa_data).for_each(|(to, from)| *to = from as u8);
    Ok(Some(mac))
}
