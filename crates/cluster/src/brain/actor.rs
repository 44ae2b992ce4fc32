//! The one task that owns the state machine: what happened goes in through a channel, what is to be done goes out.
//!
//! Claims of the lease run beside everything else, so a slow log does not lose the lease. Calls to the log run one after
//! another, in a task of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::log;
use fabric::topology::{LinkId, NodeId};
use parfait::agent::Reply;
use parfait::brain::{Ask, Brain, Denial, Effect, Image, Request, State, StorageError, place_job};
use parfait::job::Job;
use parfait::log::{Book, Held, Label, Outcome};
use parfait::mending::Part;
use parfait::placement::search::Memory;
use tokio::sync::{mpsc, oneshot, watch};

use super::events::Events;
use super::picture::{Picture, state_name};
use super::{Cluster, ITERATIONS};
use crate::convert::{position_message, share_message};
use crate::kubernetes::nodes_by_rank;
use crate::proto;
use crate::store::{Candidate, Holder, Store};
use crate::view::{BrainView, View};

/// Commands that wait for one agent; the state machine has one outstanding, and sends it again.
pub(super) const MAX_COMMANDS: usize = 4;

/// A view is made at most so often while things change.
const VIEW_EVERY: Duration = Duration::from_millis(200);

/// And so often while nothing does, since measurements and silences change by themselves.
const VIEW_IDLE: Duration = Duration::from_secs(1);

/// Larger topologies are shown so often.
const LARGE_NODES: usize = 5_000;
const LARGE_EVERY: Duration = Duration::from_secs(10);

/// A carrier that changed is believed after so long.
const SETTLES: Duration = Duration::from_secs(2);

/// Most workers that are moved when a link goes down by itself.
const MOST_MOVED: u32 = 4096;

/// What becomes of a request.
pub(super) type Answer = Result<Outcome, Denial>;

/// Where a job would go, and the entry since which that holds; `None` from a brain that does not lead.
pub(super) type Placing = Option<(Result<proto::Held, String>, u64)>;

/// The nodes of a placed job's workers by rank, if there is such a job; `None` from a brain that does not lead.
pub(super) type Found = Option<Option<Vec<String>>>;

/// Something that happened outside.
#[derive(Debug)]
pub(super) enum Input {
    Claimed { ticket: u64, holder: Result<Holder, StorageError> },
    Opened { ticket: u64, opened: Result<Image, StorageError> },
    Stored { ticket: u64, stored: Result<(), StorageError> },
    Ask { request: Request, answer: oneshot::Sender<Answer> },
    Place { label: Label, job: Job, answer: oneshot::Sender<Placing> },
    Book { answer: oneshot::Sender<Option<(Vec<proto::Held>, u64)>> },
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
    pub(super) enforcer: String,
    pub(super) note: String,
    pub(super) heard: Instant,
}

/// A call to the log.
enum LogCall {
    Open { ticket: u64, term: u64 },
    Append { opening: u64, ticket: u64, at: u64, bytes: Vec<u8> },
    Snapshot { opening: u64, ticket: u64, bytes: Vec<u8> },
}

pub(super) struct Actor<S> {
    brain: Brain,
    store: Arc<S>,
    candidate: Candidate,
    cluster: Cluster,
    store_name: String,
    begun: Instant,
    inputs: mpsc::Receiver<Input>,
    sender: mpsc::Sender<Input>,
    log_calls: mpsc::Sender<LogCall>,
    /// What is to be appended with the next sync.
    appending: Option<(u64, Vec<u8>)>,
    waiting: BTreeMap<(u64, u64), Vec<oneshot::Sender<Answer>>>,
    agents: BTreeMap<NodeId, Attached>,
    leader: Option<Holder>,
    state: State,
    view: watch::Sender<Arc<View>>,
    viewed: Option<Instant>,
    is_changed: bool,
    events: Arc<Events>,
    memory: Memory,
    /// Links whose carrier differs from what is known: who said so, and since when.
    unsettled: BTreeMap<LinkId, (NodeId, Instant)>,
    /// Links that are down by the word of an agent.
    reported: BTreeMap<LinkId, NodeId>,
    /// Of requests of the brain itself.
    own_sequence: u64,
}

impl<S: Store> Actor<S> {
    #[expect(
        clippy::too_many_arguments,
        reason = "it is made in one place, from what the daemon has"
    )]
    pub(super) fn new(
        brain: Brain,
        store: Arc<S>,
        candidate: Candidate,
        cluster: Cluster,
        store_name: String,
        (sender, inputs): (mpsc::Sender<Input>, mpsc::Receiver<Input>),
        view: watch::Sender<Arc<View>>,
        events: Arc<Events>,
    ) -> Actor<S> {
        // The state machine has one call outstanding; an opening may follow one that is still under way.
        let (log_calls, calls) = mpsc::channel(16);
        tokio::spawn(serve_log(Arc::clone(&store), calls, sender.clone()));
        Actor {
            state: brain.state(),
            brain,
            store,
            candidate,
            cluster,
            store_name,
            begun: Instant::now(),
            inputs,
            sender,
            log_calls,
            appending: None,
            waiting: BTreeMap::new(),
            agents: BTreeMap::new(),
            leader: None,
            view,
            viewed: None,
            is_changed: true,
            events,
            memory: Memory::new(),
            unsettled: BTreeMap::new(),
            reported: BTreeMap::new(),
            own_sequence: 0,
        }
    }

    /// Nanoseconds since the actor began, and one second more: the state machine takes 0 for long ago.
    fn now_ns(&self) -> u64 {
        (self.begun.elapsed() + Duration::from_secs(1)).as_nanos() as u64
    }

    /// Runs for ever.
    pub(super) async fn run(mut self) {
        loop {
            let now_ns = self.now_ns();
            let due = Duration::from_nanos(self.brain.poll_timeout().saturating_sub(now_ns));
            tokio::select! {
                input = self.inputs.recv() => match input {
                    Some(input) => self.handle(input),
                    None => return,
                },
                () = tokio::time::sleep(due.min(VIEW_EVERY)) => {}
            }
            let now_ns = self.now_ns();
            if self.brain.poll_timeout() <= now_ns {
                self.brain.handle_timeout(now_ns);
            }
            self.carry_out();
            self.note_state();
            self.show();
        }
    }

    fn handle(&mut self, input: Input) {
        let now_ns = self.now_ns();
        match input {
            Input::Claimed { ticket, holder: Ok(holder) } => {
                self.brain.handle_lease(ticket, holder.lease, now_ns);
                self.is_changed |= self.leader.as_ref() != Some(&holder);
                self.leader = Some(holder);
            }
            Input::Claimed { holder: Err(error), .. } => {
                log::line(format_args!("the lease: {error}"));
            }
            Input::Opened { ticket, opened } => {
                if let Err(error) = &opened {
                    log::line(format_args!("opening the log: {error}"));
                }
                self.brain.handle_opened(ticket, opened, now_ns);
            }
            Input::Stored { ticket, stored } => {
                if let Err(error) = &stored {
                    log::line(format_args!("writing the log: {error}"));
                }
                self.brain.handle_stored(ticket, stored, now_ns);
                self.is_changed = true;
            }
            Input::Ask { request, answer } => self.ask(request, answer, now_ns),
            // Who asked may be gone.
            Input::Place { label, job, answer } => drop(answer.send(self.place(label, job))),
            Input::Book { answer } => drop(answer.send(self.book())),
            Input::Show { answer } => {
                // What the caller did before is in it.
                if self.is_changed {
                    self.viewed = None;
                    self.show();
                }
                // Who asked may be gone.
                let _ = answer.send(());
            }
            Input::Find { name, answer } => drop(answer.send(self.find(&name))),
            Input::Attached { name, agent, answer } => {
                let attached = self.attach(&name, agent, now_ns);
                drop(answer.send(attached));
            }
            Input::Detached { node, number } => {
                if self.agents.get(&node).is_some_and(|agent| agent.number == number) {
                    self.agents.remove(&node);
                    let name = self.brain.network().node_name(node);
                    self.events.note("agent", None, format!("the agent of '{name}' is gone"));
                    self.is_changed = true;
                }
            }
            Input::Reply { node, number, reply, note, down } => {
                self.reply(node, number, reply, note);
                self.links(node, &down, now_ns);
            }
        }
    }

    fn ask(&mut self, request: Request, answer: oneshot::Sender<Answer>, now_ns: u64) {
        let key = (request.client, request.sequence);
        self.waiting.entry(key).or_default().push(answer);
        self.brain.handle_request(request, now_ns);
    }

    fn leading_book(&self) -> Option<&Book> {
        match self.brain.state() {
            State::Leading => self.brain.book().map(|(book, _)| book),
            _ => None,
        }
    }

    fn place(&mut self, label: Label, job: Job) -> Placing {
        let mut book = self.leading_book()?.clone();
        let since = book.changed_index();
        let abstraction = parfait::demand::Abstraction::Parfait;
        let placed = place_job(&mut book, abstraction, ITERATIONS, &mut self.memory, label, job);
        let network = self.brain.network();
        Some((placed.map(|held: Held| crate::convert::held_message(0, &held, network)), since))
    }

    fn book(&self) -> Option<(Vec<proto::Held>, u64)> {
        let book = self.leading_book()?;
        let network = self.brain.network();
        let held = book.jobs().iter();
        let held = held.map(|(job, held)| crate::convert::held_message(*job, held, network));
        Some((held.collect(), book.changed_index()))
    }

    fn find(&self, name: &str) -> Found {
        let book = self.leading_book()?;
        let network = self.brain.network();
        let held = book.job_named(name).and_then(|job| book.jobs().get(&job));
        let nodes = held.map(|held| {
            let name_of = |host| network.host_name(host);
            nodes_by_rank(&held.job.pattern, held.order, &held.pieces, name_of)
        });
        Some(nodes)
    }

    fn attach(&mut self, name: &str, agent: Attached, now_ns: u64) -> Result<NodeId, NotAttached> {
        if self.brain.state() != State::Leading {
            return Err(NotAttached::NotLeading);
        }
        let network = self.brain.network();
        let node = self.brain.governed().iter().find(|node| network.node_name(**node) == name);
        let node = *node.ok_or_else(|| NotAttached::NoNode(name.to_owned()))?;
        let enforcer = agent.enforcer.clone();
        if self.agents.insert(node, agent).is_some() {
            log::line(format_args!("a second agent of '{name}' took the place of the first"));
        }
        self.events.note("agent", None, format!("the agent of '{name}' is here, with {enforcer}"));
        self.is_changed = true;
        self.brain.handle_attached(node, now_ns);
        Ok(node)
    }

    fn reply(&mut self, node: NodeId, number: u64, reply: Reply, note: String) {
        let Some(agent) = self.agents.get_mut(&node) else { return };
        if agent.number != number {
            return;
        }
        agent.heard = Instant::now();
        agent.note = note;
        if let Err(objection) = &reply.verdict {
            let name = self.brain.network().node_name(node);
            let text =
                format!("the agent of '{name}' refuses its plan: {objection}; {}", agent.note);
            log::line(&text);
            self.events.note("alarm", None, text);
        }
        self.brain.handle_reply(node, reply);
        self.is_changed = true;
    }

    /// Notes ports without a carrier. A link that changed and stays so for a while is an outage, or the end of one.
    fn links(&mut self, node: NodeId, down: &BTreeSet<u8>, now_ns: u64) {
        let Some(book) = self.leading_book() else { return };
        let topology = &self.cluster.topology;
        let ports = topology.node(node).links();
        let known: BTreeSet<LinkId> = book.outage().links().collect();
        let changed: Vec<(LinkId, bool)> = ports
            .map(|(port, link)| (link, down.contains(&port)))
            .filter(|(link, is_down)| known.contains(link) != *is_down)
            .collect();
        for (_, link) in topology.node(node).links() {
            let is_changed = changed.iter().any(|(own, _)| *own == link);
            // An end without an agent says nothing, and one that has no carrier speaks for both.
            if !is_changed && self.unsettled.get(&link).is_some_and(|(by, _)| *by == node) {
                self.unsettled.remove(&link);
            }
        }
        for (link, is_down) in changed {
            let said_by_other = !is_down && self.reported.get(&link).is_some_and(|by| *by != node);
            if said_by_other {
                continue;
            }
            let (_, since) = *self.unsettled.entry(link).or_insert((node, Instant::now()));
            if since.elapsed() < SETTLES {
                continue;
            }
            self.unsettled.remove(&link);
            match is_down {
                true => self.reported.insert(link, node),
                false => self.reported.remove(&link),
            };
            self.own_sequence += 1;
            let ask =
                Ask::Outage { parts: vec![Part::Link(link)], is_down, most_moved: MOST_MOVED };
            let request =
                Request { client: self.candidate.number, sequence: self.own_sequence, ask };
            let name = self.cluster.topology.node(node).name();
            let word = if is_down { "has no carrier" } else { "has a carrier again" };
            let text = format!("a link of '{name}' {word}");
            log::line(&text);
            self.events.note("link", None, text);
            self.brain.handle_request(request, now_ns);
        }
    }

    /// Does what the state machine asks for.
    fn carry_out(&mut self) {
        while let Some(effect) = self.brain.poll_effect() {
            match effect {
                Effect::Claim { ticket } => self.claim(ticket),
                Effect::Open { ticket, term } => {
                    self.appending = None;
                    self.call_log(LogCall::Open { ticket, term });
                }
                Effect::Append { at, bytes, .. } => self.appending = Some((at, bytes)),
                Effect::Sync { opening, ticket } => {
                    if let Some((at, bytes)) = self.appending.take() {
                        self.call_log(LogCall::Append { opening, ticket, at, bytes });
                    }
                }
                Effect::Snapshot { opening, ticket, bytes } => {
                    self.call_log(LogCall::Snapshot { opening, ticket, bytes });
                }
                Effect::Send { node, command } => self.send(node, &command),
                Effect::Answer { client, sequence, answer } => {
                    self.note_answer(&answer);
                    for waiting in self.waiting.remove(&(client, sequence)).into_iter().flatten() {
                        // Whoever asked may be gone, and asks again.
                        let _ = waiting.send(answer.clone());
                    }
                }
            }
        }
    }

    fn claim(&self, ticket: u64) {
        let (store, candidate) = (Arc::clone(&self.store), self.candidate.clone());
        let sender = self.sender.clone();
        tokio::spawn(async move {
            let holder = store.claim(&candidate).await;
            // Without an actor nobody needs it.
            let _ = sender.send(Input::Claimed { ticket, holder }).await;
        });
    }

    /// A full queue means that the log hangs: the state machine opens it again after a while.
    fn call_log(&self, call: LogCall) {
        if self.log_calls.try_send(call).is_err() {
            log::line("the log hangs");
        }
    }

    fn send(&mut self, node: NodeId, command: &parfait::agent::Command) {
        let Some(agent) = self.agents.get(&node) else { return };
        let book = self.brain.book().map(|(book, _)| book);
        let name = |job| {
            let held = book.and_then(|book| book.jobs().get(&job));
            held.map_or("", |held| held.label.name.as_str())
        };
        let plan = command.plan.iter().map(|share| share_message(share, name(share.job)));
        let message =
            proto::Command { position: position_message(command.position), plan: plan.collect() };
        // A full queue is that of a slow agent: the state machine sends the plan again.
        let _ = agent.commands.try_send(message);
    }

    fn note_answer(&self, answer: &Answer) {
        let name = |job: &u64| {
            let held = self.brain.book().and_then(|(book, _)| book.jobs().get(job));
            held.map_or_else(String::new, |held| format!(" '{}': {}", held.label.name, held.job))
        };
        match answer {
            Ok(Outcome::Admitted(job)) => {
                self.events.note("admitted", Some(*job), format!("job {job}{}", name(job)));
            }
            Ok(Outcome::Released(job)) => {
                self.events.note("released", Some(*job), format!("job {job} is released"));
            }
            Ok(Outcome::Repaired { hit, moved, degraded }) => self.events.note(
                "moved",
                None,
                format!("{hit} jobs were hit, {moved} workers have other hosts, {degraded} jobs are degraded"),
            ),
            Ok(Outcome::Refused(reason)) => self.events.note("refused", None, reason.clone()),
            Err(_) => {}
        }
    }

    fn note_state(&mut self) {
        let state = self.brain.state();
        if state == self.state {
            return;
        }
        let term = self.brain.term().unwrap_or_default();
        match state {
            State::Leading => {
                let jobs = self.brain.book().map_or(0, |(book, _)| book.jobs().len());
                let text =
                    format!("{} leads in term {term}, with {jobs} jobs", self.candidate.address);
                log::line(&text);
                self.events.note("leading", None, text);
            }
            State::Standby if self.state != State::Standby => {
                let why =
                    self.brain.last_error().map_or_else(String::new, |why| format!(": {why}"));
                log::line(format_args!("stands by{why}"));
            }
            _ => {}
        }
        if matches!(state, State::Standby | State::Opening) {
            // Their streams end, and they look for the leader.
            self.agents.clear();
        }
        self.state = state;
        self.is_changed = true;
    }

    fn show(&mut self) {
        let is_large = self.cluster.topology.nodes().len() > LARGE_NODES;
        let every = match (is_large, self.is_changed) {
            (true, _) => LARGE_EVERY,
            (false, true) => VIEW_EVERY,
            (false, false) => VIEW_IDLE,
        };
        if self.viewed.is_some_and(|viewed| viewed.elapsed() < every) {
            return;
        }
        // Those whose clients gave up.
        self.waiting.retain(|_, answers| {
            answers.retain(|answer| !answer.is_closed());
            !answers.is_empty()
        });
        let about = BrainView {
            address: self.candidate.address.clone(),
            state: state_name(self.state).to_owned(),
            term: self.brain.term().unwrap_or_default(),
            leader: self.leader.as_ref().map(|leader| leader.address.clone()),
            log_index: self.brain.book().map_or(0, |(book, _)| book.next_index()),
            store: self.store_name.clone(),
        };
        let (topology, agents) = (&self.cluster.topology, &self.agents);
        let view = Picture { brain: &self.brain, topology, agents, about }.view();
        self.view.send_replace(Arc::new(view));
        self.viewed = Some(Instant::now());
        self.is_changed = false;
    }
}

/// Calls the log, one call after another.
async fn serve_log<S: Store>(
    store: Arc<S>,
    mut calls: mpsc::Receiver<LogCall>,
    sender: mpsc::Sender<Input>,
) {
    while let Some(call) = calls.recv().await {
        let input = match call {
            LogCall::Open { ticket, term } => {
                Input::Opened { ticket, opened: store.open(term, ticket).await }
            }
            LogCall::Append { opening, ticket, at, bytes } => {
                Input::Stored { ticket, stored: store.append(opening, at, bytes).await }
            }
            LogCall::Snapshot { opening, ticket, bytes } => {
                Input::Stored { ticket, stored: store.snapshot(opening, bytes).await }
            }
        };
        if sender.send(input).await.is_err() {
            return;
        }
    }
}
