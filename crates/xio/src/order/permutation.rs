//! A keyed bijection on `0..n`, evaluated at a point without a table.
//!
//! A generalised Feistel network (Black and Rogaway 2002): `x` is written as `left * b + right`
//! with `left < a`, `right < b`, where `a` and `b` are about the square root of `n`. Rounds add a
//! keyed function of one half to the other, modulo `a` or `b`, which can be undone whatever the
//! function is. The domain `a * b` exceeds `n` by less than `a`; a point that maps into the excess
//! is mapped again (cycle walking), which keeps the map a bijection on `0..n` and costs at worst
//! 1.5 evaluations on average.
//!
//! Addition modulo the half sizes, rather than exclusive-or, produces both even and odd
//! permutations, so that for tiny `n` every one of the `n!` orders occurs, about equally often.

use super::mix::{key, mix, scale};

/// Rounds of a pass, an even number. With four, a permutation looks random to an observer of few of
/// its points; this is twice that.
const ROUNDS: usize = 8;

/// Up to this `n` three passes are made: a round function with very few points has very few values,
/// and one pass makes some of the `n!` orders visibly more likely than others (`n` = 5 and 6
/// measured).
const TINY: u64 = 64;

/// Separates the keys of the passes.
const PASS_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A keyed bijection on `0..n`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    left_size: u64,
    right_size: u64,
    /// One key for each round; none for the identity.
    keys: Option<[u64; ROUNDS]>,
}

impl Permutation {
    /// The bijection with this key.
    pub fn new(key_bits: u64, n: u64) -> Permutation {
        let root = n.isqrt();
        let left_size = if root * root == n { root } else { root + 1 };
        let keys = core::array::from_fn(|round| key(&[key_bits, round as u64]));
        Permutation { n, left_size, right_size: n.div_ceil(left_size.max(1)), keys: Some(keys) }
    }

    /// The bijection that maps every point to itself.
    pub const fn identity(n: u64) -> Permutation {
        Permutation { n, left_size: n, right_size: 1, keys: None }
    }

    /// Number of points.
    pub const fn n(&self) -> u64 {
        self.n
    }

    /// The image of `x`. Points outside `0..n` map to themselves.
    pub fn apply(&self, x: u64) -> u64 {
        #[cfg(test)]
        super::cost::add();
        self.walk(x, Permutation::forward)
    }

    /// The preimage of `y`: `invert(apply(x)) == x`.
    pub fn invert(&self, y: u64) -> u64 {
        self.walk(y, Permutation::backward)
    }

    /// Follows the cycle of `x` in the domain until it is back below `n`, which it reaches because
    /// it started there.
    fn walk(&self, x: u64, step: impl Fn(&Permutation, u64, &[u64; ROUNDS]) -> u64) -> u64 {
        let (Some(keys), true) = (&self.keys, x < self.n) else {
            return x;
        };
        let mut y = step(self, x, keys);
        while y >= self.n {
            y = step(self, y, keys);
        }
        y
    }

    /// The offsets added to the keys in each pass.
    fn passes(&self) -> impl DoubleEndedIterator<Item = u64> + use<> {
        let passes = if self.n <= TINY { 3 } else { 1 };
        (0..passes).map(|pass: u64| pass.wrapping_mul(PASS_STEP))
    }

    fn forward(&self, x: u64, keys: &[u64; ROUNDS]) -> u64 {
        let (mut left, mut right) = (x / self.right_size, x % self.right_size);
        for tweak in self.passes() {
            for [even, odd] in keys.as_chunks().0 {
                let bits = mix(even.wrapping_add(tweak) ^ right);
                left = add(left, scale(bits, self.left_size), self.left_size);
                let bits = mix(odd.wrapping_add(tweak) ^ left);
                right = add(right, scale(bits, self.right_size), self.right_size);
            }
        }
        left * self.right_size + right
    }

    fn backward(&self, y: u64, keys: &[u64; ROUNDS]) -> u64 {
        let (mut left, mut right) = (y / self.right_size, y % self.right_size);
        for tweak in self.passes().rev() {
            for [even, odd] in keys.as_chunks().0.iter().rev() {
                let bits = mix(odd.wrapping_add(tweak) ^ left);
                right = subtract(right, scale(bits, self.right_size), self.right_size);
                let bits = mix(even.wrapping_add(tweak) ^ right);
                left = subtract(left, scale(bits, self.left_size), self.left_size);
            }
        }
        left * self.right_size + right
    }
}

/// `a + b` modulo `m`, for `a, b < m <= 2^32`.
const fn add(a: u64, b: u64, m: u64) -> u64 {
    let sum = a + b;
    if sum >= m { sum - m } else { sum }
}

/// `a - b` modulo `m`, for `a, b < m <= 2^32`.
const fn subtract(a: u64, b: u64, m: u64) -> u64 {
    if a >= b { a - b } else { a + m - b }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeMap, vec, vec::Vec};

    #[test]
    fn a_bijection_for_every_small_n() {
        for n in 0..2_000 {
            let permutation = Permutation::new(n * 31 + 7, n);
            let mut seen = vec![false; n as usize];
            for x in 0..n {
                let y = permutation.apply(x);
                assert!(y < n && !seen[y as usize], "n {n}: {x} and another go to {y}");
                seen[y as usize] = true;
                assert_eq!(permutation.invert(y), x, "n {n}");
            }
            assert_eq!(permutation.apply(n), n, "points outside stay");
        }
    }

    #[test]
    fn large_n_invert_and_stay_inside() {
        for i in 0..20_000u64 {
            let n = (mix(i) >> (i % 63)).max(1);
            let permutation = Permutation::new(mix(i ^ 99), n);
            let x = scale(mix(i + 1_000_000), n);
            let y = permutation.apply(x);
            assert!(y < n, "replay: i {i}");
            assert_eq!(permutation.invert(y), x, "replay: i {i}");
        }
        for n in [u64::MAX, u64::MAX - 1, 1 << 63, (1 << 32) * ((1 << 32) - 1), (1 << 32) + 1] {
            let permutation = Permutation::new(5, n);
            for x in [0, 1, n / 2, n - 1] {
                assert_eq!(permutation.invert(permutation.apply(x)), x, "n {n}");
            }
        }
    }

    /// Pearson's statistic against the uniform distribution.
    fn chi_square(counts: &[u32]) -> f64 {
        let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum()
    }

    #[test]
    fn all_orders_of_tiny_sets_are_equally_likely() {
        for (n, orders) in [(2, 2), (3, 6), (4, 24), (5, 120), (6, 720)] {
            let mut counts = BTreeMap::<Vec<u64>, u32>::new();
            for seed in 0..orders * 200 {
                let permutation = Permutation::new(key(&[seed, 17]), n);
                *counts.entry((0..n).map(|x| permutation.apply(x)).collect()).or_default() += 1;
            }
            assert_eq!(counts.len() as u64, orders, "orders of {n} that occur");
            let freedom = (orders - 1) as f64;
            let statistic = chi_square(&counts.into_values().collect::<Vec<_>>());
            assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "n {n}: {statistic}");
        }
    }

    #[test]
    fn places_and_neighbours_are_spread_evenly() {
        for n in [7u64, 8, 10, 16, 64, 65, 97, 100] {
            let mut place = vec![0u32; (n * n) as usize];
            let mut step = vec![0u32; n as usize];
            for seed in 0..400 * n {
                let permutation = Permutation::new(key(&[seed, n]), n);
                let ys: Vec<u64> = (0..n).map(|x| permutation.apply(x)).collect();
                ys.iter().enumerate().for_each(|(x, y)| place[x * n as usize + *y as usize] += 1);
                step[((ys[1] + n - ys[0]) % n) as usize] += 1;
            }
            for (counts, freedom) in
                [(&place[..], ((n - 1) * (n - 1)) as f64), (&step[1..], (n - 2) as f64)]
            {
                let statistic = chi_square(counts);
                assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "n {n}: {statistic}");
            }
        }
    }

    #[test]
    fn the_map_is_frozen() {
        let points = |key, n| [0, 1, 2, n - 1].map(|x| Permutation::new(key, n).apply(x));
        assert_eq!(points(0, 10), [0, 1, 9, 6]);
        assert_eq!(points(42, 1_000_003), [485134, 808849, 196592, 356898]);
        assert_eq!(
            points(u64::MAX, 1 << 40),
            [246741256668, 728150588391, 1033524967178, 201601903448]
        );
    }
}
