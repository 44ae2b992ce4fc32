//! Lossless switches: a torus in one lane comes to a deadlock, which is named; in lanes it does
//! not.

use ::topology::routes::Engine;
use sim::circle::{self, CircleConfig};

fn config(most_lanes: u8, seed: u64) -> CircleConfig {
    let shape = "torus:4x4:2".parse().unwrap();
    CircleConfig { most_lanes, seed, ..CircleConfig::new(shape) }
}

#[test]
fn one_lane_of_a_torus_comes_to_a_named_deadlock() {
    let got = circle::measure(&config(1, 1)).unwrap();
    let (_, circle) = got.deadlock.clone().unwrap_or_else(|| panic!("no deadlock: {got:?}"));
    assert!(circle.len() >= 3, "{circle:?}");
    let mut names = circle.clone();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), circle.len(), "each once: {circle:?}");
    assert_eq!(got.dropped, 0);
}

#[test]
fn lanes_carry_the_same_load_without_one() {
    for engine in [Engine::DimensionOrder, Engine::Balanced] {
        let config = CircleConfig { engine, ..config(4, 1) };
        let got = circle::measure(&config).unwrap();
        assert_eq!(got.deadlock, None, "{engine:?}");
        assert!(got.lanes > 1 && got.dropped == 0, "{engine:?}: {got:?}");
        // It goes on to the end: no less than half as much as on average.
        assert!(got.arrived_lately > got.arrived / 20, "{engine:?}: {got:?}");
    }
}

#[test]
fn the_same_holds_for_credits() {
    // 16 KiB of each link and lane, about 14 packets.
    let credits = Some(256);
    let got = circle::measure(&CircleConfig { credits, ..config(1, 1) }).unwrap();
    assert!(got.deadlock.is_some() && got.dropped == 0, "{got:?}");
    let got = circle::measure(&CircleConfig { credits, ..config(4, 1) }).unwrap();
    assert_eq!((got.deadlock, got.dropped), (None, 0));
    assert!(got.arrived_lately > got.arrived / 20);
}

#[test]
fn trees_have_none_in_one_lane() {
    let shape = "fat-tree:4".parse().unwrap();
    let config = CircleConfig { engine: Engine::FatTree, ..CircleConfig::new(shape) };
    let got = circle::measure(&config).unwrap();
    assert_eq!((got.deadlock, got.dropped), (None, 0));
    assert!(got.arrived_lately > got.arrived / 20);
}
