//! The packet socket of one interface and one EtherType.
//!
//! It is bound to RoCEv1's EtherType, so the kernel hands it no other frame and none that this
//! machine sends, and needs no filter for that. CAP_NET_RAW is needed to open it, not to use it: a
//! process may drop its privileges afterwards.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use roce::wire::frame::ETHERTYPE_ROCE_V1;

use crate::udp::socket::{RECEIVE_BUFFER, SEND_BUFFER, enlarge};

/// Most frames that one system call sends.
pub(super) const SEND_FRAMES: usize = 64;

/// Most frames that one system call receives.
pub(super) const RECEIVE_FRAMES: usize = 32;

/// Longest frame that is received: headers, and payload for the largest path MTU, with room for
/// tags and trailers.
pub(super) const MAX_FRAME: usize = 4352;

/// A bound packet socket, and the room that frames are received into.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    ifindex: i32,
    /// Effective sizes in bytes, as the kernel reports them.
    pub(super) send_buffer_bytes: u64,
    pub(super) receive_buffer_bytes: u64,
    room: Vec<u8>,
}

/// A frame as the kernel delivered it.
pub(super) struct Arrival<'a> {
    pub(super) bytes: &'a [u8],
    /// Whether it was sent to the Ethernet address of this interface, and to nothing above it: the
    /// kernel hands frames of VLANs and bridges to the sockets of the interface below, too.
    pub(super) is_for_us: bool,
    /// Whether the kernel kept only its beginning.
    pub(super) is_cut: bool,
}

impl Socket {
    /// Opens a socket on the interface with this number.
    pub(super) fn open(ifindex: u32, buffer_bytes: u32) -> io::Result<Socket> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // With protocol 0 nothing arrives before it is bound. SAFETY: no pointers are passed.
        let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let send_buffer_bytes = enlarge(&fd, &SEND_BUFFER, buffer_bytes);
        let receive_buffer_bytes = enlarge(&fd, &RECEIVE_BUFFER, buffer_bytes);
        let ifindex = i32::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
        bind(&fd, ifindex)?;
        let room = vec![0; RECEIVE_FRAMES * MAX_FRAME];
        Ok(Socket { fd, ifindex, send_buffer_bytes, receive_buffer_bytes, room })
    }

    /// Sends the first of these frames, at most [`SEND_FRAMES`], and returns how many the kernel
    /// took.
    pub(super) fn send<'f>(&self, frames: impl Iterator<Item = &'f [u8]>) -> Result<usize, i32> {
        let mut pieces = [EMPTY_PIECE; SEND_FRAMES];
        let mut count = 0;
        for (piece, frame) in pieces.iter_mut().zip(frames) {
            // The kernel only reads what it sends, so a shared slice is enough.
            piece.iov_base = frame.as_ptr().cast_mut().cast();
            piece.iov_len = frame.len();
            count += 1;
        }
        let mut messages = messages(&mut pieces);
        let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _;
        // SAFETY: each of the `count` messages has one piece, which is a frame that lives through
        // the call.
        let rc =
            unsafe { libc::sendmmsg(self.fd.as_raw_fd(), messages.as_mut_ptr(), count, flags) };
        usize::try_from(rc).map_err(|_| errno())
    }

    /// Makes one receive call, passes what arrived to `take`, and returns how many frames there
    /// were.
    pub(super) fn receive(&mut self, mut take: impl FnMut(Arrival<'_>)) -> Result<usize, i32> {
        let mut pieces = [EMPTY_PIECE; RECEIVE_FRAMES];
        for (piece, frame) in pieces.iter_mut().zip(self.room.chunks_exact_mut(MAX_FRAME)) {
            piece.iov_base = frame.as_mut_ptr().cast();
            piece.iov_len = frame.len();
        }
        // SAFETY: all zeroes is a valid address.
        let mut names: [libc::sockaddr_ll; RECEIVE_FRAMES] = unsafe { std::mem::zeroed() };
        let mut messages = messages(&mut pieces);
        for (message, name) in messages.iter_mut().zip(&mut names) {
            message.msg_hdr.msg_name = (&raw mut *name).cast();
            message.msg_hdr.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        }
        // SAFETY: every message has a name and one buffer, which live through the call and belong
        // to nobody else.
        let rc = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr(),
                RECEIVE_FRAMES as u32,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let count = usize::try_from(rc).map_err(|_| errno())?;
        let arrived = messages.iter().zip(&names).zip(self.room.chunks_exact(MAX_FRAME));
        for ((message, name), frame) in arrived.take(count) {
            take(Arrival {
                bytes: &frame[..(message.msg_len as usize).min(MAX_FRAME)],
                is_for_us: name.sll_pkttype == libc::PACKET_HOST
                    && name.sll_ifindex == self.ifindex,
                is_cut: message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            });
        }
        Ok(count)
    }

    /// Whether the interface still exists: the kernel unbinds the sockets of one that is removed.
    pub(super) fn is_bound(&self) -> bool {
        // SAFETY: all zeroes is a valid address.
        let mut link: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: `link` is writable for `len` bytes.
        let rc =
            unsafe { libc::getsockname(self.fd.as_raw_fd(), (&raw mut link).cast(), &raw mut len) };
        rc == 0 && link.sll_ifindex > 0
    }
}

const EMPTY_PIECE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// One message for each piece.
fn messages<const N: usize>(pieces: &mut [libc::iovec; N]) -> [libc::mmsghdr; N] {
    // SAFETY: all zeroes is a valid mmsghdr.
    let mut messages: [libc::mmsghdr; N] = unsafe { std::mem::zeroed() };
    for (message, piece) in messages.iter_mut().zip(pieces) {
        message.msg_hdr.msg_iov = &raw mut *piece;
        message.msg_hdr.msg_iovlen = 1;
    }
    messages
}

fn bind(fd: &OwnedFd, ifindex: i32) -> io::Result<()> {
    // SAFETY: all zeroes is a valid address.
    let mut link: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    link.sll_family = libc::AF_PACKET as u16;
    link.sll_protocol = ETHERTYPE_ROCE_V1.to_be();
    link.sll_ifindex = ifindex;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: `link` is readable for `len` bytes.
    let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const link).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
