//! Two machines and a cable between them: the network of `sim` for the tests of this crate.
//!
//! The cable loses, duplicates and delays packets according to the seed. Nothing is damaged here,
//! so packets carry no ICRC. Memory is strict: an access outside registered regions panics (C3),
//! and so does one to bytes lent to the disk.

use std::ops::{Deref, DerefMut};

use roce::device;
use roce::endpoint::{Connect, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, Qpn};
use roce::{Duration, Time};
use sim::chance::Chance;
use sim::faults::Fault;
use sim::graph::Graph;
use sim::link::LinkConfig;
use sim::memory::Regions;
use sim::network::{Network, NetworkConfig};

pub(crate) use sim::memory::Arena;

pub(crate) type Node = sim::network::Node<Arena>;

/// Depth of completion queues in tests about something else.
pub(crate) const CQ_DEPTH: u32 = 4_096;

/// A pair of completion queues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqs {
    pub(crate) send: CqId,
    pub(crate) recv: CqId,
}

/// Registers new memory, which is never reused.
pub(crate) fn register(node: &mut Node, bytes: u64, access: Access) -> MemoryRegion {
    let addr = node.memory.take(bytes).expect("the arena is full");
    node.register(addr, bytes, access).expect("the region is sound")
}

pub(crate) fn create_cqs(node: &mut Node, depth: u32) -> Cqs {
    let mut create = || node.endpoint.create_cq(depth).expect("there is room");
    Cqs { send: create(), recv: create() }
}

pub(crate) fn create_qp(node: &mut Node, cqs: Cqs, work: u32) -> Qpn {
    let config = QpConfig { recv_cq: cqs.recv, ..QpConfig::rc(node.pd, cqs.send, work, work) };
    node.endpoint.create_qp(config).expect("there is room")
}

fn memory(bytes: usize) -> Arena {
    Arena::with(vec![0; bytes], Regions::strict())
}

/// The network.
pub(crate) struct Net {
    network: Network<Arena>,
    /// How often a sender that finds no receive retries; 7 is for ever.
    pub(crate) rnr_retry: u8,
}

impl Deref for Net {
    type Target = Network<Arena>;

    fn deref(&self) -> &Self::Target {
        &self.network
    }
}

impl DerefMut for Net {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.network
    }
}

impl Net {
    /// Two nodes with so many bytes of memory each.
    pub(crate) fn new(bytes: [usize; 2], seed: u64) -> Net {
        let mut chance = Chance::new(seed);
        let link = LinkConfig::unlimited(Duration::from_micros(chance.between(1, 29)));
        let config = NetworkConfig {
            is_sealed: false,
            batch: 32,
            endpoint: EndpointConfig::default(),
            ..NetworkConfig::new(Graph::cable(link), chance.word())
        };
        let mut bytes = bytes.into_iter();
        let network = Network::new(&config, |_| memory(bytes.next().expect("two nodes")));
        Net { network, rnr_retry: 6 }
    }

    /// A new process on a node: nothing of the old one is left but its packets in flight.
    pub(crate) fn restart(&mut self, node: usize, bytes: usize) {
        self.network.restart(node as u32, memory(bytes));
    }

    /// Connects two queue pairs.
    pub(crate) fn connect(&mut self, ends: [Qpn; 2], mtu: Mtu) {
        let now = self.now();
        for (own, peer) in [(0, 1), (1, 0)] {
            let node = &self.nodes[peer];
            let psn = node.endpoint.query_qp(ends[peer]).expect("the queue pair exists").sq_psn;
            let rnr_retry = self.rnr_retry;
            let connect = Connect::new(node.path(), ends[peer], psn);
            let endpoint = &mut self.nodes[own].endpoint;
            let local_psn = endpoint.query_qp(ends[own]).expect("it exists").sq_psn;
            let connect = Connect { mtu, timeout: 8, rnr_retry, local_psn, ..connect };
            device::connect(endpoint, now, ends[own], &connect).expect("the queue pair is new");
        }
    }

    /// Delivers packets for a while; no completion is polled.
    pub(crate) fn run_for(&mut self, span_ns: u64) {
        let end = self.now() + Duration::from_nanos(span_ns);
        self.run_until(end);
    }

    /// Packets that were lost by chance.
    pub(crate) fn lost(&self) -> u64 {
        self.fault_counts().injected[Fault::Loss as usize]
    }
}

/// The earliest of some instants.
pub(crate) fn earliest(instants: impl IntoIterator<Item = Option<Time>>) -> Option<Time> {
    instants.into_iter().flatten().min()
}
