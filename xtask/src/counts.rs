//! `cargo xtask counts`: instructions per packet and per message, under callgrind.
//!
//! Times depend on the machine and on what else runs on it; instructions of one thread that never
//! sleeps do not. So a change that costs instructions is seen on a busy laptop, as a changed line
//! of [`RECORD`], which is in the repository. The benchmark is `crates/adapter/benches/counts`:
//! each case is one process under callgrind.
//!
//! | part | what it does |
//! |---|---|
//! | [`profile`] | reads what callgrind wrote, and what the benchmark printed |
//! | [`record`] | the file of counts: writing, reading, comparing |

mod profile;
mod record;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use cargo_metadata::Message;

use self::profile::Figure;
use self::record::Record;
use crate::Command;
use crate::flags::Flags;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo, root, rustc_field};

/// The counts of this commit, relative to the root.
pub(crate) const RECORD: &str = "docs/instruction-counts.txt";

pub(crate) const COMMAND: Command = Command {
    name: "counts",
    summary: "Instructions and system calls per packet and per message, under callgrind",
    help: "\
Usage: cargo xtask counts [OPTIONS]

Builds the benchmark `counts` of crate adapter in release mode, runs every case under callgrind (one thread, no sleep),
prints the counts beside those of docs/instruction-counts.txt and writes that file. Commit it with the change that
moved it: the diff shows what a change costs. docs/benchmarks.md explains the lines.

Without valgrind it skips, with the reason, and ends with 0.

Options:
  --check           write nothing; fail when a count differs by more than the tolerance
  --tolerance P     percent that a count may differ with --check [default: 2]
  --only TEXT       cases whose name contains this; the file keeps its other lines
  --keep DIR        keep the profiles there, for callgrind_annotate

Exit code: 0 good or skipped, 1 a count differs, 2 usage or environment.

Examples:
  cargo xtask counts                            count everything, update the file
  cargo xtask counts --check                    has this change made anything dearer?
  cargo xtask counts --only send-64B --keep /tmp/counts",
    run,
};

/// Percent that counts may differ: versions of the C library copy memory in different ways.
const TOLERANCE_PERCENT: f64 = 2.0;

/// The user's options.
#[derive(Clone, Debug, PartialEq)]
struct Options {
    check: bool,
    tolerance_percent: f64,
    only: String,
    keep: Option<PathBuf>,
}

fn run(args: &[String]) -> Result<(), Failure> {
    let options = parse(args)?;
    if let Some(why) = obstacle() {
        println!("skipped: {why}");
        return Ok(());
    }
    let program = build()?;
    let folder = match &options.keep {
        Some(folder) => folder.clone(),
        None => workspace::target_directory()?.join("counts"),
    };
    fs::create_dir_all(&folder)
        .map_err(|error| Failure::usage(format!("cannot make {}: {error}", folder.display())))?;
    let listing = shell::output(Process::new(&program).arg("--list"))?;
    let wanted: Vec<&str> = listing.lines().filter(|case| case.contains(&options.only)).collect();
    if wanted.is_empty() {
        return Err(Failure::usage(format!("no case has '{}' in its name", options.only)));
    }
    let mut counted = Vec::new();
    for case in wanted {
        eprintln!("==> {case}");
        counted.extend(count(&program, case, &folder)?);
    }
    finish(&options, counted)
}

/// Compares with the file, and writes it unless it was only to be checked.
fn finish(options: &Options, counted: Vec<Figure>) -> Result<(), Failure> {
    let path = root().join(RECORD);
    let old = fs::read_to_string(&path).unwrap_or_default();
    let old = Record::parse(&old).map_err(Failure::check)?;
    let new = Record { versions: versions()?, figures: counted };
    if let Some(note) = old.other_versions(&new) {
        eprintln!("note: {note}");
    }
    print!("{}", new.table(&old));
    if options.check {
        let complaints = new.complaints(&old, options.tolerance_percent, &options.only);
        for complaint in &complaints {
            eprintln!("    {complaint}");
        }
        return match complaints.len() {
            0 => Ok(()),
            n => Err(Failure::check(format!(
                "{n} counts differ from {RECORD}; if that is meant, run `cargo xtask counts` and commit the file"
            ))),
        };
    }
    let text = new.with_others_of(&old, &options.only).to_string();
    fs::write(&path, text)
        .map_err(|error| Failure::usage(format!("cannot write {}: {error}", path.display())))
}

/// Why nothing can be counted here.
fn obstacle() -> Option<String> {
    let has_valgrind = shell::answers("valgrind", &["--tool=callgrind", "--version"]);
    (!has_valgrind)
        .then(|| "valgrind is not installed (Debian: apt-get install valgrind)".to_owned())
}

/// Builds the benchmark and returns its path.
fn build() -> Result<PathBuf, Failure> {
    let mut build = cargo(&["build", "--release", "--package", "adapter", "--bench", "counts"]);
    let text = shell::output(build.arg("--message-format=json-render-diagnostics"))?;
    let mut program = None;
    for message in Message::parse_stream(text.as_bytes()) {
        if let Ok(Message::CompilerArtifact(artifact)) = message
            && artifact.target.name == "counts"
        {
            program = artifact.executable.map(|path| path.into_std_path_buf());
        }
    }
    program.ok_or_else(|| Failure::check("cargo did not say where the benchmark is"))
}

/// Runs one case and returns its figures.
fn count(program: &Path, case: &str, folder: &Path) -> Result<Vec<Figure>, Failure> {
    let out = folder.join(format!("{}.callgrind", case.replace('/', "-")));
    let mut valgrind = Process::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet", "--compress-strings=no", "--compress-pos=no"]);
    valgrind.arg(format!("--callgrind-out-file={}", out.display())).arg(program).arg(case);
    // The environment lies on the stack: a longer one moves everything below it.
    valgrind.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    let printed = shell::output(&mut valgrind)?;
    let profile = fs::read_to_string(&out)
        .map_err(|error| Failure::check(format!("no profile at {}: {error}", out.display())))?;
    profile::figures(case, &printed, &profile).map_err(Failure::check)
}

/// What the counts depend on, besides the source.
fn versions() -> Result<String, Failure> {
    let valgrind = shell::output(Process::new("valgrind").arg("--version"))?;
    let libc = shell::output(Process::new("getconf").arg("GNU_LIBC_VERSION")).unwrap_or_default();
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    // Valgrind shows programs a processor with AVX2 at most.
    let simd = if flags.contains(" avx2 ") { "AVX2" } else { "no AVX2" };
    let rustc = rustc_field("release")?;
    Ok(format!("rustc {rustc}, {}, {}, {simd}", valgrind.trim(), libc.trim()))
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let mut options = Options {
        check: false,
        tolerance_percent: TOLERANCE_PERCENT,
        only: String::new(),
        keep: None,
    };
    let mut flags = Flags::new(args);
    while let Some(flag) = flags.next() {
        match flag {
            "--check" => options.check = true,
            "--tolerance" => options.tolerance_percent = percent(flags.value()?)?,
            "--only" => options.only = flags.value()?.to_owned(),
            "--keep" => options.keep = Some(flags.value()?.into()),
            _ => return Err(flags.unknown()),
        }
    }
    Ok(options)
}

fn percent(text: &str) -> Result<f64, Failure> {
    let number = text.trim_end_matches('%').parse().unwrap_or(f64::NAN);
    if (0.0..=100.0).contains(&number) {
        return Ok(number);
    }
    Err(Failure::usage(format!("--tolerance is a percentage from 0 to 100, not '{text}'")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags;

    fn parsed(line: &str) -> Result<Options, Failure> {
        parse(&flags::words(line))
    }

    #[test]
    fn options_are_parsed_and_mistakes_refused() {
        let options = parsed("--check --tolerance 3% --only udp --keep there").expect("good");
        assert!(options.check);
        assert_eq!((options.tolerance_percent, options.only.as_str()), (3.0, "udp"));
        assert_eq!(options.keep, Some(PathBuf::from("there")));
        for line in ["--tolerance", "--tolerance x", "--tolerance -1", "--chek", "x"] {
            assert_eq!(parsed(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }
}
