//! The boundaries of documents: lengths while a run works, the index of a Megatron pair when it is
//! done.
//!
//! A length is 32 bits, little-endian: 31 bits of tokens, and one that says that a document ends
//! there. A document that is too long for 31 bits takes several sequences, as the format of the
//! index provides for.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xio::dataset::megatron::{HEADER_BYTES, Header, MAGIC, Walk};

use super::TokenizeError;
use super::token_type::TokenType;

/// The index of the pair to which `output` belongs.
pub fn path_of(output: &Path) -> PathBuf {
    output.with_extension("idx")
}

const ENDS_DOCUMENT: u32 = 1 << 31;

/// Tokens of the longest sequence.
pub(super) const LONGEST: u64 = (ENDS_DOCUMENT - 1) as u64;

/// The stored lengths of one document of `tokens` tokens.
pub(super) fn lengths(mut tokens: u64) -> impl Iterator<Item = u32> {
    let mut ended = false;
    std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let sequence = tokens.min(LONGEST);
        tokens -= sequence;
        ended = tokens == 0;
        Some(sequence as u32 | if ended { ENDS_DOCUMENT } else { 0 })
    })
}

/// The stored lengths of one document of these turns, each of which is at most [`LONGEST`].
pub(super) fn turns(lengths: &[u32]) -> impl Iterator<Item = u32> {
    let last = lengths.len().saturating_sub(1);
    let stored = move |(at, length): (usize, &u32)| {
        debug_assert!(*length < ENDS_DOCUMENT);
        length | if at == last { ENDS_DOCUMENT } else { 0 }
    };
    lengths.iter().enumerate().map(stored)
}

/// Writes the index `to` from the lengths in the file `from`.
pub(super) fn write(from: &Path, to: &Path, dtype: TokenType) -> io::Result<()> {
    let sequences = fs::metadata(from)?.len() / 4;
    let documents = stored(from)?.try_fold(0_u64, |documents, length| {
        length.map(|length| documents + u64::from(length & ENDS_DOCUMENT != 0))
    })?;
    let mut index = BufWriter::with_capacity(1 << 20, File::create(to)?);
    // The codes of i32 and u16.
    let code = match dtype {
        TokenType::U32 => 4_u8,
        TokenType::U16 => 8,
    };
    index.write_all(MAGIC)?;
    index.write_all(&1_u64.to_le_bytes())?;
    index.write_all(&[code])?;
    index.write_all(&sequences.to_le_bytes())?;
    index.write_all(&(documents + 1).to_le_bytes())?;
    for length in stored(from)? {
        index.write_all(&(length? & !ENDS_DOCUMENT).to_le_bytes())?;
    }
    let mut pointer = 0_i64;
    for length in stored(from)? {
        index.write_all(&pointer.to_le_bytes())?;
        pointer += i64::from(length? & !ENDS_DOCUMENT) * dtype.bytes() as i64;
    }
    index.write_all(&0_i64.to_le_bytes())?;
    for (sequence, length) in stored(from)?.enumerate() {
        if length? & ENDS_DOCUMENT != 0 {
            index.write_all(&(sequence as i64 + 1).to_le_bytes())?;
        }
    }
    index.into_inner()?.sync_all()
}

fn stored(path: &Path) -> io::Result<impl Iterator<Item = io::Result<u32>>> {
    let mut file = BufReader::with_capacity(1 << 20, File::open(path)?);
    let mut left = file.get_ref().metadata()?.len() / 4;
    Ok(std::iter::from_fn(move || {
        left = left.checked_sub(1)?;
        let mut word = [0; 4];
        Some(file.read_exact(&mut word).map(|()| u32::from_le_bytes(word)))
    }))
}

/// The index of an existing pair, whose header has been checked.
pub(super) struct Existing {
    path: PathBuf,
    header: Header,
}

impl Existing {
    /// Opens the index beside `output`.
    ///
    /// # Errors
    /// When there is none, or it is no index of a Megatron pair.
    pub(super) fn open(output: &Path) -> Result<Existing, TokenizeError> {
        let path = path_of(output);
        let file = File::open(&path).map_err(TokenizeError::io("open", &path))?;
        let bytes = file.metadata().map_err(TokenizeError::io("read", &path))?.len();
        let mut head = Vec::new();
        let read = file.take(HEADER_BYTES as u64).read_to_end(&mut head);
        read.map_err(TokenizeError::io("read", &path))?;
        let refused = |reason: String| TokenizeError::Index { path: path.clone(), reason };
        let header = Header::parse(&head, bytes).map_err(|error| refused(error.to_string()))?;
        if header.documents_at() + 8 * header.document_indices != bytes {
            return Err(refused(String::from("it has modes, as multimodal sets do")));
        }
        Ok(Existing { path, header })
    }

    /// How many documents it counts.
    pub(super) fn documents(&self) -> u64 {
        self.header.document_indices.saturating_sub(1)
    }

    /// The type of the ids.
    ///
    /// # Errors
    /// When the tokeniser does not write that type.
    pub(super) fn dtype(&self) -> Result<TokenType, TokenizeError> {
        let found = self.header.dtype;
        let dtype =
            [TokenType::U16, TokenType::U32].into_iter().find(|ours| ours.in_index() == found);
        dtype.ok_or_else(|| self.refused(&format_args!("it describes {found}")))
    }

    /// Checks every entry against a `.bin` of `bin_bytes`, and appends the lengths of the sequences
    /// to `lengths`; returns how many.
    ///
    /// # Errors
    /// When the pair is broken, or its index has what lengths cannot express.
    pub(super) fn import(
        &self,
        bin_bytes: u64,
        lengths: &mut impl Write,
    ) -> Result<u64, TokenizeError> {
        let unreadable = || TokenizeError::io("read", &self.path);
        let Header { sequences, document_indices, .. } = self.header;
        let mut walk = Walk::new(self.header, bin_bytes);
        let mut sizes = self.at(self.header.lengths_at())?;
        let mut pointers = self.at(self.header.pointers_at())?;
        for _ in 0..sequences {
            let size = read_array::<4>(&mut sizes).map_err(unreadable())?;
            let pointer = read_array::<8>(&mut pointers).map_err(unreadable())?;
            walk.sequences(&size, &pointer).map_err(|error| self.refused(&error))?;
        }
        let mut sizes = self.at(self.header.lengths_at())?;
        let mut starts = self.at(self.header.documents_at())?;
        let mut sequence = 0;
        for document in 0..document_indices {
            let start = read_array::<8>(&mut starts).map_err(unreadable())?;
            walk.documents(&start).map_err(|error| self.refused(&error))?;
            // The first index is that of the first document's start, each further one ends a
            // document.
            let end = u64::from_le_bytes(start);
            if document > 0 && end == sequence {
                return Err(self.refused(&"it has documents without sequences"));
            }
            while sequence < end {
                sequence += 1;
                let size = read_array(&mut sizes).map(u32::from_le_bytes).map_err(unreadable())?;
                let flag = if sequence == end { ENDS_DOCUMENT } else { 0 };
                lengths.write_all(&(size | flag).to_le_bytes()).map_err(unreadable())?;
            }
        }
        walk.finish().map_err(|error| self.refused(&error))?;
        if sequence != sequences {
            return Err(self.refused(&"it has sequences outside of documents"));
        }
        Ok(sequences)
    }

    fn at(&self, offset: u64) -> Result<BufReader<File>, TokenizeError> {
        let file = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(offset))?;
            Ok(file)
        });
        file.map(BufReader::new).map_err(TokenizeError::io("read", &self.path))
    }

    fn refused(&self, reason: &dyn Display) -> TokenizeError {
        TokenizeError::Index { path: self.path.clone(), reason: reason.to_string() }
    }
}

fn read_array<const N: usize>(source: &mut impl Read) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    source.read_exact(&mut array).map(|()| array)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_document_that_is_too_long_takes_several_sequences() {
        let all = |tokens| lengths(tokens).collect::<Vec<u32>>();
        assert_eq!(all(7), [7 | ENDS_DOCUMENT]);
        assert_eq!(all(LONGEST), [u32::MAX]);
        assert_eq!(all(LONGEST + 5), [LONGEST as u32, 5 | ENDS_DOCUMENT]);
        assert_eq!(all(2 * LONGEST), [LONGEST as u32, u32::MAX]);
        let turns = |lengths: &[u32]| turns(lengths).collect::<Vec<u32>>();
        assert_eq!(turns(&[0, 3]), [0, 3 | ENDS_DOCUMENT]);
        assert_eq!(turns(&[LONGEST as u32]), [u32::MAX]);
    }

    /// An index of other software, whose documents have several sequences, is the same after import
    /// and export.
    #[test]
    fn sequences_survive() {
        let folder = std::env::temp_dir().join(format!("dquant-index-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (stored, index) = (folder.join("lengths"), folder.join("a.idx"));
        let mut lengths = Vec::new();
        for length in [2, 3 | ENDS_DOCUMENT, 4 | ENDS_DOCUMENT, 0, 2, 1 | ENDS_DOCUMENT] {
            lengths.extend(u32::to_le_bytes(length));
        }
        fs::write(&stored, &lengths).unwrap();
        write(&stored, &index, TokenType::U16).unwrap();
        let mut again = Vec::new();
        let existing = Existing::open(&folder.join("a.bin")).unwrap();
        assert_eq!(existing.dtype().unwrap(), TokenType::U16);
        assert_eq!(existing.import(24, &mut again).unwrap(), 6);
        assert_eq!(again, lengths);
        for bytes in [22, 26] {
            let refused = existing.import(bytes, &mut Vec::new());
            assert!(matches!(refused, Err(TokenizeError::Index { .. })), "{bytes} bytes");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
