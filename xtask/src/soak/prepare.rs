//! The programs of a soak: `dquant` and the drop-in library as the tests have built them, and the C
//! program for verbs.
//!
//! Nothing is installed. Without a compiler or the headers of libibverbs there are no verbs
//! programs, and the reason is printed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{self, Failure};
use crate::test;
use crate::workspace::{self, cargo, root};

/// Where the programs are.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) dquant: PathBuf,
    /// The program for verbs, or why there is none.
    pub(super) verbs: Result<PathBuf, String>,
}

impl Programs {
    /// The given program, and the one that [`compile`] has left in the folder.
    pub(super) fn at(dquant: &Path, folder: &Path, no_verbs: Option<&str>) -> Programs {
        let verbs = match no_verbs {
            None => Ok(program(folder)),
            Some(why) => Err(why.to_owned()),
        };
        Programs { dquant: dquant.to_owned(), verbs }
    }
}

fn program(folder: &Path) -> PathBuf {
    folder.join("verbs")
}

/// Builds the debug program with the packages and features of `cargo xtask test`, development
/// dependencies included, so that after the tests there is nothing to build.
///
/// # Errors
/// When it does not build.
pub(super) fn build() -> Result<PathBuf, Failure> {
    // Of the packages, only that of the program has a test with this name, and brings the program
    // along.
    let args = ["test", "--workspace", "--features", test::FEATURES, "--no-run", "--test", "cli"];
    shell::run(&mut cargo(&args))?;
    Ok(workspace::target_directory()?.join("debug/dquant"))
}

/// Compiles the program for verbs.
///
/// # Errors
/// Why that cannot be done here.
pub(super) fn compile(folder: &Path) -> Result<(), String> {
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-o"]).arg(program(folder));
    cc.arg(root().join("xtask/soak/verbs.c")).args(["-libverbs", "-lpthread"]);
    let output = cc.output().map_err(|error| format!("no cc: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().find(|line| line.contains("error")).unwrap_or("cc failed");
    Err(format!("no libibverbs-dev? {}", line.trim()))
}
