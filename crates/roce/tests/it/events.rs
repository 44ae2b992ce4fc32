//! Asynchronous events, notifications of completion queues, and their objects.

use roce::Time;
use roce::endpoint::{AsyncEvent, Endpoint, EndpointConfig, Mtu, QpAttr, QpConfig, QpState};
use roce::verbs::{
    Access, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendOp, SendWr, SgList, Transport, VerbsError,
};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn};
use roce::world::Origin;

use AsyncEvent::{CommunicationEstablished, CqError, QpAccessError, QpFatal, QpRequestError};

use crate::harness::{BASE, Chance, End, Network, NetworkConfig};
use crate::kit::{TRANSPORTS, attributes, bring_to, list, recv, registered, send};

struct Pair {
    network: Network,
    a: End,
    b: End,
    regions: [MemoryRegion; 2],
}

impl Pair {
    fn new(transport: Transport) -> Pair {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let (a, b) = network.pair_of(transport, Mtu::M256);
        Pair { network, a, b, regions }
    }

    fn wr(&self, op: SendOp, len: u32) -> SendWr {
        let to = Some(self.network.address(self.b));
        SendWr { to, ..send(1, op, list(self.regions[0], 0, len)) }
    }

    /// A message of node 0 into a receive of node 1.
    fn deliver(&mut self, solicited: bool) {
        let wr = SendWr { solicited, ..self.wr(SendOp::Send, 10) };
        self.network.post_send(self.a, wr);
        self.network.run(10_000);
    }

    fn receives(&mut self, count: u64) {
        for wr_id in 0..count {
            self.network.post_recv(self.b, recv(wr_id, list(self.regions[1], 0, 100)));
        }
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        let b = self.b;
        std::iter::from_fn(|| self.network.endpoint(b).poll_event()).collect()
    }

    fn arm(&mut self, cq: CqId, solicited_only: bool) {
        self.network.nodes[1].endpoint.req_notify(cq, solicited_only).unwrap();
    }

    fn notified(&mut self) -> Vec<CqId> {
        let endpoint = &mut self.network.nodes[1].endpoint;
        std::iter::from_fn(|| endpoint.poll_notified()).collect()
    }
}

// ---- events ------------------------------------------------------------------------------------

#[test]
fn the_first_packet_in_rtr_establishes_communication_once() {
    for transport in TRANSPORTS {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let (a, b) = (network.create(0, transport, None), network.create(1, transport, None));
        network.bring_up(a, b, transport, Mtu::M256);
        let base = attributes(network.nodes[0].path(), b.qpn, a.qpn, Mtu::M256);
        bring_to(network.endpoint(b), b.qpn, transport, &base, QpState::Rtr);
        for wr_id in 0..2 {
            network.post_recv(b, recv(wr_id, list(regions[1], 0, 100)));
        }
        let to = Some(network.address(b));
        let wr = SendWr { to, ..send(1, SendOp::Send, list(regions[0], 0, 10)) };
        assert_eq!(network.endpoint(b).poll_event(), None);
        network.post_send(a, wr.clone());
        network.post_send(a, wr);
        network.run(1000);
        let event = network.endpoint(b).poll_event();
        assert_eq!(event, Some(CommunicationEstablished(b.qpn)), "{transport:?}");
        assert_eq!(network.endpoint(b).poll_event(), None);
        assert_eq!(network.endpoint(a).poll_event(), None);
        assert_eq!(network.received_by(b).len(), 2);
    }
}

#[test]
fn refused_requests_are_told_by_their_reason() {
    let mut pair = Pair::new(Transport::Rc);
    let wr = pair.wr(SendOp::Write { remote_addr: BASE, rkey: 1 }, 10);
    pair.network.post_send(pair.a, wr);
    pair.network.run(1000);
    assert_eq!(pair.events(), [QpAccessError(pair.b.qpn)]);
    let mut pair = Pair::new(Transport::Rc);
    strike(&mut pair, Opcode::RcSendMiddle, 256);
    assert_eq!(pair.events(), [QpRequestError(pair.b.qpn)]);
    assert_eq!(pair.network.state(pair.b), QpState::Error);
    // An error reported by a receive is not an event.
    let mut pair = Pair::new(Transport::Rc);
    pair.receives(1);
    strike(&mut pair, Opcode::RcSendOnly, 200);
    assert_eq!(pair.network.state(pair.b), QpState::Error);
    assert_eq!(pair.events(), []);
}

/// Hands node 1 the first packet of the connection.
fn strike(pair: &mut Pair, opcode: Opcode, payload: usize) {
    let psn = crate::kit::first_psn(pair.a.qpn);
    let bth = Bth {
        opcode,
        solicited: false,
        mig_req: true,
        pad: 0,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: pair.b.qpn,
        ack_req: true,
        psn,
    };
    let headers = Headers::new(bth, Ext::None).unwrap();
    let source = pair.network.nodes[0].path().remote;
    let origin = Origin::new(source, source.ip());
    let endpoint = &mut pair.network.nodes[1].endpoint;
    let _ = endpoint.handle_packet(Time::ZERO, &origin, &headers, payload);
}

#[test]
fn an_overrun_is_told_once_for_the_queue_and_for_each_queue_pair() {
    let mut network = Network::new(&NetworkConfig::default());
    let region = registered(&mut network.nodes[1]);
    let (a, b) = (network.create_end(0, 64, 64), network.create_end(1, 64, 2));
    network.connect(a, b, |_| {});
    let source = registered(&mut network.nodes[0]);
    for wr_id in 0..4 {
        network.post_recv(b, recv(wr_id, list(region, 0, 100)));
        network.post_send(a, send(wr_id, SendOp::Send, list(source, 0, 10)));
    }
    network.run_until(Time::from_nanos(1_000_000));
    let endpoint = network.endpoint(b);
    assert_eq!(endpoint.cq_overrun(b.recv_cq), Some(true));
    let events: Vec<_> = std::iter::from_fn(|| endpoint.poll_event()).collect();
    assert_eq!(events, [CqError(b.recv_cq), QpFatal(b.qpn)]);
}

#[test]
fn events_go_with_the_object_they_are_about() {
    let mut pair = Pair::new(Transport::Rc);
    strike(&mut pair, Opcode::RcSendMiddle, 256);
    let b = pair.b;
    pair.network.endpoint(b).destroy_qp(Time::ZERO, b.qpn).unwrap();
    assert_eq!(pair.events(), []);
}

#[test]
fn going_to_error_by_order_is_no_event() {
    for transport in TRANSPORTS {
        let mut pair = Pair::new(transport);
        let b = pair.b;
        pair.network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(pair.events(), []);
    }
}

// ---- notifications -----------------------------------------------------------------------------

#[test]
fn one_arm_makes_one_notification() {
    for transport in TRANSPORTS {
        let mut pair = Pair::new(transport);
        pair.receives(4);
        pair.deliver(false);
        assert_eq!(pair.notified(), [], "not armed");
        let (b, cq) = (pair.b, pair.b.recv_cq);
        pair.network.received_by(b);
        pair.arm(cq, false);
        assert_eq!(pair.notified(), [], "nothing waits");
        pair.deliver(false);
        pair.deliver(false);
        assert_eq!(pair.notified(), [cq], "{transport:?}");
        pair.deliver(false);
        assert_eq!(pair.notified(), []);
    }
}

/// A program that polls, arms and sleeps would otherwise miss a completion in between.
#[test]
fn arming_with_completions_waiting_notifies_at_once() {
    for transport in TRANSPORTS {
        let mut pair = Pair::new(transport);
        pair.receives(4);
        let (b, cq) = (pair.b, pair.b.recv_cq);
        pair.deliver(false);
        pair.arm(cq, true);
        assert_eq!(pair.notified(), [], "{transport:?}: what waits is not solicited");
        pair.arm(cq, false);
        assert_eq!(pair.notified(), [cq], "{transport:?}");
        pair.arm(cq, false);
        assert_eq!(pair.notified(), [], "one notification for each completion");
        pair.deliver(false);
        assert_eq!(pair.notified(), [cq], "{transport:?}: it is armed");
        pair.deliver(true);
        assert_eq!(pair.notified(), [], "{transport:?}: it is not armed");
        pair.arm(cq, true);
        assert_eq!(pair.notified(), [cq], "{transport:?}: a solicited one waits");
        pair.network.received_by(b);
        pair.deliver(false);
        pair.network.received_by(b);
        pair.arm(cq, false);
        assert_eq!(pair.notified(), [], "it was polled");
        pair.arm(cq, false);
        pair.receives(1);
        pair.network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(pair.notified(), [cq], "{transport:?}: a failed one");
    }
}

/// A program that reads an event, arms and then takes one completion, over and over, gets an event
/// for each completion and none in vain.
#[test]
fn arming_before_polling_brings_one_event_for_each_completion() {
    for transport in TRANSPORTS {
        let mut pair = Pair::new(transport);
        pair.receives(40);
        let (b, cq) = (pair.b, pair.b.recv_cq);
        pair.arm(cq, false);
        for burst in [1, 3, 1, 2, 5, 1] {
            (0..burst).for_each(|_| pair.deliver(false));
            for left in (0..burst).rev() {
                assert_eq!(pair.notified(), [cq], "{transport:?}: {left} more to come");
                pair.arm(cq, false);
                assert!(pair.network.endpoint(b).poll_cq(cq).is_some());
            }
            assert_eq!(pair.notified(), [], "{transport:?}: nothing is there");
        }
    }
}

#[test]
fn solicited_only_waits_for_what_is_solicited_or_wrong() {
    for transport in TRANSPORTS {
        let mut pair = Pair::new(transport);
        pair.receives(4);
        let (cq, b) = (pair.b.recv_cq, pair.b);
        pair.arm(cq, true);
        pair.deliver(false);
        assert_eq!(pair.notified(), []);
        pair.deliver(true);
        assert_eq!(pair.notified(), [cq], "{transport:?}: solicited");
        let solicited: Vec<bool> =
            pair.network.received_by(b).iter().map(|done| done.solicited).collect();
        assert_eq!(solicited, [false, true]);
        pair.arm(cq, true);
        pair.network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(pair.notified(), [cq], "{transport:?}: flushed");
    }
}

#[test]
fn the_wider_of_two_requests_holds() {
    for (first, second) in [(false, true), (true, false)] {
        let mut pair = Pair::new(Transport::Rc);
        pair.receives(1);
        let cq = pair.b.recv_cq;
        pair.arm(cq, first);
        pair.arm(cq, second);
        pair.deliver(false);
        assert_eq!(pair.notified(), [cq]);
    }
}

#[test]
fn sends_notify_their_own_queue() {
    let mut pair = Pair::new(Transport::Rc);
    pair.receives(2);
    let a = pair.a;
    pair.network.endpoint(a).req_notify(a.send_cq, false).unwrap();
    let wr = SendWr { signaled: false, ..pair.wr(SendOp::Send, 10) };
    pair.network.post_send(a, wr);
    pair.network.run(1000);
    assert_eq!(pair.network.endpoint(a).poll_notified(), None, "not signalled");
    pair.deliver(false);
    assert_eq!(pair.network.endpoint(a).poll_notified(), Some(a.send_cq));
}

/// A program that polls and arms, in either order, and then sleeps until it is notified never
/// misses a completion, whenever that arrives.
#[test]
fn polling_and_arming_in_any_order_loses_no_wake_up() {
    const TOTAL: u64 = 60;
    for seed in 0..300 {
        let mut draw = Chance::new(seed);
        let mut pair = Pair::new(TRANSPORTS[draw.below(3) as usize]);
        pair.receives(TOTAL);
        let (b, cq) = (pair.b, pair.b.recv_cq);
        let (mut sent, mut seen) = (0, 0);
        let deliver = |pair: &mut Pair, draw: &mut Chance, sent: &mut u64| {
            let burst = draw.below(3).min(TOTAL - *sent);
            (0..burst).for_each(|_| pair.deliver(draw.per_mille(500)));
            *sent += burst;
        };
        while seen < TOTAL {
            // Completions may arrive between any two steps.
            let arms_first = draw.per_mille(500);
            for arms in [arms_first, !arms_first] {
                deliver(&mut pair, &mut draw, &mut sent);
                if arms {
                    pair.arm(cq, false);
                } else {
                    seen += pair.network.received_by(b).len() as u64;
                }
            }
            deliver(&mut pair, &mut draw, &mut sent);
            let woken = pair.notified() == [cq];
            assert!(
                woken || seen == sent,
                "seed {seed}: {} completions slept through",
                sent - seen
            );
            if sent < TOTAL && !woken {
                pair.deliver(false);
                sent += 1;
                assert_eq!(pair.notified(), [cq], "seed {seed}: a sleeper is not woken");
            }
        }
    }
}

// ---- objects -----------------------------------------------------------------------------------

#[test]
fn completion_queues_change_size_but_lose_nothing() {
    let mut pair = Pair::new(Transport::Rc);
    pair.receives(3);
    for _ in 0..3 {
        pair.deliver(false);
    }
    let (b, cq) = (pair.b, pair.b.recv_cq);
    let endpoint = pair.network.endpoint(b);
    let too_small = endpoint.resize_cq(cq, 2);
    assert_eq!(
        too_small,
        Err(VerbsError::TableFull { what: "completion queue entries", limit: 2 })
    );
    endpoint.resize_cq(cq, 3).unwrap();
    assert_eq!(endpoint.resize_cq(CqId(7), 3), Err(VerbsError::NoCq(7)));
    assert!(endpoint.resize_cq(cq, u32::MAX).is_err());
    pair.receives(1);
    pair.deliver(false);
    assert_eq!(pair.network.endpoint(b).cq_overrun(cq), Some(true));
    assert_eq!(pair.network.received_by(b).len(), 3);
}

#[test]
fn stale_handles_are_refused_everywhere() {
    let mut endpoint = Endpoint::new(EndpointConfig::default());
    let pd = endpoint.alloc_pd();
    let cq = endpoint.create_cq(4).unwrap();
    let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 4, 4)).unwrap();
    assert_eq!(endpoint.dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)));
    endpoint.req_notify(cq, false).unwrap();
    endpoint.destroy_qp(Time::ZERO, qpn).unwrap();
    endpoint.destroy_cq(cq).unwrap();
    let region = endpoint.register(pd, BASE, 64, Access::LOCAL).unwrap();
    assert_eq!(endpoint.dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)));
    endpoint.deregister(region.lkey).unwrap();
    endpoint.dealloc_pd(pd).unwrap();
    let (no_qp, no_cq) = (VerbsError::NoQp(qpn.get()), VerbsError::NoCq(cq.0));
    assert_eq!(endpoint.query_qp(qpn), Err(no_qp));
    assert_eq!(endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(QpState::Init)), Err(no_qp));
    assert_eq!(
        endpoint.post_recv(Time::ZERO, qpn, RecvWr { wr_id: 1, sges: SgList::new() }),
        Err(no_qp)
    );
    assert_eq!(endpoint.post_send(Time::ZERO, qpn, SendWr::default()), Err(no_qp));
    assert_eq!(endpoint.req_notify(cq, true), Err(no_cq));
    assert_eq!(endpoint.resize_cq(cq, 4), Err(no_cq));
    assert_eq!(endpoint.poll_notified(), None);
    let stale = QpConfig::rc(pd, cq, 4, 4);
    assert_eq!(endpoint.create_qp(stale), Err(VerbsError::NoPd(pd.0)));
    assert_ne!(endpoint.alloc_pd(), PdId(pd.0), "numbers do not come back at once");
}

#[test]
fn prefixes_stand_in_every_queue_pair_number() {
    let config = EndpointConfig { qpn_prefix: 0xab, max_qps: 100, ..EndpointConfig::default() };
    let mut endpoint = Endpoint::new(config);
    let pd = endpoint.alloc_pd();
    let cq = endpoint.create_cq(4).unwrap();
    let numbers: Vec<u32> =
        (0..100).map(|_| endpoint.create_qp(QpConfig::rc(pd, cq, 1, 1)).unwrap().get()).collect();
    assert!(numbers.iter().all(|number| number >> 16 == 0xab));
    let mut sorted = numbers.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 100);
    assert_ne!(sorted, numbers, "numbers are not consecutive");
}

#[test]
fn management_queue_pairs_never_answer() {
    for number in [0, 1] {
        let mut pair = Pair::new(Transport::Rc);
        let wr = pair.wr(SendOp::Send, 10);
        pair.network.post_send(pair.a, wr);
        let genuine = pair.network.nodes[0].endpoint.poll_transmit(Time::ZERO).unwrap().headers;
        let bth = Bth { dest_qp: Qpn::new(number), psn: Psn::new(0), ..*genuine.bth() };
        let headers = Headers::new(bth, *genuine.ext()).unwrap();
        let source = pair.network.nodes[0].path().remote;
        let endpoint = &mut pair.network.nodes[1].endpoint;
        let origin = Origin::new(source, source.ip());
        let delivery = endpoint.handle_packet(Time::ZERO, &origin, &headers, 10);
        assert!(delivery.pieces.is_empty());
        assert_eq!(endpoint.counters().unknown_qp, 1);
    }
}
