//! Workloads over a network: flows with a size and a start, and how long each of them took.
//!
//! A flow is one WRITE with immediate data over a reliable connection, and complete when its
//! receiver has the completion. Independent flows bring their own connection, created when they
//! start, so that every flow starts as a new one in congestion control too; the steps of a
//! collective keep theirs.
//!
//! | module | what it holds |
//! |---|---|
//! | [`sizes`] | published distributions of flow sizes |
//! | [`workload`] | patterns of flows |
//! | [`rails`] | flows between hosts with several ports |
//! | [`ideal`] | how long a flow takes alone |
//! | [`failing`] | links and switches that fail meanwhile |
//! | [`run`] | flows over a simulated network |
//! | [`outcome`] | completion times, slowdowns, queues |

pub mod failing;
pub mod ideal;
pub mod outcome;
pub mod rails;
pub mod run;
pub mod sizes;
pub mod workload;

pub use failing::{MAX_FAULTS, TimedFault, Trouble};
pub use outcome::{GivenUp, Outcome, Record, Slowdowns};
pub use rails::{RailError, Rails};
pub use run::{Runner, Testbed, TrafficError};
pub use sizes::FlowSizes;
pub use workload::{Flow, MAX_FLOWS, Workload, WorkloadError};
