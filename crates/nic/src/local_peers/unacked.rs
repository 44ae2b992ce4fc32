//! Messages that a process has put into another one's FIFO and that have neither been acked nor
//! nacked.
//!
//! Neither the FIFO nor what becomes of a message belongs here: see [`messages`](super::messages).

use std::collections::VecDeque;

use roce::direct::{Handed, MessageAck};
use roce::verbs::Qpn;
use roce::{Duration, Time};

/// Messages in a FIFO that its reader has not decided on.
#[derive(Debug, Default)]
pub(super) struct Unacked {
    /// With the lines at which they begin, oldest first.
    pub(super) messages: VecDeque<(u64, Handed)>,
    /// Lines of those that were refused, oldest first.
    pub(super) refused: VecDeque<u64>,
    /// The reader's progress, and since when there was no more, as far as it was looked at since
    /// messages wait.
    pub(super) progress: Option<(u64, Time)>,
}

impl Unacked {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Nobody waits for acknowledgements on the messages of this queue pair any more; passes the
    /// lines at which they begin on.
    pub(super) fn forget(&mut self, source: Qpn, mut forgotten: impl FnMut(u64)) {
        self.messages.retain(|&(begin, handed)| {
            let stays = handed.source != source;
            if !stays {
                forgotten(begin);
            }
            stays
        });
    }

    /// Whether the reader, which has finished with the lines before `tail`, has decided on the
    /// oldest message.
    pub(super) fn is_decided(&self, tail: u64) -> bool {
        self.messages.front().is_some_and(|&(begin, _)| begin < tail)
    }

    /// The acknowledgement on the oldest message, if the reader has finished with it.
    pub(super) fn next(&mut self, tail: u64) -> Option<(Handed, MessageAck)> {
        let &(begin, handed) = self.messages.front()?;
        if begin >= tail {
            return None;
        }
        self.messages.pop_front();
        while self.refused.front().is_some_and(|&refused| refused < begin) {
            self.refused.pop_front();
        }
        let is_refused = self.refused.front() == Some(&begin);
        Some((handed, if is_refused { MessageAck::Refused } else { MessageAck::Taken }))
    }

    /// Whether the reader has made no progress for too long.
    pub(super) fn is_given_up(&mut self, tail: u64, now: Time, patience: Duration) -> bool {
        match self.progress {
            Some((before, since)) if before == tail => now.since(since) >= patience,
            _ => {
                self.progress = Some((tail, now));
                false
            }
        }
    }
}
