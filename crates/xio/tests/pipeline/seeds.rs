//! The seeds of a test, and the line that replays one.

use std::ops::Range;

/// Prints how to replay a seed when its test panics.
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

/// The seeds of a test: all of them, or the one in `PIPELINE_SEED`.
pub(crate) fn seeds(all: Range<u64>) -> Range<u64> {
    match std::env::var("PIPELINE_SEED") {
        Ok(text) => {
            let seed = text.parse().expect("PIPELINE_SEED is a number");
            seed..seed + 1
        }
        Err(_) => all,
    }
}
