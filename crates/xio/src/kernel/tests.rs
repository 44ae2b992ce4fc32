//! Narrowing, scanning and checksums against naive loops, at every length and every offending
//! position.

use std::{vec, vec::Vec};

use super::*;

/// A small generator, so that a failure can be replayed from its seed alone.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16 ^ self.0 << 40
    }
}

fn store(values: &[i128], dtype: Dtype) -> Vec<u8> {
    let bytes = dtype.bytes() as usize;
    values.iter().flat_map(|v| v.to_le_bytes()[..bytes].to_vec()).collect()
}

fn load(buf: &[u8], dtype: Dtype) -> Vec<i128> {
    let extend = |raw: &[u8]| {
        let fill = if dtype.is_signed() && raw[raw.len() - 1] >= 0x80 { 0xff } else { 0 };
        let mut wide = [fill; 16];
        wide[..raw.len()].copy_from_slice(raw);
        i128::from_le_bytes(wide)
    };
    buf.chunks_exact(dtype.bytes() as usize).map(extend).collect()
}

fn naive(values: &[i128], from: Dtype, to: Dtype) -> Result<Vec<u8>, NarrowError> {
    let (low, high) = to.range();
    match values.iter().position(|v| *v < low || *v > high) {
        Some(index) => Err(NarrowError::Overflow { index, value: values[index], to }),
        None if can_narrow(from, to) => Ok(store(values, to)),
        None => Err(NarrowError::Unsupported { from, to }),
    }
}

fn check(values: &[i128], from: Dtype, to: Dtype, replay: &str) {
    let mut buf = store(values, from);
    let behind = buf.clone();
    let got = narrow_in_place(&mut buf, from, to);
    match naive(values, from, to) {
        Ok(expected) => {
            assert_eq!(got, Ok(expected.len()), "{replay}");
            assert_eq!(buf[..expected.len()], expected, "{replay}");
            assert_eq!(buf[expected.len()..], behind[expected.len()..], "{replay}");
        }
        Err(error) => assert_eq!(got, Err(error), "{replay}"),
    }
}

fn pairs() -> impl Iterator<Item = (Dtype, Dtype)> {
    Dtype::ALL.into_iter().flat_map(|from| Dtype::ALL.map(|to| (from, to)))
}

#[test]
fn all_lengths_of_all_pairs() {
    for (from, to) in pairs().filter(|(from, to)| can_narrow(*from, *to)) {
        let high = to.range().1.min(from.range().1);
        for len in (0..=600).chain([1_000, 4_096, 5_001]) {
            let mut rng = Rng(len as u64);
            let mut values: Vec<i128> =
                (0..len).map(|_| i128::from(rng.next()) % (high + 1)).collect();
            if let Some(last) = values.last_mut() {
                *last = high;
            }
            check(&values, from, to, &std::format!("{from}->{to} len {len}"));
        }
    }
}

#[test]
fn an_offender_at_every_position_is_named() {
    for (from, to) in pairs().filter(|(from, to)| can_narrow(*from, *to)) {
        let storable = from.range().0..=from.range().1;
        let offenders = [to.range().1 + 1, from.range().1, from.range().0, -1];
        let offends = |bad: &i128| storable.contains(bad) && naive(&[*bad], from, to).is_err();
        for bad in offenders.into_iter().filter(offends) {
            for at in 0..500 {
                let mut values = vec![7; 500];
                values[at] = bad;
                values[499] = bad;
                check(&values, from, to, &std::format!("{from}->{to} {bad} at {at}"));
            }
        }
    }
}

#[test]
fn random_values_agree_with_the_naive_loop() {
    for seed in 0..2_000 {
        let mut rng = Rng(seed);
        for (from, to) in pairs().filter(|(from, to)| can_narrow(*from, *to)) {
            let len = rng.next() as usize % 700;
            let raw: Vec<u8> = (0..len * from.bytes() as usize)
                .map(|i| match (i % from.bytes() as usize) as u32 {
                    // Mostly in range, so that offending tokens are rare enough to come late.
                    high if high >= to.bytes() => u8::from(rng.next().is_multiple_of(900)),
                    _ => rng.next() as u8 & 0x7f,
                })
                .collect();
            check(&load(&raw, from), from, to, &std::format!("seed {seed} {from}->{to}"));
        }
    }
}

#[test]
fn what_is_not_defined_is_refused_untouched() {
    for (from, to) in pairs().filter(|(from, to)| !can_narrow(*from, *to)) {
        let mut buf = vec![0xa5; 64];
        let error = narrow_in_place(&mut buf, from, to);
        assert_eq!(error, Err(NarrowError::Unsupported { from, to }));
        assert_eq!(buf, vec![0xa5; 64]);
    }
    let ragged = narrow_in_place(&mut [0; 7], Dtype::U32, Dtype::U16);
    assert_eq!(ragged, Err(NarrowError::Ragged { from: Dtype::U32, len: 7 }));
}

#[test]
fn scans_find_the_range() {
    for dtype in Dtype::ALL {
        assert_eq!(scan(&[], dtype), Scan::EMPTY);
        for len in 1..200usize {
            let mut rng = Rng(len as u64);
            let raw: Vec<u8> =
                (0..len * dtype.bytes() as usize).map(|_| rng.next() as u8).collect();
            let values = load(&raw, dtype);
            let range = values.iter().min().copied().zip(values.iter().max().copied());
            assert_eq!(scan(&raw, dtype), Scan { tokens: len, range }, "{dtype} len {len}");
            let (a, b) = raw.split_at(len / 2 * dtype.bytes() as usize);
            assert_eq!(scan(a, dtype).merge(scan(b, dtype)), scan(&raw, dtype));
        }
    }
    let of = |values: &[i128]| scan(&store(values, Dtype::I64), Dtype::I64).narrowest();
    assert_eq!(of(&[0, 65_535]), Some(Dtype::U16));
    assert_eq!(of(&[0, 65_536]), Some(Dtype::U32));
    assert_eq!(of(&[1 << 32]), Some(Dtype::U64));
    assert_eq!(of(&[5, -1]), None);
}

#[test]
fn crc32c_vectors() {
    let ascending: Vec<u8> = (0..32).collect();
    let descending: Vec<u8> = (0..32).rev().collect();
    // RFC 3720, appendix B.4, and the usual check value.
    let vectors: [(&[u8], u32); 6] = [
        (b"", 0),
        (b"123456789", 0xe306_9283),
        (&[0; 32], 0x8a91_36aa),
        (&[0xff; 32], 0x62a8_ab43),
        (&ascending, 0x46dd_794e),
        (&descending, 0x113f_db5c),
    ];
    for (bytes, expected) in vectors {
        assert_eq!(crc32c(0, bytes), expected);
    }
}

#[test]
fn crc32c_agrees_with_bit_by_bit_and_continues() {
    let bitwise = |bytes: &[u8]| {
        !bytes.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
            })
        })
    };
    let mut rng = Rng(3);
    let bytes: Vec<u8> = (0..300).map(|_| rng.next() as u8).collect();
    for len in 0..bytes.len() {
        let whole = crc32c(0, &bytes[..len]);
        assert_eq!(whole, bitwise(&bytes[..len]), "length {len}");
        assert_eq!(crc32c(crc32c(0, &bytes[..len / 3]), &bytes[len / 3..len]), whole);
    }
}

#[test]
fn packed_tokens_come_back_at_every_length_and_width() {
    for dtype in [Dtype::U16, Dtype::U32, Dtype::I32] {
        for bits in pack::PACKED_BITS.filter(|bits| pack::can_pack(dtype, *bits)) {
            for len in [0, 1, 2, 7, 31, 33, 1_023, 1_024, 1_025, 2_048, 4_999] {
                let mut rng = Rng(len as u64 * 100 + u64::from(bits));
                let largest = (1i128 << bits) - 1;
                let mut values: Vec<i128> =
                    (0..len).map(|_| i128::from(rng.next()) & largest).collect();
                if let Some(last) = values.last_mut() {
                    *last = largest;
                }
                let stored = store(&values, dtype);
                let mut buf = stored.clone();
                let bytes = pack_in_place(&mut buf, dtype, bits).unwrap();
                assert_eq!(bytes, pack::packed_bytes(len, bits), "{dtype}, {bits}, {len}");
                assert!(bytes <= (len * bits as usize).div_ceil(8) && bytes <= stored.len());
                let packed = buf[..bytes].to_vec();
                buf.fill(0xee);
                buf[..bytes].copy_from_slice(&packed);
                let back = unpack_in_place(&mut buf, len, bits, dtype);
                assert_eq!(back, Some(stored.len()), "{dtype}, {bits}, {len}");
                assert!(buf == stored, "{dtype}, {bits}, {len}");
            }
        }
    }
}

/// The layout of the page: bit `b` of the token at (row, column) of a chunk.
#[test]
fn packed_chunks_and_rests_are_laid_out_as_documented() {
    let mut rng = Rng(3);
    let values: Vec<i128> = (0..1_024 + 37).map(|_| i128::from(rng.next() & 0x1ffff)).collect();
    let mut buf = store(&values, Dtype::U32);
    let bytes = pack_in_place(&mut buf, Dtype::U32, 17).unwrap();
    let bit = |at: usize| i128::from(buf[at / 8] >> (at % 8) & 1);
    for (index, value) in values.iter().enumerate() {
        let read: i128 = (0..17)
            .map(|b| {
                let at = match index {
                    0..1_024 => {
                        let of_column = index / 32 * 17 + b;
                        (of_column / 32 * 32 + index % 32) * 32 + of_column % 32
                    }
                    _ => 1_024 * 17 + (index - 1_024) * 17 + b,
                };
                bit(at) << b
            })
            .sum();
        assert_eq!(read, *value, "token {index}");
    }
    assert_eq!(bytes, 128 * 17 + (37usize * 17).div_ceil(8));
    let mut buf = store(&[1, 65_535], Dtype::U32);
    assert_eq!(pack_in_place(&mut buf, Dtype::U32, 16), Ok(4));
    assert_eq!(buf[..4], [1, 0, 255, 255]);
}

#[test]
fn a_token_that_cannot_be_packed_is_named() {
    for (dtype, bits) in [(Dtype::U16, 9), (Dtype::U32, 16), (Dtype::U32, 17), (Dtype::I32, 31)] {
        for at in [0, 5, 1_023, 1_024, 2_047, 2_048, 2_100] {
            let (low, high) = dtype.range();
            for value in [high.min(1 << bits), high, low] {
                let mut values = vec![(1i128 << bits) - 1; 2_101];
                values[at] = value;
                let fits = (0..1i128 << bits).contains(&value);
                let mut buf = store(&values, dtype);
                let checked = pack::fit(&buf, dtype, bits);
                let packed = pack_in_place(&mut buf, dtype, bits).map(drop);
                for got in [checked, packed] {
                    match got {
                        Ok(()) => assert!(fits, "{dtype}, {bits}, {at}, {value}"),
                        Err(NarrowError::Overflow { index, value: found, .. }) => {
                            assert_eq!((index, found), (at, value), "{dtype}, {bits}");
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        }
    }
    for (dtype, bits) in [(Dtype::U16, 16), (Dtype::U32, 32), (Dtype::U32, 8), (Dtype::I64, 17)] {
        let refused = pack_in_place(&mut [0; 64], dtype, bits);
        assert!(matches!(refused, Err(NarrowError::Unsupported { .. })), "{dtype}, {bits}");
        assert_eq!(unpack_in_place(&mut [0; 64], 2, bits, dtype), None);
    }
    assert!(matches!(pack_in_place(&mut [0; 63], Dtype::U32, 17), Err(NarrowError::Ragged { .. })));
    assert_eq!(unpack_in_place(&mut [0; 64], 17, 17, Dtype::U32), None);
    assert_eq!(unpack_in_place(&mut [0; 64], usize::MAX, 17, Dtype::U32), None);
}

#[test]
fn tokens_that_do_not_fit_are_replaced_and_counted() {
    for (from, to) in pairs().filter(|(from, to)| can_narrow(*from, *to)) {
        let (low, high) = to.range();
        for len in (0..=300).chain([1_000, 5_001]) {
            let mut rng = Rng(len as u64);
            let any = |_| {
                let (least, most) = from.range();
                let value = match rng.next() % 4 {
                    0 => i128::from(rng.next()) - i128::from(rng.next()),
                    1 => high + 1,
                    _ => i128::from(rng.next()) % (high + 1),
                };
                value.clamp(least, most)
            };
            let values: Vec<i128> = (0..len).map(any).collect();
            let fits = |value: &i128| *value >= low && *value <= high;
            let expected: Vec<i128> =
                values.iter().map(|value| if fits(value) { *value } else { 7 }).collect();
            let replaced = values.iter().filter(|value| !fits(value)).count() as u32;
            let mut buf = store(&values, from);
            let bytes = len * to.bytes() as usize;
            assert_eq!(replace_in_place(&mut buf, from, to, 7), Ok((bytes, replaced)));
            assert_eq!(load(&buf[..bytes], to), expected, "{from} to {to}, {len}");
        }
    }
    let refused = replace_in_place(&mut [0; 8], Dtype::U32, Dtype::U16, 65_536);
    assert!(matches!(refused, Err(NarrowError::Unsupported { .. })));
}
