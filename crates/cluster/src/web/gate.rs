//! Who may connect, and how often who may ask.
//!
//! Connections have places in a table of fixed size, at most a quarter of them for one address. When there is none, the
//! oldest connection gives way that never carried a request with the token: a flood of silent connections displaces only
//! itself. Requests are limited by a token bucket per address; those with the token and those without have buckets of
//! their own, so strangers behind one address do not keep its users out. All requests without the token share a further
//! bucket, whatever their address. Questions for the health have buckets of their own, too: a balancer that asks regularly is
//! answered whatever strangers at other addresses do.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::counters::{Count, Counters};

/// Addresses whose requests are counted one by one, of users and of strangers.
const MAX_BUCKETS: usize = 2048;

/// What clients may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; a quarter of them for one address.
    pub connections: usize,
    /// Requests per second of one address; three times as many at once after a while of silence.
    pub per_client: u32,
    /// Requests per second of all that have no token.
    pub strangers: u32,
    /// Time for the headers of a request, the pause before it included.
    pub header_timeout: Duration,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Time in which a client has to take a response.
    pub response_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 256,
            per_client: 50,
            strangers: 200,
            header_timeout: Duration::from_secs(5),
            body_timeout: Duration::from_secs(10),
            response_timeout: Duration::from_secs(30),
        }
    }
}

/// A token bucket: `rate` requests per second, and three times as many at once after a while of silence.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// In thousandths of a request.
    level: u64,
    since: Instant,
}

impl Bucket {
    const BURST_S: u64 = 3;

    fn full(rate: u32, now: Instant) -> Bucket {
        Bucket { level: Bucket::capacity(rate), since: now }
    }

    fn capacity(rate: u32) -> u64 {
        u64::from(rate) * 1000 * Bucket::BURST_S
    }

    fn fill(&mut self, rate: u32, now: Instant) {
        let elapsed = now.saturating_duration_since(self.since);
        let gained = (elapsed.as_micros() as u64).saturating_mul(u64::from(rate)) / 1000;
        // Time that was too short to gain anything is kept.
        if gained > 0 {
            self.level = self.level.saturating_add(gained).min(Bucket::capacity(rate));
            self.since = now;
        }
    }

    fn take(&mut self, rate: u32, now: Instant) -> bool {
        self.fill(rate, now);
        let has_one = self.level >= 1000;
        self.level -= if has_one { 1000 } else { 0 };
        has_one
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Gate {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The oldest first.
    places: Vec<Place>,
    next: u64,
    /// Of those who have the token.
    users: Buckets,
    /// Of those who have not.
    strangers: Buckets,
    /// Of those who ask for the health.
    probes: Buckets,
}

/// What a request asks for, as far as its rate is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    /// Anything, with the token.
    User,
    /// Anything but the health, without it.
    Stranger,
    /// The health.
    Probe,
}

/// Buckets of addresses, and one that they share.
#[derive(Debug)]
struct Buckets {
    own: BTreeMap<IpAddr, Bucket>,
    shared: Bucket,
}

#[derive(Debug)]
struct Place {
    number: u64,
    origin: IpAddr,
    known: Arc<AtomicBool>,
    /// Dropped with the place, which ends the connection.
    _open: oneshot::Sender<Infallible>,
}

/// A connection's place; dropping it frees the place.
#[derive(Debug)]
pub(super) struct Admission {
    gate: Arc<Gate>,
    number: u64,
    /// What counts as the client's address.
    pub(super) origin: IpAddr,
    /// Whether a request with the token came.
    known: Arc<AtomicBool>,
    /// Ends when the connection has to give way.
    pub(super) evicted: oneshot::Receiver<Infallible>,
}

/// What counts as one address: an IPv6 host owns the whole 64-bit prefix.
fn origin(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

impl Gate {
    pub(super) fn new(limits: Limits, now: Instant) -> Arc<Gate> {
        let state = State {
            places: Vec::new(),
            next: 0,
            users: Buckets { own: BTreeMap::new(), shared: Bucket::full(limits.per_client, now) },
            strangers: Buckets {
                own: BTreeMap::new(),
                shared: Bucket::full(limits.strangers, now),
            },
            probes: Buckets { own: BTreeMap::new(), shared: Bucket::full(limits.strangers, now) },
        };
        Arc::new(Gate { limits, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection from `ip` a place, if there is one or another can give way.
    pub(super) fn admit(self: &Arc<Gate>, ip: IpAddr, counters: &Counters) -> Option<Admission> {
        let origin = origin(ip);
        let mut state = self.state();
        let same = state.places.iter().filter(|place| place.origin == origin).count();
        let evicted = if same >= (self.limits.connections / 4).max(1) {
            state.evict(|place| place.origin == origin).ok_or(Count::RefusedAddress)
        } else if state.places.len() >= self.limits.connections {
            state.evict(|_| true).ok_or(Count::RefusedFull)
        } else {
            Ok(false)
        };
        match evicted {
            Ok(true) => counters.count(Count::ClosedEvicted),
            Ok(false) => {}
            Err(refused) => {
                counters.count(refused);
                return None;
            }
        }
        counters.count(Count::Accepted);
        let (open, evicted) = oneshot::channel();
        let known = Arc::new(AtomicBool::new(false));
        let number = state.next;
        state.next += 1;
        state.places.push(Place { number, origin, known: Arc::clone(&known), _open: open });
        Some(Admission { gate: Arc::clone(self), number, origin, known, evicted })
    }

    /// Whether a request may be answered now.
    pub(super) fn may_ask(&self, origin: IpAddr, rate: Rate, now: Instant) -> bool {
        let mut state = self.state();
        match rate {
            Rate::User => state.users.take_user(origin, self.limits.per_client, now),
            Rate::Stranger => state.strangers.take_stranger(origin, &self.limits, now),
            Rate::Probe => state.probes.take_probe(origin, &self.limits, now),
        }
    }

    #[cfg(test)]
    fn connections(&self) -> usize {
        self.state().places.len()
    }
}

impl State {
    /// Ends the oldest connection of `whose` that never had the token; `None` if there is none.
    fn evict(&mut self, whose: impl Fn(&Place) -> bool) -> Option<bool> {
        let is_stranger = |place: &Place| !place.known.load(Ordering::Relaxed);
        let oldest = self.places.iter().position(|place| whose(place) && is_stranger(place))?;
        self.places.remove(oldest);
        Some(true)
    }
}

impl Buckets {
    /// Whether there is room for one more address. Those whose buckets are full again are forgotten.
    fn has_room(&mut self, rate: u32, now: Instant) -> bool {
        if self.own.len() >= MAX_BUCKETS {
            self.own.retain(|_, bucket| {
                bucket.fill(rate, now);
                bucket.level < Bucket::capacity(rate)
            });
        }
        self.own.len() < MAX_BUCKETS
    }

    /// Users have a bucket for each address; where there are too many, the others share one.
    fn take_user(&mut self, origin: IpAddr, rate: u32, now: Instant) -> bool {
        if !self.own.contains_key(&origin) && !self.has_room(rate, now) {
            return self.shared.take(rate, now);
        }
        self.own.entry(origin).or_insert_with(|| Bucket::full(rate, now)).take(rate, now)
    }

    /// Strangers have a bucket for each address, and then the shared one. An address that floods is refused by its own
    /// and takes nothing of the shared one; new addresses come to the table only as fast as the shared one lets them.
    fn take_stranger(&mut self, origin: IpAddr, limits: &Limits, now: Instant) -> bool {
        let Limits { per_client, strangers, .. } = *limits;
        if let Some(own) = self.own.get_mut(&origin) {
            return own.take(per_client, now) && self.shared.take(strangers, now);
        }
        self.take_new(origin, limits, now)
    }

    /// As [`Buckets::take_stranger`], but an address that has a bucket needs nothing of the shared one.
    fn take_probe(&mut self, origin: IpAddr, limits: &Limits, now: Instant) -> bool {
        match self.own.get_mut(&origin) {
            Some(own) => own.take(limits.per_client, now),
            None => self.take_new(origin, limits, now),
        }
    }

    fn take_new(&mut self, origin: IpAddr, limits: &Limits, now: Instant) -> bool {
        let Limits { per_client, strangers, .. } = *limits;
        if !self.shared.take(strangers, now) {
            return false;
        }
        if self.has_room(per_client, now) {
            let mut own = Bucket::full(per_client, now);
            own.take(per_client, now);
            self.own.insert(origin, own);
        }
        true
    }
}

impl Admission {
    /// A request of this connection had the token: it does not give way to others any more.
    pub(super) fn is_known(&self) {
        self.known.store(true, Ordering::Relaxed);
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.gate.state().places.retain(|place| place.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn gate(connections: usize) -> (Arc<Gate>, Counters, Instant) {
        let now = Instant::now();
        let limits = Limits { connections, per_client: 10, strangers: 100, ..Limits::default() };
        (Gate::new(limits, now), Counters::default(), now)
    }

    #[test]
    fn a_flood_of_connections_displaces_only_itself() {
        let (gate, counters, _) = gate(8);
        let user = gate.admit(ip(1), &counters).expect("there is room");
        user.is_known();
        let mut flood: Vec<_> =
            (0..100).map(|_| gate.admit(ip(2), &counters).expect("the oldest gives way")).collect();
        assert_eq!(flood.iter_mut().filter_map(|one| one.evicted.try_recv().err()).count(), 100);
        assert_eq!(gate.connections(), 3, "two of the flood, and the user");
        assert_eq!(counters.by_name()["web.connections.closed.evicted"], 98);
        drop(flood);
        drop(user);
        assert_eq!(gate.connections(), 0);
    }

    #[test]
    fn connections_with_the_token_stay_and_others_are_refused() {
        let (gate, counters, _) = gate(4);
        let users: Vec<_> = (0..4).filter_map(|last| gate.admit(ip(last), &counters)).collect();
        users.iter().for_each(Admission::is_known);
        assert!(gate.admit(ip(9), &counters).is_none());
        assert!(gate.admit(ip(0), &counters).is_none());
        let counted = counters.by_name();
        assert_eq!(counted["web.connections.refused.full"], 1);
        assert_eq!(counted["web.connections.refused.address"], 1);
    }

    #[test]
    fn a_client_has_its_rate_and_a_burst_and_the_token_a_bucket_of_its_own() {
        let (gate, _, now) = gate(4);
        let asked = |rate, now| (0..100).filter(|_| gate.may_ask(ip(1), rate, now)).count();
        assert_eq!(asked(Rate::Stranger, now), 30);
        assert_eq!(asked(Rate::User, now), 30);
        assert_eq!(asked(Rate::User, now + Duration::from_secs(1)), 10);
        assert_eq!(asked(Rate::User, now + Duration::from_secs(100)), 30);
    }

    #[test]
    fn many_small_steps_of_time_gain_as_much_as_one() {
        let (gate, _, now) = gate(4);
        let steps = (0..40_000_u64).map(|us| now + Duration::from_micros(us * 100));
        let asked = steps.filter(|now| gate.may_ask(ip(1), Rate::User, *now)).count();
        assert!((68..=70).contains(&asked), "30 at once and 10 in each of 4 s, not {asked}");
    }

    #[test]
    fn many_addresses_without_the_token_share_a_rate_and_the_table_has_a_bound() {
        let (gate, _, now) = gate(4);
        let from = |n: u32| IpAddr::from((n + (11 << 24)).to_be_bytes());
        let asked = (0..100_000).filter(|n| gate.may_ask(from(*n), Rate::Stranger, now)).count();
        assert_eq!(asked, 300);
        assert!(gate.may_ask(from(1), Rate::User, now), "users are others");
        // Slowly, so that all are let in.
        let later = |n: u32| now + Duration::from_millis(u64::from(n) * 20);
        assert!((0..10_000).all(|n| gate.may_ask(from(n), Rate::Stranger, later(n + 500))));
        assert!(
            (0..10_000).filter(|n| gate.may_ask(from(*n), Rate::User, now)).count() > MAX_BUCKETS
        );
        let state = gate.state();
        assert!(state.strangers.own.len() <= MAX_BUCKETS && state.users.own.len() <= MAX_BUCKETS);
    }

    #[test]
    fn a_stranger_that_floods_takes_nothing_of_the_others() {
        let (gate, _, now) = gate(4);
        assert_eq!((0..10_000).filter(|_| gate.may_ask(ip(1), Rate::Stranger, now)).count(), 30);
        assert_eq!(
            (2..200).filter(|last| gate.may_ask(ip(*last), Rate::Stranger, now)).count(),
            198
        );
    }

    #[test]
    fn strangers_do_not_keep_those_out_who_ask_for_the_health() {
        let (gate, _, now) = gate(4);
        let from = |n: u32| IpAddr::from((n + (11 << 24)).to_be_bytes());
        assert!(gate.may_ask(ip(1), Rate::Probe, now));
        // Two floods from many addresses take all of the shared buckets.
        for rate in [Rate::Stranger, Rate::Probe] {
            assert!((0..1000).any(|n| !gate.may_ask(from(n), rate, now)));
        }
        assert!(!gate.may_ask(ip(1), Rate::Stranger, now));
        let seconds = (0..60).map(|second| now + Duration::from_secs(second));
        assert!(seconds.into_iter().all(|now| gate.may_ask(ip(1), Rate::Probe, now)));
        let last = now + Duration::from_secs(60);
        assert_eq!((0..100).filter(|_| gate.may_ask(ip(1), Rate::Probe, last)).count(), 30);
    }

    #[test]
    fn an_ipv6_host_is_one_client_and_a_mapped_address_is_ipv4() {
        let parse = |text: &str| origin(text.parse().expect("an address"));
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:2"));
        assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
        assert_eq!(parse("::ffff:10.0.0.1"), ip(1));
    }
}
