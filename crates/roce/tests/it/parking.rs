//! Back-pressure by destination: queue pairs whose destination admits nothing wait, all others
//! continue.

use std::net::SocketAddr;

use roce::device;
use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, Datagram, Qpn, SendOp, SendWr, SgList, Sge, Transport};
use roce::wire::{Bth, Ext, Headers, Opcode, Psn, Reth};
use roce::world::{
    self, AtomicOp, Memory, MemoryKind, NoMemory, Origin, Path, RxFrame, TxFrame, Wire,
};
use roce::{Duration, Time};

use crate::pair::bth_to;

/// A wire that admits nothing to one address before a time, and two packets at a time afterwards.
struct Gate {
    slow: SocketAddr,
    opens_at: Time,
    sent: Vec<SocketAddr>,
    asked: u32,
    waits: bool,
}

impl Wire for Gate {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], _memory: &dyn Memory) {
        self.sent.extend(frames.iter().map(|frame| frame.path.remote));
    }

    fn receive(&mut self, _now: Time, _sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        0
    }

    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        _dest: Qpn,
        _service: Transport,
        packets: usize,
    ) -> usize {
        if path.remote != self.slow {
            return packets;
        }
        self.asked += 1;
        self.waits = now < self.opens_at;
        if self.waits { 0 } else { packets.min(2) }
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.waits.then_some(self.opens_at)
    }

    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }
}

const SLOW: &str = "10.0.0.2:4791";
const FAST: &str = "10.0.0.3:4791";

/// An endpoint with a WRITE of `packets` packets posted to each address, one queue pair each.
fn sender(addresses: &[&str], packets: u32) -> (Endpoint, Vec<Qpn>) {
    let mut endpoint = Endpoint::new(EndpointConfig { seed: 3, ..EndpointConfig::default() });
    let (pd, cq) = (endpoint.alloc_pd(), endpoint.create_cq(16).unwrap());
    let region = endpoint.register(pd, 1 << 20, 1 << 20, Access::ALL).unwrap();
    let qpns = addresses.iter().map(|address| {
        let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 4, 4)).unwrap();
        let path = Path::new(address.parse().unwrap());
        let peer = Connect { mtu: Mtu::M4096, ..Connect::new(path, Qpn::new(9), Psn::default()) };
        device::connect(&mut endpoint, Time::ZERO, qpn, &peer).unwrap();
        let len = packets * 4096;
        let sges = SgList::from_iter([Sge { addr: region.addr, len, lkey: region.lkey }]);
        let op = SendOp::Write { remote_addr: 0, rkey: 1 };
        endpoint.post_send(Time::ZERO, qpn, SendWr { op, sges, ..SendWr::default() }).unwrap();
        qpn
    });
    let qpns = qpns.collect();
    (endpoint, qpns)
}

fn gate(opens_at: Time) -> Gate {
    Gate { slow: SLOW.parse().unwrap(), opens_at, sent: Vec::new(), asked: 0, waits: false }
}

fn sent_to(gate: &Gate, address: &str) -> usize {
    let address: SocketAddr = address.parse().unwrap();
    gate.sent.iter().filter(|to| **to == address).count()
}

fn turn(endpoint: &mut Endpoint, wire: &mut impl Wire, now: Time) {
    world::turn(endpoint, wire, &mut NoMemory, now, |_, _| false);
}

#[test]
fn a_full_destination_parks_its_senders_and_nobody_else() {
    let opens_at = Time::ZERO + Duration::from_micros(50);
    let (mut endpoint, _) = sender(&[SLOW, FAST, SLOW], 40);
    let mut wire = gate(opens_at);
    turn(&mut endpoint, &mut wire, Time::ZERO);
    assert_eq!((sent_to(&wire, SLOW), sent_to(&wire, FAST)), (0, 40));
    assert_eq!(world::next_wakeup(&endpoint), Some(opens_at));
    // The wire is not queried before.
    let asked = wire.asked;
    turn(&mut endpoint, &mut wire, Time::ZERO + Duration::from_micros(49));
    assert_eq!((wire.asked, sent_to(&wire, SLOW)), (asked, 0));
    turn(&mut endpoint, &mut wire, opens_at);
    assert_eq!(sent_to(&wire, SLOW), 80);
}

#[test]
fn a_queue_pair_asks_for_no_more_than_it_may_send() {
    let (mut endpoint, _) = sender(&[SLOW, SLOW], 3);
    let mut wire = gate(Time::ZERO);
    turn(&mut endpoint, &mut wire, Time::ZERO);
    assert_eq!((sent_to(&wire, SLOW), wire.asked), (6, 4), "for one packet, then for two");
}

/// What was admitted for one destination is not sent to another.
#[test]
fn each_datagram_is_admitted_by_its_own_destination() {
    let mut endpoint = Endpoint::new(EndpointConfig { seed: 3, ..EndpointConfig::default() });
    let (pd, cq) = (endpoint.alloc_pd(), endpoint.create_cq(16).unwrap());
    let region = endpoint.register(pd, 1 << 20, 1 << 20, Access::ALL).unwrap();
    let config = QpConfig { transport: Transport::Ud, ..QpConfig::rc(pd, cq, 8, 8) };
    let qpn = endpoint.create_qp(config).unwrap();
    device::start_datagrams(&mut endpoint, Time::ZERO, qpn, 1, Psn::default()).unwrap();
    for address in [FAST, FAST, SLOW, FAST] {
        let ah = Path::new(address.parse().unwrap()).into();
        let to = Some(Datagram { ah, dest_qp: Qpn::new(9), qkey: 1 });
        let sges = SgList::from_iter([Sge { addr: region.addr, len: 8, lkey: region.lkey }]);
        let wr = SendWr { op: SendOp::Send, to, sges, ..SendWr::default() };
        endpoint.post_send(Time::ZERO, qpn, wr).unwrap();
    }
    let opens_at = Time::ZERO + Duration::from_micros(50);
    let mut wire = gate(opens_at);
    turn(&mut endpoint, &mut wire, Time::ZERO);
    assert_eq!((sent_to(&wire, FAST), sent_to(&wire, SLOW)), (2, 0));
    turn(&mut endpoint, &mut wire, opens_at);
    assert_eq!((sent_to(&wire, FAST), sent_to(&wire, SLOW)), (3, 1));
}

#[test]
fn a_turn_sends_two_bursts_at_most() {
    let (mut endpoint, _) = sender(&[FAST; 20], 40);
    let mut wire = gate(Time::ZERO);
    for turns in 1..4 {
        turn(&mut endpoint, &mut wire, Time::ZERO);
        assert_eq!(wire.sent.len(), turns * 2 * world::BURST_PACKETS);
    }
}

#[test]
fn a_parked_queue_pair_may_be_destroyed() {
    let opens_at = Time::ZERO + Duration::from_micros(50);
    let (mut endpoint, qpns) = sender(&[SLOW, SLOW], 4);
    let mut wire = gate(opens_at);
    turn(&mut endpoint, &mut wire, Time::ZERO);
    endpoint.destroy_qp(Time::ZERO, qpns[0]).unwrap();
    turn(&mut endpoint, &mut wire, opens_at);
    assert_eq!(sent_to(&wire, SLOW), 4);
    endpoint.destroy_qp(Time::ZERO, qpns[1]).unwrap();
    turn(&mut endpoint, &mut wire, opens_at);
    assert_eq!(world::next_wakeup(&endpoint), None);
}

/// A wire that admits everything until its first `send`, and nothing more until `opens_at`.
struct Shuts {
    opens_at: Time,
    sent: usize,
}

impl Wire for Shuts {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], _memory: &dyn Memory) {
        self.sent += frames.len();
    }

    fn receive(&mut self, _now: Time, _sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        0
    }

    fn admits(
        &mut self,
        now: Time,
        _path: &Path,
        _dest: Qpn,
        _service: Transport,
        packets: usize,
    ) -> usize {
        if self.sent == 0 || now >= self.opens_at { packets } else { 0 }
    }

    fn next_wakeup(&self) -> Option<Time> {
        (self.sent > 0).then_some(self.opens_at)
    }

    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }
}

#[test]
fn a_grant_ends_with_the_burst_that_it_was_for() {
    let lengths = [4096, 400 * 4096, 400 * 4096];
    let mut endpoint = Endpoint::new(EndpointConfig { seed: 3, ..EndpointConfig::default() });
    let (pd, cq) = (endpoint.alloc_pd(), endpoint.create_cq(16).unwrap());
    let region = endpoint.register(pd, 1 << 20, 1 << 22, Access::ALL).unwrap();
    for len in lengths {
        let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 4, 4)).unwrap();
        let to = Connect::new(Path::new(FAST.parse().unwrap()), Qpn::new(9), Psn::default());
        let peer = Connect { mtu: Mtu::M4096, window_packets: 4096, ..to };
        device::connect(&mut endpoint, Time::ZERO, qpn, &peer).unwrap();
        let sges = SgList::from_iter([Sge { addr: region.addr, len, lkey: region.lkey }]);
        let op = SendOp::Write { remote_addr: 0, rkey: 1 };
        endpoint.post_send(Time::ZERO, qpn, SendWr { op, sges, ..SendWr::default() }).unwrap();
    }
    // The destination closes behind the first burst, which ends in the middle of a turn.
    let mut wire = Shuts { opens_at: Time::ZERO + Duration::from_millis(100), sent: 0 };
    turn(&mut endpoint, &mut wire, Time::ZERO);
    assert_eq!(wire.sent, world::BURST_PACKETS);
}

/// A wire with packets to receive, that refuses the first packets it is asked for.
struct Fickle {
    arriving: Vec<(Headers, usize)>,
    refusals: u32,
    /// Opcodes.
    sent: Vec<u8>,
}

impl Wire for Fickle {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], _memory: &dyn Memory) {
        self.sent.extend(frames.iter().map(|frame| frame.header[0]));
    }

    fn receive(&mut self, _now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let source: SocketAddr = FAST.parse().unwrap();
        let origin = Origin::new(source, source.ip());
        let arriving = std::mem::take(&mut self.arriving);
        for &(headers, len) in &arriving {
            sink(&RxFrame { origin, headers, payload: &[0; 8][..len], telemetry: None });
        }
        arriving.len()
    }

    fn admits(
        &mut self,
        _now: Time,
        _path: &Path,
        _dest: Qpn,
        _service: Transport,
        packets: usize,
    ) -> usize {
        let refuses = self.refusals > 0;
        self.refusals = self.refusals.saturating_sub(1);
        if refuses { 0 } else { packets }
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }
}

struct Zeros;

impl Memory for Zeros {
    fn gather(&self, _addr: u64, into: &mut [u8]) {
        into.fill(0);
    }

    fn scatter(&mut self, _addr: u64, _from: &[u8]) {}

    fn atomic(&mut self, _addr: u64, _op: AtomicOp) -> u64 {
        0
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Phantom
    }
}

/// The destination makes room right after it has refused a packet, so each later question would be
/// granted.
#[test]
fn nothing_overtakes_the_gathered_responses_of_its_own_queue_pair() {
    let mut endpoint = Endpoint::new(EndpointConfig { seed: 3, ..EndpointConfig::default() });
    let (pd, cq) = (endpoint.alloc_pd(), endpoint.create_cq(16).unwrap());
    let region = endpoint.register(pd, 1 << 20, 1 << 20, Access::ALL).unwrap();
    let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 4, 4)).unwrap();
    let to = Connect::new(Path::new(FAST.parse().unwrap()), Qpn::new(9), Psn::default());
    let peer = Connect { mtu: Mtu::M4096, ..to };
    device::connect(&mut endpoint, Time::ZERO, qpn, &peer).unwrap();
    let packet = |opcode, psn, len| {
        let bth = Bth { opcode, psn: Psn::new(psn), ack_req: true, ..bth_to(qpn) };
        Headers::new(bth, Ext::Reth(Reth { addr: region.addr, rkey: region.rkey, len })).unwrap()
    };
    let read = packet(Opcode::RcReadRequest, 0, 3 * 4096);
    let arriving = vec![(read, 0), (packet(Opcode::RcWriteOnly, 3, 8), 8)];
    let mut wire = Fickle { arriving, refusals: 1, sent: Vec::new() };
    world::turn(&mut endpoint, &mut wire, &mut Zeros, Time::ZERO, |_, _| false);
    assert_eq!(wire.sent, [], "the first response was refused");
    world::turn(&mut endpoint, &mut wire, &mut Zeros, Time::ZERO, |_, _| false);
    let (first, middle, last, acknowledgement) = (13, 14, 15, 17);
    assert_eq!(wire.sent, [first, middle, last, acknowledgement]);
}
