//! How often a thread that polls looks for messages of local peers.
//!
//! Each look takes the line that the writer is about to write out of the writer's cache, so a
//! reader that is faster than its writer slows it down. Where message follows message, the poll
//! after one that took some leaves its look out, and the next one takes several. A reply comes
//! later than that. Acknowledgements are looked for always, and so are messages by the progress
//! thread and by programs that poll seldom.

use roce::{Duration, Time};

/// Calls after a look that took messages within which the next ones make a stream of them, and how
/// many looks are then left out: a poll in vain is two, one before its turn and one in it.
const STREAM: u32 = 2;

/// Who has not polled for so long looks.
const SELDOM: Duration = Duration::from_micros(5);

/// See the module's text.
#[derive(Debug)]
pub(super) struct Polling {
    /// Calls since messages were last taken.
    since_taken: u32,
    /// Looks to be left out, and one.
    left_out: u32,
    /// The engine's time when messages were last taken, which is that of its last turn.
    taken_at: Time,
}

impl Default for Polling {
    fn default() -> Polling {
        Polling { since_taken: u32::MAX, left_out: 0, taken_at: Time::ZERO }
    }
}

impl Polling {
    /// Whether to look now; `now` is the engine's time.
    #[inline]
    pub(super) fn looks(&mut self, now: Time) -> bool {
        self.since_taken = self.since_taken.saturating_add(1);
        let polls_seldom = now.since(self.taken_at) > SELDOM;
        self.left_out = if polls_seldom { 0 } else { self.left_out.saturating_sub(1) };
        self.left_out == 0
    }

    /// A look took messages.
    #[inline]
    pub(super) fn took(&mut self, now: Time) {
        let is_stream = self.since_taken <= STREAM + 1;
        let left_out = if is_stream { STREAM + 1 } else { 0 };
        *self = Polling { since_taken: 0, left_out, taken_at: now };
    }

    /// Whether the last look was left out: what it would have found may be there.
    pub(super) fn rests(&self) -> bool {
        self.left_out > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_nanos(1_000_000);

    fn calls_until_look(polling: &mut Polling, now: Time) -> Option<u32> {
        (1..9).find(|_| polling.looks(now))
    }

    #[test]
    fn looks_are_left_out_in_a_stream_and_nowhere_else() {
        let mut polling = Polling::default();
        // Replies: looks in vain in between.
        for _ in 0..3 {
            (0..4).for_each(|_| assert_eq!(calls_until_look(&mut polling, NOW), Some(1)));
            polling.took(NOW);
            assert!(!polling.rests());
        }
        // One right behind the last, and so on.
        assert_eq!(calls_until_look(&mut polling, NOW), Some(1));
        for _ in 0..3 {
            polling.took(NOW);
            assert!(polling.rests());
            assert_eq!(calls_until_look(&mut polling, NOW), Some(STREAM + 1));
        }
        // The stream ends: nothing there.
        (0..4).for_each(|_| assert_eq!(calls_until_look(&mut polling, NOW), Some(1)));
        polling.took(NOW);
        assert_eq!(calls_until_look(&mut polling, NOW), Some(1));
    }

    #[test]
    fn who_polls_seldom_looks_at_each_poll() {
        let (mut polling, mut now) = (Polling::default(), NOW);
        for _ in 0..5 {
            assert!(polling.looks(now));
            polling.took(now);
            now += SELDOM + Duration::from_nanos(1);
        }
    }
}
