//! Finds the programs that reply, and queries one.
//!
//! Each verbs program with a device open listens at the abstract Unix socket `dquant-verbs/PID`
//! (`bindings/ibverbs/src/explain`). Anyone may take such a name, so the other end must run as this
//! user or as root, unless root queries; and its reply is bounded in size and time.

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

/// What one process replies.
pub(super) struct Reply {
    /// Its document for each open device.
    pub(super) documents: Vec<Document>,
    /// Where its number in this PID namespace is not the one by which it listens: what that means.
    pub(super) elsewhere: Option<String>,
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
    pub(super) fn ask(self) -> io::Result<Reply> {
        let (text, visible) = local::fetch(&format!("{PREFIX}{}", self.pid))?;
        let answer: Answer = service::json::heard(&text)
            .map_err(|error| io::Error::new(ErrorKind::InvalidData, error.to_string()))?;
        Ok(Reply { documents: answer.documents(), elsewhere: elsewhere(self.pid, visible) })
    }
}

/// What a reader has to know of a process that has another number here than in its own PID namespace, if so.
fn elsewhere(pid: u32, visible: Option<u32>) -> Option<String> {
    match visible {
        Some(visible) if visible == pid => None,
        Some(visible) => Some(format!(
            "process {pid} runs in another PID namespace: here its number is {visible}"
        )),
        None => Some(format!(
            "process {pid} is not visible in this PID namespace, as from one container to another: {pid} is its number in its own"
        )),
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

#[cfg(test)]
mod tests {
    use super::elsewhere;

    #[test]
    fn numbers_of_other_namespaces_are_named() {
        assert_eq!(elsewhere(7, Some(7)), None);
        let invisible = elsewhere(7, None).expect("something to say");
        assert!(
            invisible.contains("process 7 is not visible in this PID namespace"),
            "{invisible}"
        );
        let inner = elsewhere(7, Some(4711)).expect("something to say");
        assert!(inner.ends_with("here its number is 4711"), "{inner}");
    }
}
