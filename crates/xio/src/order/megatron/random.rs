//! `numpy.random.RandomState(seed).shuffle`: the Mersenne Twister MT19937, bounded numbers by
//! masking and rejecting, and Fisher and Yates' shuffle from the last element down. numpy has
//! frozen this stream of numbers.

const WORDS: usize = 624;
const SHIFT: usize = 397;

/// Bounded numbers drawn ahead of the swaps that use them. The swaps of a large array then miss the
/// cache side by side, because no rejected number makes the processor guess wrong between them.
const AHEAD: usize = 256;

/// `numpy.random.RandomState`.
pub(super) struct RandomState {
    words: [u32; WORDS],
    next: usize,
}

impl RandomState {
    pub(super) fn new(seed: u32) -> RandomState {
        let mut words = [seed; WORDS];
        for at in 1..WORDS {
            let before = words[at - 1];
            words[at] =
                1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(at as u32);
        }
        RandomState { words, next: WORDS }
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == WORDS {
            self.refill();
        }
        let word = self.words[self.next];
        self.next += 1;
        let word = word ^ (word >> 11);
        let word = word ^ ((word << 7) & 0x9d2c_5680);
        let word = word ^ ((word << 15) & 0xefc6_0000);
        word ^ (word >> 18)
    }

    fn refill(&mut self) {
        for at in 0..WORDS {
            let joined =
                (self.words[at] & 0x8000_0000) | (self.words[(at + 1) % WORDS] & 0x7fff_ffff);
            let twist = (joined >> 1) ^ if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[at] = self.words[(at + SHIFT) % WORDS] ^ twist;
        }
        self.next = 0;
    }

    /// A number from 0 to `max`.
    fn interval(&mut self, max: u32) -> u32 {
        let mask = u32::MAX.checked_shr(max.leading_zeros()).unwrap_or(0);
        loop {
            let value = self.next_u32() & mask;
            if value <= max {
                return value;
            }
        }
    }

    /// Shuffles at most 2^32 values.
    pub(super) fn shuffle(&mut self, values: &mut [u32]) {
        let mut ahead = [0; AHEAD];
        let mut end = values.len();
        while end > 1 {
            let count = AHEAD.min(end - 1);
            for (at, other) in ahead[..count].iter_mut().enumerate() {
                *other = self.interval((end - 1 - at) as u32);
            }
            for (at, other) in ahead[..count].iter().enumerate() {
                values.swap(end - 1 - at, *other as usize);
            }
            end -= count;
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn numbers_are_those_of_the_mersenne_twister() {
        // The reference implementation's first number, and its ten-thousandth as C++ states it.
        let mut state = RandomState::new(5489);
        assert_eq!(state.next_u32(), 3_499_211_612);
        let last = (1..10_000).map(|_| state.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn shuffles_are_those_of_numpy() {
        // `r = numpy.random.RandomState(SEED); a = numpy.arange(10); r.shuffle(a)`, and again.
        let shuffled = |seed| {
            let mut state = RandomState::new(seed);
            let mut values: Vec<u32> = (0..10).collect();
            state.shuffle(&mut values);
            let first = values.clone();
            state.shuffle(&mut values);
            (first, values)
        };
        let (first, second) = shuffled(1234);
        assert_eq!(first, [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]);
        assert_eq!(second, [5, 1, 8, 2, 0, 6, 7, 9, 4, 3]);
        assert_eq!(shuffled(u32::MAX).0, [6, 9, 5, 1, 8, 0, 7, 4, 2, 3]);
    }
}
