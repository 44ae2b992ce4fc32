//! The reader: the work of a DPU (or, without offload, of the host) for one stream.
//!
//! It walks the global order of samples, prefetches their blocks from storage targets, runs its
//! stages over them and writes finished batches into the host's ring. The order alone decides which
//! bytes are delivered: not the sequence of responses, lost connections or the place of a
//! conversion (C4).
//!
//! ```text
//! order ── next sample ──> lane (dataset) ── block resident? ── copy ────> slot of the ring
//!             │                 │ free buffer                               │ full
//!             └─ ahead ────────>└─ ReadRequest ──> target ── WRITE + response └─ publish
//! ```
//!
//! Its memory is the staging buffers of the lanes, allocated at the start (C6). A slow host leaves
//! no free slot, so nothing is copied, no buffer is freed and nothing more is requested. A stream
//! with an end requests nothing beyond it: unless a connection is lost, every needed block is read
//! exactly once.
//!
//! A token that does not fit, that is missing because the file was truncated, or that a user action
//! fails at, is an error when the order reaches its sample: every batch before that one is
//! delivered first. To that end a block with such a token is requested again sample by sample.
//!
//! [`Reader`] gets its blocks from storage targets, [`LocalReader`] from files of this machine. All
//! that they have in common is the assembler's: which block comes next, and how blocks become
//! batches.
//!
//! A stream may [leave out](LeaveOut) batches. It is then a sequence of runs, each prepared
//! beforehand like a stream of its own; between two runs every buffer is free for a moment.
//!
//! Streams share a thread. Work that grows with the plan is done beforehand, on any thread, in
//! [`ReaderSetup::new`]; [`Reader::poll`] does a bounded amount: `BLOCK_BYTES_PER_POLL` and one
//! more block through their stages, `COPY_BYTES_PER_POLL` and `COPY_SAMPLES_PER_POLL` copied.
//!
//! Order of calls: [`ReaderSetup::new`], [`Reader::new`], [`Reader::connect`] for every connection,
//! then [`Reader::poll`] as long as it returns `true`. A [`LocalReader`] has nothing to connect.

mod assembler;
mod connection;
mod lane;
mod local;
mod remote;
mod rows;
mod runs;
mod schedule;
mod share;

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use roce::verbs::VerbsError;
use thiserror::Error;

use crate::capsule::Refusal;
use crate::dataset::{Dtype, Format, TokenFile};
use crate::disk::Change;
use crate::kernel::MapFault;
use crate::order::{BLOCK_BYTES, Cut, SampleLayout, StreamOrder, StreamState};
use crate::stage::{BlockStages, Limit, Received, Rows};

pub use connection::{CREDIT_BYTES, ConnectionMemory};
use lane::Lane;
pub use local::{LocalFile, LocalReader, PROOF_BUFFERS};
pub use remote::{Reader, ReaderResources};
use runs::Run;
pub use runs::{LeaveOut, LeaveOutError, MAX_LEFT_OUT};
use schedule::{Coverage, Schedule};
pub use share::Share;

/// Bytes of a loss weight, a `f32`.
const WEIGHT_BYTES: u32 = Dtype::F32.bytes();

/// Batches with loss weights begin at multiples of this, so that any type of tokens is aligned.
const BATCH_ALIGN: u64 = 8;

/// Blocks that one poll takes through their stages: as many as have these bytes, and no more than
/// this.
const BLOCK_BYTES_PER_POLL: u64 = BLOCK_BYTES as u64 / 2;
const BLOCKS_PER_POLL: u32 = 8;

/// Times a block may arrive with a wrong CRC-32C; the last one ends the stream.
const CRC_RETRIES: u32 = 3;

/// The destination of finished batches: the rings shared with the host, one for each rank of the
/// stream's [`Share`].
pub trait Sink {
    /// A slot of a ring to fill, or `None` while the host holds them all. No two slots that are
    /// being filled have one number, whatever their rings.
    fn acquire(&mut self, ring: u32) -> Option<u32>;

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
    /// Number of the first batch, counted over the batches of this ring, from the number of the
    /// stream's first.
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
    /// How samples are cut from its blocks.
    pub cut: Cut,
    /// The stages for its blocks, at the target and here.
    pub stages: BlockStages,
    /// Whether whole pages of the file are read into the staging buffers, as for files with a
    /// manifest.
    pub whole_pages: bool,
    /// The source of tokens that this one has the loss weights of, if it is one of weights. Such
    /// sources follow those of tokens; each is divided and cut as its tokens are.
    pub weighs: Option<u32>,
}

impl ReaderSource {
    /// The source of the loss weights of its tokens, whose first lies `data_offset` bytes into a
    /// file of their own. It is served by the same connection as the tokens, under the same number
    /// until it gets another.
    #[must_use]
    pub fn loss_weights(&self, data_offset: u64, stages: BlockStages) -> ReaderSource {
        let tokens = self.layout.file.tokens;
        let file = TokenFile { dtype: Dtype::F32, data_offset, tokens, format: Format::Flat };
        let layout = SampleLayout { file, ..self.layout };
        ReaderSource { layout, stages, weighs: Some(self.source), ..self.clone() }
    }

    /// The dataset of the order that it belongs to, where it is this one of the sources.
    fn dataset(&self, index: usize) -> usize {
        self.weighs.map_or(index, |dataset| dataset as usize)
    }
}

/// By dataset, the source of its loss weights.
fn weights_of(sources: &[ReaderSource]) -> Vec<Option<u32>> {
    let mut weights = vec![None; sources.len()];
    for (index, source) in (0..).zip(sources) {
        if let Some(dataset) = source.weighs {
            weights[dataset as usize] = Some(index);
        }
    }
    weights
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
    /// The rows of a batch: of each, those of all samples.
    pub rows: Rows,
    /// First batch to deliver: resuming means starting at another number.
    pub first_batch: u64,
    /// Batches to deliver to each rank before the stream ends; without it the stream is endless.
    pub batches: Option<u64>,
    /// Samples by which all batches begin later than at a multiple of
    /// [`batch_samples`](Self::batch_samples): not 0 where a stream goes on from one with batches
    /// of another size.
    pub shift: u32,
    /// Which batches are delivered, and to whom.
    pub share: Share,
    /// Bytes of a ring slot.
    pub slot_bytes: u32,
}

impl Delivery {
    /// Bytes of one batch.
    pub fn batch_bytes(&self) -> u64 {
        match self.rows.loss_weights {
            None => self.tokens_bytes(),
            Some(_) => {
                let weights = u64::from(self.batch_samples) * u64::from(self.weights_bytes());
                (self.weights_at() + weights).next_multiple_of(BATCH_ALIGN)
            }
        }
    }

    /// Bytes of the rows of a batch.
    fn tokens_bytes(&self) -> u64 {
        u64::from(self.rows.count()) * u64::from(self.batch_samples) * u64::from(self.row_bytes())
    }

    /// Bytes of a row of a sample.
    fn row_bytes(&self) -> u32 {
        self.row_tokens() * self.dtype.bytes()
    }

    /// Where the loss weights begin in a batch that has them.
    pub fn weights_at(&self) -> u64 {
        self.tokens_bytes().next_multiple_of(WEIGHT_BYTES.into())
    }

    /// Bytes of the loss weights of a sample.
    fn weights_bytes(&self) -> u32 {
        self.row_tokens() * WEIGHT_BYTES
    }

    /// Bytes of a sample in a batch, without what aligns it.
    fn sample_bytes(&self) -> u64 {
        let rows = u64::from(self.rows.count()) * u64::from(self.row_bytes());
        rows + self.rows.loss_weights.map_or(0, |_| u64::from(self.weights_bytes()))
    }

    /// Tokens of a row of a batch: of a sample, or of its inputs or labels.
    pub fn row_tokens(&self) -> u32 {
        self.window_tokens - u32::from(self.rows.pairs)
    }

    /// The first global sample of a batch.
    fn first_sample(&self, batch: u64) -> u64 {
        batch.saturating_mul(u64::from(self.batch_samples)).saturating_add(self.shift.into())
    }

    /// The batch after the last one, of any rank.
    fn end_batch(&self) -> Option<u64> {
        let all = self.batches?.saturating_mul(self.share.ranks.into());
        Some(self.first_batch.saturating_add(all))
    }

    /// The step after the last one of a run, counted from the stream's first batch.
    fn end_step(&self, (_, end): &Run) -> Option<u64> {
        Some(end.as_ref()?.saturating_sub(self.first_batch) / u64::from(self.share.ranks))
    }

    /// Whole batches that fit a slot.
    pub fn batches_per_slot(&self) -> u64 {
        u64::from(self.slot_bytes) / self.batch_bytes().max(1)
    }
}

/// Why a stream ended early. `dataset` is the index in the plan's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StreamError {
    /// A token that the plan cannot deliver (C5).
    #[error("dataset {dataset}: token {token} (byte {byte}) is {}: {limit}", limit.shown(*value))]
    Overflow {
        /// Which dataset.
        dataset: u32,
        /// Index of the token.
        token: u64,
        /// Its offset in the file.
        byte: u64,
        /// Its value; of floating point the bits as a `f32`.
        value: i128,
        /// What it does not fit.
        limit: Limit,
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
    /// The file is not what it was when the stream began.
    #[error("dataset {dataset}: the file has changed: {change:?}")]
    Changed {
        /// Which dataset.
        dataset: u32,
        /// How.
        change: Change,
    },
    /// The user action failed.
    #[error("dataset {dataset}: the user action failed at token {first_token}: {fault}")]
    Action {
        /// Which dataset.
        dataset: u32,
        /// Index of the first token of the block, or of the sample if a token of it is the cause.
        first_token: u64,
        /// How it failed.
        fault: MapFault,
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
    #[error(
        "dataset {dataset}: the block at token {first_token} arrived damaged {CRC_RETRIES} times"
    )]
    Damaged {
        /// Which dataset.
        dataset: u32,
        /// Index of its first token.
        first_token: u64,
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
    /// Requests that targets acknowledged.
    pub acknowledged_requests: u64,
    /// Bytes written into the ring.
    pub delivered_bytes: u64,
    /// Conversions of blocks.
    pub narrowed_blocks: u64,
    /// Tokens that did not fit and were replaced, in the blocks that were read.
    pub replaced_tokens: u64,
    /// Blocks that arrived compressed.
    pub compressed_blocks: u64,
    /// Blocks that arrived as they are, though the plan compresses.
    pub plain_blocks: u64,
    /// Blocks that arrived without being narrowed, because a token escapes.
    pub escaped_blocks: u64,
    /// Times a damaged block was requested again.
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

impl ReaderCounters {
    /// Counts the form in which a block arrived.
    fn count_form(&mut self, received: &Received, stages: &BlockStages) {
        if stages.decompresses() {
            match received.codec {
                Some(_) => self.compressed_blocks += 1,
                None => self.plain_blocks += 1,
            }
        }
        self.escaped_blocks += u64::from(stages.escapes() && received.bits != 16);
    }
}

/// A run of a stream, prepared up to its first sample.
#[derive(Debug)]
struct Prepared {
    run: Run,
    /// Before its first sample.
    state: StreamState,
    /// By lane.
    coverages: Vec<Coverage>,
}

impl Prepared {
    /// Walks on from `before`, a state of the order.
    fn new(order: &StreamOrder, delivery: &Delivery, run: Run, before: &StreamState) -> Prepared {
        let (first, end) = run;
        let state = before.forward_to(delivery.first_sample(first));
        let end = end.map(|end| delivery.first_sample(end)).or(order.samples());
        let last = end.map(|end| state.forward_to(end));
        let coverage = |lane| {
            let (first, end) = (state.drawn(lane), last.as_ref().map(|last| last.drawn(lane)));
            match order {
                StreamOrder::Own(order) => Coverage::new(order.shuffle_of(lane), first, end),
                StreamOrder::Megatron(_) => Coverage::listed(first..end.unwrap_or(first)),
            }
        };
        let coverages = (0..order.datasets()).map(coverage).collect();
        Prepared { run, state, coverages }
    }
}

/// A stream, prepared up to its first sample. Costs at most two walks of the blend for each of its
/// runs, and for each dataset a step per block of a shuffle group.
#[derive(Debug)]
pub struct ReaderSetup {
    schedule: Schedule,
    sources: Vec<ReaderSource>,
    /// Their addresses are relative to the start of the reader's memory.
    lanes: Vec<Lane>,
    delivery: Delivery,
    run: Run,
    /// The blocks of the first batch, as it needs them.
    first: VecDeque<BlockRef>,
    /// The runs after the first.
    later: VecDeque<Prepared>,
    memory_bytes: u64,
    scratch_bytes: u64,
}

impl ReaderSetup {
    /// Prepares a stream that starts at `delivery.first_batch`.
    pub fn new(
        order: impl Into<StreamOrder>,
        sources: Vec<ReaderSource>,
        delivery: Delivery,
    ) -> ReaderSetup {
        ReaderSetup::leaving_out(order, sources, delivery, &LeaveOut::default())
    }

    /// Prepares a stream that starts at `delivery.first_batch`, or at the first batch after it that
    /// is not left out, and ends where it would otherwise.
    pub fn leaving_out(
        order: impl Into<StreamOrder>,
        sources: Vec<ReaderSource>,
        delivery: Delivery,
        left_out: &LeaveOut,
    ) -> ReaderSetup {
        let order = order.into();
        let delivers = |source: &ReaderSource| {
            let dtype = source.weighs.map_or(delivery.sample_dtype, |_| Dtype::F32);
            source.stages.output().dtype == dtype
        };
        debug_assert!(sources.iter().all(delivers), "the stages give what is delivered");
        let first_batch = delivery.first_batch;
        let mut runs = left_out.runs(first_batch, delivery.end_batch()).into_iter();
        let nothing = (first_batch, Some(first_batch));
        let first = runs.next().unwrap_or(nothing);
        let begin = order.state_at(delivery.first_sample(first.0));
        let Prepared { run, state, coverages } = Prepared::new(&order, &delivery, first, &begin);
        let (mut lanes, mut memory_bytes) = (Vec::with_capacity(sources.len()), 0);
        let scratch_bytes = Lane::scratch_bytes(&sources);
        for (index, source) in sources.iter().enumerate() {
            let dataset = source.dataset(index);
            let coverage = coverages[dataset].clone();
            lanes.push(Lane::new(&order, dataset, source, memory_bytes, coverage));
            memory_bytes += Lane::bytes_needed(&order, dataset, source);
        }
        let mut later = VecDeque::new();
        for run in runs {
            let before = later.back().map_or(&state, |prepared: &Prepared| &prepared.state);
            let prepared = Prepared::new(&order, &delivery, run, before);
            later.push_back(prepared);
        }
        let cuts = sources.iter().map(|source| (source.layout, source.cut.clone())).collect();
        let first = first_blocks(&order, &state, &delivery, &weights_of(&sources));
        let schedule = Schedule::new(order, cuts, state);
        ReaderSetup {
            schedule,
            sources,
            lanes,
            delivery,
            run,
            first,
            later,
            memory_bytes,
            scratch_bytes,
        }
    }

    /// Bytes of staging buffers for the stream.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }
}

/// The block of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BlockRef {
    lane: u32,
    position: u64,
}

/// Most samples of the first batch whose blocks are requested before all others.
const FIRST_SAMPLES: u32 = 2048;

/// The blocks of the first batch after `state`, in the order in which it needs them; none of a
/// listed order, which has them in that order.
fn first_blocks(
    order: &StreamOrder,
    state: &StreamState,
    delivery: &Delivery,
    weights_of: &[Option<u32>],
) -> VecDeque<BlockRef> {
    let (StreamOrder::Own(order), StreamState::Own(blend)) = (order, state) else {
        return VecDeque::new();
    };
    let mut cursor = order.cursor(blend.clone());
    let mut seen = BTreeSet::new();
    let needed = (0..delivery.batch_samples.min(FIRST_SAMPLES)).flat_map(|_| {
        let (lane, position, _) = cursor.step_position();
        let lanes = [Some(lane as u32), weights_of[lane]].into_iter().flatten();
        lanes.map(move |lane| BlockRef { lane, position })
    });
    needed.filter(|block_ref| seen.insert(*block_ref)).collect()
}

/// Blocks that all lanes together read ahead at least, and those of one lane.
const READ_AHEAD: u32 = 64;
const READ_AHEAD_OF_LANE: (u32, u32) = (4, 8);

/// Staging buffers of one of `lanes` lanes: for the group being consumed and the next, or enough to
/// keep a disk busy. Many lanes keep it busy with half a group each.
pub fn buffers_per_lane(group_blocks: u32, lanes: u32) -> u32 {
    if lanes > READ_AHEAD {
        return group_blocks + group_blocks.div_ceil(2);
    }
    let (least, most) = READ_AHEAD_OF_LANE;
    (2 * group_blocks).max((READ_AHEAD / lanes.max(1)).clamp(least, most))
}

#[cfg(test)]
mod tests;
