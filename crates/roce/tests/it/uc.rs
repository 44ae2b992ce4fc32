//! Unreliable connections: messages arrive whole or are lost silently (IBA 9.8.2).

use roce::Time;
use roce::endpoint::{AttrMask, Counters, Mtu, Placements, QpAttr, QpState};
use roce::verbs::{
    Access, Completion, MemoryRegion, RecvWr, SendOp, SendWr, SgList, Sge, Transport, VerbsError,
    WcOpcode, WcStatus, WindowBinding,
};
use roce::wire::{Bth, DEFAULT_PKEY, Deth, Ext, Headers, Opcode, Psn, Reth};
use roce::world::Origin;

use WcStatus::{LocalProtectionError, Success, WrFlushError};

use crate::harness::{BASE, End, Network, NetworkConfig};
use crate::kit::{QKEY, REGION_BYTES, brief, first_psn, list, recv, registered, send};

/// Two connected queue pairs with a path MTU of 256 and all of both memories registered.
struct Pair {
    network: Network,
    a: End,
    b: End,
    regions: [MemoryRegion; 2],
}

impl Pair {
    fn new() -> Pair {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let (a, b) = network.pair_of(Transport::Uc, Mtu::M256);
        network.record();
        Pair { network, a, b, regions }
    }

    /// Sends `len` bytes from `offset` of node 0.
    fn post(&mut self, wr_id: u64, op: SendOp, offset: u64, len: u32) {
        let wr = send(wr_id, op, list(self.regions[0], offset, len));
        self.network.post_send(self.a, wr);
    }

    fn receive(&mut self, wr_id: u64, offset: u64, len: u32) {
        let wr = recv(wr_id, list(self.regions[1], offset, len));
        self.network.post_recv(self.b, wr);
    }

    fn write(&self, offset: u64) -> SendOp {
        SendOp::Write { remote_addr: BASE + offset, rkey: self.regions[1].rkey }
    }

    fn write_imm(&self, offset: u64, imm: u32) -> SendOp {
        SendOp::WriteImm { remote_addr: BASE + offset, rkey: self.regions[1].rkey, imm }
    }

    fn run(&mut self) -> (Vec<Completion>, Vec<Completion>) {
        self.network.run(100_000);
        (self.network.sent_by(self.a), self.network.received_by(self.b))
    }

    /// Loses the packets with these numbers, counted from 0.
    fn lose(&mut self, lost: &[u64]) {
        let lost = lost.to_vec();
        let mut seen = 0;
        self.network.keep_if(move |_| {
            seen += 1;
            !lost.contains(&(seen - 1))
        });
    }

    fn same(&self, from: u64, to: u64, len: usize) -> bool {
        let [ours, theirs] = [&self.network.nodes[0].memory, &self.network.nodes[1].memory];
        ours.peek(BASE + from, len) == theirs.peek(BASE + to, len)
    }

    fn opcodes(&self) -> Vec<Opcode> {
        let trace = self.network.trace.as_ref().unwrap();
        trace.iter().map(|headers| headers.bth().opcode).collect()
    }

    fn counters(&self) -> Counters {
        *self.network.nodes[1].endpoint.counters()
    }
}

#[test]
fn messages_of_every_length_arrive_and_nothing_comes_back() {
    let lengths = [0, 1, 255, 256, 257, 512, 5000];
    let mut pair = Pair::new();
    for (at, len) in lengths.into_iter().enumerate() {
        let (wr_id, offset) = (at as u64, 10_000 * at as u64);
        pair.receive(wr_id, offset, len);
        pair.post(wr_id, SendOp::Send, offset, len);
        let op = pair.write(200_000 + offset);
        pair.post(100 + wr_id, op, offset, len);
    }
    let (sent, received) = pair.run();
    let wanted: Vec<u64> = (0..7).flat_map(|wr_id| [wr_id, 100 + wr_id]).collect();
    assert_eq!(sent.iter().map(|done| done.wr_id).collect::<Vec<_>>(), wanted);
    for (at, len) in lengths.into_iter().enumerate() {
        let (done, offset) = (received[at], 10_000 * at as u64);
        assert_eq!((done.wr_id, done.status, done.byte_len), (at as u64, Success, len));
        assert_eq!((done.opcode, done.imm, done.src_qp), (WcOpcode::Recv, None, None));
        assert!(pair.same(offset, offset, len as usize));
        assert!(pair.same(offset, 200_000 + offset, len as usize));
    }
    assert_eq!(pair.network.nodes[1].endpoint.counters().packets_sent, 0);
}

#[test]
fn packets_count_up_and_carry_the_opcodes_of_their_place() {
    let mut pair = Pair::new();
    pair.receive(1, 0, 1000);
    pair.receive(2, 0, 1000);
    pair.post(1, SendOp::SendImm(7), 0, 513);
    let op = pair.write_imm(0, 8);
    pair.post(2, op, 0, 513);
    pair.post(3, SendOp::SendImm(9), 0, 1);
    let (_, received) = pair.run();
    use Opcode::*;
    let wanted =
        [[UcSendFirst, UcSendMiddle, UcSendLastImm], [UcWriteFirst, UcWriteMiddle, UcWriteLastImm]];
    assert_eq!(pair.opcodes(), [&wanted.concat()[..], &[UcSendOnlyImm]].concat());
    let trace = pair.network.trace.as_ref().unwrap();
    for (at, headers) in trace.iter().enumerate() {
        assert_eq!(headers.bth().psn, first_psn(pair.a.qpn).plus(at as u32));
        assert!(!headers.bth().ack_req);
    }
    let seen: Vec<_> = received.iter().map(|done| (done.opcode, done.imm, done.byte_len)).collect();
    let wanted = [(WcOpcode::Recv, Some(7), 513), (WcOpcode::RecvWriteImm, Some(8), 513)];
    assert_eq!(seen, wanted, "the third message finds no receive");
    assert_eq!(pair.counters().no_receive, 1);
}

#[test]
fn requests_are_done_when_their_last_packet_has_left() {
    let mut pair = Pair::new();
    pair.post(1, SendOp::Send, 0, 300);
    let endpoint = &mut pair.network.nodes[0].endpoint;
    assert!(endpoint.poll_transmit(Time::ZERO).is_some());
    assert_eq!(endpoint.poll_cq(pair.a.send_cq), None);
    assert!(endpoint.poll_transmit(Time::ZERO).is_some());
    assert_eq!(endpoint.poll_cq(pair.a.send_cq).map(|done| done.wr_id), Some(1));
    assert_eq!(endpoint.poll_timeout(), None);
}

#[test]
fn a_message_that_lost_any_packet_is_lost_and_its_receive_waits_for_the_next() {
    for lost in 0..4 {
        let mut pair = Pair::new();
        pair.receive(7, 50_000, 2000);
        pair.lose(&[lost]);
        pair.post(1, SendOp::SendImm(1), 0, 1000);
        pair.post(2, SendOp::SendImm(2), 5000, 900);
        let (sent, received) = pair.run();
        assert_eq!(brief(&sent), [(1, Success), (2, Success)]);
        assert_eq!(received.len(), 1, "packet {lost}");
        assert_eq!((received[0].wr_id, received[0].imm), (7, Some(2)));
        assert!(pair.same(5000, 50_000, 900));
        let counters = pair.counters();
        assert_eq!(counters.broken_messages, u64::from(lost > 0), "packet {lost}");
        assert_eq!((counters.qp_errors, counters.packets_sent), (0, 0));
    }
}

#[test]
fn a_lost_last_packet_of_a_write_makes_no_completion() {
    let mut pair = Pair::new();
    pair.receive(7, 0, 0);
    pair.lose(&[3]);
    for (wr_id, imm) in [(1, 11), (2, 12)] {
        let op = pair.write_imm(100_000 * wr_id, imm);
        pair.post(wr_id, op, 0, 1024);
    }
    let (_, received) = pair.run();
    assert_eq!(received.iter().map(|done| done.imm).collect::<Vec<_>>(), [Some(12)]);
    assert!(pair.same(0, 200_000, 1024));
    assert!(pair.same(0, 100_000, 768), "what had been placed stays");
}

#[test]
fn messages_too_long_for_the_receive_are_dropped() {
    let mut pair = Pair::new();
    pair.receive(7, 0, 700);
    pair.post(1, SendOp::Send, 0, 701);
    pair.post(2, SendOp::Send, 0, 700);
    let (_, received) = pair.run();
    assert_eq!(brief(&received), [(7, Success)]);
    assert_eq!((received[0].byte_len, pair.counters().receive_too_small), (700, 1));
    assert_eq!(pair.network.state(pair.b), QpState::Rts);
}

#[test]
fn without_a_receive_messages_are_dropped() {
    let mut pair = Pair::new();
    pair.post(1, SendOp::Send, 0, 600);
    let op = pair.write_imm(100_000, 5);
    pair.post(2, op, 0, 600);
    let (sent, received) = pair.run();
    assert_eq!((sent.len(), received.len()), (2, 0));
    let counters = pair.counters();
    assert_eq!((counters.no_receive, counters.orphan_packets), (2, 2));
    pair.receive(7, 0, 600);
    pair.post(3, SendOp::Send, 0, 600);
    assert_eq!(brief(&pair.run().1), [(7, Success)]);
}

/// A WRITE that the peer must not execute, and what it counts.
fn refused_write(spoil: impl Fn(&mut Pair) -> SendOp, counted: impl Fn(&Counters) -> u64) {
    let mut pair = Pair::new();
    let op = spoil(&mut pair);
    let before = pair.network.nodes[1].memory.all().to_vec();
    pair.post(1, op, 0, 600);
    let (sent, _) = pair.run();
    assert_eq!(brief(&sent), [(1, Success)], "the sender hears nothing");
    assert_eq!(pair.network.nodes[1].memory.all(), before);
    assert_eq!((counted(&pair.counters()), pair.counters().qp_errors), (1, 0));
    pair.receive(7, 0, 64);
    pair.post(2, SendOp::Send, 0, 64);
    assert_eq!(brief(&pair.run().1), [(7, Success)], "the connection goes on");
}

#[test]
fn writes_that_are_not_allowed_are_dropped() {
    refused_write(
        |pair| SendOp::Write { remote_addr: BASE, rkey: pair.regions[1].lkey },
        |counters| counters.bad_key,
    );
    refused_write(|pair| pair.write(REGION_BYTES - 599), |counters| counters.bad_bounds);
    refused_write(
        |pair| {
            let region = pair.network.nodes[1].register(BASE, 4096, Access::LOCAL).unwrap();
            SendOp::Write { remote_addr: BASE, rkey: region.rkey }
        },
        |counters| counters.bad_access,
    );
    refused_write(
        |pair| {
            let mask = AttrMask::ACCESS_FLAGS;
            let attr = QpAttr { mask, access: Access::LOCAL, ..QpAttr::to(QpState::Rts) };
            let b = pair.b;
            pair.network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &attr).unwrap();
            pair.write(0)
        },
        |counters| counters.bad_access,
    );
}

#[test]
fn a_receive_that_may_not_be_written_ends_the_queue_pair() {
    let mut pair = Pair::new();
    let bad: SgList = [Sge { addr: BASE, len: 100, lkey: 1 }].into_iter().collect();
    let b = pair.b;
    pair.network.post_recv(b, recv(7, bad));
    pair.receive(8, 0, 100);
    pair.post(1, SendOp::Send, 0, 50);
    let (_, received) = pair.run();
    assert_eq!(brief(&received), [(7, LocalProtectionError), (8, WrFlushError)]);
    assert_eq!(pair.network.state(b), QpState::Error);
    assert_eq!(pair.network.endpoint(b).poll_event(), None, "the receive has said so");
}

#[test]
fn operations_of_other_services_are_refused() {
    let mut pair = Pair::new();
    let (remote_addr, rkey) = (BASE, pair.regions[1].rkey);
    let ops = [
        SendOp::Read { remote_addr, rkey },
        SendOp::FetchAdd { remote_addr, rkey, add: 1 },
        SendOp::CompareSwap { remote_addr, rkey, compare: 1, swap: 2 },
        SendOp::SendInvalidate(rkey),
    ];
    for op in ops {
        let wr = send(1, op, list(pair.regions[0], 0, 8));
        let a = pair.a;
        let refused = pair.network.endpoint(a).post_send(Time::ZERO, a.qpn, wr);
        assert!(matches!(refused, Err(VerbsError::Invalid { .. })), "{op:?}");
    }
}

#[test]
fn windows_are_bound_in_the_order_of_the_sends() {
    let mut pair = Pair::new();
    let (node, b) = (&mut pair.network.nodes[1], pair.b);
    let (window, first_key) = node.endpoint.alloc_window(node.pd, true).unwrap();
    let rkey = first_key ^ 1;
    let lkey = pair.regions[1].lkey;
    let (addr, access) = (BASE + 4096, Access::REMOTE_WRITE);
    let zero_based = false;
    let binding = WindowBinding { window, rkey, lkey, addr, len: 1024, access, zero_based };
    let bind = SendWr { signaled: true, ..send(5, SendOp::BindWindow(binding), SgList::new()) };
    pair.network.post_send(b, bind);
    pair.network.settle();
    let bound = pair.network.sent_by(b);
    assert_eq!((brief(&bound), bound[0].opcode), (vec![(5, Success)], WcOpcode::BindWindow));
    pair.post(1, SendOp::Write { remote_addr: addr, rkey }, 0, 1024);
    pair.run();
    assert!(pair.same(0, 4096, 1024));
    let again = SendOp::BindWindow(WindowBinding { rkey: first_key, ..binding });
    pair.network.post_send(b, send(6, again, SgList::new()));
    pair.network.settle();
    assert_eq!(brief(&pair.network.sent_by(b)), [(6, WcStatus::WindowBindError)]);
    assert_eq!(pair.network.state(b), QpState::Sqe);
}

// ---- packets that no honest peer sends ---------------------------------------------------------

/// Passes hand-made packets to node 1.
struct Lone {
    pair: Pair,
    psn: Psn,
}

impl Lone {
    fn new() -> Lone {
        let mut pair = Pair::new();
        pair.receive(7, 0, 1000);
        let psn = first_psn(pair.a.qpn);
        Lone { pair, psn }
    }

    fn next(&mut self, opcode: Opcode, ext: Ext, payload: usize) -> Placements {
        let bth = Bth {
            opcode,
            solicited: false,
            mig_req: true,
            pad: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp: self.pair.b.qpn,
            ack_req: false,
            psn: self.psn,
        };
        self.psn = self.psn.next();
        let source = self.pair.network.nodes[0].path().remote;
        let origin = Origin::new(source, source.ip());
        let headers = Headers::new(bth, ext).unwrap();
        let endpoint = &mut self.pair.network.nodes[1].endpoint;
        endpoint.handle_packet(Time::ZERO, &origin, &headers, payload).pieces
    }

    fn reth(&self, len: u32) -> Ext {
        Ext::Reth(Reth { addr: BASE, rkey: self.pair.regions[1].rkey, len })
    }

    /// The queue pair works as if new.
    fn check(mut self) {
        assert_eq!(self.next(Opcode::UcSendOnly, Ext::None, 100).len(), 1);
        assert_eq!(brief(&self.pair.network.received_by(self.pair.b)), [(7, Success)]);
        assert_eq!(self.pair.counters().packets_sent, 0);
    }
}

#[test]
fn packets_out_of_place_are_dropped() {
    use Opcode::*;
    let sequences: [(&[Opcode], usize); 5] = [
        (&[UcSendMiddle], 0),
        (&[UcSendLast], 0),
        (&[UcSendFirst, UcWriteMiddle, UcSendLast], 1),
        (&[UcSendFirst, UcSendFirst, UcWriteLast], 2),
        (&[UcWriteLast, UcWriteMiddle], 0),
    ];
    for (opcodes, placed) in sequences {
        let mut lone = Lone::new();
        let placements: Vec<Placements> =
            opcodes.iter().map(|&opcode| lone.next(opcode, Ext::None, 256)).collect();
        let is_placed = |placements: &&Placements| !placements.is_empty();
        assert_eq!(placements.iter().filter(is_placed).count(), placed, "{opcodes:?}");
        lone.check();
    }
}

#[test]
fn lengths_that_contradict_the_mtu_or_the_reth_are_dropped() {
    use Opcode::*;
    for (opcode, payload) in [(UcSendFirst, 255), (UcSendFirst, 257), (UcSendOnly, 257)] {
        let mut lone = Lone::new();
        assert!(lone.next(opcode, Ext::None, payload).is_empty());
        assert_eq!(lone.pair.counters().bad_length, 1, "{opcode}");
        lone.check();
    }
    for (opcode, len, payload) in [
        (UcWriteOnly, 100, 99),
        (UcWriteOnly, 257, 256),
        (UcWriteFirst, 256, 256),
        (UcWriteFirst, u32::MAX, 256),
    ] {
        let mut lone = Lone::new();
        let reth = lone.reth(len);
        assert!(lone.next(opcode, reth, payload).is_empty());
        assert_eq!(lone.pair.counters().bad_length, 1, "{opcode} {len}");
        lone.check();
    }
    let mut lone = Lone::new();
    assert_eq!(lone.next(UcSendFirst, Ext::None, 256).len(), 1);
    assert!(lone.next(UcSendLast, Ext::None, 0).is_empty());
    lone.check();
    let mut lone = Lone::new();
    let reth = lone.reth(600);
    assert_eq!(lone.next(UcWriteFirst, reth, 256).len(), 1);
    assert!(lone.next(UcWriteLast, Ext::None, 256).is_empty(), "88 bytes were due");
    lone.check();
}

#[test]
fn a_region_that_goes_away_stops_a_write_in_the_middle() {
    let mut lone = Lone::new();
    let node = &mut lone.pair.network.nodes[1];
    let region = node.register(BASE, 4096, Access::REMOTE_WRITE).unwrap();
    let ext = Ext::Reth(Reth { addr: BASE, rkey: region.rkey, len: 600 });
    assert_eq!(lone.next(Opcode::UcWriteFirst, ext, 256).len(), 1);
    lone.pair.network.nodes[1].deregister(region.lkey).unwrap();
    assert!(lone.next(Opcode::UcWriteMiddle, Ext::None, 256).is_empty());
    assert!(lone.next(Opcode::UcWriteLast, Ext::None, 88).is_empty());
    lone.check();
}

#[test]
fn packets_of_other_services_and_strangers_are_dropped() {
    let mut lone = Lone::new();
    assert!(lone.next(Opcode::RcSendOnly, Ext::None, 10).is_empty());
    let deth = Deth { qkey: QKEY, src_qp: lone.pair.a.qpn };
    assert!(lone.next(Opcode::UdSendOnly, Ext::Deth(deth), 10).is_empty());
    assert_eq!(lone.pair.counters().bad_opcode, 2);
    // Not the peer's address, though everything else is right.
    lone.pair.post(1, SendOp::Send, 0, 10);
    let genuine = lone.pair.network.nodes[0].endpoint.poll_transmit(Time::ZERO).unwrap();
    let stranger = lone.pair.network.nodes[1].path().remote;
    let endpoint = &mut lone.pair.network.nodes[1].endpoint;
    let origin = Origin::new(stranger, stranger.ip());
    assert!(endpoint.handle_packet(Time::ZERO, &origin, &genuine.headers, 10).pieces.is_empty());
    assert_eq!(lone.pair.counters().wrong_source, 1);
    lone.check();
}

#[test]
fn a_receive_queue_holds_no_more_than_was_agreed() {
    let mut pair = Pair::new();
    // A message in progress keeps its receive: it still counts.
    for wr_id in 0..64 {
        pair.receive(wr_id, 0, 1000);
    }
    let full = |pair: &mut Pair| {
        let wr = RecvWr { wr_id: 99, sges: SgList::new() };
        let b = pair.b;
        pair.network.endpoint(b).post_recv(Time::ZERO, b.qpn, wr)
    };
    assert!(matches!(full(&mut pair), Err(VerbsError::QueueFull { limit: 64, .. })));
    pair.lose(&[1]);
    pair.post(1, SendOp::Send, 0, 400);
    pair.run();
    assert!(matches!(full(&mut pair), Err(VerbsError::QueueFull { limit: 64, .. })));
    pair.post(2, SendOp::Send, 0, 400);
    pair.run();
    assert_eq!(full(&mut pair), Ok(()));
}
