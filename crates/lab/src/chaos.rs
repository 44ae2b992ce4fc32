//! Seeds of random programs under faults ([`sim::chaos`]) on all cores: their sum, and which of
//! them failed.
//!
//! What a seed does and checks is in the simulator.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sim::chaos::{self, Options, Summary};

use crate::workers;

/// What all seeds did, and those that failed.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// The sum of those that went well.
    pub sum: Summary,
    /// What failed, by seed.
    pub failures: BTreeMap<u64, String>,
}

impl Outcomes {
    /// Adds how a seed ended.
    pub fn add(&mut self, seed: u64, result: Result<Summary, String>) {
        match result {
            Ok(summary) => self.sum.add(&summary),
            Err(what) => drop(self.failures.insert(seed, what)),
        }
    }
}

/// Runs the seeds, on so many threads or else on all cores; `progress` learns how many are done.
pub fn run(
    seeds: Range<u64>,
    threads: Option<NonZeroUsize>,
    options: &Options,
    mut progress: impl FnMut(u64),
) -> Outcomes {
    let (mut outcomes, mut done) = (Outcomes::default(), 0);
    let take = |seed, result| {
        outcomes.add(seed, result);
        done += 1;
        progress(done);
        Ok(())
    };
    let Ok(()) = workers::each::<_, std::convert::Infallible>(
        seeds,
        threads,
        |seed| run_one(seed, options),
        take,
    );
    outcomes
}

/// A panic of the transport is a failure of its seed, and the others still run.
fn run_one(seed: u64, options: &Options) -> Result<Summary, String> {
    match catch_unwind(AssertUnwindSafe(|| chaos::run(seed, options))) {
        Ok(result) => result.map_err(|violation| violation.to_string()),
        Err(_) => Err(String::from("panicked; the message is above")),
    }
}
