//! Why a log is not recovered.

use alloc::string::String;

use thiserror::Error;

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u16 = 3;

/// Why a log is not recovered, or an entry not applied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LogError {
    /// Another version wrote it.
    #[error(
        "the record at byte {at} is of version {found}, and this is version {VERSION}: run the version that wrote it, or cancel \
         all jobs with that and begin a new log"
    )]
    Version {
        /// Where the record begins.
        at: usize,
        /// Its version.
        found: u16,
    },
    /// The store has found that no brain of this cluster wrote it so.
    #[error(
        "it is not signed with the token of this cluster: `dquant brain sign-log` signs a log, also after a change of the token"
    )]
    Unsigned,
    /// A record is damaged, and one behind it is not: this is no torn write.
    #[error(
        "the record at byte {at} is damaged, and a whole one follows: restore the log from a backup"
    )]
    Damaged {
        /// Where the record begins.
        at: usize,
    },
    /// The snapshot is damaged.
    #[error("the snapshot is damaged: restore it from a backup")]
    Snapshot,
    /// A record is whole, but nothing that this version writes.
    #[error("the body of the record at byte {at} is malformed")]
    Malformed {
        /// Where the record begins.
        at: usize,
    },
    /// Entries are missing between what was recovered and the record.
    #[error(
        "entry {found} follows where entry {expected} should: a part of the log, or its snapshot, is missing"
    )]
    Gap {
        /// The entry that should come.
        expected: u64,
        /// The one that comes.
        found: u64,
    },
    /// A term is lower than one before it.
    #[error("term {found} follows term {before}")]
    Term {
        /// The term.
        found: u64,
        /// The highest before it.
        before: u64,
    },
    /// A name that cannot be, or is that of another job.
    #[error("entry {index}: the name of the job cannot be, or is taken")]
    Name {
        /// The entry.
        index: u64,
    },
    /// The log is that of other hosts.
    #[error("the log belongs to other hosts or slots than the topology has")]
    OtherHosts,
    /// The ledger refuses what the log says was admitted, as when the topology lost capacity.
    #[error("entry {index}: {reason}")]
    Refused {
        /// The entry.
        index: u64,
        /// What the ledger says.
        reason: String,
    },
}
