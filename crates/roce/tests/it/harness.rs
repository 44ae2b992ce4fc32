//! The simulated network for the tests of this crate: hosts joined by cables that only delay.
//!
//! Everything is in `sim`; this module adds the usual scenario, queue pairs on it, and a trace of
//! sent packets. After every step two things must hold: no undamaged packet was refused, and every
//! node came to rest. Memory outside registered regions panics (C3).

use std::ops::{Deref, DerefMut};

use roce::Duration;
use roce::Time;
use roce::device;
use roce::endpoint::{Connect, EndpointConfig, QpConfig};
use roce::verbs::{Completion, CqId, Qpn, SrqId};
use roce::wire::Headers;
use sim::graph::{Graph, Vertex};
use sim::link::LinkConfig;
use sim::memory::Arena;
use sim::network::{Direction, Sighting};

pub(crate) use sim::chance::Chance;
pub(crate) use sim::faults::{Fault, FaultMix};
pub(crate) use sim::memory::BASE;

pub(crate) type Node = sim::network::Node<Arena>;

/// Configuration of a network.
pub(crate) struct NetworkConfig {
    pub(crate) nodes: u32,
    pub(crate) arena_bytes: usize,
    pub(crate) ipv6: bool,
    pub(crate) batch: usize,
    pub(crate) latency: Duration,
    pub(crate) endpoint: EndpointConfig,
    pub(crate) seed: u64,
}

impl Default for NetworkConfig {
    fn default() -> NetworkConfig {
        NetworkConfig {
            nodes: 2,
            arena_bytes: 1 << 20,
            ipv6: false,
            batch: 64,
            latency: Duration::from_micros(2),
            endpoint: EndpointConfig::default(),
            seed: 1,
        }
    }
}

/// Nodes, each with a cable to each other.
pub(crate) struct Network {
    world: sim::network::Network<Arena>,
    /// Every packet sent, if recording.
    pub(crate) trace: Option<Vec<Headers>>,
    sightings: Vec<Sighting>,
}

impl Deref for Network {
    type Target = sim::network::Network<Arena>;

    fn deref(&self) -> &Self::Target {
        &self.world
    }
}

impl DerefMut for Network {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.world
    }
}

impl Network {
    pub(crate) fn new(config: &NetworkConfig) -> Network {
        let link = LinkConfig::unlimited(config.latency);
        let pairs = (0..config.nodes).flat_map(|b| (0..b).map(move |a| [a, b].map(Vertex::Node)));
        let graph = Graph::new(config.nodes, 0);
        let graph = pairs.fold(graph, |graph, [a, b]| graph.join(a, b, link, link));
        let NetworkConfig { ipv6, batch, endpoint, seed, .. } = *config;
        let plain = sim::network::NetworkConfig::new(graph, seed);
        let config_of_world = sim::network::NetworkConfig { ipv6, batch, endpoint, ..plain };
        let memory = |chance: &mut Chance| Arena::strict(config.arena_bytes, chance);
        let world = sim::network::Network::new(&config_of_world, memory);
        Network { world, trace: None, sightings: Vec::new() }
    }

    /// Keeps every packet that is sent in `trace`.
    pub(crate) fn record(&mut self) {
        self.world.record();
        self.trace = Some(Vec::new());
    }

    fn look(&mut self) {
        self.world.take_sightings(&mut self.sightings);
        let sent = self.sightings.iter().filter(|seen| seen.direction == Direction::Sent);
        self.trace.iter_mut().for_each(|trace| trace.extend(sent.clone().map(|seen| seen.headers)));
        assert!(self.world.nodes.iter().all(|node| node.refused_intact() == 0), "ours was refused");
        assert_eq!(self.world.spinning(), None, "a node never comes to rest");
    }

    /// Lets every endpoint do all it can at this instant.
    pub(crate) fn settle(&mut self) {
        self.world.settle();
        self.look();
    }

    /// Advances to the next event; false if there is none.
    pub(crate) fn advance(&mut self) -> bool {
        self.world.settle();
        let moved = self.world.advance();
        self.look();
        moved
    }

    /// Runs until no event is left; at most `steps` instants.
    pub(crate) fn run(&mut self, steps: u64) {
        let rests = self.world.run(steps);
        self.look();
        assert!(rests, "still busy after {steps} instants at {}", self.now());
    }

    /// Runs until `until`, then sets the clock to it.
    pub(crate) fn run_until(&mut self, until: Time) {
        self.world.run_until(until);
        self.look();
    }

    /// Packets with an injected fault.
    pub(crate) fn injected(&self) -> u64 {
        self.fault_counts().injected.iter().sum()
    }
}

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) node: usize,
    pub(crate) qpn: Qpn,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
}

impl Network {
    /// A queue pair with its own completion queues, not connected.
    pub(crate) fn create_end(&mut self, node: usize, max_wr: u32, cq_depth: u32) -> End {
        self.create_end_with(node, max_wr, cq_depth, None)
    }

    /// The same, taking its receives from a shared queue if one is given.
    pub(crate) fn create_end_with(
        &mut self,
        node: usize,
        max_wr: u32,
        cq_depth: u32,
        srq: Option<SrqId>,
    ) -> End {
        let Node { endpoint, pd, .. } = &mut self.nodes[node];
        let send_cq = endpoint.create_cq(cq_depth).unwrap();
        let recv_cq = endpoint.create_cq(cq_depth).unwrap();
        let config = QpConfig { recv_cq, srq, ..QpConfig::rc(*pd, send_cq, max_wr, max_wr) };
        let qpn = endpoint.create_qp(config).unwrap();
        End { node, qpn, send_cq, recv_cq }
    }

    /// Connects two ends; `adjust` gets the attributes of each before they are used.
    pub(crate) fn connect(&mut self, a: End, b: End, adjust: impl Fn(&mut Connect)) {
        for (own, peer) in [(a, b), (b, a)] {
            let remote = &self.nodes[peer.node];
            let remote_psn = remote.endpoint.query_qp(peer.qpn).unwrap().sq_psn;
            let connect = Connect::new(remote.path(), peer.qpn, remote_psn);
            let endpoint = &mut self.nodes[own.node].endpoint;
            let local_psn = endpoint.query_qp(own.qpn).unwrap().sq_psn;
            let mut connect = Connect { local_psn, ..connect };
            adjust(&mut connect);
            device::connect(endpoint, Time::ZERO, own.qpn, &connect).unwrap();
        }
    }

    /// A connected pair between nodes 0 and 1.
    pub(crate) fn pair(&mut self, adjust: impl Fn(&mut Connect)) -> (End, End) {
        let (a, b) = (self.create_end(0, 64, 256), self.create_end(1, 64, 256));
        self.connect(a, b, adjust);
        (a, b)
    }

    pub(crate) fn sent_by(&mut self, end: End) -> Vec<Completion> {
        self.nodes[end.node].completions(end.send_cq)
    }

    pub(crate) fn received_by(&mut self, end: End) -> Vec<Completion> {
        self.nodes[end.node].completions(end.recv_cq)
    }
}
