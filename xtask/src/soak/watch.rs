//! Who has made no progress for too long.
//!
//! A [`Pulse`] counts what a stream or a program has done, for each of its lanes. A pause is over with the next count. It
//! does not grow while the process is stopped or what it needs is away, nor while the machine gives no processor: in each look
//! at the pulses, the pause grows by the time since the last one, less the time that a canary was late, or that some thread
//! of the processes involved has waited for a processor (`schedstat`), whichever is more. So a limit in seconds means the same on
//! a busy machine; what spins in vain there is found later, but it is found.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::ground::{Ground, lock};
use super::place::Place;

/// Without progress for so long, less what the machine took: a failure.
const LIMIT: Duration = Duration::from_secs(5);

/// Without progress for so long, whatever the machine took: a failure.
const LONGEST: Duration = Duration::from_secs(60);

/// How often pulses are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// How long the canary sleeps.
const SLEEP: Duration = Duration::from_millis(5);

/// What a canary may be late without being counted: timers and a switch of context.
const USUAL: Duration = Duration::from_millis(1);

/// One sequence of counts.
#[derive(Debug, Default)]
struct Lane {
    count: AtomicU64,
    has_ended: AtomicBool,
}

/// What the watch knows of a lane.
#[derive(Clone, Copy, Debug)]
struct Pause {
    count: u64,
    since: Instant,
    /// Of that time, what the machine took.
    taken: Duration,
}

/// The progress of a stream or a program.
#[derive(Debug)]
pub(super) struct Pulse {
    pub(super) name: String,
    /// For the table.
    kind: &'static str,
    lanes: Vec<Lane>,
    /// Held by whoever stops a process that this one needs, or itself.
    excuses: AtomicU32,
    has_ended: AtomicBool,
    pids: Vec<u32>,
    place: Option<Arc<Place>>,
    pauses: Mutex<Vec<Pause>>,
}

impl Pulse {
    pub(super) fn new(
        name: String,
        kind: &'static str,
        lanes: usize,
        pids: Vec<u32>,
        place: Option<Arc<Place>>,
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

    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
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

    fn pids(&self) -> Vec<u32> {
        let daemons = self.place.iter().flat_map(|place| place.pids());
        self.pids.iter().copied().chain(daemons).collect()
    }

    /// Brings the pauses up to date; returns the longest one that is too long, with its lane.
    fn look(&self, passed: Duration, taken: Duration, now: Instant) -> Option<(usize, Pause)> {
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

    fn longest(&self, now: Instant) -> (Duration, Duration) {
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

/// Time that the machine did not give to a thread that only sleeps.
#[derive(Debug, Default)]
pub(super) struct Canary(AtomicU64);

impl Canary {
    fn run(&self, is_over: impl Fn() -> bool) {
        while !is_over() {
            let begun = Instant::now();
            thread::sleep(SLEEP);
            let late = begun.elapsed().saturating_sub(SLEEP);
            if late > USUAL {
                self.0.fetch_add(late.as_nanos() as u64, Ordering::Relaxed);
            }
        }
    }

    fn lateness(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// How long threads have waited for a processor, by process and thread.
#[derive(Debug, Default)]
struct Waits(BTreeMap<u32, BTreeMap<u32, u64>>);

impl Waits {
    /// The longest that a thread of these processes has waited since the last look, for each process.
    fn look(&mut self, pids: &[u32]) -> BTreeMap<u32, Duration> {
        let mut found = BTreeMap::new();
        let mut grown = BTreeMap::new();
        for pid in pids {
            if found.contains_key(pid) {
                continue;
            }
            let threads = waits_of(*pid);
            let before = self.0.get(pid);
            let growth = threads.iter().map(|(thread, wait)| {
                let before = before.and_then(|before| before.get(thread)).unwrap_or(wait);
                wait.saturating_sub(*before)
            });
            grown.insert(*pid, Duration::from_nanos(growth.max().unwrap_or(0)));
            found.insert(*pid, threads);
        }
        self.0 = found;
        grown
    }
}

/// The second number of `schedstat`: nanoseconds in which the thread could have run. Kernels without it report none.
fn waits_of(pid: u32) -> BTreeMap<u32, u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let wait = |task: fs::DirEntry| {
        let thread = task.file_name().to_str()?.parse().ok()?;
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        Some((thread, text.split_whitespace().nth(1)?.parse().ok()?))
    };
    tasks.filter_map(wait).collect()
}

/// Looks at all pulses until the soak is over or `is_done`, and fails the soak when one is stuck.
pub(super) fn run(ground: &Ground, is_done: &AtomicBool) {
    let canary = Canary::default();
    let is_over = || is_done.load(Ordering::SeqCst);
    thread::scope(|scope| {
        scope.spawn(|| canary.run(is_over));
        let mut waits = Waits::default();
        let (mut last, mut late) = (Instant::now(), Duration::ZERO);
        while !is_over() {
            thread::sleep(LOOK);
            let now = Instant::now();
            let lateness = canary.lateness();
            look(ground, &mut waits, now, now - last, lateness - late);
            (last, late) = (now, lateness);
        }
        lock(&ground.tally).machine_took = canary.lateness();
    });
}

fn look(ground: &Ground, waits: &mut Waits, now: Instant, passed: Duration, late: Duration) {
    let pulses = {
        let mut pulses = lock(&ground.pulses);
        pulses.retain(|pulse| !pulse.has_ended.load(Ordering::Relaxed));
        pulses.clone()
    };
    let pids: Vec<u32> = pulses.iter().flat_map(|pulse| pulse.pids()).collect();
    let waited = waits.look(&pids);
    for pulse in pulses {
        let waits = pulse.pids().into_iter().filter_map(|pid| waited.get(&pid)).max();
        let taken = waits.copied().unwrap_or_default().max(late);
        let (counted, whole) = pulse.longest(now);
        lock(&ground.tally).pause(pulse.kind, counted, whole);
        if let Some((lane, pause)) = pulse.look(passed, taken, now)
            && !pulse.has_ended.load(Ordering::Relaxed)
        {
            let lanes = match pulse.lanes.len() {
                1 => String::new(),
                _ => format!(", lane {lane}"),
            };
            ground.fail(format!(
                "{}{lanes}: no progress for {:.1} s after {} ({:.1} s of which the machine took)",
                pulse.name,
                (now - pause.since).as_secs_f64(),
                pause.count,
                pause.taken.as_secs_f64(),
            ));
        }
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

    #[test]
    fn waits_for_a_processor_are_read() {
        let own = std::process::id();
        let mut waits = Waits::default();
        assert_eq!(waits.look(&[own, own]).get(&own), Some(&Duration::ZERO));
        assert!(waits.look(&[own]).contains_key(&own));
        assert!(!waits_of(own).is_empty() && waits_of(u32::MAX).is_empty());
    }
}
