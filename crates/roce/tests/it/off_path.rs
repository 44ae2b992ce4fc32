//! The abilities of an off-path attacker, who sees no packet: everything is forged, from the peer's
//! address.
//!
//! Each test tries the values of a number that such an attacker has to guess and counts what is
//! accepted, so the chances stated in `SECURITY.md` are those of the code.

use roce::endpoint::{QpState, Reliability, Transmit};
use roce::verbs::{Qpn, WcStatus};
use roce::wire::{Aeth, Bth, Ext, Headers, Opcode, Psn, Reth, Syndrome};
use roce::world::Origin;

use crate::harness::BASE;
use crate::pair::{Pair, bth_to, positive};

/// Packets of the message in flight.
const IN_FLIGHT: u32 = 100;
/// How far ahead of the expected PSN selective repeat accepts packets while nothing arrived out of
/// order.
const HORIZON: u32 = WINDOW;
const WINDOW: u32 = 128;
const MTU: u32 = 1024;
const MAX_QPN: u32 = (1 << 24) - 1;

const MODES: [Reliability; 2] = [Reliability::GoBackN, Reliability::Selective];

const REFUSALS: [Syndrome; 4] = [
    Syndrome::InvalidRequest,
    Syndrome::RemoteAccess,
    Syndrome::RemoteOperation,
    Syndrome::InvalidRdRequest,
];

/// Node 0 has a WRITE of [`IN_FLIGHT`] packets in flight, none of which has arrived.
struct Victim {
    pair: Pair,
    sent: Vec<Transmit>,
}

impl Victim {
    fn new(reliability: Reliability) -> Victim {
        let mut pair = Pair::with(|connect| {
            connect.reliability = reliability;
            connect.window_packets = WINDOW;
            connect.retry_count = 1;
        });
        pair.write(1, 0, IN_FLIGHT * MTU);
        let mut victim = Victim { pair, sent: Vec::new() };
        victim.sent = victim.sent_by(0);
        assert_eq!(victim.sent.len(), IN_FLIGHT as usize);
        victim
    }

    fn qpn(&self, side: usize) -> Qpn {
        [self.pair.a, self.pair.b][side].qpn
    }

    fn sent_by(&mut self, side: usize) -> Vec<Transmit> {
        let now = self.pair.network.now();
        let endpoint = &mut self.pair.network.nodes[side].endpoint;
        endpoint.handle_timeout(now);
        std::iter::from_fn(|| endpoint.poll_transmit(now)).collect()
    }

    fn deliver(&mut self, side: usize, headers: &Headers, payload_len: usize) {
        let source = self.pair.network.nodes[1 - side].path().remote;
        let (now, origin) = (self.pair.network.now(), Origin::new(source, source.ip()));
        let endpoint = &mut self.pair.network.nodes[side].endpoint;
        let _ = endpoint.handle_packet(now, &origin, headers, payload_len);
    }

    /// A packet to one side's queue pair, with this PSN.
    fn forge(&mut self, side: usize, opcode: Opcode, psn: Psn, ext: Ext) {
        let bth = Bth { opcode, psn, ..bth_to(self.qpn(side)) };
        self.deliver(side, &Headers::new(bth, ext).unwrap(), 0);
    }

    fn answer(&mut self, psn: Psn, syndrome: Syndrome) {
        self.forge(0, Opcode::RcAcknowledge, psn, Ext::Aeth(Aeth { syndrome, msn: 0 }));
    }

    /// An empty WRITE with a key that was never assigned.
    fn write_with_wrong_key(&mut self, psn: Psn) {
        let reth = Reth { addr: BASE, rkey: !self.pair.regions[1].rkey, len: 8 };
        let bth = Bth { opcode: Opcode::RcWriteOnly, psn, ..bth_to(self.qpn(1)) };
        self.deliver(1, &Headers::new(bth, Ext::Reth(reth)).unwrap(), 8);
    }

    fn first_psn(&self) -> Psn {
        self.pair.first_psn()
    }

    /// The connection continues unharmed.
    fn assert_unharmed(mut self) {
        assert_eq!([0, 1].map(|side| self.pair.state(side)), [QpState::Rts; 2]);
        assert_eq!(self.sent_by(0).len(), 0, "nothing is retransmitted");
        let (sender, _) = self.finish();
        assert_eq!(sender, [(1, WcStatus::Success)]);
    }

    /// Carries packets until the message has completed; returns that and the timeouts it took.
    fn finish(&mut self) -> (Vec<(u64, WcStatus)>, u32) {
        self.finish_under(|_| {})
    }

    /// The same with a forged packet after each packet that arrives at node 1.
    fn finish_under(&mut self, forge: impl Fn(&mut Victim)) -> (Vec<(u64, WcStatus)>, u32) {
        let mut timeouts = 0;
        let mut requests = std::mem::take(&mut self.sent);
        for _ in 0..1_000 {
            for packet in requests {
                self.deliver(1, &packet.headers, packet.payload_len());
                forge(self);
            }
            for answer in self.sent_by(1) {
                self.deliver(0, &answer.headers, answer.payload_len());
            }
            let endings = self.pair.network.sent_by(self.pair.a);
            if !endings.is_empty() {
                return (endings.iter().map(|wc| (wc.wr_id, wc.status)).collect(), timeouts);
            }
            requests = self.sent_by(0);
            if requests.is_empty() {
                let (at, _) = self.pair.network.nodes[0].endpoint.poll_timeout().unwrap();
                self.pair.network.advance_to(at);
                timeouts += 1;
                requests = self.sent_by(0);
            }
        }
        panic!("the message never completes");
    }
}

/// PSNs outside a window of `len` from `first` on: all nearby ones, and some from everywhere.
fn outside(first: Psn, len: u32) -> impl Iterator<Item = Psn> {
    let near = (len..len + 20_000).chain(Psn::MODULUS - 20_000..Psn::MODULUS);
    near.chain((len..Psn::MODULUS).step_by(251)).map(move |ahead| first.plus(ahead))
}

#[test]
fn a_forged_refusal_ends_a_connection_only_with_a_psn_in_flight() {
    for mode in MODES {
        let mut victim = Victim::new(mode);
        let first = victim.first_psn();
        for psn in outside(first, IN_FLIGHT) {
            victim.answer(psn, Syndrome::RemoteAccess);
        }
        let counters = *victim.pair.counters(0);
        let dropped = counters.bad_psn + counters.duplicate_acks;
        assert_eq!(dropped, outside(first, IN_FLIGHT).count() as u64, "{mode:?}");
        assert_eq!(counters.fatal_naks_received, 0, "{mode:?}");
        victim.assert_unharmed();
        for ahead in 0..IN_FLIGHT {
            let mut victim = Victim::new(mode);
            victim.answer(first.plus(ahead), REFUSALS[ahead as usize % REFUSALS.len()]);
            assert_eq!(victim.pair.state(0), QpState::Error, "{mode:?} {ahead}");
        }
    }
}

#[test]
fn forged_answers_of_every_kind_outside_the_packets_in_flight_do_nothing() {
    let others =
        [Syndrome::SequenceError, Syndrome::RnrNak { timer: 1 }, Syndrome::Ack { credits: 0 }];
    for mode in MODES {
        for syndrome in REFUSALS.into_iter().chain(others) {
            let mut victim = Victim::new(mode);
            for psn in outside(victim.first_psn(), IN_FLIGHT) {
                victim.answer(psn, syndrome);
            }
            victim.assert_unharmed();
        }
        let mut victim = Victim::new(mode);
        for psn in outside(victim.first_psn(), IN_FLIGHT) {
            victim.forge(0, Opcode::RcReadResponseOnly, psn, positive());
        }
        victim.assert_unharmed();
    }
}

#[test]
fn a_forged_packet_reaches_one_queue_pair_and_only_from_its_peers_address() {
    let mut victim = Victim::new(Reliability::GoBackN);
    let psn = victim.first_psn();
    let aeth = Aeth { syndrome: Syndrome::RemoteAccess, msn: 0 };
    let own = victim.qpn(0).get();
    let near = (0..24).flat_map(|a| (0..24).map(move |b| own ^ (1 << a | 1 << b)));
    let others: Vec<u32> = near.chain((0..=MAX_QPN).step_by(251)).filter(|n| *n != own).collect();
    for &number in &others {
        let bth = Bth { opcode: Opcode::RcAcknowledge, psn, ..bth_to(Qpn::new(number)) };
        victim.deliver(0, &Headers::new(bth, Ext::Aeth(aeth)).unwrap(), 0);
    }
    assert_eq!(victim.pair.counters(0).unknown_qp, others.len() as u64);
    let bth = Bth { opcode: Opcode::RcAcknowledge, psn, ..bth_to(victim.qpn(0)) };
    let headers = Headers::new(bth, Ext::Aeth(aeth)).unwrap();
    let (here, now) = (victim.pair.network.nodes[0].path().remote, victim.pair.network.now());
    for source in [here, "10.250.0.9:4791".parse().unwrap(), "[fd00::9]:4791".parse().unwrap()] {
        let endpoint = &mut victim.pair.network.nodes[0].endpoint;
        let _ = endpoint.handle_packet(now, &Origin::new(source, here.ip()), &headers, 0);
    }
    assert_eq!(victim.pair.counters(0).wrong_source, 3);
    victim.assert_unharmed();
}

#[test]
fn a_forged_request_ends_a_connection_only_with_the_psn_that_is_due_or_early() {
    for (mode, window) in MODES.into_iter().zip([1, HORIZON]) {
        let mut victim = Victim::new(mode);
        let expected = victim.first_psn();
        for psn in outside(expected, window) {
            victim.write_with_wrong_key(psn);
        }
        let counters = victim.pair.counters(1);
        let dropped = counters.duplicates + counters.out_of_sequence;
        assert_eq!(dropped, outside(expected, window).count() as u64, "{mode:?}");
        assert_eq!((counters.bad_key, victim.pair.state(1)), (0, QpState::Rts), "{mode:?}");
        victim.write_with_wrong_key(expected);
        assert_eq!(victim.pair.state(1), QpState::Error, "{mode:?}");
    }
}

/// An out-of-order request makes the responder request the missing ones. Forging such requests
/// continuously slows the connection down; it does not fail, even with a single retry.
#[test]
fn forged_requests_ahead_cost_time_and_no_connection() {
    for mode in MODES {
        for ahead in [1, WINDOW, 4 * WINDOW, 1 << 22] {
            let mut victim = Victim::new(mode);
            let end = victim.first_psn().plus(IN_FLIGHT + HORIZON + ahead);
            let (endings, timeouts) = victim.finish_under(|victim| {
                victim.write_with_wrong_key(end);
            });
            assert_eq!(endings, [(1, WcStatus::Success)], "{mode:?} {ahead}");
            assert!(timeouts <= 2, "{mode:?} {ahead}: {timeouts}");
            assert_eq!(victim.pair.state(0), QpState::Rts);
        }
    }
}
