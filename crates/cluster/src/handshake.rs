//! How a caller and a brain prove to each other that they know the token, once for each connection,
//! without sending it.
//!
//! ```text
//! caller                                              brain
//!   Begin:  nonce                                ->
//!                                                <-   nonce
//!   Finish: HMAC(caller key, both nonces, way)   ->
//!                                                <-   HMAC(brain key, both nonces, way)
//! ```
//!
//! The caller goes first, so that a brain gives nobody anything to guess the token from who does
//! not know it. Before the last message has been checked, the caller asks nothing and believes
//! nothing.
//!
//! *Way* is where the caller's connection goes, as the caller sees it, and the brain compares it
//! with what it sees itself. So nobody can pass the messages on to a brain at another address and
//! then speak in the caller's name. With TLS the certificate says who the other side is, and way
//! says only that there is TLS at both ends.

use std::net::SocketAddr;

use service::admission::{Caller, Standing};
use service::auth;
use service::error::Error;
use tonic::transport::Channel;
use tonic::transport::server::TlsConnectInfo;
use tonic::{Code, Extensions, Request, Response, Status};

use crate::keys::{Keys, Nonce, nonce};
use crate::proto;
use crate::proto::handshake_client::HandshakeClient;
use crate::proto::handshake_server::{Handshake, HandshakeServer};

/// Longest message of a handshake.
const MAX_BYTES: usize = 512;

/// The way of a connection with TLS.
const TLS: &str = "tls";

/// The way of a connection without TLS to that address.
fn way(to: SocketAddr) -> String {
    format!("tcp {}", SocketAddr::new(to.ip().to_canonical(), to.port()))
}

fn parts<'a>(nonces: &'a [Nonce; 2], way: &'a str) -> [&'a [u8]; 3] {
    [&nonces[0], &nonces[1], way.as_bytes()]
}

/// Why a brain is not spoken to.
#[derive(Debug)]
pub(crate) enum Unproven {
    /// It said no, or nothing.
    Refused(Status),
    /// It does not know the token.
    Impostor(&'static str),
    /// This machine has no random numbers.
    Failed(Error),
}

/// Proves to the brain at the other end of `channel` that this caller knows the token, and has it
/// prove the same. `to` is the address of the connection, `None` with TLS.
pub(crate) async fn prove(
    channel: Channel,
    keys: &Keys,
    to: Option<SocketAddr>,
) -> Result<(), Unproven> {
    let mut stub = HandshakeClient::new(channel).max_decoding_message_size(MAX_BYTES);
    let way = to.map_or_else(|| TLS.to_owned(), way);
    let own = nonce().map_err(Unproven::Failed)?;
    let refused = |status: Status| match status.code() {
        Code::Unimplemented => Unproven::Impostor(
            "does not prove that it knows the token, as brains of this version do",
        ),
        _ => Unproven::Refused(status),
    };
    let begun = stub.begin(proto::BeginRequest { nonce: own.to_vec() }).await.map_err(refused)?;
    let theirs = begun.into_inner().nonce.try_into();
    let nonces = [own, theirs.map_err(|_| Unproven::Impostor("sent no nonce"))?];
    let proof = keys.caller.sign(&parts(&nonces, &way)).to_vec();
    let finish = proto::FinishRequest { proof, way: way.clone() };
    let finished = stub.finish(finish).await.map_err(refused)?.into_inner();
    match keys.brain.has_signed(&parts(&nonces, &way), &finished.proof) {
        true => Ok(()),
        false => Err(Unproven::Impostor("does not know the token: its proof is wrong")),
    }
}

/// A brain's side.
#[derive(Debug)]
pub(crate) struct Door {
    keys: Keys,
    /// Where others reach it, if that is an address.
    advertised: Option<SocketAddr>,
}

/// The caller of a request, and whether it speaks TLS.
pub(crate) fn caller(extensions: &Extensions) -> Option<(Caller, bool)> {
    let secured = extensions.get::<TlsConnectInfo<Caller>>();
    let secured = secured.map(|secured| (secured.get_ref().clone(), true));
    secured.or_else(|| extensions.get::<Caller>().map(|caller| (caller.clone(), false)))
}

fn no_caller() -> Status {
    Status::internal("the connection is not known")
}

impl Door {
    /// The service of a brain that others reach at `address`.
    pub(crate) fn new(keys: Keys, address: &str) -> HandshakeServer<Door> {
        let door = Door { keys, advertised: address.parse().ok() };
        HandshakeServer::new(door).max_decoding_message_size(MAX_BYTES)
    }

    /// Whether a connection that arrived here has gone that way.
    fn is_way(&self, claimed: &str, caller: &Caller, has_tls: bool) -> bool {
        match has_tls {
            true => claimed == TLS,
            false => {
                let own = [caller.local(), self.advertised];
                own.into_iter().flatten().any(|own| way(own) == claimed)
            }
        }
    }

    /// Why a caller that knows the token is refused.
    fn wrong_way(&self, claimed: &str, caller: &Caller, has_tls: bool) -> String {
        let (own, hint) = match (caller.local().or(self.advertised), has_tls) {
            (Some(local), false) => (
                way(local),
                "name the brain by its own address, have `dquant brain` advertise the address that is called (--advertise), or use TLS",
            ),
            _ => (TLS.to_owned(), "TLS has to reach from the caller to the brain"),
        };
        let claimed: String = claimed.chars().take(64).collect();
        format!(
            "the caller's connection is '{claimed}' and arrives as '{own}': something forwards it\n{hint}"
        )
    }
}

#[tonic::async_trait]
impl Handshake for Door {
    async fn begin(
        &self,
        request: Request<proto::BeginRequest>,
    ) -> Result<Response<proto::BeginReply>, Status> {
        let (caller, _) = caller(request.extensions()).ok_or_else(no_caller)?;
        let theirs = request.into_inner().nonce.try_into();
        let theirs = theirs.map_err(|_| Status::invalid_argument("a nonce has 32 bytes"))?;
        let own = nonce().map_err(|error| Status::internal(error.to_string()))?;
        *caller.standing() = Standing::Asked([theirs, own]);
        Ok(Response::new(proto::BeginReply { nonce: own.to_vec() }))
    }

    async fn finish(
        &self,
        request: Request<proto::FinishRequest>,
    ) -> Result<Response<proto::FinishReply>, Status> {
        let (caller, has_tls) = caller(request.extensions()).ok_or_else(no_caller)?;
        let proto::FinishRequest { proof, way } = request.into_inner();
        // A nonce is good for one attempt.
        let asked = std::mem::take(&mut *caller.standing());
        let Standing::Asked(nonces) = asked else {
            return Err(Status::failed_precondition("a handshake begins with nonces"));
        };
        let parts = parts(&nonces, &way);
        if !self.keys.caller.has_signed(&parts, &proof) {
            let why = "the token is not the one this daemon was started with";
            return Err(auth::refuse(Some(&caller), why));
        }
        if !self.is_way(&way, &caller, has_tls) {
            let why = self.wrong_way(&way, &caller, has_tls);
            let _ = auth::refuse(Some(&caller), &why);
            return Err(Status::permission_denied(why));
        }
        *caller.standing() = Standing::Proven;
        let proof = self.keys.brain.sign(&parts).to_vec();
        Ok(Response::new(proto::FinishReply { proof }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use service::admission::Admission;
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::transport::{Endpoint, Server};

    use super::*;

    fn keys() -> Keys {
        Keys::of_token("a-token-of-ours")
    }

    async fn listen() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
        let address = listener.local_addr().expect("it is bound");
        (listener, address)
    }

    async fn channel(address: SocketAddr) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        endpoint.connect().await.expect("it listens")
    }

    /// A brain behind a control port.
    async fn brain() -> SocketAddr {
        let (listener, address) = listen().await;
        let server = Server::builder().add_service(Door::new(keys(), ""));
        tokio::spawn(server.serve_with_incoming(Admission::new().accept(listener)));
        address
    }

    /// Who does not know the token: answers with what the test says, and keeps what it was told.
    #[derive(Default)]
    struct Rogue {
        answer: Vec<u8>,
        told: Arc<Mutex<Vec<proto::FinishRequest>>>,
    }

    #[tonic::async_trait]
    impl Handshake for Rogue {
        async fn begin(
            &self,
            _: Request<proto::BeginRequest>,
        ) -> Result<Response<proto::BeginReply>, Status> {
            Ok(Response::new(proto::BeginReply { nonce: vec![0; 32] }))
        }

        async fn finish(
            &self,
            request: Request<proto::FinishRequest>,
        ) -> Result<Response<proto::FinishReply>, Status> {
            let request = request.into_inner();
            // As if what the caller said could be given back to it.
            let proof = match self.answer.is_empty() {
                true => request.proof.clone(),
                false => self.answer.clone(),
            };
            self.told.lock().expect("nothing panics").push(request);
            Ok(Response::new(proto::FinishReply { proof }))
        }
    }

    #[tokio::test]
    async fn who_does_not_know_the_token_cannot_be_a_brain() {
        let told: Arc<Mutex<Vec<proto::FinishRequest>>> = Arc::default();
        for answer in [vec![], vec![0; 32], b"short".to_vec()] {
            let (listener, address) = listen().await;
            let rogue = HandshakeServer::new(Rogue { answer, told: Arc::clone(&told) });
            let incoming = TcpListenerStream::new(listener);
            tokio::spawn(Server::builder().add_service(rogue).serve_with_incoming(incoming));
            let refused = prove(channel(address).await, &keys(), Some(address)).await;
            assert!(matches!(refused, Err(Unproven::Impostor(_))), "{refused:?}");
        }
        // What they heard is worth nothing elsewhere: each brain draws a nonce of its own.
        let address = brain().await;
        let mut stub = HandshakeClient::new(channel(address).await);
        let told = std::mem::take(&mut *told.lock().expect("nothing panics"));
        for heard in told {
            let nonce = vec![0; 32];
            stub.begin(proto::BeginRequest { nonce }).await.expect("a nonce");
            let refused = stub.finish(heard).await.expect_err("it is of another connection");
            assert_eq!(refused.code(), Code::Unauthenticated);
        }
    }

    #[tokio::test]
    async fn a_handshake_is_whole_and_each_nonce_is_for_one_attempt() {
        let address = brain().await;
        let channel = channel(address).await;
        let mut stub = HandshakeClient::new(channel.clone());
        let way = way(address);
        let proof = |nonces: &[Nonce; 2]| keys().caller.sign(&parts(nonces, &way)).to_vec();
        let finish = |proof: Vec<u8>| proto::FinishRequest { proof, way: way.clone() };
        let early = stub.finish(finish(proof(&[[0; 32]; 2]))).await.expect_err("no nonces");
        assert_eq!(early.code(), Code::FailedPrecondition);
        for length in [0, 31, 33] {
            let begun = stub.begin(proto::BeginRequest { nonce: vec![1; length] }).await;
            assert_eq!(begun.expect_err("no nonce").code(), Code::InvalidArgument);
        }
        let own = [1; 32];
        let begun = stub.begin(proto::BeginRequest { nonce: own.to_vec() }).await.expect("a nonce");
        let theirs = begun.into_inner().nonce.try_into().expect("32 bytes");
        let right = proof(&[own, theirs]);
        let wrong = stub.finish(finish(vec![0; 32])).await.expect_err("no proof");
        assert_eq!(wrong.code(), Code::Unauthenticated);
        let again = stub.finish(finish(right)).await.expect_err("the nonces are used");
        assert_eq!(again.code(), Code::FailedPrecondition);
        prove(channel, &keys(), Some(address)).await.expect("from the beginning");
    }

    #[tokio::test]
    async fn a_way_with_tls_is_not_one_without() {
        let address = brain().await;
        let refused = prove(channel(address).await, &keys(), None).await;
        let Err(Unproven::Refused(status)) = refused else { panic!("{refused:?}") };
        assert_eq!(status.code(), Code::PermissionDenied);
        assert!(status.message().contains("is 'tls' and arrives as 'tcp 127.0.0.1:"), "{status}");
    }
}
