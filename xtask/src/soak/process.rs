//! One process of a soak: in a process group of its own, with its standard error in a file, and
//! ended when it is dropped.
//!
//! A signal is sent only while the child is known not to have been waited for, so its number cannot
//! belong to anybody else.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use super::locks::lock;

/// How often a child is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Code(i32),
    Signal(i32),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Code(code) => write!(f, "exit status {code}"),
            End::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// SIGKILL.
pub(super) const KILLED: End = End::Signal(9);

/// A running or ended process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) name: String,
    pub(super) pid: u32,
    child: Mutex<Child>,
    err: PathBuf,
}

impl Process {
    /// Starts it; what it reports on standard error goes to the file.
    pub(super) fn start(name: &str, mut command: Command, err: &Path) -> Result<Process, String> {
        let cannot = |error: std::io::Error| format!("cannot start {name}: {error}");
        command.stderr(File::create(err).map_err(cannot)?).process_group(0);
        let child = command.spawn().map_err(cannot)?;
        let (name, pid) = (name.to_owned(), child.id());
        Ok(Process { name, pid, child: Mutex::new(child), err: err.to_owned() })
    }

    pub(super) fn stdout(&self) -> Option<ChildStdout> {
        lock(&self.child).stdout.take()
    }

    pub(super) fn stdin(&self) -> Option<ChildStdin> {
        lock(&self.child).stdin.take()
    }

    /// SIGKILL, which also ends a process that is stopped.
    pub(super) fn kill(&self) {
        // Fails when it has ended already.
        let _ = lock(&self.child).kill();
    }

    /// Sends a signal by its name: STOP, CONT, TERM. One that has ended needs none.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub(super) fn signal(&self, signal: &str) -> Result<(), String> {
        let mut child = lock(&self.child);
        if !matches!(child.try_wait(), Ok(None)) {
            return Ok(());
        }
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("kill -s {signal} {}", self.pid)]);
        shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        match shell.status() {
            Ok(status) if status.success() || !matches!(child.try_wait(), Ok(None)) => Ok(()),
            Ok(status) => Err(format!("{signal} to {}: kill ended with {status}", self.name)),
            Err(error) => Err(format!("{signal} to {}: {error}", self.name)),
        }
    }

    pub(super) fn end(&self) -> Option<End> {
        let status = lock(&self.child).try_wait().ok()??;
        match (status.code(), status.signal()) {
            (Some(code), _) => Some(End::Code(code)),
            (None, signal) => Some(End::Signal(signal.unwrap_or(0))),
        }
    }

    /// How it ended, if it does in time.
    pub(super) fn wait(&self, limit: Duration) -> Option<End> {
        let begun = Instant::now();
        loop {
            match self.end() {
                Some(end) => return Some(end),
                None if begun.elapsed() > limit => return None,
                None => thread::sleep(LOOK),
            }
        }
    }

    /// The last lines of its standard error.
    pub(super) fn last_lines(&self, count: usize) -> String {
        let text = self.said();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }

    pub(super) fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.err).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let _ = lock(&self.child).wait();
        let _ = fs::remove_file(&self.err);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        let unique = format!("soak-process-{}-{}", std::process::id(), script.len());
        let err = std::env::temp_dir().join(unique);
        Process::start("sh", command, &err).expect("there is a shell")
    }

    #[test]
    fn a_process_ends_by_itself_by_a_signal_and_when_it_is_dropped() {
        let process = shell("echo a >&2; echo b >&2; exit 3");
        assert_eq!(process.wait(Duration::from_secs(30)), Some(End::Code(3)));
        assert_eq!(process.last_lines(1), "b");
        process.signal("TERM").expect("it has ended");
        let stopped = shell("sleep 100 & wait");
        stopped.signal("STOP").expect("it runs");
        assert!(stopped.signal("NONE").is_err());
        assert_eq!(stopped.end(), None);
        let pid = stopped.pid;
        stopped.kill();
        assert_eq!(stopped.wait(Duration::from_secs(30)), Some(KILLED));
        drop(stopped);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        let dropped = shell("exec sleep 101");
        let pid = dropped.pid;
        drop(dropped);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
