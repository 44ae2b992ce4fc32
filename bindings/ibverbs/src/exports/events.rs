//! Asynchronous events of a context: read and acknowledged.

use std::ffi::c_int;

use super::{fill, or_minus_one};
use crate::abi::*;
use crate::objects::events::Subject;
use crate::objects::{Context, Cq, Object, Qp, Srq, living};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    let next = || Ok(living::<Context>(context)?.next_event()?.to_c());
    // SAFETY: null or the caller's place for an event. An event that is taken out has a place to
    // go.
    or_minus_one(unsafe { fill(event, next) }.map(|()| 0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: null or the caller's event; which member is meant follows from its type.
    if let Some(subject) = unsafe { event.as_ref().and_then(|event| subject_of(event)) } {
        subject.acknowledge();
    }
}

/// # Safety
/// `event` was filled by `ibv_get_async_event`, or at least holds a pointer or null.
unsafe fn subject_of(event: &ibv_async_event) -> Option<Subject> {
    // SAFETY: all pointer members have the same size; which is meant follows from the type.
    unsafe {
        match event.event_type {
            IBV_EVENT_CQ_ERR => Cq::arena().find(event.element.cq.cast()).map(Subject::Cq),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                Srq::arena().find(event.element.srq).map(Subject::Srq)
            }
            IBV_EVENT_QP_FATAL..=IBV_EVENT_SQ_DRAINED | IBV_EVENT_QP_LAST_WQE_REACHED => {
                Qp::arena().find(event.element.qp.cast()).map(Subject::Qp)
            }
            _ => None,
        }
    }
}
