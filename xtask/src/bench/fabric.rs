//! `cargo xtask bench fabric`: the fabric beside its peers, in one run, against the numbers that
//! are asked for.
//!
//! Rounds take every figure in turn, ours and the peers' of one row directly after each other, so
//! that a machine that slows down slows both. Programs of both sides get one core each, whoever
//! they belong to. What a machine cannot measure is skipped, with its reason.
//!
//! | part | what it does |
//! |---|---|
//! | [`rows`] | what is asked: our figure, its peers, the bound |
//! | [`figures`] | every figure, where it is taken and with which program |
//! | [`tools`] | command lines of the programs, and what they print |
//! | [`shared_link`] | flows through a bottleneck |
//! | [`place`] | one machine, or two namespaces on a cable that may lose or limit |
//! | [`program`] | runs programs on both sides |
//! | [`obstacle`] | why there is no figure |
//! | [`packages`] | programs of other projects |
//! | [`calibration`] | what the machine can do |
//! | [`report`] | the tables |

mod calibration;
mod figures;
mod obstacle;
mod packages;
mod place;
mod program;
mod report;
mod rows;
mod shared_link;
mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::time::Duration;

use serde_json::json;

use self::calibration::{Calibration, Calibrations};
use self::figures::{Figure, How};
use self::obstacle::Obstacle;
use self::packages::Missing;
use self::place::{Place, Where};
use self::report::Results;
use self::rows::{Feature, Row};
use self::shared_link::{Flows, Shares};
use self::tools::Tools;
use super::figures::Figures;
use super::machine::Machine;
use super::process::Demo;
use crate::flags::Flags;
use crate::shell::{self, Failure};
use crate::workspace::{self, cargo, root};

/// The page that keeps the tables.
const PAGE: &str = "docs/fabric-benchmarks.md";

/// Lines of the page between which the tables are.
const BEGIN: &str = "<!-- run: begin. Written by `cargo xtask bench fabric --save`. -->";
const END: &str = "<!-- run: end -->";

/// The user's options.
#[derive(Clone, Debug, PartialEq)]
struct Options {
    rounds: usize,
    /// Rounds that take the runs through a bottleneck, too: the first ones.
    link_rounds: usize,
    /// Length of the runs through a bottleneck.
    link_seconds: u64,
    only: String,
    install: bool,
    save: bool,
    json: bool,
    list: bool,
    binary: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            rounds: 5,
            link_rounds: usize::MAX,
            link_seconds: 60,
            only: String::new(),
            install: true,
            save: false,
            json: false,
            list: false,
            binary: None,
        }
    }
}

/// Installs, measures in rounds and prints the tables.
///
/// # Errors
/// When nothing can be measured, or a program of ours failed.
pub(super) fn run(args: &[String]) -> Result<(), Failure> {
    let options = parse(args)?;
    let rows: Vec<Row> =
        rows::all().into_iter().filter(|row| row.ours.contains(&options.only)).collect();
    let figures = wanted(&rows, &options.only);
    if figures.is_empty() {
        return Err(Failure::usage(format!(
            "no figure has '{}' in its key; see --list",
            options.only
        )));
    }
    if options.list {
        figures.iter().for_each(|figure| println!("{:<28} {}", figure.key, figure.name));
        return Ok(());
    }
    let missing = Missing::after_installing(options.install);
    missing.reasons().for_each(|why| eprintln!("    {why}"));
    let tools = build(&options, &missing)?;
    let machine = Machine::look(options.binary.as_deref());
    let mut bench = Bench::new(tools, missing, options.link_seconds);
    for round in 1..=options.rounds {
        bench.begin_round();
        let takes_links = round <= options.link_rounds;
        let taken = |figure: &&Figure| takes_links || !matches!(figure.how, How::SharedLink(..));
        for figure in figures.iter().filter(taken) {
            eprintln!("==> round {round} of {}: {} ({})", options.rounds, figure.name, figure.key);
            bench.take(figure);
        }
    }
    let text = bench.text(&machine, &options, &rows, &figures);
    match options.json {
        true => println!("{}", bench.to_json(&machine, &options, &rows)),
        false => print!("{text}"),
    }
    if options.save {
        save(&text)?;
    }
    match bench.failed.len() {
        0 => Ok(()),
        n => Err(Failure::check(format!(
            "{n} figures of ours failed in some round: {:?}",
            bench.failed
        ))),
    }
}

/// The figures whose key contains the text, and those that the rows compare with.
fn wanted(rows: &[Row], only: &str) -> Vec<Figure> {
    let is_peer = |key: &String| rows.iter().any(|row| row.peers.contains(key));
    figures::all()
        .into_iter()
        .filter(|figure| figure.key.contains(only) || is_peer(&figure.key))
        .collect()
}

/// What takes the figures.
struct Bench {
    tools: Tools,
    missing: Missing,
    link_seconds: u64,
    places: BTreeMap<Where, Result<Place, Obstacle>>,
    /// Runs through a bottleneck in this round.
    flows: BTreeMap<Flows, Result<Shares, Obstacle>>,
    calibrations: Calibrations,
    results: Results,
    /// Figures of ours that failed in some round.
    failed: BTreeSet<String>,
    next_port: u16,
}

/// The first port of the programs; they are alone in their namespaces.
const FIRST_PORT: u16 = 20_000;

impl Bench {
    fn new(tools: Tools, missing: Missing, link_seconds: u64) -> Bench {
        let mut results = Results::default();
        let library = tools.dquant.with_file_name("libibverbs.so");
        let library = fs::read(library).unwrap_or_default();
        let has = |setting: &[u8]| library.windows(setting.len()).any(|window| window == setting);
        // A path that can be forced is one that exists.
        if !has(b"DQUANT_PATH") {
            results
                .not_built
                .push((Feature::SameHost, "the path between processes of one machine"));
        }
        Bench {
            tools,
            missing,
            link_seconds,
            places: BTreeMap::new(),
            flows: BTreeMap::new(),
            calibrations: Calibrations::default(),
            results,
            failed: BTreeSet::new(),
            next_port: FIRST_PORT,
        }
    }

    fn begin_round(&mut self) {
        self.flows.clear();
        self.calibrations.0.push(Calibration::take(self.tools.cores));
    }

    /// Takes a figure once. A peer that cannot be measured is skipped; a program of ours that fails
    /// is a failure.
    fn take(&mut self, figure: &Figure) {
        match self.measure(figure) {
            Ok(value) => self.results.add(&figure.key, value),
            Err(Obstacle(why)) => {
                eprintln!("    {why}");
                if figure.how.is_ours() && self.missing.of(figure.how.program()).is_none() {
                    self.failed.insert(figure.key.clone());
                }
                self.results.skip(&figure.key, why);
            }
        }
    }

    fn measure(&mut self, figure: &Figure) -> Result<f64, Obstacle> {
        if let Some(why) = self.missing.of(figure.how.program()) {
            return Err(Obstacle::new(why));
        }
        match figure.how {
            How::TwoWakes => {
                let found = self.calibrations.0.last();
                let found = found.ok_or_else(|| Obstacle::new("no calibration"))?;
                return Ok(2.0 * found.futex_wake_us);
            }
            How::MainJob => return self.main_job(),
            _ => {}
        }
        let port = self.next_port;
        self.next_port = port.checked_add(32).unwrap_or(FIRST_PORT);
        let place = self.places.entry(figure.place).or_insert_with(|| Place::make(figure.place));
        let place = place.as_ref().map_err(Obstacle::clone)?;
        match figure.how {
            How::Tool(tool) => self.tools.run(tool, place, port),
            How::Pairs(pairs, tool) => self.tools.run_pairs(tool, place, port, pairs),
            How::SharedLink(flows, part) => {
                let (tools, seconds) = (&self.tools, self.link_seconds);
                let run = self
                    .flows
                    .entry(flows)
                    .or_insert_with(|| flows.run(tools, place, port, seconds));
                run.as_ref().map(|shares| shares.part(part)).map_err(Obstacle::clone)
            }
            How::TwoWakes | How::MainJob => Err(Obstacle::new("measured above")),
        }
    }

    fn main_job(&self) -> Result<f64, Obstacle> {
        let demo = Demo {
            program: &self.tools.dquant,
            seconds: Duration::from_secs(5),
            io: "auto",
            options: &[],
        };
        let told = |failure: Failure| Obstacle(failure.to_string());
        let figures = Figures::of(&demo.run().map_err(told)?).map_err(told)?;
        if figures.mismatches > 0 || figures.verified == 0 {
            return Err(Obstacle(format!(
                "{} batches verified, {} wrong",
                figures.verified, figures.mismatches
            )));
        }
        Ok(figures.dpu_cpu_s.unwrap_or(0.0) + figures.target_cpu_s)
    }

    fn text(
        &self,
        machine: &Machine,
        options: &Options,
        rows: &[Row],
        figures: &[Figure],
    ) -> String {
        let mut text = format!("{machine}. {}\n\n", options.command());
        let links = match options.link_rounds < options.rounds {
            true => format!(", of {} through a bottleneck", options.link_rounds),
            false => String::new(),
        };
        text += &format!(
            "Medians of {} rounds{links}. On this machine, in these rounds:\n\n",
            options.rounds
        );
        text += &format!("{}\n{}\n", self.calibrations, self.results.ratios(rows));
        text += &format!("Every figure:\n\n{}", self.results.figures(figures));
        let skipped = self.results.skipped();
        if !skipped.is_empty() {
            text += &format!("\nNot measured:\n\n{skipped}");
        }
        text
    }

    fn to_json(&self, machine: &Machine, options: &Options, rows: &[Row]) -> serde_json::Value {
        json!({
            "schema": "dquant.bench.fabric/1",
            "machine": machine.to_json(),
            "rounds": options.rounds,
            "link_seconds": options.link_seconds,
            "results": self.results.to_json(rows, &self.calibrations),
        })
    }
}

impl Options {
    /// The command line that repeats the run.
    fn command(&self) -> String {
        let mut line = format!("`cargo xtask bench fabric --rounds {}", self.rounds);
        if self.link_rounds < self.rounds {
            line += &format!(" --link-rounds {}", self.link_rounds);
        }
        line += &format!(" --link-seconds {}", self.link_seconds);
        if !self.only.is_empty() {
            line += &format!(" --only {}", self.only);
        }
        line + "`"
    }
}

/// Builds what is ours, and the MPI program.
fn build(options: &Options, missing: &Missing) -> Result<Tools, Failure> {
    let folder = workspace::target_directory()?;
    let dquant = match &options.binary {
        // Programs start elsewhere.
        Some(path) => fs::canonicalize(path)
            .map_err(|error| Failure::usage(format!("--binary {}: {error}", path.display())))?,
        None => {
            let packages = ["build", "--release", "--package", "dquant", "--package", "ibverbs"];
            shell::run(cargo(&packages).args(["--features", "dquant/xdp"]))?;
            folder.join("release/dquant")
        }
    };
    let examples = ["--example", "raw_udp", "--example", "raw_xdp"];
    let mut build = cargo(&["build", "--release", "--package", "nic", "--features", "xdp"]);
    shell::run(build.args(examples))?;
    let mpi_bench = match missing.of("mpicc").or(missing.of("mpirun")) {
        Some(why) => Err(Obstacle::new(why)),
        None => compile_mpi(&folder),
    };
    let last = std::thread::available_parallelism().map_or(1, usize::from) - 1;
    // Both on the only core where there is one.
    let cores = [0, last.min(1)];
    let examples = folder.join("release/examples");
    Ok(Tools { dquant, examples, mpi_bench, cores })
}

fn compile_mpi(folder: &Path) -> Result<PathBuf, Obstacle> {
    let program = folder.join("mpi_bench");
    let source = root().join("xtask/peers/mpi_bench.c");
    let output = Process::new("mpicc").args(["-O2", "-o"]).arg(&program).arg(source).output();
    let output = output.map_err(|error| Obstacle(format!("mpicc: {error}")))?;
    if output.status.success() {
        return Ok(program);
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Obstacle(format!("mpicc: {}", text.lines().next().unwrap_or("it failed"))))
}

/// Puts the text between the marks of the page.
fn save(text: &str) -> Result<(), Failure> {
    let path = root().join(PAGE);
    let failed = |error| Failure::usage(format!("{}: {error}", path.display()));
    let page = fs::read_to_string(&path).map_err(failed)?;
    let saved = replaced(&page, text)
        .ok_or_else(|| Failure::check(format!("{PAGE} lacks the lines '{BEGIN}' and '{END}'")))?;
    fs::write(&path, saved).map_err(failed)
}

fn replaced(page: &str, text: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{}\n\n{END}{after}", text.trim()))
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let mut options = Options::default();
    let mut flags = Flags::new(args);
    while let Some(flag) = flags.next() {
        let mut count = |range| number(flag, flags.value()?, range);
        match flag {
            "--rounds" => options.rounds = count(1..=1000)? as usize,
            "--link-rounds" => options.link_rounds = count(1..=1000)? as usize,
            "--link-seconds" => options.link_seconds = count(3..=600)?,
            "--only" => options.only = flags.value()?.to_owned(),
            "--binary" => options.binary = Some(flags.value()?.into()),
            "--no-install" => options.install = false,
            "--save" => options.save = true,
            "--json" => options.json = true,
            "--list" => options.list = true,
            _ => return Err(flags.unknown()),
        }
    }
    Ok(options)
}

fn number(flag: &str, text: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, Failure> {
    let given = text.parse().ok().filter(|number| range.contains(number));
    given.ok_or_else(|| {
        let (least, most) = (range.start(), range.end());
        Failure::usage(format!("{flag} is a number from {least} to {most}, not '{text}'"))
    })
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
        let options =
            parsed("--rounds 3 --link-seconds 10 --only tcp --no-install --save").expect("good");
        assert_eq!((options.rounds, options.link_seconds), (3, 10));
        assert!(!options.install && options.save && !options.json);
        assert!(options.command().contains("--only tcp"));
        assert!(!options.command().contains("--link-rounds"));
        let one = parsed("--link-rounds 1").expect("good");
        assert_eq!(
            one.command(),
            "`cargo xtask bench fabric --rounds 5 --link-rounds 1 --link-seconds 60`"
        );
        for line in ["--rounds", "--rounds 0", "--link-seconds 1", "--sav", "all"] {
            assert_eq!(parsed(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn a_part_brings_the_peers_that_it_is_compared_with() {
        let keys = |only| {
            let rows: Vec<Row> =
                rows::all().into_iter().filter(|row| row.ours.contains(only)).collect();
            let found = wanted(&rows, only);
            found.into_iter().map(|figure| figure.key).collect::<Vec<String>>()
        };
        assert_eq!(keys("event-8"), ["event-8", "two-wakes", "qperf-8"]);
        assert!(keys("no such").is_empty());
    }

    #[test]
    fn a_saved_run_replaces_the_one_before() {
        let page = format!("head\n{BEGIN}\nold\n{END}\ntail\n");
        let saved = replaced(&page, "new\n").expect("marks");
        assert_eq!(saved, format!("head\n{BEGIN}\n\nnew\n\n{END}\ntail\n"));
        assert_eq!(replaced("no marks", "new"), None);
    }
}
