//! Opening an input: standard input or a file, decompressed while it is read.
//!
//! Compression is recognised by the first bytes, which no UTF-8 text can begin with; a name that promises compression
//! and content that has none is an error. Decompression takes the memory of one window, whatever the size.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::TokenizeError;
use super::sources::Source;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The bytes of an input.
pub(super) type Bytes = Box<dyn Read + Send>;

/// How many bytes of the inputs have been read, before decompression.
#[derive(Clone, Debug, Default)]
pub(super) struct BytesRead(Arc<AtomicU64>);

impl BytesRead {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

struct Counted<R> {
    source: R,
    bytes_read: BytesRead,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.bytes_read.add(read as u64);
        Ok(read)
    }
}

/// Opens an input.
///
/// # Errors
/// When it cannot be opened, or its compression is not known to this build.
pub(super) fn open(source: &Source, bytes_read: &BytesRead) -> Result<Bytes, TokenizeError> {
    if source.is_stdin() {
        return decompress(source, counted(io::stdin(), bytes_read));
    }
    let file = File::open(&source.path).map_err(TokenizeError::io("open", &source.path))?;
    decompress(source, counted(file, bytes_read))
}

fn counted(source: impl Read + Send + 'static, bytes_read: &BytesRead) -> Bytes {
    Box::new(Counted { source, bytes_read: bytes_read.clone() })
}

fn decompress(source: &Source, mut bytes: Bytes) -> Result<Bytes, TokenizeError> {
    let path = source.path.as_path();
    let mut head = Vec::new();
    let read = bytes.by_ref().take(ZSTD.len() as u64).read_to_end(&mut head);
    read.map_err(TokenizeError::io("read", path))?;
    let (is_gzip, is_zstd) = (head.starts_with(GZIP), head.starts_with(ZSTD));
    let promises = |ends: &[&str]| {
        let end = path.extension().unwrap_or_default();
        !source.is_stdin() && !head.is_empty() && ends.iter().any(|name| end == *name)
    };
    let whole = Box::new(Cursor::new(head.clone()).chain(bytes));
    if is_gzip {
        return gzip(path, whole);
    }
    if is_zstd {
        return zstd(path, whole);
    }
    match (promises(&["gz"]), promises(&["zst", "zstd"])) {
        (false, false) => Ok(whole),
        (true, _) => Err(TokenizeError::NotCompressed { path: path.to_owned(), what: "gzip" }),
        (_, true) => Err(TokenizeError::NotCompressed { path: path.to_owned(), what: "Zstandard" }),
    }
}

#[cfg(feature = "compressed")]
#[expect(clippy::unnecessary_wraps, reason = "fails without the feature")]
fn gzip(_: &Path, bytes: Bytes) -> Result<Bytes, TokenizeError> {
    Ok(Box::new(flate2::read::MultiGzDecoder::new(bytes)))
}

#[cfg(feature = "compressed")]
fn zstd(path: &Path, bytes: Bytes) -> Result<Bytes, TokenizeError> {
    let decoder = zstd::Decoder::new(bytes).map_err(TokenizeError::io("read", path))?;
    Ok(Box::new(decoder))
}

#[cfg(not(feature = "compressed"))]
fn gzip(path: &Path, _: Bytes) -> Result<Bytes, TokenizeError> {
    Err(TokenizeError::NotBuilt { path: path.to_owned(), feature: "compressed" })
}

#[cfg(not(feature = "compressed"))]
use gzip as zstd;
