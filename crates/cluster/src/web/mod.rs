//! The brain's HTTP server: the page, the view and its history as JSON, events, metrics, and paths
//! that others add.
//!
//! | path | what it serves |
//! |---|---|
//! | `/` | the page, one file; it asks for the token itself |
//! | `/healthz` | 200 for a brain that leads or stands by; with `?leading`, only for the leader |
//! | `/api/view` | the [`View`] as JSON; with `If-None-Match`, 304 while it has not changed |
//! | `/api/history?link=N` | what link `N` of the view carried and had reserved in the last ten minutes |
//! | `/api/events` | server-sent events; `Last-Event-ID` resumes |
//! | `/metrics` | the same as OpenMetrics, or as Prometheus' text format |
//! | paths of [`Options::hooks`] | what others answer to a POST: Kubernetes' scheduler asks there |
//!
//! Everything but the page and the health needs the token, if there is one:
//! `Authorization: Bearer TOKEN`, or the basic scheme with the token as password. Nothing here
//! changes the cluster.
//!
//! The server has a thread of its own with a low priority, and reads what the brain publishes: the
//! brain never waits for it. What clients may do is bounded as on every web server of a daemon, by
//! [`service::http`]. A view is written as JSON once per change.

mod answers;
mod counters;
mod events;
mod history;
mod metrics;
mod published;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use service::http;
pub use service::http::Limits;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::view::View;
use counters::Counters;
pub use events::{EventLog, MAX_EVENTS};
use history::History;
pub use history::MAX_BYTES as MAX_HISTORY_BYTES;
use published::Newest;

/// The port where the page is unless told otherwise.
pub const WEB_PORT: u16 = 4796;

/// Largest body of a request.
pub const MAX_BODY_BYTES: usize = 4 << 20;

/// Subscribers to events, and how many of them one address may have.
const MAX_SUBSCRIBERS: usize = 64;
const MAX_SUBSCRIBERS_OF_ADDRESS: usize = 16;

/// Calls of hooks under way.
const MAX_CALLS: usize = 8;

/// A view that has not changed for so long says nothing about what is used now.
const STALE: Duration = Duration::from_secs(5);

/// Steps of the history that are filled at once: all that there are.
const MAX_MISSED: u32 = 600;

/// How much the server's thread gives way to the brain's: the niceness of Linux, for this thread
/// only.
const NICENESS: i32 = 10;

/// Answers a POST: from the body, which is JSON, to the response, which is JSON as well.
pub type Hook = Arc<dyn Fn(&[u8]) -> Result<Vec<u8>, HookError> + Send + Sync>;

/// Why a hook gives no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookError {
    /// What was asked is invalid: status 400.
    #[error("{0}")]
    Invalid(String),
    /// It cannot be answered here or now: status 503.
    #[error("{0}")]
    Unavailable(String),
}

/// What the server shows.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The newest view.
    pub view: watch::Receiver<Arc<View>>,
    /// Events.
    pub events: Arc<EventLog>,
}

/// How the server serves.
#[derive(Clone, Default)]
pub struct Options {
    /// The token; without one, whoever reaches the server may look.
    pub token: Option<String>,
    /// Further paths for POST requests.
    pub hooks: BTreeMap<String, Hook>,
    /// Limits of connections and requests.
    pub limits: Limits,
}

/// What the tasks of the server share.
struct Site {
    http: Arc<http::Server>,
    newest: Newest,
    events: Arc<EventLog>,
    history: Mutex<History>,
    hooks: BTreeMap<String, Hook>,
    seats: Arc<Seats>,
    calls: Arc<Semaphore>,
    counters: Counters,
    nonces: Nonces,
    /// Tells this server from those before it.
    series: u64,
}

impl Site {
    /// What has been counted, by name.
    fn counted(&self) -> BTreeMap<String, u64> {
        self.counters.by_name(self.http.counters())
    }

    fn history(&self) -> MutexGuard<'_, History> {
        // Nothing panics while it is held.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers that the page's script carries, a new one for each response.
#[derive(Debug)]
struct Nonces {
    secret: u64,
    served: AtomicU64,
}

impl Nonces {
    fn next(&self) -> String {
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        // Without random numbers, which no Linux lacks after boot, they are still new each time.
        let random = service::seed::fresh_seed().unwrap_or(self.secret);
        format!("{random:016x}{:016x}", self.secret.wrapping_add(number))
    }
}

/// Subscribers by address.
#[derive(Debug, Default)]
struct Seats(Mutex<BTreeMap<IpAddr, usize>>);

/// The place of a subscriber; dropping it frees the place.
struct Seat(Arc<Seats>, IpAddr);

impl Seats {
    fn take(self: &Arc<Seats>, origin: IpAddr) -> Option<Seat> {
        let mut taken = self.taken();
        let of_address = taken.get(&origin).copied().unwrap_or(0);
        if taken.values().sum::<usize>() >= MAX_SUBSCRIBERS
            || of_address >= MAX_SUBSCRIBERS_OF_ADDRESS
        {
            return None;
        }
        taken.insert(origin, of_address + 1);
        Some(Seat(Arc::clone(self), origin))
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.0.taken();
        match taken.get_mut(&self.1) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(taken.remove(&self.1)),
        }
    }
}

/// A server that runs; dropping it ends it.
pub struct WebServer {
    address: SocketAddr,
    site: Arc<Site>,
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl WebServer {
    /// Serves on `listener`, from a thread of its own.
    ///
    /// # Errors
    /// When descriptors or threads are short.
    pub fn start(
        listener: std::net::TcpListener,
        sources: Sources,
        options: Options,
    ) -> io::Result<WebServer> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = service::runtime::current_thread().map_err(io::Error::other)?;
        let listener = {
            // Callers may be in a runtime of their own.
            let _entered = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let seed = service::seed::fresh_seed().map_err(io::Error::other)?;
        let site = Arc::new(Site {
            http: Arc::new(http::Server::new(options.limits, options.token)),
            newest: Newest::new(sources.view),
            events: sources.events,
            history: Mutex::default(),
            hooks: options.hooks,
            seats: Arc::default(),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            counters: Counters::default(),
            nonces: Nonces { secret: seed, served: AtomicU64::new(0) },
            series: unix_ms(),
        });
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&site);
        let thread = thread::Builder::new().name("dquant-web".into()).spawn(move || {
            // A thread that cannot give way still serves.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
            runtime.block_on(serve(shared, listener, stopped));
            runtime.shutdown_background();
        })?;
        Ok(WebServer { address, site, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it has counted, by name: for [`View::counters`].
    pub fn counters(&self) -> BTreeMap<String, u64> {
        self.site.counted()
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It panicked if this fails, which the panic has reported.
            let _ = thread.join();
        }
    }
}

pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

async fn serve(site: Arc<Site>, listener: TcpListener, stopped: oneshot::Receiver<()>) {
    let shared = Arc::clone(&site);
    let answer = move |client, request| answers::answer(Arc::clone(&shared), client, request);
    tokio::select! {
        _ = stopped => {}
        () = site.http.accept(listener, answer) => {}
        () = sample(&site) => {}
    }
}

/// Takes a sample of all links at each step. Of steps that were missed because the machine had no
/// time, a few get the next sample, and many are gaps.
async fn sample(site: &Site) {
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut last: Option<Instant> = None;
    loop {
        ticks.tick().await;
        let newest = site.newest.get();
        let mut history = site.history();
        let step = history.step();
        let elapsed = last.map_or(step, |last| last.elapsed());
        let steps = ((elapsed + step / 2).as_millis() / step.as_millis()) as u32;
        let is_current = newest.age() < STALE;
        for missed in (1..steps.min(MAX_MISSED)).rev() {
            history.sample(&newest.view, is_current && missed * step < STALE, unix_ms());
        }
        if steps > 0 {
            history.sample(&newest.view, is_current, unix_ms());
            last = Some(last.map_or_else(Instant::now, |last| last + steps * step));
        }
    }
}
