//! The socket by which a manager tells `dquant subnet status` what it is: an abstract Unix socket
//! with its process number.
//!
//! A thread accepts one connection after the other and asks the manager's loop, which looks between
//! two datagrams. Whoever is neither root nor of the manager's user gets nothing.

use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::super::super::local::check_asker;

/// What the names of these sockets begin with.
pub(crate) const SOCKET_PREFIX: &str = "dquant-subnet/";

/// The loop looks ten times a second; routing a large fabric takes longer.
const PATIENCE: Duration = Duration::from_secs(4);

/// How long a reader may take.
const WRITE_PATIENCE: Duration = Duration::from_secs(1);

/// After connections could not be accepted, as when there are too many open files.
const ACCEPT_REST: Duration = Duration::from_millis(200);

/// The loop's end of it.
pub(super) struct Socket {
    is_asked: Arc<AtomicBool>,
    replies: SyncSender<String>,
}

impl Socket {
    /// Listens, from a thread of its own that ends with the process.
    pub(super) fn listen() -> io::Result<Socket> {
        let name = format!("{SOCKET_PREFIX}{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        let is_asked = Arc::new(AtomicBool::new(false));
        let (replies, received) = sync_channel(1);
        let asks = Arc::clone(&is_asked);
        let serve = move || {
            loop {
                match listener.accept() {
                    // A reader that is gone needs no reply.
                    Ok((stream, _)) => drop(reply(stream, &asks, &received)),
                    Err(_) => std::thread::sleep(ACCEPT_REST),
                }
            }
        };
        std::thread::Builder::new().name("status".into()).spawn(serve)?;
        Ok(Socket { is_asked, replies })
    }

    /// Whether a reply is wanted; asking takes the question away.
    pub(super) fn is_asked(&self) -> bool {
        self.is_asked.swap(false, Ordering::Relaxed)
    }

    /// Gives the reply. One that nobody waits for any more is dropped.
    pub(super) fn reply(&self, text: String) {
        let _ = self.replies.try_send(text);
    }
}

fn reply(mut stream: UnixStream, asks: &AtomicBool, replies: &Receiver<String>) -> io::Result<()> {
    check_asker(&stream)?;
    stream.set_write_timeout(Some(WRITE_PATIENCE))?;
    // One that came too late for whoever asked before.
    while replies.try_recv().is_ok() {}
    asks.store(true, Ordering::Relaxed);
    let text = replies.recv_timeout(PATIENCE).map_err(io::Error::other)?;
    stream.write_all(text.as_bytes())
}
