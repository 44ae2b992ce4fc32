//! `dquant job cancel`.

use std::fmt;

use clap::Args;
use serde::Serialize;
use service::text::one_line;

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
    /// Empty, as its hosts, if the brain could not be asked about it.
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
            match &hosts[..] {
                [] => write!(f, "\njob {job} has its guarantee again")?,
                hosts => {
                    let hosts = hosts.join(" ");
                    write!(f, "\njob {job} '{name}' has its guarantee again, on {hosts}")?;
                }
            }
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
            // The job is released, whatever becomes of this question.
            let held = match has_more {
                true => client.topology().await.map(|reply| reply.held).unwrap_or_default(),
                false => Vec::new(),
            };
            Ok((outcome, held))
        })?;
        let released = outcome.map_err(|refused| {
            CliError::check_failed(one_line(&refused.text))
                .hint("`dquant job list` shows jobs and owners; --force releases any")
        })?;
        let restored = released.restored.iter().map(|job| {
            // One that is cancelled meanwhile is not there any more.
            let held = held.iter().find(|held| held.job == *job);
            let name = held.map_or_else(String::new, |held| held.name.clone());
            let pieces = held.map_or(&[][..], |held| &held.pieces);
            let mut hosts: Vec<String> = pieces.iter().map(|piece| piece.host.clone()).collect();
            hosts.dedup();
            Restored { job: *job, name, hosts }
        });
        console.report(&Cancelled { job: released.job, restored: restored.collect() })?;
        Ok(Exit::Good)
    }
}
