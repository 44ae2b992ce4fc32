//! The largest packet on the path to a peer.
//!
//! RoCE packets are never fragmented (the don't-fragment flag is set), so the path MTU of a queue
//! pair must fit the outgoing link and the operator's setting for the route
//! (`ip route add … mtu N`). What the kernel has learnt from ICMP is ignored, here as by the
//! sockets, because anyone can forge it. `IP_MTU` returns the minimum of the three, so the routing
//! table is queried directly (rtnetlink(7)).

use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::interfaces;
use crate::netlink::{Message, Request, Socket, attribute, u32_at};

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
    let mut kernel = Socket::open()?;
    let name = look_up(&mut kernel, local, remote, 0)?.interface.and_then(interfaces::name_of);
    let link = interfaces::mtu_of(&name.ok_or(io::ErrorKind::NotFound)?)?;
    let said = look_up(&mut kernel, local, remote, RTM_F_FIB_MATCH)?.mtu;
    let mtu = said.map_or(link, |said| said.min(link));
    Ok(mtu.saturating_sub(headers + AROUND_PAYLOAD))
}

/// Numbers of `linux/rtnetlink.h`.
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_METRICS: u16 = 8;
const RTAX_MTU: u16 = 2;
/// Returns the entry of the routing table, without what was learnt since.
const RTM_F_FIB_MATCH: u32 = 0x2000;
/// `rtmsg`, after which attributes follow.
const ROUTE_BYTES: usize = 12;

/// What the kernel reports about a route.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// Number of the interface that packets leave by; a table's entry may leave it open.
    interface: Option<u32>,
    mtu: Option<u32>,
}

fn look_up(kernel: &mut Socket, from: IpAddr, to: SocketAddr, flags: u32) -> io::Result<Found> {
    let mut buffer = [0_u8; 4096];
    found(&kernel.ask(&mut question(from, to, flags), &mut buffer)?)
}

fn question(from: IpAddr, to: SocketAddr, flags: u32) -> Request {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let bits = if to.is_ipv4() { 32 } else { 128 };
    let [f0, f1, f2, f3] = flags.to_ne_bytes();
    let header = [family, bits, bits, 0, 0, 0, 0, 0, f0, f1, f2, f3];
    let question =
        Request::new(RTM_GETROUTE, 0, &header).address(RTA_DST, to.ip()).address(RTA_SRC, from);
    match to {
        SocketAddr::V6(to) if to.scope_id() != 0 => {
            question.attribute(RTA_OIF, &to.scope_id().to_ne_bytes())
        }
        _ => question,
    }
}

/// Parses the kernel's reply.
fn found(answer: &Message<'_>) -> io::Result<Found> {
    let attributes = match answer.kind {
        RTM_NEWROUTE => answer.body.get(ROUTE_BYTES..),
        _ => None,
    };
    let attributes = attributes.ok_or(io::ErrorKind::InvalidData)?;
    let metrics = attribute(attributes, RTA_METRICS).unwrap_or_default();
    let word = |value| u32_at(value, 0);
    let interface = attribute(attributes, RTA_OIF).and_then(word);
    Ok(Found { interface, mtu: attribute(metrics, RTAX_MTU).and_then(word) })
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
        let whole = Request::new(RTM_NEWROUTE, 0, &[0; ROUTE_BYTES])
            .attribute(RTA_OIF, &7_u32.to_ne_bytes())
            .nest(RTA_METRICS, |metrics| metrics.attribute(RTAX_MTU, &1400_u32.to_ne_bytes()));
        let mut body = whole.body().to_vec();
        let read = |kind, body: &[u8]| found(&Message::new(kind, body));
        let both = Found { interface: Some(7), mtu: Some(1400) };
        assert_eq!(read(RTM_NEWROUTE, &body).expect("whole"), both);
        for len in 0..body.len() {
            match read(RTM_NEWROUTE, &body[..len]) {
                Ok(found) => assert!(len >= ROUTE_BYTES && found.mtu.is_none(), "{len}"),
                Err(_) => assert!(len < ROUTE_BYTES, "{len}"),
            }
        }
        let other = read(RTM_NEWROUTE ^ 1, &body).expect_err("no route");
        assert_eq!(other.kind(), io::ErrorKind::InvalidData);
        // An attribute that claims no length at all ends the search.
        body[ROUTE_BYTES] = 0;
        let none = Found { interface: None, mtu: None };
        assert_eq!(read(RTM_NEWROUTE, &body).expect("whole"), none);
    }
}
