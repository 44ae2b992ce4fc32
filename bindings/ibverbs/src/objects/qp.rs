//! Queue pairs: created, posted to, destroyed.

use std::cell::UnsafeCell;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nic::clock;
use roce::endpoint::QpConfig;
use roce::verbs::{Datagram, MAX_SGE, Qpn, SendWr, SgList, Transport};
use rustix::io::Errno;

use super::ack::Acks;
use super::batch::Batch;
use super::events::Subject;
use super::inline::InlineSlots;
use super::{Ah, Cq, Mark, Object, Pd, Srq, object};
use crate::abi::*;
use crate::engine::limits::{self, ENDPOINT};
use crate::engine::{Core, Engine, Listener, Notice};
use crate::process::counter::Signal;
use crate::process::errors::{Outcome, errno_of};

/// A queue pair.
#[repr(C)]
pub(crate) struct Qp {
    pub(super) c: UnsafeCell<ibv_qp_ex>,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(crate) number: Qpn,
    pub(crate) transport: Transport,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signals_all: bool,
    /// Sends posted so far; changes under the engine's lock.
    posted: AtomicU64,
    pub(super) inline: Option<InlineSlots>,
    /// The work requests between `wr_start` and `wr_complete`.
    pub(crate) batch: Batch,
    pub(super) groups: Mutex<Vec<IpAddr>>,
    pub(super) async_acks: Acks,
}

object!(Qp, ibv_qp_ex);

/// The objects used by a queue pair.
pub(crate) struct Parts {
    pub(crate) pd: &'static Pd,
    pub(crate) send_cq: &'static Cq,
    pub(crate) recv_cq: &'static Cq,
    pub(crate) srq: Option<&'static Srq>,
}

impl Parts {
    fn are_of_one_context(&self) -> bool {
        let owner = self.pd.owner();
        self.send_cq.owner() == owner
            && self.recv_cq.owner() == owner
            && self.srq.is_none_or(|srq| srq.owner() == owner)
    }
}

/// The granted capabilities: exactly those requested, with the receive queue's sizes zero where
/// there is none.
fn granted(init: &ibv_qp_init_attr) -> Outcome<ibv_qp_cap> {
    let mut cap = init.cap;
    if !init.srq.is_null() {
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    let sges = cap.max_send_sge.max(cap.max_recv_sge);
    let wrs = cap.max_send_wr.max(cap.max_recv_wr);
    let too_much = sges > MAX_SGE as u32
        || wrs > ENDPOINT.max_qp_wr
        || cap.max_inline_data > limits::MAX_INLINE_BYTES;
    if too_much { Err(Errno::INVAL) } else { Ok(cap) }
}

impl Qp {
    /// `parts` are those in `init`; `c` is the structure for programs, without the queue pair's
    /// number. `extended` enables the work-request interface (`wr_start` and the like).
    ///
    /// # Errors
    /// `EINVAL` for objects of several contexts and for sizes beyond the limits, `EOPNOTSUPP` for
    /// other transports.
    pub(crate) fn create(
        parts: &Parts,
        init: &ibv_qp_init_attr,
        extended: bool,
        mut c: ibv_qp_ex,
    ) -> Outcome<&'static Qp> {
        if !parts.are_of_one_context() {
            return Err(Errno::INVAL);
        }
        let transport = match init.qp_type {
            IBV_QPT_RC => Transport::Rc,
            IBV_QPT_UC => Transport::Uc,
            IBV_QPT_UD => Transport::Ud,
            _ => return Err(Errno::OPNOTSUPP),
        };
        let cap = granted(init)?;
        let pd = parts.pd;
        let mut core = pd.engine.lock();
        let config = QpConfig {
            transport,
            pd: pd.id,
            send_cq: parts.send_cq.id,
            recv_cq: parts.recv_cq.id,
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            srq: parts.srq.map(|srq| srq.id),
        };
        let number = core.endpoint_mut().create_qp(config).map_err(errno_of)?;
        let slots = InlineSlots::new(&mut core, pd.id, &cap);
        let inline = slots.inspect_err(|_| {
            let _ = core.endpoint_mut().destroy_qp(clock::now(), number);
        })?;
        (c.qp_base.handle, c.qp_base.qp_num) = (number.get(), number.get());
        let qp = Qp::arena().insert(Qp {
            c: UnsafeCell::new(c),
            mark: Mark::default(),
            owner: pd.owner(),
            engine: Arc::clone(&pd.engine),
            number,
            transport,
            cap,
            signals_all: init.sq_sig_all != 0,
            posted: AtomicU64::new(0),
            inline,
            batch: Batch::new(extended),
            groups: Mutex::new(Vec::new()),
            async_acks: Acks::default(),
        });
        core.listen_qp(number, qp);
        Ok(qp)
    }

    /// The plain C structure.
    pub(crate) fn base(&self) -> *mut ibv_qp {
        self.handle().cast()
    }

    /// Posts one work request.
    #[inline]
    pub(crate) fn post_send(&self, core: &mut Core, wr: SendWr) -> Outcome<()> {
        core.post_send(self.number, wr).map_err(errno_of)?;
        self.posted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Copies inline data into the slot of the next work request and returns its location.
    ///
    /// # Safety
    /// The pieces are readable, and the engine's lock is held.
    pub(crate) unsafe fn take_inline(
        &self,
        pieces: impl Iterator<Item = ibv_data_buf>,
    ) -> Outcome<SgList> {
        let slots = self.inline.as_ref().ok_or(Errno::INVAL)?;
        // SAFETY: as the caller promises.
        let filled = unsafe { slots.fill(self.posted.load(Ordering::Relaxed), pieces) };
        filled.ok_or(Errno::INVAL)
    }

    /// The destination of a datagram. The handle belongs to the same device: its path uses that
    /// device's address indices.
    pub(crate) fn datagram(&self, ah: &Ah, qpn: u32, qkey: u32) -> Outcome<Datagram> {
        if !Arc::ptr_eq(&ah.engine, &self.engine) {
            return Err(Errno::INVAL);
        }
        Ok(Datagram { ah: ah.path.into(), dest_qp: Qpn::new(qpn), qkey })
    }

    fn leave(&self, core: &mut Core) {
        let groups =
            std::mem::take(&mut *self.groups.lock().unwrap_or_else(PoisonError::into_inner));
        for group in groups {
            self.leave_group(core, group);
        }
        core.destroy_qp(self.number);
        if let Some(inline) = &self.inline {
            inline.end(core);
        }
        self.batch.end();
    }

    /// Destroys it with its context.
    pub(super) fn end(&'static self) {
        if Qp::arena().retire(self) {
            self.engine.verb(|_| ());
            self.leave(&mut self.engine.lock());
            let _ = self.engine.quiesce();
        }
    }

    pub(crate) fn destroy(&'static self) {
        // The last packets may still be pending: an acknowledgement, for example.
        self.engine.verb(|_| ());
        self.leave(&mut self.engine.lock());
        let _ = self.engine.quiesce();
        Subject::Qp(self).forget();
        Qp::arena().retire(self);
    }
}

impl Listener for Qp {
    fn notify(&'static self, notice: Notice) -> Option<Signal> {
        if let Notice::Event(event) = notice {
            Subject::Qp(self).deliver(event);
        }
        None
    }
}
