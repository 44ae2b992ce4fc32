//! Calls to whichever brain leads.
//!
//! A [`Client`] knows several brains and finds the leader among them: one that does not lead says
//! who does. Requests that change something have a number, so that asking again, also another
//! brain, executes them once.
//!
//! Nothing is asked on a connection before its other end has proven that it knows the token
//! ([`crate::handshake`]).

use std::error::Error as _;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use parfait::log::Refused;
use service::address::{check_port, with_port};
use service::error::Error;
use service::error::root_cause;
use service::seed::fresh_seed;
use service::tls::{Failure, Files};
use tokio::net::TcpStream;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Response, Status};
use tower::service_fn;

use crate::brain::{BRAIN_PORT, LEADER_ENTRY};
use crate::convert;
use crate::handshake::{Unproven, prove};
use crate::keys::Keys;
use crate::proto;
use crate::proto::brain_client::BrainClient;
use crate::tls;
use crate::view::View;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a brain may take to prove that it is one.
const PROOF_TIMEOUT: Duration = Duration::from_secs(2);

/// How long one brain may take to answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The first pause between questions that nobody answered, and the longest: each is twice the one
/// before. A new leader is found at most the longest one late.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// The same for streams of events that end soon after they began.
const FIRST_STREAM_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_STREAM_PAUSE: Duration = Duration::from_secs(5);

/// A stream of events that lasted so long was a good one.
const LASTING: Duration = Duration::from_secs(10);

/// How long a client looks for a leader: longer than a change of the leader takes.
pub const PATIENCE: Duration = Duration::from_secs(8);

/// Largest answer: a view of 100,000 hosts.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// A brain's stub.
pub type Stub = BrainClient<Channel>;

/// Who the brains are, and how they are spoken to.
#[derive(Clone, Debug)]
pub struct Brains {
    /// `HOST:PORT` of each.
    pub addresses: Vec<String>,
    /// What follows from the cluster's token.
    pub keys: Keys,
    tls: Option<ClientTlsConfig>,
}

impl Brains {
    /// Brains by their addresses, with the default port where none is named.
    ///
    /// # Errors
    /// When there are none, an address is none, or a certificate cannot be read.
    pub fn new(addresses: &[String], token: &str, tls: &Files) -> Result<Brains, Error> {
        if addresses.is_empty() {
            return Err(
                Error::invalid("no brain is named").hint("--brain HOST[:PORT],... or DQUANT_BRAIN")
            );
        }
        for address in addresses {
            check_port(address)?;
        }
        let addresses = addresses.iter().map(|address| with_port(address, BRAIN_PORT)).collect();
        Ok(Brains { addresses, keys: Keys::of_token(token), tls: tls.client()? })
    }

    /// Connects to one of them, and lets both sides prove that they know the token.
    ///
    /// A stub whose connection has ended makes no other one, which would have proven nothing.
    ///
    /// # Errors
    /// When the address is none, nobody answers, or who answers is no brain of this cluster.
    pub async fn connect(&self, address: &str) -> Result<Stub, Error> {
        self.greet(address, self.dial(address).await?).await
    }

    /// Lets both ends of a connection prove that they know the token.
    pub(crate) async fn greet(&self, address: &str, dialed: Dialed) -> Result<Stub, Error> {
        let Dialed { channel, reached } = dialed;
        let to = reached.filter(|_| self.tls.is_none());
        let proven = prove(channel.clone(), &self.keys, to);
        let impostor = |why: &str| {
            Error::unreachable(format!("brain {address}: who listens there {why}"))
                .hint("it was told nothing: look who listens at that address, and whether --brain names a brain of this cluster and version")
        };
        match tokio::time::timeout(PROOF_TIMEOUT, proven).await {
            Ok(Ok(())) => {}
            Ok(Err(Unproven::Refused(status))) => return Err(refusal(address, &status)),
            Ok(Err(Unproven::Impostor(why))) => return Err(impostor(why)),
            Ok(Err(Unproven::Failed(error))) => return Err(error),
            Err(_) => return Err(impostor("says nothing: it is a brain that is stopped, or none")),
        }
        Ok(BrainClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES))
    }

    /// Makes a connection, of whose other end nothing is known yet.
    pub(crate) async fn dial(&self, address: &str) -> Result<Dialed, Error> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(|_| Error::invalid(format!("{address:?} is not a HOST[:PORT]")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(Duration::from_secs(2))
            .keep_alive_timeout(Duration::from_secs(3))
            .keep_alive_while_idle(true);
        let endpoint = match &self.tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(Error::from_cause)?,
            None => endpoint,
        };
        let reached: Arc<OnceLock<SocketAddr>> = Arc::default();
        let (to, seen) = (address.to_owned(), Arc::clone(&reached));
        let mut is_made = false;
        let once = service_fn(move |_| {
            let is_again = std::mem::replace(&mut is_made, true);
            let (to, seen) = (to.clone(), Arc::clone(&seen));
            async move {
                if is_again {
                    return Err(io::Error::other("the connection has ended"));
                }
                let tcp = TcpStream::connect(to).await?;
                // A socket that refuses is only slower.
                let _ = tcp.set_nodelay(true);
                let _ = seen.set(tcp.peer_addr()?);
                Ok(TokioIo::new(tcp))
            }
        });
        let channel = endpoint.connect_with_connector(once).await;
        let channel = channel.map_err(|error| self.not_reached(address, &error))?;
        Ok(Dialed { channel, reached: reached.get().copied() })
    }

    /// Why there is no connection.
    fn not_reached(&self, address: &str, error: &tonic::transport::Error) -> Error {
        let cause = root_cause(error);
        let text = format!("brain {address}: {cause}");
        match Failure::of(&cause).map(tls::hint) {
            // It does not pass by itself. Another brain may have a certificate that is right.
            Some(hint) if self.addresses.len() > 1 => Error::unreachable(text).hint(hint),
            Some(hint) => Error::invalid(text).hint(hint),
            None if cause.starts_with("failed to lookup address") => Error::unreachable(text)
                .hint("name a machine in --brain that this one can resolve, or give its address"),
            None => Error::unreachable(text).hint(format!(
                "is `dquant brain` running there? start it with --listen {address}, and let firewalls pass the port"
            )),
        }
    }
}

/// A connection, and the address that it has reached.
#[derive(Debug)]
pub(crate) struct Dialed {
    channel: Channel,
    reached: Option<SocketAddr>,
}

/// The leader that a refusal names.
pub fn named_leader(status: &Status) -> Option<String> {
    Some(status.metadata().get(LEADER_ENTRY)?.to_str().ok()?.to_owned())
}

/// Whether another brain may answer what this one did not.
fn is_elsewhere(code: Code) -> bool {
    matches!(
        code,
        Code::FailedPrecondition
            | Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Unknown
            | Code::ResourceExhausted
    )
}

/// Pauses of which each is twice the one before, up to a bound.
#[derive(Debug)]
struct Pauses {
    first: Duration,
    longest: Duration,
    taken: u32,
}

impl Pauses {
    fn new(first: Duration, longest: Duration) -> Pauses {
        Pauses { first, longest, taken: 0 }
    }

    fn next(&mut self) -> Duration {
        let pause = self.first.saturating_mul(1 << self.taken.min(16)).min(self.longest);
        self.taken = self.taken.saturating_add(1);
        pause
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Client {
    brains: Brains,
    leader: Option<(String, Stub)>,
    next: usize,
    number: u64,
    sequence: u64,
    patience: Duration,
}

impl Client {
    /// One that has asked nothing yet.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new(brains: Brains) -> Result<Client, Error> {
        let number = fresh_seed()?.max(1);
        Ok(Client { brains, leader: None, next: 0, number, sequence: 0, patience: PATIENCE })
    }

    /// How long it looks for a leader.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Client {
        self.patience = patience;
        self
    }

    /// Where the leader was found last.
    pub fn leader(&self) -> Option<&str> {
        self.leader.as_ref().map(|(address, _)| address.as_str())
    }

    fn identity(&mut self) -> Option<proto::Client> {
        self.sequence += 1;
        Some(proto::Client { number: self.number, sequence: self.sequence })
    }

    async fn stub(&mut self) -> Result<(String, Stub), Error> {
        if let Some(leader) = &self.leader {
            return Ok(leader.clone());
        }
        let address = self.brains.addresses[self.next % self.brains.addresses.len()].clone();
        self.next += 1;
        let stub = self.brains.connect(&address).await?;
        self.leader = Some((address.clone(), stub.clone()));
        Ok((address, stub))
    }

    /// Asks until a brain answers, or for as long as this client's patience lasts.
    async fn ask<R>(
        &mut self,
        mut call: impl AsyncFnMut(Stub) -> Result<Response<R>, Status>,
    ) -> Result<R, Error> {
        let begun = Instant::now();
        let mut pauses = Pauses::new(FIRST_PAUSE, LONGEST_PAUSE);
        // Brains that each name the other are asked no faster than others.
        let mut was_sent_on = false;
        loop {
            let asked = async {
                let (address, stub) = self.stub().await?;
                let status = match tokio::time::timeout(CALL_TIMEOUT, call(stub)).await {
                    Ok(Ok(answer)) => return Ok(answer.into_inner()),
                    Ok(Err(status)) => status,
                    Err(_) => Status::deadline_exceeded("no answer in time"),
                };
                self.leader = None;
                if let Some(leader) = named_leader(&status).filter(|leader| *leader != address)
                    && let Ok(stub) = self.brains.connect(&leader).await
                {
                    self.leader = Some((leader, stub));
                }
                Err(refusal(&address, &status))
            };
            let error: Error = match asked.await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let left = self.patience.saturating_sub(begun.elapsed());
            if !error.is_transient() || left.is_zero() {
                return Err(error);
            }
            was_sent_on = self.leader.is_some() && !was_sent_on;
            if !was_sent_on {
                tokio::time::sleep(pauses.next().min(left)).await;
            }
        }
    }

    /// Submits a job; `Err` in the answer is the brain's reason for a refusal.
    ///
    /// # Errors
    /// When no brain leads, or the request is malformed.
    pub async fn submit(
        &mut self,
        name: &str,
        owner: &str,
        job: &str,
        unchanged_since: Option<u64>,
    ) -> Result<Result<u64, Refused>, Error> {
        let (name, owner, job) = (name.to_owned(), owner.to_owned(), job.to_owned());
        let client = self.identity();
        let request = proto::SubmitRequest { client, name, owner, job, unchanged_since };
        let reply = self.ask(async |mut stub| stub.submit(request.clone()).await).await?;
        use proto::submit_reply::Result;
        match reply.result {
            Some(Result::Admitted(proto::Admitted { job })) => Ok(Ok(job)),
            Some(Result::Refused(text)) => Ok(Err(convert::refused(reply.reason, text))),
            None => Err(Error::invalid("the brain's answer is empty")),
        }
    }

    /// Gives back what a job has; by name, or by number where the name is empty. Who got its
    /// guarantee back by that is in the answer.
    ///
    /// # Errors
    /// As [`submit`](Client::submit).
    pub async fn release(
        &mut self,
        job: u64,
        name: &str,
        owner: &str,
    ) -> Result<Result<proto::Released, Refused>, Error> {
        let (name, owner) = (name.to_owned(), owner.to_owned());
        let request = proto::ReleaseRequest { client: self.identity(), job, name, owner };
        let reply = self.ask(async |mut stub| stub.release(request.clone()).await).await?;
        use proto::release_reply::Result;
        match reply.result {
            Some(Result::Released(released)) => Ok(Ok(released)),
            Some(Result::Refused(text)) => Ok(Err(convert::refused(reply.reason, text))),
            None => Err(Error::invalid("the brain's answer is empty")),
        }
    }

    /// Says that parts of the network are down, or back.
    ///
    /// # Errors
    /// As [`submit`](Client::submit).
    pub async fn outage(
        &mut self,
        parts: &[String],
        is_down: bool,
        most_moved: u32,
    ) -> Result<Result<proto::Repaired, Refused>, Error> {
        let (client, parts) = (self.identity(), parts.to_vec());
        let request = proto::OutageRequest { client, parts, is_down, most_moved };
        repaired(self.ask(async |mut stub| stub.outage(request.clone()).await).await?)
    }

    /// Moves jobs so that there is more room for those to come.
    ///
    /// # Errors
    /// As [`submit`](Client::submit).
    pub async fn defragment(
        &mut self,
        most_moved: u32,
    ) -> Result<Result<proto::Repaired, Refused>, Error> {
        let request = proto::DefragmentRequest { client: self.identity(), most_moved };
        repaired(self.ask(async |mut stub| stub.defragment(request).await).await?)
    }

    /// Where a job would go now, and the entry since which that holds.
    ///
    /// # Errors
    /// As [`submit`](Client::submit).
    pub async fn place(
        &mut self,
        name: &str,
        owner: &str,
        job: &str,
    ) -> Result<(Result<proto::Held, Refused>, u64), Error> {
        let (name, owner, job) = (name.to_owned(), owner.to_owned(), job.to_owned());
        let request = proto::PlaceRequest { name, owner, job };
        let reply = self.ask(async |mut stub| stub.place(request.clone()).await).await?;
        use proto::place_reply::Result;
        let placed = match reply.result {
            Some(Result::Held(held)) => Ok(held),
            Some(Result::Refused(text)) => Err(convert::refused(reply.reason, text)),
            None => return Err(Error::invalid("the brain's answer is empty")),
        };
        Ok((placed, reply.unchanged_since))
    }

    /// The cluster as its leader knows it.
    ///
    /// # Errors
    /// When no brain leads, or its answer is of another version.
    pub async fn view(&mut self) -> Result<View, Error> {
        let request = proto::ViewRequest { any_brain: false };
        let reply = self.ask(async |mut stub| stub.view(request).await).await?;
        serde_json::from_slice(&reply.json).map_err(|error| {
            Error::because("the brain's answer", &error).hint("is it of the same version?")
        })
    }

    /// The topology, and all admitted jobs.
    ///
    /// # Errors
    /// When no brain leads.
    pub async fn topology(&mut self) -> Result<proto::TopologyReply, Error> {
        self.ask(async |mut stub| stub.topology(proto::TopologyRequest {}).await).await
    }

    /// What happens from now on, or after an event.
    ///
    /// # Errors
    /// When no brain leads.
    pub async fn events(&mut self, after: u64) -> Result<EventStream, Error> {
        let request = proto::EventsRequest { after };
        Ok(EventStream(self.ask(async |mut stub| stub.events(request).await).await?))
    }
}

/// Events of one leader.
#[derive(Debug)]
pub struct EventStream(tonic::Streaming<proto::Event>);

impl EventStream {
    /// The next one; `None` once the leader is gone.
    ///
    /// # Errors
    /// When this subscriber was too slow and missed some.
    pub async fn next(&mut self) -> Result<Option<proto::Event>, Error> {
        match self.0.message().await {
            Ok(event) => Ok(event),
            Err(status) if status.code() == Code::DataLoss => Err(Error::invalid(status.message())),
            Err(_) => Ok(None),
        }
    }
}

/// Events of whichever brain leads: once a leader is gone, its successor is asked.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    stream: Option<(EventStream, Instant)>,
    pauses: Pauses,
}

impl Watch {
    /// One that has not subscribed yet.
    pub fn new(client: Client) -> Watch {
        let pauses = Pauses::new(FIRST_STREAM_PAUSE, LONGEST_STREAM_PAUSE);
        Watch { client, stream: None, pauses }
    }

    /// The next event. Brains whose streams end at once are asked less and less often.
    ///
    /// # Errors
    /// When no brain leads, or this subscriber was too slow and missed some.
    pub async fn next(&mut self) -> Result<proto::Event, Error> {
        loop {
            let (mut stream, begun) = match self.stream.take() {
                Some(stream) => stream,
                None => (self.client.events(0).await?, Instant::now()),
            };
            if let Some(event) = stream.next().await? {
                self.stream = Some((stream, begun));
                return Ok(event);
            }
            if begun.elapsed() >= LASTING {
                self.pauses.taken = 0;
            }
            tokio::time::sleep(self.pauses.next()).await;
        }
    }
}

fn repaired(reply: proto::RepairReply) -> Result<Result<proto::Repaired, Refused>, Error> {
    use proto::repair_reply::Result;
    match reply.result {
        Some(Result::Repaired(repaired)) => Ok(Ok(repaired)),
        Some(Result::Refused(text)) => Ok(Err(convert::refused(reply.reason, text))),
        None => Err(Error::invalid("the brain's answer is empty")),
    }
}

/// A brain's refusal as an error of ours. Its hint is behind a line break.
pub(crate) fn refusal(address: &str, status: &Status) -> Error {
    // What failed below a call is in its causes: its own message is "transport error" then.
    let text = match status.source() {
        Some(_) => tls::said_plainly(root_cause(status)),
        None => status.message().to_owned(),
    };
    let (message, hint) = match text.split_once('\n') {
        Some((message, hint)) => (message, Some(hint.to_owned())),
        None => (&*text, None),
    };
    let text = format!("brain {address}: {message}");
    // Of failures below a call, not of what a brain says.
    let about_tls = status.source().and_then(|_| Failure::of(&text)).map(tls::hint);
    let hint = hint.or_else(|| match status.code() {
        Code::Unauthenticated => {
            Some("give the cluster's token with --token-file or DQUANT_TOKEN".to_owned())
        }
        Code::FailedPrecondition => {
            Some("`dquant brain` of another machine may lead: name it with --brain".to_owned())
        }
        // A server of TLS closes connections that do not begin with TLS, with a message that says
        // nothing.
        _ if status.source().is_some() => Some(about_tls.unwrap_or(tls::SPEAKS_TLS).to_owned()),
        _ => None,
    });
    // A certificate that is refused is refused again.
    let error = match is_elsewhere(status.code()) && about_tls.is_none() {
        true => Error::unreachable(text),
        false => Error::invalid(text),
    };
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use service::admission::Admission;
    use service::auth::{AddToken, CheckProof};
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
    use tonic::service::interceptor::InterceptedService;
    use tonic::transport::Server;
    use tonic::{Request, Streaming};

    use super::*;
    use crate::handshake::Door;
    use crate::proto::Serialised;
    use crate::proto::brain_server::{Brain, BrainServer};

    const TOKEN: &str = "a-token-of-ours";

    /// A brain that never leads and names another one, or whose streams of events end at once.
    struct Odd {
        named: Option<String>,
        calls: Arc<AtomicUsize>,
    }

    impl Odd {
        fn refusal<T>(&self) -> Result<Response<T>, Status> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            let mut status = Status::failed_precondition("this brain does not lead");
            if let Some(named) = &self.named {
                let named = named.parse().expect("an address");
                status.metadata_mut().insert(LEADER_ENTRY, named);
            }
            Err(status)
        }
    }

    type Answer<T> = Result<Response<T>, Status>;

    #[tonic::async_trait]
    impl Brain for Odd {
        type EventsStream = ReceiverStream<Result<proto::Event, Status>>;
        type AttachStream = ReceiverStream<Result<proto::Command, Status>>;

        async fn submit(&self, _: Request<proto::SubmitRequest>) -> Answer<proto::SubmitReply> {
            self.refusal()
        }

        async fn place(&self, _: Request<proto::PlaceRequest>) -> Answer<proto::PlaceReply> {
            self.refusal()
        }

        async fn release(&self, _: Request<proto::ReleaseRequest>) -> Answer<proto::ReleaseReply> {
            self.refusal()
        }

        async fn outage(&self, _: Request<proto::OutageRequest>) -> Answer<proto::RepairReply> {
            self.refusal()
        }

        async fn defragment(
            &self,
            _: Request<proto::DefragmentRequest>,
        ) -> Answer<proto::RepairReply> {
            self.refusal()
        }

        async fn view(&self, _: Request<proto::ViewRequest>) -> Answer<Serialised> {
            self.refusal()
        }

        async fn topology(&self, _: Request<proto::TopologyRequest>) -> Answer<Serialised> {
            self.refusal()
        }

        async fn events(&self, _: Request<proto::EventsRequest>) -> Answer<Self::EventsStream> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            let (_, receiver) = tokio::sync::mpsc::channel(1);
            Ok(Response::new(ReceiverStream::new(receiver)))
        }

        async fn attach(
            &self,
            _: Request<Streaming<proto::AgentMessage>>,
        ) -> Answer<Self::AttachStream> {
            self.refusal()
        }
    }

    /// Serves an odd brain; the counter counts what it was asked.
    fn serve(listener: TcpListener, named: Option<String>, calls: &Arc<AtomicUsize>) {
        let brain = BrainServer::new(Odd { named, calls: Arc::clone(calls) });
        let brain = InterceptedService::new(brain, CheckProof);
        let door = Door::new(Keys::of_token(TOKEN), "");
        let incoming = Admission::new().accept(listener);
        let server = Server::builder().add_service(door).add_service(brain);
        tokio::spawn(server.serve_with_incoming(incoming));
    }

    async fn listen() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
        let address = listener.local_addr().expect("it is bound").to_string();
        (listener, address)
    }

    fn client(address: &str) -> Client {
        Client::new(brains(address, TOKEN)).expect("random numbers")
    }

    #[test]
    fn pauses_double_up_to_their_bound() {
        let mut pauses = Pauses::new(FIRST_PAUSE, LONGEST_PAUSE);
        let taken = [pauses.next(), pauses.next(), pauses.next(), pauses.next()];
        assert_eq!(taken, [1, 2, 4, 4].map(|times| FIRST_PAUSE * times));
        for _ in 0..100 {
            assert_eq!(pauses.next(), LONGEST_PAUSE);
        }
    }

    #[tokio::test]
    async fn brains_that_each_name_the_other_are_not_asked_without_a_pause() {
        let ((one, first), (other, second)) = (listen().await, listen().await);
        let calls = Arc::default();
        serve(one, Some(second), &calls);
        serve(other, Some(first.clone()), &calls);
        let begun = Instant::now();
        let patience = Duration::from_millis(1500);
        let refused = client(&first).patience(patience).view().await.expect_err("nobody leads");
        assert!(refused.is_transient(), "{refused}");
        assert!(begun.elapsed() >= patience, "it looks for a leader that long");
        // Pauses of 0.1, 0.2 and then 0.4 s, with one more question before each.
        let calls = calls.load(Ordering::Relaxed);
        assert!((4..=14).contains(&calls), "asked {calls} times");
    }

    #[tokio::test]
    async fn streams_that_end_at_once_are_subscribed_to_ever_less_often() {
        let (listener, address) = listen().await;
        let calls = Arc::default();
        serve(listener, None, &calls);
        let mut watch = Watch::new(client(&address));
        let waited = tokio::time::timeout(Duration::from_millis(1200), watch.next()).await;
        assert!(waited.is_err(), "there is no event");
        // At 0, 0.1, 0.3, 0.7 and 1.5 s.
        let calls = calls.load(Ordering::Relaxed);
        assert!((2..=4).contains(&calls), "asked {calls} times");
    }

    #[tokio::test]
    async fn a_call_before_the_handshake_does_not_reach_the_brain() {
        let (listener, address) = listen().await;
        let calls = Arc::default();
        serve(listener, None, &calls);
        let channel = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let channel = channel.connect().await.expect("it listens");
        let mut bare = BrainClient::new(channel.clone());
        let refused = bare.view(proto::ViewRequest::default()).await.expect_err("a stranger");
        assert_eq!(refused.code(), Code::Unauthenticated);
        assert!(refused.message().contains("has not proven"), "{refused}");
        // As callers of older versions do.
        let mut old = BrainClient::with_interceptor(channel, AddToken::new(TOKEN));
        let refused =
            old.view(proto::ViewRequest::default()).await.expect_err("it sends the token");
        assert_eq!(refused.code(), Code::Unauthenticated);
        assert!(refused.message().contains("use a program of the daemon's version"), "{refused}");
        assert_eq!(calls.load(Ordering::Relaxed), 0);
    }

    /// Passes one connection after another on to another address, until it is aborted.
    fn relay(listener: TcpListener, to: String) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move {
            while let Ok((mut from, _)) = listener.accept().await {
                let mut to = TcpStream::connect(&to).await.expect("it listens");
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            }
        })
    }

    fn brains(address: &str, token: &str) -> Brains {
        Brains::new(&[address.to_owned()], token, &Files::default()).expect("an address")
    }

    #[tokio::test]
    async fn a_stub_whose_connection_has_ended_calls_nobody_who_came_after() {
        let ((listener, behind), (front, address)) = (listen().await, listen().await);
        let (calls, strangers) = (Arc::default(), Arc::default());
        let brain = BrainServer::new(Odd { named: None, calls: Arc::clone(&calls) });
        let brain = InterceptedService::new(brain, CheckProof);
        let door = Door::new(Keys::of_token(TOKEN), &address);
        let server = Server::builder().add_service(door).add_service(brain);
        tokio::spawn(server.serve_with_incoming(Admission::new().accept(listener)));
        let front = relay(front, behind);
        let brains = brains(&address, TOKEN);
        let mut stub = brains.connect(&address).await.expect("it is a brain");
        let refused = stub.view(proto::ViewRequest::default()).await.expect_err("it never leads");
        assert_eq!((refused.code(), calls.load(Ordering::Relaxed)), (Code::FailedPrecondition, 1));

        // The brain is gone, and a stranger has its address.
        front.abort();
        let _ = front.await;
        let stranger = TcpListener::bind(&address).await.expect("it is free");
        let odd = BrainServer::new(Odd { named: None, calls: Arc::clone(&strangers) });
        let stranger = TcpListenerStream::new(stranger);
        tokio::spawn(Server::builder().add_service(odd).serve_with_incoming(stranger));
        for _ in 0..3 {
            let ended = stub.view(proto::ViewRequest::default()).await.expect_err("it has ended");
            assert_ne!(ended.code(), Code::FailedPrecondition, "a stranger answered");
        }
        let refused = brains.connect(&address).await.expect_err("a stranger");
        assert!(
            refused.to_string().contains("does not prove that it knows the token"),
            "{refused}"
        );
        assert!(refused.is_transient(), "the brain may come back");
        assert_eq!(strangers.load(Ordering::Relaxed), 0, "it was asked nothing");
    }

    #[tokio::test]
    async fn a_connection_that_somebody_passes_on_to_a_brain_is_refused() {
        let ((listener, behind), (front, address)) = (listen().await, listen().await);
        let calls = Arc::default();
        serve(listener, None, &calls);
        relay(front, behind.clone());
        let refused = brains(&address, TOKEN).connect(&address).await.expect_err("passed on");
        let (text, hint) = refused.parts();
        assert!(
            text.contains(&format!("is 'tcp {address}' and arrives as 'tcp {behind}'")),
            "{text}"
        );
        assert!(hint.is_some_and(|hint| hint.contains("--advertise")));
        brains(&behind, TOKEN).connect(&behind).await.expect("its own address");
    }

    #[tokio::test]
    async fn a_caller_and_a_brain_with_other_tokens_refuse_each_other() {
        let (listener, address) = listen().await;
        serve(listener, None, &Arc::default());
        let refused = brains(&address, "a-token-of-theirs").connect(&address).await;
        let (text, hint) = refused.expect_err("another token").parts();
        assert!(text.contains("the token is not the one this daemon was started with"), "{text}");
        assert!(hint.is_some_and(|hint| hint.contains("--token-file")));
    }
}
