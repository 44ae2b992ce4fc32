//! Errors of a daemon or a stream, as text for their requester.
//!
//! Such an error often belongs to another process: a target's refusal reaches the DPU in a gRPC
//! status, and the DPU's reaches the trainer over the local socket. So it is text from the start,
//! with the next thing to try and a [`Kind`] that decides what the other side does. Errors whose
//! cause matters to their callers are enums of their own, in the crates that have them.

use std::error::Error as Cause;
use std::fmt;

use thiserror::Error;

use crate::descriptors::{DESCRIPTORS_HINT, lacks_descriptors};
use crate::text::{lines, one_line};

/// Kind of failure. The numbers are sent over the local socket; 1, a failed check, does not occur
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The request is invalid, or this machine or its files are not as needed.
    Invalid = 2,
    /// The other side did not reply.
    Unreachable = 3,
}

/// A failure to report to the user or another process.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Error {
    /// What failed, on which object, why; without a full stop.
    message: String,
    /// The next thing to try.
    hint: Option<String>,
    kind: Kind,
    /// Whether a retry may succeed a little later.
    transient: bool,
}

/// The system's message, followed by `separator` and the hint where descriptors are lacking.
pub fn with_limit_hint(error: &(impl Cause + 'static), separator: &str) -> String {
    let hint = if lacks_descriptors(error) { [separator, DESCRIPTORS_HINT] } else { [""; 2] };
    format!("{error}{}", hint.concat())
}

/// Splits the text of a library's error into message and optional hint.
pub fn split_hint(error: impl fmt::Display) -> (String, Option<String>) {
    let text = error.to_string();
    match text.rsplit_once("; hint: ") {
        Some((message, hint)) => (message.to_owned(), Some(hint.to_owned())),
        None => (text, None),
    }
}

impl Error {
    /// The request is invalid, or this machine or its files are not as needed.
    pub fn invalid(message: impl fmt::Display) -> Error {
        Error::new(Kind::Invalid, message)
    }

    /// The other side did not reply.
    pub fn unreachable(message: impl fmt::Display) -> Error {
        Error::new(Kind::Unreachable, message)
    }

    /// As [`Error::invalid`]: `what` failed, for this cause.
    pub fn because(what: impl fmt::Display, cause: &(impl Cause + 'static)) -> Error {
        Error::invalid(format_args!("{what}: {cause}")).caused_by(cause)
    }

    /// As [`Error::invalid`], with the message of the cause.
    pub fn from_cause(cause: impl Cause + 'static) -> Error {
        Error::invalid(&cause).caused_by(&cause)
    }

    fn new(kind: Kind, message: impl fmt::Display) -> Error {
        let (message, hint) = split_hint(message);
        // Mistakes in plans are shown below the plan's line.
        let message = lines(&message).into_owned();
        let error = Error { message, hint: None, kind, transient: kind == Kind::Unreachable };
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }

    /// Adds the next thing to try.
    #[must_use]
    pub fn hint(self, text: impl fmt::Display) -> Error {
        // The hint for the known cause takes precedence over the caller's.
        if self.hint.as_deref() == Some(DESCRIPTORS_HINT) {
            return self;
        }
        Error { hint: Some(one_line(&text.to_string()).into_owned()), ..self }
    }

    /// Adds what helps against the cause, where that is known.
    #[must_use]
    pub fn caused_by(self, cause: &(dyn Cause + 'static)) -> Error {
        if lacks_descriptors(cause) { self.hint(DESCRIPTORS_HINT) } else { self }
    }

    /// Marks a failure that may be temporary: callers with time retry.
    #[must_use]
    pub fn transient(self) -> Error {
        Error { transient: true, ..self }
    }

    /// Whether a retry may succeed a little later. A peer that cannot be reached may come back.
    pub fn is_transient(&self) -> bool {
        self.transient
    }

    /// Message and hint, for passing the error on.
    pub fn parts(&self) -> (String, Option<String>) {
        (self.message.clone(), self.hint.clone())
    }

    /// Message and hint in one line, as [`split_hint`] takes them apart.
    pub fn to_line(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}; hint: {hint}", self.message),
            None => self.message.clone(),
        }
    }

    /// Kind of failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

/// The innermost message of an error: that of the operating system.
pub fn root_cause(error: &dyn Cause) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use std::io;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_hint_of_a_library_becomes_ours() {
        let error = Error::invalid("no io_uring: EPERM; hint: allow it in the container");
        let hint = Some("allow it in the container".to_owned());
        assert_eq!(error.parts(), ("no io_uring: EPERM".to_owned(), hint));
        let better = error.hint("run as root");
        assert_eq!(better.parts().1.as_deref(), Some("run as root"));
    }

    /// As errors of other crates are, with the system's number as their source.
    #[derive(Debug, Error)]
    #[error("accept")]
    struct Accept(#[source] Errno);

    #[test]
    fn a_lack_of_descriptors_has_its_own_hint() {
        let out_of_them = io::Error::from_raw_os_error(24);
        let below = Accept(Errno::MFILE);
        for cause in [&out_of_them as &(dyn Cause + 'static), &below] {
            let error = Error::invalid("socket s").caused_by(cause).hint("choose another --socket");
            assert!(error.parts().1.expect("a hint").contains("ulimit -n"));
        }
        let in_use = io::Error::from_raw_os_error(98);
        let other = Error::invalid("socket s").caused_by(&in_use).hint("choose another --socket");
        assert_eq!(other.parts().1.as_deref(), Some("choose another --socket"));
        let said = Error::invalid("the target said (os error 24)");
        assert_eq!(said.parts().1, None, "text is no cause");
    }
}
