//! Shared memory: sealed anonymous files, their mappings, and the only raw pointers of the ring.
//!
//! May hold: creation, sealing, mapping, pre-faulting, bounds-checked access. May not hold: what
//! the words mean (`layout`) or in which order they are touched (`producer`, `consumer`, `wake`).
//!
//! Invariants that every `unsafe` below relies on:
//!
//! 1. A mapping covers `len` bytes of a file whose size is sealed (no grow, no shrink), so a peer
//!    can neither unmap our pages nor make an access raise SIGBUS by truncating the file.
//! 2. `base` comes from `mmap`, stays mapped until the value is dropped, and is page aligned.
//! 3. Words that another process may change are reached through atomics only.
//! 4. The data file is sealed against new writable mappings after the producer has its own, so no
//!    other process ever writes payload.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{RingError, copy};

/// Bytes faulted in, or unmapped, in one call. Each call locks the address space of the process,
/// and an engine that needs memory meanwhile waits: 1 GiB at once takes 100 ms and more.
const PIECE_BYTES: usize = 2 << 20;

/// Whether a mapping may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    ReadOnly,
    ReadWrite,
}

/// A shared mapping of a sealed file.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u8>,
    len: usize,
    access: Access,
}

// SAFETY: a Region is a range of mapped bytes without thread affinity. Shared access goes through
// atomics; the two methods that hand out plain references are unsafe and state their own rules.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps the first `len` bytes of `file` and faults all of them in.
    pub(super) fn map(file: BorrowedFd<'_>, len: u64, access: Access) -> Result<Region, RingError> {
        let region = Region::map_only(file, len, access)?;
        region.fault_in(0..region.len)?;
        Ok(region)
    }

    /// Maps the first `len` bytes of `file`.
    pub(super) fn map_only(
        file: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<Region, RingError> {
        let len = usize::try_from(len).map_err(|_| os("mmap", Errno::NOMEM))?;
        let prot = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0) }
                .map_err(|errno| os("mmap", errno))?;
        let base = NonNull::new(base.cast()).ok_or(os("mmap", Errno::FAULT))?;
        let region = Region { base, len, access };
        // Huge pages are optional: kernels without them for shared memory return EINVAL.
        let _ = region.advise(0, len, Advice::LinuxHugepage);
        Ok(region)
    }

    /// Faults in a range of whole pages, so that no page fault is left for the data path.
    fn fault_in(&self, range: Range<usize>) -> Result<(), RingError> {
        let populate = match self.access {
            Access::ReadOnly => Advice::LinuxPopulateRead,
            Access::ReadWrite => Advice::LinuxPopulateWrite,
        };
        for (at, len) in pieces(range) {
            match self.advise(at, len, populate) {
                Ok(()) => {}
                // Before Linux 5.14 the first touch of each page pays instead.
                Err(Errno::INVAL) => return Ok(()),
                Err(errno) => return Err(os("madvise(populate)", errno)),
            }
        }
        Ok(())
    }

    fn advise(&self, at: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is ours (invariant 2) and none of the advice used here drops contents.
        unsafe { rustix::mm::madvise(self.at(at, len).cast::<c_void>(), len, advice) }
    }

    /// Address of `len` bytes at `at`. Panics outside the mapping: offsets come from a checked
    /// geometry, so that would be an error in this crate and not in a peer.
    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at <= self.len && len <= self.len - at, "ring offset {at}+{len} of {}", self.len);
        // SAFETY: inside the mapping by the assertion.
        unsafe { self.base.as_ptr().add(at) }
    }

    pub(super) fn u32_at(&self, at: usize) -> &AtomicU32 {
        let word = self.at(at, 4).cast::<AtomicU32>();
        assert!(word.is_aligned());
        // SAFETY: mapped, aligned, and every access to a shared word is atomic (invariant 3).
        unsafe { &*word }
    }

    pub(super) fn u64_at(&self, at: usize) -> &AtomicU64 {
        let word = self.at(at, 8).cast::<AtomicU64>();
        assert!(word.is_aligned());
        // SAFETY: as in `u32_at`.
        unsafe { &*word }
    }

    /// Copies `bytes` to `at`, past the cache: [`copy::fence`] must come before anybody is told.
    ///
    /// # Safety
    /// By the rules of the ring nobody reads or writes the range meanwhile, and `self` is writable.
    pub(super) unsafe fn copy_in(&self, at: usize, bytes: &[u8]) {
        debug_assert_eq!(self.access, Access::ReadWrite);
        // SAFETY: in bounds by `at`; `bytes` cannot overlap a range that the caller owns.
        unsafe { copy::past_cache(bytes.as_ptr(), self.at(at, bytes.len()), bytes.len()) }
    }

    /// The bytes at `at`.
    ///
    /// # Safety
    /// Nobody writes the range while the slice lives.
    pub(super) unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds and mapped; the caller keeps writers out.
        unsafe { std::slice::from_raw_parts(self.at(at, len), len) }
    }

    /// The bytes at `at`, for writing.
    ///
    /// # Safety
    /// No other reference to the range lives in this process, nobody else writes it, and `self` is
    /// writable.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees exclusivity")]
    pub(super) unsafe fn bytes_mut(&self, at: usize, len: usize) -> &mut [u8] {
        debug_assert_eq!(self.access, Access::ReadWrite);
        // SAFETY: in bounds and mapped writable; the caller guarantees exclusivity.
        unsafe { std::slice::from_raw_parts_mut(self.at(at, len), len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        for (at, len) in pieces(0..self.len) {
            // SAFETY: mapped by `map`, and no reference outlives `self` (they borrow it). munmap of
            // own pages, from the start of the mapping on, cannot fail.
            let _ = unsafe { rustix::mm::munmap(self.at(at, len).cast::<c_void>(), len) };
        }
    }
}

/// Offset and length of the pieces of a range to fault in and to unmap. Each page is in one piece.
fn pieces(range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let end = range.end;
    range.step_by(PIECE_BYTES).map(move |at| (at, PIECE_BYTES.min(end - at)))
}

/// An anonymous file of `len` bytes with its memory reserved, not yet sealed.
pub(super) fn create_file(name: &str, len: u64) -> Result<OwnedFd, RingError> {
    let file = create_sparse(name, len)?;
    reserve(&file, 0, len)?;
    Ok(file)
}

/// An anonymous file of `len` bytes without memory, not yet sealed.
pub(super) fn create_sparse(name: &str, len: u64) -> Result<OwnedFd, RingError> {
    let file = memfd(name)?;
    rustix::fs::ftruncate(&file, len).map_err(|errno| os("ftruncate", errno))?;
    Ok(file)
}

/// Reserving turns a lack of memory into an error here instead of a SIGBUS later.
fn reserve(file: &OwnedFd, offset: u64, len: u64) -> Result<(), RingError> {
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset, len)
        .map_err(|errno| os("fallocate", errno))
}

/// Makes a range of whole pages of a file present in its mapping.
pub(super) fn provide(
    file: &OwnedFd,
    region: &Region,
    range: Range<usize>,
) -> Result<(), RingError> {
    for (at, len) in pieces(range) {
        reserve(file, at as u64, len as u64)?;
        region.fault_in(at..at + len)?;
    }
    Ok(())
}

fn memfd(name: &str) -> Result<OwnedFd, RingError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Before Linux 6.3 the flag is unknown.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        other => other,
    }
    .map_err(|errno| os("memfd_create", errno))
}

/// Seals the size of `file` and the set of seals; with `frozen` also forbids new writable mappings
/// and writes other than through existing ones.
pub(super) fn seal(file: impl AsFd, frozen: bool) -> Result<(), RingError> {
    rustix::fs::fcntl_add_seals(file, required_seals(frozen))
        .map_err(|errno| os("F_ADD_SEALS", errno))
}

/// The seals that [`seal`] sets and that the consumer requires.
pub(super) fn required_seals(frozen: bool) -> SealFlags {
    let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if frozen { size | SealFlags::FUTURE_WRITE } else { size }
}

/// The error of system call `call`.
pub(super) fn os(call: &'static str, errno: Errno) -> RingError {
    RingError::Os { call, errno }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a file of this name is mapped anywhere in this process.
    fn is_mapped(name: &str) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
        maps.lines().any(|line| line.contains(name))
    }

    #[test]
    fn a_region_of_many_pieces_is_mapped_and_unmapped_whole() {
        let len = 5 * PIECE_BYTES / 2 + 1;
        let file = create_file("dquant-test-pieces", len as u64).expect("memory");
        let region = Region::map(file.as_fd(), len as u64, Access::ReadWrite).expect("memory");
        for at in [0, PIECE_BYTES - 1, PIECE_BYTES, len - 1] {
            // SAFETY: nobody else has the file, and it is mapped for writing.
            unsafe { region.copy_in(at, b"x") };
            // SAFETY: nobody writes it meanwhile.
            assert_eq!(unsafe { region.bytes(at, 1) }, b"x");
        }
        assert!(is_mapped("dquant-test-pieces"));
        drop(region);
        assert!(!is_mapped("dquant-test-pieces"));
    }
}
