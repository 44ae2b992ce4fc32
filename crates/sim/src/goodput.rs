//! Goodput of one stream over a link that loses packets.
//!
//! Two nodes, one cable, continuous WRITEs in one direction. Packets of both directions are lost at
//! random, independently. Goodput is payload delivered per second, after a warm-up; duplicates do
//! not count.

use roce::endpoint::{Connect, EndpointConfig, Mtu, Reliability};
use roce::{Duration, Time};

use crate::faults::{Fault, FaultMix};
use crate::graph::Graph;
use crate::link::LinkConfig;
use crate::memory::Phantom;
use crate::network::{Network, NetworkConfig};
use crate::streams::{Stream, StreamError, run_until};

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct GoodputConfig {
    /// Of the cable, each way.
    pub link: LinkConfig,
    /// Packets lost, in parts per million.
    pub loss_ppm: u32,
    /// Path MTU.
    pub mtu: Mtu,
    /// The loss recovery mode.
    pub reliability: Reliability,
    /// Most unacknowledged packets.
    pub window_packets: u32,
    /// ACK timeout code: 4.096 us * 2^n.
    pub timeout: u8,
    /// Bytes per WRITE.
    pub message_bytes: u64,
    /// Time before measuring.
    pub warm_up: Duration,
    /// Time measured.
    pub span: Duration,
    /// Random seed.
    pub seed: u64,
}

impl GoodputConfig {
    /// The case of the documents: 100 Gbit/s, 10 us each way, MTU 4096, messages of 1 MiB, and the
    /// default window of each mode.
    pub const fn new(reliability: Reliability, loss_ppm: u32) -> GoodputConfig {
        GoodputConfig {
            link: LinkConfig::new(100_000_000_000, Duration::from_micros(10)),
            loss_ppm,
            mtu: Mtu::M4096,
            reliability,
            window_packets: 256,
            timeout: 6,
            message_bytes: 1 << 20,
            warm_up: Duration::from_millis(2),
            span: Duration::from_millis(20),
            seed: 1,
        }
    }
}

/// The result of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goodput {
    /// Payload delivered, in bits per second.
    pub goodput_bps: u64,
    /// Bits per second on the cable, framing and retransmissions included.
    pub wire_bps: u64,
    /// Packets sent, retransmissions included.
    pub packets: u64,
    /// Request packets retransmitted.
    pub retransmitted: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Events of the simulation.
    pub events: u64,
}

/// Measures one stream.
///
/// # Errors
/// When the stream ends early because its retries ran out, or cannot be created.
pub fn measure(config: &GoodputConfig) -> Result<Goodput, StreamError> {
    let mut network = network(config);
    let stream = Stream::open(&mut network, 0, 1, config.message_bytes, |connect| {
        *connect = Connect {
            mtu: config.mtu,
            timeout: config.timeout,
            window_packets: config.window_packets,
            reliability: config.reliability,
            ..connect.clone()
        };
    })?;
    let mut streams = [stream];
    network.mix = FaultMix::NONE.with(Fault::Loss, config.loss_ppm);
    let begin = Time::ZERO + config.warm_up;
    run_until(&mut network, &mut streams, begin)?;
    let before = streams[0].arrived(&network);
    network.restart_stats();
    run_until(&mut network, &mut streams, begin + config.span)?;
    let bytes = streams[0].arrived(&network) - before;
    let counters = *network.node(0).endpoint.counters();
    Ok(Goodput {
        goodput_bps: per_second(8 * bytes, config.span),
        wire_bps: network.ingress_stats(1).rate_bps(),
        packets: counters.packets_sent,
        retransmitted: counters.retransmitted_packets,
        timeouts: counters.timeouts,
        events: network.events_handled(),
    })
}

fn network(config: &GoodputConfig) -> Network<Phantom> {
    let network = NetworkConfig {
        endpoint: EndpointConfig { max_qps: 16, max_regions: 16, ..EndpointConfig::default() },
        ..NetworkConfig::new(Graph::cable(config.link), config.seed)
    };
    Network::new(&network, |_| Phantom)
}

/// `amount` in `span`, per second.
pub(crate) fn per_second(amount: u64, span: Duration) -> u64 {
    (u128::from(amount) * 1_000_000_000 / u128::from(span.as_nanos().max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(loss_ppm: u32) -> GoodputConfig {
        let span = Duration::from_millis(3);
        GoodputConfig { span, ..GoodputConfig::new(Reliability::GoBackN, loss_ppm) }
    }

    #[test]
    fn without_loss_the_link_is_full() {
        let got = measure(&short(0)).unwrap();
        // 4096 bytes of payload travel in 4174: headers of 12 to 28, ICRC, UDP, IP, Ethernet.
        let share = got.goodput_bps * 1_000 / 100_000_000_000;
        assert!((970..=982).contains(&share), "{got:?}");
        assert!(got.wire_bps > 99_500_000_000, "{got:?}");
        assert_eq!((got.retransmitted, got.timeouts), (0, 0));
    }

    #[test]
    fn loss_costs_go_back_n_dearly_and_repeats_exactly() {
        let first = measure(&short(10_000)).unwrap();
        assert!(first.goodput_bps < 60_000_000_000 && first.retransmitted > 100, "{first:?}");
        assert_eq!(measure(&short(10_000)).unwrap(), first);
    }
}
