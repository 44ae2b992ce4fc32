//! The fast path (order, blocks, narrowing kernel) against the reference, byte for byte.
//!
//! `fast_batch` below does what the pipeline does, without its buffers: ask the order where a
//! sample lies, take its bytes out of a block, narrow them.
#![allow(clippy::unwrap_used)]

use xio::dataset::{Dtype, TokenFile, flat};
use xio::kernel::narrow_in_place;
use xio::order::{Order, SampleLayout};
use xio::plan::Plan;
use xio::reference::{Reference, ReferenceError};

struct File {
    described: TokenFile,
    bytes: Vec<u8>,
}

/// A file whose tokens tell their place, so that any mix-up shows.
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

fn reference(plan: &Plan, files: &[File]) -> Reference<impl FnMut(u64) -> Option<i128> + use<>> {
    let files = files.iter().map(|file| (file.described, reader(file))).collect();
    Reference::new(plan, files).unwrap()
}

fn fast_batch(plan: &Plan, files: &[File], batch: u64) -> Vec<u8> {
    let layout = |file: &File| SampleLayout::new(file.described, plan.window()).unwrap();
    let layouts: Vec<SampleLayout> = files.iter().map(layout).collect();
    let order = Order::from_plan(plan, &layouts).unwrap();
    let samples = u64::from(plan.batch());
    let mut out = Vec::new();
    for sample in order.cursor_at(batch * samples).take(samples as usize) {
        let layout = &layouts[sample.dataset];
        let (offset, len) = layout.block_range(sample.place.block).unwrap();
        let block = &files[sample.dataset].bytes[offset as usize..][..len as usize];
        let width = layout.sample_bytes() as usize;
        let mut row = block[sample.place.sample as usize * width..][..width].to_vec();
        if let Some(to) = plan.narrow() {
            let len = narrow_in_place(&mut row, layout.file.dtype, to).unwrap();
            row.truncate(len);
        }
        out.extend(row);
    }
    out
}

fn assert_same(text: &str, files: &[File], batches: impl IntoIterator<Item = u64>) {
    let plan = Plan::parse(text, Some(99)).unwrap();
    let mut reference = reference(&plan, files);
    for batch in batches {
        let slow = reference.batch(batch).unwrap();
        let fast = fast_batch(&plan, files, batch);
        let bytes =
            plan.batch() as usize * plan.window() as usize * reference.dtype().bytes() as usize;
        assert_eq!(slow.len(), bytes);
        assert!(slow == fast, "replay: {text}, batch {batch}");
    }
}

#[test]
fn one_file_in_file_order() {
    let files = [file(Dtype::U16, 10_007, 0)];
    assert_same("window(10) | batch(7)", &files, 0..300);
    let plan = Plan::parse("window(10) | batch(2)", None).unwrap();
    assert_eq!(fast_batch(&plan, &files, 3), files[0].bytes[120..160]);
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
    let overflow =
        ReferenceError::Overflow { dataset: 0, token: 321, value: 65_536, to: Dtype::U16 };
    assert_eq!(reference.batch(3), Err(overflow));
    assert!(reference.batch(4).is_ok());
    assert_eq!(reference.batch(u64::MAX), Err(ReferenceError::BatchNumber { batch: u64::MAX }));
}

#[test]
fn resuming_anywhere_gives_the_same_bytes() {
    let files = [file(Dtype::U32, 400_000, 9), file(Dtype::U32, 100_000, 10)];
    let plan = "window(1000) | shuffle(5, blocks=1) | blend(a=7, b=3) | narrow(u16) | batch(16)";
    let plan = Plan::parse(plan, None).unwrap();
    let straight: Vec<Vec<u8>> = (0..60).map(|b| fast_batch(&plan, &files, b)).collect();
    let mut reference = reference(&plan, &files);
    for batch in [59, 0, 31, 30, 58] {
        assert!(reference.batch(batch).unwrap() == straight[batch as usize], "batch {batch}");
    }
    let distinct: std::collections::BTreeSet<&Vec<u8>> = straight.iter().collect();
    assert_eq!(distinct.len(), straight.len());
}
