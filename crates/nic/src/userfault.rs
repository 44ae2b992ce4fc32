//! The system call and the requests of userfaultfd (linux/userfaultfd.h), for faults of user mode
//! only, which need no privilege. What is registered, and why, does not belong here.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::{c_int, c_ulong};

const USER_MODE_ONLY: c_int = 1;
const VERSION: u64 = 0xaa;

/// Moved mappings are reported.
pub const FEATURE_REMAP: u64 = 1 << 2;
/// Discarded pages are reported.
pub const FEATURE_REMOVE: u64 = 1 << 3;
/// Unmapped ranges are reported.
pub const FEATURE_UNMAP: u64 = 1 << 6;
/// Faults on shared memory whose page exists.
pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;

/// Faults where there is no page.
pub const MODE_MISSING: u64 = 1;
/// Faults on write-protected pages.
pub const MODE_WRITE_PROTECT: u64 = 1 << 1;
/// Faults where the page exists and is not mapped.
pub const MODE_MINOR: u64 = 1 << 2;

const API: c_ulong = request(3, 3, 0x3f);
/// Watches a range.
pub const REGISTER: c_ulong = request(3, 4, 0);
/// Watches it no longer.
pub const UNREGISTER: c_ulong = request(2, 2, 1);
/// Wakes threads that wait in faults.
pub const WAKE: c_ulong = request(2, 2, 2);
/// Fills a page that has none.
pub const COPY: c_ulong = request(3, 5, 3);
/// Protects pages, or ends that.
pub const WRITE_PROTECT: c_ulong = request(3, 3, 6);

/// Direction, words of its structure, number.
const fn request(direction: c_ulong, words: usize, number: c_ulong) -> c_ulong {
    direction << 30 | ((words * 8) as c_ulong) << 16 | 0xaa << 8 | number
}

/// A descriptor with these features, and with `flags` besides `O_CLOEXEC`.
///
/// # Errors
/// The call that failed, and why.
pub fn open(flags: c_int, features: u64) -> Result<OwnedFd, (&'static str, io::Error)> {
    // SAFETY: no arguments but numbers.
    let fd =
        unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY | flags) };
    if fd < 0 {
        return Err(("userfaultfd", io::Error::last_os_error()));
    }
    // SAFETY: the call has just returned it, and nobody else knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as c_int) };
    control(fd.as_raw_fd(), API, &mut [VERSION, features, 0])
        .map_err(|errno| ("UFFDIO_API", io::Error::from_raw_os_error(errno)))?;
    Ok(fd)
}

/// A request on a structure of 64-bit words.
///
/// # Errors
/// The error number.
pub fn control<const N: usize>(
    fd: RawFd,
    request: c_ulong,
    words: &mut [u64; N],
) -> Result<(), c_int> {
    debug_assert_eq!((request >> 16 & 0x3fff) as usize, N * 8);
    // SAFETY: the request names the length of the structure, which the kernel reads or writes. Of
    // those above, only `COPY` writes to memory: to pages of the range that the caller has
    // registered and that have no contents.
    let result = unsafe { libc::ioctl(fd, request as _, words.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}
