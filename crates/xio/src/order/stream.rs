//! The order of a stream: the own one, or that of Megatron-core, behind the same few questions.

use super::megatron::{MegatronCursor, MegatronOrder};
use super::{CurriculumCursor, Order};

/// Which sample of which dataset comes when.
#[derive(Clone, Debug)]
pub enum StreamOrder {
    /// Blocks shuffled and samples shuffled in groups, without tables and without an end.
    Own(Order),
    /// That of Megatron-core: samples are lists of pieces anywhere in the files, and they end.
    Megatron(MegatronOrder),
}

impl From<Order> for StreamOrder {
    fn from(order: Order) -> StreamOrder {
        StreamOrder::Own(order)
    }
}

impl From<MegatronOrder> for StreamOrder {
    fn from(order: MegatronOrder) -> StreamOrder {
        StreamOrder::Megatron(order)
    }
}

impl StreamOrder {
    /// Datasets of the blend.
    pub fn datasets(&self) -> usize {
        match self {
            StreamOrder::Own(order) => order.datasets(),
            StreamOrder::Megatron(order) => order.datasets(),
        }
    }

    /// Samples in all, if there is an end.
    pub fn samples(&self) -> Option<u64> {
        match self {
            StreamOrder::Own(_) => None,
            StreamOrder::Megatron(order) => Some(order.samples()),
        }
    }

    /// Bytes of its tables.
    pub fn table_bytes(&self) -> u64 {
        match self {
            StreamOrder::Own(_) => 0,
            StreamOrder::Megatron(order) => order.table_bytes(),
        }
    }

    /// The state before global sample `n`.
    pub(crate) fn state_at(&self, n: u64) -> StreamState {
        match self {
            StreamOrder::Own(order) => StreamState::Own(order.blend_at(n)),
            StreamOrder::Megatron(order) => StreamState::Megatron(order.cursor_at(n)),
        }
    }
}

/// How many samples were drawn from each dataset.
#[derive(Clone, Debug)]
pub(crate) enum StreamState {
    Own(CurriculumCursor),
    Megatron(MegatronCursor),
}

impl StreamState {
    /// The state before global sample `n`, which is not before this one.
    pub(crate) fn forward_to(&self, n: u64) -> StreamState {
        match self {
            StreamState::Own(cursor) => StreamState::Own(cursor.forward_to(n)),
            StreamState::Megatron(cursor) => StreamState::Megatron(cursor.forward_to(n)),
        }
    }

    /// Samples drawn from a dataset so far.
    pub(crate) fn drawn(&self, dataset: usize) -> u64 {
        match self {
            StreamState::Own(cursor) => cursor.drawn(dataset),
            StreamState::Megatron(cursor) => cursor.drawn(dataset),
        }
    }
}
