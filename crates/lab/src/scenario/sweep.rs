//! A scenario with every combination of some values, each with several seeds, on all cores.

use std::num::NonZeroUsize;
use std::ops::Range;

use serde::Serialize;
use service::Error;
use sim::traffic::Outcome;

use super::result::RunResult;
use super::run::{Sampled, run};
use super::{Prepared, Scenario, Setting};
use crate::workers;

/// Most runs of a sweep.
const MAX_RUNS: usize = 10_000;

/// Why there is no sweep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SweepError {
    /// A later value of a key would replace an earlier one, and rows would name values that no run
    /// had.
    #[error("{0} is given twice")]
    Twice(String),
    /// There are too many combinations and seeds.
    #[error("more than {MAX_RUNS} runs")]
    TooMany,
}

/// A value and what it is to be in turn.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The names of tables, and of the value.
    pub key: Vec<String>,
    /// The values as they were typed.
    pub values: Vec<String>,
}

impl Choices {
    /// Reads `KEY=VALUE,...`.
    ///
    /// # Errors
    /// When there is no key.
    pub fn parse(text: &str) -> Result<Choices, String> {
        let Setting { key, .. } = Setting::parse(text)?;
        let values = text.split_once('=').map_or("", |(_, values)| values);
        Ok(Choices { key, values: values.split(',').map(str::to_owned).collect() })
    }

    fn settings(&self) -> impl Iterator<Item = Setting> + '_ {
        let setting = |value: &String| Setting::new(self.key.clone(), value);
        self.values.iter().map(setting)
    }
}

/// One run to do: the place of its combination, and what is set.
#[derive(Clone, Debug)]
struct Job {
    row: usize,
    /// Whether it is the first of its combination.
    is_first: bool,
    settings: Vec<Setting>,
}

impl Job {
    fn prepare(&self, scenario: &Scenario) -> Result<Prepared, Error> {
        let with = |scenario: Scenario, setting| scenario.with(setting);
        self.settings.iter().try_fold(scenario.clone(), with)?.prepare()
    }
}

/// A combination, as people read it, and its runs.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The values, in the order of their keys.
    pub values: Vec<String>,
    /// By seed.
    pub runs: Vec<RunResult>,
}

/// The runs to do.
#[derive(Debug)]
pub struct Sweep {
    /// The values of each combination.
    combinations: Vec<Vec<String>>,
    jobs: Vec<Job>,
}

impl Sweep {
    /// Every combination with each of the seeds, or else with the scenario's own.
    ///
    /// # Errors
    /// When a key is given twice, or there are too many runs.
    pub fn of(choices: &[Choices], seeds: Option<Range<u64>>) -> Result<Sweep, SweepError> {
        check_keys(choices, seeds.is_some())?;
        let mut combinations: Vec<Vec<Setting>> = vec![Vec::new()];
        for choices in choices {
            let with = |before: &Vec<Setting>| {
                let one = |setting| before.iter().cloned().chain([setting]).collect();
                choices.settings().map(one).collect::<Vec<Vec<Setting>>>()
            };
            combinations = combinations.iter().flat_map(with).collect();
            if combinations.len() > MAX_RUNS {
                return Err(SweepError::TooMany);
            }
        }
        let seeds: Vec<Option<u64>> = match seeds {
            None => vec![None],
            Some(seeds) => seeds.take(MAX_RUNS + 1).map(Some).collect(),
        };
        if combinations.len() * seeds.len() > MAX_RUNS {
            return Err(SweepError::TooMany);
        }
        let mut jobs = Vec::new();
        for (row, settings) in combinations.iter().enumerate() {
            for (number, &seed) in seeds.iter().enumerate() {
                let key = || vec!["run".to_owned(), "seed".to_owned()];
                let seed = seed.map(|seed| Setting::new(key(), &seed.to_string()));
                let settings = settings.iter().cloned().chain(seed).collect();
                jobs.push(Job { row, is_first: number == 0, settings });
            }
        }
        let text = |settings: &Vec<Setting>| settings.iter().map(|one| one.text.clone()).collect();
        Ok(Sweep { combinations: combinations.iter().map(text).collect(), jobs })
    }

    /// Prepares every run, so that what cannot be is known before hours are spent on the others.
    ///
    /// # Errors
    /// With the place of what does not fit.
    pub fn check(&self, scenario: &Scenario) -> Result<(), Error> {
        self.jobs.iter().try_for_each(|job| job.prepare(scenario).map(drop))
    }

    /// Does all runs, on so many threads or else on all cores; `progress` learns how many of how
    /// many are done. The flows of the first run of each combination are kept where they are
    /// wanted.
    ///
    /// # Errors
    /// When a run cannot be prepared, or the simulation makes a mistake.
    pub fn run(
        self,
        scenario: &Scenario,
        threads: Option<NonZeroUsize>,
        keeps_flows: bool,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Vec<(Row, Option<Outcome>)>, Error> {
        let Sweep { combinations, jobs } = self;
        let work = |number: u64| {
            let job = &jobs[number as usize];
            let (result, outcome) = run(&job.prepare(scenario)?, Sampled::Nothing, |_| {})?;
            Ok((result, (keeps_flows && job.is_first).then_some(outcome)))
        };
        let mut results: Vec<Option<(RunResult, Option<Outcome>)>> =
            jobs.iter().map(|_| None).collect();
        let mut done = 0;
        workers::each(0..jobs.len() as u64, threads, work, |number, result| {
            results[number as usize] = Some(result?);
            done += 1;
            progress(done, jobs.len());
            Ok::<(), Error>(())
        })?;
        let row = |values| (Row { values, runs: Vec::new() }, None);
        let mut rows: Vec<(Row, Option<Outcome>)> = combinations.into_iter().map(row).collect();
        for (job, (result, outcome)) in jobs.iter().zip(results.into_iter().flatten()) {
            let (row, first) = &mut rows[job.row];
            row.runs.push(result);
            *first = first.take().or(outcome);
        }
        Ok(rows)
    }
}

fn check_keys(choices: &[Choices], has_seeds: bool) -> Result<(), SweepError> {
    let mut keys: Vec<String> = choices.iter().map(|choices| choices.key.join(".")).collect();
    keys.extend(has_seeds.then(|| "run.seed".to_owned()));
    let twice = (1..keys.len()).find(|&at| keys[..at].contains(&keys[at]));
    twice.map_or(Ok(()), |at| Err(SweepError::Twice(keys[at].clone())))
}

/// Short flows, as everywhere in the literature.
const SHORT: Option<u64> = Some(100_000);

/// The mean of the runs' 99th percentiles of short flows, and their range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Short {
    /// The mean.
    pub mean: f64,
    /// The least and the most.
    pub range: (f64, f64),
    /// How many runs have short flows.
    pub runs: usize,
}

impl Row {
    /// The mean of a figure over the runs.
    pub fn mean(&self, value: impl Fn(&RunResult) -> f64) -> f64 {
        self.runs.iter().map(value).sum::<f64>() / self.runs.len().max(1) as f64
    }

    /// The mean slowdown of flows of these sizes, over the runs that have some.
    pub fn slowdown(&self, above: u64, up_to: Option<u64>) -> Option<f64> {
        let rows: Vec<f64> =
            self.runs.iter().filter_map(|run| Some(run.row(above, up_to)?.mean)).collect();
        (!rows.is_empty()).then(|| rows.iter().sum::<f64>() / rows.len() as f64)
    }

    /// The mean slowdown of short flows.
    pub fn short_slowdown(&self) -> Option<f64> {
        self.slowdown(0, SHORT)
    }

    /// The 99th percentiles of short flows, over the runs that have some.
    pub fn short_p99(&self) -> Option<Short> {
        let p99: Vec<f64> =
            self.runs.iter().filter_map(|run| Some(run.row(0, SHORT)?.p99)).collect();
        let least = p99.iter().copied().fold(f64::INFINITY, f64::min);
        let most = p99.iter().copied().fold(0.0, f64::max);
        (!p99.is_empty()).then(|| Short {
            mean: p99.iter().sum::<f64>() / p99.len() as f64,
            range: (least, most),
            runs: p99.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(choices: &[&str], seeds: Option<Range<u64>>) -> Result<Sweep, SweepError> {
        let choices: Vec<Choices> =
            choices.iter().map(|text| Choices::parse(text).expect("a choice")).collect();
        Sweep::of(&choices, seeds)
    }

    #[test]
    fn every_combination_has_every_seed() {
        let sweep = sweep(&["a.b=1,2", "c=x,y,z"], Some(4..6)).expect("a sweep");
        assert_eq!(sweep.combinations.len(), 6);
        assert_eq!(sweep.combinations[5], ["2", "z"]);
        assert_eq!(sweep.jobs.len(), 12);
        let last = &sweep.jobs[11];
        assert_eq!((last.row, last.is_first, last.settings.len()), (5, false, 3));
        assert_eq!(last.settings[2].text, "5");
    }

    #[test]
    fn values_that_no_run_would_have_are_refused() {
        let refused = |choices: &[&str], seeds| sweep(choices, seeds).expect_err("no sweep");
        assert_eq!(refused(&["a=1", "a=2"], None), SweepError::Twice("a".to_owned()));
        assert_eq!(refused(&["run.seed=1"], Some(1..2)), SweepError::Twice("run.seed".to_owned()));
        assert_eq!(refused(&["a=1,2"], Some(0..5_001)), SweepError::TooMany);
        assert!(sweep(&["a=1,2"], Some(0..5_000)).is_ok());
    }
}
