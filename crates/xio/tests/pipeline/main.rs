//! The storage target and the reader, joined by RDMA queue pairs in a deterministic world.
//!
//! `net` configures the network of `sim` for these tests, `disk` and `ring` are the second
//! implementations of the crate's traits, `corpus` computes the expected bytes, and `world` is the
//! control plane. `delivery` holds the properties, the other modules directed tests.
#![allow(clippy::unwrap_used)]

mod corpus;
mod delivery;
mod disk;
mod fairness;
mod faults;
#[path = "../toy/flip.rs"]
#[expect(dead_code, reason = "its text and its reference are for other tests")]
mod flip;
mod forms;
mod hostile_reader;
mod hostile_target;
mod ledger;
mod lying_device;
mod net;
mod raw;
mod ring;
#[path = "../../../../testing/seeds.rs"]
mod seeds;
mod stages;
#[path = "../toy/mod.rs"]
mod toy;
mod world;
