//! Values of the verbs in C's terms and back.

use std::net::{IpAddr, SocketAddr};

use roce::endpoint::{AttrMask, Mtu, QpAttr, QpState};
use roce::verbs::{
    Access, Completion, Qpn, SendOp, SendWr, Transport, VerbsError, WcOpcode, WcStatus,
};
use roce::wire::{Psn, ROCE_PORT};
use roce::world::{Ecn, Path};

use crate::abi::*;

/// The only port of a device that is used.
pub(super) const PORT: u8 = 1;

/// An address of the device that packets can leave from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gid {
    pub(super) ip: IpAddr,
    /// Its index in the port's table.
    pub(super) index: u8,
}

/// The error of a call that returned `errno`.
pub(super) fn refused(call: &'static str, errno: i32) -> VerbsError {
    match errno {
        libc::EOPNOTSUPP | libc::ENOSYS => VerbsError::Unsupported(call),
        errno => VerbsError::Device { call, errno },
    }
}

/// The error of the last call that returned null or -1.
pub(super) fn last_refused(call: &'static str) -> VerbsError {
    refused(call, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

pub(super) fn access_flags(access: Access) -> u32 {
    let flags = [
        (access.local_write, IBV_ACCESS_LOCAL_WRITE),
        (access.remote_write, IBV_ACCESS_REMOTE_WRITE),
        (access.remote_read, IBV_ACCESS_REMOTE_READ),
        (access.remote_atomic, IBV_ACCESS_REMOTE_ATOMIC),
        (access.bind_window, IBV_ACCESS_MW_BIND),
    ];
    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag)
}

fn access_of(flags: u32) -> Access {
    let has = |flag| flags & flag != 0;
    Access {
        local_write: has(IBV_ACCESS_LOCAL_WRITE),
        remote_write: has(IBV_ACCESS_REMOTE_WRITE),
        remote_read: has(IBV_ACCESS_REMOTE_READ),
        remote_atomic: has(IBV_ACCESS_REMOTE_ATOMIC),
        bind_window: has(IBV_ACCESS_MW_BIND),
    }
}

pub(super) fn qp_type(transport: Transport) -> u32 {
    match transport {
        Transport::Rc => IBV_QPT_RC,
        Transport::Uc => IBV_QPT_UC,
        Transport::Ud => IBV_QPT_UD,
    }
}

pub(super) fn gid_of(ip: IpAddr) -> ibv_gid {
    let v6 = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    ibv_gid { raw: v6.octets() }
}

pub(super) fn ip_of(gid: ibv_gid) -> IpAddr {
    // SAFETY: every bit pattern is 16 bytes.
    IpAddr::from(unsafe { gid.raw }).to_canonical()
}

/// What no loaded device has.
pub const OTHER_PORT: &str = "UDP port other than 4791";

/// The address vector of a peer, from the address that the path names, or the first of its family.
pub(super) fn address(gids: &[Gid], path: &Path) -> Result<ibv_ah_attr, VerbsError> {
    if path.remote.port() != ROCE_PORT {
        return Err(VerbsError::Unsupported(OTHER_PORT));
    }
    let remote = path.remote.ip().to_canonical();
    let fits = |gid: &&Gid| gid.ip.is_ipv4() == remote.is_ipv4();
    let source = gids.get(usize::from(path.source)).filter(fits);
    let source = source.or_else(|| gids.iter().find(fits));
    let source = source.ok_or(VerbsError::Unsupported("address of the peer's family"))?;
    Ok(ibv_ah_attr {
        grh: ibv_global_route {
            dgid: gid_of(remote),
            flow_label: 0,
            sgid_index: source.index,
            hop_limit: path.hop_limit,
            traffic_class: path.dscp << 2 | ecn_bits(path.ecn),
        },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: PORT,
    })
}

const ECNS: [Ecn; 4] = [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce];

fn ecn_bits(ecn: Ecn) -> u8 {
    ecn as u8
}

/// The ECN codepoints are in the order of their bits.
const _: () = assert!(Ecn::NotEct as u8 == 0 && Ecn::Ect1 as u8 == 1);
const _: () = assert!(Ecn::Ect0 as u8 == 2 && Ecn::Ce as u8 == 3);

fn path_of(gids: &[Gid], attr: &ibv_ah_attr) -> Path {
    let remote = SocketAddr::new(ip_of(attr.grh.dgid), ROCE_PORT);
    let source = gids.iter().position(|gid| gid.index == attr.grh.sgid_index);
    Path {
        dscp: attr.grh.traffic_class >> 2,
        ecn: ECNS[usize::from(attr.grh.traffic_class & 3)],
        source: source.unwrap_or(0) as u8,
        hop_limit: attr.grh.hop_limit,
        ..Path::new(remote)
    }
}

/// States in the order of C's numbers.
const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Error,
];

fn state_number(state: QpState) -> u32 {
    STATES.iter().position(|&other| other == state).unwrap_or(0) as u32
}

/// Attributes in C's terms. Those that are not set are zero.
pub(super) fn attributes(gids: &[Gid], attr: &QpAttr) -> Result<ibv_qp_attr, VerbsError> {
    // SAFETY: numbers only, for which zero is a value.
    let mut out: ibv_qp_attr = unsafe { std::mem::zeroed() };
    if attr.mask.contains(AttrMask::AV) {
        out.ah_attr = address(gids, &attr.path)?;
    }
    (out.qp_state, out.cur_qp_state) = (state_number(attr.state), state_number(attr.cur_state));
    out.en_sqd_async_notify = u8::from(attr.sqd_notify);
    out.qp_access_flags = access_flags(attr.access) & !(IBV_ACCESS_MW_BIND);
    (out.pkey_index, out.port_num) = (attr.pkey_index, attr.port);
    (out.qkey, out.path_mtu) = (attr.qkey, attr.mtu as u32 + 1);
    (out.timeout, out.retry_cnt, out.rnr_retry) = (attr.timeout, attr.retry_count, attr.rnr_retry);
    (out.rq_psn, out.sq_psn) = (attr.rq_psn.get(), attr.sq_psn.get());
    (out.max_rd_atomic, out.max_dest_rd_atomic) = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
    (out.min_rnr_timer, out.dest_qp_num) = (attr.min_rnr_timer, attr.dest_qp.get());
    out.rate_limit = u32::try_from(attr.rate_limit_bps / 1000).unwrap_or(u32::MAX);
    Ok(out)
}

/// A path MTU by its number in C, the smallest for unknown ones.
pub(super) fn mtu_of(number: u32) -> Mtu {
    Mtu::ALL.get((number as usize).wrapping_sub(1)).copied().unwrap_or(Mtu::M256)
}

/// Attributes as the device reports them. Those without a counterpart in C keep their defaults.
pub(super) fn attributes_of(gids: &[Gid], from: &ibv_qp_attr) -> QpAttr {
    let state = |number: u32| STATES.get(number as usize).copied().unwrap_or(QpState::Error);
    QpAttr {
        mask: AttrMask::FIELDS,
        cur_state: state(from.cur_qp_state),
        sqd_notify: from.en_sqd_async_notify != 0,
        access: access_of(from.qp_access_flags),
        pkey_index: from.pkey_index,
        port: from.port_num,
        qkey: from.qkey,
        path: path_of(gids, &from.ah_attr),
        mtu: mtu_of(from.path_mtu),
        timeout: from.timeout,
        retry_count: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        rq_psn: Psn::new(from.rq_psn),
        sq_psn: Psn::new(from.sq_psn),
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        dest_qp: Qpn::new(from.dest_qp_num),
        rate_limit_bps: u64::from(from.rate_limit) * 1000,
        ..QpAttr::to(state(from.qp_state))
    }
}

pub(super) fn send_flags(wr: &SendWr) -> u32 {
    let flags = [
        (wr.fence, IBV_SEND_FENCE),
        (wr.signaled, IBV_SEND_SIGNALED),
        (wr.solicited, IBV_SEND_SOLICITED),
    ];
    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag)
}

/// Operation code, immediate data or key, and the arguments. The caller fills in those of datagrams
/// and windows.
pub(super) fn operation(op: SendOp) -> (u32, u32, Option<ibv_send_wr_args>) {
    let rdma = |remote_addr, rkey| Some(ibv_send_wr_args { rdma: wr_rdma { remote_addr, rkey } });
    let atomic = |remote_addr, rkey, compare_add, swap| {
        Some(ibv_send_wr_args { atomic: wr_atomic { remote_addr, compare_add, swap, rkey } })
    };
    match op {
        SendOp::Send => (IBV_WR_SEND, 0, None),
        SendOp::SendInvalidate(key) => (IBV_WR_SEND_WITH_INV, key, None),
        SendOp::SendImm(imm) => (IBV_WR_SEND_WITH_IMM, imm.to_be(), None),
        SendOp::Write { remote_addr, rkey } => (IBV_WR_RDMA_WRITE, 0, rdma(remote_addr, rkey)),
        SendOp::WriteImm { remote_addr, rkey, imm } => {
            (IBV_WR_RDMA_WRITE_WITH_IMM, imm.to_be(), rdma(remote_addr, rkey))
        }
        SendOp::Read { remote_addr, rkey } => (IBV_WR_RDMA_READ, 0, rdma(remote_addr, rkey)),
        SendOp::CompareSwap { remote_addr, rkey, compare, swap } => {
            (IBV_WR_ATOMIC_CMP_AND_SWP, 0, atomic(remote_addr, rkey, compare, swap))
        }
        SendOp::FetchAdd { remote_addr, rkey, add } => {
            (IBV_WR_ATOMIC_FETCH_AND_ADD, 0, atomic(remote_addr, rkey, add, 0))
        }
        SendOp::LocalInvalidate(key) => (IBV_WR_LOCAL_INV, key, None),
        SendOp::BindWindow(_) => (IBV_WR_BIND_MW, 0, None),
    }
}

/// Statuses that have a value of their own here; all others are general errors.
const STATUSES: [WcStatus; 13] = [
    WcStatus::Success,
    WcStatus::LocalLengthError,
    WcStatus::LocalQpError,
    WcStatus::LocalProtectionError,
    WcStatus::WrFlushError,
    WcStatus::WindowBindError,
    WcStatus::BadResponse,
    WcStatus::RemoteInvalidRequest,
    WcStatus::RemoteAccessError,
    WcStatus::RemoteOperationError,
    WcStatus::RetryExceeded,
    WcStatus::RnrRetryExceeded,
    WcStatus::GeneralError,
];

fn opcode(number: u32) -> WcOpcode {
    match number {
        IBV_WC_RDMA_WRITE => WcOpcode::Write,
        IBV_WC_RDMA_READ => WcOpcode::Read,
        IBV_WC_COMP_SWAP => WcOpcode::CompareSwap,
        IBV_WC_FETCH_ADD => WcOpcode::FetchAdd,
        IBV_WC_BIND_MW => WcOpcode::BindWindow,
        IBV_WC_LOCAL_INV => WcOpcode::LocalInvalidate,
        IBV_WC_RECV => WcOpcode::Recv,
        IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWriteImm,
        _ => WcOpcode::Send,
    }
}

/// A completion of a queue pair with this transport. The library does not report what it came over,
/// nor whether the peer requested a solicited event.
pub(super) fn completion(from: &ibv_wc, transport: Transport) -> Completion {
    let status = STATUSES.into_iter().find(|&status| status as u32 == from.status);
    let status = status.unwrap_or(WcStatus::GeneralError);
    let bare = Completion::new(from.wr_id, status, opcode(from.opcode), Qpn::new(from.qp_num));
    if status != WcStatus::Success {
        return bare;
    }
    let is_send = matches!(bare.opcode, WcOpcode::Send | WcOpcode::Write);
    let is_receive = matches!(bare.opcode, WcOpcode::Recv | WcOpcode::RecvWriteImm);
    let has = |flag| is_receive && from.wc_flags & flag != 0;
    Completion {
        byte_len: if is_send { 0 } else { from.byte_len },
        imm: has(IBV_WC_WITH_IMM).then(|| u32::from_be(from.imm_data)),
        invalidated: has(IBV_WC_WITH_INV).then_some(from.imm_data),
        src_qp: (is_receive && transport == Transport::Ud).then(|| Qpn::new(from.src_qp)),
        ..bare
    }
}
