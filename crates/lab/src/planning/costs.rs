//! What stages cost: figures measured once, or measured now on blocks of the data.
//!
//! The figures are those of docs/plan.md and docs/benchmarks.md, for 10^9 tokens: blocks that are
//! hot in the cache, and processes on two busy cores. They tell which stage matters, not what a
//! certain machine needs.

use std::time::Instant;

use host::kernels;
use xio::dataset::Dtype;
use xio::kernel::quantize::quantized_bytes;
use xio::kernel::{Codec, Compression, Kernels, TokenMap};
use xio::order::Fit;
use xio::stage::{
    BlockError, BlockOp, BlockStages, Packing, Received, SCRATCH_BYTES, Stage, Tools, run,
};

use super::PlanError;

/// Reading from the page cache, for each byte of a token.
pub const READ_S_PER_BYTE: f64 = 0.13;

/// Sending or receiving with RoCE in software, for each byte of a token.
pub const NETWORK_S_PER_BYTE: f64 = 0.42;

/// The trainer's side of the ring.
pub const RING_S: f64 = 0.05;

/// Finding the next sample: 100 ns.
pub const ORDER_S_PER_SAMPLE: f64 = 100.0;

/// Copying into the ring, for each byte of a token.
const COPY_S_PER_BYTE: f64 = 0.1;

/// Quantizing `f32`.
const QUANTIZE_S: f64 = 0.39;

/// Writing positions and numbers of documents, beside the copy, for 10^9 of both.
pub const POSITIONS_S: f64 = 0.7;

/// Laying documents out into samples and gathering them, for 10^9 tokens of samples, padding
/// included.
pub const fn pack(fit: Fit) -> f64 {
    match fit {
        Fit::Best => 0.8,
        Fit::First => 0.9,
        Fit::Single => 1.4,
    }
}

const CRC_S_PER_BYTE: f64 = 0.035;

/// Bytes that compression leaves of `u16` tokens of English text, CPU seconds to compress them and
/// to undo that.
const CODECS: [(Codec, i32, f64, f64, f64); 4] = [
    (Codec::Lz4, 0, 0.535, 5.0, 0.72),
    (Codec::Zstd, -1, 0.475, 6.4, 1.1),
    (Codec::Zstd, 1, 0.435, 7.1, 1.6),
    (Codec::Zstd, 3, 0.39, 15.7, 3.2),
];

/// Passes of a measurement, of which the fastest counts.
const PASSES: usize = 9;

/// The cost of a stage.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Bytes of a token after it.
    pub bytes_out: f64,
    /// CPU seconds for 10^9 tokens; none if only a measurement can tell.
    pub cpu_s: Option<f64>,
}

/// Where costs come from.
#[derive(Debug)]
pub enum Costs {
    /// The figures of the documents.
    Documented,
    /// Measured on a block of each dataset, with the table of `remap` and the module of `wasm`.
    Measured {
        /// Tokens as stored, one block for each dataset.
        blocks: Vec<Vec<u8>>,
        /// The table of `remap`.
        table: Vec<u32>,
        /// The module of `wasm`.
        action: Option<std::sync::Arc<dyn TokenMap>>,
    },
}

impl Costs {
    /// The cost of each stage over the blocks of a dataset.
    ///
    /// # Errors
    /// When a token of the block cannot be delivered.
    pub fn of(&self, dataset: usize, stages: &BlockStages) -> Result<Vec<Cost>, PlanError> {
        let Costs::Measured { blocks, table, action } = self else {
            return Ok(documented(stages));
        };
        let block = blocks.get(dataset).map_or(&[][..], Vec::as_slice);
        measured(stages, block, table, action.as_deref())
    }

    /// The cost of writing so many bytes of a token into the ring.
    pub fn copy(&self, bytes: f64) -> f64 {
        bytes * COPY_S_PER_BYTE
    }

    /// The cost of widening tokens on their way to the ring.
    pub fn widen(&self, from: Dtype, to: Dtype) -> f64 {
        match self {
            Costs::Documented => 0.02 * f64::from(to.bytes()),
            Costs::Measured { .. } => {
                let tokens = (8 << 10) / to.bytes() as usize;
                let source = vec![1; tokens * from.bytes() as usize];
                let mut target = vec![0; tokens * to.bytes() as usize];
                let widen = kernels::best().0.widen;
                let pass = || {
                    let begun = Instant::now();
                    (0..64).for_each(|_| {
                        widen(std::hint::black_box(&source), from, to, &mut target);
                        std::hint::black_box(&mut target);
                    });
                    begun.elapsed().as_secs_f64()
                };
                least(pass) * 1e9 / (64 * tokens) as f64
            }
        }
    }
}

fn least(mut pass: impl FnMut() -> f64) -> f64 {
    (0..PASSES).map(|_| pass()).fold(f64::MAX, f64::min)
}

/// The documented cost of each stage over blocks.
pub fn documented(stages: &BlockStages) -> Vec<Cost> {
    let mut bytes = f64::from(stages.target().stored().bytes());
    let mut plain = bytes;
    let cost = |stage: &Stage<BlockOp>| {
        let cost = documented_stage(stage, bytes, plain);
        bytes = cost.bytes_out;
        if !matches!(stage.op, BlockOp::Compress(_)) {
            plain = bytes;
        }
        cost
    };
    stages.over_blocks().map(cost).collect()
}

/// The documented cost of a stage; `plain` are the bytes of a token before compression.
fn documented_stage(stage: &Stage<BlockOp>, bytes: f64, plain: f64) -> Cost {
    let width = |dtype: Dtype| f64::from(dtype.bytes());
    let (bytes_out, cpu_s) = match stage.op {
        BlockOp::Narrow { to, instead: None } => (width(to), 0.015 * bytes),
        BlockOp::Narrow { to, instead: Some(_) } => (width(to), 0.023 * bytes),
        BlockOp::Remap { .. } => (bytes, 0.38),
        BlockOp::Fit { .. } => (bytes, 0.05),
        BlockOp::Widen { to } => (width(to), 0.11),
        BlockOp::Checksum | BlockOp::Verify => (bytes, CRC_S_PER_BYTE * bytes),
        BlockOp::Pack(Packing::Bits(bits)) => (f64::from(bits) / 8.0, 0.17),
        BlockOp::Pack(_) => (2.0, 0.10),
        BlockOp::Unpack(Packing::Bits(_)) => (width(stage.output.dtype), 0.29),
        BlockOp::Unpack(_) => (width(stage.output.dtype), 0.11),
        BlockOp::Compress(how) => {
            let (left, compress, _) = codec(&how);
            (bytes * left, compress * bytes / 2.0)
        }
        BlockOp::Decompress(kind) => {
            let level = if kind == Codec::Zstd { 1 } else { 0 };
            let undo = Compression::new(kind, level, true).map_or(0.0, |how| codec(&how).2);
            (plain, undo * plain / 2.0)
        }
        BlockOp::Quantize { row, .. } => {
            (quantized_bytes(row as usize) as f64 / f64::from(row.max(1)), QUANTIZE_S)
        }
        BlockOp::Dequantize { to, .. } => (width(to), dequantize(to)),
        // What a module does is its own.
        _ => return Cost { bytes_out: bytes, cpu_s: None },
    };
    Cost { bytes_out, cpu_s: Some(cpu_s) }
}

/// Undoing quantization to a type of floating point.
fn dequantize(to: Dtype) -> f64 {
    match to {
        Dtype::F32 => 0.46,
        Dtype::Bf16 => 0.60,
        _ => 0.76,
    }
}

/// What a codec leaves of a byte, and its costs, at the nearest level that was measured.
fn codec(how: &Compression) -> (f64, f64, f64) {
    let same = CODECS.iter().filter(|(codec, ..)| *codec == how.codec);
    let nearest = same.min_by_key(|(_, level, ..)| level.abs_diff(how.level));
    nearest.map_or((1.0, 0.0, 0.0), |(_, _, left, make, undo)| (*left, *make, *undo))
}

/// Runs the stages one after the other over a block, each several times.
fn measured(
    stages: &BlockStages,
    stored: &[u8],
    table: &[u32],
    action: Option<&dyn TokenMap>,
) -> Result<Vec<Cost>, PlanError> {
    let best: Kernels = kernels::best().0;
    let dtype = stages.target().stored();
    let tokens = stored.len() / dtype.bytes() as usize;
    let room = stored.len().max(tokens * stages.buffered_bytes() as usize);
    let (mut input, mut received) = (stored.to_vec(), Received::stored(stored.len(), dtype));
    input.resize(room, 0);
    let mut scratch = vec![0; SCRATCH_BYTES.max(room)];
    let (mut costs, mut block) = (Vec::new(), input.clone());
    for stage in stages.over_blocks() {
        let (mut seconds, mut after) = (f64::MAX, received);
        for _ in 0..PASSES {
            block.copy_from_slice(&input);
            let (kernels, scratch) = (&best, scratch.as_mut_slice());
            let mut tools =
                Tools { kernels, scratch, table, action, first_token: 0, compresses: true };
            let begun = Instant::now();
            let ran = run(std::slice::from_ref(stage), &mut block, received, &mut tools);
            seconds = seconds.min(begun.elapsed().as_secs_f64());
            after = ran.map_err(|error| refused(stage, &error))?.block;
        }
        input.copy_from_slice(&block);
        received = after;
        let (count, bytes) = (tokens.max(1) as f64, received.bytes as f64);
        let bytes_out = bytes / count;
        costs.push(Cost { bytes_out, cpu_s: Some(seconds * 1e9 / count) });
    }
    Ok(costs)
}

fn refused(stage: &Stage<BlockOp>, error: &BlockError) -> PlanError {
    let why = match error {
        BlockError::Overflow { value, .. } => match stage.limit(*value) {
            Some(limit) => format!("a token is {value}: {limit}"),
            None => error.to_string(),
        },
        other => other.to_string(),
    };
    PlanError::Token { stage: name_of(&stage.op), why }
}

/// What a stage over blocks is called: the action of the plan, or what undoes it.
pub fn name_of(op: &BlockOp) -> String {
    match op {
        BlockOp::Decompress(_) | BlockOp::Unpack(_) | BlockOp::Dequantize { .. } => {
            format!("undo {op}")
        }
        _ => op.to_string(),
    }
}
