//! Multicast groups of datagram queue pairs.

use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::PoisonError;

use roce::verbs::Transport;
use rustix::io::Errno;

use crate::abi::*;
use crate::engine::Core;
use crate::errors::{Outcome, code, errno_of};
use crate::gid;
use crate::limits;
use crate::object::living;
use crate::qp::Qp;

fn group_of(qp: *mut ibv_qp, gid: *const ibv_gid) -> Outcome<(&'static Qp, IpAddr)> {
    let qp = living::<Qp>(qp.cast())?;
    // SAFETY: null or the caller's GID.
    let group = gid::to_ip(unsafe { gid.as_ref() }.ok_or(Errno::INVAL)?);
    let fits = group.is_multicast() && qp.transport == Transport::Ud;
    if fits { Ok((qp, group)) } else { Err(Errno::INVAL) }
}

fn attach(qp: &'static Qp, group: IpAddr) -> Outcome<()> {
    // In this order, as where a queue pair is destroyed.
    let mut core = qp.engine.lock();
    let mut groups = qp.groups.lock().unwrap_or_else(PoisonError::into_inner);
    if groups.contains(&group) {
        return Ok(());
    }
    if groups.len() >= limits::MAX_GROUPS as usize {
        return Err(Errno::NOMEM);
    }
    core.wire()?.join(group).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    if let Err(error) = core.endpoint.attach_multicast(qp.number, group) {
        // The group was joined only for this queue pair.
        let _ = core.wire()?.leave(group);
        return Err(errno_of(error));
    }
    groups.push(group);
    Ok(())
}

/// The queue pair's part in leaving a group.
pub(crate) fn leave(qp: &Qp, core: &mut Core, group: IpAddr) {
    let _ = core.endpoint.detach_multicast(qp.number, group);
    let _ = core.wire().and_then(|wire| wire.leave(group).map_err(|_| Errno::IO));
}

fn detach(qp: &'static Qp, group: IpAddr) -> Outcome<()> {
    let mut core = qp.engine.lock();
    let mut groups = qp.groups.lock().unwrap_or_else(PoisonError::into_inner);
    let at = groups.iter().position(|known| *known == group).ok_or(Errno::INVAL)?;
    groups.swap_remove(at);
    leave(qp, &mut core, group);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    code(group_of(qp, gid).and_then(|(qp, group)| attach(qp, group)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    code(group_of(qp, gid).and_then(|(qp, group)| detach(qp, group)))
}
