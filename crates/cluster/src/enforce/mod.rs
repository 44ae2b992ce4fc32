//! What makes the ports of this machine keep a plan.
//!
//! An [`Enforcer`] takes whole plans, so that applying one again changes nothing and a restart
//! needs no history.
//!
//! | module | what keeps a plan |
//! |---|---|
//! | [`dcb`] | the traffic classes of a NIC: IEEE 802.1Qaz bandwidths, and priorities by DSCP |
//! | [`rate_limits`] | the senders themselves: token buckets in the queue pairs of this machine |
//! | [`htb`] | Linux' hierarchical token bucket: software RoCE over UDP, at senders and at switches that run Linux |
//!
//! Whether their interfaces are there, [`link`] says.

pub mod dcb;
pub mod htb;
pub mod link;
pub mod rate_limits;

use parfait::ledger::JobId;
use parfait::queues::Plan;
use thiserror::Error;

/// What one port is to guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// The network interface through which packets leave.
    pub interface: String,
    /// Jobs with their DSCPs, guarantees and rate limits, and the queues that they share.
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
    /// Somebody else has configured the interface's queues.
    #[error("interface '{interface}' has a queueing discipline that is not ours: {found}")]
    Occupied {
        /// The interface.
        interface: String,
        /// The kind and number of what is there.
        found: String,
    },
    /// The kernel's network configuration was not reached.
    #[error("the network configuration of the kernel cannot be reached: {0}")]
    Unreachable(std::io::Error),
}

impl EnforceError {
    /// An interface is named twice.
    fn two_plans(interface: &str) -> EnforceError {
        let cause = std::io::Error::other("there are two for it");
        EnforceError::Refused { interface: interface.to_owned(), what: "to choose a plan", cause }
    }

    /// The next thing to try.
    pub fn hint(&self) -> &'static str {
        use std::io::ErrorKind::PermissionDenied;
        match self {
            EnforceError::NoInterface(_) => {
                "`ip link` lists the interfaces of this network namespace"
            }
            EnforceError::Unsupported { .. } => {
                "HTB needs sch_htb, sch_fifo and cls_bpf in the kernel, and an Ethernet interface; DCB a NIC whose driver \
                 has it"
            }
            EnforceError::Refused { cause, .. } if cause.kind() == PermissionDenied => {
                "to change queues takes CAP_NET_ADMIN in the interface's network namespace"
            }
            EnforceError::Refused { .. } => "`tc -s class show dev INTERFACE` shows what is there",
            EnforceError::Occupied { .. } => {
                "remove it with `tc qdisc del dev INTERFACE root`, or allow that it is replaced"
            }
            EnforceError::Unreachable(_) => "netlink sockets need a Linux kernel with CONFIG_NET",
        }
    }
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

/// Enforces nothing and measures nothing: for machines where the plan is only to be seen.
#[derive(Debug)]
pub struct Nothing;

impl Enforcer for Nothing {
    fn apply(&mut self, _: &[PortPlan]) -> Result<(), EnforceError> {
        Ok(())
    }

    fn sent(&mut self) -> Result<Vec<Sent>, EnforceError> {
        Ok(Vec::new())
    }
}
