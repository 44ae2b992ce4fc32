//! Rules that hold on the wire, checked on every packet that is sent or accepted.
//!
//! A transport can break these and still deliver every byte, only slower or at its peer's expense,
//! so completions alone would not reveal it:
//! - after an RNR NAK no request packet is sent before the delay has passed (IBA 9.7.5.2.8);
//! - no more request packets are unacknowledged than the window allows; in selective repeat,
//!   packets reported in a SACK do not count, and the oldest unacknowledged packet is at most four
//!   windows back;
//! - an acknowledgement grants no more credits than receives were posted, less those that the
//!   messages up to its MSN have taken (IBA 9.7.7.2);
//! - a queue pair keeps the minimum interval between its congestion notifications;
//! - telemetry that a queue pair returns came with one of its own latest packets.
//!
//! The first two rules follow the requester's view, in both modes: a READ of n responses is one
//! request packet that takes n PSNs in go-back-N and one in selective repeat, an acknowledgement
//! beyond an outstanding READ or atomic ends there, and an RNR NAK behind one starts no wait,
//! because the lost response is requested first. They apply to every request packet of a reliable
//! connection with a known sender ([`Monitor::requests`] counts the others, too).

use alloc::collections::{BTreeMap, VecDeque};

use roce::wire::{Aeth, Ext, Headers, Opcode, Psn, Sack, Service, Syndrome};
use roce::{Duration, Time};

use super::scenario::rnr_units;
use super::side::{Pair, Side};
use super::{Checked, ensure};
use crate::network::{Direction, Sighting, Stamps};

/// Most PSNs between the oldest unacknowledged packet and the newest in selective repeat, in
/// windows.
const HORIZON_WINDOWS: u32 = 4;

/// What a request packet waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Await {
    /// An acknowledgement.
    Ack,
    /// This many responses.
    Responses(u32),
}

/// A requester's state as seen on the wire.
#[derive(Debug)]
struct Requester {
    /// Connections of its pair before this one: queue pair numbers are reused.
    epoch: u32,
    /// First PSN that is not acknowledged.
    una: Psn,
    /// PSN after the last one sent.
    end: Psn,
    /// No request packet may be sent before this time.
    wait: Option<Time>,
    unanswered: Unanswered,
}

/// Request packets from `una` on, oldest first.
#[derive(Debug)]
enum Unanswered {
    GoBackN(VecDeque<Await>),
    Selective {
        /// For each PSN, whether a SACK reported it, without a retransmission since.
        reported: VecDeque<bool>,
        /// How many of them were not reported.
        in_flight: u32,
    },
}

/// How many request packets the rules were applied to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Requests {
    pub(super) checked: u64,
    /// Their sender is unknown.
    pub(super) skipped: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Monitor {
    /// By node and queue pair number.
    requesters: BTreeMap<(u32, u32), Requester>,
    /// When a queue pair last sent a congestion notification.
    notified: BTreeMap<(u32, u32), Time>,
    /// Telemetry that a queue pair got last, newest at the end.
    reports: BTreeMap<(u32, u32), VecDeque<u64>>,
    pub(super) requests: Requests,
}

/// Packets of which a queue pair may still return the telemetry: more than arrive before it sends.
const MOST_REPORTS: usize = 64;

impl Requester {
    fn new(epoch: u32, first: Psn, is_selective: bool) -> Requester {
        let unanswered = match is_selective {
            true => Unanswered::Selective { reported: VecDeque::new(), in_flight: 0 },
            false => Unanswered::GoBackN(VecDeque::new()),
        };
        Requester { epoch, una: first, end: first, wait: None, unanswered }
    }

    /// Records a request packet of `psns` PSNs; returns whether it is sent for the first time.
    fn send(&mut self, psn: Psn, psns: u32, waits_for: Await) -> bool {
        let is_new = !psn.is_before(self.end);
        if is_new {
            self.end = psn.plus(psns);
        }
        let place = psn.distance_from(self.una);
        match &mut self.unanswered {
            Unanswered::GoBackN(requests) if is_new => requests.push_back(waits_for),
            Unanswered::GoBackN(_) => {}
            Unanswered::Selective { reported, in_flight } if is_new => {
                reported.push_back(false);
                *in_flight += 1;
            }
            Unanswered::Selective { reported, in_flight } => {
                let place = usize::try_from(place).ok().and_then(|place| reported.get_mut(place));
                if let Some(reported) = place.filter(|reported| **reported) {
                    *reported = false;
                    *in_flight += 1;
                }
            }
        }
        is_new
    }

    /// Request packets in flight, and PSNs from the oldest on where a horizon bounds them.
    fn under_way(&self) -> (u32, u32) {
        match &self.unanswered {
            Unanswered::GoBackN(requests) => (requests.len() as u32, 0),
            Unanswered::Selective { reported, in_flight } => (*in_flight, reported.len() as u32),
        }
    }

    /// Acknowledges PSNs before `psn`, in go-back-N up to an outstanding READ or atomic. Returns
    /// whether all of them are acknowledged.
    fn acknowledge(&mut self, psn: Psn) -> bool {
        while self.una.is_before(psn) {
            match &mut self.unanswered {
                Unanswered::GoBackN(requests) => match requests.front() {
                    Some(Await::Ack) => drop(requests.pop_front()),
                    _ => return false,
                },
                Unanswered::Selective { reported, in_flight } => {
                    *in_flight -= u32::from(reported.pop_front() == Some(false));
                }
            }
            self.una = self.una.next();
        }
        true
    }

    /// A response to a READ or an atomic.
    fn respond(&mut self, psn: Psn) {
        if psn.is_before(self.una) {
            return;
        }
        let Unanswered::GoBackN(_) = self.unanswered else {
            // It implies that its request, and all before, were executed.
            self.acknowledge(psn.next());
            return;
        };
        if !self.acknowledge(psn) {
            return;
        }
        if let Unanswered::GoBackN(requests) = &mut self.unanswered
            && let Some(Await::Responses(left)) = requests.front_mut()
        {
            *left -= 1;
            if *left == 0 {
                requests.pop_front();
            }
            self.una = self.una.next();
        }
    }

    fn report(&mut self, sack: &Sack) {
        let Unanswered::Selective { reported, in_flight } = &mut self.unanswered else {
            return;
        };
        let mut bits = sack.bits();
        while bits != 0 {
            let place = sack.start.plus(bits.trailing_zeros()).distance_from(self.una);
            bits &= bits - 1;
            let place = usize::try_from(place).ok().and_then(|place| reported.get_mut(place));
            if let Some(reported) = place.filter(|reported| !**reported) {
                *reported = true;
                *in_flight -= 1;
            }
        }
    }

    fn hear(&mut self, psn: Psn, aeth: Aeth, now: Time) {
        match aeth.syndrome {
            Syndrome::Ack { .. } => drop(self.acknowledge(psn.next())),
            Syndrome::RnrNak { timer } => {
                let is_next = self.acknowledge(psn) && psn == self.una;
                // Packets that arrive while it waits, up to the last moment, change nothing.
                if is_next && self.wait.is_none_or(|until| until < now) {
                    let delay = Duration::from_micros(10) * rnr_units(timer);
                    self.wait = Some(now + delay);
                }
            }
            _ => drop(self.acknowledge(psn)),
        }
    }
}

impl Monitor {
    pub(super) fn see(&mut self, sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
        let opcode = sighting.headers.bth().opcode;
        if opcode == Opcode::Cnp && sighting.direction == Direction::Sent {
            return self.see_notification(sighting, pairs);
        }
        if !matches!(opcode.service(), Service::Rc | Service::Selective) {
            return Ok(());
        }
        if let Some(stamps) = sighting.telemetry {
            self.see_telemetry(sighting, stamps, pairs)?;
        }
        let is_request = opcode.is_request();
        match (sighting.direction, is_request) {
            (Direction::Sent, true) => self.see_request(sighting, pairs),
            (Direction::Sent, false) => see_credits(sighting, pairs),
            (Direction::Accepted, false) => {
                self.see_answer(sighting);
                Ok(())
            }
            (Direction::Accepted, true) => Ok(()),
        }
    }

    fn see_request(&mut self, sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
        let Some((pair, own)) = sender(sighting, pairs) else {
            self.requests.skipped += 1;
            return Ok(());
        };
        self.requests.checked += 1;
        let psn = sighting.headers.bth().psn;
        let is_selective = pair.params.is_selective();
        let fresh = || Requester::new(pair.epoch, psn, is_selective);
        let key = (own.node, own.qpn.get());
        let requester = self.requesters.entry(key).or_insert_with(fresh);
        if requester.epoch != pair.epoch {
            *requester = fresh();
        }
        let (psns, waits_for) = demand(&sighting.headers, pair);
        let is_new = requester.send(psn, psns, waits_for);
        if let Some(until) = requester.wait.take() {
            let (now, psn) = (sighting.at, psn.get());
            ensure!(now >= until, "packet {psn:#x} sent before its RNR delay ended {until}");
        }
        let (under_way, span) = requester.under_way();
        let window = pair.params.window_packets.max(1);
        ensure!(
            !is_new || under_way <= window && span <= HORIZON_WINDOWS * window,
            "{under_way} packets under way in {span}, though the window is {window}"
        );
        Ok(())
    }

    fn see_notification(&mut self, sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
        let Some((pair, own)) = sender(sighting, pairs) else {
            return Ok(());
        };
        let before = self.notified.insert((own.node, own.qpn.get()), sighting.at);
        let (least, passed) = (pair.params.cnp_interval(), before.map(|at| sighting.at.since(at)));
        ensure!(
            passed.is_none_or(|passed| passed >= least),
            "two congestion notifications within {least}"
        );
        Ok(())
    }

    fn see_telemetry(
        &mut self,
        sighting: &Sighting,
        stamps: Stamps,
        pairs: &[Pair],
    ) -> Checked<()> {
        let Stamps { digest, is_echo } = stamps;
        match sighting.direction {
            Direction::Accepted if !is_echo => {
                let own = sighting.headers.bth().dest_qp.get();
                let reports = self.reports.entry((sighting.node, own)).or_default();
                if reports.len() == MOST_REPORTS {
                    reports.pop_front();
                }
                reports.push_back(digest);
            }
            Direction::Sent if is_echo => {
                let Some((_, own)) = sender(sighting, pairs) else {
                    return Ok(());
                };
                let reports = self.reports.get(&(own.node, own.qpn.get()));
                let is_own = reports.is_some_and(|reports| reports.contains(&digest));
                ensure!(is_own, "{:?} returns telemetry of packets of another queue pair", own.qpn);
            }
            _ => {}
        }
        Ok(())
    }

    fn see_answer(&mut self, sighting: &Sighting) {
        let own = sighting.headers.bth().dest_qp.get();
        let Some(requester) = self.requesters.get_mut(&(sighting.node, own)) else {
            return;
        };
        let (psn, ext) = (sighting.headers.bth().psn, sighting.headers.ext());
        if !psn.is_before(requester.end) {
            return;
        }
        match *ext {
            Ext::Aeth(aeth) if sighting.headers.bth().opcode == Opcode::RcAcknowledge => {
                requester.hear(psn, aeth, sighting.at);
            }
            Ext::AethSack(aeth, sack) if !psn.next().is_before(requester.una) => {
                requester.hear(psn, aeth, sighting.at);
                requester.report(&sack);
            }
            Ext::AethSack(..) => {}
            _ => requester.respond(psn),
        }
    }
}

/// How many PSNs a request packet takes, and what it waits for.
fn demand(headers: &Headers, pair: &Pair) -> (u32, Await) {
    let responses = match *headers.ext() {
        Ext::AtomicEth(_) => 1,
        Ext::Reth(reth) if headers.bth().opcode.is_read_request() => {
            reth.len.div_ceil(pair.params.mtu.bytes()).max(1)
        }
        _ => return (1, Await::Ack),
    };
    let psns = if pair.params.is_selective() { 1 } else { responses };
    (psns, Await::Responses(responses))
}

/// Credits count from the MSN beside them: the requester may send that many messages after the one
/// with this number (IBA 9.7.7.2). A packet that back-pressure holds may leave after later messages
/// have taken receives, so those posted when it leaves say nothing about its credits.
fn see_credits(sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
    let Some((pair, own)) = sender(sighting, pairs) else {
        return Ok(());
    };
    let (Some(aeth), Some(credits)) = (sighting.headers.ext().aeth(), promised(&sighting.headers))
    else {
        return Ok(());
    };
    let mut sides = pair.sides.iter().flatten();
    let peer = sides.find(|side| side.qpn != own.qpn || side.node != own.node);
    let requests = peer.map_or(&[][..], |peer| &peer.taken_after);
    let msn = aeth.msn as usize;
    ensure!(msn <= requests.len(), "MSN {msn} of {} requests", requests.len());
    let taken = msn.checked_sub(1).map_or(0, |last| requests[last]);
    let left = own.receives_posted.saturating_sub(taken);
    ensure!(credits <= left, "{credits} receives promised from MSN {msn} on, {left} posted");
    Ok(())
}

/// Receives promised by an acknowledgement: codes 0 to 30 stand for 0, 1, 2, 3, 4, 6, 8, 12, …,
/// code 31 for no credits (IBA table 48).
fn promised(headers: &Headers) -> Option<u64> {
    let aeth = headers.ext().aeth()?;
    match aeth.syndrome {
        Syndrome::Ack { credits: 0 } => Some(0),
        Syndrome::Ack { credits } if credits < 31 => Some(rnr_units(credits)),
        _ => None,
    }
}

/// The side that sent a packet: the peer of its destination.
fn sender<'p>(sighting: &Sighting, pairs: &'p [Pair]) -> Option<(&'p Pair, &'p Side)> {
    let dest = sighting.headers.bth().dest_qp;
    pairs.iter().find_map(|pair| {
        let sides = pair.sides.as_ref()?;
        let to = sides.iter().position(|side| side.node == sighting.peer && side.qpn == dest)?;
        let own = &sides[1 - to];
        (own.node == sighting.node && !own.is_dead).then_some((pair, own))
    })
}
