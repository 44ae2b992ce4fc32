//! `cargo xtask bench`: figures that anyone can reproduce.
//!
//! A benchmark here is the product itself, run as a user would run it: the release build of
//! `dquant demo` in several configurations, or verbs programs beside their peers, round after
//! round, so that a machine that slows down slows all of them. It prints the median and the spread
//! of each figure, with the machine's load before each run.
//!
//! | part | what it does |
//! |---|---|
//! | [`configurations`] | how the main job is run |
//! | [`data`] | the rounds of the main job, and the check that all of them delivered the same bytes |
//! | [`figures`] | what one run says, as numbers |
//! | [`table`] | medians, spread and targets, for people and for programs |
//! | [`process`] | runs the demo and watches the memory of its DPU from outside |
//! | [`fabric`] | the fabric beside its peers |
//! | [`mod@peers`] | the loaders that people use today, on the same tokens |
//! | [`soak`] | one long stream: does memory stay where it is? |
//! | [`machine`] | what the figures were taken on |
//!
//! No speed is required here: a missed target is printed, wrong bytes fail.

mod configurations;
mod data;
mod fabric;
mod figures;
mod machine;
mod peers;
mod process;
mod soak;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use self::peers::Peers;
use crate::Command;
use crate::flags::Flags;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo};

pub(crate) const COMMAND: Command = Command {
    name: "bench",
    summary: "Figures of the main job and of the fabric, beside their peers",
    help: "\
Usage: cargo xtask bench data [OPTIONS]
       cargo xtask bench fabric [OPTIONS]

data builds dquant in release mode and runs `dquant demo` over and over: with offload, without, with 1 % loss, and from one
corpus. Prints medians with the lowest and highest value, and the target where there is one. Every run verifies its
batches; all runs over the same corpora must deliver the same stream. docs/benchmarks.md explains each row.

With --peers: numpy, LitData, MosaicML Streaming, WebDataset and a plain loop beside Dquant's Python package, all on one
corpus, with the CPU time of the process that trains and of all processes, and every target. Libraries come from PyPI
into a virtual environment below the target folder, once; what cannot be installed is skipped, with the reason. Builds the
release wheel, too. Needs 3 GiB on disk, and some minutes the first time.

fabric builds dquant, its verbs library and small programs of its own, and runs perftest on it beside UCX, Open MPI,
libfabric, iperf3, sockperf and qperf, interleaved. It prints one table of ratios against what is asked, calibration and
load. As root it installs missing peers from Debian; what cannot be installed is skipped, with the reason. Namespaces need
root, too. docs/fabric-benchmarks.md explains each row.

Options of data:
  --runs N        rounds, each of which runs every configuration once [default: 5]
  --seconds S     length of the measured part of a run [default: 5]
  --io HOW        how the target reads files: auto, buffered or direct [default: auto]
  --peers         compare with other loaders instead [rounds: 3, seconds: 3]
  --tokens N      size of the corpus of --peers in units of 2^20 tokens [default: 128]
  --only TEXT     cases of --peers whose key contains this; the keys are printed as they run
  --wheel PATH    measure this wheel with --peers and build none
  --soak TIME     instead: one stream of that length, and whether the DPU's memory stays flat
  --binary PATH   measure this dquant and build nothing
  --json          one JSON object with every run

Options of fabric:
  --rounds N        rounds, each of which takes every figure once [default: 5]
  --link-rounds N   rounds that also run flows through a bottleneck, 14 minutes each [default: all]
  --link-seconds S  length of a run through a bottleneck [default: 60]
  --only TEXT       figures whose key contains this, and their peers
  --list            print the keys and measure nothing
  --no-install      install nothing
  --save            write the tables to docs/fabric-benchmarks.md
  --binary PATH     measure this dquant, and the libibverbs.so beside it
  --json            one JSON object with every sample

Exit code: 0 good, 1 wrong bytes or a run that failed, 2 usage or environment. A missed target is no failure: it depends
on the machine.

Examples:
  cargo xtask bench data                         five rounds, about four minutes
  cargo xtask bench data --runs 1 --seconds 2    a quick look
  cargo xtask bench data --peers                 other loaders and dquant, about eight minutes
  cargo xtask bench data --peers --only local    streams of local files alone
  cargo xtask bench data --soak 60s              one minute of streaming, memory watched
  cargo xtask bench fabric --only 64 --rounds 3  small messages and their peers, a minute
  cargo xtask bench fabric --save                everything, and keep the tables",
    run,
};

/// The user's options.
#[derive(Clone, Debug, PartialEq)]
struct Options {
    runs: usize,
    seconds: Duration,
    io: String,
    soak: Option<Duration>,
    peers: Option<Peers>,
    binary: Option<PathBuf>,
    json: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            runs: 5,
            seconds: Duration::from_secs(5),
            io: "auto".to_owned(),
            soak: None,
            peers: None,
            binary: None,
            json: false,
        }
    }
}

fn run(args: &[String]) -> Result<(), Failure> {
    if let Some(("fabric", rest)) =
        args.split_first().map(|(subject, rest)| (subject.as_str(), rest))
    {
        return fabric::run(rest);
    }
    let options = parse(args)?;
    let program = match &options.binary {
        Some(path) => path.clone(),
        None => build()?,
    };
    match (options.soak, &options.peers) {
        (Some(length), _) => soak::run(&program, &options, length),
        (None, Some(peers)) => peers::run(&program, &options, peers),
        (None, None) => data::run(&program, &options),
    }
}

fn build() -> Result<PathBuf, Failure> {
    shell::run(&mut cargo(&["build", "--release", "--package", "dquant", "--bin", "dquant"]))?;
    Ok(workspace::target_directory()?.join("release/dquant"))
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let Some((subject, rest)) = args.split_first() else {
        return Err(Failure::usage("what to measure? there are: data, fabric"));
    };
    if subject != "data" {
        return Err(Failure::usage(format!(
            "nothing called '{subject}' to measure; there are: data, fabric"
        )));
    }
    let mut options = Options::default();
    if rest.iter().any(|flag| flag == "--peers") {
        let seconds = Duration::from_secs(3);
        options = Options { runs: 3, seconds, peers: Some(Peers::default()), ..options };
    }
    let mut flags = Flags::new(rest);
    while let Some(flag) = flags.next() {
        set(&mut options, flag, &mut flags)?;
    }
    Ok(options)
}

fn set(options: &mut Options, flag: &str, flags: &mut Flags<'_>) -> Result<(), Failure> {
    match flag {
        "--peers" => {}
        "--json" => options.json = true,
        "--runs" => options.runs = runs(flags.value()?)?,
        "--seconds" => options.seconds = flags.time(SHORTEST)?,
        "--soak" => options.soak = Some(flags.time(SHORTEST)?),
        "--binary" => options.binary = Some(flags.value()?.into()),
        "--tokens" => peers(options, flag)?.mi_tokens = mi_tokens(flags.value()?)?,
        "--only" => peers(options, flag)?.only = flags.value()?.to_owned(),
        "--wheel" => peers(options, flag)?.wheel = Some(flags.value()?.into()),
        "--io" => match flags.value()? {
            how @ ("auto" | "buffered" | "direct") => options.io = how.to_owned(),
            other => {
                return Err(Failure::usage(format!(
                    "--io is auto, buffered or direct, not '{other}'"
                )));
            }
        },
        _ => return Err(flags.unknown()),
    }
    Ok(())
}

/// The options that only `--peers` has.
fn peers<'a>(options: &'a mut Options, flag: &str) -> Result<&'a mut Peers, Failure> {
    options.peers.as_mut().ok_or_else(|| Failure::usage(format!("{flag} belongs to --peers")))
}

/// Larger corpora do not fit the page cache of most machines; smaller ones hold too few blocks to
/// shuffle.
fn mi_tokens(text: &str) -> Result<u64, Failure> {
    match text.parse() {
        Ok(tokens @ 8..=4_096) => Ok(tokens),
        _ => Err(Failure::usage(format!("--tokens is a number from 8 to 4096, not '{text}'"))),
    }
}

/// A shorter run measures its own beginning.
const SHORTEST: Duration = Duration::from_millis(100);

/// More rounds than this give no new information and take hours.
const MAX_RUNS: usize = 1_000;

fn runs(text: &str) -> Result<usize, Failure> {
    match text.parse() {
        Ok(runs @ 1..=MAX_RUNS) => Ok(runs),
        _ => Err(Failure::usage(format!("--runs is a number from 1 to {MAX_RUNS}, not '{text}'"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags;

    fn parsed(line: &str) -> Result<Options, Failure> {
        parse(&flags::words(line))
    }

    #[test]
    fn options_are_parsed() {
        let options = parsed("data --runs 3 --seconds 1.5s --io direct --json").expect("good");
        assert_eq!(options.runs, 3);
        assert_eq!(options.seconds, Duration::from_millis(1_500));
        assert_eq!((options.io.as_str(), options.json), ("direct", true));
        let soak = parsed("data --soak 2min").expect("good").soak;
        assert_eq!(soak, Some(Duration::from_secs(120)));
        assert_eq!(parsed("data").expect("good"), Options::default());
        let options = parsed("data --tokens 8 --only local --peers --runs 1").expect("good");
        assert_eq!((options.runs, options.seconds), (1, Duration::from_secs(3)));
        let peers = options.peers.expect("given");
        assert_eq!((peers.mi_tokens, peers.only.as_str()), (8, "local"));
    }

    #[test]
    fn mistakes_are_usage_errors() {
        for line in [
            "",
            "dta",
            "data --runs",
            "data --runs 0",
            "data --runs x",
            "data --seconds -1",
            "data --seconds nan",
            "data --io fast",
            "data --sok 1s",
            "data --only local",
            "data --peers --tokens 1",
        ] {
            let failure = parsed(line).expect_err(line);
            assert_eq!(failure.exit_code(), 2, "{line}");
        }
    }
}
