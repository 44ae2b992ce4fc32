//! Sending: frames to groups, groups to segmented sends, many of them in one system call.
//!
//! A group is a run of frames with one path and one length (the last may be shorter). The kernel cuts
//! it into datagrams again and numbers them 0, 1, 2 … in the IPv4 identification field, so the ICRC
//! of a frame is computed with its place in the group. The pieces of a group are gathered from where
//! they lie; only the few bytes between two payloads (pad and ICRC of one frame, headers of the next)
//! are put side by side first, which halves the number of pieces.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use roce::verbs::MAX_SGE;
use roce::wire::icrc::Icrc;
use roce::world::{BURST_PACKETS, Ecn, MAX_HEADER_BYTES, Path, TxFrame};
use rustix::event::{PollFd, PollFlags, poll};

use super::message::{Control, Integer, Name};
use super::{SEND_WAIT, TxCounters, pseudo};
use crate::capture::{Capture, Seen};
use crate::clock;
use crate::waiter::timespec;

/// Most datagrams in one segmented send (UDP_MAX_SEGMENTS; newer kernels allow more).
const MAX_SEGMENTS: usize = 64;

/// Most UDP payload bytes in one send over IPv4; IPv6 allows a few more, which gain nothing.
const MAX_SEND_BYTES: usize = 65_507;

/// Pad and ICRC of one frame and headers of the next.
const SEAM_BYTES: usize = 3 + 4 + MAX_HEADER_BYTES;

/// The time to live that sockets send with by themselves (RFC 1700's default, and Linux's).
pub(crate) const USUAL_HOP_LIMIT: u8 = 64;

/// Where frames leave, and where each of them goes.
pub(crate) trait Route {
    /// The socket to send from.
    fn socket(&self) -> &OwnedFd;

    /// Its address.
    fn local(&self) -> SocketAddr;

    /// Whether two frames may share a segmented send, their lengths aside.
    fn together(&self, a: &TxFrame<'_>, b: &TxFrame<'_>) -> bool;

    /// Address and port to send a frame to.
    fn remote(&self, frame: &TxFrame<'_>) -> SocketAddr;
}

/// Frames that leave in one send.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) frames: Range<usize>,
    /// UDP payload of every frame but the last, in bytes.
    pub(super) segment: usize,
    /// UDP payload of all frames together, in bytes.
    bytes: usize,
    /// Where they go.
    remote: SocketAddr,
    /// Whether the kernel took them.
    sent: bool,
}

/// How far a planned burst got.
enum Progress {
    /// Every frame is sent, or dropped and counted.
    Done,
    /// The kernel would not take this group as a segmented send. Frames before it are done.
    Refused { group: Group, errno: i32 },
}

/// Scratch space of the sending side. Its pointers mean nothing between two calls.
pub(crate) struct Sender {
    groups: Vec<Group>,
    seams: Vec<u8>,
    /// Where each frame's seam ends in `seams`.
    seam_ends: Vec<usize>,
    pieces: Vec<libc::iovec>,
    names: Vec<Name>,
    controls: Vec<Control>,
    messages: Vec<libc::mmsghdr>,
    why_no_gso: Option<String>,
}

// SAFETY: the raw pointers in `pieces` and `messages` are written and used within one call that holds
// the sender uniquely; whatever they are when it moves to another thread is never followed.
unsafe impl Send for Sender {}

impl Sender {
    pub(crate) fn new(gso: bool) -> Sender {
        let why_no_gso = (!gso).then(|| String::from("turned off by configuration"));
        Sender {
            groups: Vec::with_capacity(BURST_PACKETS),
            seams: Vec::with_capacity(BURST_PACKETS * (SEAM_BYTES + MAX_HEADER_BYTES)),
            seam_ends: Vec::with_capacity(BURST_PACKETS),
            pieces: Vec::with_capacity(BURST_PACKETS * (MAX_SGE + 2)),
            names: Vec::with_capacity(BURST_PACKETS),
            controls: Vec::with_capacity(BURST_PACKETS),
            messages: Vec::with_capacity(BURST_PACKETS),
            why_no_gso,
        }
    }

    pub(crate) fn why_no_gso(&self) -> Option<&str> {
        self.why_no_gso.as_deref()
    }

    /// Sends `frames` in order, and shows those that the kernel took to `tap`.
    pub(crate) fn send<R: Route>(
        &mut self,
        route: &R,
        frames: &[TxFrame<'_>],
        counters: &mut TxCounters,
        mut tap: Option<&mut Capture>,
    ) {
        let mut patience = Patience::new();
        for burst in frames.chunks(BURST_PACKETS) {
            let mut rest = burst;
            while !rest.is_empty() {
                rest = self.send_burst(route, rest, counters, &mut patience, tap.as_deref_mut());
            }
        }
    }

    /// Sends frames in segmented sends and returns those after a group that had to go one by one.
    fn send_burst<'a, 'b, R: Route>(
        &mut self,
        route: &R,
        frames: &'a [TxFrame<'b>],
        counters: &mut TxCounters,
        patience: &mut Patience,
        mut tap: Option<&mut Capture>,
    ) -> &'a [TxFrame<'b>] {
        let segments = if self.why_no_gso.is_some() { 1 } else { MAX_SEGMENTS };
        self.prepare(route, frames, segments, counters);
        let progress = self.transmit(route.socket(), counters, patience);
        self.show(route, frames, tap.as_deref_mut());
        let Progress::Refused { group, errno } = progress else {
            return &[];
        };
        let (single, rest) = (&frames[group.frames.clone()], &frames[group.frames.end..]);
        self.prepare(route, single, 1, counters);
        self.transmit(route.socket(), counters, patience);
        self.show(route, single, tap);
        if self.groups.first().is_some_and(|first| first.sent) {
            // One by one they pass, so it is the segmentation that this kernel or device cannot do.
            // Otherwise the path takes no packets of this length either way; that the last one, which
            // may be shorter, passes says nothing.
            self.why_no_gso = Some(refusal_text(&group, errno));
        }
        rest
    }

    /// Records what the kernel took of `frames`, as they were planned last.
    fn show<R: Route>(&self, route: &R, frames: &[TxFrame<'_>], tap: Option<&mut Capture>) {
        let Some(capture) = tap else {
            return;
        };
        for group in self.groups.iter().filter(|group| group.sent) {
            for (id, frame) in (0..).zip(&frames[group.frames.clone()]) {
                record(capture, route.local(), group.remote, frame, id);
            }
        }
    }

    /// Lays out everything that the kernel needs for `frames`.
    fn prepare<R: Route>(
        &mut self,
        route: &R,
        frames: &[TxFrame<'_>],
        segments: usize,
        counters: &mut TxCounters,
    ) {
        plan(route, frames, segments, &mut self.groups);
        let local = route.local();
        self.groups.retain(|group| {
            let same = group.remote.is_ipv4() == local.is_ipv4();
            counters.dropped.family += if same { 0 } else { group.frames.len() as u64 };
            same
        });
        self.seams.clear();
        self.seam_ends.clear();
        for group in &self.groups {
            let frames = &frames[group.frames.clone()];
            write_seams(local, group.remote, frames, &mut self.seams, &mut self.seam_ends);
        }
        self.lay_out(frames);
    }

    /// Fills the C structures. From here to the end of `transmit` no vector may grow.
    fn lay_out(&mut self, frames: &[TxFrame<'_>]) {
        self.pieces.clear();
        self.names.clear();
        self.controls.clear();
        self.messages.clear();
        let mut seams = Seams { bytes: &self.seams, ends: &self.seam_ends, at: 0 };
        for group in &self.groups {
            let path = frames[group.frames.start].path;
            let first_piece = self.pieces.len();
            push_pieces(&mut self.pieces, &frames[group.frames.clone()], &mut seams);
            let (name, name_len) = Name::encode(group.remote);
            let mut control = Control::EMPTY;
            let segment = (group.frames.len() > 1).then_some(group.segment as u16);
            let control_len = control.encode(traffic_class(&path), hop_limit(&path), segment);
            self.names.push(name);
            self.controls.push(control);
            // SAFETY: all zeroes is a valid mmsghdr.
            let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
            message.msg_hdr.msg_namelen = name_len;
            message.msg_hdr.msg_iovlen = (self.pieces.len() - first_piece) as _;
            message.msg_hdr.msg_controllen = control_len as _;
            self.messages.push(message);
        }
        self.point();
    }

    /// Sets the pointers, now that every vector has its final length.
    #[allow(clippy::unnecessary_cast, reason = "the length's type differs between C libraries")]
    fn point(&mut self) {
        let mut piece = self.pieces.as_mut_ptr();
        for (i, message) in self.messages.iter_mut().enumerate() {
            let header = &mut message.msg_hdr;
            header.msg_name = (&raw mut self.names[i]).cast();
            header.msg_control = self.controls[i].as_mut_ptr();
            header.msg_iov = piece;
            // SAFETY: the message lengths were counted while these pieces were pushed, so the sum of
            // all of them is the length of `pieces`.
            piece = unsafe { piece.add(header.msg_iovlen as usize) };
        }
    }

    /// Hands the messages to the kernel until they are gone or one is refused as segmented.
    fn transmit(
        &mut self,
        fd: &OwnedFd,
        counters: &mut TxCounters,
        patience: &mut Patience,
    ) -> Progress {
        let mut done = 0;
        while done < self.messages.len() {
            counters.syscalls += 1;
            match send_messages(fd, &mut self.messages[done..]) {
                Ok(sent) => {
                    let taken = &mut self.groups[done..done + sent];
                    taken.iter_mut().for_each(|group| count(counters, group));
                    done += sent;
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN | libc::ENOBUFS) if patience.wait(fd, counters) => {}
                Err(libc::EAGAIN | libc::ENOBUFS) => {
                    let left = self.groups[done..].iter().map(|group| group.frames.len() as u64);
                    counters.dropped.full += left.sum::<u64>();
                    return Progress::Done;
                }
                Err(errno) => {
                    let group = self.groups[done].clone();
                    if group.frames.len() > 1 && is_about_segmentation(errno) {
                        return Progress::Refused { group, errno };
                    }
                    drop_group(counters, &group, errno);
                    done += 1;
                }
            }
        }
        Progress::Done
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("why_no_gso", &self.why_no_gso).finish_non_exhaustive()
    }
}

/// Splits `frames` into groups of at most `segments` frames.
pub(super) fn plan<R: Route>(
    route: &R,
    frames: &[TxFrame<'_>],
    segments: usize,
    groups: &mut Vec<Group>,
) {
    groups.clear();
    for (i, frame) in frames.iter().enumerate() {
        let len = frame.udp_payload_len();
        if let Some(group) = groups.last_mut()
            && group.frames.len() < segments
            && group.bytes == group.frames.len() * group.segment
            && len <= group.segment
            && group.bytes + len <= MAX_SEND_BYTES
            && route.together(&frames[group.frames.start], frame)
        {
            group.frames.end = i + 1;
            group.bytes += len;
        } else {
            let remote = route.remote(frame);
            groups.push(Group { frames: i..i + 1, segment: len, bytes: len, remote, sent: false });
        }
    }
}

/// Appends the seams of one group: headers of the first frame, then after each frame its pad and ICRC
/// and the headers of the next.
fn write_seams(
    local: SocketAddr,
    remote: SocketAddr,
    frames: &[TxFrame<'_>],
    seams: &mut Vec<u8>,
    ends: &mut Vec<usize>,
) {
    seams.extend_from_slice(&frames[0].header);
    ends.push(seams.len());
    for (place, frame) in frames.iter().enumerate() {
        let (trailer, len) = trailer(local, remote, frame, place as u16);
        seams.extend_from_slice(&trailer[..len]);
        if let Some(next) = frames.get(place + 1) {
            seams.extend_from_slice(&next.header);
        }
        ends.push(seams.len());
    }
}

/// Pad and ICRC of a frame, and how many bytes they are.
fn trailer(
    local: SocketAddr,
    remote: SocketAddr,
    frame: &TxFrame<'_>,
    id: u16,
) -> ([u8; 7], usize) {
    let mut trailer = [0u8; 7];
    let pad = usize::from(frame.pad & 3);
    // Groups of the other IP version were dropped before, so there is always a pseudo header.
    if let Some(pseudo) = pseudo(local, remote, id) {
        let mut icrc = Icrc::new(&pseudo, frame.udp_payload_len());
        icrc.headers(&frame.header);
        frame.payload.iter().for_each(|piece| icrc.update(piece));
        icrc.update(&trailer[..pad]);
        trailer[pad..pad + 4].copy_from_slice(&icrc.finish());
    }
    (trailer, pad + 4)
}

/// Writes a frame down as it left.
fn record(
    capture: &mut Capture,
    local: SocketAddr,
    remote: SocketAddr,
    frame: &TxFrame<'_>,
    id: u16,
) {
    let (trailer, len) = trailer(local, remote, frame, id);
    let hop_limit = hop_limit(&frame.path).map_or(USUAL_HOP_LIMIT, |_| frame.path.hop_limit);
    let tos = traffic_class_byte(&frame.path);
    let pieces = std::iter::once(&frame.header[..])
        .chain(frame.payload.iter().copied())
        .chain(std::iter::once(&trailer[..len]));
    capture.record(&Seen { from: local, to: remote, tos, hop_limit, id }, pieces);
}

/// Walks through the seams in the order they were written.
struct Seams<'a> {
    bytes: &'a [u8],
    ends: &'a [usize],
    at: usize,
}

impl<'a> Seams<'a> {
    fn next(&mut self) -> &'a [u8] {
        let start = if self.at == 0 { 0 } else { self.ends[self.at - 1] };
        self.at += 1;
        &self.bytes[start..self.ends[self.at - 1]]
    }
}

fn push_pieces(pieces: &mut Vec<libc::iovec>, frames: &[TxFrame<'_>], seams: &mut Seams<'_>) {
    pieces.push(piece(seams.next()));
    for frame in frames {
        pieces.extend(frame.payload.iter().map(|bytes| piece(bytes)));
        pieces.push(piece(seams.next()));
    }
}

/// The kernel only reads what it is asked to send, so a shared slice will do.
fn piece(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// DSCP and ECN as one byte.
fn traffic_class_byte(path: &Path) -> u8 {
    let ecn = match path.ecn {
        Ecn::NotEct => 0,
        Ecn::Ect1 => 1,
        Ecn::Ect0 => 2,
        Ecn::Ce => 3,
    };
    path.dscp << 2 | ecn
}

/// The control message that marks a packet.
fn traffic_class(path: &Path) -> Integer {
    let value = c_int::from(traffic_class_byte(path));
    match path.remote {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, value),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, value),
    }
}

/// The control message for an unusual time to live. Zero asks for the usual one: no packet leaves a
/// machine with it, and Linux refuses it over IPv4.
fn hop_limit(path: &Path) -> Option<Integer> {
    if matches!(path.hop_limit, 0 | USUAL_HOP_LIMIT) {
        return None;
    }
    let value = c_int::from(path.hop_limit);
    Some(match path.remote {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TTL, value),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, value),
    })
}

fn send_messages(fd: &OwnedFd, messages: &mut [libc::mmsghdr]) -> Result<usize, i32> {
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _;
    // SAFETY: every message points to a name, control bytes and pieces that live in the sender, and the
    // pieces to frames and seams that the callers borrow until this returns.
    let rc = unsafe {
        let len = messages.len() as u32;
        libc::sendmmsg(fd.as_raw_fd(), messages.as_mut_ptr(), len, flags)
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// EINVAL: no UDP_SEGMENT, or on older kernels a segment longer than the MTU. EIO: the device cannot
/// compute UDP checksums. EMSGSIZE: a segment longer than the MTU.
fn is_about_segmentation(errno: i32) -> bool {
    matches!(errno, libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP)
}

fn refusal_text(group: &Group, errno: i32) -> String {
    let error = io::Error::from_raw_os_error(errno);
    let (frames, segment) = (group.frames.len(), group.segment);
    format!("the kernel refused UDP_SEGMENT for {frames} packets of {segment} bytes: {error}")
}

fn count(counters: &mut TxCounters, group: &mut Group) {
    group.sent = true;
    counters.packets += group.frames.len() as u64;
    counters.bytes += group.bytes as u64;
    counters.gso_batches += u64::from(group.frames.len() > 1);
}

fn drop_group(counters: &mut TxCounters, group: &Group, errno: i32) {
    let frames = group.frames.len() as u64;
    if errno == libc::EMSGSIZE {
        counters.dropped.too_long += frames;
    } else {
        counters.dropped.refused += frames;
        counters.dropped.last_errno = errno;
    }
}

/// How much longer one call of `send` may wait for room.
struct Patience {
    deadline: Option<roce::Time>,
}

impl Patience {
    fn new() -> Patience {
        Patience { deadline: None }
    }

    /// Waits for room; false when the time is used up. Reads no clock until the first wait.
    fn wait(&mut self, fd: &OwnedFd, counters: &mut TxCounters) -> bool {
        let now = clock::now();
        let deadline = *self.deadline.get_or_insert(now + SEND_WAIT);
        let left = deadline.since(now);
        if left == roce::Duration::ZERO {
            return false;
        }
        counters.waits += 1;
        let mut polled = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)];
        // Whatever ends the poll, the next send tells whether there is room.
        let _ = poll(&mut polled, Some(&timespec(left)));
        true
    }
}
