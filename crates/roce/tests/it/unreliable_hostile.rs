//! Packets that no correct peer would send, at UC and UD queue pairs with own and shared receives.
//!
//! Whatever arrives: nothing outside receive buffers and writable regions is accessed, nothing is
//! sent back, every receive completes exactly once in the end, and a queue pair only fails when one
//! of its own receives is not writable.

use roce::Time;
use roce::endpoint::{Delivery, Endpoint, Insert, Mtu, QpAttr, QpState, SrqConfig};
use roce::verbs::{
    Access, GRH_BYTES, MULTICAST_QPN, MemoryRegion, Qpn, SrqId, Transport, WcStatus,
};
use roce::wire::{Bth, DEFAULT_PKEY, Deth, Ext, ExtKind, Headers, Opcode, Psn, Reth};
use roce::world::{Origin, Staging};

use crate::harness::{BASE, Chance, End, Network, NetworkConfig};
use crate::kit::{QKEY, first_psn, list, recv};

const LANDING: (u64, u64) = (BASE + 4096, 20_000);
const WRITABLE: (u64, u64) = (BASE + 40_000, 20_000);
const SECRET: (u64, u64) = (BASE + 80_000, 20_000);

struct Victim {
    network: Network,
    end: End,
    peer: End,
    transport: Transport,
    srq: Option<SrqId>,
    writable: MemoryRegion,
    secret: MemoryRegion,
    before: Vec<u8>,
    posted: u64,
    /// Where the next packet may continue a message.
    psn: Psn,
}

impl Victim {
    fn new(seed: u64, draw: &mut Chance) -> Victim {
        let config = NetworkConfig { arena_bytes: 120_000, seed, ..NetworkConfig::default() };
        let mut network = Network::new(&config);
        let transport = draw.pick(&[Transport::Uc, Transport::Ud]);
        let node = &mut network.nodes[1];
        let landing = node.register(LANDING.0, LANDING.1, Access::LOCAL).unwrap();
        let writable = node.register(WRITABLE.0, WRITABLE.1, Access::REMOTE_WRITE).unwrap();
        let secret = node.register(SECRET.0, SECRET.1, Access::LOCAL_READ).unwrap();
        let before = node.memory.all().to_vec();
        let srq_config = SrqConfig { pd: node.pd, max_wr: 32, limit: 0 };
        let srq = draw.per_mille(500).then(|| node.endpoint.create_srq(srq_config).unwrap());
        let (peer, end) = (network.create(0, transport, None), network.create(1, transport, srq));
        network.bring_up(end, peer, transport, Mtu::M256);
        let psn = first_psn(peer.qpn);
        let mut victim =
            Victim { network, end, peer, transport, srq, writable, secret, before, posted: 0, psn };
        for _ in 0..draw.below(20) {
            let (at, len) = (draw.below(15_000), draw.pick(&[0, 39, 40, 300, 1000, 5000]));
            victim.post(list(landing, at, len));
        }
        if draw.per_mille(100) {
            victim.post(list(secret, 0, 2000));
        }
        victim
    }

    fn post(&mut self, sges: roce::verbs::SgList) {
        let wr = recv(self.posted, sges);
        let qpn = self.end.qpn;
        match self.srq {
            Some(srq) => self.endpoint().post_srq_recv(srq, wr).unwrap(),
            None => self.endpoint().post_recv(Time::ZERO, qpn, wr).unwrap(),
        }
        self.posted += 1;
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.network.nodes[1].endpoint
    }

    fn strike(&mut self, headers: &Headers, payload: usize) {
        let source = self.network.nodes[0].path().remote;
        let origin = Origin::new(source, source.ip());
        let node = &mut self.network.nodes[1];
        let Delivery { pieces, insert, .. } =
            node.endpoint.handle_packet(Time::ZERO, &origin, headers, payload);
        let header = if insert == Insert::None { 0 } else { GRH_BYTES as usize };
        let placed: usize = pieces.iter().map(|piece| piece.len as usize).sum();
        assert!(placed == 0 || placed == payload + header, "{placed} of {payload} bytes placed");
        for piece in pieces {
            node.memory.bytes_mut(piece.addr, piece.len as usize).fill(0xee);
        }
        assert!(node.endpoint.poll_transmit(Time::ZERO).is_none(), "something was sent back");
        self.psn = headers.bth().psn.next();
    }

    /// Every receive completes once, if the queue pair has to flush them.
    fn check(mut self, seed: u64) {
        let after = self.network.nodes[1].memory.all();
        let open = [WRITABLE, LANDING];
        for (at, (was, is)) in self.before.iter().zip(after).enumerate() {
            let addr = BASE + at as u64;
            let may_change = open.iter().any(|&(start, len)| addr >= start && addr < start + len);
            assert!(was == is || may_change, "seed {seed}: {addr:#x} was written");
        }
        let end = self.end;
        let broke = self.network.state(end) == QpState::Error;
        self.endpoint().modify_qp(Time::ZERO, end.qpn, &QpAttr::to(QpState::Error)).unwrap();
        let done = self.network.received_by(end);
        let blamed = done.iter().any(|done| done.status == WcStatus::LocalProtectionError);
        assert_eq!(broke, blamed, "seed {seed}: broken without a reason");
        let in_order = done.iter().enumerate().all(|(at, done)| done.wr_id == at as u64);
        assert!(in_order, "seed {seed}: {done:?}");
        if self.srq.is_none() {
            assert_eq!(done.len() as u64, self.posted, "seed {seed}: receives without completion");
        }
    }

    // ---- generators ----------------------------------------------------------------------------

    fn ext(&self, opcode: Opcode, payload: usize, draw: &mut Chance) -> Option<Ext> {
        let near = draw.pick(&[WRITABLE.0, WRITABLE.0 + WRITABLE.1, SECRET.0, LANDING.0, 0]);
        let addr = near.wrapping_add(draw.below(600)).wrapping_sub(300);
        let keys = [self.writable.rkey, self.writable.rkey, self.secret.rkey, self.secret.lkey, 0];
        let exact = payload as u32;
        let len = draw.pick(&[exact, exact, 257, 600, 900, 25_000, 1 << 31, u32::MAX]);
        let reth = Reth { addr, rkey: draw.pick(&keys), len };
        let qkey = if draw.per_mille(900) { QKEY } else { draw.word() as u32 };
        let deth = Deth { qkey, src_qp: Qpn::new(draw.word() as u32) };
        let imm = draw.word() as u32;
        Some(match opcode.ext_kind() {
            ExtKind::None => Ext::None,
            ExtKind::Imm => Ext::Imm(imm),
            ExtKind::Reth => Ext::Reth(reth),
            ExtKind::RethImm => Ext::RethImm(reth, imm),
            ExtKind::Deth => Ext::Deth(deth),
            ExtKind::DethImm => Ext::DethImm(deth, imm),
            ExtKind::Cnp => Ext::Cnp,
            _ => return None,
        })
    }

    fn packet(&self, draw: &mut Chance) -> Option<(Headers, usize)> {
        let own: Vec<Opcode> =
            Opcode::ALL.iter().copied().filter(|&opcode| self.has(opcode)).collect();
        let opcode = if draw.per_mille(950) { draw.pick(&own) } else { draw.pick(Opcode::ALL) };
        let payload = draw.pick(&[256, 256, 256, 0, 1, 88, 255, 257, draw.clone().below(9000)]);
        let strange = [Qpn::new(0), Qpn::new(1), MULTICAST_QPN, self.peer.qpn];
        let bth = Bth {
            opcode,
            solicited: draw.per_mille(500),
            mig_req: true,
            pad: 0,
            pkey: if draw.per_mille(20) { draw.word() as u16 } else { DEFAULT_PKEY },
            fecn: false,
            becn: false,
            dest_qp: if draw.per_mille(20) { draw.pick(&strange) } else { self.end.qpn },
            ack_req: draw.per_mille(500),
            psn: if draw.per_mille(900) { self.psn } else { Psn::new(draw.word() as u32) },
        };
        let ext = self.ext(opcode, payload as usize, draw)?;
        Some((Headers::new(bth, ext).unwrap(), payload as usize))
    }

    fn has(&self, opcode: Opcode) -> bool {
        let name = if self.transport == Transport::Uc { "UC " } else { "UD " };
        opcode.name().starts_with(name)
    }
}

#[test]
fn packets_made_up_from_nothing_do_no_harm() {
    let (mut placed, mut broken) = (0, 0);
    for seed in 0..2_000 {
        let mut draw = Chance::new(seed);
        let mut victim = Victim::new(seed, &mut draw);
        for _ in 0..60 {
            if let Some((headers, payload)) = victim.packet(&mut draw) {
                victim.strike(&headers, payload);
            }
        }
        placed += u64::from(victim.endpoint().counters().bytes_received > 0);
        broken += victim.endpoint().counters().qp_errors;
        victim.check(seed);
    }
    assert!(placed > 1_000, "only {placed} victims were ever written to");
    assert!(broken > 10, "only {broken} queue pairs met a receive that cannot be written");
}
