//! Random walks through the states of a queue pair, with traffic in flight.
//!
//! A seed draws the transport, the loss recovery mode, and then one legal step after the other:
//! posting, draining, changing attributes while drained, failing, starting over. A model of one
//! line for each step gives the next state. At the end the queue pair is taken to RTS, and a
//! message must get through.
//!
//! `DQUANT_SEED=n cargo test -p roce --test it walk` replays one walk.

use roce::Duration;
use roce::Time;
use roce::endpoint::{AttrMask, Mtu, QpAttr, QpState, Reliability};
use roce::verbs::{Access, MemoryRegion, SendOp, SendWr, Transport, WcStatus};

use QpState::{Error, Reset, Rts, Sqd, Sqe};

use crate::harness::{BASE, Chance, End, Fault, FaultMix, Network, NetworkConfig};
use crate::kit::{TRANSPORTS, attributes, bring_to, list, recv, registered, send};
use crate::seeds::{Replay, seeds};

const STEPS: u32 = 60;

/// Immediate data of the last message.
const LAST: u32 = 0xdead_beef;

struct Walk {
    seed: u64,
    draw: Chance,
    network: Network,
    transport: Transport,
    reliability: Reliability,
    /// The end that walks, and its peer, which only responds.
    a: End,
    b: End,
    regions: [MemoryRegion; 2],
    /// The model's state of `a`.
    state: QpState,
    /// READs that may be in flight.
    reads: u8,
    /// A request is posted whose memory is deregistered.
    is_doomed: bool,
}

impl Walk {
    fn new(seed: u64) -> Walk {
        let mut draw = Chance::new(seed);
        let transport = draw.pick(&TRANSPORTS);
        let reliability = draw.pick(&[Reliability::GoBackN, Reliability::Selective]);
        let mut network = Network::new(&NetworkConfig { seed, ..NetworkConfig::default() });
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let [a, b] = [0, 1].map(|node| network.create(node, transport, None));
        let (state, reads, is_doomed) = (Reset, 0, false);
        let mut walk = Walk {
            seed,
            draw,
            network,
            transport,
            reliability,
            a,
            b,
            regions,
            state,
            reads,
            is_doomed,
        };
        walk.start_over();
        walk
    }

    /// Takes both ends through RESET to RTS.
    fn start_over(&mut self) {
        self.reads = self.draw.below(4) as u8;
        // The PSNs will be the same: packets in flight must not be taken for new ones.
        for end in [self.a, self.b] {
            self.network.endpoint(end).modify_qp(Time::ZERO, end.qpn, &QpAttr::to(Reset)).unwrap();
        }
        self.network.run_until(self.network.now() + Duration::from_millis(1));
        for (own, peer) in [(self.a, self.b), (self.b, self.a)] {
            let path = self.network.nodes[peer.node].path();
            let base = QpAttr {
                reliability: self.reliability,
                max_rd_atomic: self.reads,
                timeout: 10,
                ..attributes(path, own.qpn, peer.qpn, Mtu::M256)
            };
            let endpoint = self.network.endpoint(own);
            bring_to(endpoint, own.qpn, self.transport, &base, Rts);
        }
        (self.state, self.is_doomed) = (Rts, false);
    }

    fn modify(&mut self, attr: &QpAttr) {
        let a = self.a;
        self.network.endpoint(a).modify_qp(Time::ZERO, a.qpn, attr).unwrap();
        if attr.mask.contains(AttrMask::STATE) {
            self.state = attr.state;
        }
    }

    fn post(&mut self, op: SendOp, from: MemoryRegion, len: u32) {
        let to = Some(self.network.address(self.b));
        let len = if self.transport == Transport::Ud { len.min(256) } else { len };
        let wr = SendWr { to, ..send(1, op, list(from, 0, len)) };
        let a = self.a;
        // A full queue is no fault.
        let _ = self.network.endpoint(a).post_send(Time::ZERO, a.qpn, wr);
    }

    fn post_something(&mut self) {
        let len = self.draw.below(2000) as u32;
        let remote = SendOp::Read { remote_addr: BASE, rkey: self.regions[1].rkey };
        let is_read = self.transport == Transport::Rc && self.reads > 0 && self.draw.per_mille(600);
        let (op, from) = (if is_read { remote } else { SendOp::Send }, self.regions[0]);
        self.post(op, from, len);
    }

    /// A message whose memory is deregistered while it is in flight, or before. It fails the send
    /// queue, unless all of it was sent.
    fn break_one(&mut self, drains: bool) {
        let gone = self.network.nodes[0].register(BASE + 8192, 4096, Access::ALL).unwrap();
        self.post(SendOp::Send, gone, 1024);
        let (a, now) = (self.a, self.network.now());
        if let Some(first) = self.network.endpoint(a).poll_transmit(now) {
            self.network.inject(a, &first);
        }
        // A request posted before may have failed it meanwhile.
        if drains && self.network.state(a) == Rts {
            self.modify(&QpAttr::to(Sqd));
        }
        self.network.nodes[0].deregister(gone.lkey).unwrap();
        self.is_doomed = true;
        self.run();
    }

    /// Changes one attribute that may be changed in SQD.
    fn retune(&mut self) {
        let (a, to) = (self.a, QpAttr::to(Sqd));
        let now = self.network.endpoint(a).query_qp(a.qpn).unwrap();
        let mut attr = QpAttr { mask: to.mask, state: Sqd, ..now };
        let bit = match (self.transport, self.draw.below(5)) {
            (Transport::Ud, _) => AttrMask::QKEY,
            (Transport::Uc, _) => AttrMask::AV,
            (_, 0) => AttrMask::TIMEOUT,
            (_, 1) => AttrMask::RETRY_CNT,
            (_, 2) => AttrMask::RNR_RETRY,
            (_, 3) => AttrMask::MAX_DEST_RD_ATOMIC,
            _ => AttrMask::MAX_QP_RD_ATOMIC,
        };
        attr.mask |= bit;
        attr.timeout = self.draw.between(8, 14) as u8;
        attr.retry_count = self.draw.between(5, 7) as u8;
        attr.max_dest_rd_atomic = self.draw.below(20) as u8;
        if bit == AttrMask::MAX_QP_RD_ATOMIC {
            attr.max_rd_atomic = self.draw.between(1, 16) as u8;
            self.reads = attr.max_rd_atomic;
        }
        self.modify(&attr);
    }

    /// The peer has receives, as many as fit.
    fn refill(&mut self) {
        let (b, room) = (self.b, list(self.regions[1], 1 << 18, 2100));
        for _ in 0..64 {
            let _ = self.network.endpoint(b).post_recv(Time::ZERO, b.qpn, recv(2, room.clone()));
        }
    }

    fn run(&mut self) {
        let span = Duration::from_nanos(self.draw.below(30_000));
        self.network.run_until(self.network.now() + span);
    }

    fn step(&mut self) {
        let b = self.b;
        self.refill();
        match (self.state, self.draw.below(12)) {
            (Rts | Sqd | Sqe, 0..=4) => self.post_something(),
            (Rts, 5) => self.break_one(false),
            (Rts, 6) => self.break_one(true),
            (Rts, 7 | 8) => {
                let mask = QpAttr::to(Sqd).mask | AttrMask::EN_SQD_ASYNC_NOTIFY;
                let sqd_notify = self.draw.per_mille(500);
                self.modify(&QpAttr { mask, sqd_notify, ..QpAttr::to(Sqd) });
            }
            (Sqd, 5..=8) => self.retune(),
            (Sqd | Sqe, 9 | 10) => self.modify(&QpAttr::to(Rts)),
            (_, 11) if self.draw.per_mille(300) => self.modify(&QpAttr::to(Error)),
            (Error | Reset, _) => self.start_over(),
            _ => self.run(),
        }
        let (a, now) = (self.a, self.network.state(self.a));
        match (self.transport, now) {
            // Faults, too, may end a connection at any time.
            (Transport::Rc, Error) => self.state = Error,
            (Transport::Uc | Transport::Ud, Sqe) if self.is_doomed => {
                assert!(matches!(self.state, Rts | Sqd | Sqe), "seed {}", self.seed);
                (self.state, self.is_doomed) = (Sqe, false);
            }
            _ => assert_eq!(now, self.state, "seed {}", self.seed),
        }
        self.network.sent_by(a);
        self.network.received_by(b);
    }

    /// Heals, returns to RTS by the shortest legal way, and sends a message.
    fn finish(&mut self) {
        self.network.mix = FaultMix::default();
        match self.state {
            Rts => {}
            Sqd | Sqe => self.modify(&QpAttr::to(Rts)),
            _ => self.start_over(),
        }
        let (a, b) = (self.a, self.b);
        let drain = |walk: &mut Walk| {
            walk.network.run_until(walk.network.now() + Duration::from_millis(3_000));
            (walk.network.sent_by(a), walk.network.received_by(b))
        };
        drain(self);
        match (self.network.state(a), self.network.state(b)) {
            (Rts, Rts) => {}
            // A posted request failed it only now.
            (Sqe, Rts) => self.modify(&QpAttr::to(Rts)),
            _ => self.start_over(),
        }
        self.refill();
        self.post(SendOp::SendImm(LAST), self.regions[0], 700);
        let (sent, received) = drain(self);
        let status = sent.last().map(|done| done.status);
        let imm = received.last().and_then(|done| done.imm);
        let what = format!("seed {}, {:?}: nothing is sent any more", self.seed, self.transport);
        assert_eq!((status, imm), (Some(WcStatus::Success), Some(LAST)), "{what}");
    }
}

#[test]
fn every_legal_path_leaves_a_queue_pair_that_works() {
    for seed in seeds(0..400) {
        let _replay = Replay { test: "walk", seed };
        let mut walk = Walk::new(seed);
        if walk.draw.per_mille(500) {
            walk.network.mix = FaultMix::NONE.with(Fault::Loss, 50_000);
        }
        for _ in 0..STEPS {
            walk.step();
        }
        walk.finish();
    }
}
