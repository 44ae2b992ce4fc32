//! Integration tests of the transport, in one binary. Random programs under random faults, with
//! every completion and byte checked, are the tests `chaos` of `sim`.
//!
//! | module | what it tests |
//! |---|---|
//! | `harness` | the usual scenario on the simulated network of `sim` |
//! | `kit` | queue pairs of every transport on it |
//! | `states` | every transition of the state machine, and what states allow |
//! | `pair` | two connected queue pairs, or one and single packets |
//! | `rc_atomic` | atomics: exactly once, in order, checked |
//! | `rc_local` | memory windows, invalidation, fences, shared receives |
//! | `rc_order` | requests take effect in the order in which they were posted |
//! | `rc_overlap` | messages that use the same memory again, under loss |
//! | `rc_directed` | the rules of the transport, one test each |
//! | `rc_direct` | requests without packets, between requests that need them |
//! | `rc_message` | messages without packets, and who serves directly, one rule per test |
//! | `congestion` | marks, notifications, rates |
//! | `rc_hostile` | packets that no correct peer would send (C3, C7) |
//! | `rc_rights` | what a peer may not do, also in duplicate and out-of-order packets |
//! | `off_path` | forged packets of an attacker who sees none: what has to be guessed |
//! | `report` | reports of a queue pair, and why it failed |
//! | `uc` | unreliable connections: whole messages or none |
//! | `ud` | datagrams: queue keys, route headers, groups |
//! | `srq` | shared receive queues and their limit |
//! | `events` | asynchronous events, notifications, and objects in use |
//! | `walk` | random walks through the states, with traffic |
//! | `unreliable_hostile` | packets that no correct UC or UD peer would send |
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod congestion;
mod events;
mod harness;
mod kit;
mod off_path;
mod pair;
mod parking;
mod rc_atomic;
mod rc_direct;
mod rc_directed;
mod rc_hostile;
mod rc_local;
mod rc_message;
mod rc_order;
mod rc_overlap;
mod rc_rights;
mod report;
#[path = "../../../../testing/seeds.rs"]
mod seeds;
mod srq;
mod states;
mod uc;
mod ud;
mod unreliable_hostile;
mod walk;
