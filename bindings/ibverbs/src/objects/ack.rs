//! Counts events that were read and must be acknowledged before their object can be destroyed.

use std::sync::{Condvar, Mutex, PoisonError};

/// Counts for one object and one kind of event.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    unacknowledged: Mutex<i64>,
    changed: Condvar,
}

impl Acks {
    fn add(&self, amount: i64) {
        *self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner) += amount;
        self.changed.notify_all();
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
        let done = self.changed.wait_while(count, |count| *count > 0);
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }
}
