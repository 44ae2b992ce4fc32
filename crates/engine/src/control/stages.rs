//! The stages of a session as messages.
//!
//! The reader sends one list of target-side stages for each dataset. The target checks the lists against its
//! files and replies with the stages that it will run. Either end refuses stages that it does not know or did
//! not request, so a peer of another version is refused with a hint and never misread (C7).

use xio::dataset::Dtype;
use xio::stage::{Op, Shape, StageError, TargetStages, Type};

use super::proto::{self, ChecksumStage, NarrowStage, ReadStage, stage::Kind};

/// A list as a message.
pub(crate) fn message(stages: &TargetStages) -> proto::TargetStages {
    let kind = |stage: &xio::stage::Stage| {
        let dtype = stage.input.dtype.to_string();
        match stage.op {
            Op::Read => Some(Kind::Read(ReadStage { dtype })),
            Op::Narrow { to } => {
                Some(Kind::Narrow(NarrowStage { from: dtype, to: to.to_string() }))
            }
            Op::Checksum => Some(Kind::Checksum(ChecksumStage { dtype })),
            // No target runs them: a checked list never has their input.
            Op::Verify | Op::Window { .. } | Op::Shuffle(_) | Op::Blend(_) | Op::Batch { .. } => {
                None
            }
        }
    };
    let stages = stages.stages().iter().map(|stage| proto::Stage { kind: kind(stage) });
    proto::TargetStages { stages: stages.collect() }
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

/// The operation of a stage and its types; `None` if it is of another version.
fn claim(stage: &proto::Stage) -> Option<(Op, Type)> {
    let (op, dtype, shape) = match stage.kind.as_ref()? {
        Kind::Read(ReadStage { dtype }) => (Op::Read, dtype, Shape::File),
        Kind::Narrow(NarrowStage { from, to }) => {
            (Op::Narrow { to: Dtype::from_name(to)? }, from, Shape::Block)
        }
        Kind::Checksum(ChecksumStage { dtype }) => (Op::Checksum, dtype, Shape::Block),
    };
    Some((op, Type { dtype: Dtype::from_name(dtype)?, shape }))
}
