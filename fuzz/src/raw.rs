//! Harness of one endpoint and arbitrary packets on its UDP port.
//!
//! The input is a byte that selects the services of the endpoint and its loss recovery, and a list
//! of datagrams: a byte of help, two of length, then the bytes. Without help they are the UDP
//! payload as is. Help inserts what a fuzzer could only guess: the number of a queue pair, the
//! expected sequence number, a key and an address. The ICRC is always set right, and verified as a
//! wire does, because a receiver drops everything else.

use roce::Duration;
use roce::endpoint::{Connect, Mtu, QpAttr, QpState, Reliability};
use roce::verbs::{SendOp, SendWr, SgList, Sge};
use roce::wire::{BTH_BYTES, ICRC_BYTES, Psn};
use roce::world::Ecn;
use sim::network::Network;

use crate::ledger::Queue;
use crate::node::{self, Host, MIXES, Memory, Program, QKEY, SLOTS, Service, Shape};
use crate::script::{pick, take};

/// Most datagrams of one input.
const MAX_DATAGRAMS: usize = 32;

/// Node number of the victim, and of the peer that its queue pairs are connected to, which does not
/// exist.
const VICTIM: u32 = 0;
const PEER: u32 = 1;

/// The peer's queue pair, in the victim's connection.
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
    network: Network<Memory>,
    program: Program,
    /// Next request that each queue pair expects.
    expected: [Psn; SLOTS],
}

impl Victim {
    fn new(mix: [Service; SLOTS], reliability: Reliability) -> Victim {
        let shape = Shape { mix, ipv6: false, cq_depth: 64, max_wr: 8, seed: 2 };
        let mut network = node::network(1, &shape);
        let program = Program::new(network.node_mut(VICTIM), shape);
        let remote = network.path_to(PEER);
        let expected = [Psn::new(FIRST_PSN); SLOTS];
        let mut victim = Victim { network, program, expected };
        for slot in 0..SLOTS {
            let mut host = victim.host();
            if host.slots[slot].qpn.is_some() {
                let peer = roce::verbs::Qpn::new(PEER_QPN);
                let connect = Connect {
                    mtu: Mtu::M256,
                    reliability,
                    local_psn: Psn::new(FIRST_PSN),
                    ..Connect::new(remote, peer, Psn::new(FIRST_PSN))
                };
                host.connect(slot, &connect);
            }
        }
        (0..SLOTS).for_each(|slot| victim.post(slot));
        victim
    }

    fn host(&mut self) -> Host<'_> {
        let now = self.network.now();
        Host { now, node: self.network.node_mut(VICTIM), program: &mut self.program }
    }

    /// Discards the victim's packets.
    fn drop_sent(&mut self) {
        self.network.release(VICTIM, |memory, packet| {
            memory.guard.judge_sent(packet);
        });
        self.network.nodes[VICTIM as usize].memory.guard.forget_reads();
    }

    /// Two receives, and a few outstanding requests of the victim's own.
    fn post(&mut self, slot: usize) {
        let mut host = self.host();
        let (Some(qpn), Some(region)) = (host.slots[slot].qpn, host.region(0)) else {
            return;
        };
        let list = |len| SgList::from_iter([Sge { addr: region.addr, len, lkey: region.lkey }]);
        let (remote_addr, rkey) = (0x1000, 0x77);
        let read = SendOp::Read { remote_addr, rkey };
        let add = SendOp::FetchAdd { remote_addr, rkey, add: 1 };
        for (op, len) in [(SendOp::Send, 300), (read, 600), (add, 8), (SendOp::SendImm(5), 0)] {
            let wr = SendWr { op, sges: list(len), signaled: true, ..SendWr::default() };
            // Only a reliable connection supports them all.
            host.post_send(qpn, wr);
        }
        assert!(host.post_recv(slot, list(1000)) && host.post_recv(slot, list(64)));
        node::settle(&mut self.network);
        self.drop_sent();
    }

    fn strike(&mut self, help: u8, mut payload: Vec<u8>) {
        let slot = usize::from(help >> 4 & 3) % SLOTS;
        let aimed = help & 1 != 0 && payload.len() >= BTH_BYTES + ICRC_BYTES;
        if aimed {
            self.aim(help, slot, &mut payload);
        }
        if help & 0x80 != 0 {
            let later = self.network.now() + Duration::from_millis(30);
            self.network.advance_to(later);
        }
        let mut packet = self.network.forge(PEER, VICTIM, payload);
        if !packet.seal() {
            return;
        }
        packet.ecn = Ecn::NotEct;
        let received =
            |victim: &Victim| victim.network.node(VICTIM).endpoint.counters().bytes_received;
        let before = received(self);
        node::hear(&mut self.network, VICTIM as usize, packet);
        let taken = received(self) > before;
        if aimed && taken {
            self.expected[slot] = self.expected[slot].plus(u32::from(help & 2 != 0));
        }
        self.drop_sent();
    }

    /// Inserts the fields selected by `help`.
    fn aim(&mut self, help: u8, slot: usize, payload: &mut [u8]) {
        let expected = self.expected[slot];
        let host = self.host();
        if let Some(qpn) = host.slots[slot].qpn {
            payload[5..8].copy_from_slice(&qpn.get().to_be_bytes()[1..]);
        }
        if help & 2 != 0 {
            payload[9..12].copy_from_slice(&expected.get().to_be_bytes()[1..]);
        }
        if help & 4 != 0
            && let Some(region) = host.region(payload[4])
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

    /// Whatever arrived, every work request can complete.
    fn end(&mut self) {
        let mut host = self.host();
        host.poll_all();
        for slot in 0..SLOTS {
            if let Some(qpn) = host.slots[slot].qpn {
                host.node
                    .endpoint
                    .modify_qp(host.now, qpn, &QpAttr::to(QpState::Error))
                    .expect("it exists");
                assert_eq!(host.state(slot), Some(QpState::Error));
                host.poll_all();
                let ledger = &host.node.memory.guard.ledger;
                assert_eq!((ledger.open(Queue::Send(qpn)), ledger.open(Queue::Recv(qpn))), (0, 0));
            }
        }
    }
}
