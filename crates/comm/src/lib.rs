//! Ranks that exchange messages, as state machines over [`roce`].
//!
//! | module | what it holds |
//! |---|---|
//! | [`address`] | one end of a queue pair, as peers exchange it |
//! | [`bootstrap`] | how ranks find each other, begin together, and learn of each other's end |
//! | [`mesh`] | queue pairs to peers on a device, their memory, numbered messages through them |
//!
//! A job goes through them in this order: each rank creates its mesh, the bootstrap tells all of
//! them where all queue pairs are, each connects its own, and messages flow. Two programs stand on
//! it: measurements, with many queue pairs to one peer, and replayed jobs, with one to each of many
//! (`lab`). Collectives are to stand on the same.
//!
//! Nothing in here touches an operating system: time is passed in, and payload stays where it is.
//! The threads, the sockets of the bootstrap, what its messages look like on them, and congestion
//! control of connections belong to the users and to `adapter`.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod address;
pub mod bootstrap;
pub mod mesh;
