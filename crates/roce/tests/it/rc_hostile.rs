//! Packets that a hostile or broken peer could send: right ICRC, any content.
//!
//! Two generators: headers made up from nothing, with values near the edges of what is legal, and
//! packets of a real exchange with one field changed. Whatever comes, the endpoint does not panic,
//! touches nothing outside the regions that the peer may write or read (the arena checks each
//! access, the guard bytes are compared), and every posted work request still completes.

use std::net::SocketAddr;

use roce::Time;
use roce::endpoint::{Connect, Endpoint, Mtu, QpState};
use roce::verbs::{Access, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, Verbs};
use roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, DEFAULT_PKEY, Deth, Ext, Headers, Opcode, Psn, Reth,
    Syndrome,
};
use roce::world::Memory;

use crate::harness::{BASE, Draw, End, Fabric, FabricConfig};

/// Layout of the victim's memory: what the peer may write, may read, and neither.
const WRITABLE: (u64, u64) = (BASE + 1000, 20_000);
const READABLE: (u64, u64) = (BASE + 40_000, 20_000);
const SECRET: (u64, u64) = (BASE + 80_000, 20_000);
/// Receives and READs of its own land here.
const LANDING: (u64, u64) = (BASE + 120_000, 20_000);

struct Victim {
    fabric: Fabric,
    end: End,
    peer: End,
    writable: MemoryRegion,
    readable: MemoryRegion,
    secret: MemoryRegion,
    landing: MemoryRegion,
    before: Vec<u8>,
    posted: usize,
}

impl Victim {
    fn new(seed: u64, draw: &mut Draw) -> Victim {
        let config = FabricConfig { arena_bytes: 200_000, seed, ..FabricConfig::default() };
        let mut fabric = Fabric::new(&config);
        let node = &mut fabric.nodes[1];
        let read_only = Access { local_write: false, remote_write: false, remote_read: true };
        let writable = node.register(WRITABLE.0, WRITABLE.1, Access::REMOTE_WRITE);
        let readable = node.register(READABLE.0, READABLE.1, read_only);
        let secret = node.register(SECRET.0, SECRET.1, Access::LOCAL_READ);
        let landing = node.register(LANDING.0, LANDING.1, Access::LOCAL);
        let before = node.arena.bytes.clone();
        let (peer, end) = fabric.pair(|connect| adjust(connect, Mtu::M256));
        let mut victim =
            Victim { fabric, end, peer, writable, readable, secret, landing, before, posted: 0 };
        for wr_id in 0..draw.below(8) {
            victim.post(wr_id, draw);
        }
        victim
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.fabric.nodes[1].endpoint
    }

    /// A receive, and a request of the victim's own.
    fn post(&mut self, wr_id: u64, draw: &mut Draw) {
        let at = draw.below(15_000);
        let len = draw.below(3000) as u32;
        let list = |region: MemoryRegion| -> SgList {
            [Sge { addr: region.addr + at, len, lkey: region.lkey }].into_iter().collect()
        };
        let (landing, secret, qpn) = (list(self.landing), list(self.secret), self.end.qpn);
        let read = SendOp::Read { remote_addr: BASE, rkey: 1 };
        let (op, sges) =
            if draw.chance(500) { (read, landing.clone()) } else { (SendOp::Send, secret) };
        let wr = SendWr { wr_id, op, sges, signaled: true, solicited: false };
        let endpoint = self.endpoint();
        endpoint.post_recv(qpn, RecvWr { wr_id, sges: landing }).unwrap();
        endpoint.post_send(qpn, wr).unwrap();
        self.posted += 2;
    }

    /// Hands the victim a packet and does what the drain loop would do with the answer.
    fn strike(&mut self, now: Time, source: SocketAddr, headers: &Headers, payload: usize) {
        let node = &mut self.fabric.nodes[1];
        let mut left = payload;
        for piece in node.endpoint.handle_packet(now, source, headers, payload) {
            assert!(piece.len > 0);
            left = left.checked_sub(piece.len as usize).expect("more placed than there is");
            node.arena.bytes_mut(piece.addr, piece.len as usize).fill(0xee);
        }
        self.listen(now);
    }

    /// What the victim sends must come from where it may be read.
    fn listen(&mut self, now: Time) {
        let node = &mut self.fabric.nodes[1];
        while let Some(transmit) = node.endpoint.poll_transmit(now) {
            let answers = transmit.headers.bth().opcode.is_read_response();
            for piece in &transmit.payload {
                node.arena.bytes(piece.addr, piece.len as usize);
                let end = piece.addr + u64::from(piece.len);
                let readable = piece.addr >= READABLE.0 && end <= READABLE.0 + READABLE.1;
                assert!(readable || !answers, "{:#x} was read by the peer", piece.addr);
            }
        }
    }

    fn check(mut self, seed: u64) {
        let after = &self.fabric.nodes[1].arena.bytes;
        let open = [WRITABLE, LANDING];
        for (at, (was, is)) in self.before.iter().zip(after).enumerate() {
            let addr = BASE + at as u64;
            let may_change = open.iter().any(|&(start, len)| addr >= start && addr < start + len);
            assert!(was == is || may_change, "seed {seed}: {addr:#x} was written");
        }
        let end = self.end;
        self.endpoint().modify_to_error(end.qpn).unwrap();
        let done = self.fabric.sent_by(end).len() + self.fabric.received_by(end).len();
        assert_eq!(done, self.posted, "seed {seed}: work requests without completions");
    }

    // ---- generators ----------------------------------------------------------------------------

    /// Addresses at, just before and just after the edges of regions, and of everything.
    fn address(&self, draw: &mut Draw) -> u64 {
        let region = draw.pick(&[WRITABLE, READABLE, SECRET, LANDING]);
        let near = draw.pick(&[region.0, region.0 + region.1, region.0 + region.1 / 2, 0]);
        near.wrapping_add(draw.below(600)).wrapping_sub(300)
    }

    fn key(&self, draw: &mut Draw) -> u32 {
        let region = draw.pick(&[self.writable, self.readable, self.secret, self.landing]);
        let key = draw.pick(&[region.rkey, region.rkey, region.rkey, region.lkey, 0, u32::MAX]);
        if draw.chance(50) { key ^ (1 << draw.below(32)) } else { key }
    }

    fn reth(&self, payload: usize, draw: &mut Draw) -> Reth {
        let exact = payload as u32;
        let len = draw.pick(&[exact, exact, exact, 0, 1, 257, 1000, 25_000, 1 << 31, u32::MAX]);
        Reth { addr: self.address(draw), rkey: self.key(draw), len }
    }

    fn aeth(&self, draw: &mut Draw) -> Aeth {
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

    fn ext(&self, opcode: Opcode, payload: usize, draw: &mut Draw) -> Ext {
        let word = draw.word();
        let atomic = AtomicEth {
            addr: self.address(draw),
            rkey: self.key(draw),
            swap_or_add: word,
            compare: word,
        };
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
        ];
        let kind = opcode.ext_kind();
        candidates.into_iter().find(|ext| ext.kind() == kind).expect("every kind is listed")
    }

    fn headers(&self, around: Psn, payload: usize, draw: &mut Draw) -> Headers {
        let opcode = draw.pick(Opcode::ALL);
        let far = Psn::new(draw.word() as u32);
        let offset = draw.below(8) as u32;
        let bth = Bth {
            opcode,
            solicited: draw.chance(500),
            mig_req: draw.chance(500),
            pad: 0,
            pkey: if draw.chance(20) { draw.word() as u16 } else { DEFAULT_PKEY },
            fecn: draw.chance(100),
            becn: draw.chance(100),
            dest_qp: self.end.qpn,
            ack_req: draw.chance(500),
            psn: draw.pick(&[around, around, around.plus(offset), around.minus(offset), far]),
        };
        Headers::new(bth, self.ext(opcode, payload, draw)).unwrap()
    }
}

fn adjust(connect: &mut Connect, mtu: Mtu) {
    connect.mtu = mtu;
    connect.max_dest_rd_atomic = 3;
    connect.timeout = 10;
}

fn payload_len(draw: &mut Draw) -> usize {
    draw.pick(&[0, 0, 1, 255, 256, 256, 256, 257, draw.clone().below(9000) as usize])
}

#[test]
fn packets_made_up_from_nothing_do_no_harm() {
    let (mut heard, mut executed) = (0, 0);
    for seed in 0..2_000 {
        let mut draw = Draw::new(seed);
        let mut victim = Victim::new(seed, &mut draw);
        let source = victim.fabric.nodes[0].path().remote;
        let (peer, end) = (victim.peer.qpn, victim.end.qpn);
        let mut expected = victim.fabric.nodes[0].endpoint.initial_psn(peer).unwrap();
        let own = victim.endpoint().initial_psn(end).unwrap();
        let mut now = Time::ZERO;
        victim.listen(now);
        for _ in 0..60 {
            now = Time::from_nanos(now.as_nanos() + draw.below(3_000_000));
            victim.endpoint().handle_timeout(now);
            let payload = payload_len(&mut draw);
            let around = if draw.chance(700) { expected } else { own };
            let headers = victim.headers(around, payload, &mut draw);
            let placed = victim.endpoint().counters().bytes_received;
            victim.strike(now, source, &headers, payload);
            // Follow what was accepted, so that later packets get past the PSN check.
            if victim.endpoint().counters().bytes_received > placed {
                expected = headers.bth().psn.next();
                executed += 1;
            }
            if victim.endpoint().qp_state(end) != Some(QpState::Rts) {
                break;
            }
            heard += 1;
        }
        victim.check(seed);
    }
    assert!(heard > 2_000, "connections ended after {heard} packets in all");
    assert!(executed > 100, "only {executed} packets got as far as memory");
}

/// Changes one thing about a packet.
fn mutate(headers: &Headers, payload: usize, victim: &Victim, draw: &mut Draw) -> (Headers, usize) {
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
    for seed in 0..400 {
        let mut draw = Draw::new(seed ^ 0x5eed);
        let mut victim = Victim::new(seed, &mut draw);
        let source = victim.fabric.nodes[0].path().remote;
        let genuine = exchange(&mut victim, &mut draw);
        victim.listen(Time::ZERO);
        for (headers, payload) in genuine {
            let (headers, payload) = match draw.chance(150) {
                true => mutate(&headers, payload, &victim, &mut draw),
                false => (headers, payload),
            };
            victim.strike(Time::ZERO, source, &headers, payload);
        }
        victim.check(seed);
    }
}

/// What the peer would send for a few requests of its own.
fn exchange(victim: &mut Victim, draw: &mut Draw) -> Vec<(Headers, usize)> {
    let peer = victim.peer;
    let (writable, readable) = (victim.writable, victim.readable);
    let node = &mut victim.fabric.nodes[0];
    let local = node.register(BASE, 60_000, Access::LOCAL);
    for wr_id in 0..10 {
        let len = draw.below(1500) as u32;
        let write = SendOp::Write { remote_addr: writable.addr, rkey: writable.rkey };
        let read = SendOp::Read { remote_addr: readable.addr, rkey: readable.rkey };
        let op = draw.pick(&[SendOp::Send, SendOp::SendImm(4), write, write, read]);
        let sges = [Sge { addr: BASE, len, lkey: local.lkey }].into_iter().collect();
        let wr = SendWr { wr_id, op, sges, signaled: true, solicited: false };
        node.endpoint.post_send(peer.qpn, wr).unwrap();
    }
    let endpoint = &mut node.endpoint;
    std::iter::from_fn(|| endpoint.poll_transmit(Time::ZERO))
        .map(|transmit| (transmit.headers, transmit.payload_len()))
        .collect()
}

#[test]
#[should_panic(expected = "C3")]
fn the_arena_refuses_what_is_not_registered() {
    let mut fabric = Fabric::new(&FabricConfig::default());
    fabric.nodes[0].register(BASE, 64, Access::LOCAL);
    fabric.nodes[0].arena.bytes_mut(BASE + 60, 8);
}
