//! How a ring gets its memory: one slot at first, and one more whenever the last is taken.
//!
//! The kernel clears memory before a process gets it. For a whole ring that takes longer than
//! everything else that comes before the first batch, so a thread does it, one slot ahead of the
//! producer, who waits only if it is faster. A trainer that returns slots quickly never makes the
//! ring use all of its memory. A slot is filled only when its memory is present: no page fault is
//! left for the engine, and a lack of memory leaves the ring smaller instead of ending a process.
//!
//! May not enter: what slots hold, and who has them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};

use rustix::fd::OwnedFd;
use rustix::io::Errno;

use super::map::{self, Region};
use super::{Geometry, RingError};

/// Larger slots are all made present at once: an engine that has to wait for one would wait for too
/// long.
const MAX_GRADUAL_BYTES: usize = 4 << 20;

#[derive(Debug)]
struct Shared {
    geometry: Geometry,
    file: OwnedFd,
    data: Arc<Region>,
    /// The slots before this one are present.
    present: AtomicU32,
    /// Held while a slot is made present.
    growing: Mutex<()>,
    is_stopped: AtomicBool,
}

impl Shared {
    /// Makes the slot after the first `present` ones present, unless that was done meanwhile.
    /// Whether it is.
    fn grow(&self, present: u32) -> bool {
        // What it guards is outside of the process's memory: a panic leaves nothing half done.
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.present.load(Ordering::Acquire) != present {
            return true;
        }
        let end = |slots: u32| self.geometry.slot_at(slots - 1) + self.geometry.slot_bytes();
        let start = if present == 0 { 0 } else { end(present) };
        let provided = present < self.geometry.slots()
            && map::provide(&self.file, &self.data, start..end(present + 1)).is_ok();
        if provided {
            self.present.store(present + 1, Ordering::Release);
        }
        provided
    }
}

/// The memory of a ring's slots.
#[derive(Debug)]
pub(super) struct Growth {
    shared: Arc<Shared>,
    /// Works ahead until every slot is present.
    thread: Option<Thread>,
}

impl Growth {
    /// Makes everything up to the first slot present.
    ///
    /// # Errors
    /// When there is no memory for it, and when no thread can be started.
    pub(super) fn begin(
        geometry: Geometry,
        file: OwnedFd,
        data: &Arc<Region>,
    ) -> Result<Growth, RingError> {
        let shared = Shared {
            geometry,
            file,
            data: Arc::clone(data),
            present: AtomicU32::new(0),
            growing: Mutex::new(()),
            is_stopped: AtomicBool::new(false),
        };
        let is_gradual = geometry.slot_bytes() <= MAX_GRADUAL_BYTES;
        let at_first = if is_gradual { 1 } else { geometry.slots() };
        if !(0..at_first).all(|present| shared.grow(present)) {
            return Err(map::os("fallocate", Errno::NOMEM));
        }
        let shared = Arc::new(shared);
        if at_first == geometry.slots() {
            return Ok(Growth { shared, thread: None });
        }
        let worker = Arc::clone(&shared);
        let work = move || loop {
            thread::park();
            let present = worker.present.load(Ordering::Acquire);
            if worker.is_stopped.load(Ordering::Acquire) || !worker.grow(present) {
                return;
            }
        };
        let thread = thread::Builder::new().name("dquant-ring".into()).spawn(work);
        let thread = thread.map_err(|error| {
            map::os("clone", Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
        })?;
        Ok(Growth { shared, thread: Some(thread.thread().clone()) })
    }

    /// The slots before this one are present.
    pub(super) fn present(&self) -> u32 {
        self.shared.present.load(Ordering::Acquire)
    }

    /// Has the next slot made present in time.
    pub(super) fn work_ahead(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }

    /// Waits until more than `present` slots are present; `false` if there are no more, or no
    /// memory for them.
    pub(super) fn wait_for_more(&self, present: u32) -> bool {
        present < self.shared.geometry.slots() && self.shared.grow(present)
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.work_ahead();
    }
}
