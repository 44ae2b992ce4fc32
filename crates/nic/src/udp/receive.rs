//! Receiving: one system call fills a few large buffers, then each datagram in them is processed.
//!
//! The buffers fit the second-level cache together with the memory that the payload is copied to,
//! because what the kernel has just written is read at once, for the ICRC and the copy.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use roce::wire::icrc::{self, Pseudo};
use roce::wire::{Headers, WireError};
use roce::world::{Ecn, Origin, RxFrame};

use super::message::{Arrival, Control};
use super::{IcrcCheck, RxCounters, WAKE_UP, pseudo};
use crate::capture::{Capture, Seen};
use crate::sockaddr::Name;

/// Buffers filled by one call: 256 KiB in all, about one full burst of a sender.
const BUFFERS: usize = 4;

/// System calls per call of `receive`, each filling all buffers. Together they hold about as many
/// packets as one turn sends, so that two endpoints in step do not overrun each
/// other.
const ROUNDS: usize = 8;

/// Longest that the kernel delivers, joined or not.
const BUFFER_BYTES: usize = 64 << 10;

/// The kernel copies with `rep movsb`, which is several times slower when the destination is 1 to
/// 63 bytes behind the source modulo 4096. Socket buffers mostly start on a page, and large blocks
/// of the allocator 16 bytes behind one: the bad case. Page alignment avoids it.
const BUFFER_ALIGN: usize = 4096;

/// Identifications of a segmented send of this kind of machine: as many as its segments
/// (`UDP_MAX_SEGMENTS`). The place in a joined run is one of them; the place is unknown where the
/// kernel has split a run into single packets.
const OWN_IDS: u16 = 128;

/// BTH and ICRC: nothing shorter is a packet.
const MIN_PACKET_BYTES: usize = 12 + 4;

/// Buffers of the receiving side, and the C structures that point to them.
pub(crate) struct Receiver {
    /// The buffers, from `first` on.
    bytes: Vec<u8>,
    first: usize,
    names: Vec<Name>,
    controls: Vec<Control>,
    pieces: Vec<libc::iovec>,
    pub(crate) messages: Vec<libc::mmsghdr>,
}

// SAFETY: the raw pointers lead to this value's own heap blocks, which move with it and never grow;
// they are followed only by calls that hold the receiver uniquely.
unsafe impl Send for Receiver {}

impl Receiver {
    pub(crate) fn new() -> Receiver {
        let bytes = vec![0; BUFFERS * BUFFER_BYTES + BUFFER_ALIGN];
        // A vector never moves its block by itself, so the offset stays right.
        let first = bytes.as_ptr().align_offset(BUFFER_ALIGN).min(BUFFER_ALIGN);
        Receiver {
            bytes,
            first,
            names: vec![Name::empty(); BUFFERS],
            controls: vec![Control::EMPTY; BUFFERS],
            pieces: Vec::with_capacity(BUFFERS),
            messages: Vec::with_capacity(BUFFERS),
        }
    }

    /// Passes a bounded number of the socket's waiting datagrams to `take`, and returns how many
    /// packets were accepted meanwhile.
    pub(crate) fn receive(
        &mut self,
        fd: &OwnedFd,
        counters: &mut RxCounters,
        mut take: impl FnMut(&Run<'_>, &mut RxCounters),
    ) -> usize {
        let before = counters.accepted;
        for _ in 0..ROUNDS {
            let filled = self.fill(fd, counters);
            for i in 0..filled {
                match self.run(i) {
                    Some(run) => {
                        run.count(counters);
                        take(&run, counters);
                    }
                    None => counters.truncated += 1,
                }
            }
            if filled < BUFFERS {
                break;
            }
        }
        (counters.accepted - before) as usize
    }

    /// Makes one receive call, and returns how many buffers it filled.
    fn fill(&mut self, fd: &OwnedFd, counters: &mut RxCounters) -> usize {
        self.point();
        counters.syscalls += 1;
        match receive_messages(fd, &mut self.messages) {
            Ok(filled) => filled,
            Err(libc::EAGAIN | libc::EINTR) => 0,
            Err(_) => {
                counters.errors += 1;
                0
            }
        }
    }

    /// Resets every pointer and length: the last call overwrote the lengths.
    fn point(&mut self) {
        self.pieces.clear();
        self.messages.clear();
        let chunks = self.bytes[self.first..].chunks_exact_mut(BUFFER_BYTES);
        self.pieces.extend(chunks.take(BUFFERS).map(|chunk| libc::iovec {
            iov_base: chunk.as_mut_ptr().cast(),
            iov_len: chunk.len(),
        }));
        for i in 0..BUFFERS {
            // SAFETY: all zeroes is a valid mmsghdr.
            let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
            message.msg_hdr.msg_name = (&raw mut self.names[i]).cast();
            message.msg_hdr.msg_namelen = Name::BYTES;
            message.msg_hdr.msg_iov = &raw mut self.pieces[i];
            message.msg_hdr.msg_iovlen = 1;
            message.msg_hdr.msg_control = self.controls[i].as_mut_ptr();
            message.msg_hdr.msg_controllen = Control::BYTES as _;
            self.messages.push(message);
        }
    }

    /// Contents of the `i`-th buffer, unless the kernel truncated something.
    fn run(&self, i: usize) -> Option<Run<'_>> {
        let message = &self.messages[i];
        let header = &message.msg_hdr;
        if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
            return None;
        }
        let source = self.names[i].decode(header.msg_namelen)?;
        let len = (message.msg_len as usize).min(BUFFER_BYTES);
        let start = self.first + i * BUFFER_BYTES;
        // SAFETY: the control pointer leads to this receiver's control bytes, as the call left
        // them.
        let arrival = unsafe { Arrival::decode(header) };
        Some(Run { source, arrival, bytes: &self.bytes[start..start + len] })
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

/// Datagrams of one sender and one marking, joined by the kernel or alone.
pub(crate) struct Run<'a> {
    pub(crate) source: SocketAddr,
    pub(crate) arrival: Arrival,
    bytes: &'a [u8],
}

impl<'a> Run<'a> {
    fn segment(&self) -> usize {
        self.arrival.segment.unwrap_or(self.bytes.len()).max(1)
    }

    fn count(&self, counters: &mut RxCounters) {
        counters.gro_batches += u64::from(self.bytes.len() > self.segment());
        counters.bytes += self.bytes.len() as u64;
        if self.bytes.is_empty() {
            counters.packets += 1;
            counters.unparsable.too_short += 1;
        }
    }

    /// The datagrams, each with its place in the run.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        (0..).zip(self.bytes.chunks(self.segment()))
    }

    /// Origin of the packets of the run, which were sent to `dest`.
    pub(crate) fn origin(&self, dest: IpAddr, via: u8) -> Origin {
        origin(self.source, dest, via, self.arrival.tos, self.arrival.hop_limit)
    }

    /// Passes every valid packet, sent to `local`, to `sink`.
    pub(super) fn deliver(
        &self,
        check: IcrcCheck,
        local: SocketAddr,
        counters: &mut RxCounters,
        mut tap: Option<&mut Capture>,
        sink: &mut dyn FnMut(&RxFrame<'_>),
    ) {
        let origin = self.origin(local.ip(), 0);
        for (place, packet) in self.datagrams() {
            if packet == WAKE_UP {
                counters.wake_ups += 1;
                continue;
            }
            let Some(opened) = self.open(check, local, place, packet, counters) else {
                continue;
            };
            if let Some(capture) = tap.as_deref_mut() {
                capture.record(&self.seen(local, opened.id), [packet]);
            }
            counters.accepted += 1;
            sink(&RxFrame {
                origin,
                headers: opened.headers,
                payload: opened.payload,
                telemetry: None,
            });
        }
    }

    /// A datagram of this run as a packet sent to `local`; malformed packets are counted.
    pub(crate) fn open(
        &self,
        check: IcrcCheck,
        local: SocketAddr,
        place: u16,
        packet: &'a [u8],
        counters: &mut RxCounters,
    ) -> Option<Opened<'a>> {
        let id = self.verify(check, local, place, packet, counters)?;
        open(packet, id, counters)
    }

    /// The identification for which a datagram sent to `local` has the correct ICRC, if any.
    pub(crate) fn verify(
        &self,
        check: IcrcCheck,
        local: SocketAddr,
        place: u16,
        packet: &[u8],
        counters: &mut RxCounters,
    ) -> Option<u16> {
        counters.packets += 1;
        let Some(pseudo) = pseudo(self.source, local, place) else {
            counters.truncated += 1;
            return None;
        };
        verify(check, &pseudo, packet, counters)
    }

    /// The IP and UDP headers of a packet with this identification, for a capture.
    pub(crate) fn seen(&self, local: SocketAddr, id: u16) -> Seen {
        let Arrival { tos, hop_limit, .. } = self.arrival;
        Seen { from: self.source, to: local, tos, hop_limit, id }
    }
}

/// Origin of a packet, with its traffic class split into DSCP and ECN.
pub(crate) fn origin(source: SocketAddr, dest: IpAddr, via: u8, tos: u8, hop_limit: u8) -> Origin {
    Origin { via, dscp: tos >> 2, ecn: ecn_of(tos), hop_limit, ..Origin::new(source, dest) }
}

/// A complete, well-formed packet.
pub(crate) struct Opened<'a> {
    pub(crate) headers: Headers,
    pub(crate) payload: &'a [u8],
    /// The IPv4 identification that it had; 0 over IPv6.
    pub(crate) id: u16,
}

/// Headers and payload of a packet whose ICRC is correct; malformed packets are counted.
pub(crate) fn open<'a>(packet: &'a [u8], id: u16, counters: &mut RxCounters) -> Option<Opened<'a>> {
    let (headers, payload) =
        Headers::parse(packet).map_err(|error| counters.unparsable.count(error)).ok()?;
    Some(Opened { headers, payload, id })
}

/// The identification for which the ICRC of a packet is correct; packets without one are counted.
fn verify(
    check: IcrcCheck,
    pseudo: &Pseudo,
    packet: &[u8],
    counters: &mut RxCounters,
) -> Option<u16> {
    if packet.len() < MIN_PACKET_BYTES {
        let error = WireError::Truncated { have: packet.len(), need: MIN_PACKET_BYTES };
        counters.unparsable.count(error);
        return None;
    }
    let id = identification(check, pseudo, packet, counters);
    counters.bad_icrc += u64::from(id.is_none());
    id
}

/// The identification for which the ICRC is correct, if any.
fn identification(
    check: IcrcCheck,
    pseudo: &Pseudo,
    packet: &[u8],
    counters: &mut RxCounters,
) -> Option<u16> {
    let expected = match pseudo {
        Pseudo::V4 { id, .. } => *id,
        Pseudo::V6 { .. } | Pseudo::Grh { .. } => 0,
    };
    match check {
        IcrcCheck::Off => Some(expected),
        IcrcCheck::Verify | IcrcCheck::Strict => {
            let id = icrc::solve_id(pseudo, packet);
            counters.unexpected_ip_ids += u64::from(id.is_some_and(|id| id != expected));
            id.filter(|id| check == IcrcCheck::Verify || *id == expected || *id < OWN_IDS)
        }
    }
}

fn ecn_of(tos: u8) -> Ecn {
    match tos & 3 {
        0 => Ecn::NotEct,
        1 => Ecn::Ect1,
        2 => Ecn::Ect0,
        _ => Ecn::Ce,
    }
}

fn receive_messages(fd: &OwnedFd, messages: &mut [libc::mmsghdr]) -> Result<usize, i32> {
    // SAFETY: every message points to a name, control bytes and one buffer that live in the
    // receiver, which is held uniquely for the time of the call.
    let rc = unsafe {
        let len = messages.len() as u32;
        let flags = libc::MSG_DONTWAIT as _;
        libc::recvmmsg(fd.as_raw_fd(), messages.as_mut_ptr(), len, flags, std::ptr::null_mut())
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
