//! The graph of a network: nodes, switches, the cables between them, and the routes over them.
//!
//! Nodes send and receive, switches forward. A cable is two links, one in each direction, numbered
//! so that the other direction of link `n` is `n ^ 1`. Routes are static by destination: shortest
//! paths, unless others are given. Where several are equally short, [`Spread`] says which one a
//! packet takes. Nodes do not forward, so no route passes through one.

use alloc::vec::Vec;

pub use crate::link::Vertex;
use crate::link::{Edge, LinkConfig};
pub use crate::paths::Spread;
use crate::paths::{Paths, RowOf};

/// Nodes, switches and cables.
#[derive(Clone, Debug)]
pub struct Graph {
    nodes: u32,
    switches: u32,
    edges: Vec<Edge>,
    /// Instead of shortest paths.
    fixed: Option<Paths>,
    spread: Spread,
}

impl Graph {
    /// Nodes and switches without cables.
    pub const fn new(nodes: u32, switches: u32) -> Graph {
        Graph { nodes, switches, edges: Vec::new(), fixed: None, spread: Spread::First }
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

    /// Replaces the shortest paths: the link by which packets to a node leave each node and switch,
    /// as `n` for the `n`-th cable in the direction in which it was joined, and its other direction
    /// by `true`.
    #[must_use]
    pub fn routed(mut self, next: impl Fn(Vertex, u32) -> Option<(u32, bool)>) -> Graph {
        let mut paths = Paths::new(self.nodes, self.switches);
        for at in self.vertices() {
            let link = |(cable, is_back): (u32, bool)| 2 * cable + u32::from(is_back);
            let links = (0..self.nodes).map(|dest| next(at, dest).map(link));
            let row = links.map(|link| paths.choice(link.as_slice())).collect();
            paths.set(at, RowOf::Each(row));
        }
        self.fixed = Some(paths);
        self
    }

    /// Chooses among shortest paths in this way.
    #[must_use]
    pub const fn spread(mut self, spread: Spread) -> Graph {
        self.spread = spread;
        self
    }

    /// The longest way that packets take from any of the first nodes to any other one, by
    /// propagation delay: its links.
    pub fn longest_path(&self) -> Vec<LinkConfig> {
        /// In topologies made by rule, the first nodes stand for all.
        const SOURCES: u32 = 8;
        let paths = self.paths(|_| true);
        let sources = 0..self.nodes.min(SOURCES);
        let pairs = sources.flat_map(|from| (0..self.nodes).map(move |to| (from, to)));
        let way = |(from, to)| -> Vec<LinkConfig> {
            let way = paths.way(from, to, |link| self.edges[link as usize].to);
            way.into_iter().map(|link| self.edges[link as usize].config).collect()
        };
        let delay =
            |way: &Vec<LinkConfig>| way.iter().map(|link| link.delay.as_nanos()).sum::<u64>();
        pairs.map(way).max_by_key(delay).unwrap_or_default()
    }

    pub(crate) const fn way_to_spread(&self) -> Spread {
        self.spread
    }

    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    #[cfg(test)]
    pub(crate) fn edges_mut(&mut self) -> impl Iterator<Item = &mut Edge> {
        self.edges.iter_mut()
    }

    fn vertices(&self) -> impl Iterator<Item = Vertex> + use<> {
        (0..self.nodes).map(Vertex::Node).chain((0..self.switches).map(Vertex::Switch))
    }

    /// The routes, without the links that are not `usable`.
    pub(crate) fn paths(&self, usable: impl Fn(u32) -> bool) -> Paths {
        match &self.fixed {
            Some(paths) => paths.clone(),
            None => Paths::shortest(self.nodes, self.switches, &self.edges, self.spread, usable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce::Duration;

    const LINK: LinkConfig = LinkConfig::unlimited(Duration::ZERO);

    #[test]
    fn a_star_goes_up_and_down() {
        let routes = Graph::star(3, LINK, LINK).paths(|_| true);
        assert_eq!(routes.links(Vertex::Node(0), 2), [0]);
        assert_eq!(routes.links(Vertex::Switch(0), 2), [5]);
        assert!(routes.links(Vertex::Node(0), 3).is_empty());
    }

    #[test]
    fn the_shortest_way_wins_and_nodes_forward_nothing() {
        use Vertex::{Node, Switch};
        // Nodes 0 and 1 at switches 0 and 2, which are joined directly and over switch 1; node 2
        // has a cable to either of the nodes, and node 3 has none.
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
        let routes = joins.into_iter().fold(Graph::new(4, 3), join).paths(|_| true);
        assert_eq!(routes.links(Node(0), 1), [0], "not over node 2");
        assert_eq!(routes.links(Switch(0), 1), [6], "not over switch 1");
        assert_eq!(routes.links(Node(1), 0), [9]);
        assert_eq!(routes.links(Node(2), 1), [12]);
        assert!(routes.links(Node(0), 3).is_empty());
    }

    /// Two nodes at each of two switches, which three spines and a longer way join; node 4 has a
    /// cable to either.
    fn leaves_and_spines() -> Graph {
        use Vertex::{Node, Switch};
        let joins = [
            (Node(0), Switch(0)),
            (Node(1), Switch(0)),
            (Node(2), Switch(1)),
            (Node(3), Switch(1)),
            (Switch(0), Switch(2)),
            (Switch(0), Switch(3)),
            (Switch(0), Switch(4)),
            (Switch(1), Switch(2)),
            (Switch(1), Switch(3)),
            (Switch(1), Switch(4)),
            (Switch(0), Switch(5)),
            (Switch(5), Switch(6)),
            (Switch(6), Switch(1)),
            (Node(4), Switch(0)),
            (Node(4), Switch(1)),
        ];
        joins.into_iter().fold(Graph::new(5, 7), |graph, (a, b)| graph.join(a, b, LINK, LINK))
    }

    #[test]
    fn all_shortest_paths_and_no_others() {
        use Vertex::{Node, Switch};
        let paths = leaves_and_spines().spread(Spread::Flow).paths(|_| true);
        for dest in [2, 3] {
            assert_eq!(paths.links(Switch(0), dest), [8, 10, 12], "{dest}");
            assert_eq!(paths.links(Switch(3), dest), [17]);
            assert_eq!(paths.links(Switch(5), dest), [22]);
        }
        assert_eq!(paths.links(Switch(1), 2), [5]);
        assert_eq!(paths.links(Switch(1), 3), [7]);
        assert_eq!(paths.links(Switch(2), 4), [9, 15], "by either leaf");
        assert_eq!(paths.links(Node(4), 0), [26]);
        assert_eq!(paths.links(Node(4), 3), [28]);
        assert!(paths.links(Node(4), 4).is_empty());
        assert_eq!((paths.cables(4), paths.cables(1)), ([26, 28].into(), [2].into()));
    }

    #[test]
    fn links_that_are_down_are_not_used() {
        let graph = leaves_and_spines().spread(Spread::Flow);
        let paths = graph.paths(|link| link / 2 != 4 && link / 2 != 5);
        assert_eq!(paths.links(Vertex::Switch(0), 2), [12]);
        let paths = graph.paths(|link| !(4..7).contains(&(link / 2)));
        assert_eq!(paths.links(Vertex::Switch(0), 2), [20], "the longer way");
        let paths = graph.paths(|link| !(4..7).contains(&(link / 2)) && link / 2 != 11);
        assert!(paths.links(Vertex::Switch(0), 2).is_empty());
    }
}
