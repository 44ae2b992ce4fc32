//! What the server has done and refused, by reason.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Connections that got a place.
    Accepted,
    /// Connections that the kernel did not hand over.
    AcceptErrors,
    /// Requests whose headers arrived.
    Requests,
    /// No place, and no connection that could give way.
    RefusedFull,
    /// As [`Count::RefusedFull`], for the places of one address.
    RefusedAddress,
    /// Too many requests, of one client or of all that have no token.
    RefusedRate,
    /// No token, or a wrong one.
    RefusedToken,
    /// A server without token was addressed by a name, as a page of another site does that has this
    /// address.
    RefusedHost,
    /// No such path.
    RefusedPath,
    /// A method that the path does not have.
    RefusedMethod,
    /// A body whose type is not JSON, or a request that a page of another site made.
    RefusedType,
    /// A query that cannot be read.
    RefusedQuery,
    /// A body that is too large.
    RefusedBody,
    /// A body that did not arrive in time.
    RefusedSlow,
    /// As many subscriptions or calls as may be at once.
    RefusedBusy,
    /// Whoever answers a call refused what was in its body.
    RefusedHook,
    /// A connection that made room for another.
    ClosedEvicted,
    /// A connection that never had the token, after some requests without it.
    ClosedRefused,
    /// A connection that sent no complete headers in time.
    ClosedHeaders,
    /// A connection without a request for a while.
    ClosedIdle,
    /// A client that did not read the response in time.
    ClosedResponse,
    /// Bytes that are not HTTP, or too many headers.
    ClosedMalformed,
}

const NAMES: [&str; 22] = [
    "web.connections.accepted",
    "web.accept_errors",
    "web.requests",
    "web.connections.refused.full",
    "web.connections.refused.address",
    "web.refused.rate",
    "web.refused.token",
    "web.refused.host",
    "web.refused.path",
    "web.refused.method",
    "web.refused.type",
    "web.refused.query",
    "web.refused.body_size",
    "web.refused.body_slow",
    "web.refused.busy",
    "web.refused.hook",
    "web.connections.closed.evicted",
    "web.connections.closed.refused",
    "web.connections.closed.slow_headers",
    "web.connections.closed.idle",
    "web.connections.closed.slow_reader",
    "web.connections.closed.malformed",
];

/// The counters of one server.
#[derive(Debug, Default)]
pub struct Counters([AtomicU64; NAMES.len()]);

impl Counters {
    /// Counts one.
    pub fn count(&self, what: Count) {
        self.0[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// All of them, by name.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        let values = self.0.iter().map(|value| value.load(Ordering::Relaxed));
        NAMES.iter().map(|name| (*name).to_owned()).zip(values).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_count_has_the_last_name() {
        let counters = Counters::default();
        counters.count(Count::ClosedMalformed);
        assert_eq!(counters.by_name()["web.connections.closed.malformed"], 1);
        counters.count(Count::RefusedHost);
        assert_eq!(counters.by_name()["web.refused.host"], 1);
    }
}
