//! Requests that are carried out without packets, mixed with packets (`roce::direct`).
//!
//! A seed draws a program of WRITEs, READs and SENDs, a local peer that refuses some requests, lost
//! packets, pauses and failures. Whatever of it is direct, waits, or becomes packets: every request
//! completes once and in order, and has the effect that it would have had alone, one after the
//! other (C2).
//!
//! `DQUANT_SEED=n cargo test -p roce --test it rc_direct` replays one program.

use std::collections::{BTreeSet, VecDeque};

use roce::direct::{
    Backlog, Direct, DirectKind, DirectRefusal, DirectRequest, Handed, Holding, MAX_DIRECT_BYTES,
    Message, MessageAck, MessageHeader, Posted,
};
use roce::endpoint::{QpAttr, QpState};
use roce::verbs::{Access, Qpn, SendOp, SendWr, SgList, Sge, WcStatus};
use roce::world::{self, AtomicOp, Memory};
use sim::memory::Arena;

use crate::harness::{BASE, Chance, Fault, FaultMix, Node};
use crate::pair::Pair;
use crate::seeds::{Replay, seeds};

const REQUESTS: u64 = 120;

/// Bytes of the peer that WRITEs and READs use.
const TARGET_BYTES: u64 = 3_000;

/// Each request has its own bytes on this side.
const SLOT: u64 = 4_000;

/// Both memories, as a local peer of the first node reaches them.
struct Neighbour<'a> {
    own: &'a mut Arena,
    peer: &'a mut Arena,
    draw: &'a mut Chance,
    refuses_per_mille: u32,
    /// Bytes that were copied.
    moved: u64,
    /// Messages that the peer has not taken; none where it takes none.
    letters: Option<&'a mut VecDeque<Letter>>,
}

type Letter = (MessageHeader, Vec<u8>);

/// Messages that fit between the two.
const MAX_LETTERS: usize = 6;

impl Direct for Neighbour<'_> {
    fn reaches(&self, _qpn: Qpn, _kind: DirectKind) -> bool {
        true
    }

    fn carry_out(&mut self, request: &DirectRequest<'_>) -> Result<(), DirectRefusal> {
        if self.draw.per_mille(self.refuses_per_mille) {
            return Err(DirectRefusal::Peer);
        }
        let first = request.remote_addr + u64::from(request.part.offset);
        let mut remote = first;
        for piece in request.local {
            let len = piece.len as usize;
            match request.kind {
                DirectKind::Write => self.peer.poke(remote, self.own.peek(piece.addr, len)),
                DirectKind::Read => self.own.poke(piece.addr, self.peer.peek(remote, len)),
                DirectKind::Atomic(op) => {
                    assert_eq!(len, 8, "an atomic has one part");
                    let original = self.peer.atomic(remote, op);
                    self.own.poke(piece.addr, &original.to_ne_bytes());
                }
            }
            remote += u64::from(piece.len);
        }
        self.moved += remote - first;
        assert_eq!(remote - first, u64::from(request.part.len));
        Ok(())
    }

    fn takes_messages(&self, _qpn: Qpn) -> bool {
        self.letters.is_some()
    }

    fn hand_over(&mut self, message: &Message<'_>) -> Result<(), DirectRefusal> {
        let letters = self.letters.as_mut().ok_or(DirectRefusal::NotDirect)?;
        if letters.len() == MAX_LETTERS {
            return Err(DirectRefusal::Full);
        }
        let pieces = message.local.iter();
        let bytes: Vec<u8> = pieces
            .flat_map(|piece| self.own.peek(piece.addr, piece.len as usize).to_vec())
            .collect();
        assert_eq!(bytes.len(), message.header.len as usize);
        letters.push_back((message.header, bytes));
        Ok(())
    }
}

struct Program {
    pair: Pair,
    draw: Chance,
    refuses_per_mille: u32,
    posted: u64,
    completed: Vec<(u64, WcStatus)>,
    /// The peer's bytes after all requests so far, and what each READ has to return.
    model: Vec<u8>,
    reads: Vec<(u64, Vec<u8>)>,
    held: u64,
    /// Which sends wait from their post on, for the driver.
    holding: Holding,
    /// Requests without a completion, unless they fail.
    quiet: BTreeSet<u64>,
    /// Then a READ that is executed again may return bytes of a WRITE behind it.
    loses: bool,
    letters: Option<VecDeque<Letter>>,
    /// Receives that are posted late.
    late: Vec<u64>,
}

impl Program {
    fn new(seed: u64) -> Program {
        let mut draw = Chance::new(seed);
        let is_selective = draw.per_mille(500);
        let mut pair = Pair::with(|connect| {
            if is_selective {
                *connect = connect.selective();
            }
        });
        let loses = draw.per_mille(300);
        if loses {
            pair.network.mix = FaultMix::NONE.with(Fault::Loss, 30_000);
        }
        let model = pair.network.nodes[1].memory.peek(BASE, TARGET_BYTES as usize).to_vec();
        let refuses_per_mille = draw.pick(&[0, 0, 20, 300, 1_000]);
        let (posted, completed, reads, held) = (0, Vec::new(), Vec::new(), 0);
        let holding = draw.pick(&[Holding::Runs, Holding::Runs, Holding::All, Holding::Relaxed]);
        let letters = draw.per_mille(600).then(VecDeque::new);
        let (now, qpn) = (pair.network.now(), pair.a.qpn);
        pair.network.nodes[0].endpoint.hold_sends(now, qpn, holding).expect("it exists");
        Program {
            pair,
            draw,
            refuses_per_mille,
            posted,
            completed,
            model,
            reads,
            held,
            holding,
            quiet: BTreeSet::new(),
            loses,
            letters,
            late: Vec::new(),
        }
    }

    fn with_neighbour<T>(&mut self, act: impl FnOnce(&mut Reach<'_>) -> T) -> T {
        let (now, qpn) = (self.pair.network.now(), self.pair.a.qpn);
        let [node, other, ..] = &mut self.pair.network.nodes[..] else {
            unreachable!("two nodes");
        };
        let Node { endpoint, memory, .. } = node;
        let (draw, refuses_per_mille) = (&mut self.draw, self.refuses_per_mille);
        let peer = &mut other.memory;
        let letters = self.letters.as_mut();
        let direct = Neighbour { own: memory, peer, draw, refuses_per_mille, moved: 0, letters };
        act(&mut Reach { endpoint, direct, now, qpn })
    }

    /// Posts one request and applies it to the model; false if the send queue is full.
    fn post(&mut self) -> bool {
        let slot = self.posted % 100 * SLOT;
        let what = self.draw.below(40);
        let is_atomic = (10..15).contains(&what);
        let len = if is_atomic { 8 } else { self.draw.between(1, TARGET_BYTES) as u32 };
        let mut at = self.draw.between(0, TARGET_BYTES - u64::from(len));
        at -= if is_atomic { at % 8 } else { 0 };
        let rkey = self.pair.regions[1].rkey;
        let remote_addr = BASE + at;
        let op = match what {
            0 => SendOp::Send,
            20..30 if self.letters.is_some() => SendOp::SendImm(7),
            1..=9 => SendOp::Read { remote_addr, rkey },
            10..15 => SendOp::FetchAdd { remote_addr, rkey, add: self.posted << 32 | 1 },
            _ => SendOp::Write { remote_addr, rkey },
        };
        let mut bytes = vec![0; len as usize];
        self.draw.fill(&mut bytes);
        self.pair.network.nodes[0].memory.poke(BASE + slot, &bytes);
        let is_write = matches!(op, SendOp::Write { .. });
        let is_quiet = is_write && self.posted + 1 < REQUESTS && self.draw.per_mille(500);
        let wr = SendWr { signaled: !is_quiet, ..self.pair.wr(self.posted, op, slot, len) };
        let holding = self.holding;
        let posted = self.with_neighbour(|at| match holding {
            Holding::All | Holding::Relaxed => {
                at.endpoint.post_send(at.now, at.qpn, wr).map(|()| Posted::Queued)
            }
            Holding::Runs => at.endpoint.post_send_direct(at.now, at.qpn, wr, &mut at.direct),
        });
        let Ok(posted) = posted else {
            return false;
        };
        self.quiet.extend(is_quiet.then_some(self.posted));
        self.held += u64::from(posted == Posted::Held);
        let range = at as usize..at as usize + len as usize;
        match op {
            SendOp::Read { .. } => self.reads.push((self.posted, self.model[range].to_vec())),
            SendOp::Write { .. } => self.model[range].copy_from_slice(&bytes),
            SendOp::FetchAdd { add, .. } => {
                let word = &mut self.model[range];
                self.reads.push((self.posted, word.to_vec()));
                AtomicOp::FetchAdd(add).apply_to(word);
            }
            _ if self.draw.per_mille(200) => self.late.push(self.posted),
            _ => self.pair.receive(self.posted, TARGET_BYTES as u32),
        }
        self.posted += 1;
        true
    }

    /// From now on nothing is refused or lost, and these sends wait.
    fn begin(&mut self, holding: Holding) {
        (self.refuses_per_mille, self.loses, self.holding) = (0, false, holding);
        self.letters = None;
        self.pair.network.mix = FaultMix::NONE;
        let held = self.with_neighbour(|at| at.endpoint.hold_sends(at.now, at.qpn, holding));
        held.expect("it exists");
    }

    /// Posts WRITEs, each followed by a SEND.
    fn post_pairs(&mut self, pairs: u64, signaled: bool) {
        let rkey = self.pair.regions[1].rkey;
        for number in 0..2 * pairs {
            let write = SendOp::Write { remote_addr: BASE, rkey };
            let op = if number % 2 == 0 { write } else { SendOp::Send };
            let is_signaled = signaled || op == SendOp::Send;
            let wr = SendWr { signaled: is_signaled, ..self.pair.wr(number, op, 0, 100) };
            self.pair.receive(number, 100);
            self.with_neighbour(|at| at.endpoint.post_send(at.now, at.qpn, wr)).expect("room");
            self.posted += 1;
        }
    }

    fn step(&mut self) {
        match self.draw.below(10) {
            0..=4 => {
                for _ in 0..self.draw.between(1, 40) {
                    if self.posted == REQUESTS || !self.post() {
                        break;
                    }
                }
            }
            5 => self.set_state(self.pair.state(0), QpState::Rts, QpState::Sqd),
            6 if self.holding != Holding::Runs && self.draw.per_mille(50) => {
                self.holding = Holding::Runs;
                let runs = Holding::Runs;
                let at = self.with_neighbour(|at| at.endpoint.hold_sends(at.now, at.qpn, runs));
                at.expect("it exists");
            }
            _ => {
                self.pair.network.advance();
            }
        }
        self.set_state(self.pair.state(0), QpState::Sqd, QpState::Rts);
        if self.draw.per_mille(300) {
            let late = std::mem::take(&mut self.late);
            late.into_iter().for_each(|wr| self.pair.receive(wr, TARGET_BYTES as u32));
        }
        if self.draw.per_mille(600) {
            let most = self.draw.between(1, 2 * MAX_LETTERS as u64);
            self.deliver(most);
        }
        self.carry_on();
    }

    /// The peer decides on messages, the oldest first.
    fn deliver(&mut self, most: u64) {
        let now = self.pair.network.now();
        for _ in 0..most {
            let letter = self.letters.as_mut().and_then(VecDeque::pop_front);
            let Some((header, bytes)) = letter else { return };
            let from = self.pair.network.nodes[0].ip();
            let Node { endpoint, memory, .. } = &mut self.pair.network.nodes[1];
            let taken = world::take_message(endpoint, memory, now, from, (&header, &bytes));
            let ack = if taken { MessageAck::Taken } else { MessageAck::Refused };
            let handed = Handed { source: header.source, round: header.round };
            self.pair.network.nodes[0].endpoint.handle_message_ack(now, handed, ack);
        }
    }

    fn set_state(&mut self, now: QpState, from: QpState, to: QpState) {
        if now == from {
            let (at, qpn) = (self.pair.network.now(), self.pair.a.qpn);
            let endpoint = &mut self.pair.network.nodes[0].endpoint;
            endpoint.modify_qp(at, qpn, &QpAttr::to(to)).unwrap();
            self.carry_on();
        }
    }

    /// What an engine does after every turn.
    fn carry_on(&mut self) {
        let mut backlog = Backlog::Ready;
        while backlog == Backlog::Ready {
            let budget = self.draw.pick(&[0, 1, 5_000, MAX_DIRECT_BYTES]);
            let mut left = budget;
            let (after, moved) = self.with_neighbour(|at| {
                let Reach { endpoint, direct, now, qpn } = at;
                (endpoint.carry_out_held(*now, *qpn, direct, &mut left), direct.moved)
            });
            backlog = after;
            // Atomics have one part.
            assert!(moved < u64::from(budget) + 8, "{moved} bytes of {budget}");
        }
        self.pair.network.settle();
        let done = self.pair.network.sent_by(self.pair.a);
        self.completed.extend(done.iter().map(|wc| (wc.wr_id, wc.status)));
    }

    /// Whether the last request is complete, which every program requests.
    fn is_done(&self) -> bool {
        self.completed.last().is_some_and(|done| done.0 + 1 == REQUESTS)
    }

    /// Every request that asks for a completion has one, those that do not have one if they failed,
    /// and all are in order.
    fn check_order(&self) {
        let failed = |wr: &u64| {
            self.completed.iter().any(|done| done.0 == *wr && done.1 != WcStatus::Success)
        };
        let wanted = (0..self.posted).filter(|wr| !self.quiet.contains(wr) || failed(wr));
        let completed = self.completed.iter().map(|done| done.0);
        assert!(wanted.eq(completed), "{:?}", self.completed);
    }
}

struct Reach<'a> {
    endpoint: &'a mut roce::endpoint::Endpoint,
    direct: Neighbour<'a>,
    now: roce::Time,
    qpn: Qpn,
}

#[test]
fn direct_requests_and_packets_stay_in_order() {
    let (mut held, mut sent, mut refused) = (0, 0, 0);
    for seed in seeds(0..300) {
        let _replay = Replay { test: "rc_direct", seed };
        let mut program = Program::new(seed);
        for _ in 0..10_000 {
            if program.is_done() {
                break;
            }
            program.step();
        }
        assert!(program.is_done());
        program.check_order();
        assert!(program.completed.iter().all(|done| done.1 == WcStatus::Success));
        let peer = &program.pair.network.nodes[1].memory;
        assert!(peer.peek(BASE, TARGET_BYTES as usize) == program.model);
        let own = &program.pair.network.nodes[0].memory;
        // A slot is used again after 100 requests.
        let is_kept = |wr: u64| !program.loses && wr + 100 >= REQUESTS;
        for (wr, bytes) in program.reads.iter().filter(|(wr, _)| is_kept(*wr)) {
            assert!(own.peek(BASE + wr % 100 * SLOT, bytes.len()) == bytes, "READ {wr}");
        }
        held += program.held;
        let counters = program.pair.network.nodes[0].endpoint.counters();
        assert!(!program.pair.network.nodes[0].endpoint.awaits_message_acks());
        sent += counters.direct_sends;
        refused += counters.direct_sends_refused;
    }
    assert!(held > 0, "nothing had to wait");
    assert!(sent > 2 * refused && refused > 0, "{sent} messages, {refused} refused");
}

/// Where all requests wait for the driver, WRITEs are direct although SENDs are between them, and
/// nothing else is.
#[test]
fn writes_between_messages_are_direct_where_all_wait() {
    let mut program = Program::new(1);
    program.begin(Holding::All);
    program.post_pairs(10, true);
    for _ in 0..1_000 {
        program.carry_on();
        program.pair.network.advance();
    }
    program.check_order();
    let counters = program.pair.network.nodes[0].endpoint.counters();
    assert_eq!((counters.direct_writes, counters.direct_refused_outstanding), (10, 0));
}

/// With relaxed order they do not even wait for the acknowledgements of these; those with a
/// completion, and what is behind another request than a SEND, do.
#[test]
fn quiet_writes_pass_messages_where_the_order_is_relaxed() {
    let direct_writes = |holding, signaled, read_first: bool| {
        let mut program = Program::new(1);
        program.begin(holding);
        if read_first {
            let read = SendOp::Read { remote_addr: BASE, rkey: program.pair.regions[1].rkey };
            let wr = program.pair.wr(100, read, 0, 100);
            let post = |at: &mut Reach<'_>| at.endpoint.post_send(at.now, at.qpn, wr);
            program.with_neighbour(post).expect("room");
            let runs = |at: &mut Reach<'_>| at.endpoint.hold_sends(at.now, at.qpn, Holding::Runs);
            program.with_neighbour(runs).expect("it exists");
            let again = |at: &mut Reach<'_>| at.endpoint.hold_sends(at.now, at.qpn, holding);
            program.with_neighbour(again).expect("it exists");
        }
        program.post_pairs(10, signaled);
        program.carry_on();
        program.pair.network.nodes[0].endpoint.counters().direct_writes
    };
    assert_eq!(direct_writes(Holding::Relaxed, false, false), 10);
    assert_eq!(direct_writes(Holding::Relaxed, true, false), 1);
    assert_eq!(direct_writes(Holding::All, false, false), 1);
    assert_eq!(direct_writes(Holding::Relaxed, false, true), 0);
}

#[test]
fn requests_that_wait_are_flushed_once_and_in_order() {
    for seed in seeds(0..300) {
        let _replay = Replay { test: "rc_direct", seed };
        let mut program = Program::new(seed);
        for _ in 0..program.draw.between(1, 30) {
            program.step();
        }
        program.set_state(program.pair.state(0), QpState::Rts, QpState::Error);
        program.check_order();
        let failed = program.completed.iter().position(|done| done.1 != WcStatus::Success);
        let flushed = &program.completed[failed.unwrap_or(program.completed.len())..];
        assert!(flushed.iter().all(|done| done.1 == WcStatus::WrFlushError));
    }
}

/// Takes every part and copies nothing, up to a number of parts.
struct Recorder {
    parts: Vec<(u32, u32)>,
    most: usize,
}

impl Direct for Recorder {
    fn reaches(&self, _qpn: Qpn, _kind: DirectKind) -> bool {
        true
    }

    fn carry_out(&mut self, request: &DirectRequest<'_>) -> Result<(), DirectRefusal> {
        let DirectRequest { part, local, .. } = request;
        assert_eq!(local.iter().map(|piece| piece.len).sum::<u32>(), part.len);
        if self.parts.len() == self.most {
            return Err(DirectRefusal::Region);
        }
        self.parts.push((part.offset, part.len));
        Ok(())
    }

    fn takes_messages(&self, _qpn: Qpn) -> bool {
        false
    }

    fn hand_over(&mut self, _message: &Message<'_>) -> Result<(), DirectRefusal> {
        unreachable!("it takes none")
    }
}

/// Posts a WRITE of 7 MiB whose peer takes `most` parts, and carries it out as far as that goes.
fn long_write(most: usize) -> (Pair, Vec<(u32, u32)>) {
    const LEN: u64 = 7 << 20;
    let mut pair = Pair::new();
    let all = pair.network.nodes[0].register(BASE, 1 << 20, Access::LOCAL).expect("its memory");
    let sge = Sge { addr: BASE, len: 1 << 20, lkey: all.lkey };
    let sges: SgList = (0..LEN >> 20).map(|_| sge).collect();
    let wr = SendWr { sges, ..pair.wr(7, pair.write_op(0), 0, 1) };
    let (now, qpn) = (pair.network.now(), pair.a.qpn);
    let endpoint = &mut pair.network.nodes[0].endpoint;
    let mut direct = Recorder { parts: Vec::new(), most };
    assert_eq!(endpoint.post_send_direct(now, qpn, wr, &mut direct), Ok(Posted::Held));
    assert!(direct.parts.is_empty(), "the post copies nothing");
    for turn in 1..=2 {
        let mut budget = MAX_DIRECT_BYTES;
        let backlog = endpoint.carry_out_held(now, qpn, &mut direct, &mut budget);
        let done: u64 = direct.parts.iter().map(|part| u64::from(part.1)).sum();
        let is_over = done == LEN || direct.parts.len() == most && turn > most;
        assert_eq!(backlog, if is_over { Backlog::Empty } else { Backlog::Ready });
        assert_eq!(endpoint.counters().direct_writes, u64::from(done == LEN));
        if is_over {
            break;
        }
    }
    (pair, direct.parts)
}

#[test]
fn a_long_request_is_carried_out_in_parts_and_completes_with_the_last() {
    let (mut pair, parts) = long_write(2);
    assert_eq!(parts, [(0, MAX_DIRECT_BYTES), (MAX_DIRECT_BYTES, 3 << 20)]);
    assert_eq!(pair.run().0, [(7, WcStatus::Success)]);
}

/// The peer's answer then is that of its responder, whose region is shorter.
#[test]
fn a_long_request_that_is_refused_in_the_middle_becomes_packets() {
    let (mut pair, parts) = long_write(1);
    assert_eq!(parts, [(0, MAX_DIRECT_BYTES)]);
    assert_eq!(pair.run().0, [(7, WcStatus::RemoteAccessError)]);
}
