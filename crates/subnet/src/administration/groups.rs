//! Multicast groups: who is a member of which, and the tree that their packets follow.
//!
//! Whoever joins a group that is not there creates it, if it says all that a group needs (IBA
//! 15.2.5.17). The group of IPv4 broadcast of IPoIB is always there. A tree is the part that leads
//! to members of one tree of shortest paths over all switches. While a tree changes, tables hold
//! what old and new tree have in common, so that no mix of two trees sends packets round.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::inform::Happening;
use super::wire::{Gid, Query, Status};
use crate::discovery::{Discovery, Place};

/// The first multicast LID.
pub const FIRST: u16 = 0xc000;

/// Most groups: what the tables of common switches hold at least.
pub const MAX_GROUPS: usize = 1_024;

/// Most groups that one port is a member of.
pub const MAX_GROUPS_OF_PORT: usize = 64;

/// LIDs of a block of a multicast forwarding table.
const BLOCK: usize = 32;

/// Ports of a position of one.
const PORTS: u8 = 16;

/// In a join state: a full member, whose last leave ends the group.
const FULL: u8 = 1;

/// What all members of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The Q_Key.
    pub q_key: u32,
    /// The P_Key.
    pub p_key: u16,
    /// The code of the MTU.
    pub mtu: u8,
    /// The code of the rate.
    pub rate: u8,
    /// The service level.
    pub level: u8,
    /// The traffic class.
    pub class: u8,
    /// Flow label and hop limit.
    pub flow: u32,
    /// Whether all that creates a group was said.
    is_complete: bool,
}

impl Terms {
    /// Of a request.
    pub(super) fn of(query: &Query<'_>) -> Terms {
        let data = query.data;
        let word =
            |at: usize| u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
        let given =
            |component, at, default| query.byte(component, at).map_or(default, |byte| byte & 0x3f);
        // Q_Key, class, P_Key, SL and flow label.
        let is_complete = [2, 6, 7, 12, 13].into_iter().all(|component| query.has(component));
        Terms {
            q_key: word(32),
            p_key: query.short(7, 40).unwrap_or(super::DEFAULT_P_KEY),
            mtu: given(5, 38, 4),
            rate: given(9, 42, 3),
            level: (word(44) >> 28) as u8,
            class: data[39],
            flow: word(44) & 0x0fff_ffff,
            is_complete,
        }
    }
}

/// A group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its LID.
    pub lid: u16,
    /// What its members have in common.
    pub terms: Terms,
    /// Members by the GID of their port: the port, and their join state.
    members: BTreeMap<Gid, (Place, u8)>,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Groups {
    groups: BTreeMap<Gid, Group>,
    /// Those that are there without members, too.
    permanent: BTreeSet<Gid>,
    /// Groups that came and went since that was asked last.
    happened: Vec<Happening>,
    /// Whether members have changed since the tables were made.
    pub(crate) is_changed: bool,
    /// How many LIDs the tables of all switches hold.
    capacity: u16,
}

/// IPv4 broadcast of IPoIB in a partition (RFC 4391).
fn broadcast(p_key: u16) -> Gid {
    Gid { prefix: 0xff12_401b << 32 | u64::from(p_key) << 16, interface: 0xffff_ffff }
}

/// Its Q_Key is what other managers use; 2,048 bytes, 10 Gbit/s.
const BROADCAST_TERMS: Terms = Terms {
    q_key: 0x0b1b,
    p_key: super::DEFAULT_P_KEY,
    mtu: 4,
    rate: 3,
    level: 0,
    class: 0,
    flow: 0,
    is_complete: true,
};

impl Default for Groups {
    fn default() -> Groups {
        Groups::with_broadcasts(core::iter::empty())
    }
}

impl Groups {
    /// With IPv4 broadcast in the default partition and others, by their P_Keys with the bit of
    /// full members.
    pub fn with_broadcasts(p_keys: impl Iterator<Item = u16>) -> Groups {
        let p_keys: BTreeSet<u16> = p_keys.collect();
        let others = p_keys.into_iter().filter(|p_key| *p_key != super::DEFAULT_P_KEY);
        let p_keys = [super::DEFAULT_P_KEY].into_iter().chain(others).take(MAX_GROUPS);
        let group = |(lid, p_key)| {
            let terms = Terms { p_key, ..BROADCAST_TERMS };
            (broadcast(p_key), Group { lid, terms, members: BTreeMap::new() })
        };
        let groups: BTreeMap<Gid, Group> = (FIRST..).zip(p_keys).map(group).collect();
        let permanent = groups.keys().copied().collect();
        let happened = Vec::new();
        Groups { groups, permanent, happened, is_changed: false, capacity: MAX_GROUPS as u16 }
    }

    /// A group.
    pub fn get(&self, gid: Gid) -> Option<&Group> {
        self.groups.get(&gid)
    }

    /// Whether a group has members.
    pub(crate) fn has_members(&self) -> bool {
        self.groups.values().any(|group| !group.members.is_empty())
    }

    /// How many blocks of a table the groups use.
    pub(crate) fn blocks(&self) -> u16 {
        let last = self.groups.values().map(|group| group.lid - FIRST).max().unwrap_or(0);
        last / BLOCK as u16 + 1
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Joins a group, and creates it if need be. Returns the record of the member.
    pub(super) fn join(
        &mut self,
        gid: Gid,
        (port, place): (Gid, Place),
        state: u8,
        terms: &Terms,
    ) -> Result<Vec<u8>, Status> {
        if !gid.is_multicast() || state & 7 == 0 {
            return Err(Status::Invalid);
        }
        let of_port =
            self.groups.values().filter(|group| group.members.contains_key(&port)).count();
        let free = self.free_lid();
        if !self.groups.contains_key(&gid) {
            // Only a full member creates one.
            if !terms.is_complete || state & FULL == 0 {
                return Err(Status::Insufficient);
            }
            if of_port >= MAX_GROUPS_OF_PORT || self.groups.len() >= MAX_GROUPS {
                return Err(Status::NoResources);
            }
            let lid = free.ok_or(Status::NoResources)?;
            let terms = Terms { p_key: terms.p_key | 0x8000, ..*terms };
            self.groups.insert(gid, Group { lid, terms, members: BTreeMap::new() });
            self.happened.push(Happening::GroupCreated(gid));
        }
        let group = self.groups.get_mut(&gid).ok_or(Status::NoRecords)?;
        let is_other = terms.is_complete
            && ((terms.p_key ^ group.terms.p_key) & 0x7fff != 0
                || terms.q_key != group.terms.q_key);
        if is_other {
            return Err(Status::Invalid);
        }
        if !group.members.contains_key(&port) && of_port >= MAX_GROUPS_OF_PORT {
            return Err(Status::NoResources);
        }
        let member = group.members.entry(port).or_insert((place, 0));
        let now = member.1 | state & 7;
        self.is_changed |= member.1 == 0;
        *member = (place, now);
        Ok(group.record(gid, port, now))
    }

    /// Leaves a group, or some of the join states. A group without full members ends.
    pub(super) fn leave(&mut self, gid: Gid, port: Gid, state: u8) -> Result<Vec<u8>, Status> {
        let group = self.groups.get_mut(&gid).ok_or(Status::NoRecords)?;
        let (_, now) = group.members.get_mut(&port).ok_or(Status::NoRecords)?;
        if *now & state == 0 {
            return Err(Status::Invalid);
        }
        *now &= !state;
        let left = *now;
        let record = group.record(gid, port, state);
        if left == 0 {
            group.members.remove(&port);
            self.is_changed = true;
        }
        let is_over = !group.members.values().any(|(_, state)| state & FULL != 0);
        if is_over && !self.permanent.contains(&gid) {
            self.groups.remove(&gid);
            self.happened.push(Happening::GroupDeleted(gid));
        }
        Ok(record)
    }

    /// Members that match what is given; of a group alone, one record without a member.
    pub(super) fn records(
        &self,
        gid: Option<Gid>,
        lid: Option<u16>,
        port: Option<Gid>,
    ) -> Vec<Vec<u8>> {
        let groups = self.groups.iter().filter(|(known, group)| {
            gid.is_none_or(|gid| gid == **known) && lid.is_none_or(|lid| lid == group.lid)
        });
        groups
            .filter_map(|(gid, group)| match port {
                None => Some(group.record(*gid, Gid::default(), FULL)),
                Some(port) => {
                    group.members.get(&port).map(|(_, state)| group.record(*gid, port, *state))
                }
            })
            .collect()
    }

    /// Groups that came and went since the last call.
    pub(crate) fn take_happened(&mut self) -> Vec<Happening> {
        core::mem::take(&mut self.happened)
    }

    fn free_lid(&self) -> Option<u16> {
        let taken: BTreeSet<u16> = self.groups.values().map(|group| group.lid).collect();
        (FIRST..FIRST + self.capacity).find(|lid| !taken.contains(lid))
    }

    /// For a fabric whose smallest table holds so many multicast LIDs. Forgets members that are not
    /// there any more.
    pub(crate) fn keep(&mut self, capacity: u16, is_there: impl Fn(Place) -> bool) {
        self.capacity = capacity.min(MAX_GROUPS as u16);
        for group in self.groups.values_mut() {
            let before = group.members.len();
            group.members.retain(|_, (place, _)| is_there(*place));
            self.is_changed |= group.members.len() != before;
        }
        let (permanent, happened) = (&self.permanent, &mut self.happened);
        self.groups.retain(|gid, group| {
            let stays = permanent.contains(gid) || !group.members.is_empty();
            if !stays {
                happened.push(Happening::GroupDeleted(*gid));
            }
            stays
        });
    }

    /// The multicast forwarding tables for a fabric whose switches have an order from the root
    /// down: by switch, position and block the ports of each LID.
    pub(crate) fn tables(&self, discovery: &Discovery, order: &[u64]) -> MulticastTables {
        let parents = parents(discovery, order);
        let mut tables = MulticastTables::new();
        for group in self.groups.values() {
            for (switch, ports) in tree(discovery, &parents, &group.members) {
                let at = usize::from(group.lid - FIRST);
                for port in ports {
                    let key = (switch, port / PORTS, (at / BLOCK) as u16);
                    let data = tables.entry(key).or_insert([0; 64]);
                    let mask = 1_u16 << (port % PORTS);
                    let entry = 2 * (at % BLOCK);
                    let now = u16::from_be_bytes([data[entry], data[entry + 1]]) | mask;
                    data[entry..entry + 2].copy_from_slice(&now.to_be_bytes());
                }
            }
        }
        tables
    }
}

/// Tables that hold what two have in common.
pub(crate) fn common(old: &MulticastTables, new: &MulticastTables) -> MulticastTables {
    let both = |(key, old): (&(u64, u8, u16), &[u8; 64])| {
        let new = new.get(key).unwrap_or(&[0; 64]);
        (*key, core::array::from_fn(|at| old[at] & new[at]))
    };
    old.iter().map(both).collect()
}

/// By switch, position and block.
pub type MulticastTables = BTreeMap<(u64, u8, u16), [u8; 64]>;

/// By switch, the link to the one above it: the own port, and that at the other end.
fn parents(discovery: &Discovery, order: &[u64]) -> BTreeMap<u64, (u8, Place)> {
    let switches: BTreeSet<u64> = order.iter().copied().collect();
    let mut parents = BTreeMap::new();
    let mut open: VecDeque<u64> = order.first().copied().into_iter().collect();
    let mut found: BTreeSet<u64> = open.iter().copied().collect();
    while let Some(at) = open.pop_front() {
        for ((_, port), far) in discovery.links().range((at, 0)..=(at, u8::MAX)) {
            if switches.contains(&far.0) && found.insert(far.0) {
                parents.insert(far.0, (far.1, (at, *port)));
                open.push_back(far.0);
            }
        }
    }
    parents
}

/// By switch, the ports of a group: the branches of the tree that lead to members, and the members
/// themselves.
fn tree(
    discovery: &Discovery,
    parents: &BTreeMap<u64, (u8, Place)>,
    members: &BTreeMap<Gid, (Place, u8)>,
) -> BTreeMap<u64, BTreeSet<u8>> {
    let mut ports: BTreeMap<u64, BTreeSet<u8>> = BTreeMap::new();
    let mut below: BTreeMap<u64, usize> = BTreeMap::new();
    let mut connected = 0;
    for (place, _) in members.values() {
        let Some((switch, port)) = (match place.1 {
            0 => Some(*place),
            _ => discovery.links().get(place).copied(),
        }) else {
            continue;
        };
        ports.entry(switch).or_default().insert(port);
        connected += 1;
        // Up to the root; one member counts once at every switch above.
        let mut at = switch;
        *below.entry(at).or_default() += 1;
        while let Some((own, above)) = parents.get(&at) {
            ports.entry(at).or_default().insert(*own);
            ports.entry(above.0).or_default().insert(above.1);
            at = above.0;
            *below.entry(at).or_default() += 1;
        }
    }
    prune(&mut ports, parents, &below, connected);
    ports
}

/// Takes away what is above the lowest switch that has all members below it.
fn prune(
    ports: &mut BTreeMap<u64, BTreeSet<u8>>,
    parents: &BTreeMap<u64, (u8, Place)>,
    below: &BTreeMap<u64, usize>,
    members: usize,
) {
    let has_all = |switch: &u64| below.get(switch) == Some(&members);
    for (switch, (own, above)) in parents {
        if has_all(switch) && has_all(&above.0) {
            ports.entry(*switch).or_default().remove(own);
            ports.entry(above.0).or_default().remove(&above.1);
        }
    }
    ports.retain(|_, ports| !ports.is_empty());
}

impl Group {
    /// Attribute `MCMemberRecord`.
    fn record(&self, gid: Gid, port: Gid, state: u8) -> Vec<u8> {
        let Terms { q_key, p_key, mtu, rate, level, class, flow, .. } = self.terms;
        let mut record = alloc::vec![0; 56];
        gid.put(&mut record, 0);
        port.put(&mut record, 16);
        record[32..36].copy_from_slice(&q_key.to_be_bytes());
        record[36..38].copy_from_slice(&self.lid.to_be_bytes());
        record[38] = 2 << 6 | mtu;
        record[39] = class;
        record[40..42].copy_from_slice(&p_key.to_be_bytes());
        record[42] = 2 << 6 | rate;
        record[43] = 2 << 6 | super::LIFETIME;
        record[44..48].copy_from_slice(&(u32::from(level) << 28 | flow).to_be_bytes());
        // Link-local, and what the member is.
        record[48] = 2 << 4 | state & 0xf;
        record
    }
}
