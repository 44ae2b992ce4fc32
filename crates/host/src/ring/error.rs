//! All errors of a ring, by reason.
//!
//! There are three levels: [`AttachRefusal`] for files that are no ring, [`DescriptorFault`] for an
//! inconsistent slot descriptor, [`RingError`] for everything that a caller can get. Each names the
//! value at fault; `reason` is a short stable name for counting.

use rustix::io::Errno;
use thiserror::Error;

use super::{MIN_SLOT_BYTES, RingFile, VERSION};

/// Why a ring operation was refused or a stream ended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RingError {
    /// A system call failed.
    #[error("ring: {call}: {errno}")]
    Os {
        /// The call.
        call: &'static str,
        /// What it returned.
        #[source]
        errno: Errno,
    },
    /// A size is outside its limits.
    #[error("ring: {field} is {value}, allowed are {min} to {max}")]
    Limit {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// The slot size is not a multiple of the page size.
    #[error("ring: slot_bytes is {slot_bytes}, must be a multiple of {MIN_SLOT_BYTES}")]
    SlotAlignment {
        /// The requested size.
        slot_bytes: u64,
    },
    /// The files handed over are not a ring this version can use.
    #[error("ring refused: {0}")]
    Refused(#[from] AttachRefusal),
    /// The slot is not being filled: it was not handed out by `free_slot`, or is published already.
    #[error("ring: slot {slot} is not being filled")]
    NotFilling {
        /// The slot.
        slot: u32,
    },
    /// A write past the end of a slot.
    #[error("ring: write of {len} bytes at {offset} leaves slot {slot} of {slot_bytes} bytes")]
    OutOfSlot {
        /// The slot.
        slot: u32,
        /// Where the write would start.
        offset: usize,
        /// Its length.
        len: usize,
        /// Size of the slot.
        slot_bytes: usize,
    },
    /// The description of a slot contradicts itself.
    #[error("ring: slot {slot} cannot be published: {fault}")]
    BadMeta {
        /// The slot.
        slot: u32,
        /// What is wrong.
        fault: DescriptorFault,
    },
    /// `publish` after `finish` or `fail`.
    #[error("ring: the stream was ended, nothing more can be published")]
    Ended,
    /// Nothing was published in time. The stream continues; call again.
    #[error("ring: no batch after {waited_ms} ms")]
    TimedOut {
        /// How long the caller allowed.
        waited_ms: u64,
    },
    /// The producer ended the stream with an error. All slots published before were delivered.
    #[error("stream failed (code {code}): {message}")]
    StreamFailed {
        /// The producer's code.
        code: u32,
        /// The producer's words, as it wrote them: a terminal may obey what is in them.
        message: String,
    },
    /// The producer's process died without ending the stream.
    #[error(
        "the data daemon died or closed the stream after slot {taken}; \
         open the stream again and resume from the last batch used"
    )]
    ProducerDied {
        /// Slots that were delivered.
        taken: u64,
    },
    /// A descriptor is inconsistent; the ring cannot be used further.
    #[error("ring: descriptor of slot number {sequence} is damaged: {fault}")]
    BadDescriptor {
        /// Which publication.
        sequence: u64,
        /// What is wrong.
        fault: DescriptorFault,
    },
    /// The producer's counter is impossible; the ring cannot be used further.
    #[error("ring: producer counts {produced} slots where {taken} were taken and {slots} exist")]
    BadCounter {
        /// Value of the counter.
        produced: u64,
        /// Slots taken so far.
        taken: u64,
        /// Slots in the ring.
        slots: u32,
    },
    /// The word that ends a stream has an unknown value; the ring cannot be used further.
    #[error("ring: unknown stream state {found}")]
    BadEnd {
        /// The word found.
        found: u32,
    },
    /// The consumer is used in a child of the process that attached it.
    #[error("ring: attached by process {owner}, used by its child {user}; attach in each process")]
    Forked {
        /// The process that attached.
        owner: u32,
        /// The process that used it.
        user: u32,
    },
}

/// Why [`Consumer::attach`](super::Consumer::attach) refused the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AttachRefusal {
    /// The file lacks seals, so the producer could truncate it under us.
    #[error("{file} lacks seals (has {found:#x}, needs {needed:#x})")]
    Seals {
        /// Which file.
        file: RingFile,
        /// Seals found.
        found: u32,
        /// Seals needed.
        needed: u32,
    },
    /// The file is not as long as its header says.
    #[error("{file} has {found} bytes where {expected} are needed")]
    Size {
        /// Which file.
        file: RingFile,
        /// Its length.
        found: u64,
        /// The length that its header implies.
        expected: u64,
    },
    /// Not a ring at all, or one of another byte order.
    #[error("{file} starts with {found:#018x}, which is no ring")]
    Magic {
        /// Which file.
        file: RingFile,
        /// First eight bytes.
        found: u64,
    },
    /// Another version of the layout.
    #[error(
        "{file} has layout version {found}, this program needs {VERSION}; update the older side"
    )]
    Version {
        /// Which file.
        file: RingFile,
        /// Its version.
        found: u32,
    },
    /// The header was damaged.
    #[error("{file} has a damaged header (checksum)")]
    Checksum {
        /// Which file.
        file: RingFile,
    },
    /// Data and credit file were exchanged.
    #[error("the file passed as {file} is the other one")]
    WrongFile {
        /// What it should be.
        file: RingFile,
    },
    /// Sizes outside the limits.
    #[error("header names {slots} slots of {slot_bytes} bytes, outside the limits")]
    Geometry {
        /// Slots named.
        slots: u32,
        /// Slot size named.
        slot_bytes: u64,
    },
    /// The files belong to different rings.
    #[error("data and credit file belong to different rings")]
    Mixed,
}

/// What is wrong with a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DescriptorFault {
    /// It belongs to another publication.
    #[error("it is number {found}")]
    Sequence {
        /// The number found.
        found: u64,
    },
    /// It was never written as published.
    #[error("status {found:#x}")]
    Status {
        /// The word found.
        found: u64,
    },
    /// No such slot.
    #[error("slot {found} of {slots}")]
    Slot {
        /// The slot named.
        found: u64,
        /// Slots in the ring.
        slots: u32,
    },
    /// The slot is still held by this consumer.
    #[error("slot {slot} is still in use")]
    Held {
        /// The slot.
        slot: u32,
    },
    /// Empty, or longer than a slot.
    #[error("{bytes} bytes in a slot of {slot_bytes}")]
    Length {
        /// Payload length.
        bytes: u64,
        /// Slot size.
        slot_bytes: u64,
    },
    /// Length, count and size of the batches disagree.
    #[error("{batch_count} batches of {batch_bytes} bytes do not make {bytes} bytes")]
    Batches {
        /// Payload length.
        bytes: u64,
        /// Number of batches.
        batch_count: u32,
        /// Size of each.
        batch_bytes: u64,
    },
    /// Batch numbers would pass 2^64.
    #[error("first batch is number {first_batch}")]
    BatchNumber {
        /// Number of the first batch.
        first_batch: u64,
    },
    /// A 32-bit field is larger than 32 bits.
    #[error("batch count {batch_count:#x} or checksum {crc:#x} exceeds 32 bits")]
    Word {
        /// Batch count found.
        batch_count: u64,
        /// Checksum found.
        crc: u64,
    },
    /// The payload is not what the producer wrote.
    #[error("payload has CRC32C {found:#010x}, expected {expected:#010x}")]
    Checksum {
        /// Computed from the payload.
        found: u32,
        /// From the descriptor.
        expected: u32,
    },
}

impl RingError {
    /// A short stable name, for counting by reason.
    pub const fn reason(&self) -> &'static str {
        match self {
            RingError::Os { .. } => "os",
            RingError::Limit { .. } => "limit",
            RingError::SlotAlignment { .. } => "slot_alignment",
            RingError::Refused(refusal) => refusal.reason(),
            RingError::NotFilling { .. } => "not_filling",
            RingError::OutOfSlot { .. } => "out_of_slot",
            RingError::BadMeta { .. } => "bad_meta",
            RingError::Ended => "ended",
            RingError::TimedOut { .. } => "timed_out",
            RingError::StreamFailed { .. } => "stream_failed",
            RingError::ProducerDied { .. } => "producer_died",
            RingError::BadDescriptor { .. } => "bad_descriptor",
            RingError::BadCounter { .. } => "bad_counter",
            RingError::BadEnd { .. } => "bad_end",
            RingError::Forked { .. } => "forked",
        }
    }

    /// Whether the same call may succeed later on the same ring.
    pub const fn is_timeout(&self) -> bool {
        matches!(self, RingError::TimedOut { .. })
    }
}

impl AttachRefusal {
    /// A short stable name, for counting by reason.
    pub const fn reason(&self) -> &'static str {
        match self {
            AttachRefusal::Seals { .. } => "attach_seals",
            AttachRefusal::Size { .. } => "attach_size",
            AttachRefusal::Magic { .. } => "attach_magic",
            AttachRefusal::Version { .. } => "attach_version",
            AttachRefusal::Checksum { .. } => "attach_checksum",
            AttachRefusal::WrongFile { .. } => "attach_wrong_file",
            AttachRefusal::Geometry { .. } => "attach_geometry",
            AttachRefusal::Mixed => "attach_mixed",
        }
    }
}
