//! `dquant sim sweep`: a scenario with every combination of some values, on all cores.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use clap::Args;
use lab::scenario::result::RunResult;
use lab::scenario::{Prepared, Scenario, Setting, pictures};
use serde::Serialize;
use sim::traffic::Outcome;

use super::super::{Console, Report};
use super::chaos::parse_seeds;
use super::run::{Sampled, cannot_write, cpu_time, simulate};
use crate::exit::{CliError, Exit};

/// Run a scenario with every combination of values, and compare
///
/// Each row is one combination; with several seeds its figures are means over them, and the range of the
/// 99th percentile of short flows (up to 100 kB) is given. --json has every run.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Exit code 1: in some run, flows had not arrived at the deadline, or their connection failed.

Examples:
  dquant sim sweep scenarios/web-search.toml --set transport.control=dcqcn-mlnx,hpcc,advertised
  dquant sim sweep scenarios/web-search.toml --set workload.load=30%,50%,80% --seeds 1..4
  dquant sim sweep scenarios/incast.toml --set transport.control=hpcc,swift --plot slowdowns.svg"
)]
pub(super) struct SweepCommand {
    /// The scenario, in TOML; docs/scenarios.md has every table
    file: PathBuf,

    /// A value of the scenario, and what it is to be in turn
    #[arg(long = "set", value_name = "KEY=VALUE,...", required = true, value_parser = Choices::parse)]
    choices: Vec<Choices>,

    /// Seeds of each combination, the last one excluded [default: the scenario's]
    #[arg(long, value_name = "FIRST..END", value_parser = parse_seeds)]
    seeds: Option<Range<u64>>,

    /// Threads [default: the cores]
    #[arg(long)]
    threads: Option<NonZeroUsize>,

    /// Write slowdown by size as a picture: two curves for each combination, of its first seed
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Most runs of a sweep.
const MAX_RUNS: usize = 10_000;

/// A value and what it is to be in turn.
#[derive(Clone, Debug)]
struct Choices {
    key: Vec<String>,
    values: Vec<String>,
}

impl Choices {
    fn parse(text: &str) -> Result<Choices, String> {
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
    /// Whether its flows are drawn: of the first run of each combination.
    is_drawn: bool,
    settings: Vec<Setting>,
}

/// A combination, as people read it, and its runs.
#[derive(Debug, Serialize)]
struct Row {
    values: Vec<String>,
    runs: Vec<RunResult>,
}

impl SweepCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let scenario = Scenario::read(&self.file)?;
        self.check_keys()?;
        let (mut rows, jobs) = self.jobs()?;
        // What cannot be prepared is said before hours are spent on the others.
        for job in &jobs {
            prepared(&scenario, job)?;
        }
        if let Some(path) = &self.plot {
            std::fs::write(path, "").map_err(|error| cannot_write(path, &error))?;
        }
        let results = self.run_all(&scenario, &jobs, console)?;
        let mut first: Vec<Option<Outcome>> = rows.iter().map(|_| None).collect();
        for (job, (result, outcome)) in jobs.iter().zip(results) {
            rows[job.row].runs.push(result);
            first[job.row] = first[job.row].take().or(outcome);
        }
        let report = SweepReport {
            title: self.file.display().to_string(),
            keys: self.choices.iter().map(|choices| choices.key.join(".")).collect(),
            rows,
        };
        let is_complete = report.rows.iter().flat_map(|row| &row.runs).all(RunResult::is_complete);
        console.report(&report)?;
        if let Some(path) = &self.plot {
            let runs: Vec<(String, &Outcome)> = report
                .rows
                .iter()
                .zip(&first)
                .filter_map(|(row, outcome)| Some((row.values.join(" "), outcome.as_ref()?)))
                .collect();
            let title = report.rows.first().and_then(|row| row.runs.first());
            let title = title.map_or(String::new(), |run| run.title.clone());
            std::fs::write(path, pictures::slowdowns(&title, &runs))
                .map_err(|error| cannot_write(path, &error))?;
        }
        Ok(if is_complete { Exit::Good } else { Exit::CheckFailed })
    }

    /// A later value of a key would replace an earlier one, and rows would name values that no run had.
    fn check_keys(&self) -> Result<(), CliError> {
        let mut keys: Vec<String> =
            self.choices.iter().map(|choices| choices.key.join(".")).collect();
        keys.extend(self.seeds.is_some().then(|| "run.seed".to_owned()));
        let twice = (1..keys.len()).find(|&at| keys[..at].contains(&keys[at]));
        twice.map_or(Ok(()), |at| {
            let key = &keys[at];
            Err(CliError::usage(format_args!("{key} is given twice"))
                .hint(format_args!("all its values belong in one option: --set {key}=A,B,C")))
        })
    }

    /// Every combination, and the runs of all.
    fn jobs(&self) -> Result<(Vec<Row>, Vec<Job>), CliError> {
        let mut combinations: Vec<Vec<Setting>> = vec![Vec::new()];
        for choices in &self.choices {
            let with = |before: &Vec<Setting>| {
                let one = |setting| before.iter().cloned().chain([setting]).collect();
                choices.settings().map(one).collect::<Vec<Vec<Setting>>>()
            };
            combinations = combinations.iter().flat_map(with).collect();
            if combinations.len() > MAX_RUNS {
                return Err(CliError::usage(format_args!("more than {MAX_RUNS} runs")));
            }
        }
        let seeds: Vec<Option<u64>> = match &self.seeds {
            None => vec![None],
            Some(seeds) => seeds.clone().take(MAX_RUNS + 1).map(Some).collect(),
        };
        if combinations.len() * seeds.len() > MAX_RUNS {
            return Err(CliError::usage(format_args!("more than {MAX_RUNS} runs")));
        }
        let mut jobs = Vec::new();
        for (row, settings) in combinations.iter().enumerate() {
            for (number, &seed) in seeds.iter().enumerate() {
                let key = || vec!["run".to_owned(), "seed".to_owned()];
                let seed = seed.map(|seed| Setting::new(key(), &seed.to_string()));
                let settings = settings.iter().cloned().chain(seed).collect();
                let is_drawn = number == 0 && self.plot.is_some();
                jobs.push(Job { row, is_drawn, settings });
            }
        }
        let row = |settings: &Vec<Setting>| Row {
            values: settings.iter().map(|setting| setting.text.clone()).collect(),
            runs: Vec::new(),
        };
        Ok((combinations.iter().map(row).collect(), jobs))
    }

    /// Threads take the next job each until there is none.
    fn run_all(
        &self,
        scenario: &Scenario,
        jobs: &[Job],
        console: &mut Console,
    ) -> Result<Vec<(RunResult, Option<Outcome>)>, CliError> {
        let cores = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = self.threads.map_or_else(cores, NonZeroUsize::get).min(jobs.len());
        let next = AtomicUsize::new(0);
        let (sender, receiver) = mpsc::sync_channel(threads);
        let mut results: Vec<Option<(RunResult, Option<Outcome>)>> =
            jobs.iter().map(|_| None).collect();
        thread::scope(|scope| {
            for _ in 0..threads {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    while let Some((place, job)) = take(next, jobs) {
                        // The receiver ends early only after an error.
                        if sender.send((place, run_one(scenario, job))).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            let mut done = 0;
            for (place, result) in receiver {
                results[place] = Some(result?);
                done += 1;
                console.progress(format_args!("{done} of {} runs", jobs.len()));
            }
            Ok::<(), CliError>(())
        })?;
        Ok(results.into_iter().flatten().collect())
    }
}

fn take<'a>(next: &AtomicUsize, jobs: &'a [Job]) -> Option<(usize, &'a Job)> {
    let place = next.fetch_add(1, Ordering::Relaxed);
    Some((place, jobs.get(place)?))
}

fn prepared(scenario: &Scenario, job: &Job) -> Result<Prepared, CliError> {
    let with = |scenario: Scenario, setting| scenario.with(setting);
    Ok(job.settings.iter().try_fold(scenario.clone(), with)?.prepare()?)
}

/// The result of a run, and its flows where they are drawn.
fn run_one(scenario: &Scenario, job: &Job) -> Result<(RunResult, Option<Outcome>), CliError> {
    let prepared = prepared(scenario, job)?;
    let before = cpu_time();
    let outcome = simulate(&prepared, Sampled::Nothing, |_| {})?;
    let result = RunResult::new(&prepared, &outcome, cpu_time() - before);
    Ok((result, job.is_drawn.then_some(outcome)))
}

/// The result of a sweep.
#[derive(Debug, Serialize)]
struct SweepReport {
    title: String,
    keys: Vec<String>,
    rows: Vec<Row>,
}

impl Report for SweepReport {
    const SCHEMA: &'static str = "dquant.sim.sweep/1";
}

/// Short flows, as everywhere in the literature.
const SHORT: Option<u64> = Some(100_000);

impl Row {
    fn mean(&self, value: impl Fn(&RunResult) -> f64) -> f64 {
        self.runs.iter().map(value).sum::<f64>() / self.runs.len().max(1) as f64
    }

    /// The mean slowdown of flows of these sizes, over the runs that have some.
    fn slowdown(&self, above: u64, up_to: Option<u64>) -> String {
        let rows: Vec<f64> =
            self.runs.iter().filter_map(|run| Some(run.row(above, up_to)?.mean)).collect();
        match rows.len() {
            0 => "-".to_owned(),
            count => format!("{:.2}", rows.iter().sum::<f64>() / count as f64),
        }
    }

    /// The 99th percentiles of short flows, over the runs that have some: their mean, and their range where there are
    /// several.
    fn short(&self) -> String {
        let p99: Vec<f64> =
            self.runs.iter().filter_map(|run| Some(run.row(0, SHORT)?.p99)).collect();
        let mean = p99.iter().sum::<f64>() / p99.len().max(1) as f64;
        let least = p99.iter().copied().fold(f64::INFINITY, f64::min);
        let most = p99.iter().copied().fold(0.0, f64::max);
        match p99.len() {
            0 => "-".to_owned(),
            1 => format!("{mean:.2}"),
            _ => format!("{mean:.2} ({least:.2}-{most:.2})"),
        }
    }
}

impl fmt::Display for SweepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: slowdowns; short: up to 100 kB, long: above 1 MB", self.title)?;
        let width = |column: usize| {
            let values = self.rows.iter().map(|row| row.values[column].len());
            values.chain([self.keys[column].len()]).max().unwrap_or(0) + 2
        };
        write!(f, "  ")?;
        for (column, key) in self.keys.iter().enumerate() {
            write!(f, "{key:<width$}", width = width(column))?;
        }
        write!(
            f,
            "{:>8}{:>11}{:>20}{:>10}{:>9}{:>10}{:>9}{:>9}{:>10}{:>10}",
            "flows",
            "short mean",
            "short p99",
            "long mean",
            "all mean",
            "Gbit/s",
            "peak kB",
            "dropped",
            "paused ms",
            "missing"
        )?;
        for row in &self.rows {
            write!(f, "\n  ")?;
            for (column, value) in row.values.iter().enumerate() {
                write!(f, "{value:<width$}", width = width(column))?;
            }
            write!(
                f,
                "{:>8.0}{:>11}{:>20}{:>10}{:>9}{:>10.1}{:>9.0}{:>9.0}{:>10.2}{:>10.0}",
                row.mean(|run| run.flows as f64),
                row.slowdown(0, SHORT),
                row.short(),
                row.slowdown(1_000_000, None),
                row.slowdown(0, None),
                row.mean(|run| run.goodput_bps as f64 / 1e9),
                row.mean(|run| run.queue_peak_bytes as f64 / 1e3),
                row.mean(|run| run.dropped as f64),
                row.mean(|run| run.paused_ns as f64 / 1e6),
                row.mean(|run| (run.unfinished + u64::from(run.failed)) as f64),
            )?;
        }
        Ok(())
    }
}
