//! The demo's processes: this program as target, DPU and trainer.
//!
//! Each writes JSON lines to its standard output. They end with the demo, however the demo ends:
//! they are terminated when their handle is dropped, and by the kernel when the demo dies.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::Job;
use super::trainer::Event;
use crate::exit::{CliError, on_end_signal};

/// How long a child may take to end after it was asked to.
const PATIENCE: Duration = Duration::from_secs(3);

/// A folder for the run, removed at its end, and the token of its daemons.
#[derive(Debug)]
pub struct Workspace {
    path: PathBuf,
    token: String,
}

impl Workspace {
    /// A fresh folder below the system's temporary one.
    pub fn new() -> Result<Workspace, CliError> {
        let path = std::env::temp_dir().join(format!("dquant-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|error| CliError::because(path.display(), &error))?;
        let token = format!("demo-{:016x}", service::seed::fresh_seed()?);
        // As `Drop` does when the demo ends normally. The children end with their parent.
        let folder = path.clone();
        on_end_signal(move || drop(std::fs::remove_dir_all(folder)))?;
        Ok(Workspace { path, token })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The token that the daemons of the run share.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The local socket of the run's DPU.
    pub fn socket(&self) -> PathBuf {
        self.path.join("dpu.sock")
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // A folder that stays behind is a nuisance, not a failure.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Loopback addresses of the run, so that every endpoint has the RoCE port to itself and two demos
/// do not collide.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    net: [u8; 2],
}

impl Addresses {
    /// Addresses derived from the process number.
    pub fn of_this_process() -> Addresses {
        let pid = std::process::id();
        Addresses { net: [64 + (pid >> 8) as u8 % 128, pid as u8] }
    }

    fn host(self, last: u8) -> String {
        let [a, b] = self.net;
        format!("127.{a}.{b}.{last}:4791")
    }
}

/// What a daemon prints when it is ready.
#[derive(Debug, Deserialize)]
struct Ready {
    control: String,
}

/// A child process that is terminated when its handle is dropped.
#[derive(Debug)]
struct Guarded(Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // It may have ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if matches!(self.0.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(command: &mut Command) -> Result<(Guarded, BufReader<ChildStdout>), CliError> {
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| CliError::because("cannot start", &error))?;
    let out = child.stdout.take();
    let guarded = Guarded(child);
    let out = out.ok_or_else(|| CliError::usage("a child has no standard output"))?;
    Ok((guarded, BufReader::new(out)))
}

/// This program with a verb.
fn program(verb: &str, job: &Job<'_>) -> Result<Command, CliError> {
    let path = std::env::current_exe().map_err(CliError::from_cause)?;
    let mut command = Command::new(path);
    command.args([verb, "--json", "--die-with-parent"]);
    command.env("DQUANT_TOKEN", job.workspace.token());
    Ok(command)
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    /// Address of its control plane.
    pub control: String,
    _child: Guarded,
    _out: BufReader<ChildStdout>,
}

impl Daemon {
    /// Starts a target that exports the folders of the corpora.
    pub(super) fn target(job: &Job<'_>) -> Result<Daemon, CliError> {
        let mut command = program("serve", job)?;
        let parents: BTreeSet<_> =
            job.corpora.iter().filter_map(|corpus| corpus.path.parent()).collect();
        for parent in parents {
            command.arg("--root").arg(parent);
        }
        command.args(["--control", "127.0.0.1:0", "--roce", &job.addresses.host(1)]);
        command.args(["--io", &job.config.io]);
        Daemon::start(command, job)
    }

    /// Starts a DPU.
    pub(super) fn dpu(job: &Job<'_>) -> Result<Daemon, CliError> {
        let mut command = program("dpu", job)?;
        command.arg("--socket").arg(job.workspace.socket());
        command.args(["--control", "127.0.0.1:0", "--roce", &job.addresses.host(2)]);
        Daemon::start(command, job)
    }

    fn start(mut command: Command, job: &Job<'_>) -> Result<Daemon, CliError> {
        let loss = format!("{}ppm", job.config.loss_ppm);
        command.arg("--quiet").args(["--loss", &loss, "--seed", &job.config.seed.to_string()]);
        let (child, mut out) = spawn(&mut command)?;
        let mut line = String::new();
        let read = out.read_line(&mut line);
        let ready = read.ok().and_then(|_| serde_json::from_str::<Ready>(&line).ok());
        let ready = ready.ok_or_else(|| {
            CliError::usage("a daemon of the demo did not start; see its output above")
        })?;
        Ok(Daemon { control: ready.control, _child: child, _out: out })
    }
}

/// The running trainer.
#[derive(Debug)]
pub struct Trainer {
    child: Guarded,
    out: BufReader<ChildStdout>,
}

impl Trainer {
    /// Starts the trainer.
    pub(super) fn start(
        job: &Job<'_>,
        target: &Daemon,
        dpu: Option<&Daemon>,
        seconds: Duration,
    ) -> Result<Trainer, CliError> {
        let config = job.config;
        let mut command = program("trainer", job)?;
        command.arg(format!("dq://{}/", target.control));
        command.args(["--plan", job.plan, "--dtype", &config.dtype]);
        command.args(["--offload", if dpu.is_some() { "true" } else { "false" }]);
        command.arg("--dpu").arg(job.workspace.socket());
        command.args(["--roce", &job.addresses.host(3)]);
        command.args(["--loss", &format!("{}ppm", config.loss_ppm)]);
        command.args(["--seconds", &format!("{}ms", seconds.as_millis())]);
        command.args(["--verify", config.verify.name()]);
        if let Some(batches) = config.batches {
            command.args(["--batches", &batches.to_string()]);
        }
        for corpus in job.corpora {
            command.arg("--file").arg(&corpus.path);
        }
        let (child, out) = spawn(&mut command)?;
        Ok(Trainer { child, out })
    }

    /// The next line of its report.
    pub fn next_event(&mut self) -> Result<Event, CliError> {
        let mut line = String::new();
        let read = self.out.read_line(&mut line);
        match read {
            Ok(1..) => serde_json::from_str(&line).map_err(|error| {
                CliError::because(
                    format_args!("unexpected output of the trainer: {line:?}"),
                    &error,
                )
            }),
            _ => {
                let ended = self.child.0.wait().map(|status| status.to_string());
                let ended = ended.unwrap_or_else(|error| error.to_string());
                Err(CliError::usage(format!("the trainer ended early: {ended}")))
            }
        }
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Result<(), CliError> {
        self.child.0.wait().map(drop).map_err(CliError::from_cause)
    }
}
