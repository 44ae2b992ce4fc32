//! Messages that must reach an engine however full its command queue is: the end of a stream or
//! session, and failures that would otherwise leave its trainer waiting.
//!
//! A queue may refuse requests for something new. The owner of something that ends cannot retry
//! later, so these messages have a place that exists as long as the stream does: flags, which
//! cannot be full.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nic::waiter::Waker;

/// Signals from a stream's or session's owner to the engine.
#[derive(Clone, Debug)]
pub struct Signals {
    shared: Arc<Shared>,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Shared {
    /// Whether `raised` holds anything.
    is_raised: AtomicBool,
    raised: Mutex<Raised>,
}

/// Messages since the engine last checked.
#[derive(Debug, Default)]
pub(crate) struct Raised {
    /// It is over.
    pub(crate) close: bool,
    /// Connections whose control channel closed, each once.
    pub(crate) dropped: Vec<u32>,
    /// A connection that cannot be restored, and why.
    pub(crate) abandoned: Option<(u32, String)>,
    /// A rank of the stream has left, and the others cannot go on without it.
    pub(crate) rank_left: Option<String>,
}

impl Signals {
    pub(super) fn new(waker: Waker) -> Signals {
        Signals { shared: Arc::default(), waker }
    }

    /// Ends the stream or session.
    pub fn close(&self) {
        self.raise(|raised| raised.close = true);
    }

    /// The control channel of a connection closed: treat it as lost.
    pub fn drop_connection(&self, connection: u32) {
        self.raise(|raised| {
            if !raised.dropped.contains(&connection) {
                raised.dropped.push(connection);
            }
        });
    }

    /// A connection cannot be restored, for this reason: end the stream with an error.
    pub fn abandon(&self, connection: u32, why: String) {
        self.raise(|raised| raised.abandoned = Some((connection, why)));
    }

    /// A rank has left: end the stream of the others with this error.
    pub fn rank_left(&self, why: String) {
        // The first to leave is the cause; others may follow it.
        self.raise(|raised| {
            raised.rank_left.get_or_insert(why);
        });
    }

    fn raise(&self, say: impl FnOnce(&mut Raised)) {
        let mut raised = self.shared.raised.lock().unwrap_or_else(PoisonError::into_inner);
        say(&mut raised);
        self.shared.is_raised.store(true, Ordering::Release);
        drop(raised);
        self.waker.wake();
    }

    /// Whether there is something to [`take`](Signals::take). Costs the engine one load.
    pub(crate) fn is_raised(&self) -> bool {
        self.shared.is_raised.load(Ordering::Acquire)
    }

    /// Takes the messages, for the engine; `None` while another thread is adding one, which will
    /// wake it.
    pub(crate) fn take(&self) -> Option<Raised> {
        let mut raised = match self.shared.raised.try_lock() {
            Ok(raised) => raised,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
        };
        self.shared.is_raised.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut raised))
    }
}
