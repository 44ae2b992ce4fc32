//! Bit packing: tokens of few bits without gaps between them.
//!
//! | bits | layout |
//! |---|---|
//! | 16 | little-endian `u16` in order: what narrowing gives, so that a compressor still finds repetitions |
//! | others | chunks of 1,024 tokens, then the rest |
//!
//! A chunk is 32 rows of 32 tokens. Each of the 32 columns is a stream of bits, the first row in
//! the lowest bits, cut into `bits` words of 32 bits; words with the same number are neighbours. A
//! shift is then the same for 32 neighbouring tokens, so the loops vectorize without a case for
//! each width. The rest of a block, fewer than 1,024 tokens, is one stream of bits, padded with
//! zeros to a whole byte.
//!
//! Both directions work in place. Packing goes forward and writes behind what it has read;
//! unpacking goes backward, and copies a chunk before it writes over it.

use super::NarrowError;
use super::body;
use crate::dataset::Dtype;

/// Tokens of a chunk.
const CHUNK: usize = COLUMNS * ROWS;
const COLUMNS: usize = 32;
const ROWS: usize = 32;

/// Bytes of one word of every column.
const WORDS_BYTES: usize = 4 * COLUMNS;

/// Most bytes of the tokens after the last chunk.
const REST_BYTES: usize = (CHUNK * 31).div_ceil(8);

/// Tokens widened at once.
const WIDEN: usize = 1024;

/// The bits that a token can be packed into.
pub const PACKED_BITS: core::ops::RangeInclusive<u32> = 9..=31;

/// One word, or one token, of each column.
type Row = [u32; COLUMNS];

/// Whether tokens of this type can be packed into so many bits: fewer than the type has.
pub const fn can_pack(dtype: Dtype, bits: u32) -> bool {
    matches!(dtype, Dtype::U16 | Dtype::U32 | Dtype::I32)
        && bits >= *PACKED_BITS.start()
        && bits <= *PACKED_BITS.end()
        && bits < 8 * dtype.bytes()
}

/// Bytes of `tokens` tokens, packed.
pub const fn packed_bytes(tokens: usize, bits: u32) -> usize {
    let bits = bits as usize;
    tokens / CHUNK * WORDS_BYTES * bits + (tokens % CHUNK * bits).div_ceil(8)
}

/// The bits that the largest token of the block needs; 0 if all are zero. Negative tokens need all.
#[inline(always)]
pub fn bits_needed(buf: &[u8], dtype: Dtype) -> u32 {
    let seen = match dtype.bytes() {
        2 => {
            u64::from(buf.as_chunks().0.iter().fold(0, |seen, raw| seen | u16::from_le_bytes(*raw)))
        }
        4 => {
            u64::from(buf.as_chunks().0.iter().fold(0, |seen, raw| seen | u32::from_le_bytes(*raw)))
        }
        8 => buf.as_chunks().0.iter().fold(0, |seen, raw| seen | u64::from_le_bytes(*raw)),
        _ => u64::MAX,
    };
    u64::BITS - seen.leading_zeros()
}

/// The error for the first token that does not fit.
fn overflow(buf: &[u8], dtype: Dtype, bits: u32) -> NarrowError {
    let width = dtype.bytes() as usize;
    let value = |raw: &[u8]| {
        let mut wide = [0; 8];
        wide[..width].copy_from_slice(raw);
        u64::from_le_bytes(wide)
    };
    let mut tokens = buf.chunks_exact(width).map(value).enumerate();
    let found = tokens.find(|(_, token)| token >> bits != 0);
    let (index, token) = found.unwrap_or((0, 0));
    NarrowError::Overflow { index, value: body::signed(token, dtype), to: dtype }
}

/// Checks that every token fits so many bits.
///
/// # Errors
/// Names the first one that does not.
pub fn fit(buf: &[u8], dtype: Dtype, bits: u32) -> Result<(), NarrowError> {
    match bits_needed(buf, dtype) <= bits {
        true => Ok(()),
        false => Err(overflow(buf, dtype, bits)),
    }
}

/// The loop behind [`pack_in_place`](super::pack_in_place).
#[inline(always)]
pub fn pack_in_place(buf: &mut [u8], dtype: Dtype, bits: u32) -> Result<usize, NarrowError> {
    if !can_pack(dtype, bits) {
        return Err(NarrowError::Unsupported { from: dtype, to: dtype });
    }
    if !buf.len().is_multiple_of(dtype.bytes() as usize) {
        return Err(NarrowError::Ragged { from: dtype, len: buf.len() });
    }
    if bits == 16 {
        return body::narrow_in_place(buf, dtype, Dtype::U16);
    }
    match dtype.bytes() {
        2 => pack::<2>(buf, dtype, bits),
        _ => pack::<4>(buf, dtype, bits),
    }
}

/// One little-endian token of `WIDTH` bytes, at most four.
#[inline(always)]
fn load<const WIDTH: usize>(raw: &[u8; WIDTH]) -> u32 {
    // Written out, because a copy into four bytes does not vectorize.
    match WIDTH {
        4 => u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]),
        _ => u32::from(u16::from_le_bytes([raw[0], raw[1]])),
    }
}

#[inline(always)]
fn pack<const WIDTH: usize>(buf: &mut [u8], dtype: Dtype, bits: u32) -> Result<usize, NarrowError> {
    let tokens = buf.len() / WIDTH;
    let mut out = 0;
    for chunk in 0..tokens / CHUNK {
        let at = chunk * CHUNK * WIDTH;
        let mut rows = [[0; COLUMNS]; ROWS];
        let source = buf[at..at + CHUNK * WIDTH].as_chunks::<WIDTH>().0;
        // Two loops: one that also gathers the bits seen does not vectorize.
        for (token, raw) in rows.as_flattened_mut().iter_mut().zip(source) {
            *token = load(raw);
        }
        if rows.as_flattened().iter().fold(0, |seen, token| seen | token) >> bits != 0 {
            let error = overflow(&buf[at..at + CHUNK * WIDTH], dtype, bits);
            return Err(error.after(chunk * CHUNK));
        }
        let words = pack_rows(&rows, bits);
        let packed = &mut buf[out..out + bits as usize * WORDS_BYTES];
        for (raw, word) in packed.as_chunks_mut::<4>().0.iter_mut().zip(words.as_flattened()) {
            *raw = word.to_le_bytes();
        }
        out += bits as usize * WORDS_BYTES;
    }
    let (mut held, mut filled) = (0u64, 0);
    for index in tokens / CHUNK * CHUNK..tokens {
        let raw = &buf[index * WIDTH..(index + 1) * WIDTH];
        let token = load(&raw.as_chunks::<WIDTH>().0[0]);
        if token >> bits != 0 {
            return Err(overflow(&buf[index * WIDTH..], dtype, bits).after(index));
        }
        held |= u64::from(token) << filled;
        filled += bits;
        while filled >= 8 {
            buf[out] = held as u8;
            (held, filled, out) = (held >> 8, filled - 8, out + 1);
        }
    }
    if filled > 0 {
        buf[out] = held as u8;
        out += 1;
    }
    Ok(out)
}

/// The words of a chunk; those after the first `bits` are zero.
#[inline(always)]
fn pack_rows(rows: &[Row; ROWS], bits: u32) -> [Row; ROWS] {
    let mut words = [[0; COLUMNS]; ROWS];
    let (mut held, mut word, mut filled): (Row, _, _) = ([0; COLUMNS], 0, 0);
    for row in rows {
        for (held, token) in held.iter_mut().zip(row) {
            *held |= token.wrapping_shl(filled);
        }
        filled += bits;
        if filled >= 32 {
            words[word] = held;
            (word, filled) = (word + 1, filled - 32);
            for (held, token) in held.iter_mut().zip(row) {
                // A shift by all of the token's bits would be one by none.
                *held = if filled > 0 { token.wrapping_shr(bits - filled) } else { 0 };
            }
        }
    }
    words
}

/// The loop behind [`unpack_in_place`](super::unpack_in_place).
#[inline(always)]
pub fn unpack_in_place(buf: &mut [u8], tokens: usize, bits: u32, to: Dtype) -> Option<usize> {
    let fits = tokens.checked_mul(to.bytes() as usize).is_some_and(|bytes| bytes <= buf.len());
    if !can_pack(to, bits) || !fits {
        return None;
    }
    match (bits, to.bytes()) {
        (16, _) => widen_in_place(buf, tokens),
        (_, 2) => unpack::<2>(buf, tokens, bits),
        _ => unpack::<4>(buf, tokens, bits),
    }
    Some(tokens * to.bytes() as usize)
}

/// `u16` to 32 bits, from the last token to the first.
#[inline(always)]
fn widen_in_place(buf: &mut [u8], tokens: usize) {
    let mut end = tokens;
    while end > 0 {
        let start = (end - 1) / WIDEN * WIDEN;
        let mut narrow = [0; 2 * WIDEN];
        let narrow = &mut narrow[..2 * (end - start)];
        narrow.copy_from_slice(&buf[2 * start..2 * end]);
        let wide = buf[4 * start..4 * end].as_chunks_mut::<4>().0;
        for (wide, narrow) in wide.iter_mut().zip(narrow.as_chunks::<2>().0) {
            *wide = u32::from(u16::from_le_bytes(*narrow)).to_le_bytes();
        }
        end = start;
    }
}

#[inline(always)]
fn unpack<const WIDTH: usize>(buf: &mut [u8], tokens: usize, bits: u32) {
    let chunks = tokens / CHUNK;
    let mask = (1u32 << bits) - 1;
    let store = |buf: &mut [u8], index: usize, token: u32| {
        buf[index * WIDTH..(index + 1) * WIDTH].copy_from_slice(&token.to_le_bytes()[..WIDTH]);
    };
    let at = chunks * bits as usize * WORDS_BYTES;
    let mut rest = [0; REST_BYTES];
    let rest = &mut rest[..(tokens % CHUNK * bits as usize).div_ceil(8)];
    rest.copy_from_slice(&buf[at..at + rest.len()]);
    let (mut held, mut filled, mut bytes) = (0u64, 0, rest.iter());
    for index in chunks * CHUNK..tokens {
        while filled < bits {
            // There is a byte for every bit of these tokens.
            held |= u64::from(bytes.next().copied().unwrap_or(0)) << filled;
            filled += 8;
        }
        store(buf, index, held as u32 & mask);
        (held, filled) = (held >> bits, filled - bits);
    }
    for chunk in (0..chunks).rev() {
        let at = chunk * bits as usize * WORDS_BYTES;
        let mut words = [[0; COLUMNS]; ROWS];
        let packed = buf[at..at + bits as usize * WORDS_BYTES].as_chunks::<4>().0;
        for (word, raw) in words.as_flattened_mut().iter_mut().zip(packed) {
            *word = u32::from_le_bytes(*raw);
        }
        let rows = unpack_rows(&words, bits, mask);
        let target = &mut buf[chunk * CHUNK * WIDTH..(chunk + 1) * CHUNK * WIDTH];
        for (raw, token) in target.as_chunks_mut::<WIDTH>().0.iter_mut().zip(rows.as_flattened()) {
            raw.copy_from_slice(&token.to_le_bytes()[..WIDTH]);
        }
    }
}

#[inline(always)]
fn unpack_rows(words: &[Row; ROWS], bits: u32, mask: u32) -> [Row; ROWS] {
    let mut rows = [[0; COLUMNS]; ROWS];
    for (position, row) in (0..).step_by(bits as usize).zip(&mut rows) {
        let (word, shift) = (position / 32, position as u32 % 32);
        if shift + bits > 32 {
            for ((token, low), high) in row.iter_mut().zip(&words[word]).zip(&words[word + 1]) {
                *token = (low.wrapping_shr(shift) | high.wrapping_shl(32 - shift)) & mask;
            }
        } else {
            for (token, word) in row.iter_mut().zip(&words[word]) {
                *token = word.wrapping_shr(shift) & mask;
            }
        }
    }
    rows
}
