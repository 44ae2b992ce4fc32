//! What each job of this machine may send and when, as its agent says: a rate limit and a
//! transmission gate for each DSCP, kept by all processes together.
//!
//! The queues of a port divide what its machine sends, but not what takes another way (AF_XDP), and
//! what waits in them has left its sender already. So the wires of this crate hold packets back
//! themselves. By which rules is in [`roce::shaping`]; here is what the processes of a machine
//! share for them.
//!
//! | module | what it holds |
//! |---|---|
//! | `layout` | the words of the two files, and [`roce::shaping::Table`] over them |
//! | `mapping` | a file as memory |
//! | `files` | how files are found, made and replaced, and who may write them |
//! | [`RateTable`] (`agent`) | what the agent sets and reads |
//! | `wire` | what a wire asks: finds the folder, and follows it |
//!
//! The agent keeps a folder with two files of a page each:
//!
//! | file | content | written by |
//! |---|---|---|
//! | `rates` | by DSCP, its rate limit and its gate; how far Unix time is ahead of the monotonic clock | the agent, word by word |
//! | `buckets` | by DSCP, when its bucket is full again, when it was active, and counters | every process that sends |
//!
//! A process that is killed leaves nothing behind but the words that it has written.
//!
//! Who may write `buckets` can slow its machine's other jobs down, or end their processes by
//! truncating the file, so only the owner and the group of the folder may. The agent reads it
//! without mapping it, and replaces one that was truncated. A process that may not has buckets of
//! its own: what it sends is not part of a sum, and the agent does not see how long its exchanges
//! wait, so the process ignores its gate while that is too long.
//!
//! Without the folder nothing is limited. Wires look for it, and for another one in its place,
//! every [`LOOK_EVERY`] while they are in use; what changes in it holds from the next packet on.

mod agent;
mod files;
mod layout;
mod mapping;
#[cfg(test)]
mod tests;
mod wire;

use roce::Duration;

pub use agent::RateTable;
pub use roce::shaping::gate::{GATES_LAST, JUDGED_EXCHANGES, LEAST_QUIET};
pub use roce::shaping::limiter::{DEPTH, MOST_DEPTH};
pub use roce::shaping::{Exchanges, Punctuality, RateLimit, TransmissionGate};
pub(crate) use wire::{RateLimits, receive_watched};

/// Environment variable with the folder; empty for no limits.
pub const VARIABLE: &str = "DQUANT_PACES";

/// The folder, unless the environment names another.
pub const FOLDER: &str = "/run/dquant/paces";

/// How often a wire in use looks whether there is a folder, and the longest that a queue pair waits
/// without a look.
pub const LOOK_EVERY: Duration = roce::shaping::LONGEST_WAIT;
