//! The server for `dquant explain`, which reports the state of this process's devices.
//!
//! The process listens on a Unix socket in the abstract name space, named `dquant-verbs/PID` (so
//! the kernel lists it as `@dquant-verbs/PID` in `/proc/net/unix`, and it disappears with the
//! process). Each client is sent one JSON document ([`document`]) and the connection is closed;
//! nothing is read. Only the process's own user and root are served.
//!
//! It runs on a separate thread, asleep until a client connects. It never blocks the data path: an
//! engine's lock is held to copy [`QPS_PER_LOCK`] queue pairs at a time, and the text is formatted
//! and written without it. One connection is served at a time, [`BACKLOG`] may wait, and a slow
//! reader is disconnected after [`PATIENCE`].
//!
//! If the socket cannot be created, the process reports that and works without it: only `dquant
//! explain` is not available.

mod document;
mod json;

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::process::errors::Failure;
use crate::process::fork;

/// Queue pairs copied under one lock.
const QPS_PER_LOCK: usize = 64;

/// Connections that may wait.
const BACKLOG: i32 = 4;

/// Time limit of a reader.
const PATIENCE: Duration = Duration::from_millis(500);

/// Bytes written between two checks of the clock.
const CHUNK_BYTES: usize = 64 << 10;

/// Starts the server, once per process; a child counts as another process.
pub(crate) fn start() {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let own = fork::generation();
    if STARTED.swap(own, Ordering::Relaxed) == own {
        return;
    }
    if let Err(why) = answer() {
        let taken = "another process holds the name (grep dquant-verbs /proc/net/unix): one of a container that \
                     shares this network namespace, with the same number, or one of any user";
        let failure =
            Failure::new(why, format_args!("`dquant explain` cannot query this process: {why}"));
        failure.with_hint((why == Errno::ADDRINUSE).then_some(taken)).report();
    }
}

/// Starts the thread.
fn answer() -> Result<(), Errno> {
    let listener = listen()?;
    let raw = listener.as_raw_fd();
    let _blocked = adapter::shared::SignalsBlocked::all();
    let thread = std::thread::Builder::new().name("dquant-explain".to_owned());
    // Never closed by us: it ends with the process, or the program closes it before.
    let listener = ManuallyDrop::new(listener);
    thread.spawn(move || serve(&listener)).map_err(|_| Errno::AGAIN)?;
    fork::close_in_children(&[raw]);
    Ok(())
}

fn listen() -> Result<OwnedFd, Errno> {
    let name = format!("dquant-verbs/{}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn serve(listener: &OwnedFd) {
    loop {
        match net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(connection) if may_ask(&connection) => {
                send(connection, document::of_all().as_bytes());
            }
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            // The program has closed it, and its number may have been reused.
            Err(Errno::BADF | Errno::NOTSOCK | Errno::INVAL | Errno::OPNOTSUPP) => return,
            // No descriptors left, for example: not a reason to spin.
            Err(_) => std::thread::sleep(PATIENCE),
        }
    }
}

/// Whether the client runs as this process's user, or as root.
fn may_ask(connection: impl AsFd) -> bool {
    let own = rustix::process::geteuid().as_raw();
    nic::peer::of(connection).is_ok_and(|peer| peer.uid == 0 || peer.uid == own)
}

/// Writes until everything is written or the time limit is reached. A reader that disconnects is
/// not an error, and raises no signal in the program.
fn send(connection: OwnedFd, mut text: &[u8]) {
    if set_socket_timeout(&connection, Timeout::Send, Some(PATIENCE)).is_err() {
        return;
    }
    let begun = Instant::now();
    while !text.is_empty() && begun.elapsed() <= PATIENCE {
        let chunk = &text[..text.len().min(CHUNK_BYTES)];
        match net::send(&connection, chunk, SendFlags::NOSIGNAL) {
            Ok(written) => text = &text[written..],
            Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_reader_that_does_not_read_is_dropped() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let begun = Instant::now();
        send(writer.into(), &vec![b' '; 8 << 20]);
        assert!(begun.elapsed() >= PATIENCE, "the pipe holds less than 8 MiB");
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert!(rest.len() < 8 << 20);
    }

    #[test]
    fn who_runs_as_the_same_user_may_ask() {
        let (_reader, writer) = UnixStream::pair().unwrap();
        assert!(may_ask(&writer));
    }
}
