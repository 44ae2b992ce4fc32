//! Completion queues: created, polled, armed, resized, acknowledged, destroyed.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::{code, cq_ex, handle_or_null};
use crate::abi::*;
use crate::objects::cq::wc_of;
use crate::objects::{Cq, Object, living, peek};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let attr = ibv_cq_init_attr_ex {
        cqe: u32::try_from(cqe).unwrap_or(0),
        cq_context,
        channel,
        comp_vector: u32::try_from(comp_vector).unwrap_or(u32::MAX),
        wc_flags: 0,
        comp_mask: 0,
        flags: 0,
        parent_domain: std::ptr::null_mut(),
    };
    handle_or_null(cq_ex::create(context, &attr)).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    code(living::<Cq>(cq.cast()).and_then(Cq::destroy))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    code(living::<Cq>(cq.cast()).and_then(|cq| cq.resize(cqe)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: u32) {
    if let Some(cq) = Cq::arena().peek(cq.cast()) {
        cq.acknowledge(nevents);
    }
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    let polled = peek::<Cq>(cq.cast()).and_then(|cq| {
        let room = usize::try_from(entries).map_err(|_| Errno::INVAL)?;
        if wc.is_null() && room > 0 {
            return Err(Errno::INVAL);
        }
        let mut place = wc;
        cq.poll(room, |completion| {
            // SAFETY: the caller has room for `entries` completions, and no more are taken.
            unsafe {
                place.write(wc_of(completion));
                place = place.add(1);
            }
        })
    });
    match polled {
        Ok(count) => count as c_int,
        Err(error) => -code(Err(error)),
    }
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    code(peek::<Cq>(cq.cast()).and_then(|cq| cq.arm(solicited_only != 0)))
}
