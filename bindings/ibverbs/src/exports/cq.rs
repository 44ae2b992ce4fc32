//! Completion queues: created, polled, armed, resized, acknowledged, destroyed.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::{code, cq_ex, handle_or_null};
use crate::abi::*;
use crate::objects::arena::{Object, living, peek};
use crate::objects::channel::CompChannel;
use crate::objects::context::Context;
use crate::objects::cq::{Cq, Wanted, wc_of};
use crate::process::errors::Outcome;

/// What both kinds of creation ask for.
pub(super) struct Asked {
    pub(super) context: *mut ibv_context,
    pub(super) cqe: u32,
    pub(super) cq_context: *mut c_void,
    pub(super) channel: *mut ibv_comp_channel,
    pub(super) comp_vector: u32,
    pub(super) single_threaded: bool,
}

impl Asked {
    pub(super) fn create(&self) -> Outcome<&'static Cq> {
        let context = living::<Context>(self.context)?;
        let channel = match self.channel.is_null() {
            true => None,
            false => Some(living::<CompChannel>(self.channel)?),
        };
        let Asked { cqe, comp_vector, single_threaded, .. } = *self;
        let wanted = Wanted { cqe, channel, comp_vector, single_threaded };
        Cq::create(context, &wanted, cq_ex::table(self))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let asked = Asked {
        context,
        cqe: u32::try_from(cqe).unwrap_or(0),
        cq_context,
        channel,
        comp_vector: u32::try_from(comp_vector).unwrap_or(u32::MAX),
        single_threaded: false,
    };
    handle_or_null(asked.create()).cast()
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
