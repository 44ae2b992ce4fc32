//! Reports of a queue pair, and why it failed: packet, peer and cause.

use roce::Time;
use roce::endpoint::{Connect, MAX_PAST_ERRORS, Mtu, QpAttr, QpState};
use roce::report::{Cause, Credits, LastError, Peer, QpReport};
use roce::verbs::{SendOp, Transport, WcStatus};
use roce::wire::Syndrome;

use crate::kit;
use crate::pair::{Pair, REGION_BYTES};

fn report(pair: &Pair, node: usize) -> QpReport {
    let qpn = if node == 0 { pair.a.qpn } else { pair.b.qpn };
    pair.network.nodes[node].endpoint.queue_pairs().find(|report| report.qpn == qpn).unwrap()
}

fn last_error(pair: &Pair, node: usize) -> LastError {
    report(pair, node).last_error.unwrap()
}

/// Node 1, as node 0 sees it.
fn peer(pair: &Pair) -> Peer {
    Peer { ip: pair.network.nodes[1].ip(), qpn: pair.b.qpn }
}

#[test]
fn a_peer_that_fell_silent_is_named_with_the_packet_it_did_not_answer() {
    let mut pair = Pair::with(|connect| connect.retry_count = 3);
    pair.write(1, 0, 100);
    pair.write(2, 0, 100);
    pair.run();
    pair.lose(|_, _| true);
    pair.write(3, 0, 100);
    pair.run();

    let (first, error) = (pair.first_psn(), last_error(&pair, 0));
    assert_eq!((error.cause, error.peer), (Cause::NoResponse, Some(peer(&pair))));
    assert_eq!((error.psn, error.acknowledged), (Some(first.plus(2)), Some(first.plus(1))));
    assert_eq!((error.wr_id, error.retries), (Some(3), 3));
    assert!(error.at > Time::ZERO);
    let text = error.to_string();
    let (psn, acknowledged) = (first.plus(2).get(), first.plus(1).get());
    assert!(text.starts_with("retry exceeded: 3 retries, no response to PSN"), "{text}");
    assert!(text.contains(&format!("PSN {psn:#08x} from {}", peer(&pair))), "{text}");
    assert!(text.contains(&format!("last acknowledged {acknowledged:#08x}")), "{text}");
}

#[test]
fn a_peer_that_never_answered_is_told_apart() {
    let mut pair = Pair::new();
    pair.lose(|_, _| true);
    pair.write(1, 0, 100);
    pair.run();
    let error = last_error(&pair, 0);
    assert_eq!((error.acknowledged, error.psn), (None, Some(pair.first_psn())));
}

#[test]
fn a_peer_that_answers_and_misses_packets_is_told_from_a_silent_one() {
    let mut pair = Pair::with(|connect| connect.retry_count = 0);
    let lost = pair.first_psn();
    pair.lose(move |_, headers| headers.bth().psn == lost && headers.bth().opcode.is_request());
    pair.write(1, 0, 100);
    pair.write(2, 0, 100);
    pair.run();
    let error = last_error(&pair, 0);
    assert_eq!((error.cause, error.psn), (Cause::SequenceErrors, Some(lost)));
}

#[test]
fn a_refused_access_is_known_on_both_sides() {
    let mut pair = Pair::new();
    pair.write(1, 0, 100);
    pair.write(2, REGION_BYTES, 100);
    pair.run();

    let (ours, theirs) = (last_error(&pair, 0), last_error(&pair, 1));
    let psn = Some(pair.first_psn().plus(1));
    let refused = Cause::PeerRefused(WcStatus::RemoteAccessError);
    assert_eq!((ours.cause, ours.psn, ours.wr_id), (refused, psn, Some(2)));
    assert_eq!(ours.peer, Some(peer(&pair)));
    assert_eq!((theirs.cause, theirs.psn), (Cause::Refused(Syndrome::RemoteAccess), psn));
    let us = Peer { ip: pair.network.nodes[0].ip(), qpn: pair.a.qpn };
    assert_eq!(theirs.peer, Some(us));
    assert!(ours.to_string().contains(&peer(&pair).to_string()), "{ours}");
    assert!(theirs.to_string().contains(&us.to_string()), "{theirs}");
}

#[test]
fn a_receiver_that_posts_nothing_is_named() {
    let mut pair = Pair::with(|connect| connect.rnr_retry = 2);
    pair.send(5, 100);
    pair.run();
    let error = last_error(&pair, 0);
    assert_eq!((error.cause, error.retries), (Cause::ReceiverNotReady, 2));
    assert_eq!((error.psn, error.wr_id), (Some(pair.first_psn()), Some(5)));
    let start = format!(
        "RNR retry exceeded: 2 retries, no receive posted for PSN {:#08x} at {}",
        pair.first_psn().get(),
        peer(&pair)
    );
    assert!(error.to_string().starts_with(&start), "{error}");
}

#[test]
fn a_request_that_cannot_run_here_blames_nobody_else() {
    let mut pair = Pair::new();
    let wr = pair.wr(9, pair.write_op(0), REGION_BYTES, 100);
    pair.post(wr);
    pair.run();
    let error = last_error(&pair, 0);
    assert_eq!(error.cause, Cause::Local(WcStatus::LocalProtectionError));
    assert_eq!((error.wr_id, error.psn), (Some(9), Some(pair.first_psn())));
}

#[test]
fn a_program_that_stops_its_queue_pair_is_no_riddle() {
    let mut pair = Pair::new();
    let qpn = pair.a.qpn;
    let endpoint = &mut pair.network.nodes[0].endpoint;
    assert_eq!(endpoint.last_error(qpn), None);
    endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(QpState::Error)).unwrap();
    assert_eq!(endpoint.last_error(qpn).unwrap().cause, Cause::Program);
    endpoint.destroy_qp(Time::ZERO, qpn).unwrap();
    assert_eq!(endpoint.past_errors().count(), 0);
}

#[test]
fn datagrams_that_fail_name_where_they_were_going() {
    let mut pair = Pair::new();
    let network = &mut pair.network;
    let (from, to) = network.pair_of(Transport::Ud, Mtu::M1024);
    let (region, address) = (kit::registered(&mut network.nodes[0]), network.address(to));
    let mut wr = kit::send(4, SendOp::Send, kit::list(region, kit::REGION_BYTES, 10));
    wr.to = Some(address);
    network.post_send(from, wr);
    network.run(1000);
    assert_eq!(network.state(from), QpState::Sqe);
    let error = network.endpoint(from).last_error(from.qpn).unwrap();
    let peer = Peer { ip: network.nodes[1].ip(), qpn: to.qpn };
    assert_eq!((error.peer, error.wr_id), (Some(peer), Some(4)));
}

#[test]
fn failures_outlive_their_queue_pairs_and_are_bounded() {
    let mut pair = Pair::new();
    for round in 0..MAX_PAST_ERRORS + 3 {
        let (a, _) = pair.network.pair(|connect| connect.retry_count = 0);
        let wr = pair.wr(round as u64, pair.write_op(0), REGION_BYTES, 100);
        let endpoint = &mut pair.network.nodes[0].endpoint;
        endpoint.post_send(Time::ZERO, a.qpn, wr).unwrap();
        pair.network.run(1000);
        pair.network.nodes[0].endpoint.destroy_qp(Time::ZERO, a.qpn).unwrap();
    }
    let endpoint = &pair.network.nodes[0].endpoint;
    let kept: Vec<u64> = endpoint.past_errors().filter_map(|error| error.wr_id).collect();
    assert_eq!(kept, (3..MAX_PAST_ERRORS as u64 + 3).collect::<Vec<_>>());
}

#[test]
fn a_report_shows_what_is_posted_in_flight_and_promised() {
    let mut pair = Pair::new();
    pair.receive(1, 100);
    pair.receive(2, 100);
    pair.receive(3, 100);
    assert_eq!(report(&pair, 1).receives, Some(3));
    pair.send(10, 100);
    pair.run();
    let (first, idle) = (pair.first_psn(), report(&pair, 0));
    let flow = idle.flow.unwrap();
    assert_eq!((flow.unacknowledged, flow.next), (first.plus(1), first.plus(1)));
    assert_eq!((flow.in_flight_packets, flow.credits), (0, Credits::Messages(2)));
    assert_eq!((idle.sends, idle.attr.state, idle.deadline), (0, QpState::Rts, None));
    assert_eq!(report(&pair, 1).flow.unwrap().expected, first.plus(1));

    pair.lose(|_, _| true);
    pair.send(11, 100);
    let now = pair.network.now();
    assert!(pair.network.nodes[0].endpoint.poll_transmit(now).is_some());
    let busy = report(&pair, 0);
    let flow = busy.flow.unwrap();
    assert_eq!((busy.sends, flow.in_flight_packets), (1, 1));
    assert_eq!((flow.next, flow.credits), (first.plus(2), Credits::Messages(1)));
    assert!(busy.deadline.is_some());
    assert_eq!(busy.counters, *pair.network.nodes[0].endpoint.qp_counters(pair.a.qpn).unwrap());
}

#[test]
fn packets_in_flight_never_exceed_the_window_and_reach_it() {
    let modes: [fn(&mut Connect); 2] = [|_| {}, |connect| *connect = connect.selective()];
    for mode in modes {
        let mut pair = Pair::with(|connect| {
            mode(connect);
            connect.mtu = Mtu::M256;
            connect.window_packets = 8;
        });
        let mut most = 0;
        // Many windows, so that what is acknowledged counts no longer.
        for message in 0..20 {
            pair.write(message, 0, 4_000);
            while pair.network.advance() {
                let flow = report(&pair, 0).flow.unwrap();
                let pace = pair.network.nodes[0].endpoint.progress(pair.a.qpn).unwrap();
                assert!(flow.in_flight_packets <= flow.window_packets, "{flow:?}");
                assert_eq!(pace.in_flight_packets, flow.in_flight_packets);
                assert_eq!((pace.window_packets, pace.unacknowledged), (8, flow.unacknowledged));
                most = most.max(flow.in_flight_packets);
            }
        }
        assert_eq!(most, 8);
    }
}
