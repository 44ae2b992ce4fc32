//! Everything that touches the operating system: sockets, registered memory, disks, rings, clocks.
//!
//! | module | what it holds |
//! |---|---|
//! | [`udp`] | the UDP wire: segmented sends, joined receives, ICRC, DSCP and ECN |
//! | [`device`] | the wire of a device: several addresses, shared by the processes of a machine |
//! | [`capture`] | what a wire sends and accepts, as a pcap file |
//! | [`packet`] | the RoCE packets on the interfaces of this machine, for captures |
//! | [`interfaces`] | network interfaces and their addresses |
//! | [`doctor`] | whether this machine is fit for it |
//! | [`fault`] | a wire that loses packets on purpose |
//! | [`pool`] | registered memory: one pre-faulted region |
//! | [`disk`], [`root`] | io_uring reads; files opened below exported folders only |
//! | [`kernels`] | the per-byte kernels for this processor |
//! | [`ring`], [`attach`] | the host ring in shared memory, and the local socket that hands it over |
//! | [`waiter`], [`clock`] | sleeping and waking; time, CPU time, resident memory |
//!
//! Protocol decisions do not belong here: they are in `roce` and `xio`, which see the machine only
//! through the traits that these modules implement. Unsafe code is allowed here; every block says why it
//! is sound.

pub mod attach;
pub mod capture;
pub mod clock;
pub mod device;
pub mod disk;
pub mod doctor;
pub mod fault;
pub mod interfaces;
pub mod kernels;
pub mod packet;
pub mod pool;
pub mod ring;
pub mod root;
pub mod udp;
pub mod waiter;

#[cfg(test)]
mod scratch;
#[cfg(test)]
#[path = "../../../testing/skip.rs"]
mod skip;
