//! Integration tests of the reliable-connection transport, in one binary.
//!
//! | module | what it shows |
//! |---|---|
//! | `harness` | the fabric: virtual time, real bytes, seeded faults |
//! | `rc_chaos` | random programs under faults, against a reference model (C2, C3) |
//! | `rc_directed` | the rules of the transport, one test each |
//! | `rc_hostile` | packets that no honest peer would send (C3, C7) |
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;
mod rc_chaos;
mod rc_directed;
mod rc_hostile;
