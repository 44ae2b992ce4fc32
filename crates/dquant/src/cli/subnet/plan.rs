//! `dquant subnet plan`: tables for a topology by every routing engine, validated.

use std::fmt;
use std::path::{Path, PathBuf};

use ::topology::channels::Channels;
use ::topology::graph::{Capacity, Topology};
use ::topology::routes::Engine;
use clap::{Args, ValueEnum};
use lab::routing::Routed;
use lab::topology;
use lab::topology::written;
use serde::Serialize;
use subnet::dump;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit, OUTPUT_HINT};

/// Compute linear forwarding tables for a topology and validate them
///
/// TOPOLOGY is a file or a rule. Files: net files of ibsim, what ibnetdiscover printed, topo.csv of the
/// Lingjun data set, and TOML (docs/routing.md). Rules: fat-tree:K, leaf-spine:LxSxH, vl2:AxIxH, torus:AxB:H,
/// dragonfly:AxPxH, rail:UxHxRxS, random:NxDxH:SEED, bcube:NxK; docs/routing.md explains them.
///
/// load: ordered pairs of hosts' ports whose packets pass a channel, which is one direction of a link
/// between switches; mean and least of the channels that carry something. VLs: virtual lanes that keep
/// credit loops out. ms: time of the engine.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Engines: min-hop (minhop), up-down (updn), fat-tree (ftree), dor, balanced.
Exit code 1: pairs without a path. Credit loops are no failure: the column VLs says what keeps them out.

Examples:
  dquant subnet plan fat-tree:8
  dquant subnet plan torus:6x6:4 --engine balanced,dor
  ibnetdiscover > cluster.net; dquant subnet plan cluster.net
  dquant subnet plan dragonfly:4x2x2 --write cluster.net
  dquant subnet plan fat-tree:16 --write fat_tree_1024.topo
  dquant subnet plan cluster.net --engine up-down --tables cluster.lfts"
)]
pub(super) struct Plan {
    /// A file, or a rule
    topology: String,

    /// Routing engines, separated by commas [default: all]
    #[arg(
        long = "engine",
        value_name = "NAME",
        value_enum,
        value_delimiter = ',',
        hide_possible_values = true
    )]
    engines: Vec<Name>,

    /// Write it: .net (ibsim), .toml, .dot (Graphviz), .ns3 (ns-3), .topo (csg-htsim), .svg (a picture)
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,

    /// Write the tables of the one engine that is named, as opensm and dump_fts do
    #[arg(long, value_name = "FILE")]
    tables: Option<PathBuf>,
}

/// Engines, as they are named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Name {
    #[value(alias = "minhop")]
    MinHop,
    #[value(alias = "updn")]
    UpDown,
    #[value(alias = "ftree")]
    FatTree,
    Dor,
    Balanced,
}

impl Name {
    pub(in crate::cli) fn engine(self) -> Engine {
        match self {
            Name::MinHop => Engine::MinHop,
            Name::UpDown => Engine::UpDown,
            Name::FatTree => Engine::FatTree,
            Name::Dor => Engine::DimensionOrder,
            Name::Balanced => Engine::Balanced,
        }
    }
}

impl Plan {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let topology = topology::named(&self.topology, Capacity::default())?;
        topology.check().map_err(CliError::from_cause)?;
        if let Some(path) = &self.write {
            write(&topology, path)?;
        }
        let engines: Vec<Engine> = match self.engines.is_empty() {
            true => Engine::ALL.into(),
            false => self.engines.iter().map(|name| name.engine()).collect(),
        };
        let channels = Channels::of(&topology);
        if let Some(path) = &self.tables {
            write_tables(path, &topology, &channels, &engines)?;
        }
        let mut report = PlanReport::new(&self.topology, &topology, &channels);
        for engine in engines {
            console.progress(format_args!("engine {engine}"));
            match Routed::by(engine, &topology, &channels) {
                Ok(routed) => report.engines.push(routed),
                // What one of all engines cannot route is said in the report; one that was named
                // has failed.
                Err(why) if self.engines.is_empty() => {
                    report.unsuitable.push(why.to_string());
                }
                Err(why) => return Err(CliError::from_cause(why)),
            }
        }
        let is_whole = !report.engines.is_empty()
            && report.engines.iter().all(|routed| routed.lost + routed.looping == 0);
        console.report(&report)?;
        Ok(if is_whole { Exit::Good } else { Exit::CheckFailed })
    }
}

fn write_tables(
    path: &Path,
    topology: &Topology,
    channels: &Channels,
    engines: &[Engine],
) -> Result<(), CliError> {
    let [engine] = engines else {
        return Err(CliError::usage("--tables takes one engine").hint("name it with --engine"));
    };
    let tables = engine.route(topology, channels).map_err(CliError::from_cause)?;
    std::fs::write(path, dump::tables(topology, channels, &tables)).map_err(|error| {
        CliError::because(format_args!("cannot write {}", path.display()), &error).hint(OUTPUT_HINT)
    })
}

/// Writes a topology in the format that the name says.
pub(super) fn write(topology: &Topology, path: &Path) -> Result<(), CliError> {
    let text = written::text_for(path, topology)?;
    std::fs::write(path, text).map_err(|error| {
        CliError::because(format_args!("cannot write {}", path.display()), &error).hint(OUTPUT_HINT)
    })
}

/// See [`Plan`].
#[derive(Debug, Serialize)]
struct PlanReport {
    topology: String,
    hosts: usize,
    switches: usize,
    links: usize,
    /// Ports of hosts at switches.
    end_ports: usize,
    /// Directions of links between switches.
    channels: usize,
    engines: Vec<Routed>,
    /// Engines that cannot route this topology, and why.
    unsuitable: Vec<String>,
}

impl PlanReport {
    fn new(name: &str, topology: &Topology, channels: &Channels) -> PlanReport {
        PlanReport {
            topology: name.to_owned(),
            hosts: topology.hosts().count(),
            switches: topology.switches().count(),
            links: topology.links().count(),
            end_ports: channels.end_ports().len(),
            channels: channels.all().len(),
            engines: Vec::new(),
            unsuitable: Vec::new(),
        }
    }
}

impl Report for PlanReport {
    const SCHEMA: &'static str = "dquant.subnet.plan/1";
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanReport { topology, hosts, switches, links, channels, .. } = self;
        writeln!(f, "{topology}: {hosts} hosts, {switches} switches, {links} links\n")?;
        writeln!(
            f,
            "{:<10}{:>10}{:>10}{:>10}{:>10}{:>11}{:>15}{:>5}{:>9}",
            "engine",
            "mean hops",
            "most hops",
            "most load",
            "mean load",
            "least load",
            "channels used",
            "VLs",
            "ms"
        )?;
        for one in &self.engines {
            let vls = one.vls.map_or("> 15".to_owned(), |vls| vls.to_string());
            let used = format!("{} of {channels}", one.links_used);
            writeln!(
                f,
                "{:<10}{:>10.3}{:>10}{:>10}{:>10.1}{:>11}{used:>15}{vls:>5}{:>9.1}",
                one.engine,
                one.mean_hops,
                one.most_hops,
                one.most_load,
                one.mean_load,
                one.least_load,
                one.wall_ns as f64 / 1e6
            )?;
        }
        for one in &self.engines {
            describe_faults(one, f)?;
        }
        for why in &self.unsuitable {
            writeln!(f, "\n{why}")?;
        }
        write!(
            f,
            "\nhops: switches that packets pass. load: ordered pairs of hosts' ports on one direction of a link between switches"
        )
    }
}

fn describe_faults(routed: &Routed, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Routed { engine, pairs, lost, looping, longer, .. } = routed;
    if lost + looping > 0 {
        writeln!(
            f,
            "\n{engine}: {lost} of {pairs} pairs have no path, {looping} are in a forwarding loop"
        )?;
    }
    if *longer > 0 {
        writeln!(f, "\n{engine}: {longer} of {pairs} pairs pass more switches than they need")?;
    }
    if let Some(switches) = &routed.credit_loop {
        let first = switches.first().map_or("", String::as_str);
        writeln!(f, "\n{engine}: credit loop on one VL: {} -> {first}", switches.join(" -> "))?;
    }
    Ok(())
}
