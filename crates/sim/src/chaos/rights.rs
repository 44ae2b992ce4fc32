//! Access rights of queue pairs, and programs that respect them: they request nothing that must be
//! refused, unless they misbehave.

use roce::endpoint::{AttrMask, QpAttr, QpState};
use roce::verbs::{Access, SendOp, SgList, WcOpcode, WcStatus};

use super::draft::Draft;
use super::scenario::Kind;
use super::side::{At, Effect, Nap};
use super::space::{SINKS, Use};
use super::{Checked, Run};

/// Sets the peer's rights, in any state of the queue pair.
pub(super) fn attributes(access: Access) -> QpAttr {
    QpAttr { mask: AttrMask::ACCESS_FLAGS, access, ..QpAttr::to(QpState::Rts) }
}

/// The status of a request that must be refused: invalid if the queue pair does not enable its
/// kind, whatever its address and key.
pub(super) fn refusal(is_enabled: bool) -> WcStatus {
    if is_enabled { WcStatus::RemoteAccessError } else { WcStatus::RemoteInvalidRequest }
}

impl Run {
    /// The rights of a new queue pair: all, or a random subset.
    pub(super) fn draw_access(&mut self) -> Access {
        if !self.scenario.habits.restricts {
            return Access::ALL;
        }
        let mut flag = || self.whims.per_mille(650);
        Access { remote_write: flag(), remote_read: flag(), remote_atomic: flag(), ..Access::ALL }
    }

    /// The kind to post instead if the peer does not allow it, or READs must not be in flight.
    pub(super) fn permitted(&self, at: At, kind: Kind) -> Checked<Kind> {
        let (access, peer_nap) = (self.side(at.peer())?.access, self.side(at.peer())?.nap);
        let may_await = self.side(at)?.max_rd_atomic > 0;
        let is_permitted = match kind {
            Kind::Write | Kind::WriteImm | Kind::WindowWrite => access.remote_write,
            Kind::Read | Kind::ReadSend | Kind::ReadThenChange => access.remote_read && may_await,
            Kind::Atomic => access.remote_atomic && may_await,
            _ => true,
        };
        Ok(match kind {
            _ if !is_permitted => Kind::Send,
            // By the time a sleeping program is notified, the target may have been written again.
            Kind::WriteImm if peer_nap != Nap::Never => Kind::SendImm,
            kind => kind,
        })
    }

    /// A request of a kind that the peer's queue pair does not allow, valid otherwise.
    pub(super) fn draft_unpermitted(&mut self, at: At) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let access = self.side(at.peer())?.access;
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        let may_await = is_reliable && self.side(at)?.max_rd_atomic > 0;
        let missing = [
            (!access.remote_write, Use::Window),
            (!access.remote_read && may_await, Use::Library),
            (!access.remote_atomic && may_await, Use::Words),
        ];
        let missing: alloc::vec::Vec<Use> =
            missing.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, of)| of).collect();
        if missing.is_empty() || !self.whims.per_mille(500) {
            return Ok(None);
        }
        let of = self.whims.pick(&missing);
        let region = self.spaces[peer as usize].region(of);
        let (remote_addr, rkey) = (self.spaces[peer as usize].remote(of, region.addr), region.rkey);
        let must = if is_reliable { refusal(false) } else { WcStatus::Success };
        let space = &mut self.spaces[node as usize];
        if of == Use::Window {
            let sges = space.lasting_source(8, &mut self.chance);
            self.pair_mut(at).is_excused = true;
            let op = SendOp::Write { remote_addr, rkey };
            return Ok(Some(Draft { must, ..Draft::new(op, WcOpcode::Write, sges) }));
        }
        let Some(landing) = space.take_list([SINKS[0]; 2], 8, &mut self.chance) else {
            return Ok(None);
        };
        let bytes = space.expected_list(&landing);
        self.pair_mut(at).is_excused = true;
        let (op, opcode) = match of {
            Use::Library => (SendOp::Read { remote_addr, rkey }, WcOpcode::Read),
            _ => self.draw_atomic(remote_addr, rkey, 0),
        };
        Ok(Some(Draft { must, ..Draft::new(op, opcode, landing.clone()) }.lands(landing, bytes)))
    }
}

impl Draft {
    /// Either nothing arrives, or these bytes.
    fn lands(self, landing: SgList, bytes: alloc::vec::Vec<u8>) -> Draft {
        let (source, lends_landing) = (None, false);
        Draft { effect: Effect::Read { landing, bytes, source, lends_landing }, ..self }
    }
}
