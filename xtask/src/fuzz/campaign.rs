//! One harness under an engine: workers that share a corpus, their logs, and the summary of their
//! results.
//!
//! Every worker is a process of its own with its own seed; they see each other's finds through the
//! corpus folder. A worker that finds something ends; the others continue. All output goes to a log
//! per worker.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Harness, Options, cannot, corpus};
use crate::shell::{self, Failure};

/// An input that takes longer than this is a hang. Whole scripts take microseconds.
const TIMEOUT_SECONDS: u64 = 10;

/// Most memory of a worker.
const MEMORY_MIB: u64 = 1024;

/// Results of a harness.
#[derive(Debug, Default)]
pub(super) struct Report {
    name: String,
    pub(super) executions: u64,
    elapsed: Duration,
    /// Edges reached by the corpus at the start, and at the end.
    edges: Option<(u64, u64)>,
    /// Inputs added to the corpus.
    added: u64,
    failures: Vec<String>,
}

impl Report {
    pub(super) fn failed(&self) -> bool {
        !self.failures.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.elapsed.as_secs_f64();
        let rate = self.executions as f64 / seconds.max(0.001);
        write!(f, "{:<8}{:>12} executions in {seconds:.0} s", self.name, self.executions)?;
        write!(f, ", {rate:.0} a second")?;
        if let Some((start, end)) = self.edges {
            let new = end.saturating_sub(start);
            write!(f, "; {end} edges, {new} of them new; {} inputs added", self.added)?;
        }
        match self.failures.len() {
            0 => write!(f, "; no crash, hang or failed check"),
            n => write!(f, "; {n} FAILED\n  {}", self.failures.join("\n  ")),
        }
    }
}

// ---- libFuzzer ---------------------------------------------------------------------------------

/// Runs the workers to their end.
///
/// # Errors
/// When folders or processes cannot be created; a harness that fails is no error here.
pub(super) fn guided(
    program: &Path,
    harness: &Harness,
    options: &Options,
    folder: &Path,
) -> Result<Report, Failure> {
    let [corpus, crashes, committed] =
        ["corpus", "crashes", "committed"].map(|name| folder.join(name));
    corpus::unpack(&harness.committed(), &committed)?;
    for folder in [&corpus, &crashes] {
        fs::create_dir_all(folder).map_err(|error| cannot("create", folder, &error))?;
    }
    let mut arguments = limits(options);
    arguments.push(format!("-max_len={}", harness.max_len));
    arguments.push(format!("-artifact_prefix={}/", crashes.display()));
    arguments.push("-print_final_stats=1".to_owned());
    arguments.push("-reload=1".to_owned());
    // Weighing inputs by how rare their features are costs more here than it finds.
    arguments.push("-entropic=0".to_owned());
    arguments.push(corpus.display().to_string());
    arguments.push(committed.display().to_string());
    arguments.extend(existing(harness.regressions()));
    let started = Instant::now();
    let logs: Vec<PathBuf> =
        (0..options.jobs).map(|worker| folder.join(format!("worker-{worker}.log"))).collect();
    let mut workers = Vec::new();
    for log in &logs {
        workers.push(spawn(program, harness, &arguments, log)?);
        // The first worker also counts how often an edge is taken; the others are faster.
        arguments.insert(0, "-use_counters=0".to_owned());
    }
    let mut report = Report { name: harness.name.to_owned(), ..Report::default() };
    for (mut worker, log) in workers.into_iter().zip(&logs) {
        let status = worker.wait().map_err(|error| cannot("wait for", program, &error))?;
        let text = fs::read(log).map_err(|error| cannot("read", log, &error))?;
        account(&mut report, &String::from_utf8_lossy(&text), status.success());
    }
    report.elapsed = started.elapsed();
    Ok(report)
}

fn limits(options: &Options) -> Vec<String> {
    let mut arguments =
        vec![format!("-timeout={TIMEOUT_SECONDS}"), format!("-rss_limit_mb={MEMORY_MIB}")];
    if let Some(seconds) = options.seconds {
        arguments.push(format!("-max_total_time={}", seconds.as_secs()));
    }
    if let Some(executions) = options.executions {
        arguments.push(format!("-runs={}", executions.div_ceil(options.jobs)));
    }
    arguments
}

fn existing(folder: PathBuf) -> Option<String> {
    folder.is_dir().then(|| folder.display().to_string())
}

/// The test of the harness, and the arguments that it passes to libFuzzer.
fn worker(program: &Path, harness: &Harness, arguments: &[String]) -> Command {
    let mut command = Command::new(program);
    command.args([harness.name, "--exact", "--nocapture", "--quiet", "--test-threads", "1"]);
    command.env("BOLERO_TEST_NAME", harness.name);
    command.env("BOLERO_LIBTEST_HARNESS", "1");
    command.env("BOLERO_LIBFUZZER_ARGS", arguments.join(" "));
    command
}

fn spawn(
    program: &Path,
    harness: &Harness,
    arguments: &[String],
    log: &Path,
) -> Result<Child, Failure> {
    let file = File::create(log).map_err(|error| cannot("create", log, &error))?;
    let again = file.try_clone().map_err(|error| cannot("open", log, &error))?;
    worker(program, harness, arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::from(file))
        .stderr(Stdio::from(again))
        .spawn()
        .map_err(|error| cannot("start", program, &error))
}

/// Adds the results in a worker's log.
fn account(report: &mut Report, log: &str, succeeded: bool) {
    report.executions +=
        statistic(log, "number_of_executed_units").or_else(|| last_count(log)).unwrap_or(0);
    report.added += statistic(log, "new_units_added").unwrap_or(0);
    let start = edges(log, "INITED");
    let end = edges(log, "DONE").or_else(|| edges(log, "NEW")).or(start);
    if let (Some(start), Some(end)) = (start, end) {
        let (first, last) = report.edges.unwrap_or((start, end));
        report.edges = Some((first.min(start), last.max(end)));
    }
    if !succeeded {
        report.failures.push(failure(&report.name, log));
    }
}

fn statistic(log: &str, name: &str) -> Option<u64> {
    let prefix = format!("stat::{name}:");
    log.lines().find_map(|line| line.strip_prefix(&prefix)?.trim().parse().ok())
}

/// The counter of the last progress line, for a worker without a final summary.
fn last_count(log: &str) -> Option<u64> {
    log.lines()
        .rev()
        .find_map(|line| line.strip_prefix('#')?.split_whitespace().next()?.parse().ok())
}

/// The number of edges in the last progress line of this kind.
fn edges(log: &str, kind: &str) -> Option<u64> {
    let line = log
        .lines()
        .rfind(|line| line.starts_with('#') && line.split_whitespace().nth(1) == Some(kind))?;
    let (_, rest) = line.split_once("cov: ")?;
    rest.split_whitespace().next()?.parse().ok()
}

/// The message of a failed worker, and how to replay it.
fn failure(harness: &str, log: &str) -> String {
    let mut lines = log.lines();
    let place = lines.find(|line| line.contains("panicked at"));
    let said = place.map(|place| format!("{} {}", place.trim(), lines.next().unwrap_or_default()));
    let died = || log.lines().find(|line| line.contains("ERROR: libFuzzer:")).map(str::to_owned);
    let written = log.lines().find_map(|line| line.split_once("Test unit written to "));
    let reason = said.or_else(died).unwrap_or("ended without a word; see its log".to_owned());
    match written {
        Some((_, file)) => {
            format!("{reason}\n  replay: cargo xtask fuzz --replay {file} {harness}")
        }
        None => reason,
    }
}

/// Runs one input, with all output on this terminal.
///
/// # Errors
/// [`Failure::Check`] when the harness fails on it.
pub(super) fn replay(program: &Path, harness: &Harness, input: &Path) -> Result<(), Failure> {
    let mut command = worker(program, harness, &[input.display().to_string()]);
    shell::run(command.env("RUST_BACKTRACE", "1"))
}

/// Rewrites the corpus in the repository: the fewest inputs that reach each edge which the corpora
/// of target directory and repository reach. Edge counts are ignored, or the corpus would be ten
/// times as large.
///
/// # Errors
/// When folders cannot be created or the merge fails.
pub(super) fn minimize(program: &Path, harness: &Harness, folder: &Path) -> Result<(), Failure> {
    let [committed, fresh] = ["committed", "minimized"].map(|name| folder.join(name));
    corpus::unpack(&harness.committed(), &committed)?;
    let _ = fs::remove_dir_all(&fresh);
    fs::create_dir_all(&fresh).map_err(|error| cannot("create", &fresh, &error))?;
    let mut arguments = vec!["-merge=1".to_owned(), "-use_counters=0".to_owned()];
    arguments.push(fresh.display().to_string());
    arguments.push(committed.display().to_string());
    arguments.extend(existing(folder.join("corpus")));
    arguments.extend(existing(harness.regressions()));
    let log = folder.join("minimize.log");
    let status = spawn(program, harness, &arguments, &log)?
        .wait()
        .map_err(|error| cannot("wait for", program, &error))?;
    if !status.success() {
        return Err(Failure::check(format!("the merge failed; see {}", log.display())));
    }
    let (inputs, bytes) = corpus::pack(&fresh, &harness.committed())?;
    println!("{:<8}{inputs} inputs, {bytes} bytes", harness.name);
    Ok(())
}

// ---- random inputs -----------------------------------------------------------------------------

/// Runs the harness as a test, longer than usual.
///
/// # Errors
/// When it cannot be started.
pub(super) fn random(
    program: &Path,
    harness: &Harness,
    options: &Options,
) -> Result<Report, Failure> {
    let mut command = Command::new(program);
    command.args([harness.name, "--exact", "--nocapture", "--test-threads", "1"]);
    command.env("BOLERO_RANDOM_MAX_LEN", harness.max_len.to_string());
    // The test's own number of inputs is replaced; time then ends it.
    let executions = options.executions.unwrap_or(u64::MAX >> 1);
    command.env("BOLERO_RANDOM_ITERATIONS", executions.to_string());
    if let Some(seconds) = options.seconds {
        command.env("BOLERO_RANDOM_TEST_TIME_MS", seconds.as_millis().to_string());
    }
    let started = Instant::now();
    let output = command.output().map_err(|error| cannot("start", program, &error))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let mut report = Report { name: harness.name.to_owned(), ..Report::default() };
    report.elapsed = started.elapsed();
    report.executions = random_inputs(&text).unwrap_or(0);
    if !output.status.success() {
        report.failures.push(text.trim().to_owned());
    }
    Ok(report)
}

fn random_inputs(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("rng inputs: ")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
INFO: Seed: 1
#2\tINITED cov: 260 ft: 260 corp: 1/1b exec/s: 0 rss: 28Mb
#900\tNEW    cov: 300 ft: 400 corp: 7/70b lim: 8 exec/s: 0 rss: 28Mb
#1024\tDONE   cov: 310 ft: 420 corp: 9/80b lim: 8 exec/s: 512 rss: 28Mb
stat::number_of_executed_units: 1024
stat::new_units_added:          8
";

    #[test]
    fn executions_are_those_that_the_worker_counted() {
        let mut report = Report::default();
        account(&mut report, LOG, true);
        account(&mut report, LOG, true);
        assert_eq!((report.executions, report.added), (2048, 16));
        assert_eq!(report.edges, Some((260, 310)));
        assert!(!report.failed());
    }

    #[test]
    fn a_failed_worker_says_why_and_how_to_repeat_it() {
        let log = "#2\tINITED cov: 1 ft: 1\n#77\tNEW    cov: 2 ft: 2\n  panicked at 'x'\n\
                   artifact_prefix='c/'; Test unit written to c/crash-1\n";
        let mut report = Report { name: "pair".to_owned(), ..Report::default() };
        account(&mut report, log, false);
        assert_eq!(report.executions, 77);
        let text = report.to_string();
        assert!(text.contains("--replay c/crash-1 pair") && text.contains("panicked"), "{text}");
    }

    #[test]
    fn random_inputs_are_read_from_the_test() {
        let text = "test pair ...\trun time: 2.8s | iterations/s: 69227 | rng inputs: 200000\n";
        assert_eq!(random_inputs(text), Some(200_000));
    }
}
