//! Selective repeat between two of our own endpoints: only what was lost is sent again.
//!
//! Here are the parts that know no packet formats beyond PSNs and reports, each with its model test:
//!
//! | part | side | what it keeps |
//! |---|---|---|
//! | [`scoreboard`] | requester | every unacknowledged packet: in flight, arrived, lost |
//! | [`reads`] | requester | which READ responses are missing, which were asked for again |
//! | [`arrivals`] | responder | packets that came before their turn |
//!
//! The design, with the packet formats, is in `docs/reliability.md`.

pub(crate) mod arrivals;
pub(super) mod form;
pub(crate) mod reads;
pub(crate) mod scoreboard;
