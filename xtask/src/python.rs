//! `cargo xtask python`: builds the Python package as users do and runs its tests.
//!
//! Everything lives below the target folder: a virtual environment with maturin and numpy, and the
//! wheel. The only network that is used is PyPI, the first time. [`wheel`] makes the package that
//! others install.

mod wheel;

use std::ffi::OsString;
use std::fs;
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
       cargo xtask python --examples
       cargo xtask python --wheel

Makes a virtual environment below the target folder, installs maturin and numpy from PyPI into it (once), builds
`bindings/python` as a wheel, installs that, and runs `bindings/python/tests` against daemons of a fresh `dquant`.
Skipped, with the reason, where there is no Python 3.11 with `venv` or PyPI cannot be reached. Where `python3` has PyTorch,
its tests and the example run, too: `examples/python/train_gpt.py` trains, evaluates and resumes on small data.

With --wheel: the wheel for others. Built in release mode with zig as linker, for glibc 2.28 and Python 3.11 and later of
this machine's architecture, with the command line `dquant` (every feature) and its libibverbs.so.1 inside. auditwheel
checks the platform; then it is installed in a clean virtual environment, where the same tests run with its own `dquant`.
The path of the wheel is the last line of the output.

Options:
  -k PATTERN  only tests whose name contains this text
  --examples  only the tests that train; skipped where python3 has no PyTorch
  --wheel     build, check and test a wheel for manylinux_2_28

Exit code: 0 all passed or skipped, 1 a test failed, 2 usage or environment.

Examples:
  cargo xtask python             everything
  cargo xtask python -k ctrl_c   tests with `ctrl_c` in their name
  cargo xtask python --examples  the example trains, evaluates and resumes
  cargo xtask python --wheel     a wheel that `pip install` takes anywhere",
    run,
};

fn run(args: &[String]) -> Result<(), Failure> {
    match args {
        [] => {}
        [flag, _] if flag == "-k" => {}
        [flag] if flag == "--examples" => {}
        [flag] if flag == "--wheel" => return wheel::run(),
        _ => {
            let options = "options are: -k PATTERN, --examples, or --wheel; see --help";
            return Err(Failure::usage(options));
        }
    }
    let trains = args.first().is_some_and(|flag| flag == "--examples");
    let torch = torch();
    if trains && torch.is_none() {
        println!(
            "skipped: examples: python3 has no PyTorch, which is too large to be installed for them"
        );
        return Ok(());
    }
    let target = workspace::target_directory()?;
    let folder = target.join("python");
    let python = match environment(&folder.join("venv"), TOOLS) {
        Ok(python) => python,
        Err(reason) => {
            println!("skipped: {reason}");
            return Ok(());
        }
    };
    shell::run(&mut cargo(&[
        "build",
        "--package",
        "dquant",
        "--bin",
        "dquant",
        "--features",
        "dquant/wasm",
    ]))?;
    // In the profile of the other tests.
    let wheel =
        build(&python, &folder.join("wheels"), &["--profile", "dev", "--features", "full"])?;
    install(&python, &wheel)?;
    let examples = ["-k".to_owned(), "test_training".to_owned()];
    let args = if trains { &examples } else { args };
    show_packages(&python, torch.as_deref())?;
    if args.is_empty() {
        install_as_users(&folder.join("user-venv"), &target.join("debug"))?;
    }
    test(&python, &target.join("debug/dquant"), args)
}

/// The folder with the packages of a `python3` that has PyTorch.
fn torch() -> Option<String> {
    // Asked first: an answer shows what goes wrong.
    if !shell::answers("python3", &["-c", "import torch"]) {
        return None;
    }
    let ask = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])";
    let answer = shell::output(process::Command::new("python3").args(["-c", ask])).ok()?;
    Some(answer.trim().to_owned())
}

/// What builds the package and what its tests need.
const TOOLS: &[&str] = &["maturin>=1.9,<2", "numpy"];

/// Lets the virtual environment of this interpreter see packages of that folder, behind its own, or
/// no others.
fn show_packages(python: &Path, packages: Option<&str>) -> Result<(), Failure> {
    let ask = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let own = shell::output(process::Command::new(python).args(["-c", ask]))?;
    let file = Path::new(own.trim()).join("python3.pth");
    let done = match packages {
        Some(packages) => fs::write(&file, packages),
        None if file.exists() => fs::remove_file(&file),
        None => return Ok(()),
    };
    done.map_err(|error| Failure::usage(format!("cannot write {}: {error}", file.display())))
}

/// Runs the tests of the package with an interpreter that has it, and this binary; `more` are
/// options of unittest.
fn test(python: &Path, binary: &Path, more: &[String]) -> Result<(), Failure> {
    let mut tests = process::Command::new(python);
    tests.args(["-B", "-m", "unittest", "discover", "-s", "bindings/python/tests", "-v"]);
    tests.args(more).env("DQUANT", binary).current_dir(root());
    // Streams without a DPU run in the interpreter.
    shell::run_watched(&mut tests)
}

/// The interpreter of a virtual environment with these packages, or why there is none.
fn environment(venv: &Path, packages: &[&str]) -> Result<PathBuf, String> {
    if !shell::answers("python3", &["-c", "import sys; assert sys.version_info >= (3, 11)"]) {
        return Err("no python3 of version 3.11 or later".into());
    }
    let python = venv.join("bin/python");
    if !shell::answers(&python.to_string_lossy(), &["-m", "pip", "--version"]) {
        let mut make = process::Command::new("python3");
        make.args(["-m", "venv", "--clear"]).arg(venv);
        shell::run(&mut make).map_err(|failure| format!("no virtual environment: {failure}"))?;
    }
    // Asks PyPI for nothing when all of them are there.
    let mut pip = process::Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet"]).args(packages);
    shell::run(&mut pip).map_err(|failure| format!("PyPI cannot be used: {failure}"))?;
    Ok(python)
}

/// Builds the package as a wheel, the only one in the folder `wheels`, with these options of
/// maturin.
///
/// # Errors
/// When it cannot be built.
pub(crate) fn build(python: &Path, wheels: &Path, options: &[&str]) -> Result<PathBuf, Failure> {
    // An earlier build of another version would stay beside this one.
    let _ = fs::remove_dir_all(wheels);
    let mut maturin = process::Command::new(python);
    maturin.args(["-m", "maturin", "build", "--quiet", "--locked", "--interpreter"]).arg(python);
    maturin.arg("--out").arg(wheels).args(options);
    shell::run(
        maturin.current_dir(root().join("bindings/python")).env("PATH", search_path(python)),
    )?;
    only_wheel(wheels)
}

/// Installs a wheel in place of an earlier build.
///
/// # Errors
/// When pip refuses it.
pub(crate) fn install(python: &Path, wheel: &Path) -> Result<(), Failure> {
    let mut pip = process::Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index"]);
    shell::run(pip.arg(wheel))
}

/// Installs the package from its folder into a new virtual environment, as users do, which has to
/// give them the command line, too. It takes what is built in the folder `built`.
fn install_as_users(venv: &Path, built: &Path) -> Result<(), Failure> {
    shell::run(process::Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv))?;
    let mut pip = process::Command::new(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "./bindings/python"]).current_dir(root());
    pip.env("DQUANT_PROGRAMS", built);
    shell::run(pip.env("MATURIN_PEP517_ARGS", "--locked --profile dev --features full"))?;
    let dquant = venv.join("bin/dquant");
    let shown = shell::output(process::Command::new(&dquant).arg("--help"))?;
    if !shown.contains("Usage: dquant") {
        return Err(Failure::check(format!("{}: no help in {shown}", dquant.display())));
    }
    // The library of `dquant run` came with it.
    let mut run = process::Command::new(&dquant);
    let link = "readlink -f \"${LD_LIBRARY_PATH%%:*}/libibverbs.so.1\"";
    let used = shell::output(run.args(["run", "--", "sh", "-c", link]))?;
    let library = venv.join("lib/dquant");
    match used.contains(&*library.to_string_lossy()) {
        true => Ok(()),
        false => Err(Failure::check(format!("dquant run does not use {}", library.display()))),
    }
}

/// The wheel in a folder.
fn only_wheel(folder: &Path) -> Result<PathBuf, Failure> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut wheels = files.filter(|path| path.extension().is_some_and(|end| end == "whl"));
    wheels.next().ok_or_else(|| Failure::check(format!("no wheel in {}", folder.display())))
}

/// The programs of a virtual environment before all others: zig is found by its name.
fn search_path(python: &Path) -> OsString {
    let mut path = python.parent().map(OsString::from).unwrap_or_default();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pattern_may_follow() {
        for wrong in [&["-k"][..], &["ctrl_c"], &["-k", "a", "b"], &["--wheel", "x"]] {
            let args: Vec<String> = wrong.iter().map(|arg| (*arg).to_owned()).collect();
            assert_eq!(run(&args).expect_err("refused").exit_code(), 2);
        }
    }
}
