//! How calls fail: `errno` values, and the three ways in which verbs hand them over.

use std::ffi::c_int;

use roce::verbs::VerbsError;
use rustix::io::Errno;

/// What a call came to.
pub(crate) type Outcome<T> = Result<T, Errno>;

/// Sets `errno` of the calling thread.
pub(crate) fn set_errno(error: Errno) {
    // SAFETY: the C library's errno location is valid for the calling thread.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// A pointer, or null with `errno` set.
pub(crate) fn or_null<T>(made: Outcome<*mut T>) -> *mut T {
    made.unwrap_or_else(|error| {
        set_errno(error);
        std::ptr::null_mut()
    })
}

/// 0, or the value of `errno` (which is set, too).
pub(crate) fn code(done: Outcome<()>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            error.raw_os_error()
        }
    }
}

/// A value that is not negative, or -1 with `errno` set.
pub(crate) fn or_minus_one(done: Outcome<c_int>) -> c_int {
    done.unwrap_or_else(|error| {
        set_errno(error);
        -1
    })
}

/// The `errno` value that the man pages and the kernel have for a refused verb.
pub(crate) fn errno_of(error: VerbsError) -> Errno {
    match error {
        VerbsError::PdInUse(_)
        | VerbsError::CqInUse(_)
        | VerbsError::SrqInUse(_)
        | VerbsError::RegionInUse(_) => Errno::BUSY,
        VerbsError::QueueFull { .. } | VerbsError::TableFull { .. } => Errno::NOMEM,
        _ => Errno::INVAL,
    }
}
