//! Regions of memory that the program owns, kept registered between uses.
//!
//! - An entry is found while its pages hold ([`Watch::holds`]). Entries that became stale are
//!   deregistered when the last user is gone.
//! - Entries and their bytes are bounded. The least recently used one without users makes room.
//! - Regions have local rights only. A peer that knew a key could use it after the program has
//!   freed the memory.
//!
//! Which memory is better copied does not belong here.

use std::collections::BTreeMap;
use std::sync::Arc;

use roce::device::Device;
use roce::verbs::{Access, MemoryRegion, PdId, VerbsError};

use super::watch::{Unwatched, Watch, Watched};
use super::{Counters, Limits, Uncached};

/// What the cache asks of a device.
pub(super) trait Regions {
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError>;

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError>;
}

impl<D: Device> Regions for D {
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        Device::register(self, pd, addr, len, access)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        Device::deregister(self, lkey)
    }
}

/// Writable, first byte, end.
type Key = (bool, u64, u64);

#[derive(Debug)]
struct Entry {
    region: MemoryRegion,
    key: Key,
    watched: Watched,
    users: u32,
    used_at: u64,
    /// Whether it is in the index, to be found.
    is_current: bool,
}

/// The cache of one protection domain.
#[derive(Debug)]
pub(super) struct Cache {
    watch: Arc<Watch>,
    entries: Vec<Option<Entry>>,
    index: BTreeMap<Key, usize>,
    bytes: u64,
    max_bytes: u64,
    uses: u64,
    /// [`Watch::marked`] at the last look at all entries.
    marked: u64,
}

impl Cache {
    pub(super) fn new(watch: Arc<Watch>, limits: &Limits) -> Cache {
        let mut entries = Vec::new();
        entries.resize_with(limits.entries, || None);
        let (max_bytes, marked) = (limits.bytes, watch.marked());
        Cache { watch, entries, index: BTreeMap::new(), bytes: 0, max_bytes, uses: 0, marked }
    }

    /// Bytes that are registered.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Regions that are registered.
    pub(super) fn regions(&self) -> usize {
        self.entries.iter().flatten().count()
    }

    /// An entry for the range, found or made, and in use from now on.
    pub(super) fn acquire<D: Regions>(
        &mut self,
        device: &mut D,
        pd: PdId,
        range: (u64, u64),
        is_written: bool,
        counters: &mut Counters,
    ) -> Result<(usize, MemoryRegion), Uncached> {
        self.sweep(device, counters);
        let (addr, len) = range;
        let end = addr.checked_add(len).ok_or(Uncached::Watch(Unwatched::NotMapped))?;
        let place = match self.find(addr, end, is_written) {
            Some(place) if self.holds(place) => {
                counters.hits += 1;
                place
            }
            // Something changes at this moment, perhaps this. The region may be good, but nobody
            // can know.
            Some(_) => return Err(Uncached::Uncertain),
            None => {
                counters.misses += 1;
                self.insert(device, pd, (is_written, addr, end), counters)?
            }
        };
        self.uses += 1;
        let entry = self.entries[place].as_mut().ok_or(Uncached::Full)?;
        (entry.users, entry.used_at) = (entry.users + 1, self.uses);
        Ok((place, entry.region))
    }

    /// A use has ended.
    pub(super) fn release<D: Regions>(
        &mut self,
        device: &mut D,
        place: usize,
        counters: &mut Counters,
    ) {
        if let Some(entry) = self.entries.get_mut(place).and_then(Option::as_mut) {
            entry.users = entry.users.saturating_sub(1);
        }
        self.sweep(device, counters);
        self.remove_unused(device, place, counters);
    }

    /// Takes stale entries out of the index, and deregisters those without users.
    pub(super) fn sweep<D: Regions>(&mut self, device: &mut D, counters: &mut Counters) {
        let marked = self.watch.marked();
        if marked == self.marked {
            return;
        }
        self.marked = marked;
        for place in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[place] else { continue };
            if entry.is_current && self.watch.is_stale(&entry.watched) {
                entry.is_current = false;
                self.index.remove(&entry.key);
                counters.invalidated += 1;
            }
            self.remove_unused(device, place, counters);
        }
    }

    /// Deregisters everything, also what is in use.
    pub(super) fn clear<D: Regions>(&mut self, device: &mut D, counters: &mut Counters) {
        self.index.clear();
        for place in 0..self.entries.len() {
            if let Some(entry) = &mut self.entries[place] {
                (entry.users, entry.is_current) = (0, false);
            }
            self.remove_unused(device, place, counters);
        }
    }

    /// The entry that begins last among those that begin at or before the range, if it contains the
    /// range. With nested entries this may overlook one, which costs a registration.
    fn find(&self, addr: u64, end: u64, is_written: bool) -> Option<usize> {
        let last = |writable| {
            let mut keys = self.index.range((writable, 0, 0)..=(writable, addr, u64::MAX));
            keys.next_back().filter(|(key, _)| key.2 >= end).map(|(_, &place)| place)
        };
        last(true).or_else(|| if is_written { None } else { last(false) })
    }

    fn holds(&self, place: usize) -> bool {
        self.entries[place].as_ref().is_some_and(|entry| self.watch.holds(&entry.watched))
    }

    fn insert<D: Regions>(
        &mut self,
        device: &mut D,
        pd: PdId,
        key: Key,
        counters: &mut Counters,
    ) -> Result<usize, Uncached> {
        let (is_written, addr, end) = key;
        let len = end - addr;
        let place = self.make_room(device, len, counters)?;
        let watched = self.watch.begin(addr, len).map_err(Uncached::Watch)?;
        let access = if is_written { Access::LOCAL } else { Access::LOCAL_READ };
        let region = match device.register(pd, addr, len, access) {
            Ok(region) => region,
            Err(error) => {
                self.watch.end(watched);
                return Err(Uncached::Device(error));
            }
        };
        self.bytes += len;
        let is_current = self.watch.holds(&watched);
        self.entries[place] =
            Some(Entry { region, key, watched, users: 0, used_at: 0, is_current });
        if !is_current {
            self.remove_unused(device, place, counters);
            return Err(Uncached::Uncertain);
        }
        self.index.insert(key, place);
        Ok(place)
    }

    /// A free place, and bytes for a region of this length.
    fn make_room<D: Regions>(
        &mut self,
        device: &mut D,
        len: u64,
        counters: &mut Counters,
    ) -> Result<usize, Uncached> {
        if len > self.max_bytes {
            return Err(Uncached::Large);
        }
        loop {
            let free = self.entries.iter().position(Option::is_none);
            if let Some(place) = free.filter(|_| self.bytes <= self.max_bytes - len) {
                return Ok(place);
            }
            let oldest = self.oldest_unused().ok_or(Uncached::Full)?;
            if let Some(entry) = &mut self.entries[oldest] {
                entry.is_current = false;
                self.index.remove(&entry.key);
            }
            counters.evicted += 1;
            self.remove_unused(device, oldest, counters);
        }
    }

    fn oldest_unused(&self) -> Option<usize> {
        let places = self.entries.iter().enumerate();
        let unused = places.filter_map(|(place, entry)| Some((place, entry.as_ref()?)));
        let unused = unused.filter(|(_, entry)| entry.users == 0 && entry.is_current);
        unused.min_by_key(|(_, entry)| entry.used_at).map(|(place, _)| place)
    }

    /// Deregisters an entry that is neither to be found nor in use. A device that refuses is asked
    /// again later.
    fn remove_unused<D: Regions>(&mut self, device: &mut D, place: usize, counters: &mut Counters) {
        let done = |entry: &mut Entry| !entry.is_current && entry.users == 0;
        let Some(entry) = self.entries[place].take_if(done) else { return };
        if device.deregister(entry.region.lkey).is_err() {
            counters.not_deregistered += 1;
            self.entries[place] = Some(entry);
            return;
        }
        self.bytes -= entry.region.len;
        self.watch.end(entry.watched);
    }
}

impl Drop for Cache {
    /// The regions end with their device; the watch is shared.
    fn drop(&mut self) {
        for entry in self.entries.drain(..).flatten() {
            self.watch.end(entry.watched);
        }
    }
}
