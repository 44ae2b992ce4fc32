//! Many senders, one receiver, one queue: a measurement of congestion control.
//!
//! A first stream has the link to itself; then all others start at the same moment. The results are the
//! queue in front of the receiver, the utilization of the link, and the share of every sender. The
//! timeline is that of the published comparison of congestion controls on a 10:1 incast: the peak of
//! the queue in the first 2 ms, then its mean and range from 10 to 20 ms after the start.

use alloc::vec::Vec;

use roce::endpoint::{Connect, EndpointConfig, Mtu};
use roce::{Duration, Time};

use crate::fabric::{Fabric, FabricConfig};
use crate::goodput::per_second;
use crate::graph::Graph;
use crate::link::{LinkConfig, LinkStats, Marking};
use crate::memory::Phantom;
use crate::streams::{Stream, StreamError, run_until};

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct IncastConfig {
    /// Senders that start together.
    pub senders: u32,
    /// Whether one more sender is active before.
    pub long_flow: bool,
    /// Every link; the queue and its marking are those of the switch.
    pub link: LinkConfig,
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
    /// The case of the published comparison: 25 Gbit/s, 1 us links, a buffer of 4 MB, ECN from 100 to
    /// 400 kB with 20 %; buffer and marking scale with the rate.
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
            mtu: Mtu::M1024,
            window_packets: 16_384,
            alone: Duration::from_millis(20),
            settle: Duration::from_millis(20),
            span: Duration::from_millis(80),
            seed: 1,
        }
    }
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

/// Starts the senders together. `adjust` gets the attributes of every connection, congestion control
/// among them.
///
/// # Errors
/// When a stream ends early because its retries ran out, or cannot be created.
pub fn measure(
    config: &IncastConfig,
    adjust: impl Fn(&mut Connect),
) -> Result<Incast, StreamError> {
    let mut run = Collision::new(config, adjust)?;
    run.measure(config)
}

struct Collision {
    fabric: Fabric<Phantom>,
    streams: Vec<Stream>,
    dropped: u64,
    marked: u64,
}

impl Collision {
    fn new(config: &IncastConfig, adjust: impl Fn(&mut Connect)) -> Result<Self, StreamError> {
        let senders = config.senders + u32::from(config.long_flow);
        let mut fabric = fabric(config, senders + 1);
        let open = |from| {
            Stream::open(&mut fabric, from, 0, 1 << 20, |connect| {
                connect.mtu = config.mtu;
                connect.window_packets = config.window_packets;
                adjust(connect);
            })
        };
        let streams = (1..=senders).map(open).collect::<Result<Vec<Stream>, StreamError>>()?;
        Ok(Collision { fabric, streams, dropped: 0, marked: 0 })
    }

    fn measure(&mut self, config: &IncastConfig) -> Result<Incast, StreamError> {
        let first = usize::from(config.long_flow);
        let start = Time::ZERO + config.alone;
        run_until(&mut self.fabric, &mut self.streams[..first], start)?;
        let peak = self.window(start, Duration::from_millis(2))?;
        self.run(start + Duration::from_millis(10))?;
        let busy = self.window(self.fabric.now(), Duration::from_millis(10))?;
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
            notifications: self.notifications(),
            events: self.fabric.events_handled(),
        })
    }

    fn run(&mut self, until: Time) -> Result<(), StreamError> {
        run_until(&mut self.fabric, &mut self.streams, until)
    }

    /// Statistics of the receiver's link in the `span` from `start` on.
    fn window(&mut self, start: Time, span: Duration) -> Result<LinkStats, StreamError> {
        self.keep_counts();
        self.run(start + span)?;
        Ok(self.fabric.ingress_stats(0))
    }

    /// Adds to the totals, and resets the statistics of all links.
    fn keep_counts(&mut self) {
        let stats = self.fabric.ingress_stats(0);
        self.marked += stats.marked;
        self.dropped += self.fabric.queue_drops();
        self.fabric.restart_stats();
    }

    fn arrived(&self) -> Vec<u64> {
        self.streams.iter().map(|stream| stream.arrived(&self.fabric)).collect()
    }

    fn notifications(&self) -> u64 {
        let senders = 1..self.fabric.len();
        senders.map(|node| self.fabric.node(node).endpoint.counters().cnps_received).sum()
    }
}

fn fabric(config: &IncastConfig, nodes: u32) -> Fabric<Phantom> {
    let plain = LinkConfig { queue_bytes: 1 << 30, marking: None, ..config.link };
    let fabric = FabricConfig {
        endpoint: EndpointConfig {
            max_qps: 1 << 10,
            max_regions: 1 << 10,
            ..EndpointConfig::default()
        },
        ..FabricConfig::new(Graph::star(nodes, plain, config.link), config.seed)
    };
    Fabric::new(&fabric, |_| Phantom)
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
