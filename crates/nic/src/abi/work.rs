//! Work requests and completions.

use std::ffi::{c_int, c_uint, c_void};

use super::{c_struct, ibv_ah, ibv_mr, ibv_mw};

c_struct! {
    struct ibv_wc {
        wr_id: u64,
        status: u32,
        opcode: u32,
        vendor_err: u32,
        byte_len: u32,
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }

    struct ibv_sge { addr: u64, length: u32, lkey: u32, }
    struct ibv_data_buf { addr: *mut c_void, length: usize, }

    struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: u32,
        send_flags: c_uint,
        imm_data: u32,
        wr: ibv_send_wr_args,
        qp_type: u32,
        bind_mw: ibv_send_wr_bind,
    }

    struct ibv_mw_bind_info {
        mr: *mut ibv_mr,
        addr: u64,
        length: u64,
        mw_access_flags: c_uint,
    }

    struct ibv_mw_bind { wr_id: u64, send_flags: c_uint, bind_info: ibv_mw_bind_info, }
}

/// `wr` of a send work request.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_send_wr_args {
    pub rdma: wr_rdma,
    pub atomic: wr_atomic,
    pub ud: wr_ud,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// `bind_mw` of a send work request.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_bind {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}
