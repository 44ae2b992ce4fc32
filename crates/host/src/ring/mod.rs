//! The host ring: batches written once into memory that the trainer maps.
//!
//! One [`Producer`] (the DPU process; on real hardware a DMA engine does its copies) and one
//! [`Consumer`] (the trainer) share two anonymous files and an eventfd, passed as [`RingFds`].
//! Trainers that need the same batches read one ring together: each gets every slot, and each has a
//! credit file of its own. Either may be killed at any instant; the other notices through the Unix
//! socket on which they were passed ([`attach`](crate::attach)). Slots carry whole batches. They
//! are published in order and returned in any order:
//!
//! ```text
//!   FREE --free_slot--> FILLING --publish--> READY --next--> HELD --last view dropped--> FREE
//!        (producer's private state)        (descriptor)    (consumer)   (release word per slot)
//! ```
//!
//! A publication goes into *any* free slot, which its descriptor names, so one long-lived view
//! costs one slot and never blocks the others.
//!
//! Rules:
//! - Only the producer can write the data file: it is sealed against later writable mappings. All
//!   that a consumer can change is its sleep word, its release words and the eventfd; the producer
//!   compares those with its own state and counts values that no correct consumer writes (C7). A
//!   consumer that writes false values gets its own slots overwritten too soon, and affects nothing
//!   else.
//! - The consumer checks every number that it takes from the producer before it is used.
//! - Processes that read one ring together trust each other: a slot is free when all have returned
//!   it.
//! - Nothing is queued: `slots` bounds what is under way (C6). Counters are 64 bits and never wrap.
//!
//! `layout` defines the layout, `map` owns the memory, `growth` says when a slot gets its own,
//! `wake` is the wake-up protocol.

mod consumer;
mod copy;
mod error;
mod growth;
mod layout;
mod map;
mod producer;
mod wake;

#[cfg(test)]
mod tests;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

pub use consumer::{BatchView, Batches, Consumer, ConsumerCounters, SlotView};
pub use error::{AttachRefusal, DescriptorFault, RingError};
pub use layout::{
    Geometry, MAX_END_TEXT_BYTES, MAX_READERS, MAX_RING_BYTES, MAX_SLOT_BYTES, MAX_SLOTS,
    MIN_SLOT_BYTES, RingFile, SlotMeta, VERSION,
};
pub use producer::{Producer, ProducerCounters, SlotIndex};

/// Size of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// Slots, 1 to [`MAX_SLOTS`].
    pub slots: u32,
    /// Bytes of each slot: a multiple of [`MIN_SLOT_BYTES`], at most [`MAX_SLOT_BYTES`]. No batch
    /// may be larger.
    pub slot_bytes: u64,
}

impl Default for RingConfig {
    /// 32 slots of 1 MiB.
    fn default() -> RingConfig {
        RingConfig { slots: 32, slot_bytes: 1 << 20 }
    }
}

/// What the consumer needs to attach: pass these over the Unix socket, in this order.
#[derive(Debug)]
pub struct RingFds {
    /// Header, descriptors and slots.
    pub data: OwnedFd,
    /// Release words and sleep word.
    pub credit: OwnedFd,
    /// eventfd that the consumer signals when the producer waits for a slot.
    pub doorbell: OwnedFd,
}

impl RingFds {
    /// How many descriptors there are.
    pub const COUNT: usize = 3;

    /// The descriptors in the order in which they are passed.
    pub fn to_pass(&self) -> [BorrowedFd<'_>; RingFds::COUNT] {
        [self.data.as_fd(), self.credit.as_fd(), self.doorbell.as_fd()]
    }
}

impl From<[OwnedFd; RingFds::COUNT]> for RingFds {
    fn from([data, credit, doorbell]: [OwnedFd; RingFds::COUNT]) -> RingFds {
        RingFds { data, credit, doorbell }
    }
}

/// Why a producer ended a stream: the codes of [`Producer::fail`]. They are stable, because
/// consumers of another version may read them.
pub mod codes {
    /// A token does not fit the type to deliver.
    pub const DATA: u32 = 1;
    /// The target can no longer deliver the file.
    pub const STORAGE: u32 = 2;
    /// A target became unreachable.
    pub const PEER: u32 = 3;
    /// The DPU was asked to stop.
    pub const STOPPED: u32 = 4;
    /// Another rank that reads the stream left it, or never came.
    pub const RANK: u32 = 5;
}

/// CRC32C of `payload`, as stored in [`SlotMeta::crc32c`].
pub fn checksum(payload: &[u8]) -> u32 {
    crc32c::crc32c(payload)
}
