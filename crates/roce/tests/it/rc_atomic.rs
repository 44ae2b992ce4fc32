//! Atomics of the reliable connection: each is executed once, whatever the network duplicates or
//! loses, and its response has the value of that one time.

use roce::Time;
use roce::endpoint::{AttrMask, Insert, QpAttr, QpState};
use roce::verbs::{Access, MemoryRegion, SendOp, SendWr, VerbsError, WcOpcode, WcStatus};
use roce::wire::{AtomicAckEth, AtomicEth, Bth, Ext, Headers, Opcode, Psn, Syndrome};

use WcStatus::{Success, WrFlushError};

use crate::harness::{BASE, Fault, FaultMix};
use crate::kit::register_at;
use crate::pair::{Lone, Pair, REGION_BYTES, bth_to, positive};

/// Addresses of the peer's words, and of original values.
const WORDS: u64 = 300_000;
const LANDING: u64 = 400_000;

/// A word of node 1.
fn word(pair: &Pair, offset: u64) -> u64 {
    let bytes = pair.network.nodes[1].memory.peek(BASE + offset, 8);
    u64::from_ne_bytes(bytes.try_into().unwrap())
}

fn set_word(pair: &mut Pair, offset: u64, value: u64) {
    pair.network.nodes[1].memory.poke(BASE + offset, &value.to_ne_bytes());
}

/// The original value returned for work request `wr_id`.
fn former(pair: &Pair, wr_id: u64) -> u64 {
    let bytes = pair.network.nodes[0].memory.peek(BASE + LANDING + 8 * wr_id, 8);
    u64::from_ne_bytes(bytes.try_into().unwrap())
}

fn add_op(pair: &Pair, offset: u64, add: u64) -> SendOp {
    SendOp::FetchAdd { remote_addr: BASE + offset, rkey: pair.regions[1].rkey, add }
}

fn swap_op(pair: &Pair, offset: u64, compare: u64, swap: u64) -> SendOp {
    let (remote_addr, rkey) = (BASE + offset, pair.regions[1].rkey);
    SendOp::CompareSwap { remote_addr, rkey, compare, swap }
}

fn post(pair: &mut Pair, wr_id: u64, op: SendOp) {
    let wr = pair.wr(wr_id, op, LANDING + 8 * wr_id, 8);
    pair.post(wr);
}

fn add(pair: &mut Pair, wr_id: u64, add: u64) {
    let op = add_op(pair, WORDS, add);
    post(pair, wr_id, op);
}

/// Loses the first `count` packets with this opcode.
fn lose_first(pair: &mut Pair, opcode: Opcode, count: usize) {
    let mut left = count;
    pair.lose(move |_, headers| {
        let hit = headers.bth().opcode == opcode && left > 0;
        left -= usize::from(hit);
        hit
    });
}

// ---- results -----------------------------------------------------------------------------------

#[test]
fn both_operations_return_the_former_value() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, u64::MAX);
    add(&mut pair, 0, 3);
    for (wr_id, compare) in [(1, 7), (2, 2)] {
        let op = swap_op(&pair, WORDS, compare, 0x0123_4567_89ab_cdef);
        post(&mut pair, wr_id, op);
    }
    pair.network.run(10_000);
    let sent = pair.network.sent_by(pair.a);
    let brief: Vec<_> = sent.iter().map(|wc| (wc.status, wc.opcode, wc.byte_len)).collect();
    let swap = (Success, WcOpcode::CompareSwap, 8);
    assert_eq!(brief, [(Success, WcOpcode::FetchAdd, 8), swap, swap]);
    assert_eq!([0, 1, 2].map(|wr_id| former(&pair, wr_id)), [u64::MAX, 2, 2]);
    assert_eq!(word(&pair, WORDS), 0x0123_4567_89ab_cdef);
    assert_eq!(pair.counters(1).atomics, 3);
}

#[test]
fn the_operands_stand_in_the_packet_and_the_result_in_the_answer() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, 0xa0b0);
    let op = swap_op(&pair, WORDS, 0xa0b0, 5);
    post(&mut pair, 0, op);
    pair.run();
    let [request, answer] = pair.trace() else { panic!("{:?}", pair.opcodes()) };
    let (addr, rkey) = (BASE + WORDS, pair.regions[1].rkey);
    let atomic = AtomicEth { addr, rkey, swap_or_add: 5, compare: 0xa0b0 };
    assert_eq!(request.ext(), &Ext::AtomicEth(atomic));
    assert_eq!(answer.bth().psn, request.bth().psn);
    let Ext::AethAtomicAck(aeth, former) = answer.ext() else { panic!("{answer:?}") };
    assert_eq!((former, aeth.msn), (&AtomicAckEth { original: 0xa0b0 }, 1));
}

#[test]
fn a_former_value_is_scattered_like_any_message() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, 0x1122_3344_5566_7788);
    let mut wr = pair.wr(0, add_op(&pair, WORDS, 0), LANDING, 3);
    wr.sges.extend(pair.sge(0, LANDING + 100, 5));
    pair.post(wr);
    assert_eq!(pair.run().0, [(0, Success)]);
    let arena = &pair.network.nodes[0].memory;
    let landed = [arena.peek(BASE + LANDING, 3), arena.peek(BASE + LANDING + 100, 5)].concat();
    assert_eq!(landed, 0x1122_3344_5566_7788_u64.to_ne_bytes());
}

#[test]
fn a_list_that_does_not_hold_eight_bytes_is_refused_when_posted() {
    let mut pair = Pair::new();
    for len in [0, 7, 9, 16] {
        let wr = pair.wr(0, add_op(&pair, WORDS, 1), LANDING, len);
        let refused = pair.network.nodes[0].endpoint.post_send(Time::ZERO, pair.a.qpn, wr);
        assert!(matches!(refused, Err(VerbsError::Invalid { .. })), "{len} bytes");
    }
}

// ---- losses ------------------------------------------------------------------------------------

#[test]
fn a_lost_request_is_carried_out_once_when_it_arrives() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, 10);
    lose_first(&mut pair, Opcode::RcFetchAdd, 1);
    add(&mut pair, 0, 1);
    assert_eq!(pair.run().0, [(0, Success)]);
    assert_eq!((word(&pair, WORDS), former(&pair, 0)), (11, 10));
    assert_eq!((pair.counters(1).atomics, pair.counters(1).duplicate_atomics), (1, 0));
}

#[test]
fn a_lost_answer_is_given_again_without_carrying_it_out_again() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, 10);
    lose_first(&mut pair, Opcode::RcAtomicAcknowledge, 3);
    add(&mut pair, 0, 1);
    assert_eq!(pair.run().0, [(0, Success)]);
    assert_eq!((word(&pair, WORDS), former(&pair, 0)), (11, 10));
    assert_eq!((pair.counters(1).atomics, pair.counters(1).duplicate_atomics), (1, 3));
    let requests: Vec<_> =
        pair.trace().iter().filter(|headers| headers.bth().opcode == Opcode::RcFetchAdd).collect();
    assert_eq!(requests.len(), 4);
    assert!(requests.iter().all(|headers| *headers == requests[0]), "repeated as it was");
}

#[test]
fn an_acknowledgement_beyond_an_atomic_means_that_its_answer_was_lost() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, 10);
    lose_first(&mut pair, Opcode::RcAtomicAcknowledge, 1);
    add(&mut pair, 0, 1);
    pair.write(1, 0, 100);
    assert_eq!(pair.run().0, [(0, Success), (1, Success)]);
    assert_eq!((word(&pair, WORDS), former(&pair, 0)), (11, 10));
    assert_eq!((pair.counters(0).implied_naks, pair.counters(0).timeouts), (1, 0));
}

#[test]
fn a_later_answer_means_that_an_earlier_one_was_lost() {
    let mut pair = Pair::new();
    set_word(&mut pair, WORDS, 0);
    lose_first(&mut pair, Opcode::RcAtomicAcknowledge, 1);
    (0..4).for_each(|wr_id| add(&mut pair, wr_id, 1));
    assert_eq!(pair.run().0.len(), 4);
    assert_eq!([0, 1, 2, 3].map(|wr_id| former(&pair, wr_id)), [0, 1, 2, 3]);
    assert_eq!(word(&pair, WORDS), 4);
    assert_eq!((pair.counters(0).implied_naks, pair.counters(0).timeouts), (1, 0));
    assert_eq!((pair.counters(1).atomics, pair.counters(1).duplicate_atomics), (4, 4));
}

/// Every single packet of a mix of requests is lost in turn, and every pair of packets.
#[test]
fn any_two_losses_among_reads_atomics_and_sends_are_survived() {
    let packets = mixed(u64::MAX, u64::MAX);
    for first in 1..=packets {
        for second in first..=packets + 8 {
            mixed(first, second);
        }
    }
}

/// Runs a mix of requests, losing two packets; returns how many there were.
fn mixed(first: u64, second: u64) -> u64 {
    let mut pair = Pair::with(|connect| {
        connect.max_rd_atomic = 3;
        connect.max_dest_rd_atomic = 3;
        connect.mtu = roce::endpoint::Mtu::M256;
    });
    set_word(&mut pair, WORDS, 0);
    let swap = swap_op(&pair, WORDS, 2, 100);
    pair.lose(move |asked, _| asked == first || asked == second);
    (0..3).for_each(|wr_id| pair.receive(wr_id, 300));
    add(&mut pair, 0, 1);
    pair.send(1, 300);
    add(&mut pair, 2, 1);
    pair.read(3, 600);
    post(&mut pair, 4, swap);
    pair.write(5, 8, 300);
    pair.send(6, 8);
    add(&mut pair, 7, 1);
    let (sent, received) = pair.run();
    assert_eq!(sent, (0..8).map(|wr_id| (wr_id, Success)).collect::<Vec<_>>());
    assert_eq!(received.len(), 2, "losing {first} and {second}");
    let values = [0, 2, 4, 7].map(|wr_id| former(&pair, wr_id));
    assert_eq!((values, word(&pair, WORDS)), ([0, 1, 2, 100], 101), "losing {first} and {second}");
    assert_eq!(pair.counters(1).atomics, 4);
    pair.trace().len() as u64
}

#[test]
fn faults_of_every_kind_leave_the_sum_right() {
    for fault in Fault::ALL.into_iter().take(Fault::PER_PACKET) {
        let mut pair = Pair::with(|connect| connect.timeout = 8);
        set_word(&mut pair, WORDS, 0);
        pair.network.mix = FaultMix::NONE.with(fault, 150_000);
        (0..60).for_each(|wr_id| add(&mut pair, wr_id, 1 << (wr_id % 8)));
        assert_eq!(pair.run().0.len(), 60, "{fault:?}");
        let sum = (0..60).fold(0, |sum, wr_id| {
            assert_eq!(former(&pair, wr_id), sum, "{fault:?}");
            sum + (1 << (wr_id % 8))
        });
        assert_eq!(word(&pair, WORDS), sum, "{fault:?}");
    }
}

// ---- order and limits --------------------------------------------------------------------------

#[test]
fn reads_and_atomics_share_the_limit() {
    let mut pair = Pair::with(|connect| connect.max_rd_atomic = 2);
    add(&mut pair, 0, 1);
    pair.read(1, 100);
    add(&mut pair, 2, 1);
    pair.network.settle();
    assert_eq!(pair.opcodes(), [Opcode::RcFetchAdd, Opcode::RcReadRequest]);
    assert_eq!(pair.run().0.len(), 3);
}

#[test]
fn an_atomic_that_is_not_allowed_at_all_fails_here() {
    let mut pair = Pair::with(|connect| connect.max_rd_atomic = 0);
    add(&mut pair, 0, 1);
    assert_eq!(pair.run().0, [(0, WcStatus::LocalQpError)]);
}

#[test]
fn more_atomics_than_agreed_are_an_invalid_request() {
    let mut pair = Pair::with(|connect| connect.max_dest_rd_atomic = 1);
    set_word(&mut pair, WORDS, 0);
    add(&mut pair, 0, 1);
    add(&mut pair, 1, 1);
    assert_eq!(pair.run().0, [(0, Success), (1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!((word(&pair, WORDS), pair.counters(1).too_many_reads), (1, 1));
}

#[test]
fn the_limit_may_be_raised_while_the_queue_pair_drains() {
    let mut pair = Pair::with(|connect| connect.max_dest_rd_atomic = 1);
    let sqd = QpAttr::to(QpState::Sqd);
    let more = QpAttr { mask: AttrMask::MAX_DEST_RD_ATOMIC, max_dest_rd_atomic: 16, ..sqd.clone() };
    for attr in [sqd, more, QpAttr::to(QpState::Rts)] {
        pair.network.nodes[1].endpoint.modify_qp(Time::ZERO, pair.b.qpn, &attr).unwrap();
    }
    set_word(&mut pair, WORDS, 0);
    pair.read(0, 20_000);
    lose_first(&mut pair, Opcode::RcAtomicAcknowledge, 1);
    (1..10).for_each(|wr_id| add(&mut pair, wr_id, 1));
    assert_eq!(pair.run().0.len(), 10);
    assert_eq!(word(&pair, WORDS), 9);
}

#[test]
fn answers_leave_in_the_order_of_the_requests() {
    let mut pair = Pair::with(|connect| connect.mtu = roce::endpoint::Mtu::M256);
    pair.read(0, 600);
    add(&mut pair, 1, 1);
    pair.write(2, 0, 8);
    assert_eq!(pair.run().0.len(), 3);
    use Opcode::*;
    let answers: Vec<_> =
        pair.opcodes().into_iter().filter(|opcode| opcode.is_response()).collect();
    let read = [RcReadResponseFirst, RcReadResponseMiddle, RcReadResponseLast];
    assert_eq!(answers[..3], read);
    assert_eq!(answers[3..], [RcAtomicAcknowledge, RcAcknowledge]);
}

// ---- protection --------------------------------------------------------------------------------

/// The status of an atomic that the peer must refuse, and whether nothing was changed.
fn refused(make: impl FnOnce(&mut Pair) -> (u64, u32)) -> (WcStatus, Pair) {
    let mut pair = Pair::new();
    let before = pair.network.nodes[1].memory.all().to_vec();
    let (remote_addr, rkey) = make(&mut pair);
    post(&mut pair, 0, SendOp::FetchAdd { remote_addr, rkey, add: 1 });
    add(&mut pair, 1, 1);
    let (sent, _) = pair.run();
    assert_eq!(sent[1..], [(1, WrFlushError)]);
    assert_eq!(pair.counters(1).atomics, 0);
    assert!(before == pair.network.nodes[1].memory.all());
    (sent[0].1, pair)
}

#[test]
fn words_have_to_be_aligned() {
    for offset in 1..8 {
        let (status, pair) = refused(|pair| (BASE + WORDS + offset, pair.regions[1].rkey));
        assert_eq!(status, WcStatus::RemoteInvalidRequest);
        assert_eq!(pair.counters(1).misaligned_atomics, 1);
    }
}

#[test]
fn words_have_to_be_aligned_where_they_lie() {
    let (status, pair) = refused(|pair| {
        let region = register_at(&mut pair.network.nodes[1], 0, 64, BASE + WORDS + 4);
        (8, region.rkey)
    });
    assert_eq!(status, WcStatus::RemoteInvalidRequest);
    assert_eq!(pair.counters(1).misaligned_atomics, 1);
}

#[test]
fn keys_bounds_domains_and_flags_hold() {
    let region = |pair: &mut Pair, access| -> MemoryRegion {
        pair.network.nodes[1].register(BASE + WORDS, 64, access).unwrap()
    };
    let no_atomics = Access { remote_atomic: false, ..Access::ALL };
    let (status, pair) = refused(|pair| (BASE + WORDS, region(pair, no_atomics).rkey));
    assert_eq!((status, pair.counters(1).bad_access), (WcStatus::RemoteAccessError, 1));
    let (status, pair) = refused(|pair| (BASE + WORDS, pair.regions[1].lkey));
    assert_eq!((status, pair.counters(1).bad_key), (WcStatus::RemoteAccessError, 1));
    let (status, pair) = refused(|pair| (BASE + WORDS + 64, region(pair, Access::ALL).rkey));
    assert_eq!((status, pair.counters(1).bad_bounds), (WcStatus::RemoteAccessError, 1));
    let (status, pair) = refused(|pair| (BASE + REGION_BYTES, pair.regions[1].rkey));
    assert_eq!((status, pair.counters(1).bad_bounds), (WcStatus::RemoteAccessError, 1));
    let (status, pair) = refused(|pair| {
        let node = &mut pair.network.nodes[1];
        let other = node.endpoint.alloc_pd();
        (
            BASE + WORDS,
            node.register_at(other, BASE + WORDS, 64, BASE + WORDS, Access::ALL).unwrap().rkey,
        )
    });
    assert_eq!((status, pair.counters(1).bad_pd), (WcStatus::RemoteAccessError, 1));
}

#[test]
fn a_former_value_needs_a_place_that_may_be_written() {
    let mut pair = Pair::new();
    let region = pair.network.nodes[0].register(BASE + LANDING, 64, Access::LOCAL_READ).unwrap();
    let mut wr: SendWr = pair.wr(0, add_op(&pair, WORDS, 1), LANDING, 8);
    wr.sges[0].lkey = region.lkey;
    pair.post(wr);
    assert_eq!(pair.run().0, [(0, WcStatus::LocalProtectionError)]);
    assert_eq!(pair.counters(1).atomics, 0);
}

// ---- single packets ----------------------------------------------------------------------------

/// Passes the lone queue pair a fetch-and-add of 1 with this PSN.
fn strike(lone: &mut Lone, psn: Psn, payload: usize) -> Insert {
    let rkey = lone.pair.regions[1].rkey;
    let atomic = AtomicEth { addr: BASE + WORDS, rkey, swap_or_add: 1, compare: 0 };
    let bth = Bth { opcode: Opcode::RcFetchAdd, psn, ack_req: true, ..bth_to(lone.pair.b.qpn) };
    let headers = Headers::new(bth, Ext::AtomicEth(atomic)).unwrap();
    lone.deliver(&headers, payload).insert
}

/// The original value in node 1's response, if there is one.
fn answered(lone: &mut Lone) -> Option<(Psn, u64)> {
    let endpoint = &mut lone.pair.network.nodes[1].endpoint;
    let headers = endpoint.poll_transmit(Time::ZERO)?.headers;
    match *headers.ext() {
        Ext::AethAtomicAck(_, ack) => Some((headers.bth().psn, ack.original)),
        _ => None,
    }
}

#[test]
fn a_repeated_atomic_is_answered_as_before_and_an_old_one_not_at_all() {
    let mut lone = Lone::new();
    set_word(&mut lone.pair, WORDS, 7);
    let first = lone.psn;
    for n in 0..4 {
        assert!(matches!(strike(&mut lone, first.plus(n), 0), Insert::Atomic(_)));
        assert_eq!(answered(&mut lone), Some((first.plus(n), 7 + u64::from(n))));
    }
    // Two may be outstanding, so two results are kept.
    for n in [3, 2, 3] {
        assert_eq!(strike(&mut lone, first.plus(n), 0), Insert::None);
        assert_eq!(answered(&mut lone), Some((first.plus(n), 7 + u64::from(n))));
    }
    for n in [0, 1] {
        assert_eq!(strike(&mut lone, first.plus(n), 0), Insert::None);
        assert_eq!(answered(&mut lone), None);
    }
    assert_eq!(word(&lone.pair, WORDS), 11);
    let counters = lone.counters();
    let counted = (counters.atomics, counters.duplicate_atomics, counters.stale_atomics);
    assert_eq!(counted, (4, 3, 2));
}

#[test]
fn a_result_outlives_its_region() {
    let mut lone = Lone::new();
    set_word(&mut lone.pair, WORDS, 7);
    let (psn, region) = (lone.psn, lone.pair.regions[1]);
    strike(&mut lone, psn, 0);
    assert_eq!(answered(&mut lone), Some((psn, 7)));
    lone.pair.network.nodes[1].deregister(region.lkey).unwrap();
    assert_eq!(strike(&mut lone, psn, 0), Insert::None);
    assert_eq!(answered(&mut lone), Some((psn, 7)));
}

#[test]
fn an_atomic_with_payload_or_inside_a_message_is_an_invalid_request() {
    let mut lone = Lone::new();
    let psn = lone.psn;
    assert_eq!(strike(&mut lone, psn, 4), Insert::None);
    assert_eq!(lone.answer(), Some((psn, Syndrome::InvalidRequest)));
    assert_eq!(lone.counters().bad_length, 1);
    let mut lone = Lone::new();
    let _ = lone.next(Opcode::RcSendFirst, Ext::None, 256);
    let _ = lone.answer();
    let psn = lone.psn;
    assert_eq!(strike(&mut lone, psn, 0), Insert::None);
    assert_eq!(lone.answer(), Some((psn, Syndrome::InvalidRequest)));
    assert_eq!(lone.pair.state(1), QpState::Error);
}

#[test]
fn an_answer_that_does_not_belong_to_an_atomic_ends_the_connection() {
    let Ext::Aeth(aeth) = positive() else { panic!("an acknowledgement") };
    let ext = Ext::AethAtomicAck(aeth, AtomicAckEth { original: 1 });
    for (atomic_first, payload, status) in
        [(false, 0, WcStatus::BadResponse), (true, 4, WcStatus::BadResponse), (true, 0, Success)]
    {
        let mut pair = Pair::new();
        if atomic_first {
            add(&mut pair, 0, 1);
        } else {
            pair.read(0, 8);
        }
        pair.lose(|_, _| true);
        pair.network.settle();
        let delivery = pair.respond(Opcode::RcAtomicAcknowledge, ext, payload, 0);
        assert_eq!(delivery.insert == Insert::Value(1), status == Success);
        let sent = pair.network.sent_by(pair.a);
        assert_eq!(sent[0].status, status);
    }
}
