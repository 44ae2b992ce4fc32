//! Checks the checker: it finds every seeded bug of the transport, and reports after how many
//! seeds.
//!
//! Needs the feature `seeded-bugs`:
//! `cargo test --release -p sim --features seeded-bugs --test seeded -- --nocapture`;
//! `DQUANT_BUG=atomic-repeated` searches for one only.

use std::panic::{AssertUnwindSafe, catch_unwind};

use roce::seeded::Bug;
use sim::chaos::{self, Options};

/// Searches for each bug, from different seeds on.
const TRIALS: u64 = 5;

/// Seeds after which a bug counts as not found.
const PATIENCE: u64 = 1_000;

/// How the first seed that reveals the bug fails, and how many seeds that took.
fn find(bug: Bug, first: u64) -> Option<(u64, String)> {
    let options = Options { bug: Some(bug), ..Options::default() };
    (first..first + PATIENCE).find_map(|seed| {
        let what = match catch_unwind(AssertUnwindSafe(|| chaos::run(seed, &options))) {
            Ok(Ok(_)) => return None,
            Ok(Err(violation)) => violation.to_string(),
            Err(_) => format!("seed {seed}: panicked"),
        };
        Some((seed - first + 1, what))
    })
}

#[test]
fn every_seeded_mistake_is_found() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    let only = std::env::var("DQUANT_BUG").ok();
    let is_wanted = |bug: &Bug| only.as_ref().is_none_or(|only| *only == bug.to_string());
    for bug in Bug::ALL.into_iter().filter(is_wanted) {
        let found: Vec<_> = (0..TRIALS).map(|trial| find(bug, trial * 10_000)).collect();
        let mut seeds: Vec<u64> = found.iter().flatten().map(|(seeds, _)| *seeds).collect();
        seeds.sort_unstable();
        let median = seeds.get(seeds.len() / 2).copied().unwrap_or(0);
        let how = found.iter().flatten().next().map_or("not found", |(_, what)| what.as_str());
        let how: String = how.chars().take(110).collect();
        println!("{:<24} median {median:>4} seeds {seeds:?}; {how}", bug.to_string());
        if seeds.len() < TRIALS as usize {
            missed.push(bug);
        }
    }
    assert!(missed.is_empty(), "not found within {PATIENCE} seeds each time: {missed:?}");
}
