//! Missing READ responses, and the requests for their retransmission.
//!
//! Every READ (an atomic is a READ of one packet) has a bitmap of the responses that have arrived,
//! a window that starts at the first missing one. Responses arrive in the order of the READs, and
//! within each in rising order, except retransmitted ones; so a hole followed by more responses is
//! a loss. Holes are requested as ranges, and requested again when a range has not arrived in time.
//!
//! Bounds: [`WINDOW`] responses after the first missing one are accepted; [`MAX_RANGE_REQUESTS`]
//! ranges of one READ may be outstanding, further holes wait. There are as many READs as the
//! requester has in flight. Their slots are allocated when so many are in flight for the first
//! time, so a connection without READs has none.

use alloc::boxed::Box;
use alloc::vec::Vec;
use arrayvec::ArrayVec;

use crate::time::{Duration, Time};
use crate::wire::Psn;

/// Responses accepted from the first missing one on.
pub(crate) const WINDOW: u32 = 2048;

/// Ranges of one READ that may be requested at the same time.
const MAX_RANGE_REQUESTS: usize = 16;

/// Responses behind a hole until it counts as a loss.
const REORDER_RESPONSES: u32 = 3;

/// How often the interval between requests for a range doubles.
const MAX_BACKOFF: u32 = 10;

/// Responses `first .. end` of a READ, to be requested again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RangeRequest {
    pub(crate) first: u32,
    pub(crate) end: u32,
    /// When it was sent; `None` if it is still to be sent.
    sent_at: Option<Time>,
}

/// The classification of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// To be placed.
    New,
    /// It has arrived before.
    Duplicate,
    /// Too far behind a hole; it will be requested.
    Beyond,
    /// No such READ, or no such response of it.
    Unknown,
}

/// One READ.
#[derive(Debug)]
struct Reading {
    psn: Psn,
    /// An atomic: it is responded to at once, before READs that were sent earlier.
    is_prompt: bool,
    total: u32,
    first_missing: u32,
    /// One past the furthest response that has arrived.
    furthest: u32,
    /// Holes before this one have been requested.
    settled: u32,
    /// Responses were dropped because they were too far ahead.
    is_cut: bool,
    bits: Box<[u64; (WINDOW / 64) as usize]>,
    range_requests: ArrayVec<RangeRequest, MAX_RANGE_REQUESTS>,
}

impl Reading {
    fn unused() -> Reading {
        Reading {
            psn: Psn::default(),
            is_prompt: false,
            total: 0,
            first_missing: 0,
            furthest: 0,
            settled: 0,
            is_cut: false,
            bits: Box::new([0; (WINDOW / 64) as usize]),
            range_requests: ArrayVec::new(),
        }
    }

    fn begin(&mut self, psn: Psn, total: u32, is_prompt: bool) {
        (self.psn, self.total, self.is_prompt) = (psn, total, is_prompt);
        (self.first_missing, self.furthest, self.settled) = (0, 0, 0);
        self.is_cut = false;
        self.bits.fill(0);
        self.range_requests.clear();
    }

    fn is_complete(&self) -> bool {
        self.first_missing == self.total
    }

    fn word(index: u32) -> (usize, u64) {
        ((index % WINDOW / 64) as usize, 1 << (index % 64))
    }

    fn has(&self, index: u32) -> bool {
        let (word, bit) = Reading::word(index);
        let is_within = index < self.furthest && index - self.first_missing.min(index) < WINDOW;
        index < self.first_missing || (is_within && self.bits[word] & bit != 0)
    }

    fn classify(&self, index: u32) -> Verdict {
        match index {
            _ if index >= self.total => Verdict::Unknown,
            _ if self.has(index) => Verdict::Duplicate,
            _ if index - self.first_missing >= WINDOW => Verdict::Beyond,
            _ => Verdict::New,
        }
    }

    fn accept(&mut self, index: u32) {
        let (word, bit) = Reading::word(index);
        self.bits[word] |= bit;
        self.furthest = self.furthest.max(index + 1);
        while self.first_missing < self.furthest {
            let (word, bit) = Reading::word(self.first_missing);
            if self.bits[word] & bit == 0 {
                break;
            }
            self.bits[word] &= !bit;
            self.first_missing += 1;
        }
    }

    /// The first run of missing responses in `from .. to`.
    fn hole(&self, from: u32, to: u32) -> Option<(u32, u32)> {
        let from = from.max(self.first_missing);
        let known = to.min(self.furthest);
        // No response from `furthest` on has arrived: no need to look.
        let first = (from..known).find(|&index| !self.has(index)).unwrap_or(from.max(known));
        let end = (first..known).find(|&index| self.has(index)).unwrap_or(to);
        (first < end).then_some((first, end))
    }

    /// Drops ranges that have arrived, and schedules those again that are `expired`. Returns
    /// whether any has.
    fn review(&mut self, expired: impl Fn(Time) -> bool) -> bool {
        let mut has_expired = false;
        let mut range_requests = core::mem::take(&mut self.range_requests);
        range_requests.retain(|range| match self.hole(range.first, range.end) {
            None => false,
            Some((first, _)) => {
                if range.sent_at.is_some_and(&expired) {
                    (range.first, range.sent_at) = (first, None);
                    has_expired = true;
                }
                true
            }
        });
        self.range_requests = range_requests;
        has_expired
    }

    /// Requests holes that later responses prove to be losses. `is_overtaken`: responses of later
    /// READs have arrived, so nothing more of this one is in flight.
    fn settle(&mut self, is_overtaken: bool) {
        let (limit, behind) = match is_overtaken {
            true => (self.total.min(self.first_missing.saturating_add(WINDOW)), 0),
            false => (self.furthest, REORDER_RESPONSES),
        };
        self.settled = self.settled.max(self.first_missing);
        while !self.range_requests.is_full()
            && let Some((first, end)) = self.hole(self.settled, limit)
            && end + behind <= limit
        {
            self.range_requests.push(RangeRequest { first, end, sent_at: None });
            self.settled = end;
        }
        if self.is_cut && self.first_missing == self.furthest {
            self.is_cut = false;
            self.request_rest();
        }
    }

    fn is_asked(&self, index: u32) -> bool {
        self.range_requests.iter().any(|range| range.first <= index && index < range.end)
    }

    fn request_rest(&mut self) {
        self.range_requests.clear();
        self.range_requests.push(RangeRequest {
            first: self.first_missing,
            end: self.total,
            sent_at: None,
        });
        self.settled = self.total;
    }
}

/// The READs of a queue pair that are not completed, oldest first.
#[derive(Debug)]
pub(crate) struct ReadTracker {
    /// A ring: `len` READs from `first` on.
    slots: Vec<Reading>,
    /// READs in flight that the connection has started with.
    limit: usize,
    first: usize,
    len: usize,
    /// Responses that have not arrived, of all READs.
    missing: u64,
    /// The last event that may have led to responses of the oldest READ.
    active_at: Time,
    backoff: u32,
    /// No outstanding range was requested before this time.
    oldest_request_at: Option<Time>,
    /// There may be ranges to request.
    may_request: bool,
}

impl ReadTracker {
    /// For a connection that starts with up to `limit` READs in flight; the program may raise the
    /// limit later.
    pub(crate) fn new(limit: u32) -> ReadTracker {
        ReadTracker {
            slots: Vec::new(),
            limit: limit as usize,
            first: 0,
            len: 0,
            missing: 0,
            active_at: Time::ZERO,
            backoff: 0,
            oldest_request_at: None,
            may_request: false,
        }
    }

    /// Whether [`next_range_request`](ReadTracker::next_range_request) may return something.
    pub(crate) fn may_request(&self) -> bool {
        self.may_request
    }

    /// Responses that are still to come.
    pub(crate) fn missing(&self) -> u64 {
        self.missing
    }

    /// Whether no READ is outstanding.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it has no timer: no READ is outstanding, and no range was.
    #[inline]
    pub(crate) fn is_at_rest(&self) -> bool {
        self.len == 0 && self.oldest_request_at.is_none()
    }

    /// READs not completed.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u32 {
        self.len as u32
    }

    fn at(&self, index: usize) -> &Reading {
        &self.slots[(self.first + index) % self.slots.len()]
    }

    fn at_mut(&mut self, index: usize) -> &mut Reading {
        let slots = self.slots.len();
        &mut self.slots[(self.first + index) % slots]
    }

    fn position(&self, psn: Psn) -> Option<usize> {
        (0..self.len).find(|&index| self.at(index).psn == psn)
    }

    /// Whether as many READs are in flight as the connection has ever been ready for.
    pub(crate) fn is_full(&self) -> bool {
        self.len >= self.slots.len().max(self.limit)
    }

    /// A READ with `packets` responses was sent for the first time.
    pub(crate) fn begin(&mut self, psn: Psn, packets: u32, is_prompt: bool, now: Time) {
        if self.len == self.slots.len() {
            self.slots.rotate_left(self.first);
            self.first = 0;
            self.slots.push(Reading::unused());
        }
        if self.len == 0 {
            (self.active_at, self.backoff) = (now, 0);
        }
        self.len += 1;
        self.missing += u64::from(packets);
        self.at_mut(self.len - 1).begin(psn, packets, is_prompt);
    }

    /// Whether the oldest READ has all its responses.
    pub(crate) fn is_front_complete(&self) -> bool {
        self.len > 0 && self.at(0).is_complete()
    }

    /// The oldest READ is completed.
    pub(crate) fn pop_front(&mut self) {
        debug_assert!(self.len > 0);
        self.first = (self.first + 1) % self.slots.len();
        self.len -= 1;
    }

    /// Classifies response `index` of the READ at `psn`.
    pub(crate) fn classify(&self, psn: Psn, index: u32) -> Verdict {
        self.position(psn).map_or(Verdict::Unknown, |at| self.at(at).classify(index))
    }

    /// A response that is [`Verdict::New`] was placed.
    pub(crate) fn accept(&mut self, psn: Psn, index: u32, now: Time) {
        let Some(at) = self.position(psn) else {
            return;
        };
        let reading = self.at_mut(at);
        reading.accept(index);
        self.missing -= 1;
        let reading = self.at_mut(at);
        if reading.is_asked(index) {
            reading.review(|_| false);
        }
        (self.active_at, self.backoff) = (now, 0);
        let has_overtaken = self.at(at).furthest >= REORDER_RESPONSES.min(self.at(at).total);
        for earlier in 0..at {
            if has_overtaken && (self.at(earlier).is_prompt || !self.at(at).is_prompt) {
                self.at_mut(earlier).settle(true);
            }
        }
        self.at_mut(at).settle(false);
        self.may_request = true;
    }

    /// A response that is [`Verdict::Beyond`] was dropped.
    pub(crate) fn cut(&mut self, psn: Psn) {
        if let Some(at) = self.position(psn) {
            self.at_mut(at).is_cut = true;
        }
    }

    /// The next range to request: PSN of its READ, and which responses.
    pub(crate) fn next_range_request(&mut self) -> Option<(Psn, RangeRequest)> {
        if !self.may_request {
            return None;
        }
        let unsent = |at| {
            let reading: &Reading = self.at(at);
            let range = reading.range_requests.iter().find(|range| range.sent_at.is_none())?;
            Some((reading.psn, *range))
        };
        let found = (0..self.len).find_map(unsent);
        self.may_request = found.is_some();
        found
    }

    /// The request for that range was sent.
    pub(crate) fn range_request_sent(&mut self, now: Time) {
        self.active_at = now;
        self.oldest_request_at.get_or_insert(now);
        for at in 0..self.len {
            if let Some(range) =
                self.at_mut(at).range_requests.iter_mut().find(|range| range.sent_at.is_none())
            {
                range.sent_at = Some(now);
                return;
            }
        }
    }

    fn backed_off(&self, timeout: Duration) -> Duration {
        timeout * (1 << self.backoff.min(MAX_BACKOFF))
    }

    /// Looks for ranges that have not arrived within `timeout`, and for a stall: the oldest READ
    /// was executed (its PSN is before `executed`) and no responses arrive.
    pub(crate) fn handle_timeout(&mut self, executed: Psn, timeout: Duration, now: Time) {
        let timeout = self.backed_off(timeout);
        let mut has_expired = false;
        for at in 0..self.len {
            has_expired |= self.at_mut(at).review(|sent_at| sent_at + timeout <= now);
        }
        if self.is_waiting(executed) && self.active_at + timeout <= now {
            self.at_mut(0).request_rest();
            has_expired = true;
        }
        if has_expired {
            self.backoff += 1;
            self.may_request = true;
        }
        let ranges = (0..self.len).flat_map(|at| self.at(at).range_requests.iter());
        self.oldest_request_at = ranges.filter_map(|range| range.sent_at).min();
    }

    /// The oldest READ misses responses and has not requested them.
    fn is_waiting(&self, executed: Psn) -> bool {
        self.len > 0 && {
            let front = self.at(0);
            front.range_requests.is_empty() && !front.is_complete() && front.psn.is_before(executed)
        }
    }

    /// When [`handle_timeout`](ReadTracker::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self, executed: Psn, timeout: Duration) -> Option<Time> {
        let timeout = self.backed_off(timeout);
        let idle = self.is_waiting(executed).then_some(self.active_at);
        [self.oldest_request_at, idle].into_iter().flatten().min().map(|since| since + timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    const TIMEOUT: Duration = Duration::from_micros(50);

    fn range_requests(tracker: &mut ReadTracker, now: Time) -> Vec<(u32, u32, u32)> {
        let mut all = Vec::new();
        while let Some((psn, range)) = tracker.next_range_request() {
            tracker.range_request_sent(now);
            all.push((psn.get(), range.first, range.end));
        }
        all
    }

    fn arrive(
        tracker: &mut ReadTracker,
        psn: u32,
        indexes: impl IntoIterator<Item = u32>,
        now: Time,
    ) {
        for index in indexes {
            assert_eq!(tracker.classify(Psn::new(psn), index), Verdict::New);
            tracker.accept(Psn::new(psn), index, now);
        }
    }

    #[test]
    fn more_reads_than_there_were_places_for_keep_their_order() {
        for (places, begun) in [(0, 3), (1, 2), (3, 7)] {
            let mut tracker = ReadTracker::new(places);
            let mut next = 0;
            // The ring does not begin with the first slot.
            for _ in 0..places / 2 {
                tracker.begin(Psn::new(next), 2, false, at(0));
                arrive(&mut tracker, next, 0..2, at(0));
                tracker.pop_front();
                next += 1;
            }
            let all = next..next + begun;
            for psn in all.clone() {
                tracker.begin(Psn::new(psn), 2, false, at(0));
                arrive(&mut tracker, psn, 0..1, at(1));
            }
            assert_eq!(tracker.missing(), u64::from(begun));
            for psn in all {
                assert!(!tracker.is_front_complete());
                assert_eq!(tracker.classify(Psn::new(psn), 0), Verdict::Duplicate);
                arrive(&mut tracker, psn, 1..2, at(2));
                assert!(tracker.is_front_complete());
                tracker.pop_front();
            }
            assert!(tracker.is_empty());
        }
    }

    #[test]
    fn a_hole_is_asked_for_once_three_later_responses_have_come() {
        let mut tracker = ReadTracker::new(4);
        tracker.begin(Psn::new(7), 100, false, at(0));
        arrive(&mut tracker, 7, (0..10).chain(14..16), at(1));
        assert_eq!(range_requests(&mut tracker, at(1)), []);
        arrive(&mut tracker, 7, 16..17, at(2));
        assert_eq!(range_requests(&mut tracker, at(2)), [(7, 10, 14)]);
        arrive(&mut tracker, 7, 17..40, at(3));
        assert_eq!(range_requests(&mut tracker, at(3)), []);
        // Part of it arrives; the rest is requested again after the timeout.
        arrive(&mut tracker, 7, [10, 13], at(4));
        assert_eq!(tracker.poll_timeout(Psn::new(8), TIMEOUT), Some(at(52)));
        tracker.handle_timeout(Psn::new(8), TIMEOUT, at(52));
        assert_eq!(range_requests(&mut tracker, at(52)), [(7, 11, 14)]);
        assert_eq!(tracker.classify(Psn::new(7), 13), Verdict::Duplicate);
        assert_eq!(tracker.classify(Psn::new(7), 100), Verdict::Unknown);
        assert_eq!(tracker.classify(Psn::new(8), 1), Verdict::Unknown);
        arrive(&mut tracker, 7, (11..13).chain(40..100), at(60));
        assert!(tracker.is_front_complete());
    }

    #[test]
    fn responses_of_a_later_read_prove_that_the_end_of_an_earlier_one_was_lost() {
        let mut tracker = ReadTracker::new(2);
        tracker.begin(Psn::new(0xff_ffff), 5, false, at(0));
        tracker.begin(Psn::new(0), 1, false, at(0));
        arrive(&mut tracker, 0xff_ffff, 0..3, at(1));
        assert_eq!(range_requests(&mut tracker, at(1)), []);
        arrive(&mut tracker, 0, 0..1, at(2));
        assert_eq!(range_requests(&mut tracker, at(2)), [(0xff_ffff, 3, 5)]);
        assert!(!tracker.is_front_complete());
        arrive(&mut tracker, 0xff_ffff, 3..5, at(3));
        assert!(tracker.is_front_complete());
        tracker.pop_front();
        assert!(tracker.is_front_complete());
    }

    #[test]
    fn a_standstill_is_noticed_once_the_read_was_executed_and_patience_doubles() {
        let mut tracker = ReadTracker::new(1);
        tracker.begin(Psn::new(3), 8, false, at(10));
        assert_eq!(tracker.poll_timeout(Psn::new(3), TIMEOUT), None);
        assert_eq!(tracker.poll_timeout(Psn::new(4), TIMEOUT), Some(at(60)));
        tracker.handle_timeout(Psn::new(4), TIMEOUT, at(59));
        assert_eq!(range_requests(&mut tracker, at(59)), []);
        tracker.handle_timeout(Psn::new(4), TIMEOUT, at(60));
        assert_eq!(range_requests(&mut tracker, at(60)), [(3, 0, 8)]);
        assert_eq!(tracker.poll_timeout(Psn::new(4), TIMEOUT), Some(at(160)));
        tracker.handle_timeout(Psn::new(4), TIMEOUT, at(160));
        assert_eq!(range_requests(&mut tracker, at(160)), [(3, 0, 8)]);
        assert_eq!(tracker.poll_timeout(Psn::new(4), TIMEOUT), Some(at(360)));
        arrive(&mut tracker, 3, 0..1, at(170));
        tracker.handle_timeout(Psn::new(4), TIMEOUT, at(210));
        assert_eq!(range_requests(&mut tracker, at(210)), [(3, 1, 8)]);
    }

    #[test]
    fn a_stream_that_ran_too_far_ahead_is_asked_for_from_there() {
        let mut tracker = ReadTracker::new(1);
        let total = 1 << 23;
        tracker.begin(Psn::new(0), total, false, at(0));
        arrive(&mut tracker, 0, 1..WINDOW, at(1));
        assert_eq!(range_requests(&mut tracker, at(1)), [(0, 0, 1)]);
        assert_eq!(tracker.classify(Psn::new(0), WINDOW), Verdict::Beyond);
        tracker.cut(Psn::new(0));
        arrive(&mut tracker, 0, 0..1, at(2));
        assert_eq!(range_requests(&mut tracker, at(2)), [(0, WINDOW, total)]);
    }

    /// Every response is accepted exactly once under any order, duplication and loss; and as long
    /// as one is missing, it is eventually requested.
    #[test]
    fn agrees_with_a_set_of_responses() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let mut below = move |end: u32| rng.next_u32() % end;
            let reads = 1 + below(5);
            let totals: Vec<u32> = (0..reads).map(|_| 1 + below(400)).collect();
            let mut tracker = ReadTracker::new(reads);
            let mut missing: Vec<Vec<bool>> = Vec::new();
            let mut stream = Vec::new();
            for (read, &total) in totals.iter().enumerate() {
                tracker.begin(Psn::new(read as u32), total, false, at(0));
                missing.push(alloc::vec![true; total as usize]);
                stream.extend((0..total).map(|index| (read as u32, index)));
            }
            let mut now = 0;
            let mut rounds = 0;
            while !stream.is_empty() || missing.iter().flatten().any(|&is_missing| is_missing) {
                for (read, index) in core::mem::take(&mut stream) {
                    now += 1;
                    let copies = [1, 1, 1, 1, 1, 1, 1, 0, 1, 2][below(10) as usize];
                    for _ in 0..copies {
                        let slot = &mut missing[read as usize][index as usize];
                        let wanted = if *slot { Verdict::New } else { Verdict::Duplicate };
                        let psn = Psn::new(read);
                        assert_eq!(tracker.classify(psn, index), wanted, "seed {seed}");
                        if *slot {
                            tracker.accept(psn, index, at(now));
                            *slot = false;
                        }
                    }
                }
                now += 60;
                tracker.handle_timeout(Psn::new(reads), TIMEOUT, at(now));
                for (read, first, end) in range_requests(&mut tracker, at(now)) {
                    stream.extend((first..end).map(|index| (read, index)));
                }
                while tracker.is_front_complete() {
                    tracker.pop_front();
                    let done = reads as usize - tracker.len() as usize - 1;
                    assert!(missing[done].iter().all(|is_missing| !is_missing), "seed {seed}");
                }
                rounds += 1;
                assert!(rounds < 1_000, "seed {seed}: nothing is asked for any more");
            }
            assert!(tracker.is_empty() && tracker.missing() == 0, "seed {seed}");
        }
    }
}
