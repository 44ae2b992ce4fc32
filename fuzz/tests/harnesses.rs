//! The harnesses as bolero targets.
//!
//! Run as tests they replay the corpus in `__fuzz__/` and try a bounded number of random inputs;
//! a failure prints the seed that repeats it (`BOLERO_RANDOM_SEED=n`). Built by `cargo xtask fuzz`
//! they hand over to libFuzzer.

use bolero::check;

#[test]
fn packet() {
    check!().with_iterations(20_000).with_max_len(512).for_each(fuzz::packet::check);
}

#[test]
fn raw() {
    check!().with_iterations(3_000).with_max_len(1024).for_each(fuzz::raw::check);
}

#[test]
fn pair() {
    check!().with_iterations(3_000).with_max_len(512).for_each(fuzz::pair::check);
}
