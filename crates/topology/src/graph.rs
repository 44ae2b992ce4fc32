//! Hosts, switches, ports and the links between them.
//!
//! A [`Topology`] is built by adding nodes and connecting ports, and refuses what no cable can do.
//! [`Topology::check`] then refuses what no fabric can use. Ports count from 1, as in InfiniBand,
//! where port 0 of a switch is the switch itself.
//!
//! How a topology came about, and what travels through it, does not belong here.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

/// Most ports of a node: port 255 means "no route" in a forwarding table.
pub const MAX_PORTS: u8 = 254;

/// A node, by its place in [`Topology::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// Its place in [`Topology::nodes`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A link, by its place in [`Topology::links`]. It stays the same when other links are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u32);

impl LinkId {
    /// Its place in [`Topology::links`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It sends and receives, and forwards nothing.
    Host,
    /// It forwards.
    Switch,
}

/// One end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    /// The node.
    pub node: NodeId,
    /// Its port, from 1.
    pub port: u8,
}

/// What a link can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Bits per second in each direction, never 0.
    pub rate_bps: u64,
    /// Nanoseconds from end to end.
    pub delay_ns: u64,
}

impl Default for Capacity {
    /// 100 Gbit/s, and a microsecond.
    fn default() -> Capacity {
        Capacity { rate_bps: 100_000_000_000, delay_ns: 1_000 }
    }
}

/// A cable between two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its ends, in the order in which they were named.
    pub ends: [End; 2],
    /// What it can carry.
    pub capacity: Capacity,
}

impl Link {
    /// The end that is not at this node; of a link between two ports of different nodes.
    pub fn beyond(&self, node: NodeId) -> End {
        let [a, b] = self.ends;
        if a.node == node { b } else { a }
    }
}

/// A host or a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    name: String,
    kind: Kind,
    /// By port - 1.
    ports: Vec<Option<LinkId>>,
}

impl Node {
    /// Its name, unique in its topology.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it does.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// How many ports it has, connected or not.
    pub fn ports(&self) -> u8 {
        self.ports.len() as u8
    }

    /// The link at a port, if there is one.
    pub fn link_at(&self, port: u8) -> Option<LinkId> {
        *self.ports.get(usize::from(port).checked_sub(1)?)?
    }

    /// Its connected ports, in order, and their links.
    pub fn links(&self) -> impl Iterator<Item = (u8, LinkId)> + '_ {
        (1..).zip(&self.ports).filter_map(|(port, link)| Some((port, (*link)?)))
    }
}

/// Why a topology cannot be, or cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// Two nodes have one name.
    #[error("there are two nodes '{0}'")]
    DuplicateName(String),
    /// A name is empty, or holds what the text formats cannot carry.
    #[error("'{0}' is no name: it needs at least one character, and no quotes or line breaks")]
    BadName(String),
    /// A node has too many ports, or none.
    #[error("'{name}' has {ports} ports; there can be 1 to {MAX_PORTS}")]
    PortCount {
        /// The node.
        name: String,
        /// How many were asked for.
        ports: u32,
    },
    /// A node is named that is not there.
    #[error("there is no node '{0}'")]
    UnknownNode(String),
    /// The node has no port of that number.
    #[error("'{name}' has ports 1 to {ports}, not {port}")]
    PortOutOfRange {
        /// The node.
        name: String,
        /// The port that was named.
        port: u8,
        /// How many it has.
        ports: u8,
    },
    /// Another link is there already.
    #[error("port {port} of '{name}' is connected already")]
    PortInUse {
        /// The node.
        name: String,
        /// The port.
        port: u8,
    },
    /// No port is free.
    #[error("all {ports} ports of '{name}' are connected")]
    NoFreePort {
        /// The node.
        name: String,
        /// How many it has.
        ports: u8,
    },
    /// Both ends are at one node.
    #[error("port {port} of '{name}' is connected to the same node")]
    SelfLink {
        /// The node.
        name: String,
        /// One of the ports.
        port: u8,
    },
    /// A link carries nothing.
    #[error("the link at port {port} of '{name}' has a rate of 0")]
    ZeroRate {
        /// The node at its first end.
        name: String,
        /// The port there.
        port: u8,
    },
    /// There is nobody to connect.
    #[error("there are no hosts")]
    NoHosts,
    /// Not everybody can reach everybody.
    #[error(
        "no path leads from '{from}' to '{to}', and {unreachable} of {nodes} nodes cannot be reached from there"
    )]
    Partitioned {
        /// The first node.
        from: String,
        /// The first that it cannot reach.
        to: String,
        /// How many it cannot reach.
        unreachable: usize,
        /// How many there are.
        nodes: usize,
    },
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<Node>,
    /// `None` where one was removed.
    links: Vec<Option<Link>>,
    by_name: BTreeMap<String, NodeId>,
}

impl Topology {
    /// One without nodes.
    pub fn new() -> Topology {
        Topology::default()
    }

    /// Adds a node.
    ///
    /// # Errors
    /// When its name is taken or impossible, or it has no port or too many.
    pub fn add(&mut self, kind: Kind, name: &str, ports: u32) -> Result<NodeId, TopologyError> {
        if name.is_empty() || name.contains(['"', '\\', '\n', '\r', '#']) {
            return Err(TopologyError::BadName(name.to_string()));
        }
        if ports == 0 || ports > u32::from(MAX_PORTS) {
            return Err(TopologyError::PortCount { name: name.to_string(), ports });
        }
        if self.by_name.contains_key(name) {
            return Err(TopologyError::DuplicateName(name.to_string()));
        }
        let id = NodeId(self.nodes.len() as u32);
        let ports = alloc::vec![None; ports as usize];
        self.nodes.push(Node { name: name.to_string(), kind, ports });
        self.by_name.insert(name.to_string(), id);
        Ok(id)
    }

    /// Connects two ports.
    ///
    /// # Errors
    /// When a port is not there or in use, both are of one node, or the rate is 0.
    pub fn connect(&mut self, a: End, b: End, capacity: Capacity) -> Result<LinkId, TopologyError> {
        for end in [a, b] {
            self.check_free(end)?;
        }
        let name = || self.node(a.node).name.clone();
        if a.node == b.node {
            return Err(TopologyError::SelfLink { name: name(), port: a.port });
        }
        if capacity.rate_bps == 0 {
            return Err(TopologyError::ZeroRate { name: name(), port: a.port });
        }
        let id = LinkId(self.links.len() as u32);
        self.links.push(Some(Link { ends: [a, b], capacity }));
        for end in [a, b] {
            self.nodes[end.node.index()].ports[usize::from(end.port) - 1] = Some(id);
        }
        Ok(id)
    }

    /// Connects the first free port of each of two nodes.
    ///
    /// # Errors
    /// When one has none, both are one, or the rate is 0.
    pub fn join(
        &mut self,
        a: NodeId,
        b: NodeId,
        capacity: Capacity,
    ) -> Result<LinkId, TopologyError> {
        let (a, b) = (self.free_end(a)?, self.free_end(b)?);
        self.connect(a, b, capacity)
    }

    /// Removes a link: a cable was pulled, or died. Returns what it was, or `None` if it was gone
    /// already.
    pub fn remove(&mut self, link: LinkId) -> Option<Link> {
        let removed = self.links.get_mut(link.index())?.take()?;
        for end in removed.ends {
            self.nodes[end.node.index()].ports[usize::from(end.port) - 1] = None;
        }
        Some(removed)
    }

    fn check_free(&self, end: End) -> Result<(), TopologyError> {
        let node = self.node(end.node);
        let name = || node.name.clone();
        if end.port == 0 || end.port > node.ports() {
            let (port, ports) = (end.port, node.ports());
            return Err(TopologyError::PortOutOfRange { name: name(), port, ports });
        }
        match node.link_at(end.port) {
            Some(_) => Err(TopologyError::PortInUse { name: name(), port: end.port }),
            None => Ok(()),
        }
    }

    fn free_end(&self, id: NodeId) -> Result<End, TopologyError> {
        let node = self.node(id);
        let free = (1..=node.ports()).find(|port| node.link_at(*port).is_none());
        let none = || TopologyError::NoFreePort { name: node.name.clone(), ports: node.ports() };
        free.map(|port| End { node: id, port }).ok_or_else(none)
    }

    /// Refuses what no fabric can use.
    ///
    /// # Errors
    /// When there are no hosts, or not every node reaches every other.
    pub fn check(&self) -> Result<(), TopologyError> {
        let Some(from) = self.hosts().next() else {
            return Err(TopologyError::NoHosts);
        };
        let reached = self.reached_from(from);
        let unreachable = reached.iter().filter(|reached| !**reached).count();
        match reached.iter().position(|reached| !reached) {
            None => Ok(()),
            Some(to) => Err(TopologyError::Partitioned {
                from: self.node(from).name.clone(),
                to: self.nodes[to].name.clone(),
                unreachable,
                nodes: self.nodes.len(),
            }),
        }
    }

    fn reached_from(&self, from: NodeId) -> Vec<bool> {
        let mut reached = alloc::vec![false; self.nodes.len()];
        reached[from.index()] = true;
        let mut open = alloc::vec![from];
        while let Some(at) = open.pop() {
            for (_, beyond) in self.neighbours(at) {
                if !core::mem::replace(&mut reached[beyond.node.index()], true) {
                    open.push(beyond.node);
                }
            }
        }
        reached
    }

    /// All nodes.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(at, node)| (NodeId(at as u32), node))
    }

    /// All hosts, in the order in which they were added.
    pub fn hosts(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.of_kind(Kind::Host)
    }

    /// All switches, in the order in which they were added.
    pub fn switches(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.of_kind(Kind::Switch)
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes().filter(move |(_, node)| node.kind == kind).map(|(id, _)| id)
    }

    /// All links that are there.
    pub fn links(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(at, link)| Some((LinkId(at as u32), link.as_ref()?)))
    }

    /// A node of this topology.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The node of that name.
    pub fn named(&self, name: &str) -> Option<NodeId> {
        self.by_name.get(name).copied()
    }

    /// A link, if it is there.
    pub fn link(&self, id: LinkId) -> Option<&Link> {
        self.links.get(id.index())?.as_ref()
    }

    /// Connected ports of a node, in order, and what is beyond.
    pub fn neighbours(&self, id: NodeId) -> impl Iterator<Item = (u8, End)> + '_ {
        let links = self.node(id).links();
        links.filter_map(move |(port, link)| Some((port, self.link(link)?.beyond(id))))
    }
}

impl fmt::Display for Topology {
    /// How much there is of what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hosts, switches) = (self.hosts().count(), self.switches().count());
        write!(f, "{hosts} hosts, {switches} switches, {} links", self.links().count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> (Topology, NodeId, NodeId) {
        let mut topology = Topology::new();
        let host = topology.add(Kind::Host, "a", 1).expect("new");
        let switch = topology.add(Kind::Switch, "s", 2).expect("new");
        (topology, host, switch)
    }

    #[test]
    fn a_link_is_at_both_ends_until_it_is_removed() {
        let (mut topology, host, switch) = two();
        let link = topology.join(host, switch, Capacity::default()).expect("free");
        let far = End { node: switch, port: 1 };
        assert_eq!(topology.neighbours(host).collect::<Vec<_>>(), [(1, far)]);
        let near = End { node: host, port: 1 };
        assert_eq!(topology.neighbours(switch).collect::<Vec<_>>(), [(1, near)]);
        assert_eq!(topology.check(), Ok(()));
        assert_eq!(topology.to_string(), "1 hosts, 1 switches, 1 links");
        assert!(topology.remove(link).is_some() && topology.remove(link).is_none());
        assert_eq!(topology.neighbours(switch).count(), 0);
        assert_eq!(topology.join(host, switch, Capacity::default()), Ok(LinkId(1)));
    }

    #[test]
    fn impossible_cables_are_refused_with_their_place() {
        let (mut topology, host, switch) = two();
        let end = |node, port| End { node, port };
        let usual = Capacity::default();
        let text = |refused: Result<LinkId, TopologyError>| refused.expect_err("bad").to_string();
        let connect =
            |topology: &mut Topology, a, b, capacity| text(topology.connect(a, b, capacity));
        let itself = connect(&mut topology, end(switch, 1), end(switch, 2), usual);
        assert_eq!(itself, "port 1 of 's' is connected to the same node");
        let beyond = connect(&mut topology, end(host, 2), end(switch, 1), usual);
        assert_eq!(beyond, "'a' has ports 1 to 1, not 2");
        let zero = connect(&mut topology, end(host, 0), end(switch, 1), usual);
        assert_eq!(zero, "'a' has ports 1 to 1, not 0");
        let nothing = Capacity { rate_bps: 0, delay_ns: 0 };
        let dead = connect(&mut topology, end(host, 1), end(switch, 1), nothing);
        assert_eq!(dead, "the link at port 1 of 'a' has a rate of 0");
        topology.join(host, switch, usual).expect("free");
        let twice = connect(&mut topology, end(host, 1), end(switch, 2), usual);
        assert_eq!(twice, "port 1 of 'a' is connected already");
        let full = text(topology.join(host, switch, usual));
        assert_eq!(full, "all 1 ports of 'a' are connected");
        assert_eq!(topology.links().count(), 1);
    }

    #[test]
    fn impossible_nodes_are_refused() {
        let (mut topology, ..) = two();
        let mut add = |name: &str, ports| {
            topology.add(Kind::Switch, name, ports).expect_err("bad").to_string()
        };
        assert_eq!(add("s", 4), "there are two nodes 's'");
        assert_eq!(add("big", 255), "'big' has 255 ports; there can be 1 to 254");
        assert_eq!(add("none", 0), "'none' has 0 ports; there can be 1 to 254");
        assert!(add("", 1).contains("is no name") && add("a\"b", 1).contains("is no name"));
    }

    #[test]
    fn a_fabric_in_two_parts_is_refused() {
        let (mut topology, host, switch) = two();
        topology.join(host, switch, Capacity::default()).expect("free");
        let lonely = topology.add(Kind::Host, "b", 1).expect("new");
        let error = topology.check().expect_err("two parts").to_string();
        assert_eq!(
            error,
            "no path leads from 'a' to 'b', and 1 of 3 nodes cannot be reached from there"
        );
        topology.join(lonely, switch, Capacity::default()).expect("free");
        assert_eq!(topology.check(), Ok(()));
        assert_eq!(Topology::new().check(), Err(TopologyError::NoHosts));
    }
}
