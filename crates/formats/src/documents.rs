//! The documents of a token file, as the Megatron index beside it describes them.
//!
//! An index takes at least 12 bytes for each sequence and may have gigabytes, so it is never held:
//! [`IndexReader`] reads its three arrays side by side in blocks and gives the length of one
//! document after the other. The whole index is checked on the way, and it has been found to
//! describe its file only when [`IndexReader::finish`] says so.

use std::hash::Hasher;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;
use xio::dataset::megatron::{HEADER_BYTES, Header, Walk};
use xio::dataset::{DatasetError, Dtype, TokenFile};
use xio::documents::MAX_DOCUMENTS;

use crate::error::Error;
use crate::read_at::ReadAt;

/// Entries of an array that are read at once.
const BLOCK: u64 = 1 << 14;

/// What to do for a file without documents.
pub const NO_INDEX_HINT: &str = "write an index beside it: `dquant convert FILE NAME.idx --eos ID`, or `dquant tokenize`, which writes one";

/// The tokens that an index has to describe.
#[derive(Clone, Copy, Debug)]
pub struct Described {
    /// Bytes of all tokens.
    pub bytes: u64,
    /// Their type, where the file itself tells it.
    pub dtype: Option<Dtype>,
}

/// Identifies a table of documents: the XXH3 hash (64 bits) of the length of each as a 64-bit
/// little-endian number. It is never 0.
#[derive(Clone, Default)]
pub struct Fingerprint {
    hash: XxHash3_64,
    documents: u64,
    tokens: u64,
}

impl Fingerprint {
    /// Appends a document of this length.
    pub fn push(&mut self, tokens: u64) {
        self.hash.write(&tokens.to_le_bytes());
        self.documents += 1;
        self.tokens += tokens;
    }

    /// How many documents were appended.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// Their tokens together.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The fingerprint.
    pub fn value(&self) -> u64 {
        self.hash.finish().max(1)
    }
}

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fingerprint({:016x} of {} documents)", self.value(), self.documents)
    }
}

/// What an index says next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A sequence of this many tokens, of the document that ends next.
    Sequence(u64),
    /// The end of a document.
    Document {
        /// Its tokens.
        tokens: u64,
        /// Its sequences.
        sequences: u64,
    },
}

/// Identifies a table of sequences: the XXH3 hash (64 bits) of [`code`](Sequences::code) of each as
/// a 32-bit little-endian number. It is never 0.
#[derive(Clone, Default)]
pub struct Sequences {
    hash: XxHash3_64,
    count: u64,
    /// The last one, which may be the last of its document.
    last: Option<u32>,
}

impl Sequences {
    /// A sequence as one number: twice its tokens, and 1 more of the last of its document.
    pub fn code(tokens: u32, is_last: bool) -> u32 {
        tokens << 1 | u32::from(is_last)
    }

    /// Takes the next entry of an index. Returns the number of the sequence that is known by it; a
    /// document without any counts as one without tokens.
    pub fn push(&mut self, entry: Entry) -> Option<u32> {
        let (tokens, is_last) = match entry {
            // An index stores 31 bits.
            Entry::Sequence(tokens) => (self.last.replace(tokens as u32)?, false),
            Entry::Document { .. } => (self.last.take().unwrap_or(0), true),
        };
        let code = Sequences::code(tokens, is_last);
        self.push_code(code);
        Some(code)
    }

    /// Takes the next sequence as a number.
    pub fn push_code(&mut self, code: u32) {
        self.hash.write(&code.to_le_bytes());
        self.count += 1;
    }

    /// How many.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The fingerprint.
    pub fn value(&self) -> u64 {
        self.hash.finish().max(1)
    }
}

impl std::fmt::Debug for Sequences {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sequences({:016x} of {})", self.value(), self.count)
    }
}

/// A cursor over one array of the index.
#[derive(Debug)]
struct Column {
    /// Where its next block begins in the file.
    at: u64,
    /// Entries from there on.
    left: u64,
    block: Vec<u8>,
    next: usize,
}

impl Column {
    fn new(at: u64, entries: u64) -> Column {
        Column { at, left: entries, block: Vec::new(), next: 0 }
    }

    /// Reads the next block of entries of `N` bytes; whether there is one.
    fn load<const N: u64>(&mut self, file: &dyn ReadAt) -> std::io::Result<bool> {
        let count = self.left.min(BLOCK);
        self.block.resize((count * N) as usize, 0);
        file.read_exact_at(&mut self.block, self.at)?;
        (self.at, self.left, self.next) = (self.at + count * N, self.left - count, 0);
        Ok(count > 0)
    }

    /// The next entry of the block.
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let entry = self.block.get(self.next..)?.first_chunk()?;
        self.next += N;
        Some(*entry)
    }
}

/// Reads an index once, from its first document to its last. Sequences of one document are joined,
/// and those behind the last document are an error.
#[derive(Debug)]
pub struct IndexReader {
    path: PathBuf,
    file: Box<dyn ReadAt>,
    header: Header,
    walk: Walk,
    ends: Column,
    lengths: Column,
    pointers: Column,
    /// Sequences that belong to documents already given.
    sequence: u64,
}

impl IndexReader {
    /// Begins to read an index. Errors name it `path`, which is not opened.
    ///
    /// # Errors
    /// When it cannot be read, is no index, or has other tokens or more documents than are
    /// supported.
    pub fn new(
        path: &Path,
        file: impl ReadAt + 'static,
        of: Described,
    ) -> Result<IndexReader, Error> {
        let read = Error::read(path);
        let len = file.total_bytes().map_err(read)?;
        let head = file.head(HEADER_BYTES as u64).map_err(read)?;
        let header = Header::parse(&head, len).map_err(Error::dataset(path))?;
        if let Some(dtype) = of.dtype.filter(|dtype| dtype.bytes() != header.dtype.bytes()) {
            let why = format!("the index is of {} tokens, the file holds {dtype}", header.dtype);
            return Err(Error::refused(path, why, NO_INDEX_HINT));
        }
        let documents = header.document_indices.saturating_sub(1);
        if documents > MAX_DOCUMENTS as u64 {
            let why = format!("has {documents} documents, at most {MAX_DOCUMENTS} are supported");
            return Err(Error::refused(path, why, "split the dataset"));
        }
        let mut reader = IndexReader {
            path: path.to_owned(),
            file: Box::new(file),
            walk: Walk::new(header, of.bytes),
            ends: Column::new(header.documents_at(), header.document_indices),
            lengths: Column::new(header.lengths_at(), header.sequences),
            pointers: Column::new(header.pointers_at(), header.sequences),
            sequence: 0,
            header,
        };
        // The first entry is the start of the first document, not an end.
        reader.next_end()?;
        Ok(reader)
    }

    /// Tokens of the next document; none behind the last.
    ///
    /// # Errors
    /// When the index cannot be read or contradicts itself or its file.
    pub fn next_document(&mut self) -> Result<Option<u64>, Error> {
        self.next_entries(&mut |_| ())
    }

    /// The same, and passes what the index says of it to `each`.
    ///
    /// # Errors
    /// As [`next_document`](IndexReader::next_document).
    pub fn next_entries(&mut self, each: &mut dyn FnMut(Entry)) -> Result<Option<u64>, Error> {
        let end = match self.next_end()? {
            Some(end) => end,
            None if self.sequence < self.header.sequences => {
                let (last, sequences) = (self.sequence as i64, self.header.sequences);
                let error = DatasetError::Documentless { last, sequences };
                return Err(Error::dataset(&self.path)(error));
            }
            None => return Ok(None),
        };
        let (mut tokens, begun) = (0, self.sequence);
        while self.sequence < end {
            let length = self.next_length()?;
            each(Entry::Sequence(length));
            tokens += length;
            self.sequence += 1;
        }
        each(Entry::Document { tokens, sequences: self.sequence - begun });
        Ok(Some(tokens))
    }

    /// The sequence behind the next document.
    fn next_end(&mut self) -> Result<Option<u64>, Error> {
        loop {
            if let Some(entry) = self.ends.take() {
                // The walk has checked that it is neither negative nor beyond the last sequence.
                return Ok(Some(u64::from_le_bytes(entry)));
            }
            if !self.ends.load::<8>(&*self.file).map_err(Error::read(&self.path))? {
                return Ok(None);
            }
            self.walk.documents(&self.ends.block).map_err(Error::dataset(&self.path))?;
        }
    }

    /// Tokens of the next sequence, of which there must be one.
    fn next_length(&mut self) -> Result<u64, Error> {
        loop {
            if let Some(entry) = self.lengths.take() {
                // The walk has checked that it is not negative.
                return Ok(u64::from(u32::from_le_bytes(entry)));
            }
            let read = Error::read(&self.path);
            let more = self.lengths.load::<4>(&*self.file).map_err(read)?
                && self.pointers.load::<8>(&*self.file).map_err(read)?;
            let checked = self.walk.sequences(&self.lengths.block, &self.pointers.block);
            checked.map_err(Error::dataset(&self.path))?;
            if !more {
                return Err(Error::corrupt(&self.path, "ends before its last document"));
            }
        }
    }

    /// The file that the index describes, once every document was read.
    ///
    /// # Errors
    /// When they do not cover the file.
    pub fn finish(self) -> Result<TokenFile, Error> {
        self.walk.finish().map_err(Error::dataset(&self.path))
    }

    /// Reads all documents, and passes what the index says of them to `each`.
    ///
    /// # Errors
    /// As [`next_document`](IndexReader::next_document) and [`finish`](IndexReader::finish).
    pub fn read_all(mut self, mut each: impl FnMut(Entry)) -> Result<TokenFile, Error> {
        while self.next_entries(&mut each)?.is_some() {}
        self.finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::{self, File};
    use std::io::Write;
    use xio::dataset::megatron;

    /// An index of sequences of these lengths and documents that end behind these sequences, of
    /// `u16`.
    fn index(lengths: &[i32], ends: &[i64]) -> Vec<u8> {
        let mut bytes = megatron::MAGIC.to_vec();
        bytes.extend(1_u64.to_le_bytes());
        bytes.push(8);
        bytes.extend((lengths.len() as u64).to_le_bytes());
        bytes.extend((ends.len() as u64).to_le_bytes());
        bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        let mut at = 0_i64;
        for length in lengths {
            bytes.extend(at.to_le_bytes());
            at += i64::from(*length) * 2;
        }
        bytes.extend(ends.iter().flat_map(|end| end.to_le_bytes()));
        bytes
    }

    /// A file that has no name.
    fn file(bytes: &[u8]) -> File {
        let name = format!("dquant-index-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        let mut file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn read(bytes: &[u8], of: Described) -> Result<(Vec<u64>, TokenFile), Error> {
        let mut found = Vec::new();
        let reader = IndexReader::new(Path::new("web.idx"), file(bytes), of)?;
        let described = reader.read_all(|entry| {
            if let Entry::Document { tokens, .. } = entry {
                found.push(tokens);
            }
        })?;
        Ok((found, described))
    }

    #[test]
    fn the_sequences_of_each_document_are_counted() {
        for (ends, expected) in [
            (&[0, 1, 1, 3, 4][..], &[1, 0, 2, 1][..]),
            (&[0, 1, 4], &[1, 3]),
            (&[0, 1, 2, 3, 4], &[1; 4]),
        ] {
            let bytes = index(&[3, 0, 5, 1], ends);
            let reader = IndexReader::new(Path::new("web.idx"), file(&bytes), of(9)).unwrap();
            let mut found = Vec::new();
            let (mut all, mut known) = (Vec::new(), Sequences::default());
            let numbers = reader.read_all(|entry| {
                all.extend(known.push(entry));
                if let Entry::Document { sequences, .. } = entry {
                    found.push(sequences);
                }
            });
            numbers.unwrap();
            assert_eq!(found, expected);
            // Twice the tokens of each sequence; odd is the last of a document, which an empty one
            // has, too.
            let ends: Vec<u32> = all.iter().map(|code| code & 1).collect();
            let count =
                |documents: &[u64]| documents.iter().map(|count| (*count).max(1)).sum::<u64>();
            assert_eq!(known.count(), count(expected));
            assert_eq!(ends.iter().sum::<u32>() as usize, expected.len());
            assert_eq!(all.iter().map(|code| code >> 1).sum::<u32>(), 9);
        }
    }

    fn of(tokens: u64) -> Described {
        Described { bytes: 2 * tokens, dtype: None }
    }

    #[test]
    fn sequences_of_a_document_are_joined() {
        let (found, described) = read(&index(&[3, 0, 5, 1], &[0, 1, 3, 3, 4]), of(9)).unwrap();
        assert_eq!((found, described.tokens), (vec![3, 5, 0, 1], 9));
        assert_eq!(read(&index(&[], &[]), of(0)).unwrap().0, [0_u64; 0]);
        assert_eq!(read(&index(&[], &[0]), of(0)).unwrap().0, [0_u64; 0]);
        assert_eq!(read(&index(&[], &[0, 0, 0]), of(0)).unwrap().0, [0, 0]);
    }

    /// The blocks of the three arrays end at different places.
    #[test]
    fn long_indices_are_read_in_blocks() {
        let lengths: Vec<i32> = (0..100_003).map(|i| i * 7 % 13).collect();
        let ends: Vec<i64> = (0..=50_001).map(|i| i * 2).chain([100_003]).collect();
        let total = lengths.iter().map(|length| *length as u64).sum();
        let (found, _) = read(&index(&lengths, &ends), of(total)).unwrap();
        let pairs: Vec<u64> =
            lengths.chunks(2).map(|pair| pair.iter().map(|length| *length as u64).sum()).collect();
        assert_eq!(found, pairs);
    }

    #[test]
    fn indices_of_other_files_are_refused() {
        let bytes = index(&[3, 2], &[0, 1, 2]);
        let says = |bytes: &[u8], of, what: &str| {
            let error = read(bytes, of).unwrap_err().to_string();
            assert!(error.starts_with("web.idx: ") && error.contains(what), "{error}");
        };
        says(&bytes, of(6), "is longer than its header says");
        says(&bytes, of(4), "sequence_lengths[1] is 2, expected at most 1");
        let wide = Described { dtype: Some(Dtype::U32), ..of(5) };
        says(&bytes, wide, "the index is of u16 tokens, the file holds u32");
        says(&bytes[..bytes.len() - 1], of(5), "ends early");
        says(b"MMIDIDX\x00\x00", of(5), "header ends early");
        says(b"", of(5), "header ends early");
        says(&index(&[3, 2], &[0, 2, 1]), of(5), "document_indices[2] is 1");
        for forgotten in [&[][..], &[0], &[0, 1]] {
            let forgotten = index(&[3, 2], forgotten);
            says(&forgotten, of(5), "last document of the index ends with sequence");
        }
        let mut many = index(&[], &[]);
        many[26..34].copy_from_slice(&300_000_000_u64.to_le_bytes());
        let unwritten = file(&many);
        unwritten.set_len(34 + 8 * 300_000_000).unwrap();
        let error = IndexReader::new(Path::new("web.idx"), unwritten, of(0)).unwrap_err();
        assert!(error.to_string().contains("299999999 documents"), "{error}");
    }

    #[test]
    fn the_fingerprint_is_that_of_the_lengths() {
        let of = |lengths: &[u64]| {
            let mut fingerprint = Fingerprint::default();
            lengths.iter().for_each(|tokens| fingerprint.push(*tokens));
            (fingerprint.value(), fingerprint.documents(), fingerprint.tokens())
        };
        // xxhash.xxh3_64_intdigest(numpy.array([3, 0, 5], "<u8").tobytes())
        let bytes: Vec<u8> = [3_u64, 0, 5].iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(of(&[3, 0, 5]), (XxHash3_64::oneshot(&bytes), 3, 8));
        assert_ne!(of(&[3, 5]).0, of(&[5, 3]).0);
        assert_ne!(of(&[8]).0, of(&[8, 0]).0);
    }

    proptest! {
        #[test]
        fn damage_is_refused_or_harmless(
            lengths in prop::collection::vec(0_i32..50, 0..20), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut bytes = index(&lengths, &[0, lengths.len() as i64]);
            let tokens = lengths.iter().map(|length| *length as u64).sum();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok((found, _)) = read(&bytes, of(tokens)) {
                prop_assert_eq!(found.iter().sum::<u64>(), tokens);
            }
        }
    }
}
