//! Packets that a hostile or broken peer could send: right ICRC, any content.
//!
//! Two generators: invented headers, with values near the edges of what is legal, and packets of a
//! real exchange with one field changed. Whatever arrives, the endpoint does not panic, accesses
//! nothing outside the regions that the peer may write or read (the arena checks each access, the
//! guard bytes are compared), does nothing that the queue pair's access flags do not allow (each
//! victim draws its own), and every posted work request still completes.

use std::net::SocketAddr;

use roce::Time;
use roce::endpoint::{AttrMask, Connect, Endpoint, Insert, Mtu, QpAttr, QpState, Reliability};
use roce::verbs::{Access, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WindowBinding};
use roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, DEFAULT_PKEY, Deth, Ext, Headers, Opcode, Psn, Reth, Sack,
    Sreth, Syndrome,
};
use roce::world::{Memory, Origin, Staging};

use crate::harness::{BASE, Chance, End, Network, NetworkConfig};

/// Layout of the victim's memory: what the peer may write, may read, and neither.
const WRITABLE: (u64, u64) = (BASE + 1000, 20_000);
const READABLE: (u64, u64) = (BASE + 40_000, 20_000);
const SECRET: (u64, u64) = (BASE + 80_000, 20_000);
/// Destination of its own receives and READs.
const LANDING: (u64, u64) = (BASE + 120_000, 20_000);
/// Bound to a window of the attacked queue pair, and to one of another.
const SHOWN: (u64, u64) = (BASE + 160_000, 5_000);
const HIDDEN: (u64, u64) = (BASE + 165_000, 5_000);
/// Open for atomics.
const WORDS: (u64, u64) = (BASE + 180_000, 64);

struct Victim {
    network: Network,
    end: End,
    peer: End,
    writable: MemoryRegion,
    readable: MemoryRegion,
    secret: MemoryRegion,
    landing: MemoryRegion,
    words: MemoryRegion,
    /// The access rights of the attacked queue pair.
    access: Access,
    /// Keys of the two windows.
    windows: [u32; 2],
    before: Vec<u8>,
    posted: usize,
    /// Atomics executed.
    atomics: u64,
}

impl Victim {
    fn new(seed: u64, draw: &mut Chance) -> Victim {
        let config = NetworkConfig { arena_bytes: 200_000, seed, ..NetworkConfig::default() };
        let mut network = Network::new(&config);
        let node = &mut network.nodes[1];
        let read_only = Access { remote_read: true, ..Access::LOCAL_READ };
        let writable = node.register(WRITABLE.0, WRITABLE.1, Access::REMOTE_WRITE).unwrap();
        let readable = node.register(READABLE.0, READABLE.1, read_only).unwrap();
        let secret = node.register(SECRET.0, SECRET.1, Access::LOCAL_READ).unwrap();
        let landing = node.register(LANDING.0, LANDING.1, Access::LOCAL).unwrap();
        let words = node
            .register(WORDS.0, WORDS.1, Access { remote_atomic: true, ..Access::LOCAL })
            .unwrap();
        let shelf_access = Access { bind_window: true, ..Access::LOCAL };
        let shelf = node.register(SHOWN.0, SHOWN.1 + HIDDEN.1, shelf_access).unwrap();
        let before = node.memory.all().to_vec();
        let (peer, end) = network.pair(|connect| adjust(connect, Mtu::M256, seed));
        let (_, other) = network.pair(|connect| adjust(connect, Mtu::M256, seed));
        let windows = [(end, SHOWN), (other, HIDDEN)]
            .map(|(end, range)| bind(&mut network, end, shelf.lkey, range));
        let access = draw_access(draw);
        let attr = QpAttr { mask: AttrMask::ACCESS_FLAGS, access, ..QpAttr::to(QpState::Rts) };
        network.nodes[1].endpoint.modify_qp(Time::ZERO, end.qpn, &attr).unwrap();
        let mut victim = Victim {
            network,
            end,
            peer,
            writable,
            readable,
            secret,
            landing,
            words,
            access,
            windows,
            before,
            posted: 0,
            atomics: 0,
        };
        for wr_id in 0..draw.below(8) {
            victim.post(wr_id, draw);
        }
        victim
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.network.nodes[1].endpoint
    }

    /// A receive, and a request of the victim's own.
    fn post(&mut self, wr_id: u64, draw: &mut Chance) {
        let at = draw.below(15_000);
        let len = draw.below(3000) as u32;
        let list = |region: MemoryRegion| -> SgList {
            [Sge { addr: region.addr + at, len, lkey: region.lkey }].into_iter().collect()
        };
        let (landing, secret, qpn) = (list(self.landing), list(self.secret), self.end.qpn);
        let read = SendOp::Read { remote_addr: BASE, rkey: 1 };
        let (op, sges) =
            if draw.per_mille(500) { (read, landing.clone()) } else { (SendOp::Send, secret) };
        let wr = SendWr { wr_id, op, sges, signaled: true, solicited: false, ..SendWr::default() };
        let endpoint = self.endpoint();
        endpoint.post_recv(Time::ZERO, qpn, RecvWr { wr_id, sges: landing }).unwrap();
        endpoint.post_send(Time::ZERO, qpn, wr).unwrap();
        self.posted += 2;
    }

    /// Delivers a packet to the victim and does what a turn would do with the result.
    fn strike(&mut self, now: Time, source: SocketAddr, headers: &Headers, payload: usize) {
        let node = &mut self.network.nodes[1];
        let origin = Origin::new(source, source.ip());
        let delivery = node.endpoint.handle_packet(now, &origin, headers, payload);
        let mut left = match delivery.insert {
            Insert::Value(_) => 8,
            _ => payload,
        };
        if let Insert::Atomic(job) = delivery.insert {
            assert!(job.addr.is_multiple_of(8));
            assert!(self.access.remote_atomic, "an atomic without the right");
            self.atomics += 1;
            let original = node.memory.atomic(job.addr, job.op);
            node.endpoint.complete_atomic(Time::ZERO, &job, original);
        }
        for piece in delivery.pieces {
            assert!(piece.len > 0);
            if piece.is_skipped() {
                left = left.checked_sub(piece.len as usize).expect("more skipped than there is");
                continue;
            }
            let is_in = |(start, len): (u64, u64)| (start..start + len).contains(&piece.addr);
            let is_write = is_in(WRITABLE) || is_in(SHOWN);
            assert!(self.access.remote_write || !is_write, "written without the right");
            left = left.checked_sub(piece.len as usize).expect("more placed than there is");
            node.memory.bytes_mut(piece.addr, piece.len as usize).fill(0xee);
        }
        self.listen(now);
    }

    /// What the victim sends must come from where it may be read.
    fn listen(&mut self, now: Time) {
        let node = &mut self.network.nodes[1];
        while let Some(transmit) = node.endpoint.poll_transmit(now) {
            let answers = transmit.headers.bth().opcode.is_read_response();
            for piece in &transmit.payload {
                node.memory.bytes(piece.addr, piece.len as usize);
                let end = piece.addr + u64::from(piece.len);
                let readable = piece.addr >= READABLE.0 && end <= READABLE.0 + READABLE.1;
                assert!(readable || !answers, "{:#x} was read by the peer", piece.addr);
                assert!(self.access.remote_read || !answers, "read without the right");
            }
        }
    }

    fn check(mut self, seed: u64) {
        let after = self.network.nodes[1].memory.all();
        let open = [WRITABLE, LANDING, SHOWN, WORDS];
        for (at, (was, is)) in self.before.iter().zip(after).enumerate() {
            let addr = BASE + at as u64;
            let may_change = open.iter().any(|&(start, len)| addr >= start && addr < start + len);
            assert!(was == is || may_change, "seed {seed}: {addr:#x} was written");
        }
        let end = self.end;
        self.endpoint().modify_qp(Time::ZERO, end.qpn, &QpAttr::to(QpState::Error)).unwrap();
        let done = self.network.sent_by(end).len() + self.network.received_by(end).len();
        assert_eq!(done, self.posted, "seed {seed}: work requests without completions");
    }

    // ---- generators ----------------------------------------------------------------------------

    /// Addresses at, just before and just after the edges of regions, and of everything.
    fn address(&self, draw: &mut Chance) -> u64 {
        let region = draw.pick(&[WRITABLE, READABLE, SECRET, LANDING, SHOWN, HIDDEN, WORDS]);
        let near = draw.pick(&[region.0, region.0 + region.1, region.0 + region.1 / 2, 0]);
        near.wrapping_add(draw.below(600)).wrapping_sub(300)
    }

    fn key(&self, draw: &mut Chance) -> u32 {
        let regions = [self.writable, self.readable, self.secret, self.landing, self.words];
        let region = draw.pick(&regions);
        let [own, foreign] = self.windows;
        let known = [region.rkey, region.rkey, region.rkey, region.rkey, own, foreign];
        let key = draw.pick(&[draw.clone().pick(&known), region.lkey, 0, u32::MAX]);
        let key = if draw.per_mille(600) { draw.pick(&known) } else { key };
        if draw.per_mille(50) { key ^ (1 << draw.below(32)) } else { key }
    }

    fn reth(&self, payload: usize, draw: &mut Chance) -> Reth {
        let exact = payload as u32;
        let len = draw.pick(&[exact, exact, exact, 0, 1, 257, 1000, 25_000, 1 << 31, u32::MAX]);
        Reth { addr: self.address(draw), rkey: self.key(draw), len }
    }

    fn sreth(&self, draw: &mut Chance) -> Sreth {
        let sequence = draw.pick(&[0, 0, 0, 1, 2, 7, 0xff_ffff]);
        let offset = draw.pick(&[0, 0, 256, 512, 1, 2560, 1 << 31, u32::MAX]);
        Sreth { sequence, offset }
    }

    /// A SACK of packets near our own, or far from them.
    fn sack(&self, draw: &mut Chance) -> Sack {
        let own = self.network.nodes[1].endpoint.query_qp(self.end.qpn).unwrap().sq_psn;
        let start =
            draw.pick(&[own, own.plus(3), own.minus(100), Psn::new(draw.clone().word() as u32)]);
        let bits = u128::from(draw.word()) << 64 | u128::from(draw.word());
        Sack::new(draw.word() as u32, start, bits)
    }

    fn aeth(&self, draw: &mut Chance) -> Aeth {
        let code = draw.below(32) as u8;
        let syndrome = draw.pick(&[
            Syndrome::Ack { credits: code },
            Syndrome::Ack { credits: 31 },
            Syndrome::RnrNak { timer: code },
            Syndrome::SequenceError,
            Syndrome::InvalidRequest,
            Syndrome::RemoteAccess,
            Syndrome::RemoteOperation,
            Syndrome::InvalidRdRequest,
        ]);
        Aeth { syndrome, msn: draw.word() as u32 & 0xff_ffff }
    }

    fn ext(&self, opcode: Opcode, payload: usize, draw: &mut Chance) -> Ext {
        let word = draw.word();
        let mut atomic = AtomicEth {
            addr: self.address(draw),
            rkey: self.key(draw),
            swap_or_add: word,
            compare: word,
        };
        if draw.per_mille(500) {
            let offset = draw.below(WORDS.1) & draw.pick(&[!0, !7, !7, !7]);
            (atomic.addr, atomic.rkey) = (WORDS.0 + offset, self.words.rkey);
        }
        let deth = Deth { qkey: word as u32, src_qp: Qpn::new(word as u32) };
        let candidates = [
            Ext::None,
            Ext::Imm(word as u32),
            Ext::Ieth(self.key(draw)),
            Ext::Reth(self.reth(payload, draw)),
            Ext::RethImm(self.reth(payload, draw), 9),
            Ext::Aeth(self.aeth(draw)),
            Ext::AtomicEth(atomic),
            Ext::AethAtomicAck(self.aeth(draw), AtomicAckEth { original: word }),
            Ext::Deth(deth),
            Ext::DethImm(deth, 1),
            Ext::Cnp,
            Ext::Sreth(self.sreth(draw)),
            Ext::SrethImm(self.sreth(draw), 3),
            Ext::SrethIeth(self.sreth(draw), self.key(draw)),
            Ext::RethSreth(self.reth(payload, draw), self.sreth(draw)),
            Ext::RethSrethImm(self.reth(payload, draw), self.sreth(draw), 5),
            Ext::AethSreth(self.aeth(draw), self.sreth(draw)),
            Ext::AethSack(self.aeth(draw), self.sack(draw)),
        ];
        let kind = opcode.ext_kind();
        candidates.into_iter().find(|ext| ext.kind() == kind).expect("every kind is listed")
    }

    fn headers(&self, around: Psn, payload: usize, draw: &mut Chance) -> Headers {
        let atomics = [Opcode::RcCompareSwap, Opcode::RcFetchAdd];
        let opcode = if draw.per_mille(100) { draw.pick(&atomics) } else { draw.pick(Opcode::ALL) };
        let far = Psn::new(draw.word() as u32);
        let offset = draw.below(8) as u32;
        let again = draw.per_mille(30).then(|| self.duplicate_read(draw));
        let bth = Bth {
            opcode,
            solicited: draw.per_mille(500),
            mig_req: draw.per_mille(500),
            pad: 0,
            pkey: if draw.per_mille(20) { draw.word() as u16 } else { DEFAULT_PKEY },
            fecn: draw.per_mille(100),
            becn: draw.per_mille(100),
            dest_qp: self.end.qpn,
            ack_req: draw.per_mille(500),
            psn: draw.pick(&[around, around, around.plus(offset), around.minus(offset), far]),
        };
        let ext = self.ext(opcode, payload, draw);
        match again {
            None => Headers::new(bth, ext).unwrap(),
            Some((opcode, ext)) => {
                let psn = around.minus(1 + offset);
                Headers::new(Bth { opcode, psn, ..bth }, ext).unwrap()
            }
        }
    }

    /// A READ of readable memory, as a duplicate.
    fn duplicate_read(&self, draw: &mut Chance) -> (Opcode, Ext) {
        let addr = READABLE.0 + draw.below(READABLE.1 - 300);
        let reth = Reth { addr, rkey: self.readable.rkey, len: 1 + draw.below(300) as u32 };
        match draw.per_mille(500) {
            true => (Opcode::RcReadRequest, Ext::Reth(reth)),
            false => {
                (Opcode::SrReadRequest, Ext::RethSreth(reth, Sreth { sequence: 0, offset: 0 }))
            }
        }
    }
}

/// A type 2 window of an end of node 1, and its key.
fn bind(network: &mut Network, end: End, lkey: u32, (addr, len): (u64, u64)) -> u32 {
    let node = &mut network.nodes[1];
    let (window, first) = node.endpoint.alloc_window(node.pd, true).unwrap();
    let (rkey, access) = (first ^ 1, Access::REMOTE_WRITE);
    let binding = WindowBinding { window, rkey, lkey, addr, len, access, zero_based: false };
    let op = SendOp::BindWindow(binding);
    node.endpoint.post_send(Time::ZERO, end.qpn, SendWr { op, ..SendWr::default() }).unwrap();
    assert!(node.endpoint.poll_transmit(Time::ZERO).is_none());
    rkey
}

/// Each right is enabled or not; mostly it is, so that packets get far.
fn draw_access(draw: &mut Chance) -> Access {
    let [remote_write, remote_read, remote_atomic] = [(); 3].map(|()| draw.per_mille(750));
    Access { remote_write, remote_read, remote_atomic, ..Access::ALL }
}

/// Every other seed uses selective repeat.
fn adjust(connect: &mut Connect, mtu: Mtu, seed: u64) {
    if seed % 2 == 1 {
        connect.reliability = Reliability::Selective;
    }
    connect.mtu = mtu;
    connect.max_dest_rd_atomic = 3;
    connect.timeout = 10;
}

fn payload_len(draw: &mut Chance) -> usize {
    draw.pick(&[0, 0, 1, 255, 256, 256, 256, 257, draw.clone().below(9000) as usize])
}

#[test]
fn packets_made_up_from_nothing_do_no_harm() {
    let (mut heard, mut executed, mut atomics) = (0, 0, 0);
    for seed in 0..4_000 {
        let mut draw = Chance::new(seed);
        let mut victim = Victim::new(seed, &mut draw);
        let source = victim.network.nodes[0].path().remote;
        let (peer, end) = (victim.peer.qpn, victim.end.qpn);
        let mut expected = victim.network.nodes[0].endpoint.query_qp(peer).unwrap().sq_psn;
        let own = victim.endpoint().query_qp(end).unwrap().sq_psn;
        let mut now = Time::ZERO;
        victim.listen(now);
        for _ in 0..60 {
            now = Time::from_nanos(now.as_nanos() + draw.below(3_000_000));
            victim.endpoint().handle_timeout(now);
            let payload = payload_len(&mut draw);
            let around = if draw.per_mille(700) { expected } else { own };
            let headers = victim.headers(around, payload, &mut draw);
            let placed = victim.endpoint().counters().bytes_received + victim.atomics;
            victim.strike(now, source, &headers, payload);
            // Follow what was accepted, so that later packets pass the PSN check.
            if victim.endpoint().counters().bytes_received + victim.atomics > placed {
                expected = headers.bth().psn.next();
                executed += 1;
            }
            if victim.endpoint().qp_state(end) != Some(QpState::Rts) {
                break;
            }
            heard += 1;
        }
        atomics += victim.atomics;
        victim.check(seed);
    }
    assert!(atomics > 20, "only {atomics} atomics were carried out");
    assert!(heard > 2_000, "connections ended after {heard} packets in all");
    assert!(executed > 100, "only {executed} packets got as far as memory");
}

/// Changes one thing about a packet.
fn mutate(
    headers: &Headers,
    payload: usize,
    victim: &Victim,
    draw: &mut Chance,
) -> (Headers, usize) {
    let (mut bth, mut ext, mut len) = (*headers.bth(), *headers.ext(), payload);
    match draw.below(6) {
        0 => bth.psn = bth.psn.plus(draw.pick(&[1, 2, 0xff_ffff, 0x80_0000])),
        1 => {
            bth.opcode = draw.pick(Opcode::ALL);
            ext = victim.ext(bth.opcode, payload, draw);
        }
        2 => len = payload_len(draw),
        3 => ext = victim.ext(bth.opcode, payload, draw),
        4 => bth.ack_req = !bth.ack_req,
        _ => {}
    }
    (Headers::new(bth, ext).unwrap_or(*headers), len)
}

#[test]
fn real_packets_with_one_change_do_no_harm() {
    for seed in 0..1_000 {
        let mut draw = Chance::new(seed ^ 0x5eed);
        let mut victim = Victim::new(seed, &mut draw);
        let source = victim.network.nodes[0].path().remote;
        let genuine = exchange(&mut victim, &mut draw);
        victim.listen(Time::ZERO);
        for (headers, payload) in genuine {
            let (headers, payload) = match draw.per_mille(150) {
                true => mutate(&headers, payload, &victim, &mut draw),
                false => (headers, payload),
            };
            victim.strike(Time::ZERO, source, &headers, payload);
        }
        victim.check(seed);
    }
}

/// What the peer would send for a few requests of its own.
fn exchange(victim: &mut Victim, draw: &mut Chance) -> Vec<(Headers, usize)> {
    let peer = victim.peer;
    let (writable, readable) = (victim.writable, victim.readable);
    let (words, windows) = (victim.words, victim.windows);
    let node = &mut victim.network.nodes[0];
    let local = node.register(BASE, 60_000, Access::LOCAL).unwrap();
    for wr_id in 0..10 {
        let len = draw.below(1500) as u32;
        let write = SendOp::Write { remote_addr: writable.addr, rkey: writable.rkey };
        let read = SendOp::Read { remote_addr: readable.addr, rkey: readable.rkey };
        let (remote_addr, rkey) = (WORDS.0 + 8, words.rkey);
        let add = SendOp::FetchAdd { remote_addr, rkey, add: 1 };
        let swap = SendOp::CompareSwap { remote_addr, rkey, compare: 1, swap: 2 };
        let shown = SendOp::Write { remote_addr: SHOWN.0, rkey: windows[0] };
        let plain = [SendOp::Send, SendOp::SendImm(4), write, write, read, shown];
        let special = [add, add, swap, SendOp::SendInvalidate(windows[0])];
        let is_special = draw.per_mille(250);
        let op = if is_special { draw.pick(&special) } else { draw.pick(&plain) };
        let len = if matches!(op, SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. }) {
            8
        } else {
            len
        };
        let sges = [Sge { addr: BASE, len, lkey: local.lkey }].into_iter().collect();
        let wr = SendWr { wr_id, op, sges, signaled: true, solicited: false, ..SendWr::default() };
        node.endpoint.post_send(Time::ZERO, peer.qpn, wr).unwrap();
    }
    let endpoint = &mut node.endpoint;
    std::iter::from_fn(|| endpoint.poll_transmit(Time::ZERO))
        .map(|transmit| (transmit.headers, transmit.payload_len()))
        .collect()
}

#[test]
#[should_panic(expected = "C3")]
fn the_arena_refuses_what_is_not_registered() {
    let mut network = Network::new(&NetworkConfig::default());
    network.nodes[0].register(BASE, 64, Access::LOCAL).unwrap();
    network.nodes[0].memory.bytes_mut(BASE + 60, 8);
}

/// The same real packets repeatedly: nothing is executed twice.
#[test]
fn a_recording_played_twice_changes_nothing_the_second_time() {
    let (mut atomics, mut answers) = (0, 0);
    for seed in 0..200 {
        let mut draw = Chance::new(seed ^ 0x0dd5);
        let mut victim = Victim::new(seed, &mut draw);
        let source = victim.network.nodes[0].path().remote;
        let genuine = exchange(&mut victim, &mut draw);
        victim.listen(Time::ZERO);
        for (headers, payload) in &genuine {
            victim.strike(Time::ZERO, source, headers, *payload);
        }
        let (carried_out, end) = (victim.atomics, victim.end);
        victim.network.received_by(end);
        let memory = victim.network.nodes[1].memory.all().to_vec();
        if victim.endpoint().qp_state(end.qpn) != Some(QpState::Rts) {
            continue;
        }
        for (headers, payload) in genuine.iter().chain(genuine.iter().rev()) {
            victim.strike(Time::ZERO, source, headers, *payload);
        }
        assert_eq!(victim.atomics, carried_out, "seed {seed}");
        assert!(victim.network.nodes[1].memory.all() == memory, "seed {seed}");
        assert!(victim.network.received_by(end).is_empty(), "seed {seed}");
        atomics += carried_out;
        answers += victim.endpoint().counters().duplicate_atomics;
    }
    assert!(atomics > 50 && answers > 50, "{atomics} atomics, {answers} answered again");
}
