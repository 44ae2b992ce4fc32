//! Subscriptions to what happens in the subnet (`InformInfo`), and its reports to subscribers (IBA 13.4.8, 13.4.11).
//!
//! | trap | what happened |
//! |---|---|
//! | 64, 65 | a port came into service, or went out of it |
//! | 66, 67 | a multicast group was created, or deleted |
//!
//! What happened is held once for all, the last [`MAX_EVENTS`]; each subscriber has a place in that list and one report under
//! way. It is sent again after [`PATIENCE`], and given up after [`TRIES`]; whoever takes none of [`MAX_FAILURES`] reports in
//! turn is no subscriber any more. Of one that falls behind further than the list reaches, reports are lost and counted.

use alloc::collections::{BTreeMap, VecDeque};
use core::ops::Bound;
use core::time::Duration;

use super::rmpp::Client;
use super::wire::{DATA, Gid, Query, Reply, Status, attribute};
use crate::mad::{MAD_BYTES, u16_at, u64_at};
use crate::sm_info::{ADMINISTRATION, NOTICE, method};

/// Most subscribers, and most at one LID.
pub const MAX_SUBSCRIBERS: usize = 16_384;
/// See [`MAX_SUBSCRIBERS`].
pub const MAX_SUBSCRIBERS_OF_LID: usize = 8;

/// What happened and is still held.
pub const MAX_EVENTS: usize = 4_096;

/// Reports under way at a time.
pub const WINDOW: usize = 64;

/// How long a response to a report may take.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// How often a report is sent.
pub const TRIES: u32 = 3;

/// Reports in turn that a subscriber did not take, after which it is none any more.
pub const MAX_FAILURES: u32 = 5;

/// A report, and the response to one.
const REPORT: u8 = 0x06;
const REPORT_RESPONSE: u8 = REPORT | method::RESPONSE;

/// Bytes of attribute `InformInfo`.
const INFORM_INFO_BYTES: usize = 36;

/// The traps, and the number that stands for all.
const FIRST_TRAP: u16 = 64;
const LAST_TRAP: u16 = 67;
const ALL_TRAPS: u16 = 0xffff;

/// In place of a range of LIDs: all.
const ALL_LIDS: u16 = 0xffff;

/// What happened, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A port has a LID that had none.
    InService(Gid),
    /// A port is gone.
    OutOfService(Gid),
    /// A multicast group is there.
    GroupCreated(Gid),
    /// It is not any more.
    GroupDeleted(Gid),
}

impl Happening {
    /// The number of its trap.
    pub fn trap(self) -> u16 {
        match self {
            Happening::InService(_) => 64,
            Happening::OutOfService(_) => 65,
            Happening::GroupCreated(_) => 66,
            Happening::GroupDeleted(_) => 67,
        }
    }

    fn gid(self) -> Gid {
        match self {
            Happening::InService(gid) | Happening::OutOfService(gid) => gid,
            Happening::GroupCreated(gid) | Happening::GroupDeleted(gid) => gid,
        }
    }
}

/// What became of reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InformCounters {
    /// Reports that were sent, repeated ones too.
    pub sent: u64,
    /// Those that subscribers responded to.
    pub taken: u64,
    /// Those that were given up.
    pub given_up: u64,
    /// Those that subscribers who fell behind did not get.
    pub lost: u64,
    /// Subscribers that were dropped, since they took no report.
    pub dropped: u64,
    /// Responses to reports that are not under way.
    pub foreign: u64,
}

/// A report under way.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    transaction: u32,
    until: Duration,
    tries: u32,
    is_due: bool,
}

#[derive(Clone, Copy, Debug)]
struct Subscriber {
    service_level: u8,
    /// By trap, from the first on.
    wants: u8,
    /// The number of what comes next.
    next: u64,
    under_way: Option<UnderWay>,
    failures: u32,
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Subscriptions {
    /// By LID and queue pair.
    subscribers: BTreeMap<(u16, u32), Subscriber>,
    events: VecDeque<Happening>,
    /// The number of the first event that is held.
    first: u64,
    transaction: u32,
    /// The last whose turn it was.
    turn: Option<(u16, u32)>,
    /// Subscribers with a report under way.
    under_way: usize,
    /// There may be something to send.
    has_work: bool,
    counters: InformCounters,
}

impl Subscriptions {
    /// Answers a request that subscribes or ends that; `None` where it is none.
    pub fn answer(
        &mut self,
        client: Client,
        manager_lid: u16,
        mad: &[u8; MAD_BYTES],
    ) -> Option<Reply> {
        let query = Query::parse(mad)?.ok()?;
        if (query.method, query.attribute) != (method::SET, attribute::INFORM_INFO) {
            return None;
        }
        let done = self.subscribe(client, manager_lid, query.data);
        let found = done.map(|()| alloc::vec![query.data[..INFORM_INFO_BYTES].to_vec()]);
        Some(query.respond(found, 0))
    }

    fn subscribe(&mut self, client: Client, manager_lid: u16, data: &[u8]) -> Result<(), Status> {
        let (first_lid, last_lid) = (u16_at(data, 16), u16_at(data, 18));
        let (is_generic, subscribes, trap) = (data[22], data[23], u16_at(data, 26));
        let is_for_manager = u64_at(data, 0) == 0
            && u64_at(data, 8) == 0
            && (first_lid == ALL_LIDS || (first_lid..=last_lid).contains(&manager_lid));
        let wants = match trap {
            ALL_TRAPS => u8::MAX,
            FIRST_TRAP..=LAST_TRAP => 1 << (trap - FIRST_TRAP),
            _ => 0,
        };
        if is_generic != 1 || subscribes > 1 || !is_for_manager || wants == 0 {
            return Err(Status::Invalid);
        }
        let key = (client.lid, client.queue_pair);
        if subscribes == 0 {
            let subscriber = self.subscribers.get_mut(&key).ok_or(Status::Invalid)?;
            subscriber.wants &= !wants;
            if subscriber.wants == 0 {
                self.remove(key);
            }
            return Ok(());
        }
        let of_lid = self.subscribers.range((client.lid, 0)..=(client.lid, u32::MAX)).count();
        let is_full = of_lid >= MAX_SUBSCRIBERS_OF_LID || self.subscribers.len() >= MAX_SUBSCRIBERS;
        if is_full && !self.subscribers.contains_key(&key) {
            return Err(Status::NoResources);
        }
        let next = self.first + self.events.len() as u64;
        let new = Subscriber {
            service_level: client.service_level,
            wants: 0,
            next,
            under_way: None,
            failures: 0,
        };
        self.subscribers.entry(key).or_insert(new).wants |= wants;
        Ok(())
    }

    /// Something has happened.
    pub fn happen(&mut self, what: Happening) {
        if self.subscribers.is_empty() {
            return;
        }
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
            self.first += 1;
        }
        self.events.push_back(what);
        self.has_work = true;
    }

    /// Forgets subscribers whose LID is nobody's any more.
    pub fn keep(&mut self, is_there: impl Fn(u16) -> bool) {
        let gone = self.subscribers.keys().filter(|(lid, _)| !is_there(*lid));
        let gone: alloc::vec::Vec<(u16, u32)> = gone.copied().collect();
        gone.into_iter().for_each(|key| self.remove(key));
    }

    /// Forgets all subscribers.
    pub fn clear(&mut self) {
        let (counters, transaction) = (self.counters, self.transaction);
        *self = Subscriptions { counters, transaction, ..Subscriptions::default() };
    }

    /// How many subscribers there are.
    pub fn count(&self) -> usize {
        self.subscribers.len()
    }

    /// What became of reports.
    pub fn counters(&self) -> InformCounters {
        self.counters
    }

    /// Whether a datagram is the response to a report.
    pub fn is_response(mad: &[u8; MAD_BYTES]) -> bool {
        mad[3] == REPORT_RESPONSE
    }

    /// The response to a report has arrived.
    pub fn handle_response(&mut self, client: Client, mad: &[u8; MAD_BYTES]) {
        // The upper half of a transaction belongs to the operating system.
        let transaction = u64_at(mad, 8) as u32;
        let subscriber = self.subscribers.get_mut(&(client.lid, client.queue_pair));
        let is_meant =
            |one: &Subscriber| one.under_way.is_some_and(|own| own.transaction == transaction);
        let Some(subscriber) = subscriber.filter(|one| is_meant(one)) else {
            self.counters.foreign += 1;
            return;
        };
        (subscriber.under_way, subscriber.failures) = (None, 0);
        subscriber.next += 1;
        self.under_way -= 1;
        self.has_work = true;
        self.counters.taken += 1;
    }

    /// Whether there may be a report to send.
    pub fn has_work(&self) -> bool {
        self.has_work
    }

    /// The next report to send; `issuer` is the port of the manager.
    pub fn poll_transmit(
        &mut self,
        now: Duration,
        issuer: (u16, Gid),
    ) -> Option<(Client, [u8; MAD_BYTES])> {
        let after = self.turn.map_or(Bound::Unbounded, Bound::Excluded);
        let keys = self.subscribers.range((after, Bound::Unbounded)).chain(self.subscribers.iter());
        let room = self.under_way < WINDOW;
        let end = self.first + self.events.len() as u64;
        let is_ready = |one: &Subscriber| match one.under_way {
            Some(own) => own.is_due,
            None => room && one.next < end,
        };
        let keys: alloc::vec::Vec<(u16, u32)> =
            keys.filter(|(_, one)| is_ready(one)).map(|(key, _)| *key).collect();
        let report = keys.into_iter().find_map(|key| self.report(now, key, issuer));
        self.has_work = report.is_some();
        report
    }

    /// Sends what comes next for a subscriber, if it wants something of it.
    fn report(
        &mut self,
        now: Duration,
        key: (u16, u32),
        (issuer_lid, issuer): (u16, Gid),
    ) -> Option<(Client, [u8; MAD_BYTES])> {
        let subscriber = self.subscribers.get_mut(&key)?;
        self.counters.lost += self.first.saturating_sub(subscriber.next);
        subscriber.next = subscriber.next.max(self.first);
        let what = loop {
            let what = *self.events.get((subscriber.next - self.first) as usize)?;
            if subscriber.wants & 1 << (what.trap() - FIRST_TRAP) != 0 {
                break what;
            }
            subscriber.next += 1;
        };
        let until = now + PATIENCE;
        let under_way = match subscriber.under_way {
            Some(own) => UnderWay { until, is_due: false, ..own },
            None => {
                self.transaction = self.transaction.wrapping_add(1).max(1);
                self.under_way += 1;
                UnderWay { transaction: self.transaction, until, tries: 1, is_due: false }
            }
        };
        subscriber.under_way = Some(under_way);
        self.turn = Some(key);
        self.counters.sent += 1;
        let mut mad = [0; MAD_BYTES];
        mad[..4].copy_from_slice(&[1, ADMINISTRATION, 2, REPORT]);
        mad[12..16].copy_from_slice(&under_way.transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&NOTICE.to_be_bytes());
        // Generic, of subnet management; from a class manager.
        let notice = &mut mad[DATA..];
        notice[..4].copy_from_slice(&[0x83, 0, 0, 4]);
        notice[4..6].copy_from_slice(&what.trap().to_be_bytes());
        notice[6..8].copy_from_slice(&issuer_lid.to_be_bytes());
        what.gid().put(notice, 16);
        issuer.put(notice, 64);
        let client =
            Client { lid: key.0, queue_pair: key.1, service_level: subscriber.service_level };
        Some((client, mad))
    }

    /// When [`handle_timeout`](Subscriptions::handle_timeout) is wanted next.
    pub fn poll_timeout(&self) -> Option<Duration> {
        if self.under_way == 0 {
            return None;
        }
        let open = self.subscribers.values().filter_map(|one| one.under_way);
        open.filter(|own| !own.is_due).map(|own| own.until).min()
    }

    /// Time has passed: reports without a response are sent again, or given up.
    pub fn handle_timeout(&mut self, now: Duration) {
        if self.under_way == 0 {
            return;
        }
        let mut dropped = alloc::vec::Vec::new();
        self.has_work = true;
        for (key, subscriber) in &mut self.subscribers {
            let Some(own) =
                subscriber.under_way.as_mut().filter(|own| own.until <= now && !own.is_due)
            else {
                continue;
            };
            if own.tries < TRIES {
                (own.tries, own.is_due) = (own.tries + 1, true);
                continue;
            }
            subscriber.under_way = None;
            subscriber.next += 1;
            subscriber.failures += 1;
            self.under_way -= 1;
            self.counters.given_up += 1;
            if subscriber.failures >= MAX_FAILURES {
                dropped.push(*key);
            }
        }
        self.counters.dropped += dropped.len() as u64;
        dropped.into_iter().for_each(|key| self.remove(key));
    }

    fn remove(&mut self, key: (u16, u32)) {
        let removed = self.subscribers.remove(&key);
        self.under_way -= usize::from(removed.is_some_and(|one| one.under_way.is_some()));
    }
}
