//! What the data plane asks of the machine: disks, exported folders, shared memory, the processor.
//!
//! | module | what it holds |
//! |---|---|
//! | [`disk`], [`root`] | io_uring reads; files opened below exported folders only |
//! | [`ring`], [`attach`] | the host ring in shared memory, and the local socket that hands it over |
//! | [`kernels`] | the per-byte kernels for this processor |
//!
//! A trainer needs `ring` and `attach` and nothing else, so nothing of the network belongs here: sockets and
//! registered memory are in `nic`, and a disk is told by address which memory to fill. What is decided about
//! datasets, plans and blocks is in `xio`, which sees the machine through the traits that these modules
//! implement. Unsafe code is allowed; every block says why it is sound.

pub mod attach;
pub mod disk;
pub mod kernels;
pub mod ring;
pub mod root;

#[cfg(test)]
mod scratch;
