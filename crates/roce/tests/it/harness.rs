//! A deterministic fabric for endpoints: virtual time, real bytes, seeded faults.
//!
//! Nodes run the product's own drain loop. Every packet is encoded, given an ICRC over a simulated
//! IP header, carried as bytes, damaged as the seed says, and decoded on the other side. Two rules
//! are checked on every access rather than by a test: memory outside registered regions panics
//! (C3), and time only moves when every endpoint is idle.
//!
//! Nothing in here knows what the programs on top do; see `rc_chaos` for that.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use roce::endpoint::{Connect, Endpoint, EndpointConfig, QpConfig};
use roce::verbs::{Access, Completion, CqId, MemoryRegion, PdId, Qpn, SrqId, Verbs};
use roce::wire::icrc::{self, Icrc, Pseudo};
use roce::wire::{Headers, ROCE_PORT};
use roce::world::{self, AtomicOp, Memory, MemoryKind, Origin, Path, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};

/// SplitMix64; the tests' only source of chance.
#[derive(Clone, Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// A node's memory. Addresses start high, so that offsets mistaken for addresses are caught.
pub(crate) struct Arena {
    pub(crate) bytes: Vec<u8>,
    registered: Vec<MemoryRegion>,
    /// Carries out every atomic twice: a broken memory that the history checker must notice.
    pub(crate) doubles_atomics: bool,
}

/// First address of every arena.
pub(crate) const BASE: u64 = 0x7f00_0000_0000;

impl Arena {
    fn new(len: usize, draw: &mut Draw) -> Arena {
        let mut bytes = vec![0; len];
        draw.fill(&mut bytes);
        Arena { bytes, registered: Vec::new(), doubles_atomics: false }
    }

    /// The bytes at `addr`, registered or not.
    pub(crate) fn peek(&self, addr: u64, len: usize) -> &[u8] {
        let at = (addr - BASE) as usize;
        &self.bytes[at..at + len]
    }

    pub(crate) fn poke(&mut self, addr: u64, bytes: &[u8]) {
        let at = (addr - BASE) as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn assert_registered(&self, addr: u64, len: usize) {
        let end = addr + len as u64;
        let inside = |region: &MemoryRegion| region.addr <= addr && end <= region.addr + region.len;
        assert!(
            self.registered.iter().any(inside),
            "C3: {len} bytes at {addr:#x} are not in a registered region"
        );
    }
}

impl Arena {
    /// Registered bytes.
    pub(crate) fn bytes(&self, addr: u64, len: usize) -> &[u8] {
        self.assert_registered(addr, len);
        self.peek(addr, len)
    }

    /// Registered bytes, to be written.
    pub(crate) fn bytes_mut(&mut self, addr: u64, len: usize) -> &mut [u8] {
        self.assert_registered(addr, len);
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

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        assert!(addr.is_multiple_of(8), "an atomic at {addr:#x}");
        let original = op.apply_to(self.bytes_mut(addr, 8));
        if self.doubles_atomics {
            let twice = op.apply(op.apply(original));
            self.bytes_mut(addr, 8).copy_from_slice(&twice.to_ne_bytes());
        }
        original
    }
}

/// A packet on its way.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) source: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) pseudo: Pseudo,
    /// UDP payload: BTH to ICRC.
    pub(crate) bytes: Vec<u8>,
    /// A fault changed the bytes.
    pub(crate) damaged: bool,
}

/// A node's wire: what it sent, what reached it, and what it refused.
pub(crate) struct Port {
    source: SocketAddr,
    next_id: u16,
    /// Most packets per `receive`.
    batch: usize,
    outbox: Vec<Datagram>,
    inbox: VecDeque<Datagram>,
    /// Damaged packets that the ICRC or the parser refused.
    pub(crate) refused: u64,
    /// Damaged packets that came through: the damage was where nothing is covered.
    pub(crate) harmless: u64,
    /// Turns a bit of every n-th payload after the ICRC was checked, if not 0: a broken wire that
    /// the history checker must notice.
    pub(crate) corrupt_every: u64,
    accepted: u64,
    /// The node that lets its packets lie unread.
    pub(crate) stalled: Option<IpAddr>,
}

impl Port {
    fn pseudo(&mut self, remote: SocketAddr) -> Pseudo {
        let (src_port, dst_port) = (self.source.port(), remote.port());
        self.next_id = self.next_id.wrapping_add(1);
        match (self.source.ip(), remote.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let id = self.next_id;
                Pseudo::V4 { src, dst, id, dont_fragment: true, src_port, dst_port }
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => Pseudo::V6 { src, dst, src_port, dst_port },
            mixed => panic!("addresses of different families: {mixed:?}"),
        }
    }
}

/// A whole UDP payload: headers, payload, pad and ICRC.
pub(crate) fn encode(pseudo: &Pseudo, header: &[u8], payload: &[&[u8]], pad: u8) -> Vec<u8> {
    let len = header.len() + payload.iter().map(|p| p.len()).sum::<usize>() + usize::from(pad) + 4;
    let mut icrc = Icrc::new(pseudo, len);
    icrc.headers(header);
    let mut bytes = header.to_vec();
    for piece in payload.iter().copied().chain([&[0; 3][..usize::from(pad)]]) {
        icrc.update(piece);
        bytes.extend_from_slice(piece);
    }
    bytes.extend_from_slice(&icrc.finish());
    bytes
}

impl Wire for Port {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        for frame in frames {
            let remote = frame.path.remote;
            let pseudo = self.pseudo(remote);
            let mut payload = Vec::new();
            frame.payload.append_to(&mut payload, memory);
            let bytes = encode(&pseudo, &frame.header, &[&payload], frame.pad);
            assert_eq!(bytes.len(), frame.udp_payload_len());
            let source = self.source;
            self.outbox.push(Datagram { source, remote, pseudo, bytes, damaged: false });
        }
    }

    fn receive(&mut self, _now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let count = self.batch.min(self.inbox.len());
        for datagram in self.inbox.drain(..count) {
            let parsed = icrc::verify(&datagram.pseudo, &datagram.bytes)
                .then(|| Headers::parse(&datagram.bytes))
                .and_then(Result::ok);
            let Some((headers, payload)) = parsed else {
                assert!(datagram.damaged, "a packet of ours was refused: {datagram:02x?}");
                self.refused += 1;
                continue;
            };
            self.harmless += u64::from(datagram.damaged);
            self.accepted += 1;
            let mut payload = payload.to_vec();
            if self.corrupt_every > 0 && self.accepted.is_multiple_of(self.corrupt_every) {
                payload.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            }
            let source = datagram.source;
            let origin = Origin::new(source, datagram.remote.ip());
            sink(&RxFrame { origin, headers, payload: &payload });
        }
        count
    }

    fn admits(&mut self, _now: Time, _path: &Path, _dest: Qpn, packets: usize) -> usize {
        packets
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    fn is_stalled(&mut self, path: &Path, _dest: Qpn) -> bool {
        self.stalled == Some(path.remote.ip())
    }
}

/// One machine.
pub(crate) struct Node {
    pub(crate) endpoint: Endpoint,
    pub(crate) arena: Arena,
    pub(crate) port: Port,
    pub(crate) pd: PdId,
}

impl Node {
    pub(crate) fn register(&mut self, addr: u64, len: u64, access: Access) -> MemoryRegion {
        self.register_in(self.pd, addr, len, access)
    }

    pub(crate) fn register_in(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> MemoryRegion {
        let region = self.endpoint.register(pd, addr, len, access).unwrap();
        self.arena.registered.push(region);
        region
    }

    /// Registers bytes that work requests and the peer address from `addr` on.
    pub(crate) fn register_at(
        &mut self,
        addr: u64,
        len: u64,
        backing: u64,
        access: Access,
    ) -> MemoryRegion {
        let region = self.endpoint.register_at(self.pd, addr, len, backing, access).unwrap();
        self.arena.registered.push(MemoryRegion { addr: backing, ..region });
        region
    }

    pub(crate) fn deregister(&mut self, region: MemoryRegion) {
        self.endpoint.deregister(region.lkey).unwrap();
        self.arena.registered.retain(|known| known.lkey != region.lkey);
    }

    pub(crate) fn completions(&mut self, cq: CqId) -> Vec<Completion> {
        std::iter::from_fn(|| self.endpoint.poll_cq(cq)).collect()
    }

    pub(crate) fn ip(&self) -> IpAddr {
        self.port.source.ip()
    }

    /// A path to this node.
    pub(crate) fn path(&self) -> Path {
        Path::new(SocketAddr::new(self.ip(), ROCE_PORT))
    }
}

/// Faults by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Loss,
    Duplicate,
    Reorder,
    Delay,
    Corrupt,
    Truncate,
}

impl Fault {
    pub(crate) const ALL: [Fault; 6] = [
        Fault::Loss,
        Fault::Duplicate,
        Fault::Reorder,
        Fault::Delay,
        Fault::Corrupt,
        Fault::Truncate,
    ];
}

/// How likely each fault is, in per mille of packets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FaultMix([u64; 6]);

impl FaultMix {
    /// Each kind is there or not, and if it is, rare or frequent.
    pub(crate) fn draw(draw: &mut Draw, severity: u64) -> FaultMix {
        FaultMix(std::array::from_fn(|_| match draw.chance(500) {
            true => severity * draw.pick(&[2, 5, 10, 20, 40]),
            false => 0,
        }))
    }

    pub(crate) fn only(fault: Fault, per_mille: u64) -> FaultMix {
        let mut mix = FaultMix::default();
        mix.0[fault as usize] = per_mille;
        mix
    }
}

/// Counts by kind of fault.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FaultCounts(pub [u64; 6]);

impl FaultCounts {
    pub(crate) fn add(&mut self, other: FaultCounts) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum += more);
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl fmt::Display for FaultCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Fault::ALL.iter().try_for_each(|&fault| write!(f, "{fault:?}={} ", self.0[fault as usize]))
    }
}

#[derive(Debug)]
struct Arrival {
    at: Time,
    /// Sending order: packets that arrive together arrive as they were sent.
    order: u64,
    node: usize,
    datagram: Datagram,
}

impl PartialEq for Arrival {
    fn eq(&self, other: &Arrival) -> bool {
        self.order == other.order
    }
}

impl Eq for Arrival {}

impl PartialOrd for Arrival {
    fn partial_cmp(&self, other: &Arrival) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Arrival {
    fn cmp(&self, other: &Arrival) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Looks at a packet before any fault, and drops it by returning false.
pub(crate) type Filter = Box<dyn FnMut(&Datagram, &Headers) -> bool>;

/// Nodes and the network between them.
pub(crate) struct Fabric {
    pub(crate) now: Time,
    pub(crate) nodes: Vec<Node>,
    pub(crate) mix: FaultMix,
    pub(crate) injected: FaultCounts,
    pub(crate) filter: Option<Filter>,
    /// Every packet that was sent, if wanted.
    pub(crate) trace: Option<Vec<Headers>>,
    latency: Duration,
    stopped: Option<usize>,
    flying: BinaryHeap<Reverse<Arrival>>,
    sent: u64,
    draw: Draw,
}

/// How a fabric is built.
pub(crate) struct FabricConfig {
    pub(crate) nodes: usize,
    pub(crate) arena_bytes: usize,
    pub ipv6: bool,
    pub(crate) batch: usize,
    pub(crate) latency: Duration,
    pub(crate) endpoint: EndpointConfig,
    pub(crate) seed: u64,
}

impl Default for FabricConfig {
    fn default() -> FabricConfig {
        FabricConfig {
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

impl Fabric {
    pub(crate) fn new(config: &FabricConfig) -> Fabric {
        let mut draw = Draw::new(config.seed);
        let nodes = (0..config.nodes).map(|index| new_node(config, index, &mut draw)).collect();
        Fabric {
            now: Time::ZERO,
            nodes,
            mix: FaultMix::default(),
            injected: FaultCounts::default(),
            filter: None,
            trace: None,
            latency: config.latency,
            stopped: None,
            flying: BinaryHeap::new(),
            sent: 0,
            draw,
        }
    }

    /// Stops a node as SIGSTOP does, or lets all run: what arrives there lies unread, and the others'
    /// wires see that.
    pub(crate) fn stop(&mut self, node: Option<usize>) {
        self.stopped = node;
        let ip = node.map(|node| self.nodes[node].ip());
        self.nodes.iter_mut().for_each(|node| node.port.stalled = ip);
    }

    /// Lets every endpoint do all it can at this instant.
    pub(crate) fn settle(&mut self) {
        loop {
            let mut idle = true;
            let stopped = self.stopped;
            for node in (0..self.nodes.len()).filter(|&node| Some(node) != stopped) {
                let Node { endpoint, arena, port, .. } = &mut self.nodes[node];
                idle &= world::drain(endpoint, port, arena, self.now).is_idle();
                let sent = std::mem::take(&mut port.outbox);
                sent.into_iter().for_each(|datagram| self.carry(datagram));
            }
            if idle {
                return;
            }
        }
    }

    /// Moves time to whatever comes next; false when nothing will.
    pub(crate) fn advance(&mut self) -> bool {
        self.settle();
        let Some(next) = self.next_event() else {
            return false;
        };
        assert!(next >= self.now, "time went backwards");
        self.now = next;
        while let Some(Reverse(arrival)) = self.flying.peek()
            && arrival.at <= self.now
            && let Some(Reverse(arrival)) = self.flying.pop()
        {
            self.nodes[arrival.node].port.inbox.push_back(arrival.datagram);
        }
        self.settle();
        true
    }

    fn next_event(&self) -> Option<Time> {
        let arrival = self.flying.peek().map(|Reverse(arrival)| arrival.at);
        let running = self.nodes.iter().enumerate().filter(|(node, _)| Some(*node) != self.stopped);
        let timeouts = running.filter_map(|(_, node)| node.endpoint.poll_timeout());
        arrival.into_iter().chain(timeouts.map(|(at, _)| at)).min().map(|at| at.max(self.now))
    }

    /// Runs until nothing is left to happen; at most `steps` events.
    pub(crate) fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            if !self.advance() {
                return;
            }
        }
        panic!("still busy after {steps} events at {}", self.now);
    }

    /// Runs until `until`, then sets the clock to it.
    pub(crate) fn run_until(&mut self, until: Time) {
        self.settle();
        while self.next_event().is_some_and(|next| next <= until) {
            self.advance();
        }
        self.now = until;
        self.settle();
    }

    fn carry(&mut self, datagram: Datagram) {
        let (headers, _) = Headers::parse(&datagram.bytes).unwrap();
        if let Some(trace) = &mut self.trace {
            trace.push(headers);
        }
        if self.filter.as_mut().is_some_and(|keep| !keep(&datagram, &headers)) {
            return;
        }
        if self.strikes(Fault::Loss) {
            return;
        }
        if self.strikes(Fault::Duplicate) {
            let delay = Duration::from_nanos(self.draw.below(200_000));
            self.launch(datagram.clone(), delay);
        }
        let mut delay = Duration::ZERO;
        if self.strikes(Fault::Reorder) {
            delay = Duration::from_nanos(self.draw.below(20_000));
        }
        if self.strikes(Fault::Delay) {
            delay = Duration::from_nanos(self.draw.below(20_000_000));
        }
        let damaged = self.damage(datagram);
        self.launch(damaged, delay);
    }

    fn damage(&mut self, mut datagram: Datagram) -> Datagram {
        if self.strikes(Fault::Corrupt) {
            let bit = self.draw.below(datagram.bytes.len() as u64 * 8) as usize;
            datagram.bytes[bit / 8] ^= 1 << (bit % 8);
            datagram.damaged = true;
        }
        if self.strikes(Fault::Truncate) {
            let len = self.draw.below(datagram.bytes.len() as u64) as usize;
            datagram.bytes.truncate(len);
            datagram.damaged = true;
        }
        datagram
    }

    fn strikes(&mut self, fault: Fault) -> bool {
        let strikes = self.draw.chance(self.mix.0[fault as usize]);
        self.injected.0[fault as usize] += u64::from(strikes);
        strikes
    }

    fn launch(&mut self, datagram: Datagram, delay: Duration) {
        let target = datagram.remote.ip();
        let at = self.now + self.latency + delay;
        for (node, there) in self.nodes.iter().enumerate() {
            // Group traffic reaches every node, and what it does not want is its own business.
            let is_group = target.is_multicast() && there.ip() != datagram.source.ip();
            if there.ip() == target || is_group {
                self.sent += 1;
                let datagram = datagram.clone();
                self.flying.push(Reverse(Arrival { at, order: self.sent, node, datagram }));
            }
        }
    }
}

fn new_node(config: &FabricConfig, index: usize, draw: &mut Draw) -> Node {
    let host = index as u8 + 1;
    let ip = if config.ipv6 {
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host.into()))
    } else {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, host))
    };
    let seed = draw.word();
    let mut endpoint = Endpoint::new(EndpointConfig { seed, ..config.endpoint });
    let pd = endpoint.alloc_pd();
    let port = Port {
        source: SocketAddr::new(ip, 0xc000 + u16::from(host)),
        next_id: draw.word() as u16,
        batch: config.batch,
        outbox: Vec::new(),
        inbox: VecDeque::new(),
        refused: 0,
        harmless: 0,
        corrupt_every: 0,
        accepted: 0,
        stalled: None,
    };
    Node { endpoint, arena: Arena::new(config.arena_bytes, draw), port, pd }
}

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) node: usize,
    pub(crate) qpn: Qpn,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
}

impl Fabric {
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

    /// Connects two ends; `adjust` sees the attributes of each before they are used.
    pub(crate) fn connect(&mut self, a: End, b: End, adjust: impl Fn(&mut Connect)) {
        for (own, peer) in [(a, b), (b, a)] {
            let remote = &self.nodes[peer.node];
            let remote_psn = remote.endpoint.initial_psn(peer.qpn).unwrap();
            let mut connect = Connect::new(remote.path(), peer.qpn, remote_psn);
            adjust(&mut connect);
            self.nodes[own.node].endpoint.connect(own.qpn, &connect).unwrap();
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
