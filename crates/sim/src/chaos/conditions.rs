//! A network of many switches that fail: the hosts of the programs in different places of a
//! topology.
//!
//! Hosts without programs would send nothing, and are left out. Switches pause, give credits, or
//! drop; they mark, stamp telemetry and spread packets over equally short paths. Links and switches
//! fail and come back, links are slow for a while, frames suffer bit errors, pauses and flow
//! control packets are lost, and NICs pause their switch for no reason.

use alloc::vec::Vec;

use ::topology::graph::{Capacity, NodeId, Topology};
use ::topology::shape::Shape;
use roce::Duration;

use crate::buffer::{BufferConfig, Pfc};
use crate::chance::Chance;
use crate::credits::BLOCK_BYTES;
use crate::graph::Spread;
use crate::link::{LinkConfig, Marking};
use crate::network::{LinkFaults, NetworkConfig, Rerouting, Watchdog, headroom};
use crate::topology;

/// Sets the stream of these networks apart from the others of a seed.
const NETWORK: u64 = 0x0066_6174_2d74_7265;

/// What a failure strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A link between switches: it goes down.
    Link,
    /// A switch: it goes down, with all that it holds.
    Switch,
    /// A link between switches: its rate is divided by this.
    Rate(u64),
    /// The switch of a node, which pauses it.
    Storm,
}

/// A failure somewhere on one of the ways from one node to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) target: Target,
    pub(super) nodes: [u32; 2],
    /// Chooses the way, and the place on it.
    pub(super) pick: u64,
    /// How long it lasts.
    pub(super) span: Duration,
}

/// What switches and links of a seed do, where there are many of them.
#[derive(Clone, Debug)]
pub(super) struct Conditions {
    pub(super) faults: LinkFaults,
    /// By number of sends posted.
    pub(super) failures: Vec<(u64, Failure)>,
    /// Switches that a packet may come to before it is dropped: more than any way has.
    pub(super) hop_limit: u8,
    /// Packets of a connection may overtake each other.
    pub(super) reorders: bool,
    /// From the end of all faults until routes, pauses and watchdogs are as if there had been none.
    pub(super) settles_in: Duration,
}

/// The stream of a seed, and the topology if it has one: of these options, or in some seeds a fat
/// tree.
pub(super) fn draw_topology(seed: u64, asked: Option<&Topology>) -> (Chance, Option<Topology>) {
    let mut chance = Chance::new(seed ^ NETWORK);
    let is_drawn = chance.per_mille(150);
    let shape = Shape::FatTree { ports: 4 };
    let fat_tree = || shape.build(Capacity::default()).ok().filter(|_| is_drawn);
    (chance, asked.cloned().or_else(fat_tree))
}

/// How switches keep packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keeping {
    Pauses,
    Credits(u32),
    Drops,
}

impl Conditions {
    /// Puts the nodes into a topology. Returns the network, the link of a node, and one that stands
    /// for the longest way.
    pub(super) fn lay(
        topology: &Topology,
        network: &mut NetworkConfig,
        pairs: &[[u32; 2]],
        link: LinkConfig,
        budget: u64,
        chance: &mut Chance,
    ) -> (Conditions, [LinkConfig; 2]) {
        let keeping = match chance.below(10) {
            0..5 => Keeping::Pauses,
            5..8 => Keeping::Credits(chance.pick(&[80, 256, 1_024])),
            _ => Keeping::Drops,
        };
        let marks = Marking { min_bytes: 2_000, max_bytes: 40_000, max_probability_ppm: 200_000 };
        let marking = chance.per_mille(600).then_some(marks);
        let credits = match keeping {
            Keeping::Credits(blocks) => Some(blocks),
            _ => None,
        };
        // Short links in most seeds, as within a building: the headroom for what is on a link is
        // small, too.
        let short = Duration::from_nanos(chance.between(100, 2_000));
        let delay = if chance.per_mille(700) { short } else { link.delay };
        let edge = LinkConfig { delay, marking, credits, queue_bytes: 1 << 30, ..link };
        let slower = chance.pick(&[1, 4, 4]);
        let trunk = edge.with_rate(edge.rate_bps / slower);
        let spread = match chance.below(10) {
            0..6 => Spread::Flow,
            6..9 => Spread::Packet,
            _ => Spread::First,
        };
        let hosts = choose_hosts(topology, network.graph.nodes(), chance);
        network.graph = topology::among(topology, &hosts, edge, trunk).spread(spread);
        network.buffer = draw_buffer(keeping, topology, &trunk, &edge, chance);
        network.nic_packets = chance.pick(&[None, Some(1), Some(1), Some(4)]);
        let micros =
            |chance: &mut Chance, low, high| Duration::from_micros(chance.between(low, high));
        let rerouting =
            Rerouting { detection: micros(chance, 20, 500), spread: micros(chance, 0, 200) };
        let watchdog = Watchdog {
            detection: micros(chance, 200, 1_000),
            restoration: micros(chance, 200, 1_000),
        };
        (network.rerouting, network.watchdog) = (Some(rerouting), Some(watchdog));
        let faults = LinkFaults {
            bit_errors: if chance.per_mille(400) { chance.pick(&[30, 300, 1_000]) } else { 0 },
            pause_loss: if chance.per_mille(400) { chance.pick(&[20_000, 200_000]) } else { 0 },
        };
        let failures = draw_failures(pairs, budget, keeping, chance);
        let quanta =
            Duration::from_nanos(trunk.serialization(u64::from(Pfc::LONGEST) * 64).as_nanos());
        let conditions = Conditions {
            faults,
            hop_limit: chance.pick(&[16, 64]),
            reorders: spread == Spread::Packet || !failures.is_empty(),
            failures,
            settles_in: rerouting.longest()
                + quanta
                + watchdog.detection * 2
                + watchdog.restoration,
        };
        (conditions, [edge, whole_way(&trunk)])
    }
}

/// Hosts at different switches, as far as there are enough of these.
fn choose_hosts(topology: &Topology, count: u32, chance: &mut Chance) -> Vec<NodeId> {
    let mut left: Vec<NodeId> = topology.hosts().collect();
    let switch = |host: NodeId| topology.neighbours(host).next().map(|(_, end)| end.node);
    let mut chosen: Vec<NodeId> = Vec::new();
    while chosen.len() < count as usize && !left.is_empty() {
        let host = left.swap_remove(chance.below(left.len() as u64) as usize);
        let is_alone = chosen.iter().all(|&other| switch(other) != switch(host));
        let is_other = |&next: &NodeId| chosen.iter().all(|&other| switch(other) != switch(next));
        if is_alone || !left.iter().any(is_other) {
            chosen.push(host);
        }
    }
    chosen
}

fn draw_buffer(
    keeping: Keeping,
    topology: &Topology,
    trunk: &LinkConfig,
    edge: &LinkConfig,
    chance: &mut Chance,
) -> Option<BufferConfig> {
    let reserve = 1_100;
    let ports = topology.switches().map(|id| topology.node(id).links().count()).max();
    let own = ports.unwrap_or(0) as u64 * (reserve + headroom(edge, trunk));
    let config = match keeping {
        Keeping::Pauses => BufferConfig::lossless(own + chance.between(1_000, 30_000)),
        Keeping::Drops => BufferConfig::lossy(chance.between(20_000, 200_000)),
        Keeping::Credits(_) => return None,
    };
    Some(BufferConfig { reserve, shift: 1, ..config })
}

fn draw_failures(
    pairs: &[[u32; 2]],
    budget: u64,
    keeping: Keeping,
    chance: &mut Chance,
) -> Vec<(u64, Failure)> {
    let mut failures = Vec::new();
    let by = chance.pick(&[2, 5, 10]);
    let storms = if keeping == Keeping::Pauses { 250 } else { 0 };
    for (target, often, most) in [
        (Target::Link, 700, 4),
        (Target::Switch, 400, 2),
        (Target::Rate(by), 300, 2),
        (Target::Storm, storms, 2),
    ] {
        let count = if chance.per_mille(often) { chance.between(1, most) } else { 0 };
        for _ in 0..count {
            let span = Duration::from_nanos(chance.between(10_000, 5_000_000));
            let nodes = chance.pick(pairs);
            let nodes = if chance.per_mille(500) { nodes } else { [nodes[1], nodes[0]] };
            let failure = Failure { target, nodes, pick: chance.word(), span };
            failures.push((chance.below(budget), failure));
        }
    }
    failures.sort_by_key(|(at, _)| *at);
    failures
}

/// A link as slow as the slowest of the longest way, of six links. Credits limit it to a buffer in
/// each round trip of a link.
fn whole_way(trunk: &LinkConfig) -> LinkConfig {
    let round_trip = trunk.delay * 2 + trunk.serialization(4_400) * 2;
    let in_flight = |blocks: u32| u64::from(blocks) * u64::from(BLOCK_BYTES) * 8;
    let by_credits = trunk
        .credits
        .map(|blocks| in_flight(blocks) * 1_000_000_000 / round_trip.as_nanos().max(1));
    let rate_bps = by_credits.map_or(trunk.rate_bps, |most| most.min(trunk.rate_bps));
    LinkConfig { rate_bps, delay: trunk.delay * 3, ..*trunk }
}
