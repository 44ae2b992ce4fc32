//! The sockets of a device: for each address one of its own and one on the shared port, and one for
//! each multicast group.
//!
//! A slot is claimed by binding its port on every address; the search moves on at the first address
//! where the port is taken. It starts at a random slot, so processes that start together do not
//! race for one number.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use rustix::net::sockopt;
use rustix::rand::{GetRandomFlags, getrandom};

use super::{DeviceConfig, MAX_SLOT, process_port};
use crate::ready::ReadySet;
use crate::udp::UdpError;
use crate::udp::send::USUAL_HOP_LIMIT;
use crate::udp::socket::{Plan, Setting, Socket, overrun};

/// The kind of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Packets for this process from this machine, and packets that other processes forward.
    Own,
    /// Packets from anywhere for any process of this machine.
    Shared,
    /// Packets to a multicast group.
    Group {
        /// How often it was joined.
        users: u32,
    },
}

/// A socket that packets arrive at.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) socket: Socket,
    pub(super) kind: Kind,
    /// Index of the address.
    pub(super) via: u8,
}

impl Port {
    pub(super) fn overrun(&self) -> Option<u32> {
        overrun(&self.socket.fd)
    }
}

/// Where the packets of one address leave.
#[derive(Debug)]
pub(super) struct Outlet {
    /// Place of the socket of this process.
    own: usize,
    /// Place of the shared socket, if it could be bound.
    shared: Option<usize>,
    pub(super) why_not_shared: Option<String>,
}

/// All sockets of a device.
#[derive(Debug)]
pub(super) struct Ports {
    pub(super) all: Vec<Port>,
    /// By index of the address.
    pub(super) outlets: Vec<Outlet>,
    /// Over all of them, each named by its place in `all`.
    pub(super) readiness: ReadySet,
    /// The port that had packets last.
    pub(super) hot: usize,
    rounds: u32,
}

/// How often ports other than the hot one come first, in rounds.
const FAIRNESS_ROUNDS: u32 = 16;

impl Ports {
    /// Claims a slot and binds the shared port where possible.
    pub(super) fn open(config: &DeviceConfig) -> Result<(u8, Ports), UdpError> {
        let readiness = ReadySet::new().map_err(UdpError::Socket)?;
        let (slot, own) = claim(config)?;
        let (all, outlets) = (Vec::new(), Vec::new());
        let mut ports = Ports { all, outlets, readiness, hot: 0, rounds: 0 };
        for (via, socket) in (0..).zip(own) {
            ports.add_address(config, via, socket).map_err(UdpError::Socket)?;
        }
        Ok((slot, ports))
    }

    fn add_address(&mut self, config: &DeviceConfig, via: u8, own: Socket) -> io::Result<()> {
        let ip = own.local.ip();
        let own = self.add(Port { socket: own, kind: Kind::Own, via })?;
        let (shared, why_not_shared) = match bind(config, ip, config.port, true) {
            Ok(socket) => (Some(self.add(Port { socket, kind: Kind::Shared, via })?), None),
            Err(error) => {
                let hint = error.hint().map(|hint| format!("; hint: {hint}"));
                (None, Some(format!("{error}{}", hint.unwrap_or_default())))
            }
        };
        self.outlets.push(Outlet { own, shared, why_not_shared });
        Ok(())
    }

    /// Adds a port to the watched ones and returns its place.
    pub(super) fn add(&mut self, port: Port) -> io::Result<usize> {
        let place = self.all.len();
        self.readiness.add(port.socket.fd.as_fd(), place as u64)?;
        self.all.push(port);
        Ok(place)
    }

    /// Closes the port at this place; the last one moves there.
    pub(super) fn remove(&mut self, place: usize) -> io::Result<()> {
        self.readiness.remove(self.all[place].socket.fd.as_fd())?;
        self.all.swap_remove(place);
        self.hot = 0;
        if let Some(moved) = self.all.get(place) {
            self.readiness.rename(moved.socket.fd.as_fd(), place as u64)?;
        }
        Ok(())
    }

    /// Whether it is the hot port's turn.
    pub(super) fn prefer_hot(&mut self) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        !self.rounds.is_multiple_of(FAIRNESS_ROUNDS)
    }

    /// Places of ports with packets, at most eight per call.
    pub(super) fn ready(&self) -> impl Iterator<Item = usize> + use<> {
        self.readiness.take().map(|place| place as usize)
    }

    /// The socket that packets from the address with this index leave from.
    pub(super) fn sending(&self, via: u8) -> Option<&Socket> {
        let outlet = self.outlets.get(usize::from(via))?;
        self.all.get(outlet.shared.unwrap_or(outlet.own)).map(|port| &port.socket)
    }

    /// This process's own socket at the address with this index.
    pub(super) fn private(&self, via: u8) -> Option<&Socket> {
        let outlet = self.outlets.get(usize::from(via))?;
        self.all.get(outlet.own).map(|port| &port.socket)
    }
}

/// Claims the first free slot from a random one on.
fn claim(config: &DeviceConfig) -> Result<(u8, Vec<Socket>), UdpError> {
    let Some(first) = config.addresses.first() else {
        return Err(UdpError::NoAddress);
    };
    if config.addresses.len() > usize::from(u8::MAX) {
        return Err(UdpError::Socket(io::Error::other("more than 255 addresses")));
    }
    let start = random_byte();
    for step in 0..MAX_SLOT {
        let slot = 1 + ((u16::from(start) + u16::from(step)) % u16::from(MAX_SLOT)) as u8;
        match bind_everywhere(config, process_port(slot)) {
            Err(UdpError::Bind { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {}
            sockets => return Ok((slot, sockets?)),
        }
    }
    Err(UdpError::NoSlot(*first))
}

fn random_byte() -> u8 {
    let mut byte = [0];
    // Without randomness every process starts at the same slot, and the search takes longer.
    let _ = getrandom(&mut byte, GetRandomFlags::empty());
    byte[0]
}

fn bind_everywhere(config: &DeviceConfig, port: u16) -> Result<Vec<Socket>, UdpError> {
    config.addresses.iter().map(|ip| bind(config, *ip, port, false)).collect()
}

/// A socket at one of the addresses, with every option that packets of a device need.
pub(super) fn bind(
    config: &DeviceConfig,
    ip: IpAddr,
    port: u16,
    shared: bool,
) -> Result<Socket, UdpError> {
    let local = config.at(ip, port);
    if ip.is_unspecified() || (ip.is_multicast() && !shared) {
        return Err(UdpError::NotSpecific(local));
    }
    let (buffer_bytes, gro) = (config.socket_buffer_bytes, config.gro);
    let socket = Socket::open(&Plan { local, buffer_bytes, gro, shared })?;
    socket.apply(if ip.is_ipv4() { SETTINGS_V4 } else { SETTINGS_V6 })?;
    send_multicast_to(&socket, ip, config.ifindex).map_err(|source| UdpError::Option {
        local,
        option: "MULTICAST_IF",
        source,
    })?;
    Ok(socket)
}

const HOPS: libc::c_int = USUAL_HOP_LIMIT as libc::c_int;

/// Hop limits are reported, and outgoing packets have the usual one wherever they go.
const SETTINGS_V4: &[Setting] = &[
    ("IP_RECVTTL", libc::IPPROTO_IP, libc::IP_RECVTTL, 1),
    ("IP_TTL", libc::IPPROTO_IP, libc::IP_TTL, HOPS),
    ("IP_MULTICAST_TTL", libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, HOPS),
];
const SETTINGS_V6: &[Setting] = &[
    ("IPV6_RECVHOPLIMIT", libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1),
    ("IPV6_UNICAST_HOPS", libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, HOPS),
    ("IPV6_MULTICAST_HOPS", libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, HOPS),
];

fn send_multicast_to(socket: &Socket, ip: IpAddr, ifindex: u32) -> io::Result<()> {
    let fd = &socket.fd;
    match ip {
        _ if ifindex == 0 => {}
        IpAddr::V4(_) => {
            let any = &std::net::Ipv4Addr::UNSPECIFIED;
            sockopt::set_ip_multicast_if_with_ifindex(fd, any, any, ifindex)?;
        }
        IpAddr::V6(_) => sockopt::set_ipv6_multicast_if(fd, ifindex)?,
    }
    Ok(())
}
