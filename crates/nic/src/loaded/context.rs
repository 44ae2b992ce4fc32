//! The open handles of a device, and what is asked once when it is opened. Dropping them closes
//! them, so every object of the device has to be destroyed before.

use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::ptr;

use roce::verbs::MAX_SGE;

use super::library::{Functions, LoadError};
use super::translate::{self, Gid, PORT};
use crate::abi::*;

/// Entries looked at in the port's table of addresses.
const MAX_GIDS: u32 = 256;

/// Value of `abi_compat` in libraries with extended calls.
const EXTENDED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;

/// What a device says of itself when it is opened.
#[derive(Debug)]
pub(super) struct Port {
    /// The addresses that RoCEv2 packets can be sent from; there is one.
    pub(super) gids: Vec<Gid>,
    pub(super) max_sge: u32,
    /// Payload bytes.
    pub(super) largest_mtu: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) name: String,
    pub(super) functions: Functions,
    pub(super) handle: *mut ibv_context,
    /// All completion queues report to this channel.
    pub(super) channel: *mut ibv_comp_channel,
}

impl Context {
    /// Takes over a context that a library has opened.
    pub(super) fn adopt(
        functions: Functions,
        name: &str,
        handle: *mut ibv_context,
    ) -> Result<Context, LoadError> {
        // SAFETY: the context is open.
        let channel = unsafe { (functions.create_comp_channel)(handle) };
        // From here on, dropping closes what was opened.
        let context = Context { name: name.into(), functions, handle, channel };
        if channel.is_null() {
            return Err(LoadError::last("ibv_create_comp_channel"));
        }
        context.check_operations()?;
        context.fds().into_iter().try_for_each(never_wait)?;
        Ok(context)
    }

    /// Of the channel and of asynchronous events.
    pub(super) fn fds(&self) -> [RawFd; 2] {
        // SAFETY: both structures live until they are closed, which is when this is dropped.
        unsafe { [(*self.channel).fd, (*self.handle).async_fd] }
    }

    /// The port that is used.
    pub(super) fn port(&self) -> Result<Port, LoadError> {
        let port = self.query_port()?;
        let gids = self.find_gids(&port)?;
        let largest_mtu = translate::mtu_of(port.active_mtu).bytes();
        Ok(Port { gids, largest_mtu, max_sge: self.find_max_sge()? })
    }

    pub(super) fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open as long as this is not dropped; the table does not
        // change.
        unsafe { &(*self.handle).ops }
    }

    /// Refuses a device on which engines would wait for ever. Operations of shared receive queues
    /// and windows may be missing.
    fn check_operations(&self) -> Result<(), LoadError> {
        let ops = self.ops();
        let needed = [
            ("poll_cq", ops.poll_cq.is_some()),
            ("req_notify_cq", ops.req_notify_cq.is_some()),
            ("post_send", ops.post_send.is_some()),
            ("post_recv", ops.post_recv.is_some()),
        ];
        match needed.into_iter().find(|(_, is_there)| !is_there) {
            Some((operation, _)) => {
                Err(LoadError::Operation { device: self.name.clone(), operation })
            }
            None => Ok(()),
        }
    }

    fn find_max_sge(&self) -> Result<u32, LoadError> {
        // SAFETY: numbers only, for which zero is a value.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the function fills the structure.
        match unsafe { (self.functions.query_device)(self.handle, &raw mut attr) } {
            0 => Ok(u32::try_from(attr.max_sge).unwrap_or(1).clamp(1, MAX_SGE as u32)),
            _ => Err(LoadError::last("ibv_query_device")),
        }
    }

    fn query_port(&self) -> Result<ibv_port_attr, LoadError> {
        // SAFETY: numbers only, for which zero is a value.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        let result = match self.extended_query_port() {
            // SAFETY: the context is open, and the function fills as much as the length says.
            Some(query) => unsafe {
                query(self.handle, PORT, &raw mut attr, size_of::<ibv_port_attr>())
            },
            // SAFETY: as above; the old function fills the front of the structure, and no more.
            None => unsafe { (self.functions.query_port)(self.handle, PORT, &raw mut attr) },
        };
        match result {
            0 => Ok(attr),
            _ => Err(LoadError::last("ibv_query_port")),
        }
    }

    /// The extended query of the port, where the library has one.
    fn extended_query_port(&self) -> Option<QueryPort> {
        // SAFETY: the context is open.
        if unsafe { (*self.handle).abi_compat } != EXTENDED {
            return None;
        }
        let offset = core::mem::offset_of!(verbs_context, context);
        // SAFETY: a context that says so is the last field of a `verbs_context`, which grows
        // towards lower addresses: its size field lies just in front of the context.
        let outer = unsafe { self.handle.byte_sub(offset) }.cast::<verbs_context>();
        // SAFETY: as above; only this field is read, not the structure as a whole.
        let size = unsafe { (&raw const (*outer).sz).read() };
        if size < size_of::<verbs_context>() {
            return None;
        }
        // SAFETY: the structure is as large as ours, so it has this field.
        unsafe { (&raw const (*outer).query_port).read() }
    }

    /// The addresses that RoCEv2 packets can be sent from, IPv4 first, link-local ones last.
    fn find_gids(&self, port: &ibv_port_attr) -> Result<Vec<Gid>, LoadError> {
        let mut gids = Vec::new();
        let entries = u32::try_from(port.gid_tbl_len).unwrap_or(0).min(MAX_GIDS);
        for index in 0..entries {
            // SAFETY: numbers only, for which zero is a value.
            let mut entry: ibv_gid_entry = unsafe { std::mem::zeroed() };
            let size = size_of::<ibv_gid_entry>();
            // SAFETY: the context is open, and the function fills as much as the size says.
            let result = unsafe {
                let (query, port) = (self.functions.query_gid_ex, u32::from(PORT));
                query(self.handle, port, index, &raw mut entry, 0, size)
            };
            // Entries that are empty cannot be queried.
            if result == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2 {
                gids.push(Gid { ip: translate::ip_of(entry.gid), index: index as u8 });
            }
        }
        gids.sort_by_key(|gid| match gid.ip {
            IpAddr::V4(_) => 0,
            IpAddr::V6(ip) if ip.is_unicast_link_local() => 2,
            IpAddr::V6(_) => 1,
        });
        if gids.is_empty() { Err(LoadError::NoAddress(self.name.clone())) } else { Ok(gids) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: both are open, and nobody uses them again.
        unsafe {
            if !self.channel.is_null() {
                (self.functions.destroy_comp_channel)(self.channel);
            }
            (self.functions.close_device)(self.handle);
        }
    }
}

/// Makes reads of a descriptor nonblocking.
fn never_wait(fd: RawFd) -> Result<(), LoadError> {
    // SAFETY: the descriptor is open; the flags of nothing else change.
    let set = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if set == 0 { Ok(()) } else { Err(LoadError::last("fcntl")) }
}
