//! Multicast groups of a device.
//!
//! A socket bound to a unicast address never receives multicast packets, so each group has a socket
//! of its own, bound to the group. Processes share it by SO_REUSEPORT; for multicast the kernel
//! delivers a packet to every such socket rather than to one of them (tried on Linux 6.18: three
//! sockets, three copies of each packet, segmented sends included). IP_MULTICAST_ALL is off, so
//! memberships of other sockets have no effect.

use std::io;
use std::net::IpAddr;

use rustix::net::sockopt;

use super::DeviceConfig;
use super::ports::{Kind, Port, Ports, bind};
use crate::udp::UdpError;
use crate::udp::socket::{Setting, Socket};

/// Most multicast groups of one device in one process.
pub const MAX_GROUPS: usize = 256;

/// `IPV6_MULTICAST_ALL` of linux/in6.h, since Linux 4.20.
const IPV6_MULTICAST_ALL: libc::c_int = 29;

const ONLY_ITS_GROUP_V4: &[Setting] =
    &[("IP_MULTICAST_ALL", libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)];
const ONLY_ITS_GROUP_V6: &[Setting] =
    &[("IPV6_MULTICAST_ALL", libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0)];

impl Ports {
    pub(super) fn join(&mut self, config: &DeviceConfig, group: IpAddr) -> io::Result<()> {
        let group = group.to_canonical();
        if let Some(Kind::Group { users }) = self.group_mut(group).map(|port| &mut port.kind) {
            *users += 1;
            return Ok(());
        }
        let via = via_for(config, group)?;
        let groups = self.all.iter().filter(|port| matches!(port.kind, Kind::Group { .. }));
        if groups.count() >= MAX_GROUPS {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let socket = open(config, group).map_err(|error| match error {
            UdpError::Bind { source, .. } | UdpError::Option { source, .. } => source,
            other => io::Error::other(other),
        })?;
        self.add(Port { socket, kind: Kind::Group { users: 1 }, via }).map(|_| ())
    }

    pub(super) fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        let group = group.to_canonical();
        let not_joined = || io::Error::from(io::ErrorKind::NotFound);
        let port = self.group_mut(group).ok_or_else(not_joined)?;
        if let Kind::Group { users } = &mut port.kind
            && *users > 1
        {
            *users -= 1;
            return Ok(());
        }
        // Closing the socket ends the membership.
        let place = self.all.iter().position(|port| port.socket.local.ip() == group);
        self.remove(place.ok_or_else(not_joined)?)
    }

    fn group_mut(&mut self, group: IpAddr) -> Option<&mut Port> {
        let is_it = |port: &&mut Port| port.socket.local.ip() == group;
        self.all.iter_mut().filter(|port| matches!(port.kind, Kind::Group { .. })).find(is_it)
    }
}

/// The first address of the group's IP version: packets to the group count as arriving there.
fn via_for(config: &DeviceConfig, group: IpAddr) -> io::Result<u8> {
    if !group.is_multicast() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let same = config.addresses.iter().position(|ip| ip.is_ipv4() == group.is_ipv4());
    let via = same.and_then(|via| u8::try_from(via).ok());
    via.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

fn open(config: &DeviceConfig, group: IpAddr) -> Result<Socket, UdpError> {
    let socket = bind(config, group, config.port, true)?;
    let fd = &socket.fd;
    let joined = match group {
        IpAddr::V4(group) => {
            socket.apply(ONLY_ITS_GROUP_V4)?;
            let any = std::net::Ipv4Addr::UNSPECIFIED;
            sockopt::set_ip_add_membership_with_ifindex(fd, &group, &any, config.ifindex)
        }
        IpAddr::V6(group) => {
            socket.apply(ONLY_ITS_GROUP_V6)?;
            sockopt::set_ipv6_add_membership(fd, &group, config.ifindex)
        }
    };
    let local = socket.local;
    joined.map_err(|errno| UdpError::Option {
        local,
        option: "ADD_MEMBERSHIP",
        source: errno.into(),
    })?;
    Ok(socket)
}
