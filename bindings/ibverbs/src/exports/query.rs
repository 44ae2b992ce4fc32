//! Queries of a device, its port, its GIDs and partition keys.

use std::ffi::c_int;

use nic::clock;
use rustix::io::Errno;

use super::{code, fill, or_minus_one, set_errno};
use crate::abi::*;
use crate::objects::gid;
use crate::objects::{Context, living};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: null or the caller's place for the attributes.
    code(
        living::<Context>(context)
            .and_then(|context| unsafe { fill(attr, || Ok(context.device_attributes())) }),
    )
}

pub(super) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        // SAFETY: null or the caller's input.
        let extension = unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0);
        if attr.is_null() || extension || attr_size < size_of::<ibv_device_attr>() {
            return Err(Errno::INVAL);
        }
        let all = context.device_attributes_ex();
        // SAFETY: the caller says how many bytes there is room for.
        unsafe { write_prefix(&all, attr.cast(), attr_size) };
        Ok(())
    }))
}

/// The library's clock. As NICs do, it reports everything in the nanoseconds.
pub(super) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    code(living::<Context>(context).and_then(|_| {
        // SAFETY: null or the caller's values.
        let values = unsafe { values.as_mut() }.ok_or(Errno::INVAL)?;
        if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Errno::INVAL);
        }
        if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            let now = clock::now().as_nanos() as i64;
            values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: now };
        }
        Ok(())
    }))
}

/// Writes as much of `value` as an older or newer caller has room for, and zeroes the rest.
///
/// # Safety
/// `place` is valid for writing `room` bytes.
unsafe fn write_prefix<T>(value: &T, place: *mut u8, room: usize) {
    let len = size_of::<T>().min(room);
    // SAFETY: `len` bytes are readable in `value` and writable at `place`, as is the rest there.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), place, len);
        place.add(len).write_bytes(0, room - len);
    }
}

pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    attr_len: usize,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        let all = context.port_attributes(port)?;
        // SAFETY: the caller says how many bytes there is room for.
        unsafe { write_prefix(&all, attr.cast(), attr_len) };
        Ok(())
    }))
}

/// The symbol that programs from before `verbs_context` use: their structure ends with the flags.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    let compat_len = core::mem::offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: as the caller promises.
    unsafe { query_port(context, port, attr, compat_len) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|context| {
        let address = context.address_at(u32::from(port), i64::from(index))?;
        // SAFETY: null or the caller's place for a GID.
        unsafe { fill(gid, || Ok(gid::of_ip(address))) }.map(|()| 0)
    }))
}

/// The type as in sysfs: 0 for InfiniBand and RoCE v1, 1 for RoCE v2.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: u32,
    gid_type: *mut u32,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|context| {
        context.address_at(u32::from(port), i64::from(index))?;
        // SAFETY: null or the caller's place for the type.
        unsafe { fill(gid_type, || Ok(1)) }.map(|()| 0)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        if port != 1 || flags != 0 || entry.is_null() {
            return Err(Errno::INVAL);
        }
        let all = context.gid_entry(index)?;
        // SAFETY: the caller says how many bytes there is room for.
        unsafe { write_prefix(&all, entry.cast(), entry_size) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let filled = living::<Context>(context).and_then(|context| {
        let count = context.engine.interface.addresses.len();
        if flags != 0 || entries.is_null() || max_entries < count {
            return Err(Errno::INVAL);
        }
        for index in 0..count {
            let all = context.gid_entry(index as u32)?;
            // SAFETY: the caller has room for `max_entries` entries of `entry_size` bytes.
            unsafe { write_prefix(&all, entries.cast::<u8>().add(index * entry_size), entry_size) };
        }
        Ok(count as isize)
    });
    filled.unwrap_or_else(|error| {
        set_errno(error);
        -(error.raw_os_error() as isize)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|_| {
        if port != 1 || index != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: null or the caller's place for a key.
        unsafe { fill(pkey, || Ok(DEFAULT_PKEY.to_be())) }.map(|()| 0)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|_| {
        // Full and limited members of the default partition.
        let known = port == 1 && u16::from_be(pkey) | 0x8000 == DEFAULT_PKEY;
        if known { Ok(0) } else { Err(Errno::INVAL) }
    }))
}
