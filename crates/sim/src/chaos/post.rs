//! A program's turn: receives and sends are posted, and their expected results recorded.
//!
//! A program knows what its peer has posted (the two are one simulation), so it can send messages
//! that fit, or that just do not. The requests are drawn in [`draft`](super::draft).

use alloc::format;
use alloc::vec::Vec;

use roce::direct::Posted;
use roce::verbs::{Datagram, GRH_BYTES, RecvWr, SendOp, SendWr, Transport, WcOpcode, WcStatus};

use super::draft::{Draft, RETIRE_AFTER};
use super::scenario::Kind;
use super::side::{Announced, At, PairState, PostedReceive, PostedSend, Turn};
use super::space::SINKS;
use super::{Checked, MAX_BACKOFF_NS, Phase, Run};

impl Run {
    /// A program's turn: some receives, some sends, and a pause.
    pub(super) fn act(&mut self, at: At, epoch: u32) -> Checked<()> {
        let pair = &self.pairs[at.pair];
        let is_closing = matches!(self.phase, Phase::Closing);
        if pair.state != PairState::Up || pair.epoch != epoch || is_closing {
            return Ok(());
        }
        if self.side(at)?.is_abandoned {
            return Ok(());
        }
        if self.side(at)?.posted >= RETIRE_AFTER && self.may_retire(at) {
            return self.retire(at);
        }
        self.maybe_drain(at, epoch)?;
        let mut posted = self.post_receives(at)?;
        if matches!(self.phase, Phase::Faulty) {
            for _ in 0..self.chance.below(4) {
                posted |= self.post_send(at)?;
            }
        }
        let think_ns = 1 + self.chance.below(self.pairs[at.pair].params.think_ns);
        let side = self.side_mut(at)?;
        side.backoff_ns =
            if posted { think_ns } else { (2 * side.backoff_ns).clamp(think_ns, MAX_BACKOFF_NS) };
        let pause = side.backoff_ns;
        self.schedule(pause, Turn::Act { at, epoch });
        Ok(())
    }

    // ---- receives ------------------------------------------------------------------------------

    fn post_receives(&mut self, at: At) -> Checked<bool> {
        let (depth, eagerness) = {
            let params = &self.pairs[at.pair].params;
            (params.depth as usize, params.eagerness)
        };
        if self.side(at)?.shares {
            return self.refill(self.side(at)?.node, eagerness);
        }
        let is_healing = matches!(self.phase, Phase::Healing(_));
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        let mut posted = false;
        while self.side(at)?.receives.len() < depth {
            let side = self.side(at)?;
            let due = side.announced.get(side.receives.len()).filter(|_| is_reliable);
            let due = due.map(|message| message.bytes.len() as u32);
            let wanted = if is_healing { due.is_some() } else { self.chance.per_mille(eagerness) };
            if !wanted || !self.post_receive(at, due)? {
                break;
            }
            posted = true;
        }
        Ok(posted)
    }

    /// Posts a receive for the message of this length that is due, or for a possible one.
    pub(super) fn post_receive(&mut self, at: At, due: Option<u32>) -> Checked<bool> {
        let side = self.side(at)?;
        let node = side.node;
        let held: u64 = side.receives.iter().map(|receive| u64::from(receive.capacity)).sum();
        let capacity = match due {
            Some(len) => len + self.chance.pick(&[0, 0, 1, 40]),
            None => self.draw_len(at) + self.route_header_bytes(at),
        };
        let quota: u64 = 2 * self.scenario.max_len;
        if due.is_none() && held + u64::from(capacity) > quota {
            return Ok(false);
        }
        let space = &mut self.spaces[node as usize];
        let Some(sges) = space.take_list(SINKS, capacity, &mut self.chance) else {
            return Ok(false);
        };
        let wr_id = self.fresh_id(true);
        let side = self.side_mut(at)?;
        let qpn = side.qpn;
        side.receives_posted += 1;
        side.receives.push_back(PostedReceive { wr_id, sges: sges.clone(), capacity });
        self.summary.receives += 1;
        let now = self.network.now();
        let endpoint = &mut self.network.node_mut(node).endpoint;
        let posted = endpoint.post_recv(now, qpn, RecvWr { wr_id, sges });
        posted.map_err(|error| format!("post_recv: {error}"))?;
        Ok(true)
    }

    /// Room in a receive besides the message.
    fn route_header_bytes(&self, at: At) -> u32 {
        let is_ud = self.pairs[at.pair].params.transport == Transport::Ud;
        if is_ud { GRH_BYTES } else { 0 }
    }

    /// Odd for receives, even for sends, and never reused.
    pub(super) fn fresh_id(&mut self, is_receive: bool) -> u64 {
        self.next_id += 1;
        self.chance.word() << 40 | self.next_id << 1 | u64::from(is_receive)
    }

    // ---- sends ---------------------------------------------------------------------------------

    fn post_send(&mut self, at: At) -> Checked<bool> {
        let depth = self.pairs[at.pair].params.depth as usize;
        if self.side(at)?.sends.len() >= depth {
            return Ok(false);
        }
        let kind = self.draw_kind(at);
        let kind = self.permitted(at, kind)?;
        let draft = match kind {
            Kind::Send | Kind::SendImm => self.draft_send(at, kind)?,
            Kind::Write | Kind::WriteImm => self.draft_write(at, kind)?,
            Kind::Read => self.draft_read(at)?,
            Kind::ReadSend => return self.post_read_send(at),
            Kind::ReadThenChange => return self.post_read_then_change(at),
            Kind::Atomic => self.draft_atomic(at)?,
            Kind::Bind => self.draft_bind(at)?,
            Kind::WindowWrite => self.draft_window_write(at)?,
            Kind::SendInvalidate => self.draft_send_invalidate(at)?,
            Kind::LocalInvalidate => self.draft_local_invalidate(at)?,
            Kind::Trespass => self.draft_trespass(at)?,
            Kind::LocalTrespass => self.draft_local_trespass(at)?,
        };
        let Some(draft) = draft else {
            return Ok(false);
        };
        self.submit(at, draft)?;
        Ok(true)
    }

    fn draw_kind(&mut self, at: At) -> Kind {
        let is_ud = self.pairs[at.pair].params.transport == Transport::Ud;
        if self.chance.per_mille(self.scenario.trespass) && !is_ud {
            return self.chance.pick(&[Kind::Trespass, Kind::Trespass, Kind::LocalTrespass]);
        }
        let kind = self.chance.pick(&self.pairs[at.pair].params.kinds);
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        let overtakes = is_reliable && self.whims.per_mille(self.scenario.habits.overtakes);
        if overtakes { Kind::ReadThenChange } else { kind }
    }

    pub(super) fn submit(&mut self, at: At, draft: Draft) -> Checked<()> {
        let Draft { op, opcode, sges, volatile, effect, mut must, signaled, fence, tells } = draft;
        let fence = fence || self.chance.per_mille(30);
        let params = &self.pairs[at.pair].params;
        let (depth, often) = (params.depth as usize, params.signaled);
        let side = self.side(at)?;
        let (node, qpn, is_last) = (side.node, side.qpn, side.sends.len() + 1 >= depth);
        let signaled = signaled || is_last || self.chance.per_mille(often);
        let solicited = tells.is_some() && self.chance.per_mille(200);
        let to = self.datagram(at)?;
        let is_secret = to.is_some_and(|(_, is_secret)| is_secret);
        let message = match tells {
            Some(tells) => Some(self.announce(at.peer(), op, solicited, is_secret, tells)?),
            None => None,
        };
        if message.is_some() && self.side(at.peer())?.fails_at == message {
            must = WcStatus::RemoteInvalidRequest;
        }
        let wr_id = self.fresh_id(false);
        let side = self.side_mut(at)?;
        side.posted += 1;
        if !matches!(op, SendOp::BindWindow(_) | SendOp::LocalInvalidate(_)) {
            let before = side.taken_after.last().copied().unwrap_or(0);
            side.taken_after.push(before + u64::from(message.is_some()));
        }
        side.sends.push_back(PostedSend {
            wr_id,
            signaled,
            opcode,
            must,
            message,
            volatile,
            effect,
        });
        self.summary.sends += 1;
        let wr = SendWr { wr_id, op, sges, signaled, solicited, fence, to: to.map(|(to, _)| to) };
        let now = self.network.now();
        if !self.scenario.habits.neighbours {
            let posted = self.network.node_mut(node).endpoint.post_send(now, qpn, wr);
            return posted.map_err(|error| format!("post_send: {error}"));
        }
        let posted = self.network.with_neighbours(node, |endpoint, direct| {
            endpoint.post_send_direct(now, qpn, wr, direct)
        });
        let posted =
            posted.ok_or("no such node")?.map_err(|error| format!("post_send: {error}"))?;
        let side = self.side_mut(at)?;
        match posted {
            // It takes no number of a message.
            Posted::Done => drop(side.taken_after.pop()),
            Posted::Held => side.is_held = true,
            // A message that is handed over takes none either, unless it is refused. Those before a
            // message are taken before it, so the number of receives that the messages up to it
            // have taken is never too large.
            Posted::Queued | Posted::HandedOver => {}
        }
        Ok(())
    }

    /// Where a datagram goes, and whether its key is one that the receiver must not accept.
    fn datagram(&mut self, at: At) -> Checked<Option<(Datagram, bool)>> {
        if self.pairs[at.pair].params.transport != Transport::Ud {
            return Ok(None);
        }
        let is_secret = self.chance.per_mille(self.scenario.trespass);
        let peer = self.side(at.peer())?;
        let (path, dest_qp) = (self.path_to(peer.node), peer.qpn);
        let qkey = if is_secret { peer.qkey ^ 1 } else { peer.qkey };
        Ok(Some((Datagram { ah: path.into(), dest_qp, qkey }, is_secret)))
    }

    /// Records a message that a side is to receive; returns its number.
    fn announce(
        &mut self,
        to: At,
        op: SendOp,
        solicited: bool,
        is_secret: bool,
        (imm, bytes, target): (Option<u32>, Vec<u8>, Option<u64>),
    ) -> Checked<u64> {
        let is_write = matches!(op, SendOp::WriteImm { .. });
        let opcode = if is_write { WcOpcode::RecvWriteImm } else { WcOpcode::Recv };
        let invalidates = match op {
            SendOp::SendInvalidate(rkey) => Some(rkey),
            _ => None,
        };
        let side = self.side_mut(to)?;
        let number = side.messages;
        side.messages += 1;
        let heard = 0;
        side.announced.push_back(Announced {
            number,
            opcode,
            imm,
            solicited,
            bytes,
            heard,
            invalidates,
            is_secret,
            target,
        });
        Ok(number)
    }

    /// Unsignaled sends at the end of a queue would never be reported: a signaled one is posted
    /// behind them.
    pub(super) fn ask_for_the_last(&mut self) -> Checked<()> {
        for pair in 0..self.pairs.len() {
            for side in 0..2 {
                if self.pairs[pair].state == PairState::Up {
                    self.post_if_silent(At { pair, side })?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn post_if_silent(&mut self, at: At) -> Checked<bool> {
        let last = self.side(at)?.sends.back();
        let is_silent = last.is_some_and(|send| !send.signaled);
        if is_silent {
            let draft = self.empty_draft(at);
            self.submit(at, Draft { signaled: true, ..draft })?;
        }
        Ok(is_silent)
    }
}
