//! Streams whose ports have queues by DSCP and whose hosts pace.

use alloc::vec::Vec;

use roce::Duration;
use roce::endpoint::EndpointConfig;
use roce::shaping::Limiter;

use super::{Stream, run_until};
use crate::buffer::BufferConfig;
use crate::graph::{Graph, Spread};
use crate::link::{LinkConfig, Marking, Vertex};
use crate::memory::Phantom;
use crate::network::{Network, NetworkConfig};
use crate::queues::Queues;
use Vertex::{Node, Switch};

const TRUNK: u64 = 10_000_000_000;

/// Two senders and two receivers at two switches, with a trunk of 10 Gbit/s in between that marks,
/// and lossless buffers.
fn network() -> Network<Phantom> {
    let delay = Duration::from_micros(1);
    let edge = LinkConfig { classes: 8, ..LinkConfig::new(25_000_000_000, delay) };
    let trunk = LinkConfig { marking: Some(Marking::dctcp(TRUNK)), ..edge.with_rate(TRUNK) };
    let joins =
        [(Node(0), Switch(0)), (Node(1), Switch(0)), (Node(2), Switch(1)), (Node(3), Switch(1))];
    let graph = Graph::new(4, 2).join(Switch(0), Switch(1), trunk, trunk);
    let graph = joins.into_iter().fold(graph, |graph, (a, b)| graph.join(a, b, edge, edge));
    let buffer = Some(BufferConfig::lossless(4 << 20));
    // As a NIC serves its queue pairs: a packet each.
    let endpoint = EndpointConfig { burst_packets: 1, ..EndpointConfig::default() };
    Network::new(&NetworkConfig { buffer, endpoint, ..NetworkConfig::new(graph, 1) }, |_| Phantom)
}

/// Streams from nodes 0 and 1 over the trunk, with DSCPs 8 and 9.
fn open(network: &mut Network<Phantom>) -> Vec<Stream> {
    let pairs = [(0, 2, 8), (1, 3, 9)];
    let streams = pairs.map(|(from, to, dscp)| {
        Stream::open(network, from, to, 1 << 16, |connect| {
            connect.path.dscp = dscp;
            *connect = connect.selective();
        })
        .unwrap()
    });
    streams.into()
}

/// Payload bits per second of each from now for 10 ms.
fn rates(network: &mut Network<Phantom>, streams: &mut [Stream]) -> Vec<u64> {
    let before: Vec<u64> = streams.iter().map(|stream| stream.arrived(network)).collect();
    let until = network.now() + Duration::from_millis(10);
    run_until(network, streams, until).unwrap();
    let arrived = streams.iter().map(|stream| stream.arrived(network)).zip(before);
    arrived.map(|(now, then)| (now - then) * 8 * 100).collect()
}

#[test]
fn weights_hold_over_a_switch_without_loss_and_what_is_idle_is_used() {
    let mut network = network();
    let mut streams = open(&mut network);
    let queues = Queues::new(&[80, 20], 256, 1 << 20).bind(8, 0).bind(9, 1);
    assert_eq!(network.set_queues(Switch(0), Switch(1), &queues), 1);
    assert_eq!(network.set_queues(Node(0), Switch(1), &queues), 0, "there is no such cable");
    let got = rates(&mut network, &mut streams);
    assert!((7_200_000_000..=8_000_000_000).contains(&got[0]), "{got:?}");
    assert!((1_800_000_000..=2_100_000_000).contains(&got[1]), "{got:?}");
    // The weights the other way round, while packets wait.
    let queues = Queues::new(&[20, 80], 256, 1 << 20).bind(8, 0).bind(9, 1);
    network.set_queues(Switch(0), Switch(1), &queues);
    let got = rates(&mut network, &mut streams);
    assert!((1_800_000_000..=2_100_000_000).contains(&got[0]), "{got:?}");
    // What the other one has posted takes a while.
    rates(&mut network, &mut streams[..1]);
    let alone = rates(&mut network, &mut streams[..1]);
    assert!(alone[0] > 8_500_000_000, "{alone:?}");
    assert_eq!(network.queue_drops(), 0);
}

#[test]
fn a_pace_of_a_host_holds_for_all_its_queue_pairs_of_a_dscp() {
    let mut network = network();
    let mut streams = open(&mut network);
    streams.extend(open(&mut network));
    network.set_rate_limit(0, 8, Some(Limiter::exact(2_000_000_000, 16_000)));
    rates(&mut network, &mut streams);
    let got = rates(&mut network, &mut streams);
    let paced = got[0] + got[2];
    assert!((1_800_000_000..=2_000_000_000).contains(&paced), "{got:?}");
    assert!(got[1] + got[3] > 7_000_000_000, "the others use the rest: {got:?}");
    network.set_rate_limit(0, 8, None);
    rates(&mut network, &mut streams);
    let got = rates(&mut network, &mut streams);
    assert!(got[0] + got[2] > 4_000_000_000, "{got:?}");
}

/// Payload that a stream over two paths of 2.5 Gbit/s each gets in 10 ms, in bits per second.
fn over_two_paths(spread: Spread) -> u64 {
    let delay = Duration::from_micros(1);
    let edge = LinkConfig::new(10_000_000_000, delay);
    let thin = edge.with_rate(2_500_000_000);
    let ways = [
        (Switch(0), Switch(1)),
        (Switch(0), Switch(2)),
        (Switch(1), Switch(3)),
        (Switch(2), Switch(3)),
    ];
    let graph =
        Graph::new(2, 4).join(Node(0), Switch(0), edge, edge).join(Switch(3), Node(1), edge, edge);
    let graph = ways.into_iter().fold(graph, |graph, (a, b)| graph.join(a, b, thin, thin));
    let mut network = Network::new(&NetworkConfig::new(graph.spread(spread), 1), |_| Phantom);
    let open = Stream::open(&mut network, 0, 1, 1 << 16, |connect| *connect = connect.selective());
    let mut streams = [open.unwrap()];
    rates(&mut network, &mut streams);
    rates(&mut network, &mut streams)[0]
}

#[test]
fn the_shortest_queue_uses_all_paths_and_costs_no_retransmissions() {
    let (one, random) = (over_two_paths(Spread::Flow), over_two_paths(Spread::Packet));
    let shortest = over_two_paths(Spread::Shortest);
    // 1,024 of 1,122 bytes on the wire are payload.
    assert!((2_000_000_000..2_300_000_000).contains(&one), "{one}");
    assert!(shortest > 4_200_000_000 && shortest > random, "{shortest} {random}");
}
