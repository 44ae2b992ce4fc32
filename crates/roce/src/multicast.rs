//! Attachments of datagram queue pairs to multicast groups (IBA 10.5).

use alloc::collections::BTreeSet;
use core::net::IpAddr;

use crate::verbs::{MULTICAST_QPN, Qpn, VerbsError};

/// Most attachments of queue pairs to groups.
const MAX_ATTACHMENTS: usize = 1 << 13;

/// All attachments, ordered by group.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    attached: BTreeSet<(IpAddr, Qpn)>,
}

impl Groups {
    /// Attaching twice has no effect.
    pub(crate) fn attach(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        let attachment = (group.to_canonical(), qpn);
        if self.attached.len() >= MAX_ATTACHMENTS && !self.attached.contains(&attachment) {
            let limit = MAX_ATTACHMENTS as u32;
            return Err(VerbsError::TableFull { what: "multicast attachments", limit });
        }
        self.attached.insert(attachment);
        Ok(())
    }

    /// Returns false if it was not attached.
    pub(crate) fn detach(&mut self, qpn: Qpn, group: IpAddr) -> bool {
        self.attached.remove(&(group.to_canonical(), qpn))
    }

    /// Removes a destroyed queue pair.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.attached.retain(|&(_, attached)| attached != qpn);
    }

    /// The first queue pair of the group, by number, or the first after `after`.
    pub(crate) fn next(&self, group: IpAddr, after: Option<Qpn>) -> Option<Qpn> {
        let group = group.to_canonical();
        let first = after.map_or(Qpn::new(0), |qpn| Qpn::new(qpn.get() + 1));
        let mut rest = self.attached.range((group, first)..(group, MULTICAST_QPN));
        rest.next().map(|&(_, qpn)| qpn)
    }
}
