//! Posting: converts C work requests to those of the transport.
//!
//! Requests of a list are posted one by one; the first refused one ends it and is reported, and
//! those before it stay posted. Posted requests are sent before the call returns, as far as windows
//! allow, unless they wait for the program's next call (`adapter::shared`).

use std::ffi::c_int;

use roce::endpoint::QpState;
use roce::verbs::{RecvWr, SendOp, SendWr, SgList, Sge, Transport};
use rustix::io::Errno;

use super::code;
use crate::abi::*;
use crate::objects::{Ah, Mw, Qp, Srq, peek};
use crate::process::errors::{Outcome, errno_of};

/// A scatter/gather list of C.
///
/// # Safety
/// `list` is valid for reading `len` elements, if `len` is not 0.
unsafe fn sges<'a>(list: *const ibv_sge, len: c_int, limit: u32) -> Outcome<&'a [ibv_sge]> {
    let count = u32::try_from(len).map_err(|_| Errno::INVAL)?;
    if count == 0 {
        return Ok(&[]);
    }
    if count > limit || list.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { std::slice::from_raw_parts(list, count as usize) })
}

/// The list for the transport, which has room for all elements that the limits allow.
pub(super) fn sg_list(sges: &[ibv_sge]) -> SgList {
    sges.iter().map(|sge| Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey }).collect()
}

/// Checks that the flags are known. Network-layer checksums are for packets that do not exist here.
pub(super) fn check_flags(flags: u32) -> Outcome<()> {
    const KNOWN: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
    if flags & !KNOWN == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

fn operation(qp: &Qp, wr: &ibv_send_wr) -> Outcome<SendOp> {
    let imm = u32::from_be(wr.imm_data);
    // SAFETY: all members are plain numbers and pointers; the opcode says which are meant.
    let (rdma, atomic, bind) = unsafe { (wr.wr.rdma, wr.wr.atomic, &wr.bind_mw) };
    let wr_rdma { remote_addr, rkey } = rdma;
    Ok(match wr.opcode {
        IBV_WR_SEND => SendOp::Send,
        IBV_WR_SEND_WITH_IMM => SendOp::SendImm(imm),
        IBV_WR_SEND_WITH_INV => SendOp::SendInvalidate(wr.imm_data),
        IBV_WR_RDMA_WRITE => SendOp::Write { remote_addr, rkey },
        IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::WriteImm { remote_addr, rkey, imm },
        IBV_WR_RDMA_READ => SendOp::Read { remote_addr, rkey },
        IBV_WR_ATOMIC_CMP_AND_SWP => SendOp::CompareSwap {
            remote_addr,
            rkey: atomic.rkey,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        IBV_WR_ATOMIC_FETCH_AND_ADD => {
            SendOp::FetchAdd { remote_addr, rkey: atomic.rkey, add: atomic.compare_add }
        }
        IBV_WR_LOCAL_INV => SendOp::LocalInvalidate(wr.imm_data),
        IBV_WR_BIND_MW => {
            let window = peek::<Mw>(bind.mw)?;
            SendOp::BindWindow(window.binding(qp, bind.rkey, &bind.bind_info)?)
        }
        _ => return Err(Errno::INVAL),
    })
}

/// Whether the payload may be inline.
fn may_be_inline(op: &SendOp) -> bool {
    matches!(
        op,
        SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInvalidate(_)
            | SendOp::Write { .. }
            | SendOp::WriteImm { .. }
    )
}

/// # Safety
/// `wr` and what it refers to are valid, and the engine's lock is held.
unsafe fn send_wr(qp: &Qp, wr: &ibv_send_wr) -> Outcome<SendWr> {
    // SAFETY: as the caller promises.
    let elements = unsafe { sges(wr.sg_list, wr.num_sge, qp.cap.max_send_sge)? };
    check_flags(wr.send_flags)?;
    let op = operation(qp, wr)?;
    let has = |flag| wr.send_flags & flag != 0;
    let sges = if has(IBV_SEND_INLINE) {
        if !may_be_inline(&op) {
            return Err(Errno::INVAL);
        }
        let piece =
            |sge: &ibv_sge| ibv_data_buf { addr: sge.addr as *mut _, length: sge.length as usize };
        // SAFETY: as the caller promises.
        unsafe { qp.take_inline(elements.iter().map(piece))? }
    } else {
        sg_list(elements)
    };
    let to = match qp.transport {
        Transport::Ud => {
            // SAFETY: plain numbers and a pointer, which is looked at with care.
            let ud = unsafe { wr.wr.ud };
            Some(qp.datagram(peek::<Ah>(ud.ah)?, ud.remote_qpn, ud.remote_qkey)?)
        }
        Transport::Rc | Transport::Uc => None,
    };
    Ok(SendWr {
        wr_id: wr.wr_id,
        op,
        sges,
        signaled: qp.signals_all || has(IBV_SEND_SIGNALED),
        solicited: has(IBV_SEND_SOLICITED),
        fence: has(IBV_SEND_FENCE),
        to,
    })
}

/// Reports which request was refused.
///
/// # Safety
/// `bad` is null or valid for writing.
unsafe fn name_refused<T>(bad: *mut *mut T, wr: *mut T) {
    if !bad.is_null() {
        // SAFETY: as the caller promises.
        unsafe { bad.write(wr) };
    }
}

/// Walks a list; the first refused request is reported through `bad`.
///
/// # Safety
/// `list` is null or a valid list, `bad` null or valid for writing.
unsafe fn each<T>(
    mut list: *mut T,
    bad: *mut *mut T,
    next: impl Fn(&T) -> *mut T,
    mut post: impl FnMut(&T) -> Outcome<()>,
) -> Outcome<()> {
    // SAFETY: as the caller promises.
    while let Some(wr) = unsafe { list.as_ref() } {
        if let Err(error) = post(wr) {
            // SAFETY: as the caller promises.
            unsafe { name_refused(bad, list) };
            return Err(error);
        }
        list = next(wr);
    }
    Ok(())
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: null or the caller's place.
    let qp = peek::<Qp>(qp.cast()).inspect_err(|_| unsafe { name_refused(bad, list) });
    let posted = qp.and_then(|qp| {
        qp.engine.post(|core| {
            // SAFETY: the caller's list, of valid requests; the lock is held.
            unsafe {
                each(
                    list,
                    bad,
                    |wr| wr.next,
                    |wr| send_wr(qp, wr).and_then(|wr| qp.post_send(core, wr)),
                )
            }
        })
    });
    code(posted)
}

/// # Safety
/// `wr` and what it refers to are valid.
unsafe fn recv_wr(wr: &ibv_recv_wr, limit: u32) -> Outcome<RecvWr> {
    // SAFETY: as the caller promises.
    let elements = unsafe { sges(wr.sg_list, wr.num_sge, limit)? };
    Ok(RecvWr { wr_id: wr.wr_id, sges: sg_list(elements) })
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: null or the caller's place.
    let qp = peek::<Qp>(qp.cast()).inspect_err(|_| unsafe { name_refused(bad, list) });
    code(qp.and_then(|qp| {
        let mut core = qp.engine.lock();
        // The endpoint would accept them, for its other users; the verbs do not (IBA 10.3.1.1).
        let in_reset = core.endpoint().qp_state(qp.number) == Some(QpState::Reset);
        let now = core.now();
        let mut post = |wr: RecvWr| match in_reset {
            true => Err(Errno::INVAL),
            false => core.endpoint_mut().post_recv(now, qp.number, wr).map_err(errno_of),
        };
        let limit = qp.cap.max_recv_sge;
        // SAFETY: the caller's list, of valid requests.
        let posted =
            unsafe { each(list, bad, |wr| wr.next, |wr| recv_wr(wr, limit).and_then(&mut post)) };
        core.settle();
        posted
    }))
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: null or the caller's place.
    let srq = peek::<Srq>(srq).inspect_err(|_| unsafe { name_refused(bad, list) });
    code(srq.and_then(|srq| {
        let mut core = srq.engine.lock();
        let mut post = |wr: RecvWr| core.endpoint_mut().post_srq_recv(srq.id, wr).map_err(errno_of);
        // SAFETY: the caller's list, of valid requests.
        unsafe { each(list, bad, |wr| wr.next, |wr| recv_wr(wr, srq.max_sge).and_then(&mut post)) }
    }))
}
