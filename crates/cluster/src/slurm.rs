//! A fabric as SLURM's plugin `topology/tree` reads it: `topology.conf`.
//!
//! The plugin knows a tree: each node is below one leaf switch, each switch below one other. A
//! fabric has several switches where that tree has one, so the tree is that of [`Groups`]: all
//! hosts that share their switches of a level are below one "switch" of the file. In a fabric whose
//! links are used evenly ([`Clos`]) that is exactly what distance means there. Elsewhere, as in a
//! torus or BCube, the closest tree groups hosts by the switches at their first port, then at their
//! first two, and so on, and says nothing of how far groups are from each other; it is only written
//! if that is asked for.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use parfait::groups::{Clos, Groups};
use thiserror::Error;
use topology::graph::{NodeId, Topology, TopologyError};

/// Hosts of a leaf whose names are written one by one; SLURM reads lines of any length that a file
/// has, people do not.
const NAMES_ON_A_LINE: usize = 1 << 16;

/// Why a topology is not exported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExportError {
    /// It has no hosts, or is in parts.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// It is no tree.
    #[error(
        "the fabric is no tree of switches whose links are used evenly, and topology/tree knows nothing else; the closest \
         tree groups hosts by their first switches alone"
    )]
    NoTree,
    /// A name would be read as several, or as none.
    #[error("'{0}' is no name for SLURM: letters, digits, '-', '_' and '.' are")]
    Name(String),
    /// A leaf has more hosts than fit on a line.
    #[error("a leaf has {0} hosts; there can be {NAMES_ON_A_LINE}")]
    TooMany(usize),
}

/// A topology as text, and what it leaves out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The file.
    pub text: String,
    /// Whether it is the closest tree, and not what the fabric is.
    pub is_closest: bool,
}

/// The text of `topology.conf`. A fabric that is no tree is refused, unless the closest one will
/// do.
///
/// # Errors
/// Says what cannot be written.
pub fn topology_conf(topology: &Topology, closest: bool) -> Result<Exported, ExportError> {
    topology.check()?;
    let (groups, is_closest) = match Clos::of(topology) {
        Some(clos) => (clos.groups, false),
        None if closest => (Groups::by_ports(topology), true),
        None => return Err(ExportError::NoTree),
    };
    let mut text = String::from(match is_closest {
        false => "# The tree of the fabric, for TopologyPlugin=topology/tree.\n",
        true => "# The closest tree, for TopologyPlugin=topology/tree: the fabric is none.\n",
    });
    let mut names = Names::new(topology)?;
    let mut by_group: Vec<String> =
        groups.hosts().iter().map(|host| topology.node(*host).name().to_owned()).collect();
    for level in 1..=groups.top() {
        for group in groups.level(level) {
            let hosts = groups.hosts_of(group);
            let children: Vec<&str> =
                groups.children(group).map(|child| by_group[child as usize].as_str()).collect();
            let key = if level == 1 { "Nodes" } else { "Switches" };
            if children.len() > NAMES_ON_A_LINE {
                return Err(ExportError::TooMany(children.len()));
            }
            let switch = (level == 1 && !is_closest)
                .then(|| {
                    only_switch(topology, &groups.hosts()[hosts.start as usize..hosts.end as usize])
                })
                .flatten();
            let name = names.of_group(topology, switch, level, group - groups.level(level).start);
            let _ = writeln!(text, "SwitchName={name} {key}={}", children.join(","));
            by_group.push(name);
        }
    }
    Ok(Exported { text, is_closest })
}

/// The switch that all of these hosts are at, if it is the only one.
fn only_switch(topology: &Topology, hosts: &[NodeId]) -> Option<NodeId> {
    let beyond = hosts.iter().flat_map(|host| topology.neighbours(*host));
    let switches: BTreeSet<NodeId> = beyond.map(|(_, end)| end.node).collect();
    let mut switches = switches.into_iter();
    switches.next().filter(|_| switches.next().is_none())
}

/// Names of the file's switches, none twice.
struct Names {
    taken: BTreeSet<String>,
}

impl Names {
    /// Those of hosts are taken.
    fn new(topology: &Topology) -> Result<Names, ExportError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let mut taken = BTreeSet::new();
        for host in topology.hosts() {
            let name = topology.node(host).name();
            if !name.bytes().all(fits) {
                return Err(ExportError::Name(name.to_owned()));
            }
            taken.insert(name.to_owned());
        }
        Ok(Names { taken })
    }

    /// That of its switch, if it has one with a name that SLURM takes, or else one by level and
    /// number.
    fn of_group(
        &mut self,
        topology: &Topology,
        switch: Option<NodeId>,
        level: usize,
        number: u32,
    ) -> String {
        let fits = |name: &String| {
            name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        let own = switch.map(|switch| topology.node(switch).name().to_owned()).filter(fits);
        let mut name = own.unwrap_or_else(|| format!("level{level}-{number}"));
        while !self.taken.insert(name.clone()) {
            name.push('_');
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use topology::graph::{Capacity, Kind};
    use topology::shape::Shape;

    use super::*;

    fn topology(shape: &str) -> Topology {
        let shape: Shape = shape.parse().expect(shape);
        shape.build(Capacity::default()).expect("small")
    }

    #[test]
    fn a_tree_of_leaves_and_spines_has_two_levels() {
        let exported = topology_conf(&topology("leaf-spine:2x2x2"), false).expect("a tree");
        assert!(!exported.is_closest);
        let lines: Vec<&str> = exported.text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "SwitchName=leaf0 Nodes=host0,host1",
                "SwitchName=leaf1 Nodes=host2,host3",
                "SwitchName=level2-0 Switches=leaf0,leaf1",
            ]
        );
    }

    #[test]
    fn every_host_is_below_one_leaf_and_every_switch_below_one_other() {
        for shape in ["fat-tree:4", "vl2:4x4x3", "rail:2x4x2x3", "torus:3x3:2", "bcube:3x2"] {
            let topology = topology(shape);
            let exported = topology_conf(&topology, true).expect(shape);
            let mut below = BTreeSet::new();
            let (mut switches, mut nodes) = (0, 0);
            for line in exported.text.lines().filter(|line| !line.starts_with('#')) {
                let (_, list) = line.split_once(' ').expect("two keys");
                let (key, list) = list.split_once('=').expect("a list");
                switches += 1;
                for name in list.split(',') {
                    assert!(below.insert(name.to_owned()), "{shape}: {name} is there twice");
                    nodes += usize::from(key == "Nodes");
                }
            }
            assert_eq!(nodes, topology.hosts().count(), "{shape}");
            assert_eq!(below.len(), nodes + switches - 1, "{shape}: one root");
        }
    }

    #[test]
    fn what_is_no_tree_is_refused_unless_the_closest_will_do() {
        for shape in ["torus:3x3:2", "bcube:3x2", "dragonfly:4x2x2"] {
            let topology = topology(shape);
            assert_eq!(topology_conf(&topology, false), Err(ExportError::NoTree), "{shape}");
            assert!(topology_conf(&topology, true).expect(shape).is_closest);
        }
        let mut odd = Topology::new();
        let switch = odd.add(Kind::Switch, "s", 4).expect("new");
        let host = odd.add(Kind::Host, "a,b", 1).expect("new");
        odd.join(switch, host, Capacity::default()).expect("free");
        assert_eq!(topology_conf(&odd, false), Err(ExportError::Name("a,b".to_owned())));
    }
}
