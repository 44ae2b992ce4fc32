//! The reader: the work of a DPU (or, without offload, of the host) for one stream.
//!
//! It walks the global order of samples, prefetches their blocks from storage targets, runs its stages
//! over them and writes finished batches into the host's ring. The order alone decides which bytes are
//! delivered: not the sequence of responses, lost connections or the place of a conversion (C4).
//!
//! ```text
//! order ── next sample ──> lane (dataset) ── block resident? ── copy ────> slot of the ring
//!             │                 │ free buffer                               │ full
//!             └─ ahead ────────>└─ ReadRequest ──> target ── WRITE + response └─ publish
//! ```
//!
//! Its memory is the staging buffers of the lanes, allocated at the start (C6). A slow host leaves no
//! free slot, so nothing is copied, no buffer is freed and nothing more is requested. A stream with an
//! end requests nothing beyond it: unless a connection is lost, every needed block is read exactly
//! once.
//!
//! A token that does not fit, or that is missing because the file was truncated, is an error when the
//! order reaches its sample: every batch before that one is delivered first. To that end a block with
//! such a token is requested again sample by sample.
//!
//! [`Reader`] gets its blocks from storage targets, [`LocalReader`] from files of this machine. All that
//! they have in common is the assembler's: which block comes next, and how blocks become batches.
//!
//! A stream may [leave out](LeaveOut) batches. It is then a sequence of runs, each prepared beforehand like a
//! stream of its own; between two runs every buffer is free for a moment.
//!
//! Streams share a thread. Work that grows with the plan is done beforehand, on any thread, in
//! [`ReaderSetup::new`]; [`Reader::poll`] does a bounded amount: `BLOCK_BYTES_PER_POLL` and one more block
//! through their stages, `COPY_BYTES_PER_POLL` and `COPY_SAMPLES_PER_POLL` copied.
//!
//! Order of calls: [`ReaderSetup::new`], [`Reader::new`], [`Reader::connect`] for every connection, then
//! [`Reader::poll`] as long as it returns `true`. A [`LocalReader`] has nothing to connect.

mod assembler;
mod connection;
mod lane;
mod local;
mod remote;
mod runs;
mod schedule;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use roce::verbs::VerbsError;
use thiserror::Error;

use crate::capsule::Refusal;
use crate::dataset::Dtype;
use crate::order::{BLOCK_BYTES, CurriculumCursor, Order, SampleLayout};
use crate::stage::BlockStages;

pub use connection::{CREDIT_BYTES, ConnectionMemory};
use lane::Lane;
pub use local::LocalReader;
pub use remote::{Reader, ReaderResources};
use runs::Run;
pub use runs::{LeaveOut, LeaveOutError, MAX_LEFT_OUT};
use schedule::{Coverage, Schedule};

/// Blocks that one poll takes through their stages: as many as have these bytes, and no more than this.
const BLOCK_BYTES_PER_POLL: u64 = BLOCK_BYTES as u64 / 2;
const BLOCKS_PER_POLL: u32 = 8;

/// Times a block may arrive with a wrong CRC-32C; the last one ends the stream.
const CRC_RETRIES: u32 = 3;

/// The destination of finished batches: the ring shared with the host.
pub trait Sink {
    /// A slot to fill, or `None` while the host holds them all.
    fn acquire(&mut self) -> Option<u32>;

    /// Copies into the slot.
    fn write(&mut self, slot: u32, offset: u32, bytes: &[u8]);

    /// Hands the slot to the host.
    fn publish(&mut self, slot: u32, meta: SlotMeta);

    /// Ends the stream with an error, after everything published.
    fn fail(&mut self, error: &StreamError);

    /// Ends the stream: there are no more batches.
    fn finish(&mut self);
}

/// The contents of a published slot: whole batches, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMeta {
    /// Number of the first batch.
    pub first_batch: u64,
    /// Batches in the slot.
    pub batches: u32,
    /// Bytes of each.
    pub batch_bytes: u32,
}

/// A dataset of the reader.
#[derive(Clone, Debug)]
pub struct ReaderSource {
    /// The connection that serves it.
    pub connection: u32,
    /// Its index in that connection's session.
    pub source: u32,
    /// The file, and its division into samples.
    pub layout: SampleLayout,
    /// The stages for its blocks, at the target and here.
    pub stages: BlockStages,
}

/// The batches to deliver.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    /// Tokens per sample, as it is cut from a block.
    pub window_tokens: u32,
    /// Samples per batch.
    pub batch_samples: u32,
    /// Token type of samples as they are cut from blocks.
    pub sample_dtype: Dtype,
    /// Token type of the batches.
    pub dtype: Dtype,
    /// Whether a batch holds the inputs of all samples and then their labels, one token later.
    pub pairs: bool,
    /// First batch to deliver: resuming means starting at another number.
    pub first_batch: u64,
    /// Batches to deliver before the stream ends; without it the stream is endless.
    pub batches: Option<u64>,
    /// Bytes of a ring slot.
    pub slot_bytes: u32,
}

impl Delivery {
    /// Bytes of one batch.
    pub fn batch_bytes(&self) -> u64 {
        self.sample_bytes() * u64::from(self.batch_samples)
    }

    /// Bytes of a sample in a batch.
    fn sample_bytes(&self) -> u64 {
        let rows = if self.pairs { 2 } else { 1 };
        rows * u64::from(self.row_tokens()) * u64::from(self.dtype.bytes())
    }

    /// Tokens of a row of a batch: of a sample, or of its inputs or labels.
    pub fn row_tokens(&self) -> u32 {
        self.window_tokens - u32::from(self.pairs)
    }

    /// The first global sample of a batch.
    fn first_sample(&self, batch: u64) -> u64 {
        batch.saturating_mul(u64::from(self.batch_samples))
    }

    /// The batch after the last one.
    fn end_batch(&self) -> Option<u64> {
        Some(self.first_batch.saturating_add(self.batches?))
    }

    /// Whole batches that fit a slot.
    pub fn batches_per_slot(&self) -> u64 {
        u64::from(self.slot_bytes) / self.batch_bytes().max(1)
    }
}

/// Why a stream ended early. `dataset` is the index in the plan's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StreamError {
    /// A token does not fit the delivered type (C5).
    #[error(
        "dataset {dataset}: value {value} of token {token} (byte {byte}) does not fit the type to deliver"
    )]
    Overflow {
        /// Which dataset.
        dataset: u32,
        /// Index of the token.
        token: u64,
        /// Its offset in the file.
        byte: u64,
        /// Its value.
        value: i128,
    },
    /// The file became shorter while it was read.
    #[error(
        "dataset {dataset}: the file ends at byte {at_byte}, it was longer when the stream began"
    )]
    Truncated {
        /// Which dataset.
        dataset: u32,
        /// First missing byte.
        at_byte: u64,
    },
    /// The target's storage failed.
    #[error("dataset {dataset}: storage error {errno} at the target")]
    Storage {
        /// Which dataset.
        dataset: u32,
        /// Error number at the target.
        errno: i32,
    },
    /// The target refused a request.
    #[error("dataset {dataset}: the target refused a request: {reason}")]
    Refused {
        /// Which dataset.
        dataset: u32,
        /// Its reason.
        reason: Refusal,
    },
    /// A block arrived damaged each time it was requested.
    #[error("dataset {dataset}: a block failed its CRC-32C check {CRC_RETRIES} times")]
    Damaged {
        /// Which dataset.
        dataset: u32,
    },
    /// A connection could not be restored.
    #[error("connection {connection} to a target was lost and could not be restored")]
    Lost {
        /// Which connection.
        connection: u32,
    },
    /// Our device cannot read a completion queue of the stream.
    #[error("our device cannot read its completions: {0}")]
    Device(VerbsError),
}

/// Counters of a reader.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReaderCounters {
    /// Batches published.
    pub batches: u64,
    /// Bytes that targets read from storage for this stream.
    pub source_bytes: u64,
    /// Payload bytes that arrived from targets.
    pub wire_bytes: u64,
    /// Bytes written into the ring.
    pub delivered_bytes: u64,
    /// Conversions of blocks.
    pub narrowed_blocks: u64,
    /// Times a block with a wrong CRC-32C was requested again.
    pub corrupt_blocks: u64,
    /// Responses refused: undecodable, or matching no request of ours.
    pub bad_responses: u64,
    /// Completions of our device that no outstanding work request can have.
    pub bad_completions: u64,
    /// Requests sent again after a lost connection.
    pub retried_requests: u64,
    /// Connections lost.
    pub lost_connections: u64,
    /// Polls for which the next block had not arrived.
    pub waits_for_data: u64,
    /// Polls that found no free slot.
    pub waits_for_host: u64,
}

/// A run of a stream, prepared up to its first sample.
#[derive(Debug)]
struct Prepared {
    run: Run,
    /// Before its first sample.
    blend: CurriculumCursor,
    /// By lane.
    coverages: Vec<Coverage>,
}

impl Prepared {
    /// The run's batches in place of those of `delivery`. Walks on from `before`, a state of the blend.
    fn new(order: &Order, delivery: &Delivery, run: Run, before: &CurriculumCursor) -> Prepared {
        let (first, end) = run;
        let blend = before.forward_to(delivery.first_sample(first));
        let last = end.map(|end| blend.forward_to(delivery.first_sample(end)));
        let coverage = |lane| {
            let end = last.as_ref().map(|last| last.drawn(lane));
            Coverage::new(order.shuffle_of(lane), blend.drawn(lane), end)
        };
        let coverages = (0..order.datasets()).map(coverage).collect();
        Prepared { run, blend, coverages }
    }
}

impl Delivery {
    /// The delivery of one run of this stream.
    fn of_run(self, (first_batch, end): Run) -> Delivery {
        Delivery { first_batch, batches: end.map(|end| end - first_batch), ..self }
    }
}

/// A stream, prepared up to its first sample. Costs at most two walks of the blend for each of its runs, and
/// for each dataset a step per block of a shuffle group.
#[derive(Debug)]
pub struct ReaderSetup {
    schedule: Schedule,
    sources: Vec<ReaderSource>,
    /// Their addresses are relative to the start of the reader's memory.
    lanes: Vec<Lane>,
    /// Of the first run.
    delivery: Delivery,
    /// The runs after it.
    later: VecDeque<Prepared>,
    memory_bytes: u64,
}

impl ReaderSetup {
    /// Prepares a stream that starts at `delivery.first_batch`.
    pub fn new(order: Order, sources: Vec<ReaderSource>, delivery: Delivery) -> ReaderSetup {
        ReaderSetup::leaving_out(order, sources, delivery, &LeaveOut::default())
    }

    /// Prepares a stream that starts at `delivery.first_batch`, or at the first batch after it that is not left
    /// out, and ends where it would otherwise.
    pub fn leaving_out(
        order: Order,
        sources: Vec<ReaderSource>,
        delivery: Delivery,
        left_out: &LeaveOut,
    ) -> ReaderSetup {
        let delivers =
            |source: &ReaderSource| source.stages.output().dtype == delivery.sample_dtype;
        debug_assert!(sources.iter().all(delivers), "the stages give what is delivered");
        let first_batch = delivery.first_batch;
        let mut runs = left_out.runs(first_batch, delivery.end_batch()).into_iter();
        let nothing = (first_batch, Some(first_batch));
        let first = runs.next().unwrap_or(nothing);
        let begin = order.blend_at(delivery.first_sample(first.0));
        let Prepared { run, blend, coverages } = Prepared::new(&order, &delivery, first, &begin);
        let (mut lanes, mut memory_bytes) = (Vec::with_capacity(sources.len()), 0);
        for ((index, source), coverage) in sources.iter().enumerate().zip(coverages) {
            lanes.push(Lane::new(&order, index, source, memory_bytes, coverage));
            memory_bytes += Lane::bytes_needed(&order, index, source);
        }
        let mut later = VecDeque::new();
        for run in runs {
            let before = later.back().map_or(&blend, |prepared: &Prepared| &prepared.blend);
            let prepared = Prepared::new(&order, &delivery, run, before);
            later.push_back(prepared);
        }
        let layouts = sources.iter().map(|source| source.layout).collect();
        let cursor = order.cursor(blend);
        let schedule = Schedule::new(order, layouts, cursor);
        let delivery = delivery.of_run(run);
        ReaderSetup { schedule, sources, lanes, delivery, later, memory_bytes }
    }

    /// Bytes of staging buffers for the stream.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }
}

/// Blocks that all lanes together read ahead at least, and those of one lane.
const READ_AHEAD: u32 = 64;
const READ_AHEAD_OF_LANE: (u32, u32) = (4, 8);

/// Staging buffers of one of `lanes` lanes: for the group being consumed and the next, or enough to keep a disk
/// busy.
pub fn buffers_per_lane(group_blocks: u32, lanes: u32) -> u32 {
    let (least, most) = READ_AHEAD_OF_LANE;
    (2 * group_blocks).max((READ_AHEAD / lanes.max(1)).clamp(least, most))
}

#[cfg(test)]
mod tests;
