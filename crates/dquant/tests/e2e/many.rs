//! Thousands of corpora in one stream.

use std::fs;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, World};

/// As many as a pretraining job of today blends, and an eighth more than fit the usual limits of
/// descriptors.
const CORPORA: usize = 3_000;

/// Small corpora of different lengths, each with a few samples of 32 tokens.
fn corpora(world: &World) -> Vec<Corpus> {
    let corpus = |at: usize| {
        let tokens = tokens(100 + at % 257, at as u64);
        Corpus::flat(&world.data(&format!("c{at}.bin")), Dtype::U16, tokens)
    };
    (0..CORPORA).map(corpus).collect()
}

/// A blend of datasets `c0` to `c<count - 1>`, some of which weigh more.
fn blend(count: usize) -> String {
    let part = |at: usize| format!("c{at}={}", 1 + at % 3);
    format!("blend({})", (0..count).map(part).collect::<Vec<_>>().join(", "))
}

#[test]
fn three_thousand_corpora_resume_anywhere() {
    let Some(world) = World::new("three_thousand_corpora_resume_anywhere") else {
        return;
    };
    let corpora = corpora(&world);
    let plan = format!("window(32) | shuffle(7) | {} | batch(8)", blend(CORPORA));
    let want = expected(&plan, &corpora.iter().collect::<Vec<_>>(), 0..400);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let url = target.url("");
    let batch_bytes = 8 * 32 * 2;
    for first in [0, 371] {
        let first_text = first.to_string();
        let args = ["--plan", &plan, "--dtype", "u16", "--first-batch", &first_text];
        let args = [&args[..], &["--batches", "29"]].concat();
        let want = &want[first * batch_bytes..(first + 29) * batch_bytes];
        assert_same(&Cat::through(&world, &dpu, &url, &args).finish().good().stdout, want);
        assert_same(&Cat::local(&world, "", &args).finish().good().stdout, want);
    }
    // Blended in proportion, without a blend: the files are sorted by name, and have 3 to 11
    // samples each.
    let mut sorted: Vec<&Corpus> = corpora.iter().collect();
    sorted.sort_by(|a, b| a.path.cmp(&b.path));
    let part =
        |corpus: &&Corpus| format!("\"{}\"={}", corpus.path.display(), corpus.tokens.len() / 32);
    let parts = sorted.iter().map(part).collect::<Vec<_>>().join(", ");
    let plan = "window(32) | shuffle(7) | batch(8)";
    let blended = format!("{plan} | blend({parts})");
    let args = ["--plan", plan, "--dtype", "u16", "--batches", "20"];
    let ran = Cat::local(&world, "c*.bin", &args).finish().good();
    assert_same(&ran.stdout, &expected(&blended, &sorted, 0..20));
}

#[test]
fn one_of_thousands_that_is_missing_is_named() {
    let Some(world) = World::new("one_of_thousands_that_is_missing_is_named") else {
        return;
    };
    corpora(&world);
    fs::remove_file(world.data("c1234.bin")).expect("it was written");
    let plan = format!("window(32) | shuffle(7) | {} | batch(8)", blend(CORPORA));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let args = ["--plan", &plan, "--dtype", "u16", "--batches", "1"];
    let ran = Cat::through(&world, &dpu, &target.url(""), &args).finish();
    ran.failed(2, &["c1234: no such dataset"], "names are paths below a --root");
    let ran = Cat::local(&world, "", &args).finish();
    ran.failed(2, &["c1234: no such file"], "dq://HOST/NAME");
}

#[test]
fn more_corpora_than_a_blend_takes_are_refused() {
    let Some(world) = World::new("more_corpora_than_a_blend_takes") else {
        return;
    };
    let plan = format!("window(32) | {}", blend(4_097));
    let ran = Cat::local(&world, "", &["--plan", &plan, "--batches", "1"]).finish();
    ran.failed(2, &["c4096", "more than 4096 datasets"], "join");
    for at in 0..4_097 {
        fs::write(world.data(&format!("c{at}.bin")), [1; 64]).expect("the folder is writable");
    }
    let args = ["--plan", "window(32)", "--dtype", "u16", "--batches", "1"];
    let ran = Cat::local(&world, "*.bin", &args).finish();
    ran.failed(2, &["4097 files", "4096"], "join");
}
