//! Who is told of which buffer by the collector of watermarks.

use alloc::vec::Vec;

use controls::{CongestionControl, DcqcnParams};
use roce::{Duration, Time};

use super::{Stream, run_until};
use crate::buffer::BufferConfig;
use crate::graph::{Graph, Vertex};
use crate::link::LinkConfig;
use crate::memory::Phantom;
use crate::network::{Collector, Network, NetworkConfig};

const LINE: u64 = 25_000_000_000;

/// A collector that reads every millisecond, and tells so late.
fn collector(late: u64) -> Option<Collector> {
    Some(Collector { every: Duration::from_millis(1), late: Duration::from_micros(late) })
}

/// Three streams to node 0 and one from node 4 to node 5, at one switch that pauses and marks
/// nothing.
fn streams(watermarks: Option<Collector>) -> (Network<Phantom>, Vec<Stream>) {
    let link = LinkConfig::new(LINE, Duration::from_micros(1));
    let join = |graph: Graph, node| graph.join(Vertex::Node(node), Vertex::Switch(0), link, link);
    let graph = (0..6).fold(Graph::new(6, 1), join);
    let config = NetworkConfig {
        buffer: Some(BufferConfig::lossless(4_000_000)),
        watermarks,
        nic_packets: Some(1),
        ..NetworkConfig::new(graph, 1)
    };
    let mut network = Network::new(&config, |_| Phantom);
    let ways = [(1, 0), (2, 0), (3, 0), (4, 5)];
    let open = |(from, to)| {
        Stream::open(&mut network, from, to, 1 << 20, |connect| {
            connect.congestion = CongestionControl::Dcqcn(DcqcnParams::mlnx(LINE)).into();
            connect.window_packets = 4_096;
        })
    };
    let streams = ways.into_iter().map(open).collect::<Result<_, _>>().unwrap();
    (network, streams)
}

/// After so many microseconds: the rate of each sender, and how many reports it heard.
fn run(watermarks: Option<Collector>, us: u64) -> (Vec<u64>, Vec<u64>) {
    let (mut network, mut streams) = streams(watermarks);
    run_until(&mut network, &mut streams, Time::from_nanos(us * 1_000)).unwrap();
    let endpoint = |node| &network.node(node).endpoint;
    let rate = |stream: &Stream| endpoint(stream.from).qp_rate_bps(stream.qpn).unwrap();
    let counters: Vec<_> = (1..=4).map(|node| endpoint(node).counters()).collect();
    assert!(counters.iter().all(|counters| counters.watermarks_refused == 0));
    let heard = counters.iter().map(|counters| counters.watermarks_heard).collect();
    (streams.iter().map(rate).collect(), heard)
}

#[test]
fn only_who_crosses_a_full_port_is_slowed_down() {
    let (rates, heard) = run(None, 10_000);
    assert_eq!((rates, heard), (alloc::vec![LINE; 4], alloc::vec![0; 4]));
    let (rates, heard) = run(collector(500), 10_000);
    assert_eq!(heard, [9; 4]);
    for rate in &rates[..3] {
        assert!((4_000_000_000..10_000_000_000).contains(rate), "{rates:?}");
    }
    assert_eq!(rates[3], LINE, "its port is empty");
}

#[test]
fn hosts_hear_a_reading_when_it_is_late_by_so_much() {
    // Read at 1 ms, told at 1.9; the second one, told at 2.9, is the first that cuts.
    for (us, heard) in [(1_800, 0), (1_950, 1), (2_800, 1)] {
        let (rates, told) = run(collector(900), us);
        assert_eq!((rates[0], told[0]), (LINE, heard), "{us}");
    }
    let (rates, told) = run(collector(900), 2_950);
    assert!(rates[0] < LINE / 2 && told[0] == 2, "{rates:?}");
}

#[test]
fn a_collector_rests_when_nothing_waits_any_more() {
    let (mut network, mut streams) = streams(collector(500));
    run_until(&mut network, &mut streams, Time::from_nanos(5_000_000)).unwrap();
    // The streams end, and all events with them.
    assert!(network.run(1_000_000));
    assert!(network.now() < Time::from_nanos(200_000_000), "{:?}", network.now());
}

/// A port that is paused for long holds its queue, although nothing more comes.
#[test]
fn a_collector_reads_as_long_as_something_waits() {
    let (mut network, mut streams) = streams(collector(500));
    for node in [0, 5] {
        network.set_storm(node, true);
    }
    run_until(&mut network, &mut streams, Time::from_nanos(40_000_000)).unwrap();
    let waits = network.queues().total_bytes;
    let heard = network.node(1).endpoint.counters().watermarks_heard;
    assert!(waits > 0 && heard >= 38, "{heard} of 39 with {waits} bytes");
}
