//! Work requests built by calls and then posted, all of them or none.

use std::cell::UnsafeCell;

use libc::{PTHREAD_MUTEX_INITIALIZER, pthread_mutex_t};
use roce::verbs::{SendWr, Transport};
use rustix::io::Errno;

use super::Qp;
use crate::abi::*;
use crate::engine::Core;
use crate::process::errors::{Outcome, errno_of};

/// Requests being built.
pub(crate) struct Batch {
    enabled: bool,
    lock: UnsafeCell<pthread_mutex_t>,
    draft: UnsafeCell<Draft>,
}

/// The requests so far.
#[derive(Default)]
pub(crate) struct Draft {
    pub(crate) requests: Vec<Request>,
    /// Inline data of all requests, one after the other.
    pub(crate) inline: Vec<u8>,
    /// The first error; the calls themselves return nothing.
    pub(crate) error: Option<Errno>,
}

/// One request.
pub(crate) struct Request {
    pub(crate) wr: SendWr,
    /// The range of this request's data in the draft's inline data.
    pub(crate) inline: Option<std::ops::Range<usize>>,
}

impl Batch {
    /// `enabled` if the queue pair is created for this interface.
    pub(super) fn new(enabled: bool) -> Batch {
        Batch {
            enabled,
            lock: UnsafeCell::new(PTHREAD_MUTEX_INITIALIZER),
            draft: UnsafeCell::new(Draft::default()),
        }
    }

    /// The queue pair was created for this interface.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Frees the memory of earlier requests, unless a thread is building others.
    pub(super) fn end(&self) {
        // SAFETY: the mutex is initialised and never moves: its queue pair lies in an arena.
        if unsafe { libc::pthread_mutex_trylock(self.lock.get()) } == 0 {
            // SAFETY: the lock is held.
            unsafe { *self.draft.get() = Draft::default() };
            self.release();
        }
    }

    /// Begins a draft; other threads block until [`Batch::release`].
    pub(crate) fn acquire(&self) {
        // SAFETY: the mutex is initialised and never moves: its queue pair lies in an arena.
        unsafe { libc::pthread_mutex_lock(self.lock.get()) };
        // SAFETY: the lock is held now.
        unsafe { (*self.draft.get()).clear() };
    }

    /// Releases the lock taken by [`Batch::acquire`].
    pub(crate) fn release(&self) {
        // SAFETY: as above; the calling thread acquired it.
        unsafe { libc::pthread_mutex_unlock(self.lock.get()) };
    }

    /// The draft of the calling thread.
    ///
    /// # Safety
    /// The calling thread has acquired the batch, and holds no other reference to the draft.
    #[allow(clippy::mut_from_ref, reason = "the lock is C's, without a guard")]
    pub(crate) unsafe fn draft(&self) -> &mut Draft {
        // SAFETY: as the caller promises.
        unsafe { &mut *self.draft.get() }
    }
}

impl Draft {
    fn clear(&mut self) {
        self.requests.clear();
        self.inline.clear();
        self.error = None;
    }

    /// The request that setters complete; if there is none, the draft gets an error.
    pub(crate) fn last(&mut self) -> Option<&mut Request> {
        let last = self.requests.last_mut();
        if last.is_none() {
            self.error.get_or_insert(Errno::INVAL);
        }
        last
    }

    /// Keeps an error if it is the first.
    pub(crate) fn note<T>(&mut self, outcome: Outcome<T>) -> Option<T> {
        outcome.map_err(|error| self.error.get_or_insert(error)).ok()
    }
}

impl Qp {
    /// All or none: the transport checks all requests before the first is posted.
    pub(crate) fn post_all(&self, core: &mut Core, draft: &mut Draft) -> Outcome<()> {
        let Draft { requests, inline, .. } = draft;
        if self.transport == Transport::Ud && requests.iter().any(|request| request.wr.to.is_none())
        {
            return Err(Errno::INVAL);
        }
        let all = requests.iter().map(|request| &request.wr);
        core.endpoint().check_sends(self.number, all).map_err(errno_of)?;
        for request in requests.drain(..) {
            let Request { mut wr, inline: range } = request;
            if let Some(range) = range {
                let piece = &mut inline[range];
                let piece = ibv_data_buf { addr: piece.as_mut_ptr().cast(), length: piece.len() };
                // SAFETY: the piece is our own copy, and the engine's lock is held.
                wr.sges = unsafe { self.take_inline(std::iter::once(piece))? };
            }
            self.post_send(core, wr)?;
        }
        Ok(())
    }
}
