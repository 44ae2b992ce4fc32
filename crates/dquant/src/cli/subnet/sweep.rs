//! `dquant subnet sweep`: sets an InfiniBand fabric up once.

use std::fmt;
use std::time::Instant;

use ::topology::channels::Channels;
use ::topology::graph::Capacity;
use ::topology::lanes::Lanes;
use ::topology::validator::validate;
use clap::Args;
use serde::Serialize;
use subnet::discovery::Discovery;
use subnet::exchange::Requester;
use subnet::setup::Setup;

use super::super::{Console, Report};
use super::plan::Name;
use super::port::{self, PortArgs, write_complaints};
use crate::exit::{CliError, Exit};

/// Set up the InfiniBand fabric that this machine is connected to, once
///
/// Discovers all nodes and sets LIDs, the SM LID, MTU and VLs of links, linear forwarding tables, and port
/// states up to Active; then it exits, so nothing reacts to later changes. Valid LIDs stay, the LMC is 0.
/// Not set: SL2VL and VL arbitration, P_Keys, multicast tables, M_Keys (it sends 0). There is no subnet
/// administrator, so programs that need path records (RDMA CM, IPoIB) do not connect.
///
/// Refused: a fabric with a subnet manager, and tables with credit loops on one VL.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Exit code 1: a part of the fabric did not respond, or did not take what was written.

Examples:
  dquant subnet sweep
  dquant subnet sweep --engine up-down --device mlx5_0 --port 1
  dquant subnet sweep --ignore-sm"
)]
pub(super) struct Sweep {
    #[command(flatten)]
    port: PortArgs,

    /// Routing engine
    #[arg(long, value_enum, default_value_t = Name::Balanced, value_name = "NAME")]
    engine: Name,

    /// Also where a port says that a subnet manager runs there (IsSM); it is not told
    #[arg(long)]
    ignore_sm: bool,
}

impl Sweep {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let started = Instant::now();
        let mut umad = self.port.open()?;
        let mut discovery = Discovery::new();
        port::run(&mut umad, &mut discovery, console, "discovering")?;
        let (found, found_more) = discovery.complaints();
        found.iter().for_each(|complaint| console.note(complaint));
        self.check_managers(&discovery)?;
        let topology = discovery.topology(Capacity::default()).map_err(CliError::from_cause)?;
        topology.check().map_err(CliError::from_cause)?;
        let channels = Channels::of(&topology);
        let tables =
            self.engine.engine().route(&topology, &channels).map_err(CliError::from_cause)?;
        let findings = validate(&channels, &tables, &Lanes::one(&channels));
        if !findings.is_whole() {
            let what = format_args!("engine {} leaves pairs without a path", self.engine.engine());
            return Err(CliError::usage(what).hint("use --engine balanced"));
        }
        if findings.cycle.is_some() {
            let what = format_args!(
                "the paths of engine {} have credit loops on one VL",
                self.engine.engine()
            );
            return Err(CliError::usage(what).hint("use --engine up-down"));
        }
        let mut setup = Setup::new(&discovery, &channels, &tables).map_err(CliError::from_cause)?;
        port::run(&mut umad, &mut setup, console, "writing")?;
        let complaints = found.iter().map(ToString::to_string);
        let report = SweepReport {
            engine: self.engine.engine().to_string(),
            hosts: topology.hosts().count(),
            switches: topology.switches().count(),
            links: topology.links().count(),
            lids: setup.lids().count(),
            most_load: findings.most_load(),
            sent: discovery.sent() + setup.sent(),
            wall_ns: started.elapsed().as_nanos() as u64,
            complaints_left_out: found_more,
            complaints: complaints
                .chain(setup.complaints().iter().map(ToString::to_string))
                .collect(),
        };
        console.report(&report)?;
        Ok(if report.complaints.is_empty() { Exit::Good } else { Exit::CheckFailed })
    }

    fn check_managers(&self, discovery: &Discovery) -> Result<(), CliError> {
        let managers = discovery.managers();
        let Some((guid, port)) = managers.first().filter(|_| !self.ignore_sm) else {
            return Ok(());
        };
        let what = format_args!("a subnet manager runs at port {port} of {guid:#018x}");
        Err(CliError::usage(what).hint("stop it, or use --ignore-sm"))
    }
}

/// See [`Sweep`].
#[derive(Debug, Serialize)]
struct SweepReport {
    engine: String,
    hosts: usize,
    switches: usize,
    links: usize,
    lids: usize,
    /// Pairs of hosts' ports on the fullest direction of a link.
    most_load: u32,
    /// Datagrams sent, repeated ones too.
    sent: u64,
    wall_ns: u64,
    complaints: Vec<String>,
    complaints_left_out: u64,
}

impl Report for SweepReport {
    const SCHEMA: &'static str = "dquant.subnet.sweep/1";
}

impl fmt::Display for SweepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SweepReport { engine, hosts, switches, links, lids, most_load, sent, .. } = self;
        let ms = self.wall_ns as f64 / 1e6;
        write!(f, "{hosts} hosts, {switches} switches, {links} links: {lids} LIDs, ")?;
        write!(
            f,
            "engine {engine}, at most {most_load} pairs on a link; {sent} datagrams in {ms:.1} ms"
        )?;
        write_complaints(f, &self.complaints, self.complaints_left_out)
    }
}
