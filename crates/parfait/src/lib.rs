//! Bandwidth that a training job can count on: what a job puts on each link, what links still
//! carry, which hosts a job gets, and which queues of their ports.
//!
//! Nothing in here touches an operating system, and nothing is random but by a seed that the caller
//! passes: the same jobs in the same order get the same hosts on every machine. Rates are integers
//! in bits per second.
//!
//! | module | what it holds |
//! |---|---|
//! | [`runs`] | runs of consecutive ranks |
//! | [`family`] | families of edges between workers, counted in closed form |
//! | [`pattern`] | patterns of jobs, and their names |
//! | [`separation`] | how far workers are kept apart |
//! | [`job`] | a job as it is submitted |
//! | [`demand`] | what crosses a link: Parfait's, TAG's and a hose's reservation |
//! | [`groups`] | hosts below the same switches |
//! | [`spread`] | which links the packets of a pair of hosts take |
//! | [`site`] | what a network is made from, so that it can be made anew with something down |
//! | [`outage`] | what of a topology is down |
//! | [`network`] | hosts with slots, and what links can carry |
//! | [`loads`] | what a placed job puts on each link |
//! | [`ledger`] | who holds which slots and how much of each link |
//! | [`placement`] | which hosts a job gets |
//! | [`repair`] | hosts or links gone or back: who is hit, and the cheapest repair |
//! | [`queues`] | which queue of a port a job gets, and its weight |
//! | [`shifts`] | when jobs begin to send, so that they take turns |
//! | [`log`] | the ledger of admissions as an append-only log |
//! | [`agent`] | what the agent of a host does: the last good plan of the highest term |
//! | [`staggering`] | which admitted jobs take turns, from the log alone |
//! | [`brain`] | what a brain does: leads by a lease, admits, sends plans |
//! | [`profile`] | what a running job does on the network, from what was seen of it |
//! | [`seeded`] | known bugs, to test the simulation |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod agent;
pub mod brain;
pub mod demand;
pub mod family;
pub mod groups;
pub mod job;
pub mod ledger;
pub mod loads;
pub mod log;
pub mod network;
pub mod outage;
pub mod pattern;
pub mod placement;
pub mod profile;
pub mod queues;
pub mod repair;
pub mod repair_log;
pub mod runs;
pub mod seeded;
pub mod separation;
pub mod shifts;
pub mod site;
pub mod spread;
pub mod staggering;
