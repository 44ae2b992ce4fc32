//! Shared receive queues: one queue for many queue pairs of every transport, and its limit.

use roce::Time;
use roce::endpoint::{
    AsyncEvent, Endpoint, EndpointConfig, Mtu, QpAttr, QpConfig, QpState, SrqConfig,
};
use roce::verbs::{
    MemoryRegion, PdId, RecvWr, SendOp, SendWr, SgList, SrqId, Transport, VerbsError, WcStatus,
};

use AsyncEvent::{LastWqeReached, SrqLimitReached};
use WcStatus::{Success, WrFlushError};

use crate::harness::{Chance, End, Network, NetworkConfig};
use crate::kit::{TRANSPORTS, brief, list, recv, registered, send};

/// Senders on node 0, each with a peer on node 1; the peers share one receive queue.
struct Shared {
    network: Network,
    srq: SrqId,
    pairs: Vec<(End, End)>,
    regions: [MemoryRegion; 2],
}

impl Shared {
    fn new(transports: &[Transport], max_wr: u32) -> Shared {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let node = &mut network.nodes[1];
        let config = SrqConfig { pd: node.pd, max_wr, limit: 0 };
        let srq = node.endpoint.create_srq(config).unwrap();
        let pairs = transports.iter().map(|&transport| {
            let (a, b) =
                (network.create(0, transport, None), network.create(1, transport, Some(srq)));
            network.bring_up(a, b, transport, Mtu::M256);
            network.bring_up(b, a, transport, Mtu::M256);
            (a, b)
        });
        let pairs = pairs.collect();
        Shared { network, srq, pairs, regions }
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.network.nodes[1].endpoint
    }

    fn post(&mut self, wr_id: u64, len: u32) -> Result<(), VerbsError> {
        let wr = recv(wr_id, list(self.regions[1], 1000 * wr_id, len));
        let srq = self.srq;
        self.endpoint().post_srq_recv(srq, wr)
    }

    fn send(&mut self, pair: usize, wr_id: u64, offset: u64, len: u32) {
        let (a, b) = self.pairs[pair];
        let to = Some(self.network.address(b));
        let sges = list(self.regions[0], offset, len);
        self.network
            .post_send(a, SendWr { to, ..send(wr_id, SendOp::SendImm(wr_id as u32), sges) });
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.endpoint().poll_event()).collect()
    }
}

#[test]
fn receives_are_taken_in_order_by_whoever_needs_one() {
    let mut shared = Shared::new(&TRANSPORTS, 16);
    for wr_id in 0..6 {
        shared.post(wr_id, 900).unwrap();
    }
    for (turn, pair) in [(10, 2), (11, 0), (12, 1), (13, 1), (14, 2), (15, 0)] {
        shared.send(pair, turn, 7 * turn, 600);
        shared.network.run(10_000);
        let b = shared.pairs[pair].1;
        let received = shared.network.received_by(b);
        let wanted = turn - 10;
        assert_eq!(brief(&received), [(wanted, Success)], "turn {turn}");
        assert_eq!((received[0].imm, received[0].qpn), (Some(turn as u32), b.qpn));
        let header = if pair == 2 { 40 } else { 0 };
        let [ours, theirs] = [&shared.network.nodes[0].memory, &shared.network.nodes[1].memory];
        let at = shared.regions[1].addr + 1000 * wanted + header;
        assert_eq!(theirs.peek(at, 600), ours.peek(shared.regions[0].addr + 7 * turn, 600));
    }
}

#[test]
fn messages_in_progress_at_once_fill_different_receives() {
    let mut shared = Shared::new(&[Transport::Rc, Transport::Uc, Transport::Rc], 8);
    for wr_id in 0..6 {
        shared.post(wr_id, 1000).unwrap();
    }
    let mut draw = Chance::new(4);
    for turn in 0..6 {
        shared.send(turn as usize % 3, turn, 100 * turn, 500 + draw.below(500) as u32);
    }
    shared.network.run(10_000);
    let mut seen: Vec<u64> = Vec::new();
    for (_, b) in shared.pairs.clone() {
        for done in shared.network.received_by(b) {
            assert_eq!(done.status, Success);
            let from = shared.regions[0].addr + 100 * u64::from(done.imm.unwrap());
            let to = shared.regions[1].addr + 1000 * done.wr_id;
            let len = done.byte_len as usize;
            let [ours, theirs] = [&shared.network.nodes[0].memory, &shared.network.nodes[1].memory];
            assert_eq!(theirs.peek(to, len), ours.peek(from, len));
            seen.push(done.wr_id);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn an_empty_queue_makes_reliable_senders_wait_and_loses_the_others() {
    let mut shared = Shared::new(&TRANSPORTS, 8);
    for pair in 0..3 {
        shared.send(pair, pair as u64, 0, 100);
    }
    shared.network.run_until(Time::from_nanos(100_000));
    let counters = *shared.endpoint().counters();
    assert_eq!((counters.no_receive, counters.rnr_naks_sent), (2, 1));
    for wr_id in 0..3 {
        shared.post(wr_id, 200).unwrap();
    }
    shared.network.run(10_000);
    let received: Vec<usize> =
        shared.pairs.clone().iter().map(|pair| shared.network.received_by(pair.1).len()).collect();
    assert_eq!(received, [1, 0, 0]);
}

// ---- the limit ---------------------------------------------------------------------------------

#[test]
fn the_limit_springs_once_when_too_few_are_left() {
    let mut shared = Shared::new(&[Transport::Rc], 8);
    let srq = shared.srq;
    for wr_id in 0..5 {
        shared.post(wr_id, 200).unwrap();
    }
    shared.endpoint().set_srq_limit(srq, 3).unwrap();
    for wr_id in 0..2 {
        shared.send(0, wr_id, 0, 10);
    }
    shared.network.run(1000);
    assert_eq!(shared.events(), [], "three are left");
    assert_eq!(shared.endpoint().query_srq(srq).unwrap().limit, 3);
    shared.send(0, 2, 0, 10);
    shared.network.run(1000);
    assert_eq!(shared.events(), [SrqLimitReached(srq)]);
    assert_eq!(shared.endpoint().query_srq(srq).unwrap().limit, 0);
    shared.send(0, 3, 0, 10);
    shared.network.run(1000);
    assert_eq!(shared.events(), [], "disarmed");
    shared.endpoint().set_srq_limit(srq, 2).unwrap();
    assert_eq!(shared.events(), [SrqLimitReached(srq)], "too few already");
    shared.endpoint().set_srq_limit(srq, 1).unwrap();
    shared.send(0, 4, 0, 10);
    shared.network.run(1000);
    assert_eq!(shared.events(), [SrqLimitReached(srq)]);
    let pd = shared.network.nodes[1].pd;
    let config = SrqConfig { pd, max_wr: 8, limit: 0 };
    assert_eq!(shared.endpoint().query_srq(srq), Ok(config));
}

// ---- failing -----------------------------------------------------------------------------------

#[test]
fn a_queue_pair_that_breaks_leaves_the_queue_to_the_others() {
    for transport in TRANSPORTS {
        let mut shared = Shared::new(&[transport, Transport::Rc], 8);
        let ((_, b), (_, other)) = (shared.pairs[0], shared.pairs[1]);
        for wr_id in 0..3 {
            shared.post(wr_id, 500).unwrap();
        }
        shared.endpoint().modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(shared.events(), [LastWqeReached(b.qpn)]);
        shared.endpoint().modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(shared.events(), [], "once is enough");
        shared.send(1, 9, 0, 100);
        shared.network.run(10_000);
        assert!(shared.network.received_by(b).is_empty(), "{transport:?}");
        assert_eq!(brief(&shared.network.received_by(other)), [(0, Success)]);
    }
}

#[test]
fn a_receive_that_was_taken_is_flushed_with_its_queue_pair() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut shared = Shared::new(&[transport], 8);
        let (a, b) = shared.pairs[0];
        shared.post(0, 900).unwrap();
        shared.post(1, 900).unwrap();
        shared.send(0, 1, 0, 800);
        let first = shared.network.endpoint(a).poll_transmit(Time::ZERO).unwrap();
        shared
            .network
            .endpoint(a)
            .modify_qp(Time::ZERO, a.qpn, &QpAttr::to(QpState::Reset))
            .unwrap();
        shared.network.inject(a, &first);
        shared.network.run(1000);
        shared.endpoint().modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(brief(&shared.network.received_by(b)), [(0, WrFlushError)], "{transport:?}");
    }
}

/// Receives taken from the shared queue without a polled completion return to it.
#[test]
fn receives_of_a_queue_pair_that_goes_return_in_their_order() {
    let every = [Transport::Rc, Transport::Uc];
    for (transport, destroys) in every.into_iter().flat_map(|t| [(t, false), (t, true)]) {
        let mut shared = Shared::new(&[transport, Transport::Rc], 8);
        let ((a, b), (_, other)) = (shared.pairs[0], shared.pairs[1]);
        for wr_id in 0..6 {
            shared.post(wr_id, 900).unwrap();
        }
        for wr_id in 0..3 {
            shared.send(0, wr_id, 0, 100);
        }
        shared.network.run(10_000);
        let first = shared.endpoint().poll_cq(b.recv_cq).unwrap();
        assert_eq!((first.wr_id, first.status), (0, Success), "polled: the program's again");
        // Half a message fills the next one.
        shared.send(0, 9, 0, 800);
        let half = shared.network.endpoint(a).poll_transmit(Time::ZERO).unwrap();
        shared
            .network
            .endpoint(a)
            .modify_qp(Time::ZERO, a.qpn, &QpAttr::to(QpState::Reset))
            .unwrap();
        shared.network.inject(a, &half);
        shared.network.run(10_000);
        match destroys {
            true => shared.endpoint().destroy_qp(Time::ZERO, b.qpn).unwrap(),
            false => {
                shared
                    .endpoint()
                    .modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Reset))
                    .unwrap();
            }
        }
        for turn in 0..5 {
            shared.send(1, turn, 0, 100);
        }
        shared.network.run(10_000);
        let received = brief(&shared.network.received_by(other));
        let wanted: Vec<_> = (1..6).map(|wr_id| (wr_id, Success)).collect();
        assert_eq!(received, wanted, "{transport:?}, destroyed: {destroys}");
        // All of its slots are free again.
        for wr_id in 0..8 {
            shared.post(wr_id, 900).unwrap();
        }
        assert!(shared.post(8, 900).is_err());
    }
}

/// However often receives are lent and returned, each completes once, and the queue does not grow.
#[test]
fn lending_and_returning_keeps_every_receive() {
    for seed in 0..40 {
        let mut draw = Chance::new(seed);
        let mut shared = Shared::new(&[Transport::Rc], 8);
        let (a, b) = shared.pairs[0];
        let (mut posted, mut sent, mut heard) = (0, 0, Vec::new());
        for _ in 0..60 {
            while shared.post(posted, 900).is_ok() {
                posted += 1;
            }
            for _ in 0..draw.below(6) {
                shared.send(0, sent, 0, 100);
                sent += 1;
            }
            shared.network.run(10_000);
            for _ in 0..draw.below(4) {
                heard.extend(shared.endpoint().poll_cq(b.recv_cq).map(|done| done.wr_id));
            }
            if draw.per_mille(300) {
                for end in [a, b] {
                    shared
                        .network
                        .endpoint(end)
                        .modify_qp(Time::ZERO, end.qpn, &QpAttr::to(QpState::Reset))
                        .unwrap();
                }
                shared.network.bring_up(a, b, Transport::Rc, Mtu::M256);
                shared.network.bring_up(b, a, Transport::Rc, Mtu::M256);
            }
            shared.network.sent_by(a);
        }
        heard.extend(shared.network.received_by(b).iter().map(|done| done.wr_id));
        let unused = (0..).map_while(|turn| {
            shared.send(0, turn, 0, 100);
            shared.network.run_until(shared.network.now() + roce::Duration::from_micros(100));
            shared.network.received_by(b).first().map(|done| done.wr_id)
        });
        let unused: Vec<u64> = unused.collect();
        heard.extend(unused);
        heard.sort_unstable();
        assert_eq!(heard, (0..posted).collect::<Vec<_>>(), "seed {seed}");
    }
}

// ---- objects -----------------------------------------------------------------------------------

#[test]
fn wrong_use_is_refused() {
    let mut shared = Shared::new(&[Transport::Rc], 2);
    let (srq, b) = (shared.srq, shared.pairs[0].1);
    let empty = RecvWr { wr_id: 0, sges: SgList::new() };
    let endpoint = shared.endpoint();
    assert_eq!(
        endpoint.post_recv(Time::ZERO, b.qpn, empty.clone()),
        Err(VerbsError::SharedReceives(b.qpn.get()))
    );
    assert_eq!(endpoint.destroy_srq(srq), Err(VerbsError::SrqInUse(srq.0)));
    let full =
        |limit| Err(VerbsError::TableFull { what: "shared receives below the limit", limit });
    assert_eq!(endpoint.set_srq_limit(srq, 3), full(2));
    for _ in 0..2 {
        endpoint.post_srq_recv(srq, empty.clone()).unwrap();
    }
    let refused = endpoint.post_srq_recv(srq, empty.clone());
    assert!(matches!(refused, Err(VerbsError::TableFull { limit: 2, .. })));
    endpoint.destroy_qp(Time::ZERO, b.qpn).unwrap();
    endpoint.destroy_srq(srq).unwrap();
    let gone = VerbsError::NoSrq(srq.0);
    assert_eq!(endpoint.post_srq_recv(srq, empty), Err(gone));
    assert_eq!(endpoint.query_srq(srq), Err(gone));
    assert_eq!(endpoint.set_srq_limit(srq, 0), Err(gone));
    assert_eq!(endpoint.destroy_srq(srq), Err(gone));
}

#[test]
fn queue_pairs_and_their_queue_belong_to_one_domain() {
    let mut endpoint = Endpoint::new(EndpointConfig { max_qp_wr: 16, ..EndpointConfig::default() });
    let [pd, other] = [endpoint.alloc_pd(), endpoint.alloc_pd()];
    let cq = endpoint.create_cq(4).unwrap();
    let config = SrqConfig { pd, max_wr: 16, limit: 0 };
    let srq = endpoint.create_srq(config).unwrap();
    let qp = |pd, srq| QpConfig { srq: Some(srq), ..QpConfig::rc(pd, cq, 4, 0) };
    assert_eq!(endpoint.create_qp(qp(other, srq)), Err(VerbsError::SrqPd(srq.0)));
    let ghost = SrqId(srq.0 ^ 1 << 20);
    assert_eq!(endpoint.create_qp(qp(pd, ghost)), Err(VerbsError::NoSrq(ghost.0)));
    assert!(endpoint.create_srq(SrqConfig { max_wr: 17, ..config }).is_err());
    assert!(endpoint.create_srq(SrqConfig { limit: 17, ..config }).is_err());
    let nowhere = SrqConfig { pd: PdId(77), ..config };
    assert_eq!(endpoint.create_srq(nowhere), Err(VerbsError::NoPd(77)));
    assert_eq!(endpoint.dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)));
    let qpn = endpoint.create_qp(qp(pd, srq)).unwrap();
    assert_eq!(endpoint.query_srq(srq), Ok(config));
    endpoint.destroy_qp(Time::ZERO, qpn).unwrap();
    assert_eq!(endpoint.dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)));
    endpoint.destroy_srq(srq).unwrap();
    assert_eq!(endpoint.dealloc_pd(pd), Ok(()));
    assert_eq!(endpoint.dealloc_pd(pd), Err(VerbsError::NoPd(pd.0)));
    assert_eq!(endpoint.dealloc_pd(other), Ok(()));
}
