//! Partitions: which ports may talk to which (IBA 10.9). Read from a file in the manner of opensm's
//! `partitions.conf`.
//!
//! ```text
//! # name=P_Key, flags : members;
//! Default=0x7fff, ipoib : ALL=limited, SELF=full;
//! training=0x8001, ipoib, defmember=full : 0x0002c90300a1b2c3, 0x0002c90300a1b2c4;
//! storage=2 : ALL_CAS=limited, 0x0002c90300a1b2d0=full;
//! ```
//!
//! | part | what it is |
//! |---|---|
//! | P_Key | 15 bits, hexadecimal or decimal; the highest bit is ignored |
//! | `ipoib` | IPv4 broadcast of the partition is there from the start |
//! | `defmember=full` or `limited` | what members are that do not say; limited without it |
//! | member | a GUID of a port, `ALL`, `ALL_CAS`, `ALL_SWITCHES`, `ALL_ROUTERS` or `SELF`, the manager's port |
//!
//! Two ports share a partition if both are members and one of them is a full one. A line ends with
//! `;` and may go on over several lines. The partition 0x7fff is always there: every port is a
//! limited member at least, and the manager's a full one, since programs ask subnet administration
//! by it.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use crate::discovery::{Discovery, Place};
use crate::exchange::Request;
use crate::lids::Lids;
use crate::mad::{Attribute, NodeType};

/// The partition of all ports, without the bit of full members.
pub const DEFAULT_KEY: u16 = 0x7fff;

/// In a P_Key: a full member.
pub const FULL: u16 = 1 << 15;

/// P_Keys of a block of a table.
const BLOCK: usize = 32;

/// Most partitions of a file.
pub const MAX_PARTITIONS: usize = 1_024;

/// Most members of all partitions of a file, as they are written.
pub const MAX_MEMBERS: usize = 1 << 20;

/// Why a file is refused, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}")]
pub struct PartitionError {
    /// From 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// Who is a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Port(u64),
    All,
    Type(NodeType),
    Manager,
}

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Partition {
    key: u16,
    has_broadcast: bool,
    /// And whether each is a full one.
    members: Vec<(Who, bool)>,
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partitions {
    partitions: Vec<Partition>,
}

impl Partitions {
    /// Reads a file.
    ///
    /// # Errors
    /// Names the line, and what is wrong with it.
    pub fn parse(text: &str) -> Result<Partitions, PartitionError> {
        let mut partitions: Vec<Partition> = Vec::new();
        let mut members = 0;
        for (line, statement) in statements(text)? {
            let error = |what: String| PartitionError { line, what };
            let partition = partition(&statement).map_err(error)?;
            if let Some(known) = partitions.iter().find(|known| known.key == partition.key) {
                let what =
                    alloc::format!("the P_Key {:#06x} is that of another partition", known.key);
                return Err(error(what));
            }
            members += partition.members.len();
            if partitions.len() >= MAX_PARTITIONS || members > MAX_MEMBERS {
                let what = alloc::format!(
                    "more than {MAX_PARTITIONS} partitions or {MAX_MEMBERS} members"
                );
                return Err(error(what));
            }
            partitions.push(partition);
        }
        Ok(Partitions { partitions })
    }

    /// P_Keys whose IPv4 broadcast groups are there from the start.
    pub fn broadcasts(&self) -> impl Iterator<Item = u16> + '_ {
        let with = self.partitions.iter().filter(|partition| partition.has_broadcast);
        with.map(|partition| partition.key | FULL)
    }

    /// The P_Keys of all ports that have a LID, the one of all ports first.
    pub fn members(&self, discovery: &Discovery, lids: &Lids) -> Memberships {
        let manager = discovery.start();
        // Port 0 of the manager's switch, if it runs on one.
        let is_manager =
            |place: Place| manager.is_some_and(|own| place == own || place == (own.0, 0));
        let mut keys: BTreeMap<Place, Vec<u16>> = BTreeMap::new();
        let mut by_guid: BTreeMap<u64, Vec<(u16, bool)>> = BTreeMap::new();
        for partition in &self.partitions {
            for (who, is_full) in &partition.members {
                if let Who::Port(guid) = who {
                    by_guid.entry(*guid).or_default().push((partition.key, *is_full));
                }
            }
        }
        for (place, _) in lids.iter() {
            let node_type = discovery.nodes().get(&place.0).map(|node| node.info.node_type);
            let mut own = BTreeMap::from([(DEFAULT_KEY, is_manager(place))]);
            let mut join = |key: u16, is_full: bool| *own.entry(key).or_default() |= is_full;
            for partition in &self.partitions {
                for (who, is_full) in &partition.members {
                    let is_meant = match who {
                        Who::Port(_) => false,
                        Who::All => true,
                        Who::Type(meant) => node_type == Some(*meant),
                        Who::Manager => is_manager(place),
                    };
                    if is_meant {
                        join(partition.key, *is_full);
                    }
                }
            }
            let named = discovery.port_guid(place).and_then(|guid| by_guid.get(&guid));
            named.into_iter().flatten().for_each(|(key, is_full)| join(*key, *is_full));
            let whole = |(key, is_full): (u16, bool)| if is_full { key | FULL } else { key };
            let mut list: Vec<u16> = own.into_iter().map(whole).collect();
            list.sort_by_key(|key| rank(*key));
            keys.insert(place, list);
        }
        Memberships { keys }
    }
}

/// Where the P_Key of a partition stands among those of a port: that of all ports is the first.
fn rank(key: u16) -> (bool, u16) {
    (key & !FULL != DEFAULT_KEY, key & !FULL)
}

/// The P_Keys of ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memberships {
    /// In the order of [`rank`].
    keys: BTreeMap<Place, Vec<u16>>,
}

impl Memberships {
    /// Those of a port.
    pub fn of(&self, place: Place) -> &[u16] {
        self.keys.get(&place).map_or(&[], Vec::as_slice)
    }

    /// The P_Key by which one port sends to another: the one that is asked for, or else the first
    /// that both have.
    pub fn shared(&self, from: Place, to: Place, wanted: Option<u16>) -> Option<u16> {
        let is_wanted = |key: u16| wanted.is_none_or(|wanted| (wanted ^ key) & !FULL == 0);
        let mut own = self.of(from).iter().copied().filter(|key| is_wanted(*key));
        // Both are in the same order, so one look at each key will do.
        let mut others = self.of(to).iter().copied().peekable();
        own.find(|key| {
            while others.next_if(|other| rank(*other) < rank(*key)).is_some() {}
            others
                .peek()
                .is_some_and(|other| rank(*other) == rank(*key) && (other | key) & FULL != 0)
        })
    }

    /// Whether a port is a member of a partition.
    pub fn is_member(&self, place: Place, key: u16) -> bool {
        self.of(place).iter().any(|own| (own ^ key) & !FULL == 0)
    }

    /// Ports and their keys.
    pub fn iter(&self) -> impl Iterator<Item = (Place, &[u16])> {
        self.keys.iter().map(|(place, keys)| (*place, keys.as_slice()))
    }
}

/// What writes the table of an end port, and with `enforces` that of the port of its switch; and
/// how many keys there is room for.
pub fn requests(
    discovery: &Discovery,
    place: Place,
    keys: &[u16],
    enforces: bool,
) -> (Vec<Request>, usize) {
    let mut requests = Vec::new();
    let Some(node) = discovery.nodes().get(&place.0) else {
        return (requests, usize::MAX);
    };
    // PartitionCap, and PartitionEnforcementCap.
    let room =
        |bytes: &[u8; 64], at: usize| usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
    let mut most = room(&node.raw_info, 28);
    let mut write = |route, first: u32, room: usize| {
        let known = &keys[..keys.len().min(room)];
        // What was behind the last key goes, too.
        for block in 0..room.div_ceil(BLOCK) {
            let mut data = [0; 64];
            let own = known.chunks(BLOCK).nth(block).unwrap_or(&[]);
            for (entry, key) in data.chunks_exact_mut(2).zip(own) {
                entry.copy_from_slice(&key.to_be_bytes());
            }
            let modifier = first | block as u32;
            requests.push(Request::set(route, Attribute::PKeyTable, modifier, data));
        }
    };
    if let Some(route) = discovery.route(place) {
        write(route, 0, most);
    }
    let beyond = discovery.links().get(&place).filter(|_| enforces);
    let switch = beyond.and_then(|far| Some((far.1, discovery.nodes().get(&far.0)?)));
    if let Some((port, switch)) = switch
        && let Some(info) = switch.switch_info
    {
        let own = room(&info, 14);
        most = most.min(own);
        write(switch.route, u32::from(port) << 16, own);
    }
    (requests, most)
}

/// What stands between semicolons, without comments, and the line where it begins.
fn statements(text: &str) -> Result<Vec<(usize, String)>, PartitionError> {
    let mut statements = Vec::new();
    let (mut begin, mut open) = (1, String::new());
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.split('#').next().unwrap_or("");
        let mut parts = text.split(';').peekable();
        while let Some(part) = parts.next() {
            if open.trim().is_empty() {
                begin = line;
            }
            open.push_str(part);
            open.push(' ');
            if parts.peek().is_some() {
                statements.push((begin, core::mem::take(&mut open)));
            }
        }
    }
    if !open.trim().is_empty() {
        let what = "there is no ';' at the end".to_string();
        return Err(PartitionError { line: begin, what });
    }
    statements.retain(|(_, statement)| !statement.trim().is_empty());
    Ok(statements)
}

/// `name=key, flags : members`
fn partition(statement: &str) -> Result<Partition, String> {
    let (head, tail) = statement.split_once(':').ok_or("there is no ':' before the members")?;
    let mut words = head.split(',').map(str::trim);
    let name = words.next().unwrap_or_default();
    let (name, key) = match name.split_once('=') {
        Some((name, key)) => (name.trim(), Some(number(key.trim())?)),
        None => (name, None),
    };
    let key = match (key, name) {
        (Some(key), _) => key,
        (None, "Default") => DEFAULT_KEY.into(),
        (None, name) => return Err(alloc::format!("'{name}' has no P_Key; write {name}=0x8001")),
    };
    let key =
        u16::try_from(key).map_err(|_| alloc::format!("{key:#x} is no P_Key of 16 bits"))? & !FULL;
    if key == 0 {
        return Err("the P_Key 0 is none".to_string());
    }
    let (mut has_broadcast, mut default) = (false, false);
    for word in words {
        match word.split_once('=').map(|(flag, value)| (flag.trim(), value.trim())) {
            None if word == "ipoib" => has_broadcast = true,
            Some(("defmember", value)) => default = is_full(value)?,
            _ => {
                return Err(alloc::format!(
                    "'{word}' is no flag; there are ipoib and defmember=full or limited"
                ));
            }
        }
    }
    let members = tail.split(',').map(str::trim).filter(|word| !word.is_empty());
    let member = |word: &str| {
        let (who, is_full) = match word.split_once('=') {
            Some((who, value)) => (who.trim(), is_full(value.trim())?),
            None => (word, default),
        };
        let who = match who {
            "ALL" => Who::All,
            "ALL_CAS" => Who::Type(NodeType::ChannelAdapter),
            "ALL_SWITCHES" => Who::Type(NodeType::Switch),
            "ALL_ROUTERS" => Who::Type(NodeType::Router),
            "SELF" => Who::Manager,
            _ if who.starts_with("0x") => Who::Port(number(who)?),
            _ => {
                return Err(alloc::format!(
                    "'{who}' is no member; there are GUIDs (0x...), ALL, ALL_CAS, ALL_SWITCHES, ALL_ROUTERS and SELF"
                ));
            }
        };
        Ok((who, is_full))
    };
    Ok(Partition { key, has_broadcast, members: members.map(member).collect::<Result<_, _>>()? })
}

fn is_full(text: &str) -> Result<bool, String> {
    match text {
        "full" => Ok(true),
        "limited" => Ok(false),
        _ => Err(alloc::format!("'{text}' is neither full nor limited")),
    }
}

fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| alloc::format!("'{text}' is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_over_several_lines() {
        let text = "# all\nDefault=0x7fff, ipoib : ALL=limited, SELF=full; # the rest\n\
            training=0x8001, defmember=full :\n  0x10,\n  0x11=limited ;storage = 2:ALL_CAS;\n";
        let read = Partitions::parse(text).expect("three");
        let keys: Vec<u16> = read.partitions.iter().map(|one| one.key).collect();
        assert_eq!(
            (keys, read.broadcasts().collect::<Vec<_>>()),
            (alloc::vec![0x7fff, 1, 2], alloc::vec![0xffff])
        );
        let members = &read.partitions[1].members;
        assert_eq!(members, &[(Who::Port(0x10), true), (Who::Port(0x11), false)]);
        assert_eq!(read.partitions[2].members, [(Who::Type(NodeType::ChannelAdapter), false)]);
    }

    #[test]
    fn ports_share_the_first_partition_in_which_one_of_them_is_a_full_member() {
        let ports: [&[u16]; 4] = [
            &[0x7fff, 1, 0x8005, 9],
            &[0x7fff, 0x8001, 5, 0x8009],
            &[0x7fff, 1, 3, 9],
            &[0xffff, 0x8002],
        ];
        let keys = (0..).zip(ports).map(|(guid, keys)| ((guid, 1), keys.to_vec())).collect();
        let members = Memberships { keys };
        let shared = |from, to, wanted| members.shared((from, 1), (to, 1), wanted);
        assert_eq!([shared(0, 1, None), shared(1, 0, None)], [Some(1), Some(0x8001)]);
        assert_eq!([shared(0, 1, Some(5)), shared(0, 1, Some(0x8009))], [Some(0x8005), Some(9)]);
        assert_eq!([shared(0, 2, None), shared(0, 2, Some(1))], [None, None], "both are limited");
        assert_eq!([shared(2, 3, None), shared(3, 9, None)], [Some(0x7fff), None]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let bad = [
            ("a=1 : ALL", "line 1: there is no ';'"),
            ("\na=1 ALL;", "line 2: there is no ':'"),
            ("a : ALL;", "line 1: 'a' has no P_Key"),
            ("a=x : ALL;", "line 1: 'x' is no number"),
            ("a=0x10000 : ALL;", "line 1: 0x10000 is no P_Key"),
            ("a=0x8000 : ALL;", "line 1: the P_Key 0"),
            ("a=1, fast : ALL;", "line 1: 'fast' is no flag"),
            ("a=1 : ALL;\n\nb=2, defmember=half : ALL;", "line 3: 'half' is neither"),
            ("a=1 : host1;", "line 1: 'host1' is no member"),
            ("a=1 : 0xg;", "line 1: '0xg' is no number"),
            ("a=1 : ALL;\nb=0x8001 : ALL;", "line 2: the P_Key 0x0001 is that of another"),
        ];
        for (text, expected) in bad {
            let error = Partitions::parse(text).expect_err(text).to_string();
            assert!(error.starts_with(expected), "{text:?}: {error}");
        }
    }
}
