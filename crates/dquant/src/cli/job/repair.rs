//! `dquant job down`, `up` and `defragment`: jobs that get other hosts.

use std::fmt;

use clap::Args;
use cluster::proto::Repaired;
use cluster::words::counted;
use parfait::log::Refused;
use serde::Serialize;
use service::text::one_line;

use crate::cli::cluster::BrainsArgs;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Say that hosts, switches or links are down: jobs that are hit get other hosts
///
/// Others stay where they are. A job that finds no place keeps its own and is degraded: it has no
/// guarantee until there is room. Agents report ports without a carrier themselves, and when it is
/// back; what no agent saw go down stays so until `dquant job up`.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant job down host3
  dquant job down leaf0:17 --most 8      the link at port 17 of leaf0; at most 8 workers move"
)]
pub(super) struct Down {
    #[command(flatten)]
    parts: Parts,
}

/// Say that hosts, switches or links are back
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant job up host3
  dquant job up leaf0:17")]
pub(super) struct Up {
    #[command(flatten)]
    parts: Parts,
}

/// Move jobs so that there is more room for those to come
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant job defragment --most 16")]
pub(super) struct Defragment {
    /// Most workers that get another host
    #[arg(long, value_name = "N", default_value_t = 64)]
    most: u32,

    #[command(flatten)]
    brains: BrainsArgs,
}

#[derive(Debug, Args)]
struct Parts {
    /// Hosts and switches by name, links as NAME:PORT of one of their ends
    #[arg(required = true, value_name = "PART")]
    parts: Vec<String>,

    /// Most workers that get another host
    #[arg(long, value_name = "N", default_value_t = 4096)]
    most: u32,

    #[command(flatten)]
    brains: BrainsArgs,
}

impl Parts {
    fn run(self, is_down: bool, console: &mut Console) -> Result<Exit, CliError> {
        let repaired = self
            .brains
            .call(async |client| client.outage(&self.parts, is_down, self.most).await)?;
        report(repaired, console)
    }
}

impl Down {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        self.parts.run(true, console)
    }
}

impl Up {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        self.parts.run(false, console)
    }
}

impl Defragment {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let repaired = self.brains.call(async |client| client.defragment(self.most).await)?;
        report(repaired, console)
    }
}

/// Jobs without their guarantee fail the command's check.
fn report(repaired: Result<Repaired, Refused>, console: &mut Console) -> Result<Exit, CliError> {
    let Repaired { hit, moved, degraded } = repaired.map_err(|refused| {
        CliError::check_failed(one_line(&refused.text))
            .hint("`dquant top --cluster` shows what is down")
    })?;
    console.report(&RepairReport { hit, moved, degraded })?;
    Ok(if degraded == 0 { Exit::Good } else { Exit::CheckFailed })
}

#[derive(Debug, Serialize)]
struct RepairReport {
    hit: u32,
    moved: u32,
    degraded: u32,
}

impl Report for RepairReport {
    const SCHEMA: &'static str = "dquant.job-repair/1";
}

impl fmt::Display for RepairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RepairReport { hit, moved, degraded } = self;
        let [hit, degraded] = [hit, degraded].map(|jobs| counted(*jobs, "job"));
        write!(f, "{hit} hit, {} moved, {degraded} degraded", counted(*moved, "worker"))
    }
}
