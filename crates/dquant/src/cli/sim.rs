//! `dquant sim`: the transport in virtual time ([`sim`]).
//!
//! The simulations are pure functions of their seeds; this module has the command line, the threads
//! that run several seeds at once, and the tables.

mod chaos;
mod compare;
mod deadlock;
mod goodput;
mod incast;
mod run;
mod sweep;

use clap::{Args, Subcommand};

use super::Console;
use crate::exit::{CliError, Exit};

/// Run the transport in virtual time: scenarios, random programs under faults, incasts, deadlocks.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant sim chaos --seeds 0..2000
  dquant sim goodput --loss 1%
  dquant sim incast --senders 10 --cc dcqcn-mlnx
  dquant sim run scenarios/web-search.toml
  dquant sim sweep scenarios/web-search.toml --set transport.control=hpcc,advertised
  dquant sim deadlock --topology torus:4x4:2
  dquant sim chaos --help")]
pub(super) struct Sim {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Chaos(chaos::Chaos),
    Compare(compare::CompareCommand),
    Deadlock(deadlock::Deadlock),
    Goodput(goodput::GoodputCommand),
    Incast(incast::IncastCommand),
    Run(run::RunCommand),
    Sweep(sweep::SweepCommand),
}

impl Sim {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Chaos(chaos) => chaos.run(console),
            Verb::Compare(compare) => compare.run(console),
            Verb::Deadlock(deadlock) => deadlock.run(console),
            Verb::Goodput(goodput) => goodput.run(console),
            Verb::Incast(incast) => incast.run(console),
            Verb::Run(run) => run.run(console),
            Verb::Sweep(sweep) => sweep.run(console),
        }
    }
}
