//! The layout of the two files of a ring, and the checks of what is read from them.
//!
//! Pure arithmetic and encoding: nothing here maps, waits or makes system calls. The *data* file is
//! written by the producer alone; the *credit* file is the only one that the consumer can write.
//! Where several processes read a ring, each has a credit file of its own.
//!
//! ```text
//! data file     0  header           magic, version, geometry, nonce, checksum (never changes)
//!             128  produced   u64   slots published so far
//!             256  bell       u32   futex word, changes whenever the producer wakes the consumer
//!             384  credit_wait u64  0, or the number of the producer's present wait for credits
//!             512  end        u32   0 open, 1 finished, 2 failed; then code u32, text length u32
//!             528  end text         up to MAX_END_TEXT_BYTES of UTF-8
//!            4096  descriptors      one per slot, at (sequence mod slots)
//!               …  slots            page aligned, slot_bytes each
//! credit file   0  header           the same, marked as the credit file
//!             128  sleep      u64   0 awake, or 1 + slots taken when the consumer fell asleep
//!             256  released   u64 per slot: 1 + sequence of the last publication given back
//! ```
//!
//! Words that different sides write are at least 128 bytes apart, because x86 fetches cache lines
//! in pairs. All words are native-endian: both sides run on one machine, which the magic verifies.

use super::{AttachRefusal, DescriptorFault, RingError};

/// First eight bytes of both files.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"DQ-RING\0");
/// Version of this layout. Any other is refused.
pub const VERSION: u32 = 1;
/// Most slots of a ring.
pub const MAX_SLOTS: u32 = 1024;
/// Most processes that read one ring.
pub const MAX_READERS: u32 = 64;
/// Smallest slot, and the unit that slot sizes are multiples of.
pub const MIN_SLOT_BYTES: u64 = 4096;
/// Largest slot.
pub const MAX_SLOT_BYTES: u64 = 1 << 30;
/// Most payload bytes of a whole ring.
pub const MAX_RING_BYTES: u64 = 64 << 30;
/// Longest error text that ends a stream; longer ones are cut at a character.
pub const MAX_END_TEXT_BYTES: usize = 1024;

pub(super) const HEADER_BYTES: usize = 64;
pub(super) const DESCRIPTOR_WORDS: usize = 8;
const DESCRIPTOR_BYTES: u64 = 8 * DESCRIPTOR_WORDS as u64;
const PAGE_BYTES: u64 = 4096;

pub(super) const PRODUCED_AT: usize = 128;
pub(super) const DOORBELL_AT: usize = 256;
pub(super) const CREDIT_WAIT_AT: usize = 384;
pub(super) const END_AT: usize = 512;
pub(super) const END_CODE_AT: usize = 516;
pub(super) const END_TEXT_LEN_AT: usize = 520;
pub(super) const END_TEXT_AT: usize = 528;
pub(super) const SLEEP_AT: usize = 128;
const RELEASED_AT: usize = 256;
const DESCRIPTORS_AT: usize = PAGE_BYTES as usize;

const _: () = assert!(END_TEXT_AT + MAX_END_TEXT_BYTES <= DESCRIPTORS_AT);

/// `end` word of an open stream.
pub(super) const END_OPEN: u32 = 0;
/// `end` word after [`finish`](super::Producer::finish).
pub(super) const END_FINISHED: u32 = 1;
/// `end` word after [`fail`](super::Producer::fail).
pub(super) const END_FAILED: u32 = 2;

/// Slot count and slot size, known to be within the limits above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    slots: u32,
    slot_bytes: u64,
}

impl Geometry {
    /// Checks the limits; `Err` names the field that is outside.
    pub fn new(slots: u32, slot_bytes: u64) -> Result<Geometry, RingError> {
        let out = |field, value, min, max| Err(RingError::Limit { field, value, min, max });
        if !(1..=MAX_SLOTS).contains(&slots) {
            return out("slots", u64::from(slots), 1, u64::from(MAX_SLOTS));
        }
        if !(MIN_SLOT_BYTES..=MAX_SLOT_BYTES).contains(&slot_bytes) {
            return out("slot_bytes", slot_bytes, MIN_SLOT_BYTES, MAX_SLOT_BYTES);
        }
        if !slot_bytes.is_multiple_of(MIN_SLOT_BYTES) {
            return Err(RingError::SlotAlignment { slot_bytes });
        }
        // Cannot overflow: 2^10 slots of at most 2^30 bytes.
        let total = u64::from(slots) * slot_bytes;
        if total > MAX_RING_BYTES {
            return out("slots * slot_bytes", total, MIN_SLOT_BYTES, MAX_RING_BYTES);
        }
        Ok(Geometry { slots, slot_bytes })
    }

    /// Number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Size of one slot in bytes.
    pub const fn slot_bytes(&self) -> usize {
        self.slot_bytes as usize
    }

    fn slots_at(&self) -> u64 {
        let table = u64::from(self.slots) * DESCRIPTOR_BYTES;
        DESCRIPTORS_AT as u64 + table.next_multiple_of(PAGE_BYTES)
    }

    /// Size of the data file.
    pub(super) fn data_bytes(&self) -> u64 {
        self.slots_at() + u64::from(self.slots) * self.slot_bytes
    }

    /// Size of the credit file.
    pub(super) fn credit_bytes(&self) -> u64 {
        (RELEASED_AT as u64 + 8 * u64::from(self.slots)).next_multiple_of(PAGE_BYTES)
    }

    /// Offset of the descriptor of publication `sequence` in the data file.
    pub(super) fn descriptor_at(&self, sequence: u64) -> usize {
        let entry = sequence % u64::from(self.slots);
        DESCRIPTORS_AT + (entry * DESCRIPTOR_BYTES) as usize
    }

    /// Offset of slot `slot` in the data file.
    pub(super) fn slot_at(&self, slot: u32) -> usize {
        debug_assert!(slot < self.slots);
        (self.slots_at() + u64::from(slot) * self.slot_bytes) as usize
    }

    /// Offset of the release word of slot `slot` in the credit file.
    pub(super) fn released_at(&self, slot: u32) -> usize {
        debug_assert!(slot < self.slots);
        RELEASED_AT + 8 * slot as usize
    }
}

/// The file that a header belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingFile {
    /// Header, descriptors and slots; read-only for the consumer.
    Data,
    /// Release words and the consumer's sleep word.
    Credit,
}

impl RingFile {
    const fn tag(self) -> u32 {
        match self {
            RingFile::Data => 1,
            RingFile::Credit => 2,
        }
    }
}

impl std::fmt::Display for RingFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RingFile::Data => "data file",
            RingFile::Credit => "credit file",
        })
    }
}

/// The part of a file that never changes after creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) geometry: Geometry,
    /// The same in both files of one ring, different between rings.
    pub(super) nonce: u64,
}

impl Header {
    /// The header at offset 0 of `file`.
    pub(super) fn encode(&self, file: RingFile) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..12].copy_from_slice(&VERSION.to_ne_bytes());
        bytes[12..16].copy_from_slice(&file.tag().to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.geometry.slots.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.geometry.slot_bytes.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.nonce.to_ne_bytes());
        let sum = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&sum.to_ne_bytes());
        bytes
    }

    /// Checks the bytes found at offset 0 of `file`.
    pub(super) fn decode(
        bytes: &[u8; HEADER_BYTES],
        file: RingFile,
    ) -> Result<Header, AttachRefusal> {
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        if long(0) != MAGIC {
            return Err(AttachRefusal::Magic { file, found: long(0) });
        }
        if word(8) != VERSION {
            return Err(AttachRefusal::Version { file, found: word(8) });
        }
        let sum = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
        if word(HEADER_BYTES - 4) != sum {
            return Err(AttachRefusal::Checksum { file });
        }
        if word(12) != file.tag() {
            return Err(AttachRefusal::WrongFile { file });
        }
        let geometry = Geometry::new(word(16), long(24))
            .map_err(|_| AttachRefusal::Geometry { slots: word(16), slot_bytes: long(24) })?;
        Ok(Header { geometry, nonce: long(32) })
    }
}

/// What one published slot holds.
///
/// Batches lie one after the other from the start of the slot, each `batch_bytes` long; only the
/// last may be shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotMeta {
    /// Payload bytes from the start of the slot, at least 1.
    pub bytes: u64,
    /// Number of the first batch in the stream.
    pub first_batch: u64,
    /// Batches in this slot, at least 1.
    pub batch_count: u32,
    /// Bytes of each batch.
    pub batch_bytes: u64,
    /// CRC32C of the payload, if the consumer is to be able to check it.
    pub crc32c: Option<u32>,
}

impl SlotMeta {
    /// Checks that the numbers are consistent and fit a slot of `slot_bytes`.
    pub(super) fn check(&self, slot_bytes: u64) -> Result<(), DescriptorFault> {
        if !(1..=slot_bytes).contains(&self.bytes) {
            return Err(DescriptorFault::Length { bytes: self.bytes, slot_bytes });
        }
        if self.batch_bytes == 0 || self.bytes.div_ceil(self.batch_bytes) != self.count() {
            return Err(DescriptorFault::Batches {
                bytes: self.bytes,
                batch_count: self.batch_count,
                batch_bytes: self.batch_bytes,
            });
        }
        match self.first_batch.checked_add(self.count()) {
            Some(_) => Ok(()),
            None => Err(DescriptorFault::BatchNumber { first_batch: self.first_batch }),
        }
    }

    fn count(&self) -> u64 {
        u64::from(self.batch_count)
    }
}

/// A descriptor: which slot publication `sequence` is in, and what the slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) sequence: u64,
    pub(super) slot: u32,
    pub(super) meta: SlotMeta,
}

/// Status word of a published descriptor; anything else was never written by a producer.
const STATUS_READY: u64 = 0x5259_4441;
const FLAG_CRC: u64 = 1 << 32;

impl Descriptor {
    pub(super) fn encode(&self) -> [u64; DESCRIPTOR_WORDS] {
        let meta = &self.meta;
        let flags = if meta.crc32c.is_some() { FLAG_CRC } else { 0 };
        [
            self.sequence,
            STATUS_READY | flags,
            u64::from(self.slot),
            meta.bytes,
            meta.first_batch,
            u64::from(meta.batch_count),
            meta.batch_bytes,
            u64::from(meta.crc32c.unwrap_or(0)),
        ]
    }

    /// Checks the descriptor that should be publication `sequence`.
    pub(super) fn decode(
        words: [u64; DESCRIPTOR_WORDS],
        sequence: u64,
        geometry: &Geometry,
    ) -> Result<Descriptor, DescriptorFault> {
        let [found, status, slot, bytes, first_batch, batch_count, batch_bytes, crc] = words;
        if found != sequence {
            return Err(DescriptorFault::Sequence { found });
        }
        if status & !FLAG_CRC != STATUS_READY {
            return Err(DescriptorFault::Status { found: status });
        }
        let narrow = |value: u64, max: u32| u32::try_from(value).ok().filter(|&v| v <= max);
        let slot = narrow(slot, geometry.slots - 1)
            .ok_or(DescriptorFault::Slot { found: slot, slots: geometry.slots })?;
        let fault = DescriptorFault::Word { batch_count, crc };
        let batch_count = narrow(batch_count, u32::MAX).ok_or(fault)?;
        let crc = narrow(crc, u32::MAX).ok_or(fault)?;
        let crc32c = (status & FLAG_CRC != 0).then_some(crc);
        let meta = SlotMeta { bytes, first_batch, batch_count, batch_bytes, crc32c };
        meta.check(geometry.slot_bytes)?;
        Ok(Descriptor { sequence, slot, meta })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> impl Strategy<Value = Geometry> {
        (1..=MAX_SLOTS, 1u64..=16).prop_map(|(n, k)| Geometry::new(n, k * 4096).unwrap())
    }

    #[test]
    fn limits_are_refused_by_field() {
        let field = |slots, bytes| match Geometry::new(slots, bytes) {
            Err(RingError::Limit { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(0, 4096), "slots");
        assert_eq!(field(1025, 4096), "slots");
        assert_eq!(field(1, 0), "slot_bytes");
        assert_eq!(field(1, MAX_SLOT_BYTES + 4096), "slot_bytes");
        assert_eq!(field(1024, MAX_SLOT_BYTES), "slots * slot_bytes");
        assert_eq!(Geometry::new(2, 5000), Err(RingError::SlotAlignment { slot_bytes: 5000 }));
    }

    proptest! {
        #[test]
        fn nothing_overlaps(g in geometry()) {
            let last_descriptor = g.descriptor_at(u64::from(g.slots()) - 1) + DESCRIPTOR_BYTES as usize;
            prop_assert!(last_descriptor <= g.slot_at(0));
            prop_assert_eq!(g.slot_at(0) % 4096, 0);
            let end = g.slot_at(g.slots() - 1) + g.slot_bytes();
            prop_assert_eq!(end as u64, g.data_bytes());
            prop_assert!(g.released_at(g.slots() - 1) as u64 + 8 <= g.credit_bytes());
        }

        #[test]
        fn header_round_trips_and_any_flip_is_refused(
            g in geometry(), nonce: u64, bit in 0..HEADER_BYTES * 8,
        ) {
            let header = Header { geometry: g, nonce };
            let mut bytes = header.encode(RingFile::Data);
            prop_assert_eq!(Header::decode(&bytes, RingFile::Data), Ok(header));
            prop_assert_eq!(
                Header::decode(&bytes, RingFile::Credit),
                Err(AttachRefusal::WrongFile { file: RingFile::Credit })
            );
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes, RingFile::Data).is_err());
        }

        #[test]
        fn descriptor_round_trips(
            g in geometry(), sequence: u64, first_batch in 0..u64::MAX / 2,
            bytes in 1u64..=4096, batch_bytes in 1u64..5000, crc: Option<u32>,
        ) {
            let batch_count = bytes.div_ceil(batch_bytes) as u32;
            let meta = SlotMeta { bytes, first_batch, batch_count, batch_bytes, crc32c: crc };
            let descriptor = Descriptor { sequence, slot: g.slots() - 1, meta };
            prop_assert_eq!(Descriptor::decode(descriptor.encode(), sequence, &g), Ok(descriptor));
        }

        #[test]
        fn garbled_descriptor_stays_in_bounds(
            g in geometry(), word in 0..DESCRIPTOR_WORDS, value: u64, small in 0u64..5000,
        ) {
            let meta =
                SlotMeta { bytes: 96, first_batch: 7, batch_count: 3, batch_bytes: 32, crc32c: None };
            for garbage in [value, small] {
                let mut words = Descriptor { sequence: 9, slot: 0, meta }.encode();
                words[word] = garbage;
                if let Ok(d) = Descriptor::decode(words, 9, &g) {
                    prop_assert!(d.slot < g.slots());
                    prop_assert!(d.meta.bytes as usize <= g.slot_bytes());
                    let batches = u64::from(d.meta.batch_count);
                    prop_assert!((batches - 1) * d.meta.batch_bytes < d.meta.bytes);
                }
            }
        }
    }
}
