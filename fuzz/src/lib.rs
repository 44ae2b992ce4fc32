//! Fuzzing harnesses: bytes in, a panic out if anything is wrong with `roce`.
//!
//! Each harness is one function from a byte slice to nothing. `tests/harnesses.rs` hands them to
//! bolero, which runs them as plain tests (corpus and a bounded number of random inputs) and under
//! libFuzzer (`cargo xtask fuzz`). Nothing in here knows which of the two is at work.
//!
//! | module | what goes in | what is checked |
//! |---|---|---|
//! | [`packet`] | bytes of a packet, a frame, a capture file | no panic, same bytes again, views agree |
//! | [`raw`] | UDP payloads for one live endpoint; the harness makes the ICRC right | every access to memory |
//! | [`pair`] | what two programs and the network between them do | accesses, completions, and that it ends |
//!
//! Rules of the room: no chance but the input, no clock, no global state, so that an input always
//! does the same; and no check that depends on how the endpoint works inside.

mod forge;
mod judge;
mod ledger;
mod node;
pub mod packet;
pub mod pair;
pub mod raw;
mod script;
