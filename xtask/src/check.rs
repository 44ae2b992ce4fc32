//! `cargo xtask check`: what a change must pass before review.
//!
//! The steps are a table, cheap ones first. All of them run even after one has failed, so that one
//! run shows every failure; the summary at the end names each with its time. A step whose tool is
//! not installed is reported as skipped, never as passed.

use std::time::{Duration, Instant};

use crate::shell::{self, Failure, Outcome};
use crate::workspace::{self, cargo, rustc_field};
use crate::{Command, layers, no_os, tidy};

pub(crate) const COMMAND: Command = Command {
    name: "check",
    summary: "Formatting, lints, documentation, layering, the no-OS proof and house rules",
    help: "\
Usage: cargo xtask check [STEP…]

Steps, in this order; all of them without arguments:
  rustc    the compiler is the one that the project is developed with
  tidy     each Rust file begins with a `//!` header; no marks of unfinished work, no paths of one machine; constants,
           paths and long names that documents quote exist in the sources; prose of Markdown
           and comments end at column 100
  fmt      rustfmt leaves every file as it is
  layers   who may depend on whom, between crates and inside them; what pure crates may depend on
  clippy   no lint fires, functions of at most 70 lines; tests and benches included
  doc      rustdoc is silent, private items included
  no-os    the pure crates link without an operating system
  deny     licences, sources, duplicates and advisories of dependencies (installs cargo-deny when it is missing)

Only when it is named, because it builds crates a second time:
  portable the paths that every processor can take pass the tests of those that one processor has

Exit code: 0 all passed, 1 a step failed, 2 usage or environment.

Examples:
  cargo xtask check                everything but `portable`
  cargo xtask check tidy layers    two steps, in seconds",
    run,
};

/// One step of the check.
struct Step {
    name: &'static str,
    run: fn() -> Result<Outcome, Failure>,
}

/// The step that builds crates a second time.
const ON_REQUEST: &str = "portable";

const STEPS: &[Step] = &[
    Step { name: "rustc", run: rustc },
    Step { name: "tidy", run: tidy::check },
    Step { name: "fmt", run: fmt },
    Step { name: "layers", run: layers::check },
    Step { name: "clippy", run: clippy },
    Step { name: "doc", run: doc },
    Step { name: "no-os", run: no_os::check },
    Step { name: "portable", run: portable },
    Step { name: "deny", run: deny },
];

fn run(args: &[String]) -> Result<(), Failure> {
    let mut report = Vec::new();
    for step in select(args)? {
        eprintln!("==> {}", step.name);
        let started = Instant::now();
        let result = (step.run)();
        if let Err(failure) = &result {
            eprintln!("    {failure}");
        }
        report.push((step.name, result, started.elapsed()));
    }
    summarise(&report)
}

fn select(names: &[String]) -> Result<Vec<&'static Step>, Failure> {
    if names.is_empty() {
        return Ok(STEPS.iter().filter(|step| step.name != ON_REQUEST).collect());
    }
    names.iter().map(|name| find(name)).collect()
}

fn find(name: &str) -> Result<&'static Step, Failure> {
    STEPS.iter().find(|step| step.name == name).ok_or_else(|| {
        let known: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        Failure::usage(format!("no step '{name}'; there are: {}", known.join(", ")))
    })
}

type Line = (&'static str, Result<Outcome, Failure>, Duration);

fn summarise(report: &[Line]) -> Result<(), Failure> {
    eprintln!();
    for (name, result, elapsed) in report {
        let verdict = match result {
            Ok(Outcome::Passed) => "ok".to_owned(),
            Ok(Outcome::PassedWithout(missing)) => format!("ok, without {missing}"),
            Ok(Outcome::Skipped(reason)) => format!("skipped: {reason}"),
            Err(_) => "FAILED".to_owned(),
        };
        println!("{name:<8}{:>7.1} s  {verdict}", elapsed.as_secs_f64());
    }
    let failed: Vec<&str> =
        report.iter().filter(|(_, result, _)| result.is_err()).map(|(name, ..)| *name).collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failure::check(format!("failed: {}", failed.join(", "))))
}

/// Lints, formatting and code generation change with the compiler, and `rust-toolchain.toml` cannot
/// name a version.
fn rustc() -> Result<Outcome, Failure> {
    let (release, wanted) = (rustc_field("release")?, env!("CARGO_PKG_RUST_VERSION"));
    if release.starts_with(&format!("{wanted}.")) {
        return Ok(Outcome::Passed);
    }
    Err(Failure::check(format!("rustc is {release}; Cargo.toml says rust-version = \"{wanted}\"")))
}

fn fmt() -> Result<Outcome, Failure> {
    shell::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    shell::run(&mut cargo(&["fmt", "--manifest-path", no_os::MANIFEST, "--check"]))?;
    Ok(Outcome::Passed)
}

fn clippy() -> Result<Outcome, Failure> {
    shell::run(&mut cargo(&[
        "clippy",
        "--workspace",
        "--features",
        "dquant/full",
        "--all-targets",
        "--keep-going",
        "--",
        "-D",
        "warnings",
    ]))?;
    Ok(Outcome::Passed)
}

/// Builds the crates with paths of their own for a processor without these, and runs what tests
/// them: kernels, copies past the cache, FIFOs in shared memory with their model.
fn portable() -> Result<Outcome, Failure> {
    let target = workspace::target_directory()?.join("portable");
    let mut test = cargo(&["test", "--quiet", "--lib", "-p", "host", "-p", "nic", "--target-dir"]);
    test.arg(&target).env("RUSTFLAGS", "--cfg portable");
    test.args(["--", "kernels", "ring::", "fifo", "segment"]);
    shell::run(&mut test)?;
    Ok(Outcome::Passed)
}

fn doc() -> Result<Outcome, Failure> {
    let mut command =
        cargo(&["doc", "--workspace", "--no-deps", "--document-private-items", "--keep-going"]);
    // Module tables link private modules on purpose: the documentation is built with them.
    let flags = "-D warnings -A rustdoc::private_intra_doc_links";
    shell::run(command.env("RUSTDOCFLAGS", flags))?;
    Ok(Outcome::Passed)
}

/// Version to install when there is no cargo-deny; an installed one of any version is used.
const DENY_VERSION: &str = "0.20.2";

fn deny() -> Result<Outcome, Failure> {
    if let Err(failure) = workspace::install("deny", DENY_VERSION) {
        return not_installed(failure, std::env::var_os("CI").is_some());
    }
    let check = ["deny", "check", "--hide-inclusion-graph"];
    shell::run(cargo(&check).args(["bans", "licenses", "sources"]))?;
    if shell::run(&mut cargo(&["deny", "fetch", "db"])).is_err() {
        return Ok(Outcome::PassedWithout("advisories: their database cannot be fetched".into()));
    }
    shell::run(cargo(&check).args(["--disable-fetch", "advisories"]))?;
    Ok(Outcome::Passed)
}

/// A developer may be offline; in CI (`CI` is set there), a step that does not run fails.
fn not_installed(failure: Failure, in_ci: bool) -> Result<Outcome, Failure> {
    if in_ci {
        return Err(failure);
    }
    Ok(Outcome::Skipped(format!("cargo-deny cannot be installed: {failure}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_step() {
        for step in STEPS {
            assert!(COMMAND.help.contains(&format!("\n  {}", step.name)), "{}", step.name);
        }
    }

    #[test]
    fn a_gate_does_not_skip_the_policy_for_dependencies() {
        let failure = || Failure::check("offline");
        assert!(not_installed(failure(), true).is_err());
        assert!(matches!(not_installed(failure(), false), Ok(Outcome::Skipped(_))));
    }

    #[test]
    fn an_unknown_step_is_refused_before_anything_runs() {
        let failure = run(&["fmt".to_owned(), "frmt".to_owned()]).expect_err("no such step");
        assert_eq!(failure.exit_code(), 2);
    }
}
