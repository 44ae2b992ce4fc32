//! Multicast groups of datagram queue pairs.

use std::net::IpAddr;
use std::sync::PoisonError;

use roce::verbs::Transport;
use rustix::io::Errno;

use super::Qp;
use crate::engine::{Core, limits};
use crate::process::errors::{Outcome, errno_of, errno_of_io};

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
        core.wire()?.join(group).map_err(|error| errno_of_io(&error))?;
        if let Err(error) = core.endpoint.attach_multicast(self.number, group) {
            // The group was joined only for this queue pair.
            let _ = core.wire()?.leave(group);
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
        let _ = core.endpoint.detach_multicast(self.number, group);
        let _ = core.wire().and_then(|wire| wire.leave(group).map_err(|_| Errno::IO));
    }
}
