//! Fuzzing harnesses: bytes in, a panic out if anything is wrong with `roce`.
//!
//! Each harness is one function from a byte slice to nothing. `tests/harnesses.rs` passes them to
//! bolero, which runs them as plain tests (corpus and a bounded number of random inputs) and under
//! libFuzzer (`cargo xtask fuzz`). Nothing in here depends on which of the two runs it.
//!
//! | module | input | checks |
//! |---|---|---|
//! | [`packet`] | bytes of a packet, a frame, a capture file | no panic, identical re-encoding, views agree |
//! | [`raw`] | UDP payloads for one live endpoint; the harness sets the right ICRC | every memory access |
//! | [`pair`] | actions of two programs and the network between them | accesses, completions, termination |
//!
//! Rules: no randomness but the input, no clock, no global state, so that an input is always
//! replayed exactly; and no check that depends on the endpoint's implementation.

mod access;
mod forge;
mod ledger;
mod node;
pub mod packet;
pub mod pair;
pub mod raw;
mod script;
