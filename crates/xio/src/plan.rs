//! The plan language: what happens to the data between the file and the trainer. [`Plan::compile`]
//! turns a plan into [stages](crate::stage).
//!
//! ```text
//! window(2048) | shuffle(seed) | blend(web=0.5, code=0.3, "my books"=0.2) | narrow(u16) | batch(32)
//! window(2049, overlap=1) | narrow(u16) | widen(i64) | pairs
//! window(2048) | shuffle(7, blocks=64, block=256KiB) | blend(web=0.9:0.5, code=0.1:0.5) | phases(1_000_000)
//! ```
//!
//! | action | meaning | default |
//! |---|---|---|
//! | `window(N, overlap=K)` | samples are N tokens long; each begins with the last K of the one before it | required; K is 0 |
//! | `pack(FIT, pad=ID)` | samples hold whole documents, or parts of one that is longer; `best`, `first` or `single` | windows cut through documents |
//! | `shuffle(SEED)` | permute blocks over the file, and samples inside groups of blocks | file order |
//! | `shuffle(SEED, blocks=B, block=SIZE)` | the same in groups of B blocks of SIZE, 1 MiB where none is given | |
//! | `order(megatron, seed=SEED, samples=N, split="A,B,C")` | the order of Megatron-core | the own order |
//! | `blend(NAME=WEIGHT, …)` | draw from datasets in this ratio | the one dataset |
//! | `phases(N, …)` | global samples at which the blend goes on with the next of `WEIGHT:WEIGHT:…` | one phase |
//! | `tokenizers(any)` | blend datasets whose ids are of different tokenizers | refuse them |
//! | `filter("LIST")`, `filter(keep="LIST")` | drop the documents whose hash is in a list, or keep only those | keep all |
//! | `dedup`, `dedup(across)` | of documents with one hash keep the first of each dataset, or of all | keep all |
//! | `split("99,1", part=valid)` | deliver one part of each dataset, of those for training, validation and test | all of it |
//! | `remap("TABLE")` | replace every token by the entry of a table at its place | not |
//! | `wasm("MODULE", sha256=HEX)` | map every token by a WebAssembly module of the user | not |
//! | `narrow(u16)`, `narrow(u32)` | deliver tokens in this type; refuse those that do not fit | type of the file |
//! | `narrow(u16, overflow=saturate(ID))` | as above, but those that do not fit become `ID` | refuse |
//! | `narrow(u16, overflow=escape)` | tokens cross the wire in 16 bits, in blocks where all of them fit | refuse |
//! | `bitpack(N)` | tokens cross the wire in N bits; refuse those that do not fit | not |
//! | `compress(zstd, level=1)`, `compress(lz4)` | blocks cross the wire compressed | not |
//! | `quantize(int8)`, `quantize(e4m3)`, `quantize(e5m2)` | floating-point values cross the wire in 8 bits and a scale for each 32 | not |
//! | `widen(i64)`, `widen(i32)`, `widen(u32)` | deliver tokens in this larger type, after the wire | not |
//! | `pairs` | deliver each sample twice, without its last and without its first token | once |
//! | `pairs(ignore=ID)` | as above, and labels beyond the document of their input become `ID` | all labels |
//! | `pairs(ignore=ID, labels=targets)` | as above, and so do labels that are no targets of their dataset | refuse datasets with targets |
//! | `pairs(labels=all)` | deliver all labels of datasets with targets | refuse them |
//! | `positions` | add to each sample the position of each token in its document, and the document's number | not |
//! | `loss_weights` | add to each sample the weight of each token in the loss; refuse datasets that have none | not |
//! | `loss_weights(missing=N)` | as above, and tokens of datasets that have none weigh N | refuse them |
//! | `batch(N)` | samples of a batch | 32 |
//!
//! The order of the actions does not matter: each describes the result. A [`Plan`] holds only legal
//! values; it is created by [`Plan::parse`], which reports the position of a mistake, and prints in
//! one canonical form that parses back to an equal plan.
//!
//! Names in `blend` need quotes only around characters other than letters, digits and `_-./:@+~%`;
//! inside quotes `\"` and `\\` stand for `"` and `\`. Weights are any numbers, kept as integers
//! without a common divisor whose sum is at most a million. In place of a number the word `seed`
//! means the seed given with the plan.

mod error;
mod lexer;
mod megatron;
mod parse;
mod weights;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use crate::dataset::{Dtype, TokenFile};
use crate::documents::{Dedup, Documents, Filter, Selection};
use crate::kernel::Compression;
use crate::order::{
    BLOCK_BYTES, Blend, BlockShuffle, Curriculum, Cut, FEW_DATASETS, Fit, Order, OrderError,
    PackingError, Proportion, SampleLayout, Split,
};

pub use crate::kernel::Quant;
pub use error::{PlanError, Problem};
pub use megatron::{Decimal, Megatron};

/// Longest window in tokens: a sample of bytes then just fits a block of 1 MiB.
pub const MAX_WINDOW: u32 = 1 << 20;

/// Most samples of a batch.
pub const MAX_BATCH: u32 = 65_536;

/// Most tokens of a batch: 1 GiB of `u32`.
pub const MAX_BATCH_TOKENS: u64 = 1 << 28;

/// Samples of a batch, unless the plan says otherwise.
pub const DEFAULT_BATCH: u32 = 32;

/// Least bytes of a block that a plan may choose.
pub const MIN_BLOCK_BYTES: u32 = 4 << 10;

/// Last global sample at which a phase may begin.
pub const MAX_PHASE_START: u64 = 1 << 53;

/// Longest plan in bytes: enough for a full blend with long names.
pub const MAX_PLAN_BYTES: usize = 1 << 20;

/// A plan for the data. Legal values only; see the [module](self) for their meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    window: u32,
    overlap: u32,
    pack: Option<Pack>,
    shuffle: Option<Shuffle>,
    megatron: Option<Megatron>,
    blend: Vec<Part>,
    shape: Shape,
    /// Datasets of several tokenizers may be blended.
    mixes_tokenizers: bool,
    /// First samples of the phases of the blend after the first one.
    phases: Vec<u64>,
    selection: Selection,
    split: Option<Split>,
    remap: Option<String>,
    wasm: Option<UserModule>,
    narrow: Option<Narrow>,
    bitpack: Option<u8>,
    compress: Option<Compression>,
    quantize: Option<Quantize>,
    widen: Option<Dtype>,
    pairs: bool,
    /// Labels beyond the document of their input.
    ignore: Option<i64>,
    /// Which labels are delivered of datasets that have targets.
    labels: Option<Labels>,
    positions: bool,
    loss_weights: Option<LossWeights>,
    batch: u32,
}

/// The `loss_weights` action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossWeights {
    /// The weight of the tokens of datasets that have none; without it such datasets are refused.
    pub missing: Option<Decimal>,
}

impl LossWeights {
    /// The weight of a token of a dataset that has none.
    pub fn of_missing(self) -> f32 {
        self.missing.map_or(0.0, |weight| weight.value() as f32)
    }
}

impl fmt::Display for LossWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.missing {
            None => f.write_str("loss_weights"),
            Some(weight) => write!(f, "loss_weights(missing={weight})"),
        }
    }
}

/// Which labels are delivered of datasets that say which of their tokens are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labels {
    /// Those that are targets.
    Targets,
    /// All of them.
    All,
}

impl Labels {
    /// As it is written in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Labels::Targets => "targets",
            Labels::All => "all",
        }
    }

    fn from_name(name: &str) -> Option<Labels> {
        [Labels::Targets, Labels::All].into_iter().find(|labels| labels.name() == name)
    }
}

/// The `quantize` action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantize {
    /// Type of the codes.
    pub to: Quant,
    /// What is delivered.
    pub deliver: Deliver,
}

/// What is delivered of quantized values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deliver {
    /// Values of the type that the file has.
    Source,
    /// Values of this type.
    As(Dtype),
    /// Codes, then scales, as bytes.
    Quantized,
}

impl fmt::Display for Quantize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = self.to;
        match self.deliver {
            Deliver::Source => write!(f, "quantize({to})"),
            Deliver::As(dtype) => write!(f, "quantize({to}, deliver={dtype})"),
            Deliver::Quantized => write!(f, "quantize({to}, deliver=quantized)"),
        }
    }
}

/// The `narrow` action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Narrow {
    /// The type to convert to.
    pub to: Dtype,
    /// What happens to tokens that it cannot represent.
    pub overflow: Overflow,
}

/// What happens to a token that does not fit the type that it is narrowed to (C5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// It is an error.
    Refuse,
    /// It becomes this id, which fits.
    Saturate(u32),
    /// Its block crosses the wire without being narrowed. Only with a larger type to deliver.
    Escape,
}

impl fmt::Display for Narrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.overflow {
            Overflow::Refuse => write!(f, "narrow({})", self.to),
            Overflow::Saturate(id) => write!(f, "narrow({}, overflow=saturate({id}))", self.to),
            Overflow::Escape => write!(f, "narrow({}, overflow=escape)", self.to),
        }
    }
}

/// The `wasm` action: a module, and the only bytes that it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserModule {
    /// Its name at the target, or the path of a local file.
    pub name: String,
    /// SHA-256 of its bytes.
    pub sha256: [u8; 32],
}

impl fmt::Display for UserModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wasm({}, sha256=", Quoted(&self.name))?;
        self.sha256.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// The `pack` action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Which sample a document goes to.
    pub fit: Fit,
    /// The id of tokens behind the last document of a sample.
    pub pad: u32,
}

impl fmt::Display for Pack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pack { fit, pad } = self;
        write!(f, "pack({}, pad={pad})", fit.name())
    }
}

/// The `shuffle` action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    /// Selects the order.
    pub seed: u64,
    /// Groups of the same size for every dataset; without it their sizes follow from the blend.
    pub groups: Option<Groups>,
}

/// The size of shuffle groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Blocks of a group.
    pub blocks: u32,
    /// Bytes of the file in a block.
    pub block_bytes: u32,
}

/// As printed in a plan.
impl fmt::Display for Shuffle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seed = self.seed;
        match self.groups {
            None => write!(f, "shuffle({seed})"),
            Some(Groups { blocks, block_bytes: BLOCK_BYTES }) => {
                write!(f, "shuffle({seed}, blocks={blocks})")
            }
            Some(Groups { blocks, block_bytes }) => {
                write!(f, "shuffle({seed}, blocks={blocks}, block={}KiB)", block_bytes >> 10)
            }
        }
    }
}

/// What the datasets of a blend are together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Shape {
    /// Sum of the weights of each phase.
    totals: Vec<u32>,
    /// Datasets that some phase draws from.
    drawn: u32,
}

impl Shape {
    fn of(blend: &[Part]) -> Shape {
        let phases = blend.first().map_or(0, |part| part.weights.len());
        let weight = |part: &Part, phase: usize| part.weights.get(phase).copied().unwrap_or(0);
        let total = |phase| blend.iter().map(|part| weight(part, phase)).sum();
        let drawn = blend.iter().filter(|part| part.weights.iter().any(|weight| *weight > 0));
        Shape { totals: (0..phases).map(total).collect(), drawn: drawn.count() as u32 }
    }
}

/// One dataset of the `blend` action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The dataset.
    pub name: String,
    /// Its share in each phase, in parts of the sum over all datasets; no common divisor in a
    /// phase.
    pub weights: Vec<u32>,
}

impl Plan {
    /// Parses a plan. `seed` replaces the word `seed`.
    pub fn parse(text: &str, seed: Option<u64>) -> Result<Plan, PlanError> {
        parse::parse(text, seed)
    }

    /// Tokens of a sample.
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Tokens that a sample shares with the one before it; fewer than [`window`](Plan::window).
    pub fn overlap(&self) -> u32 {
        self.overlap
    }

    /// How documents are packed, if they are.
    pub fn pack(&self) -> Option<Pack> {
        self.pack
    }

    /// Whether the documents of the files decide anything.
    pub fn needs_documents(&self) -> bool {
        let cut = self.pack.is_some() || self.megatron.is_some();
        cut || self.positions || self.ignore.is_some() || !self.selection.is_empty()
    }

    /// The shuffle, if there is one.
    pub fn shuffle(&self) -> Option<Shuffle> {
        self.shuffle
    }

    /// The datasets of the blend; empty if the plan does not blend.
    pub fn blend(&self) -> &[Part] {
        &self.blend
    }

    /// First samples of the phases of the blend after the first one.
    pub fn phases(&self) -> &[u64] {
        &self.phases
    }

    /// The weights of all datasets in a phase.
    fn weights(&self, phase: usize) -> Vec<u32> {
        let weight = |part: &Part| part.weights.get(phase).copied().unwrap_or(0);
        if self.blend.is_empty() { Vec::from([1]) } else { self.blend.iter().map(weight).collect() }
    }

    /// The share of a dataset in each phase.
    fn shares(&self, dataset: usize) -> impl Iterator<Item = Proportion> {
        // The blocks that documents are packed in decide how much of the samples is padding.
        let of_many = self.shape.drawn > FEW_DATASETS && self.pack.is_none();
        let share = move |phase: usize| match self.blend.get(dataset) {
            Some(Part { weights, .. }) => {
                let of = |weights: &[u32]| weights.get(phase).copied().unwrap_or(0);
                Proportion { weight: of(weights), total: of(&self.shape.totals), of_many }
            }
            None => Proportion { weight: 1, total: 1, of_many },
        };
        (0..=self.phases.len()).map(share)
    }

    /// Bytes of the file in a block of a dataset, as its largest share of a phase asks for; the
    /// largest blocks, where none are asked for.
    fn block_bytes(&self, dataset: usize) -> Option<u32> {
        let asked = || self.shares(dataset).map(|share| share.block_bytes()).max();
        match self.shuffle {
            Some(Shuffle { groups: Some(groups), .. }) => Some(groups.block_bytes),
            Some(_) => asked(),
            // Blocks do not decide file order, so they are smaller only where many have to fit in
            // memory.
            None => asked().filter(|_| self.shares(dataset).any(|share| share.of_many)),
        }
    }

    /// Blocks of a group of a dataset.
    fn group_blocks(&self, shuffle: &Shuffle, dataset: usize, layout: &SampleLayout) -> u32 {
        if let Some(groups) = shuffle.groups {
            return groups.blocks;
        }
        let asked = self.block_bytes(dataset).unwrap_or(BLOCK_BYTES);
        // Documents that lie far apart make samples of blocks that are as long as they may be.
        let is_sparse = layout.samples_per_block < layout.in_blocks(asked).samples_per_block;
        let block_bytes = if self.pack.is_some() && is_sparse { BLOCK_BYTES } else { asked };
        let sample_bytes = layout.sample_bytes();
        let blocks =
            self.shares(dataset).map(|share| share.group_blocks(block_bytes, sample_bytes));
        blocks.max().unwrap_or(1)
    }

    /// Divides the file of a dataset, by its position in the blend, into samples and blocks. A
    /// dataset of weight 0 need not hold a sample.
    ///
    /// # Errors
    /// As [`SampleLayout::new`].
    pub fn layout(&self, dataset: usize, file: TokenFile) -> Result<SampleLayout, OrderError> {
        let (window, overlap) = (self.window, self.overlap);
        let unused = || !self.draws(dataset);
        let layout = match SampleLayout::new(file, window, overlap) {
            // Packed or listed documents are no windows: how many samples they fill is not known
            // yet.
            Err(OrderError::NoSample { .. })
                if self.pack.is_some() || self.megatron.is_some() || unused() =>
            {
                SampleLayout::without_samples(file, window, overlap)
            }
            layout => layout?,
        };
        let layout = match self.loss_weights {
            Some(_) => layout.read_with(Dtype::F32)?,
            None => layout,
        };
        let layout = self.block_bytes(dataset).map_or(layout, |bytes| layout.in_blocks(bytes));
        match self.split.filter(|_| self.pack.is_none()) {
            None => Ok(layout),
            Some(split) => match layout.in_part(split) {
                Err(OrderError::EmptyPart { .. }) if unused() => {
                    Ok(SampleLayout { samples: 0, ..layout })
                }
                part => part,
            },
        }
    }

    /// Cuts samples from a dataset that [`layout`](Plan::layout) has divided, where documents
    /// matter.
    ///
    /// # Errors
    /// When the documents cannot be packed; a dataset of weight 0 need not have any.
    pub fn cut(
        &self,
        dataset: usize,
        layout: SampleLayout,
        documents: Documents,
    ) -> Result<(SampleLayout, Cut), PackingError> {
        let Some(Pack { fit, .. }) = self.pack else {
            return Ok((layout, Cut::Through(documents.with_borders())));
        };
        match Cut::packed(layout, documents, fit) {
            Err(PackingError::Empty) if !self.draws(dataset) => {
                Ok((SampleLayout { samples: 0, ..layout }, Cut::Windows))
            }
            cut => cut,
        }
    }

    /// The order of the samples of datasets divided by [`layout`](Plan::layout), in the order of
    /// the blend.
    ///
    /// # Errors
    /// When there are more or fewer datasets than the plan has, and when the plan has the order of
    /// another loader, which [`megatron_order`](Plan::megatron_order) makes.
    pub fn order(&self, datasets: &[SampleLayout]) -> Result<Order, OrderError> {
        if self.megatron.is_some() {
            return Err(OrderError::NeedsDocuments);
        }
        let shuffle = |(dataset, layout): (usize, &SampleLayout)| {
            let (samples, per_block) = (layout.samples.max(1), layout.samples_per_block);
            let Some(shuffle) = self.shuffle else {
                return BlockShuffle::sequential(samples, per_block);
            };
            let blocks = self.group_blocks(&shuffle, dataset, layout);
            BlockShuffle::new(samples, per_block, blocks, shuffle.seed, dataset as u64)
        };
        let shuffles = datasets.iter().enumerate().map(shuffle);
        Order::new(self.curriculum()?, shuffles.collect::<Result<_, _>>()?)
    }

    /// The blend in its phases.
    fn curriculum(&self) -> Result<Curriculum, OrderError> {
        let starts = core::iter::once(0).chain(self.phases.iter().copied());
        let blend = |(phase, start)| Blend::new(&self.weights(phase)).map(|blend| (start, blend));
        Curriculum::new(starts.enumerate().map(blend).collect::<Result<Vec<_>, OrderError>>()?)
    }

    /// The same plan with another blend, of one phase. Weights are reduced by their common divisor;
    /// without a weight above zero the plan stays as it is. Megatron-core's order blends by samples
    /// then.
    #[must_use]
    pub fn blended(&self, shares: impl IntoIterator<Item = (String, u32)>) -> Plan {
        let shares: Vec<(String, u32)> = shares.into_iter().collect();
        let divisor = shares.iter().fold(0, |a, (_, weight)| gcd(a, *weight));
        if divisor == 0 {
            return self.clone();
        }
        let megatron = self.megatron.clone().map(|order| Megatron { weights: Vec::new(), ..order });
        let part = |(name, weight): (String, u32)| {
            let weight = if megatron.is_some() { 1 } else { weight / divisor };
            Part { name, weights: Vec::from([weight]) }
        };
        let blend: Vec<Part> = shares.into_iter().map(part).collect();
        Plan { shape: Shape::of(&blend), blend, phases: Vec::new(), megatron, ..self.clone() }
    }

    /// The table that tokens are replaced by, if they are: a name at the target, or a path of a
    /// local file.
    pub fn remap(&self) -> Option<&str> {
        self.remap.as_deref()
    }

    /// The module that maps tokens, if there is one.
    pub fn wasm(&self) -> Option<&UserModule> {
        self.wasm.as_ref()
    }

    /// The type tokens are narrowed to, if they are.
    pub fn narrow(&self) -> Option<Narrow> {
        self.narrow
    }

    /// The bits in which a token crosses the wire, if they are given.
    pub fn bitpack(&self) -> Option<u8> {
        self.bitpack
    }

    /// How blocks are compressed, if they are.
    pub fn compress(&self) -> Option<Compression> {
        self.compress
    }

    /// How values are quantized, if they are.
    pub fn quantize(&self) -> Option<Quantize> {
        self.quantize
    }

    /// The larger type that tokens are delivered in, if they are.
    pub fn widen(&self) -> Option<Dtype> {
        self.widen
    }

    /// Whether each sample is delivered as inputs and labels, which are one token later.
    pub fn pairs(&self) -> bool {
        self.pairs
    }

    /// What labels beyond the document of their input become, if they do.
    pub fn ignore(&self) -> Option<i64> {
        self.ignore
    }

    /// Which labels are delivered of datasets that have targets, if the plan says so.
    pub fn labels(&self) -> Option<Labels> {
        self.labels
    }

    /// Whether labels that are no targets become what labels to ignore do.
    pub fn hides_others(&self) -> bool {
        self.labels == Some(Labels::Targets)
    }

    /// Whether each sample is delivered with the position of each token in its document, and the
    /// document's number.
    pub fn positions(&self) -> bool {
        self.positions
    }

    /// How each sample is delivered with the weight of each token in the loss, if it is.
    pub fn loss_weights(&self) -> Option<LossWeights> {
        self.loss_weights
    }

    /// Samples of a batch.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// Which documents are dropped.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// The part of the datasets that is delivered, if it is not the whole.
    pub fn split(&self) -> Option<Split> {
        self.split
    }

    /// The same where documents are what is divided.
    pub fn document_split(&self) -> Option<Split> {
        self.split.filter(|_| self.pack.is_some())
    }

    /// Whether samples are drawn from a dataset, by its position in the blend.
    pub fn draws(&self, dataset: usize) -> bool {
        self.shares(dataset).any(|share| share.weight > 0)
    }

    /// Whether datasets may be blended whose ids are of different tokenizers.
    pub fn mixes_tokenizers(&self) -> bool {
        self.mixes_tokenizers
    }

    /// Whether another plan makes the same samples in the same order of the same files, whatever
    /// these are called there. The sizes of batches may differ, and so may the names of lists and
    /// tables: what is in them counts.
    pub fn orders_as(&self, other: &Plan) -> bool {
        let stripped = |plan: &Plan| {
            let part = |part: &Part| Part { name: String::new(), ..part.clone() };
            let named = |name: &Option<String>| name.as_ref().map(|_| String::new());
            let filter = |filter: &Filter| Filter { list: String::new(), ..filter.clone() };
            let module = |module: &UserModule| UserModule { name: String::new(), ..module.clone() };
            Plan {
                blend: plan.blend.iter().map(part).collect(),
                selection: Selection {
                    filter: plan.selection.filter.as_ref().map(filter),
                    ..plan.selection.clone()
                },
                remap: named(&plan.remap),
                wasm: plan.wasm.as_ref().map(module),
                mixes_tokenizers: false,
                batch: 0,
                ..plan.clone()
            }
        };
        stripped(self) == stripped(other)
    }

    /// How many of the first `samples` samples are of each dataset of the blend; `None` where the
    /// order of another loader decides that. Costs a seek.
    pub fn drawn(&self, samples: u64) -> Option<Vec<u64>> {
        if self.megatron.is_some() {
            return None;
        }
        let cursor = self.curriculum().ok()?.cursor_at(samples);
        Some((0..self.blend.len().max(1)).map(|dataset| cursor.drawn(dataset)).collect())
    }

    /// Finds the datasets of the blend among `names`: the result holds their positions, in the
    /// order of the blend. Each name must be used once; without a blend there must be one.
    pub fn bind(&self, names: &[&str]) -> Result<Vec<usize>, BindError> {
        if self.blend.is_empty() {
            return match names {
                [] => Err(BindError::NoDataset),
                [_] => Ok(Vec::from([0])),
                _ => Err(BindError::NeedsBlend { datasets: names.len() }),
            };
        }
        let mut positions = BTreeMap::new();
        for (position, name) in names.iter().enumerate() {
            if positions.insert(*name, position).is_some() {
                return Err(BindError::Repeated { name: String::from(*name) });
            }
        }
        let position = |part: &Part| positions.get(part.name.as_str()).copied();
        let unknown = |part: &Part| BindError::Unknown { name: part.name.clone() };
        let bound: Result<Vec<usize>, _> =
            self.blend.iter().map(|part| position(part).ok_or_else(|| unknown(part))).collect();
        let used: BTreeSet<&str> = self.blend.iter().map(|part| part.name.as_str()).collect();
        let unused = names.iter().find(|name| !used.contains(**name));
        match unused {
            Some(name) if bound.is_ok() => Err(BindError::Unused { name: String::from(*name) }),
            _ => bound,
        }
    }
}

/// Why the given datasets do not match the plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BindError {
    /// There are no datasets.
    #[error("no dataset is given")]
    NoDataset,
    /// Several datasets, and no ratio.
    #[error("{datasets} datasets are given, but the plan has no blend(…) to say in what ratio")]
    NeedsBlend {
        /// How many were given.
        datasets: usize,
    },
    /// The blend names a dataset that was not given.
    #[error("blend names `{name}`, but no such dataset is given")]
    Unknown {
        /// The name in the plan.
        name: String,
    },
    /// A given dataset is not in the blend.
    #[error("dataset `{name}` is given, but the blend does not name it (weight 0 leaves it out)")]
    Unused {
        /// The name given.
        name: String,
    },
    /// Two given datasets have the same name.
    #[error("two datasets are called `{name}`")]
    Repeated {
        /// The name given.
        name: String,
    },
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", WindowText { tokens: self.window, overlap: self.overlap })?;
        if let Some(pack) = self.pack {
            write!(f, " | {pack}")?;
        }
        if let Some(shuffle) = self.shuffle {
            write!(f, " | {shuffle}")?;
        }
        if let Some(megatron) = &self.megatron {
            write!(f, " | {megatron}")?;
        }
        match &self.megatron {
            _ if self.blend.is_empty() => {}
            None => write!(f, " | {}", BlendText(&self.blend))?,
            Some(megatron) => {
                f.write_str(" | ")?;
                megatron.write_blend(f, &self.blend)?;
            }
        }
        if !self.phases.is_empty() {
            write!(f, " | {}", PhasesText(&self.phases))?;
        }
        if self.mixes_tokenizers {
            f.write_str(" | tokenizers(any)")?;
        }
        match &self.selection.filter {
            Some(Filter { list, keep: true }) => write!(f, " | filter(keep={})", Quoted(list))?,
            Some(Filter { list, keep: false }) => write!(f, " | filter({})", Quoted(list))?,
            None => {}
        }
        match self.selection.dedup {
            Some(Dedup::Within) => f.write_str(" | dedup")?,
            Some(Dedup::Across) => f.write_str(" | dedup(across)")?,
            None => {}
        }
        if let Some(Split { shares: [train, valid, test], part, seed }) = self.split {
            write!(f, " | split(\"{train},{valid},{test}\", part={part}, seed={seed})")?;
        }
        if let Some(table) = &self.remap {
            write!(f, " | remap({})", Quoted(table))?;
        }
        if let Some(module) = &self.wasm {
            write!(f, " | {module}")?;
        }
        if let Some(narrow) = self.narrow {
            write!(f, " | {narrow}")?;
        }
        if let Some(bits) = self.bitpack {
            write!(f, " | bitpack({bits})")?;
        }
        if let Some(compression) = self.compress {
            write!(f, " | {compression}")?;
        }
        if let Some(quantize) = self.quantize {
            write!(f, " | {quantize}")?;
        }
        if let Some(dtype) = self.widen {
            write!(f, " | widen({dtype})")?;
        }
        if self.pairs {
            f.write_str(" | ")?;
            write_pairs(f, self.ignore, self.labels)?;
        }
        if self.positions {
            f.write_str(" | positions")?;
        }
        if let Some(weights) = self.loss_weights {
            write!(f, " | {weights}")?;
        }
        write!(f, " | batch({})", self.batch)
    }
}

/// Writes the `pairs` action.
pub(crate) fn write_pairs(
    f: &mut fmt::Formatter<'_>,
    ignore: Option<i64>,
    labels: Option<Labels>,
) -> fmt::Result {
    match (ignore, labels.map(Labels::name)) {
        (None, None) => f.write_str("pairs"),
        (None, Some(labels)) => write!(f, "pairs(labels={labels})"),
        (Some(ignore), None) => write!(f, "pairs(ignore={ignore})"),
        (Some(ignore), Some(labels)) => write!(f, "pairs(ignore={ignore}, labels={labels})"),
    }
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Prints `window(…)`.
pub(crate) struct WindowText {
    pub(crate) tokens: u32,
    pub(crate) overlap: u32,
}

impl fmt::Display for WindowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            WindowText { tokens, overlap: 0 } => write!(f, "window({tokens})"),
            WindowText { tokens, overlap } => write!(f, "window({tokens}, overlap={overlap})"),
        }
    }
}

/// Prints `blend(…)`.
pub(crate) struct BlendText<'a>(pub(crate) &'a [Part]);

impl fmt::Display for BlendText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("blend(")?;
        for (i, part) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            match lexer::is_bare(&part.name) {
                true => write!(f, "{comma}{}=", part.name)?,
                false => write!(f, "{comma}{}=", Quoted(&part.name))?,
            }
            write_list(f, &part.weights, ":")?;
        }
        f.write_str(")")
    }
}

/// Prints `phases(…)`.
struct PhasesText<'a>(&'a [u64]);

impl fmt::Display for PhasesText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("phases(")?;
        write_list(f, self.0, ", ")?;
        f.write_str(")")
    }
}

fn write_list<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    items: &[T],
    between: &str,
) -> fmt::Result {
    items.iter().enumerate().try_for_each(|(i, item)| {
        let between = if i == 0 { "" } else { between };
        write!(f, "{between}{item}")
    })
}

/// Prints a name in quotes.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                _ => write!(f, "{c}")?,
            }
        }
        f.write_str("\"")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests;
