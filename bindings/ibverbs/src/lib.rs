//! A drop-in `libibverbs.so.1`: unmodified verbs programs on a software RoCEv2 device.
//!
//! Every network interface with an address is a device; the transport is the crate `roce`, its packets
//! go through ordinary UDP sockets. No kernel module, no root, no device node. The C ABI is that
//! of rdma-core 44, symbol versions included (`libibverbs.map`).
//!
//! Each floor uses those above it in this table and none below (`cargo xtask check layers`):
//!
//! | floor | what it holds |
//! |---|---|
//! | [`abi`] | structures and constants of `infiniband/verbs.h` |
//! | [`process`] | the process around us: errno, stderr, descriptors, forks, signals, settings |
//! | [`engine`] | one endpoint and wire for each open device, and who drives them; network interfaces |
//! | [`explain`] | what a running program tells of itself |
//! | [`objects`] | devices, contexts and everything that verbs create; the view of `/sys/class/infiniband` |
//! | [`exports`] | the functions of C |
//!
//! Protocol decisions do not belong here.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod abi;
mod engine;
mod explain;
mod exports;
mod objects;
mod process;
#[cfg(test)]
#[path = "../../../testing/skip.rs"]
mod skip;
#[cfg(test)]
mod tests;
