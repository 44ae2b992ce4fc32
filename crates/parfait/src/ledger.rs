//! Who holds which slots and how much of each link.
//!
//! What the ledger keeps to, after every call:
//!
//! - L1: on each directed link, what is reserved is at most what may be.
//! - L2: what is reserved is the sum of what its jobs and reservations hold, and each of these
//!   holds what its demand and its placement say.
//! - L3: once everything is released, nothing is reserved and all slots are free.
//!
//! [`Ledger::audit`] computes all of that anew. A call that is refused changes nothing.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use crate::demand::{Abstraction, Demand};
use crate::loads::{Load, Loader, Piece};
use crate::network::Network;
use crate::runs::Run;
use crate::spread::DirectedLink;

/// A job or a reservation, by the number that its owner gave it.
pub type JobId = u64;

/// Why something is not admitted, or not there to be released.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The number is taken.
    #[error("there is a job {0} already")]
    Duplicate(JobId),
    /// The number is not taken.
    #[error("there is no job {0}")]
    Unknown(JobId),
    /// The placement names a host that is not there.
    #[error("there is no host {host}; there are {hosts}")]
    NoHost {
        /// Its number.
        host: u32,
        /// How many there are.
        hosts: u32,
    },
    /// The link is not there, or nothing is routed over it.
    #[error("there is no directed link {0}, or nothing is routed over it")]
    NoLink(DirectedLink),
    /// The runs of the placement are not the workers of the job.
    #[error(
        "the placement has not each of {workers} workers once: rank {rank} is missing, twice there, or too large"
    )]
    WrongWorkers {
        /// Workers of the job.
        workers: u32,
        /// The first rank that is wrong.
        rank: u32,
    },
    /// A host has too few free slots.
    #[error("host '{host}' has {free} free slots, and {needed} are needed: {} are missing", needed - free)]
    Slots {
        /// The host.
        host: String,
        /// Needed there.
        needed: u32,
        /// Free there.
        free: u32,
    },
    /// All hosts together have too few free slots.
    #[error("all hosts together have {free} free slots, and {needed} are needed")]
    AllSlots {
        /// Needed.
        needed: u64,
        /// Free.
        free: u64,
    },
    /// Free slots are scattered: single hosts have too few for more workers.
    #[error(
        "{workers} workers of {slots_per_worker} slots each: free slots of single hosts hold {held}"
    )]
    Scattered {
        /// Workers of the job.
        workers: u32,
        /// Slots that each takes.
        slots_per_worker: u32,
        /// Workers that hosts hold together.
        held: u64,
    },
    /// Hosts have too little room where workers are kept apart from each other or from other jobs.
    #[error(
        "{workers} workers are to be placed with '{separation}' and {avoided} hosts left out: other hosts hold {held}"
    )]
    Separated {
        /// Workers of the job.
        workers: u32,
        /// Workers that hosts may have together.
        held: u64,
        /// What the job asks for.
        separation: String,
        /// Hosts that it must not have.
        avoided: usize,
    },
    /// To compute one placement takes longer than a decision may.
    #[error(
        "{workers} workers are too many for a network of this kind: to compute one placement of them takes too long"
    )]
    TooLarge {
        /// Workers of the job.
        workers: u32,
    },
    /// The way to place found nothing, although the closest hosts would hold the job.
    #[error(
        "no hosts were found, although some hold it: try another way to place, or more iterations"
    )]
    NotFound,
    /// A link carries too much already.
    #[error(
        "the link from '{from}' to '{to}' has {free_bps} bit/s left, and {needed_bps} are needed: {} are missing",
        needed_bps - free_bps
    )]
    Bandwidth {
        /// The sending end.
        from: String,
        /// The receiving end.
        to: String,
        /// What the job would reserve there.
        needed_bps: u64,
        /// What may still be reserved.
        free_bps: u64,
    },
}

/// What a job holds.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Its workers; none for a reservation of links.
    pub pieces: Vec<Piece>,
    /// What it reserves.
    pub loads: Vec<Load>,
    slots_per_worker: u32,
    /// What the loads follow from; none for a reservation of links, or a degraded job.
    basis: Option<(Demand, Abstraction)>,
}

impl Admission {
    /// Slots that each worker has.
    pub fn slots_per_worker(&self) -> u32 {
        self.slots_per_worker
    }

    /// Whether it is a job that has slots, but whose bandwidth is not reserved: see
    /// [`Ledger::hold`].
    pub fn is_degraded(&self) -> bool {
        !self.pieces.is_empty() && self.basis.is_none()
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Ledger {
    network: Network,
    /// By group: free slots of all its hosts.
    free_slots: Vec<u64>,
    /// By trunk: reserved on each of its links.
    reserved_bps: Vec<u64>,
    admissions: BTreeMap<JobId, Admission>,
    loader: Loader,
}

impl Ledger {
    /// One in which everything is free.
    pub fn new(network: Network) -> Ledger {
        let groups = 0..network.groups().len() as u32;
        Ledger {
            free_slots: groups.map(|group| network.slots_of(group)).collect(),
            reserved_bps: alloc::vec![0; network.trunks()],
            admissions: BTreeMap::new(),
            loader: Loader::new(),
            network,
        }
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Free slots of all hosts of a group.
    pub fn free_slots(&self, group: u32) -> u64 {
        self.free_slots[group as usize]
    }

    /// Bits per second reserved on each link of a trunk.
    pub fn reserved_bps(&self, trunk: u32) -> u64 {
        self.reserved_bps[trunk as usize]
    }

    /// Bits per second that may still be reserved on each link of a trunk.
    pub fn free_bps(&self, trunk: u32) -> u64 {
        self.network.capacity_bps(trunk) - self.reserved_bps(trunk)
    }

    /// Jobs and reservations, by their numbers.
    pub fn admissions(&self) -> &BTreeMap<JobId, Admission> {
        &self.admissions
    }

    /// What a job would reserve at a place.
    ///
    /// # Errors
    /// When the place is impossible, or a host or link has too little left: the one that lacks
    /// most.
    pub fn check(
        &mut self,
        demand: &Demand,
        slots_per_worker: u32,
        abstraction: Abstraction,
        pieces: &[Piece],
    ) -> Result<Vec<Load>, Refusal> {
        self.check_workers(demand.workers(), pieces)?;
        self.check_slots(slots_per_worker, pieces)?;
        let mut loads = Vec::new();
        self.loader.loads(&self.network, demand, abstraction, pieces, &mut loads);
        self.check_loads(&loads)?;
        Ok(loads)
    }

    /// Each worker is placed once, on a host that is there.
    fn check_workers(&self, workers: u32, pieces: &[Piece]) -> Result<(), Refusal> {
        let hosts = self.network.hosts();
        if let Some(piece) = pieces.iter().find(|piece| piece.host >= hosts) {
            return Err(Refusal::NoHost { host: piece.host, hosts });
        }
        let mut runs: Vec<Run> = pieces.iter().map(|piece| piece.run).collect();
        runs.sort_unstable();
        let mut next = 0;
        for run in runs {
            if run.first != next || run.is_empty() {
                return Err(Refusal::WrongWorkers { workers, rank: next.min(run.first) });
            }
            next = run.end;
        }
        let is_whole = next == workers;
        is_whole.then_some(()).ok_or(Refusal::WrongWorkers { workers, rank: next.min(workers) })
    }

    fn check_slots(&self, slots_per_worker: u32, pieces: &[Piece]) -> Result<(), Refusal> {
        let mut pieces = pieces.to_vec();
        pieces.sort_unstable();
        for pieces in pieces.chunk_by(|a, b| a.host == b.host) {
            let workers: u32 = pieces.iter().map(|piece| piece.run.len()).sum();
            let needed = workers.saturating_mul(slots_per_worker);
            let free = self.free_slots[pieces[0].host as usize] as u32;
            if needed > free {
                let host = self.network.host_name(pieces[0].host).to_string();
                return Err(Refusal::Slots { host, needed, free });
            }
        }
        Ok(())
    }

    fn check_loads(&self, loads: &[Load]) -> Result<(), Refusal> {
        let missing = |load: &Load| load.bps.saturating_sub(self.free_bps(load.trunk));
        let Some(worst) = loads.iter().rev().max_by_key(|load| missing(load)) else {
            return Ok(());
        };
        if missing(worst) == 0 { Ok(()) } else { Err(self.shortage(*worst)) }
    }

    /// The refusal of a load that does not fit.
    pub(crate) fn shortage(&self, load: Load) -> Refusal {
        let (from, to) = self.network.ends_of(load.trunk);
        Refusal::Bandwidth {
            from: from.to_string(),
            to: to.to_string(),
            needed_bps: load.bps,
            free_bps: self.free_bps(load.trunk),
        }
    }

    /// Admits a job at a place.
    ///
    /// # Errors
    /// When the number is taken, the place is impossible, or a host or link has too little left.
    pub fn admit(
        &mut self,
        id: JobId,
        demand: &Demand,
        slots_per_worker: u32,
        abstraction: Abstraction,
        pieces: &[Piece],
    ) -> Result<(), Refusal> {
        if self.admissions.contains_key(&id) {
            return Err(Refusal::Duplicate(id));
        }
        let loads = self.check(demand, slots_per_worker, abstraction, pieces)?;
        let basis = Some((demand.clone(), abstraction));
        self.take(id, Admission { pieces: pieces.to_vec(), loads, slots_per_worker, basis });
        Ok(())
    }

    /// Keeps the slots of a job whose bandwidth cannot be reserved: it is *degraded*. On hosts that
    /// are lost it has none.
    ///
    /// # Errors
    /// When the number is taken, or a host is not there or has too few free slots.
    pub fn hold(
        &mut self,
        id: JobId,
        slots_per_worker: u32,
        pieces: &[Piece],
    ) -> Result<(), Refusal> {
        if self.admissions.contains_key(&id) {
            return Err(Refusal::Duplicate(id));
        }
        let hosts = self.network.hosts();
        if let Some(piece) = pieces.iter().find(|piece| piece.host >= hosts) {
            return Err(Refusal::NoHost { host: piece.host, hosts });
        }
        let on_lost = |piece: &&Piece| self.network.is_lost(piece.host);
        let held: Vec<Piece> = pieces.iter().filter(|piece| !on_lost(piece)).copied().collect();
        self.check_slots(slots_per_worker, &held)?;
        let (pieces, loads) = (pieces.to_vec(), Vec::new());
        self.take(id, Admission { pieces, loads, slots_per_worker, basis: None });
        Ok(())
    }

    /// Moves a job to another place, or reserves its bandwidth anew at the one that it has.
    ///
    /// # Errors
    /// As of [`admit`](Ledger::admit), or when there is no such job; it keeps what it had.
    pub fn relocate(
        &mut self,
        id: JobId,
        demand: &Demand,
        slots_per_worker: u32,
        abstraction: Abstraction,
        pieces: &[Piece],
    ) -> Result<(), Refusal> {
        let before = self.release(id)?;
        let moved = self.admit(id, demand, slots_per_worker, abstraction, pieces);
        if moved.is_err() {
            self.take(id, before);
        }
        moved
    }

    /// Reserves bits per second on directed links for something that is no job. Links that carry
    /// even parts of the same traffic are reserved alike: each as much as the one of them that is
    /// to have most.
    ///
    /// # Errors
    /// When the number is taken, a link is not there, or one has too little left.
    pub fn reserve(&mut self, id: JobId, links: &[(DirectedLink, u64)]) -> Result<(), Refusal> {
        if self.admissions.contains_key(&id) {
            return Err(Refusal::Duplicate(id));
        }
        let mut most: BTreeMap<u32, BTreeMap<DirectedLink, u64>> = BTreeMap::new();
        for (link, bps) in links {
            let trunk = self.network.trunk_of(*link).ok_or(Refusal::NoLink(*link))?;
            let sum = most.entry(trunk).or_default().entry(*link).or_default();
            *sum = sum.saturating_add(*bps);
        }
        let loads = most
            .into_iter()
            .map(|(trunk, links)| Load { trunk, bps: links.into_values().max().unwrap_or(0) });
        let loads: Vec<Load> = loads.filter(|load| load.bps > 0).collect();
        self.check_loads(&loads)?;
        self.take(id, Admission { pieces: Vec::new(), loads, slots_per_worker: 0, basis: None });
        Ok(())
    }

    /// Releases what a job or reservation holds, and returns it.
    ///
    /// # Errors
    /// When there is none.
    pub fn release(&mut self, id: JobId) -> Result<Admission, Refusal> {
        let admission = self.admissions.remove(&id).ok_or(Refusal::Unknown(id))?;
        for load in &admission.loads {
            self.reserved_bps[load.trunk as usize] -= load.bps;
        }
        for piece in &admission.pieces {
            let slots = u64::from(piece.run.len()) * u64::from(admission.slots_per_worker);
            self.for_ancestors(piece.host, |free| *free += slots);
        }
        Ok(admission)
    }

    /// Gives back what was [released](Ledger::release) a moment ago, with nothing between.
    pub(crate) fn restore(&mut self, id: JobId, admission: Admission) {
        self.take(id, admission);
    }

    /// Takes what was checked.
    fn take(&mut self, id: JobId, admission: Admission) {
        for load in &admission.loads {
            self.reserved_bps[load.trunk as usize] += load.bps;
        }
        for piece in &admission.pieces {
            let slots = u64::from(piece.run.len()) * u64::from(admission.slots_per_worker);
            self.for_ancestors(piece.host, |free| *free -= slots);
        }
        self.admissions.insert(id, admission);
    }

    /// Changes the free slots of a host and of all groups that have it; a lost host has none to
    /// change.
    fn for_ancestors(&mut self, host: u32, mut change: impl FnMut(&mut u64)) {
        if self.network.is_lost(host) {
            return;
        }
        let mut group = host;
        while let Some(free) = self.free_slots.get_mut(group as usize) {
            change(free);
            group = self.network.groups().parent(group);
        }
    }

    /// Computes L1 to L3 anew.
    ///
    /// # Errors
    /// Says what differs.
    pub fn audit(&self) -> Result<(), String> {
        let mut other = Ledger::new(self.network.clone());
        for (id, admission) in &self.admissions {
            let mut loads = admission.loads.clone();
            if let Some((demand, abstraction)) = &admission.basis {
                let pieces = &admission.pieces;
                other.loader.loads(&self.network, demand, *abstraction, pieces, &mut loads);
            }
            if loads != admission.loads {
                return Err(alloc::format!("job {id} does not hold what its demand says"));
            }
            other.take(*id, admission.clone());
        }
        if other.reserved_bps != self.reserved_bps || other.free_slots != self.free_slots {
            return Err("the sum of all jobs is not what is reserved".to_string());
        }
        let trunks = 0..self.network.trunks() as u32;
        match trunks
            .into_iter()
            .find(|trunk| self.reserved_bps(*trunk) > self.network.capacity_bps(*trunk))
        {
            Some(trunk) => {
                Err(alloc::format!("{:?} has too much reserved", self.network.ends_of(trunk)))
            }
            None => Ok(()),
        }
    }
}
