//! Functions of libc that lead programs to the view of `/sys/class/infiniband` (`sysfs.rs`).
//!
//! The library is preloaded, so these are found before libc's. Each looks at the first bytes of the
//! path, replaces it if it belongs to the view, and calls the next definition. Nothing else is
//! changed. Calls with a file descriptor that was opened through here need no help.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

use crate::errors::set_errno;
use crate::sysfs;

/// The next definition of a function.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Null if libc has no such function.
    fn get(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a C string; the handle asks for the definition after this library's.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// What takes the place of `path`, if it belongs to the view.
fn replaced(path: *const c_char) -> Option<CString> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the program hands a C string to a function that expects one.
    let path = unsafe { CStr::from_ptr(path) };
    if sysfs::is_ours(path.to_bytes()) { sysfs::redirect(path) } else { None }
}

/// Defines functions `name(before.., path, after..) -> type`, which return `failed` if libc has none.
macro_rules! interpose {
    ($( $name:ident($($before:ident: $bty:ty),* ; path $(, $after:ident: $aty:ty)*) -> $ret:ty, $failed:expr; )+) => { $(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code, reason = "tests are not to be interposed"))]
        unsafe extern "C" fn $name($($before: $bty,)* path: *const c_char $(, $after: $aty)*) -> $ret {
            type Function = unsafe extern "C" fn($($bty,)* *const c_char $(, $aty)*) -> $ret;
            static NEXT: Next = Next::new(match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            });
            let next = NEXT.get();
            if next.is_null() {
                set_errno(Errno::NOSYS);
                return $failed;
            }
            // SAFETY: the C library's function of this name has this type.
            let next = unsafe { std::mem::transmute::<*mut c_void, Function>(next) };
            let replaced = replaced(path);
            let path = replaced.as_ref().map_or(path, |replaced| replaced.as_ptr());
            // SAFETY: the caller's own arguments, and a path that lives until the call returns.
            unsafe { next($($before,)* path $(, $after)*) }
        }
    )+ };
}

// `open` and its kind take a mode only when they create. A third argument is passed on as it is found
// in its register, which does no harm: this holds on every calling convention of 64-bit Linux.
interpose! {
    open(; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    open64(; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    __open_2(; path, flags: c_int) -> c_int, -1;
    __open64_2(; path, flags: c_int) -> c_int, -1;
    openat(dir: c_int; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    openat64(dir: c_int; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    fopen(; path, mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    fopen64(; path, mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    opendir(; path) -> *mut c_void, std::ptr::null_mut();
    scandir(; path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, -1;
    scandir64(; path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, -1;
    access(; path, mode: c_int) -> c_int, -1;
    faccessat(dir: c_int; path, mode: c_int, flags: c_int) -> c_int, -1;
    stat(; path, buf: *mut c_void) -> c_int, -1;
    stat64(; path, buf: *mut c_void) -> c_int, -1;
    lstat(; path, buf: *mut c_void) -> c_int, -1;
    lstat64(; path, buf: *mut c_void) -> c_int, -1;
    fstatat(dir: c_int; path, buf: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64(dir: c_int; path, buf: *mut c_void, flags: c_int) -> c_int, -1;
    __xstat(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __xstat64(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __lxstat(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __lxstat64(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    readlink(; path, buf: *mut c_char, size: usize) -> isize, -1;
    readlinkat(dir: c_int; path, buf: *mut c_char, size: usize) -> isize, -1;
    realpath(; path, resolved: *mut c_char) -> *mut c_char, std::ptr::null_mut();
}
