//! The DPU's side of a stream: from a client's request to a running stream, and keeping it running.
//!
//! A client sends an [`OpenRequest`] over a local socket and receives the descriptors of its ring
//! on it; trainers of one job may read one stream together (`group`). After that the socket shows
//! that the client is alive, and carries requests for counters. One thread serves one client. A
//! control task beside it holds the session with the target: when the target is lost the stream
//! pauses, the task reconnects with growing delays, and the stream continues where it was (C4).
//! When the target is lost for too long, the stream ends with an error that names it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use adapter::connect::{LARGEST_MTU, mtu_towards, path_mtu};
use adapter::software::LocalPeer;
use host::accounts;
use host::attach::Connection;
use host::ring::{Producer, RingConfig, RingFds};
use nic::local_peers;
use prost::Message;
use roce::verbs::WcStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use service::error::{Error, Kind};
use service::{event, log};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use xio::dataset::Dtype;
use xio::documents::Documents;
use xio::plan::Plan;
use xio::reader::ReaderSource;

use crate::budget::{Budget, Lease};
use crate::catalog::Table;
use crate::control::SAME_VERSION;
use crate::control::documents::{DOCUMENT_BYTES, HASHED_BYTES, SEQUENCE_BYTES};
use crate::control::stages;
use crate::control::target::{Session, TargetControl, qp_address, queue_pair};
use crate::data::dpu::{CAPSULES_BYTES, Command, Event, Peer, StreamId, StreamReport, StreamSpec};
use crate::data::{Commands, EngineError, Signals};
use crate::group::{Groups, Member};
use crate::handle::OpenStream;
use crate::layout::{self, MAX_ORDER_TABLES};
use crate::path::{Ending, PathMtus, PathState, PeerPath, Traffic, Waiting};
use crate::proto::{
    DatasetInfo, DatasetRef, DocumentsRequest, Failure, OpenReply, OpenRequest, Opened, Ranks,
    SessionRequest, StreamStatus, TargetStages, open_reply,
};
use crate::selection;
use crate::status;

/// Largest request for a stream, in bytes: a plan over as many datasets as there may be, and their
/// names.
pub const MAX_REQUEST: usize = 2 << 20;

/// Largest message on the local socket after it, in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// Hint for a stream whose dataset is not what it was.
pub(crate) const REOPEN_HINT: &str =
    "open the stream again: it then reads the file as it is now, from its first batch on";

/// First and longest delay between attempts to reach a lost target.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LONGEST: Duration = Duration::from_secs(1);

/// A connection that lasted this long was good, even if the host was too slow for any data to
/// arrive.
const SETTLED: Duration = Duration::from_secs(2);

/// How often a connection after a failed one is asked whether data arrives.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Time within which a client has to send its request.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Requests for a stream that were refused, for whatever reason.
pub(crate) static REFUSED_STREAMS: event::Event = event::Event::new("dpu.refused.streams");

/// What the streams of one DPU share.
#[derive(Clone, Debug)]
pub struct DpuContext {
    /// The engine.
    pub commands: Commands<Command>,
    /// Address of our RoCE endpoint.
    pub roce: SocketAddr,
    /// Where control calls run.
    pub runtime: Handle,
    /// How long a lost target may stay away before the stream fails.
    pub reconnect: Duration,
    /// Whether actions that shrink bytes run at the target.
    pub offload: bool,
    /// Total bytes of staging buffers of the engine.
    pub memory: u64,
    /// Memory for the rings of all streams.
    pub rings: Budget,
    /// Memory for the tables of documents of all streams.
    pub documents: Budget,
    /// Streams that several trainers read.
    pub(crate) groups: Groups,
    /// Streams that wait for their target.
    pub waiting: Waiting,
    /// Paths to targets that drop large packets.
    pub path_mtus: PathMtus,
    /// What finds out which targets are processes of this machine, or why none are.
    pub discovery: Result<Arc<local_peers::Shared>, String>,
}

/// Serves one client until it closes its connection. Calls `heard` when its request has arrived.
pub fn serve_client(context: &DpuContext, mut connection: Connection, heard: impl FnOnce()) {
    connection.set_timeout(OPEN_TIMEOUT);
    let peer = connection.peer();
    let client = peer.as_ref().map_or_else(
        |_| "an unknown process".into(),
        |peer| format!("process {} of user {}", peer.pid, peer.uid),
    );
    let user = peer.map_or(u32::MAX, |peer| peer.uid);
    let request = receive_request(&connection).inspect(|_| heard());
    let seated = request.and_then(|request| take_seat(context, (user, &client), &request));
    match seated {
        Ok(Seated { stream, member, opened, fds }) => {
            let (id, plan, target) = (stream.id, &opened.plan, &stream.target);
            let rank = member.as_ref().map_or(String::new(), |m| format!(", rank {}", m.rank()));
            log::line(format_args!(
                "stream {id} for {client}{rank} begins: {plan} from target {target}"
            ));
            let begun = Instant::now();
            let reply = OpenReply { result: Some(open_reply::Result::Opened(opened)) };
            if connection.send(&reply.encode_to_vec(), &fds.to_pass()).is_ok() {
                attend(&connection, &stream, member.as_ref());
            }
            log_end(&stream, begun);
        }
        Err(error) => {
            REFUSED_STREAMS.count();
            log::refusal(format_args!("stream refused for {client}: {}", error.parts().0));
            let reply = OpenReply { result: Some(open_reply::Result::Failure(failure(&error))) };
            // A client that has left needs no reply.
            let _ = connection.send(&reply.encode_to_vec(), &[]);
        }
    }
}

/// Logs a stream at its end.
fn log_end(stream: &OpenStream, begun: Instant) {
    let (id, seconds) = (stream.id, begun.elapsed().as_secs_f64());
    let Some(StreamReport { counters, published_bytes, failure }) = stream_report(stream) else {
        // An engine that was asked to stop has logged its streams.
        if stream.commands.is_stopped() {
            return;
        }
        return log::line(format_args!("stream {id} ends with the engine, after {seconds:.1} s"));
    };
    let (batches, bytes) = (counters.batches, published_bytes);
    let how = if failure.is_some() { "after its failure" } else { "closed by the client" };
    let moved = format!("{batches} batches, {bytes} bytes in {seconds:.1} s");
    log::line(format_args!("stream {id} ends, {how}: {moved}"));
}

/// Refuses a client without waiting for its request, and closes the connection.
pub fn refuse_client(mut connection: Connection, error: &Error) {
    connection.set_timeout(Duration::ZERO);
    let reply = OpenReply { result: Some(open_reply::Result::Failure(failure(error))) };
    // A client that has left needs no reply.
    let _ = connection.send(&reply.encode_to_vec(), &[]);
    connection.hang_up();
}

fn failure(error: &Error) -> Failure {
    let (message, hint) = error.parts();
    Failure { message, hint: hint.unwrap_or_default(), code: error.kind() as u32 }
}

fn receive_request(connection: &Connection) -> Result<OpenRequest, Error> {
    let message = connection
        .recv(MAX_REQUEST)
        .map_err(|error| Error::because("cannot read the request", &error))?;
    OpenRequest::decode(message.bytes.as_slice())
        .map_err(|error| Error::invalid(format!("cannot decode the request: {error}")))
}

/// Replies to requests for counters until the client closes its connection, or until the engine has
/// stopped: the client notices that its socket is closed.
fn attend(connection: &Connection, stream: &OpenStream, member: Option<&Member>) {
    let mut failed = false;
    loop {
        if let Some(member) = member {
            member.look(stream, failed);
        }
        let mut fds = [PollFd::new(connection, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
        let polled = poll(&mut fds, Some(&timeout));
        let Some(report) = stream_report(stream) else { return };
        if let Some(why) = report.failure.as_ref().filter(|_| !failed) {
            failed = true;
            log::line(format_args!("stream {} fails: {why}", stream.id));
        }
        if connection.hung_up() {
            return;
        }
        if polled.is_ok_and(|ready| ready > 0) {
            let Ok(_request) = connection.recv(MAX_MESSAGE) else { return };
            let status = stream_status(&report);
            if connection.send(&status.encode_to_vec(), &[]).is_err() {
                return;
            }
        }
    }
}

/// Report on the stream; `None` when the engine has stopped or has closed it.
fn stream_report(stream: &OpenStream) -> Option<StreamReport> {
    stream.commands.call(|reply| Command::Stream(stream.id, reply)).ok().flatten()
}

pub(crate) fn stream_status(report: &StreamReport) -> StreamStatus {
    let counters = &report.counters;
    StreamStatus {
        batches: counters.batches,
        source_bytes: counters.source_bytes,
        wire_bytes: counters.wire_bytes,
        delivered_bytes: counters.delivered_bytes,
        counters: status::reader_counters(counters)
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    }
}

/// A client with its ring.
struct Seated {
    stream: Arc<OpenStream>,
    /// Its seat, if the stream is one of several trainers.
    member: Option<Member>,
    opened: Opened,
    fds: RingFds,
}

/// Opens the stream of a request, or takes a seat at it if another trainer has opened it.
fn take_seat(
    context: &DpuContext,
    client: (u32, &str),
    request: &OpenRequest,
) -> Result<Seated, Error> {
    layout::share(request)?;
    let open = || open(context, request);
    match request.ranks.as_ref().filter(|ranks| !ranks.group.is_empty()) {
        Some(_) if !accounts::is_one_user(client.0) => {
            let why =
                "trainers of different users look like one here, so none of them shares a stream";
            Err(Error::invalid(why).hint(
                "give no group, or run the DPU in the user namespace of the trainers: a rootless container has its own",
            ))
        }
        Some(ranks) => {
            let (member, stream, opened, fds) =
                context.groups.join(client, request, ranks, open)?;
            Ok(Seated { stream, member: Some(member), opened, fds })
        }
        None => {
            let (stream, opened, rings) = open()?;
            let fds = rings.into_iter().flatten().next();
            let fds = fds.ok_or_else(|| Error::invalid("the stream has no ring"))?;
            Ok(Seated { stream: Arc::new(stream), member: None, opened, fds })
        }
    }
}

/// The rings of a request: their producers, and for each ring what each of its readers maps.
fn create_rings(
    request: &OpenRequest,
    slot_bytes: u32,
) -> Result<(Vec<Producer>, Vec<Vec<RingFds>>), Error> {
    let config = RingConfig { slots: request.slots, slot_bytes: u64::from(slot_bytes) };
    let (rings, readers) = match &request.ranks {
        Some(Ranks { count, readers, .. }) => (*count, *readers),
        None => (1, 1),
    };
    let rings = (0..rings).map(|_| Producer::create_shared(config, readers));
    let rings = rings.collect::<Result<Vec<_>, _>>();
    let rings = rings
        .map_err(|error| Error::from_cause(error).hint("choose other --slots or --slot-size"))?;
    Ok(rings.into_iter().unzip())
}

/// The documents that a plan draws from, and their share of the memory for them. `infos` get to
/// tell what it drops.
fn documents_of(
    context: &DpuContext,
    control: &TargetControl,
    plan: &Plan,
    request: &OpenRequest,
    infos: &mut [DatasetInfo],
) -> Result<(Vec<Documents>, Vec<Lease>), Error> {
    if !plan.needs_documents() {
        return Ok((Vec::new(), Vec::new()));
    }
    let (selection, budget) = (plan.selection(), &context.documents);
    let hashes = !selection.is_empty();
    let count = infos.iter().fold(0, |sum: u64, info| sum.saturating_add(info.document_count));
    let each = if hashes { HASHED_BYTES } else { DOCUMENT_BYTES };
    let turns = |info: &DatasetInfo| if plan.hides_others() { info.sequences } else { 0 };
    let turns = infos.iter().fold(0, |sum: u64, info| sum.saturating_add(turns(info)));
    let turns = turns.saturating_mul(SEQUENCE_BYTES);
    let tables = budget.take(count.saturating_mul(each).saturating_add(turns))?;
    let list = selection.filter.as_ref().map_or(String::new(), |filter| filter.list.clone());
    let mut datasets = request.datasets.clone();
    for (dataset, info) in datasets.iter_mut().zip(&*infos) {
        dataset.sequences = plan.hides_others() && info.has_targets;
    }
    let asked = DocumentsRequest { datasets, hashes, list };
    let mut received = context.runtime.block_on(control.documents(asked, infos, budget))?;
    let leases = std::iter::once(tables).chain(received.list_lease.take()).collect();
    let draws = |dataset| plan.draws(dataset);
    Ok((selection::apply(selection, plan.document_split(), draws, false, infos, received)?, leases))
}

/// Plans the stream, starts it in the engine, and connects it to its target.
fn open(
    context: &DpuContext,
    request: &OpenRequest,
) -> Result<(OpenStream, Opened, Vec<Vec<RingFds>>), Error> {
    let control = TargetControl::connect(&request.target, &request.token);
    let control = context.runtime.block_on(control)?;
    let plan = layout::parse(&request.plan)?;
    let (table, module) = (plan.remap().map(Table::request), plan.wasm().cloned());
    let mut request = request.clone();
    for dataset in &mut request.datasets {
        // For every session of the stream: one with other documents is refused.
        dataset.documents = plan.needs_documents();
        dataset.loss_weights = plan.loss_weights().is_some();
    }
    let mut asked = request.datasets.clone();
    // Sessions do not need them any more: what is selected stays.
    asked.iter_mut().for_each(|dataset| dataset.document_hashes = !plan.selection().is_empty());
    asked.extend(table);
    let has_table = asked.len() > request.datasets.len();
    let mut infos = context.runtime.block_on(control.describe(asked))?;
    // The table comes last. A wrong number of descriptions is noticed with the plan.
    let table = if has_table { infos.pop() } else { None };
    let table_ids = table.as_ref().map(Table::ids_of).transpose()?;
    let compile =
        |plan: &Plan, dtypes: &[Dtype]| plan.compile_with(dtypes, table_ids, context.offload);
    let mut described = infos.clone();
    described.extend(layout::loss_weights(&plan, &infos).map(|(_, weights)| weights.clone()));
    let (documents, tables) = documents_of(context, &control, &plan, &request, &mut infos)?;
    let most = if plan.megatron().is_some() { MAX_ORDER_TABLES } else { 0 };
    let mut order = context.documents.take_part(most);
    let divided = layout::divide(&plan, &infos, &request.datasets, documents)?;
    let layout = layout::plan(&request, &infos, divided, order.bytes(), compile)?;
    // Sessions serve them as datasets of their own, behind those of tokens.
    let of_weights =
        |info: &DatasetInfo| DatasetRef { name: info.name.clone(), ..DatasetRef::default() };
    request
        .datasets
        .extend(layout::loss_weights(&plan, &infos).map(|(_, weights)| of_weights(weights)));
    order.shrink(layout.order.table_bytes());
    EngineError::check_staging(layout.memory_needed() + CAPSULES_BYTES, context.memory)?;
    let slot_bytes = layout.delivery.slot_bytes;
    let ring_bytes = u64::from(request.slots) * u64::from(slot_bytes);
    let rings = u64::from(layout.delivery.share.count);
    let ring = context.rings.take(ring_bytes.saturating_mul(rings))?;
    let (producers, fds) = create_rings(&request, slot_bytes)?;
    let (events, lost) = mpsc::channel(16);
    let opened = layout.opened(infos, table.clone());
    let signals = context.commands.signals();
    let to_message = |source: &ReaderSource| {
        stages::message(source.stages.target(), table.as_ref(), module.as_ref())
    };
    let stages = layout.sources.iter().map(to_message).collect();
    let spec = StreamSpec {
        names: layout.names.clone(),
        // Prepared on this thread: the engine's thread serves all streams.
        setup: layout.setup(),
        module: module.as_ref().map(|module| module.name.clone()),
        targets: vec![control.name().to_owned()],
        producers,
        events,
        signals: signals.clone(),
        leases: [ring, order].into_iter().chain(tables).collect(),
    };
    let id = context
        .commands
        .call(|reply| Command::Open(Box::new(spec), reply))
        .and_then(|answer| answer.map_err(|refused| refused.error))
        .map_err(Error::from)?;
    let (target, commands) = (control.name().to_owned(), context.commands.clone());
    let context = context.clone();
    let waiting = context.waiting.clone();
    waiting.enter(id);
    let mut stream =
        OpenStream { id, target, commands, signals: signals.clone(), waiting, task: None };
    let mut keeper = Keeper { context, id, signals, request, infos: described, stages, peer: None };
    let runtime = keeper.context.runtime.clone();
    let session = runtime.block_on(keeper.connect(&control))?;
    stream.task = Some(runtime.spawn(async move { keeper.keep(session, lost).await }));
    Ok((stream, opened, fds))
}

/// Limits how long a stream lasts without a good connection: while the target is lost, and while
/// connections are established but fail at once. Those must not restart the time, or reconnecting
/// would never end.
struct ReconnectLimit {
    limit: Duration,
    /// When the target was last known to be good.
    since: Instant,
    delay: Duration,
}

impl ReconnectLimit {
    fn new(limit: Duration) -> ReconnectLimit {
        ReconnectLimit { limit, since: Instant::now(), delay: Duration::ZERO }
    }

    /// Notes the loss of a connection that had lasted for `lived`, and what it said of the path.
    fn lose(&mut self, path: PathState, lived: Duration) {
        let was_good = match path {
            PathState::Open => true,
            // The host may have been too slow for any request to be sent.
            PathState::Untried => lived >= SETTLED,
            // Such a connection shows nothing good, but after this long the time of an earlier loss
            // is over.
            PathState::SmallOnly(_) | PathState::Silent | PathState::Closed => lived >= self.limit,
        };
        if was_good {
            (self.since, self.delay) = (Instant::now(), Duration::ZERO);
        }
    }

    fn is_over(&self) -> bool {
        self.since.elapsed() >= self.limit
    }

    /// Waits before the next attempt: not before the first, then with growing delays.
    async fn pause(&mut self) {
        tokio::time::sleep(self.delay).await;
        self.delay = (self.delay * 2).clamp(RETRY_FIRST, RETRY_LONGEST);
    }
}

/// Holds the session of a stream with its target.
struct Keeper {
    context: DpuContext,
    id: StreamId,
    signals: Signals,
    request: OpenRequest,
    infos: Vec<DatasetInfo>,
    /// Stages that the target is to run over the blocks of each dataset.
    stages: Vec<TargetStages>,
    /// The far end of the latest connection.
    peer: Option<PeerPath>,
}

/// Why the connection was lost, as our queue pair reports it.
fn failed_queue_pair(status: WcStatus) -> String {
    match status {
        WcStatus::RetryExceeded => "no response after the last retry".into(),
        WcStatus::RnrRetryExceeded => "it had no receive posted after the last retry".into(),
        status => format!("the queue pair failed: {status:?}"),
    }
}

/// Connection 0 is the only one: a stream has one target.
const CONNECTION: u32 = 0;

impl Keeper {
    /// Creates a queue pair, opens a session and connects the queue pair.
    async fn connect(&mut self, control: &TargetControl) -> Result<Session, Error> {
        let id = self.id;
        let ours = self.call(move |reply| Command::NewQp(id, CONNECTION, reply)).await?;
        let found = self.context.path_mtus.towards(&self.request.target);
        let mtu = self.mtu().await.min(ours.mtu).min(found);
        let request = SessionRequest {
            datasets: self.request.datasets.clone(),
            reader: Some(queue_pair(&ours, mtu)),
            credits: xio::target::MAX_CREDITS,
            stages: self.stages.clone(),
        };
        let session = control.session(request).await?;
        self.check_unchanged(&session.reply.datasets, control.name())?;
        if session.reply.stages != self.stages {
            let text = format!("target {} runs other stages than requested", control.name());
            return Err(Error::invalid(text).hint(SAME_VERSION));
        }
        let ours_at = self.context.roce;
        let theirs = session.reply.target.as_ref().map(|pair| qp_address(pair, ours_at));
        let theirs = theirs.unwrap_or_else(|| Err("its reply has no queue pair".into()));
        let bad = |why: String| Error::invalid(format!("target {}: {why}", control.name()));
        let theirs = theirs.map_err(bad)?;
        let mtu = path_mtu(LARGEST_MTU, session.reply.mtu)
            .ok_or_else(|| bad(format!("path MTU {} is below 256", session.reply.mtu)))?;
        let credits = session.reply.credits;
        let local = self.local_peer(theirs.address).await;
        let is_direct = local.as_ref().is_ok_and(|target| target.why_not().is_none());
        self.peer = Some(PeerPath { roce: theirs.address, mtu_bytes: mtu.bytes(), is_direct });
        let peer = Peer { connection: CONNECTION, ours: ours.qpn, theirs, mtu, credits, local };
        self.call(move |reply| Command::Connect(id, peer, reply)).await?;
        Ok(session)
    }

    /// The target's process, if it is one of this machine that takes packets through shared memory.
    /// Getting to know it takes seconds if it is stopped.
    async fn local_peer(&self, target: SocketAddr) -> LocalPeer {
        let discovery = self.context.discovery.clone()?;
        let discover = move || discovery.discover(target, local_peers::OWN_PORT);
        tokio::task::spawn_blocking(discover).await.map_err(|error| error.to_string())?
    }

    /// Path MTU towards the target's machine, in payload bytes.
    async fn mtu(&self) -> u32 {
        let found = tokio::net::lookup_host(self.request.target.as_str()).await;
        let same_version = |at: &SocketAddr| at.is_ipv4() == self.context.roce.is_ipv4();
        let target = found.ok().and_then(|mut found| found.find(same_version));
        target.map_or(LARGEST_MTU, |target| mtu_towards(self.context.roce.ip(), target))
    }

    /// Refuses datasets that have changed: the schedule was made for the old ones, so batches would
    /// be wrong.
    fn check_unchanged(&self, now: &[DatasetInfo], target: &str) -> Result<(), Error> {
        let changed = self.infos.iter().zip(now).find_map(|(then, now)| {
            then.identity().difference(&now.identity()).map(|how| (then.name.as_str(), how))
        });
        let (name, how) = match changed {
            None if self.infos.len() == now.len() => return Ok(()),
            Some(changed) => changed,
            None => ("the list of datasets", format!("{} are named", now.len())),
        };
        let text =
            format!("target {target}: {name} has changed since the stream was opened: {how}");
        Err(Error::invalid(text).hint(REOPEN_HINT))
    }

    async fn call<R: Send + 'static>(
        &self,
        make: impl FnOnce(std::sync::mpsc::SyncSender<Result<R, EngineError>>) -> Command
        + Send
        + 'static,
    ) -> Result<R, Error> {
        let commands = self.context.commands.clone();
        let answered = tokio::task::spawn_blocking(move || commands.call(make)).await;
        answered.map_err(Error::invalid)?.and_then(|answer| answer).map_err(Error::from)
    }

    async fn keep(mut self, mut session: Session, mut lost: mpsc::Receiver<Event>) {
        let mut limit = ReconnectLimit::new(self.context.reconnect);
        let mut before = Traffic::default();
        let mut known = PathState::Untried;
        loop {
            let connected = Instant::now();
            let Some((why, ending)) = self.lose(&mut session, &mut lost, &before).await else {
                return;
            };
            drop(session);
            let (id, target) = (self.id, self.request.target.clone());
            log::line(format_args!("stream {id} has lost target {target} ({why}), reconnecting"));
            let lost_at = Instant::now();
            let now = self.traffic().await;
            let mtu_bytes = self.peer.map_or(0, |peer| peer.mtu_bytes);
            let path = PathState::of(&now.since(&before), &ending, mtu_bytes);
            before = now;
            limit.lose(path, connected.elapsed());
            known = path.after(known);
            self.lower_mtu(path);
            session = match self.reconnect(&mut limit, known).await {
                Some(session) => session,
                None => return,
            };
            let seconds = lost_at.elapsed().as_secs_f64();
            log::line(format_args!("stream {id} is reconnected to {target} after {seconds:.1} s"));
        }
    }

    /// Waits until the connection is lost, and says why and how; `None` when the stream is over.
    /// Data that arrives after `before` ends what the status says of its waiting.
    async fn lose(
        &self,
        session: &mut Session,
        lost: &mut mpsc::Receiver<Event>,
        before: &Traffic,
    ) -> Option<(String, Ending)> {
        let is_direct = self.peer.is_some_and(|peer| peer.is_direct);
        loop {
            tokio::select! {
                why = session.ended() => {
                    // The engine replies with `Lost` once it has destroyed the queue pair.
                    self.signals.drop_connection(CONNECTION);
                    let unacknowledged_bytes = session.unacknowledged_bytes;
                    let ending = Ending { gave_up: false, unacknowledged_bytes, is_direct };
                    return lost.recv().await.map(|_| (why, ending));
                }
                event = lost.recv() => {
                    let Event::Lost { why, .. } = event?;
                    let gave_up = why == WcStatus::RetryExceeded;
                    let ending = Ending { gave_up, unacknowledged_bytes: 0, is_direct };
                    return Some((failed_queue_pair(why), ending));
                }
                () = tokio::time::sleep(LOOK_AGAIN), if self.is_in_question() => {
                    if self.traffic().await.since(before).bytes > 0 {
                        self.has_passed();
                    }
                }
            }
        }
    }

    /// Whether data that arrives would be news: of the stream, or of the path.
    fn is_in_question(&self) -> bool {
        let is_unproven = self.context.path_mtus.is_unproven(&self.request.target);
        is_unproven || self.context.waiting.has(self.id)
    }

    /// Data has arrived over the connection.
    fn has_passed(&self) {
        self.context.waiting.clear(self.id);
        if let Some(news) = self.context.path_mtus.prove(&self.request.target) {
            log::line(news);
        }
    }

    /// Makes the next connection use smaller packets, if the last one has shown that large ones do
    /// not arrive.
    fn lower_mtu(&self, path: PathState) {
        let PathState::SmallOnly(dropped) = path else { return };
        if let Some(limit) = self.context.path_mtus.lower(&self.request.target, dropped) {
            log::line(format_args!("stream {} tries packets with {limit} bytes of data", self.id));
        }
    }

    /// What has passed between the stream and its target so far.
    async fn traffic(&self) -> Traffic {
        let (id, commands) = (self.id, self.context.commands.clone());
        let ask = move || commands.call(|reply| Command::Stream(id, reply));
        let report = tokio::task::spawn_blocking(ask).await.ok().and_then(Result::ok).flatten();
        report.map_or_else(Traffic::default, |report| Traffic {
            requests: report.counters.acknowledged_requests,
            bytes: report.counters.wire_bytes,
        })
    }

    /// Shows why the stream waits, in the log and in the status.
    fn note(&self, error: &Error) {
        let why = error.to_line();
        if self.context.waiting.set(self.id, &why) {
            log::line(format_args!("stream {} waits: {why}", self.id));
        }
    }

    /// Retries until the target accepts a session. Gives up when that takes too long, or when the
    /// session is refused for a permanent reason.
    async fn reconnect(&mut self, limit: &mut ReconnectLimit, path: PathState) -> Option<Session> {
        let of_path = path.error(&self.request.target, self.context.roce, self.peer);
        let mut error = of_path.clone();
        // A refusal is an answer.
        if limit.is_over()
            && let Err(silent) = self.ask_control().await
            && silent.kind() == Kind::Unreachable
        {
            error = silent;
        }
        while !limit.is_over() {
            limit.pause().await;
            match self.try_once().await {
                Ok(session) => {
                    // Only now it is known that the control plane answers.
                    match path {
                        PathState::Open | PathState::Untried => self.context.waiting.clear(self.id),
                        _ => self.note(&of_path),
                    }
                    return Some(session);
                }
                Err(failed) => error = failed,
            }
            if !error.is_transient() {
                break;
            }
            self.note(&error);
        }
        self.note(&error);
        let hint = error.parts().1.filter(|_| error.is_transient());
        let error = match hint {
            Some(hint) => error.hint(format!("{hint}; a longer wait is --reconnect")),
            None => error,
        };
        self.signals.abandon(CONNECTION, error.to_line());
        self.context.waiting.clear(self.id);
        None
    }

    /// Whether the target's control plane answers.
    async fn ask_control(&self) -> Result<(), Error> {
        let control = TargetControl::connect(&self.request.target, &self.request.token).await?;
        control.status().await.map(drop)
    }

    async fn try_once(&mut self) -> Result<Session, Error> {
        let control = TargetControl::connect(&self.request.target, &self.request.token).await?;
        self.connect(&control).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that lasted longer than the limit is a new start, whatever ended it; shorter
    /// ones that failed are not.
    #[test]
    fn the_time_of_an_earlier_loss_ends_with_a_long_connection() {
        let limit = Duration::from_millis(30);
        for path in [PathState::Closed, PathState::Silent, PathState::SmallOnly(4096)] {
            let mut lost = ReconnectLimit::new(limit);
            std::thread::sleep(limit);
            lost.lose(path, limit / 2);
            assert!(lost.is_over(), "{path:?}");
            lost.lose(path, limit);
            assert!(!lost.is_over(), "{path:?}");
        }
    }

    #[test]
    fn an_engine_that_is_full_may_have_room_later() {
        let full = EngineError::Limit { what: "bytes of staging buffers", need: 2, have: 1 };
        let busy = EngineError::Unavailable("is overloaded: its queue is full");
        let full_pool =
            nic::pool::PoolError::Full { len: 2, align: 1, free: 1, largest: 1, size: 9 };
        let out = EngineError::Pool(full_pool);
        for error in [full, busy, out] {
            assert!(Error::from(error).is_transient());
        }
        let source = std::io::ErrorKind::PermissionDenied.into();
        assert!(!Error::from(EngineError::Os { what: "eventfd", source }).is_transient());
    }
}
