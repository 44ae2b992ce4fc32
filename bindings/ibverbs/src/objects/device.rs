//! The device list: one device for each network interface that is up and has an address.
//!
//! Device structures are never freed: contexts point to them after the list they came in was freed.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};

use rustix::io::Errno;

use super::query::copy_text;
use super::sysfs;
use super::{Mark, Object, object};
use crate::abi::*;
use crate::engine::netdev::{self, Interface};
use crate::process::errors::Failure;
use crate::process::fork::ForkLock;

/// A device. Providers check the fields that rdma-core keeps after the public structure to find out
/// whether a device is theirs; they find zeroes.
#[repr(C)]
pub(crate) struct Device {
    c: ibv_device,
    private: [u64; 64],
    mark: Mark,
    owner: *mut ibv_context,
    /// Its interface.
    interface: String,
    /// Node GUID, in host byte order.
    pub(crate) guid: u64,
    pub(crate) index: c_int,
}

object!(Device, ibv_device);

impl Device {
    fn new(interface: &Interface) -> Device {
        let name = interface.device_name();
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
            guid: interface.guid(),
            index: interface.index as c_int,
        }
    }

    /// Its name as a C string.
    pub(crate) fn name(&self) -> &[c_char] {
        &self.c.name
    }

    /// The current state of its interface.
    pub(crate) fn find_interface(&self) -> Result<Interface, Failure> {
        let found = netdev::interface(&self.interface);
        found.and_then(|found| found.ok_or(Errno::NODEV)).map_err(|errno| {
            let name = netdev::device_name(&self.interface);
            Failure::new(errno, format_args!("{name}: its interface is not found: {errno}"))
        })
    }
}

/// Devices created so far, by the names of their interfaces.
static KNOWN: ForkLock<Vec<(String, usize)>> = ForkLock::new(Vec::new());

/// The device of an interface, created on first use.
fn device_of(interface: &Interface) -> *mut ibv_device {
    let mut known = KNOWN.lock();
    if let Some((_, handle)) = known.iter().find(|(name, _)| *name == interface.name) {
        return *handle as *mut ibv_device;
    }
    let handle = Device::arena().insert(Device::new(interface)).handle();
    known.push((interface.name.clone(), handle as usize));
    handle
}

/// Lists that were returned to programs and not freed, with their lengths.
static LISTS: ForkLock<Option<HashMap<usize, usize>>> = ForkLock::new(None);

/// In a child: it shares the parent's devices and lists, which are only descriptions.
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

/// The current devices, in the order of the device list.
pub(crate) fn list() -> Vec<*mut ibv_device> {
    super::watch_forks();
    let interfaces = netdev::interfaces();
    sysfs::prepare(&interfaces);
    interfaces.iter().map(device_of).collect()
}

/// A null-terminated list for programs; [`free_list`] frees it.
pub(crate) fn hand_out(mut devices: Vec<*mut ibv_device>) -> *mut *mut ibv_device {
    devices.push(std::ptr::null_mut());
    let list = Box::leak(devices.into_boxed_slice());
    LISTS.lock().get_or_insert_default().insert(list.as_ptr() as usize, list.len());
    list.as_mut_ptr()
}

/// Frees a list of [`hand_out`]; other pointers are ignored.
pub(crate) fn free_list(list: *mut *mut ibv_device) {
    let Some(len) = LISTS.lock().get_or_insert_default().remove(&(list as usize)) else {
        return;
    };
    // SAFETY: the list was leaked with this length and is freed once: it has left the table.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len)) });
}
