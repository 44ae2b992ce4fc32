//! One engine for each open device of this process: the endpoint, its wire, and the threads that drive
//! them. No verbs object and no C function may enter.
//!
//! All mutable state is in [`Core`], behind one lock. A verb holds the lock while it runs; posting and
//! polling threads also take turns ([`world::turn`]), so that a polling program never waits for another
//! thread. When no thread polls, the progress thread takes them ([`progress`]). At the end of a turn, completion
//! notifications and asynchronous events go to the [`Listener`]s of their objects ([`Core::settle`]).
//!
//! Order of locks: an engine's core, then the locks that listeners take.

mod capture;
mod direct;
pub(crate) mod dmabuf;
mod gather;
pub(crate) mod limits;
mod memory;
pub(crate) mod netdev;
mod pace;
mod progress;
pub(crate) mod shared;

use std::collections::{BTreeSet, HashMap};
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, TryLockError};

use nic::clock;
use nic::device::{DeviceConfig, DeviceWire};
use nic::driver::Driver;
use nic::neighbours;
use nic::udp::UdpError;
use roce::endpoint::{AsyncEvent, Endpoint, EndpointConfig, Mtu};
use roce::verbs::{CqId, SrqId};
use roce::world;
use roce::{Duration, Time};
use rustix::io::Errno;

use crate::process::counter::Signal;
use crate::process::descriptor::Watched;
use crate::process::errors::{Failure, Outcome, errno_of_io};
use crate::process::fork::{self, ForkLock};
use crate::process::settings::Settings;

use gather::Gather;
use memory::ProcessMemory;
pub(crate) use memory::populate;
use netdev::Interface;
use pace::Pace;
use progress::Progress;

/// Most turns that a posting thread takes: enough to send a whole window.
const POST_TURNS: u32 = 4;

/// How long a thread polls in vain before each further poll yields the processor.
const SPIN: Duration = Duration::from_micros(10);

/// Length of a yield that let others run which yield, too. A thread that computes keeps the processor for longer; yielding
/// to it at once would give it a whole slice for each message.
const OTHERS_RAN: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_micros(500);

/// How long the processor counts as crowded after that.
const CROWDED: Duration = Duration::from_millis(2);

/// Polls in a row without a turn while nothing is there: such a poll is a look at the FIFOs, a small part of what a turn
/// and its look at the clock cost.
const SKIPPED_POLLS: u32 = 7;

/// Packets of one turn that mean "there is more to send".
const FULL_TURN: usize = 2 * world::BURST_PACKETS;

/// An open device.
pub(crate) struct Engine {
    /// The interface when the device was opened: its addresses are the GID table.
    pub(crate) interface: Interface,
    pub(crate) settings: Settings,
    /// The largest path MTU of the interface.
    pub(crate) mtu: Mtu,
    core: Mutex<Core>,
    progress: Progress,
    /// What verbs use of the same-host path without the lock.
    boards: Result<Arc<neighbours::Shared>, String>,
    sharing: shared::Sharing,
    sockets: Vec<Watched>,
    /// Since when polls have been in vain, in nanoseconds; `u64::MAX` if the last one was not.
    idle_since: AtomicU64,
    /// Until when other threads are taken to wait for the processor of those that poll, in nanoseconds.
    crowded_until: AtomicU64,
}

/// The state behind an engine's lock.
pub(crate) struct Core {
    pub(crate) endpoint: Endpoint,
    /// `None` once the device is closed.
    wire: Option<DeviceWire>,
    memory: ProcessMemory,
    /// The same-host path, or why there is none.
    neighbours: direct::Possible,
    /// Why queue pairs have no neighbour, by number.
    by_packets: HashMap<u32, String>,
    /// A request posted since the last look has to be sent.
    queued: bool,
    /// One of the requests posted since the last look must not wait for others.
    urgent: bool,
    /// A request posted since the last look waits for a turn.
    held: bool,
    /// A turn took a neighbour's ring from the sockets since the last look.
    rung: bool,
    /// Wake-ups of threads that wait for completions, while the progress thread collects them: it wakes them when it has given
    /// the lock back, because they take it first.
    signals: Option<Vec<Signal>>,
    /// Sleeps of the progress thread that ended by time with work that nobody had announced.
    pub(crate) rescued_wakeups: u64,
    gather: Gather,
    /// Queue pairs with requests that wait for the packets before them, to be carried out directly.
    holding: BTreeSet<u32>,
    /// The first of them at which the last turn ended although more could be carried out.
    behind: Option<u32>,
    /// No turn has come since a request began to wait.
    is_unseen: bool,
    /// Polls without a turn since the last one.
    skipped: u32,
    pace: Pace,
    /// The endpoint's count of failed queue pairs at the last look.
    failed_before: u64,
    /// The time of the last turn. Posts use it: they are timed when they are sent, and reading the clock
    /// would take a tenth of a post's time.
    pub(crate) now: Time,
    pub(crate) qps: HashMap<u32, &'static dyn Listener>,
    pub(crate) cqs: HashMap<CqId, &'static dyn Listener>,
    pub(crate) srqs: HashMap<SrqId, &'static dyn Listener>,
}

/// What becomes of acknowledgements in a turn, if nothing else is to be sent.
#[derive(Clone, Copy, Debug)]
enum Acks {
    /// They leave.
    Leave,
    /// They wait for a program that takes completions from this queue next.
    WaitForCompletions(CqId),
    /// Those for what arrives in this turn wait for the program's next call. It may be a reply: the program may poll memory.
    WaitForProgram,
}

/// A notification of a queue pair, a completion queue or a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// An armed completion queue has a completion of the requested kind.
    Completed,
    /// An asynchronous event.
    Event(AsyncEvent),
}

/// An object of the layer above, in the tables of [`Core`].
pub(crate) trait Listener: Sync {
    /// Called on any thread, with the core locked: must only queue the notice. The signal wakes whoever waits for it.
    fn notify(&'static self, notice: Notice) -> Option<Signal>;
}

/// The state that a thread has left in a panic. Nobody wakes whom the progress thread was going to.
fn after_panic<'a>(poisoned: PoisonError<MutexGuard<'a, Core>>) -> MutexGuard<'a, Core> {
    let mut core = poisoned.into_inner();
    drop(core.signals.take());
    core
}

struct Open {
    engine: Arc<Engine>,
    users: usize,
}

static ENGINES: ForkLock<Vec<Open>> = ForkLock::new(Vec::new());

/// In a child: it has no engine yet. The parent's engines stay untouched in memory.
///
/// # Safety
/// As [`ForkLock::renew`].
pub(crate) unsafe fn renew() {
    let leave = |engines: &mut Vec<Open>| std::mem::forget(std::mem::take(engines));
    // SAFETY: as the caller promises.
    unsafe {
        ENGINES.renew(Vec::new(), leave);
        shared::renew();
    }
}

/// Every engine that is running.
pub(crate) fn all() -> Vec<Arc<Engine>> {
    let engines = ENGINES.lock();
    engines.iter().map(|open| Arc::clone(&open.engine)).collect()
}

/// The process exits: acknowledgements no longer wait.
static EXITING: AtomicBool = AtomicBool::new(false);

/// How often an exiting process tries to get an engine's lock, and the pause between.
const EXIT_TRIES: u32 = 20;
const EXIT_PAUSE: std::time::Duration = std::time::Duration::from_micros(50);

/// Sends what waits for the program's next call: there will be none. A peer waits for the acknowledgement of the last
/// message.
extern "C" fn send_waiting() {
    EXITING.store(true, Ordering::Relaxed);
    for engine in all() {
        // Its progress thread may have the lock. A program's thread may keep it for ever.
        let mut tries = (0..EXIT_TRIES).map(|_| {
            engine.try_lock().or_else(|| {
                std::thread::sleep(EXIT_PAUSE);
                None
            })
        });
        if let Some(mut core) = tries.find_map(|core| core)
            && core.gather.waits()
        {
            engine.flush(&mut core);
        }
    }
}

impl Engine {
    /// The engine of an interface: the one that is running, or a new one.
    ///
    /// # Errors
    /// When the machine lacks a resource for a new one.
    pub(crate) fn open(interface: Interface) -> Result<Arc<Engine>, Failure> {
        let mut engines = ENGINES.lock();
        if let Some(open) = engines.iter_mut().find(|open| open.engine.interface == interface) {
            open.users += 1;
            return Ok(Arc::clone(&open.engine));
        }
        let engine = Engine::start(interface)?;
        engines.push(Open { engine: Arc::clone(&engine), users: 1 });
        Ok(engine)
    }

    /// Drops one reference; the last one stops the engine.
    pub(crate) fn release(self: &Arc<Engine>) {
        let mut engines = ENGINES.lock();
        let Some(at) = engines.iter().position(|open| Arc::ptr_eq(&open.engine, self)) else {
            return;
        };
        engines[at].users -= 1;
        if engines[at].users == 0 {
            let open = engines.swap_remove(at);
            open.engine.progress.stop();
            fork::closed(&open.engine.socket_numbers());
            open.engine.close_shared();
            let mut core = open.engine.lock();
            let closed = Err("the device is closed".to_owned());
            if let Ok(neighbours) = std::mem::replace(&mut core.neighbours, closed) {
                fork::closed(&neighbours.fds());
            }
            let wire = core.wire.take();
            drop(core);
            if !open.engine.sockets.iter().all(Watched::is_there) {
                // The program has closed the descriptors, and their numbers may have been reused.
                std::mem::forget(wire);
            }
        }
    }

    fn start(interface: Interface) -> Result<Arc<Engine>, Failure> {
        let config = DeviceConfig::new(interface.addresses.clone(), interface.index);
        let name = interface.device_name();
        let refused = |what| {
            let name = &name;
            move |errno| Failure::new(errno, format_args!("{name}: {what}: {errno}"))
        };
        let mut wire = DeviceWire::open(&config).map_err(|error| no_wire(&name, &error))?;
        let sockets = wire.descriptors().into_iter().map(Watched::new).collect::<Outcome<_>>();
        let sockets = sockets.map_err(refused("its sockets are closed"))?;
        let no_descriptor = refused("no descriptor for its progress thread");
        let driver = driver_for(&wire).map_err(no_descriptor)?;
        let progress = Progress::new(&driver).map_err(no_descriptor)?;
        let seed = seed().map_err(refused("no random numbers"))?;
        capture::begin(&mut wire, &interface);
        let mtu = Mtu::from_bytes(wire.payload_limit()).unwrap_or(Mtu::M256);
        let config = EndpointConfig { qpn_prefix: wire.slot(), mtu, seed, ..limits::ENDPOINT };
        let endpoint = Endpoint::new(config);
        let settings = Settings::from_env();
        let neighbours = direct::open(&wire, &settings);
        let boards = match &neighbours {
            Ok(neighbours) => {
                fork::close_in_children(&neighbours.fds());
                Ok(Arc::clone(neighbours.shared()))
            }
            Err(why) => Err(why.clone()),
        };
        let sharing = shared::open(&settings, &neighbours);
        let core = Core {
            endpoint,
            wire: Some(wire),
            memory: ProcessMemory,
            neighbours,
            by_packets: HashMap::new(),
            queued: false,
            urgent: false,
            held: false,
            rung: false,
            signals: None,
            rescued_wakeups: 0,
            gather: Gather::new(),
            holding: BTreeSet::new(),
            behind: None,
            is_unseen: false,
            skipped: 0,
            pace: Pace::default(),
            failed_before: 0,
            now: clock::now(),
            qps: HashMap::new(),
            cqs: HashMap::new(),
            srqs: HashMap::new(),
        };
        static AT_EXIT: Once = Once::new();
        // SAFETY: the function has no arguments, and what it touches lives as long as the process.
        AT_EXIT.call_once(|| unsafe {
            libc::atexit(send_waiting);
        });
        let engine = Arc::new(Engine {
            interface,
            settings,
            mtu,
            core: Mutex::new(core),
            progress,
            boards,
            sharing,
            sockets,
            idle_since: AtomicU64::new(u64::MAX),
            crowded_until: AtomicU64::new(0),
        });
        progress::spawn(&engine, driver).map_err(refused("no progress thread"))?;
        fork::close_in_children(&engine.socket_numbers());
        Ok(engine)
    }

    fn socket_numbers(&self) -> Vec<RawFd> {
        self.sockets.iter().map(|socket| socket.fd).collect()
    }

    /// Locks the mutable state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(after_panic)
    }

    /// The mutable state, unless another thread has the lock.
    fn try_lock(&self) -> Option<MutexGuard<'_, Core>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(poisoned)) => Some(after_panic(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// A verb that may complete work requests or give the endpoint something to send. What waits is sent before: the verb
    /// may end its queue pair.
    pub(crate) fn verb<T>(&self, verb: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.lock();
        if core.gather.waits() {
            self.flush(&mut core);
        }
        let done = verb(&mut core);
        self.flush(&mut core);
        done
    }

    /// Sends posted requests, as far as windows allow. It does not receive: a program that posts will poll, and one that
    /// does not is not known to be there, so the progress thread receives. Who posts a burst is there, and takes turns.
    pub(crate) fn flush(&self, core: &mut Core) {
        core.now = core.now.max(clock::now());
        core.gather.posted(core.now);
        if core.gather.owes_turn() {
            core.turn(core.now, Acks::Leave);
        }
        if core.gather.is_burst() {
            // It will go on or poll, as one that polls in vain does.
            self.progress.note_program_turn(core.now, true);
        }
        let mut turns = 0;
        while core.send() >= FULL_TURN && turns < POST_TURNS {
            turns += 1;
        }
        core.settle();
        self.progress.note_deadline(core.deadline());
        if core.gather.is_burst() {
            // What waits from now on has not waited for this.
            core.now = core.now.max(clock::now());
        }
        if turns == POST_TURNS {
            self.progress.wake();
        }
        self.pass_on(core);
    }

    /// Wakes the progress thread for what a thread of the program leaves to it: requests that turns carry out, unless the
    /// program polls, and a ring that this thread has taken from the sockets. Neighbours ring once for each sleep.
    pub(super) fn pass_on(&self, core: &mut Core) {
        let held = std::mem::take(&mut core.held) && !self.progress.is_napping();
        let rung = std::mem::take(&mut core.rung) && core.is_asleep();
        if held || rung {
            self.progress.wake();
        }
    }

    /// A turn taken by a thread of the program.
    pub(crate) fn turn(&self, core: &mut Core) -> world::Progress {
        self.turn_for(core, None)
    }

    /// A turn of a thread that is going to take completions from a queue.
    pub(crate) fn turn_for(&self, core: &mut Core, cq: Option<CqId>) -> world::Progress {
        let now = clock::now();
        core.gather.polled(now);
        let acks = match cq {
            Some(cq) if self.progress.is_napping() => Acks::WaitForCompletions(cq),
            _ => Acks::Leave,
        };
        let progress = core.turn(now, acks);
        let is_idle = progress.is_idle();
        let end = if is_idle { now } else { clock::now() };
        self.progress.note_program_turn(end, is_idle);
        self.progress.note_deadline(core.deadline());
        self.pass_on(core);
        progress
    }

    /// A program thread has polled, and if `idle_at` is a time, it found nothing to do then. After a while it yields: its
    /// peer may be waiting for the same processor. Where that lately let others run, it yields at once.
    pub(crate) fn polled(&self, idle_at: Option<Time>) {
        let Some(now) = idle_at.map(Time::as_nanos) else {
            return self.idle_since.store(u64::MAX, Ordering::Relaxed);
        };
        if now < self.crowded_until.load(Ordering::Relaxed) {
            return self.yield_processor();
        }
        let since = self.idle_since.load(Ordering::Relaxed);
        if since == u64::MAX {
            self.idle_since.store(now, Ordering::Relaxed);
        } else if now.saturating_sub(since) > SPIN.as_nanos() {
            self.yield_processor();
        }
    }

    fn yield_processor(&self) {
        let start = clock::now();
        self.progress.note_yield(start);
        std::thread::yield_now();
        let end = clock::now();
        self.progress.note_program_turn(end, true);
        if OTHERS_RAN.contains(&end.since(start)) {
            self.crowded_until.store((end + CROWDED).as_nanos(), Ordering::Relaxed);
        }
    }

    /// A completion queue was armed: from now on the program may sleep.
    pub(crate) fn expect_sleep(&self) {
        self.progress.expect_sleep();
    }
}

impl Core {
    /// A turn at `now`, or at the time of the last one if that was later: a thread may have waited
    /// for the lock since it read the clock, and an endpoint's time never goes backwards.
    fn turn(&mut self, now: Time, acks: Acks) -> world::Progress {
        self.now = self.now.max(now);
        let worked = match acks {
            Acks::WaitForCompletions(_) => self.exchange_at_pace(),
            Acks::Leave | Acks::WaitForProgram => self.exchange_messages(),
        };
        let mut progress = world::Progress { received: self.receive(), sent: 0, worked };
        if self.may_wait(acks, progress.received) && self.gather.acknowledge(self.now) {
            self.settle();
            return progress;
        }
        progress.sent = self.send();
        if !self.holding.is_empty() && self.carry_out_held() {
            progress.received += self.receive();
            progress.sent += self.send();
        }
        self.settle();
        progress
    }

    /// Whether acknowledgements are all that is to be sent, and may wait.
    fn may_wait(&self, acks: Acks, received: usize) -> bool {
        let has_reason = match acks {
            Acks::Leave => false,
            Acks::WaitForCompletions(cq) => self.endpoint.has_completion(cq),
            Acks::WaitForProgram => received > 0 && !EXITING.load(Ordering::Relaxed),
        };
        has_reason
            && !self.endpoint.is_quiet()
            && self.endpoint.owes_only_acks()
            && self.holding.is_empty()
    }

    /// Whether messages may be there that the last poll has not looked for.
    pub(crate) fn rests(&self) -> bool {
        self.pace.rests()
    }

    /// A part of a turn without a look at the clock, at timers and at sockets: takes messages of neighbours, and their
    /// verdicts. Returns false where a whole turn is due, or there are none.
    pub(crate) fn turn_messages(&mut self) -> bool {
        let may = self.skipped < SKIPPED_POLLS && self.holding.is_empty();
        let done = may && self.endpoint.is_quiet() && self.exchange_at_pace();
        if done {
            self.skipped += 1;
            self.settle();
        }
        done
    }

    /// Whether a turn would find nothing, as far as one can see without reading the clock: packets of neighbours would be
    /// there, and timers and sockets can wait for a few more polls.
    pub(crate) fn may_skip_turn(&mut self) -> bool {
        let Ok(neighbours) = &self.neighbours else {
            return false;
        };
        let is_idle = self.skipped < SKIPPED_POLLS
            && neighbours.reads_fifos()
            && !neighbours.holds_packets()
            && self.endpoint.is_quiet()
            && self.holding.is_empty();
        self.skipped = if is_idle { self.skipped + 1 } else { 0 };
        is_idle
    }

    fn receive(&mut self) -> usize {
        let Core { endpoint, wire, memory, neighbours, now, rung, .. } = self;
        let Some(wire) = wire else {
            return 0;
        };
        let rings = wire.counters().sharing.probes;
        let received = match neighbours {
            Ok(neighbours) => world::receive(endpoint, &mut neighbours.wire(wire), memory, *now),
            Err(_) => world::receive(endpoint, wire, memory, *now),
        };
        *rung |= wire.counters().sharing.probes != rings;
        received
    }

    fn send(&mut self) -> usize {
        let Core { endpoint, wire, memory, neighbours, now, .. } = self;
        let Some(wire) = wire else {
            return 0;
        };
        match neighbours {
            Ok(neighbours) => world::send(endpoint, &mut neighbours.wire(wire), memory, *now),
            Err(_) => world::send(endpoint, wire, memory, *now),
        }
    }

    /// Delivers completion events and asynchronous events.
    pub(crate) fn settle(&mut self) {
        self.withdraw_failed();
        while let Some(id) = self.endpoint.poll_notified() {
            if let Some(cq) = self.cqs.get(&id) {
                // Dropped at once where nobody collects them.
                let signal = cq.notify(Notice::Completed);
                if let Some(signals) = &mut self.signals {
                    signals.extend(signal);
                }
            }
        }
        while let Some(event) = self.endpoint.poll_event() {
            if let AsyncEvent::CommunicationEstablished(qpn) = event {
                self.publish_qp(qpn);
            }
            if let Some(listener) = self.listener(event) {
                drop(listener.notify(Notice::Event(event)));
            }
        }
    }

    fn listener(&self, event: AsyncEvent) -> Option<&'static dyn Listener> {
        use AsyncEvent::*;
        let found = match event {
            QpFatal(qpn)
            | QpRequestError(qpn)
            | QpAccessError(qpn)
            | CommunicationEstablished(qpn)
            | SendQueueDrained(qpn)
            | LastWqeReached(qpn) => self.qps.get(&qpn.get()),
            SrqLimitReached(srq) => self.srqs.get(&srq),
            CqError(cq) => self.cqs.get(&cq),
        };
        found.copied()
    }

    fn deadline(&self) -> Option<Time> {
        let behind = self.behind.map(|_| self.now);
        behind.or_else(|| world::next_wakeup(&self.endpoint))
    }

    /// The wire, while the device is open.
    pub(crate) fn wire(&mut self) -> Outcome<&mut DeviceWire> {
        self.wire.as_mut().ok_or(Errno::NODEV)
    }
}

/// A driver that wakes for packets of this wire.
fn driver_for(wire: &DeviceWire) -> Outcome<Driver> {
    let made = Driver::new().and_then(|driver| {
        wire.fds().into_iter().try_for_each(|fd| driver.watched().add(fd, 0))?;
        Ok(driver)
    });
    made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))
}

/// Why there is no wire. Some errors have a hint of their own; the one for exhausted descriptors does
/// not depend on their use.
fn no_wire(device: &str, error: &UdpError) -> Failure {
    let errno = error.os_error().map_or(Errno::IO, errno_of_io);
    let own = error.hint().filter(|_| errno != Errno::MFILE);
    Failure::new(errno, format_args!("{device}: {error}")).with_hint(own)
}

/// The seed of keys and initial queue pair numbers, which must not be predictable.
fn seed() -> Outcome<u64> {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        8 => Ok(u64::from_ne_bytes(bytes)),
        _ => Err(Errno::IO),
    }
}
