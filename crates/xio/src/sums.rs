//! File contents against the checksums of a manifest.
//!
//! A manifest has one CRC-32C for each [`SUM_BYTES`] of a file, and requests are for any run of
//! tokens. A block is *proven* when all of it was read once and matched its checksum. What is kept
//! of a proven block is the CRC-32C of each of its prefixes that ends at a page. Any later read of
//! whole pages is checked by continuing from the prefix before it: the result must be the prefix at
//! its end. So every delivered byte is compared with the manifest, whenever it is read, and a block
//! is read whole only once.
//!
//! [`Proven`] is bounded: the block proven first is forgotten first, and proven again when it is
//! needed. No file, path or manifest text may enter here.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use core::ops::Range;

use crate::disk::DIRECT_ALIGN;
use crate::kernel::Crc32c;

/// Bytes of a file for each checksum of its manifest.
pub const SUM_BYTES: u64 = 1 << 20;

/// Most blocks that are kept as proven: 64 GiB of files, in 64 MiB of memory.
pub const MAX_PROVEN_BLOCKS: usize = 1 << 16;

const PAGE_BYTES: u64 = DIRECT_ALIGN;
const PAGES: usize = (SUM_BYTES / PAGE_BYTES) as usize;

/// The checksums that a manifest has of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSums {
    id: u64,
    bytes: u64,
    blocks: Arc<[u32]>,
}

/// A block of a file does not match its manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Differs {
    /// First byte of the block.
    pub at_byte: u64,
}

impl FileSums {
    /// Checksums of a file of `bytes` bytes. `id` is the same for the same contents only. `None` if
    /// there is not one checksum for each block.
    pub fn new(id: u64, bytes: u64, blocks: Arc<[u32]>) -> Option<FileSums> {
        let fits = bytes.div_ceil(SUM_BYTES) == blocks.len() as u64;
        fits.then_some(FileSums { id, bytes, blocks })
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Offset and length of a block. A block beyond the end has no bytes.
    pub fn range(&self, block: u64) -> Range<u64> {
        let start = (block * SUM_BYTES).min(self.bytes);
        start..(start + SUM_BYTES).min(self.bytes)
    }
}

impl FileSums {
    /// Compares a whole file with its checksums.
    ///
    /// # Errors
    /// When they differ, or the file has another length.
    pub fn check_whole(&self, bytes: &[u8], crc: Crc32c) -> Result<(), Differs> {
        let mut blocks = bytes.chunks(SUM_BYTES as usize).zip(0..);
        let wrong = blocks.find(|(block, at)| self.blocks.get(*at) != Some(&crc(0, block)));
        match wrong {
            Some((_, at)) => Err(Differs { at_byte: at as u64 * SUM_BYTES }),
            None if bytes.len() as u64 != self.bytes => Err(Differs { at_byte: self.bytes }),
            None => Ok(()),
        }
    }
}

/// The whole pages that hold these bytes of a file.
pub fn pages_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE_BYTES * PAGE_BYTES..bytes.end.next_multiple_of(PAGE_BYTES)
}

/// The blocks that hold these bytes of a file.
fn blocks_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / SUM_BYTES..bytes.end.div_ceil(SUM_BYTES)
}

/// Whether bytes of a file lie in this block.
pub fn touches(bytes: &Range<u64>, block: u64) -> bool {
    blocks_of(bytes).contains(&block)
}

/// The CRC-32C of a block up to the end of each of its pages.
type Prefixes = Box<[u32; PAGES]>;

/// Blocks that matched their manifest when they were read whole.
#[derive(Debug, Default)]
pub struct Proven {
    blocks: BTreeMap<(u64, u64), Prefixes>,
    /// In the order in which they were proven.
    oldest: VecDeque<(u64, u64)>,
}

impl Proven {
    /// The first block of these bytes that is not proven.
    pub fn missing(&self, sums: &FileSums, bytes: &Range<u64>) -> Option<u64> {
        blocks_of(bytes).find(|block| !self.blocks.contains_key(&(sums.id, *block)))
    }

    /// Compares a whole block with its checksum. `bytes` were read from its start and may go beyond
    /// its end.
    ///
    /// # Errors
    /// When they differ, or are too few.
    pub fn prove(
        &mut self,
        sums: &FileSums,
        block: u64,
        bytes: &[u8],
        crc: Crc32c,
    ) -> Result<(), Differs> {
        let range = sums.range(block);
        let differs = Differs { at_byte: range.start };
        let bytes = bytes.get(..(range.end - range.start) as usize).ok_or(differs)?;
        let expected = *sums.blocks.get(block as usize).ok_or(differs)?;
        let (mut prefixes, mut sum) = (Box::new([0; PAGES]), 0);
        for (prefix, page) in prefixes.iter_mut().zip(bytes.chunks(PAGE_BYTES as usize)) {
            sum = crc(sum, page);
            *prefix = sum;
        }
        if sum != expected {
            return Err(differs);
        }
        let key = (sums.id, block);
        if self.blocks.insert(key, prefixes).is_none() {
            self.oldest.push_back(key);
        }
        if self.oldest.len() > MAX_PROVEN_BLOCKS
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.blocks.remove(&oldest);
        }
        Ok(())
    }

    /// Checks `wanted` bytes of a file. `bytes` were read from the start of their first page, up to
    /// the end of their last or of the file. `Ok(false)` if a block has to be proven first.
    ///
    /// # Errors
    /// When bytes differ from those that were proven, or are too few.
    pub fn check(
        &self,
        sums: &FileSums,
        wanted: &Range<u64>,
        bytes: &[u8],
        crc: Crc32c,
    ) -> Result<bool, Differs> {
        let pages = pages_of(wanted);
        for block in blocks_of(wanted) {
            let Some(prefixes) = self.blocks.get(&(sums.id, block)) else {
                return Ok(false);
            };
            let whole = sums.range(block);
            let differs = Differs { at_byte: whole.start };
            let (start, end) = (pages.start.max(whole.start), pages.end.min(whole.end));
            let read = (start - pages.start) as usize..(end.max(start) - pages.start) as usize;
            let read = bytes.get(read).ok_or(differs)?;
            let page = |byte: u64| (byte - whole.start).div_ceil(PAGE_BYTES) as usize;
            let prefix = |pages: usize| match pages {
                0 => Some(0),
                pages => prefixes.get(pages - 1).copied(),
            };
            let before = prefix(page(start)).ok_or(differs)?;
            if Some(crc(before, read)) != prefix(page(end.max(start))) {
                return Err(differs);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::kernel::crc32c;

    fn file(bytes: usize) -> (Vec<u8>, FileSums) {
        let word = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let data: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(word).take(bytes).collect();
        let blocks = data.chunks(SUM_BYTES as usize).map(|block| crc32c(0, block)).collect();
        let sums = FileSums::new(7, bytes as u64, blocks).unwrap();
        (data, sums)
    }

    /// The pages of a file that hold these bytes, as a disk reads them.
    fn read(data: &[u8], wanted: &Range<u64>) -> Vec<u8> {
        let pages = pages_of(wanted);
        data[pages.start as usize..(pages.end as usize).min(data.len())].to_vec()
    }

    fn prove_all(data: &[u8], sums: &FileSums) -> Proven {
        let mut proven = Proven::default();
        for block in 0..sums.blocks.len() as u64 {
            let start = (block * SUM_BYTES) as usize;
            proven.prove(sums, block, &data[start..], crc32c).unwrap();
        }
        proven
    }

    #[test]
    fn any_range_of_a_file_as_it_was_passes_and_any_flipped_bit_is_found() {
        let (data, sums) = file((2 << 20) + 4096 * 3 + 1234);
        let proven = prove_all(&data, &sums);
        let len = data.len() as u64;
        let ranges = [0..1, 0..4096, 5..1 << 20, 4000..(1 << 20) + 1, (1 << 20) - 1..(1 << 20) + 1]
            .into_iter()
            .chain([4096..8192, (1 << 20)..(2 << 20), (2 << 20) - 7..len, len - 1..len]);
        for wanted in ranges {
            assert_eq!(proven.missing(&sums, &wanted), None);
            let good = read(&data, &wanted);
            assert_eq!(proven.check(&sums, &wanted, &good, crc32c), Ok(true), "{wanted:?}");
            let first = pages_of(&wanted).start;
            for byte in [wanted.start, (wanted.start + wanted.end) / 2, wanted.end - 1] {
                let mut bad = good.clone();
                bad[(byte - first) as usize] ^= 4;
                let at_byte = byte / SUM_BYTES * SUM_BYTES;
                let found = proven.check(&sums, &wanted, &bad, crc32c);
                assert_eq!(found, Err(Differs { at_byte }), "{wanted:?}, byte {byte}");
            }
            let short = &good[..good.len() - 1];
            assert!(proven.check(&sums, &wanted, short, crc32c).is_err(), "{wanted:?}");
        }
    }

    #[test]
    fn a_block_is_proven_once_all_of_it_matches() {
        let (data, sums) = file((1 << 20) + 5000);
        let mut proven = Proven::default();
        let wanted = (1 << 20) - 10..(1 << 20) + 10;
        assert_eq!(proven.missing(&sums, &wanted), Some(0));
        assert_eq!(proven.check(&sums, &wanted, &read(&data, &wanted), crc32c), Ok(false));
        proven.prove(&sums, 0, &data, crc32c).unwrap();
        assert_eq!(proven.missing(&sums, &wanted), Some(1));
        let mut bad = data[1 << 20..].to_vec();
        bad[4999] ^= 1;
        let differs = Err(Differs { at_byte: 1 << 20 });
        assert_eq!(proven.prove(&sums, 1, &bad, crc32c), differs);
        assert_eq!(proven.prove(&sums, 1, &bad[..4999], crc32c), differs);
        assert_eq!(proven.prove(&sums, 2, &bad, crc32c).unwrap_err().at_byte, sums.bytes);
        assert_eq!(proven.missing(&sums, &wanted), Some(1));
        bad[4999] ^= 1;
        // A file that has grown: what is behind its old end is not compared.
        bad.push(9);
        proven.prove(&sums, 1, &bad, crc32c).unwrap();
        assert_eq!(proven.missing(&sums, &wanted), None);
        assert!(FileSums::new(1, 1, Arc::new([])).is_none());
    }

    #[test]
    fn the_block_proven_first_is_forgotten_first() {
        let blocks: Arc<[u32]> = (0..=MAX_PROVEN_BLOCKS as u32).map(|_| 0).collect();
        // Only the count matters: every checksum is 0.
        let zero: Crc32c = |_, _| 0;
        let len = blocks.len() as u64 * SUM_BYTES;
        let sums = FileSums::new(7, len, blocks).unwrap();
        let mut proven = Proven::default();
        let page = alloc::vec![0; SUM_BYTES as usize];
        for block in 0..=MAX_PROVEN_BLOCKS as u64 {
            proven.prove(&sums, block, &page, zero).unwrap();
        }
        assert_eq!(proven.missing(&sums, &(0..1)), Some(0));
        assert_eq!(proven.missing(&sums, &(SUM_BYTES..len)), None);
        assert_eq!(proven.blocks.len(), MAX_PROVEN_BLOCKS);
    }

    #[test]
    fn a_whole_file_matches_its_checksums_or_does_not() {
        let (mut data, sums) = file((1 << 20) + 100);
        assert_eq!(sums.check_whole(&data, crc32c), Ok(()));
        assert!(sums.check_whole(&data[..1 << 20], crc32c).is_err());
        data[(1 << 20) + 5] ^= 1;
        assert_eq!(sums.check_whole(&data, crc32c), Err(Differs { at_byte: 1 << 20 }));
    }
}
