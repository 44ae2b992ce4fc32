//! `cargo xtask bench data --peers`: the loaders that people use today, and Dquant, on the same
//! tokens.
//!
//! Every case is a fresh Python process that delivers batches for some seconds
//! (`xtask/peers/measure.py`); rounds run all cases in turn, so that a machine that slows down
//! slows all of them, and before each the files are read twice and memory is touched. Processor
//! time is that of the process that trains, and that of all processes, daemons included.
//!
//! | part | what it does |
//! |---|---|
//! | [`cases`] | what is measured, and which cases deliver the same |
//! | [`environment`] | the virtual environment of the peers |
//! | [`daemons`] | targets and a DPU |
//! | [`summary`] | the table of ratios, and the targets |

mod cases;
mod daemons;
mod environment;
mod summary;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use self::cases::{CASES, Case};
use self::daemons::{Daemons, TOKEN};
use self::environment::Environment;
use self::summary::Results;
use super::Options;
use super::machine::{self, Machine};
use crate::python;
use crate::shell::{self, Failure};
use crate::workspace::{self, root};

/// What `--peers` takes besides the options of every benchmark.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Peers {
    /// Size of the corpus in units of 2^20 tokens.
    pub(super) mi_tokens: u64,
    /// Only cases whose key contains this.
    pub(super) only: String,
    /// Measure this wheel and build none.
    pub(super) wheel: Option<PathBuf>,
}

impl Default for Peers {
    fn default() -> Peers {
        Peers { mi_tokens: 128, only: String::new(), wheel: None }
    }
}

/// Corpora of the case that opens many.
const MANY: &str = "3000";

/// Folder of the Python programs.
fn scripts() -> PathBuf {
    root().join("xtask/peers")
}

/// Installs, makes the corpus, measures in rounds and prints the tables.
///
/// # Errors
/// When nothing can be measured, a case of Dquant fails, or two streams that must be equal differ.
pub(super) fn run(program: &Path, options: &Options, peers: &Peers) -> Result<(), Failure> {
    let folder = workspace::target_directory()?.join("peers");
    let mut environment = Environment::make(&folder)?;
    install_dquant(&environment.python, &folder, peers)?;
    let corpus = prepare(&mut environment, &folder, peers.mi_tokens)?;
    let daemons = Daemons::start(program, &corpus.join("u32"))?;
    let bench = Bench { environment, corpus, daemons, seconds: options.seconds.as_secs_f64() };

    let machine = Machine::look(options.binary.as_deref());
    let mut results = Results::default();
    let wanted = || CASES.iter().filter(|case| case.key.contains(&peers.only));
    for round in 1..=options.runs {
        for case in wanted().filter(|case| bench.environment.lacks(case.needs).is_none()) {
            eprintln!("==> round {round} of {}: {} ({})", options.runs, case.name, case.key);
            let load = machine::load();
            let mut measured = match bench.measure(case) {
                Err(failure) if case.is_peer() => {
                    results.skip(case, failure.to_string());
                    continue;
                }
                measured => measured?,
            };
            measured["load_before"] = json!(load);
            results.add(case, measured);
        }
    }
    for case in wanted() {
        if let Some(why) = bench.environment.lacks(case.needs) {
            results.skip(case, why.to_owned());
        }
    }
    results.check_streams()?;
    print(&machine, options, peers, &results);
    Ok(())
}

fn print(machine: &Machine, options: &Options, peers: &Peers, results: &Results) {
    let (rounds, seconds) = (options.runs, options.seconds.as_secs_f64());
    if options.json {
        let object = json!({
            "schema": "dquant.bench.peers/1",
            "machine": machine.to_json(),
            "runs": rounds,
            "seconds": seconds,
            "mi_tokens": peers.mi_tokens,
            "summary": results.to_json(),
            "raw": results.raw(),
        });
        println!("{object}");
        return;
    }
    println!("{machine}");
    println!(
        "corpus: {} Mi tokens; rounds: {rounds}, of {seconds} s each; medians (lowest–highest)\n",
        peers.mi_tokens
    );
    print!("{}", results.text());
}

/// Puts the release build of the package into the environment.
fn install_dquant(python: &Path, folder: &Path, peers: &Peers) -> Result<(), Failure> {
    let built = folder.join("wheels");
    let wheel = match &peers.wheel {
        Some(wheel) => wheel.clone(),
        None => python::build(python, &built, &["--release"])?,
    };
    python::install(python, &wheel)
}

/// The corpus and what each peer reads, made once for each size.
fn prepare(
    environment: &mut Environment,
    folder: &Path,
    mi_tokens: u64,
) -> Result<PathBuf, Failure> {
    let corpus = folder.join(format!("corpus-{mi_tokens}"));
    let python = environment.python.clone();
    let make = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.arg(scripts().join("corpus.py")).arg(arguments[0]).arg(&corpus);
        shell::run(command.args(&arguments[1..]))
    };
    if !corpus.exists() {
        fs::create_dir_all(folder).map_err(|error| Failure::usage(error.to_string()))?;
        make(&["make", &(mi_tokens << 20).to_string()])?;
    }
    if !corpus.join(format!("many-{MANY}")).exists() {
        make(&["many", MANY])?;
    }
    let libraries: Vec<_> = environment.libraries().collect();
    for library in libraries {
        if !corpus.join(library).exists()
            && let Err(why) = make(&["write", library])
        {
            environment.lose(library, why.to_string());
        }
    }
    Ok(corpus)
}

/// What a case needs to run.
struct Bench {
    environment: Environment,
    corpus: PathBuf,
    daemons: Daemons,
    seconds: f64,
}

impl Bench {
    fn measure(&self, case: &Case) -> Result<Value, Failure> {
        let python = || {
            let mut command = Command::new(&self.environment.python);
            command.arg("-B").env("DQUANT_TOKEN", TOKEN);
            command
        };
        let mut heat = python();
        heat.arg(scripts().join("corpus.py")).arg("heat").arg(&self.corpus).args(case.reads);
        shell::output(&mut heat)?;
        let mut measure = python();
        measure.arg(scripts().join("measure.py")).arg(case.key).arg(&self.corpus);
        measure.arg(self.seconds.to_string());
        if let Some(io) = case.target {
            let arguments = self.daemons.arguments(io);
            measure.args(arguments.ok_or_else(|| Failure::check("a target without an address"))?);
        }
        let text = shell::output(&mut measure)?;
        // Libraries print what they like before it.
        let line = text.lines().last().unwrap_or_default();
        serde_json::from_str(line)
            .map_err(|error| Failure::check(format!("{} reported no figures: {error}", case.key)))
    }
}
