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
    let uneven: Vec<u32> = (0..MAX_DATASETS as u32).map(|i| 1 + i * i % 450).collect();
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

/// Tijdeman's rule from its definition: among the datasets whose next draw would not break the
/// upper bound, the one that would break the lower bound soonest; the first of several.
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
    let many = vec![1; 4_097];
    assert_eq!(Blend::new(&many), Err(OrderError::TooManyDatasets { datasets: 4_097 }));
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
    let close = |a: f64, b: f64, off: f64| (a - b).abs() <= off;
    let perfect = Quality::perfect(100_000, 128);
    let sequential = BlockShuffle::sequential(100_000, 128).unwrap().quality(0, 500, 128);
    assert_eq!((sequential.mean_displacement, sequential.adjacency), (0.0, 1.0));
    assert!(sequential.same_mib > 0.8 && sequential.autocorrelation > 0.99, "{sequential:?}");
    // 8 blocks of 1 MiB, and 64 of an eighth of it: a pair shares a block with one in as many.
    for (per_block, group) in [(128, 8), (16, 64)] {
        let shuffle = BlockShuffle::new(100_000, per_block, group, 1, 0).unwrap();
        let shuffled = shuffle.quality(0, 2_000, 128);
        assert!(close(shuffled.mean_displacement, 1.0 / 3.0, 0.06), "{shuffled:?}");
        assert!(shuffled.adjacency < 0.01, "{shuffled:?}");
        let one_in = 1.0 / f64::from(group);
        assert!(close(shuffled.same_mib, one_in + perfect.same_mib, 0.1 * one_in), "{shuffled:?}");
        assert!(close(shuffled.autocorrelation, one_in, 0.5 * one_in), "{shuffled:?}");
    }
    // One group over everything is a shuffle without a structure.
    let all = BlockShuffle::new(100_000, 128, 1_024, 1, 0).unwrap().quality(0, 3_000, 128);
    assert!(close(all.mean_displacement, perfect.mean_displacement, 0.01), "{all:?}");
    assert!(close(all.same_mib, perfect.same_mib, 0.0003), "{all:?} {perfect:?}");
    assert!(close(all.autocorrelation, perfect.autocorrelation, 0.02), "{all:?}");
    let single = BlockShuffle::new(1, 1, 1, 1, 0).unwrap().quality(0, 10, 128);
    let nothing =
        Quality { mean_displacement: 0.0, adjacency: 0.0, same_mib: 0.0, autocorrelation: 0.0 };
    assert_eq!(single, nothing);
}

/// Whatever the blend, two samples of a batch share a block at most as often as 256 KiB are of 16
/// MiB, and the groups of all datasets take no more memory than two of 16 MiB and two blocks for
/// each dataset.
#[test]
fn default_groups_share_the_memory_of_one() {
    for seed in 0..300 {
        let weights = weights(seed, 100_000);
        let total: u32 = weights.iter().sum();
        let part = |weight: u32| f64::from(weight) / f64::from(total);
        let few = |weight| Proportion { weight, total, of_many: false };
        let blocks = |weight| f64::from(few(weight).group_blocks(DEFAULT_BLOCK_BYTES, 8_192));
        let shared: f64 = weights.iter().map(|w| part(*w).powi(2) / blocks(*w)).sum();
        assert!(shared <= 1.0 / 64.0 + 1e-9, "seed {seed}: {shared}");
        let sum: f64 = weights.iter().map(|w| blocks(*w)).sum();
        assert!(sum <= 64.0 + 2.0 * weights.len() as f64, "seed {seed}: {sum}");
    }
    let blocks = |weight, total, sample_bytes| {
        let share = Proportion { weight, total, of_many: false };
        share.group_blocks(share.block_bytes(), sample_bytes)
    };
    assert_eq!(blocks(1, 1, 8_192), 64);
    assert_eq!(blocks(1, 1, BLOCK_BYTES), 16);
    assert_eq!(blocks(1, 1_000_000, 2), 2);
    assert_eq!(blocks(999_999, 1_000_000, 2), 64);
}

/// The same bound on pairs holds for many datasets, whose blocks and groups take 64 MiB and 4 KiB
/// for each.
#[test]
fn groups_of_many_datasets_share_less_memory() {
    for seed in 0..50 {
        let draw = |i: u64, most| 1 + scale(key(&[seed, i]), most) as u32;
        let datasets = u64::from(FEW_DATASETS) + u64::from(draw(0, 3_900));
        let mut weights: Vec<u32> = (1..=datasets).map(|i| draw(i, 200)).collect();
        weights[0] = draw(0, 400_000);
        let total = weights.iter().sum();
        let (mut shared, mut sum) = (0.0, 0);
        for weight in weights {
            let share = Proportion { weight, total, of_many: true };
            let (bytes, part) = (share.block_bytes(), f64::from(weight) / f64::from(total));
            let blocks = share.group_blocks(bytes, 2);
            assert!((4 << 10..=DEFAULT_BLOCK_BYTES).contains(&bytes) && (1..=64).contains(&blocks));
            shared += part.powi(2) / f64::from(blocks);
            sum += u64::from(bytes) * u64::from(blocks);
        }
        assert!(shared <= 1.0 / 64.0 + 1e-9, "seed {seed}: {shared}");
        assert!(sum <= (64 << 20) + datasets * (4 << 10), "seed {seed}: {sum}");
    }
}

#[test]
fn groups_larger_than_an_epoch_are_the_epoch() {
    for (samples, per_block) in [(1, 1), (100, 9), (77, 100)] {
        let whole = BlockShuffle::new(samples, per_block, MAX_GROUP_BLOCKS, 3, 1).unwrap();
        let fits = BlockShuffle::new(samples, per_block, whole.blocks() as u32, 3, 1).unwrap();
        assert_eq!((whole, whole.groups()), (fits, 1));
    }
}

#[test]
fn phases_follow_one_another() {
    for seed in 0..100 {
        let blends: Vec<Blend> = (0..4)
            .map(|phase| {
                let mut weights = weights(seed, 400);
                let turn = phase % weights.len();
                weights.rotate_left(turn);
                Blend::new(&weights).unwrap()
            })
            .collect();
        let datasets = blends[0].weights().len();
        let starts: Vec<u64> =
            (0..4).map(|i| i * 300 + scale(key(&[seed, i]), 299) * i.min(1)).collect();
        let curriculum = Curriculum::new(starts.iter().copied().zip(blends.clone())).unwrap();
        // Each phase by itself, its draws counted on from those before it.
        let mut drawn = vec![0; datasets];
        let mut walked = Vec::new();
        for (phase, blend) in blends.iter().enumerate() {
            let end = starts.get(phase + 1).map_or(starts[phase] + 700, |next| *next);
            for (dataset, _) in blend.cursor_at(0).take((end - starts[phase]) as usize) {
                walked.push((dataset, drawn[dataset]));
                drawn[dataset] += 1;
            }
        }
        let all: Vec<_> = curriculum.cursor_at(0).take(walked.len()).collect();
        assert_eq!(all, walked, "replay: seed {seed}");
        for at in (0..walked.len()).step_by(37).chain(starts.iter().map(|start| *start as usize)) {
            let cursor = curriculum.cursor_at(at as u64);
            assert_eq!(cursor.position(), at as u64);
            let counts = (0..datasets).map(|d| walked[..at].iter().filter(|w| w.0 == d).count());
            for (dataset, count) in counts.enumerate() {
                assert_eq!(cursor.drawn(dataset), count as u64, "replay: seed {seed}, at {at}");
            }
            for to in [at, at + 1, (at + 299).min(walked.len() - 1), at / 2] {
                let step = cursor.forward_to(to as u64).step();
                assert_eq!(step, walked[to], "replay: seed {seed}, {at} to {to}");
            }
        }
    }
}

#[test]
fn phases_that_cannot_follow_are_refused() {
    let even = || Blend::new(&[1, 1]).unwrap();
    let refused = |phases: Vec<(u64, Blend)>| Curriculum::new(phases).unwrap_err();
    assert_eq!(refused(vec![]), OrderError::Phase { phase: 0, start: 0 });
    assert_eq!(refused(vec![(1, even())]), OrderError::Phase { phase: 0, start: 1 });
    let twice = vec![(0, even()), (5, even()), (5, even())];
    assert_eq!(refused(twice), OrderError::Phase { phase: 2, start: 5 });
    let other = vec![(0, even()), (5, Blend::new(&[1]).unwrap())];
    assert_eq!(refused(other), OrderError::Count { weights: 1, datasets: 2 });
    let long = || Blend::new(&[500_001, 1]).unwrap();
    let total = 2 * 500_002;
    assert_eq!(refused(vec![(0, long()), (5, long())]), OrderError::TotalTooLarge { total });
    let many = (0..=MAX_PHASES as u64).map(|start| (start, even())).collect();
    assert_eq!(refused(many), OrderError::Phase { phase: MAX_PHASES, start: MAX_PHASES as u64 });
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
    // Smaller blocks hold what fits, and at least one sample.
    let of_blocks = |bytes| layout.in_blocks(bytes).samples_per_block;
    assert_eq!([of_blocks(128 << 10), of_blocks(9_000), of_blocks(4 << 10)], [16, 1, 1]);
    let overlapping = SampleLayout::new(file(1_000_000), 2_048, 2_000).unwrap();
    assert_eq!(overlapping.in_blocks(16 << 10).samples_per_block, (4_096 - 2_000) / 48);
    assert_eq!(overlapping.in_blocks(4 << 10).samples_per_block, 1);
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
