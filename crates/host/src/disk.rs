//! The disk: reads from files into registered memory through an io_uring.
//!
//! One ring serves one thread. Reads wait until [`UringDisk::flush`] or the next [`Disk::poll`]
//! hands the next few of them to the kernel ([`FLUSH_BYTES`]); the ring's descriptor is readable
//! when one has ended, so a thread can sleep on it beside a socket.
//!
//! - The memory is registered with the ring, so the kernel pins it once and not for every read.
//!   Where that is refused (locked-memory limit) reads use ordinary addresses, and
//!   [`UringDisk::why_unregistered`] reports why.
//! - Destinations are checked against the memory and direct reads against [`DIRECT_ALIGN`]; a read
//!   that fails a check completes with a fault and never reaches the kernel.
//! - A short read is continued until the file ends.
//! - The disk holds the owner of the memory: it is unmapped only after the last read has ended,
//!   even when the pool that it belongs to is dropped first.
//! - Reads under way are bounded by the depth. A file stays open while reads on it are under way.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use thiserror::Error;
use xio::disk::{Change, DIRECT_ALIGN, Disk, DiskDone, DiskFault, DiskRead, FileId};
use xio::opener::Stored;

use crate::root::{IoMode, OpenFile, Stamp, set_direct};

/// Most reads under way in one ring.
pub const MAX_DEPTH: u32 = 4096;

/// Most files open in one ring.
pub const MAX_FILES: usize = 65_536;

/// Longest single buffer that a ring registers; larger memory is registered in pieces.
const FIXED_BYTES: u64 = 1 << 30;

/// Bytes of reads handed to the kernel in one call, if more than one read waits. It copies what is
/// in the page cache during the call: this much is still in the processor's cache when the read is
/// reaped.
pub const FLUSH_BYTES: u64 = 256 << 10;

/// Most threads of the kernel that wait for reads which cannot be begun without waiting. A hung
/// file system keeps each of its reads on one: with fewer threads than reads (the kernel's limit is
/// four for each processor), it would stop reads of other file systems, too.
const MAX_WORKERS: u32 = 512;

/// How often a read that makes no progress is retried before it counts as a fault.
const MAX_RETRIES: u8 = 64;

/// Why a ring or a file of it could not be opened.
#[derive(Debug, Error)]
pub enum DiskError {
    /// No io_uring.
    #[error("no io_uring: {source}; hint: {hint}")]
    Unavailable {
        /// The kernel's error.
        source: io::Error,
        /// What to try.
        hint: &'static str,
    },
    /// A depth of zero or beyond [`MAX_DEPTH`].
    #[error("queue depth {0} is not in 1..={MAX_DEPTH}")]
    BadDepth(u32),
    /// The file's length cannot be determined.
    #[error("length of the file: {0}")]
    Stat(#[source] io::Error),
    /// The file can no longer be read directly.
    #[error("switching the file to direct reads: {0}")]
    Direct(#[source] io::Error),
    /// [`MAX_FILES`] are open, or all numbers are used up.
    #[error("{0} files are open, which is the limit")]
    TooManyFiles(usize),
    /// No such file.
    #[error("file {0} is not open")]
    NoFile(u32),
    /// No timer to wait with.
    #[error("no timer: {0}")]
    Timer(#[source] io::Error),
    /// The file is of a place that another kind of disk reads.
    #[error("this disk reads no files of that place")]
    Foreign,
    /// Reads on the file are under way.
    #[error("file {file}: {reads} reads are in progress")]
    Busy {
        /// The file.
        file: u32,
        /// How many.
        reads: u32,
    },
}

/// Counters of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes that they read.
    pub bytes: u64,
    /// Reads that ended with an error of the kernel.
    pub faults: u64,
    /// Reads refused before submission: misaligned, outside the memory, no such file.
    pub refused: u64,
    /// Continuations of short reads.
    pub short_reads: u64,
    /// Retries of reads that had been interrupted.
    pub retried: u64,
    /// Calls that submitted reads to the kernel.
    pub syscalls: u64,
    /// Submissions that the kernel refused; they are retried.
    pub submit_errors: u64,
    /// Files that were opened for direct reads.
    pub files_direct: u64,
    /// Files that were opened for buffered reads.
    pub files_buffered: u64,
}

/// The memory that reads may fill: a range of addresses and its owner, which keeps it mapped.
#[derive(Clone, Debug)]
pub struct DiskMemory {
    base: u64,
    len: u64,
    is_registered: bool,
    owner: Arc<dyn Any + Send + Sync>,
}

impl DiskMemory {
    /// The `len` bytes at address `base`.
    ///
    /// # Safety
    /// The range is mapped and writable for as long as `owner` lives. Nothing in this process holds
    /// a reference into the destination of a read from [`Disk::submit`] until it completes.
    pub unsafe fn new(base: u64, len: u64, owner: Arc<dyn Any + Send + Sync>) -> DiskMemory {
        DiskMemory { base, len, is_registered: true, owner }
    }

    /// The same memory, which is not to be registered: that would make every page of it present.
    #[must_use]
    pub fn on_demand(self) -> DiskMemory {
        DiskMemory { is_registered: false, ..self }
    }

    /// Copies what was read to the destination of a read that a disk has accepted and not completed
    /// yet. Returns false, and copies nothing, where that is not in the memory.
    pub(crate) fn fill(&self, addr: u64, from: &[u8]) -> bool {
        let is_inside = self.contains(addr, from.len() as u64);
        if is_inside {
            // SAFETY: the range is mapped and writable while the owner lives (`new`), which `self`
            // holds. As the destination of a read under way it belongs to the disk, so nobody has
            // a reference into it; `from` is a reference, and so not in it.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), addr as *mut u8, from.len()) };
        }
        is_inside
    }

    fn contains(&self, addr: u64, len: u64) -> bool {
        addr.checked_sub(self.base)
            .and_then(|at| at.checked_add(len))
            .is_some_and(|end| end <= self.len)
    }
}

/// A [`Disk`] as an engine's thread uses it: it takes over open files, and wakes the thread.
pub trait FileDisk: Disk + Send + 'static {
    /// Takes over a file of the place that this disk reads from. Its changes are noticed.
    ///
    /// # Errors
    /// When the file is of another place, or too many are open.
    fn add_stored(&mut self, file: Box<dyn Stored>) -> Result<FileId, DiskError>;

    /// Removes a file on which no read is under way. What is returned may take long to drop.
    ///
    /// # Errors
    /// When reads on it are under way, or there is no such file.
    fn remove_stored(&mut self, id: FileId) -> Result<Box<dyn Any + Send>, DiskError>;

    /// Starts the next waiting reads. Returns whether it started any.
    fn flush(&mut self) -> bool;

    /// Readable when a read has ended.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The counters of the disk.
    fn counters(&self) -> &DiskCounters;

    /// What people should know of how it reads.
    fn note(&self) -> Option<String>;
}

/// An open file.
#[derive(Debug)]
struct File {
    fd: OwnedFd,
    mode: IoMode,
    /// Length when it was added; reads that stop there are complete.
    size: u64,
    /// Its record when it was opened, where changes are to be noticed.
    stamp: Option<Stamp>,
    reads: u32,
}

/// A read under way.
#[derive(Clone, Copy, Debug)]
struct Active {
    read: DiskRead,
    /// Bytes read so far.
    done: u32,
    retries: u8,
}

/// A [`Disk`] on an io_uring.
pub struct UringDisk {
    /// Before the memory, so that it is closed first.
    ring: IoUring,
    memory: DiskMemory,
    why_unregistered: Option<String>,
    files: BTreeMap<FileId, File>,
    next_file: u32,
    /// By the user data of the ring's entries.
    active: Vec<Option<Active>>,
    free: Vec<u32>,
    /// Reads that failed a check and wait to be reported; with the active ones never more than the
    /// depth.
    refused: VecDeque<DiskDone>,
    /// Slots of reads to be put into the submission queue.
    waiting: VecDeque<u32>,
    /// Entries in the submission queue that have not been submitted.
    unsubmitted: usize,
    counters: DiskCounters,
}

impl UringDisk {
    /// A ring of `depth` reads into `memory`.
    pub fn new(memory: DiskMemory, depth: u32) -> Result<UringDisk, DiskError> {
        if depth == 0 || depth > MAX_DEPTH {
            return Err(DiskError::BadDepth(depth));
        }
        let ring = IoUring::new(depth).map_err(unavailable)?;
        // Kernels before 5.15 keep their own limit.
        let _ = ring.submitter().register_iowq_max_workers(&mut [depth.min(MAX_WORKERS), 0]);
        let why_unregistered = match memory.is_registered {
            true => register(&ring, &memory).err(),
            false => Some(String::from("its pages become present when they are used")),
        };
        Ok(UringDisk {
            ring,
            memory,
            why_unregistered,
            files: BTreeMap::new(),
            next_file: 0,
            active: vec![None; depth as usize],
            free: (0..depth).rev().collect(),
            refused: VecDeque::with_capacity(depth as usize),
            waiting: VecDeque::with_capacity(depth as usize),
            unsubmitted: 0,
            counters: DiskCounters::default(),
        })
    }

    /// Takes over an open file. `mode` says whether it is read with O_DIRECT.
    pub fn add_file(&mut self, fd: OwnedFd, mode: IoMode) -> Result<FileId, DiskError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| DiskError::Stat(errno.into()))?;
        let regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        // The length of anything else is unknown: reads find its end.
        let size = if regular { stat.st_size.max(0) as u64 } else { u64::MAX };
        self.add(File { fd, mode, size, stamp: None, reads: 0 })
    }

    /// Takes over a file that was opened below a root, by system calls that do not block. Its
    /// changes are noticed.
    pub fn add_open(&mut self, file: OpenFile) -> Result<FileId, DiskError> {
        let OpenFile { fd, size, stamp, mode, .. } = file;
        match mode {
            IoMode::Direct => self.counters.files_direct += 1,
            IoMode::Buffered => self.counters.files_buffered += 1,
        }
        self.add(File { fd, mode, size, stamp: Some(stamp), reads: 0 })
    }

    fn add(&mut self, file: File) -> Result<FileId, DiskError> {
        if self.files.len() >= MAX_FILES || self.next_file == u32::MAX {
            return Err(DiskError::TooManyFiles(self.files.len()));
        }
        if file.mode == IoMode::Direct {
            set_direct(&file.fd, true).map_err(DiskError::Direct)?;
        }
        let id = FileId(self.next_file);
        self.next_file += 1;
        self.files.insert(id, file);
        Ok(id)
    }

    /// Removes a file on which no read is under way.
    pub fn remove_file(&mut self, id: FileId) -> Result<OwnedFd, DiskError> {
        if let Some(&File { reads: reads @ 1.., .. }) = self.files.get(&id) {
            return Err(DiskError::Busy { file: id.0, reads });
        }
        self.files.remove(&id).map(|file| file.fd).ok_or(DiskError::NoFile(id.0))
    }

    /// Submits the next waiting reads to the kernel, up to [`FLUSH_BYTES`]. Returns whether it
    /// accepted any.
    pub fn flush(&mut self) -> bool {
        self.push_waiting();
        let before = self.unsubmitted;
        while self.unsubmitted > 0 {
            self.counters.syscalls += 1;
            match self.ring.submit() {
                Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken.max(1)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // Out of memory or of completion space for the moment: the next call retries.
                    self.counters.submit_errors += 1;
                    break;
                }
            }
        }
        self.unsubmitted < before
    }

    /// Readable when a read has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// The counters of the disk.
    pub fn counters(&self) -> &DiskCounters {
        &self.counters
    }

    /// Reads accepted and not completed yet.
    pub fn in_flight(&self) -> usize {
        self.active.len() - self.free.len() + self.refused.len()
    }

    /// Why the kernel pins the destination for each read separately, if it does.
    pub fn why_unregistered(&self) -> Option<&str> {
        self.why_unregistered.as_deref()
    }

    /// The errno of a read that is refused before submission.
    fn check(&self, read: &DiskRead) -> Result<(), i32> {
        let file = self.files.get(&read.file).ok_or(libc::EBADF)?;
        let end = read.offset.checked_add(u64::from(read.len)).ok_or(libc::EINVAL)?;
        if end > i64::MAX as u64 {
            return Err(libc::EINVAL);
        }
        if !self.memory.contains(read.addr, u64::from(read.len)) {
            return Err(libc::EFAULT);
        }
        let aligned = (read.offset | u64::from(read.len) | read.addr).is_multiple_of(DIRECT_ALIGN);
        if file.mode == IoMode::Direct && !aligned { Err(libc::EINVAL) } else { Ok(()) }
    }

    /// Puts what is left of the waiting reads into the submission queue, up to [`FLUSH_BYTES`].
    fn push_waiting(&mut self) {
        let mut bytes = 0;
        while bytes < FLUSH_BYTES
            && let Some(slot) = self.waiting.pop_front()
            && let Some(active) = self.active[slot as usize]
        {
            let Some(file) = self.files.get(&active.read.file) else {
                let done = self.finish(slot, active.read, fault(libc::EBADF));
                self.refused.push_back(done);
                continue;
            };
            let entry = self.entry(file.fd.as_raw_fd(), &active).user_data(u64::from(slot));
            // SAFETY: the destination lies in the memory (`check`), which this disk keeps mapped
            // until the read completes; until then it belongs to the disk by the contract of
            // `Disk`. The descriptor is open: `remove_file` refuses while reads on the file are
            // under way.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            if pushed.is_err() {
                // The queue has room for as many entries as there are slots.
                return self.waiting.push_front(slot);
            }
            self.unsubmitted += 1;
            bytes += u64::from(active.read.len - active.done);
        }
    }

    fn entry(&self, fd: i32, active: &Active) -> squeue::Entry {
        let Active { read, done, .. } = active;
        let (addr, len) = (read.addr + u64::from(*done), read.len - done);
        let offset = read.offset + u64::from(*done);
        let place = addr - self.memory.base;
        let buffer = place / FIXED_BYTES;
        let whole = place % FIXED_BYTES + u64::from(len) <= FIXED_BYTES;
        if self.why_unregistered.is_none() && whole {
            let read = opcode::ReadFixed::new(types::Fd(fd), addr as *mut u8, len, buffer as u16);
            read.offset(offset).build()
        } else {
            opcode::Read::new(types::Fd(fd), addr as *mut u8, len).offset(offset).build()
        }
    }

    /// Handles one completion of the kernel: the read either ends or continues.
    fn advance(&mut self, slot: u32, result: i32) -> Option<DiskDone> {
        let active = self.active.get_mut(slot as usize)?.as_mut()?;
        let outcome = step(active, self.files.get(&active.read.file), result);
        let read = active.read;
        match outcome {
            Step::Over(result) => return Some(self.finish(slot, read, result)),
            Step::Again => self.counters.retried += 1,
            Step::Continue => self.counters.short_reads += 1,
        }
        self.waiting.push_front(slot);
        None
    }

    fn finish(&mut self, slot: u32, read: DiskRead, result: Result<u32, DiskFault>) -> DiskDone {
        self.active[slot as usize] = None;
        self.free.push(slot);
        if let Some(file) = self.files.get_mut(&read.file) {
            file.reads -= 1;
        }
        match result {
            Ok(bytes) => {
                self.counters.reads += 1;
                self.counters.bytes += u64::from(bytes);
            }
            Err(_) => self.counters.faults += 1,
        }
        DiskDone { tag: read.tag, result }
    }

    /// The next read that has ended, without submitting anything.
    fn reap(&mut self) -> Option<DiskDone> {
        loop {
            let entry = self.ring.completion().next()?;
            let done = self.advance(entry.user_data() as u32, entry.result());
            if done.is_some() {
                return done;
            }
        }
    }

    /// Waits until the kernel has stopped writing. False when that cannot be awaited.
    fn settle(&mut self) -> bool {
        while self.free.len() + self.waiting.len() < self.active.len() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => while self.reap().is_some() {},
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl Disk for UringDisk {
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead> {
        if self.in_flight() >= self.active.len() {
            return Err(read);
        }
        let Some(slot) = self.free.pop() else {
            return Err(read);
        };
        let active = Active { read, done: 0, retries: 0 };
        if let Err(errno) = self.check(&read) {
            self.free.push(slot);
            self.counters.refused += 1;
            self.refused.push_back(DiskDone { tag: read.tag, result: fault(errno) });
            return Ok(());
        }
        self.active[slot as usize] = Some(active);
        self.waiting.push_back(slot);
        if let Some(file) = self.files.get_mut(&read.file) {
            file.reads += 1;
        }
        Ok(())
    }

    fn poll(&mut self) -> Option<DiskDone> {
        loop {
            if let Some(done) = self.refused.pop_front().or_else(|| self.reap()) {
                return Some(done);
            }
            if !self.flush() {
                return None;
            }
        }
    }

    fn len_now(&self, file: FileId) -> Option<u64> {
        let stat = rustix::fs::fstat(&self.files.get(&file)?.fd).ok()?;
        u64::try_from(stat.st_size).ok()
    }

    fn change(&self, file: FileId) -> Option<Change> {
        let file = self.files.get(&file)?;
        let then = file.stamp?;
        // A server of the network that has lost the file says so.
        Stamp::of(&file.fd).map_or(Some(Change::Removed), |now| then.change(&now))
    }
}

impl FileDisk for UringDisk {
    fn add_stored(&mut self, file: Box<dyn Stored>) -> Result<FileId, DiskError> {
        let file: Box<dyn Any> = file;
        let file = file.downcast::<OpenFile>().map_err(|_| DiskError::Foreign)?;
        self.add_open(*file)
    }

    fn remove_stored(&mut self, id: FileId) -> Result<Box<dyn Any + Send>, DiskError> {
        Ok(Box::new(self.remove_file(id)?))
    }

    fn flush(&mut self) -> bool {
        UringDisk::flush(self)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        UringDisk::fd(self)
    }

    fn counters(&self) -> &DiskCounters {
        UringDisk::counters(self)
    }

    fn note(&self) -> Option<String> {
        self.why_unregistered().map(|why| format!("unregistered buffers ({why})"))
    }
}

impl Drop for UringDisk {
    fn drop(&mut self) {
        if !self.settle() {
            // It is unknown when the kernel stops writing, so the memory must stay mapped for good.
            std::mem::forget(Arc::clone(&self.memory.owner));
        }
    }
}

impl fmt::Debug for UringDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringDisk")
            .field("files", &self.files.len())
            .field("in_flight", &self.in_flight())
            .field("why_unregistered", &self.why_unregistered)
            .finish_non_exhaustive()
    }
}

/// What a completion of the kernel means for its read.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// The read has ended.
    Over(Result<u32, DiskFault>),
    /// The rest has to be read.
    Continue,
    /// Nothing was read yet; retry.
    Again,
}

/// Applies `result`, a byte count or a negative errno.
fn step(active: &mut Active, file: Option<&File>, result: i32) -> Step {
    let Ok(bytes) = u32::try_from(result) else {
        let errno = result.saturating_neg();
        let transient = matches!(errno, libc::EINTR | libc::EAGAIN) && active.retries < MAX_RETRIES;
        active.retries = active.retries.saturating_add(1);
        return if transient { Step::Again } else { Step::Over(fault(errno)) };
    };
    active.retries = 0;
    active.done = active.done.saturating_add(bytes).min(active.read.len);
    let Active { read, done, .. } = *active;
    let (mode, size) = file.map_or((IoMode::Buffered, 0), |file| (file.mode, file.size));
    let at_end = bytes == 0 || read.offset + u64::from(done) >= size;
    // A misaligned short direct read has reached the end of a file that was truncated meanwhile.
    let off_grid = mode == IoMode::Direct && !u64::from(done).is_multiple_of(DIRECT_ALIGN);
    if done == read.len || at_end || off_grid { Step::Over(Ok(done)) } else { Step::Continue }
}

fn fault(errno: i32) -> Result<u32, DiskFault> {
    Err(DiskFault::Io(errno))
}

/// Creates a small ring and drops it: whether disks are usable on this machine.
///
/// # Errors
/// The kernel's refusal.
pub fn probe() -> io::Result<()> {
    IoUring::new(2).map(drop)
}

fn unavailable(source: io::Error) -> DiskError {
    let hint = match source.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel is older than 5.6 or was built without io_uring",
        Some(libc::EPERM | libc::EACCES) => {
            "allow it: sysctl kernel.io_uring_disabled=0, and in containers a seccomp profile with io_uring"
        }
        Some(libc::ENOMEM) => "raise the locked-memory limit (ulimit -l)",
        _ => "see io_uring_setup(2)",
    };
    DiskError::Unavailable { source, hint }
}

/// Registers the memory in pieces of [`FIXED_BYTES`], or returns why that failed.
fn register(ring: &IoUring, memory: &DiskMemory) -> Result<(), String> {
    let end = memory.base + memory.len;
    let pieces = (memory.base..end).step_by(FIXED_BYTES as usize).map(|start| libc::iovec {
        iov_base: start as *mut libc::c_void,
        iov_len: (end - start).min(FIXED_BYTES) as usize,
    });
    let pieces: Vec<libc::iovec> = pieces.collect();
    // SAFETY: the pieces tile the memory, which the disk keeps mapped for as long as the ring
    // exists.
    unsafe { ring.submitter().register_buffers(&pieces) }.map_err(|error| {
        let hint = match error.raw_os_error() {
            Some(libc::ENOMEM) => "; hint: raise the locked-memory limit (ulimit -l)",
            _ => "",
        };
        format!("the kernel would not register {} bytes: {error}{hint}", memory.len)
    })
}

#[cfg(test)]
mod tests;
