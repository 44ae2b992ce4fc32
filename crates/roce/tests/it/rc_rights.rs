//! What a peer has no right to, it does not get by packets that are duplicates or out of order.

use roce::Time;
use roce::endpoint::{AttrMask, Connect, QpAttr, QpState, Transmit};
use roce::verbs::{Access, Verbs};
use roce::wire::{AtomicEth, Ext, Opcode, Psn, Reth, Sreth};

use crate::harness::BASE;
use crate::pair::{Lone, WILD};

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
    lone.pair.fabric.nodes[1].endpoint.modify_qp(qpn, &attr).unwrap();
}

fn sent(lone: &mut Lone) -> Vec<Transmit> {
    let endpoint = &mut lone.pair.fabric.nodes[1].endpoint;
    std::iter::from_fn(|| endpoint.poll_transmit(Time::ZERO)).collect()
}

/// READ responses that node 1 sends: how many payload bytes, in how many packets.
fn responses(lone: &mut Lone) -> (usize, usize) {
    let all = sent(lone);
    let read = all.iter().filter(|packet| packet.headers.bth().opcode.is_read_response());
    read.fold((0, 0), |(bytes, packets), one| (bytes + one.payload_len(), packets + 1))
}

/// Asks for bytes `offset ..` of the READ at `first` again, the way that the mode does.
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

/// A READ of `len` bytes that was answered in full.
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
        lone.pair.fabric.nodes[1].endpoint.deregister(region.lkey).unwrap();
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

/// The peer may have two READs unanswered, and each of their responses may have been lost.
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
