//! Integration tests: whole simulations.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chaos;
mod circle;
mod failing;
mod goodput;
mod incast;
mod noisy_neighbour;
mod rails;
#[path = "../../../../testing/seeds.rs"]
mod seeds;
mod traffic;
