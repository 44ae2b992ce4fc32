//! Errors of `client` as the exceptions of `dquant._errors`.
//!
//! Message and hint are those of the command line. An exception class is found by its name when it
//! is raised, which is rare.

use client::{Error, Reason};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;

/// A class of `dquant._errors`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Class {
    /// The request is invalid, or a machine or its files are not as needed.
    Invalid,
    /// A saved position belongs to another stream.
    State,
    /// A peer does not reply.
    Unreachable,
    /// The stream ended early.
    Stream,
    /// The views of this process hold every slot.
    SlotsHeld,
    /// A stream is used in a child of the process that opened it.
    Fork,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Class::Invalid => "InvalidError",
            Class::State => "StateError",
            Class::Unreachable => "UnreachableError",
            Class::Stream => "StreamError",
            Class::SlotsHeld => "SlotsHeldError",
            Class::Fork => "ForkError",
        }
    }

    /// An exception of this class.
    pub(crate) fn error(self, message: impl Into<String>, hint: Option<&str>) -> PyErr {
        let message = message.into();
        // Making the exception fails only where Python itself is out of order; that error is raised
        // instead.
        Python::attach(|py| {
            let class = py.import("dquant._errors").and_then(|module| module.getattr(self.name()));
            class
                .and_then(|class| class.call1((message, hint)))
                .map_or_else(|error| error, PyErr::from_value)
        })
    }
}

/// The exception for an error of the client library.
pub(crate) fn raised(error: &Error) -> PyErr {
    let class = match error {
        Error::Stream { .. } | Error::DaemonDied | Error::Ring(_) => Class::Stream,
        error => match error.reason() {
            Reason::Invalid => Class::Invalid,
            Reason::Unreachable => Class::Unreachable,
            Reason::CheckFailed => Class::Stream,
        },
    };
    class.error(error.to_string(), error.hint().as_deref())
}

/// An invalid argument or call.
pub(crate) fn invalid(message: impl Into<String>, hint: &str) -> PyErr {
    Class::Invalid.error(message, Some(hint))
}

/// The value of an argument, or an error that names it and what it takes.
pub(crate) fn value_of<'py, T: FromPyObjectOwned<'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
    takes: &str,
) -> PyResult<T> {
    value.extract::<T>().map_err(|_| {
        let shown = value.repr().map_or_else(|_| "a value".into(), |text| text.to_string());
        invalid(format!("{name} is {shown}"), &format!("give {takes}"))
    })
}

/// What numbers of 32 bits are.
pub(crate) const U32: &str = "a whole number from 0 to 2**32 - 1";
