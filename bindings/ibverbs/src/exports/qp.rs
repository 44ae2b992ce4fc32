//! Queue pairs: created (plain or extended), modified, queried, destroyed.

use std::ffi::c_int;

use rustix::io::Errno;

use super::{code, fill, given, or_null, wr_api};
use crate::abi::*;
use crate::objects::qp::Parts;
use crate::objects::{Cq, Object, Pd, Qp, Srq, living};
use crate::process::errors::Outcome;

fn create(pd: *mut ibv_pd, init: &ibv_qp_init_attr, extended: bool) -> Outcome<&'static Qp> {
    let parts = Parts {
        pd: living::<Pd>(pd)?,
        send_cq: living::<Cq>(init.send_cq.cast())?,
        recv_cq: living::<Cq>(init.recv_cq.cast())?,
        srq: match init.srq.is_null() {
            true => None,
            false => Some(living::<Srq>(init.srq)?),
        },
    };
    let base = ibv_qp {
        context: parts.pd.owner(),
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: 0,
        qp_num: 0,
        state: IBV_QPS_RESET,
        qp_type: init.qp_type,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    Qp::create(&parts, init, extended, wr_api::table(base))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: null or the caller's attributes, which are also the place for what was granted.
    let attr = unsafe { attr.as_mut() };
    or_null(attr.ok_or(Errno::INVAL).and_then(|attr| {
        let qp = create(pd, attr, false)?;
        attr.cap = qp.cap;
        Ok(qp.base())
    }))
}

/// Work requests supported by the extended interface.
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

/// Those not available on a transport.
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

fn create_ex(attr: &ibv_qp_init_attr_ex) -> Outcome<&'static Qp> {
    const KNOWN: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let has = |bit| attr.comp_mask & bit != 0;
    // Packets are never looped back to group members of their own queue pair, with or without the
    // flag.
    let flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { attr.create_flags } else { 0 };
    let send_ops = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) { attr.send_ops_flags } else { 0 };
    let possible = u64::from(SEND_OPS & !send_ops_beyond(attr.qp_type));
    if attr.comp_mask & !KNOWN != 0 || flags != 0 || send_ops & !possible != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if !has(IBV_QP_INIT_ATTR_PD) {
        return Err(Errno::INVAL);
    }
    let init = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    create(attr.pd, &init, has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS))
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: null or the caller's attributes.
    let attr = unsafe { attr.as_mut() };
    or_null(attr.ok_or(Errno::INVAL).and_then(|attr| {
        let qp = create_ex(attr)?;
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

/// Whether data becomes visible in order: bytes of a message are placed as packets arrive.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: u32, _flags: u32) -> c_int {
    0
}

/// There are no connection options to report to a peer.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    let none = || Ok(ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 });
    // SAFETY: null or the caller's place for the options.
    code(living::<Qp>(qp.cast()).and_then(|_| unsafe { fill(ece, none) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    let known = living::<Qp>(qp.cast());
    // SAFETY: null or the caller's options.
    let ece = unsafe { ece.as_ref() };
    code(known.and_then(|_| match ece.ok_or(Errno::INVAL)?.vendor_id {
        // No vendor means no options, which is the case for every connection.
        0 => Ok(()),
        _ => Err(Errno::OPNOTSUPP),
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let qp = living::<Qp>(qp.cast());
    // SAFETY: null or the caller's attributes.
    code(qp.and_then(|qp| qp.modify(unsafe { given(attr) }?, mask as u32)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    code(living::<Qp>(qp.cast()).and_then(|qp| {
        if attr.is_null() || init_attr.is_null() {
            return Err(Errno::INVAL);
        }
        let (now, created) = qp.query()?;
        // SAFETY: the caller's places for the attributes.
        unsafe {
            attr.write(now);
            init_attr.write(created);
        }
        Ok(())
    }))
}
