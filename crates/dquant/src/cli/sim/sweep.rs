//! `dquant sim sweep`: a scenario with every combination of some values, on all cores.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;

use clap::Args;
use lab::scenario::result::RunResult;
use lab::scenario::sweep::{Choices, Row, Short, Sweep, SweepError};
use lab::scenario::{Scenario, pictures};
use serde::Serialize;
use sim::traffic::Outcome;

use super::super::{Console, Report};
use super::chaos::parse_seeds;
use super::run::cannot_write;
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

impl SweepCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let scenario = Scenario::read(&self.file)?;
        let sweep = Sweep::of(&self.choices, self.seeds.clone()).map_err(refused)?;
        sweep.check(&scenario)?;
        if let Some(path) = &self.plot {
            std::fs::write(path, "").map_err(|error| cannot_write(path, &error))?;
        }
        let results = sweep.run(&scenario, self.threads, self.plot.is_some(), |done, all| {
            console.progress(format_args!("{done} of {all} runs"));
        })?;
        let (rows, first): (Vec<Row>, Vec<Option<Outcome>>) = results.into_iter().unzip();
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
}

fn refused(error: SweepError) -> CliError {
    let refusal = CliError::usage(&error);
    match error {
        SweepError::Twice(key) => {
            refusal.hint(format_args!("all its values belong in one option: --set {key}=A,B,C"))
        }
        SweepError::TooMany => refusal,
    }
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

/// A mean slowdown; none where no flow has one.
fn slowdown(mean: Option<f64>) -> String {
    mean.map_or("-".to_owned(), |mean| format!("{mean:.2}"))
}

/// The mean of the 99th percentiles, and their range where there are several.
fn short(p99: Option<Short>) -> String {
    match p99 {
        None => "-".to_owned(),
        Some(Short { mean, runs: 1, .. }) => format!("{mean:.2}"),
        Some(Short { mean, range: (least, most), .. }) => {
            format!("{mean:.2} ({least:.2}-{most:.2})")
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
                slowdown(row.short_slowdown()),
                short(row.short_p99()),
                slowdown(row.slowdown(1_000_000, None)),
                slowdown(row.slowdown(0, None)),
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
