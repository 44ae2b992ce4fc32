//! General compressors: what the data plane knows of them.
//!
//! The libraries are C or need an allocator's care, so they belong to the driver, which gives two
//! functions ([`Codecs`]). Both write into a buffer of the caller and never beyond it, whatever
//! they are given.

use core::fmt;

/// A compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Codec {
    /// LZ4, block format without a length in front.
    Lz4,
    /// Zstandard, one frame.
    Zstd,
}

impl Codec {
    /// Every codec, in the order of their codes in capsules, which begin with 1 and never change.
    pub const ALL: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

    /// The name in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
        }
    }

    /// The codec of this name.
    pub fn from_name(name: &str) -> Option<Codec> {
        Codec::ALL.into_iter().find(|codec| codec.name() == name)
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Levels of Zstandard that plans may name: beyond them a block costs much and gains little.
pub const ZSTD_LEVELS: core::ops::RangeInclusive<i32> = -7..=3;

/// How blocks are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    /// The compressor.
    pub codec: Codec,
    /// Its level, one of [`ZSTD_LEVELS`]; 0 for LZ4, which has none.
    pub level: i32,
    /// Also where the link is faster than the compressor.
    pub always: bool,
}

impl Compression {
    /// A compression with legal values.
    pub fn new(codec: Codec, level: i32, always: bool) -> Option<Compression> {
        let legal = match codec {
            Codec::Lz4 => level == 0,
            Codec::Zstd => ZSTD_LEVELS.contains(&level),
        };
        legal.then_some(Compression { codec, level, always })
    }
}

/// As printed in a plan.
impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compress({}", self.codec)?;
        if self.codec == Codec::Zstd {
            write!(f, ", level={}", self.level)?;
        }
        f.write_str(if self.always { ", when=always)" } else { ")" })
    }
}

/// What compressing a block gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Bytes written; none if the buffer was too small, or if there is no such codec.
    pub bytes: Option<usize>,
    /// Time it took, in nanoseconds.
    pub nanos: u64,
}

/// The compressors of the driver.
#[derive(Clone, Copy, Debug)]
pub struct Codecs {
    /// Compresses the first buffer into the second.
    pub compress: fn(&Compression, &[u8], &mut [u8]) -> Compressed,
    /// Decompresses the first buffer into the second, and returns the bytes written; none if the
    /// first is malformed or the second too small.
    pub decompress: fn(Codec, &[u8], &mut [u8]) -> Option<usize>,
}

impl Codecs {
    /// No codec: blocks stay as they are, and none can be decompressed.
    pub const NONE: Codecs = Codecs {
        compress: |_, _, _| Compressed { bytes: None, nanos: 0 },
        decompress: |_, _, _| None,
    };
}
