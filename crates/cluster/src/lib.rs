//! The daemons of a cluster with bandwidth guarantees: brains, which place jobs and keep the ledger, and agents, which
//! enforce it on their machines.
//!
//! The decisions are the state machines of the crate `parfait`; here is what they ask for: storage with a lease, the
//! wires between brain, agents and clients, and the queues of Linux.
//!
//! | module | what it holds |
//! |---|---|
//! | [`store`] | the lease and the log of brains: in etcd, or in one file |
//! | [`enforce`] | what makes a machine's ports keep a plan |
//! | [`kubernetes`] | what a scheduler extender of Kubernetes answers |
//! | [`slurm`] | a fabric as SLURM reads it |
//! | [`view`] | the whole cluster at one moment, for people and programs that look |
#![deny(unsafe_code)]

pub mod enforce;
pub mod kubernetes;
pub mod slurm;
pub mod store;
pub mod view;
