//! The only source of randomness: PCG (`rand_pcg`'s `Pcg64`) and the draws made from it.
//!
//! Every part of a simulation gets its own generator, forked from the seed's: draws of one part do
//! not shift those of another, so small changes of a scenario stay small.

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Chance(Pcg64);

impl Chance {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Chance {
        Chance(Pcg64::seed_from_u64(seed))
    }

    /// A separate generator for another part of the simulation.
    #[must_use]
    pub fn fork(&mut self) -> Chance {
        Chance::new(self.word())
    }

    /// 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        // The high half of a product: no division, and a bias below 2^-32 for the ranges in use.
        ((u128::from(self.word()) * u128::from(end)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True this often in a thousand.
    pub fn per_mille(&mut self, rate: u32) -> bool {
        self.below(1_000) < u64::from(rate)
    }

    /// True this often in a million. A rate of zero draws nothing.
    pub fn per_million(&mut self, rate: u32) -> bool {
        rate > 0 && self.below(1_000_000) < u64::from(rate)
    }

    /// One of `from`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Overwrites `bytes` with random ones.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_range_and_reach_both_ends() {
        let mut chance = Chance::new(5);
        let mut seen = [0_u32; 4];
        for _ in 0..1_000 {
            seen[chance.between(3, 6) as usize - 3] += 1;
        }
        assert!(seen.iter().all(|&count| count > 180), "{seen:?}");
        assert_eq!(chance.below(0), 0);
        assert!((0..100).all(|_| !chance.per_million(0)));
    }
}
