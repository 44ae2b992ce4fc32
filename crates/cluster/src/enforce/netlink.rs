//! Route netlink: requests to the kernel's network configuration, one at a time, with the kernel's own words where it
//! refuses one.
//!
//! A [`Socket`] belongs to the network namespace of the thread that opened it. Every request is acknowledged, or fails with
//! the kernel's error and its extended acknowledgement; a kernel that does not answer for [`PATIENCE`] is an error, too.
//! Attributes are type-length-value, aligned to 4 bytes, in the byte order of the machine (RFC 3549, section 2.3; the
//! constants are those of `linux/netlink.h` and `linux/rtnetlink.h`).

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// How long the kernel may take to answer. It answers within the system call, but for locks that others hold.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest datagram that is received: the kernel makes dumps of at most 32 KiB.
const DATAGRAM_BYTES: usize = 1 << 16;

/// How often a dump is repeated that others changed meanwhile.
const DUMP_TRIES: u32 = 8;

/// Bytes of the header of a message.
const HEADER_BYTES: usize = 16;

/// Bytes of the header of an attribute.
const ATTRIBUTE_BYTES: usize = 4;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Set on the kind of attributes that contain others.
const NLA_F_NESTED: u16 = 1 << 15;
/// The bits of an attribute's kind without its flags.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Flags of messages.
pub(super) mod flag {
    pub(crate) const REQUEST: u16 = 0x1;
    pub(crate) const ACK: u16 = 0x4;
    pub(super) const DUMP_INTERRUPTED: u16 = 0x10;
    pub(super) const CAPPED: u16 = 0x100;
    pub(super) const ACK_ATTRIBUTES: u16 = 0x200;
    /// Of requests to change something: there must be none yet.
    pub(crate) const EXCLUSIVE: u16 = 0x200;
    /// Of requests to change something: one is created if there is none.
    pub(crate) const CREATE: u16 = 0x400;
    /// Of requests to change something: what is there is replaced.
    pub(crate) const REPLACE: u16 = 0x100;
    /// Of requests to read: all there are.
    pub(crate) const DUMP: u16 = 0x300;
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The kernel refused it, sometimes with a reason.
    Kernel(Errno, Option<String>),
    /// The kernel was not reached, or did not answer.
    Socket(Errno),
    /// The answer is none that this program understands.
    Reply(&'static str),
}

impl Failure {
    /// The kernel's error, if that is what it is.
    pub(super) fn errno(&self) -> Option<Errno> {
        match self {
            Failure::Kernel(errno, _) => Some(*errno),
            Failure::Socket(_) | Failure::Reply(_) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Kernel(errno, None) => io::Error::from(*errno).fmt(f),
            Failure::Kernel(errno, Some(reason)) => {
                write!(f, "{}: {reason}", io::Error::from(*errno))
            }
            Failure::Socket(Errno::AGAIN) => write!(f, "the kernel did not answer in {PATIENCE:?}"),
            Failure::Socket(errno) => write!(f, "netlink: {}", io::Error::from(*errno)),
            Failure::Reply(what) => write!(f, "netlink: the kernel's answer is malformed: {what}"),
        }
    }
}

impl Error for Failure {}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        let kind = match &failure {
            Failure::Kernel(errno, _) | Failure::Socket(errno) => io::Error::from(*errno).kind(),
            Failure::Reply(_) => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, failure)
    }
}

/// A message to the kernel, as it is built.
#[derive(Clone, Debug)]
pub(super) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// One of a kind, with flags beside [`flag::REQUEST`] and [`flag::ACK`], and the fixed header of its kind.
    pub(super) fn new(kind: u16, flags: u16, header: &[u8]) -> Request {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | flag::REQUEST | flag::ACK).to_ne_bytes());
        bytes.extend_from_slice(header);
        let mut request = Request { bytes };
        request.align();
        request
    }

    /// Adds an attribute.
    pub(super) fn attribute(mut self, kind: u16, value: &[u8]) -> Request {
        let start = self.begin(kind);
        self.bytes.extend_from_slice(value);
        self.end(start);
        self
    }

    /// Adds an attribute that is a text; the kernel wants a zero behind it.
    pub(super) fn text(mut self, kind: u16, value: &str) -> Request {
        let start = self.begin(kind);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.end(start);
        self
    }

    /// Adds an attribute that contains those that `inner` adds.
    pub(super) fn nest(self, kind: u16, inner: impl FnOnce(Request) -> Request) -> Request {
        let mut outer = self;
        let start = outer.begin(kind | NLA_F_NESTED);
        let mut outer = inner(outer);
        outer.end(start);
        outer
    }

    fn begin(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    /// Everything that is built here is far below 64 KiB, which is what a length can say.
    fn end(&mut self, start: usize) {
        let len = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&len.to_ne_bytes());
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// The message with its length and number.
    pub(super) fn finish(mut self, sequence: u32) -> Vec<u8> {
        let len = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// A connection to the kernel.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens one in the network namespace of this thread. That needs no privilege; changes do (`CAP_NET_ADMIN`).
    pub(super) fn open() -> Result<Socket, Failure> {
        let fd = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(Failure::Socket)?;
        // To the kernel, and from nobody else.
        rustix::net::connect(&fd, &SocketAddrNetlink::new(0, 0)).map_err(Failure::Socket)?;
        set_socket_timeout(&fd, Timeout::Recv, Some(PATIENCE)).map_err(Failure::Socket)?;
        // Kernels before 4.12 have neither; their errors come without reasons then.
        let _ = set_option(&fd, libc::NETLINK_EXT_ACK);
        let _ = set_option(&fd, libc::NETLINK_CAP_ACK);
        Ok(Socket { fd, sequence: 0 })
    }

    /// One whose other end, a datagram socket, plays the kernel.
    #[cfg(test)]
    pub(super) fn to(fd: OwnedFd) -> Socket {
        Socket { fd, sequence: 0 }
    }

    /// Sends a request and waits for its acknowledgement. Returns the messages before it, without their headers.
    pub(super) fn request(&mut self, request: Request) -> Result<Vec<Vec<u8>>, Failure> {
        let sequence = self.send(request)?;
        let mut replies = Vec::new();
        loop {
            for message in messages(&self.receive()?)? {
                match message.kind {
                    _ if message.sequence != sequence => {}
                    NLMSG_ERROR => return verdict(&message).map(|()| replies),
                    _ => replies.push(message.body.to_vec()),
                }
            }
        }
    }

    /// Sends a request for all there are, and returns them, without the headers of the messages.
    pub(super) fn dump(&mut self, request: &Request) -> Result<Vec<Vec<u8>>, Failure> {
        for _ in 0..DUMP_TRIES {
            if let Some(found) = self.dump_once(request.clone())? {
                return Ok(found);
            }
        }
        Err(Failure::Kernel(Errno::INTR, Some("others change it all the time".to_owned())))
    }

    /// `None` if others made changes meanwhile.
    fn dump_once(&mut self, request: Request) -> Result<Option<Vec<Vec<u8>>>, Failure> {
        let sequence = self.send(request)?;
        let mut found = Vec::new();
        let mut is_whole = true;
        loop {
            for message in messages(&self.receive()?)? {
                if message.sequence != sequence {
                    continue;
                }
                is_whole &= message.flags & flag::DUMP_INTERRUPTED == 0;
                match message.kind {
                    NLMSG_ERROR => verdict(&message)?,
                    NLMSG_DONE => return Ok(is_whole.then_some(found)),
                    _ => found.push(message.body.to_vec()),
                }
            }
        }
    }

    fn send(&mut self, request: Request) -> Result<u32, Failure> {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let bytes = request.finish(self.sequence);
        rustix::io::retry_on_intr(|| rustix::net::send(&self.fd, &bytes, SendFlags::empty()))
            .map_err(Failure::Socket)?;
        Ok(self.sequence)
    }

    fn receive(&self) -> Result<Vec<u8>, Failure> {
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let (_, len) = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.fd, buffer.as_mut_slice(), RecvFlags::TRUNC)
        })
        .map_err(Failure::Socket)?;
        if len > buffer.len() {
            return Err(Failure::Reply("it is larger than 64 KiB"));
        }
        buffer.truncate(len);
        Ok(buffer)
    }
}

/// Switches an option of netlink on.
#[allow(unsafe_code, reason = "rustix has no options of netlink")]
fn set_option(fd: impl AsFd, option: libc::c_int) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open as long as it is borrowed, and the kernel reads the 4 bytes of `on` only.
    let result = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_NETLINK,
            option,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A message of the kernel.
struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// Cuts a datagram into messages.
fn messages(datagram: &[u8]) -> Result<Vec<Message<'_>>, Failure> {
    let mut found = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let header = rest.first_chunk().ok_or(Failure::Reply("it ends within a header"))?;
        let header: &[u8; HEADER_BYTES] = header;
        let len = u32_at(header, 0).unwrap_or(0) as usize;
        let body = rest.get(HEADER_BYTES..len).ok_or(Failure::Reply("it ends within a message"))?;
        found.push(Message {
            kind: u16_at(header, 4).unwrap_or(0),
            flags: u16_at(header, 6).unwrap_or(0),
            sequence: u32_at(header, 8).unwrap_or(0),
            body,
        });
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(found)
}

/// What an acknowledgement says.
fn verdict(message: &Message<'_>) -> Result<(), Failure> {
    let code = u32_at(message.body, 0).ok_or(Failure::Reply("an error without a number"))?;
    if code == 0 {
        return Ok(());
    }
    let errno = Errno::from_raw_os_error((code as i32).wrapping_neg());
    Err(Failure::Kernel(errno, reason(message)))
}

/// The kernel's reason: behind the request, of which at least the header comes back.
fn reason(message: &Message<'_>) -> Option<String> {
    if message.flags & flag::ACK_ATTRIBUTES == 0 {
        return None;
    }
    let request = message.body.get(4..)?;
    let returned = match message.flags & flag::CAPPED {
        0 => (u32_at(request, 0)? as usize).next_multiple_of(4),
        _ => HEADER_BYTES,
    };
    let text = attribute(request.get(returned..)?, NLMSGERR_ATTR_MSG)?;
    Some(text_of(text))
}

/// A text without the zero behind it.
pub(super) fn text_of(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// The attributes of a message behind its fixed header, or within another attribute. What follows a malformed one is
/// left out.
pub(super) fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(rest, 0)?);
        let kind = u16_at(rest, 2)? & NLA_TYPE_MASK;
        let value = rest.get(ATTRIBUTE_BYTES..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The first attribute of a kind.
pub(super) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// The number at that byte, in the machine's order; none if it is too short.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number at that byte, in the machine's order; none if it is too short.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number at that byte, in the machine's order; none if it is too short.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTM_GETLINK: u16 = 18;

    fn link_request(name: &str) -> Request {
        const IFLA_IFNAME: u16 = 3;
        Request::new(RTM_GETLINK, 0, &[0; 16]).text(IFLA_IFNAME, name)
    }

    #[test]
    fn attributes_come_back_as_they_were_added() {
        let request = Request::new(1, 0, &[9; 4]).attribute(7, &[1, 2, 3]).nest(8, |inner| {
            inner.text(1, "abc").attribute(2, &5u32.to_ne_bytes()).attribute(3, &[])
        });
        let bytes = request.finish(77);
        assert_eq!(bytes.len() % 4, 0);
        let found = messages(&bytes).expect("one message");
        assert_eq!((found.len(), found[0].kind, found[0].sequence), (1, 1, 77));
        let body = &found[0].body[4..];
        assert_eq!(attribute(body, 7), Some(&[1, 2, 3][..]));
        let inner = attribute(body, 8).expect("nested");
        assert_eq!(attribute(inner, 1).map(text_of).as_deref(), Some("abc"));
        assert_eq!(attribute(inner, 2).and_then(|value| u32_at(value, 0)), Some(5));
        assert_eq!(attribute(inner, 3), Some(&[][..]));
        assert_eq!(attribute(inner, 4), None);
    }

    #[test]
    fn malformed_answers_are_refused_at_every_length() {
        let bytes = link_request("lo").finish(1);
        for len in 1..bytes.len() {
            assert!(messages(&bytes[..len]).is_err(), "{len} bytes");
        }
        let mut short = bytes.clone();
        short[..4].copy_from_slice(&3u32.to_ne_bytes());
        assert!(messages(&short).is_err(), "a length below that of the header");
        // Attributes: the kernel's are right, but no reader may loop or panic.
        for len in 0..8u16 {
            let mut attribute = [0; 8];
            attribute[..2].copy_from_slice(&len.to_ne_bytes());
            assert!(attributes(&attribute).count() <= 2);
        }
    }

    #[test]
    fn the_kernel_answers_a_question_and_a_dump() {
        let mut socket = Socket::open().expect("no privilege is needed");
        let replies = socket.request(link_request("lo")).expect("there is loopback");
        assert_eq!(replies.len(), 1);
        let all = Request::new(RTM_GETLINK, flag::DUMP, &[0; 16]);
        assert!(!socket.dump(&all).expect("a list").is_empty());
    }

    #[test]
    fn a_refusal_has_the_kernels_number_and_words() {
        let mut socket = Socket::open().expect("no privilege is needed");
        let failure = socket.request(link_request("none-such")).expect_err("no such interface");
        assert_eq!(failure.errno(), Some(Errno::NODEV));
        // A message of 4 bytes is too short for what it asks.
        let short = Request::new(RTM_GETLINK, 0, &[0; 4]);
        let failure = socket.request(short).expect_err("too short");
        assert_eq!(failure.errno(), Some(Errno::INVAL));
        let text = failure.to_string();
        assert!(text.contains("Invalid") && text.contains(": "), "with a reason: {text}");
    }
}
