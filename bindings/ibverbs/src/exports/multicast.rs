//! Multicast groups: queue pairs are attached and detached.

use std::ffi::c_int;
use std::net::IpAddr;

use super::{code, given};
use crate::abi::*;
use crate::objects::gid;
use crate::objects::{Qp, living};
use crate::process::errors::Outcome;

/// # Safety
/// `gid` is null or valid for reading.
unsafe fn named(qp: *mut ibv_qp, gid: *const ibv_gid) -> Outcome<(&'static Qp, IpAddr)> {
    let qp = living::<Qp>(qp.cast())?;
    // SAFETY: as the caller promises.
    Ok((qp, gid::to_ip(unsafe { given(gid) }?)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: null or the caller's GID.
    code(unsafe { named(qp, gid) }.and_then(|(qp, group)| qp.attach(group)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: null or the caller's GID.
    code(unsafe { named(qp, gid) }.and_then(|(qp, group)| qp.detach(group)))
}
