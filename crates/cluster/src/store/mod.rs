//! Where brains keep their lease and their log.
//!
//! All brains of a cluster share one store. The rules that make two brains harmless are the store's to keep:
//!
//! - S1: at most one brain has the lease, and each taking of it has a higher *term* than all before.
//! - S2: once [`open`](Store::open) has succeeded, nothing that was sent under an earlier opening, of whatever brain, is
//!   ever written, however late it arrives.
//! - S3: what [`append`](Store::append) or [`snapshot`](Store::snapshot) confirmed is durable, and every later opening
//!   returns it. What they did not confirm is there as a whole or not at all.
//!
//! No rule rests on a clock of this machine.

use std::future::Future;

use parfait::brain::{Image, Lease, StorageError};

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

/// See the module's text. Calls may be made at the same time; those for the log are made one after another.
pub trait Store: Send + Sync + 'static {
    /// Takes the lease if it is free, keeps it if it is the candidate's, and says who has it.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer: whether the lease was taken is not known then.
    fn claim(
        &self,
        candidate: &Candidate,
    ) -> impl Future<Output = Result<Holder, StorageError>> + Send;

    /// Opens the log for the holder of the lease with that term, and shuts out every opening before. `opening` names it
    /// in later calls; one number is never used twice in a term.
    ///
    /// # Errors
    /// `Fenced` when the lease is not of this term.
    fn open(
        &self,
        term: u64,
        opening: u64,
    ) -> impl Future<Output = Result<Image, StorageError>> + Send;

    /// Writes a record behind the first `at` bytes of the log, durably; whatever was behind them is gone.
    ///
    /// # Errors
    /// `Fenced` when the log was opened again since, or the lease has another term; nothing is written then.
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

    /// Gives the lease back if it is the candidate's, so that another brain can take it at once.
    ///
    /// # Errors
    /// As [`claim`](Store::claim). The lease runs out by itself then.
    fn resign(
        &self,
        candidate: &Candidate,
    ) -> impl Future<Output = Result<(), StorageError>> + Send;
}
