//! The daemon around [`parfait::brain::Brain`]: it gives the state machine a clock, a store, agents
//! and clients.
//!
//! | module | what it holds |
//! |---|---|
//! | `cluster` | what is known of the cluster from the start |
//! | `placing` | trials of placements, beside the actor |
//! | `inputs` | what goes into the actor |
//! | `events` | what happens, numbered |
//! | `agents` | the agents that are connected |
//! | `carriers` | links without a carrier, and when they are outages |
//! | `requests` | who waits for the state machine's answers |
//! | `lookups` | what is read from the book alone |
//! | `picture` | the view of the cluster, made from the book and from what agents report |
//! | `views` | when a view is made |
//! | `storage` | calls of the store, beside the actor |
//! | `actor` | the one task that owns the state machine and all of these |
//! | `core` | a brain without a network |
//! | `calls` | gRPC |
//! | `extender` | what the scheduler of Kubernetes asks, over HTTP |

mod actor;
mod agents;
mod calls;
mod carriers;
mod cluster;
mod core;
mod events;
mod extender;
mod inputs;
mod lookups;
mod picture;
mod placing;
mod requests;
mod storage;
#[cfg(test)]
mod tests;
mod views;

pub use actor::Parts;
pub use calls::LEADER_ENTRY;
pub use cluster::Cluster;
pub use core::Core;
pub use placing::ITERATIONS;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parfait::brain as machine;
use parfait::demand::Abstraction;
use serde::Serialize;
use service::admission::Admission;
use service::auth::CheckProof;
use service::error::Error;
use service::grpc::bounded_server;
use service::seed::fresh_seed;
use service::signals::EndSignals;
use service::tls::Files;
use service::{log, runtime};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Status};
use topology::graph::{NodeId, Topology};

use self::calls::Service;
use crate::handshake::{self, Door};
use crate::keys::Keys;
use crate::proto::brain_server::BrainServer;
use crate::store::{Candidate, Store};
use crate::view::View;
use crate::web::{EventLog, Hook};

/// Default port of a brain.
pub const BRAIN_PORT: u16 = 4795;

/// Between claims of the lease.
const CLAIM_EVERY: Duration = Duration::from_millis(250);

/// After so long a command without an answer is sent again.
const RESEND: Duration = Duration::from_millis(500);

/// After so long a log that does not answer is opened again.
const STORAGE_TIMEOUT: Duration = Duration::from_secs(3);

/// Bytes of the log after which a snapshot is made.
const SNAPSHOT_BYTES: u64 = 1 << 20;

/// How often an idle connection is probed.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How to run a brain.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where clients and agents reach it, as `HOST:PORT`. Without it, where it listens, or the
    /// machine's name if that is every address.
    pub address: Option<String>,
    /// What follows from the cluster's token: callers have to prove that they know it.
    pub keys: Keys,
    /// Certificates.
    pub tls: Files,
    /// Hosts, switches and links.
    pub cluster: Cluster,
    /// Switches that have an agent, by name.
    pub switches: Vec<String>,
    /// How long a lease holds that is not renewed.
    pub lease: Duration,
    /// Where the log is, for people.
    pub store: String,
}

/// Printed once a brain serves.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// Always "brain".
    pub role: &'static str,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where others reach it.
    pub address: String,
    /// Where the log is.
    pub store: String,
    /// Hosts of the topology.
    pub hosts: u32,
    /// Process number.
    pub pid: u32,
    /// What is worth knowing.
    pub notes: Vec<String>,
}

fn nodes_named(topology: &Topology, names: &[String]) -> Result<Vec<NodeId>, Error> {
    let named = |name: &String| {
        let switch = topology.switches().find(|node| topology.node(*node).name() == name);
        switch.ok_or_else(|| {
            Error::invalid(format!("the topology has no switch '{name}'"))
                .hint("--switch-agents takes names of switches, or 'all'")
        })
    };
    names.iter().map(named).collect()
}

/// Where others reach a brain that listens there. All addresses of a machine are none for others:
/// its name stands for them.
fn reached_at(listen: SocketAddr) -> String {
    match listen.ip().is_unspecified() {
        true => {
            let system = rustix::system::uname();
            format!("{}:{}", system.nodename().to_string_lossy(), listen.port())
        }
        false => listen.to_string(),
    }
}

/// Runs a brain until it is asked to end. `ready` receives its addresses.
///
/// # Errors
/// When it cannot start, and the errors of `ready`.
pub fn run<S: Store, E: From<Error>>(
    config: Config,
    open: impl AsyncFnOnce() -> Result<S, Error>,
    extra: impl FnOnce(Looks) -> Result<(), Error>,
    ready: impl FnOnce(&Ready) -> Result<(), E>,
) -> Result<(), E> {
    let ground = config.cluster.ground()?;
    let switches = nodes_named(&config.cluster.topology, &config.switches)?;
    let server_tls = config.tls.server()?;
    let number = fresh_seed()?.max(1);
    let hosts = ground.network.hosts();
    let runtime = runtime::multi_thread()?;
    let served = runtime.block_on(async {
        let mut signals = EndSignals::listen()?;
        let store = Arc::new(open().await?);
        let listener = TcpListener::bind(config.listen).await.map_err(|error| {
            Error::because(format_args!("cannot listen on {}", config.listen), &error)
                .hint("choose another address or port with --listen")
        })?;
        let listen = listener.local_addr().map_err(Error::from_cause)?;
        let address = config.address.clone().unwrap_or_else(|| reached_at(listen));
        let candidate = Candidate { number, address: address.clone() };
        let mut notes = Vec::new();
        if server_tls.is_none() && !listen.ip().is_loopback() {
            notes.push("not encrypted: give --tls-cert and --tls-key".to_owned());
        }
        let admission = Admission::with_room(2 * hosts as usize + switches.len());
        let (core, actor) = Core::new(Parts {
            machine: machine_config(number, config.lease),
            cluster: config.cluster,
            ground,
            switches,
            store: Arc::clone(&store),
            candidate: candidate.clone(),
            store_name: config.store.clone(),
            plan_key: config.keys.plan.clone(),
        });
        let door = Door::new(config.keys, &address);
        let hooks = extender::hooks(core.inputs.clone(), fresh_seed()?.max(1));
        extra(Looks { view: core.view.clone(), events: Arc::clone(&core.events), hooks })?;
        ready(&Ready {
            role: "brain",
            listen,
            address,
            store: config.store,
            hosts,
            pid: std::process::id(),
            notes,
        })?;
        let service = BrainServer::new(Service::new(core.handle()));
        let service = InterceptedService::new(service, Check(CheckProof));
        let mut server = server(server_tls)?;
        let served = server
            .add_service(door)
            .add_service(service)
            .serve_with_incoming(admission.accept(listener));
        tokio::select! {
            ended = served => ended.map_err(|error| Error::from_cause(error).into()),
            () = actor => Err(Error::invalid("the brain stopped unexpectedly").into()),
            signal = signals.received() => {
                log::line(format_args!("stopping on {signal}"));
                if let Err(error) = store.resign(&candidate).await {
                    log::line(format_args!("the lease was not given back, it expires: {error}"));
                }
                Ok(())
            }
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

/// Admits callers that have proven to know the token; behind TLS, the admitted caller is inside of
/// what TLS says.
#[derive(Clone)]
struct Check(CheckProof);

impl Interceptor for Check {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some((caller, true)) = handshake::caller(request.extensions()) {
            request.extensions_mut().insert(caller);
        }
        self.0.call(request)
    }
}

/// A gRPC server that notices callers that vanish, and bounds what one connection may do.
fn server(tls: Option<ServerTlsConfig>) -> Result<Server, Error> {
    let server = bounded_server()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT));
    let Some(tls) = tls else { return Ok(server) };
    server.tls_config(tls).map_err(|error| {
        Error::because("the certificate", &error)
            .hint("--tls-cert, --tls-key and --tls-ca take PEM files")
    })
}

/// What the web server, and whoever else only looks, gets.
#[derive(Clone)]
pub struct Looks {
    /// The cluster, whenever it changes.
    pub view: watch::Receiver<Arc<View>>,
    /// What happened.
    pub events: Arc<EventLog>,
    /// Further paths for the web server.
    pub hooks: BTreeMap<String, Hook>,
}

fn machine_config(number: u64, lease: Duration) -> machine::Config {
    let ns = |span: Duration| span.as_nanos() as u64;
    machine::Config {
        holder: number,
        lease_ns: ns(lease),
        claim_every_ns: ns(CLAIM_EVERY),
        resend_ns: ns(RESEND),
        storage_timeout_ns: ns(STORAGE_TIMEOUT),
        snapshot_bytes: SNAPSHOT_BYTES,
        abstraction: Abstraction::Parfait,
        iterations: ITERATIONS,
    }
}
