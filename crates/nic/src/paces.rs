//! What each job of this machine may send and when, as its agent says: a pace and a gate for each DSCP, kept by all
//! processes together.
//!
//! The queues of a port divide what its machine sends, but not what takes another way (AF_XDP), and what waits in
//! them has left its sender already. So the wires of this crate hold packets back themselves. The agent keeps a folder with
//! two files of a page each:
//!
//! | file | content | written by |
//! |---|---|---|
//! | `rates` | by DSCP, its pace and its gate; how far Unix time is ahead of the monotonic clock | the agent, word by word |
//! | `buckets` | by DSCP, when its bucket is full again, when it was active, and counters | every process that sends |
//!
//! **Paces.** A bucket is one number, as in the generic cell rate algorithm: the time at which it will be full. Sending adds
//! the time that the bytes take at the pace; a packet is admitted while that time is at most the bucket's depth ahead. All
//! processes use the same buckets, so their sum keeps the pace however many there are and whoever of them has something to
//! send; a process that is killed leaves nothing behind but that time. A bucket that is further ahead than a burst can have
//! made it is not believed.
//!
//! **Gates.** Jobs that compute and exchange in turn can share a link without meeting on it. A gate lets an exchange of a job
//! begin at `shift + n * period` of Unix time, or up to the gate's tolerance later; who is later waits for the next time.
//!
//! - An exchange lasts until the DSCP was silent for the gate's quiet time. It is not cut, however long it lasts.
//! - What this machine receives is activity, too: a peer has begun in time. So acknowledgements and responses are never
//!   held back, and clocks may differ by a little.
//! - The first packet of an exchange that is held back dates it, so `buckets` says how long exchanges have waited.
//! - A job whose period is longer than its gate's would wait in every iteration. The agent sees how long exchanges wait,
//!   and drops its gate.
//!
//! Who may write `buckets` can slow its machine's other jobs down, or end their processes by truncating the file, so only the
//! owner and the group of the folder may. The agent reads it without mapping it, and replaces one that was truncated. A
//! process that may not has buckets of its own: its pace is not part of a sum, and the agent does not see how long its
//! exchanges wait, so the process ignores its gate while that is too long.
//!
//! Without the folder nothing is limited. Wires look for it, and for another one in its place, every [`LOOK_EVERY`] while
//! they are in use; what changes in it holds from the next packet on.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path as FilePath, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use roce::world::{Path, RxFrame, TxFrame};
use roce::{Duration, Time};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::clock;
use crate::local_files::{self, LockError, make_shared_folder};

/// Environment variable with the folder; empty for no paces.
pub const VARIABLE: &str = "DQUANT_PACES";

/// The folder, unless the environment names another.
pub const FOLDER: &str = "/run/dquant/paces";

/// How often a wire in use looks whether there is a folder, and the longest that a queue pair waits without a look.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a bucket holds when it is full: the longest that one who slept too long can make up for.
pub const DEPTH: Duration = Duration::from_millis(2);

/// The most that a job's burst makes a bucket hold: longer ones delay the guarantees of others.
pub const MOST_DEPTH: Duration = Duration::from_millis(10);

/// And never less than a segmented send.
const LEAST_DEPTH_BYTES: u64 = 64 << 10;

/// What senders can have sent beyond an empty bucket: bursts of many queue pairs, admitted at one time.
const MOST_DEBT_BYTES: u64 = 1 << 20;

/// A packet as it is admitted, before it is known: the largest.
const PACKET_BYTES: u64 = 4096 + 100;

/// A job is judged by at least so many exchanges: the first one, and single ones that a busy machine made late, do not
/// decide.
pub const JUDGED_EXCHANGES: u64 = 32;

/// Exchanges that wait for more than this part of their period, on average, show that the job does not keep it. Periods that
/// were lengthened to fit each other, and a job's own variation, are below that.
const MOST_WAIT_PARTS: u64 = 10;

/// Peers that are remembered to be answered: those heard last.
const MAX_HEARD: usize = 64;

/// Peers that are noticed in what is received at once; others are when more comes of them.
const PEERS_AT_ONCE: usize = 16;

/// A gate whose agent has not followed the clock for so long is open: nobody would notice that it does harm.
pub const GATES_LAST: Duration = Duration::from_millis(60_000);

/// DiffServ codepoints.
const CODE_POINTS: usize = 64;

/// Bytes of a file.
const FILE_BYTES: u64 = 4096;

/// First word of `rates`.
const MAGIC: u64 = u64::from_ne_bytes(*b"dqpaces2");

/// The least quiet time of a gate: well above a round trip and the wake-up of a thread, so that no exchange is cut.
pub const LEAST_QUIET: Duration = Duration::from_millis(1);

/// Ethernet, IP and UDP headers of a packet: what a queue of the port counts.
const HEADER_BYTES_V4: u64 = 14 + 20 + 8;
const HEADER_BYTES_V6: u64 = 14 + 40 + 8;

#[derive(Debug)]
#[repr(C, align(4096))]
struct Rates {
    magic: AtomicU64,
    /// Unix time minus the monotonic clock, in nanoseconds.
    unix_offset_ns: AtomicU64,
    /// When the agent read both clocks last, in nanoseconds of the monotonic one.
    followed_at: AtomicU64,
    /// By bit: DSCPs that have a gate.
    gated: AtomicU64,
    bps: [AtomicU64; CODE_POINTS],
    burst_bytes: [AtomicU64; CODE_POINTS],
    gates: [GateWords; CODE_POINTS],
}

impl Rates {
    fn bps(&self, dscp: usize) -> u64 {
        self.bps[dscp].load(Ordering::Relaxed)
    }

    fn depth_ns(&self, dscp: usize, bps: u64) -> u64 {
        depth_ns(bps, self.burst_bytes[dscp].load(Ordering::Relaxed))
    }

    fn gated(&self) -> u64 {
        self.gated.load(Ordering::Acquire)
    }

    fn gate(&self, dscp: usize) -> Option<Gate> {
        (self.gated() & 1 << dscp != 0).then(|| self.gates[dscp].load())
    }
}

/// A [`Gate`] in memory.
#[derive(Debug, Default)]
#[repr(C)]
struct GateWords {
    period_ns: AtomicU64,
    shift_ns: AtomicU64,
    tolerance_ns: AtomicU64,
    quiet_ns: AtomicU64,
}

impl GateWords {
    fn load(&self) -> Gate {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Gate {
            period_ns: word(&self.period_ns),
            shift_ns: word(&self.shift_ns),
            tolerance_ns: word(&self.tolerance_ns),
            quiet_ns: word(&self.quiet_ns),
        }
    }

    fn store(&self, gate: Gate) {
        self.period_ns.store(gate.period_ns, Ordering::Relaxed);
        self.shift_ns.store(gate.shift_ns, Ordering::Relaxed);
        self.tolerance_ns.store(gate.tolerance_ns, Ordering::Relaxed);
        self.quiet_ns.store(gate.quiet_ns, Ordering::Relaxed);
    }
}

/// On a cache line of its own. Instants are in nanoseconds of the monotonic clock.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Bucket {
    full_at: AtomicU64,
    bytes: AtomicU64,
    /// When the DSCP was last active: sent or received. Kept for DSCPs with a gate.
    active_at: AtomicU64,
    /// When the first packet of the next exchange was held back, if that is after the last activity.
    held_at: AtomicU64,
    begun: AtomicU64,
    waited_ns: AtomicU64,
    late: AtomicU64,
}

#[derive(Debug)]
#[repr(C, align(4096))]
struct Buckets([Bucket; CODE_POINTS]);

const _: () = assert!(size_of::<Rates>() as u64 == FILE_BYTES);
const _: () = assert!(size_of::<Buckets>() as u64 == FILE_BYTES);

/// A mapped file of one page whose content is atomics.
#[derive(Debug)]
struct Mapped<T>(NonNull<T>);

// SAFETY: what is behind the pointer is atomic, and mapped for as long as the value lives.
unsafe impl<T: Sync> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T> Mapped<T> {
    /// Maps a file, which has to have the size of `T`: `Rates` or `Buckets`.
    fn new(file: &File, access: ProtFlags) -> io::Result<Mapped<T>> {
        if file.metadata()?.len() != size_of::<T>() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a file of another size"));
        }
        let (at, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping. Those who may write the file are trusted not to cut it, as the module's text says.
        let at = unsafe { mmap(at, size_of::<T>(), access, flags, file.as_fd(), 0)? };
        let mapped = Mapped(NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        // SAFETY: the mapping just made. A forked child has no use for it.
        unsafe { madvise(at, size_of::<T>(), Advice::LinuxDontFork)? };
        Ok(mapped)
    }

    fn get(&self) -> &T {
        // SAFETY: a page is mapped at the pointer until this is dropped, and is as large and aligned as `T`, of which any
        // bytes are a valid value: it has atomics only.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is its own, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}

// ---- gates -------------------------------------------------------------------------------------------

/// When the exchanges of a DSCP may begin: at `shift_ns + n * period_ns` of Unix time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    /// From one time to the next, in nanoseconds; not 0.
    pub period_ns: u64,
    /// When that is, in nanoseconds.
    pub shift_ns: u64,
    /// By how much an exchange may begin later.
    pub tolerance_ns: u64,
    /// An exchange has ended when the DSCP was neither sent nor received for so long; at least [`LEAST_QUIET`] is kept.
    pub quiet_ns: u64,
}

impl Gate {
    /// When an exchange that wants to begin at `now` may; `None` for at once.
    fn opens_at(&self, now: Time, unix_offset_ns: u64) -> Option<Time> {
        let (unix, period) = (now.as_nanos().wrapping_add(unix_offset_ns), self.period_ns.max(1));
        let late_ns = (unix % period + period - self.shift_ns % period) % period;
        (late_ns > self.tolerance_ns).then(|| now + Duration::from_nanos(period - late_ns))
    }

    /// Whether an exchange goes on that was last active at `active_at`. That may be a little later than `now`: another process
    /// has read its clock since. What is further in the future is not believed.
    fn goes_on(&self, active_at: u64, now: Time) -> bool {
        now.as_nanos().abs_diff(active_at) <= self.quiet_ns.max(LEAST_QUIET.as_nanos())
    }
}

impl Bucket {
    /// From its words, in their order in memory.
    fn of(mut words: impl Iterator<Item = u64>) -> Bucket {
        let mut word = || AtomicU64::new(words.next().unwrap_or(0));
        // Fields of a literal are evaluated in the order in which they are written.
        Bucket {
            full_at: word(),
            bytes: word(),
            active_at: word(),
            held_at: word(),
            begun: word(),
            waited_ns: word(),
            late: word(),
        }
    }

    /// The DSCP is active: its exchange goes on, or begins.
    fn mark_active(&self, gate: &Gate, now: Time) {
        let last = self.active_at.load(Ordering::Relaxed);
        if gate.goes_on(last, now) {
            self.active_at.fetch_max(now.as_nanos(), Ordering::Relaxed);
            return;
        }
        let begins = self.active_at.compare_exchange(
            last,
            now.as_nanos(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        // Otherwise another process has begun it.
        if begins.is_ok() {
            self.count_begun(gate, last, now);
        }
    }

    /// An exchange begins; `last` is when the one before was active.
    fn count_begun(&self, gate: &Gate, last: u64, now: Time) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let held_at = self.held_at.load(Ordering::Relaxed);
        if held_at <= last {
            return;
        }
        // Nobody waits for more than a period: who was held back longer has ended without beginning.
        let waited_ns = now.as_nanos().checked_sub(held_at);
        let waited_ns = waited_ns.filter(|ns| *ns <= gate.period_ns.saturating_mul(2)).unwrap_or(0);
        self.waited_ns.fetch_add(waited_ns, Ordering::Relaxed);
        self.late.fetch_add(u64::from(waited_ns > gate.tolerance_ns), Ordering::Relaxed);
    }

    /// Whether exchanges have waited so long that the gate does harm.
    fn waits_too_long(&self, gate: &Gate) -> bool {
        let mean_ns = self.exchanges().mean_wait_ns();
        mean_ns.is_some_and(|mean_ns| wait_is_too_long(mean_ns, gate.period_ns))
    }

    fn exchanges(&self) -> Exchanges {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Exchanges {
            begun: word(&self.begun),
            waited_ns: word(&self.waited_ns),
            late: word(&self.late),
        }
    }

    /// A packet of the next exchange is held back: the first one dates its wait.
    fn mark_held(&self, now: Time) {
        let held_at = self.held_at.load(Ordering::Relaxed);
        let last = self.active_at.load(Ordering::Relaxed);
        let is_dated = held_at > last && held_at <= now.as_nanos();
        if !is_dated {
            let (relaxed, now) = (Ordering::Relaxed, now.as_nanos());
            // Otherwise another process has dated it.
            let _ = self.held_at.compare_exchange(held_at, now, relaxed, relaxed);
        }
    }
}

// ---- keeping paces -----------------------------------------------------------------------------------

/// Whose buckets a process takes from.
#[derive(Debug)]
enum Shared {
    ByAll(Mapped<Buckets>),
    /// The process may not write the file.
    Own(Box<[Bucket; CODE_POINTS]>),
}

struct Table {
    rates: Mapped<Rates>,
    buckets: Shared,
    identity: Identity,
}

/// Device and inode of `rates` and of `buckets`: either may be replaced, or come later.
type Identity = [Option<(u64, u64)>; 2];

fn identity(folder: &FilePath) -> Identity {
    ["rates", "buckets"]
        .map(|name| fs::metadata(folder.join(name)).ok().map(|found| (found.dev(), found.ino())))
}

impl Table {
    fn open(folder: &FilePath) -> io::Result<Table> {
        // Before they are opened: what is replaced meanwhile is noticed by the next look.
        let identity = identity(folder);
        let file = File::open(folder.join("rates"))?;
        let rates = Mapped::<Rates>::new(&file, ProtFlags::READ)?;
        if rates.get().magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no table of paces"));
        }
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let file = OpenOptions::new().read(true).write(true).open(folder.join("buckets"));
        let buckets = match file.and_then(|file| Mapped::new(&file, both)) {
            Ok(mapped) => Shared::ByAll(mapped),
            Err(_) => Shared::Own(Box::new(std::array::from_fn(|_| Bucket::default()))),
        };
        Ok(Table { rates, buckets, identity })
    }

    /// When the gate of this DSCP opens, if it is closed.
    fn opens_at(&self, dscp: usize, now: Time) -> Option<Time> {
        let rates = self.rates.get();
        let (gate, bucket) = (rates.gate(dscp)?, self.bucket(dscp));
        let followed_at = rates.followed_at.load(Ordering::Relaxed);
        if now.as_nanos() > followed_at.saturating_add(GATES_LAST.as_nanos()) {
            return None;
        }
        if gate.goes_on(bucket.active_at.load(Ordering::Relaxed), now) {
            return None;
        }
        // Nobody else sees these counters.
        if matches!(self.buckets, Shared::Own(_)) && bucket.waits_too_long(&gate) {
            return None;
        }
        gate.opens_at(now, rates.unix_offset_ns.load(Ordering::Relaxed))
    }

    fn mark_active(&self, dscp: usize, now: Time) {
        if let Some(gate) = self.rates.get().gate(dscp) {
            self.bucket(dscp).mark_active(&gate, now);
        }
    }

    fn bucket(&self, dscp: usize) -> &Bucket {
        match &self.buckets {
            Shared::ByAll(mapped) => &mapped.get().0[dscp],
            Shared::Own(own) => &own[dscp],
        }
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// The paces that a wire keeps.
#[derive(Debug)]
pub(crate) struct Paces {
    folder: Option<PathBuf>,
    look_at: Time,
    table: Option<Table>,
    /// When packets that were not admitted may be.
    waits_until: Option<Time>,
    /// Admitted since the last send: a code point, and the time that it takes.
    granted: (usize, u64),
    /// How often a queue pair was held back by its pace, and by its gate.
    held: u64,
    gate_held: u64,
    /// Peers of whom something came lately, kept while there are gates.
    heard: Vec<(IpAddr, Time)>,
}

impl Paces {
    /// Those of the folder that the environment names.
    pub(crate) fn from_environment() -> Paces {
        let folder = match std::env::var_os(VARIABLE) {
            Some(named) if named.is_empty() => None,
            Some(named) => Some(PathBuf::from(named)),
            None => Some(PathBuf::from(FOLDER)),
        };
        Paces::of(folder)
    }

    pub(crate) fn of(folder: Option<PathBuf>) -> Paces {
        let look_at = if folder.is_some() { Time::ZERO } else { Time::from_nanos(u64::MAX) };
        Paces {
            folder,
            look_at,
            table: None,
            waits_until: None,
            granted: (0, 0),
            held: 0,
            gate_held: 0,
            heard: Vec::new(),
        }
    }

    /// How often a queue pair was held back by its pace.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// How often a queue pair was held back by its gate.
    pub(crate) fn gate_held(&self) -> u64 {
        self.gate_held
    }

    /// How many of `packets` packets on this path may be sent now.
    #[inline]
    pub(crate) fn admits(&mut self, now: Time, path: &Path, packets: usize) -> usize {
        if now >= self.look_at {
            self.look(now);
        }
        match self.table {
            None => packets,
            Some(_) => self.admits_paced(now, path, packets),
        }
    }

    /// These are sent.
    #[inline]
    pub(crate) fn sent(&mut self, now: Time, frames: &[TxFrame<'_>]) {
        if self.table.is_some() {
            self.book(now, frames);
        }
    }

    /// Whether there are gates, so that [`Paces::received`] has to be told what arrives. Looks for the folder, too: a gate
    /// that is found only when the acknowledgement is due would hold it back.
    #[inline]
    pub(crate) fn watches(&mut self, now: Time) -> bool {
        if now >= self.look_at {
            self.look(now);
        }
        self.table.as_ref().is_some_and(|table| table.rates.get().gated() != 0)
    }

    /// Packets of these peers with these DSCPs have arrived, by bit: exchanges that peers have begun.
    pub(crate) fn received(&mut self, now: Time, dscps: u64, peers: &[IpAddr]) {
        let Some(table) = &self.table else { return };
        self.heard.retain(|(peer, _)| !peers.contains(peer));
        let room = MAX_HEARD.saturating_sub(peers.len());
        self.heard.drain(..self.heard.len().saturating_sub(room));
        self.heard.extend(peers.iter().map(|peer| (*peer, now)));
        let gated = dscps & table.rates.get().gated();
        (0..CODE_POINTS)
            .filter(|dscp| gated & 1 << dscp != 0)
            .for_each(|dscp| table.mark_active(dscp, now));
        if gated != 0 || !peers.is_empty() {
            // Whoever was held back at a gate that is open now need not wait longer.
            self.waits_until = self.waits_until.map(|at| at.min(now));
        }
    }

    /// What was admitted and not sent is not any more. Whoever waited until now asks again, or is gone.
    #[inline]
    pub(crate) fn lapse(&mut self, now: Time) {
        self.granted = (0, 0);
        if self.waits_until.is_some_and(|at| at <= now) {
            self.waits_until = None;
        }
    }

    /// Whether packets on this path wait for their gate: a timer of their connection says nothing about the peer.
    pub(crate) fn holds_back(&self, path: &Path) -> bool {
        let dscp = usize::from(path.dscp) % CODE_POINTS;
        let now = clock::now();
        let Some(table) = &self.table else { return false };
        table.opens_at(dscp, now).is_some() && !self.answers(table, dscp, path, now)
    }

    /// Whether this may be an answer: something came from there within the quiet time of the gate, perhaps of another job, and
    /// acknowledgements and responses have the DSCP of their own queue pair.
    fn answers(&self, table: &Table, dscp: usize, path: &Path, now: Time) -> bool {
        let peer = path.remote.ip();
        let heard = self.heard.iter().find(|(heard, _)| *heard == peer);
        let gate = table.rates.get().gate(dscp);
        heard.zip(gate).is_some_and(|((_, at), gate)| gate.goes_on(at.as_nanos(), now))
    }

    /// When packets that were not admitted may be.
    pub(crate) fn next_wakeup(&self) -> Option<Time> {
        self.waits_until
    }

    #[cold]
    fn look(&mut self, now: Time) {
        self.look_at = now + LOOK_EVERY;
        let Some(folder) = &self.folder else { return };
        let found = identity(folder);
        if found != self.table.as_ref().map_or([None; 2], |table| table.identity) {
            self.table = Table::open(folder).ok();
            self.waits_until = None;
        }
    }

    fn admits_paced(&mut self, now: Time, path: &Path, packets: usize) -> usize {
        let Some(table) = &self.table else { return packets };
        // Who waited until then asks now.
        self.waits_until = self.waits_until.filter(|at| *at > now);
        let dscp = usize::from(path.dscp) % CODE_POINTS;
        let closed = table.opens_at(dscp, now).filter(|_| !self.answers(table, dscp, path, now));
        if let Some(opens_at) = closed {
            table.bucket(dscp).mark_held(now);
            self.gate_held += 1;
            self.wait_until(now, opens_at);
            return 0;
        }
        let rates = table.rates.get();
        let bps = rates.bps(dscp);
        if bps == 0 {
            return packets;
        }
        let (granted_to, granted) = self.granted;
        let granted = if granted_to == dscp { granted } else { 0 };
        let packet_ns = cost_ns(PACKET_BYTES, bps);
        let depth_ns = rates.depth_ns(dscp, bps);
        let full_at = table.bucket(dscp).full_at.load(Ordering::Relaxed);
        let taken = believed(full_at, now, bps, depth_ns).saturating_add(granted);
        let room = (now.as_nanos() + depth_ns).saturating_sub(taken);
        let admitted = usize::try_from(room / packet_ns).unwrap_or(usize::MAX).min(packets);
        if admitted == 0 {
            self.held += 1;
            // Half a bucket at once, so that packets leave in segmented sends.
            self.wait_until(now, Time::from_nanos(taken.saturating_sub(depth_ns / 2)));
            return 0;
        }
        self.granted = (dscp, granted + admitted as u64 * packet_ns);
        admitted
    }

    /// Asks again then, or for another DSCP sooner; within [`LOOK_EVERY`], since the table may have changed.
    fn wait_until(&mut self, now: Time, at: Time) {
        let at = at.clamp(now + Duration::from_nanos(1), now + LOOK_EVERY);
        self.waits_until = Some(self.waits_until.map_or(at, |other| other.min(at)));
    }

    fn book(&mut self, now: Time, frames: &[TxFrame<'_>]) {
        self.granted = (0, 0);
        self.waits_until = self.waits_until.filter(|at| *at > now);
        let Some(table) = &self.table else { return };
        for run in frames.chunk_by(|a, b| a.path.dscp == b.path.dscp) {
            let dscp = usize::from(run[0].path.dscp) % CODE_POINTS;
            let (rates, bucket) = (table.rates.get(), table.bucket(dscp));
            let bps = rates.bps(dscp);
            let bytes = run.iter().map(wire_bytes).sum();
            bucket.bytes.fetch_add(bytes, Ordering::Relaxed);
            table.mark_active(dscp, now);
            if bps > 0 {
                let depth_ns = rates.depth_ns(dscp, bps);
                let taken =
                    |full_at| Some(believed(full_at, now, bps, depth_ns) + cost_ns(bytes, bps));
                let _ = bucket.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
            }
        }
    }
}

/// Has a wire receive, and tells its paces what arrives if they have to know.
pub(crate) fn receive_watched<W>(
    wire: &mut W,
    now: Time,
    sink: &mut dyn FnMut(&RxFrame<'_>),
    paces: fn(&mut W) -> &mut Paces,
    receive: impl FnOnce(&mut W, &mut dyn FnMut(&RxFrame<'_>)) -> usize,
) -> usize {
    paces(wire).lapse(now);
    if !paces(wire).watches(now) {
        return receive(wire, sink);
    }
    let (mut dscps, mut count) = (0, 0);
    let mut peers = [IpAddr::V4(Ipv4Addr::UNSPECIFIED); PEERS_AT_ONCE];
    let accepted = receive(wire, &mut |frame| {
        dscps |= 1 << (usize::from(frame.origin.dscp) % CODE_POINTS);
        let peer = frame.origin.source.ip();
        if count < PEERS_AT_ONCE && !peers[..count].contains(&peer) {
            peers[count] = peer;
            count += 1;
        }
        sink(frame);
    });
    paces(wire).received(now, dscps, &peers[..count]);
    accepted
}

fn wire_bytes(frame: &TxFrame<'_>) -> u64 {
    let headers = if frame.path.remote.is_ipv4() { HEADER_BYTES_V4 } else { HEADER_BYTES_V6 };
    headers + frame.udp_payload_len() as u64
}

/// How long bytes take at a pace.
fn cost_ns(bytes: u64, bps: u64) -> u64 {
    let ns = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(bps.max(1));
    // Decades are as good as for ever, and leave room for sums.
    u64::try_from(ns).unwrap_or(u64::MAX).clamp(1, u64::MAX / 16)
}

/// A job's burst makes a bucket deeper, within bounds.
fn depth_ns(bps: u64, burst_bytes: u64) -> u64 {
    let least_ns = cost_ns(LEAST_DEPTH_BYTES, bps).max(DEPTH.as_nanos());
    least_ns.max(cost_ns(burst_bytes, bps).min(MOST_DEPTH.as_nanos()))
}

/// When a bucket is full: not before now, and now where it is further ahead than all bursts can have made it.
fn believed(full_at: u64, now: Time, bps: u64, depth_ns: u64) -> u64 {
    let most = now.as_nanos() + depth_ns + cost_ns(MOST_DEBT_BYTES, bps);
    if full_at > most { now.as_nanos() } else { full_at.max(now.as_nanos()) }
}

// ---- setting paces -----------------------------------------------------------------------------------

/// The pace of a DSCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Bits per second, Ethernet headers included; 0 for none.
    pub bps: u64,
    /// What may leave at once: the bucket holds that, at least [`DEPTH`] of the pace and at most [`MOST_DEPTH`].
    pub burst_bytes: u64,
}

impl Pace {
    /// So many bits per second, with the least bucket.
    pub fn of(bps: u64) -> Pace {
        Pace { bps, burst_bytes: 0 }
    }
}

/// How exchanges of a DSCP have begun since the file was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanges {
    /// How many, by this machine or its peers.
    pub begun: u64,
    /// How long they have waited for their gate, in nanoseconds.
    pub waited_ns: u64,
    /// How many have waited for more than the gate's tolerance.
    pub late: u64,
}

impl Exchanges {
    /// The exchanges since `before`; `None` if a counter went backwards, which any process that may write the buckets can
    /// cause.
    pub fn since(self, before: Exchanges) -> Option<Exchanges> {
        Some(Exchanges {
            begun: self.begun.checked_sub(before.begun)?,
            waited_ns: self.waited_ns.checked_sub(before.waited_ns)?,
            late: self.late.checked_sub(before.late)?,
        })
    }

    /// How long they have waited on average, in nanoseconds, if there are enough to judge a job by.
    pub fn mean_wait_ns(self) -> Option<u64> {
        (self.begun >= JUDGED_EXCHANGES).then(|| self.waited_ns / self.begun)
    }
}

/// Whether exchanges that wait for so long on average show that their job does not keep its period.
pub fn wait_is_too_long(mean_wait_ns: u64, period_ns: u64) -> bool {
    mean_wait_ns > period_ns / MOST_WAIT_PARTS
}

/// The agent's side. What is set stays in force when it is dropped.
#[derive(Debug)]
pub struct PaceTable {
    path: PathBuf,
    rates: Mapped<Rates>,
    /// Not mapped: who may write it may truncate it, and that would end the agent.
    buckets: Mutex<File>,
    /// One agent keeps a folder.
    _lock: File,
}

impl PaceTable {
    /// Opens the folder's files, and makes what is missing: readable by everyone, `buckets` writable by the owner and the
    /// folder's group, and `lock` for the owner alone. Files of another form are replaced.
    ///
    /// # Errors
    /// When the folder cannot be written; [`io::ErrorKind::WouldBlock`] if another process keeps it.
    pub fn open(folder: &FilePath) -> io::Result<PaceTable> {
        make_shared_folder(folder)?;
        let lock = local_files::lock(&folder.join("lock")).map_err(|error| match error {
            held @ LockError::Held(_) => io::Error::new(io::ErrorKind::WouldBlock, held),
            LockError::Failed(error) => error,
        })?;
        let group = fs::metadata(folder)?.gid();
        // Senders look for `rates`: whoever finds it finds the buckets, too.
        let buckets = match opened(&folder.join("buckets")) {
            Ok(found) => found,
            Err(_) => make(folder, "buckets", 0o660, group, &[])?,
        };
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let rates =
            opened(&folder.join("rates")).and_then(|file| Mapped::<Rates>::new(&file, both));
        let rates = match rates {
            Ok(found) if found.get().magic.load(Ordering::Acquire) == MAGIC => found,
            _ => Mapped::new(&make(folder, "rates", 0o644, group, &MAGIC.to_ne_bytes())?, both)?,
        };
        let (path, buckets) = (folder.to_path_buf(), Mutex::new(buckets));
        let table = PaceTable { path, rates, buckets, _lock: lock };
        table.follow_clock();
        Ok(table)
    }

    /// Sets all paces by DSCP; DSCPs that are not named have none. Values above 63 are ignored.
    pub fn set(&self, paces: impl IntoIterator<Item = (u8, Pace)>) {
        let wanted = by_dscp(paces);
        let Rates { bps, burst_bytes, .. } = self.rates.get();
        for ((bps, burst_bytes), pace) in bps.iter().zip(burst_bytes).zip(wanted) {
            let Pace { bps: new_bps, burst_bytes: new_bytes } = pace.unwrap_or_default();
            burst_bytes.store(new_bytes, Ordering::Relaxed);
            bps.store(new_bps, Ordering::Relaxed);
        }
    }

    /// Sets all gates by DSCP; DSCPs that are not named have none. Those that stay as they are stay in force meanwhile.
    /// Values above 63, and periods of 0, are ignored.
    pub fn set_gates(&self, gates: impl IntoIterator<Item = (u8, Gate)>) {
        let wanted = by_dscp(gates.into_iter().filter(|(_, gate)| gate.period_ns > 0));
        let Rates { gated, gates, .. } = self.rates.get();
        let mut mask = gated.load(Ordering::Relaxed);
        for (dscp, (words, gate)) in gates.iter().zip(wanted).enumerate() {
            let is_set = mask & 1 << dscp != 0;
            if gate == is_set.then(|| words.load()) {
                continue;
            }
            // Nobody reads a gate that changes.
            mask &= !(1 << dscp);
            gated.store(mask, Ordering::Release);
            if let Some(gate) = gate {
                words.store(gate);
                mask |= 1 << dscp;
                gated.store(mask, Ordering::Release);
            }
        }
    }

    /// Reads both clocks, and has gates follow Unix time from now on. To be called once a second or so: it may be set.
    pub fn follow_clock(&self) {
        self.set_unix_offset(clock::unix_offset_ns());
        self.rates.get().followed_at.store(clock::now().as_nanos(), Ordering::Relaxed);
    }

    fn set_unix_offset(&self, ns: u64) {
        self.rates.get().unix_offset_ns.store(ns, Ordering::Relaxed);
    }

    /// The pace of a DSCP in bits per second; 0 if it has none.
    pub fn bps(&self, dscp: u8) -> u64 {
        code_point(dscp).map_or(0, |dscp| self.rates.get().bps(dscp))
    }

    /// The gate of a DSCP.
    pub fn gate(&self, dscp: u8) -> Option<Gate> {
        self.rates.get().gate(code_point(dscp)?)
    }

    /// How exchanges of a DSCP with a gate have begun, as far as processes with the right to write the buckets took part;
    /// none where the file was truncated.
    pub fn exchanges(&self, dscp: u8) -> Exchanges {
        self.bucket(dscp).map_or_else(Exchanges::default, |bucket| bucket.exchanges())
    }

    /// Bytes that processes with the right to write the buckets have sent with a DSCP since the file was made, Ethernet
    /// headers included; 0 where the file was truncated.
    pub fn sent_bytes(&self, dscp: u8) -> u64 {
        self.bucket(dscp).map_or(0, |bucket| bucket.bytes.into_inner())
    }

    /// Replaces buckets that were truncated, which processes notice within [`LOOK_EVERY`]. Returns whether they were.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn mend(&self) -> io::Result<bool> {
        let mut buckets = self.locked_buckets();
        if buckets.metadata()?.len() == FILE_BYTES {
            return Ok(false);
        }
        let group = fs::metadata(&self.path)?.gid();
        *buckets = make(&self.path, "buckets", 0o660, group, &[])?;
        Ok(true)
    }

    fn locked_buckets(&self) -> MutexGuard<'_, File> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bucket(&self, dscp: u8) -> Option<Bucket> {
        let at = code_point(dscp)? * size_of::<Bucket>();
        let mut bytes = [0; size_of::<Bucket>()];
        self.locked_buckets().read_exact_at(&mut bytes, at as u64).ok()?;
        let (words, _) = bytes.as_chunks::<8>();
        Some(Bucket::of(words.iter().map(|word| u64::from_ne_bytes(*word))))
    }
}

/// A DSCP as an index; `None` above 63.
fn code_point(dscp: u8) -> Option<usize> {
    Some(usize::from(dscp)).filter(|dscp| *dscp < CODE_POINTS)
}

/// What is named for each DSCP.
fn by_dscp<T: Copy>(named: impl IntoIterator<Item = (u8, T)>) -> [Option<T>; CODE_POINTS] {
    let mut all = [None; CODE_POINTS];
    for (dscp, one) in named {
        if let Some(place) = all.get_mut(usize::from(dscp)) {
            *place = Some(one);
        }
    }
    all
}

/// A file of the right size.
fn opened(path: &FilePath) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    match file.metadata()?.len() {
        FILE_BYTES => Ok(file),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Makes a file under another name, and moves it to its place when it is complete.
fn make(folder: &FilePath, name: &str, mode: u32, group: u32, start: &[u8]) -> io::Result<File> {
    let draft = folder.join(format!("{name}.{}", std::process::id()));
    let _ = fs::remove_file(&draft);
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&draft)?;
    let made = (|| {
        file.set_len(FILE_BYTES)?;
        io::Write::write_all(&mut &file, start)?;
        chown(&draft, None, Some(group))?;
        fs::set_permissions(&draft, fs::Permissions::from_mode(mode))?;
        fs::rename(&draft, folder.join(name))
    })();
    if made.is_err() {
        let _ = fs::remove_file(&draft);
    }
    made.map(|()| file)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use roce::world::{Payload, Telemetry};

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path =
                std::env::temp_dir().join(format!("nic-paces-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Folder(path)
        }

        fn table(&self) -> PaceTable {
            PaceTable::open(&self.0).expect("a temporary folder")
        }

        fn paces(&self) -> Paces {
            Paces::of(Some(self.0.clone()))
        }

        /// As a process that sends has them.
        fn buckets(&self) -> Mapped<Buckets> {
            let file = opened(&self.0.join("buckets")).expect("the table made it");
            Mapped::new(&file, ProtFlags::READ | ProtFlags::WRITE).expect("a mapping")
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn rated<const N: usize>(bps: [(u8, u64); N]) -> [(u8, Pace); N] {
        bps.map(|(dscp, bps)| (dscp, Pace::of(bps)))
    }

    const START: Time = Time::from_nanos(1_000_000_000);
    const PAYLOAD: [u8; 1000] = [0; 1000];
    /// On the wire over IPv4, without transport headers.
    const BYTES: u64 = 14 + 20 + 8 + 1000 + 4;

    fn path(dscp: u8) -> Path {
        Path { dscp, ..Path::new(SocketAddr::from(([10, 0, 0, 1], 4791))) }
    }

    fn frame(dscp: u8) -> TxFrame<'static> {
        TxFrame {
            path: path(dscp),
            header: Default::default(),
            payload: Payload::Bytes(&PAYLOAD),
            pad: 0,
            telemetry: Telemetry::None,
        }
    }

    /// Sends what is admitted, as a backlogged queue pair that sleeps until it is told to wake; returns packets.
    fn send(paces: &mut Paces, now: Time, dscp: u8) -> u64 {
        let mut sent = 0;
        loop {
            let admitted = paces.admits(now, &path(dscp), 64);
            let frames: Vec<_> = (0..admitted).map(|_| frame(dscp)).collect();
            paces.sent(now, &frames);
            sent += admitted as u64;
            if admitted == 0 || sent > 100_000 {
                return sent;
            }
        }
    }

    /// What backlogged processes send together in a time, in bits per second, and each of them.
    fn rates(all: &mut [Paces], from: Time, time: Duration, dscp: u8) -> Vec<u64> {
        let mut wake = vec![from; all.len()];
        let mut bits = vec![0; all.len()];
        let end = from + time;
        while let Some((who, at)) = wake.iter().copied().enumerate().min_by_key(|(_, at)| *at)
            && at < end
        {
            bits[who] += send(&mut all[who], at, dscp) * BYTES * 8;
            // The thread wakes a little late.
            wake[who] = all[who].next_wakeup().expect("it waits") + Duration::from_micros(60);
        }
        let per_s = |bits: u64| u128::from(bits) * 1_000_000_000 / u128::from(time.as_nanos());
        bits.into_iter().map(|bits| per_s(bits) as u64).collect()
    }

    fn assert_near(bps: u64, wanted: u64, per_mille: u64) {
        let off = bps.abs_diff(wanted);
        assert!(off * 1000 <= wanted * per_mille, "{bps} bit/s, not {wanted}");
    }

    #[test]
    fn without_a_table_everything_is_admitted_and_a_new_one_is_found() {
        let folder = Folder::new("absent");
        let mut paces = folder.paces();
        assert_eq!(paces.admits(START, &path(26), 1000), 1000);
        assert_eq!(paces.next_wakeup(), None);
        folder.table().set(rated([(26, 1_000_000)]));
        let before = START + Duration::from_nanos(LOOK_EVERY.as_nanos() - 1);
        assert_eq!(paces.admits(before, &path(26), 1000), 1000, "it does not look for each packet");
        assert!(paces.admits(START + LOOK_EVERY, &path(26), 1000) < 20);
        fs::remove_dir_all(&folder.0).expect("it is ours");
        assert_eq!(paces.admits(START + LOOK_EVERY * 2, &path(26), 1000), 1000, "it is gone");
        assert_eq!(Paces::of(None).admits(START, &path(26), 7), 7);
    }

    #[test]
    fn processes_keep_a_pace_together_and_who_is_alone_has_all_of_it() {
        let folder = Folder::new("together");
        let table = folder.table();
        for bps in [10_000_000, 1_000_000_000, 40_000_000_000] {
            table.set(rated([(26, bps)]));
            let time = Duration::from_millis(1_000);
            for count in [1, 2, 5] {
                let mut all: Vec<Paces> = (0..count).map(|_| folder.paces()).collect();
                // Far enough from what was measured before.
                let from =
                    START + Duration::from_millis(20_000 * u64::from(bps.ilog10()) + 3_000 * count);
                let each = rates(&mut all, from, time, 26);
                assert_near(each.iter().sum(), bps, 60);
                assert!(all.iter().all(|paces| paces.held() > 0));
            }
        }
        assert!(table.sent_bytes(26) > 0 && table.sent_bytes(27) == 0);
    }

    #[test]
    fn one_job_has_no_effect_on_another() {
        let folder = Folder::new("others");
        folder.table().set(rated([(26, 1_000_000)]));
        let mut paces = folder.paces();
        send(&mut paces, START, 26);
        assert_eq!(paces.admits(START, &path(26), 8), 0);
        assert_eq!(paces.admits(START, &path(27), 100_000), 100_000);
    }

    #[test]
    fn a_changed_pace_holds_from_the_next_packet() {
        let folder = Folder::new("changes");
        let table = folder.table();
        table.set(rated([(26, 1_000_000)]));
        let mut paces = [folder.paces()];
        let time = Duration::from_millis(500);
        rates(&mut paces, START, time, 26);
        // The debt of the slow pace is no debt of the fast one; waiting ends at the next look.
        let later = START + time;
        let waits_until = paces[0].next_wakeup().expect("it waits");
        assert!(waits_until <= later + LOOK_EVERY);
        table.set(rated([(26, 1_000_000_000)]));
        let from = waits_until.max(later);
        assert_near(rates(&mut paces, from, time, 26)[0], 1_000_000_000, 60);
        table.set([]);
        assert_eq!(paces[0].admits(from + time, &path(26), 9999), 9999);
    }

    #[test]
    fn a_wrong_bucket_stops_nobody_for_long() {
        let folder = Folder::new("wrong");
        let table = folder.table();
        table.set(rated([(26, 100_000_000)]));
        folder.buckets().get().0[26].full_at.store(u64::MAX, Ordering::Relaxed);
        let mut paces = [folder.paces()];
        let time = Duration::from_millis(1_000);
        assert_near(rates(&mut paces, START, time, 26)[0], 100_000_000, 60);
        // One that could be true is waited for.
        let from = START + time;
        let soon = from.as_nanos() + depth_ns(100_000_000, 0) + 5_000_000;
        folder.buckets().get().0[26].full_at.store(soon, Ordering::Relaxed);
        assert_eq!(send(&mut paces[0], from, 26), 0);
        assert_near(rates(&mut paces, from, time, 26)[0], 100_000_000, 60);
    }

    /// Whoever may write the buckets may truncate them: with a mapping, a read behind their end is a SIGBUS.
    #[test]
    fn the_agent_survives_buckets_that_are_truncated_and_replaces_them() {
        let (folder, table) = gated("truncated", 0);
        let mut paces = folder.paces();
        assert!(tries(&mut paces, ms(130), 26));
        assert_eq!((table.exchanges(26).begun, table.sent_bytes(26)), (1, BYTES));
        assert!(!table.mend().expect("it can be looked at"));
        for (len, at) in [(26 * 64 + 8, 230), (0, 330)] {
            let buckets = OpenOptions::new().write(true).open(folder.0.join("buckets"));
            buckets.and_then(|file| file.set_len(len)).expect("it is ours");
            assert_eq!((table.exchanges(26), table.sent_bytes(26)), (Exchanges::default(), 0));
            assert_eq!(table.exchanges(200), Exchanges::default());
            assert!(table.mend().expect("the folder is ours"));
            assert!(tries(&mut paces, ms(at), 26), "senders find the new ones");
            assert_eq!((table.exchanges(26).begun, table.sent_bytes(26)), (1, BYTES));
        }
    }

    #[test]
    fn a_burst_makes_a_bucket_deeper_within_bounds() {
        let folder = Folder::new("burst");
        let table = folder.table();
        // In bytes of a pace of 1 Gbit/s: 2 ms, 5 ms, and 10 ms however much is asked for.
        let bursts = [(0, 250_000), (625_000, 625_000), (u64::MAX, 1_250_000)];
        for (round, (burst_bytes, wanted)) in (0..).zip(bursts) {
            table.set([(26, Pace { bps: 1_000_000_000, burst_bytes })]);
            let later = START + Duration::from_millis(100 * round);
            let bytes = send(&mut folder.paces(), later, 26) * BYTES;
            assert_near(bytes, wanted, 30);
        }
    }

    // ---- gates ---------------------------------------------------------------------------------

    /// Times are 30, 130, 230 ms and so on of Unix time.
    const GATE: Gate = Gate {
        period_ns: 100_000_000,
        shift_ns: 30_000_000,
        tolerance_ns: 5_000_000,
        quiet_ns: 20_000_000,
    };

    /// A folder whose DSCP 26 has the gate. Unix time is the monotonic clock's and this.
    fn gated(name: &str, unix_offset_ns: u64) -> (Folder, PaceTable) {
        let folder = Folder::new(name);
        let table = folder.table();
        table.set_unix_offset(unix_offset_ns);
        table.set_gates([(26, GATE)]);
        (folder, table)
    }

    fn ms(ms: u64) -> Time {
        START + Duration::from_millis(ms)
    }

    /// Sends a packet if that is admitted.
    fn tries(paces: &mut Paces, now: Time, dscp: u8) -> bool {
        let is_admitted = paces.admits(now, &path(dscp), 1) == 1;
        if is_admitted {
            paces.sent(now, &[frame(dscp)]);
        }
        is_admitted
    }

    /// When a queue pair sends that wants to from `now` on and asks again when it is told to; and how often it asked.
    fn begins(paces: &mut Paces, mut now: Time) -> (Time, u32) {
        for asked in 1..100 {
            if tries(paces, now, 26) {
                return (now, asked);
            }
            let next = paces.next_wakeup().expect("it waits");
            assert!(next > now, "it spins");
            now = next;
        }
        panic!("it never begins");
    }

    #[test]
    fn an_exchange_begins_on_time_a_little_late_or_a_period_later() {
        // START is 0 of Unix time, in the first case.
        for (ahead, offset) in [(0, 0), (20, 20_000_000), (90, 90_000_000)] {
            let (folder, table) = gated("on-time", offset);
            let mut paces = folder.paces();
            // In milliseconds of Unix time: wanted, and begun.
            let wanted = [(130, 130), (235, 235), (336, 430), (510, 530), (629, 630), (630, 630)];
            for (round, (wants, at)) in (0..).zip(wanted) {
                let base = 1_000 * (round + 1) - ahead;
                let (began, asked) = begins(&mut paces, ms(base + wants));
                assert_eq!(began, ms(base + at), "wanted at {wants}");
                assert!(asked <= 3, "it asks every {LOOK_EVERY:?}");
            }
            assert_eq!(paces.gate_held(), 4);
            assert_eq!(
                table.exchanges(26),
                Exchanges { begun: 6, waited_ns: 115_000_000, late: 2 }
            );
        }
    }

    #[test]
    fn an_exchange_that_takes_longer_is_not_cut_and_the_next_one_waits() {
        let (folder, table) = gated("longer", 0);
        let mut paces = folder.paces();
        assert!(tries(&mut paces, ms(130), 26));
        // Through the times of two periods, with pauses that are shorter than quiet.
        for at in (148..400).step_by(18) {
            assert!(tries(&mut paces, ms(at), 26), "{at} ms");
        }
        assert_eq!(table.exchanges(26).begun, 1);
        assert_eq!(begins(&mut paces, ms(440)).0, ms(530));
        assert_eq!(table.exchanges(26), Exchanges { begun: 2, waited_ns: 90_000_000, late: 1 });
    }

    #[test]
    fn what_peers_have_begun_is_not_held_back() {
        let (folder, table) = gated("received", 0);
        let mut paces = folder.paces();
        let bit = |dscp: u8| 1 << dscp;
        // Whoever has only received so far knows of the gate, too.
        assert!(paces.watches(ms(10)) && folder.paces().watches(ms(10)));
        assert!(!tries(&mut paces, ms(60), 26));
        paces.received(ms(61), bit(27), &[]);
        assert!(paces.next_wakeup() > Some(ms(61)), "another job's");
        paces.received(ms(70), bit(26) | bit(63), &[]);
        assert_eq!(paces.next_wakeup(), Some(ms(70)), "who waits asks at once");
        assert!(tries(&mut paces, ms(70), 26));
        // So is what is to be acknowledged later, or by another process.
        let mut other = folder.paces();
        assert!(tries(&mut other, ms(85), 26));
        assert_eq!(table.exchanges(26), Exchanges { begun: 1, waited_ns: 10_000_000, late: 1 });
        assert_eq!(table.exchanges(27), Exchanges::default());
    }

    #[test]
    fn whoever_was_heard_is_answered_whatever_its_dscp() {
        let (folder, table) = gated("answers", 0);
        let mut paces = folder.paces();
        assert!(!tries(&mut paces, ms(60), 26));
        let other = IpAddr::from([10, 0, 0, 2]);
        paces.received(ms(61), 0, &[other]);
        assert!(!tries(&mut paces, ms(62), 26), "somebody else was heard");
        paces.received(ms(63), 0, &[path(26).remote.ip(), other]);
        assert_eq!(paces.next_wakeup(), Some(ms(63)), "who waits asks at once");
        assert!(tries(&mut paces, ms(64), 26));
        assert_eq!(table.exchanges(26).begun, 1);
        assert!(!tries(&mut paces, ms(104), 26), "that was long ago");
        let many: Vec<IpAddr> = (0..200).map(|at| IpAddr::from([10, 0, 1, at])).collect();
        many.chunks(PEERS_AT_ONCE).for_each(|some| paces.received(ms(105), 0, some));
        assert_eq!(paces.heard.len(), MAX_HEARD);
    }

    #[test]
    fn gates_without_an_agent_open_in_the_end() {
        let (folder, table) = gated("alone", 0);
        let mut paces = folder.paces();
        let followed = Time::from_nanos(table.rates.get().followed_at.load(Ordering::Relaxed));
        let at = |ms: u64| {
            // At 60 ms after a time, so that it is closed.
            let period = GATE.period_ns;
            let from = (followed + Duration::from_millis(ms)).as_nanos() / period * period;
            Time::from_nanos(from + GATE.shift_ns + 60_000_000)
        };
        assert!(!tries(&mut paces, at(59_000), 26));
        assert!(tries(&mut paces, at(60_200), 26));
        table.follow_clock();
        assert_eq!(table.gate(26), Some(GATE), "it is still there for an agent that comes back");
    }

    #[test]
    fn a_gate_follows_a_clock_that_is_set() {
        let (folder, table) = gated("stepped", 0);
        let mut paces = folder.paces();
        assert!(!tries(&mut paces, ms(140), 26));
        // It was to begin at 230; 200 is now 230. Who waits notices when it looks.
        table.set_unix_offset(30_000_000);
        let at = paces.next_wakeup().expect("it waits");
        assert!(at <= ms(140) + LOOK_EVERY);
        assert_eq!(begins(&mut paces, at).0, ms(200));
        // Monotonic time may be ahead of Unix time, too.
        table.set_unix_offset(0u64.wrapping_sub(45_000_000));
        assert_eq!(begins(&mut paces, ms(300)).0, ms(375));
    }

    #[test]
    fn processes_begin_an_exchange_together() {
        let (folder, table) = gated("processes", 0);
        let mut all: Vec<Paces> = (0..5).map(|_| folder.paces()).collect();
        for (at, paces) in (150..).zip(&mut all) {
            assert!(!tries(paces, ms(at), 26));
        }
        // One is on time. The others are woken late, each in its exchange.
        for (at, paces) in [231, 240, 255, 270, 288].into_iter().zip(&mut all) {
            assert!(tries(paces, ms(at), 26), "{at} ms");
        }
        // From the first that waited to the first that sent.
        assert_eq!(table.exchanges(26), Exchanges { begun: 1, waited_ns: 81_000_000, late: 1 });
        assert!(all.iter_mut().all(|paces| !tries(paces, ms(320), 26)));
    }

    /// Processes read their clocks at the beginning of a round, and write what they send at its end.
    #[test]
    fn who_read_its_clock_before_another_wrote_is_in_the_same_exchange() {
        let (folder, table) = gated("behind", 0);
        let (mut ahead, mut behind) = (folder.paces(), folder.paces());
        for at in (130..200).step_by(10) {
            assert!(tries(&mut ahead, ms(at + 1), 26));
            assert!(tries(&mut behind, ms(at), 26), "{at} ms");
        }
        assert_eq!(table.exchanges(26), Exchanges { begun: 1, waited_ns: 0, late: 0 });
        let active_at = folder.buckets().get().0[26].active_at.load(Ordering::Relaxed);
        assert_eq!(active_at, ms(191).as_nanos(), "it never goes back");
    }

    #[test]
    fn impossible_instants_and_waits_of_the_dead_are_not_believed() {
        let (folder, table) = gated("believed", 0);
        let mut paces = folder.paces();
        let buckets = folder.buckets();
        let bucket = &buckets.get().0[26];
        bucket.active_at.store(u64::MAX, Ordering::Relaxed);
        assert!(!tries(&mut paces, ms(160), 26), "nothing is active in the future");
        assert!(tries(&mut paces, ms(230), 26));
        bucket.held_at.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(begins(&mut paces, ms(320)).0, ms(330));
        // Somebody waits and is killed; the next one is on time much later.
        assert!(!tries(&mut folder.paces(), ms(380), 26));
        assert!(tries(&mut paces, ms(930), 26));
        let Exchanges { begun, waited_ns, late } = table.exchanges(26);
        assert_eq!((begun, late), (3, 1));
        assert_eq!(waited_ns, 10_000_000);
    }

    #[test]
    fn whoever_is_not_seen_waits_a_tenth_of_its_periods_at_most() {
        let (folder, table) = gated("unseen", 0);
        fs::remove_file(folder.0.join("buckets")).expect("it is ours");
        fs::create_dir(folder.0.join("buckets")).expect("it is ours");
        let mut paces = folder.paces();
        // Each wants to begin 120 ms after the one before, and misses its time by 20.
        let (mut now, mut waited_ms) = (ms(140), 0);
        for round in 0..300 {
            let began = begins(&mut paces, now).0;
            let wait_ms = began.since(now).as_nanos() / 1_000_000;
            assert!(
                round >= JUDGED_EXCHANGES || wait_ms == if round == 0 { 90 } else { 80 },
                "{round}: {wait_ms}"
            );
            waited_ms += wait_ms;
            assert!(tries(&mut paces, began + Duration::from_millis(15), 26));
            now = began + Duration::from_millis(120);
        }
        assert!((90 + 31 * 80..=300 * 10 + 100).contains(&waited_ms), "{waited_ms} ms");
        assert_eq!(table.exchanges(26), Exchanges::default());
    }

    #[test]
    fn who_was_held_back_and_is_gone_wakes_nobody() {
        let (folder, _table) = gated("gone", 0);
        let mut paces = folder.paces();
        assert!(!tries(&mut paces, ms(60), 26));
        let at = paces.next_wakeup().expect("it waits");
        // Its queue pair is destroyed meanwhile, and only receives.
        paces.lapse(at);
        assert_eq!(paces.next_wakeup(), None);
        assert!(!tries(&mut paces, at + Duration::from_millis(1), 26));
        paces.received(at + Duration::from_millis(2), 1 << 26, &[]);
        paces.lapse(at + Duration::from_millis(3));
        assert_eq!(paces.next_wakeup(), None);
    }

    #[test]
    fn senders_follow_to_other_buckets() {
        let (folder, table) = gated("followed", 0);
        let mut paces = folder.paces();
        assert!(tries(&mut paces, ms(130), 26));
        assert_eq!(table.exchanges(26).begun, 1);
        drop(table);
        fs::remove_file(folder.0.join("buckets")).expect("it is ours");
        // Another look, before there are others.
        assert!(tries(&mut paces, ms(230), 26));
        let table = folder.table();
        table.set_unix_offset(0);
        assert!(tries(&mut paces, ms(330), 26));
        assert_eq!(table.exchanges(26).begun, 1, "the agent sees what they do");
    }

    #[test]
    fn gates_come_and_go_and_those_that_stay_are_left_alone() {
        let (folder, table) = gated("gates", 0);
        let mut paces = folder.paces();
        assert!(!tries(&mut paces, ms(160), 26));
        assert!(tries(&mut paces, ms(160), 27), "another job has none");
        let other = Gate { period_ns: 50_000_000, ..GATE };
        table.set_gates([(26, GATE), (27, other), (64, GATE), (28, Gate { period_ns: 0, ..GATE })]);
        assert_eq!(
            [26, 27, 28, 64].map(|dscp| table.gate(dscp)),
            [Some(GATE), Some(other), None, None]
        );
        assert!(!tries(&mut paces, ms(161), 26) && !tries(&mut paces, ms(195), 27));
        drop(table);
        let table = folder.table();
        assert_eq!(table.gate(26), Some(GATE), "it is in force without its agent");
        // What it said of the clock is, too, until the next one reads it.
        table.set_unix_offset(0);
        table.set_gates([]);
        assert!(tries(&mut paces, ms(198), 26) && !paces.watches(ms(198)));
        assert_eq!(folder.paces().admits(ms(198), &path(26), 70), 70);
    }

    #[test]
    fn one_agent_keeps_a_folder() {
        let folder = Folder::new("lock");
        let table = folder.table();
        let second = PaceTable::open(&folder.0).expect_err("it is kept");
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
        let own = format!("process {} (", std::process::id());
        assert!(second.to_string().starts_with(&own), "{second}");
        drop(table);
        folder.table();
    }

    #[test]
    fn a_lock_of_the_folder_itself_keeps_no_agent_out() {
        let folder = Folder::new("stranger");
        drop(folder.table());
        // Whoever may list the folder can lock it.
        let stranger = File::open(&folder.0).expect("everyone may read it");
        stranger.try_lock().expect("nobody else has it");
        let _table = folder.table();
        let mode = fs::metadata(folder.0.join("lock")).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn buckets_that_may_not_be_written_are_replaced_by_own_ones() {
        let folder = Folder::new("readable");
        folder.table().set(rated([(26, 100_000_000)]));
        // A folder in their place cannot be written by root either.
        fs::remove_file(folder.0.join("buckets")).expect("it is ours");
        fs::create_dir(folder.0.join("buckets")).expect("it is ours");
        let mut both = [folder.paces(), folder.paces()];
        let each = rates(&mut both, START, Duration::from_millis(1_000), 26);
        assert_near(each[0], 100_000_000, 60);
        assert_near(each[1], 100_000_000, 60);
    }

    #[test]
    fn files_survive_the_agent_and_wrong_ones_are_replaced() {
        let folder = Folder::new("again");
        folder.table().set(rated([(26, 7), (63, 9), (64, 11)]));
        let before = fs::metadata(folder.0.join("rates")).expect("it is there").ino();
        let table = folder.table();
        assert_eq!((table.bps(26), table.bps(63), table.bps(64), table.bps(0)), (7, 9, 0, 0));
        assert_eq!(fs::metadata(folder.0.join("rates")).expect("it is there").ino(), before);
        drop(table);
        let older: Vec<u8> =
            b"dqpaces1".iter().copied().chain([7; FILE_BYTES as usize - 8]).collect();
        for content in [&b"short"[..], &[0; FILE_BYTES as usize], &older] {
            fs::write(folder.0.join("rates"), content).expect("it is ours");
            assert_eq!(folder.paces().admits(START, &path(26), 5000), 5000, "nothing is believed");
            assert_eq!(folder.table().bps(26), 0);
        }
        let mode = |name: &str| {
            fs::metadata(folder.0.join(name)).expect("it is there").permissions().mode() & 0o777
        };
        assert_eq!((mode("rates"), mode("buckets")), (0o644, 0o660));
        assert_eq!(fs::read_dir(&folder.0).expect("a folder").count(), 3, "and the lock");
    }
}
