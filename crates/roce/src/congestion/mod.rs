//! Congestion control: what a queue pair learns about the network, and how much it may send.
//!
//! | module | what it holds |
//! |---|---|
//! | [`dcqcn`] | a rate from notifications: DCQCN |
//! | [`dctcp`] | a rate from the share of marked packets: DCTCP |
//! | [`timely`] | a rate from the gradient of round-trip times: TIMELY |
//! | [`hpcc`] | a rate and a window from what switches report: HPCC, and HPCC-PINT |
//! | [`advertised`] | a window that the receiver sets: receiver-driven |
//! | [`swift`] | a window from measured delay: Swift |
//! | [`delay`] | the same in the manner of Swift, for shared links: it also competes |
//! | [`watermark`] | a cap on the rate of those that lack other signals, from the buffers of switches |
//! | [`fixed`] | a rate that does not adapt, or none |
//! | [`pacer`] | the time of the next packet at a rate; the distance of notifications |
//! | [`rtt`] | round-trip times: smoothed, and counted |
//!
//! A [`Controller`] is a state machine per queue pair without a clock. It takes [`Event`]s and
//! returns [`Limits`]: a rate, a window, or both. [`CongestionControl`] selects the algorithm of a
//! queue pair, each with its parameters; where sources differ, the name says whose they are.

pub mod advertised;
pub mod dcqcn;
pub mod dctcp;
pub mod delay;
pub mod fixed;
pub mod hpcc;
pub mod pacer;
mod rounds;
pub mod rtt;
pub mod swift;
pub mod timely;
pub mod watermark;

use core::num::NonZeroU32;

use crate::time::{Duration, Time};
use crate::wire::telemetry::{Form, Report};
pub use advertised::{Advertised, AdvertisedParams};
pub use dcqcn::{Dcqcn, DcqcnParams};
pub use dctcp::{Dctcp, DctcpParams};
pub use delay::{Delay, DelayParams, Follows, WindowReport};
use fixed::FixedRate;
pub use hpcc::{Hpcc, HpccParams};
pub use swift::{Swift, SwiftParams};
pub use timely::{Timely, TimelyParams};
pub use watermark::Watermark;

/// Minimum time between two notifications to a peer, unless the parameters set it.
const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// An input of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// Packets have reached the peer.
    Acknowledged {
        /// How many.
        packets: u32,
        /// How many request packets are unacknowledged now.
        in_flight: u32,
        /// Round-trip time of one of them that was sent only once, if it was measured.
        rtt: Option<Duration>,
    },
    /// The peer returned what switches wrote into a packet of ours. The acknowledgement with which
    /// it came follows.
    Telemetry(&'a Report),
    /// The control plane of the network reports the longest queue on the path.
    Watermark(&'a Watermark),
    /// The peer sets our window.
    Advertised {
        /// Packets that may be in flight.
        packets: u32,
    },
    /// Everything that was posted has been acknowledged.
    Idle,
    /// The peer reports that packets of ours were marked: congestion experienced.
    Notified,
    /// Packets were marked lost, or a NAK requested one. For go-back-N each loss counts as one
    /// packet.
    Lost {
        /// How many.
        packets: u32,
    },
    /// The local ACK timeout expired.
    TimedOut,
    /// A packet that congestion control counts has left.
    Sent {
        /// Bytes, IP and UDP headers included.
        bytes: u64,
    },
    /// The time returned by [`Controller::poll_timeout`] has come.
    Timer,
}

/// How much a queue pair may send. `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bits per second, IP and UDP headers included.
    pub rate_bps: Option<u64>,
    /// Request packets in flight, in addition to the queue pair's own window. A window of 0 would
    /// stop the queue pair for ever: nothing in flight, so no event could open it.
    pub window_packets: Option<NonZeroU32>,
}

/// A congestion control algorithm, for one queue pair. Time never goes backwards from call to call.
pub trait Controller {
    /// Something happened at `now`.
    fn handle(&mut self, now: Time, event: Event<'_>);

    /// How much may be sent now.
    fn limits(&self) -> Limits;

    /// When [`Event::Timer`] is wanted next.
    fn poll_timeout(&self) -> Option<Time>;
}

/// The congestion control of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CongestionControl {
    /// None: it sends as fast as its window allows.
    #[default]
    Off,
    /// It sends at this many bits per second, whatever the network says.
    Fixed(u64),
    /// DCQCN.
    Dcqcn(DcqcnParams),
    /// DCTCP as a rate.
    Dctcp(DctcpParams),
    /// TIMELY.
    Timely(TimelyParams),
    /// HPCC, or HPCC-PINT. Both ends must have it: the receiver returns what the switches report.
    Hpcc(HpccParams),
    /// Swift.
    Swift(SwiftParams),
    /// Windows that the receiver advertises. Both ends must have it. It limits the requests of
    /// reliable connections.
    Advertised(AdvertisedParams),
    /// A window from measured delay. It limits the requests of reliable connections; READ responses
    /// are not acknowledged, so their delay is not known.
    Delay(DelayParams),
}

impl CongestionControl {
    /// The names of [`named`](CongestionControl::named).
    pub const NAMES: [&str; 12] = [
        "off",
        "dcqcn-mlnx",
        "dcqcn-paper",
        "dcqcn-uet",
        "dctcp",
        "timely",
        "timely-patched",
        "hpcc",
        "hpcc-pint",
        "swift",
        "advertised",
        "delay",
    ];

    /// The control with this name and its usual parameters, on a link of `line_bps` and paths with
    /// a round-trip time of `base_rtt` without queues.
    pub fn named(name: &str, line_bps: u64, base_rtt: Duration) -> Option<CongestionControl> {
        let dcqcn = DcqcnParams::named(name, line_bps).map(CongestionControl::Dcqcn);
        let timely = TimelyParams::named(name, line_bps).map(CongestionControl::Timely);
        dcqcn.or(timely).or_else(|| match name {
            "off" => Some(CongestionControl::Off),
            "dctcp" => Some(CongestionControl::Dctcp(DctcpParams::new(line_bps, Some(base_rtt)))),
            "hpcc" => Some(CongestionControl::Hpcc(HpccParams::new(line_bps, base_rtt))),
            "hpcc-pint" => Some(CongestionControl::Hpcc(HpccParams::pint(line_bps, base_rtt))),
            "swift" => Some(CongestionControl::Swift(SwiftParams::new(base_rtt))),
            "advertised" => {
                Some(CongestionControl::Advertised(AdvertisedParams::new(line_bps, base_rtt)))
            }
            "delay" => Some(CongestionControl::Delay(DelayParams::DEFAULT)),
            _ => None,
        })
    }

    /// The controller of a queue pair that starts, with full packets of `packet_bytes` and its own
    /// window.
    pub(crate) fn controller(self, packet_bytes: u32, window_packets: u32) -> AnyController {
        match self {
            CongestionControl::Off => AnyController::default(),
            CongestionControl::Fixed(bps) => {
                AnyController::Fixed(FixedRate { rate_bps: Some(bps) })
            }
            CongestionControl::Dcqcn(params) => {
                AnyController::Dcqcn(Dcqcn::new(params, packet_bytes))
            }
            CongestionControl::Dctcp(params) => {
                AnyController::Dctcp(Dctcp::new(params, packet_bytes))
            }
            CongestionControl::Timely(params) => {
                AnyController::Timely(Timely::new(params, packet_bytes))
            }
            CongestionControl::Hpcc(params) => AnyController::Hpcc(Hpcc::new(params, packet_bytes)),
            CongestionControl::Swift(params) => {
                AnyController::Swift(Swift::new(params, packet_bytes, window_packets))
            }
            CongestionControl::Advertised(params) => {
                AnyController::Advertised(Advertised::new(params, packet_bytes))
            }
            CongestionControl::Delay(params) => {
                AnyController::Delay(Delay::new(params, packet_bytes, window_packets))
            }
        }
    }

    /// Minimum time between two notifications to the peer.
    pub(crate) fn cnp_interval(self) -> Duration {
        match self {
            CongestionControl::Dcqcn(params) => params.cnp_interval,
            CongestionControl::Dctcp(_) => DctcpParams::CNP_INTERVAL,
            _ => CNP_INTERVAL,
        }
    }

    /// Whether it needs to hear of every packet: all request acknowledgements, and round-trip times
    /// are measured more than once per round trip.
    pub(crate) fn wants_every_ack(self) -> bool {
        use CongestionControl::{Dctcp, Hpcc, Swift, Timely};
        matches!(self, Dctcp(_) | Hpcc(_) | Swift(_) | Timely(_))
    }

    /// Whether the peer is to be notified of every marked packet.
    pub(crate) fn counts_marks(self) -> bool {
        matches!(self, CongestionControl::Dctcp(_))
    }

    /// What data packets collect from switches, if anything, and that one of so many does.
    /// Acknowledgements return it.
    pub(crate) fn telemetry(self) -> Option<(Form, u32)> {
        match self {
            CongestionControl::Hpcc(params) => Some((params.telemetry, params.sample_one_in)),
            _ => None,
        }
    }
}

/// The first window of a sender that knows nothing of its path: about that of TCP (RFC 6928), and
/// two packets at least. When many senders start together, nothing tells any of them before all of
/// their first windows are in one buffer.
const FIRST_BYTES: u32 = 16 << 10;
const FIRST_PACKETS: u32 = 2;

/// Packets of the first window: a tenth of their bytes may be headers.
fn first_packets(packet_bytes: u32) -> u32 {
    (FIRST_BYTES / 10 * 11 / packet_bytes.max(1)).max(FIRST_PACKETS)
}

/// Rates are given for a link of 25 Gbit/s and grow with the link. None is 0: from there no sender
/// would come back.
const fn scaled(bps_at_25g: u64, line_bps: u64) -> u64 {
    let bps = (bps_at_25g as u128 * line_bps as u128 / 25_000_000_000) as u64;
    if bps > 0 { bps } else { 1 }
}

/// The packets that are in flight at a rate over a path of this round-trip time, rounded up.
fn window_of(rate_bps: u64, rtt: Duration, packet_bytes: u64) -> NonZeroU32 {
    let bits_ns = u128::from(rate_bps) * u128::from(rtt.as_nanos());
    let packets = bits_ns.div_ceil(8_000_000_000 * u128::from(packet_bytes.max(1)));
    NonZeroU32::new(u32::try_from(packets).unwrap_or(u32::MAX)).unwrap_or(NonZeroU32::MIN)
}

/// One of the controllers, without an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AnyController {
    Fixed(FixedRate),
    Dcqcn(Dcqcn),
    Dctcp(Dctcp),
    Timely(Timely),
    Hpcc(Hpcc),
    Swift(Swift),
    Advertised(Advertised),
    Delay(Delay),
}

impl Default for AnyController {
    fn default() -> AnyController {
        AnyController::Fixed(FixedRate::default())
    }
}

impl AnyController {
    /// Whether events change what it says.
    pub(crate) fn is_adaptive(&self) -> bool {
        !matches!(self, AnyController::Fixed(_))
    }

    /// The state of a window that follows the delay.
    pub(crate) fn window_report(&self) -> Option<WindowReport> {
        match self {
            AnyController::Delay(delay) => Some(delay.report()),
            _ => None,
        }
    }

    /// The sender of advertised windows, if it is that.
    pub(crate) fn advertised(&mut self) -> Option<&mut Advertised> {
        match self {
            AnyController::Advertised(advertised) => Some(advertised),
            _ => None,
        }
    }

    /// Times that it began to compete.
    pub(crate) fn competitions(&self) -> u64 {
        match self {
            AnyController::Delay(delay) => delay.competitions(),
            _ => 0,
        }
    }
}

/// Evaluates an expression with the controller, whichever it is.
macro_rules! with_controller {
    ($any:expr, $controller:ident => $body:expr) => {
        match $any {
            AnyController::Fixed($controller) => $body,
            AnyController::Dcqcn($controller) => $body,
            AnyController::Dctcp($controller) => $body,
            AnyController::Timely($controller) => $body,
            AnyController::Hpcc($controller) => $body,
            AnyController::Swift($controller) => $body,
            AnyController::Advertised($controller) => $body,
            AnyController::Delay($controller) => $body,
        }
    };
}

impl Controller for AnyController {
    fn handle(&mut self, now: Time, event: Event<'_>) {
        with_controller!(self, controller => controller.handle(now, event));
    }

    fn limits(&self) -> Limits {
        with_controller!(self, controller => controller.limits())
    }

    fn poll_timeout(&self) -> Option<Time> {
        with_controller!(self, controller => Controller::poll_timeout(controller))
    }
}
