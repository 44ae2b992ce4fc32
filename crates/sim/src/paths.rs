//! Routes: from every node and switch towards every node, the links that a packet may take next.
//!
//! Most nodes have one cable, and most switches the same few sets of links for many destinations: sets are kept once, and
//! a node with one cable has no table, so that ten thousand hosts take little memory.

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
    /// By a hash of addresses and destination queue pair, at every switch another one (ECMP). NICs get the same from the
    /// UDP source port, which they choose by queue pair.
    Flow,
    /// Every packet at random: packets of a queue pair overtake each other.
    Packet,
}

/// The place of a set of links; set 0 is the empty one.
pub(crate) type Choice = u32;

/// What a node or switch does with packets.
#[derive(Clone, Debug)]
pub(crate) enum RowOf {
    /// The same for all destinations.
    All(Choice),
    /// By destination.
    Each(Vec<Choice>),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    nodes: u32,
    /// Nodes, then switches.
    rows: Vec<RowOf>,
    sets: Vec<Box<[u32]>>,
    by_links: BTreeMap<Box<[u32]>, Choice>,
}

impl Paths {
    /// Nobody reaches anybody.
    pub(crate) fn new(nodes: u32, switches: u32) -> Paths {
        let rows = vec![RowOf::All(0); (nodes + switches) as usize];
        let mut paths = Paths { nodes, rows, sets: Vec::new(), by_links: BTreeMap::new() };
        paths.choice(&[]);
        paths
    }

    fn index(&self, vertex: Vertex) -> usize {
        match vertex {
            Vertex::Node(node) => node as usize,
            Vertex::Switch(switch) => (self.nodes + switch) as usize,
        }
    }

    /// The place of a set of links.
    pub(crate) fn choice(&mut self, links: &[u32]) -> Choice {
        if let Some(&choice) = self.by_links.get(links) {
            return choice;
        }
        let choice = self.sets.len() as Choice;
        self.sets.push(links.into());
        self.by_links.insert(links.into(), choice);
        choice
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
        if dest >= self.nodes || at == Vertex::Node(dest) {
            return &[];
        }
        let choice = match &self.rows[self.index(at)] {
            RowOf::All(choice) => *choice,
            RowOf::Each(choices) => choices[dest as usize],
        };
        &self.sets[choice as usize]
    }

    /// The links from one node to another, by the first of several ways; cut short where there is none. `end` says where a
    /// link ends.
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
        let links = choices.iter().flat_map(|&choice| self.sets[choice as usize].iter().copied());
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
        let mut rows = vec![Vec::new(); vertices];
        for (vertex, row) in rows.iter_mut().enumerate() {
            // With one cable there is no choice.
            if vertex >= nodes as usize || out[vertex].len() > 1 {
                row.resize(nodes as usize, 0);
            }
        }
        let mut search = Search { nodes: nodes as usize, into: &into, spread, last: None };
        for dest in 0..nodes as usize {
            search.towards(dest, &mut paths, &mut rows);
        }
        for (index, row) in rows.into_iter().enumerate() {
            paths.rows[index] = match row.is_empty() && index < nodes as usize {
                true => RowOf::All(paths.choice(&out[index])),
                false => RowOf::Each(row),
            };
        }
        paths
    }
}

/// A search from one destination after the other.
struct Search<'a> {
    nodes: usize,
    /// By vertex: the links into it, and where they start.
    into: &'a [Vec<(u32, usize)>],
    spread: Spread,
    /// The vertex that the only cable of the last destination joins, and what that search has found.
    last: Option<(usize, Vec<Choice>)>,
}

impl Search<'_> {
    /// Sets the choices of all vertices for a destination.
    fn towards(&mut self, dest: usize, paths: &mut Paths, rows: &mut [Vec<Choice>]) {
        let found = match *self.into[dest] {
            // All nodes at a switch are reached by the same ways to this switch.
            [(link, switch)] if switch >= self.nodes => {
                let known = self.last.take().filter(|&(last, _)| last == switch);
                let (_, mut found) = known.unwrap_or_else(|| (switch, self.search(switch, paths)));
                found[switch] = paths.choice(&[link]);
                found
            }
            _ => self.search(dest, paths),
        };
        for (row, &choice) in rows.iter_mut().zip(&found).filter(|(row, _)| !row.is_empty()) {
            row[dest] = choice;
        }
        if let [(_, switch)] = *self.into[dest] {
            self.last = Some((switch, found));
        }
    }

    /// The choice of every vertex on its way to `end`.
    fn search(&self, end: usize, paths: &mut Paths) -> Vec<Choice> {
        let vertices = self.into.len();
        let mut hops = vec![u32::MAX; vertices];
        let mut links = vec![Vec::new(); vertices];
        let mut queue = VecDeque::from([end]);
        hops[end] = 0;
        while let Some(vertex) = queue.pop_front() {
            for &(link, from) in &self.into[vertex] {
                if hops[from] == u32::MAX {
                    hops[from] = hops[vertex] + 1;
                    queue.extend((from >= self.nodes).then_some(from));
                }
                let is_shortest = hops[from] == hops[vertex] + 1;
                let is_wanted = self.spread != Spread::First || links[from].is_empty();
                if is_shortest && is_wanted {
                    links[from].push(link);
                }
            }
        }
        let sorted = links.iter_mut().map(|links| {
            links.sort_unstable();
            paths.choice(links)
        });
        sorted.collect()
    }
}
