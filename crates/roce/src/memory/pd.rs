//! Protection domains: an identity, and a count of its queue pairs and shared receive queues.
//! Regions and windows are counted in their own tables.

use alloc::collections::BTreeMap;

use crate::verbs::{PdId, VerbsError};

/// All protection domains of an endpoint. Their number is not limited.
#[derive(Debug, Default)]
pub(crate) struct PdTable {
    users: BTreeMap<PdId, u32>,
    next: u32,
}

impl PdTable {
    /// A new domain. Numbers are reused after 2^32 of them.
    pub(crate) fn alloc(&mut self) -> PdId {
        while self.users.contains_key(&PdId(self.next)) {
            self.next = self.next.wrapping_add(1);
        }
        let pd = PdId(self.next);
        self.next = self.next.wrapping_add(1);
        self.users.insert(pd, 0);
        pd
    }

    pub(crate) fn check(&self, pd: PdId) -> Result<(), VerbsError> {
        self.users.get(&pd).map(|_| ()).ok_or(VerbsError::NoPd(pd.0))
    }

    pub(crate) fn attach(&mut self, pd: PdId) {
        if let Some(users) = self.users.get_mut(&pd) {
            *users += 1;
        }
    }

    pub(crate) fn detach(&mut self, pd: PdId) {
        if let Some(users) = self.users.get_mut(&pd) {
            *users = users.saturating_sub(1);
        }
    }

    /// Removes a domain without objects.
    pub(crate) fn dealloc(&mut self, pd: PdId) -> Result<(), VerbsError> {
        match self.users.get(&pd) {
            None => Err(VerbsError::NoPd(pd.0)),
            Some(0) => {
                self.users.remove(&pd);
                Ok(())
            }
            Some(_) => Err(VerbsError::PdInUse(pd.0)),
        }
    }
}
