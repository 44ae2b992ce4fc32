//! The fabric that a manager has set up, and what can be looked up in it. It does not change: a
//! sweep makes another one.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::work::Routed;
use crate::administration::Directory;
use crate::discovery::{Discovery, Place};
use crate::levels::Levels;
use crate::lids::Lids;
use crate::mad::multicast_capacity;
use crate::partitions::Memberships;
use crate::setup::Target;

/// A fabric that is set up.
#[derive(Debug)]
pub struct Fabric {
    pub(super) discovery: Discovery,
    pub(super) routed: Routed,
    pub(super) lids: Lids,
    pub(super) directory: Directory,
    /// The tables that it was set up to, by the GUID of the switch, also while the next are
    /// computed and written.
    pub(super) tables: BTreeMap<u64, Arc<Vec<u8>>>,
    /// Of switches, by GUID.
    pub(super) numbers: BTreeMap<u64, u32>,
    pub(super) memberships: Option<Memberships>,
    /// Of the manager's port.
    pub(super) own_lid: u16,
}

impl Fabric {
    pub(super) fn new(
        discovery: Discovery,
        routed: Routed,
        target: &Target,
        memberships: Option<Memberships>,
    ) -> Fabric {
        let mut tables = BTreeMap::new();
        let mut numbers = BTreeMap::new();
        for number in 0..routed.channels.switches().len() as u32 {
            let guid = routed.guid(number);
            tables.insert(guid, Arc::new(target.transition.target.table(number).to_vec()));
            numbers.insert(guid, number);
        }
        let lids = target.lids.clone();
        let directory = Directory::new(&discovery, &lids);
        let of = |place: Place| lids.of(place).or(lids.of((place.0, 0)));
        let own_lid = discovery.start().and_then(of).unwrap_or(0);
        Fabric { discovery, routed, lids, directory, tables, numbers, memberships, own_lid }
    }

    /// The lower of the two ends of a link.
    pub(super) fn first_end(&self, end: Place) -> Place {
        self.discovery.links().get(&end).map_or(end, |far| end.min(*far))
    }

    /// How many multicast LIDs the smallest table holds.
    pub(super) fn multicast_capacity(&self) -> u16 {
        let switches = self.discovery.nodes().values().filter_map(|node| node.switch_info);
        switches.map(|info| multicast_capacity(&info)).min().unwrap_or(0)
    }

    /// Who has which LID.
    pub fn lids(&self) -> &Lids {
        &self.lids
    }

    /// The service levels of paths.
    pub fn levels(&self) -> &Levels {
        &self.routed.levels
    }
}
