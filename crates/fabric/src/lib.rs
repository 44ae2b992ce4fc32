//! Topologies of hosts and switches, routing engines, and a judge of their forwarding tables; discovery and set-up of
//! InfiniBand fabrics as state machines. Numbers of chapters are those of the InfiniBand Architecture Specification
//! (IBA), volume 1, release 1.3.
//!
//! Nothing in here touches an operating system, and nothing is random but by a seed that the caller passes: the same
//! topology gives the same tables on every machine.
//!
//! | module | what it holds |
//! |---|---|
//! | [`topology`] | hosts, switches, ports and links |
//! | [`shape`] | topologies made by rule, and their names |
//! | [`text`] | topologies as text of other programs |
//! | [`htsim`] | topologies as files of csg-htsim |
//! | [`lingjun`] | the topology of a published cluster, from its file |
//! | [`drawing`] | a picture of a topology |
//! | [`channels`] | the switches of a topology as a routing engine sees them |
//! | [`dependencies`] | which channels wait for which, and cycles of them |
//! | [`routes`] | forwarding tables, and the engines that compute them |
//! | [`lanes`] | virtual lanes that keep credit loops out |
//! | [`judge`] | what a set of tables does |
//! | [`mad`] | subnet management packets and their attributes |
//! | [`exchange`] | questions to nodes and their answers |
//! | [`discovery`] | what a fabric consists of, asked node by node |
//! | [`lids`] | LIDs: who has which |
//! | [`levels`] | service levels of paths, and the lanes that ports map them to |
//! | [`partitions`] | which ports may talk to which |
//! | [`forwarding`] | tables by LID, and where packets go by them |
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
pub mod channels;
pub mod dependencies;
pub mod discovery;
pub mod drawing;
pub mod exchange;
pub mod forwarding;
pub mod htsim;
pub mod judge;
pub mod lanes;
pub mod levels;
pub mod lids;
pub mod lingjun;
pub mod mad;
pub mod manager;
pub mod partitions;
pub mod routes;
pub mod setup;
pub mod shape;
pub mod sm_info;
pub mod text;
pub mod topology;
pub mod transition;
