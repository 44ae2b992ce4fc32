//! Questions of programs to a manager: what it answers, what it refuses, and multicast trees that
//! reach every member once.

mod agents;
mod world;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use subnet::mad::Attribute;
use subnet::manager::{Config, Peer};
use topology::graph::{Kind, NodeId};
use world::World;

const SECOND: Duration = Duration::from_secs(1);
const GET: u8 = 0x01;
const SET: u8 = 0x02;
const GET_TABLE: u8 = 0x12;
const DELETE: u8 = 0x15;
const NODE: u16 = 0x11;
const PORT_INFO: u16 = 0x12;
const PATH: u16 = 0x35;
const MEMBER: u16 = 0x38;
const BROADCAST: [u8; 16] =
    [0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];

/// What comes back: status, records' size, bytes that were sent, and the data.
struct Answer {
    status: u16,
    size: usize,
    len: usize,
    data: Vec<u8>,
}

fn ask(
    world: &mut World,
    from: u16,
    what: (u8, u16),
    components: &[u8],
    fields: &[(usize, &[u8])],
) -> Answer {
    let (method, attribute) = what;
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x03, 2, method]);
    mad[16..18].copy_from_slice(&attribute.to_be_bytes());
    let mask = components.iter().fold(0_u64, |mask, bit| mask | 1 << bit);
    mad[48..56].copy_from_slice(&mask.to_be_bytes());
    for (at, bytes) in fields {
        mad[56 + at..56 + at + bytes.len()].copy_from_slice(bytes);
    }
    let peer = Peer::Lid { lid: from, queue_pair: 1, service_level: 0 };
    let now = world.now;
    world.manager(0).handle_datagram(now, peer, &mad);
    let reply = world.manager(0).poll_transmit(now).expect("a response");
    assert_eq!((reply.peer, reply.mad[1]), (peer, 0x03));
    assert!(reply.mad[3] & 0x80 != 0, "a response");
    let short = |at: usize| u16::from_be_bytes([reply.mad[at], reply.mad[at + 1]]);
    Answer {
        status: short(4),
        size: usize::from(short(44)) * 8,
        len: reply.len,
        data: reply.mad[56..].to_vec(),
    }
}

fn managed(text: &str) -> World {
    let mut world = World::of(text);
    world.start(0, Config::default());
    world.run(SECOND);
    world
}

fn gid(world: &World, host: usize) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[..2].copy_from_slice(&[0xfe, 0x80]);
    gid[8..].copy_from_slice(&agents::Agents::port_guid(world.host(host), 1).to_be_bytes());
    gid
}

fn lid(world: &World, host: usize) -> u16 {
    let node = world.host(host);
    let lids = world.lids();
    *lids.iter().find(|(_, place)| place.0 == node).expect("it has one").0
}

#[test]
fn paths_are_found_by_lid_and_gid_and_nothing_else_is() {
    let mut world = managed("leaf-spine:4x2x3");
    let (from, to) = (lid(&world, 2), lid(&world, 11));
    let (from_bytes, to_bytes) = (from.to_be_bytes(), to.to_be_bytes());
    let (from_gid, to_gid) = (gid(&world, 2), gid(&world, 11));
    for method in [GET, GET_TABLE] {
        for by_gid in [false, true] {
            let answer = match by_gid {
                false => ask(
                    &mut world,
                    from,
                    (method, PATH),
                    &[4, 5],
                    &[(40, &to_bytes), (42, &from_bytes)],
                ),
                true => {
                    ask(&mut world, from, (method, PATH), &[2, 3], &[(8, &to_gid), (24, &from_gid)])
                }
            };
            assert_eq!((answer.status, answer.size), (0, 64), "{method} {by_gid}");
            assert_eq!(answer.len, if method == GET { 256 } else { 56 + 64 });
            assert_eq!(answer.data[8..24], to_gid);
            assert_eq!(answer.data[24..40], from_gid);
            assert_eq!(answer.data[40..44], [to_bytes, from_bytes].concat());
            assert_eq!(answer.data[50..52], [0xff, 0xff], "the default partition");
        }
    }
    let path = |world: &mut World, components: &[u8], fields: &[(usize, &[u8])]| {
        ask(world, from, (GET, PATH), components, fields).status
    };
    assert_eq!(path(&mut world, &[4], &[(40, &to_bytes)]), 0x0600, "from where?");
    assert_eq!(path(&mut world, &[5], &[(42, &from_bytes)]), 0x0600, "to where?");
    let nobody = 4_000_u16.to_be_bytes();
    assert_eq!(path(&mut world, &[4, 5], &[(40, &nobody), (42, &from_bytes)]), 0x0300);
    assert_eq!(path(&mut world, &[2, 5], &[(8, &[1; 16]), (42, &from_bytes)]), 0x0500);
    let other_key = [(40, &to_bytes[..]), (42, &from_bytes[..]), (50, &[0x12, 0x34][..])];
    assert_eq!(path(&mut world, &[4, 5, 13], &other_key), 0x0300, "another partition");
    assert_eq!(ask(&mut world, from, (SET, PATH), &[4, 5], &[]).status, 0x0c);
    assert_eq!(ask(&mut world, from, (GET, 0x7777), &[], &[]).status, 0x0c);
}

#[test]
fn nodes_and_ports_are_found() {
    let mut world = managed("leaf-spine:4x2x3");
    let own = lid(&world, 2);
    let node = ask(&mut world, own, (GET_TABLE, NODE), &[0], &[(0, &own.to_be_bytes())]);
    assert_eq!((node.status, node.size, node.len), (0, 112, 56 + 112));
    assert_eq!(node.data[..2], own.to_be_bytes());
    assert_eq!(&node.data[44..49], b"host2");
    assert_eq!(ask(&mut world, own, (GET, NODE), &[], &[]).status, 0x0400, "one was asked for");
    let last = agents::Agents::guid(world.host(11)).to_be_bytes();
    let found = ask(&mut world, own, (GET_TABLE, NODE), &[7], &[(16, &last)]);
    assert_eq!((found.status, &found.data[44..50]), (0, &b"host11"[..]), "the last of all");
    let switch = world.lid_of_switch("leaf2").to_be_bytes();
    let port = ask(&mut world, own, (GET_TABLE, PORT_INFO), &[0, 1], &[(0, &switch), (2, &[4])]);
    assert_eq!((port.status, port.len, port.data[2]), (0, 56 + 72, 4), "one of them");
    let port =
        ask(&mut world, own, (GET, PORT_INFO), &[0, 1], &[(0, &own.to_be_bytes()), (2, &[1])]);
    assert_eq!((port.status, port.data[2]), (0, 1));
    assert_eq!(port.data[4 + 16..4 + 18], own.to_be_bytes(), "as it is set up");
    assert_eq!(port.data[4 + 32] & 0xf, 4, "active");
}

fn join(world: &mut World, host: usize, group: &[u8; 16], state: u8, creates: bool) -> Answer {
    let (from, port) = (lid(world, host), gid(world, host));
    let components: &[u8] = if creates { &[0, 1, 2, 6, 7, 12, 13, 16] } else { &[0, 1, 16] };
    let fields: [(usize, &[u8]); 5] =
        [(0, group), (16, &port), (32, &[0, 0, 0x0b, 0x1b]), (40, &[0xff, 0xff]), (48, &[state])];
    ask(world, from, (SET, MEMBER), components, &fields)
}

fn leave(world: &mut World, host: usize, group: &[u8; 16]) -> Answer {
    let (from, port) = (lid(world, host), gid(world, host));
    let fields: [(usize, &[u8]); 3] = [(0, group), (16, &port), (48, &[1])];
    ask(world, from, (DELETE, MEMBER), &[0, 1, 16], &fields)
}

/// Hosts that a packet of a host reaches, by the multicast tables of the switches, and how often.
fn spread(world: &World, host: usize, lid: u16) -> BTreeMap<NodeId, u32> {
    let topology = &world.agents.topology;
    let at = usize::from(lid - 0xc000);
    let ports = |switch: NodeId| -> Vec<u8> {
        let ports = 1..=topology.node(switch).ports();
        let is_in = |port: &u8| {
            let modifier = u32::from(*port / 16) << 28 | (at / 32) as u32;
            let id = Attribute::MulticastForwardingTable.id();
            let block = world.agents.written.get(&(switch, id, modifier));
            let entry = 2 * (at % 32);
            block.is_some_and(|block| {
                u16::from_be_bytes([block[entry], block[entry + 1]]) & 1 << (port % 16) != 0
            })
        };
        ports.filter(is_in).collect()
    };
    let mut reached = BTreeMap::new();
    let (_, first) = topology.neighbours(world.host(host)).next().expect("connected");
    let mut open = VecDeque::from([first]);
    let mut steps = 0;
    while let Some(arrived) = open.pop_front() {
        steps += 1;
        assert!(steps < 10_000, "packets go round");
        if topology.node(arrived.node).kind() == Kind::Host {
            *reached.entry(arrived.node).or_default() += 1;
            continue;
        }
        for port in ports(arrived.node).into_iter().filter(|port| *port != arrived.port) {
            let link =
                topology.node(arrived.node).link_at(port).and_then(|link| topology.link(link));
            open.extend(link.map(|link| link.beyond(arrived.node)));
        }
    }
    reached
}

fn check_group(world: &World, lid: u16, members: &BTreeSet<usize>) {
    for from in members {
        let expected: BTreeMap<NodeId, u32> =
            members.iter().filter(|to| *to != from).map(|to| (world.host(*to), 1)).collect();
        assert_eq!(spread(world, *from, lid), expected, "{}: from host {from}", world.context);
    }
}

#[test]
fn every_member_gets_a_packet_once_whoever_comes_and_goes() {
    for text in ["fat-tree:4", "torus:3x3:2", "leaf-spine:4x2x3"] {
        let mut world = managed(text);
        let mut members = BTreeSet::new();
        let mut lid = 0;
        for host in [1, 3, 4, 8, 11, 5] {
            let answer = join(&mut world, host, &BROADCAST, 1, false);
            assert_eq!(answer.status, 0, "{text}");
            lid = u16::from_be_bytes([answer.data[36], answer.data[37]]);
            assert_eq!(lid, 0xc000);
            members.insert(host);
            world.run(SECOND);
            check_group(&world, lid, &members);
        }
        for host in [4, 1] {
            assert_eq!(leave(&mut world, host, &BROADCAST).status, 0);
            members.remove(&host);
            world.run(SECOND);
            check_group(&world, lid, &members);
        }
        let links = world.links_between_switches();
        let link = world.spare(&links, 1).expect("a spare link");
        let link = world.cut(link);
        world.run(20 * SECOND);
        check_group(&world, lid, &members);
        world.join(link);
        world.run(20 * SECOND);
        check_group(&world, lid, &members);
    }
}

#[test]
fn groups_are_created_by_full_members_for_their_own_port_and_are_bounded() {
    let mut world = managed("leaf-spine:4x2x3");
    let group = |number: u8| {
        let mut group = BROADCAST;
        (group[4], group[15]) = (0x80, number);
        group
    };
    assert_eq!(join(&mut world, 1, &group(1), 1, false).status, 0x0600, "what group?");
    assert_eq!(join(&mut world, 1, &group(1), 4, true).status, 0x0600, "a sender alone");
    assert_eq!(join(&mut world, 1, &[0xfe; 16], 1, true).status, 0x0200, "no multicast address");
    assert_eq!(join(&mut world, 1, &group(1), 1, true).status, 0);
    assert_eq!(join(&mut world, 2, &group(1), 1, false).status, 0);
    assert_eq!(leave(&mut world, 3, &group(1)).status, 0x0300, "no member");
    // For another port.
    let (port, from) = (gid(&world, 3), lid(&world, 2));
    let fields: [(usize, &[u8]); 3] = [(0, &group(1)), (16, &port), (48, &[1])];
    assert_eq!(ask(&mut world, from, (SET, MEMBER), &[0, 1, 16], &fields).status, 0x0700);
    for number in 2..=64 {
        assert_eq!(join(&mut world, 1, &group(number), 1, true).status, 0, "{number}");
    }
    assert_eq!(join(&mut world, 1, &group(65), 1, true).status, 0x0100, "enough for one port");
    assert_eq!(join(&mut world, 2, &group(65), 1, true).status, 0);
    // The last full member ends a group.
    assert_eq!(leave(&mut world, 2, &group(65)).status, 0);
    assert_eq!(leave(&mut world, 2, &group(65)).status, 0x0300);
}

#[test]
fn a_member_that_comes_and_goes_holds_up_no_sweep() {
    let mut world = managed("leaf-spine:4x2x3");
    let links = world.links_between_switches();
    world.cut_silently(links[0]);
    // As fast as one datagram every ten milliseconds.
    for round in 0..3_000 {
        match round % 2 {
            0 => assert_eq!(join(&mut world, 5, &BROADCAST, 1, false).status, 0),
            _ => assert_eq!(leave(&mut world, 5, &BROADCAST).status, 0),
        }
        world.step(1);
        world.now += Duration::from_millis(10);
    }
    assert!(world.counters(0).light_sweeps >= 2, "{:?}", world.counters(0));
    world.check_paths_to_hosts("around the dead link");
    let members = BTreeSet::from([5, 8]);
    members.iter().for_each(|host| drop(join(&mut world, *host, &BROADCAST, 1, false)));
    world.run(SECOND);
    check_group(&world, 0xc000, &members);
}

#[test]
fn clients_register_anew_with_a_new_manager_and_after_a_partition() {
    let mut world = managed("leaf-spine:4x2x3");
    let hosts: BTreeSet<NodeId> = world.agents.topology.hosts().collect();
    let told = |world: &mut World| -> BTreeSet<NodeId> {
        let told: BTreeSet<NodeId> =
            std::mem::take(&mut world.agents.reregistered).into_iter().collect();
        told.intersection(&hosts).copied().collect()
    };
    assert_eq!(told(&mut world), hosts, "at first");
    // The process is restarted on a fabric that is in use.
    world.kill(0);
    world.start(0, Config::default());
    world.run(SECOND);
    assert_eq!(told(&mut world), hosts, "after a restart");
    // The uplinks of a leaf die; its hosts stay up.
    let leaf = world.agents.topology.named("leaf3").expect("a leaf");
    let topology = &world.agents.topology;
    let up = world.links_between_switches().into_iter();
    let up: Vec<_> = up
        .filter(|link| {
            topology.link(*link).is_some_and(|link| link.ends.iter().any(|end| end.node == leaf))
        })
        .collect();
    let cut: Vec<_> = up.into_iter().map(|link| world.cut(link)).collect();
    world.run(20 * SECOND);
    assert_eq!(told(&mut world), BTreeSet::new(), "nobody is new");
    cut.into_iter().for_each(|link| world.join(link));
    world.run(20 * SECOND);
    let below: BTreeSet<NodeId> = (9..12).map(|host| world.host(host)).collect();
    assert_eq!(told(&mut world), below, "those that were cut off");
}

#[test]
fn multicast_tables_are_written_again_that_got_lost_or_were_not_taken() {
    let mut world = managed("leaf-spine:4x2x3");
    let members = BTreeSet::from([1, 5, 8, 11]);
    members.iter().for_each(|host| drop(join(&mut world, *host, &BROADCAST, 1, false)));
    world.run(SECOND);
    check_group(&world, 0xc000, &members);
    for name in ["leaf2", "spine0", "spine1"] {
        world.restart(name);
        world.run(25 * SECOND);
        world.check_all_paths(name);
        check_group(&world, 0xc000, &members);
    }
    // A leaf does not respond for three seconds, in which one of its hosts joins.
    let leaf = world.agents.topology.named("leaf2").expect("a leaf");
    world.agents.silent.push(leaf);
    let members = BTreeSet::from([1, 5, 7, 8, 11]);
    assert_eq!(join(&mut world, 7, &BROADCAST, 1, false).status, 0);
    let sweeps = world.counters(0).heavy_sweeps;
    world.run(3 * SECOND);
    world.agents.silent.clear();
    world.run(5 * SECOND);
    assert!(world.counters(0).failed_groups > 0);
    assert_eq!(world.counters(0).heavy_sweeps, sweeps, "no sweep has helped");
    check_group(&world, 0xc000, &members);
}

#[test]
fn paths_are_answered_while_the_fabric_is_rerouted_and_when_a_switch_takes_no_table() {
    let path = |world: &mut World| {
        let (from, to) = (lid(world, 2).to_be_bytes(), lid(world, 11).to_be_bytes());
        let own = u16::from_be_bytes(from);
        ask(world, own, (GET, PATH), &[4, 5], &[(40, &to), (42, &from)]).status
    };
    for datagrams in 0..150 {
        let mut world = managed("leaf-spine:4x2x3");
        world.context = format!("after {datagrams} datagrams");
        // No route of the manager leads over the last link.
        let link = world.links_between_switches().pop().expect("a link");
        let link = world.cut(link);
        world.step(datagrams);
        assert_eq!(path(&mut world), 0, "{}", world.context);
        if datagrams.is_multiple_of(10) {
            let leaf = world.agents.topology.named("leaf3").expect("a leaf");
            world.agents.stubborn.push(leaf);
            world.join(link);
            world.run(5 * SECOND);
            assert_eq!(path(&mut world), 0, "{}, stubborn", world.context);
        }
    }
}
