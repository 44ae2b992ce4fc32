//! Hosts with slots, and what directed links can carry, as placement and the ledger see them.
//!
//! Loads are accounted by *trunk*: directed links that always carry the same. In a tree of switches
//! ([`Clos`]) these are all links out of a group of hosts, and all links into it, so the load of a
//! trunk follows from the job's workers in the group. Everywhere else each directed link is a trunk
//! of its own, and its load is the sum over pairs of hosts ([`Spread`]).
//!
//! Where something is down ([`Outage`]), hosts, groups and links keep their numbers. A host that is
//! down, or cut off from most others, is *lost*: it has no slots. Links that are down carry
//! nothing. What is left of a tree is one still if its links are used evenly, as where all links to
//! a top switch are gone, and is computed pair by pair otherwise.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;
use topology::channels::Channels;
use topology::graph::{End, Link, LinkId, NodeId, Topology, TopologyError};
use topology::routes::Tables;

use crate::groups::{Clos, Groups};
use crate::outage::Outage;
use crate::spread::{DirectedLink, Ecmp, Spread};

/// Most slots of a host, so that no sum of slots can overflow.
pub const MAX_SLOTS: u32 = 1 << 12;

/// Most hosts.
pub const MAX_HOSTS: usize = 1 << 20;

/// How packets find their way.
#[derive(Clone, Copy, Debug)]
pub enum Routing<'a> {
    /// All shortest paths.
    Ecmp(Ecmp),
    /// All shortest paths, of which some lead through hosts.
    Relayed(Ecmp),
    /// The paths of tables.
    Tables(&'a Channels, &'a Tables),
}

/// Why a network cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NetworkError {
    /// It has no hosts, or is in parts.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// Hosts have too many slots or none.
    #[error("{0} slots for each host; there can be 1 to {MAX_SLOTS}")]
    Slots(u32),
    /// It is no tree whose links are used evenly, and too large to be routed pair by pair.
    #[error(
        "{hosts} hosts and {nodes} nodes: too many to route pair by pair, and not a tree whose links carry even parts"
    )]
    TooLarge {
        /// How many hosts it has.
        hosts: usize,
        /// How many nodes.
        nodes: usize,
    },
    /// Some pair of hosts has no path.
    #[error(
        "some hosts have no path to each other; does a host have to forward, or does a table lack a route?"
    )]
    NoPath,
}

/// How loads of trunks follow from a placement.
#[derive(Clone, Debug)]
pub(crate) enum Loads {
    /// By group: trunks `2 * group` up and `2 * group + 1` down, over so many links each, of which
    /// each carries an equal part. In the worst case one link carries everything: then it says 1.
    Groups(Vec<u32>),
    /// By pair: a trunk for each directed link.
    Pairs(Spread),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Network {
    groups: Groups,
    slots: u32,
    /// By host.
    lost: Vec<bool>,
    /// By group: slots of its hosts that are not lost.
    all_slots: Vec<u64>,
    names: Vec<String>,
    loads: Loads,
    /// By trunk: what each of its links can carry.
    capacity_bps: Vec<u64>,
    /// By trunk: how many links it has.
    widths: Vec<u32>,
    /// By directed link: its trunk, or none if nothing is routed over it.
    trunk_of: Vec<Option<u32>>,
    /// By trunk: its first link.
    first_link: Vec<DirectedLink>,
    /// By directed link: its sender and its receiver.
    ends: Vec<(End, End)>,
    /// By trunk: where its links begin in `trunk_links`, and the end of all.
    trunk_first: Vec<u32>,
    trunk_links: Vec<DirectedLink>,
}

impl Network {
    /// That of a topology whose hosts have so many slots each. `reservable` says how many bits per
    /// second of a link may be reserved in each direction, at most its rate: operators may keep
    /// some for traffic without guarantees.
    ///
    /// # Errors
    /// When there are no hosts, slots or paths, or too many hosts.
    pub fn new(
        topology: &Topology,
        slots: u32,
        routing: Routing<'_>,
        reservable: impl Fn(LinkId, &Link) -> u64,
    ) -> Result<Network, NetworkError> {
        Network::with_outage(topology, slots, routing, reservable, &Outage::none())
    }

    /// The same with something down. The topology is the whole one; tables are those that lead
    /// around what is down.
    ///
    /// # Errors
    /// As of [`new`](Network::new); a tree that is not one any more can be too large to be routed
    /// pair by pair.
    pub fn with_outage(
        topology: &Topology,
        slots: u32,
        routing: Routing<'_>,
        reservable: impl Fn(LinkId, &Link) -> u64,
        outage: &Outage,
    ) -> Result<Network, NetworkError> {
        topology.check()?;
        if slots == 0 || slots > MAX_SLOTS {
            return Err(NetworkError::Slots(slots));
        }
        let count = topology.hosts().count();
        let too_large = || NetworkError::TooLarge { hosts: count, nodes: topology.nodes().len() };
        if count > MAX_HOSTS {
            return Err(too_large());
        }
        let reservable = |id: LinkId, link: &Link| match outage.takes(topology, id) {
            true => 0,
            false => reservable(id, link),
        };
        let lost = outage.lost_hosts(topology, matches!(routing, Routing::Relayed(_)));
        let mut groups = None;
        if let Routing::Ecmp(ecmp) = routing
            && let Some(mut clos) = Clos::of(topology)
        {
            let is_tree =
                outage.is_empty() || Network::narrow(topology, &mut clos, outage, &lost).is_some();
            if is_tree {
                return Ok(Network::tree(topology, slots, clos, ecmp, reservable, &lost));
            }
            groups = Some(clos.groups);
        }
        let groups = groups.unwrap_or_else(|| Groups::by_ports(topology));
        let hosts = groups.hosts();
        let lost: Vec<bool> = hosts.iter().map(|host| lost[host.index()]).collect();
        let left = outage.reduced(topology, |_| false);
        let spread = match routing {
            Routing::Ecmp(ecmp) => Spread::shortest(&left, hosts, ecmp, false, &lost),
            Routing::Relayed(ecmp) => Spread::shortest(&left, hosts, ecmp, true, &lost),
            Routing::Tables(channels, tables) => {
                Spread::tables(topology, hosts, channels, tables, &lost)
            }
        };
        let by_tables = matches!(routing, Routing::Tables(..));
        let spread =
            spread.ok_or_else(|| match Spread::fits(count, topology.nodes().len(), by_tables) {
                true => NetworkError::NoPath,
                false => too_large(),
            })?;
        Ok(Network::pairs(topology, slots, groups, spread, reservable, lost))
    }

    /// Leaves the links of a tree that work, if it is still one with the same groups whose links
    /// are used evenly. Links below which all hosts are lost carry nothing, so these count as
    /// there.
    fn narrow(topology: &Topology, clos: &mut Clos, outage: &Outage, lost: &[bool]) -> Option<()> {
        let groups = &clos.groups;
        let is_lost = |host: u32| lost[groups.hosts()[host as usize].index()];
        let all_lost = |group: u32| groups.hosts_of(group).all(is_lost);
        let mut unused = BTreeSet::new();
        for group in (0..groups.root()).filter(|group| all_lost(*group)) {
            // What leads up to a dead switch that others use does not count: it is gone for all of
            // them.
            let is_inside = all_lost(groups.parent(group));
            let leads_to_dead = |link: LinkId, low: NodeId| {
                topology.link(link).is_none_or(|link| outage.has_node(link.beyond(low).node))
            };
            let up = clos.up[group as usize].iter();
            let kept = up.filter(|(link, low)| is_inside || !leads_to_dead(*link, *low));
            unused.extend(kept.map(|(link, _)| *link));
        }
        let left = outage.reduced(topology, |link| unused.contains(&link));
        clos.up = Clos::of(&left).filter(|left| left.groups == clos.groups)?.up;
        Some(())
    }

    fn tree(
        topology: &Topology,
        slots: u32,
        clos: Clos,
        ecmp: Ecmp,
        reservable: impl Fn(LinkId, &Link) -> u64,
        lost: &[bool],
    ) -> Network {
        let Clos { groups, up } = clos;
        let lost = groups.hosts().iter().map(|host| lost[host.index()]).collect();
        let parts = up.iter().map(|links| match ecmp {
            Ecmp::Even => links.len().max(1) as u32,
            Ecmp::Worst => 1,
        });
        let loads = Loads::Groups(parts.collect());
        let mut network = Network::without_trunks(topology, slots, groups, loads, lost);
        for links in &up {
            let mut capacity = if links.is_empty() { 0 } else { u64::MAX };
            let trunk = network.capacity_bps.len() as u32;
            let mut first = 0;
            for (id, low) in links {
                let link = topology.link(*id).filter(|link| link.capacity.rate_bps > 0);
                let rate = link.map_or(0, |link| reservable(*id, link).min(link.capacity.rate_bps));
                capacity = capacity.min(rate);
                let is_second = link.is_some_and(|link| link.ends[1].node == *low);
                let upward = 2 * id.index() as DirectedLink + DirectedLink::from(is_second);
                network.trunk_of[upward as usize] = Some(trunk);
                network.trunk_of[(upward ^ 1) as usize] = Some(trunk + 1);
                first = upward;
            }
            network.capacity_bps.extend([capacity; 2]);
            network.widths.extend([links.len() as u32; 2]);
            network.first_link.extend([first, first ^ 1]);
        }
        network.sort_links();
        network
    }

    fn pairs(
        topology: &Topology,
        slots: u32,
        groups: Groups,
        spread: Spread,
        reservable: impl Fn(LinkId, &Link) -> u64,
        lost: Vec<bool>,
    ) -> Network {
        let loads = Loads::Pairs(spread);
        let mut network = Network::without_trunks(topology, slots, groups, loads, lost);
        let count = network.trunk_of.len();
        network.capacity_bps = alloc::vec![0; count];
        network.widths = alloc::vec![1; count];
        network.first_link = (0..count as u32).collect();
        for (id, link) in topology.links() {
            let rate = reservable(id, link).min(link.capacity.rate_bps);
            for directed in [2 * id.index(), 2 * id.index() + 1] {
                network.trunk_of[directed] = Some(directed as u32);
                network.capacity_bps[directed] = rate;
            }
        }
        network.sort_links();
        network
    }

    /// Notes the links of each trunk.
    fn sort_links(&mut self) {
        let mut first = alloc::vec![0; self.trunks() + 1];
        self.trunk_of.iter().flatten().for_each(|trunk| first[*trunk as usize + 1] += 1);
        for trunk in 1..first.len() {
            first[trunk] += first[trunk - 1];
        }
        let mut next = first.clone();
        let mut links = alloc::vec![0; first.last().map_or(0, |end| *end as usize)];
        for (link, trunk) in (0..).zip(&self.trunk_of) {
            if let Some(trunk) = trunk {
                links[next[*trunk as usize] as usize] = link;
                next[*trunk as usize] += 1;
            }
        }
        (self.trunk_first, self.trunk_links) = (first, links);
    }

    fn without_trunks(
        topology: &Topology,
        slots: u32,
        groups: Groups,
        loads: Loads,
        lost: Vec<bool>,
    ) -> Network {
        let slots_of = |group| {
            let hosts = groups.hosts_of(group).filter(|host| !lost[*host as usize]);
            u64::from(slots) * hosts.count() as u64
        };
        let all_slots = (0..groups.len() as u32).map(slots_of).collect();
        let names = topology.nodes().map(|(_, node)| node.name().to_string()).collect();
        let last = topology.links().map(|(id, _)| id.index() + 1).max().unwrap_or(0);
        let first = topology.hosts().next().map(|node| End { node, port: 0 });
        let mut ends: Vec<(End, End)> =
            first.map_or_else(Vec::new, |none| alloc::vec![(none, none); 2 * last]);
        for (id, link) in topology.links() {
            let [a, b] = link.ends;
            ends[2 * id.index()] = (a, b);
            ends[2 * id.index() + 1] = (b, a);
        }
        Network {
            groups,
            slots,
            lost,
            all_slots,
            names,
            loads,
            capacity_bps: Vec::new(),
            widths: Vec::new(),
            trunk_of: alloc::vec![None; 2 * last],
            first_link: Vec::new(),
            ends,
            trunk_first: Vec::new(),
            trunk_links: Vec::new(),
        }
    }

    /// Hosts below the same switches.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Slots of each host.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Slots of all hosts of a group that are not lost.
    pub fn slots_of(&self, group: u32) -> u64 {
        self.all_slots[group as usize]
    }

    /// Whether a host is down, or cut off from most others.
    pub fn is_lost(&self, host: u32) -> bool {
        self.lost[host as usize]
    }

    /// How many hosts it has, lost ones among them.
    pub fn hosts(&self) -> u32 {
        self.groups.hosts().len() as u32
    }

    /// The name of a host, by number.
    pub fn host_name(&self, host: u32) -> &str {
        self.node_name(self.node_of(host))
    }

    /// The number of the host with that name.
    pub fn host_named(&self, name: &str) -> Option<u32> {
        (0..self.hosts()).find(|host| self.host_name(*host) == name)
    }

    /// Whether loads follow from groups, as in a tree.
    pub fn is_tree(&self) -> bool {
        matches!(self.loads, Loads::Groups(_))
    }

    pub(crate) fn loads(&self) -> &Loads {
        &self.loads
    }

    /// How many trunks there are.
    pub fn trunks(&self) -> usize {
        self.capacity_bps.len()
    }

    /// Bits per second that may be reserved on each link of a trunk.
    pub fn capacity_bps(&self, trunk: u32) -> u64 {
        self.capacity_bps[trunk as usize]
    }

    /// How many directed links a trunk has.
    pub fn width(&self, trunk: u32) -> u32 {
        self.widths[trunk as usize]
    }

    /// The trunk of a directed link; `None` if nothing is ever routed over it, or there is no such
    /// link.
    pub fn trunk_of(&self, link: DirectedLink) -> Option<u32> {
        *self.trunk_of.get(link as usize)?
    }

    /// The names of a trunk's first link's ends, sender first.
    pub fn ends_of(&self, trunk: u32) -> (&str, &str) {
        let (from, to) = self.ends[self.first_link[trunk as usize] as usize];
        (self.node_name(from.node), self.node_name(to.node))
    }

    /// The directed links of a trunk.
    pub fn links_of(&self, trunk: u32) -> &[DirectedLink] {
        let [first, end] = [0, 1].map(|next| self.trunk_first[trunk as usize + next] as usize);
        &self.trunk_links[first..end]
    }

    /// The sending and the receiving end of a directed link that something is routed over.
    pub fn ends(&self, link: DirectedLink) -> (End, End) {
        self.ends[link as usize]
    }

    /// By port of a node: what may be reserved there towards the other end, in bit/s.
    pub fn ports_bps(&self, node: NodeId) -> BTreeMap<u8, u64> {
        let own = self.links().filter(|(link, _)| self.ends(*link).0.node == node);
        own.map(|(link, trunk)| (self.ends(link).0.port, self.capacity_bps(trunk))).collect()
    }

    /// How many nodes there are, hosts and switches.
    pub fn nodes(&self) -> usize {
        self.names.len()
    }

    /// The name of a node.
    pub fn node_name(&self, node: NodeId) -> &str {
        &self.names[node.index()]
    }

    /// The node of a host, by number.
    pub fn node_of(&self, host: u32) -> NodeId {
        self.groups.hosts()[host as usize]
    }

    /// The directed links that something may be routed over.
    pub fn links(&self) -> impl Iterator<Item = (DirectedLink, u32)> + '_ {
        (0..).zip(&self.trunk_of).filter_map(|(link, trunk)| Some((link, (*trunk)?)))
    }
}
