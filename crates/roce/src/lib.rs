//! RoCEv2 as state machines: packet formats, queue pairs, reliability and key checks.
//!
//! Nothing in here touches an operating system: no clock, no socket, no thread, no randomness. Time
//! comes in as [`Time`], packets as parsed headers, and whatever has to be done comes out of
//! `poll_*`. The crate moves *descriptors*, never payload bytes (contract C1): where payload has to
//! be placed or gathered, the one loop in [`world`] does it through the [`world::Memory`] it was given.
//!
//! | module | what it holds |
//! |---|---|
//! | [`wire`] | every RoCEv2 header and opcode, checked views and legal-values-only representations, ICRC |
//! | [`verbs`] | work requests, completions, and what else the verbs name |
//! | [`device`] | the [`device::Device`] trait that programs speak |
//! | [`world`] | the [`world::Wire`] and [`world::Memory`] seams and the drain loop between them |
//! | [`dcqcn`] | congestion control: notifications, rates, pacing |
//! | [`rtt`] | round-trip times: smoothed, and counted |
//! | [`report`] | queue pairs as they are, and why they failed |
//! | [`endpoint`] | one RoCE endpoint: memory regions, completion queues, queue pairs |
//!
//! Numbers in the form "IBA 9.7.5" name sections of the InfiniBand Architecture Specification, volume 1.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod attributes;
mod counters;
mod cq;
pub mod dcqcn;
mod deadlines;
pub mod device;
pub mod endpoint;
mod events;
mod multicast;
mod outbox;
mod pd;
pub mod planted;
mod qp;
mod region;
pub mod report;
mod rng;
pub mod rtt;
mod sg;
mod slab;
mod srq;
pub mod time;
pub mod verbs;
pub mod wire;
pub mod world;

pub use time::{Duration, Time};
