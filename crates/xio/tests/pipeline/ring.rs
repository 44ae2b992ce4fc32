//! A ring of slots with a consumer in virtual time: the second implementation of [`Sink`].

use std::collections::VecDeque;
use std::ops::Range;

use roce::{Duration, Time};
use xio::reader::{Sink, SlotMeta, StreamError};

use sim::chance::Chance;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    Filling,
    Published,
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finished,
    Failed(StreamError),
}

/// The host's side of a stream.
#[derive(Debug)]
pub(crate) struct HostRing {
    slots: Vec<(Slot, Vec<u8>)>,
    slot_bytes: usize,
    queue: VecDeque<(u32, SlotMeta)>,
    next_batch: u64,
    left_out: Range<u64>,
    /// Every batch, one after the other, as seen by the host.
    pub(crate) seen: Vec<u8>,
    pub(crate) batches_seen: u64,
    end: Option<End>,
    /// Mean time the host takes for a slot.
    pace_ns: u64,
    pub(crate) next_visit: Option<Time>,
    draw: Chance,
}

impl HostRing {
    pub(crate) fn new(
        slots: u32,
        slot_bytes: u32,
        first_batch: u64,
        left_out: Range<u64>,
        pace_ns: u64,
        seed: u64,
    ) -> HostRing {
        let slot = || (Slot::Free, Vec::new());
        HostRing {
            slots: std::iter::repeat_with(slot).take(slots as usize).collect(),
            slot_bytes: slot_bytes as usize,
            queue: VecDeque::new(),
            next_batch: first_batch,
            left_out,
            seen: Vec::new(),
            batches_seen: 0,
            end: None,
            pace_ns,
            next_visit: None,
            draw: Chance::new(seed),
        }
    }

    /// The end, once the host has taken all that came before it.
    pub(crate) fn end(&self) -> Option<End> {
        self.end.filter(|_| self.queue.is_empty())
    }

    /// Schedules the host's next visit if there is a reason for one.
    pub(crate) fn plan_visit(&mut self, now: Time) {
        if self.next_visit.is_none() && !self.queue.is_empty() {
            let wait = Duration::from_nanos(self.draw.below(2 * self.pace_ns + 1));
            self.next_visit = Some(now + wait);
        }
    }

    /// The host consumes a few slots and frees them.
    pub(crate) fn visit(&mut self, now: Time) {
        if self.next_visit.is_none_or(|at| at > now) {
            return;
        }
        self.next_visit = None;
        for _ in 0..self.draw.between(1, 3) {
            let Some((slot, meta)) = self.queue.pop_front() else {
                return;
            };
            let (state, bytes) = &mut self.slots[slot as usize];
            assert_eq!(*state, Slot::Published);
            *state = Slot::Free;
            self.seen.extend_from_slice(bytes);
            self.batches_seen += u64::from(meta.batches);
        }
    }
}

impl Sink for HostRing {
    fn acquire(&mut self, _: u32) -> Option<u32> {
        assert_eq!(self.end, None, "a slot is wanted after the end");
        let free = self.slots.iter().position(|(slot, _)| *slot == Slot::Free)?;
        self.slots[free] = (Slot::Filling, Vec::new());
        Some(free as u32)
    }

    fn write(&mut self, slot: u32, offset: u32, bytes: &[u8]) {
        let (state, filled) = &mut self.slots[slot as usize];
        assert_eq!(*state, Slot::Filling, "slot {slot} is not ours");
        assert_eq!(filled.len(), offset as usize, "slot {slot} has a hole");
        filled.extend_from_slice(bytes);
        assert!(filled.len() <= self.slot_bytes, "slot {slot} is too small");
    }

    fn publish(&mut self, slot: u32, meta: SlotMeta) {
        assert_eq!(self.end, None, "a batch came after the end");
        let (state, filled) = &mut self.slots[slot as usize];
        assert_eq!(*state, Slot::Filling, "slot {slot} is not ours");
        if self.left_out.contains(&self.next_batch) {
            self.next_batch = self.left_out.end;
        }
        assert_eq!(meta.first_batch, self.next_batch, "batches are in order");
        assert!(meta.batches > 0, "an empty slot");
        let bytes = meta.batches as usize * meta.batch_bytes as usize;
        assert!(filled.len() >= bytes, "slot {slot} lacks bytes");
        filled.truncate(bytes);
        *state = Slot::Published;
        self.next_batch += u64::from(meta.batches);
        self.queue.push_back((slot, meta));
    }

    fn fail(&mut self, error: &StreamError) {
        assert_eq!(self.end, None, "a second end");
        self.end = Some(End::Failed(*error));
    }

    fn finish(&mut self) {
        assert_eq!(self.end, None, "a second end");
        self.end = Some(End::Finished);
    }
}
