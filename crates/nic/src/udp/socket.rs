//! The socket of a UDP wire: the options it requires, those it prefers, and what the kernel
//! granted.
//!
//! The socket is unconnected, with path-MTU discovery in probe mode. Linux then sends IPv4
//! identification 0 (and 0, 1, 2 … within one segmented send) with DF set, which the sender must
//! know because the ICRC covers both, and packets may be as long as the link carries. What ICMP
//! reports of the path is ignored, because anyone can forge it: one message would stop all long
//! packets to a peer for ten minutes. IPv6 has no identification, but RDMA devices send UDP
//! checksum 0 over it, which a socket refuses unless told otherwise.
//!
//! Nothing sets IP_RECVERR: an unconnected socket without it never reports an ICMP error.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::UdpError;
use crate::interfaces;

/// What to open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Address and port to bind.
    pub(crate) local: SocketAddr,
    /// Socket buffer to request in each direction.
    pub(crate) buffer_bytes: u32,
    /// Let the kernel join datagrams.
    pub(crate) gro: bool,
    /// Share the port with other processes of the same user (SO_REUSEPORT).
    pub(crate) shared: bool,
}

/// A bound socket and the options that took effect.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    /// As bound, the port filled in.
    pub(crate) local: SocketAddr,
    /// Effective sizes in bytes, as the kernel reports them (it doubles the requested size).
    pub(crate) send_buffer_bytes: u64,
    pub(crate) receive_buffer_bytes: u64,
    /// Why received datagrams are not joined, if so.
    pub(crate) why_no_gro: Option<String>,
}

/// A socket option: its name, level, number and value.
pub(crate) type Setting = (&'static str, c_int, c_int, c_int);

impl Socket {
    pub(crate) fn open(plan: &Plan) -> Result<Socket, UdpError> {
        let local = plan.local;
        let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(family, SocketType::DGRAM, flags, None)
            .map_err(|errno| UdpError::Socket(errno.into()))?;
        require(&fd, local)?;
        if plan.shared {
            apply(&fd, local, &[("SO_REUSEPORT", libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)])?;
        }
        let send_buffer_bytes = enlarge(&fd, &SEND_BUFFER, plan.buffer_bytes);
        let receive_buffer_bytes = enlarge(&fd, &RECEIVE_BUFFER, plan.buffer_bytes);
        let why_no_gro = turn_on_gro(&fd, plan.gro).err();
        let local = match bind_to(&fd, local) {
            Err(UdpError::Bind { source, .. }) if is_tentative(local, &source) => {
                apply(&fd, local, FREE)?;
                bind_to(&fd, local)?
            }
            bound => bound?,
        };
        Ok(Socket { fd, local, send_buffer_bytes, receive_buffer_bytes, why_no_gro })
    }

    /// Sets required options.
    pub(crate) fn apply(&self, settings: &[Setting]) -> Result<(), UdpError> {
        apply(&self.fd, self.local, settings)
    }
}

const INTERFACE_MTU: c_int = libc::IPV6_PMTUDISC_INTERFACE;

/// Options without which packets would be wrong or unseen.
fn require(fd: &OwnedFd, local: SocketAddr) -> Result<(), UdpError> {
    let v4: &[Setting] = &[
        ("IP_MTU_DISCOVER", libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
        ("IP_RECVTOS", libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
    ];
    let v6: &[Setting] = &[
        ("IPV6_V6ONLY", libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1),
        // As probe mode, but the route does not learn either. Over IPv4 this mode would clear DF.
        ("IPV6_MTU_DISCOVER", libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, INTERFACE_MTU),
        ("IPV6_RECVTCLASS", libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
        ("UDP_NO_CHECK6_RX", libc::IPPROTO_UDP, libc::UDP_NO_CHECK6_RX, 1),
    ];
    apply(fd, local, if local.is_ipv4() { v4 } else { v6 })
}

fn apply(fd: &OwnedFd, local: SocketAddr, settings: &[Setting]) -> Result<(), UdpError> {
    for &(name, level, option, value) in settings {
        set(fd, level, option, value).map_err(|source| UdpError::Option {
            local,
            option: name,
            source,
        })?;
    }
    Ok(())
}

/// Allows binding an address that cannot be used yet.
const FREE: &[Setting] = &[("IPV6_FREEBIND", libc::IPPROTO_IPV6, libc::IPV6_FREEBIND, 1)];

/// Whether binding failed because the address, one of this machine's, is still being checked for
/// duplicates.
fn is_tentative(local: SocketAddr, refusal: &io::Error) -> bool {
    local.is_ipv6()
        && refusal.kind() == io::ErrorKind::AddrNotAvailable
        && interfaces::addresses().is_ok_and(|all| all.iter().any(|own| own.ip() == local.ip()))
}

fn bind_to(fd: &OwnedFd, local: SocketAddr) -> Result<SocketAddr, UdpError> {
    bind(fd, &local).map_err(|errno| UdpError::Bind { local, source: errno.into() })?;
    let bound = rustix::net::getsockname(fd).map_err(|errno| UdpError::Socket(errno.into()))?;
    SocketAddr::try_from(bound).map_err(|errno| UdpError::Socket(errno.into()))
}

fn turn_on_gro(fd: &OwnedFd, wanted: bool) -> Result<(), String> {
    if !wanted {
        return Err(String::from("turned off by configuration"));
    }
    set(fd, libc::IPPROTO_UDP, libc::UDP_GRO, 1)
        .map_err(|error| format!("the kernel refused UDP_GRO: {error}"))
}

/// A buffer-size option: the privileged one, then the one with a system-wide limit.
pub(crate) struct BufferOption {
    force: c_int,
    plain: c_int,
}

pub(crate) const SEND_BUFFER: BufferOption =
    BufferOption { force: libc::SO_SNDBUFFORCE, plain: libc::SO_SNDBUF };
pub(crate) const RECEIVE_BUFFER: BufferOption =
    BufferOption { force: libc::SO_RCVBUFFORCE, plain: libc::SO_RCVBUF };

/// Requests `bytes` and returns what the kernel granted, 0 when it does not report it.
pub(crate) fn enlarge(fd: &OwnedFd, option: &BufferOption, bytes: u32) -> u64 {
    let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX) / 2;
    let forced = set(fd, libc::SOL_SOCKET, option.force, bytes);
    // Without privilege the plain option is capped at net.core.*mem_max; it never fails.
    let _ = forced.or_else(|_| set(fd, libc::SOL_SOCKET, option.plain, bytes));
    get(fd, libc::SOL_SOCKET, option.plain).map_or(0, |value| value.max(0) as u64)
}

/// Index of the drop count among the values of SO_MEMINFO (`SK_MEMINFO_DROPS`), and how many there
/// are.
const DROPS: usize = 8;
const MEMINFO_VALUES: usize = 9;

/// Datagrams, or joined runs of them, that have not fitted the receive buffer so far; `None` when
/// the kernel does not report it (before 4.12).
pub(crate) fn overrun(fd: &OwnedFd) -> Option<u32> {
    let mut values = [0u32; MEMINFO_VALUES];
    let mut len = size_of_val(&values) as libc::socklen_t;
    // SAFETY: `values` is writable for `len` bytes; both live through the call.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            values.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    (rc == 0 && len as usize == size_of_val(&values)).then_some(values[DROPS])
}

pub(crate) fn set(fd: &OwnedFd, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: `value` is a readable int of the length given, for the time of the call.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get(fd: &OwnedFd, level: c_int, option: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: `value` is a writable int and `len` says so; both live through the call.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len)
    };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
