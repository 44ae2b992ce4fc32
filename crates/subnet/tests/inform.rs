//! Subscribers to what happens: everybody who wants it gets it once and in order, and those who
//! take nothing cost little.

mod agents;
mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use agents::Agents;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use subnet::administration::inform::{
    MAX_EVENTS, MAX_FAILURES, MAX_SUBSCRIBERS_OF_PORT, PATIENCE, TRIES, WINDOW,
};
use subnet::manager::{Config, Datagram, Peer};
use world::World;

const SECOND: Duration = Duration::from_secs(1);
const SET: u8 = 0x02;
const INFORM_INFO: u16 = 0x03;
const MEMBER: u16 = 0x38;
const ALL: u16 = 0xffff;

fn managed(text: &str) -> World {
    let mut world = World::of(text);
    world.start(0, Config::default());
    world.run(SECOND);
    world
}

fn lid(world: &World, host: usize) -> u16 {
    let node = world.host(host);
    *world.lids().iter().find(|(_, place)| place.0 == node).expect("it has one").0
}

fn guid(world: &World, host: usize) -> u64 {
    Agents::port_guid(world.host(host), 1)
}

fn sent(world: &mut World) -> Vec<Datagram> {
    let now = world.now;
    let manager = world.manager(0);
    let all: Vec<Datagram> = std::iter::from_fn(|| manager.poll_transmit(now)).collect();
    all.into_iter().filter(|datagram| datagram.mad[1] == 0x03).collect()
}

fn give(world: &mut World, from: (u16, u32), mad: &[u8; 256]) {
    let (now, peer) = (world.now, Peer::Lid { lid: from.0, queue_pair: from.1, service_level: 0 });
    world.manager(0).handle_datagram(now, peer, mad);
}

/// The status of the response to a subscription, or to the end of one.
fn subscribe(world: &mut World, from: (u16, u32), trap: u16, subscribes: bool) -> u16 {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x03, 2, SET]);
    mad[16..18].copy_from_slice(&INFORM_INFO.to_be_bytes());
    mad[56 + 16..56 + 18].copy_from_slice(&ALL.to_be_bytes());
    (mad[56 + 22], mad[56 + 23]) = (1, u8::from(subscribes));
    mad[56 + 26..56 + 28].copy_from_slice(&trap.to_be_bytes());
    give(world, from, &mad);
    let replies = sent(world);
    let reply = replies.first().expect("a response");
    assert_eq!(reply.mad[3], 0x81);
    u16::from_be_bytes([reply.mad[4], reply.mad[5]])
}

/// The trap of a report, and the GUID or the end of the address that it is about.
fn read(report: &Datagram) -> ((u16, u32), u16, u64) {
    let mad = &report.mad;
    assert_eq!((mad[3], mad[56] & 0x80, mad[17]), (0x06, 0x80, 0x02), "a generic notice");
    let Peer::Lid { lid, queue_pair, .. } = report.peer else { panic!("{report:?}") };
    let trap = u16::from_be_bytes([mad[60], mad[61]]);
    let low = u64::from_be_bytes(mad[80..88].try_into().expect("eight"));
    ((lid, queue_pair), trap, low)
}

fn respond(world: &mut World, report: &Datagram) {
    let mut mad = report.mad;
    mad[3] = 0x86;
    // The operating system has its own upper half.
    mad[8..12].copy_from_slice(&[9; 4]);
    give(world, read(report).0, &mad);
}

/// Takes every report, with `chance` of its loss and that of its response in so many, until nothing
/// comes any more.
fn take_all(world: &mut World, chance: u32, seed: u64) -> Vec<((u16, u32), u16, u64)> {
    let mut generator = Pcg32::new(seed, 9);
    let mut is_lost = || chance > 0 && generator.next_u32().is_multiple_of(chance);
    let mut taken = Vec::new();
    for _ in 0..200 {
        let mut reports = std::mem::take(&mut world.reports);
        reports.extend(sent(world));
        assert!(reports.len() <= WINDOW);
        let nothing = reports.is_empty();
        for report in reports {
            if is_lost() {
                continue;
            }
            taken.push(read(&report));
            if !is_lost() {
                respond(world, &report);
            }
        }
        if nothing {
            world.run(Duration::from_millis(300));
        }
    }
    taken
}

#[test]
fn subscribers_hear_of_ports_that_come_and_go_once_each_whatever_is_lost() {
    for seed in 0..20 {
        let mut world = managed("leaf-spine:3x2x3");
        let [a, b, c] = [3, 4, 5].map(|host| (lid(&world, host), 1));
        assert_eq!(subscribe(&mut world, a, 64, true), 0);
        assert_eq!(subscribe(&mut world, a, 65, true), 0);
        assert_eq!(subscribe(&mut world, b, ALL, true), 0);
        assert_eq!(subscribe(&mut world, c, 67, true), 0);
        let gone = guid(&world, 8);
        let node = world.host(8);
        let links = world.cut_all(node);
        world.run(SECOND / 2);
        let chance = if seed == 0 { 0 } else { 5 };
        let mut first = take_all(&mut world, chance, seed);
        links.into_iter().for_each(|link| world.join(link));
        world.run(SECOND / 2);
        let mut second = take_all(&mut world, chance, seed + 100);
        if seed > 0 {
            // A response that was lost makes a report come again.
            first.dedup();
            second.dedup();
            first.sort_unstable();
            first.dedup();
            second.sort_unstable();
            second.dedup();
        }
        first.sort_unstable();
        second.sort_unstable();
        assert_eq!(first, [(a, 65, gone), (b, 65, gone)], "seed {seed}");
        assert_eq!(second, [(a, 64, gone), (b, 64, gone)], "seed {seed}");
        assert_eq!(world.manager(0).subscriptions().1.given_up, 0, "seed {seed}");
    }
}

fn member(world: &mut World, host: usize, number: u8, method: u8) {
    let (from, port) = (lid(world, host), guid(world, host));
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x03, 2, method]);
    mad[16..18].copy_from_slice(&MEMBER.to_be_bytes());
    let components = [0, 1, 2, 6, 7, 12, 13, 16].iter().fold(0_u64, |mask, bit| mask | 1 << bit);
    mad[48..56].copy_from_slice(&components.to_be_bytes());
    mad[56..64].copy_from_slice(&[0xff, 0x12, 0x40, 0x1b, 0x80, 0, 0, 0]);
    mad[71] = number;
    mad[72..74].copy_from_slice(&[0xfe, 0x80]);
    mad[80..88].copy_from_slice(&port.to_be_bytes());
    mad[96..98].copy_from_slice(&[0xff, 0xff]);
    mad[104] = 1;
    give(world, (from, 1), &mad);
}

#[test]
fn groups_are_reported_in_order_and_subscriptions_end() {
    let mut world = managed("leaf-spine:3x2x3");
    let client = (lid(&world, 4), 7);
    assert_eq!(subscribe(&mut world, client, 66, true), 0);
    assert_eq!(subscribe(&mut world, client, 67, true), 0);
    let mut expected = Vec::new();
    for number in 1..=5 {
        member(&mut world, 2, number, SET);
        member(&mut world, 2, number, 0x15);
        expected.extend([(client, 66, u64::from(number)), (client, 67, u64::from(number))]);
    }
    let mut heard = Vec::new();
    for _ in 0..40 {
        for datagram in sent(&mut world) {
            if datagram.mad[3] == 0x06 {
                heard.push(read(&datagram));
                respond(&mut world, &datagram);
            }
        }
    }
    assert_eq!(heard, expected, "one after the other");
    assert_eq!(subscribe(&mut world, client, 66, false), 0);
    assert_eq!(subscribe(&mut world, client, 67, false), 0);
    assert_eq!(
        subscribe(&mut world, client, 67, false),
        0x0200,
        "there is no subscription any more"
    );
    member(&mut world, 2, 9, SET);
    assert!(sent(&mut world).iter().all(|datagram| datagram.mad[3] != 0x06));
    assert_eq!(subscribe(&mut world, client, 128, true), 0x0200, "of ports themselves");
}

#[test]
fn subscribers_that_take_nothing_are_dropped_and_their_number_is_bounded() {
    let mut world = managed("leaf-spine:3x2x3");
    let own = lid(&world, 4);
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for queue_pair in 1..=20 {
        *statuses.entry(subscribe(&mut world, (own, queue_pair), ALL, true)).or_default() += 1;
    }
    assert_eq!(
        statuses,
        BTreeMap::from([(0, MAX_SUBSCRIBERS_OF_PORT), (0x0100, 20 - MAX_SUBSCRIBERS_OF_PORT)])
    );
    for number in 1..=20 {
        member(&mut world, 2, number, SET);
    }
    // Responses of nobody and to nothing.
    let mut foreign = [0; 256];
    foreign[..4].copy_from_slice(&[1, 0x03, 2, 0x86]);
    give(&mut world, (own, 1), &foreign);
    let mut reports = 0;
    for _ in 0..300 {
        reports += sent(&mut world).iter().filter(|datagram| datagram.mad[3] == 0x06).count();
        world.now += Duration::from_millis(100);
        let now = world.now;
        world.manager(0).handle_timeout(now);
    }
    assert_eq!(reports, MAX_SUBSCRIBERS_OF_PORT * (TRIES * MAX_FAILURES) as usize);
    let (count, counters) = world.manager(0).subscriptions();
    assert_eq!((count, counters.dropped), (0, MAX_SUBSCRIBERS_OF_PORT as u64));
    assert_eq!((counters.foreign, counters.taken), (1, 0));
}

/// Reports among datagrams.
fn reports(world: &mut World) -> Vec<Datagram> {
    sent(world).into_iter().filter(|datagram| datagram.mad[3] == 0x06).collect()
}

fn pass(world: &mut World, time: Duration) {
    world.now += time;
    let now = world.now;
    world.manager(0).handle_timeout(now);
}

#[test]
fn a_subscription_that_ends_while_its_report_is_under_way_leaves_its_place_to_others() {
    let mut world = managed("fat-tree:8");
    let places = WINDOW / MAX_SUBSCRIBERS_OF_PORT;
    let clients: Vec<(u16, u32)> = (10..10 + places)
        .map(|host| lid(&world, host))
        .flat_map(|lid| {
            (1..=MAX_SUBSCRIBERS_OF_PORT as u32).map(move |queue_pair| (lid, queue_pair))
        })
        .collect();
    for client in &clients {
        assert_eq!(subscribe(&mut world, *client, 66, true), 0);
        assert_eq!(subscribe(&mut world, *client, 65, true), 0);
    }
    member(&mut world, 2, 1, SET);
    assert_eq!(reports(&mut world).len(), WINDOW);
    for client in &clients {
        assert_eq!(subscribe(&mut world, *client, 66, false), 0);
    }
    let honest = (lid(&world, 4), 1);
    assert_eq!(subscribe(&mut world, honest, 66, true), 0);
    member(&mut world, 2, 2, SET);
    let mut heard = Vec::new();
    for _ in 0..100 {
        heard.extend(reports(&mut world).iter().map(read).filter(|(client, ..)| *client == honest));
        pass(&mut world, Duration::from_millis(100));
    }
    assert_eq!(heard.first(), Some(&(honest, 66, 2)));
}

#[test]
fn a_report_that_is_sent_again_is_the_same_however_much_has_happened() {
    let mut world = managed("leaf-spine:3x2x3");
    let client = (lid(&world, 4), 1);
    assert_eq!(subscribe(&mut world, client, ALL, true), 0);
    member(&mut world, 2, 1, SET);
    let first = reports(&mut world);
    for _ in 0..MAX_EVENTS / 2 {
        member(&mut world, 2, 7, SET);
        member(&mut world, 2, 7, 0x15);
        sent(&mut world);
    }
    pass(&mut world, PATIENCE);
    let again = reports(&mut world);
    assert_eq!((first.len(), again.len()), (1, 1));
    assert_eq!(first[0].mad[8..], again[0].mad[8..]);
    respond(&mut world, &again[0]);
    // What is still held comes next, in order.
    let next = reports(&mut world);
    assert_eq!(next.iter().map(read).collect::<Vec<_>>(), [(client, 66, 7)]);
}

#[test]
fn groups_that_come_and_go_drive_no_port_out_of_the_list() {
    let mut world = managed("leaf-spine:3x2x3");
    let client = (lid(&world, 4), 1);
    assert_eq!(subscribe(&mut world, client, ALL, true), 0);
    member(&mut world, 2, 1, SET);
    let open = reports(&mut world);
    let (gone, node) = (guid(&world, 8), world.host(8));
    world.cut_all(node);
    world.run(SECOND / 2);
    for _ in 0..=MAX_EVENTS / 2 {
        member(&mut world, 2, 7, SET);
        member(&mut world, 2, 7, 0x15);
        sent(&mut world);
    }
    respond(&mut world, &open[0]);
    let next: Vec<_> = reports(&mut world).iter().map(read).collect();
    assert_eq!(next, [(client, 65, gone)]);
}

#[test]
fn the_lids_of_a_port_share_its_subscriptions() {
    let mut world = World::of("leaf-spine:3x2x3");
    world.start(0, Config { lmc: 3, ..Config::default() });
    world.run(SECOND);
    let first = lid(&world, 4);
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for at in first..first + 8 {
        for queue_pair in 1..=MAX_SUBSCRIBERS_OF_PORT as u32 {
            *statuses.entry(subscribe(&mut world, (at, queue_pair), ALL, true)).or_default() += 1;
        }
    }
    let most = MAX_SUBSCRIBERS_OF_PORT;
    assert_eq!(statuses, BTreeMap::from([(0, most), (0x0100, 7 * most)]));
}
