//! `cargo xtask coverage`: which lines of `roce` tests and fuzzing corpora reach.
//!
//! `cargo-llvm-cov` does the work. `roce` is built as its users build it, so its own unit tests are
//! neither run nor counted as lines; what counts is reached through the crate's interface.

use std::path::{Path, PathBuf};
use std::process::Command as Process;

use crate::Command;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo};

pub(crate) const COMMAND: Command = Command {
    name: "coverage",
    summary: "Line and region coverage of roce by tests and fuzzing corpora",
    help: "\
Usage: cargo xtask coverage [--html]

Runs the fuzzing harnesses (over their corpora and a bounded number of random inputs) and the integration tests of roce
with coverage instrumentation, and prints two tables of roce's source files: what the harnesses alone reach, and what
everything together reaches.

Installs cargo-llvm-cov when it is missing (some minutes, once). Needs llvm-profdata and llvm-cov of rustc's LLVM
version (`rustc -vV`): from the rustup component llvm-tools, or the package llvm-N of a distribution.

Options:
  --html  also write annotated sources to the target directory

Exit code: 0 good, 1 a test failed, 2 usage or environment.

Examples:
  cargo xtask coverage           the tables
  cargo xtask coverage --html    and every line with its count",
    run,
};

/// Version to install when there is no cargo-llvm-cov; an installed one of any version is used.
const VERSION: &str = "0.8.4";

/// Sources that are not measured: those of every other member.
const IGNORED: &str =
    "--ignore-filename-regex=^(.*/)?(fuzz|xtask|bindings|crates/[^r][^/]*|crates/roce/tests)/";

fn run(args: &[String]) -> Result<(), Failure> {
    let html = match args {
        [] => false,
        [flag] if flag == "--html" => true,
        _ => return Err(Failure::usage("the only option is --html; see --help")),
    };
    workspace::install("llvm-cov", VERSION)?;
    let tools = Tools::find()?;
    shell::run(&mut tools.llvm_cov(&["clean", "--workspace"]))?;
    let (runs, report) = (["--no-report", "--package"], ["report", IGNORED]);
    shell::run(tools.llvm_cov(&runs).args(["fuzz", "--tests"]))?;
    println!("roce, reached by the fuzzing harnesses:");
    shell::run(&mut tools.llvm_cov(&report))?;
    shell::run(tools.llvm_cov(&runs).args(["roce", "--test", "*"]))?;
    println!("roce, reached by the harnesses and its integration tests:");
    shell::run(&mut tools.llvm_cov(&report))?;
    if html {
        let folder = workspace::target_directory()?.join("coverage");
        shell::run(tools.llvm_cov(&report).args(["--html", "--output-dir"]).arg(&folder))?;
    }
    Ok(())
}

/// LLVM's tools; their file format changes with its version.
struct Tools {
    cov: PathBuf,
    profdata: PathBuf,
}

impl Tools {
    /// Looks in the toolchain, for a name with the version, and in Debian's folder.
    fn find() -> Result<Tools, Failure> {
        let sysroot = shell::output(Process::new("rustc").args(["--print", "sysroot"]))?;
        let host = workspace::rustc_field("host")?;
        let version = workspace::rustc_field("LLVM version")?;
        let major = version.split('.').next().unwrap_or_default();
        let find = |name: &str| {
            let candidates = [
                Path::new(sysroot.trim()).join("lib/rustlib").join(&host).join("bin").join(name),
                PathBuf::from(format!("/usr/lib/llvm-{major}/bin/{name}")),
            ];
            candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| {
                Failure::usage(format!(
                    "no {name} for LLVM {major}: install the rustup component llvm-tools, or the package llvm-{major}"
                ))
            })
        };
        Ok(Tools { cov: find("llvm-cov")?, profdata: find("llvm-profdata")? })
    }

    fn llvm_cov(&self, args: &[&str]) -> Process {
        let mut command = cargo(&["llvm-cov"]);
        command.args(args).env("LLVM_COV", &self.cov).env("LLVM_PROFDATA", &self.profdata);
        // More seeds take minutes here and reach nothing new.
        command.env("DQUANT_SEEDS", "0..200");
        command
    }
}
