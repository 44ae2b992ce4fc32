//! What holds after every event, whatever goes wrong.
//!
//! - C1: an agent accepts commands in the order of (term, sequence) only, and one position has one
//!   plan.
//! - C2: one brain leads in a term.
//! - C3: on every link, no book has more reserved than the link carries; jobs hold what their
//!   demand says.
//! - C4: when all is stored, the leader's book is what a replay of snapshot and log gives.
//! - C5: an answer is given once its entry is durable, and all answers to one request are the same.
//! - C6: what was answered as admitted is there until its client asks for the release; what was
//!   released is not.
//! - C7: a request is executed once: no two entries have it.
//! - C8: no plan names a job that is not durable.
//! - C9: on no port does a plan guarantee more than the port carries, or have two jobs with a
//!   guarantee one DSCP.
//! - C10: no job is without its guarantee at a place whose links would hold it: whatever makes room
//!   gives it back.
//! - C11: once all has settled, hosts enforce the times that follow from the durable ledger, all
//!   hosts of a job's workers the same one, and nobody else one.
//! - C12: once all has settled, the agent of a host knows each job that has workers there, but for
//!   degraded ones whose DSCP another job sends with.

use std::collections::{BTreeMap, BTreeSet};

use parfait::agent::{Command, Position, Share, check_plan};
use parfait::brain::{Brain, Effect};
use parfait::demand::Demand;
use parfait::log::{Book, Change, Held, Outcome, batches};
use parfait::staggering::Staggering;
use topology::graph::NodeId;

use crate::world::{World, shown};

#[derive(Default)]
pub(crate) struct Checks {
    /// By agent.
    accepted: BTreeMap<usize, Position>,
    plans: BTreeMap<(usize, Position), Command>,
    leaders: BTreeMap<u64, u64>,
    /// What a replay of the disk gives, and after how many changes of the disk.
    replayed: Option<(u64, Book)>,
    answers: BTreeMap<(u64, u64), Outcome>,
    admitted: BTreeSet<u64>,
    released: BTreeSet<u64>,
    release_asked: BTreeSet<u64>,
    /// By client and sequence: the index of the entry.
    entries: BTreeMap<(u64, u64), u64>,
    durable_jobs: BTreeSet<u64>,
}

impl Checks {
    pub(crate) fn accepted(&mut self, agent: usize, command: &Command) -> Result<(), String> {
        let position = command.position;
        let before = self.accepted.insert(agent, position).unwrap_or_default();
        if position < before {
            let (before, now) = (shown(before), shown(position));
            return Err(format!("C1: agent {agent} accepted {now} after {before}"));
        }
        let first = self.plans.entry((agent, position)).or_insert_with(|| command.clone());
        if first != command {
            return Err(format!("C1: agent {agent} got two plans as {}", shown(position)));
        }
        Ok(())
    }

    /// What an agent saved covers what it answered.
    pub(crate) fn agent(
        &self,
        agent: usize,
        asked: Position,
        saved: Position,
    ) -> Result<(), String> {
        let accepted = self.accepted.get(&agent).copied().unwrap_or_default();
        match saved < accepted {
            true => {
                Err(format!("C1: agent {agent} forgot {} for {}", shown(accepted), shown(asked)))
            }
            false => Ok(()),
        }
    }

    pub(crate) fn release_asked(&mut self, job: u64) {
        self.release_asked.insert(job);
    }

    pub(crate) fn answered(
        &mut self,
        client: u64,
        sequence: u64,
        outcome: &Outcome,
    ) -> Result<(), String> {
        let first = self.answers.entry((client, sequence)).or_insert_with(|| outcome.clone());
        if first != outcome {
            return Err(format!(
                "C5: request {client}:{sequence} was answered {first:?}, then {outcome:?}"
            ));
        }
        match outcome {
            Outcome::Admitted(job) => self.admitted.insert(*job),
            Outcome::Released { job, .. } => self.released.insert(*job),
            Outcome::Refused(_) | Outcome::Repaired { .. } => false,
        };
        Ok(())
    }

    /// C3 and C4, of the brain that did something.
    pub(crate) fn brain(&mut self, world: &World, brain: &Brain) -> Result<(), String> {
        let Some((book, is_durable)) = brain.book() else { return Ok(()) };
        let ledger = book.ledger();
        for (link, trunk) in ledger.network().links() {
            let (reserved, most) =
                (ledger.reserved_bps(trunk), ledger.network().capacity_bps(trunk));
            if reserved > most {
                return Err(format!("C3: link {link} has {reserved} reserved of {most}"));
            }
        }
        let is_last = brain.term().zip(brain.opening()) == Some(world.disk.opening);
        if is_durable && is_last && self.replay(world)? {
            if let Some(job) = book.clashes(|_| false).first() {
                return Err(format!("C9: job {job} meets another with its DSCP"));
            }
            ledger.audit().map_err(|what| format!("C3: {what}"))?;
            if let Some(job) = book.degraded().find(|job| fits_in_place(book, *job)) {
                return Err(format!("C10: job {job} is degraded, and its links would hold it"));
            }
        }
        let replayed = self.replayed.as_ref().map(|(_, replayed)| replayed);
        if is_durable && is_last && replayed.is_some_and(|replayed| !replayed.same_as(book)) {
            return Err("C4: the leader's book is not what a replay gives".to_string());
        }
        Ok(())
    }

    pub(crate) fn effect(
        &mut self,
        world: &World,
        holder: u64,
        effect: &Effect,
    ) -> Result<(), String> {
        self.replay(world)?;
        match effect {
            Effect::Send { node, command } => {
                check_plan(&command.plan, &world.network.ports_bps(*node))
                    .map_err(|objection| format!("C9: {objection}"))?;
                let term = command.position.term;
                let leader = *self.leaders.entry(term).or_insert(holder);
                if leader != holder {
                    return Err(format!("C2: {leader} and {holder} lead in term {term}"));
                }
                match command.plan.iter().find(|share| !self.durable_jobs.contains(&share.job)) {
                    Some(share) => Err(format!("C8: job {} is not durable", share.job)),
                    None => Ok(()),
                }
            }
            Effect::Answer { client, sequence, answer: Ok(outcome) } => {
                let book = self.replayed.as_ref().map(|(_, book)| book);
                let durable = book.and_then(|book| book.clients().get(client));
                let is_durable = durable.is_some_and(|last| match last.sequence == *sequence {
                    true => last.outcome == *outcome,
                    false => last.sequence > *sequence,
                });
                match is_durable {
                    true => Ok(()),
                    false => Err(format!(
                        "C5: {outcome:?} of request {client}:{sequence} is not durable"
                    )),
                }
            }
            _ => Ok(()),
        }
    }

    /// C6 and C7, whenever the disk has changed.
    pub(crate) fn after_event(&mut self, world: &World) -> Result<(), String> {
        self.replay(world)?;
        let Some((_, book)) = &self.replayed else { return Ok(()) };
        let lost = self
            .admitted
            .difference(&self.release_asked)
            .find(|job| !book.jobs().contains_key(job));
        if let Some(job) = lost {
            return Err(format!("C6: job {job} was admitted and is lost"));
        }
        match self.released.iter().find(|job| book.jobs().contains_key(job)) {
            Some(job) => Err(format!("C6: job {job} was released and is there again")),
            None => Ok(()),
        }
    }

    /// C11 and C12; how many times of jobs hosts enforce.
    pub(crate) fn settled(&mut self, world: &World) -> Result<u64, String> {
        self.replay(world)?;
        let Some((_, book)) = &self.replayed else { return Ok(0) };
        let staggering = Staggering::of(book);
        let mut phases = 0;
        for agent in &world.agents {
            for Share { job, phase, .. } in &agent.enforced {
                let pieces = book.jobs().get(job).map_or(&[][..], |held| &held.pieces);
                let is_sender =
                    pieces.iter().any(|piece| world.network.node_of(piece.host) == agent.node);
                let expected = staggering.stagger(*job).and_then(|stagger| stagger.phase.ok());
                if *phase != expected.filter(|_| is_sender) {
                    let name = world.network.node_name(agent.node);
                    return Err(format!(
                        "C11: {name} has {phase:?} for job {job}, and the ledger says {expected:?}"
                    ));
                }
                phases += u64::from(phase.is_some());
            }
            if let Some(job) = unknown(book, agent.node, &agent.enforced) {
                let name = world.network.node_name(agent.node);
                return Err(format!("C12: {name} does not know job {job}"));
            }
        }
        Ok(phases)
    }

    /// Replays the disk if it has changed; whether it had.
    fn replay(&mut self, world: &World) -> Result<bool, String> {
        if self.replayed.as_ref().is_some_and(|(changes, _)| *changes == world.disk.changes) {
            return Ok(false);
        }
        let image = &world.disk.image;
        let (book, _) = Book::recover(world.ground.clone(), &image.snapshot, &image.log)
            .map_err(|error| format!("C4: the log is not recovered: {error}"))?;
        for batch in batches(&image.log) {
            for (index, entry) in (batch.first..).zip(&batch.entries) {
                if index >= book.next_index() || entry.client == 0 {
                    continue;
                }
                let request = (entry.client, entry.sequence);
                if *self.entries.entry(request).or_insert(index) != index {
                    return Err(format!(
                        "C7: request {}:{} was executed twice",
                        request.0, request.1
                    ));
                }
                if matches!(entry.change, Change::Admit(_)) {
                    self.durable_jobs.insert(index);
                }
            }
        }
        self.replayed = Some((world.disk.changes, book));
        Ok(true)
    }
}

/// A job with workers on a node that its plan has not.
fn unknown(book: &Book, node: NodeId, plan: &[Share]) -> Option<u64> {
    let network = book.ledger().network();
    let taken = book.dscps_on_links();
    let is_missing = |job: &u64, held: &Held| {
        held.pieces.iter().any(|piece| network.node_of(piece.host) == node)
            && !(book.is_degraded(*job) && taken.contains(&held.dscp))
            && plan.iter().all(|share| share.job != *job)
    };
    book.jobs().iter().find(|(job, held)| is_missing(job, held)).map(|(job, _)| *job)
}

/// Whether a job's place would hold it beside all others.
fn fits_in_place(book: &Book, job: u64) -> bool {
    let held = &book.jobs()[&job];
    let demand = Demand::in_order(&held.job.pattern, held.order).expect("it was admitted");
    let slots = held.job.slots_per_worker;
    let mut ledger = book.ledger().clone();
    ledger.relocate(job, &demand, slots, held.abstraction, &held.pieces).is_ok()
}
