//! Tables that do not fit into a datagram: the sender of the reliable multi-packet protocol (RMPP,
//! IBA 13.6).
//!
//! | what happens | what the sender does |
//! |---|---|
//! | a table is to be sent | sends its first segment |
//! | an ACK opens the window | sends segments up to its end, [`MAX_WINDOW`] at most |
//! | no ACK for [`PATIENCE`] | sends again from the first segment that was not acknowledged; after [`TRIES`] it aborts |
//! | an ACK that cannot be | aborts, with the reason in the status |
//! | STOP or ABORT | forgets the table |
//! | [`LIFETIME`] is over | aborts |
//!
//! What is held is bounded by [`MAX_TABLES`], [`MAX_TABLES_OF_PORT`] and [`MAX_BYTES`], whatever
//! clients do.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::ops::{Bound, RangeInclusive};
use core::time::Duration;

use super::wire::{DATA, SM_KEY, Table};
use crate::mad::{MAD_BYTES, u64_at};

/// Bytes of records in a segment.
const SEGMENT: usize = MAD_BYTES - DATA;

/// Bytes of a segment that count as its payload: the header of subnet administration, and records.
const PAYLOAD: usize = MAD_BYTES - SM_KEY;

/// Segments that are under way at most, whatever window a client opens.
pub const MAX_WINDOW: u32 = 64;

/// How long an ACK may take.
pub const PATIENCE: Duration = Duration::from_millis(500);

/// How often segments are sent for which no ACK comes.
pub const TRIES: u32 = 8;

/// How long a table may take.
pub const LIFETIME: Duration = Duration::from_secs(60);

/// Most tables under way, and most to one port, whatever number of LIDs it has.
pub const MAX_TABLES: usize = 64;
/// See [`MAX_TABLES`].
pub const MAX_TABLES_OF_PORT: usize = 4;

/// Most bytes of all tables under way: four of all nodes of the largest fabric.
pub const MAX_BYTES: usize = 24 << 20;

/// Most of them to one port, so that it leaves some to others.
pub const MAX_BYTES_OF_PORT: usize = MAX_BYTES / 2;

/// Types of RMPP packets (IBA table 121).
const DATA_PACKET: u8 = 1;
const ACK: u8 = 2;
const STOP: u8 = 3;
const ABORT: u8 = 4;

/// The flags: active, first and last.
const ACTIVE: u8 = 1;
const FIRST: u8 = 2;
const LAST: u8 = 4;

/// No response time is given.
const NO_TIME: u8 = 0x1f << 3;

/// Why a transfer ends: the status of an ABORT (IBA table 124).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Reason {
    TooLong = 118,
    BadType = 121,
    WindowTooSmall = 122,
    SegmentTooBig = 123,
    Version = 125,
    TooManyTries = 126,
}

/// Who asked for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its LID.
    pub lid: u16,
    /// Its queue pair.
    pub queue_pair: u32,
    /// The service level by which it asked.
    pub service_level: u8,
}

/// What happened to tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RmppCounters {
    /// Tables that were sent to their end.
    pub sent: u64,
    /// Segments, repeated ones too.
    pub segments: u64,
    /// Segments that were sent again.
    pub repeated: u64,
    /// Tables that clients gave up by STOP or ABORT.
    pub given_up: u64,
    /// Tables that were aborted, since no ACK came.
    pub unacknowledged: u64,
    /// Tables that were aborted since an ACK made no sense.
    pub senseless: u64,
    /// ACKs of tables that are not under way, and those that came twice.
    pub foreign: u64,
}

/// By LID, queue pair and transaction.
type Key = (u16, u32, u64);

/// A table under way.
#[derive(Clone, Debug)]
struct Transfer {
    client: Client,
    table: Table,
    segments: u32,
    /// All segments up to this one have arrived.
    acknowledged: u32,
    /// The last segment that may be sent.
    window_last: u32,
    /// The next segment to be sent, and the last that was.
    next: u32,
    highest: u32,
    /// Since the last ACK that brought anything.
    tries: u32,
    until: Duration,
    ends: Duration,
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Sender {
    transfers: BTreeMap<Key, Transfer>,
    aborts: VecDeque<(Client, [u8; MAD_BYTES])>,
    /// The last whose turn it was.
    turn: Option<Key>,
    bytes: usize,
    counters: RmppCounters,
}

fn key(client: Client, transaction: u64) -> Key {
    (client.lid, client.queue_pair, transaction)
}

fn word(mad: &[u8; MAD_BYTES], at: usize) -> u32 {
    u32::from_be_bytes([mad[at], mad[at + 1], mad[at + 2], mad[at + 3]])
}

impl Sender {
    /// Whether a datagram belongs to a table under way: anything of RMPP but a request that is its
    /// own only segment.
    pub fn is_meant(mad: &[u8; MAD_BYTES]) -> bool {
        mad[26] & ACTIVE != 0 && mad[25] != DATA_PACKET
    }

    /// Whether a request repeats one whose table is under way.
    pub fn is_under_way(&self, client: Client, mad: &[u8; MAD_BYTES]) -> bool {
        self.transfers.contains_key(&key(client, u64_at(mad, 8)))
    }

    /// Bytes of records that a table for a port with these LIDs may have; 0 if none is sent now.
    pub fn room(&self, lids: RangeInclusive<u16>) -> usize {
        let of_port = (*lids.start(), 0, 0)..=(*lids.end(), u32::MAX, u64::MAX);
        let (mut count, mut bytes) = (0, 0);
        for transfer in self.transfers.range(of_port).map(|(_, transfer)| transfer) {
            count += 1;
            bytes += transfer.table.records.len();
        }
        let is_full = self.transfers.len() >= MAX_TABLES || count >= MAX_TABLES_OF_PORT;
        let own = MAX_BYTES_OF_PORT.saturating_sub(bytes);
        if is_full { 0 } else { own.min(MAX_BYTES.saturating_sub(self.bytes)) }
    }

    /// Begins to send a table that there is room for.
    pub fn send(&mut self, now: Duration, client: Client, table: Table) {
        let transfer = Transfer {
            client,
            segments: table.records.len().div_ceil(SEGMENT).max(1) as u32,
            acknowledged: 0,
            window_last: 1,
            next: 1,
            highest: 0,
            tries: 0,
            until: now + PATIENCE,
            ends: now + LIFETIME,
            table,
        };
        let key = key(client, u64_at(&transfer.table.header, 8));
        self.bytes += transfer.table.records.len();
        if let Some(before) = self.transfers.insert(key, transfer) {
            self.bytes -= before.table.records.len();
        }
    }

    /// Forgets all tables.
    pub fn clear(&mut self) {
        *self = Sender { counters: self.counters, ..Sender::default() };
    }

    /// What happened so far.
    pub fn counters(&self) -> RmppCounters {
        self.counters
    }

    /// Tables under way.
    pub fn count(&self) -> usize {
        self.transfers.len()
    }

    /// A datagram that [`is_meant`](Sender::is_meant) has arrived.
    pub fn handle(&mut self, now: Duration, client: Client, mad: &[u8; MAD_BYTES]) {
        let key = key(client, u64_at(mad, 8));
        let Some(transfer) = self.transfers.get_mut(&key) else {
            self.counters.foreign += 1;
            return;
        };
        let (version, kind) = (mad[24], mad[25]);
        let wrong = match (version, kind) {
            (1, ACK) => match transfer.acknowledge(now, word(mad, 28), word(mad, 32)) {
                Ok(true) => None,
                Ok(false) => {
                    self.counters.foreign += 1;
                    None
                }
                Err(reason) => Some(reason),
            },
            (1, STOP | ABORT) => {
                self.counters.given_up += 1;
                self.remove(key);
                return;
            }
            (1, _) => Some(Reason::BadType),
            _ => Some(Reason::Version),
        };
        if let Some(reason) = wrong {
            self.counters.senseless += 1;
            self.abort(key, reason);
        } else if self.transfers.get(&key).is_some_and(Transfer::is_over) {
            self.counters.sent += 1;
            self.remove(key);
        }
    }

    /// The next datagram to send.
    pub fn poll_transmit(&mut self, now: Duration) -> Option<(Client, [u8; MAD_BYTES], usize)> {
        if let Some((client, mad)) = self.aborts.pop_front() {
            return Some((client, mad, MAD_BYTES));
        }
        // Each table in turn.
        let after = self.turn.map_or(Bound::Unbounded, Bound::Excluded);
        let ready = |(_, transfer): &(&Key, &Transfer)| transfer.is_ready();
        let next = self.transfers.range((after, Bound::Unbounded)).find(ready);
        let key = *next.or_else(|| self.transfers.iter().find(ready))?.0;
        self.turn = Some(key);
        let transfer = self.transfers.get_mut(&key)?;
        self.counters.segments += 1;
        self.counters.repeated += u64::from(transfer.next <= transfer.highest);
        let (mad, len) = transfer.segment(now);
        Some((transfer.client, mad, len))
    }

    /// When [`handle_timeout`](Sender::handle_timeout) is wanted next.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.transfers.values().map(|transfer| transfer.until.min(transfer.ends)).min()
    }

    /// Time has passed: segments without an ACK are sent again, or their table is aborted.
    pub fn handle_timeout(&mut self, now: Duration) {
        let late = self.transfers.iter().filter(|(_, one)| one.until.min(one.ends) <= now);
        let late: Vec<Key> = late.map(|(key, _)| *key).collect();
        for key in late {
            let Some(transfer) = self.transfers.get_mut(&key) else {
                continue;
            };
            transfer.tries += 1;
            if transfer.ends <= now || transfer.tries >= TRIES {
                let is_too_long = transfer.ends <= now;
                let reason = if is_too_long { Reason::TooLong } else { Reason::TooManyTries };
                self.counters.unacknowledged += 1;
                self.abort(key, reason);
            } else {
                transfer.next = transfer.acknowledged + 1;
                transfer.until = now + PATIENCE;
            }
        }
    }

    fn abort(&mut self, key: Key, reason: Reason) {
        let Some(transfer) = self.remove(key) else {
            return;
        };
        let mut mad = [0; MAD_BYTES];
        mad[..DATA].copy_from_slice(&transfer.table.header);
        mad[24..28].copy_from_slice(&[1, ABORT, NO_TIME | ACTIVE, reason as u8]);
        if self.aborts.len() < MAX_TABLES {
            self.aborts.push_back((transfer.client, mad));
        }
    }

    fn remove(&mut self, key: Key) -> Option<Transfer> {
        let transfer = self.transfers.remove(&key)?;
        self.bytes -= transfer.table.records.len();
        Some(transfer)
    }
}

impl Transfer {
    fn is_over(&self) -> bool {
        self.acknowledged >= self.segments
    }

    /// Whether a segment may be sent now.
    fn is_ready(&self) -> bool {
        let most = self.acknowledged.saturating_add(MAX_WINDOW);
        self.next <= self.segments.min(self.window_last).min(most)
    }

    /// All segments up to one have arrived, and those up to the end of a window may be sent.
    /// Whether that is news.
    fn acknowledge(
        &mut self,
        now: Duration,
        segment: u32,
        window_last: u32,
    ) -> Result<bool, Reason> {
        if segment > self.highest {
            return Err(Reason::SegmentTooBig);
        }
        if window_last < segment {
            return Err(Reason::WindowTooSmall);
        }
        if segment < self.acknowledged {
            return Ok(false);
        }
        let is_news = segment > self.acknowledged || window_last > self.window_last;
        if is_news {
            (self.tries, self.until) = (0, now + PATIENCE);
        }
        self.acknowledged = segment;
        self.next = self.next.max(segment.saturating_add(1));
        self.window_last = self.window_last.max(window_last);
        Ok(is_news)
    }

    /// The next segment, and how many of its bytes are sent.
    fn segment(&mut self, now: Duration) -> ([u8; MAD_BYTES], usize) {
        let number = self.next;
        let at = (number as usize - 1) * SEGMENT;
        let records = &self.table.records[at..self.table.records.len().min(at + SEGMENT)];
        let mut mad = [0; MAD_BYTES];
        mad[..DATA].copy_from_slice(&self.table.header);
        mad[DATA..DATA + records.len()].copy_from_slice(records);
        let (mut flags, mut length) = (ACTIVE, 0);
        if number == self.segments {
            (flags, length) = (flags | LAST, PAYLOAD - SEGMENT + records.len());
        }
        if number == 1 {
            // Of all segments, with the header that each of them has.
            let headers = self.segments as usize * (PAYLOAD - SEGMENT);
            (flags, length) = (flags | FIRST, headers + self.table.records.len());
        }
        mad[24..28].copy_from_slice(&[1, DATA_PACKET, NO_TIME | flags, 0]);
        mad[28..32].copy_from_slice(&number.to_be_bytes());
        mad[32..36].copy_from_slice(&(length as u32).to_be_bytes());
        self.highest = self.highest.max(number);
        self.next = number + 1;
        self.until = now + PATIENCE;
        (mad, DATA + records.len())
    }
}
