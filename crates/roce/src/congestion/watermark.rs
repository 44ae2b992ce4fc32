//! Watermarks of switch buffers: what the control plane of the network knows of a path, late.
//!
//! Switches keep, for each port and class, the longest queue since the register was last read. A
//! collector reads the registers at intervals and tells hosts about the ports on the ways of their
//! flows: a [`Watermark`]. That is slower than any mark or stamp in a packet, and there where
//! switches do neither.

use core::num::NonZeroU64;

use thiserror::Error;

use crate::time::{Duration, Time};

/// A report whose interval ended longer ago is refused, and longer intervals are taken for this
/// long.
pub const MAX_AGE: Duration = Duration::from_millis(100);

/// A queue that takes longer is taken for one that takes this long.
const LONGEST_QUEUE: Duration = Duration::from_millis(10);

/// The longest queue of a switch port within an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermark {
    /// When the interval began.
    pub from: Time,
    /// When it ended.
    pub until: Time,
    /// Bytes of the longest queue.
    pub queue_bytes: u64,
    /// The rate of the port in bits per second.
    pub rate_bps: NonZeroU64,
}

impl Watermark {
    /// How long the queue takes to leave, 10 ms at most.
    pub fn queueing(&self) -> Duration {
        let nanos = u128::from(self.queue_bytes) * 8_000_000_000 / u128::from(self.rate_bps.get());
        let nanos = nanos.min(u128::from(LONGEST_QUEUE.as_nanos()));
        Duration::from_nanos(nanos as u64)
    }

    /// Whether it is of an interval that can have been, and ended not long ago.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, now: Time) -> Result<(), WatermarkError> {
        match now.since(self.until) {
            _ if self.until > now => Err(WatermarkError::Future),
            _ if self.from >= self.until => Err(WatermarkError::Empty),
            age if age > MAX_AGE => Err(WatermarkError::Stale(age)),
            _ => Ok(()),
        }
    }

    /// How long it was, at most [`MAX_AGE`].
    pub fn interval(&self) -> Duration {
        self.until.since(self.from).min(MAX_AGE)
    }
}

/// Why a report is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WatermarkError {
    /// No reliable connection has this queue pair.
    #[error("no reliable connection has this queue pair")]
    NoConnection,
    /// Its interval has not ended yet.
    #[error("its interval ends in the future: are the clocks of collector and host the same?")]
    Future,
    /// Its interval ends before it begins.
    #[error("its interval ends before it begins")]
    Empty,
    /// Its interval ended this long ago.
    #[error("its interval ended {0} ago, more than {MAX_AGE}: is the collector too slow?")]
    Stale(Duration),
}
