//! `cargo xtask fuzz`: the harnesses of package `fuzz`, guided by coverage.
//!
//! The harnesses are ordinary tests that can also run under libFuzzer, which comes as C++ source
//! with the crate `bolero-libfuzzer`, so only a C++ compiler is needed beyond the stable toolchain.
//! Without one, the same tests run with random inputs and without guidance.
//!
//! | part | what it does |
//! |---|---|
//! | [`build`] | the instrumented test binary, or the plain one |
//! | [`campaign`] | one harness: workers, their logs, and what they found |
//! | [`corpus`] | the committed corpora, packed and unpacked |
//!
//! Executions are those that libFuzzer counted and printed at the end of each worker, never an
//! estimate from a rate.

pub(crate) mod build;
mod campaign;
mod corpus;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Command;
use crate::flags::Flags;
use crate::shell::Failure;
use crate::workspace::{self, root};

pub(crate) const COMMAND: Command = Command {
    name: "fuzz",
    summary: "Coverage-guided fuzzing of the packet codec and of live endpoints",
    help: "\
Usage: cargo xtask fuzz [OPTIONS] [HARNESS…]

Runs the harnesses packet, raw and pair (docs/fuzzing.md), or those named, one after the other. What is found on the way
is kept in the target directory and taken up by the next run; the corpora in the repository are read and not changed.

Options:
  --seconds S      how long each harness runs [default: 60, or no limit with --executions]
  --executions N   how many inputs each harness runs
  --jobs J         processes per harness [default: 1]
  --engine E       libfuzzer or random [default: libfuzzer where a C++ compiler is installed]
  --replay FILE    instead: run this one input, and print what is wrong with it
  --minimize       instead: the fewest inputs that reach every edge known, into the repository's corpora

Exit code: 0 nothing found, 1 a harness failed (the line that repeats it is printed), 2 usage or environment.

Examples:
  cargo xtask fuzz                                        one minute each
  cargo xtask fuzz --executions 10000000 --jobs 2 pair    ten million scripts on two cores
  cargo xtask fuzz --replay target/fuzzing/pair/crashes/crash-… pair",
    run,
};

const HARNESSES: &[Harness] = &[
    Harness { name: "packet", max_len: 512, traced: true },
    Harness { name: "raw", max_len: 1024, traced: true },
    Harness { name: "pair", max_len: 512, traced: false },
];

/// One test of `fuzz/tests/harnesses.rs`.
#[derive(Debug)]
struct Harness {
    name: &'static str,
    /// The longest input that is worth trying.
    max_len: usize,
    /// Whether comparisons are traced: the input holds numbers that cannot be guessed.
    traced: bool,
}

impl Harness {
    /// The corpus in the repository.
    fn committed(&self) -> PathBuf {
        root().join("fuzz/tests/__fuzz__").join(self.name).join("corpus.bin")
    }

    /// Inputs that once failed, named after their bug.
    fn regressions(&self) -> PathBuf {
        self.committed().with_file_name("crashes")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    LibFuzzer,
    Random,
}

/// The user's options.
#[derive(Debug, Default)]
struct Options {
    seconds: Option<Duration>,
    executions: Option<u64>,
    jobs: u64,
    engine: Option<Engine>,
    replay: Option<PathBuf>,
    minimize: bool,
    harnesses: Vec<&'static Harness>,
}

fn run(args: &[String]) -> Result<(), Failure> {
    let options = parse(args)?;
    let engine = options.engine.unwrap_or_else(build::best_engine);
    let folder = workspace::target_directory()?.join("fuzzing");
    if let Some(input) = &options.replay {
        return replay(&options, engine, &folder, input);
    }
    if options.minimize {
        return options.harnesses.iter().try_for_each(|harness| {
            let program = build::program(harness, Engine::LibFuzzer, &folder)?;
            campaign::minimize(&program, harness, &folder.join(harness.name))
        });
    }
    fuzz(engine, &options, &folder)
}

fn fuzz(engine: Engine, options: &Options, folder: &Path) -> Result<(), Failure> {
    let mut reports = Vec::new();
    for harness in &options.harnesses {
        let program = build::program(harness, engine, folder)?;
        let report = match engine {
            Engine::LibFuzzer => {
                campaign::guided(&program, harness, options, &folder.join(harness.name))?
            }
            Engine::Random => campaign::random(&program, harness, options)?,
        };
        println!("{report}");
        reports.push(report);
    }
    let total: u64 = reports.iter().map(|report| report.executions).sum();
    let failed = reports.iter().filter(|report| report.failed()).count();
    println!("{total} executions over {} harnesses, {failed} failed", reports.len());
    if failed == 0 { Ok(()) } else { Err(Failure::check(format!("{failed} harnesses failed"))) }
}

fn replay(options: &Options, engine: Engine, folder: &Path, input: &Path) -> Result<(), Failure> {
    let [harness] = options.harnesses[..] else {
        return Err(Failure::usage("--replay needs one harness: packet, raw or pair"));
    };
    if engine == Engine::Random {
        return Err(Failure::usage("--replay needs the engine libfuzzer"));
    }
    campaign::replay(&build::program(harness, engine, folder)?, harness, input)
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let mut options = Options { jobs: 1, ..Options::default() };
    let mut flags = Flags::new(args);
    while let Some(arg) = flags.next() {
        match arg {
            flag if flag.starts_with('-') => set(&mut options, flag, &mut flags)?,
            name => options.harnesses.push(find(name)?),
        }
    }
    if options.harnesses.is_empty() {
        options.harnesses.extend(HARNESSES);
    }
    if options.seconds.is_none() && options.executions.is_none() {
        options.seconds = Some(Duration::from_secs(60));
    }
    Ok(options)
}

fn set(options: &mut Options, flag: &str, flags: &mut Flags<'_>) -> Result<(), Failure> {
    match flag {
        "--minimize" => options.minimize = true,
        "--seconds" => options.seconds = Some(Duration::from_secs(number(flags)?)),
        "--executions" => options.executions = Some(number(flags)?),
        "--jobs" => options.jobs = number(flags)?,
        "--replay" => options.replay = Some(absolute(flags.value()?)?),
        "--engine" => options.engine = Some(engine(flags.value()?)?),
        _ => return Err(flags.unknown()),
    }
    Ok(())
}

fn number(flags: &mut Flags<'_>) -> Result<u64, Failure> {
    let value = flags.value()?;
    let parsed = value.parse().ok().filter(|&number| number > 0);
    parsed.ok_or_else(|| Failure::usage(format!("'{value}' is not a positive number")))
}

fn absolute(path: &str) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .ok()
        .filter(|path| path.is_file())
        .ok_or_else(|| Failure::usage(format!("no file '{path}'")))
}

fn engine(name: &str) -> Result<Engine, Failure> {
    match name {
        "libfuzzer" => Ok(Engine::LibFuzzer),
        "random" => Ok(Engine::Random),
        _ => Err(Failure::usage(format!("no engine '{name}'; there are: libfuzzer, random"))),
    }
}

fn find(name: &str) -> Result<&'static Harness, Failure> {
    HARNESSES.iter().find(|harness| harness.name == name).ok_or_else(|| {
        let known: Vec<&str> = HARNESSES.iter().map(|harness| harness.name).collect();
        Failure::usage(format!("no harness '{name}'; there are: {}", known.join(", ")))
    })
}

/// A file or a program of a campaign that fails.
fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("cannot {what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Options, Failure> {
        parse(&args.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_number_of_executions_takes_the_time_limit_away() {
        let options = parsed(&["--executions", "1000", "--jobs", "2", "pair"]).expect("all known");
        assert_eq!((options.executions, options.jobs, options.seconds), (Some(1000), 2, None));
        assert_eq!(options.harnesses.len(), 1);
        let default = parsed(&[]).expect("nothing to refuse");
        assert_eq!(default.harnesses.len(), HARNESSES.len());
        assert!(default.seconds.is_some());
    }

    #[test]
    fn what_is_not_known_is_a_usage_error() {
        for args in [&["pear"][..], &["--jobs", "0"], &["--engine", "afl"], &["--quick", "1"]] {
            assert_eq!(parsed(args).expect_err("not known").exit_code(), 2, "{args:?}");
        }
    }

    #[test]
    fn every_harness_is_a_test_with_a_corpus() {
        let tests = std::fs::read_to_string(root().join("fuzz/tests/harnesses.rs"))
            .expect("the harnesses are part of the repository");
        for harness in HARNESSES {
            assert!(tests.contains(&format!("fn {}()", harness.name)), "{}", harness.name);
            assert!(harness.committed().is_file(), "{}", harness.name);
        }
    }
}
