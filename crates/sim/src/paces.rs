//! Pacing at a host by DSCP: what all queue pairs with a DSCP may send together, as a token bucket.
//!
//! A packet leaves its queue pair only when the bucket has tokens for the largest frame, and takes as many as it has bytes on
//! the wire. Whoever finds too few waits in its queue pair, so that a pace reorders nothing and fills no queue.

use alloc::vec::Vec;

use roce::{Duration, Time};

use crate::link::FRAME_BYTES;

/// Tokens are counted in bits times 10^9, so that a bit per second adds one in a nanosecond.
const BYTE: u128 = 8_000_000_000;

/// The bucket of a DSCP.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    dscp: u8,
    bps: u64,
    /// What it holds at most.
    burst: u128,
    tokens: u128,
    at: Time,
    /// Packets admitted and not sent.
    granted: u32,
    /// A packet found too few tokens.
    is_refused: bool,
}

impl Bucket {
    fn fill(&mut self, now: Time) {
        let fresh = u128::from(self.bps) * u128::from(now.since(self.at).as_nanos());
        self.tokens = (self.tokens + fresh).min(self.burst);
        self.at = now;
    }

    /// When it has tokens for a frame.
    fn ready_at(&self) -> Time {
        let missing = frame().saturating_sub(self.tokens);
        let nanos = missing.div_ceil(u128::from(self.bps.max(1)));
        self.at + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX / 2))
    }
}

/// Tokens of the largest frame.
fn frame() -> u128 {
    u128::from(FRAME_BYTES) * BYTE
}

/// The paces of a host.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    buckets: Vec<Bucket>,
}

impl Paces {
    /// Paces what has this DSCP, with so many bytes at once at most, or no longer.
    pub(crate) fn set(&mut self, now: Time, dscp: u8, pace: Option<(u64, u64)>) {
        let old = self.buckets.iter().position(|bucket| bucket.dscp == dscp);
        let old = old.map(|place| self.buckets.swap_remove(place));
        if let Some((bps, burst_bytes)) = pace {
            let burst = (u128::from(burst_bytes) * BYTE).max(frame());
            let tokens = old.map_or(burst, |mut old| {
                old.fill(now);
                old.tokens.min(burst)
            });
            let bps = bps.max(1);
            let (granted, is_refused) = (0, false);
            self.buckets.push(Bucket { dscp, bps, burst, tokens, at: now, granted, is_refused });
        }
    }

    fn bucket(&mut self, dscp: u8) -> Option<&mut Bucket> {
        self.buckets.iter_mut().find(|bucket| bucket.dscp == dscp)
    }

    /// How many of these packets may leave now.
    pub(crate) fn admits(&mut self, now: Time, dscp: u8, packets: usize) -> usize {
        let Some(bucket) = self.bucket(dscp) else {
            return packets;
        };
        bucket.fill(now);
        let frames = u32::try_from(bucket.tokens / frame()).unwrap_or(u32::MAX);
        let left = frames.saturating_sub(bucket.granted) as usize;
        let granted = packets.min(left);
        bucket.granted += granted as u32;
        bucket.is_refused = granted == 0;
        granted
    }

    /// A packet of so many bytes leaves.
    pub(crate) fn sends(&mut self, dscp: u8, bytes: u32) {
        if let Some(bucket) = self.bucket(dscp) {
            bucket.granted = bucket.granted.saturating_sub(1);
            bucket.tokens = bucket.tokens.saturating_sub(u128::from(bytes) * BYTE);
        }
    }

    /// Packets admitted and not sent are admitted no longer.
    pub(crate) fn lapse(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| bucket.granted = 0);
    }

    /// When a bucket that refused a packet admits one.
    pub(crate) fn next_wakeup(&self, now: Time) -> Option<Time> {
        let refused = self.buckets.iter().filter(|bucket| bucket.is_refused);
        refused.map(|bucket| bucket.ready_at().max(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_lets_go_its_rate_and_a_burst() {
        let mut paces = Paces::default();
        // A frame of 4,400 bytes in 35.2 us.
        paces.set(Time::ZERO, 8, Some((1_000_000_000, 10_000)));
        assert_eq!(paces.admits(Time::ZERO, 9, 64), 64, "others are not paced");
        assert_eq!(paces.admits(Time::ZERO, 8, 64), 2);
        assert_eq!(paces.admits(Time::ZERO, 8, 64), 0, "what was granted is gone");
        paces.sends(8, 4_400);
        paces.sends(8, 4_400);
        paces.lapse();
        assert_eq!(paces.admits(Time::ZERO, 8, 64), 0);
        let at = paces.next_wakeup(Time::ZERO).unwrap();
        // 1,200 bytes were left: 3,200 are missing.
        assert_eq!(at, Time::from_nanos(25_600));
        assert_eq!(paces.admits(at, 8, 64), 1);
        assert_eq!(paces.next_wakeup(at), None, "nobody waits");
        paces.set(at, 8, None);
        assert_eq!(paces.admits(at, 8, 64), 64);
    }
}
