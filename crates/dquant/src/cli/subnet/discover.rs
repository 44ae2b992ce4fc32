//! `dquant subnet discover`: what an InfiniBand fabric consists of, asked by directed routes.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ::topology::graph::{Capacity, Topology};
use clap::Args;
use lab::topology::written;
use serde::Serialize;
use subnet::discovery::Discovery;
use subnet::exchange::Requester;
use subnet::mad::{NodeType, PortInfo};

use super::super::{Console, Report};
use super::plan;
use super::port::{self, PortArgs, write_complaints};
use crate::exit::{CliError, Exit};

/// Find the nodes and links of the InfiniBand fabric that this machine is connected to
///
/// By directed-route SMPs, which only read: no subnet manager is needed, and none is disturbed. The M_Key
/// is 0, so ports that protect themselves stay silent. Needs read and write access to the umad file of
/// the device, usually root's. Links of a written file are 100 Gbit/s and 1 us, whatever they are.
///
/// On ibsim, a simulator: ibsim-run dquant subnet discover
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Exit code 1: a part of the fabric did not respond, or does not fit together.

Examples:
  dquant subnet discover
  dquant subnet discover --nodes
  dquant subnet discover --device mlx5_0 --port 1 --write cluster.net
  dquant subnet discover --write cluster.net && dquant subnet plan cluster.net"
)]
pub(super) struct Discover {
    #[command(flatten)]
    port: PortArgs,

    /// Write it: .net (ibsim), .toml, .dot (Graphviz), .ns3 (ns-3), .topo (csg-htsim), .svg (a picture)
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,

    /// List nodes with GUID, LID and name: adapters with each of their ports, switches with port 0
    #[arg(long)]
    nodes: bool,
}

impl Discover {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if let Some(path) = &self.write {
            written::check_name(path)?;
        }
        let started = Instant::now();
        let mut umad = self.port.open()?;
        let mut discovery = Discovery::new();
        port::run(&mut umad, &mut discovery, console, "discovering")?;
        let topology = discovery.topology(Capacity::default()).map_err(CliError::from_cause)?;
        if let Some(path) = &self.write {
            plan::write(&topology, path)?;
        }
        let mut report = DiscoverReport::new(&discovery, &topology, started.elapsed());
        if self.nodes {
            report.nodes = Some(nodes(&discovery));
        }
        console.report(&report)?;
        Ok(if report.complaints.is_empty() { Exit::Good } else { Exit::CheckFailed })
    }
}

/// See [`Discover`].
#[derive(Debug, Serialize)]
struct DiscoverReport {
    hosts: usize,
    switches: usize,
    links: usize,
    /// Datagrams sent, repeated ones too.
    sent: u64,
    /// Responses that were not used, by reason.
    unasked: u64,
    mismatched: u64,
    malformed: u64,
    complaints: Vec<String>,
    complaints_left_out: u64,
    wall_ns: u64,
    /// If they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<Vec<NodeReport>>,
}

/// A port of an adapter, or a switch.
#[derive(Debug, Serialize)]
struct NodeReport {
    kind: &'static str,
    guid: String,
    port: u8,
    lid: u16,
    name: String,
}

fn nodes(discovery: &Discovery) -> Vec<NodeReport> {
    let ends = discovery.nodes().iter().flat_map(|(guid, node)| {
        let (is_switch, kind) = match node.info.node_type {
            NodeType::Switch => (true, "switch"),
            NodeType::ChannelAdapter => (false, "adapter"),
            NodeType::Router => (false, "router"),
        };
        let ports = node.ports.iter().filter(move |(port, _)| (**port == 0) == is_switch);
        ports.map(move |(port, info)| NodeReport {
            kind,
            guid: format!("{guid:#018x}"),
            port: *port,
            lid: PortInfo::parse(info).lid,
            name: node.description.clone(),
        })
    });
    ends.collect()
}

impl DiscoverReport {
    fn new(discovery: &Discovery, topology: &Topology, wall: Duration) -> DiscoverReport {
        let (complaints, complaints_left_out) = discovery.complaints();
        let discarded = discovery.discarded();
        DiscoverReport {
            hosts: topology.hosts().count(),
            switches: topology.switches().count(),
            links: topology.links().count(),
            sent: discovery.sent(),
            unasked: discarded.unasked,
            mismatched: discarded.mismatched,
            malformed: discarded.malformed,
            complaints: complaints.iter().map(ToString::to_string).collect(),
            complaints_left_out,
            wall_ns: wall.as_nanos() as u64,
            nodes: None,
        }
    }
}

impl Report for DiscoverReport {
    const SCHEMA: &'static str = "dquant.subnet.discover/1";
}

impl fmt::Display for DiscoverReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiscoverReport { hosts, switches, links, sent, .. } = self;
        let ms = self.wall_ns as f64 / 1e6;
        write!(
            f,
            "{hosts} hosts, {switches} switches, {links} links; {sent} datagrams in {ms:.1} ms"
        )?;
        let unused = self.unasked + self.mismatched + self.malformed;
        if unused > 0 {
            write!(
                f,
                "\n{unused} responses were not used: {} late or of others, {} for another request, {} malformed",
                self.unasked, self.mismatched, self.malformed
            )?;
        }
        if let Some(nodes) = &self.nodes {
            write!(f, "\n\n{:<9}{:<20}{:>4}{:>7}  name", "kind", "GUID", "port", "LID")?;
            for NodeReport { kind, guid, port, lid, name } in nodes {
                write!(f, "\n{kind:<9}{guid:<20}{port:>4}{lid:>7}  {name}")?;
            }
        }
        write_complaints(f, &self.complaints, self.complaints_left_out)
    }
}
