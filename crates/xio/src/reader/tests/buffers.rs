//! The memory of a reader under any order of responses: no buffer gets a second request while the
//! first is outstanding, because both blocks would be written into it, and every sample that is
//! delivered has its own tokens.
//!
//! Ranks, runs, cut groups, lost connections, and a token that cannot be delivered are drawn
//! together.

use core::ops::Range;
use std::vec;
use std::vec::Vec;

use sim::chance::Chance;
use sim::memory::Arena;

use crate::dataset::{Dtype, Format, TokenFile};
use crate::kernel::Kernels;
use crate::order::{Blend, BlockShuffle, Cut, Order, SampleLayout};
use crate::reader::assembler::{Assembler, Supply};
use crate::reader::lane::Want;
use crate::reader::{
    BlockRef, Delivery, LeaveOut, ReaderSetup, ReaderSource, Share, Sink, SlotMeta, StreamError,
};
use crate::stage::{BlockPlan, BlockStages, Limit, Received, Rows};
use roce::world::Staging;

/// Polls after which a stream that has not ended is stuck.
const POLLS: u32 = 200_000;

/// Batches of a rank.
const MOST_BATCHES: u64 = 200;

/// A token by its dataset and its place in the file.
fn value(dataset: usize, token: u64) -> u16 {
    (token * 7 + dataset as u64 * 10_007) as u16
}

/// A request that the target has not answered.
#[derive(Debug)]
struct Asked {
    block_ref: BlockRef,
    memory: Range<u64>,
    tokens: Range<u64>,
}

/// Keeps what is outstanding.
struct Wire {
    asked: Vec<Asked>,
    room: usize,
    /// How often a request cannot be sent, in thousandths.
    refuses: u32,
    draw: Chance,
    seed: u64,
}

impl Wire {
    /// The request that is answered next. Often the longest: a short block that the stream does not
    /// wait for stays outstanding.
    fn draw_next(&self, draw: &mut Chance) -> usize {
        let longest = (0..self.asked.len()).rev().max_by_key(|at| {
            let Range { start, end } = self.asked[*at].tokens;
            end - start
        });
        let any = draw.below(self.asked.len() as u64) as usize;
        longest.filter(|_| draw.per_mille(600)).unwrap_or(any)
    }
}

impl Supply for Wire {
    fn has_room(&self, _: &ReaderSource) -> bool {
        self.asked.len() < self.room
    }

    fn request(&mut self, source: &ReaderSource, block_ref: BlockRef, want: &Want) -> bool {
        let (offset, bytes) = want.range_in(&source.layout.file);
        let memory = want.addr..want.addr + u64::from(bytes);
        let tokens = offset / 2..(offset + u64::from(bytes)) / 2;
        for other in &self.asked {
            let is_apart = other.memory.end <= memory.start || memory.end <= other.memory.start;
            assert!(is_apart, "seed {}: {block_ref:?} on top of {other:?}", self.seed);
        }
        if self.draw.per_mille(self.refuses) {
            return false;
        }
        self.asked.push(Asked { block_ref, memory, tokens });
        true
    }
}

/// The rings: what was written into each, and the end.
struct Rings {
    seen: Vec<Vec<u8>>,
    is_full: bool,
    end: Option<Result<(), StreamError>>,
}

impl Sink for Rings {
    fn acquire(&mut self, ring: u32) -> Option<u32> {
        (!self.is_full).then_some(ring)
    }

    fn write(&mut self, slot: u32, _: u32, bytes: &[u8]) {
        self.seen[slot as usize].extend_from_slice(bytes);
    }

    fn publish(&mut self, _: u32, _: SlotMeta) {}

    fn fail(&mut self, error: &StreamError) {
        assert_eq!(self.end.replace(Err(*error)), None);
    }

    fn finish(&mut self) {
        assert_eq!(self.end.replace(Ok(())), None);
    }
}

/// What is drawn.
struct Case {
    order: Order,
    sources: Vec<ReaderSource>,
    delivery: Delivery,
    left_out: Range<u64>,
    /// A token that cannot be delivered.
    bad: Option<(usize, u64)>,
}

fn sources(draw: &mut Chance, window: u32) -> (Vec<BlockShuffle>, Vec<ReaderSource>) {
    let mut shuffles = Vec::new();
    let mut sources = Vec::new();
    let stages = BlockStages::compile(Dtype::U16, &BlockPlan::plain(Dtype::U16), true);
    let stages = stages.expect("nothing to convert");
    for dataset in 0..draw.between(1, 3) as u32 {
        // Samples of large blocks are not all counted where a group is cut, and the last block is
        // short.
        let samples_per_block = draw.pick(&[5, 300]);
        let samples = u64::from(samples_per_block) * draw.pick(&[1, 2, 3, 7]) + draw.between(1, 2);
        let group = draw.between(1, 4) as u32;
        let shuffle = BlockShuffle::new(samples, samples_per_block, group, draw.word(), 0);
        shuffles.push(shuffle.expect("sound"));
        let tokens = samples * u64::from(window);
        let file = TokenFile { dtype: Dtype::U16, data_offset: 0, tokens, format: Format::Flat };
        let undivided = SampleLayout::without_samples(file, window, 0);
        let layout = SampleLayout { samples, samples_per_block, ..undivided };
        let stages = stages.clone();
        let (cut, whole_pages) = (Cut::Windows, false);
        sources.push(ReaderSource {
            connection: 0,
            source: dataset,
            layout,
            cut,
            stages,
            whole_pages,
            weighs: None,
        });
    }
    (shuffles, sources)
}

impl Case {
    fn draw(draw: &mut Chance) -> Case {
        let window = draw.between(1, 3) as u32;
        let (shuffles, sources) = sources(draw, window);
        let weights: Vec<u32> = sources.iter().map(|_| draw.between(1, 3) as u32).collect();
        let order = Order::new(Blend::new(&weights).expect("sound"), shuffles).expect("as many");
        let ranks = draw.between(1, 4) as u32;
        let first = draw.below(ranks.into()) as u32;
        let count = draw.between(1, u64::from(ranks - first)) as u32;
        let (first_batch, batches) = (draw.below(400), draw.between(1, MOST_BATCHES));
        // Whole steps of the job.
        let step = |step: u64| first_batch + step * u64::from(ranks);
        let left_out = draw.below(batches);
        let left_out = step(left_out)..step(left_out + draw.below(40));
        let dataset = draw.below(sources.len() as u64) as usize;
        let bad = (dataset, draw.below(sources[dataset].layout.file.tokens));
        let delivery = Delivery {
            window_tokens: window,
            batch_samples: draw.between(1, 40) as u32,
            sample_dtype: Dtype::U16,
            dtype: Dtype::U16,
            rows: Rows::default(),
            first_batch,
            batches: Some(batches),
            shift: 0,
            share: Share { ranks, first, count },
            slot_bytes: 4 << 10,
        };
        let bad = draw.per_mille(300).then_some(bad);
        Case { order, sources, delivery, left_out, bad }
    }

    /// What each ring gets, and the samples of which each consists, computed one by one.
    fn expected(&self) -> Vec<Vec<u8>> {
        let Delivery { first_batch, batches, batch_samples, window_tokens, share, .. } =
            self.delivery;
        let mut rings = vec![Vec::new(); share.count as usize];
        for index in 0..batches.unwrap_or(0) * u64::from(share.ranks) {
            let (batch, rank) = (first_batch + index, (index % u64::from(share.ranks)) as u32);
            let ring = rank.checked_sub(share.first).and_then(|ring| rings.get_mut(ring as usize));
            let Some(ring) = ring.filter(|_| !self.left_out.contains(&batch)) else { continue };
            for n in 0..u64::from(batch_samples) {
                let sample = self.order.at(batch * u64::from(batch_samples) + n);
                let per_block = u64::from(self.sources[sample.dataset].layout.samples_per_block);
                let in_file = sample.place.block * per_block + u64::from(sample.place.sample);
                let first = in_file * u64::from(window_tokens);
                for token in first..first + u64::from(window_tokens) {
                    ring.extend_from_slice(&value(sample.dataset, token).to_le_bytes());
                }
            }
        }
        rings
    }

    fn setup(&self) -> ReaderSetup {
        let left_out = Some(self.left_out.clone()).filter(|range| !range.is_empty());
        let left_out = LeaveOut::new(left_out).expect("one range");
        let (order, sources) = (self.order.clone(), self.sources.clone());
        ReaderSetup::leaving_out(order, sources, self.delivery, &left_out)
    }
}

/// A response: the block, or the token that is at fault.
fn respond(case: &Case, assembler: &mut Assembler, memory: &mut Arena, asked: &Asked) {
    let Asked { block_ref, memory: place, tokens } = asked;
    let dataset = block_ref.lane as usize;
    let is_bad = |(of, token): &(usize, u64)| *of == dataset && tokens.contains(token);
    if let Some((_, token)) = case.bad.filter(is_bad) {
        let limit = Limit::Type(Dtype::U16);
        let error = assembler.overflow(block_ref.lane, token, 70_000, limit);
        return assembler.fail(block_ref, error);
    }
    let bytes = tokens.clone().flat_map(|token| value(dataset, token).to_le_bytes());
    let bytes: Vec<u8> = bytes.collect();
    memory.bytes_mut(place.start, bytes.len()).copy_from_slice(&bytes);
    let crc32c = (Kernels::PORTABLE.crc32c)(0, &bytes);
    let (bytes, tokens) = (bytes.len(), 0);
    let received = Received { bytes, tokens, crc32c, bits: 0, codec: None, replaced: 0 };
    assembler.arrived(memory, block_ref, received, &[], None);
}

#[test]
fn a_buffer_with_an_outstanding_request_is_nobody_elses() {
    for seed in 0..400 {
        let mut draw = Chance::new(seed);
        let case = Case::draw(&mut draw);
        let (setup, expected) = (case.setup(), case.expected());
        let mut memory = Arena::new(setup.memory_bytes() as usize + 8192, &mut draw);
        let base = memory.take(setup.memory_bytes()).expect("as large");
        let mut assembler = Assembler::new(setup, base, Kernels::PORTABLE);
        let (room, refuses) = (draw.between(1, 12) as usize, draw.pick(&[0, 30]));
        let own = Chance::new(draw.word());
        let mut wire = Wire { asked: Vec::new(), room, refuses, draw: own, seed };
        let seen = vec![Vec::new(); expected.len()];
        let mut rings = Rings { seen, is_full: false, end: None };
        // Slow targets leave much outstanding while samples are copied.
        let (arrives, breaks) = (draw.pick(&[50, 300, 900]), draw.pick(&[0, 5]));
        for _ in 0..POLLS {
            if rings.end.is_some() {
                break;
            }
            assembler.request_blocks(&mut wire);
            if draw.per_mille(breaks) {
                // The connection is lost, and with it all that was asked.
                wire.asked.drain(..).for_each(|asked| assembler.request_again(&asked.block_ref));
            } else if draw.per_mille(arrives) && !wire.asked.is_empty() {
                let at = wire.draw_next(&mut draw);
                let asked = wire.asked.swap_remove(at);
                respond(&case, &mut assembler, &mut memory, &asked);
            }
            rings.is_full = draw.per_mille(300);
            assembler.copy(&mut memory, &mut rings);
        }
        for (seen, expected) in rings.seen.iter().zip(&expected) {
            assert!(expected.starts_with(seen), "seed {seed}: other bytes are delivered");
        }
        match rings.end {
            Some(Ok(())) => assert_eq!(rings.seen, expected, "seed {seed}"),
            Some(Err(error)) => {
                let at = matches!(error, StreamError::Overflow { .. }) && case.bad.is_some();
                assert!(at, "seed {seed}: {error}");
            }
            None => panic!("seed {seed}: it stands still"),
        }
    }
}

/// A freed buffer is asked for at once, also while samples of other blocks are ready; and those of
/// the group that a stream begins in the middle of are free once it is passed.
#[test]
fn no_buffer_is_idle_or_lost() {
    for (first_batch, answers) in [(0, 1), (33, 1), (0, 64)] {
        // 300 samples a block, of which the first group counts none: too many on either side.
        let per_block = 300;
        let samples = u64::from(per_block) * 12;
        let file =
            TokenFile { dtype: Dtype::U16, data_offset: 0, tokens: samples, format: Format::Flat };
        let undivided = SampleLayout::without_samples(file, 1, 0);
        let layout = SampleLayout { samples, samples_per_block: per_block, ..undivided };
        let shuffle = BlockShuffle::new(samples, per_block, 4, 7, 0).expect("sound");
        let order = Order::new(Blend::new(&[1]).expect("sound"), vec![shuffle]);
        let mut draw = Chance::new(1);
        let mut case = Case::draw(&mut draw);
        case.order = order.expect("one shuffle");
        case.sources.truncate(1);
        case.sources[0].layout = layout;
        case.delivery = Delivery {
            window_tokens: 1,
            batch_samples: 20,
            first_batch,
            batches: None,
            share: Share::WHOLE,
            ..case.delivery
        };
        (case.left_out, case.bad) = (0..0, None);
        let setup = case.setup();
        let mut memory = Arena::new(setup.memory_bytes() as usize + 8192, &mut draw);
        let base = memory.take(setup.memory_bytes()).expect("as large");
        let mut assembler = Assembler::new(setup, base, Kernels::PORTABLE);
        let own = Chance::new(2);
        let mut wire = Wire { asked: Vec::new(), room: 64, refuses: 0, draw: own, seed: 0 };
        let mut rings = Rings { seen: vec![Vec::new()], is_full: false, end: None };
        let mut most = 0;
        // Beyond the first group: only when nothing is ready, the next block comes.
        while assembler.counters.delivered_bytes < 4 * 2 * samples {
            while assembler.request_blocks(&mut wire) {}
            assert_eq!(assembler.free_buffers(), 0, "from batch {first_batch}: a buffer is idle");
            if assembler.counters.delivered_bytes > 2 * 2 * samples {
                most = most.max(wire.asked.len());
            }
            if !assembler.copy(&mut memory, &mut rings) {
                for asked in wire.asked.drain(..answers.min(wire.asked.len())) {
                    respond(&case, &mut assembler, &mut memory, &asked);
                }
            }
        }
        let all = assembler.buffer_count();
        assert!(most == all || answers > 1, "from batch {first_batch}: {most} of {all} are used");
    }
}
