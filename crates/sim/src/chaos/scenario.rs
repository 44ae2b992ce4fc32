//! The choices of a seed before a run: machines, links, connections, faults and programs.
//!
//! Swarm testing: a seed enables some features and not others, rather than a little of everything,
//! so that combinations come up which an average would never show.

use alloc::vec::Vec;

use controls::{CongestionControl, DcqcnParams, DctcpParams, HpccParams, TimelyParams};
use roce::Duration;
use roce::endpoint::{Connect, EndpointConfig, Mtu, Reliability};
use roce::verbs::Transport;
use roce::wire::Psn;
use roce::world::Path;

use crate::buffer::{BufferConfig, Pfc};
use crate::chance::Chance;
use crate::faults::FaultMix;
use crate::graph::{Graph, Vertex};
use crate::link::{LinkConfig, Marking};
use crate::network::{NetworkConfig, headroom};
use crate::pressure::Pressure;

use super::Options;
use super::conditions::{Conditions, Failure, draw_topology};

/// Operations of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    /// A READ, and a fenced SEND of the bytes it returns.
    ReadSend,
    Atomic,
    /// Binds the own memory window.
    Bind,
    /// Writes through the peer's window.
    WindowWrite,
    /// Invalidates the peer's window, with a message.
    SendInvalidate,
    /// Invalidates the own window.
    LocalInvalidate,
    /// A READ, and an unfenced request behind it that changes the bytes it reads.
    ReadThenChange,
    /// A request that the peer must refuse.
    Trespass,
    /// A request that our own endpoint must refuse.
    LocalTrespass,
}

/// Most READs and atomics of a peer that a queue pair serves concurrently.
pub(super) const MAX_RD_ATOMIC: u8 = 4;

/// How a connection is made.
#[derive(Clone, Debug)]
pub(super) struct Params {
    pub(super) transport: Transport,
    /// Receives come from the node's shared queue, where it has one; for either side.
    pub(super) shares_receives: [bool; 2],
    pub(super) mtu: Mtu,
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    rnr_retry: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) window_packets: u32,
    reliability: Reliability,
    congestion: CongestionControl,
    /// Most work requests of a queue.
    pub(super) depth: u32,
    /// Operations of its programs, weighted by how often they are listed.
    pub(super) kinds: Vec<Kind>,
    /// Signaled sends, per mille.
    pub(super) signaled: u32,
    /// Chance per opportunity to post a receive before it is needed, per mille.
    pub(super) eagerness: u32,
    /// Longest pause between two turns of a program, in nanoseconds.
    pub(super) think_ns: u64,
}

impl Params {
    /// Whether the transport promises that messages arrive.
    pub(super) fn is_reliable(&self) -> bool {
        self.transport == Transport::Rc
    }

    /// Whether packets of later messages may be placed before those of earlier ones.
    pub(super) fn is_selective(&self) -> bool {
        self.is_reliable() && self.reliability == Reliability::Selective
    }

    /// Attributes for one side.
    pub(super) fn connect(&self, path: Path, dest_qp: roce::verbs::Qpn, psn: Psn) -> Connect {
        Connect {
            mtu: self.mtu,
            timeout: self.timeout,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
            min_rnr_timer: self.min_rnr_timer,
            max_rd_atomic: self.max_rd_atomic,
            max_dest_rd_atomic: MAX_RD_ATOMIC,
            window_packets: self.window_packets,
            reliability: self.reliability,
            congestion: self.congestion.into(),
            ..Connect::new(path, dest_qp, psn)
        }
    }

    /// Minimum time between two congestion notifications of one side.
    pub(super) fn cnp_interval(&self) -> Duration {
        match self.congestion {
            CongestionControl::Dcqcn(params) => params.cnp_interval,
            CongestionControl::Dctcp(_) => DctcpParams::CNP_INTERVAL,
            _ => Duration::from_micros(50),
        }
    }

    /// The lowest rate of congestion control in bits per second, if it limits at all.
    pub(super) fn least_bps(&self) -> Option<u64> {
        match self.congestion {
            CongestionControl::Dcqcn(params) => Some(params.min_bps),
            CongestionControl::Dctcp(params) => Some(params.min_bps),
            CongestionControl::Timely(params) => Some(params.min_bps),
            CongestionControl::Hpcc(params) => Some(params.min_bps),
            _ => None,
        }
    }

    /// The local ACK timeout: 4.096 us * 2^n (IBA 9.7.6.1.3).
    pub(super) fn ack_timeout(&self) -> Duration {
        Duration::from_nanos(4_096 << self.timeout)
    }

    /// Longest RNR delay of this connection (IBA table 45; codes up to 14).
    pub(super) fn rnr_delay(&self) -> Duration {
        Duration::from_micros(10) * rnr_units(self.min_rnr_timer)
    }
}

/// RNR timer codes 1 to 31 in units of 10 us: 1, 2, 3, 4, 6, 8, 12, … (IBA table 45).
pub(super) fn rnr_units(code: u8) -> u64 {
    match code & 31 {
        0 => 65_536,
        code @ 1..=3 => u64::from(code),
        code if code % 2 == 0 => 1 << (code / 2),
        code => 3 << ((code - 3) / 2),
    }
}

/// Two programs that talk to each other.
#[derive(Clone, Debug)]
pub(super) struct PairPlan {
    pub(super) nodes: [u32; 2],
    pub(super) params: Params,
}

/// Something that happens once this many sends were posted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Strike {
    Flap { node: u32, span: Duration },
    Restart { node: u32 },
    Fail(Failure),
}

/// Habits of programs and their peers. Each is enabled independently, and drawn separately from
/// everything else.
#[derive(Clone, Debug)]
pub(super) struct Habits {
    /// Queue pairs and regions allow random subsets of what they could.
    pub(super) restricts: bool,
    /// Queue pairs go to SQD, get other attributes there, and come back: per mille of turns.
    pub(super) drains: u32,
    /// UC and UD queue pairs come back from SQE.
    pub(super) recovers: bool,
    /// Queue pairs that end are reset or destroyed with completions unpolled, per mille.
    pub(super) abandons: u32,
    /// Programs that sleep until they are notified, per mille.
    pub(super) sleeps: u32,
    /// An unfenced request follows a READ of the bytes it changes, per mille of sends.
    pub(super) overtakes: u32,
    /// Hostile peers that forge packets, one connection each.
    pub(super) intruders: u32,
    /// Nodes are neighbours: WRITEs and READs do without packets where they can.
    pub(super) neighbours: bool,
}

impl Habits {
    fn draw(chance: &mut Chance) -> Habits {
        let mut rate = |often, rates: &[u32]| match chance.per_mille(often) {
            true => chance.pick(rates),
            false => 0,
        };
        Habits {
            restricts: rate(300, &[1]) > 0,
            drains: rate(250, &[5, 40]),
            recovers: rate(500, &[1]) > 0,
            abandons: rate(300, &[200, 1_000]),
            sleeps: rate(300, &[300, 1_000]),
            overtakes: rate(300, &[20, 200]),
            intruders: rate(400, &[1, 1, 2]),
            neighbours: rate(350, &[1]) > 0,
        }
    }
}

/// Everything that a seed decides in advance.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) network: NetworkConfig,
    /// From a node to the network.
    pub(super) link: LinkConfig,
    pub(super) mix: FaultMix,
    /// Back-pressure until the faults stop.
    pub(super) pressure: Option<Pressure>,
    /// Faults so frequent and retries so few that connections may break.
    pub(super) is_harsh: bool,
    /// Sends to be posted before the faults stop.
    pub(super) budget: u64,
    /// Longest message.
    pub(super) max_len: u64,
    pub(super) pairs: Vec<PairPlan>,
    /// Shared receive queues, by node: receives it holds, and their length.
    pub(super) pools: Vec<Option<(u32, u32)>>,
    /// By number of sends posted.
    pub(super) strikes: Vec<(u64, Strike)>,
    /// How often a program posts an illegal request, per mille.
    pub(super) trespass: u32,
    /// How often it sends more than the receive can hold, per mille.
    pub(super) too_long: u32,
    pub(super) habits: Habits,
    /// A topology whose switches and links fail.
    pub(super) conditions: Option<Conditions>,
}

impl Scenario {
    pub(super) fn draw(seed: u64, options: &Options, chance: &mut Chance) -> Scenario {
        let is_harsh = chance.per_mille(120);
        let nodes = if chance.per_mille(700) { 2 } else { 3 };
        let (mut network_chance, topology) = draw_topology(seed, options.topology.as_ref());
        let nodes = topology.as_ref().map_or(nodes, |topology| {
            network_chance.between(2, 4).min(topology.hosts().count() as u64) as u32
        });
        let is_large = chance.per_mille(150);
        let budget = options.sends.unwrap_or_else(|| chance.between(200, 900));
        let count = chance.between(1, if is_large { 2 } else { 4 });
        let (mut network, link) = draw_network(nodes, seed, chance);
        network.roce_v1 = Chance::new(seed ^ VERSION).per_mille(150);
        let pairs = (0..count).map(|_| draw_pair(nodes, is_harsh, link.rate_bps, chance));
        let pairs: Vec<PairPlan> = pairs.collect();
        let misbehaves = chance.per_mille(250);
        let habits = Habits::draw(&mut Chance::new(!seed));
        let mut pairs = with_habits(pairs, &habits, &mut Chance::new(!seed));
        let pressure = draw_pressure(&mut network, &mut pairs, &mut Chance::new(seed ^ PRESSURE));
        let (conditions, link) = match &topology {
            Some(topology) => {
                let chance = &mut network_chance;
                let nodes: Vec<[u32; 2]> = pairs.iter().map(|pair| pair.nodes).collect();
                let (conditions, [edge, whole_way]) =
                    Conditions::lay(topology, &mut network, &nodes, link, budget, chance);
                draw_controls(&mut pairs, &edge, 12, chance);
                (Some(conditions), whole_way)
            }
            None => {
                let chance = &mut Chance::new(seed ^ SWITCHES);
                (None, draw_switches(&mut network, &mut pairs, link, chance))
            }
        };
        if pressure.is_some() {
            // One reason to refuse a packet at a time: each is checked.
            network.nic_packets = None;
        }
        let max_len = if is_large { 65_536 } else { chance.pick(&[1_500, 6_000, 10_000]) };
        Scenario {
            network,
            link,
            mix: FaultMix::draw(chance, if is_harsh { 8 } else { 1 }),
            pressure,
            is_harsh,
            budget,
            max_len,
            pairs,
            pools: (0..nodes).map(|_| draw_pool(max_len, count, &habits, chance)).collect(),
            strikes: draw_strikes(nodes, budget, conditions.as_ref(), chance),
            // Requests without packets are refused only where nothing waits before them, which is
            // not often.
            trespass: if misbehaves { if habits.neighbours { 40 } else { 12 } } else { 0 },
            too_long: if misbehaves { 6 } else { 0 },
            habits,
            conditions,
        }
    }

    /// Most sides that one node can have.
    pub(super) fn sides(&self) -> u64 {
        self.pairs.len() as u64
    }
}

/// Receives of a shared queue that one hostile peer may keep from the others: one for each
/// out-of-order packet it has sent, and one more.
const HELD_BY_INTRUDERS: u64 = 3;

/// A shared receive queue small enough to leave room for everything else. Each of its queue pairs
/// may keep one receive for a message that is never completed (hostile ones a few), so there is one
/// more than that.
fn draw_pool(max_len: u64, sides: u64, habits: &Habits, chance: &mut Chance) -> Option<(u32, u32)> {
    let held = sides + HELD_BY_INTRUDERS * u64::from(habits.intruders);
    if !chance.per_mille(if habits.intruders > 0 { 500 } else { 300 }) {
        return None;
    }
    let len = chance.pick(&[64, 1_000, max_len / 2]);
    let most = (2 * max_len / len).clamp(held + 1, 24);
    Some((chance.between(held + 1, most) as u32, len as u32))
}

fn draw_network(nodes: u32, seed: u64, chance: &mut Chance) -> (NetworkConfig, LinkConfig) {
    let rate_bps = chance.pick(&[10, 25, 100, 100]) * 1_000_000_000;
    let link = LinkConfig::new(rate_bps, Duration::from_nanos(chance.between(200, 20_000)));
    let tight = chance.per_mille(200);
    let queue_bytes = if tight { chance.between(6_000, 60_000) } else { link.queue_bytes };
    let marks = Marking { min_bytes: 2_000, max_bytes: 40_000, max_probability_ppm: 200_000 };
    let marking = chance.per_mille(300).then_some(marks);
    let uplink = LinkConfig { marking, ..link };
    let downlink = LinkConfig { queue_bytes, marking, ..link };
    let graph = match nodes == 2 && chance.per_mille(600) {
        true => Graph::cable(uplink),
        false => Graph::star(nodes, uplink, downlink),
    };
    let config = NetworkConfig {
        ipv6: chance.per_mille(300),
        batch: chance.pick(&[1, 5, 64]),
        endpoint: EndpointConfig {
            max_qps: 1 << 6,
            max_cqs: 1 << 6,
            max_regions: 1 << 6,
            burst_packets: chance.pick(&[1, 4, 32]),
            ..EndpointConfig::default()
        },
        ..NetworkConfig::new(graph, seed)
    };
    (config, uplink)
}

/// Sets the stream of the version of RoCE apart from the others of a seed.
const VERSION: u64 = 0x726f_6365_2076_3176;

/// Sets the stream of back-pressure apart from the others of a seed.
const PRESSURE: u64 = 0x7072_6573_7375_7265;

/// Back-pressure in some seeds. In half of these, whole bursts pile up behind it, and end in the
/// middle of a queue pair's turn.
fn draw_pressure(
    network: &mut NetworkConfig,
    pairs: &mut [PairPlan],
    chance: &mut Chance,
) -> Option<Pressure> {
    if !chance.per_mille(400) {
        return None;
    }
    let piles_up = chance.per_mille(500);
    if piles_up {
        network.endpoint.burst_packets = 24;
        for PairPlan { params, .. } in pairs {
            (params.window_packets, params.mtu) = (256, Mtu::M256);
        }
    }
    Some(Pressure {
        most_packets: chance.pick(if piles_up { &[64, 1_000] } else { &[2, 8, 64, 1_000] }),
        longest_ns: chance.pick(&[1_000, 5_000, 20_000]),
        refusals: chance.pick(&[20, 200]),
        seed: chance.word(),
    })
}

/// Sets the stream of networks with several switches apart from the others of a seed.
const SWITCHES: u64 = 0x7377_6974_6368_6573;

/// In some seeds, a leaf for each node and two spines: switches share their buffers among their
/// ports, pause or drop, and mark; nodes keep in their queue pairs what their cables do not take;
/// and some controls follow what switches say. Returns a link that stands for the whole way.
fn draw_switches(
    network: &mut NetworkConfig,
    pairs: &mut [PairPlan],
    link: LinkConfig,
    chance: &mut Chance,
) -> LinkConfig {
    if !chance.per_mille(300) {
        return link;
    }
    let is_lossless = chance.per_mille(700);
    let (shared, reserve) = (chance.between(20_000, 200_000), 1_100);
    // Four ports at most: a node and two spines, or three leaves.
    let own = 4 * (reserve + headroom(&link, &link.with_rate(link.rate_bps / 4)));
    let config = match is_lossless {
        true => BufferConfig::lossless(own + shared),
        false => BufferConfig::lossy(shared),
    };
    // Nothing loses the end of a pause here.
    let pfc = config.pfc.map(|pfc| Pfc { pause_quanta: None, ..pfc });
    network.buffer = Some(BufferConfig { reserve, shift: 1, pfc, ..config });
    network.nic_packets = chance.pick(&[None, Some(1), Some(1), Some(4)]);
    let slower = chance.pick(&[1, 4]);
    network.graph = leaves_and_spines(network.graph.nodes(), link, slower);
    draw_controls(pairs, &link, 8, chance);
    LinkConfig { rate_bps: link.rate_bps / slower, delay: link.delay * 2, ..link }
}

/// Some connections follow what switches say; the base round trip has so many links, with two
/// packets on each.
fn draw_controls(pairs: &mut [PairPlan], link: &LinkConfig, links: u64, chance: &mut Chance) {
    let base_rtt = link.delay * links + link.serialization(4_200) * links;
    for PairPlan { params, .. } in pairs {
        let named = chance.pick(&[
            "dctcp",
            "timely",
            "timely-patched",
            "hpcc",
            "hpcc-pint",
            "as before",
            "advertised",
        ]);
        let control = CongestionControl::named(named, link.rate_bps, base_rtt);
        params.congestion = control.map_or(params.congestion, no_slower);
    }
}

/// The same, but with at least 1 Gbit/s, so that what is under way ends in time.
fn no_slower(control: CongestionControl) -> CongestionControl {
    let min_bps = 1_000_000_000;
    match control {
        CongestionControl::Dctcp(params) => {
            CongestionControl::Dctcp(DctcpParams { min_bps, ..params })
        }
        CongestionControl::Timely(params) => {
            CongestionControl::Timely(TimelyParams { min_bps, ..params })
        }
        CongestionControl::Hpcc(params) => {
            CongestionControl::Hpcc(HpccParams { min_bps, ..params })
        }
        other => other,
    }
}

/// The links between switches are as slow as those of nodes, or slower, so that queues form inside.
fn leaves_and_spines(nodes: u32, link: LinkConfig, slower: u64) -> Graph {
    use Vertex::{Node, Switch};
    let (first_spine, spines) = (nodes, 2);
    let trunk = LinkConfig { rate_bps: link.rate_bps / slower, ..link };
    let mut graph = Graph::new(nodes, nodes + spines);
    for node in 0..nodes {
        graph = graph.join(Node(node), Switch(node), link, link);
    }
    for (leaf, spine) in (0..nodes).flat_map(|leaf| (0..spines).map(move |spine| (leaf, spine))) {
        graph = graph.join(Switch(leaf), Switch(first_spine + spine), trunk, trunk);
    }
    let trunk = move |leaf, spine| nodes + leaf * spines + spine;
    graph.routed(move |at, dest| match at {
        Node(node) => (node != dest).then_some((node, false)),
        Switch(leaf) if leaf == dest => Some((dest, true)),
        Switch(leaf) if leaf < first_spine => Some((trunk(leaf, dest % spines), false)),
        Switch(spine) => Some((trunk(dest, spine - first_spine), true)),
    })
}

fn draw_pair(nodes: u32, is_harsh: bool, rate_bps: u64, chance: &mut Chance) -> PairPlan {
    let first = chance.below(nodes.into()) as u32;
    let second = (first + 1 + chance.below(u64::from(nodes) - 1) as u32) % nodes;
    let transport = chance.pick(&TRANSPORTS);
    let params = Params {
        transport,
        shares_receives: [chance.per_mille(500), chance.per_mille(500)],
        mtu: chance.pick(&Mtu::ALL),
        timeout: chance.between(8, 12) as u8,
        retry_count: if is_harsh { chance.below(4) as u8 } else { 7 },
        rnr_retry: if is_harsh { chance.pick(&[0, 2, 7]) } else { 7 },
        min_rnr_timer: chance.between(1, 14) as u8,
        max_rd_atomic: chance.between(1, 4) as u8,
        window_packets: chance.pick(&[1, 2, 3, 8, 32, 128]),
        reliability: chance.pick(&[Reliability::GoBackN, Reliability::Selective]),
        congestion: draw_congestion(rate_bps, chance),
        depth: chance.pick(&[2, 5, 16, 16]) as u32,
        kinds: draw_kinds(transport, chance),
        signaled: chance.pick(&[1_000, 1_000, 500, 50]),
        eagerness: chance.pick(&[50, 700, 1_000, 1_000]),
        think_ns: chance.pick(&[200, 2_000, 10_000]),
    };
    PairPlan { nodes: [first, second], params }
}

/// Queue pairs whose attributes change may start without READs or atomics in flight; and where
/// hostile peers claim shared receives, another queue pair uses them.
fn with_habits(mut pairs: Vec<PairPlan>, habits: &Habits, chance: &mut Chance) -> Vec<PairPlan> {
    for PairPlan { params, .. } in &mut pairs {
        if habits.drains > 0 {
            params.max_rd_atomic = chance.pick(&[0, 1, params.max_rd_atomic]);
        }
        if habits.intruders > 0 && chance.per_mille(600) {
            params.shares_receives = [true; 2];
        }
    }
    pairs
}

fn draw_congestion(line_bps: u64, chance: &mut Chance) -> CongestionControl {
    match chance.below(5) {
        0 => CongestionControl::Dcqcn(DcqcnParams::mlnx(line_bps)),
        1 => {
            let params = DcqcnParams::uet(line_bps);
            CongestionControl::Dcqcn(DcqcnParams { min_bps: 1_000_000_000, ..params })
        }
        _ => CongestionControl::Off,
    }
}

/// How often each transport is drawn.
const TRANSPORTS: [Transport; 8] = [
    Transport::Rc,
    Transport::Rc,
    Transport::Rc,
    Transport::Rc,
    Transport::Rc,
    Transport::Rc,
    Transport::Uc,
    Transport::Ud,
];

fn draw_kinds(transport: Transport, chance: &mut Chance) -> Vec<Kind> {
    let all: &[Kind] = match transport {
        Transport::Rc => &[
            Kind::Send,
            Kind::SendImm,
            Kind::Write,
            Kind::WriteImm,
            Kind::Read,
            Kind::ReadSend,
            Kind::Atomic,
            Kind::Bind,
            Kind::WindowWrite,
            Kind::WindowWrite,
            Kind::SendInvalidate,
            Kind::LocalInvalidate,
        ],
        Transport::Uc => &[Kind::Send, Kind::SendImm, Kind::Write, Kind::WriteImm],
        Transport::Ud => &[Kind::Send, Kind::SendImm],
    };
    if chance.per_mille(500) {
        return all.to_vec();
    }
    // Programs with only windows would wait for each other.
    let some = all.len().min(6) as u64;
    let extra = windowless(transport, chance);
    (0..2).map(|_| all[chance.below(some) as usize]).chain(extra).collect()
}

fn windowless(transport: Transport, chance: &mut Chance) -> Option<Kind> {
    let is_rc = transport == Transport::Rc;
    (is_rc && chance.per_mille(300)).then_some(Kind::Atomic)
}

fn draw_strikes(
    nodes: u32,
    budget: u64,
    conditions: Option<&Conditions>,
    chance: &mut Chance,
) -> Vec<(u64, Strike)> {
    let flaps = if chance.per_mille(300) { chance.between(1, 4) } else { 0 };
    let restarts = if chance.per_mille(200) { chance.between(1, 2) } else { 0 };
    let node = |chance: &mut Chance| chance.below(nodes.into()) as u32;
    let mut strikes = Vec::new();
    for _ in 0..flaps {
        let span = Duration::from_nanos(chance.between(10_000, 8_000_000));
        strikes.push((chance.below(budget), Strike::Flap { node: node(chance), span }));
    }
    for _ in 0..restarts {
        strikes.push((chance.below(budget), Strike::Restart { node: node(chance) }));
    }
    let failures = conditions.into_iter().flat_map(|conditions| &conditions.failures);
    strikes.extend(failures.map(|&(at, failure)| (at, Strike::Fail(failure))));
    strikes.sort_by_key(|(at, _)| *at);
    strikes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_seeds_speaks_roce_v1_with_all_transports() {
        let scenario = |seed| Scenario::draw(seed, &Options::default(), &mut Chance::new(seed));
        let old: Vec<Scenario> =
            (0..400).map(scenario).filter(|scenario| scenario.network.roce_v1).collect();
        assert!((40..80).contains(&old.len()), "{}", old.len());
        let has = |wanted| {
            let pairs = || old.iter().flat_map(|scenario| &scenario.pairs);
            pairs().any(|pair| pair.params.transport == wanted)
        };
        assert!([Transport::Rc, Transport::Uc, Transport::Ud].into_iter().all(has));
        assert!(old.iter().any(|one| one.network.ipv6) && old.iter().any(|one| !one.network.ipv6));
    }

    #[test]
    fn rnr_codes_are_those_of_the_table() {
        let first = [65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];
        assert!(first.iter().enumerate().all(|(code, &units)| rnr_units(code as u8) == units));
        assert_eq!((rnr_units(30), rnr_units(31)), (32_768, 49_152));
    }
}
