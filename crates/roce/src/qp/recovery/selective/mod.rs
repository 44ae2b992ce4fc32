//! Selective repeat between two of our own endpoints: only what was lost is retransmitted.
//!
//! [`requester`] and [`responder`] build on parts that know no packet formats beyond PSNs and
//! SACKs, each with its model test:
//!
//! | part | side | what it keeps |
//! |---|---|---|
//! | [`scoreboard`] | requester | every unacknowledged packet: in flight, arrived, lost |
//! | [`reads`] | requester | which READ responses are missing, which were requested again |
//! | [`arrivals`] | responder | packets that arrived out of order |
//!
//! The design, with the packet formats, is in `docs/reliability.md`.

mod arrivals;
mod reads;
pub(in crate::qp) mod requester;
pub(in crate::qp) mod responder;
mod scoreboard;
