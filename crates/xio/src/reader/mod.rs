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
//! such a token is requested again sample by sample. A lost connection is not an error of the stream:
//! the reader reports it through [`Reader::lost_connection`], keeps its blocks, and requests the
//! missing ones once [`Reader::connect`] supplies a new queue pair.
//!
//! Streams share a thread. Work that grows with the plan is done beforehand, on any thread, in
//! [`ReaderSetup::new`]; [`Reader::poll`] does a bounded amount: one block through its stages,
//! `COPY_BYTES_PER_POLL` and `COPY_SAMPLES_PER_POLL` copied.
//!
//! Order of calls: [`ReaderSetup::new`], [`Reader::new`], [`Reader::connect`] for every connection, then
//! [`Reader::poll`] as long as it returns `true`.

mod connection;
mod lane;
mod schedule;

use alloc::vec::Vec;

use arrayvec::ArrayVec;
use roce::Time;
use roce::device::Device;
use roce::verbs::{Completion, CqId, MemoryRegion, Qpn, VerbsError, WcStatus};
use roce::world::Staging;
use thiserror::Error;

use crate::capsule::{Outcome, Refusal};
use crate::dataset::Dtype;
use crate::kernel::Kernels;
use crate::order::{Order, SampleLayout};
use crate::stage::{self, BlockError, BlockStages};

use connection::{BlockRef, Connection, Io, Response};
pub use connection::{CREDIT_BYTES, ConnectionMemory};
use lane::{Lane, Resident};
use schedule::{Coverage, Schedule};

/// Bytes copied into the ring per [`Reader::poll`]: few enough that the wire is polled often.
const COPY_BYTES_PER_POLL: u64 = 256 << 10;

/// Samples copied per [`Reader::poll`]: the order costs about 100 ns for each, however small it is.
const COPY_SAMPLES_PER_POLL: u32 = 2048;

/// Blocks that one [`Reader::poll`] examines to find one to request.
const LOOKS_PER_POLL: u32 = 512;

/// Request completions taken from their queue at once.
const SENT_PER_BATCH: usize = 32;

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
    /// Tokens per sample.
    pub window_tokens: u32,
    /// Samples per batch.
    pub batch_samples: u32,
    /// Token type of the batches.
    pub dtype: Dtype,
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

    fn sample_bytes(&self) -> u64 {
        u64::from(self.window_tokens) * u64::from(self.dtype.bytes())
    }

    /// The first global sample of a batch.
    fn first_sample(&self, batch: u64) -> u64 {
        batch.saturating_mul(u64::from(self.batch_samples))
    }

    /// The batch after the last one.
    fn end_batch(&self) -> Option<u64> {
        Some(self.first_batch.saturating_add(self.batches?))
    }

    /// The global sample after the last one.
    fn end_sample(&self) -> Option<u64> {
        self.end_batch().map(|end| self.first_sample(end))
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

/// The slot being filled.
#[derive(Clone, Copy, Debug)]
struct Filling {
    slot: u32,
    bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Streaming,
    Ended,
}

/// One stream.
#[derive(Debug)]
pub struct Reader {
    schedule: Schedule,
    sources: Vec<ReaderSource>,
    lanes: Vec<Lane>,
    connections: Vec<Connection>,
    delivery: Delivery,
    data: MemoryRegion,
    send_cq: CqId,
    recv_cq: CqId,
    kernels: Kernels,
    filling: Option<Filling>,
    next_batch: u64,
    phase: Phase,
    first_lane: usize,
    counters: ReaderCounters,
}

/// A stream, prepared up to its first sample. Costs at most two walks of the blend, and for each
/// dataset a step per block of a shuffle group.
#[derive(Debug)]
pub struct ReaderSetup {
    schedule: Schedule,
    sources: Vec<ReaderSource>,
    /// Their addresses are relative to the start of the reader's memory.
    lanes: Vec<Lane>,
    delivery: Delivery,
    memory_bytes: u64,
}

impl ReaderSetup {
    /// Prepares a stream that starts at `delivery.first_batch`.
    pub fn new(order: Order, sources: Vec<ReaderSource>, delivery: Delivery) -> ReaderSetup {
        let delivers = |source: &ReaderSource| source.stages.output().dtype == delivery.dtype;
        debug_assert!(sources.iter().all(delivers), "the stages give what is delivered");
        let start = order.cursor_at(delivery.first_sample(delivery.first_batch));
        let end = delivery.end_sample().map(|end| start.blend_at(end));
        let (mut lanes, mut memory_bytes) = (Vec::with_capacity(sources.len()), 0);
        for (index, source) in sources.iter().enumerate() {
            let last = end.as_ref().map(|end| end.drawn(index));
            let coverage = Coverage::new(order.shuffle_of(index), start.drawn(index), last);
            lanes.push(Lane::new(&order, index, source, memory_bytes, coverage));
            memory_bytes += Lane::bytes_needed(&order, index, source);
        }
        let layouts = sources.iter().map(|source| source.layout).collect();
        let schedule = Schedule::new(order, layouts, start);
        ReaderSetup { schedule, sources, lanes, delivery, memory_bytes }
    }

    /// Bytes of staging buffers for the stream.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }
}

/// Registered memory and queues of a reader.
#[derive(Clone, Copy, Debug)]
pub struct ReaderResources {
    /// Staging buffers of all lanes: [`ReaderSetup::memory_bytes`], remote write.
    pub data: MemoryRegion,
    /// Completion queue of sends, this reader's alone.
    pub send_cq: CqId,
    /// Completion queue of receives, this reader's alone.
    pub recv_cq: CqId,
}

/// Staging buffers of a lane: for the group being consumed and the next, or enough to keep a disk busy.
pub fn buffers_per_lane(group_blocks: u32) -> u32 {
    (2 * group_blocks).max(8)
}

/// Whether a type can represent a value.
fn holds(dtype: Dtype, value: i128) -> bool {
    let (low, high) = dtype.range();
    (low..=high).contains(&value)
}

impl Reader {
    /// Bytes of staging buffers for a stream over these sources.
    pub fn memory_needed(order: &Order, sources: &[ReaderSource]) -> u64 {
        let lanes = sources.iter().enumerate();
        lanes.map(|(lane, source)| Lane::bytes_needed(order, lane, source)).sum()
    }

    /// A reader with room for `connections` connections.
    pub fn new(
        setup: ReaderSetup,
        connections: u32,
        resources: ReaderResources,
        kernels: Kernels,
    ) -> Reader {
        let ReaderSetup { schedule, sources, mut lanes, delivery, .. } = setup;
        lanes.iter_mut().for_each(|lane| lane.move_to(resources.data.addr));
        Reader {
            schedule,
            lanes,
            sources,
            connections: (0..connections).map(|_| Connection::default()).collect(),
            next_batch: delivery.first_batch,
            delivery,
            data: resources.data,
            send_cq: resources.send_cq,
            recv_cq: resources.recv_cq,
            kernels,
            filling: None,
            phase: Phase::Streaming,
            first_lane: 0,
            counters: ReaderCounters::default(),
        }
    }

    /// Counters since the start.
    pub fn counters(&self) -> &ReaderCounters {
        &self.counters
    }

    /// Staging buffers without a block; all of them once the last batch is written.
    pub fn free_buffers(&self) -> usize {
        self.lanes.iter().map(Lane::free_buffers).sum()
    }

    /// Staging buffers in all.
    pub fn buffer_count(&self) -> usize {
        self.lanes.iter().map(Lane::buffer_count).sum()
    }

    /// Number of the next batch to be written.
    pub fn next_batch(&self) -> u64 {
        self.next_batch
    }

    /// Whether the stream has ended, with or without an error.
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Assigns a queue pair to connection `index`: the first one, or a replacement for a lost one. The
    /// caller has destroyed the lost one, so that none of its packets reaches our memory.
    pub fn connect<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        index: u32,
        qpn: Qpn,
        memory: ConnectionMemory,
    ) -> Result<(), VerbsError> {
        if index as usize >= self.connections.len() {
            return Ok(());
        }
        self.requeue_requests(index as usize);
        self.connections[index as usize].open(now, device, qpn, memory)
    }

    /// Schedules the outstanding requests of a connection again, and closes it.
    fn requeue_requests(&mut self, index: usize) {
        for block_ref in self.connections[index].forget_requests() {
            self.counters.retried_requests += 1;
            self.lanes[block_ref.lane as usize].request_again(block_ref.position);
        }
    }

    /// A connection whose queue pair failed since the last call; the caller destroys that queue pair.
    pub fn lost_connection(&mut self) -> Option<(u32, Qpn, WcStatus)> {
        let index = self.connections.iter().position(Connection::is_lost)?;
        let (qpn, why) = self.connections[index].take_lost()?;
        self.requeue_requests(index);
        self.counters.lost_connections += 1;
        Some((index as u32, qpn, why))
    }

    /// Marks the connection as lost, as when its control channel closed.
    pub fn drop_connection(&mut self, index: u32) {
        if let Some(connection) = self.connections.get_mut(index as usize) {
            connection.lose(WcStatus::RemoteOperationError);
        }
    }

    /// Abandons a connection that could not be restored: the stream ends with an error, unless it has
    /// ended before.
    pub fn abandon<S: Sink>(&mut self, sink: &mut S, connection: u32) {
        self.end_with(sink, &StreamError::Lost { connection });
    }

    /// Does all work possible now. Returns whether there was any.
    pub fn poll<D: Device, M: Staging, S: Sink>(
        &mut self,
        now: Time,
        device: &mut D,
        memory: &mut M,
        sink: &mut S,
    ) -> bool {
        if self.phase == Phase::Ended {
            return false;
        }
        let io = &mut Io { now, device, memory };
        let mut busy = match self.take_completions(io) {
            Ok(busy) => busy,
            Err(error) => {
                self.end_with(sink, &StreamError::Device(error));
                return true;
            }
        };
        busy |= self.send_requests(io);
        busy |= self.copy(io.memory, sink);
        // Copying frees buffers, and reaches samples that have to be requested one by one.
        busy |= self.phase == Phase::Streaming && self.send_requests(io);
        busy
    }

    /// Whether there were any.
    fn take_completions<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
    ) -> Result<bool, VerbsError> {
        let mut busy = false;
        loop {
            let mut sent = ArrayVec::<_, SENT_PER_BATCH>::new();
            io.device.poll_cq(self.send_cq, &mut sent)?;
            busy |= !sent.is_empty();
            for done in &sent {
                if let Some(index) = self.connection_of(done.qpn)
                    && !self.connections[index].handle_sent(done)
                {
                    self.counters.bad_completions += 1;
                }
            }
            if !sent.is_full() {
                break;
            }
        }
        // A response may bring a block for our stages: one at a time.
        let mut response = ArrayVec::<_, 1>::new();
        io.device.poll_cq(self.recv_cq, &mut response)?;
        busy |= !response.is_empty();
        response.iter().for_each(|done| self.take_response(io, done));
        Ok(busy)
    }

    fn take_response<D: Device, M: Staging>(&mut self, io: &mut Io<'_, D, M>, done: &Completion) {
        let Some(index) = self.connection_of(done.qpn) else {
            return;
        };
        match self.connections[index].handle_response(io, done, self.kernels.crc32c) {
            Response::To(block_ref, outcome) => self.settle(io.memory, index, &block_ref, outcome),
            Response::Bad => self.counters.bad_responses += 1,
            Response::Impossible => self.counters.bad_completions += 1,
            Response::Lost => {}
        }
    }

    fn connection_of(&self, qpn: Qpn) -> Option<usize> {
        self.connections.iter().position(|connection| connection.qpn() == Some(qpn))
    }

    /// Applies the outcome of a request to its block.
    fn settle<M: Staging>(
        &mut self,
        memory: &mut M,
        index: usize,
        block_ref: &BlockRef,
        outcome: Outcome,
    ) {
        match outcome {
            Outcome::Done { bytes, crc32c, source_bytes } => {
                self.counters.source_bytes += u64::from(source_bytes);
                self.counters.wire_bytes += u64::from(bytes);
                self.arrived(memory, block_ref, bytes, crc32c);
            }
            // The target and we disagree on the state of the connection.
            Outcome::Refused(Refusal::BadCapsule | Refusal::Replayed | Refusal::NoCredit) => {
                self.lose_connection(index, block_ref, WcStatus::RemoteInvalidRequest);
            }
            reported => match self.error_of(block_ref, reported) {
                Some(error) => self.lanes[block_ref.lane as usize].fail(block_ref.position, error),
                None => {
                    self.counters.bad_responses += 1;
                    self.lose_connection(index, block_ref, WcStatus::BadResponse);
                }
            },
        }
    }

    fn lose_connection(&mut self, index: usize, block_ref: &BlockRef, why: WcStatus) {
        self.lanes[block_ref.lane as usize].request_again(block_ref.position);
        self.counters.retried_requests += 1;
        self.connections[index].lose(why);
    }

    /// The error reported by a response; none if it cannot be true of the requested block.
    fn error_of(&mut self, block_ref: &BlockRef, reported: Outcome) -> Option<StreamError> {
        let dataset = block_ref.lane;
        let tokens = self.lanes[dataset as usize].tokens(block_ref.position)?;
        let source = &self.sources[dataset as usize];
        match reported {
            Outcome::Overflow { token, value } => {
                let target = source.stages.target();
                let (stored, wanted) = (target.stored(), target.on_wire());
                let possible =
                    tokens.contains(&token) && holds(stored, value) && !holds(wanted, value);
                possible.then(|| StreamError::Overflow {
                    dataset,
                    token,
                    byte: self.byte_of(dataset, token),
                    value,
                })
            }
            Outcome::Truncated { at_byte } => (at_byte < self.byte_of(dataset, tokens.end))
                .then_some(StreamError::Truncated { dataset, at_byte }),
            Outcome::Storage { errno } => Some(StreamError::Storage { dataset, errno }),
            Outcome::Refused(reason) => Some(StreamError::Refused { dataset, reason }),
            Outcome::Done { .. } => None,
        }
    }

    fn byte_of(&self, dataset: u32, token: u64) -> u64 {
        let file = &self.sources[dataset as usize].layout.file;
        file.data_offset + token * u64::from(file.dtype.bytes())
    }

    /// Runs our stages over a block that was written into our memory, and marks it ready.
    fn arrived<M: Staging>(
        &mut self,
        memory: &mut M,
        block_ref: &BlockRef,
        bytes: u32,
        crc32c: u32,
    ) {
        let (dataset, lane) = (block_ref.lane, &mut self.lanes[block_ref.lane as usize]);
        let Some((addr, expected)) = lane.place(block_ref.position) else {
            return;
        };
        let stages = self.sources[dataset as usize].stages.reader();
        let ran = match bytes == expected {
            true => {
                let block = memory.bytes_mut(addr, expected as usize);
                stage::run(stages, block, crc32c, &self.kernels)
            }
            false => Err(BlockError::Damaged),
        };
        let error = match ran {
            Ok(ran) => {
                self.counters.narrowed_blocks += u64::from(ran.narrowed);
                return lane.settle(block_ref.position, Resident::Ready);
            }
            Err(BlockError::Damaged) => {
                self.counters.corrupt_blocks += 1;
                if lane.damaged(block_ref.position) < CRC_RETRIES {
                    return lane.request_again(block_ref.position);
                }
                StreamError::Damaged { dataset }
            }
            Err(BlockError::Overflow { index, value }) => {
                let first_token = lane.tokens(block_ref.position).map_or(0, |tokens| tokens.start);
                let token = first_token + index as u64;
                let byte = self.byte_of(dataset, token);
                StreamError::Overflow { dataset, token, byte, value }
            }
            Err(BlockError::Unsupported) => {
                StreamError::Refused { dataset, reason: Refusal::BadType }
            }
        };
        self.lanes[dataset as usize].fail(block_ref.position, error);
    }

    /// Sends requests for blocks that have a staging buffer, lanes in turn.
    fn send_requests<D: Device, M: Staging>(&mut self, io: &mut Io<'_, D, M>) -> bool {
        let (count, mut has_sent, mut idle) = (self.lanes.len(), false, 0);
        let mut looks = LOOKS_PER_POLL;
        while idle < count && looks > 0 {
            let index = self.first_lane;
            self.first_lane = (self.first_lane + 1) % count;
            idle = if self.ask_one(io, index, &mut looks) { 0 } else { idle + 1 };
            has_sent |= idle == 0;
        }
        has_sent || looks == 0
    }

    fn ask_one<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        index: usize,
        looks: &mut u32,
    ) -> bool {
        let source = &self.sources[index];
        let connection = &mut self.connections[source.connection as usize];
        if !connection.can_send() {
            return false;
        }
        let Some(want) = self.lanes[index].next_request(&self.schedule, looks) else {
            return false;
        };
        let block_ref = BlockRef { lane: index as u32, position: want.position };
        let request = want.request(source, self.data.rkey);
        if connection.send_request(io, block_ref, request, self.kernels.crc32c) {
            return true;
        }
        self.lanes[index].request_again(want.position);
        false
    }

    /// Copies samples, in order, into the slot being filled.
    fn copy<M: Staging, S: Sink>(&mut self, memory: &mut M, sink: &mut S) -> bool {
        let (mut copied, mut samples) = (0, 0);
        while copied < COPY_BYTES_PER_POLL
            && samples < COPY_SAMPLES_PER_POLL
            && self.phase == Phase::Streaming
        {
            let Some(mut filling) = self.slot_to_fill(sink) else {
                break;
            };
            let pick = self.schedule.peek();
            let lane = &mut self.lanes[pick.dataset as usize];
            match lane.resident(pick.position, pick.sample) {
                Resident::Ready => {}
                Resident::Failed(error) => {
                    self.end_with(sink, &error);
                    return true;
                }
                Resident::Wanted | Resident::Requested => {
                    self.counters.waits_for_data += 1;
                    break;
                }
            }
            let bytes = self.delivery.sample_bytes();
            let from = lane.sample_addr(pick.position, pick.sample, bytes);
            sink.write(filling.slot, filling.bytes, memory.bytes(from, bytes as usize));
            lane.consume(pick.position);
            self.schedule.advance();
            filling.bytes += bytes as u32;
            copied += bytes;
            samples += 1;
            self.filling = Some(filling);
            self.publish_if_full(sink);
        }
        self.counters.delivered_bytes += copied;
        copied > 0
    }

    fn slot_to_fill<S: Sink>(&mut self, sink: &mut S) -> Option<Filling> {
        if let Some(filling) = self.filling {
            return Some(filling);
        }
        if self.batches_left() == Some(0) {
            self.phase = Phase::Ended;
            self.lanes.iter_mut().for_each(Lane::finish);
            sink.finish();
            return None;
        }
        match sink.acquire() {
            Some(slot) => self.filling = Some(Filling { slot, bytes: 0 }),
            None => self.counters.waits_for_host += 1,
        }
        self.filling
    }

    fn batches_left(&self) -> Option<u64> {
        let end = self.delivery.end_batch()?;
        Some(end.saturating_sub(self.next_batch))
    }

    /// Number of batches for the slot being filled.
    fn batches_in_slot(&self) -> u64 {
        let fit = self.delivery.batches_per_slot();
        self.batches_left().map_or(fit, |left| left.min(fit))
    }

    fn publish_if_full<S: Sink>(&mut self, sink: &mut S) {
        let full = self.batches_in_slot() * self.delivery.batch_bytes();
        if self.filling.is_some_and(|filling| u64::from(filling.bytes) >= full) {
            self.publish(sink);
        }
    }

    /// Publishes the whole batches of the slot being filled, if there are any.
    fn publish<S: Sink>(&mut self, sink: &mut S) {
        let Some(filling) = self.filling.take() else {
            return;
        };
        let batch_bytes = self.delivery.batch_bytes();
        let batches = u64::from(filling.bytes) / batch_bytes;
        if batches == 0 {
            return;
        }
        let meta = SlotMeta {
            first_batch: self.next_batch,
            batches: batches as u32,
            batch_bytes: batch_bytes as u32,
        };
        sink.publish(filling.slot, meta);
        self.next_batch += batches;
        self.counters.batches += batches;
    }

    fn end_with<S: Sink>(&mut self, sink: &mut S, error: &StreamError) {
        if self.phase == Phase::Ended {
            return;
        }
        self.publish(sink);
        sink.fail(error);
        self.phase = Phase::Ended;
    }
}

#[cfg(test)]
mod tests;
