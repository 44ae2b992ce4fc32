//! The way to a peer: its address, and how packets to it are marked.

use core::net::SocketAddr;

/// Explicit congestion notification, the two low bits of the traffic class (RFC 3168).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ecn {
    /// Not capable.
    #[default]
    NotEct,
    /// Capable, codepoint 1.
    Ect1,
    /// Capable, codepoint 0 (what RoCE senders set).
    Ect0,
    /// Congestion experienced.
    Ce,
}

/// Where packets of a queue pair go and how they are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// The peer's address; the port is 4791 unless both sides agreed on another.
    pub remote: SocketAddr,
    /// DiffServ codepoint, 0–63.
    pub dscp: u8,
    /// ECN codepoint to send with.
    pub ecn: Ecn,
    /// Which of the wire's own addresses the packets leave from: index in its list, 0 if it has
    /// one.
    pub source: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
}

impl Path {
    /// The usual path to `remote`: ECN capable, no DSCP, from the wire's first address.
    pub const fn new(remote: SocketAddr) -> Path {
        Path { remote, dscp: 0, ecn: Ecn::Ect0, source: 0, hop_limit: 64 }
    }
}
