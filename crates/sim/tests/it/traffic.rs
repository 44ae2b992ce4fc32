//! Flows over networks: each arrives, alone in its ideal time, and the same seed gives the same run.

use fabric::shape::Shape;
use fabric::topology::Capacity;
use roce::congestion::CongestionControl;
use roce::endpoint::Mtu;
use roce::verbs::Reliability;
use roce::{Duration, Time};
use sim::buffer::BufferConfig;
use sim::chance::Chance;
use sim::graph::Spread;
use sim::link::{LinkConfig, Marking};
use sim::topology;
use sim::traffic::{Flow, FlowSizes, Network, Outcome, Runner, Workload};

const GBIT: u64 = 1_000_000_000;

pub fn network(shape: &str, control: &str, spread: Spread) -> Network {
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
    let base_rtt = Network::base_rtt(&graph, Mtu::M1024);
    let hops = if shape.starts_with("leaf-spine") { 4 } else { 6 };
    let expected = hops * 2_000..hops * 2_000 + 2_000;
    assert!(expected.contains(&base_rtt.as_nanos()), "{base_rtt:?}");
    Network {
        graph,
        buffer: Some(BufferConfig::lossless(32_000_000)),
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

pub fn run(network: &Network, workload: &Workload) -> Outcome {
    let hosts = network.graph.nodes();
    let flows = workload.flows(hosts, 100 * GBIT, &mut Chance::new(network.seed)).unwrap();
    let mut runner = Runner::new(network, flows, workload.keeps_connections());
    while runner.advance(Time::from_nanos(1_000_000_000)).unwrap() {}
    runner.outcome()
}

#[test]
fn a_flow_alone_takes_its_ideal_time() {
    for (to, bytes) in [(1, 1), (1, 1_024), (15, 1_025), (5, 50_000), (15, 3_000_000)] {
        let flow = Flow { from: 0, to, bytes, at: Time::ZERO, after: Vec::new() };
        let mut network = network("fat-tree:4", "off", Spread::Flow);
        network.reliability = Reliability::GoBackN;
        let outcome = run(&network, &Workload::Trace(vec![flow]));
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
            let network = network("fat-tree:4", control, spread);
            let outcome = run(&network, &workload);
            assert_eq!((outcome.unfinished(), outcome.failed), (0, 0), "{workload:?} {control}");
            assert_eq!(outcome.total(|stats| stats.dropped), 0, "{workload:?} {control}");
            assert_eq!(outcome, run(&network, &workload), "{workload:?} {control}");
        }
    }
}
