//! The UDP wire: RoCEv2 packets through an ordinary socket, without privilege.
//!
//! A call to `send` turns runs of equal-length packets for one destination into single segmented
//! sends (UDP_SEGMENT); a call to `receive` splits what the kernel has joined (UDP_GRO). Both make
//! one system call for many packets, which lets a socket carry tens of gigabits a second.
//!
//! - The wire owns IP, UDP and the ICRC. It computes the ICRC with the addresses, ports and
//!   identification that the kernel will send, and verifies it with those it can see. A socket does
//!   not show the IPv4 identification of a received packet: the wire expects the packet's place in
//!   the joined buffer, and otherwise solves for the identification
//!   ([`roce::wire::icrc::solve_id`]).
//! - The local address must be a specific one, because the ICRC covers it.
//! - Nothing is queued here. A packet that the kernel does not accept within [`SEND_WAIT`] is
//!   dropped and counted, as on any network.
//! - All input is untrusted: rejected packets are counted by reason and never cause a panic (C7).
//! - On kernels or devices that refuse segmentation it is disabled for good, with a reason.

mod counters;
pub(crate) mod message;
pub(crate) mod receive;
mod route;
pub(crate) mod send;
pub(crate) mod socket;
pub(crate) mod staging;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use roce::verbs::{Qpn, Transport};
use roce::wire::icrc::Pseudo;
use roce::wire::{FORWARDED_OPCODE, ROCE_PORT};
use roce::world::{Memory, Path, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};
use rustix::net::{SendFlags, sendto};
use thiserror::Error;

pub use counters::{RxCounters, SharingCounters, TxCounters, TxDropped, UdpCounters, Unparsable};

use receive::Receiver;
pub use route::payload_limit;
use send::{Route, Sender};
use socket::{Plan, Socket};

use crate::capture::Capture;
use crate::rates::{RateLimits, receive_watched};

/// How long one call of `send` waits for room in the socket buffer, in total.
pub const SEND_WAIT: Duration = Duration::from_millis(2);

/// How ICRCs of arriving packets are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IcrcCheck {
    /// Drop packets whose ICRC is wrong.
    #[default]
    Verify,
    /// As [`IcrcCheck::Verify`], with all 32 bits over IPv4 too. A socket's packets are accepted
    /// only with an identification that this wire itself sends, others only where the
    /// identification is visible. [`UdpWire`]s, which cannot see it, then accept only their own
    /// kind; devices use a packet socket ([`crate::device::DeviceConfig::check`]).
    Strict,
    /// Accept all packets: only for finding out why a peer's packets are rejected.
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
    /// How ICRCs are checked.
    pub check: IcrcCheck,
    /// Socket buffer to request in each direction, in bytes as the kernel accounts them. The kernel
    /// may grant less: see [`UdpWire::socket_buffer_bytes`].
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

    /// This address and port, everything else at its default; port 0 lets the kernel choose.
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
    /// All 254 process numbers of the device are taken.
    #[error("254 processes use RoCE on {0} already")]
    NoSlot(IpAddr),
    /// The socket could not be created.
    #[error("no UDP socket: {0}")]
    Socket(#[source] io::Error),
    /// The kernel lacks an option that RoCE needs.
    #[error("{local}: the kernel refused {option}: {source}")]
    Option {
        /// The address to be bound.
        local: SocketAddr,
        /// The socket option.
        option: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The address is in use or not this machine's.
    #[error("cannot bind {local}: {source}")]
    Bind {
        /// The address to be bound.
        local: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

impl UdpError {
    /// The next thing to try, where the error shows more than its `errno` does.
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

    /// The kernel's error, if the kernel refused.
    pub fn os_error(&self) -> Option<&io::Error> {
        match self {
            UdpError::Socket(source)
            | UdpError::Option { source, .. }
            | UdpError::Bind { source, .. } => Some(source),
            UdpError::NotSpecific(_) | UdpError::NoAddress | UdpError::NoSlot(_) => None,
        }
    }
}

/// A datagram that asks its receiver to wake up and means nothing else: no packet is so short.
pub(crate) const WAKE_UP: [u8; 1] = [FORWARDED_OPCODE];

/// A RoCEv2 wire over a UDP socket.
#[derive(Debug)]
pub struct UdpWire {
    socket: Socket,
    check: IcrcCheck,
    sender: Sender,
    receiver: Receiver,
    counters: UdpCounters,
    capture: Option<Capture>,
    limits: RateLimits,
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
            limits: RateLimits::from_environment(),
        })
    }

    /// Records every packet sent or accepted from now on in `capture`; `None` ends recording.
    pub fn capture_to(&mut self, capture: Option<Capture>) {
        self.capture = capture;
    }

    /// Keeps the rate limits and gates in this folder from now on, instead of those that the
    /// environment names.
    pub fn keep_rate_limits(&mut self, folder: Option<PathBuf>) {
        self.limits = RateLimits::of(folder);
    }

    /// The rate limits and gates that this wire keeps.
    pub(crate) fn limits(&mut self) -> &mut RateLimits {
        &mut self.limits
    }

    /// Sends frames that are accounted for.
    pub(crate) fn send_booked(&mut self, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        let UdpWire { socket, sender, counters, capture, .. } = self;
        sender.send(socket, frames, memory, &mut counters.tx, capture.as_mut());
    }

    /// Receives without telling the rate limits.
    pub(crate) fn receive_packets(&mut self, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let UdpWire { socket, check, receiver, counters, capture, .. } = self;
        let accepted = receiver.receive(&socket.fd, &mut counters.rx, |run, counters| {
            run.deliver(*check, socket.local, counters, capture.as_mut(), sink);
        });
        if let Some(capture) = capture {
            capture.flush_if_due();
        }
        accepted
    }

    /// The address that peers send to, its port filled in.
    pub fn local(&self) -> SocketAddr {
        self.socket.local
    }

    /// Wakes whoever sleeps on the socket at this address, if its buffer has room; otherwise it has
    /// something to wake up for.
    pub fn wake(&self, remote: SocketAddr) {
        let _ = sendto(&self.socket.fd, &WAKE_UP, SendFlags::DONTWAIT, &remote);
    }

    /// Readable when packets wait.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd.as_fd()
    }

    /// The counters of the wire.
    pub fn counters(&self) -> &UdpCounters {
        &self.counters
    }

    /// Datagrams, or runs of them joined by the kernel, lost because the receive buffer was full:
    /// this side is too slow, or the sender's window exceeds the buffer. `None` when the kernel
    /// does not report it. One system call.
    pub fn overrun(&self) -> Option<u32> {
        socket::overrun(&self.socket.fd)
    }

    /// Effective socket buffers in bytes: sending, receiving.
    pub fn socket_buffer_bytes(&self) -> (u64, u64) {
        (self.socket.send_buffer_bytes, self.socket.receive_buffer_bytes)
    }

    /// Bytes of IP and UDP header of each packet on the wire, besides its UDP payload.
    pub fn ip_udp_header_bytes(&self) -> u64 {
        if self.socket.local.is_ipv4() { 20 + 8 } else { 40 + 8 }
    }

    /// Why segmented sends are not used, if so.
    pub fn why_no_gso(&self) -> Option<&str> {
        self.sender.why_no_gso()
    }

    /// Why received datagrams are not joined, if so.
    pub fn why_no_gro(&self) -> Option<&str> {
        self.socket.why_no_gro.as_deref()
    }
}

impl fmt::Display for UdpWire {
    /// The path taken and why no faster one, in one line for people to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (send, receive) = self.socket_buffer_bytes();
        write!(f, "udp {}, buffers {send} out and {receive} in", self.local())?;
        match self.why_no_gso() {
            None => write!(f, ", segmented sends")?,
            Some(why) => write!(f, ", single sends ({why})")?,
        }
        match self.why_no_gro() {
            None => write!(f, ", coalesced receives"),
            Some(why) => write!(f, ", single receives ({why})"),
        }
    }
}

/// A wire over sockets that belong to it. Its display is the path taken, in one line.
pub trait SocketWire: Wire + fmt::Display {
    /// The address that peers send to.
    fn local(&self) -> SocketAddr;

    /// The sockets that are readable when packets wait.
    fn sockets(&self) -> [Option<BorrowedFd<'_>>; 2];

    /// Wakes whoever sleeps on the socket at this address, if that is a process of this machine.
    fn wake(&self, remote: SocketAddr);

    /// The largest path MTU in payload bytes, as far as it does not depend on the peer.
    fn payload_limit(&self) -> u32;

    /// Why it carries nothing any more, if so.
    fn gone(&self) -> Option<&str>;

    /// Passes every counter and its name to `tell`.
    fn counts(&self, tell: &mut dyn FnMut(&str, u64));
}

impl SocketWire for UdpWire {
    fn local(&self) -> SocketAddr {
        self.local()
    }

    fn sockets(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.fd()), None]
    }

    fn wake(&self, remote: SocketAddr) {
        self.wake(remote);
    }

    /// The kernel knows that of the path.
    fn payload_limit(&self) -> u32 {
        4096
    }

    fn gone(&self) -> Option<&str> {
        None
    }

    fn counts(&self, tell: &mut dyn FnMut(&str, u64)) {
        self.counters.named().for_each(|(name, value)| tell(name, value));
        tell("udp.ip_udp_header_bytes", self.ip_udp_header_bytes());
        tell("udp.pace_waits", self.limits.shaper().held());
        tell("udp.gate_waits", self.limits.shaper().gate_held());
    }
}

impl Wire for UdpWire {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.limits.sent(now, frames);
        self.send_booked(frames, memory);
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        receive_watched(self, now, sink, UdpWire::limits, UdpWire::receive_packets)
    }

    /// Receive buffers are not queried: packets that do not fit are lost and retransmitted.
    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        _dest: Qpn,
        _service: Transport,
        packets: usize,
    ) -> usize {
        self.limits.admits(now, path, packets)
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.limits.next_wakeup()
    }

    /// Not checked: users with a port of their own re-establish lost connections themselves
    /// (streams do). By a gate of this side: receive buffers are not queried.
    fn is_stalled(&mut self, path: &Path, _dest: Qpn) -> bool {
        self.limits.holds_back(path)
    }
}

/// One socket; each frame goes where its path leads.
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

/// The header fields of a packet that the ICRC covers; `None` between IP versions.
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
