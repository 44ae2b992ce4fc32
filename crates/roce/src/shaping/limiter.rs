//! The rate limit of a DSCP: the generic cell rate algorithm.
//!
//! A bucket is one number: the time at which it will be full. Sending adds the time that the bytes
//! take at the rate; a packet is admitted while that time is at most the bucket's depth ahead. All
//! senders use the same bucket, so their sum keeps the rate however many there are and whoever of
//! them has something to send; a sender that ends leaves nothing behind but that time. A bucket
//! that is further ahead than a burst can have made it is not believed.

use super::word::Word;
use crate::time::{Duration, Time};

/// What a bucket holds at least when it is full: the longest that a sender who slept too long can
/// make up for.
pub const DEPTH: Duration = Duration::from_millis(2);

/// The most that a job's burst makes a bucket hold: longer ones delay the guarantees of others.
pub const MOST_DEPTH: Duration = Duration::from_millis(10);

/// And never less than a segmented send.
const LEAST_DEPTH_BYTES: u64 = 64 << 10;

/// What senders can have sent beyond an empty bucket: bursts of many queue pairs, admitted at one
/// time.
const MOST_DEBT_BYTES: u64 = 1 << 20;

/// A packet as it is admitted, before it is known: the largest.
const PACKET_BYTES: u64 = 4096 + 100;

/// What is set for a DSCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Bits per second, Ethernet headers included; 0 for no limit.
    pub bps: u64,
    /// What may leave at once: the bucket holds that, at least [`DEPTH`] of the rate and at most
    /// [`MOST_DEPTH`].
    pub burst_bytes: u64,
}

impl RateLimit {
    /// So many bits per second, with the least bucket.
    pub fn of(bps: u64) -> RateLimit {
        RateLimit { bps, burst_bytes: 0 }
    }

    /// Its limiter, if there is a limit.
    pub fn limiter(self) -> Option<Limiter> {
        let RateLimit { bps, burst_bytes } = self;
        (bps > 0).then(|| {
            let least_ns = cost_ns(LEAST_DEPTH_BYTES, bps).max(DEPTH.as_nanos());
            let depth_ns = least_ns.max(cost_ns(burst_bytes, bps).min(MOST_DEPTH.as_nanos()));
            Limiter { bps, depth_ns, batch_ns: depth_ns.div_ceil(2) }
        })
    }
}

/// A rate and the depth of its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limiter {
    bps: u64,
    depth_ns: u64,
    /// What a sender that was refused waits for; at least a packet.
    batch_ns: u64,
}

impl Limiter {
    /// A bucket that holds exactly so many bytes, or one packet: a shallower one would admit none.
    /// A sender that was refused waits for one packet, as a NIC does. [`RateLimit::limiter`] is for
    /// software, which may sleep too long and sends in segments.
    pub fn exact(bps: u64, burst_bytes: u64) -> Limiter {
        let bps = bps.max(1);
        let depth_ns = cost_ns(burst_bytes.max(PACKET_BYTES), bps);
        Limiter { bps, depth_ns, batch_ns: cost_ns(PACKET_BYTES, bps) }
    }

    /// The rate in bits per second.
    pub fn bps(&self) -> u64 {
        self.bps
    }

    /// How long a packet takes that is not known yet.
    pub fn packet_ns(&self) -> u64 {
        cost_ns(PACKET_BYTES, self.bps)
    }

    /// How many of `packets` a bucket admits that is full at `full_at`, less what was granted of it
    /// and not sent yet.
    ///
    /// # Errors
    /// When it admits none: the time at which it is worth asking again. For software that is when
    /// half a bucket is there, so that packets leave in segmented sends.
    pub fn admits(
        &self,
        full_at: u64,
        granted_ns: u64,
        now: Time,
        packets: usize,
    ) -> Result<usize, Time> {
        let packet_ns = self.packet_ns();
        let taken = self.believed(full_at, now).saturating_add(granted_ns);
        let room = now.as_nanos().saturating_add(self.depth_ns).saturating_sub(taken);
        if room < packet_ns {
            let ahead = self.depth_ns.saturating_sub(self.batch_ns);
            return Err(Time::from_nanos(taken.saturating_sub(ahead)));
        }
        Ok(usize::try_from(room / packet_ns).unwrap_or(usize::MAX).min(packets))
    }

    /// So many bytes leave.
    pub fn take(&self, bucket: &impl Word, now: Time, bytes: u64) {
        let cost_ns = cost_ns(bytes, self.bps);
        bucket.update(|full_at| self.believed(full_at, now).saturating_add(cost_ns));
    }

    /// When a bucket is full: not before now, and now where it is further ahead than all bursts can
    /// have made it.
    fn believed(&self, full_at: u64, now: Time) -> u64 {
        let now = now.as_nanos();
        let debt_ns = cost_ns(MOST_DEBT_BYTES, self.bps);
        let most = now.saturating_add(self.depth_ns).saturating_add(debt_ns);
        if full_at > most { now } else { full_at.max(now) }
    }
}

/// How long bytes take at a rate.
fn cost_ns(bytes: u64, bps: u64) -> u64 {
    let ns = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(bps.max(1));
    // Decades are as good as for ever, and leave room for sums.
    u64::try_from(ns).unwrap_or(u64::MAX).clamp(1, u64::MAX / 16)
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    const GBIT: u64 = 1_000_000_000;

    #[test]
    fn a_bucket_admits_what_it_holds_and_says_when_to_ask_again() {
        // A packet takes 33,568 ns; three of them fit.
        let limiter = Limiter::exact(GBIT, 13_000);
        let bucket = Cell::new(0);
        let now = Time::from_nanos(1_000_000);
        assert_eq!(limiter.admits(bucket.get(), 0, now, 64), Ok(3));
        assert_eq!(limiter.admits(bucket.get(), limiter.packet_ns(), now, 64), Ok(2));
        limiter.take(&bucket, now, 12_588);
        let at = Time::from_nanos(1_000_000 + 12_588 * 8 + 33_568 - 104_000);
        assert_eq!(limiter.admits(bucket.get(), 0, now, 64), Err(at));
        assert_eq!(limiter.admits(bucket.get(), 0, at, 64), Ok(1));
    }

    #[test]
    fn the_shallowest_bucket_and_the_slowest_rate_admit_a_packet_in_the_end() {
        for bps in [0, 1, GBIT, u64::MAX] {
            let limiter = Limiter::exact(bps, 0);
            let bucket = Cell::new(0);
            limiter.take(&bucket, Time::ZERO, 4096);
            let now = Time::ZERO;
            let at = limiter.admits(bucket.get(), 0, now, 1).err().unwrap_or(now);
            assert_eq!(limiter.admits(bucket.get(), 0, at, 1), Ok(1), "{bps} bit/s");
        }
    }

    #[test]
    fn a_burst_makes_a_bucket_deeper_within_bounds() {
        let depth = |burst_bytes| RateLimit { bps: GBIT, burst_bytes }.limiter().unwrap().depth_ns;
        assert_eq!([0, 625_000, u64::MAX].map(depth), [2_000_000, 5_000_000, 10_000_000]);
        assert_eq!(RateLimit::default().limiter(), None);
    }

    #[test]
    fn a_bucket_that_no_burst_can_have_made_is_not_believed() {
        let limiter = RateLimit::of(GBIT).limiter().unwrap();
        let now = Time::from_nanos(5);
        assert_eq!(limiter.admits(u64::MAX, 0, now, 7), Ok(7));
        // Half a bucket beyond an empty one is a debt.
        assert!(limiter.admits(3_000_000, 0, now, 7).is_err());
    }
}
