//! What nodes hold, as far as a manager knows: forwarding tables of switches, and what ports got
//! beside their LIDs. It decides what has to be read or written; what it should be is not here.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::fabric::Fabric;
use super::task::Question;
use crate::discovery::{Discovery, Place};
use crate::exchange::{Fate, Request};
use crate::mad::{Attribute, LFT_BLOCK, linear_top};
use crate::setup::{Failure, Ports, Setup};

/// Sweeps in turn at which a node is silent when it is told how to map service levels, and taken
/// not to do that then. One that is silent at all else, too, is not in the way: it is left out of
/// the fabric.
const MAX_SILENCES: u32 = 3;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Installed {
    /// Tables of switches, by GUID.
    pub(super) tables: BTreeMap<u64, Arc<Vec<u8>>>,
    /// GUIDs of switches of whose tables a block could not be read.
    unreadable: BTreeSet<u64>,
    /// What ports have got beside their LIDs.
    pub(super) ports: Ports,
    /// GUIDs of nodes that took no tables of service levels.
    pub(super) without_levels: BTreeSet<u64>,
    /// Those that were silent, and at how many sweeps in turn.
    silent_levels: BTreeMap<u64, u32>,
}

impl Installed {
    /// Another manager may write from now on.
    pub(super) fn clear(&mut self) {
        self.tables.clear();
        self.unreadable.clear();
        self.ports.levels.clear();
        self.ports.keys.clear();
        self.without_levels.clear();
        self.silent_levels.clear();
    }

    /// Forgets what a switch holds that lost its tables, or is new. Returns the requests that read
    /// them, up to the last LID that it has.
    pub(super) fn read_anew(
        &mut self,
        guid: u64,
        discovery: &Discovery,
    ) -> Vec<(Request, Question)> {
        self.tables.remove(&guid);
        self.ports.levels.retain(|place, _| place.0 != guid);
        // A switch holds P_Keys of the end ports next to it.
        let links = discovery.links();
        let is_next = |place: &Place| links.get(place).is_some_and(|far| far.0 == guid);
        self.ports.keys.retain(|place, _| place.0 != guid && !is_next(place));
        let Some(node) = discovery.nodes().get(&guid) else { return Vec::new() };
        let top = node.switch_info.map_or(0, |info| linear_top(&info));
        // Nothing was written where there is no last LID.
        let blocks = if top == 0 { 0 } else { u32::from(top) / LFT_BLOCK as u32 + 1 };
        let read = |block| Request::get(node.route, Attribute::LinearForwardingTable, block);
        (0..blocks).map(|block| (read(block), Question::Block(guid))).collect()
    }

    /// A table of which a block is missing is unknown as a whole.
    pub(super) fn handle_block(&mut self, guid: u64, block: u32, fate: &Fate) {
        let Fate::Response(data) = fate else {
            self.unreadable.insert(guid);
            return;
        };
        let at = block as usize * LFT_BLOCK;
        let table = Arc::make_mut(self.tables.entry(guid).or_default());
        if table.len() < at + LFT_BLOCK {
            table.resize(at + LFT_BLOCK, topology::routes::NO_ROUTE);
        }
        table[at..at + LFT_BLOCK].copy_from_slice(data);
    }

    /// All tables that could be were read.
    pub(super) fn forget_unreadable(&mut self) {
        for guid in core::mem::take(&mut self.unreadable) {
            self.tables.remove(&guid);
        }
    }

    /// Notes which switches have the tables of a fabric.
    pub(super) fn note_tables(&mut self, setup: &Setup, fabric: &Fabric) {
        for (guid, table) in &fabric.tables {
            if setup.has_table(*guid) {
                self.tables.insert(*guid, Arc::clone(table));
            } else {
                self.tables.remove(guid);
            }
        }
    }

    /// Notes which ports have P_Keys, and which map service levels to lanes. A node that does not
    /// take that leaves one lane for all paths: at once if it refuses, after some sweeps in turn if
    /// it is silent.
    pub(super) fn note_ports(&mut self, setup: &Setup, discovery: &Discovery) {
        self.ports.keys.extend(setup.keys().map(|(place, keys)| (place, keys.clone())));
        self.ports.levels.extend(setup.levels());
        let mut silent = BTreeSet::new();
        for (place, why) in setup.failed_levels() {
            self.ports.levels.remove(place);
            match why {
                Failure::Refused => drop(self.without_levels.insert(place.0)),
                Failure::Silent => drop(silent.insert(place.0)),
            }
        }
        self.note_silent(silent);
        let is_there = |guid: &u64| discovery.nodes().contains_key(guid);
        self.ports.levels.retain(|(guid, _), _| is_there(guid));
        self.ports.keys.retain(|(guid, _), _| is_there(guid));
        self.without_levels.retain(is_there);
    }

    fn note_silent(&mut self, silent: BTreeSet<u64>) {
        self.silent_levels.retain(|guid, _| silent.contains(guid));
        for guid in silent {
            let silences = self.silent_levels.entry(guid).or_default();
            *silences += 1;
            if *silences >= MAX_SILENCES {
                self.without_levels.insert(guid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_without_a_block_is_unknown_and_others_are_read_in_any_order() {
        let mut installed = Installed::default();
        installed.handle_block(7, 1, &Fate::Response([2; 64]));
        installed.handle_block(7, 0, &Fate::Response([1; 64]));
        installed.handle_block(8, 0, &Fate::Response([1; 64]));
        installed.handle_block(8, 1, &Fate::Silent);
        installed.forget_unreadable();
        assert_eq!(installed.tables.keys().copied().collect::<Vec<_>>(), [7]);
        assert_eq!(*installed.tables[&7], [[1; 64], [2; 64]].concat());
    }

    #[test]
    fn a_node_is_without_levels_when_it_was_silent_at_three_sweeps_in_turn() {
        let mut installed = Installed::default();
        for (sweep, silent) in [&[1, 2][..], &[1, 2], &[2], &[1, 2]].iter().enumerate() {
            installed.note_silent(silent.iter().copied().collect());
            assert_eq!(installed.without_levels.contains(&2), sweep >= 2);
            assert!(!installed.without_levels.contains(&1));
        }
    }
}
