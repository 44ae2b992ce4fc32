//! `dquant job submit`.

use std::fmt;

use clap::Args;
use cluster::proto::Held;
use parfait::job::Job;
use serde::Serialize;

use super::caller;
use crate::cli::cluster::BrainsArgs;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Ask for hosts and bandwidth for a job
///
/// The job is admitted as a whole, once that is durable, or refused with what is missing: which link
/// lacks how much.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant job submit 'ring:8@5G' --name llm
  dquant job submit 'parallel:8x4x2@20G,2G,5G' --name gpt --brain 10.0.0.5,10.0.0.6
  dquant job submit 'mesh:16@1G' --name moe --try      where it would go, without admitting it"
)]
pub(super) struct Submit {
    /// The job: its pattern, the rate of its edges, and options such as slots=2
    job: String,

    /// Its name: letters, digits, '.', '_' and '-'; no other running job has it
    #[arg(long, value_name = "NAME")]
    name: String,

    /// Only say where it would go
    #[arg(long = "try")]
    is_trial: bool,

    #[command(flatten)]
    brains: BrainsArgs,
}

impl Submit {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        self.job.parse::<Job>().map_err(|error| {
            CliError::from_cause(error).hint("docs/parfait.md has all patterns: ring:8@5G is one")
        })?;
        let owner = caller();
        let (name, job) = (&self.name, &self.job);
        if self.is_trial {
            let placed = self.brains.call(async |client| client.place(name, &owner, job).await)?;
            let report = PlacedReport::new(None, &placed.0.map_err(refused)?);
            console.report(&report)?;
            return Ok(Exit::Good);
        }
        let (outcome, held) = self.brains.call(async |client| {
            let outcome = client.submit(name, &owner, job, None).await?;
            // Another client may have released it since: then there is nothing to show but its number.
            let held = if outcome.is_ok() { client.topology().await?.held } else { Vec::new() };
            Ok((outcome, held))
        })?;
        let number = outcome.map_err(refused)?;
        let held = held.into_iter().find(|held| held.job == number).unwrap_or_default();
        console.report(&PlacedReport::new(Some(number), &held))?;
        Ok(Exit::Good)
    }
}

fn refused(reason: String) -> CliError {
    let hint = match reason.contains(" is called '") {
        true => "choose another --name: running jobs differ in theirs (`dquant job list`)",
        false => "ask for less, cancel another job (`dquant job list`), or wait for one to end",
    };
    CliError::check_failed(format!("not admitted: {reason}")).hint(hint)
}

/// Where a job is, or would be.
#[derive(Debug, Serialize)]
struct PlacedReport {
    /// Its number, if it is admitted.
    job: Option<u64>,
    name: String,
    dscp: u32,
    order: String,
    workers: Vec<Workers>,
}

/// Consecutive workers on a host.
#[derive(Debug, Serialize)]
struct Workers {
    host: String,
    first: u32,
    last: u32,
}

impl PlacedReport {
    fn new(job: Option<u64>, held: &Held) -> PlacedReport {
        let workers = held.pieces.iter().map(|piece| Workers {
            host: piece.host.clone(),
            first: piece.first,
            last: (piece.first + piece.count).saturating_sub(1),
        });
        let (name, order) = (held.name.clone(), held.order.clone());
        PlacedReport { job, name, dscp: held.dscp, order, workers: workers.collect() }
    }
}

impl Report for PlacedReport {
    const SCHEMA: &'static str = "dquant.job-placed/1";
}

impl fmt::Display for PlacedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.job {
            Some(job) => write!(f, "job {job} '{}' is admitted: DSCP {}", self.name, self.dscp)?,
            None => write!(f, "'{}' would be admitted", self.name)?,
        }
        for Workers { host, first, last } in &self.workers {
            match first == last {
                true => write!(f, "\n  worker {first} on {host}")?,
                false => write!(f, "\n  workers {first} to {last} on {host}")?,
            }
        }
        Ok(())
    }
}
