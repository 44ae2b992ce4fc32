//! The switches of a topology as a routing engine sees them: numbered from 0, with the directed
//! channels between them, and the end ports of hosts that packets are addressed to.
//!
//! Engines work on numbers, not on names: everything here is a small integer that indexes a list.

use alloc::vec::Vec;

use crate::graph::{End, Kind, NodeId, Topology};

/// Hops to a place that cannot be reached.
pub const FAR: u16 = u16::MAX;

/// One direction of a link between two switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channel {
    /// The switch that sends, by number.
    pub from: u32,
    /// Its port.
    pub port: u8,
    /// The switch that receives, by number.
    pub to: u32,
}

/// A port of a host: packets are addressed to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndPort {
    /// The host and its port.
    pub end: End,
    /// The switch that it is connected to, by number.
    pub switch: u32,
    /// The port of that switch.
    pub port: u8,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Channels {
    switches: Vec<NodeId>,
    end_ports: Vec<EndPort>,
    /// How many end ports each switch has.
    sources: Vec<u32>,
    /// Sorted by sender and port.
    channels: Vec<Channel>,
    /// Where the channels of each switch begin, and the end of all.
    first: Vec<u32>,
    /// The numbers of the channels to each switch.
    into: Vec<Vec<u32>>,
    /// By switch and port, the number of the channel, or [`NONE`].
    at_port: Vec<u32>,
    /// Ports of each switch in `at_port`.
    stride: usize,
}

/// No channel.
const NONE: u32 = u32::MAX;

impl Channels {
    /// Those of a topology. End ports are in the order of hosts and their ports; links between two
    /// hosts are left out.
    pub fn of(topology: &Topology) -> Channels {
        let switches: Vec<NodeId> = topology.switches().collect();
        let mut number = alloc::vec![u32::MAX; topology.nodes().len()];
        for (at, switch) in (0..).zip(&switches) {
            number[switch.index()] = at;
        }
        let is_switch = |id: NodeId| topology.node(id).kind() == Kind::Switch;
        let (mut channels, mut first) = (Vec::new(), Vec::new());
        for switch in &switches {
            first.push(channels.len() as u32);
            let others = topology.neighbours(*switch).filter(|(_, end)| is_switch(end.node));
            channels.extend(others.map(|(port, end)| Channel {
                from: number[switch.index()],
                port,
                to: number[end.node.index()],
            }));
        }
        first.push(channels.len() as u32);
        let mut into = alloc::vec![Vec::new(); switches.len()];
        for (at, channel) in (0..).zip(&channels) {
            into[channel.to as usize].push(at);
        }
        let (mut end_ports, mut sources) = (Vec::new(), alloc::vec![0; switches.len()]);
        for host in topology.hosts() {
            for (port, beyond) in topology.neighbours(host).filter(|(_, end)| is_switch(end.node)) {
                let switch = number[beyond.node.index()];
                sources[switch as usize] += 1;
                let end = End { node: host, port };
                end_ports.push(EndPort { end, switch, port: beyond.port });
            }
        }
        let most = channels.iter().map(|channel| usize::from(channel.port)).max().unwrap_or(0);
        let stride = most + 1;
        let mut at_port = alloc::vec![NONE; switches.len() * stride];
        for (at, channel) in (0..).zip(&channels) {
            at_port[channel.from as usize * stride + usize::from(channel.port)] = at;
        }
        Channels { switches, end_ports, sources, channels, first, into, at_port, stride }
    }

    /// The switches, by number.
    pub fn switches(&self) -> &[NodeId] {
        &self.switches
    }

    /// The end ports. Tables and lanes use their places in this list.
    pub fn end_ports(&self) -> &[EndPort] {
        &self.end_ports
    }

    /// How many end ports a switch has.
    pub fn sources(&self, switch: u32) -> u32 {
        self.sources[switch as usize]
    }

    /// All channels, sorted by sender and port.
    pub fn all(&self) -> &[Channel] {
        &self.channels
    }

    /// A channel by its number: its place in [`all`](Channels::all).
    pub fn get(&self, channel: u32) -> Channel {
        self.channels[channel as usize]
    }

    /// The numbers of the channels that leave a switch, in the order of its ports.
    pub fn leaving(&self, switch: u32) -> core::ops::Range<u32> {
        self.first[switch as usize]..self.first[switch as usize + 1]
    }

    /// The numbers of the channels that reach a switch.
    pub fn reaching(&self, switch: u32) -> &[u32] {
        &self.into[switch as usize]
    }

    /// The number of the channel that leaves a switch at a port, if there is one.
    pub fn at(&self, switch: u32, port: u8) -> Option<u32> {
        let port = usize::from(port);
        let own = self.at_port.get(switch as usize * self.stride + port)?;
        (port < self.stride && *own != NONE).then_some(*own)
    }

    /// Channels to pass from each switch to `to`; [`FAR`] where there is no path.
    pub fn distances(&self, to: u32) -> Vec<u16> {
        self.distances_from_any(&[to])
    }

    /// Channels to pass from each switch to the nearest of `roots`. Links have two directions, so
    /// it is the same back.
    pub fn distances_from_any(&self, roots: &[u32]) -> Vec<u16> {
        let mut distances = alloc::vec![FAR; self.switches.len()];
        let mut reached: Vec<u32> = roots.to_vec();
        roots.iter().for_each(|root| distances[*root as usize] = 0);
        let mut next = 0;
        while let Some(&at) = reached.get(next) {
            next += 1;
            for channel in self.reaching(at) {
                let from = self.get(*channel).from;
                if distances[from as usize] == FAR {
                    distances[from as usize] =
                        distances[at as usize].saturating_add(1).min(FAR - 1);
                    reached.push(from);
                }
            }
        }
        distances
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Capacity;
    use crate::shape::Shape;

    #[test]
    fn a_leaf_spine_has_two_channels_for_each_link_between_switches() {
        let shape: Shape = "leaf-spine:3x2x4".parse().expect("a shape");
        let channels = Channels::of(&shape.build(Capacity::default()).expect("small"));
        assert_eq!((channels.all().len(), channels.end_ports().len()), (12, 12));
        // Spines come first.
        assert_eq!(channels.distances(2), [1, 1, 0, 2, 2]);
        assert_eq!((channels.sources(0), channels.sources(2)), (0, 4));
        for (number, channel) in (0..).zip(channels.all()) {
            assert_eq!(channels.at(channel.from, channel.port), Some(number));
            assert!(channels.reaching(channel.to).contains(&number));
        }
        assert_eq!(channels.at(2, 200), None);
    }
}
