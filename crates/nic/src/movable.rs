//! Ordinary memory of a program, moved into a file that neighbours may map, and back.
//!
//! The program keeps its addresses. What changes for it while its memory is in the file:
//!
//! - a forked child does not have these pages (`MADV_DONTFORK`): it would share them, and with them what `malloc` notes
//!   beside the program's bytes;
//! - `MADV_DONTNEED` does not clear pages of a file. Memory that its owner frees meanwhile is unmapped and comes back
//!   clear, but the pages stay in the file until the region ends;
//! - settings of the old pages are gone: locks, memory policies, huge pages.
//!
//! Other threads may go on. Whoever touches the memory while it is moved waits in the kernel, by userfaultfd. System calls
//! that use it at that moment fail with `EFAULT`, because only faults of user mode are allowed to wait (`vm.unprivileged_userfaultfd`).
//!
//! Only private anonymous memory moves, and neither heap nor stacks: a heap that shrinks and grows again relies on clear
//! pages, and a child needs its stack. [`registrations`](crate::registrations) watches memory; nothing here does. Regions and
//! keys do not belong here.

use std::fs;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, null_mut};

use libc::{c_int, c_ulong, c_void};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate,
    memfd_create,
};
use thiserror::Error;

use crate::clock::page_bytes;

/// Length of the file. It has no pages but those that were moved in.
pub const FILE_BYTES: u64 = 1 << 62;

/// Most ranges in the file.
const MAX_RANGES: usize = 1 << 12;

/// Ranges begin at multiples of this, so that one that grows by `mremap` meets clear pages and no other range.
const SPACING: u64 = 1 << 40;

/// `HEAP_MAX_SIZE` of glibc: where the heaps of its threads begin, and how much address space each has.
const THREAD_HEAP: u64 = 64 << 20;

/// Why memory stays where it is.
#[derive(Debug, Error)]
pub enum NotMoved {
    /// Not within one mapping that is private, anonymous, readable and writable.
    #[error("it is not private anonymous memory of one mapping")]
    Kind,
    /// On a heap or a stack.
    #[error("it is on a heap or a stack")]
    Heap,
    /// Some of its pages were moved with another region.
    #[error("it shares pages with another region")]
    Overlap,
    /// The program has closed the file's descriptor.
    #[error("the descriptor of the file was closed")]
    Closed,
    /// [`MAX_RANGES`].
    #[error("{MAX_RANGES} ranges are in the file already")]
    Full,
    /// A system call failed.
    #[error("{call}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
}

/// Whole pages of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pages {
    first: u64,
    end: u64,
}

impl Pages {
    fn around(addr: u64, len: u64) -> Option<Pages> {
        let page = page_bytes();
        let end = addr.checked_add(len)?.checked_next_multiple_of(page)?;
        let first = addr / page * page;
        (first < end).then_some(Pages { first, end })
    }

    fn len(self) -> usize {
        (self.end - self.first) as usize
    }

    fn at(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.first as usize)
    }

    fn contains(self, other: Pages) -> bool {
        self.first <= other.first && other.end <= self.end
    }

    fn meets(self, other: Pages) -> bool {
        self.first < other.end && other.first < self.end
    }
}

/// Pages in the file.
#[derive(Debug)]
struct Range {
    pages: Pages,
    offset: u64,
    users: usize,
}

/// See the module's text.
#[derive(Debug)]
pub struct Movable {
    /// A program may close all its descriptors, and others get the number.
    file: ManuallyDrop<OwnedFd>,
    device: u64,
    inode: u64,
    next_offset: u64,
    ranges: Vec<Range>,
}

impl Movable {
    /// A file without pages, after a test that memory moves there and back.
    ///
    /// # Errors
    /// When the kernel lacks something: Linux 5.14 has everything.
    pub fn new() -> Result<Movable, NotMoved> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("dquant-memory", flags).map_err(system("memfd_create"))?;
        ftruncate(&file, FILE_BYTES).map_err(system("ftruncate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(system("F_ADD_SEALS"))?;
        let found = fstat(&file).map_err(system("fstat"))?;
        let (device, inode, file) = (found.st_dev, found.st_ino, ManuallyDrop::new(file));
        let mut movable = Movable { file, device, inode, next_offset: 0, ranges: Vec::new() };
        movable.try_out()?;
        Ok(movable)
    }

    fn try_out(&mut self) -> Result<(), NotMoved> {
        let page = Mapping::anonymous(page_bytes() as usize)?;
        let pages = page.pages();
        let offset = self.next_offset;
        self.next_offset += SPACING;
        move_in(&self.file, pages, offset)?;
        move_back(&self.file, pages, offset)
    }

    /// The file, for others to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Moves the pages of `len` bytes at `addr` into the file, and returns where the first byte is in it. Undo each call that
    /// succeeded with [`move_back`](Movable::move_back).
    ///
    /// # Errors
    /// Why the memory stays where it is; nothing has changed then.
    pub fn move_in(&mut self, addr: u64, len: u64) -> Result<u64, NotMoved> {
        let pages = Pages::around(addr, len).ok_or(NotMoved::Kind)?;
        if let Some(range) = self.ranges.iter_mut().find(|range| range.pages.contains(pages)) {
            range.users += 1;
            return Ok(range.offset + (addr - range.pages.first));
        }
        if self.ranges.iter().any(|range| range.pages.meets(pages)) {
            return Err(NotMoved::Overlap);
        }
        if !self.is_open() {
            return Err(NotMoved::Closed);
        }
        if self.ranges.len() >= MAX_RANGES {
            return Err(NotMoved::Full);
        }
        let offset = self.next_offset;
        let taken = (pages.len() as u64).next_multiple_of(SPACING) + SPACING;
        let next = offset.checked_add(taken).filter(|next| *next <= FILE_BYTES);
        let next = next.ok_or(NotMoved::Full)?;
        check(&maps()?, pages)?;
        self.ranges.reserve(1);
        move_in(&self.file, pages, offset)?;
        self.next_offset = next;
        self.ranges.push(Range { pages, offset, users: 1 });
        Ok(offset + (addr - pages.first))
    }

    /// Ends one use of the pages of `len` bytes at `addr`. The last one makes them ordinary memory again, if the program has not
    /// unmapped them.
    pub fn move_back(&mut self, addr: u64, len: u64) {
        let Some(pages) = Pages::around(addr, len) else { return };
        let Some(at) = self.ranges.iter().position(|range| range.pages.contains(pages)) else {
            return;
        };
        self.ranges[at].users -= 1;
        if self.ranges[at].users > 0 {
            return;
        }
        let Range { pages, offset, .. } = self.ranges.swap_remove(at);
        if !self.is_open() {
            return;
        }
        match self.placed(pages, offset) {
            // Without memory for the copy, the program goes on with the pages of the file.
            Placed::Here => drop(move_back(&self.file, pages, offset)),
            Placed::Nowhere => punch(&self.file, offset, pages.len()),
            // The program has cut it up or moved it, and may use the pages.
            Placed::Elsewhere => {}
        }
    }

    /// Whether the descriptor is still the file's.
    fn is_open(&self) -> bool {
        fstat(&*self.file)
            .is_ok_and(|found| (found.st_dev, found.st_ino) == (self.device, self.inode))
    }

    /// Ranges in the file, and their bytes.
    pub fn ranges(&self) -> (usize, u64) {
        (self.ranges.len(), self.ranges.iter().map(|range| range.pages.len() as u64).sum())
    }

    /// Where the pages of a range are in the program.
    fn placed(&self, pages: Pages, offset: u64) -> Placed {
        let Ok(maps) = maps() else { return Placed::Elsewhere };
        let end = offset + pages.len() as u64;
        let mut placed = Placed::Nowhere;
        for line in maps.lines().filter_map(Line::parse) {
            let covered = line.offset..line.offset.saturating_add(line.pages.len() as u64);
            if line.inode != self.inode || covered.start >= end || offset >= covered.end {
                continue;
            }
            if line.pages.contains(pages)
                && line.offset + (pages.first - line.pages.first) == offset
            {
                return Placed::Here;
            }
            placed = Placed::Elsewhere;
        }
        placed
    }
}

impl Drop for Movable {
    /// The program keeps the memory that is still in the file.
    fn drop(&mut self) {
        if self.is_open() {
            // SAFETY: not used any more.
            unsafe { ManuallyDrop::drop(&mut self.file) }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placed {
    /// All at the addresses that they had.
    Here,
    /// The program has unmapped them all.
    Nowhere,
    Elsewhere,
}

fn system<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> NotMoved {
    move |error| NotMoved::System { call, source: error.into() }
}

fn maps() -> Result<String, NotMoved> {
    fs::read_to_string("/proc/self/maps").map_err(system("/proc/self/maps"))
}

/// A line of `/proc/self/maps`.
#[derive(Clone, Copy, Debug)]
struct Line<'a> {
    pages: Pages,
    permissions: &'a str,
    offset: u64,
    inode: u64,
    name: &'a str,
}

impl Line<'_> {
    fn parse(text: &str) -> Option<Line<'_>> {
        let number = |text| u64::from_str_radix(text, 16).ok();
        let mut words = text.splitn(6, ' ');
        let (first, end) = words.next()?.split_once('-')?;
        let pages = Pages { first: number(first)?, end: number(end)? };
        let (permissions, offset) = (words.next()?, number(words.next()?)?);
        let inode = words.nth(1)?.parse().ok()?;
        Some(Line { pages, permissions, offset, inode, name: words.next().unwrap_or("").trim() })
    }

    fn is_closed(&self) -> bool {
        self.permissions.starts_with("---")
    }
}

/// Whether pages may move: they are within one mapping of the right kind, and on no heap or stack.
fn check(maps: &str, pages: Pages) -> Result<(), NotMoved> {
    let lines: Vec<Line<'_>> = maps.lines().filter_map(Line::parse).collect();
    let at = lines.iter().position(|line| line.pages.contains(pages)).ok_or(NotMoved::Kind)?;
    let line = lines[at];
    let is_named = !line.name.is_empty() && !line.name.starts_with("[anon");
    if matches!(line.name, "[heap]" | "[stack]") {
        return Err(NotMoved::Heap);
    }
    if line.permissions != "rw-p" || line.inode != 0 || is_named {
        return Err(NotMoved::Kind);
    }
    // A guard page lies below the stack of a thread.
    let below = at.checked_sub(1).map(|before| lines[before]);
    let is_stack =
        below.is_some_and(|below| below.is_closed() && below.pages.end == line.pages.first);
    let above = lines.get(at + 1);
    let is_heap = line.pages.first.is_multiple_of(THREAD_HEAP)
        && above.is_some_and(|above| {
            above.is_closed()
                && above.pages.first == line.pages.end
                && above.pages.end == line.pages.first + THREAD_HEAP
        });
    if is_stack || is_heap { Err(NotMoved::Heap) } else { Ok(()) }
}

/// A mapping of this module's own.
struct Mapping {
    at: *mut c_void,
    len: usize,
}

impl Mapping {
    fn anonymous(len: usize) -> Result<Mapping, NotMoved> {
        Mapping::new(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    fn of_file(file: &OwnedFd, offset: u64, len: usize) -> Result<Mapping, NotMoved> {
        Mapping::new(len, libc::MAP_SHARED, file.as_raw_fd(), offset)
    }

    fn new(len: usize, flags: c_int, fd: c_int, offset: u64) -> Result<Mapping, NotMoved> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        let at = unsafe { libc::mmap(null_mut(), len, access, flags, fd, offset as libc::off_t) };
        if at == libc::MAP_FAILED { Err(last("mmap")) } else { Ok(Mapping { at, len }) }
    }

    fn pages(&self) -> Pages {
        let first = self.at.expose_provenance() as u64;
        Pages { first, end: first + self.len as u64 }
    }

    /// Copies all of `from`, which is as long.
    fn copy_from(&self, from: &Mapping) {
        // SAFETY: two mappings of this length, which belong to this module alone.
        unsafe { ptr::copy_nonoverlapping(from.at.cast::<u8>(), self.at.cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is its own, and nothing refers to it any more.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

fn last(call: &'static str) -> NotMoved {
    system(call)(io::Error::last_os_error())
}

/// Makes threads that touch some pages wait until this is dropped.
struct Barrier(OwnedFd);

impl Barrier {
    const USER_MODE_ONLY: c_int = 1;
    const API: c_ulong = 0xc018_aa3f;
    const REGISTER: c_ulong = 0xc020_aa00;
    const VERSION: u64 = 0xaa;
    const MISSING: u64 = 1;
    const MINOR: u64 = 1 << 2;
    const FEATURE_MINOR_SHMEM: u64 = 1 << 10;

    /// Accesses to pages that the pages tables do not have wait: with `in_file` also those to pages that the file has.
    fn around(pages: Pages, in_file: bool) -> Result<Barrier, NotMoved> {
        let flags = libc::O_CLOEXEC | Barrier::USER_MODE_ONLY;
        // SAFETY: no arguments but numbers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        if fd < 0 {
            return Err(last("userfaultfd"));
        }
        // SAFETY: the descriptor is new and belongs to nobody else.
        let barrier = Barrier(unsafe { OwnedFd::from_raw_fd(fd as c_int) });
        let (features, modes) = match in_file {
            true => (Barrier::FEATURE_MINOR_SHMEM, Barrier::MISSING | Barrier::MINOR),
            false => (0, Barrier::MISSING),
        };
        barrier.control(Barrier::API, "UFFDIO_API", &mut [Barrier::VERSION, features, 0])?;
        let mut range = [pages.first, pages.len() as u64, modes, 0];
        barrier.control(Barrier::REGISTER, "UFFDIO_REGISTER", &mut range)?;
        Ok(barrier)
    }

    fn control<const N: usize>(
        &self,
        request: c_ulong,
        call: &'static str,
        words: &mut [u64; N],
    ) -> Result<(), NotMoved> {
        // SAFETY: the request's structure has these words (linux/userfaultfd.h), which live as long as the call.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, words.as_mut_ptr()) };
        if result < 0 { Err(last(call)) } else { Ok(()) }
    }
}

/// Moves pages into the file at `offset`. Between the two system calls in the middle, nothing here may touch memory that
/// `malloc` has handed out or manages: it may be on these pages.
fn move_in(file: &OwnedFd, pages: Pages, offset: u64) -> Result<(), NotMoved> {
    let len = pages.len();
    let to = Mapping::of_file(file, offset, len)?;
    let barrier = Barrier::around(pages, false)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
    // SAFETY: the pages are private anonymous memory of one mapping. Whoever touches them from now on waits for the barrier
    // to fall, when they have their contents again. The kernel reads the last argument as a hint, so there must be one.
    let from = unsafe { libc::mremap(pages.at(), len, len, flags, null_mut::<c_void>()) };
    if from == libc::MAP_FAILED {
        return Err(last("mremap"));
    }
    let from = Mapping { at: from, len };
    to.copy_from(&from);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: replaces what the move has left, by a mapping with the same bytes.
    let placed = unsafe {
        let (fd, offset) = (file.as_raw_fd(), offset as libc::off_t);
        libc::mmap(pages.at(), len, access, flags, fd, offset)
    };
    if placed == libc::MAP_FAILED {
        let failed = io::Error::last_os_error();
        // SAFETY: the pages return to where they were, in place of what the move has left.
        unsafe { put(from, pages) };
        drop((barrier, to));
        punch(file, offset, len);
        return Err(system("mmap")(failed));
    }
    // SAFETY: the mapping just made. It exists, so neither call can fail but for a lack of memory, which shows later.
    unsafe {
        libc::madvise(pages.at(), len, libc::MADV_DONTFORK);
        libc::madvise(pages.at(), len, libc::MADV_POPULATE_WRITE);
    }
    drop(barrier);
    Ok(())
}

/// Makes the pages of the file at `offset`, which are mapped as `pages`, ordinary memory.
fn move_back(file: &OwnedFd, pages: Pages, offset: u64) -> Result<(), NotMoved> {
    let len = pages.len();
    let (from, to) = (Mapping::of_file(file, offset, len)?, Mapping::anonymous(len)?);
    let barrier = Barrier::around(pages, true)?;
    // SAFETY: the file keeps the bytes. Whoever touches them from now on waits for the barrier to fall, when they are there
    // again.
    if unsafe { libc::madvise(pages.at(), len, libc::MADV_DONTNEED) } < 0 {
        return Err(last("MADV_DONTNEED"));
    }
    to.copy_from(&from);
    // SAFETY: replaces the mapping of the file by one with the same bytes.
    let moved = unsafe { put(to, pages) };
    let failed = last("mremap");
    drop((barrier, from));
    if !moved {
        return Err(failed);
    }
    punch(file, offset, len);
    Ok(())
}

/// Moves a mapping to the place of `pages`, which end. Returns false, and ends the mapping, where the kernel refuses.
///
/// # Safety
/// The bytes are those that the program expects there.
unsafe fn put(mapping: Mapping, pages: Pages) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: as the caller promises; the lengths are equal.
    let moved = unsafe { libc::mremap(mapping.at, mapping.len, mapping.len, flags, pages.at()) };
    if moved == libc::MAP_FAILED {
        return false;
    }
    std::mem::forget(mapping);
    true
}

/// Frees pages of the file.
fn punch(file: &OwnedFd, offset: u64, len: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Without it they are freed with the file.
    let _ = fallocate(file, flags, offset, len as u64);
}

#[cfg(test)]
mod tests;
