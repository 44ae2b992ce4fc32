//! A brain's daemon over a store in memory, with callers and agents that are hostile, slow or
//! wrong.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use parfait::agent::{Measure, Objection, Position, Reply};
use parfait::brain::{Image, Lease, StorageError};
use parfait::log::Label;
use parfait::outage::Outage;
use parfait::spread::Ecmp;
use prost::Message;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::StreamExt;
use tonic::{Code, Request};
use topology::graph::{Capacity, NodeId};
use topology::shape::Shape;

use super::Parts;
use super::calls::Service;
use super::core::Core;
use super::extender;
use super::inputs::{Answer, Attached, Input, MAX_INPUTS};
use super::placing::NoTrial;
use super::{Cluster, machine_config};
use crate::convert;
use crate::keys::{Key, Keys, Nonce};
use crate::proto;
use crate::proto::brain_server::Brain;
use crate::store::{Candidate, Holder, Report, Store};
use crate::view::View;
use crate::web::EventLog;

/// What agents of these tests draw.
const NONCE: Nonce = [7; 32];

fn plan_key() -> Key {
    Keys::of_token("a-token-of-the-tests").plan
}

/// What the brain told the agent of host0.
fn order(command: &proto::Command) -> proto::Order {
    convert::order(command, &plan_key(), "host0", &NONCE).expect("a brain has signed it")
}

const LEASE: Duration = Duration::from_secs(2);

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(8);

/// A log in memory. Its lease goes to another brain, or its writes take for ever, when the test
/// says so.
#[derive(Default)]
struct Memory {
    image: Mutex<Image>,
    is_lost: AtomicBool,
    /// How often the lease was taken back, times two.
    taken_back: AtomicU64,
    hangs: AtomicBool,
}

impl Store for Memory {
    async fn claim(&self, candidate: &Candidate) -> Result<Holder, StorageError> {
        Ok(match self.is_lost.load(Ordering::SeqCst) {
            true => Holder { lease: Lease { holder: 99, term: 2 }, address: "other:1".to_owned() },
            false => Holder {
                lease: Lease {
                    holder: candidate.number,
                    term: 1 + self.taken_back.load(Ordering::SeqCst),
                },
                address: candidate.address.clone(),
            },
        })
    }

    async fn resign(&self, _: &Candidate) -> Result<(), StorageError> {
        Ok(())
    }

    async fn open(&self, _: u64, _: u64) -> Result<Image, StorageError> {
        Ok(self.image.lock().expect("nothing panics").clone())
    }

    async fn append(&self, _: u64, at: u64, record: Vec<u8>) -> Result<(), StorageError> {
        if self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let mut image = self.image.lock().expect("nothing panics");
        image.log.truncate(at as usize);
        image.log.extend(record);
        Ok(())
    }

    async fn snapshot(&self, _: u64, snapshot: Vec<u8>) -> Result<(), StorageError> {
        *self.image.lock().expect("nothing panics") = Image { snapshot, log: Vec::new() };
        Ok(())
    }

    fn report(&self) -> Report {
        Report::default()
    }
}

/// A brain that runs in this process.
struct Running {
    store: Arc<Memory>,
    cluster: Cluster,
    inputs: mpsc::Sender<Input>,
    view: watch::Receiver<Arc<View>>,
    events: Arc<EventLog>,
    leading: watch::Receiver<bool>,
    service: Service,
}

impl Running {
    /// One that leads, on 4 hosts of 2 slots behind 2 leaves.
    async fn leading() -> Running {
        Running::on("leaf-spine:2x2x2").await
    }

    async fn on(shape: &str) -> Running {
        let shape: Shape = shape.parse().expect("a shape");
        let topology = shape.build(Capacity::default()).expect("small");
        let (text, ecmp) = (String::new(), Ecmp::Even);
        let cluster = Cluster { topology, text, slots: 2, reservable_ppm: 950_000, ecmp };
        let ground = cluster.ground().expect("connected");
        let switches: Vec<NodeId> = cluster.topology.switches().collect();
        let config = machine_config(7, LEASE);
        let store = Arc::new(Memory::default());
        let (core, actor) = Core::new(Parts {
            machine: config,
            cluster: cluster.clone(),
            ground,
            switches,
            store: Arc::clone(&store),
            candidate: Candidate { number: 7, address: "own:1".to_owned() },
            store_name: "memory".to_owned(),
            plan_key: plan_key(),
        });
        tokio::spawn(actor);
        let handle = core.handle();
        let mut leading = handle.leading.clone();
        in_time(leading.wait_for(|is_leading| *is_leading)).await.expect("it runs");
        let (inputs, view) = (handle.inputs.clone(), handle.view.clone());
        let events = Arc::clone(&handle.events);
        let leading = handle.leading.clone();
        Running { store, cluster, inputs, view, events, leading, service: Service::new(handle) }
    }

    async fn submit(&self, name: &str, job: &str) -> Result<u64, tonic::Status> {
        let client = proto::Client { number: fresh_number(), sequence: 1 };
        let request = proto::SubmitRequest {
            client: Some(client),
            name: name.to_owned(),
            owner: String::new(),
            job: job.to_owned(),
            unchanged_since: None,
        };
        let reply = self.service.submit(Request::new(request)).await?.into_inner();
        match reply.result {
            Some(proto::submit_reply::Result::Admitted(admitted)) => Ok(admitted.job),
            other => panic!("{name} is not admitted: {other:?}"),
        }
    }

    /// An agent that is connected, and the end on which it gets commands.
    async fn attach(&self, name: &str, number: u64) -> (Agent, mpsc::Receiver<proto::Command>) {
        self.attach_with(name, number, &[]).await
    }

    /// As `attach`, with ports of that number and rate.
    async fn attach_with(
        &self,
        name: &str,
        number: u64,
        ports: &[(u32, u64)],
    ) -> (Agent, mpsc::Receiver<proto::Command>) {
        let port = |&(port, rate_bps): &(u32, u64)| proto::Port {
            port,
            interface: format!("eth{port}"),
            rate_bps,
        };
        let (commands, receiver) = mpsc::channel(64);
        let agent = Attached {
            number,
            commands,
            nonce: NONCE.to_vec(),
            enforcer: "none".to_owned(),
            note: String::new(),
            heard: Instant::now(),
            ports: ports.iter().map(port).collect(),
            faults: Vec::new(),
        };
        let (answer, attached) = oneshot::channel();
        let name = name.to_owned();
        self.tell(Input::Attached { name, agent, answer }).await;
        let node = in_time(attached).await.expect("it runs").expect("the node is there");
        (Agent { node, number }, receiver)
    }

    async fn tell(&self, input: Input) {
        self.inputs.send(input).await.expect("the actor runs");
    }

    async fn reply(&self, agent: &Agent, reply: Reply, down: &[u8]) {
        let Agent { node, number } = *agent;
        let down: BTreeSet<u8> = down.iter().copied().collect();
        self.tell(Input::Reply { node, number, reply, note: String::new(), down }).await;
    }

    async fn reply_noting(&self, agent: &Agent, reply: Reply, note: &str) {
        let Agent { node, number } = *agent;
        let (note, down) = (note.to_owned(), BTreeSet::new());
        self.tell(Input::Reply { node, number, reply, note, down }).await;
    }

    /// The view once it is as `is_there` says.
    async fn view(&self, what: &str, is_there: impl Fn(&View) -> bool) -> Arc<View> {
        let mut view = self.view.clone();
        let found = in_time(view.wait_for(|view| is_there(view))).await;
        found.unwrap_or_else(|_| panic!("{what}")).clone()
    }

    fn event_count(&self, kind: &str) -> usize {
        self.events.since(0, usize::MAX).iter().filter(|event| event.kind == kind).count()
    }
}

/// How an agent that is connected is known.
#[derive(Clone, Copy)]
struct Agent {
    node: NodeId,
    number: u64,
}

fn fresh_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

async fn in_time<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("it takes too long")
}

fn good(position: Position) -> Reply {
    Reply { position, verdict: Ok(()), measures: Vec::new() }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = service::runtime::multi_thread().expect("a runtime");
    runtime.block_on(test);
}

#[test]
fn events_are_those_of_the_leader_and_end_with_its_lead() {
    run(async {
        let brain = Running::leading().await;
        let subscribe = || brain.service.events(Request::new(proto::EventsRequest { after: 0 }));
        let mut events = subscribe().await.expect("it leads").into_inner();
        brain.submit("one", "ring:2@1G").await.expect("there is room");
        let first = in_time(events.next()).await.expect("an event").expect("no error");
        assert_eq!(first.kind, "admitted");
        brain.store.is_lost.store(true, Ordering::SeqCst);
        assert!(in_time(events.next()).await.is_none(), "the stream ends");
        let refused = subscribe().await.expect_err("it does not lead");
        assert_eq!(refused.code(), Code::FailedPrecondition);
    });
}

#[test]
fn who_waits_for_a_write_hears_at_once_that_the_leader_gave_up() {
    run(async {
        let brain = Running::leading().await;
        brain.store.hangs.store(true, Ordering::SeqCst);
        let (answer, answered) = oneshot::channel::<Answer>();
        let ask = parfait::brain::Ask::Defragment { most_moved: 1 };
        let request = parfait::brain::Request { client: 5, sequence: 1, ask };
        brain.tell(Input::Ask { request, answer }).await;
        let submitted = brain.submit("one", "ring:2@1G");
        let lose = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            brain.store.is_lost.store(true, Ordering::SeqCst);
        };
        let begun = Instant::now();
        let (submitted, ()) = tokio::join!(submitted, lose);
        let code = submitted.expect_err("it was not stored").code();
        assert!(matches!(code, Code::Unavailable | Code::FailedPrecondition), "{code:?}");
        // Threads of the web server's hooks wait without an end.
        let waited = in_time(answered).await;
        assert!(waited.is_err() || waited.is_ok_and(|answer| answer.is_err()));
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    });
}

#[test]
fn measures_that_lie_add_up_to_no_overflow() {
    run(async {
        let brain = Running::leading().await;
        for name in ["one", "two"] {
            brain.submit(name, "ring:4@1G most=host:1").await.expect("there is room");
        }
        let (agent, mut commands) = brain.attach("host0", 1).await;
        let plan = loop {
            let command = in_time(commands.recv()).await.expect("the plan");
            let command = convert::command(&order(&command)).expect("well-formed");
            if command.plan.len() == 2 {
                break command;
            }
        };
        let measures = plan.plan.iter().map(|share| Measure {
            port: share.port,
            job: share.job,
            bps: u64::MAX,
            ..Measure::default()
        });
        let reply = Reply { measures: measures.collect(), ..good(plan.position) };
        brain.reply(&agent, reply, &[]).await;
        let is_used = |view: &View| view.links.iter().any(|link| link.used_bps == Some(u64::MAX));
        brain.view("the link is full beyond measure", is_used).await;
    });
}

#[test]
fn a_plan_that_stays_refused_is_one_alarm() {
    run(async {
        let brain = Running::leading().await;
        let (agent, mut commands) = brain.attach("host0", 1).await;
        let command = in_time(commands.recv()).await.expect("the plan");
        let position = convert::position(order(&command).position);
        let verdict = Err(Objection::NoPort(1));
        for _ in 0..20 {
            brain.reply(&agent, Reply { verdict, ..good(position) }, &[]).await;
        }
        brain
            .view("it refuses", |view| view.nodes.iter().any(|node| node.agent == "refusing"))
            .await;
        assert_eq!(brain.event_count("alarm"), 1);
        // A reply to what nobody asked is none.
        let position = Position { term: 1, sequence: u64::MAX };
        let verdict = Err(Objection::NotEnforced);
        brain.reply(&agent, Reply { verdict, ..good(position) }, &[]).await;
        let (answer, shown) = oneshot::channel();
        brain.tell(Input::Show { answer }).await;
        in_time(shown).await.expect("it runs");
        assert_eq!(brain.event_count("alarm"), 1);
    });
}

#[test]
fn ports_that_the_topology_does_not_have_are_an_alarm_at_once() {
    run(async {
        let brain = Running::leading().await;
        let rate = Capacity::default().rate_bps;
        let alarms = async |about: &str| {
            let has = |view: &View| view.alarms.iter().any(|alarm| alarm.text.contains(about));
            brain.view(about, has).await
        };
        let (agent, _commands) = brain.attach_with("host0", 1, &[(2, rate)]).await;
        let text =
            "the agent of 'host0' has a port 2 (eth2), and the topology gives 'host0' port 1 only";
        let view = alarms(text).await;
        let alarm = view.alarms.iter().find(|alarm| alarm.text == text).expect("as it was");
        assert_eq!(alarm.level, "error");
        assert!(alarm.hint.contains("--port"), "{}", alarm.hint);
        alarms("the agent of 'host0' has no port 1, which leads to 'leaf0'").await;
        assert_eq!(brain.event_count("alarm"), 2);
        // It comes again with its right port, and with one that carries less than the topology
        // says.
        let (agent, _commands) = {
            brain.tell(Input::Detached { node: agent.node, number: agent.number }).await;
            brain.attach_with("host0", 2, &[(1, rate)]).await
        };
        let is_gone = |view: &View| !view.alarms.iter().any(|alarm| alarm.text.contains("'host0'"));
        brain.view("nothing is wrong with host0", is_gone).await;
        brain.tell(Input::Detached { node: agent.node, number: agent.number }).await;
        let _slow = brain.attach_with("host0", 3, &[(1, rate / 10)]).await;
        alarms("port 1 (eth1) of 'host0' carries").await;
    });
}

#[test]
fn what_an_agent_notes_is_an_alarm_until_it_is_over() {
    run(async {
        let brain = Running::leading().await;
        let (agent, mut commands) = brain.attach("host0", 1).await;
        let command = in_time(commands.recv()).await.expect("the plan");
        let reply = || good(convert::position(order(&command).position));
        let noted = |view: &View| {
            let text = "the agent of 'host0': job 'llm' does not keep its period";
            view.alarms.iter().any(|alarm| alarm.level == "warning" && alarm.text == text)
        };
        brain.reply_noting(&agent, reply(), "job 'llm' does not keep its period").await;
        brain.view("the note is an alarm", noted).await;
        brain.reply(&agent, reply(), &[]).await;
        brain.view("it is over", |view| !noted(view)).await;
    });
}

/// Repeats what agents say about their ports for so long.
async fn say(brain: &Running, words: &[(&Agent, &[u8])], length: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < length {
        for (agent, down) in words {
            brain.reply(agent, good(Position::default()), down).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Running {
    async fn outage(&self, part: &str, is_down: bool) {
        let client = proto::Client { number: fresh_number(), sequence: 1 };
        let (parts, client) = (vec![part.to_owned()], Some(client));
        let request = proto::OutageRequest { client, parts, is_down, most_moved: 16 };
        let reply =
            self.service.outage(Request::new(request)).await.expect("it leads").into_inner();
        let result = reply.result.expect("a result");
        assert!(matches!(result, proto::repair_reply::Result::Repaired(_)), "{result:?}");
    }

    async fn cancel(&self, name: &str) -> proto::Released {
        let client = Some(proto::Client { number: fresh_number(), sequence: 1 });
        let (name, owner) = (name.to_owned(), String::new());
        let request = proto::ReleaseRequest { client, job: 0, name, owner };
        let reply = self.service.release(Request::new(request)).await.expect("it leads");
        match reply.into_inner().result {
            Some(proto::release_reply::Result::Released(released)) => released,
            other => panic!("it is not released: {other:?}"),
        }
    }

    async fn topology(&self) -> proto::TopologyReply {
        let request = Request::new(proto::TopologyRequest {});
        let reply = self.service.topology(request).await.expect("it leads").into_inner();
        proto::TopologyReply::decode(reply.bytes()).expect("a reply")
    }

    /// Another brain leads for a while; then this one again, as a brain that was started again.
    async fn lead_again(&self) {
        let mut leading = self.leading.clone();
        self.store.is_lost.store(true, Ordering::SeqCst);
        in_time(leading.wait_for(|is_leading| !*is_leading)).await.expect("it runs");
        self.store.taken_back.fetch_add(2, Ordering::SeqCst);
        self.store.is_lost.store(false, Ordering::SeqCst);
        in_time(leading.wait_for(|is_leading| *is_leading)).await.expect("it runs");
    }

    fn links_down(&self) -> usize {
        self.view.borrow().links.iter().filter(|link| link.is_down).count()
    }
}

#[test]
fn a_link_that_people_took_down_stays_down_though_it_has_a_carrier() {
    run(async {
        let brain = Running::leading().await;
        let (host, _commands) = brain.attach("host0", 1).await;
        let port = brain.cluster.topology.node(host.node).links().next().expect("a link").0;
        brain.outage(&format!("host0:{port}"), true).await;
        say(&brain, &[(&host, &[])], Duration::from_millis(3_500)).await;
        assert_eq!(brain.links_down(), 2, "both directions");
        // An agent that saw the carrier go says when it is back.
        say(&brain, &[(&host, &[port])], Duration::from_millis(500)).await;
        say(&brain, &[(&host, &[])], Duration::from_millis(2_500)).await;
        brain.view("the link is up", |view| view.links.iter().all(|link| !link.is_down)).await;
    });
}

#[test]
fn a_carrier_that_returns_while_brains_change_is_up_and_what_people_took_down_is_not() {
    run(async {
        let brain = Running::leading().await;
        let (host, _commands) = brain.attach("host0", 1).await;
        let port = brain.cluster.topology.node(host.node).links().next().expect("a link").0;
        brain.outage("host1:1", true).await;
        say(&brain, &[(&host, &[port])], Duration::from_millis(2_500)).await;
        let is_down = |links: usize| {
            move |view: &View| view.links.iter().filter(|link| link.is_down).count() == links
        };
        brain.view("both links are down", is_down(4)).await;
        brain.lead_again().await;
        brain.view("the ledger has both as down", is_down(4)).await;
        let (host, _commands) = brain.attach("host0", 2).await;
        let (other, _more) = brain.attach("host1", 3).await;
        say(&brain, &[(&host, &[]), (&other, &[])], Duration::from_millis(3_000)).await;
        brain.view("the link with a carrier is up", is_down(2)).await;
        // While it is still gone, a change of brains changes nothing.
        say(&brain, &[(&host, &[port]), (&other, &[])], Duration::from_millis(2_500)).await;
        brain.view("it is down again", is_down(4)).await;
        brain.lead_again().await;
        let (host, _commands) = brain.attach("host0", 4).await;
        say(&brain, &[(&host, &[port])], Duration::from_millis(3_000)).await;
        assert_eq!(brain.links_down(), 4);
    });
}

#[test]
fn trials_of_one_caller_neither_stop_the_brain_nor_those_of_others() {
    run(async {
        let brain = Running::on("fat-tree:16").await;
        let place = |caller: &str, job: &str| {
            let (answer, answered) = oneshot::channel();
            let label = Label { name: "x".to_owned(), owner: caller.to_owned() };
            let (caller, job) = ((None, caller.to_owned()), job.parse().expect("a job"));
            (Input::Place { caller, label, job, answer }, answered)
        };
        // More work than the test has time for.
        let mut flood = Vec::new();
        for _ in 0..200 {
            let (input, answered) = place("mallory", "mesh:2000@1k");
            brain.tell(input).await;
            flood.push(answered);
        }
        brain.submit("honest", "ring:2@1M").await.expect("there is room");
        let (input, answered) = place("ana", "ring:2@1M");
        brain.tell(input).await;
        let (placed, _) = in_time(answered).await.expect("it runs").expect("it leads");
        placed.expect("there is room");
        // What is above the share of a caller is refused at once.
        let refused = flood.iter_mut().filter_map(|answered| answered.try_recv().ok());
        assert!(refused.filter(|answer| *answer == Err(NoTrial::Busy)).count() > 150);
        // Whoever is gone is not worked for.
        drop(flood);
        let (input, answered) = place("zoe", "ring:2@1M");
        brain.tell(input).await;
        in_time(answered).await.expect("it runs").expect("it leads").0.expect("there is room");
        let is_told = |view: &View| {
            view.counters["requests.abandoned"] > 0
                && view.counters["requests.refused_trials"] > 150
        };
        brain.view("both are counted", is_told).await;
    });
}

#[test]
fn a_request_whose_caller_is_gone_is_not_executed() {
    run(async {
        let brain = Running::leading().await;
        let (answer, gone) = oneshot::channel::<Answer>();
        drop(gone);
        let label = Label { name: "gone".to_owned(), owner: String::new() };
        let job = "ring:2@1M".parse().expect("a job");
        let ask = parfait::brain::Ask::Admit { label, job, unchanged_since: None };
        let request = parfait::brain::Request { client: 5, sequence: 1, ask };
        brain.tell(Input::Ask { request, answer }).await;
        brain.submit("next", "ring:2@1M").await.expect("there is room");
        let view = brain.view("the next one is there", |view| !view.jobs.is_empty()).await;
        assert_eq!(view.jobs.len(), 1);
        assert_eq!(view.counters["requests.abandoned"], 1);
    });
}

#[test]
fn pods_get_only_the_place_of_a_job_that_is_theirs() {
    run(async {
        let brain = Running::leading().await;
        let hooks = extender::hooks(brain.inputs.clone(), 77);
        let ask = async |namespace: &str, job: &str| -> serde_json::Value {
            let filter = Arc::clone(&hooks["/kubernetes/filter"]);
            let annotations = serde_json::json!({ "dquant.dev/job": job, "dquant.dev/group": "train", "dquant.dev/rank": "0" });
            let pod = serde_json::json!({ "metadata": { "name": "p", "namespace": namespace, "annotations": annotations } });
            let nodes = ["host0", "host1", "host2", "host3"];
            let args = serde_json::json!({ "Pod": pod, "NodeNames": nodes });
            let body = serde_json::to_vec(&args).expect("JSON");
            let answer = tokio::task::spawn_blocking(move || filter(&body));
            let answer = in_time(answer).await.expect("no panic").expect("an answer");
            serde_json::from_slice(&answer).expect("JSON")
        };
        let why = |answer: &serde_json::Value| answer["FailedNodes"]["host0"].to_string();
        // Another user was there first.
        brain.submit("research.train", "ring:1@1M").await.expect("there is room");
        let squatted = ask("research", "ring:4@1M").await;
        assert_eq!(squatted["NodeNames"], serde_json::json!([]));
        assert!(why(&squatted).contains("belongs to nobody, not to Kubernetes"), "{squatted}");
        // A job of the pods' own is found again, and not by pods that want another one.
        let own = ask("other", "ring:2@1M").await;
        assert_eq!(own["NodeNames"].as_array().map(Vec::len), Some(1), "{own}");
        assert_eq!(ask("other", "ring:2@1M").await, own);
        let differs = ask("other", "ring:4@9M").await;
        assert!(why(&differs).contains("its first pod asked for 'ring:2@1M'"), "{differs}");
    });
}

#[test]
fn who_asks_for_the_topology_hears_what_is_down_and_who_is_degraded() {
    run(async {
        let brain = Running::leading().await;
        let whole = brain.topology().await.down.expect("it is said");
        assert!(whole.nodes.is_empty() && whole.links.is_empty());
        let job = brain.submit("one", "ring:8@1G").await.expect("there is room");
        brain.outage("host3", true).await;
        brain.outage("leaf0:1", true).await;
        let reply = brain.topology().await;
        let down = convert::down(reply.down.as_ref()).expect("well-formed");
        let (outage, unknown) = Outage::named(&brain.cluster.topology, &down);
        assert!(unknown.is_empty(), "{unknown:?}");
        let node = |name: &str| brain.cluster.topology.named(name).expect("it is there");
        let link = brain.cluster.topology.node(node("leaf0")).link_at(1).expect("a link");
        assert_eq!(outage.nodes().collect::<Vec<_>>(), [node("host3")]);
        assert_eq!(outage.links().collect::<Vec<_>>(), [link]);
        let degraded: Vec<u64> =
            reply.held.iter().filter(|held| held.is_degraded).map(|held| held.job).collect();
        assert_eq!(degraded, [job], "its eight workers need all four hosts");
        // The hint of each alarm brings that part back.
        let alarms = |view: &View| -> Vec<String> {
            let down = view.alarms.iter().filter(|alarm| alarm.text.ends_with(" is down"));
            down.map(|alarm| alarm.hint.clone()).collect()
        };
        let view = brain.view("two parts are down", |view| alarms(view).len() == 2).await;
        for hint in alarms(&view) {
            let command = hint.split('`').nth(1).expect("a command");
            brain.outage(command.strip_prefix("dquant job up ").expect("its name"), false).await;
        }
        brain.view("all is up", |view| alarms(view).is_empty()).await;
    });
}

#[test]
fn a_release_names_the_jobs_that_have_their_guarantee_again() {
    run(async {
        let brain = Running::leading().await;
        brain.submit("small", "ring:2@1G").await.expect("there is room");
        let large = brain.submit("large", "ring:4@1G").await.expect("there is room");
        brain.submit("other", "ring:2@1G").await.expect("there is room");
        let hosts = brain.topology().await.held;
        let of_large = hosts.iter().find(|held| held.job == large).expect("it is there");
        brain.outage(&of_large.pieces[0].host, true).await;
        let held = brain.topology().await.held;
        let degraded = held.iter().filter(|held| held.is_degraded).map(|held| held.job);
        assert_eq!(degraded.collect::<Vec<_>>(), [large], "all slots are taken");
        let released = brain.cancel("small").await;
        assert_eq!(released.restored, [large]);
        assert!(brain.topology().await.held.iter().all(|held| !held.is_degraded));
        let events = brain.events.since(0, usize::MAX);
        let told = events.iter().filter(|event| event.text.contains("has its guarantee again"));
        assert_eq!(told.map(|event| event.job).collect::<Vec<_>>(), [Some(large)]);
        assert_eq!(brain.cancel("other").await.restored, [0_u64; 0]);
    });
}

#[test]
fn a_link_is_up_when_no_end_says_that_it_is_down() {
    run(async {
        let brain = Running::leading().await;
        let (host, _commands) = brain.attach("host0", 1).await;
        let topology = &brain.cluster.topology;
        let (port, link) = topology.node(host.node).links().next().expect("a link");
        let ends = topology.link(link).expect("it is there").ends;
        let other = ends.into_iter().find(|end| end.node != host.node).expect("a switch");
        let (leaf, _more) = brain.attach(topology.node(other.node).name(), 2).await;
        let (own, others): ([u8; 1], [u8; 1]) = ([port], [other.port]);
        say(&brain, &[(&host, &own), (&leaf, &others)], Duration::from_millis(2_500)).await;
        brain.view("the link is down", |view| view.links.iter().any(|link| link.is_down)).await;
        say(&brain, &[(&host, &[]), (&leaf, &others)], Duration::from_millis(3_000)).await;
        assert_eq!(brain.links_down(), 2, "one end has no carrier");
        assert_eq!(brain.event_count("link"), 1);
        // What an agent said that is gone counts no more.
        brain.tell(Input::Detached { node: leaf.node, number: leaf.number }).await;
        say(&brain, &[(&host, &[])], Duration::from_millis(2_500)).await;
        brain.view("the link is up", |view| view.links.iter().all(|link| !link.is_down)).await;
    });
}

#[test]
fn many_who_look_share_views_and_each_sees_what_it_did() {
    run(async {
        let brain = Running::on("fat-tree:16").await;
        let (agent, _commands) = brain.attach("host0", 1).await;
        let mut answers = Vec::new();
        for _ in 0..400 {
            brain.reply(&agent, good(Position::default()), &[]).await;
            let (answer, shown) = oneshot::channel();
            brain.tell(Input::Show { answer }).await;
            answers.push(shown);
        }
        for shown in answers {
            in_time(shown).await.expect("it runs");
        }
        let made = brain.view.borrow().counters["brain.views"];
        assert!(made < 100, "{made} views for 400 who ask at once");
        brain.submit("one", "ring:2@1G").await.expect("there is room");
        let request = proto::ViewRequest { any_brain: false };
        let reply = brain.service.view(Request::new(request)).await.expect("it leads").into_inner();
        assert_eq!(view_of(&reply).jobs.len(), 1);
    });
}

fn view_of(reply: &proto::Serialised) -> View {
    let reply = proto::ViewReply::decode(reply.bytes()).expect("a reply");
    serde_json::from_slice(&reply.json).expect("a view")
}

#[test]
fn a_thousand_callers_cost_one_serialisation() {
    run(async {
        let brain = Running::on("fat-tree:8").await;
        let (agent, _commands) = brain.attach("host0", 1).await;
        let made = || brain.view.borrow().counters["brain.topologies_serialised"];
        for _ in 0..1000 {
            assert!(brain.topology().await.held.is_empty());
        }
        let job = brain.submit("one", "ring:2@1G").await.expect("there is room");
        for _ in 0..1000 {
            let reply = brain.topology().await;
            assert_eq!(reply.held.iter().map(|held| held.job).collect::<Vec<_>>(), [job]);
        }
        let (answer, shown) = oneshot::channel();
        // The counter is in a view that was made after this reply.
        brain.reply(&agent, good(Position::default()), &[]).await;
        brain.tell(Input::Show { answer }).await;
        in_time(shown).await.expect("it runs");
        assert_eq!(made(), 2, "before the job and with it");

        let begun = brain.view.borrow().counters["brain.views"];
        let mut last = None;
        for _ in 0..1000 {
            let request = Request::new(proto::ViewRequest { any_brain: false });
            last = Some(brain.service.view(request).await.expect("it leads").into_inner());
        }
        assert_eq!(view_of(&last.expect("a reply")).jobs.len(), 1);
        let views = brain.view.borrow().counters["brain.views"] - begun + 1;
        let serialised = brain.service.views_serialised.load(Ordering::Relaxed);
        assert!(serialised <= views && serialised < 100, "{serialised} of {views} views");
    });
}

/// What became of questions.
#[derive(Debug, Default)]
struct Counts {
    placed: AtomicUsize,
    busy: AtomicUsize,
    /// By a brain that does not lead.
    lost: AtomicUsize,
}

/// Sends questions as fast as there is room for them, each of another caller.
fn flood(brain: &Running, job: &'static str) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    let (inputs, counted) = (brain.inputs.clone(), Arc::clone(&counts));
    tokio::spawn(async move {
        for number in 0_u64.. {
            let label = Label { name: format!("job{number}"), owner: String::new() };
            let (answer, placed) = oneshot::channel();
            let job = job.parse().expect("a job");
            let caller = (None, label.name.clone());
            if inputs.send(Input::Place { caller, label, job, answer }).await.is_err() {
                return;
            }
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                match placed.await {
                    Ok(Ok(_)) => counted.placed.fetch_add(1, Ordering::SeqCst),
                    Ok(Err(NoTrial::Busy)) => counted.busy.fetch_add(1, Ordering::SeqCst),
                    _ => counted.lost.fetch_add(1, Ordering::SeqCst),
                }
            });
        }
    });
    counts
}

#[test]
fn a_flood_of_questions_does_not_cost_the_lease() {
    run(async {
        let brain = Running::on("fat-tree:16").await;
        let counts = flood(&brain, "ring:2000@1M");
        tokio::time::sleep(LEASE * 3).await;
        let Counts { placed, busy, lost } = &*counts;
        let [placed, busy, lost] = [placed, busy, lost].map(|count| count.load(Ordering::SeqCst));
        // More came than there is room for, all the time: trials and refusals alike must not keep
        // the lease waiting.
        assert!(placed > 0 && busy > MAX_INPUTS, "{placed} placed, {busy} refused");
        assert_eq!(lost, 0, "it leads all the time");
        assert_eq!(brain.event_count("leading"), 1);
    });
}
