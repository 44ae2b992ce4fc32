//! Objects that verbs create, as programs see them, and the attributes they are created with.

use std::ffi::{c_int, c_uint, c_void};

use libc::{pthread_cond_t, pthread_mutex_t};

use super::c_struct;
use super::{ibv_ah_attr, ibv_context, ibv_data_buf, ibv_mw_bind_info, ibv_sge};

c_struct! {
    struct ibv_pd { context: *mut ibv_context, handle: u32, }

    struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }

    struct ibv_mw {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        rkey: u32,
        handle: u32,
        r#type: u32,
    }

    struct ibv_ah { context: *mut ibv_context, pd: *mut ibv_pd, handle: u32, }

    struct ibv_comp_channel { context: *mut ibv_context, fd: c_int, refcnt: c_int, }

    struct ibv_srq_attr { max_wr: u32, max_sge: u32, srq_limit: u32, }
    struct ibv_srq_init_attr { srq_context: *mut c_void, attr: ibv_srq_attr, }

    struct ibv_srq_init_attr_ex {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
        comp_mask: u32,
        srq_type: u32,
        pd: *mut ibv_pd,
        xrcd: *mut c_void,
        cq: *mut ibv_cq,
        tm_cap: [u32; 2],
    }

    struct ibv_srq {
        context: *mut ibv_context,
        srq_context: *mut c_void,
        pd: *mut ibv_pd,
        handle: u32,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }

    struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }

    struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: u32,
        sq_sig_all: c_int,
    }

    struct ibv_rx_hash_conf {
        rx_hash_function: u8,
        rx_hash_key_len: u8,
        rx_hash_key: *mut u8,
        rx_hash_fields_mask: u64,
    }

    struct ibv_qp_init_attr_ex {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: u32,
        sq_sig_all: c_int,
        comp_mask: u32,
        pd: *mut ibv_pd,
        xrcd: *mut c_void,
        create_flags: u32,
        max_tso_header: u16,
        rwq_ind_tbl: *mut c_void,
        rx_hash_conf: ibv_rx_hash_conf,
        source_qpn: u32,
        send_ops_flags: u64,
    }

    struct ibv_qp_attr {
        qp_state: u32,
        cur_qp_state: u32,
        path_mtu: u32,
        path_mig_state: u32,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }

    struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        handle: u32,
        qp_num: u32,
        state: u32,
        qp_type: u32,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }

    struct ibv_qp_ex {
        qp_base: ibv_qp,
        comp_mask: u64,
        wr_id: u64,
        wr_flags: c_uint,
        wr_atomic_cmp_swp: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64),
        wr_atomic_fetch_add: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64),
        wr_bind_mw: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info),
        wr_local_inv: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_rdma_read: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64),
        wr_rdma_write: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64),
        wr_rdma_write_imm: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
        wr_send: unsafe extern "C" fn(*mut ibv_qp_ex),
        wr_send_imm: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_send_inv: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_send_tso: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, u16, u16),
        wr_set_ud_addr: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32),
        wr_set_xrc_srqn: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_set_inline_data: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize),
        wr_set_inline_data_list: unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_data_buf),
        wr_set_sge: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
        wr_set_sge_list: unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_sge),
        wr_start: unsafe extern "C" fn(*mut ibv_qp_ex),
        wr_complete: unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int,
        wr_abort: unsafe extern "C" fn(*mut ibv_qp_ex),
        wr_atomic_write: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, *const c_void),
    }

    struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }

    struct ibv_cq_ex {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
        comp_mask: u32,
        status: u32,
        wr_id: u64,
        start_poll: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int,
        next_poll: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int,
        end_poll: unsafe extern "C" fn(*mut ibv_cq_ex),
        read_opcode: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_vendor_err: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_byte_len: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_imm_data: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_qp_num: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_src_qp: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_wc_flags: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint,
        read_slid: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_sl: unsafe extern "C" fn(*mut ibv_cq_ex) -> u8,
        read_dlid_path_bits: unsafe extern "C" fn(*mut ibv_cq_ex) -> u8,
        read_completion_ts: unsafe extern "C" fn(*mut ibv_cq_ex) -> u64,
        read_cvlan: unsafe extern "C" fn(*mut ibv_cq_ex) -> u16,
        read_flow_tag: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_tm_info: unsafe extern "C" fn(*mut ibv_cq_ex, *mut c_void),
        read_completion_wallclock_ns: unsafe extern "C" fn(*mut ibv_cq_ex) -> u64,
    }

    struct ibv_poll_cq_attr { comp_mask: u32, }

    struct ibv_cq_init_attr_ex {
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: u32,
        wc_flags: u64,
        comp_mask: u32,
        flags: u32,
        parent_domain: *mut ibv_pd,
    }

    struct ibv_modify_cq_attr { attr_mask: u32, moderate: [u16; 2], }
    struct ibv_qp_rate_limit_attr {
        rate_limit: u32,
        max_burst_sz: u32,
        typical_pkt_sz: u16,
        comp_mask: u32,
    }
    struct ibv_td_init_attr { comp_mask: u32, }
    struct ibv_td { context: *mut ibv_context, }
    struct ibv_parent_domain_init_attr {
        pd: *mut ibv_pd,
        td: *mut ibv_td,
        comp_mask: u32,
        alloc: *const c_void,
        free: *const c_void,
        pd_context: *mut c_void,
    }

    struct ibv_async_event { element: ibv_event_element, event_type: u32, }
}

/// The object of an asynchronous event (an unnamed union in C).
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_event_element {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub srq: *mut ibv_srq,
    pub port_num: c_int,
}
