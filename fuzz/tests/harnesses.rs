//! The harnesses as bolero targets.
//!
//! Run as tests they replay the corpus and the crashes in `__fuzz__/` and try a bounded number of
//! random inputs; a failure prints the seed that reproduces it (`BOLERO_RANDOM_SEED=n`). Built by
//! `cargo xtask fuzz` they run under libFuzzer.

use std::panic::{catch_unwind, resume_unwind};
use std::path::Path;

use bolero::check;

#[path = "../../testing/corpus.rs"]
mod corpus;

/// Tries every input of the committed corpus. libFuzzer reads the files itself.
fn replay(harness: &str, check: fn(&[u8])) {
    if cfg!(fuzzing) {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/__fuzz__").join(harness);
    let bytes = std::fs::read(folder.join("corpus.bin")).expect("a corpus");
    let inputs = corpus::unpack(&bytes).expect("a whole corpus");
    for (place, input) in inputs.iter().enumerate() {
        if let Err(panic) = catch_unwind(|| check(input)) {
            eprintln!("input {place} of the corpus of {harness}: {input:02x?}");
            resume_unwind(panic);
        }
    }
    println!("{harness}: {} inputs of the corpus", inputs.len());
}

#[test]
fn packet() {
    replay("packet", fuzz::packet::check);
    check!().with_iterations(20_000).with_max_len(512).for_each(fuzz::packet::check);
}

#[test]
fn raw() {
    replay("raw", fuzz::raw::check);
    check!().with_iterations(3_000).with_max_len(1024).for_each(fuzz::raw::check);
}

#[test]
fn pair() {
    replay("pair", fuzz::pair::check);
    check!().with_iterations(3_000).with_max_len(512).for_each(fuzz::pair::check);
}
