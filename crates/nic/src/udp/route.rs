//! How large a packet may be on the way to a peer, as the kernel knows it.
//!
//! RoCE packets are never fragmented (the don't-fragment flag is set), so the path MTU of a queue pair
//! must fit the link. The kernel answers for the first link and for what it has learnt of the path; it
//! is asked by connecting a socket, which sends nothing.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

/// Transport bytes around the payload of the longest packet: BTH, RETH, immediate and ICRC.
const AROUND_PAYLOAD: u32 = 12 + 16 + 4 + 4;

/// Most payload bytes that one RoCE packet from `local` to `remote` can carry.
///
/// # Errors
/// When there is no route, or the two addresses are of different IP versions.
pub fn payload_limit(local: IpAddr, remote: SocketAddr) -> io::Result<u32> {
    let socket = UdpSocket::bind((local, 0))?;
    socket.connect(remote)?;
    let (link, headers) = match local {
        IpAddr::V4(_) => (option(&socket, libc::IPPROTO_IP, libc::IP_MTU)?, 20 + 8),
        IpAddr::V6(_) => (option(&socket, libc::IPPROTO_IPV6, libc::IPV6_MTU)?, 40 + 8),
    };
    Ok(link.saturating_sub(headers + AROUND_PAYLOAD))
}

fn option(socket: &UdpSocket, level: libc::c_int, name: libc::c_int) -> io::Result<u32> {
    let mut value = MaybeUninit::<libc::c_int>::zeroed();
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` is room for one int and `len` says so; the socket is open.
    let status = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut len)
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, so initialised whatever the kernel wrote.
    let value = unsafe { value.assume_init() };
    u32::try_from(value).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_carries_the_largest_path_mtu() {
        let to = SocketAddr::from(([127, 0, 0, 9], 4791));
        let limit = payload_limit([127, 0, 0, 8].into(), to).expect("loopback");
        assert!(limit >= 4096, "{limit}");
        let v6 = payload_limit("::1".parse().expect("good"), to);
        assert!(v6.is_err(), "no way from IPv6 to IPv4");
    }
}
