//! From blocks to batches: staging buffers, the order of samples, and the slots being filled.
//!
//! What a reader does wherever its blocks come from: it says which block to fetch next and where to
//! put it, runs the reader's stages over a block that has arrived, and copies samples into the
//! ring. How blocks are fetched does not belong here.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use roce::world::Staging;

use crate::disk::Change;
use crate::kernel::{Kernels, TokenMap};
use crate::stage::{self, BlockError, Limit, Received, Tools};
use crate::sums::{self, SUM_BYTES};

use super::lane::{Lane, Place, Resident, Want};
use super::rows::{self, Row, Writer};
use super::schedule::{Pick, Schedule};
use super::{
    BlockRef, CRC_RETRIES, Delivery, Prepared, ReaderCounters, ReaderSetup, ReaderSource, Run,
    Share, Sink, SlotMeta, StreamError, WEIGHT_BYTES, weights_of,
};
use crate::capsule::Refusal;

/// Bytes copied into the ring per poll: few enough that the wire is polled often.
const COPY_BYTES_PER_POLL: u64 = 256 << 10;

/// Samples copied per poll: the order costs about 100 ns for each, however small it is.
const COPY_SAMPLES_PER_POLL: u32 = 2048;

/// Blocks that one poll examines to find one to request.
const LOOKS_PER_POLL: u32 = 512;

/// A slot being filled.
#[derive(Clone, Copy, Debug)]
struct Filling {
    slot: u32,
    samples: u64,
    /// The step of its first batch.
    step: u64,
}

/// The place of the next sample: in which batch, and whose batch that is.
#[derive(Clone, Copy, Debug)]
struct Position {
    /// Batches before it since the start of the stream, of all ranks.
    index: u64,
    /// Samples before it in its batch.
    sample: u32,
    step: u64,
    /// The ring for its batch; none if another stream delivers it.
    ring: Option<u32>,
}

impl Position {
    fn at(share: &Share, index: u64) -> Position {
        let (step, rank) = share.place(index);
        Position { index, sample: 0, step, ring: share.ring(rank) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Streaming,
    Ended,
}

/// Lanes that may have a block to request, each once: of thousands of lanes few have a free buffer.
#[derive(Debug)]
struct Turns {
    lanes: VecDeque<u32>,
    /// By lane, whether it is among them.
    waits: Vec<bool>,
    /// Whether all lanes have one connection.
    is_one_connection: bool,
}

impl Turns {
    /// All lanes.
    fn new(sources: &[ReaderSource]) -> Turns {
        let is_one_connection =
            sources.windows(2).all(|pair| pair[0].connection == pair[1].connection);
        Turns {
            lanes: (0..sources.len() as u32).collect(),
            waits: vec![true; sources.len()],
            is_one_connection,
        }
    }

    fn add(&mut self, lane: u32) {
        let waits = &mut self.waits[lane as usize];
        if !*waits {
            *waits = true;
            self.lanes.push_back(lane);
        }
    }

    /// Takes the next lane that has room for a request.
    fn next(&mut self, has_room: impl Fn(u32) -> bool) -> Option<u32> {
        let among = if self.is_one_connection { 1 } else { self.lanes.len() };
        let index = self.lanes.iter().take(among).position(|lane| has_room(*lane))?;
        let lane = self.lanes.remove(index)?;
        self.waits[lane as usize] = false;
        Some(lane)
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
    delivery: Delivery,
    /// The batches being delivered, and those after the ones that are left out next.
    run: Run,
    later: VecDeque<Prepared>,
    pub(super) kernels: Kernels,
    /// For each ring the slot that is being filled.
    fillings: Vec<Option<Filling>>,
    position: Position,
    phase: Phase,
    /// Blocks to request before all others.
    first: VecDeque<BlockRef>,
    turns: Turns,
    /// What a decompressor reads from: the largest block, if blocks are compressed.
    scratch: Vec<u8>,
    /// By dataset, the lane of its loss weights.
    weights_of: Vec<Option<u32>>,
    /// The sample being copied, and its loss weights.
    row: Row,
    weights: Row,
    pub(super) counters: ReaderCounters,
}

impl Assembler {
    /// Its staging buffers start at `memory_addr`.
    pub(super) fn new(setup: ReaderSetup, memory_addr: u64, kernels: Kernels) -> Assembler {
        let ReaderSetup {
            schedule,
            sources,
            mut lanes,
            delivery,
            run,
            first,
            later,
            scratch_bytes,
            ..
        } = setup;
        lanes.iter_mut().for_each(|lane| lane.move_to(memory_addr));
        Assembler {
            schedule,
            turns: Turns::new(&sources),
            weights_of: weights_of(&sources),
            lanes,
            sources,
            first,
            position: Position::at(&delivery.share, run.0 - delivery.first_batch),
            fillings: (0..delivery.share.count).map(|_| None).collect(),
            row: Row::new(&delivery),
            weights: Row::default(),
            delivery,
            run,
            later,
            kernels,
            phase: Phase::Streaming,
            scratch: vec![0; scratch_bytes as usize],
            counters: ReaderCounters::default(),
        }
    }

    pub(super) fn free_buffers(&self) -> usize {
        self.lanes.iter().map(Lane::free_buffers).sum()
    }

    pub(super) fn buffer_count(&self) -> usize {
        self.lanes.iter().map(Lane::buffer_count).sum()
    }

    /// Number of the batch that the next sample belongs to.
    pub(super) fn next_batch(&self) -> u64 {
        self.delivery.first_batch + self.position.index
    }

    pub(super) fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Requests blocks that have a staging buffer: those of the first batch, then lanes in turn.
    /// Returns whether there may be more to do.
    pub(super) fn request_blocks(&mut self, supply: &mut impl Supply) -> bool {
        let (mut has_sent, mut looks) = (false, LOOKS_PER_POLL);
        while let Some(BlockRef { lane, position }) = self.first.front().copied() {
            if looks == 0 || !supply.has_room(&self.sources[lane as usize]) {
                return has_sent || looks == 0;
            }
            self.first.pop_front();
            let want = self.lanes[lane as usize].request_at(position, &self.schedule, &mut looks);
            has_sent |= want.is_some_and(|want| self.request(supply, lane, &want));
        }
        let mut unsent = 0;
        while looks > 0
            && unsent < self.sources.len()
            && let Some(lane) =
                self.turns.next(|lane| supply.has_room(&self.sources[lane as usize]))
        {
            match self.lanes[lane as usize].next_request(&self.schedule, &mut looks) {
                None if looks > 0 => continue,
                None => {}
                Some(want) if self.request(supply, lane, &want) => (has_sent, unsent) = (true, 0),
                Some(_) => unsent += 1,
            }
            self.turns.add(lane);
        }
        has_sent || looks == 0
    }

    /// Whether the request could be sent; else it is to be sent again.
    fn request(&mut self, supply: &mut impl Supply, lane: u32, want: &Want) -> bool {
        let block_ref = BlockRef { lane, position: want.position };
        let sent = supply.request(&self.sources[lane as usize], block_ref, want);
        if !sent {
            self.lanes[lane as usize].request_again(want.position);
            self.turns.add(lane);
        }
        sent
    }

    /// Its request is to be sent again.
    pub(super) fn request_again(&mut self, block_ref: &BlockRef) {
        self.counters.retried_requests += 1;
        self.lanes[block_ref.lane as usize].request_again(block_ref.position);
        self.turns.add(block_ref.lane);
    }

    // ---- what arrives --------------------------------------------------------------------------

    /// The tokens requested for a block.
    pub(super) fn tokens(&mut self, block_ref: &BlockRef) -> Option<Range<u64>> {
        self.lanes[block_ref.lane as usize].tokens(block_ref.position)
    }

    /// Offset of a token in its file.
    pub(super) fn byte_of(&self, dataset: u32, token: u64) -> u64 {
        let file = &self.sources[dataset as usize].layout.file;
        file.data_offset + token * u64::from(file.dtype.bytes())
    }

    /// The error of a file that changed, seen when these bytes were read; none if it cannot be true
    /// of them.
    pub(super) fn change(
        &self,
        dataset: u32,
        bytes: Range<u64>,
        change: Change,
    ) -> Option<StreamError> {
        match change {
            Change::Block { at_byte } => {
                let possible =
                    at_byte.is_multiple_of(SUM_BYTES) && sums::touches(&bytes, at_byte / SUM_BYTES);
                possible.then_some(StreamError::Changed { dataset, change })
            }
            Change::Written { len } => {
                let tokens = self.sources[dataset as usize].layout.file.tokens;
                let is_short = len < self.byte_of(dataset, tokens);
                Some(match is_short {
                    true => StreamError::Truncated { dataset, at_byte: len },
                    false => StreamError::Changed { dataset, change },
                })
            }
            Change::Removed => Some(StreamError::Changed { dataset, change }),
        }
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
        arrived: Received,
        table: &[u32],
        action: Option<&dyn TokenMap>,
    ) {
        let (dataset, lane) = (block_ref.lane, &mut self.lanes[block_ref.lane as usize]);
        let Some(Place { addr, tokens, bytes }) = lane.place(block_ref.position) else {
            return;
        };
        let stages = &self.sources[dataset as usize].stages;
        let received = Received { tokens: stages.arriving_tokens(tokens), ..arrived };
        let (kernels, scratch) = (&self.kernels, self.scratch.as_mut_slice());
        let first_token = lane.tokens(block_ref.position).map_or(0, |tokens| tokens.start);
        let mut tools = Tools { kernels, scratch, table, action, first_token, compresses: false };
        let buffer = memory.bytes_mut(addr, bytes as usize);
        let error = match stage::run(stages.reader(), buffer, received, &mut tools) {
            Ok(ran) => {
                self.counters.narrowed_blocks += u64::from(ran.narrowed);
                self.counters.replaced_tokens += u64::from(ran.block.replaced);
                self.counters.count_form(&received, stages);
                let tokens = &buffer[..ran.block.bytes];
                let weighs = self.sources[dataset as usize].weighs;
                match weighs.and_then(|_| rows::first_not_finite(tokens)) {
                    None => return lane.arrived(block_ref.position, tokens),
                    Some((index, bits)) => {
                        let token = first_token + index as u64;
                        self.overflow(dataset, token, bits.into(), Limit::Finite)
                    }
                }
            }
            Err(BlockError::Damaged) => {
                self.counters.corrupt_blocks += 1;
                if lane.damaged(block_ref.position) < CRC_RETRIES {
                    lane.request_again(block_ref.position);
                    return self.turns.add(block_ref.lane);
                }
                StreamError::Damaged { dataset, first_token }
            }
            Err(BlockError::Overflow { index, value, stage }) => {
                let limit = stages.reader().get(usize::from(stage));
                let limit = limit.and_then(|stage| stage.limit(value));
                let limit = limit.unwrap_or(Limit::Type(stages.output().dtype));
                self.overflow(dataset, first_token + index as u64, value, limit)
            }
            Err(BlockError::Action(fault)) => StreamError::Action { dataset, first_token, fault },
            Err(BlockError::Unsupported) => {
                StreamError::Refused { dataset, reason: Refusal::BadType }
            }
        };
        self.lanes[dataset as usize].fail(block_ref.position, error);
    }

    /// The error for a token that cannot be delivered.
    pub(super) fn overflow(
        &self,
        dataset: u32,
        token: u64,
        value: i128,
        limit: Limit,
    ) -> StreamError {
        StreamError::Overflow { dataset, token, byte: self.byte_of(dataset, token), value, limit }
    }

    // ---- batches -------------------------------------------------------------------------------

    /// Copies samples, in order, into the slots being filled; those of other streams are passed
    /// over.
    pub(super) fn copy<M: Staging, S: Sink>(&mut self, memory: &mut M, sink: &mut S) -> bool {
        let (mut copied, mut samples) = (0, 0);
        while copied < COPY_BYTES_PER_POLL
            && samples < COPY_SAMPLES_PER_POLL
            && !self.is_between_runs(sink)
        {
            let Some(filling) = self.slot_to_fill(sink) else {
                break;
            };
            let pick = self.schedule.peek();
            match self.state(pick, filling.is_none()) {
                Resident::Ready => {}
                Resident::Failed(error) => {
                    self.end_with(sink, &error);
                    return true;
                }
                Resident::Wanted | Resident::Requested => {
                    self.lanes_of(pick).for_each(|lane| self.turns.add(lane));
                    self.counters.waits_for_data += 1;
                    break;
                }
            }
            if let Some(filling) = filling {
                self.copy_sample(memory, sink, pick, filling);
                copied += self.delivery.sample_bytes();
            }
            for lane in self.lanes_of(pick) {
                self.lanes[lane as usize].consume(pick);
                if self.lanes[lane as usize].free_buffers() > 0 {
                    self.turns.add(lane);
                }
            }
            self.schedule.advance();
            samples += 1;
            self.advance(sink, filling);
        }
        self.counters.delivered_bytes += copied;
        samples > 0
    }

    /// Notes that the next sample was written into `filling`, or passed over.
    fn advance<S: Sink>(&mut self, sink: &mut S, filling: Option<Filling>) {
        if let (Some(filling), Some(ring)) = (filling, self.position.ring) {
            let samples = filling.samples + 1;
            self.fillings[ring as usize] = Some(Filling { samples, ..filling });
            if samples >= self.batches_in_slot(&filling) * u64::from(self.delivery.batch_samples) {
                self.publish(sink, ring);
            }
        }
        self.position.sample += 1;
        if self.position.sample == self.delivery.batch_samples {
            self.position = Position::at(&self.delivery.share, self.position.index + 1);
        }
    }

    /// The lanes that a sample comes from: of its tokens, and of its loss weights.
    fn lanes_of(&self, pick: Pick) -> impl Iterator<Item = u32> + use<> {
        [Some(pick.dataset), self.weights_of[pick.dataset as usize]].into_iter().flatten()
    }

    /// State of a sample that the order has reached.
    fn state(&mut self, pick: Pick, passed: bool) -> Resident {
        for lane in self.lanes_of(pick) {
            let state = self.lanes[lane as usize].state(pick, passed);
            if state != Resident::Ready {
                return state;
            }
        }
        Resident::Ready
    }

    /// Copies a sample into the slot being filled.
    fn copy_sample<M: Staging, S: Sink>(
        &mut self,
        memory: &M,
        sink: &mut S,
        pick: Pick,
        filling: Filling,
    ) {
        let window = self.delivery.window_tokens;
        let width = self.delivery.sample_dtype.bytes();
        let lane = &mut self.lanes[pick.dataset as usize];
        let sample = match lane.gather(memory, pick, width, &mut self.row) {
            Some(addr) => memory.bytes(addr, (window * width) as usize),
            None => {
                self.row.pad((window * width) as usize, self.delivery.rows.pad, width);
                &self.row.tokens
            }
        };
        let mut writer = Writer { sink, kernels: &self.kernels, delivery: &self.delivery };
        writer.write_sample(filling.slot, filling.samples, sample, &self.row);
        if self.delivery.rows.loss_weights.is_none() {
            return;
        }
        let weights = self.weights_of[pick.dataset as usize].map(|lane| {
            let lane = &mut self.lanes[lane as usize];
            match lane.gather(memory, pick, WEIGHT_BYTES, &mut self.weights) {
                Some(addr) => memory.bytes(addr, (window * WEIGHT_BYTES) as usize),
                None => {
                    // What is behind the last document weighs nothing.
                    self.weights.pad((window * WEIGHT_BYTES) as usize, 0, WEIGHT_BYTES);
                    &self.weights.tokens[..]
                }
            }
        });
        writer.write_weights(filling.slot, filling.samples, weights, &self.row);
    }

    /// After the last batch of a run, goes on behind those that are left out, or ends the stream.
    /// Whether there is no batch to fill: also while a request of the run before may still write to
    /// its buffer.
    fn is_between_runs<S: Sink>(&mut self, sink: &mut S) -> bool {
        let run_is_over = self.run.1.is_some_and(|end| self.next_batch() >= end);
        if self.phase == Phase::Streaming && self.position.sample == 0 && run_is_over {
            return !self.begin_next_run(sink);
        }
        self.phase == Phase::Ended
    }

    /// Whether there is another run, and every buffer is free for it. Ends the stream after the
    /// last.
    fn begin_next_run<S: Sink>(&mut self, sink: &mut S) -> bool {
        let mut all_free = true;
        self.lanes.iter_mut().for_each(|lane| all_free &= lane.finish());
        if self.later.is_empty() {
            self.phase = Phase::Ended;
            sink.finish();
            return false;
        }
        let Some(Prepared { run, state, coverages }) =
            all_free.then(|| self.later.pop_front()).flatten()
        else {
            self.counters.waits_for_data += 1;
            return false;
        };
        let datasets = self.sources.iter().enumerate().map(|(index, source)| source.dataset(index));
        for (lane, dataset) in self.lanes.iter_mut().zip(datasets) {
            lane.restart(coverages[dataset].clone());
        }
        (0..self.lanes.len() as u32).for_each(|lane| self.turns.add(lane));
        self.schedule.restart(state);
        self.run = run;
        let index = run.0 - self.delivery.first_batch;
        self.position = Position::at(&self.delivery.share, index);
        true
    }

    /// Where the next sample goes: nowhere, if it belongs to another stream. `None` if the host has
    /// no slot for it.
    fn slot_to_fill<S: Sink>(&mut self, sink: &mut S) -> Option<Option<Filling>> {
        let Some(ring) = self.position.ring else {
            return Some(None);
        };
        let filling = &mut self.fillings[ring as usize];
        if filling.is_none() {
            let step = self.position.step;
            *filling = sink.acquire(ring).map(|slot| Filling { slot, samples: 0, step });
            self.counters.waits_for_host += u64::from(filling.is_none());
        }
        filling.map(Some)
    }

    /// Number of batches for a slot: the first has one, so that the host can begin.
    fn batches_in_slot(&self, filling: &Filling) -> u64 {
        let fit = if filling.step == 0 { 1 } else { self.delivery.batches_per_slot() };
        self.delivery
            .end_step(&self.run)
            .map_or(fit, |end| end.saturating_sub(filling.step).min(fit))
    }

    /// Publishes the whole batches of the slot being filled, if there are any.
    fn publish<S: Sink>(&mut self, sink: &mut S, ring: u32) {
        let Some(filling) = self.fillings[ring as usize].take() else {
            return;
        };
        let batch_bytes = self.delivery.batch_bytes();
        let batches = filling.samples / u64::from(self.delivery.batch_samples);
        if batches == 0 {
            return;
        }
        let meta = SlotMeta {
            first_batch: self.delivery.first_batch + filling.step,
            batches: batches as u32,
            batch_bytes: batch_bytes as u32,
        };
        sink.publish(filling.slot, meta);
        self.counters.batches += batches;
    }

    /// Ends the stream early, after what was published.
    pub(super) fn end_with<S: Sink>(&mut self, sink: &mut S, error: &StreamError) {
        if self.phase == Phase::Ended {
            return;
        }
        self.stop(sink);
        sink.fail(error);
    }

    /// Publishes the whole batches of every slot being filled, and does nothing more.
    pub(super) fn stop<S: Sink>(&mut self, sink: &mut S) {
        if self.phase == Phase::Streaming {
            (0..self.delivery.share.count).for_each(|ring| self.publish(sink, ring));
            self.phase = Phase::Ended;
        }
    }
}
