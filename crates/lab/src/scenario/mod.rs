//! Scenarios: a network, its hosts and their traffic from one TOML file, ready to run.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@file`] | what a file may say |
//! | [`hosts`] | hosts as nodes of the simulation, with one port or several |
//! | [`faults`] | what fails, resolved to links and switches |
//! | [`pictures`] | queues, slowdowns and links as SVG |
//! | [`trace`] | flows from a file |
//! | [`mod@run`] | running one to its end |
//! | [`sweep`] | one with every combination of values |
//! | [`result`] | what a run came to, as text and JSON |
//!
//! The simulation itself is in the crate `sim`. Nothing in here prints.

pub mod faults;
pub mod file;
pub mod hosts;
pub mod pictures;
pub mod result;
pub mod run;
pub mod sweep;
pub mod trace;

use std::path::{Path, PathBuf};

use ::topology::channels::Channels;
use ::topology::graph::{Capacity, Kind, Link, Topology};
use ::topology::routes::Engine;
use controls::CongestionControl;
use roce::congestion::watermark::MAX_AGE;
use roce::endpoint::Mtu;
use roce::verbs::Reliability;
use roce::{Duration, Time};
use serde::Deserialize;
use sim::buffer::BufferConfig;
use sim::chance::Chance;
use sim::graph::{Graph, Spread, Vertex};
use sim::link::{LinkConfig, Marking};
use sim::network::{Collector, Rerouting, Watchdog};
use sim::traffic::{Flow, Runner, Testbed, Workload};
use toml::{Table, Value};

use crate::input;
use faults::NamedFault;
use file::{Ecn, File, Frames, Recovery, Routing, Switches};
use hosts::Hosts;
use service::Error;

/// Largest scenario, and largest trace, that is read.
const MAX_FILE: u64 = 1 << 20;
const MAX_TRACE: u64 = 1 << 30;

/// The buffer of a switch that a scenario says nothing of.
const SHARED_BUFFER: u64 = 32_000_000;

/// A scenario as it was written, with the values that the command line has set.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Where it was read, for the files beside it.
    path: PathBuf,
    table: Table,
}

/// One setting of the command line: `workload.load=80%`.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The names of tables, and of the value.
    pub key: Vec<String>,
    /// The value.
    pub value: Value,
    /// The value as it was typed.
    pub text: String,
}

impl Setting {
    /// Reads `KEY=VALUE`. A value that is no TOML is a text.
    ///
    /// # Errors
    /// When there is no key.
    pub fn parse(text: &str) -> Result<Setting, String> {
        let (key, value) = text.split_once('=').ok_or_else(|| no_setting(text))?;
        let key: Vec<String> = key.trim().split('.').map(str::to_owned).collect();
        if key.iter().any(String::is_empty) {
            return Err(no_setting(text));
        }
        Ok(Setting::new(key, value))
    }

    /// A value as it is typed.
    pub fn new(key: Vec<String>, text: &str) -> Setting {
        let document = format!("value = {text}");
        let parsed = document.parse::<Table>().ok().and_then(|mut table| table.remove("value"));
        let value = parsed.unwrap_or_else(|| Value::String(text.to_owned()));
        Setting { key, value, text: text.to_owned() }
    }
}

fn no_setting(text: &str) -> String {
    format!("'{text}' is no setting; write one like transport.control=hpcc")
}

/// A scenario that can be run.
#[derive(Debug)]
pub struct Prepared {
    /// What it shows.
    pub title: String,
    /// The congestion control.
    pub control: String,
    /// Rate of the links of hosts.
    pub host_bps: u64,
    /// Names of hosts and switches, for pictures.
    pub topology: Topology,
    /// Hosts as nodes of the network.
    pub hosts: Hosts,
    /// The network.
    pub network: Testbed,
    /// The flows.
    pub flows: Vec<Flow>,
    /// What fails, in the order of the network's faults.
    pub faults: Vec<NamedFault>,
    /// Whether connections are used again.
    pub keeps_connections: bool,
    /// When the run ends at the latest.
    pub deadline: Time,
    /// Round-trip time without queues.
    pub base_rtt: Duration,
}

impl Scenario {
    /// Reads a file. It is checked as it stands, so that errors name the line.
    ///
    /// # Errors
    /// When it cannot be read, or is no scenario.
    pub fn read(path: &Path) -> Result<Scenario, Error> {
        let text = input::read(path, MAX_FILE)?;
        let table: Table = text.parse().map_err(|error| is_no_scenario(path, &text, &error))?;
        toml::from_str::<File>(&text).map_err(|error| is_no_scenario(path, &text, &error))?;
        Ok(Scenario { path: path.to_owned(), table })
    }

    /// The same with a value replaced, or added.
    ///
    /// # Errors
    /// When one of the names before the last is not a table.
    pub fn with(&self, setting: &Setting) -> Result<Scenario, Error> {
        let mut changed = self.clone();
        let mut table = &mut changed.table;
        let Some((last, tables)) = setting.key.split_last() else {
            return Ok(changed);
        };
        let mut tables = tables.iter();
        while let Some(name) = tables.next() {
            let mut entry = table.entry(name.clone()).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Array(all) = entry {
                let (place, there) = (tables.next().map_or("", String::as_str), all.len());
                let found = place.parse::<usize>().ok().and_then(|place| all.get_mut(place));
                entry = found.ok_or_else(|| {
                    Error::invalid(format_args!(
                        "{name} is a list of {there}: {name}.0 is its first entry, and there is no {name}.{place}"
                    ))
                })?;
            }
            table = entry.as_table_mut().ok_or_else(|| {
                Error::invalid(format_args!("{name} is a value and no table of the scenario"))
            })?;
        }
        table.insert(last.clone(), setting.value.clone());
        Ok(changed)
    }

    /// Builds its network and draws its flows.
    ///
    /// # Errors
    /// With the place of what does not fit.
    pub fn prepare(&self) -> Result<Prepared, Error> {
        let file = File::deserialize(self.table.clone())
            .map_err(|error| is_no_scenario(&self.path, "", &error))?;
        let topology = self.topology(&file.topology)?;
        topology.check().map_err(Error::from_cause)?;
        let hosts = Hosts::of(&topology, file.topology.relay)?;
        let graph = graph(&file, &topology, &hosts)?;
        let mtu = mtu(file.transport.mtu)?;
        let base_rtt = Testbed::base_rtt(&graph, mtu);
        let workload = self.workload(&file.workload, hosts.count)?;
        let host_bps = hosts.link_bps;
        let mut chance = Chance::new(file.run.seed);
        let flows = workload.flows(hosts.count, hosts.rate_bps, &mut chance);
        let flows = flows.map_err(Error::from_cause)?;
        let flows = hosts.place(flows, file.transport.rails, &topology)?;
        let control = &file.transport.control;
        let deadline = Time::ZERO + file.run.deadline;
        let faults = faults::resolve(&file.faults, &topology, deadline, file.run.seed)?;
        let congestion = CongestionControl::named(control, host_bps, base_rtt).unwrap_or_default();
        check_frames(&file.transport, &congestion)?;
        Ok(Prepared {
            title: file.title.clone().unwrap_or_else(|| self.path.display().to_string()),
            control: control.clone(),
            host_bps,
            network: Testbed {
                graph,
                buffer: buffer(&file)?,
                watermarks: watermarks(&file.switches)?,
                ipv6: file.transport.frames == Frames::Ipv6,
                roce_v1: file.transport.frames == Frames::RoceV1,
                mtu,
                window_packets: file.transport.window.max(1),
                reliability: match file.transport.recovery {
                    Recovery::GoBackN => Reliability::GoBackN,
                    Recovery::Selective => Reliability::Selective,
                },
                timeout: timeout(file.transport.timeout)?,
                retry_count: retries(file.transport.retries)?,
                faults: faults.iter().map(|fault| fault.timed).collect(),
                rerouting: rerouting(&file.switches)?,
                watchdog: file
                    .switches
                    .watchdog
                    .map(|span| Watchdog { detection: span, restoration: span }),
                congestion,
                seed: chance.word(),
            },
            topology,
            hosts,
            flows,
            keeps_connections: workload.keeps_connections(),
            deadline,
            faults,
            base_rtt,
        })
    }

    /// A file by its name relative to the scenario.
    fn beside(&self, name: &Path) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(name)
    }

    fn topology(&self, wanted: &file::Topology) -> Result<Topology, Error> {
        let capacity = Capacity { rate_bps: wanted.host, delay_ns: wanted.delay.as_nanos() };
        match (&wanted.rule, &wanted.file) {
            (Some(rule), None) => crate::topology::by_rule(rule, capacity),
            (None, Some(_)) if wanted.fabric.is_some() => {
                Err(Error::invalid("topology.fabric is for rules: a file has its own rates"))
            }
            (None, Some(name)) => crate::topology::read(&self.beside(name), capacity),
            _ => Err(Error::invalid("a topology has either a rule or a file")),
        }
    }

    fn workload(&self, wanted: &file::Workload, there: u32) -> Result<Workload, Error> {
        Ok(match *wanted {
            file::Workload::Incast { senders, bytes } => Workload::Incast { senders, bytes },
            file::Workload::Permutation { bytes } => Workload::Permutation { bytes },
            file::Workload::AllToAll { bytes } => Workload::AllToAll { bytes },
            file::Workload::RingAllreduce { hosts, bytes } => {
                Workload::RingAllreduce { hosts: hosts.unwrap_or(there), bytes }
            }
            file::Workload::TreeAllreduce { hosts, bytes, pieces } => {
                Workload::TreeAllreduce { hosts: hosts.unwrap_or(there), bytes, pieces }
            }
            file::Workload::Poisson { sizes, load, span } => {
                Workload::Poisson { sizes, load_ppm: load, span }
            }
            file::Workload::Trace { ref file } => {
                let path = self.beside(file);
                let flows = trace::read(&input::read(&path, MAX_TRACE)?);
                Workload::Trace(flows.map_err(|error| {
                    Error::because(format_args!("{} is no trace", path.display()), &error)
                })?)
            }
        })
    }
}

/// What is wrong with a scenario, and in which line of its text, where that is known.
fn is_no_scenario(path: &Path, text: &str, error: &toml::de::Error) -> Error {
    let (name, what) = (path.display(), error.message());
    let before = error.span().and_then(|span| text.get(..span.start));
    let error = match before.filter(|_| !text.is_empty()) {
        Some(before) => {
            let line = before.matches('\n').count() + 1;
            Error::invalid(format_args!("{name} is no scenario: line {line}: {what}"))
        }
        None => Error::invalid(format_args!("{name} is no scenario: {what}")),
    };
    error.hint("docs/scenarios.md has every table and value")
}

/// The code of an ACK timeout: 4.096 us times a power of two.
fn timeout(wanted: Duration) -> Result<u8, Error> {
    let code = (1..=31).find(|&code| 4_096_u64 << code >= wanted.as_nanos());
    code.filter(|_| wanted > Duration::ZERO).ok_or_else(|| {
        Error::invalid("transport.timeout is 8.192us to 8796s: a queue pair has no other ones")
    })
}

fn retries(count: u8) -> Result<u8, Error> {
    match count {
        0..=7 => Ok(count),
        _ => Err(Error::invalid(format_args!("transport.retries is {count}; it can be 0 to 7"))),
    }
}

/// Tables of a routing engine stay as they are.
fn rerouting(switches: &Switches) -> Result<Option<Rerouting>, Error> {
    let Switches { rerouting, routing, detection, convergence, .. } = *switches;
    let is_fixed = routing == Routing::Balanced;
    if is_fixed && rerouting == Some(true) {
        return Err(Error::invalid(
            "switches.rerouting is set, and tables of switches.routing balanced stay as they are",
        ));
    }
    let finds = rerouting.unwrap_or(!is_fixed);
    Ok(finds.then_some(Rerouting { detection, spread: convergence }))
}

impl Prepared {
    /// The name of a host, of its port where it has several, or of a switch.
    pub fn name(&self, vertex: Vertex) -> String {
        self.hosts.name(&self.topology, vertex)
    }

    /// The run, before anything has started.
    pub fn runner(&self) -> Runner {
        Runner::new(&self.network, self.flows.clone(), self.keeps_connections)
    }
}

/// Switches mark and stamp nothing behind a GRH: refuses controls that would never learn of
/// congestion.
fn check_frames(transport: &file::Transport, congestion: &CongestionControl) -> Result<(), Error> {
    let lost = match congestion {
        CongestionControl::Dcqcn(_) | CongestionControl::Dctcp(_) => "mark none of its packets",
        CongestionControl::Hpcc(_) => "stamp none of its packets",
        _ => return Ok(()),
    };
    if transport.frames != Frames::RoceV1 {
        return Ok(());
    }
    let control = &transport.control;
    Err(Error::invalid(format_args!(
        "transport.control is {control}, and transport.frames roce-v1: switches {lost}"
    ))
    .hint("controls that work there: advertised, swift, timely, timely-patched, delay, off"))
}

fn mtu(bytes: u32) -> Result<Mtu, Error> {
    Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes).ok_or_else(|| {
        Error::invalid(format_args!(
            "transport.mtu is {bytes}; it can be 256, 512, 1024, 2048 or 4096"
        ))
    })
}

/// Who reads the watermarks of switches; hosts are told half an interval later, unless the file
/// says when.
fn watermarks(switches: &Switches) -> Result<Option<Collector>, Error> {
    let Some(every) = switches.watermarks else {
        return match switches.watermarks_delay {
            Some(_) => Err(Error::invalid("switches.watermarks_delay needs switches.watermarks")),
            None => Ok(None),
        };
    };
    let half = Duration::from_nanos(every.as_nanos() / 2);
    let late = switches.watermarks_delay.unwrap_or(half);
    let (least, most) = (Duration::from_micros(10), MAX_AGE);
    if every < least || every > most || late > most {
        return Err(Error::invalid(format_args!(
            "switches.watermarks is {every}, {late} late; it can be {least} to {most}, up to {most} late"
        )));
    }
    Ok(Some(Collector { every, late }))
}

/// The shared buffer of a switch; `None` where each port has its own.
fn buffer(file: &File) -> Result<Option<BufferConfig>, Error> {
    let Switches { buffer, port_buffer, pfc, .. } = file.switches;
    let shared = buffer.unwrap_or(SHARED_BUFFER);
    match (port_buffer, pfc) {
        (None, true) => Ok(Some(BufferConfig::lossless(shared))),
        (None, false) => Ok(Some(BufferConfig::lossy(shared))),
        (Some(_), _) if buffer.is_some() => {
            Err(Error::invalid("switches have either a buffer or a port_buffer"))
        }
        (Some(_), false) => Ok(None),
        (Some(_), true) => Err(Error::invalid(
            "switches.port_buffer drops packets, and switches.pfc promises that none is dropped",
        )
        .hint("pfc = false")),
    }
}

fn graph(file: &File, topology: &Topology, hosts: &Hosts) -> Result<Graph, Error> {
    let classes = file.switches.classes;
    if !(1..=8).contains(&classes) {
        return Err(Error::invalid(format_args!(
            "switches.classes is {classes}; it can be 1 to 8"
        )));
    }
    let config = |link: &Link| {
        let is_between = link.ends.iter().all(|end| topology.node(end.node).kind() == Kind::Switch);
        let host = link.capacity.rate_bps;
        let rate = file.topology.fabric.filter(|_| is_between).unwrap_or(host);
        LinkConfig {
            queue_bytes: file.switches.port_buffer.unwrap_or(u64::MAX),
            classes,
            marking: match file.switches.ecn {
                Ecn::None => None,
                Ecn::Dcqcn => Some(Marking::dcqcn(rate)),
                Ecn::Dctcp => Some(Marking::dctcp(rate)),
            },
            ..LinkConfig::new(rate, Duration::from_nanos(link.capacity.delay_ns))
        }
    };
    let graph = hosts.graph(topology, config);
    Ok(match file.switches.routing {
        Routing::First => graph,
        Routing::Ecmp => graph.spread(Spread::Flow),
        Routing::Spray => graph.spread(Spread::Packet),
        Routing::Balanced => {
            let channels = Channels::of(topology);
            let tables = Engine::Balanced.route(topology, &channels).map_err(Error::from_cause)?;
            hosts.routed(graph, topology, &channels, &tables)?
        }
    })
}
