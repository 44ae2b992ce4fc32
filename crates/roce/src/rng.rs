//! The source of keys, queue pair numbers and initial PSNs.
//!
//! Anyone who knows the endpoint's seed can derive all of them, so it must be random where peers
//! are hostile. PCG (`rand_pcg`) can be run backwards, so peers never see its output: initial PSNs
//! are a SipHash of a counter ([`HashedCounter`]). Each kind of number has its own generator,
//! seeded with a SipHash of the endpoint's seed.
//!
//! Numbers that grant access (remote keys, queue pair numbers) are encrypted by a [`Cipher`]: some
//! of them do not help to guess the next, short of breaking the cipher. It is built for speed, not
//! reviewed as a cipher, and no replacement for encryption on the wire.

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng as _, SeedableRng};

/// A seeded generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(Pcg64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(Pcg64::seed_from_u64(seed))
    }

    /// The generator of one kind of number for the endpoint with this seed.
    pub(crate) fn of_kind(kind: u64, seed: u64) -> Rng {
        Rng::new(siphash([seed, !seed], kind))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }
}

/// Numbers that reveal nothing about each other: a SipHash of a counter.
#[derive(Clone, Debug)]
pub(crate) struct HashedCounter {
    key: [u64; 2],
    drawn: u64,
}

impl HashedCounter {
    pub(crate) fn new(rng: &mut Rng) -> HashedCounter {
        HashedCounter { key: [rng.next_u64(), rng.next_u64()], drawn: 0 }
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        self.drawn += 1;
        siphash(self.key, self.drawn) as u32
    }
}

/// SipHash-2-4 of one word of 64 bits (Aumasson, Bernstein 2012).
fn siphash(key: [u64; 2], word: u64) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    for block in [word, 8 << 56] {
        v[3] ^= block;
        (0..2).for_each(|_| sip_round(&mut v));
        v[0] ^= block;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| sip_round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn sip_round(v: &mut [u64; 4]) {
    for (a, b, turn) in [(0, 1, 13), (2, 3, 16)] {
        v[a] = v[a].wrapping_add(v[b]);
        v[b] = v[b].rotate_left(turn) ^ v[a];
    }
    v[0] = v[0].rotate_left(32);
    for (a, b, turn) in [(2, 1, 17), (0, 3, 21)] {
        v[a] = v[a].wrapping_add(v[b]);
        v[b] = v[b].rotate_left(turn) ^ v[a];
    }
    v[2] = v[2].rotate_left(32);
}

/// Rounds of a [`Cipher`]: with four pseudorandom rounds it is a strong pseudorandom permutation
/// (Luby, Rackoff 1988).
const ROUNDS: usize = 4;

/// A keyed permutation of numbers of up to 32 bits: a Feistel network.
#[derive(Clone, Debug)]
pub(crate) struct Cipher {
    /// Bits of the lower and of the upper half.
    halves: [u32; 2],
    keys: [[u64; 2]; ROUNDS],
}

impl Cipher {
    /// For numbers of `bits` bits, at least 2.
    pub(crate) fn new(bits: u32, rng: &mut Rng) -> Cipher {
        let keys = core::array::from_fn(|_| [rng.next_u64(), rng.next_u64()]);
        Cipher { halves: [bits / 2, bits - bits / 2], keys }
    }

    /// Encrypts `value`. Higher bits are ignored.
    #[inline]
    pub(crate) fn seal(&self, value: u32) -> u32 {
        let mut parts = self.split(value);
        for round in 0..ROUNDS {
            self.mix(round, &mut parts);
        }
        parts[1] << self.halves[0] | parts[0]
    }

    /// Decrypts `value`.
    #[inline]
    pub(crate) fn open(&self, value: u32) -> u32 {
        let mut parts = self.split(value);
        for round in (0..ROUNDS).rev() {
            self.mix(round, &mut parts);
        }
        parts[1] << self.halves[0] | parts[0]
    }

    fn split(&self, value: u32) -> [u32; 2] {
        let [low, high] = self.halves;
        [value & mask(low), value >> low & mask(high)]
    }

    /// Changes one half by the other; applied twice, it is undone.
    #[inline]
    fn mix(&self, round: usize, parts: &mut [u32; 2]) {
        let (to, from) = (round % 2, 1 - round % 2);
        let [add, factor] = self.keys[round];
        let product = u128::from(u64::from(parts[from]) ^ add) * u128::from(factor | 1);
        parts[to] ^= ((product >> 64) as u32 ^ (product >> 16) as u32) & mask(self.halves[to]);
    }
}

fn mask(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// A permutation of the `bits`-bit numbers chosen by `seed`: each step can be undone, so different
/// inputs have different outputs.
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

    /// The vector for 8 bytes of the reference implementation.
    #[test]
    fn siphash_is_the_published_one() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(key, 0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn what_is_sealed_is_opened_again_and_meets_nothing_else() {
        for bits in [2, 7, 12, 13] {
            let cipher = Cipher::new(bits, &mut Rng::new(bits.into()));
            let image: BTreeSet<u32> = (0..1 << bits).map(|value| cipher.seal(value)).collect();
            assert_eq!(image.len(), 1 << bits);
            assert!((0..1 << bits).all(|value| cipher.open(cipher.seal(value)) == value));
        }
        let wide = Cipher::new(31, &mut Rng::new(5));
        assert!((0..1 << 16).all(|value| wide.open(wide.seal(value * 32_767)) == value * 32_767));
    }

    /// Every output bit changes in about half of the cases when a bit of the number or of the key
    /// changes.
    #[test]
    fn sealed_numbers_look_unrelated() {
        const SAMPLES: u32 = 2_000;
        for bits in [16, 24, 31] {
            let ciphers = [1, 2].map(|seed| Cipher::new(bits, &mut Rng::new(seed)));
            for flipped in 0..=bits {
                let mut changes = [0_u32; 31];
                for n in 0..SAMPLES {
                    let value = n.wrapping_mul(0x9e37_79b9) >> (32 - bits);
                    let (other, cipher) = match flipped {
                        _ if flipped == bits => (value, &ciphers[1]),
                        _ => (value ^ 1 << flipped, &ciphers[0]),
                    };
                    let changed = ciphers[0].seal(value) ^ cipher.seal(other);
                    (0..bits).for_each(|bit| changes[bit as usize] += changed >> bit & 1);
                }
                let is_even = |&count: &u32| (SAMPLES * 2 / 5..SAMPLES * 3 / 5).contains(&count);
                let even = changes[..bits as usize].iter().filter(|count| is_even(count)).count();
                assert_eq!(even, bits as usize, "{bits} bits, {flipped}: {changes:?}");
            }
        }
    }

    #[test]
    fn kinds_of_numbers_have_nothing_in_common() {
        let firsts =
            (0..100).flat_map(|kind| [7, 8].map(|seed| Rng::of_kind(kind, seed).next_u64()));
        assert_eq!(firsts.collect::<BTreeSet<u64>>().len(), 200);
    }

    #[test]
    fn permutation_has_no_collisions() {
        for seed in [0, 1, 0xdead_beef_0bad_cafe] {
            let image: BTreeSet<u32> = (0..1 << 12).map(|x| permute(x, 12, seed)).collect();
            assert_eq!(image.len(), 1 << 12);
        }
    }
}
