//! Topologies made by rule.
//!
//! A [`Shape`] is written as its name and its numbers, `fat-tree:8` or `torus:6x6:4`, and builds
//! the same topology everywhere: nodes in a fixed order, and ports in an order that means
//! something. Ports between switches come before those to hosts, and those of a torus go by
//! dimension, which is what dimension-order routing reads.
//!
//! | written | what it is | hosts |
//! |---|---|---|
//! | `fat-tree:K` | three levels of switches with `K` ports (Al-Fares et al., SIGCOMM 2008) | K³/4 |
//! | `leaf-spine:LxSxH` | `L` leaves with `H` hosts each, all connected to `S` spines; oversubscribed `H` to `S` | L·H |
//! | `vl2:AxIxH` | aggregation switches with `A` ports, intermediate ones with `I`, `H` hosts on each top-of-rack switch (Greenberg et al., SIGCOMM 2009) | A·I·H/4 |
//! | `bcube:NxK` | `K`+1 levels of switches with `N` ports between hosts with `K`+1 ports (Guo et al., SIGCOMM 2009) | N^(K+1) |
//! | `torus:AxBx…:H` | a ring in each dimension, `H` hosts on each switch | A·B·…·H |
//! | `dragonfly:AxPxH` | groups of `A` routers, each with `P` hosts and `H` global links (Kim et al., ISCA 2008); A·H+1 groups | (A·H+1)·A·P |
//! | `rail:UxHxRxS` | `U` units of `H` hosts with `R` ports: port `r` of each goes to leaf `r` of the unit, all leaves to `S` spines | U·H |
//! | `random:NxDxH:SEED` | `N` switches with `D` links to others at random, `H` hosts on each | N·H |

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use thiserror::Error;

use crate::graph::{Capacity, Kind, NodeId, Topology, TopologyError};

/// Most hosts or switches of a shape, so that a typing mistake ends at once.
pub const MAX_NODES: u64 = 1 << 20;

/// A topology by rule; see the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `fat-tree:K`
    FatTree {
        /// Ports of each switch, even.
        ports: u32,
    },
    /// `leaf-spine:LxSxH`
    LeafSpine {
        /// Leaves.
        leaves: u32,
        /// Spines.
        spines: u32,
        /// Hosts on each leaf.
        hosts: u32,
    },
    /// `vl2:AxIxH`
    Vl2 {
        /// Ports of an aggregation switch, even.
        aggregation_ports: u32,
        /// Ports of an intermediate switch, even.
        intermediate_ports: u32,
        /// Hosts on each top-of-rack switch.
        hosts: u32,
    },
    /// `bcube:NxK`
    Bcube {
        /// Ports of a switch.
        ports: u32,
        /// Levels less one.
        level: u32,
    },
    /// `torus:AxBx…:H`
    Torus {
        /// Switches in each dimension, at least 2.
        sides: Vec<u32>,
        /// Hosts on each switch.
        hosts: u32,
    },
    /// `dragonfly:AxPxH`
    Dragonfly {
        /// Routers of a group.
        routers: u32,
        /// Hosts of a router.
        hosts: u32,
        /// Links of a router to other groups.
        globals: u32,
    },
    /// `rail:UxHxRxS`
    Rail {
        /// Units.
        units: u32,
        /// Hosts of a unit.
        hosts: u32,
        /// Ports of a host, and leaves of a unit.
        rails: u32,
        /// Spines.
        spines: u32,
    },
    /// `random:NxDxH:SEED`
    Random {
        /// Switches.
        switches: u32,
        /// Links of a switch to others.
        degree: u32,
        /// Hosts on each.
        hosts: u32,
        /// Of the generator.
        seed: u64,
    },
}

/// Why a shape cannot be read or built.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// The text is no shape.
    #[error(
        "'{0}' is not a topology rule; write one like fat-tree:8, leaf-spine:18x18x18 or torus:6x6:4"
    )]
    Unreadable(String),
    /// A number does not fit the rule.
    #[error("{shape}: {why}")]
    Impossible {
        /// The shape.
        shape: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A switch would need more ports than there can be.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

impl FromStr for Shape {
    type Err = ShapeError;

    fn from_str(text: &str) -> Result<Shape, ShapeError> {
        let unreadable = || ShapeError::Unreadable(text.to_string());
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let numbers = |part: Option<&str>| -> Option<Vec<u32>> {
            part?.split('x').map(|number| number.parse().ok()).collect()
        };
        let first = numbers(parts.next()).ok_or_else(unreadable)?;
        let last = parts.next();
        if parts.next().is_some() {
            return Err(unreadable());
        }
        let shape = match (name, &first[..], last) {
            ("fat-tree", &[ports], None) => Shape::FatTree { ports },
            ("leaf-spine", &[leaves, spines, hosts], None) => {
                Shape::LeafSpine { leaves, spines, hosts }
            }
            ("vl2", &[aggregation_ports, intermediate_ports, hosts], None) => {
                Shape::Vl2 { aggregation_ports, intermediate_ports, hosts }
            }
            ("bcube", &[ports, level], None) => Shape::Bcube { ports, level },
            ("torus", sides, Some(hosts)) => Shape::Torus {
                sides: sides.to_vec(),
                hosts: hosts.parse().map_err(|_| unreadable())?,
            },
            ("dragonfly", &[routers, hosts, globals], None) => {
                Shape::Dragonfly { routers, hosts, globals }
            }
            ("rail", &[units, hosts, rails, spines], None) => {
                Shape::Rail { units, hosts, rails, spines }
            }
            ("random", &[switches, degree, hosts], seed) => Shape::Random {
                switches,
                degree,
                hosts,
                seed: seed.unwrap_or("1").parse().map_err(|_| unreadable())?,
            },
            _ => return Err(unreadable()),
        };
        shape.check()?;
        Ok(shape)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::FatTree { ports } => write!(f, "fat-tree:{ports}"),
            Shape::LeafSpine { leaves, spines, hosts } => {
                write!(f, "leaf-spine:{leaves}x{spines}x{hosts}")
            }
            Shape::Vl2 { aggregation_ports, intermediate_ports, hosts } => {
                write!(f, "vl2:{aggregation_ports}x{intermediate_ports}x{hosts}")
            }
            Shape::Bcube { ports, level } => write!(f, "bcube:{ports}x{level}"),
            Shape::Torus { sides, hosts } => {
                let sides: Vec<String> = sides.iter().map(u32::to_string).collect();
                write!(f, "torus:{}:{hosts}", sides.join("x"))
            }
            Shape::Dragonfly { routers, hosts, globals } => {
                write!(f, "dragonfly:{routers}x{hosts}x{globals}")
            }
            Shape::Rail { units, hosts, rails, spines } => {
                write!(f, "rail:{units}x{hosts}x{rails}x{spines}")
            }
            Shape::Random { switches, degree, hosts, seed } => {
                write!(f, "random:{switches}x{degree}x{hosts}:{seed}")
            }
        }
    }
}

impl Shape {
    /// Refuses numbers that the rule does not know.
    fn check(&self) -> Result<(), ShapeError> {
        let wrong = match self {
            Shape::FatTree { ports } if *ports < 2 || ports % 2 == 1 => {
                Some("the number of ports is even, and at least 2")
            }
            Shape::Vl2 { aggregation_ports: a, intermediate_ports: i, .. }
                if a % 2 == 1 || i % 2 == 1 || *a < 2 || *i < 2 =>
            {
                Some("the numbers of ports are even, and at least 2")
            }
            Shape::Torus { sides, .. } if sides.iter().any(|side| *side < 2) => {
                Some("each side has at least 2 switches")
            }
            Shape::Bcube { ports, level } if *ports < 2 || *level > 7 => {
                Some("switches have at least 2 ports, and there are at most 8 levels")
            }
            Shape::Random { switches, degree, .. }
                if *degree < 2 || degree >= switches || (switches % 2 == 1 && degree % 2 == 1) =>
            {
                Some(
                    "the degree is at least 2 and less than the number of switches, and their product is even",
                )
            }
            Shape::Random { switches, .. } if *switches > 4_096 => Some("at most 4,096 switches"),
            _ if self.numbers().contains(&0) => Some("no number is 0"),
            _ if self.nodes() > MAX_NODES => Some("more than 1,048,576 hosts or switches"),
            _ => None,
        };
        let impossible = |why| ShapeError::Impossible { shape: self.to_string(), why };
        wrong.map_or(Ok(()), |why| Err(impossible(why)))
    }

    /// Its numbers, of which none may be 0.
    fn numbers(&self) -> Vec<u32> {
        match self {
            Shape::FatTree { ports } => alloc::vec![*ports],
            Shape::LeafSpine { leaves, spines, hosts } => alloc::vec![*leaves, *spines, *hosts],
            Shape::Vl2 { aggregation_ports, intermediate_ports, hosts } => {
                alloc::vec![*aggregation_ports, *intermediate_ports, *hosts]
            }
            Shape::Bcube { ports, .. } => alloc::vec![*ports],
            Shape::Torus { sides, hosts } => sides.iter().chain([hosts]).copied().collect(),
            Shape::Dragonfly { routers, hosts, globals } => {
                alloc::vec![*routers, *hosts, *globals]
            }
            Shape::Rail { units, hosts, rails, spines } => {
                alloc::vec![*units, *hosts, *rails, *spines]
            }
            Shape::Random { switches, degree, hosts, .. } => {
                alloc::vec![*switches, *degree, *hosts]
            }
        }
    }

    /// At least as many as it has hosts, and as many as it has switches.
    fn nodes(&self) -> u64 {
        let product = |numbers: &[u32]| {
            numbers.iter().fold(1_u64, |product, number| product.saturating_mul((*number).into()))
        };
        match self {
            Shape::FatTree { ports } => product(&[*ports, *ports, ports.saturating_add(5)]) / 4,
            Shape::LeafSpine { leaves, spines, hosts } => product(&[*leaves, *hosts])
                .saturating_add((*leaves).into())
                .saturating_add((*spines).into()),
            Shape::Bcube { ports, level } => (0..=*level)
                .fold(1_u64, |product, _| product.saturating_mul((*ports).into()))
                .saturating_mul(u64::from(*level) + 1),
            Shape::Dragonfly { routers, hosts, globals } => product(&[*routers, *globals])
                .saturating_add(1)
                .saturating_mul(product(&[*routers, hosts.saturating_add(1)])),
            Shape::Rail { units, hosts, rails, spines } => product(&[*units, *hosts])
                .saturating_add(product(&[*units, *rails]))
                .saturating_add((*spines).into()),
            Shape::Vl2 { .. } | Shape::Torus { .. } => product(&self.numbers()).saturating_mul(2),
            Shape::Random { switches, hosts, .. } => product(&[*switches, hosts.saturating_add(1)]),
        }
    }

    /// The topology, all of whose links are alike.
    ///
    /// # Errors
    /// When a switch would need more ports than there can be.
    pub fn build(&self, capacity: Capacity) -> Result<Topology, ShapeError> {
        self.check()?;
        let mut make = Maker { topology: Topology::new(), capacity };
        match self {
            Shape::FatTree { ports } => make.fat_tree(*ports)?,
            Shape::LeafSpine { leaves, spines, hosts } => {
                make.leaf_spine(*leaves, *spines, *hosts)?;
            }
            Shape::Vl2 { aggregation_ports, intermediate_ports, hosts } => {
                make.vl2(*aggregation_ports, *intermediate_ports, *hosts)?;
            }
            Shape::Bcube { ports, level } => make.bcube(*ports, *level)?,
            Shape::Torus { sides, hosts } => make.torus(sides, *hosts)?,
            Shape::Dragonfly { routers, hosts, globals } => {
                make.dragonfly(*routers, *hosts, *globals)?;
            }
            Shape::Rail { units, hosts, rails, spines } => {
                make.rail(*units, *hosts, *rails, *spines)?;
            }
            Shape::Random { switches, degree, hosts, seed } => {
                make.random(*switches, *degree, *hosts, *seed)?;
            }
        }
        Ok(make.topology)
    }
}

/// A topology in the making.
struct Maker {
    topology: Topology,
    capacity: Capacity,
}

type Made<T = ()> = Result<T, TopologyError>;

impl Maker {
    fn switches(&mut self, name: &str, count: u32, ports: u32) -> Made<Vec<NodeId>> {
        self.nodes(Kind::Switch, name, count, ports)
    }

    fn nodes(&mut self, kind: Kind, name: &str, count: u32, ports: u32) -> Made<Vec<NodeId>> {
        (0..count)
            .map(|number| self.topology.add(kind, &alloc::format!("{name}{number}"), ports))
            .collect()
    }

    fn join(&mut self, a: NodeId, b: NodeId) -> Made {
        self.topology.join(a, b, self.capacity).map(drop)
    }

    /// Adds hosts with one port to each of the switches.
    fn populate(&mut self, switches: &[NodeId], hosts: u32) -> Made {
        let all = self.nodes(Kind::Host, "host", switches.len() as u32 * hosts, 1)?;
        for (switch, hosts) in switches.iter().zip(all.chunks(hosts as usize)) {
            for host in hosts {
                self.join(*switch, *host)?;
            }
        }
        Ok(())
    }

    fn fat_tree(&mut self, ports: u32) -> Made {
        let half = ports / 2;
        let cores = self.switches("core", half * half, ports)?;
        let aggregations = self.switches("agg", ports * half, ports)?;
        let edges = self.switches("edge", ports * half, ports)?;
        let pods = aggregations.chunks(half as usize).zip(edges.chunks(half as usize));
        for (aggregations, edges) in pods {
            for (aggregation, cores) in aggregations.iter().zip(cores.chunks(half as usize)) {
                for core in cores {
                    self.join(*aggregation, *core)?;
                }
            }
            for edge in edges {
                for aggregation in aggregations {
                    self.join(*edge, *aggregation)?;
                }
            }
        }
        self.populate(&edges, half)
    }

    fn leaf_spine(&mut self, leaves: u32, spines: u32, hosts: u32) -> Made {
        let tops = self.switches("spine", spines, leaves)?;
        let leaves = self.switches("leaf", leaves, spines + hosts)?;
        for leaf in &leaves {
            for top in &tops {
                self.join(*leaf, *top)?;
            }
        }
        self.populate(&leaves, hosts)
    }

    fn vl2(&mut self, aggregation_ports: u32, intermediate_ports: u32, hosts: u32) -> Made {
        let half = aggregation_ports / 2;
        let tops = self.switches("int", half, intermediate_ports)?;
        let aggregations = self.switches("agg", intermediate_ports, aggregation_ports)?;
        let racks = self.switches("tor", half * intermediate_ports / 2, 2 + hosts)?;
        for aggregation in &aggregations {
            for top in &tops {
                self.join(*aggregation, *top)?;
            }
        }
        for (racks, pair) in racks.chunks(half as usize).zip(aggregations.chunks(2)) {
            for rack in racks {
                for aggregation in pair {
                    self.join(*rack, *aggregation)?;
                }
            }
        }
        self.populate(&racks, hosts)
    }

    /// Host numbers have a digit for each level; a switch of a level connects those that differ in
    /// that digit alone.
    fn bcube(&mut self, ports: u32, level: u32) -> Made {
        let count = ports.pow(level + 1);
        let hosts = self.nodes(Kind::Host, "host", count, level + 1)?;
        for at in 0..=level {
            let name = alloc::format!("l{at}s");
            let switches = self.switches(&name, count / ports, ports)?;
            let stride = ports.pow(at);
            for (number, host) in (0..).zip(&hosts) {
                let switch = number / (stride * ports) * stride + number % stride;
                self.join(*host, switches[switch as usize])?;
            }
        }
        Ok(())
    }

    fn torus(&mut self, sides: &[u32], hosts: u32) -> Made {
        let count: u32 = sides.iter().product();
        // A ring of two is one cable.
        let links: u32 = sides.iter().map(|side| if *side == 2 { 1 } else { 2 }).sum();
        let switches = self.switches("s", count, links + hosts)?;
        let mut stride = 1;
        let mut first_port = 1;
        for side in sides.iter().copied() {
            for number in 0..count {
                let place = number / stride % side;
                let next = number - place * stride + (place + 1) % side * stride;
                if side == 2 && place == 1 {
                    continue;
                }
                let (up, down) = (first_port, first_port + u8::from(side > 2));
                let ends = [(number, up), (next, down)].map(|(number, port)| crate::graph::End {
                    node: switches[number as usize],
                    port,
                });
                self.topology.connect(ends[0], ends[1], self.capacity)?;
            }
            stride *= side;
            first_port += if side == 2 { 1 } else { 2 };
        }
        self.populate(&switches, hosts)
    }

    fn dragonfly(&mut self, routers: u32, hosts: u32, globals: u32) -> Made {
        let groups = routers * globals + 1;
        let all = self.switches("r", groups * routers, routers - 1 + globals + hosts)?;
        let groups: Vec<&[NodeId]> = all.chunks(routers as usize).collect();
        for group in &groups {
            for (at, a) in group.iter().enumerate() {
                for b in &group[at + 1..] {
                    self.join(*a, *b)?;
                }
            }
        }
        // The group `n` places further is reached through global link `n - 1`.
        for (number, group) in groups.iter().enumerate() {
            for other in number + 1..groups.len() {
                let away = other - number;
                let back = groups.len() - away;
                let near = group[(away - 1) / globals as usize];
                let far = groups[other][(back - 1) / globals as usize];
                self.join(near, far)?;
            }
        }
        self.populate(&all, hosts)
    }

    fn rail(&mut self, units: u32, hosts: u32, rails: u32, spines: u32) -> Made {
        let tops = self.switches("spine", spines, units * rails)?;
        let leaves = self.switches("leaf", units * rails, spines + hosts)?;
        for leaf in &leaves {
            for top in &tops {
                self.join(*leaf, *top)?;
            }
        }
        let all = self.nodes(Kind::Host, "host", units * hosts, rails)?;
        for (leaves, hosts) in leaves.chunks(rails as usize).zip(all.chunks(hosts as usize)) {
            for host in hosts {
                for leaf in leaves {
                    self.join(*host, *leaf)?;
                }
            }
        }
        Ok(())
    }

    /// A ring, so that it is one part, and the other links at random between switches that have
    /// room and are not joined yet. Where that comes to a dead end, a switch keeps a port free.
    fn random(&mut self, switches: u32, degree: u32, hosts: u32, seed: u64) -> Made {
        let mut generator = Pcg32::new(seed, 0x5ca1_ab1e);
        let all = self.switches("s", switches, degree + hosts)?;
        let count = all.len();
        let mut joined = alloc::vec![Vec::new(); count];
        let add = |make: &mut Maker, joined: &mut Vec<Vec<usize>>, a: usize, b: usize| {
            joined[a].push(b);
            joined[b].push(a);
            make.join(all[a], all[b])
        };
        for at in 0..count {
            add(self, &mut joined, at, (at + 1) % count)?;
        }
        for a in 0..count {
            while joined[a].len() < degree as usize {
                let free: Vec<usize> = (a + 1..count)
                    .filter(|b| joined[*b].len() < degree as usize && !joined[a].contains(b))
                    .collect();
                if free.is_empty() {
                    break;
                }
                let b = free[generator.next_u32() as usize % free.len()];
                add(self, &mut joined, a, b)?;
            }
        }
        self.populate(&all, hosts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(text: &str) -> Topology {
        let shape: Shape = text.parse().expect(text);
        assert_eq!(shape.to_string(), text);
        let topology = shape.build(Capacity::default()).expect(text);
        assert_eq!(topology.check(), Ok(()), "{text}");
        topology
    }

    /// Hosts, switches and links as the papers count them.
    #[test]
    fn shapes_have_the_sizes_of_their_papers() {
        let sizes = [
            ("fat-tree:8", "128 hosts, 80 switches, 384 links"),
            ("fat-tree:16", "1024 hosts, 320 switches, 3072 links"),
            ("leaf-spine:18x18x18", "324 hosts, 36 switches, 648 links"),
            ("vl2:8x8x20", "320 hosts, 28 switches, 384 links"),
            ("bcube:8x1", "64 hosts, 16 switches, 128 links"),
            ("bcube:4x2", "64 hosts, 48 switches, 192 links"),
            ("torus:6x6:4", "144 hosts, 36 switches, 216 links"),
            ("torus:2x3x4:1", "24 hosts, 24 switches, 84 links"),
            ("dragonfly:4x2x2", "72 hosts, 36 switches, 162 links"),
            ("rail:4x8x8x16", "32 hosts, 48 switches, 768 links"),
            ("random:32x4x2:7", "64 hosts, 32 switches, 128 links"),
        ];
        for (text, size) in sizes {
            assert_eq!(built(text).to_string(), size, "{text}");
        }
    }

    #[test]
    fn every_port_of_a_regular_shape_is_used() {
        for text in ["fat-tree:6", "torus:4x4x4:2", "dragonfly:4x2x2", "bcube:4x2", "vl2:6x4x5"] {
            let topology = built(text);
            for (_, node) in topology.nodes() {
                assert_eq!(
                    node.links().count(),
                    usize::from(node.ports()),
                    "{text} {}",
                    node.name()
                );
            }
        }
    }

    /// Two groups of a dragonfly are joined by one cable.
    #[test]
    fn groups_of_a_dragonfly_are_joined_once() {
        let topology = built("dragonfly:4x2x2");
        let group = |id: NodeId| id.index() / 4;
        let mut seen = Vec::new();
        for (_, link) in topology.links() {
            let [a, b] = link.ends.map(|end| end.node);
            let kinds = [a, b].map(|id| topology.node(id).kind());
            if kinds == [Kind::Switch; 2] && group(a) != group(b) {
                let pair = [group(a).min(group(b)), group(a).max(group(b))];
                assert!(!seen.contains(&pair), "{pair:?}");
                seen.push(pair);
            }
        }
        assert_eq!(seen.len(), 9 * 8 / 2);
    }

    #[test]
    fn the_seed_alone_decides_a_random_shape() {
        assert_eq!(built("random:32x4x2:7"), built("random:32x4x2:7"));
        assert_ne!(built("random:32x4x2:7"), built("random:32x4x2:8"));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let bad = [
            "fat-tree",
            "fat-tree:",
            "fat-tree:7",
            "fat-tree:8x8",
            "fat-tree:8:1",
            "ring:8",
            "leaf-spine:18x0x18",
            "torus:6x1:4",
            "torus:6x6",
            "torus:6x6:0",
            "vl2:7x8x20",
            "random:8x9x1:1",
            "random:5x3x1:1",
            "bcube:2x9",
            "leaf-spine:100000x1x100000",
            "fat-tree:99999999999",
            "dragonfly:60000x60000x60000",
            "torus:-1x4:1",
        ];
        for text in bad {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
        let wide: Shape = "leaf-spine:300x2x2".parse().expect("small enough");
        let error = wide.build(Capacity::default()).expect_err("too many ports").to_string();
        assert_eq!(error, "'spine0' has 300 ports; there can be 1 to 254");
    }
}
