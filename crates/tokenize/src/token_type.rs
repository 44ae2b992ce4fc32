//! How ids are stored, in files and in the index beside them.

use std::fmt;

use clap::ValueEnum;
use xio::dataset::Dtype;

/// How an id is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TokenType {
    /// 32 bits per token, any encoding
    U32,
    /// 16 bits per token, for vocabularies below 65,536
    U16,
}

impl TokenType {
    /// Bytes of one id.
    pub const fn bytes(self) -> u64 {
        match self {
            TokenType::U32 => 4,
            TokenType::U16 => 2,
        }
    }

    /// The type in a flat file.
    pub const fn in_file(self) -> Dtype {
        match self {
            TokenType::U32 => Dtype::U32,
            TokenType::U16 => Dtype::U16,
        }
    }

    /// The type in an index, whose format has no u32: ids are below 2^31, so i32 is the same bytes.
    pub const fn in_index(self) -> Dtype {
        match self {
            TokenType::U32 => Dtype::I32,
            TokenType::U16 => Dtype::U16,
        }
    }
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TokenType::U32 => "u32",
            TokenType::U16 => "u16",
        })
    }
}
