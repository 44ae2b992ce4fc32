//! Integer mixing, fixed forever.
//!
//! Every key and every permutation of [`order`](super) is derived from these two functions alone.
//! Neither may change: the order of samples of all runs would change with it.

/// 2^64 divided by the golden ratio, made odd.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection on 64 bits in which each input bit flips each output bit about half the time: the
/// finaliser of SplitMix64 (Steele, Lea and Flood 2014; constants by Stafford, variant 13), started
/// one step on so that zero is not a fixed point.
pub(super) const fn mix(value: u64) -> u64 {
    let x = value.wrapping_add(GOLDEN);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Folds `parts` into one key. Keys of different lists are unrelated for practical purposes.
pub(super) fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |key, part| mix(key ^ part))
}

/// Scales 64 mixed bits to `0..n` without division.
pub(super) const fn scale(bits: u64, n: u64) -> u64 {
    ((bits as u128 * n as u128) >> 64) as u64
}
