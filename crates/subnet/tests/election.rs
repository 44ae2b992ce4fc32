//! Several managers on one fabric: one is master, whoever dies, joins, or was cut off; and the
//! tables stay whole, which is walked after every block that a switch takes.

mod agents;
mod world;

use std::time::Duration;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use subnet::manager::event::{Event, Refusal, Why};
use subnet::manager::{Config, Peer};
use subnet::sm_info::{Control, SmInfo, Standing};
use topology::graph::Kind;
use world::World;

const SECOND: Duration = Duration::from_secs(1);

fn priority(priority: u8) -> Config {
    Config { priority, ..Config::default() }
}

fn masters(world: &World, places: &[usize]) -> Vec<usize> {
    let is_master = |at: &&usize| world.standing(**at) == Standing::Master;
    places.iter().filter(is_master).copied().collect()
}

#[test]
fn priority_decides_and_then_the_lower_guid() {
    for (first, second, master) in [(0, 1, 5), (1, 0, 2), (3, 3, 2)] {
        for together in [true, false] {
            let mut world = World::of("fat-tree:4");
            world.start(2, priority(first));
            if !together {
                world.run(SECOND);
            }
            world.start(5, priority(second));
            world.run(30 * SECOND);
            let found = masters(&world, &[2, 5]);
            // A master of the same priority stays, whatever its GUID.
            assert_eq!(found, [master], "{first} {second} {together}");
            let other = if master == 2 { 5 } else { 2 };
            assert_eq!(world.standing(other), Standing::Standby);
            world.check_all_paths("with a master and a standby");
        }
    }
}

#[test]
fn a_standby_takes_over_when_the_master_dies_in_the_middle_of_a_sweep() {
    for seed in 0..100 {
        let mut generator = Pcg32::new(seed, 11);
        let text = ["fat-tree:4", "torus:4x4:1", "leaf-spine:5x3x3"][seed as usize % 3];
        let mut world = World::of(text);
        world.context = format!("seed {seed}, {text}");
        world.start(1, priority(2));
        world.start(6, priority(1));
        // Some die in their first sweep, some while they reroute.
        if seed % 2 == 0 {
            world.step(generator.next_u32() % 1_500);
        } else {
            world.run(5 * SECOND);
            let links = world.links_between_switches();
            let link = world.spare(&links, generator.next_u32() as usize).expect("a spare link");
            world.cut(link);
            world.step(generator.next_u32() % 150);
        }
        world.kill(1);
        world.run(60 * SECOND);
        assert_eq!(world.standing(6), Standing::Master, "{}", world.context);
        assert!(world.walks > 0);
        world.check_paths_to_hosts("after the takeover");
    }
}

#[test]
fn a_better_manager_gets_the_fabric_handed_over_and_gives_it_back_when_it_dies() {
    let mut world = World::of("leaf-spine:4x2x3");
    world.start(0, priority(1));
    world.run(SECOND);
    let tables = world.tables();
    world.start(7, priority(9));
    world.run(30 * SECOND);
    assert_eq!(masters(&world, &[0, 7]), [7]);
    let events = world.take_events();
    let is_handover = |(at, event): &(usize, Event)| {
        *at == 7 && matches!(event, Event::Became(Standing::Discovering, Why::HandedOver(_)))
    };
    assert!(events.iter().any(is_handover), "{events:?}");
    assert_eq!(world.tables(), tables, "the same fabric has the same tables");
    world.kill(7);
    world.run(30 * SECOND);
    assert_eq!(world.standing(0), Standing::Master);
    world.check_all_paths("after both");
}

#[test]
fn of_two_masters_after_a_partition_heals_one_remains() {
    for seed in 0..20 {
        let mut world = World::of("torus:4x4:1");
        world.context = format!("seed {seed}");
        world.start(1, priority((seed % 3) as u8));
        world.start(14, priority(1));
        world.run(20 * SECOND);
        let topology = &world.agents.topology;
        let switches: Vec<_> = topology.switches().collect();
        let half = |node| switches.iter().position(|switch| *switch == node).map(|at| at < 8);
        let between: Vec<_> = topology
            .links()
            .filter(|(_, link)| {
                let [a, b] = link.ends.map(|end| end.node);
                topology.node(a).kind() == Kind::Switch
                    && topology.node(b).kind() == Kind::Switch
                    && half(a) != half(b)
            })
            .map(|(id, _)| id)
            .collect();
        let links: Vec<_> = between.into_iter().map(|link| world.cut(link)).collect();
        world.run(60 * SECOND);
        assert_eq!(masters(&world, &[1, 14]), [1, 14], "seed {seed}: one in each half");
        world.take_events();
        let mut generator = Pcg32::new(seed, 3);
        for link in links {
            world.join(link);
            world.step(generator.next_u32() % 300);
        }
        world.run(120 * SECOND);
        let expected = if seed % 3 == 0 { 14 } else { 1 };
        let events = world.take_events();
        assert_eq!(masters(&world, &[1, 14]), [expected], "seed {seed}: {events:#?}");
        world.check_paths_to_hosts("healed");
    }
}

#[test]
fn control_messages_of_strangers_are_refused() {
    let mut world = World::of("leaf-spine:4x2x3");
    world.start(0, Config { sm_key: 77, ..priority(1) });
    world.start(5, Config { sm_key: 77, ..priority(0) });
    world.run(20 * SECOND);
    world.take_events();
    let known = world.manager(5).guid().expect("it has begun");
    let send = |world: &mut World, at: usize, guid, key, control: Control| {
        let standing = Standing::Master;
        let info = SmInfo { guid, key, count: 0, priority: 15, standing };
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 0x01, 1, 0x02]);
        mad[17] = 0x20;
        mad[20..24].copy_from_slice(&control.modifier().to_be_bytes());
        mad[64..128].copy_from_slice(&info.emit());
        let peer = Peer::Lid { lid: 3, queue_pair: 0, service_level: 0 };
        let now = world.now;
        world.manager(at).handle_datagram(now, peer, &mad);
        let reply = world.manager(at).poll_transmit(now).expect("a response");
        assert_eq!((reply.peer, reply.mad[3]), (peer, 0x81));
        u16::from_be_bytes([reply.mad[4], reply.mad[5]])
    };
    let all = [Control::Handover, Control::Disable, Control::Standby, Control::Discover];
    for control in all {
        assert_ne!(send(&mut world, 5, 0xbad, 77, control), 0, "{control:?} of nobody");
        assert_ne!(send(&mut world, 5, 0x1000, 0, control), 0, "{control:?} with another key");
        // That another gives way is no harm to a master: it makes one sweep.
        let refused = send(&mut world, 0, 0xbad, 77, control) != 0;
        assert_eq!(refused, control != Control::Handover, "{control:?} of nobody");
    }
    // A master is not to be disabled, even by a manager that it knows.
    assert_ne!(send(&mut world, 0, known, 77, Control::Disable), 0);
    world.run(30 * SECOND);
    assert_eq!(masters(&world, &[0, 5]), [0]);
    assert_eq!(world.counters(0).refused_controls, 4);
    assert!(world.counters(0).heavy_sweeps <= 4);
    assert_eq!(world.counters(5).refused_controls, 8);
    let events = world.take_events();
    let is_refusal = |(_, event): &(usize, Event)| {
        matches!(event, Event::Refused(Refusal::Unknown(0xbad) | Refusal::WrongKey(_), _))
    };
    // One of each manager, since all came at once.
    assert_eq!(events.iter().filter(|event| is_refusal(event)).count(), 2, "{events:?}");
    assert_ne!(send(&mut world, 5, 0xbad, 77, Control::Disable), 0);
    world.run(SECOND);
    let again = world.take_events();
    let refused =
        |(_, event): &(usize, Event)| *event == Event::Refused(Refusal::Unknown(0xbad), 7);
    assert!(again.iter().any(refused), "{again:?}");
}

fn foreign(priority: u8, key: u64, standing: Standing) -> SmInfo {
    SmInfo { guid: 0xffff_0000, key, count: 1, priority, standing }
}

#[test]
fn a_manager_on_a_switch_is_found() {
    let mut world = World::of("leaf-spine:4x2x3");
    let spine = world.agents.topology.named("spine1").expect("a spine");
    world.agents.managers.push(spine);
    world.foreign = Some((spine, foreign(3, 1, Standing::Master)));
    world.start(0, priority(0));
    world.run(10 * SECOND);
    assert_eq!(world.standing(0), Standing::Standby);
}

#[test]
fn a_manager_with_another_key_takes_no_part_in_the_election() {
    // 0 is what opensm tells those whom it does not take for the master.
    for (key, expected) in [(78, Standing::Master), (0, Standing::Standby)] {
        let mut world = World::of("leaf-spine:4x2x3");
        let host = world.host(7);
        world.agents.managers.push(host);
        world.foreign = Some((host, foreign(9, key, Standing::Master)));
        world.start(0, Config { sm_key: 77, ..priority(1) });
        world.run(10 * SECOND);
        assert_eq!(world.standing(0), expected, "key {key}");
        if expected == Standing::Master {
            world.check_all_paths("beside a manager with another key");
        }
    }
}

#[test]
fn a_rival_that_does_not_give_way_is_waited_for_once() {
    let mut world = World::of("leaf-spine:4x2x3");
    world.start(0, priority(5));
    world.run(SECOND);
    let host = world.host(7);
    world.agents.managers.push(host);
    world.foreign = Some((host, foreign(0, 1, Standing::Master)));
    for wait in [60 * SECOND, SECOND] {
        let link = world.links_between_switches()[0];
        let link = world.cut(link);
        world.run(SECOND);
        world.join(link);
        world.run(wait);
        assert_eq!(world.standing(0), Standing::Master);
        world.check_all_paths("in spite of the rival");
    }
}
