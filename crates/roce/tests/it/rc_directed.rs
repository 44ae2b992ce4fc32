//! One test for each rule of the transport that a reader would look up in the specification.

use std::cell::RefCell;
use std::rc::Rc;

use roce::device;
use roce::endpoint::{
    Connect, Counters, Endpoint, EndpointConfig, Mtu, Placements, QpAttr, QpConfig, QpState,
    Reliability, TimeoutReason,
};
use roce::verbs::{
    Access, MAX_MESSAGE_BYTES, PdId, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, VerbsError,
    WcOpcode, WcStatus,
};
use roce::wire::{Aeth, Bth, Ext, Headers, Opcode, Psn, Syndrome};
use roce::world::Origin;
use roce::{Duration, Time};

use WcStatus::{Success, WrFlushError};

use crate::harness::{BASE, Chance, Fault, FaultMix, Network, NetworkConfig};
use crate::pair::{Lone, Pair, REGION_BYTES, WILD, positive};

// ---- messages ----------------------------------------------------------------------------------

#[test]
fn a_message_is_cut_at_the_mtu_and_its_last_packet_asks_for_an_answer() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    pair.receive(7, 1000);
    pair.write(1, 0, 256 * 3 + 1);
    pair.send(2, 256);
    assert_eq!(pair.run(), (vec![(1, Success), (2, Success)], vec![(7, Success)]));
    use Opcode::*;
    let requests: Vec<_> = pair.trace().iter().filter(|h| h.bth().opcode.is_request()).collect();
    let seen: Vec<_> = requests.iter().map(|h| h.bth().opcode).collect();
    let wanted = [RcWriteFirst, RcWriteMiddle, RcWriteMiddle, RcWriteLast, RcSendOnly];
    assert_eq!(seen, wanted);
    for (index, headers) in requests.iter().enumerate() {
        assert_eq!(headers.bth().psn, pair.first_psn().plus(index as u32));
        assert_eq!(headers.bth().ack_req, index >= 3);
    }
    assert_eq!(requests[3].bth().pad, 3);
    assert!(pair.arrived(0, 769) && pair.arrived(200_000, 256));
}

#[test]
fn a_read_takes_one_psn_for_each_response() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M512);
    pair.read(1, 512 * 3);
    pair.write(2, 0, 8);
    assert_eq!(pair.run().0, [(1, Success), (2, Success)]);
    use Opcode::*;
    let first = pair.first_psn();
    let seen: Vec<_> = pair
        .trace()
        .iter()
        .map(|headers| (headers.bth().opcode, headers.bth().psn.distance_from(first)))
        .collect();
    let wanted = [
        (RcReadRequest, 0),
        (RcWriteOnly, 3),
        (RcReadResponseFirst, 0),
        (RcReadResponseMiddle, 1),
        (RcReadResponseLast, 2),
        (RcAcknowledge, 3),
    ];
    assert_eq!(seen, wanted);
}

#[test]
fn messages_of_no_bytes_need_no_key() {
    let mut pair = Pair::new();
    pair.receive(7, 0);
    pair.receive(8, 0);
    let nowhere = |op| SendWr {
        wr_id: 1,
        op,
        sges: SgList::new(),
        signaled: true,
        solicited: true,
        ..SendWr::default()
    };
    pair.post(nowhere(SendOp::Send));
    pair.post(nowhere(SendOp::Write { remote_addr: WILD, rkey: 1 }));
    pair.post(nowhere(SendOp::WriteImm { remote_addr: WILD, rkey: 1, imm: 5 }));
    pair.post(nowhere(SendOp::Read { remote_addr: WILD, rkey: 1 }));
    assert_eq!(pair.run(), (vec![(1, Success); 4], vec![(7, Success), (8, Success)]));
}

#[test]
fn immediates_and_lengths_reach_the_receiver() {
    let mut pair = Pair::build(&NetworkConfig { ipv6: true, ..NetworkConfig::default() }, |_| {});
    pair.receive(7, 100);
    pair.receive(8, 0);
    let rkey = pair.regions[1].rkey;
    let send = pair.wr(1, SendOp::SendImm(0xfeed), 0, 60);
    let op = SendOp::WriteImm { remote_addr: BASE, rkey, imm: 0xbeef };
    let write = pair.wr(2, op, 0, 5000);
    pair.post(send);
    pair.post(write);
    pair.network.run(10_000);
    let seen: Vec<_> = pair
        .network
        .received_by(pair.b)
        .iter()
        .map(|wc| (wc.wr_id, wc.opcode, wc.byte_len, wc.imm))
        .collect();
    let wanted =
        [(7, WcOpcode::Recv, 60, Some(0xfeed)), (8, WcOpcode::RecvWriteImm, 5000, Some(0xbeef))];
    assert_eq!(seen, wanted);
}

#[test]
fn psns_wrap_in_the_middle_of_a_message() {
    let mut network = Network::new(&NetworkConfig::default());
    let regions = [0, 1]
        .map(|node: usize| network.nodes[node].register(BASE, REGION_BYTES, Access::ALL).unwrap());
    let (a, b) = (network.create_end(0, 64, 256), network.create_end(1, 64, 256));
    let first = Psn::new(0xff_fffe);
    network.connect(a, b, |connect| {
        connect.mtu = Mtu::M256;
        match connect.dest_qp == b.qpn {
            true => connect.local_psn = first,
            false => connect.remote_psn = first,
        }
    });
    let mut pair = Pair { network, a, b, regions };
    pair.lose(|asked, _| asked == 3);
    pair.write(1, 0, 256 * 5);
    pair.read(2, 256 * 5);
    assert_eq!(pair.run().0, [(1, Success), (2, Success)]);
    assert!(pair.arrived(0, 256 * 5));
}

#[test]
fn unsignaled_requests_complete_in_silence() {
    let mut pair = Pair::new();
    for wr_id in 0..6 {
        let wr = pair.wr(wr_id, pair.write_op(0), 0, 100);
        pair.post(SendWr { signaled: wr_id % 3 == 2, ..wr });
    }
    assert_eq!(pair.run().0, [(2, Success), (5, Success)]);
}

// ---- acknowledgements --------------------------------------------------------------------------

#[test]
fn one_acknowledgement_answers_a_batch() {
    let mut pair = Pair::new();
    for wr_id in 0..40 {
        pair.write(wr_id, 0, 64);
    }
    assert_eq!(pair.run().0.len(), 40);
    assert_eq!(pair.counters(1).acks_sent, 1);
}

#[test]
fn no_more_packets_are_unanswered_than_the_window_allows() {
    for window in [1, 2, 7] {
        let mut pair = Pair::with(|connect| {
            connect.mtu = Mtu::M256;
            connect.window_packets = window;
        });
        let most = Rc::new(RefCell::new(0));
        let seen = Rc::clone(&most);
        let (mut next, mut acknowledged) = (pair.first_psn(), pair.first_psn());
        pair.lose(move |_, headers| {
            match headers.bth().opcode.is_request() {
                true => next = headers.bth().psn.next(),
                false => acknowledged = headers.bth().psn.next(),
            }
            let unanswered = next.distance_from(acknowledged);
            seen.replace_with(|most| unanswered.max(*most));
            false
        });
        pair.write(1, 0, 256 * 30);
        assert_eq!(pair.run().0, [(1, Success)]);
        assert_eq!(*most.borrow(), window as i32);
        assert_eq!(pair.counters(0).timeouts, 0, "window {window} stalled");
    }
}

#[test]
fn a_lost_packet_is_requested_once_and_retransmitted() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    pair.lose(|asked, _| asked == 3);
    pair.write(1, 0, 256 * 10);
    assert_eq!(pair.run().0, [(1, Success)]);
    assert!(pair.arrived(0, 2560));
    assert_eq!(pair.counters(1).seq_naks_sent, 1);
    assert_eq!(pair.counters(1).out_of_sequence, 7);
    assert_eq!(pair.counters(0).retransmitted_packets, 8);
    assert_eq!(pair.counters(0).timeouts, 0);
}

#[test]
fn a_lost_acknowledgement_makes_duplicates_that_are_not_executed_again() {
    let mut pair = Pair::new();
    pair.receive(7, 100);
    pair.lose(|asked, _| asked == 2);
    pair.send(1, 100);
    assert_eq!(pair.run(), (vec![(1, Success)], vec![(7, Success)]));
    assert_eq!(pair.counters(0).timeouts, 1);
    assert_eq!(pair.counters(1).duplicates, 1);
}

#[test]
fn retries_end_after_the_last_timeout() {
    let mut pair = Pair::with(|connect| {
        connect.timeout = 10;
        connect.retry_count = 3;
    });
    pair.lose(|_, _| true);
    pair.write(1, 0, 10);
    pair.write(2, 0, 10);
    assert_eq!(pair.run().0, [(1, WcStatus::RetryExceeded), (2, WrFlushError)]);
    assert_eq!(pair.network.now(), Time::ZERO + Duration::from_nanos(4 * (4096 << 10)));
    assert_eq!(pair.state(0), QpState::Error);
    assert_eq!(pair.counters(0).timeouts, 3);
    assert_eq!(pair.counters(0).retries_exceeded, 1);
}

const MODES: [Reliability; 2] = [Reliability::GoBackN, Reliability::Selective];

/// A timeout of 4 ms and one retry.
fn impatient(connect: &mut Connect, reliability: Reliability) {
    (connect.timeout, connect.retry_count, connect.reliability) = (10, 1, reliability);
}

fn seconds(seconds: u64) -> Time {
    Time::from_nanos(seconds * 1_000_000_000)
}

/// Its packets are queued there; or its buffer was full, and most are lost.
#[test]
fn a_stopped_peer_is_waited_for() {
    for (reliability, kept) in MODES.into_iter().flat_map(|mode| [(mode, u64::MAX), (mode, 3)]) {
        let mut pair = Pair::with(|connect| impatient(connect, reliability));
        pair.lose(move |asked, headers| asked > kept && headers.bth().opcode.is_request());
        pair.network.stop(Some(1));
        pair.write(1, 0, 20_000);
        pair.read(2, 20_000);
        pair.network.run_until(seconds(2));
        assert_eq!((pair.network.sent_by(pair.a), pair.state(0)), (vec![], QpState::Rts));
        assert!(pair.counters(0).stall_timeouts > 400, "{reliability:?} {kept}");
        assert_eq!(pair.counters(0).timeouts, 0, "{reliability:?} {kept}");
        pair.network.stop(None);
        pair.network.keep_all();
        assert_eq!(pair.run().0, [(1, Success), (2, Success)], "{reliability:?} {kept}");
        assert!(pair.arrived(0, 20_000));
        assert!(pair.counters(0).timeouts <= 1, "{reliability:?} {kept}");
    }
}

#[test]
fn the_patience_with_a_stopped_peer_ends() {
    for reliability in MODES {
        let mut pair = Pair::with(|connect| {
            impatient(connect, reliability);
            connect.timeout = 14;
        });
        pair.network.stop(Some(1));
        pair.write(1, 0, 10);
        assert_eq!(pair.run().0, [(1, WcStatus::RetryExceeded)]);
        assert!(pair.network.now() > seconds(300) && pair.network.now() < seconds(301));
        assert_eq!(pair.counters(0).timeouts, 1);
    }
}

/// The responses arrived while this process was not running, behind other packets.
#[test]
fn who_was_stopped_does_not_blame_the_peer() {
    for reliability in MODES {
        let config = NetworkConfig { batch: 1, ..NetworkConfig::default() };
        let mut pair = Pair::build(&config, |connect| {
            impatient(connect, reliability);
            connect.retry_count = 0;
        });
        let rkey = pair.regions[0].rkey;
        for wr_id in 0..5 {
            let op = SendOp::Write { remote_addr: BASE + 200_000, rkey };
            let wr = SendWr { sges: pair.sge(1, 0, 10), ..pair.wr(wr_id, op, 0, 10) };
            pair.network.nodes[1].endpoint.post_send(Time::ZERO, pair.b.qpn, wr).unwrap();
        }
        pair.write(1, 0, 10);
        pair.network.settle();
        pair.network.stop(Some(0));
        pair.network.run_until(seconds(2));
        pair.network.stop(None);
        let (sent, _) = pair.run();
        assert_eq!(sent, [(1, Success)], "{reliability:?}");
        assert_eq!(pair.state(1), QpState::Rts, "{reliability:?}");
        assert_eq!(pair.counters(0).stall_timeouts, 1, "{reliability:?}");
    }
}

/// Retransmissions to a slow peer do not slow it down further.
#[test]
fn timeouts_repeat_one_packet_until_the_peer_answers() {
    const WINDOW: u32 = 64;
    let mut pair = Pair::with(|connect| {
        (connect.mtu, connect.window_packets) = (Mtu::M256, WINDOW);
    });
    pair.lose(|asked, _| asked <= u64::from(WINDOW) + 2);
    pair.write(1, 0, 256 * 200);
    assert_eq!(pair.run().0, [(1, Success)]);
    assert!(pair.arrived(0, 256 * 200));
    let counters = pair.counters(0);
    assert_eq!((counters.timeouts, counters.retransmitted_packets), (3, u64::from(WINDOW) + 2));
}

#[test]
fn without_a_timeout_nothing_is_due() {
    let mut pair = Pair::with(|connect| connect.timeout = 0);
    pair.lose(|_, _| true);
    pair.write(1, 0, 10);
    assert_eq!(pair.run().0, []);
    assert_eq!(pair.network.nodes[0].endpoint.poll_timeout(), None);
}

/// A program that was stopped for an hour calls an hour late. Deadlines counted from the latest
/// transmission must not stay behind for ever, as nothing is sent in between.
#[test]
fn one_late_call_makes_one_probe_for_loss() {
    let mut pair = Pair::with(|connect| {
        connect.timeout = 0;
        connect.reliability = Reliability::Selective;
    });
    pair.lose(|asked, _| asked == 1);
    pair.write(1, 0, 100);
    pair.network.settle();
    pair.network.advance_to(Time::from_nanos(3_600_000_000_000));
    pair.network.settle();
    assert_eq!(pair.counters(0).loss_probes, 1);
    assert_eq!(pair.run().0, [(1, Success)]);
}

/// NAKs that were delayed until their request had been responded to otherwise, or that are strays.
#[test]
fn refusals_of_what_is_done_or_was_never_sent_change_nothing() {
    use Syndrome::{InvalidRdRequest, InvalidRequest, RemoteAccess, RemoteOperation};
    for reliability in [Reliability::GoBackN, Reliability::Selective] {
        for syndrome in [InvalidRequest, RemoteAccess, RemoteOperation, InvalidRdRequest] {
            let mut pair = Pair::with(|connect| connect.reliability = reliability);
            pair.write(1, 0, 10);
            assert_eq!(pair.run().0, [(1, Success)]);
            let nak = Ext::Aeth(Aeth { syndrome, msn: 1 });
            for ahead in [0, (1 << 24) - 1, (1 << 24) - 5_000, 1, 3, 5_000] {
                pair.respond(Opcode::RcAcknowledge, nak, 0, ahead);
                assert_eq!(pair.state(0), QpState::Rts, "{reliability:?} {syndrome:?} {ahead}");
            }
            pair.write(2, 0, 10);
            assert_eq!(pair.run().0, [(2, Success)]);
            assert_eq!(pair.counters(0).fatal_naks_received, 0);
        }
    }
}

#[test]
fn the_deadline_says_what_it_is_for_and_ends_with_the_answer() {
    let mut pair = Pair::new();
    pair.write(1, 0, 10);
    pair.network.settle();
    let due = pair.network.nodes[0].endpoint.poll_timeout();
    let timeout = Duration::from_nanos(4096 << 14);
    assert_eq!(due, Some((Time::ZERO + timeout, TimeoutReason::AckTimeout)));
    assert_eq!(pair.run().0, [(1, Success)]);
    assert_eq!(pair.network.nodes[0].endpoint.poll_timeout(), None);
}

// ---- READ --------------------------------------------------------------------------------------

#[test]
fn a_lost_response_is_read_again_from_there() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    let mut lost = false;
    pair.lose(move |_, headers| {
        let is_middle = headers.bth().opcode == Opcode::RcReadResponseMiddle;
        is_middle && !std::mem::replace(&mut lost, true)
    });
    pair.read(1, 256 * 8);
    assert_eq!(pair.run().0, [(1, Success)]);
    let again = pair.trace().iter().filter(|h| h.bth().opcode == Opcode::RcReadRequest).nth(1);
    let reth = again.unwrap().ext().reth().unwrap();
    assert_eq!((reth.addr, reth.len), (BASE + 256, 256 * 7));
    assert_eq!(pair.counters(0).implied_naks, 1);
    assert_eq!(pair.counters(0).timeouts, 0);
    assert_eq!(pair.counters(1).duplicate_reads, 1);
    let [to, from] = [0, 1].map(|node: usize| &pair.network.nodes[node].memory);
    assert_eq!(to.peek(BASE + 100_000, 2048), from.peek(BASE, 2048));
}

#[test]
fn an_acknowledgement_beyond_a_read_means_that_its_response_was_lost() {
    let mut pair = Pair::new();
    let mut lost = false;
    pair.lose(move |_, headers| {
        headers.bth().opcode == Opcode::RcReadResponseOnly && !std::mem::replace(&mut lost, true)
    });
    pair.read(1, 100);
    pair.write(2, 0, 100);
    assert_eq!(pair.run().0, [(1, Success), (2, Success)]);
    assert_eq!(pair.counters(0).implied_naks, 1);
    assert_eq!(pair.counters(0).timeouts, 0);
}

#[test]
fn reads_in_flight_are_limited() {
    let mut pair = Pair::with(|connect| connect.max_rd_atomic = 2);
    for wr_id in 0..10 {
        pair.read(wr_id, 3000);
    }
    pair.network.settle();
    let requests = pair.opcodes().iter().filter(|&&op| op == Opcode::RcReadRequest).count();
    assert_eq!(requests, 2);
    assert_eq!(pair.run().0.len(), 10);
}

#[test]
fn more_reads_than_agreed_are_an_invalid_request() {
    let mut pair = Pair::with(|connect| {
        connect.max_rd_atomic = 4;
        connect.max_dest_rd_atomic = 3;
    });
    (0..4).for_each(|wr_id| pair.read(wr_id, 3000));
    let (sent, _) = pair.run();
    let refused = (3, WcStatus::RemoteInvalidRequest);
    assert_eq!(sent, [(0, Success), (1, Success), (2, Success), refused]);
    assert_eq!(pair.counters(1).too_many_reads, 1);
}

#[test]
fn a_read_that_is_not_allowed_at_all_fails_here() {
    let mut pair = Pair::with(|connect| connect.max_rd_atomic = 0);
    pair.write(1, 0, 10);
    pair.read(2, 10);
    assert_eq!(pair.run().0, [(1, Success), (2, WcStatus::LocalQpError)]);
}

#[test]
fn requests_behind_a_refused_one_are_flushed_and_those_before_it_answered() {
    let mut pair = Pair::new();
    pair.read(1, 5000);
    let bad = pair.wr(2, SendOp::Write { remote_addr: WILD, rkey: pair.regions[1].rkey }, 0, 8);
    pair.post(bad);
    pair.read(3, 5000);
    let wanted = [(1, Success), (2, WcStatus::RemoteAccessError), (3, WrFlushError)];
    assert_eq!(pair.run().0, wanted);
}

#[test]
fn a_region_that_goes_away_ends_a_read_in_the_middle() {
    let mut lone = Lone::new();
    let (reth, region, psn) = (lone.reth(2000), lone.pair.regions[1], lone.psn);
    let _ = lone.next(Opcode::RcReadRequest, reth, 0);
    let endpoint = &mut lone.pair.network.nodes[1].endpoint;
    assert_eq!(endpoint.poll_transmit(Time::ZERO).unwrap().payload_len(), 256);
    assert_eq!(endpoint.poll_transmit(Time::ZERO).unwrap().payload_len(), 256);
    lone.pair.network.nodes[1].deregister(region.lkey).unwrap();
    assert_eq!(lone.answer(), Some((psn.plus(2), Syndrome::RemoteAccess)));
    assert_eq!(lone.pair.state(1), QpState::Error);
    assert_eq!(lone.answer(), None);
}

/// 2^31 bytes in packets of 256 take half of all PSNs: the most that can be distinguished.
/// Registering needs no memory, so only the first packets are checked.
#[test]
fn the_longest_read_takes_half_the_psns_and_what_follows_waits() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    let huge = 1 << 40;
    let keys = [0, 1].map(|node: usize| {
        let node = &mut pair.network.nodes[node];
        node.endpoint.register(node.pd, huge, MAX_MESSAGE_BYTES, Access::ALL).unwrap()
    });
    let mut wr = pair.wr(1, SendOp::Read { remote_addr: huge, rkey: keys[1].rkey }, 0, 0);
    wr.sges[0] = Sge { addr: huge, len: 1 << 31, lkey: keys[0].lkey };
    pair.post(wr);
    pair.write(2, 0, 8);
    let source = pair.network.nodes[0].path().remote;
    let [requester, responder] = &mut pair.network.nodes[..] else { panic!("two nodes") };
    let request = requester.endpoint.poll_transmit(Time::ZERO).unwrap().headers;
    assert!(requester.endpoint.poll_transmit(Time::ZERO).is_none());
    for repetition in 0..2 {
        let placed = responder
            .endpoint
            .handle_packet(Time::ZERO, &Origin::new(source, source.ip()), &request, 0)
            .pieces;
        assert!(placed.is_empty());
        let response = responder.endpoint.poll_transmit(Time::ZERO).unwrap().headers;
        assert_eq!(response.bth().opcode, Opcode::RcReadResponseFirst);
        assert_eq!(response.bth().psn, request.bth().psn);
        assert_eq!(responder.endpoint.counters().duplicate_reads, repetition);
    }
}

/// Exchanges packets without payload until neither end has any; returns how many.
fn exchange_headers(pair: &mut Pair) -> u64 {
    let addresses = [0, 1].map(|node: usize| pair.network.nodes[node].path().remote);
    let mut packets = 0;
    loop {
        let before = packets;
        for (from, to) in [(0, 1), (1, 0)] {
            let origin = Origin::new(addresses[from], addresses[to].ip());
            while let Some(sent) = pair.network.nodes[from].endpoint.poll_transmit(Time::ZERO) {
                let (endpoint, len) = (&mut pair.network.nodes[to].endpoint, sent.payload_len());
                let placed = endpoint.handle_packet(Time::ZERO, &origin, &sent.headers, len);
                let placed: usize = placed.pieces.iter().map(|piece| piece.len as usize).sum();
                assert_eq!(placed, len);
                packets += 1;
            }
        }
        if packets == before {
            return packets;
        }
    }
}

/// Registering needs no memory, and neither do packets without payload.
#[test]
fn messages_of_two_gibibytes_and_not_one_byte_more() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M4096);
    let (huge, half) = (1 << 40, 1 << 30);
    let keys = [0, 1].map(|node: usize| {
        let node = &mut pair.network.nodes[node];
        node.endpoint.register(node.pd, huge, MAX_MESSAGE_BYTES, Access::ALL).unwrap()
    });
    let sges = |node: usize| -> SgList {
        let lkey = keys[node].lkey;
        [0, half].map(|at| Sge { addr: huge + at, len: 1 << 30, lkey }).into_iter().collect()
    };
    let (remote_addr, rkey) = (huge, keys[1].rkey);
    let ops = [
        SendOp::Send,
        SendOp::WriteImm { remote_addr, rkey, imm: 1 },
        SendOp::Read { remote_addr, rkey },
    ];
    for wr_id in 0..2 {
        let wr = RecvWr { wr_id, sges: sges(1) };
        pair.network.nodes[1].endpoint.post_recv(Time::ZERO, pair.b.qpn, wr).unwrap();
    }
    for (wr_id, op) in (0..).zip(ops) {
        let wr = SendWr { wr_id, op, sges: sges(0), signaled: true, ..SendWr::default() };
        pair.post(wr.clone());
        let packets = exchange_headers(&mut pair);
        assert!(packets > (1 << 31) / 4096, "{op:?}: {packets} packets");
        assert_eq!(pair.network.sent_by(pair.a)[0].status, Success);
        let mut longer = wr;
        longer.sges.push(Sge { addr: huge, len: 1, lkey: keys[0].lkey });
        let refused = pair.network.nodes[0].endpoint.post_send(Time::ZERO, pair.a.qpn, longer);
        assert_eq!(refused, Err(VerbsError::TooLong(MAX_MESSAGE_BYTES + 1)));
    }
    let received = pair.network.received_by(pair.b);
    assert!(received.iter().all(|wc| (wc.status, wc.byte_len) == (Success, 1 << 31)));
    assert_eq!(received.len(), 2);
}

// ---- receiver not ready, credits ---------------------------------------------------------------

#[test]
fn receiver_not_ready_delays_for_the_time_it_says() {
    let mut pair = Pair::with(|connect| connect.min_rnr_timer = 14);
    pair.send(1, 100);
    pair.network.run_until(Time::from_nanos(1_000_000));
    let wait = pair.network.nodes[0].endpoint.poll_timeout();
    let latency = Duration::from_micros(4);
    let due = Time::ZERO + latency + Duration::from_micros(1280);
    assert_eq!(wait, Some((due, TimeoutReason::RnrWait)));
    pair.receive(7, 100);
    assert_eq!(pair.run(), (vec![(1, Success)], vec![(7, Success)]));
    assert_eq!(pair.counters(0).rnr_naks_received, 1);
    assert_eq!(pair.counters(1).seq_naks_sent, 0);
}

#[test]
fn rnr_retries_end() {
    let mut pair = Pair::with(|connect| connect.rnr_retry = 2);
    pair.send(1, 100);
    pair.send(2, 100);
    let wanted = [(1, WcStatus::RnrRetryExceeded), (2, WrFlushError)];
    assert_eq!(pair.run().0, wanted);
    assert_eq!(pair.counters(0).rnr_naks_received, 3);
    assert_eq!(pair.counters(0).rnr_retries_exceeded, 1);
}

#[test]
fn a_write_with_immediate_waits_for_a_receive_at_its_last_packet() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    let rkey = pair.regions[1].rkey;
    let op = SendOp::WriteImm { remote_addr: BASE, rkey, imm: 3 };
    let wr = pair.wr(1, op, 0, 600);
    pair.post(wr);
    pair.network.run_until(Time::from_nanos(100_000));
    assert_eq!(pair.counters(1).rnr_naks_sent, 1);
    assert_eq!(pair.counters(1).bytes_received, 512);
    pair.receive(7, 0);
    assert_eq!(pair.run(), (vec![(1, Success)], vec![(7, Success)]));
    assert!(pair.arrived(0, 600));
}

/// A pair whose sender knows that there are no receives.
fn starved_pair() -> Pair {
    starved_pair_with(Reliability::GoBackN)
}

/// A pair whose only receive has been used.
fn starved_pair_with(reliability: Reliability) -> Pair {
    let mut pair = Pair::with(|connect| connect.reliability = reliability);
    pair.receive(100, 100);
    pair.send(100, 100);
    pair.run();
    pair
}

#[test]
fn credits_keep_sends_from_outrunning_receives() {
    let mut pair = starved_pair();
    pair.receive(0, 100);
    pair.receive(1, 100);
    pair.run();
    (0..10).for_each(|wr_id| pair.send(wr_id, 100));
    // One packet at a time once the credits are used up: the third finds no receive.
    let soon = pair.network.now() + Duration::from_micros(100);
    pair.network.run_until(soon);
    assert_eq!(pair.counters(1).rnr_naks_sent, 1);
    assert_eq!(pair.counters(1).out_of_sequence, 0);
    (2..10).for_each(|wr_id| pair.receive(wr_id, 100));
    let (sent, received) = pair.run();
    assert_eq!((sent.len(), received.len()), (10, 10));
    assert_eq!(pair.counters(1).rnr_naks_sent, 1);
}

/// An acknowledgement was forged for packets that never arrived, so the peer waits for them and
/// accepts everything else out of order. Its SACKs are no progress: the connection fails as if
/// nothing was received.
#[test]
fn a_peer_that_takes_back_an_acknowledgement_is_given_up() {
    let mut pair = Pair::with(|connect| {
        connect.reliability = Reliability::Selective;
        (connect.timeout, connect.retry_count) = (10, 3);
    });
    pair.lose(|asked, _| asked == 1);
    pair.write(1, 0, 10);
    pair.network.settle();
    pair.respond(Opcode::RcAcknowledge, positive(), 0, 0);
    pair.write(2, 0, 10);
    assert_eq!(pair.run().0, [(1, Success), (2, WcStatus::RetryExceeded)]);
    assert!(pair.counters(0).packets_sent < 100, "{:?}", pair.counters(0));
}

#[test]
fn answers_of_another_time_promise_no_receives() {
    for reliability in [Reliability::GoBackN, Reliability::Selective] {
        let mut pair = starved_pair_with(reliability);
        for ahead in [-2, -100, -8_000_000_i32] {
            let msn = pair.first_psn().plus(1_000_000).get();
            let ack = Ext::Aeth(Aeth { syndrome: Syndrome::Ack { credits: 20 }, msn });
            let ahead = ahead as u32 & 0xff_ffff;
            pair.respond(Opcode::RcAcknowledge, ack, 0, ahead);
        }
        (0..10).for_each(|wr_id| pair.send(wr_id, 100));
        let soon = pair.network.now() + Duration::from_micros(100);
        pair.network.run_until(soon);
        // Only the probe for receives.
        let arrived = pair.counters(1).rnr_naks_sent + pair.counters(1).out_of_sequence;
        assert_eq!(arrived, 1, "{reliability:?}");
    }
}

/// Nothing is known about the peer's receives at first. Sending everything costs a window of
/// packets if there are none, but only once.
#[test]
fn a_connection_starts_without_waiting_for_credits() {
    let mut pair = Pair::new();
    (0..10).for_each(|wr_id| pair.receive(wr_id, 100));
    (0..10).for_each(|wr_id| pair.send(wr_id, 100));
    pair.network.settle();
    assert_eq!(pair.opcodes(), [Opcode::RcSendOnly; 10]);
    assert_eq!(pair.run().0.len(), 10);
    assert_eq!(pair.counters(0).credit_probes, 0);

    let mut pair = Pair::with(|connect| connect.min_rnr_timer = 1);
    (0..10).for_each(|wr_id| pair.send(wr_id, 100));
    pair.network.run_until(Time::from_nanos(1_000_000));
    assert!(pair.counters(1).rnr_naks_sent > 10);
    assert_eq!(pair.counters(1).out_of_sequence, 9);
}

#[test]
fn receives_posted_after_starvation_are_announced() {
    let mut pair = starved_pair();
    let acks = pair.counters(1).acks_sent;
    for wr_id in 1..20 {
        pair.receive(wr_id, 100);
    }
    pair.run();
    assert_eq!(pair.counters(1).acks_sent, acks + 1);
    (1..17).for_each(|wr_id| pair.send(wr_id, 100));
    pair.network.settle();
    let sends = pair.opcodes().iter().filter(|&&op| op == Opcode::RcSendOnly).count();
    assert_eq!(sends, 1 + 16, "19 receives are announced as 16 credits");
    assert_eq!(pair.run().0.len(), 16);
}

#[test]
fn writes_need_no_credits() {
    let mut pair = Pair::new();
    (0..20).for_each(|wr_id| pair.write(wr_id, 0, 100));
    assert_eq!(pair.run().0.len(), 20);
    assert_eq!(pair.counters(0).credit_probes, 0);
}

// ---- protection --------------------------------------------------------------------------------

/// Posts one request on a new pair and returns its status, and the responder's counters.
fn remote_error(make: impl FnOnce(&mut Pair) -> SendOp) -> (WcStatus, Counters) {
    let mut pair = Pair::new();
    let op = make(&mut pair);
    let wr = pair.wr(1, op, 0, 64);
    pair.post(wr);
    pair.write(2, 0, 8);
    let (sent, _) = pair.run();
    assert_eq!(sent[1..], [(2, WrFlushError)]);
    assert_eq!(pair.state(1), QpState::Error);
    assert_eq!(pair.counters(1).remote_access_naks_sent, 1);
    assert_eq!(pair.counters(1).bytes_received, 0);
    (sent[0].1, *pair.counters(1))
}

/// A WRITE and a READ at the same place.
fn both(remote_addr: u64, rkey: u32) -> [SendOp; 2] {
    [SendOp::Write { remote_addr, rkey }, SendOp::Read { remote_addr, rkey }]
}

#[test]
fn a_wrong_key_is_a_remote_access_error() {
    for index in 0..2 {
        let (status, counters) =
            remote_error(|pair| both(BASE, pair.regions[1].rkey ^ 0x8000_0000)[index]);
        assert_eq!((status, counters.bad_key), (WcStatus::RemoteAccessError, 1));
        let (status, counters) = remote_error(|pair| both(BASE, pair.regions[1].lkey)[index]);
        assert_eq!((status, counters.bad_key), (WcStatus::RemoteAccessError, 1));
    }
}

#[test]
fn a_stale_key_is_a_remote_access_error() {
    for index in 0..2 {
        let (status, counters) = remote_error(|pair| {
            let stale = pair.regions[1];
            pair.network.nodes[1].deregister(stale.lkey).unwrap();
            pair.network.nodes[1].register(BASE, REGION_BYTES, Access::ALL).unwrap();
            both(BASE, stale.rkey)[index]
        });
        assert_eq!((status, counters.bad_key), (WcStatus::RemoteAccessError, 1));
    }
}

#[test]
fn bounds_hold_for_the_whole_message_and_do_not_wrap() {
    let end = BASE + REGION_BYTES;
    for addr in [BASE - 1, end - 63, end, u64::MAX - 8, 0] {
        for index in 0..2 {
            let (status, counters) = remote_error(|pair| both(addr, pair.regions[1].rkey)[index]);
            assert_eq!((status, counters.bad_bounds), (WcStatus::RemoteAccessError, 1));
        }
    }
}

#[test]
fn access_flags_hold() {
    let flags = [Access::REMOTE_READ, Access::REMOTE_WRITE];
    for (index, access) in flags.into_iter().enumerate() {
        let (status, counters) = remote_error(|pair| {
            let region = pair.network.nodes[1].register(BASE, 4096, access).unwrap();
            both(BASE, region.rkey)[index]
        });
        assert_eq!((status, counters.bad_access), (WcStatus::RemoteAccessError, 1));
    }
}

#[test]
fn protection_domains_are_apart() {
    for index in 0..2 {
        let (status, counters) = remote_error(|pair| {
            let node = &mut pair.network.nodes[1];
            let other = node.endpoint.alloc_pd();
            let region = node.register_at(other, BASE, 4096, BASE, Access::ALL).unwrap();
            both(BASE, region.rkey)[index]
        });
        assert_eq!((status, counters.bad_pd), (WcStatus::RemoteAccessError, 1));
    }
}

#[test]
fn local_keys_bounds_and_flags_hold() {
    type Spoil = fn(&mut Pair, &mut SendWr);
    let cases: [Spoil; 5] = [
        |_, wr| wr.sges[0].lkey ^= 0x8000_0000,
        |_, wr| wr.sges[0].addr = BASE + REGION_BYTES - 9,
        |_, wr| wr.sges[0].addr = u64::MAX - 2,
        |pair, wr| {
            let other = pair.network.nodes[0].endpoint.alloc_pd();
            let region =
                pair.network.nodes[0].register_at(other, BASE, 64, BASE, Access::ALL).unwrap();
            wr.sges[0].lkey = region.lkey;
        },
        |pair, wr| {
            let region = pair.network.nodes[0].register(BASE, 64, Access::LOCAL_READ).unwrap();
            wr.sges[0].lkey = region.lkey;
            wr.op = pair.read_op();
        },
    ];
    for spoil in cases {
        let mut pair = Pair::new();
        pair.write(1, 0, 100_000);
        let mut bad = pair.wr(2, pair.write_op(0), 0, 10);
        spoil(&mut pair, &mut bad);
        pair.post(bad);
        pair.write(3, 0, 8);
        let wanted = [(1, Success), (2, WcStatus::LocalProtectionError), (3, WrFlushError)];
        assert_eq!(pair.run().0, wanted);
        assert_eq!(pair.counters(1).bytes_received, 100_000);
    }
}

#[test]
fn a_read_before_a_request_that_cannot_run_still_brings_its_bytes() {
    let mut pair = Pair::new();
    pair.read(1, 5000);
    let mut bad = pair.wr(2, pair.write_op(0), 0, 10);
    bad.sges[0].lkey ^= 0x8000_0000;
    pair.post(bad);
    assert_eq!(pair.run().0, [(1, Success), (2, WcStatus::LocalProtectionError)]);
    let [to, from] = [0, 1].map(|node: usize| &pair.network.nodes[node].memory);
    assert_eq!(to.peek(BASE + 100_000, 5000), from.peek(BASE, 5000));
}

#[test]
fn deregistering_under_a_message_stops_it() {
    let mut pair = Pair::with(|connect| {
        connect.mtu = Mtu::M256;
        connect.window_packets = 8;
    });
    pair.write(1, 0, 100_000);
    pair.network.advance();
    let region = pair.regions[0];
    pair.network.nodes[0].deregister(region.lkey).unwrap();
    assert_eq!(pair.run().0, [(1, WcStatus::LocalProtectionError)]);
}

// ---- receives ----------------------------------------------------------------------------------

#[test]
fn a_message_longer_than_its_receive_ends_both_sides() {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    pair.receive(7, 600);
    pair.receive(8, 600);
    pair.send(1, 601);
    let (sent, received) = pair.run();
    assert_eq!(sent, [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(received, [(7, WcStatus::LocalLengthError), (8, WrFlushError)]);
    assert_eq!(pair.counters(1).receive_too_small, 1);
    assert_eq!(pair.counters(1).bytes_received, 512);
}

#[test]
fn a_receive_that_may_not_be_written_is_a_remote_operation_error() {
    let mut pair = Pair::new();
    let region = pair.network.nodes[1].register(BASE, 4096, Access::LOCAL_READ).unwrap();
    let sges = [Sge { addr: BASE, len: 100, lkey: region.lkey }].into_iter().collect();
    let endpoint = &mut pair.network.nodes[1].endpoint;
    endpoint.post_recv(Time::ZERO, pair.b.qpn, RecvWr { wr_id: 7, sges }).unwrap();
    pair.send(1, 100);
    let (sent, received) = pair.run();
    assert_eq!(sent, [(1, WcStatus::RemoteOperationError)]);
    assert_eq!(received, [(7, WcStatus::LocalProtectionError)]);
}

// ---- queues and states -------------------------------------------------------------------------

#[test]
fn a_full_completion_queue_breaks_its_queue_pairs_only() {
    let mut network = Network::new(&NetworkConfig::default());
    let regions = [0, 1]
        .map(|node: usize| network.nodes[node].register(BASE, REGION_BYTES, Access::ALL).unwrap());
    let (a, b) = (network.create_end(0, 64, 3), network.create_end(1, 64, 64));
    let (c, d) = (network.create_end(0, 64, 64), network.create_end(1, 64, 64));
    network.connect(a, b, |_| {});
    network.connect(c, d, |_| {});
    let mut pair = Pair { network, a, b, regions };
    (0..5).for_each(|wr_id| pair.write(wr_id, 0, 8));
    let (sent, _) = pair.run();
    assert_eq!(sent, [(0, Success), (1, Success), (2, Success)]);
    assert_eq!(pair.state(0), QpState::Error);
    let endpoint = &pair.network.nodes[0].endpoint;
    assert_eq!(endpoint.cq_overrun(a.send_cq), Some(true));
    assert_eq!(endpoint.qp_state(c.qpn), Some(QpState::Rts));
    assert_eq!(endpoint.counters().cq_overflows, 2);
}

#[test]
fn the_error_state_flushes_what_was_and_what_comes() {
    let mut pair = Pair::new();
    pair.receive(7, 10);
    pair.receive(8, 10);
    pair.lose(|_, _| true);
    pair.write(1, 0, 10);
    pair.read(2, 10);
    pair.network.settle();
    let (a, b) = (pair.a, pair.b);
    pair.network.nodes[0]
        .endpoint
        .modify_qp(Time::ZERO, a.qpn, &QpAttr::to(QpState::Error))
        .unwrap();
    pair.network.nodes[1]
        .endpoint
        .modify_qp(Time::ZERO, b.qpn, &QpAttr::to(QpState::Error))
        .unwrap();
    pair.write(3, 0, 10);
    pair.receive(9, 10);
    let (sent, received) = pair.run();
    assert_eq!(sent, [(1, WrFlushError), (2, WrFlushError), (3, WrFlushError)]);
    assert_eq!(received, [(7, WrFlushError), (8, WrFlushError), (9, WrFlushError)]);
}

/// An endpoint with room for one queue pair of one work request each way, and that queue pair.
fn small_endpoint() -> (Endpoint, QpConfig, Qpn) {
    let mut endpoint = Endpoint::new(EndpointConfig { max_qps: 1, ..EndpointConfig::default() });
    let pd = endpoint.alloc_pd();
    let cq = endpoint.create_cq(8).unwrap();
    let config = QpConfig::rc(pd, cq, 1, 1);
    let qpn = endpoint.create_qp(config).unwrap();
    (endpoint, config, qpn)
}

#[test]
fn objects_come_and_go_in_order() {
    let (mut endpoint, config, qpn) = small_endpoint();
    let (cq, stranger) = (config.send_cq, PdId(9));
    let foreign = QpConfig { pd: stranger, ..config };
    assert_eq!(endpoint.create_qp(foreign), Err(VerbsError::NoPd(9)));
    assert!(endpoint.register(stranger, 0, 1, Access::LOCAL).is_err());
    let full = VerbsError::TableFull { what: "queue pairs", limit: 1 };
    assert_eq!(endpoint.create_qp(config), Err(full));
    assert_eq!(endpoint.destroy_cq(cq), Err(VerbsError::CqInUse(cq.0)));
    endpoint.destroy_qp(Time::ZERO, qpn).unwrap();
    assert_eq!(endpoint.qp_state(qpn), None);
    assert_eq!(endpoint.destroy_qp(Time::ZERO, qpn), Err(VerbsError::NoQp(qpn.get())));
    endpoint.destroy_cq(cq).unwrap();
    assert_eq!(endpoint.destroy_cq(cq), Err(VerbsError::NoCq(cq.0)));
}

#[test]
fn sends_are_refused_too_early_too_long_or_too_many() {
    let (mut endpoint, _, qpn) = small_endpoint();
    let sge = Sge { addr: 0, len: 1 << 31, lkey: 0 };
    let wr = |count: usize| SendWr {
        wr_id: 1,
        op: SendOp::Send,
        sges: std::iter::repeat_n(sge, count).collect(),
        signaled: true,
        solicited: false,
        ..SendWr::default()
    };
    let early = VerbsError::WrongState { qpn: qpn.get(), state: "RESET" };
    assert_eq!(endpoint.post_send(Time::ZERO, qpn, wr(0)), Err(early));
    let path = Network::new(&NetworkConfig::default()).nodes[0].path();
    let connect = Connect::new(path, Qpn::new(5), Psn::new(0));
    device::connect(&mut endpoint, Time::ZERO, qpn, &connect).unwrap();
    assert!(device::connect(&mut endpoint, Time::ZERO, qpn, &connect).is_err());
    let too_long = VerbsError::TooLong(2 * MAX_MESSAGE_BYTES);
    assert_eq!(endpoint.post_send(Time::ZERO, qpn, wr(2)), Err(too_long));
    endpoint.post_send(Time::ZERO, qpn, wr(1)).unwrap();
    let full = VerbsError::QueueFull { qpn: qpn.get(), queue: "send", limit: 1 };
    assert_eq!(endpoint.post_send(Time::ZERO, qpn, wr(1)), Err(full));
}

#[test]
fn queue_pairs_take_turns_in_bursts() {
    let endpoint = EndpointConfig { burst_packets: 4, ..EndpointConfig::default() };
    let config = NetworkConfig { endpoint, ..NetworkConfig::default() };
    let mut pair = Pair::build(&config, |connect| connect.mtu = Mtu::M256);
    let (c, d) = pair.network.pair(|connect| connect.mtu = Mtu::M256);
    let wr = pair.wr(1, pair.write_op(0), 0, 256 * 10);
    pair.network.nodes[0].endpoint.post_send(Time::ZERO, c.qpn, wr.clone()).unwrap();
    pair.post(wr);
    pair.network.settle();
    let targets: Vec<_> = pair.trace().iter().map(|headers| headers.bth().dest_qp).collect();
    let (first, second) = (d.qpn, pair.b.qpn);
    let turns: Vec<_> = targets.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect();
    let wanted = [(first, 4), (second, 4), (first, 4), (second, 4), (first, 2), (second, 2)];
    assert_eq!(turns, wanted);
}

// ---- single packets ----------------------------------------------------------------------------

/// Delivers packets `(opcode, RETH length, payload)`: all but the last are good, the last ends the
/// connection as an invalid request.
fn invalid(packets: &[(Opcode, u32, usize)]) {
    let mut lone = Lone::new();
    let Some((&(opcode, len, payload), good)) = packets.split_last() else {
        return;
    };
    for &(opcode, len, payload) in good {
        let ext = ext_of(&lone, opcode, len);
        lone.next(opcode, ext, payload);
        assert_eq!(lone.pair.state(1), QpState::Rts, "{opcode} of {packets:?}");
    }
    while lone.answer().is_some() {}
    let at = lone.psn;
    let ext = ext_of(&lone, opcode, len);
    assert!(lone.next(opcode, ext, payload).is_empty());
    assert_eq!(lone.answer(), Some((at, Syndrome::InvalidRequest)), "{packets:?}");
    assert_eq!(lone.pair.state(1), QpState::Error);
}

fn ext_of(lone: &Lone, opcode: Opcode, len: u32) -> Ext {
    match (opcode.carries_reth(), opcode.carries_imm()) {
        (true, true) => Ext::RethImm(lone.range(len), 0),
        (true, false) => lone.reth(len),
        (false, true) => Ext::Imm(0),
        (false, false) => Ext::None,
    }
}

#[test]
fn opcodes_out_of_order_are_invalid_requests() {
    use Opcode::*;
    let (send, write) = ((RcSendFirst, 0, 256), (RcWriteFirst, 1000, 256));
    invalid(&[(RcSendMiddle, 0, 256)]);
    invalid(&[(RcSendLast, 0, 1)]);
    invalid(&[(RcWriteMiddle, 0, 256)]);
    invalid(&[(RcWriteLastImm, 0, 1)]);
    for start in [send, write] {
        invalid(&[start, send]);
        invalid(&[start, write]);
        invalid(&[start, (RcSendOnly, 0, 1)]);
        invalid(&[start, (RcWriteOnly, 1, 1)]);
        invalid(&[start, (RcReadRequest, 100, 0)]);
    }
    invalid(&[send, (RcWriteMiddle, 0, 256)]);
    invalid(&[write, (RcSendMiddle, 0, 256)]);
    invalid(&[send, (RcSendMiddle, 0, 256), (RcWriteLast, 0, 10)]);
}

#[test]
fn lengths_that_contradict_the_mtu_or_the_reth_are_invalid_requests() {
    use Opcode::*;
    for payload in [0, 255, 257] {
        invalid(&[(RcSendFirst, 0, payload)]);
        invalid(&[(RcWriteFirst, 1000, payload)]);
        invalid(&[(RcSendFirst, 0, 256), (RcSendMiddle, 0, payload)]);
    }
    invalid(&[(RcSendOnly, 0, 257)]);
    invalid(&[(RcSendFirst, 0, 256), (RcSendLast, 0, 0)]);
    invalid(&[(RcSendFirst, 0, 256), (RcSendLast, 0, 257)]);
    invalid(&[(RcWriteOnly, 10, 11)]);
    invalid(&[(RcWriteOnly, 11, 10)]);
    invalid(&[(RcWriteOnly, 300, 256)]);
    invalid(&[(RcWriteFirst, 256, 256)]);
    invalid(&[(RcWriteFirst, u32::MAX, 256)]);
    invalid(&[(RcWriteFirst, 300, 256), (RcWriteMiddle, 0, 256)]);
    invalid(&[(RcWriteFirst, 300, 256), (RcWriteLast, 0, 43)]);
    invalid(&[(RcWriteFirst, 300, 256), (RcWriteLast, 0, 45)]);
    invalid(&[(RcWriteFirst, 1000, 256), (RcWriteLast, 0, 100)]);
    invalid(&[(RcReadRequest, u32::MAX, 0)]);
    invalid(&[(RcReadRequest, 100, 4)]);
}

#[test]
fn strangers_are_dropped_and_counted_by_reason() {
    let mut lone = Lone::new();
    let (b, opcode) = (lone.pair.b.qpn, Opcode::RcSendOnly);
    let stranger = Qpn::new(b.get() ^ 0x80_0000);
    let unsent = lone.pair.network.nodes[1].endpoint.query_qp(b).unwrap().sq_psn;
    let drops = [
        lone.custom(opcode, Ext::None, 10, |bth| bth.dest_qp = stranger),
        lone.custom(opcode, Ext::None, 10, |bth| bth.pkey = 0x1234),
        lone.custom(Opcode::UcSendOnly, Ext::None, 10, |_| {}),
        lone.custom(Opcode::Cnp, Ext::Cnp, 0, |_| {}),
        lone.custom(Opcode::RcAcknowledge, positive(), 0, |bth| bth.psn = unsent),
    ];
    assert!(drops.iter().all(|placements| placements.is_empty()));
    let limited_member = lone.custom(opcode, Ext::None, 10, |bth| bth.pkey = 0x7fff);
    assert_eq!(limited_member.len(), 1);
    let counters = *lone.counters();
    assert_eq!((counters.unknown_qp, counters.bad_pkey), (1, 1));
    assert_eq!((counters.bad_opcode, counters.cnps_received, counters.bad_psn), (1, 1, 1));
    assert_eq!(lone.pair.state(1), QpState::Rts);
}

#[test]
fn only_the_peer_is_heard() {
    let mut lone = Lone::new();
    let source = lone.pair.network.nodes[1].path().remote;
    let reth = lone.reth(100);
    let _ = lone.next(Opcode::RcReadRequest, reth, 0);
    let headers = lone.pair.network.nodes[1].endpoint.poll_transmit(Time::ZERO).unwrap().headers;
    let bth = Bth { opcode: Opcode::RcSendOnly, dest_qp: lone.pair.b.qpn, ..*headers.bth() };
    let forged = Headers::new(Bth { psn: lone.psn, ..bth }, Ext::None).unwrap();
    let endpoint = &mut lone.pair.network.nodes[1].endpoint;
    assert!(
        endpoint
            .handle_packet(Time::ZERO, &Origin::new(source, source.ip()), &forged, 10)
            .pieces
            .is_empty()
    );
    assert_eq!(lone.counters().wrong_source, 1);
}

#[test]
fn packets_wait_for_the_connection() {
    let mut network = Network::new(&NetworkConfig::default());
    let end = network.create_end(1, 8, 8);
    let regions =
        [0, 1].map(|node: usize| network.nodes[node].register(BASE, 64, Access::ALL).unwrap());
    let pair = Pair { network, a: end, b: end, regions };
    let mut lone = Lone { pair, psn: Psn::new(0) };
    assert!(lone.next(Opcode::RcSendOnly, Ext::None, 10).is_empty());
    assert_eq!(lone.counters().wrong_state, 1);
}

#[test]
fn packets_ahead_make_one_nak_until_there_is_progress() {
    let mut lone = Lone::new();
    let expected = lone.psn;
    for ahead in 1..5 {
        let _ = lone.packet(Opcode::RcSendOnly, Ext::None, 10, expected.plus(ahead));
    }
    assert_eq!(lone.answer(), Some((expected, Syndrome::SequenceError)));
    let _ = lone.packet(Opcode::RcSendOnly, Ext::None, 10, expected.plus(9));
    assert_eq!(lone.answer(), None);
    let _ = lone.next(Opcode::RcSendOnly, Ext::None, 10);
    assert!(matches!(lone.answer(), Some((psn, Syndrome::Ack { .. })) if psn == expected));
    let _ = lone.packet(Opcode::RcSendOnly, Ext::None, 10, expected.plus(9));
    assert_eq!(lone.answer(), Some((expected.next(), Syndrome::SequenceError)));
}

/// A SEND of node 1's own.
fn send_back(lone: &mut Lone, wr_id: u64) {
    let sges = lone.pair.sge(1, 0, 64);
    let wr = SendWr { wr_id, sges, signaled: true, ..SendWr::default() };
    let qpn = lone.pair.b.qpn;
    lone.pair.network.nodes[1].endpoint.post_send(Time::ZERO, qpn, wr).unwrap();
}

#[test]
fn an_acknowledgement_follows_a_few_requests_and_a_nak_precedes_them() {
    use Opcode::{RcAcknowledge, RcSendOnly};
    let mut lone = Lone::new();
    let _ = lone.next(RcSendOnly, Ext::None, 10);
    assert!(lone.pair.network.nodes[1].endpoint.owes_only_acks());
    (0..2).for_each(|wr_id| send_back(&mut lone, wr_id));
    assert!(!lone.pair.network.nodes[1].endpoint.owes_only_acks(), "requests do not wait");
    let sent = |lone: &mut Lone| -> Vec<Opcode> {
        std::iter::from_fn(|| Some(lone.answer_packet()?.bth().opcode)).collect()
    };
    assert_eq!(sent(&mut lone), [RcSendOnly, RcSendOnly, RcAcknowledge]);

    lone.pair.receive(8, 1000);
    let _ = lone.next(RcSendOnly, Ext::None, 10);
    (0..20).for_each(|wr_id| send_back(&mut lone, wr_id));
    let among: Vec<usize> = (0..)
        .zip(sent(&mut lone))
        .filter_map(|(place, opcode)| (opcode == RcAcknowledge).then_some(place))
        .collect();
    assert_eq!(among, [16]);

    let missing = lone.psn;
    let _ = lone.packet(RcSendOnly, Ext::None, 10, missing.next());
    assert!(!lone.pair.network.nodes[1].endpoint.owes_only_acks(), "a NAK does not wait");
    send_back(&mut lone, 9);
    assert_eq!(lone.answer(), Some((missing, Syndrome::SequenceError)));
    assert_eq!(sent(&mut lone), [RcSendOnly]);
}

#[test]
fn a_read_repeated_by_the_network_cannot_end_the_connection() {
    let mut lone = Lone::new();
    let region = lone.pair.regions[1];
    let (reth, psn) = (lone.reth(100), lone.psn);
    let _ = lone.next(Opcode::RcReadRequest, reth, 0);
    while lone.answer().is_some() {}
    lone.pair.network.nodes[1].deregister(region.lkey).unwrap();
    let _ = lone.packet(Opcode::RcReadRequest, reth, 0, psn);
    assert_eq!(lone.answer(), None);
    assert_eq!(lone.counters().bad_key, 1);
    assert_eq!(lone.pair.state(1), QpState::Rts);
}

#[test]
fn repeated_reads_give_way_to_new_ones() {
    let mut lone = Lone::new();
    let (reth, first) = (lone.reth(2000), lone.psn);
    let mut psn = first;
    for _ in 0..2 {
        let _ = lone.packet(Opcode::RcReadRequest, reth, 0, psn);
        psn = psn.plus(8);
    }
    while lone.answer().is_some()
        || lone.pair.network.nodes[1].endpoint.poll_transmit(Time::ZERO).is_some()
    {}
    // Both are done; the network duplicates them just before two new ones.
    for repeated in [first, first.plus(8)] {
        let _ = lone.packet(Opcode::RcReadRequest, reth, 0, repeated);
    }
    for _ in 0..2 {
        let _ = lone.packet(Opcode::RcReadRequest, reth, 0, psn);
        psn = psn.plus(8);
    }
    assert_eq!(lone.counters().too_many_reads, 0);
    assert_eq!(lone.pair.state(1), QpState::Rts);
    let _ = lone.packet(Opcode::RcReadRequest, reth, 0, psn);
    assert_eq!(lone.counters().too_many_reads, 1);
}

/// A requester whose responses are made by the test.
fn answered_by(opcode: Opcode, ext: Ext, payload: usize, ahead: u32) -> (Pair, Placements) {
    let mut pair = Pair::with(|connect| connect.mtu = Mtu::M256);
    pair.read(1, 600);
    pair.write(2, 0, 8);
    pair.lose(|_, _| true);
    pair.network.settle();
    let placements = pair.respond(opcode, ext, payload, ahead).pieces;
    (pair, placements)
}

#[test]
fn responses_that_do_not_fit_the_request_end_the_connection() {
    use Opcode::*;
    let cases = [
        (RcReadResponseFirst, positive(), 255),
        (RcReadResponseFirst, positive(), 257),
        (RcReadResponseOnly, positive(), 256),
        (RcReadResponseLast, positive(), 88),
        (RcReadResponseMiddle, Ext::None, 0),
    ];
    for (opcode, ext, payload) in cases {
        let (mut pair, placements) = answered_by(opcode, ext, payload, 0);
        assert!(placements.is_empty());
        assert_eq!(pair.run().0, [(1, WcStatus::BadResponse), (2, WrFlushError)], "{opcode}");
        assert_eq!(pair.counters(0).bad_response, 1);
    }
}

#[test]
fn a_right_response_is_placed_and_a_wrong_psn_ignored() {
    let (pair, placements) = answered_by(Opcode::RcReadResponseFirst, positive(), 256, 0);
    let place = placements[0];
    assert_eq!((place.addr, place.len), (BASE + 100_000, 256));
    assert_eq!(pair.state(0), QpState::Rts);
    for ahead in [4, 1000, (1 << 24) - 1] {
        let (pair, placements) = answered_by(Opcode::RcAcknowledge, positive(), 0, ahead);
        assert!(placements.is_empty());
        assert_eq!(pair.state(0), QpState::Rts);
        assert_eq!(pair.counters(0).bad_psn + pair.counters(0).duplicate_acks, 1);
    }
}

#[test]
fn a_wrong_psn_is_ignored_by_selective_repeat_whatever_it_says() {
    let refusal = Ext::Aeth(Aeth { syndrome: Syndrome::RemoteAccess, msn: 0 });
    let cases = [
        (Opcode::RcReadResponseMiddle, Ext::None),
        (Opcode::RcReadResponseOnly, positive()),
        (Opcode::RcAcknowledge, refusal),
    ];
    for (opcode, ext) in cases {
        for ahead in [1000, (1 << 24) - 1000] {
            let mut pair = Pair::with(|connect| *connect = connect.selective());
            pair.read(1, 600);
            pair.write(2, 0, 8);
            pair.lose(|_, _| true);
            pair.network.settle();
            let placements = pair.respond(opcode, ext, 0, ahead).pieces;
            assert!(placements.is_empty());
            assert_eq!(pair.state(0), QpState::Rts, "{opcode} {ahead}");
            assert_eq!(pair.counters(0).bad_psn + pair.counters(0).duplicate_acks, 1);
        }
    }
}

#[test]
fn each_fatal_nak_has_its_status() {
    let cases = [
        (Syndrome::InvalidRequest, WcStatus::RemoteInvalidRequest),
        (Syndrome::RemoteAccess, WcStatus::RemoteAccessError),
        (Syndrome::RemoteOperation, WcStatus::RemoteOperationError),
    ];
    for (syndrome, status) in cases {
        let nak = Ext::Aeth(Aeth { syndrome, msn: 0 });
        let (mut pair, _) = answered_by(Opcode::RcAcknowledge, nak, 0, 1);
        assert_eq!(pair.run().0, [(1, status), (2, WrFlushError)]);
        // The READ before the refused WRITE gets no response any more.
        let (mut pair, _) = answered_by(Opcode::RcAcknowledge, nak, 0, 3);
        assert_eq!(pair.run().0, [(1, WrFlushError), (2, status)]);
    }
}

// ---- each fault alone --------------------------------------------------------------------------

#[test]
fn every_fault_alone_is_survived() {
    for fault in Fault::ALL.into_iter().take(Fault::PER_PACKET) {
        let mut pair = Pair::with(|connect| connect.timeout = 8);
        pair.network.mix = FaultMix::NONE.with(fault, 100_000);
        let mut draw = Chance::new(fault as u64);
        for wr_id in 0..30 {
            match draw.below(2) {
                0 => pair.write(wr_id, 0, 9000),
                _ => pair.read(wr_id, 9000),
            }
        }
        let (sent, _) = pair.run();
        assert!(sent.iter().all(|&(_, status)| status == Success), "{fault:?}: {sent:?}");
        assert_eq!(sent.len(), 30, "{fault:?}");
        assert!(pair.network.injected() > 10, "{fault:?} was not injected");
    }
}
