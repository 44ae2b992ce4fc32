//! Shards of MosaicML and chunks of LitData: a table of offsets, then the samples.
//!
//! ```text
//! u32 N | u32 offsets[N + 1] | header | sample 0 | sample 1 | ...
//! ```
//!
//! Offsets count from the start of the file and are 32 bits. A shard is read from front to back, so
//! a compressed one needs no more memory than a plain one: its offsets and a block.

use std::fs::File;
use std::io::{BufReader, Read, Take};
use std::path::{Path, PathBuf};

use xio::dataset::Dtype;

use super::{BLOCK_BYTES, Sink};
use crate::error::Error;

/// Most samples of a shard: its offsets take 64 MiB.
pub(crate) const MAX_SAMPLES: u64 = (16 << 20) - 1;

/// A shard that is being read.
pub(crate) struct Shard {
    path: PathBuf,
    input: Take<Box<dyn Read>>,
    offsets: Vec<u32>,
    /// Samples that were begun.
    sample: usize,
    at: u64,
    buffer: Vec<u8>,
}

impl Shard {
    /// Opens a shard of `samples` samples; a compressed one has `raw_bytes` bytes when it is
    /// decompressed.
    pub(crate) fn open(path: &Path, samples: u64, compressed: Option<u64>) -> Result<Shard, Error> {
        let file = File::open(path).map_err(Error::read(path))?;
        let len = file.metadata().map_err(Error::read(path))?.len();
        let (input, raw_bytes): (Box<dyn Read>, u64) = match compressed {
            None => (Box::new(BufReader::with_capacity(BLOCK_BYTES as usize, file)), len),
            Some(raw_bytes) => (decompressed(path, file)?, raw_bytes),
        };
        let mut shard = Shard {
            path: path.to_owned(),
            input: input.take(raw_bytes),
            offsets: Vec::new(),
            sample: 0,
            at: 0,
            buffer: Vec::new(),
        };
        shard.read_offsets(samples, raw_bytes)?;
        Ok(shard)
    }

    fn corrupt(&self, why: impl Into<String>) -> Error {
        Error::corrupt(&self.path, why)
    }

    fn read_offsets(&mut self, samples: u64, raw_bytes: u64) -> Result<(), Error> {
        let stored = u64::from(self.u32()?);
        if stored != samples {
            let why = format!("holds {stored} samples, its index says {samples}");
            return Err(self.corrupt(why));
        }
        let header = 4 + 4 * (samples + 1);
        if samples > MAX_SAMPLES || header > raw_bytes {
            let why =
                format!("{samples} samples do not fit {raw_bytes} bytes, or exceed {MAX_SAMPLES}");
            return Err(self.corrupt(why));
        }
        let mut table = vec![0; header as usize - 4];
        self.exact(&mut table)?;
        let offsets = table.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        self.offsets = offsets.collect();
        let [first, .., last] = self.offsets[..] else {
            return Ok(());
        };
        if !self.offsets.is_sorted() || u64::from(first) < header || u64::from(last) > raw_bytes {
            let why = format!("its offsets do not ascend from {header} to at most {raw_bytes}");
            return Err(self.corrupt(why));
        }
        Ok(())
    }

    /// Goes to the next sample and returns its length; none after the last.
    pub(crate) fn next_sample(&mut self) -> Result<Option<u64>, Error> {
        let Some([begin, end]) =
            self.offsets.get(self.sample..).and_then(|rest| rest.first_chunk())
        else {
            return Ok(None);
        };
        let (begin, end) = (u64::from(*begin), u64::from(*end));
        if self.at > begin {
            let why = format!("sample {} is shorter than what it holds", self.sample.max(1) - 1);
            return Err(self.corrupt(why));
        }
        self.sample += 1;
        self.skip(begin - self.at)?;
        Ok(Some(end - begin))
    }

    /// Number of the current sample.
    pub(crate) fn number(&self) -> usize {
        self.sample.max(1) - 1
    }

    /// A complaint about the current sample.
    pub(crate) fn bad_sample(&self, why: impl std::fmt::Display) -> Error {
        self.corrupt(format!("sample {}: {why}", self.number()))
    }

    /// A complaint about what the current sample holds, though it is whole.
    pub(crate) fn refused(&self, why: &str, hint: &str) -> Error {
        Error::refused(&self.path, format!("sample {}: {why}", self.number()), hint)
    }

    pub(crate) fn exact(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.input.read_exact(bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => self.corrupt("ends early"),
            _ => Error::read(&self.path)(error),
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// The next bytes, which grow with what the file holds.
    pub(crate) fn bytes(&mut self, bytes: u64) -> Result<Vec<u8>, Error> {
        let mut found = Vec::new();
        while (found.len() as u64) < bytes {
            let have = found.len();
            found.resize(have + (bytes - have as u64).min(BLOCK_BYTES) as usize, 0);
            self.exact(&mut found[have..])?;
        }
        Ok(found)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Error> {
        let mut bytes = [0; 4];
        self.exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Skips bytes of the current sample.
    pub(crate) fn skip(&mut self, mut bytes: u64) -> Result<(), Error> {
        let mut buffer = std::mem::take(&mut self.buffer);
        while bytes > 0 {
            let len = bytes.min(BLOCK_BYTES);
            buffer.resize(len as usize, 0);
            self.exact(&mut buffer)?;
            bytes -= len;
        }
        self.buffer = buffer;
        Ok(())
    }

    /// Passes `bytes` bytes of tokens on.
    pub(crate) fn tokens(
        &mut self,
        mut bytes: u64,
        dtype: Dtype,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        if !bytes.is_multiple_of(u64::from(dtype.bytes())) {
            return Err(
                self.bad_sample(format_args!("{bytes} bytes are no whole number of {dtype}"))
            );
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        while bytes > 0 {
            let len = bytes.min(BLOCK_BYTES);
            buffer.resize(len as usize, 0);
            self.exact(&mut buffer)?;
            sink.tokens(&buffer)?;
            bytes -= len;
        }
        self.buffer = buffer;
        Ok(())
    }
}

#[cfg(feature = "zstd")]
fn decompressed(path: &Path, file: File) -> Result<Box<dyn Read>, Error> {
    let mut decoder = zstd::Decoder::new(file).map_err(Error::read(path))?;
    // 128 MiB, the most that the command line tool takes too: a header cannot ask for more memory.
    decoder.window_log_max(27).map_err(Error::read(path))?;
    Ok(Box::new(BufReader::with_capacity(BLOCK_BYTES as usize, decoder)))
}

#[cfg(not(feature = "zstd"))]
fn decompressed(path: &Path, _file: File) -> Result<Box<dyn Read>, Error> {
    Err(Error::not_built(path, "is compressed with zstd", "compressed"))
}
