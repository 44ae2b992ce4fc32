//! RoCEv2 as state machines: packet formats, queue pairs, reliability and key checks.
//!
//! Nothing in here touches an operating system: no clock, no socket, no thread, no randomness. Time
//! comes in as [`Time`], packets as parsed headers, and the work to do is returned by `poll_*`. The
//! crate moves *descriptors*, never payload bytes (contract C1): the one loop in [`world`] places
//! and gathers payload through the [`world::Memory`] it is given.
//!
//! | module | what it holds |
//! |---|---|
//! | [`wire`] | every RoCEv2 header and opcode, checked views and legal-values-only representations, ICRC |
//! | [`congestion`] | congestion control: controllers, pacing, round-trip times |
//! | [`shaping`] | what a host may send of each DSCP: rate limits, transmission gates |
//! | [`verbs`] | objects, work requests, completions, attributes, and the [`device::Device`] trait that programs use |
//! | `memory` | regions, windows, scatter/gather lists: the check of every access |
//! | `io` | the [`world::Wire`] and [`world::Memory`] seams |
//! | `events`, `srq`, `cq` | the queues that queue pairs share |
//! | [`report`] | the state of queue pairs, and why they failed |
//! | [`direct`] | requests within one machine that need no packets |
//! | `qp` | queue pairs: the three services, loss recovery |
//! | [`endpoint`] | one RoCE endpoint: memory regions, completion queues, queue pairs |
//! | [`world`] | the loop between an endpoint, its wire and its memory |
//!
//! A module uses only those above it; `cargo xtask check layers` enforces it.
//!
//! Numbers in the form "IBA 9.7.5" name sections of the InfiniBand Architecture Specification,
//! volume 1.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod congestion;
mod counters;
mod cq;
mod deadlines;
pub mod direct;
pub mod endpoint;
mod events;
mod io;
mod memory;
mod multicast;
mod outbox;
mod qp;
pub mod report;
mod rng;
pub mod seeded;
pub mod shaping;
mod slab;
mod srq;
pub mod time;
pub mod verbs;
pub mod wire;
pub mod world;

pub use time::{Duration, Time};
pub use verbs::device;
