//! `dquant job watch`: what happens in the cluster, as it happens.

use std::fmt;

use clap::Args;
use cluster::client::{Client, Watch as Watching};
use cluster::proto::Event;
use serde::Serialize;
use service::text::one_line;

use crate::cli::cluster::BrainsArgs;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Print events of the cluster as they happen, until interrupted or for --count of them
///
/// Admissions, releases, refusals, leaders, agents and alarms. When the leader changes, its events
/// begin anew.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant job watch
  dquant job watch --count 10 --json"
)]
pub(super) struct Watch {
    /// End after so many events
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    #[command(flatten)]
    brains: BrainsArgs,
}

#[derive(Debug, Serialize)]
struct Happened {
    number: u64,
    unix_ms: u64,
    kind: String,
    job: Option<u64>,
    text: String,
}

impl Report for Happened {
    const SCHEMA: &'static str = "dquant.cluster-event/1";
}

impl fmt::Display for Happened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6}  {:9}  {}", self.number, self.kind, self.text)
    }
}

impl Watch {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let mut watch = Watching::new(Client::new(self.brains.brains()?)?);
        let runtime = service::runtime::current_thread()?;
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0 {
            let Event { number, unix_ms, kind, job, text } = runtime.block_on(watch.next())?;
            // Notes of agents are in it.
            let (kind, text) = (one_line(&kind).into_owned(), one_line(&text).into_owned());
            console.report(&Happened { number, unix_ms, kind, job, text })?;
            left -= 1;
        }
        Ok(Exit::Good)
    }
}
