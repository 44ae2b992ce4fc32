//! The topology of a production GPU cluster, as in `topo.csv` of alibaba-lingjun-dataset-2023.
//!
//! The file has a line for each host with the groups of switches above it, of three levels:
//!
//! ```text
//! ip,DSW,PSW,ASW
//! 0c9d9de1,G6,P10,S14
//! ```
//!
//! It does not say how many switches a group has, or links. Here a group of the lowest level is one
//! switch; each higher group has as many switches as the largest of these has hosts, its *planes*.
//! Each switch of the lowest level has a link to every plane of its group, and each plane as many
//! links to its counterpart above as it has below, so that no level is narrower than the one below
//! it.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use crate::graph::{Capacity, Kind, NodeId, Topology, TopologyError};

/// The first line of such a file.
pub const HEADER: &str = "ip,DSW,PSW,ASW";

/// Why it cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LingjunError {
    /// It is another file.
    #[error("line 1: expected '{HEADER}'")]
    Header,
    /// Not four names.
    #[error(
        "line {line}: '{text}' is not a host and three groups of switches, separated by commas"
    )]
    Unreadable {
        /// Its number, from 1.
        line: usize,
        /// The line.
        text: String,
    },
    /// A group is below two others.
    #[error("line {line}: {group} is below {now}, and was below {before}")]
    Torn {
        /// Its number, from 1.
        line: usize,
        /// The group.
        group: String,
        /// The one above it in this line.
        now: String,
        /// The one above it before.
        before: String,
    },
    /// There are two groups of the highest level, and nothing joins them.
    #[error("line {line}: nothing joins {now} with {before}")]
    Apart {
        /// Its number, from 1.
        line: usize,
        /// The group of this line.
        now: String,
        /// The one before.
        before: String,
    },
    /// It has more ports than any fabric.
    #[error("more than {MAX_PORTS_IN_ALL} ports in all")]
    TooLarge,
    /// A host or link is impossible.
    #[error("line {line}: {source}")]
    Impossible {
        /// Its number, from 1; the last one for links between switches.
        line: usize,
        /// Why.
        source: TopologyError,
    },
}

/// Most ports of all nodes together.
const MAX_PORTS_IN_ALL: u64 = 1 << 22;

/// The groups of the file, each with what is below it.
#[derive(Debug, Default)]
struct Groups<'a> {
    core: Option<&'a str>,
    /// The group above each group of the middle level.
    above: BTreeMap<&'a str, &'a str>,
    /// Of the lowest level, by the group above and their own name: the hosts, each with its line.
    leaves: BTreeMap<(&'a str, &'a str), Vec<(usize, &'a str)>>,
}

/// Reads the file. Links get `capacity`.
///
/// # Errors
/// Names the line.
pub fn read(text: &str, capacity: Capacity) -> Result<Topology, LingjunError> {
    let mut lines = (1..).zip(text.lines().map(str::trim_end));
    if lines.next().map(|(_, line)| line) != Some(HEADER) {
        return Err(LingjunError::Header);
    }
    let mut groups = Groups::default();
    let mut last = 1;
    for (line, text) in lines.filter(|(_, text)| !text.is_empty()) {
        groups.take(line, text)?;
        last = line;
    }
    groups.check_size()?;
    groups
        .build(capacity)
        .map_err(|(line, source)| LingjunError::Impossible { line: line.unwrap_or(last), source })
}

/// A fault of the topology, and the line if it is about a host.
type Fault = (Option<usize>, TopologyError);

impl<'a> Groups<'a> {
    fn take(&mut self, line: usize, text: &'a str) -> Result<(), LingjunError> {
        let mut names = text.split(',');
        let mut next = || names.next().filter(|name| !name.is_empty());
        let (Some(host), Some(core), Some(pod), Some(leaf), None) =
            (next(), next(), next(), next(), next())
        else {
            return Err(LingjunError::Unreadable { line, text: text.to_string() });
        };
        let above = *self.above.entry(pod).or_insert(core);
        if above != core {
            let [group, now, before] = [pod, core, above].map(str::to_string);
            return Err(LingjunError::Torn { line, group, now, before });
        }
        let first = *self.core.get_or_insert(core);
        if first != core {
            let [now, before] = [core, first].map(str::to_string);
            return Err(LingjunError::Apart { line, now, before });
        }
        self.leaves.entry((pod, leaf)).or_default().push((line, host));
        Ok(())
    }

    /// Switches of each group of the higher levels.
    fn planes(&self) -> u32 {
        self.leaves.values().map(Vec::len).max().unwrap_or(0) as u32
    }

    /// Refuses what would take too much memory to build.
    fn check_size(&self) -> Result<(), LingjunError> {
        let planes = u64::from(self.planes());
        // A leaf has a port for each host and plane, a plane two for each leaf below, and the cores
        // one.
        let ports_of_leaves = self.leaves.values().map(|hosts| 2 * hosts.len() as u64 + planes);
        let ports: u64 = ports_of_leaves.sum::<u64>() + 3 * planes * self.leaves.len() as u64;
        let switches = planes * (self.above.len() as u64 + 1);
        if ports + switches > MAX_PORTS_IN_ALL { Err(LingjunError::TooLarge) } else { Ok(()) }
    }

    fn build(&self, capacity: Capacity) -> Result<Topology, Fault> {
        let other = |source| (None, source);
        let planes = self.planes();
        let mut topology = Topology::new();
        let mut below: BTreeMap<&str, u32> = BTreeMap::new();
        for (pod, _) in self.leaves.keys() {
            *below.entry(*pod).or_default() += 1;
        }
        let mut leaves = Vec::new();
        for ((pod, leaf), hosts) in &self.leaves {
            let (first, ports) = (hosts[0].0, hosts.len() as u32 + planes);
            let switch = topology.add(Kind::Switch, &format!("ASW-{pod}-{leaf}"), ports);
            let switch = switch.map_err(|source| (Some(first), source))?;
            for &(line, name) in hosts {
                let at_line = |source| (Some(line), source);
                let host = topology.add(Kind::Host, name, 1).map_err(at_line)?;
                topology.join(host, switch, capacity).map_err(at_line)?;
            }
            leaves.push((*pod, switch));
        }
        let mut pods = BTreeMap::new();
        for (pod, leaves) in &below {
            let made = planes_of(&mut topology, &format!("PSW-{pod}"), planes, 2 * leaves);
            pods.insert(*pod, made.map_err(other)?);
        }
        let cores = format!("DSW-{}", self.core.unwrap_or_default());
        let cores = planes_of(&mut topology, &cores, planes, leaves.len() as u32).map_err(other)?;
        for (pod, switch) in leaves {
            // A link up to each plane, and for each of these one further up.
            for (&lower, &upper) in pods[pod].iter().zip(&cores) {
                topology.join(switch, lower, capacity).map_err(other)?;
                topology.join(lower, upper, capacity).map_err(other)?;
            }
        }
        Ok(topology)
    }
}

/// The switches of a group.
fn planes_of(
    topology: &mut Topology,
    group: &str,
    planes: u32,
    ports: u32,
) -> Result<Vec<NodeId>, TopologyError> {
    (0..planes)
        .map(|plane| topology.add(Kind::Switch, &format!("{group}-{plane}"), ports))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_lines(lines: &[&str]) -> Result<Topology, LingjunError> {
        read(&[&[HEADER], lines].concat().join("\n"), Capacity::default())
    }

    #[test]
    fn groups_become_planes_of_switches() {
        let topology = read_lines(&["a,G,P1,S1", "b,G,P1,S1", "c,G,P1,S2", "d,G,P2,S1", ""]);
        let topology = topology.expect("four hosts");
        // Three leaves; two planes of two pods and of the core. Links: hosts, leaves to planes,
        // planes to planes.
        assert_eq!(topology.to_string(), "4 hosts, 9 switches, 16 links");
        assert_eq!(topology.check(), Ok(()));
        let leaf = topology.named("ASW-P1-S1").expect("a leaf");
        let peers: Vec<&str> =
            topology.neighbours(leaf).map(|(_, end)| topology.node(end.node).name()).collect();
        assert_eq!(peers, ["a", "b", "PSW-P1-0", "PSW-P1-1"]);
        assert_eq!(topology.node(topology.named("DSW-G-0").expect("a core")).ports(), 3);
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_its_line() {
        assert_eq!(read("", Capacity::default()), Err(LingjunError::Header));
        let errors = [
            (&["a,G,P1"][..], "line 2: 'a,G,P1' is not"),
            (&["a,G,P1,S1,x"], "line 2: 'a,G,P1,S1,x' is not"),
            (&["a,G,,S1"], "line 2: 'a,G,,S1' is not"),
            (&["a,G,P1,S1", "b,H,P1,S1"], "line 3: P1 is below H, and was below G"),
            (&["a,G,P1,S1", "b,H,P2,S1"], "line 3: nothing joins H with G"),
            (&["a,G,P1,S1", "a,G,P1,S2"], "line 3: there are two nodes 'a'"),
        ];
        for (lines, expected) in errors {
            let error = read_lines(lines).expect_err("refused").to_string();
            assert!(error.starts_with(expected), "{lines:?}: {error}");
        }
        let many: Vec<String> = (0..300).map(|host| format!("h{host},G,P1,S1")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let error = read_lines(&many).expect_err("refused").to_string();
        assert!(error.starts_with("line 2: "), "{error}");
        // One switch with many hosts would make as many planes of every group.
        let mut hosts: Vec<String> = (0..4_000).map(|host| format!("h{host},G,P,S")).collect();
        hosts.extend((0..4_000).map(|host| format!("i{host},G,P{host},S")));
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        assert_eq!(read_lines(&hosts), Err(LingjunError::TooLarge));
    }
}
