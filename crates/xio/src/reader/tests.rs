//! The cost of starting a stream anywhere, in steps of the order and never in time; and the
//! coverage of a dataset against a walk over its samples.

mod buffers;

use std::{format, vec, vec::Vec};

use super::*;
use crate::dataset::{Format, TokenFile};
use crate::order::{Blend, BlockShuffle, Cut, MAX_TOTAL_WEIGHT, Order, cost};
use crate::stage::{BlockPlan, Rows};

/// A setup over `weights.len()` files of `tokens` tokens.
fn setup(
    window: u32,
    group: u32,
    weights: &[u32],
    tokens: u64,
    batches: (u64, Option<u64>),
) -> ReaderSetup {
    let file = TokenFile { dtype: Dtype::U16, data_offset: 0, tokens, format: Format::Flat };
    let layout = SampleLayout::new(file, window, 0).expect("the file holds a window");
    let shuffle = |dataset: u32| {
        let per_block = layout.samples_per_block;
        BlockShuffle::new(layout.samples, per_block, group, 7, dataset.into()).expect("sound")
    };
    let shuffles = (0..weights.len() as u32).map(shuffle).collect();
    let order = Order::new(Blend::new(weights).expect("sound"), shuffles).expect("as many");
    let stages = BlockStages::compile(Dtype::U16, &BlockPlan::plain(Dtype::U16), true)
        .expect("nothing to convert");
    let source = |source| ReaderSource {
        connection: 0,
        source,
        layout,
        cut: Cut::Windows,
        stages: stages.clone(),
        whole_pages: false,
        weighs: None,
    };
    let sources = (0..weights.len() as u32).map(source).collect();
    let delivery = Delivery {
        window_tokens: window,
        batch_samples: 8,
        sample_dtype: Dtype::U16,
        dtype: Dtype::U16,
        rows: Rows::default(),
        first_batch: batches.0,
        batches: batches.1,
        shift: 0,
        share: Share::WHOLE,
        slot_bytes: 1 << 20,
    };
    ReaderSetup::new(order, sources, delivery)
}

/// Weights without a common divisor that add up to the most.
fn long_weights(datasets: u32) -> Vec<u32> {
    let even = MAX_TOTAL_WEIGHT as u32 / datasets;
    let mut weights: Vec<u32> = (0..datasets).map(|i| even - i % 2).collect();
    weights[0] += MAX_TOTAL_WEIGHT as u32 - weights.iter().sum::<u32>();
    weights
}

/// Steps that each dataset may cost: twice its share of blocks, and a few for its state.
fn per_dataset(group: u64) -> u64 {
    2 * (64 + 2) * group + 16
}

#[test]
fn beginning_anywhere_walks_the_blend_twice_at_most() {
    for (datasets, group) in [(30, 4), (1_000, 4), (1_000, 1)] {
        let weights = long_weights(datasets);
        for first in [0, 1, 124_999, 1_234_567, 98_765_432] {
            for batches in [None, Some(1), Some(1_000)] {
                let begin = || setup(64, group, &weights, 1 << 26, (first, batches));
                let (steps, _) = cost::of(begin);
                let most = 2 * MAX_TOTAL_WEIGHT + u64::from(datasets) * per_dataset(group.into());
                let case = format!("{datasets} datasets, batch {first}, {batches:?}");
                assert!(steps <= most, "{case}: {steps} steps, {most} allowed");
            }
        }
    }
}

#[test]
fn tiny_windows_do_not_make_beginning_dear() {
    for first in [0, 1, 100_000, 4_000_000, 7_864_319, 1 << 40] {
        for batches in [None, Some(1), Some(5_000_000)] {
            let (steps, _) = cost::of(|| setup(1, 120, &[1], 1 << 27, (first, batches)));
            let most = per_dataset(120);
            assert!(steps <= most, "batch {first}, {batches:?}: {steps} steps, {most} allowed");
        }
    }
}

/// Samples of each position between two samples of a dataset, one by one.
fn walk(shuffle: &BlockShuffle, samples: core::ops::Range<u64>, positions: usize) -> Vec<u32> {
    let mut needed = vec![0; positions];
    for k in samples {
        let place = shuffle.at(k);
        let slot = place.group * shuffle.group_blocks() + u64::from(place.slot);
        needed[(place.epoch * shuffle.blocks() + slot) as usize] += 1;
    }
    needed
}

/// Blocks of 5 samples are counted for every cut, blocks of 300 only near an end of their group;
/// otherwise more may seem needed than is, never less, and nothing where nothing is.
#[test]
fn coverage_is_what_a_walk_says() {
    for (seed, per_block, group) in [(1, 5, 3), (2, 5, 1), (3, 300, 2), (4, 300, 7), (5, 1, 4)] {
        let samples = u64::from(per_block) * 11 + u64::from(per_block) / 2;
        let shuffle = BlockShuffle::new(samples, per_block, group, seed, 0).expect("sound");
        let positions = 3 * shuffle.blocks() as usize;
        for cut in 0..400 {
            let start = cut * 7919 % (2 * samples);
            let end = (start + [0, 1, 9, 77, 1_000][cut as usize % 5]).min(3 * samples - 1);
            let coverage = Coverage::new(&shuffle, start, Some(end));
            let exact = walk(&shuffle, start..end, positions);
            for (position, exact) in (0..).zip(&exact).skip(coverage.first() as usize) {
                let size = shuffle.epoch(position / shuffle.blocks());
                let size = size.block_in(position % shuffle.blocks()).samples;
                let needed = match coverage.ends_before(position) {
                    true => 0,
                    false => coverage.samples(position, size),
                };
                let replay = format!("{per_block} a block, {start}..{end}, position {position}");
                let counted = needed == *exact;
                assert!(counted || (per_block == 300 && needed == size && *exact > 0), "{replay}");
            }
            let before = &exact[..coverage.first() as usize];
            assert!(before.iter().all(|samples| *samples == 0), "{start}..{end}");
        }
    }
}
