//! What goes into the actor, and the answers to it. Nothing here is decided.

use std::collections::BTreeSet;
use std::time::Instant;

use parfait::agent::Reply;
use parfait::brain::{Denial, Image, Request, StorageError};
use parfait::job::Job;
use parfait::log::{Label, Outcome};
use tokio::sync::{mpsc, oneshot};
use topology::graph::NodeId;

use super::placing::{Caller, Placed};
use crate::proto::{self, Serialised};
use crate::store::Holder;

/// Requests of clients and agents that wait for the actor; more wait in their connections.
pub(super) const MAX_INPUTS: usize = 4096;

/// Commands that wait for one agent; the state machine has one outstanding, and sends it again.
pub(super) const MAX_COMMANDS: usize = 4;

/// What becomes of a request.
pub(super) type Answer = Result<Outcome, Denial>;

/// A placed job, if there is one of that name; `None` from a brain that does not lead.
pub(super) type Found = Option<Option<FoundJob>>;

/// A job that was looked for by its name.
#[derive(Debug)]
pub(super) struct FoundJob {
    pub(super) owner: String,
    pub(super) job: Job,
    /// The nodes of its workers, by rank.
    pub(super) nodes: Vec<String>,
}

/// Something that happened outside.
#[derive(Debug)]
pub(super) enum Input {
    Claimed { ticket: u64, holder: Result<Holder, StorageError> },
    Opened { ticket: u64, opened: Result<Image, StorageError> },
    Stored { ticket: u64, stored: Result<(), StorageError> },
    Ask { request: Request, answer: oneshot::Sender<Answer> },
    Place { caller: Caller, label: Label, job: Job, answer: oneshot::Sender<Placed> },
    Tried,
    Topology { answer: oneshot::Sender<Option<Serialised>> },
    Show { answer: oneshot::Sender<()> },
    Find { name: String, answer: oneshot::Sender<Found> },
    Attached { name: String, agent: Attached, answer: oneshot::Sender<Result<NodeId, NotAttached>> },
    Detached { node: NodeId, number: u64 },
    Reply { node: NodeId, number: u64, reply: Reply, note: String, down: BTreeSet<u8> },
}

/// Why an agent is not wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotAttached {
    NotLeading,
    NoNode(String),
}

/// An agent that is connected.
#[derive(Debug)]
pub(super) struct Attached {
    /// Tells connections of one node apart.
    pub(super) number: u64,
    pub(super) commands: mpsc::Sender<proto::Command>,
    /// What it drew for this connection.
    pub(super) nonce: Vec<u8>,
    pub(super) enforcer: String,
    pub(super) note: String,
    pub(super) heard: Instant,
    /// Its ports, as it says; none from agents of older versions.
    pub(super) ports: Vec<proto::Port>,
    /// Where these are not those of the topology, found when it came.
    pub(super) faults: Vec<String>,
}
