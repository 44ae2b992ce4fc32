//! The Unix socket on which a client opens a stream and receives a ring.
//!
//! The socket is of type `SOCK_SEQPACKET`: the kernel keeps message boundaries, passes descriptors
//! with their message, and reports a dead peer. Messages are opaque bytes here.
//!
//! Rules (C6, C7):
//! - A message has 1 to [`MAX_MESSAGE_BYTES`] bytes and at most [`MAX_FDS`] descriptors. Larger
//!   ones are refused with a reason, and their descriptors are closed. A message that does not fit
//!   a packet of [`MAX_PACKET_BYTES`] crosses in several, all but the last of which are full.
//!   Descriptors are close-on-exec from the start, because a child that inherited them would hide
//!   our death from the peer.
//! - No call waits longer than the connection's timeout, so a silent client cannot hold a daemon.
//! - The socket file is created with mode 0600, and [`Access`] is granted before anybody can
//!   connect: there is no time in which others can. A lock file beside it, always with mode 0600,
//!   shows whether a daemon is running; only a leftover socket is ever replaced, never a file of
//!   another kind.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use thiserror::Error;

/// Longest message in bytes: a request for thousands of datasets, or their descriptions.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Longest packet in bytes; the kernel's default buffer holds three.
pub const MAX_PACKET_BYTES: usize = 64 << 10;
/// Most descriptors that one message may carry.
pub const MAX_FDS: usize = 8;
/// How long a connection waits for its peer unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// A year: effectively for ever, and no sum of times overflows.
const MAX_TIMEOUT: Duration = Duration::from_secs(1 << 25);

/// Connections that wait to be accepted; further ones wait in `connect`.
const BACKLOG: i32 = 64;

/// Why something failed on the socket.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// A system call failed.
    #[error("socket: {call}: {errno}")]
    Os {
        /// The call.
        call: &'static str,
        /// What it returned.
        #[source]
        errno: Errno,
    },
    /// A system call on a path failed.
    #[error("{}: {call}: {errno}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The call.
        call: &'static str,
        /// What it returned.
        #[source]
        errno: Errno,
    },
    /// No daemon listens there.
    #[error("no daemon listens on {}", path.display())]
    NoDaemon {
        /// The socket file.
        path: PathBuf,
    },
    /// Another daemon listens there.
    #[error("another daemon listens on {}", path.display())]
    InUse {
        /// The socket file.
        path: PathBuf,
    },
    /// Something other than a socket has that name; it is not touched.
    #[error("{} exists and is not a socket; remove it or choose another path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The socket file cannot be given to a group.
    #[error("{}: cannot give it to group {group}: {errno}", path.display())]
    Group {
        /// The socket file.
        path: PathBuf,
        /// The group.
        group: u32,
        /// Why.
        #[source]
        errno: Errno,
    },
    /// The peer closed the connection or died.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer did not reply, or did not read, in time.
    #[error("the peer did nothing for {waited_ms} ms")]
    TimedOut {
        /// How long was allowed.
        waited_ms: u64,
    },
    /// A message is empty or too long.
    #[error("a message of {bytes} bytes, allowed are 1 to {max}")]
    Length {
        /// Its length.
        bytes: usize,
        /// Longest allowed.
        max: usize,
    },
    /// A message carries more descriptors than allowed.
    #[error("a message with more than {max} descriptors")]
    TooManyFds {
        /// Most allowed.
        max: usize,
    },
    /// A message carries another number of descriptors than its content calls for.
    #[error("a message with {found} descriptors where {expected} belong")]
    FdCount {
        /// Descriptors in the message.
        found: usize,
        /// Descriptors expected.
        expected: usize,
    },
}

impl AttachError {
    /// A short stable name, for counting by reason.
    pub const fn reason(&self) -> &'static str {
        match self {
            AttachError::Os { .. } => "os",
            AttachError::Path { .. } => "path",
            AttachError::NoDaemon { .. } => "no_daemon",
            AttachError::InUse { .. } => "in_use",
            AttachError::NotASocket { .. } => "not_a_socket",
            AttachError::Group { .. } => "group",
            AttachError::Closed => "closed",
            AttachError::TimedOut { .. } => "timed_out",
            AttachError::Length { .. } => "length",
            AttachError::TooManyFds { .. } => "too_many_fds",
            AttachError::FdCount { .. } => "fd_count",
        }
    }
}

fn os(call: &'static str) -> impl FnOnce(Errno) -> AttachError {
    move |errno| AttachError::Os { call, errno }
}

fn on_path(path: &Path, call: &'static str) -> impl FnOnce(Errno) -> AttachError {
    let path = path.to_owned();
    move |errno| AttachError::Path { path, call, errno }
}

/// Credentials of the peer, as the kernel recorded them when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id; 0 when the peer is in a pid namespace that this process cannot see.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// Who may connect to a socket file, besides root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Callers {
    /// The user of the listener.
    #[default]
    Owner,
    /// That user and the file's group.
    Group,
    /// Every user of the machine.
    Everyone,
}

impl Callers {
    /// The callers that a mode admits, if it is one of 0600, 0660 and 0666. Connecting needs the
    /// right to write; other modes have bits without a meaning, or would keep out who seems to be
    /// let in.
    pub const fn of_mode(mode: u32) -> Option<Callers> {
        match mode {
            0o600 => Some(Callers::Owner),
            0o660 => Some(Callers::Group),
            0o666 => Some(Callers::Everyone),
            _ => None,
        }
    }

    fn mode(self) -> Mode {
        Mode::from_raw_mode(match self {
            Callers::Owner => 0o600,
            Callers::Group => 0o660,
            Callers::Everyone => 0o666,
        })
    }
}

/// Who may connect to a socket file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Who, besides root.
    pub callers: Callers,
    /// The file's group; without it, the one that the kernel chooses for a new file.
    pub group: Option<u32>,
}

impl Access {
    /// Grants it on the socket file at `path`, which is ours and private so far. Both calls work on
    /// the file that was looked at: who may write in the folder can put another one in its place at
    /// any time.
    fn grant(self, path: &Path, file: (u64, u64)) -> Result<(), AttachError> {
        if self == Access::default() {
            return Ok(());
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let held = rustix::fs::open(path, flags, Mode::empty()).map_err(on_path(path, "open"))?;
        let found = rustix::fs::fstat(&held).map_err(on_path(path, "stat"))?;
        if (found.st_dev, found.st_ino) != file
            || FileType::from_raw_mode(found.st_mode) != FileType::Socket
            || found.st_uid != rustix::process::geteuid().as_raw()
        {
            return Err(AttachError::InUse { path: path.to_owned() });
        }
        // The group first: until then the file is private.
        if let Some(group) = self.group {
            let gid = Some(Gid::from_raw(group));
            rustix::fs::chownat(&held, c"", None, gid, AtFlags::EMPTY_PATH)
                .map_err(|errno| AttachError::Group { path: path.to_owned(), group, errno })?;
        }
        // `fchmod` does not take such a descriptor.
        let by_descriptor = format!("/proc/self/fd/{}", held.as_raw_fd());
        rustix::fs::chmod(by_descriptor, self.callers.mode()).map_err(on_path(path, "chmod"))
    }
}

/// A socket file that clients connect to. Dropping it removes the file.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of our socket file.
    file: (u64, u64),
    /// Locked as long as the listener exists; the kernel unlocks it when the process dies.
    _lock: OwnedFd,
    lock_path: PathBuf,
}

impl Listener {
    /// [`Listener::bind_for`] the user of this process and root.
    pub fn bind(path: impl AsRef<Path>) -> Result<Listener, AttachError> {
        Listener::bind_for(path, Access::default())
    }

    /// Creates the socket file, replacing one that a dead daemon left behind. Beside it is a lock
    /// file, `<path>.lock`; both are removed with the listener.
    pub fn bind_for(path: impl AsRef<Path>, access: Access) -> Result<Listener, AttachError> {
        let path = path.as_ref();
        let address = SocketAddrUnix::new(path).map_err(on_path(path, "socket path"))?;
        let (lock, lock_path) = lock(path)?;
        remove_leftover(path)?;
        let socket = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        // On Linux a socket file takes its mode from the socket, so it never exists with another
        // one. Changing the umask instead would affect all threads.
        let private = Mode::RUSR | Mode::WUSR;
        rustix::fs::fchmod(&socket, private).map_err(on_path(path, "fchmod"))?;
        rustix::net::bind(&socket, &address).map_err(on_path(path, "bind"))?;
        let file = identity(path).map_err(on_path(path, "stat"))?;
        // From here on a failure removes the file.
        let listener = Listener { socket, path: path.to_owned(), file, _lock: lock, lock_path };
        access.grant(path, file)?;
        // Nobody can connect before.
        rustix::net::listen(&listener.socket, BACKLOG).map_err(on_path(path, "listen"))?;
        Ok(listener)
    }

    /// Where clients connect.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next client, or `None` when there is none within `timeout`.
    pub fn accept(&self, timeout: Duration) -> Result<Option<Connection>, AttachError> {
        if !wait(&self.socket, PollFlags::IN, timeout)? {
            return Ok(None);
        }
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => Ok(Some(Connection::over(socket))),
            // The client may have left between the poll and now.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(errno) => Err(os("accept")(errno)),
        }
    }
}

impl AsFd for Listener {
    /// Readable when a client waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may have put a different file there; that one is not ours to remove.
        if identity(&self.path) == Ok(self.file) {
            let _ = rustix::fs::unlink(&self.path);
        }
        // While it is still locked: a process that waits for the lock sees that the file is gone,
        // and creates a new one.
        let _ = rustix::fs::unlink(&self.lock_path);
    }
}

fn seqpacket(flags: SocketFlags) -> Result<OwnedFd, AttachError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(os("socket"))
}

fn identity(path: &Path) -> Result<(u64, u64), Errno> {
    rustix::fs::lstat(path).map(|stat| (stat.st_dev, stat.st_ino))
}

fn lock(path: &Path) -> Result<(OwnedFd, PathBuf), AttachError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock_path = PathBuf::from(name);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    loop {
        let file = rustix::fs::open(&lock_path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(on_path(&lock_path, "open"))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(AttachError::InUse { path: path.to_owned() }),
            Err(errno) => return Err(on_path(&lock_path, "flock")(errno)),
        }
        // A daemon that ended between our two calls has removed the file that we hold, so a lock on
        // it keeps nobody out. Each turn is caused by the end of one more daemon.
        let held = rustix::fs::fstat(&file).map_err(on_path(&lock_path, "stat"))?;
        if identity(&lock_path) == Ok((held.st_dev, held.st_ino)) {
            return Ok((file, lock_path));
        }
    }
}

/// Removes a socket file that nobody listens on. Called with the lock held.
fn remove_leftover(path: &Path) -> Result<(), AttachError> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(on_path(path, "stat")(errno)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(AttachError::NotASocket { path: path.to_owned() });
    }
    // The lock shows that no daemon of ours is there. A program that does not use the lock is
    // detected when it accepts the connection, has no room for it or has another socket type.
    match try_connect(path, SocketFlags::NONBLOCK) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path).map_err(on_path(path, "unlink")),
        Ok(_) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            Err(AttachError::InUse { path: path.to_owned() })
        }
        Err(errno) => Err(on_path(path, "connect")(errno)),
    }
}

fn try_connect(path: &Path, flags: SocketFlags) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | flags;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // A blocking connect waits for room in the backlog, for the send timeout.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(DEFAULT_TIMEOUT))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// A message that arrived.
#[derive(Debug)]
pub struct Message {
    /// Its content, never empty.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The content and exactly `N` descriptors. With any other number all of them are closed.
    pub fn with_fds<const N: usize>(self) -> Result<(Vec<u8>, [OwnedFd; N]), AttachError> {
        let found = self.fds.len();
        let fds = <[OwnedFd; N]>::try_from(self.fds)
            .map_err(|_| AttachError::FdCount { found, expected: N })?;
        Ok((self.bytes, fds))
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    timeout: Duration,
}

impl Connection {
    fn over(socket: OwnedFd) -> Connection {
        Connection { socket, timeout: DEFAULT_TIMEOUT }
    }

    /// Connects to the daemon at `path`.
    pub fn connect(path: impl AsRef<Path>) -> Result<Connection, AttachError> {
        let path = path.as_ref();
        match try_connect(path, SocketFlags::empty()) {
            Ok(socket) => Ok(Connection::over(socket)),
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                Err(AttachError::NoDaemon { path: path.to_owned() })
            }
            Err(errno) => Err(on_path(path, "connect")(errno)),
        }
    }

    /// Two connected ends in this process.
    pub fn pair() -> Result<(Connection, Connection), AttachError> {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(os("socketpair"))?;
        Ok((Connection::over(a), Connection::over(b)))
    }

    /// How long `send` and `recv` wait for the peer, at most a year. Zero: not at all.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout.min(MAX_TIMEOUT);
    }

    /// Credentials of the peer.
    pub fn peer(&self) -> Result<PeerCredentials, AttachError> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `found` and `len` are live and `len` is the size of `found`. Done by hand because
        // the safe wrapper has no way to say pid 0, which another pid namespace shows as.
        let rc = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        if rc != 0 {
            let error = std::io::Error::last_os_error();
            return Err(os("SO_PEERCRED")(Errno::from_io_error(&error).unwrap_or(Errno::IO)));
        }
        Ok(PeerCredentials { pid: found.pid, uid: found.uid, gid: found.gid })
    }

    /// Sends one message with the descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), AttachError> {
        if bytes.is_empty() || bytes.len() > MAX_MESSAGE_BYTES {
            return Err(AttachError::Length { bytes: bytes.len(), max: MAX_MESSAGE_BYTES });
        }
        if fds.len() > MAX_FDS {
            return Err(AttachError::TooManyFds { max: MAX_FDS });
        }
        let deadline = Instant::now() + self.timeout;
        if bytes.len() < MAX_PACKET_BYTES {
            return self.send_packet(bytes, fds, deadline);
        }
        // Its last bytes say how many follow the message, so that the last packet is neither full
        // nor empty.
        let padding = if (bytes.len() + 1).is_multiple_of(MAX_PACKET_BYTES) { 2 } else { 1 };
        let padded = [bytes, &[padding, padding][..usize::from(padding)]].concat();
        let (full, last) = padded.as_chunks::<MAX_PACKET_BYTES>();
        full.iter().try_for_each(|packet| self.send_packet(packet, &[], deadline))?;
        self.send_packet(last, fds, deadline)
    }

    fn send_packet(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), AttachError> {
        loop {
            match self.send_now(bytes, fds) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => self.wait_until(deadline, PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Err(AttachError::Closed);
                }
                Err(errno) => return Err(os("sendmsg")(errno)),
            }
        }
    }

    fn send_now(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::MSGSIZE);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags)?;
        Ok(())
    }

    /// The next message, of at most `max_bytes` (and [`MAX_MESSAGE_BYTES`]). Its content determines
    /// how many descriptors belong to it: see [`Message::with_fds`].
    pub fn recv(&self, max_bytes: usize) -> Result<Message, AttachError> {
        let max = max_bytes.min(MAX_MESSAGE_BYTES);
        let deadline = Instant::now() + self.timeout;
        let mut message = self.recv_packet(max.min(MAX_PACKET_BYTES), deadline)?;
        let mut is_last = message.bytes.len() < MAX_PACKET_BYTES;
        if is_last {
            return Ok(message);
        }
        while !is_last {
            let Message { bytes, fds } = self.recv_packet(MAX_PACKET_BYTES, deadline)?;
            is_last = bytes.len() < MAX_PACKET_BYTES;
            message.bytes.extend(bytes);
            message.fds.extend(fds);
            if message.bytes.len() > max + 2 {
                return Err(AttachError::Length { bytes: message.bytes.len(), max });
            }
            if message.fds.len() > MAX_FDS {
                return Err(AttachError::TooManyFds { max: MAX_FDS });
            }
        }
        let padding = message.bytes.last().map_or(0, |padding| usize::from(*padding));
        let len = message.bytes.len().saturating_sub(padding);
        message.bytes.truncate(len);
        match len {
            0 => Err(AttachError::Closed),
            len if len > max => Err(AttachError::Length { bytes: len, max }),
            _ => Ok(message),
        }
    }

    fn recv_packet(&self, max_bytes: usize, deadline: Instant) -> Result<Message, AttachError> {
        loop {
            match self.recv_now(max_bytes) {
                Ok(outcome) => return outcome,
                Err(Errno::AGAIN) => self.wait_until(deadline, PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(AttachError::Closed),
                Err(errno) => return Err(os("recvmsg")(errno)),
            }
        }
    }

    fn recv_now(&self, max_bytes: usize) -> Result<Result<Message, AttachError>, Errno> {
        let mut bytes = vec![0; max_bytes];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // TRUNC makes the kernel report the whole length of a message that does not fit.
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        let mut into = [IoSliceMut::new(&mut bytes)];
        let got = rustix::net::recvmsg(&self.socket, &mut into, &mut control, flags)?;
        // Taken out before any check: when a message is refused below, dropping closes them.
        let fds = take_fds(&mut control);
        Ok(if got.bytes > max_bytes {
            Err(AttachError::Length { bytes: got.bytes, max: max_bytes })
        } else if got.flags.contains(ReturnFlags::CTRUNC) && fds.len() < MAX_FDS {
            // There was room for more: this process has no descriptor left.
            Err(os("recvmsg")(Errno::MFILE))
        } else if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            Err(AttachError::TooManyFds { max: MAX_FDS })
        } else if got.bytes == 0 {
            // The end of the stream, or an empty message, which is not allowed to exist.
            Err(AttachError::Closed)
        } else {
            bytes.truncate(got.bytes);
            Ok(Message { bytes, fds })
        })
    }

    fn wait_until(&self, deadline: Instant, events: PollFlags) -> Result<(), AttachError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() && wait(&self.socket, events, left)? {
            return Ok(());
        }
        let waited_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        Err(AttachError::TimedOut { waited_ms })
    }

    /// Whether the peer closed its end or died. Never waits.
    pub fn hung_up(&self) -> bool {
        let mut poll = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        rustix::event::poll(&mut poll, Some(&now)).is_ok() && poll[0].revents().intersects(gone)
    }

    /// A second handle of this end.
    pub fn try_clone(&self) -> Result<Connection, AttachError> {
        Ok(Connection { socket: self.liveness()?, timeout: self.timeout })
    }

    /// Ends the connection for all handles of this end. The peer still receives what was sent
    /// before.
    pub fn hang_up(&self) {
        // It makes no difference if the peer has already left.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// A second descriptor of this end, with which
    /// [`Consumer::attach`](crate::ring::Consumer::attach) detects the producer's death.
    pub fn liveness(&self) -> Result<OwnedFd, AttachError> {
        rustix::io::fcntl_dupfd_cloexec(&self.socket, 0).map_err(os("dup"))
    }
}

impl AsFd for Connection {
    /// For polling: input is a message or the end of the peer, `RDHUP` only its end.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn take_fds(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    rights.flatten().collect()
}

/// Polls one descriptor; whether anything happened within `timeout`, including a hang-up of the
/// peer.
fn wait(fd: &OwnedFd, events: PollFlags, timeout: Duration) -> Result<bool, AttachError> {
    let timeout =
        Timespec::try_from(timeout.min(MAX_TIMEOUT)).map_err(|_| os("poll")(Errno::INVAL))?;
    let mut poll = [PollFd::new(fd, events)];
    match rustix::event::poll(&mut poll, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(os("poll")(errno)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
    use std::sync::atomic::{AtomicU32, Ordering};

    const SHORT: Duration = Duration::from_millis(20);

    /// A directory of its own for a test, removed afterwards.
    struct Place(PathBuf);

    impl Place {
        fn new() -> Place {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("dquant-attach-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Place(path)
        }

        fn socket(&self) -> PathBuf {
            self.0.join("dpu.sock")
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn pair() -> (Connection, Connection) {
        let (mut a, mut b) = Connection::pair().unwrap();
        a.set_timeout(SHORT);
        b.set_timeout(SHORT);
        (a, b)
    }

    fn devnull() -> std::fs::File {
        std::fs::File::open("/dev/null").unwrap()
    }

    #[test]
    fn a_client_is_accepted_and_known() {
        let place = Place::new();
        let listener = Listener::bind(place.socket()).unwrap();
        assert!(listener.accept(Duration::ZERO).unwrap().is_none());
        let client = Connection::connect(place.socket()).unwrap();
        let served = listener.accept(DEFAULT_TIMEOUT).unwrap().unwrap();
        assert_eq!(served.peer().unwrap().pid, std::process::id() as i32);
        client.send(b"open", &[]).unwrap();
        assert_eq!(served.recv(100).unwrap().bytes, b"open");
        assert!(!served.hung_up());
        drop(client);
        assert!(served.hung_up());
        assert_eq!(served.recv(100).unwrap_err(), AttachError::Closed);
        assert_eq!(served.send(b"x", &[]).unwrap_err(), AttachError::Closed);
    }

    #[test]
    fn the_socket_file_is_private_and_goes_away() {
        let place = Place::new();
        let listener = Listener::bind(place.socket()).unwrap();
        let found = std::fs::metadata(place.socket()).unwrap();
        assert!(found.file_type().is_socket());
        assert_eq!(found.mode() & 0o7777, 0o600);
        drop(listener);
        assert_eq!(
            std::fs::read_dir(&place.0).unwrap().count(),
            0,
            "socket and lock file are gone"
        );
        let gone = Connection::connect(place.socket()).unwrap_err();
        assert_eq!(gone, AttachError::NoDaemon { path: place.socket() });
    }

    #[test]
    fn only_leftovers_are_replaced() {
        let place = Place::new();
        let first = Listener::bind(place.socket()).unwrap();
        let in_use = AttachError::InUse { path: place.socket() };
        assert_eq!(Listener::bind(place.socket()).unwrap_err(), in_use);
        drop(first);

        // A program that does not use the lock file, alive and then dead.
        let foreign = std::os::unix::net::UnixListener::bind(place.socket()).unwrap();
        assert_eq!(Listener::bind(place.socket()).unwrap_err(), in_use);
        drop(foreign);
        assert!(place.socket().exists());
        drop(Listener::bind(place.socket()).unwrap());

        std::fs::write(place.socket(), "precious").unwrap();
        let refused = Listener::bind(place.socket()).unwrap_err();
        assert_eq!(refused, AttachError::NotASocket { path: place.socket() });
        assert_eq!(std::fs::read(place.socket()).unwrap(), b"precious");
    }

    fn access(callers: Callers, group: Option<u32>) -> Access {
        Access { callers, group }
    }

    #[test]
    fn a_socket_file_has_the_mode_and_the_group_that_were_asked_for() {
        let own = rustix::process::getegid().as_raw();
        let is_root = rustix::process::geteuid().is_root();
        let place = Place::new();
        for (callers, group, mode) in [
            (Callers::Owner, None, 0o600),
            (Callers::Group, None, 0o660),
            (Callers::Group, Some(own), 0o660),
            (Callers::Everyone, None, 0o666),
            // Not that of any file here: only root may give it away.
            (Callers::Group, is_root.then_some(own + 4_321), 0o660),
        ] {
            let listener = Listener::bind_for(place.socket(), access(callers, group)).unwrap();
            let found = std::fs::metadata(listener.path()).unwrap();
            assert_eq!(found.mode() & 0o7777, mode);
            assert!(group.is_none_or(|group| found.gid() == group), "{found:?}");
            let lock = std::fs::metadata(place.0.join("dpu.sock.lock")).unwrap();
            assert_eq!(lock.mode() & 0o7777, 0o600);
            assert!(Connection::connect(listener.path()).is_ok());
        }
        assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 0);
    }

    #[test]
    fn modes_admit_somebody_or_are_refused() {
        let admitted =
            |mode: u32| Callers::of_mode(mode).map(|callers| callers.mode().as_raw_mode());
        for mode in 0..0o10000 {
            let want = [0o600, 0o660, 0o666].contains(&mode).then_some(mode);
            assert_eq!(admitted(mode), want, "{mode:o}");
        }
    }

    #[test]
    fn access_is_granted_on_our_own_socket_alone() {
        let place = Place::new();
        let listener = Listener::bind(place.socket()).unwrap();
        let file = listener.file;
        let precious = place.0.join("precious");
        std::fs::write(&precious, "").unwrap();
        std::fs::set_permissions(&precious, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::remove_file(place.socket()).unwrap();
        std::os::unix::fs::symlink(&precious, place.socket()).unwrap();
        let refused = access(Callers::Everyone, None).grant(&place.socket(), file);
        assert_eq!(refused, Err(AttachError::InUse { path: place.socket() }));
        assert_eq!(std::fs::metadata(&precious).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_lock_file_that_was_replaced_keeps_nobody_out() {
        let place = Place::new();
        let (held, lock_path) = lock(&place.socket()).unwrap();
        assert!(matches!(lock(&place.socket()), Err(AttachError::InUse { .. })));
        std::fs::remove_file(&lock_path).unwrap();
        let (_new, _) = lock(&place.socket()).unwrap();
        drop(held);
        assert!(matches!(lock(&place.socket()), Err(AttachError::InUse { .. })));
    }

    #[test]
    fn a_file_put_in_our_place_survives_us() {
        let place = Place::new();
        let listener = Listener::bind(place.socket()).unwrap();
        std::fs::remove_file(place.socket()).unwrap();
        std::fs::write(place.socket(), "someone else's").unwrap();
        drop(listener);
        assert!(place.socket().exists());
    }

    #[test]
    fn messages_keep_their_borders_and_descriptors() {
        let (a, b) = pair();
        let file = devnull();
        a.send(b"one", &[file.as_fd(), file.as_fd()]).unwrap();
        let (bytes, fds) = b.recv(MAX_MESSAGE_BYTES).unwrap().with_fds::<2>().unwrap();
        assert_eq!(bytes, b"one");
        for fd in &fds {
            let flags = rustix::io::fcntl_getfd(fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn long_messages_cross_in_several_packets() {
        let packet = MAX_PACKET_BYTES;
        let around = [packet - 1, packet, packet + 1, 2 * packet - 2, 2 * packet - 1, 2 * packet];
        for len in around.into_iter().chain([MAX_MESSAGE_BYTES]) {
            let (a, b) = Connection::pair().unwrap();
            let long: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    a.send(&long, &[devnull().as_fd()]).unwrap();
                    a.send(b"next", &[]).unwrap();
                });
                let (bytes, [_]) = b.recv(MAX_MESSAGE_BYTES).unwrap().with_fds::<1>().unwrap();
                assert!(bytes == long, "{len} bytes");
                assert_eq!(b.recv(10).unwrap().bytes, b"next");
            });
        }
        // Longer than the receiver allows: found out before all of it is held.
        let (a, b) = pair();
        a.send(&vec![1; 2 * packet], &[]).unwrap();
        let refused = b.recv(packet).unwrap_err();
        assert!(matches!(refused, AttachError::Length { max, .. } if max == packet), "{refused}");
    }

    #[test]
    fn wrong_sizes_are_refused_on_both_sides() {
        let (a, b) = pair();
        let max = MAX_MESSAGE_BYTES;
        for bytes in [0, max + 1] {
            let refused = a.send(&vec![0; bytes], &[]).unwrap_err();
            assert_eq!(refused, AttachError::Length { bytes, max });
        }
        a.send(&[0; 100], &[]).unwrap();
        a.send(b"next", &[]).unwrap();
        let refused = b.recv(10).unwrap_err();
        assert_eq!(refused, AttachError::Length { bytes: 100, max: 10 });
        assert_eq!(b.recv(10).unwrap().bytes, b"next");
    }

    #[test]
    fn unwanted_descriptors_are_closed() {
        let (a, b) = pair();
        let (gone, end) = Connection::pair().unwrap();
        a.send(b"x", &[end.as_fd()]).unwrap();
        drop(end);
        let refused = b.recv(10).unwrap().with_fds::<3>().unwrap_err();
        assert_eq!(refused, AttachError::FdCount { found: 1, expected: 3 });
        assert!(gone.hung_up(), "the descriptor stayed open");

        let many = vec![gone.as_fd(); MAX_FDS + 1];
        let too_many = AttachError::TooManyFds { max: MAX_FDS };
        assert_eq!(a.send(b"x", &many).unwrap_err(), too_many);
    }

    /// A peer that ignores our limit of descriptors.
    #[test]
    fn a_flood_of_descriptors_is_refused_and_closed() {
        let (a, b) = pair();
        for count in [MAX_FDS + 1, 200] {
            let (gone, end) = Connection::pair().unwrap();
            let fds = vec![end.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let bytes = [IoSlice::new(b"x")];
            rustix::net::sendmsg(&a, &bytes, &mut control, SendFlags::empty()).unwrap();
            drop(end);
            let refused = b.recv(10).unwrap_err();
            assert_eq!(refused, AttachError::TooManyFds { max: MAX_FDS });
            assert!(gone.hung_up(), "a descriptor stayed open");
        }
    }

    #[test]
    fn a_silent_or_deaf_peer_costs_one_timeout() {
        let (a, _b) = pair();
        let late = AttachError::TimedOut { waited_ms: 20 };
        assert_eq!(a.recv(10).unwrap_err(), late);
        let large = vec![0; 60_000];
        let sent = (0..10_000).find_map(|_| a.send(&large, &[]).err());
        assert_eq!(sent, Some(late));
    }

    #[test]
    fn an_empty_message_counts_as_the_end() {
        let (a, b) = pair();
        rustix::net::send(&a, b"", SendFlags::empty()).unwrap();
        assert_eq!(b.recv(10).unwrap_err(), AttachError::Closed);
    }
}
