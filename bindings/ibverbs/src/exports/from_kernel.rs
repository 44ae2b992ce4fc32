//! Conversions between the kernel's structures and those of the verbs (`rdma/ib_user_verbs.h`,
//! `rdma/ib_user_sa.h`). librdmacm imports them, but uses none without a kernel device.

use std::ffi::c_void;

use crate::abi::*;

#[derive(Clone, Copy)]
#[repr(C)]
struct ib_uverbs_global_route {
    dgid: [u8; 16],
    flow_label: u32,
    sgid_index: u8,
    hop_limit: u8,
    traffic_class: u8,
    reserved: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ib_uverbs_ah_attr {
    grh: ib_uverbs_global_route,
    dlid: u16,
    sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    is_global: u8,
    port_num: u8,
    reserved: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ib_uverbs_qp_attr {
    qp_attr_mask: u32,
    qp_state: u32,
    cur_qp_state: u32,
    path_mtu: u32,
    path_mig_state: u32,
    qkey: u32,
    rq_psn: u32,
    sq_psn: u32,
    dest_qp_num: u32,
    qp_access_flags: u32,
    ah_attr: ib_uverbs_ah_attr,
    alt_ah_attr: ib_uverbs_ah_attr,
    max_send_wr: u32,
    max_recv_wr: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_inline_data: u32,
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
    reserved: [u8; 5],
}

fn address(kernel: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: kernel.grh.dgid },
            flow_label: kernel.grh.flow_label,
            sgid_index: kernel.grh.sgid_index,
            hop_limit: kernel.grh.hop_limit,
            traffic_class: kernel.grh.traffic_class,
        },
        dlid: kernel.dlid,
        sl: kernel.sl,
        src_path_bits: kernel.src_path_bits,
        static_rate: kernel.static_rate,
        is_global: kernel.is_global,
        port_num: kernel.port_num,
    }
}

fn attributes(kernel: &ib_uverbs_qp_attr) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: kernel.qp_state,
        cur_qp_state: kernel.cur_qp_state,
        path_mtu: kernel.path_mtu,
        path_mig_state: kernel.path_mig_state,
        qkey: kernel.qkey,
        rq_psn: kernel.rq_psn,
        sq_psn: kernel.sq_psn,
        dest_qp_num: kernel.dest_qp_num,
        qp_access_flags: kernel.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: kernel.max_send_wr,
            max_recv_wr: kernel.max_recv_wr,
            max_send_sge: kernel.max_send_sge,
            max_recv_sge: kernel.max_recv_sge,
            max_inline_data: kernel.max_inline_data,
        },
        ah_attr: address(&kernel.ah_attr),
        alt_ah_attr: address(&kernel.alt_ah_attr),
        pkey_index: kernel.pkey_index,
        alt_pkey_index: kernel.alt_pkey_index,
        en_sqd_async_notify: kernel.en_sqd_async_notify,
        sq_draining: kernel.sq_draining,
        max_rd_atomic: kernel.max_rd_atomic,
        max_dest_rd_atomic: kernel.max_dest_rd_atomic,
        min_rnr_timer: kernel.min_rnr_timer,
        port_num: kernel.port_num,
        timeout: kernel.timeout,
        retry_cnt: kernel.retry_cnt,
        rnr_retry: kernel.rnr_retry,
        alt_port_num: kernel.alt_port_num,
        alt_timeout: kernel.alt_timeout,
        rate_limit: 0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_ah_attr_from_kern(
    to: *mut ibv_ah_attr,
    from: *const ib_uverbs_ah_attr,
) {
    // SAFETY: null or the caller's structures.
    if let (false, Some(from)) = (to.is_null(), unsafe { from.as_ref() }) {
        // SAFETY: as above.
        unsafe { to.write(address(from)) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_qp_attr_from_kern(
    to: *mut ibv_qp_attr,
    from: *const ib_uverbs_qp_attr,
) {
    // SAFETY: null or the caller's structures.
    if let (false, Some(from)) = (to.is_null(), unsafe { from.as_ref() }) {
        // SAFETY: as above.
        unsafe { to.write(attributes(from)) };
    }
}

/// Path records are for subnet administration, which does not exist on Ethernet: nothing to
/// convert.
#[unsafe(no_mangle)]
extern "C" fn ibv_copy_path_rec_from_kern(_to: *mut c_void, _from: *const c_void) {}

/// See [`ibv_copy_path_rec_from_kern`].
#[unsafe(no_mangle)]
extern "C" fn ibv_copy_path_rec_to_kern(_to: *mut c_void, _from: *const c_void) {}
