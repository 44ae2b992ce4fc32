//! The RoCEv1 wire: packets with a GRH in Ethernet frames, through a packet socket.
//!
//! RoCEv1 has neither IP nor UDP (IBA annex A16): its frames pass switches, and no router. GIDs are
//! the addresses of the interface, so that the kernel's neighbour table has the Ethernet address of
//! a peer; [`RoceV1Wire::resolve`] waits for it before the first packet. While the wire runs, the
//! table is queried once a second for each peer.
//!
//! - It needs CAP_NET_RAW when it is opened, an address of an Ethernet interface, and a peer on the
//!   same link. Addresses of this machine, loopback among them, have no Ethernet address and are
//!   refused.
//! - A packet socket has no port: every RoCEv1 socket of an interface gets all its frames. Frames
//!   for other GIDs are counted and dropped, and queue pair numbers tell processes with one GID
//!   apart.
//! - Nothing is queued here. A packet that the kernel does not accept within
//!   [`SEND_WAIT`](crate::udp::SEND_WAIT), or whose peer has no Ethernet address any more, is
//!   dropped and counted, as on any network.
//! - Switches mark no RoCEv1 packet, since they look for ECN in IP headers. A packet with FECN in
//!   its BTH counts as marked.
//! - All input is untrusted: rejected frames are counted by reason and never cause a panic (C7).
//!
//! Protocol decisions do not belong here.

mod counters;
mod frames;
mod socket;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use roce::verbs::{Qpn, Transport};
use roce::wire::frame::{Ethernet, Packet};
use roce::wire::grh::GRH_BYTES;
use roce::wire::{ICRC_BYTES, ROCE_PORT};
use roce::world::{Memory, Path, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sendto, socket_with};

use crate::capture::Capture;
use crate::clock;
use crate::interfaces::Interface;
use crate::link::{self, ETHERNET_BYTES, Hop, Neighbours, NextHop};
use crate::rates::{RateLimits, receive_watched};
use crate::udp::send::SendDeadline;
use crate::udp::{SocketWire, socket as options};
use frames::{Burst, Refused, open};
use socket::{Arrival, MAX_FRAME, RECEIVE_FRAMES, SEND_FRAMES, Socket};

pub use counters::{RoceV1Counters, RxCounters};

/// How long [`RoceV1Wire::resolve`] needs at most for a peer that answers: the kernel asks three
/// times, once a second.
pub const RESOLVE_LIMIT: Duration = Duration::from_millis(3_500);

/// Pause between two looks at the neighbour table: an answer on a link takes less than a
/// millisecond.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(5);

/// Receive calls per call of `receive`. Together they take as many frames as one turn sends.
const ROUNDS: usize = 256 / RECEIVE_FRAMES;

/// Socket buffer to request in each direction, in bytes as the kernel accounts them.
const SOCKET_BYTES: u32 = 16 << 20;

/// Port of the empty datagrams that make the kernel look for a neighbour: discard (RFC 863).
const PROBE_PORT: u16 = 9;

/// Transport bytes around the payload of the longest packet: BTH, RETH, SRETH, immediate and ICRC.
const AROUND_PAYLOAD: u32 = 12 + 16 + 8 + 4 + ICRC_BYTES as u32;

/// The largest path MTU of RoCE.
const LARGEST_MTU: u32 = 4096;

/// Why there is no RoCEv1 wire, or no way to a peer.
#[derive(Debug, thiserror::Error)]
pub enum RoceV1Error {
    /// No interface has the address.
    #[error("no Ethernet interface has the address {0}")]
    NoInterface(IpAddr),
    /// The interface is down.
    #[error("{0} is down")]
    Down(String),
    /// The process may not open packet sockets.
    #[error("RoCEv1 needs a packet socket: {0}")]
    Forbidden(#[source] io::Error),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The two addresses are of different IP versions.
    #[error("{peer} is of another IP version than {local}")]
    Family {
        /// The address of the wire.
        local: IpAddr,
        /// The peer.
        peer: IpAddr,
    },
    /// The peer is this machine.
    #[error("{0} is an address of this machine, and RoCEv1 frames leave it")]
    ThisMachine(IpAddr),
    /// The peer is behind a router.
    #[error("{peer} is behind the router {router}, and RoCEv1 is not routed")]
    Routed {
        /// The peer.
        peer: IpAddr,
        /// The next hop.
        router: IpAddr,
    },
    /// The peer is on another interface, or there is no route.
    #[error("no route leads to {peer} over {interface}")]
    Elsewhere {
        /// The peer.
        peer: IpAddr,
        /// The interface of the wire.
        interface: String,
    },
    /// Nobody answered.
    #[error("{peer} does not answer on {interface}: no Ethernet address after {} ms", .waited.as_nanos() / 1_000_000)]
    Silent {
        /// The peer.
        peer: IpAddr,
        /// The interface of the wire.
        interface: String,
        /// How long was waited.
        waited: Duration,
    },
}

impl RoceV1Error {
    fn of(step: &'static str) -> impl FnOnce(io::Error) -> RoceV1Error {
        move |source| RoceV1Error::Kernel { step, source }
    }

    /// The next thing to try.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            RoceV1Error::NoInterface(_) => {
                "name an address of an Ethernet interface (ip address); loopback has no Ethernet address"
            }
            RoceV1Error::Down(_) => "ip link set NAME up",
            RoceV1Error::Forbidden(_) => "run as root, or with CAP_NET_RAW",
            RoceV1Error::Kernel { .. } => return None,
            RoceV1Error::Family { .. } => "use addresses of one IP version on both sides",
            RoceV1Error::ThisMachine(_) => {
                "within one machine use UDP, or a network namespace with a link of its own"
            }
            RoceV1Error::Routed { .. } | RoceV1Error::Elsewhere { .. } => {
                "use an address of the link that both machines share, or UDP"
            }
            RoceV1Error::Silent { .. } => {
                "is the peer up, and on the same Ethernet segment? `ip neighbour` lists who has answered"
            }
        })
    }
}

/// A RoCEv1 wire over a packet socket.
#[derive(Debug)]
pub struct RoceV1Wire {
    socket: Socket,
    /// For the datagrams that make the kernel look for a neighbour.
    prober: OwnedFd,
    neighbours: Neighbours,
    interface: Interface,
    mac: [u8; 6],
    local: IpAddr,
    burst: Burst,
    gone: Option<String>,
    counters: RoceV1Counters,
    capture: Option<Capture>,
    limits: RateLimits,
}

impl RoceV1Wire {
    /// Opens a packet socket on the Ethernet interface that has the address.
    ///
    /// # Errors
    /// When no Ethernet interface that is up has the address, or the process lacks CAP_NET_RAW.
    pub fn open(local: IpAddr) -> Result<RoceV1Wire, RoceV1Error> {
        let found = link::interface_of(local).map_err(RoceV1Error::of("listing interfaces"))?;
        let interface = found.ok_or(RoceV1Error::NoInterface(local))?;
        if !interface.up {
            return Err(RoceV1Error::Down(interface.name));
        }
        let socket =
            Socket::open(interface.index, SOCKET_BYTES).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => RoceV1Error::Forbidden(error),
                _ => RoceV1Error::of("opening a packet socket")(error),
            })?;
        let mac = link::hardware_address(socket.fd.as_fd(), &interface)
            .map_err(RoceV1Error::of("reading the Ethernet address"))?
            .ok_or(RoceV1Error::NoInterface(local))?;
        let neighbours = Neighbours::new(interface.index, false)
            .map_err(RoceV1Error::of("querying neighbours"))?;
        let prober = prober(local, interface.index)
            .map_err(RoceV1Error::of("opening a socket to look for neighbours"))?;
        let longest = (interface.mtu as usize + ETHERNET_BYTES).min(MAX_FRAME);
        Ok(RoceV1Wire {
            socket,
            prober,
            neighbours,
            interface,
            mac,
            local,
            burst: Burst::new(SEND_FRAMES, longest),
            gone: None,
            counters: RoceV1Counters::default(),
            capture: None,
            limits: RateLimits::from_environment(),
        })
    }

    /// Waits until the kernel knows the Ethernet address of a peer, at most `limit`
    /// ([`RESOLVE_LIMIT`] is enough).
    ///
    /// # Errors
    /// When the peer is not on this link, or does not answer.
    pub fn resolve(&mut self, peer: IpAddr, limit: Duration) -> Result<(), RoceV1Error> {
        let interface = || self.interface.name.clone();
        if peer.is_ipv4() != self.local.is_ipv4() {
            return Err(RoceV1Error::Family { local: self.local, peer });
        }
        match self.neighbours.next_hop(peer) {
            NextHop::Direct => {}
            NextHop::ThisMachine => return Err(RoceV1Error::ThisMachine(peer)),
            NextHop::Gateway(router) => return Err(RoceV1Error::Routed { peer, router }),
            NextHop::Elsewhere => {
                return Err(RoceV1Error::Elsewhere { peer, interface: interface() });
            }
        }
        let start = clock::now();
        while self.hop(clock::now(), peer).is_none() {
            let waited = clock::now().since(start);
            if waited >= limit {
                return Err(RoceV1Error::Silent {
                    peer,
                    interface: self.interface.name.clone(),
                    waited,
                });
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Records every packet sent or accepted from now on in a capture of Ethernet frames
    /// ([`Capture::create_for`]); `None` ends recording.
    pub fn capture_to(&mut self, capture: Option<Capture>) {
        self.capture = capture;
    }

    /// The address that peers send to.
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(self.local, ROCE_PORT)
    }

    /// Readable when packets wait.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd.as_fd()
    }

    /// The counters of the wire.
    pub fn counters(&self) -> &RoceV1Counters {
        &self.counters
    }

    /// Frames lost because the receive buffer was full; `None` when the kernel does not report it.
    /// One system call.
    pub fn overrun(&self) -> Option<u32> {
        options::overrun(&self.socket.fd)
    }

    /// The Ethernet address of a peer. Where the kernel does not know it, or wants to confirm it, a
    /// datagram makes it ask.
    fn hop(&mut self, now: Time, peer: IpAddr) -> Option<[u8; 6]> {
        let hop = self.neighbours.hop(now, peer);
        // Groups have no neighbour to ask.
        if matches!(hop, Hop::Unknown | Hop::Stale(_)) && !peer.is_multicast() {
            self.counters.probes += 1;
            let to = match peer {
                IpAddr::V4(ip) => SocketAddrV4::new(ip, PROBE_PORT).into(),
                IpAddr::V6(ip) => SocketAddrV6::new(ip, PROBE_PORT, 0, self.interface.index).into(),
            };
            // If it cannot be sent, the peer stays as it is.
            let _ = sendto(&self.prober, &[], SendFlags::DONTWAIT, &to as &SocketAddr);
        }
        match hop {
            Hop::Ethernet(mac) | Hop::Stale(mac) => Some(mac),
            Hop::Unknown | Hop::StillUnknown => None,
        }
    }

    /// Receives without telling the rate limits.
    fn receive_packets(&mut self, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let RoceV1Wire { socket, local, interface, gone, counters, capture, .. } = self;
        let rx = &mut counters.rx;
        let before = rx.accepted;
        for _ in 0..ROUNDS {
            rx.syscalls += 1;
            match socket.receive(|arrival| accept(&arrival, *local, rx, capture.as_mut(), sink)) {
                Ok(RECEIVE_FRAMES) => {}
                Ok(_) | Err(libc::EAGAIN | libc::EINTR) => break,
                Err(_) => {
                    rx.errors += 1;
                    notice_removal(socket, interface, gone);
                    break;
                }
            }
        }
        if let Some(capture) = capture {
            capture.flush_if_due();
        }
        (rx.accepted - before) as usize
    }

    /// Sends the burst and empties it.
    fn flush(&mut self, deadline: &mut SendDeadline) {
        let RoceV1Wire { socket, burst, interface, gone, counters, capture, .. } = self;
        let tx = &mut counters.tx;
        let mut done = 0;
        while done < burst.len() {
            tx.syscalls += 1;
            match socket.send(burst.frames().skip(done)) {
                Ok(sent) => {
                    for frame in burst.frames().skip(done).take(sent) {
                        tx.packets += 1;
                        tx.bytes += frame.len() as u64;
                        if let Some(capture) = capture {
                            capture.frame(frame);
                        }
                    }
                    done += sent;
                }
                Err(libc::EINTR) => {}
                Err(errno @ (libc::EAGAIN | libc::ENOBUFS))
                    if deadline.wait(&socket.fd, errno, &mut tx.waits) => {}
                Err(libc::EAGAIN | libc::ENOBUFS) => {
                    tx.dropped.full += (burst.len() - done) as u64;
                    break;
                }
                Err(libc::EMSGSIZE) => {
                    tx.dropped.too_long += 1;
                    done += 1;
                }
                Err(errno) => {
                    tx.dropped.refused += 1;
                    tx.dropped.last_errno = errno;
                    notice_removal(socket, interface, gone);
                    done += 1;
                }
            }
        }
        burst.clear();
    }
}

/// A socket whose datagrams leave by this interface.
fn prober(local: IpAddr, ifindex: u32) -> io::Result<OwnedFd> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let ifindex = i32::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    options::set(&fd, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, ifindex)?;
    Ok(fd)
}

impl Wire for RoceV1Wire {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.limits.sent(now, frames);
        let mut deadline = SendDeadline::new();
        for tx in frames {
            let peer = tx.path.remote.ip();
            if peer.is_ipv4() != self.local.is_ipv4() {
                self.counters.tx.dropped.family += 1;
                continue;
            }
            let Some(dst) = self.hop(now, peer) else {
                self.counters.tx_unresolved += 1;
                continue;
            };
            let ethernet = Ethernet { dst, src: self.mac, vlan_tci: None };
            if !self.burst.push(&ethernet, self.local, tx, memory) {
                self.counters.tx.dropped.too_long += 1;
            }
            if self.burst.len() == SEND_FRAMES {
                self.flush(&mut deadline);
            }
        }
        self.flush(&mut deadline);
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        receive_watched(self, now, sink, |wire| &mut wire.limits, RoceV1Wire::receive_packets)
    }

    /// Receive buffers are not queried: frames that do not fit are lost and retransmitted.
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

    /// Peers are on other machines.
    /// By a gate of this side: receive buffers are not queried.
    fn is_stalled(&mut self, path: &Path, _dest: Qpn) -> bool {
        self.limits.holds_back(path)
    }
}

/// After an error of the kernel, which it says once when the interface goes down or is removed.
fn notice_removal(socket: &Socket, interface: &Interface, gone: &mut Option<String>) {
    if gone.is_none() && !socket.is_bound() {
        *gone = Some(format!("the interface {} was removed", interface.name));
    }
}

/// Passes a frame's packet to `sink`, or counts why not.
fn accept(
    arrival: &Arrival<'_>,
    local: IpAddr,
    rx: &mut RxCounters,
    capture: Option<&mut Capture>,
    sink: &mut dyn FnMut(&RxFrame<'_>),
) {
    rx.packets += 1;
    rx.bytes += arrival.bytes.len() as u64;
    let opened = match arrival {
        Arrival { is_cut: true, .. } => Err(Refused::Malformed),
        Arrival { is_for_us: false, .. } => Err(Refused::Foreign),
        Arrival { bytes, .. } => open(bytes, local),
    };
    match opened {
        Ok((origin, Packet { headers, payload, .. })) => {
            rx.accepted += 1;
            rx.fecn += u64::from(headers.bth().fecn);
            if let Some(capture) = capture {
                capture.frame(arrival.bytes);
            }
            sink(&RxFrame { origin, headers, payload, telemetry: None });
        }
        Err(Refused::Foreign) => rx.foreign += 1,
        Err(Refused::Malformed) => rx.malformed += 1,
        Err(Refused::Icrc) => rx.bad_icrc += 1,
        Err(Refused::Unparsable(error)) => rx.unparsable.count(error),
    }
}

impl SocketWire for RoceV1Wire {
    fn local(&self) -> SocketAddr {
        self.local()
    }

    fn sockets(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.fd()), None]
    }

    /// Peers are on other machines.
    fn wake(&self, _remote: SocketAddr) {}

    fn payload_limit(&self) -> u32 {
        let around = GRH_BYTES as u32 + AROUND_PAYLOAD;
        self.interface.mtu.saturating_sub(around).min(LARGEST_MTU)
    }

    fn gone(&self) -> Option<&str> {
        self.gone.as_deref()
    }

    fn counts(&self, tell: &mut dyn FnMut(&str, u64)) {
        self.counters.named().into_iter().for_each(|(name, value)| tell(name, value));
        tell("roce_v1.pace_waits", self.limits.shaper().held());
        tell("roce_v1.gate_waits", self.limits.shaper().gate_held());
    }
}

impl fmt::Display for RoceV1Wire {
    /// The path taken, in one line for people to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Socket { send_buffer_bytes: send, receive_buffer_bytes: receive, .. } = self.socket;
        let (local, interface) = (self.local, &self.interface.name);
        write!(f, "roce v1 {local} on {interface}, buffers {send} out and {receive} in")
    }
}
