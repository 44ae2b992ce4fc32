//! Multicast: the groups, and the forwarding tables that switches have for them.
//!
//! Tables are written in two stages: first what the old and the new trees have in common, then the
//! new trees, so that no mix of both has a loop. Who may join a group is a matter of
//! [`crate::administration::groups`].

use alloc::collections::{BTreeSet, VecDeque};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;

use super::fabric::Fabric;
use super::schedule::{Backoff, RETRY};
use super::task::Question;
use crate::administration::groups::{self, Groups, MulticastTables};
use crate::exchange::{Done, Fate, Request};
use crate::mad::Attribute;
use crate::setup::SetupComplaint;

/// Rest after multicast tables were written: however fast members come and go, the fabric is looked
/// at in between.
const REST: Duration = Duration::from_millis(50);

/// See the module's text.
#[derive(Debug)]
pub(super) struct Multicast {
    pub(super) groups: Groups,
    /// Tables that switches hold.
    tables: MulticastTables,
    /// GUIDs of switches of which that is not known.
    unknown: BTreeSet<u64>,
    /// Tables are not written before this time.
    at: Duration,
    /// After blocks that were not written.
    retry: Backoff,
    /// Of the tables that are being written: the first block that was not, and how many.
    failed: Option<(String, usize)>,
}

impl Multicast {
    /// `interval` is that of light sweeps.
    pub(super) fn new(groups: Groups, interval: Duration) -> Multicast {
        Multicast {
            groups,
            tables: MulticastTables::new(),
            unknown: BTreeSet::new(),
            at: Duration::ZERO,
            retry: Backoff::new(RETRY, interval),
            failed: None,
        }
    }

    /// Forgets members and tables.
    pub(super) fn clear(&mut self, groups: Groups) {
        self.groups = groups;
        self.tables.clear();
        self.unknown.clear();
        self.failed = None;
    }

    /// A switch may be new, may have lost its tables, or have those of another manager.
    pub(super) fn forget_switch(&mut self, guid: u64) {
        self.unknown.insert(guid);
    }

    /// The fabric is another: members may be gone, and the tree may be another.
    pub(super) fn adopt(&mut self, fabric: &Fabric) {
        self.groups.keep(fabric.multicast_capacity(), |place| fabric.lids.of(place).is_some());
        self.groups.is_changed |= self.groups.has_members();
    }

    /// When tables are to be written.
    pub(super) fn due(&self) -> Option<Duration> {
        self.groups.is_changed.then_some(self.at)
    }

    /// What is to be written: what old and new trees have in common, and then the new trees.
    pub(super) fn stages(&mut self, fabric: &Fabric) -> VecDeque<MulticastTables> {
        self.groups.is_changed = false;
        let routed = &fabric.routed;
        let order: Vec<u64> =
            routed.ranks.order().iter().map(|switch| routed.guid(*switch)).collect();
        let target = self.groups.tables(&fabric.discovery, &order);
        // Of what is unknown all ports may be in all trees.
        let blocks = self.groups.blocks();
        let nodes = fabric.discovery.nodes();
        for guid in core::mem::take(&mut self.unknown) {
            let positions = nodes.get(&guid).map_or(0, |node| node.info.ports / 16 + 1);
            let keys = (0..positions).flat_map(|at| (0..blocks).map(move |block| (at, block)));
            self.tables.extend(keys.map(|(at, block)| ((guid, at, block), [0xff; 64])));
        }
        self.tables.retain(|(guid, ..), _| nodes.contains_key(guid));
        VecDeque::from([groups::common(&self.tables, &target), target])
    }

    /// The requests of a stage.
    pub(super) fn write(
        &mut self,
        stage: MulticastTables,
        fabric: &Fabric,
    ) -> Vec<(Request, Question)> {
        let mut requests = Vec::new();
        for (key, data) in stage {
            let (guid, position, block) = key;
            let node = fabric.discovery.nodes().get(&guid);
            let known = self.tables.get(&key).unwrap_or(&[0; 64]);
            if let Some(node) = node.filter(|_| *known != data) {
                let modifier = u32::from(position) << 28 | u32::from(block);
                let attribute = Attribute::MulticastForwardingTable;
                let request = Request::set(node.route, attribute, modifier, data);
                requests.push((request, Question::Group(guid)));
                self.tables.insert(key, data);
            }
        }
        requests
    }

    /// A block that was not written is unknown: the next time it is written as if all ports were in
    /// it. Returns whether it was.
    pub(super) fn handle_block(&mut self, guid: u64, done: &Done<Question>) -> bool {
        let Request { route, attribute, modifier, .. } = done.request;
        let complaint = match done.fate {
            Fate::Response(_) => return true,
            Fate::Refused(status) => SetupComplaint::Refused(route, attribute, modifier, status),
            Fate::Silent => SetupComplaint::Silent(route, attribute, modifier),
        };
        let (position, block) = (modifier >> 28, modifier & 0xffff);
        self.tables.insert((guid, position as u8, block as u16), [0xff; 64]);
        self.failed.get_or_insert_with(|| (complaint.to_string(), 0)).1 += 1;
        false
    }

    /// What was not written is written again later. Returns the first complaint, and how many there
    /// are.
    pub(super) fn finish(&mut self, now: Duration) -> Option<(String, usize)> {
        let failed = self.failed.take();
        if failed.is_some() {
            self.groups.is_changed = true;
            self.at = now + self.retry.rest();
        } else {
            self.at = now + REST;
            self.retry.reset();
        }
        failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mad::DirectedRoute;

    #[test]
    fn a_block_that_was_not_written_is_complained_of_once_and_written_again_later() {
        let mut multicast = Multicast::new(Groups::default(), Duration::from_secs(10));
        let attribute = Attribute::MulticastForwardingTable;
        let request = Request::set(DirectedRoute::HERE, attribute, 1 << 28 | 2, [1; 64]);
        let answer = |multicast: &mut Multicast, fate| {
            let context = Question::Group(7);
            multicast.handle_block(7, &Done { request, context, fate })
        };
        assert!(answer(&mut multicast, Fate::Response([1; 64])));
        assert_eq!((multicast.finish(REST), multicast.due()), (None, None));
        assert!(!answer(&mut multicast, Fate::Refused(7)));
        assert!(!answer(&mut multicast, Fate::Silent));
        assert_eq!(multicast.tables[&(7, 1, 2)], [0xff; 64]);
        let (complaint, count) = multicast.finish(REST).expect("two failed");
        assert!(complaint.contains("status 0x0007"), "{complaint}");
        assert_eq!((count, multicast.due()), (2, Some(REST + RETRY)));
    }
}
