//! Topologies of the crate `fabric` as graphs to simulate, with the routes of its tables.
//!
//! Hosts become nodes and switches stay switches, both numbered in the topology's order. A node sends by its first
//! connected port.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use fabric::channels::Channels;
use fabric::routes::Tables;
use fabric::topology::{End, Kind, Link, Node, NodeId, Topology};
use roce::Duration;

use crate::graph::{Graph, Vertex};
use crate::link::LinkConfig;

/// The number of each node of a topology in its graph.
#[derive(Clone, Debug)]
struct Numbers {
    /// By node: its number among hosts or switches.
    by_node: Vec<u32>,
    hosts: Vec<NodeId>,
    switches: Vec<NodeId>,
}

impl Numbers {
    fn of(topology: &Topology) -> Numbers {
        let (mut hosts, mut switches) = (Vec::new(), Vec::new());
        let number = |(id, node): (NodeId, &Node)| {
            let own = if node.kind() == Kind::Host { &mut hosts } else { &mut switches };
            own.push(id);
            own.len() as u32 - 1
        };
        let by_node = topology.nodes().map(number).collect();
        Numbers { by_node, hosts, switches }
    }

    fn vertex(&self, topology: &Topology, id: NodeId) -> Vertex {
        let number = self.by_node[id.index()];
        match topology.node(id).kind() {
            Kind::Host => Vertex::Node(number),
            Kind::Switch => Vertex::Switch(number),
        }
    }
}

/// The end port at which each node of a topology's graph is reached: its first one.
pub fn end_ports(topology: &Topology, channels: &Channels) -> Vec<Option<u32>> {
    let first = |host: NodeId| {
        (0..)
            .zip(channels.end_ports())
            .find(|(_, end)| end.end.node == host)
            .map(|(place, _)| place)
    };
    topology.hosts().map(first).collect()
}

/// The graph of a topology, with shortest paths. `config` says what both directions of a link are.
pub fn cables(topology: &Topology, config: impl Fn(&Link) -> LinkConfig) -> Graph {
    let numbers = Numbers::of(topology);
    let bare = Graph::new(numbers.hosts.len() as u32, numbers.switches.len() as u32);
    topology.links().fold(bare, |graph, (_, link)| {
        let [a, b] = link.ends.map(|end| numbers.vertex(topology, end.node));
        let config = config(link);
        graph.join(a, b, config, config)
    })
}

/// The graph of some hosts of a topology, numbered in this order, and of all its switches: the other hosts have no cable. Links
/// of hosts are like `edge`, those between switches like `trunk`, whatever the topology says.
pub fn among(topology: &Topology, hosts: &[NodeId], edge: LinkConfig, trunk: LinkConfig) -> Graph {
    let numbers = Numbers::of(topology);
    let bare = Graph::new(hosts.len() as u32, numbers.switches.len() as u32);
    let vertex = |id: NodeId| match topology.node(id).kind() {
        Kind::Host => {
            hosts.iter().position(|&host| host == id).map(|number| Vertex::Node(number as u32))
        }
        Kind::Switch => Some(numbers.vertex(topology, id)),
    };
    topology.links().fold(bare, |graph, (_, link)| match link.ends.map(|end| vertex(end.node)) {
        [Some(a @ Vertex::Switch(_)), Some(b @ Vertex::Switch(_))] => {
            graph.join(a, b, trunk, trunk)
        }
        [Some(a), Some(b)] => graph.join(a, b, edge, edge),
        _ => graph,
    })
}

/// Two hosts of a topology that no way over switches joins, if there are such: programs on them could not talk to each other.
pub fn separate_hosts(topology: &Topology) -> Option<[NodeId; 2]> {
    let all: Vec<NodeId> = topology.hosts().collect();
    let (&first, others) = all.split_first()?;
    let (mut seen, mut next) = (alloc::vec![first], 0);
    while let Some(&at) = seen.get(next) {
        next += 1;
        if at != first && topology.node(at).kind() == Kind::Host {
            continue;
        }
        for (_, end) in topology.neighbours(at) {
            if !seen.contains(&end.node) {
                seen.push(end.node);
            }
        }
    }
    others.iter().find(|other| !seen.contains(other)).map(|&other| [first, other])
}

/// The graph of a topology, with the routes of `tables`. Rates and delays are those of its links, the rest is that of
/// `like`.
pub fn graph(topology: &Topology, channels: &Channels, tables: &Tables, like: LinkConfig) -> Graph {
    let config = |link: &Link| {
        let delay = Duration::from_nanos(link.capacity.delay_ns);
        like.with_rate(link.capacity.rate_bps).with_delay(delay)
    };
    routed(cables(topology, config), topology, channels, tables)
}

/// A graph of [`cables`], with the routes of `tables` instead of shortest paths.
pub fn routed(graph: Graph, topology: &Topology, channels: &Channels, tables: &Tables) -> Graph {
    let numbers = Numbers::of(topology);
    // Links that were removed have no cable.
    let cables: BTreeMap<_, u32> = topology.links().map(|(id, _)| id).zip(0..).collect();
    let end_ports = end_ports(topology, channels);
    let leaves_by = |node: NodeId, port: u8| -> Option<(u32, bool)> {
        let id = topology.node(node).link_at(port)?;
        let is_back = topology.link(id)?.ends[0] != End { node, port };
        Some((*cables.get(&id)?, is_back))
    };
    graph.routed(|at, dest| match at {
        Vertex::Node(number) => {
            let host = numbers.hosts[number as usize];
            let (port, _) = topology.node(host).links().next().filter(|_| number != dest)?;
            leaves_by(host, port)
        }
        Vertex::Switch(number) => {
            let end_port = end_ports[dest as usize]?;
            leaves_by(numbers.switches[number as usize], tables.port(number, end_port))
        }
    })
}
