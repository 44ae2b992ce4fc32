//! The AF_XDP wire: small packets past the kernel's network stack, for latency.
//!
//! It is the [UDP wire](crate::udp) with a shorter way. Packets that fit a frame, to a destination
//! whose Ethernet address the kernel knows, are written as whole Ethernet frames to an AF_XDP
//! socket; an XDP program hands arriving datagrams for this address and port to the same socket.
//! Everything else takes the UDP socket, in both directions: long packets, destinations not
//! resolved yet or on another interface, fragments, VLAN tags, other receive queues, a full send
//! ring. So a peer may use either wire, and nothing depends on the shorter way being open.
//!
//! - It needs root (CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF). [`XdpWire::open`] says what is missing.
//! - Received frames are checked like any input: addresses, port, lengths, IPv4 checksum, and the
//!   whole ICRC, since the identification is visible. UDP checksums are not verified: over veth the
//!   kernel leaves them unfinished, and the ICRC covers the same bytes.
//! - One queue of the interface is used. Packets that arrive on others are received through the UDP
//!   socket.
//!
//! Protocol decisions do not belong here.

mod counters;
mod ethernet;
mod frames;
mod program;
mod rings;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use roce::verbs::{Qpn, Transport};
use roce::wire::ROCE_PORT;
use roce::wire::frame::Packet;
use roce::world::{Memory, Path, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};

use crate::interfaces::Interface;
use crate::link::{self, ETHERNET_BYTES, Hop, Neighbours};
use crate::rates::receive_watched;
use crate::udp::staging::Staging;
use crate::udp::{SocketWire, UdpConfig, UdpError, UdpWire};
use ethernet::{build, open};
use program::{Attached, Sockets};
use rings::{MAX_FRAME, Socket};

pub use counters::{XdpCounters, XdpRefused};
pub use frames::RawFrames;

/// Frames that one call of `receive` takes at most: as many as the receive ring holds.
const MOST_FRAMES: usize = 2048;

/// The UDP socket is looked at in each of so many calls of `receive`: a system call costs as much
/// as a packet.
const LOOKS: u32 = 16;

/// Pause before frames that the kernel refused are tried again: about what a full device needs for
/// its queue.
const RETRY_AFTER: Duration = Duration::from_micros(20);

/// How the program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver, before the kernel allocates anything.
    Native,
    /// In the kernel's receive path, for drivers without XDP.
    Generic,
}

/// Why there is no AF_XDP wire.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// The UDP socket.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// The program recognises only RoCE's port.
    #[error("AF_XDP needs UDP port 4791, not {0}")]
    Port(u16),
    /// No interface has the address.
    #[error("no Ethernet interface has the address {0}")]
    NoInterface(IpAddr),
    /// Another XDP program is attached, and is not replaced.
    #[error("another XDP program is attached to the interface")]
    Occupied,
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl XdpError {
    fn of(step: &'static str) -> impl FnOnce(io::Error) -> XdpError {
        move |source| XdpError::Kernel { step, source }
    }

    /// The next thing to try.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            XdpError::Udp(error) => error.hint(),
            XdpError::Port(_) => Some("use port 4791; only one process of an address can"),
            XdpError::NoInterface(_) => {
                Some("name an address of an Ethernet interface (ip address); loopback has none")
            }
            XdpError::Occupied => {
                Some("ip link show lists it; ip link set dev NAME xdp off ends it")
            }
            XdpError::Kernel { source, .. } => match source.raw_os_error()? {
                libc::EPERM | libc::EACCES => {
                    Some("run as root, or with CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF")
                }
                libc::EAFNOSUPPORT | libc::ENOSYS => {
                    Some("the kernel has no AF_XDP (CONFIG_XDP_SOCKETS) or no bpf(2)")
                }
                libc::EBUSY => Some("another AF_XDP socket uses the queue"),
                _ => None,
            },
        }
    }
}

/// How to open a wire.
#[derive(Clone, Debug)]
pub struct XdpConfig {
    /// The UDP socket, which the wire falls back to for single packets. Its port must be 4791.
    pub udp: UdpConfig,
    /// Receive queue of the interface.
    pub queue: u32,
    /// How the program may be attached, the best first.
    pub modes: Vec<Mode>,
}

impl XdpConfig {
    /// RoCE's port on this address, the first queue, natively where the driver can.
    pub fn new(ip: IpAddr) -> XdpConfig {
        let modes = vec![Mode::Native, Mode::Generic];
        XdpConfig { udp: UdpConfig::new(ip), queue: 0, modes }
    }
}

/// A RoCEv2 wire over an AF_XDP socket and a UDP socket.
#[derive(Debug)]
pub struct XdpWire {
    // Detached first: packets then go to the UDP socket again.
    attached: Attached,
    _sockets: Sockets,
    socket: Socket,
    udp: UdpWire,
    neighbours: Neighbours,
    interface: String,
    mac: [u8; 6],
    /// Longest frame that may be sent.
    longest: usize,
    body: Staging,
    frame: Vec<u8>,
    looks: u32,
    /// When frames that the kernel refused are tried again.
    retry_at: Option<Time>,
    counters: XdpCounters,
}

impl XdpWire {
    /// Opens both sockets and attaches the program to the interface that has the address.
    ///
    /// # Errors
    /// When the address or its port cannot be used, a privilege is missing, the kernel lacks
    /// AF_XDP, or another XDP program is attached.
    pub fn open(config: &XdpConfig) -> Result<XdpWire, XdpError> {
        let local = config.udp.local;
        if local.port() != ROCE_PORT {
            return Err(XdpError::Port(local.port()));
        }
        let interface = interface_of(local.ip())?;
        let udp = UdpWire::bind(&config.udp)?;
        let mac = link::hardware_address(udp.fd(), &interface)
            .map_err(XdpError::of("reading the Ethernet address"))?
            .ok_or(XdpError::NoInterface(local.ip()))?;
        let neighbours =
            Neighbours::new(interface.index, true).map_err(XdpError::of("querying neighbours"))?;
        // First the program: until a socket is in its map it passes everything, and another's is
        // noticed at once.
        let sockets = Sockets::new(config.queue.saturating_add(1))?;
        let modes = &config.modes;
        let attached = program::attach(interface.index, local, MAX_FRAME, &sockets, modes)?;
        let socket = Socket::open(interface.index, config.queue)?;
        sockets.insert(config.queue, &socket.fd)?;
        Ok(XdpWire {
            attached,
            _sockets: sockets,
            socket,
            udp,
            neighbours,
            interface: interface.name,
            mac,
            longest: (interface.mtu as usize + ETHERNET_BYTES).min(MAX_FRAME as usize),
            body: Staging::new(MAX_FRAME as usize),
            frame: Vec::with_capacity(MAX_FRAME as usize),
            looks: 0,
            retry_at: None,
            counters: XdpCounters::default(),
        })
    }

    /// The address that peers send to.
    pub fn local(&self) -> SocketAddr {
        self.udp.local()
    }

    /// Readable when packets wait: in the AF_XDP socket, and in the UDP socket.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.socket.fd.as_fd(), self.udp.fd()]
    }

    /// How the program is attached.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// The counters of the shorter way.
    pub fn counters(&self) -> &XdpCounters {
        &self.counters
    }

    /// The UDP wire that takes everything else.
    pub fn udp(&self) -> &UdpWire {
        &self.udp
    }

    /// Packets lost because this side was too slow to take them from the AF_XDP socket; `None` when
    /// the kernel does not report it. One system call.
    pub fn overrun(&self) -> Option<u64> {
        self.socket.overrun()
    }

    /// Queues a packet as an Ethernet frame; `false` if it has to go through the kernel.
    fn queue(&mut self, now: Time, tx: &TxFrame<'_>, memory: &dyn Memory) -> bool {
        let XdpWire { socket, udp, neighbours, counters, body, frame, .. } = self;
        let (local, path) = (udp.local(), &tx.path);
        if local.is_ipv4() != path.remote.is_ipv4() {
            return false;
        }
        let ip_udp_bytes = if local.is_ipv4() { 20 + 8 } else { 40 + 8 };
        if ETHERNET_BYTES + ip_udp_bytes + tx.udp_payload_len() > self.longest {
            counters.tx_long += 1;
            return false;
        }
        let Hop::Ethernet(dst) = neighbours.hop(now, path.remote.ip()) else {
            counters.tx_unresolved += 1;
            return false;
        };
        if !build(tx, memory, local, [dst, self.mac], body, frame) || !socket.queue(frame) {
            counters.tx_full += 1;
            return false;
        }
        counters.tx_packets += 1;
        true
    }

    /// Receives without telling the rate limits.
    fn receive_packets(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        // Nothing else sends them if no packet follows.
        if self.retry_at.is_some_and(|at| now >= at) {
            self.counters.tx_retries += 1;
            self.flush(now);
        }
        let XdpWire { socket, udp, counters, looks, .. } = self;
        let (local, mut accepted) = (udp.local(), 0);
        socket.receive(MOST_FRAMES, |frame| {
            counters.rx_packets += 1;
            match open(frame, local) {
                Ok((origin, packet)) => {
                    accepted += 1;
                    let Packet { headers, payload, .. } = packet;
                    sink(&RxFrame { origin, headers, payload, telemetry: None });
                }
                Err(reason) => counters.refuse(reason),
            }
        });
        counters.rx_accepted += accepted as u64;
        *looks = (*looks + 1) % LOOKS;
        if *looks == 0 {
            accepted += udp.receive_packets(sink);
        }
        accepted
    }

    fn flush(&mut self, now: Time) {
        self.socket.flush();
        self.retry_at = self.socket.has_refused().then(|| now + RETRY_AFTER);
    }
}

impl Wire for XdpWire {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.udp.limits().sent(now, frames);
        // Frames in front of this one are queued, or handed to the UDP wire.
        let mut first = 0;
        for (at, frame) in frames.iter().enumerate() {
            if self.queue(now, frame, memory) {
                if first < at {
                    self.udp.send_booked(&frames[first..at], memory);
                }
                first = at + 1;
            }
        }
        if first < frames.len() {
            self.udp.send_booked(&frames[first..], memory);
        }
        self.flush(now);
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let receive = |wire: &mut XdpWire, sink: &mut dyn FnMut(&RxFrame<'_>)| {
            wire.receive_packets(now, sink)
        };
        receive_watched(self, now, sink, |wire| wire.udp.limits(), receive)
    }

    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        dest: Qpn,
        service: Transport,
        packets: usize,
    ) -> usize {
        self.udp.admits(now, path, dest, service, packets)
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.retry_at.into_iter().chain(self.udp.next_wakeup()).min()
    }

    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool {
        self.udp.is_stalled(path, dest)
    }
}

impl SocketWire for XdpWire {
    fn local(&self) -> SocketAddr {
        self.udp.local()
    }

    fn sockets(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.fds().map(Some)
    }

    fn wake(&self, remote: SocketAddr) {
        self.udp.wake(remote);
    }

    fn payload_limit(&self) -> u32 {
        self.udp.payload_limit()
    }

    fn gone(&self) -> Option<&str> {
        None
    }

    fn counts(&self, tell: &mut dyn FnMut(&str, u64)) {
        self.udp.counts(tell);
        self.counters.named().into_iter().for_each(|(name, value)| tell(name, value));
    }
}

impl fmt::Display for XdpWire {
    /// The path taken, in one line for people to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match self.attached.mode {
            Mode::Native => "native",
            Mode::Generic => "generic",
        };
        write!(f, "af_xdp on {}, {mode}; the rest by {}", self.interface, self.udp)
    }
}

/// The interface that has the address.
fn interface_of(ip: IpAddr) -> Result<Interface, XdpError> {
    let found = link::interface_of(ip).map_err(XdpError::of("listing interfaces"))?;
    found.ok_or(XdpError::NoInterface(ip))
}
