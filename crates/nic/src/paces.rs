//! What each job of this machine may send, as its agent says: a pace for each DSCP, kept by all processes together.
//!
//! The queues of a port divide what its machine sends, but not what takes another way (AF_XDP), and what waits in
//! them has left its sender already. So the wires of this crate hold packets back themselves. The agent keeps a folder with two
//! files of a page each:
//!
//! | file | content | written by |
//! |---|---|---|
//! | `rates` | bits per second by DSCP, 0 for no limit | the agent, word by word in place |
//! | `buckets` | by DSCP, when its bucket is full again, and the bytes sent since the file was made | every process that sends |
//!
//! A bucket is one number, as in the generic cell rate algorithm: the time at which it will be full. Sending adds the time that the
//! bytes take at the pace; a packet is admitted while that time is at most [`DEPTH`] ahead. All processes use the same
//! buckets, so their sum keeps the pace however many there are and whoever of them has something to send; a process that is
//! killed leaves nothing behind but that time. A bucket that is further ahead than a burst can have made it is not believed.
//!
//! Who may write `buckets` can slow its machine's other jobs down, so only the owner and the group of the folder may. A process that may
//! not keeps the pace by itself, with buckets of its own: the sum is then up to the queues of the port. Without the folder nothing
//! is limited. Wires look for it, and for another one in its place, every [`LOOK_EVERY`] while they send; a pace that changes in
//! it holds from the next packet on.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path as FilePath, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use roce::world::{Path, TxFrame};
use roce::{Duration, Time};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Environment variable with the folder; empty for no paces.
pub const VARIABLE: &str = "DQUANT_PACES";

/// The folder, unless the environment names another.
pub const FOLDER: &str = "/run/dquant/paces";

/// How often a wire that sends looks whether there is a folder, and the longest that a queue pair waits without a look.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a bucket holds when it is full: the longest that one who slept too long can make up for.
pub const DEPTH: Duration = Duration::from_millis(2);

/// And never less than a segmented send.
const LEAST_DEPTH_BYTES: u64 = 64 << 10;

/// What senders can have sent beyond an empty bucket: bursts of many queue pairs, admitted at one time.
const MOST_DEBT_BYTES: u64 = 1 << 20;

/// A packet as it is admitted, before it is known: the largest.
const PACKET_BYTES: u64 = 4096 + 100;

/// DiffServ codepoints.
const CODE_POINTS: usize = 64;

/// Bytes of a file.
const FILE_BYTES: u64 = 4096;

/// First word of `rates`.
const MAGIC: u64 = u64::from_ne_bytes(*b"dqpaces1");

/// Ethernet, IP and UDP headers of a packet: what a queue of the port counts.
const HEADER_BYTES_V4: u64 = 14 + 20 + 8;
const HEADER_BYTES_V6: u64 = 14 + 40 + 8;

#[derive(Debug)]
#[repr(C, align(4096))]
struct Rates {
    magic: AtomicU64,
    bps: [AtomicU64; CODE_POINTS],
}

/// On a cache line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Bucket {
    /// In nanoseconds of the monotonic clock.
    full_at: AtomicU64,
    bytes: AtomicU64,
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
    /// Device and inode of `rates`.
    identity: (u64, u64),
}

impl Table {
    fn open(folder: &FilePath) -> io::Result<Table> {
        let file = File::open(folder.join("rates"))?;
        let found = file.metadata()?;
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
        Ok(Table { rates, buckets, identity: (found.dev(), found.ino()) })
    }

    fn bps(&self, dscp: usize) -> u64 {
        self.rates.get().bps[dscp].load(Ordering::Relaxed)
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
    /// How often a queue pair was held back.
    held: u64,
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
        Paces { folder, look_at, table: None, waits_until: None, granted: (0, 0), held: 0 }
    }

    /// How often a queue pair was held back.
    pub(crate) fn held(&self) -> u64 {
        self.held
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

    /// What was admitted and not sent is not any more.
    #[inline]
    pub(crate) fn lapse(&mut self) {
        self.granted = (0, 0);
    }

    /// When packets that were not admitted may be.
    pub(crate) fn next_wakeup(&self) -> Option<Time> {
        self.waits_until
    }

    #[cold]
    fn look(&mut self, now: Time) {
        self.look_at = now + LOOK_EVERY;
        let Some(folder) = &self.folder else { return };
        let found = fs::metadata(folder.join("rates")).ok();
        let identity = found.map(|found| (found.dev(), found.ino()));
        if identity != self.table.as_ref().map(|table| table.identity) {
            self.table = Table::open(folder).ok();
            self.waits_until = None;
        }
    }

    fn admits_paced(&mut self, now: Time, path: &Path, packets: usize) -> usize {
        let Some(table) = &self.table else { return packets };
        let dscp = usize::from(path.dscp) % CODE_POINTS;
        let bps = table.bps(dscp);
        if bps == 0 {
            return packets;
        }
        let (granted_to, granted) = self.granted;
        let granted = if granted_to == dscp { granted } else { 0 };
        let packet_ns = cost_ns(PACKET_BYTES, bps);
        let depth_ns = depth_ns(bps);
        let full_at = table.bucket(dscp).full_at.load(Ordering::Relaxed);
        let taken = believed(full_at, now, bps).saturating_add(granted);
        let room = (now.as_nanos() + depth_ns).saturating_sub(taken);
        let admitted = usize::try_from(room / packet_ns).unwrap_or(usize::MAX).min(packets);
        if admitted == 0 {
            self.held += 1;
            // Half a bucket at once, so that packets leave in segmented sends.
            let half = Time::from_nanos(taken.saturating_sub(depth_ns / 2)).min(now + LOOK_EVERY);
            self.waits_until = Some(half.max(now + Duration::from_nanos(1)));
            return 0;
        }
        self.granted = (dscp, granted + admitted as u64 * packet_ns);
        admitted
    }

    fn book(&mut self, now: Time, frames: &[TxFrame<'_>]) {
        self.granted = (0, 0);
        self.waits_until = self.waits_until.filter(|at| *at > now);
        let Some(table) = &self.table else { return };
        for run in frames.chunk_by(|a, b| a.path.dscp == b.path.dscp) {
            let dscp = usize::from(run[0].path.dscp) % CODE_POINTS;
            let (bucket, bps) = (table.bucket(dscp), table.bps(dscp));
            let bytes = run.iter().map(wire_bytes).sum();
            bucket.bytes.fetch_add(bytes, Ordering::Relaxed);
            if bps > 0 {
                let taken = |full_at| Some(believed(full_at, now, bps) + cost_ns(bytes, bps));
                let _ = bucket.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
            }
        }
    }
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

fn depth_ns(bps: u64) -> u64 {
    cost_ns(LEAST_DEPTH_BYTES, bps).max(DEPTH.as_nanos())
}

/// When a bucket is full: not before now, and now where it is further ahead than all bursts can have made it.
fn believed(full_at: u64, now: Time, bps: u64) -> u64 {
    let most = now.as_nanos() + depth_ns(bps) + cost_ns(MOST_DEBT_BYTES, bps);
    if full_at > most { now.as_nanos() } else { full_at.max(now.as_nanos()) }
}

// ---- setting paces -----------------------------------------------------------------------------------

/// The agent's side. Paces stay in force when it is dropped.
#[derive(Debug)]
pub struct PaceTable {
    rates: Mapped<Rates>,
    buckets: Mapped<Buckets>,
}

impl PaceTable {
    /// Opens the folder's files, and makes what is missing: readable by everyone, `buckets` writable by the owner and the
    /// folder's group. Files of another form are replaced.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn open(folder: &FilePath) -> io::Result<PaceTable> {
        fs::create_dir_all(folder)?;
        let group = fs::metadata(folder)?.gid();
        let rates: Mapped<Rates> = match mapped::<Rates>(&folder.join("rates")) {
            Ok(found) if found.get().magic.load(Ordering::Acquire) == MAGIC => found,
            _ => make(folder, "rates", 0o644, group, &MAGIC.to_ne_bytes())?,
        };
        let buckets = match mapped(&folder.join("buckets")) {
            Ok(found) => found,
            Err(_) => make(folder, "buckets", 0o660, group, &[])?,
        };
        Ok(PaceTable { rates, buckets })
    }

    /// Sets all paces, in bits per second by DSCP; DSCPs that are not named have none. Values above 63 are ignored.
    pub fn set(&mut self, paces: impl IntoIterator<Item = (u8, u64)>) {
        let mut wanted = [0; CODE_POINTS];
        for (dscp, bps) in paces {
            if let Some(place) = wanted.get_mut(usize::from(dscp)) {
                *place = bps;
            }
        }
        for (place, bps) in self.rates.get().bps.iter().zip(wanted) {
            place.store(bps, Ordering::Relaxed);
        }
    }

    /// The pace of a DSCP; 0 if it has none.
    pub fn bps(&self, dscp: u8) -> u64 {
        self.rates.get().bps.get(usize::from(dscp)).map_or(0, |bps| bps.load(Ordering::Relaxed))
    }

    /// Bytes that processes with the right to write the buckets have sent with a DSCP since the file was made, Ethernet headers
    /// included.
    pub fn sent_bytes(&self, dscp: u8) -> u64 {
        let bucket = self.buckets.get().0.get(usize::from(dscp));
        bucket.map_or(0, |bucket| bucket.bytes.load(Ordering::Relaxed))
    }
}

fn mapped<T>(path: &FilePath) -> io::Result<Mapped<T>> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    Mapped::new(&file, ProtFlags::READ | ProtFlags::WRITE)
}

/// Makes a file under another name, and moves it to its place when it is complete.
fn make<T>(
    folder: &FilePath,
    name: &str,
    mode: u32,
    group: u32,
    start: &[u8],
) -> io::Result<Mapped<T>> {
    let draft = folder.join(format!("{name}.{}", std::process::id()));
    let _ = fs::remove_file(&draft);
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&draft)?;
    let made = (|| {
        file.set_len(FILE_BYTES)?;
        io::Write::write_all(&mut &file, start)?;
        chown(&draft, None, Some(group))?;
        fs::set_permissions(&draft, fs::Permissions::from_mode(mode))?;
        let mapped = Mapped::new(&file, ProtFlags::READ | ProtFlags::WRITE)?;
        fs::rename(&draft, folder.join(name))?;
        Ok(mapped)
    })();
    if made.is_err() {
        let _ = fs::remove_file(&draft);
    }
    made
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
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
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
        folder.table().set([(26, 1_000_000)]);
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
        let mut table = folder.table();
        for bps in [10_000_000, 1_000_000_000, 40_000_000_000] {
            table.set([(26, bps)]);
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
        folder.table().set([(26, 1_000_000)]);
        let mut paces = folder.paces();
        send(&mut paces, START, 26);
        assert_eq!(paces.admits(START, &path(26), 8), 0);
        assert_eq!(paces.admits(START, &path(27), 100_000), 100_000);
    }

    #[test]
    fn a_changed_pace_holds_from_the_next_packet() {
        let folder = Folder::new("changes");
        let mut table = folder.table();
        table.set([(26, 1_000_000)]);
        let mut paces = [folder.paces()];
        let time = Duration::from_millis(500);
        rates(&mut paces, START, time, 26);
        // The debt of the slow pace is no debt of the fast one; waiting ends at the next look.
        let later = START + time;
        let waits_until = paces[0].next_wakeup().expect("it waits");
        assert!(waits_until <= later + LOOK_EVERY);
        table.set([(26, 1_000_000_000)]);
        let from = waits_until.max(later);
        assert_near(rates(&mut paces, from, time, 26)[0], 1_000_000_000, 60);
        table.set([]);
        assert_eq!(paces[0].admits(from + time, &path(26), 9999), 9999);
    }

    #[test]
    fn a_wrong_bucket_stops_nobody_for_long() {
        let folder = Folder::new("wrong");
        let mut table = folder.table();
        table.set([(26, 100_000_000)]);
        table.buckets.get().0[26].full_at.store(u64::MAX, Ordering::Relaxed);
        let mut paces = [folder.paces()];
        let time = Duration::from_millis(1_000);
        assert_near(rates(&mut paces, START, time, 26)[0], 100_000_000, 60);
        // One that could be true is waited for.
        let from = START + time;
        let soon = from.as_nanos() + depth_ns(100_000_000) + 5_000_000;
        table.buckets.get().0[26].full_at.store(soon, Ordering::Relaxed);
        assert_eq!(send(&mut paces[0], from, 26), 0);
        assert_near(rates(&mut paces, from, time, 26)[0], 100_000_000, 60);
    }

    #[test]
    fn buckets_that_may_not_be_written_are_replaced_by_own_ones() {
        let folder = Folder::new("readable");
        folder.table().set([(26, 100_000_000)]);
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
        folder.table().set([(26, 7), (63, 9), (64, 11)]);
        let before = fs::metadata(folder.0.join("rates")).expect("it is there").ino();
        let table = folder.table();
        assert_eq!((table.bps(26), table.bps(63), table.bps(64), table.bps(0)), (7, 9, 0, 0));
        assert_eq!(fs::metadata(folder.0.join("rates")).expect("it is there").ino(), before);
        drop(table);
        for content in [&b"short"[..], &[0; FILE_BYTES as usize]] {
            fs::write(folder.0.join("rates"), content).expect("it is ours");
            assert_eq!(folder.paces().admits(START, &path(26), 5000), 5000, "nothing is believed");
            assert_eq!(folder.table().bps(26), 0);
        }
        let mode = |name: &str| {
            fs::metadata(folder.0.join(name)).expect("it is there").permissions().mode() & 0o777
        };
        assert_eq!((mode("rates"), mode("buckets")), (0o644, 0o660));
        assert_eq!(fs::read_dir(&folder.0).expect("a folder").count(), 2);
    }
}
