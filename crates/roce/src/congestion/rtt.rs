//! Round-trip times: measured, smoothed and counted.
//!
//! [`RttEstimator`] is the usual pair of a smoothed mean and a smoothed deviation (RFC 6298), in
//! integers. [`RttHistogram`] counts the samples by powers of two for people to look at.
//! [`RttProbe`] picks the samples where only cumulative acknowledgements exist: it times one packet
//! at a time, or a few, and never a retransmitted one, as the acknowledgement would be ambiguous
//! (Karn's rule).
//!
//! Samples include the peer's acknowledgement delay: only packets that request an acknowledgement
//! are timed.

use arrayvec::ArrayVec;

use crate::time::{Duration, Time};
use crate::wire::Psn;

/// Buckets of an [`RttHistogram`].
pub const RTT_BUCKETS: usize = 24;

/// Round-trip times that are so many times as long as usual are not those of the path, but below
/// [`LEAST_IMPLAUSIBLE`] they may be.
const MOST_TIMES: u64 = 16;
const LEAST_IMPLAUSIBLE: Duration = Duration::from_millis(100);

/// As much of a round-trip time as the path may have taken, where `usual` is the smoothed one. One
/// packet that went astray, or a process that was stopped, can make a sample a minute long, and
/// what is derived from it would last for hours. Paths that have become longer are believed within
/// a few samples.
pub fn plausible(rtt: Duration, usual: Duration) -> Duration {
    rtt.min((usual * MOST_TIMES).max(LEAST_IMPLAUSIBLE))
}

/// Smoothed round-trip time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RttEstimator {
    /// Nanoseconds times 8; 0 before the first sample.
    smoothed_x8: u64,
    /// Nanoseconds times 4.
    deviation_x4: u64,
    min_rtt: Option<Duration>,
}

impl RttEstimator {
    /// Takes a sample.
    pub fn sample(&mut self, rtt: Duration) {
        let rtt = self.smoothed().map_or(rtt, |usual| plausible(rtt, usual));
        let ns = rtt.as_nanos();
        if self.min_rtt.is_none() {
            self.smoothed_x8 = ns.saturating_mul(8);
            self.deviation_x4 = ns.saturating_mul(2);
        } else {
            let off = ns.abs_diff(self.smoothed_x8 / 8);
            self.deviation_x4 = self.deviation_x4 - self.deviation_x4 / 4 + off;
            self.smoothed_x8 = self.smoothed_x8 - self.smoothed_x8 / 8 + ns;
        }
        self.min_rtt = Some(self.min_rtt.map_or(rtt, |min_rtt| min_rtt.min(rtt)));
    }

    /// The smoothed round-trip time; `None` before the first sample.
    pub fn smoothed(&self) -> Option<Duration> {
        self.min_rtt.map(|_| Duration::from_nanos(self.smoothed_x8 / 8))
    }

    /// The smallest sample.
    pub fn min_rtt(&self) -> Option<Duration> {
        self.min_rtt
    }

    /// How long to wait for a response before it counts as lost: mean plus four deviations, at
    /// least `floor`.
    pub fn timeout(&self, floor: Duration) -> Option<Duration> {
        let smoothed = self.smoothed()?;
        Some((smoothed + Duration::from_nanos(self.deviation_x4)).max(floor))
    }
}

/// Samples by size: bucket 0 below 1 us, bucket `n` from 2^(n-1) us to below 2^n us, the last one
/// everything longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RttHistogram {
    counts: [u64; RTT_BUCKETS],
}

impl RttHistogram {
    /// Counts a sample.
    pub fn sample(&mut self, rtt: Duration) {
        let micros = rtt.as_nanos() / 1_000;
        let bucket = (u64::BITS - micros.leading_zeros()) as usize;
        self.counts[bucket.min(RTT_BUCKETS - 1)] += 1;
    }

    /// Samples per bucket.
    pub fn counts(&self) -> &[u64; RTT_BUCKETS] {
        &self.counts
    }

    /// The first duration that is too long for `bucket`.
    pub const fn upper_bound(bucket: usize) -> Duration {
        Duration::from_micros(1 << bucket)
    }

    /// Number of samples.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The upper bound of the bucket that holds this quantile: `per_mille` of all samples do not
    /// exceed it.
    pub fn quantile(&self, per_mille: u64) -> Option<Duration> {
        let wanted = (self.total() * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        let reaches = |&count: &u64| {
            seen += count;
            seen >= wanted
        };
        self.counts.iter().position(reaches).map(RttHistogram::upper_bound)
    }
}

/// Times some of the packets in flight, spread over a round trip.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RttProbe {
    /// Oldest first.
    timed: ArrayVec<(Psn, Time), { RttProbe::MOST }>,
    /// The last sample.
    rtt: Duration,
}

impl RttProbe {
    /// Most packets that can be timed at a time.
    pub const MOST: usize = 8;

    /// A packet that requests an acknowledgement was sent for the first time. It is timed unless
    /// `most` packets are, or the last one was sent too short a time before.
    pub fn sent(&mut self, psn: Psn, now: Time, most: usize) {
        let most = most.clamp(1, RttProbe::MOST);
        let spacing = self.rtt.as_nanos() / most as u64;
        let is_due = |last: &(Psn, Time)| now.since(last.1).as_nanos() >= spacing;
        if self.timed.len() < most && self.timed.last().is_none_or(is_due) {
            self.timed.push((psn, now));
        }
    }

    /// Packets are being retransmitted: acknowledgements are ambiguous from now on.
    pub fn cancel(&mut self) {
        self.timed.clear();
    }

    /// Everything before `una` is acknowledged. Returns the sample of the latest timed packet among
    /// that.
    pub fn answered(&mut self, una: Psn, now: Time) -> Option<Duration> {
        let done = self.timed.iter().take_while(|(psn, _)| psn.is_before(una)).count();
        let (_, sent_at) = self.timed.drain(..done).last()?;
        self.rtt = now - sent_at;
        Some(self.rtt)
    }
}

/// All measurements of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RttMeter {
    /// Smoothed.
    pub estimator: RttEstimator,
    /// Counted.
    pub histogram: RttHistogram,
}

impl RttMeter {
    pub(crate) fn sample(&mut self, rtt: Duration) {
        self.estimator.sample(rtt);
        self.histogram.sample(rtt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn smoothing_follows_rfc_6298() {
        let mut rtt = RttEstimator::default();
        assert_eq!((rtt.smoothed(), rtt.timeout(us(1))), (None, None));
        rtt.sample(us(80));
        assert_eq!(rtt.smoothed(), Some(us(80)));
        // The first deviation is half the sample: 80 + 4 * 40.
        assert_eq!(rtt.timeout(us(1)), Some(us(240)));
        rtt.sample(us(160));
        // 7/8 * 80 + 1/8 * 160 = 90; deviation 3/4 * 40 + 1/4 * 80 = 50.
        assert_eq!(rtt.smoothed(), Some(us(90)));
        assert_eq!(rtt.timeout(us(1)), Some(us(290)));
        assert_eq!(rtt.timeout(us(500)), Some(us(500)));
        assert_eq!(rtt.min_rtt(), Some(us(80)));
    }

    #[test]
    fn a_steady_path_converges() {
        let mut rtt = RttEstimator::default();
        rtt.sample(us(1_000));
        for _ in 0..200 {
            rtt.sample(us(20));
        }
        let smoothed = rtt.smoothed().unwrap();
        assert!(smoothed >= us(20) && smoothed < Duration::from_nanos(20_100), "{smoothed}");
        assert!(rtt.timeout(Duration::ZERO).unwrap() < Duration::from_nanos(20_300));
    }

    #[test]
    fn extreme_samples_do_not_overflow() {
        let mut rtt = RttEstimator::default();
        for ns in [u64::MAX / 16, 0, u64::MAX / 16, 1] {
            rtt.sample(Duration::from_nanos(ns));
        }
        assert!(rtt.timeout(Duration::ZERO).is_some());
    }

    #[test]
    fn buckets_are_powers_of_two() {
        let mut histogram = RttHistogram::default();
        assert_eq!(histogram.quantile(500), None);
        for ns in [0, 999, 1_000, 1_999, 2_000, 3_999, 4_000, u64::MAX] {
            histogram.sample(Duration::from_nanos(ns));
        }
        assert_eq!(histogram.counts()[..4], [2, 2, 2, 1]);
        assert_eq!(histogram.counts()[RTT_BUCKETS - 1], 1);
        assert_eq!(histogram.total(), 8);
        assert_eq!(histogram.quantile(250), Some(us(1)));
        assert_eq!(histogram.quantile(500), Some(us(2)));
        assert_eq!(histogram.quantile(0), Some(us(1)));
    }

    #[test]
    fn a_probe_times_one_packet_and_never_a_repeated_one() {
        let at = |micros| Time::ZERO + us(micros);
        let mut probe = RttProbe::default();
        probe.sent(Psn::new(0xff_ffff), at(10), 1);
        probe.sent(Psn::new(0), at(12), 1);
        assert_eq!(probe.answered(Psn::new(0xff_ffff), at(20)), None);
        assert_eq!(probe.answered(Psn::new(2), at(31)), Some(us(21)));
        assert_eq!(probe.answered(Psn::new(3), at(32)), None);
        probe.sent(Psn::new(3), at(40), 1);
        probe.cancel();
        assert_eq!(probe.answered(Psn::new(4), at(50)), None);
    }

    #[test]
    fn several_packets_are_timed_over_a_round_trip() {
        let at = |micros| Time::ZERO + us(micros);
        let mut probe = RttProbe::default();
        probe.sent(Psn::new(0), at(0), 4);
        assert_eq!(probe.answered(Psn::new(1), at(40)), Some(us(40)));
        // One per 10 us: packets 1, 11 and 21 of one per microsecond, and no fifth.
        (1..60_u32).for_each(|psn| probe.sent(Psn::new(psn), at(40 + u64::from(psn)), 4));
        assert_eq!(probe.timed.len(), 4);
        assert_eq!(probe.answered(Psn::new(11), at(80)), Some(us(39)));
        // The latest of two.
        assert_eq!(probe.answered(Psn::new(22), at(100)), Some(us(39)));
        assert_eq!(probe.answered(Psn::new(31), at(100)), None);
        assert_eq!(probe.answered(Psn::new(60), at(111)), Some(us(40)));
    }
}
