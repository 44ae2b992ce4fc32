//! `cargo xtask test`: the whole suite, and an account of what did not run.
//!
//! The suite is every unit, integration and end-to-end test of the workspace, then the examples in
//! the documentation. A test that cannot run on this machine (no io_uring, no tshark, no Python)
//! passes early and appends one line, its name and the reason, to the file that `DQUANT_SKIP_LOG`
//! names; the lines are printed here at the end, because a test runner hides what passing tests
//! print.

use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::process;
use std::thread;

use crate::Command;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo};

/// What the packages turn on: its tests are part of the gate.
pub(crate) const FEATURES: &str = "dquant/full";

pub(crate) const COMMAND: Command = Command {
    name: "test",
    summary: "The whole test suite: unit, integration, end to end, documentation",
    help: "\
Usage: cargo xtask test [--release] [FILTER]

Runs the tests with cargo-nextest where it is installed, with `cargo test` elsewhere, then the documentation's
examples. What a machine cannot run is listed at the end with the reason.

Options:
  --release  optimised build: slower to start, for the long properties
  FILTER     only tests whose name contains this text; leaves the documentation's examples out

Exit code: 0 all passed, 1 a test failed, 2 usage or environment.

Examples:
  cargo xtask test             everything
  cargo xtask test capture     tests with `capture` in their name",
    run,
};

/// Names the file that tests append their reason to when they cannot run here.
const SKIP_LOG: &str = "DQUANT_SKIP_LOG";

/// The user's options.
#[derive(Default)]
struct Options<'a> {
    release: bool,
    filter: Option<&'a str>,
}

fn run(args: &[String]) -> Result<(), Failure> {
    let options = parse(args)?;
    let skip_log = workspace::target_directory()?.join("skipped-tests.log");
    start_log(&skip_log)?;
    let suite = shell::run(suite(&options).env(SKIP_LOG, &skip_log));
    let examples = if options.filter.is_none() {
        shell::run(examples(&options).env(SKIP_LOG, &skip_log))
    } else {
        Ok(())
    };
    report_skipped(&skip_log);
    suite.and(examples)
}

fn parse(args: &[String]) -> Result<Options<'_>, Failure> {
    let mut options = Options::default();
    for arg in args {
        match arg.as_str() {
            "--release" => options.release = true,
            flag if flag.starts_with('-') => {
                return Err(Failure::usage(format!("no option '{flag}'; see --help")));
            }
            _ if options.filter.is_some() => {
                return Err(Failure::usage(format!("one filter at a time, got '{arg}' as well")));
            }
            filter => options.filter = Some(filter),
        }
    }
    Ok(options)
}

fn start_log(skip_log: &Path) -> Result<(), Failure> {
    let folder = skip_log.parent().unwrap_or(skip_log);
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(skip_log, ""))
        .map_err(|error| Failure::usage(format!("cannot write {}: {error}", skip_log.display())))
}

fn suite(options: &Options<'_>) -> process::Command {
    if shell::answers("cargo-nextest", &["--version"]) {
        return nextest(options);
    }
    eprintln!(
        "    cargo-nextest is not installed: using `cargo test`, which runs one crate at a time"
    );
    cargo_test(options, &["--lib", "--bins", "--tests"])
}

/// With two places for each processor: `.config/nextest.toml` says which tests take both.
fn nextest(options: &Options<'_>) -> process::Command {
    let mut command =
        cargo(&["nextest", "run", "--workspace", "--features", FEATURES, "--no-fail-fast"]);
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    command.args(["--profile", "suite", "--test-threads", &(2 * processors).to_string()]);
    if options.filter.is_some() {
        command.arg("--no-tests=warn");
    }
    command.args(options.release.then_some("--release")).args(options.filter);
    command
}

fn examples(options: &Options<'_>) -> process::Command {
    cargo_test(options, &["--doc"])
}

fn cargo_test(options: &Options<'_>, what: &[&str]) -> process::Command {
    let mut command = cargo(&["test", "--workspace", "--features", FEATURES, "--no-fail-fast"]);
    command.args(what).args(options.release.then_some("--release")).args(options.filter);
    command
}

fn report_skipped(skip_log: &Path) {
    let lines = fs::read_to_string(skip_log).unwrap_or_default();
    if lines.is_empty() {
        println!("skipped: nothing");
    }
    for line in lines.lines() {
        println!("skipped: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_and_unknown_ones_refused() {
        let args = ["--release".to_owned(), "psn".to_owned()];
        let options = parse(&args).expect("both are known");
        assert!(options.release);
        assert_eq!(options.filter, Some("psn"));
        assert!(parse(&["--relaese".to_owned()]).is_err());
        assert!(parse(&["a".to_owned(), "b".to_owned()]).is_err());
    }
}
