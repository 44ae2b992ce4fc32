//! Harness of one endpoint and whatever arrives on its UDP port.
//!
//! The input is a byte that says which services the endpoint offers and how it repeats, and a row of datagrams: a byte
//! of help, two of length, then the bytes. Without help they are the UDP payload as it stands. Help puts in what a fuzzer could only guess: the number
//! of a queue pair, the expected sequence number, a key and an address. The ICRC is made right in
//! any case, and verified as a wire does, because a receiver drops everything else unseen.

use std::net::{IpAddr, SocketAddr};

use roce::endpoint::{Connect, Mtu, QpState, Reliability};
use roce::verbs::{SendOp, SendWr, SgList, Sge};
use roce::wire::icrc::{self, Pseudo};
use roce::wire::{BTH_BYTES, ICRC_BYTES, Psn, ROCE_PORT};
use roce::world::{Ecn, Path};
use roce::{Duration, Time};

use crate::node::{Flight, MIXES, Node, QKEY, SLOTS, Service, Shape, address};
use crate::script::{pick, take};

/// Most datagrams of one input.
const MAX_DATAGRAMS: usize = 32;

/// Host number of the victim, and of the peer that its queue pairs are connected to.
const VICTIM: u8 = 2;
const PEER: u8 = 1;

/// Queue pair of the peer, as the victim believes.
const PEER_QPN: u32 = 0x33;

/// First sequence number in both directions.
const FIRST_PSN: u32 = 0xff_fffa;

/// Delivers the datagrams one by one.
pub fn check(input: &[u8]) {
    let Some((&first, mut rest)) = input.split_first() else {
        return;
    };
    let reliability = if first < 0x80 { Reliability::GoBackN } else { Reliability::Selective };
    let mut victim = Victim::new(pick(first, &MIXES), reliability);
    for _ in 0..MAX_DATAGRAMS {
        let [help, low, high] = *take(&mut rest, 3) else {
            break;
        };
        let len = usize::from(u16::from_le_bytes([low, high]) & 0x1fff);
        let payload = take(&mut rest, len).to_vec();
        victim.strike(help, payload);
    }
    victim.end();
}

struct Victim {
    node: Node,
    now: Time,
    /// Next request that each queue pair expects.
    expected: [Psn; SLOTS],
}

impl Victim {
    fn new(mix: [Service; SLOTS], reliability: Reliability) -> Victim {
        let shape = Shape { mix, ipv6: false, cq_depth: 64, max_wr: 8, seed: 0 };
        let mut node = Node::new(VICTIM, shape);
        let remote = SocketAddr::new(address(PEER, false), ROCE_PORT);
        for slot in 0..SLOTS {
            if let Some(qpn) = node.slots[slot].qpn {
                let peer = roce::verbs::Qpn::new(PEER_QPN);
                let connect = Connect {
                    mtu: Mtu::M256,
                    reliability,
                    ..Connect::new(Path::new(remote), peer, Psn::new(FIRST_PSN))
                };
                node.endpoint.set_initial_psn(qpn, Psn::new(FIRST_PSN)).expect("in RESET");
                node.connect(slot, &connect);
            }
        }
        let expected = [Psn::new(FIRST_PSN); SLOTS];
        let mut victim = Victim { node, now: Time::from_nanos(1), expected };
        (0..SLOTS).for_each(|slot| victim.post(slot));
        victim
    }

    /// Two receives, and a few requests of the victim's own that wait for answers.
    fn post(&mut self, slot: usize) {
        let (Some(qpn), Some(region)) = (self.node.slots[slot].qpn, self.node.region(0)) else {
            return;
        };
        let list = |len| SgList::from_iter([Sge { addr: region.addr, len, lkey: region.lkey }]);
        let (remote_addr, rkey) = (0x1000, 0x77);
        let read = SendOp::Read { remote_addr, rkey };
        let add = SendOp::FetchAdd { remote_addr, rkey, add: 1 };
        for (op, len) in [(SendOp::Send, 300), (read, 600), (add, 8), (SendOp::SendImm(5), 0)] {
            let wr = SendWr { op, sges: list(len), signaled: true, ..SendWr::default() };
            // Only a reliable connection has them all.
            self.node.post_send(qpn, wr);
        }
        assert!(self.node.post_recv(slot, list(1000)) && self.node.post_recv(slot, list(64)));
        self.node.settle(self.now);
        self.node.port.outbox.clear();
    }

    fn strike(&mut self, help: u8, mut payload: Vec<u8>) {
        let slot = usize::from(help >> 4 & 3) % SLOTS;
        let aimed = help & 1 != 0 && payload.len() >= BTH_BYTES + ICRC_BYTES;
        if aimed {
            self.aim(help, slot, &mut payload);
        }
        if help & 0x80 != 0 {
            self.now += Duration::from_millis(30);
        }
        let source = SocketAddr::new(address(PEER, false), 0xc001);
        if !sealed(source, &mut payload) {
            return;
        }
        let before = self.node.endpoint.counters().bytes_received;
        let dest = self.node.ip();
        let flight = Flight { source, dest, ecn: Ecn::NotEct, bytes: payload, forged: true };
        self.node.hear(self.now, flight);
        let taken = self.node.endpoint.counters().bytes_received > before;
        if aimed && taken {
            self.expected[slot] = self.expected[slot].plus(u32::from(help & 2 != 0));
        }
        self.node.port.outbox.clear();
    }

    /// Puts in what help says.
    fn aim(&self, help: u8, slot: usize, payload: &mut [u8]) {
        if let Some(qpn) = self.node.slots[slot].qpn {
            payload[5..8].copy_from_slice(&qpn.get().to_be_bytes()[1..]);
        }
        if help & 2 != 0 {
            payload[9..12].copy_from_slice(&self.expected[slot].get().to_be_bytes()[1..]);
        }
        if help & 4 != 0
            && let Some(region) = self.node.region(payload[4])
            && let Some(place) = payload.get_mut(BTH_BYTES..BTH_BYTES + 12)
        {
            // The low byte stays the fuzzer's, as an offset.
            place[..7].copy_from_slice(&region.addr.to_be_bytes()[..7]);
            place[8..].copy_from_slice(&region.rkey.to_be_bytes());
        }
        if help & 8 != 0
            && let Some(place) = payload.get_mut(BTH_BYTES..BTH_BYTES + 4)
        {
            place.copy_from_slice(&QKEY.to_be_bytes());
        }
    }

    /// Whatever came, every work request can be brought to its end.
    fn end(&mut self) {
        self.node.poll_all();
        for slot in 0..SLOTS {
            if let Some(qpn) = self.node.slots[slot].qpn {
                self.node.endpoint.modify_to_error(qpn).expect("it exists");
                assert_eq!(self.node.state(slot), Some(QpState::Error));
                self.node.poll_all();
                let ledger = &self.node.arena.ledger;
                let [send, recv] = [crate::ledger::Queue::Send, crate::ledger::Queue::Recv];
                assert_eq!((ledger.open(send(qpn)), ledger.open(recv(qpn))), (0, 0));
            }
        }
    }
}

/// Makes the ICRC right; false for bytes too short to have one.
fn sealed(source: SocketAddr, payload: &mut [u8]) -> bool {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (source.ip(), address(VICTIM, false)) else {
        return false;
    };
    let (src_port, dst_port) = (source.port(), ROCE_PORT);
    let pseudo = Pseudo::V4 { src, dst, id: 1, dont_fragment: true, src_port, dst_port };
    let Some(right) = icrc::compute(&pseudo, payload) else {
        return false;
    };
    if let Some(carried) = payload.last_chunk_mut() {
        *carried = right;
    }
    icrc::verify(&pseudo, payload)
}
