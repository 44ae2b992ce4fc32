//! A daemon as its callers see it: its address, whether it replies, what it refuses.
//!
//! Every call has a timeout ([`CALL_TIMEOUT`]), and every failure names the daemon. A daemon's
//! refusal becomes an error of ours with the daemon's hint; a timeout and a closed connection are
//! [`Kind::Unreachable`](service::error::Kind::Unreachable).

use std::fmt;
use std::time::Duration;

use roce::wire::ROCE_PORT;
use service::Error;
use service::address::{check_port, with_port};
use service::descriptors::lacks_descriptors;
use service::error::root_cause;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::{CALL_TIMEOUT, CONTROL_PORT};

/// How often an idle connection is probed, so that a dead machine is noticed.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// A daemon that accepted our connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    role: &'static str,
    name: String,
    pub(super) channel: Channel,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.name)
    }
}

impl Peer {
    /// Connects to `host[:port]`. `role` names it in errors, `command` is the one that starts it.
    pub(super) async fn connect(
        role: &'static str,
        host: &str,
        command: &str,
    ) -> Result<Peer, Error> {
        check_port(host)?;
        let name = with_port(host, CONTROL_PORT);
        let endpoint = Endpoint::from_shared(format!("http://{name}"))
            .map_err(|_| Error::invalid(format!("{host:?} is not a host[:port]")))?
            .connect_timeout(CALL_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(CALL_TIMEOUT)
            .keep_alive_while_idle(true);
        let channel = endpoint.connect().await.map_err(|error| {
            let cause = root_cause(&error);
            if lacks_descriptors(&error) {
                // The error is local: nothing is known about the peer.
                return Error::invalid(format!("cannot connect to {role} {name}: {cause}"))
                    .caused_by(&error)
                    .transient();
            }
            if cause.starts_with("failed to lookup address") {
                // A name service may come back: callers that wait for the daemon keep waiting.
                return Error::invalid(format!("{role} {name}: {cause}"))
                    .hint("give the name or the address of a machine that this one can resolve")
                    .transient();
            }
            let text = |why: &str| Error::unreachable(format!("{role} {name}: {why}"));
            if is_timeout(&error) {
                let port = name.rsplit_once(':').map_or("", |(_, port)| port);
                let seconds = CALL_TIMEOUT.as_secs();
                return text(&format!("no answer within {seconds} s")).hint(format!(
                    "is the machine up, and does every firewall on the way let TCP port {port} and UDP port \
                     {ROCE_PORT} pass?"
                ));
            }
            text(&cause).hint(format!("is {command} running there? start it with --control {name}"))
        })?;
        Ok(Peer { role, name, channel })
    }

    /// `host:port`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Waits for a reply, with a timeout.
    pub(super) async fn within<R>(
        &self,
        call: impl Future<Output = Result<R, Status>>,
    ) -> Result<R, Error> {
        self.answer(call).await?.map_err(|status| self.refused(&status))
    }

    /// As [`Peer::within`], but the caller handles refusals.
    pub(super) async fn answer<R>(
        &self,
        call: impl Future<Output = Result<R, Status>>,
    ) -> Result<Result<R, Status>, Error> {
        let seconds = CALL_TIMEOUT.as_secs();
        let late = |_| {
            Error::unreachable(format!("{self} did not reply within {seconds} s")).hint(
                "its process may be stopped or overloaded, or the path drops packets: see its log, and `dquant status`",
            )
        };
        tokio::time::timeout(CALL_TIMEOUT, call).await.map_err(late)
    }

    /// A refusal as an error of ours. Refusals carry their hint after a line break.
    pub(super) fn refused(&self, status: &Status) -> Error {
        let (message, hint) = match status.message().split_once('\n') {
            Some((message, hint)) => (message, Some(hint)),
            None => (status.message(), None),
        };
        let text = format!("{self}: {message}");
        let error = match status.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled => {
                Error::unreachable(text)
            }
            Code::Unauthenticated => Error::invalid(text)
                .hint("give the daemon's token with --token, --token-file or DQUANT_TOKEN"),
            _ => Error::invalid(text),
        };
        let foreign = is_foreign(status).then_some(FOREIGN_HINT);
        let error = if is_transient(status.code()) { error.transient() } else { error };
        match hint.or(foreign) {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

const FOREIGN_HINT: &str =
    "something other than dquant answers at this port: name the control port of a daemon";

/// Whether the reply came from something other than gRPC: a server of HTTP/2, or one of HTTP/1,
/// whose reply is no frame.
fn is_foreign(status: &Status) -> bool {
    status.message().starts_with("grpc-status header missing")
        || root_cause(status).contains("frame with invalid size")
}

/// Whether a refusal may be temporary: the daemon lacked a resource or had a failure of its own. A
/// wrong token, a missing dataset or an invalid request is permanent.
fn is_transient(code: Code) -> bool {
    match code {
        Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::Internal
        | Code::Unavailable => true,
        Code::Ok
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::DataLoss
        | Code::Unauthenticated => false,
    }
}

/// Whether an error says that there was no answer in time.
fn is_timeout(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| {
        let io = error.downcast_ref::<std::io::Error>();
        io.is_some_and(|io| io.kind() == std::io::ErrorKind::TimedOut)
            || error.is::<tokio::time::error::Elapsed>()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use service::error::Kind;

    /// A peer that is never connected to.
    fn peer() -> Peer {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let _entered = runtime.enter();
        let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Peer { role: "target", name: "t:1".into(), channel }
    }

    #[test]
    fn a_refusal_keeps_its_hint_and_may_pass_by_itself() {
        use Kind::{Invalid, Unreachable};
        let refusals = [
            (Code::Unavailable, Unreachable, true),
            (Code::ResourceExhausted, Invalid, true),
            (Code::NotFound, Invalid, false),
            (Code::Unauthenticated, Invalid, false),
        ];
        let peer = peer();
        for (code, kind, transient) in refusals {
            let error = peer.refused(&Status::new(code, "no\nwait"));
            assert_eq!((error.kind(), error.is_transient()), (kind, transient), "{code:?}");
            assert_eq!(error.parts().1.as_deref(), Some("wait"), "{code:?}");
        }
        let not_grpc = "grpc-status header missing, mapped from HTTP status code 404";
        let error = peer.refused(&Status::new(Code::Unimplemented, not_grpc));
        assert_eq!(error.parts().1.as_deref(), Some(FOREIGN_HINT));
    }
}
