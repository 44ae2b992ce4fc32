//! What is tried out before it runs: networks and jobs in the simulator, plans of streams on paper,
//! messages and a job's exchanges on real devices.
//!
//! | module | what it holds |
//! |---|---|
//! | [`units`] | sizes, times, rates and shares as people write them |
//! | [`input`] | files that are read as a whole |
//! | `workers` | work on several threads |
//! | [`topology`] | topologies by rule or from a file, and written to one |
//! | [`routing`] | routing engines beside each other |
//! | [`chart`] | curves as pictures |
//! | [`trace`] | samples of congestion control, of a simulated and of a real wire |
//! | [`scenario`] | simulations that a file describes |
//! | [`chaos`] | random programs under faults, seed by seed |
//! | [`proof`] | guarantees of admitted jobs, measured in the simulator |
//! | [`profiling`] | captures and counters as samples of a job's traffic |
//! | [`planning`] | where the stages of a plan run and what they cost |
//! | [`devices`] | the device of one side of a measurement |
//! | [`perf`] | latency and bandwidth of a network, client and server |
//! | [`replay`] | a training job's exchanges without its computing |
//!
//! Nothing in here prints results or knows the command line: results are values, failures are
//! [`service::Error`] or an enum of their module, and the commands give them words and exit codes.
//! Only the last three open sockets and devices.

pub mod chaos;
pub mod chart;
pub mod devices;
pub mod input;
pub mod perf;
pub mod planning;
pub mod profiling;
pub mod proof;
pub mod replay;
pub mod routing;
pub mod scenario;
pub mod topology;
pub mod trace;
pub mod units;
mod workers;
