//! Local peers: processes of this machine, user and network namespace whose registered memory this
//! process reads and writes without packets.
//!
//! Each process publishes its queue pairs and regions on a segment ([`segment`]) and swaps segments
//! with the processes that its queue pairs connect to ([`exchange`]). `roce::direct` decides, from
//! the segments, whether a request can be carried out at once; this module carries it out, by the
//! kernel ([`copy`]) or, in the pool of the other process, by itself ([`mapped`]). SENDs are handed
//! over whole ([`messages`]). Everything else is packets: between local peers through the same
//! FIFOs in shared memory ([`packets`], [`fifo`]), to a peer that is not a local peer through
//! sockets; [`Shared::discover`] returns why.
//!
//! No access outlives the permission for it. An initiator announces an access before it reads the
//! segments of the target. A target that withdraws an entry then waits until no announcement is
//! left that may have seen the entry ([`Shared::quiesce`]); [`words`] says why one of the two sees
//! the other.
//!
//! A veth, a tenant, loss or shaping is never bypassed: both addresses must belong to this
//! namespace, which routes them over loopback, and loopback must have no queueing discipline.

mod copy;
mod exchange;
mod fifo;
mod guard;
#[cfg(test)]
mod hostile;
mod mapped;
mod messages;
mod packets;
mod segment;
#[cfg(test)]
mod tests;
mod unacked;
mod words;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use roce::direct::{
    Direct, DirectKind, DirectRefusal, DirectRequest, Message, QpDescriptor, RegionDescriptor,
    admit,
};
use roce::verbs::Qpn;
use roce::wire::ROCE_PORT;
use roce::world::Wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::interfaces;
use crate::movable::{FILE_BYTES, Movable};
use crate::pool::Pool;
use exchange::{Hello, Other};
use fifo::Writer;
use guard::Guard;
use mapped::{Mapping, Piece, Windows};
use packets::{Incoming, Outgoing, Packets, Place};
use segment::{ControlSegment, OwnBoard, PoolCard};

pub use packets::{Doorbell, FifoCounters, LocalWire};

/// The slot of a process that has a port to itself.
pub const OWN_PORT: u8 = 0;

/// The slot is what a queue pair number has above these bits.
const SLOT_SHIFT: u32 = 16;

/// Most processes that may read this process's segment at a time.
const MAX_INITIATORS: usize = 256;

/// Processes that may have connected and not said anything yet; one more replaces the oldest.
const MAX_CALLERS: usize = 64;

/// LocalPeers that did not answer, kept so that a thousand queue pairs do not each wait for one of
/// them.
const MAX_ABSENT: usize = 64;
const ABSENT_FOR: Duration = Duration::from_secs(5);

/// How long [`Shared::quiesce`] waits for one initiator: a copy takes under a millisecond, unless
/// its process was stopped in the middle.
const QUIESCE: Duration = Duration::from_secs(5);

/// A descriptor that is closed only if the program has not closed it before, and reused its number.
struct Kept {
    /// -1 once it is closed.
    fd: AtomicI32,
    file: (u64, u64),
}

impl Kept {
    fn new(fd: OwnedFd) -> io::Result<Kept> {
        let file = file_of(fd.as_fd())?;
        Ok(Kept { fd: AtomicI32::new(fd.into_raw_fd()), file })
    }

    /// The descriptor, unless it is closed.
    fn get(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.fd.load(Ordering::Relaxed);
        // SAFETY: open until this closes it, on the thread that ends the engine; if the program
        // closes it, calls fail or are not made.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })?;
        file_of(fd).is_ok_and(|file| file == self.file).then_some(fd)
    }

    fn close(&self) {
        let is_ours = self.get().is_some();
        let fd = self.fd.swap(-1, Ordering::Relaxed);
        if is_ours && fd >= 0 {
            // SAFETY: the number still refers to the file that this owns.
            unsafe { libc::close(fd) };
        }
    }
}

fn access_for(kind: DirectKind) -> ProtFlags {
    match kind {
        DirectKind::Read => ProtFlags::READ,
        _ => ProtFlags::READ | ProtFlags::WRITE,
    }
}

fn file_of(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let found = fstat(fd)?;
    Ok((found.st_dev, found.st_ino))
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.close();
    }
}

/// A process that has this process's segment.
struct Initiator {
    segment: Arc<ControlSegment>,
    file: (u64, u64),
    pid: i32,
}

impl Initiator {
    /// Whether it may access this process's memory.
    fn may_access(&self) -> bool {
        self.segment.is_owned() || !has_ended(self.pid)
    }
}

/// A process whose segment this process has.
pub struct Target {
    segment: ControlSegment,
    pid: i32,
    at: SocketAddr,
    slot: u8,
    /// Takes packets for it, if it reads them there.
    fifo: Option<Mutex<Outgoing>>,
    /// Its pool, mapped for reading and for writing; `None` where that is not possible.
    readable: OnceLock<Option<Mapping>>,
    writable: OnceLock<Option<Mapping>>,
    /// What of its memory lies elsewhere in its file.
    windows: Mutex<Windows>,
    /// Why it is reached by packets from now on.
    why_not: OnceLock<&'static str>,
}

impl Target {
    /// Why requests to it go as packets, if they do.
    pub fn why_not(&self) -> Option<&'static str> {
        match self.why_not.get() {
            None if !self.segment.is_owned() => Some("the peer's process has ended"),
            known => known.copied(),
        }
    }

    /// Its pool, for this kind of request.
    fn pool(&self, kind: DirectKind) -> Option<&Mapping> {
        let mapping = if kind == DirectKind::Read { &self.readable } else { &self.writable };
        let open = || self.map(Piece::whole(&self.segment.pool()?)?, access_for(kind));
        mapping.get_or_init(open).as_ref()
    }

    /// Carries out a request on the mapped memory of a region. Returns false where there is none.
    fn on_mapped(
        &self,
        kind: DirectKind,
        region: &RegionDescriptor,
        carry_out: impl FnOnce(&Mapping) -> bool,
    ) -> bool {
        let Some(offset) = region.in_file else {
            return self.pool(kind).is_some_and(carry_out);
        };
        let Some(piece) = Piece::of_region(region, offset) else { return false };
        let access = access_for(kind);
        let mut windows = locked(&self.windows);
        windows.get(piece, access, || self.map(piece, access)).is_some_and(carry_out)
    }

    fn map(&self, piece: Piece, access: ProtFlags) -> Option<Mapping> {
        let mapping = Mapping::open(self.pid, &self.segment.pool()?, piece, access).ok();
        // The process with this number may be another one meanwhile.
        mapping.filter(|_| self.segment.is_owned())
    }

    /// Whether it is to be woken for what is in its FIFO.
    fn must_ring(&self) -> bool {
        let (Some(fifo), Some(sleep)) = (&self.fifo, self.segment.sleep()) else {
            return false;
        };
        locked(fifo).rung.must_ring(sleep)
    }

    /// Whether messages have no acknowledgement.
    fn is_awaited(&self) -> bool {
        self.fifo.as_ref().is_some_and(|fifo| !locked(fifo).unacked.is_empty())
    }

    /// The connection of this queue pair has ended.
    fn withdraw_messages(&self, qpn: Qpn) {
        if let Some(fifo) = &self.fifo {
            locked(fifo).withdraw_messages(qpn);
        }
    }

    /// Whether it lives, or the end of it has not been reported to all who wait for an
    /// acknowledgement.
    fn is_of_use(&self) -> bool {
        self.segment.is_owned() || self.is_awaited()
    }

    /// Whether packets to it go through shared memory now.
    pub fn has_fifo(&self) -> bool {
        self.fifo.is_some() && self.segment.is_owned()
    }
}

/// A process that was not found to be a local peer.
struct Absent {
    at: SocketAddr,
    slot: u8,
    since: Instant,
    why: String,
}

/// What several threads use: the segment, and who has it.
pub struct Shared {
    own: OwnBoard,
    file: Kept,
    listeners: Vec<Kept>,
    addresses: Vec<IpAddr>,
    port: u16,
    slot: u8,
    initiators: Mutex<Vec<Arc<Initiator>>>,
    targets: Mutex<Vec<Weak<Target>>>,
    absent: Mutex<Vec<Absent>>,
    /// Processes that an exchange is under way with, and what announces the end of one.
    exchanging: Mutex<Vec<(SocketAddr, u8)>>,
    exchanged: Condvar,
    /// FIFOs for this process that its engine does not read yet.
    arrived: Mutex<Vec<Incoming>>,
    /// Whether the engine should look for those, and for FIFOs of processes that have ended.
    should_look: AtomicBool,
    /// How many FIFOs it reads.
    places: Arc<AtomicUsize>,
    stops: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An exchange with one process, which others wait for.
struct Exchange<'a> {
    shared: &'a Shared,
    with: (SocketAddr, u8),
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        locked(&self.shared.exchanging).retain(|with| *with != self.with);
        self.shared.exchanged.notify_all();
    }
}

impl Shared {
    /// Makes the acquaintance of the process with a slot of an address, or returns why it is
    /// reached by packets.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn discover(&self, remote: SocketAddr, slot: u8) -> Result<Arc<Target>, String> {
        let at = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        if (slot, at.port()) == (self.slot, self.port) && self.addresses.contains(&at.ip()) {
            return Err("both queue pairs are in this process".to_owned());
        }
        check_loopback(at.ip(), &self.addresses)?;
        if let Some(target) = self.known(at, slot) {
            return Ok(target);
        }
        let _exchange = self.begin_exchange(at, slot);
        if let Some(target) = self.known(at, slot) {
            return Ok(target);
        }
        if let Some(why) = self.why_absent(at, slot) {
            return Err(why);
        }
        match self.swap(at, slot) {
            Ok(target) => {
                let target = Arc::new(target);
                locked(&self.targets).push(Arc::downgrade(&target));
                Ok(target)
            }
            Err(error) => {
                let why = format!("no exchange with the peer's process: {error}");
                let mut absent = locked(&self.absent);
                if absent.len() < MAX_ABSENT && error.kind() != io::ErrorKind::ConnectionRefused {
                    let (since, why) = (Instant::now(), why.clone());
                    absent.push(Absent { at, slot, since, why });
                }
                Err(why)
            }
        }
    }

    /// The process with a slot of an address, if this one has its segment.
    fn known(&self, at: SocketAddr, slot: u8) -> Option<Arc<Target>> {
        let mut targets = locked(&self.targets);
        targets.retain(|target| target.strong_count() > 0);
        let mut all = targets.iter().filter_map(Weak::upgrade);
        all.find(|one| one.at == at && one.slot == slot && one.segment.is_owned())
    }

    /// Why the process with a slot of an address was not found to be a local peer a short time ago,
    /// if so.
    fn why_absent(&self, at: SocketAddr, slot: u8) -> Option<String> {
        let mut absent = locked(&self.absent);
        absent.retain(|one| one.since.elapsed() < ABSENT_FOR);
        absent.iter().find(|one| one.at == at && one.slot == slot).map(|one| one.why.clone())
    }

    /// Waits until no other thread exchanges segments with this process. Two exchanges at a time
    /// would make two FIFOs to one reader. Exchanges with other processes do not wait: a stopped
    /// one takes the whole of its patience.
    fn begin_exchange(&self, at: SocketAddr, slot: u8) -> Exchange<'_> {
        let mut exchanging = locked(&self.exchanging);
        while exchanging.contains(&(at, slot)) {
            exchanging = self.exchanged.wait(exchanging).unwrap_or_else(PoisonError::into_inner);
        }
        exchanging.push((at, slot));
        Exchange { shared: self, with: (at, slot) }
    }

    fn swap(&self, at: SocketAddr, slot: u8) -> io::Result<Target> {
        let other = Other::at(at, slot)?;
        let (writer, file) = Writer::create()?;
        let own = self.file.get().ok_or(io::ErrorKind::NotConnected)?;
        other.ask(own, file.as_fd())?;
        let Hello { segment, accepted, .. } = other.receive()?;
        let index = segment.addresses().iter().position(|address| *address == at.ip());
        let dest = index.filter(|_| accepted).and_then(|index| u8::try_from(index).ok());
        let fifo = dest.map(|dest| Mutex::new(Outgoing::new(writer, dest)));
        let (readable, writable) = (OnceLock::new(), OnceLock::new());
        let why_not = OnceLock::new();
        let windows = Mutex::default();
        Ok(Target { segment, pid: other.pid, at, slot, fifo, readable, writable, windows, why_not })
    }

    /// Waits until no other process accesses this one on the strength of an entry that was on the
    /// segment before this call. Returns false if one of them does not finish: it was stopped in
    /// the middle of an access.
    #[must_use]
    pub fn quiesce(&self) -> bool {
        let (mut left, begun) = (self.unfinished(), Instant::now());
        while !left.is_over() {
            match begun.elapsed() {
                waited if waited >= QUIESCE => return false,
                waited if waited < Duration::from_micros(100) => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        true
    }

    /// The accesses of other processes that may have begun on the strength of an entry that was on
    /// the segment before this call.
    #[must_use]
    pub fn unfinished(&self) -> Unfinished {
        let busy = |initiator: &Arc<Initiator>| {
            let since = initiator.segment.busy_with(self.slot)?;
            Some((Arc::clone(initiator), self.slot, since))
        };
        Unfinished(locked(&self.initiators).iter().filter_map(busy).collect())
    }

    /// Answers other processes until it is stopped. Nobody who connects and says nothing keeps it
    /// from the others.
    fn serve(&self) {
        let yama = std::fs::read_to_string(YAMA);
        let restricted = yama.is_ok_and(|scope| scope.trim() == "1");
        let mut callers = VecDeque::new();
        let mut look_at = Instant::now();
        while !self.stops.load(Ordering::Acquire) {
            let listeners: Option<Vec<_>> = self.listeners.iter().map(Kept::get).collect();
            let first = callers.front().map(|caller: &Caller| caller.until);
            let until = first.map_or(look_at, |first| first.min(look_at));
            // The program may have closed them, and opened something else under their numbers. Then
            // nobody else is answered, but those that know this process go on, and the end of this
            // thread would be its end to them.
            let ready = listeners.and_then(|listeners| await_any(&listeners, &callers, until));
            if look_at <= Instant::now() {
                look_at = Instant::now() + LOOK;
                self.forget_ended();
            }
            let Some(ready) = ready else {
                std::thread::sleep(REST);
                continue;
            };
            let (new, speaking) = ready.split_at(self.listeners.len());
            let mut speaking = speaking.iter();
            callers.retain(|caller: &Caller| {
                let speaks = speaking.next().is_some_and(|ready| *ready);
                if speaks {
                    // An exchange that fails is the other side's to report: it goes on with
                    // packets.
                    drop(self.answer(&caller.other, restricted));
                }
                !speaks && caller.until > Instant::now()
            });
            for (listener, _) in self.listeners.iter().zip(new).filter(|(_, ready)| **ready) {
                self.accept(listener, &mut callers);
            }
        }
    }

    /// Leaves the memory of processes that have ended; the engine does so with what is in its
    /// hands. Without this a process that nobody calls any more would keep it.
    fn forget_ended(&self) {
        locked(&self.initiators).retain(|one| one.may_access());
        self.should_look.store(true, Ordering::Release);
    }

    /// Takes one caller in.
    fn accept(&self, listener: &Kept, callers: &mut VecDeque<Caller>) {
        let Some(listener) = listener.get() else { return };
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(connection) => {
                if callers.len() == MAX_CALLERS {
                    callers.pop_front();
                }
                let until = Instant::now() + exchange::PATIENCE;
                callers.extend(Other::arrived(connection).map(|other| Caller { other, until }));
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            // Also when this is to end: nobody can connect any more.
            Err(_) if self.stops.load(Ordering::Acquire) => {}
            Err(_) => std::thread::sleep(REST),
        }
    }

    fn answer(&self, other: &Other, restricted: bool) -> io::Result<()> {
        let Hello { segment, file, fifo, .. } = other.receive()?;
        let segment = Arc::new(segment);
        let mut initiators = locked(&self.initiators);
        initiators.retain(|initiator| initiator.may_access());
        // A process that forgets this one between two connections comes again with the same
        // segment.
        let is_known = |known: &Arc<Initiator>| known.pid == other.pid && known.file == file;
        if !initiators.iter().any(is_known) {
            if initiators.len() >= MAX_INITIATORS {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            let segment = Arc::clone(&segment);
            initiators.push(Arc::new(Initiator { segment, file, pid: other.pid }));
        }
        drop(initiators);
        let incoming = fifo.and_then(|reader| {
            let place = Place::take(&self.places)?;
            Some(Incoming::new(reader, segment, place))
        });
        let withdrawal = incoming.as_ref().map(Incoming::withdrawal);
        locked(&self.arrived).extend(incoming);
        // Also where there is no place left: the engine then frees those of processes that have
        // ended.
        self.should_look.store(true, Ordering::Release);
        if restricted {
            // SAFETY: no memory is involved. Yama lets one process at a time access this one's
            // memory; another gets an error, and uses packets.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, other.pid) };
        }
        let own = self.file.get().ok_or(io::Error::from(io::ErrorKind::NotConnected));
        let answered = own.and_then(|own| other.answer(own, withdrawal.is_some()));
        if answered.is_err()
            && let Some(withdrawal) = withdrawal
        {
            withdrawal.store(true, Ordering::Release);
            self.should_look.store(true, Ordering::Release);
        }
        answered
    }

    /// The thread that slept is awake: its local peers need not wake it any more.
    pub fn wake_up(&self) {
        self.own.wake_up();
    }
}

/// Somebody who has connected and said nothing yet.
struct Caller {
    other: Other,
    /// When it is not listened to any more.
    until: Instant,
}

/// Waits until somebody connects or speaks, or this time has passed; which of them are ready,
/// listeners first. `None` if that is not possible now: the system lacks memory, or the program
/// allows itself fewer descriptors than there are callers.
fn await_any(
    listeners: &[BorrowedFd<'_>],
    callers: &VecDeque<Caller>,
    until: Instant,
) -> Option<Vec<bool>> {
    let callers_fds = callers.iter().map(|caller| caller.other.fd());
    let all = listeners.iter().copied().chain(callers_fds);
    let mut polled: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    // A little longer, so that it has passed then.
    let left = (until + Duration::from_millis(1)).saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).ok();
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) => Some(polled.iter().map(|one| !one.revents().is_empty()).collect()),
        Err(Errno::INTR) => Some(vec![false; polled.len()]),
        Err(_) => None,
    }
}

/// Interval between two looks for processes that have ended.
const LOOK: Duration = Duration::from_secs(1);

/// How long the thread that answers others rests when that is not possible. The end of the thread
/// means the end of the process to all local peers, so it does not end before the process does or
/// the device is closed.
const REST: Duration = Duration::from_millis(100);

/// Accesses of other processes that were under way: who has them, and since which announcement.
#[derive(Default)]
pub struct Unfinished(Vec<(Arc<Initiator>, u8, u64)>);

impl Unfinished {
    /// Adds others, and forgets those that are over.
    pub fn and(&mut self, others: Unfinished) {
        self.0.extend(others.0);
        self.is_over();
    }

    /// Whether all of them are over. One whose process was stopped in the middle is not, until it
    /// goes on or is killed.
    pub fn is_over(&mut self) -> bool {
        self.0.retain(|(initiator, slot, since)| {
            let is_busy = initiator.segment.busy_with(*slot) == Some(*since);
            is_busy && initiator.may_access()
        });
        self.0.is_empty()
    }
}

/// Whether all threads of a process have ended.
fn has_ended(pid: i32) -> bool {
    let Some(pid) = Pid::from_raw(pid) else {
        return true;
    };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
        return true;
    };
    let mut polled = [PollFd::new(&process, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// Whether two processes of this machine could be local peers, by trying out what it takes.
///
/// # Errors
/// Why not, in words.
pub fn probe() -> Result<(), String> {
    check_loopback(IpAddr::from([127, 0, 0, 1]), &[])?;
    let missing = |error: io::Error| format!("no sealed shared memory: {error}");
    let (own, segment) = OwnBoard::create((ROCE_PORT, OWN_PORT), &[]).map_err(missing)?;
    ControlSegment::of_other(&segment).map_err(missing)?;
    Writer::create().map_err(missing)?;
    let holder = std::thread::spawn(move || {
        Guard::hold(own.owner()).map(|guard| guard.release(own.owner()))
    });
    let held = holder.join().map_err(|_| String::from("no thread"))?;
    held.map_err(|error| format!("no robust futexes: {error}"))?;
    match std::fs::read_to_string(YAMA).as_deref().map(str::trim) {
        Ok(scope @ ("2" | "3")) => Err(format!("{YAMA} is {scope}: packets in shared memory only")),
        _ => Ok(()),
    }
}

/// Whether the kernel restricts access to the memory of other processes, and how.
const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// Boards are memory that others write: they are not shown.
macro_rules! opaque {
    ($($name:ident),*) => {$(
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )*};
}

opaque!(Target, Shared, Unfinished, LocalPeers);

/// Checks that packets from `own` to `ip` would take nothing but the bare loopback interface.
fn check_loopback(ip: IpAddr, own: &[IpAddr]) -> Result<(), String> {
    let all =
        interfaces::interfaces().map_err(|error| format!("no list of interfaces: {error}"))?;
    // A link-local address of another interface is not reached by this one.
    let is_link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let reaches = |one: &&interfaces::Interface| {
        !is_link_local || one.addresses.iter().any(|address| own.contains(address))
    };
    let is_own =
        ip.is_loopback() || all.iter().filter(reaches).any(|one| one.addresses.contains(&ip));
    if !is_own {
        return Err("the peer's address is not one of this network namespace".to_owned());
    }
    let loopback = all.iter().find(|one| one.loopback).ok_or("there is no loopback interface")?;
    match interfaces::qdisc_of(loopback.index) {
        Ok(qdisc) if qdisc == "noqueue" => Ok(()),
        Ok(qdisc) => Err(format!("{} has the queueing discipline {qdisc}", loopback.name)),
        Err(error) => Err(format!("the queueing discipline of {}: {error}", loopback.name)),
    }
}

/// The local peers of one device.
pub struct LocalPeers {
    shared: Arc<Shared>,
    /// By queue pair number.
    routes: BTreeMap<u32, Arc<Target>>,
    announced: AtomicU64,
    packets: Packets,
    /// Queue pairs whose local peers are to be woken for messages, if they sleep.
    to_wake: Vec<Qpn>,
    /// Whether messages of this process may be without an acknowledgement.
    may_be_awaited: bool,
    thread: Option<JoinHandle<()>>,
}

impl LocalPeers {
    /// Publishes an empty segment for the process with this port and slot, and starts the thread
    /// that answers others. The engine moves packets through [`wire`](LocalPeers::wire) from then
    /// on. Call it with signals blocked, so that the thread blocks them too.
    ///
    /// # Errors
    /// When the kernel lacks something for it: memfds with seals, robust futexes, Unix sockets.
    pub fn open(port: u16, slot: u8, addresses: &[IpAddr]) -> io::Result<LocalPeers> {
        let (own, file) = OwnBoard::create((port, slot), addresses)?;
        let listen =
            |ip: &IpAddr| exchange::listener(SocketAddr::new(*ip, port), slot).and_then(Kept::new);
        let listeners = addresses.iter().map(listen).collect::<io::Result<Vec<Kept>>>()?;
        let shared = Arc::new(Shared {
            own,
            file: Kept::new(file)?,
            listeners,
            addresses: addresses.to_vec(),
            port,
            slot,
            initiators: Mutex::default(),
            targets: Mutex::default(),
            absent: Mutex::default(),
            exchanging: Mutex::default(),
            exchanged: Condvar::new(),
            arrived: Mutex::default(),
            should_look: AtomicBool::new(false),
            places: Arc::default(),
            stops: AtomicBool::new(false),
        });
        let serving = Arc::clone(&shared);
        let (sender, held) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("dquant-boards".to_owned());
        let thread = thread.spawn(move || {
            let guard = Guard::hold(serving.own.owner());
            let guard = match guard {
                Ok(guard) => guard,
                Err(error) => return drop(sender.send(Err(error))),
            };
            let _ = sender.send(Ok(()));
            serving.serve();
            guard.release(serving.own.owner());
        })?;
        held.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))??;
        let (routes, announced) = (BTreeMap::new(), AtomicU64::new(0));
        let packets = Packets::default();
        let (to_wake, may_be_awaited, thread) = (Vec::new(), false, Some(thread));
        Ok(LocalPeers { shared, routes, announced, packets, to_wake, may_be_awaited, thread })
    }

    /// Lets those who may access this process's memory map its pool, which lives as long as this
    /// does.
    pub fn offer_pool(&self, pool: &Pool) {
        if let Ok(file) = file_of(pool.fd()) {
            let (fd, base, len) = (pool.fd().as_raw_fd(), Some(pool.base()), pool.len());
            self.shared.own.offer_pool(&PoolCard { fd, file, base, len });
        }
    }

    /// The same for memory of a program that moves into a file, which lives as long as this does.
    pub fn offer_movable(&self, memory: &Movable) {
        if let Ok(file) = file_of(memory.fd()) {
            let fd = memory.fd().as_raw_fd();
            self.shared.own.offer_pool(&PoolCard { fd, file, base: None, len: FILE_BYTES });
        }
    }

    /// `wire` with the local peers in front of it, for one turn.
    pub fn wire<'a, W: Wire + Doorbell>(&'a mut self, wire: &'a mut W) -> LocalWire<'a, W> {
        LocalWire::new(self, wire)
    }

    /// The counters of packets to and from local peers.
    pub fn counters(&self) -> &FifoCounters {
        &self.packets.counters
    }

    /// Takes in FIFOs that have arrived since the last look, and leaves those of processes that
    /// have ended.
    #[inline]
    fn adopt(&mut self) {
        if self.shared.should_look.load(Ordering::Relaxed) {
            self.adopt_arrived();
        }
    }

    #[cold]
    fn adopt_arrived(&mut self) {
        if self.shared.should_look.swap(false, Ordering::Acquire) {
            let arrived = std::mem::take(&mut *locked(&self.shared.arrived));
            self.packets.adopt(arrived);
            self.packets.forget_ended();
        }
    }

    /// The calling thread is going to sleep on the sockets, and nobody else looks for packets: from
    /// now on local peers wake it. Returns false if there are packets, messages or acknowledgements
    /// already. [`Shared::wake_up`] undoes it in both cases.
    #[must_use]
    pub fn fall_asleep(&mut self) -> bool {
        self.shared.own.fall_asleep();
        // What ends the sleep is on a socket.
        self.packets.look_at_sockets();
        !self.has_work()
    }

    /// Whether local peers wake this process for what they leave.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.shared.own.is_asleep()
    }

    /// Whether there are packets, messages or acknowledgements of local peers.
    #[must_use]
    pub fn has_work(&mut self) -> bool {
        self.adopt();
        self.packets.holds_packets() || self.has_acks()
    }

    /// Whether there are packets or acknowledgements of which local peers should have told, if this
    /// process has slept since. Who is stopped or killed between the two has lost nothing.
    #[must_use]
    pub fn has_unannounced(&mut self) -> bool {
        self.adopt();
        let has_packets = |one: &Incoming| one.holds_packets() && one.segment.is_running();
        let has_acks = |target: &Arc<Target>| {
            let has = |fifo: &Mutex<Outgoing>| locked(fifo).has_acks();
            target.fifo.as_ref().is_some_and(has) && target.segment.is_running()
        };
        self.packets.incoming.iter().any(has_packets) || self.packets.outgoing.iter().any(has_acks)
    }

    /// Whether local peers send packets through FIFOs.
    pub fn reads_fifos(&self) -> bool {
        self.packets.reads_fifos()
    }

    /// Whether packets of local peers have arrived.
    pub fn holds_packets(&self) -> bool {
        self.packets.holds_packets()
    }

    /// The part that is used without the engine's lock.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Its descriptors, which forked children close.
    pub fn fds(&self) -> Vec<RawFd> {
        let listeners = self.shared.listeners.iter();
        let kept = listeners.chain([&self.shared.file]);
        kept.map(|kept| kept.fd.load(Ordering::Relaxed)).filter(|&fd| fd >= 0).collect()
    }

    /// From now on the requests of a queue pair go to this process where possible, or all as
    /// packets.
    pub fn route(&mut self, qpn: Qpn, target: Option<Arc<Target>>) {
        // Its messages belong to a connection that is over.
        if let Some(before) = self.routes.remove(&qpn.get()) {
            before.withdraw_messages(qpn);
        }
        match target {
            Some(target) => {
                self.packets.add(&target);
                self.routes.insert(qpn.get(), target);
            }
            None => self.packets.forget_ended(),
        }
    }

    /// Where the requests of a queue pair go.
    pub fn route_of(&self, qpn: Qpn) -> Option<&Target> {
        self.routes.get(&qpn.get()).map(|target| &**target)
    }

    /// Publishes the state of a queue pair.
    pub fn publish_qp(&self, descriptor: &QpDescriptor) {
        // What does not fit is reached by packets.
        self.shared.own.put_qp(descriptor);
    }

    /// Withdraws a queue pair; [`Shared::quiesce`] then waits for requests that are under way.
    pub fn withdraw_qp(&self, qpn: Qpn) {
        self.shared.own.remove_qp(qpn);
    }

    /// Publishes a region.
    pub fn publish_region(&self, descriptor: &RegionDescriptor) {
        self.shared.own.put_region(descriptor);
    }

    /// Withdraws a region; [`Shared::quiesce`] then waits for requests that are under way.
    pub fn withdraw_region(&self, rkey: u32) {
        self.shared.own.remove_region(rkey);
    }

    fn perform(&self, target: &Target, request: &DirectRequest<'_>) -> Result<(), DirectRefusal> {
        let own = self.shared.addresses.get(usize::from(request.path.source));
        let own = *own.ok_or(DirectRefusal::Peer)?;
        let segment = &target.segment;
        if !segment.is_owned() {
            return Err(DirectRefusal::System);
        }
        let qp = segment.qp(request.dest_qp).ok_or(DirectRefusal::Peer)?;
        let region = segment.region(request.rkey).ok_or(DirectRefusal::Region)?;
        let first = admit(request, own, &qp, &region)?;
        let DirectRequest { kind, part, local, .. } = *request;
        let is_done = target.on_mapped(kind, &region, |memory| match kind {
            DirectKind::Write => memory.write(first, part.len, local),
            DirectKind::Read => memory.read(first, part.len, local),
            DirectKind::Atomic(op) => memory.atomic(first, op, local),
        });
        if is_done {
            return Ok(());
        }
        if matches!(kind, DirectKind::Atomic(_)) {
            return Err(DirectRefusal::System);
        }
        copy::copy(target.pid, first, request).map_err(|error| {
            let why = match error.raw_os_error() {
                Some(libc::ESRCH) => Some("the peer's process has ended"),
                Some(libc::EPERM) => Some("the kernel does not permit access to the peer's memory"),
                Some(libc::ENOSYS) => Some("the kernel has no process_vm_writev"),
                _ => None,
            };
            if let Some(why) = why {
                let _ = target.why_not.set(why);
            }
            DirectRefusal::System
        })
    }
}

impl Direct for LocalPeers {
    fn reaches(&self, qpn: Qpn, kind: DirectKind) -> bool {
        let allows = |target: &Arc<Target>| match kind {
            // They need a mapping, which can be tried once.
            DirectKind::Atomic(_) => {
                let mapped = target.writable.get().map(Option::is_some);
                mapped.unwrap_or_else(|| target.segment.pool().is_some())
            }
            DirectKind::Write | DirectKind::Read => true,
        };
        let target = self.routes.get(&qpn.get());
        target.is_some_and(|target| target.why_not.get().is_none() && allows(target))
    }

    fn carry_out(&mut self, request: &DirectRequest<'_>) -> Result<(), DirectRefusal> {
        let target = self.routes.get(&request.qpn.get()).ok_or(DirectRefusal::NotDirect)?;
        if target.why_not.get().is_some() {
            return Err(DirectRefusal::NotDirect);
        }
        let count = self.announced.fetch_add(1, Ordering::Relaxed) + 1;
        self.shared.own.announce(target.slot, count);
        let done = self.perform(target, request);
        self.shared.own.retire();
        done
    }

    fn takes_messages(&self, qpn: Qpn) -> bool {
        self.routes.get(&qpn.get()).is_some_and(|target| target.fifo.is_some())
    }

    fn hand_over(&mut self, message: &Message<'_>) -> Result<(), DirectRefusal> {
        let source = message.header.source;
        let target = self.routes.get(&source.get()).ok_or(DirectRefusal::NotDirect)?;
        messages::hand_over(target, message)?;
        self.may_be_awaited = true;
        if self.to_wake.last() != Some(&source) {
            self.to_wake.push(source);
        }
        Ok(())
    }
}

impl Drop for LocalPeers {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        self.shared.own.owner().store(0, Ordering::Release);
        let listeners: Vec<_> = self.shared.listeners.iter().filter_map(Kept::get).collect();
        let woken = listeners.iter().all(|listener| shutdown(listener, Shutdown::Both).is_ok());
        // Where the program has closed the descriptors, the thread finds out by itself.
        if let Some(thread) = self.thread.take()
            && woken
            && listeners.len() == self.shared.listeners.len()
            && !listeners.is_empty()
        {
            let _ = thread.join();
        }
        self.shared.listeners.iter().chain([&self.shared.file]).for_each(Kept::close);
    }
}
