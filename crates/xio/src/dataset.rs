//! Describes token files from their header bytes alone.
//!
//! A caller that can read bytes (a file, an object, a simulated disk) passes the first bytes and
//! the length to a parser and gets a [`TokenFile`]: element type, offset of the tokens, number of
//! tokens. No parser here opens or reads anything.
//!
//! | format | entry point | needs |
//! |---|---|---|
//! | flat binary, as written by `numpy.ndarray.tofile` | [`flat`] | dtype from a manifest or the user, file length; [`guess`] checks it |
//! | tokens behind a header of llm.c or Lit-GPT | [`mod@sniff`] | header bytes, file length |
//! | NumPy `.npy`, versions 1 to 3 | [`npy::parse`] | header bytes, file length |
//! | Megatron `.bin` with `.idx` | [`megatron::parse`], [`megatron::Walk`] | the `.idx`, `.bin` length |
//! | records of bytes, flat or `.npy` | [`bytes`], [`npy::parse_records`] | that the user asks for [`BYTES`] |
//!
//! Invariants: a returned `TokenFile` has `data_offset + tokens * dtype.bytes()` equal to the
//! length of the file, without overflow, and a dtype that is delivered as tokens or as floating
//! point, or `u8` for records. Header bytes are hostile: they are checked before use, sizes are
//! bounded before anything is allocated, and every refusal names the field and its value and has a
//! counter name ([`DatasetError::reason`]).

mod dtype;
pub mod guess;
mod head;
mod identity;
pub mod megatron;
pub mod npy;
mod sniff;

use alloc::string::String;

use thiserror::Error;

pub use dtype::Dtype;
pub use identity::Identity;
pub use sniff::{Container, Foreign, SNIFF_BYTES, Sniff, sniff};

/// No vocabulary in use is larger. An id beyond it is a sign of a wrong type.
pub const LARGEST_VOCABULARY: u64 = 1 << 20;

/// A described token file. The tokens of all documents are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenFile {
    /// Element type of the tokens.
    pub dtype: Dtype,
    /// Offset of the first token, in bytes from the start of the data file.
    pub data_offset: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// The recognized format.
    pub format: Format,
}

impl TokenFile {
    /// Bytes of all tokens together.
    pub fn data_bytes(&self) -> u64 {
        self.tokens * u64::from(self.dtype.bytes())
    }
}

/// File formats that hold tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Nothing but tokens.
    Flat,
    /// Tokens behind a header.
    Headed {
        /// Who writes such headers.
        writer: &'static str,
    },
    /// NumPy `.npy` of this major version.
    Npy {
        /// 1, 2 or 3.
        version: u8,
        /// Bytes after the array, which are not read.
        trailing_bytes: u64,
    },
    /// Megatron `.bin` described by its `.idx`.
    Megatron {
        /// Number of sequences in the index.
        sequences: u64,
        /// Number of documents (one less than the document indices stored).
        documents: u64,
    },
}

impl Format {
    /// Short name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Flat | Format::Headed { .. } => "flat",
            Format::Npy { .. } => "npy",
            Format::Megatron { .. } => "megatron",
        }
    }
}

/// Describes a flat file of `file_len` bytes that holds nothing but `dtype` tokens.
pub fn flat(dtype: Dtype, file_len: u64) -> Result<TokenFile, DatasetError> {
    let dtype = if dtype.is_float() { dtype } else { dtype.token()? };
    let bytes = u64::from(dtype.bytes());
    if !file_len.is_multiple_of(bytes) {
        return Err(DatasetError::Ragged { dtype, len: file_len, left: file_len % bytes });
    }
    Ok(TokenFile { dtype, data_offset: 0, tokens: file_len / bytes, format: Format::Flat })
}

/// In place of a dtype: the file holds records of bytes.
pub const BYTES: &str = "bytes";

/// Describes a flat file of `file_len` bytes that holds records, whatever they are.
pub fn bytes(file_len: u64) -> TokenFile {
    TokenFile { dtype: Dtype::U8, data_offset: 0, tokens: file_len, format: Format::Flat }
}

/// Why a file is not accepted as tokens. Lengths and offsets are bytes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DatasetError {
    /// An unknown dtype name.
    #[error(
        "dtype `{name}` is not a little-endian integer type (u16, u32, i32, u64, i64 are read)"
    )]
    DtypeName {
        /// The name as given.
        name: String,
    },
    /// A Megatron dtype code outside 1 to 8.
    #[error("dtype code {code} in the index is unknown (1 to 8 are defined)")]
    DtypeCode {
        /// The code as stored.
        code: u8,
    },
    /// A code of Lit-GPT's header that stands for no integer type.
    #[error("type code {code} in the header is no integer type (1 to 5 and 8 are)")]
    HeaderCode {
        /// The code as stored.
        code: u8,
    },
    /// A big-endian array.
    #[error("dtype `{descr}` is big-endian; rewrite the file with `.astype('<…')`")]
    BigEndian {
        /// The NumPy type string.
        descr: String,
    },
    /// Floating point, complex, boolean, text, objects or structures.
    #[error("dtype `{descr}` (kind `{kind}`) is not an integer type: token ids are integers")]
    NotInteger {
        /// The type as stored.
        descr: String,
        /// The NumPy kind letter, `[` for a structure.
        kind: char,
    },
    /// An integer type that is recognized but not delivered.
    #[error("dtype {dtype} is not delivered as tokens (u16, u32, i32, u64, i64 are)")]
    NotTokens {
        /// The type of the file.
        dtype: Dtype,
    },
    /// A flat file that is not a whole number of elements.
    #[error("length of {len} bytes is no multiple of {dtype}: {left} bytes are left over")]
    Ragged {
        /// The type the user gave.
        dtype: Dtype,
        /// Length of the file.
        len: u64,
        /// Bytes after the last whole element.
        left: u64,
    },
    /// The file does not start with the magic of the expected format.
    #[error("{format} file does not start with its magic bytes")]
    Magic {
        /// The expected format.
        format: &'static str,
    },
    /// An unknown format version.
    #[error("{format} version {version} is unknown (read: {known})")]
    Version {
        /// Which format.
        format: &'static str,
        /// The version as stored.
        version: u64,
        /// The versions read here.
        known: &'static str,
    },
    /// Fewer bytes than the field needs.
    #[error("{what} ends early: {have} bytes, {need} needed")]
    Truncated {
        /// The file or field.
        what: &'static str,
        /// Bytes present.
        have: u64,
        /// Bytes required.
        need: u64,
    },
    /// More bytes than the header accounts for.
    #[error("{what} is longer than its header says: {have} bytes, {need} described")]
    Excess {
        /// The file or field.
        what: &'static str,
        /// Bytes present.
        have: u64,
        /// Bytes described.
        need: u64,
    },
    /// A header larger than any valid one.
    #[error("npy header of {len} bytes exceeds the {max} bytes read here")]
    HeaderTooLong {
        /// Header length as stored.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The npy header dictionary cannot be read.
    #[error("npy header, byte {at}: {why}")]
    HeaderSyntax {
        /// Offset inside the dictionary text.
        at: usize,
        /// What was expected there.
        why: &'static str,
    },
    /// A required key is missing from the npy header or appears twice.
    #[error("npy header field `{field}` is {state}")]
    HeaderField {
        /// `descr`, `fortran_order` or `shape`.
        field: &'static str,
        /// `missing` or `repeated`.
        state: &'static str,
    },
    /// Column-major order: samples would not be contiguous.
    #[error("fortran_order is True: tokens of a sequence are not contiguous; save with order='C'")]
    FortranOrder,
    /// Elements without a fixed size.
    #[error("dtype `{descr}` has elements of no fixed size, which are no records")]
    NoRecords {
        /// The type as stored.
        descr: String,
    },
    /// A shape without an axis.
    #[error("shape is (): a scalar holds no token sequence")]
    Scalar,
    /// A number too large for the arithmetic of file offsets.
    #[error("{field} is {value}: too large to be an offset in any file")]
    TooLarge {
        /// Which field.
        field: &'static str,
        /// Its value, or the value it was multiplied by.
        value: u64,
    },
    /// A value of the Megatron index that contradicts the rest.
    #[error("{field}[{index}] is {value}, expected {expected}")]
    Index {
        /// Which array of the index.
        field: &'static str,
        /// Position in the array.
        index: u64,
        /// The value as stored.
        value: i64,
        /// What it must be.
        expected: Expected,
    },
    /// A Megatron index with sequences behind the last document.
    #[error(
        "the last document of the index ends with sequence {last}, but there are {sequences}: a merge left the others out"
    )]
    Documentless {
        /// Sequences up to the end of the last document.
        last: i64,
        /// All sequences.
        sequences: u64,
    },
}

/// The required value in the Megatron index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Expected {
    /// Exactly this value.
    #[error("{0}")]
    Exactly(i64),
    /// At least this value.
    #[error("at least {0}")]
    AtLeast(i64),
    /// At most this value.
    #[error("at most {0}")]
    AtMost(i64),
}

impl DatasetError {
    /// Stable name of the reason, for counters.
    pub const fn reason(&self) -> &'static str {
        match self {
            DatasetError::DtypeName { .. } => "dtype-name",
            DatasetError::DtypeCode { .. } => "dtype-code",
            DatasetError::HeaderCode { .. } => "header-code",
            DatasetError::BigEndian { .. } => "big-endian",
            DatasetError::NotInteger { .. } => "not-integer",
            DatasetError::NotTokens { .. } => "not-tokens",
            DatasetError::Ragged { .. } => "ragged",
            DatasetError::Magic { .. } => "magic",
            DatasetError::Version { .. } => "version",
            DatasetError::Truncated { .. } => "truncated",
            DatasetError::Excess { .. } => "excess",
            DatasetError::HeaderTooLong { .. } => "header-too-long",
            DatasetError::HeaderSyntax { .. } => "header-syntax",
            DatasetError::HeaderField { .. } => "header-field",
            DatasetError::NoRecords { .. } => "no-records",
            DatasetError::FortranOrder => "fortran-order",
            DatasetError::Scalar => "scalar",
            DatasetError::TooLarge { .. } => "too-large",
            DatasetError::Index { .. } => "index",
            DatasetError::Documentless { .. } => "documentless",
        }
    }
}

/// Compares a length with the length described, for files that must match exactly.
fn exact_len(what: &'static str, have: u64, need: u64) -> Result<(), DatasetError> {
    match have.cmp(&need) {
        core::cmp::Ordering::Less => Err(DatasetError::Truncated { what, have, need }),
        core::cmp::Ordering::Equal => Ok(()),
        core::cmp::Ordering::Greater => Err(DatasetError::Excess { what, have, need }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn flat_files_are_whole_tokens() {
        let file = flat(Dtype::U32, 4_096).unwrap();
        assert_eq!((file.tokens, file.data_offset, file.data_bytes()), (1_024, 0, 4_096));
        assert_eq!(flat(Dtype::U16, 0).unwrap().tokens, 0);
        assert_eq!(
            flat(Dtype::U64, 4_097),
            Err(DatasetError::Ragged { dtype: Dtype::U64, len: 4_097, left: 1 })
        );
        assert_eq!(flat(Dtype::U8, 8), Err(DatasetError::NotTokens { dtype: Dtype::U8 }));
    }
}
