//! Round trips, one meaning for each capsule, and the layout on the wire.

use std::{vec, vec::Vec};

use sim::chance::Chance;

use super::*;
use crate::kernel::{Codec, Trap, crc32c};

struct Draw(Chance);

impl Draw {
    fn new(seed: u64) -> Draw {
        Draw(Chance::new(seed))
    }

    fn word(&mut self) -> u64 {
        self.0.word()
    }

    /// Small, large, or anything between.
    fn number(&mut self) -> u64 {
        match self.word() % 8 {
            0 => 0,
            1 => u64::MAX,
            shift => self.word() >> (shift * 8),
        }
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.word() % from.len() as u64) as usize]
    }

    fn request(&mut self) -> ReadRequest {
        ReadRequest {
            seq: self.number(),
            tag: self.number() as u32,
            source: self.number() as u32,
            first_token: self.number(),
            tokens: self.number() as u32,
            deliver: self.pick(&Dtype::ALL),
            remote_addr: self.number(),
            rkey: self.number() as u32,
        }
    }

    fn response(&mut self) -> ReadResponse {
        let outcome = match self.word() % 9 {
            0 => Outcome::Done {
                bytes: self.number() as u32,
                crc32c: self.number() as u32,
                source_bytes: self.number() as u32,
                bits: self.number() as u8,
                codec: self.pick(&[None, Some(Codec::Lz4), Some(Codec::Zstd)]),
                replaced: self.number() as u32,
            },
            1 => Outcome::Overflow {
                token: self.number(),
                value: (i128::from(self.number()) << 64 | i128::from(self.number()))
                    >> (self.word() % 65),
                stage: self.number() as u8,
            },
            2 => Outcome::Truncated { at_byte: self.number() },
            3 => Outcome::Storage { errno: self.number() as i32 },
            4 => Outcome::Changed(Change::Block { at_byte: self.number() }),
            5 => Outcome::Changed(Change::Written { len: self.number() }),
            6 => Outcome::Changed(Change::Removed),
            7 => {
                let code = self.number() as i32;
                let fault = self.pick(&[
                    MapFault::Trap(Trap::Unreachable),
                    MapFault::Trap(Trap::Other),
                    MapFault::Time,
                    MapFault::Memory,
                    MapFault::Code(code),
                    MapFault::Buffer,
                    MapFault::NotByItself,
                ]);
                Outcome::Action { token: self.number(), fault }
            }
            _ => Outcome::Refused(self.pick(&Refusal::ALL)),
        };
        let (seq, tag) = (self.number(), self.number() as u32);
        ReadResponse { seq, tag, outcome }
    }
}

/// A right magic, version and checksum around bytes that may be invalid.
fn sealed(mut bytes: [u8; CAPSULE_BYTES]) -> [u8; CAPSULE_BYTES] {
    let head = Layout::new(bytes[5]).0;
    bytes[..5].copy_from_slice(&head[..5]);
    Layout(bytes).seal(crc32c)
}

#[test]
fn requests_and_answers_come_back_as_they_were() {
    for seed in 0..20_000 {
        let mut draw = Draw::new(seed);
        let (request, response) = (draw.request(), draw.response());
        let bytes = request.encode(crc32c);
        assert_eq!(ReadRequest::decode(&bytes, crc32c), Ok(request), "seed {seed}");
        let wrong = ReadResponse::decode(&bytes, crc32c);
        assert_eq!(wrong, Err(CapsuleError::Field("kind")), "seed {seed}");
        let bytes = response.encode(crc32c);
        assert_eq!(ReadResponse::decode(&bytes, crc32c), Ok(response), "seed {seed}");
        let wrong = ReadRequest::decode(&bytes, crc32c);
        assert_eq!(wrong, Err(CapsuleError::Field("kind")), "seed {seed}");
    }
}

#[test]
fn every_field_stands_alone() {
    let plain = Draw::new(1).request();
    let change: [fn(&mut ReadRequest); 8] = [
        |r| r.seq ^= 1 << 63,
        |r| r.tag ^= 1 << 31,
        |r| r.source ^= 1 << 31,
        |r| r.first_token ^= 1 << 63,
        |r| r.tokens ^= 1 << 31,
        |r| r.rkey ^= 1 << 31,
        |r| r.remote_addr ^= 1 << 63,
        |r| {
            r.deliver = match r.deliver {
                Dtype::U16 => Dtype::U32,
                _ => Dtype::U16,
            }
        },
    ];
    let encoded: Vec<[u8; CAPSULE_BYTES]> = change
        .iter()
        .map(|change| {
            let mut changed = plain;
            change(&mut changed);
            assert_ne!(changed, plain);
            changed.encode(crc32c)
        })
        .collect();
    for (index, bytes) in encoded.iter().enumerate() {
        assert!(!encoded[..index].contains(bytes), "field {index} shares its bytes");
    }
}

#[test]
fn every_flipped_bit_is_noticed() {
    let mut draw = Draw::new(2);
    let (request, response) = (draw.request(), draw.response());
    for bit in 0..CAPSULE_BYTES * 8 {
        let flip = |mut bytes: [u8; CAPSULE_BYTES]| {
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        };
        assert!(ReadRequest::decode(&flip(request.encode(crc32c)), crc32c).is_err());
        assert!(ReadResponse::decode(&flip(response.encode(crc32c)), crc32c).is_err());
    }
}

#[test]
fn the_first_thing_wrong_is_named() {
    let good = Draw::new(3).request().encode(crc32c);
    let decode = |bytes: &[u8]| ReadRequest::decode(bytes, crc32c);
    for len in [0, 1, 63, 65, 128] {
        let bytes: Vec<u8> = good.iter().copied().cycle().take(len).collect();
        assert_eq!(decode(&bytes), Err(CapsuleError::Length(len)));
    }
    let mut bytes = good;
    bytes[0] ^= 1;
    assert!(matches!(decode(&bytes), Err(CapsuleError::Magic(_))));
    let mut bytes = good;
    bytes[4] = 1;
    assert_eq!(decode(&bytes), Err(CapsuleError::Version(1)));
    let mut bytes = good;
    bytes[40] ^= 1;
    let expected = crc32c(0, &bytes[..CRC_AT]);
    let found = crc32c(0, &good[..CRC_AT]);
    assert_eq!(decode(&bytes), Err(CapsuleError::Crc { found, expected }));
}

/// Bytes that decode encode to the same bytes: unused ones are zero, so that a later version may
/// use them.
#[test]
fn a_capsule_has_one_encoding() {
    let (mut requests, mut responses) = (0, 0);
    for seed in 0..20_000 {
        let mut draw = Draw::new(seed);
        let mut bytes = match seed % 2 {
            0 => draw.request().encode(crc32c),
            _ => draw.response().encode(crc32c),
        };
        for _ in 0..draw.word() % 3 {
            bytes[(draw.word() % 64) as usize] = draw.word() as u8;
        }
        let bytes = sealed(bytes);
        if let Ok(request) = ReadRequest::decode(&bytes, crc32c) {
            assert_eq!(request.encode(crc32c), bytes, "seed {seed}");
            requests += 1;
        }
        if let Ok(response) = ReadResponse::decode(&bytes, crc32c) {
            assert_eq!(response.encode(crc32c), bytes, "seed {seed}");
            responses += 1;
        }
    }
    assert!(requests > 1_000 && responses > 1_000, "{requests} {responses}");
}

#[test]
fn values_without_meaning_are_refused_by_field() {
    let request = Draw::new(4).request().encode(crc32c);
    let response = |outcome| ReadResponse { seq: 1, tag: 2, outcome }.encode(crc32c);
    let refused = response(Outcome::Refused(Refusal::NoCredit));
    let (bits, codec, replaced) = (17, Some(Codec::Zstd), 4);
    let done = Outcome::Done { bytes: 1, crc32c: 2, source_bytes: 3, bits, codec, replaced };
    let done = response(done);
    assert_eq!((done[48], done[49], done[52]), (17, 2, 4));
    let storage = response(Outcome::Storage { errno: -5 });
    let with = |mut bytes: [u8; CAPSULE_BYTES], at: usize, value: u8| {
        bytes[at] = value;
        sealed(bytes)
    };
    let request_error = |at, value| ReadRequest::decode(&with(request, at, value), crc32c);
    let response_error = |bytes, at, value| ReadResponse::decode(&with(bytes, at, value), crc32c);
    assert_eq!(request_error(6, 11), Err(CapsuleError::Field("deliver")));
    assert_eq!(request_error(7, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(request_error(48, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(request_error(59, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(response_error(refused, 6, 9), Err(CapsuleError::Field("status")));
    assert_eq!(response_error(refused, 6, 8), Err(CapsuleError::Field("fault")));
    let trapped = MapFault::Trap(Trap::Other);
    let trapped = response(Outcome::Action { token: 1, fault: trapped });
    assert_eq!(response_error(trapped, 32, 9), Err(CapsuleError::Field("fault")));
    assert_eq!(response_error(trapped, 36, 1), Err(CapsuleError::Field("outcome")));
    assert_eq!(response_error(refused, 24, 0), Err(CapsuleError::Field("refusal")));
    assert_eq!(response_error(refused, 24, 8), Err(CapsuleError::Field("refusal")));
    assert_eq!(response_error(refused, 20, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(response_error(refused, 32, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(response_error(done, 28, 1), Err(CapsuleError::Field("outcome")));
    assert_eq!(response_error(done, 36, 1), Err(CapsuleError::Field("outcome")));
    assert_eq!(response_error(done, 49, 3), Err(CapsuleError::Field("codec")));
    assert_eq!(response_error(done, 50, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(response_error(done, 56, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(response_error(storage, 48, 1), Err(CapsuleError::Field("reserved")));
    assert_eq!(response_error(storage, 28, 1), Err(CapsuleError::Field("outcome")));
}

/// Layouts are frozen: a peer of another build reads the same bytes.
#[test]
fn the_layout_is_frozen() {
    let request = ReadRequest {
        seq: 0x0102_0304_0506_0708,
        tag: 0x1112_1314,
        source: 0x2122_2324,
        first_token: 0x3132_3334_3536_3738,
        tokens: 0x4142_4344,
        deliver: Dtype::U16,
        remote_addr: 0x5152_5354_5556_5758,
        rkey: 0x6162_6364,
    };
    let mut expected = Vec::new();
    expected.extend(b"DQcp\x02\x01\x02\x00");
    expected.extend([8, 7, 6, 5, 4, 3, 2, 1]);
    expected.extend([0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21]);
    expected.extend([0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31]);
    expected.extend([0x44, 0x43, 0x42, 0x41, 0x64, 0x63, 0x62, 0x61]);
    expected.extend([0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51]);
    expected.extend([0; 12]);
    let bytes = request.encode(crc32c);
    assert_eq!(bytes[..CRC_AT], expected);
    assert_eq!(bytes[CRC_AT..], crc32c(0, &expected).to_le_bytes());

    let codes: Vec<u8> = Dtype::ALL.into_iter().map(dtype_code).collect();
    assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(Dtype::ALL[2..5], [Dtype::U16, Dtype::I16, Dtype::U32]);
    assert_eq!(Dtype::ALL[8..], Dtype::FLOATS);
    let codecs: Vec<u8> = Codec::ALL.into_iter().map(|codec| codec_code(Some(codec))).collect();
    assert_eq!((codecs, codec_code(None)), (vec![1, 2], 0));
    assert_eq!(Codec::ALL, [Codec::Lz4, Codec::Zstd]);
    let reasons: Vec<u16> = Refusal::ALL.into_iter().map(|reason| reason as u16).collect();
    assert_eq!(reasons, [1, 2, 3, 4, 5, 6, 7]);
}
