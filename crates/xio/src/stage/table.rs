//! The table of a pipeline: where each action of the plan runs, and the bytes that go in and out.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::{BlockOp, Branch, Packing, Pipeline, Place, SampleOp, Stage, Type};
use crate::dataset::Dtype;
use crate::kernel::quantize::quantized_bytes;

/// One action. Bytes are those of [`Table::samples`] samples of the whole stream, including
/// datasets that skip the action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The action as printed in a plan.
    pub action: String,
    /// Where it runs.
    pub place: Place,
    /// The reason for the place.
    pub why: &'static str,
    /// Bytes that go in.
    pub bytes_in: u64,
    /// Bytes that come out.
    pub bytes_out: u64,
}

/// The stages that are actions of the plan, in the order of the data flow. An action that compiles
/// to no stage, such as `narrow(u16)` over files of `u16`, has no row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Type of the delivered tokens.
    pub dtype: Dtype,
    /// The actions.
    pub rows: Vec<Row>,
    /// The number of samples for all byte counts: one period of the blend, in which the ratio is
    /// exact; of the first phase, where there are several.
    pub samples: u64,
    /// Bytes read from disks.
    pub disk_bytes: u64,
    /// Bytes that leave the targets.
    pub wire_bytes: u64,
    /// Bytes delivered to the trainer.
    pub delivered_bytes: u64,
}

/// Whether it is at the target, and which operations it is.
type Step = (bool, fn(&BlockOp) -> bool);

/// The operations over blocks that have rows, in the order of the data flow on either side of the
/// wire.
const STEPS: [Step; 14] = [
    (true, |op| matches!(op, BlockOp::Remap { .. })),
    (true, |op| matches!(op, BlockOp::Wasm)),
    (true, |op| matches!(op, BlockOp::Narrow { .. })),
    (true, |op| matches!(op, BlockOp::Quantize { .. })),
    (true, |op| matches!(op, BlockOp::Pack(_))),
    (true, |op| matches!(op, BlockOp::Compress(_))),
    (false, |op| matches!(op, BlockOp::Remap { .. })),
    (false, |op| matches!(op, BlockOp::Wasm)),
    (false, |op| matches!(op, BlockOp::Unpack(_))),
    (false, |op| matches!(op, BlockOp::Narrow { .. })),
    (false, |op| matches!(op, BlockOp::Fit { .. })),
    (false, |op| matches!(op, BlockOp::Widen { .. })),
    (false, |op| matches!(op, BlockOp::Quantize { .. })),
    (false, |op| matches!(op, BlockOp::Dequantize { .. })),
];

/// Bits of a stride of tokens after an operation over blocks. What compression saves depends on the
/// data, so it counts as nothing; so does what escapes.
fn bits_after(stage: &Stage<BlockOp>, bits: u64, stride: u64) -> u64 {
    match stage.op {
        BlockOp::Narrow { to, .. } | BlockOp::Widen { to } | BlockOp::Dequantize { to, .. } => {
            stride * u64::from(8 * to.bytes())
        }
        BlockOp::Pack(Packing::Bits(bits)) => stride * u64::from(bits),
        BlockOp::Pack(Packing::Escape | Packing::EscapeWhole) => stride * 16,
        BlockOp::Unpack(_) => stride * u64::from(8 * stage.output.dtype.bytes()),
        // The row is the sample: there is no overlap.
        BlockOp::Quantize { row, .. } => 8 * quantized_bytes(row as usize) as u64,
        _ => bits,
    }
}

impl Pipeline {
    /// Where each action runs.
    pub fn table(&self) -> Table {
        // For each branch, bits of a stride of tokens at this point of the data flow.
        let stride = u64::from(self.window_tokens() - self.overlap_tokens());
        let stored =
            |branch: &Branch| stride * u64::from(8 * branch.blocks().target().stored().bytes());
        let mut bits: Vec<u64> = self.branches().iter().map(stored).collect();
        let tokens_bytes = self.bytes_of(&bits);

        let (mut rows, mut wire_bytes) = (Vec::new(), tokens_bytes);
        for (at_target, is_step) in STEPS {
            let (bytes_in, mut found) = (self.bytes_of(&bits), None);
            for (branch, bits) in self.branches().iter().zip(&mut bits) {
                let mut stages = branch.blocks().over_blocks();
                let stage = stages.find(|stage| {
                    is_step(&stage.op) && (stage.place == Place::Target) == at_target
                });
                if let Some(stage) = stage {
                    (*bits, found) = (bits_after(stage, *bits, stride), Some(stage));
                }
            }
            let bytes_out = self.bytes_of(&bits);
            if let Some(Stage { op, place, .. }) = found {
                let (action, why) = (op.to_string(), why_block(op, *place, bytes_in, bytes_out));
                rows.push(Row { action, place: *place, why, bytes_in, bytes_out });
            }
            if at_target {
                wire_bytes = bytes_out;
            }
        }
        // The branches differ only in their stages over blocks.
        let block_bytes = self.bytes_of(&bits);
        let samples = self.branches().iter().map(|branch| u64::from(branch.weight())).sum();
        let of = |data: Type| data.sample_bytes().map_or(block_bytes, |bytes| bytes * samples);
        let over_samples = self.branches().iter().take(1).flat_map(Branch::sample_stages);
        rows.extend(over_samples.chain(self.joint()).map(|stage| Row {
            action: stage.op.to_string(),
            place: stage.place,
            why: why(&stage.op, stage.place),
            bytes_in: of(stage.input),
            bytes_out: of(stage.output),
        }));
        let delivered_bytes = of(self.output());
        // Loss weights are read and sent as they are, beside the tokens.
        let weight = self.loss_weights().map_or(0, |stages| u64::from(stages.arriving().bytes()));
        let weights_bytes = samples * stride * weight;
        let disk_bytes = tokens_bytes + weights_bytes;
        wire_bytes += weights_bytes;
        Table { dtype: self.dtype(), rows, samples, disk_bytes, wire_bytes, delivered_bytes }
    }

    /// Bytes of a period of the blend, with so many bits for a stride of each branch.
    fn bytes_of(&self, bits: &[u64]) -> u64 {
        let branches = self.branches().iter().zip(bits);
        let bits: u64 = branches.map(|(branch, bits)| u64::from(branch.weight()) * bits).sum();
        bits.div_ceil(8)
    }
}

/// The reason for the place of a stage over blocks.
fn why_block(op: &BlockOp, place: Place, bytes_in: u64, bytes_out: u64) -> &'static str {
    match op {
        BlockOp::Remap { .. } if place == Place::Target => "its table lies there",
        BlockOp::Wasm if place == Place::Target => "its module lies there",
        BlockOp::Pack(Packing::Bits(_)) => "fewer bits cross the wire",
        BlockOp::Pack(_) => "fewer bits cross the wire, where all tokens of a block fit them",
        BlockOp::Compress(_) => "saves what the data allows, while that makes the stream faster",
        BlockOp::Unpack(_) => "undone behind the wire",
        BlockOp::Fit { .. } => "checks the range: nothing is packed",
        BlockOp::Quantize { .. } if place == Place::Target => "fewer bytes cross the wire",
        BlockOp::Quantize { .. } => "rounds the values: there is no wire",
        _ if place == Place::Host => OFFLOAD_IS_OFF,
        BlockOp::Narrow { .. } if place == Place::Target && bytes_out < bytes_in => {
            "shrinks bytes: done before they cross the wire"
        }
        BlockOp::Narrow { .. } if place == Place::Target => {
            "saves no bytes: checks the range before the wire"
        }
        _ => "adds bytes: done behind the wire",
    }
}

/// The reason for the place of a stage over samples.
fn why(op: &SampleOp, place: Place) -> &'static str {
    match op {
        _ if place == Place::Host => OFFLOAD_IS_OFF,
        SampleOp::Window { .. } => "cuts blocks into samples",
        SampleOp::Shuffle(_) => "needs several blocks at once",
        SampleOp::Blend(_) => "needs several files at once",
        SampleOp::Widen { .. } => "adds bytes: done where samples are copied",
        SampleOp::Pairs { .. } | SampleOp::Positions | SampleOp::LossWeights(_) => {
            "adds bytes: done where samples are copied"
        }
        SampleOp::Pack(_) => "pieces of a block are joined where samples are copied",
        SampleOp::Batch { .. } => "fills one slot of the host's ring",
    }
}

const OFFLOAD_IS_OFF: &str = "offload is off";

/// Longest action text in the table; a longer one is cut.
const ACTION_WIDTH: usize = 40;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = |text: &str| match text.chars().count() > ACTION_WIDTH {
            true => text.chars().take(ACTION_WIDTH - 1).chain(['…']).collect(),
            false => String::from(text),
        };
        let actions: Vec<String> = self.rows.iter().map(|row| cut(&row.action)).collect();
        let width = actions.iter().map(|text| text.chars().count()).max().unwrap_or(0).max(6);
        writeln!(f, "{:width$}  {:6}  {:>10}  {:>10}  why", "action", "site", "B/sample", "out")?;
        for (action, row) in actions.iter().zip(&self.rows) {
            let (bytes_in, bytes_out) =
                (self.per_sample(row.bytes_in), self.per_sample(row.bytes_out));
            let (place, why) = (row.place, row.why);
            writeln!(f, "{action:width$}  {place:6}  {bytes_in:>10}  {bytes_out:>10}  {why}")?;
        }
        let (disk, wire) = (self.per_sample(self.disk_bytes), self.per_sample(self.wire_bytes));
        let saved = 100 - self.wire_bytes * 100 / self.disk_bytes.max(1);
        write!(
            f,
            "disk {disk} B/sample, wire {wire} B/sample ({saved} % saved), {} delivered",
            self.dtype
        )
    }
}

impl Table {
    /// Mean bytes of a sample, with a tenth if it is not whole.
    fn per_sample(&self, bytes: u64) -> String {
        let samples = self.samples.max(1);
        match bytes % samples {
            0 => format!("{}", bytes / samples),
            rest => format!("{}.{}", bytes / samples, rest * 10 / samples),
        }
    }
}
