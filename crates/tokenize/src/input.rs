//! Opening an input: standard input or a file, decompressed while it is read.
//!
//! Compression is recognised by the first bytes, which no UTF-8 text begins with; a name that
//! promises compression and content that has none is an error, and so is a file of no bytes: no
//! tool compresses to nothing. As `gzip` and `zstd` do, zeros behind a member of gzip are passed
//! over, which tapes and block copies leave, and skippable frames of Zstandard. Decompression takes
//! the memory of one window, whatever the size: 32 KiB of gzip, and what the frame says of
//! Zstandard, up to the 2 GiB of `zstd --long=31`.

use std::fs::File;
use std::io::{self, Cursor, Read};
#[cfg(feature = "compressed")]
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::TokenizeError;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Behind the first byte of a skippable frame of Zstandard, of which 16 values exist.
const SKIPPABLE: &[u8] = &[0x2a, 0x4d, 0x18];

/// Largest window of Zstandard, as a power of two: what 64-bit machines can decompress.
#[cfg(feature = "compressed")]
const WINDOW_LOG: u32 = 31;

/// The first bytes of an input that tell its contents.
pub(super) const HEAD_BYTES: u64 = 64 << 10;

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

/// Opens an input: the file, or standard input in its place.
///
/// # Errors
/// When it cannot be opened, or its compression is not known to this build.
pub(super) fn open(
    path: &Path,
    is_stdin: bool,
    bytes_read: &BytesRead,
) -> Result<Bytes, TokenizeError> {
    if is_stdin {
        return decompress(path, true, counted(io::stdin(), bytes_read));
    }
    let file = File::open(path).map_err(TokenizeError::io("open", path))?;
    decompress(path, false, counted(file, bytes_read))
}

/// The first bytes of a file, decompressed.
///
/// # Errors
/// As [`open`], and when they cannot be read.
pub(super) fn head(path: &Path) -> Result<Vec<u8>, TokenizeError> {
    let file = File::open(path).map_err(TokenizeError::io("open", path))?;
    let bytes = decompress(path, false, Box::new(file))?;
    let mut head = Vec::new();
    bytes.take(HEAD_BYTES).read_to_end(&mut head).map_err(TokenizeError::io("read", path))?;
    Ok(head)
}

fn counted(source: impl Read + Send + 'static, bytes_read: &BytesRead) -> Bytes {
    Box::new(Counted { source, bytes_read: bytes_read.clone() })
}

fn decompress(path: &Path, is_stdin: bool, mut bytes: Bytes) -> Result<Bytes, TokenizeError> {
    let mut head = Vec::new();
    let read = bytes.by_ref().take(ZSTD.len() as u64).read_to_end(&mut head);
    read.map_err(TokenizeError::io("read", path))?;
    let is_skippable = head.first().is_some_and(|byte| byte & 0xf0 == 0x50);
    let is_skippable = is_skippable && head.get(1..) == Some(SKIPPABLE);
    let is_zstd = is_skippable || head.starts_with(ZSTD);
    let promises = |ends: &[&str]| {
        let end = path.extension().unwrap_or_default().to_ascii_lowercase();
        !is_stdin && ends.iter().any(|name| end == *name)
    };
    let promised = match (promises(&["gz"]), promises(&["zst", "zstd"])) {
        (true, _) => Some("gzip"),
        (_, true) => Some("Zstandard"),
        _ => None,
    };
    let is_gzip = head.starts_with(GZIP);
    let is_empty = head.is_empty();
    let whole = Box::new(Cursor::new(head).chain(bytes));
    match promised {
        _ if is_gzip => gzip(path, whole),
        _ if is_zstd => zstd(path, whole),
        None => Ok(whole),
        Some(what) if is_empty => {
            let why = format!("it is empty, which no {what} file is");
            let error = io::Error::new(io::ErrorKind::UnexpectedEof, why);
            Err(TokenizeError::io("read", path)(error))
        }
        Some(what) => Err(TokenizeError::NotCompressed { path: path.to_owned(), what }),
    }
}

#[cfg(feature = "compressed")]
#[expect(clippy::unnecessary_wraps, reason = "fails without the feature")]
fn gzip(_: &Path, bytes: Bytes) -> Result<Bytes, TokenizeError> {
    let bytes = BufReader::with_capacity(32 << 10, bytes);
    Ok(Box::new(Members { member: Some(flate2::bufread::GzDecoder::new(bytes)) }))
}

/// The members of a gzip file, one after the other.
#[cfg(feature = "compressed")]
struct Members {
    /// The current one; none after the last.
    member: Option<flate2::bufread::GzDecoder<BufReader<Bytes>>>,
}

#[cfg(feature = "compressed")]
impl Read for Members {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(member) = self.member.take() else { break };
            let mut rest = member.into_inner();
            if skip_zeros(&mut rest)? {
                self.member = Some(flate2::bufread::GzDecoder::new(rest));
            }
        }
        Ok(0)
    }
}

/// Passes over zeros; whether something else follows.
#[cfg(feature = "compressed")]
fn skip_zeros(bytes: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let block = bytes.fill_buf()?;
        if block.is_empty() {
            return Ok(false);
        }
        let zeros = block.iter().take_while(|byte| **byte == 0).count();
        let is_over = zeros < block.len();
        bytes.consume(zeros);
        if is_over {
            return Ok(true);
        }
    }
}

#[cfg(feature = "compressed")]
fn zstd(path: &Path, bytes: Bytes) -> Result<Bytes, TokenizeError> {
    let mut decoder = zstd::Decoder::new(bytes).map_err(TokenizeError::io("read", path))?;
    decoder.window_log_max(WINDOW_LOG).map_err(TokenizeError::io("read", path))?;
    Ok(Box::new(decoder))
}

#[cfg(not(feature = "compressed"))]
fn gzip(path: &Path, _: Bytes) -> Result<Bytes, TokenizeError> {
    Err(TokenizeError::NotBuilt { path: path.to_owned(), feature: "compressed" })
}

#[cfg(not(feature = "compressed"))]
use gzip as zstd;
