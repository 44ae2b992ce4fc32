//! The work-request interface of `ibv_create_qp_ex`: requests are built by calls.
//!
//! `wr_start` locks the queue pair's batch; each operation adds a request with the identifier and
//! flags in the structure; the setters complete the last one; `wr_complete` posts all of them or
//! none. An error in between is kept until then, as the calls return nothing.

use std::ffi::{c_int, c_void};

use roce::verbs::{MAX_SGE, SendOp, SendWr, SgList};
use rustix::io::Errno;

use super::{code, given, post};
use crate::abi::*;
use crate::objects::batch::{Draft, Request};
use crate::objects::{Ah, Mw, Object, Qp, peek};

/// The C structure of a new queue pair.
pub(super) fn table(qp_base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp,
        wr_atomic_fetch_add,
        wr_bind_mw,
        wr_local_inv,
        wr_rdma_read,
        wr_rdma_write,
        wr_rdma_write_imm,
        wr_send,
        wr_send_imm,
        wr_send_inv,
        wr_send_tso,
        wr_set_ud_addr,
        wr_set_xrc_srqn,
        wr_set_inline_data,
        wr_set_inline_data_list,
        wr_set_sge,
        wr_set_sge_list,
        wr_start,
        wr_complete,
        wr_abort,
        wr_atomic_write,
    }
}

/// Runs `change` on the draft of a queue pair between its start and its end.
fn with(qp: *mut ibv_qp_ex, change: impl FnOnce(&Qp, &mut Draft)) {
    if let Ok(qp) = peek::<Qp>(qp) {
        // SAFETY: the calling thread holds the batch's lock since `wr_start`.
        change(qp, unsafe { qp.batch.draft() });
    }
}

fn add(qp: *mut ibv_qp_ex, op: SendOp) {
    with(qp, |qp, draft| {
        // SAFETY: the program wrote them before this call, from this thread.
        let (wr_id, flags) = unsafe { ((*qp.handle()).wr_id, (*qp.handle()).wr_flags) };
        draft.note(post::check_flags(flags));
        let has = |flag| flags & flag != 0;
        let wr = SendWr {
            wr_id,
            op,
            sges: SgList::new(),
            signaled: qp.signals_all || has(IBV_SEND_SIGNALED),
            solicited: has(IBV_SEND_SOLICITED),
            fence: has(IBV_SEND_FENCE),
            to: None,
        };
        draft.requests.push(Request { wr, inline: None });
    });
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    if let Ok(qp) = peek::<Qp>(qp) {
        qp.batch.acquire();
    }
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    if let Ok(qp) = peek::<Qp>(qp) {
        qp.batch.release();
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    let qp = match peek::<Qp>(qp) {
        Ok(qp) => qp,
        Err(error) => return code(Err(error)),
    };
    // SAFETY: the calling thread holds the batch's lock since `wr_start`.
    let draft = unsafe { qp.batch.draft() };
    let posted = match draft.error {
        Some(error) => Err(error),
        None => qp.engine.post(|core| qp.post_all(core, draft)),
    };
    qp.batch.release();
    code(posted)
}

// ---- operations --------------------------------------------------------------------------------

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    add(qp, SendOp::Send);
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm: u32) {
    add(qp, SendOp::SendImm(u32::from_be(imm)));
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    add(qp, SendOp::SendInvalidate(rkey));
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    add(qp, SendOp::Read { remote_addr, rkey });
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    add(qp, SendOp::Write { remote_addr, rkey });
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm: u32) {
    add(qp, SendOp::WriteImm { remote_addr, rkey, imm: u32::from_be(imm) });
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    add(qp, SendOp::CompareSwap { remote_addr, rkey, compare, swap });
}

unsafe extern "C" fn wr_atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    add_: u64,
) {
    add(qp, SendOp::FetchAdd { remote_addr, rkey, add: add_ });
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    add(qp, SendOp::LocalInvalidate(rkey));
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    window: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: null or the caller's description.
    let info = unsafe { given(info) };
    let wanted = peek::<Qp>(qp).and_then(|qp| {
        let info = info?;
        peek::<Mw>(window)?.binding(qp, rkey, info)
    });
    match wanted {
        Ok(binding) => add(qp, SendOp::BindWindow(binding)),
        Err(error) => refuse(qp, error),
    }
}

fn refuse(qp: *mut ibv_qp_ex, error: Errno) {
    with(qp, |_, draft| {
        draft.error.get_or_insert(error);
    });
}

unsafe extern "C" fn wr_send_tso(qp: *mut ibv_qp_ex, _hdr: *mut c_void, _hdr_sz: u16, _mss: u16) {
    refuse(qp, Errno::OPNOTSUPP);
}

unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    _rkey: u32,
    _addr: u64,
    _data: *const c_void,
) {
    refuse(qp, Errno::OPNOTSUPP);
}

// ---- setters -----------------------------------------------------------------------------------

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    with(qp, |qp, draft| {
        let to = draft.note(peek::<Ah>(ah).and_then(|ah| qp.datagram(ah, qpn, qkey)));
        if let Some(request) = draft.last() {
            request.wr.to = to;
        }
    });
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, _srqn: u32) {
    refuse(qp, Errno::OPNOTSUPP);
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ibv_sge { addr, length, lkey };
    set_sges(qp, &[sge]);
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, len: usize, list: *const ibv_sge) {
    if len > MAX_SGE || list.is_null() && len > 0 {
        return refuse(qp, Errno::INVAL);
    }
    // SAFETY: the caller's list; an empty one may be null.
    let list = if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(list, len) } };
    set_sges(qp, list);
}

fn set_sges(qp: *mut ibv_qp_ex, list: &[ibv_sge]) {
    with(qp, |qp, draft| {
        if list.len() > qp.cap.max_send_sge as usize {
            draft.error.get_or_insert(Errno::INVAL);
        } else if let Some(request) = draft.last() {
            request.wr.sges = post::sg_list(list);
        }
    });
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let piece = ibv_data_buf { addr, length };
    // SAFETY: one piece, of the caller's memory.
    unsafe { wr_set_inline_data_list(qp, 1, &piece) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    len: usize,
    list: *const ibv_data_buf,
) {
    if list.is_null() && len > 0 {
        return refuse(qp, Errno::INVAL);
    }
    with(qp, |qp, draft| {
        let start = draft.inline.len();
        let mut room = qp.cap.max_inline_data as usize;
        for index in 0..len {
            // SAFETY: the caller's list of `len` pieces.
            let piece = unsafe { *list.add(index) };
            if piece.length > room {
                draft.error.get_or_insert(Errno::INVAL);
                return;
            }
            room -= piece.length;
            if piece.length > 0 {
                // SAFETY: the caller's memory.
                let bytes = unsafe { std::slice::from_raw_parts(piece.addr.cast(), piece.length) };
                draft.inline.extend_from_slice(bytes);
            }
        }
        let range = start..draft.inline.len();
        if let Some(request) = draft.last() {
            // A placeholder for the slot that the data gets when it is posted.
            let length = range.len() as u32;
            request.wr.sges = post::sg_list(&[ibv_sge { addr: 0, length, lkey: 0 }]);
            request.inline = Some(range);
        }
    });
}
