//! Plans that compile, lists of stages that are refused, and the effect of stages on a block.

use proptest::prelude::*;
use std::{format, string::ToString, vec, vec::Vec};

use super::*;
use crate::kernel::Kernels;
use crate::plan::Plan;
use crate::plan::tests::any_plan;

fn plan(text: &str) -> Plan {
    Plan::parse(text, Some(7)).unwrap_or_else(|error| panic!("{}", error.render(text)))
}

const FULL: &str =
    "window(2048) | shuffle(seed, blocks=8) | blend(a=0.5,b=0.3,c=0.2) | narrow(u16)";

#[test]
fn actions_run_where_they_move_the_fewest_bytes() {
    let full = plan(FULL);
    let placed = full.compile(&[Dtype::U32, Dtype::U16, Dtype::I64], true).unwrap().table();
    let places: Vec<_> = placed.rows.iter().map(|row| (row.action.as_str(), row.place)).collect();
    let expected = [
        ("narrow(u16)", Place::Target),
        ("window(2048)", Place::Dpu),
        ("shuffle(7, blocks=8)", Place::Dpu),
        ("blend(a=5, b=3, c=2)", Place::Dpu),
        ("batch(32)", Place::Dpu),
    ];
    assert_eq!(places, expected);
    assert_eq!((placed.samples, placed.dtype), (10, Dtype::U16));
    assert_eq!(placed.disk_bytes, 2_048 * (5 * 4 + 3 * 2 + 2 * 8));
    assert_eq!(placed.wire_bytes, 2_048 * 10 * 2);
    assert_eq!(placed.delivered_bytes, placed.wire_bytes);

    let host = full.compile(&[Dtype::U32; 3], false).unwrap().table();
    assert!(host.rows.iter().all(|row| row.place == Place::Host));
    assert_eq!(host.wire_bytes, host.disk_bytes);
    let nothing_to_save = full.compile(&[Dtype::U16; 3], true).unwrap().table();
    assert_eq!(nothing_to_save.rows[0].place, Place::Dpu);
    assert_eq!(nothing_to_save.rows[0].action, "window(2048)");

    let table = "\
action                site      B/sample         out  why
narrow(u16)           target      8601.6        4096  shrinks bytes: done before they cross the wire
window(2048)          dpu           4096        4096  cuts blocks into samples
shuffle(7, blocks=8)  dpu           4096        4096  needs several blocks at once
blend(a=5, b=3, c=2)  dpu           4096        4096  needs several files at once
batch(32)             dpu           4096        4096  fills one slot of the host's ring
disk 8601.6 B/sample, wire 4096 B/sample (53 % saved), u16 delivered";
    assert_eq!(placed.to_string(), table);
}

/// The conversion that moves no fewer bytes: the table shows the place of the stage, which is the
/// target.
#[test]
fn a_conversion_of_equal_width_runs_where_the_table_says() {
    let pipeline = plan("window(4) | narrow(u32)").compile(&[Dtype::I32], true).unwrap();
    let target = pipeline.branches()[0].blocks().target();
    let ops: Vec<_> = target.over_blocks().iter().map(|stage| stage.op.name()).collect();
    assert_eq!(ops, ["narrow", "checksum"]);
    let row = &pipeline.table().rows[0];
    assert_eq!((row.action.as_str(), row.place), ("narrow(u32)", Place::Target));
    assert_eq!((row.bytes_in, row.bytes_out), (16, 16));
    assert_eq!(row.why, "saves no bytes: checks the range before the wire");
}

#[test]
fn only_stages_that_grow_blocks_run_behind_the_wire() {
    for (bytes_in, bytes_out, place) in
        [(4, 2, Place::Target), (4, 4, Place::Target), (2, 4, Place::Dpu)]
    {
        assert_eq!(Place::of_block_stage(bytes_in, bytes_out, true), place);
        assert_eq!(Place::of_block_stage(bytes_in, bytes_out, false), Place::Host);
    }
}

#[test]
fn types_that_do_not_go_together_are_refused() {
    let narrow = plan("window(4) | narrow(u32) | blend(a=1, b=1)");
    let from_u16 = CompileError::Narrow { dataset: 1, from: Dtype::U16, to: Dtype::U32 };
    assert_eq!(narrow.delivered_dtype(&[Dtype::U32, Dtype::U16]), Err(from_u16));
    assert_eq!(narrow.delivered_dtype(&[Dtype::U64, Dtype::I32]), Ok(Dtype::U32));
    let raw = plan("window(4) | blend(a=1, b=1)");
    let mixed = CompileError::MixedTypes { first: Dtype::U32, dataset: 1, other: Dtype::I32 };
    assert_eq!(raw.delivered_dtype(&[Dtype::U32, Dtype::I32]), Err(mixed));
    assert_eq!(raw.delivered_dtype(&[Dtype::I64; 2]), Ok(Dtype::I64));
    let count = CompileError::Count { sources: 1, datasets: 2 };
    assert_eq!(raw.compile(&[Dtype::U16], true), Err(count));
    let bytes = plan("window(4)").compile(&[Dtype::U8], true).unwrap_err();
    assert!(matches!(bytes, CompileError::Stages(StageError::Undefined { position: 1, .. })));
}

const fn narrow(to: Dtype) -> TargetOp {
    TargetOp::Block(BlockOp::Narrow { to })
}

/// A list as it comes from another process: a file of `u64` tokens is read, narrowed twice and summed.
fn claimed() -> Vec<(TargetOp, Type)> {
    let of = |dtype, shape| Type { dtype, shape };
    vec![
        (TargetOp::Read, of(Dtype::U64, Shape::File)),
        (narrow(Dtype::U32), of(Dtype::U64, Shape::Block)),
        (narrow(Dtype::U16), of(Dtype::U32, Shape::Block)),
        (TargetOp::Block(BlockOp::Checksum), of(Dtype::U16, Shape::Block)),
    ]
}

#[test]
fn lists_that_a_target_cannot_run_are_refused() {
    let good = TargetStages::new(Dtype::U64, claimed()).unwrap();
    assert_eq!((good.stored(), good.on_wire()), (Dtype::U64, Dtype::U16));
    assert_eq!(good.over_blocks().len(), 3);
    let refused = |claimed| TargetStages::new(Dtype::U64, claimed).unwrap_err();
    assert_eq!(refused(Vec::new()), StageError::Empty);
    let mut many = claimed();
    many.splice(1..1, vec![(narrow(Dtype::U64), claimed()[1].1); 6]);
    assert_eq!(refused(many), StageError::TooMany { count: 10 });
    let block = |dtype| Type { dtype, shape: Shape::Block };
    let (wide, file) = (block(Dtype::U64), Type::file(Dtype::U64));
    let join = |position, stage, takes, given| StageError::Join { position, stage, takes, given };
    let undefined = |stage| StageError::Undefined { position: 2, stage, input: wide };
    let other = Type::file(Dtype::U32);
    let (to_i16, verify) = ((narrow(Dtype::I16), wide), (TargetOp::Block(BlockOp::Verify), wide));
    for (at, with, error) in [
        (0, Some((TargetOp::Read, other)), join(1, "read", other, file)),
        (0, None, join(1, "narrow", wide, file)),
        (1, None, join(2, "narrow", block(Dtype::U32), wide)),
        (1, Some(to_i16), undefined("narrow")),
        (1, Some(verify), undefined("verify")),
        (3, None, StageError::Unsummed { output: block(Dtype::U16) }),
    ] {
        let mut claimed = claimed();
        claimed.splice(at..=at, with);
        assert_eq!(refused(claimed), error);
        assert!(!error.to_string().is_empty() && !error.hint().is_empty());
    }
}

#[test]
fn stages_run_over_a_block_and_name_what_is_wrong_with_it() {
    let stages = BlockStages::compile(Dtype::U32, Dtype::U16, true).unwrap();
    let kernels = &Kernels::PORTABLE;
    let tokens = |values: [u32; 3]| -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    let mut block = tokens([1, 65_535, 2]);
    let ran = run(stages.target().over_blocks(), &mut block, 0, kernels).unwrap();
    let narrowed = [1, 0, 255, 255, 2, 0];
    let crc32c = (kernels.crc32c)(0, &narrowed);
    assert_eq!(ran, Ran { bytes: 6, crc32c, narrowed: 1 });
    assert_eq!(block[..6], narrowed);

    let arrived = run(stages.reader(), &mut block[..6], crc32c, kernels).unwrap();
    assert_eq!(arrived, Ran { bytes: 6, crc32c, narrowed: 0 });
    let damaged = run(stages.reader(), &mut block[..6], crc32c ^ 1, kernels);
    assert_eq!(damaged, Err(BlockError::Damaged));

    let mut wide = tokens([1, 2, 65_536]);
    let overflow = run(stages.target().over_blocks(), &mut wide, 0, kernels);
    assert_eq!(overflow, Err(BlockError::Overflow { index: 2, value: 65_536 }));
    let ragged = run(stages.target().over_blocks(), &mut [0; 7], 0, kernels);
    assert_eq!(ragged, Err(BlockError::Unsupported));
}

/// Checks that stages join, from `given` on, and returns their output.
fn joined<'a, O: Operation + 'a>(
    given: Type,
    place: Place,
    stages: impl IntoIterator<Item = &'a Stage<O>>,
) -> Type {
    stages.into_iter().fold(given, |given, stage| {
        assert_eq!((stage.input, stage.place), (given, place));
        assert_eq!(stage.op.output(given), Some(stage.output));
        stage.output
    })
}

/// The invariants of every pipeline.
fn assert_joined(pipeline: &Pipeline, stored: &[Dtype], offload: bool) {
    let reader = Place::of_reader(offload);
    for (branch, stored) in pipeline.branches().iter().zip(stored) {
        let (file, blocks) = (Type::file(*stored), branch.blocks());
        let read = TargetOp::Read.output(file).unwrap();
        let summed = joined(read, Place::Target, blocks.target().over_blocks());
        assert_eq!(summed.shape, Shape::SummedBlock);
        assert_eq!(blocks.output(), joined(summed, reader, blocks.reader()));
        let sample = joined(blocks.output(), reader, branch.sample_stages());
        let (samples, tokens) = (pipeline.batch_samples(), pipeline.window_tokens());
        let shape = match pipeline.pairs() {
            true => Shape::PairBatch { samples, tokens: tokens - 1 },
            false => Shape::Batch { samples, tokens },
        };
        assert_eq!(
            joined(sample, reader, pipeline.joint()),
            Type { dtype: pipeline.dtype(), shape }
        );
        // A target accepts the list sent to it.
        let target = blocks.target();
        let over_blocks = target.over_blocks().iter();
        let claims = over_blocks.map(|stage| (TargetOp::Block(stage.op), stage.input));
        let claimed = [(TargetOp::Read, file)].into_iter().chain(claims).collect();
        assert_eq!(TargetStages::new(*stored, claimed).as_ref(), Ok(target));
    }
}

proptest! {
    #[test]
    fn a_plan_compiles_to_stages_that_join_or_is_refused(
        plan in any_plan(),
        stored in prop::collection::vec(prop::sample::select(Dtype::ALL.to_vec()), 0..9),
        as_many in any::<bool>(),
        alike in any::<bool>(),
        offload in any::<bool>(),
    ) {
        let mut stored = stored;
        if as_many {
            stored.resize(plan.blend().len().max(1), Dtype::U32);
        }
        if alike && !stored.is_empty() {
            stored = vec![stored[0]; stored.len()];
        }
        match plan.compile(&stored, offload) {
            Ok(pipeline) => {
                prop_assert_eq!(Ok(pipeline.dtype()), plan.delivered_dtype(&stored));
                assert_joined(&pipeline, &stored, offload);
                let table = pipeline.table();
                let mut given = table.disk_bytes;
                for row in &table.rows {
                    prop_assert_eq!(row.bytes_in, given);
                    given = row.bytes_out;
                    let branches = pipeline.branches().iter();
                    let over_blocks = branches.clone().flat_map(|one| one.blocks().over_blocks());
                    let narrows = over_blocks.filter_map(|stage| match stage.op {
                        BlockOp::Narrow { to } => Some((format!("narrow({to})"), stage.place)),
                        BlockOp::Checksum | BlockOp::Verify => None,
                    });
                    let samples = branches.flat_map(Branch::sample_stages).chain(pipeline.joint());
                    let samples = samples.map(|stage| (stage.op.to_string(), stage.place));
                    let row = (row.action.clone(), row.place);
                    prop_assert!(narrows.chain(samples).any(|stage| stage == row));
                }
                prop_assert_eq!(given, table.delivered_bytes);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn no_list_of_stages_panics(
        stored in prop::sample::select(Dtype::ALL.to_vec()),
        claimed in prop::collection::vec((0..4usize, 0..8usize, 0..8usize, 0..5usize), 0..12),
        honest in any::<bool>(),
    ) {
        let mut given = Type::file(stored);
        let mut list = Vec::new();
        for (op, to, dtype, shape) in claimed {
            let op = [
                TargetOp::Read,
                narrow(Dtype::ALL[to]),
                TargetOp::Block(BlockOp::Checksum),
                TargetOp::Block(BlockOp::Verify),
            ][op];
            let shape = [
                Shape::File,
                Shape::Block,
                Shape::SummedBlock,
                Shape::Sample { tokens: 3 },
                Shape::Batch { samples: 2, tokens: 3 },
            ][shape];
            let takes = if honest { given } else { Type { dtype: Dtype::ALL[dtype], shape } };
            given = op.output(given).unwrap_or(given);
            list.push((op, takes));
        }
        match TargetStages::new(stored, list.clone()) {
            Ok(stages) => {
                prop_assert_eq!(stages.over_blocks().len() + 1, list.len());
                prop_assert!(stages.on_wire().bytes() <= stored.bytes(), "nothing grows at a target");
                let mut block = [1; 64];
                let ran = run(stages.over_blocks(), &mut block, 0, &Kernels::PORTABLE);
                prop_assert!(ran.is_ok() || stored.bytes() > 1);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
