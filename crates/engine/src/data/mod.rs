//! Engine threads: the loops that move token data.
//!
//! One thread per role owns everything its data path needs (endpoint, wire, registered memory, disk
//! or rings) and shares nothing. The control plane sends commands through a bounded queue with a
//! wake-up; the reply returns on a channel inside the command. The end of a stream or session,
//! which must not be refused, is signalled through [`Signals`]. The thread polls while there is
//! work, spins briefly when there is none, then sleeps until a packet, a completion, a credit, a
//! command or a timer.
//!
//! All clients of an engine wait while it serves one of them, so no request may cost it more than
//! about a millisecond at a time: the client's thread computes a stream's order, a poll does a
//! bounded amount of work, and what is expensive to free goes to a `Disposer`. `Turns` keeps the
//! longest times.

mod disposer;
pub mod dpu;
pub(crate) mod files;
mod signals;
pub(crate) mod sink;
pub mod target;
mod turns;

use std::any::Any;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};

use adapter::congestion::Choice;
use adapter::connect::{self, QpAddress, Terms};
use adapter::drive;
use adapter::owned::{self, Adapter, DeviceChoice, Loaded, OpenError, Software};
use adapter::software::LocalPeer;
use controls::CongestionControl;
use nic::clock;
use nic::driver::{Driver, Turn};
use nic::loaded::LoadError;
use nic::pool::{Pages, Pool, PoolRange};
use nic::waiter::Waker;
use roce::device::{Device, InitialPsns};
use roce::endpoint::{Mtu, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, PdId, Qpn, VerbsError};
use roce::world::Progress;
use roce::{Duration, Time};
use service::error::Error;
use service::log;
use thiserror::Error;

use disposer::Disposer;
pub use signals::Signals;
use turns::{Turns, Work};

/// How long an engine polls without work before it sleeps.
const SPIN: Duration = Duration::from_micros(5);

/// Commands that may wait for an engine.
const COMMAND_QUEUE: usize = 256;

/// Local ACK timeout code: 4.096 us * 2^13 = 34 ms, well above the scheduling delays of a busy
/// host.
const ACK_TIMEOUT: u8 = 13;

/// Retries when the peer has no receive posted. Both sides post theirs in advance; a peer that does
/// not is broken, and must not hold our staging buffers for ever.
const RNR_RETRY: u8 = 6;

/// Unacknowledged packets per queue pair: 2 MiB at the largest MTU. A receiver acknowledges once
/// per round, up to 480 packets; with a smaller window the two ends take turns instead of
/// overlapping.
const WINDOW_PACKETS: u32 = 512;

/// The limit on the memory of streams, as it is named in messages.
const STAGING: &str = "bytes of staging buffers";

/// Why an engine could not start or carry out a command.
#[derive(Debug, Error)]
pub enum EngineError {
    /// Registered memory.
    #[error(transparent)]
    Pool(#[from] nic::pool::PoolError),
    /// The UDP wire.
    #[error(transparent)]
    Udp(#[from] nic::udp::UdpError),
    /// The library of a device.
    #[error("{library}: {source}")]
    Load {
        /// The library, as it was named.
        library: String,
        /// What is wrong.
        source: LoadError,
    },
    /// The disk.
    #[error(transparent)]
    Disk(#[from] host::disk::DiskError),
    /// The ring.
    #[error(transparent)]
    Ring(#[from] host::ring::RingError),
    /// A verb was refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The operating system.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
    /// The command queue is full or the engine has stopped.
    #[error("the engine {0}")]
    Unavailable(&'static str),
    /// A limit of the configuration.
    #[error("{what}: {need} needed, {have} free")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How much was requested.
        need: u64,
        /// How much there is.
        have: u64,
    },
}

impl From<OpenError> for EngineError {
    fn from(error: OpenError) -> EngineError {
        match error {
            OpenError::Pool(error) => error.into(),
            OpenError::Udp(error) => error.into(),
            OpenError::Load { library, source } => EngineError::Load { library, source },
        }
    }
}

impl EngineError {
    /// Refuses a stream that needs more bytes of staging buffers than there are.
    pub fn check_staging(need: u64, have: u64) -> Result<(), EngineError> {
        let what = STAGING;
        if need > have { Err(EngineError::Limit { what, need, have }) } else { Ok(()) }
    }
}

/// An engine's refusal as an error for its requester.
impl From<EngineError> for Error {
    fn from(error: EngineError) -> Error {
        let usage = Error::invalid(&error).caused_by(&error);
        // May succeed later: another stream may end, another command may leave the queue.
        let usage = match error {
            EngineError::Limit { .. } | EngineError::Pool(_) | EngineError::Unavailable(_) => {
                usage.transient()
            }
            _ => usage,
        };
        match error {
            EngineError::Limit { what: STAGING, .. } => usage.hint(
                "use a smaller blocks= in shuffle(), fewer datasets, or start with a larger --memory",
            ),
            EngineError::Pool(nic::pool::PoolError::Full { .. }) => usage.hint(
                "other streams lie between what is free: try again when one has ended, or start with a larger --memory",
            ),
            EngineError::Limit { what: "streams", .. } => {
                usage.hint("close another stream, or start a second `dquant dpu` on another socket")
            }
            EngineError::Load { source: LoadError::NoDevice { .. }, .. } => {
                usage.hint("name one of its devices, or another library with --verbs-library")
            }
            EngineError::Load { .. } => usage.hint(
                "name dquant's library: `--verbs-library PATH/libibverbs.so`, or `dquant run -- dquant serve …`",
            ),
            EngineError::Udp(error) => match error.hint() {
                Some(hint) => usage.hint(hint),
                None => usage,
            },
            _ => usage,
        }
    }
}

/// An engine's refusal to open a stream or session.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct Refused {
    /// Why.
    pub error: EngineError,
    /// What came with the request, for the requester to free, because the engine has other clients.
    _rest: Box<dyn Any + Send>,
}

impl Refused {
    fn new(error: EngineError, rest: impl Any + Send) -> Refused {
        Refused { error, _rest: Box::new(rest) }
    }
}

/// Configuration common to both engines.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Address of the RoCE endpoint. A device of a library has its own.
    pub roce: SocketAddr,
    /// A device of a library instead of the software one.
    pub device: Option<DeviceChoice>,
    /// Bytes of registered memory.
    pub memory: u64,
    /// The congestion control of its connections.
    pub congestion: Choice,
    /// The most that each connection may send in bits per second, 0 for no limit.
    pub rate_limit_bps: u64,
    /// The largest path MTU of its connections.
    pub mtu: Mtu,
    /// Received packets to drop, in parts per million.
    pub loss_ppm: u32,
    /// Seed of keys, queue pair numbers and losses.
    pub seed: u64,
}

/// A device with its memory, as an engine uses it.
pub(crate) struct Host<F> {
    pub(crate) adapter: F,
    congestion: Choice,
    rate_limit_bps: u64,
    mtu: Mtu,
    psns: InitialPsns,
    /// When the current turn began.
    now: Time,
}

impl Host<Software> {
    /// Our own device, on a UDP socket.
    fn software(config: &HostConfig) -> Result<Host<Software>, EngineError> {
        let HostConfig { roce, memory, congestion, rate_limit_bps, loss_ppm, seed, .. } = *config;
        let mut adapter = Software::bind(roce, memory, loss_ppm, seed)?;
        let is_controlled =
            congestion != Choice::Auto && congestion != Choice::Always(CongestionControl::Off);
        adapter.open_same_host(match () {
            () if loss_ppm > 0 => Some("received packets are dropped".to_owned()),
            () if is_controlled => Some("congestion control is on".to_owned()),
            () if rate_limit_bps > 0 => Some("the rate is limited".to_owned()),
            () => owned::refused_by_environment(),
        });
        Ok(Host::new(adapter, config))
    }
}

impl Host<Loaded> {
    /// The device of a library.
    fn loaded(config: &HostConfig, choice: &DeviceChoice) -> Result<Host<Loaded>, EngineError> {
        let adapter = Loaded::open(choice, config.memory)?;
        Ok(Host::new(adapter, config))
    }
}

impl<F: Adapter> Host<F> {
    fn new(adapter: F, config: &HostConfig) -> Host<F> {
        let HostConfig { congestion, rate_limit_bps, mtu, seed, .. } = *config;
        let psns = InitialPsns::new(seed);
        Host { adapter, congestion, rate_limit_bps, mtu, psns, now: clock::now() }
    }

    /// The paths chosen and why, for people to read.
    fn notes(&self) -> Vec<String> {
        let pool = self.adapter.memory();
        let (pages, count) = (pool.pages(), pool.len().div_ceil(2 << 20));
        let memory = match pages {
            Pages::Base => format!("{pages}; for huge pages: sysctl vm.nr_hugepages={count}"),
            pages => format!("{pages} ({})", pool.why()),
        };
        let mut notes = vec![format!("memory: {memory}")];
        notes.extend(self.adapter.notes());
        notes.push(format!("kernels: {}", host::kernels::best().1));
        notes.push(format!("congestion control: {}", self.congestion));
        notes
    }

    fn device(&mut self) -> &mut F::Device {
        self.adapter.device()
    }

    /// Receives packets, runs the engine's `work`, and sends.
    fn turn(
        &mut self,
        now: Time,
        work: impl FnOnce(&mut F::Device, &mut Pool) -> bool,
    ) -> Progress {
        self.now = now;
        self.adapter.turn(now, work)
    }

    /// Allocates memory from the pool and registers it in a domain.
    fn register(
        &mut self,
        pd: PdId,
        bytes: u64,
        access: Access,
    ) -> Result<(PoolRange, MemoryRegion), EngineError> {
        let range = self.adapter.memory_mut().alloc(bytes.max(64), 4096)?;
        match self.device().register(pd, range.addr, range.len, access) {
            Ok(region) => Ok((range, region)),
            Err(error) => {
                self.release(range);
                Err(error.into())
            }
        }
    }

    fn release(&mut self, range: PoolRange) {
        self.adapter.release(range);
    }

    fn deregister(&mut self, range: PoolRange, region: &MemoryRegion) {
        let gone = self.device().deregister(region.lkey);
        debug_assert!(gone.is_ok(), "{gone:?}");
        self.release(range);
    }

    /// Deallocates a domain whose regions and queue pairs have been destroyed.
    fn dealloc_pd(&mut self, pd: PdId) {
        let gone = self.device().dealloc_pd(pd);
        debug_assert!(gone.is_ok(), "{gone:?}");
    }

    /// Completion queues for sends and receives.
    fn create_cqs(&mut self, depth: u32) -> Result<(CqId, CqId), EngineError> {
        let send_cq = self.device().create_cq(depth)?;
        match self.device().create_cq(depth) {
            Ok(recv_cq) => Ok((send_cq, recv_cq)),
            Err(error) => {
                self.destroy_cq(send_cq);
                Err(error.into())
            }
        }
    }

    fn destroy_cq(&mut self, cq: CqId) {
        let gone = self.device().destroy_cq(cq);
        debug_assert!(gone.is_ok(), "{gone:?}");
    }

    fn create_qp(
        &mut self,
        pd: PdId,
        cqs: (CqId, CqId),
        work: u32,
    ) -> Result<QpAddress, EngineError> {
        let (send_cq, recv_cq) = cqs;
        let config = QpConfig { recv_cq, ..QpConfig::rc(pd, send_cq, work, work) };
        let psn = self.psns.draw();
        Ok(connect::create(&mut self.adapter, self.now, config, psn, self.mtu.bytes())?)
    }

    fn destroy_qp(&mut self, qpn: Qpn) {
        let gone = self.adapter.device().destroy_qp(self.now, qpn);
        debug_assert!(gone.is_ok(), "{gone:?}");
    }

    /// Connects our end of a queue pair; loss recovery is what both ends have. Our
    /// WRITEs go to a local peer through shared memory, if the other end is one.
    fn connect(
        &mut self,
        ours: &QpAddress,
        peer: &QpAddress,
        mtu: Mtu,
        local: LocalPeer,
    ) -> Result<(), EngineError> {
        let terms = Terms {
            congestion: self.congestion,
            is_ours: false,
            timeout: ACK_TIMEOUT,
            rnr_retry: RNR_RETRY,
            window_packets: WINDOW_PACKETS,
            rate_limit_bps: self.rate_limit_bps,
            dscp: 0,
        };
        Ok(connect::connect(&mut self.adapter, self.now, &terms, (ours, peer), mtu, local)?)
    }

    /// Logs the device's troubles. Returns why it can no longer be used, if that is so.
    fn take_trouble(&mut self) -> Option<String> {
        let gone = drive::take_trouble(&mut self.adapter, log::line);
        gone.inspect(|why| log::line(why))
    }

    /// What the driver does after a turn that was `busy` or not.
    fn next_turn(&self, busy: bool) -> Turn {
        if busy { Turn::Busy } else { Turn::Idle(self.adapter.next_wakeup()) }
    }

    /// A driver that wakes for this engine's packets.
    fn driver(&self) -> Result<Driver, EngineError> {
        let no_driver = |source| EngineError::Os { what: "descriptors to wait with", source };
        drive::driver(&self.adapter).map_err(no_driver)
    }
}

/// Commands to an engine, from any thread.
#[derive(Debug)]
pub struct Commands<C> {
    queue: SyncSender<C>,
    waker: Waker,
    stop: Arc<AtomicBool>,
    failure: Arc<OnceLock<String>>,
}

/// The engine's end of its commands.
#[derive(Debug)]
pub(crate) struct Inbox<C> {
    queue: Receiver<C>,
    stop: Arc<AtomicBool>,
    failure: Arc<OnceLock<String>>,
}

impl<C> Inbox<C> {
    /// A command, if there is one.
    pub(crate) fn take(&self) -> Option<C> {
        self.queue.try_recv().ok()
    }

    /// Notes why the engine ends by itself, if it does.
    fn set_failure(&self, why: Option<String>) {
        if let Some(why) = why {
            // It ends once.
            let _ = self.failure.set(why);
        }
    }

    /// Whether the engine is to end.
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

impl<C> Clone for Commands<C> {
    fn clone(&self) -> Commands<C> {
        let Commands { queue, waker, stop, failure } = self;
        let (stop, failure) = (Arc::clone(stop), Arc::clone(failure));
        Commands { queue: queue.clone(), waker: waker.clone(), stop, failure }
    }
}

impl<C> Commands<C> {
    pub(crate) fn new(waker: Waker) -> (Commands<C>, Inbox<C>) {
        let (queue, receiver) = sync_channel(COMMAND_QUEUE);
        let stop = Arc::new(AtomicBool::new(false));
        let failure = Arc::new(OnceLock::new());
        let inbox = Inbox { queue: receiver, stop: stop.clone(), failure: failure.clone() };
        (Commands { queue, waker, stop, failure }, inbox)
    }

    /// Signals to the engine for one stream or session, passed with the command that opens it.
    pub fn signals(&self) -> Signals {
        Signals::new(self.waker.clone())
    }

    /// Ends the engine.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Whether the engine was asked to end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Why the engine has ended without being asked to, as far as it knows.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Queues a command, unless the queue is full.
    pub fn send(&self, command: C) -> Result<(), EngineError> {
        self.queue.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => EngineError::Unavailable("is overloaded: its queue is full"),
            TrySendError::Disconnected(_) => EngineError::Unavailable("has stopped"),
        })?;
        self.waker.wake();
        Ok(())
    }

    /// Queues a command created around a reply channel, waiting for room in the queue, and waits
    /// for the reply. The engine takes commands under any load, and the number of callers is
    /// bounded, so only an engine that has stopped gives no reply.
    pub fn call<R>(&self, make: impl FnOnce(SyncSender<R>) -> C) -> Result<R, EngineError> {
        let (reply, answer) = sync_channel(1);
        let stopped = EngineError::Unavailable("has stopped");
        if self.queue.send(make(reply)).is_err() {
            return Err(stopped);
        }
        self.waker.wake();
        answer.recv().map_err(|_| stopped)
    }
}

#[cfg(test)]
mod tests;
