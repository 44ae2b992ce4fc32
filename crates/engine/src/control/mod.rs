//! The control plane: gRPC between daemons, and bearer tokens.
//!
//! All async code is here. Nothing here touches token data.

pub mod documents;
pub mod peer;
pub(crate) mod stages;
pub mod status;
pub mod target;

/// Default port of the control plane.
pub const CONTROL_PORT: u16 = 4790;

/// Longest time a control call may take before its peer counts as unreachable.
pub const CALL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Hint for a peer that does not follow the protocol as we know it.
pub(crate) const SAME_VERSION: &str = "run the same version of dquant at both ends";
