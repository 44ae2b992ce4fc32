//! `cargo xtask python`: builds the Python package as users do and runs its tests.
//!
//! Everything lives below the target folder: a virtual environment with maturin and numpy, and the wheel. The only
//! network that is used is PyPI, the first time.

use std::path::{Path, PathBuf};
use std::process;

use crate::Command;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo, root};

pub(crate) const COMMAND: Command = Command {
    name: "python",
    summary: "The Python package: built as a wheel and tested in a virtual environment",
    help: "\
Usage: cargo xtask python [-k PATTERN]

Makes a virtual environment below the target folder, installs maturin and numpy from PyPI into it (once), builds
`bindings/python` as a wheel, installs that, and runs `bindings/python/tests` against daemons of a fresh `dquant`.
Skipped, with the reason, where there is no Python 3.11 with `venv` or PyPI cannot be reached.

Options:
  -k PATTERN  only tests whose name contains this text

Exit code: 0 all passed or skipped, 1 a test failed, 2 usage or environment.

Examples:
  cargo xtask python             everything
  cargo xtask python -k ctrl_c   tests with `ctrl_c` in their name",
    run,
};

fn run(args: &[String]) -> Result<(), Failure> {
    match args {
        [] => {}
        [flag, _] if flag == "-k" => {}
        _ => return Err(Failure::usage("options are: -k PATTERN; see --help")),
    }
    let target = workspace::target_directory()?;
    let folder = target.join("python");
    let python = match environment(&folder) {
        Ok(python) => python,
        Err(reason) => {
            println!("skipped: {reason}");
            return Ok(());
        }
    };
    shell::run(&mut cargo(&["build", "--package", "dquant", "--bin", "dquant"]))?;
    install(&python, &folder.join("wheels"))?;
    let mut tests = process::Command::new(&python);
    tests.args(["-B", "-m", "unittest", "discover", "-s", "bindings/python/tests", "-v"]);
    let binary = target.join("debug/dquant");
    shell::run(tests.args(args).env("DQUANT", binary).current_dir(root()))
}

/// The interpreter of a virtual environment with what the build and the tests need, or why there is none.
fn environment(folder: &Path) -> Result<PathBuf, String> {
    if !shell::answers("python3", &["-c", "import sys; assert sys.version_info >= (3, 11)"]) {
        return Err("no python3 of version 3.11 or later".into());
    }
    let venv = folder.join("venv");
    let python = venv.join("bin/python");
    let answers = |args: &[&str]| shell::answers(&python.to_string_lossy(), args);
    if !answers(&["-m", "pip", "--version"]) {
        let mut make = process::Command::new("python3");
        make.args(["-m", "venv", "--clear"]).arg(&venv);
        shell::run(&mut make).map_err(|failure| format!("no virtual environment: {failure}"))?;
    }
    if !answers(&["-c", "import maturin, numpy"]) {
        let mut pip = process::Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "maturin>=1.9,<2", "numpy"]);
        shell::run(&mut pip).map_err(|failure| format!("PyPI cannot be used: {failure}"))?;
    }
    Ok(python)
}

/// Builds the package in the profile of the other tests and installs it in place of an earlier build.
fn install(python: &Path, wheels: &Path) -> Result<(), Failure> {
    let mut maturin = process::Command::new(python);
    maturin.args([
        "-m",
        "maturin",
        "build",
        "--quiet",
        "--locked",
        "--profile",
        "dev",
        "--interpreter",
    ]);
    maturin.arg(python).arg("--out").arg(wheels);
    shell::run(maturin.current_dir(root().join("bindings/python")))?;
    let mut pip = process::Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index"]);
    shell::run(pip.arg("--find-links").arg(wheels).arg("dquant"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pattern_may_follow() {
        for wrong in [&["-k"][..], &["ctrl_c"], &["-k", "a", "b"]] {
            let args: Vec<String> = wrong.iter().map(|arg| (*arg).to_owned()).collect();
            assert_eq!(run(&args).expect_err("refused").exit_code(), 2);
        }
    }
}
