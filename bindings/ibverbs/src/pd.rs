//! Protection domains, and parent domains, which are other handles of the same.
//!
//! A parent domain may name functions that place the memory of queues. They are not called: queues lie in
//! the endpoint, where no device of the program's reads them.

use std::ffi::c_int;
use std::sync::Arc;

use roce::verbs::PdId;
use rustix::io::Errno;

use crate::abi::*;
use crate::ah::Ah;
use crate::context::Context;
use crate::engine::Engine;
use crate::errors::{Outcome, code, errno_of, or_null};
use crate::object::{Mark, Object, living, object};

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    c: ibv_pd,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: PdId,
    /// The domain that this parent domain stands for.
    base: Option<&'static Pd>,
}

object!(Pd, ibv_pd);

impl Pd {
    /// Ends it with its context: nothing belongs to it any more.
    pub(crate) fn end(&'static self) {
        if Pd::arena().retire(self) && self.base.is_none() {
            // It goes with the engine's other users' view unchanged; one in use cannot be here.
            let _ = self.engine.lock().endpoint.dealloc_pd(self.id);
        }
    }

    pub(crate) fn is_parent_domain(&self) -> bool {
        self.base.is_some()
    }
}

fn alloc(context: *mut ibv_context) -> Outcome<*mut ibv_pd> {
    let context = living::<Context>(context)?;
    let id = context.engine.lock().endpoint.alloc_pd();
    let owner = context.handle();
    let c = ibv_pd { context: owner, handle: id.0 };
    let engine = Arc::clone(&context.engine);
    let pd = Pd { c, mark: Mark::default(), owner, engine, id, base: None };
    Ok(Pd::arena().insert(pd).handle())
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: null or the caller's attributes.
    let attr = unsafe { attr.as_ref() };
    or_null(attr.ok_or(Errno::INVAL).and_then(|attr| alloc_parent(context, attr)))
}

fn alloc_parent(
    context: *mut ibv_context,
    attr: &ibv_parent_domain_init_attr,
) -> Outcome<*mut ibv_pd> {
    const KNOWN: u32 =
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    let context = living::<Context>(context)?;
    let base = living::<Pd>(attr.pd)?;
    let allocators = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
    // There are no thread domains.
    let wrong = base.owner != context.handle()
        || base.is_parent_domain()
        || !attr.td.is_null()
        || attr.comp_mask & !KNOWN != 0
        || allocators && (attr.alloc.is_null() || attr.free.is_null());
    if wrong {
        return Err(Errno::INVAL);
    }
    let c = ibv_pd { context: base.owner, handle: base.id.0 };
    let engine = Arc::clone(&base.engine);
    let (owner, id, mark) = (base.owner, base.id, Mark::default());
    let pd = Pd { c, mark, owner, engine, id, base: Some(base) };
    Ok(Pd::arena().insert(pd).handle())
}

fn dealloc(pd: *mut ibv_pd) -> Outcome<()> {
    let pd = living::<Pd>(pd)?;
    // The endpoint knows of all its users but these: address handles are the program's business.
    let stands_for = |other: &&Pd| other.base.is_some_and(|base| std::ptr::eq(base, pd));
    if Ah::any_of(pd) || Pd::arena().of_context(pd.owner).iter().any(stands_for) {
        return Err(Errno::BUSY);
    }
    if !pd.is_parent_domain() {
        pd.engine.lock().endpoint.dealloc_pd(pd.id).map_err(errno_of)?;
    }
    Pd::arena().retire(pd);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    or_null(alloc(context))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    code(dealloc(pd))
}
