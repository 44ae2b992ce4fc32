//! Congestion control: what a queue pair learns about the network, and how much it may send.
//!
//! | module | what it holds |
//! |---|---|
//! | [`dcqcn`] | a rate from notifications: DCQCN |
//! | [`delay`] | a window from measured delay, in the manner of Swift, that also competes |
//! | [`fixed`] | a rate that does not adapt, or none |
//! | [`pacer`] | the time of the next packet at a rate; the distance of notifications |
//! | [`rtt`] | round-trip times: smoothed, and counted |
//!
//! A [`Controller`] is a state machine per queue pair without a clock. It takes [`Event`]s and returns
//! [`Limits`]: a rate, a window, or both. Delay-based algorithms use [`Event::Acknowledged`]; switch
//! telemetry (INT) would be a field of it, and credits another event. [`CongestionControl`] selects the
//! algorithm of a queue pair.

pub mod dcqcn;
pub mod delay;
pub mod fixed;
pub mod pacer;
pub mod rtt;

use core::num::NonZeroU32;

use crate::time::{Duration, Time};
pub use dcqcn::{Dcqcn, DcqcnParams};
pub use delay::{Delay, DelayParams, Follows, WindowReport};
use fixed::FixedRate;

/// Minimum time between two notifications to a peer, unless the parameters set it.
const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// An input of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Packets have reached the peer.
    Acknowledged {
        /// How many.
        packets: u32,
        /// How many request packets are unacknowledged now.
        in_flight: u32,
        /// Round-trip time of one of them that was sent only once, if it was measured.
        rtt: Option<Duration>,
    },
    /// The peer reports that packets of ours were marked: congestion experienced.
    Notified,
    /// Packets were marked lost, or a NAK requested one. For go-back-N each loss counts as one packet.
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
    /// Request packets in flight, in addition to the queue pair's own window. A window of 0 would stop the
    /// queue pair for ever: nothing in flight, so no event could open it.
    pub window_packets: Option<NonZeroU32>,
}

/// A congestion control algorithm, for one queue pair. Time never goes backwards from call to call.
pub trait Controller {
    /// Something happened at `now`.
    fn handle(&mut self, now: Time, event: Event);

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
    /// A window from measured delay. It limits the requests of reliable connections; READ responses are
    /// not acknowledged, so their delay is not known.
    Delay(DelayParams),
}

impl CongestionControl {
    /// The controller of a queue pair that starts, with full packets of `packet_bytes` and its own window.
    pub(crate) fn controller(self, packet_bytes: u32, window_packets: u32) -> AnyController {
        match self {
            CongestionControl::Off => AnyController::default(),
            CongestionControl::Fixed(bps) => {
                AnyController::Fixed(FixedRate { rate_bps: Some(bps) })
            }
            CongestionControl::Dcqcn(params) => AnyController::Dcqcn(Dcqcn::new(params)),
            CongestionControl::Delay(params) => {
                AnyController::Delay(Delay::new(params, packet_bytes, window_packets))
            }
        }
    }

    /// Minimum time between two notifications to the peer.
    pub(crate) fn cnp_interval(self) -> Duration {
        match self {
            CongestionControl::Off | CongestionControl::Fixed(_) | CongestionControl::Delay(_) => {
                CNP_INTERVAL
            }
            CongestionControl::Dcqcn(params) => params.cnp_interval,
        }
    }
}

/// One of the controllers, without an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AnyController {
    Fixed(FixedRate),
    Dcqcn(Dcqcn),
    Delay(Delay),
}

impl Default for AnyController {
    fn default() -> AnyController {
        AnyController::Fixed(FixedRate::default())
    }
}

impl AnyController {
    /// The state of a window that follows the delay.
    pub(crate) fn window_report(&self) -> Option<WindowReport> {
        match self {
            AnyController::Delay(delay) => Some(delay.report()),
            AnyController::Fixed(_) | AnyController::Dcqcn(_) => None,
        }
    }

    /// Times that it began to compete.
    pub(crate) fn competitions(&self) -> u64 {
        match self {
            AnyController::Delay(delay) => delay.competitions(),
            AnyController::Fixed(_) | AnyController::Dcqcn(_) => 0,
        }
    }
}

impl Controller for AnyController {
    fn handle(&mut self, now: Time, event: Event) {
        match self {
            AnyController::Fixed(fixed) => fixed.handle(now, event),
            AnyController::Dcqcn(dcqcn) => dcqcn.handle(now, event),
            AnyController::Delay(delay) => delay.handle(now, event),
        }
    }

    fn limits(&self) -> Limits {
        match self {
            AnyController::Fixed(fixed) => fixed.limits(),
            AnyController::Dcqcn(dcqcn) => dcqcn.limits(),
            AnyController::Delay(delay) => delay.limits(),
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        match self {
            AnyController::Fixed(fixed) => fixed.poll_timeout(),
            AnyController::Dcqcn(dcqcn) => Controller::poll_timeout(dcqcn),
            AnyController::Delay(delay) => delay.poll_timeout(),
        }
    }
}
