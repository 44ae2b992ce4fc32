//! Who has made no progress for too long.
//!
//! A [`Pulse`](super::pulse::Pulse) counts what a stream or a program has done, for each of its
//! lanes. A pause is over with the next count. It does not grow while the process is stopped or
//! what it needs is away, nor while the machine gives no processor: in each look at the pulses, the
//! pause grows by the time since the last one, less the time that a canary was late, or that some
//! thread of the processes involved has waited for a processor (`schedstat`), whichever is more. So
//! a limit in seconds means the same on a busy machine; what spins in vain there is found later,
//! but it is found.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::ground::Ground;
use super::locks::lock;

/// How often pulses are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// How long the canary sleeps.
const SLEEP: Duration = Duration::from_millis(5);

/// What a canary may be late without being counted: timers and a switch of context.
const USUAL: Duration = Duration::from_millis(1);

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
    /// The longest that a thread of these processes has waited since the last look, for each
    /// process.
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

/// The second number of `schedstat`: nanoseconds in which the thread could have run. Kernels
/// without it report none.
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
        pulses.retain(|pulse| !pulse.has_ended());
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
            && !pulse.has_ended()
        {
            let lanes = match pulse.lanes() {
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

    #[test]
    fn waits_for_a_processor_are_read() {
        let own = std::process::id();
        let mut waits = Waits::default();
        assert_eq!(waits.look(&[own, own]).get(&own), Some(&Duration::ZERO));
        assert!(waits.look(&[own]).contains_key(&own));
        assert!(!waits_of(own).is_empty() && waits_of(u32::MAX).is_empty());
    }
}
