//! The brain: one of several leads by a lease, admits and releases jobs on its book, and sends
//! plans to agents.
//!
//! Nothing in here waits, stores or sends. The caller passes in what happened (`handle_*`), then
//! drains [`poll_effect`](Brain::poll_effect), and calls [`handle_timeout`](Brain::handle_timeout)
//! when [`poll_timeout`](Brain::poll_timeout) says so and when its clock was set.
//!
//! What the caller's lease store and log must do:
//!
//! - The lease has at most one holder. Taking it gives a term, higher than all before; who holds it
//!   gets the same term.
//! - [`Effect::Open`] with a lower term than an open before is refused as [`StorageError::Fenced`].
//!   After it is answered, nothing of an earlier opening is written, and what the answer has is
//!   durable. In etcd both is a transaction that compares the lease's create revision.
//! - Effects of one opening are carried out in order. A write may be torn until [`Effect::Sync`] is
//!   done; a snapshot replaces the one before it as a whole, and the log may be cut only after
//!   that.
//!
//! What the brain keeps to, whatever clocks do and the network loses, repeats, delays or reorders:
//!
//! - B1: an answer that something was admitted, released or refused is given once the entry is
//!   durable, and it is the same for every repetition of the request.
//! - B2: a plan has only what is durable.
//! - B3: a brain that is told that the log went to another neither answers nor writes in that term
//!   again.
//!
//! None of that rests on a clock. Those only decide when to ask again and when to give up leading,
//! so one that jumps costs time and nothing else.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use topology::graph::NodeId;

use crate::agent::{Command, MAX_SHARES, Measure, Objection, Plan, Position, Reply, Share, place};
use crate::demand::Abstraction;
use crate::job::Job;
use crate::ledger::{JobId, Refusal};
use crate::log::{
    Batch, Book, Change, Entry, Held, Label, LogError, Outcome, Reason, Refused, Reserved,
    fingerprint, shortened,
};
use crate::network::{MAX_SLOTS, Network};
use crate::placement::Request as PlacementRequest;
use crate::placement::migration::{Standing, apart};
use crate::placement::search::{self, Memory};
use crate::repair_log::{self, Part};
use crate::seeded::{Bug, Seeded};
use crate::site::Ground;
use crate::staggering::{self, Stagger, Staggering};

/// Most requests that wait for the write before them.
pub const MAX_WAITING: usize = 1024;

/// Most requests of one write.
pub const MAX_BATCH: usize = 64;

/// Effort of a write after which no further request is decided for it: the searches', and one for
/// each worker. So a batch takes at most this, and one decision more; each is about a tenth of a
/// second, and a lease holds for a second or more.
const MAX_EFFORT: u64 = search::MOST_EFFORT;

// However many jobs of a host send nothing beyond it, its agent takes the plan.
const _: () = assert!(MAX_SHARES == 255 * 61 + MAX_SLOTS as usize);

/// Most claims of the lease whose answer may still come.
const MAX_CLAIMS: usize = 8;

/// For so many leases a brain that cannot read the log leaves the lease to others.
const PAUSE_LEASES: u64 = 4;

/// How a brain behaves.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// This process: differs from every other brain's, and from its own before a restart.
    pub holder: u64,
    /// How long the lease holds, in nanoseconds.
    pub lease_ns: u64,
    /// Nanoseconds between claims of the lease; a third of the lease leaves room for two losses.
    pub claim_every_ns: u64,
    /// Nanoseconds after which a command without an answer is sent again.
    pub resend_ns: u64,
    /// Nanoseconds after which a storage that does not answer is opened again.
    pub storage_timeout_ns: u64,
    /// Bytes of the log after which a snapshot is made.
    pub snapshot_bytes: u64,
    /// How links are reserved.
    pub abstraction: Abstraction,
    /// Iterations of the search for a placement.
    pub iterations: u32,
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Hosts and bandwidth for a job.
    Admit {
        /// What it is called.
        label: Label,
        /// What it needs.
        job: Job,
        /// Only if nobody got or gave back anything after this entry: what was computed since then
        /// still holds.
        unchanged_since: Option<u64>,
    },
    /// To give back what a job has.
    Release {
        /// The job.
        job: Which,
        /// Only if this is its owner.
        owner: Option<String>,
    },
    /// Parts of the network went down, or came back: who is hit is repaired.
    Outage {
        /// The parts.
        parts: Vec<Part>,
        /// Whether they are down.
        is_down: bool,
        /// Most workers that may be moved.
        most_moved: u32,
    },
    /// To move jobs so that there is more room for those to come.
    Defragment {
        /// Most workers that may be moved.
        most_moved: u32,
    },
}

/// A job as people say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// By number.
    Number(JobId),
    /// By name.
    Name(String),
}

/// A request. A client has one at a time: with a higher sequence it says that it knows the answer
/// to the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The client; not 0.
    pub client: u64,
    /// Its number of the request, which grows.
    pub sequence: u64,
    /// What it asks for.
    pub ask: Ask,
}

/// Why a request is not executed. Nothing is recorded: it may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Denial {
    /// Another brain leads, or none.
    #[error("this brain does not lead: ask another one")]
    NotLeading,
    /// Too many requests wait.
    #[error("{MAX_WAITING} requests are waiting: try again later")]
    Busy,
    /// The client sent a later request before.
    #[error(
        "the client's request {last} came before: an old message, or two clients with one number"
    )]
    Stale {
        /// The later one.
        last: u64,
    },
    /// Number 0 is that of the brains.
    #[error("there is no client 0")]
    NoClient,
}

/// Why the log is not written or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StorageError {
    /// The log was opened in a higher term, or again.
    #[error("the log belongs to another leader")]
    Fenced,
    /// There is no room.
    #[error("no space is left for the log")]
    Full,
    /// What is stored was not written by a brain of this cluster, or not as it is there.
    #[error("what is stored is not signed with the token of this cluster")]
    Unsigned,
    /// Anything else; whether it was written is not known.
    #[error("the log cannot be reached")]
    Unavailable,
}

/// What an opened log has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The last snapshot; empty if there was none.
    pub snapshot: Vec<u8>,
    /// The log since, perhaps with a torn end.
    pub log: Vec<u8>,
}

/// Who holds the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The holder's number.
    pub holder: u64,
    /// The revision with which it was taken.
    pub term: u64,
}

/// What the caller is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Take the lease if it is free, keep it if it is ours, and answer with [`Brain::handle_lease`]
    /// who has it.
    Claim {
        /// Tells answers apart.
        ticket: u64,
    },
    /// Open the log in a term and answer with [`Brain::handle_opened`].
    Open {
        /// The opening.
        ticket: u64,
        /// The term.
        term: u64,
    },
    /// Write at a place of the log; whatever is behind it is gone. No answer.
    Append {
        /// The opening that this belongs to.
        opening: u64,
        /// Bytes before it.
        at: u64,
        /// The record.
        bytes: Vec<u8>,
    },
    /// Make the log durable and answer with [`Brain::handle_stored`], also if what was appended
    /// before failed.
    Sync {
        /// The opening that this belongs to.
        opening: u64,
        /// Tells answers apart.
        ticket: u64,
    },
    /// Replace the snapshot, then empty the log, durably; answer with [`Brain::handle_stored`].
    Snapshot {
        /// The opening that this belongs to.
        opening: u64,
        /// Tells answers apart.
        ticket: u64,
        /// The snapshot.
        bytes: Vec<u8>,
    },
    /// Send a command to the agent of a node.
    Send {
        /// The host or switch.
        node: NodeId,
        /// The command.
        command: Command,
    },
    /// Answer a client.
    Answer {
        /// The client.
        client: u64,
        /// Its request.
        sequence: u64,
        /// What became of it.
        answer: Result<Outcome, Denial>,
    },
}

/// What has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Terms in which this brain led.
    pub terms: u64,
    /// Terms that ended since the lease was lost or not renewed in time.
    pub leases_lost: u64,
    /// Writes and openings that were refused since another one opened the log.
    pub fenced: u64,
    /// Writes and openings that failed otherwise.
    pub storage_failed: u64,
    /// Openings and writes without an answer in time.
    pub storage_silent: u64,
    /// Logs that were not recovered.
    pub logs_refused: u64,
    /// Torn writes that were cut.
    pub torn_tails: u64,
    /// Parts that a log said are down and the topology does not have: they were left out.
    pub unknown_parts: u64,
    /// Snapshots made.
    pub snapshots: u64,
    /// Jobs admitted.
    pub admitted: u64,
    /// Jobs released.
    pub released: u64,
    /// Degraded jobs that got their guarantee back by a release.
    pub restored: u64,
    /// Requests refused by the ledger.
    pub refused: u64,
    /// Outages and ends of outages, and times that jobs were moved to make room.
    pub repairs: u64,
    /// Workers that were moved by these.
    pub workers_moved: u64,
    /// Requests answered before, or waiting.
    pub repeated: u64,
    /// Requests denied: another brain leads.
    pub not_leading: u64,
    /// Requests denied: too many wait.
    pub busy: u64,
    /// Requests denied: old, or of a client that cannot be.
    pub stale: u64,
    /// Commands sent again.
    pub resent: u64,
    /// Commands that agents refused.
    pub commands_refused: u64,
    /// Answers to what was given up, or never asked.
    pub stale_replies: u64,
    /// Reports of jobs that are not on that host.
    pub implausible: u64,
}

/// What a brain is doing, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Another one leads, or none.
    Standby,
    /// It has the lease and gets the log.
    Opening,
    /// It leads, and its first write is not done.
    Beginning,
    /// It leads.
    Leading,
}

/// What an agent is to enforce, and whether it said that it does.
#[derive(Clone, Debug, Default)]
struct Link {
    sequence: u64,
    plan: Plan,
    /// When the command is sent again; `None` once it is answered.
    resend_ns: Option<u64>,
    objection: Option<Objection>,
    measures: Vec<Measure>,
}

#[derive(Debug)]
enum Write {
    Begin,
    Batch { at: u64, length: u64, answers: Vec<(u64, u64, Outcome)>, nodes: BTreeSet<NodeId> },
    Snapshot,
}

#[derive(Debug)]
struct Leader {
    opening: u64,
    term: u64,
    book: Book,
    /// Where the next record goes.
    end: u64,
    /// What is being stored: its ticket, since when, and what.
    storing: Option<(u64, u64, Write)>,
    has_begun: bool,
    links: BTreeMap<NodeId, Link>,
    /// Of what is durable.
    staggering: Staggering,
}

#[derive(Debug)]
enum Role {
    Standby,
    /// Waits for the opening `ticket`, or, with none, to open again.
    Opening {
        term: u64,
        ticket: Option<u64>,
        since_ns: u64,
    },
    Leading(Box<Leader>),
}

/// See the module's text.
#[derive(Debug)]
pub struct Brain {
    config: Config,
    ground: Ground,
    /// Nodes that get plans: all hosts, and switches with an agent.
    governed: BTreeSet<NodeId>,
    role: Role,
    /// Claims without an answer, oldest first: ticket and when.
    claims: VecDeque<(u64, u64)>,
    claimed_ns: Option<u64>,
    /// How long to leave the lease to others, who may read the log that this brain does not.
    pause_ns: u64,
    /// When the last claim that got the lease was sent.
    held_since_ns: u64,
    waiting: VecDeque<Request>,
    effects: VecDeque<Effect>,
    next_ticket: u64,
    /// Of the next command. It never starts again, since a brain may open the log twice in one
    /// term.
    next_sequence: u64,
    last_error: Option<LogError>,
    memory: Memory,
    counters: Counters,
    seeded: Seeded,
}

impl Brain {
    /// One that knows nothing but the network. Hosts get plans, and so do these switches.
    pub fn new(config: Config, ground: impl Into<Ground>, switches: &[NodeId]) -> Brain {
        let ground = ground.into();
        let network = &ground.network;
        let hosts = (0..network.hosts()).map(|host| network.node_of(host));
        Brain {
            config,
            governed: hosts.chain(switches.iter().copied()).collect(),
            ground,
            role: Role::Standby,
            claims: VecDeque::new(),
            claimed_ns: None,
            pause_ns: 0,
            held_since_ns: 0,
            waiting: VecDeque::new(),
            effects: VecDeque::new(),
            next_ticket: 1,
            next_sequence: 1,
            last_error: None,
            memory: Memory::new(),
            counters: Counters::default(),
            seeded: Seeded::default(),
        }
    }

    /// Gives it a bug.
    #[cfg(feature = "seeded-bugs")]
    pub fn plant(&mut self, bug: Bug) {
        self.seeded = Seeded::new(bug);
    }

    /// What has happened.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Why the log was not recovered the last time.
    pub fn last_error(&self) -> Option<&LogError> {
        self.last_error.as_ref()
    }

    /// What it is doing.
    pub fn state(&self) -> State {
        match &self.role {
            Role::Standby => State::Standby,
            Role::Opening { .. } => State::Opening,
            Role::Leading(leader) if leader.has_begun => State::Leading,
            Role::Leading(_) => State::Beginning,
        }
    }

    /// The term that it has the lease of.
    pub fn term(&self) -> Option<u64> {
        match &self.role {
            Role::Standby => None,
            Role::Opening { term, .. } => Some(*term),
            Role::Leading(leader) => Some(leader.term),
        }
    }

    /// Its book, if it leads; and whether all of it is durable.
    pub fn book(&self) -> Option<(&Book, bool)> {
        let Role::Leading(leader) = &self.role else { return None };
        Some((&leader.book, leader.storing.is_none()))
    }

    /// The opening of the log in which it leads.
    pub fn opening(&self) -> Option<u64> {
        let Role::Leading(leader) = &self.role else { return None };
        Some(leader.opening)
    }

    /// The plan of a node and whether its agent said that it enforces or refuses it, if it leads.
    pub fn plan(&self, node: NodeId) -> Option<(&[Share], bool)> {
        let Role::Leading(leader) = &self.role else { return None };
        let link = leader.links.get(&node)?;
        Some((&link.plan, link.sequence > 0 && link.resend_ns.is_none()))
    }

    /// Why the agent of a node refused its plan, if it did.
    pub fn objection(&self, node: NodeId) -> Option<Objection> {
        let Role::Leading(leader) = &self.role else { return None };
        leader.links.get(&node)?.objection
    }

    /// Whether and when a job takes turns with others, if it says its cycle and this brain leads.
    pub fn stagger(&self, job: JobId) -> Option<&Stagger> {
        let Role::Leading(leader) = &self.role else { return None };
        leader.staggering.stagger(job)
    }

    /// What the agent of a node measured last.
    pub fn measures(&self, node: NodeId) -> &[Measure] {
        match &self.role {
            Role::Leading(leader) => leader.links.get(&node).map_or(&[], |link| &link.measures),
            _ => &[],
        }
    }

    /// Nodes that get plans.
    pub fn governed(&self) -> &BTreeSet<NodeId> {
        &self.governed
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.ground.network
    }

    /// The agent of a node can be reached again: it need not wait for its plan until the next time
    /// that plans are sent again.
    pub fn handle_attached(&mut self, node: NodeId, now_ns: u64) {
        if let Role::Leading(leader) = &mut self.role
            && leader.has_begun
            && let Some(link) = leader.links.get_mut(&node)
        {
            link.resend_ns = Some(now_ns);
            self.resend(now_ns);
        }
    }

    /// The next thing to do.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When [`handle_timeout`](Brain::handle_timeout) is due, in nanoseconds.
    pub fn poll_timeout(&self) -> u64 {
        let every = self.config.claim_every_ns.saturating_add(self.pause_ns);
        let claim = self.claimed_ns.map_or(0, |at| at.saturating_add(every));
        let storage = self.config.storage_timeout_ns;
        let role = match &self.role {
            Role::Standby => u64::MAX,
            Role::Opening { since_ns, .. } => since_ns.saturating_add(storage),
            Role::Leading(leader) => {
                let resend = leader.links.values().filter_map(|link| link.resend_ns).min();
                let stored =
                    leader.storing.as_ref().map(|(_, since, _)| since.saturating_add(storage));
                resend.unwrap_or(u64::MAX).min(stored.unwrap_or(u64::MAX))
            }
        };
        claim.min(role)
    }

    /// Time has passed, or the clock has jumped.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        let Config { lease_ns, claim_every_ns, storage_timeout_ns, .. } = self.config;
        let every_ns = claim_every_ns.saturating_add(self.pause_ns);
        if self.claimed_ns.is_none_or(|at| is_over(at, every_ns, now_ns)) {
            self.claim(now_ns);
        }
        if !matches!(self.role, Role::Standby) && is_over(self.held_since_ns, lease_ns, now_ns) {
            self.counters.leases_lost += 1;
            self.stand_by();
        }
        match &mut self.role {
            Role::Standby => {}
            Role::Opening { term, ticket, since_ns } => {
                if is_over(*since_ns, storage_timeout_ns, now_ns) {
                    let term = *term;
                    self.counters.storage_silent += u64::from(ticket.is_some());
                    self.open(term, now_ns);
                }
            }
            Role::Leading(leader) => {
                let term = leader.term;
                let stored = leader.storing.as_ref();
                if stored.is_some_and(|(_, since, _)| is_over(*since, storage_timeout_ns, now_ns)) {
                    self.counters.storage_silent += 1;
                    self.open(term, now_ns);
                } else {
                    self.resend(now_ns);
                }
            }
        }
    }

    /// The lease store says who has the lease.
    pub fn handle_lease(&mut self, ticket: u64, lease: Lease, now_ns: u64) {
        let Some(at) = self.claims.iter().position(|(claim, _)| *claim == ticket) else {
            self.counters.stale_replies += 1;
            return;
        };
        // Answers to claims before this one are older.
        let sent_ns = self.claims.drain(..=at).next_back().map_or(now_ns, |(_, sent)| sent);
        if lease.holder != self.config.holder {
            if !matches!(self.role, Role::Standby) {
                self.counters.leases_lost += 1;
            }
            self.stand_by();
            return;
        }
        if is_over(sent_ns, self.config.lease_ns, now_ns) {
            self.counters.stale_replies += 1;
            return;
        }
        self.held_since_ns = sent_ns;
        if self.term() != Some(lease.term) {
            self.open(lease.term, now_ns);
        }
    }

    /// The log is open, or not.
    pub fn handle_opened(&mut self, ticket: u64, opened: Result<Image, StorageError>, now_ns: u64) {
        let Role::Opening { term, ticket: own, .. } = self.role else {
            self.counters.stale_replies += 1;
            return;
        };
        if own != Some(ticket) {
            self.counters.stale_replies += 1;
            return;
        }
        match opened {
            Ok(image) => self.begin(term, ticket, &image, now_ns),
            Err(StorageError::Unsigned) => self.refuse_log(LogError::Unsigned, now_ns),
            Err(error) => self.storage_failed(term, error, now_ns),
        }
    }

    /// What was to be stored is durable, or not.
    pub fn handle_stored(&mut self, ticket: u64, stored: Result<(), StorageError>, now_ns: u64) {
        let Role::Leading(leader) = &mut self.role else {
            self.counters.stale_replies += 1;
            return;
        };
        if leader.storing.as_ref().is_none_or(|(own, _, _)| *own != ticket) {
            self.counters.stale_replies += 1;
            return;
        }
        let term = leader.term;
        let is_done = match stored {
            Err(StorageError::Fenced) => self.seeded.is(Bug::LeaseUnchecked),
            other => other.is_ok(),
        };
        if let (false, Err(error)) = (is_done, stored) {
            self.storage_failed(term, error, now_ns);
            return;
        }
        match leader.storing.take().map(|(_, _, write)| write) {
            Some(Write::Begin) => {
                leader.has_begun = true;
                leader.staggering.follow(&leader.book, self.seeded);
                self.plan_nodes(None, now_ns);
            }
            Some(Write::Batch { at, length, answers, mut nodes }) => {
                leader.end = at + length;
                let shifted = leader.staggering.follow(&leader.book, self.seeded);
                let hosts =
                    shifted.into_iter().flat_map(|job| staggering::hosts(&leader.book, job));
                nodes.extend(hosts);
                self.answer(answers);
                self.plan_nodes(Some(nodes), now_ns);
            }
            Some(Write::Snapshot) => {
                leader.end = 0;
                self.counters.snapshots += 1;
            }
            None => {}
        }
        self.store_next(now_ns);
    }

    /// A client asks for something.
    pub fn handle_request(&mut self, request: Request, now_ns: u64) {
        let Request { client, sequence, .. } = request;
        let Role::Leading(leader) = &self.role else {
            self.counters.not_leading += 1;
            self.deny(client, sequence, Denial::NotLeading);
            return;
        };
        let is_known = |waiting: &Request| (waiting.client, waiting.sequence) == (client, sequence);
        let is_in_flight = match &leader.storing {
            Some((_, _, Write::Batch { answers, .. })) => {
                answers.iter().any(|one| (one.0, one.1) == (client, sequence))
            }
            _ => false,
        };
        let is_repeat_counted = self.seeded.is(Bug::RepeatCountedTwice);
        if !is_repeat_counted && (is_in_flight || self.waiting.iter().any(is_known)) {
            self.counters.repeated += 1;
            return;
        }
        let last = leader.book.clients().get(&client);
        match last {
            _ if client == 0 => {
                self.counters.stale += 1;
                self.deny(client, sequence, Denial::NoClient);
            }
            Some(last) if last.sequence > sequence => {
                let last = last.sequence;
                self.counters.stale += 1;
                self.deny(client, sequence, Denial::Stale { last });
            }
            Some(last) if last.sequence == sequence && !is_repeat_counted => {
                let outcome = last.outcome.clone();
                self.counters.repeated += 1;
                self.effects.push_back(Effect::Answer { client, sequence, answer: Ok(outcome) });
            }
            _ if self.waiting.len() >= MAX_WAITING => {
                self.counters.busy += 1;
                self.deny(client, sequence, Denial::Busy);
            }
            _ => {
                self.waiting.push_back(request);
                self.store_next(now_ns);
            }
        }
    }

    /// An agent answers a command.
    pub fn handle_reply(&mut self, node: NodeId, reply: Reply) {
        let Role::Leading(leader) = &mut self.role else {
            self.counters.stale_replies += 1;
            return;
        };
        let Some(link) = leader.links.get_mut(&node) else {
            self.counters.stale_replies += 1;
            return;
        };
        if reply.position != (Position { term: leader.term, sequence: link.sequence }) {
            self.counters.stale_replies += 1;
            return;
        }
        self.counters.commands_refused += u64::from(reply.verdict.is_err());
        match reply.verdict {
            // The same command would get the same answer: the next one is sent when this one would
            // have been again.
            Err(Objection::NotEnforced) => {
                link.sequence = self.next_sequence;
                self.next_sequence += 1;
            }
            _ => link.resend_ns = None,
        }
        link.objection = reply.verdict.err();
        let is_plausible = |measure: &Measure| place(&link.plan, measure.port, measure.job).is_ok();
        let reported = reply.measures.len();
        link.measures = reply.measures;
        link.measures.truncate(link.plan.len());
        link.measures.retain(is_plausible);
        self.counters.implausible += (reported - link.measures.len()) as u64;
    }

    fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    fn claim(&mut self, now_ns: u64) {
        let ticket = self.ticket();
        if self.claims.len() == MAX_CLAIMS {
            self.claims.pop_front();
        }
        self.claims.push_back((ticket, now_ns));
        self.claimed_ns = Some(now_ns);
        self.pause_ns = 0;
        self.effects.push_back(Effect::Claim { ticket });
    }

    fn deny(&mut self, client: u64, sequence: u64, denial: Denial) {
        self.effects.push_back(Effect::Answer { client, sequence, answer: Err(denial) });
    }

    /// Gives up leading. What was being stored may or may not be: its clients ask again.
    fn stand_by(&mut self) {
        self.role = Role::Standby;
        for request in core::mem::take(&mut self.waiting) {
            self.deny(request.client, request.sequence, Denial::NotLeading);
        }
    }

    fn open(&mut self, term: u64, now_ns: u64) {
        self.stand_by();
        let ticket = self.ticket();
        self.role = Role::Opening { term, ticket: Some(ticket), since_ns: now_ns };
        self.effects.push_back(Effect::Open { ticket, term });
    }

    fn storage_failed(&mut self, term: u64, error: StorageError, now_ns: u64) {
        self.stand_by();
        if error == StorageError::Fenced {
            self.counters.fenced += 1;
        } else {
            self.counters.storage_failed += 1;
            self.role = Role::Opening { term, ticket: None, since_ns: now_ns };
        }
    }

    /// Leaves the lease to others for a while: one of them may be able to read the log.
    fn refuse_log(&mut self, error: LogError, now_ns: u64) {
        self.counters.logs_refused += 1;
        self.last_error = Some(error);
        self.role = Role::Standby;
        self.claims.clear();
        self.claimed_ns = Some(now_ns);
        self.pause_ns = self.config.lease_ns.saturating_mul(PAUSE_LEASES);
    }

    /// Replays the log. The first write is the leader's own entry: it cuts a torn end, and once it
    /// is durable, no leader before this one can have written anything that is not in the book.
    fn begin(&mut self, term: u64, opening: u64, image: &Image, now_ns: u64) {
        let recovered = Book::recover(self.ground.clone(), &image.snapshot, &image.log);
        let change = Change::Lead { hosts: fingerprint(&self.ground.network) };
        let entry = Entry { client: 0, sequence: 0, change };
        let begun = recovered.and_then(|(mut book, found)| {
            let first = book.next_index();
            book.apply(term, &entry)?;
            Ok((book, found, first))
        });
        let (book, found, first) = match begun {
            Ok(begun) => begun,
            Err(error) => return self.refuse_log(error, now_ns),
        };
        self.last_error = None;
        self.counters.terms += 1;
        self.counters.torn_tails += u64::from(found.torn_bytes > 0);
        self.counters.unknown_parts += book.unknown_parts().len() as u64;
        let at = match self.seeded.is(Bug::TornTailKept) {
            true => image.log.len() as u64,
            false => found.end as u64,
        };
        let bytes = Batch { term, first, entries: alloc::vec![entry] }.encode();
        let end = at + bytes.len() as u64;
        let links = self.governed.iter().map(|node| (*node, Link::default())).collect();
        let ticket = self.ticket();
        let storing = Some((ticket, now_ns, Write::Begin));
        let staggering = Staggering::default();
        let leader =
            Leader { opening, term, book, end, storing, has_begun: false, links, staggering };
        self.role = Role::Leading(Box::new(leader));
        self.effects.push_back(Effect::Append { opening, at, bytes });
        self.effects.push_back(Effect::Sync { opening, ticket });
    }

    /// Stores a snapshot if the log is long, or else what waits.
    fn store_next(&mut self, now_ns: u64) {
        let Role::Leading(leader) = &mut self.role else { return };
        if leader.storing.is_some() {
            return;
        }
        let opening = leader.opening;
        if leader.end > self.config.snapshot_bytes {
            let bytes = leader.book.snapshot();
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            leader.storing = Some((ticket, now_ns, Write::Snapshot));
            self.effects.push_back(Effect::Snapshot { opening, ticket, bytes });
        } else if !self.waiting.is_empty() {
            self.store_batch(now_ns);
        }
    }

    fn store_batch(&mut self, now_ns: u64) {
        let ticket = self.ticket();
        let Role::Leading(leader) = &mut self.role else { return };
        let (first, at) = (leader.book.next_index(), leader.end);
        let (mut entries, mut answers, mut nodes) = (Vec::new(), Vec::new(), BTreeSet::new());
        let (mut decided, mut effort, mut is_full) = (0, 0, false);
        while !is_full && let Some(request) = self.waiting.pop_front() {
            let Request { client, sequence, ask } = request;
            let before = self.memory.effort();
            let own = effort_of(&ask, &leader.book);
            let last = leader.book.clients().get(&client).map(|last| last.sequence);
            if let Some(last) = last.filter(|last| *last >= sequence)
                && !self.seeded.is(Bug::RepeatCountedTwice)
            {
                // Two requests of a client waited, the later one first.
                self.counters.stale += 1;
                let answer = Err(Denial::Stale { last });
                self.effects.push_back(Effect::Answer { client, sequence, answer });
                continue;
            }
            let made = decide(&mut leader.book, &self.config, &mut self.memory, ask);
            let refused = made.as_ref().err().map(|refused| refused.reason);
            let refuse = |refused: Refused| alloc::vec![Change::Refuse(shortened(refused.text))];
            let mut changes = made.unwrap_or_else(refuse).into_iter();
            effort += own + self.memory.effort() - before;
            decided += 1;
            is_full = decided == MAX_BATCH || effort >= MAX_EFFORT;
            let Some(change) = changes.next() else { continue };
            if let Change::Release { job, .. } = &change {
                nodes.extend(concerned(&leader.book, *job));
            }
            let index = leader.book.next_index();
            let mut entry = Entry { client, sequence, change };
            let outcome = leader.carry_out(&mut entry, refused);
            if let Change::Admit(_) = &entry.change {
                nodes.extend(concerned(&leader.book, index));
            }
            let is_executed = !matches!(outcome, Outcome::Refused(_));
            entries.push(entry);
            answers.push((client, sequence, outcome));
            for change in changes.take_while(|_| is_executed) {
                // Paths of any job may have changed.
                nodes.extend(self.governed.iter().copied());
                let entry = Entry { client: 0, sequence: 0, change };
                if leader.book.apply(leader.term, &entry).is_err() {
                    break;
                }
                entries.push(entry);
            }
            if let Some(Entry { change: Change::Outage { .. }, .. }) = entries.last() {
                nodes.extend(self.governed.iter().copied());
            }
        }
        if entries.is_empty() {
            return;
        }
        let bytes = Batch { term: leader.term, first, entries }.encode();
        let length = bytes.len() as u64;
        let opening = leader.opening;
        if self.seeded.is(Bug::AnswerBeforeSync) {
            let early = answers.iter().cloned();
            let early = early.map(|(client, sequence, outcome)| Effect::Answer {
                client,
                sequence,
                answer: Ok(outcome),
            });
            self.effects.extend(early);
        }
        leader.storing = Some((ticket, now_ns, Write::Batch { at, length, answers, nodes }));
        self.effects.push_back(Effect::Append { opening, at, bytes });
        self.effects.push_back(Effect::Sync { opening, ticket });
    }

    fn answer(&mut self, answers: Vec<(u64, u64, Outcome)>) {
        for (client, sequence, outcome) in answers {
            match &outcome {
                Outcome::Admitted(_) => self.counters.admitted += 1,
                Outcome::Released { restored, .. } => {
                    self.counters.released += 1;
                    self.counters.restored += restored.len() as u64;
                }
                Outcome::Refused(_) => self.counters.refused += 1,
                Outcome::Repaired { moved, .. } => {
                    self.counters.repairs += 1;
                    self.counters.workers_moved += u64::from(*moved);
                }
            }
            self.effects.push_back(Effect::Answer { client, sequence, answer: Ok(outcome) });
        }
    }

    /// Sends the plans of these nodes, or of all. Nothing is being stored, so the book has only
    /// what is durable.
    fn plan_nodes(&mut self, nodes: Option<BTreeSet<NodeId>>, now_ns: u64) {
        let Role::Leading(leader) = &mut self.role else { return };
        let nodes = nodes.unwrap_or_else(|| self.governed.clone());
        for (node, plan) in plans(&leader.book, &leader.staggering, &nodes) {
            let Some(link) = leader.links.get_mut(&node) else { continue };
            link.sequence = self.next_sequence;
            self.next_sequence += 1;
            link.plan = plan;
            link.resend_ns = Some(now_ns.saturating_add(self.config.resend_ns));
            let position = Position { term: leader.term, sequence: link.sequence };
            let command = Command { position, plan: link.plan.clone() };
            self.effects.push_back(Effect::Send { node, command });
        }
    }

    fn resend(&mut self, now_ns: u64) {
        let Role::Leading(leader) = &mut self.role else { return };
        let resend_ns = self.config.resend_ns;
        for (node, link) in &mut leader.links {
            // A clock that went back must not keep commands for long.
            let is_due = |at: u64| now_ns >= at || at - now_ns > resend_ns;
            if link.resend_ns.is_some_and(is_due) {
                link.resend_ns = Some(now_ns.saturating_add(resend_ns));
                self.counters.resent += 1;
                let position = Position { term: leader.term, sequence: link.sequence };
                let command = Command { position, plan: link.plan.clone() };
                self.effects.push_back(Effect::Send { node: *node, command });
            }
        }
    }
}

impl Leader {
    /// Applies a change that was decided on, or what refuses it. The log keeps no more of a refusal
    /// than its words, so the reason comes from the decision.
    fn carry_out(&mut self, entry: &mut Entry, refused: Option<Reason>) -> Outcome {
        let outcome = self.book.apply(self.term, entry).unwrap_or_else(|error| {
            let reason = shortened(error.to_string());
            entry.change = Change::Refuse(reason.clone());
            // A refusal changes no link, and the term is the leader's own.
            self.book.apply(self.term, entry).unwrap_or(Outcome::Refused(reason.into()))
        });
        match outcome {
            Outcome::Refused(Refused { text, .. }) => {
                Outcome::Refused(Refused { reason: refused.unwrap_or_default(), text })
            }
            other => other,
        }
    }
}

/// Whether so much time has passed since `from_ns`, or the clock went back, so that it is not
/// known.
fn is_over(from_ns: u64, length_ns: u64, now_ns: u64) -> bool {
    now_ns.checked_sub(from_ns).is_none_or(|passed| passed >= length_ns)
}

/// What it costs to decide on a request beside the searches, as their effort is counted.
fn effort_of(ask: &Ask, book: &Book) -> u64 {
    match ask {
        Ask::Admit { job, .. } => u64::from(job.pattern.workers().unwrap_or(0)),
        // Degraded jobs are tried again.
        Ask::Release { .. } if book.degraded().next().is_some() => MAX_EFFORT,
        Ask::Release { .. } => 1,
        Ask::Outage { .. } | Ask::Defragment { .. } => MAX_EFFORT,
    }
}

/// What a request changes: the first change is its own, the others follow from it.
///
/// # Errors
/// Says why nothing does.
fn decide(
    book: &mut Book,
    config: &Config,
    memory: &mut Memory,
    ask: Ask,
) -> Result<Vec<Change>, Refused> {
    match ask {
        Ask::Admit { label, job, unchanged_since } => {
            match unchanged_since.is_some_and(|index| index != book.changed_index()) {
                true => Err(Refused::new(
                    Reason::Changed,
                    "jobs came or went since the placement was computed",
                )),
                false => admit(book, config, memory, label, job).map(|change| alloc::vec![change]),
            }
        }
        Ask::Release { job, owner } => {
            released(book, job, owner).map(|job| repair_log::release(book, job))
        }
        Ask::Outage { parts, is_down, most_moved } => {
            Ok(repair_log::outage(book, &parts, is_down, most_moved)?)
        }
        Ask::Defragment { most_moved } => Ok(repair_log::defragment(book, most_moved)?),
    }
}

/// The job that is to be released, if it is there and may be.
///
/// # Errors
/// Says why not.
fn released(book: &Book, job: Which, owner: Option<String>) -> Result<JobId, Refused> {
    let (number, said) = match job {
        Which::Number(job) => (Some(job), job.to_string()),
        Which::Name(name) => (book.job_named(&name), alloc::format!("'{name}'")),
    };
    match number.and_then(|job| Some((job, book.jobs().get(&job)?))) {
        None => Err(Refused::new(Reason::NoJob, alloc::format!("there is no job {said}"))),
        Some((job, held)) if owner.is_some_and(|owner| owner != held.label.owner) => {
            let text = alloc::format!("job {job} belongs to '{}'", held.label.owner);
            Err(Refused::new(Reason::NotOwner, text))
        }
        Some((job, _)) => Ok(job),
    }
}

/// Finds a place for a job.
///
/// # Errors
/// Says what keeps it from being admitted.
fn admit(
    book: &mut Book,
    config: &Config,
    memory: &mut Memory,
    label: Label,
    job: Job,
) -> Result<Change, Refused> {
    if !label.is_valid() {
        let text = "a name has letters, digits, '.', '_' and '-', at most 64";
        return Err(Refused::new(Reason::BadName, text));
    }
    if let Some(other) = book.job_named(&label.name) {
        let text = alloc::format!("job {other} is called '{}' too", label.name);
        return Err(Refused::new(Reason::NameTaken, text));
    }
    place_job(book, config.abstraction, config.iterations, memory, label, job).map(Change::Admit)
}

/// Where a job would go if it were admitted now.
///
/// # Errors
/// Says what is missing.
pub fn place_job(
    book: &mut Book,
    abstraction: Abstraction,
    iterations: u32,
    memory: &mut Memory,
    label: Label,
    job: Job,
) -> Result<Held, Refused> {
    let request = PlacementRequest::new(&job, abstraction).map_err(|error| error.to_string())?;
    // The number that it would get is nobody's yet.
    let own = (book.next_index(), label.name.as_str(), &job);
    let others: Vec<Standing<'_>> = book.standings().collect();
    let request = request.avoiding(apart(book.ledger(), own, &others));
    let placement = search::place(book.ledger(), &request, memory, book.next_index(), iterations);
    let placement = placement.map_err(|refusal| {
        let reason = match refusal {
            Refusal::TooLarge { .. } => Reason::TooLarge,
            _ => Reason::NoRoom,
        };
        Refused::new(reason, refusal.to_string())
    })?;
    let demand = request.demand(placement.order);
    let slots = job.slots_per_worker;
    let dscp = book.free_dscp(demand, slots, abstraction, &placement.pieces);
    let dscp = dscp.map_err(|text| Refused::new(Reason::NoRoom, text))?;
    let (order, pieces) = (placement.order, placement.pieces);
    Ok(Held { label, dscp, job, abstraction, order, pieces })
}

/// The nodes whose plans change with a job: those that send something of it, its hosts, and those
/// of degraded jobs with its DSCP.
fn concerned(book: &Book, job: JobId) -> BTreeSet<NodeId> {
    let network = book.ledger().network();
    let loads = book.ledger().admissions().get(&job).map_or(&[][..], |admission| &admission.loads);
    let links = loads.iter().flat_map(|load| network.links_of(load.trunk));
    let mut nodes: BTreeSet<NodeId> = links.map(|link| network.ends(*link).0.node).collect();
    nodes.extend(hosts_of(book, job));
    let dscp = |job: &JobId| book.jobs().get(job).map(|held| held.dscp);
    let alike = book.degraded().filter(|other| dscp(other) == dscp(&job));
    nodes.extend(alike.flat_map(|other| hosts_of(book, other)));
    nodes
}

/// The nodes of a job's workers.
fn hosts_of(book: &Book, job: JobId) -> impl Iterator<Item = NodeId> + '_ {
    let pieces = book.jobs().get(&job).map_or(&[][..], |held| &held.pieces);
    pieces.iter().map(|piece| book.ledger().network().node_of(piece.host))
}

/// The plans of nodes; one that has no jobs has an empty one. A job's time is that of those who
/// send, its workers' hosts.
fn plans(book: &Book, staggering: &Staggering, nodes: &BTreeSet<NodeId>) -> BTreeMap<NodeId, Plan> {
    let network = book.ledger().network();
    let phases = staggering.phases(book);
    let mut plans: BTreeMap<NodeId, Plan> = nodes.iter().map(|node| (*node, Plan::new())).collect();
    for (link, trunk) in network.links() {
        let from = network.ends(link).0;
        let Some(plan) = plans.get_mut(&from.node) else { continue };
        plan.extend(book.on_trunk(trunk).iter().filter_map(|reserved| {
            let held = book.jobs().get(&reserved.job)?;
            let Job { burst_bytes, latency, .. } = held.job;
            let &Reserved { job, dscp, bps } = reserved;
            let phase = phases.get(&job).filter(|(_, hosts)| hosts.contains(&from.node));
            let phase = phase.map(|(phase, _)| *phase);
            Some(Share { port: from.port, job, dscp, bps, burst_bytes, latency, phase })
        }));
    }
    add_known_jobs(book, &mut plans);
    plans.values_mut().for_each(|plan| plan.sort_unstable_by_key(|share| (share.port, share.job)));
    plans
}

/// Adds shares of nothing for other jobs with workers on a host: its agent has to know that they
/// are there. These are jobs whose workers there send nothing beyond it, and degraded ones.
///
/// A degraded job has no queue of its own on its links, so it is left out while packets with its
/// DSCP may get the queue of another one there.
fn add_known_jobs(book: &Book, plans: &mut BTreeMap<NodeId, Plan>) {
    let network = book.ledger().network();
    let mut ports: BTreeMap<NodeId, u8> = BTreeMap::new();
    for (link, _) in network.links() {
        let from = network.ends(link).0;
        if !plans.contains_key(&from.node) {
            continue;
        }
        let port = ports.entry(from.node).or_insert(from.port);
        *port = from.port.min(*port);
    }
    let taken = book.dscps_on_links();
    let is_inside = |held: &Held| held.pieces.iter().all(|own| own.host == held.pieces[0].host);
    for (job, held) in book.jobs() {
        if book.is_degraded(*job) && taken.contains(&held.dscp) && !is_inside(held) {
            continue;
        }
        let Job { burst_bytes, latency, .. } = held.job;
        for node in hosts_of(book, *job) {
            let (Some(plan), Some(port)) = (plans.get_mut(&node), ports.get(&node)) else {
                continue;
            };
            if plan.iter().any(|share| share.job == *job) {
                continue;
            }
            let (port, job, dscp) = (*port, *job, held.dscp);
            plan.push(Share { port, job, dscp, bps: 0, burst_bytes, latency, phase: None });
        }
    }
}
