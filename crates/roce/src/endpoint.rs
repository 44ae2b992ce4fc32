//! One RoCE endpoint: a whole software RDMA device, except for the packets' payload.
//!
//! [`Endpoint`] owns protection domains, memory regions, completion queues and queue pairs. It is a
//! state machine without I/O: calls report events, and `poll_*` returns the work to do. It holds no
//! lock, starts no thread and never blocks.
//!
//! The work per packet is bounded and independent of the number of queue pairs: a packet finds its
//! queue pair by index, queue pairs with something to send are in a queue, and deadlines in a heap.
//! Nothing is allocated after a queue pair has been created and connected, but for the telemetry
//! that one returns, the order of senders whose windows are advertised, and what selective repeat
//! keeps of more packets and READs than ever before.

mod device;
mod output;
mod schedule;

use alloc::collections::VecDeque;
use core::net::{IpAddr, SocketAddr};

use arrayvec::ArrayVec;

use crate::congestion::advertised::Advertiser;
use crate::congestion::rtt::RttMeter;
use crate::congestion::watermark::WatermarkError;
use crate::congestion::{Watermark, WindowReport};
use crate::cq::CqTable;
use crate::direct::{
    Backlog, Direct, Handed, Holding, MessageAck, MessageHeader, Posted, QpDescriptor,
};
use crate::events::EventQueue;
use crate::io::Origin;
use crate::memory::pd::PdTable;
use crate::memory::region::{RegionTable, Registration};
use crate::multicast::Groups;
use crate::outbox::Outbox;
use crate::qp::{Context, IsStalled, Qp};
use crate::report::{Cause, LastError, QpProgress, QpReport};
use crate::rng::Rng;
use crate::seeded::{Bug, Seeded};
use crate::slab::{Layout, Slab};
use crate::srq::SrqTable;
use crate::time::{Duration, Time};
use crate::verbs::device::InitialPsns;
use crate::verbs::{
    Access, Completion, CqId, MemoryRegion, Path, PdId, Qpn, RecvWr, SendOp, SendWr, SrqId,
    Transport, VerbsError, WindowBinding, WindowId,
};
use crate::wire::telemetry::Report;
use crate::wire::{Headers, Operation, Psn};

pub use crate::counters::{Counters, QpCounters};
use crate::deadlines::Deadlines;
pub use crate::memory::sg::{Extent, Placement, Placements};
pub use crate::qp::context::Transmit;
pub use crate::qp::delivery::{AtomicJob, Delivery, Insert};
pub use crate::report::TimeoutReason;
pub use crate::verbs::transition::MAX_RD_ATOMIC;
pub use crate::verbs::{
    AsyncEvent, AttrMask, Connect, Mtu, QpAttr, QpConfig, QpState, Reliability, SrqConfig,
};
pub(crate) use output::Output;
use schedule::Schedule;

/// Bits of a queue pair number.
const QPN_BITS: u32 = 24;

/// Bits of a queue pair number below a prefix.
const PREFIXED_QPN_BITS: u32 = 16;

/// How long a driver may sleep while messages that were handed over have no acknowledgement.
const ACK_INTERVAL: Duration = Duration::from_millis(100);

/// Errors kept of destroyed queue pairs.
pub const MAX_PAST_ERRORS: usize = 16;

/// Most senders that are told of a larger window at a time.
const MOST_TOLD: usize = 4;

/// Queue pairs whose acknowledgements may wait: no turn looks at more.
const MAX_WAITING_ACKS: usize = 8;

/// Sizes and limits of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Most queue pairs, up to 2^20.
    pub max_qps: u32,
    /// Most completion queues, up to 2^28.
    pub max_cqs: u32,
    /// Most memory regions, up to 2^27, and most memory windows, up to 2^19; the larger, the sooner
    /// keys are reused.
    pub max_regions: u32,
    /// Most entries of one completion queue.
    pub max_cqe: u32,
    /// Most work requests of one send or receive queue.
    pub max_qp_wr: u32,
    /// Most packets of one queue pair in a row while others wait, at least 1.
    pub burst_packets: u32,
    /// High 8 bits of every queue pair number, if not 0: distinguishes endpoints that share an
    /// address. `max_qps` is then at most 2^12.
    pub qpn_prefix: u8,
    /// Largest path MTU of the wire, and the longest datagram.
    pub mtu: Mtu,
    /// Seed of keys, queue pair numbers and initial PSNs: random where peers are hostile.
    pub seed: u64,
}

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        EndpointConfig {
            max_qps: 1 << 12,
            max_cqs: 1 << 12,
            max_regions: 1 << 14,
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 15,
            burst_packets: 32,
            qpn_prefix: 0,
            mtu: Mtu::M4096,
            seed: 0,
        }
    }
}

/// Returns how many of this number of packets of a service the wire admits on a path to a queue
/// pair.
pub(crate) type Admits<'a> = dyn FnMut(&Path, Qpn, Transport, usize) -> usize + 'a;

#[derive(Debug)]
struct QpEntry {
    qp: Qp,
    counters: Counters,
    /// In the ready queue, or parked.
    is_ready: bool,
}

/// A software RDMA device.
///
/// # Order of calls
///
/// In: [`handle_packet`](Endpoint::handle_packet) for each packet that arrived,
/// [`handle_timeout`](Endpoint::handle_timeout) at the time that
/// [`poll_timeout`](Endpoint::poll_timeout) returned, and the verbs
/// ([`Device`](crate::verbs::device::Device)) at any time. Time never goes backwards from call to
/// call.
///
/// Out: after any of these, [`poll_transmit`](Endpoint::poll_transmit) until it returns `None`;
/// then `poll_timeout` for the next deadline, and [`poll_cq`](Endpoint::poll_cq) for completions.
///
/// Two rules concern memory, as this type handles only addresses:
/// - the placements that `handle_packet` returns are filled before the next call, so that no
///   completion is seen before its data;
/// - a [`Transmit`] is turned into bytes, or at least its memory is borrowed, before the next call
///   that changes the endpoint other than `poll_transmit`: such a call may deregister the region.
///
/// [`world::turn`](crate::world::turn) keeps this order.
#[derive(Debug)]
pub struct Endpoint {
    config: EndpointConfig,
    psns: InitialPsns,
    pds: PdTable,
    regions: RegionTable,
    cqs: CqTable,
    srqs: SrqTable,
    groups: Groups,
    events: EventQueue,
    qps: Slab<QpEntry>,
    schedule: Schedule,
    deadlines: Deadlines,
    /// Divides our link among the senders whose windows we advertise.
    advertiser: Advertiser,
    counters: Counters,
    past_errors: VecDeque<LastError>,
    /// Messages handed to local peers and without an acknowledgement, and when the driver last
    /// looked for one.
    handed_over: u64,
    looked_at: Time,
    /// Responses gathered before they are sent.
    pub(crate) outbox: Outbox,
    seeded: Seeded,
}

impl Endpoint {
    /// An endpoint without any objects.
    pub fn new(config: EndpointConfig) -> Endpoint {
        let config = EndpointConfig { burst_packets: config.burst_packets.max(1), ..config };
        let [mut keys, mut numbers, mut handles] =
            [2, 3, 4].map(|kind| Rng::of_kind(kind, config.seed));
        let qps = Slab::sealed(qpn_layout(&config), &mut numbers);
        Endpoint {
            config,
            pds: PdTable::default(),
            regions: RegionTable::new(config.max_regions, &mut keys),
            cqs: CqTable::new(config.max_cqs, &mut handles),
            srqs: SrqTable::new(&mut handles),
            groups: Groups::default(),
            events: EventQueue::default(),
            qps,
            schedule: Schedule::default(),
            deadlines: Deadlines::default(),
            advertiser: Advertiser::default(),
            counters: Counters::default(),
            seeded: Seeded::default(),
            past_errors: VecDeque::new(),
            handed_over: 0,
            looked_at: Time::ZERO,
            outbox: Outbox::default(),
            psns: InitialPsns::new(config.seed),
        }
    }

    /// Enables a seeded bug, or none, from now on.
    #[cfg(feature = "seeded-bugs")]
    pub fn plant(&mut self, bug: Option<Bug>) {
        self.seeded = Seeded::new(bug);
        self.regions.seeded = self.seeded;
        self.cqs.seeded = self.seeded;
    }

    // ---- objects -------------------------------------------------------------------------------

    /// A new protection domain.
    pub fn alloc_pd(&mut self) -> PdId {
        self.pds.alloc()
    }

    /// Removes a protection domain that has no objects.
    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        self.pds.check(pd)?;
        if self.regions.uses_pd(pd) {
            return Err(VerbsError::PdInUse(pd.0));
        }
        self.pds.dealloc(pd)
    }

    /// A new completion queue for `depth` completions.
    pub fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        within(depth, self.config.max_cqe, "completion queue entries")?;
        self.cqs.create(depth)
    }

    /// Removes a completion queue that no queue pair uses, with its completions.
    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        self.cqs.destroy(cq)?;
        self.events.forget(|event| event == AsyncEvent::CqError(cq));
        Ok(())
    }

    /// Whether completions were lost because the queue was full: it takes no more, and must be
    /// destroyed with its queue pairs. `None` if it does not exist.
    pub fn cq_overrun(&self, cq: CqId) -> Option<bool> {
        self.cqs.overrun(cq)
    }

    /// A new queue pair, in state RESET: receives may be posted, and it can be connected.
    /// `max_recv_wr` is ignored when it uses a shared receive queue.
    pub fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError> {
        self.pds.check(config.pd)?;
        self.cqs.exists(config.send_cq)?;
        self.cqs.exists(config.recv_cq)?;
        within(config.max_send_wr, self.config.max_qp_wr, "send work requests")?;
        within(config.max_recv_wr, self.config.max_qp_wr, "receive work requests")?;
        config.srq.map_or(Ok(()), |srq| self.srqs.check(srq, config.pd))?;
        let first_psn = self.psns.draw();
        let limit = self.qps.layout().limit;
        let mtu = self.config.mtu;
        let made = self.qps.insert_with(|id, _| QpEntry {
            qp: Qp::new(Qpn::new(id), &config, first_psn, nowhere(), mtu),
            counters: Counters::default(),
            is_ready: false,
        });
        let id = made.ok_or(VerbsError::TableFull { what: "queue pairs", limit })?;
        self.cqs.attach(config.send_cq);
        self.cqs.attach(config.recv_cq);
        self.pds.attach(config.pd);
        if let Some(srq) = config.srq {
            self.srqs.attach(srq);
        }
        Ok(Qpn::new(id))
    }

    /// Removes a queue pair. Its outstanding work requests and unpolled completions are discarded.
    /// Receives taken from a shared receive queue whose completions were not polled return to it.
    /// Windows of type 2 that are bound to it are unbound.
    pub fn destroy_qp(&mut self, now: Time, qpn: Qpn) -> Result<(), VerbsError> {
        let slot = self.slot(qpn)?;
        self.on_qp(now, qpn, |qp, cx| {
            qp.reset(cx);
            Ok(())
        })?;
        let Some(entry) = self.qps.remove(qpn.get()) else {
            return Err(no_qp(qpn));
        };
        self.remember(entry.qp.last_error());
        for cq in entry.qp.cqs() {
            self.cqs.detach(cq);
        }
        if let Some(srq) = entry.qp.srq() {
            self.srqs.detach(srq);
        }
        self.pds.detach(entry.qp.pd());
        self.groups.forget(qpn);
        self.regions.forget_qp(qpn);
        self.events.forget(|event| event.qpn() == Some(qpn));
        self.deadlines.set(slot, None);
        self.advertiser.forget(slot);
        if entry.is_ready {
            self.schedule.forget(slot);
        }
        Ok(())
    }

    /// Changes state and attributes of a queue pair (IBA 11.2.4.2).
    ///
    /// Going to RESET discards all work without completions, and unpolled completions, as
    /// [`destroy_qp`](Endpoint::destroy_qp) does; going to ERROR completes all work as flushed.
    /// Without the state in the mask, attributes are set within the current state.
    ///
    /// # Errors
    /// [`VerbsError::Transition`] when the transition is not legal, an attribute that it needs is
    /// missing, or one is set that it does not allow; [`VerbsError::Invalid`] for values out of
    /// range. Nothing is changed then.
    pub fn modify_qp(&mut self, now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError> {
        let mtu = self.config.mtu;
        self.on_qp(now, qpn, |qp, cx| qp.modify(cx, attr, mtu))?;
        let is_over = |state| matches!(state, QpState::Reset | QpState::Error);
        if self.qp_state(qpn).is_some_and(is_over)
            && let Ok(slot) = self.slot(qpn)
        {
            self.advertiser.forget(slot);
        }
        Ok(())
    }

    /// The transport service of a queue pair.
    pub fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError> {
        self.entry(qpn).map(|entry| entry.qp.transport())
    }

    /// The attributes of a queue pair, its state among them.
    pub fn query_qp(&self, qpn: Qpn) -> Result<QpAttr, VerbsError> {
        self.entry(qpn).map(|entry| entry.qp.query())
    }

    /// Whether all these requests would be accepted if posted now, one after the other: for callers
    /// that post all or none.
    ///
    /// # Errors
    /// What posting the first refused request would return. Nothing is posted.
    pub fn check_sends<'w>(
        &self,
        qpn: Qpn,
        wrs: impl ExactSizeIterator<Item = &'w SendWr>,
    ) -> Result<(), VerbsError> {
        self.entry(qpn)?.qp.check_sends(wrs)
    }

    /// Where the next packet of a queue pair goes: its path, and the queue pair at its end.
    pub fn destination(&self, qpn: Qpn) -> Option<(Path, Qpn)> {
        self.entry(qpn).ok()?.qp.next_destination()
    }

    /// The state of a queue pair, if it exists.
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.entry(qpn).ok().map(|entry| entry.qp.state())
    }

    // ---- memory --------------------------------------------------------------------------------

    /// Registers `len` bytes at `backing` in [`Memory`](crate::world::Memory). Work requests and
    /// the peer address them from `addr` on.
    pub fn register_at(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        backing: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        self.pds.check(pd)?;
        self.regions.register(Registration { pd, addr, len, backing, access })
    }

    /// Changes the domain and the access rights of a region without bound windows. Its keys stay.
    pub fn change_region(&mut self, lkey: u32, pd: PdId, access: Access) -> Result<(), VerbsError> {
        self.pds.check(pd)?;
        self.regions.change(lkey, pd, access)
    }

    /// A new, unbound memory window, and its first remote key. Type 2 windows are bound by work
    /// requests ([`SendOp::BindWindow`](crate::verbs::SendOp)), type 1 windows also by
    /// [`bind_window`](Endpoint::bind_window).
    pub fn alloc_window(&mut self, pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError> {
        self.pds.check(pd)?;
        self.regions.alloc_window(pd, type_2)
    }

    /// Deallocates a memory window: its key is refused from now on.
    pub fn dealloc_window(&mut self, window: WindowId) -> Result<(), VerbsError> {
        self.regions.dealloc_window(window)
    }

    /// Binds a type 1 window in the order of the queue pair's sends, and returns its new key.
    pub fn bind_window(
        &mut self,
        now: Time,
        qpn: Qpn,
        wr_id: u64,
        binding: WindowBinding,
        signaled: bool,
    ) -> Result<u32, VerbsError> {
        self.entry(qpn)?;
        if self.regions.is_type_2(binding.window)? {
            let why = "windows of type 2 are bound by work requests";
            return Err(VerbsError::Invalid { qpn: qpn.get(), why });
        }
        let op = SendOp::BindWindow(binding);
        self.post_send(now, qpn, SendWr { wr_id, op, signaled, ..SendWr::default() })?;
        self.regions.last_drawn_key(binding.window)
    }

    // ---- events, notifications, shared receives, groups ----------------------------------------

    /// The next asynchronous event.
    #[inline]
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.events.poll()
    }

    /// Arms a completion queue: the next completion (or the next solicited one, or error) generates
    /// one notification, returned by [`poll_notified`](Endpoint::poll_notified). An unpolled
    /// completion generates it immediately.
    pub fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError> {
        self.cqs.arm(cq, solicited_only)
    }

    /// Takes the next notification: the completion queue it is for.
    #[inline]
    pub fn poll_notified(&mut self) -> Option<CqId> {
        self.cqs.poll_notified()
    }

    /// Changes the depth of a completion queue. It must hold the entries now in the queue.
    pub fn resize_cq(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError> {
        within(depth, self.config.max_cqe, "completion queue entries")?;
        self.cqs.resize(cq, depth)
    }

    /// A new shared receive queue, its limit armed.
    pub fn create_srq(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError> {
        self.pds.check(config.pd)?;
        within(config.max_wr, self.config.max_qp_wr, "shared receive work requests")?;
        let srq = self.srqs.create(config)?;
        self.pds.attach(config.pd);
        Ok(srq)
    }

    /// Sets the limit below which one event is raised; raises it immediately if fewer receives are
    /// left.
    pub fn set_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), VerbsError> {
        self.srqs.set_limit(srq, limit, &mut self.events)
    }

    /// Sizes and limit of a shared receive queue; the limit is 0 once its event was raised.
    pub fn query_srq(&self, srq: SrqId) -> Result<SrqConfig, VerbsError> {
        self.srqs.query(srq)
    }

    /// Removes a shared receive queue that no queue pair uses. Its receives are discarded.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        let pd = self.srqs.destroy(srq)?;
        self.pds.detach(pd);
        self.events.forget(|event| event == AsyncEvent::SrqLimitReached(srq));
        Ok(())
    }

    /// Queues a receive work request for all queue pairs of a shared receive queue.
    pub fn post_srq_recv(&mut self, srq: SrqId, wr: RecvWr) -> Result<(), VerbsError> {
        self.srqs.post(srq, wr)
    }

    /// Attaches a UD queue pair to a multicast group. Attaching twice has no effect.
    pub fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        self.check_group(qpn, group)?;
        self.groups.attach(qpn, group)
    }

    /// Detaches from a multicast group.
    pub fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        self.check_group(qpn, group)?;
        let was_attached = self.groups.detach(qpn, group);
        let why = "it is not attached to this group";
        was_attached.then_some(()).ok_or(VerbsError::Invalid { qpn: qpn.get(), why })
    }

    fn check_group(&self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        let qpn_and = |why| VerbsError::Invalid { qpn: qpn.get(), why };
        if self.entry(qpn)?.qp.transport() != Transport::Ud {
            return Err(qpn_and("only datagram queue pairs join groups"));
        }
        let is_group = group.to_canonical().is_multicast();
        is_group.then_some(()).ok_or(qpn_and("the address is no multicast group"))
    }

    /// Counters of this endpoint, destroyed queue pairs included.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Counters of one queue pair.
    pub fn qp_counters(&self, qpn: Qpn) -> Option<&QpCounters> {
        self.entry(qpn).ok().map(|entry| &entry.counters)
    }

    /// Round-trip times of a reliable connection.
    pub fn qp_rtt(&self, qpn: Qpn) -> Option<&RttMeter> {
        self.entry(qpn).ok()?.qp.rtt()
    }

    /// The rate that congestion control allows a queue pair now, in bits per second; `None` if not
    /// limited.
    pub fn qp_rate_bps(&self, qpn: Qpn) -> Option<u64> {
        self.entry(qpn).ok()?.qp.rate_bps()
    }

    /// The windows that congestion control by delay sets now.
    pub fn windows(&self) -> impl Iterator<Item = WindowReport> {
        self.qps.iter().filter_map(|entry| entry.qp.window_report())
    }

    /// Every queue pair in its current state, in a stable order.
    pub fn queue_pairs(&self) -> impl Iterator<Item = QpReport> {
        self.qps.iter().map(|entry| entry.qp.report(&entry.counters))
    }

    /// How far a reliable connection has come and what it may send now; `None` for others, and
    /// before it is connected.
    pub fn progress(&self, qpn: Qpn) -> Option<QpProgress> {
        self.entry(qpn).ok()?.qp.progress()
    }

    /// Why a queue pair last failed, if it did.
    pub fn last_error(&self, qpn: Qpn) -> Option<LastError> {
        self.entry(qpn).ok()?.qp.last_error()
    }

    /// The last errors of destroyed queue pairs, oldest first, at most [`MAX_PAST_ERRORS`].
    pub fn past_errors(&self) -> impl Iterator<Item = &LastError> {
        self.past_errors.iter()
    }

    // ---- events --------------------------------------------------------------------------------

    /// Processes a packet whose ICRC was verified. Returns what to place where.
    ///
    /// A datagram to a group goes to several queue pairs: call
    /// [`handle_packet_for`](Endpoint::handle_packet_for) instead for each one that
    /// [`next_of_group`](Endpoint::next_of_group) returns.
    #[must_use]
    pub fn handle_packet(
        &mut self,
        now: Time,
        origin: &Origin,
        headers: &Headers,
        payload_len: usize,
    ) -> Delivery {
        self.handle_packet_for(headers.bth().dest_qp, now, origin, headers, payload_len)
    }

    /// A queue pair attached to the group: the first, or the next after `after`.
    pub fn next_of_group(&self, group: IpAddr, after: Option<Qpn>) -> Option<Qpn> {
        self.groups.next(group, after)
    }

    /// Processes a packet for the queue pair `qpn`, whatever its destination QPN.
    #[must_use]
    pub fn handle_packet_for(
        &mut self,
        qpn: Qpn,
        now: Time,
        origin: &Origin,
        headers: &Headers,
        payload_len: usize,
    ) -> Delivery {
        let mut delivery = Delivery::default();
        self.handle_packet_into(&mut delivery, qpn, now, origin, headers, payload_len);
        delivery
    }

    /// The same with the result in place: returning it would copy it.
    pub(crate) fn handle_packet_into(
        &mut self,
        delivery: &mut Delivery,
        qpn: Qpn,
        now: Time,
        origin: &Origin,
        headers: &Headers,
        payload_len: usize,
    ) {
        self.counters.packets_received += 1;
        let Some(slot) = self.qps.find(qpn.get()) else {
            self.counters.unknown_qp += 1;
            return;
        };
        self.with_qp(slot, now, delivery, |qp, cx| {
            cx.own.packets_received += 1;
            qp.handle_packet(cx, origin, headers, payload_len);
        });
        if headers.hint() != 0 {
            self.divide_link(slot, now);
        }
    }

    /// A sender may have announced its demand: windows of all senders may change.
    #[cold]
    fn divide_link(&mut self, slot: u32, now: Time) {
        let Some(qp) = self.qps.at_mut(slot).map(|entry| &mut entry.qp) else {
            return;
        };
        let Some((params, mtu, demand)) = qp.take_demand() else {
            return;
        };
        let mut told = ArrayVec::<u32, MOST_TOLD>::new();
        self.advertiser
            .heard(now, slot, (&params, mtu), demand, |slot| told.try_push(slot).is_ok());
        for slot in told {
            self.with_qp(slot, now, &mut Delivery::default(), |qp, _| qp.owe_window());
        }
    }

    /// Takes what switches have written into a packet for the queue pair `qpn`, before the packet
    /// itself.
    pub(crate) fn handle_telemetry(
        &mut self,
        qpn: Qpn,
        now: Time,
        origin: &Origin,
        operation: Operation,
        report: &Report,
    ) {
        let slot = self.qps.find(qpn.get());
        let strays = self.seeded.is(Bug::TelemetryOfOtherFlow) && !report.is_echo();
        let slot = if strays { self.other_flow(slot) } else { slot };
        if let Some(entry) = slot.and_then(|slot| self.qps.at_mut(slot)) {
            entry.qp.handle_telemetry(now, origin, operation, report);
        }
    }

    /// The control plane of the network reports the longest queue on the way of a connection's
    /// packets. It is heard in the state RTS, by congestion controls that have no better signal
    /// where nothing is marked: DCQCN and by delay.
    ///
    /// # Errors
    /// When nothing is to be made of it; the queue pair goes on as before, and `watermarks_refused`
    /// counts.
    pub fn handle_watermark(
        &mut self,
        qpn: Qpn,
        now: Time,
        watermark: &Watermark,
    ) -> Result<(), WatermarkError> {
        let heard = watermark.check(now).and_then(|()| {
            let slot = self.qps.find(qpn.get());
            let is_heard = slot.and_then(|slot| {
                self.with_qp(slot, now, &mut Delivery::default(), |qp, _| {
                    qp.handle_watermark(now, watermark)
                })
            });
            is_heard.filter(|&is_heard| is_heard).map(|_| ()).ok_or(WatermarkError::NoConnection)
        });
        match heard {
            Ok(()) => self.counters.watermarks_heard += 1,
            Err(_) => self.counters.watermarks_refused += 1,
        }
        heard
    }

    /// The reliable connections that send: the queue pair, the path of its packets, and the queue
    /// pair at its end.
    pub fn connections(&self) -> impl Iterator<Item = (Qpn, Path, Qpn)> {
        let connected =
            |qp: &&Qp| qp.transport() == Transport::Rc && matches!(qp.state(), QpState::Rts);
        self.qps.iter().map(|entry| &entry.qp).filter(connected).filter_map(|qp| {
            let (path, dest) = qp.next_destination()?;
            Some((qp.qpn(), path, dest))
        })
    }

    /// With [`Bug::TelemetryOfOtherFlow`], the queue pair that gets what is for the one in this
    /// slot.
    fn other_flow(&self, slot: Option<u32>) -> Option<u32> {
        let has_telemetry = |&other: &u32| {
            let entry = self.qps.at(other).filter(|_| Some(other) != slot);
            entry.is_some_and(|entry| entry.qp.has_telemetry())
        };
        (0..self.config.max_qps).find(has_telemetry).or(slot)
    }

    /// Processes a packet whose [`Delivery::owed_packets`] were not 0. If they still are not, the
    /// packet is dropped, and a NAK requests it after the responses.
    #[must_use]
    pub fn handle_held(
        &mut self,
        qpn: Qpn,
        now: Time,
        headers: &Headers,
        payload_len: usize,
    ) -> Delivery {
        let mut delivery = Delivery::default();
        if let Some(slot) = self.qps.find(qpn.get()) {
            self.with_qp(slot, now, &mut delivery, |qp, cx| {
                qp.handle_held(cx, headers, payload_len);
            });
        }
        delivery
    }

    /// Takes the original value of the word of an [`Insert::Atomic`].
    pub fn complete_atomic(&mut self, now: Time, job: &AtomicJob, original: u64) {
        let Some(slot) = self.qps.find(job.qpn.get()) else {
            return;
        };
        let unused = &mut Delivery::default();
        self.with_qp(slot, now, unused, |qp, _| qp.complete_atomic(job.psn, original));
    }

    /// Carries out what is due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        self.handle_timeout_unless(now, &mut |_, _| false);
    }

    /// The same, except that ACK timeouts of stalled peers use no retry.
    pub(crate) fn handle_timeout_unless(&mut self, now: Time, is_stalled: &mut IsStalled<'_>) {
        while let Some((at, slot)) = self.deadlines.earliest()
            && at <= now
        {
            self.handle_timeout_of(slot, now, is_stalled);
        }
    }

    /// Apart, because drivers ask in every turn and nearly always nothing is due.
    #[inline(never)]
    fn handle_timeout_of(&mut self, slot: u32, now: Time, is_stalled: &mut IsStalled<'_>) {
        let unused = &mut Delivery::default();
        let handled = self.with_qp(slot, now, unused, |qp, cx| qp.handle_timeout(cx, is_stalled));
        if handled.is_none() {
            self.deadlines.set(slot, None);
        }
    }

    /// When [`handle_timeout`](Endpoint::handle_timeout) has to be called next, and why.
    pub fn poll_timeout(&self) -> Option<(Time, TimeoutReason)> {
        let (_, slot) = self.deadlines.earliest()?;
        self.qps.at(slot)?.qp.deadline()
    }

    /// When that is, without the reason: cheaper.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.deadlines.earliest().map(|(at, _)| at)
    }

    /// The next packet to send, to any destination. Queue pairs take turns and send in bursts.
    #[inline]
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        let mut output = Output::default();
        self.poll_admitted(now, &mut |_, _, _, packets| packets, &mut output);
        output.into_transmit()
    }

    /// Puts the next packet to a destination that admits it into `output`; false if there is none.
    /// Queue pairs whose destinations admit nothing are parked until [`unpark`](Endpoint::unpark).
    pub(crate) fn poll_admitted(
        &mut self,
        now: Time,
        admits: &mut Admits<'_>,
        output: &mut Output,
    ) -> bool {
        output.clear();
        while let Some(slot) = self.schedule.front() {
            if !self.take_turn(slot, admits) {
                self.schedule.park();
                continue;
            }
            let Output { delivery, packet, telemetry } = output;
            let is_advertised = self.poll_qp(slot, now, (delivery, packet), |qp, cx| {
                qp.poll_transmit(cx);
                if qp.has_telemetry() {
                    *telemetry = qp.take_telemetry(cx);
                }
                qp.is_advertised()
            });
            if is_advertised == Some(true) {
                self.put_hint(slot, output);
            }
            if output.packet.is_some() {
                self.end_turn_if_due(slot);
                return true;
            }
            self.leave_queue();
        }
        false
    }

    /// Completes a packet of a queue pair whose receiver advertises windows.
    #[cold]
    fn put_hint(&mut self, slot: u32, output: &mut Output) {
        if let (Some(entry), Some(packet)) = (self.qps.at_mut(slot), &mut output.packet) {
            let is_ack = packet.1.bth().opcode.operation() == Operation::Acknowledge;
            let window = if is_ack { self.advertiser.window(slot) } else { None };
            entry.qp.put_hint(packet, window);
        }
    }

    /// The queue pair at the front of the ready queue has nothing more to send.
    fn leave_queue(&mut self) {
        let slot = self.schedule.leave();
        if let Some(entry) = slot.and_then(|slot| self.qps.at_mut(slot)) {
            entry.is_ready = false;
        }
    }

    /// Begins or continues the turn of a queue pair; `false` if its destination admits nothing.
    ///
    /// The wire is asked for one packet, then for two, four and so on: a queue pair with one small
    /// message takes no room from others, and one with long messages asks seldom.
    fn take_turn(&mut self, slot: u32, admits: &mut Admits<'_>) -> bool {
        let Some(QpEntry { qp, .. }) = self.qps.at(slot) else {
            return true;
        };
        self.schedule.begin_turn(self.config.burst_packets);
        if self.schedule.has_grant() || !qp.wants_to_send() {
            return true;
        }
        let Some((path, dest)) = qp.next_destination() else {
            return true;
        };
        let waits_behind_own = self.outbox.len() > 0 && self.outbox.holds(qp.qpn());
        let wanted = self.schedule.wanted();
        let service = qp.transport();
        let mut ask = || admits(&path, dest, service, wanted as usize) as u32;
        let granted = if waits_behind_own { 0 } else { ask() };
        // Each datagram may have its own destination.
        let ask_for = if service == Transport::Ud { 1 } else { 2 * wanted };
        self.schedule.grant(granted, ask_for)
    }

    /// Packets admitted and not made yet are admitted no longer: the wire has sent a burst.
    pub(crate) fn end_grant(&mut self) {
        if !self.seeded.is(Bug::GrantKept) {
            self.schedule.end_grant();
        }
    }

    /// Returns parked queue pairs to the ready queue, if it is time to query the wire.
    #[inline]
    pub(crate) fn unpark(&mut self, now: Time) {
        let most = if self.seeded.is(Bug::ParkedForgotten) { 1 } else { usize::MAX };
        self.schedule.unpark(now, most);
    }

    /// Whether no queue pair has anything to send.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.schedule.is_empty() && self.outbox.len() == 0
    }

    /// Sets how long queue pairs stay parked: to the wire's next wake-up, or the next turn if it
    /// has none.
    pub(crate) fn park_until(&mut self, now: Time, at: Option<Time>) {
        let is_waiting = self.schedule.has_parked() || self.outbox.len() > 0;
        self.schedule.park_until(is_waiting.then(|| at.unwrap_or(now)));
    }

    /// The next destination of every queue pair that has something to send and is waiting for its
    /// turn or for the wire.
    pub fn waiting_paths(&self) -> impl Iterator<Item = Path> {
        let waiting = self.schedule.waiting().filter_map(|slot| self.qps.at(slot));
        let waiting = waiting.filter(|entry| entry.qp.wants_to_send());
        waiting.filter_map(|entry| entry.qp.next_destination()).map(|(path, _)| path)
    }

    /// The wire has room again, sooner than it said: the next turn queries it for parked queue
    /// pairs.
    pub fn readmit(&mut self, now: Time) {
        self.schedule.readmit(now);
    }

    /// When to query the wire for parked queue pairs again.
    pub(crate) fn parked_until(&self) -> Option<Time> {
        self.schedule.parked_until()
    }

    /// The next response to READs and atomics of the peer, ahead of other queue pairs' turns.
    pub(crate) fn poll_response(&mut self, qpn: Qpn, now: Time) -> Option<Transmit> {
        let slot = self.qps.find(qpn.get())?;
        let mut output = Output::default();
        self.poll_qp(slot, now, output.parts(), |qp, cx| qp.poll_response(cx));
        output.into_transmit()
    }

    fn end_turn_if_due(&mut self, slot: u32) {
        if self.schedule.count_packet() {
            if !self.qps.at(slot).is_some_and(|entry| entry.qp.wants_to_send()) {
                self.leave_queue();
            }
            return;
        }
        self.schedule.pass_on();
        if let Some(entry) = self.qps.at_mut(slot) {
            entry.qp.end_burst();
        }
    }

    fn remember(&mut self, error: Option<LastError>) {
        // A queue pair that the program stops before it destroys it has not failed.
        let Some(error) = error.filter(|error| error.cause != Cause::Program) else {
            return;
        };
        if self.past_errors.len() == MAX_PAST_ERRORS {
            self.past_errors.pop_front();
        }
        self.past_errors.push_back(error);
    }

    // ---- verbs ---------------------------------------------------------------------------------

    pub(crate) fn check_pd(&self, pd: PdId) -> Result<(), VerbsError> {
        self.pds.check(pd)
    }

    /// Registers `len` bytes at `addr`. The keys are new: those of a deregistered region are not
    /// reused soon.
    pub fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        self.register_at(pd, addr, len, addr, access)
    }

    /// Deregisters the region: its keys are refused from now on.
    pub fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        self.regions.deregister(lkey)
    }

    /// Queues a send work request: one of a batch of
    /// [`Device::post_send`](crate::verbs::device::Device).
    pub fn post_send(&mut self, now: Time, qpn: Qpn, wr: SendWr) -> Result<(), VerbsError> {
        self.on_qp(now, qpn, |qp, cx| qp.post_send(cx, wr))
    }

    /// Carries a send work request out at once if `direct` can, and queues it otherwise.
    pub fn post_send_direct(
        &mut self,
        now: Time,
        qpn: Qpn,
        mut wr: SendWr,
        direct: &mut dyn Direct,
    ) -> Result<Posted, VerbsError> {
        self.on_qp(now, qpn, |qp, cx| qp.post_direct(cx, &mut wr, direct))
    }

    /// Carries out requests that were held ([`Posted::Held`]), once the packets before them are
    /// acknowledged. What is refused then is sent as packets. One may begin while `budget` has a
    /// byte left; the bytes of each are taken off it.
    pub fn carry_out_held(
        &mut self,
        now: Time,
        qpn: Qpn,
        direct: &mut dyn Direct,
        budget: &mut u32,
    ) -> Backlog {
        // Drivers ask in every turn.
        if !self.has_held(qpn) {
            return Backlog::Empty;
        }
        let done = self.on_qp(now, qpn, |qp, cx| Ok(qp.carry_out_held(cx, direct, budget)));
        // Without the queue pair there is nothing to do.
        done.unwrap_or(Backlog::Empty)
    }

    /// A message that a local peer hands over, from the process with this address. Puts where its
    /// bytes go into `delivery`; they are placed before the next call. Returns false if it is
    /// refused: nothing is placed then.
    pub fn handle_message(
        &mut self,
        delivery: &mut Delivery,
        now: Time,
        from: IpAddr,
        header: &MessageHeader,
    ) -> bool {
        let Some(slot) = self.qps.find(header.dest.get()) else {
            self.counters.direct_receives_refused += 1;
            return false;
        };
        let taken = self.with_qp(slot, now, delivery, |qp, cx| qp.handle_message(cx, from, header));
        taken == Some(true)
    }

    /// What a local peer has made of a message that was handed over. Those of a queue pair come in
    /// order; of others, which it has forgotten since, nothing is expected any more.
    pub fn handle_message_ack(&mut self, now: Time, handed: Handed, ack: MessageAck) {
        if let Some(slot) = self.qps.find(handed.source.get()) {
            let unused = &mut Delivery::default();
            self.with_qp(slot, now, unused, |qp, cx| qp.handle_message_ack(cx, handed, ack));
        }
    }

    /// Whether there are messages without an acknowledgement.
    #[inline]
    pub fn awaits_message_acks(&self) -> bool {
        self.handed_over > 0
    }

    /// The driver has looked for acknowledgements.
    #[inline]
    pub fn note_acks_looked_for(&mut self, now: Time) {
        self.looked_at = now;
    }

    /// When a driver that nobody wakes looks for acknowledgements again: a local peer that has
    /// ended wakes nobody.
    pub(crate) fn message_acks_due(&self) -> Option<Time> {
        self.awaits_message_acks().then(|| self.looked_at + ACK_INTERVAL)
    }

    /// Posted sends of a queue pair that have not completed.
    pub fn sends_under_way(&self, qpn: Qpn) -> u32 {
        self.entry(qpn).map_or(0, |entry| entry.qp.sends_under_way())
    }

    /// Whether sends of a queue pair wait for [`carry_out_held`](Endpoint::carry_out_held).
    pub fn has_held(&self, qpn: Qpn) -> bool {
        self.entry(qpn).is_ok_and(|entry| entry.qp.has_held())
    }

    /// Chooses which sends of a queue pair wait for [`carry_out_held`](Endpoint::carry_out_held).
    /// With [`Holding::Runs`] those that wait become packets, as all later ones do; behind messages
    /// that were handed over they go on waiting.
    ///
    /// # Errors
    /// When the queue pair does not exist.
    pub fn hold_sends(&mut self, now: Time, qpn: Qpn, holding: Holding) -> Result<(), VerbsError> {
        self.on_qp(now, qpn, |qp, _cx| {
            qp.hold_sends(holding);
            Ok(())
        })
    }

    /// What local peers need to know about a queue pair; `address` are the wire's own, by index.
    pub fn qp_descriptor(
        &self,
        qpn: Qpn,
        address: impl Fn(u8) -> Option<IpAddr>,
    ) -> Option<QpDescriptor> {
        let qp = &self.entry(qpn).ok()?.qp;
        let (pd, access, serves, serves_reads) = qp.offers_directly();
        let QpAttr { path, dest_qp, .. } = qp.query();
        let (own, peer) = (address(path.source)?, path.remote.ip());
        Some(QpDescriptor { qpn, dest_qp, pd, own, peer, access, serves, serves_reads })
    }

    /// Queues a receive work request: one of a batch of
    /// [`Device::post_recv`](crate::verbs::device::Device).
    pub fn post_recv(&mut self, now: Time, qpn: Qpn, wr: RecvWr) -> Result<(), VerbsError> {
        self.on_qp(now, qpn, |qp, cx| qp.post_recv(cx, wr))
    }

    /// The oldest completion, if there is one.
    pub fn poll_cq(&mut self, cq: CqId) -> Option<Completion> {
        let (completion, srq_slot) = self.cqs.poll(cq)?;
        if let Some(srq_slot) = srq_slot {
            self.srqs.settle(srq_slot);
        }
        Some(completion)
    }

    /// Whether a completion can be polled.
    pub fn has_completion(&self, cq: CqId) -> bool {
        self.cqs.has_entry(cq)
    }

    /// Whether acknowledgements are all that is to be sent, and none of them reports a loss: they
    /// may wait for the program's reply.
    pub fn owes_only_acks(&self) -> bool {
        let waits = |slot: u32| self.qps.at(slot).is_none_or(|entry| entry.qp.owes_only_ack());
        let mut ready = self.schedule.ready();
        !self.schedule.has_parked()
            && self.outbox.len() == 0
            && ready.len() <= MAX_WAITING_ACKS
            && ready.all(waits)
    }

    // ---- plumbing ------------------------------------------------------------------------------

    fn slot(&self, qpn: Qpn) -> Result<u32, VerbsError> {
        self.qps.find(qpn.get()).ok_or(no_qp(qpn))
    }

    fn entry(&self, qpn: Qpn) -> Result<&QpEntry, VerbsError> {
        self.qps.get(qpn.get()).ok_or(no_qp(qpn))
    }

    /// A verb on a queue pair.
    fn on_qp<T>(
        &mut self,
        now: Time,
        qpn: Qpn,
        verb: impl FnOnce(&mut Qp, &mut Context<'_>) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let slot = self.slot(qpn)?;
        let unused = &mut Delivery::default();
        let done = self.with_qp(slot, now, unused, verb);
        done.unwrap_or(Err(no_qp(qpn)))
    }

    /// Passes an event to a queue pair that may then have something to send.
    fn with_qp<T>(
        &mut self,
        slot: u32,
        now: Time,
        delivery: &mut Delivery,
        event: impl FnOnce(&mut Qp, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let done = self.poll_qp(slot, now, (delivery, &mut None), event)?;
        let entry = self.qps.at_mut(slot)?;
        if !entry.is_ready && entry.qp.wants_to_send() {
            entry.is_ready = true;
            self.schedule.add(slot);
        }
        Some(done)
    }

    /// Runs `event`, then handles what any event may cause: a full completion queue fails the queue
    /// pair, and the deadline may have moved.
    fn poll_qp<T>(
        &mut self,
        slot: u32,
        now: Time,
        (delivery, packet): (&mut Delivery, &mut Option<(Path, Headers)>),
        event: impl FnOnce(&mut Qp, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let entry = self.qps.at_mut(slot)?;
        let mut cx = Context {
            now,
            regions: &mut self.regions,
            cqs: &mut self.cqs,
            srqs: &mut self.srqs,
            events: &mut self.events,
            own: &mut entry.counters,
            all: &mut self.counters,
            pieces: &mut delivery.pieces,
            insert: &mut delivery.insert,
            owed_packets: &mut delivery.owed_packets,
            packet,
            handed_over: &mut self.handed_over,
            cq_overflowed: false,
            seeded: self.seeded,
        };
        let done = event(&mut entry.qp, &mut cx);
        if cx.cq_overflowed {
            entry.qp.fail_fatally(&mut cx);
        }
        entry.qp.notice_drained(&mut cx);
        self.deadlines.set(slot, entry.qp.deadline().map(|(at, _)| at));
        Some(done)
    }
}

fn qpn_layout(config: &EndpointConfig) -> Layout {
    match u32::from(config.qpn_prefix) {
        0 => Layout::new(config.max_qps, QPN_BITS),
        prefix => Layout::new(config.max_qps, PREFIXED_QPN_BITS).with_prefix(prefix),
    }
}

fn no_qp(qpn: Qpn) -> VerbsError {
    VerbsError::NoQp(qpn.get())
}

fn within(wanted: u32, limit: u32, what: &'static str) -> Result<(), VerbsError> {
    if wanted <= limit { Ok(()) } else { Err(VerbsError::TableFull { what, limit }) }
}

/// A placeholder destination for a queue pair that is not connected.
fn nowhere() -> Connect {
    let remote = SocketAddr::from(([0, 0, 0, 0], 0));
    Connect::new(Path::new(remote), Qpn::new(0), Psn::default())
}
