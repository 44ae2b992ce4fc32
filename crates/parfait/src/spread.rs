//! Which directed links the packets of a pair of hosts take, and how much of them.
//!
//! Any topology and any tables: all shortest paths, spread evenly at every hop as ECMP does on
//! average; all of them at once, where each link must be able to carry everything that a hash could
//! send over it; or the one path of forwarding tables. In server-centric networks such as BCube
//! hosts forward, too.

use alloc::vec::Vec;

use topology::channels::Channels;
use topology::graph::{Kind, NodeId, Topology};
use topology::routes::Tables;

/// Everything that a pair of hosts sends, as parts. It can be divided by what links are usually
/// many of (powers of two and 3, 5, 7, 11 and 13), so that parts that meet again have no rounding:
/// a link that is full stays so when paths change.
pub const WHOLE: u64 = (1 << 20) * 81 * 25 * 7 * 11 * 13;

/// A direction of a link: twice the number of the link, and one more from its second end to its
/// first.
pub type DirectedLink = u32;

/// Most distances that are kept: hosts times nodes.
const MOST_DISTANCES: usize = 1 << 25;

/// Most pairs of hosts whose links are kept, and not looked up each time.
const MOST_KEPT_PAIRS: usize = 1 << 16;

/// How packets of a pair are spread over its paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ecmp {
    /// Evenly over the links of each hop.
    Even,
    /// Unknown: each link of a shortest path may have to carry everything.
    Worst,
}

/// Next hops on shortest paths between hosts.
#[derive(Clone, Debug)]
struct Shortest {
    ecmp: Ecmp,
    /// By node: its links out, and what is beyond.
    out: Vec<Vec<(DirectedLink, u32)>>,
    nodes: Vec<u32>,
    /// By destination and node: hops.
    distance: Vec<u16>,
    /// Whether a node passes packets on.
    relays: Vec<bool>,
}

/// The links of each pair of hosts, by number of the host.
#[derive(Clone, Debug)]
struct Kept {
    /// Where the links of each pair begin, and the end of all.
    first: Vec<u32>,
    links: Vec<(DirectedLink, u64)>,
}

#[derive(Clone, Debug)]
enum Paths {
    Shortest(Shortest),
    Kept(Kept),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Spread {
    hosts: usize,
    paths: Paths,
}

impl Spread {
    /// Whether shortest paths of so many hosts and nodes, or tables of so many hosts, are not too
    /// many.
    pub fn fits(hosts: usize, nodes: usize, by_tables: bool) -> bool {
        let (product, most) = match by_tables {
            true => (hosts.checked_mul(hosts), MOST_KEPT_PAIRS),
            false => (hosts.checked_mul(nodes), MOST_DISTANCES),
        };
        product.is_some_and(|product| product <= most)
    }

    /// Shortest paths between these hosts. `hosts_forward` lets paths lead through hosts. Hosts
    /// that are lost, by number, need no paths.
    ///
    /// `None` if there are too many hosts and nodes, or a host does not reach another.
    pub fn shortest(
        topology: &Topology,
        hosts: &[NodeId],
        ecmp: Ecmp,
        hosts_forward: bool,
        lost: &[bool],
    ) -> Option<Spread> {
        let count = topology.nodes().len();
        if !Spread::fits(hosts.len(), count, false) {
            return None;
        }
        let mut out = alloc::vec![Vec::new(); count];
        for (id, link) in topology.links() {
            let [a, b] = link.ends.map(|end| end.node.index());
            let forward = 2 * id.index() as DirectedLink;
            out[a].push((forward, b as u32));
            out[b].push((forward + 1, a as u32));
        }
        let nodes = hosts.iter().map(|host| host.index() as u32).collect();
        let kinds = topology.nodes().map(|(_, node)| node.kind() == Kind::Switch || hosts_forward);
        let relays = kinds.collect();
        let mut shortest = Shortest { ecmp, out, nodes, distance: Vec::new(), relays };
        for destination in 0..hosts.len() {
            shortest.add_distances(destination);
        }
        let is_reached = |destination: usize| {
            let own = &shortest.distance[destination * count..][..count];
            let mut others = shortest.nodes.iter().zip(lost).filter(|(_, is_lost)| !**is_lost);
            lost[destination] || others.all(|(node, _)| own[*node as usize] != u16::MAX)
        };
        if !(0..hosts.len()).all(is_reached) {
            return None;
        }
        let spread = Spread { hosts: hosts.len(), paths: Paths::Shortest(shortest) };
        Some(spread.kept())
    }

    /// The paths of forwarding tables. A host with several ports sends an equal part through each,
    /// to the port of the same place at the other host.
    ///
    /// Hosts that are lost, by number, need no paths.
    ///
    /// `None` if a path ends before its host, or there are more pairs of hosts than can be kept.
    pub fn tables(
        topology: &Topology,
        hosts: &[NodeId],
        channels: &Channels,
        tables: &Tables,
        lost: &[bool],
    ) -> Option<Spread> {
        if !Spread::fits(hosts.len(), 0, true) {
            return None;
        }
        let ports_of = |host: &NodeId| {
            let places = (0_u32..).zip(channels.end_ports());
            places.filter(|(_, port)| port.end.node == *host).map(|(place, _)| place).collect()
        };
        let ports: Vec<Vec<u32>> = hosts.iter().map(ports_of).collect();
        let mut kept = Kept { first: alloc::vec![0], links: Vec::new() };
        for (from, from_lost) in ports.iter().zip(lost) {
            for (to, to_lost) in ports.iter().zip(lost) {
                if *from_lost || *to_lost {
                    kept.first.push(kept.links.len() as u32);
                    continue;
                }
                let part = WHOLE.div_ceil(from.len().max(1) as u64);
                for (at, source) in from.iter().enumerate().filter(|_| from != to) {
                    let target = *to.get(at % to.len().max(1))?;
                    let path = table_path(topology, channels, tables, *source, target)?;
                    kept.links.extend(path.into_iter().map(|link| (link, part)));
                }
                if from.is_empty() || to.is_empty() {
                    return None;
                }
                kept.first.push(kept.links.len() as u32);
            }
        }
        Some(Spread { hosts: hosts.len(), paths: Paths::Kept(kept) })
    }

    /// Looks the links of all pairs up, where there are few.
    fn kept(self) -> Spread {
        if self.hosts * self.hosts > MOST_KEPT_PAIRS {
            return self;
        }
        let mut kept = Kept { first: alloc::vec![0], links: Vec::new() };
        for from in 0..self.hosts as u32 {
            for to in 0..self.hosts as u32 {
                self.each(from, to, |link, part| kept.links.push((link, part)));
                kept.first.push(kept.links.len() as u32);
            }
        }
        Spread { hosts: self.hosts, paths: Paths::Kept(kept) }
    }

    /// The links that packets from one host to another take, each with the part of [`WHOLE`] that
    /// it carries; none within a host. A link may come more than once, and its parts add up.
    pub fn each(&self, from: u32, to: u32, mut visit: impl FnMut(DirectedLink, u64)) {
        match &self.paths {
            Paths::Shortest(shortest) => shortest.each(from, to, visit),
            Paths::Kept(kept) => {
                let pair = from as usize * self.hosts + to as usize;
                let own = kept.first[pair] as usize..kept.first[pair + 1] as usize;
                kept.links[own].iter().for_each(|(link, part)| visit(*link, *part));
            }
        }
    }
}

impl Shortest {
    /// Adds the hops from every node to a destination.
    fn add_distances(&mut self, destination: usize) {
        let first = self.distance.len();
        self.distance.resize(first + self.out.len(), u16::MAX);
        let distance = &mut self.distance[first..];
        let mut reached = alloc::vec![self.nodes[destination]];
        distance[reached[0] as usize] = 0;
        let mut next = 0;
        while let Some(&at) = reached.get(next) {
            next += 1;
            // Links have two directions, so the way back is as long.
            for (_, before) in &self.out[at as usize] {
                if distance[*before as usize] == u16::MAX {
                    distance[*before as usize] = distance[at as usize].saturating_add(1);
                    if self.relays[*before as usize] {
                        reached.push(*before);
                    }
                }
            }
        }
    }

    fn each(&self, from: u32, to: u32, mut visit: impl FnMut(DirectedLink, u64)) {
        let count = self.out.len();
        let distance = &self.distance[to as usize * count..][..count];
        let mut here = alloc::vec![(self.nodes[from as usize], WHOLE)];
        let mut hops = distance[here[0].0 as usize];
        while hops > 0 && !here.is_empty() {
            let mut beyond: Vec<(u32, u64)> = Vec::new();
            for (node, amount) in &here {
                let is_next = |next: u32| {
                    distance[next as usize] == hops - 1 && (hops == 1 || self.relays[next as usize])
                };
                let out = self.out[*node as usize].iter().filter(|(_, next)| is_next(*next));
                let count = out.clone().count().max(1) as u64;
                for (at, (link, next)) in (0..).zip(out) {
                    // The first links have what does not divide, so that all parts together are the
                    // amount.
                    let part = match self.ecmp {
                        Ecmp::Even => amount / count + u64::from(at < amount % count),
                        Ecmp::Worst => WHOLE,
                    };
                    visit(*link, part);
                    match beyond.iter_mut().find(|(node, _)| node == next) {
                        Some((_, sum)) => *sum += part,
                        None => beyond.push((*next, part)),
                    }
                }
            }
            here = beyond;
            hops -= 1;
        }
    }
}

/// The directed links from one end port to another, by forwarding tables.
fn table_path(
    topology: &Topology,
    channels: &Channels,
    tables: &Tables,
    from: u32,
    to: u32,
) -> Option<Vec<DirectedLink>> {
    let ends = channels.end_ports();
    let (source, target) = (ends[from as usize], ends[to as usize]);
    let leaving = |node: NodeId, port: u8| {
        let link = topology.node(node).link_at(port)?;
        let is_second = topology.link(link)?.ends[1].node == node;
        Some(2 * link.index() as DirectedLink + DirectedLink::from(is_second))
    };
    let mut links = alloc::vec![leaving(source.end.node, source.end.port)?];
    let mut at = source.switch;
    for channel in tables.path(channels, source.switch, to) {
        let channel = channels.get(channel);
        links.push(leaving(channels.switches()[channel.from as usize], channel.port)?);
        at = channel.to;
    }
    links.push(leaving(channels.switches()[at as usize], target.port)?);
    (at == target.switch).then_some(links)
}
