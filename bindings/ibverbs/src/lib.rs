//! A drop-in `libibverbs.so.1`: unmodified verbs programs on a software RoCEv2 device.
//!
//! Every network interface with an address is a device; the transport is the crate `roce`, its
//! packets are sent through ordinary UDP sockets. No kernel module, no root, no device node. The C
//! ABI is that of rdma-core 44, symbol versions included (`libibverbs.map`).
//!
//! Each layer uses those above it in this table and none below (`cargo xtask check layers`):
//!
//! | layer | what it holds |
//! |---|---|
//! | [`nic::abi`] | structures and constants of `infiniband/verbs.h` |
//! | [`process`] | the host process: errno, stderr, descriptors, forks, signals, settings |
//! | [`engine`] | one endpoint and wire for each open device, and the threads that drive them; network interfaces |
//! | [`explain`] | reports on the state of a running program |
//! | [`objects`] | devices, contexts and everything created by verbs; the view of `/sys/class/infiniband` |
//! | [`exports`] | the C functions |
//!
//! Protocol decisions do not belong here.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

use nic::abi;

mod engine;
mod explain;
mod exports;
mod objects;
mod process;
#[cfg(test)]
mod tests;
