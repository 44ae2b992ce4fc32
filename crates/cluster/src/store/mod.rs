//! Where brains keep their lease and their log.
//!
//! All brains of a cluster share one store. The rules that make two brains harmless are the store's
//! to keep:
//!
//! - S1: at most one brain has the lease, and each taking of it has a higher *term* than all
//!   before.
//! - S2: once [`open`](Store::open) has succeeded, nothing that was sent under an earlier opening,
//!   of whatever brain, is ever written, however late it arrives.
//! - S3: what [`append`](Store::append) or [`snapshot`](Store::snapshot) confirmed is durable, and
//!   every later opening returns it. What they did not confirm is there as a whole or not at all.
//!
//! No rule rests on a clock of this machine.
//!
//! | module | what it holds |
//! |---|---|
//! | [`etcd`] | the store in etcd, for brains on several machines |
//! | [`mod@file`] | the store in one file, for the brains of one machine |
//! | `signed` | signatures of both, so that nobody is believed who writes there without the token |

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use parfait::brain::{Image, Lease, StorageError};
use thiserror::Error;

pub mod etcd;
pub mod file;
mod signed;

pub use signed::{Before, SignedLog};

/// What to do about a store that is not signed with the token.
pub const UNSIGNED_HINT: &str = "is it the right token, and has nobody else written there? `dquant brain sign-log` signs a log that you trust: of \
                                 versions that signed none, and after a change of the token";

/// A brain that wants to lead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number, drawn at random when it started; never 0.
    pub number: u64,
    /// Where clients and agents reach it, as `HOST:PORT`.
    pub address: String,
}

/// Who has the lease, and where it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number and term.
    pub lease: Lease,
    /// Where clients and agents reach it.
    pub address: String,
}

/// A brain's access to the store; see the module's text. Each brain has its own.
///
/// Calls may be made at the same time; those for the log are made one after another. After an error
/// of the log, it has to be opened again.
pub trait Store: Send + Sync + 'static {
    /// Takes the lease if it is free, keeps it if it is the candidate's, and says who has it.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer: whether the lease was taken is not known then.
    fn claim(
        &self,
        candidate: &Candidate,
    ) -> impl Future<Output = Result<Holder, StorageError>> + Send;

    /// Gives the lease back if it is the candidate's, so that another brain can take it at once.
    ///
    /// # Errors
    /// As [`claim`](Store::claim). The lease runs out by itself then.
    fn resign(
        &self,
        candidate: &Candidate,
    ) -> impl Future<Output = Result<(), StorageError>> + Send;

    /// Opens the log for the holder of the lease with that term, and shuts out every opening
    /// before. `opening` names it in later calls; it is higher than that of any opening before by
    /// this brain.
    ///
    /// # Errors
    /// `Fenced` when the lease is not of this term, or a higher opening came before.
    fn open(
        &self,
        term: u64,
        opening: u64,
    ) -> impl Future<Output = Result<Image, StorageError>> + Send;

    /// Writes a record behind the first `at` bytes of the log, durably; whatever was behind them is
    /// gone.
    ///
    /// # Errors
    /// `Fenced` when the log was opened again since, or the lease has another term; nothing is
    /// written then. `Unavailable` also when the log has fewer than `at` bytes.
    fn append(
        &self,
        opening: u64,
        at: u64,
        record: Vec<u8>,
    ) -> impl Future<Output = Result<(), StorageError>> + Send;

    /// Replaces the snapshot and empties the log, both or neither, durably.
    ///
    /// # Errors
    /// As [`append`](Store::append).
    fn snapshot(
        &self,
        opening: u64,
        snapshot: Vec<u8>,
    ) -> impl Future<Output = Result<(), StorageError>> + Send;

    /// What it has done, and what failed last.
    fn report(&self) -> Report;
}

/// What a store has done for its brain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How often.
    pub counters: Counters,
    /// Why the last call failed that did.
    pub last_failure: Option<String>,
}

/// How often a store has done what for its brain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Claims answered.
    pub claims: u64,
    /// Leases taken.
    pub leases_taken: u64,
    /// Openings of the log.
    pub openings: u64,
    /// Records written.
    pub appends: u64,
    /// Bytes of these.
    pub appended_bytes: u64,
    /// Snapshots written.
    pub snapshots: u64,
    /// Bytes of these.
    pub snapshot_bytes: u64,
    /// Requests sent again, to another member of the store.
    pub retries: u64,
    /// Calls refused since the log or the lease went to another.
    pub fenced: u64,
    /// Calls refused since what is stored has no signature of this cluster.
    pub unsigned: u64,
    /// Calls that failed for want of space.
    pub full: u64,
    /// Calls that failed otherwise.
    pub unavailable: u64,
}

/// Why a store cannot be used at all.
#[derive(Debug, Error)]
pub enum SetupError {
    /// Another version wrote the file.
    #[error(
        "{}: the file is of format {found}, and this is format {supported}: run the version that wrote it",
        path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The one that is read and written.
        supported: u64,
    },
    /// What is stored was not written by a brain of this cluster.
    #[error("{place}: {reason}")]
    Unsigned {
        /// The file, or etcd.
        place: String,
        /// What is not signed.
        reason: String,
    },
    /// A brain uses it, and it has to be stopped first.
    #[error("{place}: {reason}")]
    Busy {
        /// The file, or etcd.
        place: String,
        /// Who uses it.
        reason: String,
    },
    /// The file is something else, or damaged.
    #[error("{}: no file of a brain, or a damaged one: {reason}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file cannot be opened.
    #[error("{}: {reason}", path.display())]
    Unopened {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A member of etcd is not named as it has to be, or its certificates are no certificates.
    #[error("etcd at '{endpoint}': {reason}")]
    Endpoint {
        /// How it is named.
        endpoint: String,
        /// What is wrong.
        reason: String,
    },
}

/// Why a call failed, with the reason for people.
#[derive(Debug)]
struct Failure {
    error: StorageError,
    reason: String,
}

impl Failure {
    fn fenced(reason: impl Into<String>) -> Failure {
        Failure { error: StorageError::Fenced, reason: reason.into() }
    }

    fn unavailable(reason: impl Into<String>) -> Failure {
        Failure { error: StorageError::Unavailable, reason: reason.into() }
    }
}

/// Counts calls and keeps the reason of the last failure.
#[derive(Debug, Default)]
struct Tally(Mutex<Report>);

impl Tally {
    fn count(&self, count: impl FnOnce(&mut Counters)) {
        count(&mut lock(&self.0).counters);
    }

    /// The result of a call for its caller; if it succeeded, `count` counts it.
    fn record<T>(
        &self,
        result: Result<T, Failure>,
        count: impl FnOnce(&mut Counters),
    ) -> Result<T, StorageError> {
        let mut report = lock(&self.0);
        match result {
            Ok(value) => {
                count(&mut report.counters);
                Ok(value)
            }
            Err(Failure { error, reason }) => {
                match error {
                    StorageError::Fenced => report.counters.fenced += 1,
                    StorageError::Unsigned => report.counters.unsigned += 1,
                    StorageError::Full => report.counters.full += 1,
                    StorageError::Unavailable => report.counters.unavailable += 1,
                }
                report.last_failure = Some(reason);
                Err(error)
            }
        }
    }
}

/// What the lock guards is whole also after a panic: it is replaced, not changed in steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
