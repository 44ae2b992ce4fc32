//! Reliable-connection queue pairs over real sockets: what the protocol crate proves over a
//! simulated wire has to hold over UDP too, with and without loss.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use nic::capture::Capture;
use nic::clock;
use nic::fault::LossyWire;
use nic::pool::{Pool, PoolRange};
use nic::rates::{Exchanges, RateLimit, RateTable, TransmissionGate};
use nic::udp::{UdpConfig, UdpWire};
use nic::waiter::Waiter;
use roce::Duration;
use roce::device;
use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig, Reliability};
use roce::verbs::{
    Access, Completion, CqId, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcOpcode,
    WcStatus,
};
use roce::wire::capture;
use roce::wire::{Opcode, Operation};
use roce::world::{self, Path, Staging, Wire};

const MIB: u64 = 1 << 20;

/// How long a test may take before it counts as stuck.
const LIMIT: Duration = Duration::from_millis(60_000);

/// An endpoint with one queue pair, its wire and its memory.
struct Host {
    endpoint: Endpoint,
    wire: LossyWire<UdpWire>,
    pool: Pool,
    region: MemoryRegion,
    cq: CqId,
    qpn: Qpn,
}

impl Host {
    fn new(local: &str, loss_ppm: u32, seed: u64) -> Host {
        let local: SocketAddr = local.parse().expect("literal");
        let wire = UdpWire::bind(&UdpConfig::at(local)).expect("bind");
        let pool = Pool::new(16 * MIB).expect("pool");
        let mut endpoint = Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        let pd = endpoint.alloc_pd();
        let cq = endpoint.create_cq(64).expect("cq");
        let region = endpoint.register(pd, pool.base(), pool.len(), Access::ALL).expect("region");
        let config = QpConfig::rc(pd, cq, 32, 32);
        let qpn = endpoint.create_qp(config).expect("qp");
        Host { endpoint, wire: LossyWire::new(wire, loss_ppm, seed), pool, region, cq, qpn }
    }

    fn connect(&mut self, peer: &Host, reliability: Reliability, dscp: u8) {
        let remote = peer.wire.inner().local();
        let path = Path { dscp, ..Path::new(remote) };
        let psn = peer.endpoint.query_qp(peer.qpn).expect("qp").sq_psn;
        let local_psn = self.endpoint.query_qp(self.qpn).expect("qp").sq_psn;
        let connect = Connect::new(path, peer.qpn, psn);
        let connect = Connect { mtu: Mtu::M4096, local_psn, reliability, ..connect };
        device::connect(&mut self.endpoint, clock::now(), self.qpn, &connect).expect("connect");
    }

    fn range(&mut self, len: u64) -> PoolRange {
        self.pool.alloc(len, 4096).expect("room")
    }

    fn fill(&mut self, range: PoolRange, seed: u64) {
        let bytes = self.pool.bytes_mut(range.addr, range.len as usize);
        bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = content(seed, i));
    }

    fn assert_filled(&self, range: PoolRange, seed: u64, context: &str) {
        let bytes = self.pool.bytes(range.addr, range.len as usize);
        let wrong = bytes.iter().enumerate().find(|(i, byte)| **byte != content(seed, *i));
        assert_eq!(wrong, None, "{context}: first wrong byte");
    }

    fn sges(&self, range: PoolRange) -> SgList {
        let sge = Sge { addr: range.addr, len: range.len as u32, lkey: self.region.lkey };
        [sge].into_iter().collect()
    }

    fn post(&mut self, wr_id: u64, op: SendOp, range: PoolRange) {
        let wr = SendWr {
            wr_id,
            op,
            sges: self.sges(range),
            signaled: true,
            solicited: false,
            ..SendWr::default()
        };
        self.endpoint.post_send(clock::now(), self.qpn, wr).expect("post");
    }

    fn post_receive(&mut self, wr_id: u64, range: PoolRange) {
        let wr = RecvWr { wr_id, sges: self.sges(range) };
        self.endpoint.post_recv(clock::now(), self.qpn, wr).expect("post");
    }

    fn step(&mut self, done: &mut BTreeMap<u64, Completion>) -> bool {
        let Host { endpoint, wire, pool, .. } = self;
        let progress = world::turn(endpoint, wire, pool, clock::now(), |_, _| false);
        while let Some(completion) = self.endpoint.poll_cq(self.cq) {
            assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
            assert!(done.insert(completion.wr_id, completion).is_none(), "completed twice");
        }
        !progress.is_idle()
    }

    /// Time until something is due without any packet.
    fn next_due(&self) -> Duration {
        let due = world::next_wakeup(&self.endpoint).map(|at| at.since(clock::now()));
        due.unwrap_or(Duration::from_millis(100))
    }
}

fn content(seed: u64, i: usize) -> u8 {
    let mixed = (i as u64 + 1).wrapping_mul(seed | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Runs both until `count` work requests have completed, asleep when both are idle.
fn run(a: &mut Host, b: &mut Host, count: usize) -> BTreeMap<u64, Completion> {
    let waiter = Waiter::new().expect("eventfd");
    let deadline = clock::now() + LIMIT;
    let mut done = BTreeMap::new();
    while done.len() < count {
        assert!(clock::now() < deadline, "stuck with {} of {count} done", done.len());
        let busy = [a.step(&mut done), b.step(&mut done)];
        if !busy.contains(&true) && done.len() < count {
            let fds = [a.wire.inner().fd(), b.wire.inner().fd()];
            waiter.wait(&fds, Some(a.next_due().min(b.next_due()))).expect("poll");
        }
    }
    done
}

/// The DSCPs of both ends. They differ, so that a packet marked with the peer's would be found.
const DSCPS: [u8; 2] = [26, 41];

fn pair(v6: bool, loss_ppm: u32, reliability: Reliability) -> (Host, Host) {
    let locals = if v6 { ["[::1]:0"; 2] } else { ["127.9.2.1:0", "127.9.2.2:0"] };
    let mut a = Host::new(locals[0], loss_ppm, 1);
    let mut b = Host::new(locals[1], loss_ppm, 2);
    a.connect(&b, reliability, DSCPS[0]);
    b.connect(&a, reliability, DSCPS[1]);
    (a, b)
}

fn transfer(v6: bool, loss_ppm: u32) -> (Host, Host) {
    transfer_between(
        pair(v6, loss_ppm, Reliability::GoBackN),
        &format!("v6 {v6}, loss {loss_ppm} ppm"),
    )
}

/// WRITEs, READs and SENDs of some MiB in both directions at once; every byte is compared.
fn transfer_between((mut a, mut b): (Host, Host), context: &str) -> (Host, Host) {
    let (written, read, sent) = (a.range(2 * MIB + 13), a.range(2 * MIB), a.range(MIB + 1));
    let (target, source, inbox) = (b.range(2 * MIB + 13), b.range(2 * MIB), b.range(MIB + 1));
    let (back, back_target) = (b.range(MIB), a.range(MIB));
    a.fill(written, 3);
    a.fill(sent, 5);
    b.fill(source, 7);
    b.fill(back, 11);
    let rkey = b.region.rkey;
    b.post_receive(100, inbox);
    a.post(1, SendOp::Write { remote_addr: target.addr, rkey }, written);
    a.post(2, SendOp::Read { remote_addr: source.addr, rkey }, read);
    a.post(3, SendOp::SendImm(0xfeed), sent);
    let rkey = a.region.rkey;
    b.post(101, SendOp::Write { remote_addr: back_target.addr, rkey }, back);
    let done = run(&mut a, &mut b, 5);
    b.assert_filled(target, 3, context);
    a.assert_filled(read, 7, context);
    b.assert_filled(inbox, 5, context);
    a.assert_filled(back_target, 11, context);
    let received = done[&100];
    assert_eq!((received.opcode, received.imm), (WcOpcode::Recv, Some(0xfeed)), "{context}");
    assert_eq!(u64::from(received.byte_len), sent.len, "{context}");
    (a, b)
}

#[test]
fn a_clean_wire_carries_every_operation() {
    for v6 in [false, true] {
        let (a, b) = transfer(v6, 0);
        for host in [&a, &b] {
            let counters = host.wire.inner().counters();
            assert_eq!(counters.tx.dropped.total(), 0);
            assert_eq!((counters.rx.bad_icrc, counters.rx.unexpected_ip_ids), (0, 0));
            assert!(counters.tx.gso_batches > 0 && counters.rx.gro_batches > 0);
        }
    }
}

#[test]
fn one_percent_loss_is_repaired() {
    let (a, b) = transfer(false, 10_000);
    assert!(a.wire.dropped() + b.wire.dropped() > 5, "the loss was real");
}

#[test]
fn a_wrong_key_is_refused_across_the_wire() {
    let (mut a, mut b) = pair(false, 0, Reliability::GoBackN);
    let (from, to) = (a.range(64), b.range(64));
    let rkey = b.region.rkey ^ 1;
    let sges = a.sges(from);
    let op = SendOp::Write { remote_addr: to.addr, rkey };
    let wr = SendWr { wr_id: 1, op, sges, signaled: true, solicited: false, ..SendWr::default() };
    a.endpoint.post_send(clock::now(), a.qpn, wr).expect("post");
    let deadline = clock::now() + LIMIT;
    let status = loop {
        assert!(clock::now() < deadline, "stuck");
        for host in [&mut a, &mut b] {
            world::turn(
                &mut host.endpoint,
                &mut host.wire,
                &mut host.pool,
                clock::now(),
                |_, _| false,
            );
        }
        if let Some(completion) = a.endpoint.poll_cq(a.cq) {
            break completion.status;
        }
    };
    assert_eq!(status, WcStatus::RemoteAccessError);
    assert_eq!(b.pool.bytes(to.addr, 64), [0; 64]);
}

/// Acknowledgements, NAKs, responses and what is sent again have the DSCP of their sender, as
/// sockets send and receive them.
#[test]
fn every_packet_has_the_dscp_of_its_queue_pair() {
    for (v6, reliability) in [
        (false, Reliability::GoBackN),
        (true, Reliability::GoBackN),
        (false, Reliability::Selective),
        (true, Reliability::Selective),
    ] {
        let context = format!("v6 {v6}, {reliability:?}");
        let name = format!("nic-dscp-{}-{v6}-{reliability:?}.pcap", std::process::id());
        let file = std::env::temp_dir().join(name);
        let (mut a, b) = pair(v6, 20_000, reliability);
        let capture = Capture::create(&file, u64::MAX).expect("a temporary file");
        a.wire.inner_mut().capture_to(Some(capture));
        let (mut a, b) = transfer_between((a, b), &context);
        a.wire.inner_mut().capture_to(None);
        let bytes = std::fs::read(&file).expect("it is there");
        let _ = std::fs::remove_file(&file);
        let ports = [a, b].map(|host| {
            let counters = host.endpoint.counters();
            let again = counters.retransmitted_packets + counters.selective_retransmits;
            assert!(again > 0, "{context}: {counters:?}");
            assert!(host.wire.inner().counters().tx.gso_batches > 0, "{context}");
            host.wire.inner().local().port()
        });
        check_dscps(&bytes, ports, &context);
    }
}

/// What one side sends has a pace, and the other side's DSCP has none. Responses and
/// acknowledgements are paced, too, so nothing ends before the bytes can have left.
#[test]
fn a_paced_job_sends_no_faster_and_everything_arrives() {
    let folder = std::env::temp_dir().join(format!("nic-paced-{}", std::process::id()));
    let table = RateTable::open(&folder).expect("a temporary folder");
    for bps in [50_000_000, 200_000_000, 0] {
        table.set([(DSCPS[0], RateLimit::of(bps))]);
        let (mut a, mut b) = pair(bps == 0, 0, Reliability::Selective);
        for host in [&mut a, &mut b] {
            host.wire.inner_mut().keep_rate_limits(Some(folder.clone()));
        }
        let before = table.sent_bytes(DSCPS[0]);
        let began = clock::now();
        transfer_between((a, b), &format!("{bps} bit/s"));
        let took_ns = clock::now().since(began).as_nanos();
        let bytes = table.sent_bytes(DSCPS[0]) - before;
        // A WRITE of 2 MiB and a SEND of 1 MiB, with headers; acknowledgements of what b sends, and
        // what was lost.
        assert!((3 * MIB..8 * MIB).contains(&bytes), "{bytes}");
        let full_bucket = 64 << 10;
        let least_ns = ((bytes - full_bucket) * 8_000_000_000).checked_div(bps).unwrap_or(0);
        assert!(took_ns >= least_ns * 95 / 100, "{bps} bit/s: {took_ns} ns for {bytes} bytes");
    }
    std::fs::remove_dir_all(folder).expect("it is ours");
}

/// One side's exchange begins when its gate opens. The other side's gate stays closed: what arrives
/// opens it, at once and not when its queue pair would have asked again, for acknowledgements and
/// for a WRITE that was held back.
#[test]
fn a_gate_opens_in_time_or_for_what_peers_have_begun() {
    const DSCP: u8 = 26;
    let folder =
        |side| std::env::temp_dir().join(format!("nic-gate-{side}-{}", std::process::id()));
    let tables = ["a", "b"].map(|side| RateTable::open(&folder(side)).expect("temporary"));
    let period_ns = 60_000_000_000;
    let mut soonest = u64::MAX;
    for round in 1..=5 {
        // Longer than the quiet time: the exchange before has ended.
        std::thread::sleep(std::time::Duration::from_millis(40));
        let (mut a, mut b) =
            (Host::new("127.9.2.1:0", 0, round), Host::new("127.9.2.2:0", 0, round + 10));
        a.connect(&b, Reliability::GoBackN, DSCP);
        b.connect(&a, Reliability::GoBackN, DSCP);
        for (host, side) in [(&mut a, "a"), (&mut b, "b")] {
            host.wire.inner_mut().keep_rate_limits(Some(folder(side)));
        }
        let [(from_a, to_a), (from_b, to_b)] =
            [&mut a, &mut b].map(|host| (host.range(65_536), host.range(65_536)));
        let opens_at = clock::now() + Duration::from_millis(150);
        for (table, later_ns) in tables.iter().zip([0, period_ns / 2]) {
            let shift_ns = (unix_ns() + 150_000_000 + later_ns) % period_ns;
            let (tolerance_ns, quiet_ns) = (1_000_000_000, 20_000_000);
            table.set_gates([(
                DSCP,
                TransmissionGate { period_ns, shift_ns, tolerance_ns, quiet_ns },
            )]);
        }
        a.post(1, SendOp::Write { remote_addr: to_b.addr, rkey: b.region.rkey }, from_a);
        b.post(2, SendOp::Write { remote_addr: to_a.addr, rkey: a.region.rkey }, from_b);
        run(&mut a, &mut b, 2);
        let now = clock::now();
        assert!(now >= opens_at, "{} ns too early", opens_at.since(now).as_nanos());
        soonest = soonest.min(now.since(opens_at).as_nanos());
        for table in &tables {
            let Exchanges { begun, waited_ns, .. } = table.exchanges(DSCP);
            assert_eq!(begun, round, "one exchange");
            assert!(waited_ns >= round * 100_000_000, "{waited_ns} ns");
        }
    }
    // Half of the time after which held queue pairs ask by themselves.
    assert!(soonest < 25_000_000, "{soonest} ns after it opened");
    for side in ["a", "b"] {
        std::fs::remove_dir_all(folder(side)).expect("it is ours");
    }
}

/// The last packet of an exchange is lost, and what is to repeat it waits for the gate for longer
/// than all retries take: that says nothing about the peer, and the connection lives.
#[test]
fn a_gate_that_holds_retransmissions_back_uses_up_no_retry() {
    const DSCP: u8 = 26;
    let folder = std::env::temp_dir().join(format!("nic-gate-retry-{}", std::process::id()));
    let table = RateTable::open(&folder).expect("temporary");
    for (round, reliability) in (0..).zip([Reliability::Selective, Reliability::GoBackN]) {
        let (mut a, mut b) =
            (Host::new("127.9.3.1:0", 0, round), Host::new("127.9.3.2:0", 0, round + 10));
        a.connect(&b, reliability, DSCP);
        b.connect(&a, reliability, DSCP);
        a.wire.inner_mut().keep_rate_limits(Some(folder.clone()));
        let (from, to) = (a.range(4096), b.range(4096));
        // Open now, and again after that: eight timeouts of 67 ms are over by then.
        let period_ns = 1_200_000_000;
        let shift_ns = unix_ns() % period_ns;
        let (tolerance_ns, quiet_ns) = (200_000_000, 1_000_000);
        table.set_gates([(DSCP, TransmissionGate { period_ns, shift_ns, tolerance_ns, quiet_ns })]);
        let begun = clock::now();
        a.post(1, SendOp::Write { remote_addr: to.addr, rkey: b.region.rkey }, from);
        a.step(&mut BTreeMap::new());
        // Repetitions within the tolerance are lost, too.
        while clock::now().since(begun) < Duration::from_millis(250) {
            a.step(&mut BTreeMap::new());
            b.wire.inner_mut().receive(clock::now(), &mut |_| {});
        }
        run(&mut a, &mut b, 1);
        let took = clock::now().since(begun);
        assert!(took > Duration::from_millis(900), "{reliability:?}: nothing held it back");
        assert!(table.exchanges(DSCP).begun > 0);
    }
    std::fs::remove_dir_all(folder).expect("it is ours");
}

/// The two ends belong to two jobs, and only the one that answers has a gate, which is closed.
#[test]
fn a_gate_holds_no_answer_back_to_another_job() {
    let folder = std::env::temp_dir().join(format!("nic-gate-answer-{}", std::process::id()));
    let table = RateTable::open(&folder).expect("temporary");
    let (mut a, mut b) = (Host::new("127.9.4.1:0", 0, 1), Host::new("127.9.4.2:0", 0, 11));
    a.connect(&b, Reliability::GoBackN, 26);
    b.connect(&a, Reliability::GoBackN, 27);
    b.wire.inner_mut().keep_rate_limits(Some(folder.clone()));
    let (from, to) = (a.range(4096), b.range(4096));
    let period_ns = 60_000_000_000;
    let shift_ns = (unix_ns() + 30_000_000_000) % period_ns;
    let (tolerance_ns, quiet_ns) = (3_000_000_000, 20_000_000);
    table.set_gates([(27, TransmissionGate { period_ns, shift_ns, tolerance_ns, quiet_ns })]);
    a.post(1, SendOp::Write { remote_addr: to.addr, rkey: b.region.rkey }, from);
    run(&mut a, &mut b, 1);
    std::fs::remove_dir_all(folder).expect("it is ours");
}

fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.expect("after 1970").as_nanos() as u64
}

/// Checks each packet of a capture by its sender's port, and that every kind of packet is in it
/// from both sides. The ports are not RoCE's own, so the headers are read here.
fn check_dscps(capture: &[u8], ports: [u16; 2], context: &str) {
    let records = capture::Capture::parse(capture).expect("a capture").records();
    let mut seen = BTreeSet::new();
    for record in records {
        let bytes = record.expect("whole").bytes;
        let first = u16::from_be_bytes([bytes[0], bytes[1]]);
        let (traffic_class, udp) = match first >> 12 {
            4 => (first & 0xff, &bytes[20..]),
            _ => (first >> 4 & 0xff, &bytes[40..]),
        };
        let from = u16::from_be_bytes([udp[0], udp[1]]);
        let side = ports.iter().position(|port| *port == from).expect("one of ours");
        let opcode = Opcode::ALL.iter().find(|opcode| opcode.as_u8() == udp[8]).expect("known");
        assert_eq!(traffic_class >> 2, DSCPS[side].into(), "{context}: {opcode:?} of side {side}");
        seen.insert(format!("{:?} of side {side}", opcode.operation()));
    }
    let of_a = [Operation::Send, Operation::Write, Operation::ReadRequest, Operation::Acknowledge];
    let of_b = [Operation::Write, Operation::ReadResponse, Operation::Acknowledge];
    for (side, operations) in [(0, &of_a[..]), (1, &of_b)] {
        for operation in operations {
            let wanted = format!("{operation:?} of side {side}");
            assert!(seen.contains(&wanted), "{context}: no {wanted}");
        }
    }
}
