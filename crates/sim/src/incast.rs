//! Many senders, one receiver, one queue: a measurement of congestion control.
//!
//! A first stream has the link to itself; then all others start at the same moment. The results are
//! the queue in front of the receiver, the utilization of the link, and the share of every sender.
//! The timeline is that of a comparison of congestion controls on a 10:1 incast ([`reference()`]):
//! the peak of the queue in the first 2 ms, then its mean and range from 10 to 20 ms after the
//! start.
//!
//! Hosts send one packet at a time, so what waits for a paced or paused link waits in its queue
//! pair.

use alloc::vec::Vec;
use core::fmt;

use ::topology::channels::{Channels, FAR};
use ::topology::graph::Capacity;
use ::topology::routes::{Engine, RouteError};
use ::topology::shape::{Shape, ShapeError};
use controls::{CongestionControl, DcqcnParams, DctcpParams, HpccParams, TimelyParams};
use roce::endpoint::{Connect, EndpointConfig, Mtu};
use roce::{Duration, Time};

use crate::buffer::BufferConfig;
use crate::goodput::per_second;
use crate::graph::{Graph, Vertex};
use crate::link::{LinkConfig, LinkStats, Marking};
use crate::memory::Phantom;
use crate::network::{Collector, Network, NetworkConfig};
use crate::streams::{Stream, StreamError, run_until};
use crate::topology;

/// The parameters of a measurement.
#[derive(Clone, Debug)]
pub struct IncastConfig {
    /// Senders that start together.
    pub senders: u32,
    /// Whether one more sender is active before.
    pub long_flow: bool,
    /// Every link; the queue and its marking are those of switches.
    pub link: LinkConfig,
    /// The delay of the senders' links, where all are joined to one switch.
    pub access_delay: Duration,
    /// The network; `None` for one switch.
    pub shape: Option<Shape>,
    /// The buffer of each switch, shared by its ports; `None` for a queue of its own at each link.
    pub buffer: Option<BufferConfig>,
    /// Who reads the watermarks of switches, if anybody.
    pub watermarks: Option<Collector>,
    /// T of switches that write digests; `None` for [`base_rtt`](IncastConfig::base_rtt).
    pub telemetry_rtt: Option<Duration>,
    /// Path MTU.
    pub mtu: Mtu,
    /// Most unacknowledged packets of a sender.
    pub window_packets: u32,
    /// How long the first stream is alone.
    pub alone: Duration,
    /// From the start of the others to the time in which shares are compared.
    pub settle: Duration,
    /// How long shares are compared.
    pub span: Duration,
    /// Random seed.
    pub seed: u64,
}

impl IncastConfig {
    /// The case of the published comparison: 25 Gbit/s, 1 us links, a buffer of 4 MB, ECN from 100
    /// to 400 kB with 20 %; buffer and marking scale with the rate. All at one switch.
    pub const fn new(senders: u32, gbit: u64) -> IncastConfig {
        let rate = gbit * 1_000_000_000;
        let plain = LinkConfig::new(rate, Duration::from_micros(1));
        IncastConfig {
            senders,
            long_flow: true,
            link: LinkConfig {
                queue_bytes: 160_000 * gbit,
                marking: Some(Marking::dcqcn(rate)),
                ..plain
            },
            access_delay: plain.delay,
            shape: None,
            buffer: None,
            watermarks: None,
            telemetry_rtt: None,
            mtu: Mtu::M1024,
            window_packets: 16_384,
            alone: Duration::from_millis(20),
            settle: Duration::from_millis(20),
            span: Duration::from_millis(80),
            seed: 1,
        }
    }

    /// The same with lossless switches: priority flow control, and the buffer shared by all ports.
    #[must_use]
    pub fn lossless(self) -> IncastConfig {
        let buffer = Some(BufferConfig::lossless(self.link.queue_bytes));
        let link = LinkConfig { queue_bytes: u64::MAX, ..self.link };
        IncastConfig { link, buffer, ..self }
    }
}

impl IncastConfig {
    /// The longest round-trip time of a packet and its acknowledgement without queues, roughly.
    ///
    /// # Errors
    /// When the shape cannot be built.
    pub fn base_rtt(&self) -> Result<Duration, IncastError> {
        let (links, delay) = match &self.shape {
            None => (2, self.link.delay + self.access_delay),
            Some(shape) => {
                let topology = shape.build(self.capacity()).map_err(IncastError::Shape)?;
                let channels = Channels::of(&topology);
                let receiver = channels.end_ports().first().map_or(0, |end| end.switch);
                let far =
                    channels.distances(receiver).into_iter().filter(|&hops| hops != FAR).max();
                let links = u64::from(far.unwrap_or(0)) + 2;
                (links, self.link.delay * links)
            }
        };
        let packet = self.link.serialization(u64::from(self.mtu.bytes()) + 100);
        Ok(delay * 2 + packet * links + self.link.serialization(100) * links)
    }

    fn capacity(&self) -> Capacity {
        Capacity { rate_bps: self.link.rate_bps, delay_ns: self.link.delay.as_nanos() }
    }
}

/// A row of a comparison of congestion controls: what ns-3 measured.
#[derive(Clone, Copy, Debug)]
pub struct Reference {
    /// The control's name.
    pub name: &'static str,
    /// The control with the comparison's parameters.
    pub control: CongestionControl,
    /// Peak queue in the first 2 ms, in bytes.
    pub peak_bytes: u64,
    /// Mean queue from 10 to 20 ms, in bytes.
    pub mean_bytes: u64,
    /// Rate of the link in that time.
    pub wire_bps: u64,
}

/// The case of [`reference()`]: ten senders and a long flow at one switch that pauses, 25 Gbit/s.
pub fn reference_case() -> IncastConfig {
    IncastConfig::new(10, 25).lossless()
}

/// Ten flows that meet a long one, in ns-3.39 with the switches and controls published with HPCC
/// and PowerTCP: ECN from 100 to 400 kB with 20 %, increases of 50 and 100 Mbit/s, DCQCN's timer
/// 900 us, HPCC's eta 0.95 with 5 stages. A window, where there is one, is what the rate sends in
/// 28.96 us: 90.5 kB at line rate.
pub fn reference() -> [Reference; 6] {
    const LINE: u64 = 25_000_000_000;
    const MBIT: u64 = 1_000_000;
    const BASE: Duration = Duration::from_nanos(28_960);
    let dcqcn = DcqcnParams {
        increase_period: Duration::from_micros(900),
        additive_bps: 50 * MBIT,
        hyper_bps: 100 * MBIT,
        min_bps: 100 * MBIT,
        slow_start: false,
        ..DcqcnParams::mlnx(LINE)
    };
    let timely = TimelyParams {
        additive_bps: 50 * MBIT,
        hyper_bps: 100 * MBIT,
        ..TimelyParams::published(LINE)
    };
    let hpcc = HpccParams { additive_bps: 50 * MBIT, max_stage: 5, ..HpccParams::new(LINE, BASE) };
    let window_rtt = Some(BASE);
    let row = |name, control, peak_kb: u64, mean_hundred: u64, wire_10m: u64| Reference {
        name,
        control,
        peak_bytes: 1_000 * peak_kb,
        mean_bytes: 100 * mean_hundred,
        wire_bps: 10 * MBIT * wire_10m,
    };
    use CongestionControl::{Dcqcn, Dctcp, Hpcc, Timely};
    [
        row("dcqcn", Dcqcn(dcqcn), 1_623, 902, 2_472),
        row("dcqcn, window", Dcqcn(DcqcnParams { window_rtt, ..dcqcn }), 687, 1_385, 2_503),
        row("timely", Timely(timely), 2_375, 656, 1_723),
        row("timely, window", Timely(TimelyParams { window_rtt, ..timely }), 1_042, 1_425, 2_507),
        row("dctcp", Dctcp(DctcpParams::new(LINE, window_rtt)), 603, 2_004, 2_503),
        row("hpcc", Hpcc(hpcc), 550, 14, 2_413),
    ]
}

/// The result of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Incast {
    /// Peak queue length in the first 2 ms.
    pub peak_bytes: u64,
    /// Mean queue length from 10 to 20 ms.
    pub mean_bytes: u64,
    /// Minimum and maximum queue length in that time.
    pub range_bytes: (u64, u64),
    /// Bits per second on the receiver's link in that time, framing included.
    pub wire_bps: u64,
    /// Payload bits per second of each sender while shares are compared, the first stream first.
    pub shares_bps: Vec<u64>,
    /// Packets that found the queue full, in all.
    pub dropped: u64,
    /// Packets marked, in all.
    pub marked: u64,
    /// How long links were paused, in all.
    pub paused: Duration,
    /// Congestion notifications sent by the receiver.
    pub notifications: u64,
    /// Events of the simulation.
    pub events: u64,
}

impl Incast {
    /// An equal share of the total.
    pub fn fair_bps(&self) -> u64 {
        let sum: u64 = self.shares_bps.iter().sum();
        sum / (self.shares_bps.len() as u64).max(1)
    }

    /// The sender furthest from its fair share: the deviation, in per mille of it.
    pub fn unfairness_per_mille(&self) -> u64 {
        let fair = self.fair_bps();
        let off = |&share: &u64| share.abs_diff(fair) * 1_000 / fair.max(1);
        self.shares_bps.iter().map(off).max().unwrap_or(0)
    }
}

/// Starts the senders together. `adjust` gets the attributes of every connection, congestion
/// control among them.
///
/// # Errors
/// When a stream ends early because its retries ran out, or cannot be created, and when the shape
/// has no place for all senders.
pub fn measure(
    config: &IncastConfig,
    adjust: impl Fn(&mut Connect),
) -> Result<Incast, IncastError> {
    let mut run = Collision::new(config, adjust)?;
    Ok(run.measure(config)?)
}

/// Why a measurement was not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IncastError {
    /// A stream failed.
    Stream(StreamError),
    /// The shape cannot be built.
    Shape(ShapeError),
    /// It cannot be routed.
    Route(RouteError),
    /// It has too few hosts.
    Hosts {
        /// How many it has.
        there: u32,
        /// How many are needed: one for each stream, and their receiver.
        needed: u32,
    },
}

impl fmt::Display for IncastError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IncastError::Stream(error) => error.fmt(f),
            IncastError::Shape(error) => error.fmt(f),
            IncastError::Route(error) => error.fmt(f),
            IncastError::Hosts { there, needed } => {
                write!(
                    f,
                    "the topology has {there} hosts; receiver, senders and long flow need {needed}"
                )
            }
        }
    }
}

impl core::error::Error for IncastError {}

impl From<StreamError> for IncastError {
    fn from(error: StreamError) -> IncastError {
        IncastError::Stream(error)
    }
}

struct Collision {
    network: Network<Phantom>,
    streams: Vec<Stream>,
    dropped: u64,
    marked: u64,
    paused: Duration,
}

impl Collision {
    fn new(config: &IncastConfig, adjust: impl Fn(&mut Connect)) -> Result<Self, IncastError> {
        let senders = config.senders + u32::from(config.long_flow);
        let mut network = network(config, senders + 1)?;
        let open = |from| {
            Stream::open(&mut network, from, 0, 1 << 20, |connect| {
                connect.mtu = config.mtu;
                connect.window_packets = config.window_packets;
                adjust(connect);
            })
        };
        let streams = (1..=senders).map(open).collect::<Result<Vec<Stream>, StreamError>>()?;
        Ok(Collision { network, streams, dropped: 0, marked: 0, paused: Duration::ZERO })
    }

    fn measure(&mut self, config: &IncastConfig) -> Result<Incast, StreamError> {
        let first = usize::from(config.long_flow);
        let start = Time::ZERO + config.alone;
        run_until(&mut self.network, &mut self.streams[..first], start)?;
        let peak = self.window(start, Duration::from_millis(2))?;
        self.run(start + Duration::from_millis(10))?;
        let busy = self.window(self.network.now(), Duration::from_millis(10))?;
        self.run(start + config.settle)?;
        let before = self.arrived();
        self.run(start + config.settle + config.span)?;
        let shares = self.arrived().into_iter().zip(before);
        let shares_bps = shares.map(|(now, then)| per_second(8 * (now - then), config.span));
        self.keep_counts();
        Ok(Incast {
            peak_bytes: peak.peak_bytes,
            mean_bytes: busy.mean_bytes(),
            range_bytes: (busy.least_bytes, busy.peak_bytes),
            wire_bps: busy.rate_bps(),
            shares_bps: shares_bps.collect(),
            dropped: self.dropped,
            marked: self.marked,
            paused: self.paused,
            notifications: self.notifications(),
            events: self.network.events_handled(),
        })
    }

    fn run(&mut self, until: Time) -> Result<(), StreamError> {
        run_until(&mut self.network, &mut self.streams, until)
    }

    /// Statistics of the receiver's link in the `span` from `start` on.
    fn window(&mut self, start: Time, span: Duration) -> Result<LinkStats, StreamError> {
        self.keep_counts();
        self.run(start + span)?;
        Ok(self.network.ingress_stats(0))
    }

    /// Adds to the totals, and resets the statistics of all links.
    fn keep_counts(&mut self) {
        let stats = self.network.ingress_stats(0);
        self.marked += stats.marked;
        self.dropped += self.network.queue_drops();
        self.paused = self.paused + self.network.paused();
        self.network.restart_stats();
    }

    fn arrived(&self) -> Vec<u64> {
        self.streams.iter().map(|stream| stream.arrived(&self.network)).collect()
    }

    fn notifications(&self) -> u64 {
        let senders = 1..self.network.len();
        senders.map(|node| self.network.node(node).endpoint.counters().cnps_received).sum()
    }
}

fn network(config: &IncastConfig, nodes: u32) -> Result<Network<Phantom>, IncastError> {
    let network = NetworkConfig {
        endpoint: EndpointConfig {
            max_qps: 1 << 10,
            max_regions: 1 << 10,
            ..EndpointConfig::default()
        },
        buffer: config.buffer,
        watermarks: config.watermarks,
        telemetry_rtt: config.telemetry_rtt.map_or_else(|| config.base_rtt(), Ok)?,
        nic_packets: Some(1),
        ..NetworkConfig::new(graph(config, nodes)?, config.seed)
    };
    Ok(Network::new(&network, |_| Phantom))
}

fn graph(config: &IncastConfig, nodes: u32) -> Result<Graph, IncastError> {
    let delay = config.link.delay;
    let Some(shape) = &config.shape else {
        // The first node is the receiver.
        let near = LinkConfig { queue_bytes: 1 << 30, marking: None, ..config.link };
        let join = |graph: Graph, node| {
            let delay = if node == 0 { delay } else { config.access_delay };
            let (up, down) = (near.with_delay(delay), config.link.with_delay(delay));
            graph.join(Vertex::Node(node), Vertex::Switch(0), up, down)
        };
        return Ok((0..nodes).fold(Graph::new(nodes, 1), join));
    };
    let topology = shape.build(config.capacity()).map_err(IncastError::Shape)?;
    let there = topology.hosts().count() as u32;
    if there < nodes {
        return Err(IncastError::Hosts { there, needed: nodes });
    }
    let channels = Channels::of(&topology);
    let tables = Engine::Balanced.route(&topology, &channels).map_err(IncastError::Route)?;
    Ok(topology::graph(&topology, &channels, &tables, config.link))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_alone_fill_the_queue_and_nothing_more() {
        let span = Duration::from_millis(10);
        // Two senders with 64 packets in flight each: all but what the links hold is queued.
        let config = IncastConfig {
            long_flow: false,
            alone: Duration::ZERO,
            window_packets: 64,
            span,
            ..IncastConfig::new(2, 25)
        };
        let got = measure(&config, |_| {}).unwrap();
        assert_eq!(got.dropped, 0);
        assert!((100_000..140_000).contains(&got.mean_bytes), "{got:?}");
        assert!(got.wire_bps > 24_900_000_000, "{got:?}");
        assert!(got.unfairness_per_mille() < 20, "{got:?}");
    }
}
