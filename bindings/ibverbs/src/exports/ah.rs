//! Address handles: created from attributes or from completions, destroyed.

use std::ffi::c_int;

use rustix::io::Errno;

use super::{code, fill, given, handle_or_null, or_minus_one};
use crate::abi::*;
use crate::objects::ah::from_wc;
use crate::objects::{Ah, Context, Pd, living};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: null or the caller's attributes.
    let attr = unsafe { given(attr) };
    handle_or_null(attr.and_then(|attr| Ah::create(living::<Pd>(pd)?, attr)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    code(living::<Ah>(ah).map(Ah::destroy))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|context| {
        // SAFETY: null or the caller's completion, route header, and place for the attributes.
        unsafe {
            fill(attr, || from_wc(&context.engine.interface, port, given(wc)?, grh.as_ref()))?;
        }
        Ok(0)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    handle_or_null(living::<Pd>(pd).and_then(|domain| {
        // SAFETY: null or the caller's completion and route header.
        let (wc, grh) = unsafe { (given(wc)?, grh.as_ref()) };
        Ah::create(domain, &from_wc(&domain.engine.interface, port, wc, grh)?)
    }))
}

/// The kernel resolves hardware addresses when it sends: they are not needed here.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    context: *mut ibv_context,
    _attr: *mut ibv_ah_attr,
    _eth_mac: *mut u8,
    _vid: *mut u16,
) -> c_int {
    code(living::<Context>(context).and(Err(Errno::OPNOTSUPP)))
}
