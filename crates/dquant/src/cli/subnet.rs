//! `dquant subnet`: what a fabric of switches consists of, and how it is routed ([`mod@topology`],
//! [`mod@::subnet`]).

mod discover;
mod manage;
mod plan;
mod port;
mod status;
mod sweep;

use clap::{Args, Subcommand};

use super::Console;
use crate::exit::{CliError, Exit};

pub(super) use plan::Name as EngineName;

/// Discover, route, set up and manage an InfiniBand fabric; compare routing engines on any topology.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant subnet plan fat-tree:8
  dquant subnet plan torus:6x6:4 --engine balanced
  dquant subnet discover --write cluster.net
  dquant subnet sweep
  dquant subnet manage --priority 3
  dquant subnet status
  dquant subnet plan --help")]
pub(super) struct Subnet {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Plan(plan::Plan),
    Discover(discover::Discover),
    Sweep(sweep::Sweep),
    Manage(manage::Manage),
    Status(status::StatusCommand),
}

impl Subnet {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Plan(plan) => plan.run(console),
            Verb::Discover(discover) => discover.run(console),
            Verb::Sweep(sweep) => sweep.run(console),
            Verb::Manage(manage) => manage.run(console),
            Verb::Status(status) => status.run(console),
        }
    }
}
