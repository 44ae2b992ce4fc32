//! The device list: one device for each network interface that is up and has an address.
//!
//! A device structure, once made, stays for the life of the process: contexts point to it after the
//! list it came in was freed.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};

use rustix::io::Errno;

use crate::abi::*;
use crate::errors::{Outcome, or_null, refused, set_errno};
use crate::fork::{self, ForkLock};
use crate::netdev::{self, Interface};
use crate::object::{Arena, Mark, Object, living, object};
use crate::sysfs;

/// A device. Providers look at what rdma-core keeps behind the public structure to find out whether
/// a device is theirs; they find zeroes.
#[repr(C)]
pub(crate) struct Device {
    c: ibv_device,
    private: [u64; 64],
    mark: Mark,
    owner: *mut ibv_context,
    /// The interface it stands for.
    pub(crate) interface: String,
    guid: u64,
    index: c_int,
}

object!(Device, ibv_device);

impl Device {
    fn new(interface: &Interface) -> Device {
        let name = device_name(interface);
        let mut c = ibv_device {
            _ops: [std::ptr::null(); 2],
            node_type: IBV_NODE_CA as c_int,
            transport_type: IBV_TRANSPORT_IB as c_int,
            name: [0; NAME_MAX],
            dev_name: [0; NAME_MAX],
            dev_path: [0; PATH_MAX],
            ibdev_path: [0; PATH_MAX],
        };
        let uverbs = format!("uverbs{}", interface.index);
        copy_text(&mut c.name, &name);
        copy_text(&mut c.dev_name, &uverbs);
        copy_text(&mut c.dev_path, &format!("{}_verbs/{uverbs}", sysfs::CLASS));
        copy_text(&mut c.ibdev_path, &format!("{}/{name}", sysfs::CLASS));
        Device {
            c,
            private: [0; 64],
            mark: Mark::default(),
            owner: std::ptr::null_mut(),
            interface: interface.name.clone(),
            guid: guid(interface),
            index: interface.index as c_int,
        }
    }

    /// Node GUID, in host byte order.
    pub(crate) fn guid(&self) -> u64 {
        self.guid
    }
}

/// The device's name: `dq_eth0`.
pub(crate) fn device_name(interface: &Interface) -> String {
    format!("dq_{}", interface.name)
}

/// EUI-64 of the hardware address; without one, a locally administered number from the index.
pub(crate) fn guid(interface: &Interface) -> u64 {
    let [a, b, c, d, e, f] = interface.mac;
    if interface.mac == [0; 6] {
        return 0x0200_00ff_fe00_0000 | u64::from(interface.index);
    }
    u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// Copies as much as fits, with a terminating zero.
pub(crate) fn copy_text(place: &mut [c_char], text: &str) {
    let room = place.len() - 1;
    for (to, from) in place[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// Devices that were made, by the names of their interfaces.
static KNOWN: ForkLock<Vec<(String, usize)>> = ForkLock::new(Vec::new());

/// The device of an interface, made at first sight.
fn device_of(interface: &Interface) -> *mut ibv_device {
    let mut known = KNOWN.lock();
    if let Some((_, handle)) = known.iter().find(|(name, _)| *name == interface.name) {
        return *handle as *mut ibv_device;
    }
    let arena: &Arena<Device> = Device::arena();
    let handle = arena.insert(Device::new(interface)).handle();
    known.push((interface.name.clone(), handle as usize));
    handle
}

/// Lists that were handed out and not freed, with their lengths.
static LISTS: ForkLock<Option<HashMap<usize, usize>>> = ForkLock::new(None);

/// In a child: the parent's devices and lists are its own, too. They are descriptions, nothing more.
///
/// # Safety
/// As [`ForkLock::renew`].
pub(crate) unsafe fn renew() {
    // SAFETY: as the caller promises.
    unsafe {
        Device::arena().renew(true);
        KNOWN.renew(Vec::new(), |_| ());
        LISTS.renew(None, |_| ());
    }
}

fn device_list() -> Outcome<Vec<*mut ibv_device>> {
    fork::watch();
    let interfaces = netdev::interfaces();
    sysfs::prepare(&interfaces);
    Ok(interfaces.iter().map(device_of).collect())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let found = device_list();
    if !num_devices.is_null() {
        let count = found.as_ref().map_or(0, Vec::len);
        // SAFETY: the caller's place for the number.
        unsafe { num_devices.write(count as c_int) };
    }
    or_null(found.map(|mut devices| {
        devices.push(std::ptr::null_mut());
        let list = Box::leak(devices.into_boxed_slice());
        let mut lists = LISTS.lock();
        lists.get_or_insert_default().insert(list.as_ptr() as usize, list.len());
        list.as_mut_ptr()
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let mut lists = LISTS.lock();
    let Some(len) = lists.get_or_insert_default().remove(&(list as usize)) else {
        return;
    };
    // SAFETY: the list was leaked with this length and is freed once: it has left the table.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len)) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    match Device::arena().find(device) {
        Some(device) => device.c.name.as_ptr(),
        None => {
            set_errno(Errno::INVAL);
            std::ptr::null()
        }
    }
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

/// The interface behind a device, as it is now.
pub(crate) fn interface_of(device: *mut ibv_device) -> Outcome<(&'static Device, Interface)> {
    let device = living::<Device>(device)?;
    let found = netdev::interface(&device.interface);
    let interface = found.and_then(|found| found.ok_or(Errno::NODEV)).map_err(|error| {
        let name = format!("dq_{}", device.interface);
        refused(&name, "its interface is not found", error)
    })?;
    Ok((device, interface))
}
