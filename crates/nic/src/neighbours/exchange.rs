//! How two processes get each other's boards: over a Unix socket in the abstract name space.
//!
//! Abstract names belong to a network namespace, and the kernel vouches for the user and the process at the other
//! end, so who is answered is of this user and this namespace. The initiator sends its board first: the
//! owner must be able to wait for it before it lets it read its own.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};

use super::board::Board;

/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(1);

/// Connections that may wait.
const BACKLOG: i32 = 64;

/// What is sent with a board.
const HELLO: [u8; 8] = *b"dqboard1";

/// The name under which the process with this slot of an address is found.
fn name(ip: IpAddr, slot: u8) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(format!("dquant-board/{slot}/{ip}").as_bytes())?)
}

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Listens under the name of this process.
pub(super) fn listener(ip: IpAddr, slot: u8) -> io::Result<OwnedFd> {
    let socket = socket()?;
    bind(&socket, &name(ip, slot)?)?;
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
        let peer = socket_peercred(&connection)?;
        if peer.uid != rustix::process::geteuid() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it runs as another user"));
        }
        Ok(Other { connection, pid: peer.pid.as_raw_pid() })
    }

    /// Somebody who has connected.
    pub(super) fn arrived(connection: OwnedFd) -> io::Result<Other> {
        Other::new(connection)
    }

    /// The process that listens under a name.
    pub(super) fn at(ip: IpAddr, slot: u8) -> io::Result<Other> {
        let connection = socket()?;
        set_socket_timeout(&connection, Timeout::Send, Some(PATIENCE))?;
        connect(&connection, &name(ip, slot)?)?;
        Other::new(connection)
    }

    pub(super) fn send(&self, board: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [board];
        control.push(SendAncillaryMessage::ScmRights(&files));
        let hello = [IoSlice::new(&HELLO)];
        sendmsg(&self.connection, &hello, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub(super) fn receive(&self) -> io::Result<Board> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut hello = [0; HELLO.len()];
        let into = &mut [IoSliceMut::new(&mut hello)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let said = recvmsg(self.connection.as_fd(), into, &mut control, flags)?;
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        // All are taken, so that none stays open.
        let files: Vec<OwnedFd> = files.flatten().collect();
        match files.first() {
            Some(file) if said.bytes == HELLO.len() && hello == HELLO => Board::of_other(file),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it sent no board")),
        }
    }
}
