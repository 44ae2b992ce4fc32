//! The one task that owns the state machine: what happened goes in through a channel, what is to be
//! done goes out. Each topic beside the state machine is a part of its own, which knows no other;
//! here they meet.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parfait::agent::Reply;
use parfait::brain::{self as machine, Ask, Brain, Effect, Request, State};
use parfait::log::Book;
use parfait::repair_log::Part;
use parfait::site::Ground;
use service::auth;
use service::log;
use tokio::sync::{mpsc, watch};
use topology::graph::{LinkId, NodeId};

use super::agents::Agents;
use super::carriers::Carriers;
use super::cluster::Cluster;
use super::events::Events;
use super::inputs::{Attached, Input, NotAttached};
use super::lookups::{self, TopologyReply};
use super::picture::{Picture, state_name};
use super::placing::{NoTrial, Placing, Waiting};
use super::requests::Requests;
use super::storage::Storage;
use super::views::{VIEW_EVERY, Views};
use crate::keys::Key;
use crate::store::{Candidate, Holder, Store};
use crate::view::{BrainView, View};
use crate::words::counted;

/// Most workers that are moved when a link goes down by itself.
const MOST_MOVED: u32 = 4096;

/// Parts that a line of the log names.
const MAX_NAMED: usize = 8;

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
    /// Its state when that was noted last.
    state: State,
    leader: Option<Holder>,
    candidate: Candidate,
    cluster: Cluster,
    store_name: String,
    begun: Instant,
    inputs: mpsc::Receiver<Input>,
    /// What the store answers; it goes first.
    stored: mpsc::Receiver<Input>,
    storage: Storage<S>,
    requests: Requests,
    placing: Placing,
    topology: TopologyReply,
    agents: Agents,
    carriers: Carriers,
    events: Arc<Events>,
    views: Views,
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
        let views = Views::new(view, cluster.topology.nodes().len());
        let (storage, stored) = Storage::new(store, candidate.clone());
        Actor {
            state: brain.state(),
            brain,
            leader: None,
            candidate,
            store_name,
            begun: Instant::now(),
            inputs,
            stored,
            storage,
            requests: Requests::default(),
            placing: Placing::new(),
            topology: TopologyReply::default(),
            agents: Agents::new(plan_key),
            carriers: Carriers::default(),
            events,
            views,
            cluster,
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
            let due = due.min(self.views.due()).min(VIEW_EVERY);
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
                self.follow(holder);
            }
            Input::Claimed { holder: Err(error), .. } => {
                self.storage.report_failure("the lease", &error);
            }
            Input::Opened { ticket, opened } => {
                if let Err(error) = &opened {
                    self.storage.report_failure("opening the log", error);
                }
                self.brain.handle_opened(ticket, opened, now_ns);
            }
            Input::Stored { ticket, stored } => {
                if let Err(error) = &stored {
                    self.storage.report_failure("writing the log", error);
                }
                self.brain.handle_stored(ticket, stored, now_ns);
                self.views.is_changed = true;
            }
            Input::Ask { request, answer } => {
                if self.requests.push((request.client, request.sequence), answer) {
                    self.brain.handle_request(request, now_ns);
                }
            }
            Input::Place { caller, label, job, answer } => match leading_book(&self.brain) {
                Some(_) => drop(self.placing.push(caller, Waiting { label, job, answer })),
                None => drop(answer.send(Err(NoTrial::NotLeading))),
            },
            // The next trial follows.
            Input::Tried => {}
            // Who asked may be gone.
            Input::Topology { answer } => {
                let network = self.brain.network();
                let book = leading_book(&self.brain);
                let reply = book.map(|book| self.topology.get(book, network, &self.cluster));
                drop(answer.send(reply));
            }
            Input::Show { answer } => self.views.waiting.push(answer),
            Input::Find { name, answer } => {
                let network = self.brain.network();
                let book = leading_book(&self.brain);
                drop(answer.send(book.map(|book| lookups::find(book, network, &name))));
            }
            Input::Attached { name, agent, answer } => {
                let attached = self.attach(&name, agent, now_ns);
                drop(answer.send(attached));
            }
            Input::Detached { node, number } => {
                if self.agents.detach(node, number) {
                    self.carriers.forget(node);
                    let name = self.brain.network().node_name(node);
                    self.events.note("agent", None, format!("the agent of '{name}' is gone"));
                    self.views.is_changed = true;
                }
            }
            Input::Reply { node, number, reply, note, down } => {
                self.reply(node, number, reply, &note);
                self.links(node, &down, now_ns);
            }
        }
    }

    /// Notes who has the lease.
    fn follow(&mut self, holder: Holder) {
        if self.leader.as_ref() == Some(&holder) {
            return;
        }
        let Holder { address, lease } = &holder;
        if lease.holder != self.candidate.number {
            log::line(format_args!("stands by: {address} leads in term {}", lease.term));
        }
        self.leader = Some(holder);
        self.views.is_changed = true;
    }

    fn attach(&mut self, name: &str, agent: Attached, now_ns: u64) -> Result<NodeId, NotAttached> {
        if self.brain.state() != State::Leading {
            return Err(NotAttached::NotLeading);
        }
        let network = self.brain.network();
        let node = self.brain.governed().iter().find(|node| network.node_name(**node) == name);
        let node = *node.ok_or_else(|| NotAttached::NoNode(name.to_owned()))?;
        self.agents.attach(node, agent, &self.cluster, &self.events);
        self.views.is_changed = true;
        self.brain.handle_attached(node, now_ns);
        Ok(node)
    }

    fn reply(&mut self, node: NodeId, number: u64, reply: Reply, note: &str) {
        if !self.agents.hear(node, number, note) {
            return;
        }
        let before = self.brain.objection(node);
        self.brain.handle_reply(node, reply);
        self.views.is_changed = true;
        // Each report repeats it, and only the first one is news.
        if let Some(objection) = self.brain.objection(node).filter(|now| before != Some(*now)) {
            let name = self.brain.network().node_name(node);
            let text = format!("the agent of '{name}' refuses its plan: {objection}; {note}");
            log::line(&text);
            self.events.note("alarm", None, text);
        }
    }

    /// Notes ports without a carrier.
    fn links(&mut self, node: NodeId, down: &BTreeSet<u8>, now_ns: u64) {
        let Some(book) = leading_book(&self.brain) else { return };
        let known: BTreeSet<LinkId> = book.outage().links().collect();
        let own = self.cluster.topology.node(node);
        let ports = (node, own.links());
        for (link, is_down) in self.carriers.hear(ports, down, &known, Instant::now()) {
            self.own_sequence += 1;
            let parts = vec![Part::Carrier(link)];
            let ask = Ask::Outage { parts, is_down, most_moved: MOST_MOVED };
            let sequence = self.own_sequence;
            let request = Request { client: self.candidate.number, sequence, ask };
            let word = if is_down { "has no carrier" } else { "has a carrier again" };
            let text = format!("a link of '{}' {word}", own.name());
            log::line(&text);
            self.events.note("link", None, text);
            self.brain.handle_request(request, now_ns);
        }
    }

    /// Does what the state machine asks for.
    fn carry_out(&mut self) {
        while let Some(effect) = self.brain.poll_effect() {
            match effect {
                Effect::Claim { ticket } => self.storage.claim(ticket),
                Effect::Open { ticket, term } => self.storage.open(ticket, term),
                Effect::Append { at, bytes, .. } => self.storage.append(at, bytes),
                Effect::Sync { opening, ticket } => self.storage.sync(opening, ticket),
                Effect::Snapshot { opening, ticket, bytes } => {
                    self.storage.snapshot(opening, ticket, bytes);
                }
                Effect::Send { node, command } => self.agents.send(node, &command, &self.brain),
                Effect::Answer { client, sequence, answer } => {
                    self.events.note_answer(&answer, self.brain.book().map(|(book, _)| book));
                    self.requests.answer((client, sequence), &answer);
                }
            }
        }
    }

    /// Begins the next trial, if none runs.
    fn try_next(&mut self) {
        let Some((trial, lent)) = self.placing.next() else { return };
        let Some(book) = leading_book(&self.brain).cloned() else { return };
        self.storage.place(trial, book, lent);
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
                let book = self.brain.book().into_iter();
                self.carriers.begin(book.flat_map(|(book, _)| book.outage().carriers()));
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
            self.agents.attached.clear();
            self.carriers.clear();
            self.topology.clear();
            self.requests.clear();
            self.placing.clear();
        }
        self.state = state;
        self.views.is_changed = true;
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

    fn show(&mut self) {
        let Actor { brain, requests, placing, topology, storage, .. } = self;
        self.views.show(|| {
            requests.forget_abandoned();
            let about = BrainView {
                address: self.candidate.address.clone(),
                state: state_name(self.state).to_owned(),
                term: brain.term().unwrap_or_default(),
                leader: self.leader.as_ref().map(|leader| leader.address.clone()),
                log_index: brain.book().map_or(0, |(book, _)| book.next_index()),
                store: self.store_name.clone(),
            };
            let agents = &self.agents.attached;
            let mut view =
                Picture { brain, topology: &self.cluster.topology, agents, about }.view();
            let counters = [
                ("requests.abandoned", requests.abandoned + placing.abandoned),
                ("requests.refused_trials", placing.refused),
                ("brain.topologies_serialised", topology.count),
                ("callers.refused", auth::refused()),
                ("brain.storage.unsigned", storage.unsigned()),
            ];
            view.counters.extend(counters.map(|(name, value)| (name.to_owned(), value)));
            view
        });
    }
}

fn leading_book(brain: &Brain) -> Option<&Book> {
    brain.book().filter(|_| brain.state() == State::Leading).map(|(book, _)| book)
}
