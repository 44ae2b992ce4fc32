//! The upper seam: an RDMA device as programs see it.
//!
//! [`Device`] is implemented by the software [`Endpoint`](crate::endpoint::Endpoint) and by
//! hardware NICs behind a verbs library. State machines and tools above this crate are written
//! against it and never see a packet. Calls that need the time take it as an argument; nothing here
//! blocks or returns memory.
//!
//! Protocol and packets may not enter.

use core::net::IpAddr;

use arrayvec::ArrayVec;
use thiserror::Error;

use super::{
    Access, AddressHandle, AsyncEvent, AttrMask, Completion, Connect, CqId, MemoryRegion, Path,
    PdId, QpAttr, QpConfig, QpState, Qpn, RecvWr, SendWr, SrqConfig, SrqId, Transport, VerbsError,
    WindowId, transition,
};
use crate::rng::{HashedCounter, Rng};
use crate::time::Time;
use crate::wire::Psn;

/// Why a batch of work requests was not queued in full. Those before the refused one were queued;
/// those after it were not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{error} (after {accepted} work requests of the batch)")]
pub struct PostError {
    /// Work requests queued.
    pub accepted: usize,
    /// Why the next one was refused.
    pub error: VerbsError,
}

impl From<PostError> for VerbsError {
    fn from(refused: PostError) -> VerbsError {
        refused.error
    }
}

/// An RDMA device, opened by one program.
///
/// A device may lack operations: it refuses them with [`VerbsError::Unsupported`]. Objects that
/// belong to another device, or no longer exist, are refused by their kind ([`VerbsError::NoQp`]
/// and the like).
pub trait Device {
    /// A new protection domain.
    fn alloc_pd(&mut self) -> Result<PdId, VerbsError>;

    /// Removes a protection domain that has no objects.
    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError>;

    /// A new completion queue for at least `depth` completions.
    fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError>;

    /// Changes the depth of a completion queue. It must hold the entries now in the queue.
    fn resize_cq(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError>;

    /// Removes a completion queue that no queue pair uses, with its completions.
    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError>;

    /// Appends completions, oldest first, until the queue is empty or `into` is full.
    ///
    /// # Errors
    /// When the queue does not exist, or the device can no longer read it.
    fn poll_cq<const N: usize>(
        &mut self,
        cq: CqId,
        into: &mut ArrayVec<Completion, N>,
    ) -> Result<(), VerbsError>;

    /// Arms a completion queue: the next completion (or the next solicited one, or error) generates
    /// one notification. Poll the queue after arming it: whether a completion already in it
    /// generates one depends on the device.
    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError>;

    /// Takes the next notification: the completion queue it is for.
    fn poll_notified(&mut self) -> Option<CqId>;

    /// A new queue pair, in state RESET.
    fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError>;

    /// Changes state and attributes of a queue pair (IBA 11.2.4.2).
    fn modify_qp(&mut self, now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError>;

    /// The attributes of a queue pair, its state among them.
    fn query_qp(&mut self, qpn: Qpn) -> Result<QpAttr, VerbsError>;

    /// The transport service of a queue pair.
    fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError>;

    /// Removes a queue pair. Its work requests and unpolled completions are discarded.
    fn destroy_qp(&mut self, now: Time, qpn: Qpn) -> Result<(), VerbsError>;

    /// Registers `len` bytes at `addr`.
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError>;

    /// Changes the domain and the access rights of a region without bound windows. If the device
    /// assigns new keys, the returned region has them.
    fn change_region(
        &mut self,
        region: &MemoryRegion,
        pd: PdId,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError>;

    /// Deregisters the region: its keys are refused from now on.
    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError>;

    /// A new, unbound memory window of type 2 (or 1), and its first remote key. A work request
    /// binds it.
    fn alloc_window(&mut self, pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError>;

    /// Deallocates a memory window: its key is refused from now on.
    fn dealloc_window(&mut self, window: WindowId) -> Result<(), VerbsError>;

    /// A new shared receive queue, its limit armed.
    fn create_srq(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError>;

    /// Sets the limit below which one event is raised.
    fn set_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), VerbsError>;

    /// Sizes and limit of a shared receive queue; the limit is 0 once its event was raised.
    fn query_srq(&mut self, srq: SrqId) -> Result<SrqConfig, VerbsError>;

    /// Removes a shared receive queue that no queue pair uses. Its receives are discarded.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError>;

    /// A new address handle, for datagrams of the domain's queue pairs.
    fn create_ah(&mut self, pd: PdId, path: &Path) -> Result<AddressHandle, VerbsError>;

    /// Destroys an address handle that no posted work request uses.
    fn destroy_ah(&mut self, handle: AddressHandle) -> Result<(), VerbsError>;

    /// Attaches a UD queue pair to a multicast group.
    fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError>;

    /// Detaches from a multicast group.
    fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError>;

    /// Queues send work requests, in order.
    ///
    /// # Errors
    /// The first that is refused; those before it stay queued.
    fn post_send(&mut self, now: Time, qpn: Qpn, wrs: &[SendWr]) -> Result<(), PostError>;

    /// Queues receive work requests, in order.
    ///
    /// # Errors
    /// As [`post_send`](Device::post_send).
    fn post_recv(&mut self, now: Time, qpn: Qpn, wrs: &[RecvWr]) -> Result<(), PostError>;

    /// Queues receives for all queue pairs of a shared receive queue, in order.
    ///
    /// # Errors
    /// As [`post_send`](Device::post_send).
    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr]) -> Result<(), PostError>;

    /// The next asynchronous event.
    fn poll_event(&mut self) -> Option<AsyncEvent>;
}

/// Initial packet sequence numbers that cannot be predicted from earlier ones.
#[derive(Clone, Debug)]
pub struct InitialPsns(HashedCounter);

impl InitialPsns {
    /// The sequence of a seed, which must be random where peers are hostile.
    pub fn new(seed: u64) -> InitialPsns {
        InitialPsns(HashedCounter::new(&mut Rng::of_kind(1, seed)))
    }

    /// The number for the next queue pair.
    pub fn draw(&mut self) -> Psn {
        Psn::new(self.0.next_u32())
    }
}

/// Brings a queue pair of RC or UC from RESET to INIT, where receives can be posted. The peer may
/// do everything its keys allow.
///
/// # Errors
/// Those of [`Device::modify_qp`].
pub fn initialize<D: Device>(device: &mut D, now: Time, qpn: Qpn) -> Result<(), VerbsError> {
    let mask = AttrMask::STATE | AttrMask::PKEY_INDEX | AttrMask::PORT | AttrMask::ACCESS_FLAGS;
    device.modify_qp(now, qpn, &QpAttr { mask, ..QpAttr::to(QpState::Init) })
}

/// Connects a queue pair of RC or UC: RESET to INIT, unless it is there already, then RTR and RTS.
/// The peer may do everything its keys allow.
///
/// # Errors
/// Those of [`Device::modify_qp`]; the queue pair is in RESET then.
pub fn connect<D: Device>(
    device: &mut D,
    now: Time,
    qpn: Qpn,
    peer: &Connect,
) -> Result<(), VerbsError> {
    if device.transport(qpn)? == Transport::Ud {
        return Err(VerbsError::Invalid {
            qpn: qpn.get(),
            why: "datagram queue pairs have no peer",
        });
    }
    bring_up(device, now, qpn, &QpAttr::of(peer))
}

/// Prepares a UD queue pair to send and receive datagrams with this queue key.
///
/// # Errors
/// As [`connect`].
pub fn start_datagrams<D: Device>(
    device: &mut D,
    now: Time,
    qpn: Qpn,
    qkey: u32,
    sq_psn: Psn,
) -> Result<(), VerbsError> {
    let attr = QpAttr { qkey, sq_psn, ..QpAttr::to(QpState::Init) };
    bring_up(device, now, qpn, &attr)
}

/// Limits what a queue pair in RTS sends, in bits per second with IP headers; 0 for no limit.
///
/// # Errors
/// Those of [`Device::modify_qp`].
pub fn limit_rate<D: Device>(
    device: &mut D,
    now: Time,
    qpn: Qpn,
    rate_limit_bps: u64,
) -> Result<(), VerbsError> {
    let mask = AttrMask::STATE | AttrMask::RATE_LIMIT;
    device.modify_qp(now, qpn, &QpAttr { mask, rate_limit_bps, ..QpAttr::to(QpState::Rts) })
}

fn bring_up<D: Device>(
    device: &mut D,
    now: Time,
    qpn: Qpn,
    attr: &QpAttr,
) -> Result<(), VerbsError> {
    let transport = device.transport(qpn)?;
    let steps = [
        (QpState::Reset, QpState::Init),
        (QpState::Init, QpState::Rtr),
        (QpState::Rtr, QpState::Rts),
    ];
    let is_ready = device.query_qp(qpn)?.state == QpState::Init;
    for (from, state) in steps.into_iter().skip(usize::from(is_ready)) {
        let (needs, _) = transition::rule(transport, from, state).unwrap_or_default();
        let step = QpAttr { state, mask: needs | AttrMask::STATE, ..attr.clone() };
        if let Err(error) = device.modify_qp(now, qpn, &step) {
            if from != QpState::Reset {
                device.modify_qp(now, qpn, &QpAttr::to(QpState::Reset))?;
            }
            return Err(error);
        }
    }
    Ok(())
}
