//! What a token file on this machine holds.
//!
//! [`TokenSource::open`] detects the format of a file from its first bytes, lets [`xio::dataset`] check the header
//! against the length on the disk, and thus learns which file holds the tokens, where they begin and how many there
//! are. [`TokenSource::scan`] reads them once and finds the smallest and largest id. Memory use is one block for any
//! file size: the index of a Megatron dataset is checked in blocks too.
//!
//! Nothing is guessed. A file without a header is flat only if the user names the type, and a type that contradicts the
//! header is refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use thiserror::Error;
use xio::dataset::{self, DatasetError, Dtype, Sniff, TokenFile, megatron, npy};
use xio::kernel::{self, Scan};

/// Bytes read at once; a multiple of every token size.
const BLOCK_BYTES: u64 = 1 << 20;

/// Entries of a Megatron index checked at once: 12 bytes each.
const INDEX_BLOCK: u64 = 1 << 16;

/// Why a file cannot be read as tokens.
#[derive(Debug, Error)]
pub enum InspectError {
    /// An error of the operating system.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is not a regular file.
    #[error("{} is not a file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The content is not what its format demands.
    #[error("{}: {source}", path.display())]
    Dataset {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: DatasetError,
    },
    /// There is no header that names the type, and the user did not.
    #[error("{} has no header that tells the type of its tokens", path.display())]
    UnknownType {
        /// Which file.
        path: PathBuf,
    },
    /// The user names another type than the header.
    #[error("{} holds {found}, not {wanted}", path.display())]
    OtherType {
        /// Which file.
        path: PathBuf,
        /// The header's type.
        found: Dtype,
        /// The user's type.
        wanted: Dtype,
    },
}

impl InspectError {
    fn io(path: &Path) -> impl Fn(io::Error) -> InspectError + '_ {
        |source| InspectError::Io { path: path.to_owned(), source }
    }

    fn dataset(path: &Path) -> impl Fn(DatasetError) -> InspectError + '_ {
        |source| InspectError::Dataset { path: path.to_owned(), source }
    }
}

/// A file that holds tokens, open and described.
#[derive(Debug)]
pub struct TokenSource {
    /// The file with the tokens: for a Megatron index, the `.bin` beside it.
    pub path: PathBuf,
    /// What it holds.
    pub description: TokenFile,
    file: File,
}

impl TokenSource {
    /// Opens a flat file, a `.npy`, or either half of a Megatron pair.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(path: &Path, dtype: Option<Dtype>) -> Result<TokenSource, InspectError> {
        let file = Opened::new(path)?;
        let source = match dataset::sniff(&file.head(megatron::HEADER_BYTES as u64)?) {
            Sniff::Npy => file.npy()?,
            Sniff::MegatronIndex => Opened::new(&path.with_extension("bin"))?.megatron(&file)?,
            Sniff::Unmarked => file.unmarked(dtype)?,
        };
        let found = source.description.dtype;
        match dtype {
            Some(wanted) if wanted != found => {
                Err(InspectError::OtherType { path: source.path, found, wanted })
            }
            _ => Ok(source),
        }
    }

    /// Reads every token once; `watch` receives the number of bytes read.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter since it was opened.
    pub fn scan(&self, watch: &mut dyn FnMut(u64)) -> Result<Scan, InspectError> {
        let mut block = vec![0; BLOCK_BYTES as usize];
        let (mut scan, mut done) = (Scan::EMPTY, 0);
        let total = self.description.data_bytes();
        while done < total {
            let len = BLOCK_BYTES.min(total - done) as usize;
            let offset = self.description.data_offset + done;
            let read = self.file.read_exact_at(&mut block[..len], offset);
            read.map_err(InspectError::io(&self.path))?;
            scan = scan.merge(kernel::scan(&block[..len], self.description.dtype));
            done += len as u64;
            watch(done);
        }
        Ok(scan)
    }
}

/// A file before its format is known.
struct Opened {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Opened {
    fn new(path: &Path) -> Result<Opened, InspectError> {
        // Checked before it is opened: opening a pipe waits for a writer.
        let metadata = std::fs::metadata(path).map_err(InspectError::io(path))?;
        if !metadata.is_file() {
            return Err(InspectError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(InspectError::io(path))?;
        Ok(Opened { path: path.to_owned(), file, len: metadata.len() })
    }

    /// The first `bytes` of the file, or all of it.
    fn head(&self, bytes: u64) -> Result<Vec<u8>, InspectError> {
        self.range(0, bytes.min(self.len))
    }

    fn range(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, InspectError> {
        let mut range = vec![0; bytes as usize];
        self.file.read_exact_at(&mut range, offset).map_err(InspectError::io(&self.path))?;
        Ok(range)
    }

    fn described(self, description: TokenFile) -> TokenSource {
        TokenSource { path: self.path, description, file: self.file }
    }

    fn npy(self) -> Result<TokenSource, InspectError> {
        let refused = InspectError::dataset(&self.path);
        let header = npy::header_bytes(&self.head(npy::PREFIX_BYTES as u64)?).map_err(&refused)?;
        let description = npy::parse(&self.head(header)?, self.len).map_err(&refused)?;
        drop(refused);
        Ok(self.described(description))
    }

    /// A file without a header: the data of a Megatron pair if its index is beside it, flat otherwise.
    fn unmarked(self, dtype: Option<Dtype>) -> Result<TokenSource, InspectError> {
        let index = self.path.with_extension("idx");
        if self.path.extension().is_some_and(|name| name == "bin") && index.is_file() {
            return self.megatron(&Opened::new(&index)?);
        }
        let dtype = dtype.ok_or_else(|| InspectError::UnknownType { path: self.path.clone() })?;
        let description =
            dataset::flat(dtype, self.len).map_err(InspectError::dataset(&self.path))?;
        Ok(self.described(description))
    }

    fn megatron(self, index: &Opened) -> Result<TokenSource, InspectError> {
        let refused = InspectError::dataset(&index.path);
        let head = index.head(megatron::HEADER_BYTES as u64)?;
        let header = megatron::Header::parse(&head, index.len).map_err(&refused)?;
        let mut walk = megatron::Walk::new(header, self.len);
        for (first, count) in blocks(header.sequences) {
            let lengths = index.range(header.lengths_at() + 4 * first, 4 * count)?;
            let pointers = index.range(header.pointers_at() + 8 * first, 8 * count)?;
            walk.sequences(&lengths, &pointers).map_err(&refused)?;
        }
        for (first, count) in blocks(header.document_indices) {
            let indices = index.range(header.documents_at() + 8 * first, 8 * count)?;
            walk.documents(&indices).map_err(&refused)?;
        }
        let description = walk.finish().map_err(&refused)?;
        Ok(self.described(description))
    }
}

/// Cuts `entries` into blocks: first entry and number of entries of each.
fn blocks(entries: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..entries.div_ceil(INDEX_BLOCK)).map(move |block| {
        let first = block * INDEX_BLOCK;
        (first, INDEX_BLOCK.min(entries - first))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_entry_once() {
        for entries in [0, 1, INDEX_BLOCK - 1, INDEX_BLOCK, INDEX_BLOCK + 1, 5 * INDEX_BLOCK + 7] {
            let mut next = 0;
            for (first, count) in blocks(entries) {
                assert_eq!(first, next);
                assert!(count > 0);
                next += count;
            }
            assert_eq!(next, entries);
        }
    }
}
