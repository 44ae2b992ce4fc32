//! Hostile peers: connections whose other end is not a queue pair but a program that forges
//! packets, with a right ICRC, from the right address.
//!
//! Such a peer knows the PSN that the victim expects, all its keys, and everything that the
//! victim's queue pair does not allow. It starts with allowed READs, and then tries what is not:
//! out-of-order WRITEs with guessed keys, or where the queue pair or the region allows none; READs
//! without the right, without a slot, duplicated with another key, address or length, or never
//! requested; out-of-order SENDs that claim a receive far ahead. It sees the victim's responses.
//! The checks are that
//! - every READ response belongs to a READ that was requested and allowed, and has its bytes;
//! - a few guessed keys end the connection, if the right key would have granted access;
//! - nothing is written (the memory is compared at the end), and nothing outside regions is
//!   accessed;
//! - receives of a shared queue stay available to the others, who have to finish within the bound.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use roce::device;
use roce::endpoint::{Connect, QpAttr, QpConfig, QpState, Reliability};
use roce::verbs::{Access, CqId, Qpn, VerbsError, WcStatus};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, Reth, Sreth};

use super::side::{Turn, has_failed};
use super::space::Use;
use super::{Checked, Phase, Run, ensure, rights};

/// Out-of-order WRITEs with wrong keys after which the connection must have ended.
const MOST_GUESSES: u32 = 3;

/// Allowed READs, and packets sent after them.
const MOST_READS: u64 = 3;
const MOST_PACKETS: u64 = 24;

/// Longest READ, and longest pause between packets.
const MOST_BYTES: u64 = 2_000;
const PAUSE_NS: u64 = 60_000;

/// Out-of-order SENDs of one peer, each of which may take a receive.
const MOST_SENDS: u32 = 2;

/// What a hostile peer tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    /// Out-of-order WRITEs with wrong keys.
    GuessKey,
    /// Out-of-order WRITEs with a right key, but without the access right.
    WriteWithoutRight,
    /// Out-of-order SENDs for receives far ahead.
    ClaimReceive,
    /// READs in PSN order that are not allowed.
    ReadWithoutRight,
    /// READs that differ from earlier ones, or were never requested.
    ReadAgain,
}

const ATTACKS: [Attack; 5] = [
    Attack::GuessKey,
    Attack::WriteWithoutRight,
    Attack::ClaimReceive,
    Attack::ReadWithoutRight,
    Attack::ReadAgain,
];

/// A READ that was requested in its turn and is allowed.
#[derive(Clone, Copy, Debug)]
struct Granted {
    psn: Psn,
    addr: u64,
    len: u32,
}

/// A hostile peer, and the queue pair that it is connected to.
#[derive(Debug)]
pub(super) struct Intruder {
    node: u32,
    victim: u32,
    /// The victim's queue pair.
    qpn: Qpn,
    cq: CqId,
    /// A queue pair in RESET that receives the responses.
    decoy: Qpn,
    connect: Connect,
    access: Access,
    shares: bool,
    /// PSN that the victim expects.
    expected: Psn,
    granted: Vec<Granted>,
    /// Its attacks, some and not others.
    attacks: Vec<Attack>,
    reads_left: u64,
    packets_left: u64,
    guesses: u32,
    sends: u32,
    is_gone: bool,
}

impl Intruder {
    fn is_selective(&self) -> bool {
        self.connect.reliability == Reliability::Selective
    }

    fn psns(&self, len: u32) -> u32 {
        if self.is_selective() { 1 } else { len.div_ceil(self.connect.mtu.bytes()).max(1) }
    }
}

/// A packet about to be forged.
struct Forged {
    opcode: Opcode,
    psn: Psn,
    ext: Ext,
    payload: Vec<u8>,
}

impl Forged {
    fn read(psn: Psn, reth: Reth) -> Forged {
        Forged { opcode: Opcode::RcReadRequest, psn, ext: Ext::Reth(reth), payload: Vec::new() }
    }

    fn write(psn: Psn, reth: Reth) -> Forged {
        let payload = alloc::vec![0xa5; reth.len as usize];
        Forged { opcode: Opcode::RcWriteOnly, psn, ext: Ext::Reth(reth), payload }
    }
}

impl Run {
    // ---- lives ---------------------------------------------------------------------------------

    /// A hostile peer connects.
    pub(super) fn intrude(&mut self) -> Checked<()> {
        let nodes = u64::from(self.network.len());
        // Shared receives offer more to attack.
        let shared = (0..nodes as u32).find(|&node| self.pools[node as usize].is_some());
        let drawn = self.whims.below(nodes) as u32;
        let victim = shared.filter(|_| self.whims.per_mille(700)).unwrap_or(drawn);
        let node = (victim + 1 + self.whims.below(nodes - 1) as u32) % nodes as u32;
        let made = self.new_intruder(node, victim);
        let intruder = made.map_err(|error| format!("intruder: {error}"))?;
        self.network.tap(victim, intruder.decoy);
        self.intruders.push(intruder);
        let latest_ns = self.whims.pick(&[20_000, 200_000, 1_000_000]);
        let after_ns = 1 + self.whims.below(latest_ns);
        let intruder = self.intruders.len() - 1;
        self.schedule(after_ns, Turn::Attack { intruder });
        Ok(())
    }

    fn new_intruder(&mut self, node: u32, victim: u32) -> Result<Intruder, VerbsError> {
        let pool = self.pools[victim as usize].as_ref();
        let (srq, depth) = (pool.map(|pool| pool.srq), pool.map_or(0, |pool| pool.depth));
        let whims = &mut self.whims;
        let mut flag = || whims.per_mille(700);
        let access = Access { remote_write: flag(), remote_read: flag(), ..Access::ALL };
        let pairs = &self.scenario.pairs;
        let params = &pairs[whims.below(pairs.len() as u64) as usize].params;
        let (reliability, psn) =
            (whims.pick(&[Reliability::GoBackN, Reliability::Selective]), whims.word() as u32);
        let max_dest_rd_atomic = whims.pick(&[0, 2, 16]);
        let entry = self.network.node_mut(node);
        let (pd, endpoint) = (entry.pd, &mut entry.endpoint);
        let decoy_cq = endpoint.create_cq(1)?;
        let decoy = endpoint.create_qp(QpConfig::rc(pd, decoy_cq, 1, 1))?;
        let connect = Connect {
            mtu: params.mtu,
            max_dest_rd_atomic,
            reliability,
            ..Connect::new(self.network.path_to(node), decoy, Psn::new(psn))
        };
        let now = self.network.now();
        let entry = self.network.node_mut(victim);
        let (pd, endpoint) = (entry.pd, &mut entry.endpoint);
        let cq = endpoint.create_cq(2 + depth)?;
        let qpn = endpoint.create_qp(QpConfig { srq, ..QpConfig::rc(pd, cq, 1, 1) })?;
        let connect = Connect { local_psn: endpoint.query_qp(qpn)?.sq_psn, ..connect };
        device::connect(endpoint, now, qpn, &connect)?;
        let expected = connect.remote_psn;
        endpoint.modify_qp(now, qpn, &rights::attributes(access))?;
        Ok(Intruder {
            node,
            victim,
            qpn,
            cq,
            decoy,
            connect,
            access,
            shares: srq.is_some(),
            expected,
            granted: Vec::new(),
            attacks: self.draw_attacks(reliability, srq.is_some()),
            reads_left: self.whims.below(MOST_READS + 1),
            packets_left: self.whims.between(1, MOST_PACKETS),
            guesses: 0,
            sends: 0,
            is_gone: false,
        })
    }

    /// One attack, or a few, of those available in this mode.
    fn draw_attacks(&mut self, reliability: Reliability, shares: bool) -> Vec<Attack> {
        let is_selective = reliability == Reliability::Selective;
        let is_possible = |attack: &Attack| match attack {
            Attack::GuessKey | Attack::WriteWithoutRight => is_selective,
            Attack::ClaimReceive => is_selective && shares,
            Attack::ReadWithoutRight | Attack::ReadAgain => true,
        };
        if is_possible(&Attack::ClaimReceive) && self.whims.per_mille(400) {
            return Vec::from([Attack::ClaimReceive]);
        }
        let possible: Vec<Attack> = ATTACKS.into_iter().filter(is_possible).collect();
        let count = self.whims.pick(&[1, 1, 2, 3]);
        (0..count).map(|_| self.whims.pick(&possible)).collect()
    }

    /// A node restarts: its hostile peers, and those that it was to others, are gone.
    pub(super) fn forget_intruders(&mut self, node: u32) {
        let concerned = self.intruders.iter_mut();
        let concerned = concerned.filter(|one| one.node == node || one.victim == node);
        concerned.for_each(|intruder| intruder.is_gone = true);
    }

    /// The victims close their queue pairs; receives held by hostile peers are flushed.
    pub(super) fn close_intruders(&mut self) -> Checked<()> {
        let now = self.network.now();
        for index in 0..self.intruders.len() {
            let Intruder { victim, qpn, cq, is_gone, .. } = self.intruders[index];
            if is_gone {
                continue;
            }
            self.intruders[index].is_gone = true;
            let endpoint = &mut self.network.node_mut(victim).endpoint;
            let stopped = endpoint.modify_qp(now, qpn, &QpAttr::to(QpState::Error));
            stopped.map_err(|error| format!("intruder: {error}"))?;
            self.take_flushed(victim, cq)?;
            let endpoint = &mut self.network.node_mut(victim).endpoint;
            let closed = endpoint.destroy_qp(now, qpn).and_then(|()| endpoint.destroy_cq(cq));
            closed.map_err(|error| format!("intruder: {error}"))?;
        }
        Ok(())
    }

    fn take_flushed(&mut self, victim: u32, cq: CqId) -> Checked<()> {
        while let Some(done) = self.network.node_quietly(victim).endpoint.poll_cq(cq) {
            ensure!(
                done.status == WcStatus::WrFlushError,
                "C2: a hostile peer completed a receive: {done:?}"
            );
            let pool = self.pools[victim as usize].as_mut();
            let place = pool.as_ref().and_then(|pool| {
                pool.receives.iter().position(|receive| receive.wr_id == done.wr_id)
            });
            let receive = pool.zip(place).map(|(pool, at)| pool.receives.swap_remove(at));
            let receive = receive.ok_or_else(|| format!("C2: no receive was posted: {done:?}"))?;
            let memory = &self.network.node(victim).memory;
            let space = &mut self.spaces[victim as usize];
            receive.sges.iter().for_each(|sge| space.adopt(memory, sge.addr, sge.len as usize));
            space.give_all(&receive.sges);
        }
        Ok(())
    }

    // ---- packets -------------------------------------------------------------------------------

    /// The next packet of a hostile peer.
    pub(super) fn attack(&mut self, index: usize) -> Checked<()> {
        let Intruder { victim, qpn, cq, is_gone, packets_left, .. } = self.intruders[index];
        if is_gone || packets_left == 0 || !matches!(self.phase, Phase::Faulty) {
            return Ok(());
        }
        self.take_flushed(victim, cq)?;
        if has_failed(self.network.node(victim).endpoint.qp_state(qpn)) {
            return Ok(());
        }
        let guesses = self.intruders[index].guesses;
        ensure!(guesses < MOST_GUESSES, "C3: {guesses} keys were guessed, and nobody noticed");
        let intruder = &mut self.intruders[index];
        let forged = match intruder.reads_left {
            0 => {
                intruder.packets_left -= 1;
                self.forge(index)
            }
            _ => {
                intruder.reads_left -= 1;
                Some(self.ask(index, Use::Library))
            }
        };
        if let Some(forged) = forged {
            self.send_forged(index, &forged)?;
        }
        let pause_ns = 1 + self.whims.below(PAUSE_NS);
        self.schedule(pause_ns, Turn::Attack { intruder: index });
        Ok(())
    }

    fn send_forged(&mut self, index: usize, forged: &Forged) -> Checked<()> {
        let Intruder { node, victim, qpn, .. } = self.intruders[index];
        let bth = Bth {
            opcode: forged.opcode,
            solicited: false,
            mig_req: true,
            pad: (forged.payload.len().wrapping_neg() & 3) as u8,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp: qpn,
            ack_req: true,
            psn: forged.psn,
        };
        let headers = Headers::new(bth, forged.ext).map_err(|error| format!("forged: {error}"))?;
        self.network.inject(node, victim, &headers, &forged.payload);
        self.summary.forged += 1;
        Ok(())
    }

    /// A READ in PSN order. It is allowed if it is of the library and the queue pair serves any
    /// READs.
    fn ask(&mut self, index: usize, of: Use) -> Forged {
        let intruder = &mut self.intruders[index];
        let space = &self.spaces[intruder.victim as usize];
        let region = space.region(of);
        let len = self.whims.between(1, MOST_BYTES.min(region.len)) as u32;
        let addr = region.addr + self.whims.below(region.len - u64::from(len) + 1);
        let serves = intruder.access.remote_read && intruder.connect.max_dest_rd_atomic > 0;
        let psn = intruder.expected;
        if serves && of == Use::Library {
            intruder.granted.push(Granted { psn, addr, len });
            intruder.expected = psn.plus(intruder.psns(len));
        }
        Forged::read(psn, Reth { addr: space.remote(of, addr), rkey: region.rkey, len })
    }

    /// A packet that must have no effect.
    fn forge(&mut self, index: usize) -> Option<Forged> {
        let attack = self.whims.pick(&self.intruders[index].attacks);
        match attack {
            Attack::GuessKey => Some(self.guess_key(index)),
            Attack::WriteWithoutRight => self.write_without_right(index),
            Attack::ClaimReceive => self.claim_receive(index),
            Attack::ReadWithoutRight => {
                let of = self.whims.pick(&[Use::Source, Use::Foreign]);
                Some(self.ask(index, of))
            }
            Attack::ReadAgain => Some(self.read_again(index)),
        }
    }

    /// An out-of-order PSN of a packet that can be in flight.
    fn early(&mut self, index: usize) -> Psn {
        let intruder = &self.intruders[index];
        let most = u64::from(intruder.connect.window_packets) / 2;
        intruder.expected.plus(1 + self.whims.below(most) as u32)
    }

    fn guess_key(&mut self, index: usize) -> Forged {
        let psn = self.early(index);
        let intruder = &mut self.intruders[index];
        // Without the right, no key grants access, and guessing reveals nothing.
        intruder.guesses += u32::from(intruder.access.remote_write);
        let space = &self.spaces[intruder.victim as usize];
        let region = space.region(Use::Window);
        let rkey = match self.whims.below(3) {
            0 => space.stale.rkey,
            1 => region.rkey ^ 1 << self.whims.below(32),
            _ => space.region(Use::Foreign).rkey,
        };
        Forged::write(psn, Reth { addr: space.remote(Use::Window, region.addr), rkey, len: 8 })
    }

    /// An out-of-order WRITE with a right key, for which the queue pair or the region does not
    /// allow WRITE.
    fn write_without_right(&mut self, index: usize) -> Option<Forged> {
        let psn = self.early(index);
        let intruder = &self.intruders[index];
        let of = if intruder.access.remote_write { Use::Library } else { Use::Window };
        let space = &self.spaces[intruder.victim as usize];
        let region = space.region(of);
        let (addr, rkey) = (space.remote(of, region.addr), region.rkey);
        Some(Forged::write(psn, Reth { addr, rkey, len: 8 }))
    }

    /// An empty out-of-order SEND, for a receive as far ahead as possible.
    fn claim_receive(&mut self, index: usize) -> Option<Forged> {
        let psn = self.early(index);
        let intruder = &mut self.intruders[index];
        if intruder.sends == MOST_SENDS || !intruder.shares {
            return None;
        }
        intruder.sends += 1;
        let sequence = psn.distance_from(intruder.expected) as u32;
        let ext = Ext::Sreth(Sreth { sequence, offset: 0 });
        Some(Forged { opcode: Opcode::SrSendOnly, psn, ext, payload: Vec::new() })
    }

    /// A READ with a PSN before the expected one: a duplicate with another key, address or length;
    /// or one that was never requested.
    fn read_again(&mut self, index: usize) -> Forged {
        let intruder = &self.intruders[index];
        let space = &self.spaces[intruder.victim as usize];
        let library = space.region(Use::Library);
        let window = space.region(Use::Window);
        let whims = &mut self.whims;
        let number = whims.below(intruder.granted.len() as u64 + 1) as usize;
        let Some(&Granted { psn, addr, len }) = intruder.granted.get(number) else {
            let first = intruder.connect.remote_psn.minus(1 + whims.below(500) as u32);
            let addr = space.remote(Use::Library, library.addr);
            return self.again(index, first, Reth { addr, rkey: library.rkey, len: 1 });
        };
        let right = Reth { addr: space.remote(Use::Library, addr), rkey: library.rkey, len };
        let reth = match whims.below(4) {
            0 => Reth { rkey: library.rkey ^ 1 << whims.below(32), ..right },
            1 => {
                let addr = space.remote(Use::Window, window.addr);
                Reth { addr, rkey: window.rkey, ..right }
            }
            2 => Reth { addr: space.remote(Use::Library, library.addr), ..right },
            _ => Reth { len: len + whims.between(1, 4_096) as u32, ..right },
        };
        self.again(index, psn, reth)
    }

    fn again(&self, index: usize, psn: Psn, reth: Reth) -> Forged {
        if !self.intruders[index].is_selective() {
            return Forged::read(psn, reth);
        }
        let ext = Ext::RethSreth(reth, Sreth { sequence: 0, offset: 0 });
        Forged { opcode: Opcode::SrReadRequest, psn, ext, payload: Vec::new() }
    }

    // ---- what comes back -----------------------------------------------------------------------

    /// Checks the victims' responses.
    pub(super) fn watch_intruders(&mut self) -> Checked<()> {
        if self.intruders.is_empty() {
            return Ok(());
        }
        for bytes in self.network.take_tapped() {
            let parsed = Headers::parse(&bytes);
            let (headers, payload) = parsed.map_err(|error| format!("tapped: {error}"))?;
            let decoy = headers.bth().dest_qp;
            let intruder = self.intruders.iter().find(|one| one.decoy == decoy && !one.is_gone);
            if let Some(intruder) = intruder
                && headers.bth().opcode.is_read_response()
            {
                self.check_response(intruder, &headers, payload)?;
            }
        }
        Ok(())
    }

    fn check_response(
        &self,
        intruder: &Intruder,
        headers: &Headers,
        payload: &[u8],
    ) -> Checked<()> {
        let (psn, mtu) = (headers.bth().psn, u64::from(intruder.connect.mtu.bytes()));
        let its = |granted: &&Granted| {
            (0..intruder.psns(granted.len) as i32).contains(&psn.distance_from(granted.psn))
        };
        let Some(granted) = intruder.granted.iter().find(its) else {
            return Err(String::from("C3: a hostile peer's READ was answered"));
        };
        let offset = match headers.ext() {
            Ext::AethSreth(_, sreth) => u64::from(sreth.offset),
            _ => psn.distance_from(granted.psn) as u64 * mtu,
        };
        let end = offset + payload.len() as u64;
        let is_inside = end <= u64::from(granted.len);
        let space = &self.spaces[intruder.victim as usize];
        let is_right = is_inside && space.expected(granted.addr + offset, payload.len()) == payload;
        ensure!(is_right, "C3: a hostile peer's READ was answered with other bytes");
        Ok(())
    }
}
