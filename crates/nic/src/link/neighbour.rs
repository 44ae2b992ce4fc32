//! The Ethernet address that packets for a destination go to, as the kernel knows it.
//!
//! The kernel's routes and neighbour table are queried by netlink, the answers kept for a second.
//! Nothing is resolved here: while the kernel knows no usable address, a packet through a socket of
//! its own makes it resolve one. An entry that the kernel wants to confirm again needs one such
//! packet for the same reason.

use std::io;
use std::net::IpAddr;

use roce::{Duration, Time};

use crate::netlink::{Request, Socket, attribute, u16_at};

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
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_INTERFACE: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const NEIGHBOUR_DESTINATION: u16 = 1;
const NEIGHBOUR_ADDRESS: u16 = 2;
/// REACHABLE, DELAY, PROBE, NOARP, PERMANENT; and STALE.
const CONFIRMED: u16 = 0x02 | 0x08 | 0x10 | 0x40 | 0x80;
const STALE: u16 = 0x04;

/// Bytes of the fixed header of a message about a route or a neighbour (`rtmsg`, `ndmsg`).
const FIXED: usize = 12;

/// Bytes of the kernel's reply about one route or neighbour.
const REPLY_BYTES: usize = 4096;

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hop {
    /// In a frame to this address.
    Ethernet([u8; 6]),
    /// The same, but the kernel has just said that it wants to confirm the address.
    Stale([u8; 6]),
    /// Not in a frame: the kernel has just said that it knows no address, or that the way is not
    /// over this interface.
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
    netlink: Socket,
    ifindex: u32,
    /// Whether packets for other networks go to their routers.
    is_routed: bool,
    known: Vec<Known>,
}

impl Neighbours {
    pub(crate) fn new(ifindex: u32, is_routed: bool) -> io::Result<Neighbours> {
        let netlink = Socket::open()?;
        Ok(Neighbours { netlink, ifindex, is_routed, known: Vec::with_capacity(MOST) })
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
        let question = Request::new(GET_NEIGHBOUR, 0, &fixed).address(NEIGHBOUR_DESTINATION, next);
        let reply = self.ask(question, NEW_NEIGHBOUR)?;
        let state = u16_at(&reply, 8)?;
        let address = attribute(reply.get(FIXED..)?, NEIGHBOUR_ADDRESS)?.try_into().ok()?;
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
        let mut question = Request::new(GET_ROUTE, 0, &fixed).address(ROUTE_DESTINATION, dest);
        // Every interface has the network of link-local addresses.
        if matches!(dest, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
            question = question.attribute(ROUTE_INTERFACE, &self.ifindex.to_ne_bytes());
        }
        let reply = self.ask(question, NEW_ROUTE)?;
        let attributes = reply.get(FIXED..)?;
        let out = attribute(attributes, ROUTE_INTERFACE)?;
        match *reply.get(7)? {
            LOCAL => return Some(NextHop::ThisMachine),
            UNICAST if out == self.ifindex.to_ne_bytes() => {}
            _ => return None,
        }
        let Some(gateway) = attribute(attributes, ROUTE_GATEWAY) else {
            return Some(NextHop::Direct);
        };
        Some(NextHop::Gateway(match gateway.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(gateway).ok()?),
            _ => IpAddr::from(<[u8; 16]>::try_from(gateway).ok()?),
        }))
    }

    /// The kernel's reply to a question, if it is of the expected kind.
    fn ask(&mut self, mut question: Request, expected: u16) -> Option<Vec<u8>> {
        let mut buffer = [0; REPLY_BYTES];
        let reply = self.netlink.ask(&mut question, &mut buffer).ok()?;
        (reply.kind == expected).then(|| reply.body.to_vec())
    }
}

fn family(address: IpAddr) -> u8 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}
