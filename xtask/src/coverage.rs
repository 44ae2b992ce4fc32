//! `cargo xtask coverage`: which lines of `roce` tests and fuzzing corpora reach.
//!
//! Source-based coverage of the compiler: exact, by line and region. `roce` is built as its users build it, so its own
//! unit tests are neither run nor counted as lines; what counts is reached through the crate's interface. The profile
//! format changes with LLVM, so the tools must have the LLVM version of rustc; [`tool`] finds them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use serde_json::Value;

use crate::Command;
use crate::fuzz::build::executables;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo, root};

pub(crate) const COMMAND: Command = Command {
    name: "coverage",
    summary: "Line and region coverage of roce by tests and fuzzing corpora",
    help: "\
Usage: cargo xtask coverage [--html]

Builds the integration tests of roce and the fuzzing harnesses with coverage instrumentation, runs them (the harnesses
over their corpora and a bounded number of random inputs), and prints a table: each source file of roce with its lines
and regions, reached by the harnesses alone and by everything together.

Needs llvm-profdata and llvm-cov of rustc's LLVM version (`rustc -vV`): from the rustup component llvm-tools, or the
package llvm-N of a distribution.

Options:
  --html  also write annotated sources to the target directory

Exit code: 0 good, 1 a test failed, 2 usage or environment.

Examples:
  cargo xtask coverage           the table
  cargo xtask coverage --html    and every line with its count",
    run,
};

/// The sources that are measured.
const SOURCES: &str = "crates/roce/src";

/// Tests that count beside the harnesses: package and what of it.
const TESTS: &[&[&str]] = &[&["--package=roce", "--test=*"]];

/// The harnesses.
const HARNESSES: &[&str] = &["--package=fuzz", "--tests"];

fn run(args: &[String]) -> Result<(), Failure> {
    let html = match args {
        [] => false,
        [flag] if flag == "--html" => true,
        _ => return Err(Failure::usage("the only option is --html; see --help")),
    };
    let [profdata, cov] = [tool("llvm-profdata")?, tool("llvm-cov")?];
    let folder = workspace::target_directory()?.join("coverage");
    let harnesses = measure(&folder, "harnesses", &[HARNESSES], &profdata)?;
    let tests = measure(&folder, "tests", TESTS, &profdata)?;
    let all = tests.join(&harnesses, &folder.join("all.profdata"), &profdata)?;
    let [by_harnesses, by_all] = [harnesses.export(&cov)?, all.export(&cov)?];
    print!("{}", table(&by_harnesses, &by_all));
    if html {
        all.html(&cov, &folder.join("html"))?;
    }
    Ok(())
}

/// Programs that ran, and what they reached.
struct Profile {
    programs: Vec<PathBuf>,
    data: PathBuf,
}

/// Builds and runs the tests with counters.
fn measure(folder: &Path, name: &str, what: &[&[&str]], tool: &Path) -> Result<Profile, Failure> {
    let raw = folder.join(name);
    let _ = fs::remove_dir_all(&raw);
    let mut programs = Vec::new();
    for selection in what {
        let mut build = cargo(&["test", "--no-run", "--message-format=json-render-diagnostics"]);
        build.args(*selection).arg("--target-dir").arg(folder.join("build"));
        build.env("RUSTFLAGS", "-Cinstrument-coverage");
        build.env("LLVM_PROFILE_FILE", folder.join("build-scripts-%m.profraw"));
        programs.extend(executables(&mut build)?);
    }
    for program in &programs {
        let mut test = Process::new(program);
        test.current_dir(root()).env("LLVM_PROFILE_FILE", raw.join("%m-%p.profraw"));
        // A tenth of the usual number: more seeds take minutes here and reach no new lines.
        test.env("DQUANT_SEEDS", "0..200");
        shell::run(&mut test)?;
    }
    let data = folder.join(name).with_extension("profdata");
    let mut merge = Process::new(tool);
    merge.args(["merge", "--sparse", "--output"]).arg(&data).arg(&raw);
    shell::run(&mut merge)?;
    Ok(Profile { programs, data })
}

impl Profile {
    /// What either of the two reached.
    fn join(&self, other: &Profile, data: &Path, tool: &Path) -> Result<Profile, Failure> {
        let mut merge = Process::new(tool);
        merge.args(["merge", "--sparse", "--output"]).arg(data);
        shell::run(merge.args([&self.data, &other.data]))?;
        let programs = [&self.programs[..], &other.programs[..]].concat();
        Ok(Profile { programs, data: data.to_owned() })
    }

    fn command(&self, tool: &Path, verb: &str) -> Process {
        let mut command = Process::new(tool);
        command.arg(verb).arg("--instr-profile").arg(&self.data);
        for (index, program) in self.programs.iter().enumerate() {
            command.args((index > 0).then_some("--object")).arg(program);
        }
        command.arg("--sources").arg(root().join(SOURCES));
        command
    }

    /// Counts by file.
    fn export(&self, tool: &Path) -> Result<Vec<FileCounts>, Failure> {
        let mut command = self.command(tool, "export");
        let json = shell::output(command.arg("--summary-only"))?;
        let report: Value = serde_json::from_str(&json)
            .map_err(|error| Failure::check(format!("llvm-cov did not answer JSON: {error}")))?;
        let data = &report["data"][0];
        let files = data["files"].as_array().map_or(&[][..], Vec::as_slice);
        let mut counts: Vec<FileCounts> = files.iter().map(FileCounts::read).collect();
        counts.sort_by(|a, b| a.name.cmp(&b.name));
        counts.push(FileCounts { name: "all".to_owned(), ..FileCounts::sum(&counts) });
        Ok(counts)
    }

    fn html(&self, tool: &Path, folder: &Path) -> Result<(), Failure> {
        let mut command = self.command(tool, "show");
        command.args(["--format=html", "--output-dir"]).arg(folder);
        shell::output(&mut command)?;
        println!("annotated sources: {}", folder.join("index.html").display());
        Ok(())
    }
}

/// Things there are, and things reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    covered: u64,
    total: u64,
}

impl Count {
    fn read(value: &Value) -> Count {
        let number = |name: &str| value[name].as_u64().unwrap_or(0);
        Count { covered: number("covered"), total: number("count") }
    }

    fn plus(self, other: Count) -> Count {
        Count { covered: self.covered + other.covered, total: self.total + other.total }
    }

    fn percent(self) -> f64 {
        100.0 * self.covered as f64 / self.total.max(1) as f64
    }
}

#[derive(Debug, Default)]
struct FileCounts {
    name: String,
    lines: Count,
    regions: Count,
}

impl FileCounts {
    fn read(file: &Value) -> FileCounts {
        let path = file["filename"].as_str().unwrap_or_default();
        let name = path.rsplit_once(SOURCES).map_or(path, |(_, name)| name.trim_start_matches('/'));
        let summary = &file["summary"];
        FileCounts {
            name: name.to_owned(),
            lines: Count::read(&summary["lines"]),
            regions: Count::read(&summary["regions"]),
        }
    }

    fn sum(files: &[FileCounts]) -> FileCounts {
        files.iter().fold(FileCounts::default(), |sum, file| FileCounts {
            lines: sum.lines.plus(file.lines),
            regions: sum.regions.plus(file.regions),
            ..sum
        })
    }
}

fn table(by_harnesses: &[FileCounts], by_all: &[FileCounts]) -> String {
    let mut out = String::from(
        "roce by file               lines  harnesses  with tests     regions  harnesses  with tests\n",
    );
    for all in by_all {
        let own = by_harnesses.iter().find(|file| file.name == all.name);
        let (lines, regions) = own.map(|file| (file.lines, file.regions)).unwrap_or_default();
        out += &format!(
            "{:<24}{:>8}{:>10.1}%{:>11.1}%{:>12}{:>10.1}%{:>11.1}%\n",
            all.name,
            all.lines.total,
            lines.percent(),
            all.lines.percent(),
            all.regions.total,
            regions.percent(),
            all.regions.percent(),
        );
    }
    out
}

/// Finds an LLVM tool of rustc's own version: in the toolchain, by its name with the version, in Debian's folder.
fn tool(name: &str) -> Result<PathBuf, Failure> {
    let version = shell::output(Process::new(rustc()).arg("-vV"))?;
    let field = |key: &str| version.lines().find_map(|line| line.strip_prefix(key));
    let host = field("host: ").unwrap_or_default();
    let major = field("LLVM version: ").and_then(|full| full.split('.').next()).unwrap_or_default();
    let sysroot = shell::output(Process::new(rustc()).args(["--print", "sysroot"]))?;
    let candidates = [
        Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin").join(name),
        PathBuf::from(format!("{name}-{major}")),
        PathBuf::from(format!("/usr/lib/llvm-{major}/bin/{name}")),
    ];
    let works = |path: &&PathBuf| shell::answers(&path.to_string_lossy(), &["show", "--help"]);
    candidates.iter().find(works).cloned().ok_or_else(|| {
        Failure::usage(format!(
            "no {name} for LLVM {major}: install the rustup component llvm-tools, or the package llvm-{major}"
        ))
    })
}

fn rustc() -> std::ffi::OsString {
    std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn counts_are_read_and_summed() {
        let file = json!({
            "filename": "/w/crates/roce/src/wire/psn.rs",
            "summary": {
                "lines": { "count": 10, "covered": 9 },
                "regions": { "count": 4, "covered": 1 },
            },
        });
        let counts = [FileCounts::read(&file), FileCounts::read(&file)];
        assert_eq!(counts[0].name, "wire/psn.rs");
        let sum = FileCounts::sum(&counts);
        assert_eq!((sum.lines.total, sum.regions.covered), (20, 2));
        assert!(table(&counts[..1], &counts[..1]).contains("90.0%"));
    }
}
