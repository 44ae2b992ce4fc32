//! Hosts below the same switches, level by level.
//!
//! Every network has such groups: a host is a group of level 0, the hosts of a switch one of level
//! 1, and the group of the highest level has all hosts. Placement chooses by them. Hosts are
//! numbered so that each group has consecutive ones.
//!
//! In a tree of switches with several roots ([`Clos`]), the groups also say what each link carries.
//! Packets between two hosts go up to the lowest group that has both and down again, spread evenly
//! over all links at every hop. Then all links out of a group carry the same, and so do all links
//! into it. That holds where, for each group and its parent, every highest switch of the group has
//! as many links up as the others, and every switch above has as many links to the group as the
//! others; [`Clos::of`] checks both, and anything else is routed pair by pair.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use topology::graph::{Kind, LinkId, NodeId, Topology};

/// No group: the parent of the highest.
pub const NO_GROUP: u32 = u32::MAX;

/// See the module's text. Groups of a level come after those of the level below; level 0 is the
/// hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Hosts as nodes, in the order of their groups.
    hosts: Vec<NodeId>,
    /// Where each level begins, and the end of all.
    levels: Vec<u32>,
    parent: Vec<u32>,
    first_host: Vec<u32>,
    end_host: Vec<u32>,
    first_child: Vec<u32>,
    end_child: Vec<u32>,
}

impl Groups {
    /// From a label of each host on each level above 0, lowest first. Hosts with one label on a
    /// level have one on all higher ones too, and the labels of the highest level are all the same.
    fn from_labels(mut hosts: Vec<NodeId>, labels: &[Vec<u32>]) -> Groups {
        hosts.sort_by(|a, b| {
            let key = |host: &NodeId| {
                let at = host.index();
                labels.iter().rev().map(move |level| level[at])
            };
            key(a).cmp(key(b)).then(a.cmp(b))
        });
        let count = hosts.len() as u32;
        let mut groups = Groups {
            levels: alloc::vec![0, count],
            parent: alloc::vec![NO_GROUP; hosts.len()],
            first_host: (0..count).collect(),
            end_host: (1..=count).collect(),
            first_child: alloc::vec![0; hosts.len()],
            end_child: alloc::vec![0; hosts.len()],
            hosts,
        };
        for level in labels {
            groups.add_level(level);
        }
        groups
    }

    fn add_level(&mut self, label: &[u32]) {
        let below = self.level(self.top());
        let label_of = |groups: &Groups, group: u32| {
            label[groups.hosts[groups.first_host[group as usize] as usize].index()]
        };
        let mut last = None;
        for child in below {
            let own = label_of(self, child);
            if last != Some(own) {
                self.parent.push(NO_GROUP);
                self.first_host.push(self.first_host[child as usize]);
                self.end_host.push(0);
                self.first_child.push(child);
                self.end_child.push(0);
                last = Some(own);
            }
            let group = self.parent.len() - 1;
            self.parent[child as usize] = group as u32;
            self.end_host[group] = self.end_host[child as usize];
            self.end_child[group] = child + 1;
        }
        self.levels.push(self.parent.len() as u32);
    }

    /// How many groups there are, hosts among them.
    pub fn len(&self) -> usize {
        self.parent.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.parent.is_empty()
    }

    /// Hosts as nodes of the topology, by number.
    pub fn hosts(&self) -> &[NodeId] {
        &self.hosts
    }

    /// The highest level: that of the group of all hosts.
    pub fn top(&self) -> usize {
        self.levels.len() - 2
    }

    /// The group of all hosts.
    pub fn root(&self) -> u32 {
        self.parent.len() as u32 - 1
    }

    /// The groups of a level.
    pub fn level(&self, level: usize) -> Range<u32> {
        self.levels[level]..self.levels[level + 1]
    }

    /// The level of a group.
    pub fn level_of(&self, group: u32) -> usize {
        self.levels.partition_point(|first| *first <= group) - 1
    }

    /// The group of the level above that has this one; [`NO_GROUP`] above the highest.
    pub fn parent(&self, group: u32) -> u32 {
        self.parent[group as usize]
    }

    /// Its groups of the level below; none of a host.
    pub fn children(&self, group: u32) -> Range<u32> {
        self.first_child[group as usize]..self.end_child[group as usize]
    }

    /// The numbers of its hosts.
    pub fn hosts_of(&self, group: u32) -> Range<u32> {
        self.first_host[group as usize]..self.end_host[group as usize]
    }

    /// Whether it is a host.
    pub fn is_host(&self, group: u32) -> bool {
        group < self.hosts.len() as u32
    }

    /// Groups of any topology: hosts that share switches at their first port, at their first two,
    /// and so on, and all.
    pub fn by_ports(topology: &Topology) -> Groups {
        let hosts: Vec<NodeId> = topology.hosts().collect();
        let ports = hosts.iter().map(|host| topology.node(*host).ports()).max().unwrap_or(0);
        let mut sets = Sets::new(topology.nodes().len());
        let mut labels: Vec<Vec<u32>> = Vec::new();
        let mut before = hosts.len();
        for port in 1..=ports {
            for host in &hosts {
                let link = topology.node(*host).link_at(port);
                if let Some(link) = link.and_then(|link| topology.link(link)) {
                    sets.join(host.index(), link.beyond(*host).node.index());
                }
            }
            let label = sets.labels(&hosts);
            let count = distinct(&label, &hosts);
            // A level that joins nothing, or everything, says nothing new.
            if count > 1 && count < before {
                labels.push(label);
                before = count;
            }
        }
        labels.push(alloc::vec![0; topology.nodes().len()]);
        Groups::from_labels(hosts, &labels)
    }
}

/// How many labels hosts have.
fn distinct(label: &[u32], hosts: &[NodeId]) -> usize {
    let mut own: Vec<u32> = hosts.iter().map(|host| label[host.index()]).collect();
    own.sort_unstable();
    own.dedup();
    own.len()
}

/// Disjoint sets of nodes.
struct Sets {
    above: Vec<u32>,
}

impl Sets {
    fn new(count: usize) -> Sets {
        Sets { above: (0..count as u32).collect() }
    }

    fn of(&mut self, mut at: usize) -> usize {
        while self.above[at] as usize != at {
            self.above[at] = self.above[self.above[at] as usize];
            at = self.above[at] as usize;
        }
        at
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.of(a), self.of(b));
        self.above[a.max(b)] = a.min(b) as u32;
    }

    /// By node: the place of the first host of its set among the hosts; nodes in no host's set get
    /// the largest number.
    fn labels(&mut self, hosts: &[NodeId]) -> Vec<u32> {
        let mut first = alloc::vec![u32::MAX; self.above.len()];
        for (place, host) in (0..).zip(hosts) {
            let set = self.of(host.index());
            first[set] = first[set].min(place);
        }
        (0..self.above.len()).map(|node| first[self.of(node)]).collect()
    }
}

/// The links out of each group and into it; see the module's text.
#[derive(Clone, Debug)]
pub struct Clos {
    /// The groups.
    pub groups: Groups,
    /// By group: its links up, each with its end in the group. The group of all hosts has none.
    pub up: Vec<Vec<(LinkId, NodeId)>>,
}

impl Clos {
    /// The groups of a topology whose links carry what their groups send and receive in even parts;
    /// `None` if it is none such.
    pub fn of(topology: &Topology) -> Option<Clos> {
        let height = heights(topology)?;
        let hosts: Vec<NodeId> = topology.hosts().collect();
        let reached = height.iter().copied().filter(|height| *height != u16::MAX);
        let highest = reached.max().unwrap_or(0);
        let mut sets = Sets::new(height.len());
        let mut labels: Vec<Vec<u32>> = Vec::new();
        for level in 1..=highest {
            let below = labels.last().cloned().unwrap_or_else(|| sets.labels(&hosts));
            for (low, high) in topology.links().map(|(_, link)| by_height(&height, link.ends)) {
                if height[high.index()] == level {
                    sets.join(low.index(), high.index());
                }
            }
            let label = sets.labels(&hosts);
            if !is_even(topology, &height, level, &below, &label) {
                return None;
            }
            let is_last = distinct(&label, &hosts) == 1;
            labels.push(label);
            if is_last {
                return Some(Clos::new(topology, &height, hosts, &labels));
            }
        }
        None
    }

    fn new(topology: &Topology, height: &[u16], hosts: Vec<NodeId>, labels: &[Vec<u32>]) -> Clos {
        let groups = Groups::from_labels(hosts, labels);
        let mut up = alloc::vec![Vec::new(); groups.len()];
        // By label and level, the group.
        let mut named = BTreeMap::new();
        for level in 0..groups.top() {
            for group in groups.level(level) {
                let host = groups.hosts()[groups.hosts_of(group).start as usize];
                let label =
                    if level == 0 { host.index() as u32 } else { labels[level - 1][host.index()] };
                named.insert((level, label), group);
            }
        }
        for (id, link) in topology.links() {
            let (low, _) = by_height(height, link.ends);
            let level = usize::from(height[low.index()]);
            let label = if level == 0 {
                low.index() as u32
            } else if level <= labels.len() {
                labels[level - 1][low.index()]
            } else {
                continue;
            };
            if let Some(group) = named.get(&(level, label)) {
                up[*group as usize].push((id, low));
            }
        }
        Clos { groups, up }
    }
}

/// The lower and the higher end of a link.
fn by_height(height: &[u16], ends: [topology::graph::End; 2]) -> (NodeId, NodeId) {
    let [a, b] = ends.map(|end| end.node);
    if height[a.index()] < height[b.index()] { (a, b) } else { (b, a) }
}

/// Links from each node down to the nearest host, [`u16::MAX`] of a switch without links; `None` if
/// a link joins two of the same height, or a node with links reaches no host.
fn heights(topology: &Topology) -> Option<Vec<u16>> {
    let mut height = alloc::vec![u16::MAX; topology.nodes().len()];
    let mut reached: Vec<NodeId> = topology.hosts().collect();
    reached.iter().for_each(|host| height[host.index()] = 0);
    let mut next = 0;
    while let Some(&at) = reached.get(next) {
        next += 1;
        for (_, beyond) in topology.neighbours(at) {
            if height[beyond.node.index()] == u16::MAX {
                height[beyond.node.index()] = height[at.index()].checked_add(1)?;
                reached.push(beyond.node);
            }
        }
    }
    let is_level = |link: &topology::graph::Link| {
        let [a, b] = link.ends.map(|end| height[end.node.index()]);
        a == b
    };
    let has_host = topology.nodes().all(|(id, node)| {
        let is_reached = height[id.index()] != u16::MAX || node.links().next().is_none();
        is_reached && (node.kind() == Kind::Switch || height[id.index()] == 0)
    });
    (has_host && !topology.links().any(|(_, link)| is_level(link))).then_some(height)
}

/// Whether links between a level and the one below spread evenly what each group below sends and
/// receives: the two conditions of the module's text. `below` and `label` name the groups of both
/// levels by node; of hosts, the host.
fn is_even(topology: &Topology, height: &[u16], level: u16, below: &[u32], label: &[u32]) -> bool {
    // Links by group below and switch above, and by group and node below.
    let (mut down, mut up) = (BTreeMap::new(), BTreeMap::new());
    for (_, link) in topology.links() {
        let (low, high) = by_height(height, link.ends);
        if height[high.index()] == level {
            *down.entry((below[low.index()], high)).or_insert(0_u32) += 1;
            *up.entry((below[low.index()], low)).or_insert(0_u32) += 1;
        }
    }
    // Nodes of each group that links could lead from, and of each group that they could lead to.
    let (mut lows, mut highs) = (BTreeMap::new(), BTreeMap::new());
    for (node, _) in topology.nodes() {
        if height[node.index()] == level - 1 {
            *lows.entry(below[node.index()]).or_insert(0_u32) += 1;
        }
        if height[node.index()] == level {
            *highs.entry(label[node.index()]).or_insert(0_u32) += 1;
        }
    }
    let above: BTreeMap<u32, u32> =
        (0..).zip(below).map(|(node, group)| (*group, label[node])).collect();
    are_alike(&up, |group| lows.get(&group).copied())
        && are_alike(&down, |group| highs.get(above.get(&group)?).copied())
}

/// Whether in each group all counts are the same, and there are as many as expected.
fn are_alike(counts: &BTreeMap<(u32, NodeId), u32>, expected: impl Fn(u32) -> Option<u32>) -> bool {
    let mut groups: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for ((group, _), count) in counts {
        let (first, nodes) = groups.entry(*group).or_insert((*count, 0));
        if first != count {
            return false;
        }
        *nodes += 1;
    }
    groups.iter().all(|(group, (_, nodes))| expected(*group) == Some(*nodes))
}
