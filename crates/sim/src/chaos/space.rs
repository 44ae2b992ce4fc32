//! A node's memory as its programs see it: regions, slots allocated in them, and a model of the
//! expected value of every byte.
//!
//! Regions have gaps of random bytes between them, and so do slots within regions: a stray write of
//! the transport shows as a difference from the model. What a request leaves open when its
//! connection fails (did it arrive, in part, or not?) is settled byte by byte: each must be the old
//! one or the new one.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use roce::verbs::{Access, MAX_SGE, MemoryRegion, PdId, SgList, Sge};

use super::Checked;
use super::scenario::Habits;
use crate::chance::Chance;
use crate::memory::Arena;
use crate::network::Node;

/// What a region is for; also its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Sources that never change.
    Source,
    /// Sources that the program overwrites as soon as it may.
    Volatile,
    /// Destination of receives and READs, like the next one.
    SinkA,
    SinkB,
    /// Target of the peer's WRITEs, and of READs of what was written.
    Window,
    /// Target of READs only.
    Library,
    /// Target of atomics.
    Words,
    /// Belongs to another protection domain: no queue pair may access it.
    Foreign,
}

/// Destinations of receives and READs.
pub(super) const SINKS: [Use; 2] = [Use::SinkA, Use::SinkB];

/// How many words atomics work on.
pub(super) const WORDS: u64 = 4;

const REGIONS: usize = 8;

fn plan(max_len: u64, sides: u64) -> [(Use, u64, Access); REGIONS] {
    let sink = (max_len * 6 + 4_096) * sides;
    let read_only = Access { remote_read: true, ..Access::LOCAL_READ };
    let atomic = Access { remote_atomic: true, ..Access::LOCAL };
    [
        (Use::Source, 2 * max_len + 4_096, Access::LOCAL_READ),
        (Use::Volatile, max_len * 2 * sides + 4_096, Access::LOCAL_READ),
        (Use::SinkA, sink, Access::LOCAL),
        (Use::SinkB, sink, Access::LOCAL),
        (Use::Window, (max_len * 4 + 4_096) * sides, Access::ALL),
        (Use::Library, 2 * max_len + 4_096, read_only),
        (Use::Words, WORDS * 8, atomic),
        (Use::Foreign, 4_096, Access::ALL),
    ]
}

/// Access flags that some seeds add to a region, or remove from it. Its purpose stays possible.
fn vary(of: Use, access: Access, habits: &Habits, whims: &mut Chance) -> Access {
    let restricts = habits.restricts;
    let overtakes = habits.overtakes > 0;
    match of {
        Use::Window => Access {
            remote_read: !restricts || whims.per_mille(700),
            remote_atomic: !restricts || whims.per_mille(500),
            ..access
        },
        // The peer also reads it just before something is received there.
        Use::SinkA => Access { remote_read: overtakes && whims.per_mille(700), ..access },
        Use::Words => Access { remote_read: overtakes, ..access },
        _ => access,
    }
}

/// Free ranges of a region, as offsets, in order.
#[derive(Debug, Default)]
struct Slots {
    free: Vec<(u64, u64)>,
}

impl Slots {
    /// First fit from a random range on, after a gap.
    fn take(&mut self, len: u64, gap: u64, chance: &mut Chance) -> Option<u64> {
        let count = self.free.len();
        let first = chance.below(count as u64) as usize;
        let fits = |&at: &usize| self.free[at].1 - self.free[at].0 >= len + gap;
        let at = (0..count).map(|step| (first + step) % count).find(fits)?;
        let (start, end) = self.free[at];
        let taken = start + gap;
        let pieces = [(start, taken), (taken + len, end)];
        self.free.splice(at..=at, pieces.into_iter().filter(|(start, end)| start < end));
        Some(taken)
    }

    fn give(&mut self, start: u64, end: u64) {
        let at = self.free.partition_point(|&(free, _)| free < start);
        self.free.insert(at, (start, end));
        if self.free.get(at + 1).is_some_and(|&(next, _)| next == end) {
            self.free[at].1 = self.free.remove(at + 1).1;
        }
        if at > 0 && self.free[at - 1].1 == start {
            self.free[at - 1].1 = self.free.remove(at).1;
        }
    }
}

/// Length of the region that was deregistered.
pub(super) const STALE_BYTES: u32 = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Space {
    model: Vec<u8>,
    /// Their addresses are those of the bytes.
    regions: Vec<MemoryRegion>,
    /// What each region allows.
    access: Vec<Access>,
    /// Offset of the addresses that requests use.
    shifts: Vec<u64>,
    slots: Vec<Slots>,
    /// A region that was deregistered.
    pub(super) stale: MemoryRegion,
}

impl Space {
    /// Bytes that an arena needs.
    pub(super) fn arena_bytes(max_len: u64, sides: u64) -> usize {
        let regions: u64 = plan(max_len, sides).iter().map(|(_, len, _)| len).sum();
        (regions + (REGIONS as u64 + 1) * 600 + 8) as usize
    }

    /// Registers everything on a fresh node.
    pub(super) fn new(
        node: &mut Node<Arena>,
        max_len: u64,
        sides: u64,
        habits: &Habits,
        (chance, whims): (&mut Chance, &mut Chance),
    ) -> Checked<Space> {
        let foreign: PdId = node.endpoint.alloc_pd();
        let mut at = Arena::BASE + chance.between(1, 512);
        let mut regions = Vec::new();
        let mut shifts = Vec::new();
        let mut rights = Vec::new();
        let mut register = |pd, at: u64, shift, len, access| {
            let region = node.register_at(pd, at + shift, len, at, access);
            let region = region.map_err(|error| format!("register: {error}"))?;
            Ok::<_, String>(MemoryRegion { addr: at, ..region })
        };
        let own = PdId(0);
        let stale = register(own, at, 0, STALE_BYTES.into(), Access::ALL)?;
        for (of, len, access) in plan(max_len, sides) {
            let access = vary(of, access, habits, whims);
            rights.push(access);
            at = if of == Use::Words { at.next_multiple_of(8) } else { at };
            let pd = if of == Use::Foreign { foreign } else { own };
            let is_remote = matches!(of, Use::Window | Use::Library | Use::Words);
            let shift = if is_remote { chance.pick(&[0, 1 << 12, 1 << 40]) } else { 0 };
            regions.push(register(pd, at, shift, len, access)?);
            shifts.push(shift);
            at += len + chance.between(1, 512);
        }
        node.deregister(stale.lkey).map_err(|error| format!("deregister: {error}"))?;
        let free = |region: &MemoryRegion| Slots { free: Vec::from([(0, region.len)]) };
        let slots = regions.iter().map(free).collect();
        Ok(Space {
            model: node.memory.all().to_vec(),
            regions,
            access: rights,
            shifts,
            slots,
            stale,
        })
    }

    pub(super) fn region(&self, of: Use) -> MemoryRegion {
        self.regions[of as usize]
    }

    /// What a region allows.
    pub(super) fn access(&self, of: Use) -> Access {
        self.access[of as usize]
    }

    /// The address that requests use for the byte at `addr` of a region.
    pub(super) fn remote(&self, of: Use, addr: u64) -> u64 {
        addr + self.shifts[of as usize]
    }

    // ---- slots ---------------------------------------------------------------------------------

    fn take(&mut self, of: Use, len: u32, chance: &mut Chance) -> Option<Sge> {
        let region = self.region(of);
        let gap = chance.below(12);
        let slots = &mut self.slots[of as usize];
        let start = if len == 0 { 0 } else { slots.take(u64::from(len), gap, chance)? };
        Some(Sge { addr: region.addr + start, len, lkey: region.lkey })
    }

    /// `len` bytes that nothing else uses.
    pub(super) fn take_one(&mut self, of: Use, len: u32, chance: &mut Chance) -> Option<Sge> {
        self.take(of, len, chance)
    }

    /// `len` bytes in up to [`MAX_SGE`] pieces, some of them empty, from either of two regions.
    pub(super) fn take_list(
        &mut self,
        of: [Use; 2],
        len: u32,
        chance: &mut Chance,
    ) -> Option<SgList> {
        let mut list = SgList::new();
        for piece in split(len, chance) {
            let first = chance.below(2) as usize;
            let taken = self
                .take(of[first], piece, chance)
                .or_else(|| self.take(of[1 - first], piece, chance));
            let Some(sge) = taken else {
                self.give_all(&list);
                return None;
            };
            list.push(sge);
        }
        Some(list)
    }

    /// `len` bytes of sources that never change; they need not be freed.
    pub(super) fn lasting_source(&self, len: u32, chance: &mut Chance) -> SgList {
        let region = self.region(Use::Source);
        split(len, chance)
            .into_iter()
            .map(|piece| {
                let start = chance.below(region.len - u64::from(piece) + 1);
                Sge { addr: region.addr + start, len: piece, lkey: region.lkey }
            })
            .collect()
    }

    /// Frees slots.
    pub(super) fn give_all(&mut self, list: &[Sge]) {
        list.iter().for_each(|sge| self.give(sge.addr, sge.len));
    }

    /// Frees one slot.
    pub(super) fn give(&mut self, addr: u64, len: u32) {
        let holds = |region: &MemoryRegion| {
            region.addr <= addr && addr + u64::from(len) <= region.addr + region.len
        };
        if let Some(of) = self.regions.iter().position(holds).filter(|_| len > 0) {
            let start = addr - self.regions[of].addr;
            self.slots[of].give(start, start + u64::from(len));
        }
    }

    // ---- the model -----------------------------------------------------------------------------

    /// The expected bytes at `addr`.
    pub(super) fn expected(&self, addr: u64, len: usize) -> &[u8] {
        let at = (addr - Arena::BASE) as usize;
        &self.model[at..at + len]
    }

    /// The expected bytes of a list.
    pub(super) fn expected_list(&self, list: &[Sge]) -> Vec<u8> {
        let pieces = list.iter().flat_map(|sge| self.expected(sge.addr, sge.len as usize));
        pieces.copied().collect()
    }

    /// Expects `bytes` at `addr` from now on.
    pub(super) fn put(&mut self, addr: u64, bytes: &[u8]) {
        let at = (addr - Arena::BASE) as usize;
        self.model[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Expects `bytes` at the front of the list from now on.
    pub(super) fn put_list(&mut self, list: &[Sge], bytes: &[u8]) {
        for (sge, piece) in pieces(list, bytes) {
            self.put(sge.addr, piece);
        }
    }

    /// Each byte at `addr` must be the old one or that of `new`; the model takes it over.
    pub(super) fn settle(&mut self, arena: &Arena, addr: u64, new: &[u8]) -> Checked<()> {
        let now = arena.peek(addr, new.len());
        let old = self.expected(addr, new.len());
        let strange = (0..new.len()).find(|&at| now[at] != old[at] && now[at] != new[at]);
        if let Some(at) = strange {
            return Err(format!("byte {:#x} is neither the old nor the new one", addr + at as u64));
        }
        self.put(addr, now);
        Ok(())
    }

    /// The model takes over the bytes at `addr`.
    pub(super) fn adopt(&mut self, arena: &Arena, addr: u64, len: usize) {
        self.put(addr, arena.peek(addr, len));
    }

    /// Compares every byte of the arena, gaps included, with the model.
    pub(super) fn compare(&self, arena: &Arena) -> Checked<()> {
        let differs = arena.all().iter().zip(&self.model).position(|(a, b)| a != b);
        differs.map_or(Ok(()), |at| Err(self.describe(Arena::BASE + at as u64)))
    }

    fn describe(&self, addr: u64) -> String {
        let holds = |region: &MemoryRegion| (region.addr..region.addr + region.len).contains(&addr);
        let place = self.regions.iter().position(holds);
        format!("C3: byte {addr:#x} changed (region {place:?}) though nothing was to write there")
    }
}

/// The pieces of a list that `bytes` fill, from the front, with their bytes.
pub(super) fn pieces<'a>(
    list: &'a [Sge],
    bytes: &'a [u8],
) -> impl Iterator<Item = (&'a Sge, &'a [u8])> {
    let mut rest = bytes;
    list.iter().map(move |sge| {
        let (piece, later) = rest.split_at(rest.len().min(sge.len as usize));
        rest = later;
        (sge, piece)
    })
}

/// The first `len` bytes of a list in memory.
pub(super) fn gather(arena: &Arena, list: &[Sge], len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for sge in list {
        let take = (len - bytes.len()).min(sge.len as usize);
        bytes.extend_from_slice(arena.peek(sge.addr, take));
    }
    bytes
}

/// Mostly one piece, sometimes up to [`MAX_SGE`], sometimes none for an empty list.
fn split(len: u32, chance: &mut Chance) -> Vec<u32> {
    let pieces = chance.pick(&[1, 1, 1, 2, 3, MAX_SGE as u64]);
    let mut left = len;
    let mut cut = |piece| {
        let take = if piece == pieces { left } else { chance.below(u64::from(left) + 1) as u32 };
        left -= take;
        take
    };
    (1..=pieces).map(&mut cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_never_overlap_and_all_of_them_come_back() {
        let mut chance = Chance::new(9);
        let mut slots = Slots { free: Vec::from([(0, 10_000)]) };
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for _ in 0..2_000 {
            let len = chance.between(1, 400);
            match slots.take(len, chance.below(9), &mut chance) {
                Some(start) => {
                    let clear = taken.iter().all(|&(s, e)| e <= start || start + len <= s);
                    assert!(clear, "{start}+{len} overlaps");
                    taken.push((start, start + len));
                }
                None => {
                    let at = chance.below(taken.len() as u64) as usize;
                    let (start, end) = taken.swap_remove(at);
                    slots.give(start, end);
                }
            }
        }
        taken.into_iter().for_each(|(start, end)| slots.give(start, end));
        assert_eq!(slots.free, [(0, 10_000)]);
    }
}
