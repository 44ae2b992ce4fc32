//! A drop-in `libibverbs.so.1`: unmodified verbs programs on a software RoCEv2 device.
//!
//! Every network interface with an address is a device; the transport is the crate `roce`, its packets
//! go through ordinary UDP sockets. No kernel module, no root, no device node. The C ABI is that
//! of rdma-core 44, symbol versions included (`libibverbs.map`).
//!
//! | module | what it holds |
//! |---|---|
//! | [`abi`] | structures and constants of `infiniband/verbs.h` |
//! | [`object`], [`ack`], [`errors`], [`descriptor`], [`fork`] | what all calls share: handles, events, errno, descriptors, forked children |
//! | [`netdev`], [`device`], [`gid`], [`query`], [`limits`] | devices, and what they say of themselves |
//! | [`engine`] | one endpoint and wire for each open device, and who drives them |
//! | [`context`], [`pd`], [`mr`], [`mw`], [`cq`], [`cq_ex`], [`channel`], [`srq`], [`qp`], [`qp_attr`], [`ah`], [`multicast`], [`events`] | one kind of object each |
//! | [`post`], [`inline`], [`wr_api`] | work requests |
//! | [`sysfs`], [`interpose`] | the view of `/sys/class/infiniband` |
//! | [`explain`], [`capture`], [`settings`], [`signals`] | what a running program tells of itself, and what it is told |
//! | [`text`], [`from_kernel`], [`unsupported`] | names, and symbols that providers need |
//!
//! Calls come from C: every pointer may be null or stale, no call may panic, and an error is the
//! `errno` that the man page names. Protocol decisions do not belong here.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod abi;
mod ack;
mod ah;
mod capture;
mod channel;
mod context;
mod cq;
mod cq_ex;
mod descriptor;
mod device;
mod engine;
mod errors;
mod events;
mod explain;
mod fork;
mod from_kernel;
mod gid;
mod inline;
mod interpose;
mod limits;
mod mr;
mod multicast;
mod mw;
mod netdev;
mod object;
mod pd;
mod post;
mod qp;
mod qp_attr;
mod query;
mod settings;
mod signals;
#[cfg(test)]
#[path = "../../../testing/skip.rs"]
mod skip;
mod srq;
mod sysfs;
#[cfg(test)]
mod tests;
mod text;
mod unsupported;
mod wr_api;
