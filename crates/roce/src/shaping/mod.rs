//! What a host may send of each DSCP, and when: rate limits and transmission gates.
//!
//! | module | what it holds |
//! |---|---|
//! | `word` | one number that senders share: the seam to their memory |
//! | [`limiter`] | a rate limit: the generic cell rate algorithm over one word |
//! | [`gate`] | a transmission gate: when an exchange may begin, and whether a job keeps its period |
//! | `shaper` | what a wire asks before it sends, over a [`Table`] of both |
//!
//! The rules are pure: no clock, no memory of their own. All processes of a machine run them over
//! words that they share (`nic::rates`), and the simulator over plain cells (`sim::rates`). File
//! formats, access rights and what an agent writes do not belong here.

pub mod gate;
pub mod limiter;
mod shaper;
mod word;

pub use gate::{ClockReading, ExchangeWords, Exchanges, Punctuality, TransmissionGate};
pub use limiter::{Limiter, RateLimit};
pub use shaper::{Arrivals, CODE_POINTS, LONGEST_WAIT, MAX_HEARD, PEERS_AT_ONCE, Shaper, Table};
pub use word::Word;
