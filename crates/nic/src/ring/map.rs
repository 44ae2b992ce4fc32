//! Shared memory: sealed anonymous files, their mappings, and the only raw pointers of the ring.
//!
//! May hold: creation, sealing, mapping, pre-faulting, bounds-checked access. May not hold: what the
//! words mean (`layout`) or in which order they are touched (`producer`, `consumer`, `wake`).
//!
//! Invariants that every `unsafe` below leans on:
//!
//! 1. A mapping covers `len` bytes of a file whose size is sealed (no grow, no shrink), so a peer can
//!    neither unmap our pages nor make an access raise SIGBUS by truncating the file.
//! 2. `base` comes from `mmap`, stays mapped until the value is dropped, and is page aligned.
//! 3. Words that another process may change are reached through atomics only.
//! 4. The data file is sealed against new writable mappings after the producer has its own, so no
//!    other process ever writes payload.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::RingError;

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
    /// Maps the first `len` bytes of `file` and faults all of them in, so that no page fault is left
    /// for the data path.
    pub(super) fn map(file: BorrowedFd<'_>, len: u64, access: Access) -> Result<Region, RingError> {
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
        region.fault_in()?;
        Ok(region)
    }

    fn fault_in(&self) -> Result<(), RingError> {
        let populate = match self.access {
            Access::ReadOnly => Advice::LinuxPopulateRead,
            Access::ReadWrite => Advice::LinuxPopulateWrite,
        };
        // Huge pages are a wish: kernels that do not offer them for shared memory say EINVAL.
        let _ = self.advise(Advice::LinuxHugepage);
        match self.advise(populate) {
            Ok(()) => Ok(()),
            // Before Linux 5.14 the first touch of each page pays instead.
            Err(Errno::INVAL) => Ok(()),
            Err(errno) => Err(os("madvise(populate)", errno)),
        }
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is ours (invariant 2) and none of the advice used here drops contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast::<c_void>(), self.len, advice) }
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

    /// Copies `bytes` to `at`.
    ///
    /// # Safety
    /// Nobody reads or writes the range meanwhile by the rules of the ring, and `self` is writable.
    pub(super) unsafe fn copy_in(&self, at: usize, bytes: &[u8]) {
        debug_assert_eq!(self.access, Access::ReadWrite);
        // SAFETY: in bounds by `at`; `bytes` cannot overlap a range that the caller owns.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(at, bytes.len()), bytes.len()) }
    }

    /// The bytes at `at`.
    ///
    /// # Safety
    /// Nobody writes the range while the slice lives.
    pub(super) unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds and mapped; the caller keeps writers out.
        unsafe { std::slice::from_raw_parts(self.at(at, len), len) }
    }

    /// The bytes at `at`, to be written.
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
        // SAFETY: mapped by `map`, and no reference outlives `self` (they borrow it). munmap of a
        // whole own mapping cannot fail.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
    }
}

/// An anonymous file of `len` bytes with its memory reserved, not yet sealed.
pub(super) fn create_file(name: &str, len: u64) -> Result<OwnedFd, RingError> {
    let file = memfd(name)?;
    // Reserving now turns a lack of memory into an error here instead of a SIGBUS later.
    rustix::fs::ftruncate(&file, len).map_err(|errno| os("ftruncate", errno))?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)
        .map_err(|errno| os("fallocate", errno))?;
    Ok(file)
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

/// Seals the size of `file` and the set of seals; with `frozen` also refuses writable mappings and
/// writes other than through those that exist.
pub(super) fn seal(file: impl AsFd, frozen: bool) -> Result<(), RingError> {
    rustix::fs::fcntl_add_seals(file, required_seals(frozen))
        .map_err(|errno| os("F_ADD_SEALS", errno))
}

/// The seals that [`seal`] sets and that the consumer insists on.
pub(super) fn required_seals(frozen: bool) -> SealFlags {
    let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if frozen { size | SealFlags::FUTURE_WRITE } else { size }
}

/// The error of system call `call`.
pub(super) fn os(call: &'static str, errno: Errno) -> RingError {
    RingError::Os { call, errno }
}
