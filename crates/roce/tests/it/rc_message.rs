//! What is carried without packets, one rule per test: when a queue pair serves its peer directly,
//! which messages it takes, and what a reset forgets. (`rc_direct` mixes them with packets at
//! random.)

use std::net::IpAddr;

use roce::direct::{
    Direct, DirectKind, DirectRefusal, DirectRequest, Handed, Message, MessageAck, MessageHeader,
    Posted,
};
use roce::endpoint::{AttrMask, Mtu, QpAttr, QpState};
use roce::report::Credits;
use roce::verbs::{AsyncEvent, MemoryRegion, Qpn, SendOp, Transport, WcStatus};
use roce::wire::{Ext, Opcode, Syndrome};
use roce::world;

use crate::harness::{End, Network, NetworkConfig};
use crate::kit::{attributes, bring_to, list, recv, registered, send};
use crate::pair::{Lone, Pair};

use AsyncEvent::CommunicationEstablished;

/// A sender in RTS, and a receiver in RTR that has heard nothing yet.
struct Waiting {
    network: Network,
    a: End,
    b: End,
    regions: [MemoryRegion; 2],
}

impl Waiting {
    fn new() -> Waiting {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let [a, b] = [0, 1].map(|node| network.create(node, Transport::Rc, None));
        network.bring_up(a, b, Transport::Rc, Mtu::M256);
        let mut waiting = Waiting { network, a, b, regions };
        waiting.bring_b(QpState::Rtr);
        waiting
    }

    fn bring_b(&mut self, state: QpState) {
        let (a, b) = (self.a, self.b);
        let base = attributes(self.network.nodes[0].path(), b.qpn, a.qpn, Mtu::M256);
        bring_to(self.network.endpoint(b), b.qpn, Transport::Rc, &base, state);
        self.network.post_recv(b, recv(1, list(self.regions[1], 0, 100)));
    }

    /// Both in RESET, then connected as at first.
    fn reconnect(&mut self) {
        let now = self.network.now();
        for end in [self.a, self.b] {
            let reset = QpAttr::to(QpState::Reset);
            self.network.endpoint(end).modify_qp(now, end.qpn, &reset).unwrap();
        }
        self.network.bring_up(self.a, self.b, Transport::Rc, Mtu::M256);
        self.bring_b(QpState::Rtr);
    }

    fn send_packet(&mut self) {
        let wr = send(1, SendOp::Send, list(self.regions[0], 0, 10));
        self.network.post_send(self.a, wr);
        self.network.run(1_000);
    }

    fn send_message(&mut self) -> bool {
        let header = self.header(10);
        take(&mut self.network, &header)
    }

    fn header(&self, len: u32) -> MessageHeader {
        let first_psn = crate::kit::first_psn(self.a.qpn);
        let (source, dest) = (self.a.qpn, self.b.qpn);
        MessageHeader { source, dest, first_psn, round: 0, imm: None, solicited: false, len }
    }

    fn serves(&mut self) -> bool {
        let qpn = self.b.qpn;
        let descriptor =
            self.network.endpoint(self.b).qp_descriptor(qpn, |_| Some([10, 0, 0, 1].into()));
        descriptor.unwrap().serves
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        let endpoint = self.network.endpoint(self.b);
        std::iter::from_fn(|| endpoint.poll_event()).collect()
    }
}

/// Node 1 gets a message of node 0.
fn take(network: &mut Network, header: &MessageHeader) -> bool {
    let (now, from) = (network.now(), network.nodes[0].ip());
    take_from(network, now, from, header)
}

fn take_from(network: &mut Network, now: roce::Time, from: IpAddr, header: &MessageHeader) -> bool {
    let node = &mut network.nodes[1];
    let bytes = vec![7; header.len as usize];
    world::take_message(&mut node.endpoint, &mut node.memory, now, from, (header, &bytes))
}

/// A queue pair in RTR has an event to raise for what comes first. WRITEs and READs without packets
/// raise none, so it serves none until then, and after a reset it is as new.
#[test]
fn a_queue_pair_in_rtr_serves_directly_from_its_first_packet_on() {
    let by_packet: fn(&mut Waiting) = Waiting::send_packet;
    let by_message: fn(&mut Waiting) = |waiting| assert!(waiting.send_message());
    for first in [by_packet, by_message] {
        let mut waiting = Waiting::new();
        for round in 0..2 {
            assert!(!waiting.serves(), "round {round}");
            assert_eq!(waiting.events(), []);
            first(&mut waiting);
            assert!(waiting.serves(), "round {round}");
            assert_eq!(waiting.events(), [CommunicationEstablished(waiting.b.qpn)]);
            waiting.reconnect();
        }
        // In RTS the program has said that it is connected.
        let base =
            attributes(waiting.network.nodes[0].path(), waiting.b.qpn, waiting.a.qpn, Mtu::M256);
        let to_rts = crate::kit::step_attr(Transport::Rc, QpState::Rts, &base);
        let (now, qpn) = (waiting.network.now(), waiting.b.qpn);
        waiting.network.endpoint(waiting.b).modify_qp(now, qpn, &to_rts).unwrap();
        assert!(waiting.serves());
    }
}

#[test]
fn a_reset_forgets_what_was_promised_about_receives() {
    let mut waiting = Waiting::new();
    // The only receive is used: node 0 hears that there are none, and waits for more.
    waiting.send_packet();
    let (now, b) = (waiting.network.now(), waiting.b);
    let reset = QpAttr::to(QpState::Reset);
    waiting.network.endpoint(b).modify_qp(now, b.qpn, &reset).unwrap();
    waiting.bring_b(QpState::Rtr);
    assert!(waiting.network.endpoint(b).poll_transmit(now).is_none(), "it answers to nothing");
}

#[test]
fn a_reset_ends_the_wait_for_a_drained_queue() {
    let mut waiting = Waiting::new();
    let (now, a) = (waiting.network.now(), waiting.a);
    let wr = send(1, SendOp::Send, list(waiting.regions[0], 0, 10));
    waiting.network.post_send(a, wr);
    let mask = AttrMask::STATE | AttrMask::EN_SQD_ASYNC_NOTIFY;
    let notify = QpAttr { mask, sqd_notify: true, ..QpAttr::to(QpState::Sqd) };
    let endpoint = waiting.network.endpoint(a);
    let _ = endpoint.poll_transmit(now);
    endpoint.modify_qp(now, a.qpn, &notify).unwrap();
    assert!(endpoint.query_qp(a.qpn).unwrap().sqd_notify);
    endpoint.modify_qp(now, a.qpn, &QpAttr::to(QpState::Reset)).unwrap();
    assert!(!endpoint.query_qp(a.qpn).unwrap().sqd_notify);
}

/// Its receive is the one of the packets.
#[test]
fn no_message_is_taken_between_the_packets_of_another() {
    let mut lone = Lone::new();
    let header = MessageHeader {
        source: lone.pair.a.qpn,
        dest: lone.pair.b.qpn,
        first_psn: lone.pair.first_psn(),
        round: 0,
        imm: None,
        solicited: false,
        len: 10,
    };
    lone.next(Opcode::RcSendFirst, Ext::None, 256);
    assert!(!take(&mut lone.pair.network, &header));
    lone.next(Opcode::RcSendLast, Ext::None, 44);
    let (receives, b) = (7, lone.pair.b);
    let done = lone.pair.network.received_by(b);
    assert_eq!(
        done.iter().map(|wc| (wc.wr_id, wc.byte_len)).collect::<Vec<_>>(),
        [(receives, 300)]
    );
    assert_eq!(lone.counters().direct_receives_refused, 1);
    // The round of the refused one is over.
    lone.pair.receive(8, 1_000);
    assert!(!take(&mut lone.pair.network, &header));
    assert!(take(&mut lone.pair.network, &MessageHeader { round: 1, ..header }));
    assert!(matches!(lone.answer(), Some((_, Syndrome::Ack { .. }))));
}

/// Messages are of one connection: each name in their header counts.
#[test]
fn messages_of_others_are_refused_and_establish_nothing() {
    let mut waiting = Waiting::new();
    let good = waiting.header(10);
    let now = waiting.network.now();
    let others = [
        MessageHeader { source: Qpn::new(good.source.get() ^ 1), ..good },
        MessageHeader { first_psn: good.first_psn.next(), ..good },
    ];
    for bad in others {
        assert!(!take(&mut waiting.network, &bad), "{bad:?}");
    }
    assert!(!take_from(&mut waiting.network, now, [10, 9, 9, 9].into(), &good));
    // One that does not fit is the packets' to complain about.
    let refused = MessageHeader { len: 101, ..good };
    assert!((!waiting.serves(), waiting.events()) == (true, vec![]));
    assert!(!take(&mut waiting.network, &refused));
    let after = MessageHeader { round: 1, len: 100, ..good };
    assert!(take(&mut waiting.network, &after));
    assert_eq!(waiting.network.endpoint(waiting.b).counters().direct_receives_refused, 4);
    let reset = QpAttr::to(QpState::Error);
    waiting.network.endpoint(waiting.b).modify_qp(now, waiting.b.qpn, &reset).unwrap();
    assert!(!take(&mut waiting.network, &MessageHeader { round: 2, ..good }));
}

/// A local peer that takes all messages, and has no memory.
struct Letters(Vec<MessageHeader>);

impl Direct for Letters {
    fn reaches(&self, _qpn: Qpn, _kind: DirectKind) -> bool {
        false
    }

    fn carry_out(&mut self, _request: &DirectRequest<'_>) -> Result<(), DirectRefusal> {
        unreachable!("it reaches nothing")
    }

    fn takes_messages(&self, _qpn: Qpn) -> bool {
        true
    }

    fn hand_over(&mut self, message: &Message<'_>) -> Result<(), DirectRefusal> {
        self.0.push(message.header);
        Ok(())
    }
}

/// Messages take receives that were promised to packets. When those that follow become packets, the
/// promise is void.
#[test]
fn credits_end_with_refused_messages() {
    let mut pair = Pair::new();
    (0..4).for_each(|wr_id| pair.receive(wr_id, 100));
    pair.send(100, 100);
    pair.run();
    let credits = |pair: &Pair| {
        let mut all = pair.network.nodes[0].endpoint.queue_pairs();
        all.find(|report| report.qpn == pair.a.qpn).unwrap().flow.unwrap().credits
    };
    assert_eq!(credits(&pair), Credits::Messages(3));
    let (now, qpn) = (pair.network.now(), pair.a.qpn);
    let mut letters = Letters(Vec::new());
    for wr_id in 0..4 {
        let wr = pair.wr(wr_id, SendOp::Send, 0, 100);
        let posted = pair.network.nodes[0].endpoint.post_send_direct(now, qpn, wr, &mut letters);
        assert_eq!(posted, Ok(Posted::HandedOver));
    }
    let acks: Vec<bool> = letters.0.iter().map(|header| take(&mut pair.network, header)).collect();
    assert_eq!(acks, [true, true, true, false]);
    for (header, is_taken) in letters.0.iter().zip(acks) {
        let ack = if is_taken { MessageAck::Taken } else { MessageAck::Refused };
        let handed = Handed { source: qpn, round: header.round };
        pair.network.nodes[0].endpoint.handle_message_ack(now, handed, ack);
    }
    assert_eq!(credits(&pair), Credits::Messages(0));
    // What is left goes as packets, one at a time until the peer has said what it has.
    (4..8).for_each(|wr_id| pair.send(wr_id, 100));
    let soon = pair.network.now() + roce::Duration::from_micros(100);
    pair.network.run_until(soon);
    assert_eq!(pair.counters(1).out_of_sequence, 0);
    (10..20).for_each(|wr_id| pair.receive(wr_id, 100));
    let (sent, _) = pair.run();
    let expected: Vec<_> = (0..8).map(|wr_id| (wr_id, WcStatus::Success)).collect();
    assert_eq!(sent, expected);
}
