//! Attributes of queue pairs: conversion from C to the transport and back.

use std::ffi::c_int;

use adapter::congestion::window_packets;
use controls::CongestionControl;
use roce::congestion::Control;
use roce::endpoint::{AttrMask, Mtu, QpAttr, QpState};
use roce::verbs::{Access, Qpn, Transport};
use roce::wire::Psn;
use roce::world::Path;
use rustix::io::Errno;

use super::Qp;
use super::ah;
use super::mr::access_of;
use super::query::mtu_code;
use crate::abi::*;
use crate::engine::limits;
use crate::process::errors::{Outcome, errno_of};

/// The attributes that a call may set. Alternate paths do not exist: there is one port.
const KNOWN: u32 = IBV_QP_STATE
    | IBV_QP_CUR_STATE
    | IBV_QP_EN_SQD_ASYNC_NOTIFY
    | IBV_QP_ACCESS_FLAGS
    | IBV_QP_PKEY_INDEX
    | IBV_QP_PORT
    | IBV_QP_QKEY
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_QP_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER
    | IBV_QP_SQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_DEST_QPN
    | IBV_QP_RATE_LIMIT;

fn state_of(number: u32) -> Outcome<QpState> {
    Ok(match number {
        IBV_QPS_RESET => QpState::Reset,
        IBV_QPS_INIT => QpState::Init,
        IBV_QPS_RTR => QpState::Rtr,
        IBV_QPS_RTS => QpState::Rts,
        IBV_QPS_SQD => QpState::Sqd,
        IBV_QPS_SQE => QpState::Sqe,
        IBV_QPS_ERR => QpState::Error,
        _ => return Err(Errno::INVAL),
    })
}

fn number_of(state: QpState) -> u32 {
    match state {
        QpState::Reset => IBV_QPS_RESET,
        QpState::Init => IBV_QPS_INIT,
        QpState::Rtr => IBV_QPS_RTR,
        QpState::Rts => IBV_QPS_RTS,
        QpState::Sqd => IBV_QPS_SQD,
        QpState::Sqe => IBV_QPS_SQE,
        QpState::Error => IBV_QPS_ERR,
    }
}

/// The attributes for the transport; fields that are not set keep harmless values.
fn wanted(qp: &Qp, attr: &ibv_qp_attr, mask: u32) -> Outcome<QpAttr> {
    let has = |bit| mask & bit != 0;
    let rd_atomic = attr.max_rd_atomic.max(attr.max_dest_rd_atomic);
    let rd_atomic_asked = has(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC);
    let wrong = mask & !KNOWN != 0
        || has(IBV_QP_PORT) && attr.port_num != 1
        || has(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0
        || rd_atomic_asked && rd_atomic > limits::MAX_RD_ATOMIC && too_many(attr, mask);
    if wrong {
        return Err(Errno::INVAL);
    }
    let mut all = blank(qp);
    all.mask = AttrMask::from_bits_retain(mask);
    let mut control = CongestionControl::Off;
    if has(IBV_QP_STATE) {
        all.state = state_of(attr.qp_state)?;
    }
    if has(IBV_QP_CUR_STATE) {
        all.cur_state = state_of(attr.cur_qp_state)?;
    }
    if has(IBV_QP_ACCESS_FLAGS) {
        all.access = access_of(attr.qp_access_flags | IBV_ACCESS_LOCAL_WRITE)?;
    }
    if has(IBV_QP_AV) {
        all.path = ah::path_of(&qp.engine, &attr.ah_attr)?;
        // It is not known who the peer is, but every reliable one acknowledges, which is all it
        // takes.
        control = qp.engine.settings.congestion.toward(all.path.remote.ip(), true);
        all.congestion = control.into();
    }
    if has(IBV_QP_PATH_MTU) {
        let bytes = 128_u32.checked_shl(attr.path_mtu).filter(|_| attr.path_mtu <= IBV_MTU_4096);
        all.mtu = bytes.and_then(Mtu::from_bytes).ok_or(Errno::INVAL)?;
        let usual = all.window_packets;
        all.window_packets = window_packets(usual, control, all.reliability, all.mtu);
    }
    copy_numbers(&mut all, attr);
    Ok(all)
}

/// Only attributes in the mask count.
fn too_many(attr: &ibv_qp_attr, mask: u32) -> bool {
    let over = |bit, value| mask & bit != 0 && value > limits::MAX_RD_ATOMIC;
    over(IBV_QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic)
        || over(IBV_QP_MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic)
}

fn copy_numbers(all: &mut QpAttr, attr: &ibv_qp_attr) {
    all.sqd_notify = attr.en_sqd_async_notify != 0;
    all.pkey_index = attr.pkey_index;
    all.port = attr.port_num;
    all.qkey = attr.qkey;
    all.timeout = attr.timeout;
    all.retry_count = attr.retry_cnt;
    all.rnr_retry = attr.rnr_retry;
    all.rq_psn = Psn::new(attr.rq_psn);
    all.sq_psn = Psn::new(attr.sq_psn);
    all.max_rd_atomic = attr.max_rd_atomic;
    all.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    all.min_rnr_timer = attr.min_rnr_timer;
    all.dest_qp = Qpn::new(attr.dest_qp_num);
    // The verbs count rates in kbit/s.
    all.rate_limit_bps = u64::from(attr.rate_limit) * 1000;
}

fn blank(qp: &Qp) -> QpAttr {
    let unspecified = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
    QpAttr {
        mask: AttrMask::default(),
        state: QpState::Reset,
        cur_state: QpState::Reset,
        sqd_notify: false,
        access: Access::default(),
        pkey_index: 0,
        port: 1,
        qkey: 0,
        path: Path::new(unspecified),
        mtu: Mtu::M1024,
        timeout: 0,
        retry_count: 0,
        rnr_retry: 0,
        rq_psn: Psn::default(),
        sq_psn: Psn::default(),
        max_rd_atomic: 0,
        max_dest_rd_atomic: 0,
        min_rnr_timer: 0,
        dest_qp: Qpn::new(0),
        rate_limit_bps: 0,
        window_packets: qp.engine.settings.window_packets,
        reliability: qp.engine.settings.reliability,
        congestion: Control::OFF,
    }
}

impl Qp {
    /// Sets what `mask` names, as `ibv_modify_qp` does.
    pub(crate) fn modify(&self, attr: &ibv_qp_attr, mask: u32) -> Outcome<()> {
        let wanted = wanted(self, attr, mask)?;
        let connects = mask & IBV_QP_STATE != 0 && wanted.state == QpState::Rtr;
        let met = (connects && self.transport != Transport::Ud)
            .then(|| self.engine.discover(&wanted.path, wanted.dest_qp));
        let modified = self.engine.verb(|core| core.modify_qp(self.number, &wanted, met));
        modified.map_err(errno_of)?;
        // What the peer may not do any more it does not do from here on.
        let _ = self.engine.quiesce();
        if mask & IBV_QP_STATE != 0 {
            // SAFETY: programs read the state of a queue pair; only modify and query write it.
            unsafe { (*self.base()).state = attr.qp_state };
        }
        Ok(())
    }

    /// Its current attributes, and those it was created with.
    pub(crate) fn query(&self) -> Outcome<(ibv_qp_attr, ibv_qp_init_attr)> {
        let found = self.engine.lock().endpoint().query_qp(self.number).map_err(errno_of)?;
        let all = queried(self, &found);
        // SAFETY: the queue pair's own structure, whose state is ours to write.
        unsafe { (*self.base()).state = all.qp_state };
        Ok((all, created_with(self)))
    }
}

/// The peer's rights. Local rights are not set on the queue pair.
fn access_flags(access: Access) -> u32 {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    flag(access.remote_write, IBV_ACCESS_REMOTE_WRITE)
        | flag(access.remote_read, IBV_ACCESS_REMOTE_READ)
        | flag(access.remote_atomic, IBV_ACCESS_REMOTE_ATOMIC)
        | flag(access.bind_window, IBV_ACCESS_MW_BIND)
}

fn queried(qp: &Qp, found: &QpAttr) -> ibv_qp_attr {
    let state = number_of(found.state);
    // SAFETY: all-zero bytes are valid attributes: numbers only.
    let unused = unsafe { std::mem::zeroed() };
    ibv_qp_attr {
        qp_state: state,
        cur_qp_state: state,
        path_mtu: mtu_code(found.mtu),
        path_mig_state: 0,
        qkey: found.qkey,
        rq_psn: found.rq_psn.get(),
        sq_psn: found.sq_psn.get(),
        dest_qp_num: found.dest_qp.get(),
        qp_access_flags: access_flags(found.access),
        cap: qp.cap,
        ah_attr: ah::attr_of(&found.path),
        alt_ah_attr: unused,
        pkey_index: found.pkey_index,
        alt_pkey_index: 0,
        en_sqd_async_notify: u8::from(found.sqd_notify),
        sq_draining: 0,
        max_rd_atomic: found.max_rd_atomic,
        max_dest_rd_atomic: found.max_dest_rd_atomic,
        min_rnr_timer: found.min_rnr_timer,
        port_num: 1,
        timeout: found.timeout,
        retry_cnt: found.retry_count,
        rnr_retry: found.rnr_retry,
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: u32::try_from(found.rate_limit_bps / 1000).unwrap_or(u32::MAX),
    }
}

fn created_with(qp: &Qp) -> ibv_qp_init_attr {
    // SAFETY: the queue pair's own structure, whose handles do not change.
    let base = unsafe { &*qp.base() };
    ibv_qp_init_attr {
        qp_context: base.qp_context,
        send_cq: base.send_cq,
        recv_cq: base.recv_cq,
        srq: base.srq,
        cap: qp.cap,
        qp_type: base.qp_type,
        sq_sig_all: c_int::from(qp.signals_all),
    }
}
