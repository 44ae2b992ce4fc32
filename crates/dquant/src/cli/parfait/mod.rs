//! `dquant parfait`: what jobs need of a network, and what networks have for them ([`parfait`]).

mod profile;
mod slurm_topology;

use clap::{Args, Subcommand};

use super::Console;
use crate::exit::{CliError, Exit};

/// Derive what a job needs of the network; export topologies to schedulers
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant parfait profile run.pcap
  dquant parfait profile counters.csv --communication 20ms
  dquant parfait slurm-topology fat-tree:8 > topology.conf
  dquant parfait profile --help")]
pub(super) struct Parfait {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Profile(profile::ProfileCommand),
    SlurmTopology(slurm_topology::SlurmTopology),
}

impl Parfait {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Profile(profile) => profile.run(console),
            Verb::SlurmTopology(export) => export.run(console),
        }
    }
}
