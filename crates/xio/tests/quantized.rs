//! The kernel of quantization against slow code that compares every value with every code.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use xio::dataset::Dtype;
use xio::kernel::quantize::{dequantize_into, quantize_in_place, quantized_bytes};
use xio::kernel::{Quant, QuantizeError};
use xio::reference::quantized::{dequantize, quantize, read, write};

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
    assert_eq!(codes.as_ref().map_err(place), slow.as_ref().map_err(place), "{from}, {to}, {row}");
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
                let want: Vec<u8> =
                    written.iter().flat_map(|bits| bits.to_le_bytes()[..width].to_vec()).collect();
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
            let beside: Vec<u64> = some.iter().flat_map(|bits| [*bits, *bits ^ 0x8040]).collect();
            let beside: Vec<u64> = beside
                .chunks(2)
                .filter(|two| two.iter().all(|bits| finite(&bits)))
                .flatten()
                .copied()
                .collect();
            compare(&beside, from, to, 2);
        }
        // Ends of the steps of a block whose scale is given by its first value, upwards and
        // downwards.
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
    let quantize =
        |bytes: usize, row| quantize_in_place(&mut vec![0; bytes], Dtype::F32, Quant::Int8, row);
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
