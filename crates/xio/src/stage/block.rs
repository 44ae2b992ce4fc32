//! The stages of a dataset's blocks: the list that a session agrees on, and which stages run on
//! which side of the wire.

use alloc::vec::Vec;

use super::{
    BlockOp, Form, Limit, Operation, Packing, Place, Shape, Stage, StageError, TargetOp, Type,
    chain,
};
use crate::dataset::Dtype;
use crate::kernel::quantize::{exceeds_f16, quantized_bytes};
use crate::kernel::{Codec, Compression, Quant, can_narrow};

/// Most stages that a target runs over a block.
pub const MAX_TARGET_STAGES: usize = 8;

/// The stages of a target for every block of a dataset: a chain from the file to the wire. It
/// begins with the read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStages {
    over_blocks: Vec<Stage<BlockOp>>,
    stored: Dtype,
    on_wire: Dtype,
    form: Form,
}

impl TargetStages {
    /// Checks a list from another process, in which each stage has its claimed input type, for a
    /// file of `stored` tokens.
    ///
    /// # Errors
    /// When the list is empty or too long, does not start from such a file, does not form a chain,
    /// or does not end in blocks with a checksum.
    pub fn new(stored: Dtype, claimed: Vec<(TargetOp, Type)>) -> Result<TargetStages, StageError> {
        match claimed.len() {
            0 => return Err(StageError::Empty),
            1..=MAX_TARGET_STAGES => {}
            count => return Err(StageError::TooMany { count }),
        }
        TargetStages::of(stored, claimed.into_iter().map(|(op, takes)| (op, Some(takes))))
    }

    /// Chains `ops`, some of which may claim their input type.
    fn of(
        stored: Dtype,
        ops: impl IntoIterator<Item = (TargetOp, Option<Type>)>,
    ) -> Result<TargetStages, StageError> {
        let (mut over_blocks, mut given) = (Vec::new(), Type::file(stored));
        for (position, (op, takes)) in (1..).zip(ops) {
            let (input, stage) = (given, op.name());
            if let Some(takes) = takes.filter(|takes| *takes != given) {
                return Err(StageError::Join { position, stage, takes, given });
            }
            given = op.output(input).ok_or(StageError::Undefined { position, stage, input })?;
            if let TargetOp::Block(op) = op {
                over_blocks.push(Stage { op, input, output: given, place: Place::Target });
            }
        }
        match given.shape {
            Shape::SummedBlock(form) => {
                Ok(TargetStages { over_blocks, stored, on_wire: given.dtype, form })
            }
            _ => Err(StageError::Unsummed { output: given }),
        }
    }

    /// The stages after the read, in order.
    pub fn over_blocks(&self) -> &[Stage<BlockOp>] {
        &self.over_blocks
    }

    /// Type of the tokens in the file.
    pub fn stored(&self) -> Dtype {
        self.stored
    }

    /// Type of the tokens on the wire.
    pub fn on_wire(&self) -> Dtype {
        self.on_wire
    }

    /// The form of the blocks on the wire.
    pub fn form(&self) -> Form {
        self.form
    }

    /// How blocks are compressed, if they are.
    pub fn compression(&self) -> Option<Compression> {
        self.over_blocks.iter().find_map(|stage| match stage.op {
            BlockOp::Compress(compression) => Some(compression),
            _ => None,
        })
    }

    /// Whether tokens are mapped by an action of the user.
    pub fn has_user_action(&self) -> bool {
        self.over_blocks.iter().any(|stage| stage.op == BlockOp::Wasm)
    }

    /// Values of a row that is quantized, if they are.
    fn quantized_row(&self) -> Option<u32> {
        self.over_blocks.iter().find_map(|stage| match stage.op {
            BlockOp::Quantize { row, .. } => Some(row),
            _ => None,
        })
    }

    /// Entries of the table that tokens are replaced by, if they are.
    pub fn table_ids(&self) -> Option<u32> {
        self.over_blocks.iter().find_map(|stage| match stage.op {
            BlockOp::Remap { ids } => Some(ids),
            _ => None,
        })
    }
}

/// What a plan asks for the blocks of its datasets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlan {
    /// Type of the tokens after all stages.
    pub deliver: Dtype,
    /// Entries of the table that tokens are replaced by.
    pub remap: Option<u32>,
    /// Whether tokens are mapped by an action of the user.
    pub wasm: bool,
    /// The id that tokens that do not fit become.
    pub instead: Option<u32>,
    /// How tokens are packed on the wire.
    pub packing: Option<Packing>,
    /// How blocks are compressed on the wire.
    pub compression: Option<Compression>,
    /// Type of the codes that values are quantized to, and values of a row.
    pub quantize: Option<(Quant, u32)>,
}

impl BlockPlan {
    /// Tokens of this type, and nothing else.
    pub const fn plain(deliver: Dtype) -> BlockPlan {
        BlockPlan {
            deliver,
            remap: None,
            wasm: false,
            instead: None,
            packing: None,
            compression: None,
            quantize: None,
        }
    }

    fn quantize(&self) -> Option<BlockOp> {
        self.quantize.map(|(to, row)| BlockOp::Quantize { to, row })
    }

    /// Undoes that, unless codes and scales are delivered.
    fn dequantize(&self) -> Option<BlockOp> {
        let (from, row) = self.quantize.filter(|_| self.deliver.is_float())?;
        Some(BlockOp::Dequantize { from, row, to: self.deliver })
    }

    fn remap(&self) -> Option<BlockOp> {
        self.remap.map(|ids| BlockOp::Remap { ids })
    }

    fn wasm(&self) -> Option<BlockOp> {
        self.wasm.then_some(BlockOp::Wasm)
    }

    /// The conversion of `stored` tokens; none if there is nothing to convert, or if they become
    /// larger.
    fn narrow(&self, stored: Dtype) -> Option<BlockOp> {
        let (to, instead) = (self.deliver, self.instead);
        let narrows = stored != to && !self.widens(stored) && self.quantize.is_none();
        narrows.then_some(BlockOp::Narrow { to, instead })
    }

    /// Blocks of an escaping plan are delivered in a type that some files may be smaller than.
    fn widens(&self, stored: Dtype) -> bool {
        self.escapes() && !can_narrow(stored, self.deliver)
    }

    fn escapes(&self) -> bool {
        matches!(self.packing, Some(Packing::Escape | Packing::EscapeWhole))
    }

    /// The range check of packing, for where nothing is packed.
    fn fit(&self) -> Option<BlockOp> {
        match self.packing {
            Some(Packing::Bits(bits)) => Some(BlockOp::Fit { bits }),
            _ => None,
        }
    }

    fn widen(&self, stored: Dtype) -> Option<BlockOp> {
        self.widens(stored).then_some(BlockOp::Widen { to: self.deliver })
    }
}

/// The stages of a dataset's blocks on both sides of the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockStages {
    target: TargetStages,
    reader: Vec<Stage<BlockOp>>,
    output: Type,
}

impl BlockStages {
    /// The stages from a file of `stored` tokens to the blocks of a plan, each where it moves the
    /// fewest bytes. Without offload the host narrows; the files of `remap` and `wasm` lie at the
    /// target, and the form on the wire belongs to the transfer, as the checksum does. Values are
    /// quantized at the target in any case: that is for the wire, too.
    ///
    /// # Errors
    /// When there is no such conversion.
    pub fn compile(
        stored: Dtype,
        plan: &BlockPlan,
        offload: bool,
    ) -> Result<BlockStages, StageError> {
        let place = Place::of_block_stage(stored.bytes(), plan.deliver.bytes(), offload);
        let narrow = plan.narrow(stored);
        let narrow_at = |at_target: bool| narrow.filter(|_| (place == Place::Target) == at_target);
        // What is packed is what is delivered.
        let is_packed = narrow_at(false).is_none() && !plan.widens(stored);
        let packing = plan.packing.filter(|_| is_packed);

        let tokens =
            [plan.remap(), plan.wasm(), narrow_at(true), plan.quantize(), Some(BlockOp::Checksum)];
        let form = [packing.map(BlockOp::Pack), plan.compression.map(BlockOp::Compress)];
        let over_blocks = tokens.into_iter().chain(form).flatten();
        let ops = [TargetOp::Read].into_iter().chain(over_blocks.map(TargetOp::Block));
        let target = TargetStages::of(stored, ops.map(|op| (op, None)))?;

        let arrives = Type { dtype: target.on_wire, shape: Shape::SummedBlock(target.form) };
        let codec: Option<Codec> = plan.compression.map(|compression| compression.codec);
        let form = [codec.map(BlockOp::Decompress), packing.map(BlockOp::Unpack)];
        let fit = plan.fit().filter(|_| !is_packed);
        let tokens = [Some(BlockOp::Verify), narrow_at(false), fit, plan.widen(stored)];
        let ops = form.into_iter().chain(tokens).flatten().chain(plan.dequantize());
        let reader = chain(arrives, Place::of_reader(offload), ops)?;
        let output = reader.last().map_or(arrives, |last| last.output);
        Ok(BlockStages { target, reader, output })
    }

    /// The stages for a file of this machine: without target and wire, those that change tokens or
    /// check them.
    ///
    /// # Errors
    /// When there is no such conversion.
    pub fn local(stored: Dtype, plan: &BlockPlan) -> Result<BlockStages, StageError> {
        let block = TargetOp::Read.output(Type::file(stored));
        let undefined = StageError::Undefined {
            position: 1,
            stage: TargetOp::Read.name(),
            input: Type::file(stored),
        };
        let block = block.ok_or(undefined)?;
        let ops = [plan.remap(), plan.wasm(), plan.narrow(stored), plan.fit(), plan.widen(stored)];
        let quantized = [plan.quantize(), plan.dequantize()];
        let ops = ops.into_iter().chain(quantized).flatten();
        let reader = chain(block, Place::Host, ops)?;
        let output = reader.last().map_or(block, |last| last.output);
        let (over_blocks, form) = (Vec::new(), Form::PLAIN);
        let target = TargetStages { over_blocks, stored, on_wire: stored, form };
        Ok(BlockStages { target, reader, output })
    }

    /// The stages of the target; none for a file of this machine.
    pub fn target(&self) -> &TargetStages {
        &self.target
    }

    /// The stages of the reader.
    pub fn reader(&self) -> &[Stage<BlockOp>] {
        &self.reader
    }

    /// Type of the tokens in the blocks that arrive at the reader.
    pub fn arriving(&self) -> Dtype {
        self.target.on_wire
    }

    /// Tokens of [`arriving`](Self::arriving) type that so many tokens of the file arrive as.
    pub fn arriving_tokens(&self, tokens: u32) -> usize {
        let tokens = tokens as usize;
        match self.target.quantized_row() {
            Some(row) => tokens / row.max(1) as usize * quantized_bytes(row as usize),
            None => tokens,
        }
    }

    /// Tokens of [`output`](Self::output) type that so many tokens of the file become, whole
    /// samples of them.
    pub fn output_tokens(&self, tokens: u32) -> u32 {
        let row = self.over_blocks().find_map(|stage| match stage.op {
            BlockOp::Quantize { row, .. } if self.output.dtype == Dtype::U8 => Some(row),
            _ => None,
        });
        row.map_or(tokens, |row| tokens / row.max(1) * quantized_bytes(row as usize) as u32)
    }

    /// Bytes of a token of the file that the reader's buffers need room for.
    pub fn buffered_bytes(&self) -> u32 {
        // A quantized value and its share of the scale.
        let quantized = self.target.quantized_row().map_or(1, |_| 2);
        (self.arriving().bytes() * quantized).max(self.output.dtype.bytes())
    }

    /// Whether blocks may arrive compressed.
    pub fn decompresses(&self) -> bool {
        self.target.form.codec.is_some()
    }

    /// Whether the reader's stages need a second buffer.
    pub fn needs_scratch(&self) -> bool {
        let dequantizes = |stage: &Stage<BlockOp>| matches!(stage.op, BlockOp::Dequantize { .. });
        self.decompresses() || self.reader.iter().any(dequantizes)
    }

    /// Whether blocks with a large token arrive in another form than the others.
    pub fn escapes(&self) -> bool {
        matches!(self.target.form.packing, Some(Packing::Escape | Packing::EscapeWhole))
    }

    /// The output type.
    pub fn output(&self) -> Type {
        self.output
    }

    /// The stages after the read on both sides, in order.
    pub fn over_blocks(&self) -> impl Iterator<Item = &Stage<BlockOp>> {
        self.target.over_blocks.iter().chain(&self.reader)
    }
}

impl Stage<BlockOp> {
    /// What a value does not fit that this stage refuses; none if it does not.
    pub fn limit(&self, value: i128) -> Option<Limit> {
        let outside = |dtype: Dtype| value < dtype.range().0 || value > dtype.range().1;
        match (self.op, u32::try_from(value)) {
            (BlockOp::Quantize { to, .. }, Ok(bits)) if !to.holds(bits) => {
                return Some(Limit::Quantized(to));
            }
            (BlockOp::Dequantize { to: to @ Dtype::F16, .. }, Ok(bits)) if exceeds_f16(bits) => {
                return Some(Limit::Type(to));
            }
            (BlockOp::Quantize { .. } | BlockOp::Dequantize { .. }, _) => return None,
            _ => {}
        }
        match self.op {
            _ if outside(self.input.dtype) => None,
            BlockOp::Remap { ids } if value < 0 || value >= ids.into() => Some(Limit::Table(ids)),
            BlockOp::Narrow { to, instead: None } if outside(to) => Some(Limit::Type(to)),
            BlockOp::Fit { bits } | BlockOp::Pack(Packing::Bits(bits)) if value >> bits != 0 => {
                Some(Limit::Bits(bits))
            }
            _ => None,
        }
    }
}
