//! Requests of one queue pair take effect in the order in which they were posted: a READ returns
//! the bytes from before the WRITE, SEND or atomic behind it, fenced or not (docs/reliability.md).

use std::net::SocketAddr;

use controls::CongestionControl;
use roce::Time;
use roce::endpoint::{Connect, Mtu};
use roce::verbs::WcStatus::Success;
use roce::verbs::{Access, Qpn, SendOp, SendWr, SgList, Sge, Transport};
use roce::wire::{Bth, Headers, Opcode};
use roce::world::{self, Memory, Origin, Path, RxFrame, TxFrame, Wire};

use crate::harness::{BASE, End, Fault, FaultMix, Network, NetworkConfig};
use crate::pair::{Lone, Pair, REGION_BYTES, bth_to};

/// Destination of node 0's READs.
const LANDING: u64 = 100_000;

/// Where `Pair::receive` puts what arrives.
const RECEIVE: u64 = 200_000;

const MODES: [fn(&mut Connect); 2] = [|_| {}, |connect| *connect = connect.selective()];

fn peer_bytes(pair: &Pair, offset: u64, len: u32) -> Vec<u8> {
    pair.network.nodes[1].memory.peek(BASE + offset, len as usize).to_vec()
}

fn landed(pair: &Pair, at: u64, len: u32) -> Vec<u8> {
    pair.network.nodes[0].memory.peek(BASE + at, len as usize).to_vec()
}

/// A READ of the peer's bytes at `from`, into `at`.
fn read_into(pair: &mut Pair, wr_id: u64, from: u64, at: u64, len: u32) {
    let op = SendOp::Read { remote_addr: BASE + from, rkey: pair.regions[1].rkey };
    let wr = pair.wr(wr_id, op, at, len);
    pair.post(wr);
}

#[test]
fn a_read_returns_what_was_there_before_the_write_behind_it() {
    for mode in MODES {
        for len in [8, 100, 4096, 20_000] {
            let mut pair = Pair::with(mode);
            let before = peer_bytes(&pair, 0, len);
            read_into(&mut pair, 0, 0, LANDING, len);
            pair.write(1, 0, len);
            read_into(&mut pair, 2, 0, LANDING + 50_000, len);
            assert_eq!(pair.run().0, [(0, Success), (1, Success), (2, Success)]);
            assert!(landed(&pair, LANDING, len) == before, "{len} bytes before the WRITE");
            assert!(landed(&pair, LANDING + 50_000, len) == landed(&pair, 0, len), "{len} after");
        }
    }
}

#[test]
fn every_kind_of_request_waits_for_the_read_before_it() {
    let ops: [fn(&Pair) -> SendOp; 4] = [
        |pair| pair.write_op(RECEIVE),
        |_| SendOp::Send,
        |pair| {
            let (remote_addr, rkey) = (BASE + RECEIVE, pair.regions[1].rkey);
            SendOp::WriteImm { remote_addr, rkey, imm: 7 }
        },
        |pair| {
            let (remote_addr, rkey) = (BASE + RECEIVE, pair.regions[1].rkey);
            SendOp::FetchAdd { remote_addr, rkey, add: 1 }
        },
    ];
    for mode in MODES {
        for op in ops {
            let mut pair = Pair::with(mode);
            pair.receive(0, 8);
            let before = peer_bytes(&pair, RECEIVE, 8);
            read_into(&mut pair, 1, RECEIVE, LANDING, 8);
            let behind = pair.wr(2, op(&pair), 0, 8);
            pair.post(behind);
            assert_eq!(pair.run().0, [(1, Success), (2, Success)]);
            assert_eq!(landed(&pair, LANDING, 8), before, "{:?}", op(&pair));
            assert_ne!(peer_bytes(&pair, RECEIVE, 8), before);
        }
    }
}

/// A READ too long to be gathered at once holds back what is behind it, and nothing is lost by
/// that.
#[test]
fn a_long_read_holds_back_the_writes_behind_it() {
    const LEN: u32 = 90_000;
    for mode in MODES {
        let mut pair = Pair::with(|connect| {
            mode(connect);
            connect.mtu = Mtu::M256;
        });
        let before = peer_bytes(&pair, 0, LEN);
        read_into(&mut pair, 0, 0, LANDING, LEN);
        for wr_id in 1..20 {
            pair.write(wr_id, u64::from(LEN) - 4000 + wr_id, 2000);
        }
        let sent = pair.run().0;
        assert!(sent.iter().all(|&(_, status)| status == Success), "{sent:?}");
        assert_eq!(sent.len(), 20);
        assert!(landed(&pair, LANDING, LEN) == before);
        let end = u64::from(LEN) - 4000 + 19;
        assert!(pair.arrived(end, 2000));
        // The requester knows that it would be held back, so it does not send in vain.
        assert_eq!(pair.counters(1).deferred_requests, 0);
        assert_eq!(pair.counters(0).retransmitted_packets, 0);
    }
}

/// A peer that sends right behind a long READ gets a NAK once the READ is done.
#[test]
fn what_is_held_back_is_asked_for_again() {
    use roce::wire::{Ext, Reth, Syndrome};
    let mut lone = Lone::new();
    let rkey = lone.pair.regions[1].rkey;
    let reth = |len| Ext::Reth(Reth { addr: BASE, rkey, len });
    assert!(lone.next(Opcode::RcReadRequest, reth(1024), 0).is_empty());
    lone.psn = lone.psn.plus(3);
    let held = lone.psn;
    for _ in 0..3 {
        assert!(lone.packet(Opcode::RcWriteOnly, reth(100), 100, held).is_empty());
    }
    assert_eq!(lone.counters().deferred_requests, 3);
    for ahead in (1..=4).rev() {
        let answer = lone.answer_packet().unwrap();
        assert!(answer.bth().opcode.is_read_response());
        assert_eq!(answer.bth().psn, held.minus(ahead));
    }
    assert_eq!(lone.answer(), Some((held, Syndrome::SequenceError)));
    assert_eq!(lone.answer(), None);
    assert_eq!(lone.next(Opcode::RcWriteOnly, reth(100), 100).len(), 1);
}

/// A WRITE that arrives while the READ or atomic before it is missing is not placed out of order.
#[test]
fn nothing_is_placed_out_of_order_over_a_read_or_atomic_that_is_missing() {
    for opcode in [Opcode::RcReadRequest, Opcode::RcFetchAdd] {
        let mut pair = Pair::with(|connect| *connect = connect.selective());
        let before = peer_bytes(&pair, 0, 8);
        let mut lost = false;
        pair.lose(move |_, headers| {
            let hit = headers.bth().opcode == opcode && !lost;
            lost |= hit;
            hit
        });
        let (remote_addr, rkey) = (BASE, pair.regions[1].rkey);
        let op = match opcode {
            Opcode::RcFetchAdd => SendOp::FetchAdd { remote_addr, rkey, add: 1 },
            _ => SendOp::Read { remote_addr, rkey },
        };
        let first = pair.wr(0, op, LANDING, 8);
        pair.post(first);
        for wr_id in 1..9 {
            pair.write(wr_id, 0, 8);
        }
        let sent = pair.run().0;
        assert_eq!(sent, (0..9).map(|wr_id| (wr_id, Success)).collect::<Vec<_>>());
        assert_eq!(landed(&pair, LANDING, 8), before, "{opcode:?}");
        assert!(pair.arrived(0, 8), "{opcode:?}");
    }
}

/// Requests that follow no READ are still placed out of order: a loss costs one retransmission.
#[test]
fn writes_alone_are_placed_out_of_order() {
    let mut pair = Pair::with(|connect| *connect = connect.selective());
    pair.lose(|asked, _| asked == 1);
    for wr_id in 0..9 {
        pair.write(wr_id, wr_id * 100, 100);
    }
    assert_eq!(pair.run().0.len(), 9);
    assert_eq!(pair.counters(1).out_of_order_packets, 8);
    assert_eq!(pair.counters(0).selective_retransmits, 1);
}

/// The order holds under reordering, duplication and delay; only a lost response may show later
/// bytes.
#[test]
fn the_order_holds_when_the_network_reorders() {
    for mode in MODES {
        for seed in 0..40 {
            let config = NetworkConfig { seed, ..NetworkConfig::default() };
            let mut pair = Pair::build(&config, mode);
            pair.network.mix = FaultMix::NONE.with(Fault::Reorder, 300_000);
            let before = peer_bytes(&pair, 0, 3000);
            let read = SendWr { signaled: false, ..pair.wr(0, pair.read_op(), LANDING, 3000) };
            pair.post(read);
            for wr_id in 1..12 {
                pair.write(wr_id, 0, 3000);
            }
            let sent = pair.run().0;
            assert_eq!(sent.len(), 11, "seed {seed}");
            let repeated = pair.counters(1).duplicate_reads > 0;
            assert!(repeated || landed(&pair, LANDING, 3000) == before, "seed {seed}");
        }
    }
}

/// Connections of node 0 to node 1 that each post a READ of `packets` packets and a WRITE, without
/// retries. Returns how many of them failed.
fn broken_without_retries(connections: usize, packets: u32, mode: fn(&mut Connect)) -> usize {
    let config = NetworkConfig { batch: 256, ..NetworkConfig::default() };
    let mut network = Network::new(&config);
    let regions = [0, 1]
        .map(|node: usize| network.nodes[node].register(BASE, REGION_BYTES, Access::ALL).unwrap());
    let connect = |connect: &mut Connect| {
        mode(connect);
        (connect.mtu, connect.retry_count) = (Mtu::M256, 0);
    };
    let ends: Vec<_> = (0..connections).map(|_| network.pair(connect).0).collect();
    let (remote_addr, rkey) = (BASE + RECEIVE, regions[1].rkey);
    for (at, end) in (0..).zip(&ends) {
        let addr = BASE + 5000 * at;
        let sges = |len| SgList::from_iter([Sge { addr, len, lkey: regions[0].lkey }]);
        let read = SendOp::Read { remote_addr, rkey };
        let write = SendOp::Write { remote_addr: remote_addr + 100_000, rkey };
        for (op, len) in [(read, 256 * packets), (write, 100)] {
            let wr = SendWr { op, sges: sges(len), signaled: true, ..SendWr::default() };
            network.nodes[0].endpoint.post_send(Time::ZERO, end.qpn, wr).unwrap();
        }
    }
    network.run(1_000_000);
    let mut failed = |end: &End| network.sent_by(*end).iter().any(|done| done.status != Success);
    ends.iter().copied().filter(|end| failed(end)).count()
}

/// Many connections that read and write at the same moment share no buffers with each other, and
/// none uses a retry.
#[test]
fn waiting_behind_a_read_costs_no_retry() {
    for mode in MODES {
        for connections in [1, 9, 64] {
            assert_eq!(broken_without_retries(connections, 16, mode), 0, "{connections}");
        }
    }
}

/// A packet gets responses sent ahead of congestion control only if it could be executed now, and
/// only few.
#[test]
fn congestion_control_is_passed_by_few_answers_at_most() {
    let slow = |connect: &mut Connect| {
        connect.mtu = Mtu::M1024;
        connect.congestion = CongestionControl::Fixed(8_000_000).into();
    };
    let own = SocketAddr::from(([10, 0, 0, 1], 0xc001));
    let stranger = SocketAddr::from(([203, 0, 113, 9], 4444));
    for (read, source, ahead, most) in [
        (500 * 1024, stranger, 0, 1),
        (500 * 1024, own, 1000, 1),
        (500 * 1024, own, 0, 1),
        (8 * 1024, stranger, 0, 1),
        (8 * 1024, own, 1000, 1),
        (8 * 1024, own, 0, 8),
    ] {
        let mut lone = Lone::with(slow);
        let reth = lone.reth(read);
        assert!(lone.next(Opcode::RcReadRequest, reth, 0).is_empty());
        let due = lone.psn.plus(read / 1024 - 1);
        let psn = due.plus(ahead);
        let bth = Bth { opcode: Opcode::RcWriteOnly, psn, ..bth_to(lone.pair.b.qpn) };
        let headers = Headers::new(bth, lone.reth(8)).unwrap();
        let node = &mut lone.pair.network.nodes[1];
        let mut wire = Source { packets: Vec::new(), sent: 0 };
        for us in 0..10 {
            wire.packets.push((Origin::new(source, source.ip()), headers));
            let now = Time::from_nanos(1000 * us);
            world::turn(&mut node.endpoint, &mut wire, &mut node.memory, now, |_, _| false);
        }
        assert!(wire.sent <= most, "READ of {read}, from {source}, {ahead} ahead: {}", wire.sent);
    }
}

/// Brings given packets, and counts READ responses.
struct Source {
    packets: Vec<(Origin, Headers)>,
    sent: usize,
}

impl Wire for Source {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], _memory: &dyn Memory) {
        self.sent += frames.iter().filter(|frame| !frame.payload.is_empty()).count();
    }

    fn admits(
        &mut self,
        _now: Time,
        _path: &Path,
        _dest: Qpn,
        _service: Transport,
        packets: usize,
    ) -> usize {
        packets
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }

    fn receive(&mut self, _now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let packets = std::mem::take(&mut self.packets);
        for (origin, headers) in &packets {
            sink(&RxFrame {
                origin: *origin,
                headers: *headers,
                payload: &[0; 8],
                telemetry: None,
            });
        }
        packets.len()
    }
}
