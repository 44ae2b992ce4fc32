//! `dquant subnet plan`: tables for a topology by every routing engine, judged.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ::topology::channels::Channels;
use ::topology::drawing;
use ::topology::graph::{Capacity, Topology};
use ::topology::htsim;
use ::topology::judge::{Verdict, judge};
use ::topology::lanes::{Lanes, MAX_LANES};
use ::topology::routes::{Engine, RouteError, Tables};
use ::topology::text;
use clap::{Args, ValueEnum};
use lab::topology;
use serde::Serialize;

use super::super::{Console, Report};
use super::dump;
use crate::exit::{CliError, Exit, OUTPUT_HINT};

/// Compute linear forwarding tables for a topology and judge them
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
                // What one of all engines cannot route is said in the report; one that was named has failed.
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

/// What a topology can be written as, by the end of the file's name.
fn writer(path: &Path) -> Option<Writer> {
    Some(match path.extension().and_then(|extension| extension.to_str())? {
        "net" => Writer::Any(text::write_net),
        "dot" => Writer::Any(text::write_dot),
        "ns3" => Writer::Any(text::write_ns3),
        "svg" => Writer::Any(drawing::write_svg),
        "toml" => Writer::Any(topology::own::write),
        "topo" => Writer::Htsim,
        _ => return None,
    })
}

/// A format of topologies.
enum Writer {
    /// It takes any.
    Any(fn(&Topology) -> String),
    /// It takes fat trees.
    Htsim,
}

impl Writer {
    fn text(self, topology: &Topology) -> Result<String, CliError> {
        match self {
            Writer::Any(write) => Ok(write(topology)),
            Writer::Htsim => htsim::write(topology).map(|htsim| htsim.text).map_err(|error| {
                CliError::because("csg-htsim cannot build this topology", &error)
                    .hint("it has fat trees of two or three tiers; .ns3 and .net take any topology")
            }),
        }
    }
}

/// Refuses names that say no format.
pub(super) fn check_name(path: &Path) -> Result<(), CliError> {
    let unknown = || {
        CliError::usage(format_args!(
            "{}: the name ends with .net, .toml, .dot, .ns3, .topo or .svg",
            path.display()
        ))
    };
    writer(path).map(drop).ok_or_else(unknown)
}

/// Writes a topology in the format that the name says.
pub(super) fn write(topology: &Topology, path: &Path) -> Result<(), CliError> {
    check_name(path)?;
    let text = writer(path).map(|writer| writer.text(topology)).transpose()?.unwrap_or_default();
    std::fs::write(path, text).map_err(|error| {
        CliError::because(format_args!("cannot write {}", path.display()), &error).hint(OUTPUT_HINT)
    })
}

/// What one engine's tables do.
#[derive(Debug, Serialize)]
struct Routed {
    engine: String,
    pairs: u64,
    /// Pairs without a path, and with one that goes round.
    lost: u64,
    looping: u64,
    /// Pairs with more hops than necessary.
    longer: u64,
    mean_hops: f64,
    most_hops: u16,
    most_load: u32,
    mean_load: f64,
    least_load: u32,
    links_used: usize,
    /// Virtual lanes that the paths need; none if more than there can be.
    vls: Option<u8>,
    /// On one VL: the switches of a credit loop.
    credit_loop: Option<Vec<String>>,
    wall_ns: u64,
}

impl Routed {
    fn by(engine: Engine, topology: &Topology, channels: &Channels) -> Result<Routed, RouteError> {
        let started = Instant::now();
        let tables = engine.route(topology, channels)?;
        let wall_ns = started.elapsed().as_nanos() as u64;
        let verdict = judge(channels, &tables, &Lanes::one(channels));
        Ok(Routed::new(engine, topology, channels, &tables, &verdict, wall_ns))
    }

    fn new(
        engine: Engine,
        topology: &Topology,
        channels: &Channels,
        tables: &Tables,
        verdict: &Verdict,
        wall_ns: u64,
    ) -> Routed {
        let name = |channel: &u32| {
            let switch = channels.switches()[channels.get(*channel).from as usize];
            topology.node(switch).name().to_owned()
        };
        let vls = match verdict.cycle {
            None => Some(1),
            Some(_) => Lanes::assign(channels, tables, MAX_LANES).ok().map(|lanes| lanes.count()),
        };
        Routed {
            engine: engine.to_string(),
            pairs: verdict.pairs,
            lost: verdict.lost,
            looping: verdict.looping,
            longer: verdict.longer,
            mean_hops: verdict.mean_hops_milli() as f64 / 1e3,
            most_hops: verdict.most_hops,
            most_load: verdict.most_load(),
            mean_load: verdict.mean_load_tenths() as f64 / 10.0,
            least_load: verdict.least_load(),
            links_used: verdict.used(),
            vls,
            credit_loop: verdict.cycle.as_ref().map(|cycle| cycle.iter().map(name).collect()),
            wall_ns,
        }
    }
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
            one.describe_faults(f)?;
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

impl Routed {
    fn describe_faults(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Routed { engine, pairs, lost, looping, longer, .. } = self;
        if lost + looping > 0 {
            writeln!(
                f,
                "\n{engine}: {lost} of {pairs} pairs have no path, {looping} are in a forwarding loop"
            )?;
        }
        if *longer > 0 {
            writeln!(f, "\n{engine}: {longer} of {pairs} pairs pass more switches than they need")?;
        }
        if let Some(switches) = &self.credit_loop {
            let first = switches.first().map_or("", String::as_str);
            writeln!(f, "\n{engine}: credit loop on one VL: {} -> {first}", switches.join(" -> "))?;
        }
        Ok(())
    }
}
