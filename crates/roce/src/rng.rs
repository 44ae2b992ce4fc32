//! SplitMix64 (Steele, Lea, Flood 2014): the source of keys, queue pair numbers and initial PSNs.
//!
//! Seeded by the caller and not secret: whoever knows the seed knows the numbers. They only have to
//! be spread out, so that a stale or mistyped key meets nothing.

/// The generator's whole state.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    pub(crate) fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }
}

/// A permutation of the `bits`-bit numbers chosen by `seed`: each step can be undone, so different
/// inputs keep different outputs.
pub(crate) fn permute(value: u32, bits: u32, seed: u64) -> u32 {
    let mask = u32::MAX >> (u32::BITS - bits);
    let half = (bits / 2).max(1);
    let mut x = value & mask;
    for round in 0..3 {
        let [add, factor] = [(seed >> (7 * round)) as u32, (seed >> (32 + 5 * round)) as u32 | 1];
        x = x.wrapping_add(add).wrapping_mul(factor) & mask;
        x ^= x >> half;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn permutation_has_no_collisions() {
        for seed in [0, 1, 0xdead_beef_0bad_cafe] {
            let image: BTreeSet<u32> = (0..1 << 12).map(|x| permute(x, 12, seed)).collect();
            assert_eq!(image.len(), 1 << 12);
        }
    }
}
