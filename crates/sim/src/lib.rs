//! A network in virtual time that runs the transport unmodified, for every test that needs a
//! network.
//!
//! Nodes hold an [`Endpoint`](roce::endpoint::Endpoint) each and run the product's own
//! [`turn`](roce::world::turn) over any graph of simulated links and switches: bandwidth,
//! propagation delay, bounded queues by priority, ECN marking. Time advances from event to event,
//! and all randomness comes from one seed, so a run is a pure function of its configuration and
//! replays bit for bit.
//!
//! | module | what it holds |
//! |---|---|
//! | [`graph`] | nodes, switches, the cables between them, and the routes |
//! | [`topology`] | topologies of the crate `topology` as graphs |
//! | [`network`] | events on a graph: packets, faults, and the loop that advances time |
//! | [`buffer`] | the shared buffer of a switch, and priority flow control |
//! | [`credits`] | the other way to lose nothing: InfiniBand's credits |
//! | [`link`] | one direction of a cable: rate, delay, queues, marking, statistics |
//! | [`queues`] | queues of a port by DSCP, with weights |
//! | [`rates`] | rate limits and transmission gates of hosts |
//! | [`memory`] | a node's memory: real bytes with every access checked, or phantom bytes |
//! | [`faults`] | the faults of the network, their rates, and whether they made a difference |
//! | [`chaos`] | random programs under faults, then healing; every completion and byte checked |
//! | [`goodput`] | the goodput of one stream over a link that loses packets |
//! | [`incast`] | many senders, one receiver: the queue, and each sender's share |
//! | [`circle`] | lossless switches under load: whether packets wait in a circle |
//! | [`traffic`] | workloads: flows with a size and a start, and how long each took |
//! | [`tenants`] | connections of many tenants, each with its DSCP |
//! | [`cycles`] | training jobs: iterations of computing and exchanges |
//! | [`noisy_neighbour`] | streams that share a slow link with each other, and with a TCP flow |
//!
//! No threads, clocks, files or hash maps in here. To use several cores, run several simulations.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod buffer;
pub mod chance;
pub mod chaos;
pub mod circle;
pub mod credits;
pub mod cycles;
mod events;
pub mod faults;
pub mod goodput;
pub mod graph;
pub mod incast;
pub mod link;
pub mod memory;
pub mod network;
pub mod noisy_neighbour;
mod packet;
mod paths;
mod port;
pub mod pressure;
pub mod queues;
pub mod rates;
mod streams;
pub mod tenants;
pub mod topology;
pub mod traffic;

pub use streams::StreamError;
