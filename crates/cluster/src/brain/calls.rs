//! gRPC: checks what callers say, passes it to the actor, and waits for what becomes of it.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use parfait::brain::{Ask, Denial, Request as Wish, Which};
use parfait::job::Job;
use parfait::log::{Label, Outcome};
use parfait::repair_log::Part;
use service::admission::Call;
use service::log;
use service::text::one_line;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status, Streaming};
use topology::graph::Topology;

use super::cluster::Cluster;
use super::inputs::{Answer, Attached, Input, MAX_COMMANDS, NotAttached};
use super::placing::NoTrial;
use crate::convert;
use crate::keys::Nonce;
use crate::proto::brain_server::Brain;
use crate::proto::{self, Port, Serialised};
use crate::view::{BrainView, ClusterEvent, View};
use crate::web::{EventLog, MAX_EVENTS};
use crate::words::counted;

/// The metadata entry in which a brain that does not lead names the one that does.
pub const LEADER_ENTRY: &str = "dquant-leader";

/// How long a caller waits for an answer: longer than a change of the leader takes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a new connection may take to say whose agent it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest note of an agent that is kept.
const MAX_NOTE_BYTES: usize = 512;

/// Ports of an agent that are kept: as many as a node can have.
const MAX_PORTS: usize = topology::graph::MAX_PORTS as usize;

/// Longest name of an interface that is kept.
const MAX_INTERFACE_BYTES: usize = 16;

/// Events that a subscriber gets before others may.
const EVENTS_AT_ONCE: usize = 64;

/// Parts of the network that one request may name.
const MAX_PARTS: usize = 256;

/// Longest text of a job.
const MAX_JOB_BYTES: usize = 1024;

/// What calls need.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) view: watch::Receiver<Arc<View>>,
    pub(super) events: Arc<EventLog>,
    pub(super) leading: watch::Receiver<bool>,
    pub(super) cluster: Arc<Cluster>,
}

/// Names the leader, if another brain is known to be it. What was known last may be this brain
/// itself.
fn not_leading(brain: &BrainView) -> Status {
    let Some(leader) = brain.leader.as_ref().filter(|leader| **leader != brain.address) else {
        return Status::failed_precondition(format!(
            "no brain leads\nbrains cannot lead without their ledger: is {} in reach? the brains' logs say why not",
            brain.store
        ));
    };
    let mut status = Status::failed_precondition(format!("this brain does not lead; ask {leader}"));
    if let Ok(leader) = leader.parse() {
        status.metadata_mut().insert(LEADER_ENTRY, leader);
    }
    status
}

#[derive(Debug)]
pub(super) struct Service {
    handle: Handle,
    next_agent: AtomicU64,
    /// The newest view that somebody asked for, and the reply that it became.
    newest: Mutex<Option<(Arc<View>, Serialised)>>,
    /// Views that became a reply.
    pub(super) views_serialised: AtomicU64,
}

impl Service {
    pub(super) fn new(handle: Handle) -> Service {
        let (newest, views_serialised) = Default::default();
        Service { handle, next_agent: AtomicU64::new(1), newest, views_serialised }
    }

    /// The newest view, serialised once for all who ask for it, and whether it is that of a leader.
    fn newest_view(&self) -> Result<(bool, Serialised), Status> {
        // What it guards is replaced as a whole.
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let view = Arc::clone(&self.handle.view.borrow());
        let is_leading = view.brain.state == "leading";
        if let Some((of, reply)) = &*newest
            && Arc::ptr_eq(of, &view)
        {
            return Ok((is_leading, reply.clone()));
        }
        let json = serde_json::to_vec(&*view);
        let json = json.map_err(|error| Status::internal(error.to_string()))?;
        let reply = Serialised::of(&proto::ViewReply { json });
        self.views_serialised.fetch_add(1, Ordering::Relaxed);
        *newest = Some((view, reply.clone()));
        Ok((is_leading, reply))
    }

    fn not_leading(&self) -> Status {
        not_leading(&self.handle.view.borrow().brain)
    }

    /// Sends something to the actor and waits for its answer.
    async fn tell<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> Input) -> Result<T, Status> {
        let (sender, receiver) = oneshot::channel();
        let told = async {
            self.handle.inputs.send(input(sender)).await.ok()?;
            receiver.await.ok()
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, told).await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Status::unavailable(
                "the brain stopped, or gave up leading\nwhat became of the request is not known: ask again",
            )),
            Err(_) => Err(Status::deadline_exceeded(
                "the log did not answer in time\nwhat became of the request is not known: ask again",
            )),
        }
    }

    async fn repair(
        &self,
        from: Option<proto::Client>,
        ask: Ask,
    ) -> Result<Response<proto::RepairReply>, Status> {
        let (client, sequence) = client(from)?;
        let request = Wish { client, sequence, ask };
        let answer = self.tell(|answer| Input::Ask { request, answer }).await?;
        use proto::repair_reply::Result;
        let outcome = self.outcome(answer)?;
        let reason = reason_of(&outcome);
        let result = match outcome {
            Outcome::Repaired { hit, moved, degraded } => {
                Result::Repaired(proto::Repaired { hit, moved, degraded })
            }
            Outcome::Refused(refused) => Result::Refused(refused.text),
            _ => return Err(Status::internal("another request's answer")),
        };
        Ok(Response::new(proto::RepairReply { result: Some(result), reason }))
    }

    fn outcome(&self, answer: Answer) -> Result<Outcome, Status> {
        match answer {
            Ok(outcome) => Ok(outcome),
            Err(Denial::NotLeading) => Err(self.not_leading()),
            Err(busy @ Denial::Busy) => Err(Status::resource_exhausted(busy.to_string())),
            Err(other) => Err(Status::invalid_argument(other.to_string())),
        }
    }
}

/// Why a request was refused, as the messages number it; 0 for one that was not.
fn reason_of(outcome: &Outcome) -> i32 {
    match outcome {
        Outcome::Refused(refused) => convert::reason(refused.reason) as i32,
        _ => 0,
    }
}

fn job(text: &str) -> Result<Job, Status> {
    if text.len() > MAX_JOB_BYTES {
        return Err(Status::invalid_argument(format!("a job of {} bytes of text", text.len())));
    }
    text.parse().map_err(|error| {
        Status::invalid_argument(format!(
            "{error}\njobs are written as in 'ring:8@5G slots=2': see docs/parfait.md"
        ))
    })
}

/// A host or switch by its name, or a link as NAME:PORT of one end.
fn part(topology: &Topology, name: &str) -> Result<Part, Status> {
    if let Some(node) = topology.named(name) {
        return Ok(Part::Node(node));
    }
    let link = name.rsplit_once(':').and_then(|(node, port)| {
        let node = topology.node(topology.named(node)?);
        node.link_at(port.parse().ok()?)
    });
    link.map(Part::Link).ok_or_else(|| {
        Status::not_found(format!(
            "the topology has no '{name}'\nname a host, a switch, or a link as NAME:PORT of one of its ends"
        ))
    })
}

fn client(client: Option<proto::Client>) -> Result<(u64, u64), Status> {
    let proto::Client { number, sequence } = client.unwrap_or_default();
    if number == 0 {
        return Err(Status::invalid_argument("the request does not say which client it is from"));
    }
    Ok((number, sequence))
}

fn event_message(event: &ClusterEvent) -> proto::Event {
    let ClusterEvent { number, unix_ms, kind, job, text } = event.clone();
    proto::Event { number, unix_ms, kind, job, text }
}

/// At most so many bytes of what a caller says, as a single line that a terminal shows and does not
/// obey.
fn cut(text: &str, bytes: usize) -> String {
    let mut text = one_line(text).into_owned();
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

#[tonic::async_trait]
impl Brain for Service {
    async fn submit(
        &self,
        call: Request<proto::SubmitRequest>,
    ) -> Result<Response<proto::SubmitReply>, Status> {
        let _under_way = Call::of(&call);
        let asked = call.into_inner();
        let (client, sequence) = client(asked.client)?;
        let job = job(&asked.job)?;
        let label = Label { name: asked.name, owner: asked.owner };
        let ask = Ask::Admit { label, job, unchanged_since: asked.unchanged_since };
        let request = Wish { client, sequence, ask };
        let answer = self.tell(|answer| Input::Ask { request, answer }).await?;
        use proto::submit_reply::Result;
        let outcome = self.outcome(answer)?;
        let reason = reason_of(&outcome);
        let result = match outcome {
            Outcome::Admitted(job) => Result::Admitted(proto::Admitted { job }),
            Outcome::Refused(refused) => Result::Refused(refused.text),
            _ => return Err(Status::internal("another request's answer")),
        };
        Ok(Response::new(proto::SubmitReply { result: Some(result), reason }))
    }

    async fn place(
        &self,
        call: Request<proto::PlaceRequest>,
    ) -> Result<Response<proto::PlaceReply>, Status> {
        let under_way = Call::of(&call);
        let proto::PlaceRequest { name, owner, job: text } = call.into_inner();
        let caller = (under_way.as_ref().map(|call| call.origin()), owner.clone());
        let (label, job) = (Label { name, owner }, job(&text)?);
        let placed = self.tell(|answer| Input::Place { caller, label, job, answer }).await;
        // It changes nothing, so what became of it matters to nobody.
        let placed = placed.map_err(|status| match status.code() {
            Code::DeadlineExceeded => Status::deadline_exceeded(
                "other trials took too long\nnothing was changed: try again later",
            ),
            _ => status,
        })?;
        let (placed, unchanged_since) = placed.map_err(|why| match why {
            NoTrial::NotLeading => self.not_leading(),
            NoTrial::Busy => Status::resource_exhausted(why.to_string()),
        })?;
        use proto::place_reply::Result;
        let reason =
            placed.as_ref().err().map_or(0, |refused| convert::reason(refused.reason) as i32);
        let result = placed.map_or_else(|refused| Result::Refused(refused.text), Result::Held);
        Ok(Response::new(proto::PlaceReply { result: Some(result), unchanged_since, reason }))
    }

    async fn release(
        &self,
        call: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::ReleaseReply>, Status> {
        let _under_way = Call::of(&call);
        let proto::ReleaseRequest { client: from, job, name, owner } = call.into_inner();
        let (client, sequence) = client(from)?;
        let owner = (!owner.is_empty()).then_some(owner);
        let job = if name.is_empty() { Which::Number(job) } else { Which::Name(name) };
        let request = Wish { client, sequence, ask: Ask::Release { job, owner } };
        let answer = self.tell(|answer| Input::Ask { request, answer }).await?;
        use proto::release_reply::Result;
        let outcome = self.outcome(answer)?;
        let reason = reason_of(&outcome);
        let result = match outcome {
            Outcome::Released { job, restored } => {
                Result::Released(proto::Released { job, restored })
            }
            Outcome::Refused(refused) => Result::Refused(refused.text),
            _ => return Err(Status::internal("another request's answer")),
        };
        Ok(Response::new(proto::ReleaseReply { result: Some(result), reason }))
    }

    async fn outage(
        &self,
        call: Request<proto::OutageRequest>,
    ) -> Result<Response<proto::RepairReply>, Status> {
        let _under_way = Call::of(&call);
        let proto::OutageRequest { client: from, parts, is_down, most_moved } = call.into_inner();
        if parts.is_empty() || parts.len() > MAX_PARTS {
            return Err(Status::invalid_argument(format!("name 1 to {MAX_PARTS} parts")));
        }
        let part = |name: &String| part(&self.handle.cluster.topology, name);
        let parts = parts.iter().map(part).collect::<Result<_, _>>()?;
        self.repair(from, Ask::Outage { parts, is_down, most_moved }).await
    }

    async fn defragment(
        &self,
        call: Request<proto::DefragmentRequest>,
    ) -> Result<Response<proto::RepairReply>, Status> {
        let _under_way = Call::of(&call);
        let proto::DefragmentRequest { client: from, most_moved } = call.into_inner();
        self.repair(from, Ask::Defragment { most_moved }).await
    }

    async fn view(
        &self,
        call: Request<proto::ViewRequest>,
    ) -> Result<Response<Serialised>, Status> {
        let _under_way = Call::of(&call);
        self.tell(|answer| Input::Show { answer }).await?;
        let (is_leading, reply) = self.newest_view()?;
        if !is_leading && !call.into_inner().any_brain {
            return Err(self.not_leading());
        }
        Ok(Response::new(reply))
    }

    async fn topology(
        &self,
        call: Request<proto::TopologyRequest>,
    ) -> Result<Response<Serialised>, Status> {
        let _under_way = Call::of(&call);
        let topology = self.tell(|answer| Input::Topology { answer }).await?;
        topology.map(Response::new).ok_or_else(|| self.not_leading())
    }

    type EventsStream = ReceiverStream<Result<proto::Event, Status>>;

    async fn events(
        &self,
        call: Request<proto::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let under_way = Call::of(&call);
        let mut leading = self.handle.leading.clone();
        if !*leading.borrow_and_update() {
            return Err(self.not_leading());
        }
        let log = Arc::clone(&self.handle.events);
        let after = match call.into_inner().after {
            0 => log.last(),
            number => number,
        };
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(async move {
            let _under_way = under_way;
            let mut news = log.subscribe();
            let mut seen = after;
            loop {
                for event in log.since(seen, EVENTS_AT_ONCE) {
                    let missed = event.number.saturating_sub(seen + 1);
                    if missed > 0 && seen > 0 {
                        let text = format!(
                            "{} missed: the brain keeps the newest {MAX_EVENTS}",
                            counted(missed, "event")
                        );
                        let _ = sender.send(Err(Status::data_loss(text))).await;
                        return;
                    }
                    seen = event.number;
                    if sender.send(Ok(event_message(&event))).await.is_err() {
                        return;
                    }
                }
                let is_open = tokio::select! {
                    changed = news.changed() => changed.is_ok(),
                    () = sender.closed() => false,
                    // Subscribers look for the leader.
                    _ = leading.wait_for(|is_leading| !is_leading) => false,
                };
                if !is_open {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type AttachStream = Pin<Box<dyn Stream<Item = Result<proto::Command, Status>> + Send>>;

    async fn attach(
        &self,
        call: Request<Streaming<proto::AgentMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let (peer, under_way) = (call.remote_addr(), Call::of(&call));
        let mut messages = call.into_inner();
        let first = tokio::time::timeout(HELLO_TIMEOUT, messages.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("the agent said nothing"))??;
        let Some(proto::agent_message::Message::Hello(hello)) =
            first.and_then(|first| first.message)
        else {
            return Err(Status::invalid_argument("an agent begins with its name"));
        };
        if hello.nonce.len() != size_of::<Nonce>() {
            return Err(Status::invalid_argument(
                "the agent sends no nonce\nuse the brain's version of `dquant agent`",
            ));
        }
        let number = self.next_agent.fetch_add(1, Ordering::Relaxed);
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        let agent = Attached {
            number,
            commands,
            nonce: hello.nonce,
            enforcer: cut(&hello.enforcer, 32),
            note: cut(&hello.note, MAX_NOTE_BYTES),
            heard: Instant::now(),
            ports: hello
                .ports
                .into_iter()
                .take(MAX_PORTS)
                .map(|port| Port { interface: cut(&port.interface, MAX_INTERFACE_BYTES), ..port })
                .collect(),
            faults: Vec::new(),
        };
        let name = cut(&hello.node, 256);
        let attached = self.tell(|answer| Input::Attached { name, agent, answer }).await?;
        let node = match attached {
            Ok(node) => node,
            Err(NotAttached::NotLeading) => return Err(self.not_leading()),
            Err(NotAttached::NoNode(name)) => {
                log::refusal(format_args!("an agent at {peer:?} calls itself '{name}'"));
                return Err(Status::not_found(format!(
                    "no host '{name}', and no switch with an agent\n--node takes a name of the topology, and the \
                     brain's --switch-agents those of switches"
                )));
            }
        };
        let inputs = self.handle.inputs.clone();
        tokio::spawn(async move {
            let _under_way = under_way;
            listen(node, number, &mut messages, &inputs).await;
            let _ = inputs.send(Input::Detached { node, number }).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(Ok))))
    }
}

/// Passes on what an agent says, until it is gone or talks nonsense.
async fn listen(
    node: topology::graph::NodeId,
    number: u64,
    messages: &mut Streaming<proto::AgentMessage>,
    inputs: &mpsc::Sender<Input>,
) {
    while let Ok(Some(message)) = messages.message().await {
        let Some(proto::agent_message::Message::Reply(message)) = message.message else { return };
        let reply = match convert::reply(&message) {
            Ok(reply) => reply,
            Err(error) => {
                log::refusal(format_args!("an agent said something impossible: {error}"));
                return;
            }
        };
        let note = cut(&message.note, MAX_NOTE_BYTES);
        let down =
            message.down_ports.into_iter().filter_map(|port| u8::try_from(port).ok()).collect();
        if inputs.send(Input::Reply { node, number, reply, note, down }).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn what_a_caller_says_is_one_short_line_that_no_terminal_obeys() {
        let attack = "\u{1b}[2Jnote\n  12  admitted  job 99";
        assert_eq!(cut(attack, 512), "\u{fffd}[2Jnote\u{fffd}  12  admitted  job 99");
        assert_eq!(cut("Grüße", 3), "Gr");
        assert_eq!(cut("\u{7}\u{7}", 4), "\u{fffd}");
    }

    #[test]
    fn a_brain_that_does_not_lead_names_another_one_and_never_itself() {
        let brain = |leader: Option<&str>| BrainView {
            address: "10.0.0.5:4795".to_owned(),
            leader: leader.map(str::to_owned),
            store: "etcd 10.0.0.1:2379".to_owned(),
            ..BrainView::default()
        };
        let other = not_leading(&brain(Some("10.0.0.6:4795")));
        assert_eq!(other.code(), Code::FailedPrecondition);
        assert_eq!(other.metadata().get(LEADER_ENTRY).expect("an entry"), "10.0.0.6:4795");
        for nobody in [None, Some("10.0.0.5:4795")] {
            let status = not_leading(&brain(nobody));
            assert!(status.message().starts_with("no brain leads\n"), "{}", status.message());
            assert!(status.message().contains("is etcd 10.0.0.1:2379 in reach?"));
            assert!(status.metadata().get(LEADER_ENTRY).is_none());
        }
    }
}
