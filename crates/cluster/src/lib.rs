//! The daemons of a cluster with bandwidth guarantees: brains, which place jobs and keep the
//! ledger, and agents, which enforce it on their machines.
//!
//! The decisions are the state machines of the crate `parfait`; here is what they ask for: storage
//! with a lease, the wires between brain, agents and clients, and the queues of Linux.
//!
//! | module | what it holds |
//! |---|---|
//! | [`proto`] | the messages of the wire |
//! | [`convert`] | between these and the types of `parfait` |
//! | [`keys`] | what is derived from the cluster's token, and signatures |
//! | [`handshake`] | how both ends of a connection prove that they know the token |
//! | [`store`] | the lease and the log of brains: in etcd, or in one file |
//! | [`enforce`] | what makes a machine's ports keep a plan |
//! | [`local`] | what programs of this machine ask its agent |
//! | [`kubernetes`] | what a Kubernetes scheduler extender answers |
//! | [`slurm`] | a fabric as SLURM reads it |
//! | [`view`] | the whole cluster at one moment, for people and programs that look |
//! | [`mod@explain`] | what a job gets of its links, out of such a view |
//! | [`brain`] | the daemon that leads or stands by |
//! | [`agent`] | the daemon of a host or switch |
//! | [`client`] | calls to whichever brain leads |
//! | [`words`] | counts with their nouns, rates with their units |
//! | [`web`] | the brain's HTTP server: page, JSON, events, metrics |
#![forbid(unsafe_code)]

pub mod agent;
pub mod brain;
pub mod client;
pub mod convert;
pub mod enforce;
pub mod explain;
pub mod handshake;
pub mod keys;
pub mod kubernetes;
pub mod local;
pub mod proto;
pub mod slurm;
pub mod store;
mod tls;
pub mod view;
pub mod web;
pub mod words;
