//! The stages of a dataset's blocks: the list that a session agrees on, and the one loop that runs them
//! on either side of the wire.

use alloc::vec::Vec;

use thiserror::Error;

use super::{Op, Place, Shape, Stage, StageError, Type, chain};
use crate::dataset::Dtype;
use crate::kernel::{Kernels, NarrowError};

/// Most stages that a target runs over a block.
pub const MAX_TARGET_STAGES: usize = 8;

/// The stages that a target runs over every block of a dataset: a chain from the file to the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStages {
    stages: Vec<Stage>,
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
    pub fn new(stored: Dtype, claimed: Vec<(Op, Type)>) -> Result<TargetStages, StageError> {
        match claimed.len() {
            0 => return Err(StageError::Empty),
            1..=MAX_TARGET_STAGES => {}
            count => return Err(StageError::TooMany { count }),
        }
        let mut stages = Vec::with_capacity(claimed.len());
        let mut given = Type::file(stored);
        for (position, (op, takes)) in (1..).zip(claimed) {
            let (input, stage, place) = (given, op.name(), Place::Target);
            if takes != given {
                return Err(StageError::Join { position, stage, takes, given });
            }
            given = op.output(input).ok_or(StageError::Undefined { position, stage, input })?;
            stages.push(Stage { op, input, output: given, place });
        }
        TargetStages::of(stages, stored, given)
    }

    fn of(stages: Vec<Stage>, stored: Dtype, output: Type) -> Result<TargetStages, StageError> {
        match output.shape {
            Shape::SummedBlock => Ok(TargetStages { stages, stored, on_wire: output.dtype }),
            _ => Err(StageError::Unsummed { output }),
        }
    }

    /// The stages, in order.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
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
    reader: Vec<Stage>,
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
            here.then_some(Op::Narrow { to: deliver })
        };
        let at_target = [Some(Op::Read), narrow_at(true), Some(Op::Checksum)];
        let stages = chain(Type::file(stored), Place::Target, at_target.into_iter().flatten())?;
        let summed = stages.last().map_or(Type::file(stored), |last| last.output);
        let at_reader = [Some(Op::Verify), narrow_at(false)].into_iter().flatten();
        let reader = chain(summed, Place::of_reader(offload), at_reader)?;
        let output = reader.last().map_or(summed, |last| last.output);
        Ok(BlockStages { target: TargetStages::of(stages, stored, summed)?, reader, output })
    }

    /// The stages of the target.
    pub fn target(&self) -> &TargetStages {
        &self.target
    }

    /// The stages of the reader.
    pub fn reader(&self) -> &[Stage] {
        &self.reader
    }

    /// The output type.
    pub fn output(&self) -> Type {
        self.output
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Stage> {
        self.target.stages.iter().chain(&self.reader)
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
    stages: &[Stage],
    block: &mut [u8],
    crc32c: u32,
    kernels: &Kernels,
) -> Result<Ran, BlockError> {
    let mut ran = Ran { bytes: block.len(), crc32c, narrowed: 0 };
    for Stage { op, input, output, .. } in stages {
        let bytes = &mut block[..ran.bytes];
        match op {
            Op::Narrow { .. } => {
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
            Op::Checksum => ran.crc32c = (kernels.crc32c)(0, bytes),
            Op::Verify if (kernels.crc32c)(0, bytes) != ran.crc32c => {
                return Err(BlockError::Damaged);
            }
            // The disk has read the block; samples are cut, ordered and joined while they are copied.
            Op::Read
            | Op::Verify
            | Op::Window { .. }
            | Op::Shuffle(_)
            | Op::Blend(_)
            | Op::Batch { .. } => {}
        }
    }
    Ok(ran)
}
