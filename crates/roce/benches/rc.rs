//! The cost of the transport per packet, without any wire: two endpoints exchange headers.
//!
//! `cargo bench -p roce --bench rc` prints nanoseconds per packet, both ends together, best and
//! median of several runs. Payload is neither copied nor summed, so this is the state machine
//! alone: `poll_transmit` on one side and `handle_packet` on the other, acknowledgements included.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a benchmark reads a clock"
)]

use std::net::SocketAddr;
use std::time::Instant;

use roce::device;
use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, Sge};
use roce::world::{Origin, Path};
use roce::{Duration, Time};

const RUNS: usize = 15;
const REGION_BYTES: u64 = 1 << 24;

struct Side {
    endpoint: Endpoint,
    region: MemoryRegion,
    cq: CqId,
    qpn: Qpn,
    address: SocketAddr,
}

impl Side {
    fn new(host: u8) -> Side {
        let config = EndpointConfig { seed: host.into(), ..EndpointConfig::default() };
        let mut endpoint = Endpoint::new(config);
        let pd = endpoint.alloc_pd();
        let region = endpoint.register(pd, 1 << 32, REGION_BYTES, Access::ALL).unwrap();
        let cq = endpoint.create_cq(4096).unwrap();
        let config = QpConfig::rc(pd, cq, 256, 1024);
        let qpn = endpoint.create_qp(config).unwrap();
        Side { endpoint, region, cq, qpn, address: SocketAddr::from(([10, 0, 0, host], 4791)) }
    }

    fn connect(&mut self, peer: &Side) {
        let path = Path::new(peer.address);
        let remote_psn = peer.endpoint.query_qp(peer.qpn).unwrap().sq_psn;
        let local_psn = self.endpoint.query_qp(self.qpn).unwrap().sq_psn;
        let connect = Connect::new(path, peer.qpn, remote_psn);
        let connect = Connect { mtu: Mtu::M4096, local_psn, ..connect };
        device::connect(&mut self.endpoint, Time::ZERO, self.qpn, &connect).unwrap();
    }
}

/// Runs both ends until neither has anything to send; returns the number of packets exchanged.
fn exchange(a: &mut Side, b: &mut Side, now: Time) -> u64 {
    let mut packets = 0;
    loop {
        let crossed = carry(a, b, now) + carry(b, a, now);
        packets += crossed;
        if crossed == 0 {
            return packets;
        }
    }
}

fn carry(from: &mut Side, to: &mut Side, now: Time) -> u64 {
    let mut packets = 0;
    while packets < 64
        && let Some(transmit) = from.endpoint.poll_transmit(now)
    {
        let len = transmit.payload_len();
        let _ = to.endpoint.handle_packet(
            now,
            &Origin::new(from.address, to.address.ip()),
            &transmit.headers,
            len,
        );
        packets += 1;
    }
    packets
}

/// Nanoseconds per packet for rounds of `count` requests of `len` bytes.
fn measure(name: &str, len: u32, count: u64, op: impl Fn(&MemoryRegion) -> SendOp) {
    let (mut a, mut b) = (Side::new(1), Side::new(2));
    a.connect(&b);
    b.connect(&a);
    let mut now = Time::ZERO;
    let mut runs: Vec<f64> = (0..RUNS)
        .map(|_| {
            let (mut packets, start) = (0, Instant::now());
            for _ in 0..40 {
                now += Duration::from_micros(10);
                packets += round(&mut a, &mut b, len, count, &op, now);
            }
            start.elapsed().as_nanos() as f64 / packets as f64
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    println!("{name:<28} best {:6.1} ns  median {:6.1} ns", runs[0], runs[RUNS / 2]);
}

fn round(
    a: &mut Side,
    b: &mut Side,
    len: u32,
    count: u64,
    op: &impl Fn(&MemoryRegion) -> SendOp,
    now: Time,
) -> u64 {
    for wr_id in 0..count {
        let op = op(&b.region);
        let into = Sge { addr: b.region.addr, len, lkey: b.region.lkey };
        if matches!(op, SendOp::Send) {
            let wr = RecvWr { wr_id, sges: [into].into_iter().collect() };
            b.endpoint.post_recv(Time::ZERO, b.qpn, wr).unwrap();
        }
        let from = Sge { addr: a.region.addr, len, lkey: a.region.lkey };
        let sges = [from].into_iter().collect();
        let wr = SendWr { wr_id, op, sges, signaled: true, solicited: false, ..SendWr::default() };
        a.endpoint.post_send(Time::ZERO, a.qpn, wr).unwrap();
    }
    let packets = exchange(a, b, now);
    let done = std::iter::from_fn(|| a.endpoint.poll_cq(a.cq)).count() as u64;
    assert_eq!(done, count);
    while b.endpoint.poll_cq(b.cq).is_some() {}
    packets
}

fn main() {
    let write = |to: &MemoryRegion| SendOp::Write { remote_addr: to.addr, rkey: to.rkey };
    let read = |to: &MemoryRegion| SendOp::Read { remote_addr: to.addr, rkey: to.rkey };
    println!("per packet, both ends, MTU 4096:");
    measure("WRITE 1 MiB", 1 << 20, 16, write);
    measure("READ 1 MiB", 1 << 20, 16, read);
    measure("SEND 64 KiB", 1 << 16, 64, |_| SendOp::Send);
    measure("WRITE 64 B", 64, 256, write);
    measure("SEND 64 B", 64, 256, |_| SendOp::Send);
    measure("READ 64 B", 64, 256, read);
}
