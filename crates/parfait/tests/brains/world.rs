//! Brains, agents, clients, the store of the lease and the disk of the log, with a network between
//! them and all that goes wrong. A seed decides everything; what is checked after each event is in
//! `checks`.

use std::collections::BTreeMap;

use parfait::agent::{Agent, Command, Measure, Position, Reply, Saved, Share, Step};
use parfait::brain::{Ask, Brain, Config, Denial, Effect, Lease, Request, State, Which};
use parfait::demand::Abstraction;
use parfait::log::{Label, Outcome};
use parfait::network::Network;
use parfait::repair_log::Part;
use parfait::seeded::Bug;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::{Capacity, LinkId, NodeId};
use topology::shape::Shape;

use crate::checks::Checks;
use crate::volume::{Done, LeaseStore, Volume};

/// Hosts and switches of the simulated cluster.
const SHAPE: &str = "leaf-spine:3x2x2";

pub(crate) const MS: u64 = 1_000_000;
const LEASE_NS: u64 = 1_000 * MS;
const CLAIM_NS: u64 = 300 * MS;
const RESEND_NS: u64 = 150 * MS;
const STORAGE_NS: u64 = 800 * MS;
const RETRY_NS: u64 = 200 * MS;
const FAULTS_END_NS: u64 = 12_000 * MS;
/// The longest that a message takes while there are faults, and after.
const SLOWEST_NS: u64 = 1_500 * MS;
const HEALED_NS: u64 = 5 * MS;
/// The longest that a brain stands still.
const FROZEN_NS: u64 = 2_000 * MS;
/// The longest that the disk takes for an operation while there are faults, and after.
const SLOW_DISK_NS: u64 = 1_200 * MS;
const DISK_NS: u64 = 4 * MS;

const JOBS: &[&str] = &[
    "ring:4@10G",
    "ring:6@5G slots=2",
    "tree:5@7G latency=low",
    "torus:2x2@9G,4G",
    "ps:3+2@6G",
    "mesh:4@8G",
    "pipeline:8@3G burst=1M",
    "ring:40@1G",
    // Thirteen slots make a period, since its other divisor is a large prime, so that shifts are
    // found at once. Of a link a quarter may be reserved: exchanges are short enough for two jobs
    // to fill it.
    "ring:4@8G most=host:1 cycle=13117ns/1us",
    "ring:5@9G most=host:1 cycle=13117ns/2us",
    "mesh:3@3G most=host:1 cycle=26234ns/2us",
];

/// Where messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Brain(usize),
    Agent(usize),
    Client(usize),
    LeaseStore,
    Disk,
}

#[derive(Clone, Debug)]
enum Message {
    Claim { holder: u64, ticket: u64 },
    Lease { holder: u64, ticket: u64, lease: Lease },
    Disk { holder: u64, term: u64, effect: Effect },
    Done { holder: u64, done: Done },
    Request(Request),
    Answer { sequence: u64, answer: Result<Outcome, Denial> },
    Command(Command),
    Reply(usize, Reply),
}

#[derive(Debug)]
enum Event {
    Deliver(Place, Place, Message),
    Wake(usize, u64),
    DiskTurn { epoch: u64, brain: usize, holder: u64, term: u64, effect: Effect },
    Start(Place),
    Retry(usize, u64),
    Trouble,
    Heal,
}

/// Which faults a seed has, each as one chance in so many; 0 is never.
#[derive(Clone, Debug, Default)]
struct Faults {
    loss: u32,
    repeat: u32,
    slow: u32,
    slow_disk: u32,
    crashes: bool,
    partitions: bool,
    clocks: bool,
    full: bool,
    /// Brains stand still, as a stopped virtual machine does.
    freezes: bool,
}

#[derive(Default)]
struct BrainNode {
    brain: Option<Brain>,
    holder: u64,
    ahead_ns: u64,
    wake: u64,
    /// When the last message to the disk arrives: they stay in order.
    disk_ns: u64,
    /// The opening whose connection to the disk is gone.
    broken: Option<u64>,
    /// Until when it stands still.
    frozen_ns: u64,
}

pub(crate) struct AgentNode {
    pub(crate) node: NodeId,
    pub(crate) agent: Option<Agent>,
    durable: Saved,
    pub(crate) enforced: Vec<Share>,
}

pub(crate) struct Client {
    sequence: u64,
    pub(crate) asked: Option<Ask>,
    pub(crate) jobs: Vec<u64>,
    target: usize,
}

/// What happened over a run, so that a test can say that it happened at all.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) terms: u64,
    pub(crate) fenced: u64,
    pub(crate) torn_tails: u64,
    pub(crate) torn_writes: u64,
    pub(crate) snapshots: u64,
    pub(crate) admitted: u64,
    pub(crate) released: u64,
    pub(crate) restored: u64,
    pub(crate) refused: u64,
    pub(crate) repeated: u64,
    pub(crate) lower_term: u64,
    pub(crate) overtaken: u64,
    pub(crate) not_enforced: u64,
    pub(crate) leases_lost: u64,
    pub(crate) storage_failed: u64,
    pub(crate) storage_silent: u64,
    pub(crate) repairs: u64,
    pub(crate) workers_moved: u64,
    pub(crate) phases: u64,
    pub(crate) events: u64,
    pub(crate) healed_ns: u64,
}

pub(crate) struct World {
    pub(crate) now_ns: u64,
    pub(crate) ground: Ground,
    pub(crate) network: Network,
    pub(crate) agents: Vec<AgentNode>,
    pub(crate) clients: Vec<Client>,
    pub(crate) disk: Volume,
    brains: Vec<BrainNode>,
    random: Pcg32,
    faults: Faults,
    is_healed: bool,
    cut: Vec<(Place, Place)>,
    lease: LeaseStore,
    disk_epoch: u64,
    disk_busy_ns: u64,
    is_disk_up: bool,
    events: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    next_holder: u64,
    #[cfg_attr(
        not(feature = "seeded-bugs"),
        expect(dead_code, reason = "seeded bugs are a feature")
    )]
    bug: Option<Bug>,
    tally: Tally,
}

fn ground() -> Ground {
    let shape: Shape = SHAPE.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let site = Site { topology, slots: 4, ecmp: Ecmp::Even, reservable_ppm: 250_000 };
    Ground::new(site).expect("connected")
}

/// Most time from the end of all faults until everything has settled.
///
/// Messages and disk operations from before may still come, a brain may have to be woken, and one
/// that waits for the disk opens it again after a timeout. A lease that nobody renews runs out, and
/// then the next claim takes it; the log is opened, and the first entry written. Each client asks
/// every brain in turn, and each agent is sent its plan. A batch may need a snapshot first.
pub(crate) fn bound_ns(brains: u64, clients: u64) -> u64 {
    let before = SLOWEST_NS.max(FROZEN_NS) + SLOW_DISK_NS + STORAGE_NS;
    let round = 2 * HEALED_NS;
    let lead = LEASE_NS + CLAIM_NS + round + 3 * (round + DISK_NS);
    let ask = RETRY_NS * (brains + 1) + 2 * clients * (round + 2 * DISK_NS);
    before + lead + ask + RESEND_NS + round
}

impl World {
    pub(crate) fn new(seed: u64, bug: Option<Bug>) -> World {
        let mut random = Pcg32::new(seed, 0x5eed);
        let ground = ground();
        let mut one_of = |choices: &[u32]| choices[random.next_u32() as usize % choices.len()];
        let faults = Faults {
            loss: one_of(&[0, 0, 40, 8]),
            repeat: one_of(&[0, 20, 4]),
            slow: one_of(&[0, 15, 4]),
            slow_disk: one_of(&[0, 10, 3]),
            crashes: one_of(&[0, 1, 1]) == 1,
            partitions: one_of(&[0, 1, 1]) == 1,
            clocks: one_of(&[0, 1]) == 1,
            full: one_of(&[0, 0, 1]) == 1,
            freezes: one_of(&[0, 1, 1]) == 1,
        };
        let brains = one_of(&[2, 3, 3]) as usize;
        let nodes = governed();
        let mut world = World {
            now_ns: 0,
            network: ground.network.clone(),
            ground,
            agents: Vec::new(),
            clients: Vec::new(),
            disk: Volume::default(),
            brains: Vec::new(),
            random,
            faults,
            is_healed: false,
            cut: Vec::new(),
            lease: LeaseStore::default(),
            disk_epoch: 0,
            disk_busy_ns: 0,
            is_disk_up: true,
            events: BTreeMap::new(),
            next_event: 0,
            next_holder: 1,
            bug,
            tally: Tally::default(),
        };
        let brain = |_| BrainNode { ahead_ns: 1_000 * MS, ..BrainNode::default() };
        world.brains.extend((0..brains).map(brain));
        for node in &nodes {
            world.agents.push(AgentNode {
                node: *node,
                agent: None,
                durable: Saved::default(),
                enforced: Vec::new(),
            });
        }
        for _ in 0..3 {
            world.clients.push(Client { sequence: 0, asked: None, jobs: Vec::new(), target: 0 });
        }
        for brain in 0..brains {
            world.schedule(MS * brain as u64, Event::Start(Place::Brain(brain)));
        }
        for agent in 0..nodes.len() {
            world.schedule(0, Event::Start(Place::Agent(agent)));
        }
        for client in 0..world.clients.len() {
            world.schedule(100 * MS, Event::Retry(client, 0));
        }
        world.schedule(500 * MS, Event::Trouble);
        world.schedule(FAULTS_END_NS, Event::Heal);
        world
    }

    /// Runs to the end.
    pub(crate) fn run(mut self, checks: &mut Checks) -> Result<Tally, String> {
        let bound_ns = bound_ns(self.brains.len() as u64, self.clients.len() as u64);
        let mut settled_ns = None;
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now_ns = at;
            self.tally.events += 1;
            self.happen(event, checks)
                .and_then(|()| checks.after_event(&self))
                .map_err(|what| format!("at {} ms: {what}", at / MS))?;
            if self.is_healed {
                match self.unsettled() {
                    None => settled_ns = settled_ns.or(Some(at)),
                    Some(what) if at > FAULTS_END_NS + bound_ns => {
                        return Err(format!("{} ms after the last fault: {what}", bound_ns / MS));
                    }
                    Some(_) => settled_ns = None,
                }
                // Settled has to stay so.
                if settled_ns.is_some() && at > FAULTS_END_NS + bound_ns {
                    break;
                }
            }
        }
        self.tally.phases = checks.settled(&self)?;
        self.tally.healed_ns = settled_ns.map_or(0, |at| at - FAULTS_END_NS);
        for node in 0..self.brains.len() {
            self.count_brain(node);
        }
        for agent in 0..self.agents.len() {
            self.count_agent(agent);
        }
        self.tally.torn_writes = self.disk.torn_writes;
        Ok(self.tally)
    }

    /// Switches that have an agent.
    fn switches(&self) -> Vec<NodeId> {
        let hosts = self.network.hosts() as usize;
        self.agents[hosts..].iter().map(|agent| agent.node).collect()
    }

    /// The brains that run.
    pub(crate) fn brains(&self) -> impl Iterator<Item = &Brain> {
        self.brains.iter().filter_map(|node| node.brain.as_ref())
    }

    /// What is not as it is to be in the end.
    fn unsettled(&self) -> Option<String> {
        let leaders: Vec<&Brain> =
            self.brains().filter(|brain| brain.state() == State::Leading).collect();
        let [leader] = leaders[..] else { return Some(format!("{} brains lead", leaders.len())) };
        if let Some(client) = self.clients.iter().position(|client| client.asked.is_some()) {
            return Some(format!("client {client} has no answer"));
        }
        for node in &self.agents {
            let (plan, is_answered) = leader.plan(node.node).unwrap_or_default();
            if !is_answered || plan != node.enforced {
                let saved = &node.durable;
                return Some(format!(
                    "{}: the leader's plan is {plan:?} (answered: {is_answered}), the agent's {saved:?}",
                    self.network.node_name(node.node)
                ));
            }
        }
        None
    }

    fn schedule(&mut self, after_ns: u64, event: Event) {
        self.events.insert((self.now_ns + after_ns, self.next_event), event);
        self.next_event += 1;
    }

    fn below(&mut self, limit: u64) -> u64 {
        u64::from(self.random.next_u32()) % limit.max(1)
    }

    /// Whether a fault with one chance in `odds` happens now.
    fn strikes(&mut self, odds: u32) -> bool {
        odds > 0 && !self.is_healed && self.random.next_u32().is_multiple_of(odds)
    }

    fn is_cut(&self, from: Place, to: Place) -> bool {
        self.cut.contains(&(from, to))
    }

    fn delay_ns(&mut self) -> u64 {
        match self.strikes(self.faults.slow) {
            true => self.below(SLOWEST_NS / MS) * MS,
            false => MS / 5 + self.below(HEALED_NS - MS / 5),
        }
    }

    fn send(&mut self, from: Place, to: Place, message: Message) {
        let copies = 1 + usize::from(self.strikes(self.faults.repeat));
        for _ in 0..copies {
            if self.is_cut(from, to) || self.strikes(self.faults.loss) {
                continue;
            }
            let delay = self.delay_ns();
            self.schedule(delay, Event::Deliver(from, to, message.clone()));
        }
    }

    fn happen(&mut self, event: Event, checks: &mut Checks) -> Result<(), String> {
        let brain = match &event {
            Event::Deliver(_, Place::Brain(brain), _) | Event::Wake(brain, _) => Some(*brain),
            _ => None,
        };
        let frozen_ns = brain.map_or(0, |brain| self.brains[brain].frozen_ns);
        if frozen_ns > self.now_ns {
            self.schedule(frozen_ns - self.now_ns, event);
            return Ok(());
        }
        match event {
            Event::Deliver(from, to, message) => return self.deliver(from, to, message, checks),
            Event::Wake(brain, wake) if self.brains[brain].wake == wake => {
                return self
                    .with_brain(brain, checks, |brain, now_ns| brain.handle_timeout(now_ns));
            }
            Event::Wake(..) => {}
            Event::DiskTurn { epoch, brain, holder, term, effect } if epoch == self.disk_epoch => {
                if let Some(done) = self.disk.execute(term, effect, &mut self.random) {
                    self.send(Place::Disk, Place::Brain(brain), Message::Done { holder, done });
                }
            }
            Event::DiskTurn { .. } => {}
            Event::Start(place) => return self.start(place, checks),
            Event::Retry(client, sequence) => self.retry(client, sequence, checks),
            Event::Trouble if self.is_healed => {}
            Event::Trouble => {
                self.trouble();
                let next = 50 + self.below(900);
                self.schedule(next * MS, Event::Trouble);
            }
            Event::Heal => {
                self.is_healed = true;
                self.cut.clear();
                self.disk.is_full = false;
                self.is_disk_up = true;
                for brain in 0..self.brains.len() {
                    self.schedule(0, Event::Start(Place::Brain(brain)));
                }
                for agent in 0..self.agents.len() {
                    self.schedule(0, Event::Start(Place::Agent(agent)));
                }
            }
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        from: Place,
        to: Place,
        message: Message,
        checks: &mut Checks,
    ) -> Result<(), String> {
        match (to, message) {
            (Place::LeaseStore, Message::Claim { holder, ticket }) => {
                let lease = self.lease.claim(holder, LEASE_NS, self.now_ns);
                self.send(to, from, Message::Lease { holder, ticket, lease });
            }
            (Place::Disk, Message::Disk { holder, term, effect }) if self.is_disk_up => {
                let Place::Brain(brain) = from else { return Ok(()) };
                let cost = match self.strikes(self.faults.slow_disk) {
                    true => self.below(SLOW_DISK_NS / MS / 4) * MS,
                    false => MS / 10 + self.below(DISK_NS - MS / 10),
                };
                let most = self.now_ns + SLOW_DISK_NS;
                self.disk_busy_ns = (self.disk_busy_ns.max(self.now_ns) + cost).min(most);
                let (epoch, after) = (self.disk_epoch, self.disk_busy_ns - self.now_ns);
                self.schedule(after, Event::DiskTurn { epoch, brain, holder, term, effect });
            }
            (Place::Brain(brain), message) => return self.tell_brain(brain, message, checks),
            (Place::Agent(agent), Message::Command(command)) => {
                return self.command(agent, from, command, checks);
            }
            (Place::Client(client), Message::Answer { sequence, answer }) => {
                self.answered(client, sequence, &answer, checks)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn tell_brain(
        &mut self,
        brain: usize,
        message: Message,
        checks: &mut Checks,
    ) -> Result<(), String> {
        let own = self.brains[brain].holder;
        match message {
            Message::Lease { holder, ticket, lease } if holder == own => {
                self.with_brain(brain, checks, |brain, now_ns| {
                    brain.handle_lease(ticket, lease, now_ns);
                })
            }
            Message::Done { holder, done } if holder == own => {
                self.with_brain(brain, checks, |brain, now_ns| match done {
                    Done::Opened(ticket, opened) => brain.handle_opened(ticket, opened, now_ns),
                    Done::Stored(ticket, stored) => brain.handle_stored(ticket, stored, now_ns),
                })
            }
            Message::Request(request) => self
                .with_brain(brain, checks, |brain, now_ns| brain.handle_request(request, now_ns)),
            Message::Reply(agent, reply) => {
                let node = self.agents[agent].node;
                self.with_brain(brain, checks, |brain, _| brain.handle_reply(node, reply))
            }
            _ => Ok(()),
        }
    }

    /// Does something with a brain that runs, and all that it then wants done.
    fn with_brain(
        &mut self,
        at: usize,
        checks: &mut Checks,
        what: impl FnOnce(&mut Brain, u64),
    ) -> Result<(), String> {
        let now_ns = self.now_ns + self.brains[at].ahead_ns;
        let Some(mut brain) = self.brains[at].brain.take() else { return Ok(()) };
        what(&mut brain, now_ns);
        checks.brain(self, &brain)?;
        let term = brain.term().unwrap_or(0);
        while let Some(effect) = brain.poll_effect() {
            checks.effect(self, self.brains[at].holder, &effect)?;
            self.effect(at, term, effect);
        }
        let after = brain.poll_timeout().saturating_sub(now_ns).clamp(MS / 10, 1_000 * MS);
        self.brains[at].brain = Some(brain);
        self.brains[at].wake += 1;
        let wake = self.brains[at].wake;
        self.schedule(after, Event::Wake(at, wake));
        Ok(())
    }

    fn effect(&mut self, at: usize, term: u64, effect: Effect) {
        let (from, holder) = (Place::Brain(at), self.brains[at].holder);
        match effect {
            Effect::Claim { ticket } => {
                self.send(from, Place::LeaseStore, Message::Claim { holder, ticket });
            }
            Effect::Send { node, command } => {
                let at = self.agents.iter().position(|agent| agent.node == node);
                let at = at.expect("only nodes with an agent get plans");
                self.send(from, Place::Agent(at), Message::Command(command));
            }
            Effect::Answer { client, sequence, answer } => {
                let client = Place::Client(client as usize - 1);
                self.send(from, client, Message::Answer { sequence, answer });
            }
            Effect::Open { ticket, .. } => self.store(at, ticket, term, effect),
            Effect::Append { opening, .. }
            | Effect::Sync { opening, .. }
            | Effect::Snapshot { opening, .. } => self.store(at, opening, term, effect),
        }
    }

    /// One connection for each opening: in order, and gone once something is lost.
    fn store(&mut self, at: usize, opening: u64, term: u64, effect: Effect) {
        let (from, holder) = (Place::Brain(at), self.brains[at].holder);
        let is_lost =
            self.is_cut(from, Place::Disk) || self.strikes(self.faults.loss.saturating_mul(4));
        if is_lost || self.brains[at].broken == Some(opening) {
            self.brains[at].broken = Some(opening);
            return;
        }
        let arrives = (self.now_ns + self.delay_ns()).max(self.brains[at].disk_ns);
        self.brains[at].disk_ns = arrives;
        let message = Message::Disk { holder, term, effect };
        self.schedule(arrives - self.now_ns, Event::Deliver(from, Place::Disk, message));
    }

    fn command(
        &mut self,
        at: usize,
        from: Place,
        command: Command,
        checks: &mut Checks,
    ) -> Result<(), String> {
        let does_fail = self.strikes(40);
        let dies_early = self.faults.crashes && self.strikes(60);
        let now_ns = self.now_ns;
        let measured = self.below(20);
        let node = &mut self.agents[at];
        let Some(agent) = &mut node.agent else { return Ok(()) };
        agent.measure(Measure { port: 1, job: measured, bps: 1_000_000, ..Measure::default() });
        let position = command.position;
        let reply = match agent.handle_command(command.clone(), now_ns) {
            Step::Answer(reply) => reply,
            Step::Enforce => {
                checks.accepted(at, &command)?;
                node.durable = agent.saved().clone();
                if dies_early {
                    self.count_agent(at);
                    self.agents[at].agent = None;
                    self.schedule(300 * MS, Event::Start(Place::Agent(at)));
                    return Ok(());
                }
                agent.enforced(!does_fail)
            }
        };
        node.durable = agent.saved().clone();
        node.enforced = agent.plan().to_vec();
        checks.agent(at, position, node.durable.position)?;
        self.send(Place::Agent(at), from, Message::Reply(at, reply));
        Ok(())
    }

    fn answered(
        &mut self,
        at: usize,
        sequence: u64,
        answer: &Result<Outcome, Denial>,
        checks: &mut Checks,
    ) -> Result<(), String> {
        let Ok(outcome) = answer else { return Ok(()) };
        checks.answered(at as u64 + 1, sequence, outcome)?;
        let client = &mut self.clients[at];
        if client.sequence != sequence || client.asked.is_none() {
            return Ok(());
        }
        match outcome {
            Outcome::Admitted(job) => client.jobs.push(*job),
            Outcome::Released { job, .. } => client.jobs.retain(|own| own != job),
            Outcome::Refused(_) | Outcome::Repaired { .. } => {}
        }
        client.asked = None;
        let think = self.below(120) * MS;
        self.schedule(think, Event::Retry(at, sequence + 1));
        Ok(())
    }

    /// Asks again, or for something new.
    fn retry(&mut self, at: usize, sequence: u64, checks: &mut Checks) {
        let brains = self.brains.len();
        let choice = self.random.next_u32() as usize;
        let client = &mut self.clients[at];
        if client.asked.is_none() {
            if self.is_healed || sequence < client.sequence {
                return;
            }
            client.sequence += 1;
            let is_new = client.jobs.is_empty() || choice % 5 < 3;
            let ask = match is_new {
                _ if choice % 16 == 7 => broken(self.ground.site.as_deref(), choice / 16),
                _ if choice % 32 == 8 => Ask::Defragment { most_moved: 3 },
                true => Ask::Admit {
                    // Now and then two running jobs would have one name.
                    label: Label { name: format!("job{}", choice / 64 % 200), owner: owner(at) },
                    job: JOBS[choice / 8 % JOBS.len()].parse().expect("a job"),
                    unchanged_since: None,
                },
                false => Ask::Release {
                    job: Which::Number(client.jobs[choice / 8 % client.jobs.len()]),
                    owner: Some(owner(at)),
                },
            };
            if let Ask::Release { job: Which::Number(job), .. } = ask {
                checks.release_asked(job);
            }
            client.asked = Some(ask);
        } else if sequence < client.sequence {
            return;
        } else {
            client.target = (client.target + 1) % brains;
        }
        let client = &self.clients[at];
        let (target, sequence) = (client.target, client.sequence);
        let Some(ask) = client.asked.clone() else { return };
        let request = Request { client: at as u64 + 1, sequence, ask };
        self.send(Place::Client(at), Place::Brain(target), Message::Request(request));
        self.schedule(RETRY_NS, Event::Retry(at, sequence));
    }

    fn start(&mut self, place: Place, checks: &mut Checks) -> Result<(), String> {
        match place {
            Place::Brain(at) if self.brains[at].brain.is_none() => {
                let config = Config {
                    holder: self.next_holder,
                    lease_ns: LEASE_NS,
                    claim_every_ns: CLAIM_NS,
                    resend_ns: RESEND_NS,
                    storage_timeout_ns: STORAGE_NS,
                    snapshot_bytes: 1500,
                    abstraction: Abstraction::Parfait,
                    iterations: 8,
                };
                self.next_holder += 1;
                #[cfg_attr(
                    not(feature = "seeded-bugs"),
                    expect(unused_mut, reason = "seeded bugs are a feature")
                )]
                let mut brain = Brain::new(config, self.ground.clone(), &self.switches());
                #[cfg(feature = "seeded-bugs")]
                if let Some(bug) = self.bug {
                    brain.plant(bug);
                }
                (self.brains[at].holder, self.brains[at].brain) = (config.holder, Some(brain));
                self.brains[at].broken = None;
                self.with_brain(at, checks, |brain, now_ns| brain.handle_timeout(now_ns))
            }
            Place::Agent(at) if self.agents[at].agent.is_none() => {
                let ports_bps = self.network.ports_bps(self.agents[at].node);
                let saved = self.agents[at].durable.clone();
                #[cfg_attr(
                    not(feature = "seeded-bugs"),
                    expect(unused_mut, reason = "seeded bugs are a feature")
                )]
                let mut agent = Agent::new(ports_bps, saved);
                #[cfg(feature = "seeded-bugs")]
                if let Some(bug) = self.bug {
                    agent.plant(bug);
                }
                self.agents[at].enforced = agent.plan().to_vec();
                self.agents[at].agent = Some(agent);
                Ok(())
            }
            Place::Disk => {
                self.is_disk_up = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// One of the faults that are not those of a single message.
    fn trouble(&mut self) {
        let brain = self.below(self.brains.len() as u64) as usize;
        let after = (20 + self.below(2_500)) * MS;
        match self.below(10) {
            0 if self.faults.crashes => {
                self.count_brain(brain);
                self.brains[brain].brain = None;
                self.schedule(after, Event::Start(Place::Brain(brain)));
            }
            1 if self.faults.crashes => {
                let agent = self.below(self.agents.len() as u64) as usize;
                self.count_agent(agent);
                self.agents[agent].agent = None;
                self.schedule(after, Event::Start(Place::Agent(agent)));
            }
            2 if self.faults.crashes => {
                self.disk.crash(&mut self.random);
                self.disk_epoch += 1;
                self.is_disk_up = false;
                self.schedule(after / 4, Event::Start(Place::Disk));
            }
            8 | 9 if self.faults.freezes => {
                let still_ns = self.below(FROZEN_NS / MS) * MS;
                let node = &mut self.brains[brain];
                node.frozen_ns = self.now_ns + still_ns;
                // Its clock may stand still too.
                if self.random.next_u32().is_multiple_of(2) {
                    node.ahead_ns = node.ahead_ns.saturating_sub(still_ns);
                }
            }
            4 if self.faults.partitions => {
                let store = Place::LeaseStore;
                self.cut.extend([(Place::Brain(brain), store), (store, Place::Brain(brain))]);
            }
            3 if self.faults.partitions => {
                let others = [
                    Place::LeaseStore,
                    Place::Disk,
                    Place::Client(0),
                    Place::Agent(0),
                    Place::Agent(1),
                ];
                for other in others {
                    for pair in [(Place::Brain(brain), other), (other, Place::Brain(brain))] {
                        if self.random.next_u32().is_multiple_of(2) {
                            self.cut.push(pair);
                        }
                    }
                }
            }
            5 => self.cut.clear(),
            6 if self.faults.clocks => {
                let jump = self.below(5_000) * MS;
                let node = &mut self.brains[brain];
                node.ahead_ns = match self.random.next_u32() % 3 {
                    0 => node.ahead_ns.saturating_sub(jump),
                    1 => node.ahead_ns + jump,
                    _ => {
                        self.lease.ahead_ns += jump / 4;
                        node.ahead_ns
                    }
                };
                let wake = self.brains[brain].wake;
                self.schedule(0, Event::Wake(brain, wake));
            }
            7 if self.faults.full => self.disk.is_full = !self.disk.is_full,
            _ => {}
        }
    }

    fn count_brain(&mut self, at: usize) {
        let Some(brain) = &self.brains[at].brain else { return };
        let (tally, counters) = (&mut self.tally, brain.counters());
        tally.terms += counters.terms;
        tally.fenced += counters.fenced;
        tally.torn_tails += counters.torn_tails;
        tally.snapshots += counters.snapshots;
        tally.admitted += counters.admitted;
        tally.released += counters.released;
        tally.restored += counters.restored;
        tally.refused += counters.refused;
        tally.repeated += counters.repeated;
        tally.repairs += counters.repairs;
        tally.workers_moved += counters.workers_moved;
        tally.leases_lost += counters.leases_lost;
        tally.storage_failed += counters.storage_failed;
        tally.storage_silent += counters.storage_silent;
    }

    fn count_agent(&mut self, at: usize) {
        let Some(agent) = &self.agents[at].agent else { return };
        let counters = agent.counters();
        self.tally.lower_term += counters.lower_term;
        self.tally.overtaken += counters.overtaken;
        self.tally.not_enforced += counters.not_enforced;
    }
}

/// The nodes with an agent: hosts, and every other switch.
fn governed() -> Vec<NodeId> {
    let shape: Shape = SHAPE.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    topology.hosts().chain(topology.switches().step_by(2)).collect()
}

/// A part of the network that goes down, or comes back.
fn broken(site: Option<&Site>, choice: usize) -> Ask {
    let topology = &site.expect("the ground has one").topology;
    let part = match choice % 4 {
        0 => {
            Part::Node(topology.nodes().nth(choice / 8 % topology.nodes().len()).expect("a node").0)
        }
        _ => {
            let links: Vec<LinkId> = topology.links().map(|(id, _)| id).collect();
            let link = links[choice / 8 % links.len()];
            if choice % 4 == 1 { Part::Carrier(link) } else { Part::Link(link) }
        }
    };
    // More comes back than goes, so that most is up.
    Ask::Outage { parts: vec![part], is_down: (choice / 4).is_multiple_of(2), most_moved: 20 }
}

/// Who a client's jobs belong to.
fn owner(client: usize) -> String {
    format!("client{client}")
}

/// The order of two positions, for messages.
pub(crate) fn shown(position: Position) -> String {
    format!("({}, {})", position.term, position.sequence)
}

impl Tally {
    pub(crate) fn add(&mut self, mut other: Tally) {
        let pairs = self.numbers().into_iter().zip(other.numbers());
        for ((_, sum), (_, one)) in pairs {
            *sum += *one;
        }
    }

    /// Everything that can go wrong did.
    pub(crate) fn check_thorough(mut self) {
        for (name, number) in self.numbers() {
            assert!(*number > 0, "never happened: {name}");
        }
    }

    fn numbers(&mut self) -> [(&'static str, &mut u64); 21] {
        [
            ("a term", &mut self.terms),
            ("a fenced write", &mut self.fenced),
            ("a torn end that was cut", &mut self.torn_tails),
            ("a torn write", &mut self.torn_writes),
            ("a snapshot", &mut self.snapshots),
            ("an admission", &mut self.admitted),
            ("a release", &mut self.released),
            ("a guarantee that came back by a release", &mut self.restored),
            ("a refusal", &mut self.refused),
            ("a repeated request", &mut self.repeated),
            ("a command of a lower term", &mut self.lower_term),
            ("an overtaken command", &mut self.overtaken),
            ("a plan that a host could not enforce", &mut self.not_enforced),
            ("a lost lease", &mut self.leases_lost),
            ("a failed write", &mut self.storage_failed),
            ("a silent disk", &mut self.storage_silent),
            ("an outage or its end", &mut self.repairs),
            ("a moved worker", &mut self.workers_moved),
            ("a time of a job at a host", &mut self.phases),
            ("an event", &mut self.events),
            ("a time to settle", &mut self.healed_ns),
        ]
    }
}
