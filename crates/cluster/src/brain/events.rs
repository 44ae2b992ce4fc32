//! What happens in the cluster, numbered while this brain leads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::view::ClusterEvent;
use crate::web::EventLog;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Events {
    log: Arc<EventLog>,
    next: AtomicU64,
}

/// Milliseconds since 1970.
pub(super) fn unix_ms() -> u64 {
    // A clock before 1970 shows 0.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

impl Events {
    /// Nothing happened yet.
    pub(super) fn new() -> Events {
        Events { log: Arc::new(EventLog::new(unix_ms())), next: AtomicU64::new(1) }
    }

    /// Where subscribers read.
    pub(super) fn log(&self) -> &Arc<EventLog> {
        &self.log
    }

    /// Notes something. Only the actor does, so numbers are in order.
    pub(super) fn note(&self, kind: &str, job: Option<u64>, text: String) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let kind = kind.to_owned();
        self.log.push(ClusterEvent { number, unix_ms: unix_ms(), kind, job, text });
    }
}
