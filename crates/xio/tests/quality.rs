//! The quality of shuffles, and the table of it in docs/plan.md.
//!
//! A table that differs from the page fails the test, which prints what the page should say.
#![allow(clippy::unwrap_used)]

use xio::dataset::{Dtype, flat};
use xio::order::{Cut, Quality, SampleLayout};
use xio::plan::Plan;
use xio::reader::{Reader, ReaderSource};

const PAGE: &str = include_str!("../../../docs/plan.md");

/// Samples of the file: of 2,048 tokens of `u32`, so that 128 are a MiB.
const SAMPLES: u64 = 1_000_000;
const WINDOW: u64 = 2_048;
const PER_MIB: u64 = 128;

/// Batches looked at; of 32 samples.
const PROBES: u64 = 10_000;

/// The quality of a plan's first epoch, and the samples of a group.
fn measured(actions: &str) -> (u64, Quality) {
    let plan = Plan::parse(&format!("window({WINDOW}){actions}"), None).unwrap();
    let file = flat(Dtype::U32, SAMPLES * WINDOW * 4).unwrap();
    let layout = plan.layout(0, file).unwrap();
    let order = plan.order(&[layout]).unwrap();
    let shuffle = order.shuffle(0).unwrap();
    let group = shuffle.group_blocks() * u64::from(layout.samples_per_block);
    (group, shuffle.quality(0, PROBES, PER_MIB))
}

fn row(name: &str, group: &str, quality: &Quality) -> String {
    let Quality { mean_displacement, adjacency, same_mib, autocorrelation } = *quality;
    // Adding zero takes the sign from a zero.
    let correlation = (autocorrelation * 1_000.0).round() / 1_000.0 + 0.0;
    let shared = 100.0 * same_mib;
    format!(
        "| {name} | {group} | {shared:.2} % | {correlation:.3} | {mean_displacement:.3} | {adjacency:.4} |\n"
    )
}

fn table() -> String {
    let mut table = String::from(
        "| plan | samples per group | pairs in a batch of 32 from one MiB | lag-1 autocorrelation \
         | mean displacement | file neighbours in a row |\n|---|---|---|---|---|---|\n",
    );
    let (_, quality) = measured("");
    table += &row("file order", "–", &quality);
    for shuffle in [
        "shuffle(7, blocks=1)",
        "shuffle(7, blocks=8)",
        "shuffle(7)",
        "shuffle(7, blocks=64, block=128KiB)",
        "shuffle(7, blocks=1024, block=128KiB)",
    ] {
        let (group, quality) = measured(&format!(" | {shuffle}"));
        let group = match group {
            1_000.. => format!("{},{:03}", group / 1_000, group % 1_000),
            _ => group.to_string(),
        };
        table += &row(&format!("`{shuffle}`"), &group, &quality);
    }
    table + &row("perfect shuffle", "all", &Quality::perfect(SAMPLES, PER_MIB))
}

#[test]
fn the_page_has_the_measured_table() {
    let table = table();
    assert!(PAGE.contains(&table), "docs/plan.md should have this table:\n\n{table}");
}

/// The bound that the default keeps.
#[test]
fn the_default_shares_few_blocks() {
    let (_, quality) = measured(" | shuffle(7)");
    assert!(quality.same_mib <= 0.02, "{quality:?}");
    let (_, before) = measured(" | shuffle(7, blocks=8)");
    assert!(before.same_mib > 0.12, "{before:?}");
}

/// Bytes of staging buffers for `datasets` files of `mib` MiB, delivered as they are stored.
fn memory(datasets: usize, mib: u64, shuffle: &str) -> u64 {
    let parts: Vec<String> = (0..datasets).map(|i| format!("d{i}={}", 1 + i % 3)).collect();
    let text = format!("window({WINDOW}) | blend({}){shuffle}", parts.join(", "));
    let plan = Plan::parse(&text, None).unwrap();
    let pipeline = plan.compile(&vec![Dtype::U32; datasets], true).unwrap();
    let file = flat(Dtype::U32, mib << 20).unwrap();
    let layouts: Vec<SampleLayout> =
        (0..datasets).map(|i| pipeline.layout(i, file).unwrap()).collect();
    let sources: Vec<ReaderSource> = (0..)
        .zip(pipeline.branches())
        .map(|(source, branch)| {
            let (layout, stages) = (layouts[source as usize], branch.blocks().clone());
            let (cut, whole_pages) = (Cut::Windows, false);
            let weighs = None;
            ReaderSource { connection: 0, source, layout, cut, stages, whole_pages, weighs }
        })
        .collect();
    Reader::memory_needed(&pipeline.order(&layouts).unwrap().into(), &sources)
}

#[test]
fn memory_does_not_grow_with_the_datasets() {
    let mib = |datasets, size, shuffle: &str| memory(datasets, size, shuffle) >> 20;
    assert_eq!(mib(1, 4_096, " | shuffle(7)"), 32);
    for datasets in [2, 3, 16, 40, 100] {
        let needed = memory(datasets, 4_096, " | shuffle(7)");
        let most = (32 << 20) + datasets as u64 * (1 << 20);
        assert!(needed <= most, "{datasets} datasets need {needed} bytes");
    }
    // In file order, and in groups as large as the file.
    assert_eq!((mib(1, 4_096, ""), mib(8, 4_096, ""), mib(16, 4_096, "")), (8, 64, 64));
    assert_eq!(mib(1, 12, " | shuffle(7, blocks=1024)"), 24);
}
