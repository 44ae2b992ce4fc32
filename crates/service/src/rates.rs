//! How often who may ask: token buckets per address.
//!
//! Requests with the token and those without have buckets of their own, so strangers behind one
//! address do not keep its users out. All requests without the token share a further bucket,
//! whatever their address. Questions for the health have buckets of their own, too: a balancer that
//! asks regularly is answered whatever strangers at other addresses do. Who may connect is decided
//! before, in [`crate::places`].

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Addresses whose requests are counted one by one, of users and of strangers.
const MAX_BUCKETS: usize = 2048;

/// Requests per second, and three times as many at once after a while of silence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerSecond {
    /// Of one address.
    pub(crate) per_client: u32,
    /// Of all that have no token.
    pub(crate) strangers: u32,
}

/// A token bucket: `rate` requests per second, and three times as many at once after a while of
/// silence.
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
pub(crate) struct Rates {
    limits: PerSecond,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Of those who have the token.
    users: Buckets,
    /// Of those who have not.
    strangers: Buckets,
    /// Of those who ask for the health.
    probes: Buckets,
}

/// What a request asks for, as far as its rate is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
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

impl Rates {
    pub(crate) fn new(limits: PerSecond, now: Instant) -> Rates {
        let buckets = |rate| Buckets { own: BTreeMap::new(), shared: Bucket::full(rate, now) };
        let state = State {
            users: buckets(limits.per_client),
            strangers: buckets(limits.strangers),
            probes: buckets(limits.strangers),
        };
        Rates { limits, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request may be answered now.
    pub(crate) fn may_ask(&self, origin: IpAddr, rate: Rate, now: Instant) -> bool {
        let mut state = self.state();
        match rate {
            Rate::User => state.users.take_user(origin, self.limits.per_client, now),
            Rate::Stranger => state.strangers.take_stranger(origin, self.limits, now),
            Rate::Probe => state.probes.take_probe(origin, self.limits, now),
        }
    }
}

impl Buckets {
    /// Whether there is room for one more address. Those whose buckets are full again are
    /// forgotten.
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

    /// Strangers have a bucket for each address, and then the shared one. An address that floods is
    /// refused by its own and takes nothing of the shared one; new addresses come to the table only
    /// as fast as the shared one lets them.
    fn take_stranger(&mut self, origin: IpAddr, limits: PerSecond, now: Instant) -> bool {
        let PerSecond { per_client, strangers } = limits;
        if let Some(own) = self.own.get_mut(&origin) {
            return own.take(per_client, now) && self.shared.take(strangers, now);
        }
        self.take_new(origin, limits, now)
    }

    /// As [`Buckets::take_stranger`], but an address that has a bucket needs nothing of the shared
    /// one.
    fn take_probe(&mut self, origin: IpAddr, limits: PerSecond, now: Instant) -> bool {
        match self.own.get_mut(&origin) {
            Some(own) => own.take(limits.per_client, now),
            None => self.take_new(origin, limits, now),
        }
    }

    fn take_new(&mut self, origin: IpAddr, limits: PerSecond, now: Instant) -> bool {
        let PerSecond { per_client, strangers } = limits;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn rates() -> (Rates, Instant) {
        let now = Instant::now();
        (Rates::new(PerSecond { per_client: 10, strangers: 100 }, now), now)
    }

    #[test]
    fn a_client_has_its_rate_and_a_burst_and_the_token_a_bucket_of_its_own() {
        let (rates, now) = rates();
        let asked = |rate, now| (0..100).filter(|_| rates.may_ask(ip(1), rate, now)).count();
        assert_eq!(asked(Rate::Stranger, now), 30);
        assert_eq!(asked(Rate::User, now), 30);
        assert_eq!(asked(Rate::User, now + Duration::from_secs(1)), 10);
        assert_eq!(asked(Rate::User, now + Duration::from_secs(100)), 30);
    }

    #[test]
    fn many_small_steps_of_time_gain_as_much_as_one() {
        let (rates, now) = rates();
        let steps = (0..40_000_u64).map(|us| now + Duration::from_micros(us * 100));
        let asked = steps.filter(|now| rates.may_ask(ip(1), Rate::User, *now)).count();
        assert!((68..=70).contains(&asked), "30 at once and 10 in each of 4 s, not {asked}");
    }

    #[test]
    fn many_addresses_without_the_token_share_a_rate_and_the_table_has_a_bound() {
        let (rates, now) = rates();
        let from = |n: u32| IpAddr::from((n + (11 << 24)).to_be_bytes());
        let asked = (0..100_000).filter(|n| rates.may_ask(from(*n), Rate::Stranger, now)).count();
        assert_eq!(asked, 300);
        assert!(rates.may_ask(from(1), Rate::User, now), "users are others");
        // Slowly, so that all are let in.
        let later = |n: u32| now + Duration::from_millis(u64::from(n) * 20);
        assert!((0..10_000).all(|n| rates.may_ask(from(n), Rate::Stranger, later(n + 500))));
        assert!(
            (0..10_000).filter(|n| rates.may_ask(from(*n), Rate::User, now)).count() > MAX_BUCKETS
        );
        let state = rates.state();
        assert!(state.strangers.own.len() <= MAX_BUCKETS && state.users.own.len() <= MAX_BUCKETS);
    }

    #[test]
    fn a_stranger_that_floods_takes_nothing_of_the_others() {
        let (rates, now) = rates();
        assert_eq!((0..10_000).filter(|_| rates.may_ask(ip(1), Rate::Stranger, now)).count(), 30);
        assert_eq!(
            (2..200).filter(|last| rates.may_ask(ip(*last), Rate::Stranger, now)).count(),
            198
        );
    }

    #[test]
    fn strangers_do_not_keep_those_out_who_ask_for_the_health() {
        let (rates, now) = rates();
        let from = |n: u32| IpAddr::from((n + (11 << 24)).to_be_bytes());
        assert!(rates.may_ask(ip(1), Rate::Probe, now));
        // Two floods from many addresses take all of the shared buckets.
        for rate in [Rate::Stranger, Rate::Probe] {
            assert!((0..1000).any(|n| !rates.may_ask(from(n), rate, now)));
        }
        assert!(!rates.may_ask(ip(1), Rate::Stranger, now));
        let seconds = (0..60).map(|second| now + Duration::from_secs(second));
        assert!(seconds.into_iter().all(|now| rates.may_ask(ip(1), Rate::Probe, now)));
        let last = now + Duration::from_secs(60);
        assert_eq!((0..100).filter(|_| rates.may_ask(ip(1), Rate::Probe, last)).count(), 30);
    }
}
