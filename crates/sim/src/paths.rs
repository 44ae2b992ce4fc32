//! Routes: from every node and switch towards every node, the links that a packet may take next.
//!
//! Most nodes have one cable, and most switches the same few sets of links for many destinations.
//! So sets are kept once, a node with one cable has no table, and all nodes with one cable to the
//! same switch are one destination until a packet is at that switch: ten thousand hosts take little
//! memory, and little of a processor's cache. Where there is one link, as on all ways down a tree,
//! the table has it instead of a set.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use crate::link::{Edge, Vertex};

/// Which of several shortest paths a packet takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// Always the same: the one by the cable that was added first.
    #[default]
    First,
    /// By a hash of addresses and destination queue pair, at every switch another one (ECMP). NICs
    /// get the same from the UDP source port, which they choose by queue pair.
    Flow,
    /// Every packet at random: packets of a queue pair overtake each other.
    Packet,
    /// Every packet by the link on which least waits in its queue, one of these at random (adaptive
    /// routing): packets of a queue pair overtake each other by little.
    Shortest,
}

/// The links that a packet may take: one, by its number, or with [`SET`] the place of a set of
/// links.
pub(crate) type Choice = u32;

const SET: Choice = 1 << 31;

/// The empty set is the first one.
const NO_LINK: Choice = SET;

/// What a node or switch does with packets.
#[derive(Clone, Debug)]
pub(crate) enum RowOf {
    /// The same for all destinations.
    All(Choice),
    /// By destination: one for each class of nodes.
    Each(Vec<Choice>),
}

/// How a node is reached.
#[derive(Clone, Copy, Debug)]
struct End {
    /// The class of nodes to which the same ways lead.
    class: u32,
    /// The vertex at which these ways end, [`NOWHERE`] if that is the node itself, and what it
    /// does.
    at: u32,
    choice: Choice,
}

const NOWHERE: u32 = u32::MAX;

/// See the module's text.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    nodes: u32,
    /// By node.
    ends: Vec<End>,
    /// Nodes, then switches.
    rows: Vec<RowOf>,
    sets: Vec<Box<[u32]>>,
    by_links: BTreeMap<Box<[u32]>, Choice>,
}

impl Paths {
    /// Nobody reaches anybody, and each node is its own class.
    pub(crate) fn new(nodes: u32, switches: u32) -> Paths {
        let rows = vec![RowOf::All(NO_LINK); (nodes + switches) as usize];
        let ends = (0..nodes).map(|class| End { class, at: NOWHERE, choice: NO_LINK }).collect();
        let mut paths = Paths { nodes, ends, rows, sets: Vec::new(), by_links: BTreeMap::new() };
        paths.choice(&[]);
        paths
    }

    fn index(&self, vertex: Vertex) -> usize {
        match vertex {
            Vertex::Node(node) => node as usize,
            Vertex::Switch(switch) => (self.nodes + switch) as usize,
        }
    }

    /// What a table has for these links.
    pub(crate) fn choice(&mut self, links: &[u32]) -> Choice {
        if let &[link] = links
            && link & SET == 0
        {
            return link;
        }
        if let Some(&choice) = self.by_links.get(links) {
            return choice;
        }
        let choice = SET | self.sets.len() as Choice;
        self.sets.push(links.into());
        self.by_links.insert(links.into(), choice);
        choice
    }

    fn chosen<'a>(&'a self, choice: &'a Choice) -> &'a [u32] {
        match choice & SET {
            0 => core::slice::from_ref(choice),
            _ => &self.sets[(choice & !SET) as usize],
        }
    }

    /// Sets what a vertex does.
    pub(crate) fn set(&mut self, at: Vertex, row: RowOf) {
        let index = self.index(at);
        self.rows[index] = self.shortened(at, row);
    }

    /// A node that does the same with everything that is not for itself has no table.
    fn shortened(&self, at: Vertex, row: RowOf) -> RowOf {
        let (Vertex::Node(node), RowOf::Each(choices)) = (at, &row) else {
            return row;
        };
        let mut others = (0..).zip(choices).filter(|&(dest, _)| dest != node);
        let Some((_, &first)) = others.next() else {
            return row;
        };
        if others.all(|(_, &choice)| choice == first) { RowOf::All(first) } else { row }
    }

    /// The links by which a packet may leave `at` towards a node; none if it cannot get there.
    pub(crate) fn links(&self, at: Vertex, dest: u32) -> &[u32] {
        let Some(end) = self.ends.get(dest as usize).filter(|_| at != Vertex::Node(dest)) else {
            return &[];
        };
        let index = self.index(at);
        let choice = match &self.rows[index] {
            _ if end.at == index as u32 => &end.choice,
            RowOf::All(choice) => choice,
            RowOf::Each(choices) => &choices[end.class as usize],
        };
        self.chosen(choice)
    }

    /// The links from one node to another, by the first of several ways; cut short where there is
    /// none. `end` says where a link ends.
    pub(crate) fn way(&self, from: u32, to: u32, end: impl Fn(u32) -> Vertex) -> Vec<u32> {
        let (mut at, mut way) = (Vertex::Node(from), Vec::new());
        // Tables with a loop: no way is longer than all vertices.
        while at != Vertex::Node(to) && way.len() <= self.rows.len() {
            let Some(&link) = self.links(at, to).first() else {
                break;
            };
            way.push(link);
            at = end(link);
        }
        way
    }

    /// The links by which packets of a node leave it.
    pub(crate) fn cables(&self, node: u32) -> Vec<u32> {
        let choices = match &self.rows[node as usize] {
            RowOf::All(choice) => core::slice::from_ref(choice),
            RowOf::Each(choices) => choices,
        };
        let links = choices.iter().flat_map(|choice| self.chosen(choice).iter().copied());
        let mut links: Vec<u32> = links.collect();
        links.sort_unstable();
        links.dedup();
        links
    }

    // ---- shortest paths ------------------------------------------------------------------------

    /// Shortest paths over the links that are `usable`.
    pub(crate) fn shortest(
        nodes: u32,
        switches: u32,
        edges: &[Edge],
        spread: Spread,
        usable: impl Fn(u32) -> bool,
    ) -> Paths {
        let mut paths = Paths::new(nodes, switches);
        let vertices = paths.rows.len();
        let (mut into, mut out) = (vec![Vec::new(); vertices], vec![Vec::new(); vertices]);
        for (link, edge) in (0..).zip(edges).filter(|&(link, _)| usable(link)) {
            into[paths.index(edge.to)].push((link, paths.index(edge.from)));
            out[paths.index(edge.from)].push(link);
        }
        let classes = paths.classify(&into);
        for (vertex, out) in out.iter().enumerate() {
            // With one cable there is no choice.
            let is_plain = vertex < nodes as usize && out.len() <= 1;
            let choice = if is_plain { paths.choice(out) } else { NO_LINK };
            paths.rows[vertex] = match is_plain {
                true => RowOf::All(choice),
                false => RowOf::Each(Vec::with_capacity(classes.len())),
            };
        }
        for dest in classes {
            let found = paths.search(&into, spread, dest);
            for (row, choice) in paths.rows.iter_mut().zip(found) {
                if let RowOf::Each(choices) = row {
                    choices.push(choice);
                }
            }
        }
        paths
    }

    /// Puts the nodes whose only cable comes from the same switch into one class, and every other
    /// one into its own. Returns for each class where its ways end.
    fn classify(&mut self, into: &[Vec<(u32, usize)>]) -> Vec<usize> {
        let nodes = self.nodes as usize;
        let mut dests = Vec::new();
        let mut by_switch = BTreeMap::new();
        for (node, into) in into.iter().enumerate().take(nodes) {
            let new = dests.len() as u32;
            self.ends[node] = match **into {
                [(link, switch)] if switch >= nodes => {
                    let class = *by_switch.entry(switch).or_insert(new);
                    dests.extend((class == new).then_some(switch));
                    End { class, at: switch as u32, choice: self.choice(&[link]) }
                }
                _ => {
                    dests.push(node);
                    End { class: new, at: NOWHERE, choice: NO_LINK }
                }
            };
        }
        dests
    }

    /// The choice of every vertex on its way to `dest`.
    fn search(&mut self, into: &[Vec<(u32, usize)>], spread: Spread, dest: usize) -> Vec<Choice> {
        let (nodes, vertices) = (self.nodes as usize, into.len());
        let mut hops = vec![u32::MAX; vertices];
        let mut links = vec![Vec::new(); vertices];
        let mut queue = VecDeque::from([dest]);
        hops[dest] = 0;
        while let Some(vertex) = queue.pop_front() {
            for &(link, from) in &into[vertex] {
                if hops[from] == u32::MAX {
                    hops[from] = hops[vertex] + 1;
                    queue.extend((from >= nodes).then_some(from));
                }
                let is_shortest = hops[from] == hops[vertex] + 1;
                let is_wanted = spread != Spread::First || links[from].is_empty();
                if is_shortest && is_wanted {
                    links[from].push(link);
                }
            }
        }
        let sorted = links.iter_mut().map(|links| {
            links.sort_unstable();
            self.choice(links)
        });
        sorted.collect()
    }
}
