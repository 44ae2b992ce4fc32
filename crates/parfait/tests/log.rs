//! The log of admissions: what is recovered, what is cut, and what is refused.

use parfait::demand::{Abstraction, Order};
use parfait::loads::Piece;
use parfait::log::{Batch, Book, Change, Entry, Found, Held, Label, LogError, Outcome, VERSION};
use parfait::network::{Network, Routing};
use parfait::outage::Names;
use parfait::queues::Dscp;
use parfait::repair_log::{self, Part};
use parfait::runs::Run;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::{Capacity, End, Kind, Topology};
use topology::shape::Shape;

fn network(shape: &str, share: u64) -> Network {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let rate = |_, link: &topology::graph::Link| link.capacity.rate_bps / share;
    Network::new(&topology, 4, Routing::Ecmp(Ecmp::Even), rate).expect("connected")
}

fn small() -> Network {
    network("leaf-spine:3x2x2", 1)
}

/// Each job has a name and a DSCP of its own.
fn admit(hosts: [u32; 2]) -> Change {
    let number = 1 + hosts[0] * 6 + hosts[1];
    let label = Label { name: format!("job{number}"), owner: "ada@lab".to_string() };
    let dscp = Dscp::new(number as u8).expect("a code point for jobs");
    let piece = |(rank, host): (u32, u32)| Piece { host, run: Run::new(rank, rank + 1) };
    Change::Admit(Held {
        label,
        dscp,
        job: "ring:2@30G burst=1M".parse().expect("a job"),
        abstraction: Abstraction::Parfait,
        order: Order::Ranks,
        pieces: (0..).zip(hosts).map(piece).collect(),
    })
}

/// Records of two terms, the book after each, and a snapshot after the second.
fn written() -> (Vec<Vec<u8>>, Vec<Book>, Vec<u8>) {
    let hosts = parfait::log::fingerprint(&small());
    let refuse = Change::Refuse("the link is full".to_string());
    let changes = [
        (3, vec![Change::Lead { hosts }]),
        (3, vec![admit([0, 2]), refuse, admit([1, 3])]),
        (3, vec![Change::Release { job: 1, restored: vec![] }, admit([4, 5])]),
        (9, vec![Change::Lead { hosts }]),
        (9, vec![admit([0, 5])]),
    ];
    let (mut book, mut records, mut books) = (Book::new(small()), Vec::new(), Vec::new());
    let mut snapshot = Vec::new();
    for (term, changes) in changes {
        let first = book.next_index();
        let entry = |(sequence, change)| {
            let client = u64::from(!matches!(change, Change::Lead { .. }));
            Entry { client, sequence, change }
        };
        let entries: Vec<Entry> = (first..).zip(changes).map(entry).collect();
        for entry in &entries {
            book.apply(term, entry).expect("it fits");
        }
        records.push(Batch { term, first, entries }.encode());
        books.push(book.clone());
        if records.len() == 2 {
            snapshot = book.snapshot();
        }
    }
    (records, books, snapshot)
}

fn recover(snapshot: &[u8], log: &[u8]) -> Result<(Book, Found), LogError> {
    Book::recover(small(), snapshot, log)
}

#[test]
fn a_log_that_ends_anywhere_gives_the_book_after_its_last_whole_record() {
    let (records, books, _) = written();
    let log = records.concat();
    let mut ends: Vec<usize> = vec![0];
    for record in &records {
        ends.push(ends[ends.len() - 1] + record.len());
    }
    for length in 0..=log.len() {
        let (book, found) = recover(&[], &log[..length]).expect("a torn end is cut");
        let whole = ends.iter().filter(|end| **end <= length).count() - 1;
        assert_eq!(found.records, whole);
        assert_eq!((found.end, found.torn_bytes), (ends[whole], length - ends[whole]));
        let expected =
            whole.checked_sub(1).map_or_else(|| Book::new(small()), |at| books[at].clone());
        assert!(book.same_as(&expected), "{length} bytes");
        book.ledger().audit().expect("sums are right");
    }
}

#[test]
fn a_snapshot_and_the_log_since_give_the_same_whether_or_not_the_log_was_cut() {
    let (records, books, snapshot) = written();
    for log in [records.concat(), records[2..].concat(), records[1..].concat()] {
        let (book, _) = recover(&snapshot, &log).expect("whole");
        assert!(book.same_as(&books[4]));
    }
    let (book, _) = recover(&books[4].snapshot(), &[]).expect("whole");
    assert!(book.same_as(&books[4]));
    let last = &book.clients()[&1];
    assert_eq!((last.sequence, &last.outcome), (7, &Outcome::Admitted(7)));
}

#[test]
fn a_flipped_bit_cuts_the_last_record_and_refuses_all_others() {
    let (records, books, _) = written();
    let log = records.concat();
    let last = log.len() - records[4].len();
    for bit in 0..log.len() * 8 {
        let mut log = log.clone();
        log[bit / 8] ^= 1 << (bit % 8);
        match recover(&[], &log) {
            Ok((book, found)) => {
                assert!(bit / 8 >= last, "bit {bit}");
                assert!(found.torn_bytes == records[4].len() && book.same_as(&books[3]));
            }
            Err(error) => {
                assert!(bit / 8 < last, "bit {bit}: {error}");
                assert!(matches!(error, LogError::Damaged { at } if at <= bit / 8), "{error}");
            }
        }
    }
}

/// A record with a right checksum.
fn sealed(version: u16, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut record = (body.len() as u32).to_le_bytes().to_vec();
    record.extend(version.to_le_bytes());
    record.extend(kind.to_le_bytes());
    let crc = crc32(&[&record, body].concat());
    record.extend(crc.to_le_bytes());
    record.extend(body);
    record
}

/// CRC-32 as of IEEE 802.3, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[test]
fn what_is_not_this_log_is_refused_with_the_reason() {
    let (records, _, snapshot) = written();
    let body = &records[0][12..];
    assert_eq!(sealed(VERSION, 0, body), records[0], "the format is as documented");
    let refused =
        |snapshot: &[u8], log: &[u8]| recover(snapshot, log).expect_err("refused").to_string();
    let old = sealed(VERSION - 1, 0, body);
    assert!(refused(&[], &old).contains("byte 0 is of version 2, and this is version 3"));
    assert!(refused(&sealed(7, 1, &snapshot[12..]), &[]).contains("of version 7"));
    assert!(refused(&snapshot[..snapshot.len() - 1], &[]).contains("the snapshot is damaged"));
    assert!(refused(&[], &sealed(VERSION, 1, body)).contains("malformed"));
    assert!(
        refused(&[], &[records[0].clone(), records[2].clone()].concat())
            .contains("entry 4 follows where entry 1")
    );
    let earlier = Batch {
        term: 8,
        first: 8,
        entries: vec![Entry { client: 2, sequence: 1, change: admit([1, 2]) }],
    };
    assert!(
        refused(&[], &[records.concat(), earlier.encode()].concat())
            .contains("term 8 follows term 9")
    );

    let log = records.concat();
    let other = Book::recover(network("leaf-spine:3x2x3", 1), &[], &log).expect_err("other hosts");
    assert_eq!(other, LogError::OtherHosts);
    let other =
        Book::recover(network("leaf-spine:3x2x3", 1), &snapshot, &[]).expect_err("other hosts");
    assert_eq!(other, LogError::OtherHosts);
    let slower =
        Book::recover(network("leaf-spine:3x2x2", 4), &[], &log).expect_err("slower links");
    assert!(slower.to_string().starts_with("entry 1: the link from"), "{slower}");
}

/// Four hosts on each of two leaves, which have links to two spines: nodes and cables in the order
/// of the file, or against it.
fn drawn(is_reversed: bool, spines: &[&str]) -> Topology {
    let mut nodes: Vec<(Kind, String, u32)> = Vec::new();
    let mut cables: Vec<((String, u8), (String, u8))> = Vec::new();
    for (port, spine) in (5..).zip(spines) {
        nodes.push((Kind::Switch, spine.to_string(), 2));
        for leaf in 0..2_u8 {
            cables.push(((format!("leaf{leaf}"), port), (spine.to_string(), 1 + leaf)));
        }
    }
    for leaf in 0..2_u8 {
        nodes.push((Kind::Switch, format!("leaf{leaf}"), 8));
        for host in 0..4 {
            nodes.push((Kind::Host, format!("host{}", 4 * leaf + host), 1));
            let own = (format!("host{}", 4 * leaf + host), 1);
            cables.push((own, (format!("leaf{leaf}"), 1 + host)));
        }
    }
    if is_reversed {
        // Hosts keep their order: placements name them by number.
        nodes.sort_by_key(|(kind, ..)| *kind == Kind::Switch);
        cables.reverse();
    }
    let mut topology = Topology::new();
    for (kind, name, ports) in nodes {
        topology.add(kind, &name, ports).expect("a node");
    }
    for (a, b) in cables {
        let end = |(name, port): (String, u8)| End {
            node: topology.named(&name).expect("it is there"),
            port,
        };
        let (a, b) = (end(a), end(b));
        topology.connect(a, b, Capacity::default()).expect("a cable");
    }
    topology
}

fn ground(topology: Topology) -> Ground {
    let site = Site { topology, slots: 4, ecmp: Ecmp::Even, reservable_ppm: 1_000_000 };
    Ground::new(site).expect("connected")
}

/// A log with an admission, in which a spine, a host and the link between the other spine and leaf1
/// go down; and its snapshot.
fn broken() -> (Vec<u8>, Vec<u8>) {
    let topology = drawn(false, &["spine0", "spine1"]);
    let node = |name: &str| topology.named(name).expect("it is there");
    let link = topology.node(node("spine1")).link_at(2).expect("a cable");
    let parts = [Part::Node(node("spine0")), Part::Node(node("host7")), Part::Carrier(link)];
    let mut book = Book::new(ground(topology.clone()));
    let lead = Change::Lead { hosts: parfait::log::fingerprint(book.ledger().network()) };
    let mut entries = Vec::new();
    let mut write = |book: &mut Book, change| {
        let entry = Entry { client: 0, sequence: 0, change };
        book.apply(3, &entry).expect("it fits");
        entries.push(entry);
    };
    write(&mut book, lead);
    write(&mut book, admit([0, 1]));
    for change in repair_log::outage(&book, &parts, true, 8).expect("something is left") {
        write(&mut book, change);
    }
    (Batch { term: 3, first: 0, entries }.encode(), book.snapshot())
}

#[test]
fn what_is_down_has_names_and_is_the_same_in_a_topology_with_other_numbers() {
    let (log, snapshot) = broken();
    for is_reversed in [false, true] {
        let topology = drawn(is_reversed, &["spine0", "spine1"]);
        let spine = topology.named("spine1").expect("it is there");
        let link = topology.node(spine).link_at(2).expect("a cable");
        let mut books = Vec::new();
        for (snapshot, log) in [(&[][..], &log[..]), (&snapshot, &[])] {
            let ground = ground(topology.clone());
            let (book, _) = Book::recover(ground, snapshot, log).expect("the same network");
            let outage = book.outage();
            let nodes: Vec<&str> = outage.nodes().map(|node| topology.node(node).name()).collect();
            assert_eq!(nodes.len(), 2, "{nodes:?}");
            assert!(nodes.contains(&"spine0") && nodes.contains(&"host7"), "{nodes:?}");
            assert_eq!(outage.links().collect::<Vec<_>>(), [link]);
            assert!(book.unknown_parts().is_empty());
            book.ledger().audit().expect("sums are right");
            books.push(book);
        }
        assert!(books[0].same_as(&books[1]));
        let again = Book::recover(ground(topology), &books[1].snapshot(), &[]).expect("whole").0;
        assert!(again.same_as(&books[0]));
    }
}

#[test]
fn what_was_down_and_is_gone_from_the_topology_is_left_out_and_said() {
    let (log, snapshot) = broken();
    let topology = drawn(true, &["spine2", "spine1"]);
    for (snapshot, log) in [(&[][..], &log[..]), (&snapshot, &[])] {
        let (book, _) = Book::recover(ground(topology.clone()), snapshot, log).expect("it fits");
        assert_eq!(book.unknown_parts(), ["spine0"]);
        let down = book.names_down();
        assert_eq!((down.nodes.len(), down.links.len()), (1, 1), "{down:?}");
        // The next snapshot says what is known to be down.
        let after =
            Book::recover(ground(topology.clone()), &book.snapshot(), &[]).expect("whole").0;
        assert!(after.same_as(&book) && after.unknown_parts().is_empty());
    }
    let topology = drawn(false, &["spine0", "spine2"]);
    let (book, _) = Book::recover(ground(topology), &snapshot, &[]).expect("it fits");
    // The cable is at the same port of the leaf, but it was named by the leaf's end.
    assert!(book.unknown_parts().is_empty(), "{:?}", book.unknown_parts());
    let bare = Book::recover(ground(drawn(false, &["spine0", "spine1"])).network, &snapshot, &[]);
    let bare = bare.expect_err("no names without a topology").to_string();
    assert!(bare.contains("without a topology"), "{bare}");
}

#[test]
fn an_outage_is_written_as_documented_and_names_that_do_not_end_are_malformed() {
    let links = vec![("leaf1".to_string(), 6)];
    let down = Names { nodes: vec!["host7".to_string()], links, carriers: Vec::new() };
    let change = Change::Outage { down, moved: 2, degraded: 1 };
    let entries = vec![Entry { client: 5, sequence: 9, change }];
    let record = Batch { term: 3, first: 8, entries }.encode();
    let mut body = Vec::new();
    [3_u64, 8].iter().for_each(|number| body.extend(number.to_le_bytes()));
    body.extend(1_u32.to_le_bytes());
    [5_u64, 9].iter().for_each(|number| body.extend(number.to_le_bytes()));
    body.extend([4, 1, 0, 0, 0, 5, 0, 0, 0]);
    body.extend(b"host7");
    body.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    body.extend(b"leaf1");
    body.extend([6, 2, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(record, sealed(VERSION, 0, &body));
    // A link without a carrier is in a list of its own, which a bit in the count of nodes
    // announces.
    let carriers = vec![("leaf1".to_string(), 6)];
    let down = Names { nodes: Vec::new(), links: carriers.clone(), carriers };
    let change = Change::Outage { down, moved: 0, degraded: 0 };
    let entries = vec![Entry { client: 5, sequence: 9, change }];
    let record = Batch { term: 3, first: 8, entries }.encode();
    let mut carried = body[..36].to_vec();
    carried.extend([4, 0, 0, 0, 128]);
    for _ in 0..2 {
        carried.extend([1, 0, 0, 0, 5, 0, 0, 0]);
        carried.extend(b"leaf1");
        carried.push(6);
    }
    carried.extend([0; 8]);
    assert_eq!(record, sealed(VERSION, 0, &carried));
    // The count of nodes, and the length of a name.
    for at in [37, 41] {
        let mut body = body.clone();
        body[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let refused = recover(&[], &sealed(VERSION, 0, &body)).expect_err("impossible");
        assert_eq!(refused, LogError::Malformed { at: 0 });
    }
}

#[test]
fn a_wrong_body_with_a_right_checksum_is_refused_and_nothing_else() {
    let (records, _, snapshot) = written();
    let (broken_log, broken_snapshot) = broken();
    let whole = ground(drawn(false, &["spine0", "spine1"]));
    // What comes before, and what is changed: of these the snapshots have kind 1.
    let mut cases: Vec<(Ground, Vec<u8>, Vec<u8>, u16)> = Vec::new();
    for (at, record) in records.iter().enumerate() {
        cases.push((small().into(), records[..at].concat(), record.clone(), 0));
    }
    cases.push((small().into(), Vec::new(), snapshot, 1));
    cases.push((whole.clone(), Vec::new(), broken_log, 0));
    cases.push((whole, Vec::new(), broken_snapshot, 1));
    let mut random = Pcg32::new(5, 5);
    for _ in 0..20_000 {
        let (ground, before, record, kind) = &cases[random.next_u32() as usize % cases.len()];
        let mut body = record[12..].to_vec();
        for _ in 0..1 + random.next_u32() % 3 {
            let place = random.next_u32() as usize % body.len();
            body[place] = random.next_u32() as u8;
        }
        body.truncate(1 + random.next_u32() as usize % (2 * body.len()));
        let record = sealed(VERSION, *kind, &body);
        let recovered = match kind {
            1 => Book::recover(ground.clone(), &record, &[]),
            _ => Book::recover(ground.clone(), &[], &[before.clone(), record].concat()),
        };
        if let Ok((book, _)) = recovered {
            book.ledger().audit().expect("whatever was recovered fits");
        }
    }
}
