//! Topologies as TOML: nodes with their ports, and links with their rate and delay.
//!
//! ```toml
//! [[switch]]
//! name = "leaf0"
//! ports = 32          # as many as its links need, if absent
//!
//! [[host]]
//! name = "h0"
//!
//! [[link]]
//! ends = ["h0:1", "leaf0:7"]      # the first free port, if there is none
//! rate = "100Gbit"                # those of the command or scenario, if absent
//! delay = "1us"
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use ::topology::graph::{Capacity, End, Kind, NodeId, Topology, TopologyError};
use serde::Deserialize;
use thiserror::Error;

use crate::units;

/// Why a text is not a topology.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OwnError {
    /// It is no TOML, or has other tables.
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    /// A node or link cannot be.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The end of a link is no name, and no name with a port.
    #[error("link {link}: '{end}' is not NAME or NAME:PORT")]
    End {
        /// Which one, from 1.
        link: usize,
        /// What is written.
        end: String,
    },
    /// A rate or a delay cannot be read.
    #[error("link {link}: {why}")]
    Quantity {
        /// Which one, from 1.
        link: usize,
        /// Why.
        why: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    switch: Vec<Node>,
    #[serde(default)]
    host: Vec<Node>,
    #[serde(default)]
    link: Vec<Link>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    name: String,
    ports: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    ends: [String; 2],
    rate: Option<String>,
    delay: Option<String>,
}

/// The end of a link, as it is written.
struct Place<'a> {
    name: &'a str,
    port: Option<u8>,
}

/// Reads a topology. Links without a rate or a delay have those of `usual`.
///
/// # Errors
/// With the node or link that cannot be.
pub fn read(text: &str, usual: Capacity) -> Result<Topology, OwnError> {
    let file: File = toml::from_str(text)?;
    let places: Vec<[Place<'_>; 2]> =
        (1..).zip(&file.link).map(|(link, one)| places(link, one)).collect::<Result<_, _>>()?;
    let mut topology = Topology::new();
    let needed = needed_ports(&places);
    for (kind, nodes) in [(Kind::Switch, &file.switch), (Kind::Host, &file.host)] {
        for node in nodes {
            let ports = needed.get(node.name.as_str()).copied().unwrap_or(0);
            topology.add(kind, &node.name, node.ports.unwrap_or(ports.max(1)))?;
        }
    }
    // Ports that are named somewhere are not free elsewhere.
    let named = places.iter().flatten().filter_map(|place| Some((place.name, place.port?)));
    let named: BTreeSet<(&str, u8)> = named.collect();
    for (link, [a, b]) in (1..).zip(&places) {
        let capacity = capacity(link, &file.link[link - 1], usual)?;
        let (a, b) = (end(&topology, &named, a)?, end(&topology, &named, b)?);
        topology.connect(a, b, capacity)?;
    }
    Ok(topology)
}

fn places(link: usize, one: &Link) -> Result<[Place<'_>; 2], OwnError> {
    let place = |text: &str| -> Option<(usize, Option<u8>)> {
        match text.rsplit_once(':') {
            None => (!text.is_empty()).then_some((text.len(), None)),
            Some((name, port)) => Some((name.len(), Some(port.parse().ok()?))),
        }
    };
    let [a, b] = &one.ends;
    let bad = |text: &str| OwnError::End { link, end: text.to_owned() };
    let [(a_len, a_port), (b_len, b_port)] =
        [place(a).ok_or_else(|| bad(a))?, place(b).ok_or_else(|| bad(b))?];
    let [a, b] = [&a[..a_len], &b[..b_len]];
    Ok([Place { name: a, port: a_port }, Place { name: b, port: b_port }])
}

/// The ports that each node needs for its links.
fn needed_ports<'a>(places: &[[Place<'a>; 2]]) -> BTreeMap<&'a str, u32> {
    let mut needed: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for place in places.iter().flatten() {
        let (links, highest) = needed.entry(place.name).or_default();
        *links += 1;
        *highest = (*highest).max(place.port.unwrap_or(0).into());
    }
    needed.into_iter().map(|(name, (links, highest))| (name, links.max(highest))).collect()
}

fn capacity(link: usize, one: &Link, usual: Capacity) -> Result<Capacity, OwnError> {
    let why = |error: units::UnitError| OwnError::Quantity { link, why: error.to_string() };
    let rate = one.rate.as_deref().map(units::rate_bps).transpose().map_err(why)?;
    let delay = one.delay.as_deref().map(units::duration).transpose().map_err(why)?;
    Ok(Capacity {
        rate_bps: rate.unwrap_or(usual.rate_bps),
        delay_ns: delay.map_or(usual.delay_ns, |delay| delay.as_nanos()),
    })
}

/// The port of an end: the one that is named, or the first free one.
fn end(
    topology: &Topology,
    named: &BTreeSet<(&str, u8)>,
    place: &Place<'_>,
) -> Result<End, OwnError> {
    let unknown = || TopologyError::UnknownNode(place.name.to_owned());
    let node: NodeId = topology.named(place.name).ok_or_else(unknown)?;
    let entry = topology.node(node);
    let is_free =
        |port: &u8| entry.link_at(*port).is_none() && !named.contains(&(place.name, *port));
    let free = || (1..=entry.ports()).find(is_free);
    let full = || TopologyError::NoFreePort { name: place.name.to_owned(), ports: entry.ports() };
    let port = place.port.or_else(free).ok_or_else(full)?;
    Ok(End { node, port })
}

/// The same topology as text.
pub fn write(topology: &Topology) -> String {
    let mut text = String::new();
    for (_, node) in topology.nodes() {
        let kind = if node.kind() == Kind::Switch { "switch" } else { "host" };
        let (name, ports) = (node.name(), node.ports());
        let _ = writeln!(text, "[[{kind}]]\nname = \"{name}\"\nports = {ports}\n");
    }
    for (_, link) in topology.links() {
        let [a, b] =
            link.ends.map(|end| format!("{}:{}", topology.node(end.node).name(), end.port));
        let Capacity { rate_bps, delay_ns } = link.capacity;
        let rate = rate_text(rate_bps);
        let _ = writeln!(
            text,
            "[[link]]\nends = [\"{a}\", \"{b}\"]\nrate = \"{rate}\"\ndelay = \"{delay_ns}ns\"\n"
        );
    }
    text
}

/// A rate with a unit that it is a whole number of, as far as there is one.
fn rate_text(bps: u64) -> String {
    match bps {
        whole if whole.is_multiple_of(1_000_000_000) => format!("{}Gbit", bps / 1_000_000_000),
        whole if whole.is_multiple_of(1_000_000) => format!("{}Mbit", bps / 1_000_000),
        _ => format!("{}.{:03}kbit", bps / 1_000, bps % 1_000),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ::topology::shape::Shape;

    #[test]
    fn what_is_written_is_read_back() {
        for rule in ["fat-tree:4", "torus:3x3:2", "rail:2x3x2x2", "bcube:3x1"] {
            let shape: Shape = rule.parse().expect(rule);
            let capacity = Capacity { rate_bps: 123_456_789_000, delay_ns: 77 };
            let topology = shape.build(capacity).expect(rule);
            let again = read(&write(&topology), Capacity::default()).expect(rule);
            // Switches come first, so links are compared by their names.
            let named = |topology: &Topology| {
                let end = |end: End| (topology.node(end.node).name().to_owned(), end.port);
                let links = topology.links();
                let mut links: Vec<_> =
                    links.map(|(_, link)| (link.ends.map(end), link.capacity.rate_bps)).collect();
                links.sort();
                links
            };
            assert_eq!(named(&again), named(&topology), "{rule}");
        }
    }

    #[test]
    fn ports_rates_and_delays_may_be_left_out() {
        let text = "
            host = [{ name = 'a' }, { name = 'b' }]
            switch = [{ name = 's' }]
            [[link]]
            ends = ['a', 's']
            [[link]]
            ends = ['b', 's:1']
            rate = '25Gbit'
            delay = '300ns'
        ";
        let topology = read(text, Capacity::default()).expect("a topology");
        let switch = topology.named("s").expect("there");
        assert_eq!(topology.node(switch).ports(), 2);
        let at = |port| topology.node(switch).link_at(port).and_then(|id| topology.link(id));
        let (first, second) = (at(1).expect("b"), at(2).expect("a"));
        assert_eq!(first.capacity, Capacity { rate_bps: 25_000_000_000, delay_ns: 300 });
        assert_eq!(second.capacity, Capacity::default());
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_place() {
        let base =
            "host = [{ name = 'a' }, { name = 'b' }]\nswitch = [{ name = 's', ports = 2 }]\n";
        let refused = |more: &str| {
            read(&format!("{base}{more}"), Capacity::default()).unwrap_err().to_string()
        };
        let link = |ends: &str| format!("[[link]]\nends = {ends}\n");
        assert!(refused(&link("['a', 'x']")).contains("no node 'x'"));
        assert!(refused(&link("['a', 's:9']")).contains("not 9"));
        assert!(refused(&link("['a', 's:x']")).contains("link 1: 's:x'"));
        assert!(refused(&link("['a', '']")).contains("link 1: ''"));
        assert!(refused(&link("['a:1', 'a:1']")).contains("same node"));
        assert!(refused(&format!("{}rate = '0Gbit'", link("['a', 's']"))).contains("link 1: "));
        assert!(refused(&format!("{}rate = '1 parsec'", link("['a', 's']"))).contains("parsec"));
        let twice = format!("{}{}", link("['a:1', 's:1']"), link("['b', 's:1']"));
        assert!(refused(&twice).contains("connected already"), "{}", refused(&twice));
        let doubled = "host = [{ name = 'a' }, { name = 'a' }]";
        assert!(read(doubled, Capacity::default()).unwrap_err().to_string().contains("two nodes"));
        assert!(refused("[[link]]\nend = ['a', 's']").contains("unknown field `end`"));
    }
}
