//! From a plan and the types of its files to a [`Pipeline`].

use alloc::vec::Vec;

use thiserror::Error;

use super::{
    BlockPlan, BlockStages, Packing, Place, SampleOp, Shape, Stage, StageError, Type, chain,
};
use crate::dataset::{Dtype, TokenFile};
use crate::kernel::pack::can_pack;
use crate::kernel::quantize::SCALED_VALUES;
use crate::kernel::{can_narrow, can_widen};
use crate::order::{Order, OrderError, SampleLayout};
use crate::plan::{Deliver, LossWeights, Narrow, Overflow, Plan, Quantize};

/// The stages of one dataset, up to where the datasets are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    weight: u32,
    blocks: BlockStages,
    samples: Vec<Stage<SampleOp>>,
}

impl Branch {
    /// Its share of the samples in the first phase, in parts of the sum over all branches.
    pub fn weight(&self) -> u32 {
        self.weight
    }

    /// The stages over blocks, on both sides of the wire.
    pub fn blocks(&self) -> &BlockStages {
        &self.blocks
    }

    /// The stages over samples.
    pub fn sample_stages(&self) -> &[Stage<SampleOp>] {
        &self.samples
    }

    /// The output type.
    pub fn output(&self) -> Type {
        self.samples.last().map_or(self.blocks.output(), |last| last.output)
    }
}

/// The rows that a sample is delivered as. Without any of them a sample is one row, its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// A row of inputs and a row of labels, one token later, in place of the tokens.
    pub pairs: bool,
    /// After them, a row of positions and a row of numbers of documents.
    pub positions: bool,
    /// What labels beyond the document of their input become.
    pub ignore: Option<i64>,
    /// Whether labels that are no targets become that, too.
    pub targets: bool,
    /// The id of tokens behind the last document.
    pub pad: u32,
    /// After all rows of a batch, the loss weight of each token of a sample, or of each label, as
    /// `f32`.
    pub loss_weights: Option<LossWeights>,
}

impl Rows {
    /// How many.
    pub fn count(&self) -> u32 {
        1 + u32::from(self.pairs) + 2 * u32::from(self.positions)
    }

    /// Whether the documents of a sample decide what is in its rows.
    pub fn need_documents(&self) -> bool {
        self.positions || self.ignore.is_some()
    }

    /// The loss weight of a token of a dataset that has none.
    pub(crate) fn missing_weight(&self) -> f32 {
        self.loss_weights.map_or(0.0, LossWeights::of_missing)
    }
}

/// A compiled plan: one branch for each dataset, and the stages after they are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    plan: Plan,
    branches: Vec<Branch>,
    /// The stages of blocks of loss weights, where they are delivered.
    loss_weights: Option<BlockStages>,
    joint: Vec<Stage<SampleOp>>,
    /// Type of the samples as they are cut from blocks.
    sample: Type,
    /// What is delivered.
    output: Type,
    batch_samples: u32,
}

impl Pipeline {
    /// The branches, in the order of the blend.
    pub fn branches(&self) -> &[Branch] {
        &self.branches
    }

    /// The stages of blocks of loss weights, which are `f32`; none where the plan delivers none.
    pub fn loss_weights(&self) -> Option<&BlockStages> {
        self.loss_weights.as_ref()
    }

    /// The stages after the branches are joined.
    pub fn joint(&self) -> &[Stage<SampleOp>] {
        &self.joint
    }

    /// Type of the delivered tokens.
    pub fn dtype(&self) -> Dtype {
        self.output.dtype
    }

    /// Type of the tokens in the samples that are cut from blocks, before they are widened.
    pub fn sample_dtype(&self) -> Dtype {
        self.sample.dtype
    }

    /// Whether samples are delivered as inputs and labels.
    pub fn pairs(&self) -> bool {
        self.plan.pairs()
    }

    /// What the rows of a sample are, beside its tokens.
    pub fn rows(&self) -> Rows {
        let (plan, pad) = (&self.plan, self.plan.pack().map_or(0, |pack| pack.pad));
        Rows {
            pairs: plan.pairs(),
            positions: plan.positions(),
            ignore: plan.ignore(),
            targets: plan.hides_others(),
            pad,
            loss_weights: plan.loss_weights(),
        }
    }

    /// The delivered batches.
    pub fn output(&self) -> Type {
        self.output
    }

    /// Tokens of a sample.
    pub fn window_tokens(&self) -> u32 {
        self.plan.window()
    }

    /// Tokens of a sample as it is cut from blocks: where it is delivered quantized, its codes and
    /// its scales.
    pub fn sample_tokens(&self) -> u32 {
        match self.sample.shape {
            Shape::Sample { tokens } => tokens,
            _ => self.window_tokens(),
        }
    }

    /// Tokens that a sample shares with the one before it.
    pub fn overlap_tokens(&self) -> u32 {
        self.plan.overlap()
    }

    /// Samples of a batch.
    pub fn batch_samples(&self) -> u32 {
        self.batch_samples
    }

    /// Divides the file of a branch, as [`Plan::layout`].
    ///
    /// # Errors
    /// As [`Plan::layout`].
    pub fn layout(&self, dataset: usize, file: TokenFile) -> Result<SampleLayout, OrderError> {
        self.plan.layout(dataset, file)
    }

    /// The order of its samples; `datasets` are in the order of the branches.
    ///
    /// # Errors
    /// As [`Plan::order`].
    pub fn order(&self, datasets: &[SampleLayout]) -> Result<Order, OrderError> {
        self.plan.order(datasets)
    }
}

/// Why a plan does not match the types of its files.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CompileError {
    /// The number of types must equal the number of datasets in the blend.
    #[error("{sources} source types for {datasets} datasets")]
    Count {
        /// Types given.
        sources: usize,
        /// Datasets of the plan.
        datasets: usize,
    },
    /// `narrow` cannot widen, and supports integers only.
    #[error(
        "dataset {dataset} holds {from}, which narrow({to}) cannot deliver; leave narrow out, or narrow further"
    )]
    Narrow {
        /// Position in the blend.
        dataset: usize,
        /// Type of the file.
        from: Dtype,
        /// Requested type.
        to: Dtype,
    },
    /// Without `narrow`, a batch would mix types.
    #[error(
        "dataset 0 holds {first} but dataset {dataset} holds {other}; add narrow(u16) or narrow(u32)"
    )]
    MixedTypes {
        /// Type of the first file.
        first: Dtype,
        /// Position in the blend of a file of another type.
        dataset: usize,
        /// Its type.
        other: Dtype,
    },
    /// `widen` is for larger types that can represent every value of the samples.
    #[error("samples hold {from}, which widen({to}) cannot deliver")]
    Widen {
        /// Type of the samples.
        from: Dtype,
        /// Requested type.
        to: Dtype,
    },
    /// Tokens can be packed into fewer bits than they have, and only up to 32.
    #[error("tokens of {dtype} cannot be packed into {bits} bits")]
    Pack {
        /// Type of the samples.
        dtype: Dtype,
        /// Requested bits.
        bits: u8,
    },
    /// An action over tokens, and a file that holds none.
    #[error("dataset {dataset} holds {}, and {action} is for tokens", kind(*holds))]
    NotTokens {
        /// Position in the blend.
        dataset: usize,
        /// Type of the file.
        holds: Dtype,
        /// The action, or the argument of one.
        action: &'static str,
    },
    /// Quantization of what is not floating point.
    #[error("dataset {dataset} holds {}, and quantize is for f32, f16 and bf16", kind(*holds))]
    NotFloats {
        /// Position in the blend.
        dataset: usize,
        /// Type of the file.
        holds: Dtype,
    },
    /// The id of padding, or of labels to ignore, cannot be delivered.
    #[error("the {what} {id} does not fit {dtype}")]
    Id {
        /// Its purpose.
        what: &'static str,
        /// The id.
        id: i64,
        /// Type that it would have.
        dtype: Dtype,
    },
    /// Positions in long documents do not fit the delivered type.
    #[error("positions in samples of {window} tokens do not fit {dtype}")]
    Positions {
        /// Tokens of a sample.
        window: u32,
        /// The delivered type.
        dtype: Dtype,
    },
    /// `remap` without the table.
    #[error("the table of remap is not known here")]
    NoTable,
    /// The stages of a dataset do not form a chain, as when its file holds no tokens.
    #[error("the stages cannot be joined: {0}")]
    Stages(#[from] StageError),
    /// The output of the stages is not batches.
    #[error("the stages end in {output}, not in batches")]
    NoBatches {
        /// Their output.
        output: Type,
    },
}

/// What files of this type hold.
fn kind(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::U8 => "bytes",
        _ => dtype.name(),
    }
}

impl Plan {
    /// The delivered type, given the types of the files in the order of the blend.
    ///
    /// # Errors
    /// When the plan does not match these types.
    pub fn delivered_dtype(&self, sources: &[Dtype]) -> Result<Dtype, CompileError> {
        let from = self.sample_dtype(sources)?;
        match self.widen() {
            Some(to) if to != from && !can_widen(from, to) => Err(CompileError::Widen { from, to }),
            Some(to) => Ok(to),
            None => Ok(from),
        }
    }

    /// The type of the tokens before they are widened, given the types of the files in the order of
    /// the blend: every token has to fit it (C5).
    ///
    /// # Errors
    /// When the plan does not match these types.
    pub fn sample_dtype(&self, sources: &[Dtype]) -> Result<Dtype, CompileError> {
        let dtype = self.narrowed_dtype(sources)?;
        match self.bitpack() {
            Some(bits) if !can_pack(dtype, bits.into()) => Err(CompileError::Pack { dtype, bits }),
            _ => Ok(dtype),
        }
    }

    /// The type of the tokens, of which a packed one has fewer bits.
    fn narrowed_dtype(&self, sources: &[Dtype]) -> Result<Dtype, CompileError> {
        let datasets = self.blend().len().max(1);
        let Some(&first) = sources.first().filter(|_| sources.len() == datasets) else {
            return Err(CompileError::Count { sources: sources.len(), datasets });
        };
        self.check_actions(sources)?;
        match self.quantize().map(|quantize| quantize.deliver) {
            Some(Deliver::As(dtype)) => return Ok(dtype),
            Some(Deliver::Quantized) => return Ok(Dtype::U8),
            Some(Deliver::Source) | None => {}
        }
        let mut numbered = sources.iter().copied().enumerate();
        match self.narrow() {
            Some(Narrow { to, overflow }) => {
                match numbered.find(|(_, from)| !can_narrow(*from, to)) {
                    Some((dataset, from)) => Err(CompileError::Narrow { dataset, from, to }),
                    None if overflow == Overflow::Escape => Ok(Dtype::U32),
                    None => Ok(to),
                }
            }
            None => match numbered.find(|(_, other)| *other != first) {
                Some((dataset, other)) => Err(CompileError::MixedTypes { first, dataset, other }),
                None => Ok(first),
            },
        }
    }

    /// Whether the actions are defined for what the files hold.
    fn check_actions(&self, sources: &[Dtype]) -> Result<(), CompileError> {
        let mut numbered = sources.iter().copied().enumerate();
        if self.quantize().is_some() {
            return match numbered.find(|(_, dtype)| !dtype.is_float()) {
                Some((dataset, holds)) => Err(CompileError::NotFloats { dataset, holds }),
                None => Ok(()),
            };
        }
        let Some((dataset, holds)) = numbered.find(|(_, dtype)| !dtype.is_token()) else {
            return Ok(());
        };
        let is_bytes = holds == Dtype::U8;
        let actions = [
            ("remap", self.remap().is_some()),
            ("wasm", self.wasm().is_some()),
            ("narrow", self.narrow().is_some()),
            ("bitpack", self.bitpack().is_some()),
            ("widen", self.widen().is_some()),
            ("pack", self.pack().is_some()),
            ("positions", self.positions()),
            ("ignore", self.ignore().is_some()),
            ("labels", self.labels().is_some()),
            ("loss_weights", self.loss_weights().is_some()),
            ("pairs", self.pairs() && is_bytes),
            ("overlap", self.overlap() > 0 && is_bytes),
        ];
        match actions.into_iter().find(|(_, is_there)| *is_there) {
            Some((action, _)) => Err(CompileError::NotTokens { dataset, holds, action }),
            None => Ok(()),
        }
    }

    /// Compiles the plan for files of these types, in the order of the blend.
    ///
    /// # Errors
    /// When the plan does not match these types, or has a table.
    pub fn compile(&self, sources: &[Dtype], offload: bool) -> Result<Pipeline, CompileError> {
        self.compile_with(sources, None, offload)
    }

    /// As [`compile`](Plan::compile), with so many entries in the table of `remap`.
    ///
    /// # Errors
    /// When the plan does not match these types, or needs a table and gets none.
    pub fn compile_with(
        &self,
        sources: &[Dtype],
        table_ids: Option<u32>,
        offload: bool,
    ) -> Result<Pipeline, CompileError> {
        let (place, asked) = (Place::of_reader(offload), self.block_plan(sources, table_ids)?);
        let blocks = |stored, asked: &BlockPlan| BlockStages::compile(stored, asked, offload);
        self.join(sources, place, &asked, blocks)
    }

    /// As [`compile_with`](Plan::compile_with), for files of this machine: the host runs every
    /// stage.
    ///
    /// # Errors
    /// As [`compile_with`](Plan::compile_with).
    pub fn compile_local(
        &self,
        sources: &[Dtype],
        table_ids: Option<u32>,
    ) -> Result<Pipeline, CompileError> {
        let asked = self.block_plan(sources, table_ids)?;
        self.join(sources, Place::Host, &asked, BlockStages::local)
    }

    /// What the plan asks for the blocks of files of these types.
    fn block_plan(
        &self,
        sources: &[Dtype],
        table_ids: Option<u32>,
    ) -> Result<BlockPlan, CompileError> {
        let deliver = self.sample_dtype(sources)?;
        let remap = match self.remap() {
            Some(_) => Some(table_ids.ok_or(CompileError::NoTable)?),
            None => None,
        };
        let overflow = self.narrow().map(|narrow| narrow.overflow);
        let instead = match overflow {
            Some(Overflow::Saturate(id)) => Some(id),
            _ => None,
        };
        let packing = match (overflow, self.bitpack(), self.compress()) {
            (Some(Overflow::Escape), _, None) => Some(Packing::Escape),
            (Some(Overflow::Escape), _, Some(_)) => Some(Packing::EscapeWhole),
            (_, bits, _) => bits.map(Packing::Bits),
        };
        let wasm = self.wasm().is_some();
        let quantize = self.quantize().map(|quantize| (quantize.to, self.window()));
        Ok(BlockPlan {
            deliver,
            remap,
            wasm,
            instead,
            packing,
            compression: self.compress(),
            quantize,
        })
    }

    /// Whether what the plan adds to the tokens of samples of type `sample` fits the types.
    fn check_ids(&self, sample: Dtype, delivered: Dtype) -> Result<(), CompileError> {
        let fits = |what, id: i64, dtype: Dtype| {
            let (low, high) = dtype.range();
            match (low..=high).contains(&id.into()) {
                true => Ok(()),
                false => Err(CompileError::Id { what, id, dtype }),
            }
        };
        let pad = self.pack().map(|pack| fits("padding", pack.pad.into(), sample));
        let ignore = self.ignore().map(|id| fits("label to ignore", id, delivered));
        pad.into_iter().chain(ignore).collect::<Result<(), _>>()?;
        let window = self.window();
        match self.positions() && i128::from(window) > delivered.range().1 + 1 {
            true => Err(CompileError::Positions { window, dtype: delivered }),
            false => Ok(()),
        }
    }

    /// Joins one branch for each file, whose stages over blocks are compiled by `blocks`.
    fn join(
        &self,
        sources: &[Dtype],
        place: Place,
        asked: &BlockPlan,
        blocks: impl Fn(Dtype, &BlockPlan) -> Result<BlockStages, StageError>,
    ) -> Result<Pipeline, CompileError> {
        let dtype = self.sample_dtype(sources)?;
        let delivered = self.delivered_dtype(sources)?;
        self.check_ids(dtype, delivered)?;
        let branch = |(dataset, stored): (usize, &Dtype)| {
            let blocks = blocks(*stored, asked)?;
            let (tokens, overlap) = (self.window(), self.overlap());
            let scales = match self.quantize() {
                Some(Quantize { deliver: Deliver::Quantized, .. }) => {
                    tokens.div_ceil(SCALED_VALUES as u32)
                }
                _ => 0,
            };
            let window = Some(SampleOp::Window { tokens, overlap, scales });
            let (pack, shuffle) =
                (self.pack().map(SampleOp::Pack), self.shuffle().map(SampleOp::Shuffle));
            let ops = [window, pack, shuffle].into_iter().flatten();
            let samples = chain(blocks.output(), place, ops)?;
            let weight = self.blend().get(dataset).map_or(1, |part| part.weights[0]);
            Ok(Branch { weight, blocks, samples })
        };
        let weights = BlockPlan { compression: asked.compression, ..BlockPlan::plain(Dtype::F32) };
        let loss_weights = self.loss_weights().map(|_| blocks(Dtype::F32, &weights)).transpose()?;
        let branches = sources.iter().enumerate().map(branch);
        let branches = branches.collect::<Result<Vec<_>, StageError>>()?;
        // There is a branch: `sample_dtype` has counted the sources.
        let takes = branches.first().map_or(Type::file(dtype), Branch::output);
        if let Some(other) = branches.iter().find(|branch| branch.output() != takes) {
            let given = other.output();
            return Err(StageError::Join { position: 1, stage: "blend", takes, given }.into());
        }
        let blend = (!self.blend().is_empty()).then(|| SampleOp::Blend(self.blend().to_vec()));
        let batch = Some(SampleOp::Batch { samples: self.batch() });
        let widen = (delivered != dtype).then_some(SampleOp::Widen { to: delivered });
        let (ignore, labels) = (self.ignore(), self.labels());
        let pairs = self.pairs().then_some(SampleOp::Pairs { ignore, labels });
        let positions = self.positions().then_some(SampleOp::Positions);
        let weights = self.loss_weights().map(SampleOp::LossWeights);
        let ops = [blend, widen, pairs, positions, weights, batch].into_iter().flatten();
        let joint = chain(takes, place, ops)?;
        let output = joint.last().map_or(takes, |last| last.output);
        let (Shape::Batch { samples, .. } | Shape::RowsBatch { samples, .. }) = output.shape else {
            return Err(CompileError::NoBatches { output });
        };
        let plan = self.clone();
        let sample = takes;
        Ok(Pipeline { plan, branches, loss_weights, joint, sample, output, batch_samples: samples })
    }
}
