//! Latency and bandwidth of an adapter between two machines, or two processes of one.
//!
//! A server waits; everything else is decided by the client, which sends each test over a small
//! control connection. Both sides run the same code on our own endpoint or on a device behind a
//! loaded libibverbs. Bytes are verified in every test.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@test`] | one test and what is allowed in it |
//! | `histogram` | latencies, in bounded memory |
//! | [`messages`] | the messages between client and server |
//! | `ends` | what one side of a test creates on its device, and the bytes that it expects |
//! | `requester`, `responder` | what each side does in a turn |
//! | [`client`], [`server`] | a test from its beginning to its result |
//!
//! The devices are opened in [`devices`](crate::devices). The command line and the form of results
//! belong to the binary.

pub mod client;
mod ends;
mod histogram;
pub mod messages;
mod requester;
mod responder;
pub mod server;
pub mod test;
