//! Quantization by slow and obvious code: every value is compared with every code, in 64 bits.
//!
//! Shares nothing with [`kernel::quantize`](crate::kernel::quantize). All arithmetic is exact: values, codes and scales
//! are multiples of powers of two that 64-bit floating point holds.

use alloc::vec::Vec;

use crate::dataset::Dtype;
use crate::kernel::Quant;
use crate::stage::Limit;

/// Values that share a scale.
const BLOCK: usize = 32;

/// A row as codes, followed by one scale for each block.
///
/// # Errors
/// The place of the first value that has no code, and why.
pub(super) fn quantize(row: &[f64], to: Quant) -> Result<Vec<u8>, (usize, Limit)> {
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
pub(super) fn dequantize(quantized: &[u8], from: Quant, row: usize) -> Vec<f64> {
    let (codes, scales) = quantized.split_at(row);
    let values = codes.iter().enumerate().map(|(index, code)| {
        value(*code, from) * power_of_two(i32::from(scales[index / BLOCK]) - 127)
    });
    values.collect()
}

/// The value of the stored bits.
pub(super) fn read(bits: u64, dtype: Dtype) -> f64 {
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
pub(super) fn write(value: f64, dtype: Dtype) -> Result<u64, Limit> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    use super::*;
    use crate::kernel::QuantizeError;
    use crate::kernel::quantize::{dequantize_into, quantize_in_place, quantized_bytes};

    /// The kernel's codes and scales, or the place and bits of a value without a code.
    fn fast(stored: &[u8], from: Dtype, to: Quant, row: usize) -> Result<Vec<u8>, (usize, u32)> {
        let mut buf = stored.to_vec();
        let made = quantize_in_place(&mut buf, from, to, row).map_err(|error| match error {
            QuantizeError::Value { index, bits } => (index, bits),
            QuantizeError::Unsupported => panic!("it is defined"),
        })?;
        assert_eq!(made, stored.len() / (row * from.bytes() as usize) * quantized_bytes(row));
        buf.truncate(made);
        Ok(buf)
    }

    fn compare(bits: &[u64], from: Dtype, to: Quant, row: usize) {
        let width = from.bytes() as usize;
        let stored: Vec<u8> =
            bits.iter().flat_map(|bits| bits.to_le_bytes()[..width].to_vec()).collect();
        let values: Vec<f64> = bits.iter().map(|bits| read(*bits, from)).collect();
        let slow: Result<Vec<_>, _> = (0..)
            .zip(values.chunks(row))
            .map(|(index, values)| {
                let refused = |(at, _)| (index * row + at, (values[at] as f32).to_bits());
                quantize(values, to).map_err(refused)
            })
            .collect();
        let slow = slow.map(|rows| rows.concat());
        let codes = fast(&stored, from, to, row);
        // A NaN has many forms.
        let place = |error: &(usize, u32)| (error.0, f32::from_bits(error.1).is_nan());
        assert_eq!(
            codes.as_ref().map_err(place),
            slow.as_ref().map_err(place),
            "{from}, {to}, {row}"
        );
        let Ok(codes) = codes else { return };
        for delivered in Dtype::FLOATS {
            let width = delivered.bytes() as usize;
            let mut target = vec![0xee; bits.len() * width];
            let made = dequantize_into(&codes, to, row, delivered, &mut target);
            let values =
                codes.chunks(quantized_bytes(row)).flat_map(|codes| dequantize(codes, to, row));
            let written: Result<Vec<_>, _> = (0..)
                .zip(values)
                .map(|(index, value)| write(value, delivered).map_err(|_| index))
                .collect();
            match (made, written) {
                (Ok(made), Ok(written)) => {
                    assert_eq!(made, target.len());
                    let want: Vec<u8> = written
                        .iter()
                        .flat_map(|bits| bits.to_le_bytes()[..width].to_vec())
                        .collect();
                    assert!(target == want, "{from}, {to}, {row}, {delivered}");
                }
                (Err(QuantizeError::Value { index, .. }), Err(place)) => assert_eq!(index, place),
                (made, written) => panic!("{made:?}, {written:?}"),
            }
        }
    }

    #[test]
    fn every_exponent_is_rounded_as_defined() {
        // Alone, and beside a value a little larger: each half is at, next to, and between two codes.
        for to in Quant::ALL {
            for from in [Dtype::F16, Dtype::Bf16] {
                let all: Vec<u64> = (0..0x1_0000).step_by(13).collect();
                let finite = |bits: &&u64| read(**bits, from).is_finite();
                let some: Vec<u64> = all.iter().filter(finite).copied().collect();
                compare(&some, from, to, 1);
                let beside: Vec<u64> =
                    some.iter().flat_map(|bits| [*bits, *bits ^ 0x8040]).collect();
                let beside: Vec<u64> = beside
                    .chunks(2)
                    .filter(|two| two.iter().all(|bits| finite(&bits)))
                    .flatten()
                    .copied()
                    .collect();
                compare(&beside, from, to, 2);
            }
            // Ends of the steps of a block whose scale is given by its first value, upwards and downwards.
            for exponent in [1_u64, 2, 20, 100, 127, 140, 200, 254] {
                let base = exponent << 23;
                let steps = (0..0x100_0000_u64).step_by(0x10_0000 / 3);
                let near = steps.flat_map(|step| {
                    [0, 1, u64::from(u32::MAX)]
                        .map(|one| base.wrapping_sub(step).wrapping_add(one) & 0x7fff_ffff)
                });
                let near: Vec<u64> =
                    near.filter(|bits| *bits < base + (1 << 23) && *bits >> 23 < 255).collect();
                for values in near.chunks(31) {
                    let mut row = vec![base | 0x7f_ffff];
                    row.extend_from_slice(values);
                    compare(&row, Dtype::F32, to, row.len());
                    row.iter_mut().for_each(|bits| *bits |= 1 << 31);
                    compare(&row, Dtype::F32, to, row.len());
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_passes_where_there_is_a_code_for_it() {
        let one = u64::from(1.0_f32.to_bits());
        let (infinity, nan) = (0x7f80_0000_u64, 0x7fc0_0001_u64);
        let row = |special: u64| vec![one, special, one | 1 << 31, 0, 1 << 31, 3];
        for to in Quant::ALL {
            for special in [infinity, infinity | 1 << 31, nan, nan | 1 << 31, 0x7f80_0001] {
                compare(&row(special), Dtype::F32, to, 6);
                compare(&row(special), Dtype::F32, to, 3);
                compare(&[special, special], Dtype::F32, to, 2);
            }
        }
        let codes = |to, special| {
            fast(
                &row(special)
                    .iter()
                    .flat_map(|bits| bits.to_le_bytes()[..4].to_vec())
                    .collect::<Vec<u8>>(),
                Dtype::F32,
                to,
                6,
            )
        };
        assert_eq!(codes(Quant::Int8, infinity), Err((1, 0x7f80_0000)));
        assert_eq!(codes(Quant::Int8, nan), Err((1, 0x7fc0_0001)));
        assert_eq!(codes(Quant::E4m3, infinity), Err((1, 0x7f80_0000)));
        assert_eq!(codes(Quant::E4m3, nan), Ok(vec![0x78, 0x7f, 0xf8, 0, 0x80, 0, 119]));
        assert_eq!(codes(Quant::E5m2, infinity), Ok(vec![0x78, 0x7c, 0xf8, 0, 0x80, 0, 112]));
        assert_eq!(codes(Quant::Int8, one), Ok(vec![64, 64, 0xc0, 0, 0, 0, 127]));
    }

    #[test]
    fn rows_that_are_not_whole_are_refused() {
        let quantize = |bytes: usize, row| {
            quantize_in_place(&mut vec![0; bytes], Dtype::F32, Quant::Int8, row)
        };
        for (bytes, row) in [(4, 0), (4, 2), (7, 1), (4, 1 << 20)] {
            assert_eq!(quantize(bytes, row), Err(QuantizeError::Unsupported), "{bytes}, {row}");
        }
        assert_eq!(
            quantize_in_place(&mut [0; 4], Dtype::U32, Quant::Int8, 1),
            Err(QuantizeError::Unsupported)
        );
        assert_eq!(quantize(0, 1), Ok(0));
        let dequantize = |bytes: usize, row, to, room: usize| {
            dequantize_into(&vec![0; bytes], Quant::Int8, row, to, &mut vec![0; room])
        };
        assert_eq!(dequantize(2, 1, Dtype::F32, 3), Err(QuantizeError::Unsupported));
        assert_eq!(dequantize(3, 1, Dtype::F32, 9), Err(QuantizeError::Unsupported));
        assert_eq!(dequantize(2, 1, Dtype::U32, 4), Err(QuantizeError::Unsupported));
        assert_eq!(dequantize(4, 1, Dtype::F16, 9), Ok(4));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn the_kernel_agrees_with_slow_code(
            from in prop::sample::select(Dtype::FLOATS.to_vec()),
            to in prop::sample::select(Quant::ALL.to_vec()),
            row in 1..100usize,
            rows in 1..4usize,
            spread in 1..255u64,
            seed in any::<u64>(),
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                state >> 32
            };
            // Exponents at most so far apart, from anywhere.
            let lowest = next() % 256;
            let (exponents, mantissa) = match from { Dtype::F32 => (256, 23), Dtype::F16 => (32, 10), _ => (256, 7) };
            let bits: Vec<u64> = (0..row * rows).map(|_| {
                let exponent = (lowest + next() % spread) % exponents;
                let width = 8 * from.bytes();
                (next() & ((1 << mantissa) - 1)) | exponent << mantissa | (next() & 1) << (width - 1)
            }).collect();
            compare(&bits, from, to, row);
        }
    }
}
