//! The history checker: what each completion must be, given what was posted.
//!
//! Sends complete in posting order. An unsignaled one has succeeded when a later one completes, and
//! its bytes are checked then. The first bad completion ends the connection: from then on
//! everything is flushed, and the effects of outstanding requests are left open until both queue
//! pairs are gone.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use roce::verbs::{Completion, Qpn, Sge, WcStatus};

use super::atomics::Attempt;
use super::side::{Announced, At, Effect, Holder, Open, PostedReceive, PostedSend};
use super::space::{gather, pieces};
use super::{Checked, Run, Sabotage, ensure};

impl Run {
    /// Takes every completion of the nodes that ran, and handles connections that failed.
    pub(super) fn collect(&mut self) -> Checked<()> {
        for pair in 0..self.pairs.len() {
            let nodes = self.pairs[pair].nodes;
            if !self.network.touched().iter().any(|node| nodes.contains(node)) {
                continue;
            }
            for (side, node) in nodes.into_iter().enumerate() {
                self.collect_events(node)?;
                self.wake(node);
                self.collect_if_awake(At { pair, side })?;
            }
            self.look_after(pair)?;
        }
        Ok(())
    }

    pub(super) fn collect_side(&mut self, at: At) -> Checked<()> {
        let Ok(side) = self.side(at) else {
            return Ok(());
        };
        if side.is_dead || side.is_abandoned {
            return Ok(());
        }
        let (node, qpn, cqs) = (side.node, side.qpn, [side.send_cq, side.recv_cq]);
        let mut found = Vec::new();
        for cq in cqs {
            let endpoint = &mut self.network.node_quietly(node).endpoint;
            found.extend(core::iter::from_fn(|| endpoint.poll_cq(cq)));
        }
        self.sabotage_completions(&mut found);
        self.check_completions(at, qpn, found)
    }

    pub(super) fn check_completions(
        &mut self,
        at: At,
        qpn: Qpn,
        found: Vec<Completion>,
    ) -> Checked<()> {
        for done in found {
            ensure!(done.qpn == qpn, "C2: completion of another queue pair: {done:?}");
            self.summary.completions += 1;
            self.summary.failures += u64::from(done.status != WcStatus::Success);
            let checked = match done.wr_id & 1 {
                0 => self.check_send(at, &done),
                _ => self.check_receive(at, &done),
            };
            checked.map_err(|what| format!("C2: {what}: {done:?}"))?;
            self.side_mut(at)?.backoff_ns = 0;
        }
        Ok(())
    }

    fn sabotage_completions(&mut self, found: &mut Vec<Completion>) {
        match self.options.sabotage {
            Sabotage::Completion if self.chance.per_mille(50) => drop(found.pop()),
            Sabotage::Order => found.reverse(),
            _ => {}
        }
    }

    // ---- sends ---------------------------------------------------------------------------------

    fn check_send(&mut self, at: At, done: &Completion) -> Checked<()> {
        loop {
            let side = self.side_mut(at)?;
            let Some(posted) = side.sends.pop_front() else {
                return Err(String::from("nothing was posted for it"));
            };
            if posted.wr_id == done.wr_id {
                return self.check_this_send(at, posted, done);
            }
            ensure!(!posted.signaled, "{:#x} should have completed first", posted.wr_id);
            ensure!(side.send_errors == 0, "{:#x} should have been flushed first", posted.wr_id);
            self.succeeded(at, posted, None)?;
        }
    }

    fn check_this_send(&mut self, at: At, posted: PostedSend, done: &Completion) -> Checked<()> {
        let pair = &self.pairs[at.pair];
        let may_give_up = pair.params.is_reliable() && (self.scenario.is_harsh || pair.is_excused);
        let side = self.side_mut(at)?;
        let is_first = side.send_errors == 0;
        // READs before a refused request whose responses were lost are flushed before it.
        let has_cause = !side.send_ended;
        if done.status == WcStatus::Success {
            ensure!(is_first, "a success after an error");
            ensure!(posted.signaled, "nobody asked for it");
            ensure!(posted.must == WcStatus::Success, "it should end as {:?}", posted.must);
            ensure!(posted.opcode == done.opcode, "it was a {:?}", posted.opcode);
            return self.succeeded(at, posted, Some(done.byte_len));
        }
        side.send_errors += 1;
        let is_flushed = done.status == WcStatus::WrFlushError;
        side.send_ended |= !is_flushed;
        let legal = match done.status {
            WcStatus::WrFlushError => true,
            WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded => is_first && may_give_up,
            status => has_cause && status == posted.must,
        };
        ensure!(legal, "it cannot end like this (it should as {:?})", posted.must);
        self.failed(at, posted)
    }

    /// A send has completed successfully.
    pub(super) fn succeeded(
        &mut self,
        at: At,
        posted: PostedSend,
        byte_len: Option<u32>,
    ) -> Checked<()> {
        ensure!(posted.must == WcStatus::Success, "{:?} was to be the end", posted.must);
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        let node = self.side(at)?.node;
        let peer = self.side(at.peer())?;
        let (peer_node, peer_is_dead) = (peer.node, peer.is_dead);
        self.side_mut(at)?.delivered += u64::from(posted.message.is_some());
        self.overwrite(node, &posted.volatile);
        match posted.effect {
            Effect::None => Ok(()),
            Effect::Write { .. } | Effect::Granted { .. } if peer_is_dead => Ok(()),
            Effect::Granted { window, target, bytes } => {
                self.check_written(peer_node, target, &bytes)?;
                self.granted_done(at.peer(), window)
            }
            Effect::Former { landing, bytes, repeated } => {
                self.check_former(at, &landing, &bytes, repeated)
            }
            Effect::FormerWord { landing, word, repeated } => {
                self.check_former_word(at, landing, word, repeated)
            }
            Effect::Bind(window) => self.bound(at, window),
            Effect::Invalidate(window) => self.invalidated(at, window),
            Effect::Write { target, bytes, .. } if !is_reliable => {
                let pair = self.pair_mut(at);
                pair.held.push((peer_node, target, bytes.len() as u32));
                pair.open.push(Open { node: peer_node, addr: target, bytes, any: false });
                Ok(())
            }
            Effect::Write { target, bytes, held_by: Holder::Write } => {
                self.spaces[peer_node as usize].put(target, &bytes);
                Ok(())
            }
            Effect::Write { target, bytes, held_by } => {
                self.check_written(peer_node, target, &bytes)?;
                if held_by == Holder::Own {
                    self.spaces[peer_node as usize].give(target, bytes.len() as u32);
                }
                Ok(())
            }
            Effect::Read { landing, bytes, source, lends_landing } => {
                let len = bytes.len() as u32;
                ensure!(byte_len.is_none_or(|told| told == len), "{len} bytes were to be read");
                self.check_landed(node, &landing, &bytes)?;
                if !lends_landing {
                    self.spaces[node as usize].give_all(&landing);
                }
                if let Some((addr, len)) = source.filter(|_| !peer_is_dead) {
                    self.spaces[peer_node as usize].give(addr, len);
                }
                Ok(())
            }
            Effect::Atomic { landing, word, op } => {
                ensure!(byte_len.is_none_or(|told| told == 8), "an atomic brings 8 bytes");
                let former = self.read_word(node, landing.addr);
                self.last_values[peer_node as usize][word] = op.apply(former);
                self.spaces[node as usize].put(landing.addr, &former.to_ne_bytes());
                self.spaces[node as usize].give(landing.addr, landing.len);
                self.summary.atomics += 1;
                self.note_atomic(at, word, Attempt { op, former: Some(former) })
            }
        }
    }

    pub(super) fn read_word(&self, node: u32, addr: u64) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(self.network.node(node).memory.peek(addr, 8));
        u64::from_ne_bytes(word)
    }

    /// The bytes of a WRITE have arrived; from now on they are part of the model.
    fn check_written(&mut self, node: u32, addr: u64, bytes: &[u8]) -> Checked<()> {
        let there = self.network.node(node).memory.peek(addr, bytes.len());
        ensure!(there == bytes, "the WRITE's {} bytes are not at {addr:#x}", bytes.len());
        self.summary.bytes_checked += bytes.len() as u64;
        self.spaces[node as usize].put(addr, bytes);
        Ok(())
    }

    pub(super) fn check_landed(&mut self, node: u32, list: &[Sge], bytes: &[u8]) -> Checked<()> {
        let there = gather(&self.network.node(node).memory, list, bytes.len());
        if there != bytes {
            let at = there.iter().zip(bytes).position(|(a, b)| a != b).unwrap_or(0);
            return Err(format!("{} bytes landed, wrong from byte {at} on", bytes.len()));
        }
        self.summary.bytes_checked += bytes.len() as u64;
        let space = &mut self.spaces[node as usize];
        space.put_list(list, bytes);
        Ok(())
    }

    /// A program may reuse its buffers as soon as the request has completed, and does.
    fn overwrite(&mut self, node: u32, list: &[Sge]) {
        for sge in list {
            let mut bytes = alloc::vec![0; sge.len as usize];
            self.chance.fill(&mut bytes);
            self.spaces[node as usize].put(sge.addr, &bytes);
            self.network.node_quietly(node).memory.poke(sge.addr, &bytes);
        }
        self.spaces[node as usize].give_all(list);
    }

    /// A failed send: its effects may be partial.
    pub(super) fn failed(&mut self, at: At, posted: PostedSend) -> Checked<()> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let volatile = posted.volatile.iter().map(|sge| (node, sge.addr, sge.len));
        self.pair_mut(at).held.extend(volatile);
        match posted.effect {
            Effect::None | Effect::Bind(_) | Effect::Invalidate(_) => {}
            Effect::Former { landing, .. } => self.leave_any(at, node, &landing),
            Effect::FormerWord { landing, .. } => self.leave_any(at, node, &[landing]),
            Effect::Granted { target, bytes, .. } => {
                self.pair_mut(at).open.push(Open { node: peer, addr: target, bytes, any: false });
            }
            Effect::Write { target, bytes, held_by } => {
                let slot = (peer, target, bytes.len() as u32);
                let pair = self.pair_mut(at);
                pair.held.extend((held_by == Holder::Own).then_some(slot));
                let any = held_by == Holder::Write;
                pair.open.push(Open { node: peer, addr: target, bytes, any });
            }
            Effect::Read { landing, bytes, source, lends_landing } => {
                self.leave_open(at, node, &landing, &bytes, !lends_landing);
                let source = source.map(|(addr, len)| (peer, addr, len));
                self.pair_mut(at).held.extend(source);
            }
            Effect::Atomic { landing, word, op } => {
                let bytes = Vec::from([0; 8]);
                let pair = self.pair_mut(at);
                pair.held.push((node, landing.addr, landing.len));
                pair.open.push(Open { node, addr: landing.addr, bytes, any: true });
                self.note_atomic(at, word, Attempt { op, former: None })?;
            }
        }
        Ok(())
    }

    fn leave_open(&mut self, at: At, node: u32, list: &[Sge], bytes: &[u8], holds: bool) {
        let pair = self.pair_mut(at);
        for (sge, piece) in pieces(list, bytes) {
            pair.held.extend(holds.then_some((node, sge.addr, sge.len)));
            pair.open.push(Open { node, addr: sge.addr, bytes: piece.to_vec(), any: false });
        }
    }

    // ---- receives ------------------------------------------------------------------------------

    fn check_receive(&mut self, at: At, done: &Completion) -> Checked<()> {
        let receive = self.take_receive(at, done.wr_id)?;
        if !self.pairs[at.pair].params.is_reliable() {
            return self.check_heard(at, &receive, done);
        }
        if done.status != WcStatus::Success {
            return self.check_failed_receive(at, &receive, done.status);
        }
        let side = self.side_mut(at)?;
        ensure!(side.receive_errors == 0, "a success after an error");
        let Some(message) = side.announced.pop_front() else {
            return Err(String::from("nothing was sent for it"));
        };
        let number = message.number;
        ensure!(side.fails_at != Some(number), "message {number} does not fit its receive");
        side.received += 1;
        check_told(&message, done)?;
        let node = side.node;
        if let Some(rkey) = message.invalidates {
            self.key_invalidated(at, rkey)?;
        }
        match message.target {
            None => self.check_landed_front(at, &receive, &message.bytes),
            Some(addr) => {
                self.check_landed_front(at, &receive, &[])?;
                self.check_written(node, addr, &message.bytes)
            }
        }
    }

    /// The message fills the front of the receive; the rest keeps its bytes, unless the receive may
    /// have been used before: by out-of-order packets of a message that was never completed.
    fn check_landed_front(&mut self, at: At, receive: &PostedReceive, bytes: &[u8]) -> Checked<()> {
        let (node, shares) = (self.side(at)?.node, self.side(at)?.shares);
        let memory = &self.network.node(node).memory;
        let there = gather(memory, &receive.sges, bytes.len());
        ensure!(there == bytes, "the receive holds other bytes than were sent");
        self.summary.bytes_checked += bytes.len() as u64;
        let space = &mut self.spaces[node as usize];
        space.put_list(&receive.sges, bytes);
        for sge in receive.sges.iter().filter(|_| shares) {
            space.adopt(memory, sge.addr, sge.len as usize);
        }
        space.give_all(&receive.sges);
        Ok(())
    }

    fn check_failed_receive(
        &mut self,
        at: At,
        receive: &PostedReceive,
        status: WcStatus,
    ) -> Checked<()> {
        let is_selective = self.pairs[at.pair].params.is_selective();
        let side = self.side_mut(at)?;
        let is_first = side.receive_errors == 0;
        side.receive_errors += 1;
        // In order, only the oldest message can have begun to arrive.
        let may_hold = is_first || is_selective;
        let message = side.announced.pop_front();
        let too_long = message.as_ref().is_some_and(|m| side.fails_at == Some(m.number));
        let legal = match status {
            WcStatus::WrFlushError => true,
            WcStatus::LocalLengthError => is_first && too_long,
            _ => false,
        };
        ensure!(legal, "it cannot end like this");
        ensure!(may_hold || !side.shares, "a shared receive that it had not taken");
        let (node, shares) = (side.node, side.shares);
        if shares {
            self.leave_any(at, node, &receive.sges);
            return Ok(());
        }
        let partly = message.filter(|message| may_hold && message.target.is_none());
        let bytes = partly.map(|message| message.bytes).unwrap_or_default();
        self.leave_open(at, node, &receive.sges, &bytes, true);
        Ok(())
    }
}

/// Opcode, immediate, length and solicited bit are those of the message.
fn check_told(message: &Announced, done: &Completion) -> Checked<()> {
    let told = (done.opcode, done.imm, done.byte_len as usize, done.solicited);
    let wanted = (message.opcode, message.imm, message.bytes.len(), message.solicited);
    ensure!(told == wanted, "it should be {wanted:?}");
    let key = message.invalidates;
    ensure!(done.invalidated == key, "it should have taken {key:?} away");
    Ok(())
}
