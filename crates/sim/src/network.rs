//! Nodes, the links between them, and the loop that moves time.
//!
//! [`Network::advance`] moves from one event time to the next. Within an instant everything due
//! happens in the order in which it was scheduled; then every affected node takes the product's
//! turns until it has no more to do. Programs act between two calls: [`Network::touched`] lists the
//! nodes that may have completions, [`Network::wakes`] the programs that asked to be woken.
//! Changing a node through [`Network::node_mut`] makes it run again; after changing
//! [`Network::nodes`] directly, call [`Network::settle`], which runs them all.
//!
//! Packets take the routes of the [`Graph`]. With [`NetworkConfig::holds`] they take none: they
//! queue in front of their node until they are handed over one by one, so that they can be
//! inspected, lost, duplicated, changed and forged ([`Network::release`], [`Network::held`],
//! [`Network::deliver`]).
//!
//! Nothing in here depends on the programs.

mod air;
mod failures;
mod governing;
mod local_peers;
mod losses;
mod node;
mod reports;
mod segment;
mod switching;
mod watchdog;
mod watermarks;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;

use roce::endpoint::{EndpointConfig, Transmit};
use roce::verbs::Qpn;
use roce::wire::{Headers, ROCE_PORT};
use roce::world::{self, BURST_PACKETS, Ecn, NoMemory, Path, Payload, Telemetry, TxFrame, Wire};
use roce::{Duration, Time};

use crate::buffer::{Buffer, BufferConfig};
use crate::chance::Chance;
use crate::events::EventQueue;
use crate::faults::{Fault, FaultCounts, FaultMix};
use crate::graph::Graph;
use crate::link::{Link, LinkStats, Outage, Vertex};
use crate::memory::NodeMemory;
use crate::packet::{Addressing, GROUP, Marks};
pub use crate::packet::{Direction, Packet, Sighting, Stamps};
use crate::paths::{Paths, Spread};
use crate::port::{Body, NEVER, Port, Room};
use crate::pressure::{BackPressure, Pressure};
pub use air::MAX_DELAY_NS;
use air::{Flow, Pool};
use failures::Failures;
pub use failures::{Conduct, Defect, Islands, LinkFaults, Rerouting};
pub use local_peers::Flaw;
use local_peers::Neighbourhood;
use losses::Losses;
pub use losses::{Cause, LossReport};
pub use node::Node;
use node::{Tally, new_node};
pub use reports::{LinkReport, QueueSample};
pub use switching::Deadlock;
pub(crate) use switching::headroom;
use watchdog::Watch;
pub use watchdog::Watchdog;
pub use watermarks::Collector;
use watermarks::Watermarks;

/// Configuration of a network.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Nodes, switches and cables.
    pub graph: Graph,
    /// Packets have an ICRC, which receivers verify. Runs without it are faster, where nothing is
    /// damaged. Packets between phantom memories have none.
    pub is_sealed: bool,
    /// Packets queue in front of their node until they are handed over.
    pub holds: bool,
    /// The buffer of every switch, shared by its ports; `None` for one that never fills.
    pub buffer: Option<BufferConfig>,
    /// Whether and when switches find other ways when links fail. With it, ports that were down
    /// forget pauses and credits.
    pub rerouting: Option<Rerouting>,
    /// The watchdog of every switch, for links that hold packets back.
    pub watchdog: Option<Watchdog>,
    /// Who reads the watermarks of switches and tells the hosts, if anybody.
    pub watermarks: Option<Collector>,
    /// T of switches that write digests: over which they measure utilizations. Longer than most
    /// round-trip times.
    pub telemetry_rtt: Duration,
    /// Most packets of a node that wait for its cables, each: the others stay in their queue pairs.
    /// `None` for no limit.
    pub nic_packets: Option<u32>,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// RoCEv1: packets have a GRH with GIDs of these addresses. Switches mark and stamp none of
    /// them, and see no queue pairs.
    pub roce_v1: bool,
    /// Most packets that a node receives at once.
    pub batch: usize,
    /// A node that still has something to do after this many turns at one instant is considered to
    /// spin.
    pub max_turns: u32,
    /// For every endpoint, each with its own seed.
    pub endpoint: EndpointConfig,
    /// Seed of all randomness.
    pub seed: u64,
}

impl NetworkConfig {
    /// Packets with ICRC over IPv4.
    pub fn new(graph: Graph, seed: u64) -> NetworkConfig {
        NetworkConfig {
            graph,
            is_sealed: true,
            holds: false,
            buffer: None,
            rerouting: None,
            watchdog: None,
            watermarks: None,
            telemetry_rtt: Duration::from_micros(13),
            nic_packets: None,
            ipv6: false,
            roce_v1: false,
            batch: 64,
            max_turns: 100_000,
            endpoint: EndpointConfig::default(),
            seed,
        }
    }
}

/// Sees each packet sent, before any fault, and drops it by returning false.
struct Filter(Box<dyn FnMut(&Headers) -> bool>);

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter")
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A packet has left a link completely.
    Departed(u32),
    /// A packet reaches the end of a link.
    Arrived { packet: u32, link: u32 },
    /// A pause of a class, or its end, reaches the start of a link.
    Flow { link: u32, class: u8, epoch: u8, is_paused: bool },
    /// A pause ends, unless it was repeated.
    PauseEnds { link: u32, class: u8 },
    /// A pause is to be repeated, if the class is still full.
    RefreshDue { link: u32, class: u8 },
    /// The watchdog looks at what waits.
    Look,
    /// The watermarks of switches are read.
    ReadWatermarks,
    /// Hosts are told what was read before.
    TellWatermarks,
    /// A node goes on pausing its switch.
    Storm(u32),
    /// Switches know whether a link is up.
    Detected { link: u32, is_up: bool },
    /// Routes are computed anew.
    Reroute,
    /// A switch has new routes.
    NewTable(u32),
    /// A flow control packet of the receiving end of a link reaches the sending one: its FCCL.
    Limit { link: u32, class: u8, epoch: u8, limit: u16 },
    /// The sending end of a link is to say what it has sent.
    TotalDue { link: u32, class: u8 },
    /// A flow control packet of the sending end reaches the receiving one: its FCTBS.
    Total { link: u32, class: u8, epoch: u8, total: u16 },
    /// An endpoint's deadline.
    Deadline(u32),
    /// A scheduled wake-up of a program.
    Wake(u32),
    /// A message or an acknowledgement of a local peer has arrived.
    Mail(u32),
}

/// Nodes and the network between them.
#[derive(Debug)]
pub struct Network<M> {
    /// Faults from now on for packets sent by a node.
    pub mix: FaultMix,
    /// The nodes, by number.
    pub nodes: Vec<Node<M>>,
    now: Time,
    links: Vec<Link>,
    paths: Paths,
    spread: Spread,
    /// By node: the links by which its packets leave.
    cables: Vec<Vec<u32>>,
    /// By switch; empty where they never fill.
    buffers: Vec<Buffer>,
    /// How long pauses last, where they end by themselves.
    quanta: Option<u16>,
    failures: Failures,
    losses: Losses,
    watch: Watch,
    watermarks: Watermarks,
    telemetry_rtt: Duration,
    nic_packets: Option<u32>,
    holds: bool,
    filter: Option<Filter>,
    misdirected: u64,
    max_turns: u32,
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
    /// For each duplicated packet, how many of the two have arrived.
    twins: Vec<u8>,
    launched: u64,
    spinning: Option<u32>,
    endpoint: EndpointConfig,
    neighbourhood: Neighbourhood,
    chance: Chance,
}

impl<M: NodeMemory> Network<M> {
    /// Nodes without queue pairs; `memory` creates the memory of each.
    pub fn new(config: &NetworkConfig, mut memory: impl FnMut(&mut Chance) -> M) -> Network<M> {
        Network::build(config, |_, chance| (memory(chance), chance.word()))
    }

    /// The same; `machine` creates the memory of each node, and the seed of its endpoint.
    pub fn build(
        config: &NetworkConfig,
        mut machine: impl FnMut(u32, &mut Chance) -> (M, u64),
    ) -> Network<M> {
        let mut chance = Chance::new(config.seed);
        let addressing = Addressing { ipv6: config.ipv6, is_v1: config.roce_v1 };
        let nodes = (0..config.graph.nodes()).map(|index| {
            let (memory, seed) = machine(index, &mut chance);
            let body = Body::of(memory.kind(), config.is_sealed);
            let port = Port::new(index, addressing, body, config.batch);
            new_node(config.endpoint, memory, port, seed)
        });
        let nodes = nodes.collect();
        let mut links: Vec<Link> = config.graph.edges().iter().map(Link::new).collect();
        for link in links.iter_mut().filter(|link| matches!(link.start, Vertex::Switch(_))) {
            link.watermarks = config.watermarks.map(|_| Box::default());
        }
        let buffers = switching::buffers(&mut links, config.graph.switches(), config.buffer);
        let paths = config.graph.paths(|_| true);
        let cables = (0..config.graph.nodes()).map(|node| paths.cables(node)).collect();
        Network {
            mix: FaultMix::NONE,
            nodes,
            now: Time::ZERO,
            links,
            cables,
            paths,
            spread: config.graph.way_to_spread(),
            buffers,
            quanta: config.buffer.and_then(|buffer| buffer.pfc?.pause_quanta),
            failures: Failures::new(config, config.graph.edges().len()),
            losses: Losses::default(),
            watch: Watch::new(config.watchdog, config.graph.edges().len()),
            watermarks: Watermarks::new(config.watermarks),
            telemetry_rtt: config.telemetry_rtt,
            nic_packets: config.nic_packets,
            holds: config.holds,
            filter: None,
            misdirected: 0,
            max_turns: config.max_turns,
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
            neighbourhood: Neighbourhood::default(),
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

    /// A node to change: it runs before time moves on.
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

    /// The path to a node.
    pub fn path_to(&self, node: u32) -> Path {
        Path::new((self.addressing.ip(node), ROCE_PORT).into())
    }

    /// Bytes of a packet between Ethernet's header and BTH.
    pub fn network_bytes(&self) -> u32 {
        self.addressing.network_bytes()
    }

    /// Whether packets have a GRH in place of IP and UDP.
    pub fn is_roce_v1(&self) -> bool {
        self.addressing.is_v1
    }

    /// Nodes that ran during the last [`advance`](Network::advance).
    pub fn touched(&self) -> &[u32] {
        &self.touched
    }

    /// Tokens of [`wake_at`](Network::wake_at) that came due during the last advance.
    pub fn wakes(&self) -> &[u32] {
        &self.wakes
    }

    /// Makes [`wakes`](Network::wakes) hold `token` at that time.
    pub fn wake_at(&mut self, at: Time, token: u32) {
        self.events.add(at.max(self.now), Event::Wake(token));
    }

    /// Keeps every packet that is sent or accepted for [`take_sightings`](Network::take_sightings).
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

    /// Counts a fault injected from outside that was effective.
    pub fn count_effect(&mut self, fault: Fault) {
        self.counts.effect(fault);
    }

    /// Events handled so far.
    pub fn events_handled(&self) -> u64 {
        self.handled
    }

    /// A node that kept running without end at one instant.
    pub fn spinning(&self) -> Option<u32> {
        self.spinning
    }

    // ---- forged packets -------------------------------------------------------------------------

    /// Delivers a forged packet to a node at once, as if another had sent it, with a right ICRC.
    pub fn inject(&mut self, from: u32, to: u32, headers: &Headers, payload: &[u8]) {
        let path = self.path_to(to);
        let payload = Payload::Bytes(payload);
        let frame = TxFrame {
            path,
            header: headers.emit(),
            payload,
            pad: headers.bth().pad,
            telemetry: Telemetry::None,
        };
        let packet = self.nodes[from as usize].port.packet(&frame, &NoMemory);
        self.deliver(to, packet);
    }

    /// Sends a packet that was polled from a node's endpoint by hand.
    pub fn transmit(&mut self, node: u32, transmit: &Transmit) {
        self.mark_dirty(node);
        let Node { memory, port, .. } = &mut self.nodes[node as usize];
        let frame = TxFrame {
            path: transmit.path,
            header: transmit.headers.emit(),
            payload: Payload::Gather(transmit.payload.clone()),
            pad: transmit.pad,
            telemetry: Telemetry::None,
        };
        port.send(self.now, &[frame], memory);
    }

    /// A packet of these bytes, BTH to ICRC, as if one node had sent it to another.
    pub fn forge(&self, from: u32, to: u32, bytes: Vec<u8>) -> Packet {
        Packet {
            source: self.addressing.source(from),
            dest: self.addressing.ip(to),
            ecn: self.addressing.ecn(Ecn::Ect0),
            is_v1: self.addressing.is_v1,
            frame_bytes: self.addressing.frame_bytes(bytes.len() as u32),
            bytes,
            from,
            to,
            id: 0,
            dscp: 0,
            hop_limit: 64,
            phantom_payload: 0,
            marks: Marks::default(),
            telemetry: None,
        }
        .forged()
    }

    /// Hands a packet to a node, which receives it when it runs next.
    pub fn deliver(&mut self, node: u32, packet: Packet) {
        self.nodes[node as usize].port.inbox.push_back(packet);
        self.mark_dirty(node);
    }

    /// Packets queued in front of a node, oldest first, where the network holds them.
    pub fn held(&mut self, node: u32) -> &mut VecDeque<Packet> {
        &mut self.nodes[node as usize].held
    }

    /// Packets sent to an address of no node.
    pub fn misdirected(&self) -> u64 {
        self.misdirected
    }

    /// Drops the packets for which `keep` is false, from now on; it is called for each packet sent.
    pub fn keep_if(&mut self, keep: impl FnMut(&Headers) -> bool + 'static) {
        self.filter = Some(Filter(Box::new(keep)));
    }

    /// Removes that filter.
    pub fn keep_all(&mut self) {
        self.filter = None;
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

    /// Statistics of the link into a node, the first one if it has several.
    pub fn ingress_stats(&mut self, node: u32) -> LinkStats {
        let now = self.now;
        let link = self.links.iter_mut().find(|link| link.end == Vertex::Node(node));
        link.map(|link| link.stats(now)).unwrap_or_default()
    }

    /// Resets the statistics of every link.
    pub fn restart_stats(&mut self) {
        let now = self.now;
        self.links.iter_mut().for_each(|link| link.restart_stats(now));
    }

    /// Packets that found a queue full, on any link.
    pub fn queue_drops(&mut self) -> u64 {
        let now = self.now;
        self.links.iter_mut().map(|link| link.stats(now).dropped).sum()
    }

    /// Makes every destination exert back-pressure on every node, or none.
    pub fn set_pressure(&mut self, pressure: Option<Pressure>) {
        for (index, node) in (0..).zip(&mut self.nodes) {
            let pressure = pressure.map(|pressure| BackPressure::new(pressure, index));
            if pressure.is_some() || node.port.brakes.is_some() {
                node.port.brakes.get_or_insert_default().pressure = pressure;
            }
        }
    }

    /// Sets the size of every queue.
    pub fn set_queue_bytes(&mut self, bytes: u64) {
        self.links.iter_mut().for_each(|link| link.config.queue_bytes = bytes);
    }

    /// Unplugs the cables of a node, or plugs them in again.
    pub fn set_cable(&mut self, node: u32, is_up: bool) {
        if !is_up {
            self.counts.inject(Fault::Flap);
        }
        for link in 0..self.links.len() {
            let ends = [self.links[link].end, self.links[link ^ 1].end];
            if !ends.contains(&Vertex::Node(node)) {
                continue;
            }
            self.links[link].is_plugged = is_up;
            if self.failures.resets_ports() {
                self.links[link ^ 1].is_plugged = is_up;
                self.links[link].outage = Outage::Cable;
                self.bring(link as u32);
            } else {
                self.links[link].is_up = is_up;
                self.links[link].outage_felt = false;
            }
        }
    }

    /// Whether all cables of a node are plugged in.
    pub fn has_cable(&self, node: u32) -> bool {
        self.links.iter().all(|link| link.is_plugged || link.end != Vertex::Node(node))
    }

    // ---- restarting ----------------------------------------------------------------------------

    /// A node loses all state: queue pairs, regions, queued packets. The caller supplies new
    /// memory.
    pub fn restart(&mut self, node: u32, memory: M) {
        self.counts.inject(Fault::Restart);
        let seed = self.chance.word();
        let (now, endpoint) = (self.now, self.endpoint);
        let old = &mut self.nodes[node as usize];
        let fresh = Port::new(node, old.port.addressing, old.port.body, old.port.batch);
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
        let gone = core::mem::replace(old, Node { past, is_dirty, timer, ..new });
        self.lose_mail(gone.mail);
        self.plant_flaw(self.neighbourhood.flaw);
        self.mark_dirty(node);
    }

    /// Stops a node as SIGSTOP does, or resumes all: packets that arrive there stay unread, which
    /// the others' wires can see.
    pub fn stop(&mut self, node: Option<u32>) {
        let ip = node.map(|node| self.addressing.ip(node));
        for (index, entry) in (0..).zip(&mut self.nodes) {
            entry.port.stalled = ip;
            entry.is_stopped = node == Some(index);
        }
        (0..self.len()).for_each(|node| self.mark_dirty(node));
    }

    // ---- time ----------------------------------------------------------------------------------

    /// Lets every node do all it can at this instant; returns whether any had something to do.
    pub fn settle(&mut self) -> bool {
        (0..self.len()).for_each(|node| self.mark_dirty(node));
        self.settle_changed()
    }

    /// When the next event is due, without deadlines that an endpoint has postponed or cancelled.
    pub fn next_at(&mut self) -> Option<Time> {
        if self.holds {
            let deadlines = self.nodes.iter().filter_map(|node| world::next_wakeup(&node.endpoint));
            let deadlines = deadlines.map(|at| at.max(self.now));
            return deadlines.chain(self.events.next_at()).min();
        }
        loop {
            let (at, event) = self.events.peek()?;
            let &Event::Deadline(node) = event else {
                return Some(at);
            };
            let entry = &mut self.nodes[node as usize];
            let due = world::next_wakeup(&entry.endpoint);
            let due = due.filter(|&due| due < NEVER && !entry.is_stopped);
            let is_set = entry.timer == Some(at);
            if is_set && due.is_some_and(|due| due <= at) {
                return Some(at);
            }
            self.events.drop_next();
            if is_set {
                entry.timer = due;
                entry.timer.into_iter().for_each(|due| self.events.add(due, Event::Deadline(node)));
            }
        }
    }

    /// Moves the clock to `at`, and delivers what is due by then. Nodes run on request.
    pub fn advance_to(&mut self, at: Time) {
        self.pass_to(at);
        (0..self.len()).for_each(|node| self.mark_dirty(node));
    }

    /// Runs until no event is left; false if that takes more than this many instants.
    pub fn run(&mut self, instants: u64) -> bool {
        self.settle();
        (0..instants).any(|_| !self.advance())
    }

    /// Runs until `until`, then sets the clock to it.
    pub fn run_until(&mut self, until: Time) {
        self.settle();
        while self.next_at().is_some_and(|at| at <= until) {
            self.advance();
        }
        self.advance_to(until);
        self.settle();
    }

    /// Applies the programs' changes, then moves to the next event. False if there is none.
    pub fn advance(&mut self) -> bool {
        self.advance_within(Time::from_nanos(u64::MAX))
    }

    /// The same, unless the next event is later than that.
    pub fn advance_within(&mut self, latest: Time) -> bool {
        self.wakes.clear();
        for &node in &self.touched {
            self.nodes[node as usize].is_touched = false;
        }
        self.touched.clear();
        self.settle_changed();
        let Some(at) = self.next_at().filter(|&at| at <= latest) else {
            return !self.touched.is_empty();
        };
        match self.holds {
            true => self.advance_to(at),
            false => self.pass_to(at),
        }
        self.settle_changed();
        true
    }

    fn pass_to(&mut self, at: Time) {
        self.now = self.now.max(at);
        self.land_late_bytes();
        while let Some(event) = self.events.pop_due(self.now) {
            self.handled += 1;
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Departed(link) => self.departed(link),
            Event::Arrived { packet, link } => self.arrived(packet, link),
            Event::Flow { link, class, epoch, is_paused } => {
                self.set_flow(link, class, epoch, is_paused);
            }
            Event::PauseEnds { link, class } => self.pause_ends(link, class),
            Event::RefreshDue { link, class } => self.refresh_pause(link, class),
            Event::Look => self.look_at_queues(),
            Event::ReadWatermarks => self.read_watermarks(),
            Event::TellWatermarks => self.tell_watermarks(),
            Event::Storm(node) => self.go_on_storming(node),
            Event::Detected { link, is_up } => self.detected(link, is_up),
            Event::Reroute => self.reroute(),
            Event::NewTable(switch) => self.take_table(switch),
            Event::Limit { link, class, epoch, limit } => {
                self.hear_limit(link, class, epoch, limit);
            }
            Event::TotalDue { link, class } => self.send_total(link, class),
            Event::Total { link, class, epoch, total } => {
                self.hear_total(link, class, epoch, total);
            }
            Event::Deadline(node) => {
                // Others were replaced by an earlier deadline.
                let entry = &mut self.nodes[node as usize];
                if entry.timer.is_some_and(|set| set <= self.now) {
                    entry.timer = None;
                    self.mark_dirty(node);
                }
            }
            Event::Wake(token) => self.wakes.push(token),
            Event::Mail(node) => self.mark_dirty(node),
        }
    }

    fn mark_dirty(&mut self, node: u32) {
        let entry = &mut self.nodes[node as usize];
        if !entry.is_dirty {
            entry.is_dirty = true;
            self.dirty.push(node);
        }
    }

    /// Whether no node was changed since it ran.
    pub fn is_settled(&self) -> bool {
        self.dirty.is_empty()
    }

    /// Lets the changed nodes do all they can at this instant; returns whether any had something to
    /// do.
    pub fn settle_changed(&mut self) -> bool {
        let (mut next, mut is_busy) = (0, false);
        while let Some(&node) = self.dirty.get(next) {
            next += 1;
            is_busy |= self.run_node(node);
        }
        self.dirty.clear();
        is_busy
    }

    fn run_node(&mut self, node: u32) -> bool {
        let entry = &mut self.nodes[node as usize];
        entry.is_dirty = false;
        if entry.is_stopped {
            return false;
        }
        if !entry.is_touched {
            entry.is_touched = true;
            self.touched.push(node);
        }
        entry.port.now = self.now;
        let (mut turns, mut is_busy) = (0, self.take_mail(node));
        loop {
            self.set_room(node);
            let Node { endpoint, port, memory, .. } = &mut self.nodes[node as usize];
            let progress = world::turn(endpoint, port, memory, self.now, |_, _| false);
            is_busy |= !progress.is_idle();
            // Fewer packets than a burst: nothing more can be sent now.
            let is_done = port.inbox.is_empty() && progress.sent < BURST_PACKETS;
            let pressure = port.brakes.as_mut().and_then(|brakes| brakes.pressure.as_mut());
            if let Some(pressure) = pressure.filter(|_| is_done) {
                pressure.judge(endpoint, self.now, &mut port.effects);
            }
            if !self.holds {
                self.release(node, |_, _| {});
            }
            // What was admitted to one queue pair, and not sent, is room for another.
            let is_done = is_done && !self.readmit(node);
            turns += 1;
            if turns > self.max_turns {
                self.spinning = Some(node);
            }
            if is_done || turns > self.max_turns {
                break;
            }
        }
        self.collect_sightings(node);
        if !self.holds {
            self.set_timer(node);
        }
        is_busy
    }

    /// Tells a node's wire how many packets its cables take now.
    fn set_room(&mut self, node: u32) {
        let Some(most) = self.nic_packets else {
            return;
        };
        let packets = self.room_of(node, most);
        let room = &mut self.nodes[node as usize].port.room;
        *room = Some(Room::new(packets, *room));
    }

    /// Packets that each of a node's cables takes, at `most` each.
    fn room_of(&self, node: u32, most: u32) -> usize {
        let cables = self.cables[node as usize].iter();
        let room =
            cables.map(|&link| (most as usize).saturating_sub(self.links[link as usize].packets()));
        room.min().unwrap_or(most as usize)
    }

    /// Queries a node's wire again for packets that it refused, if its cables have room; returns
    /// whether they have.
    fn readmit(&mut self, node: u32) -> bool {
        let Some(most) = self.nic_packets else {
            return false;
        };
        let is_refused = self.nodes[node as usize].port.room.is_some_and(|room| room.is_refused);
        let has_room = is_refused && self.room_of(node, most) > 0;
        if has_room {
            self.nodes[node as usize].endpoint.readmit(self.now);
        }
        has_room
    }

    /// Puts the packets sent by a node on their way. Where packets are held the caller does this,
    /// and sees each packet, and the memory that it came from.
    pub fn release(&mut self, node: u32, mut look: impl FnMut(&mut M, &Packet)) {
        let mut outbox = core::mem::take(&mut self.nodes[node as usize].port.outbox);
        for packet in outbox.drain(..) {
            look(&mut self.nodes[node as usize].memory, &packet);
            if !self.is_kept(&packet) {
                self.nodes[node as usize].port.recycle(packet.bytes);
            } else if packet.to == GROUP {
                // Every other node gets it, whether or not it has joined the group.
                for to in (0..self.len()).filter(|&to| to != node) {
                    self.depart(Packet { to, ..packet.clone() });
                }
            } else {
                self.depart(packet);
            }
        }
        self.nodes[node as usize].port.outbox = outbox;
    }

    fn is_kept(&mut self, packet: &Packet) -> bool {
        let Some(Filter(keep)) = &mut self.filter else {
            return true;
        };
        Headers::parse(&packet.bytes).map_or(true, |(headers, _)| keep(&headers))
    }

    fn depart(&mut self, mut packet: Packet) {
        let Packet { from, to, .. } = packet;
        match self.nodes.get_mut(to as usize) {
            None => self.misdirected += 1,
            Some(there) if self.holds => there.held.push_back(packet),
            Some(_) => {
                packet.marks.tables = self.failures.tables_now();
                let id = self.pool.put(packet);
                self.route(Vertex::Node(from), None, id);
            }
        }
    }

    fn collect_sightings(&mut self, node: u32) {
        let seen = self.nodes[node as usize].port.sightings.as_mut();
        if let (Some(all), Some(seen)) = (&mut self.sightings, seen) {
            all.append(seen);
        }
    }

    fn set_timer(&mut self, node: u32) {
        let entry = &mut self.nodes[node as usize];
        let Some(due) = world::next_wakeup(&entry.endpoint).filter(|&due| due < NEVER) else {
            return;
        };
        let due = due.max(self.now);
        if entry.timer.is_none_or(|set| due < set) {
            entry.timer = Some(due);
            self.events.add(due, Event::Deadline(node));
        }
    }
}
