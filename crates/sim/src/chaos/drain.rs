//! SQD and SQE: a queue pair stops sending, gets other attributes once it has drained, and resumes;
//! or its send queue fails, and it resumes after that (UC and UD).

use alloc::format;

use roce::endpoint::{AttrMask, QpAttr, QpState};
use roce::verbs::{Access, Qpn, WcOpcode};

use super::scenario::MAX_RD_ATOMIC;
use super::side::{At, Drain, Nap, PairState, Side, Turn};
use super::{Checked, Phase, Run, ensure};

/// Attempts to leave SQD before a program does so undrained, and the longest pause between them.
const PATIENCE: u32 = 20;
const PAUSE_NS: u64 = 100_000;

impl Run {
    // ---- SQD -----------------------------------------------------------------------------------

    /// Now and then, a program stops its queue pair from sending.
    pub(super) fn maybe_drain(&mut self, at: At, epoch: u32) -> Checked<()> {
        let rate = self.scenario.habits.drains;
        let is_faulty = matches!(self.phase, Phase::Faulty);
        let is_sending = self.qp_state(at)? == Some(QpState::Rts);
        if !is_faulty || !is_sending || !self.whims.per_mille(rate) {
            return Ok(());
        }
        let bare = QpAttr::to(QpState::Sqd);
        let mask = bare.mask | AttrMask::EN_SQD_ASYNC_NOTIFY;
        self.modify(at, &QpAttr { mask, sqd_notify: true, ..bare })?;
        self.side_mut(at)?.drain = Some(Drain::default());
        let pause_ns = self.whims.below(PAUSE_NS);
        self.schedule(pause_ns, Turn::Resume { at, epoch, patience: PATIENCE });
        Ok(())
    }

    /// Handles the event of a drained send queue.
    pub(super) fn note_drained(&mut self, node: u32, qpn: Qpn) {
        let mut sides = self.pairs.iter_mut().flat_map(|pair| pair.sides.iter_mut().flatten());
        let side = sides.find(|side| side.node == node && side.qpn == qpn && !side.is_dead);
        if let Some(drain) = side.and_then(|side| side.drain.as_mut()) {
            drain.is_drained = true;
        }
    }

    pub(super) fn resume(&mut self, at: At, epoch: u32, patience: u32) -> Checked<()> {
        let pair = &self.pairs[at.pair];
        if pair.epoch != epoch || pair.state != PairState::Up {
            return Ok(());
        }
        self.collect_events(self.side(at)?.node)?;
        let is_draining = self.qp_state(at)? == Some(QpState::Sqd);
        let side = self.side(at)?;
        let Some(Drain { is_drained }) = side.drain.filter(|_| is_draining) else {
            return Ok(());
        };
        let is_empty = side.sends.is_empty() && side.nap == Nap::Never;
        ensure!(is_drained || !is_empty, "a drained send queue made no event");
        if !is_drained && patience > 0 {
            let pause_ns = 1 + self.whims.below(PAUSE_NS);
            self.schedule(pause_ns, Turn::Resume { at, epoch, patience: patience - 1 });
            return Ok(());
        }
        if is_drained && self.pairs[at.pair].params.is_reliable() {
            self.change_attributes(at)?;
        }
        self.resume_now(at)
    }

    /// Resumes sending on a side that was stopped.
    pub(super) fn resume_now(&mut self, at: At) -> Checked<()> {
        let Ok(side) = self.side_mut(at) else {
            return Ok(());
        };
        let was_draining = side.drain.take().is_some() && !side.is_dead;
        if was_draining && self.qp_state(at)? == Some(QpState::Sqd) {
            self.modify(at, &QpAttr::to(QpState::Rts))?;
        }
        Ok(())
    }

    pub(super) fn resume_all(&mut self) -> Checked<()> {
        let pairs = 0..self.pairs.len();
        let mut all = pairs.flat_map(|pair| [0, 1].map(|side| At { pair, side }));
        all.try_for_each(|at| self.resume_now(at))
    }

    /// Other attributes for a queue pair that has drained. Timers only get shorter, as bounds are
    /// computed from those that the connection began with.
    fn change_attributes(&mut self, at: At) -> Checked<()> {
        let params = &self.pairs[at.pair].params;
        let (timeout, min_rnr_timer) = (params.timeout, params.min_rnr_timer);
        let awaits = |opcode: &WcOpcode| !matches!(opcode, WcOpcode::Send | WcOpcode::Write);
        let is_awaiting = opcodes(self.side(at)?).any(|opcode| awaits(&opcode));
        let access = self.change_access(at)?;
        let whims = &mut self.whims;
        let mut set = |bit| if whims.per_mille(700) { bit } else { AttrMask::empty() };
        let bits = [
            AttrMask::MAX_QP_RD_ATOMIC,
            AttrMask::ACCESS_FLAGS,
            AttrMask::TIMEOUT,
            AttrMask::MIN_RNR_TIMER,
        ];
        let mask: AttrMask = bits.map(&mut set).into_iter().collect();
        let least = u64::from(is_awaiting);
        let max_rd_atomic = whims.between(least, MAX_RD_ATOMIC.into()) as u8;
        let timeout = whims.between(8, timeout.into()) as u8;
        let min_rnr_timer = whims.between(1, min_rnr_timer.into()) as u8;
        let bare = QpAttr::to(QpState::Sqd);
        let attr = QpAttr { mask, max_rd_atomic, access, timeout, min_rnr_timer, ..bare };
        self.modify(at, &attr)?;
        let side = self.side_mut(at)?;
        if mask.contains(AttrMask::MAX_QP_RD_ATOMIC) {
            side.max_rd_atomic = max_rd_atomic;
        }
        if mask.contains(AttrMask::ACCESS_FLAGS) {
            side.access = access;
        }
        Ok(())
    }

    /// New access flags; flags of kinds that the peer has outstanding requests of stay.
    fn change_access(&mut self, at: At) -> Checked<Access> {
        use WcOpcode::{CompareSwap, FetchAdd, Read, Write};
        let (old, drawn) = (self.side(at)?.access, self.draw_access());
        let peer = self.side(at.peer())?;
        let choose = |old: bool, drawn: bool, kinds: &[WcOpcode]| {
            if opcodes(peer).any(|opcode| kinds.contains(&opcode)) { old } else { drawn }
        };
        Ok(Access {
            remote_write: choose(old.remote_write, drawn.remote_write, &[Write]),
            remote_read: choose(old.remote_read, drawn.remote_read, &[Read]),
            remote_atomic: choose(old.remote_atomic, drawn.remote_atomic, &[CompareSwap, FetchAdd]),
            ..old
        })
    }

    // ---- SQE -----------------------------------------------------------------------------------

    /// Whether the programs of an unreliable pair continue when a send queue fails.
    pub(super) fn may_recover(&self, pair: usize) -> bool {
        let pair = &self.pairs[pair];
        let is_closing = matches!(self.phase, Phase::Closing);
        let is_up = pair.state == PairState::Up && !pair.is_retired && !is_closing;
        self.scenario.habits.recovers && !pair.params.is_reliable() && is_up
    }

    /// A side whose send queue failed takes the flushed completions and sends again.
    pub(super) fn recover(&mut self, at: At) -> Checked<()> {
        self.collect_side(at)?;
        let side = self.side_mut(at)?;
        ensure!(side.sends.is_empty(), "C2: sends were not flushed in SQE");
        (side.send_errors, side.send_ended, side.drain) = (0, false, None);
        self.modify(at, &QpAttr::to(QpState::Rts))
    }

    // ---- both ----------------------------------------------------------------------------------

    fn qp_state(&self, at: At) -> Checked<Option<QpState>> {
        let side = self.side(at)?;
        Ok(self.network.node(side.node).endpoint.qp_state(side.qpn).filter(|_| !side.is_dead))
    }

    pub(super) fn modify(&mut self, at: At, attr: &QpAttr) -> Checked<()> {
        let (node, qpn) = (self.side(at)?.node, self.side(at)?.qpn);
        let now = self.network.now();
        let modified = self.network.node_mut(node).endpoint.modify_qp(now, qpn, attr);
        modified.map_err(|error| format!("modify_qp: {error}"))
    }
}

/// Kinds of a side's outstanding requests.
fn opcodes(side: &Side) -> impl Iterator<Item = WcOpcode> {
    side.sends.iter().map(|send| send.opcode)
}
