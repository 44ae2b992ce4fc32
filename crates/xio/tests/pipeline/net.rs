//! Two machines and the network between them, in virtual time.
//!
//! Nodes run the product's own drain loop; packets are encoded, carried as bytes, lost, doubled and
//! overtaken as the seed says, and decoded. There is no IP and no ICRC: damage on the wire is the
//! business of the tests of `roce`.
//!
//! Two rules are checked on every access to memory: it lies in a registered region (C3), and it is not
//! lent to the disk.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, PdId, Qpn, Verbs};
use roce::wire::Headers;
use roce::world::{
    self, AtomicOp, Memory, MemoryKind, Origin, Path, RxFrame, Staging, TxFrame, Wire,
};
use roce::{Duration, Time};

use super::draw::Draw;

/// First address of every arena: high, so that offsets mistaken for addresses are caught.
const BASE: u64 = 0x7f00_0000_0000;

/// Depth of completion queues that no test is about.
pub(crate) const CQ_DEPTH: u32 = 4_096;

/// A node's memory.
pub(crate) struct Arena {
    bytes: Vec<u8>,
    used: u64,
    regions: Vec<MemoryRegion>,
    lent: Vec<(u64, u32)>,
}

impl Arena {
    fn new(capacity: usize) -> Arena {
        Arena { bytes: vec![0; capacity], used: 0, regions: Vec::new(), lent: Vec::new() }
    }

    /// Fresh memory on a page boundary; never given back.
    fn take(&mut self, bytes: u64) -> u64 {
        let addr = BASE + self.used;
        self.used += bytes.max(1).next_multiple_of(4096);
        assert!(self.used <= self.bytes.len() as u64, "the arena is full");
        addr
    }

    /// The disk owns these bytes until they are given back.
    pub(crate) fn lend(&mut self, addr: u64, len: u32) {
        self.check(addr, len as usize);
        self.lent.push((addr, len));
    }

    pub(crate) fn give_back(&mut self, addr: u64) {
        self.lent.retain(|(lent, _)| *lent != addr);
    }

    fn check(&self, addr: u64, len: usize) {
        let end = addr + len as u64;
        let inside = |region: &MemoryRegion| region.addr <= addr && end <= region.addr + region.len;
        assert!(
            self.regions.iter().any(inside),
            "C3: {len} bytes at {addr:#x} are not in a registered region"
        );
        let apart = |(at, size): &(u64, u32)| end <= *at || at + u64::from(*size) <= addr;
        assert!(self.lent.iter().all(apart), "{len} bytes at {addr:#x} belong to the disk");
    }

    /// Bytes whoever owns them, for faults and for looking.
    pub(crate) fn raw(&mut self, addr: u64, len: usize) -> &mut [u8] {
        let at = (addr - BASE) as usize;
        &mut self.bytes[at..at + len]
    }
}

impl Memory for Arena {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        into.copy_from_slice(self.bytes(addr, into.len()));
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        self.bytes_mut(addr, from.len()).copy_from_slice(from);
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        op.apply_to(self.bytes_mut(addr, 8))
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

impl Staging for Arena {
    fn bytes(&self, addr: u64, len: usize) -> &[u8] {
        self.check(addr, len);
        let at = (addr - BASE) as usize;
        &self.bytes[at..at + len]
    }

    fn bytes_mut(&mut self, addr: u64, len: usize) -> &mut [u8] {
        self.check(addr, len);
        self.raw(addr, len)
    }
}

#[derive(Clone, Debug)]
struct Packet {
    source: SocketAddr,
    remote: SocketAddr,
    bytes: Vec<u8>,
}

/// A node's wire: what it sent and what reached it.
struct Port {
    source: SocketAddr,
    outbox: Vec<Packet>,
    inbox: VecDeque<Packet>,
}

impl Wire for Port {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        for frame in frames {
            let mut bytes = frame.header.to_vec();
            frame.payload.append_to(&mut bytes, memory);
            bytes.resize(bytes.len() + usize::from(frame.pad) + 4, 0);
            let (source, remote) = (self.source, frame.path.remote);
            self.outbox.push(Packet { source, remote, bytes });
        }
    }

    fn receive(&mut self, _now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let count = self.inbox.len().min(32);
        for packet in self.inbox.drain(..count) {
            let (headers, payload) = Headers::parse(&packet.bytes).expect("packets of ours parse");
            let origin = Origin::new(packet.source, packet.remote.ip());
            sink(&RxFrame { origin, headers, payload });
        }
        count
    }

    fn admits(&mut self, _now: Time, _path: &Path, _dest: Qpn, packets: usize) -> usize {
        packets
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }
}

/// One machine.
pub(crate) struct Node {
    pub(crate) endpoint: Endpoint,
    pub(crate) arena: Arena,
    pd: PdId,
    port: Port,
}

/// A pair of completion queues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqs {
    pub(crate) send: CqId,
    pub(crate) recv: CqId,
}

impl Node {
    fn new(index: usize, memory: usize, seed: u64) -> Node {
        let mut endpoint = Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        let pd = endpoint.alloc_pd();
        let source = SocketAddr::from(([10, 0, 0, index as u8 + 1], 4791));
        let port = Port { source, outbox: Vec::new(), inbox: VecDeque::new() };
        Node { endpoint, arena: Arena::new(memory), pd, port }
    }

    pub(crate) fn register(&mut self, bytes: u64, access: Access) -> MemoryRegion {
        let addr = self.arena.take(bytes);
        let region = self.endpoint.register(self.pd, addr, bytes, access);
        let region = region.expect("the region is sound");
        self.arena.regions.push(region);
        region
    }

    pub(crate) fn deregister(&mut self, region: &MemoryRegion) {
        self.endpoint.deregister(region.lkey).expect("the region exists");
        self.arena.regions.retain(|known| known.lkey != region.lkey);
    }

    pub(crate) fn create_cqs(&mut self, depth: u32) -> Cqs {
        let mut create = || self.endpoint.create_cq(depth).expect("there is room");
        Cqs { send: create(), recv: create() }
    }

    pub(crate) fn create_qp(&mut self, cqs: Cqs, work: u32) -> Qpn {
        let config = QpConfig { recv_cq: cqs.recv, ..QpConfig::rc(self.pd, cqs.send, work, work) };
        self.endpoint.create_qp(config).expect("there is room")
    }
}

/// How often packets are hurt, in per mille.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) loss: u64,
    pub(crate) duplicate: u64,
    pub(crate) reorder: u64,
}

/// The network.
pub(crate) struct Net {
    pub(crate) now: Time,
    pub(crate) nodes: Vec<Node>,
    pub(crate) faults: Faults,
    /// Nothing gets through before this.
    pub(crate) dark_until: Time,
    pub(crate) lost: u64,
    /// How often a sender that finds no receive tries again; 7 is for ever.
    pub(crate) rnr_retry: u8,
    latency: Duration,
    flying: BTreeMap<(Time, u64), Packet>,
    sent: u64,
    draw: Draw,
}

impl Net {
    /// Two nodes with so many bytes of memory each.
    pub(crate) fn new(memory: [usize; 2], seed: u64) -> Net {
        let mut draw = Draw::new(seed);
        let node = |index: usize| Node::new(index, memory[index], draw.word());
        Net {
            now: Time::ZERO,
            nodes: [0, 1].map(node).into(),
            faults: Faults::default(),
            dark_until: Time::ZERO,
            lost: 0,
            rnr_retry: 6,
            latency: Duration::from_micros(draw.within(1..30)),
            flying: BTreeMap::new(),
            sent: 0,
            draw,
        }
    }

    /// A new process on a node: nothing of the old one is left but its packets in flight.
    pub(crate) fn restart(&mut self, index: usize, memory: usize) {
        self.nodes[index] = Node::new(index, memory, self.draw.word());
    }

    /// Connects two queue pairs.
    pub(crate) fn connect(&mut self, ends: [Qpn; 2], mtu: Mtu) {
        for (own, peer) in [(0, 1), (1, 0)] {
            let node = &self.nodes[peer];
            let path = Path::new(node.port.source);
            let psn = node.endpoint.initial_psn(ends[peer]);
            let connect = Connect {
                mtu,
                timeout: 8,
                rnr_retry: self.rnr_retry,
                ..Connect::new(path, ends[peer], psn.expect("the queue pair exists"))
            };
            let endpoint = &mut self.nodes[own].endpoint;
            endpoint.connect(ends[own], &connect).expect("the queue pair is new");
        }
    }

    /// Lets every node send and receive once; whether anything happened.
    pub(crate) fn drain(&mut self) -> bool {
        let mut busy = false;
        for index in 0..self.nodes.len() {
            let Node { endpoint, arena, port, .. } = &mut self.nodes[index];
            busy |= !world::drain(endpoint, port, arena, self.now).is_idle();
            let sent = std::mem::take(&mut port.outbox);
            sent.into_iter().for_each(|packet| self.carry(packet));
        }
        busy
    }

    /// Lets packets fly for a while; nobody polls a completion.
    pub(crate) fn run_for(&mut self, span_ns: u64) {
        let end = self.now + Duration::from_nanos(span_ns);
        loop {
            while self.drain() {}
            match self.next_event() {
                Some(at) if at <= end => self.advance_to(at),
                _ => return self.advance_to(end),
            }
        }
    }

    fn carry(&mut self, packet: Packet) {
        if self.now < self.dark_until || self.draw.chance(self.faults.loss) {
            self.lost += 1;
            return;
        }
        if self.draw.chance(self.faults.duplicate) {
            let late = self.draw.below(300_000);
            self.launch(packet.clone(), late);
        }
        let late = match self.draw.chance(self.faults.reorder) {
            true => self.draw.below(100_000),
            false => 0,
        };
        self.launch(packet, late);
    }

    fn launch(&mut self, packet: Packet, late_ns: u64) {
        self.sent += 1;
        let at = self.now + self.latency + Duration::from_nanos(late_ns);
        self.flying.insert((at, self.sent), packet);
    }

    /// When something happens next.
    pub(crate) fn next_event(&self) -> Option<Time> {
        let arrival = self.flying.keys().next().map(|(at, _)| *at);
        let timeouts = self.nodes.iter().filter_map(|node| node.endpoint.poll_timeout());
        arrival.into_iter().chain(timeouts.map(|(at, _)| at)).min()
    }

    /// Sets the clock, and delivers what has arrived by then.
    pub(crate) fn advance_to(&mut self, now: Time) {
        self.now = self.now.max(now);
        while let Some(entry) = self.flying.first_entry()
            && entry.key().0 <= self.now
        {
            let packet = entry.remove();
            let reached = |node: &&mut Node| node.port.source == packet.remote;
            if let Some(node) = self.nodes.iter_mut().find(reached) {
                node.port.inbox.push_back(packet);
            }
        }
    }
}

/// The earliest of some instants.
pub(crate) fn earliest(instants: impl IntoIterator<Item = Option<Time>>) -> Option<Time> {
    instants.into_iter().flatten().map(Reverse).max().map(|Reverse(at)| at)
}
