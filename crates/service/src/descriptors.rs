//! A lack of file descriptors, recognised among the causes of an error, and what helps against it.
//!
//! Daemons and clients fail with it at many calls; the cause decides the hint, not the call.

use std::error::Error as Cause;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What helps against a lack of descriptors. No other hint replaces it.
pub const DESCRIPTORS_HINT: &str = "raise the open-file limit of the process that reports this: `ulimit -n`, or LimitNOFILE= of its service";

/// Raises the soft limit of open files of this process to the hard one, if `more` descriptors could
/// exceed it: the usual soft limit is 1,024. Without room the call that lacks a descriptor reports
/// it.
pub fn make_room(more: usize) {
    let limit = getrlimit(Resource::Nofile);
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    if limit.current.is_some_and(|current| open + 2 * more as u64 > current) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Whether the system refused for lack of descriptors: `cause`, or what caused it.
pub fn lacks_descriptors(cause: &(dyn Cause + 'static)) -> bool {
    let code = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    let errno = code.map(Errno::from_raw_os_error).or(cause.downcast_ref().copied());
    errno == Some(Errno::MFILE) || cause.source().is_some_and(lacks_descriptors)
}
