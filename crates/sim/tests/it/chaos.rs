//! Seeds of the chaos simulation, and damage that it must notice.
//!
//! One seed: `DQUANT_SEED=17 cargo test -p sim --test it chaos -- --nocapture`.
//! A range: `DQUANT_SEEDS=0..100000`.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ::topology::graph::{Capacity, Topology};
use ::topology::shape::Shape;
use sim::chaos::{self, Options, Sabotage, Summary, Violation};
use sim::faults::Fault;

use crate::seeds::{Replay, seeds};

const DEFAULT_SEEDS: Range<u64> = 0..900;

/// A panic of the transport is a failure like any other.
fn run(seed: u64, options: &Options) -> Result<Summary, String> {
    match catch_unwind(AssertUnwindSafe(|| chaos::run(seed, options))) {
        Ok(outcome) => outcome.map_err(|violation: Violation| violation.to_string()),
        Err(_) => Err(format!("seed {seed}: panicked")),
    }
}

#[test]
fn every_work_request_completes_once_in_order_with_the_right_bytes() {
    let mut sum = Summary::default();
    let mut failures = Vec::new();
    for seed in seeds(DEFAULT_SEEDS) {
        match run(seed, &Options::default()) {
            Ok(summary) => sum.add(&summary),
            Err(what) => failures.push(format!("{what}\n  {}", Replay { test: "chaos", seed })),
        }
    }
    println!(
        "{} seeds, {} sends, {} receives, {} completions",
        sum.seeds, sum.sends, sum.receives, sum.completions
    );
    println!("{:?}", sum.faults);
    println!("connections {}, broken {}", sum.connections, sum.broken);
    println!("packets {}, again {}, events {}", sum.packets, sum.retransmitted, sum.events);
    println!(
        "recovery median {} p99 {} max {} ns, closest {} per mille",
        sum.recovery_ns(50),
        sum.recovery_ns(99),
        sum.recovery_ns(100),
        sum.closest_to_bound_per_mille()
    );
    for (name, value) in &sum.counters {
        println!("  {name} {value}");
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

/// The wire rules (RNR delays, windows) apply to go-back-N and selective repeat, with READs and
/// atomics and without; runs that skip requests check little.
#[test]
fn the_rules_of_the_wire_are_applied_to_every_request() {
    let mut sum = Summary::default();
    (0..40).for_each(|seed| sum.add(&run(seed, &Options::default()).unwrap()));
    let Summary { requests_checked, requests_skipped, .. } = sum;
    println!("{requests_checked} request packets checked, {requests_skipped} skipped");
    assert!(requests_checked > 20_000, "{requests_checked} requests");
    assert!(sum.requests_checked_per_mille() >= 999, "{requests_skipped} requests were skipped");
}

/// Every seed in a fat tree of 20 switches, whose links and switches fail. One seed:
/// `DQUANT_SEED=17`.
#[test]
fn a_fat_tree_that_fails_keeps_all_promises() {
    let topology = fat_tree();
    let options = Options { topology: Some(topology), ..Options::default() };
    let (mut sum, mut failures) = (Summary::default(), Vec::new());
    for seed in seeds(0..300) {
        match run(seed, &options) {
            Ok(summary) => sum.add(&summary),
            Err(what) => failures.push(what),
        }
    }
    for (place, fault) in Fault::ALL.into_iter().enumerate() {
        let (injected, effective) = (sum.faults.injected[place], sum.faults.effective[place]);
        println!("{:<14}{injected:>8}{effective:>8}", fault.name());
        assert!(effective <= injected, "{fault:?}");
        assert!(sum.seeds < 100 || effective > 0, "{fault:?} never made a difference");
    }
    println!("{} dropped, {} broken of {}", sum.queue_drops, sum.broken, sum.connections);
    println!("{} pauses, {:?}", sum.pauses, sum.conduct);
    println!(
        "{} events, at most {} per mille of the bound",
        sum.events,
        sum.closest_to_bound_per_mille()
    );
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

/// What other seeds found: flow control that overtook itself, bunched packets that a lossless
/// switch had to drop, many events, and in selective repeat WRITEs that were retransmitted as
/// ordered because of a READ behind them, and so advanced by a few packets in each timeout where
/// packets are sprayed.
#[test]
fn seeds_of_a_fat_tree_that_once_failed_pass() {
    let options = Options { topology: Some(fat_tree()), ..Options::default() };
    for seed in [5_717, 15_377, 15_492, 24_683, 25_752] {
        run(seed, &options).unwrap();
    }
}

fn fat_tree() -> Topology {
    let shape: Shape = "fat-tree:4".parse().unwrap();
    shape.build(Capacity::default()).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..20 {
        let [first, second] =
            [(); 2].map(|()| format!("{:?}", run(seed, &Options::default()).unwrap()));
        assert_eq!(first, second, "seed {seed}");
    }
}

/// The checker has to detect each kind of damage on most seeds where it can occur, or it proves
/// nothing. Some seeds have no atomics, and about half have no unreliable connection at the end.
#[test]
fn sabotage_is_noticed() {
    use Sabotage::{Atomic, Body, Completion, Guard, Loss, Order, Reorder, Silence};
    let anywhere = [(Body, 15), (Completion, 15), (Order, 15), (Guard, 15), (Atomic, 9)];
    let unreliable = [(Loss, 5), (Reorder, 5), (Silence, 5)];
    for (sabotage, least) in anywhere.into_iter().chain(unreliable) {
        let options = Options { sabotage, ..Options::default() };
        let noticed = (0..20).filter(|&seed| run(seed, &options).is_err()).count();
        println!("{sabotage:?} noticed on {noticed} of 20 seeds");
        assert!(noticed >= least, "{sabotage:?} was noticed on {noticed} of 20 seeds only");
    }
}
