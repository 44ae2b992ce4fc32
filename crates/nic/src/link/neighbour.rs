//! The Ethernet address that packets for a destination go to, as the kernel knows it.
//!
//! The kernel's routes and neighbour table are queried by netlink, the answers kept for a second. Nothing is resolved
//! here: while the kernel knows no usable address, a packet through a socket of its own makes it resolve one. An
//! entry that the kernel wants to confirm again needs one such packet for the same reason.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use roce::{Duration, Time};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// How long an answer holds.
const HOLDS: Duration = Duration::from_millis(1_000);

/// How soon an unresolved destination is queried again.
const RETRY: Duration = Duration::from_millis(10);

/// Destinations remembered. Others take the place of the one that was used least recently.
const MOST: usize = 256;

/// linux/rtnetlink.h, linux/neighbour.h.
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;
const GET_NEIGHBOUR: u16 = 30;
const REQUEST: u16 = 1;
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_INTERFACE: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const NEIGHBOUR_DESTINATION: u16 = 1;
const NEIGHBOUR_ADDRESS: u16 = 2;
/// REACHABLE, DELAY, PROBE, NOARP, PERMANENT; and STALE.
const CONFIRMED: u16 = 0x02 | 0x08 | 0x10 | 0x40 | 0x80;
const STALE: u16 = 0x04;

/// Bytes of a netlink header, and of what follows it in a message about a route or a neighbour.
const HEADER: usize = 16;
const FIXED: usize = 12;

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hop {
    /// In a frame to this address.
    Ethernet([u8; 6]),
    /// The same, but the kernel has just said that it wants to confirm the address.
    Stale([u8; 6]),
    /// Not in a frame: the kernel has just said that it knows no address, or that the way is not over this interface.
    Unknown,
    /// The same, as it said some milliseconds ago.
    StillUnknown,
}

/// Whom packets for a destination are given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextHop {
    /// The destination itself, on this interface.
    Direct,
    /// A router on this interface.
    Gateway(IpAddr),
    /// The destination is an address of this machine.
    ThisMachine,
    /// No route, or one over another interface.
    Elsewhere,
}

#[derive(Debug)]
struct Known {
    dest: IpAddr,
    hop: Hop,
    until: Time,
    used: Time,
}

/// The neighbours of one interface.
#[derive(Debug)]
pub(crate) struct Neighbours {
    netlink: OwnedFd,
    ifindex: u32,
    /// Whether packets for other networks go to their routers.
    is_routed: bool,
    sequence: u32,
    known: Vec<Known>,
}

impl Neighbours {
    pub(crate) fn new(ifindex: u32, is_routed: bool) -> io::Result<Neighbours> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // No protocol: NETLINK_ROUTE.
        let netlink = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        Ok(Neighbours { netlink, ifindex, is_routed, sequence: 0, known: Vec::with_capacity(MOST) })
    }

    /// Where the next packet for `dest` goes.
    pub(crate) fn hop(&mut self, now: Time, dest: IpAddr) -> Hop {
        let place = self.known.iter().position(|known| known.dest == dest);
        if let Some(known) = place.and_then(|at| self.known.get_mut(at))
            && now < known.until
        {
            known.used = now;
            return known.hop;
        }
        let this = self.query(dest).unwrap_or(Hop::Unknown);
        let (hop, holds) = match this {
            Hop::Ethernet(address) | Hop::Stale(address) => (Hop::Ethernet(address), HOLDS),
            Hop::Unknown | Hop::StillUnknown => (Hop::StillUnknown, RETRY),
        };
        let entry = Known { dest, hop, until: now + holds, used: now };
        let oldest = || (0..self.known.len()).min_by_key(|&at| self.known[at].used);
        match place.or_else(|| if self.known.len() < MOST { None } else { oldest() }) {
            Some(at) => self.known[at] = entry,
            None => self.known.push(entry),
        }
        this
    }

    /// What the kernel knows now.
    fn query(&mut self, dest: IpAddr) -> Option<Hop> {
        let next = match self.next_hop(dest) {
            NextHop::Direct => dest,
            NextHop::Gateway(router) if self.is_routed => router,
            _ => return None,
        };
        let mut fixed = [0; FIXED];
        fixed[0] = family(next);
        fixed[4..8].copy_from_slice(&self.ifindex.to_ne_bytes());
        let reply = self.ask(GET_NEIGHBOUR, NEW_NEIGHBOUR, fixed, NEIGHBOUR_DESTINATION, next)?;
        let state = u16::from_ne_bytes(reply.get(8..10)?.try_into().ok()?);
        let address = attribute(&reply, NEIGHBOUR_ADDRESS)?.try_into().ok()?;
        match state {
            _ if state & CONFIRMED != 0 => Some(Hop::Ethernet(address)),
            _ if state & STALE != 0 => Some(Hop::Stale(address)),
            _ => None,
        }
    }

    /// Whom packets for `dest` are given to, as the kernel's routes are now.
    pub(crate) fn next_hop(&mut self, dest: IpAddr) -> NextHop {
        self.route(dest).unwrap_or(NextHop::Elsewhere)
    }

    fn route(&mut self, dest: IpAddr) -> Option<NextHop> {
        const UNICAST: u8 = 1;
        const LOCAL: u8 = 2;
        let mut fixed = [0; FIXED];
        fixed[0] = family(dest);
        fixed[1] = if dest.is_ipv4() { 32 } else { 128 };
        let reply = self.ask(GET_ROUTE, NEW_ROUTE, fixed, ROUTE_DESTINATION, dest)?;
        let out = attribute(&reply, ROUTE_INTERFACE)?;
        match *reply.get(7)? {
            LOCAL => return Some(NextHop::ThisMachine),
            UNICAST if out == self.ifindex.to_ne_bytes() => {}
            _ => return None,
        }
        let Some(gateway) = attribute(&reply, ROUTE_GATEWAY) else {
            return Some(NextHop::Direct);
        };
        Some(NextHop::Gateway(match gateway.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(gateway).ok()?),
            _ => IpAddr::from(<[u8; 16]>::try_from(gateway).ok()?),
        }))
    }

    /// Sends a request about one address, and returns the reply behind its netlink header. The kernel answers before
    /// the request returns, so nothing waits.
    fn ask(
        &mut self,
        request: u16,
        expected: u16,
        fixed: [u8; FIXED],
        kind: u16,
        address: IpAddr,
    ) -> Option<Vec<u8>> {
        self.sequence = self.sequence.wrapping_add(1);
        let octets = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        // Every interface has the network of link-local addresses.
        let is_link_local = matches!(address, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let names_interface = request == GET_ROUTE && is_link_local;
        let mut message = Vec::with_capacity(64);
        let bytes = HEADER + FIXED + 4 + octets.len() + if names_interface { 8 } else { 0 };
        message.extend((bytes as u32).to_ne_bytes());
        message.extend(request.to_ne_bytes());
        message.extend(REQUEST.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        message.extend(fixed);
        message.extend((4 + octets.len() as u16).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(octets);
        if names_interface {
            message.extend(8_u16.to_ne_bytes());
            message.extend(ROUTE_INTERFACE.to_ne_bytes());
            message.extend(self.ifindex.to_ne_bytes());
        }
        let fd = self.netlink.as_raw_fd();
        // SAFETY: the message is readable for its length.
        let sent = unsafe { libc::send(fd, message.as_ptr().cast(), message.len(), 0) };
        if sent < 0 {
            return None;
        }
        let mut reply = vec![0; 4096];
        loop {
            // SAFETY: the buffer is writable for its length.
            let len = unsafe { libc::recv(fd, reply.as_mut_ptr().cast(), reply.len(), 0) };
            let got = reply.get(..usize::try_from(len).ok()?)?;
            let header = got.first_chunk::<HEADER>()?;
            let [l0, l1, l2, l3, t0, t1, _, _, s0, s1, s2, s3, ..] = *header;
            // A late reply to an earlier request.
            if u32::from_ne_bytes([s0, s1, s2, s3]) != self.sequence {
                continue;
            }
            let end = (u32::from_ne_bytes([l0, l1, l2, l3]) as usize).min(got.len());
            let found = u16::from_ne_bytes([t0, t1]) == expected;
            return found.then(|| got.get(HEADER..end).map(<[u8]>::to_vec)).flatten();
        }
    }
}

fn family(address: IpAddr) -> u8 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

/// The value of an attribute of a reply.
fn attribute(reply: &[u8], wanted: u16) -> Option<&[u8]> {
    let mut rest = reply.get(FIXED..)?;
    loop {
        let &[l0, l1, k0, k1] = rest.first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = rest.get(4..len)?;
        if u16::from_ne_bytes([k0, k1]) == wanted {
            return Some(value);
        }
        rest = rest.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_with_impossible_lengths_end_the_search() {
        let mut reply = vec![0; FIXED];
        reply.extend([5, 0, 9, 0, 1, 0, 0, 0, 8, 0, 4, 0, 7, 0, 0, 0]);
        assert_eq!(attribute(&reply, 9), Some(&[1][..]));
        assert_eq!(attribute(&reply, 4), Some(&[7, 0, 0, 0][..]));
        assert_eq!(attribute(&reply, 5), None);
        for len in [0_u8, 3, 200] {
            let mut bad = reply.clone();
            bad[FIXED] = len;
            assert_eq!(attribute(&bad, 4), None, "{len}");
        }
        assert!((0..reply.len()).all(|len| attribute(&reply[..len], 4).is_none()));
    }
}
