//! Queue pairs: created, ended, asked about.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use roce::endpoint::QpConfig;
use roce::verbs::{MAX_SGE, Qpn, Transport};
use rustix::io::Errno;

use crate::abi::*;
use crate::ack::Acks;
use crate::cq::Cq;
use crate::engine::{Core, Engine};
use crate::errors::{Outcome, code, errno_of, or_null};
use crate::events::{self, Subject};
use crate::inline::InlineSlots;
use crate::limits::{self, ENDPOINT};
use crate::multicast;
use crate::object::{Mark, Object, living, object};
use crate::pd::Pd;
use crate::srq::Srq;
use crate::wr_api::{self, Batch};

/// A queue pair.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) c: UnsafeCell<ibv_qp_ex>,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(crate) number: Qpn,
    pub(crate) transport: Transport,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signals_all: bool,
    /// Sends posted so far; changes under the engine's lock.
    pub(crate) posted: AtomicU64,
    pub(crate) inline: Option<InlineSlots>,
    /// The work requests between `wr_start` and `wr_complete`.
    pub(crate) batch: Batch,
    pub(crate) groups: Mutex<Vec<IpAddr>>,
    pub(crate) async_acks: Acks,
}

object!(Qp, ibv_qp_ex);

/// What every kind of creation asks for.
struct Wanted {
    qp_context: *mut c_void,
    pd: *mut ibv_pd,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    cap: ibv_qp_cap,
    qp_type: u32,
    signals_all: bool,
    /// Created for the interface of `wr_api`.
    extended: bool,
}

/// The objects that a queue pair is made of.
struct Parts {
    pd: &'static Pd,
    send_cq: &'static Cq,
    recv_cq: &'static Cq,
    srq: Option<&'static Srq>,
    transport: Transport,
}

impl Wanted {
    fn parts(&self) -> Outcome<Parts> {
        let pd = living::<Pd>(self.pd)?;
        let send_cq = living::<Cq>(self.send_cq.cast())?;
        let recv_cq = living::<Cq>(self.recv_cq.cast())?;
        let srq = match self.srq.is_null() {
            true => None,
            false => Some(living::<Srq>(self.srq)?),
        };
        let owner = pd.owner();
        let mixed = send_cq.owner() != owner
            || recv_cq.owner() != owner
            || srq.is_some_and(|srq| srq.owner() != owner);
        if mixed {
            return Err(Errno::INVAL);
        }
        let transport = match self.qp_type {
            IBV_QPT_RC => Transport::Rc,
            IBV_QPT_UC => Transport::Uc,
            IBV_QPT_UD => Transport::Ud,
            _ => return Err(Errno::OPNOTSUPP),
        };
        Ok(Parts { pd, send_cq, recv_cq, srq, transport })
    }

    /// What will be reported back: exactly what was asked for, with the receive queue's sizes zero
    /// where there is none.
    fn granted(&self) -> Outcome<ibv_qp_cap> {
        let mut cap = self.cap;
        if !self.srq.is_null() {
            (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
        }
        let sges = cap.max_send_sge.max(cap.max_recv_sge);
        let wrs = cap.max_send_wr.max(cap.max_recv_wr);
        let too_much = sges > MAX_SGE as u32
            || wrs > ENDPOINT.max_qp_wr
            || cap.max_inline_data > limits::MAX_INLINE_BYTES;
        if too_much { Err(Errno::INVAL) } else { Ok(cap) }
    }

    fn create(&self) -> Outcome<&'static Qp> {
        let parts = self.parts()?;
        let cap = self.granted()?;
        let engine = &parts.pd.engine;
        let mut core = engine.lock();
        let config = QpConfig {
            transport: parts.transport,
            pd: parts.pd.id,
            send_cq: parts.send_cq.id,
            recv_cq: parts.recv_cq.id,
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            srq: parts.srq.map(|srq| srq.id),
        };
        let number = core.endpoint.create_qp(config).map_err(errno_of)?;
        let slots = InlineSlots::new(&mut core, parts.pd.id, &cap);
        let inline = slots.inspect_err(|_| {
            let _ = core.endpoint.destroy_qp(number);
        })?;
        let qp = Qp::arena().insert(Qp {
            c: UnsafeCell::new(wr_api::table(self.base(parts.pd.owner(), number))),
            mark: Mark::default(),
            owner: parts.pd.owner(),
            engine: Arc::clone(engine),
            number,
            transport: parts.transport,
            cap,
            signals_all: self.signals_all,
            posted: AtomicU64::new(0),
            inline,
            batch: Batch::new(self.extended),
            groups: Mutex::new(Vec::new()),
            async_acks: Acks::default(),
        });
        core.qps.insert(number.get(), qp);
        Ok(qp)
    }

    fn base(&self, context: *mut ibv_context, number: Qpn) -> ibv_qp {
        ibv_qp {
            context,
            qp_context: self.qp_context,
            pd: self.pd,
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            srq: self.srq,
            handle: number.get(),
            qp_num: number.get(),
            state: IBV_QPS_RESET,
            qp_type: self.qp_type,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            events_completed: 0,
        }
    }
}

impl Qp {
    /// What plain programs see of it.
    pub(crate) fn base(&self) -> *mut ibv_qp {
        self.handle().cast()
    }

    fn leave(&self, core: &mut Core) {
        let groups =
            std::mem::take(&mut *self.groups.lock().unwrap_or_else(PoisonError::into_inner));
        for group in groups {
            multicast::leave(self, core, group);
        }
        let _ = core.endpoint.destroy_qp(self.number);
        core.qps.remove(&self.number.get());
        if let Some(inline) = &self.inline {
            inline.end(core);
        }
        self.batch.end();
    }

    /// Ends it with its context.
    pub(crate) fn end(&'static self) {
        if Qp::arena().retire(self) {
            self.leave(&mut self.engine.lock());
        }
    }

    fn destroy(&'static self) {
        // What was posted last may still be owed to the peer: an acknowledgement, say.
        self.engine.verb(|_| ());
        self.leave(&mut self.engine.lock());
        events::forget(self.owner, Subject::Qp(self));
        Qp::arena().retire(self);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: null or the caller's attributes, which are also the place for what was granted.
    let attr = unsafe { attr.as_mut() };
    or_null(attr.ok_or(Errno::INVAL).and_then(|attr| {
        let wanted = Wanted {
            qp_context: attr.qp_context,
            pd,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            srq: attr.srq,
            cap: attr.cap,
            qp_type: attr.qp_type,
            signals_all: attr.sq_sig_all != 0,
            extended: false,
        };
        let qp = wanted.create()?;
        attr.cap = qp.cap;
        Ok(qp.base())
    }))
}

/// Work requests that the extended interface can build.
const SEND_OPS: u32 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV;

/// Those of them that a transport does not have.
fn send_ops_beyond(qp_type: u32) -> u32 {
    const RELIABLE: u32 = IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_SEND_WITH_INV;
    match qp_type {
        IBV_QPT_UD => SEND_OPS & !(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM),
        IBV_QPT_UC => RELIABLE,
        _ => 0,
    }
}

fn wanted_ex(attr: &ibv_qp_init_attr_ex) -> Outcome<Wanted> {
    const KNOWN: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let has = |bit| attr.comp_mask & bit != 0;
    // Packets are not looped back to their own queue pair's group members, flag or not.
    let flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { attr.create_flags } else { 0 };
    let send_ops = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) { attr.send_ops_flags } else { 0 };
    let possible = u64::from(SEND_OPS & !send_ops_beyond(attr.qp_type));
    if attr.comp_mask & !KNOWN != 0 || flags != 0 || send_ops & !possible != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if !has(IBV_QP_INIT_ATTR_PD) {
        return Err(Errno::INVAL);
    }
    Ok(Wanted {
        qp_context: attr.qp_context,
        pd: attr.pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        signals_all: attr.sq_sig_all != 0,
        extended: has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS),
    })
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: null or the caller's attributes.
    let attr = unsafe { attr.as_mut() };
    or_null(attr.ok_or(Errno::INVAL).and_then(|attr| {
        let qp = wanted_ex(attr)?.create()?;
        attr.cap = qp.cap;
        Ok(qp.base())
    }))
}

/// The extended interface of a queue pair that was created with it.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    or_null(living::<Qp>(qp.cast()).and_then(|qp| match qp.batch.is_enabled() {
        true => Ok(qp.handle()),
        false => Err(Errno::INVAL),
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    code(living::<Qp>(qp.cast()).map(Qp::destroy))
}

/// Whether data becomes visible in order: bytes of a message are placed as packets come.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: u32, _flags: u32) -> c_int {
    0
}

/// No connection options of ours to tell a peer.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    code(living::<Qp>(qp.cast()).and_then(|_| {
        if ece.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's place for the options.
        unsafe { ece.write(ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 }) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    let known = living::<Qp>(qp.cast());
    // SAFETY: null or the caller's options.
    let ece = unsafe { ece.as_ref() };
    code(known.and_then(|_| match ece.ok_or(Errno::INVAL)?.vendor_id {
        // No vendor: no options, which is what every connection has.
        0 => Ok(()),
        _ => Err(Errno::OPNOTSUPP),
    }))
}
