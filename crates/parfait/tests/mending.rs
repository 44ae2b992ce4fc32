//! What a brain writes when something breaks, comes back, or makes room: degraded jobs get their guarantee back.

use fabric::shape::Shape;
use fabric::topology::{Capacity, Link, NodeId};
use parfait::brain::place_job;
use parfait::demand::{Abstraction, Order};
use parfait::ledger::JobId;
use parfait::loads::Piece;
use parfait::log::{Batch, Book, Change, Entry, Held, Label, LogError, MAX_RESTORED, Outcome};
use parfait::mending::{self, Part};
use parfait::outage::Names;
use parfait::placement::search::Memory;
use parfait::queues::Dscp;
use parfait::runs::Run;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;

/// A book, and the log that it comes from.
struct Written {
    ground: Ground,
    book: Book,
    log: Vec<u8>,
}

impl Written {
    fn new(shape: &str, slots: u32) -> Written {
        let shape: Shape = shape.parse().expect("a shape");
        let topology = shape.build(Capacity::default()).expect("small");
        let site = Site { topology, slots, ecmp: Ecmp::Even, reservable_ppm: 1_000_000 };
        let ground = Ground::new(site).expect("connected");
        Written { book: Book::new(ground.clone()), ground, log: Vec::new() }
    }

    fn write(&mut self, changes: Vec<Change>) -> Outcome {
        let first = self.book.next_index();
        let mut entries = Vec::new();
        let mut outcomes = Vec::new();
        for (client, change) in [1].into_iter().chain(std::iter::repeat(0)).zip(changes) {
            let entry = Entry { client, sequence: first, change };
            outcomes.push(self.book.apply(1, &entry).expect("it fits"));
            entries.push(entry);
        }
        self.log.extend(Batch { term: 1, first, entries }.encode());
        outcomes.swap_remove(0)
    }

    fn admit(&mut self, name: &str, job: &str) -> JobId {
        let label = Label { name: name.to_string(), owner: String::new() };
        let job = job.parse().expect("a job");
        let mut memory = Memory::new();
        let held = place_job(&mut self.book, Abstraction::Parfait, 50, &mut memory, label, job);
        match self.write(vec![Change::Admit(held.expect("there is room"))]) {
            Outcome::Admitted(job) => job,
            other => panic!("{other:?}"),
        }
    }

    /// Admits a job to a place: so many workers on each of these hosts.
    fn put(&mut self, name: &str, job: &str, dscp: usize, hosts: &[(u32, u32)]) -> JobId {
        let mut first = 0;
        let pieces = hosts.iter().map(|(host, workers)| {
            let run = Run::new(first, first + workers);
            first = run.end;
            Piece { host: *host, run }
        });
        let held = Held {
            label: Label { name: name.to_string(), owner: String::new() },
            dscp: Dscp::all().nth(dscp).expect("a code point"),
            job: job.parse().expect("a job"),
            abstraction: Abstraction::Parfait,
            order: Order::Ranks,
            pieces: pieces.collect(),
        };
        match self.write(vec![Change::Admit(held)]) {
            Outcome::Admitted(job) => job,
            other => panic!("{other:?}"),
        }
    }

    fn node(&self, name: &str) -> NodeId {
        let topology = &self.ground.site.as_ref().expect("it has one").topology;
        topology.named(name).expect("it is there")
    }

    fn host_of(&self, job: JobId) -> NodeId {
        self.ground.network.node_of(self.book.jobs()[&job].pieces[0].host)
    }

    fn fail(&mut self, node: NodeId) {
        let changes = mending::outage(&self.book, &[Part::Node(node)], true, 100);
        self.write(changes.expect("something is left"));
    }

    fn degraded(&self) -> Vec<JobId> {
        self.book.degraded().collect()
    }

    /// A replay, and a snapshot, say the same.
    fn check(&self) {
        let (replayed, _) = Book::recover(self.ground.clone(), &[], &self.log).expect("whole");
        assert!(replayed.same_as(&self.book));
        let snapshot = self.book.snapshot();
        let (restored, _) = Book::recover(self.ground.clone(), &snapshot, &[]).expect("whole");
        assert!(restored.same_as(&self.book));
        self.book.ledger().audit().expect("sums are right");
    }
}

#[test]
fn a_release_gives_degraded_jobs_their_guarantee_back_and_says_whose() {
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    let small = written.admit("small", "ring:2@1G");
    let large = written.admit("large", "ring:4@1G");
    let other = written.admit("other", "ring:2@1G");
    written.fail(written.host_of(large));
    assert_eq!(written.degraded(), [large], "no slot is free");
    let changes = mending::release(&written.book, small);
    assert!(changes.iter().any(|change| matches!(change, Change::Move(own) if own.job == large)));
    let outcome = written.write(changes);
    assert_eq!(outcome, Outcome::Released { job: small, restored: vec![large] });
    assert!(written.degraded().is_empty());
    written.check();
    let changes = mending::release(&written.book, other);
    assert_eq!(changes, [Change::Release { job: other, restored: vec![] }], "nobody needs it");
}

#[test]
fn a_release_that_makes_no_room_is_a_release_and_no_more() {
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    let own = written.admit("own", "ring:8@1G");
    written.fail(written.node("host3"));
    assert_eq!(written.degraded(), [own]);
    // The degraded job itself.
    let changes = mending::release(&written.book, own);
    assert_eq!(changes, [Change::Release { job: own, restored: vec![] }]);
    let mut written = Written::new("leaf-spine:2x2x2", 4);
    let large = written.admit("large", "ring:13@1G");
    let small = written.admit("small", "ring:2@1G");
    written.fail(written.node("host0"));
    written.fail(written.node("host1"));
    let before = written.degraded();
    assert!(before.contains(&large), "{before:?}");
    let changes = mending::release(&written.book, small);
    assert_eq!(changes, [Change::Release { job: small, restored: vec![] }]);
    written.write(changes);
    assert_eq!(written.degraded(), [large]);
    written.check();
}

#[test]
fn jobs_that_are_not_tried_after_one_release_are_after_another() {
    // Each of both takes more effort than a release may; only one of them is tried at a time.
    let mut written = Written::new("leaf-spine:2x2x4", 1600);
    let fillers: Vec<JobId> =
        (0..3).map(|number| written.admit(&format!("filler{number}"), "ring:1600@1k")).collect();
    let large: Vec<JobId> =
        (0..2).map(|number| written.admit(&format!("large{number}"), "ring:3200@1k")).collect();
    for job in &large {
        written.fail(written.host_of(*job));
    }
    written.admit("last", "ring:1600@1k");
    assert_eq!(written.degraded(), large);
    let mut left = 2;
    for filler in fillers {
        let outcome = written.write(mending::release(&written.book, filler));
        let Outcome::Released { restored, .. } = outcome else { panic!("{outcome:?}") };
        assert!(restored.len() <= 1, "{restored:?}");
        left -= restored.len();
        written.check();
    }
    assert_eq!((left, written.degraded().len()), (0, 0));
}

#[test]
fn a_job_that_gets_no_dscp_keeps_no_other_from_its_guarantee() {
    let mut written = Written::new("leaf-spine:2x2x4", 64);
    // Below the second leaf, jobs between two hosts have all DSCPs.
    let all = Dscp::all().count();
    for number in 0..all {
        written.put(&format!("filler{number}"), "ring:2@1k", number, &[(4, 1), (5, 1)]);
    }
    for (host, workers) in [(0, 63), (1, 63), (3, 62), (6, 63), (7, 63)] {
        let text = format!("ring:{workers}@1k");
        written.put(&format!("block{host}"), &text, 0, &[(host, workers)]);
    }
    let fits = written.put("fits", "ring:2@90G", 0, &[(0, 1), (6, 1)]);
    let small = written.put("small", "ring:2@90G", 1, &[(1, 1), (7, 1)]);
    let stuck = written.put("stuck", "ring:2@1k slots=2", 2, &[(2, 1), (3, 1)]);
    // An outage is one also where a job gets no DSCP.
    let host = written.node("host2");
    let mended =
        mending::outage(&written.book, &[Part::Node(host)], true, 100).expect("it is down");
    assert!(matches!(mended[..], [Change::Outage { moved: 0, degraded: 1, .. }]), "{mended:?}");
    // One spine carries one of the large jobs, and the only slots for the other job are where all DSCPs are taken.
    let nodes = vec!["spine1".to_string(), "host2".to_string()];
    let down = Names { nodes, links: Vec::new() };
    written.write(vec![Change::Outage { down, moved: 0, degraded: 3 }]);
    assert_eq!(written.degraded(), [fits, small, stuck]);
    let outcome = written.write(mending::release(&written.book, small));
    assert_eq!(outcome, Outcome::Released { job: small, restored: vec![fits] });
    assert_eq!(written.degraded(), [stuck]);
    assert!(written.book.clashes().is_empty());
    written.check();
}

/// What is down is down: jobs whose new paths leave them no DSCP are degraded, and nobody else is.
#[test]
fn an_outage_is_written_where_more_jobs_meet_than_there_are_dscps() {
    let mut written = Written::new("torus:4:2", 64);
    let all = Dscp::all().count();
    // Two switches in opposite directions from the first one: both sets have all DSCPs, and share no link.
    for number in 0..all {
        written.put(&format!("right{number}"), "ring:2@1k", number, &[(0, 1), (2, 1)]);
        written.put(&format!("left{number}"), "ring:2@1k", number, &[(1, 1), (7, 1)]);
    }
    assert!(written.book.clashes().is_empty());
    let topology = &written.ground.site.as_ref().expect("it has one").topology;
    let named = |name| topology.named(name).expect("it is there");
    let ends = [named("s0"), named("s1")];
    let joins = |link: &Link| ends.iter().all(|node| link.ends.iter().any(|end| end.node == *node));
    let between = topology.links().find(|(_, link)| joins(link)).expect("they are joined");
    let parts = [Part::Link(between.0)];
    // Workers may not move, so all jobs go the long way.
    let changes = mending::outage(&written.book, &parts, true, 0).expect("it is down");
    let outcome = written.write(changes);
    let all = all as u32;
    assert_eq!(outcome, Outcome::Repaired { hit: 0, moved: 0, degraded: all });
    assert_eq!(written.degraded().len(), all as usize);
    assert!(written.book.clashes().is_empty());
    written.check();
    let changes = mending::outage(&written.book, &parts, false, 0).expect("it is back");
    let outcome = written.write(changes);
    assert_eq!(outcome, Outcome::Repaired { hit: 0, moved: 0, degraded: 0 });
    assert!(written.degraded().is_empty() && written.book.clashes().is_empty());
    written.check();
}

#[test]
fn tidying_up_gives_degraded_jobs_their_guarantee_back_and_counts_the_others() {
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    written.admit("own", "ring:8@1G");
    written.fail(written.node("host3"));
    let refused = mending::defragment(&written.book, 16).expect_err("nothing can be moved");
    assert_eq!(refused, "no move would make room");
    // The ledger has room that nobody tried: as after a release whose bound was too small.
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    let small = written.admit("small", "ring:2@1G");
    let large = written.admit("large", "ring:4@1G");
    written.admit("other", "ring:2@1G");
    written.fail(written.host_of(large));
    written.write(vec![Change::Release { job: small, restored: vec![] }]);
    assert_eq!(written.degraded(), [large]);
    let refused = mending::defragment(&written.book, 0).expect_err("it has to move");
    assert_eq!(refused, "no move would make room");
    let changes = mending::defragment(&written.book, 16).expect("it finds a place");
    let outcome = written.write(changes);
    assert!(matches!(outcome, Outcome::Repaired { hit: 0, moved: 2, degraded: 0 }), "{outcome:?}");
    assert!(written.degraded().is_empty());
    written.check();
}

#[test]
fn a_release_that_names_too_many_is_malformed() {
    let written = Written::new("leaf-spine:2x2x2", 2);
    for (count, is_good) in [(MAX_RESTORED as u64, true), (MAX_RESTORED as u64 + 1, false)] {
        let change = Change::Release { job: 0, restored: (0..count).collect() };
        let entries = vec![Entry { client: 1, sequence: 1, change }];
        let log = Batch { term: 1, first: 0, entries }.encode();
        let refused = Book::recover(written.ground.clone(), &[], &log).expect_err("no job 0");
        assert_eq!(refused == LogError::Malformed { at: 0 }, !is_good, "{refused}");
    }
}
