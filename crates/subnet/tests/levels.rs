//! Paths on several virtual lanes: what ports are told, what programs are told, and that no state
//! on the way has a cycle of buffers that wait for each other, walked with the lanes that switches
//! use and the levels that senders have.

mod agents;
mod world;

use std::time::Duration;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use subnet::mad::Attribute;
use subnet::manager::Config;
use subnet::manager::event::{Event, Summary};
use subnet::manager::work::{Fallback, How};
use topology::graph::Kind;
use topology::routes::Engine;
use world::World;

const SECOND: Duration = Duration::from_secs(1);

fn managed(text: &str, engine: Engine, lanes: u8) -> World {
    let mut world = World::of(text);
    world.agents.lanes = Some(lanes);
    world.walks_links = true;
    world.start(0, Config { engine, ..Config::default() });
    world.run(SECOND);
    world
}

fn set_ups(world: &mut World) -> Vec<Summary> {
    let summary = |(_, event): (usize, Event)| match event {
        Event::SetUp(summary) => Some(summary),
        _ => None,
    };
    world.take_events().into_iter().filter_map(summary).collect()
}

#[test]
fn paths_that_need_lanes_get_them_and_ports_and_programs_are_told() {
    for (text, engine) in [
        ("torus:4x4:2", Engine::Balanced),
        ("torus:5x5:1", Engine::DimensionOrder),
        ("dragonfly:4x2x2", Engine::Balanced),
        ("random:12x4x2:1", Engine::MinHop),
    ] {
        let mut world = managed(text, engine, 8);
        let set_up = set_ups(&mut world);
        assert!(set_up.len() == 1 && set_up[0].how == How::Computed, "{text}: {set_up:?}");
        assert!(set_up[0].lanes == 8, "{text}: {set_up:?}");
        world.check_paths_to_hosts(text);
        let lids: Vec<u16> = world.lids().into_keys().collect();
        let mut levels = std::collections::BTreeSet::new();
        for from in &lids {
            for to in &lids {
                let (there, back) = (world.level(0, *from, *to), world.level(0, *to, *from));
                levels.extend(there);
                assert!(
                    there.is_none() || back.is_none() || there == back,
                    "one connection, one level"
                );
            }
        }
        assert_eq!(
            levels.into_iter().collect::<Vec<_>>(),
            (0..set_up[0].lanes).collect::<Vec<_>>()
        );
        // Every output of a switch has a mapping for every input, and shares its link.
        let topology = &world.agents.topology;
        for (id, node) in topology.nodes().filter(|(_, node)| node.kind() == Kind::Switch) {
            for (port, _) in topology.neighbours(id) {
                let written = |attribute: Attribute, modifier| {
                    world.agents.written.get(&(id, attribute.id(), modifier)).copied()
                };
                for input in 0..=u32::from(node.ports()) {
                    let table =
                        written(Attribute::SlToVl, input << 8 | u32::from(port)).expect("written");
                    assert_eq!(table[..8], [0x01, 0x23, 0x45, 0x67, 0x01, 0x23, 0x45, 0x67]);
                }
                let low =
                    written(Attribute::VlArbitration, 1 << 16 | u32::from(port)).expect("written");
                let lanes: Vec<(u8, u8)> =
                    low.chunks(2).map(|entry| (entry[0], entry[1])).collect();
                assert!(lanes[..8].iter().enumerate().all(|(at, entry)| *entry == (at as u8, 64)));
                assert!(lanes[8..].iter().all(|entry| *entry == (0, 0)));
            }
        }
    }
}

#[test]
fn one_mapping_for_all_inputs_is_written_where_switches_take_it() {
    let counted = |maps_all_inputs| {
        let mut world = World::of("torus:4x4:2");
        world.agents.lanes = Some(4);
        world.agents.maps_all_inputs = maps_all_inputs;
        world.start(0, Config::default());
        world.run(SECOND);
        assert!(set_ups(&mut world)[0].lanes > 1);
        world.check_paths_to_hosts("mapped");
        world.counters(0).sent
    };
    // 96 outputs of switches, each with 7 inputs.
    assert_eq!(counted(false) - counted(true), 96 * 6);
}

#[test]
fn links_without_enough_lanes_are_routed_up_and_down() {
    let mut world = managed("torus:5x5:1", Engine::DimensionOrder, 1);
    let set_up = set_ups(&mut world);
    assert_eq!((set_up[0].how, set_up[0].lanes), (How::Fallback(Fallback::Lanes(1)), 1));
    world.check_paths_to_hosts("by up-down");
    assert!(
        world.agents.written.keys().all(|(_, attribute, _)| *attribute != Attribute::SlToVl.id())
    );
}

#[test]
fn a_switch_that_takes_no_mapping_leaves_one_lane_for_all() {
    let mut world = World::of("torus:4x4:2");
    world.agents.lanes = Some(8);
    let switch = world.agents.topology.switches().nth(5).expect("a switch");
    world.agents.level.push(switch);
    world.start(0, Config::default());
    world.run(10 * SECOND);
    let events = world.take_events();
    let incomplete = events.iter().any(|(_, event)| {
        matches!(event, Event::Incomplete(complaint, _) if complaint.contains("SlToVl"))
    });
    assert!(incomplete, "{events:?}");
    world.check_paths_to_hosts("by up-down");
    let last = events.iter().rev().find_map(|(_, event)| match event {
        Event::SetUp(summary) => Some(*summary),
        _ => None,
    });
    assert!(last.is_some_and(|last| last.lanes == 1 && last.engine == Engine::UpDown), "{last:?}");
}

#[test]
fn a_switch_that_is_silent_for_a_moment_gets_its_lanes_all_the_same() {
    let mut world = World::of("torus:4x4:2");
    world.agents.lanes = Some(8);
    world.walks_links = true;
    world.start(0, Config::default());
    while !world.agents.written.keys().any(|(_, id, _)| *id == Attribute::SlToVl.id()) {
        world.step(1);
    }
    let switch = world.agents.topology.switches().nth(5).expect("a switch");
    world.agents.silent.push(switch);
    world.run(SECOND * 3 / 2);
    world.agents.silent.clear();
    world.run(20 * SECOND);
    let events = world.take_events();
    let is_named =
        |event: &Event| matches!(event, Event::Incomplete(what, _) if what.contains("SlToVl"));
    assert!(events.iter().any(|(_, event)| is_named(event)), "{events:?}");
    let lanes = |(_, event): &(usize, Event)| match event {
        Event::SetUp(summary) => Some(summary.lanes),
        _ => None,
    };
    assert_eq!(events.iter().filter_map(lanes).next_back(), Some(8), "{events:?}");
    world.check_paths_to_hosts("with lanes");
}

/// One that answers everything but that.
#[test]
fn a_switch_that_never_says_that_it_took_its_mapping_leaves_one_lane_for_all() {
    let mut world = World::of("torus:4x4:2");
    world.agents.lanes = Some(8);
    let switch = world.agents.topology.switches().nth(5).expect("a switch");
    world.agents.mute.push(switch);
    world.start(0, Config::default());
    world.run(30 * SECOND);
    assert_eq!(set_ups(&mut world).last().map(|last| last.lanes), Some(1));
    world.check_paths_to_hosts("by up-down");
}

/// Nothing passes a host, so what its port does with levels closes no cycle.
#[test]
fn a_host_that_takes_no_levels_costs_nobody_the_lanes() {
    let mut world = World::of("torus:4x4:2");
    world.agents.lanes = Some(8);
    world.walks_links = true;
    world.agents.level.push(world.host(7));
    world.start(0, Config::default());
    world.run(10 * SECOND);
    let events = world.take_events();
    let is_named =
        |event: &Event| matches!(event, Event::Incomplete(what, _) if what.contains("SlToVl"));
    assert!(events.iter().any(|(_, event)| is_named(event)), "{events:?}");
    for (_, event) in events {
        if let Event::SetUp(summary) = event {
            assert!(summary.lanes == 8 && summary.engine == Engine::Balanced, "{summary:?}");
        }
    }
    world.check_paths_to_hosts("with lanes");
    assert_eq!(world.counters(0).heavy_sweeps, 2, "it is not asked for ever");
}

/// Links die and come back, also while tables are written. Connections that are up keep their
/// level.
#[test]
fn no_state_in_between_has_a_cycle_in_any_lane_over_seeds() {
    let (mut with_lanes, mut fallbacks) = (0, 0);
    for seed in 0..48 {
        let mut generator = Pcg32::new(seed, 33);
        let texts = ["torus:4x4:1", "torus:5x3:2", "random:10x4x2:3", "dragonfly:3x1x1"];
        let engines = [Engine::Balanced, Engine::MinHop, Engine::DimensionOrder];
        let text = texts[seed as usize % texts.len()];
        let engine = engines[generator.next_u32() as usize % engines.len()];
        let lanes = [2, 4, 8][generator.next_u32() as usize % 3];
        let mut world = managed(text, engine, lanes);
        world.context = format!("seed {seed}, {text}, {engine}, {lanes} lanes");
        let mut dead = Vec::new();
        for _ in 0..10 {
            let links = world.links_between_switches();
            if generator.next_u32().is_multiple_of(3) && !dead.is_empty() {
                world.join(dead.swap_remove(generator.next_u32() as usize % dead.len()));
            } else if let Some(link) = world.spare(&links, generator.next_u32() as usize) {
                dead.push(world.cut(link));
            }
            world.step(generator.next_u32() % 300);
            if generator.next_u32().is_multiple_of(2) {
                world.run(SECOND);
            }
        }
        world.run(20 * SECOND);
        world.check_paths_to_hosts("in the end");
        assert!(world.walks > 0);
        for summary in set_ups(&mut world) {
            with_lanes += usize::from(summary.lanes > 1);
            fallbacks += usize::from(matches!(summary.how, How::Fallback(_)));
        }
    }
    println!("{with_lanes} set-ups with lanes, {fallbacks} by up-down in place of another engine");
    assert!(with_lanes > 100 && fallbacks > 0, "{with_lanes} {fallbacks}");
}
