//! Requests to the state machine and who waits for their answers. A request may come again while it
//! is carried out: all who sent it get the answer.

use std::collections::BTreeMap;

use tokio::sync::oneshot;

use super::inputs::Answer;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// By client and sequence.
    waiting: BTreeMap<(u64, u64), Vec<oneshot::Sender<Answer>>>,
    /// Those whose caller was gone when their turn came.
    pub(super) abandoned: u64,
}

impl Requests {
    /// Returns whether the request is wanted: who went while it waited asks again, or does not want
    /// it any more.
    pub(super) fn push(&mut self, key: (u64, u64), answer: oneshot::Sender<Answer>) -> bool {
        if answer.is_closed() {
            self.abandoned += 1;
            return false;
        }
        self.waiting.entry(key).or_default().push(answer);
        true
    }

    pub(super) fn answer(&mut self, key: (u64, u64), answer: &Answer) {
        for waiting in self.waiting.remove(&key).into_iter().flatten() {
            // Whoever asked may be gone, and asks again.
            let _ = waiting.send(answer.clone());
        }
    }

    /// Forgets those whose clients gave up.
    pub(super) fn forget_abandoned(&mut self) {
        self.waiting.retain(|_, answers| {
            answers.retain(|answer| !answer.is_closed());
            !answers.is_empty()
        });
    }

    /// What was being stored may or may not be: whoever waits for it asks again, at once.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}
