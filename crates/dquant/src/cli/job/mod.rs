//! `dquant job`: training jobs and the bandwidth that they count on.

mod replay;

use clap::{Args, Subcommand};

use super::Console;
use crate::exit::{CliError, Exit};

/// Training jobs: replay one over the network.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant job replay ring:3@100M --all
  dquant job replay ring:3@100M --rank 0 --peers 10.0.0.1,10.0.0.2,10.0.0.3
  dquant job replay --help")]
pub(super) struct Job {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Replay(replay::Replay),
}

impl Job {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Replay(replay) => replay.run(console),
        }
    }
}
