//! The life cycle of connections: made, failed, settled, made again.

use alloc::format;
use alloc::vec::Vec;
use core::mem;

use roce::Time;
use roce::device;
use roce::endpoint::{Connect, Endpoint, QpAttr, QpConfig, QpState};
use roce::verbs::{Transport, VerbsError};
use roce::wire::Psn;
use roce::world::{AtomicOp, Path};

use super::atomics::{Attempt, Verdict, WordHistory};
use super::scenario::Params;
use super::side::{At, Effect, Open, Pair, PairState, Side, Turn, has_failed};
use super::space::{Space, Use, WORDS};
use super::{Checked, Phase, Run, ensure, rights};
use crate::faults::Fault;
use crate::memory::Arena;

impl Run {
    pub(super) fn new_space(&mut self, node: u32) -> Checked<Space> {
        let (max_len, sides) = (self.scenario.max_len, self.scenario.sides());
        let entry = self.network.node_mut(node);
        let chances = (&mut self.chance, &mut self.whims);
        Space::new(entry, max_len, sides, &self.scenario.habits, chances)
    }

    /// Starts the histories of a node's words.
    pub(super) fn start_words(&mut self, node: u32) {
        let values: Vec<u64> = (0..WORDS).map(|word| self.word(node, word)).collect();
        self.words[node as usize] = values.iter().copied().map(WordHistory::new).collect();
        self.last_values[node as usize] = values;
    }

    fn word(&self, node: u32, word: u64) -> u64 {
        let addr = self.spaces[node as usize].region(Use::Words).addr + 8 * word;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.network.node(node).memory.peek(addr, 8));
        u64::from_ne_bytes(bytes)
    }

    /// Checks that the histories explain a node's words; then these are part of the model.
    pub(super) fn check_words(&mut self, node: u32, is_alive: bool) -> Checked<()> {
        for word in 0..WORDS {
            let last = is_alive.then(|| self.word(node, word));
            self.check_word(node, word as usize, last)?;
            if let Some(last) = last {
                let addr = self.spaces[node as usize].region(Use::Words).addr + 8 * word;
                self.spaces[node as usize].put(addr, &last.to_ne_bytes());
            }
        }
        Ok(())
    }

    fn check_word(&mut self, node: u32, word: usize, last: Option<u64>) -> Checked<()> {
        let history = &self.words[node as usize][word];
        match history.judge(last) {
            Verdict::Explained => {}
            Verdict::Open => self.summary.atomics_open += history.len() as u64,
            Verdict::Impossible { explained } => {
                let all = history.len();
                return Err(format!(
                    "C2: atomics: no serial order explains more than {explained} of {all}"
                ));
            }
        }
        Ok(())
    }

    /// Adds to the history of a peer's word, unless the peer has lost it.
    pub(super) fn note_atomic(&mut self, at: At, word: usize, attempt: Attempt) -> Checked<()> {
        let peer = self.side(at.peer())?;
        let (node, is_dead) = (peer.node as usize, peer.is_dead);
        let stream = (u64::from(self.pairs[at.pair].epoch) * 64 + at.pair as u64) * 2;
        if !is_dead {
            self.words[node][word].add(stream + at.side as u64, attempt);
        }
        Ok(())
    }

    // ---- making --------------------------------------------------------------------------------

    pub(super) fn connect(&mut self, pair: usize) -> Checked<()> {
        if !matches!(self.phase, Phase::Faulty) {
            return Ok(());
        }
        let sides = self.create_sides(pair).map_err(|error| format!("create: {error}"))?;
        self.join(pair, &sides).map_err(|error| format!("connect: {error}"))?;
        let entry = &mut self.pairs[pair];
        // An outage that has already begun may last longer than all retries.
        let [a, b] = entry.nodes;
        let has_way = self.network.has_cable(a) && self.network.has_cable(b);
        entry.is_excused = !has_way || !self.network.is_connected(a, b);
        entry.sides = Some(sides);
        entry.state = PairState::Up;
        entry.epoch += 1;
        entry.is_retired = false;
        let epoch = entry.epoch;
        self.summary.connections += 1;
        for side in 0..2 {
            let after_ns = 1 + self.chance.below(5_000);
            self.schedule(after_ns, Turn::Act { at: At { pair, side }, epoch });
            self.lull(At { pair, side }, epoch)?;
        }
        Ok(())
    }

    fn create_sides(&mut self, pair: usize) -> Result<[Side; 2], VerbsError> {
        let [first, second] = [0, 1].map(|side| At { pair, side });
        Ok([self.create_side(first)?, self.create_side(second)?])
    }

    fn create_side(&mut self, at: At) -> Result<Side, VerbsError> {
        let Pair { nodes, params, .. } = &self.pairs[at.pair];
        let (node, depth, transport) = (nodes[at.side], params.depth, params.transport);
        let pool = self.pools[node as usize].as_ref();
        let pool = pool.filter(|_| params.shares_receives[at.side]);
        let (srq, extra) = (pool.map(|pool| pool.srq), pool.map_or(0, |pool| pool.depth));
        let one_cq = self.chance.per_mille(400);
        let near_wrap = self.chance.per_mille(500);
        let psn = self.chance.pick(&[0, 1 << 23]) - self.chance.below(100) as i64;
        let qkey = self.chance.word() as u32 & !(1 << 31);
        let entry = self.network.node_mut(node);
        let (pd, endpoint) = (entry.pd, &mut entry.endpoint);
        let send_cq = endpoint.create_cq(2 * depth + extra)?;
        let recv_cq = if one_cq { send_cq } else { endpoint.create_cq(depth + extra)? };
        let rc = QpConfig::rc(pd, send_cq, depth, depth);
        let qpn = endpoint.create_qp(QpConfig { transport, recv_cq, srq, ..rc })?;
        let drawn = endpoint.query_qp(qpn)?.sq_psn;
        let first_psn = if near_wrap { Psn::new(psn as u32) } else { drawn };
        let shares = srq.is_some();
        let windows = [self.new_window(node)?, self.new_window(node)?];
        let max_rd_atomic = self.pairs[at.pair].params.max_rd_atomic;
        let (access, nap) = (self.draw_access(), self.draw_nap());
        let bare = Side::new(node, qpn, [send_cq, recv_cq], windows);
        Ok(Side { first_psn, shares, qkey, max_rd_atomic, access, nap, ..bare })
    }

    fn join(&mut self, pair: usize, sides: &[Side; 2]) -> Result<(), VerbsError> {
        let now = self.network.now();
        for side in 0..2 {
            let (own, peer) = (&sides[side], &sides[1 - side]);
            if self.pairs[pair].params.transport == Transport::Ud {
                let endpoint = &mut self.network.node_mut(own.node).endpoint;
                device::start_datagrams(endpoint, now, own.qpn, own.qkey, own.first_psn)?;
                continue;
            }
            let path = self.path_to(peer.node);
            let connect = self.pairs[pair].params.connect(path, peer.qpn, peer.first_psn);
            let connect = Connect { local_psn: own.first_psn, ..connect };
            let endpoint = &mut self.network.node_mut(own.node).endpoint;
            device::connect(endpoint, now, own.qpn, &connect)?;
            endpoint.modify_qp(now, own.qpn, &rights::attributes(own.access))?;
        }
        Ok(())
    }

    /// The path to a node, with the hop limit of the seed's network.
    pub(super) fn path_to(&self, node: u32) -> Path {
        let path = self.network.path_to(node);
        let conditions = self.scenario.conditions.as_ref();
        Path {
            hop_limit: conditions.map_or(path.hop_limit, |conditions| conditions.hop_limit),
            ..path
        }
    }

    // ---- breaking ------------------------------------------------------------------------------

    fn has_failed(&self, side: &Side) -> bool {
        side.is_dead
            || side.is_abandoned
            || has_failed(self.network.node(side.node).endpoint.qp_state(side.qpn))
    }

    /// Whether it has failed, or only stopped sending.
    fn has_stopped(&self, side: &Side) -> bool {
        let state = self.network.node(side.node).endpoint.qp_state(side.qpn);
        self.has_failed(side) || state == Some(QpState::Sqe)
    }

    /// Notices that a connection failed, and that both of its sides are finished.
    pub(super) fn look_after(&mut self, pair: usize) -> Checked<()> {
        let Some(sides) = &self.pairs[pair].sides else {
            return Ok(());
        };
        let failed = [self.has_failed(&sides[0]), self.has_failed(&sides[1])];
        let stopped = [self.has_stopped(&sides[0]), self.has_stopped(&sides[1])];
        if stopped == [false, false] {
            return Ok(());
        }
        if failed == [false, false] && self.may_recover(pair) {
            let sides = (0..2).filter(|&side| stopped[side]);
            return sides.map(|side| At { pair, side }).try_for_each(|at| self.recover(at));
        }
        if self.pairs[pair].state == PairState::Up {
            self.begin_breaking(pair)?;
        }
        if failed == [true, true] { self.settle(pair) } else { Ok(()) }
    }

    fn begin_breaking(&mut self, pair: usize) -> Checked<()> {
        let excused = self.pairs[pair].is_excused || self.scenario.is_harsh;
        ensure!(excused, "a connection broke for no reason. {}", self.describe());
        self.pairs[pair].state = PairState::Breaking;
        self.pairs[pair].is_excused = true;
        let is_closing = matches!(self.phase, Phase::Closing);
        self.summary.broken += u64::from(!is_closing && !self.pairs[pair].is_retired);
        let is_reliable = self.pairs[pair].params.is_reliable();
        let epoch = self.pairs[pair].epoch;
        for side in 0..2 {
            self.resume_now(At { pair, side })?;
            let patient = is_reliable && self.chance.per_mille(500);
            let after_ns = match patient {
                true => self.patience_ns(&self.pairs[pair]),
                false => self.chance.below(2_000_000),
            };
            self.schedule(after_ns, Turn::GiveUp { at: At { pair, side }, epoch, patient });
        }
        Ok(())
    }

    /// A program ends its side of a failed connection. With work outstanding, the transport must
    /// have failed on its own after the time of all its retries.
    pub(super) fn give_up(&mut self, at: At, epoch: u32, patient: bool) -> Checked<()> {
        let pair = &self.pairs[at.pair];
        if pair.epoch != epoch || pair.state != PairState::Breaking {
            return Ok(());
        }
        self.collect_side(at)?;
        let side = self.side(at)?;
        if self.has_failed(side) {
            return Ok(());
        }
        let waits = side.sends.iter().any(|send| send.signaled);
        ensure!(!(patient && waits), "retries should have run out. {}", self.describe());
        self.end(at)?;
        self.look_after(at.pair)
    }

    /// The programs of a connection end it, to begin another one.
    pub(super) fn retire(&mut self, at: At) -> Checked<()> {
        let pair = self.pair_mut(at);
        pair.is_excused = true;
        pair.is_retired = true;
        self.end(at)?;
        self.look_after(at.pair)
    }

    /// A program ends its side: it polls what is completed or flushed, or abandons it.
    fn end(&mut self, at: At) -> Checked<()> {
        self.stop(at)?;
        let abandons = self.scenario.habits.abandons;
        if self.whims.per_mille(abandons) { self.abandon(at) } else { self.collect_side(at) }
    }

    fn stop(&mut self, at: At) -> Checked<()> {
        let side = self.side(at)?;
        let (node, qpn) = (side.node, side.qpn);
        let now = self.network.now();
        let to_error = QpAttr::to(QpState::Error);
        let stopped = self.network.node_mut(node).endpoint.modify_qp(now, qpn, &to_error);
        stopped.map_err(|error| format!("modify to ERROR: {error}"))
    }

    /// No more changes are possible: checks what was left open.
    fn settle(&mut self, pair: usize) -> Checked<()> {
        for side in 0..2 {
            self.collect_side(At { pair, side })?;
            self.check_flushed(At { pair, side })?;
        }
        for side in 0..2 {
            self.check_delivered(At { pair, side })?;
        }
        let Some(sides) = self.pairs[pair].sides.take() else {
            return Ok(());
        };
        let now = self.network.now();
        for side in sides.iter().filter(|side| !side.is_dead) {
            let endpoint = &mut self.network.node_mut(side.node).endpoint;
            destroy(now, endpoint, side)?;
            for window in &side.windows {
                let slot = self.drop_window(side.node, window)?;
                let held = slot.map(|(addr, len)| (side.node, addr, len));
                self.pairs[pair].held.extend(held);
            }
        }
        let sharing = sides.iter().filter(|side| side.shares && !side.is_dead);
        sharing.for_each(|side| self.adopt_pool(side.node));
        let dead = sides.iter().filter(|side| side.is_dead).map(|side| side.node);
        self.settle_memory(pair, &dead.collect::<Vec<u32>>())?;
        self.pairs[pair].state = PairState::Down;
        let after_ns = self.chance.below(500_000);
        self.schedule(after_ns, Turn::Connect { pair });
        Ok(())
    }

    /// Signaled sends and all receives have completed. What is left had succeeded unsignaled.
    fn check_flushed(&mut self, at: At) -> Checked<()> {
        self.collect_events(self.side(at)?.node)?;
        let side = self.side_mut(at)?;
        if side.is_dead || side.is_abandoned {
            return Ok(());
        }
        ensure!(side.last_wqe == side.shares, "nothing said that no more receives are taken");
        let silent = side.sends.iter().all(|send| !send.signaled);
        ensure!(silent, "C2: signaled sends were not flushed");
        ensure!(side.receives.is_empty(), "C2: receives were not flushed");
        let sends = mem::take(&mut side.sends);
        sends.into_iter().try_for_each(|send| self.succeeded(at, send, None))
    }

    /// Every message reported as delivered to the sender was received.
    fn check_delivered(&mut self, at: At) -> Checked<()> {
        let (sender, receiver) = (self.side(at)?, self.side(at.peer())?);
        let lost = sender.delivered.saturating_sub(receiver.received);
        let may_lose =
            receiver.is_dead || receiver.is_abandoned || !self.pairs[at.pair].params.is_reliable();
        ensure!(lost == 0 || may_lose, "C2: {lost} acknowledged messages were lost");
        Ok(())
    }

    fn settle_memory(&mut self, pair: usize, dead: &[u32]) -> Checked<()> {
        for Open { node, addr, bytes, any } in mem::take(&mut self.pairs[pair].open) {
            if dead.contains(&node) {
                continue;
            }
            let (space, memory) =
                (&mut self.spaces[node as usize], &self.network.node(node).memory);
            match any {
                true => space.adopt(memory, addr, bytes.len()),
                false => space.settle(memory, addr, &bytes)?,
            }
        }
        for (node, addr, len) in mem::take(&mut self.pairs[pair].held) {
            if !dead.contains(&node) {
                self.spaces[node as usize].give(addr, len);
            }
        }
        Ok(())
    }

    // ---- faults from outside -------------------------------------------------------------------

    /// Connections of a node may fail from now on.
    pub(super) fn excuse_node(&mut self, node: u32) {
        let concerned = self.pairs.iter_mut().filter(|pair| pair.nodes.contains(&node));
        concerned.for_each(|pair| pair.is_excused = true);
    }

    /// A node loses all state. Its peers have to find out.
    pub(super) fn restart(&mut self, node: u32) -> Checked<()> {
        self.note_unanswered(node)?;
        self.check_words(node, false)?;
        self.summary.add_endpoint(self.network.node(node).endpoint.counters());
        let (max_len, sides) = (self.scenario.max_len, self.scenario.sides());
        let arena = Arena::new(Space::arena_bytes(max_len, sides), &mut self.chance);
        self.network.restart(node, arena);
        self.plant(node);
        self.spaces[node as usize] = self.new_space(node)?;
        self.pools[node as usize] = self.new_pool(node)?;
        self.start_words(node);
        self.excuse_node(node);
        self.forget_intruders(node);
        let mut felt = false;
        for pair in 0..self.pairs.len() {
            felt |= self.kill_sides(pair, node)?;
            self.look_after(pair)?;
        }
        if felt {
            self.network.count_effect(Fault::Restart);
        }
        Ok(())
    }

    /// Atomics on the words of a node that ends: it is unknown whether they were executed.
    fn note_unanswered(&mut self, node: u32) -> Checked<()> {
        for pair in 0..self.pairs.len() {
            for side in 0..2 {
                let (at, nodes) = (At { pair, side }, self.pairs[pair].nodes);
                if nodes[1 - side] != node || self.side(at).is_err() {
                    continue;
                }
                for (word, op) in unanswered(self.side(at)?) {
                    self.note_atomic(at, word, Attempt { op, former: None })?;
                }
            }
        }
        Ok(())
    }

    /// The work requests of a restarted node are gone; their effects elsewhere may have happened.
    /// True if a peer had work outstanding towards it.
    fn kill_sides(&mut self, pair: usize, node: u32) -> Checked<bool> {
        let nodes = self.pairs[pair].nodes;
        let mut felt = false;
        for side in (0..2).filter(|&side| nodes[side] == node) {
            let at = At { pair, side };
            let Ok(own) = self.side_mut(at) else {
                continue;
            };
            own.is_dead = true;
            own.receives.clear();
            let sends = mem::take(&mut own.sends);
            sends.into_iter().try_for_each(|send| self.failed(at, send))?;
            felt |= !self.side(at.peer())?.sends.is_empty();
        }
        self.pairs[pair].open.retain(|open| open.node != node);
        self.pairs[pair].held.retain(|(held, ..)| *held != node);
        Ok(felt)
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Closes every queue pair; unused receives are flushed. Unreliable ones stay until their
    /// farewell.
    pub(super) fn close(&mut self) -> Checked<()> {
        self.phase = Phase::Closing;
        self.close_pairs(Params::is_reliable)?;
        self.close_intruders()
    }

    pub(super) fn close_pairs(&mut self, concerns: impl Fn(&Params) -> bool) -> Checked<()> {
        for pair in 0..self.pairs.len() {
            let entry = &self.pairs[pair];
            if entry.state != PairState::Up || !concerns(&entry.params) {
                continue;
            }
            self.pairs[pair].is_excused = true;
            for side in 0..2 {
                self.end(At { pair, side })?;
            }
            self.look_after(pair)?;
        }
        Ok(())
    }
}

/// Atomics of a side that have not completed, in order.
fn unanswered(side: &Side) -> Vec<(usize, AtomicOp)> {
    let effects = side.sends.iter().map(|send| &send.effect);
    let atomics = effects.filter_map(|effect| match effect {
        Effect::Atomic { word, op, .. } => Some((*word, *op)),
        _ => None,
    });
    atomics.collect()
}

/// No completion outlives its queue pair.
fn destroy(now: Time, endpoint: &mut Endpoint, side: &Side) -> Checked<()> {
    let failed = |error: VerbsError| format!("destroy: {error}");
    endpoint.destroy_qp(now, side.qpn).map_err(failed)?;
    for cq in [side.send_cq, side.recv_cq] {
        let left = endpoint.poll_cq(cq);
        ensure!(left.is_none(), "C2: a completion of a queue pair that is no more: {left:?}");
    }
    endpoint.destroy_cq(side.send_cq).map_err(failed)?;
    match side.recv_cq == side.send_cq {
        true => Ok(()),
        false => endpoint.destroy_cq(side.recv_cq).map_err(failed),
    }
}
