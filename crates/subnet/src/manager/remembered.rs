//! LIDs that ports had, also while they are away and after the manager's process began anew. Who
//! has which LID now is what the [`fabric`](super::fabric) says.

use alloc::collections::BTreeMap;

use super::fabric::Fabric;
use crate::discovery::Place;
use crate::lids::LAST_LID;

/// Most ports that are away and whose LIDs are remembered: as many as there are LIDs.
const MAX_ABSENT: usize = LAST_LID as usize;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) lids: BTreeMap<Place, u16>,
    /// Whether they have changed since they were last taken.
    is_changed: bool,
}

impl Remembered {
    pub(super) fn new(lids: BTreeMap<Place, u16>) -> Remembered {
        Remembered { lids, is_changed: false }
    }

    /// If they have changed since the last call.
    pub(super) fn take(&mut self) -> Option<&BTreeMap<Place, u16>> {
        core::mem::take(&mut self.is_changed).then_some(&self.lids)
    }

    /// Adds the LIDs of a fabric. Forgets those of ports that are away and that others have now; of
    /// all ports that are away, if there are too many.
    pub(super) fn update(&mut self, Fabric { lids, directory, .. }: &Fabric) {
        for (place, lid) in lids.iter() {
            self.is_changed |= self.lids.insert(place, lid) != Some(lid);
        }
        let before = self.lids.len();
        let is_crowded = before - lids.count() > MAX_ABSENT;
        self.lids.retain(|place, lid| {
            lids.of(*place).is_some() || !is_crowded && directory.at(*lid).is_none()
        });
        self.is_changed |= self.lids.len() != before;
    }
}
