//! Receiving: a few large buffers, one system call, then the datagrams in them one by one.
//!
//! The buffers are as many as stay in the second-level cache together with the memory that the payload
//! is copied to: what the kernel has just written is read again at once, for the ICRC and the copy.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use roce::wire::icrc::{self, Pseudo};
use roce::wire::{Headers, WireError};
use roce::world::{Ecn, RxFrame};

use super::message::{Arrival, Control, Name};
use super::{Endpoints, IcrcCheck, RxCounters};

/// Buffers filled by one call: 256 KiB in all, about one full burst of a sender.
const BUFFERS: usize = 4;

/// System calls that one call makes while each fills all buffers. Together about as many packets as one
/// round of the drain loop sends, so that two endpoints in step do not overrun each other.
const ROUNDS: usize = 8;

/// Longest that the kernel delivers, joined or not.
const BUFFER_BYTES: usize = 64 << 10;

/// The kernel copies with `rep movsb`, which is several times slower where the destination lies 1 to 63
/// bytes behind the source modulo 4096. Its socket buffers mostly start on a page, and the allocator's
/// large blocks 16 bytes behind one: exactly there. On a page the buffers are out of the way.
const BUFFER_ALIGN: usize = 4096;

/// BTH and ICRC: nothing shorter is a packet.
const MIN_PACKET_BYTES: usize = 12 + 4;

/// Buffers of the receiving side, and the C structures that point to them.
pub(super) struct Receiver {
    check: IcrcCheck,
    /// The buffers, from `first` on.
    bytes: Vec<u8>,
    first: usize,
    names: Vec<Name>,
    controls: Vec<Control>,
    pieces: Vec<libc::iovec>,
    pub(super) messages: Vec<libc::mmsghdr>,
}

// SAFETY: the raw pointers lead to this value's own heap blocks, which move with it and never grow;
// they are followed only by calls that hold the receiver uniquely.
unsafe impl Send for Receiver {}

impl Receiver {
    pub(super) fn new(check: IcrcCheck) -> Receiver {
        let bytes = vec![0; BUFFERS * BUFFER_BYTES + BUFFER_ALIGN];
        // A vector never moves its block by itself, so the offset stays right.
        let first = bytes.as_ptr().align_offset(BUFFER_ALIGN).min(BUFFER_ALIGN);
        Receiver {
            check,
            bytes,
            first,
            names: vec![Name::empty(); BUFFERS],
            controls: vec![Control::EMPTY; BUFFERS],
            pieces: Vec::with_capacity(BUFFERS),
            messages: Vec::with_capacity(BUFFERS),
        }
    }

    pub(super) fn receive(
        &mut self,
        fd: &OwnedFd,
        endpoints: &Endpoints,
        counters: &mut RxCounters,
        sink: &mut dyn FnMut(&RxFrame<'_>),
    ) -> usize {
        let before = counters.accepted;
        for _ in 0..ROUNDS {
            let filled = self.fill(fd, counters);
            for i in 0..filled {
                match self.buffer(i) {
                    Some(buffer) => buffer.deliver(self.check, endpoints, counters, sink),
                    None => counters.truncated += 1,
                }
            }
            if filled < BUFFERS {
                break;
            }
        }
        (counters.accepted - before) as usize
    }

    /// Asks the kernel once, and returns how many buffers it filled.
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

    /// Sets every pointer and length anew: the kernel overwrote the lengths last time.
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

    /// The `i`-th filled buffer, unless something of it is missing.
    fn buffer(&self, i: usize) -> Option<Buffer<'_>> {
        let message = &self.messages[i];
        let header = &message.msg_hdr;
        if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
            return None;
        }
        let source = self.names[i].decode(header.msg_namelen)?;
        let len = (message.msg_len as usize).min(BUFFER_BYTES);
        let start = self.first + i * BUFFER_BYTES;
        // SAFETY: the control pointer leads to this receiver's control bytes, as the call left them.
        let arrival = unsafe { Arrival::decode(header) };
        Some(Buffer { source, arrival, bytes: &self.bytes[start..start + len] })
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("check", &self.check).finish_non_exhaustive()
    }
}

/// Datagrams of one sender and one marking, joined by the kernel or alone.
struct Buffer<'a> {
    source: SocketAddr,
    arrival: Arrival,
    bytes: &'a [u8],
}

impl Buffer<'_> {
    fn deliver(
        &self,
        check: IcrcCheck,
        endpoints: &Endpoints,
        counters: &mut RxCounters,
        sink: &mut dyn FnMut(&RxFrame<'_>),
    ) {
        let segment = self.arrival.segment.unwrap_or(self.bytes.len()).max(1);
        counters.gro_batches += u64::from(self.bytes.len() > segment);
        counters.bytes += self.bytes.len() as u64;
        if self.bytes.is_empty() {
            counters.packets += 1;
            counters.unparsable.too_short += 1;
        }
        for (place, packet) in self.bytes.chunks(segment).enumerate() {
            counters.packets += 1;
            let Some(pseudo) = endpoints.incoming(self.source, place as u16) else {
                counters.truncated += 1;
                continue;
            };
            if let Some((headers, payload)) = open(check, &pseudo, packet, counters) {
                counters.accepted += 1;
                let ecn = ecn_of(self.arrival.tos);
                sink(&RxFrame { source: self.source, ecn, headers, payload });
            }
        }
    }
}

/// Headers and payload of a packet that is whole and well formed; others are counted.
fn open<'a>(
    check: IcrcCheck,
    pseudo: &Pseudo,
    packet: &'a [u8],
    counters: &mut RxCounters,
) -> Option<(Headers, &'a [u8])> {
    if packet.len() < MIN_PACKET_BYTES {
        let error = WireError::Truncated { have: packet.len(), need: MIN_PACKET_BYTES };
        counters.unparsable.count(error);
        return None;
    }
    if check == IcrcCheck::Verify && !icrc_holds(pseudo, packet, counters) {
        counters.bad_icrc += 1;
        return None;
    }
    Headers::parse(packet).map_err(|error| counters.unparsable.count(error)).ok()
}

fn icrc_holds(pseudo: &Pseudo, packet: &[u8], counters: &mut RxCounters) -> bool {
    let Pseudo::V4 { id: expected, .. } = pseudo else {
        return icrc::verify(pseudo, packet);
    };
    let id = icrc::solve_id(pseudo, packet);
    counters.id_solved += u64::from(id.is_some_and(|id| id != *expected));
    id.is_some()
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
    // SAFETY: every message points to a name, control bytes and one buffer that live in the receiver,
    // which is held uniquely for the time of the call.
    let rc = unsafe {
        let len = messages.len() as u32;
        let flags = libc::MSG_DONTWAIT as _;
        libc::recvmmsg(fd.as_raw_fd(), messages.as_mut_ptr(), len, flags, std::ptr::null_mut())
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
