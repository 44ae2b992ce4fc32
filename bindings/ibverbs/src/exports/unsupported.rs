//! Symbols that exist so that providers load, and calls that this device does not support.
//!
//! Vendor libraries (libmlx5, libefa) are linked by programs that use their extensions and import
//! rdma-core's private interface to the kernel. There is no kernel here: registering a driver does
//! nothing, so no device of theirs ever appears, and commands fail as on a kernel without them.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;

use super::{code, or_null, set_errno};
use crate::abi::*;
use crate::process::settings;

/// Commands to the kernel: `EOPNOTSUPP` for any arguments.
macro_rules! commands {
    ($($name:ident)+) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            code(Err(Errno::OPNOTSUPP))
        }
    )+ };
}

commands! {
    execute_ioctl ibv_cmd_advise_mr ibv_cmd_alloc_dm ibv_cmd_alloc_mw ibv_cmd_alloc_pd
    ibv_cmd_attach_mcast ibv_cmd_close_xrcd ibv_cmd_create_ah ibv_cmd_create_counters
    ibv_cmd_create_cq ibv_cmd_create_cq_ex ibv_cmd_create_flow ibv_cmd_create_flow_action_esp
    ibv_cmd_create_qp ibv_cmd_create_qp_ex ibv_cmd_create_qp_ex2 ibv_cmd_create_rwq_ind_table
    ibv_cmd_create_srq ibv_cmd_create_srq_ex ibv_cmd_create_wq ibv_cmd_dealloc_mw
    ibv_cmd_dealloc_pd ibv_cmd_dereg_mr ibv_cmd_destroy_ah ibv_cmd_destroy_counters
    ibv_cmd_destroy_cq ibv_cmd_destroy_flow ibv_cmd_destroy_flow_action ibv_cmd_destroy_qp
    ibv_cmd_destroy_rwq_ind_table ibv_cmd_destroy_srq ibv_cmd_destroy_wq ibv_cmd_detach_mcast
    ibv_cmd_free_dm ibv_cmd_get_context ibv_cmd_modify_cq ibv_cmd_modify_flow_action_esp
    ibv_cmd_modify_qp ibv_cmd_modify_qp_ex ibv_cmd_modify_srq ibv_cmd_modify_wq ibv_cmd_open_qp
    ibv_cmd_open_xrcd ibv_cmd_poll_cq ibv_cmd_post_recv ibv_cmd_post_send ibv_cmd_post_srq_recv
    ibv_cmd_query_context ibv_cmd_query_device_any ibv_cmd_query_mr ibv_cmd_query_port
    ibv_cmd_query_qp ibv_cmd_query_srq ibv_cmd_read_counters ibv_cmd_reg_dm_mr
    ibv_cmd_reg_dmabuf_mr ibv_cmd_reg_mr ibv_cmd_req_notify_cq ibv_cmd_rereg_mr ibv_cmd_resize_cq
}

/// Drivers announce themselves when they are loaded.
#[unsafe(no_mangle)]
extern "C" fn verbs_register_driver_34(_ops: *const c_void) {}

/// The variant from before 2017.
#[unsafe(no_mangle)]
extern "C" fn ibv_register_driver(_name: *const c_char, _init: *const c_void) {}

/// Opens a driver's device: there is none.
#[unsafe(no_mangle)]
extern "C" fn verbs_open_device(
    _device: *mut ibv_device,
    _private: *mut c_void,
) -> *mut ibv_context {
    or_null(Err(Errno::OPNOTSUPP))
}

#[unsafe(no_mangle)]
extern "C" fn _verbs_init_and_alloc_context(
    _device: *mut ibv_device,
    _cmd_fd: c_int,
    _alloc_size: usize,
    _offset: *mut verbs_context,
    _driver_id: u32,
) -> *mut c_void {
    or_null(Err(Errno::OPNOTSUPP))
}

#[unsafe(no_mangle)]
extern "C" fn verbs_set_ops(_context: *mut verbs_context, _ops: *const c_void) {}

#[unsafe(no_mangle)]
extern "C" fn verbs_uninit_context(_context: *mut verbs_context) {}

#[unsafe(no_mangle)]
extern "C" fn verbs_init_cq(
    _cq: *mut ibv_cq,
    _context: *mut ibv_context,
    _channel: *mut ibv_comp_channel,
    _cq_context: *mut c_void,
) {
}

#[unsafe(no_mangle)]
extern "C" fn __ioctl_final_num_attrs(_num_attrs: u32, _link: *const c_void) -> u32 {
    0
}

/// Log lines of drivers, which are discarded. The arguments after the format are ignored.
#[unsafe(no_mangle)]
extern "C" fn __verbs_log(_context: *mut verbs_context, _level: u32, _format: *const c_char) {}

/// Read by drivers: whether destroying an object of a removed device succeeds. The system's library
/// writes it where a program has loaded that one as well: its references to the symbol end here.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name of C")]
static verbs_allow_disassociate_destroy: AtomicBool = AtomicBool::new(false);

// ---- objects of other processes -----------------------------------------------------------------

#[unsafe(no_mangle)]
extern "C" fn ibv_import_device(_cmd_fd: c_int) -> *mut ibv_context {
    or_null(Err(Errno::OPNOTSUPP))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_pd(_context: *mut ibv_context, _handle: u32) -> *mut ibv_pd {
    or_null(Err(Errno::OPNOTSUPP))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_unimport_pd(_pd: *mut ibv_pd) {
    set_errno(Errno::OPNOTSUPP);
}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_mr(_pd: *mut ibv_pd, _handle: u32) -> *mut ibv_mr {
    or_null(Err(Errno::OPNOTSUPP))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_unimport_mr(_mr: *mut ibv_mr) {
    set_errno(Errno::OPNOTSUPP);
}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_dm(_context: *mut ibv_context, _handle: u32) -> *mut c_void {
    or_null(Err(Errno::OPNOTSUPP))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_unimport_dm(_dm: *mut c_void) {
    set_errno(Errno::OPNOTSUPP);
}

// ---- fork ---------------------------------------------------------------------------------------

/// Registered memory is ordinary memory, read and written by the parent: copy-on-write in a child
/// does not separate it from a device. Where local peers can map it, children are without its
/// pages, as with an adapter after this call.
#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_is_fork_initialized() -> c_int {
    if settings::shares_memory() { IBV_FORK_ENABLED as c_int } else { IBV_FORK_UNNEEDED as c_int }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
