//! What a wire asks before it sends: may these packets leave, and if not, when to ask again.
//!
//! A [`Shaper`] belongs to one sender. What is set, and what senders share, is in a [`Table`]; the
//! table is passed to each call, since it may be replaced between any two.

use alloc::vec::Vec;
use core::net::IpAddr;

use arrayvec::ArrayVec;

use super::gate::{ClockReading, ExchangeWords, TransmissionGate};
use super::limiter::Limiter;
use super::word::Word;
use crate::time::{Duration, Time};

/// DiffServ codepoints.
pub const CODE_POINTS: usize = 64;

/// The longest that a queue pair waits without asking again: what is set may have changed.
pub const LONGEST_WAIT: Duration = Duration::from_millis(50);

/// Peers that are remembered to be answered: those heard last.
pub const MAX_HEARD: usize = 64;

/// Peers that are noticed in what is received at once; others are when more comes of them.
pub const PEERS_AT_ONCE: usize = 16;

/// What is set for each DSCP, and the words that senders share. A DSCP is below [`CODE_POINTS`].
pub trait Table {
    /// How the shared words are kept.
    type Word: Word;

    /// The rate limit of a DSCP, if it has one.
    fn limiter(&self, dscp: usize) -> Option<Limiter>;

    /// DSCPs that have a gate, by bit.
    fn gated(&self) -> u64;

    /// The gate of a DSCP, if it has one.
    fn gate(&self, dscp: usize) -> Option<TransmissionGate>;

    /// When the bucket of a DSCP will be full, in nanoseconds.
    fn full_at(&self, dscp: usize) -> &Self::Word;

    /// The exchanges of a DSCP.
    fn exchanges(&self, dscp: usize) -> &ExchangeWords<Self::Word>;

    /// The clock that gates follow.
    fn clock(&self) -> ClockReading;

    /// Whether somebody else sees how long exchanges wait, and drops gates that do harm. Otherwise
    /// the sender ignores such a gate itself.
    fn is_supervised(&self) -> bool;
}

/// When the gate of a DSCP opens, if it is closed.
fn opens_at(table: &impl Table, dscp: usize, now: Time) -> Option<Time> {
    let (gate, clock) = (table.gate(dscp)?, table.clock());
    let exchanges = table.exchanges(dscp);
    if !clock.is_recent(now) || exchanges.is_running(&gate, now) {
        return None;
    }
    if !table.is_supervised() && exchanges.waits_too_long(&gate) {
        return None;
    }
    gate.opens_at(now, clock)
}

fn mark_active(table: &impl Table, dscp: usize, now: Time) {
    if let Some(gate) = table.gate(dscp) {
        table.exchanges(dscp).mark_active(&gate, now);
    }
}

fn code_point(dscp: u8) -> usize {
    usize::from(dscp) % CODE_POINTS
}

/// What has arrived at once, as far as gates have to know.
#[derive(Clone, Debug, Default)]
pub struct Arrivals {
    /// The DSCPs, by bit.
    pub dscps: u64,
    /// The peers, as far as there is room.
    pub peers: ArrayVec<IpAddr, PEERS_AT_ONCE>,
}

impl Arrivals {
    /// A packet of this peer.
    pub fn note(&mut self, dscp: u8, peer: IpAddr) {
        self.dscps |= 1 << code_point(dscp);
        if !self.peers.is_full() && !self.peers.contains(&peer) {
            self.peers.push(peer);
        }
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Shaper {
    /// When packets that were not admitted may be.
    waits_until: Option<Time>,
    /// The time that packets take which were admitted since the last send, by DSCP.
    granted_ns: [u64; CODE_POINTS],
    has_granted: bool,
    /// How often a queue pair was held back by its rate limit, and by its gate.
    held: u64,
    gate_held: u64,
    /// Peers of whom something came lately, kept while there are gates.
    heard: Vec<(IpAddr, Time)>,
}

impl Default for Shaper {
    fn default() -> Shaper {
        let granted_ns = [0; CODE_POINTS];
        let (held, gate_held, heard) = (0, 0, Vec::new());
        Shaper { waits_until: None, granted_ns, has_granted: false, held, gate_held, heard }
    }
}

impl Shaper {
    /// How often a queue pair was held back by its rate limit.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// How often a queue pair was held back by its gate.
    pub fn gate_held(&self) -> u64 {
        self.gate_held
    }

    /// Peers that are remembered.
    pub fn heard(&self) -> usize {
        self.heard.len()
    }

    /// How many of `packets` packets with this DSCP to this peer may be sent now.
    pub fn admits(
        &mut self,
        table: &impl Table,
        now: Time,
        (dscp, peer): (u8, IpAddr),
        packets: usize,
    ) -> usize {
        // Who waited until then asks now.
        self.waits_until = self.waits_until.filter(|at| *at > now);
        let dscp = code_point(dscp);
        if let Some(opens_at) = self.closed_until(table, now, dscp, peer) {
            table.exchanges(dscp).mark_held(now);
            self.gate_held += 1;
            self.wait_until(now, opens_at);
            return 0;
        }
        let Some(limiter) = table.limiter(dscp) else { return packets };
        let (full_at, granted_ns) = (table.full_at(dscp).get(), self.granted_ns[dscp]);
        match limiter.admits(full_at, granted_ns, now, packets) {
            Ok(admitted) => {
                let more_ns = limiter.packet_ns().saturating_mul(admitted as u64);
                self.granted_ns[dscp] = granted_ns.saturating_add(more_ns);
                self.has_granted = true;
                admitted
            }
            Err(ask_at) => {
                self.held += 1;
                self.wait_until(now, ask_at);
                0
            }
        }
    }

    /// So many bytes of these DSCPs are sent.
    pub fn sent(
        &mut self,
        table: &impl Table,
        now: Time,
        runs: impl IntoIterator<Item = (u8, u64)>,
    ) {
        self.forget_granted();
        self.waits_until = self.waits_until.filter(|at| *at > now);
        for (dscp, bytes) in runs {
            let dscp = code_point(dscp);
            mark_active(table, dscp, now);
            if let Some(limiter) = table.limiter(dscp) {
                limiter.take(table.full_at(dscp), now, bytes);
            }
        }
    }

    /// Packets have arrived: exchanges that peers have begun.
    pub fn received(&mut self, table: &impl Table, now: Time, arrivals: &Arrivals) {
        let Arrivals { dscps, peers } = arrivals;
        self.heard.retain(|(peer, _)| !peers.contains(peer));
        let room = MAX_HEARD.saturating_sub(peers.len());
        self.heard.drain(..self.heard.len().saturating_sub(room));
        self.heard.extend(peers.iter().map(|peer| (*peer, now)));
        let gated = dscps & table.gated();
        (0..CODE_POINTS)
            .filter(|dscp| gated & 1 << dscp != 0)
            .for_each(|dscp| mark_active(table, dscp, now));
        if gated != 0 || !peers.is_empty() {
            // Whoever was held back at a gate that is open now need not wait longer.
            self.waits_until = self.waits_until.map(|at| at.min(now));
        }
    }

    /// What was admitted and not sent is not any more. Whoever waited until now asks again, or is
    /// gone.
    #[inline]
    pub fn lapse(&mut self, now: Time) {
        self.forget_granted();
        if self.waits_until.is_some_and(|at| at <= now) {
            self.waits_until = None;
        }
    }

    /// The table is another one: nobody waits for what the one before said.
    pub fn replaced(&mut self) {
        self.waits_until = None;
    }

    /// Whether packets with this DSCP to this peer wait for their gate: a timer of their connection
    /// says nothing about the peer.
    pub fn holds_back(&self, table: &impl Table, now: Time, (dscp, peer): (u8, IpAddr)) -> bool {
        self.closed_until(table, now, code_point(dscp), peer).is_some()
    }

    /// When packets that were not admitted may be.
    pub fn next_wakeup(&self) -> Option<Time> {
        self.waits_until
    }

    fn closed_until(
        &self,
        table: &impl Table,
        now: Time,
        dscp: usize,
        peer: IpAddr,
    ) -> Option<Time> {
        opens_at(table, dscp, now).filter(|_| !self.answers(table, now, dscp, peer))
    }

    /// Whether this may be an answer: something came from there within the quiet time of the gate,
    /// perhaps of another job, and acknowledgements and responses have the DSCP of their own queue
    /// pair.
    fn answers(&self, table: &impl Table, now: Time, dscp: usize, peer: IpAddr) -> bool {
        let heard = self.heard.iter().find(|(heard, _)| *heard == peer);
        heard
            .zip(table.gate(dscp))
            .is_some_and(|((_, at), gate)| gate.is_running(at.as_nanos(), now))
    }

    /// Asks again then, or for another DSCP sooner; within [`LONGEST_WAIT`].
    fn wait_until(&mut self, now: Time, at: Time) {
        let at = at.clamp(now + Duration::from_nanos(1), now + LONGEST_WAIT);
        self.waits_until = Some(self.waits_until.map_or(at, |other| other.min(at)));
    }

    #[inline]
    fn forget_granted(&mut self) {
        if self.has_granted {
            self.granted_ns = [0; CODE_POINTS];
            self.has_granted = false;
        }
    }
}
