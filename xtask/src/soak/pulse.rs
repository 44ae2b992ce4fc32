//! The progress of one stream or program, and its pauses.
//!
//! It counts what was done, for each lane, and measures pauses when it is looked at. When that is,
//! and how much time the machine took meanwhile, is decided in [`watch`](super::watch).

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::locks::lock;

/// Without progress for so long, less what the machine took: a failure.
const LIMIT: Duration = Duration::from_secs(5);

/// Without progress for so long, whatever the machine took: a failure.
const LONGEST: Duration = Duration::from_secs(60);

/// One sequence of counts.
#[derive(Debug, Default)]
struct Lane {
    count: AtomicU64,
    has_ended: AtomicBool,
}

/// What the watch knows of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    pub(super) count: u64,
    pub(super) since: Instant,
    /// Of that time, what the machine took.
    pub(super) taken: Duration,
}

/// The daemons that a stream depends on.
pub(super) trait Daemons: fmt::Debug + Send + Sync {
    /// Whether one of them is killed or stopped at this moment.
    fn is_away(&self) -> bool;

    /// The numbers of their processes.
    fn pids(&self) -> Vec<u32>;
}

/// The progress of a stream or a program.
#[derive(Debug)]
pub(super) struct Pulse {
    pub(super) name: String,
    /// For the table.
    pub(super) kind: &'static str,
    lanes: Vec<Lane>,
    /// Held by whoever stops a process that this one needs, or itself.
    excuses: AtomicU32,
    has_ended: AtomicBool,
    pids: Vec<u32>,
    place: Option<Arc<dyn Daemons>>,
    pauses: Mutex<Vec<Pause>>,
}

impl Pulse {
    pub(super) fn new(
        name: String,
        kind: &'static str,
        lanes: usize,
        pids: Vec<u32>,
        place: Option<Arc<dyn Daemons>>,
    ) -> Pulse {
        let pause = Pause { count: 0, since: Instant::now(), taken: Duration::ZERO };
        Pulse {
            name,
            kind,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            excuses: AtomicU32::new(0),
            has_ended: AtomicBool::new(false),
            pids,
            place,
            pauses: Mutex::new(vec![pause; lanes]),
        }
    }

    /// One more.
    pub(super) fn beat(&self) {
        self.lanes[0].count.fetch_add(1, Ordering::Relaxed);
    }

    /// What a lane has done so far.
    pub(super) fn set(&self, lane: usize, count: u64) {
        if let Some(lane) = self.lanes.get(lane) {
            lane.count.store(count, Ordering::Relaxed);
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.count.load(Ordering::Relaxed)).sum()
    }

    /// This lane has nothing to do any more.
    pub(super) fn end_lane(&self, lane: usize) {
        if let Some(lane) = self.lanes.get(lane) {
            lane.has_ended.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// No pause is counted from now on.
    pub(super) fn excuse(&self) {
        self.excuses.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn unexcuse(&self) {
        self.excuses.fetch_sub(1, Ordering::SeqCst);
    }

    fn is_excused(&self) -> bool {
        let is_away = self.place.as_ref().is_some_and(|place| place.is_away());
        is_away || self.excuses.load(Ordering::SeqCst) > 0
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        let daemons = self.place.iter().flat_map(|place| place.pids());
        self.pids.iter().copied().chain(daemons).collect()
    }

    /// Brings the pauses up to date; returns the longest one that is too long, with its lane.
    pub(super) fn look(
        &self,
        passed: Duration,
        taken: Duration,
        now: Instant,
    ) -> Option<(usize, Pause)> {
        let mut pauses = lock(&self.pauses);
        let is_excused = self.is_excused();
        let mut stuck: Option<(usize, Pause)> = None;
        for (number, (lane, pause)) in self.lanes.iter().zip(pauses.iter_mut()).enumerate() {
            let count = lane.count.load(Ordering::Relaxed);
            if is_excused || count != pause.count || lane.has_ended.load(Ordering::Relaxed) {
                *pause = Pause { count, since: now, taken: Duration::ZERO };
                continue;
            }
            pause.taken += taken.min(passed);
            if pause.counted(now) > LIMIT || now - pause.since > LONGEST {
                let longest = stuck.filter(|(_, other)| other.counted(now) >= pause.counted(now));
                stuck = longest.or(Some((number, *pause)));
            }
        }
        stuck
    }

    pub(super) fn longest(&self, now: Instant) -> (Duration, Duration) {
        let pauses = lock(&self.pauses);
        let all = pauses.iter().map(|pause| (pause.counted(now), now - pause.since));
        all.max().unwrap_or_default()
    }
}

impl Pause {
    fn counted(&self, now: Instant) -> Duration {
        (now - self.since).saturating_sub(self.taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(lanes: usize) -> Pulse {
        Pulse::new("a stream".to_owned(), "streams", lanes, Vec::new(), None)
    }

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks once a second of which the machine took `taken`, until it fails; returns the seconds.
    fn seconds_until_stuck(pulse: &Pulse, taken: Duration) -> u32 {
        let begun = lock(&pulse.pauses)[0].since;
        let is_stuck = |second: &u32| pulse.look(SECOND, taken, begun + *second * SECOND).is_some();
        (1..100).find(is_stuck).expect("sooner or later")
    }

    #[test]
    fn a_pause_is_too_long_after_five_seconds_of_its_own() {
        assert_eq!(seconds_until_stuck(&pulse(1), Duration::ZERO), 6);
        assert_eq!(seconds_until_stuck(&pulse(1), SECOND / 2), 11);
        assert_eq!(seconds_until_stuck(&pulse(1), SECOND * 3), 61);
    }

    #[test]
    fn counts_excuses_and_ends_begin_a_pause_anew() {
        let begun = Instant::now();
        let watched = pulse(2);
        for second in 1..30 {
            watched.set(0, u64::from(second));
            watched.set(1, u64::from(second));
            assert!(watched.look(SECOND, Duration::ZERO, begun + second * SECOND).is_none());
        }
        assert_eq!(watched.total(), 58);
        watched.end_lane(0);
        let stuck = (30..40)
            .find_map(|second| watched.look(SECOND, Duration::ZERO, begun + second * SECOND));
        assert_eq!(stuck.map(|(lane, _)| lane), Some(1));
        watched.excuse();
        for second in 40..60 {
            assert!(watched.look(SECOND, Duration::ZERO, begun + second * SECOND).is_none());
        }
        watched.unexcuse();
        assert_eq!(watched.longest(begun + 62 * SECOND).1, 3 * SECOND);
    }
}
