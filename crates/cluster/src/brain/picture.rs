//! The view of the cluster: from the brain's book, and from what agents said.

use std::collections::{BTreeMap, BTreeSet};

use parfait::agent::{Measure, Phase};
use parfait::brain::{Brain, State};
use parfait::job::Cycle;
use parfait::log::Book;
use topology::graph::{Kind, LinkId, NodeId, Topology};

use super::inputs::Attached;
use crate::view::{
    Alarm, BrainView, CycleView, JobView, LinkJob, LinkView, NodeView, Placed, TurnView, View,
};
use crate::web::unix_ms;

/// Alarms of one kind that a view names; the last one says how many more there are.
const MAX_ALARMS: usize = 20;

/// What the view is made from.
pub(super) struct Picture<'a> {
    pub(super) brain: &'a Brain,
    pub(super) topology: &'a Topology,
    pub(super) agents: &'a BTreeMap<NodeId, Attached>,
    pub(super) about: BrainView,
}

/// The word for a state.
pub(super) fn state_name(state: State) -> &'static str {
    match state {
        State::Standby => "standby",
        State::Opening => "opening",
        State::Beginning => "beginning",
        State::Leading => "leading",
    }
}

impl Picture<'_> {
    /// The view at this moment.
    pub(super) fn view(self) -> View {
        let book = self.brain.book().map(|(book, _)| book);
        let nodes = self.nodes(book);
        let alarms = self.alarms(&nodes, book);
        View {
            unix_ms: unix_ms(),
            links: book.map_or_else(Vec::new, |book| self.links(book)),
            jobs: book.map_or_else(Vec::new, |book| self.jobs(book)),
            counters: self.counters(),
            brain: self.about,
            nodes,
            alarms,
        }
    }

    fn nodes(&self, book: Option<&Book>) -> Vec<NodeView> {
        let network = self.brain.network();
        let hosts: BTreeMap<NodeId, u32> =
            (0..network.hosts()).map(|host| (network.node_of(host), host)).collect();
        let nodes = self.topology.nodes().map(|(id, node)| {
            let is_host = node.kind() == Kind::Host;
            let free_slots = match (hosts.get(&id), book) {
                (Some(host), Some(book)) => book.ledger().free_slots(*host) as u32,
                _ => 0,
            };
            let (agent, note) = self.agent(id);
            NodeView {
                name: node.name().to_owned(),
                kind: if is_host { "host" } else { "switch" }.to_owned(),
                slots: if is_host { network.slots() } else { 0 },
                free_slots,
                agent: agent.to_owned(),
                heard_ms: self
                    .agents
                    .get(&id)
                    .map(|agent| agent.heard.elapsed().as_millis() as u64),
                note,
            }
        });
        nodes.collect()
    }

    fn agent(&self, node: NodeId) -> (&'static str, Option<String>) {
        if !self.brain.governed().contains(&node) {
            return ("none", None);
        }
        let Some(agent) = self.agents.get(&node) else { return ("silent", None) };
        let note = (!agent.note.is_empty()).then(|| agent.note.clone());
        if let Some(objection) = self.brain.objection(node) {
            return ("refusing", Some(format!("{objection}; {}", agent.note)));
        }
        match self.brain.plan(node) {
            Some((_, true)) => ("enforcing", note),
            _ => ("behind", note),
        }
    }

    fn links(&self, book: &Book) -> Vec<LinkView> {
        let network = self.brain.network();
        let rates: BTreeMap<usize, u64> =
            self.topology.links().map(|(id, link)| (id.index(), link.capacity.rate_bps)).collect();
        let dead = self.topology.links().map(|(id, _)| id);
        let down: BTreeSet<usize> = dead
            .filter(|link| book.outage().takes(self.topology, *link))
            .map(LinkId::index)
            .collect();
        let now = book.ledger().network();
        let mut links: Vec<LinkView> = Vec::new();
        for (directed, _) in network.links() {
            let (from, to) = network.ends(directed);
            // With something down, fewer links have a trunk.
            let trunk = now.trunk_of(directed);
            let measures = self.brain.measures(from.node);
            let has_agent = self.agents.contains_key(&from.node);
            let on_port: BTreeMap<u64, &Measure> = measures
                .iter()
                .filter(|measure| measure.port == from.port)
                .map(|measure| (measure.job, measure))
                .collect();
            let reserved = trunk.map_or(&[][..], |trunk| book.on_trunk(trunk));
            let jobs = reserved.iter().map(|reserved| {
                let measure = on_port.get(&reserved.job);
                LinkJob {
                    job: reserved.job,
                    reserved_bps: reserved.bps,
                    used_bps: measure.map(|measure| measure.bps),
                    queue: None,
                    pace_bps: None,
                    backlog_bytes: measure.map_or(0, |measure| measure.backlog_bytes),
                    dropped_packets: measure.map_or(0, |measure| measure.dropped_packets),
                }
            });
            links.push(LinkView {
                from: from.node.index() as u32,
                to: to.node.index() as u32,
                port: from.port.into(),
                capacity_bps: rates.get(&(directed as usize / 2)).copied().unwrap_or(0),
                reserved_bps: trunk.map_or(0, |trunk| book.ledger().reserved_bps(trunk)),
                // Agents may say anything.
                used_bps: has_agent.then(|| {
                    on_port.values().fold(0, |sum, measure| measure.bps.saturating_add(sum))
                }),
                is_down: down.contains(&(directed as usize / 2)),
                jobs: jobs.collect(),
            });
        }
        links
    }

    fn jobs(&self, book: &Book) -> Vec<JobView> {
        let network = self.brain.network();
        let jobs = book.jobs().iter().map(|(id, held)| JobView {
            id: *id,
            name: held.label.name.clone(),
            owner: held.label.owner.clone(),
            request: held.job.to_string(),
            dscp: held.dscp.value(),
            workers: held
                .pieces
                .iter()
                .map(|piece| Placed {
                    host: network.node_of(piece.host).index() as u32,
                    first: piece.run.first,
                    count: piece.run.len(),
                })
                .collect(),
            state: if book.is_degraded(*id) { "degraded" } else { "running" }.to_owned(),
            cycle: held.job.cycle.map(|cycle| self.cycle(*id, cycle)),
        });
        jobs.collect()
    }

    fn cycle(&self, job: u64, cycle: Cycle) -> CycleView {
        let Cycle { period_ns, exchange_ns } = cycle;
        let stagger = self.brain.stagger(job);
        let phase = stagger.and_then(|stagger| stagger.phase.ok());
        CycleView {
            period_ns,
            exchange_ns,
            turn: phase.map(|Phase { period_ns, shift_ns, .. }| TurnView { period_ns, shift_ns }),
            why: stagger.and_then(|stagger| stagger.phase.err()).map(|why| why.to_string()),
            with: stagger.map_or_else(Vec::new, |stagger| stagger.with.clone()),
        }
    }

    fn alarms(&self, nodes: &[NodeView], book: Option<&Book>) -> Vec<Alarm> {
        let mut alarms = Vec::new();
        if let Some(error) = self.brain.last_error() {
            alarms.push(Alarm {
                level: "error".to_owned(),
                text: format!("the log was not recovered: {error}"),
                hint: "the brain leaves the lease to others until the log can be read".to_owned(),
            });
        }
        let Some(book) = book else { return alarms };
        let busy: BTreeSet<usize> = book
            .jobs()
            .values()
            .flat_map(|held| &held.pieces)
            .map(|piece| self.brain.network().node_of(piece.host).index())
            .collect();
        let degraded = book.jobs().iter().filter(|(id, _)| book.is_degraded(**id));
        let degraded = degraded.map(|(id, held)| Alarm {
            level: "error".to_owned(),
            text: format!("job {id} '{}' is without its guarantee", held.label.name),
            hint: "something that it needs is down, and nothing else holds it: release others, or wait".to_owned(),
        });
        let (degraded, down) = (degraded.collect(), self.outage_alarms(book));
        let refusing = nodes.iter().filter(|node| node.agent == "refusing").map(|node| Alarm {
            level: "error".to_owned(),
            text: format!("the agent of '{}' refuses its plan", node.name),
            hint: node.note.clone().unwrap_or_default(),
        });
        let wrong_ports = self.agents.values().flat_map(|agent| &agent.faults).map(|fault| Alarm {
            level: "error".to_owned(),
            text: fault.clone(),
            hint: "compare the agent's --port options with the topology, and start it again"
                .to_owned(),
        });
        let silent = nodes.iter().enumerate().filter(|(at, node)| {
            node.agent == "silent" && (busy.contains(at) || node.kind == "switch")
        });
        let silent = silent.map(|(_, node)| Alarm {
            level: "warning".to_owned(),
            text: format!("nobody enforces what jobs have at '{}'", node.name),
            hint: format!(
                "start `dquant agent --node {}` there; its last plan stays in force",
                node.name
            ),
        });
        let noted = nodes.iter().filter(|node| node.agent != "refusing").filter_map(|node| {
            Some(Alarm {
                level: "warning".to_owned(),
                text: format!("the agent of '{}': {}", node.name, node.note.as_ref()?),
                hint: "its plan is in force as far as that allows; its log says more".to_owned(),
            })
        });
        let (refusing, silent) = (refusing.collect(), silent.collect());
        for mut kind in [degraded, down, refusing, wrong_ports.collect(), silent, noted.collect()] {
            let more = kind.len().saturating_sub(MAX_ALARMS);
            kind.truncate(MAX_ALARMS);
            if let (1.., Some(last)) = (more, kind.last_mut()) {
                last.text = format!("{}; {more} more like that", last.text);
            }
            alarms.extend(kind);
        }
        alarms
    }

    fn outage_alarms(&self, book: &Book) -> Vec<Alarm> {
        let nodes = book.outage().nodes().map(|node| self.topology.node(node).name().to_owned());
        let links = book.outage().links().filter_map(|link| self.topology.link(link));
        let links = links.map(|link| {
            let [a, b] = link.ends.map(|end| self.topology.node(end.node).name());
            (format!("the link between {a} and {b}"), format!("{a}:{}", link.ends[0].port))
        });
        let down = nodes.map(|name| (name.clone(), name)).chain(links).map(|(what, name)| Alarm {
            level: "error".to_owned(),
            text: format!("{what} is down"),
            hint: format!("`dquant job up {name}` when it is back, if no agent sees it"),
        });
        down.collect()
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        let counters = self.brain.counters();
        let named = [
            ("brain.terms", counters.terms),
            ("brain.leases_lost", counters.leases_lost),
            ("brain.fenced", counters.fenced),
            ("brain.storage.failed", counters.storage_failed),
            ("brain.storage.silent", counters.storage_silent),
            ("brain.logs_refused", counters.logs_refused),
            ("brain.torn_tails", counters.torn_tails),
            ("brain.unknown_parts", counters.unknown_parts),
            ("brain.snapshots", counters.snapshots),
            ("jobs.admitted", counters.admitted),
            ("jobs.released", counters.released),
            ("jobs.restored", counters.restored),
            ("jobs.refused", counters.refused),
            ("jobs.repairs", counters.repairs),
            ("jobs.workers_moved", counters.workers_moved),
            ("requests.repeated", counters.repeated),
            ("requests.not_leading", counters.not_leading),
            ("requests.busy", counters.busy),
            ("requests.stale", counters.stale),
            ("agents.attached", self.agents.len() as u64),
            ("agents.commands_resent", counters.resent),
            ("agents.commands_refused", counters.commands_refused),
            ("agents.implausible_measures", counters.implausible),
            ("strays", counters.stale_replies),
        ];
        named.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}
