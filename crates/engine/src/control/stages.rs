//! The stages of a session as messages.
//!
//! The reader sends one list of target-side stages for each dataset. The target checks the lists
//! against its files and replies with the stages that it will run. Either end refuses stages that
//! it does not know or did not request, so a peer of another version is refused with a hint and
//! never misread (C7).

use xio::dataset::Dtype;
use xio::kernel::{Codec, Compression, Quant};
use xio::plan::UserModule;
use xio::stage::{BlockOp, Form, Packing, Shape, Stage, StageError, TargetOp, TargetStages, Type};

use crate::proto::{
    self, ChecksumStage, CompressStage, DatasetInfo, NarrowStage, PackStage, QuantizeStage,
    ReadStage, RemapStage, WasmStage, stage::Kind,
};

/// A list as a message. `table` describes the table of `remap`, `module` is that of `wasm`.
pub(crate) fn message(
    stages: &TargetStages,
    table: Option<&DatasetInfo>,
    module: Option<&UserModule>,
) -> proto::TargetStages {
    let read = Kind::Read(ReadStage { dtype: stages.stored().to_string() });
    let kind = |stage: &Stage<BlockOp>| {
        let dtype = stage.input.dtype.to_string();
        match stage.op {
            BlockOp::Remap { ids } => {
                let DatasetInfo { name, fingerprint, .. } = table?.clone();
                Some(Kind::Remap(RemapStage { dtype, table: name, ids, fingerprint }))
            }
            BlockOp::Wasm => {
                let UserModule { name, sha256 } = module?.clone();
                Some(Kind::Wasm(WasmStage { dtype, module: name, sha256: sha256.to_vec() }))
            }
            BlockOp::Narrow { to, instead } => {
                Some(Kind::Narrow(NarrowStage { from: dtype, to: to.to_string(), instead }))
            }
            BlockOp::Quantize { to, row } => {
                Some(Kind::Quantize(QuantizeStage { dtype, to: to.to_string(), row }))
            }
            BlockOp::Checksum => Some(Kind::Checksum(ChecksumStage { dtype })),
            BlockOp::Pack(packing) => {
                let (bits, packs_others) = match packing {
                    Packing::Bits(bits) => (bits.into(), false),
                    Packing::Escape => (0, true),
                    Packing::EscapeWhole => (0, false),
                };
                Some(Kind::Pack(PackStage { dtype, bits, packs_others }))
            }
            BlockOp::Compress(Compression { codec, level, always }) => {
                let (codec, packed) = (codec.to_string(), stages.form().packing.is_some());
                Some(Kind::Compress(CompressStage { dtype, codec, level, always, packed }))
            }
            // Readers do the rest: the message has no such stages, and a target refuses one without
            // a kind.
            BlockOp::Fit { .. }
            | BlockOp::Widen { .. }
            | BlockOp::Dequantize { .. }
            | BlockOp::Decompress(_)
            | BlockOp::Unpack(_)
            | BlockOp::Verify => None,
        }
    };
    let kinds = [Some(read)].into_iter().chain(stages.over_blocks().iter().map(kind));
    proto::TargetStages { stages: kinds.map(|kind| proto::Stage { kind }).collect() }
}

/// The table that lists name, if they do: the first, since all of a session are to name the same.
pub(crate) fn table_of(lists: &[proto::TargetStages]) -> Option<&RemapStage> {
    lists.iter().flat_map(|list| &list.stages).find_map(|stage| match &stage.kind {
        Some(Kind::Remap(remap)) => Some(remap),
        _ => None,
    })
}

/// Whether every table that the lists name is this one.
pub(crate) fn agree_on_table(lists: &[proto::TargetStages], table: &RemapStage) -> bool {
    lists.iter().flat_map(|list| &list.stages).all(|stage| match &stage.kind {
        Some(Kind::Remap(RemapStage { table: name, ids, fingerprint, .. })) => {
            (name, *ids, *fingerprint) == (&table.table, table.ids, table.fingerprint)
        }
        _ => true,
    })
}

/// The module that lists name, if they do: the first, since all of a session are to name the same.
pub(crate) fn module_of(lists: &[proto::TargetStages]) -> Option<&WasmStage> {
    lists.iter().flat_map(|list| &list.stages).find_map(|stage| match &stage.kind {
        Some(Kind::Wasm(wasm)) => Some(wasm),
        _ => None,
    })
}

/// Whether every module that the lists name is this one.
pub(crate) fn agree_on_module(lists: &[proto::TargetStages], module: &WasmStage) -> bool {
    lists.iter().flat_map(|list| &list.stages).all(|stage| match &stage.kind {
        Some(Kind::Wasm(WasmStage { module: name, sha256, .. })) => {
            (name, sha256) == (&module.module, &module.sha256)
        }
        _ => true,
    })
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
    let block = |op| TargetOp::Block(op);
    let (op, dtype, shape) = match stage.kind.as_ref()? {
        Kind::Read(ReadStage { dtype }) => (TargetOp::Read, dtype, Shape::File),
        Kind::Remap(RemapStage { dtype, ids, .. }) => {
            (block(BlockOp::Remap { ids: *ids }), dtype, Shape::Block)
        }
        Kind::Wasm(WasmStage { dtype, .. }) => (block(BlockOp::Wasm), dtype, Shape::Block),
        Kind::Narrow(NarrowStage { from, to, instead }) => {
            let (to, instead) = (Dtype::from_name(to)?, *instead);
            (block(BlockOp::Narrow { to, instead }), from, Shape::Block)
        }
        Kind::Quantize(QuantizeStage { dtype, to, row }) => {
            let (to, row) = (Quant::from_name(to)?, *row);
            (block(BlockOp::Quantize { to, row }), dtype, Shape::Block)
        }
        Kind::Checksum(ChecksumStage { dtype }) => (block(BlockOp::Checksum), dtype, Shape::Block),
        Kind::Pack(PackStage { dtype, bits, packs_others }) => {
            let packing = match (*bits, *packs_others) {
                (0, true) => Packing::Escape,
                (0, false) => Packing::EscapeWhole,
                (bits, false) => Packing::Bits(u8::try_from(bits).ok()?),
                (_, true) => return None,
            };
            (block(BlockOp::Pack(packing)), dtype, Shape::SummedBlock(Form::PLAIN))
        }
        Kind::Compress(CompressStage { dtype, codec, level, always, packed }) => {
            let how = Compression::new(Codec::from_name(codec)?, *level, *always)?;
            let packing = packed.then_some(Packing::EscapeWhole);
            let shape = Shape::SummedBlock(Form { packing, codec: None });
            (block(BlockOp::Compress(how)), dtype, shape)
        }
    };
    Some((op, Type { dtype: Dtype::from_name(dtype)?, shape }))
}
