//! Calls to whichever brain leads.
//!
//! A [`Client`] knows several brains and finds the leader among them: one that does not lead says who does. Requests that
//! change something have a number, so that asking again, also another brain, executes them once.

use std::error::Error as _;
use std::time::{Duration, Instant};

use engine::control::auth::AddToken;
use engine::control::peer::{check_port, root_cause, with_port};
use engine::error::Error;
use engine::seed::fresh_seed;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Response, Status};

use crate::brain::{BRAIN_PORT, LEADER_ENTRY};
use crate::proto;
use crate::proto::brain_client::BrainClient;
use crate::tls;
use crate::view::View;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long one brain may take to answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Between rounds through all brains.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a client looks for a leader: longer than a change of the leader takes.
pub const PATIENCE: Duration = Duration::from_secs(8);

/// Largest answer: a view of 100,000 hosts.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// A brain's stub.
pub type Stub = BrainClient<InterceptedService<Channel, AddToken>>;

/// Who the brains are, and how they are spoken to.
#[derive(Clone, Debug)]
pub struct Brains {
    /// `HOST:PORT` of each.
    pub addresses: Vec<String>,
    /// The cluster's token.
    pub token: String,
    tls: Option<ClientTlsConfig>,
}

impl Brains {
    /// Brains by their addresses, with the default port where none is named.
    ///
    /// # Errors
    /// When there are none, an address is none, or a certificate cannot be read.
    pub fn new(addresses: &[String], token: &str, tls: &tls::Files) -> Result<Brains, Error> {
        if addresses.is_empty() {
            return Err(
                Error::invalid("no brain is named").hint("--brain HOST[:PORT],... or DQUANT_BRAIN")
            );
        }
        for address in addresses {
            check_port(address)?;
        }
        let addresses = addresses.iter().map(|address| with_port(address, BRAIN_PORT)).collect();
        Ok(Brains { addresses, token: token.to_owned(), tls: tls.client()? })
    }

    /// Connects to one of them.
    ///
    /// # Errors
    /// When the address is none, or nobody answers.
    pub async fn connect(&self, address: &str) -> Result<Stub, Error> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(|_| Error::invalid(format!("{address:?} is not a HOST[:PORT]")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(2))
            .keep_alive_timeout(Duration::from_secs(3))
            .keep_alive_while_idle(true);
        let endpoint = match &self.tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(Error::from_cause)?,
            None => endpoint,
        };
        let channel = endpoint.connect().await.map_err(|error| {
            Error::unreachable(format!("brain {address}: {}", root_cause(&error)))
                .hint(format!("is `dquant brain` running there? start it with --listen {address}"))
        })?;
        let stub = BrainClient::with_interceptor(channel, AddToken::new(&self.token));
        Ok(stub.max_decoding_message_size(MAX_ANSWER_BYTES))
    }
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
            if !error.is_transient() || begun.elapsed() >= self.patience {
                return Err(error);
            }
            if self.leader.is_none() {
                tokio::time::sleep(PAUSE).await;
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
    ) -> Result<Result<u64, String>, Error> {
        let (name, owner, job) = (name.to_owned(), owner.to_owned(), job.to_owned());
        let client = self.identity();
        let request = proto::SubmitRequest { client, name, owner, job, unchanged_since };
        let reply = self.ask(async |mut stub| stub.submit(request.clone()).await).await?;
        use proto::submit_reply::Result;
        match reply.result {
            Some(Result::Admitted(proto::Admitted { job })) => Ok(Ok(job)),
            Some(Result::Refused(reason)) => Ok(Err(reason)),
            None => Err(Error::invalid("the brain's answer is empty")),
        }
    }

    /// Gives back what a job has; by name, or by number where the name is empty. Who got its guarantee back by that is in the
    /// answer.
    ///
    /// # Errors
    /// As [`submit`](Client::submit).
    pub async fn release(
        &mut self,
        job: u64,
        name: &str,
        owner: &str,
    ) -> Result<Result<proto::Released, String>, Error> {
        let (name, owner) = (name.to_owned(), owner.to_owned());
        let request = proto::ReleaseRequest { client: self.identity(), job, name, owner };
        let reply = self.ask(async |mut stub| stub.release(request.clone()).await).await?;
        use proto::release_reply::Result;
        match reply.result {
            Some(Result::Released(released)) => Ok(Ok(released)),
            Some(Result::Refused(reason)) => Ok(Err(reason)),
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
    ) -> Result<Result<proto::Repaired, String>, Error> {
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
    ) -> Result<Result<proto::Repaired, String>, Error> {
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
    ) -> Result<(Result<proto::Held, String>, u64), Error> {
        let (name, owner, job) = (name.to_owned(), owner.to_owned(), job.to_owned());
        let request = proto::PlaceRequest { name, owner, job };
        let reply = self.ask(async |mut stub| stub.place(request.clone()).await).await?;
        use proto::place_reply::Result;
        let placed = match reply.result {
            Some(Result::Held(held)) => Ok(held),
            Some(Result::Refused(reason)) => Err(reason),
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

fn repaired(reply: proto::RepairReply) -> Result<Result<proto::Repaired, String>, Error> {
    use proto::repair_reply::Result;
    match reply.result {
        Some(Result::Repaired(repaired)) => Ok(Ok(repaired)),
        Some(Result::Refused(reason)) => Ok(Err(reason)),
        None => Err(Error::invalid("the brain's answer is empty")),
    }
}

/// A brain's refusal as an error of ours. Its hint is behind a line break.
fn refusal(address: &str, status: &Status) -> Error {
    // What failed below a call is in its causes: its own message is "transport error" then.
    let text = match status.source() {
        Some(_) => root_cause(status),
        None => status.message().to_owned(),
    };
    let (message, hint) = match text.split_once('\n') {
        Some((message, hint)) => (message, Some(hint.to_owned())),
        None => (&*text, None),
    };
    let text = format!("brain {address}: {message}");
    let hint = hint.or_else(|| match status.code() {
        Code::Unauthenticated => {
            Some("give the cluster's token with --token-file or DQUANT_TOKEN".to_owned())
        }
        Code::FailedPrecondition => {
            Some("`dquant brain` of another machine may lead: name it with --brain".to_owned())
        }
        _ if status.source().is_some() => Some(
            "if the brain speaks TLS, give --tls-ca, and --tls-cert and --tls-key if it asks for certificates"
                .to_owned(),
        ),
        _ => None,
    });
    let error = match is_elsewhere(status.code()) {
        true => Error::unreachable(text),
        false => Error::invalid(text),
    };
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}
