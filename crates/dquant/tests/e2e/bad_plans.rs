//! Plans with a mistake: it is shown in its place, before anything is opened.

use std::path::Path;

use xio::dataset::Dtype;

use super::corpus::{Corpus, tokens};
use super::harness::{Cat, World, path};

/// A plan, the text under which the carets stand, what the error says, what the hint says.
const MISTAKES: &[(&str, &str, &str, &str)] = &[
    ("windw(100)", "windw", "windw", "window"),
    ("window(100) | narrow(u17)", "u17", "u17", "narrow(u16)"),
    ("window(100) | narrow(f32)", "f32", "f32", "narrow(u16)"),
    ("window(100", "", "expected", "dquant cat --help"),
    ("window(100) narrow(u16)", "narrow", "expected", "dquant cat --help"),
    ("window(100) | blend(a=-1, b=2)", "-1", "negative", "0 to leave"),
    ("window(100) | blend(a=0, b=0)", "blend(a=0, b=0)", "zero", "above zero"),
    ("window(100) | blend(a=1e-30, b=1)", "1e-30", "18 digits", "0.5"),
    ("window(100) | blend(a=much, b=1)", "much", "not a number", "1/3"),
    ("window(0)", "0", "outside", "nearest"),
    ("window(99999999)", "99999999", "outside", "nearest"),
    ("window(100) | window(50)", "window", "second time", "keep one"),
    ("narrow(u16)", "", "how long", "window(2048)"),
    ("window(100) | shuffle(1, blocks=0)", "0", "outside", "nearest"),
    ("window(100) | shuffle(x)", "x", "whole number", "digits"),
    ("window(100) | shuffle(1, rows=2)", "rows", "rows", "blocks"),
    ("", "", "empty", "window(2048)"),
];

#[test]
fn a_mistake_in_a_plan_is_shown_in_its_place() {
    let Some(world) = World::new("a_mistake_in_a_plan_is_shown_in_its_place") else {
        return;
    };
    // No DPU and no target: neither is needed to see the mistake.
    let nowhere = path(Path::new("/nonexistent/dpu.sock"));
    for (plan, place, error, hint) in MISTAKES {
        let args = ["cat", "dq://127.0.0.1:1/web", "--dpu", nowhere, "--plan", plan];
        let ran = world.run(&args);
        ran.failed(2, &["plan", error], hint);
        let lines: Vec<&str> = ran.stderr.lines().collect();
        let carets = lines.iter().position(|line| line.trim_start().starts_with('^'));
        let carets = carets.unwrap_or_else(|| panic!("{plan}: no place in {}", ran.stderr));
        let column = lines[carets].find('^').expect("just found");
        let shown = lines[carets - 1].get(column..).unwrap_or("");
        assert!(shown.starts_with(place), "{plan}: {}", ran.stderr);
        let hints = lines.iter().filter(|line| line.starts_with("hint: ")).count();
        assert_eq!(hints, 1, "{}", ran.stderr);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_it_runs() {
    let Some(world) = World::new("what_does_not_fit_is_refused_before_it_runs") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(3_000_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&["--memory", "16MiB"]));
    type Case = (&'static [&'static str], &'static [&'static str], &'static str);
    let cases: &[Case] = &[
        (
            &["--plan", "window(1024) | narrow(u16) | batch(64)", "--slot-size", "64KiB"],
            &["batch of 131072 bytes", "slot of 65536"],
            "--slot-size",
        ),
        (
            &["--plan", "window(1024) | shuffle(1, blocks=32) | batch(64)"],
            &["bytes of staging buffers", "needed"],
            "blocks=",
        ),
        (&["--plan", "window(3000000)"], &["window"], "nearest"),
        (&["--slots", "0"], &["slots", "0"], "--slots"),
        (&["--slots", "4000000000"], &["ring"], "--slots"),
        (&["--slot-size", "1000"], &["slot"], "--slot-size"),
        (&["--slot-size", "8GiB"], &["slot"], "--slot-size"),
        (&["--first-batch", "18446744073709551615"], &["18446744073709551615"], "--first-batch"),
    ];
    let memory = ["--memory", "16MiB"];
    for (args, parts, hint) in cases {
        let ran = Cat::through(&world, &dpu, &target.url("web"), args).finish();
        ran.failed(2, parts, hint);
        let args = [*args, &memory].concat();
        Cat::alone(&world, &target.url("web"), &args).finish().failed(2, parts, hint);
    }
    let status = dpu.status(&world);
    assert_eq!(status.counter("dpu.streams"), 0);
}
