//! The block fetch schedule of a stream: the order of its samples, and the blocks they are taken
//! from.
//!
//! A block's *position* is its number in fetch order over all epochs of its dataset. Groups do not
//! cross epochs, so a position is arithmetic: `epoch * blocks + group * group_blocks + slot`.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use crate::order::megatron::MegatronCursor;
use crate::order::{
    BlockShuffle, Cut, Group, Order, OrderCursor, SampleLayout, StreamOrder, StreamState,
};

/// The next sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pick {
    pub(super) dataset: u32,
    /// Position of its block.
    pub(super) position: u64,
    /// Which sample of the block.
    pub(super) sample: u32,
    /// From that position on, blocks that the sample consists of.
    pub(super) blocks: u32,
}

/// The tokens and samples of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRange {
    /// Its number in the file.
    pub(super) number: u64,
    pub(super) first_token: u64,
    pub(super) tokens: u32,
    pub(super) samples: u32,
}

/// Most samples of a cut group that are counted, for each of its blocks. With more than this on
/// either side of the cut, the chance that a block has no sample to deliver is e^-64.
const COUNTED_PER_BLOCK: u64 = 64;

/// A group that a stream delivers in part: its first, or its last.
#[derive(Clone, Debug)]
struct CutGroup {
    /// Position of its first block.
    first: u64,
    /// Samples to deliver of each of its blocks; all samples of the block, where counting would
    /// take too long.
    needed: Vec<u32>,
}

impl CutGroup {
    /// The samples `wanted` of `group`, which begins at `first`.
    fn new(group: &Group, first: u64, wanted: Range<u64>) -> CutGroup {
        let mut needed: Vec<u32> = group.blocks().map(|block| block.samples).collect();
        let (all, most) = (group.indices(), COUNTED_PER_BLOCK * needed.len() as u64);
        let taken = wanted.end - wanted.start;
        let left_out = all.end - all.start - taken;
        if taken <= left_out.min(most) {
            needed.fill(0);
            wanted.for_each(|index| needed[group.slot_of(index) as usize] += 1);
        } else if left_out <= most {
            let others = (all.start..wanted.start).chain(wanted.end..all.end);
            others.for_each(|index| needed[group.slot_of(index) as usize] -= 1);
        }
        CutGroup { first, needed }
    }

    /// Position after its last block.
    fn end(&self) -> u64 {
        self.first + self.needed.len() as u64
    }

    /// Position after the last block that is needed.
    fn needed_end(&self) -> u64 {
        let last = self.needed.iter().rposition(|samples| *samples > 0);
        last.map_or(self.first, |slot| self.first + slot as u64 + 1)
    }

    /// Samples to deliver of a block, if it belongs to this group.
    fn of(&self, position: u64) -> Option<u32> {
        let slot = usize::try_from(position.checked_sub(self.first)?).ok()?;
        self.needed.get(slot).copied()
    }
}

/// The part of a dataset delivered by a stream: which blocks, and how many samples of each.
#[derive(Clone, Debug)]
pub(super) struct Coverage {
    /// The group it begins in.
    head: CutGroup,
    /// The group it ends in, if that is another.
    tail: Option<CutGroup>,
    /// Position after the last block, if there is one.
    end: Option<u64>,
    /// Of listed samples, those to deliver: their pieces are the blocks.
    listed: Range<u64>,
}

impl Coverage {
    /// The samples of a dataset from the `start`-th on, up to but not including the `end`-th.
    pub(super) fn new(shuffle: &BlockShuffle, start: u64, end: Option<u64>) -> Coverage {
        let cut = |k: u64| {
            let (number, index) = shuffle.split(k);
            let epoch = shuffle.epoch(number);
            let group = epoch.group(epoch.group_of(index));
            (number * shuffle.blocks() + group.number() * shuffle.group_blocks(), group, index)
        };
        let (first, group, index) = cut(start);
        let to_its_end = index..group.indices().end;
        match end.map(cut) {
            None => {
                let head = CutGroup::new(&group, first, to_its_end);
                Coverage { head, tail: None, end: None, listed: 0..0 }
            }
            Some((last, _, last_index)) if last == first => {
                let head = CutGroup::new(&group, first, index..last_index);
                Coverage { end: Some(head.needed_end()), head, tail: None, listed: 0..0 }
            }
            Some((last, last_group, last_index)) => {
                let from_its_start = last_group.indices().start..last_index;
                let tail = CutGroup::new(&last_group, last, from_its_start);
                let head = CutGroup::new(&group, first, to_its_end);
                let end = Some(tail.needed_end());
                Coverage { head, end, tail: Some(tail), listed: 0..0 }
            }
        }
    }

    /// The listed samples of a dataset from the `start`-th on, up to but not including the
    /// `end`-th. Their pieces have positions from 0 on.
    pub(super) fn listed(samples: Range<u64>) -> Coverage {
        let head = CutGroup { first: 0, needed: Vec::new() };
        Coverage { head, tail: None, end: None, listed: samples }
    }

    /// The listed samples.
    pub(super) fn listed_samples(&self) -> Range<u64> {
        self.listed.clone()
    }

    /// Position of the first block.
    pub(super) fn first(&self) -> u64 {
        self.head.first
    }

    /// Position of the first block after the group it begins in.
    pub(super) fn head_end(&self) -> u64 {
        self.head.end()
    }

    /// At most how many of a block's `samples` are to be delivered.
    pub(super) fn samples(&self, position: u64, samples: u32) -> u32 {
        let tail = || self.tail.as_ref().and_then(|tail| tail.of(position));
        self.head.of(position).or_else(tail).unwrap_or(samples)
    }

    /// Whether no block from `position` on is needed.
    pub(super) fn ends_before(&self, position: u64) -> bool {
        self.end.is_some_and(|end| position >= end)
    }
}

/// Walks the samples of a stream. See the [module](self).
#[derive(Debug)]
pub(super) struct Schedule {
    walk: Walk,
    next: Pick,
}

#[derive(Debug)]
enum Walk {
    Own {
        order: Order,
        /// In the order of the datasets in `order`.
        cuts: Vec<(SampleLayout, Cut)>,
        cursor: Box<OrderCursor>,
    },
    Megatron {
        cursor: MegatronCursor,
        /// By dataset, the pieces of all samples before the next.
        taken: Vec<u64>,
    },
}

/// Nothing.
const NO_PICK: Pick = Pick { dataset: 0, position: 0, sample: 0, blocks: 0 };

impl Schedule {
    /// Starts at `state`, one of `order`. `cuts` are in the order of the datasets in `order`.
    pub(super) fn new(
        order: StreamOrder,
        cuts: Vec<(SampleLayout, Cut)>,
        state: StreamState,
    ) -> Schedule {
        let taken = alloc::vec![0; cuts.len()];
        let walk = match (order, state) {
            (StreamOrder::Own(order), state) => {
                // No state is one of another order: they are all from `StreamOrder::state_at`.
                let cursor = match state {
                    StreamState::Own(blend) => order.cursor(blend),
                    StreamState::Megatron(_) => order.cursor_at(0),
                };
                Walk::Own { order, cuts, cursor: Box::new(cursor) }
            }
            (StreamOrder::Megatron(order), StreamState::Own(_)) => {
                Walk::Megatron { cursor: order.cursor_at(0), taken }
            }
            (StreamOrder::Megatron(_), StreamState::Megatron(cursor)) => {
                Walk::Megatron { cursor, taken }
            }
        };
        let mut schedule = Schedule { walk, next: NO_PICK };
        schedule.advance();
        schedule
    }

    /// Goes on at another place of the order.
    pub(super) fn restart(&mut self, state: StreamState) {
        match (&mut self.walk, state) {
            (Walk::Own { order, cursor, .. }, StreamState::Own(blend)) => {
                **cursor = order.cursor(blend);
            }
            (Walk::Megatron { cursor, taken }, StreamState::Megatron(at)) => {
                *cursor = at;
                taken.fill(0);
            }
            _ => {}
        }
        self.advance();
    }

    pub(super) fn peek(&self) -> Pick {
        self.next
    }

    pub(super) fn advance(&mut self) {
        self.next = match &mut self.walk {
            Walk::Own { cursor, .. } => {
                let (dataset, position, sample) = cursor.step_position();
                Pick { dataset: dataset as u32, position, sample, blocks: 1 }
            }
            Walk::Megatron { cursor, taken } => {
                // After the last sample there is nothing to pick, and the stream has ended.
                cursor.next().map_or(NO_PICK, |(dataset, k)| {
                    let blocks = cursor.order().pieces(dataset, k).count() as u32;
                    let position = taken[dataset];
                    taken[dataset] += u64::from(blocks);
                    Pick { dataset: dataset as u32, position, sample: 0, blocks }
                })
            }
        };
    }

    /// The block at `position` of a dataset whose samples are not listed.
    pub(super) fn block(&self, dataset: u32, position: u64) -> Option<BlockRange> {
        let Walk::Own { order, cuts, .. } = &self.walk else {
            return None;
        };
        let shuffle = order.shuffle_of(dataset as usize);
        let (epoch, in_epoch) = (position / shuffle.blocks(), position % shuffle.blocks());
        let block = shuffle.epoch(epoch).block_in(in_epoch);
        let (layout, cut) = &cuts[dataset as usize];
        let (number, samples) = (block.block, block.samples);
        if let Cut::Packed(packing) = cut {
            let Range { start, end } = packing.block(number);
            // In range: a block has at most BLOCK_BYTES.
            return Some(BlockRange {
                number,
                first_token: start,
                tokens: (end - start) as u32,
                samples,
            });
        }
        let number = layout.block_in_file(number);
        let first_token = number * u64::from(layout.samples_per_block) * u64::from(layout.stride());
        let tokens = layout.run_tokens(samples.into()) as u32;
        Some(BlockRange { number, first_token, tokens, samples })
    }
}
