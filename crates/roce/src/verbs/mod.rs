//! The upper seam: the operations of an RDMA device, and their results.
//!
//! | module | what it holds |
//! |---|---|
//! | `ids` | identifiers of objects |
//! | `list` | short lists, of which few are long |
//! | `attributes` | attributes that queue pairs are created, connected and modified with |
//! | `transition` | the legal state transitions of a queue pair, and their attributes |
//! | `path` | the way to a peer |
//! | `error` | why a verb was refused |
//! | `event` | asynchronous events |
//! | [`device`] | the trait that programs use |
//! | here | work requests and completions |
//!
//! Names are those of the InfiniBand verbs. A [`Device`](device::Device) implements them.

mod attributes;
pub mod device;
mod error;
mod event;
mod ids;
mod list;
mod path;
pub(crate) mod transition;

pub use crate::wire::Qpn;
pub use attributes::{AttrMask, Connect, Mtu, QpAttr, QpConfig, QpState, Reliability, SrqConfig};
pub use error::VerbsError;
pub use event::AsyncEvent;
pub use ids::{CqId, PdId, SrqId, WindowId};
pub use list::ShortList;
pub use path::{Ecn, Path};

/// Most scatter/gather elements one work request may carry.
pub const MAX_SGE: usize = 32;

/// Longest message in bytes (IBA 9.7.7: 2^31).
pub const MAX_MESSAGE_BYTES: u64 = 1 << 31;

/// What a memory region may be used for. Local reads are always allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Receives and READ responses may be placed here.
    pub local_write: bool,
    /// The peer may WRITE here. Needs `local_write` (IBA 10.6.3).
    pub remote_write: bool,
    /// The peer may READ from here.
    pub remote_read: bool,
    /// The peer may do atomics here. Needs `local_write` (IBA 10.6.3).
    pub remote_atomic: bool,
    /// Memory windows may be bound to parts of it.
    pub bind_window: bool,
}

impl Access {
    /// Source of sends and writes only.
    pub const LOCAL_READ: Access = Access {
        local_write: false,
        remote_write: false,
        remote_read: false,
        remote_atomic: false,
        bind_window: false,
    };
    /// Local use in both directions.
    pub const LOCAL: Access = Access { local_write: true, ..Access::LOCAL_READ };
    /// Local use, and target of the peer's WRITEs.
    pub const REMOTE_WRITE: Access = Access { remote_write: true, ..Access::LOCAL };
    /// Local use, and source of the peer's READs.
    pub const REMOTE_READ: Access = Access { remote_read: true, ..Access::LOCAL };
    /// Everything that a peer can be allowed to do.
    pub const ALL: Access = Access {
        local_write: true,
        remote_write: true,
        remote_read: true,
        remote_atomic: true,
        bind_window: true,
    };

    /// Whether peers may do anything.
    pub const fn is_remote(&self) -> bool {
        self.remote_write || self.remote_read || self.remote_atomic
    }
}

/// A registered memory region: `len` bytes from `addr`, with its keys.
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

/// A piece of local memory: bytes `addr .. addr + len` of the region with key `lkey`.
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
pub type SgList = ShortList<Sge>;

/// Transport service of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection.
    #[default]
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// The binding of a memory window to a region (IBA 10.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowBinding {
    /// The window.
    pub window: WindowId,
    /// Type 2: the new key of the window, whose low 8 bits the caller chooses. Ignored for type 1,
    /// whose key the endpoint draws anew.
    pub rkey: u32,
    /// Key of the region underneath.
    pub lkey: u32,
    /// First byte of the window.
    pub addr: u64,
    /// Bytes of the window; 0 unbinds.
    pub len: u64,
    /// What the peer may do; only the remote flags apply.
    pub access: Access,
    /// The peer addresses bytes from the window's first byte on, not by the region's addresses.
    pub zero_based: bool,
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendOp {
    /// Into a buffer that the peer has posted.
    #[default]
    Send,
    /// The same, and invalidates the peer's type 2 window with this key. RC only.
    SendInvalidate(u32),
    /// The same, with 32 bits of immediate data for the peer's completion.
    SendImm(u32),
    /// Into the peer's memory; the peer's program is not notified.
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
    /// Stores `swap` in the peer's 64-bit word if that equals `compare`. The original value is
    /// written to our memory (8 bytes), in host byte order.
    CompareSwap {
        /// The word, 8-byte aligned.
        remote_addr: u64,
        /// The peer's key.
        rkey: u32,
        /// Value to compare with.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Adds to the peer's 64-bit word, wrapping. The original value is written to our memory.
    FetchAdd {
        /// The word, 8-byte aligned.
        remote_addr: u64,
        /// The peer's key.
        rkey: u32,
        /// Value to add.
        add: u64,
    },
    /// Invalidates the remote key of our own type 2 window. Nothing is sent.
    LocalInvalidate(u32),
    /// Binds one of our memory windows. Nothing is sent.
    BindWindow(WindowBinding),
}

/// An address handle of a device: the path of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressHandle {
    /// The path.
    pub path: Path,
    /// Identifies it to the device that created it. The software device uses the path alone.
    pub id: u32,
}

impl From<Path> for AddressHandle {
    /// A handle for the software device, which creates none.
    fn from(path: Path) -> AddressHandle {
        AddressHandle { path, id: 0 }
    }
}

/// The destination of a datagram, from the address handle and the UD work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The path.
    pub ah: AddressHandle,
    /// The receiving queue pair; [`MULTICAST_QPN`] for groups.
    pub dest_qp: Qpn,
    /// The receiver's queue key. With the high bit set, the sender's own is used (IBA 10.2.5).
    pub qkey: u32,
}

/// Destination queue pair of multicast datagrams.
pub const MULTICAST_QPN: Qpn = Qpn::new(0x00ff_ffff);

/// Bytes in front of every datagram in a receive buffer: the global route header.
pub const GRH_BYTES: u32 = crate::wire::grh::GRH_BYTES as u32;

/// A send work request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SendWr {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// Local memory: source, or for READ the destination.
    pub sges: SgList,
    /// Generate a completion on success (errors always generate one).
    pub signaled: bool,
    /// Ask the peer for a solicited event.
    pub solicited: bool,
    /// Wait until all READs and atomics posted before have completed.
    pub fence: bool,
    /// Where to, for UD; ignored otherwise.
    pub to: Option<Datagram>,
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
    /// The queue pair's own state did not allow the operation.
    LocalQpError = 2,
    /// Local protection error: key, bounds or access flag.
    LocalProtectionError = 4,
    /// The queue pair went to the error state first.
    WrFlushError = 5,
    /// A memory window could not be bound.
    WindowBindError = 6,
    /// The peer's response does not belong to the request.
    BadResponse = 8,
    /// The peer's NAK: invalid request.
    RemoteInvalidRequest = 9,
    /// The peer's NAK: key, bounds or access flag.
    RemoteAccessError = 10,
    /// The peer's NAK: it could not complete the operation.
    RemoteOperationError = 11,
    /// No response after the last retry.
    RetryExceeded = 12,
    /// The peer had no receive posted after the last RNR retry.
    RnrRetryExceeded = 13,
    /// An error without a code of its own.
    GeneralError = 21,
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
    /// A compare-and-swap of ours.
    CompareSwap,
    /// A fetch-and-add of ours.
    FetchAdd,
    /// A local invalidate.
    LocalInvalidate,
    /// A memory window bound.
    BindWindow,
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
    /// How it ended. On errors, only `wr_id` and `qpn` are valid beside it.
    pub status: WcStatus,
    /// The operation.
    pub opcode: WcOpcode,
    /// Bytes received or read; 0 for sends and writes. For UD it includes the 40 bytes of the route
    /// header.
    pub byte_len: u32,
    /// Immediate data, when the peer sent some.
    pub imm: Option<u32>,
    /// Key that the peer's SEND invalidated here.
    pub invalidated: Option<u32>,
    /// The queue pair.
    pub qpn: Qpn,
    /// The queue pair that sent it, for UD.
    pub src_qp: Option<Qpn>,
    /// It came over IPv4. For UD: the 40 bytes in front of it end with an IPv4 header.
    pub ipv4: bool,
    /// The peer asked for a solicited event.
    pub solicited: bool,
}

impl Completion {
    /// A completion with a status and nothing else.
    pub const fn new(wr_id: u64, status: WcStatus, opcode: WcOpcode, qpn: Qpn) -> Completion {
        Completion {
            wr_id,
            status,
            opcode,
            byte_len: 0,
            imm: None,
            invalidated: None,
            qpn,
            src_qp: None,
            ipv4: false,
            solicited: false,
        }
    }
}
