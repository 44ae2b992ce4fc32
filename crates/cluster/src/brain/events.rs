//! What happened in the cluster, newest last: a bounded memory, and a channel for those who subscribe.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::broadcast;

use crate::view::ClusterEvent;

/// Events that are kept, and that a slow subscriber may be behind.
pub const MAX_EVENTS: usize = 1024;

/// See the module's text.
#[derive(Debug)]
pub struct Events {
    kept: Mutex<Kept>,
    sender: broadcast::Sender<ClusterEvent>,
}

#[derive(Debug, Default)]
struct Kept {
    last: u64,
    events: VecDeque<ClusterEvent>,
}

/// Milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    // A clock before 1970 shows 0.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

impl Default for Events {
    fn default() -> Events {
        Events::new()
    }
}

impl Events {
    /// Nothing happened yet.
    pub fn new() -> Events {
        Events { kept: Mutex::default(), sender: broadcast::channel(MAX_EVENTS).0 }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Nothing in it is left half changed.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes something.
    pub fn note(&self, kind: &str, job: Option<u64>, text: String) {
        let mut kept = self.kept();
        kept.last += 1;
        let number = kept.last;
        let event = ClusterEvent { number, unix_ms: unix_ms(), kind: kind.to_owned(), job, text };
        if kept.events.len() == MAX_EVENTS {
            kept.events.pop_front();
        }
        kept.events.push_back(event.clone());
        // Nobody may be subscribed. Sent under the lock: subscribers see numbers in order.
        let _ = self.sender.send(event);
    }

    /// Kept events after that number, and what comes behind them.
    pub fn after(&self, number: u64) -> (Vec<ClusterEvent>, broadcast::Receiver<ClusterEvent>) {
        let kept = self.kept();
        let newer = kept.events.iter().filter(|event| event.number > number).cloned().collect();
        (newer, self.sender.subscribe())
    }

    /// The number of the last event.
    pub fn last(&self) -> u64 {
        self.kept().last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_is_bounded_and_nothing_is_missed_between_it_and_the_channel() {
        let events = Events::new();
        for number in 0..MAX_EVENTS + 10 {
            events.note("admitted", Some(number as u64), String::new());
        }
        let (kept, mut later) = events.after(0);
        assert_eq!(kept.len(), MAX_EVENTS);
        assert_eq!((kept[0].number, events.last()), (11, MAX_EVENTS as u64 + 10));
        events.note("released", None, "gone".to_owned());
        assert_eq!(later.try_recv().expect("one").number, events.last());
        assert!(events.after(events.last()).0.is_empty());
    }
}
