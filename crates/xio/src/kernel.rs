//! Per-byte work: narrowing, packing and widening tokens, quantizing values, scanning their range,
//! CRC32C, compressors.
//!
//! The loops are plain Rust that the compiler vectorizes. For the baseline of x86-64 that means
//! SSE2; a driver that detects the processor compiles the same loops again with more features. To
//! that end the bodies are `#[inline(always)]` functions in [`body`], and the pipeline calls them
//! through [`Kernels`], a table of function pointers that defaults to [`Kernels::PORTABLE`]:
//!
//! ```text
//! #[target_feature(enable = "avx2")]
//! fn narrow_avx2(..) -> .. { xio::kernel::body::narrow_in_place(..) }
//! ```
//!
//! Narrowing and its range check are one pass: the bits that must not be set are OR-accumulated
//! over a chunk, and only a chunk that fails is searched for the offending token. A truncated value
//! is never delivered: the call fails and reports the token (C5).

pub mod body;
mod codec;
mod crc;
pub mod pack;
pub mod quantize;
mod user;

use thiserror::Error;

use crate::dataset::Dtype;

pub use codec::{Codec, Codecs, Compressed, Compression, ZSTD_LEVELS};
pub use crc::crc32c;
pub use quantize::{Quant, QuantizeError};
pub use user::{MapFault, TokenMap, Trap};

/// Narrows little-endian tokens in place: see [`narrow_in_place`].
pub type Narrow = fn(&mut [u8], Dtype, Dtype) -> Result<usize, NarrowError>;

/// Narrows in place and replaces tokens that do not fit: see [`replace_in_place`].
pub type Replace = fn(&mut [u8], Dtype, Dtype, u32) -> Result<(usize, u32), NarrowError>;

/// Packs tokens in place into fewer bits: see [`pack_in_place`].
pub type Pack = fn(&mut [u8], Dtype, u32) -> Result<usize, NarrowError>;

/// Unpacks tokens in place: see [`unpack_in_place`].
pub type Unpack = fn(&mut [u8], usize, u32, Dtype) -> Option<usize>;

/// Quantizes rows of values in place: see [`quantize::quantize_in_place`].
pub type Quantize = fn(&mut [u8], Dtype, Quant, usize) -> Result<usize, QuantizeError>;

/// Undoes quantization into another buffer: see [`quantize::dequantize_into`].
pub type Dequantize = fn(&[u8], Quant, usize, Dtype, &mut [u8]) -> Result<usize, QuantizeError>;

/// Widens little-endian tokens into another buffer: see [`widen_into`].
pub type Widen = fn(&[u8], Dtype, Dtype, &mut [u8]);

/// Continues the CRC32C of bytes seen so far (0 at the start) over more bytes: see [`crc32c`].
pub type Crc32c = fn(u32, &[u8]) -> u32;

/// The per-byte functions of the data plane, chosen once by the driver, which detects the
/// processor.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// Narrowing with a range check.
    pub narrow: Narrow,
    /// Narrowing with replacement.
    pub replace: Replace,
    /// Packing with a range check.
    pub pack: Pack,
    /// Unpacking.
    pub unpack: Unpack,
    /// Quantization.
    pub quantize: Quantize,
    /// Its inverse.
    pub dequantize: Dequantize,
    /// Widening.
    pub widen: Widen,
    /// Checksum of a block.
    pub crc32c: Crc32c,
    /// Compressors.
    pub codecs: Codecs,
}

impl Kernels {
    /// Portable code for any processor, without compressors.
    pub const PORTABLE: Kernels = Kernels {
        narrow: narrow_in_place,
        replace: replace_in_place,
        pack: pack_in_place,
        unpack: unpack_in_place,
        quantize: |buf, from, to, row| quantize::quantize_in_place(buf, from, to, row),
        dequantize: |source, from, row, to, target| {
            quantize::dequantize_into(source, from, row, to, target)
        },
        widen: widen_into,
        crc32c,
        codecs: Codecs::NONE,
    };
}

/// Why tokens were not narrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NarrowError {
    /// A token that `to` cannot represent; the first one in the buffer.
    #[error("token {index} of the block is {value}, which {to} cannot represent")]
    Overflow {
        /// Position in the buffer, in tokens.
        index: usize,
        /// The token as stored.
        value: i128,
        /// The requested type.
        to: Dtype,
    },
    /// `to` is neither `u16` nor `u32`, or is wider than `from`, or `from` holds no tokens.
    #[error("narrowing from {from} to {to} is not defined")]
    Unsupported {
        /// Type of the source.
        from: Dtype,
        /// Requested type.
        to: Dtype,
    },
    /// The buffer is not a whole number of source tokens.
    #[error("buffer of {len} bytes is no multiple of {from}")]
    Ragged {
        /// Type of the source.
        from: Dtype,
        /// Length of the buffer in bytes.
        len: usize,
    },
}

impl NarrowError {
    /// The same error in a buffer with `tokens` more tokens in front.
    fn after(self, tokens: usize) -> NarrowError {
        match self {
            NarrowError::Overflow { index, value, to } => {
                NarrowError::Overflow { index: index + tokens, value, to }
            }
            other => other,
        }
    }
}

/// Whether [`narrow_in_place`] supports this conversion. Equal widths count: `i32` to `u32` moves
/// nothing but refuses negative tokens.
pub const fn can_narrow(from: Dtype, to: Dtype) -> bool {
    from.is_token() && matches!(to, Dtype::U16 | Dtype::U32) && to.bytes() <= from.bytes()
}

/// Whether [`widen_into`] supports this conversion: to a larger type that can represent every
/// value.
pub const fn can_widen(from: Dtype, to: Dtype) -> bool {
    matches!(
        (from, to),
        (Dtype::U16, Dtype::U32 | Dtype::I32 | Dtype::I64) | (Dtype::U32 | Dtype::I32, Dtype::I64)
    )
}

/// Widens little-endian `from` tokens to `to` tokens, as many as both buffers hold. Does nothing
/// where [`can_widen`] says no.
pub fn widen_into(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
    body::widen_into(source, from, to, target);
}

/// Narrows all of `buf`, little-endian `from` tokens, to `to` tokens at the front of `buf`, and
/// returns their length in bytes. The bytes after them are left as they are. After an error the
/// contents of `buf` are unspecified (but initialised), and must not be delivered.
pub fn narrow_in_place(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
    body::narrow_in_place(buf, from, to)
}

/// As [`narrow_in_place`], but a token that `to` cannot represent becomes `instead`, which has to
/// fit `to`. Returns the length in bytes and how many tokens were replaced.
pub fn replace_in_place(
    buf: &mut [u8],
    from: Dtype,
    to: Dtype,
    instead: u32,
) -> Result<(usize, u32), NarrowError> {
    body::replace_in_place(buf, from, to, instead)
}

/// Packs all of `buf`, little-endian tokens, into `bits` bits each, at the front of `buf`, and
/// returns their length in bytes ([`pack::packed_bytes`]). After an error the contents of `buf` are
/// unspecified.
pub fn pack_in_place(buf: &mut [u8], dtype: Dtype, bits: u32) -> Result<usize, NarrowError> {
    pack::pack_in_place(buf, dtype, bits)
}

/// Unpacks so many tokens at the front of `buf`, and returns their length in bytes; none if the
/// type has not more bits, or if `buf` has no room for the tokens.
pub fn unpack_in_place(buf: &mut [u8], tokens: usize, bits: u32, to: Dtype) -> Option<usize> {
    pack::unpack_in_place(buf, tokens, bits, to)
}

/// Replaces every little-endian token by its entry in a table. Bits of an entry that the type has
/// no room for are lost, so whoever reads a table compares it with the type.
///
/// # Errors
/// Names the first token without an entry. The contents of `buf` are unspecified then.
pub fn remap_in_place(buf: &mut [u8], dtype: Dtype, table: &[u32]) -> Result<(), NarrowError> {
    body::remap_in_place(buf, dtype, table)
}

/// The result of [`scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Number of whole tokens.
    pub tokens: usize,
    /// Smallest and largest token; none if there was no token.
    pub range: Option<(i128, i128)>,
}

impl Scan {
    /// Nothing seen.
    pub const EMPTY: Scan = Scan { tokens: 0, range: None };

    /// Combines the results of two pieces of a file.
    pub fn merge(self, other: Scan) -> Scan {
        let range = match (self.range, other.range) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
        Scan { tokens: self.tokens + other.tokens, range }
    }

    /// The narrowest type among `u16`, `u32` and `u64` that holds every token; none if one is
    /// negative.
    pub fn narrowest(&self) -> Option<Dtype> {
        let (low, high) = self.range.unwrap_or((0, 0));
        let fits = |dtype: &Dtype| low >= dtype.range().0 && high <= dtype.range().1;
        [Dtype::U16, Dtype::U32, Dtype::U64].into_iter().find(fits)
    }
}

/// Counts the tokens of a buffer and finds their range, of floating point that of their bits. Bytes
/// after the last whole token are ignored.
pub fn scan(buf: &[u8], dtype: Dtype) -> Scan {
    body::scan(buf, dtype)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
