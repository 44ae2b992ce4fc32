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
//! What [`Book::recover`] keeps to:
//!
//! - R1: the book equals that of the writer after the last whole record. Entries are applied in
//!   order of their index, terms never decrease, and what a snapshot covers is skipped.
//! - R2: an incomplete or damaged record at the end is a torn write of a batch that was never
//!   acknowledged: it is cut.
//! - R3: a damaged record with a whole one behind it is damage of what was acknowledged: nothing is
//!   recovered. The same holds for records of another version and for logs of other hosts. Each
//!   refusal says why.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use crate::demand::{Abstraction, Demand, Order};
use crate::job::Job;
use crate::ledger::{Admission, JobId, Ledger, Refusal};
use crate::loads::{Load, Loader, Piece};
use crate::network::Network;
use crate::outage::{Names, Outage};
use crate::placement::migration::Standing;
use crate::queues::Dscp;
use crate::repair::{Cause, Struck, strike};
use crate::runs::Run;
use crate::separation::is_name;
use crate::site::{Ground, Site};

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u16 = 3;

/// Most clients whose last answer is kept: those that asked last. One that repeats a request after
/// so many others asked is taken for new.
pub const MAX_CLIENTS: usize = 4096;

/// Most jobs that get their guarantee back when one is released.
pub const MAX_RESTORED: usize = 64;

/// Most bytes of the reason of a refusal that is kept.
const MAX_REASON_BYTES: usize = 256;

/// A book on a network alone has no names.
pub(crate) const NO_SITE: &str = "what is down is not known without a topology";

const HEADER_BYTES: usize = 12;
const BATCH: u16 = 0;
const SNAPSHOT: u16 = 1;

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

/// What an entry changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A leader begins its term, on hosts with that [fingerprint].
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

/// A job on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The job.
    pub job: JobId,
    /// That of its packets.
    pub dscp: Dscp,
    /// What it has there, in bit/s.
    pub bps: u64,
}

/// All that the log says: the ledger, its jobs, and the last answer to each client.
#[derive(Clone, Debug)]
pub struct Book {
    site: Option<Arc<Site>>,
    outage: Outage,
    /// Names of the last outage that the topology does not have.
    unknown: Vec<String>,
    ledger: Ledger,
    jobs: BTreeMap<JobId, Held>,
    names: BTreeMap<String, JobId>,
    /// By trunk: who has what on each of its links.
    on_trunk: Vec<Vec<Reserved>>,
    clients: BTreeMap<u64, Answered>,
    /// By the entry that recorded the last answer: the client.
    asked: BTreeMap<u64, u64>,
    next_index: u64,
    /// The last entry that changed who has what.
    changed_index: u64,
    term: u64,
}

/// What was found in a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Where the next record belongs: behind the last whole one.
    pub end: usize,
    /// Bytes of a torn write behind that.
    pub torn_bytes: usize,
    /// Whole records.
    pub records: usize,
}

/// Tells networks with other hosts or slots apart; placements name hosts by number.
pub fn fingerprint(network: &Network) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&network.slots().to_le_bytes());
    for host in 0..network.hosts() {
        let name = network.host_name(host).as_bytes();
        crc.update(&(name.len() as u32).to_le_bytes());
        crc.update(name);
    }
    crc.finalize()
}

impl Book {
    /// One in which nothing has happened.
    pub fn new(ground: impl Into<Ground>) -> Book {
        let Ground { network, site } = ground.into();
        Book {
            site,
            outage: Outage::none(),
            unknown: Vec::new(),
            on_trunk: alloc::vec![Vec::new(); network.trunks()],
            ledger: Ledger::new(network),
            jobs: BTreeMap::new(),
            names: BTreeMap::new(),
            clients: BTreeMap::new(),
            asked: BTreeMap::new(),
            next_index: 0,
            changed_index: 0,
            term: 0,
        }
    }

    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Admitted jobs, by their numbers.
    pub fn jobs(&self) -> &BTreeMap<JobId, Held> {
        &self.jobs
    }

    /// Jobs as migration and repair see them, by number.
    pub fn standings(&self) -> impl Iterator<Item = Standing<'_>> {
        self.jobs.iter().map(|(id, held)| Standing {
            id: *id,
            name: &held.label.name,
            job: &held.job,
            abstraction: held.abstraction,
            order: held.order,
            pieces: &held.pieces,
        })
    }

    /// The job with that name.
    pub fn job_named(&self, name: &str) -> Option<JobId> {
        self.names.get(name).copied()
    }

    /// Who has what on each link of a trunk, in the order of admission.
    pub fn on_trunk(&self, trunk: u32) -> &[Reserved] {
        &self.on_trunk[trunk as usize]
    }

    /// A DSCP that no job has where this one would be.
    ///
    /// # Errors
    /// When the place is impossible, or all are taken on its links.
    pub fn free_dscp(
        &mut self,
        demand: &Demand,
        slots_per_worker: u32,
        abstraction: Abstraction,
        pieces: &[Piece],
    ) -> Result<Dscp, String> {
        let loads = self.ledger.check(demand, slots_per_worker, abstraction, pieces);
        let loads = loads.map_err(|refusal| refusal.to_string())?;
        self.choose(self.taken(&loads, JobId::MAX), pieces)
    }

    /// The last answer to each client.
    pub fn clients(&self) -> &BTreeMap<u64, Answered> {
        &self.clients
    }

    /// The index of the next entry.
    pub fn next_index(&self) -> u64 {
        self.next_index
    }

    /// The last entry that changed who has what: a placement that was computed since then still
    /// fits.
    pub fn changed_index(&self) -> u64 {
        self.changed_index
    }

    /// The highest term so far.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Whether both say the same, the reservations of every link included.
    pub fn same_as(&self, other: &Book) -> bool {
        let trunks = 0..self.ledger.network().trunks() as u32;
        self.jobs == other.jobs
            && self.clients == other.clients
            && (self.next_index, self.term) == (other.next_index, other.term)
            && self.outage == other.outage
            && self.ledger.network().trunks() == other.ledger.network().trunks()
            && trunks
                .into_iter()
                .all(|t| self.ledger.reserved_bps(t) == other.ledger.reserved_bps(t))
    }

    /// Applies the next entry.
    ///
    /// # Errors
    /// When the term is lower than before, the hosts are others, or the ledger refuses; then
    /// nothing changes.
    pub fn apply(&mut self, term: u64, entry: &Entry) -> Result<Outcome, LogError> {
        if term < self.term {
            return Err(LogError::Term { found: term, before: self.term });
        }
        let index = self.next_index;
        let outcome = self.change(index, &entry.change)?;
        if entry.client != 0 {
            let outcome = outcome.clone();
            self.remember(entry.client, Answered { sequence: entry.sequence, index, outcome });
        }
        self.term = term;
        self.next_index += 1;
        Ok(outcome)
    }

    /// Keeps the last answer to a client, and forgets whoever asked longest ago where there are too
    /// many.
    fn remember(&mut self, client: u64, answered: Answered) {
        self.asked.insert(answered.index, client);
        if let Some(before) = self.clients.insert(client, answered) {
            self.asked.remove(&before.index);
        }
        if self.clients.len() > MAX_CLIENTS
            && let Some((_, oldest)) = self.asked.pop_first()
        {
            self.clients.remove(&oldest);
        }
    }

    fn change(&mut self, index: u64, change: &Change) -> Result<Outcome, LogError> {
        let refused = |reason: String| LogError::Refused { index, reason };
        match change {
            Change::Lead { hosts } if *hosts != fingerprint(self.ledger.network()) => {
                Err(LogError::OtherHosts)
            }
            Change::Lead { .. } => Ok(Outcome::Refused(String::new().into())),
            Change::Refuse(reason) => Ok(Outcome::Refused(reason.clone().into())),
            Change::Release { job, restored } => {
                self.release(*job).map_err(|refusal| refused(refusal.to_string()))?;
                self.changed_index = index;
                Ok(Outcome::Released { job: *job, restored: restored.clone() })
            }
            Change::Admit(held) => {
                self.hold(index, held)?;
                self.changed_index = index;
                Ok(Outcome::Admitted(index))
            }
            Change::Outage { down, moved, degraded } => {
                let (outage, unknown) = self.named(down).map_err(refused)?;
                let hit = self.strike(outage).map_err(refused)?;
                self.unknown = unknown;
                self.changed_index = index;
                Ok(Outcome::Repaired { hit, moved: *moved, degraded: *degraded })
            }
            Change::Moves { moved, degraded } => {
                Ok(Outcome::Repaired { hit: 0, moved: *moved, degraded: *degraded })
            }
            Change::Move(moved) => {
                self.relocate(moved).map_err(refused)?;
                self.changed_index = index;
                Ok(Outcome::Admitted(moved.job))
            }
            Change::Mark(job, dscp) => {
                self.mark(*job, *dscp).map_err(refused)?;
                self.changed_index = index;
                Ok(Outcome::Admitted(*job))
            }
            Change::Degrade(job) => {
                self.degrade(*job).map_err(refused)?;
                self.changed_index = index;
                Ok(Outcome::Admitted(*job))
            }
        }
    }

    /// What is down, and which names the topology does not have.
    fn named(&self, down: &Names) -> Result<(Outage, Vec<String>), String> {
        if down.is_empty() {
            return Ok((Outage::none(), Vec::new()));
        }
        let site = self.site.as_ref().ok_or(NO_SITE)?;
        Ok(Outage::named(&site.topology, down))
    }

    /// What is known to be down.
    pub fn outage(&self) -> &Outage {
        &self.outage
    }

    /// The names of what is known to be down.
    pub fn names_down(&self) -> Names {
        self.site.as_ref().map_or_else(Names::default, |site| self.outage.names(&site.topology))
    }

    /// What the log said last is down, and the topology does not have any more.
    pub fn unknown_parts(&self) -> &[String] {
        &self.unknown
    }

    /// What the network is made from.
    pub fn site(&self) -> Option<&Site> {
        self.site.as_deref()
    }

    /// Whether a job has lost its guarantee.
    pub fn is_degraded(&self, job: JobId) -> bool {
        self.ledger.admissions().get(&job).is_some_and(Admission::is_degraded)
    }

    /// Jobs that have lost their guarantee.
    pub fn degraded(&self) -> impl Iterator<Item = JobId> + '_ {
        let all = self.ledger.admissions().iter();
        all.filter(|(_, own)| own.is_degraded()).map(|(job, _)| *job)
    }

    /// The ledger with that down, and who is hit: jobs that were degraded before are among them.
    ///
    /// # Errors
    /// When there is no site, or no network is left.
    pub fn struck(&self, outage: &Outage) -> Result<Struck, String> {
        let site = self.site.as_ref().ok_or(NO_SITE)?;
        let network = site.network(outage).map_err(|error| error.to_string())?;
        let was_degraded = |standing: &Standing<'_>| self.is_degraded(standing.id);
        let intact: Vec<Standing<'_>> =
            self.standings().filter(|standing| !was_degraded(standing)).collect();
        let mut struck = strike(network, &intact).map_err(|refusal| refusal.to_string())?;
        for standing in self.standings().filter(was_degraded) {
            let slots = standing.job.slots_per_worker;
            let held = struck.ledger.hold(standing.id, slots, standing.pieces);
            held.map_err(|refusal| refusal.to_string())?;
            struck.hits.insert(standing.id, Cause::Place);
        }
        Ok(struck)
    }

    /// Puts something out of action, or back; how many jobs lost their guarantee by it.
    fn strike(&mut self, outage: Outage) -> Result<u32, String> {
        let struck = self.struck(&outage)?;
        let is_new = |job: &&JobId| !self.is_degraded(**job);
        let hit = struck.hits.keys().filter(is_new).count() as u32;
        (self.ledger, self.outage) = (struck.ledger, outage);
        self.lay_out();
        Ok(hit)
    }

    /// Notes anew who has what on which trunk.
    fn lay_out(&mut self) {
        self.on_trunk = alloc::vec![Vec::new(); self.ledger.network().trunks()];
        for (job, held) in &self.jobs {
            let loads = self.ledger.admissions().get(job).map_or(&[][..], |own| &own.loads);
            for load in loads {
                let own = Reserved { job: *job, dscp: held.dscp, bps: load.bps };
                self.on_trunk[load.trunk as usize].push(own);
            }
        }
    }

    fn relocate(&mut self, moved: &Moved) -> Result<(), String> {
        let Moved { job, dscp, order, pieces } = moved;
        let held = self.jobs.get(job).ok_or_else(|| alloc::format!("there is no job {job}"))?;
        let demand = Demand::in_order(&held.job.pattern, *order);
        let demand = demand.map_err(|error| error.to_string())?;
        let (slots, abstraction) = (held.job.slots_per_worker, held.abstraction);
        let before = self.ledger.admissions().get(job).map(|own| own.loads.clone());
        self.ledger
            .relocate(*job, &demand, slots, abstraction, pieces)
            .map_err(|refusal| refusal.to_string())?;
        self.leave_trunks(*job, before.as_deref().unwrap_or_default());
        for load in &self.ledger.admissions()[job].loads {
            let own = Reserved { job: *job, dscp: *dscp, bps: load.bps };
            self.on_trunk[load.trunk as usize].push(own);
        }
        if let Some(held) = self.jobs.get_mut(job) {
            (held.dscp, held.order, held.pieces) = (*dscp, *order, pieces.clone());
        }
        Ok(())
    }

    fn mark(&mut self, job: JobId, dscp: Dscp) -> Result<(), String> {
        let held =
            self.jobs.get_mut(&job).ok_or_else(|| alloc::format!("there is no job {job}"))?;
        held.dscp = dscp;
        let loads = self.ledger.admissions().get(&job).map_or(&[][..], |own| &own.loads);
        for load in loads {
            let here = self.on_trunk[load.trunk as usize].iter_mut();
            here.filter(|one| one.job == job).for_each(|one| one.dscp = dscp);
        }
        Ok(())
    }

    fn degrade(&mut self, job: JobId) -> Result<(), String> {
        let before = self.ledger.release(job).map_err(|refusal| refusal.to_string())?;
        self.ledger
            .hold(job, before.slots_per_worker(), &before.pieces)
            .map_err(|refusal| refusal.to_string())?;
        self.leave_trunks(job, &before.loads);
        Ok(())
    }

    fn leave_trunks(&mut self, job: JobId, loads: &[Load]) {
        for load in loads {
            self.on_trunk[load.trunk as usize].retain(|one| one.job != job);
        }
    }

    /// Jobs that meet another one with their DSCP on some link: of each pair the one that yields,
    /// or else the later one.
    pub fn clashes(&self, yields: impl Fn(JobId) -> bool) -> BTreeSet<JobId> {
        let mut clashing = BTreeSet::new();
        for here in &self.on_trunk {
            let mut first: BTreeMap<Dscp, JobId> = BTreeMap::new();
            let mut sorted: Vec<&Reserved> = here.iter().collect();
            sorted.sort_unstable_by_key(|one| (yields(one.job), one.job));
            for one in sorted {
                if *first.entry(one.dscp).or_insert(one.job) != one.job {
                    clashing.insert(one.job);
                }
            }
        }
        clashing
    }

    /// A DSCP that a job can have where it is: its own, if no other has it there.
    ///
    /// # Errors
    /// When all are taken.
    pub fn dscp_in_place(&self, job: JobId, wanted: Dscp) -> Result<Dscp, String> {
        let own = self.ledger.admissions().get(&job);
        let (loads, pieces) = own.map_or((&[][..], &[][..]), |own| (&own.loads, &own.pieces));
        self.dscp_on(loads, pieces, job, wanted)
    }

    /// The same for another place.
    ///
    /// # Errors
    /// When there is no such job, or all are taken there.
    pub fn dscp_elsewhere(
        &self,
        job: JobId,
        order: Order,
        pieces: &[Piece],
    ) -> Result<Dscp, String> {
        let held = self.jobs.get(&job).ok_or_else(|| alloc::format!("there is no job {job}"))?;
        let demand = Demand::in_order(&held.job.pattern, order);
        let demand = demand.map_err(|error| error.to_string())?;
        let mut loads = Vec::new();
        let network = self.ledger.network();
        Loader::new().loads(network, &demand, held.abstraction, pieces, &mut loads);
        self.dscp_on(&loads, pieces, job, held.dscp)
    }

    /// A DSCP other than this one that a job can have where it is.
    ///
    /// # Errors
    /// When all others are taken.
    pub fn dscp_besides(&self, job: JobId, unwanted: Dscp) -> Result<Dscp, String> {
        let own = self.ledger.admissions().get(&job);
        let (loads, pieces) = own.map_or((&[][..], &[][..]), |own| (&own.loads, &own.pieces));
        self.choose(self.taken(loads, job) | 1 << unwanted.value(), pieces)
    }

    fn dscp_on(
        &self,
        loads: &[Load],
        pieces: &[Piece],
        job: JobId,
        wanted: Dscp,
    ) -> Result<Dscp, String> {
        let taken = self.taken(loads, job);
        if taken & 1 << wanted.value() == 0 {
            return Ok(wanted);
        }
        self.choose(taken, pieces)
    }

    /// DSCPs that others than this job have on these trunks, as bits.
    fn taken(&self, loads: &[Load], job: JobId) -> u64 {
        let here = loads.iter().flat_map(|load| &self.on_trunk[load.trunk as usize]);
        here.filter(|one| one.job != job).fold(0, |bits, one| bits | 1 << one.dscp.value())
    }

    /// Whether a job has something reserved on a link: degraded jobs have not, nor those that send
    /// nothing beyond a host.
    fn is_on_links(&self, job: JobId) -> bool {
        self.ledger.admissions().get(&job).is_some_and(|own| !own.loads.is_empty())
    }

    /// DSCPs of jobs that have something reserved on a link.
    pub fn dscps_on_links(&self) -> BTreeSet<Dscp> {
        let jobs = self.jobs.iter().filter(|(job, _)| self.is_on_links(**job));
        jobs.map(|(_, held)| held.dscp).collect()
    }

    /// One that is not taken: if there is one, one that no job has anywhere, so that a job keeps
    /// its DSCP when paths change; or else none of a job on these hosts, whose senders know jobs by
    /// their DSCP alone; or else none of a job there that has something reserved. Which is tried
    /// first differs from entry to entry, so that packets of a job that has just ended are not
    /// taken for those of a new one.
    fn choose(&self, taken: u64, pieces: &[Piece]) -> Result<Dscp, String> {
        let hosts: BTreeSet<u32> = pieces.iter().map(|piece| piece.host).collect();
        let is_here = |held: &Held| held.pieces.iter().any(|piece| hosts.contains(&piece.host));
        let all: Vec<Dscp> = Dscp::all().collect();
        let first = (self.next_index % all.len() as u64) as usize;
        let free_beside = |is_avoided: &dyn Fn(JobId, &Held) -> bool| {
            let avoided = self.jobs.iter().filter(|(job, held)| is_avoided(**job, held));
            let bits = avoided.fold(taken, |bits, (_, held)| bits | 1 << held.dscp.value());
            let mut turned = all[first..].iter().chain(&all[..first]);
            turned.find(|dscp| bits & 1 << dscp.value() == 0).copied()
        };
        free_beside(&|_, _| true)
            .or_else(|| free_beside(&|_, held| is_here(held)))
            .or_else(|| free_beside(&|job, held| is_here(held) && self.is_on_links(job)))
            .or_else(|| free_beside(&|_, _| false))
            .ok_or_else(|| alloc::format!("all {} DSCPs are taken by jobs on its links", all.len()))
    }

    fn release(&mut self, job: JobId) -> Result<(), Refusal> {
        let loads = self.ledger.release(job)?.loads;
        self.leave_trunks(job, &loads);
        if let Some(held) = self.jobs.remove(&job) {
            self.names.remove(&held.label.name);
        }
        Ok(())
    }

    fn check_label(&self, job: JobId, held: &Held) -> Result<(), LogError> {
        let is_good = held.label.is_valid() && !self.names.contains_key(&held.label.name);
        is_good.then_some(()).ok_or(LogError::Name { index: job })
    }

    /// Takes a job that has its slots alone.
    fn keep(&mut self, job: JobId, held: Held) -> Result<(), LogError> {
        self.check_label(job, &held)?;
        self.ledger
            .hold(job, held.job.slots_per_worker, &held.pieces)
            .map_err(|refusal| LogError::Refused { index: job, reason: refusal.to_string() })?;
        self.names.insert(held.label.name.clone(), job);
        self.jobs.insert(job, held);
        Ok(())
    }

    fn hold(&mut self, job: JobId, held: &Held) -> Result<(), LogError> {
        let refused = |reason: String| LogError::Refused { index: job, reason };
        self.check_label(job, held)?;
        let demand = Demand::in_order(&held.job.pattern, held.order)
            .map_err(|error| refused(error.to_string()))?;
        let Held { abstraction, pieces, .. } = held;
        let slots = held.job.slots_per_worker;
        self.ledger
            .admit(job, &demand, slots, *abstraction, pieces)
            .map_err(|refusal| refused(refusal.to_string()))?;
        let loads = &self.ledger.admissions()[&job].loads;
        let own = |load: &Load| Reserved { job, dscp: held.dscp, bps: load.bps };
        let is_taken = |load: &Load| {
            self.on_trunk[load.trunk as usize].iter().any(|other| other.dscp == held.dscp)
        };
        if loads.iter().any(is_taken) {
            let _ = self.ledger.release(job);
            return Err(refused(alloc::format!("DSCP {} is taken on a link", held.dscp)));
        }
        loads.iter().for_each(|load| self.on_trunk[load.trunk as usize].push(own(load)));
        self.names.insert(held.label.name.clone(), job);
        self.jobs.insert(job, held.clone());
        Ok(())
    }

    /// The book that a snapshot, if there is one, and a log say.
    ///
    /// # Errors
    /// R3 of the module's text.
    pub fn recover(
        ground: impl Into<Ground>,
        snapshot: &[u8],
        log: &[u8],
    ) -> Result<(Book, Found), LogError> {
        let mut book = Book::new(ground);
        if !snapshot.is_empty() {
            book.restore(snapshot)?;
        }
        let mut found = Found::default();
        while found.end < log.len() {
            let at = found.end;
            let Some((header, body)) = whole(&log[at..]) else {
                let is_followed = (at + 1..log.len()).any(|later| whole(&log[later..]).is_some());
                if is_followed {
                    return Err(LogError::Damaged { at });
                }
                found.torn_bytes = log.len() - at;
                break;
            };
            header.check(at, BATCH)?;
            book.replay(at, body)?;
            found.end += HEADER_BYTES + body.len();
            found.records += 1;
        }
        Ok((book, found))
    }

    fn replay(&mut self, at: usize, body: &[u8]) -> Result<(), LogError> {
        let Batch { term, first, entries } = read_batch(body).ok_or(LogError::Malformed { at })?;
        let expected = self.next_index;
        let known = expected.checked_sub(first).ok_or(LogError::Gap { expected, found: first })?;
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        entries.iter().skip(known).try_for_each(|entry| self.apply(term, entry).map(drop))
    }

    fn restore(&mut self, snapshot: &[u8]) -> Result<(), LogError> {
        let (header, body) = whole(snapshot).ok_or(LogError::Snapshot)?;
        header.check(0, SNAPSHOT)?;
        let malformed = || LogError::Malformed { at: 0 };
        let mut reader = Reader { bytes: body };
        if reader.u32().ok_or_else(malformed)? != fingerprint(self.ledger.network()) {
            return Err(LogError::OtherHosts);
        }
        let [term, next_index, changed_index] = {
            let mut number = || reader.u64().ok_or_else(malformed);
            [number()?, number()?, number()?]
        };
        let down = reader.names().ok_or_else(malformed)?;
        let refused = |reason| LogError::Refused { index: next_index, reason };
        let (outage, unknown) = self.named(&down).map_err(refused)?;
        if !outage.is_empty() {
            self.strike(outage).map_err(refused)?;
        }
        self.unknown = unknown;
        for _ in 0..reader.u32().ok_or_else(malformed)? {
            let job = reader.u64().ok_or_else(malformed)?;
            let is_degraded = reader.u8().ok_or_else(malformed)? != 0;
            let held = reader.held().ok_or_else(malformed)?;
            if is_degraded {
                self.keep(job, held)?;
            } else {
                self.hold(job, &held)?;
            }
        }
        for _ in 0..reader.u32().ok_or_else(malformed)? {
            let client = reader.u64().ok_or_else(malformed)?;
            let answered = reader.answered().ok_or_else(malformed)?;
            self.remember(client, answered);
        }
        // No brain has so many entries, and the next index must not overflow.
        if !reader.bytes.is_empty() || next_index > u64::MAX / 2 {
            return Err(malformed());
        }
        (self.term, self.next_index, self.changed_index) = (term, next_index, changed_index);
        Ok(())
    }

    /// A snapshot of all entries so far.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut body = Vec::new();
        put_u32(&mut body, fingerprint(self.ledger.network()));
        put_u64(&mut body, self.term);
        put_u64(&mut body, self.next_index);
        put_u64(&mut body, self.changed_index);
        put_names(&mut body, &self.names_down());
        put_u32(&mut body, self.jobs.len() as u32);
        for (job, held) in &self.jobs {
            put_u64(&mut body, *job);
            body.push(u8::from(self.is_degraded(*job)));
            put_held(&mut body, held);
        }
        put_u32(&mut body, self.clients.len() as u32);
        for (client, answered) in &self.clients {
            put_u64(&mut body, *client);
            put_answered(&mut body, answered);
        }
        record(SNAPSHOT, &body)
    }
}

/// Entries that are written as one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The term of the leader that writes it.
    pub term: u64,
    /// The index of its first entry.
    pub first: u64,
    /// The entries.
    pub entries: Vec<Entry>,
}

impl Batch {
    /// Its record.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        put_u64(&mut body, self.term);
        put_u64(&mut body, self.first);
        put_u32(&mut body, self.entries.len() as u32);
        for entry in &self.entries {
            put_u64(&mut body, entry.client);
            put_u64(&mut body, entry.sequence);
            match &entry.change {
                Change::Lead { hosts } => {
                    body.push(0);
                    put_u32(&mut body, *hosts);
                }
                Change::Admit(held) => {
                    body.push(1);
                    put_held(&mut body, held);
                }
                Change::Release { job, restored } => {
                    body.push(2);
                    put_released(&mut body, *job, restored);
                }
                Change::Refuse(reason) => {
                    body.push(3);
                    put_text(&mut body, reason);
                }
                Change::Outage { down, moved, degraded } => {
                    body.push(4);
                    put_names(&mut body, down);
                    put_u32(&mut body, *moved);
                    put_u32(&mut body, *degraded);
                }
                Change::Move(moved) => {
                    body.push(5);
                    put_u64(&mut body, moved.job);
                    body.push(moved.dscp.value());
                    put_place(&mut body, moved.order, &moved.pieces);
                }
                Change::Moves { moved, degraded } => {
                    body.push(7);
                    put_u32(&mut body, *moved);
                    put_u32(&mut body, *degraded);
                }
                Change::Mark(job, dscp) => {
                    body.push(6);
                    put_u64(&mut body, *job);
                    body.push(dscp.value());
                }
                Change::Degrade(job) => {
                    body.push(8);
                    put_u64(&mut body, *job);
                }
            }
        }
        record(BATCH, &body)
    }
}

/// The batches of a log, up to the first record that is not whole: to look at, not to recover from.
pub fn batches(log: &[u8]) -> Vec<Batch> {
    let (mut batches, mut at) = (Vec::new(), 0);
    while let Some((_, body)) = whole(&log[at..]) {
        batches.extend(read_batch(body));
        at += HEADER_BYTES + body.len();
    }
    batches
}

struct Header {
    version: u16,
    kind: u16,
}

impl Header {
    fn check(&self, at: usize, kind: u16) -> Result<(), LogError> {
        match (self.version, self.kind) {
            (VERSION, own) if own == kind => Ok(()),
            (VERSION, _) => Err(LogError::Malformed { at }),
            (found, _) => Err(LogError::Version { at, found }),
        }
    }
}

fn record(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(HEADER_BYTES + body.len());
    put_u32(&mut record, body.len() as u32);
    record.extend_from_slice(&VERSION.to_le_bytes());
    record.extend_from_slice(&kind.to_le_bytes());
    let crc = checksum(&record, body);
    put_u32(&mut record, crc);
    record.extend_from_slice(body);
    record
}

fn checksum(head: &[u8], body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(head);
    crc.update(body);
    crc.finalize()
}

/// The first record of `bytes`, of any version, if it is whole and its CRC is right.
fn whole(bytes: &[u8]) -> Option<(Header, &[u8])> {
    let mut reader = Reader { bytes };
    let length = reader.u32()? as usize;
    let header = Header { version: reader.u16()?, kind: reader.u16()? };
    let crc = reader.u32()?;
    // No body is empty: bytes that are all 0 are no record.
    let body = reader.bytes.get(..length).filter(|body| !body.is_empty())?;
    (checksum(&bytes[..8], body) == crc).then_some((header, body))
}

fn read_batch(body: &[u8]) -> Option<Batch> {
    let mut reader = Reader { bytes: body };
    let (term, first) = (reader.u64()?, reader.u64()?);
    let entries = (0..reader.u32()?).map(|_| reader.entry()).collect::<Option<Vec<Entry>>>()?;
    reader.bytes.is_empty().then_some(Batch { term, first, entries })
}

fn put_u32(body: &mut Vec<u8>, value: u32) {
    body.extend_from_slice(&value.to_le_bytes());
}

fn put_u64(body: &mut Vec<u8>, value: u64) {
    body.extend_from_slice(&value.to_le_bytes());
}

fn put_text(body: &mut Vec<u8>, text: &str) {
    put_u32(body, text.len() as u32);
    body.extend_from_slice(text.as_bytes());
}

fn put_held(body: &mut Vec<u8>, held: &Held) {
    put_text(body, &held.label.name);
    put_text(body, &held.label.owner);
    body.push(held.dscp.value());
    put_text(body, &held.job.to_string());
    body.extend(
        Abstraction::ALL.iter().position(|one| *one == held.abstraction).map(|at| at as u8),
    );
    put_place(body, held.order, &held.pieces);
}

fn put_place(body: &mut Vec<u8>, order: Order, pieces: &[Piece]) {
    body.extend(ORDERS.iter().position(|one| *one == order).map(|at| at as u8));
    put_u32(body, pieces.len() as u32);
    for piece in pieces {
        put_u32(body, piece.host);
        put_u32(body, piece.run.first);
        put_u32(body, piece.run.end);
    }
}

/// In the number of nodes that are down: there is a list of carriers behind that of links.
const HAS_CARRIERS: u32 = 1 << 31;

fn put_names(body: &mut Vec<u8>, down: &Names) {
    let flag = if down.carriers.is_empty() { 0 } else { HAS_CARRIERS };
    put_u32(body, down.nodes.len() as u32 | flag);
    down.nodes.iter().for_each(|name| put_text(body, name));
    let mut put_links = |links: &[(String, u8)]| {
        put_u32(body, links.len() as u32);
        for (name, port) in links {
            put_text(body, name);
            body.push(*port);
        }
    };
    put_links(&down.links);
    if flag != 0 {
        put_links(&down.carriers);
    }
}

fn put_released(body: &mut Vec<u8>, job: JobId, restored: &[JobId]) {
    put_u64(body, job);
    put_u32(body, restored.len() as u32);
    restored.iter().for_each(|job| put_u64(body, *job));
}

fn put_answered(body: &mut Vec<u8>, answered: &Answered) {
    put_u64(body, answered.sequence);
    put_u64(body, answered.index);
    match &answered.outcome {
        Outcome::Admitted(job) => {
            body.push(0);
            put_u64(body, *job);
        }
        Outcome::Released { job, restored } => {
            body.push(1);
            put_released(body, *job, restored);
        }
        Outcome::Refused(refused) => {
            body.push(2);
            put_text(body, &refused.text);
        }
        Outcome::Repaired { hit, moved, degraded } => {
            body.push(3);
            [hit, moved, degraded].into_iter().for_each(|number| put_u32(body, *number));
        }
    }
}

/// Orders by the byte that stands for them.
const ORDERS: [Order; 4] = [Order::Ranks, Order::Across, Order::Mixed, Order::ServersFirst];

/// The beginning of a reason, of at most [`MAX_REASON_BYTES`].
pub(crate) fn shortened(mut reason: String) -> String {
    let ends = (0..=MAX_REASON_BYTES.min(reason.len())).rev();
    let end = ends.into_iter().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
    reason.truncate(end);
    reason
}

/// Takes values from the front; `None` where too few bytes are left or the value is impossible.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(length)?;
        self.bytes = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        core::str::from_utf8(self.take(length)?).ok()
    }

    fn held(&mut self) -> Option<Held> {
        let label = Label { name: self.text()?.to_string(), owner: self.text()?.to_string() };
        let dscp = Dscp::new(self.u8()?).ok()?;
        let job = self.text()?.parse().ok()?;
        let abstraction = *Abstraction::ALL.get(usize::from(self.u8()?))?;
        let (order, pieces) = self.place()?;
        Some(Held { label, dscp, job, abstraction, order, pieces })
    }

    fn place(&mut self) -> Option<(Order, Vec<Piece>)> {
        let order = *ORDERS.get(usize::from(self.u8()?))?;
        let piece = |reader: &mut Self| {
            let (host, first, end) = (reader.u32()?, reader.u32()?, reader.u32()?);
            Some(Piece { host, run: Run::new(first, end) })
        };
        let pieces = (0..self.u32()?).map(|_| piece(self)).collect::<Option<_>>()?;
        Some((order, pieces))
    }

    fn names(&mut self) -> Option<Names> {
        let node = |reader: &mut Self| Some(reader.text()?.to_string());
        let count = self.u32()?;
        let nodes = (0..count & !HAS_CARRIERS).map(|_| node(self)).collect::<Option<_>>()?;
        let links = self.links()?;
        let carriers = if count & HAS_CARRIERS == 0 { Vec::new() } else { self.links()? };
        Some(Names { nodes, links, carriers })
    }

    fn links(&mut self) -> Option<Vec<(String, u8)>> {
        let link = |reader: &mut Self| Some((reader.text()?.to_string(), reader.u8()?));
        (0..self.u32()?).map(|_| link(self)).collect()
    }

    fn released(&mut self) -> Option<(JobId, Vec<JobId>)> {
        let (job, count) = (self.u64()?, self.u32()? as usize);
        let restored = (0..count).map(|_| self.u64()).take(MAX_RESTORED + 1);
        let restored: Vec<JobId> = restored.collect::<Option<_>>()?;
        (restored.len() == count && count <= MAX_RESTORED).then_some((job, restored))
    }

    fn entry(&mut self) -> Option<Entry> {
        let (client, sequence) = (self.u64()?, self.u64()?);
        let change = match self.u8()? {
            0 => Change::Lead { hosts: self.u32()? },
            1 => Change::Admit(self.held()?),
            2 => {
                let (job, restored) = self.released()?;
                Change::Release { job, restored }
            }
            3 => Change::Refuse(self.text()?.to_string()),
            4 => {
                let down = self.names()?;
                Change::Outage { down, moved: self.u32()?, degraded: self.u32()? }
            }
            5 => {
                let (job, dscp) = (self.u64()?, Dscp::new(self.u8()?).ok()?);
                let (order, pieces) = self.place()?;
                Change::Move(Moved { job, dscp, order, pieces })
            }
            6 => Change::Mark(self.u64()?, Dscp::new(self.u8()?).ok()?),
            7 => Change::Moves { moved: self.u32()?, degraded: self.u32()? },
            8 => Change::Degrade(self.u64()?),
            _ => return None,
        };
        Some(Entry { client, sequence, change })
    }

    fn answered(&mut self) -> Option<Answered> {
        let (sequence, index) = (self.u64()?, self.u64()?);
        let outcome = match self.u8()? {
            0 => Outcome::Admitted(self.u64()?),
            1 => {
                let (job, restored) = self.released()?;
                Outcome::Released { job, restored }
            }
            2 => Outcome::Refused(self.text()?.to_string().into()),
            3 => Outcome::Repaired { hit: self.u32()?, moved: self.u32()?, degraded: self.u32()? },
            _ => return None,
        };
        Some(Answered { sequence, index, outcome })
    }
}
