//! Records of a log, and the bytes of what they hold. Each value is written and read by one line of
//! a table below; what it means is not known here.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::entry::{Answered, Change, Entry, Held, Label, MAX_RESTORED, Moved, Outcome, Refused};
use super::error::{LogError, VERSION};
use crate::demand::{Abstraction, Order};
use crate::job::Job;
use crate::loads::Piece;
use crate::outage::Names;
use crate::queues::Dscp;
use crate::runs::Run;

pub(super) const HEADER_BYTES: usize = 12;
pub(super) const BATCH: u16 = 0;
pub(super) const SNAPSHOT: u16 = 1;

/// In the number of nodes that are down: there is a list of carriers behind that of links.
const HAS_CARRIERS: u32 = 1 << 31;

/// Orders by the byte that stands for them.
const ORDERS: [Order; 4] = [Order::Ranks, Order::Across, Order::Mixed, Order::ServersFirst];

/// What has a place in a record.
pub(super) trait Wire: Sized {
    /// Most of them in a list.
    const MOST: usize = usize::MAX;

    fn put(&self, body: &mut Vec<u8>);

    /// Takes one from the front; `None` where too few bytes are left or the value is impossible.
    fn get(bytes: &mut &[u8]) -> Option<Self>;
}

macro_rules! integers {
    ($($type:ty, $most:expr;)*) => {
        $(impl Wire for $type {
            const MOST: usize = $most;

            fn put(&self, body: &mut Vec<u8>) {
                body.extend_from_slice(&self.to_le_bytes());
            }

            fn get(bytes: &mut &[u8]) -> Option<Self> {
                let (taken, rest) = bytes.split_first_chunk()?;
                *bytes = rest;
                Some(<$type>::from_le_bytes(*taken))
            }
        })*
    };
}

/// Values by their fields, in order.
macro_rules! fields {
    ($($type:ident { $($field:ident),* })*) => {
        $(impl Wire for $type {
            fn put(&self, body: &mut Vec<u8>) {
                $(self.$field.put(body);)*
            }

            fn get(bytes: &mut &[u8]) -> Option<Self> {
                Some($type { $($field: Wire::get(bytes)?),* })
            }
        })*
    };
}

/// Variants by the byte that stands for them, and their fields in order.
macro_rules! variants {
    ($($type:ident { $($tag:literal => $variant:ident { $($field:tt: $name:ident),* })* })*) => {
        $(impl Wire for $type {
            fn put(&self, body: &mut Vec<u8>) {
                match self {
                    $($type::$variant { $($field: $name),* } => {
                        body.push($tag);
                        $($name.put(body);)*
                    })*
                }
            }

            fn get(bytes: &mut &[u8]) -> Option<Self> {
                Some(match u8::get(bytes)? {
                    $($tag => $type::$variant { $($field: Wire::get(bytes)?),* },)*
                    _ => return None,
                })
            }
        })*
    };
}

/// Values that something else stands for.
macro_rules! by {
    ($($type:ty: $of:ty, $put:expr, $get:expr;)*) => {
        $(impl Wire for $type {
            fn put(&self, body: &mut Vec<u8>) {
                let put: fn(&$type) -> $of = $put;
                put(self).put(body);
            }

            fn get(bytes: &mut &[u8]) -> Option<Self> {
                let get: fn($of) -> Option<$type> = $get;
                get(Wire::get(bytes)?)
            }
        })*
    };
}

// Lists of long integers are those of jobs that have their guarantee again.
integers! {
    u8, usize::MAX;
    u16, usize::MAX;
    u32, usize::MAX;
    u64, MAX_RESTORED;
}

by! {
    bool: u8, |is_so| u8::from(*is_so), |byte| Some(byte != 0);
    Dscp: u8, |dscp| dscp.value(), |value| Dscp::new(value).ok();
    Job: String, ToString::to_string, |text| text.parse().ok();
    Abstraction: u8, |one| place_in(&Abstraction::ALL, *one), |at| Abstraction::ALL.get(usize::from(at)).copied();
    Order: u8, |one| place_in(&ORDERS, *one), |at| ORDERS.get(usize::from(at)).copied();
    Refused: String, |refused| refused.text.clone(), |text| Some(text.into());
}

fields! {
    Label { name, owner }
    Run { first, end }
    Piece { host, run }
    Held { label, dscp, job, abstraction, order, pieces }
    Moved { job, dscp, order, pieces }
    Entry { client, sequence, change }
    Answered { sequence, index, outcome }
    Batch { term, first, entries }
}

variants! {
    Change {
        0 => Lead { hosts: hosts }
        1 => Admit { 0: held }
        2 => Release { job: job, restored: restored }
        3 => Refuse { 0: reason }
        4 => Outage { down: down, moved: moved, degraded: degraded }
        5 => Move { 0: moved }
        6 => Mark { 0: job, 1: dscp }
        7 => Moves { moved: moved, degraded: degraded }
        8 => Degrade { 0: job }
    }
    Outcome {
        0 => Admitted { 0: job }
        1 => Released { job: job, restored: restored }
        2 => Refused { 0: refused }
        3 => Repaired { hit: hit, moved: moved, degraded: degraded }
    }
}

fn place_in<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).unwrap_or(usize::MAX) as u8
}

impl Wire for String {
    fn put(&self, body: &mut Vec<u8>) {
        (self.len() as u32).put(body);
        body.extend_from_slice(self.as_bytes());
    }

    fn get(bytes: &mut &[u8]) -> Option<Self> {
        let length = u32::get(bytes)? as usize;
        let (text, rest) = bytes.split_at_checked(length)?;
        *bytes = rest;
        core::str::from_utf8(text).ok().map(ToString::to_string)
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, body: &mut Vec<u8>) {
        self.0.put(body);
        self.1.put(body);
    }

    fn get(bytes: &mut &[u8]) -> Option<Self> {
        Some((A::get(bytes)?, B::get(bytes)?))
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, body: &mut Vec<u8>) {
        (self.len() as u32).put(body);
        self.iter().for_each(|one| one.put(body));
    }

    fn get(bytes: &mut &[u8]) -> Option<Self> {
        let count = u32::get(bytes)?;
        list(count, bytes)
    }
}

fn list<T: Wire>(count: u32, bytes: &mut &[u8]) -> Option<Vec<T>> {
    (count as usize <= T::MOST).then(|| (0..count).map(|_| T::get(bytes)).collect())?
}

impl Wire for Names {
    fn put(&self, body: &mut Vec<u8>) {
        let flag = if self.carriers.is_empty() { 0 } else { HAS_CARRIERS };
        (self.nodes.len() as u32 | flag).put(body);
        self.nodes.iter().for_each(|name| name.put(body));
        self.links.put(body);
        if flag != 0 {
            self.carriers.put(body);
        }
    }

    fn get(bytes: &mut &[u8]) -> Option<Self> {
        let count = u32::get(bytes)?;
        let (nodes, links) = (list(count & !HAS_CARRIERS, bytes)?, Wire::get(bytes)?);
        let carriers = if count & HAS_CARRIERS == 0 { Vec::new() } else { Wire::get(bytes)? };
        Some(Names { nodes, links, carriers })
    }
}

/// What takes all of the bytes.
pub(super) fn all_of<T: Wire>(mut bytes: &[u8]) -> Option<T> {
    let value = T::get(&mut bytes)?;
    bytes.is_empty().then_some(value)
}

/// Entries that are written as one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The term of the leader that writes it.
    pub term: u64,
    /// The index of its first entry.
    pub first: u64,
    /// The entries.
    pub entries: Vec<Entry>,
}

impl Batch {
    /// Its record.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        self.put(&mut body);
        record(BATCH, &body)
    }
}

/// The batches of a log, up to the first record that is not whole: to look at, not to recover from.
pub fn batches(log: &[u8]) -> Vec<Batch> {
    let (mut batches, mut at) = (Vec::new(), 0);
    while let Some((_, body)) = whole(&log[at..]) {
        batches.extend(all_of::<Batch>(body));
        at += HEADER_BYTES + body.len();
    }
    batches
}

pub(super) struct Header {
    version: u16,
    kind: u16,
}

impl Header {
    /// Whether the record at byte `at` is of this version and of a kind.
    pub(super) fn check(&self, at: usize, kind: u16) -> Result<(), LogError> {
        match (self.version, self.kind) {
            (VERSION, own) if own == kind => Ok(()),
            (VERSION, _) => Err(LogError::Malformed { at }),
            (found, _) => Err(LogError::Version { at, found }),
        }
    }
}

pub(super) fn record(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(HEADER_BYTES + body.len());
    (body.len() as u32).put(&mut record);
    VERSION.put(&mut record);
    kind.put(&mut record);
    checksum(&record, body).put(&mut record);
    record.extend_from_slice(body);
    record
}

fn checksum(head: &[u8], body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(head);
    crc.update(body);
    crc.finalize()
}

/// The first record of `bytes`, of any version, if it is whole and its CRC is right.
pub(super) fn whole(bytes: &[u8]) -> Option<(Header, &[u8])> {
    let mut rest = bytes;
    let length = u32::get(&mut rest)? as usize;
    let header = Header { version: u16::get(&mut rest)?, kind: u16::get(&mut rest)? };
    let crc = u32::get(&mut rest)?;
    // No body is empty: bytes that are all 0 are no record.
    let body = rest.get(..length).filter(|body| !body.is_empty())?;
    (checksum(&bytes[..8], body) == crc).then_some((header, body))
}
