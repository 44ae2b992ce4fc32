//! The course of a stream: the order of samples, told in blocks as the lanes fetch them.
//!
//! A block's *position* is its number in fetch order over all epochs of its dataset. Groups do not cross
//! epochs, so a position is arithmetic: `epoch * blocks + group * group_blocks + slot`.

use alloc::vec;
use alloc::vec::Vec;

use crate::order::{Order, OrderCursor, SampleLayout};

/// The sample that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pick {
    pub(super) dataset: u32,
    /// Position of its block.
    pub(super) position: u64,
    /// Which sample of the block.
    pub(super) sample: u32,
}

/// What a block covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) first_token: u64,
    pub(super) tokens: u32,
    pub(super) samples: u32,
}

/// Where a dataset stands before some global sample: which samples of which blocks came before it.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    /// Position of the first block of the group that comes next. Everything before it came in full.
    pub(super) first: u64,
    /// Samples that came from each block of that group; nothing did from later ones.
    drawn: Vec<u32>,
}

impl Cut {
    /// How many of a block's `samples` came before.
    pub(super) fn drawn(&self, position: u64, samples: u32) -> u32 {
        match position.checked_sub(self.first) {
            None => samples,
            Some(slot) => self.drawn.get(slot as usize).copied().unwrap_or(0),
        }
    }

    /// Whether nothing came from the block at `position`, nor from any later one.
    pub(super) fn is_before(&self, position: u64) -> bool {
        position >= self.first + self.drawn.len() as u64
    }
}

#[derive(Debug)]
pub(super) struct Course {
    order: Order,
    layouts: Vec<SampleLayout>,
    cursor: OrderCursor,
    next: Pick,
}

impl Course {
    /// Starts at a global sample. `layouts` are in the order's sequence of datasets.
    pub(super) fn new(order: Order, layouts: Vec<SampleLayout>, first_sample: u64) -> Course {
        let cursor = order.cursor_at(first_sample);
        let next = Pick { dataset: 0, position: 0, sample: 0 };
        let mut course = Course { order, layouts, cursor, next };
        course.advance();
        course
    }

    pub(super) fn peek(&self) -> Pick {
        self.next
    }

    pub(super) fn advance(&mut self) {
        let (dataset, position, sample) = self.cursor.step_position();
        self.next = Pick { dataset: dataset as u32, position, sample };
    }

    /// Blocks that must be resident together.
    pub(super) fn group_blocks(&self, dataset: u32) -> u32 {
        self.order.shuffle_of(dataset as usize).group_blocks() as u32
    }

    /// Tokens of a full block.
    pub(super) fn block_tokens(&self, dataset: u32) -> u64 {
        let layout = &self.layouts[dataset as usize];
        u64::from(layout.samples_per_block) * u64::from(layout.window)
    }

    /// What the block at `position` covers.
    pub(super) fn block(&self, dataset: u32, position: u64) -> Span {
        let shuffle = self.order.shuffle_of(dataset as usize);
        let (epoch, in_epoch) = (position / shuffle.blocks(), position % shuffle.blocks());
        let block = shuffle.epoch(epoch).block_in(in_epoch);
        let window = u64::from(self.layouts[dataset as usize].window);
        Span {
            first_token: block.block * self.block_tokens(dataset),
            tokens: (u64::from(block.samples) * window) as u32,
            samples: block.samples,
        }
    }

    /// Tokens of the largest block there is.
    pub(super) fn most_tokens(&self, dataset: u32) -> u64 {
        let layout = &self.layouts[dataset as usize];
        let samples = layout.samples.min(layout.samples_per_block.into());
        samples * u64::from(layout.window)
    }

    /// Whether any sample is ever taken from the dataset.
    pub(super) fn has_weight(&self, dataset: u32) -> bool {
        self.order.blend().weights()[dataset as usize] > 0
    }

    /// Where a dataset stands before global sample `sample`.
    pub(super) fn cut(&self, dataset: u32, sample: u64) -> Cut {
        let drawn = self.order.cursor_at(sample).drawn(dataset as usize);
        let shuffle = self.order.shuffle_of(dataset as usize);
        let (number, index) = shuffle.split(drawn);
        let epoch = shuffle.epoch(number);
        let group = epoch.group(epoch.group_of(index));
        let mut cut = Cut {
            first: number * shuffle.blocks() + group.number() * shuffle.group_blocks(),
            drawn: vec![0; group.blocks().len()],
        };
        for earlier in group.indices().start..index {
            cut.drawn[group.at(earlier).slot as usize] += 1;
        }
        cut
    }
}
