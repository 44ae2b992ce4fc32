//! Properties of a device and its port: attributes, GIDs, speed.

use std::ffi::{c_char, c_int};
use std::net::IpAddr;

use roce::endpoint::Mtu;
use rustix::io::Errno;

use super::Context;
use super::gid;
use crate::abi::*;
use crate::engine::limits::{self, ENDPOINT};
use crate::engine::netdev::Interface;
use crate::process::errors::Outcome;

/// IANA enterprise and part numbers that are not assigned to any vendor.
const VENDOR_ID: u32 = 0x00ff_ffff;
const PART_ID: u32 = 1;

/// Ticks of the clock of `ibv_query_rt_values_ex`, which counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

const CAPABILITIES: u32 = IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_BAD_PKEY_CNTR
    | IBV_DEVICE_BAD_QKEY_CNTR
    | IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_RC_RNR_NAK_GEN
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_MEM_MGT_EXTENSIONS;

impl Context {
    pub(crate) fn device_attributes(&self) -> ibv_device_attr {
        let guid = self.device.guid.to_be();
        let count = |limit: u32| c_int::try_from(limit).unwrap_or(c_int::MAX);
        let (max_sge, rd_atomic) =
            (roce::verbs::MAX_SGE as c_int, c_int::from(limits::MAX_RD_ATOMIC));
        let mut attr = ibv_device_attr {
            fw_ver: [0; 64],
            node_guid: guid,
            sys_image_guid: guid,
            max_mr_size: limits::MAX_MR_BYTES,
            page_size_cap: u64::MAX << 12,
            vendor_id: VENDOR_ID,
            vendor_part_id: PART_ID,
            hw_ver: 0,
            max_qp: count(ENDPOINT.max_qps),
            max_qp_wr: count(ENDPOINT.max_qp_wr),
            device_cap_flags: CAPABILITIES,
            max_sge,
            max_sge_rd: max_sge,
            max_cq: count(ENDPOINT.max_cqs),
            max_cqe: count(ENDPOINT.max_cqe),
            max_mr: count(ENDPOINT.max_regions),
            max_pd: count(limits::MAX_PDS),
            max_qp_rd_atom: rd_atomic,
            max_ee_rd_atom: 0,
            max_res_rd_atom: rd_atomic * count(ENDPOINT.max_qps),
            max_qp_init_rd_atom: rd_atomic,
            max_ee_init_rd_atom: 0,
            atomic_cap: IBV_ATOMIC_HCA,
            max_ee: 0,
            max_rdd: 0,
            max_mw: count(limits::MAX_WINDOWS),
            max_raw_ipv6_qp: 0,
            max_raw_ethy_qp: 0,
            max_mcast_grp: count(limits::MAX_GROUPS),
            max_mcast_qp_attach: count(limits::MAX_GROUP_QPS),
            max_total_mcast_qp_attach: count(limits::MAX_GROUP_ATTACHMENTS),
            max_ah: c_int::MAX,
            max_fmr: 0,
            max_map_per_fmr: 0,
            max_srq: count(limits::MAX_SRQS),
            max_srq_wr: count(limits::MAX_SRQ_WR),
            max_srq_sge: max_sge,
            max_pkeys: 1,
            local_ca_ack_delay: 15,
            phys_port_cnt: 1,
        };
        copy_text(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
        attr
    }

    /// The same with the attributes added since.
    pub(crate) fn device_attributes_ex(&self) -> ibv_device_attr_ex {
        // SAFETY: all-zero bytes are a valid value: numbers only.
        let mut all: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
        all.orig_attr = self.device_attributes();
        all.device_cap_flags_ex = u64::from(CAPABILITIES);
        all.phys_port_cnt_ex = 1;
        all.hca_core_clock = CLOCK_KHZ;
        all
    }

    /// # Errors
    /// `EINVAL` for any port but the first.
    pub(crate) fn port_attributes(&self, port: u8) -> Outcome<ibv_port_attr> {
        if port != 1 {
            return Err(Errno::INVAL);
        }
        let interface = &self.engine.interface;
        let (active_width, active_speed) = width_and_speed(interface);
        Ok(ibv_port_attr {
            state: IBV_PORT_ACTIVE,
            max_mtu: IBV_MTU_4096,
            active_mtu: mtu_code(self.engine.mtu()),
            gid_tbl_len: interface.addresses.len() as c_int,
            port_cap_flags: IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
            max_msg_sz: limits::MAX_MESSAGE_BYTES,
            bad_pkey_cntr: 0,
            qkey_viol_cntr: 0,
            pkey_tbl_len: 1,
            lid: 0,
            sm_lid: 0,
            lmc: 0,
            max_vl_num: 1,
            sm_sl: 0,
            subnet_timeout: 0,
            init_type_reply: 0,
            active_width,
            active_speed,
            phys_state: 5,
            link_layer: IBV_LINK_LAYER_ETHERNET as u8,
            flags: IBV_QPF_GRH_REQUIRED as u8,
            port_cap_flags2: 0,
        })
    }

    /// The address of an entry of the GID table.
    ///
    /// # Errors
    /// `EINVAL` for any port but the first and for entries that do not exist.
    pub(crate) fn address_at(&self, port: u32, index: i64) -> Outcome<IpAddr> {
        let index = usize::try_from(index).map_err(|_| Errno::INVAL)?;
        if port != 1 {
            return Err(Errno::INVAL);
        }
        self.engine.interface.addresses.get(index).copied().ok_or(Errno::INVAL)
    }

    /// An entry of the GID table; errors as [`Context::address_at`].
    pub(crate) fn gid_entry(&self, index: u32) -> Outcome<ibv_gid_entry> {
        let address = self.address_at(1, i64::from(index))?;
        Ok(ibv_gid_entry {
            gid: gid::of_ip(address),
            gid_index: index,
            port_num: 1,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ndev_ifindex: self.engine.interface.index,
        })
    }
}

/// Width and speed codes: the combination nearest to the interface's speed.
pub(super) fn width_and_speed(interface: &Interface) -> (u8, u8) {
    const X1: u8 = 1;
    const X4: u8 = 2;
    const SDR: u8 = 1;
    const QDR: u8 = 4;
    const EDR: u8 = 32;
    match interface.speed_mbps {
        Some(0..10_000) => (X1, SDR),
        Some(10_000..25_000) => (X1, QDR),
        Some(25_000..40_000) => (X1, EDR),
        Some(40_000..100_000) => (X4, QDR),
        _ => (X4, EDR),
    }
}

/// `enum ibv_mtu`.
pub(super) fn mtu_code(mtu: Mtu) -> u32 {
    mtu.bytes().trailing_zeros() - 7
}

/// Copies as much as fits, with a terminating zero.
pub(crate) fn copy_text(place: &mut [c_char], text: &str) {
    let room = place.len() - 1;
    for (to, from) in place[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}
