//! The Megatron index (`.idx`) that describes a `.bin` of tokens.
//!
//! ```text
//! offset  bytes  field
//!      0      9  magic "MMIDIDX\0\0"
//!      9      8  version, u64, always 1
//!     17      1  dtype code, 1 to 8
//!     18      8  S, number of sequences, u64
//!     26      8  D, number of document indices, u64
//!     34     4S  sequence lengths in tokens, i32
//!         +  8S  sequence pointers, bytes from the start of the .bin, i64
//!         +  8D  document indices: the first sequence of each document, then S, i64
//!         [+  S  modes, i8, in multimodal sets only]
//! ```
//!
//! All numbers are little-endian. The whole index is checked, not sampled: every pointer must be
//! where the sequence before it ends and the last must end where the `.bin` ends, so that reading
//! the `.bin` straight through delivers every document once and nothing else. The last document
//! must end with the last sequence, as Megatron-core asserts: merges that forgot the list of
//! documents would make one document of many. An index has at least 12 bytes for each sequence, so
//! [`Walk`] checks it in pieces; [`parse`] checks it whole.

use super::{DatasetError, Dtype, Expected, Format, TokenFile, exact_len};

/// First bytes of every index.
pub const MAGIC: &[u8] = b"MMIDIDX\0\0";

/// Bytes before the sequence lengths.
pub const HEADER_BYTES: usize = 34;

const LENGTHS: &str = "sequence_lengths";
const POINTERS: &str = "sequence_pointers";
const DOCUMENTS: &str = "document_indices";

/// The fixed part of an index, and the offsets derived from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Element type of the `.bin`.
    pub dtype: Dtype,
    /// Number of sequences, S.
    pub sequences: u64,
    /// Number of document indices, D: one more than the number of documents.
    pub document_indices: u64,
}

impl Header {
    /// Reads the first [`HEADER_BYTES`] of an index of `idx_len` bytes and checks that the
    /// announced arrays fill the file. Types that are not delivered as tokens are refused.
    pub fn parse(head: &[u8], idx_len: u64) -> Result<Header, DatasetError> {
        let header = Header::parse_integers(head, idx_len)?;
        header.dtype.token().map(|_| header)
    }

    /// As [`Header::parse`], with integers of any type.
    pub fn parse_integers(head: &[u8], idx_len: u64) -> Result<Header, DatasetError> {
        if !head.starts_with(&MAGIC[..MAGIC.len().min(head.len())]) {
            return Err(DatasetError::Magic { format: "Megatron index" });
        }
        let short = DatasetError::Truncated {
            what: "Megatron index header",
            have: head.len() as u64,
            need: HEADER_BYTES as u64,
        };
        let fixed: &[u8; HEADER_BYTES] = head.first_chunk().ok_or(short)?;
        let version = le_u64(&fixed[9..]);
        if version != 1 {
            return Err(DatasetError::Version { format: "Megatron index", version, known: "1" });
        }
        let header = Header {
            dtype: Dtype::from_megatron(fixed[17])?,
            sequences: le_u64(&fixed[18..]),
            document_indices: le_u64(&fixed[26..]),
        };
        header.check_size(idx_len)?;
        Ok(header)
    }

    fn check_size(&self, idx_len: u64) -> Result<(), DatasetError> {
        let large = |field, value| DatasetError::TooLarge { field, value };
        let arrays =
            self.sequences.checked_mul(12).ok_or(large("sequence_count", self.sequences))?;
        let documents = self.document_indices.checked_mul(8);
        let end = documents
            .and_then(|bytes| bytes.checked_add(arrays)?.checked_add(HEADER_BYTES as u64))
            .ok_or(large("document_count", self.document_indices))?;
        if end.checked_add(self.sequences) == Some(idx_len) {
            return Ok(());
        }
        exact_len("Megatron index", idx_len, end)
    }

    /// Offset of the sequence lengths in the index; four bytes each.
    pub const fn lengths_at(&self) -> u64 {
        HEADER_BYTES as u64
    }

    /// Offset of the sequence pointers in the index; eight bytes each.
    pub const fn pointers_at(&self) -> u64 {
        self.lengths_at() + 4 * self.sequences
    }

    /// Offset of the document indices in the index; eight bytes each.
    pub const fn documents_at(&self) -> u64 {
        self.pointers_at() + 8 * self.sequences
    }
}

/// Describes a `.bin` of `bin_len` bytes from its whole index.
pub fn parse(idx: &[u8], bin_len: u64) -> Result<TokenFile, DatasetError> {
    let header = Header::parse(idx, idx.len() as u64)?;
    // `Header::parse` proved that the three arrays lie inside `idx`, so the offsets fit a usize.
    let (at, mid) = (header.lengths_at() as usize, header.pointers_at() as usize);
    let documents = header.documents_at() as usize;
    let end = documents + 8 * header.document_indices as usize;
    let mut walk = Walk::new(header, bin_len);
    walk.sequences(&idx[at..mid], &idx[mid..documents])?;
    walk.documents(&idx[documents..end])?;
    walk.finish()
}

/// Checks the arrays of an index in pieces, in file order: any number of calls of
/// [`sequences`](Walk::sequences), then of [`documents`](Walk::documents), then
/// [`finish`](Walk::finish). After an error the walk is over.
#[derive(Clone, Debug)]
pub struct Walk {
    header: Header,
    bin_len: u64,
    sequences_seen: u64,
    documents_seen: u64,
    /// Required start of the next sequence.
    next_pointer: u64,
    last_document: i64,
}

impl Walk {
    /// Starts at the first sequence.
    pub fn new(header: Header, bin_len: u64) -> Walk {
        Walk {
            header,
            bin_len,
            sequences_seen: 0,
            documents_seen: 0,
            next_pointer: 0,
            last_document: 0,
        }
    }

    /// Checks the next sequences. Both slices must hold whole entries, as many of each.
    pub fn sequences(&mut self, lengths: &[u8], pointers: &[u8]) -> Result<(), DatasetError> {
        let (lengths, rest) = lengths.as_chunks::<4>();
        let (pointers, tail) = pointers.as_chunks::<8>();
        self.whole(LENGTHS, rest.len(), self.sequences_seen + lengths.len() as u64)?;
        self.whole(POINTERS, tail.len(), self.sequences_seen + pointers.len() as u64)?;
        exact_len(POINTERS, pointers.len() as u64 * 8, lengths.len() as u64 * 8)?;
        for (length, pointer) in lengths.iter().zip(pointers) {
            self.sequence(i32::from_le_bytes(*length), i64::from_le_bytes(*pointer))?;
        }
        Ok(())
    }

    /// Refuses a piece that ends inside an entry or runs past the announced count.
    fn whole(&self, what: &'static str, rest: usize, total: u64) -> Result<(), DatasetError> {
        if rest != 0 {
            return Err(DatasetError::Truncated { what, have: rest as u64, need: 8 });
        }
        let need =
            if what == DOCUMENTS { self.header.document_indices } else { self.header.sequences };
        match total <= need {
            true => Ok(()),
            false => Err(DatasetError::Excess { what, have: total, need }),
        }
    }

    fn sequence(&mut self, length: i32, pointer: i64) -> Result<(), DatasetError> {
        let index = self.sequences_seen;
        let refuse =
            |field, value, expected| Err(DatasetError::Index { field, index, value, expected });
        let Ok(tokens) = u64::try_from(length) else {
            return refuse(LENGTHS, length.into(), Expected::AtLeast(0));
        };
        // Below 2^63 by the check against the length of the .bin in the previous iteration.
        if pointer != self.next_pointer as i64 {
            return refuse(POINTERS, pointer, Expected::Exactly(self.next_pointer as i64));
        }
        let element = u64::from(self.header.dtype.bytes());
        let room = self.bin_len.min(i64::MAX as u64) - self.next_pointer;
        if tokens * element > room {
            return refuse(LENGTHS, length.into(), Expected::AtMost((room / element) as i64));
        }
        self.next_pointer += tokens * element;
        self.sequences_seen += 1;
        Ok(())
    }

    /// Checks the next document indices. The slice must hold whole entries.
    pub fn documents(&mut self, indices: &[u8]) -> Result<(), DatasetError> {
        let (indices, rest) = indices.as_chunks::<8>();
        self.whole(DOCUMENTS, rest.len(), self.documents_seen + indices.len() as u64)?;
        for index in indices {
            self.document(i64::from_le_bytes(*index))?;
        }
        Ok(())
    }

    /// Document indices start at 0, never decrease, and never point past the last sequence.
    fn document(&mut self, value: i64) -> Result<(), DatasetError> {
        let index = self.documents_seen;
        let sequences = i64::try_from(self.header.sequences).unwrap_or(i64::MAX);
        let expected = if index == 0 && value != 0 {
            Expected::Exactly(0)
        } else if value < self.last_document {
            Expected::AtLeast(self.last_document)
        } else if value > sequences {
            Expected::AtMost(sequences)
        } else {
            self.last_document = value;
            self.documents_seen += 1;
            return Ok(());
        };
        Err(DatasetError::Index { field: DOCUMENTS, index, value, expected })
    }

    /// The described file, once every entry has been checked and all of the `.bin` is accounted
    /// for.
    pub fn finish(self) -> Result<TokenFile, DatasetError> {
        exact_len(LENGTHS, self.sequences_seen, self.header.sequences)?;
        exact_len(DOCUMENTS, self.documents_seen, self.header.document_indices)?;
        exact_len("Megatron .bin", self.bin_len, self.next_pointer)?;
        let (last, sequences) = (self.last_document, self.header.sequences);
        if u64::try_from(last) != Ok(sequences) {
            return Err(DatasetError::Documentless { last, sequences });
        }
        Ok(TokenFile {
            dtype: self.header.dtype,
            data_offset: 0,
            tokens: self.next_pointer / u64::from(self.header.dtype.bytes()),
            format: Format::Megatron {
                sequences: self.header.sequences,
                documents: self.header.document_indices.saturating_sub(1),
            },
        })
    }
}

/// The first eight bytes as a number. Callers pass slices of a fixed header that are long enough.
fn le_u64(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |b| u64::from_le_bytes(*b))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn index(code: u8, lengths: &[i32], documents: &[i64], bytes: i64) -> Vec<u8> {
        let mut out = Vec::from(MAGIC);
        out.extend(1u64.to_le_bytes());
        out.push(code);
        out.extend((lengths.len() as u64).to_le_bytes());
        out.extend((documents.len() as u64).to_le_bytes());
        out.extend(lengths.iter().flat_map(|l| l.to_le_bytes()));
        let mut at = 0i64;
        for length in lengths {
            out.extend(at.to_le_bytes());
            at += i64::from(*length) * bytes;
        }
        out.extend(documents.iter().flat_map(|d| d.to_le_bytes()));
        out
    }

    #[test]
    fn an_index_describes_its_bin() {
        let idx = index(8, &[3, 0, 5], &[0, 1, 3], 2);
        let file = parse(&idx, 16).unwrap();
        assert_eq!((file.dtype, file.tokens, file.data_offset), (Dtype::U16, 8, 0));
        assert_eq!(file.format, Format::Megatron { sequences: 3, documents: 2 });
        let mut multimodal = idx.clone();
        multimodal.extend([0, 1, 0]);
        assert_eq!(parse(&multimodal, 16).unwrap().tokens, 8);
        assert_eq!(parse(&index(4, &[], &[0], 4), 0).unwrap().tokens, 0);
    }

    #[test]
    fn pieces_give_the_same_answer_as_the_whole() {
        let lengths: Vec<i32> = (0..97).map(|i| i * 7 % 13).collect();
        let idx = index(4, &lengths, &[0, 40, 97], 4);
        let bin_len = lengths.iter().map(|&l| l as u64 * 4).sum();
        let header = Header::parse(&idx[..HEADER_BYTES], idx.len() as u64).unwrap();
        for step in [1, 5, 96, 97, 200] {
            let mut walk = Walk::new(header, bin_len);
            for first in (0..97).step_by(step) {
                let last = (first + step).min(97);
                let (l, p) = (header.lengths_at() as usize, header.pointers_at() as usize);
                walk.sequences(
                    &idx[l + 4 * first..l + 4 * last],
                    &idx[p + 8 * first..p + 8 * last],
                )
                .unwrap();
            }
            walk.documents(&idx[header.documents_at() as usize..]).unwrap();
            assert_eq!(walk.finish(), parse(&idx, bin_len), "step {step}");
        }
    }

    #[test]
    fn contradictions_are_refused_with_the_field() {
        let good = index(4, &[3, 2], &[0, 2], 4);
        let field = |error: DatasetError| match error {
            DatasetError::Index { field, index, .. } => (field, index),
            other => (other.reason(), 0),
        };
        let change = |at: usize, bytes: &[u8]| {
            let mut idx = good.clone();
            idx[at..at + bytes.len()].copy_from_slice(bytes);
            field(parse(&idx, 20).unwrap_err())
        };
        assert_eq!(change(34, &(-1i32).to_le_bytes()), (LENGTHS, 0));
        assert_eq!(change(34, &i32::MAX.to_le_bytes()), (LENGTHS, 0));
        assert_eq!(change(38, &3i32.to_le_bytes()), (LENGTHS, 1));
        assert_eq!(change(42, &4i64.to_le_bytes()), (POINTERS, 0));
        assert_eq!(change(50, &8i64.to_le_bytes()), (POINTERS, 1));
        assert_eq!(change(50, &i64::MIN.to_le_bytes()), (POINTERS, 1));
        assert_eq!(change(58, &1i64.to_le_bytes()), (DOCUMENTS, 0));
        assert_eq!(change(66, &3i64.to_le_bytes()), (DOCUMENTS, 1));
        assert_eq!(change(66, &(-1i64).to_le_bytes()), (DOCUMENTS, 1));
        assert_eq!(change(9, &[2]), ("version", 0));
        assert_eq!(change(17, &[7]), ("not-integer", 0));
        assert_eq!(change(17, &[1]), ("not-tokens", 0));
        assert_eq!(change(18, &u64::MAX.to_le_bytes()), ("too-large", 0));
        assert_eq!(change(26, &u64::MAX.to_le_bytes()), ("too-large", 0));
        assert_eq!(change(26, &3u64.to_le_bytes()), ("truncated", 0));
        assert_eq!(parse(&good, 21).unwrap_err().reason(), "excess");
        assert_eq!(parse(&good, 16).unwrap_err().reason(), "index");
    }

    #[test]
    fn every_cut_is_refused() {
        let idx = index(5, &[3, 2], &[0, 2], 8);
        for len in 0..idx.len() {
            assert!(parse(&idx[..len], 40).is_err(), "cut to {len}");
        }
        let header = Header::parse(&idx, idx.len() as u64).unwrap();
        let mut walk = Walk::new(header, 40);
        assert_eq!(walk.sequences(&[0; 3], &[]).unwrap_err().reason(), "truncated");
        assert_eq!(walk.sequences(&[0; 12], &[0; 24]).unwrap_err().reason(), "excess");
        assert_eq!(walk.sequences(&[0; 8], &[0; 8]).unwrap_err().reason(), "truncated");
        assert_eq!(walk.finish().unwrap_err().reason(), "truncated");
    }

    proptest! {
        #[test]
        fn random_damage_never_panics(
            lengths in prop::collection::vec(0i32..50, 0..20),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            bin_len in 0u64..4_000,
        ) {
            let mut idx = index(4, &lengths, &[0, lengths.len() as i64], 4);
            let at = at.index(idx.len());
            idx[at] = byte;
            if let Ok(file) = parse(&idx, bin_len) {
                prop_assert_eq!(file.data_bytes(), bin_len);
            }
        }
    }

    #[test]
    fn a_bin_beyond_the_range_of_pointers_is_refused() {
        let idx = index(5, &[1], &[0, 1], 8);
        assert_eq!(parse(&idx, u64::MAX).unwrap_err().reason(), "excess");
    }
}
