//! Duplicate and out-of-order packets give a peer no rights that it does not have.

use roce::Time;
use roce::endpoint::{
    AsyncEvent, AttrMask, Connect, Endpoint, QpAttr, QpState, SrqConfig, Transmit,
};
use roce::verbs::{Access, Qpn, RecvWr, SendOp, SendWr, Sge, WcStatus};
use roce::wire::{AtomicEth, Bth, Ext, Headers, Opcode, Psn, Reth, Sreth, Syndrome};
use roce::world::Origin;

use crate::harness::{BASE, Chance, End, Network, NetworkConfig};
use crate::pair::{Lone, Pair, WILD, bth_to};

/// Path MTU of [`Lone`].
const MTU: u32 = 256;

fn go_back_n(_: &mut Connect) {}

fn selective(connect: &mut Connect) {
    *connect = Connect { mtu: connect.mtu, max_dest_rd_atomic: 2, ..connect.selective() };
}

const MODES: [fn(&mut Connect); 2] = [go_back_n, selective];

fn allow(lone: &mut Lone, access: Access) {
    let qpn = lone.pair.b.qpn;
    let mask = AttrMask::ACCESS_FLAGS;
    let attr = QpAttr { mask, access, ..QpAttr::to(QpState::Rts) };
    lone.pair.network.nodes[1].endpoint.modify_qp(Time::ZERO, qpn, &attr).unwrap();
}

fn sent(lone: &mut Lone) -> Vec<Transmit> {
    let endpoint = &mut lone.pair.network.nodes[1].endpoint;
    std::iter::from_fn(|| endpoint.poll_transmit(Time::ZERO)).collect()
}

/// READ responses sent by node 1: payload bytes, and packets.
fn responses(lone: &mut Lone) -> (usize, usize) {
    let all = sent(lone);
    let read = all.iter().filter(|packet| packet.headers.bth().opcode.is_read_response());
    read.fold((0, 0), |(bytes, packets), one| (bytes + one.payload_len(), packets + 1))
}

/// Requests bytes `offset ..` of the READ at `first` again, in the way of the mode.
fn ask_again(lone: &mut Lone, is_selective: bool, first: Psn, offset: u32, part: Reth) {
    let _ = match is_selective {
        true => {
            let ext = Ext::RethSreth(part, Sreth { sequence: 0, offset });
            lone.packet(Opcode::SrReadRequest, ext, 0, first)
        }
        false => {
            let psn = first.plus(offset / MTU);
            lone.packet(Opcode::RcReadRequest, Ext::Reth(part), 0, psn)
        }
    };
}

/// A READ of `len` bytes with all its responses.
fn read(lone: &mut Lone, is_selective: bool, addr: u64, len: u32) -> (Psn, Reth) {
    let (first, whole) = (lone.psn, Reth { addr, ..lone.range(len) });
    let _ = lone.packet(Opcode::RcReadRequest, Ext::Reth(whole), 0, first);
    let packets = len.div_ceil(MTU).max(1);
    lone.psn = first.plus(if is_selective { 1 } else { packets });
    assert_eq!(responses(lone), (len as usize, packets as usize));
    (first, whole)
}

// ---- duplicate READs ---------------------------------------------------------------------------

#[test]
fn a_duplicate_read_is_answered_if_it_is_part_of_the_one_that_was_executed() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(mode);
        let (first, whole) = read(&mut lone, is_selective, BASE + 64, 1000);
        for offset in [0, 256, 512, 768] {
            let addr = whole.addr + u64::from(offset);
            let rest = Reth { addr, len: 1000 - offset, ..whole };
            ask_again(&mut lone, is_selective, first, offset, rest);
            assert_eq!(responses(&mut lone).0, 1000 - offset as usize, "the rest from {offset}");
            let range = Reth { addr, len: 200, ..whole };
            ask_again(&mut lone, is_selective, first, offset, range);
            assert_eq!(responses(&mut lone), (200, 1), "a range at {offset}");
        }
        assert_eq!(lone.counters().duplicate_reads, 8);
        assert_eq!(lone.counters().unmatched_duplicates, 0);
    }
}

#[test]
fn a_duplicate_read_of_anything_else_is_dropped_in_silence() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(mode);
        let (first, whole) = read(&mut lone, is_selective, BASE + 1024, 1000);
        let elsewhere = [
            (0, Reth { addr: BASE, ..whole }),
            (0, Reth { addr: whole.addr + 1, len: 999, ..whole }),
            (0, Reth { len: 1001, ..whole }),
            (0, Reth { len: 0, ..whole }),
            (0, Reth { rkey: whole.rkey ^ 1, ..whole }),
            (0, Reth { addr: WILD, ..whole }),
            (256, Reth { len: 700, ..whole }),
            (256, Reth { addr: whole.addr + 256, len: 745, ..whole }),
            (768, Reth { addr: whole.addr + 768, len: 233, ..whole }),
        ];
        for (offset, wrong) in elsewhere {
            ask_again(&mut lone, is_selective, first, offset, wrong);
            assert!(sent(&mut lone).is_empty(), "an answer to {wrong:?} at {offset}");
        }
        ask_again(&mut lone, is_selective, first.minus(1), 0, whole);
        assert!(sent(&mut lone).is_empty(), "an answer to a READ that never was");
        let counters = *lone.counters();
        assert_eq!(counters.unmatched_duplicates, elsewhere.len() as u64 + 1);
        assert_eq!((counters.bad_key, counters.bad_bounds), (0, 0), "no key was looked at");
        assert_eq!(lone.pair.state(1), QpState::Rts);
    }
}

#[test]
fn a_duplicate_read_as_the_very_first_packet_reads_nothing() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(mode);
        let (before, whole) = (lone.psn.minus(2), lone.range(300));
        ask_again(&mut lone, is_selective, before, 0, whole);
        assert!(sent(&mut lone).is_empty());
        assert_eq!(lone.counters().unmatched_duplicates, 1);
    }
}

#[test]
fn a_duplicate_read_needs_the_right_to_read_as_it_is_now() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(mode);
        let (first, whole) = read(&mut lone, is_selective, BASE, 600);
        allow(&mut lone, Access { remote_read: false, ..Access::ALL });
        ask_again(&mut lone, is_selective, first, 0, whole);
        assert!(sent(&mut lone).is_empty(), "read without the right");
        assert_eq!(lone.counters().bad_access, 1);
        allow(&mut lone, Access::ALL);
        let region = lone.pair.regions[1];
        lone.pair.network.nodes[1].endpoint.deregister(region.lkey).unwrap();
        ask_again(&mut lone, is_selective, first, 0, whole);
        assert!(sent(&mut lone).is_empty(), "read although the region is gone");
        assert_eq!(lone.counters().bad_key, 1);
        assert_eq!(lone.pair.state(1), QpState::Rts, "its key may rightly be gone");
    }
}

#[test]
fn a_queue_pair_that_serves_no_reads_serves_no_duplicates() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(|connect| {
            mode(connect);
            connect.max_dest_rd_atomic = 0;
        });
        let _ = lone.next(Opcode::RcWriteOnly, lone.reth(8), 8);
        sent(&mut lone);
        let (first, whole) = (lone.psn.minus(1), lone.range(8));
        ask_again(&mut lone, is_selective, first, 0, whole);
        assert!(sent(&mut lone).is_empty());
        assert_eq!(lone.counters().unmatched_duplicates, 1);
    }
}

/// The peer may have two READs outstanding, and each of their responses may have been lost.
#[test]
fn as_many_reads_are_kept_as_the_peer_may_have_unanswered() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(mode);
        let reads = [0, 1, 2].map(|n| read(&mut lone, is_selective, BASE + 4096 * n, 700));
        for ((first, whole), bytes) in reads.into_iter().zip([0, 700, 700]) {
            ask_again(&mut lone, is_selective, first, 0, whole);
            assert_eq!(responses(&mut lone).0, bytes);
        }
        assert_eq!(lone.counters().unmatched_duplicates, 1);
    }
}

// ---- duplicate atomics -------------------------------------------------------------------------

#[test]
fn a_duplicate_atomic_is_answered_if_it_is_the_one_that_was_carried_out() {
    for mode in MODES {
        let mut lone = Lone::with(mode);
        let (psn, rkey) = (lone.psn, lone.pair.regions[1].rkey);
        let asked = AtomicEth { addr: BASE + 8, rkey, swap_or_add: 5, compare: 0 };
        let add = |lone: &mut Lone, opcode, atomic| {
            let _ = lone.packet(opcode, Ext::AtomicEth(atomic), 0, psn);
            let is_answer =
                |packet: &Transmit| packet.headers.bth().opcode == Opcode::RcAtomicAcknowledge;
            sent(lone).iter().filter(|packet| is_answer(packet)).count()
        };
        assert_eq!(add(&mut lone, Opcode::RcFetchAdd, asked), 1);
        assert_eq!(add(&mut lone, Opcode::RcFetchAdd, asked), 1);
        let others = [
            (Opcode::RcCompareSwap, asked),
            (Opcode::RcFetchAdd, AtomicEth { addr: BASE + 16, ..asked }),
            (Opcode::RcFetchAdd, AtomicEth { rkey: rkey ^ 4, ..asked }),
            (Opcode::RcFetchAdd, AtomicEth { swap_or_add: 6, ..asked }),
        ];
        for (opcode, other) in others {
            assert_eq!(add(&mut lone, opcode, other), 0, "{other:?}");
        }
        assert_eq!(lone.counters().unmatched_duplicates, 4);
        assert_eq!(lone.counters().atomics, 1);
    }
}

// ---- out-of-order packets ----------------------------------------------------------------------

/// An out-of-order WRITE with this key, of bytes that are registered.
fn write_out_of_order(lone: &mut Lone, ahead: u32, target: Reth) -> bool {
    let psn = lone.psn.plus(ahead);
    let payload = target.len as usize;
    !lone.packet(Opcode::RcWriteOnly, Ext::Reth(target), payload, psn).is_empty()
}

/// How the connection of node 1 ended: PSN and syndrome of its only reply, and the refused PSN.
fn ended(lone: &mut Lone) -> Option<(Psn, Syndrome, Option<Psn>)> {
    let all = sent(lone);
    let is_over = lone.pair.state(1) == QpState::Error;
    let [only] = &all[..] else {
        return None;
    };
    let ext = only.headers.ext();
    let aeth = ext.aeth().filter(|_| is_over)?;
    Some((only.headers.bth().psn, aeth.syndrome, ext.sack().map(|sack| sack.start)))
}

#[test]
fn an_out_of_order_write_that_is_not_allowed_ends_the_connection_at_once() {
    let lone = Lone::with(selective);
    let good = lone.range(64);
    let wrong = [
        (Reth { rkey: good.rkey ^ 1, ..good }, Syndrome::RemoteAccess),
        (Reth { addr: WILD, ..good }, Syndrome::RemoteAccess),
        (Reth { rkey: lone.pair.regions[1].lkey, ..good }, Syndrome::RemoteAccess),
    ];
    for (wrong, syndrome) in wrong {
        let mut lone = Lone::with(selective);
        let psn = lone.psn;
        assert!(!write_out_of_order(&mut lone, 3, wrong), "placed: {wrong:?}");
        assert_eq!(ended(&mut lone), Some((psn, syndrome, Some(psn.plus(3)))), "{wrong:?}");
        assert_eq!(lone.counters().remote_access_naks_sent, 1);
        assert_eq!(lone.pair.network.nodes[1].endpoint.poll_event(), Some(event(&lone)));
    }
    let mut lone = Lone::with(selective);
    allow(&mut lone, Access { remote_write: false, ..Access::ALL });
    let (psn, good) = (lone.psn, lone.range(64));
    assert!(!write_out_of_order(&mut lone, 1, good));
    assert_eq!(ended(&mut lone), Some((psn, Syndrome::InvalidRequest, Some(psn.plus(1)))));
}

fn event(lone: &Lone) -> AsyncEvent {
    AsyncEvent::QpAccessError(lone.pair.b.qpn)
}

/// The requester learns which of its requests was refused, and that those before it were not
/// executed.
#[test]
fn the_request_that_came_out_of_order_and_was_refused_is_the_one_that_fails() {
    let mut pair = Pair::with(|connect| {
        selective(connect);
        connect.mtu = roce::endpoint::Mtu::M256;
    });
    let mut lost = false;
    pair.lose(move |_, headers| {
        let is_write = headers.bth().opcode == Opcode::RcWriteOnly;
        is_write && !std::mem::replace(&mut lost, true)
    });
    pair.write(1, 0, 200);
    pair.write(2, 300, 200);
    let bad = pair.wr(3, SendOp::Write { remote_addr: WILD, rkey: pair.regions[1].rkey }, 0, 8);
    pair.post(bad);
    pair.write(4, 600, 200);
    let flushed = |wr_id| (wr_id, WcStatus::WrFlushError);
    let wanted = [flushed(1), flushed(2), (3, WcStatus::RemoteAccessError), flushed(4)];
    assert_eq!(pair.run().0, wanted);
}

/// Packets further ahead than a window of packets, not counting those received, cannot be in
/// flight: they are dropped before any other check.
#[test]
fn packets_that_cannot_be_in_flight_are_dropped_unseen() {
    const WINDOW: u32 = 20;
    let mut lone = Lone::with(|connect| {
        selective(connect);
        connect.window_packets = WINDOW;
    });
    let good = lone.range(64);
    let wrong = Reth { rkey: !good.rkey, ..good };
    for ahead in [WINDOW, WINDOW + 1, 4 * WINDOW, 4095, 1 << 22] {
        assert!(!write_out_of_order(&mut lone, ahead, good), "placed {ahead} ahead");
        assert!(!write_out_of_order(&mut lone, ahead, wrong));
        assert_eq!(lone.pair.state(1), QpState::Rts, "ended by a packet {ahead} ahead");
    }
    assert_eq!(lone.counters().bad_key, 0);
    assert!(write_out_of_order(&mut lone, WINDOW - 1, good));
    assert!(write_out_of_order(&mut lone, WINDOW, good), "one of those before it has come");
    assert!(!write_out_of_order(&mut lone, WINDOW + 2, good));
    assert!(!write_out_of_order(&mut lone, WINDOW + 1, wrong));
    assert_eq!(lone.pair.state(1), QpState::Error);
}

// ---- guessing keys -----------------------------------------------------------------------------

/// Packets until the connection ends or a guess hits, and whether one did. `guess` sends one.
fn guess_keys(
    mode: fn(&mut Connect),
    seed: u64,
    guess: impl Fn(&mut Lone, u32) -> bool,
) -> (u32, bool) {
    let mut lone = Lone::with(mode);
    let mut draw = Chance::new(seed);
    for tries in 1..=1000 {
        let hit = guess(&mut lone, draw.word() as u32);
        sent(&mut lone);
        if hit || lone.pair.state(1) != QpState::Rts {
            return (tries, hit);
        }
    }
    (1000, false)
}

/// A hostile peer that guesses keys has one try per connection. A region's key is one of 2^31 - 1,
/// so with n writable regions the chance of a hit is n in 2^31 - 1.
#[test]
fn a_peer_that_guesses_keys_has_one_try() {
    let write = |ahead: u32| {
        move |lone: &mut Lone, rkey| {
            write_out_of_order(lone, ahead, Reth { rkey, ..lone.range(64) })
        }
    };
    for seed in 0..50 {
        assert_eq!(guess_keys(go_back_n, seed, write(0)), (1, false));
        assert_eq!(guess_keys(selective, seed, write(0)), (1, false));
        assert_eq!(guess_keys(selective, seed, write(1 + seed as u32)), (1, false));
    }
}

/// An out-of-order WRITE that has to wait, for the responses of a READ or because its sender says
/// so, is dropped whatever its key. A wrong one ends the connection all the same.
#[test]
fn a_guess_among_packets_that_have_to_wait_is_the_last() {
    let ordered = |lone: &mut Lone, rkey| {
        let (psn, target) = (lone.psn.plus(1), Ext::Reth(Reth { rkey, ..lone.range(64) }));
        let adjust = |bth: &mut Bth| (bth.psn, bth.mig_req) = (psn, false);
        !lone.custom(Opcode::RcWriteOnly, target, 64, adjust).is_empty()
    };
    let behind_read = |lone: &mut Lone, rkey| {
        let all = Ext::Reth(lone.range(600));
        let _ = lone.next(Opcode::RcReadRequest, all, 0);
        write_out_of_order(lone, 1, Reth { rkey, ..lone.range(64) })
    };
    for seed in 0..50 {
        assert_eq!(guess_keys(selective, seed, ordered), (1, false));
        assert_eq!(guess_keys(selective, seed, behind_read), (1, false));
    }
    let waits: [fn(&mut Lone, u32) -> bool; 2] = [ordered, behind_read];
    for wait in waits {
        let mut lone = Lone::with(selective);
        let right = lone.range(64).rkey;
        assert!(!wait(&mut lone, right), "placed before its turn");
        assert_eq!(lone.pair.state(1), QpState::Rts);
    }
}

/// Duplicates are dropped whether the key is right or wrong, so any number of them reveals nothing.
#[test]
fn a_peer_that_guesses_keys_by_duplicates_learns_nothing() {
    for (mode, is_selective) in MODES.into_iter().zip([false, true]) {
        let mut lone = Lone::with(mode);
        let (first, whole) = read(&mut lone, is_selective, BASE, 600);
        let mut draw = Chance::new(9);
        for n in 0..1000 {
            let rkey = if n % 10 == 0 { whole.rkey } else { draw.word() as u32 };
            let other = Reth { addr: BASE + 4096, rkey, ..whole };
            ask_again(&mut lone, is_selective, first, 0, other);
            assert!(sent(&mut lone).is_empty());
        }
        assert_eq!(lone.counters().unmatched_duplicates, 1000);
    }
}

// ---- shared receive queues ---------------------------------------------------------------------

/// Receives that the shared queue starts with.
const RECEIVES: u64 = 64;

/// Two connections in selective repeat whose ends on node 1 share a receive queue. The peer of the
/// first is the test.
struct Shared {
    network: Network,
    hostile: (End, End),
    honest: (End, End),
}

impl Shared {
    fn new() -> Shared {
        let mut network = Network::new(&NetworkConfig::default());
        let node = &mut network.nodes[1];
        let region = node.register(BASE, 1 << 16, Access::ALL).unwrap();
        let config = SrqConfig { pd: node.pd, max_wr: 256, limit: 0 };
        let srq = node.endpoint.create_srq(config).unwrap();
        for wr_id in 0..RECEIVES {
            let sge = Sge { addr: BASE + 256 * wr_id, len: 256, lkey: region.lkey };
            let wr = RecvWr { wr_id, sges: [sge].into_iter().collect() };
            node.endpoint.post_srq_recv(srq, wr).unwrap();
        }
        network.nodes[0].register(BASE, 1 << 16, Access::ALL).unwrap();
        let mut pair = || {
            let ends =
                (network.create_end(0, 128, 256), network.create_end_with(1, 128, 256, Some(srq)));
            network.connect(ends.0, ends.1, |connect| {
                *connect = Connect { rnr_retry: 0, ..connect.selective() };
            });
            ends
        };
        let (hostile, honest) = (pair(), pair());
        Shared { network, hostile, honest }
    }

    /// An out-of-order SEND of the hostile peer, for its `index`-th receive from now on.
    fn out_of_order_send(&mut self, ahead: u32, index: u32) -> bool {
        let (peer, end) = self.hostile;
        let first = self.network.nodes[0].endpoint.query_qp(peer.qpn).unwrap().sq_psn;
        let bth = Bth { opcode: Opcode::SrSendOnly, psn: first.plus(ahead), ..bth_to(end.qpn) };
        let ext = Ext::Sreth(Sreth { sequence: index, offset: 0 });
        let headers = Headers::new(bth, ext).unwrap();
        let source = self.network.nodes[0].path().remote;
        let origin = Origin::new(source, source.ip());
        let endpoint = &mut self.network.nodes[1].endpoint;
        !endpoint.handle_packet(Time::ZERO, &origin, &headers, 16).pieces.is_empty()
    }

    /// The receives that the correct connection still gets, one for each message.
    fn honest_receives(&mut self, messages: u64) -> Vec<u64> {
        let (a, b) = self.honest;
        for wr_id in 0..messages {
            let wr = SendWr { wr_id, op: SendOp::Send, ..SendWr::default() };
            self.network.nodes[0].endpoint.post_send(Time::ZERO, a.qpn, wr).unwrap();
        }
        self.network.run(100_000);
        self.network.received_by(b).iter().map(|done| done.wr_id).collect()
    }
}

#[test]
fn one_out_of_order_send_leaves_the_shared_receives_to_the_others() {
    for index in [511, 63, 9, 8, 1] {
        let mut shared = Shared::new();
        let is_placed = shared.out_of_order_send(511, index);
        assert_eq!(is_placed, index <= 8, "receive {index}");
        let taken = if is_placed { u64::from(index) + 1 } else { 0 };
        let received = shared.honest_receives(RECEIVES - taken);
        assert_eq!(received, (taken..RECEIVES).collect::<Vec<u64>>(), "receive {index}");
    }
}

/// A message whose packets have arrived has a receive, however many there are.
#[test]
fn out_of_order_messages_that_have_come_take_a_receive_each() {
    let mut shared = Shared::new();
    for index in 1..40 {
        assert!(shared.out_of_order_send(index, index), "receive {index}");
    }
    assert!(!shared.out_of_order_send(511, 52), "beyond what is left for the others");
    assert_eq!(shared.honest_receives(24), (40..64).collect::<Vec<u64>>());
}

#[test]
fn receives_that_were_taken_for_nothing_go_back_in_order() {
    for end_it in [to_error, to_reset, destroy] {
        let mut shared = Shared::new();
        assert!(shared.out_of_order_send(3, 3) && shared.out_of_order_send(7, 6));
        let end = shared.hostile.1;
        end_it(&mut shared.network.nodes[1].endpoint, end.qpn);
        let flushed = shared.network.received_by(end).iter().map(|done| done.wr_id).collect();
        let back = shared.honest_receives(RECEIVES - 1);
        let all: Vec<u64> = [flushed, back].concat();
        assert_eq!(all[..], (0..RECEIVES).collect::<Vec<u64>>()[..all.len()]);
        assert!(all.len() as u64 >= RECEIVES - 1);
    }
}

fn to_error(endpoint: &mut Endpoint, qpn: Qpn) {
    endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(QpState::Error)).unwrap();
}

fn to_reset(endpoint: &mut Endpoint, qpn: Qpn) {
    endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(QpState::Reset)).unwrap();
}

fn destroy(endpoint: &mut Endpoint, qpn: Qpn) {
    endpoint.destroy_qp(Time::ZERO, qpn).unwrap();
}

// ---- the length of a WRITE with immediate ------------------------------------------------------

/// Writes full packets one after the other from `addr` on, then a last one with an immediate that
/// claims `offset` bytes before its own `len` at `last_at`. Returns the length that was reported.
fn write_imm(packets: u32, addr: u64, last_at: u64, offset: u32) -> Result<u32, Syndrome> {
    let mut lone = Lone::with(selective);
    let rkey = lone.pair.regions[1].rkey;
    for n in 0..packets {
        let addr = addr + u64::from(n * MTU);
        let _ = lone.next(Opcode::RcWriteOnly, Ext::Reth(Reth { addr, rkey, len: MTU }), 256);
    }
    let last = Reth { addr: last_at, rkey, len: 10 };
    let ext = Ext::RethSrethImm(last, Sreth { sequence: 0, offset }, 5);
    let _ = lone.next(Opcode::SrWriteLastImm, ext, 10);
    let b = lone.pair.b;
    match lone.pair.network.received_by(b).first() {
        Some(done) if done.status == WcStatus::Success => Ok(done.byte_len),
        _ => Err(ended(&mut lone).expect("it was refused").1),
    }
}

#[test]
fn a_write_with_immediate_reports_what_it_has_written() {
    let at = BASE + 1024;
    for packets in 1..6 {
        let bytes = packets * MTU;
        let end = at + u64::from(bytes);
        assert_eq!(write_imm(packets, at, end, bytes), Ok(bytes + 10));
        let refused = Err(Syndrome::InvalidRequest);
        assert_eq!(write_imm(packets, at, end, bytes + MTU), refused, "more than was written");
        assert_eq!(write_imm(packets, at, end, bytes - 1), refused, "not whole packets");
        assert_eq!(write_imm(packets, at, end, 1 << 30), refused);
        assert_eq!(write_imm(packets, at, end, u32::MAX), refused);
        assert_eq!(write_imm(packets, at, end + 1, bytes), refused, "not where they end");
        assert_eq!(write_imm(packets, at, at, bytes), refused);
    }
    assert_eq!(write_imm(0, at, at, MTU), Err(Syndrome::InvalidRequest), "nothing was written");
}

/// Another packet between the packets of a WRITE ends it.
#[test]
fn a_write_with_immediate_counts_its_own_packets_only() {
    type Packet = (Opcode, Ext, usize);
    let others: [fn(&Lone) -> Packet; 4] = [
        |_| (Opcode::SrSendOnly, Ext::Sreth(Sreth { sequence: 0, offset: 0 }), 4),
        |lone| (Opcode::RcReadRequest, lone.reth(8), 0),
        |lone| (Opcode::RcWriteOnly, lone.reth(16), 16),
        |lone| {
            let rkey = lone.pair.regions[1].rkey;
            let ext = AtomicEth { addr: BASE, rkey, swap_or_add: 0, compare: 0 };
            (Opcode::RcFetchAdd, Ext::AtomicEth(ext), 0)
        },
    ];
    for other in others {
        let mut lone = Lone::with(selective);
        lone.pair.receive(8, 100);
        let (rkey, addr) = (lone.pair.regions[1].rkey, BASE + 1024);
        let _ = lone.next(Opcode::RcWriteOnly, Ext::Reth(Reth { addr, rkey, len: MTU }), 256);
        let (opcode, ext, payload) = other(&lone);
        let _ = lone.next(opcode, ext, payload);
        // Nothing is held back behind a READ whose responses were sent.
        while lone.answer_packet().is_some() {}
        let sequence = u32::from(opcode == Opcode::SrSendOnly);
        let last = Reth { addr: addr + 256, rkey, len: 10 };
        let ext = Ext::RethSrethImm(last, Sreth { sequence, offset: MTU }, 5);
        let _ = lone.next(Opcode::SrWriteLastImm, ext, 10);
        assert_eq!(lone.pair.state(1), QpState::Error, "after {opcode:?}");
        assert_eq!(lone.counters().bad_length, 1);
    }
}
