//! What the machine can do, measured beside the figures: the distance of two cores, copies,
//! wake-ups, load.
//!
//! Latency over shared memory follows the distance of the cores, which a hypervisor may change at
//! any time; figures of two runs compare only where these agree.

use std::fmt;
use std::fs;
use std::hint;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bench::machine;
use crate::bench::table::Spread;

/// What was measured once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Calibration {
    /// Half a round trip of a cache line between the two cores.
    pub(super) cache_line_ns: f64,
    /// GB/s of `memcpy` at each of [`COPIES`].
    pub(super) copy_gbps: [f64; 3],
    /// From the wake-up of a sleeping thread on the other core to its answer, half a round trip.
    pub(super) futex_wake_us: f64,
    /// One-minute load average.
    pub(super) load: f64,
}

/// Sizes of copies and their names.
const COPIES: [(usize, &str); 3] = [(64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")];

/// How long threads play ping-pong, and how often before they look at the clock.
const ROUND_TIME: Duration = Duration::from_millis(50);
const ROUNDS: u32 = 64;

/// A turn that never comes: the end.
const END: u32 = u32::MAX;

/// Wake-ups that are measured.
const WAKE_ROUNDS: u32 = 1_000;

/// How long copies of one size are repeated.
const COPY_TIME: Duration = Duration::from_millis(50);

impl Calibration {
    /// Measures, with threads on these two cores.
    pub(super) fn take(cores: [usize; 2]) -> Calibration {
        let load = machine::load();
        Calibration {
            cache_line_ns: bounce(cores),
            copy_gbps: COPIES.map(|(bytes, _)| copy_gbps(bytes)),
            futex_wake_us: wake(cores).as_secs_f64() * 1e6 / f64::from(2 * WAKE_ROUNDS),
            load,
        }
    }
}

/// Binds the calling thread to a core, if the machine permits.
fn bind(core: usize) {
    let Ok(task) = fs::read_link("/proc/thread-self") else { return };
    let Some(thread) = task.file_name() else { return };
    let mut taskset = Command::new("taskset");
    taskset.args(["-p", "-c", &core.to_string()]).arg(thread);
    // Unbound threads are measured where taskset is missing.
    let _ = taskset.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Nanoseconds that a counter takes from one thread to another: a cache line, while both spin.
fn bounce(cores: [usize; 2]) -> f64 {
    let shared = cores[0] == cores[1];
    let wait = move |line: &AtomicU32, wanted: u32| loop {
        match line.load(Ordering::Acquire) {
            seen if seen == wanted => return true,
            END => return false,
            _ if shared => thread::yield_now(),
            _ => hint::spin_loop(),
        }
    };
    let measured = thread::spawn(move || {
        bind(cores[0]);
        let line = Arc::new(AtomicU32::new(0));
        let other = Arc::clone(&line);
        let player = thread::spawn(move || {
            bind(cores[1]);
            let mut turn = 1;
            while wait(&other, turn) {
                other.store(turn + 1, Ordering::Release);
                turn += 2;
            }
        });
        let pass = |turn: u32| {
            line.store(turn, Ordering::Release);
            wait(&line, turn + 1);
        };
        // The other thread is there.
        pass(1);
        let (began, mut rounds) = (Instant::now(), 0);
        while began.elapsed() < ROUND_TIME {
            (0..ROUNDS).for_each(|round| pass(2 * (rounds + round) + 3));
            rounds += ROUNDS;
        }
        let took = began.elapsed();
        line.store(END, Ordering::Release);
        // A thread that panicked has been reported.
        let _ = player.join();
        took.as_nanos() as f64 / f64::from(2 * rounds)
    });
    measured.join().unwrap_or(f64::NAN)
}

/// Two threads that put each other to sleep and wake each other; returns the time of all rounds.
fn wake(cores: [usize; 2]) -> Duration {
    let measured = thread::spawn(move || {
        bind(cores[0]);
        let turn = Arc::new(AtomicU32::new(0));
        let (seen, first) = (Arc::clone(&turn), thread::current());
        let player = thread::spawn(move || {
            bind(cores[1]);
            for round in 0..WAKE_ROUNDS {
                sleep_until(&seen, 2 * round + 1);
                seen.store(2 * round + 2, Ordering::Release);
                first.unpark();
            }
        });
        let began = Instant::now();
        for round in 0..WAKE_ROUNDS {
            turn.store(2 * round + 1, Ordering::Release);
            player.thread().unpark();
            sleep_until(&turn, 2 * round + 2);
        }
        began.elapsed()
    });
    measured.join().unwrap_or_default()
}

fn sleep_until(turn: &AtomicU32, wanted: u32) {
    while turn.load(Ordering::Acquire) != wanted {
        thread::park();
    }
}

fn copy_gbps(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    to.copy_from_slice(&from);
    let (began, mut copies) = (Instant::now(), 0_u32);
    while began.elapsed() < COPY_TIME {
        to.copy_from_slice(hint::black_box(&from));
        hint::black_box(&mut to);
        copies += 1;
    }
    f64::from(copies) * bytes as f64 / began.elapsed().as_secs_f64() / 1e9
}

/// All calibrations of a run: one in each round.
#[derive(Clone, Debug, Default)]
pub(super) struct Calibrations(pub(super) Vec<Calibration>);

impl Calibrations {
    /// Names, values in the order of the rounds, digits and units.
    fn rows(&self) -> Vec<(String, Vec<f64>, usize, &'static str)> {
        let each = |of: &dyn Fn(&Calibration) -> f64| self.0.iter().map(of).collect::<Vec<f64>>();
        let mut rows = vec![
            (
                "cache line between the cores, one way".to_owned(),
                each(&|one| one.cache_line_ns),
                0,
                "ns",
            ),
            ("futex wake-up".to_owned(), each(&|one| one.futex_wake_us), 1, "us"),
        ];
        for (at, (_, size)) in COPIES.iter().enumerate() {
            rows.push((format!("memcpy {size}"), each(&move |one| one.copy_gbps[at]), 1, "GB/s"));
        }
        rows.push(("load average".to_owned(), each(&|one| one.load), 1, ""));
        rows
    }

    pub(super) fn to_json(&self) -> Value {
        let object = |one: &Calibration| {
            json!({
                "cache_line_ns": one.cache_line_ns, "futex_wake_us": one.futex_wake_us,
                "memcpy_64k_gbps": one.copy_gbps[0], "memcpy_1m_gbps": one.copy_gbps[1],
                "memcpy_64m_gbps": one.copy_gbps[2], "load": one.load,
            })
        };
        self.0.iter().map(object).collect()
    }
}

impl fmt::Display for Calibrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, values, digits, unit) in self.rows() {
            if let Some(spread) = Spread::of(values.into_iter().map(Some)) {
                writeln!(f, "- {name}: {} {unit}", spread.text(digits))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_measured_and_shown() {
        let taken = Calibration::take([0, 0]);
        assert!(taken.cache_line_ns > 0.0 && taken.futex_wake_us > 0.0, "{taken:?}");
        assert!(taken.copy_gbps.iter().all(|rate| *rate > 0.0), "{taken:?}");
        let text = Calibrations(vec![taken, taken]).to_string();
        assert_eq!(text.lines().count(), 6, "{text}");
    }
}
