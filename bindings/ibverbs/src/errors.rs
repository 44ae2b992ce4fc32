//! How calls fail: `errno` values, and the three ways in which verbs hand them over.

use std::ffi::c_int;
use std::fmt::Arguments;
use std::io::Write;

use roce::verbs::VerbsError;
use rustix::io::Errno;

/// What a call came to.
pub(crate) type Outcome<T> = Result<T, Errno>;

/// A line on stderr, for whoever runs the program: it has no place for our reasons. Where it cannot be
/// written it is lost; the program goes on.
pub(crate) fn say(text: Arguments<'_>) {
    // In one piece, so that lines of several threads do not mix.
    let line = format!("libibverbs (dquant): {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Says why a device cannot be opened: all that programs say is that it cannot.
pub(crate) fn refused(device: &str, what: &str, why: Errno) -> Errno {
    say(format_args!("{device}: {what}: {why}; hint: {}", hint_for(why)));
    why
}

/// The next thing to try.
pub(crate) fn hint_for(error: Errno) -> &'static str {
    match error {
        Errno::MFILE => "allow more open files (ulimit -n 1024), or close some",
        Errno::NFILE => "the machine has as many open files as it may (sysctl fs.file-max)",
        Errno::AGAIN => "allow more processes and threads (ulimit -u)",
        Errno::NOMEM | Errno::NOBUFS => "there is too little memory",
        Errno::NODEV => "is it still up, with an address? (ip address)",
        _ => "`dquant doctor` looks at what this machine offers",
    }
}

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
