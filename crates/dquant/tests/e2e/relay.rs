//! A relay in front of a target's control plane that records what passes: the attacker who can read
//! the control connection and so learns the numbers of both queue pairs.
//!
//! The numbers cannot be guessed (`roce::slab`). All messages pass unchanged, except for the loss
//! recovery mode, and the data path does not go through the relay.

use std::pin::Pin;
use std::sync::{Arc, Mutex};

use engine::control::target::TargetControl;
use engine::proto::target_server::{Target, TargetServer};
use engine::proto::{
    DescribeReply, DescribeRequest, DocumentsReply, DocumentsRequest, ListReply, ListRequest,
    QueuePair, SessionReply, SessionRequest, StatusReply, StatusRequest,
};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use super::harness::{Daemon, TOKEN, fresh_ip};

/// Both ends of a session's connection, as exchanged.
#[derive(Clone)]
pub(crate) struct Overheard {
    pub(crate) reader: QueuePair,
    pub(crate) target: QueuePair,
}

/// The relay; it ends with the test.
pub(crate) struct Relay {
    control: String,
    trouble: Arc<Trouble>,
    overheard: Arc<Mutex<Vec<Overheard>>>,
    server: tokio::task::JoinHandle<()>,
}

/// What the relay does to its callers.
#[derive(Default)]
struct Trouble {
    /// Ends the current sessions.
    cut: Notify,
    /// Replies to the next sessions, the last one first.
    refusals: Mutex<Vec<Status>>,
}

struct Service {
    target: TargetControl,
    trouble: Arc<Trouble>,
    selective: bool,
    overheard: Arc<Mutex<Vec<Overheard>>>,
}

impl Relay {
    /// Without `selective` the reader seems to support go-back-N only.
    pub(crate) fn start(runtime: &Runtime, target: &Daemon, selective: bool) -> Relay {
        let overheard: Arc<Mutex<Vec<Overheard>>> = Arc::default();
        let target = runtime.block_on(TargetControl::connect(target.control(), TOKEN));
        let target = target.expect("reachable");
        let trouble = Arc::<Trouble>::default();
        let (overhears, makes) = (Arc::clone(&overheard), Arc::clone(&trouble));
        let service = Service { target, trouble: makes, selective, overheard: overhears };
        let listener = runtime.block_on(TcpListener::bind((fresh_ip(), 0))).expect("loopback");
        let control = listener.local_addr().expect("it is bound").to_string();
        let incoming = TcpListenerStream::new(listener);
        let server = runtime.spawn(async move {
            let server = Server::builder().add_service(TargetServer::new(service));
            server.serve_with_incoming(incoming).await.expect("the relay serves");
        });
        Relay { control, trouble, overheard, server }
    }

    /// The URL that leads a DPU through the relay.
    pub(crate) fn url(&self, name: &str) -> String {
        format!("dq://{}/{name}", self.control)
    }

    /// Ends the current sessions, and refuses the next ones with these.
    pub(crate) fn cut(&self, refusals: Vec<Status>) {
        *self.trouble.refusals.lock().expect("no panic") = refusals;
        self.trouble.cut.notify_waiters();
    }

    /// Refusals not used yet.
    pub(crate) fn refusals_left(&self) -> usize {
        self.trouble.refusals.lock().expect("no panic").len()
    }

    /// The sessions so far.
    pub(crate) fn sessions(&self) -> Vec<Overheard> {
        self.overheard.lock().expect("no panic").clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn refused(error: service::Error) -> Status {
    Status::unavailable(error.to_string())
}

type Replies = Pin<Box<dyn Stream<Item = Result<SessionReply, Status>> + Send>>;

#[tonic::async_trait]
impl Target for Service {
    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeReply>, Status> {
        let datasets = self.target.describe(request.into_inner().datasets).await;
        Ok(Response::new(DescribeReply { datasets: datasets.map_err(refused)? }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let listed = self.target.list(&request.into_inner().prefix).await;
        listed.map(Response::new).map_err(refused)
    }

    type DocumentsStream = Pin<Box<dyn Stream<Item = Result<DocumentsReply, Status>> + Send>>;

    async fn documents(
        &self,
        _: Request<DocumentsRequest>,
    ) -> Result<Response<Self::DocumentsStream>, Status> {
        Err(Status::unimplemented("streams through the relay need no documents"))
    }

    type SessionStream = Replies;

    async fn session(
        &self,
        request: Request<Streaming<SessionRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let refusal = self.trouble.refusals.lock().expect("no panic").pop();
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        let mut inbound = request.into_inner();
        let first = inbound.message().await?;
        let mut first = first.ok_or_else(|| Status::invalid_argument("empty"))?;
        if let Some(reader) = &mut first.reader {
            reader.selective_repeat &= self.selective;
        }
        let reader = first.reader.clone();
        let mut session = self.target.session(first).await.map_err(refused)?;
        let reply = session.reply.clone();
        if let (Some(reader), Some(target)) = (reader, reply.target.clone()) {
            self.overheard.lock().expect("no panic").push(Overheard { reader, target });
        }
        let (send, receive) = tokio::sync::mpsc::channel(1);
        let trouble = Arc::clone(&self.trouble);
        tokio::spawn(async move {
            if send.send(Ok(reply)).await.is_err() {
                return;
            }
            let closed = async { while let Ok(Some(_)) = inbound.message().await {} };
            tokio::select! {
                () = closed => {}
                _ = session.ended() => {}
                () = trouble.cut.notified() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Ok(Response::new(self.target.status().await.map_err(refused)?))
    }
}
