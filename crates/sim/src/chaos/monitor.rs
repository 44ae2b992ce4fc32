//! Rules that hold on the wire, checked on every packet that is sent or accepted.
//!
//! A transport can break these and still deliver every byte, only slower or at its peer's expense, so
//! completions alone would not show it:
//! - after an RNR NAK, the refused packet is not sent before the delay has passed (IBA 9.7.5.2.8);
//! - not more request packets are unacknowledged than the window allows;
//! - an acknowledgement promises no more receives than are posted (IBA 9.7.7.2);
//! - congestion notifications of a queue pair keep their distance.
//!
//! Where losses are repaired by selective repeat, answers say more than these rules know, and where READs are
//! mixed in, packets and sequence numbers do not correspond one to one and a missing
//! READ response also makes the requester go back; the first two rules skip such queue pairs.

use alloc::collections::BTreeMap;

use roce::wire::{Headers, Opcode, Psn, Service, Syndrome};
use roce::{Duration, Time};

use super::scenario::rnr_units;
use super::side::{Pair, Side};
use super::{Checked, ensure};
use crate::fabric::{Direction, Sighting};

/// What the wire has shown of a requester.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// First PSN that is not acknowledged.
    una: Psn,
    /// PSN after the last one sent.
    end: Psn,
    /// PSN that must not be sent before then.
    wait: Option<(Psn, Time)>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Monitor {
    /// By node and queue pair number.
    seen: BTreeMap<(u32, u32), Seen>,
    /// When a queue pair last sent a congestion notification.
    notified: BTreeMap<(u32, u32), Time>,
}

impl Monitor {
    pub(super) fn see(&mut self, sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
        let opcode = sighting.headers.bth().opcode;
        if opcode == Opcode::Cnp && sighting.direction == Direction::Sent {
            return self.see_notification(sighting, pairs);
        }
        if opcode.service() != Service::Rc {
            return Ok(());
        }
        let is_request = opcode.is_request();
        match (sighting.direction, is_request) {
            (Direction::Sent, true) => self.see_request(sighting, pairs),
            (Direction::Sent, false) => see_credits(sighting, pairs),
            (Direction::Accepted, false) => self.see_answer(sighting, pairs),
            (Direction::Accepted, true) => Ok(()),
        }
    }

    fn see_request(&mut self, sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
        let Some((pair, own)) = sender(sighting, pairs) else {
            return Ok(());
        };
        let psn = sighting.headers.bth().psn;
        let fresh = Seen { una: psn, end: psn, wait: None };
        let seen = self.seen.entry((own.node, own.qpn.get())).or_insert(fresh);
        if !psn.is_before(seen.end) {
            seen.end = psn.next();
        }
        if own.has_read || pair.params.is_selective() {
            return Ok(());
        }
        if let Some((refused, until)) = seen.wait.filter(|(refused, _)| *refused == psn) {
            let now = sighting.at;
            let psn = refused.get();
            ensure!(now >= until, "packet {psn:#x} sent before its RNR delay ended {until}");
            seen.wait = None;
        }
        let under_way = seen.end.distance_from(seen.una);
        let window = pair.params.window_packets.max(1);
        ensure!(
            under_way <= window as i32,
            "{under_way} packets under way, though the window is {window}"
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

    fn see_answer(&mut self, sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
        let own = sighting.headers.bth().dest_qp.get();
        let Some(seen) = self.seen.get_mut(&(sighting.node, own)) else {
            return Ok(());
        };
        let psn = sighting.headers.bth().psn;
        let is_known = !psn.is_before(seen.una) && psn.is_before(seen.end);
        let Some(aeth) = sighting.headers.ext().aeth().filter(|_| is_known) else {
            return Ok(());
        };
        seen.una = match aeth.syndrome {
            Syndrome::Ack { .. } => psn.next(),
            _ => psn,
        };
        let has_read = receiver(sighting, pairs).is_some_and(|side| side.has_read);
        if let (Syndrome::RnrNak { timer }, None, false) = (aeth.syndrome, seen.wait, has_read) {
            let delay = Duration::from_micros(10) * rnr_units(timer);
            seen.wait = Some((psn, sighting.at + delay));
        }
        Ok(())
    }
}

fn see_credits(sighting: &Sighting, pairs: &[Pair]) -> Checked<()> {
    let (Some(credits), Some((_, own))) = (promised(&sighting.headers), sender(sighting, pairs))
    else {
        return Ok(());
    };
    let posted = own.receives.len() as u64;
    ensure!(credits <= posted, "{credits} receives promised, {posted} posted");
    Ok(())
}

/// How many receives an acknowledgement promises: codes 0 to 30 stand for 0, 1, 2, 3, 4, 6, 8, 12, …,
/// code 31 for no promise (IBA table 48).
fn promised(headers: &Headers) -> Option<u64> {
    let aeth = headers.ext().aeth()?;
    match aeth.syndrome {
        Syndrome::Ack { credits: 0 } => Some(0),
        Syndrome::Ack { credits } if credits < 31 => Some(rnr_units(credits)),
        _ => None,
    }
}

/// The side that sent a packet: the peer of the one that it is for.
fn sender<'p>(sighting: &Sighting, pairs: &'p [Pair]) -> Option<(&'p Pair, &'p Side)> {
    let dest = sighting.headers.bth().dest_qp;
    pairs.iter().find_map(|pair| {
        let sides = pair.sides.as_ref()?;
        let to = sides.iter().position(|side| side.node == sighting.peer && side.qpn == dest)?;
        let own = &sides[1 - to];
        (own.node == sighting.node && !own.is_dead).then_some((pair, own))
    })
}

/// The side that a packet is for.
fn receiver<'p>(sighting: &Sighting, pairs: &'p [Pair]) -> Option<&'p Side> {
    let dest = sighting.headers.bth().dest_qp;
    let mut sides = pairs.iter().flat_map(|pair| pair.sides.iter().flatten());
    sides.find(|side| side.node == sighting.node && side.qpn == dest)
}
