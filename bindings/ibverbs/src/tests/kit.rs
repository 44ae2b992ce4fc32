//! A program's usual objects, and helpers shared by the tests.

use std::ffi::{CStr, c_int, c_void};
use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use crate::abi::*;

unsafe extern "C" {
    fn ibv_get_device_list(num: *mut c_int) -> *mut *mut ibv_device;
    fn ibv_free_device_list(list: *mut *mut ibv_device);
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    pub(super) fn ibv_close_device(context: *mut ibv_context) -> c_int;
    pub(super) fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub(super) fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub(super) fn ibv_reg_mr(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        len: usize,
        access: c_int,
    ) -> *mut ibv_mr;
    pub(super) fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    pub(super) fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    pub(super) fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub(super) fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    pub(super) fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub(super) fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    pub(super) fn ibv_query_gid(
        context: *mut ibv_context,
        port: u8,
        index: c_int,
        gid: *mut ibv_gid,
    ) -> c_int;
    pub(super) fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub(super) fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub(super) fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn ibv_ack_cq_events(cq: *mut ibv_cq, events: u32);
    pub(super) fn ibv_get_async_event(
        context: *mut ibv_context,
        event: *mut ibv_async_event,
    ) -> c_int;
    pub(super) fn ibv_ack_async_event(event: *mut ibv_async_event);
}

pub(super) const EVERY_ACCESS: c_int = (IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC) as c_int;

pub(super) fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The loopback device, open.
pub(super) fn open() -> *mut ibv_context {
    // SAFETY: the list is valid until it is freed, and ends with null.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let mut at = list;
        while !(*at).is_null() && CStr::from_ptr((**at).name.as_ptr()) != c"dq_lo" {
            at = at.add(1);
        }
        assert!(!(*at).is_null(), "there is always a loopback interface");
        let context = ibv_open_device(*at);
        ibv_free_device_list(list);
        assert!(!context.is_null());
        context
    }
}

/// One side: context, domain, a completion queue, and a region of 64 KiB.
pub(super) struct Side {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    pub(super) cq: *mut ibv_cq,
    pub(super) mr: *mut ibv_mr,
    pub(super) bytes: Vec<u8>,
}

impl Side {
    pub(super) fn new() -> Side {
        Side::with_channel(open(), null_mut(), 64)
    }

    pub(super) fn with_channel(
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cqe: c_int,
    ) -> Side {
        let mut bytes = vec![0_u8; 1 << 16];
        // SAFETY: valid objects; the memory lives as long as the region.
        unsafe {
            let pd = ibv_alloc_pd(context);
            let mr = ibv_reg_mr(pd, bytes.as_mut_ptr().cast(), bytes.len(), EVERY_ACCESS);
            let cq = ibv_create_cq(context, cqe, 7 as *mut c_void, channel, 0);
            assert!(!pd.is_null() && !mr.is_null() && !cq.is_null());
            Side { context, pd, cq, mr, bytes }
        }
    }

    pub(super) fn addr(&self, offset: usize) -> u64 {
        self.bytes.as_ptr() as u64 + offset as u64
    }

    pub(super) fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        // SAFETY: the region is alive.
        ibv_sge { addr: self.addr(offset), length, lkey: unsafe { (*self.mr).lkey } }
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: the region is alive.
        unsafe { (*self.mr).rkey }
    }

    pub(super) fn qp(&self, qp_type: u32, wrs: u32) -> *mut ibv_qp {
        let mut attr = qp_init(self.cq, qp_type, wrs);
        // SAFETY: valid objects.
        let qp = unsafe { ibv_create_qp(self.pd, &mut attr) };
        assert!(!qp.is_null(), "errno {}", errno());
        qp
    }

    /// Waits for one completion.
    pub(super) fn wait(&self) -> ibv_wc {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match self.poll() {
                Some(wc) => return wc,
                None => assert!(Instant::now() < deadline, "nothing completes"),
            }
        }
    }

    pub(super) fn poll(&self) -> Option<ibv_wc> {
        // SAFETY: all-zero bytes are a valid completion; the queue is alive.
        unsafe {
            let mut wc: ibv_wc = zeroed();
            let got = ((*self.context).ops.poll_cq.unwrap())(self.cq, 1, &mut wc);
            assert!(got >= 0);
            (got == 1).then_some(wc)
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // SAFETY: whatever is still there ends with the context.
        unsafe { ibv_close_device(self.context) };
    }
}

pub(super) fn qp_init(cq: *mut ibv_cq, qp_type: u32, wrs: u32) -> ibv_qp_init_attr {
    let cap = ibv_qp_cap {
        max_send_wr: wrs,
        max_recv_wr: wrs,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline_data: 128,
    };
    ibv_qp_init_attr {
        qp_context: null_mut(),
        send_cq: cq,
        recv_cq: cq,
        srq: null_mut(),
        cap,
        qp_type,
        sq_sig_all: 1,
    }
}

fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: u32) {
    // SAFETY: a live queue pair and the caller's attributes.
    let code = unsafe { ibv_modify_qp(qp, attr, mask as c_int) };
    assert_eq!(code, 0, "to state {}", attr.qp_state);
}

pub(super) fn to_init(qp: *mut ibv_qp) {
    // SAFETY: all-zero bytes are valid attributes.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = EVERY_ACCESS as u32;
    modify(qp, &mut attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/// From INIT to RTS, towards queue pair `dest` of this machine.
pub(super) fn to_rts(qp: *mut ibv_qp, dest: u32) {
    // SAFETY: all-zero bytes are valid attributes; the queue pair is alive.
    unsafe {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = 3;
        attr.dest_qp_num = dest;
        attr.max_dest_rd_atomic = 4;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.hop_limit = 1;
        ibv_query_gid((*qp).context, 1, 0, &mut attr.ah_attr.grh.dgid);
        modify(
            qp,
            &mut attr,
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
        );
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = 6;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 4;
        modify(
            qp,
            &mut attr,
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
        );
    }
}

pub(super) fn to_error(qp: *mut ibv_qp) {
    // SAFETY: all-zero bytes are valid attributes.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    modify(qp, &mut attr, IBV_QP_STATE);
}

/// Two connected queue pairs.
pub(super) fn connected(a: &Side, b: &Side) -> (*mut ibv_qp, *mut ibv_qp) {
    let (qa, qb) = (a.qp(IBV_QPT_RC, 16), b.qp(IBV_QPT_RC, 16));
    to_init(qa);
    to_init(qb);
    // SAFETY: both are alive.
    unsafe {
        to_rts(qa, (*qb).qp_num);
        to_rts(qb, (*qa).qp_num);
    }
    (qa, qb)
}

pub(super) fn send_wr(wr_id: u64, opcode: u32, sge: &mut ibv_sge) -> ibv_send_wr {
    // SAFETY: all-zero bytes are a valid request.
    let mut wr: ibv_send_wr = unsafe { zeroed() };
    wr.wr_id = wr_id;
    wr.sg_list = sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr
}

pub(super) fn post_send(qp: *mut ibv_qp, wr: &mut ibv_send_wr) -> (c_int, *mut ibv_send_wr) {
    let mut bad = null_mut();
    // SAFETY: contexts, and queue pairs that once lived, keep their memory.
    let code = unsafe { ((*(*qp).context).ops.post_send.unwrap())(qp, wr, &mut bad) };
    (code, bad)
}

pub(super) fn post_recv(qp: *mut ibv_qp, wr_id: u64, sge: &mut ibv_sge) -> c_int {
    let mut wr = ibv_recv_wr { wr_id, next: null_mut(), sg_list: sge, num_sge: 1 };
    let mut bad = null_mut();
    // SAFETY: as above.
    unsafe { ((*(*qp).context).ops.post_recv.unwrap())(qp, &mut wr, &mut bad) }
}
