//! The one binary of Dquant, and the library behind it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`client`] | what a training program uses: open a dataset with an action, read batches |
//! | [`daemon`] | the storage target and the DPU as processes |
//! | [`engine`] | the threads that move data |
//! | [`control`], [`stream`] | the control plane: gRPC between daemons, the local socket of a DPU |
//! | [`catalog`], [`layout`], [`url`] | from names and plans to files and orders of samples |
//! | [`budget`] | how much memory the rings of a DPU may take |
//! | [`demo`] | the main job in one command, verified and measured |
//! | [`cli`] | the verbs of the command line: what a person types and reads |
//! | [`exit`] | exit codes and errors with hints |
//! | [`inspect`] | what a token file on this machine holds |
//! | [`tokenize`] | text files to a flat file of token ids |
//! | [`units`], [`status`] | sizes and times as people write them; counters by name |

pub mod budget;
pub mod catalog;
pub mod cli;
pub mod client;
pub mod control;
pub mod daemon;
pub mod demo;
pub mod engine;
pub mod exit;
pub mod inspect;
pub mod layout;
mod log;
mod runtime;
mod seed;
pub mod status;
pub mod stream;
pub mod tokenize;
pub mod units;
pub mod url;
