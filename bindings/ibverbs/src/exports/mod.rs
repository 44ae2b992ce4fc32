//! The C functions: they check pointers, call the objects, and return results as C expects. No verb
//! is executed here. Layers below do not refer to these functions: the function tables in the C
//! structures are filled here when an object is created.
//!
//! Calls come from C: every pointer may be null or stale, no call may panic, and an error is the
//! `errno` in the man page.

mod ah;
mod channel;
mod context;
mod cq;
mod cq_ex;
mod device;
mod events;
mod from_kernel;
mod interpose;
mod mr;
mod multicast;
mod mw;
mod pd;
mod post;
mod qp;
mod query;
mod srq;
mod sysfs;
mod text;
mod unsupported;
mod wr_api;

use std::ffi::c_int;

use rustix::io::Errno;

use crate::objects::Object;
use crate::process::errors::Outcome;

#[cfg(test)]
pub(crate) use {cq_ex::create_cq_ex, qp::create_qp_ex};

/// Sets `errno` of the calling thread.
fn set_errno(error: Errno) {
    // SAFETY: the C library's errno location is valid for the calling thread.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// A pointer, or null with `errno` set.
fn or_null<T>(made: Outcome<*mut T>) -> *mut T {
    made.unwrap_or_else(|error| {
        set_errno(error);
        std::ptr::null_mut()
    })
}

/// A program's handle of an object, or null with `errno` set.
fn handle_or_null<T: Object>(made: Outcome<&'static T>) -> *mut T::C {
    or_null(made.map(Object::handle))
}

/// 0, or the value of `errno` (which is set, too).
fn code(done: Outcome<()>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            error.raw_os_error()
        }
    }
}

/// A value that is not negative, or -1 with `errno` set.
fn or_minus_one(done: Outcome<c_int>) -> c_int {
    done.unwrap_or_else(|error| {
        set_errno(error);
        -1
    })
}

/// The caller's structure.
///
/// # Errors
/// `EINVAL` for null.
///
/// # Safety
/// `place` is null or valid for reading as long as the result is used.
unsafe fn given<'a, T>(place: *const T) -> Outcome<&'a T> {
    // SAFETY: as the caller promises.
    unsafe { place.as_ref() }.ok_or(Errno::INVAL)
}

/// Writes a result to the caller's place.
///
/// # Errors
/// `EINVAL` for null; `value` is not called then.
///
/// # Safety
/// `place` is null or valid for writing.
unsafe fn fill<T>(place: *mut T, value: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    if place.is_null() {
        return Err(Errno::INVAL);
    }
    let value = value()?;
    // SAFETY: as the caller promises.
    unsafe { place.write(value) };
    Ok(())
}
