//! RoCE on the wire, versions 1 and 2: opcodes, headers, ICRC, and captures of them.
//!
//! Two levels: byte *views* (a checked constructor, then named fields) and *representations* that
//! can only hold legal values. [`Headers`] is the representation the rest of the crate uses.
//!
//! | module | what it holds |
//! |---|---|
//! | [`views`] | byte views of the transport headers |
//! | [`grh`] | the global route header of RoCEv1, and GIDs |
//! | [`icrc`] | the invariant CRC, and the recovery of a packet's IPv4 identification |
//! | [`frame`] | whole packets: Ethernet, IP and UDP or GRH, and RoCE, byte for byte in both directions |
//! | [`telemetry`] | the header that switches stamp |
//! | [`digest`] | a utilization in one byte of it |
//! | [`capture`] | pcap files, and the check of every RoCE packet in one |
//!
//! Nothing of the crate outside this folder is used in it. All input is hostile until parsed: no
//! function here panics on any bytes (C7).

pub mod capture;
pub mod digest;
pub mod frame;
pub mod grh;
mod headers;
pub mod icrc;
mod opcode;
pub mod psn;
mod qpn;
pub mod telemetry;
pub mod views;

pub use headers::{
    Aeth, AtomicAckEth, AtomicEth, BTH_BYTES, Bth, Deth, Ext, Headers, ICRC_BYTES,
    MAX_HEADER_BYTES, Reth, Sack, Sreth, Syndrome, WireError,
};
pub use opcode::{ExtKind, Opcode, Operation, Place, Service};
pub use psn::Psn;
pub use qpn::Qpn;

/// UDP destination port of RoCEv2 (IBA annex A17).
pub const ROCE_PORT: u16 = 4791;

/// UDP ports of single processes of a machine, instead of the shared one: this base plus the
/// process's number, 1–254. The queue pair numbers of such a process have that number in their
/// upper 8 bits. The ports are not registered and outside the range of ephemeral ports.
pub const PROCESS_PORT_BASE: u16 = 0x7200;

/// First byte of a packet that one process forwards to another on such a port: an opcode of the
/// range that InfiniBand leaves to manufacturers.
pub const FORWARDED_OPCODE: u8 = 0xff;

/// Whether this is the port of a single process.
pub const fn is_process_port(port: u16) -> bool {
    port > PROCESS_PORT_BASE && port < PROCESS_PORT_BASE + 0xff
}

/// The default partition key: full member of the default partition.
pub const DEFAULT_PKEY: u16 = 0xffff;
