//! One rank of a replayed job, on its device.
//!
//! There is one queue pair for each peer, for all phases and both directions. Two receives are
//! posted on each that receives anything: the message that is due, and the next one, since a peer
//! may be a phase ahead. One that is further ahead waits, as its queue pair is told that no receive
//! is ready.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration as StdDuration, Instant};

use adapter::congestion::Choice;
use adapter::connect::{QpAddress, RNR_RETRY_FOREVER, Terms, connect, path_mtu};
use adapter::drive::{self, Owner};
use adapter::owned::Adapter;
use adapter::owned::DeviceChoice;
use arrayvec::ArrayVec;
use nic::clock;
use nic::driver::Turn;
use nic::pool::Pool;
use roce::device::{self, Device, InitialPsns};
use roce::endpoint::QpConfig;
use roce::verbs::{
    Access, Completion, CqId, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, VerbsError,
    WcStatus,
};
use roce::wire::{Psn, ROCE_PORT};
use roce::world::Staging;
use roce::{Duration, Time};
use service::log;

use super::content::Content;
use super::rendezvous::{self, Broken, RankInfo, Rendezvous};
use super::schedule::{Schedule, Step};
use crate::devices;
use service::Error;

/// Receives posted for each peer.
const AHEAD: u64 = 2;

/// Most registered memory of a rank.
const MAX_MEMORY: u64 = 4 << 30;

/// Where buffers begin: at multiples of this.
const ALIGN: u64 = 4096;

/// Local ACK timeout code: 537 ms. As communication libraries have it, longer than any queue: a job
/// is not to end because others are faster for a while. Losses are repaired long before.
const ACK_TIMEOUT: u8 = 17;

/// Unacknowledged packets per queue pair.
const WINDOW_PACKETS: u32 = 512;

/// Completions taken at once.
const BATCH: usize = 16;

/// How often the others are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How long a rank whose queue pair has failed waits for news of the reason.
const REASON_LIMIT: StdDuration = StdDuration::from_millis(500);

/// What a rank is to do.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What has to be the same at all ranks.
    pub terms: rendezvous::Terms,
    /// What all exchange.
    pub schedule: Schedule,
    /// Addresses by rank; rank 0 listens on the port of its own.
    pub peers: Vec<SocketAddr>,
    /// Iterations that are not measured.
    pub warm_up: u32,
    /// The pause of each iteration.
    pub compute: Duration,
    /// DSCP of all packets.
    pub dscp: u8,
    /// Congestion control.
    pub congestion: Choice,
    /// How long ranks wait for each other at the beginning.
    pub wait: StdDuration,
    /// Milliseconds since 1970 at which the first iteration begins; at once without it.
    pub start_at_ms: Option<u64>,
    /// Delay of the first iteration.
    pub shift: Duration,
    /// Seed of keys and numbers.
    pub seed: u64,
    /// The device of a libibverbs instead of our own, which shares UDP port 4791 with others of its
    /// host.
    pub device: Option<DeviceChoice>,
}

/// An edge from this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    /// The phase of the pattern, from 0.
    pub phase: usize,
    /// The receiver.
    pub to: u32,
    /// Bytes in an iteration.
    pub bytes: u64,
}

/// One iteration of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Iteration {
    /// The pause and all phases.
    pub total_ns: u64,
    /// All phases.
    pub exchange_ns: u64,
    /// From posting to acknowledgement, by edge.
    pub edges_ns: Vec<u64>,
}

/// What one rank measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The rank.
    pub rank: u32,
    /// Its edges.
    pub edges: Vec<Edge>,
    /// Iterations behind those that warm up.
    pub iterations: Vec<Iteration>,
    /// Received bytes that were compared, of all iterations.
    pub verified_bytes: u64,
    /// Messages with a wrong byte, or of a wrong length.
    pub wrong_messages: u64,
    /// Packets that this rank retransmitted; `None` if the device does not count them.
    pub retransmitted: Option<u64>,
}

/// How a rank meets the others.
#[derive(Debug)]
pub enum Place {
    /// Rank 0, where the others come.
    Host(TcpListener),
    /// Another rank.
    Guest(u32),
}

impl Place {
    fn rank(&self) -> u32 {
        match self {
            Place::Host(_) => 0,
            Place::Guest(rank) => *rank,
        }
    }
}

/// Replays one rank to the end.
///
/// # Errors
/// When the ranks do not find each other, one of them ends, or the device refuses.
pub fn run(setup: &Setup, place: &Place) -> Result<Outcome, Error> {
    let rank = place.rank();
    let steps = setup.schedule.of_rank(rank, setup.terms.steps);
    let sizes = Sizes::of(&steps);
    let memory = sizes.memory().filter(|memory| *memory <= MAX_MEMORY).ok_or_else(|| {
        Error::invalid(format_args!("rank {rank} would need more than {MAX_MEMORY} bytes"))
            .hint("choose a smaller --bytes-per-edge, or more --steps")
    })?;
    let ip = setup.peers[rank as usize].ip();
    let packets = Some("the job is to use the network".to_owned());
    let seed = setup.seed.wrapping_add(u64::from(rank));
    match &setup.device {
        Some(choice) => run_on(setup, place, steps, &sizes, devices::loaded(choice, memory)?),
        None => {
            let device = devices::software(ip, memory, seed, packets)?;
            if let Some(warning) = unclassified(setup, rank, device.local()) {
                log::line(warning);
            }
            run_on(setup, place, steps, &sizes, device)
        }
    }
}

/// Why what is sent to this rank has no guarantee, if so: classes of HTB take packets to RoCEv2's
/// own port only.
fn unclassified(setup: &Setup, rank: u32, local: SocketAddr) -> Option<String> {
    let is_governed = setup.dscp != 0 && local.port() != ROCE_PORT;
    is_governed.then(|| {
        format!(
            "rank {rank} has UDP port {}, since another program has {ROCE_PORT} at {}: no guarantee of HTB holds for \
             what is sent to it; hint: end that program (`ss -ulpn 'sport = {ROCE_PORT}'`), or use an RDMA device with \
             --device",
            local.port(),
            local.ip()
        )
    })
}

fn run_on<F: Adapter>(
    setup: &Setup,
    place: &Place,
    steps: Vec<Step>,
    sizes: &Sizes,
    mut adapter: F,
) -> Result<Outcome, Error> {
    let rank = place.rank();
    let ip = setup.peers[rank as usize].ip();
    let seed = setup.seed.wrapping_add(u64::from(rank));
    let mut ends = Ends::open(&mut adapter, rank, sizes, seed)?;
    let info = RankInfo {
        port: adapter.local().port(),
        mtu: devices::mtu(&adapter, setup.peers[usize::from(rank == 0)]),
        qps: ends.peers.iter().map(|peer| (peer.rank, peer.qpn.get(), peer.psn.get())).collect(),
    };
    let mut rendezvous = match place {
        Place::Host(listener) => {
            Rendezvous::host(listener, &setup.peers, &setup.terms, info.clone(), setup.wait)
        }
        Place::Guest(_) => {
            Rendezvous::join(&setup.peers, rank, setup.terms.clone(), info.clone(), setup.wait)
        }
    }
    .and_then(|(mut rendezvous, infos)| {
        let connected = ends.connect(&mut adapter, setup, rank, &info, &infos);
        connected.inspect_err(|error| {
            let (why, hint) = error.parts();
            let why = format!("rank {rank} ({ip}): {why}");
            rendezvous.fail(Broken { why, hint: hint.unwrap_or_default() });
        })?;
        Ok(rendezvous)
    })?;
    rendezvous.begin()?;
    replay(setup, rank, steps, adapter, ends, rendezvous)
}

fn replay<F: Adapter>(
    setup: &Setup,
    rank: u32,
    steps: Vec<Step>,
    adapter: F,
    ends: Ends,
    rendezvous: Rendezvous,
) -> Result<Outcome, Error> {
    let no_driver = |error| Error::because("cannot wait for packets", &error);
    let driver = drive::driver(&adapter).map_err(no_driver)?;
    for (number, fd) in (1..).zip(rendezvous.fds()) {
        driver.watched().add(fd, number).map_err(no_driver)?;
    }
    let edges = edges_of(&steps);
    let now = clock::now();
    let begins = now + until_start(setup.start_at_ms) + setup.shift;
    let progress = Progress {
        steps,
        outcome: Outcome { rank, edges, ..Outcome::default() },
        left: setup.terms.iterations,
        warm_up: setup.warm_up,
        compute: setup.compute,
        iteration_began: begins,
        iteration: Iteration::default(),
        stage: Stage::Computing { until: begins + setup.compute },
        ends,
    };
    let peers = setup.peers.clone();
    let mut work = Work { adapter, rendezvous, progress, peers, looked: now, failure: None };
    drive::run(&driver, &mut work);
    match work.failure {
        Some(broken) => Err(broken.into_error()),
        None => {
            let mut outcome = work.progress.outcome;
            outcome.retransmitted = devices::retransmitted(&work.adapter);
            Ok(outcome)
        }
    }
}

/// From now to a time of the wall clock; nothing if that has passed.
fn until_start(start_at_ms: Option<u64>) -> Duration {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_us = since_1970.map_or(0, |since| since.as_micros());
    let start_us = start_at_ms.map_or(0, |ms| u128::from(ms) * 1000);
    Duration::from_micros(u64::try_from(start_us.saturating_sub(now_us)).unwrap_or(u64::MAX / 1000))
}

fn edges_of(steps: &[Step]) -> Vec<Edge> {
    let mut edges = BTreeMap::new();
    for step in steps {
        for (to, bytes) in &step.sends {
            *edges.entry((step.phase, *to)).or_insert(0) += bytes;
        }
    }
    edges.into_iter().map(|((phase, to), bytes)| Edge { phase, to, bytes }).collect()
}

// ---- buffers and queue pairs --------------------------------------------------------------------

/// Longest messages to and from each peer.
#[derive(Debug, Default)]
struct Sizes {
    sends: BTreeMap<u32, u64>,
    receives: BTreeMap<u32, u64>,
    /// Messages of an iteration from each peer, in their order.
    cycles: BTreeMap<u32, Vec<u64>>,
}

impl Sizes {
    fn of(steps: &[Step]) -> Sizes {
        let mut sizes = Sizes::default();
        for step in steps {
            for &(to, bytes) in &step.sends {
                let most = sizes.sends.entry(to).or_insert(0);
                *most = bytes.max(*most);
            }
            for &(from, bytes) in &step.receives {
                let most = sizes.receives.entry(from).or_insert(0);
                *most = bytes.max(*most);
                sizes.cycles.entry(from).or_default().push(bytes);
            }
        }
        sizes
    }

    fn memory(&self) -> Option<u64> {
        let stride = |bytes: &u64| bytes.checked_next_multiple_of(ALIGN);
        let sends: u64 = self.sends.values().map(stride).sum::<Option<u64>>()?;
        let receives: u64 = self.receives.values().map(stride).sum::<Option<u64>>()?;
        receives.checked_mul(AHEAD)?.checked_add(sends)
    }
}

/// The other end of a queue pair.
#[derive(Debug)]
struct Peer {
    rank: u32,
    qpn: Qpn,
    psn: Psn,
    /// First byte of the buffer to send from.
    source: u64,
    /// First bytes of the buffers to receive into.
    inboxes: [u64; AHEAD as usize],
    inbox_bytes: u64,
    outgoing: Content,
    incoming: Content,
    /// Messages of an iteration from it; none if it sends nothing.
    cycle: Vec<u64>,
    sent: u64,
    received: u64,
    /// Messages that are to be there before the step ends.
    due: u64,
}

#[derive(Debug)]
struct Ends {
    region: MemoryRegion,
    send_cq: CqId,
    recv_cq: CqId,
    peers: Vec<Peer>,
}

impl Ends {
    fn open<F: Adapter>(
        adapter: &mut F,
        rank: u32,
        sizes: &Sizes,
        seed: u64,
    ) -> Result<Ends, Error> {
        let refused = |error: VerbsError| Error::because("the device refuses the job", &error);
        // A rank that exchanges nothing has no buffers, and still takes part in the rendezvous.
        let bytes = sizes.memory().unwrap_or(0).max(ALIGN);
        let range = adapter.memory_mut().alloc(bytes, ALIGN).map_err(Error::from_cause)?;
        let ranks: BTreeSet<u32> =
            sizes.sends.keys().chain(sizes.receives.keys()).copied().collect();
        let device = adapter.device();
        let pd = device.alloc_pd().map_err(refused)?;
        let depth = (2 * AHEAD as u32) * (ranks.len() as u32).max(1);
        let send_cq = device.create_cq(depth).map_err(refused)?;
        let recv_cq = device.create_cq(depth).map_err(refused)?;
        let region = device.register(pd, range.addr, range.len, Access::ALL).map_err(refused)?;
        let (mut drawn, mut peers, mut next) = (InitialPsns::new(seed), Vec::new(), range.addr);
        let mut take = |bytes: u64| {
            let addr = next;
            next += bytes.next_multiple_of(ALIGN);
            addr
        };
        for peer in ranks {
            let config = QpConfig { recv_cq, ..QpConfig::rc(pd, send_cq, 2, AHEAD as u32) };
            let qpn = adapter.device().create_qp(config).map_err(refused)?;
            device::initialize(adapter.device(), clock::now(), qpn).map_err(refused)?;
            let (out_bytes, inbox_bytes) = (
                sizes.sends.get(&peer).copied().unwrap_or(0),
                sizes.receives.get(&peer).copied().unwrap_or(0),
            );
            let source = take(out_bytes);
            let inboxes = std::array::from_fn(|_| take(inbox_bytes));
            let outgoing = Content::new(rank, peer);
            outgoing.fill(adapter.memory_mut().bytes_mut(source, out_bytes as usize));
            peers.push(Peer {
                rank: peer,
                qpn,
                psn: drawn.draw(),
                source,
                inboxes,
                inbox_bytes,
                outgoing,
                incoming: Content::new(peer, rank),
                cycle: sizes.cycles.get(&peer).cloned().unwrap_or_default(),
                sent: 0,
                received: 0,
                due: 0,
            });
        }
        Ok(Ends { region, send_cq, recv_cq, peers })
    }

    /// Connects all queue pairs to those of the others, and posts receives.
    fn connect<F: Adapter>(
        &mut self,
        adapter: &mut F,
        setup: &Setup,
        rank: u32,
        ours: &RankInfo,
        infos: &[RankInfo],
    ) -> Result<(), Error> {
        let refused = |error: VerbsError| Error::because("cannot connect", &error);
        let terms = Terms {
            congestion: setup.congestion,
            is_ours: true,
            timeout: ACK_TIMEOUT,
            rnr_retry: RNR_RETRY_FOREVER,
            window_packets: WINDOW_PACKETS,
            rate_limit_bps: 0,
            dscp: setup.dscp,
        };
        for at in 0..self.peers.len() {
            let Peer { rank: peer, qpn, psn, .. } = self.peers[at];
            let info = &infos[peer as usize];
            let theirs = info.qps.iter().find(|(to, ..)| *to == rank);
            let Some(&(_, number, first)) = theirs else {
                return Err(Error::invalid(format_args!("rank {peer} has no queue pair for it")));
            };
            let mtu = path_mtu(ours.mtu, info.mtu).ok_or_else(|| {
                let limit = ours.mtu.min(info.mtu);
                Error::invalid(format_args!("no path MTU fits {limit}"))
            })?;
            // The port is what it says, the address what this rank was told.
            let remote = SocketAddr::new(setup.peers[peer as usize].ip(), info.port);
            let reliability = adapter.reliability();
            let own = QpAddress { address: adapter.local(), qpn, psn, reliability, mtu: ours.mtu };
            let theirs = QpAddress::received(remote, (number, first), reliability, info.mtu);
            let local = Err("ranks exchange packets".to_owned());
            connect(adapter, clock::now(), &terms, (&own, &theirs), mtu, local).map_err(refused)?;
            if self.peers[at].inbox_bytes > 0 {
                for slot in 0..AHEAD {
                    self.post_receive(adapter.device(), at, slot).map_err(Error::invalid)?;
                }
            }
        }
        Ok(())
    }

    fn post_receive<D: Device>(&self, device: &mut D, at: usize, slot: u64) -> Result<(), String> {
        let peer = &self.peers[at];
        let sges = self.piece(peer.inboxes[slot as usize], peer.inbox_bytes);
        let wr = RecvWr { wr_id: at as u64, sges };
        let posted = device.post_recv(clock::now(), peer.qpn, &[wr]);
        posted.map_err(|error| format!("cannot post a receive: {error}"))
    }

    fn piece(&self, addr: u64, bytes: u64) -> SgList {
        // Messages are shorter than 2^32 bytes: `MAX_MESSAGE_BYTES`.
        SgList::from_iter([Sge { addr, len: bytes as u32, lkey: self.region.lkey }])
    }
}

// ---- iterations ---------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Stage {
    /// The pause, and before the first one the time until the start.
    Computing { until: Time },
    /// A step is under way: messages that are not acknowledged, by edge.
    Exchanging { step: usize, began: Time, unacknowledged: BTreeSet<u32> },
    /// All iterations are over; others may still need this rank's queue pairs.
    Finished,
}

#[derive(Debug)]
struct Progress {
    ends: Ends,
    steps: Vec<Step>,
    outcome: Outcome,
    left: u32,
    warm_up: u32,
    compute: Duration,
    iteration_began: Time,
    iteration: Iteration,
    stage: Stage,
}

impl Progress {
    /// One turn; whether there was anything to do.
    fn step<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, (u32, String)> {
        let mut worked = self.take_sends(now, device)?;
        worked |= self.take_receives(device, pool)?;
        while self.advance(now, device, pool)? {
            worked = true;
        }
        Ok(worked)
    }

    /// Goes on to the next stage if this one is over.
    fn advance<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, (u32, String)> {
        match &self.stage {
            Stage::Computing { until } if now >= *until => {
                self.iteration = Iteration {
                    edges_ns: vec![0; self.outcome.edges.len()],
                    ..Iteration::default()
                };
                match self.steps.is_empty() {
                    true => self.end_iteration(now),
                    false => self.begin_step(now, 0, device, pool)?,
                }
            }
            Stage::Exchanging { step, began, unacknowledged }
                if unacknowledged.is_empty()
                    && self.ends.peers.iter().all(|peer| peer.received >= peer.due) =>
            {
                let next = *step + 1;
                self.iteration.exchange_ns += now.since(*began).as_nanos();
                match next < self.steps.len() {
                    true => self.begin_step(now, next, device, pool)?,
                    false => self.end_iteration(now),
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn begin_step<D: Device>(
        &mut self,
        now: Time,
        step: usize,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<(), (u32, String)> {
        let Progress { ends, steps, .. } = self;
        let what = &steps[step];
        for peer in &mut ends.peers {
            peer.due += what.receives.iter().filter(|(from, _)| *from == peer.rank).count() as u64;
        }
        for &(to, bytes) in &what.sends {
            let Some(at) = ends.peers.iter().position(|peer| peer.rank == to) else { continue };
            let peer = &ends.peers[at];
            peer.outgoing.number(pool.bytes_mut(peer.source, bytes as usize), peer.sent);
            let wr = SendWr {
                wr_id: at as u64,
                op: SendOp::Send,
                sges: ends.piece(peer.source, bytes),
                signaled: true,
                ..SendWr::default()
            };
            let posted = device.post_send(now, peer.qpn, &[wr]);
            posted.map_err(|error| (to, format!("cannot post a message: {error}")))?;
            ends.peers[at].sent += 1;
        }
        let unacknowledged = what.sends.iter().map(|(to, _)| *to).collect();
        self.stage = Stage::Exchanging { step, began: now, unacknowledged };
        Ok(())
    }

    fn end_iteration(&mut self, now: Time) {
        self.iteration.total_ns = now.since(self.iteration_began).as_nanos();
        match self.warm_up.checked_sub(1) {
            Some(left) => self.warm_up = left,
            None => self.outcome.iterations.push(std::mem::take(&mut self.iteration)),
        }
        self.left = self.left.saturating_sub(1);
        self.iteration_began = now;
        self.stage = match self.left {
            0 => Stage::Finished,
            _ => Stage::Computing { until: now + self.compute },
        };
    }

    fn take_sends<D: Device>(&mut self, now: Time, device: &mut D) -> Result<bool, (u32, String)> {
        let done = take(device, self.ends.send_cq)?;
        for completion in &done {
            let to = self.checked(completion)?.rank;
            let Stage::Exchanging { step, began, unacknowledged } = &mut self.stage else {
                continue;
            };
            unacknowledged.remove(&to);
            let phase = self.steps[*step].phase;
            let edge =
                self.outcome.edges.iter().position(|edge| (edge.phase, edge.to) == (phase, to));
            if let Some(ns) = edge.and_then(|edge| self.iteration.edges_ns.get_mut(edge)) {
                *ns += now.since(*began).as_nanos();
            }
        }
        Ok(!done.is_empty())
    }

    fn take_receives<D: Device>(
        &mut self,
        device: &mut D,
        pool: &Pool,
    ) -> Result<bool, (u32, String)> {
        let done = take(device, self.ends.recv_cq)?;
        for completion in &done {
            let peer = self.checked(completion)?;
            let (from, number) = (peer.rank, peer.received);
            let (slot, place) = (number % AHEAD, number as usize % peer.cycle.len().max(1));
            let bytes = peer.cycle.get(place).copied().unwrap_or(0);
            let buffer = pool.bytes(peer.inboxes[slot as usize], bytes as usize);
            let is_right =
                u64::from(completion.byte_len) == bytes && peer.incoming.is_in(buffer, number);
            self.outcome.verified_bytes += bytes;
            self.outcome.wrong_messages += u64::from(!is_right);
            let at = completion.wr_id as usize;
            self.ends.post_receive(device, at, slot).map_err(|why| (from, why))?;
            self.ends.peers[at].received += 1;
        }
        Ok(!done.is_empty())
    }

    /// The peer of a completion, if that is no error.
    fn checked(&self, done: &Completion) -> Result<&Peer, (u32, String)> {
        let found = self.ends.peers.get(done.wr_id as usize);
        let peer = found.ok_or((0, "a completion of no request".to_owned()))?;
        match done.status {
            WcStatus::Success => Ok(peer),
            WcStatus::RetryExceeded => Err((peer.rank, "it does not acknowledge".to_owned())),
            status => Err((peer.rank, format!("a message ended with {status:?}"))),
        }
    }
}

fn take<D: Device>(device: &mut D, cq: CqId) -> Result<ArrayVec<Completion, BATCH>, (u32, String)> {
    let mut done = ArrayVec::new();
    device.poll_cq(cq, &mut done).map_err(|error| (0, error.to_string()))?;
    Ok(done)
}

// ---- turns --------------------------------------------------------------------------------------

struct Work<F> {
    adapter: F,
    rendezvous: Rendezvous,
    progress: Progress,
    peers: Vec<SocketAddr>,
    looked: Time,
    failure: Option<Broken>,
}

impl<F: Adapter> Work<F> {
    /// A queue pair failed: because its peer has ended, if that is heard in time, which says more.
    fn explain(&mut self, (peer, why): (u32, String)) -> Broken {
        let began = Instant::now();
        while began.elapsed() < REASON_LIMIT {
            if let Err(broken) = self.rendezvous.look() {
                return broken;
            }
            std::thread::sleep(StdDuration::from_millis(5));
        }
        let address = self.peers.get(peer as usize).map(SocketAddr::ip);
        let address = address.map_or(String::new(), |ip| format!(" ({ip})"));
        let own = self.progress.outcome.rank;
        let why = format!("rank {own} lost its connection to rank {peer}{address}: {why}");
        let hint =
            "do packets of UDP port 4791 pass between them? `dquant doctor` examines a machine";
        self.rendezvous.fail(Broken { why, hint: hint.to_owned() })
    }

    /// What the others and the device say.
    fn look(&mut self, now: Time) -> Result<(), Broken> {
        if now.since(self.looked) < LOOK_EVERY {
            return Ok(());
        }
        self.looked = now;
        if let Some(why) = drive::take_trouble(&mut self.adapter, log::line) {
            let rank = self.progress.outcome.rank;
            let why = format!("rank {rank}: its device is gone: {why}");
            let hint = "is its interface still there?".to_owned();
            return Err(self.rendezvous.fail(Broken { why, hint }));
        }
        self.rendezvous.look()
    }

    fn advance(&mut self, now: Time) -> Result<bool, Broken> {
        let Work { adapter, progress, .. } = self;
        let was_finished = matches!(progress.stage, Stage::Finished);
        let mut failed = None;
        let moved = adapter.turn(now, |device, pool| {
            progress.step(now, device, pool).unwrap_or_else(|why| {
                failed = Some(why);
                false
            })
        });
        if let Some(why) = failed {
            return Err(self.explain(why));
        }
        if !was_finished && matches!(self.progress.stage, Stage::Finished) {
            self.rendezvous.finish()?;
        }
        self.look(now)?;
        Ok(!moved.is_idle())
    }
}

impl<F: Adapter> Owner for Work<F> {
    type Adapter = F;

    fn adapter(&mut self) -> &mut F {
        &mut self.adapter
    }

    fn turn(&mut self, now: Time) -> Turn {
        match self.advance(now) {
            Err(broken) => {
                self.failure = Some(broken);
                Turn::Stop
            }
            Ok(_) if self.rendezvous.is_over() => Turn::Stop,
            Ok(true) => Turn::Busy,
            Ok(false) => {
                let stage = match self.progress.stage {
                    Stage::Computing { until } => Some(until),
                    Stage::Exchanging { .. } | Stage::Finished => None,
                };
                Turn::Idle(self.adapter.next_wakeup().into_iter().chain(stage).min())
            }
        }
    }
}
