//! `dquant job cancel`.

use std::fmt;

use clap::Args;
use serde::Serialize;

use super::caller;
use crate::cli::cluster::BrainsArgs;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Give back what a job has
///
/// Its processes are not touched: what they send has no guarantee any more. Jobs that had lost theirs
/// get it back where there is room now, and are named.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant job cancel llm
  dquant job cancel 17 --force      a job of somebody else"
)]
pub(super) struct Cancel {
    /// The job's name or number
    job: String,

    /// Also if somebody else submitted it
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    brains: BrainsArgs,
}

#[derive(Debug, Serialize)]
struct Cancelled {
    job: u64,
    /// Degraded jobs that have their guarantee again by that.
    restored: Vec<Restored>,
}

#[derive(Debug, Serialize)]
struct Restored {
    job: u64,
    name: String,
    /// Where its workers are now.
    hosts: Vec<String>,
}

impl Report for Cancelled {
    const SCHEMA: &'static str = "dquant.job-cancelled/1";
}

impl fmt::Display for Cancelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {} is released", self.job)?;
        for Restored { job, name, hosts } in &self.restored {
            write!(f, "\njob {job} '{name}' has its guarantee again, on {}", hosts.join(" "))?;
        }
        Ok(())
    }
}

impl Cancel {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let owner = if self.force { String::new() } else { caller() };
        let (number, name) = match self.job.parse::<u64>() {
            Ok(number) => (number, ""),
            Err(_) => (0, self.job.as_str()),
        };
        let (outcome, held) = self.brains.call(async |client| {
            let outcome = client.release(number, name, &owner).await?;
            let has_more = outcome.as_ref().is_ok_and(|released| !released.restored.is_empty());
            let held = if has_more { client.topology().await?.held } else { Vec::new() };
            Ok((outcome, held))
        })?;
        let released = outcome.map_err(|reason| {
            CliError::check_failed(reason)
                .hint("`dquant job list` shows jobs and owners; --force releases any")
        })?;
        // One that is cancelled meanwhile is not there any more.
        let restored = held.into_iter().filter(|held| released.restored.contains(&held.job));
        let restored = restored.map(|held| {
            let mut hosts: Vec<String> = held.pieces.into_iter().map(|piece| piece.host).collect();
            hosts.dedup();
            Restored { job: held.job, name: held.name, hosts }
        });
        console.report(&Cancelled { job: released.job, restored: restored.collect() })?;
        Ok(Exit::Good)
    }
}
