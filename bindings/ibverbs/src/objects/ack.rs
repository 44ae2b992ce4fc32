//! Counts events that were read and must be acknowledged before their object can be destroyed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Counts for one object and one kind of event.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    unacknowledged: Mutex<i64>,
    changed: Condvar,
    /// Threads in [`wait`](Acks::wait); changes under the lock of the count.
    waiting: AtomicU32,
}

impl Acks {
    fn add(&self, amount: i64) {
        let mut count = self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        *count += amount;
        // A notification is a system call, whether or not a thread waits.
        if *count <= 0 && self.waiting.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// The program has read an event.
    pub(crate) fn read_one(&self) {
        self.add(1);
    }

    /// The program has acknowledged events.
    pub(crate) fn acknowledge(&self, events: u32) {
        self.add(-i64::from(events));
    }

    /// Blocks until all events read are acknowledged.
    pub(crate) fn wait(&self) {
        let count = self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let done = self.changed.wait_while(count, |count| *count > 0);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }
}
