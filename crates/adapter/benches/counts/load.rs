//! The work: messages of one kind between two connected queue pairs, in bursts.

use arrayvec::ArrayVec;
use controls::CongestionControl;
use roce::Time;
use roce::device::{self, Device};
use roce::endpoint::{Connect, Mtu, QpConfig, Reliability};
use roce::verbs::{
    Access, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendOp, SendWr, Sge, WcStatus,
};
use roce::wire::Psn;
use roce::world::Path;

use crate::phases::{Phase, Tally};

/// Bytes of each side's region.
pub(crate) const REGION_BYTES: u64 = 4 << 20;

/// Rounds before the count: tables reach their size, windows and round-trip times settle.
const WARM_UP: u32 = 16;

/// Messages that are counted, or a few more: whole bursts.
const MESSAGES: u32 = 256;

/// The same for messages of many packets.
const LARGE_MESSAGES: u32 = 16;

/// Exchanges without a completion after which something is wrong.
const MAX_EXCHANGES: u32 = 100_000;

/// What the requester posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Send,
    Write,
    Read,
    Atomic,
}

/// One kind of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) operation: Operation,
    /// Of one message.
    pub(crate) bytes: u32,
    /// Messages posted together.
    pub(crate) burst: u32,
    pub(crate) reliability: Reliability,
    pub(crate) control: CongestionControl,
}

impl Load {
    pub(crate) fn name(&self) -> String {
        let operation = match self.operation {
            Operation::Send => "send",
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::Atomic => "atomic",
        };
        let size = match self.bytes {
            bytes if bytes >= 1 << 20 => format!("{}MiB", bytes >> 20),
            bytes => format!("{bytes}B"),
        };
        let recovery = match self.reliability {
            Reliability::GoBackN => "",
            Reliability::Selective => "-selective",
        };
        let control = match self.control {
            CongestionControl::Delay(_) => "-delay",
            _ => "",
        };
        let burst = if self.burst > 1 { format!("-x{}", self.burst) } else { String::new() };
        format!("{operation}-{size}{burst}{recovery}{control}")
    }

    fn is_large(&self) -> bool {
        self.bytes > Mtu::M4096.bytes()
    }

    /// What turns are divided by: packets of payload where a message has many, otherwise messages.
    fn units(&self) -> (u64, &'static str) {
        let burst = u64::from(self.burst);
        match self.is_large() {
            true => (burst * u64::from(self.bytes.div_ceil(Mtu::M4096.bytes())), "packet"),
            false => (burst, "message"),
        }
    }

    fn rounds(&self) -> u32 {
        let messages = if self.is_large() { LARGE_MESSAGES } else { MESSAGES };
        messages.div_ceil(self.burst)
    }
}

/// Two devices and what carries their packets.
pub(crate) trait Pair {
    type Device: Device;

    /// Whether phases are counted by packet; otherwise by turn, and a turn moves many packets.
    const COUNTS_PACKETS: bool;

    fn device(&mut self, side: usize) -> &mut Self::Device;

    /// The path to a side.
    fn path(&self, side: usize) -> Path;

    /// First byte of a side's region.
    fn memory(&self, side: usize) -> u64;

    /// The time, the same in every run.
    fn now(&self) -> Time;

    /// Moves what the requester has to send, and receives what has arrived for it.
    fn requester(&mut self, tally: &mut Tally);

    /// The same for the responder.
    fn responder(&mut self, tally: &mut Tally);

    /// A turn of the requester when there is nothing to do, where that counts.
    fn idle(&mut self, tally: &mut Tally);

    /// A queue pair of a side is connected, and a region of it registered.
    fn connected(&mut self, side: usize, qpn: Qpn, pd: PdId, region: &MemoryRegion);

    /// The requester posts.
    fn post(&mut self, qpn: Qpn, wrs: &[SendWr]);

    /// System calls so far, by kind.
    fn calls(&mut self) -> Vec<(&'static str, u64)>;
}

struct Side {
    pd: PdId,
    send_cq: CqId,
    recv_cq: CqId,
    qpn: Qpn,
    region: MemoryRegion,
}

impl Side {
    fn new<P: Pair>(pair: &mut P, side: usize) -> Side {
        let addr = pair.memory(side);
        let device = pair.device(side);
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (device.create_cq(256).unwrap(), device.create_cq(256).unwrap());
        let config = QpConfig { recv_cq, ..QpConfig::rc(pd, send_cq, 64, 64) };
        let qpn = device.create_qp(config).unwrap();
        let region = device.register(pd, addr, REGION_BYTES, Access::ALL).unwrap();
        Side { pd, send_cq, recv_cq, qpn, region }
    }

    fn sge(&self, len: u32) -> Sge {
        Sge { addr: self.region.addr, len, lkey: self.region.lkey }
    }
}

/// Initial packet sequence numbers of both sides.
const PSNS: [u32; 2] = [1000, 2000];

/// Connects the pair and runs the load: first uncounted, then counted.
pub(crate) fn run<P: Pair>(pair: &mut P, load: &Load, tally: &mut Tally) {
    let sides = [0, 1].map(|side| Side::new(pair, side));
    for (side, own) in sides.iter().enumerate() {
        let (other, now) = (1 - side, pair.now());
        let connect = Connect {
            mtu: Mtu::M4096,
            local_psn: Psn::new(PSNS[side]),
            window_packets: 512,
            reliability: load.reliability,
            congestion: load.control.into(),
            ..Connect::new(pair.path(other), sides[other].qpn, Psn::new(PSNS[other]))
        };
        device::connect(pair.device(side), now, own.qpn, &connect).unwrap();
        pair.connected(side, own.qpn, own.pd, &own.region);
    }
    for _ in 0..WARM_UP {
        round(pair, &sides, load, tally);
    }
    tally.begin();
    let before = pair.calls();
    for _ in 0..load.rounds() {
        round(pair, &sides, load, tally);
    }
    for ((kind, calls), (_, earlier)) in pair.calls().into_iter().zip(before) {
        tally.set_calls(kind, calls - earlier);
    }
}

fn round<P: Pair>(pair: &mut P, sides: &[Side; 2], load: &Load, tally: &mut Tally) {
    let (messages, now) = (u64::from(load.burst), pair.now());
    let [requester, responder] = sides;
    if load.operation == Operation::Send {
        let wr = RecvWr { wr_id: 1, sges: [responder.sge(load.bytes)].into_iter().collect() };
        let wrs = vec![wr; load.burst as usize];
        let device = pair.device(1);
        tally.run(Phase::PostReceive, || device.post_recv(now, responder.qpn, &wrs)).unwrap();
        tally.add(Phase::PostReceive, messages, "message");
    }
    let wr = SendWr {
        wr_id: 2,
        op: operation(load, &responder.region),
        sges: [requester.sge(load.bytes)].into_iter().collect(),
        signaled: true,
        ..SendWr::default()
    };
    let wrs = vec![wr; load.burst as usize];
    tally.run(Phase::Post, || pair.post(requester.qpn, &wrs));
    tally.add(Phase::Post, messages, "message");
    let (mut done, mut exchanges, mut has_responded) = (0, 0, false);
    while done < messages {
        assert!(exchanges < MAX_EXCHANGES, "{} never completes", load.name());
        exchanges += 1;
        pair.requester(tally);
        done += poll(pair, 0, requester.send_cq, Phase::Poll, tally);
        if done < messages {
            pair.responder(tally);
            has_responded = true;
        }
    }
    if !has_responded {
        // Requests without packets need nothing of it: a turn that finds nothing.
        pair.responder(tally);
    }
    tally.add(Phase::Poll, messages, "message");
    if load.operation == Operation::Send {
        let mut received = 0;
        while received < messages {
            received += poll(pair, 1, responder.recv_cq, Phase::PollReceive, tally);
        }
        tally.add(Phase::PollReceive, messages, "message");
    }
    pair.idle(tally);
    if !P::COUNTS_PACKETS {
        let (operations, unit) = load.units();
        tally.add(Phase::Requester, operations, unit);
        tally.add(Phase::Responder, operations, unit);
    }
    tally.add_messages(messages);
}

fn operation(load: &Load, to: &MemoryRegion) -> SendOp {
    let (remote_addr, rkey) = (to.addr, to.rkey);
    match load.operation {
        Operation::Send => SendOp::Send,
        Operation::Write => SendOp::Write { remote_addr, rkey },
        Operation::Read => SendOp::Read { remote_addr, rkey },
        Operation::Atomic => SendOp::FetchAdd { remote_addr, rkey, add: 1 },
    }
}

/// Polls once, as a program does, and returns how many completions there were.
fn poll<P: Pair>(pair: &mut P, side: usize, cq: CqId, phase: Phase, tally: &mut Tally) -> u64 {
    let mut done = ArrayVec::<Completion, 32>::new();
    let device = pair.device(side);
    tally.run(phase, || device.poll_cq(cq, &mut done)).unwrap();
    assert!(done.iter().all(|one| one.status == WcStatus::Success), "{done:?}");
    done.len() as u64
}
