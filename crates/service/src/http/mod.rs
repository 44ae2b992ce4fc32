//! What every web server of a daemon does: who may connect and ask, how long they may take, and
//! what is refused.
//!
//! The connections are those of `places`, the rates those of `rates`. Whatever clients do is
//! bounded: connections, requests per second, bytes of headers and bodies, and the time for each of
//! headers, body and response. Refusals are counted by reason and say what to do. Which paths there
//! are and what they serve is the business of the daemon: it hands [`Server::accept`] a function
//! from a request to its [`Reply`].

mod access;
mod counters;
mod guarded;
mod reply;

use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::places::{self, Acceptor, Admitted, Bounds, NoPlace, Place, Places};
use crate::rates::{PerSecond, Rate, Rates};
use access::Access;
pub use access::is_json;
pub use counters::{Count, Counters};
use guarded::Guarded;
pub use reply::{Body, Refusal, Reply, good, whole};

/// Bytes of the headers of a request, and how many there may be.
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;

/// How long a refused client waits for the refusal, so that a flood costs little.
const REFUSAL_DELAY: Duration = Duration::from_millis(100);

/// What clients may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once, or a quarter of this process's descriptors where that is less; a
    /// quarter of them for one address.
    pub connections: usize,
    /// Requests per second of one address; three times as many at once after a while of silence.
    pub per_client: u32,
    /// Requests per second of all that have no token.
    pub strangers: u32,
    /// Time for the headers of a request, the pause before it included.
    pub header_timeout: Duration,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Time in which a client has to take a response.
    pub response_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 256,
            per_client: 50,
            strangers: 200,
            header_timeout: Duration::from_secs(5),
            body_timeout: Duration::from_secs(10),
            response_timeout: Duration::from_secs(30),
        }
    }
}

/// How the path of a request is guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// By the token, where it needs one, and by how often the address asks.
    Asked,
    /// The same, and it is the health: it has rates of its own.
    Health,
    /// A call of a program: with the token, it is bounded by how many are under way, not by how
    /// often they come.
    Call,
}

/// What the connections of a server share.
#[derive(Debug)]
pub struct Server {
    limits: Limits,
    access: Access,
    places: Arc<Places>,
    rates: Rates,
    counters: Counters,
}

/// A client: its connection.
#[derive(Debug)]
pub struct Client(Place);

impl Client {
    /// What counts as the client's address.
    pub fn origin(&self) -> std::net::IpAddr {
        self.0.origin
    }
}

impl Server {
    /// One that wants `token`; without one, whoever reaches it may ask.
    pub fn new(limits: Limits, token: Option<String>) -> Server {
        let connections = places::within_descriptors(limits.connections, 4);
        let bounds = Bounds { connections, per_address: (connections / 4).max(1) };
        let Limits { per_client, strangers, .. } = limits;
        Server {
            limits,
            access: Access::new(token),
            places: Places::new(bounds),
            rates: Rates::new(PerSecond { per_client, strangers }, Instant::now()),
            counters: Counters::default(),
        }
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether it has a token.
    pub fn needs_token(&self) -> bool {
        self.access.needs_token()
    }

    /// Accepts connections for ever, and answers each request with `answer`.
    pub async fn accept<A, F>(self: &Arc<Server>, listener: TcpListener, answer: A)
    where
        A: Fn(Arc<Client>, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Reply, Refusal>> + Send + 'static,
    {
        let mut acceptor = Acceptor::new(listener, "the web server ");
        loop {
            let (tcp, peer) = acceptor.next(|| self.counters.count(Count::AcceptErrors)).await;
            let admitted = match self.places.admit(peer.ip()) {
                Ok(admitted) => admitted,
                Err(no_place) => {
                    self.counters.count(match no_place {
                        NoPlace::Full => Count::RefusedFull,
                        NoPlace::Address => Count::RefusedAddress,
                    });
                    continue;
                }
            };
            if admitted.displaced {
                self.counters.count(Count::ClosedEvicted);
            }
            self.counters.count(Count::Accepted);
            tokio::spawn(connection(Arc::clone(self), tcp, admitted, answer.clone()));
            // A connection that gave way closes its socket before the next one is accepted.
            tokio::task::yield_now().await;
        }
    }

    /// Whether a request has the token, after its client has been found to ask neither too often
    /// nor for another site.
    ///
    /// # Errors
    /// The refusal. A request without the token is none yet: some paths need none.
    pub async fn check(
        &self,
        client: &Client,
        guard: Guard,
        request: &Request<Incoming>,
    ) -> Result<bool, Refusal> {
        let has_token = self.access.has_token(request);
        if has_token && client.0.activity.is_strange() {
            // It lasts as long as the connection, which does not give way to others any more.
            client.0.activity.begin();
        }
        let rate = match has_token {
            _ if guard == Guard::Health => Rate::Probe,
            true => Rate::User,
            false => Rate::Stranger,
        };
        let is_call = has_token && guard == Guard::Call;
        if !is_call && !self.rates.may_ask(client.origin(), rate, Instant::now()) {
            sleep(REFUSAL_DELAY).await;
            let hint = "ask less often: the limit is per address, and the page asks once a second";
            return Err(Refusal::new(
                Count::RefusedRate,
                StatusCode::TOO_MANY_REQUESTS,
                "too many requests",
                hint,
            ));
        }
        if let Some(count) = self.access.is_foreign(request) {
            let hint = "use the IP address, or start the daemon with a token";
            return Err(Refusal::new(
                count,
                StatusCode::FORBIDDEN,
                "the request may be another site's",
                hint,
            ));
        }
        Ok(has_token)
    }

    /// The body of a request, of at most `most` bytes. A body that is too large is refused with
    /// `hint`.
    ///
    /// # Errors
    /// The refusal.
    pub async fn body(
        &self,
        request: Request<Incoming>,
        most: usize,
        hint: &'static str,
    ) -> Result<Bytes, Refusal> {
        let body = Limited::new(request.into_body(), most);
        let Ok(body) = timeout(self.limits.body_timeout, body.collect()).await else {
            let error = "the body did not arrive in time";
            let status = StatusCode::REQUEST_TIMEOUT;
            return Err(Refusal::new(Count::RefusedSlow, status, error, "try again"));
        };
        body.map(|body| body.to_bytes()).map_err(|_| {
            let error = format!("the body is cut off or larger than {} MiB", most >> 20);
            Refusal::new(Count::RefusedBody, StatusCode::PAYLOAD_TOO_LARGE, error, hint)
        })
    }

    /// The response to a request that was answered so, or refused.
    fn finish(&self, client: &Client, answer: Result<Reply, Refusal>) -> Reply {
        let mut reply = answer.unwrap_or_else(|refusal| {
            self.counters.count(refusal.count);
            if refusal.count == Count::RefusedToken {
                client.0.activity.note_refused();
            }
            refusal.into_reply()
        });
        let ends = client.0.activity.is_refused_too_often();
        if ends {
            self.counters.count(Count::ClosedRefused);
        }
        reply::guard(reply.headers_mut(), ends);
        reply
    }
}

/// Serves one connection to its end.
async fn connection<A, F>(server: Arc<Server>, tcp: TcpStream, admitted: Admitted, answer: A)
where
    A: Fn(Arc<Client>, Request<Incoming>) -> F,
    F: Future<Output = Result<Reply, Refusal>>,
{
    let Admitted { place, evicted, .. } = admitted;
    let patience = server.limits.response_timeout;
    let guarded = TokioIo::new(Guarded::new(tcp, Arc::clone(&place.activity), patience));
    let client = Arc::new(Client(place));
    let asked = AtomicU64::new(0);
    let service = service_fn(|request| {
        asked.fetch_add(1, Ordering::Relaxed);
        server.counters.count(Count::Requests);
        let answer = answer(Arc::clone(&client), request);
        let (server, client) = (&server, &client);
        async move { Ok::<_, std::convert::Infallible>(server.finish(client, answer.await)) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(server.limits.header_timeout);
    http.max_headers(MAX_HEADERS).max_buf_size(MAX_HEADER_BYTES);
    let mut served = pin!(http.serve_connection(guarded, service));
    let ended = tokio::select! {
        ended = &mut served => ended,
        _ = evicted => return,
    };
    if let Err(error) = ended
        && let Some(count) = why_closed(&error, asked.load(Ordering::Relaxed) > 0)
    {
        server.counters.count(count);
    }
}

/// The reason for which a connection ended, unless the client just went.
fn why_closed(error: &hyper::Error, has_asked: bool) -> Option<Count> {
    let cause =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    if cause.is_some_and(|cause| cause.kind() == ErrorKind::TimedOut) {
        return Some(Count::ClosedResponse);
    }
    if error.is_timeout() {
        return Some(if has_asked { Count::ClosedIdle } else { Count::ClosedHeaders });
    }
    error.is_parse().then_some(Count::ClosedMalformed)
}
