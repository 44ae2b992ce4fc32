//! The lower seam, and the one loop that joins an endpoint to it.
//!
//! A [`Wire`] carries whole RoCE packets: it handles IP, UDP and the ICRC, because the ICRC covers IP
//! fields that only the wire has. A [`Memory`] turns the addresses in work requests into bytes.
//! [`drain`] is the only code that uses both (C1): real drivers and simulated ones call it, so even the
//! order of calls is shared.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use arrayvec::ArrayVec;

use crate::endpoint::{Endpoint, Insert, Placement, Placements, Transmit};
use crate::time::Time;
use crate::verbs::{MULTICAST_QPN, Qpn, Transport};
use crate::wire::Headers;

pub use crate::wire::MAX_HEADER_BYTES;

/// Most packets handed to a wire in one call. A wire that joins packets of one size into segmented
/// sends loses part of a send at each end of a burst, so bursts are long.
pub const BURST_PACKETS: usize = 128;

/// Explicit congestion notification, the two low bits of the traffic class (RFC 3168).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ecn {
    /// Not capable.
    #[default]
    NotEct,
    /// Capable, codepoint 1.
    Ect1,
    /// Capable, codepoint 0 (what RoCE senders set).
    Ect0,
    /// Congestion experienced.
    Ce,
}

/// Where packets of a queue pair go and how they are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// The peer's address; the port is 4791 unless both sides agreed on another.
    pub remote: SocketAddr,
    /// DiffServ codepoint, 0–63.
    pub dscp: u8,
    /// ECN codepoint to send with.
    pub ecn: Ecn,
    /// Which of the wire's own addresses the packets leave from: index in its list, 0 if it has one.
    pub source: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
}

impl Path {
    /// The usual path to `remote`: ECN capable, no DSCP, from the wire's first address.
    pub const fn new(remote: SocketAddr) -> Path {
        Path { remote, dscp: 0, ecn: Ecn::Ect0, source: 0, hop_limit: 64 }
    }
}

/// Where a packet came from, according to its IP and UDP headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The sender: source address and UDP source port.
    pub source: SocketAddr,
    /// Address it was sent to: one of ours, or a multicast group.
    pub dest: IpAddr,
    /// Which of the wire's own addresses it arrived at, or for.
    pub via: u8,
    /// DiffServ codepoint.
    pub dscp: u8,
    /// ECN codepoint.
    pub ecn: Ecn,
    /// Time to live, or hop limit; 0 when the wire cannot see it.
    pub hop_limit: u8,
}

impl Origin {
    /// A packet from `source` to `dest` without further details.
    pub const fn new(source: SocketAddr, dest: IpAddr) -> Origin {
        Origin { source, dest, via: 0, dscp: 0, ecn: Ecn::NotEct, hop_limit: 0 }
    }
}

/// A packet to send.
#[derive(Debug)]
pub struct TxFrame<'a> {
    /// The path to its destination.
    pub path: Path,
    /// Encoded transport headers, BTH first.
    pub header: ArrayVec<u8, MAX_HEADER_BYTES>,
    /// What follows the headers.
    pub payload: Payload<'a>,
    /// Zero bytes after the payload, 0–3 (as the BTH says).
    pub pad: u8,
}

/// Where a packet's payload is before the wire takes it.
#[derive(Debug)]
pub enum Payload<'a> {
    /// In registered memory, to be gathered in this order.
    Gather(Placements),
    /// In a buffer that programs cannot access.
    Bytes(&'a [u8]),
}

impl Payload<'_> {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Payload::Gather(pieces) => pieces.iter().map(|piece| piece.len as usize).sum(),
            Payload::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether the packet ends with its headers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends the payload to `bytes`, read from `memory` where it is registered memory.
    pub fn append_to(&self, bytes: &mut Vec<u8>, memory: &dyn Memory) {
        match self {
            Payload::Gather(pieces) => gather(pieces, memory, bytes),
            Payload::Bytes(payload) => bytes.extend_from_slice(payload),
        }
    }
}

/// Appends registered memory to `bytes`.
pub(crate) fn gather(pieces: &[Placement], memory: &dyn Memory, bytes: &mut Vec<u8>) {
    for piece in pieces {
        let start = bytes.len();
        bytes.resize(start + piece.len as usize, 0);
        memory.gather(piece.addr, &mut bytes[start..]);
    }
}

impl TxFrame<'_> {
    /// The queue pair that the packet is for.
    pub fn dest_qp(&self) -> Qpn {
        Qpn::new(
            self.header
                .get(4..8)
                .map_or(0, |word| word.iter().fold(0, |value, &byte| value << 8 | u32::from(byte))),
        )
    }

    /// Bytes after the UDP header: headers, payload, pad and ICRC.
    pub fn udp_payload_len(&self) -> usize {
        self.header.len() + self.payload.len() + usize::from(self.pad) + 4
    }
}

/// A packet that arrived and whose ICRC the wire has verified.
#[derive(Debug)]
pub struct RxFrame<'a> {
    /// Where it came from.
    pub origin: Origin,
    /// Decoded transport headers.
    pub headers: Headers,
    /// Payload without pad and ICRC.
    pub payload: &'a [u8],
}

/// Carries RoCE packets.
///
/// No method has a default: a wrapper that forgot one would disable it silently.
pub trait Wire {
    /// Sends the frames in order, payload gathered from `memory`. A wire may lose packets, so nothing
    /// is returned; a wire that is full counts what it dropped.
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory);

    /// Passes the packets that have arrived to `sink`, a bounded number of them, and returns how many.
    /// The wire counts and drops packets that do not parse or whose ICRC is wrong.
    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize;

    /// How many of `packets` packets on this path to the queue pair `dest` may be sent now: those that
    /// the receiver has room for, as far as the wire knows. Admitted packets that are not sent by the
    /// next `send` or `receive` lapse. After 0, query again at [`next_wakeup`](Wire::next_wakeup). A
    /// wire without knowledge of its receivers admits all. Datagrams do not wait for a receiver that has
    /// stopped: they are admitted, and lost.
    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        dest: Qpn,
        service: Transport,
        packets: usize,
    ) -> usize;

    /// When a destination that admitted nothing may do so again: nothing else wakes its senders.
    fn next_wakeup(&self) -> Option<Time>;

    /// Whether packets on this path to the queue pair `dest` are unread, as far as the wire can know:
    /// the receiver exists, but is not running, and so cannot respond. Queried when an ACK timer has
    /// expired, never per packet. A receiver that has exited is not stalled.
    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool;
}

/// The kind of bytes behind the addresses of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Bytes that this processor reads and writes.
    Host,
    /// Nothing: gathered bytes are zero, scattered ones are discarded. For simulations that do not look
    /// at payload.
    Phantom,
}

/// Registered memory, by the addresses that regions were registered with.
///
/// Bytes are copied in and out and never borrowed: programs and devices may access them at the same
/// time. The endpoint only passes ranges inside registered regions; an implementation panics on others
/// where it can tell, because then a check in this crate is broken (C3).
pub trait Memory {
    /// Copies the bytes from `addr` on into all of `into`.
    fn gather(&self, addr: u64, into: &mut [u8]);

    /// Copies all of `from` to `addr`.
    fn scatter(&mut self, addr: u64, from: &[u8]);

    /// Executes an atomic on the 8-byte aligned word at `addr`, which is in host byte order, and
    /// returns its original value. Memory shared with programs uses the processor's own atomics.
    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64;

    /// The kind of its bytes.
    fn kind(&self) -> MemoryKind;
}

/// For frames with their own payload.
#[derive(Clone, Copy, Debug)]
pub struct NoMemory;

impl Memory for NoMemory {
    fn gather(&self, addr: u64, _into: &mut [u8]) {
        panic!("nothing is registered at {addr:#x}");
    }

    fn scatter(&mut self, addr: u64, _from: &[u8]) {
        panic!("nothing is registered at {addr:#x}");
    }

    fn atomic(&mut self, addr: u64, _op: AtomicOp) -> u64 {
        panic!("nothing is registered at {addr:#x}");
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// Memory that one thread uses exclusively between arriving packets: it may borrow the bytes, to
/// convert a block in place or to read it without another copy.
pub trait Staging: Memory {
    /// The bytes at `addr`.
    fn bytes(&self, addr: u64, len: usize) -> &[u8];

    /// The bytes at `addr`, mutable.
    fn bytes_mut(&mut self, addr: u64, len: usize) -> &mut [u8];
}

/// What an atomic does to a 64-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Stores `swap` if the word equals `compare`.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Adds, wrapping.
    FetchAdd(u64),
}

impl AtomicOp {
    /// The word's value after the operation.
    pub const fn apply(self, original: u64) -> u64 {
        match self {
            AtomicOp::CompareSwap { compare, swap } if original == compare => swap,
            AtomicOp::CompareSwap { .. } => original,
            AtomicOp::FetchAdd(add) => original.wrapping_add(add),
        }
    }

    /// Executes it on a word in host byte order that nothing else accesses, and returns the original
    /// value.
    pub fn apply_to(self, word: &mut [u8]) -> u64 {
        let mut original = [0; 8];
        original.copy_from_slice(word);
        let original = u64::from_ne_bytes(original);
        word.copy_from_slice(&self.apply(original).to_ne_bytes());
        original
    }
}

/// What one [`turn`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Packets received.
    pub received: usize,
    /// Packets sent.
    pub sent: usize,
    /// The program reports that it did something.
    pub worked: bool,
}

impl Progress {
    /// Whether there was nothing to do.
    pub const fn is_idle(self) -> bool {
        self.received == 0 && self.sent == 0 && !self.worked
    }
}

/// Most packets that one [`turn`] sends: a long message must not starve receiving.
const MAX_SENT: usize = 2 * BURST_PACKETS;

/// Receives once, handles expired timers, and sends what is pending: a [`turn`] in which the program
/// does nothing.
pub fn drain<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &mut M,
    now: Time,
) -> Progress {
    turn(endpoint, wire, memory, now, |_, _| false)
}

/// Receives once, handles expired timers, lets the program `work`, and sends what is pending, up to a
/// bound. `work` returns whether it did anything.
///
/// Call it again at once while it reports progress; otherwise when the wire has packets, when
/// [`next_wakeup`] is due, or when work was posted.
pub fn turn<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &mut M,
    now: Time,
    work: impl FnOnce(&mut Endpoint, &mut M) -> bool,
) -> Progress {
    let received = wire.receive(now, &mut |frame| accept(endpoint, memory, now, frame));
    endpoint.handle_timeout_unless(now, &mut |path, dest| wire.is_stalled(path, dest));
    let worked = work(endpoint, memory);
    endpoint.unpark(now);
    let mut sent = send_gathered(endpoint, wire, memory, now);
    while sent < MAX_SENT {
        let burst = send_burst(endpoint, wire, memory, now);
        sent += burst;
        if burst < BURST_PACKETS {
            break;
        }
    }
    endpoint.park_until(now, wire.next_wakeup());
    Progress { received, sent, worked }
}

/// When to call [`turn`] next if nothing else happens.
pub fn next_wakeup(endpoint: &Endpoint) -> Option<Time> {
    let timer = endpoint.poll_timeout().map(|(at, _)| at);
    timer.into_iter().chain(endpoint.parked_until()).min()
}

fn accept<M: Memory>(endpoint: &mut Endpoint, memory: &mut M, now: Time, frame: &RxFrame<'_>) {
    let dest_qp = frame.headers.bth().dest_qp;
    let group = frame.origin.dest;
    if dest_qp != MULTICAST_QPN {
        return accept_for(dest_qp, endpoint, memory, now, frame);
    }
    let mut next = endpoint.next_of_group(group, None);
    if next.is_none() {
        // The endpoint counts it as a packet for an unknown queue pair.
        accept_for(dest_qp, endpoint, memory, now, frame);
    }
    while let Some(qpn) = next {
        accept_for(qpn, endpoint, memory, now, frame);
        next = endpoint.next_of_group(group, next);
    }
}

fn accept_for<M: Memory>(
    qpn: Qpn,
    endpoint: &mut Endpoint,
    memory: &mut M,
    now: Time,
    frame: &RxFrame<'_>,
) {
    let len = frame.payload.len();
    let mut delivery = endpoint.handle_packet_for(qpn, now, &frame.origin, &frame.headers, len);
    if delivery.owed_packets > 0 {
        gather_answers(endpoint, memory, now, qpn, delivery.owed_packets as usize);
        delivery = endpoint.handle_held(qpn, now, &frame.headers, len);
    }
    match delivery.insert {
        Insert::None => place(memory, &delivery.pieces, &[], frame.payload),
        Insert::Value(value) => {
            place(memory, &delivery.pieces, &value.to_ne_bytes(), frame.payload);
        }
        Insert::RouteHeader(grh) => place(memory, &delivery.pieces, &grh, frame.payload),
        Insert::Atomic(job) => {
            let original = memory.atomic(job.addr, job.op);
            endpoint.complete_atomic(now, &job, original);
        }
    }
}

/// Reads the bytes for the peer's READs, before a request behind them changes these.
fn gather_answers<M: Memory>(
    endpoint: &mut Endpoint,
    memory: &M,
    now: Time,
    qpn: Qpn,
    owed: usize,
) {
    let mut outbox = core::mem::take(&mut endpoint.outbox);
    if outbox.has_room(qpn, owed) {
        let answers = core::iter::from_fn(|| endpoint.poll_response(qpn, now));
        answers.take(owed).for_each(|answer| outbox.push(qpn, answer, memory));
    }
    endpoint.outbox = outbox;
}

/// Fills `pieces` with the bytes of `first`, then those of `then`, until they are full or the bytes run
/// out.
fn place<M: Memory>(memory: &mut M, pieces: &[Placement], first: &[u8], then: &[u8]) {
    let mut sources = [first, then];
    for piece in pieces {
        let (mut addr, mut left) = (piece.addr, piece.len as usize);
        for source in &mut sources {
            let (bytes, later) = source.split_at(left.min(source.len()));
            if !bytes.is_empty() {
                memory.scatter(addr, bytes);
            }
            (addr, left) = (addr + bytes.len() as u64, left - bytes.len());
            *source = later;
        }
    }
}

/// Sends gathered READ responses, as far as their destinations admit them.
fn send_gathered<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &M,
    now: Time,
) -> usize {
    let mut sent = 0;
    while sent < MAX_SENT && endpoint.outbox.len() > 0 {
        let chosen = endpoint
            .outbox
            .choose(&mut |path, dest| wire.admits(now, path, dest, Transport::Rc, 1) > 0);
        if chosen == 0 {
            break;
        }
        wire.send(now, &endpoint.outbox.frames(), memory);
        endpoint.outbox.remove_chosen();
        sent += chosen;
    }
    sent
}

/// Sends up to [`BURST_PACKETS`] packets and returns how many.
fn send_burst<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &M,
    now: Time,
) -> usize {
    let mut frames = ArrayVec::<TxFrame<'_>, BURST_PACKETS>::new();
    let mut admits =
        |path: &Path, dest, service, packets| wire.admits(now, path, dest, service, packets);
    while !frames.is_full()
        && let Some(transmit) = endpoint.poll_admitted(now, &mut admits)
    {
        let Transmit { path, headers, payload, pad } = transmit;
        frames.push(TxFrame {
            path,
            header: headers.emit(),
            payload: Payload::Gather(payload),
            pad,
        });
    }
    let sent = frames.len();
    if sent > 0 {
        wire.send(now, &frames, memory);
    }
    endpoint.end_grant();
    sent
}
