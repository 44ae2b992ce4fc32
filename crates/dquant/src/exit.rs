//! How a command ends: its exit code, and what it says when it did not work.
//!
//! The four exit codes of the program stand here and nowhere else. An error of the command line says what failed, on
//! which object and why; where there is a next thing to try, a `hint:` line says that. Libraries below keep their own
//! error enums; a command turns them into a [`CliError`] where it knows what the user wanted.

use std::{fmt, io};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Exit codes of every command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Everything went well.
    Good = 0,
    /// The command ran and a check failed: bytes differ, a value does not fit, a limit was missed.
    CheckFailed = 1,
    /// The command line is wrong, or this machine or its files are not as needed.
    Usage = 2,
    /// The other side did not answer.
    PeerUnreachable = 3,
}

const DESCRIPTORS_HINT: &str = "raise the limit of open files of the process that says so: `ulimit -n`, or LimitNOFILE= of its service";

/// Whether the system refused for want of descriptors. Errors of libraries, and of daemons that answer
/// over a socket, are text by the time they come here.
pub(crate) fn lacks_descriptors(message: &str) -> bool {
    message.contains("(os error 24)")
}

/// What the system said, for a line of a daemon, and what helps where descriptors are missing.
pub(crate) fn with_limit_hint(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    if lacks_descriptors(&text) { format!("{text}; {DESCRIPTORS_HINT}") } else { text }
}

/// Why a command stops early.
#[derive(Debug)]
pub enum CliError {
    /// The reader of our output went away (`dquant … | head`): nothing to say, and no failure.
    PipeClosed,
    /// Something to tell the user.
    Failed {
        /// What failed, on which object, why; without a full stop.
        message: String,
        /// The next thing to try.
        hint: Option<String>,
        /// The exit code it leads to.
        exit: Exit,
        /// Whether the same may work a little later.
        transient: bool,
    },
}

impl CliError {
    /// The command line is wrong, or this machine or its files are not as needed.
    pub fn usage(message: impl fmt::Display) -> CliError {
        CliError::failed(Exit::Usage, message)
    }

    /// The command did its work and a check failed.
    pub fn check_failed(message: impl fmt::Display) -> CliError {
        CliError::failed(Exit::CheckFailed, message)
    }

    /// The other side did not answer.
    pub fn peer_unreachable(message: impl fmt::Display) -> CliError {
        CliError::failed(Exit::PeerUnreachable, message)
    }

    /// Errors of the libraries may carry a hint behind their message; it gets a line of its own.
    fn failed(exit: Exit, message: impl fmt::Display) -> CliError {
        let text = message.to_string();
        let (message, hint) = match text.rsplit_once("; hint: ") {
            Some((message, hint)) => (message.to_owned(), Some(hint.to_owned())),
            None => (text, None),
        };
        let hint = if lacks_descriptors(&message) { Some(DESCRIPTORS_HINT.into()) } else { hint };
        CliError::Failed { message, hint, exit, transient: exit == Exit::PeerUnreachable }
    }

    /// Adds the next thing to try.
    #[must_use]
    pub fn hint(self, text: impl fmt::Display) -> CliError {
        match self {
            // The cause lies elsewhere than whoever adds this hint could know.
            CliError::Failed { ref message, .. } if lacks_descriptors(message) => self,
            CliError::Failed { message, exit, transient, .. } => {
                CliError::Failed { message, hint: Some(text.to_string()), exit, transient }
            }
            CliError::PipeClosed => CliError::PipeClosed,
        }
    }

    /// Marks a failure that may pass by itself: whoever has time tries again.
    #[must_use]
    pub fn transient(mut self) -> CliError {
        if let CliError::Failed { transient, .. } = &mut self {
            *transient = true;
        }
        self
    }

    /// Whether the same may work a little later. A peer that cannot be reached may come back.
    pub fn is_transient(&self) -> bool {
        matches!(self, CliError::Failed { transient: true, .. })
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
        CliError::usage(format_args!("cannot write to standard output: {error}"))
    }
}

/// Whether whoever started this process wants it to outlive its terminal, as `nohup` does.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 != 0)
}

async fn hung_up(hangup: &mut Option<Signal>) {
    match hangup {
        Some(hangup) => drop(hangup.recv().await),
        None => std::future::pending().await,
    }
}

/// Cleans up when this process is asked to end by SIGHUP, SIGINT or SIGTERM, and ends it with the code that
/// shells show for that signal.
///
/// # Errors
/// When the signals cannot be listened to.
pub(crate) fn on_end_signal(clean: impl FnOnce() + Send + 'static) -> Result<(), CliError> {
    let runtime = crate::runtime::current_thread()?;
    let keep_hangup = ignores_hangup();
    let listen = |kind| signal(kind).map_err(CliError::usage);
    let (mut terminate, mut interrupt, mut hangup) = {
        let _entered = runtime.enter();
        let hangup = if keep_hangup { None } else { Some(listen(SignalKind::hangup())?) };
        (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?, hangup)
    };
    let wait = move || {
        let code = runtime.block_on(async {
            tokio::select! {
                _ = terminate.recv() => 143,
                _ = interrupt.recv() => 130,
                () = hung_up(&mut hangup) => 129,
            }
        });
        clean();
        std::process::exit(code);
    };
    std::thread::Builder::new().name("end-signals".into()).spawn(wait).map_err(CliError::usage)?;
    Ok(())
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
    fn a_hint_of_a_library_becomes_ours() {
        let error = CliError::usage("no io_uring: EPERM; hint: allow it in the container");
        let hint = Some("allow it in the container".to_owned());
        assert_eq!(error.parts(), ("no io_uring: EPERM".to_owned(), hint));
        let better = error.hint("run as root");
        assert_eq!(better.parts().1.as_deref(), Some("run as root"));
    }

    #[test]
    fn a_lack_of_descriptors_has_its_own_hint() {
        let errno = io::Error::from_raw_os_error(24);
        let error = CliError::usage(format!("socket s: {errno}")).hint("choose another --socket");
        assert!(error.parts().1.expect("a hint").contains("ulimit -n"));
        let other = CliError::usage("socket s: in use").hint("choose another --socket");
        assert_eq!(other.parts().1.as_deref(), Some("choose another --socket"));
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
