//! Brains, agents and clients in a simulated data centre in which everything goes wrong.
//!
//! `DQUANT_SEEDS=0..5000` runs these seeds, `DQUANT_SEEDS=17..18` one. With the feature
//! `seeded-bugs`, every seeded bug has to be found; `DQUANT_BUG=lease-unchecked` looks for one
//! only.

mod checks;
mod volume;
mod world;

use checks::Checks;
use parfait::seeded::Bug;
use world::{MS, Tally, World};

/// The seeds that the environment names, or so many from 0.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("DQUANT_SEEDS") else { return 0..count };
    let ends = text.split_once("..").expect("FIRST..END");
    ends.0.parse().expect("FIRST")..ends.1.parse().expect("END")
}

fn run(seed: u64, bug: Option<Bug>) -> Result<Tally, String> {
    World::new(seed, bug).run(&mut Checks::default())
}

fn sweep(seeds: std::ops::Range<u64>) {
    let mut sum = Tally::default();
    let mut times = Vec::new();
    for seed in seeds.clone() {
        let tally = run(seed, None).unwrap_or_else(|what| {
            let next = seed + 1;
            let replay = format!(
                "DQUANT_SEEDS={seed}..{next} cargo test -p parfait --test brains few_seeds"
            );
            panic!("seed {seed}: {what}\nreplay: {replay}")
        });
        times.push(tally.healed_ns / MS);
        sum.add(tally);
    }
    times.sort_unstable();
    let most = times.last().copied().unwrap_or(0);
    println!("{} seeds: {sum:?}", times.len());
    let bound = world::bound_ns(3, 3) / MS;
    println!(
        "settled after {} ms (median), {most} ms (most); the bound is {bound} ms",
        times[times.len() / 2]
    );
    if seeds.end - seeds.start >= 100 {
        sum.check_thorough();
    }
}

#[test]
fn few_seeds_keep_every_promise() {
    sweep(seeds(300));
}

#[test]
#[ignore = "2,000 seeds instead of 300: 5 s more in every run of the tests"]
fn many_seeds_keep_every_promise() {
    sweep(seeds(2000));
}

#[cfg(feature = "seeded-bugs")]
#[test]
fn every_seeded_bug_is_found() {
    const PATIENCE: u64 = 300;
    let only = std::env::var("DQUANT_BUG").ok();
    let is_wanted = |bug: &Bug| only.as_ref().is_none_or(|only| *only == bug.to_string());
    for bug in Bug::ALL.into_iter().filter(is_wanted) {
        let found = (0..PATIENCE).find_map(|seed| Some((seed, run(seed, Some(bug)).err()?)));
        let (seed, what) =
            found.unwrap_or_else(|| panic!("{bug} is not found in {PATIENCE} seeds"));
        println!("{bug}: after {} seeds, {what}", seed + 1);
    }
}
