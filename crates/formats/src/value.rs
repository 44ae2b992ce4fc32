//! Integers of one type as integers of another, checked.
//!
//! Values are little-endian. A value that the other type cannot hold is an error that names its
//! position: nothing wraps (C5).

use xio::dataset::Dtype;

/// The first value that does not fit: its position in the input, and the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    /// Counted from 0.
    pub(crate) index: usize,
    /// The value.
    pub(crate) value: i128,
}

/// Calls `$body` with `$T` as the Rust type of a [`Dtype`].
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            Dtype::U8 => {
                type $T = u8;
                $body
            }
            Dtype::I8 => {
                type $T = i8;
                $body
            }
            // No source has values of floating point; their bits are whole numbers, too.
            Dtype::U16 | Dtype::F16 | Dtype::Bf16 => {
                type $T = u16;
                $body
            }
            Dtype::I16 => {
                type $T = i16;
                $body
            }
            Dtype::U32 | Dtype::F32 => {
                type $T = u32;
                $body
            }
            Dtype::I32 => {
                type $T = i32;
                $body
            }
            Dtype::U64 => {
                type $T = u64;
                $body
            }
            Dtype::I64 => {
                type $T = i64;
                $body
            }
        }
    };
}
pub(crate) use with_type;

/// Appends the values of `input`, whole numbers of type `from`, to `output` as numbers of type
/// `to`.
///
/// # Errors
/// The first value that does not fit. `output` then holds the values before it.
#[allow(
    clippy::unnecessary_fallible_conversions,
    reason = "of the pairs of types, only some can fail"
)]
pub(crate) fn cast(
    input: &[u8],
    from: Dtype,
    to: Dtype,
    output: &mut Vec<u8>,
) -> Result<(), Unfit> {
    if from == to {
        output.extend_from_slice(input);
        return Ok(());
    }
    output.reserve(input.len() / from.bytes() as usize * to.bytes() as usize);
    with_type!(from, From => with_type!(to, To => {
        for (index, bytes) in input.as_chunks::<{ size_of::<From>() }>().0.iter().enumerate() {
            let value = From::from_le_bytes(*bytes);
            match To::try_from(value) {
                Ok(value) => output.extend_from_slice(&value.to_le_bytes()),
                Err(_) => return Err(Unfit { index, value: i128::from(value) }),
            }
        }
        Ok(())
    }))
}

/// The last of the values.
pub(crate) fn last(input: &[u8], dtype: Dtype) -> Option<i128> {
    with_type!(dtype, T => {
        input.as_chunks::<{ size_of::<T>() }>().0.last().map(|bytes| T::from_le_bytes(*bytes).into())
    })
}

/// The value at an index; none beyond the last.
pub(crate) fn at(input: &[u8], dtype: Dtype, index: usize) -> Option<i128> {
    with_type!(dtype, T => {
        input.as_chunks::<{ size_of::<T>() }>().0.get(index).map(|bytes| T::from_le_bytes(*bytes).into())
    })
}

/// Positions at which `value` occurs in `input`.
pub(crate) fn positions(input: &[u8], dtype: Dtype, value: i128) -> Vec<usize> {
    with_type!(dtype, T => {
        let Ok(wanted) = T::try_from(value) else {
            return Vec::new();
        };
        let wanted = wanted.to_le_bytes();
        let values = input.as_chunks::<{ size_of::<T>() }>().0.iter().enumerate();
        values.filter(|(_, bytes)| **bytes == wanted).map(|(index, _)| index).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_types_keeps_values_or_names_them() {
        let interesting = [
            0_i128,
            1,
            -1,
            127,
            128,
            -128,
            255,
            256,
            32_767,
            32_768,
            65_535,
            65_536,
            i128::from(i32::MAX),
            i128::from(i32::MIN),
            i128::from(u32::MAX),
            i128::from(i64::MAX),
            i128::from(i64::MIN),
            i128::from(u64::MAX),
        ];
        let holds = |dtype: Dtype, value| (dtype.range().0..=dtype.range().1).contains(&value);
        for from in Dtype::INTEGERS {
            for to in Dtype::INTEGERS {
                for value in interesting.into_iter().filter(|value| holds(from, *value)) {
                    let bytes = &value.to_le_bytes()[..from.bytes() as usize];
                    let (input, mut output) =
                        ([&[0; 8][..from.bytes() as usize], bytes].concat(), Vec::new());
                    let done = cast(&input, from, to, &mut output);
                    if holds(to, value) {
                        assert_eq!(done, Ok(()));
                        assert_eq!(last(&output, to), Some(value), "{from} to {to}");
                        assert_eq!(positions(&output, to, value).last(), Some(&1));
                    } else {
                        assert_eq!(done, Err(Unfit { index: 1, value }), "{from} to {to}");
                    }
                }
            }
        }
    }
}
