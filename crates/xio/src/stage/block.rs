//! The stages of a dataset's blocks: the list that a session agrees on, and the one loop that runs them
//! on either side of the wire.

use alloc::vec::Vec;

use thiserror::Error;

use super::{BlockOp, Operation, Place, Shape, Stage, StageError, TargetOp, Type, chain};
use crate::dataset::Dtype;
use crate::kernel::{Kernels, NarrowError};

/// Most stages that a target runs over a block.
pub const MAX_TARGET_STAGES: usize = 8;

/// The stages of a target for every block of a dataset: a chain from the file to the wire. It begins with
/// the read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStages {
    over_blocks: Vec<Stage<BlockOp>>,
    stored: Dtype,
    on_wire: Dtype,
}

impl TargetStages {
    /// Checks a list from another process, in which each stage has its claimed input type, for a file
    /// of `stored` tokens.
    ///
    /// # Errors
    /// When the list is empty or too long, does not start from such a file, does not form a chain, or
    /// does not end in blocks with a checksum.
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
            Shape::SummedBlock => Ok(TargetStages { over_blocks, stored, on_wire: given.dtype }),
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
}

/// The stages of a dataset's blocks on both sides of the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockStages {
    target: TargetStages,
    reader: Vec<Stage<BlockOp>>,
    output: Type,
}

impl BlockStages {
    /// The stages from a file of `stored` tokens to blocks of `deliver` tokens, each where it moves the
    /// fewest bytes; without offload all of them at the host, except reading and the checksum.
    ///
    /// # Errors
    /// When there is no such conversion.
    pub fn compile(
        stored: Dtype,
        deliver: Dtype,
        offload: bool,
    ) -> Result<BlockStages, StageError> {
        let place = Place::of_block_stage(stored.bytes(), deliver.bytes(), offload);
        let narrow_at = |at_target: bool| {
            let here = stored != deliver && (place == Place::Target) == at_target;
            here.then_some(BlockOp::Narrow { to: deliver })
        };
        let over_blocks = narrow_at(true).into_iter().chain([BlockOp::Checksum]);
        let ops = [TargetOp::Read].into_iter().chain(over_blocks.map(TargetOp::Block));
        let target = TargetStages::of(stored, ops.map(|op| (op, None)))?;
        let summed = Type { dtype: target.on_wire, shape: Shape::SummedBlock };
        let ops = [BlockOp::Verify].into_iter().chain(narrow_at(false));
        let reader = chain(summed, Place::of_reader(offload), ops)?;
        let output = reader.last().map_or(summed, |last| last.output);
        Ok(BlockStages { target, reader, output })
    }

    /// The stages for a file of this machine: without target and wire, the conversion is the only one.
    ///
    /// # Errors
    /// When there is no such conversion.
    pub fn local(stored: Dtype, deliver: Dtype) -> Result<BlockStages, StageError> {
        let block = TargetOp::Read.output(Type::file(stored));
        let undefined = StageError::Undefined {
            position: 1,
            stage: TargetOp::Read.name(),
            input: Type::file(stored),
        };
        let block = block.ok_or(undefined)?;
        let narrow = (stored != deliver).then_some(BlockOp::Narrow { to: deliver });
        let reader = chain(block, Place::Host, narrow)?;
        let output = reader.last().map_or(block, |last| last.output);
        let target = TargetStages { over_blocks: Vec::new(), stored, on_wire: stored };
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

    /// The output type.
    pub fn output(&self) -> Type {
        self.output
    }

    /// The stages after the read on both sides, in order.
    pub fn over_blocks(&self) -> impl Iterator<Item = &Stage<BlockOp>> {
        self.target.over_blocks.iter().chain(&self.reader)
    }
}

/// The result of running stages over a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// Bytes at the front of the buffer.
    pub bytes: usize,
    /// CRC-32C of the block, as last computed or as given.
    pub crc32c: u32,
    /// Conversions executed.
    pub narrowed: u32,
}

/// Why stages failed on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BlockError {
    /// A token that does not fit; the first one of the block.
    #[error("token {index} of the block is {value}, which does not fit")]
    Overflow {
        /// Its index in the block.
        index: usize,
        /// Its value.
        value: i128,
    },
    /// The CRC-32C does not match.
    #[error("the CRC-32C of the block does not match")]
    Damaged,
    /// The kernels do not support the conversion, or the block is not a whole number of tokens.
    #[error("the block cannot be converted")]
    Unsupported,
}

/// Runs stages over a block, in place. `crc32c` is the checksum received with it, 0 if there was none.
/// After an error the contents of the block are unspecified.
///
/// # Errors
/// See [`BlockError`].
pub fn run(
    stages: &[Stage<BlockOp>],
    block: &mut [u8],
    crc32c: u32,
    kernels: &Kernels,
) -> Result<Ran, BlockError> {
    let mut ran = Ran { bytes: block.len(), crc32c, narrowed: 0 };
    for Stage { op, input, output, .. } in stages {
        let bytes = &mut block[..ran.bytes];
        match op {
            BlockOp::Narrow { .. } => {
                ran.bytes = (kernels.narrow)(bytes, input.dtype, output.dtype).map_err(
                    |error| match error {
                        NarrowError::Overflow { index, value, .. } => {
                            BlockError::Overflow { index, value }
                        }
                        _ => BlockError::Unsupported,
                    },
                )?;
                ran.narrowed += 1;
            }
            BlockOp::Checksum => ran.crc32c = (kernels.crc32c)(0, bytes),
            BlockOp::Verify => {
                if (kernels.crc32c)(0, bytes) != ran.crc32c {
                    return Err(BlockError::Damaged);
                }
            }
        }
    }
    Ok(ran)
}
