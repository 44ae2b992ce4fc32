//! Memory windows: one side grants the other access to a part of its memory under a separate key,
//! and revokes it.
//!
//! Each side of a reliable connection has two windows of type 2. Its program binds one to a new
//! slot (a work request among others), the peer writes through the new key, and then either side
//! invalidates the key: the peer by a SEND with invalidate, the owner by a local invalidate,
//! sometimes right behind the binding. From then on the key must be refused, which peers that
//! misbehave test; the other window's key stays valid.

use alloc::format;

use roce::verbs::{Access, SendOp, SgList, VerbsError, WcOpcode, WcStatus, WindowBinding};

use super::draft::Draft;
use super::rights::refusal;
use super::side::{At, Effect, Grant, Window};
use super::space::Use;
use super::{Checked, Run, ensure};

impl Run {
    /// A window for a side being created.
    pub(super) fn new_window(&mut self, node: u32) -> Result<Window, VerbsError> {
        let entry = self.network.node_mut(node);
        Ok(Window::new(entry.endpoint.alloc_window(entry.pd, true)?))
    }

    fn window(&mut self, at: At, index: usize) -> Checked<&mut Window> {
        Ok(&mut self.side_mut(at)?.windows[index])
    }

    /// A window of a side of which this holds, and its number.
    fn find_window(
        &self,
        at: At,
        holds: impl Fn(&Window) -> bool,
    ) -> Checked<Option<(usize, Window)>> {
        let windows = self.side(at)?.windows;
        Ok(windows.into_iter().enumerate().find(|(_, window)| holds(window)))
    }

    // ---- what programs post --------------------------------------------------------------------

    pub(super) fn draft_bind(&mut self, at: At) -> Checked<Option<Draft>> {
        let Some((index, _)) = self.find_window(at, |one| one.grant == Grant::Free)? else {
            return Ok(None);
        };
        let (node, len) = (self.side(at)?.node, self.draw_len(at).max(1));
        let space = &mut self.spaces[node as usize];
        let Some(slot) = space.take_one(Use::Window, len, &mut self.chance) else {
            return Ok(None);
        };
        let region = space.region(Use::Window);
        let shown = space.remote(Use::Window, slot.addr);
        let step = self.chance.between(1, 255) as u32;
        let zero_based = self.chance.per_mille(300);
        let window = self.window(at, index)?;
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
        Ok(Some(Draft { effect: Effect::Bind(index), ..draft }))
    }

    /// A binding that reaches beyond its region.
    pub(super) fn draft_bad_bind(&mut self, at: At) -> Checked<Option<Draft>> {
        let free = self.find_window(at, |one| one.grant == Grant::Free)?;
        let Some((_, Window { id, rkey, .. })) = free else {
            return Ok(None);
        };
        let node = self.side(at)?.node;
        let region = self.spaces[node as usize].region(Use::Window);
        let addr = self.spaces[node as usize].remote(Use::Window, region.addr) + 1;
        let rkey = rkey & !0xff | rkey.wrapping_add(1) & 0xff;
        let (lkey, len, access) = (region.lkey, region.len, Access::REMOTE_WRITE);
        let zero_based = false;
        let binding = WindowBinding { window: id, rkey, lkey, addr, len, access, zero_based };
        let op = SendOp::BindWindow(binding);
        let must = WcStatus::WindowBindError;
        Ok(Some(Draft { must, ..Draft::new(op, WcOpcode::BindWindow, SgList::new()) }))
    }

    /// A WRITE through a window of the peer, behind those in flight.
    pub(super) fn draft_window_write(&mut self, at: At) -> Checked<Option<Draft>> {
        let peer = self.side(at.peer())?.node;
        let has_room = |one: &Window| match one.grant {
            Grant::Bound { len, .. } => one.taken < len,
            _ => false,
        };
        let Some((index, window)) = self.find_window(at.peer(), has_room)? else {
            return Ok(None);
        };
        let Window { rkey, zero_based, taken, .. } = window;
        let (addr, len) = window.slot().unwrap_or_default();
        let offset = taken + self.chance.below(u64::from(len - taken)) as u32;
        let len = self.chance.between(1, u64::from(len - offset)) as u32;
        let node = self.side(at)?.node;
        let Some(source) = self.draw_source(node, len) else {
            return Ok(None);
        };
        let window = self.window(at.peer(), index)?;
        window.taken = offset + len;
        if let Grant::Bound { busy, .. } = &mut window.grant {
            *busy += 1;
        }
        let target = addr + u64::from(offset);
        let remote_addr = match zero_based {
            true => offset.into(),
            false => self.spaces[peer as usize].remote(Use::Window, target),
        };
        let op = SendOp::Write { remote_addr, rkey };
        let effect = Effect::Granted { window: index, target, bytes: source.bytes };
        let draft = Draft::new(op, WcOpcode::Write, source.sges);
        Ok(Some(Draft { volatile: source.volatile, effect, ..draft }))
    }

    /// Invalidates a window of the peer, by a message.
    pub(super) fn draft_send_invalidate(&mut self, at: At) -> Checked<Option<Draft>> {
        let is_bound = |one: &Window| matches!(one.grant, Grant::Bound { .. });
        let bound = self.find_window(at.peer(), is_bound)?;
        let Some((index, Window { rkey, grant: Grant::Bound { addr, len, busy }, .. })) = bound
        else {
            return Ok(None);
        };
        let message_len = self.draw_message_len(at)?;
        let node = self.side(at)?.node;
        let Some(source) = self.draw_source(node, message_len) else {
            return Ok(None);
        };
        self.window(at.peer(), index)?.grant = Grant::Closing { addr, len, busy };
        let tells = Some((None, source.bytes, None));
        let draft = Draft::new(SendOp::SendInvalidate(rkey), WcOpcode::Send, source.sges);
        Ok(Some(Draft { volatile: source.volatile, tells, ..draft }))
    }

    /// Invalidates an own window, perhaps before its binding has completed.
    pub(super) fn draft_local_invalidate(&mut self, at: At) -> Checked<Option<Draft>> {
        let is_idle = |one: &Window| {
            matches!(one.grant, Grant::Binding { .. } | Grant::Bound { busy: 0, .. })
        };
        let Some((index, window)) = self.find_window(at, is_idle)? else {
            return Ok(None);
        };
        let (addr, len) = window.slot().unwrap_or_default();
        self.window(at, index)?.grant = Grant::Closing { addr, len, busy: 0 };
        let op = SendOp::LocalInvalidate(window.rkey);
        let draft = Draft::new(op, WcOpcode::LocalInvalidate, SgList::new());
        Ok(Some(Draft { effect: Effect::Invalidate(index), ..draft }))
    }

    /// A WRITE through an invalidated window.
    pub(super) fn draft_dead_write(&mut self, at: At) -> Checked<Option<Draft>> {
        let peer = self.side(at.peer())?.node;
        let is_revoked = |one: &Window| one.dead_rkey.is_some() && one.grant == Grant::Free;
        let revoked = self.find_window(at.peer(), is_revoked)?;
        let Some(rkey) = revoked.and_then(|(_, window)| window.dead_rkey) else {
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

    pub(super) fn bound(&mut self, at: At, index: usize) -> Checked<()> {
        let window = self.window(at, index)?;
        if let Grant::Binding { addr, len } = window.grant {
            window.grant = Grant::Bound { addr, len, busy: 0 };
        }
        Ok(())
    }

    /// A message has invalidated this key of a side.
    pub(super) fn key_invalidated(&mut self, at: At, rkey: u32) -> Checked<()> {
        let found = self.find_window(at, |one| one.rkey == rkey)?;
        let (index, _) = found.ok_or_else(|| format!("no window has the key {rkey:#x}"))?;
        self.invalidated(at, index)
    }

    /// The key of a side's window is refused from now on.
    pub(super) fn invalidated(&mut self, at: At, index: usize) -> Checked<()> {
        let window = self.window(at, index)?;
        window.dead_rkey = Some(window.rkey);
        if let Grant::Closing { addr, len, busy: 0 } = window.grant {
            (window.grant, window.taken) = (Grant::Free, 0);
            let node = self.side(at)?.node;
            self.spaces[node as usize].give(addr, len);
        } else if let Grant::Closing { busy, .. } = window.grant {
            // Earlier WRITEs are not known to have completed: their sender will report them.
            ensure!(busy > 0, "a window that is not being taken away");
            window.is_dead = true;
        }
        Ok(())
    }

    /// A WRITE through a window of `at` has completed.
    pub(super) fn granted_done(&mut self, at: At, index: usize) -> Checked<()> {
        let window = self.window(at, index)?;
        if let Grant::Bound { busy, .. } | Grant::Closing { busy, .. } = &mut window.grant {
            *busy = busy.saturating_sub(1);
            window.taken = if *busy == 0 { 0 } else { window.taken };
        }
        if window.is_dead && matches!(window.grant, Grant::Closing { busy: 0, .. }) {
            window.is_dead = false;
            return self.invalidated(at, index);
        }
        Ok(())
    }

    /// Deallocates a window after its queue pair, and frees its slot.
    pub(super) fn drop_window(
        &mut self,
        node: u32,
        window: &Window,
    ) -> Checked<Option<(u64, u32)>> {
        let endpoint = &mut self.network.node_mut(node).endpoint;
        endpoint.dealloc_window(window.id).map_err(|error| format!("dealloc_window: {error}"))?;
        Ok(window.slot())
    }
}
