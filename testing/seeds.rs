//! The seeds of a test, and the line that replays one. Included by path, because no crate is for
//! tests only.

use std::fmt;
use std::ops::Range;

/// The seeds of a test: `default`, or those that `DQUANT_SEED=17` or `DQUANT_SEEDS=0..100000`
/// selects.
pub(crate) fn seeds(default: Range<u64>) -> Range<u64> {
    let number = |text: &str| text.trim().parse::<u64>().expect("seeds are numbers");
    if let Ok(seed) = std::env::var("DQUANT_SEED") {
        let seed = number(&seed);
        return seed..seed + 1;
    }
    match std::env::var("DQUANT_SEEDS") {
        Err(_) => default,
        Ok(range) => {
            let (first, end) = range.split_once("..").expect("DQUANT_SEEDS=FIRST..END");
            number(first)..number(end)
        }
    }
}

/// How to run this seed of a test alone; printed if the test panics.
pub(crate) struct Replay {
    pub(crate) test: &'static str,
    pub(crate) seed: u64,
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Replay { test, seed } = self;
        let (package, target) = (env!("CARGO_PKG_NAME"), env!("CARGO_CRATE_NAME"));
        write!(f, "replay: DQUANT_SEED={seed} cargo test -p {package} --test {target} {test}")
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{self}");
        }
    }
}
