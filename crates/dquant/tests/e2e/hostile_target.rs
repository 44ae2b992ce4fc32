//! A target that sends false data: a DPU checks everything before it uses it.

use std::pin::Pin;
use std::sync::{Arc, Mutex};

use engine::proto::target_server::{Target, TargetServer};
use engine::proto::{
    DatasetInfo, DescribeReply, DescribeRequest, DocumentsReply, DocumentsRequest, ListReply,
    ListRequest, ListedDataset, QueuePair, SessionReply, SessionRequest, StatusReply,
    StatusRequest, TargetStages,
};
use roce::verbs::{SendOp, WcStatus};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use xio::capsule::{Outcome, ReadRequest, ReadResponse};
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, World, eventually, fresh_ip};
use super::hostile_packets::runtime;
use super::wire_kit::Rogue;

const ARGS: &[&str] = &["--plan", "window(100) | narrow(u16)", "--batches", "3"];

/// The replies of a fake target.
#[derive(Clone)]
pub(crate) struct Lies {
    datasets: Vec<DatasetInfo>,
    /// What it sends for their documents.
    documents: Vec<DocumentsReply>,
    session_datasets: Vec<DatasetInfo>,
    target: Option<QueuePair>,
    mtu: u32,
    credits: u32,
    /// Instead of those of the request.
    stages: Option<Vec<TargetStages>>,
    /// What it says of data that nothing acknowledged when it ends a session.
    unacknowledged_bytes: u32,
}

impl Lies {
    /// A target that runs these stages, whatever was requested.
    pub(crate) fn running(stages: Vec<TargetStages>) -> Lies {
        Lies { stages: Some(stages), ..Lies::default() }
    }

    /// A target that describes a dataset like this and sends these pieces of its documents.
    pub(crate) fn with_documents(info: &DatasetInfo, documents: Vec<DocumentsReply>) -> Lies {
        Lies { datasets: vec![info.clone()], documents, ..Lies::default() }
    }
}

fn info(dtype: &str, tokens: u64, data_offset: u64) -> DatasetInfo {
    let (name, format, dtype) = ("web.bin".into(), "flat".into(), dtype.into());
    let dtype_origin = "given".into();
    DatasetInfo { name, format, dtype, tokens, data_offset, dtype_origin, ..DatasetInfo::default() }
}

impl Default for Lies {
    /// Valid replies, but nothing at the queue pair.
    fn default() -> Lies {
        let address = format!("{}:4791", fresh_ip());
        Lies {
            datasets: vec![info("u32", 1_000_000, 0)],
            documents: Vec::new(),
            session_datasets: vec![info("u32", 1_000_000, 0)],
            target: Some(QueuePair {
                address,
                qpn: 77,
                psn: 1,
                mtu: 4096,
                selective_repeat: false,
            }),
            mtu: 4096,
            credits: 8,
            stages: None,
            unacknowledged_bytes: 0,
        }
    }
}

/// The control plane of a target without a data plane.
pub(crate) struct FakeTarget {
    control: String,
    seen: Arc<Mutex<Vec<SessionRequest>>>,
    /// Ends the open sessions.
    end: Arc<Notify>,
    server: tokio::task::JoinHandle<()>,
}

struct Service {
    lies: Lies,
    seen: Arc<Mutex<Vec<SessionRequest>>>,
    end: Arc<Notify>,
}

impl FakeTarget {
    pub(crate) fn start(runtime: &Runtime, lies: Lies) -> FakeTarget {
        let seen: Arc<Mutex<Vec<SessionRequest>>> = Arc::default();
        let end = Arc::default();
        let service = Service { lies, seen: Arc::clone(&seen), end: Arc::clone(&end) };
        let service = TargetServer::new(service);
        let listener = runtime.block_on(TcpListener::bind((fresh_ip(), 0))).expect("loopback");
        let control = listener.local_addr().expect("it is bound").to_string();
        let incoming = TcpListenerStream::new(listener);
        let server = runtime.spawn(async move {
            let served = Server::builder().add_service(service).serve_with_incoming(incoming);
            served.await.expect("the fake target serves");
        });
        FakeTarget { control, seen, end, server }
    }

    pub(crate) fn url(&self, name: &str) -> String {
        format!("dq://{}/{name}", self.control)
    }

    /// The queue pair of the first session.
    pub(crate) fn reader(&self) -> Option<QueuePair> {
        self.seen.lock().expect("no panic").first()?.reader.clone()
    }

    /// How many sessions there were.
    fn sessions(&self) -> usize {
        self.seen.lock().expect("no panic").len()
    }
}

impl Drop for FakeTarget {
    fn drop(&mut self) {
        self.server.abort();
    }
}

type Pieces = Pin<Box<dyn Stream<Item = Result<DocumentsReply, Status>> + Send>>;

type Replies = Pin<Box<dyn Stream<Item = Result<SessionReply, Status>> + Send>>;

#[tonic::async_trait]
impl Target for Service {
    async fn describe(
        &self,
        _: Request<DescribeRequest>,
    ) -> Result<Response<DescribeReply>, Status> {
        Ok(Response::new(DescribeReply { datasets: self.lies.datasets.clone() }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let info = |info: &DatasetInfo| ListedDataset {
            info: Some(info.clone()),
            refused: "no\x1b[2Jfile".to_owned(),
            ..ListedDataset::default()
        };
        let datasets = self.lies.datasets.iter().map(info).collect();
        Ok(Response::new(ListReply { datasets, ..ListReply::default() }))
    }

    type DocumentsStream = Pieces;

    async fn documents(&self, _: Request<DocumentsRequest>) -> Result<Response<Pieces>, Status> {
        let pieces = self.lies.documents.clone().into_iter().map(Ok);
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces))))
    }

    type SessionStream = Replies;

    async fn session(
        &self,
        request: Request<Streaming<SessionRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let mut inbound = request.into_inner();
        let first = inbound.message().await?.ok_or_else(|| Status::invalid_argument("empty"))?;
        let asked = first.stages.clone();
        self.seen.lock().expect("no panic").push(first);
        let Lies { session_datasets: datasets, target, mtu, credits, stages, .. } =
            self.lies.clone();
        let stages = stages.unwrap_or(asked);
        let (end, unacknowledged_bytes) = (Arc::clone(&self.end), self.lies.unacknowledged_bytes);
        let (send, receive) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            let nothing = SessionReply::default();
            let reply = SessionReply { target, credits, mtu, datasets, stages, ..nothing.clone() };
            if send.send(Ok(reply)).await.is_ok() {
                tokio::select! {
                    () = async { while let Ok(Some(_)) = inbound.message().await {} } => {}
                    () = end.notified() => {
                        let _ = send.send(Ok(SessionReply { unacknowledged_bytes, ..nothing })).await;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Err(Status::unimplemented("a fake has no status"))
    }
}

#[test]
fn descriptions_are_checked() {
    let Some(world) = World::new("descriptions_are_checked") else {
        return;
    };
    let dpu = world.dpu(&[]);
    let runtime = runtime();
    let lies = |datasets: Vec<DatasetInfo>| Lies { datasets, ..Lies::default() };
    for (lies, parts) in [
        (lies(vec![]), ["0 datasets", ""]),
        (lies(vec![info("u32", 1_000, 0), info("u32", 1_000, 0)]), ["2 datasets", ""]),
        (lies(vec![info("f32", 1_000, 0)]), ["web.bin", "f32"]),
        (lies(vec![info("f64", 1_000, 0)]), ["web.bin", "type"]),
        (lies(vec![info("", 1_000, 0)]), ["web.bin", "type"]),
        (lies(vec![info("u32", u64::MAX, 0)]), ["web.bin", "exceeds the largest"]),
        (lies(vec![info("u32", 1 << 60, u64::MAX)]), ["web.bin", "exceeds the largest"]),
        (lies(vec![info("u32", 0, 0)]), ["web.bin", "window"]),
    ] {
        let fake = FakeTarget::start(&runtime, lies);
        let ran = Cat::through(&world, &dpu, &fake.url("web"), ARGS).finish();
        assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
        assert!(parts.iter().all(|part| ran.stderr.contains(part)), "{parts:?} {}", ran.stderr);
    }
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 0);
}

#[test]
fn sessions_are_checked() {
    let Some(world) = World::new("sessions_are_checked") else {
        return;
    };
    let dpu = world.dpu(&[]);
    let before = dpu.status(&world).counter("dpu.memory_free_bytes");
    let runtime = runtime();
    let good = Lies::default().target.expect("there is one");
    let pair = |target: QueuePair| Lies { target: Some(target), ..Lies::default() };
    for (lies, part) in [
        (Lies { target: None, ..Lies::default() }, "no queue pair"),
        (pair(QueuePair { qpn: 0, ..good.clone() }), "out of range"),
        (pair(QueuePair { qpn: 1 << 24, ..good.clone() }), "out of range"),
        (pair(QueuePair { psn: 1 << 24, ..good.clone() }), "out of range"),
        (pair(QueuePair { address: "nowhere".into(), ..good.clone() }), "nowhere"),
        (pair(QueuePair { address: "[::1]:4791".into(), ..good.clone() }), "no route"),
        (pair(QueuePair { address: "0.0.0.0:4791".into(), ..good.clone() }), "no route"),
        (Lies { mtu: 1, ..Lies::default() }, "MTU"),
        (Lies { session_datasets: vec![], ..Lies::default() }, "has changed since"),
        (Lies { session_datasets: vec![info("u32", 9, 9)], ..Lies::default() }, "has changed"),
    ] {
        let fake = FakeTarget::start(&runtime, lies);
        let ran = Cat::through(&world, &dpu, &fake.url("web"), ARGS).finish();
        assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(part), "{part:?} {}", ran.stderr);
    }
    eventually("the memory of refused streams", || {
        (dpu.status(&world).counter("dpu.memory_free_bytes") == before).then_some(())
    });
}

#[test]
fn a_target_whose_connections_all_fail_is_given_up() {
    let Some(world) = World::new("a_target_whose_connections_all_fail") else { return };
    let dpu = world.dpu(&["--reconnect", "1s"]);
    let runtime = runtime();
    // Sessions are granted, but nothing is at the queue pair.
    let fake = FakeTarget::start(&runtime, Lies::default());
    let ran = Cat::through(&world, &dpu, &fake.url("web"), ARGS).finish();
    ran.failed(3, &["target", &fake.control, "nothing arrives over RoCE"], "--reconnect");
    assert!((2..30).contains(&fake.sessions()), "{}", fake.sessions());
}

#[test]
fn a_target_that_says_nothing_holds_its_own_stream_only() {
    let Some(world) = World::new("a_target_that_says_nothing") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&["--reconnect", "1s"]));
    let runtime = runtime();
    let mut rogue = Rogue::new(fresh_ip());
    let lies = Lies { target: Some(rogue.queue_pair()), credits: u32::MAX, ..Lies::default() };
    let fake = FakeTarget::start(&runtime, lies);
    let waiting = Cat::through(&world, &dpu, &fake.url("web"), ARGS);
    let reader = eventually("a session", || fake.reader());
    rogue.connect(&reader);
    // It receives a request and sends no reply.
    rogue.receive();
    let other = Cat::through(&world, &dpu, &target.url("web"), ARGS).finish().good();
    assert_same(&other.stdout, &expected(ARGS[1], &[&corpus], 0..3));
    waiting.kill();
    eventually("the end of the stream", || {
        (dpu.status(&world).counter("dpu.streams") == 0).then_some(())
    });
    assert_eq!(fake.sessions(), 1);
}

/// Storage that hangs, and a target that is killed meanwhile: requests are acknowledged, and no
/// data comes. That says nothing of the path, unless the target says that its data was never
/// acknowledged.
#[test]
fn only_lost_data_lowers_the_path_mtu() {
    let Some(world) = World::new("only_lost_data_lowers_the_path_mtu") else {
        return;
    };
    let runtime = runtime();
    for (unacknowledged_bytes, mtu, said) in [
        (0, 4096, "sends no data"),
        (200, 4096, "sends no data"),
        (1 << 20, 1024, "no packet with 4096 bytes of data arrives over RoCE"),
    ] {
        let dpu = world.dpu(&[]);
        let mut rogue = Rogue::new(fresh_ip());
        let target = Some(rogue.queue_pair());
        let lies = Lies { target, unacknowledged_bytes, ..Lies::default() };
        let fake = FakeTarget::start(&runtime, lies);
        let cat = Cat::through(&world, &dpu, &fake.url("web"), ARGS);
        rogue.connect(&eventually("a session", || fake.reader()));
        rogue.receive();
        eventually("an acknowledged request", || {
            (dpu.status(&world).counter("stream.acknowledged_requests") > 0).then_some(())
        });
        fake.end.notify_one();
        let mtus = eventually("another session", || {
            let seen = fake.seen.lock().expect("no panic");
            let mtu = |at: usize| seen.get(at)?.reader.as_ref().map(|reader| reader.mtu);
            Some([mtu(0)?, mtu(1)?])
        });
        assert_eq!(mtus, [4096, mtu], "{}", dpu.stderr());
        eventually("a note in the status", || {
            let status = dpu.status(&world);
            let notes = status.0["notes"].as_array()?;
            notes.iter().any(|note| note.as_str().is_some_and(|n| n.contains(said))).then_some(())
        });
        cat.kill();
    }
}

/// A fake target whose queue pair the test drives, and a stream that it serves: the stream's first
/// request.
fn served_by_hand(
    world: &World,
    dpu: &Daemon,
    runtime: &Runtime,
) -> (Rogue, ReadRequest, Cat, FakeTarget) {
    let mut rogue = Rogue::new(fresh_ip());
    let small = vec![info("u32", 1_000, 0)];
    let (datasets, session_datasets) = (small.clone(), small);
    let target = Some(rogue.queue_pair());
    let fake =
        FakeTarget::start(runtime, Lies { datasets, session_datasets, target, ..Lies::default() });
    let cat = Cat::through(world, dpu, &fake.url("web"), SMALL);
    rogue.connect(&eventually("a session", || fake.reader()));
    let request = ReadRequest::decode(&rogue.receive(), host::kernels::best().0.crc32c);
    (rogue, request.expect("a request"), cat, fake)
}

const SMALL: &[&str] = &["--plan", "window(100) | narrow(u16) | batch(2)", "--batches", "3"];

#[test]
fn a_target_has_no_way_into_the_memory_of_another_stream() {
    let Some(world) = World::new("a_target_has_no_way_into_another_stream") else { return };
    let dpu = world.dpu(&["--reconnect", "1s"]);
    let runtime = runtime();
    let (mut honest, request, reading, _kept) = served_by_hand(&world, &dpu, &runtime);
    let (mut hostile, _, other, _kept_too) = served_by_hand(&world, &dpu, &runtime);
    let block: Vec<u8> = (0..request.tokens as u16).flat_map(u16::to_le_bytes).collect();
    let ReadRequest { seq, tag, remote_addr, rkey, .. } = request;
    let write = SendOp::Write { remote_addr, rkey };
    assert_eq!(honest.post(write, &block).status, WcStatus::Success);

    // It knows the address and the key, and that the block lies there.
    let written = hostile.post(write, &vec![0xff; block.len()]);
    assert_eq!(written.status, WcStatus::RemoteAccessError);
    assert_eq!(dpu.status(&world).counter("roce.bad_pd"), 1);

    let crc32c = host::kernels::best().0.crc32c;
    let bytes = block.len() as u32;
    let outcome = Outcome::Done {
        bytes,
        crc32c: crc32c(0, &block),
        source_bytes: 2 * bytes,
        bits: 0,
        codec: None,
        replaced: 0,
    };
    let answer = ReadResponse { seq, tag, outcome }.encode(crc32c);
    assert_eq!(honest.post(SendOp::Send, &answer).status, WcStatus::Success);
    let ran = reading.finish().good();
    assert_eq!(ran.stdout, block[..ran.stdout.len()], "another stream wrote into this one");
    assert_eq!(ran.stdout.len(), 3 * 2 * 100 * 2);
    assert_eq!(dpu.status(&world).counter("stream.corrupt_blocks"), 0);
    other.kill();
}
