//! Back-pressure: destinations that admit few packets at once, and none for a while.
//!
//! Between two calls of the wire's `send` or `receive`, a destination admits a random number of
//! packets. Whoever asks for more is refused, and so is everyone else for a random time. Admitted
//! packets that were not sent by then are admitted no longer. Two rules of
//! [`Wire`](roce::world::Wire) are checked: only admitted packets are sent, and a node at rest has
//! packets only for destinations that refuse them.

use alloc::vec::Vec;
use core::net::IpAddr;

use roce::endpoint::Endpoint;
use roce::{Duration, Time};

use crate::chance::Chance;
use crate::faults::{Fault, FaultCounts};

/// How destinations admit packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Most packets admitted between two calls of the wire.
    pub most_packets: u64,
    /// Longest time without admitting any, in nanoseconds, at least 1.
    pub longest_ns: u64,
    /// How often a destination begins to refuse although it has admitted nothing, per mille.
    pub refusals: u32,
    /// Seed of its randomness.
    pub seed: u64,
}

/// The back-pressure that one node's wire exerts.
#[derive(Debug)]
pub(crate) struct BackPressure {
    pressure: Pressure,
    chance: Chance,
    destinations: Vec<Destination>,
    /// Packets sent that were not admitted.
    pub(crate) unadmitted: u64,
    /// Queue pairs found waiting for a destination that refuses nothing.
    pub(crate) neglected: u64,
}

#[derive(Debug)]
struct Destination {
    ip: IpAddr,
    /// Packets that it still admits until the next call of the wire; drawn when the first is asked
    /// for.
    left: Option<usize>,
    /// Packets admitted since the last call and not sent.
    admitted: usize,
    refuses_until: Time,
    /// The refusal has parked a queue pair.
    is_felt: bool,
}

impl BackPressure {
    pub(crate) fn new(pressure: Pressure, node: u32) -> BackPressure {
        let chance = Chance::new(pressure.seed ^ u64::from(node));
        BackPressure { pressure, chance, destinations: Vec::new(), unadmitted: 0, neglected: 0 }
    }

    fn find(&mut self, ip: IpAddr) -> usize {
        let place = self.destinations.iter().position(|known| known.ip == ip);
        place.unwrap_or_else(|| {
            let (left, refuses_until) = (None, Time::ZERO);
            let new = Destination { ip, left, admitted: 0, refuses_until, is_felt: false };
            self.destinations.push(new);
            self.destinations.len() - 1
        })
    }

    /// How many of these packets are admitted.
    pub(crate) fn admits(
        &mut self,
        now: Time,
        ip: IpAddr,
        packets: usize,
        counts: &mut FaultCounts,
    ) -> usize {
        let place = self.find(ip);
        let BackPressure { pressure, chance, destinations, .. } = self;
        let dest = &mut destinations[place];
        if dest.refuses_until > now {
            return 0;
        }
        let left = dest.left.get_or_insert_with(|| match chance.per_mille(pressure.refusals) {
            true => 0,
            false => chance.between(1, pressure.most_packets) as usize,
        });
        let granted = packets.min(*left);
        *left -= granted;
        dest.admitted += granted;
        if granted == 0 {
            let span = Duration::from_nanos(chance.between(1, pressure.longest_ns));
            (dest.refuses_until, dest.is_felt) = (now + span, false);
            counts.inject(Fault::BackPressure);
        }
        granted
    }

    /// A packet is sent.
    pub(crate) fn sends(&mut self, ip: IpAddr) {
        let place = self.find(ip);
        let admitted = &mut self.destinations[place].admitted;
        match admitted.checked_sub(1) {
            Some(left) => *admitted = left,
            None => self.unadmitted += 1,
        }
    }

    /// Packets admitted and not sent are admitted no longer.
    pub(crate) fn lapse(&mut self) {
        self.destinations.iter_mut().for_each(|dest| (dest.left, dest.admitted) = (None, 0));
    }

    /// When the next destination admits packets again.
    pub(crate) fn next_wakeup(&self, now: Time) -> Option<Time> {
        let ends = self.destinations.iter().map(|dest| dest.refuses_until);
        ends.filter(|&end| end > now).min()
    }

    /// Looks at what the node has left to send when it comes to rest.
    pub(crate) fn judge(&mut self, endpoint: &Endpoint, now: Time, counts: &mut FaultCounts) {
        for path in endpoint.waiting_paths() {
            let place = self.find(path.remote.ip());
            let dest = &mut self.destinations[place];
            if dest.refuses_until <= now {
                self.neglected += 1;
            } else if !core::mem::replace(&mut dest.is_felt, true) {
                counts.effect(Fault::BackPressure);
            }
        }
    }
}
