//! Netlink: questions to the kernel about its network, and changes of it, one at a time, with the
//! kernel's own words where it refuses one.
//!
//! A [`Socket`] belongs to the network namespace of the thread that opened it. There are three ways
//! to use it: [`Socket::request`] waits for the acknowledgement, [`Socket::dump`] for the end of a
//! list, and [`Socket::ask`] takes the one reply that the kernel has ready when the question is
//! sent. A kernel that does not answer for [`PATIENCE`] is an error. What a message is about (its
//! kind, its attributes) is the business of the modules that send it; libraries and the `ip` and
//! `tc` programs are not used.

mod message;

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use message::{HEADER_BYTES, messages};
pub use message::{Message, Request, attribute, attributes, flag, text_of, u16_at, u32_at, u64_at};

/// How long the kernel may take to answer. It answers within the system call, but for locks that
/// others hold.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The largest datagram that is received: the kernel makes dumps of at most 32 KiB.
const DATAGRAM_BYTES: usize = 1 << 16;

/// How often a dump is repeated that others changed meanwhile.
const DUMP_TRIES: u32 = 8;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Why a request failed.
#[derive(Debug)]
pub enum Failure {
    /// The kernel refused it, sometimes with a reason.
    Kernel(Errno, Option<String>),
    /// The kernel was not reached, or did not answer.
    Socket(Errno),
    /// The answer is none that this program understands.
    Reply(&'static str),
}

impl Failure {
    /// The kernel's error, if that is what it is.
    pub fn errno(&self) -> Option<Errno> {
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

/// A connection to the kernel.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens one for interfaces, routes and queues, in the network namespace of this thread. That
    /// needs no privilege; changes do (`CAP_NET_ADMIN`).
    ///
    /// # Errors
    /// When the kernel has no such sockets, or this process no descriptors left.
    pub fn open() -> Result<Socket, Failure> {
        // Protocol 0 is that of routes and links, which `rustix` does not name.
        Socket::of(None)
    }

    /// The same for the state of sockets (`sock_diag`).
    ///
    /// # Errors
    /// As [`Socket::open`].
    pub fn diagnostics() -> Result<Socket, Failure> {
        Socket::of(Some(netlink::SOCK_DIAG))
    }

    fn of(protocol: Option<Protocol>) -> Result<Socket, Failure> {
        let fd = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
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

    /// One whose other end, a datagram socket, plays the kernel: for tests.
    pub fn to(fd: OwnedFd) -> Socket {
        Socket { fd, sequence: 0 }
    }

    /// Sends a request and waits for its acknowledgement. Returns the messages before it, without
    /// their headers.
    ///
    /// # Errors
    /// When the kernel refuses it, or does not answer.
    pub fn request(&mut self, mut request: Request) -> Result<Vec<Vec<u8>>, Failure> {
        let sequence = self.send(&mut request, true)?;
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let mut replies = Vec::new();
        loop {
            let len = self.receive(&mut buffer, RecvFlags::empty())?;
            for message in messages(&buffer[..len]) {
                let message = message?;
                match message.kind {
                    _ if message.sequence != sequence => {}
                    NLMSG_ERROR => return verdict(&message).map(|()| replies),
                    _ => replies.push(message.body.to_vec()),
                }
            }
        }
    }

    /// Sends a request for all there are, and returns them, without the headers of the messages.
    ///
    /// # Errors
    /// When the kernel refuses it or does not answer, or when others change the list all the time.
    pub fn dump(&mut self, request: &Request) -> Result<Vec<Vec<u8>>, Failure> {
        let mut request = request.clone();
        for _ in 0..DUMP_TRIES {
            if let Some(found) = self.dump_once(&mut request)? {
                return Ok(found);
            }
        }
        Err(Failure::Kernel(Errno::INTR, Some("others change it all the time".to_owned())))
    }

    /// `None` if others made changes meanwhile.
    fn dump_once(&mut self, request: &mut Request) -> Result<Option<Vec<Vec<u8>>>, Failure> {
        let sequence = self.send(request, true)?;
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let mut found = Vec::new();
        let mut is_whole = true;
        loop {
            let len = self.receive(&mut buffer, RecvFlags::empty())?;
            for message in messages(&buffer[..len]) {
                let message = message?;
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

    /// Sends a question that has one reply, and takes it into `buffer`. The kernel has replied by
    /// the time that the question is sent, so nothing waits and nothing is allocated: packet loops
    /// may ask.
    ///
    /// # Errors
    /// When the kernel refuses it, or there is no reply, or the buffer is too small for it.
    pub fn ask<'a>(
        &mut self,
        question: &mut Request,
        buffer: &'a mut [u8],
    ) -> Result<Message<'a>, Failure> {
        let sequence = self.send(question, false)?;
        let is_answer = |message: &Message<'_>| message.sequence == sequence;
        // Replies to questions that were given up may come before.
        let len = loop {
            let len = self.receive(buffer, RecvFlags::DONTWAIT)?;
            if messages(&buffer[..len]).next().transpose()?.as_ref().is_some_and(is_answer) {
                break len;
            }
        };
        let answer = messages(&buffer[..len]).next().ok_or(Failure::Reply("it is empty"))??;
        if answer.kind == NLMSG_ERROR {
            verdict(&answer)?;
            return Err(Failure::Reply("it acknowledges what was not to be"));
        }
        Ok(answer)
    }

    fn send(&mut self, request: &mut Request, wants_ack: bool) -> Result<u32, Failure> {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let bytes = request.finish(self.sequence, wants_ack);
        rustix::io::retry_on_intr(|| rustix::net::send(&self.fd, bytes, SendFlags::empty()))
            .map_err(Failure::Socket)?;
        Ok(self.sequence)
    }

    fn receive(&self, buffer: &mut [u8], flags: RecvFlags) -> Result<usize, Failure> {
        let room = buffer.len();
        let (_, len) = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::TRUNC | flags)
        })
        .map_err(Failure::Socket)?;
        if len > room {
            return Err(Failure::Reply("it is larger than the room for it"));
        }
        Ok(len)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Switches an option of netlink on. `rustix` has none.
fn set_option(fd: impl AsFd, option: libc::c_int) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open as long as it is borrowed, and the kernel reads the 4 bytes of
    // `on` only.
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    const RTM_GETLINK: u16 = 18;
    const RTM_NEWLINK: u16 = 16;

    fn link_request(name: &str) -> Request {
        const IFLA_IFNAME: u16 = 3;
        Request::new(RTM_GETLINK, 0, &[0; 16]).text(IFLA_IFNAME, name)
    }

    #[test]
    fn the_kernel_answers_a_question_and_a_dump() {
        let mut socket = Socket::open().expect("no privilege is needed");
        let replies = socket.request(link_request("lo")).expect("there is loopback");
        assert_eq!(replies.len(), 1);
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let reply = socket.ask(&mut link_request("lo"), &mut buffer).expect("there is loopback");
        assert_eq!(reply.kind, RTM_NEWLINK);
        let all = Request::new(RTM_GETLINK, flag::DUMP, &[0; 16]);
        assert!(!socket.dump(&all).expect("a list").is_empty());
    }

    #[test]
    fn a_refusal_has_the_kernels_number_and_words() {
        let mut socket = Socket::open().expect("no privilege is needed");
        let failure = socket.request(link_request("none-such")).expect_err("no such interface");
        assert_eq!(failure.errno(), Some(Errno::NODEV));
        let failure = socket.ask(&mut link_request("none-such"), &mut [0; 4096]).expect_err("none");
        assert_eq!(failure.errno(), Some(Errno::NODEV));
        // A message of 4 bytes is too short for what it asks.
        let short = Request::new(RTM_GETLINK, 0, &[0; 4]);
        let failure = socket.request(short).expect_err("too short");
        assert_eq!(failure.errno(), Some(Errno::INVAL));
        let text = failure.to_string();
        assert!(text.contains("Invalid") && text.contains(": "), "with a reason: {text}");
    }

    /// A socket, and the other end of it.
    fn played() -> (Socket, UnixDatagram) {
        let (ours, kernel) = UnixDatagram::pair().expect("sockets");
        (Socket::to(ours.into()), kernel)
    }

    /// A message with the header of a reply.
    fn reply(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let len = (HEADER_BYTES + body.len()) as u32;
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
        bytes.extend([sequence.to_ne_bytes(), [0; 4]].concat());
        bytes.extend_from_slice(body);
        bytes
    }

    #[test]
    fn late_replies_are_passed_over_and_hostile_ones_are_errors() {
        let (mut socket, kernel) = played();
        kernel.send(&reply(RTM_NEWLINK, 0, 77, &[1; 8])).expect("room");
        kernel.send(&[]).expect("room");
        kernel.send(&reply(RTM_NEWLINK, 0, 1, &[2; 8])).expect("room");
        let mut buffer = [0; 64];
        let answer = socket.ask(&mut link_request("lo"), &mut buffer).expect("an answer");
        assert_eq!(answer.body, [2; 8]);
        let failure = socket.ask(&mut link_request("lo"), &mut buffer).expect_err("no answer");
        assert!(matches!(failure, Failure::Socket(Errno::AGAIN)), "{failure}");

        let whole = reply(RTM_NEWLINK, 0, 3, &[2; 8]);
        for len in 1..whole.len() {
            kernel.send(&whole[..len]).expect("room");
            let failure = socket.ask(&mut link_request("lo"), &mut buffer).expect_err("cut off");
            assert!(matches!(failure, Failure::Reply(_)), "{len} bytes: {failure}");
        }
        kernel.send(&reply(RTM_NEWLINK, 0, 3, &[0; 64])).expect("room");
        let failure = socket.ask(&mut link_request("lo"), &mut buffer).expect_err("no room");
        assert!(failure.to_string().contains("larger"), "{failure}");
    }

    #[test]
    fn reasons_that_are_cut_off_are_left_out() {
        let text = Request::new(0, 0, &[]).text(NLMSGERR_ATTR_MSG, "no such thing");
        let code = (-libc::EINVAL).to_ne_bytes();
        for (flags, returned) in [(flag::CAPPED, HEADER_BYTES), (0, 24)] {
            let request = reply(RTM_GETLINK, 0, 1, &vec![0; returned - HEADER_BYTES]);
            let body = [&code[..], &request, text.body()].concat();
            let of =
                |flags, body| verdict(&Message { kind: NLMSG_ERROR, body, flags, sequence: 1 });
            let flags = flags | flag::ACK_ATTRIBUTES;
            let failure = of(flags, &body).expect_err("refused");
            assert!(failure.to_string().ends_with(": no such thing"), "{failure}");
            for len in 4..body.len() {
                let failure = of(flags, &body[..len]).expect_err("refused");
                assert_eq!(failure.errno(), Some(Errno::INVAL), "{len} bytes");
                assert!(!failure.to_string().ends_with("thing") || len + 3 >= body.len());
            }
            assert!(of(flags, &body[..3]).is_err(), "no number");
        }
    }
}
