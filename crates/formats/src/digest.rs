//! A checksum of a sequence of integers that does not depend on their type.
//!
//! The digest of values `v1 … vn` is the polynomial `v1·R^(n-1) + … + vn` modulo the prime
//! `2^61 - 1`, for a fixed `R`. A file of `u16` and the same ids as `i64` have the same digest. It
//! detects accidents, not attackers.

use serde::{Deserialize, Serialize};
use xio::dataset::Dtype;

use crate::value::with_type;

const PRIME: u64 = (1 << 61) - 1;

/// Drawn at random, once.
const BASE: u64 = 0x0b5c_3a9d_71e6_4f83;

/// `BASE` to the powers 1 to 4.
const POWERS: [u64; 4] = {
    let square = multiply(BASE, BASE);
    [BASE, square, multiply(square, BASE), multiply(square, square)]
};

const fn reduce(value: u128) -> u64 {
    let folded = (value & PRIME as u128) + (value >> 61);
    let folded = (folded & PRIME as u128) as u64 + (folded >> 61) as u64;
    if folded >= PRIME { folded - PRIME } else { folded }
}

const fn multiply(a: u64, b: u64) -> u64 {
    reduce(a as u128 * b as u128)
}

/// The digest of a sequence, and its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest {
    /// Number of values.
    pub(crate) count: u64,
    hash: u64,
}

impl Digest {
    /// Appends one value.
    pub(crate) fn push(&mut self, value: u64) {
        self.count += 1;
        self.hash = reduce(self.hash as u128 * BASE as u128 + u128::from(value));
    }

    /// Appends numbers of this type; bytes after the last whole one are ignored.
    pub(crate) fn extend(&mut self, values: &[u8], dtype: Dtype) {
        with_type!(dtype, T => {
            let values = values.as_chunks::<{ size_of::<T>() }>().0;
            let residue = |bytes: &[u8; size_of::<T>()]| {
                let value = i128::from(T::from_le_bytes(*bytes));
                // At most 64 bits, and eight primes exceed the lowest of them.
                if value < 0 { reduce((value + 8 * i128::from(PRIME)) as u128) } else { value as u64 }
            };
            let (fours, rest) = values.as_chunks::<4>();
            for [a, b, c, d] in fours {
                let term = |value: u64, power: usize| u128::from(value) * u128::from(POWERS[power]);
                // Four products below 2^125 and one value: no overflow.
                let sum = term(self.hash, 3) + term(residue(a), 2) + term(residue(b), 1)
                    + term(residue(c), 0) + u128::from(residue(d));
                self.hash = reduce(sum);
            }
            self.count += 4 * fours.len() as u64;
            rest.iter().for_each(|value| self.push(residue(value)));
        });
    }

    /// The digest as 16 hexadecimal digits.
    pub(crate) fn hex(&self) -> String {
        format!("{:016x}", self.hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, value by value in wide integers.
    fn plain(values: &[i64]) -> Digest {
        let prime = i128::from(PRIME);
        let hash = values.iter().fold(0, |hash: i128, value| {
            (hash * i128::from(BASE) % prime + i128::from(*value)).rem_euclid(prime)
        });
        Digest { count: values.len() as u64, hash: hash as u64 }
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_digest_of_the_definition(
            values in proptest::collection::vec(any::<i64>(), 0..40), cut in 0_usize..40,
        ) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (left, right) = bytes.split_at(cut.min(values.len()) * 8);
            let mut digest = Digest::default();
            digest.extend(left, Dtype::I64);
            digest.extend(right, Dtype::I64);
            prop_assert_eq!(digest, plain(&values));
        }

        #[test]
        fn the_type_does_not_matter(values in proptest::collection::vec(0_u16..128, 0..40)) {
            let digests = Dtype::INTEGERS.map(|dtype| {
                let bytes: Vec<u8> = values.iter()
                    .flat_map(|v| u64::from(*v).to_le_bytes()[..dtype.bytes() as usize].to_vec()).collect();
                let mut digest = Digest::default();
                digest.extend(&bytes, dtype);
                digest
            });
            prop_assert!(digests.iter().all(|digest| *digest == digests[0]));
        }
    }
}
