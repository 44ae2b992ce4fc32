//! The one binary of Dquant: its commands and their text.
//!
//! The daemons are in [`engine`], the library for training programs is [`client`]; commands and exit codes do not
//! belong in either.
//!
//! | module | what it holds |
//! |---|---|
//! | [`chart`] | curves as pictures |
//! | [`paces`] | samples of congestion control, of a simulated and of a real wire |
//! | [`demo`] | the main job in one command, verified and measured |
//! | [`cli`] | the verbs of the command line: what a person types and reads |
//! | [`exit`] | exit codes and errors with hints |
//! | [`input`] | files that are read as a whole, and what other processes say as JSON |
//! | [`perf`] | latency and bandwidth of a fabric, client and server |
//! | [`planning`] | where the stages of a plan run and what they cost |
//! | [`replay`] | a training job's exchanges without its computing |
//! | [`profiling`] | captures and counters as samples of a job's traffic |
//! | [`proof`] | guarantees of admitted jobs, measured in the simulator |
//! | [`scenario`] | simulations that a file describes |
//! | [`topology`] | topologies by rule or from a file |
//! | [`units`] | sizes and times as people write them |

pub mod chart;
pub mod cli;
pub mod demo;
pub mod exit;
pub mod input;
pub mod paces;
pub mod perf;
pub mod planning;
pub mod profiling;
pub mod proof;
pub mod replay;
pub mod scenario;
pub mod topology;
pub mod units;
