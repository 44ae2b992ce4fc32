//! Memory windows: allocated, bound, freed.

use std::ffi::c_int;

use super::{code, given, handle_or_null};
use crate::abi::*;
use crate::objects::{Mw, Pd, Qp, living, peek};

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: u32) -> *mut ibv_mw {
    handle_or_null(living::<Pd>(pd).and_then(|pd| Mw::alloc(pd, kind)))
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    code(living::<Mw>(mw).and_then(Mw::dealloc))
}

pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: null or the caller's request.
    code(unsafe { given(bind) }.and_then(|bind| {
        let qp = peek::<Qp>(qp.cast())?;
        peek::<Mw>(mw)?.bind(qp, bind)
    }))
}
