//! Datasets with tokens in them, an order over them, and the batches that must come out.
//!
//! Blocks are a few samples small, so that a short run crosses groups, short blocks and epochs. The
//! expected bytes are computed one sample and one token at a time from [`Order::at`].

use std::collections::BTreeSet;
use std::rc::Rc;

use xio::dataset::{Dtype, Format, TokenFile};
use xio::kernel::{can_narrow, crc32c};
use xio::order::{Blend, BlockShuffle, Order, SampleLayout};
use xio::plan::Plan;
use xio::reference::TokenReader;
use xio::stage::{BlockPlan, BlockStages};
use xio::sums::{FileSums, SUM_BYTES};

use super::disk::SimFile;
use sim::chance::Chance;

/// Types that token files come in.
const TYPES: [Dtype; 5] = [Dtype::U16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64];

/// Possible offsets of the first token: flat files, NumPy headers, and unusual ones.
const OFFSETS: [u64; 8] = [0, 64, 80, 128, 1, 4_095, 4_096, 8_191];

/// A file of tokens.
#[derive(Clone, Debug)]
pub(crate) struct Dataset {
    pub(crate) layout: SampleLayout,
    pub(crate) bytes: Rc<[u8]>,
}

/// The files of a stream, and what it delivers.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    pub(crate) datasets: Vec<Dataset>,
    pub(crate) order: Order,
    pub(crate) window: u32,
    pub(crate) batch_samples: u32,
    pub(crate) deliver: Dtype,
    /// What is asked for its blocks.
    pub(crate) asked: BlockPlan,
}

/// Sizes of a dataset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) dtype: Dtype,
    pub(crate) data_offset: u64,
    pub(crate) samples: u64,
    /// Tokens after the last window.
    pub(crate) tail_tokens: u64,
    pub(crate) per_block: u32,
}

/// How samples are drawn.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) window: u32,
    pub(crate) batch_samples: u32,
    pub(crate) deliver: Dtype,
    pub(crate) weights: Vec<u32>,
    /// Blocks of a group; file order without.
    pub(crate) group: Option<u32>,
    pub(crate) seed: u64,
}

impl Dataset {
    /// What a manifest says of its bytes.
    pub(crate) fn sums(&self, id: u64) -> FileSums {
        let blocks = self.bytes.chunks(SUM_BYTES as usize).map(|block| crc32c(0, block)).collect();
        FileSums::new(id, self.bytes.len() as u64, blocks).unwrap()
    }

    /// Tokens that the type to deliver can hold.
    fn new(shape: &Shape, recipe: &Recipe, draw: &mut Chance) -> Dataset {
        let tokens = shape.samples * u64::from(recipe.window) + shape.tail_tokens;
        let width = shape.dtype.bytes() as usize;
        let largest = recipe.deliver.range().1.min(shape.dtype.range().1);
        let mut bytes: Vec<u8> = (0..shape.data_offset).map(|_| draw.word() as u8).collect();
        for _ in 0..tokens {
            let value = draw.word() & largest as u64;
            bytes.extend_from_slice(&value.to_le_bytes()[..width]);
        }
        let file = TokenFile {
            dtype: shape.dtype,
            data_offset: shape.data_offset,
            tokens,
            format: Format::Flat,
        };
        let layout = SampleLayout {
            samples: shape.samples,
            samples_per_block: shape.per_block,
            ..SampleLayout::without_samples(file, recipe.window, 0)
        };
        Dataset { layout, bytes: bytes.into() }
    }

    /// Offset of a token in the file.
    pub(crate) fn byte_of(&self, token: u64) -> u64 {
        let file = &self.layout.file;
        file.data_offset + token * u64::from(file.dtype.bytes())
    }

    /// Puts another value in the place of a token.
    pub(crate) fn set_token(&mut self, token: u64, value: i128) {
        let (at, width) = (self.byte_of(token) as usize, self.layout.file.dtype.bytes());
        let mut bytes = self.bytes.to_vec();
        bytes[at..at + width as usize].copy_from_slice(&value.to_le_bytes()[..width as usize]);
        self.bytes = bytes.into();
    }
}

impl Corpus {
    /// The corpus of a plan over datasets, in blocks of the product's size.
    pub(crate) fn of_plan(plan: &Plan, shapes: &[Shape], draw: &mut Chance) -> Corpus {
        let sources: Vec<Dtype> = shapes.iter().map(|shape| shape.dtype).collect();
        let pipeline = plan.compile(&sources, true).expect("the plan fits");
        let recipe = Recipe {
            window: pipeline.window_tokens(),
            batch_samples: pipeline.batch_samples(),
            deliver: pipeline.dtype(),
            weights: Vec::new(),
            group: None,
            seed: 0,
        };
        let mut datasets = Vec::new();
        for (index, shape) in shapes.iter().enumerate() {
            let mut dataset = Dataset::new(shape, &recipe, draw);
            let layout = pipeline.layout(index, dataset.layout.file);
            dataset.layout = layout.expect("the plan fits");
            datasets.push(dataset);
        }
        let layouts: Vec<SampleLayout> = datasets.iter().map(|dataset| dataset.layout).collect();
        Corpus {
            datasets,
            order: pipeline.order(&layouts).expect("the plan fits"),
            window: plan.window(),
            batch_samples: plan.batch(),
            deliver: recipe.deliver,
            asked: BlockPlan::plain(recipe.deliver),
        }
    }

    pub(crate) fn new(shapes: &[Shape], recipe: &Recipe, draw: &mut Chance) -> Corpus {
        let datasets: Vec<Dataset> =
            shapes.iter().map(|shape| Dataset::new(shape, recipe, draw)).collect();
        let shuffle = |(index, shape): (usize, &Shape)| {
            let (samples, per_block) = (shape.samples, shape.per_block);
            let shuffle = match recipe.group {
                Some(group) => {
                    BlockShuffle::new(samples, per_block, group, recipe.seed, index as u64)
                }
                None => BlockShuffle::sequential(samples, per_block),
            };
            shuffle.expect("shapes are sound")
        };
        let shuffles = shapes.iter().enumerate().map(shuffle).collect();
        let blend = Blend::new(&recipe.weights).expect("weights are sound");
        Corpus {
            datasets,
            order: Order::new(blend, shuffles).expect("one shuffle a dataset"),
            window: recipe.window,
            batch_samples: recipe.batch_samples,
            deliver: recipe.deliver,
            asked: BlockPlan::plain(recipe.deliver),
        }
    }

    /// One file of `u32` in blocks of four samples, shuffled, to be narrowed.
    pub(crate) fn one_file(draw: &mut Chance) -> Corpus {
        let shape = Shape {
            dtype: Dtype::U32,
            data_offset: 128,
            samples: 403,
            tail_tokens: 3,
            per_block: 4,
        };
        let recipe = Recipe {
            window: 16,
            batch_samples: 4,
            deliver: Dtype::U16,
            weights: vec![1],
            group: Some(3),
            seed: 5,
        };
        Corpus::new(&[shape], &recipe, draw)
    }

    /// One file larger than a staging buffer.
    pub(crate) fn large_file(draw: &mut Chance) -> Corpus {
        let shape = Shape {
            dtype: Dtype::U32,
            data_offset: 0,
            samples: 20_000,
            tail_tokens: 0,
            per_block: 4,
        };
        let recipe = Recipe {
            window: 16,
            batch_samples: 4,
            deliver: Dtype::U16,
            weights: vec![1],
            group: None,
            seed: 5,
        };
        Corpus::new(&[shape], &recipe, draw)
    }

    /// Any datasets and any order over them.
    pub(crate) fn draw(draw: &mut Chance) -> Corpus {
        let mut weights: Vec<u32> = (0..draw.between(1, 4)).map(|_| draw.below(6) as u32).collect();
        weights[0] = weights[0].max(1);
        Corpus::draw_with_weights(draw, &weights)
    }

    pub(crate) fn draw_with_weights(draw: &mut Chance, weights: &[u32]) -> Corpus {
        let deliver = draw.pick(&[Dtype::U16, Dtype::U16, Dtype::U32, Dtype::I64]);
        let group = draw.per_mille(800).then(|| draw.between(1, 8) as u32);
        let fits = |from: &Dtype| *from == deliver || can_narrow(*from, deliver);
        let sources: Vec<Dtype> = TYPES.into_iter().filter(fits).collect();
        let window = draw.between(1, 39) as u32;
        let shape = |draw: &mut Chance| Shape {
            dtype: draw.pick(&sources),
            data_offset: draw.pick(&OFFSETS),
            samples: match draw.per_mille(250) {
                true => draw.between(1, 4),
                false => draw.between(1, 89),
            },
            tail_tokens: draw.below(window.into()),
            per_block: draw.between(1, 12) as u32,
        };
        let shapes: Vec<Shape> = weights.iter().map(|_| shape(draw)).collect();
        let recipe = Recipe {
            window,
            batch_samples: draw.between(1, 6) as u32,
            deliver,
            weights: weights.to_vec(),
            group,
            seed: draw.word(),
        };
        Corpus::new(&shapes, &recipe, draw)
    }

    /// The stages of a dataset's blocks.
    pub(crate) fn stages(&self, dataset: usize, narrow_at_target: bool) -> BlockStages {
        let stored = self.datasets[dataset].layout.file.dtype;
        BlockStages::compile(stored, &self.asked, narrow_at_target).expect("the corpus fits")
    }

    pub(crate) fn files(&self) -> Vec<SimFile> {
        let file =
            |dataset: &Dataset| SimFile { bytes: Rc::clone(&dataset.bytes), ..SimFile::default() };
        self.datasets.iter().map(file).collect()
    }

    /// The files for [`Reference`](xio::reference::Reference).
    pub(crate) fn token_readers(&self) -> Vec<(TokenFile, impl TokenReader + use<>)> {
        let reader = |dataset: &Dataset| {
            let own = dataset.clone();
            let token = move |index: u64| {
                let width = own.layout.file.dtype.bytes() as usize;
                let mut wide = [0; 16];
                wide[..width].copy_from_slice(&own.bytes[own.byte_of(index) as usize..][..width]);
                // No token of a corpus is negative.
                Some(i128::from_le_bytes(wide))
            };
            (dataset.layout.file, token)
        };
        self.datasets.iter().map(reader).collect()
    }

    pub(crate) fn batch_bytes(&self) -> u32 {
        self.batch_samples * self.window * self.deliver.bytes()
    }

    /// The dataset and the first token of global sample `n`.
    pub(crate) fn sample(&self, n: u64) -> (usize, u64) {
        let sample = self.order.at(n);
        let layout = &self.datasets[sample.dataset].layout;
        let in_block = u64::from(sample.place.sample);
        let sample_in_file = sample.place.block * u64::from(layout.samples_per_block) + in_block;
        (sample.dataset, sample_in_file * u64::from(self.window))
    }

    /// The blocks that a run of batches is taken from: how many, and the bytes of each dataset's
    /// tokens in them.
    pub(crate) fn blocks(&self, first_batch: u64, batches: u64) -> (u64, u64) {
        let per_batch = u64::from(self.batch_samples);
        let mut blocks = BTreeSet::new();
        for n in first_batch * per_batch..(first_batch + batches) * per_batch {
            let sample = self.order.at(n);
            let place = sample.place;
            blocks.insert((sample.dataset, place.epoch, place.block));
        }
        let bytes = |(dataset, _, block): &(usize, u64, u64)| {
            let range = self.datasets[*dataset].layout.block_range(*block);
            u64::from(range.expect("a block of the file").1)
        };
        (blocks.len() as u64, blocks.iter().map(bytes).sum())
    }

    /// The bytes of a run of batches.
    pub(crate) fn expected(&self, first_batch: u64, batches: u64) -> Vec<u8> {
        let per_batch = u64::from(self.batch_samples);
        let mut out = Vec::new();
        for n in first_batch * per_batch..(first_batch + batches) * per_batch {
            let (dataset, first) = self.sample(n);
            let dataset = &self.datasets[dataset];
            for token in first..first + u64::from(self.window) {
                // Values fit by construction and are not negative: the low bytes are the value.
                let at = dataset.byte_of(token) as usize;
                out.extend_from_slice(&dataset.bytes[at..][..self.deliver.bytes() as usize]);
            }
        }
        out
    }
}
