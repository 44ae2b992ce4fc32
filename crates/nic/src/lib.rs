//! The network as the operating system offers it: sockets, devices, registered memory, clocks.
//!
//! | module | what it holds |
//! |---|---|
//! | [`udp`] | the UDP wire: segmented sends, coalesced receives, ICRC, DSCP and ECN |
//! | [`roce_v1`] | the wire of RoCEv1: Ethernet frames with a GRH through a packet socket |
//! | [`device`] | the wire of a device: several addresses, shared by the processes of a machine |
//! | `xdp` | the UDP wire with a shorter way for small packets: AF_XDP (feature `xdp`) |
//! | [`capture`] | what a wire sends and accepts, as a pcap file |
//! | [`rates`] | what each job of this machine may send, and when |
//! | [`packet`] | the RoCE packets on the interfaces of this machine, for captures |
//! | [`interfaces`] | network interfaces and their addresses |
//! | [`netlink`] | questions to the kernel about its network, and changes of it |
//! | [`doctor`] | whether this machine is fit for it |
//! | [`abi`] | structures and constants of `infiniband/verbs.h` |
//! | [`loaded`] | devices behind a libibverbs that is found at run time |
//! | [`umad`] | management datagrams of InfiniBand, by a libibumad that is found at run time |
//! | [`local_peers`] | memory of other processes of this machine, reached without packets |
//! | [`fault`] | a wire that loses packets on purpose |
//! | [`peer`] | who is at the other end of a Unix socket |
//! | [`private`] | the user's private directory |
//! | [`pool`] | registered memory: one pre-faulted region |
//! | [`movable`] | memory of the program, moved to where local peers can map it |
//! | [`mappings`], [`userfault`] | what this process has mapped; who learns of faults in it |
//! | [`waiter`], [`clock`] | sleeping and waking; time, CPU time, resident memory |
//!
//! Protocol decisions do not belong here: they are in `roce`, which sees the machine only through
//! the traits that these modules implement. Disks, rings and files are in `host`. Unsafe code is
//! allowed here; every block says why it is sound.

pub mod abi;
pub mod capture;
pub mod clock;
pub mod device;
pub mod doctor;
pub mod driver;
pub mod fault;
pub mod interfaces;
mod link;
pub mod loaded;
pub mod local_files;
pub mod local_peers;
pub mod mappings;
pub mod movable;
pub mod netlink;
pub mod packet;
pub mod peer;
pub mod pool;
pub mod private;
pub mod rates;
pub mod ready;
pub mod roce_v1;
mod sockaddr;
pub mod udp;
pub mod umad;
pub mod userfault;
pub mod waiter;
#[cfg(feature = "xdp")]
pub mod xdp;

#[cfg(test)]
#[path = "../../../testing/skip.rs"]
mod skip;
