//! Congestion control: what a queue pair learns about the network, and how much it may send.
//!
//! | module | what it holds |
//! |---|---|
//! | [`control`] | which control a connection has: the factory of its controllers |
//! | [`advertised`] | windows that the receiver sets: its arbiter, and what packets say |
//! | [`watermark`] | what the control plane says of the buffers of switches |
//! | [`pacer`] | the time of the next packet at a rate; the distance of notifications |
//! | [`report`] | what a control says of itself |
//! | [`rtt`] | round-trip times: smoothed, and counted |
//!
//! A [`Controller`] is a state machine per queue pair without a clock. It takes [`Event`]s and
//! returns [`Limits`]: a rate, a window, or both. Which one a connection has is up to the
//! [`ControllerFactory`] in its [`Control`]; endpoint and queue pair do not know. No algorithm of a
//! sender belongs here: the published ones are in the crate `controls`. Without a factory, nothing
//! but the window of the queue pair limits it. What receivers do is here: when they notify, and
//! [`advertised`], whose arbiter divides the link of an endpoint among all its queue pairs.

pub mod advertised;
pub mod control;
pub mod pacer;
pub mod report;
pub mod rtt;
pub mod watermark;

use core::fmt;
use core::num::NonZeroU32;

use crate::time::{Duration, Time};
use crate::wire::telemetry::Report;
pub use advertised::AdvertisedParams;
pub use control::{Control, ControllerFactory, Needs};
pub use report::{Follows, WindowReport};
pub use watermark::Watermark;

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
    /// Everything that was posted has been acknowledged. Only [`Needs::advertised`] asks for it.
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
pub trait Controller: fmt::Debug + Send + Sync {
    /// Something happened at `now`.
    fn handle(&mut self, now: Time, event: Event<'_>);

    /// How much may be sent now.
    fn limits(&self) -> Limits;

    /// When [`Event::Timer`] is wanted next.
    fn poll_timeout(&self) -> Option<Time>;

    /// The state of a window that follows the delay, if it is that.
    fn window_report(&self) -> Option<WindowReport> {
        None
    }

    /// Times that it began to compete with others that fill the queue of the path.
    fn competitions(&self) -> u64 {
        0
    }

    /// A data packet leaves with so many to follow: whether it takes the class of urgent ones.
    fn is_urgent(&mut self, _demand: u32) -> bool {
        false
    }
}

/// The packets that are in flight at a rate over a path of this round-trip time, rounded up.
pub fn window_of(rate_bps: u64, rtt: Duration, packet_bytes: u64) -> NonZeroU32 {
    let bits_ns = u128::from(rate_bps) * u128::from(rtt.as_nanos());
    let packets = bits_ns.div_ceil(8_000_000_000 * u128::from(packet_bytes.max(1)));
    NonZeroU32::new(u32::try_from(packets).unwrap_or(u32::MAX)).unwrap_or(NonZeroU32::MIN)
}
