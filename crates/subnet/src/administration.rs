//! Subnet administration (SA): what programs ask a subnet manager for before they connect (IBA
//! 15.2).
//!
//! | record | answered |
//! |---|---|
//! | `PathRecord` | for a source and a destination, by LID or GID, or from a source to all: LIDs, MTU, rate, SL, P_Key |
//! | `NodeRecord`, `PortInfoRecord` | by LID, GUID, or all |
//! | `SMInfoRecord` | of this manager |
//! | `MCMemberRecord` | join, leave and query; see [`groups`] |
//! | `InformInfo` | subscribe to ports and groups that come and go; see [`inform`] |
//! | `ClassPortInfo` | what is supported: nothing optional |
//!
//! Tables that are longer than a datagram are sent by [`rmpp`]; where too many are under way, the
//! answer is "no resources". Everything else is refused as not supported. A port may join and leave
//! for itself alone.

pub mod groups;
pub mod inform;
pub mod rmpp;
mod wire;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use crate::discovery::{Discovery, FoundNode, Place};
use crate::levels::Levels;
use crate::lids::Lids;
use crate::mad::{DEFAULT_PREFIX, MAD_BYTES, NodeType, PortInfo, PortState};
use crate::partitions::Memberships;
use crate::sm_info::{SmInfo, method};
use groups::{Groups, Terms};
use topology::routes::NO_ROUTE;
use wire::{DELETE, GET_TABLE, Query, attribute, refuse};
pub use wire::{Gid, Reply, Status, Table};

/// The partition that every port is a full member of.
pub const DEFAULT_P_KEY: u16 = 0xffff;

/// 4.096 us times 2 to this power: how long a packet lives at most.
const LIFETIME: u8 = 18;

/// Most switches of a path.
const MAX_HOPS: usize = 64;

/// Ports by what they are asked for by.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    by_lid: Vec<Option<Place>>,
    by_guid: BTreeMap<u64, Place>,
}

impl Directory {
    /// Of a fabric.
    pub fn new(discovery: &Discovery, lids: &Lids) -> Directory {
        let mut by_lid = alloc::vec![None; usize::from(lids.top()) + 1];
        let mut by_guid = BTreeMap::new();
        for (place, first) in lids.iter() {
            let last = usize::from(first) + (1 << lids.lmc(place));
            by_lid[usize::from(first)..last].fill(Some(place));
            // Of two ports with one GUID the first has it.
            if let Some(guid) = discovery.port_guid(place) {
                by_guid.entry(guid).or_insert(place);
            }
        }
        Directory { by_lid, by_guid }
    }

    /// The port that has a LID.
    pub fn at(&self, lid: u16) -> Option<Place> {
        *self.by_lid.get(usize::from(lid))?
    }

    /// All LIDs of the port that has one; that one alone if it is nobody's.
    pub fn lids_beside(&self, lid: u16) -> RangeInclusive<u16> {
        let Some(place) = self.at(lid) else {
            return lid..=lid;
        };
        let is_same = |other: &u16| self.at(*other) == Some(place);
        let first = (0..lid).rev().take_while(is_same).last().unwrap_or(lid);
        first..=(lid..=u16::MAX).take_while(is_same).last().unwrap_or(lid)
    }

    /// The port that has a GID.
    pub fn with(&self, gid: Gid) -> Option<Place> {
        self.by_guid.get(&gid.interface).copied().filter(|_| gid.prefix == DEFAULT_PREFIX)
    }
}

/// What questions are answered from.
#[derive(Clone, Copy, Debug)]
pub struct Subnet<'a> {
    /// Nodes, ports and links.
    pub discovery: &'a Discovery,
    /// Who has which LID.
    pub lids: &'a Lids,
    /// Ports by LID and GID.
    pub directory: &'a Directory,
    /// The tables of switches, by GUID.
    pub tables: &'a BTreeMap<u64, Arc<Vec<u8>>>,
    /// The numbers of switches, by GUID.
    pub numbers: &'a BTreeMap<u64, u32>,
    /// The service levels of paths.
    pub levels: &'a Levels,
    /// The P_Keys of ports; all are full members of one partition if there are none.
    pub memberships: Option<&'a Memberships>,
    /// The manager.
    pub manager: SmInfo,
    /// Bytes that a table of several datagrams may have.
    pub room: usize,
}

/// Answers a request from a LID; `None` where that is none.
pub fn answer(
    subnet: &Subnet<'_>,
    groups: &mut Groups,
    from: u16,
    mad: &[u8; MAD_BYTES],
) -> Option<Reply> {
    let query = match Query::parse(mad)? {
        Ok(query) => query,
        Err(status) => return Some(Reply::Datagram(refuse(mad, status), MAD_BYTES)),
    };
    let reads = matches!(query.method, method::GET | GET_TABLE);
    let found = match query.attribute {
        attribute::CLASS_PORT_INFO if query.method == method::GET => {
            Ok(alloc::vec![class_port_info()])
        }
        attribute::PATH_RECORD if reads => subnet.paths(groups, &query),
        attribute::NODE_RECORD if reads => subnet.nodes(&query),
        attribute::PORT_INFO_RECORD if reads => subnet.ports(&query),
        attribute::SM_INFO_RECORD if reads => subnet.managers(),
        attribute::MULTICAST_MEMBER => subnet.member(groups, from, &query),
        _ => Err(Status::Unsupported),
    };
    Some(query.respond(found, subnet.room))
}

/// Base and class version; nothing optional; a response time of 4.096 us * 2^18.
fn class_port_info() -> Vec<u8> {
    let mut data = alloc::vec![0; 72];
    data[..2].copy_from_slice(&[1, 2]);
    data[7] = LIFETIME;
    data
}

/// Whether what is there fits what is asked for: a selector in the two high bits, the value in the
/// others (IBA 15.2.5.16).
fn fits(wanted: Option<u8>, selector: Option<u8>, value: u8) -> bool {
    let Some(wanted) = wanted.map(|wanted| wanted & 0x3f) else {
        return true;
    };
    match selector.unwrap_or(2 << 6) >> 6 {
        0 => value > wanted,
        1 => value < wanted,
        2 => value >= wanted,
        _ => true,
    }
}

/// What a path can carry.
#[derive(Clone, Copy, Debug)]
struct Reach {
    mtu: u8,
    rate: u8,
}

/// Where a path ends, and how.
#[derive(Clone, Copy, Debug)]
struct PathTo {
    gid: Gid,
    lid: u16,
    reach: Reach,
    p_key: u16,
    level: u8,
}

impl Reach {
    /// More than any: 4,096 bytes, and the fastest rate.
    const MOST: Reach = Reach { mtu: 5, rate: 24 };

    /// What is left behind a port, whose attribute is given.
    fn through(self, info: &[u8; 64]) -> Reach {
        let in_use = PortInfo::parse(info).state >= Some(PortState::Armed);
        let mtu = if in_use { info[36] >> 4 } else { info[41] & 0xf };
        Reach { mtu: self.mtu.min(mtu), rate: slower(self.rate, rate(info)) }
    }
}

/// Codes of rates (IBA table 207 and its annexes), and tenths of Gbit/s.
const RATES: [(u8, u32); 21] = [
    (2, 25),
    (5, 50),
    (3, 100),
    (11, 140),
    (6, 200),
    (15, 250),
    (19, 280),
    (4, 300),
    (7, 400),
    (20, 500),
    (12, 560),
    (8, 600),
    (9, 800),
    (16, 1_000),
    (13, 1_120),
    (10, 1_200),
    (14, 1_680),
    (17, 2_000),
    (18, 3_000),
    (21, 4_000),
    (24, 12_000),
];

/// The rate of a port, by its active width and speed.
fn rate(info: &[u8; 64]) -> u8 {
    let lanes = match info[31] {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    let lane = match (info[62] >> 4, info[35] >> 4) {
        (1, _) => 140,
        (2, _) => 250,
        (4, _) => 500,
        (8, _) => 1_000,
        (_, 2) => 50,
        (_, 4) => 100,
        _ => 25,
    };
    let possible = RATES.iter().rev().find(|(_, tenths)| *tenths <= lanes * lane);
    possible.map_or(2, |(code, _)| *code)
}

fn slower(one: u8, other: u8) -> u8 {
    let place = |code| RATES.iter().position(|(known, _)| *known == code);
    if place(one) < place(other) { one } else { other }
}

impl Subnet<'_> {
    fn node(&self, place: Place) -> Option<&FoundNode> {
        self.discovery.nodes().get(&place.0)
    }

    fn gid(&self, place: Place) -> Option<Gid> {
        self.discovery.port_guid(place).map(Gid::of)
    }

    /// A port that is given by LID or by GID, or by both if they agree, and its LID.
    fn find(&self, lid: Option<u16>, gid: Option<Gid>) -> Result<(Place, u16), Status> {
        let by_gid = gid.map(|gid| self.directory.with(gid).ok_or(Status::BadGid)).transpose()?;
        let by_lid = lid.map(|lid| self.directory.at(lid).ok_or(Status::NoRecords)).transpose()?;
        match (by_gid, by_lid) {
            (Some(one), Some(other)) if one != other => Err(Status::NoRecords),
            (Some(place), _) | (None, Some(place)) => {
                let first = self.lids.of(place).ok_or(Status::NoRecords)?;
                Ok((place, lid.unwrap_or(first)))
            }
            (None, None) => Err(Status::Insufficient),
        }
    }

    /// Records of a size that are looked for: more than can be sent, so that it is known if there
    /// are.
    fn most(&self, query: &Query<'_>, size: usize) -> usize {
        let room = if query.method == GET_TABLE { self.room.max(MAD_BYTES) } else { 2 * size };
        room / size + 1
    }

    // ---- paths ----------------------------------------------------------------------------------

    /// From a source to a destination, or as a table from a source to all.
    fn paths(&self, groups: &Groups, query: &Query<'_>) -> Result<Vec<Vec<u8>>, Status> {
        let (from, source) = self.find(query.short(5, 42), query.gid(3, 24))?;
        let to_group = query.gid(2, 8).filter(|gid| gid.is_multicast());
        if let Some(gid) = to_group {
            let group = groups.get(gid).ok_or(Status::NoRecords)?;
            let Terms { mtu, rate, p_key, level, .. } = group.terms;
            let is_barred = |members: &Memberships| !members.is_member(from, p_key);
            if self.memberships.is_some_and(is_barred) {
                return Err(Status::NoRecords);
            }
            let path = PathTo { gid, lid: group.lid, reach: Reach { mtu, rate }, p_key, level };
            return Ok(alloc::vec![self.path(query, (from, source), path)?]);
        }
        if query.method == GET_TABLE && query.short(4, 40).is_none() && query.gid(2, 8).is_none() {
            let to = |(place, lid)| {
                let path = self.path_to(query, from, place, lid)?;
                self.path(query, (from, source), path)
            };
            let most = self.most(query, 64);
            return Ok(self.places(None).filter_map(|end| to(end).ok()).take(most).collect());
        }
        let (to, lid) = self.find(query.short(4, 40), query.gid(2, 8))?;
        let path = self.path_to(query, from, to, lid)?;
        Ok(alloc::vec![self.path(query, (from, source), path)?])
    }

    fn path_to(
        &self,
        query: &Query<'_>,
        from: Place,
        to: Place,
        lid: u16,
    ) -> Result<PathTo, Status> {
        let gid = self.gid(to).ok_or(Status::NoRecords)?;
        let reach = self.reach(from, to, lid).ok_or(Status::NoRecords)?;
        let p_key = match self.memberships {
            None => DEFAULT_P_KEY,
            Some(memberships) => {
                let shared = memberships.shared(from, to, query.short(13, 50));
                shared.ok_or(Status::NoRecords)?
            }
        };
        Ok(PathTo { gid, lid, reach, p_key, level: self.level(from, lid) })
    }

    /// The record of a path, if it is what was asked for.
    fn path(
        &self,
        query: &Query<'_>,
        (from, source): (Place, u16),
        path: PathTo,
    ) -> Result<Vec<u8>, Status> {
        let PathTo { gid, lid, reach, p_key, level } = path;
        // The membership bit of the P_Key does not matter.
        let is_other_key = query.short(13, 50).is_some_and(|wanted| (wanted ^ p_key) & 0x7fff != 0);
        let is_other_level = query.short(15, 52).is_some_and(|wanted| wanted & 0xf != level.into());
        let is_slow = !fits(query.byte(17, 54), query.byte(16, 54), reach.mtu)
            || !fits(query.byte(19, 55), query.byte(18, 55), reach.rate);
        if is_other_key || is_other_level || is_slow {
            return Err(Status::NoRecords);
        }
        let mut record = alloc::vec![0; 64];
        gid.put(&mut record, 8);
        self.gid(from).ok_or(Status::NoRecords)?.put(&mut record, 24);
        record[40..42].copy_from_slice(&lid.to_be_bytes());
        record[42..44].copy_from_slice(&source.to_be_bytes());
        // Reversible.
        record[49] = 0x80;
        record[50..52].copy_from_slice(&p_key.to_be_bytes());
        record[53] = level;
        // "Exactly".
        record[54] = 2 << 6 | reach.mtu;
        record[55] = 2 << 6 | reach.rate;
        record[56] = 2 << 6 | LIFETIME;
        Ok(record)
    }

    /// The service level of packets from a port to a LID.
    fn level(&self, from: Place, lid: u16) -> u8 {
        let links = self.discovery.links();
        let switch = if from.1 == 0 { Some(from.0) } else { links.get(&from).map(|far| far.0) };
        let number = switch.and_then(|switch| self.numbers.get(&switch));
        number.map_or(0, |number| self.levels.level(*number, lid))
    }

    /// What the path from one port to another can carry, as switches forward; `None` if it does not
    /// end there.
    fn reach(&self, from: Place, to: Place, lid: u16) -> Option<Reach> {
        let info = |place: Place| self.node(place)?.ports.get(&place.1);
        let mut reach = Reach::MOST;
        if from == to {
            return Some(reach.through(info(from)?));
        }
        let (mut at, mut leave) = (from, (from.1 > 0).then_some(from.1));
        for _ in 0..MAX_HOPS {
            if let Some(port) = leave {
                let near = (at.0, port);
                at = *self.discovery.links().get(&near)?;
                reach = reach.through(info(near)?).through(info(at)?);
            }
            if self.node(at)?.info.node_type != NodeType::Switch {
                return (at == to).then_some(reach);
            }
            match *self.tables.get(&at.0)?.get(usize::from(lid))? {
                NO_ROUTE => return None,
                0 => return (at.0 == to.0 && to.1 == 0).then_some(reach),
                port => leave = Some(port),
            }
        }
        None
    }

    // ---- nodes and ports ------------------------------------------------------------------------

    /// Ports that are given by LID, or all.
    fn places(&self, lid: Option<u16>) -> impl Iterator<Item = (Place, u16)> {
        let one = lid.and_then(|lid| self.directory.at(lid));
        let one = one.and_then(|place| Some((place, self.lids.of(place)?)));
        let all = lid.is_none().then(|| self.lids.iter());
        one.into_iter().chain(all.into_iter().flatten())
    }

    fn nodes(&self, query: &Query<'_>) -> Result<Vec<Vec<u8>>, Status> {
        // LID, type, GUIDs of node and port.
        if !query.has_only(&[0, 4, 7, 8]) {
            return Err(Status::Unsupported);
        }
        let record = |(place, lid): (Place, u16)| {
            let node = self.node(place)?;
            let port_guid = self.discovery.port_guid(place)?;
            let is_meant = query.byte(4, 6).is_none_or(|wanted| wanted == node.raw_info[2])
                && query.long(7, 16).is_none_or(|wanted| wanted == node.info.guid)
                && query.long(8, 24).is_none_or(|wanted| wanted == port_guid);
            if !is_meant {
                return None;
            }
            let mut record = alloc::vec![0; 112];
            record[..2].copy_from_slice(&lid.to_be_bytes());
            let mut info = node.raw_info;
            info[20..28].copy_from_slice(&port_guid.to_be_bytes());
            info[36] = place.1;
            record[4..44].copy_from_slice(&info[..40]);
            let name = node.description.as_bytes();
            let len = name.len().min(64);
            record[44..44 + len].copy_from_slice(&name[..len]);
            Some(record)
        };
        let most = self.most(query, 112);
        Ok(self.places(query.short(0, 0)).filter_map(record).take(most).collect())
    }

    fn ports(&self, query: &Query<'_>) -> Result<Vec<Vec<u8>>, Status> {
        // LID and port.
        if !query.has_only(&[0, 1]) {
            return Err(Status::Unsupported);
        }
        let wanted = query.byte(1, 2);
        let most = self.most(query, 72);
        let mut records = Vec::new();
        for (place, lid) in self.places(query.short(0, 0)) {
            if records.len() >= most {
                break;
            }
            let Some(node) = self.node(place) else {
                continue;
            };
            let is_switch = node.info.node_type == NodeType::Switch;
            let ports = node.ports.iter().filter(|(port, _)| is_switch || **port == place.1);
            let room = most.saturating_sub(records.len());
            for (port, info) in
                ports.filter(|(port, _)| wanted.is_none_or(|wanted| wanted == **port)).take(room)
            {
                let mut record = alloc::vec![0; 72];
                record[..2].copy_from_slice(&lid.to_be_bytes());
                record[2] = *port;
                record[4..68].copy_from_slice(info);
                // Nobody is told the M_Key.
                record[4..12].fill(0);
                records.push(record);
            }
        }
        Ok(records)
    }

    fn managers(&self) -> Result<Vec<Vec<u8>>, Status> {
        let place = self.discovery.start().ok_or(Status::NoRecords)?;
        let lid = self.lids.of(place).or(self.lids.of((place.0, 0))).ok_or(Status::NoRecords)?;
        let mut record = alloc::vec![0; 32];
        record[..2].copy_from_slice(&lid.to_be_bytes());
        let info = SmInfo { key: 0, ..self.manager };
        record[4..25].copy_from_slice(&info.emit()[..21]);
        Ok(alloc::vec![record])
    }

    // ---- multicast ------------------------------------------------------------------------------

    fn member(
        &self,
        groups: &mut Groups,
        from: u16,
        query: &Query<'_>,
    ) -> Result<Vec<Vec<u8>>, Status> {
        let (group, port) = (query.gid(0, 0), query.gid(1, 16));
        match query.method {
            method::GET | GET_TABLE => Ok(groups.records(group, query.short(3, 36), port)),
            method::SET | DELETE => {
                let (group, port) = group.zip(port).ok_or(Status::Insufficient)?;
                let state = query.byte(16, 48).ok_or(Status::Insufficient)? & 0xf;
                let place = self.directory.with(port).ok_or(Status::BadGid)?;
                // Whoever asks for others would need to be trusted.
                if self.directory.at(from) != Some(place) {
                    return Err(Status::Denied);
                }
                let terms = Terms::of(query);
                let p_key = groups.get(group).map_or(terms.p_key, |group| group.terms.p_key);
                if self.memberships.is_some_and(|members| !members.is_member(place, p_key)) {
                    return Err(Status::Denied);
                }
                let member = (port, place);
                let record = match query.method {
                    DELETE => groups.leave(group, port, state)?,
                    _ => groups.join(group, member, state, &terms)?,
                };
                Ok(alloc::vec![record])
            }
            _ => Err(Status::Unsupported),
        }
    }
}
