//! The stages of a session as messages.
//!
//! The reader sends one list of target-side stages for each dataset. The target checks the lists against its
//! files and replies with the stages that it will run. Either end refuses stages that it does not know or did
//! not request, so a peer of another version is refused with a hint and never misread (C7).

use xio::dataset::Dtype;
use xio::stage::{BlockOp, Shape, Stage, StageError, TargetOp, TargetStages, Type};

use crate::proto::{self, ChecksumStage, NarrowStage, ReadStage, stage::Kind};

/// A list as a message.
pub(crate) fn message(stages: &TargetStages) -> proto::TargetStages {
    let read = Kind::Read(ReadStage { dtype: stages.stored().to_string() });
    let kind = |stage: &Stage<BlockOp>| {
        let dtype = stage.input.dtype.to_string();
        match stage.op {
            BlockOp::Narrow { to } => {
                Some(Kind::Narrow(NarrowStage { from: dtype, to: to.to_string() }))
            }
            BlockOp::Checksum => Some(Kind::Checksum(ChecksumStage { dtype })),
            // Readers verify: the message has no such stage, and a target refuses one without a kind.
            BlockOp::Verify => None,
        }
    };
    let kinds = [Some(read)].into_iter().chain(stages.over_blocks().iter().map(kind));
    proto::TargetStages { stages: kinds.map(|kind| proto::Stage { kind }).collect() }
}

/// A list from a message, for a file of `stored` tokens.
pub(crate) fn checked(
    message: &proto::TargetStages,
    stored: Dtype,
) -> Result<TargetStages, StageError> {
    // Checked before any stage is created.
    if message.stages.len() > xio::stage::MAX_TARGET_STAGES {
        return Err(StageError::TooMany { count: message.stages.len() });
    }
    let claimed = (1..)
        .zip(&message.stages)
        .map(|(position, stage)| claim(stage).ok_or(StageError::Unknown { position }));
    TargetStages::new(stored, claimed.collect::<Result<_, _>>()?)
}

/// The operation of a stage and its input type; `None` if it is of another version.
fn claim(stage: &proto::Stage) -> Option<(TargetOp, Type)> {
    let (op, dtype, shape) = match stage.kind.as_ref()? {
        Kind::Read(ReadStage { dtype }) => (TargetOp::Read, dtype, Shape::File),
        Kind::Narrow(NarrowStage { from, to }) => {
            let to = Dtype::from_name(to)?;
            (TargetOp::Block(BlockOp::Narrow { to }), from, Shape::Block)
        }
        Kind::Checksum(ChecksumStage { dtype }) => {
            (TargetOp::Block(BlockOp::Checksum), dtype, Shape::Block)
        }
    };
    Some((op, Type { dtype: Dtype::from_name(dtype)?, shape }))
}
