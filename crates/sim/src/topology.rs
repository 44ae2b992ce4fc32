//! Topologies of the crate `topology` as graphs to simulate, with the routes of its tables.
//!
//! Hosts become nodes and switches stay switches, both numbered in the topology's order. A node
//! sends by its first connected port. Hosts with several ports become several nodes, one for each
//! ([`Nics`]), or forward ([`relaying`]).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ::topology::channels::Channels;
use ::topology::graph::{End, Kind, Link, Node, NodeId, Topology};
use ::topology::routes::Tables;
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

/// A connected port of a host: a node of its own, with one cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its host.
    pub host: NodeId,
    /// Its number there, from 1.
    pub port: u8,
    /// Ports of one island are joined by switches.
    pub island: u32,
}

/// The ports of all hosts, numbered by host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nics {
    all: Vec<Nic>,
    /// By host, and the end: its first one.
    first: Vec<u32>,
}

impl Nics {
    /// Those of a topology.
    pub fn of_topology(topology: &Topology) -> Nics {
        let islands = islands(topology);
        let (mut all, mut first) = (Vec::new(), Vec::from([0]));
        for host in topology.hosts() {
            for (port, link) in topology.node(host).links() {
                let beyond = topology.link(link).map(|link| link.beyond(host).node);
                let island = match beyond.map(|id| (id, topology.node(id).kind())) {
                    Some((switch, Kind::Switch)) => islands[switch.index()],
                    // A cable between two hosts is an island.
                    _ => topology.nodes().len() as u32 + link.index() as u32,
                };
                all.push(Nic { host, port, island });
            }
            first.push(all.len() as u32);
        }
        Nics { all, first }
    }

    /// Whether no host has several.
    pub fn are_single(&self) -> bool {
        self.first.windows(2).all(|pair| pair[1] - pair[0] <= 1)
    }

    /// How many there are.
    pub fn len(&self) -> u32 {
        self.all.len() as u32
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// By node.
    pub fn get(&self, node: u32) -> Option<&Nic> {
        self.all.get(node as usize)
    }

    /// Those of a host, by its place among hosts, and their nodes.
    pub fn of(&self, host: u32) -> impl Iterator<Item = (u32, &Nic)> {
        let span = self.first[host as usize]..self.first[host as usize + 1];
        span.map(|node| (node, &self.all[node as usize]))
    }
}

/// By node: switches that are joined over switches have the same number.
fn islands(topology: &Topology) -> Vec<u32> {
    let mut islands = alloc::vec![u32::MAX; topology.nodes().len()];
    for (number, first) in (0..).zip(topology.switches()) {
        let mut open = alloc::vec![first];
        while let Some(at) = open.pop() {
            if islands[at.index()] == u32::MAX {
                islands[at.index()] = number;
                let beside = topology.neighbours(at).map(|(_, end)| end.node);
                open.extend(beside.filter(|&id| topology.node(id).kind() == Kind::Switch));
            }
        }
    }
    islands
}

/// The graph of a topology whose hosts' ports are nodes, with shortest paths. `config` says what
/// both directions of a link are.
pub fn cables_of_nics(
    topology: &Topology,
    nics: &Nics,
    config: impl Fn(&Link) -> LinkConfig,
) -> Graph {
    let numbers = Numbers::of(topology);
    let nodes: BTreeMap<(NodeId, u8), u32> =
        nics.all.iter().map(|nic| (nic.host, nic.port)).zip(0..).collect();
    let bare = Graph::new(nics.len(), numbers.switches.len() as u32);
    topology.links().fold(bare, |graph, (_, link)| {
        let [a, b] = link.ends.map(|end| match nodes.get(&(end.node, end.port)) {
            Some(&node) => Vertex::Node(node),
            None => numbers.vertex(topology, end.node),
        });
        let config = config(link);
        graph.join(a, b, config, config)
    })
}

/// The graph of a topology whose hosts forward: one with several ports is a node behind a switch of
/// its own, which joins them. These switches are numbered behind the others, in the order of their
/// hosts, and their links, as fast as all ports of the host together, come behind those of the
/// topology.
pub fn relaying(topology: &Topology, config: impl Fn(&Link) -> LinkConfig) -> Graph {
    let numbers = Numbers::of(topology);
    let several = relays(topology);
    let relay = |id: NodeId| several.binary_search(&id).ok();
    let switches = numbers.switches.len() as u32;
    let bare = Graph::new(numbers.hosts.len() as u32, switches + several.len() as u32);
    let graph = topology.links().fold(bare, |graph, (_, link)| {
        let [a, b] = link.ends.map(|end| match relay(end.node) {
            Some(place) => Vertex::Switch(switches + place as u32),
            None => numbers.vertex(topology, end.node),
        });
        let config = config(link);
        graph.join(a, b, config, config)
    });
    (0..).zip(&several).fold(graph, |graph, (place, &host)| {
        let links = topology.node(host).links().filter_map(|(_, id)| topology.link(id));
        let configs: Vec<LinkConfig> = links.map(&config).collect();
        let rate = configs.iter().fold(0_u64, |sum, one| sum.saturating_add(one.rate_bps));
        let inner = configs[0].with_rate(rate).with_delay(Duration::ZERO);
        let node = numbers.vertex(topology, host);
        graph.join(node, Vertex::Switch(switches + place), inner, inner)
    })
}

/// The hosts that are behind a switch of their own in a graph that [`relaying`] made.
pub fn relays(topology: &Topology) -> Vec<NodeId> {
    topology.hosts().filter(|&host| topology.node(host).links().count() > 1).collect()
}

/// The graph of some hosts of a topology, numbered in this order, and of all its switches: the
/// other hosts have no cable. Links of hosts are like `edge`, those between switches like `trunk`,
/// whatever the topology says.
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

/// Two hosts of a topology that no way over switches joins, if there are such: programs on them
/// could not talk to each other.
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

/// The graph of a topology, with the routes of `tables`. Rates and delays are those of its links,
/// the rest is that of `like`.
pub fn graph(topology: &Topology, channels: &Channels, tables: &Tables, like: LinkConfig) -> Graph {
    let config = |link: &Link| {
        let delay = Duration::from_nanos(link.capacity.delay_ns);
        like.with_rate(link.capacity.rate_bps).with_delay(delay)
    };
    routed(cables(topology, config), topology, channels, tables)
}

/// A graph of [`cables`], with the routes of `tables` instead of shortest paths.
pub fn routed(graph: Graph, topology: &Topology, channels: &Channels, tables: &Tables) -> Graph {
    let first = |host: NodeId| Some((host, topology.node(host).links().next()?.0));
    let ports: Vec<Option<(NodeId, u8)>> = topology.hosts().map(first).collect();
    routed_between(&ports, graph, topology, channels, tables)
}

/// A graph of [`cables_of_nics`], with the routes of `tables` instead of shortest paths.
pub fn routed_nics(
    graph: Graph,
    topology: &Topology,
    nics: &Nics,
    channels: &Channels,
    tables: &Tables,
) -> Graph {
    let ports: Vec<Option<(NodeId, u8)>> =
        nics.all.iter().map(|nic| Some((nic.host, nic.port))).collect();
    routed_between(&ports, graph, topology, channels, tables)
}

/// By node of the graph: the port of a host that it is.
fn routed_between(
    ports: &[Option<(NodeId, u8)>],
    graph: Graph,
    topology: &Topology,
    channels: &Channels,
    tables: &Tables,
) -> Graph {
    let numbers = Numbers::of(topology);
    // Links that were removed have no cable.
    let cables: BTreeMap<_, u32> = topology.links().map(|(id, _)| id).zip(0..).collect();
    let by_port: BTreeMap<(NodeId, u8), u32> =
        channels.end_ports().iter().map(|end| (end.end.node, end.end.port)).zip(0..).collect();
    let end_ports: Vec<Option<u32>> =
        (ports.iter()).map(|port| port.and_then(|port| by_port.get(&port).copied())).collect();
    let leaves_by = |node: NodeId, port: u8| -> Option<(u32, bool)> {
        let id = topology.node(node).link_at(port)?;
        let is_back = topology.link(id)?.ends[0] != End { node, port };
        Some((*cables.get(&id)?, is_back))
    };
    graph.routed(|at, dest| match at {
        Vertex::Node(number) => {
            let (host, port) = ports[number as usize].filter(|_| number != dest)?;
            leaves_by(host, port)
        }
        Vertex::Switch(number) => {
            let end_port = end_ports[dest as usize]?;
            leaves_by(numbers.switches[number as usize], tables.port(number, end_port))
        }
    })
}
