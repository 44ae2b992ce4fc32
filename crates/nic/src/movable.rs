//! Ordinary memory of a program, moved into a file that local peers may map, and back.
//!
//! The program keeps its addresses. What changes for it while its memory is in the file:
//!
//! - a forked child does not have these pages (`MADV_DONTFORK`): it would share them, and with them
//!   what `malloc` notes beside the program's bytes;
//! - `MADV_DONTNEED` does not clear pages of a file. Memory that its owner frees meanwhile is
//!   unmapped and comes back clear, but the pages stay in the file until the region ends;
//! - settings of the old pages are gone: locks, memory policies, huge pages, protection keys,
//!   advice about forks and core dumps.
//!
//! Other threads may go on. Whoever touches the memory while it is moved waits in the kernel, by
//! userfaultfd. System calls that use it at that moment fail with `EFAULT`, because only faults of
//! user mode are allowed to wait (`vm.unprivileged_userfaultfd`). The kernel itself cannot be held
//! off: pages that it has pinned (I/O under way, registered buffers of io_uring) are written to
//! where the program does not see it any more. LocalPeers reach memory that is not in the file in
//! that way (`process_vm_writev`), so pages never move while a region that local peers know lies on
//! them.
//!
//! Only private anonymous memory moves, and neither heaps of libc nor stacks: a heap that shrinks
//! and grows again relies on clear pages, and a child needs both. The registration cache
//! (`adapter::registrations`) watches memory; nothing here does. Keys and rights do not belong
//! here.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, null_mut};

use libc::{c_int, c_void};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate,
    memfd_create,
};
use thiserror::Error;

use crate::clock::page_bytes;
use crate::mappings::{self, Mappings};
use crate::userfault;

/// Length of the file. It has no pages but those that were moved in.
pub const FILE_BYTES: u64 = 1 << 62;

/// Most ranges in the file.
const MAX_RANGES: usize = 1 << 12;

/// Ranges begin at multiples of this and have as much behind them, so that one that grows by
/// `mremap` meets clear pages and no other range.
const SPACING: u64 = 1 << 36;

/// `HEAP_MAX_SIZE` of glibc: the heaps of its threads begin at multiples of it, and are no longer.
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
    /// Some of its pages belong to another region that local peers know.
    #[error("it shares pages with another region")]
    Overlap,
    /// The program has closed the file's descriptor.
    #[error("the descriptor of the file was closed")]
    Closed,
    /// [`MAX_RANGES`] ranges are in the file, or [`FILE_BYTES`] were used in the life of the
    /// process.
    #[error("the file is full")]
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

    fn of(mapping: &mappings::Mapping<'_>) -> Pages {
        Pages { first: mapping.first, end: mapping.end }
    }

    fn len(self) -> usize {
        (self.end - self.first) as usize
    }

    fn at(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.first as usize)
    }

    /// Whether variables of the program or of a library are on them: those without initial values
    /// are in no file.
    fn are_static(self) -> bool {
        /// The pages, and whether they were met.
        type Search = (Pages, bool);

        unsafe extern "C" fn look(
            object: *mut libc::dl_phdr_info,
            _: libc::size_t,
            search: *mut c_void,
        ) -> c_int {
            // SAFETY: the loader passes an object that it describes, with this many headers, and
            // what `are_static` gave it.
            let (object, (pages, met)) = unsafe { (&*object, &mut *search.cast::<Search>()) };
            let headers = match object.dlpi_phdr.is_null() {
                true => &[],
                // SAFETY: as above.
                false => unsafe {
                    std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into())
                },
            };
            let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
            let mut segments = loaded.filter_map(|header| {
                Pages::around(object.dlpi_addr.wrapping_add(header.p_vaddr), header.p_memsz)
            });
            *met |= segments.any(|segment| segment.meets(*pages));
            c_int::from(*met)
        }

        let mut search: Search = (self, false);
        // SAFETY: the function gets the search, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
        search.1
    }

    /// Whether this thread needs them for itself: it would wait for itself while they move.
    fn are_this_threads(self) -> bool {
        let local = 0_u8;
        // SAFETY: the address of a thread's own variable.
        let thread = unsafe { libc::__errno_location() };
        let has = |addr: usize| (self.first..self.end).contains(&(addr as u64));
        has((&raw const local).addr()) || has(thread.addr())
    }

    fn contains(self, other: Pages) -> bool {
        self.first <= other.first && other.end <= self.end
    }

    fn meets(self, other: Pages) -> bool {
        self.first < other.end && other.first < self.end
    }
}

/// Pages in the file.
#[derive(Clone, Copy, Debug)]
struct Range {
    pages: Pages,
    offset: u64,
    /// Regions on them. Without any they go back as soon as that is possible.
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
    /// Pages of regions that local peers know and that are not in the file.
    stayed: Vec<Pages>,
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
        let (ranges, stayed) = (Vec::new(), Vec::new());
        let mut movable = Movable { file, device, inode, next_offset: 0, ranges, stayed };
        movable.try_out()?;
        Ok(movable)
    }

    fn try_out(&mut self) -> Result<(), NotMoved> {
        let page = Mapping::anonymous(page_bytes() as usize)?;
        let pages = page.pages();
        let offset = self.next_offset;
        self.next_offset += SPACING;
        move_in(&self.file, pages, offset)?;
        move_back(pages)
    }

    /// The file, for others to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A region that local peers are going to know: moves the pages of its `len` bytes at `addr`
    /// into the file, and returns where the first byte is in it. In both cases the region ends with
    /// [`leave`](Movable::leave).
    ///
    /// # Errors
    /// Why the memory stays where it is.
    pub fn enter(&mut self, addr: u64, len: u64) -> Result<u64, NotMoved> {
        let pages = Pages::around(addr, len).ok_or(NotMoved::Kind)?;
        self.sweep();
        let entered = self.offset_of(pages);
        if entered.is_err() {
            self.stayed.push(pages);
        }
        entered.map(|offset| offset + (addr - pages.first))
    }

    /// The same for a region whose memory is not to move.
    pub fn stay(&mut self, addr: u64, len: u64) {
        self.stayed.extend(Pages::around(addr, len));
    }

    /// A region ends, which did or did not move. Pages that no region needs in the file become
    /// ordinary memory again, if the program has not unmapped them.
    pub fn leave(&mut self, addr: u64, len: u64, has_moved: bool) {
        let Some(pages) = Pages::around(addr, len) else { return };
        if has_moved {
            let holds = |range: &&mut Range| range.users > 0 && range.pages.contains(pages);
            if let Some(range) = self.ranges.iter_mut().find(holds) {
                range.users -= 1;
            }
        } else if let Some(at) = self.stayed.iter().position(|stayed| *stayed == pages) {
            self.stayed.swap_remove(at);
        }
        self.sweep();
    }

    /// Where pages are in the file, moved if they were not.
    fn offset_of(&mut self, pages: Pages) -> Result<u64, NotMoved> {
        if let Some(at) = self.ranges.iter().position(|range| range.pages.contains(pages)) {
            let range = self.ranges[at];
            // Otherwise the program has unmapped what it had registered, and this is something
            // else.
            if self.placed(range) != Placed::Here {
                return Err(NotMoved::Overlap);
            }
            self.ranges[at].users += 1;
            return Ok(range.offset + (pages.first - range.pages.first));
        }
        let mut known =
            self.ranges.iter().map(|range| range.pages).chain(self.stayed.iter().copied());
        if known.any(|known| known.meets(pages)) {
            return Err(NotMoved::Overlap);
        }
        if !self.is_open() {
            return Err(NotMoved::Closed);
        }
        let offset = self.next_offset;
        let taken = (pages.len() as u64).next_multiple_of(SPACING) + SPACING;
        let next = offset.checked_add(taken).filter(|next| *next <= FILE_BYTES);
        let next = next.filter(|_| self.ranges.len() < MAX_RANGES).ok_or(NotMoved::Full)?;
        check(&mappings()?, pages)?;
        self.ranges.reserve(1);
        move_in(&self.file, pages, offset)?;
        self.next_offset = next;
        self.ranges.push(Range { pages, offset, users: 1 });
        Ok(offset)
    }

    /// Moves back what no region needs in the file, as far as possible now.
    fn sweep(&mut self) {
        let mut at = 0;
        while let Some(range) = self.ranges.get(at) {
            if range.users == 0 && self.takes_back(*range) {
                self.ranges.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Whether a range without users is not in the file any more.
    fn takes_back(&self, range: Range) -> bool {
        if self.stayed.iter().any(|stayed| stayed.meets(range.pages)) {
            return false;
        }
        match self.placed(range) {
            Placed::Here => move_back(range.pages).is_ok(),
            Placed::Nowhere => {
                if self.is_open() {
                    punch(&self.file, range.offset, range.pages.len());
                }
                true
            }
            // The program has cut it up or moved it, and may use the pages.
            Placed::Elsewhere => true,
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
    fn placed(&self, Range { pages, offset, .. }: Range) -> Placed {
        let Ok(mappings) = mappings() else { return Placed::Elsewhere };
        let end = offset + pages.len() as u64;
        let mut placed = Placed::Nowhere;
        for mapping in mappings.iter().filter(|mapping| mapping.inode == self.inode) {
            let mapped = Pages::of(&mapping);
            if mapping.offset >= end || offset - mapping.offset.min(offset) >= mapped.len() as u64 {
                continue;
            }
            if mapped.contains(pages) && mapping.offset + (pages.first - mapped.first) == offset {
                return Placed::Here;
            }
            placed = Placed::Elsewhere;
        }
        placed
    }
}

/// Whether pages may move: they are within one mapping of the right kind, and on no heap or stack.
fn check(mappings: &Mappings, pages: Pages) -> Result<(), NotMoved> {
    let mut below = None;
    let mut found = mappings.iter().skip_while(|mapping| {
        let is_before = !Pages::of(mapping).contains(pages);
        if is_before {
            below = Some(*mapping);
        }
        is_before
    });
    let mapping = found.next().ok_or(NotMoved::Kind)?;
    if matches!(mapping.name, "[heap]" | "[stack]") {
        return Err(NotMoved::Heap);
    }
    let is_named = !mapping.name.is_empty() && !mapping.name.starts_with("[anon");
    let is_usual = mapping.permissions == "rw-p" && mapping.is_private_anonymous() && !is_named;
    if !is_usual || pages.are_static() {
        return Err(NotMoved::Kind);
    }
    // A guard page lies below the stack of a thread.
    let is_guard = |below: mappings::Mapping<'_>| {
        below.end == mapping.first && below.permissions.starts_with("---")
    };
    let is_heap = is_thread_heap(Pages::of(&mapping), pages);
    if below.is_some_and(is_guard) || is_heap || pages.are_this_threads() {
        return Err(NotMoved::Heap);
    }
    Ok(())
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

fn mappings() -> Result<Mappings, NotMoved> {
    Mappings::now().map_err(system("/proc/self/maps"))
}

/// Whether the pages are on a heap that glibc has made for a thread, as far as the words at its
/// beginning tell (`heap_info` of malloc/arena.c). Other memory that looks like it does not move
/// either.
fn is_thread_heap(mapping: Pages, pages: Pages) -> bool {
    const INFO: u64 = 4 * 8;
    let start = pages.first / THREAD_HEAP * THREAD_HEAP;
    if start < mapping.first || mapping.end - start < INFO {
        return false;
    }
    let word = |at: usize| {
        let start = ptr::with_exposed_provenance::<u64>(start as usize);
        // SAFETY: readable memory of the program, which may change it: any value is valid.
        unsafe { start.add(at).read_volatile() }
    };
    let [arena, previous, size, writable] = [0, 1, 2, 3].map(word);
    let is_length =
        |bytes: u64| (1..=THREAD_HEAP).contains(&bytes) && bytes.is_multiple_of(page_bytes());
    arena != 0
        && arena.is_multiple_of(8)
        && previous.is_multiple_of(THREAD_HEAP)
        && is_length(size)
        && is_length(writable)
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

    /// Gives it all its pages now. Later there might be no memory for them.
    fn populate(&self) -> Result<(), NotMoved> {
        // SAFETY: pages of a mapping of this module's own.
        let done = unsafe { libc::madvise(self.at, self.len, libc::MADV_POPULATE_WRITE) };
        if done < 0 { Err(last("MADV_POPULATE_WRITE")) } else { Ok(()) }
    }

    /// The pages of the program, which end there: whoever touches them waits for the barrier, which
    /// must exist.
    ///
    /// # Safety
    /// The program gets them back, or others with the same bytes, before the barrier falls.
    unsafe fn of_program(pages: Pages) -> Result<Mapping, NotMoved> {
        let (len, flags) = (pages.len(), libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP);
        // SAFETY: as the caller promises. The kernel reads the last argument as a hint, so there
        // must be one.
        let at = unsafe { libc::mremap(pages.at(), len, len, flags, null_mut::<c_void>()) };
        if at == libc::MAP_FAILED { Err(last("mremap")) } else { Ok(Mapping { at, len }) }
    }

    /// Copies all of `from`, which is as long.
    fn copy_from(&self, from: &Mapping) {
        // SAFETY: two mappings of this length. A local peer that writes to the file meanwhile
        // changes what is copied, and no reference to the bytes exists.
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
struct Barrier {
    fd: OwnedFd,
    pages: Pages,
}

impl Barrier {
    /// Accesses to pages that the page table does not have wait: with `in_file` also those to pages
    /// that the file has.
    fn around(pages: Pages, in_file: bool) -> Result<Barrier, NotMoved> {
        let (features, modes) = match in_file {
            true => {
                (userfault::FEATURE_MINOR_SHMEM, userfault::MODE_MISSING | userfault::MODE_MINOR)
            }
            false => (0, userfault::MODE_MISSING),
        };
        let fd = userfault::open(0, features)
            .map_err(|(call, source)| NotMoved::System { call, source })?;
        let barrier = Barrier { fd, pages };
        let mut range = [pages.first, pages.len() as u64, modes, 0];
        userfault::control(barrier.fd.as_raw_fd(), userfault::REGISTER, &mut range)
            .map_err(io::Error::from_raw_os_error)
            .map_err(system("UFFDIO_REGISTER"))?;
        Ok(barrier)
    }

    /// Gives the pages back what they had. Pages of a file need nothing: the file has their bytes.
    fn fill(&self, from: &Mapping) {
        let (first, source, len) = (self.pages.first, from.pages().first, from.len as u64);
        let mut done = 0;
        while done < len {
            let mut copy = [first + done, source + done, len - done, 0, 0];
            let _ = userfault::control(self.fd.as_raw_fd(), userfault::COPY, &mut copy);
            // The last word has the bytes that were copied, or an error: the mapping is the
            // program's own fault then.
            match i64::from_ne_bytes(copy[4].to_ne_bytes()) {
                copied @ 1.. => done += copied.unsigned_abs(),
                again if again == -i64::from(libc::EAGAIN) => {}
                _ => return,
            }
        }
    }
}

impl Drop for Barrier {
    /// Closing is not enough: a forked child may have the descriptor, too.
    fn drop(&mut self) {
        let mut range = [self.pages.first, self.pages.len() as u64];
        // The first is refused where nothing is registered any more.
        let _ = userfault::control(self.fd.as_raw_fd(), userfault::UNREGISTER, &mut range);
        let _ = userfault::control(self.fd.as_raw_fd(), userfault::WAKE, &mut range);
    }
}

/// Moves pages into the file at `offset`. While the barrier is up, nothing here may touch memory
/// that `malloc` has handed out or manages: it may be on these pages.
fn move_in(file: &OwnedFd, pages: Pages, offset: u64) -> Result<(), NotMoved> {
    let to = Mapping::of_file(file, offset, pages.len())?;
    let moved = to.populate().and_then(|()| {
        // SAFETY: a mapping of this module's own, which keeps this advice in its new place.
        let done = unsafe { libc::madvise(to.at, to.len, libc::MADV_DONTFORK) };
        if done < 0 { Err(last("MADV_DONTFORK")) } else { exchange(to, pages, false) }
    });
    if moved.is_err() {
        punch(file, offset, pages.len());
    }
    moved.map(drop)
}

/// Makes pages that are in the file ordinary memory.
fn move_back(pages: Pages) -> Result<(), NotMoved> {
    let to = Mapping::anonymous(pages.len())?;
    to.populate()?;
    let from = exchange(to, pages, true)?;
    // SAFETY: frees the pages of the file, which nobody uses any more. Without it they are freed
    // with the file.
    unsafe { libc::madvise(from.at, from.len, libc::MADV_REMOVE) };
    Ok(())
}

/// Puts `to` in the place of `pages`, with their bytes, and returns what was there before.
fn exchange(to: Mapping, pages: Pages, in_file: bool) -> Result<Mapping, NotMoved> {
    let barrier = Barrier::around(pages, in_file)?;
    // SAFETY: they are memory of the program in one mapping, and come back below in either case.
    let from = unsafe { Mapping::of_program(pages)? };
    to.copy_from(&from);
    // SAFETY: the bytes are the same.
    if unsafe { put(&to, pages) } {
        std::mem::forget(to);
        drop(barrier);
        return Ok(from);
    }
    let failed = last("mremap");
    if !in_file {
        barrier.fill(&from);
    }
    Err(failed)
}

/// Moves a mapping to the place of `pages`, which end. Returns false, and changes nothing, where
/// the kernel refuses.
///
/// # Safety
/// The bytes are those that the program expects there, and the mapping is used no more.
unsafe fn put(mapping: &Mapping, pages: Pages) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: as the caller promises; the lengths are equal.
    let moved = unsafe { libc::mremap(mapping.at, mapping.len, mapping.len, flags, pages.at()) };
    moved != libc::MAP_FAILED
}

/// Frees pages of the file.
fn punch(file: &OwnedFd, offset: u64, len: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Without it they are freed with the file.
    let _ = fallocate(file, flags, offset, len as u64);
}

#[cfg(test)]
mod tests;
