//! What happens in the cluster, numbered while this brain leads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parfait::log::{Book, Outcome};
use tokio::sync::watch;

use super::inputs::Answer;
use crate::view::ClusterEvent;
use crate::web::{EventLog, unix_ms};
use crate::words::counted;

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

    /// Notes what became of a request.
    pub(super) fn note_answer(&self, answer: &Answer, book: Option<&Book>) {
        let name = |job: &u64| {
            let held = book.and_then(|book| book.jobs().get(job));
            held.map_or_else(String::new, |held| format!(" '{}': {}", held.label.name, held.job))
        };
        match answer {
            Ok(Outcome::Admitted(job)) => {
                self.note("admitted", Some(*job), format!("job {job}{}", name(job)));
            }
            Ok(Outcome::Released { job, restored }) => {
                self.note("released", Some(*job), format!("job {job} is released"));
                for job in restored {
                    let text = format!("job {job}{} has its guarantee again", name(job));
                    self.note("moved", Some(*job), text);
                }
            }
            Ok(Outcome::Repaired { hit, moved, degraded }) => self.note(
                "moved",
                None,
                format!(
                    "{} hit, {} moved to other hosts, {} degraded",
                    counted(*hit, "job"),
                    counted(*moved, "worker"),
                    counted(*degraded, "job")
                ),
            ),
            Ok(Outcome::Refused(refused)) => {
                self.note("refused", None, refused.text.clone());
            }
            Err(_) => {}
        }
    }
}
