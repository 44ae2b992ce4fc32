//! Completion channels: created, destroyed, read.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::{code, handle_or_null, or_minus_one};
use crate::abi::*;
use crate::objects::{CompChannel, Context, Object, living};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    handle_or_null(living::<Context>(context).and_then(CompChannel::create))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    code(living::<CompChannel>(channel).and_then(CompChannel::destroy))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // A dequeued event must have a place to go.
    let has_places = !cq.is_null() && !cq_context.is_null();
    let found = match has_places {
        true => living::<CompChannel>(channel).and_then(CompChannel::next_event),
        false => Err(Errno::INVAL),
    };
    or_minus_one(found.map(|found| {
        // SAFETY: the caller's places for the results; the queue is alive while it has events.
        unsafe {
            cq.write(found.handle().cast());
            cq_context.write((*found.handle()).cq_context);
        }
        0
    }))
}
