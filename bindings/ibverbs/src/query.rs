//! What a device and its port are: attributes, GIDs, partition keys.

use std::ffi::{c_char, c_int};
use std::net::IpAddr;

use nic::clock;
use roce::endpoint::Mtu;
use rustix::io::Errno;

use crate::abi::*;
use crate::context::Context;
use crate::device::copy_text;
use crate::errors::{Outcome, code, or_minus_one, set_errno};
use crate::gid;
use crate::limits::{self, ENDPOINT};
use crate::netdev::Interface;
use crate::object::living;

/// IANA enterprise and part numbers that no vendor has.
const VENDOR_ID: u32 = 0x00ff_ffff;
const PART_ID: u32 = 1;

/// Ticks of the clock of [`query_rt_values`], which counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

const CAPABILITIES: u32 = IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_BAD_PKEY_CNTR
    | IBV_DEVICE_BAD_QKEY_CNTR
    | IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_RC_RNR_NAK_GEN
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_MEM_MGT_EXTENSIONS;

fn device_attributes(context: &Context) -> ibv_device_attr {
    let guid = context.device.guid().to_be();
    let count = |limit: u32| c_int::try_from(limit).unwrap_or(c_int::MAX);
    let (max_sge, rd_atomic) = (roce::verbs::MAX_SGE as c_int, c_int::from(limits::MAX_RD_ATOMIC));
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

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's place for the attributes.
        unsafe { attr.write(device_attributes(context)) };
        Ok(())
    }))
}

pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        // SAFETY: null or the caller's input.
        let extension = unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0);
        if attr.is_null() || extension || attr_size < size_of::<ibv_device_attr>() {
            return Err(Errno::INVAL);
        }
        // SAFETY: all-zero bytes are a valid value: numbers only.
        let mut all: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
        all.orig_attr = device_attributes(context);
        all.device_cap_flags_ex = u64::from(CAPABILITIES);
        all.phys_port_cnt_ex = 1;
        all.hca_core_clock = CLOCK_KHZ;
        // SAFETY: the caller says how many bytes there is room for.
        unsafe { write_prefix(&all, attr.cast(), attr_size) };
        Ok(())
    }))
}

/// The time that the library goes by. As adapters have it, all of it stands in the nanoseconds.
pub(crate) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    code(living::<Context>(context).and_then(|_| {
        // SAFETY: null or the caller's values.
        let values = unsafe { values.as_mut() }.ok_or(Errno::INVAL)?;
        if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Errno::INVAL);
        }
        if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            let now = clock::now().as_nanos() as i64;
            values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: now };
        }
        Ok(())
    }))
}

/// Writes as much of `value` as an older or newer caller has room for; the rest becomes zero.
///
/// # Safety
/// `place` is valid for writing `room` bytes.
unsafe fn write_prefix<T>(value: &T, place: *mut u8, room: usize) {
    let len = size_of::<T>().min(room);
    // SAFETY: `len` bytes are readable in `value` and writable at `place`, as is the rest there.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), place, len);
        place.add(len).write_bytes(0, room - len);
    }
}

/// Width and speed codes: the combination nearest to the interface's speed.
pub(crate) fn width_and_speed(interface: &Interface) -> (u8, u8) {
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
pub(crate) fn mtu_code(mtu: Mtu) -> u32 {
    mtu.bytes().trailing_zeros() - 7
}

fn port_attributes(context: &Context, port: u8) -> Outcome<ibv_port_attr> {
    if port != 1 {
        return Err(Errno::INVAL);
    }
    let interface = &context.engine.interface;
    let (active_width, active_speed) = width_and_speed(interface);
    Ok(ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: IBV_MTU_4096,
        active_mtu: mtu_code(context.engine.mtu),
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

pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    attr_len: usize,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        let all = port_attributes(context, port)?;
        // SAFETY: the caller says how many bytes there is room for.
        unsafe { write_prefix(&all, attr.cast(), attr_len) };
        Ok(())
    }))
}

/// The symbol that programs from before `verbs_context` use: their structure ends with the flags.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    let compat_len = core::mem::offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: as the caller promises.
    unsafe { query_port(context, port, attr, compat_len) }
}

/// The address behind an entry of the GID table.
fn address_at(context: &Context, port: u32, index: i64) -> Outcome<IpAddr> {
    let index = usize::try_from(index).map_err(|_| Errno::INVAL)?;
    if port != 1 {
        return Err(Errno::INVAL);
    }
    context.engine.interface.addresses.get(index).copied().ok_or(Errno::INVAL)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|context| {
        let address = address_at(context, u32::from(port), i64::from(index))?;
        if gid.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's place for a GID.
        unsafe { gid.write(gid::of_ip(address)) };
        Ok(0)
    }))
}

/// What sysfs has for the type: 0 for InfiniBand and RoCE v1, 1 for RoCE v2.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: u32,
    gid_type: *mut u32,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|context| {
        address_at(context, u32::from(port), i64::from(index))?;
        if gid_type.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's place for the type.
        unsafe { gid_type.write(1) };
        Ok(0)
    }))
}

fn gid_entry(context: &Context, index: u32) -> Outcome<ibv_gid_entry> {
    let address = address_at(context, 1, i64::from(index))?;
    Ok(ibv_gid_entry {
        gid: gid::of_ip(address),
        gid_index: index,
        port_num: 1,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: context.engine.interface.index,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    code(living::<Context>(context).and_then(|context| {
        if port != 1 || flags != 0 || entry.is_null() {
            return Err(Errno::INVAL);
        }
        let all = gid_entry(context, index)?;
        // SAFETY: the caller says how many bytes there is room for.
        unsafe { write_prefix(&all, entry.cast(), entry_size) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let filled = living::<Context>(context).and_then(|context| {
        let count = context.engine.interface.addresses.len();
        if flags != 0 || entries.is_null() || max_entries < count {
            return Err(Errno::INVAL);
        }
        for index in 0..count {
            let all = gid_entry(context, index as u32)?;
            // SAFETY: the caller has room for `max_entries` entries of `entry_size` bytes.
            unsafe { write_prefix(&all, entries.cast::<u8>().add(index * entry_size), entry_size) };
        }
        Ok(count as isize)
    });
    filled.unwrap_or_else(|error| {
        set_errno(error);
        -(error.raw_os_error() as isize)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|_| {
        if port != 1 || index != 0 || pkey.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's place for a key.
        unsafe { pkey.write(DEFAULT_PKEY.to_be()) };
        Ok(0)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    or_minus_one(living::<Context>(context).and_then(|_| {
        // Full and limited members of the default partition.
        let known = port == 1 && u16::from_be(pkey) | 0x8000 == DEFAULT_PKEY;
        if known { Ok(0) } else { Err(Errno::INVAL) }
    }))
}

/// The symbol of the C library that libibverbs has always offered, too.
#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}
