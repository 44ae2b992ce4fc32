//! The upper seam: what a program says to an RDMA device, and what it hears back.
//!
//! Names are those of the InfiniBand verbs. [`Verbs`] is implemented by our software
//! [`Endpoint`](crate::endpoint::Endpoint) and by whatever else can carry out work requests; state
//! machines above this crate are written against the trait and never see a packet.

use arrayvec::ArrayVec;
use thiserror::Error;

/// Most scatter/gather elements one work request may carry.
pub const MAX_SGE: usize = 8;

/// Longest message in bytes (IBA 9.7.7: 2^31).
pub const MAX_MESSAGE_BYTES: u64 = 1 << 31;

/// A queue pair number, 24 bits. 0 and 1 are reserved for management and never handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Qpn {
        Qpn(value & 0x00ff_ffff)
    }

    /// The number as it stands in the packet.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A protection domain: regions and queue pairs of different domains never meet (C3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PdId(pub u32);

/// A completion queue of one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CqId(pub u32);

/// What a memory region may be used for. Local reads are always allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Receives and READ responses may be placed here.
    pub local_write: bool,
    /// The peer may WRITE here. Needs `local_write` (IBA 10.6.3).
    pub remote_write: bool,
    /// The peer may READ from here.
    pub remote_read: bool,
}

impl Access {
    /// Source of sends and writes only.
    pub const LOCAL_READ: Access =
        Access { local_write: false, remote_write: false, remote_read: false };
    /// Local use in both directions.
    pub const LOCAL: Access = Access { local_write: true, remote_write: false, remote_read: false };
    /// Local use, and target of the peer's WRITEs.
    pub const REMOTE_WRITE: Access =
        Access { local_write: true, remote_write: true, remote_read: false };
    /// Local use, and source of the peer's READs.
    pub const REMOTE_READ: Access =
        Access { local_write: true, remote_write: false, remote_read: true };
    /// Everything.
    pub const ALL: Access = Access { local_write: true, remote_write: true, remote_read: true };
}

/// A registered memory region: `len` bytes from `addr`, with the keys that name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// First byte, in the address space that work requests and the peer use.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Key for our own work requests.
    pub lkey: u32,
    /// Key for the peer's WRITEs and READs.
    pub rkey: u32,
}

/// A piece of local memory: bytes `addr .. addr + len` of the region that `lkey` names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the region.
    pub lkey: u32,
}

/// Scatter/gather list of one work request.
pub type SgList = ArrayVec<Sge, MAX_SGE>;

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Into a buffer that the peer has posted.
    Send,
    /// The same, with 32 bits for the peer's completion.
    SendImm(u32),
    /// Into the peer's memory; the peer's program hears nothing.
    Write {
        /// First byte in the peer's region.
        remote_addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// Into the peer's memory; consumes one of its posted receives and completes it.
    WriteImm {
        /// First byte in the peer's region.
        remote_addr: u64,
        /// The peer's key.
        rkey: u32,
        /// Value for the peer's completion.
        imm: u32,
    },
    /// From the peer's memory into ours.
    Read {
        /// First byte in the peer's region.
        remote_addr: u64,
        /// The peer's key.
        rkey: u32,
    },
}

/// A send work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// Local memory: source, or for READ the destination.
    pub sges: SgList,
    /// Make a completion on success (errors always make one).
    pub signaled: bool,
    /// Ask the peer for a solicited event.
    pub solicited: bool,
}

/// A receive work request: where the next SEND goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecvWr {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Memory to fill, in order.
    pub sges: SgList,
}

/// How a work request ended (IBA 10.10.3; numbers as in the verbs API).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcStatus {
    /// Done.
    Success = 0,
    /// The message does not fit the posted buffer, or exceeds the maximum.
    LocalLengthError = 1,
    /// The queue pair's own state did not allow it.
    LocalQpError = 2,
    /// A local key, bound or access flag refused it.
    LocalProtectionError = 4,
    /// The queue pair went to the error state first.
    WrFlushError = 5,
    /// The peer answered with something that does not belong to the request.
    BadResponse = 8,
    /// The peer's NAK: invalid request.
    RemoteInvalidRequest = 9,
    /// The peer's NAK: key, bound or access flag.
    RemoteAccessError = 10,
    /// The peer's NAK: it could not complete the operation.
    RemoteOperationError = 11,
    /// No answer after the last retry.
    RetryExceeded = 12,
    /// The peer had no receive posted after the last RNR retry.
    RnrRetryExceeded = 13,
}

/// What kind of work request completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcOpcode {
    /// A SEND of ours.
    Send,
    /// A WRITE of ours.
    Write,
    /// A READ of ours.
    Read,
    /// A receive filled by the peer's SEND.
    Recv,
    /// A receive consumed by the peer's WRITE with immediate.
    RecvWriteImm,
}

/// A completed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As posted.
    pub wr_id: u64,
    /// How it ended. Unless it is success, only `wr_id` and `qpn` are meaningful beside it.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// Bytes received or read; 0 for sends and writes.
    pub byte_len: u32,
    /// Immediate data, when the peer sent some.
    pub imm: Option<u32>,
    /// The queue pair.
    pub qpn: Qpn,
}

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
    /// Queue pairs still complete into it.
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
    /// A configured table is full.
    #[error("table of {what} is full ({limit})")]
    TableFull {
        /// Which table.
        what: &'static str,
        /// Its size.
        limit: u32,
    },
}

/// What programs do with an RDMA device once their queue pairs are connected.
pub trait Verbs {
    /// Registers `len` bytes at `addr`. The keys are fresh: those of a region that was
    /// deregistered do not come back soon.
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError>;

    /// Forgets the region: its keys are refused from now on.
    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError>;

    /// Queues a send work request.
    fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> Result<(), VerbsError>;

    /// Queues a receive work request.
    fn post_recv(&mut self, qpn: Qpn, wr: RecvWr) -> Result<(), VerbsError>;

    /// The oldest completion, if there is one.
    fn poll_cq(&mut self, cq: CqId) -> Option<Completion>;
}
