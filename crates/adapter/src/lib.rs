//! One opened RDMA device, with two faces.
//!
//! | module | what it holds |
//! |---|---|
//! | [`software`] | our endpoint with the path through shared memory to local peers |
//! | [`owned`] | the face for one thread that drives a device for many clients: target, DPU, benchmarks |
//! | [`registrations`] | buffers of a program: a registration cache, bounce blocks |
//! | [`congestion`] | which congestion control a connection gets |
//! | [`drive`] | the thread that owns an adapter: its turns and its sleeps |
//! | [`connect`] | queue pairs: described, exchanged, connected |
//! | [`shared`] | the face for a program whose threads share a device behind a lock: `libibverbs` |
//!
//! Everything that opens a device stands on it: engines, benchmarks, `libibverbs`. Wires, sockets,
//! shared memory and loaded libraries are in `nic`, protocol decisions in `roce`; sessions, streams
//! and verbs objects are above.

pub mod congestion;
pub mod connect;
pub mod drive;
pub mod owned;
pub mod registrations;
pub mod shared;
pub mod software;

#[cfg(test)]
#[path = "../../../testing/seeds.rs"]
mod seeds;
#[cfg(test)]
#[path = "../../../testing/skip.rs"]
mod skip;
