//! Control of a storage target: its gRPC service, and the client that readers use.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use adapter::connect::{QpAddress, is_specific, mtu_towards, path_mtu};
use adapter::software::LocalPeer;
use nic::clock;
use nic::loaded::OTHER_PORT;
use nic::local_peers::{self, Shared};
use roce::endpoint::Reliability;
use roce::verbs::{Qpn, VerbsError};
use roce::wire::Psn;
use service::admission::{self, Admission, Call};
use service::auth::{self, AddToken};
use service::error::{Error, root_cause, with_limit_hint};
use service::event::Event;
use service::log;
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tonic::codegen::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use xio::dataset::{Dtype, Format};
use xio::stage::TargetStages;
use xio::target::{MAX_CREDITS, Served, SessionFailure};

use super::SAME_VERSION;
use super::documents::{Arriving, Readers, Received, TABLES_TIMEOUT};
use super::peer::Peer;
use super::stages;
use super::status::Reports;
use crate::action::{self, Action};
use crate::budget::Budget;
use crate::catalog::{Catalog, Found, Table};
use crate::data::target::{Command, Ended, SessionSource, SessionSpec};
use crate::data::{Commands, EngineError, Signals};
use crate::proto::target_client::TargetClient;
use crate::proto::target_server::Target;
use crate::proto::{
    DatasetInfo, DatasetRef, DescribeReply, DescribeRequest, DocumentsReply, DocumentsRequest,
    ListReply, ListRequest, QueuePair, SessionReply, SessionRequest, StatusReply, StatusRequest,
};
use crate::status::Counters;

/// The gRPC service of a storage target.
#[derive(Clone, Debug)]
pub struct TargetService {
    catalog: Arc<Catalog>,
    commands: Commands<Command>,
    reports: Arc<Reports<Command>>,
    admission: Arc<Admission>,
    control: SocketAddr,
    roce: SocketAddr,
    discovery: Result<Arc<Shared>, String>,
    notes: Arc<[String]>,
    documents: Readers,
}

impl TargetService {
    /// Serves the datasets of `catalog`, through the engine behind `commands`, on a control port
    /// and a RoCE endpoint.
    pub(crate) fn new(
        catalog: Catalog,
        commands: Commands<Command>,
        admission: Arc<Admission>,
        at: (SocketAddr, SocketAddr),
        discovery: Result<Arc<Shared>, String>,
        notes: Vec<String>,
    ) -> TargetService {
        let reports = Arc::new(Reports::new(commands.clone(), Command::Status));
        let (catalog, (control, roce)) = (Arc::new(catalog), at);
        let (notes, documents) = (notes.into(), Readers::default());
        TargetService {
            catalog,
            commands,
            reports,
            admission,
            control,
            roce,
            discovery,
            notes,
            documents,
        }
    }

    /// File work blocks, so it runs outside the async threads. It holds the call until it ends,
    /// even if the caller has given up, so a client that calls and resets in a loop cannot occupy
    /// all those threads.
    async fn find(&self, refs: Vec<DatasetRef>, call: Held) -> Result<Vec<Found>, Status> {
        let catalog = Arc::clone(&self.catalog);
        let find = move || {
            let _call = call;
            catalog.find_served(&refs)
        };
        let found = tokio::task::spawn_blocking(find).await;
        found.map_err(|error| Status::internal(error.to_string()))?
    }

    /// Finds out whether a reader is a process whose memory is reached through shared memory, and
    /// if not, why not. The processes exchange messages, which takes seconds if the other one is
    /// stopped.
    async fn local_peer(&self, reader: SocketAddr, call: Held) -> LocalPeer {
        let discovery = self.discovery.clone()?;
        let discover = move || {
            let _call = call;
            discovery.discover(reader, local_peers::OWN_PORT)
        };
        tokio::task::spawn_blocking(discover).await.map_err(|error| error.to_string())?
    }

    async fn begin(
        &self,
        first: SessionRequest,
        call: &Held,
    ) -> Result<(SessionReply, Open), Status> {
        let reader = first.reader.ok_or_else(|| Status::invalid_argument("no queue pair given"))?;
        let reader = qp_address(&reader, self.roce).map_err(Status::invalid_argument)?;
        let ours = mtu_towards(self.roce.ip(), reader.address);
        let mtu = path_mtu(ours, reader.mtu)
            .ok_or_else(|| Status::invalid_argument("path MTU below 256 bytes"))?;
        let credits = first.credits.clamp(1, MAX_CREDITS);
        let (lists, wanted) = (first.stages.len(), first.datasets.len());
        if lists != wanted {
            STAGES_REFUSED.count();
            let why = format!("{lists} lists of stages for {wanted} datasets\n{SAME_VERSION}");
            return Err(Status::invalid_argument(why));
        }
        let found = self.find(first.datasets, call.clone()).await?;
        let agreed = found.iter().zip(&first.stages).map(|(found, list)| checked(found, list));
        let agreed = agreed.collect::<Result<Vec<_>, _>>()?;
        let table = self.table(&first.stages, &found, call.clone()).await?;
        let action = self.action(&first.stages, &found, call.clone()).await?;
        for Found { info, layout, .. } in &found {
            if let Format::Npy { trailing_bytes: bytes @ 1.., .. } = layout.format {
                let name = &info.name;
                log::line(format_args!("{name}: {bytes} bytes behind the array are ignored"));
            }
        }
        let datasets: Vec<_> = found.iter().map(|found| found.info.clone()).collect();
        let sources = found.into_iter().zip(agreed).map(|(found, stages)| {
            let Found { file, layout, sums, .. } = found;
            let (table, action) = (Arc::clone(&table), action.clone());
            SessionSource { file, layout, stages, table, action, sums }
        });
        let (sources, stages) = (sources.collect(), first.stages);
        let local = self.local_peer(reader.address, call.clone()).await;
        let why_not = local.as_ref().map_or_else(|why| Some(&**why), |one| one.why_not());
        let path = why_not.map_or("direct".to_owned(), |why| format!("packets ({why})"));
        let (sender, ended) = oneshot::channel();
        let signals = self.commands.signals();
        let spec = SessionSpec { sources, reader, local, mtu, credits, ended: sender, signals };
        let (ours, guard) = self.open(spec, call.clone()).await?;
        let mtu = ours.mtu;
        let target = Some(queue_pair(&ours, mtu));
        let name = format!("session {:#x} with {}", ours.qpn.get(), reader.address);
        log::line(format_args!("{name} begins: {}, MTU {mtu}, {path}", names_of(&datasets)));
        let open = Open { name, begun: Instant::now(), ended, guard };
        let reply = SessionReply { target, credits, mtu, datasets, stages, ..Default::default() };
        Ok((reply, open))
    }

    /// The table that the stages name, which must be the one that was described to the reader;
    /// empty if they name none.
    async fn table(
        &self,
        lists: &[crate::proto::TargetStages],
        found: &[Found],
        call: Held,
    ) -> Result<Arc<[u32]>, Status> {
        let Some(remap) = stages::table_of(lists) else {
            return Ok(Arc::default());
        };
        let refuse = |why: &str, hint: &str| {
            STAGES_REFUSED.count();
            Status::invalid_argument(format!("{}: {why}\n{hint}", remap.table))
        };
        if !stages::agree_on_table(lists, remap) {
            return Err(refuse("the datasets of a session have one table", SAME_VERSION));
        }
        let (catalog, name) = (Arc::clone(&self.catalog), remap.table.clone());
        let read = move || {
            let _call = call;
            catalog.table(&name)
        };
        let read = tokio::task::spawn_blocking(read).await;
        let read = read.map_err(|error| Status::internal(error.to_string()))?;
        let Table { info, ids } = read?;
        if (info.fingerprint, ids.len()) != (remap.fingerprint, remap.ids as usize) {
            return Err(refuse("the table has changed", "open the stream again"));
        }
        let mut files = found.iter().map(|found| found.layout.dtype);
        if let Some(dtype) = files.find(|dtype| !Table::fits(&ids, *dtype)) {
            let why = format!("it has ids that do not fit {dtype}, the type of the dataset");
            return Err(refuse(
                &why,
                "remap keeps the type of the files: convert them to u32 first",
            ));
        }
        Ok(ids)
    }

    /// The module that the stages name, compiled; none if they name none.
    async fn action(
        &self,
        lists: &[crate::proto::TargetStages],
        found: &[Found],
        call: Held,
    ) -> Result<Option<Action>, Status> {
        let Some(wasm) = stages::module_of(lists) else {
            return Ok(None);
        };
        let refuse = |why: &str, hint: &str| {
            STAGES_REFUSED.count();
            Status::invalid_argument(format!("{}: {why}\n{hint}", wasm.module))
        };
        if !stages::agree_on_module(lists, wasm) {
            return Err(refuse("the datasets of a session have one module", SAME_VERSION));
        }
        let Ok(sha256) = <[u8; 32]>::try_from(wasm.sha256.as_slice()) else {
            return Err(refuse("its hash is no SHA-256", SAME_VERSION));
        };
        let (catalog, name) = (Arc::clone(&self.catalog), wasm.module.clone());
        let dtypes: Vec<Dtype> = found.iter().map(|found| found.layout.dtype).collect();
        let load = move || {
            let _call = call;
            let (name, bytes) = catalog.module(&name)?;
            action::load(&name, &bytes, &sha256, dtypes).map_err(|error| {
                STAGES_REFUSED.count();
                let (message, hint) = error.parts();
                Status::invalid_argument(format!("{message}\n{}", hint.unwrap_or_default()))
            })
        };
        let loaded = tokio::task::spawn_blocking(load).await;
        loaded.map_err(|error| Status::internal(error.to_string()))?.map(Some)
    }

    /// The guard is created where the engine's reply arrives: if the caller has given up meanwhile,
    /// both are dropped and the session ends.
    async fn open(&self, spec: SessionSpec, call: Held) -> Result<(QpAddress, Guard), Status> {
        let commands = self.commands.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let _call = call;
            let guard = Guard(spec.signals.clone());
            let ours = commands.call(|reply| Command::Open(spec, reply));
            // What came with a refused request is freed here.
            ours.map(|ours| ours.map(|ours| (ours, guard)).map_err(|refused| refused.error))
        });
        opened
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::unavailable(error.to_string()))?
            .map_err(engine_status)
    }
}

/// Sessions refused because of their stages.
pub(crate) static STAGES_REFUSED: Event = Event::new("target.refused.stages");

/// Checks the stages of a dataset.
fn checked(found: &Found, list: &crate::proto::TargetStages) -> Result<TargetStages, Status> {
    stages::checked(list, found.layout.dtype).map_err(|error| {
        STAGES_REFUSED.count();
        let text = format!("{}: {error}\n{}", found.info.name, error.hint());
        Status::invalid_argument(text)
    })
}

/// An open session, as its control stream holds it.
struct Open {
    /// For the log.
    name: String,
    begun: Instant,
    /// Resolves when the engine has ended the session.
    ended: oneshot::Receiver<Ended>,
    guard: Guard,
}

impl Open {
    /// Waits until the reader closes its stream (`closed`) or the session fails, then ends the
    /// session and logs it. Returns what the reader has to know of the failure.
    async fn last(mut self, closed: impl Future<Output = ()>) -> Option<SessionReply> {
        // A reader that only waits for data does not notice that our queue pair failed, unless the
        // control stream ends on our side.
        let ended = tokio::select! {
            () = closed => None,
            ended = &mut self.ended => Some(ended),
        };
        drop(self.guard);
        let ended = match ended {
            Some(ended) => ended,
            None => self.ended.await,
        };
        // An engine that has stopped has logged its sessions.
        let Ok(Ended { failure, served: Served { requests, bytes } }) = ended else { return None };
        let why = failure.map_or("closed by the reader".into(), |failure| failure.to_string());
        let (name, seconds) = (self.name, self.begun.elapsed().as_secs_f64());
        log::line(format_args!(
            "{name} ends: {why}; {requests} blocks, {bytes} bytes in {seconds:.1} s"
        ));
        match failure {
            Some(SessionFailure::Unacknowledged { bytes }) => {
                Some(SessionReply { unacknowledged_bytes: bytes, ..Default::default() })
            }
            _ => None,
        }
    }
}

/// The name of the first dataset and how many others there are, for the log.
fn names_of(datasets: &[DatasetInfo]) -> String {
    let first = datasets.first().map_or("nothing", |dataset| dataset.name.as_str());
    match datasets.len() {
        0 | 1 => first.to_owned(),
        count => format!("{first} and {} more", count - 1),
    }
}

/// Closes the session when its control stream ends, however that happens.
struct Guard(Signals);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn log_refusal(what: &str, from: &str, status: &Status) {
    let why = status.message().lines().next().unwrap_or_default();
    log::refusal(format_args!("{what} refused for {from}: {why}"));
}

/// For a client, whose port is not the one of RoCE because another process has that.
const OTHER_PORT_HINT: &str = "the target runs on an RDMA device, which reaches port 4791 only: \
    give the stream's process (`cat --offload false`, or the DPU) an address of its own: --roce IP";

fn engine_status(error: EngineError) -> Status {
    match error {
        EngineError::Limit { .. } | EngineError::Pool(_) => {
            Status::resource_exhausted(error.to_string())
        }
        EngineError::Verbs(VerbsError::Unsupported(OTHER_PORT)) => {
            Status::internal(format!("{error}\n{OTHER_PORT_HINT}"))
        }
        other => Status::internal(with_limit_hint(&other, "\n")),
    }
}

/// The call for which work is done, held while the work lasts.
type Held = Option<Arc<Call>>;

type DocumentsStream = Pin<Box<dyn Stream<Item = Result<DocumentsReply, Status>> + Send>>;

type SessionStream = Pin<Box<dyn Stream<Item = Result<SessionReply, Status>> + Send>>;

#[tonic::async_trait]
impl Target for TargetService {
    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeReply>, Status> {
        let (_heard, from) = (Call::of(&request), admission::origin_of(&request));
        let call = Call::work(&request)?;
        let datasets = request.into_inner().datasets;
        let found = match Catalog::check_count(&datasets) {
            Ok(()) => self.find(datasets, call).await,
            Err(refused) => Err(refused),
        };
        let found = found.inspect_err(|status| log_refusal("datasets", &from, status))?;
        let datasets = found.into_iter().map(|found| found.info).collect();
        Ok(Response::new(DescribeReply { datasets }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let (_heard, from) = (Call::of(&request), admission::origin_of(&request));
        let (call, prefix) = (Call::work(&request)?, request.into_inner().prefix);
        let catalog = Arc::clone(&self.catalog);
        let list = move || {
            let _call = call;
            catalog.datasets(&prefix)
        };
        let listed = tokio::task::spawn_blocking(list).await;
        let listed = listed.map_err(|error| Status::internal(error.to_string()))?;
        listed.map(Response::new).inspect_err(|status| log_refusal("listing", &from, status))
    }

    type DocumentsStream = DocumentsStream;

    async fn documents(
        &self,
        request: Request<DocumentsRequest>,
    ) -> Result<Response<DocumentsStream>, Status> {
        let (_heard, from) = (Call::of(&request), admission::origin_of(&request));
        let call = Call::work(&request)?;
        let asked = request.into_inner();
        Catalog::check_count(&asked.datasets)?;
        let refused = move |status: &Status| log_refusal("documents", &from, status);
        let pieces = self.documents.read(Arc::clone(&self.catalog), asked, call, refused.clone());
        let pieces = pieces.await.inspect_err(refused)?;
        Ok(Response::new(Box::pin(pieces)))
    }

    type SessionStream = SessionStream;

    async fn session(
        &self,
        mut request: Request<Streaming<SessionRequest>>,
    ) -> Result<Response<SessionStream>, Status> {
        let from = admission::origin_of(&request);
        let call = Call::work(&request)?;
        // The server's timeout bounds this wait.
        let first = request.get_mut().message().await?;
        let first = first.ok_or_else(|| Status::invalid_argument("the session sent no request"))?;
        drop(Call::of(&request));
        let mut inbound = request.into_inner();
        let begun = self.begin(first, &call).await;
        let (reply, open) = begun.inspect_err(|status| log_refusal("session", &from, status))?;
        let (send, receive) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            let _call = call;
            let answered = send.send(Ok(reply)).await;
            // Only the end of the stream matters; it is an error when the peer was killed.
            let closed = async {
                while answered.is_ok() && matches!(inbound.message().await, Ok(Some(_))) {}
            };
            if let Some(reply) = open.last(closed).await {
                // A reader that has not even taken the first reply needs no other.
                let _ = send.try_send(Ok(reply));
            }
        });
        let outbound = tokio_stream::wrappers::ReceiverStream::new(receive);
        Ok(Response::new(Box::pin(outbound)))
    }

    async fn status(&self, call: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let _call = Call::of(&call);
        let mut counters = self.reports.get().await?;
        counters.set("control.connections", self.admission.connections() as u64);
        counters.set_events([&STAGES_REFUSED]);
        let sessions = counters.get("target.sessions") as u32;
        Ok(Response::new(status_reply(
            "target",
            (self.control, self.roce),
            sessions,
            counters,
            &self.notes,
        )))
    }
}

/// Adds what every daemon reports about its process.
pub fn status_reply(
    role: &str,
    (control, roce): (SocketAddr, SocketAddr),
    sessions: u32,
    mut counters: Counters,
    notes: &[String],
) -> StatusReply {
    let cpu = clock::process_cpu();
    counters.set_events(admission::EVENTS.into_iter().chain([&auth::REFUSED, &log::SUPPRESSED]));
    StatusReply {
        role: role.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        control_address: control.to_string(),
        roce_address: roce.to_string(),
        sessions,
        cpu_user_ns: cpu.user_ns,
        cpu_system_ns: cpu.system_ns,
        resident_bytes: clock::resident_bytes().unwrap_or(0),
        counters: counters.0,
        notes: notes.to_vec(),
    }
}

/// A queue pair as a message.
pub fn queue_pair(ours: &QpAddress, mtu: u32) -> QueuePair {
    QueuePair {
        address: ours.address.to_string(),
        qpn: ours.qpn.get(),
        psn: ours.psn.get(),
        mtu,
        selective_repeat: ours.reliability == Reliability::Selective,
    }
}

/// Checks a queue pair from a message: numbers in range, and an address that our endpoint at `ours`
/// can send to.
pub fn qp_address(message: &QueuePair, ours: SocketAddr) -> Result<QpAddress, String> {
    let address: SocketAddr = message
        .address
        .parse()
        .map_err(|_| format!("{:?} is not an IP address and port", message.address))?;
    if !is_specific(address.ip()) || address.is_ipv4() != ours.is_ipv4() {
        return Err(format!("no route from {ours} to {address}"));
    }
    if message.qpn < 2 || message.qpn > 0x00ff_ffff || message.psn > 0x00ff_ffff {
        return Err(format!("queue pair {} / PSN {} out of range", message.qpn, message.psn));
    }
    let reliability = match message.selective_repeat {
        true => Reliability::Selective,
        false => Reliability::GoBackN,
    };
    let (qpn, psn) = (Qpn::new(message.qpn), Psn::new(message.psn));
    Ok(QpAddress { address, qpn, psn, reliability, mtu: message.mtu })
}

/// An open session with a target; dropping it ends the session.
#[derive(Debug)]
pub struct Session {
    /// What the target agreed to.
    pub reply: SessionReply,
    /// Nothing more is sent; dropping it ends the session.
    _requests: tokio::sync::mpsc::Sender<SessionRequest>,
    replies: Streaming<SessionReply>,
    /// The bytes of data that the target could not get through, once it has said that this is why
    /// it ends.
    pub unacknowledged_bytes: u32,
}

impl Session {
    /// Waits until the target ends the session or becomes unreachable, and returns the cause.
    pub async fn ended(&mut self) -> String {
        loop {
            match self.replies.message().await {
                // Kept here: a caller may give up waiting and call again.
                Ok(Some(reply)) => self.unacknowledged_bytes = reply.unacknowledged_bytes,
                Ok(None) => return "it ended the session".into(),
                Err(status) => {
                    // HTTP/2 reports both with the same message.
                    let cause = root_cause(&status);
                    return match cause.contains("broken pipe") {
                        true => "its control connection closed or got no response".into(),
                        false => format!("its control connection broke: {cause}"),
                    };
                }
            }
        }
    }
}

/// A client of one target's control plane.
#[derive(Clone, Debug)]
pub struct TargetControl {
    peer: Peer,
    client: TargetClient<InterceptedService<Channel, AddToken>>,
}

impl TargetControl {
    /// Connects to the target at `host[:port]`.
    pub async fn connect(host: &str, token: &str) -> Result<TargetControl, Error> {
        let peer = Peer::connect("target", host, "`dquant serve`").await?;
        let client = TargetClient::with_interceptor(peer.channel.clone(), AddToken::new(token));
        Ok(TargetControl { peer, client })
    }

    /// `host:port`, for messages.
    pub fn name(&self) -> &str {
        self.peer.name()
    }

    /// Describes the datasets.
    pub async fn describe(&self, datasets: Vec<DatasetRef>) -> Result<Vec<DatasetInfo>, Error> {
        let mut client = self.client.clone();
        let call = client.describe(DescribeRequest { datasets });
        let reply = self.peer.within(call).await?;
        Ok(reply.into_inner().datasets)
    }

    /// What the target serves under names that begin with `prefix`.
    ///
    /// # Errors
    /// When it refuses or takes too long; one of a version that lists nothing refuses.
    pub async fn list(&self, prefix: &str) -> Result<ListReply, Error> {
        let mut client = self.client.clone();
        let call = client.list(ListRequest { prefix: prefix.to_owned() });
        Ok(self.peer.within(call).await?.into_inner())
    }

    /// The documents of datasets that were described as `infos`, with their documents, and what
    /// else is asked for. The memory for a list is taken from `budget`.
    ///
    /// # Errors
    /// When the target refuses or takes too long, and when its reply does not agree with the
    /// descriptions.
    pub async fn documents(
        &self,
        asked: DocumentsRequest,
        infos: &[DatasetInfo],
        budget: &Budget,
    ) -> Result<Received, Error> {
        let wants = (asked.hashes, !asked.list.is_empty());
        let targets = asked.datasets.iter().any(|dataset| dataset.sequences);
        let mut arriving = Arriving::new(infos, wants, budget)?.with_targets(targets)?;
        let receive = async {
            let mut client = self.client.clone();
            let call = client.documents(asked);
            let mut pieces = self.peer.within(call).await?.into_inner();
            while let Some(piece) = self.peer.within(pieces.message()).await? {
                arriving.take(&piece)?;
            }
            arriving.finish()
        };
        let late = |_| {
            let seconds = TABLES_TIMEOUT.as_secs();
            Error::unreachable(format!("{}: no tables of documents within {seconds} s", self.peer))
                .hint("its disk or the path to it is slow: see `dquant status`")
        };
        tokio::time::timeout(TABLES_TIMEOUT, receive).await.map_err(late)?
    }

    /// Begins a session.
    pub async fn session(&self, request: SessionRequest) -> Result<Session, Error> {
        let (send, receive) = tokio::sync::mpsc::channel(1);
        // The channel is empty, so there is room for the first message.
        let _ = send.try_send(request);
        let outbound = tokio_stream::wrappers::ReceiverStream::new(receive);
        let mut client = self.client.clone();
        let mut replies = self.peer.within(client.session(outbound)).await?.into_inner();
        let first = self.peer.within(replies.message()).await?;
        let reply =
            first.ok_or_else(|| Error::unreachable(format!("{} ended the session", self.peer)))?;
        Ok(Session { reply, _requests: send, replies, unacknowledged_bytes: 0 })
    }

    /// The target's counters.
    pub async fn status(&self) -> Result<StatusReply, Error> {
        let mut client = self.client.clone();
        Ok(self.peer.within(client.status(StatusRequest {})).await?.into_inner())
    }
}
