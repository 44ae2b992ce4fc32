//! Multicast groups of datagram queue pairs.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::PoisonError;

use nic::device::DeviceWire;
use roce::verbs::Transport;
use rustix::io::Errno;

use super::Qp;
use crate::engine::{Core, limits};
use crate::process::errors::{Outcome, errno_of, errno_of_io};
use crate::process::fork;

impl Qp {
    /// Attaches to a group; attaching twice has no effect.
    pub(crate) fn attach(&self, group: IpAddr) -> Outcome<()> {
        self.check_group(group)?;
        // In the same order as when a queue pair is destroyed.
        let mut core = self.engine.lock();
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if groups.contains(&group) {
            return Ok(());
        }
        if groups.len() >= limits::MAX_GROUPS as usize {
            return Err(Errno::NOMEM);
        }
        with_sockets(&mut core, |wire| wire.join(group))?.map_err(|error| errno_of_io(&error))?;
        if let Err(error) = core.endpoint_mut().attach_multicast(self.number, group) {
            // The group was joined only for this queue pair.
            let _ = with_sockets(&mut core, |wire| wire.leave(group))?;
            return Err(errno_of(error));
        }
        groups.push(group);
        Ok(())
    }

    /// Detaches from a group.
    pub(crate) fn detach(&self, group: IpAddr) -> Outcome<()> {
        self.check_group(group)?;
        let mut core = self.engine.lock();
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let at = groups.iter().position(|known| *known == group).ok_or(Errno::INVAL)?;
        groups.swap_remove(at);
        self.leave_group(&mut core, group);
        Ok(())
    }

    fn check_group(&self, group: IpAddr) -> Outcome<()> {
        let fits = group.is_multicast() && self.transport == Transport::Ud;
        if fits { Ok(()) } else { Err(Errno::INVAL) }
    }

    /// The queue pair's part in leaving a group.
    pub(super) fn leave_group(&self, core: &mut Core, group: IpAddr) {
        let _ = core.endpoint_mut().detach_multicast(self.number, group);
        let _ = with_sockets(core, |wire| wire.leave(group));
    }
}

/// Opens or closes sockets of the wire; forked children close their copies of new ones.
fn with_sockets<R>(core: &mut Core, change: impl FnOnce(&mut DeviceWire) -> R) -> Outcome<R> {
    let wire = core.wire()?;
    let numbers = |wire: &DeviceWire| -> Vec<RawFd> {
        wire.descriptors().iter().map(AsRawFd::as_raw_fd).collect()
    };
    let before = numbers(wire);
    let done = change(wire);
    let after = numbers(wire);
    let without = |all: &[RawFd], others: &[RawFd]| -> Vec<RawFd> {
        all.iter().copied().filter(|fd| !others.contains(fd)).collect()
    };
    fork::closed(&without(&before, &after));
    fork::close_in_children(&without(&after, &before));
    Ok(done)
}
