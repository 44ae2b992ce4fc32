//! What every daemon has, whatever it serves.
//!
//! | module | what it holds |
//! |---|---|
//! | [`error`], [`descriptors`] | failures with hints, as sent to the requester; a lack of file descriptors among their causes |
//! | [`text`] | text of others, without what a terminal would obey |
//! | [`log`], [`event`] | the lines of a daemon on standard error; events counted from any thread |
//! | [`address`] | `HOST[:PORT]` as people write it |
//!
//! With the feature `daemon`, which a trainer's process does without:
//!
//! | module | what it holds |
//! |---|---|
//! | `runtime`, `signals` | async runtimes; signals from the operating system |
//! | `places` | the one table of connections of a port, in which strangers give way |
//! | `admission`, `auth`, `grpc` | a control port: who may connect, who may call, how much at once |
//! | `metrics` | metrics as text, with names and units |
//!
//! With the feature `control`, `json` and `control`: what other processes write as JSON, and
//! connections that carry it line by line. With the feature `seed`, which `daemon` implies, `seed`.
//!
//! With the feature `http`, `rates` and `http`: how often who may ask, and what every web server
//! does. With the feature `tls`, `tls`: certificates and keys.
//!
//! Nothing here knows a message of a protocol: calls, their arguments and their answers belong to
//! the crates that serve them.

pub mod address;
#[cfg(feature = "daemon")]
pub mod admission;
#[cfg(feature = "daemon")]
pub mod auth;
#[cfg(feature = "control")]
pub mod control;
pub mod descriptors;
pub mod error;
pub mod event;
#[cfg(feature = "daemon")]
pub mod grpc;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "control")]
pub mod json;
pub mod log;
#[cfg(feature = "daemon")]
pub mod metrics;
#[cfg(feature = "daemon")]
mod places;
#[cfg(feature = "http")]
mod rates;
#[cfg(feature = "daemon")]
pub mod runtime;
#[cfg(feature = "seed")]
pub mod seed;
#[cfg(feature = "daemon")]
pub mod signals;
pub mod text;
#[cfg(feature = "tls")]
pub mod tls;

pub use error::Error;
