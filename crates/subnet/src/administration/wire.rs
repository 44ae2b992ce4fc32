//! Datagrams of subnet administration (IBA 15.2): the header, and the records that are asked for.
//!
//! A response is one datagram, or a table of several for the reliable multi-packet protocol (RMPP,
//! [`super::rmpp`]).

use alloc::vec::Vec;

use crate::mad::{DEFAULT_PREFIX, MAD_BYTES, u16_at, u64_at};
use crate::sm_info::{ADMINISTRATION, method};

/// The version of the class.
const VERSION: u8 = 2;

/// Where the data of a datagram begins.
pub(super) const DATA: usize = 56;

/// The key of the subnet manager at byte 36, the offset at 44, the component mask at 48.
pub(super) const SM_KEY: usize = 36;
const OFFSET: usize = 44;
const COMPONENTS: usize = 48;

/// Methods beside Get and Set.
pub(crate) const GET_TABLE: u8 = 0x12;
pub(crate) const DELETE: u8 = 0x15;

/// Attributes (IBA table 188).
pub(crate) mod attribute {
    pub(crate) const CLASS_PORT_INFO: u16 = 0x01;
    pub(crate) const INFORM_INFO: u16 = 0x03;
    pub(crate) const NODE_RECORD: u16 = 0x11;
    pub(crate) const PORT_INFO_RECORD: u16 = 0x12;
    pub(crate) const SM_INFO_RECORD: u16 = 0x18;
    pub(crate) const PATH_RECORD: u16 = 0x35;
    pub(crate) const MULTICAST_MEMBER: u16 = 0x38;
}

/// Why a request is refused: the status of its response (IBA 13.4.7, table 187).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// The class version is another.
    BadVersion,
    /// The method is not for this attribute, or not supported.
    Unsupported,
    /// There is no room for it.
    NoResources,
    /// It makes no sense.
    Invalid,
    /// Nothing matches.
    NoRecords,
    /// More matches than one, where one was asked for.
    TooMany,
    /// A GID is none of the subnet.
    BadGid,
    /// What it says is not enough.
    Insufficient,
    /// It is not allowed.
    Denied,
}

impl Status {
    /// Its number.
    pub fn code(self) -> u16 {
        match self {
            Status::BadVersion => 0x04,
            Status::Unsupported => 0x0c,
            Status::NoResources => 0x0100,
            Status::Invalid => 0x0200,
            Status::NoRecords => 0x0300,
            Status::TooMany => 0x0400,
            Status::BadGid => 0x0500,
            Status::Insufficient => 0x0600,
            Status::Denied => 0x0700,
        }
    }
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query<'a> {
    pub(crate) mad: &'a [u8; MAD_BYTES],
    pub(crate) method: u8,
    pub(crate) attribute: u16,
    components: u64,
    pub(crate) data: &'a [u8],
}

impl<'a> Query<'a> {
    /// `None` for what is no request: acknowledgements of RMPP, responses, reports.
    pub(crate) fn parse(mad: &'a [u8; MAD_BYTES]) -> Option<Result<Query<'a>, Status>> {
        let [base, class, version, method, ..] = *mad;
        let is_segment = mad[26] & 1 != 0 && mad[25] != 1;
        if base != 1 || class != ADMINISTRATION || method & method::RESPONSE != 0 || is_segment {
            return None;
        }
        if version != VERSION {
            return Some(Err(Status::BadVersion));
        }
        let (attribute, components) = (u16_at(mad, 16), u64_at(mad, COMPONENTS));
        Some(Ok(Query { mad, method, attribute, components, data: &mad[DATA..] }))
    }

    /// Whether a component is given.
    pub(crate) fn has(&self, component: u8) -> bool {
        self.components & 1 << component != 0
    }

    /// Whether only these components are given.
    pub(crate) fn has_only(&self, components: &[u8]) -> bool {
        let known = components.iter().fold(0_u64, |mask, bit| mask | 1 << bit);
        self.components & !known == 0
    }

    /// A component of two bytes, if it is given.
    pub(crate) fn short(&self, component: u8, at: usize) -> Option<u16> {
        self.has(component).then(|| u16_at(self.data, at))
    }

    /// One of a byte.
    pub(crate) fn byte(&self, component: u8, at: usize) -> Option<u8> {
        self.has(component).then(|| self.data[at])
    }

    /// One of eight bytes.
    pub(crate) fn long(&self, component: u8, at: usize) -> Option<u64> {
        self.has(component).then(|| u64_at(self.data, at))
    }

    /// A GID.
    pub(crate) fn gid(&self, component: u8, at: usize) -> Option<Gid> {
        self.has(component).then(|| Gid::at(self.data, at))
    }

    /// The response to what was found. A table has `room` for so many bytes if it takes more than a
    /// datagram.
    pub(crate) fn respond(&self, found: Result<Vec<Vec<u8>>, Status>, room: usize) -> Reply {
        let is_table = self.method == GET_TABLE;
        let found = found.and_then(|records| match records.len() {
            0 if !is_table => Err(Status::NoRecords),
            count if count > 1 && !is_table => Err(Status::TooMany),
            _ => {
                let bytes: usize = records.iter().map(Vec::len).sum();
                let fits = bytes <= MAD_BYTES - DATA || bytes <= room;
                if fits { Ok(records) } else { Err(Status::NoResources) }
            }
        });
        let (mut mad, mut len) = (*self.mad, MAD_BYTES);
        mad[3] = self.method | method::RESPONSE;
        if self.method == method::SET {
            mad[3] = method::GET | method::RESPONSE;
        }
        mad[24..SM_KEY].fill(0);
        match found {
            Err(status) => mad[4..6].copy_from_slice(&status.code().to_be_bytes()),
            Ok(records) => {
                mad[4..6].fill(0);
                mad[DATA..].fill(0);
                let size = records.first().map_or(0, Vec::len);
                mad[OFFSET..OFFSET + 2].copy_from_slice(&((size / 8) as u16).to_be_bytes());
                if records.len() * size > MAD_BYTES - DATA {
                    let mut header = [0; DATA];
                    header.copy_from_slice(&mad[..DATA]);
                    return Reply::Table(Table { header, records: records.concat() });
                }
                for (at, record) in records.iter().enumerate() {
                    let at = DATA + at * size;
                    mad[at..at + size].copy_from_slice(record);
                }
                if is_table {
                    len = DATA + records.len() * size;
                    single_segment(&mut mad, len);
                }
            }
        }
        Reply::Datagram(mad, len)
    }
}

/// What a request gets.
#[derive(Clone, Debug)]
pub enum Reply {
    /// A datagram, and how many of its bytes are sent.
    Datagram([u8; MAD_BYTES], usize),
    /// A table of several.
    Table(Table),
}

/// A response of more than one datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The header of every segment, with that of subnet administration.
    pub header: [u8; DATA],
    /// The records.
    pub records: Vec<u8>,
}

/// A header of RMPP that says: this is the first segment, and the last.
fn single_segment(mad: &mut [u8; MAD_BYTES], len: usize) {
    // Version, type "data", no response time, the flags active, first and last.
    mad[24..28].copy_from_slice(&[1, 1, 0xf8 | 7, 0]);
    mad[28..32].copy_from_slice(&1_u32.to_be_bytes());
    mad[32..36].copy_from_slice(&((len - SM_KEY) as u32).to_be_bytes());
}

/// The response to what is no query at all.
pub(crate) fn refuse(mad: &[u8; MAD_BYTES], status: Status) -> [u8; MAD_BYTES] {
    let mut mad = *mad;
    mad[3] |= method::RESPONSE;
    mad[4..6].copy_from_slice(&status.code().to_be_bytes());
    mad
}

/// A GID: the prefix of the subnet and a GUID, or a multicast address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gid {
    /// The first half.
    pub prefix: u64,
    /// The second.
    pub interface: u64,
}

impl Gid {
    /// Of a port.
    pub fn of(guid: u64) -> Gid {
        Gid { prefix: DEFAULT_PREFIX, interface: guid }
    }

    pub(crate) fn at(data: &[u8], at: usize) -> Gid {
        Gid { prefix: u64_at(data, at), interface: u64_at(data, at + 8) }
    }

    pub(crate) fn put(self, data: &mut [u8], at: usize) {
        data[at..at + 8].copy_from_slice(&self.prefix.to_be_bytes());
        data[at + 8..at + 16].copy_from_slice(&self.interface.to_be_bytes());
    }

    /// Whether it is a multicast address.
    pub fn is_multicast(self) -> bool {
        self.prefix >> 56 == 0xff
    }
}
