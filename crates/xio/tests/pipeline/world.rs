//! A storage target and its readers on two machines, with the control plane that joins them.
//!
//! It replaces the drivers (engines, sessions over gRPC) in virtual time and in one thread: it
//! creates queue pairs, connects them, detects lost ones, and creates new ones. Messages of the
//! control plane take a while, so the two sides learn of a loss at different times.

use std::ops::Range;
use std::sync::Arc;

use roce::endpoint::{Mtu, QpAttr, QpState};
use roce::verbs::{Access, MemoryRegion, Qpn};
use roce::{Duration, Time};
use sim::chance::Chance;
use sim::faults::{Fault, FaultMix};
use xio::disk::FileId;
use xio::order::{Cut, SampleLayout};
use xio::reader::{
    self, ConnectionMemory, Delivery, LeaveOut, Reader, ReaderCounters, ReaderResources,
    ReaderSetup, ReaderSource, Share,
};
use xio::stage::Rows;
use xio::target::{
    self, STAGING_BYTES, SessionFailure, SessionMemory, Source, Target, WORK_PER_CREDIT,
};

use super::corpus::Corpus;
use super::disk::{SimDisk, SimFile};
use super::flip::Flip;
use super::ledger::{Ledger, Lie, Watched};
use super::net::{CQ_DEPTH, Cqs, Net, create_cqs, create_qp, earliest, register};
use super::raw::{Fake, Raw};
use super::ring::{End, HostRing};
use super::toy;

/// The node of the target, and that of the readers.
pub(crate) const TARGET: usize = 0;
pub(crate) const READER: usize = 1;

/// Memory for capsules of all sessions during a node's life.
const CAPSULE_MEMORY: usize = 32 << 20;

/// Events after which a run that has not ended is stuck.
const STEPS: u64 = 400_000;

/// Loss, duplicates and reordering, in per mille of packets.
pub(crate) fn faults(per_mille: [u32; 3]) -> FaultMix {
    let kinds = [Fault::Loss, Fault::Duplicate, Fault::Reorder];
    let with = |mix: FaultMix, (kind, rate)| mix.with(kind, 1_000 * rate);
    kinds.into_iter().zip(per_mille).fold(FaultMix::NONE, with)
}

/// The configuration of one reader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamSpec {
    pub(crate) first_batch: u64,
    pub(crate) batches: Option<u64>,
    /// First batch that is left out, and how many are.
    pub(crate) left_out: (u64, u64),
    pub(crate) slots: u32,
    /// Including bytes of a slot beyond whole batches.
    pub(crate) slot_bytes: u32,
    /// Mean time the host takes for a slot.
    pub(crate) pace_ns: u64,
    /// Connections to the target; datasets are assigned to them in turn.
    pub(crate) connections: u32,
}

impl StreamSpec {
    pub(crate) fn left_out(&self) -> Range<u64> {
        self.left_out.0..self.left_out.0 + self.left_out.1
    }

    /// The batches before and after those left out, each by its first and their number.
    pub(crate) fn runs(&self) -> [(u64, u64); 2] {
        let (first, out) = (self.first_batch, self.left_out());
        let end = first + self.batches.expect("a bounded stream");
        if out.is_empty() {
            return [(first, end - first), (end, 0)];
        }
        let (before, after) = (out.start.clamp(first, end), out.end.clamp(first, end));
        [(first, before - first), (after, end - after)]
    }
}

/// Configuration of a world.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) narrow_at_target: bool,
    /// Whether the files have manifests.
    pub(crate) manifests: bool,
    pub(crate) streams: Vec<StreamSpec>,
    pub(crate) credits: u32,
    pub(crate) staging_buffers: u32,
    pub(crate) disk_depth: usize,
    pub(crate) disk_latency_ns: (u64, u64),
    pub(crate) mtu: Mtu,
    /// Of the target's completion queues.
    pub(crate) cq_depth: u32,
    pub(crate) faults: FaultMix,
}

impl Setup {
    /// One stream from the first batch on, without faults.
    pub(crate) fn plain(corpus: &Corpus, batches: u64) -> Setup {
        Setup {
            seed: 1,
            narrow_at_target: true,
            manifests: false,
            streams: vec![StreamSpec {
                first_batch: 0,
                batches: Some(batches),
                left_out: (0, 0),
                slots: 2,
                slot_bytes: 2 * corpus.batch_bytes(),
                pace_ns: 1_000,
                connections: 1,
            }],
            credits: 4,
            staging_buffers: 3,
            disk_depth: 8,
            disk_latency_ns: (1_000, 100_000),
            mtu: Mtu::M1024,
            cq_depth: CQ_DEPTH,
            faults: FaultMix::NONE,
        }
    }

    /// A random setup.
    pub(crate) fn draw(corpus: &Corpus, draw: &mut Chance) -> Setup {
        let stream = |draw: &mut Chance| {
            let batch = corpus.batch_bytes();
            StreamSpec {
                first_batch: match draw.per_mille(300) {
                    true => 0,
                    false => draw.below(400),
                },
                batches: Some(draw.between(1, 29)),
                left_out: (0, 0),
                slots: draw.between(1, 4) as u32,
                slot_bytes: batch * draw.between(1, 4) as u32 + draw.below(batch.into()) as u32,
                pace_ns: draw.pick(&[100, 10_000, 500_000]),
                connections: draw.between(1, 2) as u32,
            }
        };
        let readers = draw.pick(&[1, 1, 1, 2, 3]);
        let rate = |draw: &mut Chance| match draw.per_mille(500) {
            true => draw.pick(&[2, 10, 50]),
            false => 0,
        };
        Setup {
            seed: draw.word(),
            narrow_at_target: true,
            manifests: false,
            streams: (0..readers).map(|_| stream(draw)).collect(),
            credits: draw.between(1, 11) as u32,
            staging_buffers: draw.between(1, 5) as u32,
            disk_depth: draw.between(1, 9) as usize,
            disk_latency_ns: (1_000, draw.pick(&[2_000, 100_000, 3_000_000])),
            mtu: draw.pick(&Mtu::ALL),
            cq_depth: CQ_DEPTH,
            faults: faults([rate(draw), rate(draw), rate(draw)]),
        }
    }
}

/// An injected failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kill {
    /// The reader's queue pair goes to the error state.
    ReaderQp,
    /// The target's queue pair goes to the error state.
    TargetQp,
    /// The control channel of a session breaks.
    Control,
    /// The target's process dies; a new one replaces it.
    Target,
    /// No packet gets through for a while.
    Dark,
}

impl Kill {
    pub(crate) const ALL: [Kill; 5] =
        [Kill::ReaderQp, Kill::TargetQp, Kill::Control, Kill::Target, Kill::Dark];
}

/// A message of the control plane.
#[derive(Clone, Copy, Debug)]
enum Notice {
    Kill(Kill),
    /// Packets get through again, unless another failure stopped the network meanwhile.
    Light,
    /// The target learns that a session is over.
    Close(Qpn),
    /// A reader learns that its session is over, if it still has that queue pair.
    Lose(usize, u32, Qpn),
    /// A reader makes a new session.
    Connect(usize, u32),
}

#[derive(Debug)]
struct TargetSession {
    qpn: Qpn,
    capsules: MemoryRegion,
    files: Vec<FileId>,
    /// Reader, connection and queue pair at the other end, unless a test plays it.
    peer: Option<(usize, u32, Qpn)>,
}

/// The target's process.
pub(crate) struct TargetHost {
    pub(crate) target: Target,
    pub(crate) disk: SimDisk,
    pub(crate) cqs: Cqs,
    staging_lkey: u32,
    sessions: Vec<TargetSession>,
}

impl TargetHost {
    pub(crate) fn session_qpns(&self) -> Vec<Qpn> {
        self.sessions.iter().map(|session| session.qpn).collect()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) qpn: Qpn,
    pub(crate) target_qpn: Qpn,
    capsules: MemoryRegion,
}

/// A reader and its host.
pub(crate) struct ReaderHost {
    pub(crate) reader: Reader,
    pub(crate) ring: HostRing,
    pub(crate) data: MemoryRegion,
    pub(crate) ledger: Ledger,
    pub(crate) lines: Vec<Option<Line>>,
    pub(crate) spec: StreamSpec,
    /// Whether the control plane makes new sessions for lost ones.
    pub(crate) reconnects: bool,
    cqs: Cqs,
}

/// All of it.
pub(crate) struct World {
    pub(crate) net: Net,
    pub(crate) target: TargetHost,
    pub(crate) readers: Vec<ReaderHost>,
    pub(crate) kills: u64,
    /// Serves the readers instead of the target.
    pub(crate) fake: Option<Fake>,
    /// What the device of a node says that is not true.
    pub(crate) lies: [Option<Lie>; 2],
    /// Why the target ended sessions.
    pub(crate) failures: Vec<SessionFailure>,
    setup: Setup,
    corpus: Corpus,
    files: Vec<SimFile>,
    notices: Vec<(Time, Notice)>,
    /// No packet gets through before this time.
    dark_until: Time,
    draw: Chance,
}

fn target_memory(setup: &Setup) -> usize {
    setup.staging_buffers as usize * STAGING_BYTES as usize + CAPSULE_MEMORY
}

fn target_host(net: &mut Net, setup: &Setup, files: &[SimFile], seed: u64) -> TargetHost {
    let node = &mut net.nodes[TARGET];
    let bytes = u64::from(setup.staging_buffers) * u64::from(STAGING_BYTES);
    let base = register(node, bytes, Access::LOCAL);
    let cqs = create_cqs(node, setup.cq_depth);
    let (depth, latency) = (setup.disk_depth, setup.disk_latency_ns);
    TargetHost {
        target: Target::new(base.addr, setup.staging_buffers, cqs.send, cqs.recv, toy::KERNELS),
        staging_lkey: base.lkey,
        disk: SimDisk::new(files.to_vec(), depth, latency, seed),
        cqs,
        sessions: Vec::new(),
    }
}

fn reader_sources(corpus: &Corpus, setup: &Setup, spec: &StreamSpec) -> Vec<ReaderSource> {
    let source = |(index, dataset): (usize, &super::corpus::Dataset)| ReaderSource {
        connection: index as u32 % spec.connections,
        source: index as u32 / spec.connections,
        layout: dataset.layout,
        cut: Cut::Windows,
        stages: corpus.stages(index, setup.narrow_at_target),
        whole_pages: false,
        weighs: None,
    };
    corpus.datasets.iter().enumerate().map(source).collect()
}

/// One poll of a reader delays the other streams of its engine by a bounded amount of work.
fn assert_bounded(corpus: &Corpus, before: &ReaderCounters, after: &ReaderCounters) {
    let sample = u64::from(corpus.window) * u64::from(corpus.deliver.bytes());
    let copied = after.delivered_bytes - before.delivered_bytes;
    assert!(copied <= 2048 * sample && copied < (256 << 10) + sample, "{copied} bytes copied");
    let block = |layout: &SampleLayout| layout.samples_per_block * layout.sample_bytes();
    let largest = corpus.datasets.iter().map(|dataset| block(&dataset.layout)).max();
    let arrived = after.wire_bytes - before.wire_bytes;
    let largest = u64::from(largest.unwrap_or(0));
    assert!(arrived <= 8 * largest && arrived <= (512 << 10) + largest, "{arrived} bytes checked");
}

impl World {
    /// Connected, and nothing sent yet.
    pub(crate) fn new(corpus: &Corpus, setup: &Setup) -> World {
        World::with_files(corpus, setup, corpus.files())
    }

    /// The same over files that differ from the corpus.
    pub(crate) fn with_files(corpus: &Corpus, setup: &Setup, files: Vec<SimFile>) -> World {
        World::build(corpus, setup, files, None)
    }

    /// One reader, served by a target that may send wrong responses.
    pub(crate) fn with_fake(corpus: &Corpus, setup: &Setup, fake: Fake) -> World {
        World::build(corpus, setup, corpus.files(), Some(fake))
    }

    fn build(corpus: &Corpus, setup: &Setup, files: Vec<SimFile>, fake: Option<Fake>) -> World {
        let needed = |spec: &StreamSpec| {
            let sources = reader_sources(corpus, setup, spec);
            Reader::memory_needed(&corpus.order.clone().into(), &sources) as usize + 4096
        };
        let data: usize = setup.streams.iter().map(needed).sum();
        let mut draw = Chance::new(setup.seed);
        let memory = [target_memory(setup), data + CAPSULE_MEMORY];
        let mut net = Net::new(memory, draw.word());
        net.mix = setup.faults;
        let target = target_host(&mut net, setup, &files, draw.word());
        let mut world = World {
            net,
            target,
            readers: Vec::new(),
            kills: 0,
            fake,
            lies: [None, None],
            failures: Vec::new(),
            setup: setup.clone(),
            corpus: corpus.clone(),
            files,
            notices: Vec::new(),
            dark_until: Time::ZERO,
            draw,
        };
        for index in 0..setup.streams.len() {
            world.add_reader(index);
        }
        world
    }

    fn add_reader(&mut self, index: usize) {
        let spec = self.setup.streams[index];
        let corpus = &self.corpus;
        let sources = reader_sources(corpus, &self.setup, &spec);
        let node = &mut self.net.nodes[READER];
        let needed = Reader::memory_needed(&corpus.order.clone().into(), &sources);
        let data = register(node, needed, Access::REMOTE_WRITE);
        let cqs = create_cqs(node, CQ_DEPTH);
        let delivery = Delivery {
            window_tokens: corpus.window,
            batch_samples: corpus.batch_samples,
            sample_dtype: corpus.deliver,
            dtype: corpus.deliver,
            rows: Rows::default(),
            first_batch: spec.first_batch,
            batches: spec.batches,
            shift: 0,
            share: Share::WHOLE,
            slot_bytes: spec.slot_bytes,
        };
        let resources = ReaderResources { data, send_cq: cqs.send, recv_cq: cqs.recv };
        let (order, kernels) = (corpus.order.clone(), toy::KERNELS);
        let connections = spec.connections;
        let left_out = Some(spec.left_out()).filter(|range| !range.is_empty());
        let left_out = LeaveOut::new(left_out).expect("one range");
        let setup = ReaderSetup::leaving_out(order, sources, delivery, &left_out);
        assert_eq!(setup.memory_bytes(), needed);
        let reader = Reader::new(setup, connections, resources, kernels);
        let (slots, slot_bytes, first) = (spec.slots, spec.slot_bytes, spec.first_batch);
        let ring = HostRing::new(
            slots,
            slot_bytes,
            first,
            spec.left_out(),
            spec.pace_ns,
            self.draw.word(),
        );
        self.readers.push(ReaderHost {
            reader,
            ring,
            data,
            ledger: Ledger::default(),
            lines: (0..connections).map(|_| None).collect(),
            spec,
            reconnects: true,
            cqs,
        });
        (0..connections).for_each(|connection| self.connect(index, connection));
    }

    /// Creates a session: a queue pair on either side, connected.
    pub(crate) fn connect(&mut self, index: usize, connection: u32) {
        let credits = self.setup.credits;
        let connections = self.setup.streams[index].connections;
        let opened = match &mut self.fake {
            Some(fake) => (fake.accept(&mut self.net, TARGET), None),
            None => {
                let (qpn, session) = self.open_session(connections, connection);
                (qpn, Some(session))
            }
        };
        let (theirs, session) = opened;
        let host = &mut self.readers[index];
        let node = &mut self.net.nodes[READER];
        let bytes = u64::from(credits) * reader::CREDIT_BYTES;
        let region = register(node, bytes, Access::LOCAL);
        let ours = create_qp(node, host.cqs, credits);
        self.net.connect([theirs, ours], self.setup.mtu);
        let now = self.net.now();
        let mut watched = Watched {
            endpoint: &mut self.net.nodes[READER].endpoint,
            ledger: Some(&mut host.ledger),
            lie: None,
        };
        let memory = ConnectionMemory { capsules: region, credits };
        let connected = host.reader.connect(now, &mut watched, connection, ours, memory);
        connected.expect("the queue pair is new");
        host.lines[connection as usize] =
            Some(Line { qpn: ours, target_qpn: theirs, capsules: region });
        if let Some(session) = session {
            let peer = Some((index, connection, ours));
            self.target.sessions.push(TargetSession { peer, ..session });
        }
    }

    /// A session in which the test acts as the reader, with this many posted receives.
    pub(crate) fn raw_session(&mut self, receives: u64) -> Raw {
        let raw = Raw::new(&mut self.net, READER, receives);
        let (theirs, session) = self.open_session(1, 0);
        self.net.connect([theirs, raw.qpn], self.setup.mtu);
        self.target.sessions.push(session);
        raw
    }

    /// The target's end of the session for one of a reader's connections.
    fn open_session(&mut self, connections: u32, connection: u32) -> (Qpn, TargetSession) {
        let credits = self.setup.credits;
        let host = &mut self.target;
        let mine = self.corpus.datasets.iter().enumerate();
        let mine = mine.filter(|(index, _)| *index as u32 % connections == connection);
        let sources: Vec<Source> = mine
            .map(|(index, dataset)| Source {
                file: host.disk.open(index),
                stages: self.corpus.stages(index, self.setup.narrow_at_target).target().clone(),
                table: Default::default(),
                action: self.corpus.asked.wasm.then(|| Arc::new(Flip) as _),
                data_offset: dataset.layout.file.data_offset,
                tokens: dataset.layout.file.tokens,
                sums: self.setup.manifests.then(|| dataset.sums(index as u64)),
            })
            .collect();
        let files = sources.iter().map(|source| source.file).collect();
        let now = self.net.now();
        let node = &mut self.net.nodes[TARGET];
        let bytes = u64::from(credits) * target::CREDIT_BYTES;
        let capsules = register(node, bytes, Access::LOCAL);
        let qpn = create_qp(node, host.cqs, WORK_PER_CREDIT * credits);
        let staging_lkey = host.staging_lkey;
        let memory = SessionMemory { staging_lkey, capsules, credits };
        let opened = host.target.open(now, &mut node.endpoint, qpn, sources, memory);
        opened.expect("the queue pair is new");
        let session = TargetSession { qpn, capsules, files, peer: None };
        (qpn, session)
    }

    /// The target learns that a session is over.
    pub(crate) fn close_session(&mut self, qpn: Qpn) {
        let sessions = &mut self.target.sessions;
        let Some(index) = sessions.iter().position(|session| session.qpn == qpn) else {
            return;
        };
        let session = sessions.swap_remove(index);
        self.target.target.close(qpn);
        let now = self.net.now();
        let node = &mut self.net.nodes[TARGET];
        node.endpoint.destroy_qp(now, qpn).expect("the queue pair exists");
        node.deregister(session.capsules.lkey).expect("the region exists");
        session.files.iter().for_each(|file| self.target.disk.close(*file));
    }

    /// The reader's end of a connection is taken down.
    fn drop_line(&mut self, reader: usize, connection: u32) -> Option<Line> {
        let host = &mut self.readers[reader];
        let line = host.lines[connection as usize].take()?;
        let now = self.net.now();
        let node = &mut self.net.nodes[READER];
        node.endpoint.destroy_qp(now, line.qpn).expect("the queue pair exists");
        node.deregister(line.capsules.lkey).expect("the region exists");
        host.ledger.forget(line.qpn);
        Some(line)
    }

    pub(crate) fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    // ---- time --------------------------------------------------------------------------------

    fn later(&mut self, within_ns: u64, notice: Notice) {
        let wait = Duration::from_nanos(self.draw.below(within_ns));
        self.notices.push((self.net.now() + wait, notice));
    }

    /// A failure at some instant within `within_ns`.
    pub(crate) fn plan_kill(&mut self, within_ns: u64, kill: Kill) {
        self.later(within_ns, Notice::Kill(kill));
    }

    /// Lets all do their work at this instant.
    pub(crate) fn settle(&mut self) {
        loop {
            let mut busy = self.net.settle();
            busy |= self.poll_target();
            if let Some(fake) = &mut self.fake {
                busy |= fake.poll(&mut self.net);
            }
            for index in 0..self.readers.len() {
                busy |= self.poll_reader(index);
            }
            if !busy {
                return;
            }
        }
    }

    /// Lets everybody but the readers do what they can, for a while.
    pub(crate) fn run_target_only(&mut self) {
        for _ in 0..100 {
            self.net.run_for(10_000);
            while self.poll_target() {}
        }
    }

    /// A new session for a connection that the reader does not know to be lost.
    pub(crate) fn replace(&mut self, reader: usize, connection: u32) {
        let line = self.drop_line(reader, connection).expect("it was connected");
        self.close_session(line.target_qpn);
        self.connect(reader, connection);
    }

    fn poll_target(&mut self) -> bool {
        let TargetHost { target, disk, .. } = &mut self.target;
        let now = self.net.now();
        let node = &mut self.net.nodes[TARGET];
        disk.land(now, &mut node.memory);
        let lie = self.lies[TARGET].as_mut();
        let mut device = Watched { endpoint: &mut node.endpoint, ledger: None, lie };
        let busy = target.poll(now, &mut device, &mut node.memory, disk);
        disk.lend_new(&mut node.memory);
        assert!(target.free_buffers() <= target.buffer_count());
        while let Some((qpn, why)) = self.target.target.failed_session() {
            self.failures.push(why);
            let failed = self.target.sessions.iter().find(|session| session.qpn == qpn);
            let peer = failed.expect("the session is open").peer;
            self.close_session(qpn);
            self.tell_reader(peer);
        }
        busy
    }

    fn tell_reader(&mut self, peer: Option<(usize, u32, Qpn)>) {
        if let Some((reader, connection, ours)) = peer {
            self.later(3_000_000, Notice::Lose(reader, connection, ours));
        }
    }

    fn poll_reader(&mut self, index: usize) -> bool {
        let (now, host) = (self.net.now(), &mut self.readers[index]);
        let node = &mut self.net.nodes[READER];
        let (ledger, lie) = (Some(&mut host.ledger), self.lies[READER].as_mut());
        let mut watched = Watched { endpoint: &mut node.endpoint, ledger, lie };
        let before = *host.reader.counters();
        let busy = host.reader.poll(now, &mut watched, &mut node.memory, &mut host.ring);
        // A fake target's claims about what it sent prove nothing.
        if self.fake.is_none() {
            assert_bounded(&self.corpus, &before, host.reader.counters());
        }
        host.ledger.settle(&node.memory, self.setup.credits);
        host.ring.plan_visit(self.net.now());
        while let Some((connection, qpn, _)) = self.readers[index].reader.lost_connection() {
            let line = self.drop_line(index, connection).expect("it was connected");
            assert_eq!(line.qpn, qpn);
            self.later(3_000_000, Notice::Close(line.target_qpn));
            if self.readers[index].reconnects {
                self.later(5_000_000, Notice::Connect(index, connection));
            }
        }
        busy
    }

    fn next_event(&mut self) -> Option<Time> {
        let packets = self.net.next_at();
        let notices = self.notices.iter().map(|(at, _)| Some(*at));
        let visits = self.readers.iter().map(|host| host.ring.next_visit);
        let own = [packets, self.target.disk.next_event()];
        earliest(own.into_iter().chain(notices).chain(visits))
    }

    /// Advances to the next event and handles it; false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        self.settle();
        let Some(next) = self.next_event() else {
            return false;
        };
        self.net.advance_to(next);
        let now = self.net.now();
        self.readers.iter_mut().for_each(|host| host.ring.visit(now));
        while let Some(index) = self.notices.iter().position(|(at, _)| *at <= now) {
            let (_, notice) = self.notices.remove(index);
            self.take_notice(notice);
        }
        self.settle();
        true
    }

    /// Runs until `done`, or until no event is left; returns whether `done` was reached.
    pub(crate) fn run_until(&mut self, mut done: impl FnMut(&mut World) -> bool) -> bool {
        for _ in 0..STEPS {
            if done(self) {
                return true;
            }
            if !self.step() {
                return done(self);
            }
        }
        panic!("still busy after {STEPS} events at {}", self.net.now());
    }

    /// Runs until every stream has ended.
    pub(crate) fn run(&mut self) {
        let all = |world: &mut World| world.readers.iter().all(|host| host.ring.end().is_some());
        assert!(self.run_until(all), "stuck: {}", self.describe());
    }

    fn describe(&self) -> String {
        let mut text = format!("{} {:?}\n", self.net.now(), self.target.target.counters());
        for host in &self.readers {
            let outstanding = host.ledger.outstanding();
            text += &format!("{outstanding} outstanding {:?}\n", host.reader.counters());
        }
        text
    }

    // ---- what breaks -------------------------------------------------------------------------

    fn take_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Kill(kill) => self.kill(kill),
            Notice::Light if self.dark_until > self.net.now() => {}
            Notice::Light => self.net.set_cable(TARGET as u32, true),
            Notice::Close(qpn) => self.close_session(qpn),
            Notice::Lose(reader, connection, qpn) => {
                let host = &mut self.readers[reader];
                if host.lines[connection as usize].is_some_and(|line| line.qpn == qpn) {
                    host.reader.drop_connection(connection);
                }
            }
            Notice::Connect(reader, connection) => {
                if !self.readers[reader].reader.has_ended() {
                    self.connect(reader, connection);
                }
            }
        }
    }

    fn kill(&mut self, kill: Kill) {
        let reader = self.draw.below(self.readers.len() as u64) as usize;
        let host = &self.readers[reader];
        let connection = self.draw.below(host.lines.len() as u64) as usize;
        let line = host.lines[connection];
        self.kills += 1;
        match (kill, line) {
            (Kill::Dark, _) => {
                let wait = Duration::from_nanos(self.draw.between(100_000, 29_999_999));
                self.net.set_cable(TARGET as u32, false);
                self.dark_until = self.net.now() + wait;
                self.notices.push((self.dark_until, Notice::Light));
            }
            (Kill::Target, _) => self.restart_target(),
            (Kill::ReaderQp, Some(line)) => {
                let now = self.net.now();
                let endpoint = &mut self.net.nodes[READER].endpoint;
                endpoint.modify_qp(now, line.qpn, &QpAttr::to(QpState::Error)).expect("it exists");
            }
            (Kill::TargetQp, Some(line)) => {
                // The target may have closed the session before.
                let now = self.net.now();
                let endpoint = &mut self.net.nodes[TARGET].endpoint;
                let _ = endpoint.modify_qp(now, line.target_qpn, &QpAttr::to(QpState::Error));
            }
            (Kill::Control, Some(line)) => {
                self.later(3_000_000, Notice::Close(line.target_qpn));
                self.later(3_000_000, Notice::Lose(reader, connection as u32, line.qpn));
            }
            (_, None) => {}
        }
    }

    /// `kill -9`, and a new process without any state of the old one.
    pub(crate) fn restart_target(&mut self) {
        self.net.restart(TARGET, target_memory(&self.setup));
        let seed = self.draw.word();
        let fresh = target_host(&mut self.net, &self.setup, &self.files, seed);
        let old = std::mem::replace(&mut self.target, fresh);
        for session in old.sessions {
            self.tell_reader(session.peer);
        }
    }

    // ---- the end -----------------------------------------------------------------------------

    /// Closes every session; all staging buffers of the target must be free.
    pub(crate) fn tear_down(&mut self) {
        for reader in 0..self.readers.len() {
            for connection in 0..self.readers[reader].lines.len() {
                self.drop_line(reader, connection as u32);
            }
        }
        self.target.session_qpns().into_iter().for_each(|qpn| self.close_session(qpn));
        let idle = |world: &mut World| world.target.disk.is_idle();
        assert!(self.run_until(idle), "the disk never ends");
        self.assert_nothing_held();
    }

    fn assert_nothing_held(&self) {
        let target = &self.target.target;
        assert_eq!(target.sessions(), 0);
        assert_eq!(target.free_buffers(), target.buffer_count(), "target staging buffers leak");
    }

    /// Every stream ended without an error and delivered the bytes of the corpus.
    pub(crate) fn assert_delivered(&self) {
        for (index, host) in self.readers.iter().enumerate() {
            assert_eq!(host.ring.end(), Some(End::Finished), "reader {index}");
            let runs = host.spec.runs();
            let expected = runs.map(|(first, count)| self.corpus.expected(first, count)).concat();
            let batches: u64 = runs.iter().map(|(_, count)| count).sum();
            assert_eq!(host.ring.batches_seen, batches, "reader {index}");
            assert!(host.ring.seen == expected, "reader {index}: other bytes were delivered");
            assert_eq!(host.ledger.outstanding(), 0, "reader {index} asked for too much");
            let (free, all) = (host.reader.free_buffers(), host.reader.buffer_count());
            assert_eq!(free, all, "reader {index}: staging buffers leak");
        }
    }
}
