//! Local identifiers (LIDs): who has which, now and after a restart.
//!
//! A port keeps its LID for as long as it can: what a manager remembers comes first, then what the
//! port says itself, then what is free. A manager that takes over leaves ports in use what they
//! have. Of two ports with one LID the one that is remembered with it keeps it, or else the first,
//! and the other gets a new one. The LID of a port that is away is not given to a port that merely
//! says it has it. With an LMC each end port has 2^LMC consecutive LIDs that begin at a multiple of
//! their number; port 0 of a switch has one.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::vec::Vec;

use thiserror::Error;

use crate::discovery::{Discovery, Place};
use crate::mad::{NodeType, PortInfo, PortState, linear_capacity};
use topology::channels::Channels;

/// The largest unicast LID; what is above is multicast.
pub const LAST_LID: u16 = 0xbfff;

/// Largest LMC: the field has three bits.
pub const MAX_LMC: u8 = 7;

/// There are not so many LIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{ports} ports with {each} LIDs for each end port; there are {LAST_LID}")]
pub struct TooFewLids {
    /// Ports that need one.
    pub ports: usize,
    /// 2^LMC.
    pub each: u16,
}

/// Which LID a port gets that could have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// That of before.
    RememberedFirst,
    /// What it has, if it is in use.
    InUseFirst,
}

#[derive(Clone, Copy)]
enum Source {
    /// It is in use and remembered.
    Confirmed,
    InUse,
    Remembered,
    Present,
}

impl Order {
    fn sources(self) -> &'static [Source] {
        match self {
            Order::RememberedFirst => &[Source::Remembered, Source::Present],
            Order::InUseFirst => {
                &[Source::Confirmed, Source::InUse, Source::Remembered, Source::Present]
            }
        }
    }
}

/// The LIDs of a fabric, by node and port; of switches by port 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lids {
    /// The first LID of each.
    first: BTreeMap<Place, u16>,
    lmc: u8,
    top: u16,
}

impl Lids {
    /// Of everything that was discovered. `remembered` are LIDs that ports had before.
    ///
    /// # Errors
    /// When there are too many ports.
    pub fn assign(
        discovery: &Discovery,
        remembered: &BTreeMap<Place, u16>,
        order: Order,
        lmc: u8,
    ) -> Result<Lids, TooFewLids> {
        let lmc = lmc.min(MAX_LMC);
        let ports = places(discovery);
        // What a table cannot hold would make all tables too small.
        let tables = discovery.nodes().values().filter_map(|node| node.switch_info);
        let smallest = tables.map(|info| linear_capacity(&info)).min();
        let most = smallest.map_or(LAST_LID, |smallest| LAST_LID.min(smallest.saturating_sub(1)));
        let mut pool = Pool::up_to(most);
        // Ports that are away for a while find their LIDs free when they are back, if that is
        // possible.
        for (place, lid) in remembered {
            pool.reserve(*lid, if place.1 == 0 { 1 } else { 1 << lmc });
        }
        let mut first = BTreeMap::new();
        for source in order.sources() {
            for (place, info, width) in ports.iter().map(|port| port.with_width(lmc)) {
                let info = PortInfo::parse(info);
                let own = remembered.get(&place).copied().unwrap_or(0);
                // Port 0 of a switch has no link.
                let is_in_use = place.1 == 0 || info.state >= Some(PortState::Armed);
                let lid = match source {
                    Source::Confirmed if is_in_use && info.lid == own => own,
                    Source::InUse if is_in_use => info.lid,
                    Source::Confirmed | Source::InUse => 0,
                    Source::Remembered => own,
                    Source::Present if info.lid != own && pool.is_reserved(info.lid, width) => 0,
                    Source::Present => info.lid,
                };
                if !first.contains_key(&place) && pool.take(lid, width) {
                    first.insert(place, lid);
                }
            }
        }
        let too_few = TooFewLids { ports: ports.len(), each: 1 << lmc };
        for (place, _, width) in ports.iter().map(|port| port.with_width(lmc)) {
            if let Entry::Vacant(entry) = first.entry(place) {
                entry.insert(pool.next(width).ok_or(too_few)?);
            }
        }
        let ends = ports
            .iter()
            .map(|port| port.with_width(lmc))
            .filter_map(|(place, _, width)| first.get(&place).map(|lid| lid + (width - 1)));
        let top = ends.max().unwrap_or(0);
        Ok(Lids { first, lmc, top })
    }

    /// The first LID of a port.
    pub fn of(&self, place: Place) -> Option<u16> {
        self.first.get(&place).copied()
    }

    /// How many ports have LIDs.
    pub fn count(&self) -> usize {
        self.first.len()
    }

    /// The largest.
    pub fn top(&self) -> u16 {
        self.top
    }

    /// Whether end ports have several LIDs.
    pub fn has_lmc(&self) -> bool {
        self.lmc > 0
    }

    /// Low bits of a LID that a port ignores.
    pub fn lmc(&self, place: Place) -> u8 {
        if place.1 == 0 { 0 } else { self.lmc }
    }

    /// Ports and their first LIDs.
    pub fn iter(&self) -> impl Iterator<Item = (Place, u16)> + '_ {
        self.first.iter().map(|(place, lid)| (*place, *lid))
    }

    /// Who is addressed by each LID.
    pub fn owners(&self, channels: &Channels, guids: &[u64]) -> Vec<Owner> {
        let mut owners = alloc::vec![Owner::Nobody; usize::from(self.top) + 1];
        let guid = |node: topology::graph::NodeId| guids.get(node.index()).copied().unwrap_or(0);
        let mut set = |place: Place, owner| {
            let width = 1_u16 << self.lmc(place);
            for lid in self.of(place).into_iter().flat_map(|lid| lid..=lid + (width - 1)) {
                owners[usize::from(lid)] = owner;
            }
        };
        for (at, end_port) in (0..).zip(channels.end_ports()) {
            set((guid(end_port.end.node), end_port.end.port), Owner::EndPort(at));
        }
        for (at, switch) in (0..).zip(channels.switches()) {
            set((guid(*switch), 0), Owner::Switch(at));
        }
        owners
    }
}

/// Who is addressed by a LID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Nobody.
    Nobody,
    /// An end port, by its place in [`Channels::end_ports`].
    EndPort(u32),
    /// Port 0 of a switch, by its number.
    Switch(u32),
}

/// A port that gets a LID, and its attribute `PortInfo`.
struct Port<'a> {
    place: Place,
    info: &'a [u8; 64],
}

impl Port<'_> {
    /// And how many LIDs it gets.
    fn with_width(&self, lmc: u8) -> (Place, &[u8; 64], u16) {
        (self.place, self.info, if self.place.1 == 0 { 1 } else { 1 << lmc })
    }
}

/// What gets a LID: ports of adapters and routers, port 0 of switches.
fn places(discovery: &Discovery) -> Vec<Port<'_>> {
    let ports = discovery.nodes().iter().flat_map(|(guid, node)| {
        let is_switch = node.info.node_type == NodeType::Switch;
        let gets = node.ports.iter().filter(move |(port, _)| (**port == 0) == is_switch);
        gets.map(move |(port, info)| Port { place: (*guid, *port), info })
    });
    ports.collect()
}

/// LIDs that are free.
struct Pool {
    /// By LID.
    taken: Vec<bool>,
    reserved: Vec<bool>,
    next: usize,
}

impl Pool {
    fn up_to(most: u16) -> Pool {
        let len = usize::from(most) + 1;
        let mut taken = alloc::vec![false; len];
        taken[0] = true;
        Pool { taken, reserved: alloc::vec![false; len], next: 1 }
    }

    /// Takes consecutive LIDs, if they are there, aligned and free.
    fn take(&mut self, first: u16, width: u16) -> bool {
        let range = usize::from(first)..usize::from(first) + usize::from(width);
        let is_free = first.is_multiple_of(width)
            && self.taken.get(range.clone()).is_some_and(|lids| lids.iter().all(|taken| !taken));
        if is_free {
            self.taken[range].fill(true);
        }
        is_free
    }

    fn reserve(&mut self, first: u16, width: u16) {
        let end = (usize::from(first) + usize::from(width)).min(self.reserved.len());
        if let Some(lids) = self.reserved.get_mut(usize::from(first)..end) {
            lids.fill(true);
        }
    }

    fn is_reserved(&self, first: u16, width: u16) -> bool {
        let range = usize::from(first)..usize::from(first) + usize::from(width);
        self.reserved.get(range).is_some_and(|lids| lids.contains(&true))
    }

    /// The next that are free; those reserved only when there are no others.
    fn next(&mut self, width: u16) -> Option<u16> {
        let step = usize::from(width);
        let from = if width == 1 { self.next } else { 0 };
        let is_free = |pool: &Pool, at: usize| pool.taken[at..at + step].iter().all(|taken| !taken);
        let is_open = |pool: &Pool, at: usize| !pool.reserved[at..at + step].contains(&true);
        let starts = |from: usize| {
            let from = from.next_multiple_of(step);
            (from..self.taken.len().saturating_sub(step - 1)).step_by(step)
        };
        let unreserved = starts(from).find(|at| is_free(self, *at) && is_open(self, *at));
        let at = unreserved.or_else(|| starts(0).find(|at| is_free(self, *at)))?;
        if width == 1 && unreserved.is_some() {
            self.next = at + 1;
        }
        self.take(at as u16, width).then_some(at as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_runs_are_taken_and_reserved_ones_last() {
        let mut pool = Pool::up_to(12);
        assert!(pool.take(4, 4) && !pool.take(4, 1) && !pool.take(0, 4) && !pool.take(6, 4));
        assert!(!pool.take(12, 4), "13 to 15 are not there");
        pool.reserve(8, 4);
        assert_eq!((pool.next(1), pool.next(1), pool.next(1)), (Some(1), Some(2), Some(3)));
        assert_eq!(pool.next(4), Some(8), "nothing else is left");
        assert_eq!((pool.next(4), pool.next(1), pool.next(1)), (None, Some(12), None));
    }
}
