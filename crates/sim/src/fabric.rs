//! Nodes, the links between them, and the loop that moves time.
//!
//! [`Fabric::advance`] goes from one instant at which something happens to the next. Within an
//! instant everything that is due happens in the order in which it was scheduled; then every node
//! that was concerned runs the product's drain loop until it has no more to do. Programs act between
//! two calls: [`Fabric::touched`] names the nodes that may have completions, [`Fabric::wakes`] the
//! programs that asked to be woken. Changing a node through [`Fabric::node_mut`] makes it run again.
//!
//! ```text
//!   node ──uplink──> switch ──downlink──> node       Topology::Star
//!   node 0 <──────────────────────────> node 1       Topology::Cable
//! ```
//!
//! Nothing in here knows what the programs do.

mod air;
mod node;

use alloc::vec::Vec;

use roce::Time;
use roce::endpoint::EndpointConfig;
use roce::verbs::Qpn;
use roce::wire::{Headers, ROCE_PORT};
use roce::world::{self, BURST_PACKETS, NoMemory, Path, Payload, TxFrame};

use crate::chance::Chance;
use crate::events::EventQueue;
use crate::faults::{Fault, FaultCounts, FaultMix};
use crate::link::{End, Link, LinkConfig, LinkStats};
use crate::memory::NodeMemory;
use crate::packet::Addressing;
use crate::port::Port;
pub use air::MAX_DELAY_NS;
use air::{Flow, Pool};
pub use node::Node;
use node::{Tally, new_node};

/// A node that still has something to do after so many rounds at one instant never ends.
const MAX_ROUNDS: u32 = 100_000;

/// How nodes are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Two nodes, one cable.
    Cable,
    /// All nodes at one switch: packets go up one link and down another.
    Star,
}

/// How a fabric is built.
#[derive(Clone, Copy, Debug)]
pub struct FabricConfig {
    /// How many nodes; two for [`Topology::Cable`].
    pub nodes: u32,
    /// How they are joined.
    pub topology: Topology,
    /// From a node to the switch, or to the other node.
    pub uplink: LinkConfig,
    /// From the switch to a node.
    pub downlink: LinkConfig,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Most packets that a node takes at once.
    pub batch: usize,
    /// For every endpoint, with a seed of its own.
    pub endpoint: EndpointConfig,
    /// Source of all chance.
    pub seed: u64,
}

/// Which way a packet was seen to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Handed to the wire.
    Sent,
    /// Handed to the endpoint.
    Accepted,
}

/// A packet as a node sent or accepted it.
#[derive(Clone, Copy, Debug)]
pub struct Sighting {
    /// When.
    pub at: Time,
    /// Whose wire.
    pub node: u32,
    /// The other node.
    pub peer: u32,
    /// Sent or accepted.
    pub direction: Direction,
    /// Transport headers.
    pub headers: Headers,
    /// Payload bytes.
    pub payload_len: u32,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A packet has left a link completely.
    Departed(u32),
    /// A packet reaches the end of a link.
    Arrived { packet: u32, link: u32 },
    /// An endpoint's deadline.
    Deadline(u32),
    /// A program wants its turn.
    Wake(u32),
}

/// Nodes and the network between them.
#[derive(Debug)]
pub struct Fabric<M> {
    /// What goes wrong from now on with packets that leave an uplink.
    pub mix: FaultMix,
    now: Time,
    nodes: Vec<Node<M>>,
    links: Vec<Link>,
    topology: Topology,
    addressing: Addressing,
    events: EventQueue<Event>,
    handled: u64,
    pool: Pool,
    dirty: Vec<u32>,
    touched: Vec<u32>,
    wakes: Vec<u32>,
    sightings: Option<Vec<Sighting>>,
    counts: FaultCounts,
    flows: Vec<Flow>,
    /// For each packet that was doubled, how many of the two have arrived.
    twins: Vec<u8>,
    launched: u64,
    spinning: Option<u32>,
    endpoint: EndpointConfig,
    chance: Chance,
}

impl<M: NodeMemory> Fabric<M> {
    /// Nodes without queue pairs; `memory` makes the memory of each.
    pub fn new(config: &FabricConfig, mut memory: impl FnMut(&mut Chance) -> M) -> Fabric<M> {
        let mut chance = Chance::new(config.seed);
        let addressing = Addressing { ipv6: config.ipv6 };
        let nodes = (0..config.nodes).map(|index| {
            let memory = memory(&mut chance);
            let port = Port::new(index, addressing, M::REAL, config.batch.max(1));
            new_node(config.endpoint, memory, port, chance.word())
        });
        let nodes = nodes.collect();
        Fabric {
            mix: FaultMix::NONE,
            now: Time::ZERO,
            nodes,
            links: links(config),
            topology: config.topology,
            addressing,
            events: EventQueue::new(),
            handled: 0,
            pool: Pool::default(),
            dirty: Vec::new(),
            touched: Vec::new(),
            wakes: Vec::new(),
            sightings: None,
            counts: FaultCounts::default(),
            flows: Vec::new(),
            twins: Vec::new(),
            launched: 0,
            spinning: None,
            endpoint: config.endpoint,
            chance,
        }
    }

    // ---- what programs see ---------------------------------------------------------------------

    /// The present.
    pub fn now(&self) -> Time {
        self.now
    }

    /// A node, by number.
    pub fn node(&self, node: u32) -> &Node<M> {
        &self.nodes[node as usize]
    }

    /// A node to change: it gets to run before time moves on.
    pub fn node_mut(&mut self, node: u32) -> &mut Node<M> {
        self.mark_dirty(node);
        &mut self.nodes[node as usize]
    }

    /// The same for changes that give it nothing to do: its memory, or taking completions.
    pub fn node_quietly(&mut self, node: u32) -> &mut Node<M> {
        &mut self.nodes[node as usize]
    }

    /// How many nodes there are.
    pub fn len(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Whether there is no node at all.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The way to a node.
    pub fn path_to(&self, node: u32) -> Path {
        Path::new((self.addressing.ip(node), ROCE_PORT).into())
    }

    /// Nodes that ran during the last [`advance`](Fabric::advance).
    pub fn touched(&self) -> &[u32] {
        &self.touched
    }

    /// Tokens of [`wake_at`](Fabric::wake_at) that came due during the last advance.
    pub fn wakes(&self) -> &[u32] {
        &self.wakes
    }

    /// Makes [`wakes`](Fabric::wakes) hold `token` at that time.
    pub fn wake_at(&mut self, at: Time, token: u32) {
        self.events.add(at.max(self.now), Event::Wake(token));
    }

    /// Keeps every packet that is sent or accepted for [`take_sightings`](Fabric::take_sightings).
    pub fn record(&mut self) {
        self.sightings = Some(Vec::new());
        for node in &mut self.nodes {
            node.port.sightings = Some(Vec::new());
        }
    }

    /// Packets since the last call, in the order in which they were seen.
    pub fn take_sightings(&mut self, into: &mut Vec<Sighting>) {
        into.clear();
        if let Some(sightings) = &mut self.sightings {
            into.append(sightings);
        }
    }

    /// Faults so far.
    pub fn fault_counts(&self) -> FaultCounts {
        let mut sum = self.counts;
        self.nodes.iter().for_each(|node| sum.add(&node.port.effects));
        sum
    }

    /// Counts a fault that struck from outside and was felt.
    pub fn count_effect(&mut self, fault: Fault) {
        self.counts.effect(fault);
    }

    /// Events handled so far.
    pub fn events_handled(&self) -> u64 {
        self.handled
    }

    /// A node that did not come to rest at one instant.
    pub fn spinning(&self) -> Option<u32> {
        self.spinning
    }

    // ---- packets that nobody's endpoint made -----------------------------------------------------

    /// A packet that was made up reaches a node at once, as if another had sent it, with a right ICRC.
    pub fn inject(&mut self, from: u32, to: u32, headers: &Headers, payload: &[u8]) {
        let path = self.path_to(to);
        let payload = Payload::Bytes(payload);
        let frame = TxFrame { path, header: headers.emit(), payload, pad: headers.bth().pad };
        if let Some(packet) = self.nodes[from as usize].port.packet(&frame, &NoMemory) {
            self.nodes[to as usize].port.inbox.push_back(packet);
            self.mark_dirty(to);
        }
    }

    /// Keeps a copy of every packet that a node sends to this queue pair.
    pub fn tap(&mut self, node: u32, dest: Qpn) {
        self.nodes[node as usize].port.taps.push(dest.get());
    }

    /// Packets that were kept since the last call, BTH to ICRC.
    pub fn take_tapped(&mut self) -> Vec<Vec<u8>> {
        self.nodes.iter_mut().flat_map(|node| core::mem::take(&mut node.port.tapped)).collect()
    }

    // ---- links ---------------------------------------------------------------------------------

    /// What the link into a node has seen: from the switch, or from the other end of the cable.
    pub fn ingress_stats(&mut self, node: u32) -> LinkStats {
        let (link, now) = (self.ingress(node), self.now);
        self.links[link].stats(now)
    }

    /// Starts the statistics of every link anew.
    pub fn restart_stats(&mut self) {
        let now = self.now;
        self.links.iter_mut().for_each(|link| link.restart_stats(now));
    }

    /// Packets that found a queue full, on any link.
    pub fn queue_drops(&mut self) -> u64 {
        let now = self.now;
        self.links.iter_mut().map(|link| link.stats(now).dropped).sum()
    }

    /// Gives every queue so much room from now on.
    pub fn set_queue_bytes(&mut self, bytes: u64) {
        self.links.iter_mut().for_each(|link| link.config.queue_bytes = bytes);
    }

    /// Takes the cable of a node out, or plugs it in again.
    pub fn set_cable(&mut self, node: u32, is_up: bool) {
        if !is_up {
            self.counts.inject(Fault::Flap);
        }
        for link in [node as usize, self.ingress(node)] {
            let link = &mut self.links[link];
            link.is_up = is_up;
            link.outage_felt = false;
        }
    }

    fn ingress(&self, node: u32) -> usize {
        match self.topology {
            Topology::Cable => 1 - node as usize,
            Topology::Star => self.nodes.len() + node as usize,
        }
    }

    // ---- restarting ----------------------------------------------------------------------------

    /// A node loses everything it knows: queue pairs, regions, packets that wait. The caller gives
    /// it new memory.
    pub fn restart(&mut self, node: u32, memory: M) {
        self.counts.inject(Fault::Restart);
        let seed = self.chance.word();
        let (now, endpoint) = (self.now, self.endpoint);
        let old = &mut self.nodes[node as usize];
        let fresh = Port::new(node, old.port.addressing, M::REAL, old.port.batch);
        let mut port = core::mem::replace(&mut old.port, fresh);
        port.inbox.clear();
        port.outbox.clear();
        let (tally, gone) = (old.past, Tally::of(&old.endpoint));
        let past = Tally {
            sent: tally.sent + gone.sent,
            received: tally.received + gone.received,
            retransmitted: tally.retransmitted + gone.retransmitted,
        };
        let (is_dirty, timer) = (old.is_dirty, old.timer.filter(|&at| at >= now));
        let new = new_node(endpoint, memory, port, seed);
        *old = Node { past, is_dirty, timer, ..new };
        self.mark_dirty(node);
    }

    // ---- time ----------------------------------------------------------------------------------

    /// Lets programs' changes take effect, then moves to the next instant at which something
    /// happens. False when nothing ever will.
    pub fn advance(&mut self) -> bool {
        self.wakes.clear();
        for &node in &self.touched {
            self.nodes[node as usize].is_touched = false;
        }
        self.touched.clear();
        self.settle();
        let Some(at) = self.events.next_at() else {
            return !self.touched.is_empty();
        };
        self.now = self.now.max(at);
        while let Some(event) = self.events.pop_due(self.now) {
            self.handled += 1;
            self.handle(event);
        }
        self.settle();
        true
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Departed(link) => self.departed(link),
            Event::Arrived { packet, link } => self.arrived(packet, link),
            Event::Deadline(node) => {
                // Others were replaced by an earlier one.
                let entry = &mut self.nodes[node as usize];
                if entry.timer == Some(self.now) {
                    entry.timer = None;
                    self.mark_dirty(node);
                }
            }
            Event::Wake(token) => self.wakes.push(token),
        }
    }

    fn mark_dirty(&mut self, node: u32) {
        let entry = &mut self.nodes[node as usize];
        if !entry.is_dirty {
            entry.is_dirty = true;
            self.dirty.push(node);
        }
    }

    fn settle(&mut self) {
        let mut next = 0;
        while let Some(&node) = self.dirty.get(next) {
            next += 1;
            self.run(node);
        }
        self.dirty.clear();
    }

    fn run(&mut self, node: u32) {
        let entry = &mut self.nodes[node as usize];
        entry.is_dirty = false;
        if !entry.is_touched {
            entry.is_touched = true;
            self.touched.push(node);
        }
        entry.port.now = self.now;
        let mut rounds = 0;
        while drain_once(&mut self.nodes[node as usize], self.now) {
            self.forward(node);
            rounds += 1;
            if rounds > MAX_ROUNDS {
                self.spinning = Some(node);
                break;
            }
        }
        self.forward(node);
        self.collect_sightings(node);
        self.set_timer(node);
    }

    fn forward(&mut self, node: u32) {
        let mut outbox = core::mem::take(&mut self.nodes[node as usize].port.outbox);
        for packet in outbox.drain(..) {
            let bytes = packet.frame_bytes;
            let packet = self.pool.put(packet);
            self.enqueue(node as usize, packet, bytes);
        }
        self.nodes[node as usize].port.outbox = outbox;
    }

    fn collect_sightings(&mut self, node: u32) {
        let seen = self.nodes[node as usize].port.sightings.as_mut();
        if let (Some(all), Some(seen)) = (&mut self.sightings, seen) {
            all.append(seen);
        }
    }

    fn set_timer(&mut self, node: u32) {
        let entry = &mut self.nodes[node as usize];
        let Some((due, _)) = entry.endpoint.poll_timeout() else {
            return;
        };
        let due = due.max(self.now);
        if entry.timer.is_none_or(|set| due < set) {
            entry.timer = Some(due);
            self.events.add(due, Event::Deadline(node));
        }
    }
}

/// One round of the product's loop; false when there is nothing left to do at this instant.
fn drain_once<M: NodeMemory>(node: &mut Node<M>, now: Time) -> bool {
    let progress = world::drain(&mut node.endpoint, &mut node.port, &mut node.memory, now);
    let ended_by_short_burst = !progress.sent.is_multiple_of(BURST_PACKETS) || progress.sent == 0;
    !(node.port.inbox.is_empty() && ended_by_short_burst)
}

/// Uplinks by node, then, of a star, downlinks by node.
fn links(config: &FabricConfig) -> Vec<Link> {
    let nodes = config.nodes;
    match config.topology {
        Topology::Cable => {
            (0..2).map(|node| Link::new(config.uplink, End::Node(1 - node), true)).collect()
        }
        Topology::Star => {
            let up = (0..nodes).map(|_| Link::new(config.uplink, End::Switch, true));
            let down = (0..nodes).map(|node| Link::new(config.downlink, End::Node(node), false));
            up.chain(down).collect()
        }
    }
}
