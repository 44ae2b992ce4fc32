//! Sending: frames to groups, groups to segmented sends, many of them in one system call.
//!
//! A group is a run of frames with one path and one length (the last may be shorter). The kernel
//! splits it into datagrams and numbers them 0, 1, 2 … in the IPv4 identification field, so the
//! ICRC of a frame is computed with its place in the group.
//!
//! Frames are copied side by side into a staging buffer first. Programs may write the memory that
//! they send from at any moment; the ICRC and the bytes sent are those of one copy. The buffer
//! stays in the processor's cache, so the copy costs little where the payload has to be read for
//! the ICRC anyway.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use roce::world::{BURST_PACKETS, Ecn, Memory, Path, TxFrame};
use rustix::event::{PollFd, PollFlags, poll};

use super::message::{Control, Integer};
use super::staging::Staging;
use super::{SEND_WAIT, TxCounters};
use crate::capture::{Capture, Seen};
use crate::clock;
use crate::sockaddr::Name;
use crate::waiter::timespec;

/// Most datagrams in one segmented send (UDP_MAX_SEGMENTS; newer kernels allow more).
const MAX_SEGMENTS: usize = 64;

/// Most UDP payload bytes in one send over IPv4; IPv6 allows a few more, which gain nothing.
const MAX_SEND_BYTES: usize = 65_507;

/// Bytes staged for one system call: a quarter of a small level-2 cache. A single group may exceed
/// it.
const STAGING_BYTES: usize = 128 << 10;

/// The default time to live of sockets (RFC 1700's default, and Linux's).
pub(crate) const USUAL_HOP_LIMIT: u8 = 64;

/// Where frames are sent from, and where each of them goes.
pub(crate) trait Route {
    /// The socket to send from.
    fn socket(&self) -> &OwnedFd;

    /// Its address.
    fn local(&self) -> SocketAddr;

    /// Whether two frames may share a segmented send, apart from their lengths.
    fn together(&self, a: &TxFrame<'_>, b: &TxFrame<'_>) -> bool;

    /// Address and port to send a frame to.
    fn remote(&self, frame: &TxFrame<'_>) -> SocketAddr;

    /// Whether frames for that address would be lost, as far as is known: they are not sent.
    fn loses(&self, remote: SocketAddr) -> bool;
}

/// Frames of one send.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) frames: Range<usize>,
    /// UDP payload of every frame but the last, in bytes.
    pub(super) segment: usize,
    /// UDP payload of all frames together, in bytes.
    pub(super) bytes: usize,
    /// Where they go.
    remote: SocketAddr,
    /// Whether the kernel accepted them.
    sent: bool,
}

/// How far a planned burst got.
enum Progress {
    /// Every frame is sent, or dropped and counted.
    Done,
    /// The kernel rejected this group as a segmented send. Frames before it are done.
    Refused { group: Group, errno: i32 },
}

/// Scratch space of the sending side. Its pointers are invalid between calls.
pub(crate) struct Sender {
    groups: Vec<Group>,
    /// The frames of `groups` as they leave, side by side.
    staged: Staging,
    pieces: Vec<libc::iovec>,
    names: Vec<Name>,
    controls: Vec<Control>,
    messages: Vec<libc::mmsghdr>,
    why_no_gso: Option<String>,
}

// SAFETY: the raw pointers in `pieces` and `messages` are written and used within one call that
// holds the sender uniquely; whatever they are when it moves to another thread is never followed.
unsafe impl Send for Sender {}

impl Sender {
    pub(crate) fn new(gso: bool) -> Sender {
        let why_no_gso = (!gso).then(|| String::from("turned off by configuration"));
        Sender {
            groups: Vec::with_capacity(BURST_PACKETS),
            staged: Staging::new(STAGING_BYTES + MAX_SEND_BYTES),
            pieces: Vec::with_capacity(BURST_PACKETS),
            names: Vec::with_capacity(BURST_PACKETS),
            controls: Vec::with_capacity(BURST_PACKETS),
            messages: Vec::with_capacity(BURST_PACKETS),
            why_no_gso,
        }
    }

    pub(crate) fn why_no_gso(&self) -> Option<&str> {
        self.why_no_gso.as_deref()
    }

    /// Sends `frames` in order, and passes those that the kernel accepted to `tap`.
    pub(crate) fn send<R: Route>(
        &mut self,
        route: &R,
        frames: &[TxFrame<'_>],
        memory: &dyn Memory,
        counters: &mut TxCounters,
        mut tap: Option<&mut Capture>,
    ) {
        let mut deadline = SendDeadline::new();
        let mut rest = frames;
        while !rest.is_empty() {
            let segments = if self.why_no_gso.is_some() { 1 } else { MAX_SEGMENTS };
            let planned = self.prepare(route, rest, memory, segments, counters);
            let progress = self.transmit(route.socket(), counters, &mut deadline);
            self.show(route, rest, tap.as_deref_mut());
            let Progress::Refused { group, errno } = progress else {
                rest = &rest[planned..];
                continue;
            };
            let single = &rest[group.frames.clone()];
            let passed =
                self.send_singly(route, single, memory, (counters, &mut deadline), &mut tap);
            if passed {
                // They pass one by one, so this kernel or device cannot segment. Otherwise the path
                // accepts no packets of this length at all.
                self.why_no_gso = Some(refusal_text(&group, errno));
            }
            rest = &rest[group.frames.end..];
        }
    }

    /// Sends frames one by one; whether the kernel accepted the first, which is as long as any
    /// other.
    fn send_singly<R: Route>(
        &mut self,
        route: &R,
        frames: &[TxFrame<'_>],
        memory: &dyn Memory,
        (counters, deadline): (&mut TxCounters, &mut SendDeadline),
        tap: &mut Option<&mut Capture>,
    ) -> bool {
        let (mut rest, mut passed) = (frames, None);
        while !rest.is_empty() {
            let planned = self.prepare(route, rest, memory, 1, counters);
            self.transmit(route.socket(), counters, deadline);
            self.show(route, rest, tap.as_deref_mut());
            passed.get_or_insert(self.groups.first().is_some_and(|first| first.sent));
            rest = &rest[planned..];
        }
        passed == Some(true)
    }

    /// Records which of `frames`, as last staged, the kernel accepted.
    fn show<R: Route>(&self, route: &R, frames: &[TxFrame<'_>], tap: Option<&mut Capture>) {
        let Some(capture) = tap else {
            return;
        };
        let mut staged = self.staged.bytes();
        for group in &self.groups {
            let (bytes, later) = staged.split_at(group.bytes);
            staged = later;
            if !group.sent {
                continue;
            }
            let frames = &frames[group.frames.clone()];
            for (id, (frame, packet)) in (0..).zip(frames.iter().zip(bytes.chunks(group.segment))) {
                record(capture, route.local(), group.remote, &frame.path, id, packet);
            }
        }
    }

    /// Stages as many of `frames` as one system call takes, fills the kernel's structures for them,
    /// and returns how many they are.
    fn prepare<R: Route>(
        &mut self,
        route: &R,
        frames: &[TxFrame<'_>],
        memory: &dyn Memory,
        segments: usize,
        counters: &mut TxCounters,
    ) -> usize {
        plan(route, frames, segments, &mut self.groups);
        let planned = self.groups.last().map_or(frames.len(), |group| group.frames.end);
        let local = route.local();
        self.groups.retain(|group| {
            let frames = group.frames.len() as u64;
            let (same, lost) =
                (group.remote.is_ipv4() == local.is_ipv4(), route.loses(group.remote));
            counters.dropped.family += if same { 0 } else { frames };
            counters.dropped.stopped += if same && lost { frames } else { 0 };
            same && !lost
        });
        self.staged.clear();
        for group in &self.groups {
            for (place, frame) in (0..).zip(&frames[group.frames.clone()]) {
                self.staged.push(local, group.remote, frame, memory, place);
            }
        }
        self.lay_out(frames);
        planned
    }

    /// Fills the C structures. From here to the end of `transmit` no vector may grow.
    fn lay_out(&mut self, frames: &[TxFrame<'_>]) {
        self.pieces.clear();
        self.names.clear();
        self.controls.clear();
        self.messages.clear();
        let mut staged = self.staged.bytes();
        for group in &self.groups {
            let path = frames[group.frames.start].path;
            let (bytes, later) = staged.split_at(group.bytes);
            staged = later;
            self.pieces.push(piece(bytes));
            let (name, name_len) = Name::encode(group.remote);
            let mut control = Control::EMPTY;
            let segment = (group.frames.len() > 1).then_some(group.segment as u16);
            let control_len = control.encode(traffic_class(&path), hop_limit(&path), segment);
            self.names.push(name);
            self.controls.push(control);
            // SAFETY: all zeroes is a valid mmsghdr.
            let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
            message.msg_hdr.msg_namelen = name_len;
            message.msg_hdr.msg_iovlen = 1;
            message.msg_hdr.msg_controllen = control_len as _;
            self.messages.push(message);
        }
        self.point();
    }

    /// Sets the pointers, now that every vector has its final length.
    fn point(&mut self) {
        for (i, message) in self.messages.iter_mut().enumerate() {
            let header = &mut message.msg_hdr;
            header.msg_name = (&raw mut self.names[i]).cast();
            header.msg_control = self.controls[i].as_mut_ptr();
            header.msg_iov = &raw mut self.pieces[i];
        }
    }

    /// Passes the messages to the kernel until all are sent or one is rejected as segmented.
    fn transmit(
        &mut self,
        fd: &OwnedFd,
        counters: &mut TxCounters,
        deadline: &mut SendDeadline,
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
                Err(errno @ (libc::EAGAIN | libc::ENOBUFS))
                    if deadline.wait(fd, errno, &mut counters.waits) => {}
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

/// Splits `frames` into groups of at most `segments` frames, as far as the staging buffer holds
/// them.
pub(super) fn plan<R: Route>(
    route: &R,
    frames: &[TxFrame<'_>],
    segments: usize,
    groups: &mut Vec<Group>,
) {
    groups.clear();
    let mut staged = 0;
    for (i, frame) in frames.iter().enumerate() {
        let len = frame.udp_payload_len();
        staged += len;
        if let Some(group) = groups.last_mut()
            && group.frames.len() < segments
            && group.bytes == group.frames.len() * group.segment
            && len <= group.segment
            && group.bytes + len <= MAX_SEND_BYTES
            && route.together(&frames[group.frames.start], frame)
        {
            group.frames.end = i + 1;
            group.bytes += len;
        } else if groups.len() < BURST_PACKETS && (staged <= STAGING_BYTES || groups.is_empty()) {
            let remote = route.remote(frame);
            groups.push(Group { frames: i..i + 1, segment: len, bytes: len, remote, sent: false });
        } else {
            return;
        }
    }
}

/// Records a packet as it was sent.
fn record(
    capture: &mut Capture,
    local: SocketAddr,
    remote: SocketAddr,
    path: &Path,
    id: u16,
    packet: &[u8],
) {
    let hop_limit = hop_limit(path).map_or(USUAL_HOP_LIMIT, |_| path.hop_limit);
    let tos = traffic_class_byte(path);
    capture.record(&Seen { from: local, to: remote, tos, hop_limit, id }, [packet]);
}

/// The kernel only reads what it sends, so a shared slice is enough.
fn piece(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// DSCP and ECN as one byte.
pub(crate) fn traffic_class_byte(path: &Path) -> u8 {
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

/// The control message for an unusual time to live. Zero means the usual one: no packet leaves a
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
    // SAFETY: every message points to a name, control bytes and one piece of the staging buffer,
    // which all live in the sender and do not change until this returns.
    let rc = unsafe {
        let len = messages.len() as u32;
        libc::sendmmsg(fd.as_raw_fd(), messages.as_mut_ptr(), len, flags)
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// EINVAL: no UDP_SEGMENT, or on older kernels a segment longer than the MTU. EIO: the device
/// cannot compute UDP checksums. EMSGSIZE: a segment longer than the MTU.
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

/// Between two tries at a device's queue that is full: a few dozen packets at 10 Gbit/s.
const DEVICE_PAUSE: roce::Duration = roce::Duration::from_micros(50);

/// How much longer one call of `send` may wait for room.
pub(crate) struct SendDeadline {
    deadline: Option<roce::Time>,
}

impl SendDeadline {
    pub(crate) fn new() -> SendDeadline {
        SendDeadline { deadline: None }
    }

    /// Waits for room after this error; false when the time is used up. Reads no clock until the
    /// first wait.
    pub(crate) fn wait(&mut self, fd: &OwnedFd, errno: i32, waits: &mut u64) -> bool {
        let now = clock::now();
        let deadline = *self.deadline.get_or_insert(now + SEND_WAIT);
        let left = deadline.since(now);
        if left == roce::Duration::ZERO {
            return false;
        }
        *waits += 1;
        let mut polled = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)];
        // Whatever ends the poll, the next send shows whether there is room. Where the device's
        // queue is full, the socket itself takes more, and would be asked again at once.
        let _ = match errno {
            libc::ENOBUFS => poll(&mut [], Some(&timespec(left.min(DEVICE_PAUSE)))),
            _ => poll(&mut polled, Some(&timespec(left))),
        };
        true
    }
}
