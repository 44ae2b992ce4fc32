//! Opening and closing devices, and the function tables that inline functions of the header call.

use std::ffi::{c_int, c_void};

use super::{code, cq, cq_ex, mr, mw, or_null, pd, post, qp, query, srq};
use crate::abi::*;
use crate::explain;
use crate::objects::{Context, Device, Object, living};
use crate::process::errors::Failure;

const UNUSED: *const c_void = std::ptr::null();

fn operations() -> ibv_context_ops {
    ibv_context_ops {
        _compat_query_device: UNUSED,
        _compat_query_port: UNUSED,
        _compat_alloc_pd: UNUSED,
        _compat_dealloc_pd: UNUSED,
        _compat_reg_mr: UNUSED,
        _compat_rereg_mr: UNUSED,
        _compat_dereg_mr: UNUSED,
        alloc_mw: Some(mw::alloc_mw),
        bind_mw: Some(mw::bind_mw),
        dealloc_mw: Some(mw::dealloc_mw),
        _compat_create_cq: UNUSED,
        poll_cq: Some(cq::poll_cq),
        req_notify_cq: Some(cq::req_notify_cq),
        _compat_cq_event: UNUSED,
        _compat_resize_cq: UNUSED,
        _compat_destroy_cq: UNUSED,
        _compat_create_srq: UNUSED,
        _compat_modify_srq: UNUSED,
        _compat_query_srq: UNUSED,
        _compat_destroy_srq: UNUSED,
        post_srq_recv: Some(post::post_srq_recv),
        _compat_create_qp: UNUSED,
        _compat_query_qp: UNUSED,
        _compat_modify_qp: UNUSED,
        _compat_destroy_qp: UNUSED,
        post_send: Some(post::post_send),
        post_recv: Some(post::post_recv),
        _compat_create_ah: UNUSED,
        _compat_destroy_ah: UNUSED,
        _compat_attach_mcast: UNUSED,
        _compat_detach_mcast: UNUSED,
        _compat_async_event: UNUSED,
    }
}

/// The tables of a context without its descriptors.
fn table(device: *mut ibv_device) -> verbs_context {
    let context = ibv_context {
        device,
        ops: operations(),
        cmd_fd: -1,
        async_fd: -1,
        num_comp_vectors: 1,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        // The header's mark for a context inside a `verbs_context`.
        abi_compat: usize::MAX as *mut c_void,
    };
    verbs_context {
        query_port: Some(query::query_port),
        advise_mr: Some(mr::advise_mr),
        alloc_null_mr: UNUSED,
        read_counters: UNUSED,
        attach_counters_point_flow: UNUSED,
        create_counters: UNUSED,
        destroy_counters: UNUSED,
        reg_dm_mr: UNUSED,
        alloc_dm: UNUSED,
        free_dm: UNUSED,
        modify_flow_action_esp: UNUSED,
        destroy_flow_action: UNUSED,
        create_flow_action_esp: UNUSED,
        modify_qp_rate_limit: None,
        alloc_parent_domain: Some(pd::alloc_parent_domain),
        dealloc_td: None,
        alloc_td: None,
        modify_cq: None,
        post_srq_ops: UNUSED,
        destroy_rwq_ind_table: UNUSED,
        create_rwq_ind_table: UNUSED,
        destroy_wq: UNUSED,
        modify_wq: UNUSED,
        create_wq: UNUSED,
        query_rt_values: Some(query::query_rt_values),
        create_cq_ex: Some(cq_ex::create_cq_ex),
        r#priv: std::ptr::null_mut(),
        query_device_ex: Some(query::query_device_ex),
        ibv_destroy_flow: UNUSED,
        ABI_placeholder2: UNUSED,
        ibv_create_flow: UNUSED,
        ABI_placeholder1: UNUSED,
        open_qp: UNUSED,
        create_qp_ex: Some(qp::create_qp_ex),
        get_srq_num: Some(srq::get_srq_num),
        create_srq_ex: Some(srq::create_srq_ex),
        open_xrcd: UNUSED,
        close_xrcd: UNUSED,
        _ABI_placeholder3: 0,
        sz: size_of::<verbs_context>(),
        context,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    or_null(living::<Device>(device).and_then(|device| {
        let opened = Context::open(device, table(device.handle()));
        let context = opened.map_err(|failure: Failure| failure.report())?;
        explain::start();
        Ok(context.handle())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    if code(living::<Context>(context).map(Context::close)) == 0 { 0 } else { -1 }
}
