//! The lower seam: what carries packets, and what holds the bytes of registered memory.
//!
//! A [`Wire`] carries whole RoCE packets: it handles IP, UDP and the ICRC, because the ICRC covers
//! IP fields that only the wire has. A [`Memory`] turns the addresses in work requests into bytes.
//!
//! The endpoint may not enter: what joins it to both is in [`world`](crate::world).

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::num::NonZeroU32;
use core::sync::atomic::{AtomicU64, Ordering};

use arrayvec::ArrayVec;

use crate::memory::sg::{Placement, Placements};
use crate::time::Time;
use crate::verbs::{Ecn, Path, Qpn, Transport};
use crate::wire::telemetry::{Form, Report};
use crate::wire::{Headers, MAX_HEADER_BYTES};

/// Most packets handed to a wire in one call. A wire that joins packets of one size into segmented
/// sends loses part of a send at each end of a burst, so bursts are long.
pub const BURST_PACKETS: usize = 128;

/// Where a packet came from, according to its IP and UDP headers, or its GRH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The sender: source address and UDP source port. A RoCEv1 packet has the address in its
    /// source GID, and no port: 4791.
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
    /// Of a RoCEv1 packet: the first word of its GRH, in the order of the host. Never zero, because
    /// the version is 6.
    pub version_tclass_flow: Option<NonZeroU32>,
}

impl Origin {
    /// A packet from `source` to `dest` without further details.
    pub const fn new(source: SocketAddr, dest: IpAddr) -> Origin {
        let (ecn, version_tclass_flow) = (Ecn::NotEct, None);
        Origin { source, dest, via: 0, dscp: 0, ecn, hop_limit: 0, version_tclass_flow }
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
    /// The telemetry header in front of the others.
    pub telemetry: Telemetry,
}

/// The [telemetry header](crate::wire::telemetry) of a packet to send. Only connections whose ends
/// have agreed on it have one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Telemetry {
    /// None.
    #[default]
    None,
    /// An empty one, for switches to stamp.
    Collect(Form),
    /// What a packet of the peer has collected.
    Return(Box<Report>),
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

    /// Copies the payload into all of `into`, which has its length, from `memory` where it is
    /// registered memory.
    pub fn copy_to(&self, into: &mut [u8], memory: &dyn Memory) {
        match self {
            Payload::Gather(pieces) => gather(pieces, memory, into),
            Payload::Bytes(payload) => into.copy_from_slice(payload),
        }
    }

    /// Appends the payload to `bytes`, read from `memory` where it is registered memory.
    pub fn append_to(&self, bytes: &mut Vec<u8>, memory: &dyn Memory) {
        let start = bytes.len();
        bytes.resize(start + self.len(), 0);
        self.copy_to(&mut bytes[start..], memory);
    }
}

/// Copies registered memory into all of `into`, which has its length.
fn gather(pieces: &[Placement], memory: &dyn Memory, mut into: &mut [u8]) {
    for piece in pieces {
        let (place, later) = into.split_at_mut(piece.len as usize);
        memory.gather(piece.addr, place);
        into = later;
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
    /// The telemetry header, if it has one.
    pub telemetry: Option<&'a Report>,
}

/// Carries RoCE packets.
///
/// No method has a default: a wrapper that forgot one would disable it silently.
pub trait Wire {
    /// Sends the frames in order, payload gathered from `memory`. A wire may lose packets, so
    /// nothing is returned; a wire that is full counts what it dropped. A wire whose switches stamp
    /// nothing leaves telemetry headers out.
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory);

    /// Passes the packets that have arrived to `sink`, a bounded number of them, and returns how
    /// many. The wire counts and drops packets that do not parse or whose ICRC is wrong.
    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize;

    /// How many of `packets` packets on this path to the queue pair `dest` may be sent now: those
    /// that the receiver has room for, as far as the wire knows. Admitted packets that are not sent
    /// by the next `send` or `receive` lapse. After 0, query again at
    /// [`next_wakeup`](Wire::next_wakeup). A wire without knowledge of its receivers admits all.
    /// Datagrams do not wait for a receiver that has stopped: they are admitted, and lost.
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

    /// Whether packets on this path to the queue pair `dest` are unread, as far as the wire can
    /// know: the receiver exists, but is not running, and so cannot respond. Queried when an ACK
    /// timer has expired, never per packet. A receiver that has exited is not stalled.
    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool;
}

/// The kind of bytes behind the addresses of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Bytes that this processor reads and writes.
    Host,
    /// Nothing: gathered bytes are zero, scattered ones are discarded. For simulations that do not
    /// look at payload.
    Phantom,
}

/// Registered memory, by the addresses that regions were registered with.
///
/// Bytes are copied in and out and never borrowed: programs and devices may access them at the same
/// time. The endpoint only passes ranges inside registered regions; an implementation panics on
/// others where it can tell, because then a check in this crate is broken (C3).
pub trait Memory {
    /// Copies the bytes from `addr` on into all of `into`.
    fn gather(&self, addr: u64, into: &mut [u8]);

    /// Copies all of `from` to `addr`.
    fn scatter(&mut self, addr: u64, from: &[u8]);

    /// Executes an atomic on the 8-byte aligned word at `addr`, which is in host byte order, and
    /// returns its original value. Memory shared with programs uses the processor's own atomics.
    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64;

    /// The kind of its bytes. The simulated wire carries phantom bytes as a length.
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

    /// Executes it on a word that others may change at the same time, and returns the original
    /// value.
    pub fn execute(self, word: &AtomicU64) -> u64 {
        match self {
            AtomicOp::FetchAdd(add) => word.fetch_add(add, Ordering::SeqCst),
            AtomicOp::CompareSwap { compare, swap } => {
                let swapped =
                    word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
                swapped.unwrap_or_else(|original| original)
            }
        }
    }

    /// Executes it on a word in host byte order that nothing else accesses, and returns the
    /// original value.
    pub fn apply_to(self, word: &mut [u8]) -> u64 {
        let mut original = [0; 8];
        original.copy_from_slice(word);
        let original = u64::from_ne_bytes(original);
        word.copy_from_slice(&self.apply(original).to_ne_bytes());
        original
    }
}
