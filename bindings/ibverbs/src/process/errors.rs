//! Errors: `errno` values, and messages on stderr.
//!
//! Verbs return only `errno`. Where that is not enough, as when a device cannot be opened, the
//! error is a [`Failure`]: its message and its hint go to stderr, its `errno` to the program.

use std::borrow::Cow;
use std::fmt::{self, Arguments};
use std::io::Write;

use roce::verbs::VerbsError;
use rustix::io::Errno;

/// The result of a call.
pub(crate) type Outcome<T> = Result<T, Errno>;

/// Why a device cannot be opened, for the user of the program: the program itself only reports that
/// it cannot.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: Errno,
    message: String,
    hint: Cow<'static, str>,
}

impl Failure {
    /// The hint is the one for `errno`.
    pub(crate) fn new(errno: Errno, message: impl fmt::Display) -> Failure {
        Failure { errno, message: message.to_string(), hint: hint_for(errno).into() }
    }

    /// Replaces the hint if there is a better one.
    pub(crate) fn with_hint<H: Into<Cow<'static, str>>>(self, hint: Option<H>) -> Failure {
        Failure { hint: hint.map_or(self.hint, H::into), ..self }
    }

    /// The next thing to try.
    pub(crate) fn hint(&self) -> &str {
        &self.hint
    }

    /// Reports it on stderr and returns the `errno` for the program.
    pub(crate) fn report(&self) -> Errno {
        say(format_args!("{self}"), Some(self.hint()));
        self.errno
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Writes a line to stderr, with the next thing to try. If stderr cannot be written the line is
/// lost and the program continues.
pub(crate) fn say(message: Arguments<'_>, hint: Option<&str>) {
    let hint = hint.map(|hint| format!("; hint: {hint}")).unwrap_or_default();
    // In one write, so that lines of several threads do not mix.
    let line = format!("libibverbs (dquant): {message}{hint}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// The next thing to try.
fn hint_for(error: Errno) -> &'static str {
    match error {
        Errno::MFILE => "allow more open files (ulimit -n 1024), or close some",
        Errno::NFILE => "the machine has reached its limit of open files (sysctl fs.file-max)",
        Errno::AGAIN => "allow more processes and threads (ulimit -u)",
        Errno::NOMEM | Errno::NOBUFS => "out of memory",
        Errno::NODEV => "is it still up, with an address? (ip address)",
        _ => "`dquant doctor` looks at what this machine offers",
    }
}

/// The `errno` value of an error of the standard library.
pub(crate) fn errno_of_io(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The `errno` value of a refused verb, as in the man pages and the kernel.
pub(crate) fn errno_of(error: VerbsError) -> Errno {
    match error {
        VerbsError::PdInUse(_)
        | VerbsError::CqInUse(_)
        | VerbsError::SrqInUse(_)
        | VerbsError::RegionInUse(_) => Errno::BUSY,
        VerbsError::QueueFull { .. } | VerbsError::TableFull { .. } => Errno::NOMEM,
        _ => Errno::INVAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_the_hint_of_its_errno_or_a_better_one() {
        let plain = Failure::new(Errno::MFILE, "dq_lo: no descriptor");
        assert!(plain.hint().contains("ulimit -n"), "{}", plain.hint());
        assert!(Failure::new(Errno::MFILE, "x").with_hint(None::<&str>).hint() == plain.hint());
        let better = plain.with_hint(Some("close some"));
        assert_eq!(
            (better.to_string(), better.hint()),
            ("dq_lo: no descriptor".into(), "close some")
        );
        assert_eq!(better.report(), Errno::MFILE);
    }
}
