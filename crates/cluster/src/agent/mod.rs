//! The daemon around [`parfait::agent::Agent`]: it follows whichever brain leads, makes what it
//! must not forget durable, and has an [`Enforcer`] put plans into force.
//!
//! | module | what it holds |
//! |---|---|
//! | `state` | what must survive a restart |
//! | `gates` | when exchanges of jobs may begin |
//!
//! When it starts, the plan of its file is in force before any brain is asked. When it ends,
//! however it ends, the plan stays in force in the kernel.

mod gates;
mod state;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nic::rates::RateTable;
use parfait::agent::{self as machine, Measure, Reply, Share, Step};
use parfait::queues::rebinding::renamed;
use parfait::queues::{Guarantee, Plan, Port, Scheme};
use serde::Serialize;
use service::error::Error;
use service::signals::EndSignals;
use service::{log, runtime};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use self::gates::Gates;
use self::state::StateFile;
use crate::client::{Brains, named_leader, refusal};
use crate::convert;
use crate::enforce::{Enforcer, PortPlan};
use crate::keys::{Nonce, nonce};
use crate::proto;
use crate::proto::agent_message::Message;
use crate::words::counted;

/// How often what jobs send is measured and reported.
const MEASURE_EVERY: Duration = Duration::from_secs(1);

/// Between attempts to find the leader.
const PAUSE: Duration = Duration::from_millis(200);

/// The longest pause between attempts where connections end soon, as when two agents of one node
/// displace each other.
const LONG_PAUSE: Duration = Duration::from_secs(5);

/// A connection that lasted so long was a good one.
const LASTING: Duration = Duration::from_secs(10);

/// How long a brain may take to accept an agent.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(3);

/// A leader that is not heard for so long is reported.
const SILENCE: Duration = Duration::from_secs(10);

/// Replies on their way to the brain.
const MAX_REPLIES: usize = 16;

/// Units of weight in which queues are divided: fine enough that rounding costs less than 0.01 % of
/// a port.
const WEIGHT_UNITS: u32 = 1 << 14;

/// Largest frame that is counted on: Ethernet with jumbo frames.
const FRAME_BYTES: u32 = 9_216;

/// A port of the node and the interface that it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortConfig {
    /// Its number in the topology.
    pub port: u8,
    /// The interface through which packets leave.
    pub interface: String,
    /// What it carries, in bit/s.
    pub rate_bps: u64,
}

impl PortConfig {
    fn message(&self) -> proto::Port {
        let PortConfig { port, interface, rate_bps } = self.clone();
        proto::Port { port: port.into(), interface, rate_bps }
    }
}

/// How to run an agent.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's name in the topology.
    pub node: String,
    /// The brains.
    pub brains: Brains,
    /// Where its state is.
    pub state: PathBuf,
    /// Its ports.
    pub ports: Vec<PortConfig>,
    /// Queues of a port for jobs.
    pub queues: u8,
    /// How jobs are given queues.
    pub scheme: Scheme,
    /// What wires of this machine read; times of jobs are not kept without.
    pub rate_limits: Option<Arc<RateTable>>,
    /// What the enforcer is called, for people.
    pub enforcer: String,
}

/// Printed once an agent runs.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// Always "agent".
    pub role: &'static str,
    /// The node.
    pub node: String,
    /// What it enforces with.
    pub enforcer: String,
    /// Whether wires of this machine are told when exchanges of jobs begin.
    pub keeps_times: bool,
    /// Its ports.
    pub ports: Vec<PortConfig>,
    /// Jobs whose guarantees were put into force again.
    pub jobs: usize,
    /// Process number.
    pub pid: u32,
}

/// A job of this node, for programs that run here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its number.
    pub job: u64,
    /// That of its packets.
    pub dscp: u8,
}

/// Jobs of this node by name, for whoever asks on this machine.
#[derive(Clone, Debug, Default)]
pub struct Jobs(Arc<Mutex<BTreeMap<String, Known>>>);

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        // It is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job with that name.
    pub fn named(&self, name: &str) -> Option<Known> {
        self.lock().get(name).copied()
    }

    /// All of them.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }
}

/// The state machine, its file and its enforcer.
struct Body {
    config: Config,
    agent: machine::Agent,
    file: StateFile,
    enforcer: Box<dyn Enforcer>,
    gates: Option<Arc<Mutex<Gates>>>,
    /// By job: its name, as the last command said.
    names: BTreeMap<u64, String>,
    /// What the enforcer was given last.
    in_force: Vec<PortPlan>,
    jobs: Jobs,
    /// By port and job: bytes when they were read last.
    sent: BTreeMap<(u8, u64), u64>,
    measured: Instant,
    begun: Instant,
    /// Why something does not work, for people.
    note: String,
    /// Plans without the right signature, and what was wrong with the last one if none with it came
    /// since.
    unsigned: u64,
    stranger: Option<String>,
}

impl Body {
    fn name(names: &BTreeMap<u64, String>, job: u64) -> String {
        names.get(&job).cloned().unwrap_or_default()
    }

    /// Makes what the state machine knows durable.
    ///
    /// # Errors
    /// When the file cannot be written: nothing may be enforced or answered then.
    fn save(&self) -> Result<(), Error> {
        let saved = self.file.save(self.agent.saved(), |job| Body::name(&self.names, job));
        saved.map_err(|error| {
            Error::because(self.config.state.display(), &error)
                .hint("the agent ends: its plan stays in force")
        })
    }

    /// Puts a plan into force.
    fn enforce(&mut self, shares: &[Share]) -> bool {
        let plans = port_plans(&self.config, shares, &self.in_force);
        let applied = plans.and_then(|plans| {
            let applied = tokio::task::block_in_place(|| self.enforcer.apply(&plans));
            applied.map_err(|error| error.to_string())?;
            self.in_force = plans;
            Ok(())
        });
        self.note = applied.as_ref().err().cloned().unwrap_or_default();
        match (&applied, &self.gates) {
            (Err(why), _) => log::line(format_args!("the plan is not enforced: {why}")),
            (Ok(()), Some(gates)) => lock(gates).apply(shares, |job| Body::name(&self.names, job)),
            (Ok(()), None) => {}
        }
        applied.is_ok()
    }

    /// Why something does not work, for people.
    fn note(&self) -> String {
        match &self.gates {
            _ if self.stranger.is_some() => self.stranger.clone().unwrap_or_default(),
            _ if !self.note.is_empty() => self.note.clone(),
            Some(gates) => lock(gates).note(),
            None if self.agent.plan().iter().any(|share| share.phase.is_some()) => {
                "it keeps no rate limits, so exchanges of jobs begin when they like".to_owned()
            }
            None => String::new(),
        }
    }

    /// The order of a command, if a brain signed it for this connection.
    fn order(&mut self, message: &proto::Command, nonce: &Nonce) -> Option<proto::Order> {
        let Config { node, brains, .. } = &self.config;
        match convert::order(message, &brains.keys.plan, node, nonce) {
            Ok(order) => {
                self.stranger = None;
                Some(order)
            }
            Err(error) => {
                self.unsigned += 1;
                let refused = counted(self.unsigned, "plan");
                self.stranger = Some(format!("refused {refused} so far: {error}"));
                log::refusal(format_args!(
                    "a plan is refused: {error}; hint: agents and brains need the same token and version, and TLS where others reach their network"
                ));
                None
            }
        }
    }

    fn command(&mut self, message: &proto::Command, nonce: &Nonce) -> Result<Option<Reply>, Error> {
        let Some(message) = self.order(message, nonce) else { return Ok(None) };
        let command = match convert::command(&message) {
            Ok(command) => command,
            Err(error) => {
                log::refusal(format_args!("a command that is impossible: {error}"));
                return Ok(None);
            }
        };
        let now_ns = self.begun.elapsed().as_nanos() as u64;
        let reply = match self.agent.handle_command(command, now_ns) {
            Step::Answer(reply) => {
                if let Err(objection) = reply.verdict {
                    log::refusal(format_args!("the plan is refused: {objection}"));
                }
                reply
            }
            Step::Enforce => {
                let before = std::mem::take(&mut self.names);
                self.names =
                    message.plan.iter().map(|share| (share.job, share.name.clone())).collect();
                self.save()?;
                let shares = self.agent.plan().to_vec();
                let is_enforced = self.enforce(&shares);
                let reply = self.agent.enforced(is_enforced);
                if !is_enforced {
                    self.names = before;
                    let shares = self.agent.plan().to_vec();
                    let note = std::mem::take(&mut self.note);
                    // What was in force before is in force, by the enforcer's promise; its own
                    // state is in doubt.
                    self.enforce(&shares);
                    self.note = note;
                } else {
                    let jobs: std::collections::BTreeSet<u64> =
                        shares.iter().map(|share| share.job).collect();
                    log::line(format_args!(
                        "guarantees of {} are in force, term {}",
                        counted(jobs.len(), "job"),
                        reply.position.term
                    ));
                }
                self.publish();
                reply
            }
        };
        self.save()?;
        Ok(Some(reply))
    }

    /// Says which jobs are here.
    fn publish(&self) {
        let known = self.agent.plan().iter().filter_map(|share| {
            let name = self.names.get(&share.job).filter(|name| !name.is_empty())?;
            Some((name.clone(), Known { job: share.job, dscp: share.dscp.value() }))
        });
        *self.jobs.lock() = known.collect();
    }

    /// Ports whose interface has no carrier, as far as the kernel says so.
    fn down_ports(&self) -> Vec<u32> {
        let is_down = |port: &&PortConfig| {
            let path = format!("/sys/class/net/{}/carrier", port.interface);
            match std::fs::read_to_string(path) {
                Ok(text) => text.trim() == "0",
                // An interface that is switched off has no carrier to read; one that is not shown
                // may be in order.
                Err(error) => error.kind() == std::io::ErrorKind::InvalidInput,
            }
        };
        self.config.ports.iter().filter(is_down).map(|port| port.port.into()).collect()
    }

    /// Reads what jobs have sent since the last time.
    fn measure(&mut self) {
        let sent = match tokio::task::block_in_place(|| self.enforcer.sent()) {
            Ok(sent) => sent,
            Err(error) => {
                self.note = error.to_string();
                return;
            }
        };
        let seconds = self.measured.elapsed().as_secs_f64().max(1e-3);
        self.measured = Instant::now();
        for one in sent {
            let port = self.config.ports.iter().find(|port| port.interface == one.interface);
            let Some(port) = port.map(|port| port.port) else { continue };
            let before = self.sent.insert((port, one.job), one.bytes);
            // A counter that begins anew goes back.
            let bytes = before.map_or(0, |before| one.bytes.saturating_sub(before));
            self.agent.measure(Measure {
                port,
                job: one.job,
                bps: (bytes as f64 * 8.0 / seconds) as u64,
                backlog_bytes: one.backlog_bytes,
                dropped_packets: one.dropped_packets,
            });
        }
        let plan = self.agent.plan();
        self.sent.retain(|(port, job), _| {
            plan.binary_search_by_key(&(*port, *job), |share| (share.port, share.job)).is_ok()
        });
    }
}

fn lock(gates: &Mutex<Gates>) -> MutexGuard<'_, Gates> {
    // What it has is in the table, too, or will be with the next plan.
    gates.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at gates, whether a brain is there or not.
async fn check_gates(gates: Arc<Mutex<Gates>>) {
    let mut tick = tokio::time::interval(MEASURE_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        lock(&gates).check();
    }
}

/// What each port is to guarantee. A share of nothing needs no queue.
///
/// Jobs keep their queues as far as that is possible: one that changes its queue may have packets
/// out of order.
fn port_plans(
    config: &Config,
    shares: &[Share],
    before: &[PortPlan],
) -> Result<Vec<PortPlan>, String> {
    let mut plans = Vec::new();
    for shares in shares.chunk_by(|a, b| a.port == b.port) {
        let port = config.ports.iter().find(|port| port.port == shares[0].port);
        let port = port.ok_or_else(|| format!("there is no port {}", shares[0].port))?;
        let guarantee = |share: &Share| Guarantee {
            job: share.job,
            dscp: share.dscp,
            bps: share.bps,
            flows: 1,
            latency: share.latency,
            burst_bytes: share.burst_bytes,
            is_contended: true,
        };
        let guarantees: Vec<Guarantee> =
            shares.iter().filter(|share| share.bps > 0).map(guarantee).collect();
        // Jobs that send nothing beyond this host leave its port as it is without jobs.
        if guarantees.is_empty() {
            continue;
        }
        let own = Port {
            rate_bps: port.rate_bps,
            queues: config.queues,
            weight_units: WEIGHT_UNITS,
            quantum_bytes: 64,
            frame_bytes: FRAME_BYTES,
            // 32 ms of the port: senders that are paced by delay never fill it, and go-back-N does
            // not pay for bursts.
            buffer_bytes: (port.rate_bps / 250).max(256 << 10),
        };
        let plan = Plan::new(own, config.scheme, &guarantees)
            .map_err(|refusal| format!("port {}: {refusal}", port.port))?;
        let before = before.iter().find(|before| before.interface == port.interface);
        let plan = before.map_or(plan.clone(), |before| renamed(&before.plan, &plan));
        plans.push(PortPlan { interface: port.interface.clone(), plan });
    }
    Ok(plans)
}

/// Runs an agent until it is asked to end. `ready` hears how it began, and `local` gets what
/// programs here may ask for.
///
/// # Errors
/// When its state cannot be read or written, and the errors of `ready`.
pub fn run<E: From<Error>>(
    config: Config,
    enforcer: Box<dyn Enforcer>,
    local: impl FnOnce(Jobs) -> Result<(), Error>,
    ready: impl FnOnce(&Ready) -> Result<(), E>,
) -> Result<(), E> {
    let (file, state) =
        StateFile::open(&config.state, &config.node, config.brains.keys.state.clone())?;
    let saved = state::saved(&state)
        .map_err(|error| Error::invalid(format!("{}: {error}", config.state.display())))?;
    let ports_bps = config.ports.iter().map(|port| (port.port, port.rate_bps)).collect();
    let mut body = Body {
        agent: machine::Agent::new(ports_bps, saved),
        names: state.plan.iter().map(|share| (share.job, share.name.clone())).collect(),
        in_force: Vec::new(),
        file,
        enforcer,
        gates: config.rate_limits.clone().map(|table| Arc::new(Mutex::new(Gates::new(table)))),
        jobs: Jobs::default(),
        sent: BTreeMap::new(),
        measured: Instant::now(),
        begun: Instant::now(),
        note: String::new(),
        unsigned: 0,
        stranger: None,
        config,
    };
    let runtime = runtime::multi_thread()?;
    let ended = runtime.block_on(async {
        let mut signals = EndSignals::listen()?;
        let shares = body.agent.plan().to_vec();
        body.enforce(&shares);
        body.publish();
        if let Some(gates) = body.gates.clone() {
            tokio::spawn(check_gates(gates));
        }
        local(body.jobs.clone())?;
        ready(&Ready {
            role: "agent",
            node: body.config.node.clone(),
            enforcer: body.config.enforcer.clone(),
            keeps_times: body.gates.is_some(),
            ports: body.config.ports.clone(),
            jobs: body.jobs.names().len(),
            pid: std::process::id(),
        })?;
        tokio::select! {
            error = follow(&mut body) => Err(error.into()),
            signal = signals.received() => {
                log::line(format_args!("stopping on {signal}; the plan stays in force"));
                Ok(())
            }
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// Follows whichever brain leads. Returns only when the state cannot be written.
async fn follow(body: &mut Body) -> Error {
    let mut next = 0;
    let mut leader: Option<String> = None;
    let mut heard = Instant::now();
    let mut is_reported = false;
    let mut pauses = Pauses::default();
    // Brains that each name the other are asked no faster than others.
    let mut is_sent_on = false;
    loop {
        let addresses = &body.config.brains.addresses;
        let address = leader.take().unwrap_or_else(|| {
            next += 1;
            addresses[(next - 1) % addresses.len()].clone()
        });
        match attach(body, &address).await {
            Ok(attached) => {
                log::line(format_args!("follows brain {address}"));
                let begun = Instant::now();
                if let Err(error) = serve(body, attached).await {
                    return error;
                }
                log::line(format_args!("brain {address} is gone: its last plan stays in force"));
                (heard, is_reported, is_sent_on) = (Instant::now(), false, false);
                tokio::time::sleep(pauses.after(begun.elapsed())).await;
            }
            Err((_, Some(other))) if !is_sent_on => (leader, is_sent_on) = (Some(other), true),
            Err((why, _)) => {
                is_sent_on = false;
                if heard.elapsed() > SILENCE && !is_reported {
                    log::line(format_args!("no brain leads: {why}; the last plan stays in force"));
                    is_reported = true;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// How long to wait after a connection has ended.
#[derive(Debug, Default)]
struct Pauses {
    /// Connections in a row that ended soon.
    short: u32,
}

impl Pauses {
    /// The pause after a connection that lasted so long.
    fn after(&mut self, lasted: Duration) -> Duration {
        self.short = if lasted < LASTING { self.short.saturating_add(1) } else { 0 };
        let doubled = self.short.saturating_sub(1).min(16);
        (PAUSE * (1 << doubled)).min(LONG_PAUSE)
    }
}

/// A connection to a brain.
struct Connection {
    commands: Streaming<proto::Command>,
    replies: mpsc::Sender<proto::AgentMessage>,
    /// Plans for it are signed with this.
    nonce: Nonce,
}

/// Attaches to a brain; or says why not, and who leads.
async fn attach(body: &Body, address: &str) -> Result<Connection, (String, Option<String>)> {
    let attached = async {
        let brains = &body.config.brains;
        let dialed = brains.dial(address).await.map_err(|error| (error.to_line(), None))?;
        let mut stub = brains.greet(address, dialed).await.map_err(|error| {
            // That nobody is there is no news at once; that somebody else is there is.
            log::refusal(error.to_line());
            (error.to_line(), None)
        })?;
        let nonce = nonce().map_err(|error| (error.to_line(), None))?;
        let (replies, outgoing) = mpsc::channel(MAX_REPLIES);
        let hello = proto::Hello {
            node: body.config.node.clone(),
            enforcer: body.config.enforcer.clone(),
            note: body.note(),
            ports: body.config.ports.iter().map(PortConfig::message).collect(),
            nonce: nonce.to_vec(),
        };
        let first = proto::AgentMessage { message: Some(Message::Hello(hello)) };
        // The channel is new.
        let _ = replies.try_send(first);
        let attached = stub.attach(ReceiverStream::new(outgoing)).await;
        let commands = attached.map_err(|status| {
            let leader = named_leader(&status).filter(|leader| leader != address);
            let why = refusal(address, &status).to_line();
            if leader.is_none() && status.code() != tonic::Code::FailedPrecondition {
                log::line(&why);
            }
            (why, leader)
        })?;
        Ok(Connection { commands: commands.into_inner(), replies, nonce })
    };
    let late = |_| (format!("brain {address} does not answer"), None);
    tokio::time::timeout(ATTACH_TIMEOUT, attached).await.map_err(late)?
}

/// Carries out commands and reports, until the brain is gone.
///
/// # Errors
/// When the state cannot be written.
async fn serve(body: &mut Body, attached: Connection) -> Result<(), Error> {
    let Connection { mut commands, replies, nonce } = attached;
    let mut tick = tokio::time::interval(MEASURE_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let reply = tokio::select! {
            command = commands.message() => match command {
                Ok(Some(command)) => body.command(&command, &nonce)?,
                Ok(None) | Err(_) => return Ok(()),
            },
            _ = tick.tick() => {
                body.measure();
                body.agent.report()
            }
        };
        let Some(reply) = reply else { continue };
        let message =
            Message::Reply(convert::reply_message(&reply, &body.note(), body.down_ports()));
        // A brain that does not read is sent the next report.
        let _ = replies.try_send(proto::AgentMessage { message: Some(message) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_end_soon_are_made_less_and_less_often() {
        let mut pauses = Pauses::default();
        let made = |pauses: &mut Pauses| pauses.after(Duration::from_millis(3));
        assert_eq!([made(&mut pauses), made(&mut pauses)], [PAUSE, PAUSE * 2]);
        for _ in 0..100 {
            assert!(made(&mut pauses) <= LONG_PAUSE);
        }
        assert_eq!(made(&mut pauses), LONG_PAUSE);
        assert_eq!(pauses.after(LASTING), PAUSE, "after a good one it is at once");
    }
}
