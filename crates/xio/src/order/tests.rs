//! Properties of the order, a definition-style reference for the blend, and frozen values.

use std::{collections::BTreeSet, vec, vec::Vec};

use super::mix::{key, mix, scale};
use super::*;

/// Random weights, from even to extreme; at most 12 datasets, total within `most`.
fn weights(seed: u64, most: u32) -> Vec<u32> {
    let draw = |i: u64| key(&[seed, i]);
    let datasets = 1 + draw(0) % 12;
    let of = |i: u64| match draw(i + 1) % 4 {
        0 => 0,
        1 => 1,
        2 => scale(draw(i + 100), 20) as u32,
        _ => scale(draw(i + 200), u64::from(most) / datasets) as u32,
    };
    let mut weights: Vec<u32> = (0..datasets).map(of).collect();
    weights[0] = weights[0].max(1);
    weights
}

/// Checks the bound of the blend after `n` samples, in exact arithmetic.
fn assert_ratio(blend: &Blend, counts: &[u64], n: u64, replay: &str) {
    let total = i128::from(blend.total());
    let drawn = blend.weights().iter().filter(|w| **w > 0).count() as i128;
    let slack = (2 * drawn - 2).max(1);
    for (count, weight) in counts.iter().zip(blend.weights()) {
        let off = (i128::from(*count) * total - i128::from(n) * i128::from(*weight)).abs();
        assert!(
            off * slack <= total * (slack - 1),
            "{replay}: {count} of {n} at weight {weight}/{total}"
        );
    }
}

#[test]
fn every_prefix_keeps_the_ratio() {
    for seed in 0..400 {
        let blend = Blend::new(&weights(seed, 3_000)).unwrap();
        let mut counts = vec![0; blend.weights().len()];
        let steps = 2 * u64::from(blend.total()) + 3;
        for (n, (dataset, k)) in blend.cursor_at(0).take(steps as usize).enumerate() {
            assert_eq!(k, counts[dataset], "replay: seed {seed}, n {n}");
            counts[dataset] += 1;
            assert_ratio(&blend, &counts, n as u64 + 1, &std::format!("replay: seed {seed}"));
        }
    }
}

#[test]
fn walking_on_is_seeking() {
    for seed in 0..100 {
        let blend = Blend::new(&weights(seed, 300)).unwrap();
        let total = u64::from(blend.total());
        let from = scale(key(&[seed, 1]), 3 * total);
        let cursor = blend.cursor_at(from);
        for to in [from, from + 1, from + total / 2, from + 2 * total, from / 2] {
            let (mut on, mut sought) = (cursor.forward_to(to), blend.cursor_at(to));
            assert_eq!(on.position(), to, "replay: seed {seed}");
            let few = |cursor: &mut BlendCursor| cursor.take(20).collect::<Vec<_>>();
            assert_eq!(few(&mut on), few(&mut sought), "replay: seed {seed}, {from} to {to}");
        }
    }
}

#[test]
fn extreme_weights_keep_the_ratio() {
    let mut many = vec![1; 1_023];
    many.push(1_000_000 - 1_023);
    let uneven: Vec<u32> = (0..MAX_DATASETS as u32).map(|i| 1 + i * i % 1_900).collect();
    let sets = [
        vec![999_999, 1],
        vec![1, 999_999],
        vec![499_999, 1, 500_000],
        vec![333_333, 333_333, 333_334],
        vec![7],
        vec![0, 5, 0],
        many,
        uneven,
    ];
    for set in sets {
        let blend = Blend::new(&set).unwrap();
        let mut counts = vec![0; set.len()];
        for (n, (dataset, _)) in blend.cursor_at(0).take(blend.total() as usize + 1).enumerate() {
            counts[dataset] += 1;
            // All datasets of a long blend at each step would take minutes.
            if set.len() <= 3 || n % 997 < 2 || n + 1 >= blend.total() as usize {
                assert_ratio(&blend, &counts, n as u64 + 1, "extreme");
            }
        }
    }
}

/// Tijdeman's rule from its definition: among the datasets whose next draw would not break the upper
/// bound, the one that would break the lower bound soonest; the first of several.
fn by_definition(weights: &[u32], steps: u64) -> Vec<usize> {
    let total: i128 = weights.iter().map(|w| i128::from(*w)).sum();
    let drawn = weights.iter().filter(|w| **w > 0).count() as i128;
    let slack = (2 * drawn - 2).max(1);
    let limit = total * (slack - 1);
    let mut counts = vec![0i128; weights.len()];
    let mut picks = Vec::new();
    for n in 1..=i128::from(steps) {
        let over =
            |d: usize| ((counts[d] + 1) * total - n * i128::from(weights[d])) * slack > limit;
        let last_step = |d: usize| {
            let behind = |n: i128| (n * i128::from(weights[d]) - counts[d] * total) * slack;
            (n..).find(|n| behind(*n) > limit).unwrap()
        };
        let open = (0..weights.len()).filter(|d| weights[*d] > 0 && (drawn == 1 || !over(*d)));
        let pick = open.min_by_key(|d| if drawn == 1 { n } else { last_step(*d) }).unwrap();
        counts[pick] += 1;
        picks.push(pick);
    }
    picks
}

#[test]
fn the_blend_agrees_with_its_definition() {
    for seed in 0..300 {
        let set = weights(seed, 200);
        let blend = Blend::new(&set).unwrap();
        let steps = 3 * u64::from(blend.total());
        let picks: Vec<usize> = blend.cursor_at(0).take(steps as usize).map(|(d, _)| d).collect();
        assert_eq!(picks, by_definition(&set, steps), "replay: seed {seed}, weights {set:?}");
    }
}

#[test]
fn seeking_equals_walking() {
    for seed in 0..60 {
        let blend = Blend::new(&weights(seed, 400)).unwrap();
        let walked: Vec<_> = blend.cursor_at(0).take(1_500).collect();
        for (n, expected) in walked.iter().enumerate() {
            assert_eq!(blend.pick(n as u64), *expected, "replay: seed {seed}, n {n}");
        }
        let far = 1 << 40;
        let mut cursor = blend.cursor_at(far);
        for n in far..far + 50 {
            assert_eq!(cursor.position(), n);
            let (dataset, before) = blend.pick(n);
            assert_eq!(cursor.drawn(dataset), before, "replay: seed {seed}, n {n}");
            assert_eq!(cursor.step(), (dataset, before), "replay: seed {seed}, n {n}");
        }
    }
    let blend = Blend::new(&[3, 2]).unwrap();
    assert_eq!(blend.cursor_at(u64::MAX).take(3).count(), 3, "the end of the numbers is no crash");
}

#[test]
fn weights_that_cannot_be_kept_are_refused() {
    assert_eq!(Blend::new(&[]), Err(OrderError::NoDataset));
    assert_eq!(Blend::new(&[0, 0]), Err(OrderError::AllZero { datasets: 2 }));
    assert_eq!(Blend::new(&[1; 1_025]), Err(OrderError::TooManyDatasets { datasets: 1_025 }));
    assert_eq!(Blend::new(&[1_000_000, 1]), Err(OrderError::TotalTooLarge { total: 1_000_001 }));
    assert_eq!(Blend::new(&[u32::MAX, u32::MAX]).unwrap().weights(), [1, 1]);
}

/// Small shapes, with and without a short last block, with groups that divide the blocks and not.
fn shapes() -> impl Iterator<Item = (u64, u32, u32)> {
    (1..90u64).flat_map(|samples| {
        [1u32, 2, 5, 16, 100]
            .into_iter()
            .flat_map(move |per_block| [1u32, 2, 3, 8].map(|group| (samples, per_block, group)))
    })
}

#[test]
fn an_epoch_delivers_every_sample_once() {
    for (samples, per_block, group) in shapes() {
        let shuffle = BlockShuffle::new(samples, per_block, group, 11, 2).unwrap();
        for epoch in 0..2 {
            let seen: BTreeSet<u64> = (epoch * samples..(epoch + 1) * samples)
                .map(|k| shuffle.at(k))
                .inspect(|place| assert_eq!(place.epoch, epoch))
                .map(|place| place.block * u64::from(per_block) + u64::from(place.sample))
                .collect();
            let all = (0..samples).collect();
            assert_eq!(
                seen, all,
                "replay: {samples} samples, {per_block} a block, {group} a group"
            );
        }
    }
}

#[test]
fn groups_tile_the_epoch_and_name_their_blocks() {
    for (samples, per_block, group_blocks) in shapes() {
        let shuffle = BlockShuffle::new(samples, per_block, group_blocks, 5, 0).unwrap();
        let epoch = shuffle.epoch(3);
        let (mut next, mut blocks) = (0, Vec::new());
        for number in 0..shuffle.groups() {
            let group = epoch.group(number);
            assert_eq!(group.indices().start, next);
            next = group.indices().end;
            let fetched: Vec<Block> = group.blocks().collect();
            let in_group: u64 = fetched.iter().map(|b| u64::from(b.samples)).sum();
            assert_eq!(in_group, group.indices().end - group.indices().start);
            assert!(!fetched.is_empty() && fetched.len() <= group_blocks as usize);
            for index in group.indices() {
                assert_eq!(epoch.group_of(index), number);
                let place = group.at(index);
                let block = fetched[place.slot as usize];
                assert_eq!((place.block, place.group), (block.block, number));
                assert!(place.sample < block.samples);
                assert_eq!(place, shuffle.at(3 * samples + index));
            }
            blocks.extend(fetched.iter().map(|b| b.block));
        }
        assert_eq!(next, samples);
        assert!(epoch.group(shuffle.groups()).indices().is_empty());
        blocks.sort_unstable();
        assert!(blocks.into_iter().eq(0..shuffle.blocks()));
    }
}

#[test]
fn without_a_shuffle_samples_come_in_file_order() {
    for (samples, per_block, _) in shapes() {
        let order = BlockShuffle::sequential(samples, per_block).unwrap();
        for k in 0..2 * samples {
            let place = order.at(k);
            let file_sample = place.block * u64::from(per_block) + u64::from(place.sample);
            assert_eq!((place.epoch, file_sample), (k / samples, k % samples));
            assert_eq!((place.group, place.slot), (place.block, 0));
        }
    }
}

#[test]
fn seeds_datasets_and_epochs_give_different_orders() {
    let order = |seed, dataset, epoch| -> Vec<u64> {
        let shuffle = BlockShuffle::new(1_000, 10, 4, seed, dataset).unwrap();
        let places = (0..1_000).map(|i| shuffle.at(epoch * 1_000 + i));
        places.map(|place| place.block * 10 + u64::from(place.sample)).collect()
    };
    let orders: BTreeSet<Vec<u64>> = (0..27).map(|i| order(i / 9, i / 3 % 3, i % 3)).collect();
    assert_eq!(orders.len(), 27);
    assert_eq!(order(1, 2, 3), order(1, 2, 3));
}

#[test]
fn quality_tells_good_from_bad() {
    let sequential = BlockShuffle::sequential(100_000, 128).unwrap().quality(0, 5_000);
    assert_eq!(sequential, Quality { mean_displacement: 0.0, adjacency: 1.0 });
    let shuffled = BlockShuffle::new(100_000, 128, 8, 1, 0).unwrap().quality(0, 5_000);
    assert!((0.28..0.39).contains(&shuffled.mean_displacement), "{shuffled:?}");
    assert!(shuffled.adjacency < 0.01, "{shuffled:?}");
    let single = BlockShuffle::new(1, 1, 1, 1, 0).unwrap().quality(0, 10);
    assert_eq!((single.mean_displacement, single.adjacency), (0.0, 0.0));
}

#[test]
fn shuffles_that_make_no_sense_are_refused() {
    assert_eq!(BlockShuffle::sequential(0, 4), Err(OrderError::Empty { samples: 0, per_block: 4 }));
    assert_eq!(BlockShuffle::sequential(4, 0), Err(OrderError::Empty { samples: 4, per_block: 0 }));
    for blocks in [0, MAX_GROUP_BLOCKS + 1] {
        let refused = BlockShuffle::new(4, 4, blocks, 0, 0);
        assert_eq!(refused, Err(OrderError::GroupBlocks { blocks }));
    }
}

fn order() -> Order {
    let shuffles = [(1_000, 16, 4), (77, 16, 8), (3, 16, 1)].into_iter().enumerate();
    let shuffles = shuffles.map(|(i, (n, s, g))| BlockShuffle::new(n, s, g, 42, i as u64).unwrap());
    Order::new(Blend::new(&[5, 3, 2]).unwrap(), shuffles.collect()).unwrap()
}

#[test]
fn a_cursor_agrees_with_single_lookups_from_anywhere() {
    let order = order();
    for start in [0, 1, 999, 5_000, 1 << 33] {
        let mut cursor = order.cursor_at(start);
        for n in start..start + 2_500 {
            assert_eq!(cursor.position(), n);
            assert_eq!(cursor.next(), Some(order.at(n)), "sample {n}");
        }
    }
}

#[test]
fn layouts_cut_files_into_blocks() {
    let file = |tokens: u64| crate::dataset::flat(Dtype::U32, tokens * 4).unwrap();
    let layout = SampleLayout::new(file(1_000_000), 2_048, 0).unwrap();
    assert_eq!((layout.samples, layout.samples_per_block, layout.tail_tokens()), (488, 128, 576));
    assert_eq!((layout.blocks(), layout.sample_bytes()), (4, 8_192));
    assert_eq!(layout.block_range(0), Some((0, BLOCK_BYTES)));
    assert_eq!(layout.block_range(3), Some((3 << 20, 104 * 8_192)));
    assert_eq!(layout.block_range(4), None);
    assert_eq!(layout.block_range(u64::MAX), None);
    let refused = SampleLayout::new(file(2_047), 2_048, 0);
    assert_eq!(refused, Err(OrderError::NoSample { tokens: 2_047, window: 2_048 }));
    for window in [0, 262_145, u32::MAX] {
        let refused = SampleLayout::new(file(1_000_000), window, 0);
        assert_eq!(refused, Err(OrderError::Window { window, dtype: Dtype::U32 }));
    }
}

/// A change of these values reorders every run that resumes across the change.
#[test]
fn the_order_is_frozen() {
    assert_eq!(
        [mix(0), mix(1), mix(u64::MAX)],
        [16294208416658607535, 10451216379200822465, 16490336266968443936]
    );
    assert_eq!(
        [key(&[]), key(&[0]), key(&[1, 2, 3])],
        [0, 16294208416658607535, 15020427595393229491]
    );
    let picks: Vec<usize> =
        Blend::new(&[5, 3, 2]).unwrap().cursor_at(0).take(10).map(|(d, _)| d).collect();
    assert_eq!(picks, [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]);
    let digest = order().cursor_at(0).take(20_000).fold(0, |digest, sample| {
        let place = sample.place;
        let inner = [place.epoch, place.group, place.slot.into(), place.block, place.sample.into()];
        key(&[digest, sample.dataset as u64, key(&inner)])
    });
    assert_eq!(digest, 7005724638125883021);
}
