//! Answers for `dquant explain`: what the devices of this process do, asked from outside.
//!
//! The process listens at a Unix socket in the abstract name space, named `dquant-verbs/PID` (so the
//! kernel lists it as `@dquant-verbs/PID` in `/proc/net/unix`, and it goes with the process). Whoever
//! connects is sent one JSON document ([`document`]) and the connection is closed; nothing is read.
//! Only the user that the process runs as, and root, are answered.
//!
//! A thread of its own does this, asleep unless somebody asks. It never makes the data path wait:
//! an engine's lock is held to copy [`QPS_PER_LOCK`] queue pairs at a time, and text is made and
//! written without it. One connection is served at a time, [`BACKLOG`] may wait, and a reader that
//! is slow loses its connection after [`PATIENCE`].
//!
//! A process that cannot have its socket says so and works without: it just cannot be explained.

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
use crate::process::signals::SignalsBlocked;

/// Queue pairs that are copied in one go.
const QPS_PER_LOCK: usize = 64;

/// Connections that may wait.
const BACKLOG: i32 = 4;

/// How long a reader may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// Bytes written between two looks at the clock.
const CHUNK_BYTES: usize = 64 << 10;

/// Starts to answer, once in a process; a child of one is another.
pub(crate) fn start() {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let own = fork::generation();
    if STARTED.swap(own, Ordering::Relaxed) == own {
        return;
    }
    if let Err(why) = answer() {
        let taken = "another process holds the name (grep dquant-verbs /proc/net/unix)";
        let failure =
            Failure::new(why, format_args!("`dquant explain` gets no answer here: {why}"));
        failure.with_hint((why == Errno::ADDRINUSE).then_some(taken)).report();
    }
}

/// Starts the thread.
fn answer() -> Result<(), Errno> {
    let listener = listen()?;
    let raw = listener.as_raw_fd();
    let _blocked = SignalsBlocked::all();
    let thread = std::thread::Builder::new().name("dquant-explain".to_owned());
    // Never closed by us: it goes with the process, or the program closes it before that.
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
            // The program has closed it, and may have given its number to something else.
            Err(Errno::BADF | Errno::NOTSOCK | Errno::INVAL | Errno::OPNOTSUPP) => return,
            // No descriptors left, say: not a reason to spin.
            Err(_) => std::thread::sleep(PATIENCE),
        }
    }
}

/// Whether the other end runs as this process's user, or as root.
fn may_ask(connection: impl AsFd) -> bool {
    let own = rustix::process::geteuid();
    net::sockopt::socket_peercred(connection)
        .is_ok_and(|peer| peer.uid.is_root() || peer.uid == own)
}

/// Writes until everything is written or patience ends. A reader that leaves is no error, and no
/// signal to the program.
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
