//! Service levels (SLs): which virtual lane each takes at each port, and which of them packets of a
//! path have.
//!
//! Every port maps SLs to the lanes of its link in turn, so the first ones have a lane of their
//! own, the same at every switch. A path whose lane is `n` gets SL `n`. Lanes share their link
//! equally: they are there to keep credit loops out, not to put anything before anything else.
//! Links to hosts may have fewer lanes than paths need, since nothing passes a host, so nothing can
//! wait in a cycle there.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::discovery::{Discovery, Place};
use crate::exchange::Request;
use crate::lids::Owner;
use crate::mad::{
    Attribute, NodeType, PortInfo, PortState, arbitration_blocks, equal_arbitration, level_mapping,
    maps_all_inputs, usable_lanes,
};
use topology::channels::Channels;
use topology::lanes::{Lanes, MAX_LANES, Paths};

/// Nobody has this LID.
const NOWHERE: u32 = u32::MAX;

/// The first of the two blocks of the low and of the high-priority arbitration table.
const FIRST_BLOCKS: [u32; 2] = [1, 3];

/// In the modifier of `SLtoVLMappingTable`: for all input ports.
const ALL_INPUTS: u32 = 1 << 17;

/// The SLs of paths: by the lanes between switches, and the switch at which each LID is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    /// The lane of the paths between each two switches.
    pub lanes: Lanes,
    /// By LID: the number of the switch that it is at.
    homes: Vec<u32>,
}

impl Levels {
    /// One lane, wherever LIDs are.
    pub fn one(channels: &Channels, owners: &[Owner]) -> Levels {
        Levels { lanes: Lanes::one(channels), homes: homes(channels, owners) }
    }

    /// The same LIDs with the lanes of others, if there are some.
    pub fn like(self, others: Option<&Levels>) -> Levels {
        Levels { lanes: others.map_or(self.lanes, |others| others.lanes.clone()), ..self }
    }

    /// The SL of packets from a switch to a LID; `None` if the LID was nobody's, or the path was
    /// not there.
    pub fn known(&self, from: u32, lid: u16) -> Option<u8> {
        let home = self.homes.get(usize::from(lid)).copied().filter(|home| *home != NOWHERE)?;
        self.lanes.known(from, home)
    }

    /// The same, 0 if it is none.
    pub fn level(&self, from: u32, lid: u16) -> u8 {
        self.known(from, lid).unwrap_or(0)
    }

    /// The same where switches have other numbers; `old_of` has, by the new number, the old one, or
    /// none.
    pub fn renumbered(&self, old_of: &[Option<u32>]) -> Levels {
        let new_of: BTreeMap<u32, u32> =
            old_of.iter().zip(0..).filter_map(|(old, new)| Some(((*old)?, new))).collect();
        let home = |old: &u32| new_of.get(old).copied().unwrap_or(NOWHERE);
        Levels {
            lanes: self.lanes.renumbered(old_of),
            homes: self.homes.iter().map(home).collect(),
        }
    }

    /// LIDs by the switch that they are at.
    pub fn destinations(&self, channels: &Channels) -> Vec<Vec<u32>> {
        let mut destinations = alloc::vec![Vec::new(); channels.switches().len()];
        for (lid, home) in (0..).zip(&self.homes) {
            if let Some(destinations) = destinations.get_mut(*home as usize) {
                destinations.push(lid);
            }
        }
        destinations
    }

    /// Lanes for tables that lead to LIDs; those that pairs of switches had `before` are kept.
    /// `None` where they do not fit.
    pub fn divided<N: Fn(u32, u32) -> Option<u32>>(
        self,
        channels: &Channels,
        next: N,
        most: u8,
        before: Option<&Lanes>,
    ) -> Option<Levels> {
        let destinations = self.destinations(channels);
        let paths = Paths { channels, destinations: &destinations, next };
        let lanes = match before {
            Some(before) => Lanes::keep(&paths, most, before),
            None => Lanes::spread(&paths, most),
        };
        lanes.ok().map(|lanes| Levels { lanes, ..self })
    }
}

fn homes(channels: &Channels, owners: &[Owner]) -> Vec<u32> {
    let home = |owner: &Owner| match owner {
        Owner::Nobody => NOWHERE,
        Owner::Switch(switch) => *switch,
        Owner::EndPort(at) => channels.end_ports()[*at as usize].switch,
    };
    owners.iter().map(home).collect()
}

/// How many lanes each connected port has: as many as both ends of its link.
pub fn lanes_of_ports(discovery: &Discovery) -> BTreeMap<Place, u8> {
    let own = |place: &Place| {
        let info = discovery.nodes().get(&place.0)?.ports.get(&place.1)?;
        Some(usable_lanes(info))
    };
    let links = discovery.links().iter();
    links.filter_map(|(near, far)| Some((*near, own(near)?.min(own(far)?)))).collect()
}

/// How many lanes paths can have: those of every link between switches that take tables of levels.
pub fn most_lanes(discovery: &Discovery, takes_tables: impl Fn(u64) -> bool) -> u8 {
    if !discovery.nodes().keys().all(|guid| takes_tables(*guid)) {
        return 1;
    }
    let own = |(guid, port): &Place| {
        let node = discovery.nodes().get(guid)?;
        let is_switch = node.info.node_type == NodeType::Switch;
        node.ports.get(port).filter(|_| is_switch).map(usable_lanes)
    };
    let links = discovery.links().iter().filter(|(near, far)| near < far);
    let between = links.filter_map(|(near, far)| Some(own(near)?.min(own(far)?)));
    between.min().unwrap_or(1).min(MAX_LANES)
}

/// Whether a port is in use, so that it has kept what was written to it.
pub fn is_in_use(discovery: &Discovery, place: Place) -> bool {
    let info = discovery.nodes().get(&place.0).and_then(|node| node.ports.get(&place.1));
    info.is_some_and(|info| PortInfo::parse(info).state >= Some(PortState::Armed))
}

/// What makes a port map SLs to so many lanes and share its link among them. A host's port with one
/// lane needs nothing.
pub fn requests(discovery: &Discovery, place: Place, lanes: u8) -> Vec<Request> {
    let (guid, port) = place;
    let mut requests = Vec::new();
    let Some((node, info)) =
        discovery.nodes().get(&guid).and_then(|node| Some((node, node.ports.get(&port)?)))
    else {
        return requests;
    };
    let is_switch = node.info.node_type == NodeType::Switch;
    let route = if is_switch { Some(node.route) } else { node.port_routes.get(&port).copied() };
    let Some(route) = route.filter(|_| is_switch || lanes > 1) else {
        return requests;
    };
    // An end port has one output, and its packets come by no port.
    let output = if is_switch { u32::from(port) } else { 0 };
    let mut set = |attribute, modifier, data| {
        requests.push(Request::set(route, attribute, modifier, data));
    };
    let mapping = level_mapping(lanes);
    let inputs = u32::from(node.info.ports);
    match node.switch_info.map(|info| maps_all_inputs(&info)) {
        Some(true) => set(Attribute::SlToVl, ALL_INPUTS | output, mapping),
        Some(false) => (0..=inputs).for_each(|input| {
            set(Attribute::SlToVl, input << 8 | output, mapping);
        }),
        None => set(Attribute::SlToVl, output, mapping),
    }
    if lanes > 1 {
        let blocks = FIRST_BLOCKS.into_iter().zip(arbitration_blocks(info));
        for block in blocks.flat_map(|(first, count)| first..first + u32::from(count)) {
            // Nothing has the high priority, and nothing is behind the first block.
            let data = if block == 1 { equal_arbitration(lanes) } else { [0; 64] };
            set(Attribute::VlArbitration, block << 16 | output, data);
        }
    }
    requests
}
