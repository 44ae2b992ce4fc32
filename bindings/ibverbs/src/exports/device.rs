//! The device list, and the names of devices.

use std::ffi::{c_char, c_int};

use rustix::io::Errno;

use super::or_null;
use crate::abi::*;
use crate::objects::device;
use crate::objects::{Device, Object};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let devices = device::list();
    if !num_devices.is_null() {
        // SAFETY: the caller's place for the number.
        unsafe { num_devices.write(devices.len() as c_int) };
    }
    device::hand_out(devices)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    device::free_list(list);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    let known = Device::arena().find(device).ok_or(Errno::INVAL);
    or_null(known.map(|device| device.name().as_ptr().cast_mut()))
}

/// In network byte order.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    Device::arena().find(device).map_or(0, |device| device.guid.to_be())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    Device::arena().find(device).map_or(-1, |device| device.index)
}
