//! `dquant parfait slurm-topology`: a fabric as SLURM reads it ([`cluster::slurm`]).

use std::fmt;

use ::topology::graph::Capacity;
use clap::Args;
use cluster::slurm::{ExportError, topology_conf};
use lab::topology;
use serde::Serialize;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Write topology.conf of SLURM (TopologyPlugin=topology/tree) for a fabric
///
/// TOPOLOGY is a file or a rule, as for `dquant subnet plan`. Hosts that share their switches of a level are
/// below one switch of the file; hosts have the names that they have in the topology, which must be those of
/// SLURM's nodes. A fabric that is no tree, such as a torus, is refused; --closest groups its hosts by their
/// first switches, and says nothing of how far these are from each other.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant parfait slurm-topology cluster.toml > /etc/slurm/topology.conf
  dquant parfait slurm-topology fat-tree:8
  dquant parfait slurm-topology torus:4x4:2 --closest"
)]
pub(super) struct SlurmTopology {
    /// A file, or a rule
    topology: String,

    /// Write the closest tree of a fabric that is none
    #[arg(long)]
    closest: bool,
}

impl SlurmTopology {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let topology = topology::named(&self.topology, Capacity::default())?;
        let exported = topology_conf(&topology, self.closest).map_err(|error| {
            let refusal = CliError::because(&self.topology, &error);
            match error {
                ExportError::NoTree => refusal.hint("--closest writes that one"),
                _ => refusal,
            }
        })?;
        if exported.is_closest {
            console.note("the fabric is no tree; this groups hosts by their first switches");
        }
        console.report(&Conf { text: exported.text, closest: exported.is_closest })?;
        Ok(Exit::Good)
    }
}

/// The file.
#[derive(Debug, Serialize)]
struct Conf {
    text: String,
    closest: bool,
}

impl Report for Conf {
    const SCHEMA: &'static str = "dquant.parfait.slurm-topology/1";
}

impl fmt::Display for Conf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text.trim_end())
    }
}
