//! Topologies of hosts and switches, routing engines, and a validator of their forwarding tables.
//!
//! Nothing in here touches an operating system, and nothing is random but by a seed that the caller
//! passes: the same topology gives the same tables on every machine. What travels through a
//! topology, and how a real one is asked, does not belong here.
//!
//! | module | what it holds |
//! |---|---|
//! | [`graph`] | hosts, switches, ports and links |
//! | [`shape`] | topologies made by rule, and their names |
//! | [`text`] | topologies as text of other programs |
//! | [`htsim`] | topologies as files of csg-htsim |
//! | [`lingjun`] | the topology of a published cluster, from its file |
//! | [`drawing`] | a picture of a topology |
//! | [`channels`] | the switches of a topology as a routing engine sees them |
//! | [`dependencies`] | which channels wait for which, and cycles of them |
//! | [`routes`] | forwarding tables, and the engines that compute them |
//! | [`lanes`] | virtual lanes that keep credit loops out |
//! | [`validator`] | what a set of tables does |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod channels;
pub mod dependencies;
pub mod drawing;
pub mod graph;
pub mod htsim;
pub mod lanes;
pub mod lingjun;
pub mod routes;
pub mod shape;
pub mod text;
pub mod validator;
