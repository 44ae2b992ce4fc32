//! Quantization by slow and obvious code: every value is compared with every code, in 64 bits.
//!
//! Shares nothing with the kernel. All arithmetic is exact: values, codes and scales
//! are multiples of powers of two that 64-bit floating point holds.

use alloc::vec::Vec;

use crate::dataset::Dtype;
use crate::plan::Quant;
use crate::stage::Limit;

/// Values that share a scale.
const BLOCK: usize = 32;

/// A row as codes, followed by one scale for each block.
///
/// # Errors
/// The place of the first value that has no code, and why.
pub fn quantize(row: &[f64], to: Quant) -> Result<Vec<u8>, (usize, Limit)> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for (block, values) in row.chunks(BLOCK).enumerate() {
        let finite = values.iter().filter(|value| value.is_finite()).map(|value| value.abs());
        let exponent = exponent_of(finite.fold(0.0, f64::max)) - largest_exponent(to);
        let exponent = exponent.max(-127);
        for (index, value) in values.iter().enumerate() {
            let code = code(*value * power_of_two(-exponent), to);
            codes.push(code.ok_or((block * BLOCK + index, Limit::Quantized(to)))?);
        }
        scales.push((exponent + 127) as u8);
    }
    codes.extend(scales);
    Ok(codes)
}

/// The values of a row of so many codes.
pub fn dequantize(quantized: &[u8], from: Quant, row: usize) -> Vec<f64> {
    let (codes, scales) = quantized.split_at(row);
    let values = codes.iter().enumerate().map(|(index, code)| {
        value(*code, from) * power_of_two(i32::from(scales[index / BLOCK]) - 127)
    });
    values.collect()
}

/// The value of the stored bits.
pub fn read(bits: u64, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => float(bits, 8, 23),
        Dtype::F16 => float(bits, 5, 10),
        _ => float(bits, 8, 7),
    }
}

/// The bits of the nearest number of this type.
///
/// # Errors
/// When it is finite and too large.
pub fn write(value: f64, dtype: Dtype) -> Result<u64, Limit> {
    let (width, infinity, nan) = match dtype {
        Dtype::F32 => (32, 0x7f80_0000, 0x7fc0_0000),
        Dtype::F16 => (16, 0x7c00, 0x7e00),
        _ => (16, 0x7f80, 0x7fc0),
    };
    let sign = u64::from(value.is_sign_negative()) << (width - 1);
    if value.is_nan() {
        return Ok(sign | nan);
    }
    if value.is_infinite() {
        return Ok(sign | infinity);
    }
    // Magnitudes grow with their bits: the last one that is not larger, and the next.
    let (mut low, mut high) = (0, infinity);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if read(middle, dtype) <= value.abs() { low = middle } else { high = middle }
    }
    // Beyond the largest number lies what the next power of two would be.
    let above = match high == infinity {
        true => read(low, dtype) * 2.0 - read(low - 1, dtype),
        false => read(high, dtype),
    };
    let (to_low, to_high) = (value.abs() - read(low, dtype), above - value.abs());
    let nearest = if to_low < to_high || (to_low == to_high && low % 2 == 0) { low } else { high };
    if nearest == infinity { Err(Limit::Type(dtype)) } else { Ok(sign | nearest) }
}

/// The code whose value is nearest; of two, the even one. None for what has no code.
fn code(wanted: f64, quant: Quant) -> Option<u8> {
    let sign = if wanted.is_sign_negative() { 0x80 } else { 0 };
    match quant {
        Quant::E5m2 if wanted.is_nan() => return Some(sign | 0x7f),
        Quant::E5m2 if wanted.is_infinite() => return Some(sign | 0x7c),
        Quant::E4m3 if wanted.is_nan() => return Some(sign | 0x7f),
        _ if !wanted.is_finite() => return None,
        _ => {}
    }
    let allowed = |code: &u8| match quant {
        // It has no counterpart above 0.
        Quant::Int8 => *code != 0x80,
        _ => code & 0x80 == sign && value(*code, quant).is_finite(),
    };
    let order = |a: &u8, b: &u8| {
        let distance = |code: &u8| (value(*code, quant) - wanted).abs();
        distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))
    };
    (0..=u8::MAX).filter(allowed).min_by(order)
}

/// The value of a code, before it is scaled.
fn value(code: u8, quant: Quant) -> f64 {
    match quant {
        Quant::Int8 => f64::from(code as i8) / 64.0,
        Quant::E4m3 if code & 0x7f == 0x7f => {
            f64::NAN.copysign(if code < 128 { 1.0 } else { -1.0 })
        }
        // No exponent is reserved, so it is read as if it had a bit more.
        Quant::E4m3 => {
            let sign = if code < 128 { 1.0 } else { -1.0 };
            sign * float((code & 0x7f).into(), 5, 3) * power_of_two(8)
        }
        Quant::E5m2 => float(code.into(), 5, 2),
    }
}

/// The number with these bits, as IEEE 754 has it.
fn float(bits: u64, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    let sign = match bits >> (mantissa_bits + exponent_bits) & 1 {
        0 => 1.0,
        _ => -1.0,
    };
    let bias = (1 << (exponent_bits - 1)) - 1;
    if exponent == (1 << exponent_bits) - 1 {
        return if mantissa == 0 { f64::INFINITY * sign } else { f64::NAN.copysign(sign) };
    }
    let whole = if exponent == 0 { mantissa } else { mantissa + (1 << mantissa_bits) };
    let power = exponent.max(1) as i32 - bias - mantissa_bits as i32;
    sign * whole as f64 * power_of_two(power)
}

/// Exponent of the largest power of two that is not larger; -127 at least.
fn exponent_of(value: f64) -> i32 {
    (-127..=127).rev().find(|exponent| power_of_two(*exponent) <= value).unwrap_or(-127)
}

/// Exponent of the largest power of two among the codes.
fn largest_exponent(quant: Quant) -> i32 {
    let values = (0..=u8::MAX).map(|code| value(code, quant));
    match quant {
        // -2 is not used.
        Quant::Int8 => 0,
        _ => exponent_of(values.filter(|value| value.is_finite()).fold(0.0, f64::max)),
    }
}

fn power_of_two(exponent: i32) -> f64 {
    let factor = if exponent < 0 { 0.5 } else { 2.0 };
    (0..exponent.abs()).fold(1.0, |power, _| power * factor)
}
