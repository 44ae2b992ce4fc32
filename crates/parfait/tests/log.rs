//! The log of admissions: what is recovered, what is cut, and what is refused.

use fabric::shape::Shape;
use fabric::topology::Capacity;
use parfait::demand::{Abstraction, Order};
use parfait::loads::Piece;
use parfait::log::{Batch, Book, Change, Entry, Found, Held, Label, LogError, Outcome, VERSION};
use parfait::network::{Network, Routing};
use parfait::queues::Dscp;
use parfait::runs::Run;
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

fn network(shape: &str, share: u64) -> Network {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let rate = |_, link: &fabric::topology::Link| link.capacity.rate_bps / share;
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
        (3, vec![Change::Release(1), admit([4, 5])]),
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

#[test]
fn a_wrong_body_with_a_right_checksum_is_refused_and_nothing_else() {
    let (records, _, snapshot) = written();
    let mut random = Pcg32::new(5, 5);
    for _ in 0..20_000 {
        let at = random.next_u32() as usize % 6;
        let (kind, record) = if at == 5 { (1, &snapshot) } else { (0, &records[at]) };
        let mut body = record[12..].to_vec();
        for _ in 0..1 + random.next_u32() % 3 {
            let place = random.next_u32() as usize % body.len();
            body[place] = random.next_u32() as u8;
        }
        body.truncate(1 + random.next_u32() as usize % (2 * body.len()));
        let record = sealed(VERSION, kind, &body);
        let recovered = match kind {
            1 => recover(&record, &[]),
            _ => recover(&[], &[records[..at].concat(), record].concat()),
        };
        if let Ok((book, _)) = recovered {
            book.ledger().audit().expect("whatever was recovered fits");
        }
    }
}
