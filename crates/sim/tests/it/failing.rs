//! Flows while links and switches fail: what is lost, who recovers, and who gives up.

use roce::verbs::{Reliability, WcStatus};
use roce::{Duration, Time};
use sim::chance::Chance;
use sim::graph::{Graph, Spread, Vertex};
use sim::link::LinkConfig;
use sim::memory::Phantom;
use sim::network::{Cause, Network, NetworkConfig, Rerouting};
use sim::traffic::{Flow, Outcome, Runner, Testbed, TimedFault, Trouble, Workload};

use crate::traffic::{run, testbed};

/// Of `leaf-spine:2x2x4`: links 0 to 3 join leaf 0 with both spines, then leaf 1; 4 to 11 are those
/// of hosts.
const SHAPE: &str = "leaf-spine:2x2x4";

fn us(micros: u64) -> Time {
    Time::ZERO + Duration::from_micros(micros)
}

fn failing(spread: Spread, faults: &[(Trouble, u64, Option<u64>)]) -> Testbed {
    let fault = |&(trouble, from, until): &(Trouble, u64, Option<u64>)| TimedFault {
        trouble,
        from: us(from),
        until: until.map(us),
    };
    Testbed {
        // 1 ms.
        timeout: 8,
        retry_count: 3,
        faults: faults.iter().map(fault).collect(),
        rerouting: Some(Rerouting {
            detection: Duration::from_micros(50),
            spread: Duration::from_micros(20),
        }),
        ..testbed(SHAPE, "advertised", spread)
    }
}

fn lost(outcome: &Outcome, cause: Cause) -> u64 {
    outcome.losses.packets[cause as usize]
}

fn flow(from: u32, to: u32, bytes: u64) -> Flow {
    Flow { from, to, bytes, at: Time::ZERO, after: Vec::new() }
}

#[test]
fn flows_find_other_ways_and_recover() {
    let workload = Workload::Permutation { bytes: 4_000_000 };
    for trouble in [Trouble::LinkDown(0), Trouble::SwitchDown(1)] {
        let testbed = failing(Spread::Flow, &[(trouble, 100, Some(2_000))]);
        let outcome = run(&testbed, &workload);
        assert_eq!(
            (outcome.unfinished(), outcome.failed, outcome.faults),
            (0, 0, 1),
            "{trouble:?}"
        );
        let cause = match trouble {
            Trouble::LinkDown(_) => Cause::LinkDown,
            _ => Cause::SwitchDown,
        };
        assert!(lost(&outcome, cause) > 0 && outcome.reroutes >= 1, "{:?}", outcome.losses);
        let losses = &outcome.losses;
        assert!(losses.hits > 0 && losses.recoveries.len() as u64 == losses.hits, "{losses:?}");
        // Nothing that was lost comes again before switches know, unless its sender finds another
        // way by chance.
        let longest = losses.recoveries.iter().max().expect("some");
        assert!((50..20_000).contains(&(longest.as_nanos() / 1_000)), "{longest:?}");
        assert_eq!(outcome, run(&testbed, &workload), "{trouble:?}");
    }
}

#[test]
fn a_flow_whose_receiver_is_cut_off_gives_up_and_the_others_arrive() {
    let faults = [(Trouble::LinkDown(4 + 7), 100, None)];
    let mut flows = vec![flow(0, 7, 4_000_000), flow(1, 6, 4_000_000), flow(7, 2, 4_000_000)];
    flows.push(Flow { after: vec![0], ..flow(2, 3, 1_000) });
    let testbed = failing(Spread::Flow, &faults);
    let mut runner = Runner::new(&testbed, flows, false);
    while runner.advance(us(1_000_000)).unwrap() {}
    assert!(runner.now() < us(100_000), "it does not wait for the deadline: {:?}", runner.now());
    let outcome = runner.outcome();
    let records = &outcome.records;
    for number in [0, 2] {
        let end = records[number].gave_up.expect("it cannot arrive");
        assert_eq!(end.status, WcStatus::RetryExceeded);
        assert!(records[number].is_cut && end.at > us(3_000), "{end:?}");
    }
    assert!(records[1].arrived.is_some() && !records[1].is_cut);
    assert!(records[3].started.is_none() && !records[3].is_cut, "it waits for the first");
    assert_eq!((outcome.failed, outcome.unfinished()), (2, 3));
}

#[test]
fn bit_errors_cost_as_many_frames_as_their_rate_says() {
    // 1e-7 on the link of a host, in both directions: 4,000 frames of 1,106 bytes, of which one in
    // 1,130 is lost.
    let faults = [(Trouble::BitErrors { link: 4, per_10_15: 100_000_000 }, 0, None)];
    let frames = 32_000;
    let flows = (0..8).map(|_| flow(0, 1, frames / 8 * 1_024)).collect();
    let outcome = run(&failing(Spread::Flow, &faults), &Workload::Trace(flows));
    let expected = frames * 8 * 1_106 / 10_000_000;
    let lost = lost(&outcome, Cause::BitError);
    assert!(lost > expected / 2 && lost < expected * 2, "{lost} of {expected}");
    assert_eq!((outcome.unfinished(), outcome.reroutes), (0, 0));
}

#[test]
fn a_link_is_as_bad_as_its_faults_together() {
    // 4 MB take 354 us at 100 Gbit/s with headers; a quarter of that rate from the start to 1 ms, a
    // half until 2 ms.
    let slow = |by, from, until| (Trouble::SlowLink { link: 4, by }, from, until);
    let outcome = |faults: &[_]| {
        run(&failing(Spread::Flow, faults), &Workload::Trace(vec![flow(0, 1, 4_000_000)]))
    };
    let micros = |outcome: &Outcome| {
        outcome.records[0].completion_time().expect("arrived").as_nanos() / 1_000
    };
    let whole = micros(&outcome(&[(Trouble::BitErrors { link: 9, per_10_15: 1 }, 0, None)]));
    assert!((340..400).contains(&whole), "{whole}");
    let both = micros(&outcome(&[slow(4, 0, Some(1_000)), slow(2, 0, Some(2_000))]));
    // In the first millisecond 1000 / 4 us of 354, then the rest at half the rate.
    assert!((1_150..1_350).contains(&both), "{both}");
    // A link that two faults hold down is up when both have ended.
    let down = |from, until| (Trouble::LinkDown(4), from, Some(until));
    let late = outcome(&[down(100, 1_500), down(200, 700), down(600, 2_500)]);
    assert_eq!((late.failed, late.faults), (0, 3));
    assert!(micros(&late) > 2_500 && lost(&late, Cause::LinkDown) > 0, "{}", micros(&late));
}

/// Whatever the order in which they are given, a fault that begins when another one ends leaves no
/// moment between them.
#[test]
fn faults_that_follow_each_other_at_one_place_are_like_one() {
    let down = |from, until| (Trouble::LinkDown(0), from, Some(until));
    let outcome = |faults: &[_]| {
        let flows = (0..4).map(|from| flow(from, 4 + from, 4_000_000)).collect();
        run(&failing(Spread::Flow, faults), &Workload::Trace(flows))
    };
    let whole = outcome(&[down(100, 700)]);
    assert_eq!((whole.reroutes, whole.unfinished()), (2, 0));
    for parts in [[down(100, 300), down(300, 700)], [down(300, 700), down(100, 300)]] {
        let parts = outcome(&parts);
        assert_eq!((parts.reroutes, &parts.losses), (whole.reroutes, &whole.losses));
        assert_eq!((parts.faults, &parts.records), (2, &whole.records));
    }
}

/// One that ends when it begins is over at once.
#[test]
fn a_fault_of_no_length_does_not_last() {
    let faults = [(Trouble::LinkDown(4), 100, Some(100))];
    let outcome =
        run(&failing(Spread::Flow, &faults), &Workload::Trace(vec![flow(0, 1, 4_000_000)]));
    assert_eq!((outcome.failed, outcome.unfinished()), (0, 0));
}

/// Whatever fails and whenever, a run ends: each flow arrives or gives up, and the same again.
#[test]
fn random_faults_end_and_runs_repeat() {
    for seed in 0..24 {
        let mut chance = Chance::new(seed);
        let faults: Vec<TimedFault> =
            (0..chance.between(1, 12)).map(|_| random_fault(&mut chance)).collect();
        let spread = chance.pick(&[Spread::First, Spread::Flow, Spread::Packet]);
        let testbed = Testbed {
            roce_v1: chance.per_mille(300),
            reliability: chance.pick(&[Reliability::Selective, Reliability::GoBackN]),
            faults,
            seed,
            ..failing(spread, &[])
        };
        let outcome = run(&testbed, &Workload::Permutation { bytes: 400_000 });
        let what = format!("seed {seed}: {:?}", testbed.faults);
        assert!(outcome.records.iter().all(|record| !record.is_under_way()), "{what}");
        let losses = &outcome.losses;
        assert!(losses.recoveries.len() as u64 <= losses.hits, "{what}: {losses:?}");
        assert_eq!(outcome, run(&testbed, &Workload::Permutation { bytes: 400_000 }), "{what}");
    }
}

fn random_fault(chance: &mut Chance) -> TimedFault {
    let link = chance.below(12) as u32;
    let trouble = match chance.below(4) {
        0 => Trouble::LinkDown(link),
        1 => Trouble::SwitchDown(chance.below(4) as u32),
        2 => Trouble::SlowLink { link, by: chance.between(2, 50) as u32 },
        _ => Trouble::BitErrors { link, per_10_15: 10_u64.pow(chance.between(6, 11) as u32) },
    };
    // Of few different times, so that some are equal.
    let from = us(20 * chance.below(8));
    let lasts = Duration::from_micros(20 * chance.below(40));
    TimedFault { trouble, from, until: chance.per_mille(800).then(|| from + lasts) }
}

/// Islands say what a search from the sender says, in random networks of which parts are down.
#[test]
fn islands_agree_with_a_search() {
    for seed in 0..60 {
        let mut chance = Chance::new(seed);
        let (nodes, switches) = (chance.between(2, 8) as u32, chance.between(1, 6) as u32);
        let mut graph = Graph::new(nodes, switches);
        let vertex = |chance: &mut Chance| match chance.below(u64::from(nodes + switches)) as u32 {
            node if node < nodes => Vertex::Node(node),
            switch => Vertex::Switch(switch - nodes),
        };
        let (link, mut links) = (LinkConfig::unlimited(Duration::ZERO), 0);
        for _ in 0..chance.between(2, 16) {
            let (a, b) = (vertex(&mut chance), vertex(&mut chance));
            if a != b {
                (graph, links) = (graph.join(a, b, link, link), links + 1);
            }
        }
        let mut network = Network::new(&NetworkConfig::new(graph, seed), |_| Phantom);
        for _ in 0..10 {
            if links > 0 {
                network.set_link(2 * chance.below(links) as u32, chance.per_mille(500));
            }
            network.set_switch(chance.below(switches.into()) as u32, chance.per_mille(600));
            let islands = network.islands();
            for (from, to) in (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to))) {
                let (has_way, found) = (islands.has_way(from, to), network.is_connected(from, to));
                assert!(from == to || has_way == found, "seed {seed}: {from} to {to}");
            }
        }
    }
}
