//! What a brain writes when something breaks, comes back, or makes room: degraded jobs get their
//! guarantee back.

use parfait::brain::place_job;
use parfait::demand::{Abstraction, Order};
use parfait::ledger::JobId;
use parfait::loads::Piece;
use parfait::log::{Batch, Book, Change, Entry, Held, Label, LogError, MAX_RESTORED, Outcome};
use parfait::outage::Names;
use parfait::placement::search::Memory;
use parfait::queues::Dscp;
use parfait::repair_log::{self, Part};
use parfait::runs::Run;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use topology::graph::{Capacity, Link, NodeId};
use topology::shape::Shape;

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

    /// Two workers on these hosts, with the first DSCP from that number on that is free there;
    /// nothing if none is.
    fn try_put(&mut self, name: &str, dscp: usize, hosts: [u32; 2]) {
        if hosts[0] == hosts[1] {
            return;
        }
        let all = Dscp::all().count();
        let pieces = |(at, host): (u32, u32)| Piece { host, run: Run::new(at, at + 1) };
        let mut held = Held {
            label: Label { name: name.to_string(), owner: String::new() },
            dscp: Dscp::all().next().expect("a code point"),
            job: "ring:2@1k".parse().expect("a job"),
            abstraction: Abstraction::Parfait,
            order: Order::Ranks,
            pieces: (0..).zip(hosts).map(pieces).collect(),
        };
        for number in dscp..dscp + all {
            held.dscp = Dscp::all().nth(number % all).expect("a code point");
            let change = Change::Admit(held.clone());
            let entry = Entry { client: 1, sequence: self.book.next_index(), change };
            if self.book.clone().apply(1, &entry).is_ok() {
                self.write(vec![entry.change]);
                return;
            }
        }
    }

    fn node(&self, name: &str) -> NodeId {
        let topology = &self.ground.site.as_ref().expect("it has one").topology;
        topology.named(name).expect("it is there")
    }

    fn between(&self, a: &str, b: &str) -> Part {
        let ends = [a, b].map(|name| self.node(name));
        let topology = &self.ground.site.as_ref().expect("it has one").topology;
        let joins =
            |link: &Link| ends.iter().all(|node| link.ends.iter().any(|end| end.node == *node));
        let (link, _) = topology.links().find(|(_, link)| joins(link)).expect("they are joined");
        Part::Link(link)
    }

    fn host_of(&self, job: JobId) -> NodeId {
        self.ground.network.node_of(self.book.jobs()[&job].pieces[0].host)
    }

    fn fail(&mut self, node: NodeId) {
        let changes = repair_log::outage(&self.book, &[Part::Node(node)], true, 100);
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
    let changes = repair_log::release(&written.book, small);
    assert!(changes.iter().any(|change| matches!(change, Change::Move(own) if own.job == large)));
    let outcome = written.write(changes);
    assert_eq!(outcome, Outcome::Released { job: small, restored: vec![large] });
    assert!(written.degraded().is_empty());
    written.check();
    let changes = repair_log::release(&written.book, other);
    assert_eq!(changes, [Change::Release { job: other, restored: vec![] }], "nobody needs it");
}

#[test]
fn a_release_that_makes_no_room_is_a_release_and_no_more() {
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    let own = written.admit("own", "ring:8@1G");
    written.fail(written.node("host3"));
    assert_eq!(written.degraded(), [own]);
    // The degraded job itself.
    let changes = repair_log::release(&written.book, own);
    assert_eq!(changes, [Change::Release { job: own, restored: vec![] }]);
    let mut written = Written::new("leaf-spine:2x2x2", 4);
    let large = written.admit("large", "ring:13@1G");
    let small = written.admit("small", "ring:2@1G");
    written.fail(written.node("host0"));
    written.fail(written.node("host1"));
    let before = written.degraded();
    assert!(before.contains(&large), "{before:?}");
    let changes = repair_log::release(&written.book, small);
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
        let outcome = written.write(repair_log::release(&written.book, filler));
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
        repair_log::outage(&written.book, &[Part::Node(host)], true, 100).expect("it is down");
    assert!(matches!(mended[..], [Change::Outage { moved: 0, degraded: 1, .. }]), "{mended:?}");
    // One spine carries one of the large jobs, and the only slots for the other job are where all
    // DSCPs are taken.
    let nodes = vec!["spine1".to_string(), "host2".to_string()];
    let down = Names { nodes, ..Names::default() };
    written.write(vec![Change::Outage { down, moved: 0, degraded: 3 }]);
    assert_eq!(written.degraded(), [fits, small, stuck]);
    let outcome = written.write(repair_log::release(&written.book, small));
    assert_eq!(outcome, Outcome::Released { job: small, restored: vec![fits] });
    assert_eq!(written.degraded(), [stuck]);
    assert!(written.book.clashes(|_| false).is_empty());
    written.check();
}

/// Jobs whose new paths leave them no DSCP are degraded, and nobody else is.
#[test]
fn an_outage_is_written_where_more_jobs_meet_than_there_are_dscps() {
    let mut written = Written::new("torus:4:2", 64);
    let all = Dscp::all().count();
    // The `right` jobs go from s0 to s1, the `left` ones from s0 to s3: both sets use all DSCPs and
    // share no link.
    for number in 0..all {
        written.put(&format!("right{number}"), "ring:2@1k", number, &[(0, 1), (2, 1)]);
        written.put(&format!("left{number}"), "ring:2@1k", number, &[(1, 1), (7, 1)]);
    }
    assert!(written.book.clashes(|_| false).is_empty());
    let parts = [written.between("s0", "s1")];
    // Workers may not move, so all jobs go the long way.
    let changes = repair_log::outage(&written.book, &parts, true, 0).expect("it is down");
    let outcome = written.write(changes);
    let all = all as u32;
    assert_eq!(outcome, Outcome::Repaired { hit: 0, moved: 0, degraded: all });
    let name = |job: &JobId| written.book.jobs()[job].label.name.as_str();
    assert!(written.degraded().iter().all(|job| name(job).starts_with("right")));
    assert_eq!(written.degraded().len(), all as usize);
    assert!(written.book.clashes(|_| false).is_empty());
    written.check();
    let changes = repair_log::outage(&written.book, &parts, false, 0).expect("it is back");
    let outcome = written.write(changes);
    assert_eq!(outcome, Outcome::Repaired { hit: 0, moved: 0, degraded: 0 });
    assert!(written.degraded().is_empty() && written.book.clashes(|_| false).is_empty());
    written.check();
}

#[test]
fn a_job_on_a_new_path_yields_its_dscp_to_one_that_was_there() {
    let mut written = Written::new("torus:4:2", 64);
    for number in 1..Dscp::all().count() {
        written.put(&format!("filler{number}"), "ring:2@1k", number, &[(6, 1), (7, 1)]);
    }
    let early = written.put("early", "ring:2@1k", 0, &[(0, 1), (2, 1)]);
    let late = written.put("late", "ring:2@1k", 0, &[(1, 1), (7, 1)]);
    let part = written.between("s0", "s1");
    let changes = repair_log::outage(&written.book, &[part], true, 100).expect("it is down");
    // The later one has no other DSCP at host 7.
    assert!(matches!(changes[1..], [Change::Mark(job, _)] if job == early), "{changes:?}");
    let dscp = written.book.jobs()[&late].dscp;
    let outcome = written.write(changes);
    assert_eq!(outcome, Outcome::Repaired { hit: 0, moved: 0, degraded: 0 });
    assert_eq!(written.book.jobs()[&late].dscp, dscp);
    written.check();
}

#[test]
fn a_job_that_is_hit_takes_no_dscp_from_one_that_is_not() {
    let mut written = Written::new("torus:4:2", 64);
    let all = Dscp::all().count();
    // Together they have all DSCPs but the last, and one of each has the first.
    for number in 0..27 {
        written.put(&format!("right{number}"), "ring:2@1k", number, &[(0, 1), (2, 1)]);
    }
    for number in [0].into_iter().chain(27..all - 1) {
        written.put(&format!("left{number}"), "ring:2@1k", number, &[(1, 1), (7, 1)]);
    }
    let hit = written.put("hit", "ring:2@1k", all - 1, &[(1, 1), (6, 1)]);
    let parts = [written.between("s0", "s1"), Part::Node(written.node("host6"))];
    let changes = repair_log::outage(&written.book, &parts, true, 100).expect("it is down");
    written.write(changes);
    assert!(written.degraded().iter().all(|job| *job == hit), "{:?}", written.degraded());
    written.check();
}

/// DSCPs are as scarce as they can be, and what comes back degrades nobody who was whole.
#[test]
fn what_comes_back_takes_no_dscp_from_anyone() {
    let mut seed = 99_u64;
    let mut draw = move |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    for round in 0..4 {
        let mut written = Written::new("torus:4:2", 64);
        for number in 0..260 {
            let hosts = [draw(8) as u32, draw(8) as u32];
            written.try_put(&format!("job{number}"), number, hosts);
        }
        let at = draw(4);
        let part = [written.between(&format!("s{at}"), &format!("s{}", (at + 1) % 4))];
        let changes = repair_log::outage(&written.book, &part, true, 0).expect("it is down");
        written.write(changes);
        let before = written.degraded();
        let changes = repair_log::outage(&written.book, &part, false, 0).expect("it is back");
        let taken =
            |change: &&Change| matches!(change, Change::Degrade(job) if !before.contains(job));
        assert_eq!(changes.iter().find(taken), None, "round {round}");
        written.write(changes);
        assert!(written.degraded().len() <= before.len());
        assert!(written.book.clashes(|_| false).is_empty());
        written.check();
    }
}

#[test]
fn tidying_up_gives_degraded_jobs_their_guarantee_back_and_counts_the_others() {
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    written.admit("own", "ring:8@1G");
    written.fail(written.node("host3"));
    let refused = repair_log::defragment(&written.book, 16).expect_err("nothing can be moved");
    assert_eq!(refused, "no move would make room");
    // The ledger has room that nobody tried: as after a release whose bound was too small.
    let mut written = Written::new("leaf-spine:2x2x2", 2);
    let small = written.admit("small", "ring:2@1G");
    let large = written.admit("large", "ring:4@1G");
    written.admit("other", "ring:2@1G");
    written.fail(written.host_of(large));
    written.write(vec![Change::Release { job: small, restored: vec![] }]);
    assert_eq!(written.degraded(), [large]);
    let refused = repair_log::defragment(&written.book, 0).expect_err("it has to move");
    assert_eq!(refused, "no move would make room");
    let changes = repair_log::defragment(&written.book, 16).expect("it finds a place");
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
