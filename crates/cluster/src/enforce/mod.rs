//! What makes the ports of this machine keep a plan.
//!
//! An [`Enforcer`] takes whole plans, so that applying one again changes nothing and a restart needs no history. [`paces`] keeps
//! plans in the senders themselves.

pub mod paces;

use parfait::ledger::JobId;
use parfait::queues::Plan;
use thiserror::Error;

/// What one port is to guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// The network interface through which packets leave.
    pub interface: String,
    /// Jobs with their DSCPs, guarantees and paces, and the queues that they share.
    pub plan: Plan,
}

/// What a job has sent through a port since the enforcer was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The interface.
    pub interface: String,
    /// The job.
    pub job: JobId,
    /// Bytes, as the interface counts them.
    pub bytes: u64,
    /// Packets that found no room.
    pub dropped_packets: u64,
    /// Bytes that wait.
    pub backlog_bytes: u64,
}

/// Why a plan is not enforced. What was in force before is in force.
#[derive(Debug, Error)]
pub enum EnforceError {
    /// There is no such interface.
    #[error("there is no interface '{0}'")]
    NoInterface(String),
    /// The interface or the kernel cannot do that.
    #[error("interface '{interface}': {what} is not supported ({cause})")]
    Unsupported {
        /// The interface.
        interface: String,
        /// What was asked for.
        what: &'static str,
        /// What the kernel answered.
        cause: std::io::Error,
    },
    /// The kernel refused.
    #[error("interface '{interface}': {what} failed: {cause}")]
    Refused {
        /// The interface.
        interface: String,
        /// What was asked for.
        what: &'static str,
        /// What the kernel answered.
        cause: std::io::Error,
    },
}

/// See the module's text.
pub trait Enforcer: Send {
    /// Puts the plans into force, and removes those of ports that are not named any more.
    ///
    /// # Errors
    /// When a plan cannot be enforced; those before stay in force.
    fn apply(&mut self, ports: &[PortPlan]) -> Result<(), EnforceError>;

    /// What each job of the plans in force has sent.
    ///
    /// # Errors
    /// When the counters cannot be read.
    fn sent(&mut self) -> Result<Vec<Sent>, EnforceError>;
}
