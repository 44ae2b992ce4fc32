//! Functions of libc that redirect programs to the view of `/sys/class/infiniband`
//! (`objects/sysfs.rs`).
//!
//! The library is preloaded, so these are found before libc's. Each replaces its path if that
//! belongs to the view, and calls the next definition. Nothing else is changed. Calls on a file
//! descriptor opened through here need no redirection, nor do relative paths after a `chdir`
//! through here.
//!
//! Not covered: programs that make system calls directly (Go), and the lookups that `glob` and
//! `fts` make inside libc.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

use super::set_errno;
use crate::objects::sysfs;

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

/// The replacement of `path`, if it belongs to the view. A relative path starts at `dir`.
fn replaced(dir: c_int, path: *const c_char) -> Option<CString> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the program hands a C string to a function that expects one.
    let path = unsafe { CStr::from_ptr(path) };
    if !path.to_bytes().windows(MARK.len()).any(|part| part == MARK) {
        return None;
    }
    let whole = absolute(dir, path.to_bytes())?;
    if sysfs::is_ours(&whole) { sysfs::redirect(&whole) } else { None }
}

/// Every path of the view contains this.
const MARK: &[u8] = b"infiniband";

/// The absolute path, without empty parts and `.`.
fn absolute(dir: c_int, path: &[u8]) -> Option<Vec<u8>> {
    let start = match dir {
        _ if path.starts_with(b"/") => PathBuf::new(),
        libc::AT_FDCWD => std::env::current_dir().ok()?,
        _ => std::fs::read_link(format!("/proc/self/fd/{dir}")).ok()?,
    };
    let parts = start.as_os_str().as_bytes().split(|&byte| byte == b'/');
    let parts = parts.chain(path.split(|&byte| byte == b'/'));
    let named = parts.filter(|part| !part.is_empty() && *part != b".");
    Some(named.flat_map(|part| [b"/", part].concat()).collect())
}

/// Defines functions `name(before.., path, after..) -> type`, which return `failed` if libc has
/// none. `name[dir](..)` takes relative paths from the directory `dir`, others from the current
/// one.
macro_rules! interpose {
    ($( $name:ident $([$dir:ident])? ($($before:ident: $bty:ty),* ; path $(, $after:ident: $aty:ty)*) -> $ret:ty, $failed:expr; )+) => { $(
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
            let start = [$($dir,)? libc::AT_FDCWD][0];
            let replaced = replaced(start, path);
            let path = replaced.as_ref().map_or(path, |replaced| replaced.as_ptr());
            // SAFETY: the caller's own arguments, and a path that lives until the call returns.
            unsafe { next($($before,)* path $(, $after)*) }
        }
    )+ };
}

// `open` and the like take a mode only when they create a file. A third argument is passed on from
// its register, set or not, which is harmless on every calling convention of 64-bit Linux.
interpose! {
    open(; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    open64(; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    __open_2(; path, flags: c_int) -> c_int, -1;
    __open64_2(; path, flags: c_int) -> c_int, -1;
    openat[dir](dir: c_int; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    openat64[dir](dir: c_int; path, flags: c_int, mode: libc::mode_t) -> c_int, -1;
    __openat_2[dir](dir: c_int; path, flags: c_int) -> c_int, -1;
    __openat64_2[dir](dir: c_int; path, flags: c_int) -> c_int, -1;
    fopen(; path, mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    fopen64(; path, mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    freopen(; path, mode: *const c_char, file: *mut c_void) -> *mut c_void, std::ptr::null_mut();
    freopen64(; path, mode: *const c_char, file: *mut c_void) -> *mut c_void, std::ptr::null_mut();
    opendir(; path) -> *mut c_void, std::ptr::null_mut();
    scandir(; path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, -1;
    scandir64(; path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, -1;
    scandirat[dir](dir: c_int; path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, -1;
    scandirat64[dir](dir: c_int; path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, -1;
    ftw(; path, each: *const c_void, depth: c_int) -> c_int, -1;
    ftw64(; path, each: *const c_void, depth: c_int) -> c_int, -1;
    nftw(; path, each: *const c_void, depth: c_int, flags: c_int) -> c_int, -1;
    nftw64(; path, each: *const c_void, depth: c_int, flags: c_int) -> c_int, -1;
    chdir(; path) -> c_int, -1;
    access(; path, mode: c_int) -> c_int, -1;
    eaccess(; path, mode: c_int) -> c_int, -1;
    euidaccess(; path, mode: c_int) -> c_int, -1;
    faccessat[dir](dir: c_int; path, mode: c_int, flags: c_int) -> c_int, -1;
    stat(; path, buf: *mut c_void) -> c_int, -1;
    stat64(; path, buf: *mut c_void) -> c_int, -1;
    lstat(; path, buf: *mut c_void) -> c_int, -1;
    lstat64(; path, buf: *mut c_void) -> c_int, -1;
    fstatat[dir](dir: c_int; path, buf: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64[dir](dir: c_int; path, buf: *mut c_void, flags: c_int) -> c_int, -1;
    statx[dir](dir: c_int; path, flags: c_int, mask: c_uint, buf: *mut c_void) -> c_int, -1;
    __xstat(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __xstat64(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __lxstat(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __lxstat64(version: c_int; path, buf: *mut c_void) -> c_int, -1;
    __fxstatat[dir](version: c_int, dir: c_int; path, buf: *mut c_void, flags: c_int) -> c_int, -1;
    __fxstatat64[dir](version: c_int, dir: c_int; path, buf: *mut c_void, flags: c_int) -> c_int, -1;
    statfs(; path, buf: *mut c_void) -> c_int, -1;
    statfs64(; path, buf: *mut c_void) -> c_int, -1;
    statvfs(; path, buf: *mut c_void) -> c_int, -1;
    statvfs64(; path, buf: *mut c_void) -> c_int, -1;
    pathconf(; path, name: c_int) -> c_long, -1;
    getxattr(; path, name: *const c_char, value: *mut c_void, size: usize) -> isize, -1;
    lgetxattr(; path, name: *const c_char, value: *mut c_void, size: usize) -> isize, -1;
    listxattr(; path, list: *mut c_char, size: usize) -> isize, -1;
    llistxattr(; path, list: *mut c_char, size: usize) -> isize, -1;
    inotify_add_watch(fd: c_int; path, mask: u32) -> c_int, -1;
    readlink(; path, buf: *mut c_char, size: usize) -> isize, -1;
    __readlink_chk(; path, buf: *mut c_char, size: usize, room: usize) -> isize, -1;
    readlinkat[dir](dir: c_int; path, buf: *mut c_char, size: usize) -> isize, -1;
    __readlinkat_chk[dir](dir: c_int; path, buf: *mut c_char, size: usize, room: usize) -> isize, -1;
    realpath(; path, resolved: *mut c_char) -> *mut c_char, std::ptr::null_mut();
    __realpath_chk(; path, resolved: *mut c_char, room: usize) -> *mut c_char, std::ptr::null_mut();
    canonicalize_file_name(; path) -> *mut c_char, std::ptr::null_mut();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_start_at_their_directory() {
        let from = |dir, path: &str| String::from_utf8(absolute(dir, path.as_bytes()).unwrap());
        assert_eq!(from(7, "/sys//class/./infiniband/").unwrap(), "/sys/class/infiniband");
        let here = std::env::current_dir().unwrap();
        let below = here.join("infiniband/x");
        assert_eq!(from(libc::AT_FDCWD, "infiniband/x").unwrap(), below.to_str().unwrap());
        let root = std::fs::File::open("/").unwrap();
        let dir = std::os::fd::AsRawFd::as_raw_fd(&root);
        assert_eq!(from(dir, "sys/class/infiniband").unwrap(), "/sys/class/infiniband");
        assert_eq!(absolute(-7, b"infiniband"), None);
    }
}
