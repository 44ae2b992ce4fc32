//! When a manager sweeps next: at its interval, after a failure, and for what others say. What a
//! sweep does is not here.

use alloc::collections::BTreeSet;
use core::time::Duration;

/// Before a heavy sweep that failed is repeated; it doubles up to the interval of light sweeps.
pub(super) const RETRY: Duration = Duration::from_millis(500);

/// Rest after a trap that was wrong; it doubles up to [`MAX_TRAP_REST`].
const TRAP_REST: Duration = Duration::from_millis(100);

/// The longest rest between looks for traps.
const MAX_TRAP_REST: Duration = Duration::from_secs(5);

/// The rest before something is tried again: it doubles from failure to failure up to a bound.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    first: Duration,
    next: Duration,
    longest: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff { first, next: first, longest: longest.max(first) }
    }

    /// After a failure.
    pub(super) fn rest(&mut self) -> Duration {
        let rest = self.next;
        self.next = (rest * 2).min(self.longest);
        rest
    }

    /// After a success.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Between light sweeps.
    interval: Duration,
    /// A heavy sweep is due at this time.
    pub(super) heavy_at: Option<Duration>,
    /// A light sweep, or a poll of the master, is due at this time.
    pub(super) next_at: Duration,
    /// No sweep for managers that are not known before this time.
    stranger_at: Duration,
    /// Between heavy sweeps that fail.
    retry: Backoff,
    /// When the last sweep began.
    pub(super) began: Duration,
}

impl Schedule {
    /// With a heavy sweep at once.
    pub(super) fn new(interval: Duration) -> Schedule {
        Schedule {
            interval,
            heavy_at: Some(Duration::ZERO),
            next_at: Duration::ZERO,
            stranger_at: Duration::ZERO,
            retry: Backoff::new(RETRY, interval),
            began: Duration::ZERO,
        }
    }

    /// The next light sweep follows after the interval.
    pub(super) fn rest(&mut self, now: Duration) {
        self.next_at = now + self.interval;
    }

    /// A heavy sweep follows, later from failure to failure. Returns the rest before it.
    pub(super) fn retry(&mut self, now: Duration) -> Duration {
        let rest = self.retry.rest();
        self.heavy_at = Some(now + rest);
        rest
    }

    /// A sweep went well.
    pub(super) fn succeeded(&mut self) {
        self.retry.reset();
    }

    /// There may be a manager that the last heavy sweep has not found: a reason for one, but not at
    /// every datagram.
    pub(super) fn suspect_stranger(&mut self, now: Duration) {
        if self.stranger_at <= now {
            self.stranger_at = now + self.interval;
            self.heavy_at.get_or_insert(now);
        }
    }
}

/// Switches that traps came from. Anybody can send traps: after those that were wrong the manager
/// looks ever less often.
#[derive(Debug)]
pub(super) struct Suspects {
    switches: BTreeSet<u64>,
    /// No look before this time.
    at: Duration,
    rest: Backoff,
}

impl Default for Suspects {
    fn default() -> Suspects {
        let rest = Backoff::new(TRAP_REST, MAX_TRAP_REST);
        Suspects { switches: BTreeSet::new(), at: Duration::ZERO, rest }
    }
}

impl Suspects {
    /// A trap came from a switch.
    pub(super) fn add(&mut self, guid: u64) {
        self.switches.insert(guid);
    }

    pub(super) fn clear(&mut self) {
        self.switches.clear();
    }

    /// When a look at them is due.
    pub(super) fn due(&self) -> Option<Duration> {
        (!self.switches.is_empty()).then_some(self.at)
    }

    /// Those to be looked at now; none if that is not due.
    pub(super) fn take(&mut self, now: Duration) -> BTreeSet<u64> {
        match self.due() {
            Some(at) if at <= now => core::mem::take(&mut self.switches),
            _ => BTreeSet::new(),
        }
    }

    /// They were looked at, and there was a reason for the trap or not.
    pub(super) fn looked(&mut self, now: Duration, found: bool) {
        self.at = now;
        if found {
            self.rest.reset();
        } else {
            self.at += self.rest.rest();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn traps_that_are_wrong_are_looked_at_ever_less_often() {
        let mut suspects = Suspects::default();
        let mut now = at(0);
        let mut rests = alloc::vec::Vec::new();
        for _ in 0..8 {
            suspects.add(7);
            let due = suspects.due().expect("a trap came");
            rests.push((due - now).as_millis());
            assert!(suspects.take(due - at(u64::from(due > now))).is_empty() == (due > now));
            suspects.take(due);
            suspects.looked(due, false);
            now = due;
        }
        assert_eq!(rests, [0, 100, 200, 400, 800, 1_600, 3_200, 5_000]);
        suspects.looked(now, true);
        suspects.add(7);
        assert_eq!((suspects.due(), suspects.take(now).len()), (Some(now), 1));
    }

    #[test]
    fn retries_rest_up_to_the_interval_and_strangers_cause_one_sweep_in_it() {
        let mut schedule = Schedule::new(at(1_500));
        let rests = [0; 3].map(|_| schedule.retry(at(0)).as_millis());
        assert_eq!(rests, [500, 1_000, 1_500]);
        schedule.succeeded();
        assert_eq!(schedule.retry(at(0)), RETRY);
        let mut due = [0, 1, 1_499, 1_500].map(|ms| {
            schedule.heavy_at = None;
            schedule.suspect_stranger(at(ms));
            schedule.heavy_at.is_some()
        });
        assert_eq!(due, [true, false, false, true]);
        // A sweep that is due already stays where it is.
        schedule.heavy_at = Some(at(5_000));
        schedule.suspect_stranger(at(4_000));
        due[0] = schedule.heavy_at == Some(at(5_000));
        assert!(due[0]);
    }
}
