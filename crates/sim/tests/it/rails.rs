//! Hosts with several ports: how much of their rails a permutation uses, and servers that forward.

use ::topology::graph::{Capacity, Topology};
use ::topology::shape::Shape;
use roce::{Duration, Time};
use sim::chance::Chance;
use sim::graph::{Graph, Spread};
use sim::link::LinkConfig;
use sim::topology::{self, Nics};
use sim::traffic::{Flow, Outcome, Rails, Runner, Testbed, Workload};

use crate::traffic::testbed;

const GBIT: u64 = 1_000_000_000;
const RATE: u64 = 100 * GBIT;

fn built(rule: &str) -> Topology {
    let capacity = Capacity { rate_bps: RATE, delay_ns: 1_000 };
    rule.parse::<Shape>().unwrap().build(capacity).unwrap()
}

fn link() -> LinkConfig {
    LinkConfig { queue_bytes: u64::MAX, ..LinkConfig::new(RATE, Duration::from_micros(1)) }
}

fn outcome(graph: Graph, flows: Vec<Flow>) -> Outcome {
    let testbed = Testbed { graph, ..testbed("fat-tree:4", "off", Spread::Packet) };
    let mut runner = Runner::new(&testbed, flows, false);
    while runner.advance(Time::from_nanos(1_000_000_000)).unwrap() {}
    let outcome = runner.outcome();
    assert_eq!((outcome.unfinished(), outcome.failed), (0, 0));
    outcome
}

/// A permutation over hosts of four rails; returns payload in Gbit/s of all hosts.
fn permutation(rails: Rails, rule: &str) -> u64 {
    let topology = built(rule);
    let nics = Nics::of_topology(&topology);
    let hosts = topology.hosts().count() as u32;
    let workload = Workload::Permutation { bytes: 8_000_000 };
    let flows = workload.flows(hosts, 4 * RATE, &mut Chance::new(1)).unwrap();
    let flows = rails.assign(&flows, &nics).unwrap();
    let graph = topology::cables_of_nics(&topology, &nics, |_| link()).spread(Spread::Packet);
    assert_eq!(graph.nodes(), 4 * hosts);
    outcome(graph, flows).goodput_bps() / GBIT
}

#[test]
fn a_permutation_uses_one_rail_or_all_of_them() {
    // Two units of four hosts, as many links to spines as to hosts. Of 100 Gbit/s, 1,024 of 1,106
    // bytes are payload; a round trip of 10 us, of 700 us on one rail and of 180 us on four,
    // carries nothing.
    let rule = "rail:2x4x4x4";
    let (one, all) = (permutation(Rails::Hash, rule), permutation(Rails::All, rule));
    let bound = 8 * 100 * 1_024 / 1_106;
    assert!(one <= bound && one > bound * 95 / 100, "{one} of {bound}");
    assert!(all <= 4 * bound && all > 4 * bound * 90 / 100, "{all} of {}", 4 * bound);
}

#[test]
fn fewer_spines_than_hosts_bound_what_crosses_units() {
    // All hosts of one unit send to the other one. Each leaf has as many links up as hosts, or half
    // of that.
    let flow =
        |from| Flow { from, to: from + 4, bytes: 8_000_000, at: Time::ZERO, after: Vec::new() };
    let flows: Vec<Flow> = (0..4).map(flow).collect();
    let goodput = |rule: &str| {
        let topology = built(rule);
        let nics = Nics::of_topology(&topology);
        let graph = topology::cables_of_nics(&topology, &nics, |_| link()).spread(Spread::Packet);
        outcome(graph, Rails::All.assign(&flows, &nics).unwrap()).goodput_bps() / GBIT
    };
    let (full, half) = (goodput("rail:2x4x4x4"), goodput("rail:2x4x4x2"));
    let bound = 16 * 100 * 1_024 / 1_106;
    // Packets meet by chance at spines that have no bandwidth to spare.
    assert!(full <= bound && full > bound * 7 / 10, "{full} of {bound}");
    assert!(half <= bound / 2 && half > bound / 3, "{half} of {}", bound / 2);
}

#[test]
fn servers_of_a_bcube_reach_all_others_where_they_forward() {
    let topology = built("bcube:3x1");
    let nics = Nics::of_topology(&topology);
    let flow = |from, to| Flow { from, to, bytes: 100_000, at: Time::ZERO, after: Vec::new() };
    // Host 4 differs from host 0 in both digits.
    assert!(Rails::Hash.assign(&[flow(0, 4)], &nics).is_err());
    let relaying = topology::relaying(&topology, |_| link()).spread(Spread::Flow);
    assert_eq!((relaying.nodes(), relaying.switches()), (9, 6 + 9));
    let pairs = (0..9).flat_map(|from| (0..9).map(move |to| (from, to)));
    let pairs = pairs.filter(|(from, to)| from != to);
    let all: Vec<Flow> = pairs.map(|(from, to)| flow(from, to)).collect();
    let outcome = outcome(relaying, all);
    // Of the links within servers, those towards their node carry what is for it: 8 flows.
    let packets = |from_node: bool| {
        let inner = outcome.links[2 * 18..].chunks(2);
        inner.map(|pair| pair[usize::from(!from_node)].stats.sent_bytes).collect::<Vec<_>>()
    };
    assert_eq!(packets(true).len(), 9);
    assert!(packets(false).iter().all(|&bytes| bytes > 800_000), "{:?}", packets(false));
    // Those between servers carry also what these forward: more than 8 flows into each.
    let into: u64 = outcome.links[..2 * 18].iter().map(|link| link.stats.sent_bytes).sum();
    let own: u64 = packets(false).iter().sum();
    assert!(into > 2 * own * 3 / 2, "{into} {own}");
}
