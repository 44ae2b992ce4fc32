//! The tests' only source of chance: SplitMix64, and the line that replays a seed.

use std::ops::Range;

/// A stream of numbers that a seed decides.
#[derive(Clone, Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Draw {
        Draw(seed ^ 0x6a09_e667_f3bc_c908)
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Prints how to replay a seed when the test that holds it panics.
pub(crate) struct Replay {
    pub(crate) test: &'static str,
    pub(crate) seed: u64,
}

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Replay { test, seed } = self;
            eprintln!("replay: PIPELINE_SEED={seed} cargo test -p xio --test pipeline {test}");
        }
    }
}

/// The seeds of a test: all of them, or the one that `PIPELINE_SEED` names.
pub(crate) fn seeds(all: Range<u64>) -> Range<u64> {
    match std::env::var("PIPELINE_SEED") {
        Ok(text) => {
            let seed = text.parse().expect("PIPELINE_SEED is a number");
            seed..seed + 1
        }
        Err(_) => all,
    }
}
