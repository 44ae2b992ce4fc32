//! Requests to the members of an etcd cluster.
//!
//! A request goes to the member that answered last. One that does not answer within its time, or
//! cannot, is sent to the next member, until the call's time is over. So a request can be carried
//! out twice, and one that failed can still be: what is written must allow for both.

use std::future::Future;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parfait::brain::StorageError;
use tokio::time;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use super::rpc::auth_client::AuthClient;
use super::rpc::kv_client::KvClient;
use super::rpc::lease_client::LeaseClient;
use super::rpc::{
    AuthenticateRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest,
    RangeRequest, RangeResponse, TxnRequest, TxnResponse,
};
use super::{Config, User};
use crate::store::{Failure, SetupError, Tally, lock};

/// Longest answer: a page of the log.
const MAX_ANSWER_BYTES: usize = 128 << 20;

/// Members close connections that ask more than once in 5 s whether they are alive.
const ALIVE_EVERY: Duration = Duration::from_secs(10);

/// Before all members are asked again.
const PAUSE: Duration = Duration::from_millis(20);

/// The members, and who asks them.
#[derive(Debug)]
pub(super) struct Client {
    members: Vec<Channel>,
    /// The member that is asked.
    current: AtomicUsize,
    request_timeout: Duration,
    user: Option<User>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
}

impl Client {
    /// Connects when the first request is made, so it can be made before any member runs.
    pub(super) fn new(config: &Config) -> Result<Client, SetupError> {
        if config.endpoints.is_empty() {
            let reason = "no member is named".to_string();
            return Err(SetupError::Endpoint { endpoint: String::new(), reason });
        }
        let members = config.endpoints.iter().map(|endpoint| channel(endpoint, config));
        Ok(Client {
            members: members.collect::<Result<_, _>>()?,
            current: AtomicUsize::new(0),
            request_timeout: config.request_timeout,
            user: config.user.clone(),
            token: Mutex::default(),
        })
    }

    pub(super) async fn range(
        &self,
        call: Call<'_>,
        request: RangeRequest,
    ) -> Result<RangeResponse, Failure> {
        self.ask(call, request, |channel, request| async move { kv(channel).range(request).await })
            .await
    }

    pub(super) async fn txn(
        &self,
        call: Call<'_>,
        request: TxnRequest,
    ) -> Result<TxnResponse, Failure> {
        self.ask(call, request, |channel, request| async move { kv(channel).txn(request).await })
            .await
    }

    /// A new lease.
    pub(super) async fn grant(&self, call: Call<'_>, ttl_s: i64) -> Result<i64, Failure> {
        let request = LeaseGrantRequest { ttl: ttl_s, id: 0 };
        let granted = self.ask(call, request, |channel, request| async move {
            LeaseClient::new(channel).lease_grant(request).await
        });
        granted.await.map(|granted| granted.id)
    }

    /// Prolongs a lease; `false` when it has run out.
    pub(super) async fn keep_alive(&self, call: Call<'_>, id: i64) -> Result<bool, Failure> {
        let request = LeaseKeepAliveRequest { id };
        let kept = self.ask(call, request, |channel, request| async move {
            let (metadata, extensions, message) = request.into_parts();
            let once = Request::from_parts(metadata, extensions, tokio_stream::once(message));
            let mut answers = LeaseClient::new(channel).lease_keep_alive(once).await?.into_inner();
            let answer = answers.message().await?;
            let answer = answer.ok_or_else(|| Status::unavailable("no answer about the lease"))?;
            Ok(Response::new(answer))
        });
        kept.await.map(|kept| kept.ttl > 0)
    }

    /// Ends a lease and with it its keys.
    pub(super) async fn revoke(&self, call: Call<'_>, id: i64) -> Result<(), Failure> {
        let request = LeaseRevokeRequest { id };
        let revoked = self.ask(call, request, |channel, request| async move {
            match LeaseClient::new(channel).lease_revoke(request).await {
                Err(status) if status.code() == Code::NotFound => Ok(Response::new(())),
                other => other.map(|answer| answer.map(drop)),
            }
        });
        revoked.await
    }

    /// Sends a request to one member after the other.
    async fn ask<M: Clone, T, F>(
        &self,
        call: Call<'_>,
        message: M,
        send: impl Fn(Channel, Request<M>) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut last = "no member answered".to_string();
        let answer = async {
            let mut attempts = 0_usize;
            loop {
                attempts += 1;
                let place = self.current.load(Ordering::Relaxed) % self.members.len();
                let channel = self.members[place].clone();
                let sent = async {
                    let request = self.signed(&channel, message.clone()).await?;
                    send(channel, request).await
                };
                match time::timeout(self.request_timeout, sent).await {
                    Ok(Ok(answer)) => return Ok(answer.into_inner()),
                    Ok(Err(status)) => {
                        if status.code() == Code::Unauthenticated {
                            *lock(&self.token) = None;
                        }
                        if is_final(&status) {
                            return Err(failure(&status));
                        }
                        last = reason(&status);
                    }
                    Err(_) => last = format!("no answer within {:?}", self.request_timeout),
                }
                self.turn_from(place);
                call.tally.count(|counters| counters.retries += 1);
                if attempts.is_multiple_of(self.members.len()) {
                    time::sleep(PAUSE).await;
                }
            }
        };
        match time::timeout(call.timeout, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::unavailable(format!("etcd: {last}"))),
        }
    }

    /// Asks the next member from now on, unless another call did that already.
    fn turn_from(&self, place: usize) {
        let next = (place + 1) % self.members.len();
        let _ = self.current.compare_exchange(place, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A request with the user's token, which is asked for when there is none.
    async fn signed<M>(&self, channel: &Channel, message: M) -> Result<Request<M>, Status> {
        let mut request = Request::new(message);
        let Some(User { name, password }) = &self.user else { return Ok(request) };
        let known = lock(&self.token).clone();
        let token = match known {
            Some(token) => token,
            None => {
                let (name, password) = (name.clone(), password.clone());
                let question = AuthenticateRequest { name, password };
                let answer = AuthClient::new(channel.clone()).authenticate(question).await?;
                let token = answer.into_inner().token.parse();
                let mut token: MetadataValue<Ascii> =
                    token.map_err(|_| Status::internal("the token is not ASCII"))?;
                token.set_sensitive(true);
                *lock(&self.token) = Some(token.clone());
                token
            }
        };
        request.metadata_mut().insert("token", token);
        Ok(request)
    }
}

/// How long all attempts of a call may take, and where they are counted.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) timeout: Duration,
    pub(super) tally: &'a Tally,
}

fn channel(endpoint: &str, config: &Config) -> Result<Channel, SetupError> {
    let refused = |error: tonic::transport::Error| SetupError::Endpoint {
        endpoint: endpoint.to_string(),
        reason: std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), |source| source.to_string()),
    };
    let made = Endpoint::from_shared(endpoint.to_string()).map_err(refused)?;
    let scheme = made.uri().scheme_str().unwrap_or_default().to_string();
    let has_tls = config.tls.is_some();
    if !matches!((scheme.as_str(), has_tls), ("http", false) | ("https", true)) {
        let reason = match has_tls {
            true => "with certificates it has to be https://HOST:PORT",
            false => "without certificates it has to be http://HOST:PORT",
        };
        let (endpoint, reason) = (endpoint.to_string(), reason.to_string());
        return Err(SetupError::Endpoint { endpoint, reason });
    }
    let made = made
        .connect_timeout(config.request_timeout)
        .http2_keep_alive_interval(ALIVE_EVERY)
        .tcp_nodelay(true);
    let made = match &config.tls {
        Some(tls) => made.tls_config(tls.clone()).map_err(refused)?,
        None => made,
    };
    Ok(made.connect_lazy())
}

fn kv(channel: Channel) -> KvClient<Channel> {
    KvClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES)
}

/// The status text of a member without space.
fn is_full(status: &Status) -> bool {
    status.code() == Code::ResourceExhausted && status.message().contains("database space exceeded")
}

/// Whether every member, and every later attempt, would answer the same.
fn is_final(status: &Status) -> bool {
    let is_refused = matches!(
        status.code(),
        Code::InvalidArgument
            | Code::NotFound
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unimplemented
    );
    is_refused || is_full(status)
}

fn reason(status: &Status) -> String {
    // What a connection failed of is below the status.
    let cause = std::error::Error::source(status).map(|source| format!(" ({source})"));
    format!("{}{}", status.message(), cause.unwrap_or_default())
}

fn failure(status: &Status) -> Failure {
    let error = if is_full(status) { StorageError::Full } else { StorageError::Unavailable };
    Failure { error, reason: format!("etcd: {}", reason(status)) }
}
