//! The ledger of admissions as an append-only log with snapshots.
//!
//! A log is a sequence of records, each one batch of entries that is written and made durable as a
//! whole. A snapshot is one record of another kind that stands for all entries before it. Integers
//! are little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | length of the body |
//! | 4..6 | version of the format |
//! | 6..8 | kind: 0 a batch, 1 a snapshot |
//! | 8..12 | CRC-32 of bytes 0..8 and the body |
//! | 12.. | the body |
//!
//! | module | what it holds |
//! |---|---|
//! | `entry` | what entries change, and what becomes of requests |
//! | `error` | why a log is not recovered |
//! | `codec` | records, and the bytes of what they hold |
//! | `jobs` | admitted jobs and their names |
//! | `trunks` | who has what on each link, and which DSCPs are taken there |
//! | `clients` | the last answer to each client |
//! | `book` | all of these, changed by entries |
//!
//! What [`Book::recover`] keeps to:
//!
//! - R1: the book equals that of the writer after the last whole record. Entries are applied in
//!   order of their index, terms never decrease, and what a snapshot covers is skipped.
//! - R2: an incomplete or damaged record at the end is a torn write of a batch that was never
//!   acknowledged: it is cut.
//! - R3: a damaged record with a whole one behind it is damage of what was acknowledged: nothing is
//!   recovered. The same holds for records of another version and for logs of other hosts. Each
//!   refusal says why.

mod book;
mod clients;
mod codec;
mod entry;
mod error;
mod jobs;
mod trunks;

pub(crate) use book::NO_SITE;
pub use book::{Book, Found, fingerprint};
pub use clients::MAX_CLIENTS;
pub use codec::{Batch, batches};
pub(crate) use entry::shortened;
pub use entry::{
    Answered, Change, Entry, Held, Label, MAX_RESTORED, Moved, Outcome, Reason, Refused,
};
pub use error::{LogError, VERSION};
pub use trunks::Reserved;
