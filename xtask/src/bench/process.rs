//! Runs the demo and samples the memory of its DPU through `/proc`, from outside and without its
//! help.
//!
//! A sample counts only if the trainer was still running after it was taken: before and after that
//! the DPU is being set up or torn down. A demo that does not end is ended.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::machine;
use crate::shell::{Failure, RESCUED};

/// How often memory is sampled.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// How long a demo may take besides its measured part: it generates its corpora and verifies its
/// first batches.
const ALLOWANCE: Duration = Duration::from_secs(120);

/// What to run.
#[derive(Clone, Debug)]
pub(super) struct Demo<'a> {
    pub(super) program: &'a Path,
    pub(super) seconds: Duration,
    pub(super) io: &'a str,
    /// What this configuration adds.
    pub(super) options: &'a [&'a str],
}

/// A run that ended.
#[derive(Clone, Debug)]
pub(super) struct Ran {
    /// The demo's JSON object.
    pub(super) report: Value,
    /// One-minute load average before it.
    pub(super) load_before: f64,
    /// Resident memory of the DPU while the stream ran, in KiB; empty without offload.
    pub(super) dpu_resident_kib: Vec<u64>,
}

impl Demo<'_> {
    /// Runs the demo to its end.
    ///
    /// # Errors
    /// When it cannot start, hangs or reports nothing. Its results are checked elsewhere.
    pub(super) fn run(&self) -> Result<Ran, Failure> {
        let load_before = machine::load();
        let (mut child, said) = self.start()?;
        let deadline = Instant::now() + self.seconds + ALLOWANCE;
        let watched = watch(&mut child, deadline);
        let said = said.text();
        eprint!("{said}");
        let dpu_resident_kib = watched?;
        let mut text = String::new();
        let read = child.stdout.take().map(|mut out| out.read_to_string(&mut text));
        if said.contains(RESCUED) {
            return Err(Failure::check("a wake-up was lost; see the output above"));
        }
        let report = match read {
            Some(Ok(_)) => serde_json::from_str(&text).ok(),
            _ => None,
        };
        let report = report
            .ok_or_else(|| Failure::check("the demo reported nothing; see its output above"))?;
        Ok(Ran { report, load_before, dpu_resident_kib })
    }

    /// Starts it; the second value is what it says beside its report.
    fn start(&self) -> Result<(Child, Said), Failure> {
        let (said, file) = Said::new()?;
        let mut command = Command::new(self.program);
        let seconds = format!("{}ms", self.seconds.as_millis());
        command.args(["demo", "--json", "--compare", "false", "--io", self.io]);
        command.args(["--seconds", &seconds]).args(self.options);
        // A report is one line, far smaller than a pipe holds: the demo never waits for us.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let child = command.spawn().map_err(|error| {
            Failure::usage(format!("cannot start {}: {error}", self.program.display()))
        })?;
        Ok((child, said))
    }
}

/// A file that a program writes its messages to. It ends with this value.
struct Said(PathBuf);

impl Said {
    fn new() -> Result<(Said, File), Failure> {
        let path = std::env::temp_dir().join(format!("dquant-bench-{}.err", std::process::id()));
        let file = File::create(&path)
            .map_err(|error| Failure::usage(format!("cannot write {}: {error}", path.display())))?;
        Ok((Said(path), file))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.0).unwrap_or_default()).into_owned()
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Waits for the demo and samples its DPU meanwhile.
fn watch(demo: &mut Child, deadline: Instant) -> Result<Vec<u64>, Failure> {
    let mut samples = Vec::new();
    let mut family = Family::default();
    loop {
        let ended = demo.try_wait();
        let ended = ended.map_err(|error| Failure::usage(format!("cannot wait: {error}")))?;
        if ended.is_some() {
            return Ok(samples);
        }
        if Instant::now() > deadline {
            // Its daemons follow it: the kernel ends them with their parent.
            let _ = demo.kill();
            let _ = demo.wait();
            return Err(Failure::check("the demo did not end; it was stopped"));
        }
        samples.extend(family.sample(demo.id()));
        thread::sleep(SAMPLE_EVERY);
    }
}

/// The demo's children that matter here, once they are found.
#[derive(Debug, Default)]
struct Family {
    dpu: Option<u32>,
    trainer: Option<u32>,
}

impl Family {
    /// Resident memory of the DPU in KiB, if the stream is running.
    fn sample(&mut self, demo: u32) -> Option<u64> {
        if self.dpu.is_none() || self.trainer.is_none() {
            *self = Family { dpu: child(demo, "dpu"), trainer: child(demo, "trainer") };
        }
        let resident = resident_kib(self.dpu?)?;
        is_running(self.trainer?).then_some(resident)
    }
}

/// The child of `parent` that was started with this verb.
fn child(parent: u32, verb: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| stat(*pid).is_some_and(|stat| stat.parent == parent) && has_verb(*pid, verb))
}

fn has_verb(pid: u32, verb: &str) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).nth(1) == Some(verb.as_bytes())
}

fn is_running(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| stat.state != 'Z')
}

fn resident_kib(pid: u32) -> Option<u64> {
    parse_resident(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse_resident(status: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    rest.trim().strip_suffix(" kB")?.parse().ok()
}

/// The needed fields of `/proc/PID/stat`.
#[derive(Debug, PartialEq)]
struct Stat {
    state: char,
    parent: u32,
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name in the second field may hold any text, brackets included: the other fields follow the
/// last bracket.
fn parse_stat(text: &str) -> Option<Stat> {
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Stat { state, parent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        let stat = parse_stat("77 (a b) S 1) R 42 77 77 0 -1");
        assert_eq!(stat, Some(Stat { state: 'R', parent: 42 }));
        assert_eq!(parse_stat("77 (a"), None);
        assert_eq!(parse_resident("VmHWM:\t 9 kB\nVmRSS:\t     136 kB\n"), Some(136));
        assert_eq!(parse_resident("Name:\tzombie\n"), None);
    }

    #[test]
    fn a_child_is_found_by_its_parent_and_verb() {
        let Ok(mut sleeper) = Command::new("sleep").arg("60").spawn() else {
            return;
        };
        // The new program's name appears with its exec, a moment after the fork.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut found = None;
        while found.is_none() && Instant::now() < deadline {
            found = child(std::process::id(), "60");
            thread::sleep(Duration::from_millis(5));
        }
        let running = is_running(sleeper.id());
        let resident = resident_kib(sleeper.id());
        sleeper.kill().and_then(|()| sleeper.wait()).expect("our own child");
        assert_eq!(found, Some(sleeper.id()));
        assert!(running && resident.is_some_and(|kib| kib > 0), "{resident:?}");
        assert!(!is_running(sleeper.id()));
    }
}
