//! The one task that owns the state machine: what happened goes in through a channel, what is to be
//! done goes out.
//!
//! Claims of the lease run beside everything else, so a slow log does not lose the lease. Calls to
//! the log run one after another, in a task of their own. All of them end with the actor: no claim
//! takes the lease back that was resigned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parfait::agent::Reply;
use parfait::brain::{self as machine, Ask, Brain, Effect, Request, State, StorageError};
use parfait::job::Job;
use parfait::log::{Book, Label, Outcome};
use parfait::repair_log::Part;
use parfait::site::Ground;
use parfait::spread::Ecmp;
use service::auth;
use service::log;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use topology::graph::{LinkId, NodeId};

use super::Cluster;
use super::events::Events;
use super::inputs::{Answer, Attached, Found, FoundJob, Input, NotAttached};
use super::picture::{Picture, state_name};
use super::placing::{self, Caller, NoTrial, Placed, Placing, Waiting};
use crate::convert::{self, position_message, share_message};
use crate::keys::Key;
use crate::kubernetes::nodes_by_rank;
use crate::proto::{self, Serialised};
use crate::store::{Candidate, Holder, Store, UNSIGNED_HINT};
use crate::view::{BrainView, View};
use crate::words::counted;

/// A view is made at most so often while things change.
const VIEW_EVERY: Duration = Duration::from_millis(200);

/// And so often while nothing does, since measurements and silences change by themselves.
const VIEW_IDLE: Duration = Duration::from_secs(1);

/// Who waits for a view gets one once so many times its cost have passed since the last one: views
/// take at most a fifth of the actor's time, however many ask.
const VIEW_SPARE: u32 = 4;

/// Larger topologies are shown so often.
const LARGE_NODES: usize = 5_000;
const LARGE_EVERY: Duration = Duration::from_secs(10);

/// A carrier that changed is believed after so long.
const SETTLES: Duration = Duration::from_secs(2);

/// Most workers that are moved when a link goes down by itself.
const MOST_MOVED: u32 = 4096;

/// Parts that a line of the log names.
const MAX_NAMED: usize = 8;

/// A call to the log.
enum LogCall {
    Open { ticket: u64, term: u64 },
    Append { opening: u64, ticket: u64, at: u64, bytes: Vec<u8> },
    Snapshot { opening: u64, ticket: u64, bytes: Vec<u8> },
}

/// What a brain is made from.
#[derive(Debug)]
pub struct Parts<S> {
    /// Times and sizes of the state machine.
    pub machine: machine::Config,
    /// Hosts, switches and links.
    pub cluster: Cluster,
    /// What the ledger stands on: [`Cluster::ground`].
    pub ground: Ground,
    /// Switches that have an agent.
    pub switches: Vec<NodeId>,
    /// Where the lease and the log are.
    pub store: Arc<S>,
    /// Who it is.
    pub candidate: Candidate,
    /// Where the log is, for people.
    pub store_name: String,
    /// Signs plans.
    pub plan_key: Key,
}

pub(super) struct Actor<S> {
    brain: Brain,
    store: Arc<S>,
    candidate: Candidate,
    cluster: Cluster,
    store_name: String,
    plan_key: Key,
    begun: Instant,
    inputs: mpsc::Receiver<Input>,
    /// What the store answers; it goes first.
    stored: mpsc::Receiver<Input>,
    sender: mpsc::Sender<Input>,
    log_calls: mpsc::Sender<LogCall>,
    /// Calls of the store under way.
    calls: JoinSet<()>,
    /// What is to be appended with the next sync.
    appending: Option<(u64, Vec<u8>)>,
    waiting: BTreeMap<(u64, u64), Vec<oneshot::Sender<Answer>>>,
    agents: BTreeMap<NodeId, Attached>,
    leader: Option<Holder>,
    state: State,
    view: watch::Sender<Arc<View>>,
    viewed: Option<Instant>,
    /// Views made.
    views: u64,
    /// What the last view took.
    view_cost: Duration,
    /// Those who wait for a view that has what they did before.
    showing: Vec<oneshot::Sender<()>>,
    is_changed: bool,
    /// The reply to who asks for the topology, and the entry of the log that changed it last.
    topology: Option<(u64, Serialised)>,
    /// How often that reply was made.
    serialised: u64,
    events: Arc<Events>,
    placing: Placing,
    /// Trials that were refused because too many wait.
    refused_trials: u64,
    /// Requests whose caller was gone when their turn came.
    abandoned: u64,
    /// Since when links differ from what is known.
    unsettled: BTreeMap<LinkId, Instant>,
    /// Links that agents said are down, and those who still say so.
    reported: BTreeMap<LinkId, BTreeSet<NodeId>>,
    /// Of requests of the brain itself.
    own_sequence: u64,
}

impl<S: Store> Actor<S> {
    pub(super) fn new(
        parts: Parts<S>,
        inputs: mpsc::Receiver<Input>,
        view: watch::Sender<Arc<View>>,
        events: Arc<Events>,
    ) -> Actor<S> {
        let Parts { machine, cluster, ground, switches, store, candidate, store_name, plan_key } =
            parts;
        let brain = Brain::new(machine, ground, &switches);
        // The state machine has one call outstanding; an opening may follow one that is still under
        // way.
        let (log_calls, to_serve) = mpsc::channel(16);
        let (sender, stored) = mpsc::channel(16);
        let mut calls = JoinSet::new();
        calls.spawn(serve_log(Arc::clone(&store), to_serve, sender.clone()));
        Actor {
            state: brain.state(),
            brain,
            store,
            candidate,
            cluster,
            store_name,
            plan_key,
            begun: Instant::now(),
            inputs,
            stored,
            sender,
            log_calls,
            calls,
            appending: None,
            waiting: BTreeMap::new(),
            agents: BTreeMap::new(),
            leader: None,
            view,
            viewed: None,
            views: 0,
            view_cost: Duration::ZERO,
            showing: Vec::new(),
            is_changed: true,
            topology: None,
            serialised: 0,
            events,
            placing: Placing::new(),
            refused_trials: 0,
            abandoned: 0,
            unsettled: BTreeMap::new(),
            reported: BTreeMap::new(),
            own_sequence: 0,
        }
    }

    /// Nanoseconds since the actor began, and one second more: the state machine takes 0 for long
    /// ago.
    fn now_ns(&self) -> u64 {
        (self.begun.elapsed() + Duration::from_secs(1)).as_nanos() as u64
    }

    /// Runs for ever.
    pub(super) async fn run(mut self) {
        loop {
            let now_ns = self.now_ns();
            let due = Duration::from_nanos(self.brain.poll_timeout().saturating_sub(now_ns));
            let due = due.min(self.view_due()).min(VIEW_EVERY);
            tokio::select! {
                biased;
                // However many ask, the lease is kept and what is durable is answered.
                Some(input) = self.stored.recv() => self.handle(input),
                input = self.inputs.recv() => match input {
                    Some(input) => self.handle(input),
                    None => return,
                },
                () = tokio::time::sleep(due) => {}
            }
            let now_ns = self.now_ns();
            if self.brain.poll_timeout() <= now_ns {
                self.brain.handle_timeout(now_ns);
            }
            self.carry_out();
            self.try_next();
            self.note_state();
            self.show();
            // Claims that this turn began are tasks of the same thread as long as no other one
            // takes them.
            tokio::task::yield_now().await;
        }
    }

    fn handle(&mut self, input: Input) {
        let now_ns = self.now_ns();
        match input {
            Input::Claimed { ticket, holder: Ok(holder) } => {
                self.brain.handle_lease(ticket, holder.lease, now_ns);
                if self.leader.as_ref() != Some(&holder) {
                    self.is_changed = true;
                    if holder.lease.holder != self.candidate.number {
                        let Holder { address, lease } = &holder;
                        log::line(format_args!(
                            "stands by: {address} leads in term {}",
                            lease.term
                        ));
                    }
                    self.leader = Some(holder);
                }
            }
            Input::Claimed { holder: Err(error), .. } => {
                self.report_failure("the lease", &error);
            }
            Input::Opened { ticket, opened } => {
                if let Err(error) = &opened {
                    self.report_failure("opening the log", error);
                }
                self.brain.handle_opened(ticket, opened, now_ns);
            }
            Input::Stored { ticket, stored } => {
                if let Err(error) = &stored {
                    self.report_failure("writing the log", error);
                }
                self.brain.handle_stored(ticket, stored, now_ns);
                self.is_changed = true;
            }
            Input::Ask { request, answer } => self.ask(request, answer, now_ns),
            Input::Place { caller, label, job, answer } => self.place(caller, label, job, answer),
            // The next trial follows.
            Input::Tried => {}
            // Who asked may be gone.
            Input::Topology { answer } => drop(answer.send(self.topology())),
            Input::Show { answer } => self.showing.push(answer),
            Input::Find { name, answer } => drop(answer.send(self.find(&name))),
            Input::Attached { name, agent, answer } => {
                let attached = self.attach(&name, agent, now_ns);
                drop(answer.send(attached));
            }
            Input::Detached { node, number } => {
                if self.agents.get(&node).is_some_and(|agent| agent.number == number) {
                    self.forget(node);
                }
            }
            Input::Reply { node, number, reply, note, down } => {
                self.reply(node, number, reply, note);
                self.links(node, &down, now_ns);
            }
        }
    }

    /// Reports a call of the store that failed, with the store's reason; of signatures also what to
    /// do.
    fn report_failure(&self, what: &str, error: &StorageError) {
        let reason = self.store.report().last_failure;
        match (error, reason) {
            (StorageError::Unsigned, Some(why)) => {
                log::line(format_args!("{what}: {why}; hint: {UNSIGNED_HINT}"));
            }
            (_, Some(why)) => log::line(format_args!("{what}: {error}: {why}")),
            (_, None) => log::line(format_args!("{what}: {error}")),
        }
    }

    fn ask(&mut self, request: Request, answer: oneshot::Sender<Answer>, now_ns: u64) {
        // Who went while the request waited here asks again, or does not want it any more.
        if answer.is_closed() {
            self.abandoned += 1;
            return;
        }
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

    /// Has a trial wait for its turn.
    fn place(&mut self, caller: Caller, label: Label, job: Job, answer: oneshot::Sender<Placed>) {
        if self.leading_book().is_none() {
            let _ = answer.send(Err(NoTrial::NotLeading));
        } else if !self.placing.push(caller, Waiting { label, job, answer }) {
            self.refused_trials += 1;
        }
    }

    /// Begins the next trial, if none runs.
    fn try_next(&mut self) {
        let Some((trial, lent)) = self.placing.next() else { return };
        let Some(book) = self.leading_book().cloned() else { return };
        let sender = self.sender.clone();
        self.calls.spawn_blocking(move || {
            placing::place(trial, book, lent);
            // An actor that has no room for it looks soon.
            let _ = sender.try_send(Input::Tried);
        });
    }

    /// The topology and all jobs, serialised once for all who ask before the jobs change.
    fn topology(&mut self) -> Option<Serialised> {
        let book = self.leading_book()?;
        let unchanged_since = book.changed_index();
        if let Some((since, reply)) = &self.topology
            && *since == unchanged_since
        {
            return Some(reply.clone());
        }
        let network = self.brain.network();
        let held = book.jobs().iter().map(|(job, held)| {
            let is_degraded = book.is_degraded(*job);
            proto::Held { is_degraded, ..convert::held_message(*job, held, network) }
        });
        let Cluster { text, slots, reservable_ppm, ecmp, .. } = &self.cluster;
        let reply = Serialised::of(&proto::TopologyReply {
            topology: text.clone(),
            slots: *slots,
            reservable_ppm: *reservable_ppm,
            ecmp: match ecmp {
                Ecmp::Even => "even",
                Ecmp::Worst => "worst",
            }
            .to_owned(),
            held: held.collect(),
            unchanged_since,
            down: Some(convert::down_message(&book.names_down())),
        });
        self.serialised += 1;
        self.topology = Some((unchanged_since, reply.clone()));
        Some(reply)
    }

    fn find(&self, name: &str) -> Found {
        let book = self.leading_book()?;
        let network = self.brain.network();
        let held = book.job_named(name).and_then(|job| book.jobs().get(&job));
        let found = held.map(|held| {
            let name_of = |host| network.host_name(host);
            let nodes = nodes_by_rank(&held.job.pattern, held.order, &held.pieces, name_of);
            FoundJob { owner: held.label.owner.clone(), job: held.job.clone(), nodes }
        });
        Some(found)
    }

    fn attach(
        &mut self,
        name: &str,
        mut agent: Attached,
        now_ns: u64,
    ) -> Result<NodeId, NotAttached> {
        if self.brain.state() != State::Leading {
            return Err(NotAttached::NotLeading);
        }
        let network = self.brain.network();
        let node = self.brain.governed().iter().find(|node| network.node_name(**node) == name);
        let node = *node.ok_or_else(|| NotAttached::NoNode(name.to_owned()))?;
        let enforcer = agent.enforcer.clone();
        agent.faults = port_faults(&self.cluster, node, &agent.ports);
        let faults = agent.faults.clone();
        if self.agents.insert(node, agent).is_some() {
            log::line(format_args!("a second agent of '{name}' took the place of the first"));
        }
        self.events.note("agent", None, format!("the agent of '{name}' is here, with {enforcer}"));
        for fault in faults {
            log::refusal(&fault);
            self.events.note("alarm", None, fault);
        }
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
        let before = self.brain.objection(node);
        self.brain.handle_reply(node, reply);
        self.is_changed = true;
        // Each report repeats it, and only the first one is news.
        if let Some(objection) = self.brain.objection(node).filter(|now| before != Some(*now)) {
            let name = self.brain.network().node_name(node);
            let note = self.agents.get(&node).map_or("", |agent| &agent.note);
            let text = format!("the agent of '{name}' refuses its plan: {objection}; {note}");
            log::line(&text);
            self.events.note("alarm", None, text);
        }
    }

    /// Notes ports without a carrier. A link that an agent said is down, or none says any more, is
    /// an outage or the end of one after a while. A link that no agent said is down is left to
    /// people.
    fn links(&mut self, node: NodeId, down: &BTreeSet<u8>, now_ns: u64) {
        let Some(book) = self.leading_book() else { return };
        let known: BTreeSet<LinkId> = book.outage().links().collect();
        let ports: Vec<(u8, LinkId)> = self.cluster.topology.node(node).links().collect();
        for (port, link) in ports {
            if down.contains(&port) {
                self.reported.entry(link).or_default().insert(node);
            }
            let Some(by) = self.reported.get_mut(&link) else { continue };
            if !down.contains(&port) {
                by.remove(&node);
            }
            let is_down = !by.is_empty();
            if is_down != known.contains(&link) {
                self.settle(node, link, is_down, now_ns);
                continue;
            }
            self.unsettled.remove(&link);
            if !is_down {
                self.reported.remove(&link);
            }
        }
    }

    /// A link is not as it is known to be: once it has been so for long enough, that is an outage,
    /// or the end of one.
    fn settle(&mut self, node: NodeId, link: LinkId, is_down: bool, now_ns: u64) {
        let since = *self.unsettled.entry(link).or_insert_with(Instant::now);
        if since.elapsed() < SETTLES {
            return;
        }
        self.unsettled.remove(&link);
        self.own_sequence += 1;
        let ask = Ask::Outage { parts: vec![Part::Carrier(link)], is_down, most_moved: MOST_MOVED };
        let request = Request { client: self.candidate.number, sequence: self.own_sequence, ask };
        let name = self.cluster.topology.node(node).name();
        let word = if is_down { "has no carrier" } else { "has a carrier again" };
        let text = format!("a link of '{name}' {word}");
        log::line(&text);
        self.events.note("link", None, text);
        self.brain.handle_request(request, now_ns);
    }

    /// An agent is gone, and its word on carriers with it.
    fn forget(&mut self, node: NodeId) {
        self.agents.remove(&node);
        for by in self.reported.values_mut() {
            by.remove(&node);
        }
        let name = self.brain.network().node_name(node);
        self.events.note("agent", None, format!("the agent of '{name}' is gone"));
        self.is_changed = true;
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

    fn claim(&mut self, ticket: u64) {
        // Claims that ended.
        while self.calls.try_join_next().is_some() {}
        let (store, candidate) = (Arc::clone(&self.store), self.candidate.clone());
        let sender = self.sender.clone();
        self.calls.spawn(async move {
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
        let order = proto::Order {
            node: self.brain.network().node_name(node).to_owned(),
            nonce: agent.nonce.clone(),
            position: position_message(command.position),
            plan: plan.collect(),
        };
        let message = convert::signed(&order, &self.plan_key);
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
            Ok(Outcome::Released { job, restored }) => {
                self.events.note("released", Some(*job), format!("job {job} is released"));
                for job in restored {
                    let text = format!("job {job}{} has its guarantee again", name(job));
                    self.events.note("moved", Some(*job), text);
                }
            }
            Ok(Outcome::Repaired { hit, moved, degraded }) => self.events.note(
                "moved",
                None,
                format!(
                    "{} hit, {} moved to other hosts, {} degraded",
                    counted(*hit, "job"),
                    counted(*moved, "worker"),
                    counted(*degraded, "job")
                ),
            ),
            Ok(Outcome::Refused(refused)) => {
                self.events.note("refused", None, refused.text.clone());
            }
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
                let text = format!(
                    "{} leads in term {term}, with {}",
                    self.candidate.address,
                    counted(jobs, "job")
                );
                log::line(&text);
                self.events.note("leading", None, text);
                self.note_unknown_parts();
                // Carriers that agents saw go under another leader are back when agents no longer
                // say that they are gone.
                let lost =
                    self.brain.book().into_iter().flat_map(|(book, _)| book.outage().carriers());
                self.reported = lost.map(|link| (link, BTreeSet::new())).collect();
            }
            State::Standby if self.state != State::Standby => {
                let why =
                    self.brain.last_error().map_or_else(String::new, |why| format!(": {why}"));
                log::line(format_args!("stands by{why}"));
            }
            _ => {}
        }
        self.events.lead(state == State::Leading);
        if matches!(state, State::Standby | State::Opening) {
            // Their streams end, and they look for the leader.
            self.agents.clear();
            self.reported.clear();
            self.unsettled.clear();
            // Another log may have other jobs under the same numbers of entries.
            self.topology = None;
            // What was being stored may or may not be: whoever waits for it asks again, at once.
            self.waiting.clear();
            self.placing.clear();
        }
        self.state = state;
        self.is_changed = true;
    }

    /// Parts that were down and are gone from the topology: nobody has to say that they are back.
    fn note_unknown_parts(&self) {
        let unknown = self.brain.book().map_or(&[][..], |(book, _)| book.unknown_parts());
        if unknown.is_empty() {
            return;
        }
        let named = unknown.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
        let more = unknown.len().saturating_sub(MAX_NAMED);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        log::line(format_args!(
            "the ledger has parts as down that the topology has not: {named}{more}; they are left out"
        ));
    }

    /// How long until the next view is made.
    fn view_due(&self) -> Duration {
        let is_large = self.cluster.topology.nodes().len() > LARGE_NODES;
        let every = match (self.showing.is_empty(), is_large, self.is_changed) {
            (false, _, _) => self.view_cost * VIEW_SPARE,
            (true, true, _) => LARGE_EVERY,
            (true, false, true) => VIEW_EVERY,
            (true, false, false) => VIEW_IDLE,
        };
        self.viewed.map_or(Duration::ZERO, |viewed| every.saturating_sub(viewed.elapsed()))
    }

    fn show(&mut self) {
        if self.is_changed || self.showing.is_empty() {
            if !self.view_due().is_zero() {
                return;
            }
            self.make_view();
        }
        for answer in self.showing.drain(..) {
            // Who asked may be gone.
            let _ = answer.send(());
        }
    }

    fn make_view(&mut self) {
        let begun = Instant::now();
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
        let mut view = Picture { brain: &self.brain, topology, agents, about }.view();
        self.views += 1;
        view.counters.insert("brain.views".to_owned(), self.views);
        view.counters
            .insert("requests.abandoned".to_owned(), self.abandoned + self.placing.abandoned);
        view.counters.insert("requests.refused_trials".to_owned(), self.refused_trials);
        view.counters.insert("brain.topologies_serialised".to_owned(), self.serialised);
        view.counters.insert("callers.refused".to_owned(), auth::refused());
        let unsigned = self.store.report().counters.unsigned;
        view.counters.insert("brain.storage.unsigned".to_owned(), unsigned);
        self.view.send_replace(Arc::new(view));
        self.view_cost = begun.elapsed();
        self.viewed = Some(Instant::now());
        self.is_changed = false;
    }
}

fn reservable_bps(rate_bps: u64, ppm: u32) -> u64 {
    (u128::from(rate_bps) * u128::from(ppm) / 1_000_000) as u64
}

/// Where the ports of a node's agent are not those of the topology. An agent that names none is of
/// an older version.
fn port_faults(cluster: &Cluster, node: NodeId, named: &[proto::Port]) -> Vec<String> {
    if named.is_empty() {
        return Vec::new();
    }
    let topology = &cluster.topology;
    let own = topology.node(node);
    let name = own.name();
    let mut faults = Vec::new();
    for proto::Port { port, interface, rate_bps } in named {
        let link = u8::try_from(*port).ok().and_then(|port| own.link_at(port));
        let Some(link) = link.and_then(|link| topology.link(link)) else {
            let ports: Vec<String> = own.links().map(|(port, _)| port.to_string()).collect();
            faults.push(format!(
                "the agent of '{name}' has a port {port} ({interface}), and the topology gives '{name}' {}",
                match &ports[..] {
                    [port] => format!("port {port} only"),
                    ports => format!("ports {}", ports.join(", ")),
                }
            ));
            continue;
        };
        let most_bps = reservable_bps(link.capacity.rate_bps, cluster.reservable_ppm);
        if *rate_bps < most_bps {
            faults.push(format!(
                "port {port} ({interface}) of '{name}' carries {rate_bps} bit/s, and jobs may reserve {most_bps} there"
            ));
        }
    }
    let is_named = |port: u8| named.iter().any(|named| named.port == u32::from(port));
    for (port, link) in own.links().filter(|(port, _)| !is_named(*port)) {
        let ends = topology.link(link).map(|link| link.ends);
        let other = ends.into_iter().flatten().find(|end| end.node != node);
        let towards = other.map_or("", |end| topology.node(end.node).name());
        faults.push(format!(
            "the agent of '{name}' has no port {port}, which leads to '{towards}': it refuses plans that need it"
        ));
    }
    faults
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
