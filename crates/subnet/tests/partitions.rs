//! Partitions: what ports hold, what programs are told and refused, and that all of it follows
//! ports that come and go.

mod agents;
mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use agents::Agents;
use subnet::mad::{Attribute, enforces_partitions};
use subnet::manager::event::Event;
use subnet::manager::{Config, Manager, Peer};
use subnet::partitions::Partitions;
use topology::graph::NodeId;
use world::World;

const SECOND: Duration = Duration::from_secs(1);
const PATH: u16 = 0x35;
const MEMBER: u16 = 0x38;

/// Host 0 manages; 1 and 2 are full members of 1, 3 a limited one, 4 and 5 limited ones of 2, 6 a
/// full one of both.
fn managed(enforces: bool) -> World {
    let mut world = World::of("leaf-spine:3x2x3");
    let guid = |at| format!("{:#x}", Agents::port_guid(world.host(at), 1));
    let text = format!(
        "one=0x8001, ipoib, defmember=full : {}, {},\n {}=limited, {};\ntwo=2 : {}, {}, {}=full;",
        guid(1),
        guid(2),
        guid(3),
        guid(6),
        guid(4),
        guid(5),
        guid(6)
    );
    let partitions = Partitions::parse(&text).expect(&text);
    world.start_as(0, |transaction| {
        let manager = Manager::new(Config::default(), BTreeMap::new(), transaction);
        manager.with_partitions(partitions, enforces)
    });
    world.run(SECOND);
    world
}

fn lid(world: &World, host: usize) -> u16 {
    let node = world.host(host);
    *world.lids().iter().find(|(_, place)| place.0 == node).expect("it has one").0
}

/// Status and P_Key of a path between two hosts; 0 asks for none.
fn path(world: &mut World, from: usize, to: usize, key: u16) -> (u16, u16) {
    let [from, to] = [from, to].map(|host| lid(world, host));
    let mut fields = vec![(40, to), (42, from)];
    let mut mask = 1 << 4 | 1 << 5;
    if key > 0 {
        fields.push((50, key));
        mask |= 1 << 13;
    }
    let reply = ask(world, from, (1, PATH), mask, &fields);
    (u16::from_be_bytes([reply[4], reply[5]]), u16::from_be_bytes([reply[106], reply[107]]))
}

fn ask(
    world: &mut World,
    from: u16,
    what: (u8, u16),
    mask: u64,
    fields: &[(usize, u16)],
) -> [u8; 256] {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x03, 2, what.0]);
    mad[16..18].copy_from_slice(&what.1.to_be_bytes());
    mad[48..56].copy_from_slice(&mask.to_be_bytes());
    for (at, value) in fields {
        mad[56 + at..58 + at].copy_from_slice(&value.to_be_bytes());
    }
    let (now, peer) = (world.now, Peer::Lid { lid: from, queue_pair: 1, service_level: 0 });
    world.manager(0).handle_datagram(now, peer, &mad);
    world.manager(0).poll_transmit(now).expect("a response").mad
}

/// The P_Keys that a node holds behind a modifier.
fn held(world: &World, node: NodeId, modifier: u32) -> Vec<u16> {
    let block = world.agents.written.get(&(node, Attribute::PKeyTable.id(), modifier));
    let keys = block.into_iter().flat_map(|block| block.chunks_exact(2));
    keys.map(|key| u16::from_be_bytes([key[0], key[1]])).filter(|key| *key != 0).collect()
}

#[test]
fn ports_hold_their_keys_and_switches_enforce_them_if_asked() {
    for enforces in [false, true] {
        let world = managed(enforces);
        let expected: [&[u16]; 9] = [
            &[0xffff],
            &[0x7fff, 0x8001],
            &[0x7fff, 0x8001],
            &[0x7fff, 0x0001],
            &[0x7fff, 0x0002],
            &[0x7fff, 0x0002],
            &[0x7fff, 0x8001, 0x8002],
            &[0x7fff],
            &[0x7fff],
        ];
        for (at, keys) in expected.into_iter().enumerate() {
            let host = world.host(at);
            assert_eq!(held(&world, host, 0), keys, "host {at}");
            let (_, far) = world.agents.topology.neighbours(host).next().expect("connected");
            let at_switch = held(&world, far.node, u32::from(far.port) << 16);
            assert_eq!(at_switch, if enforces { keys } else { &[] }, "before host {at}");
            let info = world.agents.written[&(far.node, Attribute::PortInfo.id(), far.port.into())];
            assert_eq!(enforces_partitions(&info), enforces);
        }
        for (id, _) in
            world.agents.topology.nodes().filter(|(_, node)| node.name().starts_with("spine"))
        {
            for (port, _) in world.agents.topology.neighbours(id) {
                let info = world.agents.written[&(id, Attribute::PortInfo.id(), port.into())];
                assert!(!enforces_partitions(&info), "between switches everything passes");
            }
        }
    }
}

#[test]
fn paths_are_given_where_a_partition_is_shared_and_refused_where_none_is() {
    let mut world = managed(false);
    let none = 0x0300;
    assert_eq!(path(&mut world, 1, 2, 0), (0, 0x8001));
    assert_eq!(path(&mut world, 1, 3, 0), (0, 0x8001), "one of them is a full member");
    assert_eq!(path(&mut world, 3, 1, 0), (0, 0x0001), "the sender is a limited one");
    assert_eq!(path(&mut world, 4, 5, 0).0, none, "both are limited ones");
    assert_eq!(path(&mut world, 1, 4, 0).0, none, "none is shared");
    assert_eq!(path(&mut world, 7, 8, 0).0, none, "only limited members of the default one");
    assert_eq!(path(&mut world, 7, 0, 0), (0, 0x7fff), "the manager is reached by all");
    assert_eq!(path(&mut world, 6, 4, 2), (0, 0x8002));
    assert_eq!(path(&mut world, 6, 4, 1).0, none, "of another partition");
    assert_eq!(path(&mut world, 6, 1, 0x8001), (0, 0x8001));
}

#[test]
fn groups_are_joined_by_members_of_their_partition_alone() {
    let mut world = managed(false);
    let mut join = |host: usize, key: u16| {
        let port = Agents::port_guid(world.host(host), 1);
        let words = |at: usize, value: u64| {
            (0..4).map(move |word| (at + 2 * word, (value >> (48 - 16 * word)) as u16))
        };
        let mut fields: Vec<(usize, u16)> = words(0, 0xff12_401b_0000_0000 | u64::from(key) << 16)
            .chain(words(8, 0xffff_ffff))
            .chain(words(16, 0xfe80 << 48))
            .chain(words(24, port))
            .collect();
        fields.push((48, 0x0100));
        let from = lid(&world, host);
        let reply = ask(&mut world, from, (2, MEMBER), 1 | 1 << 1 | 1 << 16, &fields);
        u16::from_be_bytes([reply[4], reply[5]])
    };
    assert_eq!((join(1, 0x8001), join(3, 0x8001), join(7, 0x8001)), (0, 0, 0x0700));
    assert_eq!((join(7, 0xffff), join(4, 0x8002)), (0, 0x0600), "there is no group of the other");
}

#[test]
fn keys_are_written_again_to_ports_that_lost_them_and_complaints_say_who_has_no_room() {
    let mut world = managed(true);
    let host = world.host(3);
    let (_, far) = world.agents.topology.neighbours(host).next().expect("connected");
    let links = world.cut_all(host);
    world.run(SECOND);
    world
        .agents
        .written
        .retain(|(node, attribute, _), _| *node != host || *attribute != Attribute::PKeyTable.id());
    links.into_iter().for_each(|link| world.join(link));
    world.run(2 * SECOND);
    assert_eq!(held(&world, host, 0), [0x7fff, 0x0001]);
    world.restart("leaf1");
    world.run(25 * SECOND);
    assert_eq!(held(&world, far.node, u32::from(far.port) << 16), [0x7fff, 0x0001]);
    // A file of more partitions than a table of a switch holds.
    let text: String = (1..=40).map(|key| format!("p{key}={key} : ALL=full;\n")).collect();
    let partitions = Partitions::parse(&text).expect("forty");
    let mut world = World::of("leaf-spine:2x1x1");
    world.start_as(0, |transaction| {
        Manager::new(Config::default(), BTreeMap::new(), transaction)
            .with_partitions(partitions, true)
    });
    world.run(SECOND);
    let events = world.take_events();
    let is_full = |(_, event): &(usize, Event)| matches!(event, Event::Incomplete(what, _) if what.ends_with("41 partitions, and there is room for 32 P_Keys"));
    assert!(events.iter().any(is_full), "{events:?}");
}
