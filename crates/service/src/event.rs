//! Events of a process that no engine and no stream has: a static each, counted from any thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// Events of one kind, counted by all threads of this process.
#[derive(Debug)]
pub struct Event {
    name: &'static str,
    count: AtomicU64,
}

impl Event {
    /// None counted yet; `name` has dots, from the general to the special.
    pub const fn new(name: &'static str) -> Event {
        Event { name, count: AtomicU64::new(0) }
    }

    /// What it is called where counters are shown.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Counts one event.
    pub fn count(&self) {
        self.add(1);
    }

    /// Counts several events.
    pub fn add(&self, events: u64) {
        self.count.fetch_add(events, Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}
