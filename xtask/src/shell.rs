//! Runs other programs and reports their results.
//!
//! A program that cannot be started is a fault of the machine (exit code 2); one that ran and
//! failed is a failed check (exit code 1). The command line is printed before it runs, so that a
//! failing step can be pasted and repeated.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// In what our programs say when a periodic look has found work that should have woken them: a
/// figure would be that of a defect.
pub(crate) const RESCUED: &str = "a wake-up was lost";

/// Why a command of xtask stops.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line was invalid, or the machine lacks something that cannot be skipped.
    Usage(String),
    /// A check ran and did not pass.
    Check(String),
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure::Usage(message.into())
    }

    pub(crate) fn check(message: impl Into<String>) -> Failure {
        Failure::Check(message.into())
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Check(_) => 1,
            Failure::Usage(_) => 2,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(message) | Failure::Check(message) => f.write_str(message),
        }
    }
}

/// How a step of a check ended that did not fail.
pub(crate) enum Outcome {
    /// It ran and passed.
    Passed,
    /// The part that could run passed; the text names the rest.
    PassedWithout(String),
    /// It did not run, and why.
    Skipped(String),
}

/// Runs a program with its output on this terminal.
///
/// # Errors
/// [`Failure::Usage`] when it cannot be started, [`Failure::Check`] when it ends with a failure.
pub(crate) fn run(command: &mut Command) -> Result<(), Failure> {
    eprintln!("    $ {}", display(command));
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    if status.success() {
        return Ok(());
    }
    Err(Failure::check(format!("`{}` ended with {status}", display(command))))
}

/// [Runs](run) a program; [`RESCUED`] on its standard error is a failure, however the program ends.
///
/// # Errors
/// As [`run`], and [`Failure::Check`] when it has written that.
pub(crate) fn run_watched(command: &mut Command) -> Result<(), Failure> {
    eprintln!("    $ {}", display(command));
    let started = command.stderr(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| cannot_start(command, &error))?;
    let written = child.stderr.take().map(BufReader::new);
    let mut is_defective = false;
    for line in written.into_iter().flat_map(|written| written.split(b'\n')).map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        is_defective |= line.contains(RESCUED);
        eprintln!("{line}");
    }
    let status = child.wait().map_err(|error| cannot_start(command, &error))?;
    match (status.success(), is_defective) {
        (true, false) => Ok(()),
        (true, true) => Err(Failure::check(format!("`{}`: {RESCUED}", display(command)))),
        _ => Err(Failure::check(format!("`{}` ended with {status}", display(command)))),
    }
}

/// Runs a program and returns what it wrote to stdout; its stderr stays on this terminal.
///
/// # Errors
/// As [`run`], and [`Failure::Check`] when the output is not UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|error| cannot_start(command, &error))?;
    if !output.status.success() {
        return Err(Failure::check(format!("`{}` ended with {}", display(command), output.status)));
    }
    String::from_utf8(output.stdout)
        .map_err(|_| Failure::check(format!("`{}` wrote text that is not UTF-8", display(command))))
}

/// Whether a program starts and succeeds with these arguments.
pub(crate) fn answers(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn cannot_start(command: &Command, error: &std::io::Error) -> Failure {
    Failure::usage(format!("cannot start `{}`: {error}", display(command)))
}

fn display(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_programs_say_that_a_wake_up_was_lost_in_these_words() {
        let driver = crate::workspace::root().join("crates/nic/src/driver.rs");
        let source = std::fs::read_to_string(driver).expect("it is there");
        assert!(source.contains(&format!("RESCUED: &str = \"{RESCUED}")));
    }

    #[test]
    fn a_watched_program_fails_when_it_has_lost_a_wake_up_or_for_its_own_reasons() {
        let run = |script: &str| run_watched(Command::new("sh").args(["-c", script]));
        run("echo well >&2").expect("nothing is wrong");
        for script in [&format!("echo 'dquant: {RESCUED}: work' >&2"), "exit 1"] {
            assert_eq!(run(script).expect_err(script).exit_code(), 1);
        }
    }
}
