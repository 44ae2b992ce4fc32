//! Block quantization of floating-point values, and its inverse: the MX formats of the OCP
//! Microscaling Formats specification, version 1.0.
//!
//! A row is the values of a sample. Each of its blocks of 32 values, the last of which may be
//! shorter, has a scale: a power of two in eight bits (E8M0). A quantized row is one code for each
//! value, then one scale for each block:
//!
//! ```text
//! code code … code | scale scale … scale        row + ceil(row / 32) bytes
//! ```
//!
//! The functions are `#[inline(always)]` and plain loops over blocks, so that callers compiled for
//! any instruction set get vectors of it. Nothing depends on where a row lies in a file or in a
//! buffer. What each value becomes is defined in `docs/plan.md`, and by slow code in
//! [`reference`](crate::reference).

use core::fmt;

use thiserror::Error;

use crate::dataset::Dtype;

/// Values that share a scale.
pub const SCALED_VALUES: usize = 32;

/// Most scales of a row: a block of 1 MiB of the smallest floating-point type.
const MAX_SCALES: usize = (1 << 20) / 2 / SCALED_VALUES;

/// Most values of a row.
const MAX_ROW: usize = MAX_SCALES * SCALED_VALUES;

/// The scale of a block that is not a number.
const NAN_SCALE: u8 = 0xff;

/// Added to a small number, leaves its nearest integer in the lowest bits; ties go to the even one.
const TO_INTEGER: f32 = 12_582_912.0;

const INFINITY_BITS: u32 = 0x7f80_0000;

const SIGN_BIT: u32 = 0x8000_0000;

/// Type of the quantized values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Quant {
    /// Signed integers of 8 bits, 1.0 is 64: MXINT8.
    Int8,
    /// Floating point with 4 bits of exponent and 3 of mantissa: MXFP8 E4M3.
    E4m3,
    /// Floating point with 5 bits of exponent and 2 of mantissa: MXFP8 E5M2.
    E5m2,
}

impl Quant {
    /// Every type.
    pub const ALL: [Quant; 3] = [Quant::Int8, Quant::E4m3, Quant::E5m2];

    /// The name used in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Quant::Int8 => "int8",
            Quant::E4m3 => "e4m3",
            Quant::E5m2 => "e5m2",
        }
    }

    /// The type with this name.
    pub fn from_name(name: &str) -> Option<Quant> {
        Quant::ALL.into_iter().find(|quant| quant.name() == name)
    }

    /// Exponent of its largest power of two.
    const fn largest_exponent(self) -> u32 {
        match self {
            Quant::Int8 => 0,
            Quant::E4m3 => 8,
            Quant::E5m2 => 15,
        }
    }

    /// Whether it has a code for this value, given as the bits of a `f32`: not every type has one
    /// for NaN and infinities.
    pub const fn holds(self, bits: u32) -> bool {
        match (self, bits & !SIGN_BIT) {
            (_, ..INFINITY_BITS) | (Quant::E5m2, _) => true,
            (Quant::E4m3, magnitude) => magnitude > INFINITY_BITS,
            (Quant::Int8, _) => false,
        }
    }
}

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a row is not converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QuantizeError {
    /// A value that the result cannot represent; the first one in the buffer.
    #[error("value {index} of the block has the bits {bits:#010x}, which cannot be represented")]
    Value {
        /// Its position in the buffer.
        index: usize,
        /// Its bits as a `f32`.
        bits: u32,
    },
    /// The types are not defined, or the buffer is not a whole number of rows.
    #[error("the conversion is not defined for this buffer")]
    Unsupported,
}

/// Bytes of a quantized row of so many values.
pub const fn quantized_bytes(row: usize) -> usize {
    row + row.div_ceil(SCALED_VALUES)
}

/// Whether rows of this length are converted.
pub const fn can_quantize(from: Dtype, row: usize) -> bool {
    from.is_float() && row >= 1 && row <= MAX_ROW
}

/// Quantizes all rows of `buf` in place and returns their bytes. After an error the contents of
/// `buf` are unspecified.
///
/// # Errors
/// See [`QuantizeError`]: NaN and infinities are refused where `to` has no code for them.
#[inline(always)]
pub fn quantize_in_place(
    buf: &mut [u8],
    from: Dtype,
    to: Quant,
    row: usize,
) -> Result<usize, QuantizeError> {
    let width = from.bytes() as usize;
    if !can_quantize(from, row) || !buf.len().is_multiple_of(row * width) {
        return Err(QuantizeError::Unsupported);
    }
    let (rows, out_bytes) = (buf.len() / (row * width), quantized_bytes(row));
    let (mut scales, mut values) = ([0; MAX_SCALES], [0.0; SCALED_VALUES]);
    for index in 0..rows {
        // The result lies before what is read next: a quantized row is not larger than a row of
        // two-byte values.
        let (source, target) = (index * row * width, index * out_bytes);
        for (block, scale) in scales[..row.div_ceil(SCALED_VALUES)].iter_mut().enumerate() {
            let first = block * SCALED_VALUES;
            let count = SCALED_VALUES.min(row - first);
            let bytes = &buf[source + first * width..source + (first + count) * width];
            load(bytes, from, &mut values);
            let mut codes = [0; SCALED_VALUES];
            *scale = encode(&values, to, &mut codes).map_err(|at| QuantizeError::Value {
                index: index * row + first + at,
                bits: values[at].to_bits(),
            })?;
            let target = &mut buf[target + first..target + first + count];
            match <&mut [u8; SCALED_VALUES]>::try_from(&mut *target) {
                Ok(whole) => *whole = codes,
                Err(_) => target.copy_from_slice(&codes[..count]),
            }
        }
        buf[target + row..target + out_bytes]
            .copy_from_slice(&scales[..row.div_ceil(SCALED_VALUES)]);
    }
    Ok(rows * out_bytes)
}

/// Converts all quantized rows of `source` to values of type `to` and returns their bytes.
///
/// # Errors
/// See [`QuantizeError`]: a finite value that `f16` cannot represent is refused.
#[inline(always)]
pub fn dequantize_into(
    source: &[u8],
    from: Quant,
    row: usize,
    to: Dtype,
    target: &mut [u8],
) -> Result<usize, QuantizeError> {
    let (width, in_bytes) = (to.bytes() as usize, quantized_bytes(row));
    if !can_quantize(to, row) || !source.len().is_multiple_of(in_bytes) {
        return Err(QuantizeError::Unsupported);
    }
    let bytes = source.len() / in_bytes * row * width;
    let target = target.get_mut(..bytes).ok_or(QuantizeError::Unsupported)?;
    let rows = source.chunks_exact(in_bytes).zip(target.chunks_exact_mut(row * width));
    for (index, (source, target)) in rows.enumerate() {
        let (codes, scales) = source.split_at(row);
        let blocks = codes.chunks(SCALED_VALUES).zip(target.chunks_mut(SCALED_VALUES * width));
        for (block, ((codes, target), scale)) in blocks.zip(scales).enumerate() {
            let (mut padded, mut values) = ([0; SCALED_VALUES], [0.0; SCALED_VALUES]);
            padded[..codes.len()].copy_from_slice(codes);
            decode(&padded, *scale, from, &mut values);
            store(&values, to, target).map_err(|at| QuantizeError::Value {
                index: index * row + block * SCALED_VALUES + at,
                bits: values[at].to_bits(),
            })?;
        }
    }
    Ok(bytes)
}

/// Reads up to a block of values; the rest are zero. Vectors need a known number of them, so a
/// shorter block is copied first.
#[inline(always)]
fn load(bytes: &[u8], from: Dtype, values: &mut [f32; SCALED_VALUES]) {
    match from {
        Dtype::F32 => load_as::<4>(bytes, values, f32::from_le_bytes),
        Dtype::F16 => load_as::<2>(bytes, values, |raw| from_f16(u16::from_le_bytes(raw))),
        _ => load_as::<2>(bytes, values, |raw| {
            f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16)
        }),
    }
}

#[inline(always)]
fn load_as<const WIDTH: usize>(
    bytes: &[u8],
    values: &mut [f32; SCALED_VALUES],
    value: impl Fn([u8; WIDTH]) -> f32,
) {
    let raw = bytes.as_chunks().0;
    let mut padded = [[0; WIDTH]; SCALED_VALUES];
    let whole = match <&[[u8; WIDTH]; SCALED_VALUES]>::try_from(raw) {
        Ok(whole) => whole,
        Err(_) => {
            padded[..raw.len()].copy_from_slice(raw);
            &padded
        }
    };
    for (to, raw) in values.iter_mut().zip(whole) {
        *to = value(*raw);
    }
}

/// Writes the first values of a block.
///
/// # Errors
/// The place of the first finite value that the type cannot represent.
#[inline(always)]
fn store(values: &[f32; SCALED_VALUES], to: Dtype, bytes: &mut [u8]) -> Result<(), usize> {
    match to {
        Dtype::F32 => {
            for (value, raw) in values.iter().zip(bytes.as_chunks_mut().0) {
                *raw = value.to_le_bytes();
            }
        }
        Dtype::F16 => {
            let halves = bytes.as_chunks_mut().0;
            let mut overflows = false;
            for (value, raw) in values.iter().zip(halves.iter_mut()) {
                let (half, overflow) = to_f16(value.to_bits());
                *raw = half.to_le_bytes();
                overflows |= overflow;
            }
            if overflows {
                let place = values.iter().position(|value| to_f16(value.to_bits()).1);
                return Err(place.unwrap_or(0));
            }
        }
        _ => {
            for (value, raw) in values.iter().zip(bytes.as_chunks_mut().0) {
                *raw = to_bf16(value.to_bits()).to_le_bytes();
            }
        }
    }
    Ok(())
}

/// The largest of the values' bits without their signs. Halved again and again, because a loop over
/// all of them is a chain of scalar instructions.
#[inline(always)]
fn largest_magnitude(values: &[f32; SCALED_VALUES]) -> u32 {
    let mut largest = values.map(|value| value.to_bits() & !SIGN_BIT);
    let mut half = SCALED_VALUES / 2;
    while half > 0 {
        let (front, back) = largest.split_at_mut(half);
        for (one, other) in front.iter_mut().zip(back) {
            *one = (*one).max(*other);
        }
        half /= 2;
    }
    largest[0]
}

/// Encodes a block and returns its scale.
///
/// # Errors
/// The place of the first value that has no code.
#[inline(always)]
fn encode(
    values: &[f32; SCALED_VALUES],
    to: Quant,
    codes: &mut [u8; SCALED_VALUES],
) -> Result<u8, usize> {
    let magnitude = |value: &f32| value.to_bits() & !SIGN_BIT;
    let mut largest = largest_magnitude(values);
    let is_finite = largest < INFINITY_BITS;
    if !is_finite {
        if let Some(place) = values.iter().position(|value| !to.holds(value.to_bits())) {
            return Err(place);
        }
        let finite = values.iter().map(magnitude).filter(|bits| *bits < INFINITY_BITS);
        largest = finite.max().unwrap_or(0);
    }
    // The exponent of the largest value is biased by 127, as the scale is. Subnormal values count
    // as 0.
    let scale = (largest >> 23).saturating_sub(to.largest_exponent());
    let factor = power_of_two(127 - scale as i32);
    match to {
        Quant::Int8 => {
            for (code, value) in codes.iter_mut().zip(values) {
                let nearest = (value * factor * 64.0 + TO_INTEGER).to_bits();
                let integer = nearest.wrapping_sub(TO_INTEGER.to_bits()) as i32;
                *code = integer.clamp(-127, 127) as u8;
            }
        }
        Quant::E4m3 => {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = small_code::<3, 7>(value * factor, 0x7e);
            }
        }
        Quant::E5m2 => {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = small_code::<2, 15>(value * factor, 0x7b);
            }
        }
    }
    if !is_finite {
        for (code, value) in codes.iter_mut().zip(values).filter(|(_, value)| !value.is_finite()) {
            let infinite = magnitude(value) == INFINITY_BITS;
            let sign = (value.to_bits() >> 24) as u8 & 0x80;
            *code = sign | if infinite { 0x7c } else { 0x7f };
        }
    }
    // At most 254: the largest exponent of a finite value.
    Ok(scale as u8)
}

/// Decodes a block.
#[inline(always)]
fn decode(codes: &[u8; SCALED_VALUES], scale: u8, from: Quant, values: &mut [f32; SCALED_VALUES]) {
    let factor = match scale {
        NAN_SCALE => f32::NAN,
        scale => power_of_two(i32::from(scale) - 127),
    };
    match from {
        Quant::Int8 => {
            for (value, code) in values.iter_mut().zip(codes) {
                *value = f32::from(*code as i8) * (1.0 / 64.0) * factor;
            }
        }
        Quant::E4m3 => {
            for (value, code) in values.iter_mut().zip(codes) {
                let magnitude = u32::from(code & 0x7f);
                let finite = f32::from_bits(magnitude << 20) * power_of_two(120) * factor;
                let bits = if magnitude == 0x7f { f32::NAN.to_bits() } else { finite.to_bits() };
                *value = f32::from_bits(bits | u32::from(code & 0x80) << 24);
            }
        }
        Quant::E5m2 => {
            for (value, code) in values.iter_mut().zip(codes) {
                let magnitude = u32::from(code & 0x7f);
                let finite = f32::from_bits(magnitude << 21) * power_of_two(112) * factor;
                let is_infinite = magnitude == 0x7c && scale != NAN_SCALE;
                let special = if is_infinite { INFINITY_BITS } else { f32::NAN.to_bits() };
                let bits = if magnitude >= 0x7c { special } else { finite.to_bits() };
                *value = f32::from_bits(bits | u32::from(code & 0x80) << 24);
            }
        }
    }
}

/// Two to a power from -127 to 127.
#[inline(always)]
const fn power_of_two(exponent: i32) -> f32 {
    match exponent {
        -127 => f32::from_bits(1 << 22),
        _ => f32::from_bits(((exponent + 127) as u32) << 23),
    }
}

/// A magnitude as a floating-point number with `M` bits of mantissa and an exponent biased by
/// `BIAS`, rounded to the nearest, ties to even. Beyond the largest number it goes on counting.
#[inline(always)]
fn small<const M: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let shift = 23 - M;
    let half = (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1);
    let normal = (magnitude.wrapping_add(half) >> shift).wrapping_sub((127 - BIAS) << M);
    // Below the smallest normal number codes count multiples of the smallest subnormal one.
    let steps = f32::from_bits(magnitude) * f32::from_bits((127 + BIAS + M - 1) << 23);
    let subnormal = (steps + TO_INTEGER).to_bits().wrapping_sub(TO_INTEGER.to_bits());
    if magnitude < (128 - BIAS) << 23 { subnormal } else { normal }
}

/// The code of a value, at most that of the largest number.
#[inline(always)]
fn small_code<const M: u32, const BIAS: u32>(value: f32, largest: u32) -> u8 {
    let bits = value.to_bits();
    (small::<M, BIAS>(bits & !SIGN_BIT).min(largest) | (bits >> 24 & 0x80)) as u8
}

#[inline(always)]
fn from_f16(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * power_of_two(112)).to_bits();
    let bits = if half & 0x7c00 == 0x7c00 { magnitude | INFINITY_BITS } else { finite };
    f32::from_bits(bits | u32::from(half & 0x8000) << 16)
}

/// The nearest half, and whether a finite value is too large for one.
#[inline(always)]
fn to_f16(bits: u32) -> (u16, bool) {
    let magnitude = bits & !SIGN_BIT;
    let finite = small::<10, 15>(magnitude);
    let special = if magnitude > INFINITY_BITS { 0x7e00 } else { 0x7c00 };
    let is_finite = magnitude < INFINITY_BITS;
    let half = if is_finite { finite } else { special };
    ((half | bits >> 16 & 0x8000) as u16, is_finite & (finite >= 0x7c00))
}

/// Whether a value, given as the bits of a `f32`, is finite and too large for `f16`.
pub(crate) fn exceeds_f16(bits: u32) -> bool {
    to_f16(bits).1
}

#[inline(always)]
fn to_bf16(bits: u32) -> u16 {
    let is_nan = bits & !SIGN_BIT > INFINITY_BITS;
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if is_nan { bits >> 16 | 0x40 } else { nearest }) as u16
}
