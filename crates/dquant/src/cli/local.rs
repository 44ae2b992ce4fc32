//! Processes of this machine that reply on an abstract Unix socket, named by what they are and
//! their number.
//!
//! Anyone may take such a name, so the other end must run as this user or as root, unless root
//! queries; and its reply is bounded in size and time.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nic::peer::{self, Peer};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};

use crate::exit::CliError;

const LIST: &str = "/proc/net/unix";

/// A program replies from a thread of its own: only a very busy machine needs longer.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// Room for thousands of queue pairs with every counter.
const MAX_REPLY_BYTES: u64 = 64 << 20;

/// All processes of this network namespace that listen at a name with this prefix, in order.
pub(super) fn pids(prefix: &str) -> Result<Vec<u32>, CliError> {
    let list = std::fs::read(LIST)
        .map_err(|error| CliError::because(format_args!("cannot read {LIST}"), &error))?;
    Ok(listed(&String::from_utf8_lossy(&list), prefix))
}

fn listed(list: &str, prefix: &str) -> Vec<u32> {
    let names = list.lines().filter_map(|line| line.split_ascii_whitespace().nth(7));
    // Abstract names begin with `@` there.
    let pid = |name: &str| name.strip_prefix('@')?.strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<u32> = names.filter_map(pid).collect();
    found.sort_unstable();
    // A connection that waits to be served is listed under the same name.
    found.dedup();
    found
}

/// What a process replies, and its number in this PID namespace, if it has one.
pub(super) fn fetch(name: &str) -> io::Result<(Vec<u8>, Option<u32>)> {
    let stream = connect(name)?;
    let pid = check_peer(&stream)?.pid;
    let text = read(stream)?;
    if text.is_empty() {
        let why = "it replies only to its own user and root";
        return Err(io::Error::new(ErrorKind::PermissionDenied, why));
    }
    Ok((text, pid))
}

/// A connection to an abstract name. It times out, because a listener that is stopped or hostile may never accept.
fn connect(name: &str) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket.into()),
        Err(Errno::AGAIN) => Err(late()),
        Err(error) => Err(error.into()),
    }
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "it does not respond")
}

/// Whether the other end is of this user or root, or this process is root's: whose replies are believed.
fn check_peer(stream: &UnixStream) -> io::Result<Peer> {
    let own = rustix::process::geteuid();
    let found = peer::of(stream)?;
    if own.is_root() || may_ask(own.as_raw(), found.uid) {
        Ok(found)
    } else {
        Err(foreign(found.uid))
    }
}

/// Whether the other end is of this user or root: who gets replies. That this process is root's gives others no right.
pub(super) fn check_asker(stream: &UnixStream) -> io::Result<()> {
    let peer = peer::of(stream)?.uid;
    if may_ask(rustix::process::geteuid().as_raw(), peer) { Ok(()) } else { Err(foreign(peer)) }
}

fn may_ask(own: u32, peer: u32) -> bool {
    peer == 0 || peer == own
}

fn foreign(peer: u32) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, format!("it runs as user {peer}"))
}

fn read(mut stream: UnixStream) -> io::Result<Vec<u8>> {
    let begun = Instant::now();
    let mut text = Vec::new();
    let mut chunk = vec![0; 64 << 10];
    loop {
        let left = PATIENCE.checked_sub(begun.elapsed()).filter(|left| !left.is_zero());
        stream.set_read_timeout(Some(left.ok_or_else(late)?))?;
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(text),
            Ok(len) => text.extend_from_slice(&chunk[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(late()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if text.len() as u64 > MAX_REPLY_BYTES {
            return Err(io::Error::new(ErrorKind::InvalidData, "its reply is too long"));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_own_user_get_replies_and_nobody_else_even_from_root() {
        let asked = [(0, 0), (1_000, 0), (1_000, 1_000), (0, 1_000), (1_001, 1_000)];
        let told = asked.map(|(own, peer)| may_ask(own, peer));
        assert_eq!(told, [true, true, true, false, false]);
    }

    #[test]
    fn who_accepts_nobody_is_given_up_on() {
        let name = format!("dquant-test-stopped/{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::CLOEXEC;
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        // The kernel lets one connection wait; the next finds no room.
        let waiting = connect(&name).unwrap();
        assert_eq!(connect(&name).unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(read(waiting).unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn sockets_are_found_by_their_name_each_once() {
        let list = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000: 00000002 00000000 00010000 0001 01 111 @dquant-verbs/42
0000: 00000002 00000000 00010000 0001 01 112 @dquant-verbs/7
0000: 00000003 00000000 00000000 0001 03 113 @dquant-verbs/42
0000: 00000002 00000000 00010000 0001 01 114 @dquant-verbs/x
0000: 00000002 00000000 00010000 0001 01 115 /run/dquant-verbs/8
0000: 00000002 00000000 00000000 0002 01 116
";
        assert_eq!(listed(list, "dquant-verbs/"), [7, 42]);
    }
}
