//! `dquant sim run`: the simulation that a file describes.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use clap::Args;
use lab::scenario::pictures;
use lab::scenario::result::RunResult;
use lab::scenario::run::{Progress, Sampled, run, samples};
use lab::scenario::{Prepared, Scenario, Setting};
use lab::trace::file;
use serde::Serialize;
use sim::traffic::Outcome;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit, OUTPUT_HINT};

/// Run a scenario: a network, its hosts and their traffic from one file
///
/// Prints how long flows took beside the same flow in an empty network (slowdown), by size; goodput,
/// queues, pauses and drops; what faults did, if the scenario has some; and what the simulation cost. The
/// result is a function of the file and its seed.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Exit code 1: flows had not arrived at the deadline, or their connection failed.

Examples:
  dquant sim run scenarios/web-search.toml
  dquant sim run scenarios/incast.toml --set transport.control=hpcc --set workload.senders=63
  dquant sim run scenarios/permutation.toml --set switches.routing=ecmp --plot pictures --json
  dquant sim run scenarios/failover.toml --set faults.0.for=5ms"
)]
pub(super) struct RunCommand {
    /// The scenario, in TOML; docs/scenarios.md has every table
    file: PathBuf,

    /// Replace a value of the scenario, or add one
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = Setting::parse)]
    settings: Vec<Setting>,

    /// Write pictures into this directory: queues.svg, slowdowns.svg, links.svg
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,

    /// Write windows, rates and round-trip times of all flows over time, as CSV: for at most 64 flows
    #[arg(long, value_name = "FILE")]
    samples: Option<PathBuf>,
}

/// Most flows whose windows and rates are written.
const MOST_SAMPLED: usize = 64;

impl RunCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let mut scenario = Scenario::read(&self.file)?;
        for setting in &self.settings {
            scenario = scenario.with(setting)?;
        }
        let prepared = scenario.prepare()?;
        if let Some(folder) = &self.plot {
            fs::create_dir_all(folder).map_err(|error| cannot_write(folder, &error))?;
        }
        let flows = prepared.flows.len();
        if self.samples.is_some() && flows > MOST_SAMPLED {
            return Err(CliError::usage(format_args!(
                "--samples is for at most {MOST_SAMPLED} flows; this scenario has {flows}"
            )));
        }
        let sampled = match (&self.samples, &self.plot) {
            (Some(_), _) => Sampled::Flows,
            (None, Some(_)) => Sampled::Queues,
            (None, None) => Sampled::Nothing,
        };
        let (result, outcome) = run(&prepared, sampled, |Progress { now, left, flows }| {
            let ms = now.as_nanos() as f64 / 1e6;
            console.progress(format_args!("{ms:.3} ms simulated, {left} of {flows} flows left"));
        })?;
        if let Some(folder) = &self.plot {
            draw(folder, &prepared, &outcome)?;
        }
        if let Some(path) = &self.samples {
            write_samples(path, &prepared, &outcome)?;
        }
        console.report(&RunReport { result: &result })?;
        Ok(if result.is_complete() { Exit::Good } else { Exit::CheckFailed })
    }
}

/// Writes the pictures of a run.
fn draw(folder: &Path, prepared: &Prepared, outcome: &Outcome) -> Result<(), CliError> {
    let title = format!("{}: {}", prepared.title, prepared.control);
    let pictures = [
        ("queues.svg", pictures::queues(&title, prepared, outcome)),
        ("slowdowns.svg", pictures::slowdowns(&title, &[(prepared.control.clone(), outcome)])),
        ("links.svg", pictures::links(prepared, outcome)),
    ];
    for (name, picture) in pictures {
        let path = folder.join(name);
        fs::write(&path, picture).map_err(|error| cannot_write(&path, &error))?;
    }
    Ok(())
}

/// Writes the samples of flows.
fn write_samples(path: &Path, prepared: &Prepared, outcome: &Outcome) -> Result<(), CliError> {
    let text = file::write(&samples(prepared, outcome));
    fs::write(path, text).map_err(|error| cannot_write(path, &error))
}

pub(super) fn cannot_write(path: &Path, error: &io::Error) -> CliError {
    CliError::because(format_args!("cannot write {}", path.display()), error).hint(OUTPUT_HINT)
}

#[derive(Serialize)]
struct RunReport<'a> {
    #[serde(flatten)]
    result: &'a RunResult,
}

impl fmt::Display for RunReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.result.fmt(f)
    }
}

impl Report for RunReport<'_> {
    const SCHEMA: &'static str = "dquant.sim.run/1";
}
