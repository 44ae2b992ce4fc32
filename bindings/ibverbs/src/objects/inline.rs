//! Inline data: bytes copied with a work request when it is posted.
//!
//! They are copied into a slot of memory that belongs to the queue pair and is registered for it.
//! There is one slot more than the send queue has entries: so the slot of a work request that is
//! refused because the queue is full is not in use by a queued one.

use std::cell::UnsafeCell;

use roce::verbs::{Access, PdId, SgList, Sge};

use crate::abi::{ibv_data_buf, ibv_qp_cap};
use crate::engine::Core;
use crate::process::errors::{Outcome, errno_of};

/// The slots of one queue pair.
pub(crate) struct InlineSlots {
    /// Changes under the engine's lock. Empty once the queue pair is destroyed.
    bytes: UnsafeCell<Box<[UnsafeCell<u8>]>>,
    slot_bytes: usize,
    lkey: u32,
}

impl InlineSlots {
    /// Slots for a queue pair with these capabilities; `None` if it has no inline data.
    pub(crate) fn new(core: &mut Core, pd: PdId, cap: &ibv_qp_cap) -> Outcome<Option<InlineSlots>> {
        let slot_bytes = cap.max_inline_data as usize;
        if slot_bytes == 0 {
            return Ok(None);
        }
        let slots = cap.max_send_wr as usize + 1;
        let bytes: Box<[UnsafeCell<u8>]> =
            std::iter::repeat_with(|| UnsafeCell::new(0)).take(slots * slot_bytes).collect();
        let (addr, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
        let region = core.endpoint_mut().register(pd, addr, len, Access::LOCAL_READ);
        let lkey = region.map_err(errno_of)?.lkey;
        Ok(Some(InlineSlots { bytes: UnsafeCell::new(bytes), slot_bytes, lkey }))
    }

    /// Frees the memory: that of the queue pair itself stays for a while.
    pub(crate) fn end(&self, core: &mut Core) {
        let _ = core.endpoint_mut().deregister(self.lkey);
        // SAFETY: the engine's lock is held, and no key refers to the slots any more.
        unsafe { *self.bytes.get() = Box::default() };
    }

    /// Copies `pieces` into the slot of the `posted`-th work request. `None` if they do not fit.
    ///
    /// # Safety
    /// The pieces are readable, and the engine's lock is held.
    pub(crate) unsafe fn fill(
        &self,
        posted: u64,
        pieces: impl Iterator<Item = ibv_data_buf>,
    ) -> Option<SgList> {
        // SAFETY: the engine's lock is held.
        let bytes = unsafe { &*self.bytes.get() };
        let slots = bytes.len() / self.slot_bytes;
        // No slots are left when the queue pair ended while the caller waited for the lock.
        let slot = posted.checked_rem(slots as u64)? as usize;
        let start = bytes[slot * self.slot_bytes..].as_ptr().cast::<u8>().cast_mut();
        let mut len = 0;
        for piece in pieces {
            if piece.length > self.slot_bytes - len {
                return None;
            }
            // SAFETY: there is room for the piece in the slot, which no posted work request uses
            // and no other thread fills, as the lock is held.
            unsafe { start.add(len).copy_from(piece.addr.cast(), piece.length) };
            len += piece.length;
        }
        let filled = Sge { addr: start as u64, len: len as u32, lkey: self.lkey };
        Some(std::iter::once(filled).filter(|sge| sge.len > 0).collect())
    }
}
