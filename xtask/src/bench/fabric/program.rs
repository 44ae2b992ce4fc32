//! Programs of one measurement: started in a place and on a core, ended with it.
//!
//! What a program writes goes to a file, so that nobody waits for a full pipe. A program that does
//! not end within its limit is ended.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::obstacle::Obstacle;
use super::place::Side;
use crate::shell::RESCUED;

/// How often a program is looked at: rare, because it runs on a core that is measured.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long a server may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A command line that will run somewhere.
#[derive(Clone, Debug)]
pub(super) struct Line {
    words: Vec<String>,
    env: Vec<(String, String)>,
    core: Option<usize>,
}

impl Line {
    /// A program and its arguments, separated by blanks.
    pub(super) fn new(text: &str) -> Line {
        let words = text.split_whitespace().map(str::to_owned).collect();
        Line { words, env: Vec::new(), core: None }
    }

    /// The program in front of this one, which starts it.
    #[must_use]
    pub(super) fn behind(mut self, words: Vec<String>) -> Line {
        self.words.splice(0..0, words);
        self
    }

    #[must_use]
    pub(super) fn arg(mut self, word: impl Into<String>) -> Line {
        self.words.push(word.into());
        self
    }

    #[must_use]
    pub(super) fn env(mut self, settings: &[(&str, &str)]) -> Line {
        self.env.extend(settings.iter().map(|(name, value)| (name.to_string(), value.to_string())));
        self
    }

    /// Runs on this core only.
    #[must_use]
    pub(super) fn on_core(mut self, core: usize) -> Line {
        self.core = Some(core);
        self
    }

    /// Runs wherever the system likes.
    #[must_use]
    pub(super) fn on_every_core(mut self) -> Line {
        self.core = None;
        self
    }

    /// The line as it would be typed, settings first.
    pub(super) fn text(&self) -> String {
        let settings = self.env.iter().map(|(name, value)| format!("{name}={value}"));
        settings.chain(self.words.iter().cloned()).collect::<Vec<_>>().join(" ")
    }

    /// The same with names in place of absolute paths, as it stands in reports that others read.
    fn named(&self) -> String {
        self.text().split(' ').map(without_folder).collect::<Vec<_>>().join(" ")
    }

    /// Starts it at a side of a place; it may run for `limit`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start(&self, side: &Side, limit: Duration) -> Result<Running, Obstacle> {
        let mut words = side.prefix();
        if let Some(core) = self.core {
            words.extend(["taskset".into(), "-c".into(), core.to_string()]);
        }
        words.extend(self.words.iter().cloned());
        let (name, args) = words.split_first().ok_or_else(|| Obstacle::new("no program"))?;
        let (path, out) = output_file()?;
        let mut command = Command::new(name);
        command.args(args).envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.spawn().map_err(|error| {
            let _ = fs::remove_file(&path);
            Obstacle(format!("cannot start {name}: {error}"))
        })?;
        Ok(Running { child, line: self.named(), out: path, ends: Instant::now() + limit })
    }

    /// Runs it to its end and returns what it wrote.
    ///
    /// # Errors
    /// When it does not start, fails or does not end.
    pub(super) fn run(&self, side: &Side, limit: Duration) -> Result<String, Obstacle> {
        self.start(side, limit)?.finish()
    }
}

/// `/a/b` as `b`, `NAME=/a/b` as `NAME=b`; other words as they are.
fn without_folder(word: &str) -> String {
    let (setting, value) = match word.split_once('=') {
        Some((name, value)) => (format!("{name}="), value),
        None => (String::new(), word),
    };
    match Path::new(value).file_name().filter(|_| value.starts_with('/')) {
        Some(name) => setting + &name.to_string_lossy(),
        None => setting + value,
    }
}

fn output_file() -> io::Result<(PathBuf, File)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("dquant-bench-{}-{number}.out", std::process::id());
    let path = std::env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    Ok((path, file))
}

/// A program that runs. It ends with this value.
#[derive(Debug)]
pub(super) struct Running {
    child: Child,
    line: String,
    out: PathBuf,
    ends: Instant,
}

impl Running {
    /// Waits until it listens on the TCP port.
    ///
    /// # Errors
    /// When it ends before, or takes too long.
    pub(super) fn wait_listening(&mut self, side: &Side, port: u16) -> Result<(), Obstacle> {
        let until = Instant::now() + START_LIMIT;
        while !side.listens(port) {
            if self.child.try_wait()?.is_some() {
                return Err(self.failure("ended before it listened"));
            }
            if Instant::now() > until {
                return Err(self.failure("does not listen"));
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Waits for its end and returns what it wrote.
    ///
    /// # Errors
    /// When it fails or does not end in time.
    pub(super) fn finish(mut self) -> Result<String, Obstacle> {
        match self.wait()? {
            Some(status) if status.success() => self.check().map(|()| self.written()),
            Some(status) => Err(self.failure(&format!("ended with {status}"))),
            None => Err(self.failure("did not end in time")),
        }
    }

    /// Checks what it has said so far: a figure of a program that lost a wake-up is that of a
    /// defect.
    ///
    /// # Errors
    /// When it says so.
    pub(super) fn check(&self) -> Result<(), Obstacle> {
        match self.written().contains(RESCUED) {
            true => Err(self.failure("lost a wake-up")),
            false => Ok(()),
        }
    }

    /// Its exit status, `None` if its time is over.
    fn wait(&mut self) -> Result<Option<ExitStatus>, Obstacle> {
        loop {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > self.ends {
                return Ok(ended);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn written(&self) -> String {
        let bytes = fs::read(&self.out).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Its command line, what happened, and the line that says why: its error, or the last.
    fn failure(&self, what: &str) -> Obstacle {
        let text = self.written();
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let error = lines.clone().find_map(|line| line.strip_prefix("error: "));
        let why = error.or(lines.next_back()).unwrap_or("no output");
        Obstacle(format!("`{}` {what}: {why}", self.line))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn output_failure_and_time_limit_are_told_apart() {
        let here = Side::here();
        let said = Line::new("echo a").arg("b c").run(&here, LIMIT);
        assert_eq!(said, Ok("a b c\n".to_owned()));
        let failed = Line::new("cat /nothing/there").run(&here, LIMIT).expect_err("no file");
        assert!(
            failed.0.contains("exit status: 1") && failed.0.contains("No such file"),
            "{failed:?}"
        );
        let missing = Line::new("no-such-program-here").run(&here, LIMIT).expect_err("nothing");
        assert!(missing.0.contains("cannot start"), "{missing:?}");
        let rescued = Line::new("echo").arg(format!("dquant: {RESCUED}: work has waited"));
        let rescued = rescued.run(&here, LIMIT).expect_err("no figure of a defect");
        assert!(rescued.0.contains("lost a wake-up"), "{rescued:?}");
        let slow = Line::new("sleep 60").run(&here, Duration::from_millis(50));
        assert!(slow.expect_err("too long").0.contains("in time"));
    }

    #[test]
    fn a_failure_gives_the_error_and_no_folder() {
        let script = "echo begun; echo 'error: no route'; echo '  hint: add one'; exit 3";
        let line = Line::new("/bin/sh -c").arg(script).env(&[("LIBRARY", "/nothing/lib.so")]);
        let failed = line.run(&Side::here(), LIMIT).expect_err("exit 3").0;
        assert!(failed.starts_with("`LIBRARY=lib.so sh -c "), "{failed}");
        assert!(failed.ends_with("exit status: 3: no route"), "{failed}");
    }

    #[test]
    fn settings_and_prefixes_are_shown_as_they_would_be_typed() {
        let line = Line::new("ib_send_lat -s 8").env(&[("DQUANT_PATH", "udp")]);
        let line = line.behind(vec!["dquant".into(), "run".into(), "--".into()]);
        assert_eq!(line.text(), "DQUANT_PATH=udp dquant run -- ib_send_lat -s 8");
        let seen = Line::new("printenv X").env(&[("X", "7")]).run(&Side::here(), LIMIT);
        assert_eq!(seen, Ok("7\n".to_owned()));
    }
}
