//! Registered memory that neighbours can map: the program has asked for it (`DQUANT_MEMORY=shared`).
//!
//! [`nic::movable`] moves the memory. Here is what an engine has of it, and what `dquant explain` says about it. Memory that
//! cannot move stays where it is, and neighbours reach it as any other.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nic::movable::Movable;

use super::Engine;
use super::direct::Possible;
use crate::process::fork;
use crate::process::settings::Settings;

/// Reasons that are kept; there are fewer, but for error numbers.
const MAX_REASONS: usize = 16;

/// See the module's text. `None`: not asked for. Else the reason why nothing moves.
pub(super) type Shared = Option<Result<Mutex<Moved>, String>>;

/// The memory in the file, and why other memory is not there.
pub(super) struct Moved {
    /// `None` once the device is closed.
    memory: Option<Movable>,
    stayed: BTreeMap<String, u64>,
}

/// What moved and what did not.
#[derive(Debug, Default)]
pub(crate) struct SharedReport {
    /// Ranges of pages in the file.
    pub(crate) ranges: usize,
    pub(crate) bytes: u64,
    /// Why others are not there, and how many registrations each reason met.
    pub(crate) stayed: Vec<(String, u64)>,
}

/// Opens the file and names it to neighbours, if the program asks for it.
pub(super) fn open(settings: &Settings, neighbours: &Possible) -> Shared {
    settings.shares_memory.then(|| {
        let neighbours = neighbours.as_ref().map_err(Clone::clone)?;
        let memory = Movable::new().map_err(|error| error.to_string())?;
        neighbours.offer_movable(&memory);
        Ok(Mutex::new(Moved { memory: Some(memory), stayed: BTreeMap::new() }))
    })
}

impl Engine {
    fn moved(&self) -> Option<MutexGuard<'_, Moved>> {
        let shared = self.shared.as_ref()?.as_ref().ok()?;
        Some(shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Moves the memory of a region to where neighbours can map it, if the program has asked for it, and returns where it is
    /// in the file. The engine must not be locked: threads that touch the memory wait meanwhile.
    pub(crate) fn move_in(&self, addr: u64, len: u64) -> Option<u64> {
        let mut moved = self.moved()?;
        let Moved { memory: Some(memory), stayed } = &mut *moved else {
            return None;
        };
        let reason = match memory.move_in(addr, len) {
            Ok(offset) => return Some(offset),
            Err(error) => error.to_string(),
        };
        if stayed.len() < MAX_REASONS || stayed.contains_key(&reason) {
            *stayed.entry(reason).or_default() += 1;
        }
        None
    }

    /// Undoes a [`move_in`](Engine::move_in) that returned something.
    pub(crate) fn move_back(&self, addr: u64, len: u64) {
        if let Some(mut moved) = self.moved()
            && let Some(memory) = &mut moved.memory
        {
            memory.move_back(addr, len);
        }
    }

    /// The descriptor of the file.
    pub(super) fn shared_fd(&self) -> Option<RawFd> {
        Some(self.moved()?.memory.as_ref()?.fd().as_raw_fd())
    }

    /// Closes the file with the device. All regions are gone.
    pub(super) fn close_shared(&self) {
        if let Some(mut moved) = self.moved() {
            fork::closed(moved.memory.take().map(|memory| memory.fd().as_raw_fd()).as_slice());
        }
    }

    /// What moved; `None` if the program has not asked for it, and why nothing does.
    pub(crate) fn shared_report(&self) -> Option<Result<SharedReport, &str>> {
        match self.shared.as_ref()? {
            Err(why) => Some(Err(why)),
            Ok(_) => {
                let moved = self.moved()?;
                let (ranges, bytes) = moved.memory.as_ref()?.ranges();
                let stayed = moved.stayed.iter().map(|(why, count)| (why.clone(), *count));
                Some(Ok(SharedReport { ranges, bytes, stayed: stayed.collect() }))
            }
        }
    }
}
