//! Shared receive queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use roce::endpoint::SrqConfig;
use roce::verbs::{MAX_SGE, SrqId};
use rustix::io::Errno;

use crate::abi::*;
use crate::ack::Acks;
use crate::engine::{Core, Engine};
use crate::errors::{Outcome, code, errno_of, or_null};
use crate::events::{self, Subject};
use crate::limits;
use crate::object::{Mark, Object, living, object};
use crate::pd::Pd;

/// A shared receive queue.
#[repr(C)]
pub(crate) struct Srq {
    pub(crate) c: UnsafeCell<ibv_srq>,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: SrqId,
    pub(crate) max_sge: u32,
    pub(crate) async_acks: Acks,
}

object!(Srq, ibv_srq);

impl Srq {
    fn create(
        pd: *mut ibv_pd,
        context: *mut c_void,
        attr: &mut ibv_srq_attr,
    ) -> Outcome<*mut ibv_srq> {
        let domain = living::<Pd>(pd)?;
        if attr.max_wr > limits::MAX_SRQ_WR || attr.max_sge > MAX_SGE as u32 {
            return Err(Errno::INVAL);
        }
        attr.max_wr = attr.max_wr.max(1);
        attr.max_sge = attr.max_sge.max(1);
        let config = SrqConfig { pd: domain.id, max_wr: attr.max_wr, limit: 0 };
        let id = domain.engine.lock().endpoint.create_srq(config).map_err(errno_of)?;
        let owner = domain.owner();
        let srq = Srq::arena().insert(Srq {
            c: UnsafeCell::new(ibv_srq {
                context: owner,
                srq_context: context,
                pd,
                handle: id.0,
                mutex: libc::PTHREAD_MUTEX_INITIALIZER,
                cond: libc::PTHREAD_COND_INITIALIZER,
                events_completed: 0,
            }),
            mark: Mark::default(),
            owner,
            engine: Arc::clone(&domain.engine),
            id,
            max_sge: attr.max_sge,
            async_acks: Acks::default(),
        });
        srq.engine.lock().srqs.insert(id, srq);
        Ok(srq.handle())
    }

    fn leave(&self, core: &mut Core) -> Outcome<()> {
        core.endpoint.destroy_srq(self.id).map_err(errno_of)?;
        core.srqs.remove(&self.id);
        Ok(())
    }

    /// Ends it with its context, whose queue pairs are gone.
    pub(crate) fn end(&'static self) {
        if Srq::arena().retire(self) {
            self.leave(&mut self.engine.lock()).unwrap_or(());
        }
    }

    fn destroy(&'static self) -> Outcome<()> {
        self.leave(&mut self.engine.lock())?;
        events::forget(self.owner, Subject::Srq(self));
        Srq::arena().retire(self);
        Ok(())
    }

    fn modify(&self, attr: &ibv_srq_attr, mask: u32) -> Outcome<()> {
        // The size is fixed: the device does not claim to be able to change it.
        if mask & !IBV_SRQ_LIMIT != 0 {
            return Err(Errno::INVAL);
        }
        if mask & IBV_SRQ_LIMIT == 0 {
            return Ok(());
        }
        let mut core = self.engine.lock();
        let config = core.endpoint.query_srq(self.id).map_err(errno_of)?;
        if attr.srq_limit > config.max_wr {
            return Err(Errno::INVAL);
        }
        core.endpoint.set_srq_limit(self.id, attr.srq_limit).map_err(errno_of)?;
        // Where fewer are left already, the event is there now, and nobody may come by to see it.
        core.settle();
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: null or the caller's attributes, which are also the place for the result.
    let attr = unsafe { attr.as_mut() };
    let made = attr.ok_or(Errno::INVAL);
    or_null(made.and_then(|attr| Srq::create(pd, attr.srq_context, &mut attr.attr)))
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: as above.
    let attr = unsafe { attr.as_mut() };
    or_null(attr.ok_or(Errno::INVAL).and_then(|attr| {
        let has = |bit| attr.comp_mask & bit != 0;
        let basic = !has(IBV_SRQ_INIT_ATTR_TYPE) || attr.srq_type == IBV_SRQT_BASIC;
        if attr.comp_mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) != 0 || !basic {
            return Err(Errno::OPNOTSUPP);
        }
        if !has(IBV_SRQ_INIT_ATTR_PD) {
            return Err(Errno::INVAL);
        }
        Srq::create(attr.pd, attr.srq_context, &mut attr.attr)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: null or the caller's attributes.
    let attr = unsafe { attr.as_ref() };
    code(living::<Srq>(srq).and_then(|srq| srq.modify(attr.ok_or(Errno::INVAL)?, mask as u32)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    code(living::<Srq>(srq).and_then(|srq| {
        let config = srq.engine.lock().endpoint.query_srq(srq.id).map_err(errno_of)?;
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        let found =
            ibv_srq_attr { max_wr: config.max_wr, max_sge: srq.max_sge, srq_limit: config.limit };
        // SAFETY: the caller's place for the attributes.
        unsafe { attr.write(found) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    code(living::<Srq>(srq).and_then(Srq::destroy))
}

/// Numbers are for XRC, which is not supported.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, _number: *mut u32) -> c_int {
    code(living::<Srq>(srq).and(Err(Errno::OPNOTSUPP)))
}
