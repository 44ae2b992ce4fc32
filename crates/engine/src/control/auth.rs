//! Bearer tokens: who may call a daemon.

use std::sync::Arc;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use super::gate::{self, Call};
use crate::log;
use crate::status::Event;

/// Calls refused for a missing or wrong token, by this process.
pub(crate) static REFUSED: Event = Event::new("control.auth_failures");

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
        REFUSED.count();
        gate::note_refused(&request);
        let why = match given {
            Some(_) => "the token is not the one this daemon was started with",
            None => "the call carries no token",
        };
        log::refusal(format_args!("call from {} refused: {why}", gate::origin_of(&request)));
        Err(Status::unauthenticated(why))
    }
}

/// Compares in constant time.
fn same(given: &[u8], expected: &[u8]) -> bool {
    let differing = given.iter().zip(expected).fold(0, |bits, (a, b)| bits | (a ^ b));
    given.len() == expected.len() && std::hint::black_box(differing) == 0
}

/// Adds a token to every call.
#[derive(Clone)]
pub struct AddToken(Option<MetadataValue<Ascii>>);

impl AddToken {
    /// Calls with `token`. A token that is empty or cannot be in a header is left out, so the daemon
    /// refuses the call.
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
