//! How a command ends: its exit code, and its message on failure.
//!
//! The four exit codes of the program are defined only here. An error of the command line says what failed, on which
//! object and why; where there is a next thing to try, a `hint:` line names it. Libraries below keep their own error
//! enums; a command turns them into a [`CliError`] where it knows what the user wanted.

use std::error::Error as Cause;
use std::{fmt, io};

use client::{Fault, Reason};
use engine::error::{DESCRIPTORS_HINT, Kind, lacks_descriptors, split_hint};
use engine::signals::{self, EndSignal};

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
    /// The reader of our output has closed the pipe (`dquant … | head`): no message, and no failure.
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

impl From<engine::Error> for CliError {
    fn from(error: engine::Error) -> CliError {
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
        let failed = CliError::failed(exit_of(&error), &error).caused_by(&error);
        match hint_for(&error) {
            Some(hint) => failed.hint(hint),
            None => failed,
        }
    }
}

fn exit_of(error: &client::Error) -> Exit {
    use client::Error as E;
    match error {
        E::Refused { reason: Reason::CheckFailed, .. }
        | E::Stream { fault: Fault::Data | Fault::Storage, .. } => Exit::CheckFailed,
        E::NoDaemon { .. }
        | E::Closed { .. }
        | E::NoResponse { .. }
        | E::DaemonDied
        | E::Refused { reason: Reason::Unreachable, .. }
        | E::Stream { fault: Fault::Target | Fault::Stopped, .. } => Exit::PeerUnreachable,
        _ => Exit::Usage,
    }
}

/// What helps when an output cannot be written.
pub(crate) const OUTPUT_HINT: &str = "name a file in a folder that exists and is writable";

/// What helps when an input cannot be read.
pub(crate) const INPUT_HINT: &str = "name a file that exists and that this user may read";

const START_AGAIN: &str = "start it again and open the stream at the batch you need";

/// What helps against an error of the client library, in terms of the command line.
fn hint_for(error: &client::Error) -> Option<&str> {
    use client::Error as E;
    Some(match error {
        E::Url { .. } => {
            "write it as dq://HOST[:PORT]/NAME, for example dq://127.0.0.1/corpora/web"
        }
        E::Plan { hint, .. } => hint.as_deref().unwrap_or("`dquant cat --help` shows plans"),
        E::NoDataset => "write dq://HOST/NAME, or blend(a=0.5,b=0.5)",
        E::NoDaemon { .. } => {
            "start one with `dquant dpu`, name its socket with --dpu or DQUANT_DPU, or use --offload false"
        }
        E::Denied { .. } => {
            "only its owner and root may use it: run as one of them, or start a DPU of your own"
        }
        E::Connect(_) => {
            "name the socket of `dquant dpu` with --dpu or DQUANT_DPU, or use --offload false"
        }
        E::ForeignDaemon { .. } => {
            "name the socket of a DPU of your own or of root with --dpu or DQUANT_DPU"
        }
        E::Refused { hint, .. } => return hint.as_deref(),
        E::Stream { fault: Fault::Data, .. } => {
            "see what is in the file with `dquant inspect`; narrow(u32) keeps large ids"
        }
        E::Stream { fault: Fault::Storage, .. } => "check the file on the target's machine",
        E::Stream { fault: Fault::Target, .. } => {
            "start the target again; a longer wait is --reconnect"
        }
        E::Stream { fault: Fault::Stopped, .. } | E::DaemonDied => START_AGAIN,
        E::SmallBuffer { .. } => "read at least one batch at a time",
        _ => return None,
    })
}

/// Cleans up when a signal ends this process, and ends it with the code that shells show for that signal.
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
