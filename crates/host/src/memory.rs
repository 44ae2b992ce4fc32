//! Datasets in memory: a place behind [`Opener`] and the [`Disk`] that reads it, both with faults.
//!
//! Engines run on it in tests, so that what they do when a place fails can be tried without one
//! that fails: files that change, vanish, end early, cannot be read, or take long. Nothing is kept
//! when the process ends, and no file system is touched.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use xio::disk::{Change, Disk, DiskDone, DiskFault, DiskRead, FileId};
use xio::opener::{
    Entry, Identity, IoChoice, Listing, OpenError, Opener, ReadError, Reason, Stored,
};

use crate::disk::{DiskCounters, DiskError, DiskMemory, FileDisk};

/// Named files in memory. Clones are the same place.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    names: BTreeMap<String, Arc<Mutex<Content>>>,
    /// Versions that were given so far.
    versions: u64,
    /// How long a read of a disk takes.
    delay: Duration,
}

/// What a file holds now. Open files see it change, as those of a file system do.
#[derive(Debug)]
struct Content {
    bytes: Vec<u8>,
    version: u64,
    is_removed: bool,
    /// Reads that touch this byte fail.
    bad_byte: Option<u64>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // No state is left half changed.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Content {
    /// The bytes from `offset` on, at most `len`.
    fn read(&self, offset: u64, len: u64) -> Result<&[u8], DiskFault> {
        let end = offset.saturating_add(len);
        if self.bad_byte.is_some_and(|byte| (offset..end).contains(&byte)) {
            return Err(DiskFault::Io(libc::EIO));
        }
        let clamp = |at: u64| at.min(self.bytes.len() as u64) as usize;
        Ok(&self.bytes[clamp(offset)..clamp(end)])
    }
}

impl MemoryStore {
    /// An empty place.
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// Writes a file, which may exist: then those who have opened it find it changed.
    pub fn put(&self, name: &str, bytes: impl Into<Vec<u8>>) {
        let mut state = lock(&self.0);
        state.versions += 1;
        let content = Content {
            bytes: bytes.into(),
            version: state.versions,
            is_removed: false,
            bad_byte: None,
        };
        match state.names.get(name) {
            Some(file) => *lock(file) = content,
            None => {
                state.names.insert(name.to_owned(), Arc::new(Mutex::new(content)));
            }
        }
    }

    /// Removes a file. Those who have opened it can read on.
    pub fn remove(&self, name: &str) {
        if let Some(file) = lock(&self.0).names.remove(name) {
            lock(&file).is_removed = true;
        }
    }

    /// Lets reads of a file end after `len` bytes, though its record stays what it was.
    pub fn cut(&self, name: &str, len: usize) {
        self.with(name, |content| content.bytes.truncate(len));
    }

    /// Lets reads of a file fail that touch this byte.
    pub fn spoil(&self, name: &str, byte: u64) {
        self.with(name, |content| content.bad_byte = Some(byte));
    }

    /// How long each read of a disk takes from now on.
    pub fn set_delay(&self, delay: Duration) {
        lock(&self.0).delay = delay;
    }

    fn with(&self, name: &str, change: impl FnOnce(&mut Content)) {
        if let Some(file) = lock(&self.0).names.get(name) {
            change(&mut lock(file));
        }
    }

    /// A disk for the files of this place: at most `depth` reads at a time, into `memory`.
    ///
    /// # Errors
    /// When the system has no timer.
    pub fn disk(&self, memory: DiskMemory, depth: u32) -> Result<MemoryDisk, DiskError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags);
        Ok(MemoryDisk {
            store: self.clone(),
            memory,
            depth: depth as usize,
            files: BTreeMap::new(),
            next_file: 0,
            pending: VecDeque::new(),
            timer: timer.map_err(|errno| DiskError::Timer(errno.into()))?,
            armed: None,
            counters: DiskCounters::default(),
        })
    }
}

impl Opener for MemoryStore {
    fn open(&self, name: &str, _io: IoChoice) -> Result<Box<dyn Stored>, OpenError> {
        match lock(&self.0).names.get(name) {
            Some(file) => {
                let (bytes, version) = {
                    let content = lock(file);
                    (content.bytes.len() as u64, content.version)
                };
                Ok(Box::new(MemoryFile { content: Arc::clone(file), bytes, version }))
            }
            None => Err(OpenError {
                reason: Reason::NotFound,
                source: format!("file {name:?} does not exist").into(),
            }),
        }
    }

    fn list(&self, limit: usize) -> Result<Listing, OpenError> {
        let state = lock(&self.0);
        let entry = |(name, file): (&String, &Arc<Mutex<Content>>)| Entry {
            name: name.clone(),
            size: lock(file).bytes.len() as u64,
        };
        Ok(Listing {
            entries: state.names.iter().take(limit).map(entry).collect(),
            truncated: state.names.len() > limit,
            skipped: 0,
        })
    }
}

/// An open file of a [`MemoryStore`].
#[derive(Debug)]
struct MemoryFile {
    content: Arc<Mutex<Content>>,
    bytes: u64,
    version: u64,
}

impl Stored for MemoryFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn identity(&self) -> Identity {
        Identity { place: 0, version: self.version }
    }

    fn change(&self) -> Option<Change> {
        let content = lock(&self.content);
        match content.is_removed {
            true => Some(Change::Removed),
            false if content.version == self.version => None,
            false => Some(Change::Written { len: content.bytes.len() as u64 }),
        }
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize, ReadError> {
        let content = lock(&self.content);
        let found = content.read(offset, into.len() as u64)?;
        into[..found.len()].copy_from_slice(found);
        Ok(found.len())
    }
}

/// A [`Disk`] for the files of a [`MemoryStore`].
#[derive(Debug)]
pub struct MemoryDisk {
    store: MemoryStore,
    memory: DiskMemory,
    depth: usize,
    files: BTreeMap<FileId, MemoryFile>,
    next_file: u32,
    /// With the instant at which each is due, in the order in which they were accepted.
    pending: VecDeque<(Instant, DiskRead)>,
    /// Expires when the first of them is due.
    timer: OwnedFd,
    armed: Option<Instant>,
    counters: DiskCounters,
}

impl MemoryDisk {
    fn carry_out(&mut self, read: &DiskRead) -> Result<u32, DiskFault> {
        let file = self.files.get(&read.file).ok_or(DiskFault::Io(libc::EBADF))?;
        let content = lock(&file.content);
        let found = content.read(read.offset, read.len.into())?;
        match self.memory.fill(read.addr, found) {
            true => Ok(found.len() as u32),
            false => Err(DiskFault::Io(libc::EFAULT)),
        }
    }

    /// Lets the timer expire when the first pending read is due, and not before.
    fn arm(&mut self) {
        let due = self.pending.front().map(|(due, _)| *due);
        if due == self.armed {
            return;
        }
        self.armed = due;
        // Nought would disarm it, which is meant only where nothing is pending.
        let left = due.map_or(Duration::ZERO, |due| {
            due.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1))
        });
        let value = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // It fails for invalid times only.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }
}

impl Disk for MemoryDisk {
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead> {
        if self.pending.len() >= self.depth {
            return Err(read);
        }
        let delay = lock(&self.store.0).delay;
        self.pending.push_back((Instant::now() + delay, read));
        Ok(())
    }

    fn poll(&mut self) -> Option<DiskDone> {
        let is_due = self.pending.front().is_some_and(|(due, _)| *due <= Instant::now());
        let (_, read) = match is_due {
            true => self.pending.pop_front()?,
            false => {
                self.arm();
                return None;
            }
        };
        let result = self.carry_out(&read);
        match result {
            Ok(bytes) => {
                self.counters.reads += 1;
                self.counters.bytes += u64::from(bytes);
            }
            Err(_) => self.counters.faults += 1,
        }
        Some(DiskDone { tag: read.tag, result })
    }

    fn len_now(&self, file: FileId) -> Option<u64> {
        Some(lock(&self.files.get(&file)?.content).bytes.len() as u64)
    }

    fn change(&self, file: FileId) -> Option<Change> {
        self.files.get(&file)?.change()
    }
}

impl FileDisk for MemoryDisk {
    fn add_stored(&mut self, file: Box<dyn Stored>) -> Result<FileId, DiskError> {
        let file: Box<dyn Any> = file;
        let file = file.downcast::<MemoryFile>().map_err(|_| DiskError::Foreign)?;
        let id = FileId(self.next_file);
        self.next_file += 1;
        self.counters.files_buffered += 1;
        self.files.insert(id, *file);
        Ok(id)
    }

    fn remove_stored(&mut self, id: FileId) -> Result<Box<dyn Any + Send>, DiskError> {
        match self.pending.iter().filter(|(_, read)| read.file == id).count() as u32 {
            0 => {}
            reads => return Err(DiskError::Busy { file: id.0, reads }),
        }
        let file = self.files.remove(&id).ok_or(DiskError::NoFile(id.0))?;
        Ok(Box::new(file))
    }

    fn flush(&mut self) -> bool {
        self.arm();
        false
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    fn counters(&self) -> &DiskCounters {
        &self.counters
    }

    fn note(&self) -> Option<String> {
        Some(String::from("memory"))
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    /// Memory to read into, and where it is.
    fn memory(bytes: usize) -> (DiskMemory, u64, Arc<Vec<std::sync::atomic::AtomicU8>>) {
        let owner: Arc<Vec<_>> =
            Arc::new(std::iter::repeat_with(Default::default).take(bytes).collect());
        let base = owner.as_ptr() as u64;
        // SAFETY: the atomics are mapped and writable while the owner lives, and tests look at them
        // only after a read has completed.
        (unsafe { DiskMemory::new(base, bytes as u64, owner.clone()) }, base, owner)
    }

    fn open(store: &MemoryStore, name: &str) -> Box<dyn Stored> {
        Opener::open(store, name, IoChoice::Auto).expect(name)
    }

    #[test]
    fn reads_end_with_the_file_and_faults_are_theirs() {
        let store = MemoryStore::new();
        store.put("a", *b"0123456789");
        let (memory, base, seen) = memory(16);
        let mut disk = store.disk(memory, 2).expect("a timer");
        let file = disk.add_stored(open(&store, "a")).expect("its own");
        let read = |offset, len, addr| DiskRead { file, offset, len, addr, tag: offset };
        disk.submit(read(2, 4, base)).expect("room");
        disk.submit(read(8, 4, base + 4)).expect("room");
        assert_eq!(disk.submit(read(0, 1, base)), Err(read(0, 1, base)), "it is full");
        assert!(matches!(disk.remove_stored(file), Err(DiskError::Busy { reads: 2, .. })));
        assert_eq!(disk.poll(), Some(DiskDone { tag: 2, result: Ok(4) }));
        assert_eq!(disk.poll(), Some(DiskDone { tag: 8, result: Ok(2) }));
        let text: Vec<u8> =
            seen[..6].iter().map(|byte| byte.load(std::sync::atomic::Ordering::Relaxed)).collect();
        assert_eq!((text.as_slice(), disk.poll()), (&b"234589"[..], None));
        store.spoil("a", 3);
        for (addr, errno) in [(base, libc::EIO), (base + 14, libc::EFAULT)] {
            let offset = if errno == libc::EIO { 0 } else { 4 };
            disk.submit(read(offset, 4, addr)).expect("room");
            assert_eq!(disk.poll().expect("due").result, Err(DiskFault::Io(errno)));
        }
        assert!(disk.remove_stored(file).is_ok() && disk.remove_stored(file).is_err());
        assert_eq!((disk.counters().reads, disk.counters().faults), (2, 2));
    }

    #[test]
    fn open_files_notice_what_happens_to_them() {
        let store = MemoryStore::new();
        store.put("a", *b"old");
        let (first, again) = (open(&store, "a"), open(&store, "a"));
        assert_eq!((first.identity(), first.change()), (again.identity(), None));
        store.put("a", *b"newer");
        assert_eq!(first.change(), Some(Change::Written { len: 5 }));
        let second = open(&store, "a");
        assert_ne!(first.identity(), second.identity());
        store.cut("a", 2);
        assert_eq!((second.bytes(), second.change()), (5, None), "its record says nothing");
        assert_eq!(second.read_at(&mut [0; 9], 0).expect("readable"), 2);
        store.remove("a");
        assert_eq!(second.change(), Some(Change::Removed));
        let gone = Opener::open(&store, "a", IoChoice::Auto).expect_err("gone");
        assert_eq!(gone.reason, Reason::NotFound);
        assert_eq!(store.list(9).expect("listed"), Listing::default());
    }

    #[test]
    fn a_slow_read_wakes_whoever_waits_for_it() {
        let store = MemoryStore::new();
        store.put("a", *b"0123456789");
        store.set_delay(Duration::from_millis(20));
        let (memory, addr, _seen) = memory(16);
        let mut disk = store.disk(memory, 2).expect("a timer");
        let file = disk.add_stored(open(&store, "a")).expect("its own");
        let began = Instant::now();
        disk.submit(DiskRead { file, offset: 0, len: 1, addr, tag: 0 }).expect("room");
        assert_eq!(disk.poll(), None);
        let mut fds = [PollFd::new(&disk, PollFlags::IN)];
        assert_eq!(poll(&mut fds, None).expect("a poll"), 1);
        assert!(began.elapsed() >= Duration::from_millis(20));
        assert!(disk.poll().is_some() && disk.poll().is_none());
        let mut fds = [PollFd::new(&disk, PollFlags::IN)];
        let no_time = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&no_time)).expect("a poll"), 0, "nothing is left");
    }

    impl AsFd for MemoryDisk {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.fd()
        }
    }
}
