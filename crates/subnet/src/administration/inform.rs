//! Subscriptions to what happens in the subnet (`InformInfo`), and its reports to subscribers (IBA
//! 13.4.8, 13.4.11).
//!
//! | trap | what happened |
//! |---|---|
//! | 64, 65 | a port came into service, or went out of it |
//! | 66, 67 | a multicast group was created, or deleted |
//!
//! What happened is held once for all, the last [`MAX_EVENTS`] of ports and as many of groups, so
//! that whoever makes groups come and go drives no port out. Each subscriber has a place in both
//! lists and one report under way, those of ports first. It is sent again after [`PATIENCE`], and
//! given up after [`TRIES`] or when its subscription ends; whoever takes none of [`MAX_FAILURES`]
//! reports in turn is no subscriber any more. Of one that falls behind further than the list
//! reaches, reports are lost and counted. While nothing happens, subscribers cost nothing but their
//! places.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::ops::{Bound, RangeInclusive};
use core::time::Duration;

use super::rmpp::Client;
use super::wire::{DATA, Gid, Query, Reply, Status, attribute};
use crate::mad::{MAD_BYTES, u16_at, u64_at};
use crate::sm_info::{ADMINISTRATION, NOTICE, method};

/// Most subscribers, and most at one port, whatever number of LIDs it has.
pub const MAX_SUBSCRIBERS: usize = 16_384;
/// See [`MAX_SUBSCRIBERS`].
pub const MAX_SUBSCRIBERS_OF_PORT: usize = 8;

/// What happened to ports and is still held, and the same of groups.
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

    fn is_among(self, wants: u8) -> bool {
        wants & 1 << (self.trap() - FIRST_TRAP) != 0
    }

    /// Its list.
    fn subject(self) -> usize {
        usize::from(matches!(self, Happening::GroupCreated(_) | Happening::GroupDeleted(_)))
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
    what: Happening,
    transaction: u32,
    until: Duration,
    tries: u32,
    is_due: bool,
}

/// A LID and a queue pair.
type Key = (u16, u32);

#[derive(Clone, Copy, Debug)]
struct Subscriber {
    service_level: u8,
    /// By trap, from the first on.
    wants: u8,
    /// By list, the number of what comes after the last report.
    next: [u64; SUBJECTS],
    failures: u32,
}

/// Lists of what happened: to ports, and to groups.
const SUBJECTS: usize = 2;

/// What happened last, in order, each with its number.
#[derive(Clone, Debug, Default)]
struct Events {
    held: VecDeque<Happening>,
    /// The number of the first that is held.
    first: u64,
}

impl Events {
    fn push(&mut self, what: Happening) {
        if self.held.len() >= MAX_EVENTS {
            self.held.pop_front();
            self.first += 1;
        }
        self.held.push_back(what);
    }

    /// The number of the next.
    fn end(&self) -> u64 {
        self.first + self.held.len() as u64
    }

    fn get(&self, number: u64) -> Option<Happening> {
        self.held.get(number.checked_sub(self.first)? as usize).copied()
    }
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Subscriptions {
    subscribers: BTreeMap<Key, Subscriber>,
    /// Of ports, and of groups.
    events: [Events; SUBJECTS],
    transaction: u32,
    /// The last whose turn it was.
    turn: Option<Key>,
    /// At most [`WINDOW`].
    under_way: BTreeMap<Key, UnderWay>,
    /// There may be something for a subscriber that has no report under way.
    is_behind: bool,
    counters: InformCounters,
}

impl Subscriptions {
    /// Answers a request that subscribes or ends that, from a port with these LIDs; `None` where it
    /// is none.
    pub fn answer(
        &mut self,
        client: Client,
        lids: RangeInclusive<u16>,
        manager_lid: u16,
        mad: &[u8; MAD_BYTES],
    ) -> Option<Reply> {
        let query = Query::parse(mad)?.ok()?;
        if (query.method, query.attribute) != (method::SET, attribute::INFORM_INFO) {
            return None;
        }
        let done = self.subscribe(client, lids, manager_lid, query.data);
        let found = done.map(|()| alloc::vec![query.data[..INFORM_INFO_BYTES].to_vec()]);
        Some(query.respond(found, 0))
    }

    fn subscribe(
        &mut self,
        client: Client,
        lids: RangeInclusive<u16>,
        manager_lid: u16,
        data: &[u8],
    ) -> Result<(), Status> {
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
            return self.end(key, wants);
        }
        let of_port = (*lids.start(), 0)..=(*lids.end(), u32::MAX);
        let of_port = self.subscribers.range(of_port).take(MAX_SUBSCRIBERS_OF_PORT).count();
        let is_full =
            of_port >= MAX_SUBSCRIBERS_OF_PORT || self.subscribers.len() >= MAX_SUBSCRIBERS;
        if is_full && !self.subscribers.contains_key(&key) {
            return Err(Status::NoResources);
        }
        let next = self.ends();
        let Client { service_level, .. } = client;
        let new = Subscriber { service_level, wants: 0, next, failures: 0 };
        self.subscribers.entry(key).or_insert(new).wants |= wants;
        Ok(())
    }

    /// Ends the subscription to some traps, and with it the report of one of them that is under
    /// way.
    fn end(&mut self, key: Key, traps: u8) -> Result<(), Status> {
        let subscriber = self.subscribers.get_mut(&key).ok_or(Status::Invalid)?;
        subscriber.wants &= !traps;
        if subscriber.wants == 0 {
            self.remove(key);
        } else if self.under_way.get(&key).is_some_and(|own| !own.what.is_among(subscriber.wants)) {
            self.under_way.remove(&key);
            self.counters.given_up += 1;
            self.is_behind = true;
        }
        Ok(())
    }

    /// Something has happened.
    pub fn happen(&mut self, what: Happening) {
        if self.subscribers.is_empty() {
            return;
        }
        if let Some(events) = self.events.get_mut(what.subject()) {
            events.push(what);
        }
        self.is_behind = true;
    }

    /// Forgets subscribers whose LID is nobody's any more.
    pub fn keep(&mut self, is_there: impl Fn(u16) -> bool) {
        let gone = self.subscribers.keys().filter(|(lid, _)| !is_there(*lid));
        let gone: Vec<Key> = gone.copied().collect();
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
        let key = (client.lid, client.queue_pair);
        if self.under_way.get(&key).is_none_or(|own| own.transaction != transaction) {
            self.counters.foreign += 1;
            return;
        }
        self.under_way.remove(&key);
        self.counters.taken += 1;
        let ends = self.ends();
        if let Some(subscriber) = self.subscribers.get_mut(&key) {
            subscriber.failures = 0;
            self.is_behind |= subscriber.next != ends;
        }
    }

    /// By list, the number of what happens next.
    fn ends(&self) -> [u64; SUBJECTS] {
        self.events.each_ref().map(Events::end)
    }

    /// Whether there may be a report to send.
    pub fn has_work(&self) -> bool {
        self.is_behind && self.under_way.len() < WINDOW
            || self.under_way.values().any(|own| own.is_due)
    }

    /// The next report to send; `issuer` is the port of the manager.
    pub fn poll_transmit(
        &mut self,
        now: Duration,
        issuer: (u16, Gid),
    ) -> Option<(Client, [u8; MAD_BYTES])> {
        let until = now + PATIENCE;
        if let Some((key, own)) = self.under_way.iter_mut().find(|(_, own)| own.is_due) {
            (own.is_due, own.until) = (false, until);
            let (key, own) = (*key, *own);
            return self.report(key, own, issuer);
        }
        while self.is_behind && self.under_way.len() < WINDOW {
            let Some(key) = self.next_behind() else {
                self.is_behind = false;
                break;
            };
            self.turn = Some(key);
            if let Some(what) = self.next_event(key) {
                self.transaction = self.transaction.wrapping_add(1).max(1);
                let transaction = self.transaction;
                let own = UnderWay { what, transaction, until, tries: 1, is_due: false };
                self.under_way.insert(key, own);
                return self.report(key, own, issuer);
            }
        }
        None
    }

    /// Each subscriber in turn that has no report under way, and for whom there may be something.
    fn next_behind(&self) -> Option<Key> {
        let ends = self.ends();
        let after = self.turn.map_or(Bound::Unbounded, Bound::Excluded);
        let in_turn = self.subscribers.range((after, Bound::Unbounded)).chain(&self.subscribers);
        let is_behind = |(key, one): &(&Key, &Subscriber)| {
            one.next != ends && !self.under_way.contains_key(*key)
        };
        in_turn.filter(is_behind).map(|(key, _)| *key).next()
    }

    /// Takes what a subscriber wants next from the lists; what it does not want is passed over.
    fn next_event(&mut self, key: Key) -> Option<Happening> {
        let subscriber = self.subscribers.get_mut(&key)?;
        let Subscriber { wants, .. } = *subscriber;
        for (next, events) in subscriber.next.iter_mut().zip(&self.events) {
            self.counters.lost += events.first.saturating_sub(*next);
            *next = events.first.max(*next);
            while let Some(what) = events.get(*next) {
                *next += 1;
                if what.is_among(wants) {
                    return Some(what);
                }
            }
        }
        None
    }

    /// Attribute `Notice`, for a subscriber.
    fn report(
        &mut self,
        key: Key,
        own: UnderWay,
        (issuer_lid, issuer): (u16, Gid),
    ) -> Option<(Client, [u8; MAD_BYTES])> {
        let service_level = self.subscribers.get(&key)?.service_level;
        self.counters.sent += 1;
        let mut mad = [0; MAD_BYTES];
        mad[..4].copy_from_slice(&[1, ADMINISTRATION, 2, REPORT]);
        mad[12..16].copy_from_slice(&own.transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&NOTICE.to_be_bytes());
        // Generic, of subnet management; from a class manager.
        let notice = &mut mad[DATA..];
        notice[..4].copy_from_slice(&[0x83, 0, 0, 4]);
        notice[4..6].copy_from_slice(&own.what.trap().to_be_bytes());
        notice[6..8].copy_from_slice(&issuer_lid.to_be_bytes());
        own.what.gid().put(notice, 16);
        issuer.put(notice, 64);
        Some((Client { lid: key.0, queue_pair: key.1, service_level }, mad))
    }

    /// When [`handle_timeout`](Subscriptions::handle_timeout) is wanted next.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let open = self.under_way.values().filter(|own| !own.is_due);
        open.map(|own| own.until).min()
    }

    /// Time has passed: reports without a response are sent again, or given up.
    pub fn handle_timeout(&mut self, now: Duration) {
        let late = self.under_way.iter_mut().filter(|(_, own)| own.until <= now && !own.is_due);
        let mut given_up = Vec::new();
        for (key, own) in late {
            if own.tries < TRIES {
                (own.tries, own.is_due) = (own.tries + 1, true);
            } else {
                given_up.push(*key);
            }
        }
        for key in given_up {
            self.under_way.remove(&key);
            self.counters.given_up += 1;
            self.is_behind = true;
            let Some(subscriber) = self.subscribers.get_mut(&key) else {
                continue;
            };
            subscriber.failures += 1;
            if subscriber.failures >= MAX_FAILURES {
                self.counters.dropped += 1;
                self.remove(key);
            }
        }
    }

    fn remove(&mut self, key: Key) {
        self.subscribers.remove(&key);
        self.under_way.remove(&key);
    }
}
