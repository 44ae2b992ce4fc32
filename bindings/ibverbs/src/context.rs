//! Opening and closing devices.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::EventfdFlags;

use crate::abi::*;
use crate::ah::Ah;
use crate::channel::CompChannel;
use crate::cq::{self, Cq};
use crate::cq_ex;
use crate::descriptor::Descriptor;
use crate::device::{self, Device};
use crate::engine::Engine;
use crate::errors::{Outcome, code, or_null, refused};
use crate::events::{EventQueue, QueuedEvent};
use crate::mr::{self, Mr};
use crate::mw::{self, Mw};
use crate::object::{Arena, Mark, Object, living};
use crate::pd::{self, Pd};
use crate::post;
use crate::qp::{self, Qp};
use crate::query;
use crate::srq::{self, Srq};

/// An open device, as one call of `ibv_open_device` sees it.
#[repr(C)]
pub(crate) struct Context {
    verbs: verbs_context,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) device: &'static Device,
    pub(crate) engine: Arc<Engine>,
    pub(crate) async_events: EventQueue<QueuedEvent>,
    /// What programs see as the command descriptor, until the device is closed. Nothing is ever
    /// written to it.
    command: Mutex<Option<Descriptor>>,
}

impl Object for Context {
    type C = ibv_context;
    const OFFSET: usize = core::mem::offset_of!(Context, verbs.context);

    fn arena() -> &'static Arena<Context> {
        static ARENA: Arena<Context> = Arena::new();
        &ARENA
    }

    fn mark(&self) -> &Mark {
        &self.mark
    }

    fn owner(&self) -> *mut ibv_context {
        self.owner
    }
}

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
        alloc_mw: mw::alloc_mw,
        bind_mw: mw::bind_mw,
        dealloc_mw: mw::dealloc_mw,
        _compat_create_cq: UNUSED,
        poll_cq: cq::poll_cq,
        req_notify_cq: cq::req_notify_cq,
        _compat_cq_event: UNUSED,
        _compat_resize_cq: UNUSED,
        _compat_destroy_cq: UNUSED,
        _compat_create_srq: UNUSED,
        _compat_modify_srq: UNUSED,
        _compat_query_srq: UNUSED,
        _compat_destroy_srq: UNUSED,
        post_srq_recv: post::post_srq_recv,
        _compat_create_qp: UNUSED,
        _compat_query_qp: UNUSED,
        _compat_modify_qp: UNUSED,
        _compat_destroy_qp: UNUSED,
        post_send: post::post_send,
        post_recv: post::post_recv,
        _compat_create_ah: UNUSED,
        _compat_destroy_ah: UNUSED,
        _compat_attach_mcast: UNUSED,
        _compat_detach_mcast: UNUSED,
        _compat_async_event: UNUSED,
    }
}

fn extended(context: ibv_context) -> verbs_context {
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

fn open(device: *mut ibv_device) -> Outcome<*mut ibv_context> {
    let (device, interface) = device::interface_of(device)?;
    let name = device::device_name(&interface);
    let no_events = |error| refused(&name, "no descriptor for its events", error);
    let async_events = EventQueue::new().map_err(no_events)?;
    let command = Descriptor::event(EventfdFlags::empty())
        .map_err(|error| refused(&name, "no descriptor for its commands", error))?;
    let engine = Engine::open(interface)?;
    let context = ibv_context {
        device: device.handle(),
        ops: operations(),
        cmd_fd: command.as_raw_fd(),
        async_fd: async_events.fd(),
        num_comp_vectors: 1,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        // The header's mark of a context that lies inside a `verbs_context`.
        abi_compat: usize::MAX as *mut c_void,
    };
    let context = Context {
        verbs: extended(context),
        mark: Mark::default(),
        owner: std::ptr::null_mut(),
        device,
        engine,
        async_events,
        command: Mutex::new(Some(command)),
    };
    Ok(Context::arena().insert(context).handle())
}

/// What still belongs to the context ends with it, as when the kernel closes a device.
fn close(context: *mut ibv_context) -> Outcome<()> {
    let context = living::<Context>(context)?;
    let handle = context.handle();
    let each_qp = Qp::arena().of_context(handle);
    each_qp.into_iter().for_each(Qp::end);
    Srq::arena().of_context(handle).into_iter().for_each(Srq::end);
    Cq::arena().of_context(handle).into_iter().for_each(Cq::end);
    Mw::arena().of_context(handle).into_iter().for_each(Mw::end);
    Mr::arena().of_context(handle).into_iter().for_each(Mr::end);
    for ah in Ah::arena().of_context(handle) {
        Ah::arena().retire(ah);
    }
    Pd::arena().of_context(handle).into_iter().for_each(Pd::end);
    CompChannel::arena().of_context(handle).into_iter().for_each(CompChannel::end);
    if Context::arena().retire(context) {
        context.async_events.close();
        drop(context.command.lock().unwrap_or_else(PoisonError::into_inner).take());
        context.engine.release();
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    or_null(open(device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    if code(close(context)) == 0 { 0 } else { -1 }
}
