//! `dquant sim compare`: samples of a simulated and of a real wire beside each other.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use lab::input;
use lab::trace::compare::{Figures, Row, Run, picture, rows};
use lab::trace::{Sample, file};
use serde::Serialize;

use super::super::{Console, Report};
use super::run::cannot_write;
use crate::exit::{CliError, Exit};

/// Largest file of samples that is read.
const MAX_FILE: u64 = 128 << 20;

/// Compare a simulated run with a measured one: throughput, windows and round-trip times
///
/// `dquant sim run --samples` and `dquant perf --samples` write what both need. Flows are numbered in the
/// order in which they begin. A phase is a span in which the same flows are under way; figures are of its
/// second half.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant sim run scenarios/slow-link.toml --samples simulated.csv
  dquant perf 10.0.0.5 write --cc delay --samples first.csv
  dquant sim compare --simulated simulated.csv --measured first.csv second.csv --plot both.svg"
)]
pub(super) struct CompareCommand {
    /// Samples of the simulation
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    simulated: Vec<PathBuf>,

    /// Samples of a real wire; those of several senders need one clock, that of one machine
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    measured: Vec<PathBuf>,

    /// Title of the picture
    #[arg(long, default_value = "One control on two wires")]
    title: String,

    /// Draw both side by side, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

impl CompareCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let [simulated, measured] = [&self.simulated, &self.measured].map(|files| {
            let samples: Result<Vec<_>, _> = files.iter().map(|file| read(file)).collect();
            samples.map(|samples| Run::of(&samples))
        });
        let (simulated, measured) = (simulated?, measured?);
        let rows = rows(&simulated, &measured).map_err(|error| {
            CliError::from_cause(error).hint("start and end the same flows in the same order")
        })?;
        if let Some(path) = &self.plot {
            let picture = picture(&self.title, &simulated, &measured);
            fs::write(path, picture).map_err(|error| cannot_write(path, &error))?;
        }
        console.report(&Compared { rows })?;
        Ok(Exit::Good)
    }
}

fn read(path: &Path) -> Result<Vec<Sample>, CliError> {
    file::read(&input::read(path, MAX_FILE)?).map_err(|error| {
        CliError::because(format_args!("{} has no samples", path.display()), &error)
    })
}

#[derive(Serialize)]
struct Compared {
    rows: Vec<Row>,
}

impl Report for Compared {
    const SCHEMA: &'static str = "dquant.sim.compare/1";
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>5} {:>17} {:>4} {:>18} {:>18} {:>18}\n{:>5} {:>8} {:>8} {:>4}",
            "phase", "seconds", "flow", "Mbit/s", "RTT, ms", "window", "", "sim", "wire", ""
        )?;
        for _ in 0..3 {
            write!(f, " {:>9} {:>8}", "sim", "wire")?;
        }
        for row in &self.rows {
            let [simulated, measured] = row.seconds;
            write!(f, "\n{:>5} {simulated:>8.2} {measured:>8.2} {:>4}", row.phase, row.flow)?;
            let values: [fn(&Figures) -> f64; 3] =
                [|of| of.mbps, |of| of.rtt_ms, |of| of.window_packets];
            for (value, digits) in values.into_iter().zip([1, 2, 0]) {
                let [simulated, measured] = [&row.simulated, &row.measured].map(value);
                write!(f, " {simulated:>9.digits$} {measured:>8.digits$}")?;
            }
        }
        Ok(())
    }
}
