//! The shared face: an opened device of a program whose threads call verbs, and the thread that
//! drives it meanwhile.
//!
//! All mutable state is in [`Core`], behind one lock. A verb holds the lock while it runs; posting
//! and polling threads also take turns ([`Core::turn`]), so that a polling program never waits for
//! another thread. When no thread polls, the progress thread takes them ([`progress`]). At the end
//! of a turn, completion notifications and asynchronous events go to the [`Listener`]s of their
//! objects ([`Core::settle`]).
//!
//! Order of locks: the core, then the locks that listeners take. Objects of a verbs library, the C
//! ABI and the list of open devices do not belong here.

mod core;
mod descriptor;
mod gather;
mod memory;
mod polling;
mod progress;
mod signals;

use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use nic::clock;
use nic::device::DeviceWire;
use nic::driver::Driver;
use nic::local_peers::{LocalPeers, Shared};
use roce::direct::Holding;
use roce::endpoint::{AsyncEvent, Endpoint, EndpointConfig, Mtu};
use roce::verbs::{CqId, Path, Qpn};
use roce::wire::ROCE_PORT;
use roce::world;
use roce::{Duration, Time};
use rustix::io::Errno;

pub use self::core::Core;
use self::core::{Acks, EXITING};
use crate::software::{LocalPath, LocalPeer, SoftwareDevice};
pub use descriptor::Watched;
pub use memory::populate;
use progress::Progress;
pub use signals::SignalsBlocked;

/// Most turns that a posting thread takes: enough to send a whole window.
const POST_TURNS: u32 = 4;

/// How long a thread polls in vain before each further poll yields the processor.
const SPIN: Duration = Duration::from_micros(10);

/// Length of a yield that let others run which yield, too. A thread that computes keeps the
/// processor for longer; yielding to it at once would give it a whole slice for each message.
const OTHERS_RAN: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_micros(500);

/// How long the processor counts as crowded after that.
const CROWDED: Duration = Duration::from_millis(2);

/// Packets of one turn that mean "there is more to send".
const FULL_TURN: usize = 2 * world::BURST_PACKETS;

/// The number of bits below the slot in a queue pair number.
const SLOT_SHIFT: u32 = 16;

/// A notification of a queue pair, a completion queue or a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// An armed completion queue has a completion of the requested kind.
    Completed,
    /// An asynchronous event.
    Event(AsyncEvent),
}

/// An object of the layer above, in the tables of [`Core`].
pub trait Listener: Copy + Send + 'static {
    /// Wakes whoever waits for a notice, when it is dropped.
    type Signal: Send;

    /// Called on any thread, with the core locked: must only queue the notice.
    fn notify(self, notice: Notice) -> Option<Self::Signal>;
}

/// How a device is opened.
pub struct Opening {
    /// Its wire, which gives address, MTU and the slot in queue pair numbers.
    pub wire: DeviceWire,
    /// Sizes of the endpoint's tables. Prefix and MTU are those of the wire.
    pub endpoint: EndpointConfig,
    /// Why local peers are reached by packets, if the program wants it so.
    pub no_local: Option<String>,
    /// Reports that a wake-up was lost, once.
    pub on_rescue: fn(),
}

/// What the machine lacks for a device.
#[derive(Debug)]
pub struct Lacking {
    /// What was to be had.
    pub what: &'static str,
    /// Why there is none.
    pub errno: Errno,
}

/// An open device.
pub struct SharedDevice<L: Listener> {
    /// The largest path MTU of its wire.
    mtu: Mtu,
    core: Mutex<Core<L>>,
    progress: Progress,
    /// What verbs use of the path to local peers without the lock.
    discovery: Result<Arc<Shared>, String>,
    sockets: Vec<Watched>,
    /// Since when polls have been in vain, in nanoseconds; `u64::MAX` if the last one was not.
    idle_since: AtomicU64,
    /// Until when other threads are taken to wait for the processor of those that poll, in
    /// nanoseconds.
    crowded_until: AtomicU64,
}

/// The state that a thread has left in a panic. Nobody wakes whom the progress thread was going to.
fn after_panic<'a, L: Listener>(
    poisoned: PoisonError<MutexGuard<'a, Core<L>>>,
) -> MutexGuard<'a, Core<L>> {
    let mut core = poisoned.into_inner();
    core.drop_signals();
    core
}

impl<L: Listener> SharedDevice<L> {
    /// Opens a device and starts the thread that drives it while no thread of the program does.
    ///
    /// # Errors
    /// When the machine lacks a resource.
    pub fn open(opening: Opening) -> Result<Arc<SharedDevice<L>>, Lacking> {
        let Opening { wire, endpoint, no_local, on_rescue } = opening;
        let lacking = |what| move |errno| Lacking { what, errno };
        let sockets = wire.descriptors().into_iter().map(Watched::new).collect::<Result<_, _>>();
        let sockets = sockets.map_err(lacking("its sockets are closed"))?;
        let no_descriptor = lacking("no descriptor for its progress thread");
        let driver = driver_for(&wire).map_err(no_descriptor)?;
        let progress = Progress::new(&driver).map_err(no_descriptor)?;
        let mtu = Mtu::from_bytes(wire.payload_limit()).unwrap_or(Mtu::M256);
        let config = EndpointConfig { qpn_prefix: wire.slot(), mtu, ..endpoint };
        let local = no_local.map_or_else(|| open_local(&wire), Err);
        let addresses = wire.addresses().to_vec();
        let device = SoftwareDevice::new(Endpoint::new(config), addresses, local, Holding::Runs);
        let discovery = device.discovery();
        let device = Arc::new(SharedDevice {
            mtu,
            core: Mutex::new(Core::new(device, wire, on_rescue)),
            progress,
            discovery,
            sockets,
            idle_since: AtomicU64::new(u64::MAX),
            crowded_until: AtomicU64::new(0),
        });
        progress::spawn(&device, driver).map_err(lacking("no progress thread"))?;
        Ok(device)
    }

    /// Ends the thread and closes what the device has open. What it has open by now are these
    /// descriptors: the program may have closed them, and their numbers may have been reused; those
    /// are left alone.
    pub fn close(&self, forget: impl Fn(&[RawFd])) {
        self.progress.stop();
        forget(&self.socket_numbers());
        let mut core = self.lock();
        if let Ok(local) = core.close_local() {
            forget(&local.fds());
        }
        let wire = core.close_wire();
        drop(core);
        if !self.sockets.iter().all(Watched::is_there) {
            std::mem::forget(wire);
        }
    }

    /// Every descriptor of its wire and of its path to local peers.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let core = self.lock();
        let local = core.device().local().as_ref().map_or_else(|_| Vec::new(), LocalPeers::fds);
        self.socket_numbers().into_iter().chain(local).collect()
    }

    fn socket_numbers(&self) -> Vec<RawFd> {
        self.sockets.iter().map(|socket| socket.fd).collect()
    }

    /// The largest path MTU of its wire.
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// Locks the mutable state.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, Core<L>> {
        self.core.lock().unwrap_or_else(after_panic)
    }

    /// The mutable state, unless another thread has the lock.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Core<L>>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(poisoned)) => Some(after_panic(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Finds out whether a queue pair's peer is a process of this machine, before it is connected.
    pub fn discover(&self, path: &Path, dest: Qpn) -> LocalPeer {
        let discovery = self.discovery.as_ref().map_err(Clone::clone)?;
        discovery.discover(path.remote, (dest.get() >> SLOT_SHIFT) as u8)
    }

    /// Waits until no local peer uses what was withdrawn before. Must be called without the lock.
    /// Returns false if one was stopped in the middle of an access.
    #[must_use]
    pub fn quiesce(&self) -> bool {
        self.discovery.as_ref().ok().is_none_or(|shared| shared.quiesce())
    }

    /// The progress thread is awake: local peers need not wake it for packets.
    fn wake_up(&self) {
        if let Ok(shared) = &self.discovery {
            shared.wake_up();
        }
    }

    // ---- verbs ---------------------------------------------------------------------------------

    /// A verb that may complete work requests or give the endpoint something to send. What waits is
    /// sent before: the verb may end its queue pair.
    #[inline]
    pub fn verb<T>(&self, verb: impl FnOnce(&mut Core<L>) -> T) -> T {
        let mut core = self.lock();
        if core.gather.waits() {
            self.flush(&mut core);
        }
        let done = verb(&mut core);
        self.flush(&mut core);
        done
    }

    /// Posts sends, and sends what has to go as packets, unless it may wait for more ([`gather`]).
    #[inline]
    pub fn post<T>(&self, post: impl FnOnce(&mut Core<L>) -> T) -> T {
        let mut core = self.lock();
        core.begin_post(!self.progress.is_napping());
        let done = post(&mut core);
        core.wake_for_messages();
        if core.must_flush() {
            self.flush(&mut core);
        } else {
            core.settle();
            if core.gather.waits() {
                // Another thread that yields counts as present for long; the one that posts may not
                // poll.
                self.progress.note_program_turn(core.now, true);
            }
            if core.endpoint().awaits_message_acks() && !self.progress.is_napping() {
                self.progress.note_deadline(core.deadline());
            }
            self.pass_on(&mut core);
        }
        done
    }

    /// Sends posted requests, as far as windows allow. It does not receive: a program that posts
    /// will poll, and one that does not is not known to be there, so the progress thread receives.
    /// Who posts a burst is there, and takes turns.
    pub fn flush(&self, core: &mut Core<L>) {
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

    /// Wakes the progress thread for what a thread of the program leaves to it: requests that turns
    /// carry out, unless the program polls, and a ring that this thread has taken from the sockets.
    /// Local peers ring once for each sleep.
    fn pass_on(&self, core: &mut Core<L>) {
        let held = std::mem::take(&mut core.held) && !self.progress.is_napping();
        let rung = std::mem::take(&mut core.rung) && core.is_asleep();
        if held || rung {
            self.progress.wake();
        }
    }

    /// A turn taken by a thread of the program.
    pub fn turn(&self, core: &mut Core<L>) -> world::Progress {
        self.turn_for(core, None)
    }

    /// A turn of a thread that is going to take completions from a queue.
    pub fn turn_for(&self, core: &mut Core<L>, cq: Option<CqId>) -> world::Progress {
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

    /// A program thread has polled, and if `idle_at` is a time, it found nothing to do then. After
    /// a while it yields: its peer may be waiting for the same processor. Where that lately let
    /// others run, it yields at once.
    #[inline]
    pub fn polled(&self, idle_at: Option<Time>) {
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
    pub fn expect_sleep(&self) {
        self.progress.expect_sleep();
    }

    /// The process exits: sends what waits for the program's next call, if the lock can be had. A
    /// peer waits for the acknowledgement of the last message.
    pub fn send_waiting(&self) {
        // Its progress thread may have the lock. A program's thread may keep it for ever.
        let mut tries = (0..EXIT_TRIES).map(|_| {
            self.try_lock().or_else(|| {
                std::thread::sleep(EXIT_PAUSE);
                None
            })
        });
        if let Some(mut core) = tries.find_map(|core| core)
            && core.gather.waits()
        {
            self.flush(&mut core);
        }
    }
}

/// How often an exiting process tries to get a device's lock, and the pause between.
const EXIT_TRIES: u32 = 20;
const EXIT_PAUSE: std::time::Duration = std::time::Duration::from_micros(50);

/// The process exits: acknowledgements no longer wait, on any device.
pub fn note_exit() {
    EXITING.store(true, Ordering::Relaxed);
}

/// The path to the other processes of this wire's port.
fn open_local(wire: &DeviceWire) -> LocalPath {
    if wire.capture().is_some() {
        return Err("packets are recorded".to_owned());
    }
    let _blocked = SignalsBlocked::all();
    let opened = LocalPeers::open(ROCE_PORT, wire.slot(), wire.addresses());
    opened.map_err(|error| format!("no control segment for local peers: {error}"))
}

/// A driver that wakes for packets of this wire.
fn driver_for(wire: &DeviceWire) -> Result<Driver, Errno> {
    let made = Driver::new().and_then(|driver| {
        wire.fds().into_iter().try_for_each(|fd| driver.watched().add(fd, 0))?;
        Ok(driver)
    });
    made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))
}
