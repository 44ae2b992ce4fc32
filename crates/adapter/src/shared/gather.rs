//! What waits for the program's next call, so that one system call sends more.
//!
//! - A *request* waits behind others of its queue pair that are under way, or in a burst over many
//!   queue pairs, for the next poll that finds nothing or the sixteenth request. The peers are busy
//!   meanwhile.
//! - An *acknowledgement* waits if the turn before it has completions for the program: the program
//!   takes them first, and its reply, if it has one, leaves together with the acknowledgement. It
//!   also waits where the progress thread received, for a program that sleeps or polls memory. Two
//!   programs that WRITE to each other and wait for each completion find the reply beside it then,
//!   without their threads.
//!
//! Where the program's next call comes late, because it computes or has nothing to reply, nothing
//! waits for a while, each time for longer. The progress thread sends what a program has left.
//!
//! A program in the middle of a burst is there, so the progress thread leaves the engine to it, and
//! its posts take turns.

use roce::{Duration, Time};

/// Longer requests gain nothing.
const SMALL_BYTES: u64 = 4096;

/// Requests under way on the queue pair, or posted on any since the last poll, from which on the
/// program counts as posting a burst.
const BUSY: u32 = 4;

/// Requests sent together.
const MOST: u32 = 16;

/// A program that polls takes no longer to its next call.
const PROMPT: Duration = Duration::from_micros(50);

/// Requests and acknowledgements that do not wait after a late call.
const FIRST_REST: u32 = 16;
const LONGEST_REST: u32 = 1 << 12;

/// Requests of a burst until the posting thread also receives: the program has not polled
/// meanwhile.
const BURST_TURN: u32 = 8;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Gather {
    /// Requests that wait.
    requests: u32,
    /// Acknowledgements wait.
    acknowledgements: bool,
    /// Since when the first of them does.
    since: Time,
    /// How many more do not wait.
    resting: u32,
    next_rest: u32,
    /// Requests since the last poll of the program, or since the progress thread last received.
    unpolled: u32,
    /// The program has polled since the progress thread last received.
    polls: bool,
    /// Requests of the burst since the last turn of a thread of the program.
    burst: u32,
}

impl Gather {
    pub(super) fn new() -> Gather {
        Gather {
            requests: 0,
            acknowledgements: false,
            since: Time::ZERO,
            resting: 0,
            next_rest: FIRST_REST,
            unpolled: 0,
            polls: false,
            burst: 0,
        }
    }

    /// A request of so many bytes is posted behind others under way. Returns whether it may wait.
    ///
    /// A program that does not poll may wait for replies in memory or asleep, so only requests
    /// under way on one queue pair are a burst of such a one.
    pub(super) fn post(&mut self, now: Time, under_way: u32, bytes: u64) -> bool {
        let posted = if self.polls { self.unpolled } else { 0 };
        self.unpolled = self.unpolled.saturating_add(1);
        self.post_near(now, under_way.max(posted), bytes)
    }

    /// The same for a request to a local peer: its packets need no system call, so only its own
    /// queue pair counts.
    pub(super) fn post_near(&mut self, now: Time, under_way: u32, bytes: u64) -> bool {
        if under_way < BUSY {
            self.burst = 0;
            return false;
        }
        self.burst += 1;
        if self.rests() || bytes > SMALL_BYTES || self.requests + 1 >= MOST {
            return false;
        }
        self.begin(now);
        self.requests += 1;
        true
    }

    /// Acknowledgements are due, and the program is about to take completions. Returns whether they
    /// may wait.
    pub(super) fn acknowledge(&mut self, now: Time) -> bool {
        if self.rests() {
            return false;
        }
        self.begin(now);
        self.acknowledgements = true;
        true
    }

    fn rests(&mut self) -> bool {
        let rests = self.resting > 0;
        self.resting -= u32::from(rests);
        rests
    }

    fn begin(&mut self, now: Time) {
        if !self.waits() {
            self.since = now;
        }
    }

    /// Whether anything waits.
    pub(super) fn waits(&self) -> bool {
        self.requests > 0 || self.acknowledgements
    }

    /// From when on what waits is late.
    pub(super) fn late_at(&self) -> Time {
        self.since + PROMPT + Duration::from_nanos(1)
    }

    /// Whether the program is posting a burst.
    pub(super) fn is_burst(&self) -> bool {
        self.burst > 0
    }

    /// Whether the thread that posts should receive, too.
    pub(super) fn owes_turn(&mut self) -> bool {
        let owes = self.burst >= BURST_TURN;
        if owes {
            self.burst = 1;
        }
        owes
    }

    /// The program polls: what waits is sent now.
    pub(super) fn polled(&mut self, now: Time) {
        self.called(now);
        (self.unpolled, self.burst, self.polls) = (0, 0, true);
    }

    /// The progress thread received: a program may wait for what came, in memory.
    pub(super) fn received(&mut self) {
        (self.unpolled, self.burst, self.polls) = (0, 0, false);
    }

    /// The program posts: what waits is sent now. Requests have waited for as long as it took to
    /// post the others.
    pub(super) fn posted(&mut self, now: Time) {
        if self.acknowledgements {
            self.called(now);
        }
        self.requests = 0;
    }

    /// The call that something may have waited for.
    fn called(&mut self, now: Time) {
        if self.waits() && !self.sent(now) {
            self.next_rest = (self.next_rest / 4).max(FIRST_REST);
        }
    }

    /// What waits is sent now. Returns whether that is late.
    pub(super) fn sent(&mut self, now: Time) -> bool {
        let is_late = self.waits() && now.since(self.since) > PROMPT;
        if is_late {
            self.resting = self.next_rest;
            self.next_rest = (self.next_rest * 4).min(LONGEST_REST);
        }
        (self.requests, self.acknowledgements) = (0, false);
        is_late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    #[test]
    fn sixteen_requests_of_a_burst_are_sent_together() {
        let mut gather = Gather::new();
        let mut post = |posted| {
            let waits = gather.post(at(0), posted, 64);
            if !waits {
                gather.posted(at(1_000));
            }
            waits
        };
        let sent: Vec<u32> = (0..64).filter(|&posted| !post(posted)).collect();
        assert_eq!(sent, [0, 1, 2, 3, 19, 35, 51]);
    }

    #[test]
    fn a_program_that_does_not_poll_in_time_waits_ever_more_rarely() {
        let mut gather = Gather::new();
        let mut late = Vec::new();
        for posted in 0..25_000 {
            if gather.post(at(0), 10, 64) {
                late.push(posted);
                gather.sent(at(51));
            }
        }
        assert_eq!(late, [0, 17, 82, 339, 1364, 5461, 9558, 13_655, 17_752, 21_849]);
        // Polls in time make up for it.
        for _ in 0..10 {
            gather.resting = 0;
            assert!(gather.post(at(60), 10, 64));
            gather.polled(at(61));
        }
        assert_eq!(gather.next_rest, FIRST_REST);
    }

    #[test]
    fn acknowledgements_wait_for_programs_that_come_back_in_time() {
        let mut gather = Gather::new();
        for call in 0..100 {
            assert!(gather.acknowledge(at(100 * call)));
            match call % 2 {
                0 => gather.posted(at(100 * call + 50)),
                _ => gather.polled(at(100 * call + 50)),
            }
        }
        assert!(gather.acknowledge(at(0)));
        gather.posted(at(51));
        assert!((0..FIRST_REST).all(|_| !gather.acknowledge(at(60))), "the reply was late");
        assert!(gather.acknowledge(at(60)));
    }

    #[test]
    fn replies_in_time_make_up_for_late_ones() {
        let mut gather = Gather::new();
        for (round, rest) in [16, 64, 256].into_iter().enumerate() {
            gather.resting = 0;
            assert!(gather.acknowledge(at(0)), "round {round}");
            assert!(gather.sent(gather.late_at()), "the thread sends it");
            assert_eq!(gather.resting, rest);
        }
        for rest in [256, 64, 16, 16] {
            gather.resting = 0;
            assert!(gather.acknowledge(at(0)));
            gather.posted(at(5));
            assert_eq!((gather.next_rest, gather.resting), (rest, 0));
        }
    }

    #[test]
    fn a_burst_over_many_queue_pairs_is_sent_together_until_a_poll() {
        let mut gather = Gather::new();
        let sent = |gather: &mut Gather| -> Vec<u32> {
            let leaves = |_: &u32| {
                let waits = gather.post(at(0), 0, 64);
                if !waits {
                    gather.posted(at(0));
                }
                !waits
            };
            (0..40).filter(leaves).collect()
        };
        for _ in 0..3 {
            gather.polled(at(0));
            assert_eq!(sent(&mut gather), [0, 1, 2, 3, 19, 35]);
            assert!(gather.is_burst());
        }
        // Without polls the program may wait for replies in memory: nothing waits, and it does not
        // count as present.
        gather.sent(at(0));
        gather.received();
        assert_eq!(sent(&mut gather).len(), 40);
        assert!(!gather.is_burst());
    }

    #[test]
    fn long_requests_and_those_behind_few_do_not_wait() {
        let mut gather = Gather::new();
        assert!((0..BUSY).all(|under_way| !gather.post(at(0), under_way, 64)));
        assert!(!gather.is_burst());
        assert!(!gather.post(at(0), BUSY, SMALL_BYTES + 1) && gather.is_burst());
        assert!(!gather.sent(at(1_000)), "nothing had waited, so nothing was late");
        assert!(gather.post(at(1_000), BUSY, SMALL_BYTES));
    }

    #[test]
    fn a_burst_without_polls_takes_turns_of_its_own() {
        let mut gather = Gather::new();
        let mut owed = |posts| {
            (0..posts)
                .filter(|_| {
                    gather.post(at(0), 10, 1 << 20);
                    gather.owes_turn()
                })
                .count()
        };
        assert_eq!((owed(7), owed(1), owed(14)), (0, 1, 2));
        gather.polled(at(0));
        assert!(!gather.is_burst() && !gather.owes_turn());
    }
}
