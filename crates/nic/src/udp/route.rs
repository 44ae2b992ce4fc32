//! The largest packet on the path to a peer.
//!
//! RoCE packets are never fragmented (the don't-fragment flag is set), so the path MTU of a queue pair
//! must fit the outgoing link and the operator's setting for the route (`ip route add … mtu N`). What
//! the kernel has learnt from ICMP is ignored, here as by the sockets, because anyone can forge it.
//! `IP_MTU` returns the minimum of the three, so the routing table is queried directly (rtnetlink(7)).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{recv, send, socket_with};

use crate::interfaces;

/// Transport bytes around the payload of the longest packet: BTH, RETH, immediate and ICRC.
const AROUND_PAYLOAD: u32 = 12 + 16 + 4 + 4;

/// Most payload bytes that one RoCE packet from `local` to `remote` can carry.
///
/// # Errors
/// When there is no route, or the two addresses are of different IP versions.
pub fn payload_limit(local: IpAddr, remote: SocketAddr) -> io::Result<u32> {
    let headers = match (local, remote) {
        (IpAddr::V4(_), SocketAddr::V4(_)) => 20 + 8,
        (IpAddr::V6(_), SocketAddr::V6(_)) => 40 + 8,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    // Protocol 0 of netlink sockets is NETLINK_ROUTE.
    let kernel = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let name = look_up(&kernel, local, remote, 0)?.interface.and_then(interfaces::name_of);
    let link = interfaces::mtu_of(&name.ok_or(io::ErrorKind::NotFound)?)?;
    let said = look_up(&kernel, local, remote, RTM_F_FIB_MATCH)?.mtu;
    let mtu = said.map_or(link, |said| said.min(link));
    Ok(mtu.saturating_sub(headers + AROUND_PAYLOAD))
}

/// Numbers of `linux/netlink.h` and `linux/rtnetlink.h`.
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_METRICS: u16 = 8;
const RTAX_MTU: u16 = 2;
/// Returns the entry of the routing table, without what was learnt since.
const RTM_F_FIB_MATCH: u32 = 0x2000;
const HEADER_BYTES: usize = 16;
/// Header and `rtmsg`, after which attributes follow.
const ROUTE_BYTES: usize = HEADER_BYTES + 12;

/// What the kernel reports about a route.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// Number of the interface that packets leave by; a table's entry may leave it open.
    interface: Option<u32>,
    mtu: Option<u32>,
}

fn look_up(kernel: &OwnedFd, from: IpAddr, to: SocketAddr, flags: u32) -> io::Result<Found> {
    send(kernel, &request(from, to, flags), SendFlags::empty())?;
    let mut answer = [0_u8; 4096];
    // The kernel has replied by the time that `send` returns.
    let (len, _) = recv(kernel, &mut answer[..], RecvFlags::DONTWAIT)?;
    found(&answer[..len.min(answer.len())])
}

fn request(from: IpAddr, to: SocketAddr, flags: u32) -> Vec<u8> {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let bits = if to.is_ipv4() { 32 } else { 128 };
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[4..6].copy_from_slice(&RTM_GETROUTE.to_ne_bytes());
    bytes[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([family, bits, bits, 0, 0, 0, 0, 0]);
    bytes.extend(flags.to_ne_bytes());
    let mut put = |name: u16, value: &[u8]| {
        // Addresses and numbers are whole words, so nothing is padded.
        bytes.extend((4 + value.len() as u16).to_ne_bytes());
        bytes.extend(name.to_ne_bytes());
        bytes.extend(value);
    };
    for (name, ip) in [(RTA_DST, to.ip()), (RTA_SRC, from)] {
        match ip {
            IpAddr::V4(ip) => put(name, &ip.octets()),
            IpAddr::V6(ip) => put(name, &ip.octets()),
        }
    }
    if let SocketAddr::V6(to) = to
        && to.scope_id() != 0
    {
        put(RTA_OIF, &to.scope_id().to_ne_bytes());
    }
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes
}

/// Parses the kernel's reply.
fn found(answer: &[u8]) -> io::Result<Found> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = answer.get(4..6).and_then(|kind| Some(u16::from_ne_bytes(kind.try_into().ok()?)));
    match kind {
        Some(RTM_NEWROUTE) => {
            let attributes = answer.get(ROUTE_BYTES..).ok_or_else(malformed)?;
            let metrics = attribute(attributes, RTA_METRICS).unwrap_or_default();
            let interface = attribute(attributes, RTA_OIF).and_then(word);
            Ok(Found { interface, mtu: attribute(metrics, RTAX_MTU).and_then(word) })
        }
        Some(NLMSG_ERROR) => {
            let errno = answer.get(HEADER_BYTES..).and_then(word).ok_or_else(malformed)?;
            Err(io::Error::from_raw_os_error(errno.wrapping_neg() as i32))
        }
        _ => Err(malformed()),
    }
}

fn word(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

/// The value of the first attribute with this name.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let &[l0, l1, n0, n1] = attributes.first_chunk()?;
        let len = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = attributes.get(4..len)?;
        if u16::from_ne_bytes([n0, n1]) == wanted {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
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

    #[test]
    fn answers_cut_short_or_of_another_kind_are_errors_or_say_less() {
        let mut answer = vec![0; ROUTE_BYTES];
        answer[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        let mtu = [&8_u16.to_ne_bytes()[..], &RTAX_MTU.to_ne_bytes(), &1400_u32.to_ne_bytes()];
        for (name, value) in [(RTA_OIF, 7_u32.to_ne_bytes().to_vec()), (RTA_METRICS, mtu.concat())]
        {
            answer.extend((4 + value.len() as u16).to_ne_bytes());
            answer.extend(name.to_ne_bytes());
            answer.extend(value);
        }
        let whole = Found { interface: Some(7), mtu: Some(1400) };
        assert_eq!(found(&answer).expect("whole"), whole);
        for len in 0..answer.len() {
            match found(&answer[..len]) {
                Ok(found) => assert!(len >= ROUTE_BYTES && found.mtu.is_none(), "{len}"),
                Err(_) => assert!(len < ROUTE_BYTES, "{len}"),
            }
        }
        // An attribute that claims no length at all ends the search.
        answer[ROUTE_BYTES] = 0;
        assert_eq!(found(&answer).expect("whole"), Found { interface: None, mtu: None });
        answer[4] ^= 1;
        assert_eq!(found(&answer).expect_err("no route").kind(), io::ErrorKind::InvalidData);
        answer[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        answer[HEADER_BYTES..][..4].copy_from_slice(&(-libc::ENETUNREACH).to_ne_bytes());
        let unreachable = found(&answer).expect_err("no route");
        assert_eq!(unreachable.raw_os_error(), Some(libc::ENETUNREACH));
    }
}
