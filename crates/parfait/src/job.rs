//! A job as it is submitted: its pattern, and what each worker needs besides.
//!
//! A [`Job`] is written as its pattern and, where they differ from the defaults, `KEY=VALUE`:
//!
//! ```text
//! torus:4x8@5G,2G slots=2 burst=256k latency=low
//! ```
//!
//! | key | what it is | default |
//! |---|---|---|
//! | `slots` | slots of a host that each worker takes, such as GPUs | 1 |
//! | `burst` | bytes that a worker may send at once before its rate holds; suffixes k, M, G | 64k |
//! | `latency` | `low`, `normal` or `bulk`: in which order queues are given out where there are too few | `normal` |
//! | `spread` | `hosts:N`, `leaves:N`: over how many workers are spread evenly | any |
//! | `most` | `host:K`, `leaf:K`: how many workers a host, or all hosts below a leaf, have at most | any |
//! | `apart` | names or numbers of jobs whose hosts it must not have, with commas | none |
//! | `cycle` | `PERIOD/EXCHANGE`, as `24ms/7ms`: when it runs alone, it exchanges for the second out of each first | not known |

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use thiserror::Error;

use crate::pattern::{Pattern, PatternError, digits, quantity};
use crate::separation::Separation;
use crate::shifts::MAX_PERIOD_NS;

/// Most slots that a worker may take.
pub const MAX_SLOTS_PER_WORKER: u32 = 1 << 12;

/// Largest burst: more would take a second of a link of 100 Gbit/s.
pub const MAX_BURST_BYTES: u64 = 12_500_000_000;

/// Shortest exchange: no timer of a host is finer.
pub const MIN_EXCHANGE_NS: u64 = 1_000;

/// Bytes of a burst where none is named.
pub const DEFAULT_BURST_BYTES: u64 = 64_000;

/// How much a job minds waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Latency {
    /// It waits for every message, as between stages of a pipeline.
    Low,
    /// Its exchanges are long, and their end matters.
    #[default]
    Normal,
    /// It fills what others leave.
    Bulk,
}

/// How a job computes and exchanges in turn when it runs alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cycle {
    /// From the beginning of one exchange to that of the next, in nanoseconds; at most
    /// [`MAX_PERIOD_NS`].
    pub period_ns: u64,
    /// How long an exchange lasts; at least [`MIN_EXCHANGE_NS`] and below the period.
    pub exchange_ns: u64,
}

impl Cycle {
    /// Whether a job can have it.
    pub fn is_valid(&self) -> bool {
        let Cycle { period_ns, exchange_ns } = *self;
        (MIN_EXCHANGE_NS..period_ns).contains(&exchange_ns) && period_ns <= MAX_PERIOD_NS
    }

    fn parse(text: &str) -> Option<Cycle> {
        let (period, exchange) = text.split_once('/')?;
        Some(Cycle { period_ns: time_ns(period)?, exchange_ns: time_ns(exchange)? })
    }
}

/// Units of time, the longest first.
const UNITS: [(&str, u64); 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)];

/// A whole number with a unit; what is too large for the type is too large for a job.
fn time_ns(text: &str) -> Option<u64> {
    // Seconds come last: all units end as they do.
    let (number, unit) =
        UNITS.iter().rev().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))?;
    Some(digits::<u64>(number)?.saturating_mul(unit))
}

/// A time in the longest unit of which it is a whole number.
struct Whole(u64);

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, unit): &&(&str, u64)| self.0.is_multiple_of(*unit);
        let (name, unit) = UNITS.iter().find(fits).unwrap_or(&("ns", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Whole(self.period_ns), Whole(self.exchange_ns))
    }
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Workers and their edges.
    pub pattern: Pattern,
    /// Slots of a host that each worker takes, at least 1.
    pub slots_per_worker: u32,
    /// Bytes that a worker may send at once before its rate holds.
    pub burst_bytes: u64,
    /// How much it minds waiting.
    pub latency: Latency,
    /// How far its workers are kept apart.
    pub separation: Separation,
    /// When it exchanges, if that is known: jobs that say it take turns on links that they share.
    pub cycle: Option<Cycle>,
}

/// Why a text is no job.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JobError {
    /// Its pattern is none.
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// There is no such key, or it has no value.
    #[error(
        "'{0}' is not slots=NUMBER, burst=BYTES, latency=low|normal|bulk, spread=hosts:NUMBER, spread=leaves:NUMBER, \
         most=host:NUMBER, most=leaf:NUMBER, apart=JOB,JOB or cycle=PERIOD/EXCHANGE (whole numbers, as 24ms/7ms)"
    )]
    Unreadable(String),
    /// A key is there twice.
    #[error("'{0}' is said twice")]
    Twice(String),
    /// A number is too small or too large.
    #[error("{key}={value} is not between {least} and {most}")]
    Range {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The smallest that may be.
        least: u64,
        /// The largest that may be.
        most: u64,
    },
    /// No job has such a cycle.
    #[error(
        "cycle={0}: an exchange takes {least} at least and less than the period, and the period {most} at most",
        least = Whole(MIN_EXCHANGE_NS),
        most = Whole(MAX_PERIOD_NS)
    )]
    Cycle(Cycle),
}

impl Job {
    /// One with the defaults.
    pub const fn new(pattern: Pattern) -> Job {
        Job {
            pattern,
            slots_per_worker: 1,
            burst_bytes: DEFAULT_BURST_BYTES,
            latency: Latency::Normal,
            separation: Separation {
                hosts: 0,
                leaves: 0,
                most_per_host: 0,
                most_per_leaf: 0,
                apart: Vec::new(),
            },
            cycle: None,
        }
    }

    /// Refuses numbers that no job can have.
    ///
    /// # Errors
    /// Names the first.
    pub fn check(&self) -> Result<(), JobError> {
        self.pattern.workers()?;
        let slots = u64::from(self.slots_per_worker);
        let in_range = |key, value, least, most| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(JobError::Range { key, value, least, most }),
        };
        in_range("slots", slots, 1, MAX_SLOTS_PER_WORKER.into())?;
        in_range("burst", self.burst_bytes, 0, MAX_BURST_BYTES)?;
        if let Some(cycle) = self.cycle.filter(|cycle| !cycle.is_valid()) {
            return Err(JobError::Cycle(cycle));
        }
        let workers = u64::from(self.pattern.workers()?);
        let Separation { hosts, leaves, .. } = self.separation;
        in_range("spread over hosts", hosts.into(), 0, workers)?;
        in_range("spread over leaves", leaves.into(), 0, workers)
    }

    /// Sets one `KEY=VALUE`.
    fn set(&mut self, word: &str) -> Option<()> {
        let (key, value) = word.split_once('=')?;
        match key {
            // What is too large for the type is too large for a job.
            "slots" => self.slots_per_worker = quantity(value)?.try_into().unwrap_or(u32::MAX),
            "burst" => self.burst_bytes = quantity(value)?,
            "latency" => {
                let all = [Latency::Low, Latency::Normal, Latency::Bulk];
                self.latency = all.into_iter().find(|latency| latency.to_string() == value)?;
            }
            "cycle" => self.cycle = Some(Cycle::parse(value)?),
            _ => self.separation.set(key, value)?,
        }
        Some(())
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Latency::Low => "low",
            Latency::Normal => "normal",
            Latency::Bulk => "bulk",
        })
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pattern)?;
        if self.slots_per_worker != 1 {
            write!(f, " slots={}", self.slots_per_worker)?;
        }
        if self.burst_bytes != DEFAULT_BURST_BYTES {
            write!(f, " burst={}", self.burst_bytes)?;
        }
        if self.latency != Latency::Normal {
            write!(f, " latency={}", self.latency)?;
        }
        write!(f, "{}", self.separation)?;
        self.cycle.map_or(Ok(()), |cycle| write!(f, " cycle={cycle}"))
    }
}

impl FromStr for Job {
    type Err = JobError;

    fn from_str(text: &str) -> Result<Job, JobError> {
        let mut words = text.split_whitespace();
        let mut job = Job::new(words.next().unwrap_or_default().parse()?);
        let key = |word: &str| word.split('=').next().unwrap_or_default().to_string();
        for (at, word) in words.clone().enumerate() {
            if words.clone().take(at).any(|earlier| key(earlier) == key(word)) {
                return Err(JobError::Twice(key(word)));
            }
            job.set(word).ok_or_else(|| JobError::Unreadable(word.to_string()))?;
        }
        job.check()?;
        Ok(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_written_as_they_are_read() {
        for text in [
            "ring:16@5G",
            "mesh:8@300M slots=2",
            "ring:4@1G slots=8 burst=1000 latency=bulk",
            "ring:8@1G spread=hosts:4,leaves:2 most=host:2,leaf:7 apart=train.a-1,17",
            "ring:8@1G most=leaf:3",
            "ring:8@1G latency=low apart=17 cycle=24ms/7ms",
            "ring:8@1G cycle=60s/59999999999ns",
            "ring:8@1G cycle=24013us/1us",
        ] {
            assert_eq!(text.parse::<Job>().expect(text).to_string(), text);
        }
        let job: Job = "ring:4@1G latency=low burst=2M slots=3".parse().expect("any order");
        assert_eq!((job.slots_per_worker, job.burst_bytes), (3, 2_000_000));
        assert_eq!(job.latency, Latency::Low);
        let job: Job = "ring:4@1G cycle=24000us/7000000ns".parse().expect("other units");
        assert_eq!(job.cycle, Some(Cycle { period_ns: 24_000_000, exchange_ns: 7_000_000 }));
        assert_eq!(job.to_string(), "ring:4@1G cycle=24ms/7ms");
    }

    #[test]
    fn what_is_no_job_is_refused_with_the_reason() {
        let refused = [
            ("", "unknown pattern ''"),
            ("ring:4@1G slots", "'slots' is not slots=NUMBER"),
            ("ring:4@1G gpus=2", "'gpus=2' is not slots=NUMBER"),
            ("ring:4@1G latency=none", "'latency=none' is not"),
            ("ring:4@1G slots=2 slots=3", "'slots' is said twice"),
            ("ring:4@1G slots=0", "slots=0 is not between 1 and 4096"),
            ("ring:4@1G slots=5000", "slots=5000 is not between 1 and 4096"),
            ("ring:4@1G burst=13G", "burst=13000000000 is not between 0 and 12500000000"),
            ("ring:4@1G burst=-1", "'burst=-1' is not"),
            ("ring:4@1G spread=4", "'spread=4' is not"),
            ("ring:4@1G spread=hosts:0", "'spread=hosts:0' is not"),
            ("ring:4@1G spread=hosts:+2", "'spread=hosts:+2' is not"),
            ("ring:4@1G spread=hosts:2,hosts:3", "'spread=hosts:2,hosts:3' is not"),
            ("ring:4@1G spread=racks:2", "'spread=racks:2' is not"),
            ("ring:4@1G spread=hosts:5", "spread over hosts=5 is not between 0 and 4"),
            ("ring:4@1G most=hosts:2", "'most=hosts:2' is not"),
            ("ring:4@1G apart=", "'apart=' is not"),
            ("ring:4@1G apart=a,,b", "'apart=a,,b' is not"),
            ("ring:4@1G apart=a,a", "'apart=a,a' is not"),
            ("ring:4@1G apart=ä", "'apart=ä' is not"),
            ("ring:4@1G cycle=24ms", "'cycle=24ms' is not"),
            ("ring:4@1G cycle=24/7", "'cycle=24/7' is not"),
            ("ring:4@1G cycle=ms/7ms", "'cycle=ms/7ms' is not"),
            ("ring:4@1G cycle=24ms/7ms/1ms", "'cycle=24ms/7ms/1ms' is not"),
            ("ring:4@1G cycle=+24ms/7ms", "'cycle=+24ms/7ms' is not"),
            ("ring:4@1G cycle=2.4s/7ms", "'cycle=2.4s/7ms' is not"),
            ("ring:4@1G cycle=24ms/7ms cycle=1s/1ms", "'cycle' is said twice"),
            (
                "ring:4@1G cycle=24ms/24ms",
                "cycle=24ms/24ms: an exchange takes 1us at least and less",
            ),
            ("ring:4@1G cycle=24ms/999ns", "cycle=24ms/999ns: an exchange takes"),
            ("ring:4@1G cycle=0s/0s", "cycle=0s/0s: an exchange takes"),
            ("ring:4@1G cycle=61s/7ms", "cycle=61s/7ms: an exchange takes"),
            ("ring:4@1G cycle=99999999999s/7ms", "cycle=18446744073709551615ns/7ms: an exchange"),
        ];
        for (text, reason) in refused {
            let error = text.parse::<Job>().expect_err(text).to_string();
            assert!(error.starts_with(reason), "{text}: {error}");
        }
    }
}
