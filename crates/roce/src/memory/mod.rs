//! Registered memory: who may touch which bytes, under which key (contract C3).
//!
//! | module | what it holds |
//! |---|---|
//! | [`region`] | memory regions and windows, and the check of every access |
//! | [`sg`] | scatter/gather lists, resolved to checked addresses |
//! | [`pd`] | protection domains |
//!
//! Addresses only: payload bytes never pass through here (C1).

pub(crate) mod pd;
pub(crate) mod region;
pub(crate) mod sg;
