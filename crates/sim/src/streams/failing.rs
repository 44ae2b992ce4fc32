//! Streams through networks whose links and switches fail: what [`network`](crate::network) does
//! then.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use roce::endpoint::Connect;
use roce::{Duration, Time};

use super::{Stream, StreamError, run_until};
use crate::buffer::BufferConfig;
use crate::faults::{Fault, FaultMix};
use crate::graph::{Graph, Spread};
use crate::link::{LinkConfig, Vertex};
use crate::memory::Phantom;
use crate::network::{Conduct, Defect, LinkFaults, Network, NetworkConfig, Rerouting, Watchdog};

const LINK: LinkConfig = LinkConfig::new(100_000_000_000, Duration::from_micros(1));

/// Node `n` at leaf `n`, and two spines; the cable from leaf `n` to spine `s` is `2 + 2 n + s`.
fn leaves_and_spines(link: LinkConfig) -> Graph {
    use Vertex::{Node, Switch};
    let joins = [
        (Node(0), Switch(0)),
        (Node(1), Switch(1)),
        (Switch(0), Switch(2)),
        (Switch(0), Switch(3)),
        (Switch(1), Switch(2)),
        (Switch(1), Switch(3)),
    ];
    joins.into_iter().fold(Graph::new(2, 4), |graph, (a, b)| graph.join(a, b, link, link))
}

fn rerouting() -> Rerouting {
    Rerouting { detection: Duration::from_micros(200), spread: Duration::from_micros(50) }
}

struct Net {
    network: Network<Phantom>,
    streams: Vec<Stream>,
}

impl Net {
    fn new(config: &NetworkConfig) -> Net {
        Net::with_timeout(config, 9)
    }

    /// With an ACK timeout of 4.096 us times 2^`timeout`.
    fn with_timeout(config: &NetworkConfig, timeout: u8) -> Net {
        let mut network = Network::new(config, |_| Phantom);
        let stream = Stream::open(&mut network, 0, 1, 1 << 16, |connect: &mut Connect| {
            (connect.timeout, connect.retry_count) = (timeout, 7);
        });
        Net { network, streams: vec![stream.unwrap()] }
    }

    /// Payload that arrives in so many microseconds, or why a stream ended.
    fn run(&mut self, micros: u64) -> Result<u64, StreamError> {
        let before = self.streams[0].arrived(&self.network);
        let until = self.network.now() + Duration::from_micros(micros);
        run_until(&mut self.network, &mut self.streams, until)?;
        self.network.advance_to(until);
        Ok(self.streams[0].arrived(&self.network) - before)
    }

    /// Lets everything come to rest, and says what is wrong then.
    fn rest(&mut self) -> Option<String> {
        assert!(self.network.run(10_000_000));
        self.network.unrest()
    }

    fn effective(&self, fault: Fault) -> [u64; 2] {
        let counts = self.network.fault_counts();
        [counts.injected[fault as usize], counts.effective[fault as usize]]
    }
}

fn lossless(graph: Graph) -> NetworkConfig {
    NetworkConfig {
        buffer: Some(BufferConfig::lossless(1_000_000)),
        nic_packets: Some(1),
        rerouting: Some(rerouting()),
        ..NetworkConfig::new(graph, 1)
    }
}

#[test]
fn packets_go_round_a_dead_link_once_it_is_detected() {
    for spread in [Spread::First, Spread::Flow] {
        let graph = leaves_and_spines(LINK).spread(spread);
        let mut net = Net::new(&lossless(graph));
        let whole = net.run(1_000).unwrap();
        let link = net.network.way(0, 1, 0)[1];
        net.network.set_link(link, false);
        let dead = net.run(190).unwrap();
        assert!(spread == Spread::Flow || dead < whole / 20, "{dead} of {whole}");
        // A timeout later it is all as before.
        net.run(3_000).unwrap();
        let round = net.run(1_000).unwrap();
        assert!(round > whole * 9 / 10, "{round} of {whole}");
        net.network.set_link(link, true);
        let again = net.run(1_000).unwrap();
        assert!(again > whole * 9 / 10, "{again} of {whole}");
        if spread == Spread::First {
            assert_eq!(net.effective(Fault::LinkDown), [1, 1]);
        }
        assert_eq!(net.rest(), None);
        assert_eq!(net.network.conduct().unexplained_loops, 0);
    }
}

#[test]
fn without_other_routes_a_dead_link_ends_the_stream() {
    let config = lossless(leaves_and_spines(LINK));
    let mut net = Net::new(&NetworkConfig { rerouting: None, ..config });
    net.run(1_000).unwrap();
    let link = net.network.way(0, 1, 0)[1];
    net.network.set_link(link, false);
    assert!(net.run(100_000).is_err());
}

#[test]
fn a_switch_that_dies_loses_what_it_holds_and_comes_back_empty() {
    let slow = LINK.with_rate(25_000_000_000);
    use Vertex::{Node, Switch};
    // The link behind the spine is the slowest, so packets wait in front of it, and then in the
    // leaf.
    let graph = Graph::new(2, 4)
        .join(Node(0), Switch(0), LINK, LINK)
        .join(Node(1), Switch(1), LINK, LINK)
        .join(Switch(0), Switch(2), LINK, LINK)
        .join(Switch(0), Switch(3), LINK, LINK)
        .join(Switch(2), Switch(1), slow, slow)
        .join(Switch(3), Switch(1), slow, slow);
    for credits in [None, Some(512)] {
        let like = |mut graph: Graph| {
            graph.edges_mut().for_each(|edge| edge.config.credits = credits);
            graph
        };
        let config = lossless(like(graph.clone()));
        let buffer = config.buffer.filter(|_| credits.is_none());
        let mut net = Net::new(&NetworkConfig { buffer, ..config });
        let whole = net.run(1_000).unwrap();
        net.network.set_switch(2, false);
        net.run(4_000).unwrap();
        let round = net.run(1_000).unwrap();
        assert!(round > whole * 9 / 10, "{round} of {whole} by the other spine");
        net.network.set_switch(2, true);
        net.run(4_000).unwrap();
        let again = net.run(1_000).unwrap();
        assert!(again > whole * 9 / 10, "{again} of {whole}");
        assert_eq!(net.effective(Fault::SwitchDown), [1, 1]);
        assert_eq!(net.rest(), None, "{credits:?}");
        let Conduct { unexplained_drops, overruns, .. } = net.network.conduct();
        assert_eq!((unexplained_drops, overruns), (0, 0));
    }
}

#[test]
fn a_loop_between_old_and_new_routes_ends_at_the_hop_limit() {
    use Vertex::{Node, Switch};
    let joins = [
        (Node(0), Switch(0)),
        (Node(1), Switch(2)),
        (Switch(0), Switch(2)),
        (Switch(1), Switch(2)),
        (Switch(0), Switch(1)),
    ];
    let join = |graph: Graph, (a, b)| graph.join(a, b, LINK, LINK);
    let graph = joins.into_iter().fold(Graph::new(2, 3), join);
    let mut expired = 0;
    for seed in 0..8 {
        let spread = Duration::from_micros(1_500);
        let rerouting = Some(Rerouting { spread, ..rerouting() });
        let config = NetworkConfig { seed, rerouting, ..lossless(graph.clone()) };
        // Packets have to be sent while the routes change.
        let mut net = Net::with_timeout(&NetworkConfig { buffer: None, ..config }, 6);
        net.network.set_link(4, false);
        net.run(8_000).unwrap();
        // Now switch 0 sends by switch 1, which is to send by switch 0.
        net.network.set_link(4, true);
        net.network.set_link(6, false);
        net.run(9_000).unwrap();
        assert!(net.run(1_000).unwrap() > 1_000_000);
        assert_eq!(net.rest(), None);
        assert_eq!(net.network.conduct().unexplained_loops, 0);
        expired += net.network.conduct().expired;
    }
    assert!(expired > 0);
}

#[test]
fn a_packet_that_is_sent_back_without_a_change_of_routes_is_noticed() {
    let mut net = Net::new(&lossless(leaves_and_spines(LINK)));
    net.network.plant_defect(Defect::LoopOnReroute);
    net.network.set_link(4, false);
    net.run(4_000).unwrap();
    // It comes again to the switch that it was sent back to, and to the one that sent it.
    assert_eq!(net.network.conduct().unexplained_loops, 2);
}

#[test]
fn bit_errors_lose_packets_and_slow_links_are_slow() {
    let mut net = Net::new(&lossless(leaves_and_spines(LINK)));
    let whole = net.run(1_000).unwrap();
    let link = net.network.way(0, 1, 0)[1];
    net.network.slow_down(link, 10);
    net.run(1_000).unwrap();
    let slow = net.run(1_000).unwrap();
    assert!((whole / 12..whole / 8).contains(&slow), "{slow} of {whole}");
    net.network.slow_down(link, 1);
    net.run(1_000).unwrap();
    assert_eq!(net.effective(Fault::SlowLink), [1, 1]);
    net.network.set_link_faults(LinkFaults { bit_errors: 100, pause_loss: 0 });
    net.run(5_000).unwrap();
    let [injected, effective] = net.effective(Fault::BitError);
    // Frames of about 1,100 bytes, with 100 errors in 10^9 bits, on three links: one in 380.
    assert!(injected > 20 && effective * 10 > injected * 8, "{injected} {effective}");
    net.network.repair();
    assert_eq!(net.rest(), None);
}

#[test]
fn a_pause_whose_end_is_lost_ends_by_itself() {
    let mut net = Net::new(&lossless(leaves_and_spines(LINK)));
    net.run(100).unwrap();
    net.network.set_storm(1, true);
    net.run(100).unwrap();
    assert_eq!(net.run(2_000).unwrap(), 0, "repeated for longer than one pause lasts");
    net.network.set_link_faults(LinkFaults { bit_errors: 0, pause_loss: 1_000_000 });
    net.network.set_storm(1, false);
    net.run(10).unwrap();
    net.network.set_link_faults(LinkFaults::default());
    // 65,535 times 512 bits at 100 Gbit/s are 336 us.
    assert_eq!(net.run(250).unwrap(), 0);
    assert!(net.run(10_000).unwrap() > 1_000_000);
    assert_eq!(net.effective(Fault::PauseStorm), [1, 1]);
    assert_eq!(net.rest(), None);
    assert_eq!(net.network.conduct().unexplained_drops, 0);
}

#[test]
fn a_watchdog_ends_a_storm_and_obeys_pauses_again_after_it() {
    let (detection, restoration) = (Duration::from_micros(200), Duration::from_micros(400));
    let watchdog = Some(Watchdog { detection, restoration });
    let mut net = Net::new(&NetworkConfig { watchdog, ..lossless(leaves_and_spines(LINK)) });
    net.run(100).unwrap();
    net.network.set_storm(1, true);
    net.run(5_000).unwrap();
    let Conduct { watchdog_trips, watchdog_drops, .. } = net.network.conduct();
    assert!(watchdog_trips == 1 && watchdog_drops > 0, "{watchdog_trips} {watchdog_drops}");
    assert!(net.run(1_000).unwrap() > 1_000_000, "the storm is ignored");
    net.network.set_storm(1, false);
    net.run(1_000).unwrap();
    net.network.set_storm(1, true);
    net.run(100).unwrap();
    assert_eq!(net.run(50).unwrap(), 0, "a pause that is obeyed");
    net.network.repair();
    assert!(net.run(5_000).unwrap() > 1_000_000);
    assert_eq!(net.rest(), None);
    assert!(net.network.now() > Time::ZERO);
}

#[test]
fn credits_survive_lost_packets_and_lost_flow_control() {
    let link = LinkConfig { credits: Some(256), ..LINK };
    let config = NetworkConfig { buffer: None, ..lossless(leaves_and_spines(link)) };
    let mut net = Net::new(&config);
    net.network.set_link_faults(LinkFaults { bit_errors: 200, pause_loss: 100_000 });
    let troubled = net.run(5_000).unwrap();
    net.network.set_link(net.network.way(0, 1, 0)[1], false);
    net.run(5_000).unwrap();
    net.network.repair();
    net.run(3_000).unwrap();
    assert!(troubled > 1_000_000 && net.run(1_000).unwrap() > 5_000_000, "{troubled}");
    assert_eq!(net.rest(), None);
    assert_eq!(net.network.conduct().overruns, 0);

    let mut net = Net::new(&config);
    net.network.plant_defect(Defect::CreditLeaked);
    net.network.set_link_faults(LinkFaults { bit_errors: 20, pause_loss: 0 });
    net.run(1_000).unwrap();
    net.network.repair();
    assert!(net.rest().is_some());
}

/// A node's link that copies or holds up packets delivers more at once than its rate allows: what a
/// lossless switch drops then is not its fault.
#[test]
fn faults_that_bunch_packets_explain_what_a_lossless_switch_drops() {
    let slow = LINK.with_rate(10_000_000_000);
    let mut graph = leaves_and_spines(LINK);
    graph.edges_mut().skip(4).for_each(|edge| edge.config = slow);
    let buffer = BufferConfig { reserve: 1_100, ..BufferConfig::lossless(60_000) };
    let config = NetworkConfig { buffer: Some(buffer), ..lossless(graph) };
    let mut net = Net::new(&config);
    net.network.mix = FaultMix::NONE.with(Fault::Duplicate, 900_000).with(Fault::Reorder, 900_000);
    net.run(50_000).unwrap();
    assert!(net.network.queue_drops() > 0);
    assert_eq!(net.network.conduct().unexplained_drops, 0);
}
