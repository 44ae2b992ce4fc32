//! What the data plane needs of the machine: disks, exported folders, shared memory, the processor.
//!
//! | module | what it holds |
//! |---|---|
//! | [`disk`], [`root`], `stored` | io_uring reads; files opened below exported folders only, as places that hold datasets |
//! | [`memory`] | datasets in memory with faults, for tests: the other such place, and its disk |
//! | [`ring`], [`attach`] | the host ring in shared memory, and the local socket that hands it over |
//! | [`kernels`] | the per-byte kernels for this processor, with the feature `codecs` also compressors |
//! | `wasm` | with the feature `wasm`: user actions in a sandbox |
//! | [`accounts`] | numbers of users and groups by their names |
//! | [`process`] | the number of this process, for what a forked child must not use |
//!
//! A trainer needs only `ring` and `attach`: `disk` and `root` are behind the feature `disk`.
//! Networking does not belong here: sockets and registered memory are in `nic`, and a disk receives
//! the address of the memory to fill. Decisions about datasets, plans and blocks are in `xio`,
//! which sees the machine through the traits that these modules implement. Unsafe code is allowed;
//! every block states why it is sound.

pub mod accounts;
pub mod attach;
#[cfg(feature = "codecs")]
mod codecs;
#[cfg(feature = "disk")]
pub mod disk;
pub mod kernels;
#[cfg(feature = "disk")]
pub mod memory;
pub mod process;
pub mod ring;
#[cfg(feature = "disk")]
pub mod root;
#[cfg(feature = "disk")]
mod stored;

#[cfg(all(test, feature = "disk"))]
mod scratch;
#[cfg(feature = "wasm")]
pub mod wasm;
