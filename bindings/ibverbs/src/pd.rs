//! Protection domains.

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
}

object!(Pd, ibv_pd);

impl Pd {
    /// Ends it with its context: nothing belongs to it any more.
    pub(crate) fn end(&'static self) {
        if Pd::arena().retire(self) {
            // It goes with the engine's other users' view unchanged; one in use cannot be here.
            let _ = self.engine.lock().endpoint.dealloc_pd(self.id);
        }
    }
}

fn alloc(context: *mut ibv_context) -> Outcome<*mut ibv_pd> {
    let context = living::<Context>(context)?;
    let id = context.engine.lock().endpoint.alloc_pd();
    let owner = context.handle();
    let c = ibv_pd { context: owner, handle: id.0 };
    let engine = Arc::clone(&context.engine);
    Ok(Pd::arena().insert(Pd { c, mark: Mark::default(), owner, engine, id }).handle())
}

fn dealloc(pd: *mut ibv_pd) -> Outcome<()> {
    let pd = living::<Pd>(pd)?;
    // The endpoint knows of all its users but these: address handles are the program's business.
    if Ah::any_of(pd) {
        return Err(Errno::BUSY);
    }
    pd.engine.lock().endpoint.dealloc_pd(pd.id).map_err(errno_of)?;
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
