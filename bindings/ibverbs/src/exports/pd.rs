//! Protection domains and parent domains: allocated and freed.

use std::ffi::c_int;

use rustix::io::Errno;

use super::{code, given, handle_or_null};
use crate::abi::*;
use crate::objects::{Context, Pd, living};
use crate::process::errors::Outcome;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    handle_or_null(living::<Context>(context).map(Pd::alloc))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    code(living::<Pd>(pd).and_then(Pd::dealloc))
}

pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: null or the caller's attributes.
    handle_or_null(unsafe { given(attr) }.and_then(|attr| alloc_parent(context, attr)))
}

fn alloc_parent(
    context: *mut ibv_context,
    attr: &ibv_parent_domain_init_attr,
) -> Outcome<&'static Pd> {
    const KNOWN: u32 =
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    let context = living::<Context>(context)?;
    let base = living::<Pd>(attr.pd)?;
    let allocators = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
    // There are no thread domains.
    let wrong = !attr.td.is_null()
        || attr.comp_mask & !KNOWN != 0
        || allocators && (attr.alloc.is_null() || attr.free.is_null());
    if wrong { Err(Errno::INVAL) } else { Pd::alloc_parent(context, base) }
}
