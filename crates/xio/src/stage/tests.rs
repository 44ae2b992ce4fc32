//! Plans that compile, lists of stages that are refused, and the effect of stages on a block.

use proptest::prelude::*;
use std::string::{String, ToString};
use std::{format, vec, vec::Vec};

use super::*;
use crate::dataset::{Format, TokenFile};
use crate::kernel::{Codecs, Compressed, Kernels, MapFault, Quant, TokenMap};
use crate::order::{OrderError, SampleLayout};
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
    let short = plan("window(4)").compile(&[Dtype::I16], true).unwrap_err();
    assert!(matches!(short, CompileError::Stages(StageError::Undefined { position: 1, .. })));
    for (text, action) in [
        ("window(4) | remap(t)", "remap"),
        ("window(4) | narrow(u16)", "narrow"),
        ("window(4) | bitpack(9)", "bitpack"),
        ("window(4) | widen(i32)", "widen"),
        ("window(4) | pairs", "pairs"),
        ("window(4, overlap=1)", "overlap"),
    ] {
        let error = CompileError::NotTokens { dataset: 0, holds: Dtype::U8, action };
        assert_eq!(plan(text).compile_with(&[Dtype::U8], Some(4), true), Err(error), "{text}");
    }
    let records = plan("window(4) | shuffle(1) | compress(zstd)").compile(&[Dtype::U8], true);
    assert_eq!(records.unwrap().output().sample_bytes(), Some(4));
}

const fn narrow(to: Dtype) -> TargetOp {
    TargetOp::Block(BlockOp::Narrow { to, instead: None })
}

/// Places and bytes of the rows over blocks.
fn rows(text: &str, stored: Dtype, offload: bool) -> Vec<(String, Place, u64, u64)> {
    let table = plan(text).compile_with(&[stored], Some(500), offload).unwrap().table();
    let row = |row: &Row| (row.action.clone(), row.place, row.bytes_in, row.bytes_out);
    let rows = table.rows.iter().map(row);
    rows.take_while(|row| !row.0.starts_with("window")).collect()
}

#[test]
fn forms_of_the_wire_are_made_at_the_target_and_undone_behind_it() {
    use Place::{Dpu, Host, Target};
    let row =
        |text: &str, place, bytes_in, bytes_out| (text.to_string(), place, bytes_in, bytes_out);
    let saturate = "narrow(u16, overflow=saturate(7))";
    let text = format!("window(16) | remap(t) | {saturate} | bitpack(15)");
    let remapped = row("remap", Target, 64, 64);
    let offloaded = [
        remapped.clone(),
        row(saturate, Target, 64, 32),
        row("bitpack(15)", Target, 32, 30),
        row("bitpack(15)", Dpu, 30, 32),
    ];
    assert_eq!(rows(&text, Dtype::U32, true), offloaded);
    // What the host narrows cannot be packed before, so the range is checked after.
    let alone = [remapped, row(saturate, Host, 64, 32), row("bitpack(15)", Host, 32, 32)];
    assert_eq!(rows(&text, Dtype::U32, false), alone);
    let escape = "narrow(u16, overflow=escape)";
    let text = format!("window(16) | {escape} | widen(i64) | compress(zstd)");
    for (offload, place) in [(true, Dpu), (false, Host)] {
        let expected = [
            row(escape, Target, 64, 32),
            row("compress(zstd, level=1)", Target, 32, 32),
            row(escape, place, 32, 64),
        ];
        assert_eq!(rows(&text, Dtype::U32, offload), expected);
        // A file that has no larger token.
        let expected =
            [row("compress(zstd, level=1)", Target, 32, 32), row("widen(u32)", place, 32, 64)];
        assert_eq!(rows(&text, Dtype::U16, offload), expected);
    }
}

#[test]
fn local_files_have_no_form_of_the_wire() {
    let ops = |text: &str, stored| -> Vec<&str> {
        let pipeline = plan(text).compile_local(&[stored], Some(9)).unwrap();
        let blocks = pipeline.branches()[0].blocks();
        blocks.over_blocks().map(|stage| stage.op.name()).collect()
    };
    assert_eq!(ops("window(4) | narrow(u16) | compress(lz4)", Dtype::U32), ["narrow"]);
    assert_eq!(ops("window(4) | bitpack(17)", Dtype::U32), ["fit"]);
    assert_eq!(ops("window(4) | remap(t) | narrow(u32)", Dtype::I64), ["remap", "narrow"]);
    let escape = "window(4) | narrow(u16, overflow=escape) | widen(u32)";
    assert_eq!(ops(escape, Dtype::U32), [""; 0]);
    assert_eq!(ops(escape, Dtype::I64), ["narrow"]);
    assert_eq!(ops(escape, Dtype::U16), ["widen"]);
}

#[test]
fn plans_that_cannot_be_packed_or_mapped_are_refused() {
    let refused = |text: &str, stored| plan(text).compile(&[stored], true).unwrap_err();
    let pack = |dtype, bits| CompileError::Pack { dtype, bits };
    assert_eq!(refused("window(4) | bitpack(17)", Dtype::U16), pack(Dtype::U16, 17));
    assert_eq!(refused("window(4) | bitpack(17)", Dtype::I64), pack(Dtype::I64, 17));
    assert_eq!(refused("window(4) | remap(t)", Dtype::U32), CompileError::NoTable);
}

/// A list as it comes from another process: a file of `u64` tokens is read, narrowed twice and
/// summed.
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
    let summed = Type { dtype: Dtype::U64, shape: Shape::SummedBlock(Form::PLAIN) };
    let block_op = TargetOp::Block;
    let other = Type::file(Dtype::U32);
    let (to_i16, verify) = ((narrow(Dtype::I16), wide), (TargetOp::Block(BlockOp::Verify), wide));
    for (at, with, error) in [
        (0, Some((TargetOp::Read, other)), join(1, "read", other, file)),
        (0, None, join(1, "narrow", wide, file)),
        (1, None, join(2, "narrow", block(Dtype::U32), wide)),
        (1, Some(to_i16), undefined("narrow")),
        (1, Some(verify), undefined("verify")),
        (1, Some((block_op(BlockOp::Remap { ids: 0 }), wide)), undefined("remap")),
        (1, Some((block_op(BlockOp::Fit { bits: 17 }), wide)), undefined("fit")),
        (1, Some((block_op(BlockOp::Widen { to: Dtype::U32 }), wide)), undefined("widen")),
        (
            1,
            Some((block_op(BlockOp::Narrow { to: Dtype::U16, instead: Some(65_536) }), wide)),
            undefined("narrow"),
        ),
        (
            1,
            Some((block_op(BlockOp::Pack(Packing::Bits(17))), summed)),
            join(2, "pack", summed, wide),
        ),
        (3, None, StageError::Unsummed { output: block(Dtype::U16) }),
    ] {
        let mut claimed = claimed();
        claimed.splice(at..=at, with);
        assert_eq!(refused(claimed), error);
        assert!(!error.to_string().is_empty() && !error.hint().is_empty());
    }
}

/// Runs stages over a block in a buffer.
fn run_over(
    stages: &[Stage<BlockOp>],
    buffer: &mut [u8],
    received: Received,
) -> Result<Ran, BlockError> {
    let mut scratch = vec![0; buffer.len() * 2 + 64];
    let kernels = Kernels { codecs: HALVES, ..Kernels::PORTABLE };
    let table = [5, 6, 7, 70_000];
    let mut tools = Tools {
        kernels: &kernels,
        scratch: &mut scratch,
        table: &table,
        action: Some(&Even),
        first_token: 100,
        compresses: true,
    };
    run(stages, buffer, received, &mut tools)
}

/// A user action that adds the number of a token to it, and refuses blocks that begin with an odd
/// token.
#[derive(Debug)]
struct Even;

impl TokenMap for Even {
    fn map(&self, tokens: &mut [u8], dtype: Dtype, first_token: u64) -> Result<(), MapFault> {
        if tokens.first().is_some_and(|byte| byte % 2 == 1) {
            return Err(MapFault::Code(7));
        }
        for (number, token) in (first_token..).zip(tokens.chunks_mut(dtype.bytes() as usize)) {
            token[0] = token[0].wrapping_add(number as u8);
        }
        Ok(())
    }
}

/// A codec for bytes in which each is followed by itself.
const HALVES: Codecs = Codecs {
    compress: |_, source, target| {
        let pairs = source.as_chunks::<2>();
        let twice = pairs.1.is_empty() && pairs.0.iter().all(|[a, b]| a == b);
        let bytes = (twice && pairs.0.len() <= target.len()).then(|| {
            target.iter_mut().zip(pairs.0).for_each(|(byte, [a, _])| *byte = *a);
            pairs.0.len()
        });
        Compressed { bytes, nanos: 1_000 }
    },
    decompress: |_, source, target| {
        (source.len() * 2 <= target.len()).then(|| {
            target.as_chunks_mut().0.iter_mut().zip(source).for_each(|(to, byte)| *to = [*byte; 2]);
            source.len() * 2
        })
    },
};

fn tokens(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn stages_run_over_a_block_and_name_what_is_wrong_with_it() {
    let stages = BlockStages::compile(Dtype::U32, &BlockPlan::plain(Dtype::U16), true).unwrap();
    let sends = |values: &[u32]| {
        let mut block = tokens(values);
        let received = Received::stored(block.len(), Dtype::U32);
        run_over(stages.target().over_blocks(), &mut block, received).map(|ran| (ran, block))
    };
    let (ran, mut block) = sends(&[1, 65_535, 2]).unwrap();
    let narrowed = [1, 0, 255, 255, 2, 0];
    let crc32c = crate::kernel::crc32c(0, &narrowed);
    let sent = Received { bytes: 6, crc32c, ..Received::stored(12, Dtype::U32) };
    assert_eq!(ran, Ran { block: sent, narrowed: 1, encoding: None });
    assert_eq!(block[..6], narrowed);

    let arrived = run_over(stages.reader(), &mut block[..6], sent).unwrap();
    assert_eq!(arrived, Ran { block: sent, narrowed: 0, encoding: None });
    for wrong in [
        Received { crc32c: crc32c ^ 1, ..sent },
        Received { bytes: 4, ..sent },
        Received { bytes: 8, ..sent },
        Received { bits: 9, ..sent },
        Received { codec: Some(Codec::Lz4), ..sent },
    ] {
        let damaged = run_over(stages.reader(), &mut block[..6], wrong);
        assert_eq!(damaged, Err(BlockError::Damaged), "{wrong:?}");
    }
    let overflow = sends(&[1, 2, 65_536]).unwrap_err();
    assert_eq!(overflow, BlockError::Overflow { index: 2, value: 65_536, stage: 0 });
    let ragged = Received::stored(7, Dtype::U32);
    let ragged = run_over(stages.target().over_blocks(), &mut [0; 7], ragged);
    assert_eq!(ragged, Err(BlockError::Unsupported));
}

/// What crosses the wire for a block, and what comes out behind it.
fn across(text: &str, values: &[u32]) -> (Received, Option<Encoding>, Vec<u8>) {
    let pipeline = plan(text).compile_with(&[Dtype::U32], Some(4), true).unwrap();
    let stages = pipeline.branches()[0].blocks();
    let mut block = tokens(values);
    let received = Received::stored(block.len(), Dtype::U32);
    let sent = run_over(stages.target().over_blocks(), &mut block, received).unwrap();
    let mut buffer = vec![0xee; values.len() * stages.buffered_bytes() as usize];
    buffer[..sent.block.bytes].copy_from_slice(&block[..sent.block.bytes]);
    let taken = run_over(stages.reader(), &mut buffer, sent.block).unwrap();
    buffer.truncate(taken.block.bytes);
    (sent.block, sent.encoding, buffer)
}

#[test]
fn forms_are_undone_and_each_block_says_which_it_has() {
    let values: Vec<u32> = (0..3_000).collect();
    let escape = "window(4) | narrow(u16, overflow=escape) | widen(u32)";
    let large = |value: u32| -> Vec<u32> {
        values.iter().map(|token| if *token == 2_999 { value } else { *token }).collect()
    };
    for (text, values, bits, bytes) in [
        ("window(4) | bitpack(12)", values.clone(), 12, 2 * 128 * 12 + 1_428),
        (escape, values.clone(), 16, 6_000),
        (escape, large(0x1_ffff), 17, 2 * 128 * 17 + 2_023),
        (escape, large(u32::MAX), 0, 12_000),
    ] {
        let (sent, _, back) = across(text, &values);
        assert_eq!((sent.bits, sent.bytes), (bits, bytes), "{text}");
        assert!(back == tokens(&values), "{text}");
    }
    // Both bytes of each token are equal.
    let doubles: Vec<u32> = (0..500).map(|value| value % 200 * 257).collect();
    let compressed = "window(4) | narrow(u16) | compress(lz4)";
    for (values, codec, bytes) in [(&doubles, Some(Codec::Lz4), 500), (&values, None, 6_000)] {
        let (sent, encoding, back) = across(compressed, values);
        assert_eq!((sent.codec, sent.bytes), (codec, bytes));
        let encoding = encoding.unwrap();
        assert_eq!((encoding.bytes_in, encoding.bytes_out), (values.len() * 2, bytes));
        let narrow: Vec<u8> = values.iter().flat_map(|v| (*v as u16).to_le_bytes()).collect();
        assert!(back == narrow);
    }
    let both = format!("{escape} | compress(zstd)");
    let (sent, _, back) = across(&both, &doubles);
    assert_eq!((sent.bits, sent.codec, sent.bytes), (16, Some(Codec::Zstd), 500));
    assert!(back == tokens(&doubles));
    let (sent, _, back) = across(&both, &large(70_000));
    assert_eq!((sent.bits, sent.codec, sent.bytes), (0, None, 12_000));
    assert!(back == tokens(&large(70_000)));
    let replaced = "window(4) | narrow(u16, overflow=saturate(3))";
    let (sent, _, back) = across(replaced, &[1, 65_536, 65_535, u32::MAX]);
    assert_eq!((sent.replaced, back), (2, vec![1, 0, 3, 0, 255, 255, 3, 0]));
    let (_, _, back) = across("window(4) | remap(t)", &[3, 0, 1]);
    assert_eq!(back, tokens(&[70_000, 5, 6]));
    // After the table, before the conversion.
    let wasm = format!("wasm(m, sha256={})", "00".repeat(32));
    let (_, _, back) = across(&format!("window(4) | {wasm} | narrow(u16)"), &[4, 5, 6]);
    assert_eq!(back, [104, 0, 106, 0, 108, 0]);
    let (_, _, back) = across(&format!("window(4) | {wasm} | remap(t)"), &[1, 0]);
    assert_eq!(back, tokens(&[106, 106]));
    let stages = plan(&format!("window(4) | {wasm}")).compile(&[Dtype::U32], false).unwrap();
    let stages = stages.branches()[0].blocks().target().over_blocks();
    assert_eq!(stages[0].op, BlockOp::Wasm, "also without offload");
    let failed = run_over(stages, &mut tokens(&[1]), Received::stored(4, Dtype::U32));
    assert_eq!(failed, Err(BlockError::Action(MapFault::Code(7))));
}

#[test]
fn tokens_without_a_place_are_refused_with_their_limit() {
    for (text, value, limit) in [
        ("window(4) | bitpack(12)", 4_096, Limit::Bits(12)),
        ("window(4) | remap(t)", 4, Limit::Table(4)),
        ("window(4) | remap(t) | narrow(u16)", 3, Limit::Type(Dtype::U16)),
        ("window(4) | narrow(u16)", 65_536, Limit::Type(Dtype::U16)),
    ] {
        for offload in [true, false] {
            let pipeline = plan(text).compile_with(&[Dtype::U32], Some(4), offload).unwrap();
            let stages = pipeline.branches()[0].blocks();
            let mut block = tokens(&[1, value, 2]);
            let received = Received::stored(12, Dtype::U32);
            let sent = run_over(stages.target().over_blocks(), &mut block, received);
            let at_target = sent.is_err();
            let error = sent
                .and_then(|sent| run_over(stages.reader(), &mut block, sent.block))
                .unwrap_err();
            let BlockError::Overflow { index: 1, value: found, stage } = error else {
                panic!("{text}: {error}");
            };
            let stages = if at_target { stages.target().over_blocks() } else { stages.reader() };
            let found = stages[usize::from(stage)].limit(found);
            assert_eq!(found, Some(limit), "{text}");
        }
    }
}

fn stages_of(pipeline: &Pipeline) -> &BlockStages {
    pipeline.branches()[0].blocks()
}

#[test]
fn values_are_quantized_at_the_target_and_back_behind_the_wire() {
    use Place::{Dpu, Host, Target};
    for (text, stored, delivered, steps) in [
        ("window(64) | quantize(int8)", Dtype::F32, Dtype::F32, vec![(256, 66), (66, 256)]),
        ("window(40) | quantize(e4m3)", Dtype::F16, Dtype::F16, vec![(80, 42), (42, 80)]),
        (
            "window(64) | quantize(e5m2, deliver=bf16)",
            Dtype::F32,
            Dtype::Bf16,
            vec![(256, 66), (66, 128)],
        ),
        ("window(33) | quantize(int8, deliver=quantized)", Dtype::F32, Dtype::U8, vec![(132, 35)]),
    ] {
        for (offload, reader) in [(true, Dpu), (false, Host)] {
            let found = rows(text, stored, offload);
            let found: Vec<_> = found.iter().map(|row| (row.1, (row.2, row.3))).collect();
            let places = [Target, reader];
            let want: Vec<_> = places.into_iter().zip(steps.clone()).collect();
            assert_eq!(found, want, "{text}");
            let pipeline = plan(text).compile(&[stored], offload).unwrap();
            assert_eq!(pipeline.dtype(), delivered);
            assert_eq!(stages_of(&pipeline).arriving(), Dtype::U8);
            let sample = pipeline.output().sample_bytes();
            assert_eq!(sample, steps.last().map(|step| step.1));
        }
        let local = plan(text).compile_local(&[stored], None).unwrap();
        assert_eq!((local.dtype(), stages_of(&local).arriving()), (delivered, stored));
    }
    let mixed = plan("window(32) | blend(a=1, b=1) | quantize(int8)");
    let error = CompileError::MixedTypes { first: Dtype::F32, dataset: 1, other: Dtype::F16 };
    assert_eq!(mixed.compile(&[Dtype::F32, Dtype::F16], true), Err(error));
    let one = plan("window(32) | blend(a=1, b=1) | quantize(int8, deliver=bf16)");
    assert!(one.compile(&[Dtype::F32, Dtype::F16], true).is_ok());
    for holds in [Dtype::U32, Dtype::U8] {
        let error = CompileError::NotFloats { dataset: 0, holds };
        assert_eq!(plan("window(32) | quantize(int8)").compile(&[holds], true), Err(error));
    }
    let action = "narrow";
    let error = CompileError::NotTokens { dataset: 0, holds: Dtype::F16, action };
    assert_eq!(plan("window(4) | narrow(u16)").compile(&[Dtype::F16], true), Err(error));
    let pairs = plan("window(9, overlap=1) | pairs").compile(&[Dtype::F16], true).unwrap();
    assert_eq!((pairs.dtype(), pairs.output().sample_bytes()), (Dtype::F16, Some(32)));
    let action = "loss_weights";
    for holds in [Dtype::F32, Dtype::U8] {
        let error = CompileError::NotTokens { dataset: 0, holds, action };
        assert_eq!(plan("window(4) | loss_weights").compile(&[holds], true), Err(error));
    }
}

#[test]
fn loss_weights_cross_the_wire_as_they_are_beside_narrowed_tokens() {
    let text = "window(9, overlap=1) | narrow(u16) | pairs | loss_weights | compress(lz4)";
    let pipeline = plan(text).compile(&[Dtype::U32], true).unwrap();
    let table = pipeline.table();
    // Eight tokens of a stride: four bytes each and four of a weight; two of them are narrowed
    // away.
    assert_eq!((table.disk_bytes, table.wire_bytes, table.delivered_bytes), (64, 48, 2 * 16 + 32));
    let weights = pipeline.loss_weights().unwrap();
    assert_eq!((weights.arriving(), weights.output().dtype), (Dtype::F32, Dtype::F32));
    assert!(weights.decompresses());
    let local = plan(text).compile_local(&[Dtype::U32], None).unwrap();
    assert!(local.loss_weights().is_some_and(|stages| stages.reader().is_empty()));
    // Blocks of tokens are no longer than those of weights may be.
    let file =
        TokenFile { dtype: Dtype::U16, data_offset: 0, tokens: 1 << 22, format: Format::Flat };
    let layout = |text: &str| plan(text).layout(0, file);
    assert_eq!(layout("window(1024)").unwrap().samples_per_block, 512);
    assert_eq!(layout("window(1024) | loss_weights").unwrap().samples_per_block, 256);
    let asked = layout("window(1024) | shuffle(1) | loss_weights").unwrap();
    assert_eq!(asked, SampleLayout { widest: 4, ..layout("window(1024) | shuffle(1)").unwrap() });
    let too_long = OrderError::Window { window: 262_145, dtype: Dtype::F32 };
    assert_eq!(layout("window(262145) | loss_weights | batch(1)"), Err(too_long));
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
        assert!(matches!(summed.shape, Shape::SummedBlock(_)));
        assert_eq!(blocks.output(), joined(summed, reader, blocks.reader()));
        let sample = joined(blocks.output(), reader, branch.sample_stages());
        let (samples, tokens) = (pipeline.batch_samples(), pipeline.sample_tokens());
        let tokens = tokens - u32::from(pipeline.pairs());
        let weighted = pipeline.rows().loss_weights.is_some();
        let shape = match pipeline.rows().count() {
            1 if !weighted => Shape::Batch { samples, tokens },
            rows => Shape::RowsBatch { samples, rows, tokens, weighted },
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
        match plan.compile_with(&stored, Some(1_000), offload) {
            Ok(pipeline) => {
                prop_assert_eq!(Ok(pipeline.dtype()), plan.delivered_dtype(&stored));
                assert_joined(&pipeline, &stored, offload);
                let table = pipeline.table();
                let stride = u64::from(pipeline.window_tokens() - pipeline.overlap_tokens());
                let weights = pipeline.loss_weights().map_or(0, |_| 4 * stride * table.samples);
                let mut given = table.disk_bytes - weights;
                for row in &table.rows {
                    prop_assert_eq!(row.bytes_in, given);
                    given = row.bytes_out;
                    let branches = pipeline.branches().iter();
                    let over_blocks = branches.clone().flat_map(|one| one.blocks().over_blocks());
                    let over_blocks = over_blocks.map(|stage| (stage.op.to_string(), stage.place));
                    let samples = branches.flat_map(Branch::sample_stages).chain(pipeline.joint());
                    let samples = samples.map(|stage| (stage.op.to_string(), stage.place));
                    let row = (row.action.clone(), row.place);
                    prop_assert!(over_blocks.chain(samples).any(|stage| stage == row));
                }
                prop_assert_eq!(given, table.delivered_bytes);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn no_list_of_stages_panics(
        stored in prop::sample::select(Dtype::ALL.to_vec()),
        claimed in prop::collection::vec((0..11usize, 0..8usize, 0..8usize, 0..6usize), 0..12),
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
                TargetOp::Block(BlockOp::Remap { ids: 4 }),
                TargetOp::Block(BlockOp::Pack(Packing::Bits(9 + 4 * to as u8))),
                TargetOp::Block(BlockOp::Pack(Packing::EscapeWhole)),
                TargetOp::Block(BlockOp::Compress(Compression {
                    codec: Codec::Lz4,
                    level: 0,
                    always: true,
                })),
                TargetOp::Block(BlockOp::Narrow { to: Dtype::U16, instead: Some(3) }),
                TargetOp::Block(BlockOp::Fit { bits: 17 }),
                TargetOp::Block(BlockOp::Quantize { to: Quant::E4m3, row: 8 * to as u32 }),
            ][op];
            let shape = [
                Shape::File,
                Shape::Block,
                Shape::SummedBlock(Form::PLAIN),
                Shape::SummedBlock(Form { packing: Some(Packing::EscapeWhole), codec: None }),
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
                let mut block = [1; 128];
                let ran = run_over(stages.over_blocks(), &mut block, Received::stored(64, stored));
                prop_assert!(ran.is_ok() || stored.bytes() > 1);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    /// Whatever a target sends, the stages of a reader end in its tokens or in an error.
    #[test]
    fn nothing_that_arrives_panics(
        form in 0..8usize,
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        count in 0..120usize,
        claimed in (any::<bool>(), 0..500usize, any::<u8>(), 0..3usize, any::<u32>()),
        right_sum in any::<bool>(),
    ) {
        let text = [
            "window(4)",
            "window(4) | narrow(u16)",
            "window(4) | bitpack(17)",
            "window(4) | compress(zstd)",
            "window(4) | narrow(u16, overflow=escape) | widen(u32)",
            "window(4) | narrow(u16, overflow=escape) | widen(u32) | compress(lz4)",
            "window(4) | quantize(e5m2, deliver=f16)",
            "window(33) | quantize(e4m3) | compress(lz4)",
        ][form];
        let stored = if form < 6 { Dtype::U32 } else { Dtype::F32 };
        let pipeline = plan(text).compile(&[stored], true).unwrap();
        // Only whole samples are asked for.
        let count = if form < 6 { count } else { count / 33 * 132 };
        let arriving = stages_of(&pipeline).arriving_tokens(count as u32);
        let stages = pipeline.branches()[0].blocks();
        let mut buffer = vec![0; count * stages.buffered_bytes() as usize];
        buffer.iter_mut().zip(&bytes).for_each(|(to, byte)| *to = *byte);
        let (honest, length, bits, codec, crc32c) = claimed;
        let length = if honest { bytes.len().min(buffer.len()) } else { length };
        let codec = [None, Some(Codec::Lz4), Some(Codec::Zstd)][codec];
        let plain = arriving * stages.arriving().bytes() as usize;
        let plain = plain.min(buffer.len());
        let crc32c = if right_sum { crate::kernel::crc32c(0, &buffer[..plain]) } else { crc32c };
        let bits = if honest { [0, 16, 17, bits][usize::from(bits) % 4] } else { bits };
        let tokens = arriving;
        let received = Received { bytes: length, tokens, crc32c, bits, codec, replaced: 0 };
        match run_over(stages.reader(), &mut buffer, received) {
            Ok(ran) => {
                let bytes = count * stages.output().dtype.bytes() as usize;
                prop_assert_eq!((ran.block.bytes, ran.block.bits), (bytes, 0));
            }
            // Codes that are right may be of values that are too large.
            Err(BlockError::Overflow { stage: 1, .. }) => prop_assert_eq!(form, 6),
            Err(error) => prop_assert_eq!(error, BlockError::Damaged),
        }
    }
}
