//! What entries change, and what becomes of requests: plain values.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::demand::{Abstraction, Order};
use crate::job::Job;
use crate::ledger::JobId;
use crate::loads::Piece;
use crate::outage::Names;
use crate::queues::Dscp;
use crate::separation::is_name;

/// Most jobs that get their guarantee back when one is released.
pub const MAX_RESTORED: usize = 64;

/// Most bytes of the reason of a refusal that is kept.
const MAX_REASON_BYTES: usize = 256;

/// What an entry changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A leader begins its term, on hosts with that [fingerprint](super::fingerprint).
    Lead {
        /// The fingerprint.
        hosts: u32,
    },
    /// A job gets a place. Its number is the index of the entry.
    Admit(Held),
    /// A job gives its place back. Entries behind it say how degraded jobs get their guarantee
    /// there.
    Release {
        /// The job.
        job: JobId,
        /// These jobs have their guarantee again after that, for the answer: at most
        /// [`MAX_RESTORED`].
        restored: Vec<JobId>,
    },
    /// Nothing; the client got this answer, and gets it again if it repeats the request.
    Refuse(String),
    /// This is down, and nothing else. Who is hit follows from it; entries behind it say what is
    /// done about it. What the topology does not have is left out.
    Outage {
        /// Hosts, switches and links.
        down: Names,
        /// Workers that are moved by the entries behind it, for the answer.
        moved: u32,
        /// Jobs that are degraded after these, for the answer.
        degraded: u32,
    },
    /// Moves behind this one were asked for.
    Moves {
        /// Workers that are moved, for the answer.
        moved: u32,
        /// Jobs that are degraded after these, for the answer.
        degraded: u32,
    },
    /// A job gets another place, or its bandwidth back where it is.
    Move(Moved),
    /// A job gets another DSCP, since it meets one with its own.
    Mark(JobId, Dscp),
    /// A job loses its guarantee and keeps its slots: no DSCP is free on its links.
    Degrade(JobId),
}

/// A job's new place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The job.
    pub job: JobId,
    /// Its DSCP there.
    pub dscp: Dscp,
    /// In which order its workers are placed.
    pub order: Order,
    /// Where they are.
    pub pieces: Vec<Piece>,
}

/// What people call a job, and who submitted it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// Its name ([`is_name`]); no other running job has it.
    pub name: String,
    /// Who submitted it: such a name, with one `@` perhaps; may be empty.
    pub owner: String,
}

impl Label {
    /// Whether both can be.
    pub fn is_valid(&self) -> bool {
        // An owner may be nobody, and of some domain.
        let owner = self.owner.replacen('@', ".", 1);
        is_name(&self.name) && (owner.is_empty() || is_name(&owner))
    }
}

/// An admitted job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its name and owner.
    pub label: Label,
    /// That of its packets. On every link, jobs differ in it.
    pub dscp: Dscp,
    /// The job.
    pub job: Job,
    /// How its links are reserved.
    pub abstraction: Abstraction,
    /// In which order its workers are placed.
    pub order: Order,
    /// Where its workers are.
    pub pieces: Vec<Piece>,
}

/// A change, and the request that caused it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The client; 0 for a leader's own.
    pub client: u64,
    /// The client's number of the request, which grows.
    pub sequence: u64,
    /// What it changes.
    pub change: Change,
}

/// Why a request was refused, for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reason {
    /// Not known: it is one of those without a name here, or the answer comes from the log.
    #[default]
    Unsaid,
    /// A running job has the name.
    NameTaken,
    /// No job can have the name.
    BadName,
    /// To compute one placement of the job takes longer than a decision may.
    TooLarge,
    /// Slots, bandwidth or code points are missing.
    NoRoom,
    /// Jobs came or went since the placement that the request relies on.
    Changed,
    /// There is no such job.
    NoJob,
    /// The job is another owner's.
    NotOwner,
}

/// A refusal. The log keeps its words only, so two are the same that say the same.
#[derive(Clone, Debug, Eq)]
pub struct Refused {
    /// For programs.
    pub reason: Reason,
    /// For people.
    pub text: String,
}

impl Refused {
    /// One with a reason.
    pub fn new(reason: Reason, text: impl Into<String>) -> Refused {
        Refused { reason, text: text.into() }
    }
}

impl From<String> for Refused {
    fn from(text: String) -> Refused {
        Refused::new(Reason::Unsaid, text)
    }
}

impl PartialEq for Refused {
    fn eq(&self, other: &Refused) -> bool {
        self.text == other.text
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The job has this number.
    Admitted(JobId),
    /// The job is released.
    Released {
        /// The job.
        job: JobId,
        /// Jobs that have their guarantee again by that.
        restored: Vec<JobId>,
    },
    /// Why nothing changed.
    Refused(Refused),
    /// What went down or came back is known.
    Repaired {
        /// Jobs whose hosts were lost, or whose links carry less than they have reserved. Others
        /// may lose their guarantee for want of a DSCP.
        hit: u32,
        /// Workers that were moved.
        moved: u32,
        /// Jobs without their guarantee now.
        degraded: u32,
    },
}

/// A client's last request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Its number.
    pub sequence: u64,
    /// The entry that recorded it.
    pub index: u64,
    /// What became of it.
    pub outcome: Outcome,
}

/// The beginning of a reason, of at most [`MAX_REASON_BYTES`].
pub(crate) fn shortened(mut reason: String) -> String {
    let ends = (0..=MAX_REASON_BYTES.min(reason.len())).rev();
    let end = ends.into_iter().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
    reason.truncate(end);
    reason
}
