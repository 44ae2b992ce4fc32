//! Stages: the compiled form of a plan.
//!
//! [`Plan::compile`](crate::plan::Plan::compile) turns a plan into a [`Pipeline`]: stages with an
//! input type, an output type and a [`Place`] to run. The target runs its stages, the reader runs
//! the others, and the table printed by `dquant demo` is derived from the same list, so it cannot
//! differ from what runs.
//!
//! ```text
//! per dataset   File ─read→ Block ─remap→ ─wasm→ Block ─narrow→ Block ─checksum→ SummedBlock ─pack→ ─compress→ ══ wire
//!               wire ══ ─decompress→ ─unpack→ SummedBlock ─verify→ Block ─narrow→ Block ─fit→ Block ─widen→ Block
//!               ─window→ Sample ─shuffle→ Sample ┐
//! together                      all datasets     ├─blend→ Sample ─widen→ Sample ─pairs→ Pair ─batch→ Batch
//! ```
//!
//! `narrow` is in one of the two places, or in neither if the file already holds its type. `pack`
//! and `compress` come after the checksum, which thus covers the tokens and not their form on the
//! wire. `widen` and `pairs` make samples larger, so they come last, where samples are copied. In
//! place of `remap`, `narrow` and `pack`, blocks of floating point may go through `quantize`;
//! `dequantize` then comes after `verify`.
//!
//! Invariants: the input of a stage is the output of the one before it; only a
//! [`Shape::SummedBlock`] crosses the wire, in any [`Form`]; every dataset arrives at `blend` with
//! the same type. A list of stages from another process is checked ([`TargetStages::new`]) before
//! it is used (C7).
//!
//! Nothing here depends on how stages are sent, on how samples are ordered
//! ([`order`](crate::order)), or on how a kernel converts a token ([`kernel`](crate::kernel)).

mod block;
mod pipeline;
mod run;
mod table;

use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use crate::dataset::Dtype;
use crate::kernel::pack::can_pack;
use crate::kernel::quantize::can_quantize;
use crate::kernel::{Codec, Compression, Quant, can_narrow, can_widen};
use crate::plan::{
    BlendText, Labels, LossWeights, Narrow, Overflow, Pack, Part, Shuffle, WindowText, write_pairs,
};

pub use block::{BlockPlan, BlockStages, MAX_TARGET_STAGES, TargetStages};
pub use pipeline::{Branch, CompileError, Pipeline, Rows};
pub use run::{BlockError, Encoding, Ran, Received, SCRATCH_BYTES, Tools, run};
pub use table::{Row, Table};

/// A machine that runs stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The storage target, next to the disk.
    Target,
    /// The DPU, next to the host.
    Dpu,
    /// The host that trains.
    Host,
}

impl Place {
    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Place::Target => "target",
            Place::Dpu => "dpu",
            Place::Host => "host",
        }
    }

    /// The place of the reader.
    pub const fn of_reader(offload: bool) -> Place {
        match offload {
            true => Place::Dpu,
            false => Place::Host,
        }
    }

    /// Where a stage over blocks moves the fewest bytes across the wire, for `bytes_in` and
    /// `bytes_out` per token: a stage that adds bytes runs after the wire, any other before it. If
    /// both cost the same it runs at the target, because a token that does not fit then ends the
    /// request before its block is sent.
    pub const fn of_block_stage(bytes_in: u32, bytes_out: u32, offload: bool) -> Place {
        match offload && bytes_out <= bytes_in {
            true => Place::Target,
            false => Place::of_reader(offload),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The unit that tokens are grouped into between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A file on the target's disk.
    File,
    /// A run of consecutive tokens of a file, at most [`BLOCK_BYTES`](crate::order::BLOCK_BYTES) of
    /// it.
    Block,
    /// A block with the CRC-32C of its tokens, in a form that may be smaller.
    SummedBlock(Form),
    /// A sample.
    Sample {
        /// Its tokens.
        tokens: u32,
    },
    /// Rows of one length made of a sample: inputs, labels one token later, positions, numbers of
    /// documents.
    Rows {
        /// How many.
        rows: u32,
        /// Tokens of each.
        tokens: u32,
        /// Whether the loss weights of one row come with them, each a `f32`.
        weighted: bool,
    },
    /// A batch of samples of the same length.
    Batch {
        /// Number of samples.
        samples: u32,
        /// Tokens of each.
        tokens: u32,
    },
    /// A batch of rows: the first row of all samples, then the second of all samples, and so on;
    /// then their loss weights.
    RowsBatch {
        /// Number of samples.
        samples: u32,
        /// Rows of each.
        rows: u32,
        /// Tokens of a row.
        tokens: u32,
        /// Whether there are loss weights.
        weighted: bool,
    },
}

/// The forms of blocks between checksum and verification. Each block says which of them it has,
/// because one that a stage would not make smaller stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// Tokens may be packed.
    pub packing: Option<Packing>,
    /// Bytes may be compressed, after that.
    pub codec: Option<Codec>,
}

impl Form {
    /// Tokens as they are.
    pub const PLAIN: Form = Form { packing: None, codec: None };
}

/// How tokens are packed on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Into so many bits: a token that needs more is an error.
    Bits(u8),
    /// Into 16 bits if all tokens of the block fit them, else into as many as they need.
    Escape,
    /// Into 16 bits if all tokens of the block fit them, else not at all: for blocks that are
    /// compressed.
    EscapeWhole,
}

/// What a token that is refused does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Limit {
    /// A type.
    Type(Dtype),
    /// A number of bits.
    Bits(u8),
    /// The number of ids in the table of `remap`.
    Table(u32),
    /// The quantized type, for NaN and infinities.
    Quantized(Quant),
    /// What loss weights are.
    Finite,
}

impl Limit {
    /// A value as people write it. Those of floating point come as the bits of a `f32`.
    pub fn shown(&self, value: i128) -> Shown {
        let is_float = match self {
            Limit::Quantized(_) | Limit::Finite => true,
            Limit::Type(dtype) => dtype.is_float(),
            _ => false,
        };
        if is_float { Shown::Float(f32::from_bits(value as u32)) } else { Shown::Integer(value) }
    }
}

/// See [`Limit::shown`].
#[derive(Clone, Copy, Debug)]
pub enum Shown {
    /// A token.
    Integer(i128),
    /// A value.
    Float(f32),
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shown::Integer(value) => value.fmt(f),
            Shown::Float(value) => value.fmt(f),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Type(dtype) => write!(f, "it does not fit {dtype}"),
            Limit::Bits(bits) => write!(f, "it does not fit {bits} bits"),
            Limit::Table(ids) => write!(f, "the table of remap has {ids} ids"),
            Limit::Quantized(quant) => write!(f, "{quant} has no such value"),
            Limit::Finite => f.write_str("a loss weight is a finite number"),
        }
    }
}

/// The type of the data between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type {
    /// Type of the tokens.
    pub dtype: Dtype,
    /// What they are grouped into.
    pub shape: Shape,
}

impl Type {
    /// A file of tokens of this type.
    pub const fn file(dtype: Dtype) -> Type {
        Type { dtype, shape: Shape::File }
    }

    /// Bytes of one sample, if the data is in samples.
    pub fn sample_bytes(self) -> Option<u64> {
        let (rows, tokens, weighted) = match self.shape {
            Shape::File | Shape::Block | Shape::SummedBlock(_) => return None,
            Shape::Sample { tokens } | Shape::Batch { tokens, .. } => (1, tokens, false),
            Shape::Rows { rows, tokens, weighted }
            | Shape::RowsBatch { rows, tokens, weighted, .. } => (rows, tokens, weighted),
        };
        let weight = if weighted { Dtype::F32.bytes() } else { 0 };
        let of_token = u64::from(rows) * u64::from(self.dtype.bytes()) + u64::from(weight);
        Some(u64::from(tokens) * of_token)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = self.dtype;
        match self.shape {
            Shape::File => write!(f, "a file of {dtype}"),
            Shape::Block => write!(f, "blocks of {dtype}"),
            Shape::SummedBlock(Form { packing, codec }) => {
                let packed = if packing.is_some() { "packed " } else { "" };
                let compressed = if codec.is_some() { "compressed " } else { "" };
                write!(f, "{compressed}{packed}blocks of {dtype} with a checksum")
            }
            Shape::Sample { tokens } => write!(f, "samples of {tokens} {dtype}"),
            Shape::Rows { rows, tokens, weighted } => {
                write!(f, "{} of {tokens} {dtype}{}", Samples(rows), Weights(weighted))
            }
            Shape::Batch { samples, tokens } => {
                write!(f, "batches of {samples} samples of {tokens} {dtype}")
            }
            Shape::RowsBatch { samples, rows, tokens, weighted } => {
                let (of, weights) = (Samples(rows), Weights(weighted));
                write!(f, "batches of {samples} {of} of {tokens} {dtype}{weights}")
            }
        }
    }
}

/// What samples of so many rows are called.
struct Samples(u32);

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("samples"),
            2 => f.write_str("pairs"),
            3 => f.write_str("samples with positions"),
            _ => f.write_str("pairs with positions"),
        }
    }
}

/// What is said of loss weights.
struct Weights(bool);

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { " with loss weights" } else { "" })
    }
}

/// What an operation is called, and what it does to the type of the data.
trait Operation {
    /// The name used in messages.
    fn name(&self) -> &'static str;

    /// The output type for `input`; none if the operation is not defined for it.
    fn output(&self, input: Type) -> Option<Type>;
}

/// An operation over the bytes of a block ([`run()`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOp {
    /// Replaces every token by the entry of a table at its place (C5: one without an entry is
    /// refused).
    Remap {
        /// Entries of the table.
        ids: u32,
    },
    /// Maps every token by an action of the user, which keeps the type.
    Wasm,
    /// Converts every token to a smaller type (C5).
    Narrow {
        /// The type to convert to.
        to: Dtype,
        /// The id that tokens that do not fit become; without it they are refused.
        instead: Option<u32>,
    },
    /// Refuses tokens that do not fit so many bits: packing, where there is no wire.
    Fit {
        /// Bits of a token.
        bits: u8,
    },
    /// Converts every token to a larger type.
    Widen {
        /// The type to convert to.
        to: Dtype,
    },
    /// Replaces every row of floating-point values by codes and scales.
    Quantize {
        /// Type of the codes.
        to: Quant,
        /// Values of a row: of a sample.
        row: u32,
    },
    /// Undoes that, but for the rounding.
    Dequantize {
        /// Type of the codes.
        from: Quant,
        /// Values of a row.
        row: u32,
        /// Type of the values.
        to: Dtype,
    },
    /// Adds the CRC-32C of a block.
    Checksum,
    /// Packs tokens into fewer bits.
    Pack(Packing),
    /// Compresses the bytes of a block, unless that makes it no smaller or the stream slower.
    Compress(Compression),
    /// Undoes compression.
    Decompress(Codec),
    /// Undoes packing.
    Unpack(Packing),
    /// Compares the CRC-32C of a block.
    Verify,
}

/// An operation of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetOp {
    /// Reads blocks of a file.
    Read,
    /// An operation over what was read.
    Block(BlockOp),
}

/// An operation over samples. The reader carries it out while it copies them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleOp {
    /// Cuts blocks into samples.
    Window {
        /// Tokens of a sample.
        tokens: u32,
        /// Tokens that it shares with the sample before it.
        overlap: u32,
        /// Bytes of its scales, where it is delivered quantized; else 0.
        scales: u32,
    },
    /// Changes the order of the samples of a dataset.
    Shuffle(Shuffle),
    /// Draws samples from several datasets.
    Blend(Vec<Part>),
    /// Converts every token to a larger type.
    Widen {
        /// The type to convert to.
        to: Dtype,
    },
    /// Makes inputs and labels of each sample.
    Pairs {
        /// What labels beyond the document of their input become.
        ignore: Option<i64>,
        /// Which labels are delivered of datasets that have targets.
        labels: Option<Labels>,
    },
    /// Adds the position of each input token in its document, and the document's number.
    Positions,
    /// Adds the weight of each token in the loss, or of each label.
    LossWeights(LossWeights),
    /// Lays documents into samples.
    Pack(Pack),
    /// Joins samples into batches.
    Batch {
        /// Samples of a batch.
        samples: u32,
    },
}

impl Operation for BlockOp {
    fn name(&self) -> &'static str {
        match self {
            BlockOp::Remap { .. } => "remap",
            BlockOp::Wasm => "wasm",
            BlockOp::Narrow { .. } => "narrow",
            BlockOp::Fit { .. } => "fit",
            BlockOp::Widen { .. } => "widen",
            BlockOp::Quantize { .. } => "quantize",
            BlockOp::Dequantize { .. } => "dequantize",
            BlockOp::Checksum => "checksum",
            BlockOp::Pack(_) => "pack",
            BlockOp::Compress(_) => "compress",
            BlockOp::Decompress(_) => "decompress",
            BlockOp::Unpack(_) => "unpack",
            BlockOp::Verify => "verify",
        }
    }

    fn output(&self, Type { dtype, shape }: Type) -> Option<Type> {
        match (*self, shape) {
            (BlockOp::Remap { ids: 1.. }, Shape::Block) if dtype.is_token() => {
                Some(Type { dtype, shape })
            }
            (BlockOp::Wasm, Shape::Block) if dtype.is_token() => Some(Type { dtype, shape }),
            (BlockOp::Narrow { to, instead }, Shape::Block) if can_narrow(dtype, to) => {
                let fits = instead.is_none_or(|id| i128::from(id) <= to.range().1);
                fits.then_some(Type { dtype: to, shape })
            }
            (BlockOp::Fit { bits }, Shape::Block) if can_pack(dtype, bits.into()) => {
                Some(Type { dtype, shape })
            }
            (BlockOp::Widen { to: Dtype::U32 }, Shape::Block) if dtype == Dtype::U16 => {
                Some(Type { dtype: Dtype::U32, shape })
            }
            (BlockOp::Quantize { row, .. }, Shape::Block) if can_quantize(dtype, row as usize) => {
                Some(Type { dtype: Dtype::U8, shape })
            }
            (BlockOp::Dequantize { row, to, .. }, Shape::Block)
                if dtype == Dtype::U8 && can_quantize(to, row as usize) =>
            {
                Some(Type { dtype: to, shape })
            }
            (BlockOp::Checksum, Shape::Block) => {
                Some(Type { dtype, shape: Shape::SummedBlock(Form::PLAIN) })
            }
            (BlockOp::Verify, Shape::SummedBlock(Form::PLAIN)) => {
                Some(Type { dtype, shape: Shape::Block })
            }
            (op, Shape::SummedBlock(form)) => {
                let form = op.output_form(dtype, form)?;
                Some(Type { dtype, shape: Shape::SummedBlock(form) })
            }
            _ => None,
        }
    }
}

impl BlockOp {
    /// The form that an operation between checksum and verification gives; none if it is not
    /// defined.
    fn output_form(self, dtype: Dtype, form: Form) -> Option<Form> {
        let packs = |packing| match packing {
            Packing::Bits(bits) => can_pack(dtype, bits.into()),
            Packing::Escape | Packing::EscapeWhole => dtype == Dtype::U32,
        };
        match (self, form) {
            (BlockOp::Pack(packing), Form::PLAIN) if packs(packing) => {
                Some(Form { packing: Some(packing), codec: None })
            }
            (BlockOp::Compress(compression), Form { packing, codec: None }) => {
                Some(Form { packing, codec: Some(compression.codec) })
            }
            (BlockOp::Decompress(codec), Form { packing, codec: Some(given) })
                if codec == given =>
            {
                Some(Form { packing, codec: None })
            }
            (BlockOp::Unpack(packing), Form { packing: Some(given), codec: None })
                if packing == given =>
            {
                Some(Form::PLAIN)
            }
            _ => None,
        }
    }
}

/// As printed in a plan.
impl fmt::Display for BlockOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockOp::Narrow { to, instead } => {
                let overflow = instead.map_or(Overflow::Refuse, Overflow::Saturate);
                Narrow { to: *to, overflow }.fmt(f)
            }
            BlockOp::Fit { bits }
            | BlockOp::Pack(Packing::Bits(bits))
            | BlockOp::Unpack(Packing::Bits(bits)) => write!(f, "bitpack({bits})"),
            BlockOp::Pack(_) | BlockOp::Unpack(_) => {
                Narrow { to: Dtype::U16, overflow: Overflow::Escape }.fmt(f)
            }
            BlockOp::Compress(compression) => compression.fmt(f),
            BlockOp::Decompress(codec) => write!(f, "compress({codec})"),
            BlockOp::Widen { to } => write!(f, "widen({to})"),
            BlockOp::Quantize { to, .. } | BlockOp::Dequantize { from: to, .. } => {
                write!(f, "quantize({to})")
            }
            BlockOp::Remap { .. } | BlockOp::Wasm | BlockOp::Checksum | BlockOp::Verify => {
                f.write_str(self.name())
            }
        }
    }
}

impl Operation for TargetOp {
    fn name(&self) -> &'static str {
        match self {
            TargetOp::Read => "read",
            TargetOp::Block(op) => op.name(),
        }
    }

    fn output(&self, input: Type) -> Option<Type> {
        let Type { dtype, shape } = input;
        match self {
            TargetOp::Read => (shape == Shape::File && dtype.is_streamed())
                .then_some(Type { dtype, shape: Shape::Block }),
            TargetOp::Block(op) => op.output(input),
        }
    }
}

impl Operation for SampleOp {
    fn name(&self) -> &'static str {
        match self {
            SampleOp::Window { .. } => "window",
            SampleOp::Shuffle(_) => "shuffle",
            SampleOp::Blend(_) => "blend",
            SampleOp::Widen { .. } => "widen",
            SampleOp::Pairs { .. } => "pairs",
            SampleOp::Positions => "positions",
            SampleOp::LossWeights(_) => "loss_weights",
            SampleOp::Pack(_) => "pack",
            SampleOp::Batch { .. } => "batch",
        }
    }

    fn output(&self, input: Type) -> Option<Type> {
        let Type { dtype, shape } = input;
        match (self, shape) {
            (SampleOp::Window { tokens, scales, .. }, Shape::Block) => {
                Some(Type { dtype, shape: Shape::Sample { tokens: tokens.checked_add(*scales)? } })
            }
            (
                SampleOp::Pack(_) | SampleOp::Shuffle(_) | SampleOp::Blend(_),
                Shape::Sample { .. },
            ) => Some(input),
            (SampleOp::Widen { to }, Shape::Sample { .. }) if can_widen(dtype, *to) => {
                Some(Type { dtype: *to, shape })
            }
            (SampleOp::Pairs { .. }, Shape::Sample { tokens: tokens @ 2.. })
                if dtype != Dtype::U8 =>
            {
                let shape = Shape::Rows { rows: 2, tokens: tokens - 1, weighted: false };
                Some(Type { dtype, shape })
            }
            (SampleOp::Positions, Shape::Sample { tokens }) => {
                Some(Type { dtype, shape: Shape::Rows { rows: 3, tokens, weighted: false } })
            }
            (SampleOp::Positions, Shape::Rows { rows, tokens, weighted }) => {
                Some(Type { dtype, shape: Shape::Rows { rows: rows + 2, tokens, weighted } })
            }
            (SampleOp::LossWeights(_), Shape::Sample { tokens }) => {
                Some(Type { dtype, shape: Shape::Rows { rows: 1, tokens, weighted: true } })
            }
            (SampleOp::LossWeights(_), Shape::Rows { rows, tokens, weighted: false }) => {
                Some(Type { dtype, shape: Shape::Rows { rows, tokens, weighted: true } })
            }
            (SampleOp::Batch { samples }, Shape::Sample { tokens }) => {
                Some(Type { dtype, shape: Shape::Batch { samples: *samples, tokens } })
            }
            (SampleOp::Batch { samples }, Shape::Rows { rows, tokens, weighted }) => {
                let shape = Shape::RowsBatch { samples: *samples, rows, tokens, weighted };
                Some(Type { dtype, shape })
            }
            _ => None,
        }
    }
}

/// As printed in a plan.
impl fmt::Display for SampleOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SampleOp::Window { tokens, overlap, .. } => {
                WindowText { tokens: *tokens, overlap: *overlap }.fmt(f)
            }
            SampleOp::Shuffle(shuffle) => shuffle.fmt(f),
            SampleOp::Blend(parts) => BlendText(parts).fmt(f),
            SampleOp::Widen { to } => write!(f, "widen({to})"),
            SampleOp::Pairs { ignore, labels } => write_pairs(f, *ignore, *labels),
            SampleOp::Positions => f.write_str("positions"),
            SampleOp::LossWeights(weights) => weights.fmt(f),
            SampleOp::Pack(pack) => pack.fmt(f),
            SampleOp::Batch { samples } => write!(f, "batch({samples})"),
        }
    }
}

/// A step of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage<O> {
    /// Its operation.
    pub op: O,
    /// Input type.
    pub input: Type,
    /// Output type.
    pub output: Type,
    /// Where it runs.
    pub place: Place,
}

/// Why stages cannot be run. Positions count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StageError {
    /// There are no stages.
    #[error("no stage is given")]
    Empty,
    /// More than [`MAX_TARGET_STAGES`].
    #[error("{count} stages are given, at most {MAX_TARGET_STAGES} can be")]
    TooMany {
        /// How many.
        count: usize,
    },
    /// A kind of stage, or a type of tokens, that this version does not have.
    #[error("stage {position} is of an unknown kind, or names an unknown type")]
    Unknown {
        /// Which stage.
        position: usize,
    },
    /// A stage claims another input than the output of the one before it.
    #[error("stage {position}, {stage}, takes {takes}, but is given {given}")]
    Join {
        /// Which stage.
        position: usize,
        /// Its name.
        stage: &'static str,
        /// Its claimed input.
        takes: Type,
        /// The output of the stage before it.
        given: Type,
    },
    /// A stage that is not defined for its input.
    #[error("stage {position}, {stage}, is not defined for {input}")]
    Undefined {
        /// Which stage.
        position: usize,
        /// Its name.
        stage: &'static str,
        /// Its input.
        input: Type,
    },
    /// The output of a target's last stage cannot cross the wire.
    #[error("the last stage gives {output}; only blocks with a checksum cross the wire")]
    Unsummed {
        /// The output.
        output: Type,
    },
}

impl StageError {
    /// What to do about it.
    pub const fn hint(&self) -> &'static str {
        match self {
            StageError::Empty | StageError::Unknown { .. } => {
                "run the same version of dquant at both ends"
            }
            _ => "`dquant cat` and `dquant dpu` send lists of stages that a target takes",
        }
    }
}

/// Chains stages, all in one place, starting with the input of the first.
fn chain<O: Operation>(
    input: Type,
    place: Place,
    ops: impl IntoIterator<Item = O>,
) -> Result<Vec<Stage<O>>, StageError> {
    let mut given = input;
    let stages = (1..).zip(ops).map(|(position, op)| {
        let input = given;
        let stage = op.name();
        given = op.output(input).ok_or(StageError::Undefined { position, stage, input })?;
        Ok(Stage { op, input, output: given, place })
    });
    stages.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
