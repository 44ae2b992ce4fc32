//! A scenario run to its end, and what was sampled on the way.

use std::time::Duration;

use roce::Time;
use rustix::time::{ClockId, clock_gettime};
use service::Error;
use sim::traffic::Outcome;

use super::Prepared;
use super::result::RunResult;
use crate::trace::{Recorder, Sample};

/// The first distance of samples of the queues; it grows with the run.
const SAMPLE_EVERY: roce::Duration = roce::Duration::from_micros(1);

/// Steps between two reports of progress.
const STEPS: u32 = 100_000;

/// What is sampled over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// Nothing.
    Nothing,
    /// Queues.
    Queues,
    /// Queues, and how far each flow has come.
    Flows,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The simulated time.
    pub now: Time,
    /// Flows that have not arrived.
    pub left: u32,
    /// All flows.
    pub flows: usize,
}

/// Runs a scenario to its end.
///
/// # Errors
/// When the simulation makes a mistake.
pub fn run(
    prepared: &Prepared,
    sampled: Sampled,
    progress: impl FnMut(Progress),
) -> Result<(RunResult, Outcome), Error> {
    let before = cpu_time();
    let outcome = simulate(prepared, sampled, progress)?;
    Ok((RunResult::new(prepared, &outcome, cpu_time() - before), outcome))
}

fn simulate(
    prepared: &Prepared,
    sampled: Sampled,
    mut progress: impl FnMut(Progress),
) -> Result<Outcome, Error> {
    let mut runner = prepared.runner();
    if sampled != Sampled::Nothing {
        runner.sample_every(SAMPLE_EVERY);
    }
    if sampled == Sampled::Flows {
        runner.sample_flows();
    }
    let mut steps = 0_u32;
    while runner.advance(prepared.deadline).map_err(Error::from_cause)? {
        steps += 1;
        if steps.is_multiple_of(STEPS) {
            let (now, left, flows) = (runner.now(), runner.left(), prepared.flows.len());
            progress(Progress { now, left, flows });
        }
    }
    Ok(runner.outcome())
}

/// Processor time of this thread.
fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What was sampled of flows ([`Sampled::Flows`]).
pub fn samples(prepared: &Prepared, outcome: &Outcome) -> Vec<Sample> {
    let mut recorder = Recorder::new(prepared.network.mtu.bytes());
    for (sample, paces) in outcome.samples.iter().zip(&outcome.progress) {
        for (flow, pace) in paces {
            recorder.take(sample.at, *flow, pace);
        }
    }
    recorder.into_samples()
}
