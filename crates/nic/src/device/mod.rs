//! The wire of an RDMA device: the addresses of a network interface, shared by the processes of a
//! machine.
//!
//! RoCE has one UDP port, but every program that uses RDMA is its own process. Each process claims
//! a number (its *slot*, 1–254) by binding a UDP port of its own, [`PROCESS_PORT_BASE`] plus the
//! number, on every address. The kernel makes the port exclusive and frees it when the process
//! ends, however it ends. The upper 8 bits of a queue pair number are the slot of its owner.
//! Packets therefore take one of three routes:
//!
//! - To an address of this machine, packets go straight to the owner's port.
//! - To any other address they go to port 4791, as every RoCE device expects it.
//! - From other machines they arrive at port 4791, which all processes share (SO_REUSEPORT). The
//!   kernel chooses a process by a hash of addresses and ports. It forwards packets for other
//!   slots, with a header that names the original sender (`forward`). A packet is forwarded at most
//!   once.
//!
//! Packets leave from the shared port wherever there is one, so captures of this machine's own
//! traffic have port 4791 in every packet and tools decode them without settings. Queue pair
//! numbers whose upper bits are zero belong to daemons that own port 4791 of their address
//! ([`crate::udp`]).
//!
//! Multicast (`groups`): each process binds a socket to the group itself. Linux delivers a
//! multicast packet to every matching socket (a unicast packet to one), also on the sending
//! machine.
//!
//! Local traffic is paced by receive-buffer occupancy, for each process by itself, so loopback
//! behaves like a lossless link (`backlog`).
//!
//! IP, ICRC and segmentation are those of [`crate::udp`]. Queue pairs do not belong here.

mod backlog;
mod forward;
mod groups;
mod locality;
mod ports;
mod strict;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use roce::Time;
use roce::verbs::{Qpn, Transport};
use roce::wire::{PROCESS_PORT_BASE, ROCE_PORT};
use roce::world::{Memory, Path, RxFrame, TxFrame, Wire};
use rustix::net::{SendFlags, sendto};

use crate::capture::Capture;
use crate::interfaces;
use crate::local_peers::Doorbell;
use crate::packet::PacketTap;
use crate::rates::{RateLimits, receive_watched};
use crate::udp::receive::Receiver;
use crate::udp::send::{Route, Sender};
use crate::udp::socket::Socket;
use crate::udp::{IcrcCheck, UdpCounters, UdpError};

pub use groups::MAX_GROUPS;

use backlog::Backlog;
use locality::Locality;
use ports::{Kind, Port, Ports};

/// Highest slot; one more would be the upper bits of the multicast queue pair number.
pub const MAX_SLOT: u8 = 254;

/// How to open a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Its addresses. Each must be one of this machine's.
    pub addresses: Vec<IpAddr>,
    /// Its interface: scope of link-local addresses, and outgoing interface of multicast. 0 leaves
    /// it to the kernel.
    pub ifindex: u32,
    /// The port that peers send to: 4791, except in tests.
    pub port: u16,
    /// Socket buffer to request in each direction of each socket, in bytes as the kernel accounts
    /// them.
    pub socket_buffer_bytes: u32,
    /// Use segmented sends where the kernel has them.
    pub gso: bool,
    /// Let the kernel join datagrams where it can.
    pub gro: bool,
    /// How ICRCs are checked. With [`IcrcCheck::Strict`], packets from other machines over IPv4
    /// arrive by a packet socket if the process may open one, which is slower.
    pub check: IcrcCheck,
}

impl DeviceConfig {
    /// A device with these addresses on the interface with number `ifindex`, everything else at its
    /// default.
    pub fn new(addresses: Vec<IpAddr>, ifindex: u32) -> DeviceConfig {
        DeviceConfig {
            addresses,
            ifindex,
            port: ROCE_PORT,
            socket_buffer_bytes: 64 << 20,
            gso: true,
            gro: true,
            check: IcrcCheck::Verify,
        }
    }

    /// One of the addresses as a socket address.
    fn at(&self, ip: IpAddr, port: u16) -> SocketAddr {
        scoped(SocketAddr::new(ip, port), self.ifindex)
    }
}

/// Adds the interface's scope to an address that means something else on each interface, if it has
/// none.
fn scoped(addr: SocketAddr, ifindex: u32) -> SocketAddr {
    let SocketAddr::V6(v6) = addr else {
        return addr;
    };
    let [a, b, ..] = v6.ip().octets();
    // fe80::/10, and multicast with the scope "interface" or "link" in the low half of the second
    // byte.
    let of_link = (a == 0xfe && b & 0xc0 == 0x80) || (a == 0xff && matches!(b & 0x0f, 1 | 2));
    if !of_link || v6.scope_id() != 0 {
        return addr;
    }
    SocketAddrV6::new(*v6.ip(), v6.port(), v6.flowinfo(), ifindex).into()
}

/// What [`Wire::is_stalled`] and [`Doorbell::wake`] send to the port of a process, from the port of
/// ours. Who reads it counts and drops it.
const PROBE: [u8; 1] = crate::udp::WAKE_UP;

/// Names the packet socket among the places of ports.
const TAP: u64 = u64::MAX;

/// The process that a queue pair belongs to.
const fn slot(qpn: Qpn) -> u8 {
    (qpn.get() >> 16) as u8
}

/// The UDP port of a process.
const fn process_port(slot: u8) -> u16 {
    PROCESS_PORT_BASE + slot as u16
}

/// A RoCEv2 wire over all addresses of a device, shared with other processes.
#[derive(Debug)]
pub struct DeviceWire {
    config: DeviceConfig,
    slot: u8,
    ports: Ports,
    locality: Locality,
    backlog: Backlog,
    tap: Option<PacketTap>,
    why_no_tap: Option<String>,
    payload_limit: u32,
    sender: Sender,
    receiver: Receiver,
    counters: UdpCounters,
    capture: Option<Capture>,
    limits: RateLimits,
}

impl DeviceWire {
    /// Claims a slot and binds every address.
    ///
    /// # Errors
    /// When an address is not one of this machine's, no slot is free, or the kernel lacks an
    /// option. A shared port that cannot be bound is no error: peers on this machine do not need it
    /// ([`DeviceWire::why_not_shared`]).
    pub fn open(config: &DeviceConfig) -> Result<DeviceWire, UdpError> {
        let (slot, ports) = Ports::open(config)?;
        let (tap, why_no_tap) = strict::open(config);
        if let Some(tap) = &tap {
            ports.readiness.add(tap.fd(), TAP).map_err(UdpError::Socket)?;
        }
        Ok(DeviceWire {
            slot,
            tap,
            why_no_tap,
            ports,
            locality: Locality::now(),
            backlog: Backlog::new(),
            payload_limit: payload_limit(config),
            sender: Sender::new(config.gso),
            receiver: Receiver::new(),
            counters: UdpCounters::default(),
            capture: None,
            limits: RateLimits::from_environment(),
            config: config.clone(),
        })
    }

    /// Number of this process, 1–254: the upper 8 bits of its queue pair numbers.
    pub fn slot(&self) -> u8 {
        self.slot
    }

    /// The addresses, in the order of their indexes.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.config.addresses
    }

    /// Readable when packets wait. Stays the same when groups are joined and left.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.ports.readiness.as_fd()]
    }

    /// All that packets arrive at and leave by, and what the kernel is asked by: a forked child has
    /// copies of them, which go on receiving. Others are added and taken away when groups are
    /// joined and left.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let sockets = self.ports.all.iter().map(|port| port.socket.fd.as_fd());
        let others = [Some(self.ports.readiness.as_fd()), self.tap.as_ref().map(|tap| tap.fd())];
        sockets.chain(others.into_iter().flatten()).chain(self.backlog.fd()).collect()
    }

    /// Joins a multicast group. Packets that this machine sends to it arrive too. A group joined
    /// twice must be left twice.
    ///
    /// # Errors
    /// When the kernel refuses, the device has no address of the group's IP version, or the device
    /// is in [`MAX_GROUPS`] groups.
    pub fn join(&mut self, group: IpAddr) -> io::Result<()> {
        self.ports.join(&self.config, group)
    }

    /// Undoes one `join`.
    ///
    /// # Errors
    /// When the group was not joined.
    pub fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        self.ports.leave(group)
    }

    /// Largest path MTU that packets of this interface can have: 256, 512, 1024, 2048 or 4096.
    pub fn payload_limit(&self) -> u32 {
        self.payload_limit
    }

    /// Records every packet sent or accepted from now on in `capture`; `None` ends recording.
    pub fn capture_to(&mut self, capture: Option<Capture>) {
        self.capture = capture;
    }

    /// The active capture.
    pub fn capture(&self) -> Option<&Capture> {
        self.capture.as_ref()
    }

    /// The counters of the wire.
    pub fn counters(&self) -> &UdpCounters {
        &self.counters
    }

    /// Datagrams, or joined runs of them, lost because a receive buffer was full. One system call
    /// per socket.
    pub fn overrun(&self) -> u64 {
        self.ports.all.iter().filter_map(Port::overrun).map(u64::from).sum()
    }

    /// Why peers on other machines cannot reach an address, by address, if so.
    pub fn why_not_shared(&self) -> impl Iterator<Item = (IpAddr, &str)> {
        let reasons = self.ports.outlets.iter().map(|outlet| outlet.why_not_shared.as_deref());
        let with_address = self.config.addresses.iter().zip(reasons);
        with_address.filter_map(|(ip, why)| Some((*ip, why?)))
    }

    /// Which ICRC check is in force, and why none stricter.
    pub fn check_in_force(&self) -> String {
        match (&self.why_no_tap, &self.tap) {
            (Some(why), _) => format!("{}; strict was asked for ({why})", IcrcCheck::Verify),
            (None, Some(_)) => format!("{}, by packet socket", IcrcCheck::Strict),
            (None, None) => self.config.check.to_string(),
        }
    }

    /// Why segmented sends are not used, if so.
    pub fn why_no_gso(&self) -> Option<&str> {
        self.sender.why_no_gso()
    }

    /// Why received datagrams are not joined, if so.
    pub fn why_no_gro(&self) -> Option<&str> {
        self.ports.all.iter().find_map(|port| port.socket.why_no_gro.as_deref())
    }

    /// Sends frames from the address with index `source`.
    fn send_from(&mut self, source: u8, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        let DeviceWire { config, ports, locality, backlog, sender, counters, capture, .. } = self;
        let Some(socket) = ports.sending(source) else {
            counters.tx.dropped.family += frames.len() as u64;
            return;
        };
        let departure = Departure::new(config, socket, locality);
        departure.book(frames, backlog);
        let departure = Departure { backlog: Some(backlog), ..departure };
        sender.send(&departure, frames, memory, &mut counters.tx, capture.as_mut());
    }

    /// Receives from the packet socket.
    fn receive_strictly(&mut self, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let DeviceWire { config, slot, tap, counters, capture, .. } = self;
        let (Some(tap), rx) = (tap, &mut counters.rx) else {
            return 0;
        };
        let before = rx.accepted;
        let mut inspection = strict::Inspection { config, slot: *slot, capture, sink };
        rx.syscalls += 1;
        if tap.receive(&mut |_, packet| inspection.take(packet, rx)).is_err() {
            rx.errors += 1;
        }
        (rx.accepted - before) as usize
    }

    /// The check in force at a port.
    fn check_at(config: &DeviceConfig, port: &Port) -> IcrcCheck {
        // Anyone may send to the shared port and to groups, with any identification.
        let foreign = port.kind != Kind::Own;
        match config.check {
            IcrcCheck::Strict if foreign => IcrcCheck::Verify,
            check => check,
        }
    }

    /// Receives from one port; returns how many packets went to `sink`.
    fn receive_at(&mut self, at: usize, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        if at == TAP as usize {
            return self.receive_strictly(sink);
        }
        let DeviceWire { config, slot, ports, tap, receiver, sender, counters, capture, .. } = self;
        let Some(port) = ports.all.get(at) else {
            return 0;
        };
        let UdpCounters { rx, sharing, .. } = counters;
        let private = ports.private(port.via);
        let mut arrivals = forward::Arrivals {
            check: DeviceWire::check_at(config, port),
            left_to_strict: tap.is_some() && port.socket.local.is_ipv4(),
            slot: *slot,
            port,
            shared_port: config.port,
            ifindex: config.ifindex,
            private,
            sender,
            sharing,
            capture,
            sink,
        };
        receiver.receive(&port.socket.fd, rx, |run, rx| arrivals.take(run, rx))
    }

    /// Reads the port that had packets last, and the others only when it is empty. Every so often
    /// the others come first, so that none starves.
    fn receive_packets(&mut self, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        self.backlog.next_turn();
        let before = self.counters.rx.packets;
        let mut accepted = 0;
        if self.ports.prefer_hot() {
            accepted += self.receive_at(self.ports.hot, sink);
        }
        if self.counters.rx.packets == before {
            for at in self.ports.ready() {
                accepted += self.receive_at(at, sink);
                self.ports.hot = at;
            }
        }
        if let Some(capture) = &mut self.capture {
            capture.flush_if_due();
        }
        accepted
    }
}

impl Wire for DeviceWire {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.locality.refresh(now);
        self.limits.sent(now, frames);
        for run in frames.chunk_by(|a, b| a.path.source == b.path.source) {
            self.send_from(run[0].path.source, run, memory);
        }
        self.backlog.next_burst();
    }

    /// As many as the limits of the job allow and fit the buffer of a local process; no limit for
    /// other destinations.
    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        dest: Qpn,
        service: Transport,
        packets: usize,
    ) -> usize {
        let packets = self.limits.admits(now, path, packets);
        let DeviceWire { config, ports, locality, backlog, counters, .. } = self;
        let Some(socket) = ports.sending(path.source).filter(|_| packets > 0) else {
            return packets;
        };
        let departure = Departure::new(config, socket, locality);
        let Some(owner) = departure.process(path.remote, slot(dest)) else {
            return packets;
        };
        let admitted = backlog.admits(now, socket.local, owner, service, packets);
        counters.sharing.backpressure_waits = backlog.backpressure_waits;
        admitted
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.backlog.next_look().into_iter().chain(self.limits.next_wakeup()).min()
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        receive_watched(self, now, sink, |wire| &mut wire.limits, DeviceWire::receive_packets)
    }

    /// Local processes are recognised as stalled by the occupancy of their buffers.
    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool {
        if self.limits.holds_back(path) {
            return true;
        }
        let DeviceWire { config, ports, locality, backlog, .. } = self;
        let Some(socket) = ports.sending(path.source) else {
            return false;
        };
        let departure = Departure::new(config, socket, locality);
        let Some(owner) = departure.process(path.remote, slot(dest)) else {
            return false;
        };
        let private = ports.private(path.source);
        backlog.is_stalled(socket.local, owner, || {
            // Without it, the verdict is less certain.
            let _ = private.map(|own| sendto(&own.fd, &PROBE, SendFlags::DONTWAIT, &owner));
        })
    }
}

impl Doorbell for DeviceWire {
    fn wake(&mut self, path: &Path, dest: Qpn) {
        let DeviceWire { config, ports, locality, .. } = self;
        let Some(socket) = ports.sending(path.source) else {
            return;
        };
        locality.refresh_for(scoped(path.remote, config.ifindex));
        let owner = Departure::new(config, socket, locality).process(path.remote, slot(dest));
        if let (Some(owner), Some(own)) = (owner, ports.private(path.source)) {
            // If the buffer is full, the owner has something to wake up for.
            let _ = sendto(&own.fd, &PROBE, SendFlags::DONTWAIT, &owner);
        }
    }
}

impl fmt::Display for DeviceWire {
    /// One line for each choice made.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shared, own) = (self.config.port, process_port(self.slot));
        write!(
            f,
            "slot {} of this machine: UDP ports {shared} (shared) and {own} (own)",
            self.slot
        )?;
        for (ip, why) in self.why_not_shared() {
            write!(f, "\n{ip}: reached from this machine only: {why}")?;
        }
        match self.why_no_gso() {
            None => write!(f, "\nsends: segmented (UDP_SEGMENT)")?,
            Some(why) => write!(f, "\nsends: one by one ({why})")?,
        }
        match self.why_no_gro() {
            None => write!(f, "\nreceives: coalesced (UDP_GRO)")?,
            Some(why) => write!(f, "\nreceives: one by one ({why})")?,
        }
        match self.backlog.why_not() {
            None => {
                write!(f, "\nbetween processes: paced by receive-buffer occupancy (sock_diag)")?;
            }
            Some(why) => {
                write!(f, "\nbetween processes: full receive buffers drop packets ({why})")?;
            }
        }
        write!(f, "\nICRC: {}", self.check_in_force())?;
        if let Some(capture) = &self.capture {
            write!(f, "\n{capture}")?;
        }
        Ok(())
    }
}

/// The largest path MTU that fits the interface.
pub(crate) fn payload_limit(config: &DeviceConfig) -> u32 {
    /// Transport bytes around the longest payload: BTH, RETH, immediate, ICRC.
    const TRANSPORT: u32 = 12 + 16 + 4 + 4;
    let name = interfaces::name_of(config.ifindex);
    let link = name.and_then(|name| interfaces::mtu_of(&name).ok()).unwrap_or(1500);
    let v6 = config.addresses.iter().any(IpAddr::is_ipv6);
    let around = TRANSPORT + 8 + if v6 { 40 } else { 20 };
    let sizes = [4096, 2048, 1024, 512];
    sizes.into_iter().find(|size| size + around <= link).unwrap_or(256)
}

/// Frames being sent from one of the addresses.
struct Departure<'a> {
    socket: &'a Socket,
    locality: &'a Locality,
    /// Which processes have stopped reading, while packets are sent.
    backlog: Option<&'a Backlog>,
    port: u16,
    ifindex: u32,
}

impl<'a> Departure<'a> {
    fn new(config: &DeviceConfig, socket: &'a Socket, locality: &'a Locality) -> Departure<'a> {
        let DeviceConfig { port, ifindex, .. } = *config;
        Departure { socket, locality, backlog: None, port, ifindex }
    }

    /// The port of a process of this machine, if the packets are for one.
    fn process(&self, remote: SocketAddr, slot: u8) -> Option<SocketAddr> {
        let mut remote = scoped(remote, self.ifindex);
        let direct = remote.port() == self.port && (1..=MAX_SLOT).contains(&slot);
        let is_here = direct && self.locality.contains(remote);
        is_here.then(|| {
            remote.set_port(process_port(slot));
            remote
        })
    }

    /// Accounts for frames that go straight to local processes.
    fn book(&self, frames: &[TxFrame<'_>], backlog: &mut Backlog) {
        for run in frames.chunk_by(|a, b| self.together(a, b)) {
            let remote = self.remote(&run[0]);
            if remote.port() != run[0].path.remote.port() {
                let bytes = run.iter().map(|frame| frame.udp_payload_len() as u64).sum();
                backlog.sent(self.socket.local, remote, run.len() as u64, bytes);
            }
        }
    }
}

impl Route for Departure<'_> {
    fn socket(&self) -> &OwnedFd {
        &self.socket.fd
    }

    fn local(&self) -> SocketAddr {
        self.socket.local
    }

    fn loses(&self, remote: SocketAddr) -> bool {
        self.backlog.is_some_and(|backlog| backlog.loses(self.socket.local, remote))
    }

    fn together(&self, a: &TxFrame<'_>, b: &TxFrame<'_>) -> bool {
        a.path == b.path && slot(a.dest_qp()) == slot(b.dest_qp())
    }

    fn remote(&self, frame: &TxFrame<'_>) -> SocketAddr {
        let remote = frame.path.remote;
        let process = self.process(remote, slot(frame.dest_qp()));
        let is_absent = |process: &SocketAddr| {
            self.backlog.is_some_and(|backlog| backlog.is_absent(self.socket.local, *process))
        };
        let process = process.filter(|process| !is_absent(process));
        process.unwrap_or_else(|| scoped(remote, self.ifindex))
    }
}
