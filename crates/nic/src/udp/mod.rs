//! The UDP wire: RoCEv2 packets through an ordinary socket, without privilege.
//!
//! A call to `send` turns runs of equal-length packets for one destination into single segmented sends
//! (UDP_SEGMENT) that gather headers, payload and ICRC from where they lie; a call to `receive` takes
//! what the kernel has joined (UDP_GRO) apart again. Both make one system call for many packets, which
//! is what makes a socket carry tens of gigabits a second.
//!
//! - The wire owns IP, UDP and the ICRC. It computes the ICRC with the addresses, ports and
//!   identification that the kernel is going to send, and verifies it with those it can see. The IPv4
//!   identification of a received packet is not visible through a socket: it is expected to be the
//!   place in the joined buffer, and solved for otherwise ([`roce::wire::icrc::solve_id`]).
//! - The local address must be a specific one, because the ICRC covers it.
//! - Nothing queues here. A packet that the kernel does not take within [`SEND_WAIT`] is dropped and
//!   counted, as on any network.
//! - Whatever arrives is untrusted: it is counted by reason and never panics (C7).
//! - Segmentation is given up, once and with a reason, on kernels or devices that refuse it.

mod counters;
pub(crate) mod message;
pub(crate) mod receive;
mod route;
pub(crate) mod send;
pub(crate) mod socket;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use roce::verbs::Qpn;
use roce::wire::ROCE_PORT;
use roce::wire::icrc::Pseudo;
use roce::world::{Memory, Path, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};
use thiserror::Error;

pub use counters::{RxCounters, SharingCounters, TxCounters, TxDropped, UdpCounters, Unparsable};

use receive::Receiver;
pub use route::payload_limit;
use send::{Route, Sender};
use socket::{Plan, Socket};

use crate::capture::Capture;

/// How long one call of `send` waits for room in the socket buffer, in all.
pub const SEND_WAIT: Duration = Duration::from_millis(2);

/// What to do about the ICRC of arriving packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IcrcCheck {
    /// Drop packets whose ICRC is wrong.
    #[default]
    Verify,
    /// The same with all 32 bits over IPv4 too: a socket's packets only with an identification that this
    /// wire itself sends, others only from where the identification can be seen. [`UdpWire`]s, which
    /// cannot see it, then hear only their own kind; devices use a packet socket
    /// ([`crate::device::DeviceConfig::check`]).
    Strict,
    /// Take them all: only for finding out why a peer's packets are refused.
    Off,
}

impl fmt::Display for IcrcCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IcrcCheck::Verify => {
                "32 bits over IPv6, and over IPv4 where the identification is as expected; else 16"
            }
            IcrcCheck::Strict => "all 32 bits",
            IcrcCheck::Off => "not checked",
        })
    }
}

/// How to open a wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpConfig {
    /// Address and port to bind. The address must be one of this machine's, not a wildcard.
    pub local: SocketAddr,
    /// What to do about wrong ICRCs.
    pub check: IcrcCheck,
    /// Socket buffer to ask for in each direction, in bytes as the kernel accounts them. The kernel
    /// may give less: see [`UdpWire::socket_buffer_bytes`].
    pub socket_buffer_bytes: u32,
    /// Use segmented sends where the kernel has them.
    pub gso: bool,
    /// Let the kernel join datagrams where it can.
    pub gro: bool,
}

impl UdpConfig {
    /// RoCEv2's port on `ip`, everything else at its default.
    pub fn new(ip: IpAddr) -> UdpConfig {
        UdpConfig::at(SocketAddr::new(ip, ROCE_PORT))
    }

    /// The same on any port; 0 lets the kernel choose.
    pub fn at(local: SocketAddr) -> UdpConfig {
        UdpConfig {
            local,
            check: IcrcCheck::Verify,
            socket_buffer_bytes: 16 << 20,
            gso: true,
            gro: true,
        }
    }
}

/// Why a wire could not be opened.
#[derive(Debug, Error)]
pub enum UdpError {
    /// A wildcard or multicast address.
    #[error("cannot use {0} as RoCE address")]
    NotSpecific(SocketAddr),
    /// A device without addresses.
    #[error("a device needs at least one address")]
    NoAddress,
    /// As many processes as there are numbers for have the device open.
    #[error("254 processes use RoCE on {0} already")]
    NoSlot(IpAddr),
    /// No socket at all.
    #[error("no UDP socket: {0}")]
    Socket(#[source] io::Error),
    /// The kernel lacks something that RoCE needs.
    #[error("{local}: the kernel refused {option}: {source}")]
    Option {
        /// The address to be bound.
        local: SocketAddr,
        /// The socket option.
        option: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The address is taken or foreign.
    #[error("cannot bind {local}: {source}")]
    Bind {
        /// The address to be bound.
        local: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

impl UdpError {
    /// The next thing to try, where the error tells more than its `errno` does.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            UdpError::NotSpecific(_) => {
                "name one address of this machine, because the packets' checksum (ICRC) covers it"
            }
            UdpError::NoAddress => "give the interface one (ip address add)",
            UdpError::NoSlot(_) => "ss -ulpn shows who holds UDP ports 29185 to 29438",
            UdpError::Socket(_) | UdpError::Option { .. } => return None,
            UdpError::Bind { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => {
                    "another process serves RoCE there (ss -ulpn); stop it, or use another address or port"
                }
                io::ErrorKind::AddrNotAvailable => "use an address of this machine (ip address)",
                io::ErrorKind::PermissionDenied => "use a port above 1023",
                _ => "check the address",
            },
        })
    }

    /// What the kernel said, if it was the kernel that refused.
    pub fn os_error(&self) -> Option<&io::Error> {
        match self {
            UdpError::Socket(source)
            | UdpError::Option { source, .. }
            | UdpError::Bind { source, .. } => Some(source),
            UdpError::NotSpecific(_) | UdpError::NoAddress | UdpError::NoSlot(_) => None,
        }
    }
}

/// A RoCEv2 wire over a UDP socket.
#[derive(Debug)]
pub struct UdpWire {
    socket: Socket,
    check: IcrcCheck,
    sender: Sender,
    receiver: Receiver,
    counters: UdpCounters,
    capture: Option<Capture>,
}

impl UdpWire {
    /// Opens the socket.
    pub fn bind(config: &UdpConfig) -> Result<UdpWire, UdpError> {
        let UdpConfig { local, check, socket_buffer_bytes: buffer_bytes, gso, gro } = *config;
        if local.ip().is_unspecified() || local.ip().is_multicast() {
            return Err(UdpError::NotSpecific(local));
        }
        Ok(UdpWire {
            socket: Socket::open(&Plan { local, buffer_bytes, gro, shared: false })?,
            check,
            sender: Sender::new(gso),
            receiver: Receiver::new(),
            counters: UdpCounters::default(),
            capture: None,
        })
    }

    /// Writes every packet that leaves or is accepted from now on to `capture`, or to none.
    pub fn capture_to(&mut self, capture: Option<Capture>) {
        self.capture = capture;
    }

    /// The address that peers send to, its port filled in.
    pub fn local(&self) -> SocketAddr {
        self.socket.local
    }

    /// Readable when packets wait.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd.as_fd()
    }

    /// What happened so far.
    pub fn counters(&self) -> &UdpCounters {
        &self.counters
    }

    /// Datagrams, or runs of them that the kernel had joined, that were lost because the receive buffer
    /// was full: this side is too slow, or the sender's window larger than the buffer. `None` when the
    /// kernel does not say. A system call.
    pub fn overrun(&self) -> Option<u32> {
        socket::overrun(&self.socket.fd)
    }

    /// Effective socket buffers in bytes: sending, receiving.
    pub fn socket_buffer_bytes(&self) -> (u64, u64) {
        (self.socket.send_buffer_bytes, self.socket.receive_buffer_bytes)
    }

    /// Bytes of IP and UDP header that each packet has on the wire besides its UDP payload.
    pub fn ip_udp_header_bytes(&self) -> u64 {
        if self.socket.local.is_ipv4() { 20 + 8 } else { 40 + 8 }
    }

    /// Why packets are sent one by one, if they are.
    pub fn why_no_gso(&self) -> Option<&str> {
        self.sender.why_no_gso()
    }

    /// Why packets arrive one by one, if they do.
    pub fn why_no_gro(&self) -> Option<&str> {
        self.socket.why_no_gro.as_deref()
    }
}

impl fmt::Display for UdpWire {
    /// The path taken and why no faster one: one line for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (send, receive) = self.socket_buffer_bytes();
        write!(f, "udp {}, buffers {send} out and {receive} in", self.local())?;
        match self.why_no_gso() {
            None => write!(f, ", segmented sends")?,
            Some(why) => write!(f, ", single sends ({why})")?,
        }
        match self.why_no_gro() {
            None => write!(f, ", joined receives"),
            Some(why) => write!(f, ", single receives ({why})"),
        }
    }
}

impl Wire for UdpWire {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        let UdpWire { socket, sender, counters, capture, .. } = self;
        sender.send(socket, frames, memory, &mut counters.tx, capture.as_mut());
    }

    fn receive(&mut self, _now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let UdpWire { socket, check, receiver, counters, capture, .. } = self;
        let accepted = receiver.receive(&socket.fd, &mut counters.rx, |run, counters| {
            run.deliver(*check, socket.local, counters, capture.as_mut(), sink);
        });
        if let Some(capture) = capture {
            capture.flush_if_due();
        }
        accepted
    }

    /// Receivers are not looked at: what they cannot take is lost, and sent again.
    fn admits(&mut self, _now: Time, _path: &Path, _dest: Qpn, packets: usize) -> usize {
        packets
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    /// Not looked at: whoever has the port to himself makes a lost connection anew (streams do).
    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }
}

/// One socket, and frames go where their path says.
impl Route for Socket {
    fn socket(&self) -> &OwnedFd {
        &self.fd
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn together(&self, a: &TxFrame<'_>, b: &TxFrame<'_>) -> bool {
        a.path == b.path
    }

    fn remote(&self, frame: &TxFrame<'_>) -> SocketAddr {
        frame.path.remote
    }

    fn loses(&self, _remote: SocketAddr) -> bool {
        false
    }
}

/// What the ICRC covers of the headers of a packet; `None` between IP versions.
pub(crate) fn pseudo(from: SocketAddr, to: SocketAddr, id: u16) -> Option<Pseudo> {
    let (src_port, dst_port) = (from.port(), to.port());
    match (from.ip(), to.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            Some(Pseudo::V4 { src, dst, id, dont_fragment: true, src_port, dst_port })
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => Some(Pseudo::V6 { src, dst, src_port, dst_port }),
        _ => None,
    }
}
