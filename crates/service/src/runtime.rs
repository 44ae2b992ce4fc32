//! Async runtimes, for the control plane and for signals.
//!
//! For its first runtime in a process tokio opens a pair of sockets for signals, and panics if it
//! cannot. So every runtime is created here, after a check that enough descriptors are free.

use std::os::unix::net::UnixStream;

use tokio::runtime::{Builder, Runtime};

use crate::error::Error;

/// Pairs of descriptors that must be free: a runtime opens up to six descriptors.
const PAIRS: usize = 4;

/// A runtime with a thread of its own.
///
/// # Errors
/// When descriptors or threads are short.
pub fn multi_thread() -> Result<Runtime, Error> {
    build(Builder::new_multi_thread().worker_threads(1))
}

/// A runtime that runs on its caller's thread while the caller waits.
///
/// # Errors
/// As [`multi_thread`].
pub fn current_thread() -> Result<Runtime, Error> {
    build(&mut Builder::new_current_thread())
}

fn build(builder: &mut Builder) -> Result<Runtime, Error> {
    let room: Result<Vec<_>, _> = (0..PAIRS).map(|_| UnixStream::pair()).collect();
    room.map(drop)
        .and_then(|()| builder.enable_all().build())
        .map_err(|error| Error::because("cannot start the control plane", &error))
}
