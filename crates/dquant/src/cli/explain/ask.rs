//! Finds the programs that reply, and queries one.
//!
//! Each verbs program with a device open listens at the abstract Unix socket `dquant-verbs/PID`
//! (`bindings/ibverbs/src/explain`). Anyone may take such a name, so the other end must run as this user or as root,
//! unless root queries; and its reply is bounded in size and time.

use std::io::{self, ErrorKind};
use std::time::Duration;

use super::super::local;
use super::document::{Answer, Document};
use crate::exit::CliError;

/// What the names of their sockets begin with.
const PREFIX: &str = "dquant-verbs/";

/// A process that can be queried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Endpoint {
    pub(super) pid: u32,
}

/// All processes of this network namespace that can be queried, in order.
pub(super) fn endpoints() -> Result<Vec<Endpoint>, CliError> {
    Ok(local::pids(PREFIX)?.into_iter().map(|pid| Endpoint { pid }).collect())
}

/// Whether it can no longer be queried. A process that is just ending may still be listed for a moment.
pub(super) fn is_gone(endpoint: Endpoint) -> Result<bool, CliError> {
    for _ in 0..20 {
        if !endpoints()?.contains(&endpoint) {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(false)
}

impl Endpoint {
    /// Its document for each open device.
    pub(super) fn ask(self) -> io::Result<Vec<Document>> {
        let text = local::fetch(&format!("{PREFIX}{}", self.pid))?;
        let answer: Answer = crate::input::heard(&text)
            .map_err(|error| io::Error::new(ErrorKind::InvalidData, error.to_string()))?;
        Ok(answer.documents())
    }
}

/// Whether there is no such process, as far as this one can see.
pub(super) fn has_ended(pid: u32) -> bool {
    // A zombie process exists but has nothing open any more.
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}
