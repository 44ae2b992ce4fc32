//! Managers that stay, on simulated fabrics that change under them. After every block of a
//! forwarding table that a switch takes, all tables are walked: no packet goes round, and no cycle
//! of channels wait for each other.

mod agents;
mod world;

use std::time::Duration;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use subnet::mad::Attribute;
use subnet::manager::event::{Event, Trouble};
use subnet::manager::work::How;
use subnet::manager::{Change, Config};
use subnet::sm_info::Standing;
use topology::routes::Engine;
use world::World;

const SECOND: Duration = Duration::from_secs(1);

fn config(engine: Engine, priority: u8) -> Config {
    Config { engine, priority, ..Config::default() }
}

fn set_ups(world: &mut World) -> Vec<subnet::manager::event::Summary> {
    set_ups_of(&world.take_events())
}

#[test]
fn a_dead_link_is_routed_around_by_few_blocks_and_comes_back() {
    let cases = [
        ("fat-tree:8", Engine::Balanced),
        ("fat-tree:8", Engine::FatTree),
        ("leaf-spine:10x6x24", Engine::Balanced),
        ("dragonfly:4x2x2", Engine::UpDown),
        ("torus:4x4:8", Engine::UpDown),
        ("random:12x4x8:1", Engine::UpDown),
    ];
    for (text, engine) in cases {
        let mut world = World::of(text);
        world.start(0, config(engine, 0));
        world.run(SECOND);
        assert_eq!(world.standing(0), Standing::Master, "{text}");
        let before = set_ups(&mut world);
        assert!(before.len() == 1 && before[0].how == How::Computed, "{text}: {before:?}");
        world.check_all_paths(text);
        let tables = world.tables();
        for link in world.links_between_switches().into_iter().step_by(5).take(4) {
            let link = world.cut(link);
            world.run(SECOND);
            let mended = set_ups(&mut world);
            assert_eq!(mended.len(), 1, "{text}: {mended:?}");
            // Other ranks may be needed for all Up*/Down* paths.
            assert!(mended[0].how == How::Mended || engine == Engine::UpDown, "{text}");
            assert!(mended[0].changed < before[0].changed, "{text}: {mended:?} after {before:?}");
            println!("{text} {engine}: {mended:?}");
            world.check_all_paths(text);
            world.join(link);
            world.run(SECOND);
            set_ups(&mut world);
            world.check_all_paths(text);
            // The same fabric has the same tables again.
            assert!(world.tables() == tables || engine == Engine::Balanced, "{text}");
        }
    }
}

/// Links and switches die and come back at random, also while tables are written.
#[test]
fn no_state_in_between_has_a_loop_or_a_cycle_over_seeds() {
    for seed in 0..60 {
        let mut generator = Pcg32::new(seed, 7);
        let texts = ["fat-tree:4", "torus:4x4:1", "random:10x4x2:3", "leaf-spine:5x3x3"];
        let engines = [Engine::Balanced, Engine::UpDown, Engine::MinHop, Engine::DimensionOrder];
        let text = texts[seed as usize % texts.len()];
        let engine = engines[generator.next_u32() as usize % engines.len()];
        let mut world = World::of(text);
        world.context = format!("seed {seed}, {text}, {engine}");
        world.start(0, config(engine, 0));
        world.run(SECOND);
        world.walks_links = true;
        let mut dead = Vec::new();
        for _ in 0..12 {
            let links = world.links_between_switches();
            if generator.next_u32().is_multiple_of(3) && !dead.is_empty() {
                world.join(dead.swap_remove(generator.next_u32() as usize % dead.len()));
            } else if let Some(link) = world.spare(&links, generator.next_u32() as usize) {
                dead.push(world.cut(link));
            }
            // Sometimes the next change comes in the middle of a sweep.
            world.step(generator.next_u32() % 200);
            if generator.next_u32().is_multiple_of(2) {
                world.run(SECOND);
            }
        }
        world.run(20 * SECOND);
        world.check_paths_to_hosts("in the end");
        assert!(world.walks > 0);
    }
}

#[test]
fn a_switch_that_dies_is_left_out_and_taken_back() {
    let mut world = World::of("fat-tree:4");
    world.start(0, config(Engine::Balanced, 0));
    world.run(SECOND);
    set_ups(&mut world);
    let switch = world.agents.topology.switches().next().expect("a core switch");
    let links = world.cut_all(switch);
    world.run(SECOND);
    let lost = set_ups(&mut world);
    assert_eq!(lost.last().map(|summary| summary.switches), Some(19), "{lost:?}");
    world.check_all_paths("without a core switch");
    links.into_iter().for_each(|link| world.join(link));
    world.run(2 * SECOND);
    let found = set_ups(&mut world);
    assert_eq!(found.last().map(|summary| summary.switches), Some(20), "{found:?}");
    world.check_all_paths("with all");
}

#[test]
fn lids_stay_over_sweeps_restarts_and_other_managers() {
    let mut world = World::of("leaf-spine:4x2x3");
    world.start(0, config(Engine::Balanced, 0));
    world.run(SECOND);
    let before = world.lids();
    let remembered = world.remembered(0);
    assert_eq!(remembered.len(), before.len());
    // A fabric that was powered off has no LIDs of its own.
    let mut world = World::of("leaf-spine:4x2x3");
    let moved = remembered.iter().map(|(place, lid)| (*place, lid + 100)).collect();
    world.start_with(0, config(Engine::Balanced, 0), moved);
    world.run(SECOND);
    let after: Vec<u16> = world.lids().into_keys().collect();
    assert_eq!(after, before.keys().map(|lid| lid + 100).collect::<Vec<_>>());
    // The next manager remembers others, and leaves ports in use what they have.
    world.kill(0);
    world.start_with(5, config(Engine::Balanced, 0), remembered);
    world.run(SECOND);
    assert_eq!(world.standing(5), Standing::Master);
    assert_eq!(world.lids().into_keys().collect::<Vec<_>>(), after);
}

#[test]
fn an_lmc_gives_each_port_several_lids_that_lead_there_by_different_paths() {
    // Shape, and the spines or uplinks that a leaf has.
    for (text, engine, ways) in [
        ("leaf-spine:4x4x3", Engine::Balanced, 4),
        ("leaf-spine:4x2x3", Engine::Balanced, 2),
        ("leaf-spine:4x4x3", Engine::UpDown, 4),
        ("fat-tree:4", Engine::FatTree, 2),
    ] {
        let mut world = World::of(text);
        world.start(0, Config { lmc: 2, ..config(engine, 0) });
        world.run(SECOND);
        world.check_all_paths("LMC 2");
        check_ways(&world, ways);
        // It stays so around a dead link, also while tables are written.
        world.walks_links = true;
        let link = world.links_between_switches().pop().expect("a link");
        let link = world.cut(link);
        world.run(SECOND);
        world.check_all_paths("LMC 2 around a dead link");
        world.join(link);
        world.run(2 * SECOND);
        world.check_all_paths("LMC 2 again");
        check_ways(&world, ways);
    }
}

/// How many ports a leaf sends to the LIDs of a host by that is at another one.
fn check_ways(world: &World, ways: usize) {
    let lids = world.lids();
    for from in world.hosts() {
        let mut by_host = std::collections::BTreeMap::<_, std::collections::BTreeSet<_>>::new();
        for (lid, to) in lids.iter().filter(|(_, to)| to.1 > 0 && to.0 != from.0) {
            if let Some((_, port)) = world.first_hop(from, *lid) {
                by_host.entry(to.0).or_default().insert(port);
            }
        }
        assert!(!by_host.is_empty());
        let most = by_host.values().map(|ports| ports.len()).max();
        let far = by_host.values().filter(|ports| ports.len() == ways).count();
        assert!(most == Some(ways) && far * 2 >= by_host.len(), "{}: {by_host:?}", world.context);
    }
}

#[test]
fn nodes_that_are_silent_for_a_while_keep_their_place_in_the_tables() {
    for silent in ["leaf3", "spine1", "host4", "host11"] {
        let mut world = World::of("leaf-spine:4x3x3");
        world.start(0, config(Engine::Balanced, 0));
        world.run(SECOND);
        let (tables, lids) = (world.tables(), world.lids());
        let node = world.agents.topology.named(silent).expect("a node");
        world.agents.silent.push(node);
        // Another link makes it sweep, if nothing else does.
        let host = world.agents.topology.named("host7").expect("a host");
        let links = world.cut_all(host);
        world.run(2 * SECOND);
        links.into_iter().for_each(|link| world.join(link));
        world.run(30 * SECOND);
        let events = world.take_events();
        let is_named = |(_, event): &(usize, Event)| {
            matches!(event, Event::Noticed(Change::Silent(_)) | Event::Incomplete(..))
        };
        assert!(events.iter().any(is_named), "{silent}: {events:?}");
        world.check_all_paths(silent);
        world.agents.silent.clear();
        world.run(30 * SECOND);
        assert_eq!((world.tables(), world.lids()), (tables, lids), "{silent}");
        world.check_all_paths("all respond again");
    }
}

/// A switch that is taken for another one, or for one that nobody knows, keeps its table.
#[test]
fn a_switch_with_another_guid_does_not_end_it() {
    for other in [0x1000, 0x1004, 0x99_9999] {
        let mut world = World::of("leaf-spine:4x3x3");
        world.context = format!("GUID {other:#x}");
        world.start(0, config(Engine::Balanced, 0));
        world.run(SECOND);
        let leaf = world.agents.topology.named("leaf3").expect("a leaf");
        let lids = world.lids();
        world.agents.impostors.insert(leaf, other);
        let host = world.agents.topology.named("host4").expect("a host");
        let links = world.cut_all(host);
        world.run(2 * SECOND);
        links.into_iter().for_each(|link| world.join(link));
        world.run(30 * SECOND);
        assert_eq!(world.standing(0), Standing::Master);
        world.check_paths_to_hosts("with an impostor");
        world.agents.impostors.clear();
        let links = world.cut_all(host);
        world.run(2 * SECOND);
        links.into_iter().for_each(|link| world.join(link));
        world.run(60 * SECOND);
        world.check_all_paths("it is itself again");
        let hosts = |lids: std::collections::BTreeMap<u16, (_, u8)>| -> Vec<u16> {
            lids.into_iter().filter(|(_, (_, port))| *port > 0).map(|(lid, _)| lid).collect()
        };
        assert_eq!(hosts(world.lids()), hosts(lids), "hosts keep their LIDs");
    }
}

#[test]
fn a_fabric_that_cannot_be_routed_keeps_its_tables() {
    let mut world = World::of("leaf-spine:4x3x3");
    world.start(0, config(Engine::FatTree, 0));
    world.run(SECOND);
    let tables = world.tables();
    // A switch that holds four LIDs.
    world.shrink_table("spine1", 4);
    let links = world.cut_all(world.agents.topology.named("host4").expect("a host"));
    links.into_iter().for_each(|link| world.join(link));
    world.run(5 * SECOND);
    let events = world.take_events();
    let is_kept =
        |(_, event): &(usize, Event)| matches!(event, Event::Kept(Trouble::Unroutable(_)));
    assert!(events.iter().any(is_kept), "{events:?}");
    assert_eq!(world.tables(), tables);
    assert!(world.counters(0).failed_sweeps > 0);
}

#[test]
fn traps_are_repressed_and_forged_ones_cost_little() {
    let mut world = World::of("leaf-spine:4x3x3");
    world.start(0, config(Engine::Balanced, 0));
    world.run(SECOND);
    let lid = world.lid_of_switch("leaf1");
    let repressed = world.trap(0, lid, 128);
    assert!(repressed.is_some_and(|mad| mad[3] == 0x07 && mad[1] == 0x01), "{repressed:?}");
    assert_eq!(world.trap(0, 4_000, 128), None, "nobody has this LID");
    assert_eq!(world.trap(0, lid, 257), None, "no trap of subnet management");
    assert_eq!(world.counters(0).ignored_traps, 2);
    let before = world.counters(0);
    for _ in 0..1_000 {
        world.trap(0, lid, 128);
        world.run(Duration::from_millis(10));
    }
    let after = world.counters(0);
    assert_eq!(after.traps - before.traps, 1_000);
    let looks = after.trap_looks - before.trap_looks;
    assert!((1..20).contains(&looks), "{looks} looks in ten seconds");
    assert_eq!(after.heavy_sweeps, before.heavy_sweeps);
}

#[test]
fn responses_that_are_lost_repeated_or_long_past_change_nothing() {
    for seed in 0..20 {
        let mut world = World::of("fat-tree:4");
        world.context = format!("seed {seed}");
        (world.replays, world.loses) = (seed % 2 == 0, 40 + seed * 13);
        world.start(0, config(Engine::Balanced, 0));
        world.run(60 * SECOND);
        let links = world.links_between_switches();
        let link = world.cut(links[seed as usize % links.len()]);
        world.run(60 * SECOND);
        world.check_paths_to_hosts("without a link");
        world.join(link);
        world.run(120 * SECOND);
        world.check_paths_to_hosts("with all links");
        assert!(seed % 2 == 1 || world.counters(0).unasked > 0);
    }
}

#[test]
fn what_is_no_datagram_for_it_is_counted() {
    let mut world = World::of("leaf-spine:2x1x1");
    world.start(0, config(Engine::Balanced, 0));
    world.run(SECOND);
    let mut generator = Pcg32::new(3, 3);
    let before = world.counters(0);
    for length in [0, 1, 63, 255, 257, 4_096] {
        world.throw(0, &vec![0x81; length]);
    }
    assert_eq!(world.counters(0).malformed - before.malformed, 6);
    for _ in 0..20_000 {
        let mut mad = [0_u8; 256];
        mad.iter_mut().for_each(|byte| *byte = generator.next_u32() as u8);
        // Most would be discarded by their first bytes.
        let pick =
            |from: &[u8], generator: &mut Pcg32| from[generator.next_u32() as usize % from.len()];
        mad[..4].copy_from_slice(&[
            1,
            pick(&[0x01, 0x03, 0x81], &mut generator),
            pick(&[1, 2], &mut generator),
            pick(&[0x01, 0x02, 0x05, 0x07, 0x81], &mut generator),
        ]);
        mad[16..18].copy_from_slice(&[0, pick(&[0x02, 0x11, 0x15, 0x20], &mut generator)]);
        world.throw(0, &mad);
        world.step(1);
    }
    world.run(20 * SECOND);
    assert_eq!(world.standing(0), Standing::Master);
    world.check_all_paths("after noise");
}

/// A cable of the manager's own node is unplugged for half a minute.
#[test]
fn the_link_of_the_manager_goes_down_and_comes_back() {
    let mut world = World::of("leaf-spine:4x3x3");
    world.start(0, config(Engine::Balanced, 0));
    world.run(SECOND);
    let (tables, lids) = (world.tables(), world.lids());
    set_ups(&mut world);
    let host = world.host(0);
    let links = world.cut_all(host);
    world.run(30 * SECOND);
    let events = world.take_events();
    let is_down = |(_, event): &(usize, Event)| *event == Event::Kept(Trouble::PortDown);
    assert!(events.iter().any(is_down), "{events:?}");
    assert!(!events.iter().any(|(_, event)| matches!(event, Event::SetUp(_))), "{events:?}");
    // Meanwhile another link dies.
    let link = world.links_between_switches()[0];
    let link = world.cut(link);
    links.into_iter().for_each(|link| world.join(link));
    world.run(30 * SECOND);
    assert_eq!(world.standing(0), Standing::Master);
    world.check_all_paths("the manager is back");
    world.join(link);
    world.run(SECOND);
    world.check_all_paths("all links are up");
    assert_eq!(world.lids(), lids);
    assert_eq!(world.tables().len(), tables.len());
}

/// Nothing can be set up: sweeps are repeated at growing intervals.
#[test]
fn sweeps_that_fail_from_the_start_back_off() {
    for is_down in [false, true] {
        let mut world = World::of("leaf-spine:2x1x2");
        world.shrink_table("spine0", 4);
        if is_down {
            let host = world.host(0);
            world.cut_all(host);
        }
        world.start(0, config(Engine::Balanced, 0));
        // A millisecond passes where there is nothing to send.
        world.step(20_000);
        let failed = world.counters(0).failed_sweeps;
        assert!((2..10).contains(&failed), "{failed} sweeps in at most 20 s");
    }
}

/// Light sweeps find it later, since setting a switch up clears nothing that was not read.
#[test]
fn a_link_that_dies_unnoticed_in_the_middle_of_a_sweep_is_found_by_the_next() {
    for datagrams in (0..300).step_by(3) {
        let mut world = World::of("leaf-spine:4x3x3");
        world.context = format!("after {datagrams} datagrams");
        let host = world.agents.topology.named("host11").expect("a host");
        let first = world.cut_all(host);
        world.start(0, config(Engine::Balanced, 0));
        world.run(SECOND);
        // It gets a LID behind the last one, which all switches are told.
        first.into_iter().for_each(|link| world.join(link));
        world.step(datagrams);
        // No shortest route of the manager leads over the last link, so nothing that it sends gets
        // lost.
        let link = world.links_between_switches().pop().expect("a link");
        world.cut_silently(link);
        world.run(25 * SECOND);
        world.check_paths_to_hosts("after a light sweep");
    }
}

/// A node with another GUID says that it has the LID of a port that is away.
#[test]
fn the_lid_of_a_port_that_is_away_is_not_given_to_a_stranger() {
    let mut world = World::of("leaf-spine:4x2x3");
    world.start(0, config(Engine::Balanced, 0));
    world.run(SECOND);
    let [stranger, away] = ["host7", "host11"].map(|name| world.agents.topology.named(name));
    let [stranger, away] = [stranger, away].map(|node| node.expect("a host"));
    let lid = |world: &World, node| {
        let lids = world.lids();
        lids.into_iter().find(|(_, place)| place.0 == node).expect("it has one").0
    };
    let wanted = lid(&world, away);
    let links = [away, stranger].map(|node| world.cut_all(node));
    world.run(SECOND);
    let key = (away, Attribute::PortInfo.id(), 1);
    let info = world.agents.written.remove(&key).expect("it was set up");
    world.agents.written.insert((stranger, Attribute::PortInfo.id(), 1), info);
    world.agents.impostors.insert(stranger, 0x77);
    let [of_away, of_stranger] = links;
    of_stranger.into_iter().for_each(|link| world.join(link));
    world.run(5 * SECOND);
    assert_ne!(lid(&world, stranger), wanted);
    of_away.into_iter().for_each(|link| world.join(link));
    world.run(5 * SECOND);
    assert_eq!(lid(&world, away), wanted);
    world.check_all_paths("with a stranger");
}

/// What a node does not say any more is taken from before; a new switch that says nothing is left
/// out.
#[test]
fn nodes_that_only_say_who_they_are_keep_their_place_and_end_no_sweep() {
    for (curt, is_new) in [("leaf3", false), ("spine1", false), ("host11", false), ("spine1", true)]
    {
        let mut world = World::of("leaf-spine:4x3x3");
        world.context = format!("{curt}, new: {is_new}");
        let node = world.agents.topology.named(curt).expect("a node");
        if is_new {
            world.agents.curt.push(node);
        }
        world.start(0, config(Engine::Balanced, 0));
        world.run(30 * SECOND);
        let lids = world.lids();
        world.agents.curt.push(node);
        let host = world.agents.topology.named("host4").expect("a host");
        let links = world.cut_all(host);
        world.run(2 * SECOND);
        links.into_iter().for_each(|link| world.join(link));
        world.run(30 * SECOND);
        let events = world.take_events();
        let is_named = |(_, event): &(usize, Event)| matches!(event, Event::Incomplete(..));
        assert!(events.iter().any(is_named), "{events:?}");
        if is_new {
            assert_eq!(world.standing(0), Standing::Master);
            assert!(!lids.is_empty() && !set_ups_of(&events).is_empty(), "the others are set up");
        } else {
            world.check_all_paths("nothing is lost");
            assert_eq!(world.lids(), lids, "{}", world.context);
        }
        world.agents.curt.clear();
        world.run(30 * SECOND);
        world.check_all_paths("it responds again");
    }
}

fn set_ups_of(events: &[(usize, Event)]) -> Vec<subnet::manager::event::Summary> {
    let summary = |event: &(usize, Event)| match &event.1 {
        Event::SetUp(summary) => Some(*summary),
        _ => None,
    };
    events.iter().filter_map(summary).collect()
}

/// Others get their new entries as far as that closes no loop and no cycle, which is walked after
/// every block.
#[test]
fn a_switch_that_takes_no_table_for_a_while_does_no_harm_over_seeds() {
    for seed in 0..40 {
        let mut generator = Pcg32::new(seed, 21);
        let text = ["torus:4x4:1", "random:10x4x2:3", "fat-tree:4"][seed as usize % 3];
        let mut world = World::of(text);
        world.context = format!("seed {seed}, {text}");
        world.start(0, config(Engine::UpDown, 0));
        world.run(SECOND);
        let switches: Vec<_> = world.agents.topology.switches().collect();
        let stubborn = switches[generator.next_u32() as usize % switches.len()];
        world.agents.stubborn.push(stubborn);
        let links = world.links_between_switches();
        let link = world.spare(&links, generator.next_u32() as usize).expect("a spare link");
        let link = world.cut(link);
        world.run(20 * SECOND);
        world.join(link);
        world.run(20 * SECOND);
        world.agents.stubborn.clear();
        world.run(20 * SECOND);
        world.check_paths_to_hosts("it takes tables again");
    }
}
