//! Who may call a daemon: callers with its bearer token, or on connections that have proven to know
//! it.

use std::sync::Arc;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::admission::{self, Call, Caller, Standing};
use crate::event::Event;
use crate::log;

/// Calls refused for a missing or wrong token, by this process.
pub static REFUSED: Event = Event::new("control.auth_failures");

/// Checks the token of every call to a daemon.
#[derive(Clone)]
pub struct CheckToken {
    expected: Arc<str>,
}

impl CheckToken {
    /// Accepts callers that present `token`.
    pub fn new(token: &str) -> CheckToken {
        CheckToken { expected: format!("Bearer {token}").into() }
    }
}

impl Interceptor for CheckToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let given = request.metadata().get("authorization").map(MetadataValue::as_bytes);
        if given.is_some_and(|given| same(given, self.expected.as_bytes())) {
            Call::begin(&mut request)?;
            return Ok(request);
        }
        Err(refuse(
            request.extensions().get(),
            match given {
                Some(_) => "the token is not the one this daemon was started with",
                None => "the call carries no token",
            },
        ))
    }
}

/// Counts and reports a call that is refused, with a hint behind a line break.
pub fn refuse(caller: Option<&Caller>, why: &str) -> Status {
    REFUSED.count();
    admission::note_refused(caller);
    let line = why.split('\n').next().unwrap_or(why);
    log::refusal(format_args!("call from {} refused: {line}", admission::name_of(caller)));
    Status::unauthenticated(why)
}

/// Calls that were refused for what they did not know.
pub fn refused() -> u64 {
    REFUSED.get()
}

/// Admits calls on connections that have proven to know the secret. Behind TLS the caller has to be
/// attached before.
#[derive(Clone, Copy, Debug)]
pub struct CheckProof;

impl Interceptor for CheckProof {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let caller = request.extensions().get::<Caller>();
        if caller.is_some_and(|caller| *caller.standing() == Standing::Proven) {
            Call::begin(&mut request)?;
            return Ok(request);
        }
        let sends_it = request.metadata().contains_key("authorization");
        Err(refuse(
            request.extensions().get(),
            match sends_it {
                true => {
                    "the call carries the token itself\nuse a program of the daemon's version: it proves that it knows the token"
                }
                false => "the connection has not proven that it knows the token",
            },
        ))
    }
}

/// Compares in constant time.
pub(crate) fn same(given: &[u8], expected: &[u8]) -> bool {
    let differing = given.iter().zip(expected).fold(0, |bits, (a, b)| bits | (a ^ b));
    given.len() == expected.len() && std::hint::black_box(differing) == 0
}

/// Adds a token to every call.
#[derive(Clone)]
pub struct AddToken(Option<MetadataValue<Ascii>>);

impl AddToken {
    /// Calls with `token`. A token that is empty or cannot be in a header is left out, so the
    /// daemon refuses the call.
    pub fn new(token: &str) -> AddToken {
        let value = format!("Bearer {token}").parse().ok();
        AddToken(value.filter(|_| !token.is_empty()))
    }
}

impl Interceptor for AddToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(token: &str) -> Request<()> {
        AddToken::new(token).call(Request::new(())).expect("adding never refuses")
    }

    #[test]
    fn only_the_exact_token_gets_in() {
        let mut check = CheckToken::new("secret");
        assert!(check.call(with("secret")).is_ok());
        let before = REFUSED.get();
        for wrong in ["", "secre", "secrett", "Secret", "other"] {
            assert!(check.call(with(wrong)).is_err(), "{wrong:?}");
        }
        assert!(check.call(Request::new(())).is_err());
        assert!(REFUSED.get() >= before + 6);
    }
}
