//! M_Keys: ports that have one take nothing from whoever has another, and what they refuse is
//! counted and reported.

mod agents;
mod world;

use std::time::Duration;

use subnet::mad::{Attribute, KeyGuard};
use subnet::manager::Config;
use subnet::manager::event::{Event, Refusal};
use topology::graph::Kind;
use world::World;

const SECOND: Duration = Duration::from_secs(1);
const KEY: u64 = 0x1122_3344_5566_7788;

fn config(m_key: u64, protection: u8) -> Config {
    Config { m_key, guard: Some((protection, 60)), ..Config::default() }
}

fn check_guards(world: &World, expected: KeyGuard) {
    for (id, node) in world.agents.topology.nodes() {
        let ports = if node.kind() == Kind::Switch { 0..=0 } else { 1..=node.ports() };
        for port in ports {
            let info = world.agents.written[&(id, Attribute::PortInfo.id(), port.into())];
            assert_eq!(KeyGuard::parse(&info), expected, "{} port {port}", node.name());
        }
    }
}

#[test]
fn ports_get_a_key_and_whoever_has_another_changes_nothing() {
    for protection in [0, 1, 2] {
        let mut world = World::of("leaf-spine:3x2x2");
        world.start(0, config(KEY, protection));
        world.run(SECOND);
        world.check_all_paths("guarded");
        check_guards(&world, KeyGuard { key: KEY, protection, lease_s: 60 });
        assert_eq!(world.agents.violations, 0);
        // Rerouting goes on with the key.
        let link = world.links_between_switches().pop().expect("a link");
        let link = world.cut(link);
        world.run(SECOND);
        world.check_all_paths("around a dead link");
        world.join(link);
        world.run(2 * SECOND);
        assert_eq!(world.agents.violations, 0, "the manager has the key");
        // The manager is gone, and another one has a wrong key, or none.
        let before = world.agents.written.clone();
        world.kill(0);
        for wrong in [0, KEY + 1] {
            world.take_events();
            let refused = world.agents.violations;
            world.start(3, config(wrong, 0));
            world.run(20 * SECOND);
            world.kill(3);
            assert!(world.agents.violations > refused, "protection {protection}, {wrong:#x}");
            assert_eq!(world.agents.written, before, "protection {protection}, {wrong:#x}");
            let events = world.take_events();
            let warned = events.iter().find(|(_, event)| {
                matches!(event, Event::Incomplete(..) | Event::Kept(_)) && event.hint().is_some()
            });
            assert!(warned.is_some(), "protection {protection}, {wrong:#x}: {events:?}");
        }
        world.start(3, config(KEY, protection));
        world.run(2 * SECOND);
        world.check_all_paths("by a manager that has the key");
    }
}

#[test]
fn traps_of_wrong_keys_are_counted_and_reported_now_and_then() {
    let mut world = World::of("leaf-spine:3x2x2");
    world.start(0, config(KEY, 2));
    world.run(SECOND);
    let lid = world.lid_of_switch("leaf1");
    let guid = world.agents.topology.named("leaf1").map(agents::Agents::guid).expect("a leaf");
    let mut reported = 0;
    for _ in 0..300 {
        let repressed = world.trap(0, lid, 256).expect("TrapRepress");
        assert_eq!(repressed[3], 0x07);
        world.run(Duration::from_millis(10));
        for (_, event) in world.take_events() {
            if let Event::Refused(Refusal::WrongManagementKey(who, 0), _) = event {
                assert!(who == guid && event.hint().is_some());
                reported += 1;
            }
        }
    }
    assert_eq!(world.counters(0).wrong_keys, 300);
    assert!((2..=4).contains(&reported), "{reported} in three seconds");
    assert_eq!(world.counters(0).heavy_sweeps, 1, "it is no reason to sweep");
}
