//! Megatron-core's arithmetic with weights, in the floating-point steps of numpy and Python:
//! another order of additions would round differently, and ties between datasets would fall the
//! other way.

use alloc::vec::Vec;
use core::cmp::Ordering;
use core::ops::Range;

use super::MegatronError;

/// Elements that numpy adds up in one loop of eight sums.
const PAIRWISE_BLOCK: usize = 128;

/// `numpy.sum` of 64-bit floats: pairwise.
fn sum(values: &[f64]) -> f64 {
    if values.len() > PAIRWISE_BLOCK {
        let half = values.len() / 2;
        let (left, right) = values.split_at(half - half % 8);
        return sum(left) + sum(right);
    }
    let (eights, rest) = values.as_chunks::<8>();
    let total = match eights.split_first() {
        None => 0.0,
        Some((first, others)) => {
            let mut sums = *first;
            for eight in others {
                sums.iter_mut().zip(eight).for_each(|(sum, value)| *sum += value);
            }
            let [a, b, c, d, e, f, g, h] = sums;
            ((a + b) + (c + d)) + ((e + f) + (g + h))
        }
    };
    rest.iter().fold(total, |total, value| total + value)
}

/// Weights divided by their sum.
pub(super) fn normalize(weights: &[f64]) -> Vec<f64> {
    let total = sum(weights);
    weights.iter().map(|weight| weight / total).collect()
}

/// Samples that a dataset of this normalized weight is built for: half a percent more than its
/// share.
pub(super) fn samples_with_margin(samples: u64, weight: f64) -> u64 {
    ceil(ceil(samples as f64 * weight) as f64 * (1.0 + 0.005))
}

/// The documents of training, validation and test, as megatron-core's `split` divides them: in this
/// ratio, which may have fewer than three numbers. A part without a share is none.
///
/// # Errors
/// When there are more than three numbers, one is negative or not a number, or all are zero.
pub fn split(ratio: &[f64], documents: usize) -> Result<[Option<Range<usize>>; 3], MegatronError> {
    let mut shares = [0.0; 3];
    let legal = ratio.iter().all(|share| share.is_finite() && *share >= 0.0);
    match shares.get_mut(..ratio.len()) {
        Some(shares) if legal && ratio.iter().any(|share| *share > 0.0) => {
            shares.copy_from_slice(ratio);
        }
        _ => return Err(MegatronError::Split),
    }
    let shares = normalize(&shares);
    let mut end = 0.0;
    let mut part = |share: f64| {
        let start = end;
        end = start + share;
        let bound = |at: f64| round(at * documents as f64) as usize;
        (end > start).then(|| bound(start)..bound(end).min(documents))
    };
    Ok([part(shares[0]), part(shares[1]), part(shares[2])])
}

/// Python's `math.ceil` of a number from 0 to 2^53.
fn ceil(number: f64) -> u64 {
    let whole = number as u64;
    whole + u64::from((whole as f64) < number)
}

/// Python's `round` of a number from 0 to 2^53: halves go to the even neighbour.
fn round(number: f64) -> u64 {
    let whole = number as u64;
    match (number - whole as f64).total_cmp(&0.5) {
        Ordering::Less => whole,
        Ordering::Equal => whole + whole % 2,
        Ordering::Greater => whole + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `numpy.sum` gives it; adding from the left gives other last digits from 9 numbers on.
    #[test]
    fn sums_are_those_of_numpy() {
        let values: Vec<f64> =
            (0..1000u32).map(|at| f64::from(at * 7919 % 997 + 1) / 1000.0).collect();
        let bits = |count| sum(&values[..count]).to_bits();
        let sums = [
            0x3ffd_374b_c6a7_ef9e,
            0x4017_bb64_5a1c_ac08,
            0x401f_f3b6_45a1_cac1,
            0x4050_8f4b_c6a7_ef9e,
            0x4050_bae1_47ae_147b,
            0x4053_8189_374b_c6a8,
            0x407f_3543_9581_0625,
        ];
        assert_eq!([3, 9, 15, 128, 129, 150, 1000].map(bits), sums);
    }

    #[test]
    fn splits_round_as_python() {
        let parts = |ratio: &[f64], documents| split(ratio, documents);
        assert_eq!(
            parts(&[969.0, 30.0, 1.0], 6000),
            Ok([Some(0..5814), Some(5814..5994), Some(5994..6000)])
        );
        assert_eq!(parts(&[1.0, 1.0], 5), Ok([Some(0..2), Some(2..5), None]));
        assert_eq!(parts(&[1.0], 3), Ok([Some(0..3), None, None]));
        for ratio in [&[0.0, 0.0][..], &[], &[1.0; 4], &[1.0, -1.0], &[f64::NAN]] {
            assert_eq!(parts(ratio, 10), Err(MegatronError::Split));
        }
    }
}
