//! Memory windows: one side grants the other access to a part of its memory under a separate key, and
//! revokes it.
//!
//! Each side of a reliable connection has one window of type 2. Its program binds it to a new slot (a
//! work request among others), the peer writes through the new key, and then either side invalidates
//! the key: the peer by a SEND with invalidate, the owner by a local invalidate. From then on the key
//! must be refused, which peers that misbehave test.

use alloc::format;
use alloc::vec::Vec;

use roce::verbs::{
    Access, SendOp, SgList, VerbsError, WcOpcode, WcStatus, WindowBinding, WindowId,
};

use super::draft::Draft;
use super::rights::refusal;
use super::side::{At, Effect};
use super::space::Use;
use super::{Checked, Run, ensure};

/// The state of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    /// Bound to nothing.
    Free,
    /// A binding is outstanding: address and length of the slot.
    Binding { addr: u64, len: u32 },
    /// The peer may write there; this many WRITEs are outstanding.
    Bound { addr: u64, len: u32, busy: u32 },
    /// Being invalidated.
    Closing { addr: u64, len: u32, busy: u32 },
}

/// A side's memory window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) id: WindowId,
    /// The key it has, had last, or is about to have.
    pub(super) rkey: u32,
    pub(super) grant: Grant,
    /// The peer's addresses start at the slot's first byte.
    zero_based: bool,
    /// A key that was invalidated.
    pub(super) dead_rkey: Option<u32>,
}

impl Window {
    pub(super) fn new((id, rkey): (WindowId, u32)) -> Window {
        Window { id, rkey, grant: Grant::Free, zero_based: false, dead_rkey: None }
    }

    /// The slot it is bound to.
    pub(super) fn slot(&self) -> Option<(u64, u32)> {
        match self.grant {
            Grant::Free => None,
            Grant::Binding { addr, len }
            | Grant::Bound { addr, len, .. }
            | Grant::Closing { addr, len, .. } => Some((addr, len)),
        }
    }
}

impl Run {
    /// A window for a side being created.
    pub(super) fn new_window(&mut self, node: u32) -> Result<Option<Window>, VerbsError> {
        let entry = self.fabric.node_mut(node);
        let made = entry.endpoint.alloc_window(entry.pd, true)?;
        Ok(Some(Window::new(made)))
    }

    fn window(&mut self, at: At) -> Checked<&mut Window> {
        let side = self.side_mut(at)?;
        side.window.as_mut().ok_or_else(|| format!("{at:?} has no window"))
    }

    // ---- what programs post --------------------------------------------------------------------

    pub(super) fn draft_bind(&mut self, at: At) -> Checked<Option<Draft>> {
        if self.window(at)?.grant != Grant::Free {
            return Ok(None);
        }
        let (node, len) = (self.side(at)?.node, self.draw_len(at).max(1));
        let space = &mut self.spaces[node as usize];
        let Some(slot) = space.take_one(Use::Window, len, &mut self.chance) else {
            return Ok(None);
        };
        let region = space.region(Use::Window);
        let shown = space.remote(Use::Window, slot.addr);
        let step = self.chance.between(1, 255) as u32;
        let zero_based = self.chance.per_mille(300);
        let window = self.window(at)?;
        window.rkey = window.rkey & !0xff | window.rkey.wrapping_add(step) & 0xff;
        window.grant = Grant::Binding { addr: slot.addr, len };
        window.zero_based = zero_based;
        let access = Access { remote_write: true, remote_read: true, ..Access::LOCAL };
        let binding = WindowBinding {
            window: window.id,
            rkey: window.rkey,
            lkey: region.lkey,
            addr: shown,
            len: len.into(),
            access,
            zero_based,
        };
        let op = SendOp::BindWindow(binding);
        let draft = Draft::new(op, WcOpcode::BindWindow, SgList::new());
        Ok(Some(Draft { effect: Effect::Bind, ..draft }))
    }

    /// A binding that reaches beyond its region.
    pub(super) fn draft_bad_bind(&mut self, at: At) -> Checked<Option<Draft>> {
        if self.window(at)?.grant != Grant::Free {
            return Ok(None);
        }
        let node = self.side(at)?.node;
        let region = self.spaces[node as usize].region(Use::Window);
        let addr = self.spaces[node as usize].remote(Use::Window, region.addr) + 1;
        let Window { id, rkey, .. } = *self.window(at)?;
        let rkey = rkey & !0xff | rkey.wrapping_add(1) & 0xff;
        let (lkey, len, access) = (region.lkey, region.len, Access::REMOTE_WRITE);
        let zero_based = false;
        let binding = WindowBinding { window: id, rkey, lkey, addr, len, access, zero_based };
        let op = SendOp::BindWindow(binding);
        let must = WcStatus::WindowBindError;
        Ok(Some(Draft { must, ..Draft::new(op, WcOpcode::BindWindow, SgList::new()) }))
    }

    /// A WRITE through the peer's window.
    pub(super) fn draft_window_write(&mut self, at: At) -> Checked<Option<Draft>> {
        let peer = self.side(at.peer())?.node;
        let Window { rkey, zero_based, grant: Grant::Bound { addr, len, busy: 0 }, .. } =
            *self.window(at.peer())?
        else {
            return Ok(None);
        };
        let offset = self.chance.below(len.into()) as u32;
        let len = self.chance.between(1, u64::from(len - offset)) as u32;
        let node = self.side(at)?.node;
        let Some(source) = self.draw_source(node, len) else {
            return Ok(None);
        };
        if let Grant::Bound { busy, .. } = &mut self.window(at.peer())?.grant {
            *busy += 1;
        }
        let target = addr + u64::from(offset);
        let remote_addr = match zero_based {
            true => offset.into(),
            false => self.spaces[peer as usize].remote(Use::Window, target),
        };
        let op = SendOp::Write { remote_addr, rkey };
        let effect = Effect::Granted { target, bytes: source.bytes };
        let draft = Draft::new(op, WcOpcode::Write, source.sges);
        Ok(Some(Draft { volatile: source.volatile, effect, ..draft }))
    }

    /// Invalidates the peer's window, by a message.
    pub(super) fn draft_send_invalidate(&mut self, at: At) -> Checked<Option<Draft>> {
        let Window { rkey, grant: Grant::Bound { addr, len, busy }, .. } =
            *self.window(at.peer())?
        else {
            return Ok(None);
        };
        let message_len = self.draw_message_len(at)?;
        let node = self.side(at)?.node;
        let Some(source) = self.draw_source(node, message_len) else {
            return Ok(None);
        };
        self.window(at.peer())?.grant = Grant::Closing { addr, len, busy };
        let tells = Some((None, source.bytes, None));
        let draft = Draft::new(SendOp::SendInvalidate(rkey), WcOpcode::Send, source.sges);
        Ok(Some(Draft { volatile: source.volatile, tells, ..draft }))
    }

    /// Invalidates the own window.
    pub(super) fn draft_local_invalidate(&mut self, at: At) -> Checked<Option<Draft>> {
        let window = self.window(at)?;
        let Grant::Bound { addr, len, busy: 0 } = window.grant else {
            return Ok(None);
        };
        window.grant = Grant::Closing { addr, len, busy: 0 };
        let op = SendOp::LocalInvalidate(window.rkey);
        let draft = Draft::new(op, WcOpcode::LocalInvalidate, SgList::new());
        Ok(Some(Draft { effect: Effect::Invalidate, ..draft }))
    }

    /// A WRITE through an invalidated window.
    pub(super) fn draft_dead_write(&mut self, at: At) -> Checked<Option<Draft>> {
        let peer = self.side(at.peer())?.node;
        let window = *self.window(at.peer())?;
        let Some(rkey) = window.dead_rkey.filter(|_| window.grant == Grant::Free) else {
            return Ok(None);
        };
        let node = self.side(at)?.node;
        let sges = self.spaces[node as usize].lasting_source(1, &mut self.chance);
        let region = self.spaces[peer as usize].region(Use::Window);
        let remote_addr = self.spaces[peer as usize].remote(Use::Window, region.addr);
        self.pair_mut(at).is_excused = true;
        let op = SendOp::Write { remote_addr, rkey };
        let must = refusal(self.side(at.peer())?.access.remote_write);
        Ok(Some(Draft { must, ..Draft::new(op, WcOpcode::Write, sges) }))
    }

    // ---- what completions mean -----------------------------------------------------------------

    pub(super) fn bound(&mut self, at: At) -> Checked<()> {
        let window = self.window(at)?;
        if let Grant::Binding { addr, len } = window.grant {
            window.grant = Grant::Bound { addr, len, busy: 0 };
        }
        Ok(())
    }

    /// The key of a side's window is refused from now on.
    pub(super) fn invalidated(&mut self, at: At) -> Checked<()> {
        let window = self.window(at)?;
        window.dead_rkey = Some(window.rkey);
        if let Grant::Closing { addr, len, busy: 0 } = window.grant {
            window.grant = Grant::Free;
            let node = self.side(at)?.node;
            self.spaces[node as usize].give(addr, len);
        } else if let Grant::Closing { busy, .. } = window.grant {
            // Earlier WRITEs are not known to have completed: their sender will report them.
            ensure!(busy > 0, "a window that is not being taken away");
            self.side_mut(at)?.is_window_dead = true;
        }
        Ok(())
    }

    /// A WRITE through the window of `at` has completed.
    pub(super) fn granted_done(&mut self, at: At) -> Checked<()> {
        let is_dead = self.side(at)?.is_window_dead;
        let window = self.window(at)?;
        if let Grant::Bound { busy, .. } | Grant::Closing { busy, .. } = &mut window.grant {
            *busy = busy.saturating_sub(1);
        }
        if is_dead && matches!(window.grant, Grant::Closing { busy: 0, .. }) {
            self.side_mut(at)?.is_window_dead = false;
            return self.invalidated(at);
        }
        Ok(())
    }

    /// Deallocates a window after its queue pair, and frees its slot.
    pub(super) fn drop_window(&mut self, node: u32, window: &Window) -> Checked<Vec<(u64, u32)>> {
        let endpoint = &mut self.fabric.node_mut(node).endpoint;
        endpoint.dealloc_window(window.id).map_err(|error| format!("dealloc_window: {error}"))?;
        Ok(window.slot().into_iter().collect())
    }
}
