//! What happens in the cluster, numbered while this brain leads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use crate::view::ClusterEvent;
use crate::web::{EventLog, unix_ms};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Events {
    log: Arc<EventLog>,
    next: AtomicU64,
    is_leading: watch::Sender<bool>,
}

impl Events {
    /// Nothing happened yet.
    pub(super) fn new() -> Events {
        Events {
            log: Arc::new(EventLog::new(unix_ms())),
            next: AtomicU64::new(1),
            is_leading: watch::Sender::new(false),
        }
    }

    /// Where subscribers read.
    pub(super) fn log(&self) -> &Arc<EventLog> {
        &self.log
    }

    /// Whether this brain leads: events of one that does not say nothing about the cluster.
    pub(super) fn leading(&self) -> watch::Receiver<bool> {
        self.is_leading.subscribe()
    }

    /// This brain leads from now on, or does not.
    pub(super) fn lead(&self, is_leading: bool) {
        self.is_leading
            .send_if_modified(|before| std::mem::replace(before, is_leading) != is_leading);
    }

    /// Notes something. Only the actor does, so numbers are in order.
    pub(super) fn note(&self, kind: &str, job: Option<u64>, text: String) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let kind = kind.to_owned();
        self.log.push(ClusterEvent { number, unix_ms: unix_ms(), kind, job, text });
    }
}
