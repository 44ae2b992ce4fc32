//! One rank of a replayed job on its device: opened, connected, driven to the end.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration as StdDuration, Instant};

use adapter::congestion::Choice;
use adapter::connect::{QpAddress, RNR_RETRY_FOREVER, Terms, connect, path_mtu};
use adapter::drive::{self, Owner};
use adapter::owned::Adapter;
use adapter::owned::DeviceChoice;
use comm::bootstrap::Failure;
use comm::mesh::{Link, Mesh, MeshError};
use nic::clock;
use nic::driver::Turn;
use roce::verbs::VerbsError;
use roce::wire::ROCE_PORT;
use roce::{Duration, Time};
use service::{Error, log};

use super::exchange::{ALIGN, Outcome, Plan, Progress, Sizes};
use super::rendezvous::Rendezvous;
use super::schedule::{Schedule, Step};
use super::wire::{self, RankInfo};
use crate::devices;

/// Most registered memory of a rank.
const MAX_MEMORY: u64 = 4 << 30;

/// Local ACK timeout code: 537 ms. As communication libraries have it, longer than any queue: a job
/// is not to end because others are faster for a while. Losses are repaired long before.
const ACK_TIMEOUT: u8 = 17;

/// Unacknowledged packets per queue pair.
const WINDOW_PACKETS: u32 = 512;

/// How often the others are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How long a rank whose queue pair has failed waits for news of the reason.
const REASON_LIMIT: StdDuration = StdDuration::from_millis(500);

/// What a rank is to do.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What has to be the same at all ranks.
    pub terms: wire::Terms,
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

    fn listener(&self) -> Option<&TcpListener> {
        match self {
            Place::Host(listener) => Some(listener),
            Place::Guest(_) => None,
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
    let seed = setup.seed.wrapping_add(u64::from(rank));
    let bytes = sizes.memory().unwrap_or(ALIGN);
    let range = adapter.memory_mut().alloc(bytes, ALIGN).map_err(Error::from_cause)?;
    let memory = (range.addr, range.len);
    let mesh = Mesh::open(adapter.device(), clock::now(), memory, &sizes.links(), seed)
        .map_err(|error| Error::because("the device refuses the job", &error))?;
    let Setup { warm_up, compute, .. } = *setup;
    let plan = Plan { iterations: setup.terms.iterations, warm_up, compute };
    let progress = Progress::new((rank, mesh), steps, sizes, plan, adapter.memory_mut());
    let links = progress.mesh().links().iter();
    let info = RankInfo {
        port: adapter.local().port(),
        mtu: devices::mtu(&adapter, setup.peers[usize::from(rank == 0)]),
        qps: links.map(|link| (link.wanted.peer, link.qpn.get(), link.psn.get())).collect(),
    };
    let listener = place.listener();
    let ours = info.clone();
    let mut rendezvous =
        Rendezvous::new((rank, listener), &setup.peers, &setup.terms, info, setup.wait)?;
    let infos = rendezvous.gather(listener)?;
    connect_all(&mut adapter, setup, progress.mesh(), (rank, &ours), &infos).inspect_err(
        |error| {
            let (why, hint) = error.parts();
            let ip = setup.peers[rank as usize].ip();
            rendezvous.fail(format!("rank {rank} ({ip}): {why}"), hint.unwrap_or_default());
        },
    )?;
    rendezvous.begin()?;
    replay(setup, adapter, progress, rendezvous)
}

/// Connects all queue pairs to those of the others, and posts receives.
fn connect_all<F: Adapter>(
    adapter: &mut F,
    setup: &Setup,
    mesh: &Mesh,
    (rank, ours): (u32, &RankInfo),
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
    for (at, &Link { wanted, qpn, psn, .. }) in mesh.links().iter().enumerate() {
        let peer = wanted.peer;
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
        let now = clock::now();
        connect(adapter, now, &terms, (&own, &theirs), mtu, local).map_err(refused)?;
        if wanted.inbox.bytes > 0 {
            let posted = mesh.post_receives(adapter.device(), now, at);
            posted.map_err(Error::invalid)?;
        }
    }
    Ok(())
}

fn replay<F: Adapter>(
    setup: &Setup,
    adapter: F,
    mut progress: Progress,
    rendezvous: Rendezvous,
) -> Result<Outcome, Error> {
    let no_driver = |error| Error::because("cannot wait for packets", &error);
    let driver = drive::driver(&adapter).map_err(no_driver)?;
    for (number, fd) in (1..).zip(rendezvous.fds()) {
        driver.watched().add(fd, number).map_err(no_driver)?;
    }
    let now = clock::now();
    progress.begin_at(now + until_start(setup.start_at_ms) + setup.shift);
    let peers = setup.peers.clone();
    let mut work = Work { adapter, rendezvous, progress, peers, looked: now, failure: None };
    drive::run(&driver, &mut work);
    match work.failure {
        Some(failure) => Err(wire::error(&failure, setup.wait)),
        None => {
            let retransmitted = devices::retransmitted(&work.adapter);
            Ok(Outcome { retransmitted, ..work.progress.into_outcome() })
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

struct Work<F> {
    adapter: F,
    rendezvous: Rendezvous,
    progress: Progress,
    peers: Vec<SocketAddr>,
    looked: Time,
    failure: Option<Failure>,
}

impl<F: Adapter> Work<F> {
    /// A queue pair failed: because its peer has ended, if that is heard in time, which says more.
    fn explain(&mut self, error: &MeshError) -> Failure {
        let began = Instant::now();
        while began.elapsed() < REASON_LIMIT {
            if let Err(failure) = self.rendezvous.look() {
                return failure;
            }
            std::thread::sleep(StdDuration::from_millis(5));
        }
        let own = self.progress.rank();
        let why = match error.peer() {
            Some(peer) => {
                let ip = self.peers[peer as usize].ip();
                format!("rank {own} lost its connection to rank {peer} ({ip}): {error}")
            }
            None => format!("rank {own}: its device fails: {error}"),
        };
        let hint =
            "do packets of UDP port 4791 pass between them? `dquant doctor` examines a machine";
        self.rendezvous.fail(why, hint.to_owned())
    }

    /// What the others and the device say.
    fn look(&mut self, now: Time) -> Result<(), Failure> {
        if now.since(self.looked) < LOOK_EVERY {
            return Ok(());
        }
        self.looked = now;
        if let Some(why) = drive::take_trouble(&mut self.adapter, log::line) {
            let why = format!("rank {}: its device is gone: {why}", self.progress.rank());
            let hint = "is its interface still there?".to_owned();
            return Err(self.rendezvous.fail(why, hint));
        }
        self.rendezvous.look()
    }

    fn advance(&mut self, now: Time) -> Result<bool, Failure> {
        let Work { adapter, progress, .. } = self;
        let was_finished = progress.is_finished();
        let mut failed = None;
        let moved = adapter.turn(now, |device, pool| {
            progress.step(now, device, pool).unwrap_or_else(|why| {
                failed = Some(why);
                false
            })
        });
        if let Some(why) = failed {
            return Err(self.explain(&why));
        }
        if !was_finished && self.progress.is_finished() {
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
            Err(failure) => {
                self.failure = Some(failure);
                Turn::Stop
            }
            Ok(_) if self.rendezvous.is_over() => Turn::Stop,
            Ok(true) => Turn::Busy,
            Ok(false) => {
                let due = self.progress.due();
                Turn::Idle(self.adapter.next_wakeup().into_iter().chain(due).min())
            }
        }
    }
}
