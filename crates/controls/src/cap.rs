//! A cap on the rate of a sender, by the watermarks of switch buffers.
//!
//! A [`Cap`] limits the rate of a sender by [`Watermark`]s. It needs no rate of the sender's own,
//! since it starts from what the path delivered between two reports:
//!
//! - A queue above [`HIGH`] cuts the cap below the delivered rate, so far that the excess drains
//!   within two intervals, and by half at most. Where packets were lost, half of the rate before
//!   counts as delivered, if that is more.
//! - When it has drained, the cap returns to seven eighths of what was delivered. Intervals that
//!   began before then say nothing about the cut, and are not judged.
//! - A queue below [`LOW`] raises it by 1/1024 of the port's rate; after eight times, by twice as
//!   much each further time.
//! - Without a report for eight intervals, or 100 ms, but for one and a half intervals at least, it
//!   ends. It does so, too, where packets are marked: a mark is the better signal.
//!
//! So a sender without other signals follows the queue at the pace of the collector. Nothing that a
//! report says can stop a sender: the cap has a floor, a cut a limit, and a report that is old,
//! repeated or impossible is refused.

use roce::congestion::Watermark;
use roce::congestion::watermark::MAX_AGE;
use roce::{Duration, Time};

/// Queues that take longer than this to leave are cut: that is where switches mark most packets.
pub(crate) const HIGH: Duration = Duration::from_micros(100);

/// With queues that take less than this, more may be sent: that is where switches begin to mark.
pub(crate) const LOW: Duration = Duration::from_micros(32);

/// Intervals without a report until the cap ends, at most [`MAX_AGE`] in all.
const LIFETIME: u64 = 8;

/// But not before the next report is late by half an interval: no cap outlasts its last report by
/// more than 150 ms.
const LEAST_LIFETIME_HALVES: u64 = 3;

/// What a raise adds is a part of the port's rate; the floor of the cap is another.
const RAISE_PART: u64 = 1_024;
const FLOOR_PART: u64 = 4_096;

/// No cap is lower, whatever rate a report claims: the minimum rate of ConnectX NICs under DCQCN.
const LEAST_BPS: u64 = 1_000_000;

/// So many raises in a row are alike; from then on each is twice the one before.
const EVEN_RAISES: u32 = 4;

/// Most doublings of a raise: from there on it is the whole rate.
const MAX_DOUBLINGS: u32 = 10;

/// A limit to the rate of a sender; see the module's text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cap {
    rate_bps: Option<u64>,
    /// After a cut: when the queue will have drained, and the rate to which the cap then returns.
    drains: Option<(Time, u64)>,
    /// Bytes acknowledged since the last report, as if all packets were full.
    delivered: u64,
    /// Bytes sent since then, and what they would be if all packets were full.
    sent: [u64; 2],
    /// The same of the last interval in which something was sent: how full packets are.
    fill: Option<[u64; 2]>,
    /// Packets were lost since then: more got through than was acknowledged.
    has_lost: bool,
    since: Option<Time>,
    /// The end of the last interval that was reported.
    heard_until: Time,
    /// When a notification came last.
    notified_at: Option<Time>,
    /// Intervals that began before this moment say nothing about the cap.
    judged_from: Time,
    expires_at: Option<Time>,
    /// Raises, one after the other.
    raises: u32,
}

impl Cap {
    /// The limit in bits per second, if there is one.
    pub(crate) fn rate_bps(&self) -> Option<u64> {
        self.rate_bps
    }

    /// The lower of a rate and the cap.
    pub(crate) fn limit(&self, rate_bps: Option<u64>) -> Option<u64> {
        [rate_bps, self.rate_bps].into_iter().flatten().min()
    }

    /// A packet left with so many bytes; a full one has `full`. Where no rate limits the sender,
    /// nobody counts: its packets are taken for full ones until there is a cap.
    #[inline]
    pub(crate) fn sent(&mut self, bytes: u64, full: u64) {
        self.sent = [self.sent[0].saturating_add(bytes), self.sent[1].saturating_add(full)];
    }

    /// So many bytes have arrived if all packets were full.
    #[inline]
    pub(crate) fn acknowledged(&mut self, bytes: u64) {
        self.delivered = self.delivered.saturating_add(bytes);
    }

    /// Packets were marked.
    pub(crate) fn notified(&mut self, now: Time) {
        self.notified_at = Some(now);
    }

    /// Packets were lost.
    #[inline]
    pub(crate) fn lost(&mut self) {
        self.has_lost = true;
    }

    /// When [`handle_timeout`](Cap::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        [self.expires_at, self.drains.map(|(at, _)| at)].into_iter().flatten().min()
    }

    /// The queue that led to a cut has drained, or nothing has been reported for long.
    pub(crate) fn handle_timeout(&mut self, now: Time) {
        if let Some((_, rate)) = self.drains.take_if(|(at, _)| *at <= now) {
            self.rate_bps = Some(rate);
        }
        if self.expires_at.is_some_and(|at| at <= now) {
            self.end();
        }
    }

    /// No limit, until the next cut.
    fn end(&mut self) {
        let Cap { heard_until, notified_at, .. } = *self;
        *self = Cap { heard_until, notified_at, ..Cap::default() };
    }

    /// A report. One that is implausible, or of an interval that was reported before, changes
    /// nothing.
    pub(crate) fn hear(&mut self, now: Time, watermark: &Watermark) {
        self.handle_timeout(now);
        if watermark.check(now).is_err() || watermark.until <= self.heard_until {
            return;
        }
        self.heard_until = watermark.until;
        if self.notified_at.is_some_and(|at| now.since(at) <= MAX_AGE) {
            return self.end();
        }
        self.expires_at = Some(now + lifetime(watermark));
        let delivered = self.take_delivered(now);
        let has_lost = core::mem::take(&mut self.has_lost);
        if watermark.from < self.judged_from {
            return;
        }
        let queueing = watermark.queueing();
        match delivered {
            Some(delivered) if queueing > HIGH => {
                // What was retransmitted in vain took its part of the link.
                let before = self.rate_bps.unwrap_or(watermark.rate_bps.get());
                let least = if has_lost { before / 2 } else { 0 };
                self.cut(now, watermark, delivered.max(least));
            }
            _ if queueing < LOW => self.raise(watermark.rate_bps.get()),
            _ => self.raises = 0,
        }
    }

    /// Bits per second since the last report; `None` if that is not known, or was nothing: a READ's
    /// responses are not acknowledged, and who sends nothing cannot send less.
    fn take_delivered(&mut self, now: Time) -> Option<u64> {
        let sent = core::mem::take(&mut self.sent);
        // What was so before holds only where each packet is counted.
        let before = self.fill.filter(|_| self.rate_bps.is_some());
        self.fill = Some(sent).filter(|&[_, full]| full > 0).or(before);
        let [bytes, full] = self.fill.unwrap_or([1, 1]).map(u128::from);
        let delivered = u128::from(core::mem::take(&mut self.delivered)) * bytes / full;
        let bits = delivered.saturating_mul(8_000_000_000);
        let since = self.since.replace(now)?;
        let rate = bits / u128::from(now.since(since).as_nanos().max(1));
        u64::try_from(rate).ok().filter(|&rate| rate > 0)
    }

    fn cut(&mut self, now: Time, watermark: &Watermark, delivered: u64) {
        let delivered = delivered.min(self.rate_bps.unwrap_or(u64::MAX));
        let excess = watermark.queueing().as_nanos().saturating_sub(LOW.as_nanos());
        let span = 2 * watermark.interval().as_nanos().max(1);
        let part = u128::from(delivered) * u128::from(excess.min(span / 2)) / u128::from(span);
        let floor = (watermark.rate_bps.get() / FLOOR_PART).max(LEAST_BPS);
        self.rate_bps = Some((delivered - part as u64).max(floor));
        let drained_at = now + Duration::from_nanos(span.max(2 * excess));
        self.drains = Some((drained_at, (delivered / 8 * 7).max(floor)));
        (self.judged_from, self.raises) = (drained_at, 0);
    }

    fn raise(&mut self, line: u64) {
        let doublings = self.raises.saturating_sub(EVEN_RAISES);
        let raised = |rate: u64| rate.saturating_add((line / RAISE_PART).max(1) << doublings);
        self.rate_bps = self.rate_bps.map(raised).filter(|&rate| rate < line);
        self.raises = (self.raises + 1).min(EVEN_RAISES + MAX_DOUBLINGS);
    }
}

/// How long a cap lasts after this report.
fn lifetime(watermark: &Watermark) -> Duration {
    let interval = watermark.interval();
    let least = Duration::from_nanos(interval.as_nanos() * LEAST_LIFETIME_HALVES / 2);
    (interval * LIFETIME).min(MAX_AGE).max(least)
}

#[cfg(test)]
mod tests {
    use core::num::NonZeroU64;
    use proptest::prelude::*;
    use roce::congestion::watermark::WatermarkError;
    use std::vec::Vec;

    use super::*;

    const LINE: u64 = 25_000_000_000;
    const MS: u64 = 1_000_000;

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * MS)
    }

    /// The millisecond that ended at `ms`, with a queue that takes `us` to leave.
    fn mark(ms: u64, us: u64) -> Watermark {
        let rate_bps = NonZeroU64::new(LINE).unwrap();
        let queue_bytes = LINE / 8 * us / 1_000_000;
        Watermark { from: at(ms - 1), until: at(ms), queue_bytes, rate_bps }
    }

    /// A cap that hears, after a millisecond in which `mbit` Mbit/s arrived.
    fn hear(cap: &mut Cap, mbit: u64, watermark: &Watermark) -> Option<u64> {
        cap.acknowledged(mbit * 1_000_000 / 8 / 1_000);
        cap.hear(watermark.until, watermark);
        cap.rate_bps().map(|rate| rate / 1_000_000)
    }

    #[test]
    fn a_long_queue_cuts_what_was_delivered_until_it_has_left() {
        let mut cap = Cap::default();
        assert_eq!(
            hear(&mut cap, 1_000, &mark(1, 500)),
            None,
            "nothing is known of the time before"
        );
        // 232 us too many leave within two milliseconds if a ninth less comes.
        assert_eq!(hear(&mut cap, 1_000, &mark(2, 264)), Some(884));
        assert_eq!(cap.poll_timeout(), Some(at(4)));
        assert_eq!(hear(&mut cap, 884, &mark(3, 10_000)), Some(884), "it still drains");
        cap.handle_timeout(at(4));
        assert_eq!(cap.rate_bps(), Some(875_000_000), "seven eighths of what was delivered");
        // The first interval that began afterwards; a queue of 10 ms takes longer than two
        // intervals even at half the rate.
        assert_eq!(hear(&mut cap, 884, &mark(4, 10_000)), Some(875));
        assert_eq!(hear(&mut cap, 800, &mark(5, 10_000)), Some(400));
        assert_eq!(cap.drains.map(|(at, _)| at.as_nanos()), Some(5 * MS + 2 * (10 * MS - 32_000)));
    }

    #[test]
    fn a_short_queue_raises_the_cap_until_it_ends() {
        let mut cap = Cap { rate_bps: Some(800_000_000), since: Some(at(0)), ..Cap::default() };
        assert_eq!(hear(&mut cap, 800, &mark(1, 90)), Some(800), "neither long nor short");
        // Raises of 24 Mbit/s, then of 48, 97 …, until the port's whole rate is allowed.
        let raised: Vec<_> = (2..16).map(|ms| hear(&mut cap, 100, &mark(ms, 0))).collect();
        let first = [824, 848, 873, 897, 922, 970, 1_068].map(Some);
        assert_eq!(raised[..7], first);
        assert_eq!(raised.last(), Some(&None));
    }

    #[test]
    fn short_packets_count_with_their_bytes() {
        let mut cap = Cap { since: Some(at(0)), ..Cap::default() };
        // 100 packets of 132 bytes where full ones have 1,068, in a millisecond: 105.6 Mbit/s.
        let hear_short = |cap: &mut Cap, ms| {
            (0..100).for_each(|_| cap.sent(132, 1_068));
            cap.acknowledged(100 * 1_068);
            cap.hear(at(ms), &mark(ms, 10_000));
            cap.rate_bps()
        };
        assert_eq!(hear_short(&mut cap, 1), Some(52_800_000));
        // With a cap, what is acknowledged later is like what was sent before; without one, it may
        // be anything.
        let hear_later = |cap: &mut Cap, ms| {
            cap.judged_from = Time::ZERO;
            cap.acknowledged(50 * 1_068);
            cap.hear(at(ms), &mark(ms, 10_000));
            cap.rate_bps()
        };
        assert_eq!(hear_later(&mut cap, 2), Some(26_400_000));
        cap.end();
        assert_eq!(hear_later(&mut cap, 3), None);
        assert_eq!(hear_later(&mut cap, 4), Some(50 * 1_068 * 4_000));
    }

    #[test]
    fn the_slowest_collector_is_heard_as_well() {
        let mut cap = Cap::default();
        let rates: Vec<_> = (1..7)
            .map(|report| {
                let until = 100 * report;
                cap.acknowledged(125_000_000);
                let watermark = Watermark { from: at(until - 100), ..mark(until, 10_000) };
                // The timer of that moment comes first.
                cap.handle_timeout(at(until));
                cap.hear(at(until), &watermark);
                cap.rate_bps().map(|rate| rate / 1_000_000)
            })
            .collect();
        // 10 Gbit/s were delivered, of which a twentieth drains 10 ms within 200.
        assert_eq!(rates, [None, Some(9_501), Some(9_501), Some(8_750), Some(8_313), Some(8_313)]);
    }

    #[test]
    fn marks_are_the_better_signal() {
        let mut cap = Cap { since: Some(at(0)), ..Cap::default() };
        assert!(hear(&mut cap, 1_000, &mark(1, 500)).is_some());
        cap.notified(at(2));
        assert_eq!(hear(&mut cap, 1_000, &mark(2, 500)), None);
        assert_eq!((hear(&mut cap, 1_000, &mark(102, 500)), cap.poll_timeout()), (None, None));
        // None for 100 ms: perhaps the way is another one, whose switches do not mark.
        hear(&mut cap, 1_000, &mark(103, 500));
        assert!(hear(&mut cap, 1_000, &mark(104, 500)).is_some());
    }

    #[test]
    fn where_packets_are_lost_more_was_delivered_than_acknowledged() {
        let mut cap = Cap { since: Some(at(0)), ..Cap::default() };
        cap.lost();
        assert_eq!(hear(&mut cap, 100, &mark(1, 1_032)), Some(6_250));
        let mut cap = Cap { since: Some(at(0)), ..Cap::default() };
        assert_eq!(hear(&mut cap, 100, &mark(1, 1_032)), Some(50));
    }

    #[test]
    fn a_cap_ends_without_reports() {
        let mut cap = Cap::default();
        hear(&mut cap, 1_000, &mark(1, 0));
        assert!(hear(&mut cap, 1_000, &mark(2, 500)).is_some());
        let expires = cap.expires_at.unwrap();
        assert_eq!(expires, at(10));
        cap.handle_timeout(Time::from_nanos(expires.as_nanos() - 1));
        assert!(cap.rate_bps().is_some());
        cap.handle_timeout(expires);
        assert_eq!((cap.rate_bps(), cap.expires_at), (None, None));
        // What was heard before then is not heard again.
        cap.acknowledged(125_000);
        cap.hear(at(11), &mark(2, 500));
        assert_eq!(cap.expires_at, None);
    }

    #[test]
    fn reports_of_times_that_cannot_be_are_refused() {
        let (right, now) = (mark(50, 500), at(50));
        assert_eq!(right.check(now), Ok(()));
        assert_eq!(right.check(at(49)), Err(WatermarkError::Future));
        assert_eq!(right.check(at(151)), Err(WatermarkError::Stale(Duration::from_millis(101))));
        assert_eq!(Watermark { from: at(50), ..right }.check(now), Err(WatermarkError::Empty));
        let mut cap = Cap::default();
        cap.hear(at(49), &right);
        cap.hear(at(151), &right);
        assert_eq!((cap.expires_at, cap.heard_until), (None, Time::ZERO));
    }

    #[test]
    fn who_sends_nothing_is_not_cut() {
        let mut cap = Cap::default();
        for ms in 1..9 {
            assert_eq!(hear(&mut cap, 0, &mark(ms, 10_000)), None);
        }
    }

    fn watermark() -> impl Strategy<Value = Watermark> {
        let times = (0..200 * MS, prop_oneof![0..2 * MS, any::<u64>()]);
        (times, any::<u64>(), 1..=u64::MAX).prop_map(|((from, span), queue_bytes, rate)| {
            Watermark {
                from: Time::from_nanos(from),
                until: Time::from_nanos(from.saturating_add(span)),
                queue_bytes,
                rate_bps: NonZeroU64::new(rate).unwrap(),
            }
        })
    }

    proptest! {
        /// Whatever is reported, a cap is not below its floor, a cut not below half of what was
        /// delivered, and all ends.
        #[test]
        fn no_report_stops_a_sender(
            reports in proptest::collection::vec((watermark(), 0..10 * MS, 0..1_000_000_u64), 1..50),
        ) {
            let (mut cap, mut now) = (Cap::default(), Time::ZERO);
            for (watermark, later, bytes) in reports {
                let (before, since) = (cap.rate_bps(), cap.since);
                now += Duration::from_nanos(later);
                cap.acknowledged(bytes);
                let delivered = cap.delivered;
                cap.hear(now, &watermark);
                prop_assert!(cap.rate_bps().is_none_or(|rate| rate >= LEAST_BPS));
                if let (Some(rate), Some(since)) = (cap.rate_bps(), since)
                    && before.is_none_or(|before| rate < before)
                {
                    let span = u128::from(now.since(since).as_nanos().max(1));
                    let half = u128::from(delivered) * 4_000_000_000 / span;
                    let half = half.min(u128::from(before.unwrap_or(u64::MAX) / 2));
                    prop_assert!(u128::from(rate) + 1 >= half, "{rate} {half}");
                }
                prop_assert!(cap.expires_at.is_none_or(|at| at <= now + Duration::from_millis(150)));
            }
            cap.handle_timeout(now + Duration::from_millis(150));
            prop_assert_eq!(cap.rate_bps(), None);
        }
    }
}
