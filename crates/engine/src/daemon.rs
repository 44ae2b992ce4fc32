//! The two daemons: storage target and DPU. Each starts its engine and its control plane, reports
//! once what it is and where it serves, and runs until SIGTERM, SIGINT or SIGHUP.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use host::attach::{Access, AttachError, Callers, Connection, Listener};
use host::root::Root;
use serde::Serialize;
use service::admission::{Admission, Call};
use service::auth::CheckToken;
use service::error::{Error, root_cause, with_limit_hint};
use service::event::Event;
use service::grpc::bounded_server;
use service::signals::EndSignals;
use service::{log, runtime};
use tokio::net::TcpListener;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use xio::opener::{IoChoice, Opener};

use crate::budget::Budget;
use crate::catalog::Catalog;
use crate::control::CALL_TIMEOUT;
use crate::control::peer::KEEP_ALIVE;
use crate::control::status::Reports;
use crate::control::target::{TargetService, status_reply};
use crate::data::dpu::{self, DpuEngine};
use crate::data::target::TargetEngine;
use crate::data::{Commands, HostConfig};
use crate::group::Groups;
use crate::path::{PathMtus, Waiting};
use crate::proto::dpu_server::{Dpu, DpuServer};
use crate::proto::target_server::TargetServer;
use crate::proto::{StatusReply, StatusRequest};
use crate::selection;
use crate::stream::{DpuContext, REFUSED_STREAMS, refuse_client, serve_client};

/// How often the DPU's accept loop checks whether it is to end.
const ACCEPT_LOOK: Duration = Duration::from_millis(200);

/// How often a daemon checks whether its engine is alive.
const ENGINE_LOOK: Duration = Duration::from_millis(500);

/// How long a shutdown waits for control calls under way.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// How long readers have to learn that their sessions end.
const GOODBYE: Duration = Duration::from_millis(100);

/// Clients whose requests are being served at once; streams have a limit of their own.
const MAX_CLIENTS: usize = 64;

const LATER: &str = "try again later";

static ACCEPT_ERRORS: Event = Event::new("dpu.accept_errors");
static REFUSED_CLIENTS: Event = Event::new("dpu.refused.clients");
static EVICTED_CLIENTS: Event = Event::new("dpu.evicted_clients");

/// How to run a storage target.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Folders to export.
    pub roots: Vec<PathBuf>,
    /// Address of the control plane.
    pub control: SocketAddr,
    /// Engine settings; staging buffers come on top of its memory.
    pub host: HostConfig,
    /// Staging buffers of 1 MiB.
    pub staging_buffers: u32,
    /// Direct or buffered reads.
    pub io: IoChoice,
    /// Token that callers must present.
    pub token: String,
}

/// How to run a DPU.
#[derive(Clone, Debug)]
pub struct DpuConfig {
    /// Local socket for host processes.
    pub socket: PathBuf,
    /// Who may connect to it.
    pub access: Access,
    /// Address of the control plane.
    pub control: SocketAddr,
    /// Engine settings.
    pub host: HostConfig,
    /// Token that callers of the control plane must present.
    pub token: String,
    /// How long a lost target may stay away.
    pub reconnect: Duration,
    /// Bytes for the rings of all streams.
    pub rings: u64,
    /// Bytes for the tables of documents of all streams.
    pub documents: u64,
}

/// Printed once a daemon serves.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// "target" or "dpu".
    pub role: &'static str,
    /// Address of the control plane.
    pub control: SocketAddr,
    /// Address of the RoCE endpoint.
    pub roce: SocketAddr,
    /// Local socket, for a DPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Process number.
    pub pid: u32,
    /// Paths chosen, and why.
    pub notes: Vec<String>,
}

async fn listen(control: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let bound = async {
        let listener = TcpListener::bind(control).await?;
        let address = listener.local_addr()?;
        Ok::<_, std::io::Error>((listener, address))
    };
    bound.await.map_err(|error| {
        Error::because(format_args!("cannot listen on {control}"), &error)
            .hint("choose another address or port with --control")
    })
}

/// A gRPC server of either daemon: it detects peers that vanish, and bounds what one connection may
/// do.
fn control_server() -> Server {
    bounded_server()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(CALL_TIMEOUT))
        // Applies until the reply begins: a session's stream may last any time.
        .timeout(CALL_TIMEOUT)
}

/// Waits for a signal that ends the daemon, and reports it.
async fn asked_to_end(signals: &mut EndSignals) {
    log::line(format_args!("stopping on {}", signals.received().await));
}

/// Resolves when the engine's thread has ended without being asked to: its device is gone, or it
/// has panicked. The service manager should restart a daemon that can only report this.
async fn engine_died<C>(commands: &Commands<C>, has_stopped: impl Fn() -> bool) -> Error {
    while !has_stopped() {
        tokio::time::sleep(ENGINE_LOOK).await;
    }
    match commands.failure() {
        Some(why) => Error::invalid(why)
            .hint("restart the daemon once the device works; the kernel's log may say more"),
        None => Error::invalid("the engine stopped unexpectedly")
            .hint("report a bug, with the output above this line"),
    }
}

/// Runs a storage target until it is asked to end. `ready` receives its addresses.
///
/// # Errors
/// When it cannot start, and the errors of `ready`.
pub fn serve<E: From<Error>>(
    config: ServeConfig,
    ready: impl FnOnce(&Ready) -> Result<(), E>,
) -> Result<(), E> {
    let open = |dir: &PathBuf| -> Result<Box<dyn Opener>, Error> {
        let root = Root::new(dir).map_err(|error| {
            Error::from_cause(error)
                .hint("--root takes a folder that exists and that this user may enter")
        })?;
        Ok(Box::new(root))
    };
    let roots = config.roots.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    // Before there are threads that could take the free descriptors that it counts on.
    let runtime = runtime::multi_thread()?;
    let engine = TargetEngine::start(config.host, config.staging_buffers).map_err(Error::from)?;
    let served = runtime.block_on(async {
        // Before the daemon reports that it is ready: from here on signals no longer kill it.
        let mut signals = EndSignals::listen()?;
        let (listener, control) = listen(config.control).await?;
        let (roce, notes) = (engine.roce, engine.notes.clone());
        let pid = std::process::id();
        ready(&Ready { role: "target", control, roce, socket: None, pid, notes: notes.clone() })?;
        let catalog = Catalog::new(roots, config.io);
        let (admission, commands) = (Admission::new(), engine.commands.clone());
        let (discovery, at) = (engine.discovery.clone(), (control, roce));
        let service =
            TargetService::new(catalog, commands, Arc::clone(&admission), at, discovery, notes);
        let check = CheckToken::new(&config.token);
        let service = InterceptedService::new(TargetServer::new(service), check);
        let server =
            control_server().add_service(service).serve_with_incoming(admission.accept(listener));
        tokio::select! {
            ended = server => ended.map_err(|error| Error::invalid(root_cause(&error)).caused_by(&error).into()),
            () = asked_to_end(&mut signals) => Ok(()),
            error = engine_died(&engine.commands, || engine.thread.is_finished()) => Err(error.into()),
        }
    });
    engine.commands.stop();
    let _ = engine.thread.join();
    // The session tasks notice that the engine has stopped, and end their calls.
    runtime.block_on(async { tokio::time::sleep(GOODBYE).await });
    runtime.shutdown_timeout(SHUTDOWN);
    served
}

/// The gRPC service of a DPU.
#[derive(Debug)]
struct DpuService {
    reports: Reports<dpu::Command>,
    admission: Arc<Admission>,
    control: SocketAddr,
    roce: SocketAddr,
    notes: Vec<String>,
    waiting: Waiting,
    path_mtus: PathMtus,
}

#[tonic::async_trait]
impl Dpu for DpuService {
    async fn status(&self, call: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let _call = Call::of(&call);
        let mut counters = self.reports.get().await?;
        counters.set("control.connections", self.admission.connections() as u64);
        counters.set_events([&ACCEPT_ERRORS, &REFUSED_CLIENTS, &EVICTED_CLIENTS, &REFUSED_STREAMS]);
        counters.set_events(selection::EVENTS);
        let streams = counters.get("dpu.streams") as u32;
        let at = (self.control, self.roce);
        let notes = [self.notes.clone(), self.waiting.notes(), self.path_mtus.notes()].concat();
        Ok(Response::new(status_reply("dpu", at, streams, counters, &notes)))
    }
}

/// The local socket of a DPU.
fn listen_locally(config: &DpuConfig) -> Result<Listener, Error> {
    Listener::bind_for(&config.socket, config.access).map_err(|error| {
        let text = match &error {
            AttachError::Os { .. } => format!("{}: {error}", config.socket.display()),
            error => error.to_string(),
        };
        Error::invalid(text).caused_by(&error).hint(match error {
            AttachError::InUse { .. } => "another DPU serves there; choose another --socket",
            AttachError::Path { .. } => {
                "the folder must exist and be writable; choose another --socket"
            }
            AttachError::Group { .. } => {
                "only root gives files to groups that it is not in: add the daemon's user to the group (systemd: SupplementaryGroups=), or choose another --socket-group"
            }
            _ => "choose another --socket",
        })
    })
}

/// Who may connect to the local socket, where that is not its user alone.
fn access_note(access: Access) -> Option<String> {
    let who = match (access.callers, access.group) {
        (Callers::Owner, _) => return None,
        (Callers::Group, Some(group)) => format!("members of group {group}"),
        (Callers::Group, None) => "members of its group".to_owned(),
        (Callers::Everyone, _) => "every user of this machine".to_owned(),
    };
    Some(format!("socket: {who} may connect"))
}

/// Runs a DPU until it is asked to end. `ready` receives its addresses.
///
/// # Errors
/// As [`serve`].
pub fn run_dpu<E: From<Error>>(
    config: DpuConfig,
    ready: impl FnOnce(&Ready) -> Result<(), E>,
) -> Result<(), E> {
    let listener = listen_locally(&config)?;
    // Before there are threads that could take the free descriptors that it counts on.
    let runtime = runtime::multi_thread()?;
    let engine = DpuEngine::start(config.host.clone()).map_err(Error::from)?;
    let context = DpuContext {
        commands: engine.commands.clone(),
        roce: engine.roce,
        runtime: runtime.handle().clone(),
        reconnect: config.reconnect,
        offload: true,
        memory: config.host.memory,
        rings: Budget::rings(config.rings),
        documents: Budget::documents(config.documents),
        waiting: Waiting::default(),
        path_mtus: PathMtus::default(),
        discovery: engine.discovery.clone(),
        groups: Groups::default(),
    };
    let (waiting, path_mtus) = (context.waiting.clone(), context.path_mtus.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let accepting = accept_clients(listener, context, Arc::clone(&stop))?;
    let served = runtime.block_on(async {
        // Before the daemon reports that it is ready: from here on signals no longer kill it.
        let mut signals = EndSignals::listen()?;
        let (listener, control) = listen(config.control).await?;
        let (roce, mut notes) = (engine.roce, engine.notes.clone());
        notes.extend(access_note(config.access));
        let socket = Some(config.socket.clone());
        let pid = std::process::id();
        ready(&Ready { role: "dpu", control, roce, socket, pid, notes: notes.clone() })?;
        let admission = Admission::new();
        let reports = Reports::new(engine.commands.clone(), dpu::Command::Status);
        let admitted = Arc::clone(&admission);
        let service = DpuService { reports, admission: admitted, control, roce, notes, waiting, path_mtus };
        let check = CheckToken::new(&config.token);
        let service = InterceptedService::new(DpuServer::new(service), check);
        let server =
            control_server().add_service(service).serve_with_incoming(admission.accept(listener));
        tokio::select! {
            ended = server => ended.map_err(|error| Error::invalid(root_cause(&error)).caused_by(&error).into()),
            () = asked_to_end(&mut signals) => Ok(()),
            error = engine_died(&engine.commands, || engine.has_stopped()) => Err(error.into()),
        }
    });
    stop.store(true, Ordering::Relaxed);
    // Ends the listener's thread and removes the socket file.
    let _ = accepting.join();
    drop(engine);
    runtime.shutdown_timeout(SHUTDOWN);
    served
}

/// The host processes being served; the oldest comes first.
#[derive(Debug, Default)]
struct Clients {
    next_id: u64,
    served: Vec<Client>,
}

#[derive(Debug)]
struct Client {
    id: u64,
    /// Closes its connection, while it has sent no request.
    silent: Option<Connection>,
}

impl Clients {
    /// A number for the client behind `connection`, if there is a place or the oldest client that
    /// has sent no request can be evicted.
    fn admit(&mut self, connection: &Connection) -> Option<u64> {
        if self.served.len() >= MAX_CLIENTS {
            let oldest = self.served.iter().position(|client| client.silent.is_some())?;
            if let Some(evicted) = self.served.remove(oldest).silent {
                EVICTED_CLIENTS.count();
                let text = "this client was evicted because it had sent no request";
                // Its thread notices the end of the connection.
                refuse_client(evicted, &Error::invalid(format!("{}; {text}", full())).hint(LATER));
            }
        }
        let id = self.next_id;
        self.next_id += 1;
        // Without a descriptor for it, it cannot be evicted.
        self.served.push(Client { id, silent: connection.try_clone().ok() });
        Some(id)
    }

    /// Notes that the client has sent its request.
    fn heard(&mut self, id: u64) {
        if let Some(client) = self.served.iter_mut().find(|client| client.id == id) {
            client.silent = None;
        }
    }

    fn remove(&mut self, id: u64) {
        self.served.retain(|client| client.id != id);
    }
}

fn full() -> String {
    format!("the DPU serves {MAX_CLIENTS} clients already")
}

fn lock(clients: &Mutex<Clients>) -> MutexGuard<'_, Clients> {
    // The table is never left half changed.
    clients.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Accepts host processes, a thread for each.
fn accept_clients(
    listener: Listener,
    context: DpuContext,
    stop: Arc<AtomicBool>,
) -> Result<JoinHandle<()>, Error> {
    let clients = Arc::new(Mutex::new(Clients::default()));
    let accept = move || {
        let mut failures = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            let connection = match listener.accept(ACCEPT_LOOK) {
                Ok(Some(connection)) => connection,
                Ok(None) => continue,
                Err(error) => {
                    ACCEPT_ERRORS.count();
                    failures += 1;
                    if failures == 1 {
                        let why = with_limit_hint(&error, "; ");
                        log::line(format_args!("cannot accept local clients: {why}"));
                    }
                    // Most likely out of descriptors: the client keeps waiting, do not spin on it.
                    std::thread::sleep(ACCEPT_LOOK);
                    continue;
                }
            };
            if let failed @ 1.. = std::mem::take(&mut failures) {
                log::line(format_args!("accepting local clients again after {failed} failures"));
            }
            let Some(id) = lock(&clients).admit(&connection) else {
                REFUSED_CLIENTS.count();
                log::refusal(format_args!("a local client was refused: {}", full()));
                refuse_client(connection, &Error::invalid(full()).hint(LATER));
                continue;
            };
            let (context, clients) = (context.clone(), Arc::clone(&clients));
            let client = std::thread::Builder::new().name("dquant-client".into());
            let counted = Arc::clone(&clients);
            let started = client.spawn(move || {
                serve_client(&context, connection, || lock(&clients).heard(id));
                lock(&clients).remove(id);
            });
            if started.is_err() {
                lock(&counted).remove(id);
            }
        }
    };
    std::thread::Builder::new()
        .name("dquant-accept".into())
        .spawn(accept)
        .map_err(Error::from_cause)
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::proto::OpenReply;
    use crate::proto::open_reply::Result;

    #[test]
    fn the_oldest_silent_client_gives_way_and_others_stay() {
        let mut clients = Clients::default();
        let pair = || Connection::pair().expect("a pair of sockets");
        let pairs: Vec<_> = (0..=MAX_CLIENTS).map(|_| pair()).collect();
        let (last, first) = pairs.split_last().expect("there are some");
        for (_, ours) in first {
            assert!(clients.admit(ours).is_some());
        }
        clients.heard(0);
        let before = EVICTED_CLIENTS.get();
        assert_eq!(clients.admit(&last.1), Some(MAX_CLIENTS as u64));
        let hung_up: Vec<_> = pairs.iter().map(|(theirs, _)| theirs.hung_up()).collect();
        assert_eq!(hung_up.iter().filter(|gone| **gone).count(), 1, "{hung_up:?}");
        assert!(hung_up[1] && EVICTED_CLIENTS.get() > before, "the oldest that said nothing");
        let heard = pairs[1].0.recv(1000).expect("a reason").bytes;
        let Ok(OpenReply { result: Some(Result::Failure(failure)) }) =
            OpenReply::decode(&heard[..])
        else {
            panic!("{heard:?}")
        };
        assert!(failure.message.contains("had sent no request"), "{failure:?}");

        for id in 2..=MAX_CLIENTS as u64 {
            clients.heard(id);
        }
        assert_eq!(clients.admit(&last.1), None, "all have said what they want");
        clients.remove(7);
        assert!(clients.admit(&last.1).is_some());
    }
}
