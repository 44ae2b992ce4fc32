//! Which admitted jobs take staggering: from the book alone, where it helps, and computed anew only
//! where something changed.

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::JobId;
use parfait::loads::Piece;
use parfait::log::{Batch, Book, Change, Entry, Held, Label, Outcome};
use parfait::outage::Names;
use parfait::queues::Dscp;
use parfait::runs::Run;
use parfait::shifts::LeftAlone;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use parfait::staggering::{Alone, LIMITS, Staggering};
use topology::graph::Capacity;
use topology::shape::Shape;

fn ground(reservable_ppm: u32) -> Ground {
    let shape: Shape = "leaf-spine:3x2x2".parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    Ground::new(Site { topology, slots: 64, ecmp: Ecmp::Even, reservable_ppm }).expect("connected")
}

/// One worker on each of these hosts; jobs differ in their number.
fn job(number: u8, text: &str, hosts: &[u32]) -> Change {
    let piece = |(rank, host): (u32, &u32)| Piece { host: *host, run: Run::new(rank, rank + 1) };
    Change::Admit(Held {
        label: Label { name: format!("job{number}"), owner: String::new() },
        dscp: Dscp::all().nth(number.into()).expect("a code point"),
        job: text.parse::<Job>().expect("a job"),
        abstraction: Abstraction::Parfait,
        order: Order::Ranks,
        pieces: (0..).zip(hosts).map(piece).collect(),
    })
}

fn admit(book: &mut Book, number: u8, text: &str, hosts: &[u32]) -> JobId {
    let entry = Entry { client: 1, sequence: number.into(), change: job(number, text, hosts) };
    match book.apply(1, &entry).expect("it fits") {
        Outcome::Admitted(job) => job,
        other => panic!("{other:?}"),
    }
}

/// 100 Gbit/s for each link, and exchanges of up to that.
const RING: &str = "ring:2@30G cycle=24ms/7ms";

#[test]
fn jobs_that_fill_a_link_together_take_turns_and_others_do_not() {
    let mut book = Book::new(ground(1_000_000));
    let a = admit(&mut book, 1, RING, &[0, 1]);
    let alone = Staggering::of(&book);
    assert_eq!(alone.stagger(a).expect("it says its cycle").phase, Err(Alone::Free));
    let b = admit(&mut book, 2, RING, &[0, 1]);
    let elsewhere = admit(&mut book, 3, RING, &[2, 3]);
    let silent = admit(&mut book, 4, "ring:2@30G", &[0, 1]);
    // Of 100 Gbit/s, exchanges of 60 and 30 fit at the same time.
    let small = [4, 5].map(|at| {
        let text = ["ring:2@20G cycle=24ms/8ms", "ring:2@10G cycle=24ms/8ms"][at - 4];
        admit(&mut book, at as u8 + 1, text, &[4, 5])
    });
    let staggering = Staggering::of(&book);
    let phase = |job| staggering.stagger(job).expect("it says its cycle").phase;
    let [first, second] = [a, b].map(|job| phase(job).expect("they take turns"));
    // A fiftieth longer than said.
    assert_eq!((first.period_ns, first.shift_ns, first.exchange_ns), (24_480_000, 0, 7_000_000));
    assert!((7_000_000..=17_000_000).contains(&second.shift_ns) && second.is_valid());
    assert_eq!(staggering.stagger(a).expect("it takes turns").with, [b]);
    for job in [elsewhere, small[0], small[1]] {
        assert_eq!(phase(job), Err(Alone::Free));
    }
    assert_eq!(staggering.stagger(silent), None);
}

#[test]
fn every_replay_gives_the_same_turns() {
    let ground = ground(1_000_000);
    let hosts = parfait::log::fingerprint(&ground.network);
    let all: [&[u32]; 5] = [&[0, 1], &[0, 1, 2], &[2, 3], &[3, 4], &[1, 5]];
    let text = |at: usize| {
        let workers = all[at].len();
        format!("ring:{workers}@20G cycle={}ms/{}ms", [24, 12, 24, 36, 48][at], 5 + at)
    };
    let changes = (0..5).map(|at| job(at as u8 + 1, &text(at), all[at]));
    let changes = core::iter::once(Change::Lead { hosts }).chain(changes);
    let entries: Vec<Entry> = changes
        .chain([Change::Release { job: 2, restored: Vec::new() }, job(9, &text(0), &[0, 5])])
        .zip(1..)
        .map(|(change, sequence)| Entry { client: 1, sequence, change })
        .collect();
    let (mut book, mut staggering) = (Book::new(ground.clone()), Staggering::default());
    for entry in &entries {
        book.apply(1, entry).expect("it fits");
        staggering.update(&book);
    }
    let log = Batch { term: 1, first: 0, entries }.encode();
    let (replayed, _) = Book::recover(ground.clone(), &[], &log).expect("whole");
    let (restored, _) = Book::recover(ground, &book.snapshot(), &[]).expect("whole");
    let mut shifted = 0;
    for job in book.jobs().keys() {
        let stagger = staggering.stagger(*job);
        assert_eq!(stagger, Staggering::of(&replayed).stagger(*job));
        assert_eq!(stagger, Staggering::of(&restored).stagger(*job));
        shifted += u32::from(stagger.is_some_and(|stagger| stagger.phase.is_ok()));
    }
    assert!(shifted >= 4, "{staggering:?}");
}

#[test]
fn nothing_is_computed_where_no_cycle_host_or_outage_changed() {
    let mut book = Book::new(ground(1_000_000));
    let (a, b) = (admit(&mut book, 1, RING, &[0, 1]), admit(&mut book, 2, RING, &[0, 1]));
    let mut staggering = Staggering::of(&book);
    assert_eq!(staggering.computed(), 1);
    let silent = admit(&mut book, 3, "ring:2@30G", &[0, 1]);
    assert!(staggering.update(&book).is_empty());
    let change = |job| Change::Release { job, restored: Vec::new() };
    let release = |job| Entry { client: 2, sequence: job, change: change(job) };
    book.apply(1, &release(silent)).expect("it is there");
    assert!(staggering.update(&book).is_empty());
    assert_eq!(staggering.computed(), 1);
    book.apply(1, &release(a)).expect("it is there");
    let changed: Vec<JobId> = staggering.update(&book).into_iter().collect();
    assert_eq!((changed, staggering.computed()), (vec![a, b], 2));
    assert_eq!(staggering.stagger(b).expect("it says its cycle").phase, Err(Alone::Free));
}

#[test]
fn parts_without_gain_or_circle_and_large_ones_are_left_alone() {
    let mut book = Book::new(ground(1_000_000));
    // Whenever they begin, both send.
    let a = admit(&mut book, 1, "ring:2@60G cycle=24ms/23999us", &[0, 1]);
    admit(&mut book, 2, "ring:2@40G cycle=24ms/23999us", &[0, 1]);
    let mut odd = Vec::new();
    for (number, period) in (3..).zip([10_007, 13_009, 17_011, 19_013, 23_017, 29_021]) {
        let text = format!("ring:2@15G cycle={period}us/9ms");
        odd.push(admit(&mut book, number, &text, &[2, 3]));
    }
    for number in 9..9 + LIMITS.jobs as u8 + 1 {
        admit(&mut book, number, "ring:2@2G cycle=24ms/1ms", &[4, 5]);
    }
    let staggering = Staggering::of(&book);
    let phase = |job| staggering.stagger(job).expect("it says its cycle").phase;
    assert_eq!(phase(a), Err(Alone::NoGain));
    for job in odd {
        assert_eq!(phase(job), Err(Alone::Left(LeftAlone::NoCircle)));
    }
    let last = *book.jobs().keys().last().expect("many");
    let too_large = LeftAlone::TooLarge { jobs: LIMITS.jobs + 1, links: 1 };
    assert_eq!(phase(last), Err(Alone::Left(too_large)));
    assert_eq!(staggering.stagger(a).expect("it says its cycle").with.len(), 1);
    // Of those nobody looks at, there may be any number.
    assert_eq!(staggering.stagger(last).expect("it says its cycle").with, []);
}

#[test]
fn a_job_without_its_guarantee_takes_no_turns() {
    let mut book = Book::new(ground(1_000_000));
    let (a, b) = (admit(&mut book, 1, RING, &[0, 1]), admit(&mut book, 2, RING, &[0, 1]));
    let mut staggering = Staggering::of(&book);
    let down = Names { nodes: vec!["host1".to_string()], ..Names::default() };
    let change = Change::Outage { down, moved: 0, degraded: 0 };
    book.apply(1, &Entry { client: 3, sequence: 1, change }).expect("it is known");
    let changed: Vec<JobId> = staggering.update(&book).into_iter().collect();
    assert_eq!(changed, [a, b]);
    assert_eq!(staggering.stagger(a).expect("it says its cycle").phase, Err(Alone::Degraded));
}
