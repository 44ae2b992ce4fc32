//! `cargo xtask chaos`: the long run of the simulation, and the check of its checker.
//!
//! It has two parts. The transport runs thousands of seeds of random programs under random faults,
//! and so do brains and agents of Parfait; then every seeded bug has to be found, which shows that
//! the first part would find bugs. They are tests of the packages `sim` and `parfait`, built
//! optimised and without the rest of the workspace, so that a machine starts within a minute.

use crate::Command;
use crate::shell::{self, Failure};
use crate::workspace::cargo;

pub(crate) const COMMAND: Command = Command {
    name: "chaos",
    summary: "Thousands of seeds of the simulation, and every seeded bug found",
    help: "\
Usage: cargo xtask chaos [--seeds FIRST..END]

Runs the transport in virtual time through these seeds: random programs, random faults, every completion and byte
checked. Does the same with brains and agents (docs/parfait-brain.md). Then plants known bugs one at a time and counts the
seeds until each is found. docs/simulation.md says what is checked. A seed that fails is printed with the command that replays it.

Options:
  --seeds FIRST..END   seeds of the first part [default: 0..4000]

Exit code: 0 nothing found and every seeded bug found, 1 otherwise, 2 usage or environment.

Examples:
  cargo xtask chaos                       about two minutes
  cargo xtask chaos --seeds 4000..40000   seeds that nobody has run before",
    run,
};

const DEFAULT_SEEDS: &str = "0..4000";

/// The test of Parfait that puts a bug in, one after the other.
const SEEDED_BUGS: &str = "every_seeded_bug_is_found";

fn run(args: &[String]) -> Result<(), Failure> {
    let seeds = parse(args)?;
    shell::run(test("sim", &["--test", "it", "chaos"]).env("DQUANT_SEEDS", seeds))?;
    shell::run(test("parfait", &["--test", "brains"]).env("DQUANT_SEEDS", seeds))?;
    shell::run(&mut test("sim", &["--features", "seeded-bugs", "--test", "seeded"]))?;
    shell::run(&mut test(
        "parfait",
        &["--features", "seeded-bugs", "--test", "brains", SEEDED_BUGS],
    ))
}

fn parse(args: &[String]) -> Result<&str, Failure> {
    match args {
        [] => Ok(DEFAULT_SEEDS),
        [option, seeds] if option == "--seeds" && seeds.contains("..") => Ok(seeds),
        _ => Err(Failure::usage("expected nothing, or --seeds FIRST..END")),
    }
}

fn test(package: &str, what: &[&str]) -> std::process::Command {
    let mut command = cargo(&["test", "--release", "--package", package]);
    command.args(what).args(["--", "--nocapture"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A filter that names no test would pass, and find nothing.
    #[test]
    fn the_test_of_seeded_bugs_exists() {
        let file = crate::workspace::root().join("crates/parfait/tests/brains/main.rs");
        let text = std::fs::read_to_string(file).expect("the tests of brains");
        assert!(text.contains(&format!("fn {SEEDED_BUGS}()")));
    }

    #[test]
    fn seeds_are_a_range() {
        let range = ["--seeds".to_owned(), "3..9".to_owned()];
        assert_eq!(parse(&range).expect("a range"), "3..9");
        assert_eq!(parse(&[]).expect("the default"), DEFAULT_SEEDS);
        assert!(parse(&range[..1]).is_err() && parse(&["3..9".to_owned()]).is_err());
    }
}
