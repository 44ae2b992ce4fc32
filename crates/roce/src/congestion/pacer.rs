//! Two timers around a rate: [`NotificationPoint`] at the receiver limits how often marked packets
//! become congestion notifications; [`Pacer`] at the sender turns a rate into the time of the next
//! packet.

use crate::time::{Duration, Time};

/// The notification point: limits how often one queue pair's sender is notified of marked packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NotificationPoint {
    last: Option<Time>,
}

impl NotificationPoint {
    /// A marked packet arrived. Returns whether to notify the sender: `interval` has passed since
    /// the last notification.
    pub fn marked(&self, now: Time, interval: Duration) -> bool {
        self.last.is_none_or(|last| now - last >= interval)
    }

    /// A notification leaves now, which may be later than it became due.
    pub fn notified(&mut self, now: Time) {
        self.last = Some(now);
    }
}

/// How far a queue pair may catch up whose driver was late: what its rate yields in this time is
/// sent at once. A driver that sleeps cannot wake for every packet.
pub const CATCH_UP: Duration = Duration::from_micros(20);

/// Spreads packets in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pacer {
    /// When the next packet would be sent if all had been sent on time.
    next: Time,
    /// Fraction of a nanosecond, in units of 1 / rate.
    remainder: u64,
    /// A packet had to wait for its time, and the rate has not caught up since.
    is_behind: bool,
}

impl Pacer {
    /// When the next packet may be sent; now, if that time has passed.
    pub fn next_send(&self) -> Time {
        self.next
    }

    /// A packet waits for its time. Without one, time that passes is not saved up.
    pub fn waits(&mut self) {
        self.is_behind = true;
    }

    /// A packet of `bytes` left at `now`, and the rate is `rate_bps`.
    pub fn sent(&mut self, now: Time, bytes: u64, rate_bps: u64) {
        let rate = rate_bps.max(1);
        let allowance = if self.is_behind { CATCH_UP.as_nanos() } else { 0 };
        let earliest = Time::from_nanos(now.as_nanos().saturating_sub(allowance));
        // The remainder belongs to the previous rate; scaled to another one it is still below 1 ns.
        let scaled = bytes.saturating_mul(8_000_000_000).saturating_add(self.remainder.min(rate));
        self.next = self.next.max(earliest) + Duration::from_nanos(scaled / rate);
        self.remainder = scaled % rate;
        self.is_behind &= self.next <= now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 1_000_000_000;
    const LINE: u64 = 100 * GBIT;

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    #[test]
    fn notifications_keep_their_distance() {
        let mut point = NotificationPoint::default();
        let interval = Duration::from_micros(50);
        let mut tells = |now, interval| {
            let tells = point.marked(now, interval);
            if tells {
                point.notified(now);
            }
            tells
        };
        let told = (0..1_000).filter(|&us| tells(at(us), interval)).count();
        assert_eq!(told, 20);
        assert!(tells(at(1_000), Duration::ZERO) && tells(at(1_000), Duration::ZERO));
    }

    #[test]
    fn a_paced_sender_keeps_its_rate_to_the_nanosecond() {
        for rate in [1, 999_999_937, 10 * GBIT, 33_333_333_333, LINE] {
            let mut pacer = Pacer::default();
            let start = at(1_000);
            let mut now = start;
            let packets: u64 = if rate == 1 { 3 } else { 10_000 };
            pacer.sent(now, 0, rate);
            let first = pacer.next_send();
            assert_eq!(first, start);
            for _ in 0..packets {
                now = now.max(pacer.next_send());
                pacer.sent(now, 1_066, rate);
            }
            let exact = u128::from(packets * 1_066 * 8) * 1_000_000_000 / u128::from(rate);
            assert_eq!(u128::from((pacer.next_send() - first).as_nanos()), exact, "{rate}");
        }
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut pacer = Pacer::default();
        let burst = |pacer: &mut Pacer, now| {
            let mut sent = 0;
            while pacer.next_send() <= now {
                pacer.sent(now, 1_000, 8 * GBIT);
                sent += 1;
            }
            sent
        };
        assert_eq!(burst(&mut pacer, at(5_000)), 1);
        // A packet waits, and its driver is late. One nanosecond per byte: 20 packets are 20 us,
        // and one more starts.
        pacer.waits();
        assert_eq!(burst(&mut pacer, at(6_000)), 21);
        assert_eq!(burst(&mut pacer, at(7_000)), 1);
        pacer.waits();
        assert_eq!(burst(&mut pacer, at(7_010)), 10);
    }
}
