//! Shared receive queues.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;

use roce::endpoint::SrqConfig;
use roce::verbs::{MAX_SGE, SrqId};
use rustix::io::Errno;

use super::ack::Acks;
use super::events::Subject;
use super::{Mark, Object, Pd, object};
use crate::abi::*;
use crate::engine::{Core, Engine, Listener, Notice, limits};
use crate::process::counter::Signal;
use crate::process::errors::{Outcome, errno_of};

/// A shared receive queue.
#[repr(C)]
pub(crate) struct Srq {
    pub(super) c: UnsafeCell<ibv_srq>,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: SrqId,
    pub(crate) max_sge: u32,
    pub(super) async_acks: Acks,
}

object!(Srq, ibv_srq);

impl Srq {
    /// `attr` returns what was granted; `srq_context` is the program's.
    pub(crate) fn create(
        domain: &'static Pd,
        srq_context: *mut c_void,
        attr: &mut ibv_srq_attr,
    ) -> Outcome<&'static Srq> {
        if attr.max_wr > limits::MAX_SRQ_WR || attr.max_sge > MAX_SGE as u32 {
            return Err(Errno::INVAL);
        }
        attr.max_wr = attr.max_wr.max(1);
        attr.max_sge = attr.max_sge.max(1);
        let config = SrqConfig { pd: domain.id, max_wr: attr.max_wr, limit: 0 };
        let id = domain.engine.lock().endpoint_mut().create_srq(config).map_err(errno_of)?;
        let owner = domain.owner();
        let srq = Srq::arena().insert(Srq {
            c: UnsafeCell::new(ibv_srq {
                context: owner,
                srq_context,
                pd: domain.handle(),
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
        srq.engine.lock().listen_srq(id, srq);
        Ok(srq)
    }

    fn leave(&self, core: &mut Core) -> Outcome<()> {
        core.endpoint_mut().destroy_srq(self.id).map_err(errno_of)?;
        core.leave_srq(self.id);
        Ok(())
    }

    /// Destroys it with its context, whose queue pairs are gone.
    pub(super) fn end(&'static self) {
        if Srq::arena().retire(self) {
            self.leave(&mut self.engine.lock()).unwrap_or(());
        }
    }

    pub(crate) fn destroy(&'static self) -> Outcome<()> {
        self.leave(&mut self.engine.lock())?;
        Subject::Srq(self).forget();
        Srq::arena().retire(self);
        Ok(())
    }

    pub(crate) fn modify(&self, attr: &ibv_srq_attr, mask: u32) -> Outcome<()> {
        // The size is fixed: the device does not report the ability to change it.
        if mask & !IBV_SRQ_LIMIT != 0 {
            return Err(Errno::INVAL);
        }
        if mask & IBV_SRQ_LIMIT == 0 {
            return Ok(());
        }
        let mut core = self.engine.lock();
        let config = core.endpoint().query_srq(self.id).map_err(errno_of)?;
        if attr.srq_limit > config.max_wr {
            return Err(Errno::INVAL);
        }
        core.endpoint_mut().set_srq_limit(self.id, attr.srq_limit).map_err(errno_of)?;
        // If fewer are left already, the event is due now, and no later turn may deliver it.
        core.settle();
        Ok(())
    }

    pub(crate) fn query(&self) -> Outcome<ibv_srq_attr> {
        let config = self.engine.lock().endpoint().query_srq(self.id).map_err(errno_of)?;
        let SrqConfig { max_wr, limit, .. } = config;
        Ok(ibv_srq_attr { max_wr, max_sge: self.max_sge, srq_limit: limit })
    }
}

impl Listener for Srq {
    fn notify(&'static self, notice: Notice) -> Option<Signal> {
        if let Notice::Event(event) = notice {
            Subject::Srq(self).deliver(event);
        }
        None
    }
}
