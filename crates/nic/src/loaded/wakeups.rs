//! Which completion queues are armed for a sleep, and which were notified.

use std::collections::{HashSet, VecDeque};

use roce::verbs::CqId;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Wakeups {
    notified: VecDeque<CqId>,
    /// Queues that were armed for a sleep and have not been notified since.
    pub(super) armed: HashSet<CqId>,
    /// Whether some completion queue could not be armed at the last try.
    pub(super) is_unarmed: bool,
    /// Notifications taken.
    pub(super) count: u64,
}

impl Wakeups {
    /// A queue was notified.
    pub(super) fn push(&mut self, cq: CqId) {
        if !self.notified.contains(&cq) {
            self.notified.push_back(cq);
        }
    }

    pub(super) fn pop(&mut self) -> Option<CqId> {
        self.notified.pop_front()
    }

    /// A queue was destroyed.
    pub(super) fn forget(&mut self, cq: CqId) {
        self.notified.retain(|&other| other != cq);
        self.armed.remove(&cq);
    }
}
