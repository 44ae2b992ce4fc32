//! From blocks to batches: staging buffers, the order of samples, and the slot being filled.
//!
//! What a reader does wherever its blocks come from: it says which block to fetch next and where to put
//! it, runs the reader's stages over a block that has arrived, and copies samples into the ring. How
//! blocks are fetched does not belong here.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use roce::world::Staging;

use crate::kernel::Kernels;
use crate::stage::{self, BlockError};

use super::lane::{Lane, Resident, Want};
use super::schedule::Schedule;
use super::{
    CRC_RETRIES, Delivery, Prepared, ReaderCounters, ReaderSetup, ReaderSource, Sink, SlotMeta,
    StreamError,
};
use crate::capsule::Refusal;

/// Bytes copied into the ring per poll: few enough that the wire is polled often.
const COPY_BYTES_PER_POLL: u64 = 256 << 10;

/// Samples copied per poll: the order costs about 100 ns for each, however small it is.
const COPY_SAMPLES_PER_POLL: u32 = 2048;

/// Bytes widened at a time: they stay in the first-level cache on their way to the ring.
const WIDENED_BYTES: usize = 8 << 10;

/// Blocks that one poll examines to find one to request.
const LOOKS_PER_POLL: u32 = 512;

/// The block of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRef {
    pub(super) lane: u32,
    pub(super) position: u64,
}

/// The slot being filled.
#[derive(Clone, Copy, Debug)]
struct Filling {
    slot: u32,
    samples: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Streaming,
    Ended,
}

impl Delivery {
    /// Writes the next sample of a slot, in the form of the batches.
    fn write_sample<S: Sink>(
        &self,
        sink: &mut S,
        kernels: &Kernels,
        filling: &Filling,
        sample: &[u8],
    ) {
        let Filling { slot, samples } = *filling;
        let row_bytes = u64::from(self.row_tokens() * self.dtype.bytes());
        let mut write = |offset: u64, tokens: &[u8]| {
            // In range: a slot is smaller than 4 GiB.
            self.write_tokens(sink, kernels, slot, offset as u32, tokens);
        };
        if !self.pairs {
            return write(samples * row_bytes, sample);
        }
        let batch = u64::from(self.batch_samples);
        let inputs = samples / batch * 2 * batch + samples % batch;
        let width = self.sample_dtype.bytes() as usize;
        write(inputs * row_bytes, &sample[..sample.len() - width]);
        write((inputs + batch) * row_bytes, &sample[width..]);
    }

    /// Writes tokens, widened if need be, piece by piece.
    fn write_tokens<S: Sink>(
        &self,
        sink: &mut S,
        kernels: &Kernels,
        slot: u32,
        mut offset: u32,
        tokens: &[u8],
    ) {
        let (from, to) = (self.sample_dtype, self.dtype);
        if from == to {
            return sink.write(slot, offset, tokens);
        }
        let mut wide = [0; WIDENED_BYTES];
        let piece_bytes = WIDENED_BYTES / to.bytes() as usize * from.bytes() as usize;
        for piece in tokens.chunks(piece_bytes) {
            let wide = &mut wide[..piece.len() / from.bytes() as usize * to.bytes() as usize];
            (kernels.widen)(piece, from, to, wide);
            sink.write(slot, offset, wide);
            offset += wide.len() as u32;
        }
    }
}

/// What fetches blocks.
pub(super) trait Supply {
    /// Whether it takes a request for a block of this source.
    fn has_room(&self, source: &ReaderSource) -> bool;

    /// Requests a block; `false` if the request could not be sent.
    fn request(&mut self, source: &ReaderSource, block_ref: BlockRef, want: &Want) -> bool;
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Assembler {
    schedule: Schedule,
    pub(super) sources: Vec<ReaderSource>,
    lanes: Vec<Lane>,
    /// Of the present run.
    delivery: Delivery,
    later: VecDeque<Prepared>,
    pub(super) kernels: Kernels,
    filling: Option<Filling>,
    next_batch: u64,
    phase: Phase,
    first_lane: usize,
    pub(super) counters: ReaderCounters,
}

impl Assembler {
    /// Its staging buffers start at `memory_addr`.
    pub(super) fn new(setup: ReaderSetup, memory_addr: u64, kernels: Kernels) -> Assembler {
        let ReaderSetup { schedule, sources, mut lanes, delivery, later, .. } = setup;
        lanes.iter_mut().for_each(|lane| lane.move_to(memory_addr));
        Assembler {
            schedule,
            lanes,
            sources,
            next_batch: delivery.first_batch,
            delivery,
            later,
            kernels,
            filling: None,
            phase: Phase::Streaming,
            first_lane: 0,
            counters: ReaderCounters::default(),
        }
    }

    pub(super) fn free_buffers(&self) -> usize {
        self.lanes.iter().map(Lane::free_buffers).sum()
    }

    pub(super) fn buffer_count(&self) -> usize {
        self.lanes.iter().map(Lane::buffer_count).sum()
    }

    pub(super) fn next_batch(&self) -> u64 {
        self.next_batch
    }

    pub(super) fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Requests blocks that have a staging buffer, lanes in turn. Returns whether there may be more to do.
    pub(super) fn request_blocks(&mut self, supply: &mut impl Supply) -> bool {
        let (count, mut has_sent, mut idle) = (self.lanes.len(), false, 0);
        let mut looks = LOOKS_PER_POLL;
        while idle < count && looks > 0 {
            let index = self.first_lane;
            self.first_lane = (self.first_lane + 1) % count;
            idle = if self.request_one(supply, index, &mut looks) { 0 } else { idle + 1 };
            has_sent |= idle == 0;
        }
        has_sent || looks == 0
    }

    fn request_one(&mut self, supply: &mut impl Supply, index: usize, looks: &mut u32) -> bool {
        let source = &self.sources[index];
        if !supply.has_room(source) {
            return false;
        }
        let Some(want) = self.lanes[index].next_request(&self.schedule, looks) else {
            return false;
        };
        let block_ref = BlockRef { lane: index as u32, position: want.position };
        if supply.request(source, block_ref, &want) {
            return true;
        }
        self.lanes[index].request_again(want.position);
        false
    }

    /// Its request is to be sent again.
    pub(super) fn request_again(&mut self, block_ref: &BlockRef) {
        self.counters.retried_requests += 1;
        self.lanes[block_ref.lane as usize].request_again(block_ref.position);
    }

    // ---- what arrives --------------------------------------------------------------------------

    /// The tokens requested for a block.
    pub(super) fn tokens(&mut self, block_ref: &BlockRef) -> Option<core::ops::Range<u64>> {
        self.lanes[block_ref.lane as usize].tokens(block_ref.position)
    }

    /// Offset of a token in its file.
    pub(super) fn byte_of(&self, dataset: u32, token: u64) -> u64 {
        let file = &self.sources[dataset as usize].layout.file;
        file.data_offset + token * u64::from(file.dtype.bytes())
    }

    /// A block cannot be fetched.
    pub(super) fn fail(&mut self, block_ref: &BlockRef, error: StreamError) {
        self.lanes[block_ref.lane as usize].fail(block_ref.position, error);
    }

    /// Runs our stages over a block that was written into our memory, and marks it ready.
    pub(super) fn arrived<M: Staging>(
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

    // ---- batches -------------------------------------------------------------------------------

    /// Copies samples, in order, into the slot being filled.
    pub(super) fn copy<M: Staging, S: Sink>(&mut self, memory: &mut M, sink: &mut S) -> bool {
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
            let width = self.delivery.sample_dtype.bytes();
            let from = lane.sample_addr(pick.position, pick.sample, width);
            let bytes = memory.bytes(from, (self.delivery.window_tokens * width) as usize);
            self.delivery.write_sample(sink, &self.kernels, &filling, bytes);
            lane.consume(pick.position);
            self.schedule.advance();
            filling.samples += 1;
            copied += self.delivery.sample_bytes();
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
        if self.batches_left() == Some(0) && !self.begin_next_run(sink) {
            return None;
        }
        match sink.acquire() {
            Some(slot) => self.filling = Some(Filling { slot, samples: 0 }),
            None => self.counters.waits_for_host += 1,
        }
        self.filling
    }

    /// Goes on behind batches that are left out, or ends the stream. Whether there is a batch to fill: not while
    /// a request of the run before may still write to its buffer.
    fn begin_next_run<S: Sink>(&mut self, sink: &mut S) -> bool {
        let mut all_free = true;
        self.lanes.iter_mut().for_each(|lane| all_free &= lane.finish());
        if self.later.is_empty() {
            self.phase = Phase::Ended;
            sink.finish();
            return false;
        }
        let Some(Prepared { run, blend, coverages }) =
            all_free.then(|| self.later.pop_front()).flatten()
        else {
            self.counters.waits_for_data += 1;
            return false;
        };
        self.lanes.iter_mut().zip(coverages).for_each(|(lane, part)| lane.restart(part));
        self.schedule.restart(blend);
        self.delivery = self.delivery.of_run(run);
        self.next_batch = self.delivery.first_batch;
        true
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
        let full = self.batches_in_slot() * u64::from(self.delivery.batch_samples);
        if self.filling.is_some_and(|filling| filling.samples >= full) {
            self.publish(sink);
        }
    }

    /// Publishes the whole batches of the slot being filled, if there are any.
    fn publish<S: Sink>(&mut self, sink: &mut S) {
        let Some(filling) = self.filling.take() else {
            return;
        };
        let batch_bytes = self.delivery.batch_bytes();
        let batches = filling.samples / u64::from(self.delivery.batch_samples);
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

    /// Ends the stream early, after what was published.
    pub(super) fn end_with<S: Sink>(&mut self, sink: &mut S, error: &StreamError) {
        if self.phase == Phase::Ended {
            return;
        }
        self.publish(sink);
        sink.fail(error);
        self.phase = Phase::Ended;
    }
}
