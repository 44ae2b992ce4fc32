//! The hosts of a scenario as nodes of the simulation.
//!
//! A host with one port is a node. One with several is a NIC for each of them, and flows are put on
//! ports by [`Rails`]: queue pairs stay on their port, and the host forwards nothing. With
//! `topology.relay` it forwards, as the servers of a BCube do: it is one node behind a switch that
//! joins its ports.

use ::topology::channels::Channels;
use ::topology::graph::{Link, NodeId, Topology};
use ::topology::routes::Tables;
use sim::graph::{Graph, Vertex};
use sim::link::LinkConfig;
use sim::topology::{self, Nic, Nics};
use sim::traffic::{Flow, RailError, Rails};

use super::file::HostRails;
use service::Error;

/// Most nodes: each has an address, and what is left of 16 bits.
const MAX_NODES: u32 = 65_534;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// How many.
    pub count: u32,
    /// Rate of the link of a node: congestion control starts there.
    pub link_bps: u64,
    /// Rate of all links of a host, on average: load is relative to it.
    pub rate_bps: u64,
    form: Form,
}

/// How hosts become nodes.
#[derive(Clone, Debug)]
enum Form {
    /// Each has one port, and is a node.
    Single,
    /// Each port is a node.
    Ports(Nics),
    /// Each is a node, those with several ports behind a switch: these.
    Relays(Vec<NodeId>),
}

impl Hosts {
    /// Those of a topology; with `relay`, they forward.
    ///
    /// # Errors
    /// When hosts with one port are not joined, there are too many, or their links have different
    /// rates.
    pub fn of(topology: &Topology, relay: bool) -> Result<Hosts, Error> {
        let nics = Nics::of_topology(topology);
        let (count, ports) = (topology.hosts().count() as u32, nics.len());
        let link_bps = link_rate(topology)?;
        let rate_bps = (u128::from(link_bps) * u128::from(ports) / u128::from(count.max(1))) as u64;
        let form = match (nics.are_single(), relay) {
            (true, false) => Form::Single,
            (true, true) => {
                return Err(Error::invalid("topology.relay is set, and no host has several ports"));
            }
            (false, false) => Form::Ports(nics),
            (false, true) => Form::Relays(topology::relays(topology)),
        };
        if let (Form::Single, Some([a, b])) = (&form, topology::separate_hosts(topology)) {
            return Err(apart(topology, a, b));
        }
        let nodes = if let Form::Ports(_) = form { ports } else { count };
        if nodes > MAX_NODES {
            let what = if let Form::Ports(_) = form { "ports of hosts" } else { "hosts" };
            return Err(Error::invalid(format_args!(
                "there are {nodes} {what}; at most {MAX_NODES} are simulated"
            )));
        }
        // Behind its switch, a host sends as fast as all of its ports.
        let link_bps = if let Form::Relays(_) = form { rate_bps } else { link_bps };
        Ok(Hosts { count, link_bps, rate_bps, form })
    }

    /// Ports of a host, where hosts have several and do not forward, on average.
    pub fn ports(&self) -> u32 {
        (self.rate_bps / self.link_bps.max(1)) as u32
    }

    /// The graph of the network, with shortest paths.
    pub fn graph(&self, topology: &Topology, config: impl Fn(&Link) -> LinkConfig) -> Graph {
        match &self.form {
            Form::Single => topology::cables(topology, config),
            Form::Ports(nics) => topology::cables_of_nics(topology, nics, config),
            Form::Relays(_) => topology::relaying(topology, config),
        }
    }

    /// The same with the routes of tables.
    ///
    /// # Errors
    /// When hosts forward: no engine has routes over hosts.
    pub fn routed(
        &self,
        graph: Graph,
        topology: &Topology,
        channels: &Channels,
        tables: &Tables,
    ) -> Result<Graph, Error> {
        match &self.form {
            Form::Single => Ok(topology::routed(graph, topology, channels, tables)),
            Form::Ports(nics) => Ok(topology::routed_nics(graph, topology, nics, channels, tables)),
            Form::Relays(_) => Err(Error::invalid(
                "switches.routing is balanced, and hosts forward: no routing engine has routes over hosts",
            )),
        }
    }

    /// Puts the flows between hosts on nodes.
    ///
    /// # Errors
    /// When nothing joins the ports of two hosts, or there are too many parts of flows.
    pub fn place(
        &self,
        flows: Vec<Flow>,
        rails: HostRails,
        topology: &Topology,
    ) -> Result<Vec<Flow>, Error> {
        let rails = match rails {
            HostRails::Hash => Rails::Hash,
            HostRails::All => Rails::All,
        };
        let Form::Ports(nics) = &self.form else {
            return Ok(flows);
        };
        let host = |number: u32| topology.hosts().nth(number as usize);
        rails.assign(&flows, nics).map_err(|error| match error {
            RailError::Apart { from, to } => match (host(from), host(to)) {
                (Some(from), Some(to)) => apart(topology, from, to).hint(
                    "hosts do not forward, unless topology.relay = true says that those with several ports do",
                ),
                _ => Error::from_cause(error),
            },
            RailError::Parts => Error::from_cause(error),
        })
    }

    /// The name of a node or switch.
    pub fn name(&self, topology: &Topology, vertex: Vertex) -> String {
        let name =
            |id: Option<NodeId>| id.map_or(String::new(), |id| topology.node(id).name().to_owned());
        match (vertex, &self.form) {
            (Vertex::Node(number), Form::Ports(nics)) => match nics.get(number) {
                Some(&Nic { host, port, .. }) => format!("{}:{port}", name(Some(host))),
                None => String::new(),
            },
            (Vertex::Node(number), _) => name(topology.hosts().nth(number as usize)),
            (Vertex::Switch(number), form) => {
                let place = (number as usize).checked_sub(topology.switches().count());
                match (place, form) {
                    (Some(place), Form::Relays(all)) => {
                        format!("{} (relay)", name(all.get(place).copied()))
                    }
                    _ => name(topology.switches().nth(number as usize)),
                }
            }
        }
    }
}

fn apart(topology: &Topology, a: NodeId, b: NodeId) -> Error {
    let [a, b] = [a, b].map(|id| topology.node(id).name());
    Error::invalid(format_args!("hosts '{a}' and '{b}' are not joined by switches"))
}

/// The rate of the hosts' links: load and congestion control are relative to it.
fn link_rate(topology: &Topology) -> Result<u64, Error> {
    let links = topology.hosts().flat_map(|id| topology.node(id).links());
    let mut rates = links.filter_map(|(_, id)| Some(topology.link(id)?.capacity.rate_bps));
    match rates.next() {
        Some(first) if rates.all(|rate| rate == first) => Ok(first),
        _ => Err(Error::invalid("the links of hosts have different rates; scenarios need one")),
    }
}
