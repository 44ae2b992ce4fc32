//! The graph of a network: nodes, switches, the cables between them, and the routes over them.
//!
//! Nodes send and receive, switches forward. A cable is two links, one in each direction, numbered so
//! that the other direction of link `n` is `n ^ 1`. Routes are static by destination: shortest paths, of
//! several the cable added first, unless others are given. Nodes do not forward, so no route passes through one.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

pub use crate::link::Vertex;
use crate::link::{Edge, LinkConfig};

/// Nodes, switches and cables.
#[derive(Clone, Debug)]
pub struct Graph {
    nodes: u32,
    switches: u32,
    edges: Vec<Edge>,
    /// Instead of shortest paths.
    fixed: Option<Routes>,
}

impl Graph {
    /// Nodes and switches without cables.
    pub const fn new(nodes: u32, switches: u32) -> Graph {
        Graph { nodes, switches, edges: Vec::new(), fixed: None }
    }

    /// Two nodes joined by one cable, the same in both directions.
    pub fn cable(link: LinkConfig) -> Graph {
        Graph::new(2, 0).join(Vertex::Node(0), Vertex::Node(1), link, link)
    }

    /// All nodes at one switch: packets go up one link and down another.
    pub fn star(nodes: u32, up: LinkConfig, down: LinkConfig) -> Graph {
        let join = |graph: Graph, node| graph.join(Vertex::Node(node), Vertex::Switch(0), up, down);
        (0..nodes).fold(Graph::new(nodes, 1), join)
    }

    /// Adds a cable with the link `there` from `a` to `b` and `back` in the other direction.
    #[must_use]
    pub fn join(mut self, a: Vertex, b: Vertex, there: LinkConfig, back: LinkConfig) -> Graph {
        self.edges.push(Edge { from: a, to: b, config: there });
        self.edges.push(Edge { from: b, to: a, config: back });
        self
    }

    /// How many nodes there are.
    pub const fn nodes(&self) -> u32 {
        self.nodes
    }

    /// How many switches there are.
    pub const fn switches(&self) -> u32 {
        self.switches
    }

    /// Replaces the shortest paths: the link by which packets to a node leave each node and switch, as
    /// `n` for the `n`-th cable in the direction in which it was joined, and its other direction by `true`.
    #[must_use]
    pub fn routed(mut self, next: impl Fn(Vertex, u32) -> Option<(u32, bool)>) -> Graph {
        let nodes = self.nodes as usize;
        let all = (0..self.nodes).map(Vertex::Node).chain((0..self.switches).map(Vertex::Switch));
        let link = |(cable, is_back): (u32, bool)| 2 * cable + u32::from(is_back);
        let hop = |at, dest| next(at, dest).map_or(NONE, link);
        let next = all.flat_map(|at| (0..self.nodes).map(move |dest| (at, dest)));
        let next = next.map(|(at, dest)| hop(at, dest)).collect();
        self.fixed = Some(Routes { nodes, next });
        self
    }

    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    fn index(&self, vertex: Vertex) -> usize {
        match vertex {
            Vertex::Node(node) => node as usize,
            Vertex::Switch(switch) => (self.nodes + switch) as usize,
        }
    }

    pub(crate) fn routes(&self) -> Routes {
        self.fixed.clone().unwrap_or_else(|| self.shortest())
    }

    fn shortest(&self) -> Routes {
        let (nodes, vertices) = (self.nodes as usize, (self.nodes + self.switches) as usize);
        let mut into = vec![Vec::new(); vertices];
        for (link, edge) in (0..).zip(&self.edges) {
            into[self.index(edge.to)].push((link, self.index(edge.from)));
        }
        let mut next = vec![NONE; vertices * nodes];
        let mut queue = VecDeque::with_capacity(vertices);
        for dest in 0..nodes {
            queue.push_back(dest);
            while let Some(vertex) = queue.pop_front() {
                for &(link, from) in &into[vertex] {
                    let hop = &mut next[from * nodes + dest];
                    if *hop == NONE && from != dest {
                        *hop = link;
                        queue.extend((from >= nodes).then_some(from));
                    }
                }
            }
        }
        Routes { nodes, next }
    }
}

const NONE: u32 = u32::MAX;

/// The next link from every vertex to every node.
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    nodes: usize,
    next: Vec<u32>,
}

impl Routes {
    /// The links by which packets of a node leave it.
    pub(crate) fn cables(&self, node: u32) -> Vec<u32> {
        let first = node as usize * self.nodes;
        let mut links = self.next[first..first + self.nodes].to_vec();
        links.retain(|&link| link != NONE);
        links.sort_unstable();
        links.dedup();
        links
    }

    /// The link from `at` towards a node, if that can be reached.
    pub(crate) fn next(&self, at: Vertex, dest: u32) -> Option<u32> {
        let index = match at {
            Vertex::Node(node) => node as usize,
            Vertex::Switch(switch) => self.nodes + switch as usize,
        };
        let in_range = (dest as usize) < self.nodes;
        let link = in_range.then(|| self.next[index * self.nodes + dest as usize])?;
        (link != NONE).then_some(link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce::Duration;

    const LINK: LinkConfig = LinkConfig::unlimited(Duration::ZERO);

    #[test]
    fn a_star_goes_up_and_down() {
        let routes = Graph::star(3, LINK, LINK).routes();
        assert_eq!(routes.next(Vertex::Node(0), 2), Some(0));
        assert_eq!(routes.next(Vertex::Switch(0), 2), Some(5));
        assert_eq!(routes.next(Vertex::Node(0), 3), None);
    }

    #[test]
    fn the_shortest_way_wins_and_nodes_forward_nothing() {
        use Vertex::{Node, Switch};
        // Nodes 0 and 1 at switches 0 and 2, which are joined directly and over switch 1; node 2 has a
        // cable to either of the nodes, and node 3 has none.
        let joins = [
            (Node(0), Switch(0)),
            (Switch(0), Switch(1)),
            (Switch(1), Switch(2)),
            (Switch(0), Switch(2)),
            (Switch(2), Node(1)),
            (Node(2), Node(0)),
            (Node(2), Node(1)),
        ];
        let join = |graph: Graph, (a, b)| graph.join(a, b, LINK, LINK);
        let routes = joins.into_iter().fold(Graph::new(4, 3), join).routes();
        assert_eq!(routes.next(Node(0), 1), Some(0), "not over node 2");
        assert_eq!(routes.next(Switch(0), 1), Some(6), "not over switch 1");
        assert_eq!(routes.next(Node(1), 0), Some(9));
        assert_eq!(routes.next(Node(2), 1), Some(12));
        assert_eq!(routes.next(Node(0), 3), None);
    }
}
