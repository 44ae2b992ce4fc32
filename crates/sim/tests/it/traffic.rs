//! Flows over networks: each arrives, alone in its ideal time, and the same seed gives the same
//! run.

use ::topology::graph::Capacity;
use ::topology::shape::Shape;
use controls::CongestionControl;
use roce::endpoint::Mtu;
use roce::verbs::Reliability;
use roce::{Duration, Time};
use sim::buffer::BufferConfig;
use sim::chance::Chance;
use sim::graph::Spread;
use sim::link::{LinkConfig, Marking};
use sim::topology;
use sim::traffic::{Flow, FlowSizes, Outcome, Runner, Testbed, Workload};

const GBIT: u64 = 1_000_000_000;

pub(crate) fn testbed(shape: &str, control: &str, spread: Spread) -> Testbed {
    let rate = 100 * GBIT;
    let capacity = Capacity { rate_bps: rate, delay_ns: 1_000 };
    let topology = shape.parse::<Shape>().unwrap().build(capacity).unwrap();
    let like = LinkConfig {
        queue_bytes: u64::MAX,
        marking: Some(Marking::dcqcn(rate)),
        ..LinkConfig::new(rate, Duration::ZERO)
    };

    let graph = topology::cables(&topology, |link| {
        like.with_delay(Duration::from_nanos(link.capacity.delay_ns))
    })
    .spread(spread);
    let base_rtt = Testbed::base_rtt(&graph, Mtu::M1024);
    let hops = if shape.starts_with("leaf-spine") { 4 } else { 6 };
    let expected = hops * 2_000..hops * 2_000 + 2_000;
    assert!(expected.contains(&base_rtt.as_nanos()), "{base_rtt:?}");
    Testbed {
        graph,
        buffer: Some(BufferConfig::lossless(32_000_000)),
        watermarks: None,
        ipv6: false,
        roce_v1: false,
        mtu: Mtu::M1024,
        window_packets: 1 << 14,
        reliability: Reliability::Selective,
        timeout: 14,
        retry_count: 7,
        faults: Vec::new(),
        rerouting: None,
        watchdog: None,
        congestion: CongestionControl::named(control, rate, base_rtt).unwrap(),
        seed: 1,
    }
}

pub(crate) fn run(testbed: &Testbed, workload: &Workload) -> Outcome {
    let hosts = testbed.graph.nodes();
    let flows = workload.flows(hosts, 100 * GBIT, &mut Chance::new(testbed.seed)).unwrap();
    let mut runner = Runner::new(testbed, flows, workload.keeps_connections());
    while runner.advance(Time::from_nanos(1_000_000_000)).unwrap() {}
    runner.outcome()
}

#[test]
fn a_flow_alone_takes_its_ideal_time() {
    for (to, bytes) in [(1, 1), (1, 1_024), (15, 1_025), (5, 50_000), (15, 3_000_000)] {
        let flow = Flow { from: 0, to, bytes, at: Time::ZERO, after: Vec::new() };
        let mut testbed = testbed("fat-tree:4", "off", Spread::Flow);
        testbed.reliability = Reliability::GoBackN;
        let outcome = run(&testbed, &Workload::Trace(vec![flow]));
        let record = outcome.records[0];
        let (time, ideal) = (record.completion_time().unwrap().as_nanos(), record.ideal.as_nanos());
        // Every link rounds the time of a packet up to a nanosecond.
        let packets = bytes / 1_024 + 10;
        assert!(time >= ideal && time - ideal <= packets, "{to} {bytes}: {time} {ideal}");
    }
}

#[test]
fn every_flow_arrives_and_runs_repeat() {
    let poisson = Workload::Poisson {
        sizes: FlowSizes::Hadoop,
        load_ppm: 500_000,
        span: Duration::from_micros(500),
    };
    let workloads = [
        Workload::Incast { senders: 15, bytes: 100_000 },
        Workload::Permutation { bytes: 100_000 },
        Workload::AllToAll { bytes: 10_000 },
        Workload::RingAllreduce { hosts: 16, bytes: 1_000_000 },
        Workload::TreeAllreduce { hosts: 16, bytes: 100_000, pieces: 4 },
        poisson,
    ];
    for workload in workloads {
        for (control, spread) in
            [("dcqcn-mlnx", Spread::Flow), ("hpcc", Spread::Flow), ("advertised", Spread::Packet)]
        {
            let testbed = testbed("fat-tree:4", control, spread);
            let outcome = run(&testbed, &workload);
            assert_eq!((outcome.unfinished(), outcome.failed), (0, 0), "{workload:?} {control}");
            assert_eq!(outcome.total(|stats| stats.dropped), 0, "{workload:?} {control}");
            assert_eq!(outcome, run(&testbed, &workload), "{workload:?} {control}");
        }
    }
}

#[test]
fn sampled_flows_are_those_under_way_and_change_nothing() {
    let flow = |from, at_us: u64| Flow {
        from,
        to: 15,
        bytes: 1_000_000,
        at: Time::from_nanos(at_us * 1_000),
        after: Vec::new(),
    };
    let flows = vec![flow(0, 0), flow(4, 40)];
    let testbed = testbed("fat-tree:4", "swift", Spread::Flow);
    let mut runner = Runner::new(&testbed, flows.clone(), false);
    runner.sample_every(Duration::from_micros(1));
    runner.sample_flows();
    while runner.advance(Time::from_nanos(1_000_000_000)).unwrap() {}
    let outcome = runner.outcome();
    assert_eq!(outcome.records, run(&testbed, &Workload::Trace(flows)).records);
    assert_eq!(outcome.samples.len(), outcome.progress.len());
    let mut before = [None; 2];
    for (sample, paces) in outcome.samples.iter().zip(&outcome.progress) {
        for (number, record) in (0..).zip(&outcome.records) {
            let pace = paces.iter().find(|(flow, _)| *flow == number).map(|(_, pace)| *pace);
            let is_open =
                record.started.unwrap() < sample.at && sample.at < record.arrived.unwrap();
            assert!(!is_open || pace.is_some(), "flow {number} at {:?}", sample.at);
            let Some(pace) = pace else { continue };
            assert!(pace.in_flight_packets <= pace.window_packets, "{pace:?}");
            let earlier = before[number as usize].replace(pace.unacknowledged);
            assert!(earlier.is_none_or(|psn| !pace.unacknowledged.is_before(psn)), "{pace:?}");
        }
    }
}

#[test]
fn a_flow_of_roce_v1_takes_its_ideal_time_too() {
    let time = |ipv6, roce_v1| {
        let flow = Flow { from: 0, to: 15, bytes: 3_000_000, at: Time::ZERO, after: Vec::new() };
        let testbed = Testbed {
            reliability: Reliability::GoBackN,
            ipv6,
            roce_v1,
            ..testbed("fat-tree:4", "off", Spread::Flow)
        };
        let outcome = run(&testbed, &Workload::Trace(vec![flow]));
        let record = outcome.records[0];
        let (time, ideal) = (record.completion_time().unwrap().as_nanos(), record.ideal.as_nanos());
        assert!(time >= ideal && time - ideal <= 3_000, "{ipv6} {roce_v1}: {time} {ideal}");
        ideal
    };
    let (v4, v6, v1) = (time(false, false), time(true, false), time(false, true));
    // 2,930 packets of 1,106, 1,126 and 1,118 bytes with all framing: 89, 91 and 90 ns each,
    // rounded up.
    assert!((v1 - v4).abs_diff(2_930) < 20, "{v1} {v4}");
    assert!((v6 - v1).abs_diff(2_930) < 20, "{v6} {v1}");
}

#[test]
fn switches_mark_no_packet_of_roce_v1_and_delay_still_controls_it() {
    let incast = Workload::Incast { senders: 15, bytes: 1_000_000 };
    let outcome = |control, roce_v1| {
        run(&Testbed { roce_v1, ..testbed("fat-tree:4", control, Spread::Flow) }, &incast)
    };
    let marked = |outcome: &Outcome| outcome.total(|stats| stats.marked);
    let peak = |outcome: &Outcome| {
        outcome.links.iter().map(|link| link.stats.peak_bytes).max().unwrap_or(0)
    };
    assert!(marked(&outcome("dcqcn-mlnx", false)) > 0);
    let (wild, tame) = (outcome("off", true), outcome("swift", true));
    for outcome in [&wild, &tame] {
        assert_eq!((marked(outcome), outcome.unfinished(), outcome.failed), (0, 0, 0));
    }
    assert!(peak(&tame) * 2 < peak(&wild), "{} {}", peak(&tame), peak(&wild));
}

#[test]
fn behind_a_grh_all_flows_of_two_hosts_take_one_path() {
    let used = |roce_v1| {
        let flow = |_| Flow { from: 0, to: 15, bytes: 10_000, at: Time::ZERO, after: Vec::new() };
        let testbed = Testbed { roce_v1, ..testbed("fat-tree:4", "advertised", Spread::Flow) };
        let outcome = run(&testbed, &Workload::Trace((0..16).map(flow).collect()));
        // Much more than acknowledgements.
        outcome.links.iter().filter(|link| link.stats.sent_bytes > 8_000).count()
    };
    assert!(used(false) > 6 && used(true) == 6, "{} {}", used(false), used(true));
}

/// A connection that a short flow has left is no narrower for a long one.
#[test]
fn a_flow_takes_as_long_on_a_connection_that_another_one_has_left() {
    let mut testbed = testbed("fat-tree:4", "off", Spread::Flow);
    testbed.reliability = Reliability::GoBackN;
    let first = Flow { from: 0, to: 15, bytes: 1, at: Time::ZERO, after: Vec::new() };
    let second = Flow { bytes: 1_000_000, at: Time::from_nanos(100_000), ..first.clone() };
    let time = |keeps_connections| {
        let flows = vec![first.clone(), second.clone()];
        let mut runner = Runner::new(&testbed, flows, keeps_connections);
        while runner.advance(Time::from_nanos(1_000_000_000)).unwrap() {}
        runner.outcome().records[1].completion_time().unwrap()
    };
    assert_eq!(time(true), time(false));
}
