//! Near-data I/O as pure code: token file formats, the plan language, and the order of samples.
//!
//! Nothing in here touches an operating system: no file, no clock, no thread, no randomness but the
//! seeds passed in. A batch is a pure function of the dataset bytes, the plan and the batch number
//! (contract C4); everything that decides *which* bytes make up a batch is in this crate, so a
//! target, a DPU and a host that run it agree without communicating.
//!
//! | module | what it holds |
//! |---|---|
//! | [`dataset`] | token files described from their header bytes: flat, NumPy, Megatron |
//! | [`documents`] | where the documents of a file begin and end |
//! | [`plan`] | the plan language and its errors |
//! | [`stage`] | a plan compiled to stages: types, where each runs, the loop that runs them over a block |
//! | [`order`] | blend and shuffle as arithmetic over the global sample index |
//! | [`target`], [`reader`] | the storage target and the DPU as state machines, over `Device` and [`disk`] |
//! | [`opener`] | what holds datasets: from names to the files that a disk reads |
//! | [`capsule`] | the messages between the two |
//! | [`sums`] | what is read from a file against the checksums of its manifest |
//! | [`kernel`] | the per-byte work: narrowing with a range check, range scan, CRC32C |
//! | [`mod@reference`] | the same batches by slow and obvious code, to check the fast path against |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod capsule;
pub mod dataset;
pub mod disk;
pub mod documents;
pub mod kernel;
pub mod opener;
pub mod order;
pub mod plan;
pub mod reader;
pub mod reference;
pub mod stage;
pub mod sums;
pub mod target;
