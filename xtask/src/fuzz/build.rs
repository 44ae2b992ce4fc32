//! Building the harnesses, with coverage counters or without.
//!
//! The flags are those that `cargo-bolero` passes; none of them needs a nightly compiler. A target
//! is named even though it is the host, because cargo then keeps the flags away from build scripts
//! and macros, which would not link.

use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::Message;

use super::{Engine, Harness};
use crate::shell::{self, Failure};
use crate::workspace::{cargo, rustc_field};

/// Counts edges and keeps a table of their places.
const INSTRUMENTED: &[&str] = &[
    "--cfg=fuzzing",
    "--cfg=fuzzing_libfuzzer",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
];

/// Also records the operands of comparisons. That finds magic numbers and takes half of the time.
const TRACED: &str = "-Cllvm-args=-sanitizer-coverage-trace-compares";

/// libFuzzer where it can be built.
pub(super) fn best_engine() -> Engine {
    if cfg!(target_os = "linux") && shell::answers("c++", &["--version"]) {
        return Engine::LibFuzzer;
    }
    eprintln!("    no C++ compiler for libFuzzer: random inputs, without guidance by coverage");
    Engine::Random
}

/// The test binary that holds every harness, made as `wanted` needs it.
///
/// # Errors
/// Whatever cargo reports.
pub(super) fn program(wanted: &Harness, engine: Engine, folder: &Path) -> Result<PathBuf, Failure> {
    let mut build = cargo(&["test", "--no-run", "--profile=fuzz", "--package=fuzz"]);
    build.args(["--test=harnesses", "--message-format=json-render-diagnostics"]);
    build.arg("--target").arg(rustc_field("host")?);
    if engine == Engine::LibFuzzer {
        let traced = wanted.traced.then_some(TRACED);
        let flags: Vec<&str> = INSTRUMENTED.iter().copied().chain(traced).collect();
        let place = if wanted.traced { "build-traced" } else { "build" };
        build.arg("--target-dir").arg(folder.join(place));
        build.env("RUSTFLAGS", flags.join(" "));
    }
    executables(&mut build)?.pop().ok_or_else(|| Failure::check("cargo built no test binary"))
}

/// The executables of a cargo invocation that reports in JSON.
///
/// # Errors
/// Whatever cargo reports.
pub(crate) fn executables(build: &mut Command) -> Result<Vec<PathBuf>, Failure> {
    let messages = shell::output(build)?;
    let made = Message::parse_stream(messages.as_bytes()).filter_map(|message| match message {
        Ok(Message::CompilerArtifact(artifact)) => artifact.executable,
        _ => None,
    });
    Ok(made.map(Into::into).collect())
}
