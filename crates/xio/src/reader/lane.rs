//! A lane: one dataset of a stream, its staging buffers and the blocks in them.
//!
//! Blocks are identified by *position*, their number in fetch order over all epochs. The lane holds
//! a run of positions, the oldest in front; each has its own staging buffer until its last sample
//! is consumed.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use roce::world::Staging;

use crate::capsule::ReadRequest;
use crate::dataset::TokenFile;
use crate::order::megatron::MegatronOrder;
use crate::order::{Cut, Packed, Packing, StreamOrder};
use crate::target::IO_ALIGN;

use super::rows::Row;
use super::schedule::{BlockRange, Coverage, Pick, Schedule};
use super::{ReaderSource, StreamError, buffers_per_lane};

/// Not a sample number: a block has no more samples than tokens.
const NO_SAMPLE: u32 = u32::MAX;

/// State of a block, or of a sample of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resident {
    /// To be requested (again).
    Wanted,
    /// Requested.
    Requested,
    /// In its buffer, after the reader's stages.
    Ready,
    /// Cannot be fetched.
    Failed(StreamError),
}

/// How the samples of a block are fetched.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// All at once, normally.
    Whole(Resident),
    /// A sample of the block cannot be delivered: each is requested separately when the order
    /// reaches it, so that all before the bad one are delivered. Holds the sample reached last, at
    /// the start of the buffer; of a packed one this piece.
    Single { sample: u32, piece: u32, first_token: u64, tokens: u32, state: Resident },
}

impl Load {
    fn state(&mut self) -> &mut Resident {
        match self {
            Load::Whole(state) | Load::Single { state, .. } => state,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    load: Load,
    buffer: u32,
    /// Its number in the file.
    number: u64,
    first_token: u64,
    tokens: u32,
    samples_left: u32,
    damaged: u32,
}

/// A block to request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) position: u64,
    pub(super) addr: u64,
    first_token: u64,
    tokens: u32,
}

/// The buffer of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) addr: u64,
    /// Tokens requested.
    pub(super) tokens: u32,
    /// Room for them, before and after the reader's stages.
    pub(super) bytes: u32,
}

impl Want {
    /// Offset and length in bytes of its tokens in the file.
    pub(super) fn range_in(&self, file: &TokenFile) -> (u64, u32) {
        let width = file.dtype.bytes();
        (file.data_offset + self.first_token * u64::from(width), self.tokens * width)
    }

    pub(super) fn request(&self, source: &ReaderSource, rkey: u32) -> ReadRequest {
        ReadRequest {
            seq: 0,
            tag: 0,
            source: source.source,
            first_token: self.first_token,
            tokens: self.tokens,
            deliver: source.stages.arriving(),
            remote_addr: self.addr,
            rkey,
        }
    }
}

impl Block {
    /// First token and number of tokens of the buffer's present or requested contents.
    fn range(&self) -> (u64, u32) {
        match self.load {
            Load::Whole(_) => (self.first_token, self.tokens),
            Load::Single { first_token, tokens, .. } => (first_token, tokens),
        }
    }
}

/// Tokens of a sample, and from its start to the start of the next.
#[derive(Clone, Copy, Debug)]
struct Window {
    tokens: u32,
    stride: u32,
}

/// Pieces of listed samples that all lanes together read ahead: they are small.
const LISTED_AHEAD: u32 = 512;

/// The pieces of listed samples, in the order of the samples: each is a block of its own.
#[derive(Debug)]
struct Listed {
    order: MegatronOrder,
    dataset: usize,
    /// Samples whose pieces are to come, of the first those from `piece` on.
    samples: Range<u64>,
    piece: usize,
}

impl Listed {
    fn new(order: &StreamOrder, dataset: usize, coverage: &Coverage) -> Option<Listed> {
        let StreamOrder::Megatron(order) = order else { return None };
        let (order, samples) = (order.clone(), coverage.listed_samples());
        Some(Listed { order, dataset, samples, piece: 0 })
    }

    fn restart(&mut self, coverage: &Coverage) {
        (self.samples, self.piece) = (coverage.listed_samples(), 0);
    }

    fn next(&mut self) -> Option<BlockRange> {
        while !self.samples.is_empty() {
            let mut pieces = self.order.pieces(self.dataset, self.samples.start);
            if let Some(piece) = pieces.nth(self.piece) {
                self.piece += 1;
                // In range: a piece is no longer than a window.
                let tokens = (piece.end - piece.start) as u32;
                return Some(BlockRange {
                    number: 0,
                    first_token: piece.start,
                    tokens,
                    samples: 1,
                });
            }
            (self.samples.start, self.piece) = (self.samples.start + 1, 0);
        }
        None
    }
}

#[derive(Debug)]
pub(super) struct Lane {
    dataset: u32,
    window: Window,
    cut: Cut,
    /// The pieces to come, where samples are listed.
    listed: Option<Listed>,
    /// By position, the samples of blocks of which one was reached.
    packed: BTreeMap<u64, Packed>,
    /// The pieces that have arrived of a packed sample that is requested alone.
    pieces: Vec<u8>,
    /// From the start of a sample to the start of the next, in tokens as the stages give them.
    cut_stride: u32,
    /// Bytes of a token that a buffer has room for.
    token_bytes: u32,
    base_addr: u64,
    buffer_bytes: u64,
    /// The file, if whole pages of it are read.
    pages_of: Option<TokenFile>,
    free: Vec<u32>,
    /// Position of `blocks[0]`.
    front: u64,
    blocks: VecDeque<Block>,
    buffers: u32,
    coverage: Coverage,
    wanted: u32,
}

impl Lane {
    fn buffer_bytes(source: &ReaderSource) -> u64 {
        let layout = &source.layout;
        let samples = layout.samples.min(layout.samples_per_block.into());
        let tokens = match &source.cut {
            Cut::Packed(packing) => packing.longest_block().into(),
            Cut::Windows | Cut::Through(_) => layout.run_tokens(samples),
            Cut::Listed => layout.window.into(),
        };
        let bytes = tokens * u64::from(source.stages.buffered_bytes());
        let slack = if source.whole_pages { 2 * u64::from(IO_ALIGN) } else { 0 };
        bytes.next_multiple_of(u64::from(IO_ALIGN)) + slack
    }

    /// Bytes of the largest block that stages need a second buffer for.
    pub(super) fn scratch_bytes(sources: &[ReaderSource]) -> u64 {
        let in_two = sources.iter().filter(|source| source.stages.needs_scratch());
        in_two.map(Lane::buffer_bytes).max().unwrap_or(0)
    }

    fn buffers(order: &StreamOrder, lane: usize) -> u32 {
        let order = match order {
            StreamOrder::Own(order) => order,
            StreamOrder::Megatron(order) => {
                let lanes = order.datasets().max(1) as u32;
                return (LISTED_AHEAD / lanes).max(2 * order.most_pieces(lane));
            }
        };
        match order.draws(lane) {
            false => 0,
            // A group has at most MAX_GROUP_BLOCKS.
            true => buffers_per_lane(
                order.shuffle_of(lane).group_blocks() as u32,
                order.drawn_datasets(),
            ),
        }
    }

    pub(super) fn bytes_needed(order: &StreamOrder, lane: usize, source: &ReaderSource) -> u64 {
        Lane::buffer_bytes(source) * u64::from(Lane::buffers(order, lane))
    }

    /// A lane whose buffers begin `base_addr` bytes from the start of the reader's memory.
    pub(super) fn new(
        order: &StreamOrder,
        dataset: usize,
        source: &ReaderSource,
        base_addr: u64,
        coverage: Coverage,
    ) -> Lane {
        let buffers = Lane::buffers(order, dataset);
        Lane {
            dataset: dataset as u32,
            window: Window { tokens: source.layout.window, stride: source.layout.stride() },
            cut: source.cut.clone(),
            listed: Listed::new(order, dataset, &coverage),
            packed: BTreeMap::new(),
            pieces: Vec::new(),
            cut_stride: source.stages.output_tokens(source.layout.stride()),
            token_bytes: source.stages.buffered_bytes(),
            base_addr,
            buffer_bytes: Lane::buffer_bytes(source),
            pages_of: source.whole_pages.then_some(source.layout.file),
            free: (0..buffers).rev().collect(),
            front: coverage.first(),
            blocks: VecDeque::new(),
            buffers,
            coverage,
            wanted: 0,
        }
    }

    /// Address of the token `first_token` of the file, which is the first in this buffer.
    fn addr_in(&self, buffer: u32, first_token: u64) -> u64 {
        let head = self.pages_of.map_or(0, |TokenFile { data_offset, dtype, .. }| {
            (data_offset + first_token * u64::from(dtype.bytes())) % u64::from(IO_ALIGN)
        });
        self.base_addr + u64::from(buffer) * self.buffer_bytes + head
    }

    /// Sets the address of the reader's memory.
    pub(super) fn move_to(&mut self, base_addr: u64) {
        self.base_addr += base_addr;
    }

    pub(super) fn free_buffers(&self) -> usize {
        self.free.len()
    }

    pub(super) fn buffer_count(&self) -> usize {
        self.buffers as usize
    }

    fn block(&mut self, position: u64) -> Option<&mut Block> {
        let index = position.checked_sub(self.front)?;
        self.blocks.get_mut(usize::try_from(index).ok()?)
    }

    /// The next block to request: one to be requested again, else the next in fetch order if a
    /// buffer is free. `looks` bounds how many blocks are examined.
    pub(super) fn next_request(&mut self, schedule: &Schedule, looks: &mut u32) -> Option<Want> {
        if self.wanted == 0 {
            self.admit(schedule, looks)?;
        }
        let wants = |block: &mut Block| *block.load.state() == Resident::Wanted;
        let index = self.blocks.iter_mut().position(wants)?;
        self.want(self.front + index as u64)
    }

    /// The block at a position, if it is to be requested and there are buffers for all up to it.
    pub(super) fn request_at(
        &mut self,
        position: u64,
        schedule: &Schedule,
        looks: &mut u32,
    ) -> Option<Want> {
        while self.front + self.blocks.len() as u64 <= position {
            self.admit(schedule, looks)?;
        }
        let wanted = *self.block(position)?.load.state() == Resident::Wanted;
        if wanted { self.want(position) } else { None }
    }

    /// Marks a block that is to be requested as requested.
    fn want(&mut self, position: u64) -> Option<Want> {
        let block = self.block(position)?;
        *block.load.state() = Resident::Requested;
        let ((first_token, tokens), buffer) = (block.range(), block.buffer);
        self.wanted -= 1;
        Some(Want { position, addr: self.addr_in(buffer, first_token), first_token, tokens })
    }

    /// Assigns a buffer to the next block in fetch order. Blocks without samples for this stream
    /// are skipped.
    fn admit(&mut self, schedule: &Schedule, looks: &mut u32) -> Option<()> {
        loop {
            let position = self.front + self.blocks.len() as u64;
            if self.coverage.ends_before(position) {
                return None;
            }
            let buffer = *self.free.last()?;
            *looks = looks.checked_sub(1)?;
            let range = match &mut self.listed {
                Some(listed) => listed.next()?,
                None => schedule.block(self.dataset, position)?,
            };
            let samples_left = self.coverage.samples(position, range.samples);
            self.blocks.push_back(Block {
                load: Load::Whole(Resident::Wanted),
                buffer,
                number: range.number,
                first_token: range.first_token,
                tokens: range.tokens,
                samples_left,
                damaged: 0,
            });
            if samples_left > 0 {
                self.free.pop();
                self.wanted += 1;
                return Some(());
            }
            self.pass(position);
        }
    }

    pub(super) fn request_again(&mut self, position: u64) {
        let Some(block) = self.block(position) else {
            return;
        };
        let state = block.load.state();
        if *state == Resident::Requested {
            *state = Resident::Wanted;
            self.wanted += 1;
        }
    }

    /// What was requested has arrived; `tokens` are its bytes after the reader's stages. The pieces
    /// of a packed sample arrive one by one.
    pub(super) fn arrived(&mut self, position: u64, tokens: &[u8]) {
        let is_packed = matches!(self.cut, Cut::Packed(_));
        let Some(block) = self.block(position) else {
            return;
        };
        *block.load.state() = Resident::Ready;
        if let (Load::Single { sample, piece, .. }, true) = (block.load, is_packed) {
            self.pieces.extend_from_slice(tokens);
            self.request_single(position, sample, piece + 1);
        }
    }

    /// The request failed. If one token of a block is at fault, the other samples can still be
    /// fetched; listed samples are blocks of their own.
    pub(super) fn fail(&mut self, position: u64, error: StreamError) {
        let is_listed = matches!(self.cut, Cut::Listed);
        let Some(block) = self.block(position) else {
            return;
        };
        let one_token = match error {
            StreamError::Overflow { .. } | StreamError::Truncated { .. } => true,
            StreamError::Action { fault, .. } => fault.is_of_a_token(),
            _ => false,
        };
        match block.load {
            Load::Whole(_) if one_token && !is_listed => {
                let (first_token, state) = (block.first_token, Resident::Ready);
                block.load =
                    Load::Single { sample: NO_SAMPLE, piece: 0, first_token, tokens: 0, state };
            }
            _ => *block.load.state() = Resident::Failed(error),
        }
    }

    /// Counts an arrival with a wrong CRC and returns how many there were.
    pub(super) fn damaged(&mut self, position: u64) -> u32 {
        self.block(position).map_or(0, |block| {
            block.damaged += 1;
            block.damaged
        })
    }

    /// Where the block that is requested has its buffer.
    pub(super) fn place(&mut self, position: u64) -> Option<Place> {
        let width = self.token_bytes;
        let block = self.block(position)?;
        let is_requested = *block.load.state() == Resident::Requested;
        let (buffer, (first_token, tokens)) = (block.buffer, block.range());
        let addr = self.addr_in(buffer, first_token);
        is_requested.then_some(Place { addr, tokens, bytes: tokens * width })
    }

    /// The requested tokens.
    pub(super) fn tokens(&mut self, position: u64) -> Option<Range<u64>> {
        let (first_token, tokens) = self.block(position)?.range();
        Some(first_token..first_token + u64::from(tokens))
    }

    /// State of a sample that the order has reached; `passed` if another stream delivers it. All
    /// its blocks have to be ready.
    pub(super) fn state(&mut self, pick: Pick, passed: bool) -> Resident {
        for position in pick.position..pick.position + u64::from(pick.blocks) {
            let state = match passed {
                true => self.resident_to_pass(position),
                false => self.resident(position, pick.sample),
            };
            if state != Resident::Ready {
                return state;
            }
        }
        Resident::Ready
    }

    /// State of a sample in this block.
    fn resident(&mut self, position: u64, sample: u32) -> Resident {
        let Some(block) = self.block(position) else {
            return Resident::Wanted;
        };
        match block.load {
            Load::Whole(state) => state,
            Load::Single { sample: loaded, state, .. } if loaded == sample => state,
            // Until the response arrives the buffer cannot take another sample.
            Load::Single { state: Resident::Requested | Resident::Wanted, .. } => {
                Resident::Requested
            }
            Load::Single { .. } => {
                self.pieces.clear();
                self.request_single(position, sample, 0)
            }
        }
    }

    /// Requests a sample of a block alone: all of it, or a piece of a packed one. Returns its
    /// state: ready if it has no such piece.
    fn request_single(&mut self, position: u64, sample: u32, piece: u32) -> Resident {
        let (packing, window) = (self.packing().cloned(), self.window);
        let Some(block) = self.block(position) else {
            return Resident::Wanted;
        };
        let (number, first) = (block.number, block.first_token);
        let (first_token, tokens) = match packing {
            None => (first + u64::from(sample) * u64::from(window.stride), window.tokens),
            Some(packing) => {
                let packed = self.packed.entry(position).or_insert_with(|| packing.packed(number));
                let Some(piece) = packed.sample(sample).get(piece as usize) else {
                    return Resident::Ready;
                };
                (first + u64::from(piece.start), piece.len() as u32)
            }
        };
        let state = Resident::Wanted;
        if let Some(block) = self.block(position) {
            block.load = Load::Single { sample, piece, first_token, tokens, state };
            self.wanted += 1;
        }
        state
    }

    fn packing(&self) -> Option<&Arc<Packing>> {
        match &self.cut {
            Cut::Packed(packing) => Some(packing),
            _ => None,
        }
    }

    /// State of a block with a sample that the order has reached and that another stream delivers:
    /// when it is ready its buffer may be freed, because nothing will be written to it.
    fn resident_to_pass(&mut self, position: u64) -> Resident {
        match self.block(position).map(|block| block.load) {
            None => Resident::Wanted,
            Some(Load::Whole(state)) => state,
            Some(Load::Single { state: Resident::Requested | Resident::Wanted, .. }) => {
                Resident::Requested
            }
            Some(Load::Single { .. }) => Resident::Ready,
        }
    }

    /// Address of a sample whose tokens have `width` bytes.
    pub(super) fn sample_addr(&mut self, position: u64, sample: u32, width: u32) -> u64 {
        let base = self.base_addr;
        let stride_bytes = u64::from(self.cut_stride) * u64::from(width);
        let Some(block) = self.block(position) else {
            return base;
        };
        let (load, buffer, (first_token, _)) = (block.load, block.buffer, block.range());
        let first = self.addr_in(buffer, first_token);
        match load {
            Load::Whole(_) => first + u64::from(sample) * stride_bytes,
            Load::Single { .. } => first,
        }
    }

    /// Gathers what a sample consists of into `row`: where documents end in it, and its tokens
    /// unless they lie in one piece, at the address that is returned. They have `width` bytes.
    pub(super) fn gather<M: Staging>(
        &mut self,
        memory: &M,
        Pick { position, sample, blocks, .. }: Pick,
        width: u32,
        row: &mut Row,
    ) -> Option<u64> {
        row.clear();
        if self.listed.is_some() {
            row.tokens.clear();
            for position in position..position + u64::from(blocks) {
                let piece = self.block(position).map(|b| (b.buffer, b.first_token, b.tokens));
                let (buffer, first_token, tokens) = piece?;
                let from = self.addr_in(buffer, first_token);
                row.tokens.extend_from_slice(memory.bytes(from, (tokens * width) as usize));
                row.ends.push(row.tokens.len() as u32 / width);
            }
            return None;
        }
        if let Some(packing) = self.packing().cloned() {
            let (number, buffer, first, load) =
                self.block(position).map(|b| (b.number, b.buffer, b.first_token, b.load))?;
            let targets = packing.documents().targets().filter(|_| row.needs_others);
            let addr = self.addr_in(buffer, first);
            let packed = self.packed.entry(position).or_insert_with(|| packing.packed(number));
            row.tokens.clear();
            for piece in packed.sample(sample) {
                let (at, bytes) = (row.tokens.len(), (piece.len() as u32 * width) as usize);
                let from = addr + u64::from(piece.start) * u64::from(width);
                row.tokens.extend_from_slice(match load {
                    Load::Whole(_) => memory.bytes(from, bytes),
                    // Each piece has arrived.
                    Load::Single { .. } => &self.pieces[at..at + bytes],
                });
                row.ends.push(row.tokens.len() as u32 / width);
                if let Some(targets) = targets {
                    let (start, end) =
                        (first + u64::from(piece.start), first + u64::from(piece.end));
                    row.note_others(targets.others(start..end), start, at as u32 / width);
                }
            }
            return None;
        }
        if let (Cut::Through(documents), true) = (&self.cut, row.needs_ends) {
            let documents = documents.clone();
            let stride = u64::from(self.window.stride);
            let first = self.block(position).map_or(0, |block| block.first_token);
            let first = first + u64::from(sample) * stride;
            let end = first + u64::from(self.window.tokens);
            row.ends.extend(documents.borders(first..end).map(|token| (token - first) as u32));
            row.ends.push(self.window.tokens);
            if let Some(targets) = documents.targets().filter(|_| row.needs_others) {
                row.note_others(targets.others(first..end), first, 0);
            }
        }
        Some(self.sample_addr(position, sample, width))
    }

    /// Marks one sample of the block as delivered.
    pub(super) fn consume(&mut self, pick: Pick) {
        let blocks = pick.position..pick.position + u64::from(pick.blocks);
        blocks.for_each(|position| self.consume_from(position));
    }

    fn consume_from(&mut self, position: u64) {
        let head_end = self.coverage.head_end();
        if position >= head_end && self.front < head_end {
            self.retire_before(head_end);
        }
        let Some(block) = self.block(position) else {
            return;
        };
        block.samples_left = block.samples_left.saturating_sub(1);
        if block.samples_left == 0 {
            self.retire(position);
        }
    }

    /// Frees every buffer that no request will write to: nothing more is delivered, for now.
    /// Whether all are free.
    pub(super) fn finish(&mut self) -> bool {
        self.retire_before(u64::MAX);
        self.blocks.is_empty()
    }

    /// Goes on with another part of the dataset, after [`finish`](Lane::finish) has freed all
    /// buffers.
    pub(super) fn restart(&mut self, coverage: Coverage) {
        self.front = coverage.first();
        if let Some(listed) = &mut self.listed {
            listed.restart(&coverage);
        }
        self.coverage = coverage;
    }

    /// Frees the blocks before `end`, none of which is needed any more. In the groups that the
    /// stream begins and ends in, blocks whose samples were not counted seem to have some left. A
    /// block with an outstanding request keeps its buffer, because the target will still write to
    /// it.
    fn retire_before(&mut self, end: u64) {
        for position in self.front..end.min(self.front + self.blocks.len() as u64) {
            let Some(block) = self.block(position).filter(|block| block.samples_left > 0) else {
                continue;
            };
            match *block.load.state() {
                Resident::Requested => continue,
                Resident::Wanted => self.wanted -= 1,
                Resident::Ready | Resident::Failed(_) => {}
            }
            if let Some(block) = self.blocks.get_mut((position - self.front) as usize) {
                block.samples_left = 0;
                block.load = Load::Whole(Resident::Ready);
                self.free.push(block.buffer);
                self.packed.remove(&position);
            }
        }
        while self.blocks.front().is_some_and(|block| block.samples_left == 0) {
            self.blocks.pop_front();
            self.front += 1;
        }
    }

    /// Frees the buffer of a finished block.
    fn retire(&mut self, position: u64) {
        if let Some(block) = self.block(position) {
            let buffer = block.buffer;
            self.free.push(buffer);
            self.packed.remove(&position);
            self.pass(position);
        }
    }

    /// Marks a block as consumed; blocks leave the run from the front only.
    fn pass(&mut self, position: u64) {
        if let Some(block) = self.block(position) {
            block.load = Load::Whole(Resident::Ready);
        }
        while self.blocks.front().is_some_and(|block| block.samples_left == 0) {
            self.blocks.pop_front();
            self.front += 1;
        }
    }
}
