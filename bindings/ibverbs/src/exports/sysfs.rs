//! Reads sysfs files, through the view where a path belongs to it.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Once;

use nic::mappings::Mappings;
use rustix::io::Errno;

use super::or_minus_one;
use crate::objects::sysfs;
use crate::process::errors::say;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    or_minus_one((|| {
        if dir.is_null() || file.is_null() || buf.is_null() || size == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's strings.
        let bytes = unsafe { sysfs::read(CStr::from_ptr(dir), CStr::from_ptr(file))? };
        let len = bytes.len().min(size - 1);
        // SAFETY: the caller has room for `size` bytes.
        unsafe {
            buf.cast::<u8>().copy_from(bytes.as_ptr(), len);
            buf.add(len).write(0);
        }
        Ok(len as c_int)
    })())
}

/// The symbol of the C library that libibverbs has always offered, too. Programs hardly call it,
/// but another libibverbs does before it lists its devices.
#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(other) = other_library() {
            let hint = "programs find this one by the names libibverbs.so.1 and libibverbs.so, not by a path";
            say(format_args!("{other} is loaded, too; it has no devices here"), Some(hint));
        }
    });
    c"/sys".as_ptr()
}

/// The path of a libibverbs in this process that is not this one.
fn other_library() -> Option<String> {
    let own = ibv_get_sysfs_path as extern "C" fn() -> *const c_char as usize as u64;
    let all = Mappings::now().ok()?;
    let ours = all.iter().find(|mapping| (mapping.first..mapping.end).contains(&own))?.inode;
    let is_one =
        |name: &str| name.rsplit('/').next().is_some_and(|file| file.starts_with("libibverbs.so"));
    let other = all.iter().find(|mapping| mapping.inode != ours && is_one(mapping.name));
    other.map(|mapping| mapping.name.to_owned())
}

/// For drivers, which have no devices here.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_ibdev_sysfs_file(
    _buf: *mut c_char,
    _size: usize,
    _device: *const std::ffi::c_void,
    _format: *const c_char,
) -> c_int {
    or_minus_one(Err(Errno::OPNOTSUPP))
}
