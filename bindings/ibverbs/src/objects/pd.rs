//! Protection domains, and parent domains, which are other handles of the same domain.
//!
//! A parent domain may have functions that allocate the memory of queues. They are not called:
//! queues are in the endpoint, where no device of the program reads them.

use std::sync::Arc;

use roce::verbs::PdId;
use rustix::io::Errno;

use super::{Ah, Context, Mark, Object, object};
use crate::abi::*;
use crate::engine::Engine;
use crate::process::errors::{Outcome, errno_of};

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    c: ibv_pd,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(super) id: PdId,
    /// The domain behind this parent domain.
    base: Option<&'static Pd>,
}

object!(Pd, ibv_pd);

impl Pd {
    pub(crate) fn alloc(context: &'static Context) -> &'static Pd {
        let id = context.engine.lock().endpoint_mut().alloc_pd();
        Pd::insert(context.handle(), Arc::clone(&context.engine), id, None)
    }

    /// A parent domain of `base`.
    ///
    /// # Errors
    /// `EINVAL` for a base that is a parent domain or of another context.
    pub(crate) fn alloc_parent(
        context: &'static Context,
        base: &'static Pd,
    ) -> Outcome<&'static Pd> {
        if base.owner != context.handle() || base.is_parent_domain() {
            return Err(Errno::INVAL);
        }
        Ok(Pd::insert(base.owner, Arc::clone(&base.engine), base.id, Some(base)))
    }

    fn insert(
        owner: *mut ibv_context,
        engine: Arc<Engine>,
        id: PdId,
        base: Option<&'static Pd>,
    ) -> &'static Pd {
        let c = ibv_pd { context: owner, handle: id.0 };
        Pd::arena().insert(Pd { c, mark: Mark::default(), owner, engine, id, base })
    }

    pub(crate) fn is_parent_domain(&self) -> bool {
        self.base.is_some()
    }

    /// # Errors
    /// `EBUSY` while something belongs to it.
    pub(crate) fn dealloc(&'static self) -> Outcome<()> {
        // The endpoint tracks all its users but these: address handles exist only in this library.
        let stands_for = |other: &&Pd| other.base.is_some_and(|base| std::ptr::eq(base, self));
        if Ah::any_of(self) || Pd::arena().of_context(self.owner).iter().any(stands_for) {
            return Err(Errno::BUSY);
        }
        if !self.is_parent_domain() {
            self.engine.lock().endpoint_mut().dealloc_pd(self.id).map_err(errno_of)?;
        }
        Pd::arena().retire(self);
        Ok(())
    }

    /// Destroys it with its context: it has no objects any more.
    pub(super) fn end(&'static self) {
        if Pd::arena().retire(self) && self.base.is_none() {
            // It goes with the engine's other users' view unchanged; one in use cannot be here.
            let _ = self.engine.lock().endpoint_mut().dealloc_pd(self.id);
        }
    }
}
