//! The sender of windows that the receiver advertises.
//!
//! The receiver's half, which divides its link among all senders, belongs to the endpoint, and what
//! packets say to the wire: both are in [`roce::congestion::advertised`], where the algorithm is
//! described.

use core::num::NonZeroU32;

use roce::Time;
use roce::congestion::{AdvertisedParams, Controller, Event, Limits};

/// One sender.
#[derive(Clone, Copy, Debug)]
pub struct Advertised {
    first: u32,
    window: u32,
    /// Packets that still take the higher class: all that was posted when it started, if that fits
    /// the first window. None before the first packet.
    urgent: Option<u32>,
    /// Whether the receiver has advertised anything since it started, or since the last timeout.
    is_advertised: bool,
}

impl Advertised {
    /// A sender of packets of `packet_bytes` that starts.
    pub fn new(params: AdvertisedParams, packet_bytes: u32) -> Advertised {
        let first = params.first_packets(packet_bytes);
        Advertised { first, window: first, urgent: None, is_advertised: false }
    }
}

impl Controller for Advertised {
    fn handle(&mut self, _now: Time, event: Event<'_>) {
        match event {
            Event::Advertised { packets } => {
                (self.window, self.is_advertised) = (packets.max(1), true);
            }
            Event::Idle => (self.window, self.urgent) = (self.first, None),
            Event::TimedOut => (self.window, self.is_advertised) = (1, false),
            // A peer that advertises nothing does not open the window again.
            Event::Acknowledged { packets, .. } if !self.is_advertised => {
                self.window = self.window.saturating_add(packets).min(self.first.max(self.window));
            }
            Event::Acknowledged { .. }
            | Event::Notified
            | Event::Telemetry(_)
            | Event::Watermark(_) => {}
            Event::Lost { .. } | Event::Sent { .. } | Event::Timer => {}
        }
    }

    fn limits(&self) -> Limits {
        Limits { rate_bps: None, window_packets: NonZeroU32::new(self.window) }
    }

    fn poll_timeout(&self) -> Option<Time> {
        None
    }

    /// What is posted later than the first packet is not urgent, until everything is acknowledged.
    fn is_urgent(&mut self, demand: u32) -> bool {
        let fits = demand < self.first;
        let left = *self.urgent.get_or_insert(if fits { demand + 1 } else { 0 });
        self.urgent = Some(left.saturating_sub(1));
        left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: AdvertisedParams =
        AdvertisedParams { path_bytes: 100_000, budget_per_mille: 1_000 };
    const PACKET: u32 = 1_000;

    fn at(us: u64) -> Time {
        Time::from_nanos(us * 1_000)
    }

    #[test]
    fn a_peer_that_advertises_nothing_opens_the_window_again() {
        let mut sender = Advertised::new(PARAMS, PACKET);
        sender.handle(at(1), Event::TimedOut);
        let acknowledged = |packets| Event::Acknowledged { packets, in_flight: 1, rtt: None };
        (0..200).for_each(|us| sender.handle(at(2 + us), acknowledged(1)));
        assert_eq!(sender.window, 100);
        // One that does decides alone.
        sender.handle(at(300), Event::Advertised { packets: 3 });
        sender.handle(at(301), acknowledged(5));
        assert_eq!(sender.window, 3);
    }

    #[test]
    fn a_sender_starts_with_the_path_and_obeys() {
        let mut sender = Advertised::new(PARAMS, PACKET);
        let window = |sender: &Advertised| sender.limits().window_packets.map(NonZeroU32::get);
        assert_eq!(window(&sender), Some(100));
        assert!(!sender.is_urgent(100) && !sender.is_urgent(3));
        sender.handle(at(1), Event::Advertised { packets: 0 });
        assert_eq!(window(&sender), Some(1));
        sender.handle(at(2), Event::Idle);
        assert_eq!(window(&sender), Some(100));
        assert!(sender.is_urgent(1) && sender.is_urgent(0));
        assert!(!sender.is_urgent(5), "what was posted later");
    }
}
