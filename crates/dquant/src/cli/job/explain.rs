//! `dquant job explain`: what a job gets of its links, and who has the rest ([`cluster::explain`]).

use std::fmt;

use clap::Args;
use cluster::explain::{Explanation, explain};
use cluster::words::rate;
use serde::Serialize;

use crate::cli::cluster::BrainsArgs;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Links that are shown as text.
const SHOWN_LINKS: usize = 8;

/// Show what a job gets of each of its links, and which jobs have the rest
///
/// For every link that the job sends over: what it has reserved, what it was measured to send in the
/// last second, what waits there, and who else sends. For a job that says its cycle: when its exchanges
/// may begin, and with which jobs it takes turns, or why it has no such time. Measured are links whose sending end has an
/// agent: hosts, and switches named by the brain's --switch-agents.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant job explain llm
  dquant job explain 17 --json"
)]
pub(super) struct Explain {
    /// The job's name or number
    job: String,

    #[command(flatten)]
    brains: BrainsArgs,
}

/// What is said of a job, for people and programs.
#[derive(Debug, Serialize)]
#[serde(transparent)]
struct Explained(Explanation);

impl Report for Explained {
    const SCHEMA: &'static str = "dquant.job-explanation/1";
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explanation { job, name, owner, request, state, .. } = &self.0;
        writeln!(f, "job {job} '{name}' of {owner}: {request}, {state}")?;
        write!(f, "who took its bandwidth?")?;
        for line in &self.0.verdict {
            write!(f, "\n  {line}")?;
        }
        if let Some(turns) = &self.0.turns {
            write!(f, "\nturns: {turns}")?;
        }
        // Links where something is wrong come first.
        for link in self.0.links.iter().take(SHOWN_LINKS) {
            let used = link.used_bps.map_or_else(|| "not measured".to_owned(), rate);
            write!(f, "\n{} -> {}, {}", link.from, link.to, rate(link.capacity_bps))?;
            write!(
                f,
                "\n  {:24} guaranteed {:>12}, sends {used:>12}",
                "this job",
                rate(link.reserved_bps)
            )?;
            if link.backlog_bytes >= 1000 {
                write!(f, ", {} kB wait", link.backlog_bytes / 1000)?;
            }
            if link.dropped_packets > 0 {
                write!(f, ", {} packets dropped", link.dropped_packets)?;
            }
            for other in &link.others {
                let used = other.used_bps.map_or_else(|| "not measured".to_owned(), rate);
                let who = format!("job {} '{}'", other.job, other.name);
                write!(
                    f,
                    "\n  {who:24} guaranteed {:>12}, sends {used:>12}",
                    rate(other.reserved_bps)
                )?;
            }
        }
        match self.0.links.len().saturating_sub(SHOWN_LINKS) {
            0 => Ok(()),
            more => write!(f, "\n{more} more links: --json shows all"),
        }
    }
}

impl Explain {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let view = self.brains.call(async |client| Ok(client.view().await?.cleaned()))?;
        let number = self.job.parse::<u64>().ok();
        let job = view.jobs.iter().find(|job| Some(job.id) == number || job.name == self.job);
        let job = job.ok_or_else(|| {
            CliError::usage(format!("there is no job '{}'", self.job))
                .hint("`dquant job list` shows all")
        })?;
        console.report(&Explained(explain(&view, job)))?;
        Ok(Exit::Good)
    }
}
