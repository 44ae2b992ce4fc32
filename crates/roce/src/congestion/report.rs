//! What a control says of itself, for people.

use crate::time::{Duration, Time};

/// What a window follows, steps and drains aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// Nothing yet: it doubles each round trip.
    Nothing,
    /// The delay.
    Delay,
    /// Losses: others fill the queue, or nothing shows yet that they do not.
    Losses,
}

/// The present state of one sender's control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowReport {
    /// Thousandths of a packet that may be in flight. In a step or drain, that of before.
    pub window_millipackets: u64,
    /// What the window follows.
    pub follows: Follows,
    /// Since when it does.
    pub since: Time,
    /// It sends less to measure the path without its own queue, or whose queue it is.
    pub is_draining: bool,
    /// The delay of the path without a queue.
    pub base: Option<Duration>,
    /// The delay now, smoothed.
    pub smoothed: Option<Duration>,
    /// Times that it went from the delay to losses, since others filled the queue.
    pub competitions: u64,
}

impl WindowReport {
    /// What queues add to the delay of the path now.
    pub fn queue(&self) -> Duration {
        let nanos = |delay: Option<Duration>| delay.unwrap_or_default().as_nanos();
        Duration::from_nanos(nanos(self.smoothed).saturating_sub(nanos(self.base)))
    }
}
