//! Shared receive queues: created, modified, queried, destroyed.

use std::ffi::c_int;

use rustix::io::Errno;

use super::{code, fill, given, handle_or_null};
use crate::abi::*;
use crate::objects::{Pd, Srq, living};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: null or the caller's attributes, which are also the place for the result.
    let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVAL);
    handle_or_null(
        attr.and_then(|attr| Srq::create(living::<Pd>(pd)?, attr.srq_context, &mut attr.attr)),
    )
}

pub(super) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: as above.
    let attr = unsafe { attr.as_mut() };
    handle_or_null(attr.ok_or(Errno::INVAL).and_then(|attr| {
        let has = |bit| attr.comp_mask & bit != 0;
        let basic = !has(IBV_SRQ_INIT_ATTR_TYPE) || attr.srq_type == IBV_SRQT_BASIC;
        if attr.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) != 0 || !basic {
            return Err(Errno::OPNOTSUPP);
        }
        if !has(IBV_SRQ_INIT_ATTR_PD) {
            return Err(Errno::INVAL);
        }
        Srq::create(living::<Pd>(attr.pd)?, attr.srq_context, &mut attr.attr)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: null or the caller's attributes.
    code(living::<Srq>(srq).and_then(|srq| srq.modify(unsafe { given(attr) }?, mask as u32)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: null or the caller's place for the attributes.
    code(living::<Srq>(srq).and_then(|srq| unsafe { fill(attr, || srq.query()) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    code(living::<Srq>(srq).and_then(Srq::destroy))
}

/// Numbers are for XRC, which is not supported.
pub(super) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, _number: *mut u32) -> c_int {
    code(living::<Srq>(srq).and(Err(Errno::OPNOTSUPP)))
}
