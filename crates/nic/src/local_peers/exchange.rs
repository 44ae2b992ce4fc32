//! How two processes get each other's segments: over a Unix socket in the abstract name space.
//!
//! Abstract names belong to a network namespace, and the kernel vouches for the user and the
//! process at the other end, so who is answered is of this user and this namespace. The initiator
//! sends its segment first: the owner must be able to wait for it before it lets it read its own.
//! With it comes a FIFO for its packets, which the owner accepts or not; for packets in the other
//! direction there is another exchange.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use roce::wire::ROCE_PORT;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};

use super::fifo::Reader;
use super::segment::{ControlSegment, FORMAT};
use crate::peer;

/// How long either side waits for the other. A process that gets little CPU time may take a second;
/// one that is stopped holds up those that connect to it, each once.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Connections that may wait.
const BACKLOG: i32 = 64;

/// What is sent with a segment. The last byte of an answer says whether the FIFO is accepted.
const MAGIC: [u8; 8] = FORMAT;

/// Files of a message: a segment, and a FIFO or none.
const FILES: usize = 2;

/// The name under which the process with this slot of an address is found. A process that has a
/// port of its own is found by that, too.
fn name(at: SocketAddr, slot: u8) -> io::Result<SocketAddrUnix> {
    let name = match (at.ip(), at.port()) {
        (ip, ROCE_PORT) => format!("dquant-board/{slot}/{ip}"),
        (ip, port) => format!("dquant-board/{slot}/{ip}/{port}"),
    };
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Listens under the name of this process.
pub(super) fn listener(at: SocketAddr, slot: u8) -> io::Result<OwnedFd> {
    let socket = socket()?;
    bind(&socket, &name(at, slot)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A process at the other end of a connection, of this user.
pub(super) struct Other {
    connection: OwnedFd,
    pub(super) pid: i32,
}

impl Other {
    fn new(connection: OwnedFd) -> io::Result<Other> {
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&connection, direction, Some(PATIENCE))?;
        }
        let refused = |why| io::Error::new(io::ErrorKind::PermissionDenied, why);
        let peer = peer::of(&connection)?;
        if peer.uid != rustix::process::geteuid().as_raw() {
            return Err(refused("it runs as another user"));
        }
        // Its memory, and whether it still runs, is found by its number.
        let pid = peer.pid.and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.ok_or_else(|| refused("it is not visible in this PID namespace"))?;
        Ok(Other { connection, pid })
    }

    /// Somebody who has connected.
    pub(super) fn arrived(connection: OwnedFd) -> io::Result<Other> {
        Other::new(connection)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// The process that listens under a name.
    pub(super) fn at(at: SocketAddr, slot: u8) -> io::Result<Other> {
        let connection = socket()?;
        set_socket_timeout(&connection, Timeout::Send, Some(PATIENCE))?;
        connect(&connection, &name(at, slot)?)?;
        Other::new(connection)
    }

    /// Sends a segment and a FIFO.
    pub(super) fn ask(&self, segment: BorrowedFd<'_>, fifo: BorrowedFd<'_>) -> io::Result<()> {
        self.send(&[segment, fifo], false)
    }

    /// Sends a segment, and whether the other's FIFO is accepted.
    pub(super) fn answer(&self, segment: BorrowedFd<'_>, accepted: bool) -> io::Result<()> {
        self.send(&[segment], accepted)
    }

    fn send(&self, files: &[BorrowedFd<'_>], accepted: bool) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(files));
        let accepted = [u8::from(accepted)];
        let message = [IoSlice::new(&MAGIC), IoSlice::new(&accepted)];
        sendmsg(&self.connection, &message, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// What the other end says.
    ///
    /// # Errors
    /// When it is late, says something else, or its files are not what they have to be.
    pub(super) fn receive(&self) -> io::Result<Hello> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut hello, mut accepted) = ([0; MAGIC.len()], [0]);
        let into = &mut [IoSliceMut::new(&mut hello), IoSliceMut::new(&mut accepted)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let said = recvmsg(self.connection.as_fd(), into, &mut control, flags)?;
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        // All are taken, so that none stays open.
        let files: Vec<OwnedFd> = files.flatten().collect();
        let complete = said.bytes == MAGIC.len() + accepted.len() && hello == MAGIC;
        let Some(segment) = files.first().filter(|_| complete) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it sent no segment"));
        };
        let fifo = files.get(1).map(Reader::of_other).transpose()?;
        let file = super::file_of(segment.as_fd())?;
        Ok(Hello {
            segment: ControlSegment::of_other(segment)?,
            file,
            fifo,
            accepted: accepted == [1],
        })
    }
}

/// One side of an exchange.
pub(super) struct Hello {
    pub(super) segment: ControlSegment,
    /// Which file the segment is.
    pub(super) file: (u64, u64),
    /// Where the other side's packets will be, if this is a request.
    pub(super) fifo: Option<Reader>,
    /// Whether our FIFO is accepted, if this is an answer.
    pub(super) accepted: bool,
}
