//! A forked child has a copy of the memory, but neither the progress thread nor the right to speak
//! for the parent's queue pairs. Its calls fail; the parent notices nothing.
//!
//! The child closes its copies of the sockets: a socket that a child keeps open would go on taking
//! packets of the shared port after the parent has ended.

use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use rustix::io::Errno;

/// Descriptors that a child closes; more than this many stay open in children.
const MAX_FDS: usize = 256;

static FORKED: AtomicBool = AtomicBool::new(false);
static OPEN_ENGINES: AtomicUsize = AtomicUsize::new(0);
static SOCKETS: [AtomicI32; MAX_FDS] = [const { AtomicI32::new(-1) }; MAX_FDS];

/// Refuses the call in a child of a process that had devices open.
#[inline]
pub(crate) fn check() -> Result<(), Errno> {
    if FORKED.load(Ordering::Relaxed) { Err(Errno::NODEV) } else { Ok(()) }
}

/// A device was opened with these sockets.
pub(crate) fn opened(sockets: &[RawFd]) {
    static REGISTERED: Once = Once::new();
    // SAFETY: the handler only touches atomics and closes descriptors, as a child of a process with
    // several threads may.
    REGISTERED.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    OPEN_ENGINES.fetch_add(1, Ordering::Relaxed);
    close_in_children(sockets);
}

/// Children close these descriptors.
pub(crate) fn close_in_children(sockets: &[RawFd]) {
    for &socket in sockets {
        let free = SOCKETS.iter().find(|place| {
            place.compare_exchange(-1, socket, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        });
        if free.is_none() {
            return;
        }
    }
}

/// A device was closed.
pub(crate) fn closed(sockets: &[RawFd]) {
    OPEN_ENGINES.fetch_sub(1, Ordering::Relaxed);
    for place in SOCKETS.iter().filter(|place| sockets.contains(&place.load(Ordering::Relaxed))) {
        place.store(-1, Ordering::Relaxed);
    }
}

extern "C" fn in_child() {
    if OPEN_ENGINES.load(Ordering::Relaxed) == 0 {
        return;
    }
    FORKED.store(true, Ordering::Relaxed);
    for place in &SOCKETS {
        let socket = place.swap(-1, Ordering::Relaxed);
        if socket >= 0 {
            // SAFETY: the descriptor is the child's copy of a socket that it never uses.
            unsafe { libc::close(socket) };
        }
    }
}
