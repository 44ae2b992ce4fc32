//! Element types of token files, and their names in the formats.
//!
//! A file may hold any of the integer types in [`Dtype`]; only some of them are delivered as tokens
//! ([`Dtype::is_token`]). Floating-point files hold no tokens: their values are delivered as they
//! are, or quantized. Big-endian files are refused by name, never converted: a silent byte swap
//! would change token ids (C5).

use core::fmt;

use alloc::string::{String, ToString};

use super::DatasetError;

/// A little-endian element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// Floating point, 32 bits.
    F32,
    /// Floating point, 16 bits, 5 of them exponent.
    F16,
    /// Floating point, 16 bits, 8 of them exponent.
    Bf16,
}

impl Dtype {
    /// Every integer type, narrow ones first.
    pub const INTEGERS: [Dtype; 8] = [
        Dtype::U8,
        Dtype::I8,
        Dtype::U16,
        Dtype::I16,
        Dtype::U32,
        Dtype::I32,
        Dtype::U64,
        Dtype::I64,
    ];

    /// Every floating-point type.
    pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Every type: the integers, then the others.
    pub const ALL: [Dtype; 11] = [
        Dtype::U8,
        Dtype::I8,
        Dtype::U16,
        Dtype::I16,
        Dtype::U32,
        Dtype::I32,
        Dtype::U64,
        Dtype::I64,
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
    ];

    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 => 8,
        }
    }

    /// Whether values below zero can be stored.
    pub const fn is_signed(self) -> bool {
        matches!(self, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64)
    }

    /// Whether files of this type are delivered as tokens: `u16`, `u32`, `i32`, `u64`, `i64`.
    pub const fn is_token(self) -> bool {
        matches!(self, Dtype::U16 | Dtype::U32 | Dtype::I32 | Dtype::U64 | Dtype::I64)
    }

    /// Whether it is floating point.
    pub const fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
    }

    /// Whether blocks of files of this type are streamed: tokens, floating point, and bytes where
    /// they are asked for.
    pub const fn is_streamed(self) -> bool {
        self.is_token() || self.is_float() || matches!(self, Dtype::U8)
    }

    /// Smallest and largest value; of floating point, of the bits as an unsigned integer.
    pub const fn range(self) -> (i128, i128) {
        let bits = self.bytes() * 8;
        match self.is_signed() {
            true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
            false => (0, (1i128 << bits) - 1),
        }
    }

    /// The name used in plans, reports and on the command line, such as `u16`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "u8",
            Dtype::I8 => "i8",
            Dtype::U16 => "u16",
            Dtype::I16 => "i16",
            Dtype::U32 => "u32",
            Dtype::I32 => "i32",
            Dtype::U64 => "u64",
            Dtype::I64 => "i64",
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }

    /// The type with this name: `u16`, or as NumPy spells it, `uint16`.
    pub fn from_name(name: &str) -> Option<Dtype> {
        match name {
            "f32" | "float32" => return Some(Dtype::F32),
            "f16" | "float16" => return Some(Dtype::F16),
            "bf16" | "bfloat16" => return Some(Dtype::Bf16),
            _ => {}
        }
        let digits = |long: &str, short: char| {
            name.strip_prefix(long).map(|bits| (short, bits)).or_else(|| {
                let bits = name.strip_prefix(short)?;
                Some((short, bits))
            })
        };
        let (sign, bits) = digits("uint", 'u').or_else(|| digits("int", 'i'))?;
        Dtype::INTEGERS.into_iter().find(|dtype| {
            dtype.is_signed() == (sign == 'i') && (dtype.bytes() * 8).to_string() == bits
        })
    }

    /// The integer type with this name.
    pub fn integer_from_name(name: &str) -> Option<Dtype> {
        Dtype::from_name(name).filter(|dtype| !dtype.is_float())
    }

    /// The floating-point type of a NumPy `descr`; NumPy has none for `bf16`.
    pub fn float_from_npy(descr: &str) -> Option<Dtype> {
        match descr {
            "<f4" => Some(Dtype::F32),
            "<f2" => Some(Dtype::F16),
            _ => None,
        }
    }

    /// The integer type of a NumPy `descr` such as `<u2`.
    pub fn from_npy(descr: &str) -> Result<Dtype, DatasetError> {
        let mut chars = descr.chars();
        let (order, kind, size) = (chars.next(), chars.next(), chars.as_str());
        let signed = match kind {
            Some('u') => false,
            Some('i') => true,
            Some(kind) => {
                return Err(DatasetError::NotInteger { descr: descr.into(), kind });
            }
            None => return Err(unknown(descr)),
        };
        let dtype = Dtype::INTEGERS
            .into_iter()
            .find(|d| d.is_signed() == signed && d.bytes().to_string() == size)
            .ok_or_else(|| unknown(descr))?;
        match order {
            Some('<') => Ok(dtype),
            Some('|') if dtype.bytes() == 1 => Ok(dtype),
            Some('>') => Err(DatasetError::BigEndian { descr: descr.into() }),
            _ => Err(unknown(descr)),
        }
    }

    /// The type of a Megatron `.idx` dtype code (1 to 8; 6 and 7 are floating point).
    pub fn from_megatron(code: u8) -> Result<Dtype, DatasetError> {
        match code {
            1 => Ok(Dtype::U8),
            2 => Ok(Dtype::I8),
            3 => Ok(Dtype::I16),
            4 => Ok(Dtype::I32),
            5 => Ok(Dtype::I64),
            6 => Err(DatasetError::NotInteger { descr: "float64 (code 6)".into(), kind: 'f' }),
            7 => Err(DatasetError::NotInteger { descr: "float32 (code 7)".into(), kind: 'f' }),
            8 => Ok(Dtype::U16),
            _ => Err(DatasetError::DtypeCode { code }),
        }
    }

    /// The type as NumPy writes it in a header, such as `<u2`; `bf16` as two bytes of no type.
    pub const fn npy(self) -> &'static str {
        match self {
            Dtype::U8 => "|u1",
            Dtype::I8 => "|i1",
            Dtype::U16 => "<u2",
            Dtype::I16 => "<i2",
            Dtype::U32 => "<u4",
            Dtype::I32 => "<i4",
            Dtype::U64 => "<u8",
            Dtype::I64 => "<i8",
            Dtype::F32 => "<f4",
            Dtype::F16 => "<f2",
            Dtype::Bf16 => "<V2",
        }
    }

    /// The code of a Megatron `.idx`, which has none for `u32`, `u64` and what is no integer.
    pub const fn megatron(self) -> Option<u8> {
        match self {
            Dtype::U8 => Some(1),
            Dtype::I8 => Some(2),
            Dtype::I16 => Some(3),
            Dtype::I32 => Some(4),
            Dtype::I64 => Some(5),
            Dtype::U16 => Some(8),
            Dtype::U32 | Dtype::U64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16 => None,
        }
    }

    /// This type if it can be delivered as tokens, an error otherwise.
    pub fn token(self) -> Result<Dtype, DatasetError> {
        match self.is_token() {
            true => Ok(self),
            false => Err(DatasetError::NotTokens { dtype: self }),
        }
    }
}

fn unknown(descr: &str) -> DatasetError {
    DatasetError::DtypeName { name: String::from(descr) }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn names_read_back() {
        for dtype in Dtype::FLOATS {
            let long = dtype.name().replace('f', "float");
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(Dtype::from_name(&long), Some(dtype));
            assert_eq!(Dtype::float_from_npy(dtype.npy()).is_some(), dtype != Dtype::Bf16);
        }
        for dtype in Dtype::INTEGERS {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            let long =
                dtype.name().replace('u', "uint").replace('i', "int").replace("uintnt", "uint");
            assert_eq!(Dtype::from_name(&long), Some(dtype), "{long}");
            let kind = if dtype.is_signed() { 'i' } else { 'u' };
            let order = if dtype.bytes() == 1 { '|' } else { '<' };
            let descr = format!("{order}{kind}{}", dtype.bytes());
            assert_eq!(Dtype::from_npy(&descr), Ok(dtype));
            assert_eq!(dtype.npy(), descr);
            if let Some(code) = dtype.megatron() {
                assert_eq!(Dtype::from_megatron(code), Ok(dtype));
            }
        }
        for bad in ["", "u", "int", "f64", "u24", "uint016", "U16", "u16 "] {
            assert_eq!(Dtype::from_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_not_a_little_endian_integer_is_refused_by_name() {
        for (descr, kind) in [
            (">u4", "big-endian"),
            ("<f4", "not-integer"),
            ("|b1", "not-integer"),
            ("<c8", "not-integer"),
            ("|O", "not-integer"),
            ("<u3", "dtype-name"),
            ("=u4", "dtype-name"),
            ("|u4", "dtype-name"),
            ("<", "dtype-name"),
            ("", "dtype-name"),
            ("<u", "dtype-name"),
            ("<u4x", "dtype-name"),
        ] {
            assert_eq!(Dtype::from_npy(descr).unwrap_err().reason(), kind, "{descr}");
        }
    }

    #[test]
    fn megatron_codes_cover_one_to_eight() {
        for code in 0..=u8::MAX {
            match Dtype::from_megatron(code) {
                Ok(_) => assert!(matches!(code, 1..=5 | 8)),
                Err(DatasetError::NotInteger { .. }) => assert!(matches!(code, 6 | 7)),
                Err(_) => assert!(code == 0 || code > 8),
            }
        }
    }

    #[test]
    fn ranges_are_those_of_the_types() {
        assert_eq!(Dtype::U16.range(), (0, 65_535));
        assert_eq!(Dtype::I64.range(), (i64::MIN.into(), i64::MAX.into()));
        assert_eq!(Dtype::U64.range(), (0, u64::MAX.into()));
    }
}
