//! A training job that is not there: its pattern is exchanged over adapters, its computing is a
//! pause.
//!
//! Each rank is a process, as in a real job. The ranks meet at rank 0 ([`rendezvous`]), connect a
//! queue pair for each pair of ranks that exchange anything, and begin together. From then on
//! nothing but messages holds them together: an iteration is a pause and then the phases of the
//! pattern, whose edges are those of [`parfait::demand`]; a phase of a rank ends when all that it
//! sends is acknowledged and all that it is to receive is there and compared.
//!
//! | module | what it holds |
//! |---|---|
//! | [`schedule`] | who sends what to whom, phase by phase |
//! | `content` | the bytes of a message, and their check |
//! | [`wire`] | what ranks tell each other as it is written, and failures in words |
//! | [`rendezvous`] | the bootstrap of a rank over its control connections |
//! | [`exchange`] | what a rank posts and awaits, step by step, and what it measures |
//! | [`rank`] | one rank on its device, from its queue pairs to its result |
//!
//! The command line and the form of results belong to the binary.

mod content;
pub mod exchange;
pub mod rank;
pub mod rendezvous;
pub mod schedule;
pub mod wire;
