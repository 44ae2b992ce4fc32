//! The fast path (order, blocks, compiled stages) against the reference, byte for byte.
//!
//! `fast_batch` below does what target and reader do, without their buffers: look up a sample in
//! the order, take its bytes out of a block, run the stages of both sides over them.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use xio::dataset::{Dtype, TokenFile, flat};
use xio::kernel::Quant;
use xio::order::{OrderError, SampleLayout};
use xio::plan::Plan;
use xio::reference::{Reference, ReferenceError};
use xio::stage::{BlockError, Limit, Pipeline, Received, Tools, run};

#[path = "toy/flip.rs"]
mod flip;
mod toy;

use flip::Flip;

struct File {
    described: TokenFile,
    bytes: Vec<u8>,
}

/// A file whose tokens encode their position, so that any mix-up shows.
fn file(dtype: Dtype, tokens: u64, salt: u64) -> File {
    let value = |i: u64| (i.wrapping_mul(2_654_435_761) >> 7).wrapping_add(salt) & 0x7fff;
    let width = dtype.bytes() as usize;
    let bytes: Vec<u8> =
        (0..tokens).flat_map(|i| value(i).to_le_bytes()[..width].to_vec()).collect();
    File { described: flat(dtype, bytes.len() as u64).unwrap(), bytes }
}

fn reader(file: &File) -> impl FnMut(u64) -> Option<i128> + use<> {
    let (dtype, bytes) = (file.described.dtype, file.bytes.clone());
    let width = dtype.bytes() as usize;
    move |index| {
        let raw = bytes.get(index as usize * width..(index as usize + 1) * width)?;
        let negative = dtype.is_signed() && raw[width - 1] >= 0x80;
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..width].copy_from_slice(raw);
        Some(i128::from_le_bytes(wide))
    }
}

/// The table of `remap`: some tokens of the files have no entry.
fn table() -> Vec<u32> {
    (0..0x7f00).map(|id| id * 40_503 % 0x7f00).collect()
}

fn reference(plan: &Plan, files: &[File]) -> Reference<impl FnMut(u64) -> Option<i128> + use<>> {
    let files = files.iter().map(|file| (file.described, reader(file))).collect();
    Reference::new(plan, files).unwrap()
}

/// Dataset, token and value of a token that does not fit.
type Overflow = (usize, u64, i128);

fn dtypes(files: &[File]) -> Vec<Dtype> {
    files.iter().map(|file| file.described.dtype).collect()
}

fn fast_batch(pipeline: &Pipeline, files: &[File], batch: u64) -> Result<Vec<u8>, Overflow> {
    let layout = |(i, file): (usize, &File)| pipeline.layout(i, file.described).unwrap();
    let layouts: Vec<SampleLayout> = files.iter().enumerate().map(layout).collect();
    let order = pipeline.order(&layouts).unwrap();
    let samples = u64::from(pipeline.batch_samples());
    let mut out = Vec::new();
    for sample in order.cursor_at(batch * samples).take(samples as usize) {
        let layout = &layouts[sample.dataset];
        let (offset, len) = layout.block_range(sample.place.block).unwrap();
        let block = &files[sample.dataset].bytes[offset as usize..][..len as usize];
        let width = layout.sample_bytes() as usize;
        let mut row = block[sample.place.sample as usize * width..][..width].to_vec();
        let first_byte = offset + u64::from(sample.place.sample) * width as u64;
        let first_token = first_byte / u64::from(layout.file.dtype.bytes());
        let overflow = |error| match error {
            BlockError::Overflow { index, value, .. } => {
                (sample.dataset, first_token + index as u64, value)
            }
            other => panic!("{other}"),
        };
        let stages = pipeline.branches()[sample.dataset].blocks();
        let (mut scratch, table) = (vec![0; 2 * row.len() + 64], table());
        let (kernels, scratch) = (&toy::KERNELS, scratch.as_mut_slice());
        let mut tools = Tools {
            kernels,
            scratch,
            table: &table,
            action: Some(&Flip),
            first_token,
            compresses: true,
        };
        let received = Received::stored(row.len(), layout.file.dtype);
        let sent = run(stages.target().over_blocks(), &mut row, received, &mut tools);
        let sent = sent.map_err(overflow)?;
        let mut buffer = row[..sent.block.bytes].to_vec();
        buffer.resize(received.tokens * stages.buffered_bytes() as usize, 0xee);
        let taken = run(stages.reader(), &mut buffer, sent.block, &mut tools);
        out.extend(&buffer[..taken.map_err(overflow)?.block.bytes]);
    }
    Ok(out)
}

fn assert_same(text: &str, files: &[File], batches: impl IntoIterator<Item = u64>) {
    let plan = Plan::parse(text, Some(99)).unwrap();
    let mut reference = reference(&plan, files);
    let [near, far] = [true, false].map(|offload| plan.compile(&dtypes(files), offload).unwrap());
    for batch in batches {
        let slow = reference.batch(batch).unwrap();
        let row = near.sample_tokens() as usize;
        assert_eq!(slow.len(), plan.batch() as usize * row * reference.dtype().bytes() as usize);
        for pipeline in [&near, &far] {
            let fast = fast_batch(pipeline, files, batch);
            assert!(fast.as_ref() == Ok(&slow), "replay: {text}, batch {batch}");
        }
    }
}

#[test]
fn one_file_in_file_order() {
    let files = [file(Dtype::U16, 10_007, 0)];
    assert_same("window(10) | batch(7)", &files, 0..300);
    let plan = Plan::parse("window(10) | batch(2)", None).unwrap();
    let pipeline = plan.compile(&dtypes(&files), true).unwrap();
    assert_eq!(fast_batch(&pipeline, &files, 3).unwrap(), files[0].bytes[120..160]);
}

#[test]
fn blends_of_all_types_with_short_blocks_and_many_epochs() {
    // Windows of 40,000 u32 tokens leave 6 samples to a block, and 3 for the widest types.
    let files = [
        file(Dtype::U32, 1_000_000, 1),
        file(Dtype::U16, 500_000, 2),
        file(Dtype::I64, 410_000, 3),
        file(Dtype::I32, 90_000, 4),
    ];
    let text = "window(40000) | shuffle(seed, blocks=2) | blend(a=0.5, b=0.3, c=0.15, d=0.05) \
                | narrow(u16) | batch(5)";
    assert_same(text, &files, (0..20).chain([57, 3, 120]));
}

#[test]
fn many_blocks_in_groups() {
    let files = [file(Dtype::U32, 3_000_000, 5), file(Dtype::U32, 700_001, 6)];
    for blocks in [1, 3, 8, 1_024] {
        let text = format!(
            "window(2048) | shuffle(seed, blocks={blocks}) | blend(x=2, y=1) | narrow(u16) | batch(64)"
        );
        assert_same(&text, &files, [0, 1, 10, 25, 40]);
    }
}

#[test]
fn groups_of_the_default_size_and_of_others() {
    let files =
        [file(Dtype::U32, 3_000_000, 5), file(Dtype::U32, 700_001, 6), file(Dtype::I64, 40_000, 7)];
    for shuffle in
        ["shuffle(3)", "shuffle(3, blocks=20, block=64KiB)", "shuffle(seed, blocks=2, block=36KiB)"]
    {
        for (window, batches) in [(2_048, [0, 1, 10, 25, 40]), (33_000, [0, 1, 2, 3, 4])] {
            let text = format!(
                "window({window}) | {shuffle} | blend(x=20, y=1, z=1) | narrow(u16) | batch(50)"
            );
            assert_same(&text, &files, batches);
        }
    }
}

#[test]
fn weights_change_where_a_phase_begins() {
    let files = [file(Dtype::U32, 30_000, 1), file(Dtype::U16, 7_000, 2), file(Dtype::U32, 900, 3)];
    for phases in ["1", "100, 101", "777, 1000, 5_000"] {
        let weights = |weights: [&str; 4]| weights[..=phases.split(',').count()].join(":");
        let (a, b, c) =
            (["1", "0", "0.3", "5"], ["0", "0.7", "0.3", "2"], ["3", "0.01", "0.4", "0"]);
        let text = format!(
            "window(100) | shuffle(5) | blend(a={}, b={}, c={}) | phases({phases}) | narrow(u16) | batch(16)",
            weights(a),
            weights(b),
            weights(c),
        );
        assert_same(&text, &files, (0..20).chain([47, 48, 49, 62, 63, 300, 312, 313, 2]));
    }
}

/// A dataset of weight 0 in every phase may be empty; any other must fill a window.
#[test]
fn a_dataset_that_is_not_drawn_from_need_not_hold_a_sample() {
    let files = [file(Dtype::U32, 9_000, 1), file(Dtype::U32, 99, 2)];
    assert_same("window(100) | shuffle(5) | blend(a=1, b=0) | batch(4)", &files, 0..30);
    let plan =
        Plan::parse("window(100) | blend(a=1, b=0:1) | phases(1000) | batch(4)", None).unwrap();
    let described = files.iter().map(|file| (file.described, reader(file))).collect();
    let short = OrderError::NoSample { tokens: 99, window: 100 };
    assert_eq!(plan.layout(1, files[1].described), Err(short.clone()));
    assert_eq!(Reference::new(&plan, described).err(), Some(ReferenceError::Order(short)));
}

#[test]
fn without_narrow_the_type_of_the_file_is_delivered() {
    for dtype in [Dtype::U16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64] {
        let files = [file(dtype, 50_000, 7)];
        assert_same("window(512) | shuffle(1, blocks=1)", &files, 0..8);
    }
}

#[test]
fn a_token_that_does_not_fit_is_named_by_file_and_position() {
    let mut files = [file(Dtype::U32, 1_000, 8)];
    files[0].bytes[4 * 321..][..4].copy_from_slice(&65_536u32.to_le_bytes());
    let plan = Plan::parse("window(100) | narrow(u16) | batch(1)", None).unwrap();
    let mut reference = reference(&plan, &files);
    assert!(reference.batch(2).is_ok());
    let (token, value, limit) = (321, 65_536, Limit::Type(Dtype::U16));
    let overflow = ReferenceError::Overflow { dataset: 0, token, value, limit };
    assert_eq!(reference.batch(3), Err(overflow));
    assert!(reference.batch(4).is_ok());
    assert_eq!(reference.batch(u64::MAX), Err(ReferenceError::BatchNumber { batch: u64::MAX }));
}

#[test]
fn resuming_anywhere_gives_the_same_bytes() {
    let files = [file(Dtype::U32, 400_000, 9), file(Dtype::U32, 100_000, 10)];
    let plan = "window(1000) | shuffle(5, blocks=1) | blend(a=7, b=3) | narrow(u16) | batch(16)";
    let plan = Plan::parse(plan, None).unwrap();
    let pipeline = plan.compile(&dtypes(&files), true).unwrap();
    let straight: Vec<Vec<u8>> =
        (0..60).map(|b| fast_batch(&pipeline, &files, b).unwrap()).collect();
    let mut reference = reference(&plan, &files);
    for batch in [59, 0, 31, 30, 58] {
        assert!(reference.batch(batch).unwrap() == straight[batch as usize], "batch {batch}");
    }
    let distinct: std::collections::BTreeSet<&Vec<u8>> = straight.iter().collect();
    assert_eq!(distinct.len(), straight.len());
}

/// A file of values of many sizes, which all types of floating point have.
fn values(dtype: Dtype, count: u64, salt: u64) -> File {
    let value = |i: u64| {
        let mixed = (i + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let fraction = (mixed >> 40) as f32 / (1 << 24) as f32 + 1.0;
        let size = f32::from_bits((127 - 12 + (mixed >> 20) as u32 % 24) << 23);
        if mixed & 1 == 0 { fraction * size } else { -fraction * size }
    };
    let stored = |value: f32| -> Vec<u8> {
        let bits = value.to_bits();
        match dtype {
            Dtype::F32 => bits.to_le_bytes().to_vec(),
            Dtype::Bf16 => bits.to_le_bytes()[2..].to_vec(),
            // Exponents lie within those of halves: the mantissa is cut.
            _ => ((bits >> 16 & 0x8000 | ((bits & 0x7fff_ffff) - (112 << 23)) >> 13) as u16)
                .to_le_bytes()
                .to_vec(),
        }
    };
    let bytes: Vec<u8> = (0..count).flat_map(|i| stored(value(i))).collect();
    File { described: flat(dtype, bytes.len() as u64).unwrap(), bytes }
}

#[test]
fn values_pass_as_they_are() {
    for dtype in Dtype::FLOATS {
        let files = [values(dtype, 50_000, 7)];
        assert_same("window(500) | shuffle(1, blocks=1) | batch(3)", &files, 0..40);
    }
}

#[test]
fn quantized_values_are_those_of_the_reference() {
    for (index, stored) in Dtype::FLOATS.into_iter().enumerate() {
        let files = [values(stored, 9_000, 1), values(stored, 7_001, 2)];
        for to in ["int8", "e4m3", "e5m2"] {
            let deliver =
                ["", ", deliver=bf16", ", deliver=f32", ", deliver=f16", ", deliver=quantized"];
            for (deliver, window) in deliver.into_iter().zip([64, 100, 33, 1, 257]) {
                let text = format!(
                    "window({window}) | shuffle(seed, blocks=2) | blend(a=2, b=1) | quantize({to}{deliver}) | batch(3)"
                );
                assert_same(&text, &files, [0, 1, 5 + index as u64]);
            }
            let text =
                format!("window(96) | blend(a=2, b=1) | quantize({to}) | compress(lz4) | batch(3)");
            assert_same(&text, &files, [0, 9]);
        }
    }
    let mixed = [values(Dtype::F32, 9_000, 1), values(Dtype::F16, 7_001, 2)];
    assert_same(
        "window(70) | blend(a=2, b=1) | quantize(e4m3, deliver=f16) | batch(3)",
        &mixed,
        0..9,
    );
}

/// A sample is what it is, wherever its block begins.
#[test]
fn a_sample_is_quantized_alone() {
    let all = values(Dtype::F32, 40 * 1_000, 3);
    let plan =
        Plan::parse("window(40) | quantize(e4m3, deliver=quantized) | batch(1)", None).unwrap();
    let pipeline = plan.compile(&[Dtype::F32], true).unwrap();
    for sample in [0, 1, 617, 999] {
        let bytes = all.bytes[sample * 160..(sample + 1) * 160].to_vec();
        let alone = File { described: flat(Dtype::F32, 160).unwrap(), bytes };
        let in_file = fast_batch(&pipeline, std::slice::from_ref(&all), sample as u64).unwrap();
        assert_eq!(in_file, fast_batch(&pipeline, &[alone], 0).unwrap());
    }
}

#[test]
fn a_value_that_cannot_be_delivered_is_named_by_file_and_position() {
    for (text, bits, limit) in [
        ("quantize(int8)", f32::NAN.to_bits(), Limit::Quantized(Quant::Int8)),
        ("quantize(e4m3)", f32::INFINITY.to_bits(), Limit::Quantized(Quant::E4m3)),
        ("quantize(e5m2, deliver=f16)", 1e6_f32.to_bits(), Limit::Type(Dtype::F16)),
    ] {
        let mut files = [values(Dtype::F32, 10_000, 8)];
        files[0].bytes[4 * 321..][..4].copy_from_slice(&bits.to_le_bytes());
        let plan = Plan::parse(&format!("window(100) | {text} | batch(1)"), None).unwrap();
        let mut reference = reference(&plan, &files);
        assert!(reference.batch(2).is_ok());
        let Err(ReferenceError::Overflow { dataset: 0, token: 321, value, limit: found }) =
            reference.batch(3)
        else {
            panic!("{text}");
        };
        assert_eq!(found, limit);
        for offload in [true, false] {
            let pipeline = plan.compile(&[Dtype::F32], offload).unwrap();
            assert_eq!(fast_batch(&pipeline, &files, 3), Err((0, 321, value)), "{text}");
            let stages = pipeline.branches()[0].blocks();
            assert!(stages.over_blocks().any(|stage| stage.limit(value) == Some(limit)), "{text}");
        }
    }
}

const TOKENS: [Dtype; 5] = [Dtype::U16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64];

const NARROW: [&str; 5] = [
    " | narrow(u16)",
    " | narrow(u32)",
    " | narrow(u16, overflow=saturate(321))",
    " | narrow(u32, overflow=saturate(321))",
    " | narrow(u16, overflow=escape) | widen(u32)",
];

const FORMS: [&str; 5] =
    [" | bitpack(15)", " | bitpack(16)", " | bitpack(25)", " | compress(lz4)", " | compress(zstd)"];

/// A plan over files whose types may not match it, one of which may hold a token that does not fit.
#[derive(Clone, Debug)]
struct Case {
    text: String,
    files: Vec<(Dtype, u64)>,
    /// A file, a token of it, and the bit that is set there.
    wide: Option<(usize, u64, u32)>,
    batches: Vec<u64>,
}

fn case() -> impl Strategy<Value = Case> {
    let file = (prop::sample::select(TOKENS.to_vec()), 40..900u64, 0..5u32);
    let files = prop::collection::vec(file, 1..4);
    let shuffle = prop::option::of((any::<u64>(), 1..4u32));
    let narrow = prop::option::of(prop::sample::select(NARROW.to_vec()));
    let form = prop::option::of(prop::sample::select(FORMS.to_vec()));
    let narrow = (narrow, form, any::<bool>());
    let wide = prop::option::of((any::<prop::sample::Index>(), any::<u64>(), 0..64u32));
    let batches = prop::collection::vec(0..400u64, 1..4);
    let shape = (1..40u32, 1..9u32);
    (files, shuffle, narrow, wide, batches, shape).prop_map(
        |(files, shuffle, narrow, wide, batches, (window, batch))| {
            let weights: u32 = files.iter().map(|file| file.2).sum();
            let part = |(i, file): (usize, &(Dtype, u64, u32))| {
                format!("d{i}={}", file.2 + u32::from(weights == 0))
            };
            let parts: Vec<String> = files.iter().enumerate().map(part).collect();
            let mut text = format!("window({window}) | batch({batch})");
            if files.len() > 1 {
                text += &format!(" | blend({})", parts.join(", "));
            }
            text += &shuffle.map_or(String::new(), |(seed, blocks)| {
                format!(" | shuffle({seed}, blocks={blocks})")
            });
            let (narrow, form, remaps) = narrow;
            text += narrow.unwrap_or_default();
            // Forms that a narrowed token has no room for are left out.
            text += form
                .filter(|form| Plan::parse(&format!("{text}{form}"), None).is_ok())
                .unwrap_or_default();
            text += &if remaps { format!(" | remap(t){}", Flip::text()) } else { String::new() };
            let wide = wide.map(|(at, token, bit)| {
                let file = at.index(files.len());
                (file, token % files[file].1, bit % (8 * files[file].0.bytes()))
            });
            let files = files.into_iter().map(|(dtype, tokens, _)| (dtype, tokens)).collect();
            Case { text, files, wide, batches }
        },
    )
}

proptest! {
    /// Whatever the stages deliver or refuse, the reference does too, for either place.
    #[test]
    fn stages_deliver_what_the_reference_says(case in case()) {
        let plan = Plan::parse(&case.text, None).unwrap();
        let mut files: Vec<File> =
            (0..).zip(&case.files).map(|(salt, (dtype, tokens))| file(*dtype, *tokens, salt)).collect();
        if let Some((at, token, bit)) = case.wide {
            let byte = token * u64::from(case.files[at].0.bytes()) + u64::from(bit / 8);
            files[at].bytes[byte as usize] ^= 1 << (bit % 8);
        }
        for offload in [true, false] {
            let described = files.iter().map(|file| (file.described, reader(file))).collect();
            let reference =
                Reference::new(&plan, described).map(|it| it.with_table(table()).with_action(Flip::one));
            let ids = Some(table().len() as u32);
            let pipeline = match plan.compile_with(&dtypes(&files), ids, offload) {
                Ok(pipeline) => pipeline,
                Err(error) => {
                    let refused = reference.err();
                    prop_assert_eq!(refused, Some(ReferenceError::Types(error)));
                    continue;
                }
            };
            let mut reference = reference.unwrap();
            for &batch in &case.batches {
                let slow = reference.batch(batch).map_err(|error| match error {
                    ReferenceError::Overflow { dataset, token, value, .. } => (dataset, token, value),
                    other => panic!("{other}"),
                });
                prop_assert_eq!(fast_batch(&pipeline, &files, batch), slow);
            }
        }
    }
}
