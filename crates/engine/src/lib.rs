//! The daemons as a library: storage target and DPU, their streams and their control plane.
//!
//! | module | what it holds |
//! |---|---|
//! | [`daemon`] | the storage target and the DPU as processes |
//! | [`data`] | the threads that move data |
//! | [`control`], [`stream`] | the control plane: gRPC between daemons, the local socket of a DPU |
//! | [`path`] | which packets still reach a target, in words |
//! | [`local`] | a DPU inside a trainer's own process |
//! | [`files`] | streams over files of this machine, without target and DPU |
//! | [`proto`] | messages of the control plane and of the local socket |
//! | [`catalog`], [`layout`] | from names and plans to files and orders of samples |
//! | [`action`] | user actions: from a plan's module to one that may run |
//! | [`selection`] | which documents a stream draws from |
//! | `handle`, `group` | trainers of one job that read one stream |
//! | [`budget`] | how much memory rings and tables of documents of a DPU may take |
//! | [`status`] | counters by name |
//!
//! The command line, its output and exit codes belong to the binary. Whether a packet or a block is
//! valid is decided in `roce` and `xio`; the machine is reached through `nic` and `host`. What
//! every daemon has, its log and its admission of callers for example, is in `service`.

pub mod action;
pub mod budget;
pub mod catalog;
pub mod control;
pub mod daemon;
pub mod data;
pub mod files;
mod group;
mod handle;
pub mod layout;
pub mod local;
pub mod path;
pub mod proto;
pub mod selection;
pub mod status;
pub mod stream;

#[cfg(test)]
mod tests;
