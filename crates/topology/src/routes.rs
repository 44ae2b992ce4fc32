//! Forwarding tables, and the engines that compute them.
//!
//! A linear forwarding table (LFT) has, for every destination, the port to leave by. So the path of
//! a packet depends on where it is and where it goes, and not on where it came from.
//!
//! | engine | paths | balance | where it can route |
//! |---|---|---|---|
//! | [`min_hop`] | shortest | fewest end ports so far, at each switch by itself | everywhere, without regard to credit loops |
//! | [`up_down`] | Up*/Down*: never up after down; down where that alone leads there, so not always shortest | the same | everywhere, no credit loops |
//! | [`fat_tree`] | up, then down | by the digits of the end port's place (D-mod-K) | where every link joins two neighbouring levels |
//! | [`dimension_order`] | shortest, by the lowest port | none | everywhere; no credit loops in meshes |
//! | [`balanced`] | shortest | all pairs of end ports on all links, by rip-up and reroute | everywhere; with [`lanes`](crate::lanes) |
//!
//! [`mend`] keeps what it can of tables after links are gone. What a table does is for
//! [`validator`](crate::validator) to say.

pub mod balanced;
pub mod dimension_order;
pub mod fat_tree;
pub mod mend;
pub mod min_hop;
pub mod up_down;

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use thiserror::Error;

use crate::channels::{Channels, FAR};
use crate::graph::Topology;

/// In a table: no route.
pub const NO_ROUTE: u8 = 255;

/// Most switches and end ports together: each needs a unicast LID.
const MOST: usize = 0xbfff;

/// The port to leave by, for every switch and every end port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    switches: usize,
    end_ports: usize,
    ports: Vec<u8>,
}

impl Tables {
    /// Tables without routes, but for each end port at its own switch.
    pub fn new(channels: &Channels) -> Tables {
        let (switches, end_ports) = (channels.switches().len(), channels.end_ports().len());
        let ports = alloc::vec![NO_ROUTE; switches * end_ports];
        let mut tables = Tables { switches, end_ports, ports };
        for (at, end_port) in (0..).zip(channels.end_ports()) {
            tables.set(end_port.switch, at, end_port.port);
        }
        tables
    }

    /// The port by which `switch` forwards to an end port; [`NO_ROUTE`] if it does not.
    pub fn port(&self, switch: u32, end_port: u32) -> u8 {
        self.ports[switch as usize * self.end_ports + end_port as usize]
    }

    /// Sets it.
    pub fn set(&mut self, switch: u32, end_port: u32, port: u8) {
        self.ports[switch as usize * self.end_ports + end_port as usize] = port;
    }

    /// The channel by which `switch` forwards to an end port; `None` at its own switch, and where
    /// there is no route to another.
    pub fn channel(&self, channels: &Channels, switch: u32, end_port: u32) -> Option<u32> {
        let is_there = channels.end_ports()[end_port as usize].switch == switch;
        if is_there { None } else { channels.at(switch, self.port(switch, end_port)) }
    }

    /// The channels from a switch to an end port. It ends where the end port is, where there is no
    /// route, and after as many channels as there are switches.
    pub fn path(&self, channels: &Channels, from: u32, end_port: u32) -> Vec<u32> {
        let (mut at, mut path) = (from, Vec::new());
        while let Some(channel) = self.channel(channels, at, end_port) {
            if path.len() >= channels.switches().len() {
                break;
            }
            path.push(channel);
            at = channels.get(channel).to;
        }
        path
    }
}

/// How tables are computed; see the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Engine {
    /// [`min_hop`].
    MinHop,
    /// [`up_down`].
    UpDown,
    /// [`fat_tree`].
    FatTree,
    /// [`dimension_order`].
    DimensionOrder,
    /// [`balanced`].
    Balanced,
}

/// Why an engine cannot route a topology.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RouteError {
    /// More switches and end ports than an InfiniBand fabric can address.
    #[error("{0} switches and ports of hosts; there are {MOST} LIDs")]
    TooLarge(usize),
    /// There are no end ports at switches.
    #[error("no host is connected to a switch")]
    NoEndPorts,
    /// Some switches with end ports cannot reach each other: hosts do not forward.
    #[error("switch '{from}' reaches no host of switch '{to}': hosts do not forward")]
    NoPath {
        /// A switch.
        from: String,
        /// One with end ports.
        to: String,
    },
    /// The topology is not what the engine needs.
    #[error("engine {engine}: {why}")]
    Unsuitable {
        /// The engine.
        engine: Engine,
        /// What is missing.
        why: String,
    },
}

/// An unknown name of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown engine '{0}'; there are min-hop, up-down, fat-tree, dor and balanced")]
pub struct UnknownEngine(String);

impl Engine {
    /// All engines.
    pub const ALL: [Engine; 5] =
        [Engine::MinHop, Engine::UpDown, Engine::FatTree, Engine::DimensionOrder, Engine::Balanced];

    /// Tables for a topology.
    ///
    /// # Errors
    /// When there is nothing to route, no path somewhere, or the topology is not what the engine
    /// needs.
    pub fn route(self, topology: &Topology, channels: &Channels) -> Result<Tables, RouteError> {
        check_paths(topology, channels)?;
        match self {
            Engine::MinHop => Ok(min_hop::route(channels)),
            Engine::UpDown => Ok(up_down::route(channels)),
            Engine::FatTree => fat_tree::route(topology, channels),
            Engine::DimensionOrder => Ok(dimension_order::route(channels)),
            Engine::Balanced => Ok(balanced::route(channels)),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::MinHop => "min-hop",
            Engine::UpDown => "up-down",
            Engine::FatTree => "fat-tree",
            Engine::DimensionOrder => "dor",
            Engine::Balanced => "balanced",
        })
    }
}

impl FromStr for Engine {
    type Err = UnknownEngine;

    fn from_str(text: &str) -> Result<Engine, UnknownEngine> {
        let named = Engine::ALL.into_iter().find(|engine| engine.to_string() == text);
        named.ok_or_else(|| UnknownEngine(text.to_string()))
    }
}

/// Every switch has a path to every switch with end ports: links have two directions, so one look
/// from one of them tells.
fn check_paths(topology: &Topology, channels: &Channels) -> Result<(), RouteError> {
    let size = channels.switches().len() + channels.end_ports().len();
    if size > MOST {
        return Err(RouteError::TooLarge(size));
    }
    let Some(first) = channels.end_ports().first() else {
        return Err(RouteError::NoEndPorts);
    };
    let distances = channels.distances(first.switch);
    let cut_off = distances.iter().position(|distance| *distance == FAR);
    let name = |switch: usize| topology.node(channels.switches()[switch]).name().to_string();
    match cut_off {
        None => Ok(()),
        Some(switch) => {
            Err(RouteError::NoPath { from: name(switch), to: name(first.switch as usize) })
        }
    }
}

/// The places of end ports by the switch that they are at, and for each such switch the distances
/// to it. One at a time: they are large together.
fn by_switch(channels: &Channels) -> impl Iterator<Item = (u32, Vec<u32>, Vec<u16>)> + '_ {
    let mut places = alloc::vec![Vec::new(); channels.switches().len()];
    for (at, end_port) in (0..).zip(channels.end_ports()) {
        places[end_port.switch as usize].push(at);
    }
    let there = (0..).zip(places).filter(|(_, places)| !places.is_empty());
    there.map(|(switch, places)| (switch, places, channels.distances(switch)))
}
