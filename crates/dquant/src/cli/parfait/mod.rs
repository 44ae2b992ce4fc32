//! `dquant parfait`: bandwidth that jobs can count on, planned, proved and measured without a
//! cluster.

mod profile;
pub(super) mod prove;
mod shifts;
mod slurm_topology;
mod violations;

use clap::{Args, Subcommand};

use super::Console;
use crate::exit::{CliError, Exit};

/// Plan and prove bandwidth that jobs can count on, derive what they need, export topologies
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant parfait profile run.pcap
  dquant parfait prove --topology fat-tree:4 ring:8@2G mesh:4@500M
  dquant parfait prove --topology fat-tree:4 --oversubscription 4 --compare --jobs jobs.txt
  dquant parfait violations --queues 2,4,7,8
  dquant parfait shifts a:24ms:17ms+7ms@10gbit b:24ms:16ms+8ms@10gbit
  dquant parfait slurm-topology fat-tree:8 > topology.conf
  dquant parfait prove --help")]
pub(super) struct Parfait {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Profile(profile::ProfileCommand),
    SlurmTopology(slurm_topology::SlurmTopology),
    Prove(prove::Prove),
    Shifts(shifts::Shifts),
    Violations(violations::Violations),
}

impl Parfait {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Profile(profile) => profile.run(console),
            Verb::SlurmTopology(export) => export.run(console),
            Verb::Prove(prove) => prove.run(console),
            Verb::Shifts(shifts) => shifts.run(console),
            Verb::Violations(violations) => violations.run(console),
        }
    }
}
