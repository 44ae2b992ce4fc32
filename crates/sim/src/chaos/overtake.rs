//! READs, and unfenced requests behind them that change what they read.
//!
//! The specification lets the later request overtake the READ at the responder; NICs do not, and
//! programs rely on it. So the READ has to return the bytes as they were, unless it was executed
//! again because a response was lost: then it may return either.

use roce::verbs::{SendOp, SgList, Sge, WcOpcode};
use roce::world::AtomicOp;

use super::atomics::Attempt;
use super::draft::{Draft, Source, applied};
use super::side::{At, Effect, Holder};
use super::space::{SINKS, Use, WORDS};
use super::{Checked, Run};

impl Run {
    /// Posts the READ and the request behind it. Without room for both it posts nothing, or a
    /// request that makes room.
    pub(super) fn post_read_then_change(&mut self, at: At) -> Checked<bool> {
        let depth = self.pairs[at.pair].params.depth as usize;
        if self.side(at)?.sends.len() + 2 > depth {
            return self.post_if_silent(at);
        }
        let access = self.side(at.peer())?.access;
        match self.whims.below(3) {
            0 if access.remote_write => self.post_read_then_write(at),
            1 if access.remote_atomic => self.post_read_then_atomic(at),
            _ => self.post_read_then_send(at),
        }
    }

    /// How often the peer has executed a READ of this connection again; `None` if it is gone.
    fn repeated(&self, at: At) -> Checked<Option<u64>> {
        let peer = self.side(at.peer())?;
        let counters = self.network.node(peer.node).endpoint.qp_counters(peer.qpn);
        Ok(counters.filter(|_| !peer.is_dead).map(|counters| counters.duplicate_reads))
    }

    /// A READ of `len` bytes at `addr` in a region of the peer's, as the model has them.
    fn submit_read(&mut self, at: At, of: Use, addr: u64, len: u32) -> Checked<bool> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let space = &mut self.spaces[node as usize];
        let Some(landing) = space.take_list(SINKS, len, &mut self.whims) else {
            return Ok(false);
        };
        let space = &self.spaces[peer as usize];
        let bytes = space.expected(addr, len as usize).to_vec();
        let (remote_addr, rkey) = (space.remote(of, addr), space.region(of).rkey);
        let repeated = self.repeated(at)?;
        let effect = Effect::Former { landing: landing.clone(), bytes, repeated };
        let draft = Draft::new(SendOp::Read { remote_addr, rkey }, WcOpcode::Read, landing);
        self.submit(at, Draft { effect, ..draft })?;
        Ok(true)
    }

    fn post_read_then_write(&mut self, at: At) -> Checked<bool> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let len = self.draw_len(at).max(1);
        let space = &mut self.spaces[peer as usize];
        if !space.access(Use::Window).remote_read {
            return Ok(false);
        }
        let Some(Sge { addr: target, .. }) = space.take_one(Use::Window, len, &mut self.whims)
        else {
            return Ok(false);
        };
        let Some(Source { sges, volatile, bytes }) = self.draw_source(node, len) else {
            self.spaces[peer as usize].give(target, len);
            return Ok(false);
        };
        if !self.submit_read(at, Use::Window, target, len)? {
            self.spaces[peer as usize].give(target, len);
            self.spaces[node as usize].give_all(&volatile);
            return Ok(false);
        }
        let space = &self.spaces[peer as usize];
        let (remote_addr, rkey) =
            (space.remote(Use::Window, target), space.region(Use::Window).rkey);
        let effect = Effect::Write { target, bytes, held_by: Holder::Own };
        let draft = Draft::new(SendOp::Write { remote_addr, rkey }, WcOpcode::Write, sges);
        self.submit(at, Draft { volatile, effect, ..draft })?;
        Ok(true)
    }

    /// The READ is of the receive that the message is going to fill.
    fn post_read_then_send(&mut self, at: At) -> Checked<bool> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?);
        let (peer_node, fails) = (peer.node, peer.fails_at.is_some());
        let next = peer.receives.get(peer.announced.len()).filter(|_| !peer.shares && !fails);
        let space = &self.spaces[peer_node as usize];
        let sinks = space.region(Use::SinkA);
        let is_shown = |sge: &&Sge| sge.len > 0 && sge.lkey == sinks.lkey;
        let first = next.and_then(|receive| receive.sges.first().filter(is_shown));
        let Some(&Sge { addr, len, .. }) = first.filter(|_| space.access(Use::SinkA).remote_read)
        else {
            return Ok(false);
        };
        let most = next.map_or(0, |receive| u64::from(receive.capacity));
        let message_len = self.whims.between(1, most.min(self.scenario.max_len)) as u32;
        let Some(Source { sges, volatile, bytes }) = self.draw_source(node, message_len) else {
            return Ok(false);
        };
        if !self.submit_read(at, Use::SinkA, addr, len)? {
            self.spaces[node as usize].give_all(&volatile);
            return Ok(false);
        }
        let tells = Some((None, bytes, None));
        let draft = Draft::new(SendOp::Send, WcOpcode::Send, sges);
        self.submit(at, Draft { volatile, tells, ..draft })?;
        Ok(true)
    }

    /// The value returned by the READ is in the word's history before the atomic.
    fn post_read_then_atomic(&mut self, at: At) -> Checked<bool> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let words = self.spaces[peer as usize].region(Use::Words);
        if !self.spaces[peer as usize].access(Use::Words).remote_read {
            return Ok(false);
        }
        let word = self.whims.below(WORDS) as usize;
        let addr = words.addr + 8 * word as u64;
        let (remote_addr, rkey) = (self.spaces[peer as usize].remote(Use::Words, addr), words.rkey);
        let space = &mut self.spaces[node as usize];
        let landings = [(); 2].map(|()| space.take_one(Use::SinkA, 8, &mut self.whims));
        let [Some(landing), Some(second)] = landings else {
            space.give_all(&landings.into_iter().flatten().collect::<SgList>());
            return Ok(false);
        };
        let repeated = self.repeated(at)?;
        let effect = Effect::FormerWord { landing, word, repeated };
        let list = [landing].into_iter().collect();
        let draft = Draft::new(SendOp::Read { remote_addr, rkey }, WcOpcode::Read, list);
        self.submit(at, Draft { effect, ..draft })?;
        let known = self.last_values[peer as usize][word];
        let (op, opcode) = self.draw_atomic(remote_addr, rkey, known);
        let effect = Effect::Atomic { landing: second, word, op: applied(op) };
        let draft = Draft::new(op, opcode, [second].into_iter().collect());
        self.submit(at, Draft { effect, ..draft })?;
        Ok(true)
    }

    /// A READ returned the bytes from before the next request.
    pub(super) fn check_former(
        &mut self,
        at: At,
        landing: &SgList,
        bytes: &[u8],
        repeated: Option<u64>,
    ) -> Checked<()> {
        let node = self.side(at)?.node;
        if repeated.is_some() && self.repeated(at)? == repeated {
            self.check_landed(node, landing, bytes)?;
        }
        let memory = &self.network.node(node).memory;
        let space = &mut self.spaces[node as usize];
        landing.iter().for_each(|sge| space.adopt(memory, sge.addr, sge.len as usize));
        space.give_all(landing);
        Ok(())
    }

    /// The same for a word: the value is one that it had between other operations.
    pub(super) fn check_former_word(
        &mut self,
        at: At,
        landing: Sge,
        word: usize,
        repeated: Option<u64>,
    ) -> Checked<()> {
        let node = self.side(at)?.node;
        let former = self.read_word(node, landing.addr);
        self.spaces[node as usize].put(landing.addr, &former.to_ne_bytes());
        self.spaces[node as usize].give(landing.addr, landing.len);
        if repeated.is_none() || self.repeated(at)? != repeated {
            return Ok(());
        }
        let op = AtomicOp::FetchAdd(0);
        self.note_atomic(at, word, Attempt { op, former: Some(former) })
    }
}
