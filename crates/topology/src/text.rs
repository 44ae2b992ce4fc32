//! Topologies as text of other programs.
//!
//! | format | of | read | written |
//! |---|---|---|---|
//! | net file | ibsim, and the output of `ibnetdiscover` | [`read_net`] | [`write_net`] |
//! | topology file | the ns-3 simulations of HPCC and its descendants | | [`write_ns3`] |
//! | DOT | Graphviz | | [`write_dot`] |
//! | `.topo` | csg-htsim | | [`htsim::write`](crate::htsim::write()) |
//!
//! A net file is a list of nodes, each followed by its connected ports; every link stands there
//! twice, once at each end, and both have to agree:
//!
//! ```text
//! Switch 4 "leaf0"
//! [1] "spine0"[1]
//!
//! Hca 1 "host0"
//! [1] "leaf0"[3]
//! ```

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use crate::graph::{Capacity, End, Kind, NodeId, Topology, TopologyError};

/// Why a net file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NetError {
    /// The line is nothing that such a file holds.
    #[error(
        "line {line}: '{text}' is neither a node (Switch 4 \"name\") nor a port ([1] \"peer\"[2])"
    )]
    Unreadable {
        /// Its number, from 1.
        line: usize,
        /// The line.
        text: String,
    },
    /// A port stands before any node.
    #[error("line {line}: a port before the first node")]
    PortBeforeNode {
        /// Its number, from 1.
        line: usize,
    },
    /// The peer of a port is not in the file.
    #[error("line {line}: there is no node '{peer}'")]
    UnknownPeer {
        /// Its number, from 1.
        line: usize,
        /// The name.
        peer: String,
    },
    /// One end names a link that the other end does not.
    #[error("line {line}: '{peer}' has something else at port {port}, or nothing")]
    OneSided {
        /// Its number, from 1.
        line: usize,
        /// The node at the other end.
        peer: String,
        /// Its port.
        port: u8,
    },
    /// Two nodes have one GUID.
    #[error("line {line}: GUID {guid} was there before")]
    DuplicateGuid {
        /// Its number, from 1.
        line: usize,
        /// As it stands there.
        guid: String,
    },
    /// It has more ports than any fabric.
    #[error("line {line}: more than {MAX_PORTS_IN_ALL} ports in all")]
    TooLarge {
        /// Its number, from 1.
        line: usize,
    },
    /// A node or link is impossible.
    #[error("line {line}: {source}")]
    Impossible {
        /// Its number, from 1.
        line: usize,
        /// Why.
        source: TopologyError,
    },
}

/// Most ports of all nodes together.
const MAX_PORTS_IN_ALL: u32 = 1 << 22;

/// A line of a net file.
enum Line<'a> {
    Node(Kind, u32, &'a str),
    Port(u8, &'a str, u8),
    Guid(&'a str),
    Nothing,
}

/// A port line, to be connected once all nodes are known.
struct Port<'a> {
    line: usize,
    end: End,
    peer: &'a str,
    peer_port: u8,
}

/// Reads a net file, or what `ibnetdiscover` printed. Links get `capacity`.
///
/// # Errors
/// Names the line: what cannot be read, does not fit together, or no cable can do.
pub fn read_net(text: &str, capacity: Capacity) -> Result<Topology, NetError> {
    let mut topology = Topology::new();
    let (mut ports, mut guids) = (Vec::new(), BTreeMap::new());
    let (mut node, mut ports_in_all) = (None, 0_u32);
    for (line, text) in (1..).zip(text.lines()) {
        let unreadable = || NetError::Unreadable { line, text: text.trim().to_string() };
        match parse(text).ok_or_else(unreadable)? {
            Line::Nothing => {}
            Line::Guid(guid) => {
                if guids.insert(guid, line).is_some() {
                    return Err(NetError::DuplicateGuid { line, guid: guid.to_string() });
                }
            }
            Line::Node(kind, ports, name) => {
                ports_in_all = ports_in_all.saturating_add(ports);
                if ports_in_all > MAX_PORTS_IN_ALL {
                    return Err(NetError::TooLarge { line });
                }
                let added = topology.add(kind, name, ports);
                node = Some(added.map_err(|source| NetError::Impossible { line, source })?);
            }
            Line::Port(port, peer, peer_port) => {
                let node = node.ok_or(NetError::PortBeforeNode { line })?;
                ports.push(Port { line, end: End { node, port }, peer, peer_port });
            }
        }
    }
    connect(&mut topology, &ports, capacity)?;
    Ok(topology)
}

fn connect(
    topology: &mut Topology,
    ports: &[Port<'_>],
    capacity: Capacity,
) -> Result<(), NetError> {
    let mut far = BTreeMap::new();
    for port in ports {
        let Port { line, peer, peer_port, .. } = *port;
        let node = topology.named(peer);
        let node = node.ok_or_else(|| NetError::UnknownPeer { line, peer: peer.to_string() })?;
        far.insert(port.end, End { node, port: peer_port });
    }
    for port in ports {
        let Port { line, end, peer, peer_port } = *port;
        let beyond = far[&end];
        // A port that stands there twice has the last of its peers, and the first does not agree.
        let agrees = topology.named(peer) == Some(beyond.node) && beyond.port == peer_port;
        if !agrees || far.get(&beyond) != Some(&end) {
            return Err(NetError::OneSided { line, peer: peer.to_string(), port: peer_port });
        }
        // Once for both ends, and never for a link to itself.
        if end <= beyond {
            let made = topology.connect(end, beyond, capacity);
            made.map_err(|source| NetError::Impossible { line, source })?;
        }
    }
    Ok(())
}

/// `None` where the line cannot be read.
fn parse(line: &str) -> Option<Line<'_>> {
    let line = line.split('#').next().unwrap_or_default().trim();
    if line.is_empty() {
        return Some(Line::Nothing);
    }
    if line.starts_with('[') {
        return parse_port(line);
    }
    let (first, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    if let Some((key, value)) = first.split_once('=') {
        // The GUID of the node; `ibnetdiscover` puts that of its port behind it, in brackets.
        let guid = value.split('(').next().unwrap_or_default();
        let is_guid = matches!(key, "switchguid" | "caguid" | "hcaguid");
        return Some(if is_guid { Line::Guid(guid) } else { Line::Nothing });
    }
    let kind = match first {
        "Switch" => Kind::Switch,
        "Hca" | "Ca" | "Rt" => Kind::Host,
        _ => return None,
    };
    let (ports, name) = rest.trim().split_once(char::is_whitespace)?;
    let (name, _) = name.trim().strip_prefix('"')?.split_once('"')?;
    Some(Line::Node(kind, ports.parse().ok()?, name))
}

/// `[1](guid) "peer"[2](guid)`
fn parse_port(line: &str) -> Option<Line<'_>> {
    let (port, rest) = line.strip_prefix('[')?.split_once(']')?;
    let (_, rest) = rest.split_once('"')?;
    let (peer, rest) = rest.split_once('"')?;
    let (peer_port, _) = rest.trim().strip_prefix('[')?.split_once(']')?;
    Some(Line::Port(port.trim().parse().ok()?, peer, peer_port.trim().parse().ok()?))
}

/// A net file that ibsim reads.
pub fn write_net(topology: &Topology) -> String {
    let mut text = String::new();
    for (id, node) in topology.nodes() {
        let kind = if node.kind() == Kind::Switch { "Switch" } else { "Hca" };
        text += &format!("{kind} {} \"{}\"\n", node.ports(), node.name());
        for (port, beyond) in topology.neighbours(id) {
            let peer = topology.node(beyond.node).name();
            text += &format!("[{port}] \"{peer}\"[{}]\n", beyond.port);
        }
        text.push('\n');
    }
    text
}

/// The topology file of the ns-3 simulations of HPCC: counts, the numbers of the switches, and a
/// line for each link: two nodes, rate, delay, share of errors.
pub fn write_ns3(topology: &Topology) -> String {
    let switches: Vec<String> =
        topology.switches().map(|switch| switch.index().to_string()).collect();
    let (nodes, links) = (topology.nodes().len(), topology.links().count());
    let mut text = format!("{nodes} {} {links}\n{}\n", switches.len(), switches.join(" "));
    for (_, link) in topology.links() {
        let [a, b] = link.ends.map(|end| end.node.index());
        let Capacity { rate_bps, delay_ns } = link.capacity;
        text += &format!("{a} {b} {rate_bps}bps {delay_ns}ns 0\n");
    }
    text
}

/// A graph for Graphviz: switches as boxes, hosts as ellipses.
pub fn write_dot(topology: &Topology) -> String {
    let mut text = String::from("graph fabric {\n");
    for (_, node) in topology.nodes() {
        let shape = if node.kind() == Kind::Switch { "box" } else { "ellipse" };
        text += &format!("  \"{}\" [shape={shape}];\n", node.name());
    }
    let name = |id: NodeId| topology.node(id).name();
    for (_, link) in topology.links() {
        let [a, b] = link.ends;
        text += &format!("  \"{}\" -- \"{}\";\n", name(a.node), name(b.node));
    }
    text.push_str("}\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;

    fn read(text: &str) -> Result<Topology, NetError> {
        read_net(text, Capacity::default())
    }

    #[test]
    fn what_is_written_is_read_back() {
        for text in ["fat-tree:4", "torus:3x3:2", "dragonfly:4x2x2", "rail:2x3x2x2", "bcube:3x1"] {
            let shape: Shape = text.parse().expect(text);
            let topology = shape.build(Capacity::default()).expect(text);
            let again = read(&write_net(&topology)).expect(text);
            assert_eq!(again.nodes().len(), topology.nodes().len());
            for (id, node) in topology.nodes() {
                let other = again.named(node.name()).expect("there");
                assert_eq!(again.node(other).kind(), node.kind());
                let peers = |topology: &Topology, id| {
                    let peers = topology.neighbours(id).map(|(port, end)| {
                        (port, topology.node(end.node).name().to_string(), end.port)
                    });
                    peers.collect::<Vec<_>>()
                };
                assert_eq!(peers(&again, other), peers(&topology, id), "{text} {}", node.name());
            }
        }
    }

    /// As `ibnetdiscover` prints it: GUIDs, comments, brackets behind ports.
    #[test]
    fn the_output_of_ibnetdiscover_is_read() {
        let text = "#\n# Topology file: generated on Wed Nov 25 2026\n#\nvendid=0x2c9\ndevid=0x1b3\n\
            sysimgguid=0x2c90000000003\nswitchguid=0x200000(200000)\n\
            Switch\t2 \"S-0000000000200000\"\t\t# \"leaf0\" base port 0 lid 1 lmc 0\n\
            [1]\t\"H-0000000000100000\"[1](100001) \t\t# \"host0\" lid 2 4xSDR\n\
            [2]\t\"H-0000000000100003\"[1](100004) \t\t# \"host1\" lid 3 4xSDR\n\n\
            caguid=0x100000\nCa\t1 \"H-0000000000100000\"\t\t# \"host0\"\n\
            [1](100001) \t\"S-0000000000200000\"[1]\t\t# lid 2 lmc 0 \"leaf0\" lid 1 4xSDR\n\n\
            caguid=0x100003\nCa\t1 \"H-0000000000100003\"\t\t# \"host1\"\n\
            [1](100004) \t\"S-0000000000200000\"[2]\t\t# lid 3 lmc 0 \"leaf0\" lid 1 4xSDR\n";
        let topology = read(text).expect("whole");
        assert_eq!(topology.to_string(), "2 hosts, 1 switches, 2 links");
        assert_eq!(topology.check(), Ok(()));
    }

    #[test]
    fn what_does_not_fit_together_is_refused_with_its_line() {
        let bad = [
            ("Switch 2 \"s\"\n[1] \"x\"[1]\n", "line 2: there is no node 'x'"),
            ("[1] \"x\"[1]\n", "line 1: a port before the first node"),
            ("Switch two \"s\"\n", "line 1: 'Switch two \"s\"' is neither"),
            ("Bridge 2 \"s\"\n", "line 1: 'Bridge 2 \"s\"' is neither"),
            ("Switch 2 \"s\"\nSwitch 2 \"s\"\n", "line 2: there are two nodes 's'"),
            (
                "Switch 2 \"s\"\n[1] \"s\"[2]\n[2] \"s\"[1]\n",
                "line 2: port 1 of 's' is connected to the same node",
            ),
            (
                "Switch 2 \"s\"\n[1] \"h\"[1]\nHca 1 \"h\"\n",
                "line 2: 'h' has something else at port 1, or nothing",
            ),
            (
                "Switch 2 \"s\"\n[1] \"h\"[1]\nHca 1 \"h\"\n[1] \"s\"[2]\n",
                "line 2: 'h' has something else at port 1",
            ),
            (
                "Switch 2 \"s\"\n[3] \"h\"[1]\nHca 1 \"h\"\n[1] \"s\"[3]\n",
                "line 2: 's' has ports 1 to 2, not 3",
            ),
            (
                "Switch 2 \"s\"\n[0] \"h\"[1]\nHca 1 \"h\"\n[1] \"s\"[0]\n",
                "line 2: 's' has ports 1 to 2, not 0",
            ),
            ("Switch 999 \"s\"\n", "line 1: 's' has 999 ports"),
            (
                "switchguid=0x1\nSwitch 2 \"s\"\ncaguid=0x1\nHca 1 \"h\"\n",
                "line 3: GUID 0x1 was there before",
            ),
            (
                "Switch 2 \"s\"\n[1] \"h\"[300]\nHca 1 \"h\"\n",
                "line 2: '[1] \"h\"[300]' is neither",
            ),
        ];
        for (text, expected) in bad {
            let error = read(text).expect_err(text).to_string();
            assert!(error.starts_with(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn other_programs_get_their_formats() {
        let shape: Shape = "leaf-spine:2x1x1".parse().expect("a shape");
        let topology = shape.build(Capacity { rate_bps: 25_000_000_000, delay_ns: 500 });
        let topology = topology.expect("small");
        let ns3 = "5 3 4\n0 1 2\n1 0 25000000000bps 500ns 0\n2 0 25000000000bps 500ns 0\n\
            1 3 25000000000bps 500ns 0\n2 4 25000000000bps 500ns 0\n";
        assert_eq!(write_ns3(&topology), ns3);
        let dot = write_dot(&topology);
        assert!(dot.contains("\"leaf0\" [shape=box];") && dot.contains("\"leaf0\" -- \"spine0\";"));
    }
}
