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
/// Its processes are not touched: what they send has no guarantee any more.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant job cancel llm
  dquant job cancel 17 --force      a job of somebody else")]
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
}

impl Report for Cancelled {
    const SCHEMA: &'static str = "dquant.job-cancelled/1";
}

impl fmt::Display for Cancelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {} is released", self.job)
    }
}

impl Cancel {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let owner = if self.force { String::new() } else { caller() };
        let (number, name) = match self.job.parse::<u64>() {
            Ok(number) => (number, ""),
            Err(_) => (0, self.job.as_str()),
        };
        let outcome =
            self.brains.call(async |client| client.release(number, name, &owner).await)?;
        let job = outcome.map_err(|reason| {
            CliError::check_failed(reason)
                .hint("`dquant job list` shows jobs and owners; --force releases any")
        })?;
        console.report(&Cancelled { job })?;
        Ok(Exit::Good)
    }
}
