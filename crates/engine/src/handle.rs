//! A stream of the engine, as those hold it who opened it: when the last of them lets go, it is
//! closed.

use crate::data::dpu::{Command, StreamId};
use crate::data::{Commands, Signals};
use crate::path::Waiting;

/// A stream that is open.
pub(crate) struct OpenStream {
    pub(crate) id: StreamId,
    /// Name of its target.
    pub(crate) target: String,
    pub(crate) commands: Commands<Command>,
    pub(crate) signals: Signals,
    pub(crate) waiting: Waiting,
    /// Holds the session with the target.
    pub(crate) task: Option<tokio::task::JoinHandle<()>>,
}

impl OpenStream {
    /// Ends the stream with an error for the ranks that are left.
    pub(crate) fn rank_left(&self, why: String) {
        self.signals.rank_left(why);
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.waiting.leave(self.id);
        self.signals.close();
    }
}
