//! Streams that share a slow link with each other, and with a TCP flow.
//!
//! All senders are joined to one switch, and its link to the receiver is the bottleneck. The TCP
//! flow is a reference sender of its own: slow start and CUBIC (RFC 9438), lost packets detected by
//! three later ones, a retransmission timeout. Its packets are datagrams of the size of the
//! streams' packets; what it would send again it sends as new packets.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use roce::device;
use roce::endpoint::{Connect, QpConfig};
use roce::verbs::{Access, CqId, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, Transport, VerbsError};
use roce::{Duration, Time};

use crate::faults::{Fault, FaultMix};
use crate::goodput::per_second;
use crate::graph::Graph;
use crate::link::LinkConfig;
use crate::memory::Phantom;
use crate::network::{Network, NetworkConfig};
use crate::streams::{Stream, StreamError};

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct NeighbourConfig {
    /// RDMA streams.
    pub streams: u32,
    /// Whether a TCP flow joins them.
    pub with_tcp: bool,
    /// Whether TCP starts first; otherwise it is the last.
    pub is_tcp_first: bool,
    /// When each sender starts after the one before.
    pub stagger: Duration,
    /// The bottleneck, with its buffer.
    pub link: LinkConfig,
    /// Packets lost on their way to the switch, and back, in parts per million.
    pub loss_ppm: u32,
    /// Time before measuring.
    pub warm_up: Duration,
    /// Time measured.
    pub span: Duration,
    /// Random seed.
    pub seed: u64,
}

impl NeighbourConfig {
    /// A link of `mbit` Mbit/s that holds `buffer_ms` milliseconds of packets.
    pub const fn new(streams: u32, mbit: u64, buffer_ms: u64) -> NeighbourConfig {
        let link = LinkConfig::new(mbit * 1_000_000, Duration::from_micros(50));
        NeighbourConfig {
            streams,
            with_tcp: false,
            is_tcp_first: false,
            stagger: Duration::from_millis(10),
            link: LinkConfig { queue_bytes: mbit * 125 * buffer_ms, ..link },
            loss_ppm: 0,
            warm_up: Duration::from_millis(500),
            span: Duration::from_millis(1_500),
            seed: 1,
        }
    }
}

/// The result of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Neighbours {
    /// Payload of each sender that arrived, in bits per second; TCP last.
    pub shares_bps: Vec<u64>,
    /// Departure rate of the bottleneck in bits per second, framing included.
    pub wire_bps: u64,
    /// Packets that left the bottleneck, since the beginning.
    pub packets: u64,
    /// Packets that found its queue full, since the beginning.
    pub dropped: u64,
    /// Mean length of its queue in bytes.
    pub mean_bytes: u64,
    /// Events of the simulation.
    pub events: u64,
}

impl Neighbours {
    /// The share of one sender in per mille of all.
    pub fn per_mille(&self, sender: usize) -> u64 {
        let sum: u64 = self.shares_bps.iter().sum();
        self.shares_bps.get(sender).copied().unwrap_or(0) * 1_000 / sum.max(1)
    }
}

/// Runs the senders. `adjust` gets the attributes of every connection, congestion control among
/// them.
///
/// # Errors
/// When a stream ends early because its retries ran out, or cannot be created.
pub fn measure(
    config: &NeighbourConfig,
    adjust: impl Fn(&mut Connect),
) -> Result<Neighbours, StreamError> {
    let mut run = Run::new(config, adjust)?;
    let begin = Time::ZERO + config.warm_up;
    run.until(begin)?;
    let early = run.network.ingress_stats(0);
    let before = run.arrived();
    run.network.restart_stats();
    run.until(begin + config.span)?;
    let stats = run.network.ingress_stats(0);
    let shares = run.arrived().into_iter().zip(before);
    Ok(Neighbours {
        shares_bps: shares.map(|(now, then)| per_second(8 * (now - then), config.span)).collect(),
        wire_bps: stats.rate_bps(),
        packets: early.sent_packets + stats.sent_packets,
        dropped: early.dropped + stats.dropped,
        mean_bytes: stats.mean_bytes(),
        events: run.network.events_handled(),
    })
}

struct Run {
    network: Network<Phantom>,
    streams: Vec<Stream>,
    tcp: Option<Tcp>,
    is_tcp_first: bool,
    stagger: Duration,
}

impl Run {
    fn new(config: &NeighbourConfig, adjust: impl Fn(&mut Connect)) -> Result<Run, StreamError> {
        let nodes = 1 + config.streams + u32::from(config.with_tcp);
        let up = LinkConfig::unlimited(config.link.delay);
        let star = Graph::star(nodes, up, config.link);
        let mut network = Network::new(&NetworkConfig::new(star, config.seed), |_| Phantom);
        network.mix = FaultMix::NONE.with(Fault::Loss, config.loss_ppm);
        let open = |from| {
            Stream::open(&mut network, from, 0, 1 << 18, |connect| {
                *connect = connect.selective();
                adjust(connect);
            })
        };
        let streams = (1..=config.streams).map(open).collect::<Result<Vec<Stream>, _>>()?;
        let round_trip = config.link.delay * 2;
        let tcp = config.with_tcp.then(|| Tcp::open(&mut network, nodes - 1, round_trip));
        Ok(Run {
            network,
            streams,
            tcp: tcp.transpose()?,
            is_tcp_first: config.is_tcp_first,
            stagger: config.stagger,
        })
    }

    fn until(&mut self, until: Time) -> Result<(), StreamError> {
        self.network.wake_at(until, 0);
        for sender in 0..=self.streams.len() as u64 {
            self.network.wake_at(Time::ZERO + self.stagger * sender, 0);
        }
        while self.network.now() < until && self.network.advance() {
            let now = self.network.now();
            let started = |place: usize| now >= Time::ZERO + self.stagger * place as u64;
            let (first, tcp_place) = match self.is_tcp_first {
                true => (1, 0),
                false => (0, self.streams.len()),
            };
            for (at, stream) in self.streams.iter_mut().enumerate() {
                let ran = self.network.touched().contains(&stream.from);
                if started(first + at) && (ran || !stream.is_busy()) {
                    stream.turn(&mut self.network)?;
                }
            }
            if let Some(tcp) = self.tcp.as_mut().filter(|_| started(tcp_place)) {
                tcp.turn(&mut self.network)?;
            }
        }
        Ok(())
    }

    fn arrived(&self) -> Vec<u64> {
        let streams = self.streams.iter().map(|stream| stream.arrived(&self.network));
        streams.chain(self.tcp.as_ref().map(|tcp| tcp.arrived)).collect()
    }
}

/// Payload bytes of a datagram.
const SEGMENT: u32 = 1024;

/// Receives posted, and most datagrams on their way.
const DEPTH: u32 = 8_192;

/// The least time without an acknowledgement after which everything counts as lost.
const LEAST_TIMEOUT: Duration = Duration::from_millis(200);

/// The reference sender, and its receiver.
struct Tcp {
    from: u32,
    /// Queue pair and buffer of the sender and of the receiver.
    ends: [(Qpn, Sge); 2],
    received: CqId,
    /// How long acknowledgements take.
    return_delay: Duration,
    arrived: u64,
    next: u32,
    /// Sent and neither acknowledged nor lost, oldest first.
    flying: VecDeque<(u32, Time)>,
    /// Acknowledgements on their way back.
    acks: VecDeque<(Time, u32)>,
    /// Losses of packets before this one belong to the last cut.
    recover: u32,
    window: f64,
    threshold: f64,
    peak: f64,
    epoch: Option<Time>,
    rtt: Duration,
    heard: Time,
    alarm: Time,
}

impl Tcp {
    fn open(
        network: &mut Network<Phantom>,
        from: u32,
        return_delay: Duration,
    ) -> Result<Tcp, VerbsError> {
        let mut made = Vec::new();
        for node in [from, 0] {
            let node = network.node_mut(node);
            let region = node.register(1 << 40, SEGMENT.into(), Access::ALL)?;
            let cq = node.endpoint.create_cq(DEPTH)?;
            let config = QpConfig::rc(node.pd, cq, DEPTH, DEPTH);
            let qpn = node.endpoint.create_qp(QpConfig { transport: Transport::Uc, ..config })?;
            made.push((qpn, cq, Sge { addr: region.addr, len: SEGMENT, lkey: region.lkey }));
        }
        let now = network.now();
        for (own, node, peer, other) in [(0, from, 1, 0), (1, 0, 0, from)] {
            let psn = network.node(other).endpoint.query_qp(made[peer].0)?.sq_psn;
            let local_psn = network.node(node).endpoint.query_qp(made[own].0)?.sq_psn;
            let connect = Connect::new(network.path_to(other), made[peer].0, psn);
            let connect = Connect { local_psn, ..connect };
            device::connect(&mut network.node_mut(node).endpoint, now, made[own].0, &connect)?;
        }
        let mut tcp = Tcp {
            from,
            ends: [(made[0].0, made[0].2), (made[1].0, made[1].2)],
            received: made[1].1,
            return_delay,
            arrived: 0,
            next: 0,
            flying: VecDeque::new(),
            acks: VecDeque::new(),
            recover: 0,
            window: 10.0,
            threshold: f64::MAX,
            peak: 0.0,
            epoch: None,
            rtt: Duration::from_millis(1),
            heard: now,
            alarm: now,
        };
        (0..DEPTH).try_for_each(|_| tcp.post_receive(network))?;
        Ok(tcp)
    }

    fn post_receive(&mut self, network: &mut Network<Phantom>) -> Result<(), VerbsError> {
        let (qpn, sge) = self.ends[1];
        let wr = RecvWr { wr_id: 0, sges: SgList::from_iter([sge]) };
        let now = network.now();
        network.node_quietly(0).endpoint.post_recv(now, qpn, wr)
    }

    fn turn(&mut self, network: &mut Network<Phantom>) -> Result<(), VerbsError> {
        let now = network.now();
        while let Some(done) = network.node_quietly(0).endpoint.poll_cq(self.received) {
            self.arrived += u64::from(done.byte_len);
            let at = now + self.return_delay;
            self.acks.extend(done.imm.map(|number| (at, number)));
            network.wake_at(at, 1);
            self.post_receive(network)?;
        }
        while let Some((_, number)) = self.acks.pop_front_if(|&mut (at, _)| at <= now) {
            self.acknowledged(now, number);
        }
        if !self.flying.is_empty() && now.since(self.heard) > LEAST_TIMEOUT + self.rtt {
            self.flying.clear();
            (self.threshold, self.window, self.epoch) = (self.window / 2.0, 1.0, None);
        }
        if self.alarm <= now {
            self.alarm = now + LEAST_TIMEOUT;
            network.wake_at(self.alarm, 1);
        }
        let (qpn, sge) = self.ends[0];
        while (self.flying.len() as f64) < self.window.min(f64::from(DEPTH / 2)) {
            if self.flying.is_empty() {
                self.heard = now;
            }
            let sges = SgList::from_iter([sge]);
            let op = SendOp::SendImm(self.next);
            let wr = SendWr { op, sges, ..SendWr::default() };
            network.node_mut(self.from).endpoint.post_send(now, qpn, wr)?;
            self.flying.push_back((self.next, now));
            self.next += 1;
        }
        Ok(())
    }

    fn acknowledged(&mut self, now: Time, number: u32) {
        self.heard = now;
        if let Ok(at) = self.flying.binary_search_by_key(&number, |&(number, _)| number)
            && let Some((_, sent_at)) = self.flying.remove(at)
        {
            self.rtt = now - sent_at;
            self.grow(now);
        }
        while let Some((lost, _)) = self.flying.pop_front_if(|&mut (older, _)| older + 3 <= number)
        {
            if lost >= self.recover {
                self.recover = self.next;
                // Fast convergence.
                let is_less = self.window < self.peak;
                self.peak = if is_less { self.window * 0.85 } else { self.window };
                self.window = (self.window * 0.7).max(2.0);
                self.threshold = self.window;
                self.epoch = Some(now);
            }
        }
    }

    fn grow(&mut self, now: Time) {
        if self.window < self.threshold {
            self.window += 1.0;
            return;
        }
        let epoch = *self.epoch.get_or_insert(now);
        let floor = self.threshold.min(self.peak);
        let seconds = (now - epoch).as_nanos() as f64 / 1e9;
        let away =
            seconds + self.rtt.as_nanos() as f64 / 1e9 - cube_root((self.peak - floor) / 0.4);
        let cubic = self.peak + 0.4 * away * away * away;
        let reno = floor + 0.53 * seconds * 1e9 / self.rtt.as_nanos().max(1) as f64;
        let wanted = if cubic > reno { cubic } else { reno };
        if wanted > self.window {
            self.window += ((wanted - self.window) / self.window).min(0.5);
        }
    }
}

/// By bisection, which needs no library.
fn cube_root(value: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1_000.0);
    for _ in 0..50 {
        let middle = (low + high) / 2.0;
        if middle * middle * middle < value {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
