//! Two devices of one machine, of which only one takes turns, as if the process of the other were
//! stopped: whatever needs no packets goes on, and the rest waits for it.

use std::net::SocketAddr;

use adapter::owned::{Adapter, Software};
use nic::clock;
use nic::local_peers::OWN_PORT;
use nic::pool::PoolRange;
use roce::device::{self, Device};
use roce::endpoint::{Connect, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcStatus};
use roce::wire::Psn;
use roce::world::{Path, Staging};

/// More than is copied at a time.
const BYTES: u64 = 9 << 20;

struct Side {
    adapter: Software,
    cq: CqId,
    qpn: Qpn,
    range: PoolRange,
    region: MemoryRegion,
}

impl Side {
    fn open(local: &str, seed: u64) -> Side {
        let local: SocketAddr = local.parse().expect("an address");
        let mut adapter = Software::bind(local, 2 * BYTES, 0, seed).expect("loopback");
        adapter.open_same_host(None);
        let range = adapter.memory_mut().alloc(BYTES, 4096).expect("room");
        let device = adapter.device();
        let pd = device.alloc_pd().expect("one");
        let cq = device.create_cq(64).expect("one");
        let region = device.register(pd, range.addr, range.len, Access::ALL).expect("its memory");
        let qpn = device.create_qp(QpConfig::rc(pd, cq, 16, 16)).expect("one");
        device::initialize(device, clock::now(), qpn).expect("new");
        Side { adapter, cq, qpn, range, region }
    }

    fn connect(&mut self, peer: &Side) {
        let neighbour =
            self.adapter.discovery().expect("a segment").discover(peer.adapter.local(), OWN_PORT);
        let path = Path::new(peer.adapter.local());
        let connect = Connect::new(path, peer.qpn, Psn::new(0));
        let connect = Connect { local_psn: Psn::new(0), ..connect };
        device::connect(self.adapter.device(), clock::now(), self.qpn, &connect).expect("possible");
        self.adapter.route(clock::now(), self.qpn, neighbour);
    }

    fn sge(&self, offset: u64, len: u32) -> SgList {
        [Sge { addr: self.range.addr + offset, len, lkey: self.region.lkey }].into_iter().collect()
    }

    fn post(&mut self, wr_id: u64, op: SendOp, offset: u64, len: u32) {
        let wr =
            SendWr { wr_id, op, sges: self.sge(offset, len), signaled: true, ..SendWr::default() };
        self.adapter.device().endpoint_mut().post_send(clock::now(), self.qpn, wr).expect("room");
    }

    fn take_turns(&mut self, count: u32) -> Vec<(u64, WcStatus)> {
        let mut all = Vec::new();
        for _ in 0..count {
            self.adapter.turn(clock::now(), |_, _| false);
            let done = std::iter::from_fn(|| self.adapter.device().endpoint_mut().poll_cq(self.cq));
            all.extend(done.map(|one| (one.wr_id, one.status)));
        }
        all
    }

    fn counter(&self, wanted: &str) -> u64 {
        let mut found = None;
        self.adapter.counters(&mut |name, value| {
            if name == wanted {
                found = Some(value);
            }
        });
        found.expect("it is counted")
    }
}

fn pair(test: u8) -> [Side; 2] {
    let [.., high, low] = std::process::id().to_be_bytes();
    let local = |side: u8| format!("127.{}.{high}.{low}:{}", 96 + 2 * test + side, 4791);
    let mut sides = [Side::open(&local(0), 1), Side::open(&local(1), 2)];
    let [a, b] = &mut sides;
    a.connect(b);
    b.connect(a);
    sides
}

#[test]
fn a_local_peer_that_takes_no_turn_is_written_read_and_counted_on() {
    let [mut a, mut b] = pair(0);
    let (base, rkey, len) = (b.region.addr, b.region.rkey, BYTES as u32);
    a.adapter.memory_mut().bytes_mut(a.range.addr, BYTES as usize).fill(7);
    a.post(1, SendOp::Write { remote_addr: base, rkey }, 0, len);
    assert_eq!(a.take_turns(10), [(1, WcStatus::Success)]);
    assert!(b.adapter.memory().bytes(b.range.addr, BYTES as usize).iter().all(|byte| *byte == 7));
    b.adapter.memory_mut().bytes_mut(b.range.addr, BYTES as usize).fill(9);
    b.adapter.memory_mut().bytes_mut(b.range.addr, 8).copy_from_slice(&5_u64.to_ne_bytes());
    a.post(2, SendOp::Read { remote_addr: base, rkey }, 0, len);
    a.post(3, SendOp::FetchAdd { remote_addr: base, rkey, add: 2 }, 16, 8);
    a.post(4, SendOp::CompareSwap { remote_addr: base, rkey, compare: 7, swap: 1 }, 24, 8);
    let all = a.take_turns(10);
    assert_eq!(all, [2, 3, 4].map(|wr_id| (wr_id, WcStatus::Success)));
    let word = |side: &Side, at: u64| {
        let bytes = side.adapter.memory().bytes(side.range.addr + at, 8);
        u64::from_ne_bytes(bytes.try_into().expect("eight"))
    };
    let read = [0, 16, 24, 32].map(|at| word(&a, at));
    assert_eq!(read, [5, 5, 7, u64::from_ne_bytes([9; 8])]);
    assert_eq!(word(&b, 0), 1);
    let counts = ["direct_writes", "direct_reads", "direct_atomics"];
    assert_eq!(counts.map(|name| a.counter(&format!("roce.{name}"))), [1, 1, 2]);
}

/// Rights are those of the region and of the queue pair, also without packets.
#[test]
fn what_the_peer_does_not_permit_is_refused_by_its_responder() {
    for (test, op) in [
        (1, |addr, rkey| SendOp::Write { remote_addr: addr + BYTES - 4, rkey }),
        (2, |addr, rkey| SendOp::FetchAdd { remote_addr: addr, rkey: rkey ^ 1, add: 1 }),
        (3, |addr, rkey| SendOp::FetchAdd { remote_addr: addr + 4, rkey, add: 1 }),
        (4, |addr, rkey| SendOp::Read { remote_addr: addr.wrapping_sub(8), rkey }),
    ] as [(u8, fn(u64, u32) -> SendOp); 4]
    {
        let [mut a, mut b] = pair(test);
        a.post(1, op(b.region.addr, b.region.rkey), 0, 8);
        let mut all = Vec::new();
        while all.is_empty() {
            all = a.take_turns(1);
            b.take_turns(1);
        }
        assert!(
            matches!(all[..], [(1, WcStatus::RemoteAccessError | WcStatus::RemoteInvalidRequest)]),
            "{test}: {all:?}"
        );
        assert_eq!(b.adapter.memory().bytes(b.range.addr, 8), [0; 8]);
    }
}

#[test]
fn messages_wait_for_a_local_peer_that_takes_no_turn() {
    let [mut a, mut b] = pair(5);
    let receive = RecvWr { wr_id: 9, sges: b.sge(0, 64) };
    b.adapter.device().endpoint_mut().post_recv(clock::now(), b.qpn, receive).expect("room");
    a.post(1, SendOp::Send, 0, 8);
    assert_eq!(a.take_turns(100), []);
    let mut all = Vec::new();
    while all.len() < 2 {
        all.extend(b.take_turns(1));
        all.extend(a.take_turns(1));
    }
    assert!(all.contains(&(1, WcStatus::Success)) && all.contains(&(9, WcStatus::Success)));
}

/// The port of a device that closes is free only when nothing else of it is left: another device
/// may bind it at once.
#[test]
fn a_device_that_takes_over_a_port_gets_its_board() {
    let first = Side::open("127.0.0.71:0", 1);
    let local = first.adapter.local();
    drop(first);
    let take_over = move || {
        let mut taken = 0;
        for _ in 0..1_000_000 {
            let Ok(mut adapter) = Software::bind(local, 1 << 20, 0, taken) else {
                std::thread::yield_now();
                continue;
            };
            adapter.open_same_host(None);
            adapter.discovery().expect("the name of the segment is as free as the port");
            taken += 1;
            if taken == 300 {
                break;
            }
        }
        taken
    };
    let others = [(); 2].map(|()| std::thread::spawn(take_over));
    let taken = others.map(|other| other.join().expect("a segment each time"));
    assert_eq!(taken, [300, 300]);
}
