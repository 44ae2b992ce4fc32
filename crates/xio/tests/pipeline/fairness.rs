//! Sessions share a target: none starves, whatever the others do.

use std::collections::VecDeque;

use roce::Time;
use roce::endpoint::{QpAttr, QpState};
use roce::verbs::{Access, Qpn};
use xio::capsule::Outcome;
use xio::disk::{Disk, DiskDone, DiskRead, FileId};
use xio::stage::BlockPlan;

use super::corpus::Corpus;
use super::net::register;
use sim::chance::Chance;

use super::raw::{Raw, request};
use super::seeds::{Replay, seeds};
use super::world::{READER, Setup, StreamSpec, TARGET, TargetHost, World};
use sim::faults::FaultMix;
use xio::target::WORK_PER_CREDIT;

/// Reads of each file number, in the order of the numbers.
fn reads_by_file(world: &World) -> Vec<usize> {
    let log = &world.target.disk.log;
    let count = |file: u32| log.iter().filter(|read| read.file.0 == file).count();
    let files = log.iter().map(|read| read.file.0 + 1).max().unwrap_or(0);
    (0..files).map(count).collect()
}

/// Readers that never end, over one dataset each.
fn crowded(corpus: &Corpus, readers: usize) -> Setup {
    let plain = Setup::plain(corpus, 0);
    let endless = StreamSpec { batches: None, pace_ns: 0, slots: 8, ..plain.streams[0] };
    Setup { streams: vec![endless; readers], credits: 8, ..plain }
}

fn assert_even(corpus: &Corpus, setup: &Setup) {
    let mut world = World::new(corpus, setup);
    let readers = setup.streams.len();
    assert!(world.run_until(|world| world.target.disk.log.len() >= 200 * readers));
    let reads = reads_by_file(&world);
    assert_eq!(reads.len(), readers, "a file each");
    assert!(reads.iter().all(|count| (180..=220).contains(count)), "uneven: {reads:?}");
}

#[test]
fn a_busy_disk_serves_sessions_in_turn() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    for (readers, disk_depth) in [(2, 1), (3, 1), (3, 2), (4, 3)] {
        let setup = Setup { disk_depth, staging_buffers: 12, ..crowded(&corpus, readers) };
        assert_even(&corpus, &setup);
    }
}

/// Takes one read, and has done it when asked next.
#[derive(Debug, Default)]
struct InstantDisk {
    taken: Option<DiskRead>,
    log: Vec<FileId>,
}

impl Disk for InstantDisk {
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead> {
        match self.taken {
            Some(_) => Err(read),
            None => {
                self.log.push(read.file);
                self.taken = Some(read);
                Ok(())
            }
        }
    }

    fn poll(&mut self) -> Option<DiskDone> {
        let DiskRead { tag, len, .. } = self.taken.take()?;
        let result = Ok(len);
        Some(DiskDone { tag, result })
    }
}

/// The session that finds the disk full keeps its turn.
#[test]
fn a_full_disk_costs_no_turn() {
    let corpus = Corpus::one_file(&mut Chance::new(4));
    let setup =
        Setup { streams: Vec::new(), credits: 16, staging_buffers: 32, ..crowded(&corpus, 0) };
    let mut world = World::new(&corpus, &setup);
    let mut raws: Vec<Raw> = (0..2).map(|_| world.raw_session(16)).collect();
    for raw in &mut raws {
        for seq in 1..=8 {
            let capsule = request(raw, seq, &corpus).encode(xio::kernel::crc32c);
            raw.send(&mut world.net, &capsule);
        }
    }
    world.net.run_for(1_000_000);
    let mut disk = InstantDisk::default();
    let now = world.net.now();
    let node = &mut world.net.nodes[TARGET];
    for _ in 0..16 {
        world.target.target.poll(now, &mut node.endpoint, &mut node.memory, &mut disk);
    }
    assert_eq!(disk.log.len(), 16);
    for pair in disk.log.chunks(2) {
        assert_ne!(pair[0], pair[1], "out of turn: {:?}", disk.log);
    }
}

/// Takes any number of reads, and has done all when asked next.
#[derive(Debug, Default)]
struct DeepDisk(VecDeque<DiskRead>);

impl Disk for DeepDisk {
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead> {
        self.0.push_back(read);
        Ok(())
    }

    fn poll(&mut self) -> Option<DiskDone> {
        self.0.pop_front().map(|DiskRead { tag, len, .. }| DiskDone { tag, result: Ok(len) })
    }
}

/// A user action may use its whole time for each block, so others come in between.
#[test]
fn one_turn_runs_one_user_action() {
    let mut corpus = Corpus::one_file(&mut Chance::new(6));
    for (wasm, blocks_per_poll) in [(false, 8), (true, 1)] {
        corpus.asked = BlockPlan { wasm, ..corpus.asked };
        let setup =
            Setup { streams: Vec::new(), credits: 16, staging_buffers: 32, ..crowded(&corpus, 0) };
        let mut world = World::new(&corpus, &setup);
        let mut raw = world.raw_session(16);
        for seq in 1..=8 {
            let capsule = request(&raw, seq, &corpus).encode(xio::kernel::crc32c);
            raw.send(&mut world.net, &capsule);
        }
        world.net.run_for(1_000_000);
        let (mut disk, now) = (DeepDisk::default(), world.net.now());
        let node = &mut world.net.nodes[TARGET];
        let target = &mut world.target.target;
        for polls in 1..=8 / blocks_per_poll {
            assert!(target.poll(now, &mut node.endpoint, &mut node.memory, &mut disk));
            let blocks = target.counters().source_bytes / u64::from(corpus.window * 4);
            assert!(blocks >= polls * blocks_per_poll, "{blocks} after {polls}");
            assert!(!wasm || target.counters().action_blocks == polls);
        }
        assert!(disk.0.is_empty());
    }
}

/// Every work request that the sessions may have posted fails at once: the completion queues hold
/// them all, each session is reported once, and every staging buffer is freed.
#[test]
fn completions_of_all_sessions_fit() {
    let (sessions, credits) = (4, 4);
    let corpus = Corpus::one_file(&mut Chance::new(5));
    let depth = sessions * credits * WORK_PER_CREDIT;
    let setup = Setup {
        streams: Vec::new(),
        credits,
        // Eight of these small blocks share a buffer, and one is reserved.
        staging_buffers: 2 * sessions * credits / 8 + 1,
        cq_depth: depth,
        ..crowded(&corpus, 0)
    };
    let mut world = World::new(&corpus, &setup);
    world.net.rnr_retry = 7;
    let mut raws: Vec<Raw> = (0..sessions).map(|_| world.raw_session(0)).collect();
    // Readers that receive no response, but send requests as if they had.
    for half in 0..2 {
        for raw in &mut raws {
            for seq in half * credits + 1..=(half + 1) * credits {
                let capsule = request(raw, seq.into(), &corpus).encode(xio::kernel::crc32c);
                raw.send(&mut world.net, &capsule);
            }
        }
        for _ in 0..200 {
            world.step();
        }
    }
    assert_eq!(world.target.target.counters().done, u64::from(2 * sessions * credits));
    assert_eq!(world.target.target.free_buffers(), 1);

    let now = world.net.now();
    let node = &mut world.net.nodes[TARGET];
    for qpn in world.target.session_qpns() {
        node.endpoint.modify_qp(now, qpn, &QpAttr::to(QpState::Error)).unwrap();
    }
    for cq in [world.target.cqs.send, world.target.cqs.recv] {
        assert_eq!(node.endpoint.cq_overrun(cq), Some(false));
    }
    let mut failed = Vec::new();
    let TargetHost { target, disk, .. } = &mut world.target;
    while target.poll(now, &mut node.endpoint, &mut node.memory, disk) {}
    failed.extend(std::iter::from_fn(|| world.target.target.failed_session()));
    let failed: Vec<_> = failed.into_iter().map(|(qpn, _)| qpn).collect();
    assert_eq!(failed, world.target.session_qpns());
    world.tear_down();
}

#[test]
fn scarce_staging_buffers_go_to_sessions_in_turn() {
    let corpus = Corpus::one_file(&mut Chance::new(2));
    for (readers, staging_buffers) in [(2, 1), (3, 2), (3, 4), (4, 3)] {
        let setup = Setup { disk_depth: 8, staging_buffers, ..crowded(&corpus, readers) };
        assert_even(&corpus, &setup);
    }
}

/// Readers that receive no responses keep staging buffers of the target busy; they must not get
/// them all.
#[test]
fn readers_that_take_no_answer_hold_nobody_up() {
    for seed in seeds(0..20) {
        let _replay = Replay { test: "readers_that_take_no_answer_hold_nobody_up", seed };
        let mut draw = Chance::new(seed);
        let corpus = Corpus::draw(&mut draw);
        let hoarders = draw.between(1, 3);
        let setup = Setup {
            staging_buffers: hoarders as u32 + draw.between(1, 3) as u32 + 3,
            credits: 12,
            faults: FaultMix::NONE,
            ..Setup::draw(&corpus, &mut draw)
        };
        let mut world = World::new(&corpus, &setup);
        world.net.rnr_retry = 7;
        let mut raws: Vec<Raw> = (0..hoarders).map(|_| world.raw_session(0)).collect();
        for raw in &mut raws {
            for seq in 1..=12 {
                let capsule = request(raw, seq, &corpus).encode(xio::kernel::crc32c);
                raw.send(&mut world.net, &capsule);
            }
        }
        world.run();
        world.assert_delivered();
    }
}

/// A session opened while others are active gets its turn.
#[test]
fn a_latecomer_is_served() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let setup = Setup { disk_depth: 1, staging_buffers: 4, ..crowded(&corpus, 3) };
    let mut world = World::new(&corpus, &setup);
    world.run_until(|world| world.net.now() > Time::from_nanos(2_000_000));
    let mut late = world.raw_session(4);
    let capsule = request(&late, 1, &corpus).encode(xio::kernel::crc32c);
    late.send(&mut world.net, &capsule);
    let before = world.target.disk.log.len();
    let answered = |world: &mut World| {
        late.poll(&mut world.net);
        !late.received.is_empty()
    };
    assert!(world.run_until(answered));
    assert!(world.target.disk.log.len() - before < 20, "served too late");
    let answers = late.answers();
    assert!(matches!(answers[0].outcome, Outcome::Done { .. }));
    assert_eq!(world.net.nodes[READER].endpoint.counters().rnr_naks_sent, 0);
}

/// A reader that keeps a number of requests for the first tokens of the file outstanding.
struct Client {
    raw: Raw,
    /// The target's end.
    session: Qpn,
    tokens: u32,
    outstanding: u64,
    asked: u64,
    answered: u64,
}

impl Client {
    fn open(world: &mut World, tokens: u32) -> Client {
        let mut raw = world.raw_session(64);
        if tokens > world.corpus().window {
            raw.data = register(&mut world.net.nodes[READER], 1 << 20, Access::REMOTE_WRITE);
        }
        let session = *world.target.session_qpns().last().expect("it was just opened");
        Client { raw, session, tokens, outstanding: 0, asked: 0, answered: 0 }
    }

    /// Takes what has arrived, and sends requests for what is to be outstanding.
    fn turn(&mut self, world: &mut World, corpus: &Corpus) {
        self.raw.poll(&mut world.net);
        for answer in self.raw.answers() {
            assert!(matches!(answer.outcome, Outcome::Done { .. }), "{:?}", answer.outcome);
            self.answered += 1;
        }
        while self.asked - self.answered < self.outstanding {
            self.asked += 1;
            let mut wanted = request(&self.raw, self.asked, corpus);
            wanted.tokens = self.tokens;
            self.raw.send(&mut world.net, &wanted.encode(xio::kernel::crc32c));
        }
    }
}

/// Lets the world run until each client that waits has got an answer.
fn serve_all(world: &mut World, corpus: &Corpus, clients: &mut [Client]) {
    let before: Vec<u64> = clients.iter().map(|client| client.answered).collect();
    let (reads, units) = (world.target.disk.log.len(), 8 * world.target.target.buffer_count());
    let is_served = |world: &mut World| {
        clients.iter_mut().for_each(|client| client.turn(world, corpus));
        let mut waits = clients
            .iter()
            .zip(&before)
            .map(|(client, before)| client.answered == *before && client.asked > client.answered);
        let others = world.target.disk.log.len() - reads;
        let waits = waits.any(|waits| waits);
        assert!(!waits || others <= 4 * units, "{others} reads for others while one waits");
        !waits
    };
    assert!(world.run_until(is_served), "one stands still");
}

/// One reader takes no answer, so its buffers are never free again; one wants all there are; others
/// come and go.
#[test]
fn nobody_stands_still_whoever_comes_and_goes() {
    for seed in seeds(0..24) {
        let _replay = Replay { test: "nobody_stands_still_whoever_comes_and_goes", seed };
        let mut draw = Chance::new(seed);
        let corpus = Corpus::one_file(&mut draw);
        let staging_buffers = draw.between(2, 6) as u32;
        let setup = Setup {
            streams: Vec::new(),
            credits: 64,
            staging_buffers,
            disk_depth: 64,
            ..crowded(&corpus, 0)
        };
        let mut world = World::new(&corpus, &setup);
        world.net.rnr_retry = 7;
        let mut clients = Vec::new();
        let is_first = draw.per_mille(600);
        if !is_first {
            clients.push(Client::open(&mut world, corpus.window));
            clients[0].outstanding = 64;
            serve_all(&mut world, &corpus, &mut clients);
        }
        let mut silent = world.raw_session(0);
        for seq in 1..=64 {
            let capsule = request(&silent, seq, &corpus).encode(xio::kernel::crc32c);
            silent.send(&mut world.net, &capsule);
        }
        for _ in 0..400 {
            world.step();
        }
        if is_first {
            // It took all that a lone session may.
            assert_eq!(world.target.target.free_buffers(), 1);
        }
        for _ in 0..40 {
            let which = draw.below(clients.len().max(1) as u64) as usize;
            match draw.below(4) {
                0 if clients.len() < 5 => clients.push(Client::open(&mut world, corpus.window)),
                1 if !clients.is_empty() => {
                    let gone = clients.swap_remove(which);
                    world.close_session(gone.session);
                }
                2 if !clients.is_empty() => clients[which].outstanding = draw.pick(&[0, 1, 64]),
                _ if !clients.is_empty() => clients[which].outstanding = draw.between(1, 8),
                _ => {}
            }
            serve_all(&mut world, &corpus, &mut clients);
        }
        world.tear_down();
    }
}

/// Small blocks take parts of buffers, and would leave no whole one for large blocks.
#[test]
fn large_blocks_get_their_share_beside_small_ones() {
    let corpus = Corpus::large_file(&mut Chance::new(7));
    for staging_buffers in [5, 9] {
        let setup = Setup {
            streams: Vec::new(),
            credits: 64,
            staging_buffers,
            disk_depth: 64,
            ..crowded(&corpus, 0)
        };
        let mut world = World::new(&corpus, &setup);
        let mut clients = vec![Client::open(&mut world, corpus.window)];
        clients[0].outstanding = 64;
        serve_all(&mut world, &corpus, &mut clients);
        clients.push(Client::open(&mut world, xio::target::BLOCK_BYTES / 4));
        clients[1].outstanding = 16;
        let mut most = 0;
        let enough = |world: &mut World| {
            clients.iter_mut().for_each(|client| client.turn(world, &corpus));
            let answered = clients[1].answered as usize;
            most = most.max(reads_by_file(world).get(1).map_or(0, |reads| reads - answered));
            answered >= 64
        };
        assert!(world.run_until(enough));
        // Half of what is not reserved.
        assert_eq!(most, (staging_buffers as usize - 1) / 2, "of {staging_buffers} buffers");
        world.tear_down();
    }
}
