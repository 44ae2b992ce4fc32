//! Why a verb was refused.

use thiserror::Error;

/// Why a verb was refused at once. Nothing was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum VerbsError {
    /// No such queue pair on this endpoint.
    #[error("queue pair {0} does not exist")]
    NoQp(u32),
    /// No such completion queue on this endpoint.
    #[error("completion queue {0} does not exist")]
    NoCq(u32),
    /// No such protection domain on this endpoint.
    #[error("protection domain {0} does not exist")]
    NoPd(u32),
    /// Objects of the protection domain still exist.
    #[error("protection domain {0} is in use: destroy what belongs to it first")]
    PdInUse(u32),
    /// No such shared receive queue on this endpoint.
    #[error("shared receive queue {0} does not exist")]
    NoSrq(u32),
    /// The shared receive queue belongs to another protection domain than the queue pair.
    #[error("shared receive queue {0} belongs to another protection domain")]
    SrqPd(u32),
    /// Queue pairs still receive from it.
    #[error("shared receive queue {0} is in use: destroy its queue pairs first")]
    SrqInUse(u32),
    /// No such memory window on this endpoint.
    #[error("memory window {0} does not exist")]
    NoWindow(u32),
    /// Memory windows are still bound to it.
    #[error("region {0:#010x} is in use: memory windows are bound to it")]
    RegionInUse(u32),
    /// The queue pair receives from a shared receive queue only.
    #[error("queue pair {0} takes its receives from a shared receive queue")]
    SharedReceives(u32),
    /// The transport does not support the operation, attribute or combination.
    #[error("queue pair {qpn}: {why}")]
    Invalid {
        /// The queue pair.
        qpn: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// The state transition, or its attributes, are not legal (IBA 10.3.1).
    #[error("queue pair {qpn}: {from} to {to}: {why}")]
    Transition {
        /// The queue pair.
        qpn: u32,
        /// Its state.
        from: &'static str,
        /// The requested state.
        to: &'static str,
        /// What is wrong.
        why: &'static str,
    },
    /// Queue pairs still use it.
    #[error("completion queue {0} is in use: destroy its queue pairs first")]
    CqInUse(u32),
    /// The queue pair's state does not allow the verb.
    #[error("queue pair {qpn}: not allowed in state {state}")]
    WrongState {
        /// The queue pair.
        qpn: u32,
        /// Its state.
        state: &'static str,
    },
    /// The work queue is full.
    #[error("queue pair {qpn}: {queue} queue is full ({limit} work requests)")]
    QueueFull {
        /// The queue pair.
        qpn: u32,
        /// "send" or "receive".
        queue: &'static str,
        /// Its size.
        limit: u32,
    },
    /// The message is longer than 2^31 bytes.
    #[error("message of {0} bytes is longer than 2^31")]
    TooLong(u64),
    /// A region's bounds overflow the address space or its flags contradict each other.
    #[error("region of {len} bytes at {addr:#x}: {why}")]
    BadRegion {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No region has this key.
    #[error("no region has key {0:#010x}")]
    NoRegion(u32),
    /// No such address handle on this device.
    #[error("address handle {0} does not exist")]
    NoAddressHandle(u32),
    /// The device does not have the operation.
    #[error("this device has no {0}")]
    Unsupported(&'static str),
    /// The device, or its library, refused for a reason of its own.
    #[error("{call}: the device refused with errno {errno}")]
    Device {
        /// The verb.
        call: &'static str,
        /// Its error number.
        errno: i32,
    },
    /// A configured table is full.
    #[error("table of {what} is full ({limit})")]
    TableFull {
        /// Which table.
        what: &'static str,
        /// Its size.
        limit: u32,
    },
}
