//! Completion channels: how a program sleeps until something completes.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;

use crate::abi::*;
use crate::context::Context;
use crate::cq::Cq;
use crate::errors::{Outcome, code, or_minus_one, or_null};
use crate::events::EventQueue;
use crate::object::{Mark, Object, living, object};

/// A completion channel.
#[repr(C)]
pub(crate) struct CompChannel {
    c: ibv_comp_channel,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) events: EventQueue<&'static Cq>,
}

object!(CompChannel, ibv_comp_channel);

impl CompChannel {
    /// Ends it, with its descriptor.
    pub(crate) fn end(&'static self) {
        if CompChannel::arena().retire(self) {
            self.events.close();
        }
    }
}

fn create(context: *mut ibv_context) -> Outcome<*mut ibv_comp_channel> {
    let owner = living::<Context>(context)?.handle();
    let events = EventQueue::new()?;
    let c = ibv_comp_channel { context: owner, fd: events.fd(), refcnt: 0 };
    let channel = CompChannel { c, mark: Mark::default(), owner, events };
    Ok(CompChannel::arena().insert(channel).handle())
}

fn destroy(channel: *mut ibv_comp_channel) -> Outcome<()> {
    let channel = living::<CompChannel>(channel)?;
    let uses = |cq: &&'static Cq| cq.channel.is_some_and(|used| std::ptr::eq(used, channel));
    if Cq::arena().of_context(channel.owner).iter().any(uses) {
        return Err(Errno::BUSY);
    }
    channel.end();
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    or_null(create(context))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    code(destroy(channel))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // An event that has been taken out must have a place to go.
    let has_places = !cq.is_null() && !cq_context.is_null();
    let found = if has_places { next_event(channel) } else { Err(Errno::INVAL) };
    or_minus_one(found.map(|found| {
        // SAFETY: the caller's places for the results; the queue is alive while it has events.
        unsafe {
            cq.write(found.handle().cast());
            cq_context.write((*found.handle()).cq_context);
        }
        0
    }))
}

fn next_event(channel: *mut ibv_comp_channel) -> Outcome<&'static Cq> {
    let channel = living::<CompChannel>(channel)?;
    channel.events.pop(|cq| cq.comp_acks.read_one())
}
