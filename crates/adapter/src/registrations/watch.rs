//! Learns from the kernel when watched memory is unmapped, discarded or moved.
//!
//! A userfaultfd watches ranges in write-protect mode, and nothing is ever write-protected:
//! accesses cost nothing, but the kernel reports each `munmap`, `MADV_DONTNEED`, `mremap`,
//! shrinking heap and mapping over the range, also those inside libc's `free`. The thread that does
//! it waits in the kernel until its event has been read.
//!
//! - The monitor thread reads an event and marks the ranges it meets as stale under one lock, which
//!   [`Watch::holds`] takes, too.
//! - That is not enough: between the kernel's unmapping and its event, another thread may map the
//!   same address and ask. So `holds` also asks the kernel whether a change is under way, and then
//!   does not say yes.
//! - Nothing is allocated, freed or unmapped under the lock, nor by the monitor at any time: a heap
//!   that shrinks would wait for the monitor, and the monitor for the lock.
//! - Only private anonymous memory is watched. A file can be truncated through any descriptor,
//!   without an event.
//! - Not noticed: guard pages (`MADV_GUARD_INSTALL`) that were put over a range and taken away. And
//!   `MADV_DONTNEED` is reported before the pages go, so a watch that begins meanwhile may be of
//!   the old ones.
//! - A forked child is not watched, and its `holds` never says yes. It must neither read the events
//!   of its parent nor stop the parent's monitor.
//!
//! What is registered, and what happens when a range is stale, does not belong here.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use libc::{c_int, c_void};
use thiserror::Error;

use nic::clock::page_bytes;
use nic::mappings::Mappings;
use nic::userfault::{self, control};

/// Most ranges watched at a time.
pub const MAX_WATCHED: usize = 1024;

/// How often [`Watch::holds`] asks while a change is under way, giving up the processor in between.
const ASKED: u32 = 64;

/// Seconds that the first event may take on a loaded machine.
const PATIENCE_S: u32 = 30;

const FEATURES: u64 =
    userfault::FEATURE_REMAP | userfault::FEATURE_REMOVE | userfault::FEATURE_UNMAP;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

/// Why memory cannot be watched.
#[derive(Debug, Error)]
pub enum WatchError {
    /// A system call failed, at the start.
    #[error(
        "{call}: {source}; hint: Linux 5.11 or later, and a seccomp profile that allows userfaultfd"
    )]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The kernel does not tell whether a change is under way, as [`Watch::holds`] needs it.
    #[error("the kernel does not report changes of mappings as expected")]
    Unreliable,
}

/// Why one range is not watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unwatched {
    /// [`MAX_WATCHED`] ranges are watched.
    #[error("{MAX_WATCHED} ranges are watched already")]
    Full,
    /// It is not mapped, or its end is beyond the address space.
    #[error("the range is not mapped")]
    NotMapped,
    /// It is not private anonymous memory, as that of `malloc` is.
    #[error("the range is a file, shared or of huge pages")]
    Kind,
    /// Another userfaultfd of the process watches it.
    #[error("another userfaultfd watches the range")]
    Busy,
    /// This process is a fork of the one that opened the watch.
    #[error("the process was forked")]
    Forked,
    /// The kernel refused for another reason.
    #[error("the kernel refused, errno {0}")]
    Refused(i32),
}

/// A watched range, named by its place in the table. Give it back to [`Watch::end`].
#[derive(Debug, PartialEq, Eq)]
pub struct Watched(usize);

/// Whole pages, and whether something happened to them.
#[derive(Clone, Copy, Debug)]
struct Slot {
    first: u64,
    end: u64,
    is_stale: bool,
}

/// The table of watched ranges. It never grows after it was made.
#[derive(Debug)]
struct Slots {
    table: Vec<Option<Slot>>,
    /// Ranges that became stale so far.
    marked: u64,
    /// The monitor runs, and has used everything that a thread sets up at its first use.
    is_monitored: bool,
}

impl Slots {
    fn mark(&mut self, first: u64, end: u64) {
        let hit = |slot: &&mut Slot| slot.first < end && first < slot.end && !slot.is_stale;
        for slot in self.table.iter_mut().flatten().filter(hit) {
            slot.is_stale = true;
            self.marked += 1;
        }
    }

    fn note(&mut self, fd: RawFd, event: Event) {
        self.mark(event.first, event.end);
        // Pages that moved take the watch along.
        if let Some((first, end)) = event.moved {
            self.mark(first, end);
            self.unwatch(fd, first, end);
        }
    }

    /// Ends the watch on the pages that no range of the table needs.
    fn unwatch(&self, fd: RawFd, first: u64, end: u64) {
        let mut from = first;
        while from < end {
            let others = self.table.iter().flatten().filter(|other| other.end > from);
            let next = others.min_by_key(|other| other.first);
            let until = next.map_or(end, |other| other.first.clamp(from, end));
            if from < until {
                unregister(fd, from, until);
            }
            from = next.map_or(end, |other| other.end);
        }
    }
}

/// What happened, and to which pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Event {
    first: u64,
    end: u64,
    /// Where the pages are now.
    moved: Option<(u64, u64)>,
}

/// A page that is zero in a forked child.
#[derive(Debug)]
struct ForkMark(NonNull<AtomicU64>);

// SAFETY: an atomic number.
unsafe impl Send for ForkMark {}
// SAFETY: as above.
unsafe impl Sync for ForkMark {}

impl ForkMark {
    fn new() -> Result<ForkMark, WatchError> {
        let page = map_page()?;
        // SAFETY: the page that was just mapped.
        let wiped =
            unsafe { libc::madvise(page.as_ptr(), page_bytes() as usize, libc::MADV_WIPEONFORK) };
        let failed = io::Error::last_os_error();
        let mark = ForkMark(page.cast());
        if wiped != 0 {
            return Err(WatchError::System { call: "MADV_WIPEONFORK", source: failed });
        }
        mark.word().store(1, Ordering::Relaxed);
        Ok(mark)
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: a mapped page of zeroes, which lives as long as `self` and is used only as this
        // number.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for ForkMark {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, and this is its last user.
        unsafe { libc::munmap(self.0.as_ptr().cast(), page_bytes() as usize) };
    }
}

/// Watches memory of this process. Several caches share one: the kernel allows one watch for each
/// range.
#[derive(Debug)]
pub struct Watch {
    slots: Arc<Mutex<Slots>>,
    /// Owned by the monitor, which closes it when it ends.
    fd: RawFd,
    stop: OwnedFd,
    monitor: Option<JoinHandle<()>>,
    mark: ForkMark,
}

fn lock(slots: &Mutex<Slots>) -> MutexGuard<'_, Slots> {
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    /// Starts the monitor, after a test that the kernel reports changes as it should.
    ///
    /// # Errors
    /// When the kernel or a seccomp profile refuses userfaultfd, or does not behave as needed.
    pub fn open() -> Result<Watch, WatchError> {
        let mark = ForkMark::new()?;
        let fd = check(open_userfaultfd()?)?;
        // SAFETY: no arguments but numbers.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        let stop = owned("eventfd", stop)?;
        let table = vec![None; MAX_WATCHED];
        let slots = Arc::new(Mutex::new(Slots { table, marked: 0, is_monitored: false }));
        let (raw, halt, shared) = (fd.as_raw_fd(), stop.as_raw_fd(), Arc::clone(&slots));
        let started = thread::Builder::new()
            .name("dquant-watch".to_owned())
            .spawn(move || monitor(fd, halt, &shared));
        let monitor = started.map_err(|source| WatchError::System { call: "thread", source })?;
        while !lock(&slots).is_monitored {
            thread::yield_now();
        }
        Ok(Watch { slots, fd: raw, stop, monitor: Some(monitor), mark })
    }

    /// Watches the pages of `addr .. addr + len`. Whoever registers them does so afterwards, and
    /// asks [`holds`](Watch::holds) once more before it relies on them.
    ///
    /// # Errors
    /// Why the range cannot be watched; nothing is left behind then.
    pub fn begin(&self, addr: u64, len: u64) -> Result<Watched, Unwatched> {
        if self.is_forked() {
            return Err(Unwatched::Forked);
        }
        let (first, end) = pages(addr, len).ok_or(Unwatched::NotMapped)?;
        let watched = self.take_slot(first, end).ok_or(Unwatched::Full)?;
        let mut range = [first, end - first, userfault::MODE_WRITE_PROTECT, 0];
        if let Err(errno) = control(self.fd, userfault::REGISTER, &mut range) {
            // Nothing is watched that was not before. Unwatching could end the watch of somebody
            // else.
            lock(&self.slots).table[watched.0] = None;
            return Err(match errno {
                libc::EBUSY => Unwatched::Busy,
                libc::ENOMEM => Unwatched::NotMapped,
                // Holes and special mappings alike.
                libc::EINVAL => check_kind(first, end).err().unwrap_or(Unwatched::Kind),
                errno => Unwatched::Refused(errno),
            });
        }
        if let Err(reason) = check_kind(first, end) {
            self.end(watched);
            return Err(reason);
        }
        Ok(watched)
    }

    /// Whether the range still has the pages that it had when the watch began. Also `false` when
    /// that cannot be known now: the process was forked, or some mapping is changing and its event
    /// was not read in time.
    pub fn holds(&self, watched: &Watched) -> bool {
        if self.is_forked() {
            return false;
        }
        for _ in 0..ASKED {
            let slots = lock(&self.slots);
            // Under the lock: an event that was read has been marked.
            if state(self.fd) == State::Quiet {
                return slots.table[watched.0].is_some_and(|slot| !slot.is_stale);
            }
            drop(slots);
            thread::yield_now();
        }
        false
    }

    /// Whether something was reported about the range. Cheaper than [`holds`](Watch::holds), and no
    /// proof that it holds.
    pub fn is_stale(&self, watched: &Watched) -> bool {
        lock(&self.slots).table[watched.0].is_some_and(|slot| slot.is_stale)
    }

    /// Ends a watch. Pages that other ranges need stay watched.
    pub fn end(&self, watched: Watched) {
        if self.is_forked() {
            return;
        }
        let mut slots = lock(&self.slots);
        if let Some(slot) = slots.table[watched.0].take() {
            slots.unwatch(self.fd, slot.first, slot.end);
        }
    }

    /// How many watched ranges became stale so far. While it stays the same, none did.
    pub fn marked(&self) -> u64 {
        lock(&self.slots).marked
    }

    fn take_slot(&self, first: u64, end: u64) -> Option<Watched> {
        let mut slots = lock(&self.slots);
        let free = slots.table.iter().position(Option::is_none)?;
        slots.table[free] = Some(Slot { first, end, is_stale: false });
        Some(Watched(free))
    }

    fn is_forked(&self) -> bool {
        self.mark.word().load(Ordering::Relaxed) == 0
    }
}

impl Drop for Watch {
    /// Ends all watches before the monitor ends: a forked child may hold the descriptor, and then
    /// closing it would leave threads of this process waiting for a reader.
    fn drop(&mut self) {
        let monitor = self.monitor.take();
        if self.is_forked() {
            std::mem::forget(monitor);
            return;
        }
        let mut slots = lock(&self.slots);
        for place in 0..MAX_WATCHED {
            if let Some(slot) = slots.table[place].take() {
                slots.unwatch(self.fd, slot.first, slot.end);
            }
        }
        drop(slots);
        while state(self.fd) == State::Changing {
            thread::yield_now();
        }
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight bytes of this stack, to our own descriptor.
        unsafe { libc::write(self.stop.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        if let Some(monitor) = monitor {
            let _ = monitor.join();
        }
    }
}

/// The whole pages that contain a range.
fn pages(addr: u64, len: u64) -> Option<(u64, u64)> {
    let page = page_bytes();
    let end = addr.checked_add(len)?.checked_next_multiple_of(page)?;
    (len > 0).then_some((addr / page * page, end))
}

fn owned(call: &'static str, fd: c_int) -> Result<OwnedFd, WatchError> {
    if fd < 0 {
        return Err(WatchError::System { call, source: io::Error::last_os_error() });
    }
    // SAFETY: the call has just returned it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn open_userfaultfd() -> Result<OwnedFd, WatchError> {
    userfault::open(libc::O_NONBLOCK, FEATURES)
        .map_err(|(call, source)| WatchError::System { call, source })
}

/// Ends the watch on pages. A part that was mapped anew may refuse it for all of them, so then each
/// is asked alone.
fn unregister(fd: RawFd, first: u64, end: u64) {
    if control(fd, userfault::UNREGISTER, &mut [first, end - first]).is_ok() {
        return;
    }
    let page = page_bytes();
    for one in (first..end).step_by(page as usize) {
        // A page that is not mapped any more refuses, rightly.
        let _ = control(fd, userfault::UNREGISTER, &mut [one, page]);
    }
}

/// What the kernel tells about changes of watched mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Every change has been read.
    Quiet,
    /// Some change was not read, or was read just now.
    Changing,
    Unknown,
}

/// An empty range is refused as invalid, but only after the kernel has looked whether anything
/// changes; [`check`] tests that it does.
fn state(fd: RawFd) -> State {
    match control(fd, userfault::WRITE_PROTECT, &mut [0; 3]) {
        Err(libc::EINVAL) => State::Quiet,
        Err(libc::EAGAIN) => State::Changing,
        _ => State::Unknown,
    }
}

fn next_event(fd: RawFd) -> Option<Event> {
    // `struct uffd_msg`: an event type in the first byte, then three words.
    let mut message = [0_u64; 4];
    let bytes = size_of_val(&message);
    // SAFETY: the buffer is on this stack.
    let read = unsafe { libc::read(fd, message.as_mut_ptr().cast(), bytes) };
    if read != bytes as isize {
        return None;
    }
    let [head, a, b, c] = message;
    Some(match head.to_ne_bytes()[0] {
        // From, to, length.
        EVENT_REMAP => {
            let end = |first: u64| first.saturating_add(c);
            Event { first: a, end: end(a), moved: Some((b, end(b))) }
        }
        EVENT_REMOVE | EVENT_UNMAP => Event { first: a, end: b, moved: None },
        // None was asked for: whatever it is, nothing is certain any more.
        _ => Event { first: 0, end: u64::MAX, moved: None },
    })
}

fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// An interrupted or failed wait is a wake-up for nothing.
fn wait(fds: &mut [libc::pollfd], timeout_ms: c_int) {
    // SAFETY: a list of this stack.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
}

/// The monitor. It must not allocate, free or unmap: it would wait for itself.
fn monitor(fd: OwnedFd, stop: RawFd, slots: &Mutex<Slots>) {
    block_signals();
    lock(slots).is_monitored = true;
    loop {
        let mut fds = [readable(fd.as_raw_fd()), readable(stop)];
        wait(&mut fds, -1);
        let mut slots = lock(slots);
        while let Some(event) = next_event(fd.as_raw_fd()) {
            slots.note(fd.as_raw_fd(), event);
        }
        drop(slots);
        if fds[1].revents != 0 {
            return;
        }
    }
}

/// A handler of the program could free memory, and would run on the monitor.
fn block_signals() {
    // SAFETY: a set on this stack, filled before it is used; only this thread's mask changes.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
    }
}

fn map_page() -> Result<NonNull<c_void>, WatchError> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let page = unsafe { libc::mmap(ptr::null_mut(), page_bytes() as usize, access, flags, -1, 0) };
    let failed = WatchError::System { call: "mmap", source: io::Error::last_os_error() };
    NonNull::new(page).filter(|_| page != libc::MAP_FAILED).ok_or(failed)
}

/// Tests on a page of its own that a change is visible from the event until it was read, and that
/// it then ends.
fn check(fd: OwnedFd) -> Result<OwnedFd, WatchError> {
    let (raw, bytes) = (fd.as_raw_fd(), page_bytes() as usize);
    let first = map_page()?.as_ptr().expose_provenance();
    let unmap = move || {
        let page = ptr::with_exposed_provenance_mut::<c_void>(first);
        // SAFETY: the page that was just mapped, which only this function knows.
        unsafe { libc::munmap(page, bytes) };
    };
    let mut range = [first as u64, bytes as u64, userfault::MODE_WRITE_PROTECT, 0];
    if let Err(errno) = control(raw, userfault::REGISTER, &mut range) {
        unmap();
        let source = io::Error::from_raw_os_error(errno);
        return Err(WatchError::System { call: "UFFDIO_REGISTER", source });
    }
    let before = state(raw);
    // If no thread can be started, the page stays, and the watch on it ends with the descriptor.
    let unmapping = thread::Builder::new().spawn(unmap);
    let unmapping = unmapping.map_err(|source| WatchError::System { call: "thread", source })?;
    let mut pending = [readable(raw)];
    for _ in 0..PATIENCE_S {
        wait(&mut pending, 1_000);
        if pending[0].revents != 0 {
            break;
        }
    }
    let during = state(raw);
    let expected = Event { first: first as u64, end: (first + bytes) as u64, moved: None };
    if next_event(raw) != Some(expected) {
        // The other thread may still wait for a reader: closing frees it.
        drop(fd);
        let _ = unmapping.join();
        return Err(WatchError::Unreliable);
    }
    let _ = unmapping.join();
    let works = [before, during, state(raw)] == [State::Quiet, State::Changing, State::Quiet];
    if works { Ok(fd) } else { Err(WatchError::Unreliable) }
}

/// Whether all the pages are private and anonymous.
fn check_kind(first: u64, end: u64) -> Result<(), Unwatched> {
    let mut from = first;
    for mapping in Mappings::now().map_err(|_| Unwatched::Kind)?.iter() {
        if mapping.end <= from || from >= end {
            continue;
        }
        if mapping.first > from {
            break;
        }
        if !mapping.is_private_anonymous() {
            return Err(Unwatched::Kind);
        }
        from = mapping.end;
    }
    if from >= end { Ok(()) } else { Err(Unwatched::NotMapped) }
}
