//! How a command ends: its exit code, and its message on failure.
//!
//! The four exit codes of the program are defined only here. An error of the command line says what
//! failed, on which object and why; where there is a next thing to try, a `hint:` line names it.
//! Libraries below keep their own error enums; a command turns them into a [`CliError`] where it
//! knows what the user wanted.

use std::error::Error as Cause;
use std::{fmt, io};

use client::Reason;
use service::descriptors::{DESCRIPTORS_HINT, lacks_descriptors};
use service::error::{Kind, split_hint};
use service::signals::{self, EndSignal};

/// Exit codes of every command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Everything went well.
    Good = 0,
    /// The command ran and a check failed: bytes differ, a value does not fit, a limit was missed.
    CheckFailed = 1,
    /// The command line is invalid, or this machine or its files are not as needed.
    Usage = 2,
    /// The other side did not reply.
    PeerUnreachable = 3,
}

/// Why a command stops early.
#[derive(Debug)]
pub enum CliError {
    /// The reader of our output has closed the pipe (`dquant … | head`): no message, and no
    /// failure.
    PipeClosed,
    /// A failure to report to the user.
    Failed {
        /// What failed, on which object, why; without a full stop.
        message: String,
        /// The next thing to try.
        hint: Option<String>,
        /// The exit code it leads to.
        exit: Exit,
    },
}

impl CliError {
    /// The command line is invalid, or this machine or its files are not as needed.
    pub fn usage(message: impl fmt::Display) -> CliError {
        CliError::failed(Exit::Usage, message)
    }

    /// As [`CliError::usage`]: `what` failed, for this cause.
    pub fn because(what: impl fmt::Display, cause: &(impl Cause + 'static)) -> CliError {
        CliError::usage(format_args!("{what}: {cause}")).caused_by(cause)
    }

    /// As [`CliError::usage`], with the message of the cause.
    pub fn from_cause(cause: impl Cause + 'static) -> CliError {
        CliError::usage(&cause).caused_by(&cause)
    }

    /// The command did its work and a check failed.
    pub fn check_failed(message: impl fmt::Display) -> CliError {
        CliError::failed(Exit::CheckFailed, message)
    }

    /// The other side did not reply.
    pub fn peer_unreachable(message: impl fmt::Display) -> CliError {
        CliError::failed(Exit::PeerUnreachable, message)
    }

    /// Errors of the libraries may carry a hint behind their message; it gets a line of its own.
    fn failed(exit: Exit, message: impl fmt::Display) -> CliError {
        let (message, hint) = split_hint(message);
        CliError::Failed { message, hint, exit }
    }

    /// Adds the next thing to try.
    #[must_use]
    pub fn hint(self, text: impl fmt::Display) -> CliError {
        match self {
            // The hint for the known cause takes precedence over the caller's.
            CliError::Failed { hint: Some(ref known), .. } if known == DESCRIPTORS_HINT => self,
            CliError::Failed { message, exit, .. } => {
                CliError::Failed { message, hint: Some(text.to_string()), exit }
            }
            CliError::PipeClosed => CliError::PipeClosed,
        }
    }

    /// Adds what helps against the cause, where that is known.
    #[must_use]
    pub fn caused_by(self, cause: &(dyn Cause + 'static)) -> CliError {
        if lacks_descriptors(cause) { self.hint(DESCRIPTORS_HINT) } else { self }
    }

    /// Message and hint, for passing the error on to another process.
    pub fn parts(&self) -> (String, Option<String>) {
        match self {
            CliError::PipeClosed => (String::from("the output was closed"), None),
            CliError::Failed { message, hint, .. } => (message.clone(), hint.clone()),
        }
    }

    /// The exit code it leads to.
    pub fn exit(&self) -> Exit {
        match self {
            CliError::PipeClosed => Exit::Good,
            CliError::Failed { exit, .. } => *exit,
        }
    }

    /// A failure to write results.
    pub fn from_output(error: &io::Error) -> CliError {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return CliError::PipeClosed;
        }
        CliError::because("cannot write to standard output", error)
    }
}

impl From<service::Error> for CliError {
    fn from(error: service::Error) -> CliError {
        let exit = match error.kind() {
            Kind::Invalid => Exit::Usage,
            Kind::Unreachable => Exit::PeerUnreachable,
        };
        let (message, hint) = error.parts();
        CliError::Failed { message, hint, exit }
    }
}

impl From<client::Error> for CliError {
    fn from(error: client::Error) -> CliError {
        let exit = match error.reason() {
            Reason::CheckFailed => Exit::CheckFailed,
            Reason::Invalid => Exit::Usage,
            Reason::Unreachable => Exit::PeerUnreachable,
        };
        CliError::Failed { message: error.to_string(), hint: error.hint(), exit }
    }
}

impl From<formats::Error> for CliError {
    fn from(error: formats::Error) -> CliError {
        let failed = match error.is_about_data() {
            true => CliError::check_failed(&error),
            false => CliError::usage(&error),
        };
        failed.hint(error.hint()).caused_by(&error)
    }
}

/// What helps when an output cannot be written.
pub(crate) const OUTPUT_HINT: &str = "name a file in a folder that exists and is writable";

/// What helps when an input cannot be read.
pub(crate) const INPUT_HINT: &str = "name a file that exists and that this user may read";

/// Cleans up when a signal ends this process, and ends it with the code that shells show for that
/// signal.
///
/// # Errors
/// When the signals cannot be listened to.
pub(crate) fn on_end_signal(clean: impl FnOnce() + Send + 'static) -> Result<(), CliError> {
    let end = move |signal: EndSignal| {
        clean();
        std::process::exit(signal.exit_code());
    };
    Ok(signals::on_end_signal(end)?)
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (message, hint) = self.parts();
        f.write_str(&message)?;
        hint.map_or(Ok(()), |hint| write!(f, "\nhint: {hint}"))
    }
}

impl std::error::Error for CliError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_quiet_success() {
        let error = CliError::from_output(&io::ErrorKind::BrokenPipe.into());
        assert_eq!(error.hint("none").exit(), Exit::Good);
    }

    #[test]
    fn the_codes_are_the_documented_ones() {
        let codes = [
            CliError::check_failed("a").exit(),
            CliError::usage("b").exit(),
            CliError::peer_unreachable("c").hint("d").exit(),
        ];
        assert_eq!(codes.map(|exit| exit as u8), [1, 2, 3]);
    }
}
