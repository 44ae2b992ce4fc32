//! What an endpoint does with a packet that arrived, besides changing state.

use crate::io::AtomicOp;
#[cfg(doc)]
use crate::memory::sg::Placement;
use crate::memory::sg::Placements;
use crate::verbs::{GRH_BYTES, Qpn};
use crate::wire::Psn;

/// What to do with a packet that arrived.
#[derive(Clone, Debug, Default)]
pub struct Delivery {
    /// Where `insert` and the packet's payload are placed, one after the other, in order. Empty if
    /// there is nothing to place. Bytes of a piece that [is skipped](Placement::is_skipped) are not
    /// placed: a later packet that arrived before this one has already overwritten them.
    pub pieces: Placements,
    /// What precedes the payload, or replaces the placement.
    pub insert: Insert,
    /// If not 0: the packet is a request behind READs with this many responses still to be sent,
    /// and was not processed yet. [`world::turn`](crate::world::turn) gathers these responses if
    /// they are few, and then passes the packet to
    /// [`handle_held`](crate::endpoint::Endpoint::handle_held).
    pub owed_packets: u32,
}

/// Bytes to place that are not in a payload, or an atomic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Insert {
    /// Nothing.
    #[default]
    None,
    /// The former value of an atomic of ours: 8 bytes in host byte order.
    Value(u64),
    /// The route header in front of a datagram.
    RouteHeader([u8; GRH_BYTES as usize]),
    /// The peer's atomic: execute it and pass the original value to [`complete_atomic`]
    /// before any other call.
    ///
    /// [`complete_atomic`]: crate::endpoint::Endpoint::complete_atomic
    Atomic(AtomicJob),
}

/// An atomic on memory of ours, all checks passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicJob {
    /// The word, 8-byte aligned, in registered memory.
    pub addr: u64,
    /// What to do.
    pub op: AtomicOp,
    /// The responder's queue pair.
    pub qpn: Qpn,
    /// PSN of the request.
    pub psn: Psn,
}
