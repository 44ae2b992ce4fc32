//! Reads sysfs files, through the view where a path belongs to it.

use std::ffi::{CStr, c_char, c_int};

use rustix::io::Errno;

use super::or_minus_one;
use crate::objects::sysfs;

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
