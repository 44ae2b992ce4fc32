//! Registered memory that local peers can map: the program has asked for it
//! (`DQUANT_MEMORY=shared`).
//!
//! [`nic::movable`] moves the memory. All devices of the process share one file, because a region
//! of any of them may lie on the pages of another. Memory that cannot move stays where it is, and
//! local peers reach it as any other. Here is also what `dquant explain` says about it.
//!
//! Two things keep away while memory moves: signals of the thread that moves it, whose handlers
//! would wait for their own thread, and forks, whose children would find pages without their bytes.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Once;

use nic::local_peers::LocalPeers;
use nic::movable::Movable;

use adapter::shared::SignalsBlocked;
use adapter::software::LocalPath;

use super::Engine;
use crate::process::fork::{self, ForkLock};
use crate::process::settings::Settings;

/// Reasons that are kept; there are fewer, but for error numbers.
const MAX_REASONS: usize = 16;

/// Whether an engine's regions move. `None`: not asked for. Else the reason why they do not.
pub(super) type Sharing = Option<Result<(), String>>;

/// Where the memory of a region is for local peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nobody asked.
    Private,
    /// Where the program has it, although it was to move.
    Stayed,
    /// In the file, with its first byte here.
    InFile(u64),
}

impl Place {
    /// Where the first byte is in the file.
    pub(crate) fn in_file(self) -> Option<u64> {
        match self {
            Place::InFile(offset) => Some(offset),
            Place::Private | Place::Stayed => None,
        }
    }
}

/// The file, and why memory is not in it.
struct Shared {
    memory: Movable,
    /// Open devices.
    engines: usize,
    stayed: BTreeMap<String, u64>,
}

static SHARED: ForkLock<Option<Shared>> = ForkLock::new(None);

/// What moved and what did not.
#[derive(Debug, Default)]
pub(crate) struct SharedReport {
    /// Ranges of pages in the file.
    pub(crate) ranges: usize,
    pub(crate) bytes: u64,
    /// Why others are not there, and how many registrations each reason met.
    pub(crate) stayed: Vec<(String, u64)>,
}

/// Opens the file and names it to local peers, if the program asks for it.
pub(super) fn open(settings: &Settings, peers: &LocalPath) -> Sharing {
    settings.shares_memory.then(|| begin(peers.as_ref().map_err(Clone::clone)?))
}

fn begin(peers: &LocalPeers) -> Result<(), String> {
    static HANDLERS: Once = Once::new();
    // SAFETY: functions without arguments that live as long as the process.
    HANDLERS.call_once(|| unsafe {
        libc::pthread_atfork(Some(hold_moves), Some(release_moves), Some(release_moves));
    });
    let mut shared = SHARED.lock();
    if shared.is_none() {
        let _still = Still::begin();
        let memory = Movable::new().map_err(|error| error.to_string())?;
        fork::close_in_children(&[memory.fd().as_raw_fd()]);
        *shared = Some(Shared { memory, engines: 0, stayed: BTreeMap::new() });
    }
    if let Some(shared) = &mut *shared {
        shared.engines += 1;
        peers.offer_movable(&shared.memory);
    }
    Ok(())
}

/// In a child: it has neither the pages nor the file.
///
/// # Safety
/// As [`ForkLock::renew`].
pub(crate) unsafe fn renew() {
    let leave = |shared: &mut Option<Shared>| std::mem::forget(shared.take());
    // SAFETY: as the caller promises.
    unsafe { SHARED.renew(None, leave) };
}

impl Engine {
    fn shares(&self) -> bool {
        matches!(self.sharing, Some(Ok(())))
    }

    /// A region that local peers are going to know: its memory moves to where they can map it, if
    /// the program has asked for it. The engine must not be locked: threads that touch the memory
    /// wait meanwhile. Undone by [`unshare`](Engine::unshare).
    pub(crate) fn share(&self, addr: u64, len: u64) -> Place {
        if !self.shares() {
            return Place::Private;
        }
        let mut shared = SHARED.lock();
        let Some(Shared { memory, stayed, .. }) = &mut *shared else { return Place::Private };
        let still = Still::begin();
        let entered = memory.enter(addr, len);
        drop(still);
        let reason = match entered {
            Ok(offset) => return Place::InFile(offset),
            Err(error) => error.to_string(),
        };
        if stayed.len() < MAX_REASONS || stayed.contains_key(&reason) {
            *stayed.entry(reason).or_default() += 1;
        }
        Place::Stayed
    }

    /// A region becomes known to local peers that was not, and its memory stays.
    pub(crate) fn keep(&self, addr: u64, len: u64) -> Place {
        match &mut *SHARED.lock() {
            Some(shared) if self.shares() => {
                shared.memory.stay(addr, len);
                Place::Stayed
            }
            _ => Place::Private,
        }
    }

    /// A region ends.
    pub(crate) fn unshare(&self, addr: u64, len: u64, place: Place) {
        if place == Place::Private {
            return;
        }
        if let Some(shared) = &mut *SHARED.lock() {
            let _still = Still::begin();
            shared.memory.leave(addr, len, place != Place::Stayed);
        }
    }

    /// Closes the file with the last device. All regions are gone.
    pub(super) fn close_shared(&self) {
        if !self.shares() {
            return;
        }
        let mut shared = SHARED.lock();
        if let Some(Shared { memory, engines, .. }) = &mut *shared {
            *engines -= 1;
            if *engines == 0 {
                fork::closed(&[memory.fd().as_raw_fd()]);
                *shared = None;
            }
        }
    }

    /// What moved; `None` if the program has not asked for it, and why nothing does.
    pub(crate) fn shared_report(&self) -> Option<Result<SharedReport, &str>> {
        if let Err(why) = self.sharing.as_ref()? {
            return Some(Err(why));
        }
        let shared = SHARED.lock();
        let Shared { memory, stayed, .. } = shared.as_ref()?;
        let (ranges, bytes) = memory.ranges();
        let stayed = stayed.iter().map(|(why, count)| (why.clone(), *count)).collect();
        Some(Ok(SharedReport { ranges, bytes, stayed }))
    }
}

/// While this lives, the process does not fork and this thread takes no signals.
struct Still(SignalsBlocked);

impl Still {
    fn begin() -> Still {
        let still = Still(SignalsBlocked::all());
        hold_moves();
        still
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let Still(_signals) = self;
        release_moves();
    }
}

/// Held while memory moves, and while the process forks. The thread that forks releases it, in
/// parent and child: a mutex of the standard library has no owner that a handler could give it back
/// for.
struct Moves(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: it is a mutex.
unsafe impl Sync for Moves {}

static MOVES: Moves = Moves(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

extern "C" fn hold_moves() {
    // SAFETY: an initialised mutex that lives as long as the process.
    unsafe { libc::pthread_mutex_lock(MOVES.0.get()) };
}

extern "C" fn release_moves() {
    // SAFETY: as above; this thread, or the one that it is the copy of, holds it.
    unsafe { libc::pthread_mutex_unlock(MOVES.0.get()) };
}
