//! The control plane: gRPC between daemons, bearer tokens, and the messages of the local socket.
//!
//! All async code is here. Nothing here touches token data.

pub mod auth;
pub(crate) mod gate;
pub mod peer;
pub(crate) mod stages;
pub mod status;
pub mod target;

/// Messages and services, generated from `proto/dquant/v1/control.proto`.
#[allow(missing_docs, clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]
pub mod proto {
    tonic::include_proto!("dquant.v1");
}

/// Default port of the control plane.
pub const CONTROL_PORT: u16 = 4790;

/// Longest time a control call may take before its peer counts as unreachable.
pub const CALL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
