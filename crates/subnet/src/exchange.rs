//! Requests to the nodes of a fabric and their responses: how many are under way, which response
//! belongs to which request, and what is asked again.
//!
//! Whoever requests says why, with a context of their own, and gets it back with the response. What
//! requests mean does not belong here.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use crate::mad::{Attribute, DirectedRoute, MAD_BYTES, MadError, Method, Smp};

/// Requests under way at a time: responses come back by the way of the requests, and agents have
/// small queues.
pub const WINDOW: usize = 16;

/// How often a request is sent.
pub const TRIES: usize = 3;

/// How long a response may take.
pub const PATIENCE: Duration = Duration::from_millis(200);

/// What sends requests to a fabric: a state machine without a clock or a socket. Time is what the
/// caller says it is, since an origin of their own; it never goes back.
///
/// # Order of calls
///
/// `poll_transmit` until it returns `None`; then `handle_response` for what arrived, and
/// `handle_timeout` once the time has come that `poll_timeout` returned; again from the beginning
/// until `is_done`.
pub trait Requester {
    /// The next datagram to send.
    fn poll_transmit(&mut self, now: Duration) -> Option<[u8; MAD_BYTES]>;

    /// When [`handle_timeout`](Requester::handle_timeout) is wanted next.
    fn poll_timeout(&self) -> Option<Duration>;

    /// Time has passed: requests without a response are sent again, or given up.
    fn handle_timeout(&mut self, now: Duration);

    /// A datagram has arrived.
    fn handle_response(&mut self, bytes: &[u8]);

    /// Whether every request has its response or was given up.
    fn is_done(&self) -> bool;

    /// How whoever sends next continues.
    fn numbering(&self) -> Numbering;

    /// Datagrams sent, repeated ones too.
    fn sent(&self) -> u64;

    /// Responses that were not used.
    fn discarded(&self) -> Discarded;
}

/// In the status of a response: the node is busy and has done nothing (IBA 13.4.7).
const BUSY: u16 = 1;

/// What a datagram asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// To read or to write.
    pub method: Method,
    /// Of which node.
    pub route: DirectedRoute,
    /// Which attribute.
    pub attribute: Attribute,
    /// Which of several.
    pub modifier: u32,
    /// What to write.
    pub data: [u8; 64],
}

impl Request {
    /// To read.
    pub fn get(route: DirectedRoute, attribute: Attribute, modifier: u32) -> Request {
        Request { method: Method::Get, route, attribute, modifier, data: [0; 64] }
    }

    /// To write.
    pub fn set(
        route: DirectedRoute,
        attribute: Attribute,
        modifier: u32,
        data: [u8; 64],
    ) -> Request {
        Request { method: Method::Set, route, attribute, modifier, data }
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The attribute, as it is now.
    Response([u8; 64]),
    /// An error.
    Refused(u16),
    /// Nothing came.
    Silent,
}

/// A request that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done<C> {
    /// What was asked.
    pub request: Request,
    /// Why.
    pub context: C,
    /// What became of it.
    pub fate: Fate,
}

/// What successive exchanges have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbering {
    /// The next transaction: a late response to a request of an earlier exchange is not taken for
    /// one of a later.
    pub next: u32,
    /// The M_Key that requests carry.
    pub m_key: u64,
}

impl Default for Numbering {
    fn default() -> Numbering {
        Numbering { next: 1, m_key: 0 }
    }
}

/// Responses that were not used, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discarded {
    /// Nobody asked, or the response came twice or too late.
    pub unasked: u64,
    /// The response is for another attribute, port or route than its request.
    pub mismatched: u64,
    /// It is no response at all.
    pub malformed: u64,
}

/// A request that is not over.
#[derive(Clone, Debug)]
struct Open<C> {
    request: Request,
    context: C,
    /// Those that it was sent with. A response to an earlier one is as good.
    transactions: Vec<u32>,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Exchange<C> {
    /// By number.
    open: BTreeMap<u64, Open<C>>,
    next_number: u64,
    /// Numbers of those to be sent.
    waiting: VecDeque<u64>,
    /// Numbers of those under way, by transaction.
    sent_as: BTreeMap<u32, u64>,
    /// Until when a response may take, by number.
    under_way: BTreeMap<u64, Duration>,
    next_transaction: u32,
    m_key: u64,
    sent: u64,
    discarded: Discarded,
}

impl<C: Copy> Default for Exchange<C> {
    fn default() -> Exchange<C> {
        Exchange {
            open: BTreeMap::new(),
            next_number: 0,
            waiting: VecDeque::new(),
            sent_as: BTreeMap::new(),
            under_way: BTreeMap::new(),
            next_transaction: 1,
            m_key: 0,
            sent: 0,
            discarded: Discarded::default(),
        }
    }
}

impl<C: Copy> Exchange<C> {
    /// One that continues the numbering of another.
    pub fn beginning(numbering: Numbering) -> Exchange<C> {
        let Numbering { next, m_key } = numbering;
        Exchange { next_transaction: next.max(1), m_key, ..Exchange::default() }
    }

    /// How whoever sends next continues.
    pub fn numbering(&self) -> Numbering {
        Numbering { next: self.next_transaction, m_key: self.m_key }
    }

    /// Queues a request.
    pub fn request(&mut self, request: Request, context: C) {
        let number = self.next_number;
        self.next_number += 1;
        self.open.insert(number, Open { request, context, transactions: Vec::new() });
        self.waiting.push_back(number);
    }

    /// Whether no request is open.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Gives up what was not sent yet.
    pub fn drop_waiting(&mut self) {
        for number in core::mem::take(&mut self.waiting) {
            self.close(number);
        }
    }

    /// The next datagram to send.
    pub fn poll_transmit(&mut self, now: Duration) -> Option<[u8; MAD_BYTES]> {
        if self.under_way.len() >= WINDOW {
            return None;
        }
        // Some have been responded to while they waited to be sent again.
        let number = loop {
            let number = self.waiting.pop_front()?;
            if self.open.contains_key(&number) {
                break number;
            }
        };
        let open = self.open.get_mut(&number)?;
        let transaction = self.next_transaction;
        self.next_transaction = transaction.wrapping_add(1).max(1);
        open.transactions.push(transaction);
        self.under_way.insert(number, now + PATIENCE);
        self.sent_as.insert(transaction, number);
        self.sent += 1;
        let Request { method, route, attribute, modifier, data } = open.request;
        let m_key = self.m_key;
        let smp =
            Smp { method, data, m_key, ..Smp::get(transaction.into(), route, attribute, modifier) };
        Some(smp.emit())
    }

    /// When [`handle_timeout`](Exchange::handle_timeout) is wanted next.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.under_way.values().copied().min()
    }

    /// Requests without a response are sent again. Returns those that are given up.
    pub fn handle_timeout(&mut self, now: Duration) -> Vec<Done<C>> {
        let late = self.under_way.iter().filter(|(_, until)| **until <= now);
        let late: Vec<u64> = late.map(|(number, _)| *number).collect();
        let mut given_up = Vec::new();
        for number in late {
            self.under_way.remove(&number);
            let tries = self.open.get(&number).map_or(0, |open| open.transactions.len());
            if tries < TRIES {
                self.waiting.push_back(number);
            } else {
                given_up.extend(self.close(number).map(|open| open.done(Fate::Silent)));
            }
        }
        given_up
    }

    /// A datagram has arrived. Returns the request that it responds to, if there is one.
    pub fn handle_response(&mut self, bytes: &[u8]) -> Option<Done<C>> {
        let smp = match Smp::parse_response(bytes) {
            Ok(smp) => smp,
            // Requests of others pass here, and those of ours that the operating system gives back.
            Err(MadError::Method(_) | MadError::Outbound) => {
                self.discarded.unasked += 1;
                return None;
            }
            Err(_) => {
                self.discarded.malformed += 1;
                return None;
            }
        };
        // The upper half of a transaction belongs to the operating system.
        let number = self.sent_as.get(&(smp.transaction as u32)).copied();
        let Some((number, open)) =
            number.and_then(|number| Some((number, self.open.get(&number)?)))
        else {
            self.discarded.unasked += 1;
            return None;
        };
        let Request { attribute, modifier, route, .. } = open.request;
        if (attribute, modifier, route) != (smp.attribute, smp.modifier, smp.route) {
            self.discarded.mismatched += 1;
            return None;
        }
        if smp.status & BUSY != 0 {
            // As good as none: it is sent again.
            return None;
        }
        let fate = match smp.status {
            0 => Fate::Response(smp.data),
            status => Fate::Refused(status),
        };
        Some(self.close(number)?.done(fate))
    }

    /// Removes a request and all of its transactions.
    fn close(&mut self, number: u64) -> Option<Open<C>> {
        let open = self.open.remove(&number)?;
        self.under_way.remove(&number);
        for transaction in &open.transactions {
            self.sent_as.remove(transaction);
        }
        Some(open)
    }

    /// Datagrams sent, repeated ones too.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Responses that were not used.
    pub fn discarded(&self) -> Discarded {
        self.discarded
    }
}

impl<C: Copy> Open<C> {
    fn done(self, fate: Fate) -> Done<C> {
        Done { request: self.request, context: self.context, fate }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        method: Method::Get,
        route: DirectedRoute::HERE,
        attribute: Attribute::NodeInfo,
        modifier: 0,
        data: [0; 64],
    };

    fn response(request: &[u8; MAD_BYTES], status: u16) -> [u8; MAD_BYTES] {
        let mut response = *request;
        response[3] = 0x81;
        response[4..6].copy_from_slice(&(1 << 15 | status).to_be_bytes());
        response
    }

    fn at(tries: u32) -> Duration {
        PATIENCE * tries
    }

    #[test]
    fn a_late_response_counts_and_a_second_one_does_not() {
        let mut exchange = Exchange::default();
        exchange.request(REQUEST, 7);
        let first = exchange.poll_transmit(at(0)).expect("one");
        assert_eq!((exchange.poll_timeout(), exchange.poll_transmit(at(0))), (Some(at(1)), None));
        assert_eq!(exchange.handle_timeout(at(1)), []);
        let second = exchange.poll_transmit(at(1)).expect("again");
        let done = exchange.handle_response(&response(&first, 0)).expect("the first");
        assert_eq!((done.context, done.fate), (7, Fate::Response([0; 64])));
        assert_eq!(exchange.handle_response(&response(&second, 0)), None);
        assert!(exchange.is_idle() && exchange.discarded().unasked == 1);
    }

    #[test]
    fn silence_ends_after_three_tries_and_a_busy_node_is_silent() {
        let mut exchange = Exchange::default();
        exchange.request(REQUEST, ());
        for tries in 0..3 {
            let sent = exchange.poll_transmit(at(tries)).expect("a try");
            assert_eq!(exchange.handle_response(&response(&sent, BUSY)), None);
            let given_up = exchange.handle_timeout(at(tries + 1));
            assert_eq!(given_up.len(), usize::from(tries == 2));
        }
        assert!(exchange.is_idle() && exchange.sent() == 3);
    }

    #[test]
    fn no_more_than_the_window_are_under_way() {
        let mut exchange = Exchange::default();
        (0..100).for_each(|context| exchange.request(REQUEST, context));
        let sent: Vec<_> = core::iter::from_fn(|| exchange.poll_transmit(at(0))).collect();
        assert_eq!(sent.len(), WINDOW);
        assert!(exchange.handle_response(&response(&sent[3], 0)).is_some());
        assert!(exchange.poll_transmit(at(0)).is_some() && exchange.poll_transmit(at(0)).is_none());
        exchange.drop_waiting();
        exchange.handle_timeout(at(1));
        let again = core::iter::from_fn(|| exchange.poll_transmit(at(1))).count();
        assert_eq!(again, WINDOW, "those under way are sent again, the others are gone");
    }
}
