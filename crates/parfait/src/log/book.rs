//! The book: all that a log says, changed by its entries. Its parts check what concerns them alone;
//! what holds between them, and with the ledger, is checked here.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::clients::Clients;
use super::codec::{BATCH, Batch, HEADER_BYTES, SNAPSHOT, Wire, all_of, record, whole};
use super::entry::{Answered, Change, Entry, Held, Moved, Outcome};
use super::error::LogError;
use super::jobs::Jobs;
use super::trunks::{Reserved, Trunks};
use crate::demand::{Abstraction, Demand, Order};
use crate::ledger::{Admission, JobId, Ledger, Refusal};
use crate::loads::{Load, Loader, Piece};
use crate::network::Network;
use crate::outage::{Names, Outage};
use crate::placement::migration::Standing;
use crate::queues::Dscp;
use crate::repair::{Cause, Struck, strike};
use crate::site::{Ground, Site};

/// A book on a network alone has no names.
pub(crate) const NO_SITE: &str = "what is down is not known without a topology";

/// All that the log says: the ledger, its jobs, and the last answer to each client.
#[derive(Clone, Debug)]
pub struct Book {
    site: Option<Arc<Site>>,
    outage: Outage,
    /// Names of the last outage that the topology does not have.
    unknown: Vec<String>,
    ledger: Ledger,
    jobs: Jobs,
    trunks: Trunks,
    clients: Clients,
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
            trunks: Trunks::new(network.trunks()),
            ledger: Ledger::new(network),
            jobs: Jobs::default(),
            clients: Clients::default(),
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
        &self.jobs.held
    }

    /// Jobs as migration and repair see them, by number.
    pub fn standings(&self) -> impl Iterator<Item = Standing<'_>> {
        self.jobs.held.iter().map(|(id, held)| Standing {
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
        self.jobs.named(name)
    }

    /// Who has what on each link of a trunk, in the order of admission.
    pub fn on_trunk(&self, trunk: u32) -> &[Reserved] {
        self.trunks.on(trunk)
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
        let loads =
            self.ledger.check(demand, slots_per_worker, abstraction, pieces).map_err(text)?;
        self.choose(self.trunks.taken(&loads, JobId::MAX), pieces)
    }

    /// The last answer to each client.
    pub fn clients(&self) -> &BTreeMap<u64, Answered> {
        &self.clients.answers
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
        self.jobs.held == other.jobs.held
            && self.clients.answers == other.clients.answers
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
            let answered = Answered { sequence: entry.sequence, index, outcome };
            self.clients.remember(entry.client, answered);
        }
        self.term = term;
        self.next_index += 1;
        Ok(outcome)
    }

    fn change(&mut self, index: u64, change: &Change) -> Result<Outcome, LogError> {
        let refused = |reason: String| LogError::Refused { index, reason };
        let outcome = match change {
            Change::Lead { hosts } if *hosts != fingerprint(self.ledger.network()) => {
                return Err(LogError::OtherHosts);
            }
            Change::Lead { .. } => return Ok(Outcome::Refused(String::new().into())),
            Change::Refuse(reason) => return Ok(Outcome::Refused(reason.clone().into())),
            Change::Moves { moved, degraded } => {
                return Ok(Outcome::Repaired { hit: 0, moved: *moved, degraded: *degraded });
            }
            Change::Release { job, restored } => {
                self.release(*job).map_err(text).map_err(refused)?;
                Outcome::Released { job: *job, restored: restored.clone() }
            }
            Change::Admit(held) => {
                self.hold(index, held)?;
                Outcome::Admitted(index)
            }
            Change::Outage { down, moved, degraded } => {
                let hit = self.strike(down).map_err(refused)?;
                Outcome::Repaired { hit, moved: *moved, degraded: *degraded }
            }
            Change::Move(moved) => {
                self.relocate(moved).map(|()| Outcome::Admitted(moved.job)).map_err(refused)?
            }
            Change::Mark(job, dscp) => {
                self.mark(*job, *dscp).map(|()| Outcome::Admitted(*job)).map_err(refused)?
            }
            Change::Degrade(job) => {
                self.degrade(*job).map(|()| Outcome::Admitted(*job)).map_err(refused)?
            }
        };
        self.changed_index = index;
        Ok(outcome)
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
        let network = site.network(outage).map_err(text)?;
        let was_degraded = |standing: &Standing<'_>| self.is_degraded(standing.id);
        let intact: Vec<Standing<'_>> =
            self.standings().filter(|standing| !was_degraded(standing)).collect();
        let mut struck = strike(network, &intact).map_err(text)?;
        for standing in self.standings().filter(was_degraded) {
            let slots = standing.job.slots_per_worker;
            let held = struck.ledger.hold(standing.id, slots, standing.pieces);
            held.map_err(text)?;
            struck.hits.insert(standing.id, Cause::Place);
        }
        Ok(struck)
    }

    /// Takes this for what is down; how many jobs lost their guarantee by it.
    fn strike(&mut self, down: &Names) -> Result<u32, String> {
        let (outage, unknown) = self.named(down)?;
        let struck = self.struck(&outage)?;
        let is_new = |job: &&JobId| !self.is_degraded(**job);
        let hit = struck.hits.keys().filter(is_new).count() as u32;
        (self.ledger, self.outage, self.unknown) = (struck.ledger, outage, unknown);
        self.trunks = Trunks::new(self.ledger.network().trunks());
        for (job, held) in &self.jobs.held {
            self.trunks.add(*job, held.dscp, loads_of(&self.ledger, *job));
        }
        Ok(hit)
    }

    fn relocate(&mut self, moved: &Moved) -> Result<(), String> {
        let Moved { job, dscp, order, pieces } = moved;
        let held = self.jobs.get_mut(*job)?;
        let demand = Demand::in_order(&held.job.pattern, *order).map_err(text)?;
        let (slots, abstraction) = (held.job.slots_per_worker, held.abstraction);
        let before = loads_of(&self.ledger, *job).to_vec();
        self.ledger.relocate(*job, &demand, slots, abstraction, pieces).map_err(text)?;
        self.trunks.remove(*job, &before);
        self.trunks.add(*job, *dscp, loads_of(&self.ledger, *job));
        (held.dscp, held.order, held.pieces) = (*dscp, *order, pieces.clone());
        Ok(())
    }

    fn mark(&mut self, job: JobId, dscp: Dscp) -> Result<(), String> {
        self.jobs.get_mut(job)?.dscp = dscp;
        self.trunks.mark(job, dscp, loads_of(&self.ledger, job));
        Ok(())
    }

    fn degrade(&mut self, job: JobId) -> Result<(), String> {
        let before = self.ledger.release(job).map_err(text)?;
        self.ledger.hold(job, before.slots_per_worker(), &before.pieces).map_err(text)?;
        self.trunks.remove(job, &before.loads);
        Ok(())
    }

    /// Jobs that meet another one with their DSCP on some link: of each pair the one that yields,
    /// or else the later one.
    pub fn clashes(&self, yields: impl Fn(JobId) -> bool) -> BTreeSet<JobId> {
        self.trunks.clashes(yields)
    }

    /// A DSCP that a job can have where it is: its own, if no other has it there.
    ///
    /// # Errors
    /// When all are taken.
    pub fn dscp_in_place(&self, job: JobId, wanted: Dscp) -> Result<Dscp, String> {
        let own = self.ledger.admissions().get(&job);
        let pieces = own.map_or(&[][..], |own| &own.pieces);
        self.dscp_on(loads_of(&self.ledger, job), pieces, job, wanted)
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
        let held = self.jobs.get(job)?;
        let demand = Demand::in_order(&held.job.pattern, order).map_err(text)?;
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
        let pieces = own.map_or(&[][..], |own| &own.pieces);
        let taken = self.trunks.taken(loads_of(&self.ledger, job), job);
        self.choose(taken | 1 << unwanted.value(), pieces)
    }

    fn dscp_on(
        &self,
        loads: &[Load],
        pieces: &[Piece],
        job: JobId,
        wanted: Dscp,
    ) -> Result<Dscp, String> {
        let taken = self.trunks.taken(loads, job);
        if taken & 1 << wanted.value() == 0 {
            return Ok(wanted);
        }
        self.choose(taken, pieces)
    }

    /// Whether a job has something reserved on a link: degraded jobs have not, nor those that send
    /// nothing beyond a host.
    fn is_on_links(&self, job: JobId) -> bool {
        !loads_of(&self.ledger, job).is_empty()
    }

    /// DSCPs of jobs that have something reserved on a link.
    pub fn dscps_on_links(&self) -> BTreeSet<Dscp> {
        let jobs = self.jobs.held.iter().filter(|(job, _)| self.is_on_links(**job));
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
            let avoided = self.jobs.held.iter().filter(|(job, held)| is_avoided(**job, held));
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
        self.trunks.remove(job, &loads);
        self.jobs.remove(job);
        Ok(())
    }

    /// Takes a job that has its slots alone.
    fn keep(&mut self, job: JobId, held: Held) -> Result<(), LogError> {
        if !self.jobs.has_room_for(&held) {
            return Err(LogError::Name { index: job });
        }
        self.ledger
            .hold(job, held.job.slots_per_worker, &held.pieces)
            .map_err(|refusal| LogError::Refused { index: job, reason: text(refusal) })?;
        self.jobs.insert(job, held);
        Ok(())
    }

    fn hold(&mut self, job: JobId, held: &Held) -> Result<(), LogError> {
        let refused = |reason: String| LogError::Refused { index: job, reason };
        if !self.jobs.has_room_for(held) {
            return Err(LogError::Name { index: job });
        }
        let demand =
            Demand::in_order(&held.job.pattern, held.order).map_err(text).map_err(refused)?;
        let Held { abstraction, pieces, dscp, .. } = held;
        let slots = held.job.slots_per_worker;
        self.ledger
            .admit(job, &demand, slots, *abstraction, pieces)
            .map_err(text)
            .map_err(refused)?;
        let loads = loads_of(&self.ledger, job);
        if self.trunks.taken(loads, job) & 1 << dscp.value() != 0 {
            let _ = self.ledger.release(job);
            return Err(refused(alloc::format!("DSCP {dscp} is taken on a link")));
        }
        self.trunks.add(job, *dscp, loads);
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
        let Batch { term, first, entries } = all_of(body).ok_or(LogError::Malformed { at })?;
        let expected = self.next_index;
        let known = expected.checked_sub(first).ok_or(LogError::Gap { expected, found: first })?;
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        entries.iter().skip(known).try_for_each(|entry| self.apply(term, entry).map(drop))
    }

    fn restore(&mut self, snapshot: &[u8]) -> Result<(), LogError> {
        let (header, body) = whole(snapshot).ok_or(LogError::Snapshot)?;
        header.check(0, SNAPSHOT)?;
        let mut bytes = body;
        let bytes = &mut bytes;
        if get::<u32>(bytes)? != fingerprint(self.ledger.network()) {
            return Err(LogError::OtherHosts);
        }
        let (term, (next_index, changed_index)) = get(bytes)?;
        let down: Names = get(bytes)?;
        let refused = |reason| LogError::Refused { index: next_index, reason };
        if !down.is_empty() {
            self.strike(&down).map_err(refused)?;
        }
        for _ in 0..get::<u32>(bytes)? {
            let (job, (is_degraded, held)) = get(bytes)?;
            if is_degraded {
                self.keep(job, held)?;
            } else {
                self.hold(job, &held)?;
            }
        }
        for _ in 0..get::<u32>(bytes)? {
            let (client, answered) = get(bytes)?;
            self.clients.remember(client, answered);
        }
        // No brain has so many entries, and the next index must not overflow.
        if !bytes.is_empty() || next_index > u64::MAX / 2 {
            return Err(LogError::Malformed { at: 0 });
        }
        (self.term, self.next_index, self.changed_index) = (term, next_index, changed_index);
        Ok(())
    }

    /// A snapshot of all entries so far.
    pub fn snapshot(&self) -> Vec<u8> {
        let body = &mut Vec::new();
        fingerprint(self.ledger.network()).put(body);
        [self.term, self.next_index, self.changed_index].iter().for_each(|one| one.put(body));
        self.names_down().put(body);
        (self.jobs.held.len() as u32).put(body);
        for (job, held) in &self.jobs.held {
            job.put(body);
            self.is_degraded(*job).put(body);
            held.put(body);
        }
        (self.clients.answers.len() as u32).put(body);
        for (client, answered) in &self.clients.answers {
            client.put(body);
            answered.put(body);
        }
        record(SNAPSHOT, body)
    }
}

/// What a job has reserved on links.
fn loads_of(ledger: &Ledger, job: JobId) -> &[Load] {
    ledger.admissions().get(&job).map_or(&[], |own| &own.loads)
}

fn text<E: ToString>(error: E) -> String {
    error.to_string()
}

/// The next value of a snapshot.
fn get<T: Wire>(bytes: &mut &[u8]) -> Result<T, LogError> {
    T::get(bytes).ok_or(LogError::Malformed { at: 0 })
}
