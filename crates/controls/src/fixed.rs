//! No adaptation: a rate that the program has set, or none.

use roce::Time;
use roce::congestion::{Controller, Event, Limits};

/// Sends at the same rate whatever the network says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedRate {
    /// Bits per second; `None` for as fast as packets come.
    pub rate_bps: Option<u64>,
}

impl Controller for FixedRate {
    fn handle(&mut self, _: Time, _: Event<'_>) {}

    fn limits(&self) -> Limits {
        Limits { rate_bps: self.rate_bps, window_packets: None }
    }

    fn poll_timeout(&self) -> Option<Time> {
        None
    }
}
