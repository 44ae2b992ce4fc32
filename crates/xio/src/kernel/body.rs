//! The loops of [`kernel`](super), inlined into callers compiled for any instruction set.
//!
//! Narrowing in place needs no second buffer: from the first chunk on, the destination is entirely
//! before the source (`2i + 2C <= 4i` once `i >= C`), so the buffer can be split there into two
//! slices that the compiler knows to be disjoint. Only the first chunk overlaps itself; it is
//! converted token by token.

use super::{NarrowError, Scan};
use crate::dataset::Dtype;

/// Tokens per chunk. From 64 to 2,048 measured the same; 128 keeps the search after a failure
/// short.
const CHUNK: usize = 128;

/// The loop behind [`narrow_in_place`](super::narrow_in_place).
#[inline(always)]
pub fn narrow_in_place(buf: &mut [u8], from: Dtype, to: Dtype) -> Result<usize, NarrowError> {
    if !super::can_narrow(from, to) {
        return Err(NarrowError::Unsupported { from, to });
    }
    if !buf.len().is_multiple_of(from.bytes() as usize) {
        return Err(NarrowError::Ragged { from, len: buf.len() });
    }
    let done = match (from.bytes(), to.bytes()) {
        (4, 2) => narrow_32_to_16(buf),
        (8, 2) => narrow_64_to_16(buf),
        (8, 4) => narrow_64_to_32(buf),
        _ if from.is_signed() => refuse_negative_32(buf),
        _ => Ok(buf.len()),
    };
    done.map_err(|(index, bits)| NarrowError::Overflow { index, value: signed(bits, from), to })
}

/// The value of the stored bits.
pub(super) fn signed(bits: u64, from: Dtype) -> i128 {
    match from {
        Dtype::I32 => (bits as u32 as i32).into(),
        Dtype::I64 => (bits as i64).into(),
        _ => bits.into(),
    }
}

/// Position of the first token that does not fit, and its bits.
type Offender = (usize, u64);

/// Defines one narrowing loop. Signed sources need no separate loop: a negative token has its top
/// bit set, which is among the bits that must not be set.
macro_rules! narrowing {
    ($name:ident, $wide:ty, $narrow:ty) => {
        #[inline(always)]
        fn $name(buf: &mut [u8]) -> Result<usize, Offender> {
            const WIDE: usize = size_of::<$wide>();
            const NARROW: usize = size_of::<$narrow>();
            const LIMIT: $wide = <$narrow>::MAX as $wide;

            let tokens = buf.len() / WIDE;
            let one_by_one = |buf: &mut [u8], range: core::ops::Range<usize>| {
                for i in range {
                    let mut wide = [0; WIDE];
                    wide.copy_from_slice(&buf[i * WIDE..(i + 1) * WIDE]);
                    let token = <$wide>::from_le_bytes(wide);
                    if token > LIMIT {
                        return Err((i, u64::from(token)));
                    }
                    let narrow = (token as $narrow).to_le_bytes();
                    buf[i * NARROW..(i + 1) * NARROW].copy_from_slice(&narrow);
                }
                Ok(())
            };

            let mut at = tokens.min(CHUNK);
            one_by_one(buf, 0..at)?;
            while at + CHUNK <= tokens {
                let (done, rest) = buf.split_at_mut(at * WIDE);
                let source = &rest[..CHUNK * WIDE].as_chunks::<WIDE>().0[..CHUNK];
                let target = &mut done[at * NARROW..(at + CHUNK) * NARROW];
                let mut seen: $wide = 0;
                for (narrow, wide) in target.as_chunks_mut::<NARROW>().0.iter_mut().zip(source) {
                    let token = <$wide>::from_le_bytes(*wide);
                    seen |= token;
                    *narrow = (token as $narrow).to_le_bytes();
                }
                if seen > LIMIT {
                    // The source of this chunk is intact; the search stops at the offending token.
                    one_by_one(buf, at..at + CHUNK)?;
                }
                at += CHUNK;
            }
            one_by_one(buf, at..tokens)?;
            Ok(tokens * NARROW)
        }
    };
}

narrowing!(narrow_32_to_16, u32, u16);
narrowing!(narrow_64_to_16, u64, u16);
narrowing!(narrow_64_to_32, u64, u32);

/// `i32` to `u32`: nothing moves, negative tokens are refused.
#[inline(always)]
fn refuse_negative_32(buf: &[u8]) -> Result<usize, Offender> {
    let tokens = buf.as_chunks::<4>().0;
    for (chunk_index, chunk) in tokens.chunks(CHUNK).enumerate() {
        let seen = chunk.iter().fold(0, |seen, token| seen | i32::from_le_bytes(*token));
        if seen < 0 {
            let first = chunk.iter().position(|token| token[3] >= 0x80).unwrap_or(0);
            let bits = u32::from_le_bytes(chunk[first]);
            return Err((chunk_index * CHUNK + first, bits.into()));
        }
    }
    Ok(buf.len())
}

/// The loop behind [`replace_in_place`](super::replace_in_place).
#[inline(always)]
pub fn replace_in_place(
    buf: &mut [u8],
    from: Dtype,
    to: Dtype,
    instead: u32,
) -> Result<(usize, u32), NarrowError> {
    if !super::can_narrow(from, to) || i128::from(instead) > to.range().1 {
        return Err(NarrowError::Unsupported { from, to });
    }
    if !buf.len().is_multiple_of(from.bytes() as usize) {
        return Err(NarrowError::Ragged { from, len: buf.len() });
    }
    Ok(match (from.bytes(), to.bytes()) {
        (4, 2) => replace_32_to_16(buf, instead as u16),
        (8, 2) => replace_64_to_16(buf, instead as u16),
        (8, 4) => replace_64_to_32(buf, instead),
        _ if from.is_signed() => (buf.len(), replace_negative_32(buf, instead)),
        _ => (buf.len(), 0),
    })
}

/// Defines one narrowing loop that replaces. A chunk goes through a buffer of its own, because the
/// destination of the first one overlaps its source.
macro_rules! replacing {
    ($name:ident, $wide:ty, $narrow:ty) => {
        #[inline(always)]
        fn $name(buf: &mut [u8], instead: $narrow) -> (usize, u32) {
            const WIDE: usize = size_of::<$wide>();
            const NARROW: usize = size_of::<$narrow>();
            const LIMIT: $wide = <$narrow>::MAX as $wide;

            let tokens = buf.len() / WIDE;
            let mut replaced = 0;
            for start in (0..tokens).step_by(CHUNK) {
                let end = tokens.min(start + CHUNK);
                let mut kept = [[0; NARROW]; CHUNK];
                let mut over: $wide = 0;
                let source = buf[start * WIDE..end * WIDE].as_chunks::<WIDE>().0;
                for (narrow, wide) in kept.iter_mut().zip(source) {
                    let token = <$wide>::from_le_bytes(*wide);
                    over += <$wide>::from(token > LIMIT);
                    let token = if token > LIMIT { instead } else { token as $narrow };
                    *narrow = token.to_le_bytes();
                }
                // At most the tokens of a chunk.
                replaced += over as u32;
                buf[start * NARROW..end * NARROW]
                    .copy_from_slice(kept[..end - start].as_flattened());
            }
            (tokens * NARROW, replaced)
        }
    };
}

replacing!(replace_32_to_16, u32, u16);
replacing!(replace_64_to_16, u64, u16);
replacing!(replace_64_to_32, u64, u32);

/// `i32` to `u32`: negative tokens are replaced. Returns how many.
#[inline(always)]
fn replace_negative_32(buf: &mut [u8], instead: u32) -> u32 {
    let mut replaced = 0;
    for raw in buf.as_chunks_mut::<4>().0 {
        let token = i32::from_le_bytes(*raw);
        replaced += u32::from(token < 0);
        *raw = if token < 0 { instead } else { token as u32 }.to_le_bytes();
    }
    replaced
}

/// The loop behind [`remap_in_place`](super::remap_in_place).
#[inline(always)]
pub fn remap_in_place(buf: &mut [u8], dtype: Dtype, table: &[u32]) -> Result<(), NarrowError> {
    let done = match dtype.bytes() {
        2 => remap_16(buf, table),
        4 => remap_32(buf, table),
        8 => remap_64(buf, table),
        _ => return Err(NarrowError::Unsupported { from: dtype, to: dtype }),
    };
    done.map_err(|(index, bits)| {
        let value = signed(bits, dtype);
        NarrowError::Overflow { index, value, to: dtype }
    })
}

macro_rules! remapping {
    ($name:ident, $int:ty) => {
        #[inline(always)]
        fn $name(buf: &mut [u8], table: &[u32]) -> Result<(), Offender> {
            for (index, raw) in buf.as_chunks_mut().0.iter_mut().enumerate() {
                let token = <$int>::from_le_bytes(*raw);
                let entry = usize::try_from(token).ok().and_then(|token| table.get(token));
                let entry = entry.ok_or((index, u64::from(token)))?;
                *raw = (*entry as $int).to_le_bytes();
            }
            Ok(())
        }
    };
}

remapping!(remap_16, u16);
remapping!(remap_32, u32);
remapping!(remap_64, u64);

/// The loop behind [`widen_into`](super::widen_into).
#[inline(always)]
pub fn widen_into(source: &[u8], from: Dtype, to: Dtype, target: &mut [u8]) {
    match (from, to) {
        (Dtype::U16, Dtype::U32 | Dtype::I32) => widen_16_to_32(source, target),
        (Dtype::U16, Dtype::I64) => widen_16_to_64(source, target),
        (Dtype::U32, Dtype::I64) => widen_32_to_64(source, target),
        (Dtype::I32, Dtype::I64) => widen_signed_32_to_64(source, target),
        _ => {}
    }
}

macro_rules! widening {
    ($name:ident, $narrow:ty, $wide:ty) => {
        #[inline(always)]
        fn $name(source: &[u8], target: &mut [u8]) {
            let source = source.as_chunks::<{ size_of::<$narrow>() }>().0;
            let target = target.as_chunks_mut::<{ size_of::<$wide>() }>().0;
            for (narrow, wide) in source.iter().zip(target) {
                *wide = <$wide>::from(<$narrow>::from_le_bytes(*narrow)).to_le_bytes();
            }
        }
    };
}

widening!(widen_16_to_32, u16, u32);
widening!(widen_16_to_64, u16, u64);
widening!(widen_32_to_64, u32, u64);
widening!(widen_signed_32_to_64, i32, i64);

/// The loop behind [`scan`](super::scan).
#[inline(always)]
pub fn scan(buf: &[u8], dtype: Dtype) -> Scan {
    match dtype {
        Dtype::U8 => scan_u8(buf),
        Dtype::I8 => scan_i8(buf),
        Dtype::U16 | Dtype::F16 | Dtype::Bf16 => scan_u16(buf),
        Dtype::I16 => scan_i16(buf),
        Dtype::U32 | Dtype::F32 => scan_u32(buf),
        Dtype::I32 => scan_i32(buf),
        Dtype::U64 => scan_u64(buf),
        Dtype::I64 => scan_i64(buf),
    }
}

macro_rules! scanning {
    ($name:ident, $int:ty) => {
        #[inline(always)]
        fn $name(buf: &[u8]) -> Scan {
            let tokens = buf.as_chunks::<{ size_of::<$int>() }>().0;
            let (mut low, mut high) = (<$int>::MAX, <$int>::MIN);
            for token in tokens {
                let token = <$int>::from_le_bytes(*token);
                low = low.min(token);
                high = high.max(token);
            }
            let range = (!tokens.is_empty()).then(|| (i128::from(low), i128::from(high)));
            Scan { tokens: tokens.len(), range }
        }
    };
}

scanning!(scan_u8, u8);
scanning!(scan_i8, i8);
scanning!(scan_u16, u16);
scanning!(scan_i16, i16);
scanning!(scan_u32, u32);
scanning!(scan_i32, i32);
scanning!(scan_u64, u64);
scanning!(scan_i64, i64);
