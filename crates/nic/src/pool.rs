//! Registered memory: one large region from which all buffers of the network and the disk are
//! allocated.
//!
//! The region is a sealed memfd, mapped shared and with every page present before the first use. So
//! no page fault, no growth and no `SIGBUS` can happen on the data path, and the descriptor can be
//! passed to another process. Huge pages are used when the system offers them; [`Pool::pages`] and
//! [`Pool::why`] report what was used, and why nothing better.
//!
//! Addresses are the real virtual addresses, so the kernel and a hardware NIC can use them, and
//! [`Memory`] needs only a bounds check.
//!
//! Who may touch the bytes:
//! - Slices handed out borrow the pool, so Rust's rules hold among users of this process.
//! - The kernel writes into ranges that were given to a disk. Such a range belongs to the disk
//!   until the read completes; nobody accesses it before.
//! - A process that maps the descriptor may write at any time. Bytes are plain numbers, and users
//!   of a shared region treat its content as untrusted (C7).
//! - The mapping is reference counted: a disk with reads under way keeps it alive.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use roce::world::{AtomicOp, Memory, MemoryKind, Staging};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use thiserror::Error;

use crate::clock::page_bytes;

/// Size in bytes of the requested huge pages.
const HUGE_BYTES: u64 = 2 << 20;

/// Most ranges that can be allocated from one pool at a time.
pub const MAX_RANGES: usize = 1 << 16;

/// What the region's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Reserved huge pages (hugetlb): never split, never swapped.
    Huge,
    /// Base pages that the kernel has gathered into huge ones, all or in part.
    Transparent,
    /// Base pages.
    Base,
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pages::Huge => "2 MiB huge pages",
            Pages::Transparent => "transparent huge pages",
            Pages::Base => "base pages",
        })
    }
}

/// Why a pool or a range of it could not be created.
#[derive(Debug, Error)]
pub enum PoolError {
    /// A size of zero, or one that the address space cannot hold.
    #[error("cannot create a pool of {0} bytes")]
    BadSize(u64),
    /// Touching every page would drive the machine out of memory.
    #[error(
        "a pool of {bytes} bytes does not fit the {available} bytes of memory available; hint: make the pool smaller"
    )]
    OutOfMemory {
        /// Requested size.
        bytes: u64,
        /// Memory that the kernel reports as available.
        available: u64,
    },
    /// A system call failed.
    #[error("pool of {bytes} bytes: {call} failed: {source}")]
    System {
        /// Size of the pool.
        bytes: u64,
        /// The call.
        call: &'static str,
        /// Its error.
        source: std::io::Error,
    },
    /// Alignment is not a power of two, or the length is zero.
    #[error("a range of {len} bytes aligned to {align} is not possible")]
    BadRange {
        /// Requested length.
        len: u64,
        /// Requested alignment.
        align: u64,
    },
    /// No hole is large enough.
    #[error(
        "no free range of {len} bytes aligned to {align} ({free} of {size} bytes free, largest hole {largest}); hint: make the pool larger"
    )]
    Full {
        /// Requested length.
        len: u64,
        /// Requested alignment.
        align: u64,
        /// Free bytes in all.
        free: u64,
        /// The largest hole.
        largest: u64,
        /// Size of the pool.
        size: u64,
    },
    /// [`MAX_RANGES`] ranges are in use.
    #[error("{MAX_RANGES} ranges of the pool are in use")]
    TooManyRanges,
    /// The range was not allocated from this pool, or has been freed already.
    #[error("range {addr:#x} of {len} bytes is not in use")]
    NotInUse {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// A part of a pool, in use until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolRange {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

impl PoolRange {
    /// The byte after the last.
    pub const fn end(self) -> u64 {
        self.addr + self.len
    }
}

/// One region of registered memory and its allocator.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    pages: Pages,
    why: String,
    /// Holes and ranges in use, address to length; together they tile the region.
    free: BTreeMap<u64, u64>,
    used: BTreeMap<u64, u64>,
}

impl Pool {
    /// Creates a pool of at least `bytes` bytes (rounded up to whole pages) and touches every page.
    pub fn new(bytes: u64) -> Result<Pool, PoolError> {
        check_size(bytes)?;
        let (region, pages, why) = match Region::huge(bytes) {
            Ok(region) => (region, Pages::Huge, String::from("reserved huge pages were free")),
            Err(refusal) => base_region(bytes, &refusal)?,
        };
        Ok(Pool::over(region, pages, why))
    }

    /// Creates a pool whose pages become present when they are first used: for memory of which
    /// little is used soon, or ever. Using it costs page faults, and a lack of memory shows only
    /// then.
    pub fn on_demand(bytes: u64) -> Result<Pool, PoolError> {
        check_size(bytes)?;
        check_available(bytes)?;
        let region = Region::map(bytes.next_multiple_of(page_bytes()), MemfdFlags::empty())?;
        Ok(Pool::over(region, Pages::Base, String::from("pages come one by one")))
    }

    fn over(region: Region, pages: Pages, why: String) -> Pool {
        let free = BTreeMap::from([(region.base(), region.len() as u64)]);
        Pool { region: Arc::new(region), pages, why, free, used: BTreeMap::new() }
    }

    /// Address of the first byte.
    pub fn base(&self) -> u64 {
        self.region.base()
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a pool is never empty")]
    pub fn len(&self) -> u64 {
        self.region.len() as u64
    }

    /// The memfd behind the region, for another process to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd.as_fd()
    }

    /// Kind of the pages.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Why the pages are of this kind, for people to read.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Bytes not in use.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Allocates `len` bytes at a multiple of `align` (a power of two), from the first hole that
    /// fits. The content is whatever the last user left.
    pub fn alloc(&mut self, len: u64, align: u64) -> Result<PoolRange, PoolError> {
        if len == 0 || !align.is_power_of_two() {
            return Err(PoolError::BadRange { len, align });
        }
        if self.used.len() >= MAX_RANGES {
            return Err(PoolError::TooManyRanges);
        }
        let fits = |(&hole, &size): (&u64, &u64)| {
            let addr = hole.checked_next_multiple_of(align)?;
            let end = addr.checked_add(len)?;
            (end <= hole + size).then_some((hole, size, addr))
        };
        let (hole, size, addr) =
            self.free.iter().find_map(fits).ok_or_else(|| self.full(len, align))?;
        self.cut(hole, size, PoolRange { addr, len });
        Ok(PoolRange { addr, len })
    }

    /// Frees a range.
    pub fn free(&mut self, range: PoolRange) -> Result<(), PoolError> {
        let PoolRange { addr, len } = range;
        if self.used.get(&addr) != Some(&len) {
            return Err(PoolError::NotInUse { addr, len });
        }
        self.used.remove(&addr);
        self.join_holes(addr, len);
        Ok(())
    }

    /// The mapping, kept alive beyond the pool.
    pub fn region(&self) -> Arc<Region> {
        Arc::clone(&self.region)
    }

    fn full(&self, len: u64, align: u64) -> PoolError {
        let largest = self.free.values().copied().max().unwrap_or(0);
        PoolError::Full { len, align, free: self.free_bytes(), largest, size: self.len() }
    }

    fn cut(&mut self, hole: u64, size: u64, range: PoolRange) {
        self.free.remove(&hole);
        let parts = [(hole, range.addr - hole), (range.end(), hole + size - range.end())];
        self.free.extend(parts.into_iter().filter(|&(_, len)| len > 0));
        self.used.insert(range.addr, range.len);
    }

    /// Adds a hole, merged with the holes that touch it.
    fn join_holes(&mut self, mut addr: u64, mut len: u64) {
        if let Some(after) = self.free.remove(&(addr + len)) {
            len += after;
        }
        if let Some((&before, &size)) = self.free.range(..addr).next_back()
            && before + size == addr
        {
            addr = before;
            len += size;
        }
        self.free.insert(addr, len);
    }
}

impl Memory for Pool {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        let start = self.region.place(addr, into.len());
        // SAFETY: `place` returned a pointer to that many mapped bytes; `into` is the caller's
        // alone.
        unsafe { std::ptr::copy_nonoverlapping(start.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        let start = self.region.place(addr, from.len());
        // SAFETY: as in `gather`; nobody borrows bytes of the pool while it is borrowed uniquely.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), start.as_ptr(), from.len()) }
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        let word = self.region.place(addr, 8).cast::<u64>();
        // SAFETY: `place` returned eight mapped bytes, and the endpoint asks for aligned words
        // only. LocalPeers that map the pool change such words as atomics, too.
        op.execute(unsafe { AtomicU64::from_ptr(word.as_ptr()) })
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

impl Staging for Pool {
    fn bytes(&self, addr: u64, len: usize) -> &[u8] {
        let start = self.region.place(addr, len);
        // SAFETY: `place` returned a pointer to `len` mapped, initialised bytes. The pool is
        // borrowed for as long as the slice lives, so nobody in this process has a unique slice;
        // the kernel writes only into ranges that belong to a disk, which nobody reads meanwhile.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
    }

    fn bytes_mut(&mut self, addr: u64, len: usize) -> &mut [u8] {
        let start = self.region.place(addr, len);
        // SAFETY: as in `bytes`; the unique borrow of the pool makes the slice the only one.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
    }
}

/// The mapped memfd of a pool. Unmapped when its last user is gone.
#[derive(Debug)]
pub struct Region {
    fd: OwnedFd,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the region is plain memory with no tie to a thread; access is ordered by the borrow rules
// of `Pool`, and `Region` itself only hands out addresses.
unsafe impl Send for Region {}
// SAFETY: as above; no method of `&Region` reads or writes the bytes.
unsafe impl Sync for Region {}

impl Region {
    /// Reserved huge pages. The mapping reserves them, so touching cannot fail later.
    fn huge(bytes: u64) -> Result<Region, PoolError> {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let region = Region::map(bytes.next_multiple_of(HUGE_BYTES), flags)?;
        region.touch()?;
        Ok(region)
    }

    fn map(bytes: u64, extra: MemfdFlags) -> Result<Region, PoolError> {
        let failed =
            |call| move |error: Errno| PoolError::System { bytes, call, source: error.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
        let fd = memfd_create("dquant-pool", flags).map_err(failed("memfd_create"))?;
        ftruncate(&fd, bytes).map_err(failed("ftruncate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&fd, seals).map_err(failed("F_ADD_SEALS"))?;
        let len = usize::try_from(bytes).map_err(|_| PoolError::BadSize(bytes))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0) }
                .map_err(failed("mmap"))?;
        let start = NonNull::new(start.cast()).ok_or(PoolError::BadSize(bytes))?;
        Ok(Region { fd, start, len })
    }

    /// Makes every page present, or returns why that failed.
    fn touch(&self) -> Result<(), PoolError> {
        // SAFETY: the range is exactly this mapping; populating writes no bytes.
        let populated =
            unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxPopulateWrite) };
        match populated {
            Ok(()) => Ok(()),
            Err(Errno::INVAL) => {
                self.touch_by_hand();
                Ok(())
            }
            Err(error) => Err(PoolError::System {
                bytes: self.len as u64,
                call: "madvise(MADV_POPULATE_WRITE)",
                source: error.into(),
            }),
        }
    }

    /// For kernels before 5.14: a write to each page.
    fn touch_by_hand(&self) {
        for offset in (0..self.len).step_by(page_bytes() as usize) {
            // SAFETY: `offset` lies inside the mapping, which nobody else knows yet.
            unsafe { self.start.as_ptr().add(offset).write_volatile(0) };
        }
    }

    /// Requests transparent huge pages; a kernel without them refuses, which does no harm.
    fn advise_huge(&self) -> bool {
        // SAFETY: the range is exactly this mapping; the advice changes no content.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage) }.is_ok()
    }

    pub(crate) fn base(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether `addr .. addr + len` lies inside.
    pub(crate) fn contains(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.base());
        offset <= self.len as u64 && len <= self.len as u64 - offset
    }

    /// Pointer to `len` bytes at `addr`.
    ///
    /// # Panics
    /// When the range is not inside: then a key check above is broken (C3).
    fn place(&self, addr: u64, len: usize) -> NonNull<u8> {
        assert!(
            self.contains(addr, len as u64),
            "{len} bytes at {addr:#x} are outside the pool of {} bytes at {:#x}",
            self.len,
            self.base()
        );
        let offset = (addr - self.base()) as usize;
        // SAFETY: `contains` has shown that `offset` is at most the mapping's length.
        unsafe { self.start.add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` and this is its last user. Failure would mean a bug
        // in the bounds above; the mapping then stays, which is harmless.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

fn check_size(bytes: u64) -> Result<(), PoolError> {
    match bytes == 0 || bytes > isize::MAX as u64 - HUGE_BYTES {
        true => Err(PoolError::BadSize(bytes)),
        false => Ok(()),
    }
}

fn check_available(bytes: u64) -> Result<(), PoolError> {
    match available_bytes() {
        Some(available) if bytes > available => Err(PoolError::OutOfMemory { bytes, available }),
        _ => Ok(()),
    }
}

/// A region of base pages, gathered into huge ones where the kernel does that.
fn base_region(bytes: u64, refusal: &PoolError) -> Result<(Region, Pages, String), PoolError> {
    check_available(bytes)?;
    let region = Region::map(bytes.next_multiple_of(page_bytes()), MemfdFlags::empty())?;
    let advised = region.advise_huge();
    region.touch()?;
    let no_hugetlb = refusal_text(refusal);
    let gathered = if advised { gathered_huge_bytes(region.base()) } else { 0 };
    let (pages, gained) = match gathered {
        0 => (Pages::Base, format!("no transparent ones either ({})", shmem_policy())),
        n => (Pages::Transparent, format!("{n} of {} bytes are transparent ones", region.len)),
    };
    Ok((region, pages, format!("no reserved huge pages ({no_hugetlb}); {gained}")))
}

fn refusal_text(refusal: &PoolError) -> String {
    match refusal {
        PoolError::System { call, source, .. } => format!(
            "{call}: {source}; to reserve some: sysctl vm.nr_hugepages, {} in the system now",
            huge_pages_total()
        ),
        other => other.to_string(),
    }
}

/// How the kernel treats huge pages in shared memory: the choice in brackets.
fn shmem_policy() -> String {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("unknown");
    format!("{path} is {chosen}")
}

/// Bytes of the mapping at `base` that huge pages map, by `/proc/self/smaps`; 0 when unknown.
fn gathered_huge_bytes(base: u64) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let start = format!("{base:x}-");
    let ours = smaps.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    ours.take_while(|line| !line.contains('-'))
        .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))
        .map_or(0, kib_field)
}

fn available_bytes() -> Option<u64> {
    meminfo("MemAvailable:").map(|field| kib_field(&field))
}

fn huge_pages_total() -> String {
    meminfo("HugePages_Total:").unwrap_or_else(|| String::from("an unknown number"))
}

fn meminfo(key: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(value.trim().to_owned())
}

/// Bytes of a field like `"  1024 kB"`.
fn kib_field(field: &str) -> u64 {
    let number = field.split_ascii_whitespace().next().and_then(|text| text.parse().ok());
    number.unwrap_or(0u64) * 1024
}

#[cfg(test)]
mod tests {
    use rand_pcg::Pcg64;
    use rand_pcg::rand_core::{Rng, SeedableRng};

    use super::*;

    fn pool(bytes: u64) -> Pool {
        Pool::new(bytes).expect("a small pool")
    }

    #[test]
    fn bytes_written_are_read_back_and_shared_through_the_descriptor() {
        let mut pool = pool(1 << 20);
        let (base, len) = (pool.base(), pool.len());
        pool.bytes_mut(base, 3).copy_from_slice(b"abc");
        pool.bytes_mut(base + len - 1, 1)[0] = 7;
        assert_eq!(pool.bytes(base, 4), b"abc\0");
        let mut seen = [0u8; 3];
        assert_eq!(rustix::io::pread(pool.fd(), &mut seen, 0), Ok(3));
        assert_eq!(&seen, b"abc");
        assert!(!pool.why().is_empty());
    }

    #[test]
    fn the_region_is_sealed() {
        let pool = pool(1 << 16);
        assert_eq!(ftruncate(pool.fd(), 0), Err(Errno::PERM));
        assert_eq!(ftruncate(pool.fd(), 1 << 30), Err(Errno::PERM));
    }

    #[test]
    fn the_mapping_outlives_the_pool_while_someone_holds_it() {
        let pool = pool(1 << 16);
        let region = pool.region();
        drop(pool);
        assert!(region.contains(region.base(), 1 << 16));
        assert_eq!(rustix::io::pread(&region.fd, &mut [1u8; 4], 0), Ok(4));
    }

    #[test]
    fn bounds_are_exact_and_do_not_wrap() {
        let pool = pool(1 << 16);
        let (base, len) = (pool.base(), pool.len());
        assert!(pool.region.contains(base, len));
        assert!(pool.region.contains(base + len, 0));
        for (addr, len) in [
            (base - 1, 1),
            (base, len + 1),
            (base + len, 1),
            (base + 1, u64::MAX),
            (u64::MAX, 2),
            (0, u64::MAX),
        ] {
            assert!(!pool.region.contains(addr, len), "{addr:#x} {len}");
        }
    }

    #[test]
    #[should_panic(expected = "outside the pool")]
    fn a_range_outside_panics() {
        let pool = pool(1 << 16);
        pool.bytes(pool.base() + pool.len() - 1, 2);
    }

    #[test]
    fn impossible_requests_are_refused() {
        assert!(matches!(Pool::new(0), Err(PoolError::BadSize(0))));
        assert!(matches!(Pool::new(u64::MAX), Err(PoolError::BadSize(_))));
        assert!(matches!(Pool::new(1 << 50), Err(PoolError::OutOfMemory { .. })));
        let mut pool = pool(1 << 16);
        assert!(matches!(pool.alloc(0, 1), Err(PoolError::BadRange { .. })));
        assert!(matches!(pool.alloc(1, 3), Err(PoolError::BadRange { .. })));
        assert!(matches!(pool.alloc(1, 0), Err(PoolError::BadRange { .. })));
        assert!(matches!(pool.alloc(u64::MAX, 1), Err(PoolError::Full { .. })));
        assert!(matches!(pool.alloc(1, 1 << 63), Err(PoolError::Full { .. })));
    }

    #[test]
    fn a_range_is_given_back_once() {
        let mut pool = pool(1 << 16);
        let range = pool.alloc(100, 64).expect("room");
        let wrong = PoolRange { addr: range.addr, len: 99 };
        assert!(matches!(pool.free(wrong), Err(PoolError::NotInUse { .. })));
        pool.free(range).expect("in use");
        assert!(matches!(pool.free(range), Err(PoolError::NotInUse { .. })));
    }

    /// Random allocations and frees: ranges are aligned, inside and disjoint, and when all are
    /// freed the pool is one hole again.
    #[test]
    fn ranges_never_overlap() {
        for seed in 0..20u64 {
            churn(seed);
        }
    }

    fn churn(seed: u64) {
        let mut pool = pool(1 << 20);
        let mut held: Vec<PoolRange> = Vec::new();
        let mut chance = Pcg64::seed_from_u64(seed);
        for _ in 0..400 {
            let pick = u64::from(chance.next_u32());
            if pick.is_multiple_of(3) && !held.is_empty() {
                let range = held.swap_remove(pick as usize % held.len());
                pool.free(range).expect("held");
                continue;
            }
            let align = 1 << (pick % 13);
            if let Ok(range) = pool.alloc(1 + pick % 9000, align) {
                assert_eq!(range.addr % align, 0, "seed {seed}");
                assert!(pool.region.contains(range.addr, range.len), "seed {seed}");
                let apart =
                    |other: &PoolRange| other.end() <= range.addr || range.end() <= other.addr;
                assert!(held.iter().all(apart), "seed {seed}: {range:?} overlaps");
                held.push(range);
            }
        }
        let held_bytes: u64 = held.iter().map(|range| range.len).sum();
        assert_eq!(pool.free_bytes() + held_bytes, pool.len(), "seed {seed}");
        held.into_iter().for_each(|range| pool.free(range).expect("held"));
        assert_eq!(pool.free, BTreeMap::from([(pool.base(), pool.len())]), "seed {seed}");
    }
}
