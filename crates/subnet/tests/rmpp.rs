//! Tables of subnet administration that take several datagrams: they arrive whole whatever gets
//! lost, comes twice or in another order; and what clients can make the manager hold is bounded.

mod agents;
mod world;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use subnet::administration::Table;
use subnet::administration::rmpp::{
    Client, MAX_BYTES, MAX_BYTES_OF_PORT, MAX_TABLES, MAX_TABLES_OF_PORT, MAX_WINDOW, Sender, TRIES,
};
use subnet::manager::{Config, Datagram, Peer};
use world::World;

const SECOND: Duration = Duration::from_secs(1);
const NODE: u16 = 0x11;
const PORT_INFO: u16 = 0x12;
const PATH: u16 = 0x35;

fn managed(text: &str) -> World {
    let mut world = World::of(text);
    world.start(0, Config::default());
    world.run(SECOND);
    world
}

fn peer(lid: u16) -> Peer {
    Peer::Lid { lid, queue_pair: 1, service_level: 0 }
}

/// A request of a table, with its transaction.
fn request(attribute: u16, transaction: u64, fields: &[(u8, usize, u16)]) -> [u8; 256] {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x03, 2, 0x12]);
    mad[8..16].copy_from_slice(&transaction.to_be_bytes());
    mad[16..18].copy_from_slice(&attribute.to_be_bytes());
    let mask = fields.iter().fold(0_u64, |mask, (bit, ..)| mask | 1 << bit);
    mad[48..56].copy_from_slice(&mask.to_be_bytes());
    for (_, at, value) in fields {
        mad[56 + at..58 + at].copy_from_slice(&value.to_be_bytes());
    }
    mad
}

/// A receiver as the specification has it: it takes segments in order, and acknowledges each with a
/// window.
#[derive(Default)]
struct Receiver {
    records: Vec<u8>,
    /// The last segment that arrived in order.
    last: u32,
    /// Bytes of all segments, as the first says.
    total: u32,
    is_whole: bool,
    aborted: Option<u8>,
    size: usize,
}

impl Receiver {
    /// Takes a segment, and returns what is to be sent.
    fn take(&mut self, datagram: &Datagram, window: u32) -> Option<[u8; 256]> {
        let mad = &datagram.mad;
        let word = |at: usize| u32::from_be_bytes([mad[at], mad[at + 1], mad[at + 2], mad[at + 3]]);
        assert_eq!((mad[3], mad[24], mad[26] & 1), (0x92, 1, 1), "active, of a table");
        if mad[25] == 4 {
            self.aborted = Some(mad[27]);
            return None;
        }
        let (number, length) = (word(28), word(32));
        assert_eq!((mad[25], mad[26] & 2 != 0), (1, number == 1));
        if number == self.last + 1 && !self.is_whole {
            self.last = number;
            if number == 1 {
                self.total = length;
                self.size = usize::from(u16::from_be_bytes([mad[44], mad[45]])) * 8;
            }
            self.is_whole = mad[26] & 4 != 0;
            let payload = if self.is_whole { length as usize } else { 220 };
            assert_eq!(datagram.len, 36 + payload);
            self.records.extend_from_slice(&mad[56..datagram.len]);
        }
        let mut ack = *mad;
        ack[3] = 0x12;
        ack[25..28].copy_from_slice(&[2, 1, 0]);
        ack[28..32].copy_from_slice(&self.last.to_be_bytes());
        ack[32..36].copy_from_slice(&(self.last + window).to_be_bytes());
        Some(ack)
    }
}

/// The datagrams of subnet administration that a manager sends now.
fn sent(world: &mut World) -> Vec<Datagram> {
    let now = world.now;
    let manager = world.manager(0);
    let all: Vec<Datagram> = std::iter::from_fn(|| manager.poll_transmit(now)).collect();
    all.into_iter().filter(|datagram| datagram.mad[1] == 0x03).collect()
}

fn give(world: &mut World, from: u16, mad: &[u8; 256]) {
    let now = world.now;
    world.manager(0).handle_datagram(now, peer(from), mad);
}

fn pass(world: &mut World, time: Duration) {
    world.now += time;
    let now = world.now;
    world.manager(0).handle_timeout(now);
}

fn numbers(records: &[u8], size: usize) -> Vec<u16> {
    records.chunks_exact(size).map(|record| u16::from_be_bytes([record[0], record[1]])).collect()
}

#[test]
fn tables_arrive_whole_over_seeds_of_loss_repetition_and_disorder() {
    let mut world = managed("fat-tree:8");
    let lids: Vec<u16> = world.lids().into_keys().collect();
    for seed in 0..200_u64 {
        let mut generator = Pcg32::new(seed, 5);
        let mut chance = |of: u32| generator.next_u32().is_multiple_of(of);
        let from = lids[seed as usize % lids.len()];
        let fields = [(5, 42, from)];
        let (attribute, fields) =
            [(NODE, &[][..]), (PORT_INFO, &[]), (PATH, &fields)][seed as usize % 3];
        let mad = request(attribute, seed + 1, fields);
        let mut receiver = Receiver::default();
        let (mut there, mut back) = (VecDeque::new(), VecDeque::from([mad]));
        for _ in 0..5_000 {
            for ack in back.drain(..) {
                give(&mut world, from, &ack);
            }
            let segments = sent(&mut world);
            assert!(segments.len() <= MAX_WINDOW as usize, "seed {seed}");
            there.extend(segments);
            if there.is_empty() {
                pass(&mut world, Duration::from_millis(100));
            }
            while let Some(datagram) = there.pop_front() {
                if seed % 2 == 1 && chance(20) {
                    continue;
                }
                if seed % 4 > 1 && chance(7) && !there.is_empty() {
                    there.push_back(datagram);
                    continue;
                }
                let ack = receiver.take(&datagram, 1 + (seed % 70) as u32);
                let copies = if seed % 5 == 0 && chance(4) { 2 } else { 1 };
                let is_lost = seed % 2 == 1 && chance(20);
                back.extend((0..copies).filter_map(|_| ack.filter(|_| !is_lost)));
            }
            if receiver.is_whole && world.manager(0).tables().sent == seed + 1 {
                break;
            }
        }
        assert!(receiver.is_whole && receiver.aborted.is_none(), "seed {seed}: {}", receiver.last);
        assert_eq!(receiver.records.len() % receiver.size, 0, "seed {seed}");
        assert_eq!(receiver.total as usize, receiver.records.len() + 20 * receiver.last as usize);
        match attribute {
            NODE => assert_eq!(numbers(&receiver.records, receiver.size), lids, "seed {seed}"),
            // Port by port of switches.
            PORT_INFO => assert_eq!(receiver.records.len() / receiver.size, 128 + 80 * 9),
            _ => assert_eq!(receiver.records.len() / receiver.size, lids.len(), "seed {seed}"),
        }
    }
    let counted = world.manager(0).tables();
    assert!(counted.repeated > 100 && counted.foreign > 100, "{counted:?}");
    assert_eq!((counted.given_up, counted.unacknowledged, counted.senseless), (0, 0, 0));
}

#[test]
fn a_client_that_is_silent_gives_up_or_talks_nonsense_holds_nothing() {
    let mut world = managed("fat-tree:4");
    let from = world.lid_of_switch("edge0");
    let first = |world: &mut World, transaction| {
        give(world, from, &request(NODE, transaction, &[]));
        let sent = sent(world);
        assert_eq!(sent.len(), 1, "one segment before the first ACK");
        sent[0]
    };
    // Silent: some tries, then an abort.
    first(&mut world, 1);
    let mut receiver = Receiver::default();
    let mut times = 1;
    while receiver.aborted.is_none() {
        pass(&mut world, Duration::from_millis(100));
        for datagram in sent(&mut world) {
            times += u32::from(datagram.mad[25] == 1);
            receiver.take(&datagram, 1);
        }
        assert!(times <= TRIES);
    }
    assert_eq!((times, receiver.aborted), (TRIES, Some(126)), "too many tries");
    // It stops, or aborts.
    for kind in [3, 4] {
        let mut stop = first(&mut world, u64::from(kind)).mad;
        (stop[3], stop[25], stop[26], stop[27]) = (0x12, kind, 1, 127);
        give(&mut world, from, &stop);
        pass(&mut world, SECOND);
        assert_eq!(sent(&mut world).len(), 0, "nothing more");
    }
    // ACKs that cannot be: of a segment that was not sent, a window that ends before it, another
    // version or type.
    let nonsense: [(&[(usize, u8)], u8); 4] = [
        (&[(31, 9), (35, 20)], 123),
        (&[(31, 1), (35, 0)], 122),
        (&[(24, 7)], 125),
        (&[(25, 9)], 121),
    ];
    for (transaction, (bytes, reason)) in (10..).zip(nonsense) {
        let segment = first(&mut world, transaction);
        let mut ack = Receiver::default().take(&segment, 1).expect("an ACK");
        bytes.iter().for_each(|(at, byte)| ack[*at] = *byte);
        give(&mut world, from, &ack);
        let answer = sent(&mut world);
        assert_eq!((answer.len(), answer[0].mad[25], answer[0].mad[27]), (1, 4, reason));
    }
    // Of another port, or of a transaction that is none.
    let segment = first(&mut world, 20);
    let ack = Receiver::default().take(&segment, 60).expect("an ACK");
    let before = world.manager(0).tables().foreign;
    give(&mut world, from + 1, &ack);
    let mut other = ack;
    other[15] = 99;
    give(&mut world, from, &other);
    assert_eq!(world.manager(0).tables().foreign - before, 2);
    assert_eq!(sent(&mut world).len(), 0);
    give(&mut world, from, &ack);
    assert!(sent(&mut world).len() > 1, "the right one opens the window");
    // The same request again while its table is under way.
    give(&mut world, from, &request(NODE, 20, &[]));
    assert_eq!(sent(&mut world).len(), 0);
}

#[test]
fn tables_under_way_are_bounded_and_the_rest_is_refused() {
    let mut world = managed("fat-tree:8");
    let lids: Vec<u16> = world.lids().into_keys().collect();
    let mut refused: BTreeMap<u16, usize> = BTreeMap::new();
    let mut begun = 0;
    for (transaction, lid) in (1..).zip(lids.iter().take(40).flat_map(|lid| [*lid; 6])) {
        give(&mut world, lid, &request(NODE, transaction, &[]));
        for datagram in sent(&mut world) {
            match u16::from_be_bytes([datagram.mad[4], datagram.mad[5]]) {
                0 => begun += 1,
                0x0100 => *refused.entry(lid).or_default() += 1,
                status => panic!("{status:#x}"),
            }
        }
    }
    assert_eq!((begun, world.counters(0).without_room), (MAX_TABLES, 240 - MAX_TABLES as u64));
    assert_eq!(refused[&lids[0]], 6 - MAX_TABLES_OF_PORT);
    // What fits into a datagram is answered all the same.
    give(&mut world, lids[0], &request(NODE, 999, &[(0, 0, lids[3])]));
    assert_eq!(numbers(&sent(&mut world)[0].mad[56..], 112), [lids[3]]);
    // Nobody acknowledges anything: it ends.
    for _ in 0..100 {
        pass(&mut world, Duration::from_millis(100));
        sent(&mut world);
    }
    assert_eq!(world.manager(0).tables().unacknowledged, MAX_TABLES as u64);
    give(&mut world, lids[0], &request(NODE, 1_000, &[]));
    assert_eq!(sent(&mut world)[0].mad[4..6], [0, 0], "there is room again");
}

#[test]
fn the_lids_of_a_port_share_its_tables() {
    let mut world = World::of("leaf-spine:3x2x3");
    world.start(0, Config { lmc: 4, ..Config::default() });
    world.run(SECOND);
    let node = world.host(5);
    let lids: Vec<u16> =
        world.lids().iter().filter(|(_, place)| place.0 == node).map(|(lid, _)| *lid).collect();
    let mut begun = 0;
    for (transaction, lid) in (1..).zip((lids[0]..lids[0] + 16).flat_map(|lid| [lid; 4])) {
        give(&mut world, lid, &request(NODE, transaction, &[]));
        begun += sent(&mut world).iter().filter(|datagram| datagram.mad[4..6] == [0, 0]).count();
    }
    assert_eq!(begun, MAX_TABLES_OF_PORT);
}

#[test]
fn a_port_leaves_bytes_to_others() {
    let mut sender = Sender::default();
    let client = Client { lid: 5, queue_pair: 1, service_level: 0 };
    for transaction in 0..MAX_TABLES_OF_PORT as u8 {
        let mut header = [0; 56];
        header[15] = transaction;
        let records = vec![0; sender.room(5..=5).min(MAX_BYTES / MAX_TABLES_OF_PORT)];
        if !records.is_empty() {
            sender.send(Duration::ZERO, client, Table { header, records });
        }
    }
    assert_eq!((sender.room(5..=5), sender.room(6..=6)), (0, MAX_BYTES - MAX_BYTES_OF_PORT));
}
