//! Discovery, set-up and management of InfiniBand fabrics as state machines. Numbers of chapters
//! are those of the InfiniBand Architecture Specification (IBA), volume 1, release 1.3.
//!
//! Nothing in here touches an operating system, and nothing is random but by a seed that the caller
//! passes. Routes are computed in [`mod@topology`].
//!
//! | module | what it holds |
//! |---|---|
//! | [`mad`] | subnet management packets and their attributes |
//! | [`exchange`] | questions to nodes and their answers |
//! | [`discovery`] | what a fabric consists of, asked node by node |
//! | [`lids`] | LIDs: who has which |
//! | [`levels`] | service levels of paths, and the lanes that ports map them to |
//! | [`partitions`] | which ports may talk to which |
//! | [`forwarding`] | tables by LID, and where packets go by them |
//! | [`dump`] | the same as text, as opensm writes it |
//! | [`transition`] | from one set of tables to another, safely |
//! | [`sm_info`] | what managers tell each other, and notices |
//! | [`setup`] | LIDs, tables and states of ports, written node by node |
//! | [`administration`] | what programs ask a manager: paths, nodes, multicast groups |
//! | [`manager`] | a long-running subnet manager |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod administration;
pub mod discovery;
pub mod dump;
pub mod exchange;
pub mod forwarding;
pub mod levels;
pub mod lids;
pub mod mad;
pub mod manager;
pub mod partitions;
pub mod setup;
pub mod sm_info;
pub mod transition;
