//! What of a topology is down: hosts, switches and links that are known not to work.
//!
//! The topology itself stays as it is, so that hosts and links keep their numbers, and placements
//! their meaning. A node that is down takes its links with it.

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use topology::graph::{Kind, LinkId, NodeId, Topology};

/// What is down, by name. Numbers of nodes and links follow from their order in a topology's file;
/// names stay when it is edited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Hosts and switches.
    pub nodes: Vec<String>,
    /// Links, each by the node and port of one of its ends.
    pub links: Vec<(String, u8)>,
    /// Those of the links that are down because an agent saw no carrier there, named in the same
    /// way.
    pub carriers: Vec<(String, u8)>,
}

impl Names {
    /// Whether nothing is down.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.links.is_empty()
    }
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outage {
    nodes: BTreeSet<NodeId>,
    links: BTreeSet<LinkId>,
    /// Those of the links that an agent's word put here: an agent's word takes them out again.
    carriers: BTreeSet<LinkId>,
}

impl Outage {
    /// Nothing is down.
    pub fn none() -> Outage {
        Outage::default()
    }

    /// What has these names, and which of them the topology does not have: links among these are
    /// `NAME:PORT`.
    pub fn named(topology: &Topology, names: &Names) -> (Outage, Vec<String>) {
        let (mut outage, mut unknown) = (Outage::none(), Vec::new());
        for name in &names.nodes {
            let Some(node) = topology.named(name) else {
                unknown.push(name.to_string());
                continue;
            };
            outage.nodes.insert(node);
        }
        for (name, port) in &names.links {
            let link = topology.named(name).and_then(|node| topology.node(node).link_at(*port));
            let Some(link) = link else {
                unknown.push(alloc::format!("{name}:{port}"));
                continue;
            };
            outage.links.insert(link);
            if names.carriers.contains(&(name.to_string(), *port)) {
                outage.carriers.insert(link);
            }
        }
        (outage, unknown)
    }

    /// The names of all that is down.
    pub fn names(&self, topology: &Topology) -> Names {
        let name = |node: NodeId| topology.node(node).name().to_string();
        let ends = |links: &BTreeSet<LinkId>| {
            let links = links.iter().filter_map(|link| topology.link(*link));
            links.map(|link| (name(link.ends[0].node), link.ends[0].port)).collect()
        };
        let nodes = self.nodes.iter().map(|node| name(*node)).collect();
        Names { nodes, links: ends(&self.links), carriers: ends(&self.carriers) }
    }

    /// A host or switch goes down, or comes back; whether that is new.
    pub fn set_node(&mut self, node: NodeId, is_down: bool) -> bool {
        if is_down { self.nodes.insert(node) } else { self.nodes.remove(&node) }
    }

    /// A link goes down, in both directions, or comes back; whether that is new.
    pub fn set_link(&mut self, link: LinkId, is_down: bool) -> bool {
        if is_down {
            return self.links.insert(link);
        }
        self.carriers.remove(&link);
        self.links.remove(&link)
    }

    /// The same where an agent lost or found the link's carrier.
    pub fn set_carrier(&mut self, link: LinkId, is_down: bool) -> bool {
        let is_new = self.set_link(link, is_down);
        if is_new && is_down {
            self.carriers.insert(link);
        }
        is_new
    }

    /// Whether nothing is down.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.links.is_empty()
    }

    /// Hosts and switches that are down.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().copied()
    }

    /// Links that are down themselves; those of nodes that are down are not among them.
    pub fn links(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.links.iter().copied()
    }

    /// Those of the links that are down because an agent saw no carrier.
    pub fn carriers(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.carriers.iter().copied()
    }

    /// Whether a node is down.
    pub fn has_node(&self, node: NodeId) -> bool {
        self.nodes.contains(&node)
    }

    /// Whether a link does not work: it is down, or one of its ends is.
    pub fn takes(&self, topology: &Topology, link: LinkId) -> bool {
        let has_dead_end = || {
            let ends = topology.link(link).map(|link| link.ends.map(|end| end.node));
            ends.is_some_and(|ends| ends.iter().any(|node| self.nodes.contains(node)))
        };
        self.links.contains(&link) || has_dead_end()
    }

    /// The topology without the links that do not work. Nodes and links keep their numbers.
    pub fn left(&self, topology: &Topology) -> Topology {
        self.reduced(topology, |_| false)
    }

    /// The topology without the links that do not work, but for those that are to stay.
    pub(crate) fn reduced(&self, topology: &Topology, stays: impl Fn(LinkId) -> bool) -> Topology {
        let mut reduced = topology.clone();
        for (link, _) in topology.links() {
            if self.takes(topology, link) && !stays(link) {
                reduced.remove(link);
            }
        }
        reduced
    }

    /// By node, whether it is a host that no job can use: it is down, or does not reach the largest
    /// part of the hosts. Packets go through hosts only where `hosts_forward`.
    pub(crate) fn lost_hosts(&self, topology: &Topology, hosts_forward: bool) -> Vec<bool> {
        let mut lost = alloc::vec![false; topology.nodes().len()];
        if self.is_empty() {
            return lost;
        }
        let reduced = self.reduced(topology, |_| false);
        let is_switch = |node: NodeId| topology.node(node).kind() == Kind::Switch;
        let part = parts(&reduced, |node| is_switch(node) || hosts_forward);
        // A host belongs to the parts beyond its links, and to its own: that of hosts that it is
        // joined to directly.
        let parts_of = |host: NodeId| {
            let beyond = reduced.neighbours(host).map(|(_, end)| part[end.node.index()]);
            let mut parts: Vec<u32> = beyond.chain([part[host.index()]]).collect();
            parts.sort_unstable();
            parts.dedup();
            parts
        };
        let mut hosts_in = alloc::vec![0_u32; topology.nodes().len()];
        for host in topology.hosts().filter(|host| !self.has_node(*host)) {
            for own in parts_of(host) {
                hosts_in[own as usize] += 1;
            }
        }
        let most = hosts_in.iter().copied().max().unwrap_or(0);
        let largest = hosts_in.iter().position(|hosts| *hosts == most).unwrap_or(0) as u32;
        for host in topology.hosts() {
            lost[host.index()] = self.has_node(host) || !parts_of(host).contains(&largest);
        }
        lost
    }
}

/// By node, the first node of the part that it belongs to: nodes that reach each other through
/// nodes that forward.
fn parts(topology: &Topology, forwards: impl Fn(NodeId) -> bool) -> Vec<u32> {
    let mut part = alloc::vec![u32::MAX; topology.nodes().len()];
    for (first, _) in topology.nodes() {
        if part[first.index()] != u32::MAX {
            continue;
        }
        part[first.index()] = first.index() as u32;
        let mut open = alloc::vec![first];
        while let Some(at) = open.pop().filter(|at| forwards(*at)) {
            for (_, beyond) in topology.neighbours(at) {
                let own = &mut part[beyond.node.index()];
                if *own == u32::MAX && forwards(beyond.node) {
                    *own = first.index() as u32;
                    open.push(beyond.node);
                }
            }
        }
    }
    part
}
