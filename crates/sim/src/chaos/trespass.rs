//! Requests of programs that misbehave: they must be refused, by the peer or locally, and must not
//! change a byte.

use roce::verbs::{SendOp, SgList, Sge, WcOpcode, WcStatus};

use super::draft::Draft;
use super::rights::refusal;
use super::side::{At, Effect};
use super::space::{SINKS, STALE_BYTES, Use};
use super::{Checked, Run, ensure};

impl Run {
    pub(super) fn draft_trespass(&mut self, at: At) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        if let Some(draft) = self.draft_unpermitted(at)? {
            return Ok(Some(draft));
        }
        let may_await = is_reliable && self.side(at)?.max_rd_atomic > 0;
        match self.chance.below(8) {
            0 if may_await => return self.draft_bad_atomic(at),
            1 | 2 if is_reliable => return self.draft_dead_write(at),
            _ => {}
        }
        let params = &self.pairs[at.pair].params;
        // Where packets stand alone, the legal packets of a refused WRITE are placed.
        let most = if params.is_selective() { params.mtu.bytes() } else { u32::MAX };
        // Within the length of the region that was deregistered.
        let most = if self.scenario.habits.neighbours { most.min(STALE_BYTES) } else { most };
        let len = self.draw_len(at).clamp(1, most);
        let (remote_addr, rkey, is_write) = self.draw_forbidden(peer, len, !may_await);
        self.pair_mut(at).is_excused = true;
        // Without acknowledgements, the sender does not learn of it.
        let access = self.side(at.peer())?.access;
        let is_enabled = if is_write { access.remote_write } else { access.remote_read };
        let must = if is_reliable { refusal(is_enabled) } else { WcStatus::Success };
        if is_write {
            let sges = self.spaces[node as usize].lasting_source(len, &mut self.chance);
            let op = SendOp::Write { remote_addr, rkey };
            return Ok(Some(Draft { must, ..Draft::new(op, WcOpcode::Write, sges) }));
        }
        let space = &mut self.spaces[node as usize];
        let Some(landing) = space.take_list(SINKS, len, &mut self.chance) else {
            return Ok(None);
        };
        let bytes = space.expected_list(&landing);
        let (source, lends_landing) = (None, false);
        let effect = Effect::Read { landing: landing.clone(), bytes, source, lends_landing };
        let op = SendOp::Read { remote_addr, rkey };
        Ok(Some(Draft { effect, must, ..Draft::new(op, WcOpcode::Read, landing) }))
    }

    /// An atomic on a word that is not aligned, or where atomics are not allowed.
    fn draft_bad_atomic(&mut self, at: At) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let space = &mut self.spaces[node as usize];
        let Some(landing) = space.take_one(Use::SinkA, 8, &mut self.chance) else {
            return Ok(None);
        };
        let bytes = space.expected(landing.addr, 8).to_vec();
        let space = &self.spaces[peer as usize];
        let (of, offset, must) = match self.chance.per_mille(500) {
            true => (Use::Words, self.chance.between(1, 7), WcStatus::RemoteInvalidRequest),
            false => (Use::Library, 0, WcStatus::RemoteAccessError),
        };
        let is_enabled = self.side(at.peer())?.access.remote_atomic;
        let must = if is_enabled { must } else { refusal(false) };
        let addr = (space.region(of).addr + 7) & !7;
        let (remote_addr, rkey) = (space.remote(of, addr) + offset, space.region(of).rkey);
        let (op, opcode) = self.draw_atomic(remote_addr, rkey, 0);
        self.pair_mut(at).is_excused = true;
        let sges: SgList = [landing].into_iter().collect();
        let (source, lends_landing) = (None, false);
        let effect = Effect::Read { landing: sges.clone(), bytes, source, lends_landing };
        Ok(Some(Draft { effect, must, ..Draft::new(op, opcode, sges) }))
    }

    /// An address and key that do not allow writing, or reading, `len` bytes.
    fn draw_forbidden(&mut self, peer: u32, len: u32, only_writes: bool) -> (u64, u32, bool) {
        let space = &self.spaces[peer as usize];
        let [window, library, source, foreign] =
            [Use::Window, Use::Library, Use::Source, Use::Foreign].map(|of| space.region(of));
        let stale = space.stale;
        let at = |of, addr| space.remote(of, addr);
        let first = at(Use::Window, window.addr);
        let is_write = only_writes || self.chance.per_mille(500);
        let len = u64::from(len);
        let past_the_end = first + window.len - len + 1;
        match self.chance.below(6) {
            0 => (past_the_end, window.rkey, is_write),
            1 => (first - 1, window.rkey, is_write),
            2 => (foreign.addr, foreign.rkey, is_write),
            3 => (stale.addr, stale.rkey, is_write),
            4 if is_write => (at(Use::Library, library.addr), library.rkey, true),
            4 => (at(Use::Source, source.addr), source.rkey, false),
            _ => (first, window.rkey ^ 1 << self.chance.below(32), is_write),
        }
    }

    pub(super) fn draft_local_trespass(&mut self, at: At) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let window = self.spaces[peer as usize].region(Use::Window);
        let source = self.spaces[node as usize].region(Use::Source);
        let past_the_end = source.addr + source.len - 7;
        if self.pairs[at.pair].params.is_reliable() && self.chance.per_mille(300) {
            self.pair_mut(at).is_excused = true;
            return self.draft_bad_bind(at);
        }
        let bad = match self.chance.below(3) {
            0 => Sge { addr: source.addr, len: 8, lkey: source.lkey ^ 1 << self.chance.below(32) },
            1 => Sge { addr: past_the_end, len: 8, lkey: source.lkey },
            _ => Sge { addr: source.addr - 1, len: 8, lkey: source.lkey },
        };
        ensure!(bad.len > 0, "a trespass needs bytes");
        self.pair_mut(at).is_excused = true;
        let remote_addr = self.spaces[peer as usize].remote(Use::Window, window.addr);
        let op = SendOp::Write { remote_addr, rkey: window.rkey };
        let sges = [bad].into_iter().collect();
        let must = WcStatus::LocalProtectionError;
        Ok(Some(Draft { must, ..Draft::new(op, WcOpcode::Write, sges) }))
    }
}
